"""Layers with the models' heads, in bfloat16 and with FP8 entries: any chunking is a prefill.

On a GPU by the kernels that ``auto`` takes, from one token on, several tokens of a sequence at a
time as a verification has them, and thousands; on the CPU by the reference, to show what the test
expects. Elsewhere the same is shown in float64, which no kernel computes.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from hypothesis import example, given, settings

from dsv4.config import CSA, HCA
from dsv4.testing.strategies import seeds
from tests.kv_cache.attention_stack import TYPES, Stack, small, tokens

PIECES = (1, 1, 1, 2, 3, 4, 5, 63, 64, 127, 128, 129, 500, 1100)
# Errors of two roundings of the same thing, each over thousands of values.
SAME = 1.25


def layer_of(layer_type: str) -> Stack:
    """One layer; all entries of 4096 tokens are chosen, so that no choice hangs on a rounding."""
    config = small(
        layer_types=(layer_type,), hidden_size=256, q_lora_rank=128, o_groups=4,
        num_attention_heads=64, head_dim=512, qk_rope_head_dim=64, index_n_heads=64,
        index_head_dim=128, index_topk=1024, sliding_window=128,
        compress_rates={CSA: 4, HCA: 128}, numerics="deepseek",
    )  # fmt: skip
    return Stack(config, 5, torch.bfloat16)


def chunks_of(draw: random.Random, count: int) -> list[int]:
    found: list[int] = []
    while sum(found) < count:
        found.append(min(draw.choice(PIECES), count - sum(found)))
    return found


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def worst(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float(((found.double() - truth).norm(dim=-1) / truth.norm(dim=-1)).max())


def chunked(stack: Stack, hidden: list[torch.Tensor], draw: random.Random) -> list[torch.Tensor]:
    """Sequences in steps of their own lengths, together in ragged batches."""
    longest = max(map(len, hidden))
    sizes = {"pool_tokens": 4 * longest + 256, "max_chunk": max(PIECES)}
    # Each may have the longest chunk in the same step, of two pages more than it and a window fill.
    window_pages = len(hidden) * ((max(PIECES) + stack.config.sliding_window) // 64 + 2)
    cache = stack.cache(len(hidden), longest, **sizes, window_pages=window_pages)
    for table in cache._tables.values():
        draw.shuffle(table.pool._free)
    rows = [cache.allocate() for _ in hidden]
    plans = [chunks_of(draw, len(x)) for x in hidden]
    done, out = [0] * len(rows), [[] for _ in rows]
    for turn in range(max(map(len, plans))):
        step = [plan[turn] if turn < len(plan) else 0 for plan in plans]
        parts = [x[a : a + n] for x, a, n in zip(hidden, done, step, strict=True)]
        for i, piece in enumerate(stack.step(cache, rows, parts)):
            out[i].append(piece)
            done[i] += step[i]
    return [torch.cat(pieces) for pieces in out]


def compare(layer_type: str, seed: int, lengths: tuple[int, ...], device: str) -> None:
    """Chunks err from float64 as a prefill without a cache does."""
    stack = layer_of(layer_type).to(device)
    hidden = [
        tokens(seed + i, n, stack.config).to(device, torch.bfloat16) for i, n in enumerate(lengths)
    ]
    exact = copy.deepcopy(stack).double()
    for x, found in zip(hidden, chunked(stack, hidden, random.Random(seed)), strict=True):
        truth, plain = exact.whole(x.double()), stack.whole(x)
        assert error(found, truth) <= SAME * error(plain, truth)
        assert worst(found, truth) <= 2 * worst(plain, truth)


@pytest.mark.parametrize("layer_type", TYPES)
@given(seed=seeds())
@settings(max_examples=1)
def test_any_chunking_is_a_prefill_by_the_reference(layer_type: str, seed: int) -> None:
    compare(layer_type, seed, (134, 5), "cpu")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("layer_type", TYPES)
@example(seed=1176)  # two chunks of 1100 tokens in a step
@given(seed=seeds())
@settings(max_examples=3)
def test_any_chunking_is_a_prefill_by_kernels(layer_type: str, seed: int) -> None:
    compare(layer_type, seed, (4096, 2500, 130), "cuda")
