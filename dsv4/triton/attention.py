"""Kernels of ``dsv4.ops.attention``: a tile of heads of one token against blocks of its entries.

An entry is dequantized to bfloat16 once, into shared memory, where both GEMMs read it: queries
times entries (K: the dims), and softmax weights times entries (K: the entries). Where tokens are
too few to fill a GPU, several programs split a token's blocks (KV splits, program s takes every
``splits``-th block from s on). Each program stores its float32 sums and the logit that they are
relative to; a second launch adds them in their order.

Columns of a tile are groups of 64 dims: those with a scale each, then those of the rotary
embedding; a group that is not full is padded. Every tile is in two halves, so that only one half is
in registers while it is dequantized.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from dsv4 import device as machine
from dsv4.kv_cache.pages import GROUP
from dsv4.ops.attention import SparseAttentionArgs
from dsv4.triton._lib.cache_entries import page_stride
from dsv4.triton._lib.numerics import dot, e4m3_value, narrow, wait_for_inputs, widen
from dsv4.triton._lib.rotation import load_angles, rotate
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_GROUP = tl.constexpr(GROUP)
_SCAN = 1024  # slots that a program reads together to find the last one
_FEW_SLOTS = 2048  # slots of a token up to which its KV splits do not search for the last one
_MOST_SPLITS = 128
_MOST_PROGRAMS = 4  # of split tokens, for each program that an SM holds at a time
_MERGED_SUMS = 16384  # sums that a program of the second launch holds at a time


@dataclass(frozen=True)
class Shape:
    """Sizes of a launch, and its cost in clock cycles of an SM by which ``plan`` chooses.

    Attributes:
        heads: Heads of a tile.
        block: Entries of a block.
        warps: Warps of a program.
        stages: Pipeline stages: one more than the blocks that are prefetched.
        resident: Programs of an SM, as far as registers and ``shared`` allow.
        cycles: Cost of a block.
        latency: Further time for which a program waits for a block.
        start: Cost of a program without its blocks.
        shared: Most bytes of shared memory of a program.
    """

    heads: int
    block: int
    warps: int
    stages: int
    resident: int
    cycles: int
    latency: int
    start: int
    shared: int


# Fitted to times on an H200. Blocks of 16 are not among them: of three groups or more Triton 3.6
# then makes wrong results.
_SHAPES = (
    Shape(64, 64, 8, 2, 1, 8100, 0, 4000, 184 * 1024),
    Shape(16, 32, 4, 3, 2, 3700, 600, 6000, 51 * 1024),
)
# For tensor cores that take operands from registers, on GPUs of which an SM has 100 KB at least.
# Costs are those of Hopper for as many entries, because no such GPU was measured.
_REGISTER_SHAPES = (
    Shape(16, 64, 8, 2, 1, 7400, 600, 6000, 85 * 1024),
    Shape(16, 32, 4, 3, 2, 3700, 600, 6000, 51 * 1024),
)
# Where E4M3 is converted by integers, four warps have too few registers for a block of 32, and
# eight for one of 64 on 8.6.
_INTEGER_SHAPES = (replace(_REGISTER_SHAPES[1], warps=8, resident=1),)
# Cycles of a launch, and bytes that an SM moves per cycle.
_LAUNCH, _BYTES = 3000, 20


@triton.jit
def _last(slots, width, CHUNK: tl.constexpr):
    """Return one more than the index of the last slot that is not negative."""
    index = tl.arange(0, CHUNK)
    last = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, width, CHUNK):
        slot = tl.load(slots + begin + index, mask=begin + index < width, other=-1)
        last = tl.maximum(last, tl.where(slot >= 0, begin + index + 1, 0))
    return tl.max(last, 0)


@triton.jit
def _dims(BEGIN: tl.constexpr, COLUMNS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr):
    """Dim of each column from BEGIN on; ``NOPE + ROPE`` or more where there is none."""
    column = BEGIN + tl.arange(0, COLUMNS)
    PADDED: tl.constexpr = (NOPE + _GROUP - 1) // _GROUP * _GROUP
    if PADDED > NOPE:
        first = tl.where(column < NOPE, column, NOPE + ROPE)
        column = tl.where(column < PADDED, first, column - PADDED + NOPE)
    return column


@triton.jit
def _concatenate(a, b):
    # Of registers: neither lane nor warp of a value changes.
    both = tl.permute(tl.join(a, b), [0, 2, 1])
    return tl.reshape(both, [a.shape[0], 2 * a.shape[1]])


@triton.jit
def _dequantize(codes, scales, INDEX: tl.constexpr):
    """bfloat16 values of a group's codes ``[BLOCK, 64]``; ``scales``: bytes of all groups."""
    byte = (scales >> (8 * INDEX)).to(tl.int32) & 255
    # Byte 0 is 2^-127, a subnormal number; byte 255 is NaN.
    bits = tl.where(byte == 0, 1 << 22, byte << 23)
    factor = tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    return narrow(e4m3_value(codes) * factor[:, None], tl.bfloat16)


@triton.jit
def _groups(
    start,
    scales,
    read,
    BEGIN: tl.constexpr,
    COUNT: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
):
    """COUNT groups of ``"fp8"`` entries, ``[BLOCK, 64 COUNT]``; ``start`` points to their data."""
    SCALED: tl.constexpr = (NOPE + _GROUP - 1) // _GROUP
    column = tl.arange(0, _GROUP)[None, :]
    if COUNT > 1:
        HALF: tl.constexpr = COUNT // 2
        left = _groups(start, scales, read, BEGIN, HALF, NOPE, ROPE)
        return _concatenate(left, _groups(start, scales, read, BEGIN + HALF, HALF, NOPE, ROPE))
    elif BEGIN < SCALED:  # noqa: RET505
        column += BEGIN * _GROUP
        mask = read[:, None]
        if (BEGIN + 1) * _GROUP > NOPE:
            mask = mask & (column < NOPE)
        return _dequantize(tl.load(start[:, None] + column, mask=mask, other=0), scales, BEGIN)
    else:
        column += (BEGIN - SCALED) * _GROUP
        mask = read[:, None]
        if (BEGIN + 1 - SCALED) * _GROUP > ROPE:
            mask = mask & (column < ROPE)
        address = (start + NOPE).to(tl.pointer_type(tl.bfloat16))[:, None] + column
        return tl.load(address, mask=mask, other=0.0)


@triton.jit
def _floats(
    start,
    read,
    BEGIN: tl.constexpr,
    COLUMNS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Columns of ``"plain"`` entries, ``[BLOCK, COLUMNS]``."""
    dim = _dims(BEGIN, COLUMNS, NOPE, ROPE)[None, :]
    return tl.load(start[:, None] + dim, mask=read[:, None] & (dim < NOPE + ROPE), other=0.0)


@triton.jit
def _entries(
    data,
    stride,
    slot,
    second,
    PAGE: tl.constexpr,
    SECOND_PAGE: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    HALF: tl.constexpr,
):
    """Both halves of the entries of ``slot`` (int32 ``[BLOCK]``), bfloat16; zeros if it is -1."""
    read = slot >= 0
    page, entry, size = slot // PAGE, slot % PAGE, PAGE
    if PAGE != SECOND_PAGE:
        page = tl.where(second, slot // SECOND_PAGE, page)
        entry = tl.where(second, slot % SECOND_PAGE, entry)
        size = tl.where(second, SECOND_PAGE, PAGE)
    page = page.to(tl.int64)
    if data.dtype.element_ty == tl.uint8:
        start = data + (page * stride + entry * (NOPE + 2 * ROPE))
        scales = page
        if NOPE > 0:
            address = data + (page * stride + (size * (NOPE + 2 * ROPE) + entry * 8))
            scales = tl.load(address.to(tl.pointer_type(tl.int64)), mask=read, other=0)
        COUNT: tl.constexpr = HALF // _GROUP
        left = _groups(start, scales, read, 0, COUNT, NOPE, ROPE)
        return left, _groups(start, scales, read, COUNT, COUNT, NOPE, ROPE)
    else:  # noqa: RET505
        start = data + (page * stride + entry * (NOPE + ROPE))
        left = _floats(start, read, 0, HALF, NOPE, ROPE)
        return left, _floats(start, read, HALF, HALF, NOPE, ROPE)


@triton.jit
def _query_address(
    pointer,
    head,
    heads,
    stride,
    BEGIN: tl.constexpr,
    HALF: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
):
    dim = _dims(BEGIN, HALF, NOPE, ROPE)[None, :]
    return pointer + head[:, None] * stride + dim, (head < heads)[:, None] & (dim < NOPE + ROPE)


@triton.jit
def _finite_origin(top):
    """The logit that exponents are relative to; 0 where there is none, to avoid Inf - Inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _rotated_back(x, cos, sin, dim, D: tl.constexpr, ROTATED_DIMS: tl.constexpr):
    """Rotate the last ROTATED_DIMS dims of ``x [ROWS, COLUMNS]`` back by a token's angles.

    ``dim [COLUMNS]`` are those of the columns; the two of a pair follow one another, the first at
    an even column.
    """
    ROWS: tl.constexpr = x.shape[0]
    PAIRS: tl.constexpr = x.shape[1] // 2
    even, odd = tl.split(tl.reshape(dim, [PAIRS, 2]))
    mask = (even >= D - ROTATED_DIMS) & (odd < D)
    c, s = load_angles(cos, sin, 0, (even - (D - ROTATED_DIMS)) // 2, mask, True)
    c = tl.broadcast_to(c[None, :], [ROWS, PAIRS])
    s = tl.broadcast_to(s[None, :], [ROWS, PAIRS])
    # Other dims are selected past the rotation: an infinity times a sine of 0 would be NaN.
    return tl.where((dim >= D - ROTATED_DIMS)[None, :], rotate(x, c, s), x)


@fast_launch
@triton.jit(do_not_specialize=["width", "second_width", "splits"])
def _attend_kernel(
    q,
    window,
    window_slots,
    compressed,
    compressed_slots,
    sink,
    out,
    partials,
    tops,
    totals,
    cos,
    sin,
    width,
    second_width,
    token_stride,
    head_stride,
    window_stride,
    compressed_stride,
    scale,
    heads,
    splits,
    PAGE: tl.constexpr,
    SECOND_PAGE: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    HALF: tl.constexpr,
    ROTATED_DIMS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    SCAN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS heads of one token; with SPLIT over every ``splits``-th block, into ``partials``."""
    wait_for_inputs(PDL)
    D: tl.constexpr = NOPE + ROPE
    token = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    window_slots += token * width
    compressed_slots += token * second_width
    q += token * token_stride
    address, mask = _query_address(q, head, heads, head_stride, 0, HALF, NOPE, ROPE)
    left_query = tl.load(address, mask=mask, other=0.0)
    address, mask = _query_address(q, head, heads, head_stride, HALF, HALF, NOPE, ROPE)
    right_query = tl.load(address, mask=mask, other=0.0)
    if SCAN > 0:
        width = _last(window_slots, width, SCAN)
        second_width = _last(compressed_slots, second_width, SCAN)
    first = tl.cdiv(width, BLOCK)
    blocks = first + tl.cdiv(second_width, BLOCK)
    left_sum = tl.zeros([HEADS, HALF], tl.float32)
    right_sum = tl.zeros([HEADS, HALF], tl.float32)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for block in tl.range(split, blocks, splits, num_stages=STAGES):
        second = block >= first
        number = (block - tl.where(second, first, 0)) * BLOCK + tl.arange(0, BLOCK)
        slots = tl.where(second, compressed_slots, window_slots)
        inside = number < tl.where(second, second_width, width)
        slot = tl.maximum(tl.load(slots + number, mask=inside, other=-1), -1).to(tl.int32)
        data = tl.where(second, compressed, window)
        stride = tl.where(second, compressed_stride, window_stride)
        left, right = _entries(data, stride, slot, second, PAGE, SECOND_PAGE, NOPE, ROPE, HALF)
        none = tl.zeros([HEADS, BLOCK], tl.float32)
        left_dots = dot(left_query, tl.trans(left), none)
        right_dots = dot(right_query, tl.trans(right), none)
        factor = tl.full([HEADS], 1.0, tl.float32)
        weight = tl.zeros([HEADS, BLOCK], tl.bfloat16)
        # Always true. Triton splits a GEMM whose result is an operand of another GEMM in the same
        # region of code among warps by rows alone: half of the warps would repeat the others' work.
        if blocks > 0:
            # Two scaled sums: if they were added first, Triton would make one GEMM of both.
            logits = left_dots * scale + right_dots * scale
            logits = tl.where((slot >= 0)[None, :], logits, float("-inf"))
            higher = tl.maximum(top, tl.max(logits, 1))
            origin = _finite_origin(higher)
            weight = narrow(tl.exp(logits - origin[:, None]), tl.bfloat16)
            factor = tl.exp(top - origin)
            # Of the rounded weights: so the result stays a mean of entries and zero.
            total = total * factor + tl.sum(widen(weight), 1)
            top = higher
        left_sum = dot(weight, left, left_sum * factor[:, None])
        right_sum = dot(weight, right, right_sum * factor[:, None])
    if SPLIT:
        row = (token * splits + split) * heads + head
        tl.store(tops + row, top, mask=head < heads)
        tl.store(totals + row, total, mask=head < heads)
        partials += (token * splits + split) * (heads * D)
        address, mask = _query_address(partials, head, heads, D, 0, HALF, NOPE, ROPE)
        tl.store(address, left_sum, mask=mask)
        address, mask = _query_address(partials, head, heads, D, HALF, HALF, NOPE, ROPE)
        tl.store(address, right_sum, mask=mask)
    else:
        logit = widen(tl.load(sink + head, mask=head < heads, other=0.0))
        origin = _finite_origin(tl.maximum(top, logit))
        factor = tl.exp(top - origin)
        total = total * factor + tl.exp(logit - origin)
        factor = tl.where(total == 0, 0.0, factor / total)[:, None]
        left_sum *= factor
        right_sum *= factor
        if ROTATED_DIMS > 0:
            cos += token * (ROTATED_DIMS // 2)
            sin += token * (ROTATED_DIMS // 2)
            if HALF > NOPE or HALF > D - ROTATED_DIMS:
                dim = _dims(0, HALF, NOPE, ROPE)
                left_sum = _rotated_back(left_sum, cos, sin, dim, D, ROTATED_DIMS)
            dim = _dims(HALF, HALF, NOPE, ROPE)
            right_sum = _rotated_back(right_sum, cos, sin, dim, D, ROTATED_DIMS)
        out += token * (heads * D)
        dtype: tl.constexpr = out.dtype.element_ty
        address, mask = _query_address(out, head, heads, D, 0, HALF, NOPE, ROPE)
        tl.store(address, narrow(left_sum, dtype), mask=mask)
        address, mask = _query_address(out, head, heads, D, HALF, HALF, NOPE, ROPE)
        tl.store(address, narrow(right_sum, dtype), mask=mask)


@fast_launch
@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    partials,
    tops,
    totals,
    sink,
    out,
    cos,
    sin,
    heads,
    splits,
    D: tl.constexpr,
    ROTATED_DIMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the sums of all KV splits of one head of one token, in their order."""
    wait_for_inputs(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logit = widen(tl.load(sink + head))
    first = token * splits * heads + head
    split = tl.arange(0, SPLITS)
    top = tl.load(tops + first + split * heads, mask=split < splits, other=float("-inf"))
    total = tl.load(totals + first + split * heads, mask=split < splits, other=0.0)
    origin = _finite_origin(tl.maximum(tl.max(top, 0), logit))
    total = tl.sum(total * tl.exp(top - origin), 0) + tl.exp(logit - origin)
    column = tl.arange(0, COLUMNS)
    sums = tl.zeros([COLUMNS], tl.float32)
    for begin in tl.static_range(0, SPLITS, ROWS):
        split = begin + tl.arange(0, ROWS)
        top = tl.load(tops + first + split * heads, mask=split < splits, other=float("-inf"))
        address = partials + (first + split * heads)[:, None] * D + column[None, :]
        mask = (split < splits)[:, None] & (column < D)[None, :]
        value = tl.load(address, mask=mask, other=0.0)
        sums += tl.sum(value * tl.exp(top - origin)[:, None], 0)
    sums = tl.where(total == 0, 0.0, sums / total)
    if ROTATED_DIMS > 0:
        cos += token * (ROTATED_DIMS // 2)
        sin += token * (ROTATED_DIMS // 2)
        rotated = _rotated_back(tl.reshape(sums, [1, COLUMNS]), cos, sin, column, D, ROTATED_DIMS)
        sums = tl.reshape(rotated, [COLUMNS])
    address = out + (token * heads + head) * D + column
    tl.store(address, narrow(sums, out.dtype.element_ty), mask=column < D)


def sparse_attention(args: SparseAttentionArgs) -> torch.Tensor:
    """See ``dsv4.ops.attention.sparse_attention``."""
    q, window_slots, compressed = args.q, args.window_slots, args.compressed
    compressed_page_size, compressed_slots = args.compressed_page_size, args.compressed_slots
    sink, cos, sin = args.sink, args.cos, args.sin
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    if compressed is None or compressed_slots is None:
        compressed, compressed_page_size = args.window, args.window_page_size
        compressed_slots = window_slots[:, :0]
    if compressed_slots.dtype != window_slots.dtype:
        window_slots, compressed_slots = window_slots.long(), compressed_slots.long()
    q = q if q.stride(-1) == 1 else q.contiguous()
    window_slots, compressed_slots = window_slots.contiguous(), compressed_slots.contiguous()
    sink = sink.contiguous()
    rotated = 0 if cos is None else 2 * cos.shape[1]
    cos, sin = (sink if table is None else table.contiguous() for table in (cos, sin))
    tokens, heads, d = q.shape
    widths = (window_slots.shape[1], compressed_slots.shape[1])
    rope = args.rope_dim if args.window_format == "fp8" else 0
    groups = triton.cdiv(d - rope, GROUP) + triton.cdiv(rope, GROUP)
    sm = launch_options.sm(q)
    # Only Hopper's tensor cores are given tiles of 64 heads, and more than two groups.
    wide = groups > 2 and sm // 10 == 9
    shape, splits = plan(tokens, heads, d, widths, launch_options.sm_count(q.device), wide, sm)
    split_shape = (tokens, splits, heads) if splits > 1 else (0,)
    partials = torch.empty((*split_shape, d), dtype=torch.float32, device=q.device)
    tops, totals = (
        torch.empty(split_shape, dtype=torch.float32, device=q.device) for _ in range(2)
    )
    if args.window_format != "fp8" and shape.heads > 16:
        # Both GEMMs read the entries as they are stored; Triton 3.6 fails to prefetch such loads.
        shape = replace(shape, block=min(shape.block, 32), stages=1)
    with launch_options.on(q):
        # Tiles of a token follow one another, so that all but the first find its entries in L2.
        _attend_kernel[(triton.cdiv(heads, shape.heads), tokens, splits)](
            q,
            args.window,
            window_slots,
            compressed,
            compressed_slots,
            sink,
            out,
            partials,
            tops,
            totals,
            cos,
            sin,
            *widths,
            q.stride(0),
            q.stride(1),
            page_stride(args.window),
            page_stride(compressed),
            args.scale,
            heads,
            splits,
            PAGE=args.window_page_size,
            SECOND_PAGE=compressed_page_size,
            NOPE=d - rope,
            ROPE=rope,
            HALF=GROUP * max(1, launch_options.power_of_two(groups) // 2),
            ROTATED_DIMS=0 if splits > 1 else rotated,
            HEADS=shape.heads,
            BLOCK=shape.block,
            SPLIT=splits > 1,
            SCAN=0 if splits > 1 and sum(widths) <= _FEW_SLOTS else _SCAN,
            STAGES=shape.stages,
            num_warps=shape.warps,
            **launch_options.options(q),
        )
        if splits > 1:
            _merge(partials, tops, totals, sink, out, (cos, sin, rotated))
    return out


def _merge(
    partials: torch.Tensor,
    tops: torch.Tensor,
    totals: torch.Tensor,
    sink: torch.Tensor,
    out: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor, int],
) -> None:
    tokens, splits, heads, d = partials.shape
    columns, padded = launch_options.power_of_two(d), launch_options.power_of_two(splits)
    _merge_kernel[(tokens, heads)](
        partials,
        tops,
        totals,
        sink,
        out,
        *angles[:2],
        heads,
        splits,
        D=d,
        ROTATED_DIMS=angles[2],
        COLUMNS=columns,
        SPLITS=padded,
        ROWS=min(padded, max(1, _MERGED_SUMS // columns)),
        num_warps=4,
        **launch_options.options(out),
    )


def _shapes(sm: int) -> tuple[Shape, ...]:
    """Return the shapes for a GPU, with as many programs of an SM as its shared memory holds."""
    shapes: tuple[Shape, ...] = _SHAPES
    memory = machine.shared_memory(divmod(sm, 10))
    if not launch_options.is_wide(sm):
        shapes = _REGISTER_SHAPES if sm >= 89 else _INTEGER_SHAPES
    return tuple(
        replace(shape, resident=launch_options.resident(memory, shape.resident, shape.shared))
        for shape in shapes
    )


@functools.cache
def plan(
    tokens: int,
    heads: int,
    d: int,
    widths: tuple[int, int],
    sm_count: int,
    wide: bool,
    sm: int = 90,
) -> tuple[Shape, int]:
    """The launch of the fewest estimated cycles, and its number of KV splits.

    ``wide``: whether tiles of more than 16 heads may be taken. ``sm``: see ``launch_options.sm``.
    """
    shapes = _shapes(sm)
    estimates = (
        (_cycles(shape, splits, tokens, heads, d, widths, sm_count), i, splits)
        for i, shape in enumerate(shapes)
        if shape.heads == 16 or (wide and heads > 16)
        for splits in range(1, 1 + _most_splits(shape, tokens, heads, widths, sm_count))
    )
    _, i, splits = min(estimates)
    return shapes[i], splits


def _most_splits(
    shape: Shape, tokens: int, heads: int, widths: tuple[int, int], sm_count: int
) -> int:
    """The most splits: no more than blocks, nor more sums than a few programs for each SM."""
    programs = tokens * triton.cdiv(heads, shape.heads)
    most = _MOST_PROGRAMS * sm_count * shape.resident // programs
    return max(1, min(_MOST_SPLITS, most, _blocks(shape, widths)))


def _blocks(shape: Shape, widths: tuple[int, int]) -> int:
    return sum(triton.cdiv(width, shape.block) for width in widths)


def _cycles(
    shape: Shape,
    splits: int,
    tokens: int,
    heads: int,
    d: int,
    widths: tuple[int, int],
    sm_count: int,
) -> float:
    """Rounds of programs, and sums written and read again if there are several to a token."""
    programs = tokens * triton.cdiv(heads, shape.heads) * splits
    longest = triton.cdiv(_blocks(shape, widths), splits)
    rounds = triton.cdiv(programs, sm_count * shape.resident)
    held = min(shape.resident, triton.cdiv(programs, sm_count))
    block = max(shape.cycles + shape.latency, held * shape.cycles)
    if splits == 1:
        return rounds * (shape.start + longest * block)
    moved = 4 * shape.heads * d / _BYTES
    again = _LAUNCH + moved * programs / sm_count
    return rounds * (shape.start + longest * block + held * moved) + again
