"""Drafts that are right or wrong as a test wants, for runners over the toy model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from dsv4.kv_cache.batch import CacheStep
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving import Request, Runner, SamplingOptions, device_steps, runner_plan
from dsv4.serving.drafters import Drafter
from dsv4.serving.drafting import Drafting, DraftPlan
from dsv4.serving.sampler import Parameters, Variant
from dsv4.speculation.mtp import Drafts
from dsv4.speculation.verify import NO_DRAFT
from tests.serving.cases import plain_text

# Whether the draft of a position is right, wrong or missing: (position, number of the request).
Pattern = Callable[[int, int], str]


@dataclass(eq=False)
class KnownDrafts(Drafter):
    """Drafts that know the text of each request.

    Attributes:
        model: The model.
        pattern: Which of them to give.
        served: The runner.
        steps: Sizes of the steps so far: sequences with a row, drafts of each.
    """

    model: DeepseekV4ForCausalLM
    pattern: Pattern
    served: Runner | None = None
    steps: list[tuple[int, int]] = field(default_factory=list)
    _texts: dict[int, list[int]] = field(default_factory=dict)

    def draft(
        self,
        anchors: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        count: int,
        parameters: Parameters | None,
        variant: Variant,
    ) -> Drafts:
        self.steps.append((int((rows >= 0).sum()), count))
        drafts = [
            self._of(row, length, count)
            for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
        ]
        tokens = torch.tensor(drafts)
        if not variant.draw:
            return Drafts(tokens, None)
        certain = tokens.unsqueeze(-1) == torch.arange(self.model.config.vocab_size)
        return Drafts(tokens, certain.double())

    def _of(self, row: int, length: int, count: int) -> list[int]:
        assert self.served is not None
        running = [s for s in self.served._scheduler.running if s.row == row]
        if not running:
            return [NO_DRAFT] * count
        request, vocab = running[0].request, self.model.config.vocab_size
        text, drafts = self.know(request), list[int]()
        for position in range(length + 1, length + 1 + count):
            kind = self.pattern(position, request.number)
            if position >= len(text) or kind == "none":
                drafts.append(NO_DRAFT)
            else:
                drafts.append((text[position] + (kind == "wrong")) % vocab)
        return drafts

    def know(self, request: Request) -> list[int]:
        """The prompt of a request and its answer without drafts."""
        if request.number not in self._texts:
            text = whole_text(self.model, list(request.prompt), request.options, request.seed)
            self._texts[request.number] = [*request.prompt, *text]
        return self._texts[request.number]

    def skip(self, anchors: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        self.steps.append((int((rows >= 0).sum()), 0))

    def forward(
        self,
        ids: torch.Tensor,
        following: torch.Tensor,
        step: CacheStep,
        stored: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.model.config
        hidden, _ = self.model.model(ids, None, step)
        shape = (1, ids.shape[1], config.hc_mult, config.hidden_size)
        return hidden, torch.zeros(shape, dtype=self.model.dtype)

    def keep(self, rows: torch.Tensor, streams: torch.Tensor) -> None:
        assert streams.shape[0] == rows.shape[0]


@functools.lru_cache(maxsize=256)
def _whole_text(
    model: DeepseekV4ForCausalLM, prompt: tuple[int, ...], options: SamplingOptions, seed: int
) -> list[int]:
    return plain_text(model, list(prompt), options, seed)


def whole_text(
    model: DeepseekV4ForCausalLM, prompt: list[int], options: SamplingOptions, seed: int
) -> list[int]:
    """The answer without drafts, and some tokens more than it may have, which drafts know."""
    most = options.max_new_tokens + 12
    longer = replace(options, max_new_tokens=most, stop_ids=(), logprobs=None)
    return _whole_text(model, tuple(prompt), longer, seed)


def text_of(model: DeepseekV4ForCausalLM, request: Request) -> list[int]:
    """The answer of a request without drafts."""
    options = request.options
    text = whole_text(model, list(request.prompt), options, request.seed)[: options.max_new_tokens]
    ends = [i for i, token in enumerate(text) if token in request.stop_ids]
    return text[: ends[0] + 1] if ends else text


def drafting(
    monkeypatch: pytest.MonkeyPatch,
    model: DeepseekV4ForCausalLM,
    pattern: Pattern,
    tokens: int,
    **sizes: Any,
) -> tuple[Runner, KnownDrafts]:
    """Return a runner with drafts by a pattern; the model itself has no draft layers."""
    drafts = KnownDrafts(model, pattern)
    with monkeypatch.context() as patched:
        known = Drafting(DraftPlan("mtp", tokens))
        patched.setattr(runner_plan, "drafting_of", lambda *a, **b: known)
        patched.setattr(device_steps, "drafter_of", lambda *a: drafts)
        served = Runner(model, **sizes)
    drafts.served = served
    return served, drafts


def mixed(share: float, missing: float = 0.0, seed: int = 0) -> Pattern:
    """Right with a probability, missing with another, else wrong; the same for each position."""

    def pattern(position: int, number: int) -> str:
        value = hash((seed, position, number)) % 9973 / 9973
        return "right" if value < share else "none" if value < share + missing else "wrong"

    return pattern
