"""Problem sizes of operators on a serving engine's pages; see ``dsv4.bench.cases``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch

from dsv4 import ops
from dsv4.bench.cases.sequence import compress_write
from dsv4.bench.checks import fused_judges
from dsv4.bench.problem import Case, Draw, Problem
from dsv4.config import ModelConfig

# Tokens of a block of states, as vLLM has them, with and without overlap.
_BLOCKS = {True: 4, False: 8}


def compress_write_paged(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """The cases of ``compress_write`` with states in blocks, without the Hadamard transform."""
    return in_blocks(compress_write(c, tokens))


def in_blocks(cases: Iterator[Case]) -> Iterator[Case]:
    """Make cases of ``compress_write_paged`` from the cases of ``compress_write``."""
    for case in cases:
        build = functools.partial(_build, case)
        yield dataclasses.replace(case, op="compress_write_paged", build=build)


def _build(case: Case, draw: Draw) -> Problem:
    inner = case.build(draw)
    kwargs = {k: v for k, v in inner.kwargs.items() if k != "rotate_quantize"}
    inner = dataclasses.replace(inner, kwargs=kwargs)
    kv, score, ape, state, bounds, starts, rows, weight, pages, page_table = inner.args
    ratio, block = ape.shape[0], _BLOCKS[kwargs["overlap"]]
    sequences = rows.repeat_interleave(bounds.diff())
    positions = torch.arange(kv.shape[0], device=kv.device) - bounds[:-1].repeat_interleave(
        bounds.diff()
    )
    positions += starts.repeat_interleave(bounds.diff())
    columns = -(-(3 * ratio + kv.shape[0]) // block)
    table = draw.permutation(state.shape[0] * columns).view(state.shape[0], columns)
    state_slots = ops.entry_slots(table, block, sequences, positions, backend="reference")
    entries = torch.where((positions + 1) % ratio == 0, positions // ratio, -1)
    slots = ops.entry_slots(page_table, pages.page_size, sequences, entries, backend="reference")
    every = torch.arange(columns * block, device=kv.device)
    angles = torch.cat(ops.rope_tables(every, kwargs["inv_freq"], backend="reference"), dim=1)
    return Problem(
        ops.compress_write_paged,
        (
            *(kv, score, ape, _blocks(state, starts, rows, table, block)),
            *(positions, sequences, state_slots, table, slots, weight, angles, pages),
        ),
        {"overlap": kwargs["overlap"], "eps": kwargs["eps"]},
        functools.partial(fused_judges.paged_entries, inner),
        inner.reads,
        # Every token is stored, not those of the open windows alone.
        writes=inner.writes + 2 * 4 * kv.numel(),
        mutates=(3, 11),
    )


def _blocks(
    state: torch.Tensor,
    starts: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    block: int,
) -> torch.Tensor:
    """The states of sequences in blocks; what they do not have is a number far off."""
    slots, width = state.shape[1], state.shape[3]
    result = torch.full((table.numel(), block, 2 * width), 99.0, device=state.device)
    for start, row in zip(starts.tolist(), rows.tolist(), strict=True):
        for p in range(max(0, start - slots), start):
            result[table[row, p // block], p % block] = state[row, p % slots].flatten()
    return result
