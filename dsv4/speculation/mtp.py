"""Drafts by multi-token prediction, with a KV cache of its own (specification, section 9).

A row at position p is made of the main model's residual streams at p and of the token at p + 1,
and predicts the token at p + 2. Its KV entry lies in the cache layers behind the main model's, at
position p. Positions, pages and lengths are those of the main model's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dsv4.kv_cache.batch import Batch, Cache, CacheStep
from dsv4.kv_cache.page_tables import to_device
from dsv4.layers.decoder import DeepseekV4MTP
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving.sampler import Parameters, Variant, greedy
from dsv4.speculation.draft_head import AUTO, DraftHead
from dsv4.speculation.verify import draw_draft


class Drafts(NamedTuple):
    """Drafted tokens of B sequences.

    Attributes:
        tokens: ``[B, D]`` int64, ``NO_DRAFT`` where there is none.
        probabilities: ``[B, D, vocab]``, distributions that tokens were drawn from; None: the
            most probable tokens were taken.
    """

    tokens: torch.Tensor
    probabilities: torch.Tensor | None


class MtpDraft:
    """Drafts by the model's MTP layer, which takes its own output for each further draft.

    After each step of the main model ``write`` stores entries of all its tokens, and ``draft``
    computes a row per sequence and draft. Rows after the first of ``draft`` are provisional: they
    are made of drafts, and the next ``write`` replaces them. They lie at up to ``D - 1`` positions
    from the sequence's length on, for which ``PagedCache.prepare`` reserves pages as for tokens
    that may be rejected. A row without a page is not stored, which makes drafts worse and no result
    wrong.
    """

    def __init__(self, model: DeepseekV4ForCausalLM, draft_head: str | DraftHead = AUTO) -> None:
        """Make drafts for a model that holds an MTP layer.

        Args:
            model: The model.
            draft_head: Output head of the drafts, see ``DraftHead.of``; or one that was made.

        Raises:
            ValueError: if it holds none, several, which no published model has, or a DSpark draft,
                or the head cannot be made.
        """
        layers = 0 if model.dspark is not None else len(model.mtp)
        if layers != 1:
            raise ValueError(
                f"MtpDraft: the model holds {layers} MTP layers, wanted 1 (mtp=True, and "
                "num_nextn_predict_layers 1)"
            )
        self.model = model
        layer = model.mtp[0]
        assert isinstance(layer, DeepseekV4MTP)
        self.layer = layer
        self.head = DraftHead.of(model, draft_head)

    def write(
        self,
        next_ids: torch.Tensor,
        streams: torch.Tensor,
        step: CacheStep,
        tokens: torch.Tensor | None = None,
    ) -> None:
        """Store the entries of a step's tokens, for drafts after them.

        Args:
            next_ids: ``[T]`` int64: the token that follows each token of the step, in its sequence.
                The last of a chunk of a prompt is followed by the prompt's next token, the last of
                all by the sampled one; what follows rejected tokens does not matter.
            streams: ``[1, T, n, H]``, residual streams of the main model for this step.
            step: The cache, and the batch of the step.
            tokens: ``[N]`` int64, which tokens of the step to store, such as ``latest``; None: all.
        """
        if tokens is not None:
            batch = step.batch
            step = CacheStep(
                step.cache,
                Batch(
                    batch.cu_seqlens,
                    batch.starts,
                    batch.sequences,
                    batch.positions[tokens],
                    batch.sequence_of_token[tokens],
                ),
            )
            next_ids, streams = next_ids[tokens], streams[:, tokens]
        embedded = self.model.model.embed(next_ids).unsqueeze(0)
        self.layer.write_window(streams, embedded, step)

    def draft(
        self,
        anchors: torch.Tensor,
        streams: torch.Tensor,
        cache: Cache,
        sequences: torch.Tensor,
        positions: torch.Tensor,
        count: int,
        parameters: Parameters | None = None,
        variant: Variant | None = None,
    ) -> Drafts:
        """Draft ``count`` tokens after the anchor, the sampled token that is not processed yet.

        Args:
            anchors: ``[B]`` int64, at ``positions + 1``.
            streams: ``[B, n, H]``, the main model's residual streams at ``positions``.
            cache: The cache, in which ``write`` has stored the entries of earlier positions.
            sequences: ``[B]`` int64, rows of the cache; -1 for padding.
            positions: ``[B]`` int64, of the last processed and accepted token.
            count: D.
            parameters: Of the requests, whose ``position`` is that of the first draft; None: take
                the most probable tokens.
            variant: Variant that covers the needs of every request; only with ``parameters``.
        """
        ids, streams = anchors, streams.unsqueeze(0)
        tokens, probabilities = [], []
        for j in range(count):
            step = CacheStep(cache, Batch.decode(positions + j, sequences))
            embedded = self.model.model.embed(ids.clamp(min=0)).unsqueeze(0)
            hidden, streams = self.layer(streams, embedded, past_key_values=step)
            logits = self.head(hidden)[0]
            if parameters is None or variant is None:
                ids = greedy(logits)
            else:
                at = parameters._replace(position=parameters.position + j)
                ids, q = draw_draft(logits, at, variant)
                probabilities.append(q)
            tokens.append(ids)
        none = anchors.new_zeros(anchors.shape[0], 0)
        return Drafts(
            torch.stack(tokens, 1) if tokens else none,
            torch.stack(probabilities, 1) if probabilities else None,
        )


def latest(lengths: Sequence[int], count: int, device: torch.device) -> torch.Tensor:
    """Return the last ``count`` tokens of each entry of a batch with these lengths, ``[N]``.

    Later drafts see a window of positions, so entries before it need not be stored.
    """
    numbers, end = list[int](), 0
    for length in lengths:
        end += length
        numbers.extend(range(end - min(length, count), end))
    return to_device(numbers, device)
