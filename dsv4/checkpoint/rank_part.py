"""The part of a checkpoint that one rank reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from dsv4.checkpoint.entries import Entry
from dsv4.checkpoint.packing import PackChoice
from dsv4.config import ModelConfig
from dsv4.cute import supports
from dsv4.parallel.context import ParallelContext
from dsv4.parallel.split import axis_of, check_divides, check_matrices, expert_of
from dsv4.parallel.windows import matrix_windows, window_of


def check_split(
    entries: Mapping[str, Entry],
    config: ModelConfig,
    context: ParallelContext,
    choice: PackChoice,
    device: torch.device,
) -> None:
    """Raise if a checkpoint cannot be split over the ranks, from its headers alone.

    Raises:
        ValueError: naming the field of the configuration that their number does not divide, or the
            matrix of which it would cut a block or, if weights are to be packed, a tile.
    """
    check_divides(config, context.size, context.mode)
    matrices = [(entry.name, entry.shape, entry.format) for entry in entries.values()]
    quantised = [(name, shape, fmt) for name, shape, fmt in matrices if fmt is not None]
    check_matrices(quantised, context.size, tiles=_packs(choice, device), mode=context.mode)


def _packs(choice: PackChoice, device: torch.device) -> bool:
    if not choice.enabled or choice.layout is not None:
        return choice.enabled
    return supports.no_packed_weights(device, choice.dtype) is None


def entries_of_rank(entries: Mapping[str, Entry], context: ParallelContext) -> dict[str, Entry]:
    """Return the entries as one rank reads them: parts of those that are split.

    Matrices of single experts stay whole: a rank's modules take those of its range.
    """
    return {name: _part(entry, context) for name, entry in entries.items()}


def _part(entry: Entry, context: ParallelContext) -> Entry:
    if expert_of(entry.name) is not None:
        return entry
    window = window_of(axis_of(entry.name, context.mode), entry.shape, context)
    if window is None:
        return entry
    windows = matrix_windows(window, entry.format)
    scales = None if entry.scales is None else entry.scales.part(windows.scales)
    return replace(entry, weight=entry.weight.part(windows.weight), scales=scales)
