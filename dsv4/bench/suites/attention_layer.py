"""The whole attention sublayer, from its norm to o_b, in one CUDA graph; for ``bench.attention``.

A layer of random NVFP4 weights, packed where they can be, bfloat16 activations, FP8 entries and
MXFP4 index keys. Up to ``MOST_DECODED`` tokens are a decode step of as many sequences at the last
of their first 4096 positions, which closes a window of either compressor: the longest kind of step.
More tokens are the prefill of one sequence. The L2 is cleared before each replay.

Before it is timed, a step is compared with the same one by the reference's operators, from a copy
of the cache: a row may be off by ``_TOLERANCE`` of its norm. Both attend to the entries that the
first chose, of which the second has to choose ``_AGREEMENT`` as well: entries with nearly equal
scores change places by a rounding (pitfall 37), and rows were off by a tenth where each side
attended to its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dsv4 import dispatch
from dsv4.bench import timing
from dsv4.bench.baselines import transformers_attention
from dsv4.bench.baselines.transformers_attention import Step
from dsv4.bench.checks.judge import row_error
from dsv4.bench.environment import Rates
from dsv4.bench.measure import Options, chosen
from dsv4.bench.problem import Draw
from dsv4.bench.results import Row
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.kv_cache.pages import entry_layout
from dsv4.layers import DeepseekV4Attention, DeepseekV4RMSNorm, Linear, pack_

KINDS = {"C4A": CSA, "C128A": HCA, "window": SLIDING}
MOST_DECODED = 64
MOST_CONTEXT = 4096
# Some ten roundings to bfloat16 follow one another, 2^-9 each, and the queries' are multiplied by
# the slope of a softmax. A wrong angle, scale, page or mask is off by tenths.
_TOLERANCE = 0.04
_AGREEMENT = 0.9


class Sublayer(nn.Module):
    """A norm and attention over a paged cache.

    Attributes:
        config: Configuration of a model that has this layer alone.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = DeepseekV4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = DeepseekV4Attention(config, 0)

    def forward(self, x: torch.Tensor, cache: PagedCache, batch: Batch) -> torch.Tensor:
        """``[T, H]`` to the same."""
        step = CacheStep(cache, batch)
        return self.attention(self.norm(x).unsqueeze(0), past_key_values=step)[0].squeeze(0)


def one_layer(config: ModelConfig, kind: str) -> ModelConfig:
    """A model of that layer alone."""
    return config.replace(
        num_hidden_layers=1,
        layer_types=(KINDS[kind],),
        mlp_layer_types=("moe",),
        num_nextn_predict_layers=0,
    )


def build(config: ModelConfig, draw: Draw) -> Sublayer:
    """Random weights of a size that keeps values near 1."""
    with torch.device(draw.device):
        layer = Sublayer(config).to(torch.bfloat16)
    for module in layer.modules():
        if isinstance(module, Linear):
            module.set_weight(draw.quantized(module.out_features, module.in_features))
    for name, parameter in layer.named_parameters():
        if name.endswith(("sinks", "position_bias")):
            parameter.data.copy_(draw.normal(*parameter.shape))
    pack_(layer)
    return layer.requires_grad_(False).eval()


def _context(c: ModelConfig) -> int:
    return min(MOST_CONTEXT, c.max_position_embeddings // 8)


def inputs(layer: Sublayer, tokens: int, draw: Draw) -> tuple[torch.Tensor, PagedCache, Batch]:
    """Hidden states, a cache with what comes before them, and their positions."""
    c, prefill = layer.config, tokens > MOST_DECODED
    context = 0 if prefill else _context(c) - 1
    cache = PagedCache(
        c,
        max_sequences=1 if prefill else tokens,
        max_tokens=max(tokens, context + 1),
        device=draw.device,
        index_format="index_mxfp4",
    )
    rows = torch.arange(cache.max_sequences, device=draw.device)
    for row in rows.split(1):
        if context:
            before = Batch.from_lengths([context], torch.zeros_like(row), row)
            layer(draw.normal(context, c.hidden_size), cache, before)
    starts = torch.full_like(rows, context)
    batch = Batch.from_lengths([tokens], starts, rows) if prefill else Batch.decode(starts, rows)
    return draw.normal(tokens, c.hidden_size), cache, batch


def costs(layer: Sublayer, tokens: int) -> tuple[int, int]:
    """Bytes that a step has to move, each once, and operations of its GEMMs.

    Weights, hidden states, and of a decode step the entries and index keys that each sequence's
    token reads. A prefill's own entries need not leave the GPU's caches.
    """
    c = layer.config
    linear = [module for module in layer.modules() if isinstance(module, Linear)]
    moved = sum(module.quantized_weight().nbytes for module in linear) + 4 * tokens * c.hidden_size
    flops = sum(2 * tokens * m.out_features * m.in_features for m in linear)
    last = tokens if tokens > MOST_DECODED else _context(c)
    positions = torch.arange(tokens) if tokens > MOST_DECODED else torch.full((tokens,), last - 1)
    seen = (positions + 1).clamp(max=c.sliding_window)
    rate = c.compress_rate(0)
    keys = torch.zeros_like(seen)
    if rate:
        visible = (positions + 1) // rate
        indexed = c.layer_type(0) == CSA
        seen = seen + (visible.clamp(max=c.index_topk) if indexed else visible)
        keys = visible if indexed else keys
    flops += 4 * c.num_attention_heads * c.head_dim * int(seen.sum())
    flops += 2 * c.index_n_heads * c.index_head_dim * int(keys.sum())
    if tokens <= MOST_DECODED:
        for count, name, dims, inverse in (
            (seen, "fp8", c.head_dim, c.qk_rope_head_dim),
            (keys, "index_mxfp4", c.index_head_dim, 0),
        ):
            entry = entry_layout(name, dims, inverse)
            moved += int(count.sum()) * (entry.data_bytes + entry.scale_bytes)
    return moved, flops


def check(
    layer: Sublayer, x: torch.Tensor, cache: PagedCache, batch: Batch
) -> tuple[float, float, torch.Tensor]:
    """The largest error of a row over its norm, the least agreement on entries, and the result."""
    other, chosen_slots = copy.deepcopy(cache), list[torch.Tensor]()
    with _selecting(layer, chosen_slots.append):
        result = layer(x, copy.deepcopy(cache), batch)
    common, agreements = iter(tuple(chosen_slots)), [1.0]

    def same(slots: torch.Tensor) -> torch.Tensor:
        first = next(common)
        agreements.append(_agreement(first, slots))
        return first

    with dispatch.use_backend("reference"), _selecting(layer, same):
        expected = layer(x, other, batch)
    sample = chosen(x.shape[0]).to(x.device)
    return row_error(result[sample], expected[sample]), min(agreements), result


@contextmanager
def _selecting(
    layer: Sublayer, see: Callable[[torch.Tensor], torch.Tensor | None]
) -> Iterator[None]:
    """Show the slots of chosen entries to ``see``, and attend to what it returns instead."""
    compressor = layer.attention.compressor
    if compressor is None:
        yield
        return
    choose = compressor.paged_slots

    def shown(*args: Any) -> torch.Tensor:
        slots = choose(*args)
        instead = see(slots)
        return slots if instead is None else instead

    vars(compressor)["paged_slots"] = shown
    try:
        yield
    finally:
        del vars(compressor)["paged_slots"]


def _agreement(slots: torch.Tensor, other: torch.Tensor) -> float:
    """The smallest share of a row's slots that are a slot of the other's row, too; -1 is none."""
    least = torch.ones((), dtype=torch.float64)
    for a, b in zip(slots.split(64), other.split(64), strict=True):
        both = ((a.unsqueeze(2) == b.unsqueeze(1)).any(2) & (a >= 0)).sum(1)
        share = both.double() / (a >= 0).sum(1).clamp(min=1)
        least = torch.minimum(least, torch.where((a >= 0).any(1), share, 1.0).min().cpu())
    return float(least)


@torch.inference_mode()
def measure(
    c: ModelConfig, preset: str, kind: str, tokens: int, options: Options, rates: Rates
) -> Row:
    """A row of one layer type, checked first; one that is wrong has no time."""
    draw = Draw(options.seed, options.device)
    layer = build(one_layer(c, kind), draw)
    x, cache, batch = inputs(layer, tokens, draw)
    moved, flops = costs(layer, tokens)
    row: dict[str, Any] = {
        "op": "attention_layer",
        "case": f"{preset} {kind}",
        "shape": {"H": c.hidden_size, "h": c.num_attention_heads, "context": _context(c)},
        "tokens": tokens,
        "backend": options.backend,
        "reason": "each operator's own choice",
        "bound_us": rates.bound_us(moved, flops),
        "bytes": moved,
        "flops": flops,
    }
    if options.check:
        error, agreement, result = check(layer, x, cache, batch)
        near = error <= _TOLERANCE and agreement >= _AGREEMENT
        right = near and bool(result.isfinite().all())
        row |= {"error": error, "match": right}
        if not right:
            said = f"off by {error:.1e} of a row's norm, {agreement:.0%} of its entries the same"
            return Row(us=None, **row, message=said)
    with dispatch.use_backend(options.backend):
        taken = timing.measure([lambda: layer(x, cache, batch)], options.device, options.repeat)
    prefill = tokens > MOST_DECODED
    step = Step(c, KINDS[kind], tokens, 0 if prefill else _context(c) - 1)
    times, missing = transformers_attention.times(step, options)
    return Row(
        us=taken.us,
        **row,
        timer=taken.timer,
        copy_share=rates.copy_share(moved, taken.us),
        baselines=times,
        message="; ".join(filter(None, (taken.note, missing))),
    )
