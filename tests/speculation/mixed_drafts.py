"""Drafts of real modules, of which some are replaced by what the request will really say."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dsv4.serving import Runner
from dsv4.speculation.mtp import Drafts


def mix(runner: Runner, texts: Mapping[int, Sequence[int]], share: float, seed: int) -> None:
    """Replace the first drafts of a share of all steps by the text of their request.

    Random weights draft hardly anything right, so without this all steps would have one token.

    Args:
        runner: The runner.
        texts: Prompt and answer of each request, by its number.
        share: Share of the steps of a sequence.
        seed: Seed of the choice.
    """
    assert runner._steps.speculative is not None
    drafter: Any = runner._steps.speculative._drafter
    inner, draw = drafter.draft, random.Random(seed)

    def mixed(anchors: Any, rows: Any, lengths: Any, count: int, *rest: Any) -> Drafts:
        drafts = inner(anchors, rows, lengths, count, *rest)
        numbers = {s.row: s.request.number for s in runner._scheduler.running}
        for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            if row in numbers and draw.random() < share:
                known = texts[numbers[row]][length + 1 :][: draw.randrange(count + 1)]
                drafts.tokens[i, : len(known)] = torch.tensor(known, dtype=torch.int64)
        return drafts

    drafter.draft = mixed
