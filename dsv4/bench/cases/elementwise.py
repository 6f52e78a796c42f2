"""Problem sizes of norms, RoPE, activations and hyper-connections; see ``dsv4.bench.cases``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from dsv4 import ops
from dsv4.bench.checks import budgets
from dsv4.bench.checks.judge import bitwise, within
from dsv4.bench.problem import Case, Draw, Problem, nbytes
from dsv4.config import ModelConfig
from dsv4.ops.nonfinite import NO_ROW


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


def mark_nonfinite_(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Residual streams, one of a token not finite, with padding."""

    def build(draw: Draw) -> Problem:
        x = draw.normal(tokens, c.hc_mult, c.hidden_size)
        x[draw.permutation(tokens)[:1], -1, -1] = float("nan")
        mark = torch.full((1,), NO_ROW, dtype=torch.int32, device=draw.device)
        padding = torch.arange(tokens, device=draw.device) % 64 == 63
        args = (mark, x, padding)
        return Problem(
            ops.mark_nonfinite_, args, {}, bitwise("mark"), nbytes(*args), writes=4, mutates=(0,)
        )

    sizes = {"n": c.hc_mult, "H": c.hidden_size}
    yield Case("mark_nonfinite_", "streams", sizes, tokens, build)


def all_reduce(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """A sublayer's output of a group of one rank: a copy. See ``suites/all_reduce.py`` for more."""

    def build(draw: Draw) -> Problem:
        x = draw.normal(tokens, c.hidden_size)
        return Problem(ops.all_reduce, (x,), {}, within(budgets.copied), nbytes(x))

    yield Case("all_reduce", "one rank", {"H": c.hidden_size}, tokens, build)


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
    """Cases of what runs before a sublayer."""
    n = c.hc_mult
    rows = (2 + n) * n

    def build(draw: Draw) -> Problem:
        args = _streams(c, tokens, rows, 3, draw)
        kwargs = {"norm_eps": 1e-6, "hc_eps": c.hc_eps, "iterations": c.hc_sinkhorn_iters}
        flops = 2 * tokens * rows * n * c.hidden_size
        return Problem(ops.hc_pre, args, kwargs, budgets.hyper_pre, nbytes(*args), flops)

    yield Case("hc_pre", "", {"n": n, "H": c.hidden_size}, tokens, build)


def hc_post(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Cases of what runs after a sublayer."""
    n, hidden = c.hc_mult, c.hidden_size

    def build(draw: Draw) -> Problem:
        post = draw.normal(tokens, n, dtype=torch.float32).sigmoid() * 2
        comb = draw.normal(tokens, n, n, dtype=torch.float32).softmax(-1)
        args = (draw.normal(tokens, hidden), draw.normal(tokens, n, hidden), post, comb)
        return Problem(ops.hc_post, args, {}, within(budgets.write_back), nbytes(*args))

    yield Case("hc_post", "", {"n": n, "H": hidden}, tokens, build)


def hc_reduce_post(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Cases of ``hc_post`` behind a sum over the ranks of a group, which has one rank."""
    [case] = hc_post(c, tokens)

    def build(draw: Draw) -> Problem:
        return dataclasses.replace(case.build(draw), function=ops.hc_reduce_post)

    yield dataclasses.replace(case, op="hc_reduce_post", build=build)


def hc_head(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Cases of what runs after the last layer."""
    n = c.hc_mult

    def build(draw: Draw) -> Problem:
        args = _streams(c, tokens, n, 1, draw)
        kwargs = {"norm_eps": 1e-6, "hc_eps": c.hc_eps}
        flops = 2 * tokens * n * n * c.hidden_size
        return Problem(ops.hc_head, args, kwargs, budgets.hyper_head, nbytes(*args), flops)

    yield Case("hc_head", "", {"n": n, "H": c.hidden_size}, tokens, build)
