"""Further cases for the self-test: caches of floats, MXFP4, weights not in fragments, FP8 codes.

The bench measures the formats that published models use on Hopper. GPUs without E4M3 support only
caches of floats, and other code reads MXFP4 weights than NVFP4 weights. Tensor cores that multiply
NVFP4 by NVFP4 take weights that lie as in a checkpoint, with linear or swizzled block scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dsv4.bench.cases import fused, gemm, moe, paged, sequence
from dsv4.bench.problem import Case, Draw, Problem
from dsv4.config import ModelConfig
from dsv4.quant.formats import FP8_BLOCK, LINEAR, MXFP4, NVFP4, SWIZZLED

_PLAIN = "plain"


def other_formats(op: str, c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Return the further cases of an operator, which may be none."""
    made = _WEIGHTS.get(op, _CACHES.get(op))
    return iter(()) if made is None else made(c, tokens)


def _relaid(cases: Iterable[Case], *names: str) -> Iterator[Case]:
    """Yield the named cases with the weight, their second argument, in layouts of checkpoints."""
    for case in cases:
        for layout in (LINEAR, SWIZZLED) if case.name in names else ():
            yield replace(case, name=f"{case.name} {layout}", build=_Relaid(case, layout))


@dataclass(frozen=True)
class _Relaid:
    """Builds the problem of a case with the weight in another layout."""

    case: Case
    layout: str

    def __call__(self, draw: Draw) -> Problem:
        problem = self.case.build(draw)
        x, weight, *rest = problem.args
        return replace(problem, args=(x, weight.with_layout(self.layout), *rest))


def _gemm(c: ModelConfig, tokens: int) -> Iterator[Case]:
    matrix = gemm.matrices(c)["down"]
    yield gemm.gemm_case(tokens, matrix, "down mxfp4", "bf16", MXFP4)
    for name, form in (("mxfp4 cast", NVFP4), ("fp8", FP8_BLOCK)):
        yield gemm.gemm_case(tokens, matrix, f"down {name}, codes", "fp8", form, coded=True)
    yield from _relaid(gemm.gemm(c, tokens), "q_a+kv w4a4", "o_a w4a4")


def _gemm_swiglu(c: ModelConfig, tokens: int) -> Iterator[Case]:
    yield gemm.swiglu_case(c, tokens, "gate_up mxfp4", "bf16", MXFP4)
    yield from _relaid(gemm.gemm_swiglu(c, tokens), "gate_up w4a4")


def _grouped_gemm(c: ModelConfig, tokens: int) -> Iterator[Case]:
    shape = (c.hidden_size, c.moe_intermediate_size)
    yield moe.experts_case(c, tokens, "down mxfp4", shape, (), "bf16", MXFP4)
    yield from _relaid(moe.grouped_gemm(c, tokens), "gate_up w4a4")


def _grouped_gemm_swiglu(c: ModelConfig, tokens: int) -> Iterator[Case]:
    yield moe.experts_swiglu_case(c, tokens, "gate_up mxfp4", "bf16", MXFP4)
    yield from _relaid(moe.grouped_gemm_swiglu(c, tokens), "gate_up w4a4")


def _grouped_gemm_swiglu_quantize(c: ModelConfig, tokens: int) -> Iterator[Case]:
    yield from _relaid(moe.grouped_gemm_swiglu_quantize(c, tokens), "gate_up w4a4")


def _compress_write(c: ModelConfig, tokens: int) -> Iterator[Case]:
    return sequence.compress_write_entries(c, tokens, _PLAIN)


def _compress_write_paged(c: ModelConfig, tokens: int) -> Iterator[Case]:
    return paged.in_blocks(_compress_write(c, tokens))


def _sparse_attention(c: ModelConfig, tokens: int) -> Iterator[Case]:
    return sequence.sparse_attention(c, tokens, _PLAIN)


def _write_kv(c: ModelConfig, tokens: int) -> Iterator[Case]:
    return sequence.write_kv(c, tokens, _PLAIN)


def _read_kv(c: ModelConfig, tokens: int) -> Iterator[Case]:
    return sequence.read_kv(c, tokens, _PLAIN)


def _norm_rope_write_kv(c: ModelConfig, tokens: int) -> Iterator[Case]:
    return fused.norm_rope_write_kv(c, tokens, _PLAIN)


def _head_norm_rope_write_kv(c: ModelConfig, tokens: int) -> Iterator[Case]:
    return fused.head_norm_rope_write_kv(c, tokens, _PLAIN)


_WEIGHTS = {
    "gemm": _gemm,
    "gemm_swiglu": _gemm_swiglu,
    "grouped_gemm": _grouped_gemm,
    "grouped_gemm_swiglu": _grouped_gemm_swiglu,
    "grouped_gemm_swiglu_quantize": _grouped_gemm_swiglu_quantize,
}
_CACHES = {
    "compress_write": _compress_write,
    "compress_write_paged": _compress_write_paged,
    "sparse_attention": _sparse_attention,
    "write_kv": _write_kv,
    "read_kv": _read_kv,
    "norm_rope_write_kv": _norm_rope_write_kv,
    "head_norm_rope_write_kv": _head_norm_rope_write_kv,
}
