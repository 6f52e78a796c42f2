"""Steps whose tokens were not read yet, and delivery of the tokens to requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4.kv_cache.paged_cache import PagedCache
from dsv4.parallel.context import Group
from dsv4.serving.graphs import Chosen
from dsv4.serving.readback import NOTHING, UNVERIFIED, Pending, Readback, Results
from dsv4.serving.request import Emitted, LogitsError
from dsv4.serving.sampler import FAILED
from dsv4.serving.scheduler import RunningSequence
from dsv4.serving.speculative import DraftCounts

_DEPTH = 4  # host buffers: three launches may be in flight before the oldest is read


@dataclass(frozen=True, eq=False)
class _Launched:
    """A launched step whose tokens have not been read.

    Attributes:
        sequences: Its sequences.
        results: ``1 + drafts`` rows of each sequence.
        drafts: Drafts of each sequence.
        decodes: Whether it is a decode step.
    """

    sequences: tuple[RunningSequence, ...]
    results: Pending
    drafts: int = 0
    decodes: bool = False

    def read(self) -> Results:
        """Wait for the results."""
        options = [sequence.request.options.logprobs for sequence in self.sequences]
        return self.results.wait([o for o in options for _ in range(1 + self.drafts)])


class LaunchedSteps:
    """Launched steps in their order; their tokens go to requests when they are read.

    Args:
        cache: The cache, which learns how many drafts of a sequence were accepted.
        rows: Most rows of a step.
        counts: Counts of drafts, to which each step's are added.
        peers: The group of other ranks. Steps wait for them, and they may be gone; None: no other
            ranks.
    """

    def __init__(
        self, cache: PagedCache, rows: int, counts: DraftCounts, peers: Group | None = None
    ) -> None:
        self._cache, self._rows, self._counts = cache, rows, counts
        self._peers = peers
        self._steps: deque[_Launched] = deque()
        self._readback = self._new_readback()

    def _new_readback(self) -> Readback:
        return Readback(self._rows, _DEPTH, self._cache.lengths.device, self._peers)

    def __len__(self) -> int:
        """The number of steps that have not been read."""
        return len(self._steps)

    def add(
        self,
        sequences: Sequence[RunningSequence],
        chosen: Chosen,
        drafts: int = 0,
        *,
        decodes: bool = False,
    ) -> None:
        """Start to read back the tokens of a step.

        Args:
            sequences: Its sequences.
            chosen: Its tokens, ``1 + drafts`` rows of each sequence, and padding.
            drafts: Drafts of each sequence.
            decodes: Whether it is a decode step.
        """
        count, logprobs = len(sequences) * (1 + drafts), chosen.logprobs
        if logprobs is not None:
            logprobs = type(logprobs)(*(tensor[:count] for tensor in logprobs))
        results = self._readback.start(chosen.tokens[:count], logprobs)
        self._steps.append(_Launched(tuple(sequences), results, drafts, decodes))

    def wait_for(self, tokens: torch.Tensor) -> None:
        """Read back tokens ``[n]`` of no request."""
        self._readback.start(tokens, None).wait([None] * len(tokens))

    def forget(self) -> None:
        """Drop all steps, whose tokens are not read any more."""
        self._steps.clear()
        self._readback = self._new_readback()

    def read(self, newest: int = 0) -> None:
        """Give tokens to their requests, except those of the ``newest`` steps."""
        while len(self._steps) > newest:
            step = self._steps[0]
            results, width = step.read(), 1 + step.drafts
            if step.decodes:
                self._count_kept(step, results)
            for i, sequence in enumerate(step.sequences):
                _give(sequence, results.emitted(range(i * width, (i + 1) * width)))
            self._steps.popleft()

    def _count_kept(self, step: _Launched, results: Results) -> None:
        """Note how many tokens the sequences of a decode step have, and tell the cache."""
        rows, lengths, width = [], [], 1 + step.drafts
        for i, sequence in enumerate(step.sequences):
            sequence.unread -= 1
            if not step.drafts or sequence.closed:
                continue
            tokens = results.tokens[i * width : (i + 1) * width]
            missing = tokens.count(UNVERIFIED)
            accepted = width - tokens.count(NOTHING) - missing - 1
            sequence.fed += accepted
            rows.append(sequence.row)
            lengths.append(sequence.fed - sequence.unread)
            if not sequence.request.done:
                self._counts.add(step.drafts - missing, accepted)
        if rows:
            self._cache.confirm(rows, lengths)


def _give(sequence: RunningSequence, emitted: Sequence[Emitted]) -> None:
    """Give tokens to a request; those behind its end are surplus."""
    for new in emitted:
        if sequence.request.done:
            return
        if new.token == FAILED:
            position = len(sequence.request.prompt) + len(sequence.request.tokens)
            reason = f"the logits of position {position} are not finite"
            sequence.request.fail(reason, LogitsError)
        elif sequence.repeats:
            _repeat(sequence, new.token)
        else:
            sequence.request.emit(new)


def _repeat(sequence: RunningSequence, token: int) -> None:
    """Count a token that was decoded again after a preemption."""
    tokens = sequence.request.tokens
    position = len(tokens) - sequence.repeats
    sequence.repeats -= 1
    if token != tokens[position]:
        sequence.request.fail(
            f"new token {position + 1} was {tokens[position]} and is {token} when decoded again: "
            "the model has changed"
        )
