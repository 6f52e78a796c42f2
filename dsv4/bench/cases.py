"""The problem sizes of every operator: what the layers of a model of that size call.

One function per operator makes its cases from a model configuration and a token count. Sizes are
those of the published models (specification, sections 1 and 12), or of ``ModelConfig.tiny``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from dsv4 import ops
from dsv4.bench import budgets, fused_cases, fused_judges, moe_cases, sequence_cases
from dsv4.bench.check import bitwise, within
from dsv4.bench.problem import Case, Draw, Problem, UsageError, nbytes
from dsv4.config import ModelConfig
from dsv4.quant import fragments
from dsv4.quant.formats import (
    FP8_BLOCK,
    FRAGMENTS,
    NVFP4,
    SWIZZLED,
    Format,
    QuantizedTensor,
)

PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "tiny": ModelConfig.tiny,
    "flash": ModelConfig.flash,
    "pro": ModelConfig.pro,
}
Maker = Callable[[ModelConfig, int], Iterator[Case]]
Matrix = tuple[int, int, int, tuple[int, ...]]  # rows per group, columns, groups, segments
# What a public function calls, where that is not the operator of its name.
_SEVERAL = {"quantize": ("quantize_nvfp4", "quantize_mxfp4", "quantize_fp8_block")}
# Weights of one matrix by seed: the last one, at whatever token counts.
_kept: dict[tuple[object, ...], dict[int, QuantizedTensor]] = {}


def cases(op: str, preset: str, tokens: int) -> list[Case]:
    """All cases of an operator.

    Args:
        op: A key of ``MAKERS``.
        preset: A key of ``PRESETS``.
        tokens: Tokens in the batch, at least 1.

    Raises:
        UsageError: if a name is unknown or ``tokens`` is below 1.
    """
    if op not in MAKERS:
        raise UsageError(f"operator is {op!r}, wanted one of {', '.join(MAKERS)}")
    if preset not in PRESETS:
        raise UsageError(f"shapes are {preset!r}, wanted one of {', '.join(PRESETS)}")
    if tokens < 1:
        raise UsageError(f"tokens is {tokens}, wanted at least 1")
    return list(MAKERS[op](PRESETS[preset](), tokens))


def quantize(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Rows of hidden size in each format.

    NVFP4 has one global scale per token and scales as tensor cores read them; FP8 has tiles of
    128 x 128.
    """

    def build(draw: Draw, kwargs: dict[str, object], outputs: tuple[str, ...]) -> Problem:
        x = draw.normal(tokens, c.hidden_size)
        return Problem(ops.quantize, (x,), kwargs, bitwise(*outputs), nbytes(x))

    parts = ("codes", "scales")
    for name, kwargs, outputs in (
        ("nvfp4", {"scaling": "token", "layout": SWIZZLED}, (*parts, "global scale")),
        ("mxfp4", {}, parts),
        ("fp8_block", {}, parts),
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


def operators(op: str) -> tuple[str, ...]:
    """The operators, as ``dsv4.dispatch`` names them, that a public function calls."""
    return _SEVERAL.get(op, (op,))


def own_gemm(rows: int, columns: int, tokens: int) -> list[Case]:
    """A product of any size, with the three kinds of operands that ``gemm`` has.

    Args:
        rows: N of the weight.
        columns: K, a multiple of 16.
        tokens: M.

    Raises:
        UsageError: if a size is not allowed.
    """
    if rows < 1:
        raise UsageError(f"--n is {rows}, wanted at least 1")
    if columns < 1 or columns % 16:
        raise UsageError(f"--k is {columns}, wanted a multiple of 16")
    matrix: Matrix = (rows, columns, 1, ())
    return [
        _product(tokens, matrix, name, activation, format)
        for name, activation, format in (
            ("own", "bf16", NVFP4),
            ("own w4a4", "nvfp4", NVFP4),
            ("own fp8", "bf16", FP8_BLOCK),
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
    """Every projection in NVFP4, with activations left as they are and quantised; some in FP8."""
    brief = ("q_a+kv", "q_b", "o_a", "gate_up w4a4", "q_b fp8")
    for name, matrix in matrices(c).items():
        for suffix, activation in (("", "bf16"), (" w4a4", "nvfp4")):
            case = name + suffix
            yield _product(tokens, matrix, case, activation, NVFP4, case in brief)
    for name in ("q_a+kv", "q_b", "o_a", "down"):
        case = f"{name} fp8"
        yield _product(tokens, matrices(c)[name], case, "bf16", FP8_BLOCK, case in brief)


def _product(
    tokens: int, matrix: Matrix, name: str, activation: str, format: Format, brief: bool = True
) -> Case:
    rows, columns, groups, segments = matrix

    def build(draw: Draw) -> Problem:
        x = draw.normal(*((tokens, columns) if groups == 1 else (tokens, groups, columns)))
        weight = _weight(draw, rows, columns, groups, segments, format)
        return Problem(
            ops.gemm,
            (x, weight),
            {"activation": activation, "groups": groups},
            within(budgets.product),
            nbytes(x, weight),
            2 * tokens * groups * rows * columns,
            writes=x.element_size() * tokens * groups * rows,
        )

    sizes = {"N": rows, "K": columns, **({"G": groups} if groups > 1 else {})}
    return Case("gemm", name, sizes, tokens, build, brief)


def gemm_swiglu(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """The shared expert's gate and up projections, rows in turn, and their SwiGLU."""
    rows, columns, groups, _ = matrices(c)["gate_up"]

    def build(draw: Draw, activation: str) -> Problem:
        x, weight = draw.normal(tokens, columns), _weight(draw, rows, columns, groups, (), NVFP4)
        return Problem(
            ops.gemm_swiglu,
            (x, weight, c.swiglu_limit),
            {"activation": activation},
            fused_judges.gemm_swiglu,
            nbytes(x, weight),
            2 * tokens * rows * columns,
            writes=x.element_size() * tokens * rows // 2,
        )

    for name, activation in (("gate_up", "bf16"), ("gate_up w4a4", "nvfp4")):
        made = functools.partial(build, activation=activation)
        yield Case("gemm_swiglu", name, {"N": rows, "K": columns}, tokens, made)


def _weight(
    draw: Draw, rows: int, columns: int, groups: int, segments: tuple[int, ...], format: Format
) -> QuantizedTensor:
    """By seed alone. Kept, because what rivals make of it takes longer than timing them.

    NVFP4 is in fragments, as the layers pack it, where every group is a whole number of tiles.
    """
    key = (draw.device, rows, columns, groups, segments, format)
    if key not in _kept:
        _kept.clear()
    by_seed = _kept.setdefault(key, {})
    if draw.seed not in by_seed:
        own = Draw(draw.seed, draw.device)
        weight = own.quantized(groups * rows, columns, format=format, segments=segments)
        packed = format == NVFP4 and fragments.fits(rows, columns)
        by_seed[draw.seed] = weight.with_layout(FRAGMENTS) if packed else weight
    return by_seed[draw.seed]


def rms_norm(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """The weighted norm of a sublayer's input, and the norm of each head of q without weight."""

    def build(draw: Draw) -> Problem:
        x, weight = draw.normal(tokens, c.hidden_size), draw.normal(c.hidden_size)
        judge = within(budgets.norm)
        return Problem(ops.rms_norm, (x, weight), {"eps": 1e-6}, judge, nbytes(x, weight))

    def build_heads(draw: Draw) -> Problem:
        x = draw.normal(tokens, c.num_attention_heads, c.head_dim)
        return Problem(ops.rms_norm, (x, None), {"eps": 1e-6}, within(budgets.norm), nbytes(x))

    yield Case("rms_norm", "hidden", {"D": c.hidden_size}, tokens, build)
    heads = {"h": c.num_attention_heads, "D": c.head_dim}
    yield Case("rms_norm", "q heads", heads, tokens, build_heads)


def rope(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Queries of a compressed layer, and back."""

    def build(draw: Draw) -> Problem:
        x = draw.normal(tokens, c.num_attention_heads, c.head_dim)
        positions = draw.integers(0, c.max_position_embeddings, (tokens,))
        cos, sin = ops.rope_tables(positions, c.rope_compress)
        args = (x, cos.unsqueeze(1), sin.unsqueeze(1))
        judge = within(budgets.rotation)
        return Problem(ops.rope, args, {"inverse": False}, judge, nbytes(x, cos, sin))

    sizes = {"h": c.num_attention_heads, "D": c.head_dim, "R": c.qk_rope_head_dim}
    yield Case("rope", "q", sizes, tokens, build)


def swiglu(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """The shared expert's, with values on both sides of the clamp."""

    def build(draw: Draw) -> Problem:
        x = draw.normal(tokens, 2 * c.moe_intermediate_size, scale=6.0)
        judge = within(budgets.activation)
        return Problem(ops.swiglu, (x, c.swiglu_limit), {}, judge, nbytes(x))

    yield Case("swiglu", "", {"I": c.moe_intermediate_size}, tokens, build)


def _streams(c: ModelConfig, tokens: int, rows: int, scales: int, draw: Draw) -> tuple:
    n, hidden = c.hc_mult, c.hidden_size
    return (
        draw.normal(tokens, n, hidden),
        draw.normal(rows, n * hidden, dtype=torch.float32, scale=(n * hidden) ** -0.5),
        draw.normal(scales, dtype=torch.float32, scale=0.5),
        draw.normal(rows, dtype=torch.float32, scale=0.5),
    )


def hc_pre(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Before a sublayer."""
    n = c.hc_mult
    rows = (2 + n) * n

    def build(draw: Draw) -> Problem:
        args = _streams(c, tokens, rows, 3, draw)
        kwargs = {"norm_eps": 1e-6, "hc_eps": c.hc_eps, "iterations": c.hc_sinkhorn_iters}
        flops = 2 * tokens * rows * n * c.hidden_size
        return Problem(ops.hc_pre, args, kwargs, budgets.hyper_pre, nbytes(*args), flops)

    yield Case("hc_pre", "", {"n": n, "H": c.hidden_size}, tokens, build)


def hc_post(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """After a sublayer."""
    n, hidden = c.hc_mult, c.hidden_size

    def build(draw: Draw) -> Problem:
        post = draw.normal(tokens, n, dtype=torch.float32).sigmoid() * 2
        comb = draw.normal(tokens, n, n, dtype=torch.float32).softmax(-1)
        args = (draw.normal(tokens, hidden), draw.normal(tokens, n, hidden), post, comb)
        return Problem(ops.hc_post, args, {}, within(budgets.write_back), nbytes(*args))

    yield Case("hc_post", "", {"n": n, "H": hidden}, tokens, build)


def hc_head(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """After the last layer."""
    n = c.hc_mult

    def build(draw: Draw) -> Problem:
        args = _streams(c, tokens, n, 1, draw)
        kwargs = {"norm_eps": 1e-6, "hc_eps": c.hc_eps}
        flops = 2 * tokens * n * n * c.hidden_size
        return Problem(ops.hc_head, args, kwargs, budgets.hyper_head, nbytes(*args), flops)

    yield Case("hc_head", "", {"n": n, "H": c.hidden_size}, tokens, build)


# By name of a public function of ``dsv4.ops``.
MAKERS: dict[str, Maker] = {
    "quantize": quantize,
    "dequantize": dequantize,
    "gemm": gemm,
    "gemm_swiglu": gemm_swiglu,
    "grouped_gemm": moe_cases.grouped_gemm,
    "grouped_gemm_swiglu": moe_cases.grouped_gemm_swiglu,
    "grouped_gemm_swiglu_quantize": moe_cases.grouped_gemm_swiglu_quantize,
    "rms_norm": rms_norm,
    "rms_norm_pair": fused_cases.rms_norm_pair,
    "head_norm_rope_": fused_cases.head_norm_rope_,
    "rms_norm_quantize": fused_cases.rms_norm_quantize,
    "rope_tables": fused_cases.rope_tables,
    "rope": rope,
    "swiglu": swiglu,
    "route_topk": moe_cases.route_topk,
    "route_hash": moe_cases.route_hash,
    "moe_permute": moe_cases.moe_permute,
    "moe_gather": moe_cases.moe_gather,
    "moe_sort": moe_cases.moe_sort,
    "moe_combine": moe_cases.moe_combine,
    "hc_pre": hc_pre,
    "hc_post": hc_post,
    "hc_head": hc_head,
    "moe_gather_quantize": fused_cases.moe_gather_quantize,
    "rope_quantize": fused_cases.rope_quantize,
    "swiglu_quantize": fused_cases.swiglu_quantize,
    "hc_post_pre_norm": fused_cases.hc_post_pre_norm,
    "hc_pre_norm": fused_cases.hc_pre_norm,
    "hc_pre_norm_quantize": fused_cases.hc_pre_norm_quantize,
    "hc_post_pre_norm_quantize": fused_cases.hc_post_pre_norm_quantize,
    "pool_windows": sequence_cases.pool_windows,
    "compressor_update": sequence_cases.compressor_update,
    "compress_write": sequence_cases.compress_write,
    "indexer_rotate_quantize": sequence_cases.indexer_rotate_quantize,
    "indexer_select": sequence_cases.indexer_select,
    "sparse_attention": sequence_cases.sparse_attention,
    "entry_slots": sequence_cases.entry_slots,
    "prefix_slots": sequence_cases.prefix_slots,
    "window_slots": sequence_cases.window_slots,
    "norm_rope_write_kv": fused_cases.norm_rope_write_kv,
    "indexer_queries": fused_cases.indexer_queries,
    "quantize_index_queries": fused_cases.quantize_index_queries,
    "write_kv": sequence_cases.write_kv,
    "read_kv": sequence_cases.read_kv,
    "fake_quantize_kv": sequence_cases.fake_quantize_kv,
}
