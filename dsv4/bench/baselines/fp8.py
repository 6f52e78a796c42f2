"""GEMMs with FP8 activations: this package's bfloat16 kernel, and FP8 GEMMs of libraries.

Activations are FP8 before the timed call, except where a line says otherwise. Names with "rate
only" are no equals of the operator. Written for sgl-deep-gemm 0.2.5 and humming-kernels 0.1.19:

* ``this package (bf16 activations)`` multiplies the same weight with bfloat16 activations.
* ``torch._scaled_mm`` has one scale for each operand, which is 1 here, and cuBLAS's fast sums.
* DeepGEMM (package ``sgl-deep-gemm`` or ``deep_gemm``) has activation scales by token and 128
  columns and weight scales by 128 x 128. FP8 weights have these; those of NVFP4 weights are made
  by rounding the weight, so only the rate is comparable.
* Humming multiplies MXFP4 weights with FP8 activations, which it rounds itself in the timed call,
  with one scale for a token. It is given scales of an NVFP4 weight that was cast from MXFP4, and no
  global scale.

DeepGEMM and Humming are compared with the product of the operands that they are given. Why one has
no time is always said in rows with FP8 activations (``unnamed``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsv4 import ops
from dsv4.bench.baselines._prepare import Baseline, Call, FromLibrary, Table, attempt, refuse
from dsv4.bench.baselines.packed import ends, once, require_close
from dsv4.bench.problem import Problem
from dsv4.ops.gemm import GemmArgs
from dsv4.quant.exact_fp8 import scale_exponents, to_e4m3
from dsv4.quant.formats import FP8_BLOCK, FP8_TOKEN, LINEAR, NVFP4, QuantizedTensor, format_named

OWN = "this package (bf16 activations)"
SCALED_MM = "torch._scaled_mm (rate only: one scale for each operand)"
DEEP_GEMM = "DeepGEMM (FP8 weights)"
ROUNDED_DEEP_GEMM = "DeepGEMM (rate only: weights rounded to FP8 blocks)"
HUMMING = "Humming (rate only: FP8 activations by token)"
SLOW = (HUMMING,)
FP8_ROUNDING = 0.05  # error of a product of rows in FP8 over its norm; half a unit is 0.036
_TMA_BYTES = 16


def takes_fp8(problem: Problem) -> bool:
    """Return whether a problem's GEMM has FP8 activations: codes, or values that it rounds."""
    x = problem.args[0] if problem.args else None
    coded = isinstance(x, QuantizedTensor) and x.format == FP8_TOKEN
    return coded or problem.kwargs.get("activation") == "fp8"


def unnamed(op: str, problem: Problem, refused: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons that a row says although nobody asked for these baselines by name."""
    known = BASELINES.get(op, {}) if takes_fp8(problem) else {}
    return {
        name: why for name, why in refused.items() if name in known and _fits(known[name], problem)
    }


def _fits(baseline: Baseline, problem: Problem) -> bool:
    """Return whether a baseline is for weights of a problem's format."""
    return not isinstance(baseline, ForFp8) or baseline.takes(problem)


@dataclass(frozen=True)
class ForFp8:
    """A baseline that is asked only about GEMMs with FP8 activations.

    Attributes:
        prepare: Takes the module and the operator's arguments, as of ``FromLibrary``.
        module: The library.
        weight: Name of the format of weights that it takes.
    """

    prepare: Callable[..., Call]
    module: str
    weight: str | None = None

    def __call__(self, problem: Problem) -> Call | None:
        """The prepared call, or None."""
        if not takes_fp8(problem):
            refuse("the activations are not FP8")
            return None
        if not self.takes(problem):
            refuse(f"the weight is in {problem.args[1].format.name!r}, wanted {self.weight!r}")
            return None
        return FromLibrary(self.module, self.prepare)(problem)

    def takes(self, problem: Problem) -> bool:
        """Return whether it is for weights of a problem's format."""
        return self.weight in (None, problem.args[1].format.name)


def own(problem: Problem) -> Call | None:
    """Multiply with bfloat16 activations by this package's choice of kernels."""
    if not takes_fp8(problem):
        refuse("the activations are not FP8")
        return None
    x, *rest = problem.args
    kwargs = {name: value for name, value in problem.kwargs.items() if name != "result_layout"}
    if isinstance(x, QuantizedTensor):
        x = ops.dequantize(x, torch.bfloat16, backend="reference")
    function = _WITHOUT_CODES.get(problem.function, problem.function)
    plain = dataclasses.replace(
        problem, function=function, args=(x, *rest), kwargs={**kwargs, "activation": "bf16"}
    )
    return attempt(lambda: plain.run, OWN)


def weight_of(args: GemmArgs) -> QuantizedTensor:
    """Return the weight of a GEMM."""
    parts = tuple(args.segments)
    known, scale = format_named(args.format), args.global_scale
    return QuantizedTensor(
        args.codes, args.scales, scale, known, args.layout, parts, args.row_exponent
    )


def codes_of(args: GemmArgs) -> QuantizedTensor:
    """Return the activations in FP8, columns in their order."""
    if args.groups != 1:
        raise ValueError(f"{args.groups} groups")
    if args.x_scales is None:
        return ops.quantize(args.x, FP8_TOKEN)
    return QuantizedTensor(args.x, args.x_scales, None, FP8_TOKEN, args.x_layout).with_layout(
        LINEAR
    )


def _scaled_mm(library: Any, args: GemmArgs) -> Call:
    x, weight = codes_of(args).codes, weight_of(args)
    if weight.format == FP8_BLOCK:
        codes = weight.codes
    else:
        codes = once(args.codes, "E4M3", lambda: to_e4m3(weight))
    scale = torch.ones((), device=x.device)
    kind = {"scale_a": scale, "scale_b": scale, "out_dtype": args.out_dtype, "use_fast_accum": True}
    return lambda: library._scaled_mm(x, codes.T, **kind)


def _deep_gemm(library: Any, args: GemmArgs) -> Call:
    weight = weight_of(args)
    if weight.format == NVFP4:
        weight = once(args.codes, "FP8 blocks", lambda: rounded_blocks(weight))
    return deep_gemm(library, codes_of(args), weight)


def rounded_blocks(weight: QuantizedTensor) -> QuantizedTensor:
    """Round a weight to FP8 with scales by 128 x 128."""
    dense = ops.dequantize(weight, torch.bfloat16, backend="reference")
    return ops.quantize(dense, FP8_BLOCK)


def deep_gemm(library: Any, x: QuantizedTensor, weight: QuantizedTensor) -> Call:
    """Return DeepGEMM's call on ``"fp8_token"`` ``[T, K]`` and an FP8 weight ``[N, K]``."""
    rows, columns = weight.shape
    if columns % FP8_TOKEN.block[1]:
        raise ValueError(f"K is {columns}, wanted a multiple of {FP8_TOKEN.block[1]}")
    left = (x.codes, columns_first(x.scales.float()))
    right = (weight.codes, weight.scales.float())
    out = torch.empty((len(x.codes), rows), dtype=torch.bfloat16, device=x.device)

    def call() -> torch.Tensor:
        library.fp8_gemm_nt(left, right, out)
        return out

    call()
    values = ops.dequantize(_ends(x), torch.float32, backend="reference")
    require_close(ends(out), values @ ops.dequantize(weight, backend="reference").T)
    return call


def columns_first(scales: torch.Tensor) -> torch.Tensor:
    """Re-lay scales ``[T, K / 128]`` as DeepGEMM's TMA copies read them, so that it need not.

    Tokens are adjacent, and a column begins at a multiple of 16 bytes.
    """
    tokens, columns = scales.shape
    step = _TMA_BYTES // scales.element_size()
    padded = scales.new_zeros((columns, -(-tokens // step) * step))
    padded[:, :tokens] = scales.T
    return padded.T[:tokens]


def _humming(library: Any, args: GemmArgs) -> Call:
    weight, x = weight_of(args), args.x
    if args.x_scales is not None:
        x = ops.dequantize(codes_of(args), torch.bfloat16, backend="reference")
    multiply = once(args.codes, "Humming of FP8", lambda: humming_layer(library, weight))
    sample = ends(x).float()
    unscaled = dataclasses.replace(weight, global_scale=torch.ones(1, device=x.device), segments=())
    dense = ops.dequantize(unscaled, torch.float32, backend="reference")
    require_close(ends(multiply(x)), sample @ dense.T, FP8_ROUNDING)
    return lambda: multiply(x)


def humming_layer(library: Any, weight: QuantizedTensor, experts: int | None = None) -> Any:
    """Return Humming's layer of an NVFP4 weight that was cast from MXFP4, without global scale."""
    layer = library.HummingLayer(
        shape_n=weight.rows,
        shape_k=weight.columns,
        num_experts=experts,
        weight_config={"quant_method": "mxfp4"},
        input_config={"quant_method": "humming", "dtype": "float8e4m3"},
        torch_dtype=torch.bfloat16,
    ).to(weight.device)
    layer.load_from_tensors({"weight": weight.with_layout(LINEAR).codes, **mxfp4_scales(weight)})
    layer.transform()
    return layer


def mxfp4_scales(weight: QuantizedTensor) -> dict[str, torch.Tensor]:
    """Return the E8M0 bytes, by 32 columns, of scales that were cast from MXFP4.

    Raises:
        ValueError: if they were not: two blocks of 16 columns have other scales, or one that is no
            power of two.
    """
    scales = weight.with_layout(LINEAR).scales.view(torch.uint8)
    exponents = scale_exponents(scales, LINEAR)
    first, second = exponents[..., ::2], exponents[..., 1::2]
    if not torch.equal(first, second) or bool((first == 127).any()):
        raise ValueError("the scales of the weight were not cast from MXFP4")
    return {"weight_scale": (first + 127).to(torch.uint8)}


def _ends(x: QuantizedTensor) -> QuantizedTensor:
    """Return the rows of codes that are compared."""
    return dataclasses.replace(x, codes=ends(x.codes), scales=ends(x.scales))


_WITHOUT_CODES: dict[Callable[..., Any], Callable[..., Any]] = {
    ops.grouped_gemm_swiglu_fp8: ops.grouped_gemm_swiglu
}
_GEMMS = ("gemm_swiglu", "grouped_gemm", "grouped_gemm_swiglu", "grouped_gemm_swiglu_fp8")
BASELINES: Table = {
    "gemm": {
        OWN: own,
        SCALED_MM: ForFp8(_scaled_mm, "torch"),
        DEEP_GEMM: ForFp8(_deep_gemm, "deep_gemm", FP8_BLOCK.name),
        ROUNDED_DEEP_GEMM: ForFp8(_deep_gemm, "deep_gemm", NVFP4.name),
        HUMMING: ForFp8(_humming, "humming.layer", NVFP4.name),
    },
    **{op: {OWN: own} for op in _GEMMS},
}
