"""Decode steps and the sampler after each step: captured on a GPU per batch bucket, else eager.

A CUDA graph per bucket computes the logits; a smaller graph per bucket and sampler variant chooses
the tokens. Both read the batch's cache rows from one buffer, so that adding or removing a sequence
is one write to that buffer. Rows of -1 are padding: they read no entry and write none. Steps of
prompts (``dsv4.serving.prompts``) put their logits into the same buffer and share the sampler.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dsv4.kv_cache.page_tables import to_device
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving._capture import captured as capture_work
from dsv4.serving.row_state import RowState
from dsv4.serving.sampler import Logprobs, Variant

_Output = TypeVar("_Output")


@dataclass(frozen=True, eq=False)
class Chosen:
    """Outputs of the sampler on the device; a captured step overwrites them every time."""

    tokens: torch.Tensor
    logprobs: Logprobs | None

    def copied(self, count: int) -> Chosen:
        """Copy the first ``count`` rows to memory that no later step overwrites."""
        logprobs = self.logprobs
        if logprobs is not None:
            logprobs = type(logprobs)(*(tensor[:count].clone() for tensor in logprobs))
        return Chosen(self.tokens[:count].clone(), logprobs)

    @classmethod
    def joined(cls, parts: Sequence[Chosen]) -> Chosen:
        """Join the rows of several steps, which all have log-probabilities or all have none."""
        reports = [part.logprobs for part in parts if part.logprobs is not None]
        assert len(reports) in (0, len(parts))
        tokens = torch.cat([part.tokens for part in parts])
        logprobs = Logprobs(*map(torch.cat, zip(*reports, strict=True))) if reports else None
        return cls(tokens, logprobs)


def default_buckets(max_sequences: int) -> tuple[int, ...]:
    """Return the batch sizes to capture: 1, 2, 4, multiples of 8, and ``max_sequences``."""
    sizes = {1, 2, 4, *range(8, max_sequences, 8)}
    return tuple(sorted({size for size in sizes if size < max_sequences} | {max_sequences}))


class Graphs:
    """Captures graphs that share memory, because they are replayed one after another.

    The memory is a pool of PyTorch's allocator and belongs to the graphs. When the last graph is
    freed, the allocator takes the pool back and refuses a capture into it. This class therefore
    uses a pool only while one of its graphs lives; a later capture gets a new pool.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._in_pool: list[weakref.ref[torch.cuda.CUDAGraph]] = []

    def captured(self, work: Callable[[], _Output]) -> tuple[torch.cuda.CUDAGraph, _Output]:
        """Run ``work`` once, then capture its graph; its inputs must be padding alone.

        Raises:
            CaptureError: if the capture failed; no sequence has changed.
        """
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            work()  # compiles kernels and makes workspaces: a capture must not
        current.wait_stream(side)
        living = self._living()  # held until the capture has ended: a collection frees none
        if self._pool is None or not living:
            # The new pool has no graphs, even if some live in the pool of a failed capture.
            self._pool, living = torch.cuda.graph_pool_handle(), []
        pool, self._pool = self._pool, None  # must not be used again if the capture fails
        graph, out = capture_work(work, pool)
        self._pool = pool
        self._in_pool = [*map(weakref.ref, living), weakref.ref(graph)]
        return graph, out

    def release(self) -> None:
        """Drop the memory: the graphs are gone."""
        self._pool, self._in_pool = None, []

    def _living(self) -> list[torch.cuda.CUDAGraph]:
        """Return the graphs of the pool that somebody still holds."""
        graphs = (reference() for reference in self._in_pool)
        return [graph for graph in graphs if graph is not None]


class SamplerStep:
    """Chooses tokens from the logits of a step, in a graph per bucket and variant.

    Attributes:
        buckets: Numbers of rows, ascending; the largest holds every batch.
        rows: ``[largest]`` cache rows, -1 for padding.
        logits: ``[largest, vocab]``, which a step writes; on several ranks those of this one,
            unless drafts are verified.
    """

    def __init__(
        self,
        model: DeepseekV4ForCausalLM,
        cache: PagedCache,
        state: RowState,
        buckets: Sequence[int],
        graphs: Graphs,
    ) -> None:
        self.buckets = tuple(buckets)
        self._model = model
        self._cache, self._state, self._graphs = cache, state, graphs
        device, most = model.device, self.buckets[-1]
        self.rows = torch.full((most,), -1, dtype=torch.int64, device=device)
        wide = torch.promote_types(model.dtype, torch.float32)
        shape = (most, state.width)
        self.logits = torch.zeros(shape, dtype=wide, device=device)
        self._written: list[int] | None = None  # the values of the rows on the device
        self._captured: dict[tuple[int, Variant], tuple[torch.cuda.CUDAGraph, Chosen]] = {}

    @property
    def captures(self) -> int:
        """The number of graphs captured so far."""
        return len(self._captured)

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states ``[T, H]`` that this sampler reads."""
        model = self._model
        return model.logits(hidden) if self._state.part is None else model.local_logits(hidden)

    def bucket(self, count: int) -> int:
        """Return the smallest bucket that holds ``count`` sequences."""
        return next(size for size in self.buckets if size >= count)

    def write(self, rows: Sequence[int]) -> None:
        """Set ``rows`` to these, distinct ones, and then to padding."""
        padded = [*rows, *[-1] * (self.buckets[-1] - len(rows))]
        if padded == self._written:
            return
        self._written = None
        self.rows.copy_(to_device(padded, self.rows.device))
        self._written = padded

    def capture(self, size: int, variant: Variant) -> None:
        """Capture the graph of a bucket and variant, unless it is there.

        Raises:
            CaptureError: if the capture failed.
        """
        if variant.penalty:
            self._state.with_present()  # not in the memory of a graph
        if (size, variant) not in self._captured:
            self.write([])
            self._captured[size, variant] = self._graphs.captured(
                lambda: self._choose(size, variant)
            )

    def run(self, size: int, variant: Variant, captured: bool) -> Chosen:
        """Sample a token for each of the first ``size`` rows; replay the graph of ``capture``."""
        if not captured:
            return self._choose(size, variant)
        graph, chosen = self._captured[size, variant]
        graph.replay()
        return chosen

    def release(self) -> None:
        """Free the graphs."""
        self._captured.clear()

    def _choose(self, size: int, variant: Variant) -> Chosen:
        return choose(self._cache, self._state, self.logits[:size], self.rows[:size], variant)


class DecodeStep:
    """Decode steps over static buffers, in a graph per bucket of the sampler."""

    def __init__(
        self,
        model: DeepseekV4ForCausalLM,
        cache: PagedCache,
        state: RowState,
        sampler: SamplerStep,
        graphs: Graphs,
    ) -> None:
        self._model, self._cache, self._state = model, cache, state
        self._sampler, self._graphs = sampler, graphs
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}

    @property
    def captures(self) -> int:
        """The number of graphs captured so far, without the sampler's."""
        return len(self._captured)

    def run(
        self, rows: Sequence[int], variant: Variant, captured: bool, size: int | None = None
    ) -> Chosen:
        """Decode one token more for each of the cache rows, which the cache is prepared for.

        Args:
            rows: Distinct cache rows.
            variant: Variant that covers the needs of every row.
            captured: Whether to replay graphs, captured at their first use.
            size: Bucket that the step is padded to; None: the smallest.

        Returns:
            The tokens, those of padding included; on the device, until the next step.

        Raises:
            CaptureError: if a capture failed; nothing has changed then.
        """
        size = self._sampler.bucket(len(rows)) if size is None else size
        if captured:
            self.capture(size, variant)
        self._sampler.write(rows)
        if captured:
            self._captured[size].replay()
        else:
            self._forward(size)
        return self._sampler.run(size, variant, captured)

    def capture(self, size: int, variant: Variant) -> None:
        """Capture the graphs of a bucket and variant, unless they are there.

        Raises:
            CaptureError: if a capture failed; nothing has changed then.
        """
        if size not in self._captured:
            self._sampler.write([])
            self._captured[size] = self._graphs.captured(lambda: self._forward(size))[0]
        self._sampler.capture(size, variant)

    def replay_padding(self, size: int, variant: Variant) -> None:
        """Replay the graphs that ``capture`` captured, without a sequence."""
        self._sampler.write([])
        self._captured[size].replay()
        self._sampler.run(size, variant, captured=True)

    def release(self) -> None:
        """Free the graphs."""
        self._captured.clear()

    def _forward(self, size: int) -> None:
        rows, cache = self._sampler.rows[:size], self._cache
        # Values of padding: the length of any sequence, which nothing reads, and token 0.
        batch = Batch.decode(cache.lengths[rows], rows)
        ids = self._state.tokens[self._state.entries(rows)].unsqueeze(0)
        hidden, _ = self._model.model(ids, None, CacheStep(cache, batch))
        cache.advance(batch)
        self._sampler.logits[:size].copy_(self._sampler.logits_of(hidden[0]))


def choose(
    cache: PagedCache,
    state: RowState,
    logits: torch.Tensor,
    rows: torch.Tensor,
    variant: Variant,
) -> Chosen:
    """Sample a token for each row; its sequence processes it next.

    Args:
        cache: The cache, whose lengths are the positions of the new tokens.
        state: State of the cache's rows.
        logits: ``[B, vocab]``, on several ranks those of this one.
        rows: ``[B]`` cache rows, -1 for padding.
        variant: Variant that covers the needs of every row.
    """
    entries = state.entries(rows)
    tokens = state.next_tokens(logits, entries, lambda: cache.lengths[rows], variant)
    state.chosen(entries, tokens, variant.penalty)
    return Chosen(tokens, state.logprobs(logits, tokens) if variant.logprobs else None)
