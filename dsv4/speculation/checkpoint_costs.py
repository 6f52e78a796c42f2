"""Costs of the drafts of a checkpoint, from the headers of its files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dsv4.checkpoint.names import is_mtp, is_routed
from dsv4.speculation.draft_costs import MTP_TOKENS, DraftCosts, Part, accepted

if TYPE_CHECKING:
    from dsv4.checkpoint import Checkpoint
    from dsv4.checkpoint.entries import Entry

_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_LINEAR = ("proj.weight", "markov_w2.weight")
_TABLES = (_EMBEDDING, "markov_w1.weight")  # of which a token reads one row


def costs_of(checkpoint: Checkpoint, head_copy: int = 0) -> DraftCosts | None:
    """Return what ``DraftCosts.of`` says of the model, but for formats that loading changes.

    Args:
        checkpoint: The checkpoint.
        head_copy: Bytes of the copy of the head that drafts read; 0: they read the head.

    Returns:
        Costs of the default number of drafts on one GPU that holds all experts; None without draft
        layers that can be used.
    """
    if not (checkpoint.has_dspark or checkpoint.mtp_layers == 1):
        return None
    config, entries = checkpoint.config(), list(checkpoint.entries.values())
    named = {entry.name: entry for entry in entries}
    head = named.get(_HEAD) or next(e for e in entries if e.name.endswith(_EMBEDDING))
    read = head_copy or head.nbytes
    experts, chosen = config.n_routed_experts, config.num_experts_per_tok
    layers = [e for e in entries if not is_mtp(e.name) and e.name != _HEAD]
    draft = [e for e in entries if is_mtp(e.name)]
    main = _part(layers, experts, chosen, config.num_hidden_layers, head.nbytes)
    dspark = config.dspark
    if not checkpoint.has_dspark or dspark is None:
        part = _part(draft, experts, chosen, 1, read)
        return DraftCosts(main, part, 1, accepted("mtp", MTP_TOKENS))
    # As ``DraftCosts.of`` says: each row reads the matrix of the Markov head.
    read += (dspark.block_size - 1) * _nbytes(e for e in draft if "markov_w2" in e.name)
    experts = dspark.n_routed_experts or experts
    chosen = dspark.num_experts_per_tok or chosen
    part = _part(draft, experts, chosen, dspark.stages, read)
    shares = accepted("dspark", dspark.block_size)
    return DraftCosts(main, part, dspark.block_size, shares, checkpoint.has_confidence_head)


def _part(entries: Sequence[Entry], experts: int, chosen: int, layers: int, more: int) -> Part:
    """Return the part that layers are, with ``more`` bytes that all tokens read."""
    routed = [e for e in entries if is_routed(e.name)]
    dense = [e for e in entries if not (is_routed(e.name) or e.name.endswith(_TABLES))]
    weights = sum(math.prod(e.shape) for e in dense if e.name.endswith(_LINEAR))
    weights += sum(math.prod(e.shape) for e in routed) * chosen // experts
    return Part(
        dense=float(_nbytes(dense) + more),
        expert=_nbytes(routed) / experts,
        experts=experts,
        chosen=chosen,
        layers=layers,
        operations=2.0 * weights,
    )


def _nbytes(entries: Iterable[Entry]) -> int:
    return sum(entry.nbytes for entry in entries)
