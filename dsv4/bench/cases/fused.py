"""Problem sizes of operators that do several steps in one pass; see ``dsv4.bench.cases``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dsv4 import ops
from dsv4.bench.cases import elementwise
from dsv4.bench.cases.sequence import entry_bytes
from dsv4.bench.checks import budgets, fused_judges
from dsv4.bench.checks.fused_judges import QUANTIZED, as_parts, by_same_kernel
from dsv4.bench.checks.judge import Judge, bitwise
from dsv4.bench.problem import Case, Draw, Problem, nbytes
from dsv4.config import ModelConfig
from dsv4.kv_cache.pages import Pages
from dsv4.ops.indexer import QUERY_FORMATS
from dsv4.quant.formats import FRAGMENTS, LINEAR, SWIZZLED_EXPERTS

_EPS = {"eps": 1e-6}
_PAGE = 64


def _tables(c: ModelConfig, tokens: int, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    positions = draw.integers(0, c.max_position_embeddings, (tokens,))
    return ops.rope_tables(positions, c.rope_compress)


def rope_tables(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Cosines and sines of a compressed layer, from frequencies that are on the device."""

    def build(draw: Draw) -> Problem:
        positions = draw.integers(0, c.max_position_embeddings, (tokens,))
        kwargs = {"parameters": c.rope_compress.inv_freq().to(draw.device)}
        read = nbytes(positions, *kwargs.values())
        return Problem(ops.rope_tables, (positions,), kwargs, fused_judges.rope_tables, read)

    yield Case("rope_tables", "", {"R": c.qk_rope_head_dim}, tokens, build)


def rms_norm_pair(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Both norms of the fused projection."""
    first, second = c.q_lora_rank, c.head_dim

    def build(draw: Draw) -> Problem:
        args = (draw.normal(tokens, first + second), draw.normal(first), draw.normal(second))
        return Problem(ops.rms_norm_pair, args, _EPS, fused_judges.norm_pair, nbytes(*args))

    yield Case("rms_norm_pair", "q_a+kv", {"D1": first, "D2": second}, tokens, build)


def head_norm_rope_(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Queries, in place."""
    heads, d = c.num_attention_heads, c.head_dim

    def build(draw: Draw) -> Problem:
        args = (draw.normal(tokens, heads, d), *_tables(c, tokens, draw))
        return Problem(
            ops.head_norm_rope_,
            args,
            _EPS,
            fused_judges.head_norm_rope,
            nbytes(*args),
            writes=nbytes(args[0]),
            mutates=(0,),
        )

    sizes = {"h": heads, "D": d, "R": c.qk_rope_head_dim}
    yield Case("head_norm_rope_", "q", sizes, tokens, build)


def rms_norm_quantize(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """A sublayer's input, with a global scale per token and with a calibrated one."""

    def build(draw: Draw, calibrated: bool) -> Problem:
        args = (draw.normal(tokens, c.hidden_size), draw.normal(c.hidden_size))
        kwargs: dict[str, object] = dict(_EPS)
        if calibrated:
            # A tensor, as a layer holds it: a number would be copied to the GPU by every call.
            scale = torch.full((1,), 0.003, device=draw.device)
            kwargs |= {"scaling": "static", "global_scale": scale}
        judge = fused_judges.norm_quantized
        return Problem(ops.rms_norm_quantize, args, kwargs, judge, nbytes(*args))

    for name, calibrated in (("token", False), ("static", True)):
        made = functools.partial(build, calibrated=calibrated)
        yield Case("rms_norm_quantize", name, {"D": c.hidden_size}, tokens, made)


def swiglu_quantize(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """The input of a down projection."""

    def parts(problem: Problem) -> object:
        inner = by_same_kernel(problem, ops.swiglu, *problem.args)
        return ops.quantize(inner, "nvfp4", scaling="token", backend="reference")

    def build(draw: Draw) -> Problem:
        x = draw.normal(tokens, 2 * c.moe_intermediate_size, scale=6.0)
        judge = as_parts(parts, *QUANTIZED)
        return Problem(ops.swiglu_quantize, (x, c.swiglu_limit), {}, judge, nbytes(x))

    yield Case("swiglu_quantize", "", {"I": c.moe_intermediate_size}, tokens, build)


def rms_norm_fp8(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """A sublayer's input."""

    def build(draw: Draw) -> Problem:
        args = (draw.normal(tokens, c.hidden_size), draw.normal(c.hidden_size))
        return Problem(ops.rms_norm_fp8, args, _EPS, fused_judges.norm_fp8, nbytes(*args))

    yield Case("rms_norm_fp8", "", {"D": c.hidden_size}, tokens, build)


def swiglu_fp8(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """The input of a down projection."""

    def parts(problem: Problem) -> object:
        inner = by_same_kernel(problem, ops.swiglu, *problem.args)
        return ops.quantize(inner, "fp8_token", backend="reference")

    def build(draw: Draw) -> Problem:
        x = draw.normal(tokens, 2 * c.moe_intermediate_size, scale=6.0)
        judge = as_parts(parts, *QUANTIZED[:2])
        return Problem(ops.swiglu_fp8, (x, c.swiglu_limit), {}, judge, nbytes(x))

    yield Case("swiglu_fp8", "", {"I": c.moe_intermediate_size}, tokens, build)


def moe_gather_fp8(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Rows of the routed experts, with columns in order and as packed weights have them."""
    experts, k = c.n_routed_experts, c.num_experts_per_tok

    def build(draw: Draw, layout: str) -> Problem:
        ids = draw.distinct(tokens, k, experts)
        _, _, rows = ops.moe_permute(ids, experts, backend="reference")
        weights = draw.normal(tokens, k, dtype=torch.float32).softmax(-1)
        args = (draw.normal(tokens, c.hidden_size), rows, weights)
        judge = bitwise(*QUANTIZED[:2], "weights")
        return Problem(ops.moe_gather_fp8, args, {"result_layout": layout}, judge, nbytes(*args))

    for name, layout in (("", LINEAR), ("fragments", FRAGMENTS)):
        if layout == FRAGMENTS and c.hidden_size % 128:
            continue
        made = functools.partial(build, layout=layout)
        sizes = {"H": c.hidden_size, "k": k}
        yield Case("moe_gather_fp8", name, sizes, tokens, made, brief=layout == LINEAR)


def rope_quantize(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """The attention output on its way to o_a."""
    heads, d, groups = c.num_attention_heads, c.head_dim, c.o_groups

    def parts(problem: Problem) -> object:
        x, cos, sin = problem.args
        angles = (cos.unsqueeze(1), sin.unsqueeze(1))
        rotated = by_same_kernel(problem, ops.rope, x, *angles, inverse=True)
        grouped = rotated.reshape(tokens, groups, -1)
        return ops.quantize(grouped, "nvfp4", scaling="token", backend="reference")

    def build(draw: Draw) -> Problem:
        args = (draw.normal(tokens, heads, d), *_tables(c, tokens, draw))
        kwargs = {"inverse": True, "groups": groups}
        return Problem(ops.rope_quantize, args, kwargs, as_parts(parts, *QUANTIZED), nbytes(*args))

    sizes = {"h": heads, "D": d, "R": c.qk_rope_head_dim, "G": groups}
    yield Case("rope_quantize", "o", sizes, tokens, build)


def norm_rope_write_kv(c: ModelConfig, tokens: int, entry_format: str = "fp8") -> Iterator[Case]:
    """New KV entries from the fused projection into pages; the last one is skipped."""
    d, rope = c.head_dim, c.qk_rope_head_dim

    def build(draw: Draw) -> Problem:
        entries = _new_entries(c, tokens, entry_format, draw)
        return Problem(
            ops.norm_rope_write_kv,
            entries.args,
            _EPS,
            fused_judges.written_entries,
            nbytes(*entries.args[1:]),
            writes=entries.written,
            mutates=(0,),
        )

    yield Case("norm_rope_write_kv", "", {"D": d, "R": rope}, tokens, build)


@dataclasses.dataclass(frozen=True)
class _NewEntries:
    """Arguments of ``norm_rope_write_kv``, and the bytes that it writes."""

    args: tuple[Any, ...]
    written: int


def _new_entries(c: ModelConfig, tokens: int, entry_format: str, draw: Draw) -> _NewEntries:
    d, rope = c.head_dim, c.qk_rope_head_dim
    count = tokens // _PAGE + 2
    pages = Pages.allocate(count, _PAGE, d, rope, entry_format, device=draw.device)
    pages.data.fill_(0x35)
    slots = draw.permutation(pages.num_slots)[:tokens].contiguous()
    if tokens > 1:
        slots[-1] = -1
    kv = draw.normal(tokens, c.q_lora_rank + d)[:, c.q_lora_rank :]
    weight = draw.normal(d)
    cos, sin = _tables(c, tokens, draw)
    written = int((slots >= 0).sum()) * entry_bytes(pages)
    return _NewEntries((pages, kv, weight, cos, sin, slots), written)


def head_norm_rope_write_kv(
    c: ModelConfig, tokens: int, entry_format: str = "fp8"
) -> Iterator[Case]:
    """Queries in place, and new KV entries into pages."""
    heads, d = c.num_attention_heads, c.head_dim

    def build(draw: Draw) -> Problem:
        q = draw.normal(tokens, heads, d)
        entries = _new_entries(c, tokens, entry_format, draw)
        return Problem(
            ops.head_norm_rope_write_kv,
            (q, *entries.args),
            {"q_eps": _EPS["eps"], "kv_eps": _EPS["eps"]},
            fused_judges.heads_and_entries,
            nbytes(q, *entries.args[1:]),
            writes=nbytes(q) + entries.written,
            mutates=(0, 1),
        )

    sizes = {"h": heads, "D": d, "R": c.qk_rope_head_dim}
    yield Case("head_norm_rope_write_kv", "", sizes, tokens, build)


def moe_gather_quantize(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Rows of the routed experts, with scales for this package's GEMMs and for others'."""
    experts, k = c.n_routed_experts, c.num_experts_per_tok

    def build(draw: Draw, layout: str) -> Problem:
        ids = draw.distinct(tokens, k, experts)
        _, offsets, rows = ops.moe_permute(ids, experts, backend="reference")
        args = (draw.normal(tokens, c.hidden_size), rows, offsets)
        judge = bitwise(*QUANTIZED)
        return Problem(ops.moe_gather_quantize, args, {"layout": layout}, judge, nbytes(*args))

    for name, layout in (("", LINEAR), ("swizzled by expert", SWIZZLED_EXPERTS)):
        made = functools.partial(build, layout=layout)
        sizes = {"H": c.hidden_size, "k": k}
        yield Case("moe_gather_quantize", name, sizes, tokens, made, brief=layout == LINEAR)


def _hyper(c: ModelConfig, tokens: int, draw: Draw) -> tuple[torch.Tensor, ...]:
    n, hidden = c.hc_mult, c.hidden_size
    rows = (2 + n) * n
    return (
        draw.normal(tokens, n, hidden),
        draw.normal(rows, n * hidden, dtype=torch.float32, scale=(n * hidden) ** -0.5),
        draw.normal(3, dtype=torch.float32, scale=0.5),
        draw.normal(rows, dtype=torch.float32, scale=0.5),
        draw.normal(hidden),
    )


def _hyper_kwargs(c: ModelConfig) -> dict[str, float]:
    return {"norm_eps": 1e-6, "hc_eps": c.hc_eps, "iterations": c.hc_sinkhorn_iters}


def hc_pre_norm(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Cases of what runs before a sublayer, with its norm."""
    flops = 2 * tokens * (2 + c.hc_mult) * c.hc_mult**2 * c.hidden_size

    def build(draw: Draw) -> Problem:
        args = _hyper(c, tokens, draw)
        judge = fused_judges.hyper_norm
        return Problem(ops.hc_pre_norm, args, _hyper_kwargs(c), judge, nbytes(*args), flops)

    yield Case("hc_pre_norm", "", {"n": c.hc_mult, "H": c.hidden_size}, tokens, build)


def hc_post_pre_norm(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Cases of what runs between two sublayers."""
    n, hidden = c.hc_mult, c.hidden_size
    flops = 2 * tokens * (2 + n) * n * n * hidden

    def build(draw: Draw) -> Problem:
        streams, *rest = _hyper(c, tokens, draw)
        post = draw.normal(tokens, n, dtype=torch.float32).sigmoid() * 2
        comb = draw.normal(tokens, n, n, dtype=torch.float32).softmax(-1)
        args = (draw.normal(tokens, hidden), streams, post, comb, *rest)
        judge = fused_judges.hyper_post_norm
        return Problem(ops.hc_post_pre_norm, args, _hyper_kwargs(c), judge, nbytes(*args), flops)

    yield Case("hc_post_pre_norm", "", {"n": n, "H": hidden}, tokens, build)


def _combined(
    case: Case, c: ModelConfig, function: Callable[..., Any], judge: Judge
) -> Iterator[Case]:
    """Put the sum of sorted rows before a case: rows that are weighted already, or not yet."""
    k, experts = c.num_experts_per_tok, c.n_routed_experts

    def build(draw: Draw, weighted: bool) -> Problem:
        problem = case.build(draw)
        ids = draw.distinct(case.tokens, k, experts)
        _, offsets, rows = ops.moe_permute(ids, experts, backend="reference")
        y = draw.normal(case.tokens * k, c.hidden_size)
        weights = None
        if weighted:
            weights = draw.normal(case.tokens, k, dtype=torch.float32).softmax(-1)
        args = (y, rows, offsets, weights, *problem.args)
        reads = nbytes(*[arg for arg in args if arg is not None])
        return dataclasses.replace(problem, function=function, args=args, judge=judge, reads=reads)

    for name, weighted in (("", False), ("weights", True)):
        made = functools.partial(build, weighted=weighted)
        shape = {**case.shape, "k": k}
        yield Case(function.__name__, name, shape, case.tokens, made, brief=not weighted)


def hc_combine_post(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Make cases of the write-back after the experts of the last layer."""
    [case] = elementwise.hc_post(c, tokens)
    return _combined(case, c, ops.hc_combine_post, fused_judges.combined_post)


def hc_combine_post_pre_norm(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Make cases of the write-back after a layer's experts, with the start of the next layer."""
    [case] = hc_post_pre_norm(c, tokens)
    return _combined(case, c, ops.hc_combine_post_pre_norm, fused_judges.combined_post_norm)


def hc_pre_norm_quantize(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Cases of what runs before a sublayer, with its norm, quantised."""
    [case] = hc_pre_norm(c, tokens)
    judge = fused_judges.hyper_norm_quantized
    return _quantized(case, ops.hc_pre_norm_quantize, judge)


def hc_reduce_post_pre_norm(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Cases of what runs between two sublayers, as of a group of one rank: there is no other."""
    [case] = hc_post_pre_norm(c, tokens)

    def build(draw: Draw) -> Problem:
        return dataclasses.replace(case.build(draw), function=ops.hc_reduce_post_pre_norm)

    yield dataclasses.replace(case, op="hc_reduce_post_pre_norm", build=build)


def hc_post_pre_norm_quantize(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Cases of what runs between two sublayers, with the quantised input of the second."""
    [case] = hc_post_pre_norm(c, tokens)
    judge = fused_judges.hyper_post_norm_quantized
    return _quantized(case, ops.hc_post_pre_norm_quantize, judge)


def _quantized(case: Case, function: Callable[..., Any], judge: Judge) -> Iterator[Case]:
    """A case with a norm, and what quantises that, with a scale of each token or a given one."""

    def build(draw: Draw, calibrated: bool) -> Problem:
        problem = case.build(draw)
        kwargs = dict(problem.kwargs)
        if calibrated:
            scale = torch.full((1,), 0.003, device=draw.device)
            kwargs |= {"scaling": "static", "global_scale": scale}
        return dataclasses.replace(problem, function=function, kwargs=kwargs, judge=judge)

    for name, calibrated in (("token", False), ("static", True)):
        made = functools.partial(build, calibrated=calibrated)
        yield Case(f"{case.op}_quantize", name, case.shape, case.tokens, made)


def indexer_queries(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Rotation, Hadamard transform and FP4 of the indexer's queries."""
    heads, d = c.index_n_heads, c.index_head_dim

    def rotated(problem: Problem) -> Problem:
        q, cos, sin = problem.args
        # The reference's: a rotation that contracts a * b + c rounds a few values differently.
        rotated = ops.rope(q, cos.unsqueeze(1), sin.unsqueeze(1), backend="reference")
        return Problem(ops.indexer_rotate_quantize, (rotated,), {}, budgets.rotated_fp4, 0)

    def judge(problem: Problem, actual: tuple, truth: tuple) -> budgets.Verdict:
        return budgets.rotated_fp4(rotated(problem), actual, truth)

    def build(draw: Draw) -> Problem:
        args = (draw.normal(tokens, heads, d), *_tables(c, tokens, draw))
        kwargs = {"rotate_quantize": True}
        return Problem(ops.indexer_queries, args, kwargs, judge, nbytes(*args))

    sizes = {"h": heads, "d": d, "R": c.qk_rope_head_dim}
    yield Case("indexer_queries", "", sizes, tokens, build)


def quantize_index_queries(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Queries quantised to codes; scales are returned or folded into the heads' weights."""
    heads, d = c.index_n_heads, c.index_head_dim

    def build(draw: Draw, query_format: str) -> Problem:
        args = (
            draw.normal(tokens, heads, d),
            *_tables(c, tokens, draw),
            draw.normal(tokens, heads),
        )
        kwargs = {"rotate": True, "query_format": query_format, "weight_scale": (d * heads) ** -0.5}
        judge = fused_judges.as_reference
        return Problem(ops.quantize_index_queries, args, kwargs, judge, nbytes(*args))

    sizes = {"h": heads, "d": d, "R": c.qk_rope_head_dim}
    for name in QUERY_FORMATS:
        made = functools.partial(build, query_format=name)
        yield Case("quantize_index_queries", name, sizes, tokens, made)
