"""Rotary position embedding: tables, rotation of the last dimensions, and its inverse."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._library import define
from dsv4.ops._plans import planned
from dsv4.ops.quantize import empty_nvfp4, given_scale
from dsv4.quant.formats import LINEAR, NVFP4, QuantizedTensor, check_scale_layout

if TYPE_CHECKING:
    from dsv4.config import RopeParameters


class RopeTablesArgs(NamedTuple):
    """Arguments of ``rope_tables``: cosines and sines.

    Attributes:
        positions: ``[...]`` int32 or int64.
        inv_freq: float32 ``[R/2]``.
    """

    positions: torch.Tensor
    inv_freq: torch.Tensor


class RopeArgs(NamedTuple):
    """Arguments of ``rope``: rotation of the last R dims.

    Attributes:
        x: ``[..., D]`` floating.
        cos: ``[..., R/2]`` floating, broadcast against ``x``.
        sin: Like ``cos``.
        inverse: Whether to rotate by the opposite angle.
    """

    x: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    inverse: bool


class RopeQuantizeArgs(NamedTuple):
    """Arguments of ``rope_quantize``: rotation, then NVFP4 rows of joined heads.

    Attributes:
        x: ``[T, h, D]`` floating.
        cos: ``[T, R/2]``, floating, see ``rope_tables``.
        sin: Like ``cos``.
        inverse: Whether to rotate by the opposite angle.
        groups: Rows per token.
        global_scale: float32 global scale, ``[*batch, 1]`` or ``[*batch, N]``; None: computed.
        scaling: ``"token"`` or ``"static"``.
        layout: Layout of the block scales.
    """

    x: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    inverse: bool
    groups: int
    global_scale: torch.Tensor | None
    scaling: str
    layout: str


def _fake(args: RopeArgs) -> torch.Tensor:
    return torch.empty_like(args.x, memory_format=torch.contiguous_format)


def _fake_tables(args: RopeTablesArgs) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*args.positions.shape, args.inv_freq.shape[0])
    return args.inv_freq.new_empty(shape), args.inv_freq.new_empty(shape)


def _fake_quantize(args: RopeQuantizeArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, heads, dims = args.x.shape
    grouped = args.x.new_empty((tokens, args.groups, heads * dims // args.groups))
    return empty_nvfp4(grouped, args.global_scale, args.scaling, args.layout)


_rope_tables = define("rope_tables", RopeTablesArgs, _fake_tables)
_rope = define("rope", RopeArgs, _fake)
_rope_quantize = define("rope_quantize", RopeQuantizeArgs, _fake_quantize)


@planned
def rope_tables(
    positions: torch.Tensor,
    parameters: RopeParameters | torch.Tensor,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cos and sin of ``position * inv_freq`` (specification, section 4.3).

    Always float32, and without an amplitude factor: cos^2 + sin^2 = 1 with and without YaRN.
    Position, inverse frequency and angle are each rounded to float32, which is part of the
    definition: positions are exact up to 2^24. cos and sin are within 2^-23 of those of the angle.

    Args:
        positions: ``[...]``, int32 or int64, absolute positions.
        parameters: A layer type's ``dsv4.config.RopeParameters``, or its inverse frequencies as a
            float32 tensor ``[R/2]`` on the device of ``positions``. Give the tensor inside a
            CUDA-graph capture, where frequencies cannot be copied from the host.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(cos, sin)``, each float32 ``[..., R/2]`` on the device of ``positions``.

    Raises:
        TypeError: if ``positions`` is not int32 or int64, or given frequencies are not float32.
        ValueError: if given frequencies are not ``[R/2]`` or are on another device.
    """
    tensor = parameters if isinstance(parameters, torch.Tensor) else None
    _check.tensors(
        "rope_tables",
        ("positions", positions, _check.INTEGERS, None),
        ("parameters", tensor, (torch.float32,), ("R/2",)),
    )
    if isinstance(parameters, torch.Tensor):
        frequencies = parameters
    else:
        frequencies = torch.as_tensor(parameters.inv_freq(), dtype=torch.float32, device="cpu").to(
            positions.device
        )
    return _rope_tables(RopeTablesArgs(positions, frequencies), backend)


@planned
def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    inverse: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Rotate the last R dimensions in interleaved pairs (specification, section 4.3).

    With ``(a, b) = (x[D-R+2i], x[D-R+2i+1])`` the result is ``(a cos_i - b sin_i,
    b cos_i + a sin_i)``; ``inverse`` rotates by the opposite angle (``-sin``), as the attention
    output needs (specification, section 4.2, step 8). In float32 (float64 for float64 input), one
    rounding at the end. The first D-R dimensions are copied bit for bit.

    Args:
        x: ``[..., D]``, bfloat16, float16, float32 or float64.
        cos: ``[..., R/2]``, broadcast against the leading dimensions of ``x``: with heads in
            ``x [T, h, D]`` give ``cos [T, 1, R/2]``. R is taken from this argument.
        sin: Like ``cos``.
        inverse: Rotate by the opposite angle.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[..., D]`` in ``x.dtype``, contiguous.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if ``cos`` and ``sin`` differ in shape, do not broadcast against ``x`` or are
            wider than it, or a tensor is on another device.
    """
    _check.tensors(
        "rope",
        ("x", x, _check.FLOATS, None),
        ("cos", cos, _check.FLOATS, None),
        ("sin", sin, _check.FLOATS, cos.shape),
    )
    if not torch.compiler.is_compiling():
        _check_tables(x, cos)
    return _rope(RopeArgs(x, cos, sin, inverse), backend)


@planned
def rope_quantize(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    inverse: bool,
    groups: int,
    global_scale: torch.Tensor | float | None = None,
    scaling: str = "token",
    layout: str = LINEAR,
    backend: str = "auto",
) -> QuantizedTensor:
    """Rotate and quantise attention's result for the grouped projection (steps 8 and 9).

    ``rope(x, cos, sin, inverse=inverse)`` with the same angles for all heads of a token, rounded to
    ``x.dtype``; then the heads are joined, cut into ``groups`` rows per token and quantised to
    NVFP4. The bits are those of the two operators of the same implementation, one after the other.

    Args:
        x: ``[T, h, D]``, bfloat16, float16, float32 or float64. ``h D / groups`` is a multiple of
            16.
        cos: ``[T, R/2]``, see ``rope_tables``. R is taken from this argument.
        sin: Like ``cos``.
        inverse: Rotate by the opposite angle, as the attention output needs.
        groups: Rows per token, ``o_groups``.
        global_scale: See ``quantize``; required for ``"static"``, an error for ``"token"``.
        scaling: ``"static"``, or ``"token"`` for one dynamic scale per token and group.
        layout: Layout of the block scales, ``"linear"`` or ``"swizzled_128x4"``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        NVFP4 ``[T, groups, h D / groups]``.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if a shape, ``groups`` or a name is wrong, and as ``quantize`` does.
    """
    op = "rope_quantize"
    _check.tensors(
        op,
        ("x", x, _check.FLOATS, ("T", "h", "D")),
        ("cos", cos, _check.FLOATS, ("T", "R/2")),
        ("sin", sin, _check.FLOATS, ("T", "R/2")),
    )
    _check.one_of(op, "scaling", scaling, ("static", "token"))
    check_scale_layout(NVFP4, layout)
    if not torch.compiler.is_compiling():
        _check_groups(x, cos, groups)
    scale = given_scale(op, x.new_empty((x.shape[0], groups, 0)), global_scale, scaling)
    codes, scales, total = _rope_quantize(
        RopeQuantizeArgs(x, cos, sin, inverse, groups, scale, scaling, layout), backend
    )
    return QuantizedTensor(codes, scales, total, NVFP4, layout)


def _check_groups(x: torch.Tensor, cos: torch.Tensor, groups: int) -> None:
    _, heads, dims = x.shape
    if 2 * cos.shape[1] > dims:
        raise ValueError(
            f"rope_quantize: cos has shape {list(cos.shape)}, wanted [{x.shape[0]}, R/2] with "
            f"R <= {dims} (dims of x)"
        )
    width = heads * dims
    if groups < 1 or width == 0 or width % (16 * groups):
        raise ValueError(
            f"rope_quantize: groups is {groups} for x {list(x.shape)}, wanted {width} columns in "
            "equal rows of a multiple of 16"
        )


def _check_tables(x: torch.Tensor, cos: torch.Tensor) -> None:
    if cos.ndim == 0 or x.ndim == 0 or 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"rope: cos has shape {list(cos.shape)} for x {list(x.shape)}, "
            f"wanted [..., R/2] with R <= the last size of x"
        )
    lead, over = tuple(cos.shape[:-1]), tuple(x.shape[:-1])
    aligned = over[len(over) - len(lead) :] if len(lead) <= len(over) else None
    if aligned is None or any(a not in (1, b) for a, b in zip(lead, aligned, strict=True)):
        raise ValueError(
            f"rope: cos has leading sizes {list(lead)}, wanted sizes that broadcast against "
            f"{list(over)} of x"
        )
