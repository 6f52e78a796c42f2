"""Problem sizes of the projections of compressors and indexers; see ``dsv4.bench.cases``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from dsv4 import ops
from dsv4.bench.checks.judge import combine, compare, storing, sum_error
from dsv4.bench.problem import Case, Draw, Outputs, Problem, Verdict, nbytes
from dsv4.config import ModelConfig


def compressor_projections(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Cases of a layer with an indexer and of one without."""
    index = (2 * c.index_head_dim, 2 * c.index_head_dim, c.index_n_heads)
    yield _projections(c.hidden_size, "csa", (2 * c.head_dim, 2 * c.head_dim, *index), tokens)
    yield _projections(c.hidden_size, "hca", (c.head_dim, c.head_dim), tokens)


def _projections(hidden: int, name: str, rows: tuple[int, ...], tokens: int) -> Case:
    def build(draw: Draw) -> Problem:
        x = draw.normal(tokens, hidden)
        weights = [draw.normal(count, hidden, scale=hidden**-0.5) for count in rows]
        flops = 2 * tokens * hidden * sum(rows)
        kwargs = {"out_dtype": torch.float32}
        reads = nbytes(x, *weights)
        function = ops.compressor_projections if rows[2:] else _of_compressor
        return Problem(function, (x, *weights), kwargs, _judge, reads, flops)

    sizes = dict(zip(("C", "c", "n"), rows[::2], strict=False))
    return Case("compressor_projections", name, {**sizes, "H": hidden}, tokens, build)


def _of_compressor(*args: Any, **kwargs: Any) -> torch.Tensor:
    """``compressor_projections`` without an indexer, whose second result is empty."""
    project: Any = ops.compressor_projections
    return project(*args, **kwargs)[0]  # type: ignore[no-any-return]


def _judge(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """``sum_error(H)`` on the sums of magnitudes, and the last rounding."""
    wide = problem.widened()
    positive = [arg.abs() for arg in wide.args]
    magnitudes = dataclasses.replace(wide, args=tuple(positive)).run("reference")
    error = sum_error(problem.args[0].shape[1])
    return combine(
        *(
            compare(a, t, error * size + storing(t, a.dtype), what)
            for a, t, size, what in zip(
                actual, truth, magnitudes, ("values and scores", "head weights"), strict=False
            )
        )
    )
