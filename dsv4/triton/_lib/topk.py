"""Top-k selection from a row of indexer logits, for ``indexer_select``: one program per token.

The keys of a short row stay in registers, where a search finds the k-th highest. A longer row is
first reduced to the keys that reach a threshold: the k-th highest of the maxima of some 2 k
classes, which at least k keys reach, and few more. Of very long rows the logits kernel stores the
maximum of every group of neighbouring entries; the threshold is taken from these, and only groups
that reach it are read. Where more keys reach it than the buffer holds, because they are equal, the
row is searched in pieces.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.triton._lib.index_logits import load_where, store_where
from dsv4.triton._lib.numerics import INTERPRETED, wait_for_inputs
from dsv4.triton._runtime.launcher import fast_launch

_TOP = tl.constexpr(0x80000000)  # makes keys unsigned
_BINADE = tl.constexpr(1 << 23)  # from a key to that of half the score


@triton.jit
def _ones(bits):
    """Number of bits that are set, of 16."""
    if INTERPRETED:
        bits = (bits & 0x5555) + ((bits >> 1) & 0x5555)
        bits = (bits & 0x3333) + ((bits >> 2) & 0x3333)
        bits = (bits & 0x0F0F) + ((bits >> 4) & 0x0F0F)
        return (bits & 0x1F) + (bits >> 8)
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [bits], tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _reach(keys, threshold):
    """Return how many keys (uint32 ``[T, N]``) reach a threshold."""
    return tl.sum(tl.sum((keys >= threshold).to(tl.int32), 1), 0)


@triton.jit
def _reach_both(keys, a, b):
    """Like ``_reach`` for two thresholds, by one sum: most of its time is waiting for warps."""
    flags = (keys >= a).to(tl.int32) + ((keys >= b).to(tl.int32) << 16)
    both = tl.sum(tl.sum(flags, 1), 0)
    return both & 0xFFFF, both >> 16


@triton.jit
def _search(keys, low, reached, high, down, k):
    """The highest threshold that k keys (uint32 ``[T, N]``, below 2^15) reach, and how many do.

    ``reached`` of them, at least k, reach ``low``, none does ``high``. Ends early at a threshold
    that exactly k reach. Guesses by the numbers that reach both ends, on either side of what is
    likely, and takes thirds at every third guess; but if ``down`` is not 0, first looks as far
    below the upper end and 4 times as far, then further, until there are k.
    """
    low, high = tl.full([], low, tl.uint32), tl.full([], high, tl.uint32)
    down = tl.full([], down, tl.uint32)
    reached = tl.full([], reached, tl.int32)
    above, turn = tl.full([], 0, tl.int32), 0
    while high - low > 1:
        last = high - low - 1
        number = (reached - above).to(tl.float32)
        share = (reached - k + 0.5) / number
        # Of that many evenly spread ones, the k-th is mostly as near.
        about = tl.sqrt(share * (1.0 - share) / number)
        first = tl.where(turn == 2, 1.0 / 3, tl.maximum(share - about, 0.0))
        second = tl.where(turn == 2, 2.0 / 3, tl.minimum(share + about, 1.0))
        span = tl.minimum((last + 1).to(tl.float32), 4294967040.0)
        a = tl.minimum(tl.maximum((span * first).to(tl.uint32), 1), last)
        b = tl.minimum(tl.maximum((span * second).to(tl.uint32), 1), last)
        far = tl.where(down > last // 4, last, 4 * down)
        a = low + tl.where(down > 0, last + 1 - far, a)
        b = low + tl.where(down > 0, last + 1 - tl.minimum(down, last), b)
        i, j = _reach_both(keys, a, b)
        high = tl.where(i < k, a, tl.where(j < k, b, high))
        above = tl.where(i < k, i, tl.where(j < k, j, above))
        low = tl.where(j >= k, b, tl.where(i >= k, a, low))
        reached = tl.where(j >= k, j, tl.where(i >= k, i, reached))
        high = tl.where(reached == k, low + 1, high)
        down = tl.where(i >= k, down * 0, down * 16)
        turn = tl.where(turn == 2, 0, turn + 1)
    return low, reached


@triton.jit
def _before(flag):
    """Count the flags (bool ``[T, N]``, N up to 16) before each, row by row; and all."""
    T: tl.constexpr = flag.shape[0]
    N: tl.constexpr = flag.shape[1]
    bit = tl.arange(0, N)[None, :]
    mine = tl.sum(flag.to(tl.int32) << bit, 1)
    # Rows that one warp holds, then over the rows: a scan of the whole would have every thread read
    # the totals of all warps one after the other.
    tile = tl.reshape(_ones(mine), [T // 32, 32])
    row = tl.arange(0, T // 32)
    total = tl.sum(tile, 1)
    above = tl.sum(tl.where(row[:, None] > row[None, :], total[None, :], 0), 1)
    start = tl.reshape(tl.cumsum(tile, 1) - tile + above[:, None], [T])
    return _ones(mine[:, None] & ((1 << bit) - 1)) + start[:, None], tl.sum(total, 0)


@triton.jit
def _is_selected(keys, least, reaching, down, k):
    """Return which of the keys (uint32 ``[T, N]``) are the k highest, of equal ones the first.

    ``reaching`` of them reach ``least``; if fewer than k, those. ``down`` as in ``_search``.
    """
    threshold, reached = least, reaching
    if reaching > k:
        highest = tl.max(tl.max((keys ^ _TOP).to(tl.int32, bitcast=True), 1), 0)
        highest = highest.to(tl.uint32, bitcast=True) ^ _TOP
        threshold, reached = _search(keys, least, reaching, highest + 1, down, k)
    flag = keys >= threshold
    if reached > k:
        equal = keys == threshold
        missing = k - reached + _before(equal)[1]
        flag &= (keys > threshold) | (_before(equal)[0] < missing)
    return flag


@triton.jit
def _joined(a, b, c, d, e, f, g, h):
    # Of [T] each to [T, 8].
    a, c = tl.join(a, b), tl.join(c, d)
    e, g = tl.join(e, f), tl.join(g, h)
    parts = tl.join(tl.join(a, c), tl.join(e, g))
    return tl.reshape(tl.permute(parts, [0, 3, 2, 1]), [a.shape[0], 8])


@triton.jit
def _at(pointer, index, count):
    return tl.load(pointer + index, mask=index < count, other=0)


@triton.jit
def _columns(pointer, index, step, count, N: tl.constexpr):
    """``[T, N]``: what is at ``index`` (``[T]``) and the N - 1 next steps; 0 from ``count`` on."""
    T: tl.constexpr = index.shape[0]
    if N == 1:
        return _at(pointer, index, count)[:, None]
    elif N == 2:  # noqa: RET505  (a choice of the compiler; what follows would be compiled too)
        return tl.join(_at(pointer, index, count), _at(pointer, index + step, count))
    elif N == 4:
        low = tl.join(_at(pointer, index, count), _at(pointer, index + step, count))
        index += 2 * step
        high = tl.join(_at(pointer, index, count), _at(pointer, index + step, count))
        return tl.reshape(tl.permute(tl.join(low, high), [0, 2, 1]), [T, 4])
    else:
        return _joined(
            _at(pointer, index, count),
            _at(pointer, index + step, count),
            _at(pointer, index + 2 * step, count),
            _at(pointer, index + 3 * step, count),
            _at(pointer, index + 4 * step, count),
            _at(pointer, index + 5 * step, count),
            _at(pointer, index + 6 * step, count),
            _at(pointer, index + 7 * step, count),
        )


@triton.jit
def _unsigned(keys):
    return keys.to(tl.uint32, bitcast=True)


@triton.jit
def _least(keys, count, k, CLASSES: tl.constexpr, T: tl.constexpr):
    """A threshold above 0 that at least k of ``count`` keys reach, mostly few more.

    The upper half of the k-th highest of the maxima of classes (class of a key: its number modulo
    the number of classes); 1 if there are fewer than k.
    """
    N: tl.constexpr = CLASSES // T
    highest = tl.zeros([T, N], tl.uint32)
    for start in range(0, count, 16 * T):
        for i in tl.static_range(16 // N):
            index = start + i * CLASSES + tl.arange(0, T)
            highest = tl.maximum(highest, _unsigned(_columns(keys, index, T, count, N)))
    digits = highest >> 16
    top = tl.max(tl.max(digits.to(tl.int32, bitcast=True), 1), 0).to(tl.uint32, bitcast=True)
    digit, _ = _search(digits, 0, CLASSES, top + 1, 128, k)
    return tl.maximum(digit << 16, 1)


@triton.jit
def _by_thread(x):
    # [REPS, T, V] to [T, REPS * V].
    return tl.reshape(tl.permute(x, [1, 0, 2]), [x.shape[1], x.shape[0] * x.shape[2]])


@triton.jit
def _positions(T: tl.constexpr, N: tl.constexpr):
    # [N / 4, T, 4]: numbers of a thread follow one another, four in an access.
    r = tl.arange(0, N // 4)[:, None, None]
    t = tl.arange(0, T)[None, :, None]
    return t * N + r * 4 + tl.arange(0, 4)[None, None, :]


@triton.jit
def _buffer_groups(maxima, number, least, groups, BUFFER: tl.constexpr, T: tl.constexpr):
    """Store which of ``number`` groups reach ``least``, the first BUFFER of them; how many do."""
    count = 0
    for start in range(0, number, 8 * T):
        index = start + _positions(T, 8)
        keys = tl.where(index < number, tl.load(maxima + index), 0)
        flag = _unsigned(_by_thread(keys)) >= least
        before, more = _before(flag)
        before += count
        store_where(groups + before, _by_thread(index), flag & (before < BUFFER))
        count += more
    return count


@triton.jit
def _buffer_pairs(keys, ids, least, count, pairs, BUFFER: tl.constexpr):
    # Store the pairs of a key in the upper half and its id that reach ``least``; the new number.
    keys, ids = _by_thread(keys), _by_thread(ids)
    flag = _unsigned(keys) >= least
    before, more = _before(flag)
    before += count
    both = (keys.to(tl.int64) << 32) | ids.to(tl.int64)
    store_where(pairs + before, both, flag & (before < BUFFER))
    return count + more


@triton.jit
def _buffer_entries(keys, shown, least, pairs, BUFFER: tl.constexpr, T: tl.constexpr):
    """Like ``_buffer_groups``, for pairs of the entries themselves."""
    count = 0
    for start in range(0, shown, 8 * T):
        ids = start + _positions(T, 8)
        values = tl.where(ids < shown, tl.load(keys + ids), 0)
        count = _buffer_pairs(values, ids, least, count, pairs, BUFFER)
    return count


@triton.jit
def _buffer_members(
    keys,
    shown,
    groups,
    group_count,
    least,
    pairs,
    GROUP: tl.constexpr,
    BUFFER: tl.constexpr,
    T: tl.constexpr,
):
    """Like ``_buffer_entries``, for the entries of the first ``group_count`` groups, of 8 or 16."""
    count = 0
    PARTS: tl.constexpr = GROUP // 8
    part = tl.arange(0, T)
    for start in range(0, group_count, T // PARTS):
        item = start + part // PARTS
        real = item < group_count
        first = tl.load(groups + item, mask=real, other=0) * GROUP + part % PARTS * 8
        ids = first[None, :, None] + _positions(1, 8)
        values = tl.where((ids < shown) & real[None, :, None], tl.load(keys + ids), 0)
        count = _buffer_pairs(values, ids, least, count, pairs, BUFFER)
    return count


@triton.jit
def _select(keys, ids, out, shown, k, row, exists, PAGE: tl.constexpr):
    """Store positions of the k highest of ``shown`` keys to ``out``, ascending, or their slots.

    ``keys`` and ``ids`` are laid out as ``_positions``; ``row``, ``exists`` and ``PAGE`` as in
    ``_slots_of``. A thread's eight positions lie in one page if pages hold multiples of eight: it
    looks up one slot, before the search, so that the look-up takes no time of its own.
    """
    values = _unsigned(_by_thread(tl.where(ids < shown, keys, 0)))
    results = _by_thread(ids)
    if PAGE > 0 and PAGE % 8 == 0:
        first = tl.arange(0, results.shape[0]) * 8
        start = _slots_of(first, first < shown, row, exists, PAGE)
    flag = _is_selected(values, tl.full([], 1, tl.uint32), shown, _BINADE, k)
    if PAGE == 0:
        results = results.to(tl.int64)
    elif PAGE % 8:
        results = _slots_of(results, flag, row, exists, PAGE)
    else:
        results = tl.where(exists, start[:, None] + results % 8, -1)
    store_where(out + _before(flag)[0], results, flag)


@triton.jit
def _slots_of(ids, flag, row, exists, PAGE: tl.constexpr):
    """Slots of flagged entries of the sequence whose pages ``row`` has; others are undefined.

    -1 unless ``exists``: else the token has no sequence, and ``row`` is another's.
    """
    page = load_where(row + ids // PAGE, flag).to(tl.int64)
    return tl.where(exists, page * PAGE + ids % PAGE, -1)


@triton.jit
def _select_buffered(pairs, out, least, count, k, BUFFER: tl.constexpr, T: tl.constexpr):
    """The ids of the k highest of ``count`` pairs, in their order."""
    N: tl.constexpr = BUFFER // T
    both = _columns(pairs, tl.arange(0, T) * N, 1, count, N)
    flag = _is_selected(_unsigned((both >> 32).to(tl.int32)), least, count, 0, k)
    store_where(out + _before(flag)[0], both & 0x7FFFFFFF, flag)


@triton.jit
def _item(keys, groups, out, index, start, chosen, count, shown, GROUP: tl.constexpr):
    # Key and id of what is at ``index``: what was chosen so far, then items from ``start`` on.
    new = index >= chosen
    item = start + index - chosen
    ids = item
    if GROUP > 0:
        group = tl.load(groups + item // GROUP, mask=new & (item < count), other=0)
        ids = group * GROUP + item % GROUP
    before = tl.load(out + index, mask=index < chosen, other=0).to(tl.int32)
    ids = tl.where(new, ids, before)
    real = ((item < count) | (index < chosen)) & (ids < shown)
    return tl.load(keys + ids, mask=real, other=0), ids


@triton.jit
def _select_in_pieces(keys, groups, out, count, shown, k, GROUP: tl.constexpr, T: tl.constexpr):
    """The k highest of ``count`` items, more than k, ascending, to ``out``; slowly.

    Items are entries, or those below ``shown`` of ``groups``. What was chosen so far comes before
    the next items, in the same order.
    """
    index = tl.arange(0, T) * 8
    start = 0
    chosen = 0
    while start < count:
        a, i = _item(keys, groups, out, index, start, chosen, count, shown, GROUP)
        b, j = _item(keys, groups, out, index + 1, start, chosen, count, shown, GROUP)
        c, s = _item(keys, groups, out, index + 2, start, chosen, count, shown, GROUP)
        d, m = _item(keys, groups, out, index + 3, start, chosen, count, shown, GROUP)
        e, n = _item(keys, groups, out, index + 4, start, chosen, count, shown, GROUP)
        f, o = _item(keys, groups, out, index + 5, start, chosen, count, shown, GROUP)
        g, p = _item(keys, groups, out, index + 6, start, chosen, count, shown, GROUP)
        h, q = _item(keys, groups, out, index + 7, start, chosen, count, shown, GROUP)
        values = _unsigned(_joined(a, b, c, d, e, f, g, h))
        flag = _is_selected(values, tl.full([], 1, tl.uint32), _reach(values, 1), _BINADE, k)
        ids = _joined(i, j, s, m, n, o, p, q).to(out.dtype.element_ty)
        tl.debug_barrier()
        store_where(out + _before(flag)[0], ids, flag)
        tl.debug_barrier()
        start += 8 * T - chosen
        chosen = k


@fast_launch
@triton.jit(do_not_specialize=["capacity", "k", "table_stride"])
def select_kernel(
    scores,
    maxima,
    buffer,
    visible,
    table,
    sequences,
    out,
    capacity,
    k,
    score_stride,
    maxima_stride,
    buffer_stride,
    table_stride,
    PAGE: tl.constexpr,
    TOP: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    DIRECT: tl.constexpr,
    BUFFER: tl.constexpr,
    CLASSES: tl.constexpr,
    T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store positions. PAGE > 0: slots, by pages of as many entries, of rows below EXACT alone."""
    tl.static_assert(PAGE == 0 or DIRECT == 0)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    row, exists = table, True
    if PAGE > 0:
        sequence = tl.load(sequences + token).to(tl.int64)
        row += tl.maximum(sequence, 0) * table_stride
        exists = sequence >= 0
    shown = tl.minimum(tl.load(visible + token), capacity).to(tl.int32)
    out += token * k
    scores += token * score_stride
    maxima += token * maxima_stride
    groups = buffer + token * buffer_stride
    pairs = (groups + BUFFER).to(tl.pointer_type(tl.int64))
    ids = _positions(T, 8)
    keys = ids
    if EXACT > 0 and DIRECT == 0:
        # Loaded before it is known how many of them count.
        keys = tl.load(scores + ids)
    if shown <= k:
        index = tl.arange(0, TOP)
        results = index.to(tl.int64)
        if PAGE > 0:
            results = _slots_of(index, index < shown, row, exists, PAGE)
        tl.store(out + index, tl.where(index < shown, results, -1), mask=index < k)
    elif shown <= EXACT:
        if DIRECT > 0:
            keys = tl.load(scores + ids)
        _select(keys, ids, out, shown, k, row, exists, PAGE)
    else:
        if DIRECT > 0:
            if shown <= DIRECT:
                least = _least(scores, shown, k, CLASSES, T)
                count = _buffer_entries(scores, shown, least, pairs, BUFFER, T)
                tl.debug_barrier()
                if count <= BUFFER:
                    _select_buffered(pairs, out, least, count, k, BUFFER, T)
                else:
                    _select_in_pieces(scores, groups, out, shown, shown, k, 0, T)
            else:
                if GROUP > 0:
                    number = tl.cdiv(shown, GROUP)
                    least = _least(maxima, number, k, CLASSES, T)
                    count = _buffer_groups(maxima, number, least, groups, BUFFER, T)
                    if count <= BUFFER:
                        tl.debug_barrier()
                        count = _buffer_members(
                            scores, shown, groups, count, least, pairs, GROUP, BUFFER, T
                        )
                    tl.debug_barrier()
                    if count <= BUFFER:
                        _select_buffered(pairs, out, least, count, k, BUFFER, T)
                    else:
                        _select_in_pieces(maxima, groups, groups, number, number, k, 0, T)
                        _select_in_pieces(scores, groups, out, k * GROUP, shown, k, GROUP, T)
