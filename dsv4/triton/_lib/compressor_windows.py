"""Parts of the kernels of ``dsv4.ops.compressor_paged``: windows in pages, their states, entries.

A window is pooled from the tokens of the call that belong to it, and else from the state. Sequences
and positions of the preceding tokens show whether they belong to the window.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.triton._lib.compressed_entries import norm_and_rotate, store_entry
from dsv4.triton._lib.numerics import widen
from dsv4.triton._lib.window_pooling import ABSENT, pool_slots, score_of, store_pooled


@triton.jit
def _load_rows(tokens, before, phase, column, mask):
    """kv and score with ape of the tokens ``before [SLOTS, 1]`` of the call; elsewhere 0, -inf."""
    kv, kv_stride, score, score_stride, ape, ape_stride = tokens
    row = before.to(tl.int64)
    k = tl.load(kv + row * kv_stride + column, mask=mask, other=0.0)
    s = tl.load(score + row * score_stride + column, mask=mask, other=ABSENT)
    a = tl.load(ape + phase * ape_stride + column, mask=mask, other=0.0)
    return widen(k), score_of(s, a)


@triton.jit
def _load_state(state, block, row, column, mask, COLUMNS: tl.constexpr):
    """kv and score of rows ``[SLOTS, 1]`` of the state; elsewhere 0, -inf."""
    data, by_block, by_row = state
    address = data + block.to(tl.int64) * by_block + (row * by_row + column)
    k = tl.load(address, mask=mask, other=0.0)
    return k, tl.load(address + COLUMNS, mask=mask, other=ABSENT)


@triton.jit
def _window(
    tokens,
    state,
    batch,
    row,
    token,
    last,
    behind,
    column,
    mask,
    RATIO: tl.constexpr,
    COLUMNS: tl.constexpr,
    STATES: tl.constexpr,
):
    """kv and score ``[SLOTS, WIDTH]`` of tokens ``behind [SLOTS, 1]`` positions before the last.

    ``row``: the sequence of ``token``; ``last``: its position. What has no position is absent.
    """
    positions, sequences, table, table_stride = batch
    before, position = token - behind, last - behind
    mask = mask & (position >= 0)
    near = mask & (before >= 0)
    same = tl.load(sequences + before, mask=near, other=-1) == row
    same = same & (tl.load(positions + before, mask=near, other=-1) == position)
    new, old = mask & near & same, mask & ~(near & same)
    k, s = _load_rows(tokens, before, position % RATIO, column, new)
    block = tl.load(table + row.to(tl.int64) * table_stride + position // STATES, mask=old, other=0)
    x, y = _load_state(state, block, position % STATES, column, old, COLUMNS)
    return tl.where(new, k, x), tl.where(new, s, y)


@triton.jit
def pool_window(
    tokens,
    state,
    batch,
    pooled,
    token,
    last,
    channel,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Pool channels ``[1, WIDTH]`` of the window that ends with ``token`` at position ``last``."""
    _, sequences, _, _ = batch
    COLUMNS: tl.constexpr = (1 + OVERLAP) * CHANNELS
    slot = tl.arange(0, SLOTS)[:, None]
    row = tl.load(sequences + token)
    mask = (slot < RATIO) & (channel < CHANNELS)
    # The order of a window is ascending; slots past it are absent.
    behind = RATIO - 1 - slot
    second = channel + (CHANNELS if OVERLAP else 0)
    kv, score = _window(
        tokens, state, batch, row, token, last, behind, second, mask, RATIO, COLUMNS, STATES
    )
    kv0, score0 = kv, score
    if OVERLAP:
        kv0, score0 = _window(
            tokens,
            state,
            batch,
            row,
            token,
            last,
            behind + RATIO,
            channel,
            mask,
            RATIO,
            COLUMNS,
            STATES,
        )
    values = pool_slots(kv, score, kv0, score0, RATIO, OVERLAP)
    store_pooled(pooled + token.to(tl.int64) * CHANNELS, values, slot, channel, CHANNELS)


@triton.jit
def store_states(
    tokens,
    state,
    token,
    own,
    last,
    column,
    mask,
    RATIO: tl.constexpr,
    COLUMNS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Store kv and score with ape of ``token``, at positions ``last``, to its slots ``own``."""
    data, by_block, by_row = state
    k, s = _load_rows(tokens, token, last % RATIO, column, mask)
    address = data + (own // STATES) * by_block + ((own % STATES) * by_row + column)
    tl.store(address, k, mask=mask)
    tl.store(address + COLUMNS, s, mask=mask)


@triton.jit
def closing(token, count, positions, state_slots, slots, RATIO: tl.constexpr):
    """Whether each of ``token`` closes a window that must be stored, and their positions."""
    here = token < count
    last = tl.load(positions + token, mask=here, other=0).to(tl.int32)
    stored = tl.load(state_slots + token, mask=here, other=-1) >= 0
    has_slot = tl.load(slots + token, mask=here, other=-1) >= 0
    return here & stored & has_slot & ((last + 1) % RATIO == 0), last


@triton.jit
def first_of(chosen, GROUP: tl.constexpr):
    """Number of the first that is true of ``chosen [GROUP]``; GROUP if there is none."""
    return tl.min(tl.where(chosen, tl.arange(0, GROUP), GROUP), 0)


@triton.jit
def pool_group(
    tokens,
    state,
    state_slots,
    batch,
    slots,
    pooled,
    start,
    count,
    channel,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
    STATES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Pool channels of the windows that end with one of GROUP tokens from ``start`` on."""
    positions, _, _, _ = batch
    member = tl.arange(0, GROUP)
    closes, last = closing(start + member, count, positions, state_slots, slots, RATIO)
    following = first_of(closes, GROUP)
    while following < GROUP:
        pool_window(
            tokens,
            state,
            batch,
            pooled,
            start + following,
            tl.sum(tl.where(member == following, last, 0), 0),
            channel,
            RATIO,
            OVERLAP,
            CHANNELS,
            SLOTS,
            STATES,
        )
        following = first_of(closes & (member > following), GROUP)


@triton.jit
def store_tile(
    tokens,
    state,
    state_slots,
    batch,
    token,
    count,
    column,
    RATIO: tl.constexpr,
    COLUMNS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Store columns ``[1, COPIED]`` of the states of ``token [TILE, 1]``."""
    positions, _, _, _ = batch
    own = tl.load(state_slots + token, mask=token < count, other=-1).to(tl.int64)
    last = tl.load(positions + token, mask=own >= 0, other=0).to(tl.int32)
    mask = (own >= 0) & (column < COLUMNS)
    store_states(tokens, state, token, own, last, column, mask, RATIO, COLUMNS, STATES)


@triton.jit
def store_pooled_entry(
    pooled,
    token,
    last,
    where,
    norm,
    pages,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    NOPE: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    COMPACT: tl.constexpr,
    CONVERT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Norm, rotation and storage of a token's pooled row.

    ``last``: int64, its position; ``where``: int64 ``[1]``, its slot. ``norm``: weight, angles,
    their row stride and eps.
    """
    weight, angles, angles_stride, eps = norm
    column = tl.arange(0, BLOCK)[None, :]
    pair = tl.arange(0, BLOCK // 2)[None, :] - (DIM - ROTATED) // 2
    rotating = (pair >= 0) & (pair < ROTATED // 2)
    values = tl.load(pooled + token * DIM + column, mask=column < DIM, other=0.0)
    scale = widen(tl.load(weight + column, mask=column < DIM, other=0.0))
    table = angles + (last + 1 - RATIO) * angles_stride
    c = tl.load(table + pair, mask=rotating, other=1.0)
    s = tl.load(table + ROTATED // 2 + pair, mask=rotating, other=0.0)
    entry = norm_and_rotate(values, scale, eps, c, s, column, DIM, ROTATED, DTYPE)
    store_entry(pages, where, entry, DIM, NOPE, PAGE_SIZE, COMPACT, CONVERT)
