"""DSpark, the draft of the 0731 and 0813 releases: its modules (specification, section 9.1).

A draft is some decoder blocks, the stages, over one block of rows per sequence. The first row has
the token that was sampled last, the anchor, and the others a noise token; all see each other and
the positions before the anchor. What the stages store of these positions, their context, does not
come from tokens but from the residual streams of a few main layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dsv4.config import ModelConfig
from dsv4.kv_cache.layer_cache import LayerCache
from dsv4.kv_cache.pages import Pages
from dsv4.layers._module import empty_weight, wider
from dsv4.layers.attention import DeepseekV4Attention, Tables
from dsv4.layers.decoder import DeepseekV4DecoderLayer
from dsv4.layers.hyper_connection import DeepseekV4HyperHead
from dsv4.layers.linear import Linear
from dsv4.layers.norm import DeepseekV4RMSNorm
from dsv4.ops.attention import sparse_attention
from dsv4.ops.kv_cache import norm_rope_write_kv
from dsv4.ops.slots import window_slots
from dsv4.parallel.context import ParallelContext, has_own_tokens
from dsv4.parallel.reduce import all_reduce


@dataclass(eq=False)
class Taps:
    """What a DSpark draft reads from a forward of the main model.

    Attributes:
        layers: Main layers after which the residual streams are read.
        values: For each of them, so far, the mean of the streams ``[B, S, H]``.
    """

    layers: Sequence[int]
    values: list[torch.Tensor] = field(default_factory=list)

    def take(self, layer: int, streams: torch.Tensor) -> None:
        """Take the mean of the streams ``[B, S, n, H]`` that a layer returned, if it is read."""
        if layer in self.layers:
            self.values.append(streams.mean(dim=-2))

    @property
    def tokens(self) -> int:
        """The number of tokens of the forward.

        Raises:
            ValueError: unless one forward filled the object.
        """
        self._check()
        return self.values[0].shape[:-1].numel()

    def joined(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Return the means of all layers, one after another: ``[B, S, layers * H]``.

        Args:
            tokens: ``[N]`` int64, which tokens of all ``B * S``: the result is ``[N, layers * H]``.
                None: all.

        Raises:
            ValueError: unless one forward filled the object.
        """
        self._check()
        if tokens is None:
            return torch.cat(self.values, dim=-1)
        return torch.cat([value.flatten(0, -2)[tokens] for value in self.values], dim=-1)

    def _check(self) -> None:
        if len(self.values) != len(self.layers):
            raise ValueError(
                f"Taps: {len(self.values)} layers were read, wanted {len(self.layers)}: an object "
                "serves one forward of a model with all of these layers"
            )


@dataclass(frozen=True, eq=False)
class DraftBlocks:
    """Blocks of a DSpark draft, one of ``rows`` rows for each sequence, flat.

    Attributes:
        layers: The cache of each stage.
        sequences: ``[T]`` int64, row of the cache of each row, -1 for padding.
        anchors: ``[T]`` int64, position of the first row of each row's block.
        rows: Rows of a block.
        tables: cos and sin of the rows' positions, ``[T, rope_dim / 2]``.
        pages: Pages with the entries of one stage's rows, a page for each block.
    """

    layers: Sequence[LayerCache]
    sequences: torch.Tensor
    anchors: torch.Tensor
    rows: int
    tables: Tables
    pages: Pages
    _slots: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    def written(self) -> torch.Tensor:
        """Return the slot of each row's own entry in ``pages``, ``[T]``; -1 for padding."""
        number = torch.arange(self.sequences.shape[0], device=self.sequences.device)
        slots = number // self.rows * self.pages.page_size + number % self.rows
        return torch.where(self.sequences < 0, -1, slots)

    def seen(self) -> torch.Tensor:
        """Return the slots in ``pages`` of all rows of each row's block, ``[T, rows]``."""
        return self.written().view(-1, self.rows).repeat_interleave(self.rows, 0)

    def context(self, layer: LayerCache) -> torch.Tensor:
        """Return the slots of the window before each row's anchor, which is not part of it."""
        key = id(layer.window_table)
        if key not in self._slots:
            self._slots[key] = window_slots(
                layer.window_table,
                layer.window.page_size,
                self.sequences,
                self.anchors - 1,
                layer.sliding_window,
            )
        return self._slots[key]


class DeepseekV4DSparkAttention(DeepseekV4Attention):
    """Attention of a stage: every row sees its whole block and the window before the anchor."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[str, Tables] | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        *,
        cache: Any = None,
        reduce: bool = True,
    ) -> tuple[torch.Tensor, None]:
        """Attend for the rows ``[1, T, H]`` of blocks; return as many.

        Args:
            hidden_states: Normed input of the sublayer.
            position_embeddings: None: blocks have tables of their own.
            position_ids: None.
            attention_mask: None.
            past_key_values: The ``DraftBlocks``.
            cache: None.
            reduce: See ``DeepseekV4Attention.forward``.

        Raises:
            TypeError: if ``past_key_values`` are not blocks.
            ValueError: if the rows are not as many as those of the blocks, or another argument is
                given.
        """
        blocks = past_key_values
        if not isinstance(blocks, DraftBlocks):
            kind = type(blocks).__name__
            raise TypeError(f"{type(self).__name__}: past_key_values is {kind}, wanted DraftBlocks")
        others = (position_embeddings, position_ids, attention_mask, cache)
        if any(value is not None for value in others):
            raise ValueError(
                f"{type(self).__name__}: an argument beside DraftBlocks, wanted None for all"
            )
        self._check(hidden_states, None)
        if hidden_states.shape[:2] != (1, blocks.sequences.shape[0]):
            raise ValueError(
                f"{type(self).__name__}: hidden_states has shape {list(hidden_states.shape)}, "
                f"wanted [1, {blocks.sequences.shape[0]}, H]"
            )
        out = self._up(self._attend_block(hidden_states[0], blocks)).unsqueeze(0)
        return all_reduce(self.parallel, out) if reduce else out, None

    def _attend_block(self, x: torch.Tensor, blocks: DraftBlocks) -> torch.Tensor:
        stage = self.layer_idx - self.config.num_hidden_layers
        layer, pages, (cos, sin) = blocks.layers[stage], blocks.pages, blocks.tables
        q = self._queries_and_entries(self._down(x), blocks.tables, pages, blocks.written())
        return sparse_attention(
            q,
            layer.window,
            blocks.context(layer),
            pages,
            blocks.seen(),
            self.sinks,
            scale=self.scaling,
            cos=cos,
            sin=sin,
        )

    def write_context(
        self, context: torch.Tensor, tables: Tables, layer: LayerCache, slots: torch.Tensor
    ) -> None:
        """Store the entries of positions that are known to be right.

        Args:
            context: ``[T, H]``, see ``DeepseekV4DSpark.context``.
            tables: cos and sin of the positions, ``[T, rope_dim / 2]``.
            layer: The stage's cache.
            slots: ``[T]`` int64, negative: nothing is stored.
        """
        norm = self.kv_norm
        norm_rope_write_kv(
            layer.window,
            self.kv_proj(context),
            norm.weight,
            *tables,
            slots,
            eps=norm.variance_epsilon,
        )


class DeepseekV4MarkovHead(nn.Module):
    """What a token adds to the logits of the next one, by matrices of low rank.

    Attributes:
        markov_w1: A vector for each token.
        markov_w2: Maps it to logits.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        rank = _dspark(config).markov_rank
        self.markov_w1 = _Table(config.vocab_size, rank)
        self.markov_w2 = Linear(rank, config.vocab_size)

    def vectors(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``[B, rank]`` for tokens ``[B]``; a negative one counts as 0."""
        return F.embedding(tokens.clamp(min=0), self.markov_w1.weight)

    def forward(self, vectors: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Add to ``logits [B, vocab]``, in their dtype, what ``vectors [B, rank]`` say."""
        return logits + self.markov_w2(vectors, wider(vectors.dtype, logits.dtype))


class _Table(nn.Module):
    """Vectors of tokens."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = empty_weight(rows, columns)


class DeepseekV4ConfidenceHead(nn.Module):
    """How likely a drafted token is to be accepted, if those before it are."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.proj = Linear(config.hidden_size + _dspark(config).markov_rank, 1)

    def forward(self, hidden: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return ``[B]`` logits, float32 or wider.

        Args:
            hidden: ``[B, H]``, the collapsed streams BEFORE the norm.
            vectors: ``[B, rank]`` of the tokens before, see ``DeepseekV4MarkovHead.vectors``.
        """
        joined = torch.cat((hidden, vectors), dim=-1)
        result: torch.Tensor = self.proj(joined, wider(joined.dtype, torch.float32))
        return result.squeeze(-1)


class DeepseekV4DSparkStage(nn.Module):
    """A stage: a block; the first also maps the context, the last has the heads."""

    def __init__(
        self, config: ModelConfig, number: int, parallel: ParallelContext | None = None
    ) -> None:
        super().__init__()
        dspark, hidden, eps = _dspark(config), config.hidden_size, config.rms_norm_eps
        index = config.num_hidden_layers + number
        self.layer = DeepseekV4DecoderLayer(
            config.stage, index, parallel, attention=DeepseekV4DSparkAttention
        )
        if number == 0:
            taps = dspark.stages * hidden
            self.main_proj = Linear(taps, hidden, activation=config.activation)
            self.main_norm = DeepseekV4RMSNorm(hidden, eps=eps)
        if number == dspark.stages - 1:
            self.norm = DeepseekV4RMSNorm(hidden, eps=eps)
            self.hc_head = DeepseekV4HyperHead(config)
            self.markov_head = DeepseekV4MarkovHead(config)
            self.confidence_head: DeepseekV4ConfidenceHead | None = None
            if dspark.confidence_head:
                self.confidence_head = DeepseekV4ConfidenceHead(config)


class DeepseekV4DSpark(nn.ModuleList):
    """The stages of a DSpark draft; embedding and output head are the main model's.

    ``dsv4.speculation.dspark.DSparkDraft`` runs it over a paged cache.

    Args:
        config: With a DSpark draft.
        parallel: This rank of several, of which each has its part of the blocks, as of those of the
            main model, and the whole of everything else; None: this process alone.

    Raises:
        ValueError: if there is no such draft, or ranks have tokens of their own.
    """

    def __init__(self, config: Any, parallel: ParallelContext | None = None) -> None:
        config = ModelConfig.of(config)
        if has_own_tokens(parallel):
            raise ValueError(
                "DeepseekV4DSpark: the ranks have parallel='dp', wanted 'tp': with tokens of their "
                "own they draft nothing"
            )
        stages = range(_dspark(config).stages)
        super().__init__(DeepseekV4DSparkStage(config, number, parallel) for number in stages)

    @property
    def last(self) -> DeepseekV4DSparkStage:
        """The stage that has the heads."""
        stage = self[len(self) - 1]
        assert isinstance(stage, DeepseekV4DSparkStage)
        return stage

    def context(self, taps: torch.Tensor) -> torch.Tensor:
        """Map ``Taps.joined()`` to what the context entries of all stages are made of."""
        first: Any = self[0]
        result: torch.Tensor = first.main_norm(first.main_proj(taps))
        return result

    def attentions(self) -> list[DeepseekV4DSparkAttention]:
        """Return the attention of each stage."""
        stages: Any = self
        return [stage.layer.self_attn for stage in stages]

    def forward(self, embedded: torch.Tensor, blocks: DraftBlocks) -> torch.Tensor:
        """Run all stages.

        Args:
            embedded: ``[T, H]``, embeddings of the rows of all blocks.
            blocks: The blocks, and the context in their cache.

        Returns:
            ``[T, H]``, the collapsed streams before the norm.
        """
        stages: Any = self
        streams_per_row = stages[0].layer.attn_hc.hc_mult
        streams = embedded[None, :, None].repeat(1, 1, streams_per_row, 1)
        for stage in stages:
            streams = stage.layer(streams, past_key_values=blocks)
        result: torch.Tensor = self.last.hc_head(streams)
        return result[0]


def _dspark(config: ModelConfig) -> Any:
    if config.dspark is None:
        raise ValueError("DeepseekV4DSpark: config.dspark is None, wanted a DSpark draft")
    return config.dspark
