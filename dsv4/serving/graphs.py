"""One decode step of a batch bucket and the sampler behind it: captured on a GPU, else eager.

A CUDA graph per bucket computes the logits; a smaller graph per bucket and sampler variant chooses
the tokens. They read which cache rows the batch has from one buffer, so a sequence that joins or
leaves is a write to that buffer. Rows of -1 are padding: they read no entry and write none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dsv4.cache import Batch, CacheStep, PagedCache
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.page_tables import to_device
from dsv4.serving._capture import captured as capture_work
from dsv4.serving.row_state import RowState
from dsv4.serving.sampler import Logprobs, Variant, logprobs

_Output = TypeVar("_Output")


@dataclass(frozen=True, eq=False)
class Chosen:
    """Outputs of the sampler on the device; a captured step overwrites them every time."""

    tokens: torch.Tensor
    logprobs: Logprobs | None

    def copied(self, count: int) -> Chosen:
        """The first ``count`` rows, in memory that no later step overwrites."""
        found = self.logprobs
        if found is not None:
            found = type(found)(*(tensor[:count].clone() for tensor in found))
        return Chosen(self.tokens[:count].clone(), found)

    @classmethod
    def joined(cls, parts: Sequence[Chosen]) -> Chosen:
        """Rows of several steps, all of them with log-probabilities or none."""
        reports = [part.logprobs for part in parts if part.logprobs is not None]
        assert len(reports) in (0, len(parts))
        tokens = torch.cat([part.tokens for part in parts])
        logprobs = Logprobs(*map(torch.cat, zip(*reports, strict=True))) if reports else None
        return cls(tokens, logprobs)


def default_buckets(max_sequences: int) -> tuple[int, ...]:
    """Batch sizes that are captured: 1, 2, 4, multiples of 8, and ``max_sequences``."""
    sizes = {1, 2, 4, *range(8, max_sequences, 8)}
    return tuple(sorted({size for size in sizes if size < max_sequences} | {max_sequences}))


class DecodeStep:
    """Decode steps over static buffers.

    Attributes:
        buckets: Batch sizes, ascending; the largest holds every batch.
        captures: Graphs captured so far.
    """

    def __init__(
        self,
        model: DeepseekV4ForCausalLM,
        cache: PagedCache,
        state: RowState,
        buckets: Sequence[int],
    ) -> None:
        self.buckets = tuple(buckets)
        self.captures = 0
        self._model, self._cache, self._state = model, cache, state
        device, most = model.device, self.buckets[-1]
        self._rows = torch.full((most,), -1, dtype=torch.int64, device=device)
        wide = torch.promote_types(model.dtype, torch.float32)
        shape = (most, model.config.vocab_size)
        self._logits = torch.zeros(shape, dtype=wide, device=device)
        self._written: list[int] | None = None  # what the device's rows are
        self._steps: dict[int, torch.cuda.CUDAGraph] = {}
        self._samplers: dict[tuple[int, Variant], tuple[torch.cuda.CUDAGraph, Chosen]] = {}
        self._pool: Any = None  # memory that the graphs share

    def bucket(self, count: int) -> int:
        """Smallest bucket that holds ``count`` sequences."""
        return next(size for size in self.buckets if size >= count)

    def run(self, rows: Sequence[int], variant: Variant, captured: bool) -> Chosen:
        """One token more for each of the cache rows, which the cache is prepared for.

        Args:
            rows: Distinct cache rows.
            variant: Covers what each of them needs.
            captured: Whether to replay graphs, captured at their first use.

        Returns:
            The tokens, those of padding included; on the device, until the next step.

        Raises:
            CaptureError: if a capture failed; nothing has changed then.
        """
        size = self.bucket(len(rows))
        if captured:
            self._capture(size, variant)
        self._write(rows)
        if not captured:
            self._forward(size)
            return self._choose(size, variant)
        self._steps[size].replay()
        graph, chosen = self._samplers[size, variant]
        graph.replay()
        return chosen

    def capture(self, sizes: Sequence[int], variants: Sequence[Variant]) -> None:
        """Capture graphs ahead of their first use, the largest first; the others use its memory.

        Raises:
            CaptureError: if a capture failed; nothing has changed then.
        """
        for size in sorted(sizes, reverse=True):
            for variant in variants:
                self._capture(size, variant)

    def release(self) -> None:
        """Free all graphs."""
        self._steps.clear()
        self._samplers.clear()
        self._pool, self.captures = None, 0

    def _write(self, rows: Sequence[int]) -> None:
        padded = [*rows, *[-1] * (self.buckets[-1] - len(rows))]
        if padded == self._written:
            return
        self._written = None
        self._rows.copy_(to_device(padded, self._rows.device))
        self._written = padded

    def _forward(self, size: int) -> None:
        rows, cache = self._rows[:size], self._cache
        # Of padding: the length of any sequence, which nothing reads, and token 0.
        batch = Batch.decode(cache.lengths[rows], rows)
        ids = self._state.tokens[self._state.entries(rows)].unsqueeze(0)
        hidden, _ = self._model.model(ids, None, CacheStep(cache, batch))
        cache.advance(batch)
        self._logits[:size].copy_(self._model.logits(hidden[0]))

    def _choose(self, size: int, variant: Variant) -> Chosen:
        return choose(self._cache, self._state, self._logits[:size], self._rows[:size], variant)

    def _capture(self, size: int, variant: Variant) -> None:
        if variant.penalty:
            self._state.with_present()  # not in the memory of a graph
        if size not in self._steps:
            self._steps[size] = self._captured(lambda: self._forward(size))[0]
        if (size, variant) not in self._samplers:
            found = self._captured(lambda: self._choose(size, variant))
            self._samplers[size, variant] = found

    def _captured(self, work: Callable[[], _Output]) -> tuple[torch.cuda.CUDAGraph, _Output]:
        """A graph of ``work`` over rows of padding, so that no sequence changes."""
        self._write([])
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            work()  # compiles kernels and makes workspaces, which a capture must not
        current.wait_stream(side)
        pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        self._pool = None  # not to be used again if the capture fails
        graph, out = capture_work(work, pool)
        self._pool = pool
        self.captures += 1
        return graph, out


def choose(
    cache: PagedCache,
    state: RowState,
    logits: torch.Tensor,
    rows: torch.Tensor,
    variant: Variant,
) -> Chosen:
    """Sample a token for each row and make it the one that its sequence processes next.

    Args:
        cache: Its lengths are the positions of the new tokens.
        state: Of the cache's rows.
        logits: ``[B, vocab]``.
        rows: ``[B]`` cache rows, -1 for padding.
        variant: Covers what each row needs.
    """
    entries = state.entries(rows)
    tokens = state.next_tokens(logits, entries, lambda: cache.lengths[rows], variant)
    state.chosen(entries, tokens, variant.penalty)
    return Chosen(tokens, logprobs(logits, tokens) if variant.logprobs else None)
