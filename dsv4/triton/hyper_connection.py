"""Kernels of ``dsv4.ops.hyper_connection``, for four streams.

``hc_pre`` needs the GEMM of ``fn`` with a token's flattened streams before it can begin, so it
takes two launches. The first spreads the GEMM over the GPU (``_lib/mixing_gemm.py``). The second
adds the partial sums in their order, makes the coefficients (``_lib/mixing.py``) and mixes the
streams. The streams are read twice: 9 rows of H are moved where 5 would do. For few tokens the
write-back of the sublayer before (``hc_post``) is done in the first launch. For many it has its own
launch, because a program of the GEMM then reads columns of one stream. Likewise the second launch
quantises the norm of few and short rows; a third quantises others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops.hyper_connection import (
    HcHeadArgs,
    HcPostArgs,
    HcPostPreNormArgs,
    HcPreArgs,
    HcPreNormArgs,
)
from dsv4.ops.hyper_connection_quantize import HcPostPreNormQuantizeArgs, HcPreNormQuantizeArgs
from dsv4.ops.quantize import QuantizeNvfp4Args
from dsv4.quant.formats import LINEAR
from dsv4.triton._lib import mixing_gemm
from dsv4.triton._lib.combined_rows import load_combined
from dsv4.triton._lib.hyper_streams import load_mixers, load_streams, mixed_stream, pick
from dsv4.triton._lib.mailbox import load_sum
from dsv4.triton._lib.mixing import (
    coefficients_kernel,
    coefficients_of_token,
    logits_of,
    parameters_of,
    summed,
)
from dsv4.triton._lib.mixing_gemm import (
    Partials,
    Summands,
    WriteBack,
    partials_of,
    partials_of_small_m,
    reading,
)
from dsv4.triton._lib.numerics import narrow, once, wait_for_inputs, widen
from dsv4.triton._lib.nvfp4 import (
    block_scales,
    conversion,
    dynamic_scale,
    e2m1_codes,
    finite_amax,
    is_moderate,
    largest,
)
from dsv4.triton._lib.nvfp4_tile import Output
from dsv4.triton._lib.prefetch import prefetch_row
from dsv4.triton._lib.rms import broadcast_total, inverse_rms, shared_sum
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch
from dsv4.triton.quantize import quantize_nvfp4

# Registers of a thread of the write-back. Few tokens: without a number the compiler saves some,
# so that loads wait for earlier loads. Many tokens: with more registers fewer programs would fit.
_REGISTERS = 128
_REGISTERS_OF_MANY = 72
# Up to this many tokens and columns the launch that makes the norm quantises it, too. Above,
# registers are short there, and a launch of its own takes less time.
_FEW_QUANTIZED, _WIDEST_QUANTIZED = 128, 4096
_FEW_PROGRAMS = tl.constexpr(64)  # up to which the parameters are prefetched
_LANES = 32  # tokens whose coefficients a program makes, one to a thread, where tokens are many


@fast_launch
@triton.jit
def _post_kernel(
    y,
    x,
    post,
    comb,
    out,
    hidden,
    slices,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write back ``y``, a tensor or a sum.

    It has the arguments of a ``PushedSum`` with RANKS, of ``CombinedRows`` with TOP_K.
    """
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        token = (tl.program_id(0) // slices).to(tl.int64)
        start = (tl.program_id(0) % slices) * BLOCK
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden
        if RANKS:
            wide = load_sum(y, token, start, column, inside, hidden, RANKS)
        elif TOP_K:
            wide = widen(load_combined(y, token, column, inside, TOP_K))
        else:
            wide = widen(tl.load(y + token * hidden + column, mask=inside, other=0.0))
        offset = token * 4 * hidden + column
        x0, x1, x2, x3 = load_streams(x, offset, hidden, inside)
        mixers = load_mixers(post, comb, token)
        DTYPE: tl.constexpr = out.dtype.element_ty
        for k in tl.static_range(4):
            mixed = mixed_stream(wide, x0, x1, x2, x3, mixers[k])
            tl.store(out + offset + k * hidden, narrow(mixed, DTYPE), mask=inside)


def hc_post(args: HcPostArgs) -> torch.Tensor:
    """See ``dsv4.ops.hyper_connection.hc_post``."""
    return _post(args, None)


def reduced_post(args: HcPostArgs, summands: Summands) -> torch.Tensor:
    """Run ``hc_post`` with the sum of ranks' parts or of rows; ``args.y`` is not read."""
    return _post(args, summands)


def _post(args: HcPostArgs, summands: Summands | None) -> torch.Tensor:
    """Write back ``args.y``, or in its place a sum."""
    out = torch.empty_like(args.streams, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    hidden = args.streams.shape[-1]
    tokens = out.numel() // (4 * hidden)
    # Small slices while there are few tokens, so that they spread over the GPU.
    block, warps = (256, 2) if tokens < 64 else (1024, 4)
    block = min(block, launch_options.power_of_two(hidden))
    slices = -(-hidden // block)
    small = launch_options.is_small(tokens * slices, warps)
    with launch_options.on(out):
        _post_kernel[(tokens * slices,)](
            args.y.contiguous() if summands is None else summands.arguments,
            args.streams.contiguous(),
            args.post.contiguous(),
            args.comb.contiguous(),
            out,
            hidden,
            slices,
            BLOCK=block,
            num_warps=warps,
            maxnreg=_REGISTERS if small or summands is not None else _REGISTERS_OF_MANY,
            **reading(summands, launch_options.options(out, small=small)),
        )
    return out


@triton.jit
def _store_codes(
    values,
    shared,
    codes,
    scales,
    blocks,
    CONVERT: tl.constexpr,
    MODERATE: tl.constexpr,
):
    """A row ``[BLOCKS, 16]`` in NVFP4."""
    amax, finite = finite_amax(largest(values))
    bits, product = block_scales(amax, finite, shared, False, MODERATE)
    packed = e2m1_codes(widen(values), product, CONVERT, MODERATE)
    block = tl.arange(0, values.shape[0])
    address = codes + (block * 8)[:, None] + tl.arange(0, 8)[None, :]
    tl.store(address, packed, mask=(block < blocks)[:, None])
    tl.store(scales + block, bits, mask=block < blocks)


@triton.jit
def _quantize_row(
    row, source, codes, scales, total, token, hidden, SCALE: tl.constexpr, CONVERT: tl.constexpr
):
    """A row ``[BLOCK]`` in NVFP4, with its own global scale or one from ``source``."""
    values = tl.reshape(row, [row.shape[0] // 16, 16])
    if SCALE == "token":
        shared = dynamic_scale(tl.max(finite_amax(largest(values))[0], 0))
    else:
        shared = tl.load(source + (token if SCALE == "row" else 0))
    if SCALE != "one" or token == 0:
        tl.store(total + (0 if SCALE == "one" else token), shared)
    codes += token * (hidden // 2)
    scales += token * (hidden // 16)
    if is_moderate(shared):
        _store_codes(values, shared, codes, scales, hidden // 16, CONVERT, True)
    else:
        _store_codes(values, shared, codes, scales, hidden // 16, CONVERT, False)


@triton.jit
def _square_sum(values):
    """The sum of squares of ``values [BLOCK]``, the same in ``[32]`` numbers.

    1024 neighbours are of four warps, a thread has 8 of them: what it has of others is added first.
    """
    BLOCK: tl.constexpr = values.shape[0]
    squares = values * values
    if BLOCK > 1024:
        squares = tl.sum(tl.reshape(squares, [BLOCK // 1024, 1024]), 0)
    return shared_sum(squares, squares.shape[0] // 4)


@fast_launch
@triton.jit(do_not_specialize=["tokens", "splits"])
def _finish_kernel(
    partials,
    sums,
    x,
    scale,
    base,
    weight,
    out,
    post,
    comb,
    source,
    codes,
    scales,
    total_scale,
    tokens,
    hidden,
    splits,
    slices,
    norm_eps,
    hc_eps,
    ITERATIONS: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    SQUARED: tl.constexpr,
    NORM: tl.constexpr,
    SCALE: tl.constexpr,
    CONVERT: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Mix the streams of a token (``hc_pre``); with NORM and SCALE norm and quantise the result.

    A token has ``slices`` programs. With COEFFICIENTS one more program, the first, makes post and
    comb: its many dependent steps take as long as the mixing and run in parallel to it. Without
    SQUARED the partial sums have no squares: a program then has a whole token, sums them up itself
    and stores the logits and squares to ``sums``, as a single partial sum. SCALE says where the
    global scale comes from: ``"token"`` computes it, ``"one"`` and ``"row"`` read ``source``.
    """
    # With many programs it was slower: they request these lines while they are on their way.
    if (tl.program_id(0) == 0) & (tl.num_programs(0) <= _FEW_PROGRAMS):
        prefetch_row(scale, 3, 4)
        prefetch_row(base, ROWS, ROW_BLOCK)
        if NORM:
            prefetch_row(weight, hidden, BLOCK)
    wait_for_inputs(PDL)
    programs = slices + COEFFICIENTS
    token = (tl.program_id(0) // programs).to(tl.int64)
    part = tl.program_id(0) % programs
    factor, start = parameters_of(scale, base, ROWS, ROW_BLOCK)
    if COEFFICIENTS and part == 0:
        values = summed(partials, token, tokens, splits, SPLITS, ROW_BLOCK)
        coefficients_of_token(
            values, factor, start, token, hidden, post, comb, norm_eps, hc_eps, ITERATIONS
        )
    else:
        column = (part - COEFFICIENTS) * BLOCK + tl.arange(0, BLOCK)
        inside = column < hidden
        x0, x1, x2, x3 = load_streams(x, token * 4 * hidden + column, hidden, inside)
        if NORM:
            gain = tl.load(weight + column, mask=inside, other=0.0)
        values = summed(partials, token, tokens, splits, SPLITS, ROW_BLOCK)
        if SQUARED:
            squares = pick(values, ROWS)
        else:
            squares = tl.fma(x3, x3, tl.fma(x2, x2, tl.fma(x1, x1, x0 * x0)))
            squares = tl.sum(squares, 0)
            if sums is not None:
                row = tl.arange(0, ROW_BLOCK)
                row_sums = tl.where(row == ROWS, squares, values)
                tl.store(sums + token * ROW_BLOCK + row, row_sums)
        gates = tl.sigmoid(logits_of(values, squares, factor, start, hidden, norm_eps)) + hc_eps
        total = tl.fma(pick(gates, 1), x1, pick(gates, 0) * x0)
        total = tl.fma(pick(gates, 3), x3, tl.fma(pick(gates, 2), x2, total))
        stored = narrow(total, out.dtype.element_ty)
        if NORM:
            wide = tl.where(inside, widen(stored), 0.0)
            if BLOCK >= 128:
                inverse = broadcast_total(inverse_rms(_square_sum(wide), hidden, norm_eps), BLOCK)
            else:
                inverse = inverse_rms(tl.sum(wide * wide, 0), hidden, norm_eps)
            stored = narrow(widen(gain) * (wide * inverse), out.dtype.element_ty)
        tl.store(out + token * hidden + column, stored, mask=inside)
        if SCALE is not None:
            _quantize_row(stored, source, codes, scales, total_scale, token, hidden, SCALE, CONVERT)


def _finish(
    partials: Partials,
    x: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    weight: torch.Tensor | None,
    coefficients: tuple[torch.Tensor, torch.Tensor] | None,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    quantized: Output | None = None,
) -> torch.Tensor:
    """The mixed streams ``[T, H]``, normed if there is a ``weight``.

    Fills ``coefficients``, and ``quantized`` with the norm in NVFP4.
    """
    tokens, _, hidden = x.shape
    out = x.new_empty((tokens, hidden))
    post, comb = coefficients or (None, None)
    in_parallel = coefficients is not None and tokens < mixing_gemm.LARGE_M
    block = launch_options.power_of_two(hidden)
    if weight is None and partials.squared:
        block = min(1024, block)
    slices = -(-hidden // block)
    outputs: tuple[torch.Tensor | None, ...] = (None, None, None, None)
    scale_of = None
    if quantized is not None:
        codes, scales, total = quantized.tensors
        outputs = (quantized.source, codes, scales.view(torch.uint8), total)
        shape = "one" if total.shape[0] == 1 else "row"
        scale_of = "token" if quantized.source is None else shape
    common = (norm_eps, hc_eps, iterations)
    sums = None
    if coefficients is not None and not partials.squared:
        sums = torch.empty_like(partials.data[:1])
    with launch_options.on(x):
        _finish_kernel[(tokens * (slices + in_parallel),)](
            partials.data,
            sums,
            x,
            scale,
            base,
            None if weight is None else weight.contiguous(),
            out,
            post,
            comb,
            *outputs,
            tokens,
            hidden,
            partials.splits,
            slices,
            *common,
            COEFFICIENTS=int(in_parallel),
            SQUARED=partials.squared,
            NORM=weight is not None,
            SCALE=scale_of,
            CONVERT=conversion(x),
            SPLITS=launch_options.power_of_two(partials.splits),
            ROWS=partials.rows,
            ROW_BLOCK=partials.row_block,
            BLOCK=block,
            num_warps=4 if partials.squared else max(4, block // 1024),
            **launch_options.options(x),
        )
        if coefficients is not None and not in_parallel:
            summed = partials.data if sums is None else sums
            coefficients_kernel[(-(-tokens // _LANES),)](
                summed,
                scale,
                base,
                post,
                comb,
                tokens,
                hidden,
                summed.shape[0],
                *common,
                ROW_BLOCK=partials.row_block,
                LANES=_LANES,
                num_warps=1,
                **launch_options.options(x),
            )
    return out


def _flat(streams: torch.Tensor) -> torch.Tensor:
    return streams.reshape(-1, *streams.shape[-2:]).contiguous()


def _wide(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(torch.float32).contiguous() for tensor in tensors)


def _pre(
    partials: Partials | None,
    x: torch.Tensor,
    lead: torch.Size,
    scale: torch.Tensor,
    base: torch.Tensor,
    weight: torch.Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    quantized: Output | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    post = x.new_empty((x.shape[0], 4), dtype=torch.float32)
    comb = x.new_empty((x.shape[0], 4, 4), dtype=torch.float32)
    if partials is None:
        out = x.new_empty((x.shape[0], x.shape[2]))
    else:
        settings = (norm_eps, hc_eps, iterations)
        out = _finish(partials, x, scale, base, weight, (post, comb), *settings, quantized)
    return out.view(*lead, x.shape[2]), post.view(*lead, 4), comb.view(*lead, 4, 4)


def hc_pre(args: HcPreArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.hyper_connection.hc_pre``."""
    return _pre_norm(args, None, None)


def hc_pre_norm(args: HcPreNormArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.hyper_connection.hc_pre_norm``."""
    return _pre_norm(args, args.norm_weight, None)


def hc_pre_norm_quantize(args: HcPreNormQuantizeArgs) -> tuple[torch.Tensor, ...]:
    """See ``dsv4.ops.hyper_connection_quantize.hc_pre_norm_quantize``."""
    out = _together(args.streams, args.global_scale, args.scaling)
    normed, post, comb = _pre_norm(args, args.norm_weight, out)
    return normed, *_codes(out, normed, args.global_scale, args.scaling), post, comb


def _together(
    streams: torch.Tensor, global_scale: torch.Tensor | None, scaling: str
) -> Output | None:
    """Return buffers for codes that the norm's launch fills; None: another launch makes them."""
    if streams.shape[0] > _FEW_QUANTIZED or streams.shape[-1] > _WIDEST_QUANTIZED:
        return None
    # In the dtype of the streams, which is that of the norm; what is written back may have another.
    return Output.empty(streams[:, 0], streams.shape[-1], global_scale, scaling, LINEAR)


def _codes(
    out: Output | None, normed: torch.Tensor, global_scale: torch.Tensor | None, scaling: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm in NVFP4, once it has been made."""
    if out is None:
        return quantize_nvfp4(QuantizeNvfp4Args(normed, global_scale, scaling, LINEAR))
    return out.tensors if normed.shape[0] else out.without_rows()


def _pre_norm(
    args: HcPreArgs | HcPreNormArgs | HcPreNormQuantizeArgs,
    norm_weight: torch.Tensor | None,
    quantized: Output | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lead, x = args.streams.shape[:-2], _flat(args.streams)
    fn, scale, base = _wide(args.fn, args.scale, args.base)
    partials = partials_of(x, fn) if x.numel() else None
    settings = (args.norm_eps, args.hc_eps, args.iterations)
    return _pre(partials, x, lead, scale, base, norm_weight, *settings, quantized)


def hc_post_pre_norm(
    args: HcPostPreNormArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.hyper_connection.hc_post_pre_norm``."""
    return _post_pre_norm(args, None, None)


def reduced_post_pre_norm(
    args: HcPostPreNormArgs, summands: Summands
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run ``hc_post_pre_norm`` with the sum of ranks' parts or of rows; ``args.y`` is not read."""
    return _post_pre_norm(args, None, summands)


def hc_post_pre_norm_quantize(args: HcPostPreNormQuantizeArgs) -> tuple[torch.Tensor, ...]:
    """See ``dsv4.ops.hyper_connection_quantize.hc_post_pre_norm_quantize``."""
    out = _together(args.streams, args.global_scale, args.scaling)
    mixed, normed, post, comb = _post_pre_norm(args, out, None)
    return mixed, normed, *_codes(out, normed, args.global_scale, args.scaling), post, comb


def _post_pre_norm(
    args: HcPostPreNormArgs | HcPostPreNormQuantizeArgs,
    quantized: Output | None,
    summands: Summands | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    lead, x = args.streams.shape[:-2], _flat(args.streams)
    fn, scale, base = _wide(args.fn, args.scale, args.base)
    partials, mixed = None, torch.empty_like(x)
    if x.numel() and mixing_gemm.writes_back(x.shape[0], x.shape[2]):
        y = args.y.contiguous() if summands is None else summands
        before = WriteBack(y, args.post.contiguous(), args.comb.contiguous())
        partials, mixed = partials_of_small_m(x, fn, before)
    elif x.numel():
        mixed = _flat(_post(HcPostArgs(args.y, args.streams, args.post, args.comb), summands))
        partials = partials_of(mixed, fn)
    settings = (args.norm_eps, args.hc_eps, args.iterations)
    made = _pre(partials, mixed, lead, scale, base, args.norm_weight, *settings, quantized)
    return mixed.view(args.streams.shape), *made


def hc_head(args: HcHeadArgs) -> torch.Tensor:
    """See ``dsv4.ops.hyper_connection.hc_head``."""
    fn, scale, base = args.fn, args.scale, args.base
    lead, x = args.streams.shape[:-2], _flat(args.streams)
    if x.numel() == 0:
        return x.new_empty((*lead, x.shape[-1]))
    fn, scale, base = _wide(fn, scale, base)
    partials = partials_of(x, fn)
    return _finish(partials, x, scale, base, None, None, args.norm_eps, args.hc_eps, 1).view(
        *lead, x.shape[2]
    )
