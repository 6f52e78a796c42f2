"""Drafts by DSpark: the context of a step, then a block of tokens (specification, section 9.1).

A step of the main model fills ``taps``; ``commit`` stores the context of its accepted tokens;
``draft`` proposes the tokens after the one that was sampled last. Nothing here reads a tensor on
the host, and all shapes follow from the number of sequences, so a step can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dsv4.config.dspark import DSparkConfig
from dsv4.kv_cache.layer_cache import LayerCache
from dsv4.kv_cache.paged_cache import Batch, PagedCache
from dsv4.kv_cache.pages import Pages
from dsv4.layers.dspark import (
    DeepseekV4DSpark,
    DeepseekV4DSparkAttention,
    DraftBlocks,
    Taps,
)
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.speculation.draft_head import AUTO, DraftHead

# Chooses a token for each sequence by logits [B, vocab] and the tokens' positions [B].
Sample = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def argmax(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Choose the most likely token: ``[B, vocab]`` to ``[B]``."""
    return logits.argmax(-1)


@dataclass(frozen=True, eq=False)
class DSparkDrafts:
    """Tokens that a draft proposes, ``block_size`` for each sequence.

    Attributes:
        tokens: ``[B, rows]`` int64; -1 where the token is not to be verified, which is a suffix.
        logits: ``[B, rows, vocab]``, of which each token was chosen; float32 or wider.
        confidence: ``[B, rows]``, probability that a token is accepted if those before it are;
            None without a confidence head.
        survival: ``[B, rows]``, probability that a token is reached and accepted; None likewise.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    confidence: torch.Tensor | None = None
    survival: torch.Tensor | None = None

    @property
    def lengths(self) -> torch.Tensor:
        """Return the tokens of each sequence that are to be verified, ``[B]`` int64."""
        return (self.tokens >= 0).sum(-1)


@dataclass(frozen=True, eq=False)
class DSparkDraft:
    """The DSpark draft of a model, over the model's paged cache.

    The cache has one layer per stage after the main layers, see ``PagedCache.layers``.

    Attributes:
        model: The model.
        draft_head: Output head of the drafts, see ``DraftHead.of``; or one that was made.
        head: That head.

    Raises:
        ValueError: if the model has no DSpark draft, or the head cannot be made.
    """

    model: DeepseekV4ForCausalLM
    draft_head: str | DraftHead = AUTO
    head: DraftHead = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.model.dspark is None:
            raise ValueError("DSparkDraft: model has no DSpark draft, wanted one with its stages")
        object.__setattr__(self, "head", DraftHead.of(self.model, self.draft_head))

    @property
    def config(self) -> DSparkConfig:
        """The draft's sizes."""
        dspark = self.model.config.dspark
        assert dspark is not None
        return dspark

    @property
    def _stages(self) -> DeepseekV4DSpark:
        stages = self.model.dspark
        assert stages is not None
        return stages

    def taps(self) -> Taps:
        """Return an object for the argument ``taps`` of one forward of the main model."""
        return Taps(self.config.target_layer_ids)

    @torch.inference_mode()
    def commit(
        self, taps: Taps, cache: PagedCache, batch: Batch, accepted: torch.Tensor | None = None
    ) -> None:
        """Store the context of a step's tokens that are accepted.

        Rejected tokens need no other treatment: a later draft reads positions before its anchor
        alone. Tokens that no later draft can read are left out.

        Args:
            taps: What the forward of the step filled.
            cache: The cache of the model.
            batch: The step's tokens.
            accepted: ``[B]`` int, how many of each entry's new tokens stay, on the device, as for
                ``PagedCache.advance``; None: all.

        Raises:
            ValueError: if a shape is wrong or the cache has no layers for the stages.
        """
        layers, count = self._layers(cache), taps.tokens
        if batch.positions.shape[0] != count:
            raise ValueError(
                f"commit: batch has {batch.positions.shape[0]} tokens, wanted {count}, those of "
                "taps"
            )
        # Tokens before a window can be read again once the last ones are taken back.
        reach = self.model.config.sliding_window + cache.rollback
        reach = min([reach, *(layer.window_capacity for layer in layers)])
        chosen = last_tokens(batch, accepted, reach)
        context = self._stages.context(taps.joined(chosen.tokens).flatten(0, -2))
        positions, sequences = chosen.positions, chosen.sequences
        tables = self._attention.rotary_emb(context, positions)
        for attention, layer in zip(self._stages.attentions(), layers, strict=True):
            slots = layer.window_write_slots(sequences, positions)
            attention.write_context(context, tables, layer, slots)

    @torch.inference_mode()
    def draft(
        self,
        anchors: torch.Tensor,
        cache: PagedCache,
        sequences: torch.Tensor,
        positions: torch.Tensor,
        *,
        sample: Sample = argmax,
        theta: torch.Tensor | None = None,
        temperatures: torch.Tensor | None = None,
    ) -> DSparkDrafts:
        """Draft the tokens after the anchors.

        Always all rows of a block are computed, because they see each other. ``theta`` decides how
        many tokens are to be verified: those whose survival is at least ``theta``.

        Args:
            anchors: ``[B]`` int64, the token of each sequence that was sampled last and is not in
                the cache yet.
            cache: The cache of the model, with the context of all positions before the anchor's.
            sequences: ``[B]`` int, rows of the cache; -1 for padding, which drafts nothing.
            positions: ``[B]`` int64, positions of the anchors.
            sample: Chooses the tokens of a row of all blocks. To verify them against sampled
                tokens of the main model, it must draw from the softmax of the logits it gets, or
                the caller must know the distribution that it drew from.
            theta: ``[]``, ``[B, 1]`` or ``[rows]`` on the device; None: all tokens are verified,
                as without a confidence head.
            temperatures: ``[rows]``, fitted temperatures of the confidence; None: 1.

        Raises:
            ValueError: if a shape is wrong or the cache has no layers for the stages.
        """
        batch = anchors.shape
        for name, tensor in (
            ("anchors", anchors),
            ("sequences", sequences),
            ("positions", positions),
        ):
            if tensor.dim() != 1 or tensor.shape != batch:
                raise ValueError(
                    f"draft: {name} has shape {list(tensor.shape)}, wanted [B], B of anchors"
                )
        sequences, positions = sequences.to(torch.int64), positions.to(torch.int64)
        hidden = self._hidden(anchors, self._layers(cache), sequences, positions)
        rows = self._chosen(hidden, anchors, positions, sample)
        tokens, logits = torch.stack(rows.tokens, 1), torch.stack(rows.logits, 1)
        # From the first row on whose largest logit is NaN or infinite nothing is proposed.
        finite = torch.isfinite(logits.amax(-1)).to(torch.int64).cumprod(-1) > 0
        live = (sequences >= 0).unsqueeze(1) & finite
        if not rows.confidence:
            return DSparkDrafts(torch.where(live, tokens, -1), logits)
        raw = torch.stack(rows.confidence, 1)
        confidence = torch.sigmoid(raw if temperatures is None else raw / temperatures)
        survival = confidence.cumprod(-1)
        if theta is not None:
            # A product with a NaN is NaN from there on, which is not at least theta.
            live = live & (survival >= theta)
        return DSparkDrafts(torch.where(live, tokens, -1), logits, confidence, survival)

    @property
    def _attention(self) -> DeepseekV4DSparkAttention:
        """An attention: all stages rotate alike."""
        return self._stages.attentions()[0]

    def _layers(self, cache: PagedCache) -> list[LayerCache]:
        """Return the cache of each stage."""
        first, stages = self.model.config.num_hidden_layers, self.config.stages
        layers = cache.layers[first:]
        if len(layers) != stages:
            raise ValueError(
                f"DSparkDraft: cache has {len(layers)} layers after the main ones, wanted {stages}"
            )
        return layers

    def _hidden(
        self,
        anchors: torch.Tensor,
        layers: list[LayerCache],
        sequences: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Run the stages on a block per sequence: ``[B, rows, H]`` before the norm."""
        rows, window = self.config.block_size, layers[0].window
        noise = torch.full_like(anchors, self.config.noise_token_id).unsqueeze(1)
        ids = torch.cat((anchors.clamp(min=0).unsqueeze(1), noise.expand(-1, rows - 1)), dim=1)
        embedded = self.model.model.embed(ids.flatten())
        offsets = torch.arange(rows, device=anchors.device)
        tables = self._attention.rotary_emb(embedded, (positions.unsqueeze(1) + offsets).flatten())
        blocks = DraftBlocks(
            layers,
            sequences.repeat_interleave(rows),
            positions.repeat_interleave(rows),
            rows,
            tables,
            _pages_like(window, anchors.shape[0], rows),
        )
        return self._stages(embedded, blocks).unflatten(0, (-1, rows))

    def _chosen(
        self, hidden: torch.Tensor, anchors: torch.Tensor, positions: torch.Tensor, sample: Sample
    ) -> _Rows:
        """Choose the tokens one row after another: each adds to the logits of the next."""
        last, rows = self._stages.last, _Rows([], [], [])
        base = self.head(last.norm(hidden))
        base = base.to(torch.promote_types(base.dtype, torch.float32))
        before = anchors
        for row in range(self.config.block_size):
            vectors = last.markov_head.vectors(before)
            logits = last.markov_head(vectors, base[:, row])
            if last.confidence_head is not None:
                rows.confidence.append(last.confidence_head(hidden[:, row], vectors))
            before = sample(logits, positions + row + 1)
            rows.tokens.append(before)
            rows.logits.append(logits)
        return rows


@dataclass(frozen=True, eq=False)
class _Rows:
    """What each row of all blocks gave, in order.

    Attributes:
        tokens: The chosen tokens ``[B]``.
        logits: Their logits ``[B, vocab]``.
        confidence: Logits of the confidence ``[B]``; none without the head.
    """

    tokens: list[torch.Tensor]
    logits: list[torch.Tensor]
    confidence: list[torch.Tensor]


@dataclass(frozen=True, eq=False)
class LastTokens:
    """The last tokens of each entry of a batch that a later draft may read.

    Attributes:
        tokens: ``[N]`` int64, which tokens of the batch; None: all of them, in their order.
        positions: ``[N]`` int64.
        sequences: ``[N]`` int64, rows of the cache, -1 for what is not to be read.
    """

    tokens: torch.Tensor | None
    positions: torch.Tensor
    sequences: torch.Tensor


def last_tokens(batch: Batch, accepted: torch.Tensor | None, count: int) -> LastTokens:
    """Choose the last ``count`` tokens of each entry, without those that are not accepted.

    Nothing is read on the host. The number N follows from that of entries: there are ``count`` rows
    for each, or all tokens of the batch if these are fewer.

    Args:
        batch: The tokens.
        accepted: ``[B]`` int, how many of each entry's are accepted; None: all.
        count: Most tokens of an entry.
    """
    new = batch.cu_seqlens.diff()
    stay = new if accepted is None else accepted
    ends = batch.starts + stay
    total, device = batch.positions.shape[0], ends.device
    if new.shape[0] * count >= total:
        token = torch.arange(total, device=device)
        entry = torch.searchsorted(batch.cu_seqlens, token, right=True) - 1
        last = ends[entry.clamp(max=ends.shape[0] - 1)]
        read = (batch.positions < last) & (batch.positions >= last - count)
        sequences = torch.where(read, batch.sequence_of_token, -1)
        return LastTokens(None, batch.positions, sequences)
    back = torch.arange(count, 0, -1, device=device)
    number = stay.unsqueeze(1) - back  # of the token in its entry
    token = (batch.cu_seqlens[:-1].unsqueeze(1) + number.clamp(min=0)).flatten()
    token = token.clamp(max=total - 1)  # an entry without tokens may be the last
    sequences = torch.where(number.flatten() >= 0, batch.sequence_of_token[token], -1)
    return LastTokens(token, batch.positions[token], sequences)


def _pages_like(window: Pages, blocks: int, rows: int) -> Pages:
    """Make pages of the window's format, one for each block; kernels shift by their size."""
    size = 1 << (rows - 1).bit_length()
    return Pages.allocate(
        blocks,
        size,
        window.head_dim,
        window.rope_dim,
        window.entry_format,
        window.data.dtype,
        window.data.device,
    )
