"""GEMM of activations with a quantised weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch

from dsv4.ops import _check
from dsv4.ops._library import define
from dsv4.ops._plans import planned
from dsv4.ops.quantize import positive
from dsv4.quant.formats import FORMATS, FP8_TOKEN, LINEAR, QuantizedTensor

ACTIVATIONS = ("bf16", "nvfp4", "fp8")


class GemmArgs(NamedTuple):
    """Arguments of ``gemm``: GEMM of activations with a quantised weight.

    Attributes:
        x: ``[T, K]``, or ``[T, G, K]`` with G > 1 groups; bfloat16, float16, float32 or float64, or
            FP8 codes, float8_e4m3fn.
        codes: ``[N, K/2]`` uint8 (NVFP4, MXFP4) or ``[N, K]`` float8_e4m3fn, of all groups.
        scales: Block scales in the weight's layout.
        global_scale: float32 ``[1]`` or one per segment or row; None where the format has none.
        row_exponent: int8 ``[N]`` of a weight that is exact in E4M3, else None; changes no value.
        segments: Rows of each part of a fused weight; empty: one part.
        format: Name of the weight's format.
        layout: Layout of the weight's codes and block scales.
        activation: ``"bf16"``, or ``"nvfp4"`` or ``"fp8"``: ``x`` is quantised first.
        input_scale: float32 ``[1]``, static global scale of quantised ``x``, or None.
        groups: G; the weight's rows are the groups' one after another.
        out_dtype: Dtype of the result, floating.
        x_scales: float8_e8m0fnu ``[T, ceil(K/128)]`` or ``[T, G, ceil(K/128)]``, block scales where
            ``x`` is codes, else None.
        x_layout: Order of the columns of codes, ``"linear"`` of others.
    """

    x: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None
    row_exponent: torch.Tensor | None
    segments: Sequence[int]
    format: str
    layout: str
    activation: str
    input_scale: torch.Tensor | None
    groups: int
    out_dtype: torch.dtype
    x_scales: torch.Tensor | None = None
    x_layout: str = LINEAR


def _fake(args: GemmArgs) -> torch.Tensor:
    return args.x.new_empty(
        (*args.x.shape[:-1], args.codes.shape[0] // args.groups), dtype=args.out_dtype
    )


_gemm = define("gemm", GemmArgs, _fake)


@planned
def gemm(
    x: torch.Tensor | QuantizedTensor,
    weight: QuantizedTensor,
    *,
    activation: str = "bf16",
    input_scale: torch.Tensor | None = None,
    groups: int = 1,
    out_dtype: torch.dtype | None = None,
    reserve_sms: int = 0,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute ``x @ weight.T``, or one such GEMM per group (specification, sections 4.4 and 11).

    The operands are ``code * block scale``, accumulated in float32 (float64 for float64 ``x``).
    Global scales multiply the sum: with ``activation="nvfp4"`` as ``alpha = input_scale *
    global_scale``, per row of the weight, so the parts of a fused matrix keep their own. The last
    step is one rounding to ``out_dtype``. A row of ``x`` that holds a non-finite value gives NaN,
    and only that row does.

    On a GPU with TF32 enabled in torch, torch's GEMM rounds float32 activations; bfloat16 and
    quantised operands fit TF32 exactly.

    Args:
        x: ``[..., K]``, or ``[..., G, K]`` with ``groups`` = G > 1. bfloat16, float16, float32 or
            float64; or ``"fp8_token"``, equal to values that the GEMM rounds itself
            (``activation`` is ``"bf16"`` then). FP8 tensor cores take codes in the layout that
            ``dsv4.ops.fp8_token.code_layout`` names; codes in another layout are multiplied as
            bfloat16.
        weight: ``[N, K]``, or ``[G * N, K]`` with the groups' rows one after another.
        activation: ``"bf16"`` takes ``x`` as it is. ``"nvfp4"`` quantises ``x`` first, with
            ``input_scale`` (static) or, without it, with one dynamic global scale per row.
            ``"fp8"`` rounds ``x`` to FP8 first, each row by 128 columns (``quantize`` with
            ``"fp8_token"``; specification, section 11.7).
        input_scale: float32 ``[]`` or ``[1]``, finite and above 0; only with ``"nvfp4"``. Values on
            other devices than the CPU are not checked; an invalid one gives NaN.
        groups: G.
        out_dtype: Floating; if None ``x.dtype``, bfloat16 for codes.
        reserve_sms: SMs to leave to work on other streams. A hint for implementations with
            persistent CTAs (``Implementation.reserves_sms``); no result depends on it. It has no
            effect in calls that torch sees (traced, profiled), because the registered operator does
            not have this argument.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[..., N]``, or ``[..., G, N]``.

    Raises:
        TypeError: if a dtype is not as stated or ``weight`` is not a ``QuantizedTensor``.
        ValueError: if shapes do not fit, a name is unknown, tensors are on different devices,
            codes are in another format than ``"fp8_token"`` or beside an ``activation``, or
            ``input_scale`` is not finite and above 0 or is given with ``"bf16"``.
    """
    scales, x_layout = None, LINEAR
    if not isinstance(x, torch.Tensor):
        check_codes("gemm", x, activation)
        scales, x_layout, x = x.scales, x.layout, x.codes
    coded = scales is not None
    input_scale = check_gemm(
        "gemm", x, weight, activation, input_scale, out_dtype, groups=groups, coded=coded
    )
    own = 2 if groups > 1 else 1  # axes of a token
    flat = x if x.dim() == own + 1 else x.reshape(math.prod(x.shape[:-own]), *x.shape[-own:])
    if scales is not None and flat is not x:
        scales = scales.reshape(*flat.shape[:-1], scales.shape[-1])
    if out_dtype is None:
        out_dtype = torch.bfloat16 if coded else x.dtype
    args = GemmArgs(
        flat,
        weight.codes,
        weight.scales,
        weight.global_scale,
        weight.row_exponent,
        list(weight.segments),
        weight.format.name,
        weight.layout,
        activation,
        input_scale,
        groups,
        out_dtype,
        scales,
        x_layout,
    )
    out = _gemm(args, backend, reserve_sms=reserve_sms)
    return out if flat is x else out.reshape(*x.shape[:-1], weight.rows // groups)


def check_codes(op: str, x: QuantizedTensor, activation: str) -> None:
    """Raise ValueError unless a quantised input is in FP8 by tokens and is not quantised again."""
    if not isinstance(x, QuantizedTensor):
        raise TypeError(f"{op}: x is {type(x).__name__}, wanted a tensor or a QuantizedTensor")
    if x.format != FP8_TOKEN:
        raise ValueError(f"{op}: x is in {x.format.name!r}, wanted {FP8_TOKEN.name!r} or values")
    if activation != "bf16":
        raise ValueError(f"{op}: x is quantised, but activation is {activation!r}, wanted 'bf16'")
    if not torch.compiler.is_compiling():
        x.validate()


def check_gemm(
    op: str,
    x: torch.Tensor,
    weight: QuantizedTensor,
    activation: str,
    input_scale: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    *,
    groups: int = 1,
    coded: bool = False,
) -> torch.Tensor | None:
    """Check the arguments of ``gemm``; return the scale as operators take it.

    Args:
        op: Name of the operator, for messages.
        x: See ``gemm``; codes if ``coded``.
        weight: See ``gemm``.
        activation: See ``gemm``.
        input_scale: See ``gemm``.
        out_dtype: See ``gemm``.
        groups: See ``gemm``.
        coded: Whether ``x`` is codes that ``check_codes`` has checked.
    """
    if not isinstance(weight, QuantizedTensor):
        raise TypeError(f"{op}: weight is {type(weight).__name__}, wanted a QuantizedTensor")
    if weight.format.name == FP8_TOKEN.name:
        refuse_format(op)
    if input_scale is not None:
        input_scale = check_input_scale(op, activation, input_scale)
    _check.tensors(
        op,
        ("x", x, (x.dtype,) if coded else _check.FLOATS, None),
        ("weight", weight.codes, (weight.codes.dtype,), None),
        ("input_scale", input_scale, (torch.float32,), None),
    )
    if activation not in ACTIVATIONS or (out_dtype is not None and out_dtype not in _check.FLOATS):
        check_options(op, activation, out_dtype)
    if not torch.compiler.is_compiling():
        shape = weight.valid_shape
        if len(shape) != 2 or groups < 1 or shape[0] % groups or not x.dim():
            _refuse_shapes(op, x, shape, groups)
        if groups > 1 and tuple(x.shape[-2:-1]) != (groups,):
            _refuse_shapes(op, x, shape, groups)
        columns = x.shape[-1]
        if columns != shape[1] or (activation == "nvfp4" and columns % 16):
            check_columns(op, columns, shape[1], activation)
    return input_scale


def refuse_format(op: str) -> NoReturn:
    """Raise ValueError: the weight has the format of activations."""
    raise ValueError(
        f"{op}: weight is in {FP8_TOKEN.name!r}, which is for activations, wanted one of "
        f"{', '.join(map(repr, FORMATS))}"
    )


def check_options(op: str, activation: str, out_dtype: torch.dtype | None) -> None:
    """Raise unless ``activation`` is known and ``out_dtype`` floating, or None."""
    if activation not in ACTIVATIONS:
        _check.one_of(op, "activation", activation, ACTIVATIONS)
    if out_dtype is not None and out_dtype not in _check.FLOATS:
        raise TypeError(f"{op}: out_dtype is {out_dtype}, wanted a float of 16 bits or more")


def check_columns(op: str, columns: int, weight_columns: int, activation: str) -> None:
    """Raise ValueError unless x fits the weight and, if it is to be quantised, NVFP4 blocks."""
    if columns != weight_columns:
        raise ValueError(f"{op}: x has {columns} columns, wanted {weight_columns} as in the weight")
    if activation == "nvfp4" and columns % 16:
        raise ValueError(f"{op}: x has {columns} columns, wanted a multiple of 16 for NVFP4")


def check_input_scale(op: str, activation: str, input_scale: torch.Tensor) -> torch.Tensor:
    """Check the static scale of quantised activations; return it with shape ``[1]``."""
    if activation != "nvfp4":
        raise ValueError(f"{op}: input_scale is given, but activation is {activation!r}")
    _check.dtype(op, "input_scale", input_scale, torch.float32)
    if input_scale.numel() != 1:
        raise ValueError(f"{op}: input_scale has shape {list(input_scale.shape)}, wanted [1]")
    positive(f"{op}: input_scale", input_scale)
    return input_scale.reshape(1)


def _refuse_shapes(op: str, x: torch.Tensor, shape: Sequence[int], groups: int) -> NoReturn:
    """Raise ValueError for shapes that do not fit; ``shape`` is the weight's."""
    if len(shape) != 2:
        raise ValueError(f"{op}: weight has shape {list(shape)}, wanted [N, K]")
    if groups < 1 or shape[0] % groups:
        raise ValueError(f"{op}: groups is {groups}, wanted a divisor of {shape[0]} rows")
    dims = f"[..., {groups}, K]" if groups > 1 else "[..., K]"
    raise ValueError(f"{op}: x has shape {list(x.shape)}, wanted {dims}")
