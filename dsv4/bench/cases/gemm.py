"""Problem sizes of quantisation and of dense GEMMs; see ``dsv4.bench.cases``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch

from dsv4 import ops
from dsv4.bench.checks import budgets, fused_judges
from dsv4.bench.checks.judge import bitwise, within
from dsv4.bench.problem import Case, Draw, Problem, UsageError, nbytes
from dsv4.config import ModelConfig
from dsv4.ops.fp8_token import code_layout
from dsv4.quant import fragments
from dsv4.quant.exact_fp8 import with_row_exponent
from dsv4.quant.formats import (
    FP8_BLOCK,
    FRAGMENTS,
    NVFP4,
    SWIZZLED,
    Format,
    QuantizedTensor,
)

# Names of cases by activation: what follows the projection's.
ACTIVATION_CASES = (("", "bf16"), (" w4a4", "nvfp4"), (" w4a8 (mxfp4 cast)", "fp8"))
Matrix = tuple[int, int, int, tuple[int, ...]]  # rows per group, columns, groups, segments
# Weights of one matrix by seed: the last one, at whatever token counts.
_last_weights: dict[tuple[object, ...], dict[int, QuantizedTensor]] = {}


def quantize(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Rows of hidden size in each format.

    NVFP4 has one global scale per token and scales as tensor cores read them; FP8 has tiles of
    128 x 128, or 128 columns of a token.
    """

    def build(draw: Draw, kwargs: dict[str, object], outputs: tuple[str, ...]) -> Problem:
        x = draw.normal(tokens, c.hidden_size)
        return Problem(ops.quantize, (x,), kwargs, bitwise(*outputs), nbytes(x))

    parts = ("codes", "scales")
    for name, kwargs, outputs in (
        ("nvfp4", {"scaling": "token", "layout": SWIZZLED}, (*parts, "global scale")),
        ("mxfp4", {}, parts),
        ("fp8_block", {}, parts),
        ("fp8_token", {}, parts),
    ):
        made = functools.partial(build, kwargs={"format": name, **kwargs}, outputs=outputs)
        yield Case("quantize", name, {"N": tokens, "K": c.hidden_size}, tokens, made)


def dequantize(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """One expert's down projection to bfloat16; no tokens are involved."""
    rows, columns = c.hidden_size, c.moe_intermediate_size

    def build(draw: Draw) -> Problem:
        q = draw.quantized(rows, columns)
        judge = within(budgets.dequantized)
        return Problem(ops.dequantize, (q,), {"dtype": torch.bfloat16}, judge, nbytes(q))

    yield Case("dequantize", "down", {"N": rows, "K": columns}, tokens, build)


def own_gemm(rows: int, columns: int, tokens: int, groups: int = 1) -> list[Case]:
    """A GEMM of any size, with the kinds of operands that ``gemm`` has.

    Args:
        rows: N of the weight.
        columns: K, a multiple of 16.
        tokens: M.
        groups: Groups, each of which has ``rows`` rows and its own columns of X.

    Raises:
        UsageError: if a size is not allowed.
    """
    if rows < 1:
        raise UsageError(f"N is {rows}, wanted at least 1")
    if columns < 1 or columns % 16:
        raise UsageError(f"K is {columns}, wanted a multiple of 16")
    matrix: Matrix = (rows, columns, groups, ())
    return [
        gemm_case(tokens, matrix, name, activation, format)
        for name, activation, format in (
            ("own", "bf16", NVFP4),
            ("own w4a4", "nvfp4", NVFP4),
            ("own fp8", "bf16", FP8_BLOCK),
            ("own w4a8 (mxfp4 cast)", "fp8", NVFP4),
            ("own w8a8", "fp8", FP8_BLOCK),
        )
    ]


def matrices(c: ModelConfig) -> dict[str, Matrix]:
    """Projections of a layer by name: rows per group, columns, groups, segments.

    Shapes: specification, section 12.
    """
    head, hidden, inner = c.head_dim, c.hidden_size, c.moe_intermediate_size
    index = c.index_head_dim
    return {
        "q_a+kv": (c.q_lora_rank + head, hidden, 1, (c.q_lora_rank, head)),
        "q_b": (c.num_attention_heads * head, c.q_lora_rank, 1, ()),
        "o_a": (c.o_lora_rank, c.heads_per_group * head, c.o_groups, ()),
        "o_b": (hidden, c.o_groups * c.o_lora_rank, 1, ()),
        "csa_kv+gate": (4 * head, hidden, 1, (2 * head, 2 * head)),
        "hca_kv+gate": (2 * head, hidden, 1, (head, head)),
        "indexer_q": (c.index_n_heads * index, c.q_lora_rank, 1, ()),
        "indexer_kv+gate": (4 * index, hidden, 1, (2 * index, 2 * index)),
        "indexer_weights": (c.index_n_heads, hidden, 1, ()),
        "gate_up": (2 * inner, hidden, 1, (inner, inner)),
        "down": (hidden, inner, 1, ()),
    }


def gemm(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Cases of every projection in NVFP4, activations plain and quantised; some in FP8.

    Activations in FP8 multiply weights that are exact in FP8 ("mxfp4 cast") or FP8 ones; those that
    are FP8 already ("codes") are not rounded in the timed call.
    """
    brief = ("q_a+kv", "q_b", "o_a", "gate_up w4a4", "q_b fp8")
    for name, matrix in matrices(c).items():
        for suffix, activation in (("", "bf16"), (" w4a4", "nvfp4")):
            case = name + suffix
            yield gemm_case(tokens, matrix, case, activation, NVFP4, case in brief)
    for name in ("q_a+kv", "q_b", "o_a", "down"):
        case = f"{name} fp8"
        yield gemm_case(tokens, matrices(c)[name], case, "bf16", FP8_BLOCK, case in brief)
    for name in ("q_b", "o_b", "gate_up", "down"):
        matrix = matrices(c)[name]
        cast = f"{name} w4a8 (mxfp4 cast)"
        yield gemm_case(tokens, matrix, cast, "fp8", NVFP4, False)
        yield gemm_case(tokens, matrix, f"{cast} codes", "fp8", NVFP4, False, coded=True)
        yield gemm_case(tokens, matrix, f"{name} w8a8", "fp8", FP8_BLOCK, False)


def gemm_case(
    tokens: int,
    matrix: Matrix,
    name: str,
    activation: str,
    format: Format,
    brief: bool = True,
    *,
    coded: bool = False,
) -> Case:
    """A case of ``gemm``; with ``coded`` its FP8 input is codes already."""
    rows, columns, groups, segments = matrix

    def build(draw: Draw) -> Problem:
        x = draw.normal(*((tokens, columns) if groups == 1 else (tokens, groups, columns)))
        cast = activation == "fp8" and format == NVFP4
        weight = _weight(draw, rows, columns, groups, segments, format, cast)
        how: dict[str, object] = {"activation": activation, "groups": groups}
        operand = x if not coded else ops.quantize(x, "fp8_token", layout=code_layout(weight))
        return Problem(
            ops.gemm,
            (operand, weight),
            {**how, "activation": "bf16", "out_dtype": x.dtype} if coded else how,
            within(budgets.gemm),
            nbytes(operand, weight),
            2 * tokens * groups * rows * columns,
            writes=x.element_size() * tokens * groups * rows,
        )

    sizes = {"N": rows, "K": columns, **({"G": groups} if groups > 1 else {})}
    return Case("gemm", name, sizes, tokens, build, brief)


def gemm_swiglu(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """The shared expert's gate and up projections, interleaved, and their SwiGLU."""
    for name, activation in ACTIVATION_CASES:
        yield swiglu_case(c, tokens, f"gate_up{name}", activation, NVFP4)


def swiglu_case(c: ModelConfig, tokens: int, name: str, activation: str, format: Format) -> Case:
    """A case of ``gemm_swiglu``."""
    rows, columns, groups, _ = matrices(c)["gate_up"]

    def build(draw: Draw) -> Problem:
        x, cast = draw.normal(tokens, columns), activation == "fp8"
        weight = _weight(draw, rows, columns, groups, (), format, cast)
        return Problem(
            ops.gemm_swiglu,
            (x, weight, c.swiglu_limit),
            {"activation": activation},
            fused_judges.gemm_swiglu,
            nbytes(x, weight),
            2 * tokens * rows * columns,
            writes=x.element_size() * tokens * rows // 2,
        )

    sizes, brief = {"N": rows, "K": columns}, activation != "fp8"
    return Case("gemm_swiglu", name, sizes, tokens, build, brief)


def _weight(
    draw: Draw,
    rows: int,
    columns: int,
    groups: int,
    segments: tuple[int, ...],
    format: Format,
    cast: bool = False,
) -> QuantizedTensor:
    """Weight of a matrix, which depends on the seed alone.

    It stays in memory, because preparing it for a baseline takes longer than timing it. NVFP4 is
    in fragments, as the layers pack it, where every group is a whole number of tiles; with ``cast``
    its scales are powers of two, and if packed it says that it is exact in FP8.
    """
    key = (draw.device, rows, columns, groups, segments, format, cast)
    if key not in _last_weights:
        _last_weights.clear()
    by_seed = _last_weights.setdefault(key, {})
    if draw.seed not in by_seed:
        own = replace(draw)  # begins with its seed again
        weight = own.quantized(
            groups * rows, columns, format=format, segments=segments, mxfp4_cast=cast
        )
        if format == NVFP4 and fragments.fits(rows, columns):
            weight = weight.with_layout(FRAGMENTS)
            weight = with_row_exponent(weight)[0] if cast else weight
        by_seed[draw.seed] = weight
    return by_seed[draw.seed]
