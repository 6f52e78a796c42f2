"""Steps that verify and draft tokens, as ``dsv4.compilation.steps`` runs them on the meta device.

A step of a model with a draft has n = D + 1 rows per sequence; then drafts are verified, and the
next ones drafted. After a prompt the draft stores its entries of the prompt's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4.kv_cache.layer_cache import ROLLBACK
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.layers.dspark import Taps
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel.context import has_own_tokens
from dsv4.serving.sampler import Parameters, Variant
from dsv4.speculation.draft_head import COPY, OWN, DraftHead, why_no_copy
from dsv4.speculation.dspark import DSparkDraft
from dsv4.speculation.mtp import MtpDraft
from dsv4.speculation.verify import draw_draft, verify_greedy, verify_sampled

MOST_SEQUENCES = 256  # of a step that verifies drafts
_VARIANTS = (Variant(draw=True), Variant(draw=True, filters=True))


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a step that verifies drafts, or of a prompt after which tokens are drafted.

    Attributes:
        sequences: Their number.
        tokens: Rows of each in a verified step; of a prompt, tokens of all.
        context: Tokens that a sequence has room for.
        prompt: Whether it is a prompt.
    """

    sequences: int
    tokens: int
    context: int
    prompt: bool = False


def draft_shapes(max_tokens: int, context: int) -> list[DraftShape]:
    """Shapes that together launch what verified and drafted steps do.

    Args:
        max_tokens: Most tokens of a step.
        context: Most tokens of a sequence.
    """
    powers = [1 << i for i in range(MOST_SEQUENCES.bit_length())]
    counts = sorted({*powers, *(n + 1 for n in powers[:-1])})
    shapes = [
        DraftShape(count, n, context)
        for count in counts
        for n in ((2, 3, 5, ROLLBACK + 1) if count in powers[:4] else (2, ROLLBACK + 1))
        if count * n <= max_tokens
    ]
    prompts = sorted({1 << i for i in range(0, max_tokens.bit_length(), 2)} | {max_tokens})
    for count in (1, 8, 64):
        shapes += [DraftShape(count, n, context, True) for n in prompts if count <= n]
    return shapes


def has_draft(model: DeepseekV4ForCausalLM) -> bool:
    """Return whether a draft can be made of the layers that a model holds."""
    if has_own_tokens(model.parallel):
        return False
    return model.dspark is not None or len(model.mtp) == 1


def run_draft_step(model: DeepseekV4ForCausalLM, cache: PagedCache, shape: DraftShape) -> None:
    """Run a step on the meta device.

    Args:
        model: A model with a draft.
        cache: Its cache.
        shape: Sizes.
    """
    rows = torch.zeros(shape.sequences, dtype=torch.int64, device="meta")
    if shape.prompt:
        _quantise_head(model)
        _store_prompt(model, cache, rows, shape.tokens)
        return
    batch = Batch.from_lengths([shape.tokens] * shape.sequences, cache.lengths[rows], rows)
    ids = torch.zeros((1, shape.sequences * shape.tokens), dtype=torch.int64, device="meta")
    step = CacheStep(cache, batch)
    taps = DSparkDraft(model, OWN).taps() if model.dspark is not None else None
    hidden, streams = model.model(ids, None, step, taps=taps)
    logits = model.logits(hidden[0]).unflatten(0, (shape.sequences, shape.tokens))
    drafts = rows.new_zeros(shape.sequences, shape.tokens - 1)
    accepted, _ = verify_greedy(logits, drafts)
    q = logits[:, 1:].to(torch.float32)
    for variant, parameters in _drawn(rows):
        for proposed in (None, q):
            verify_sampled(logits, drafts, parameters, variant, proposed)
    cache.advance(batch, accepted + 1)
    if taps is not None:
        DSparkDraft(model, OWN).commit(taps, cache, batch, accepted)
        _dspark(model, cache, rows)
    else:
        MtpDraft(model, OWN).write(ids[0], streams, step)
        _mtp(model, cache, rows, streams)


def _quantise_head(model: DeepseekV4ForCausalLM) -> None:
    """Quantise the head if drafts take an NVFP4 copy on the GPU; its packing is listed anyway."""
    head = model.lm_head
    packs = head.weight.dtype == torch.bfloat16 and not head.in_features % 64
    if packs and not why_no_copy(model):
        DraftHead.of(model, COPY)


def _store_prompt(
    model: DeepseekV4ForCausalLM, cache: PagedCache, rows: torch.Tensor, tokens: int
) -> None:
    """Store what a draft reads of a prompt's tokens."""
    config, count = model.config, len(rows)
    lengths = [tokens // count] * count
    lengths[0] += tokens - sum(lengths)
    batch = Batch.from_lengths(lengths, rows, rows)
    streams = torch.empty(
        (1, tokens, config.hc_mult, config.hidden_size), dtype=model.dtype, device="meta"
    )
    if model.dspark is not None:
        draft = DSparkDraft(model, OWN)
        means = [streams.mean(-2)] * draft.config.stages
        draft.commit(Taps(draft.config.target_layer_ids, means), cache, batch)
        return
    ids = torch.zeros(tokens, dtype=torch.int64, device="meta")
    most = sum(min(length, config.sliding_window + ROLLBACK) for length in lengths)
    for stored in (None, ids[:most], ids[: min(tokens, count * config.sliding_window)]):
        MtpDraft(model, OWN).write(ids, streams, CacheStep(cache, batch), stored)


def _mtp(
    model: DeepseekV4ForCausalLM, cache: PagedCache, rows: torch.Tensor, streams: torch.Tensor
) -> None:
    draft, last = MtpDraft(model, OWN), streams[0, : len(rows)]
    draft.write(rows, last.unsqueeze(0), CacheStep(cache, Batch.decode(rows, rows)))
    draft.draft(rows, last, cache, rows, rows, 2)
    for variant, parameters in _drawn(rows):
        draft.draft(rows, last, cache, rows, rows, 1, parameters, variant)


def _dspark(model: DeepseekV4ForCausalLM, cache: PagedCache, rows: torch.Tensor) -> None:
    draft = DSparkDraft(model, OWN)
    theta = torch.empty((), dtype=torch.float32, device="meta")
    logits = draft.draft(rows, cache, rows, rows, theta=theta).logits
    for variant, parameters in _drawn(rows):
        draw_draft(logits[:, 0], parameters, variant)


def _drawn(rows: torch.Tensor) -> Iterator[tuple[Variant, Parameters]]:
    """Yield each kind of sampling with parameters of as many sequences."""
    number = torch.empty(rows.shape, dtype=torch.float64, device="meta")
    for variant in _VARIANTS:
        yield variant, Parameters(number, number, number, number, rows, rows, rows, None)
