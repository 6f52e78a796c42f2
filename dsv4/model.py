"""The whole model: prefill, chunked prefill, decode and generation over a paged cache.

The module tree has transformers' names, so that one checkpoint map serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dsv4.cache import Batch, CacheStep, PagedCache
from dsv4.config import ModelConfig
from dsv4.layers.decoder import DeepseekV4DecoderLayer, DeepseekV4MTP
from dsv4.layers.hyper_connection import DeepseekV4HyperHead
from dsv4.layers.linear import Linear
from dsv4.layers.norm import DeepseekV4RMSNorm
from dsv4.layers.rotary import DeepseekV4RotaryEmbedding
from dsv4.page_tables import to_device
from dsv4.sampling import Sampler

if TYPE_CHECKING:
    from dsv4.checkpoint import LoadReport


class DeepseekV4Model(nn.Module):
    """Embedding, layers, head collapse and final norm (specification section 2)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = ModelConfig.of(config)
        config = self.config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DeepseekV4DecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = DeepseekV4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DeepseekV4RotaryEmbedding(config)
        self.hc_head = DeepseekV4HyperHead(config)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        past_key_values: CacheStep | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all layers.

        Args:
            input_ids: ``[B, S]`` int64; ``[1, T]`` with a ``CacheStep``.
            position_ids: ``[B, S]`` or ``[1, S]``; by default 0 to S-1, or those of the step.
            past_key_values: None, or the paged cache with this batch.

        Returns:
            Normalised hidden states ``[B, S, H]`` and the streams before the head ``[B, S, n, H]``.

        Raises:
            TypeError: if ``input_ids`` are not integers.
            ValueError: if their shape is wrong.
        """
        _check_ids(input_ids)
        position_ids = self._positions(input_ids, position_ids, past_key_values)
        embedded = self.embed_tokens(input_ids)
        streams = embedded.unsqueeze(2).repeat(1, 1, self.config.hc_mult, 1)
        tables = {
            label: self.rotary_emb(embedded, position_ids, label) for label in ("main", "compress")
        }
        for layer in self.layers:
            streams = layer(
                streams,
                input_ids,
                position_embeddings=tables,
                position_ids=position_ids,
                past_key_values=past_key_values,
            )
        return self.norm(self.hc_head(streams)), streams

    def _positions(
        self, input_ids: torch.Tensor, given: torch.Tensor | None, step: CacheStep | None
    ) -> torch.Tensor:
        if given is not None:
            return given
        if step is not None:
            return step.batch.positions.unsqueeze(0)
        return torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)


class DeepseekV4ForCausalLM(nn.Module):
    """DeepSeek-V4 with its output head and its multi-token-prediction layers.

    Args:
        config: ``ModelConfig``, or transformers' ``DeepseekV4Config``.
        mtp: Whether to hold the multi-token-prediction layers.

    Attributes:
        load_report: What ``dsv4.load`` found and left out; None for a model that it did not make.
    """

    load_report: LoadReport | None = None

    def __init__(self, config: Any, *, mtp: bool = True) -> None:
        super().__init__()
        self.config = ModelConfig.of(config)
        config = self.config
        self.model = DeepseekV4Model(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        first, count = config.num_hidden_layers, config.num_nextn_predict_layers
        self.mtp = nn.ModuleList(
            DeepseekV4MTP(config, first + i) for i in range(count if mtp else 0)
        )

    @property
    def device(self) -> torch.device:
        """Where the embedding is."""
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the residual streams."""
        return self.model.embed_tokens.weight.dtype

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        past_key_values: CacheStep | None = None,
    ) -> torch.Tensor:
        """Logits ``[B, S, vocab]`` for all positions; see ``DeepseekV4Model.forward``."""
        hidden, _ = self.model(input_ids, position_ids, past_key_values)
        return self.logits(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., H]`` to ``[..., vocab]``: in float32 with DeepSeek's numerics (section 2)."""
        if self.config.numerics == "transformers":
            return self.lm_head(hidden)
        return self.lm_head(hidden, torch.promote_types(hidden.dtype, torch.float32))

    def draft(
        self, next_ids: torch.Tensor, streams: torch.Tensor, layer: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the multi-token-prediction layer expects after the next token (section 9).

        Args:
            next_ids: ``[B, S]``, the token that follows each position.
            streams: ``[B, S, n, H]`` from ``DeepseekV4Model.forward``, or from the draft before.
            layer: Which of the layers.

        Returns:
            Logits ``[B, S, vocab]`` of the token after ``next_ids``, and the new streams.
        """
        _check_ids(next_ids)
        embedded = self.model.embed_tokens(next_ids)
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
        """An empty cache for this model, on its device.

        Args:
            max_sequences: Sequences held at once.
            max_tokens: Longest sequence.
            max_chunk: Most new tokens of one sequence in one step.
            index_format: Of the indexer's keys, see ``PagedCache``.
            pool_tokens: Room for compressed entries in shared pools, see ``PagedCache``.
            window_pages: Room for raw key-values in them.
        """
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
        sequences: Sequence[int],
        chunk: int | None = None,
    ) -> torch.Tensor:
        """Process prompts, of any lengths, in chunks; continues sequences that hold tokens.

        Args:
            prompts: Token ids per sequence, at least one each.
            cache: From ``new_cache``.
            sequences: The cache row of each prompt, from ``cache.allocate()``.
            chunk: Most tokens of a sequence per step; default the cache's ``max_chunk``.

        Returns:
            Logits ``[B, vocab]`` after each prompt's last token.

        Raises:
            CacheFullError: if a pool of the cache has too few pages for a chunk; nothing is done.
            ValueError: if a prompt is empty or too long, or ``chunk`` is not within 1 and
                ``max_chunk``.
        """
        if any(len(prompt) == 0 for prompt in prompts):
            raise ValueError("prefill: a prompt is empty, wanted at least one token")
        size = cache.max_chunk if chunk is None else chunk
        if not 1 <= size <= cache.max_chunk:
            raise ValueError(f"prefill: chunk is {size}, wanted 1 to {cache.max_chunk}")
        lengths = [len(prompt) for prompt in prompts]
        if max(lengths) > size:
            cache.check_prompts(sequences, lengths, size)
        last: torch.Tensor | None = None
        for begin in range(0, max(lengths), size):
            pieces = [list(prompt[begin : begin + size]) for prompt in prompts]
            logits = self._step(pieces, cache, sequences)
            live = torch.tensor([len(piece) > 0 for piece in pieces], device=logits.device)
            last = logits if last is None else torch.where(live.unsqueeze(1), logits, last)
        assert last is not None
        return last

    @torch.inference_mode()
    def decode(
        self, tokens: torch.Tensor, cache: PagedCache, sequences: torch.Tensor | Sequence[int]
    ) -> torch.Tensor:
        """One token per sequence.

        With rows on the host the step is prepared and checked here. With rows on the device, as in
        a graph, ``cache.prepare`` is the caller's: a token without room is not stored, without an
        error, because asking would read the lengths back from the device on every step.

        Args:
            tokens: ``[B]`` int64.
            cache: From ``new_cache``.
            sequences: ``[B]`` cache rows: ints, or int64 on the model's device.

        Returns:
            Logits ``[B, vocab]``.

        Raises:
            CacheFullError: if a pool of the cache has no page left.
            ValueError: if a sequence has ``cache.max_tokens`` tokens already.
        """
        if not isinstance(sequences, torch.Tensor):
            cache.prepare(sequences, [1] * len(sequences))
            sequences = to_device(sequences, self.device)
        batch = Batch.decode(cache.lengths[sequences], sequences)
        hidden, _ = self.model(tokens.unsqueeze(0), None, CacheStep(cache, batch))
        cache.advance(batch)
        return self.logits(hidden[0])

    def _step(
        self, pieces: Sequence[Sequence[int]], cache: PagedCache, sequences: Sequence[int]
    ) -> torch.Tensor:
        """One forward over a ragged batch; logits ``[B, vocab]`` of each last token."""
        lengths = [len(piece) for piece in pieces]
        rows = to_device(list(sequences), self.device)
        starts = cache.lengths[rows]
        # Without pools steps need not have been announced: only the device knows the lengths.
        cache.prepare(sequences, lengths, None if cache.pooled else starts.tolist())
        batch = Batch.from_lengths(lengths, starts, rows)
        flat = [token for piece in pieces for token in piece]
        ids = to_device(flat, self.device).unsqueeze(0)
        hidden, _ = self.model(ids, None, CacheStep(cache, batch))
        cache.advance(batch)
        ends = (batch.cu_seqlens[1:] - 1).clamp(min=0)
        return self.logits(hidden[0, ends.long()])

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        sampler: Sampler | None = None,
        stop_ids: Sequence[int] | None = None,
        chunk: int | None = None,
    ) -> list[list[int]]:
        """Continue each prompt until a stop token or ``max_new_tokens``.

        Args:
            prompts: Token ids per sequence, at least one each.
            max_new_tokens: Most tokens to add.
            sampler: How to choose; greedy if None.
            stop_ids: Tokens that end a sequence, kept in the output; default the configuration's
                ``eos_token_id``.
            chunk: Most prompt tokens of a sequence per step.

        Returns:
            The new tokens of each prompt.
        """
        if not prompts or max_new_tokens < 1:
            return [[] for _ in prompts]
        choose = sampler or Sampler()
        stops = set(_eos_ids(self.config) if stop_ids is None else stop_ids)
        longest = max(len(prompt) for prompt in prompts)
        cache = self.new_cache(len(prompts), longest + max_new_tokens, chunk or min(longest, 512))
        sequences = [cache.allocate() for _ in prompts]
        tokens = choose(self.prefill(prompts, cache, sequences, chunk))
        out: list[list[int]] = [[] for _ in prompts]
        live = list(range(len(prompts)))
        for count in range(1, max_new_tokens + 1):
            for i, token in zip(live, tokens.tolist(), strict=True):
                out[i].append(token)
            keep = [k for k, i in enumerate(live) if out[i][-1] not in stops]
            live = [live[k] for k in keep]
            if not live or count == max_new_tokens:
                break
            kept = tokens[to_device(keep, self.device)]
            tokens = choose(self.decode(kept, cache, [sequences[i] for i in live]))
        return out


def _eos_ids(config: ModelConfig) -> tuple[int, ...]:
    eos = config.eos_token_id
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def _check_ids(input_ids: torch.Tensor) -> None:
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"input_ids have dtype {input_ids.dtype}, wanted int64")
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids have shape {list(input_ids.shape)}, wanted [B, S]")
