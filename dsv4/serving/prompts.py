"""Steps that process tokens of prompts; on a GPU steps of few tokens are captured.

The host takes as long for the layers of 20 tokens as for those of one, and longer than a GPU
computes on a thousand. So steps of up to 1536 tokens are padded to buckets, each with a CUDA graph.
Two steps of a bucket differ only in data on the device: tokens, their positions and cache rows, and
the bounds of each sequence. Padding tokens have row -1 and follow all others: they read no entry
and write none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsv4.kv_cache.page_tables import to_device
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving.drafters import Drafter
from dsv4.serving.graphs import Chosen, Graphs, SamplerStep
from dsv4.serving.sampler import Variant
from dsv4.speculation.mtp import latest

# Beyond the largest bucket a GPU takes longer than the host: for Flash's 43 layers the host of an
# H100 takes 100 ms for an eager step of 600 tokens, and the GPU computes 512 tokens in 39 ms. A
# step of fewer tokens than the smallest bucket costs as much, because it reads the same weights.
BUCKETS = (32, 64, 128, 256, 512, 768, 1024, 1536)
_SEQUENCES = (1, 8, 64)  # sequences of a captured step; more prompts rarely have so few tokens
_ALIGNED = 2  # int64 numbers; kernels are compiled for inputs at multiples of 16 bytes


@dataclass(frozen=True)
class Part:
    """New tokens of one sequence in a step.

    Attributes:
        row: Row of the cache.
        start: Tokens that the row holds.
        tokens: Token ids, at least one.
        is_last: Whether a token is to be chosen after them.
        following: The token after them, if it is known; a draft reads it.
    """

    row: int
    start: int
    tokens: Sequence[int]
    is_last: bool
    following: int = 0


class Size(NamedTuple):
    """Sizes that a step is padded to."""

    tokens: int
    sequences: int


@dataclass(frozen=True, eq=False)
class Inputs:
    """Device memory for the inputs of steps of one size; one copy fills all of it.

    Attributes:
        memory: int64; the following tensors are parts of it.
        spans: Their places: tokens, those that follow them, positions and rows of tokens, then
            bounds, starts, rows and ends of sequences.
        ids: ``[1, T]`` tokens.
        following: ``[T]``, the token after each.
        ends: ``[B]`` index of each sequence's last token.
        batch: Positions and cache rows of the tokens, B sequences.
    """

    memory: torch.Tensor
    spans: tuple[slice, ...]
    ids: torch.Tensor
    following: torch.Tensor
    ends: torch.Tensor
    batch: Batch

    @classmethod
    def of_size(cls, size: Size, device: torch.device) -> Inputs:
        """Allocate the memory, uninitialised."""
        tokens, sequences = size
        spans, begin = list[slice](), 0
        for count in (*[tokens] * 4, sequences + 1, *[sequences] * 3):
            spans.append(slice(begin, begin + count))
            begin += -(-count // _ALIGNED) * _ALIGNED
        memory = torch.empty(begin, dtype=torch.int64, device=device)
        ids, following, positions, rows_of_tokens, cu_seqlens, starts, rows, ends = (
            memory[span] for span in spans
        )
        batch = Batch(cu_seqlens, starts, rows, positions, rows_of_tokens)
        return cls(memory, tuple(spans), ids.unsqueeze(0), following, ends, batch)

    def write(self, parts: Sequence[Part]) -> None:
        """Write sequences, then padding, in stream order, without waiting for a GPU."""
        end, cu_seqlens = 0, [0]
        ids, following = list[int](), list[int]()
        positions, rows_of_tokens = list[int](), list[int]()
        for part in parts:
            count = len(part.tokens)
            ids += part.tokens
            following += [*part.tokens[1:], part.following]
            positions += range(part.start, part.start + count)
            rows_of_tokens += [part.row] * count
            end += count
            cu_seqlens.append(end)
        columns = (
            (ids, 0),
            (following, 0),
            (positions, 0),
            (rows_of_tokens, -1),
            (cu_seqlens, end),
            ([part.start for part in parts], 0),
            ([part.row for part in parts], -1),
            ([number - 1 for number in cu_seqlens[1:]], 0),
        )
        numbers = list[int]()
        for (values, padding), span in zip(columns, self.spans, strict=True):
            numbers += [0] * (span.start - len(numbers))
            numbers += values
            numbers += [padding] * (span.stop - len(numbers))
        numbers += [0] * (len(self.memory) - len(numbers))
        self.memory.copy_(to_device(numbers, self.memory.device))


class PromptStep:
    """Steps of prompts, over static buffers, in a graph per captured size.

    Args:
        model: The model.
        cache: The model's cache, with pools.
        sampler: Sampler that reads the logits.
        graphs: Makes the graphs of the steps.
        buckets: Numbers of tokens that steps are padded to, ascending.
        drafter: Draft that reads what the steps compute; None: there is none.

    Attributes:
        sizes: Sizes that steps are padded to, ascending; larger steps are not padded.
    """

    def __init__(
        self,
        model: DeepseekV4ForCausalLM,
        cache: PagedCache,
        sampler: SamplerStep,
        graphs: Graphs,
        buckets: Sequence[int],
        drafter: Drafter | None = None,
    ) -> None:
        self._model, self._cache, self._drafter = model, cache, drafter
        self._sampler, self._graphs = sampler, graphs
        most = sampler.buckets[-1]
        sequences = sorted({sampler.bucket(min(count, most)) for count in _SEQUENCES})
        self.sizes = tuple(Size(tokens, count) for tokens in buckets for count in sequences)
        self._inputs: dict[Size, Inputs] = {}
        self._captured: dict[Size, torch.cuda.CUDAGraph] = {}

    @property
    def captures(self) -> int:
        """Graphs captured so far."""
        return len(self._captured)

    def run(
        self, parts: Sequence[Part], variant: Variant, captured: bool, size: Size | None = None
    ) -> Chosen | None:
        """Process tokens for which the cache is prepared.

        Args:
            parts: Parts of distinct rows; parts that end their prompts come first.
            variant: Variant that covers the needs of every such part.
            captured: Whether to replay graphs: those of ``capture``, if there is one, and the
                sampler's, captured at their first use.
            size: Sizes that the step is padded to; None: those of ``size``.

        Returns:
            Tokens of the parts that end their prompts, followed by padding; on the device, until
            the next step. None if there is no such part.

        Raises:
            CaptureError: if a capture of the sampler failed; nothing has changed then.
        """
        size = self.size(parts) if size is None else size
        ending = [part.row for part in parts if part.is_last]
        if captured and ending:
            self._sampler.capture(size.sequences, variant)
        inputs = self._inputs_of(size)
        inputs.write(parts)
        if captured and size in self._captured:
            self._captured[size].replay()
        else:
            self._forward(inputs, bool(ending), self._stored(parts, size))
        if not ending:
            return None
        self._sampler.write(ending)
        return self._sampler.run(size.sequences, variant, captured)

    def capture(self, size: Size) -> None:
        """Capture the graph of a size, unless it is there or steps are not padded to it.

        Raises:
            CaptureError: if the capture failed; nothing has changed then.
        """
        if size in self.sizes and size not in self._captured:
            inputs = self._inputs_of(size)
            inputs.write([])
            work = functools.partial(self._forward, inputs, logits=True)
            self._captured[size] = self._graphs.captured(work)[0]

    def replay_padding(self, size: Size) -> None:
        """Replay the graph of a size, if there is one, without a sequence."""
        if size in self._captured:
            self._inputs_of(size).write([])
            self._captured[size].replay()

    def size(self, parts: Sequence[Part]) -> Size:
        """Return the padded sizes of a step: the smallest of ``sizes``, or the sampler's bucket."""
        return self.size_of(sum(len(part.tokens) for part in parts), len(parts))

    def size_of(self, tokens: int, prompts: int) -> Size:
        """Return ``size`` for numbers of tokens and prompts."""
        for size in self.sizes:
            if size.tokens >= tokens and size.sequences >= prompts:
                return size
        return Size(tokens, self._sampler.bucket(prompts))

    def release(self) -> None:
        """Free the graphs."""
        self._captured.clear()

    def _inputs_of(self, size: Size) -> Inputs:
        if size not in self.sizes:
            return Inputs.of_size(size, self._model.device)
        if size not in self._inputs:
            self._inputs[size] = Inputs.of_size(size, self._model.device)
        return self._inputs[size]

    def _stored(self, parts: Sequence[Part], size: Size) -> torch.Tensor | None:
        """Return the tokens that a later draft may read; None: all, where a step is padded."""
        if self._drafter is None or size in self.sizes:
            return None
        lengths = [len(part.tokens) for part in parts]
        return latest(lengths, self._model.config.sliding_window, self._model.device)

    def _forward(self, inputs: Inputs, logits: bool, stored: torch.Tensor | None = None) -> None:
        """Run all layers; write logits of each sequence's last token if requested.

        ``stored``: tokens that a later draft may read; None: all.
        """
        cache, batch = self._cache, inputs.batch
        step = CacheStep(cache, batch)
        if self._drafter is None:
            hidden, _ = self._model.model(inputs.ids, None, step)
        else:
            hidden, streams = self._drafter.forward(inputs.ids, inputs.following, step, stored)
            self._drafter.keep(batch.sequences, streams[0].index_select(0, inputs.ends))
        cache.advance(batch)
        if logits:
            last = hidden[0].index_select(0, inputs.ends)
            self._sampler.logits[: len(last)].copy_(self._sampler.logits_of(last))
