"""The whole model with its output head: prefill, chunked prefill, decode and generation.

These run over a paged cache. The module tree has transformers' names, so that one checkpoint map
serves both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dsv4.config import ModelConfig
from dsv4.kv_cache.page_tables import to_device
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.layers._module import wider
from dsv4.layers.decoder import DeepseekV4MTP
from dsv4.layers.dspark import DeepseekV4DSpark
from dsv4.layers.linear import Linear
from dsv4.model.backbone import DeepseekV4Model, check_ids
from dsv4.parallel.agreement import reported
from dsv4.parallel.context import ParallelContext, has_own_tokens
from dsv4.serving.arguments import (
    check_tokens,
    checked_count,
    checked_prompts,
    checked_rows,
    checked_stops,
)
from dsv4.serving.sampling import Sampler

if TYPE_CHECKING:
    from dsv4.checkpoint.report import LoadReport


class DeepseekV4ForCausalLM(nn.Module):
    """DeepSeek-V4 with its output head and its draft layers.

    These are layers of multi-token prediction, or the stages of a DSpark draft.

    Args:
        config: ``ModelConfig``, or transformers' ``DeepseekV4Config``.
        mtp: Whether to hold the draft layers.
        parallel: This rank of several; None: this process alone. The modules then have this rank's
            sizes (``dsv4.parallel.split``), ``config`` has those of the model.

    Attributes:
        load_report: Findings of ``dsv4.load``; None for a model that it did not make.
        parallel: See the arguments.
    """

    load_report: LoadReport | None = None

    def __init__(
        self, config: Any, *, mtp: bool = True, parallel: ParallelContext | None = None
    ) -> None:
        super().__init__()
        self.config = ModelConfig.of(config)
        config = self.config
        self.parallel = parallel
        self.model = DeepseekV4Model(config, parallel)
        self.lm_head = Linear(config.hidden_size, len(self.model.vocabulary))
        first, count = config.num_hidden_layers, config.num_nextn_predict_layers
        self.mtp: nn.ModuleList
        if mtp and config.dspark is not None:
            self.mtp = DeepseekV4DSpark(config, parallel)
        else:
            layers = (DeepseekV4MTP(config, first + i, parallel) for i in range(count * mtp))
            self.mtp = nn.ModuleList(layers)

    @property
    def dspark(self) -> DeepseekV4DSpark | None:
        """The stages of the DSpark draft, or None; see ``dsv4.speculation.dspark``."""
        return self.mtp if isinstance(self.mtp, DeepseekV4DSpark) else None

    @property
    def device(self) -> torch.device:
        """Return where the embedding is."""
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the residual streams."""
        return self.model.embed_tokens.weight.dtype

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
    ) -> torch.Tensor:
        """Return logits ``[B, S, vocab]`` for all positions; see ``DeepseekV4Model.forward``."""
        hidden, _ = self.model(input_ids, position_ids, past_key_values)
        return self.logits(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[..., H]`` to logits ``[..., vocab]``, float32 in DeepSeek's numerics.

        Specification, section 2, step 5. On several ranks the logits of all are gathered, which
        ``dsv4.serving`` does only to verify drafts: without them it chooses tokens from the
        ``local_logits`` of each rank.
        """
        logits, parallel = self.local_logits(hidden), self.model.parallel
        if parallel is None:
            return logits
        return torch.cat(parallel.group.all_gather(logits), dim=-1)

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[..., H]`` to the logits of this rank's part of the vocabulary."""
        if self.config.numerics == "transformers":
            return self.lm_head(hidden)
        return self.lm_head(hidden, wider(hidden.dtype, torch.float32))

    def draft(
        self, next_ids: torch.Tensor, streams: torch.Tensor, layer: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft the token after the next with an MTP layer (specification, section 9).

        Args:
            next_ids: ``[B, S]``, the token that follows each position.
            streams: ``[B, S, n, H]`` from ``DeepseekV4Model.forward``, or from the draft before.
            layer: Which of the layers.

        Returns:
            Logits ``[B, S, vocab]`` of the token after ``next_ids``, and the new streams.
        """
        check_ids(next_ids, self.config.vocab_size, "next_ids")
        if self.dspark is not None:
            raise ValueError(
                "draft: the model has a DSpark draft, wanted layers of multi-token prediction: "
                "see dsv4.speculation.dspark.DSparkDraft"
            )
        if not 0 <= layer < len(self.mtp):
            raise ValueError(
                f"draft: layer is {layer}, wanted one of {len(self.mtp)} layers of multi-token "
                "prediction"
            )
        embedded = self.model.embed(next_ids)
        hidden, streams = self.mtp[layer](streams, embedded, input_ids=next_ids)
        return self.logits(hidden), streams

    def new_cache(
        self,
        max_sequences: int,
        max_tokens: int,
        max_chunk: int | None = None,
        index_format: str = "plain",
        pool_tokens: int | None = None,
        window_pages: int | None = None,
    ) -> PagedCache:
        """Make an empty cache for this model, on its device.

        Args:
            max_sequences: Sequences held at once.
            max_tokens: Longest sequence.
            max_chunk: Most new tokens of one sequence in one step.
            index_format: Format of the indexer's keys, see ``PagedCache``.
            pool_tokens: Room for compressed entries in shared pools, see ``PagedCache``.
            window_pages: Raw entries that these hold.

        Raises:
            ValueError: if ``max_tokens`` is more than the configuration's
                ``max_position_embeddings``, and what ``PagedCache`` raises.
        """
        most = self.config.max_position_embeddings
        if max_tokens > most:
            raise ValueError(
                f"new_cache: max_tokens is {max_tokens}, wanted at most {most} "
                "(max_position_embeddings)"
            )
        return PagedCache(
            self.config,
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            max_chunk=max_chunk,
            device=self.device,
            dtype=self.dtype,
            index_format=index_format,
            pool_tokens=pool_tokens,
            window_pages=window_pages,
        )

    @torch.inference_mode()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        cache: PagedCache,
        sequences: Sequence[int] | torch.Tensor,
        chunk: int | None = None,
    ) -> torch.Tensor:
        """Process prompts, of any lengths, in chunks; continues sequences that hold tokens.

        Either all chunks are processed or none: if anything raises, the cache is as before, and the
        call can be repeated.

        Args:
            prompts: Token ids per sequence, at least one each.
            cache: A cache that ``new_cache`` made.
            sequences: The cache row of each prompt, from ``cache.allocate()``.
            chunk: Most tokens of a sequence per step; the default is the cache's ``max_chunk``.

        Returns:
            Logits ``[B, vocab]`` after each prompt's last token.

        Raises:
            CacheFullError: if a pool of the cache has too few pages for a chunk.
            TypeError: if a prompt is no list of ints.
            ValueError: if there is no prompt, one is empty or too long, an id is not of the
                vocabulary, the rows are not as many or not allocated, or ``chunk`` is not within 1
                and ``max_chunk``.
        """
        pieces = checked_prompts("prefill", prompts, self.config.vocab_size)
        rows = checked_rows("prefill", sequences)
        if not pieces:
            raise ValueError("prefill: there is no prompt, wanted at least one")
        if len(rows) != len(pieces):
            raise ValueError(
                f"prefill: {len(pieces)} prompts and {len(rows)} sequences, wanted as many of each"
            )
        size = cache.max_chunk if chunk is None else checked_count("prefill", "chunk", chunk, 1)
        if size > cache.max_chunk:
            raise ValueError(f"prefill: chunk is {size}, wanted 1 to {cache.max_chunk}")
        lengths = [len(piece) for piece in pieces]
        cache.check_rows("prefill", rows)
        if max(lengths) <= size:
            with cache.atomic():
                return self._step(pieces, cache, rows)
        cache.check_prompts(rows, lengths, size)
        with cache.atomic(rows, lengths):
            return self._prefill_chunks(pieces, cache, rows, size)

    def _prefill_chunks(
        self, prompts: list[list[int]], cache: PagedCache, rows: list[int], size: int
    ) -> torch.Tensor:
        last: torch.Tensor | None = None
        for begin in range(0, max(map(len, prompts)), size):
            pieces = [prompt[begin : begin + size] for prompt in prompts]
            logits = self._step(pieces, cache, rows)
            live = to_device([len(piece) > 0 for piece in pieces], logits.device).bool()
            last = logits if last is None else torch.where(live.unsqueeze(1), logits, last)
        assert last is not None
        return last

    @torch.inference_mode()
    def decode(
        self, tokens: torch.Tensor, cache: PagedCache, sequences: torch.Tensor | Sequence[int]
    ) -> torch.Tensor:
        """Process one token per sequence.

        With rows on the host, a list or a tensor on the CPU, everything is checked here, the step
        is prepared unless ``cache.prepare`` was called for it, and if anything raises, the cache is
        as before, and the call can be repeated.

        Rows on another device, as in a graph, are not read, because that would wait for the device:
        the caller calls ``cache.prepare``, which checks, and ``cache.undo`` after an error. A token
        for which the cache has no room is dropped, without an error.

        Args:
            tokens: ``[B]`` int64, on the model's device. Ids out of the vocabulary raise on the CPU
                and are undefined elsewhere.
            cache: A cache that ``new_cache`` made.
            sequences: ``[B]`` cache rows, -1 for padding: ints, or an int64 tensor.

        Returns:
            Logits ``[B, vocab]``.

        Raises:
            CacheFullError: if a pool of the cache has no page left.
            TypeError: if ``tokens`` is no tensor of integers.
            ValueError: if there are not as many tokens as rows, a row occurs twice or is not
                allocated, a sequence has ``cache.max_tokens`` tokens already, or an id is not of
                the vocabulary.
        """
        vocabulary = self.config.vocab_size
        if isinstance(sequences, torch.Tensor) and sequences.device.type != "cpu":
            check_tokens("decode", tokens, len(sequences), vocabulary, self.device)
            return self._decode_step(tokens, cache, sequences)
        rows = checked_rows("decode", sequences)
        check_tokens("decode", tokens, len(rows), vocabulary, self.device)
        cache.check_rows("decode", rows)
        if isinstance(sequences, torch.Tensor) and cache.is_prepared(rows):
            return self._decode_step(tokens, cache, to_device(rows, self.device))
        with cache.atomic():
            cache.prepare(rows, [1] * len(rows), cache.starts_of(rows))
            return self._decode_step(tokens, cache, to_device(rows, self.device))

    def _decode_step(
        self, tokens: torch.Tensor, cache: PagedCache, rows: torch.Tensor
    ) -> torch.Tensor:
        batch = Batch.decode(cache.lengths[rows], rows)
        hidden, _ = self.model(tokens.unsqueeze(0), None, CacheStep(cache, batch))
        logits = self.logits(hidden[0])
        cache.advance(batch)
        return logits

    def _step(
        self, pieces: Sequence[Sequence[int]], cache: PagedCache, sequences: Sequence[int]
    ) -> torch.Tensor:
        """Run one forward over a ragged batch; logits ``[B, vocab]`` of each last token."""
        lengths = [len(piece) for piece in pieces]
        rows = to_device(list(sequences), self.device)
        starts = cache.lengths[rows]
        # Without pools ``prepare`` need not have been called: only the device knows the lengths.
        cache.prepare(sequences, lengths, None if cache.pooled else starts.tolist())
        batch = Batch.from_lengths(lengths, starts, rows)
        flat = [token for piece in pieces for token in piece]
        ids = to_device(flat, self.device).unsqueeze(0)
        hidden, _ = self.model(ids, None, CacheStep(cache, batch))
        ends = (batch.cu_seqlens[1:] - 1).clamp(min=0)
        logits = self.logits(hidden[0, ends.long()])
        cache.advance(batch)
        return logits

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        sampler: Sampler | None = None,
        stop_ids: Iterable[int] | torch.Tensor | None = None,
        chunk: int | None = None,
        speculate: str | None = "auto",
        draft_tokens: int | None = None,
        confidence_threshold: float | None = None,
    ) -> list[list[int]]:
        """Continue each prompt until a stop token or ``max_new_tokens``.

        A loop over ``dsv4.serving.Runner``. On a GPU the model keeps the runner, its cache and its
        captured graphs for the next call, until ``dsv4.serving.release``. ``dsv4.load`` makes them
        for one sequence of 8192 tokens (32768 with experts in host memory and a buffer for long
        prompts), ``dsv4.serving.prepare`` for more. A call that needs more
        makes them again, at least twice as large, which takes about a second and is logged.

        With ``parallel="tp"`` all ranks call it with the same prompts; with ``"dp"`` with prompts
        of their own, of any number, at the same time, and each gets its own tokens. What is wrong
        with the prompts of a rank is raised there, when the others have theirs.

        Args:
            prompts: Token ids per sequence, at least one each.
            max_new_tokens: Most tokens to add, 0 and up.
            sampler: A ``dsv4.serving.Sampler``, whose generator draws a seed for each prompt; None
                is greedy.
            stop_ids: Tokens that end a sequence, kept in the output; the default is the
                configuration's ``eos_token_id``.
            chunk: Most prompt tokens per step; the default is that of ``max_chunk`` of
                ``dsv4.serving.Runner``, 4096 or, with experts in host memory, up to 16384.
            speculate: ``"auto"``: draft tokens by the draft layers that the model holds, if it
                holds any, in steps of as many sequences as it pays for; ``"mtp"`` or ``"dspark"``:
                by these in any step; None: draft nothing. Greedy text does not depend on it.
            draft_tokens: Most drafts per step; None: 2 of MTP, all of a DSpark block, 1 of either
                where experts are in host memory.
            confidence_threshold: Of DSpark: least probability of acceptance of a draft that is
                verified; None: by what it costs. See ``dsv4.serving.Runner``.

        Returns:
            The new tokens of each prompt.

        Raises:
            RuntimeError: if logits hold NaN or infinity, naming the prompt.
            TypeError: if a prompt is no list of ints, or another argument has the wrong type.
            ValueError: if a prompt is empty, an id is not of the vocabulary, a number is too small,
                ``speculate`` names drafts that cannot be used, or prompt and new tokens are more
                than ``max_position_embeddings``.
        """
        from dsv4.serving.generation import generate  # it imports this module

        vocabulary, shares = self.config.vocab_size, has_own_tokens(self.parallel)
        with reported(self.parallel if shares else None):  # the ranks agree on it
            size = None if chunk is None else checked_count("generate", "chunk", chunk, 1)
        stops = frozenset(_eos_ids(self.config))
        try:
            checked = checked_prompts("generate", prompts, vocabulary)
            most = checked_count("generate", "max_new_tokens", max_new_tokens, 0)
            if stop_ids is not None:
                stops = checked_stops("generate", stop_ids, vocabulary)
            self._check_total(max(map(len, checked), default=0), most)
        except (TypeError, ValueError):
            if shares:  # the other ranks wait for this one, whose prompts they do not know
                generate(self, [], 0, chunk=size)
            raise
        if (most == 0 or not checked) and not shares:
            return [[] for _ in checked]
        return generate(
            self,
            checked,
            most,
            sampler=sampler,
            stop_ids=stops,
            chunk=size,
            speculate=speculate,
            draft_tokens=draft_tokens,
            confidence_threshold=confidence_threshold,
        )

    def _check_total(self, longest: int, new: int) -> None:
        most = self.config.max_position_embeddings
        if longest + new > most:
            raise ValueError(
                f"generate: the longest prompt has {longest} tokens and max_new_tokens is {new}, "
                f"wanted at most {most} together (max_position_embeddings)"
            )


def _eos_ids(config: ModelConfig) -> tuple[int, ...]:
    eos = config.eos_token_id
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
