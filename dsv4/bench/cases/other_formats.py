"""Further cases for the self-test: caches of floats, weights in MXFP4, and inputs of FP8 codes.

The bench measures the formats that published models use on Hopper. GPUs without E4M3 support only
caches of floats, and other code reads MXFP4 weights than NVFP4 weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4.bench.cases import fused, gemm, moe, paged, sequence
from dsv4.bench.problem import Case
from dsv4.config import ModelConfig
from dsv4.quant.formats import FP8_BLOCK, MXFP4, NVFP4

_PLAIN = "plain"


def other_formats(op: str, c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Return the further cases of an operator, which may be none."""
    made = _WEIGHTS.get(op, _CACHES.get(op))
    return iter(()) if made is None else made(c, tokens)


def _gemm(c: ModelConfig, tokens: int) -> Iterator[Case]:
    matrix = gemm.matrices(c)["down"]
    yield gemm.gemm_case(tokens, matrix, "down mxfp4", "bf16", MXFP4)
    for name, form in (("mxfp4 cast", NVFP4), ("fp8", FP8_BLOCK)):
        yield gemm.gemm_case(tokens, matrix, f"down {name}, codes", "fp8", form, coded=True)


def _gemm_swiglu(c: ModelConfig, tokens: int) -> Iterator[Case]:
    yield gemm.swiglu_case(c, tokens, "gate_up mxfp4", "bf16", MXFP4)


def _grouped_gemm(c: ModelConfig, tokens: int) -> Iterator[Case]:
    shape = (c.hidden_size, c.moe_intermediate_size)
    yield moe.experts_case(c, tokens, "down mxfp4", shape, (), "bf16", MXFP4)


def _grouped_gemm_swiglu(c: ModelConfig, tokens: int) -> Iterator[Case]:
    yield moe.experts_swiglu_case(c, tokens, "gate_up mxfp4", "bf16", MXFP4)


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


_WEIGHTS = {
    "gemm": _gemm,
    "gemm_swiglu": _gemm_swiglu,
    "grouped_gemm": _grouped_gemm,
    "grouped_gemm_swiglu": _grouped_gemm_swiglu,
}
_CACHES = {
    "compress_write": _compress_write,
    "compress_write_paged": _compress_write_paged,
    "sparse_attention": _sparse_attention,
    "write_kv": _write_kv,
    "read_kv": _read_kv,
    "norm_rope_write_kv": _norm_rope_write_kv,
}
