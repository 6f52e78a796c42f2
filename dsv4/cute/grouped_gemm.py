"""CuTeDSL products of sorted rows with NVFP4 experts in the layout ``"fragments_16x64"``."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch

from dsv4._counters import zeros
from dsv4._nearly import nearly_done
from dsv4.cute.gemm import packed_matrices
from dsv4.cute.grouped_problem import Experts, counted_as
from dsv4.cute.runtime.architectures import HOPPER
from dsv4.cute.runtime.driver import Launch, Matrix, Parameters
from dsv4.cute.runtime.launch import (
    aligned,
    architecture,
    current_device,
    cuts,
    loaded,
    run_noted,
    stream_of,
)
from dsv4.cute.sm90.grouped_gemm_plans import (
    GroupedSmallMPlan,
    GroupedWgmmaPlan,
    Share,
    counts_tiles,
    shares,
)
from dsv4.ops.grouped_gemm import (
    GroupedGemmArgs,
    GroupedGemmSwigluArgs,
    GroupedGemmSwigluQuantizeArgs,
    empty_codes,
)
from dsv4.ops.quantize import bfloat16_operand, block_values
from dsv4.quant.formats import SWIZZLED_EXPERTS

# Parameters of the kernels, in the order of ``GroupedSmallMKernel.kernel`` and
# ``GroupedWgmmaKernel.kernel``. Before the latter's come what tensor copies need, the sizes of X,
# and a layout without any content.
FEW_PARAMETERS = Parameters(*"q" * 11, *"iii", "q", *"i" * 8, "f")
PARAMETERS = Parameters(*["128s"] * 3, *["2i"] * 3, "s", *"q" * 10, *"iiiii", "q", *"i" * 9, "f")
_BEFORE, _ADDRESSES = struct.Struct("@6is0q"), struct.Struct("@10q")
_FEW_ADDRESSES = struct.Struct("@11q")
_FEW_AFTER, _AFTER = struct.Struct("@3iq8if"), struct.Struct("@5iq9if")

# Their fields, without the names.
_Experts = tuple[int, int, int, bool, bool, bool, bool, bool, bool]
_ROW_SCALED = 4
# Rows up to which launches are noted for a tape, which would not call ``nearly_done`` as early as
# products of many rows have to. The host launches those faster than the GPU runs them.
_NOTED = 1024


def grouped_gemm(args: GroupedGemmArgs, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm.grouped_gemm``.

    Nothing but the result, and at most 128 bytes for counters, is allocated for bfloat16
    activations whose rows begin at multiples of 16 bytes. Codes are expanded first.
    """
    assert args.scales is not None
    assert args.global_scale is not None
    x = _values(args.x, args.x_scales)
    (experts, rows, _), (tokens, columns) = args.weight.shape, x.shape
    scaled = args.activation == "nvfp4" or args.row_scale is not None
    kind = (args.out_dtype == torch.float32, scaled, False, False, False, False)
    wanted = (rows, columns, experts, *kind)
    if out is None:
        out = x.new_empty((tokens, rows), dtype=args.out_dtype)
    parts = (args.weight, args.scales, args.global_scale, args.offsets)
    of_x = (args.input_scale, args.row_scale)
    _product(wanted, x, parts, tuple(args.segments), of_x, None, math.inf, (out,), args.settled)
    return out


def grouped_gemm_swiglu(
    args: GroupedGemmSwigluArgs, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm.grouped_gemm_swiglu``; allocates as ``grouped_gemm`` does."""
    assert args.scales is not None
    assert args.global_scale is not None
    x, row_weight = _values(args.x, args.x_scales), args.row_weight
    (experts, rows, _), (tokens, columns) = args.weight.shape, x.shape
    scaled = args.activation == "nvfp4" or args.row_scale is not None
    kind = (args.out_dtype == torch.float32, scaled, True, row_weight is not None)
    wanted = (rows, columns, experts, *kind, False, False)
    if row_weight is not None:
        row_weight = row_weight.float().contiguous()
    if out is None:
        out = x.new_empty((tokens, rows // 2), dtype=args.out_dtype)
    parts = (args.weight, args.scales, args.global_scale, args.offsets)
    bound = math.inf if args.limit is None else args.limit
    of_x = (args.input_scale, args.row_scale)
    _product(wanted, x, parts, tuple(args.segments), of_x, row_weight, bound, (out,))
    return out


def grouped_gemm_swiglu_quantize(
    args: GroupedGemmSwigluQuantizeArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.grouped_gemm.grouped_gemm_swiglu_quantize``; allocates likewise."""
    assert args.scales is not None
    assert args.global_scale is not None
    x, row_weight = _values(args.x, args.x_scales), args.row_weight
    experts, rows, _ = args.weight.shape
    weighted = row_weight is not None
    scaled = args.activation == "nvfp4" or args.row_scale is not None
    kind = (False, scaled, True, weighted, True, args.scale_layout == SWIZZLED_EXPERTS)
    wanted = (rows, x.shape[1], experts, *kind)
    if row_weight is not None:
        row_weight = row_weight.float().contiguous()
    out = empty_codes(x, args.weight, args.scale_layout)
    parts = (args.weight, args.scales, args.global_scale, args.offsets)
    bound = math.inf if args.limit is None else args.limit
    results = (*out, args.result_scale.contiguous())
    of_x = (args.input_scale, args.row_scale)
    _product(wanted, x, parts, tuple(args.segments), of_x, row_weight, bound, results)
    return out


def _values(x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """The rows, of codes without their global scales."""
    return x if scales is None else block_values(x, scales, torch.bfloat16)


def _product(
    wanted: _Experts,
    x: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    segments: tuple[int, ...],
    of_x: tuple[torch.Tensor | None, torch.Tensor | None],
    row_weight: torch.Tensor | None,
    limit: float,
    results: tuple[torch.Tensor, ...],
    settled: bool = False,
) -> None:
    """Fills the results: one, or codes, block scales and rows' scales, of each expert's scale.

    ``of_x`` is ``input_scale`` and ``row_scale`` of the operator.
    """
    tokens, device = x.shape[0], x.get_device()
    if not tokens:
        return
    if current_device() != device:
        with torch.cuda.device(device):
            _product(wanted, x, parts, segments, of_x, row_weight, limit, results, settled)
        return
    codes, scales, global_scale, offsets = parts
    input_scale, row_scale = of_x
    if wanted[_ROW_SCALED] and row_scale is None:
        each = None if input_scale is None else of_rows(input_scale, offsets, tokens)
        x, row_scale = bfloat16_operand(x, each)
    x, _, token_stride = aligned(x, tokens)
    # The weights' addresses are for tensor copies, or for the kernel itself: that for few rows.
    out, *of_codes = results
    block_scales, row_scales, codes_scale = of_codes or (None, None, None)
    of_weight = (codes, scales, global_scale)
    others = (x, row_scale, row_weight, out, offsets, codes_scale, block_scales, row_scales)
    operands, stream = (x, *of_weight, *others), stream_of(device)
    kind = (wanted, tokens, token_stride, segments, global_scale.shape[-1], limit, settled, device)
    counters = 0
    prepared = _prepared(*kind, get_ident())
    if prepared.counted:
        numbers = zeros(len(prepared.launches), x.device)
        counters = numbers.data_ptr()
    elif tokens <= _NOTED:
        nearly_done()  # before the launches are noted, because it launches others
        run_noted(functools.partial(_launch_all, kind), stream, operands)
        return
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in operands]
    _launch_all(kind, stream, addresses, counters)


def _launch_all(
    kind: tuple[Any, ...], stream: int, addresses: Sequence[int], counters: int = 0
) -> None:
    """Launch a product on the current GPU.

    Args:
        kind: What ``_prepared`` takes first.
        stream: The driver's handle.
        addresses: Of what TMA copies read (x, codes, block scales), then of the other operands, in
            the order of the kernels' parameters.
        counters: Address of zeros for the blocks' counts of tiles, or 0.
    """
    prepared = _prepared(*kind, get_ident())
    for i, (launch, few) in enumerate(prepared.launches):
        if i == prepared.fullest:
            nearly_done()
        if few:  # which reads the weight by itself, and has no counter
            launch(stream, addresses[1:])
        else:
            counter = counters and counters + 4 * i
            launch(stream, (*addresses[3:], counter), described=tuple(addresses[:3]))


def of_rows(values: torch.Tensor, offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Each expert's value for its rows, ``[rows]``, without reading the offsets on the host.

    Rows of no expert get the last one's, which is as good as any.
    """
    numbers = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    expert = torch.bucketize(numbers, offsets[1:], right=True)
    return values[expert.clamp_(max=values.shape[0] - 1)]


class _Prepared(NamedTuple):
    """The launches of a product.

    Attributes:
        launches: Each with whether it is of the kernel for few rows.
        counted: Whether their blocks count tiles.
        fullest: Where they do, the launch for experts of about as many rows as the average, behind
            which there are few tiles; else the first.
    """

    launches: tuple[tuple[Launch, bool], ...]
    counted: bool
    fullest: int


@functools.lru_cache(maxsize=4096)
def _prepared(
    wanted: _Experts,
    tokens: int,
    token_stride: int,
    segments: tuple[int, ...],
    scales_each: int,
    limit: float,
    settled: bool,
    device: int,
    thread: int,
) -> _Prepared:
    """Made once in every thread, because it takes longer than a launch."""
    experts = Experts(*wanted)
    found = shares(experts, tokens, architecture(device))
    assert found
    rest = (token_stride, scales_each, *cuts(segments), not segments and scales_each > 1, 16)
    last = len(found) - 1
    launches = tuple(
        _launch(
            share,
            experts,
            # Rows of no expert are filled once, by the last one.
            (tokens, tokens if i == last else 0),
            (*rest, *_loads(share, settled, i > 0), limit),
            device,
        )
        for i, share in enumerate(found)
    )
    few = [isinstance(share.plan, GroupedSmallMPlan) for share in found]
    counted = len(found) > 1 and counts_tiles(experts, tokens)
    mean = tokens / experts.experts
    fullest = next(i for i, share in enumerate(found) if share.above < mean)
    return _Prepared(tuple(zip(launches, few, strict=True)), counted, fullest if counted else 0)


def _loads(share: Share, settled: bool, beside: bool) -> tuple[int, ...]:
    """What a kernel is told of the experts that are its, and of what it need not wait for."""
    if isinstance(share.plan, GroupedSmallMPlan):
        return share.most, 2 if beside else int(settled)
    return share.above, share.most, beside


def _launch(
    share: Share,
    experts: Experts,
    tokens: tuple[int, int],
    rest: tuple[float, ...],
    device: int,
) -> Launch:
    """One launch; of the rows of X, and of those that are filled where they are no expert's."""
    plan = share.plan
    kernel = loaded(plan, architecture(device))
    resident = kernel.prepare(device)
    rows, sizes = tokens[0], (tokens[1], experts.experts)
    if isinstance(plan, GroupedSmallMPlan):
        after = _FEW_AFTER.pack(*sizes, experts.rows // 16 // plan.unit_tiles, *rest)
        return Launch(kernel, resident, FEW_PARAMETERS, b"", _FEW_ADDRESSES, after)
    tiles, k_blocks = experts.rows // 16, experts.columns // 64
    row_blocks = -(-experts.rows // plan.rows)
    after = _AFTER.pack(*sizes, k_blocks, tiles, row_blocks, *rest)
    matrices = (
        Matrix(rows, experts.columns, int(rest[0]), plan.tma_tokens, 64),
        *packed_matrices(plan, experts.experts * tiles, k_blocks),
    )
    before = _BEFORE.pack(*(size for m in matrices for size in (m.rows, m.columns)), b"")
    return Launch(kernel, resident, PARAMETERS, before, _ADDRESSES, after, matrices)


def plans(
    experts: Experts, max_tokens: int, arch: str = HOPPER
) -> list[GroupedWgmmaPlan | GroupedSmallMPlan]:
    """The configurations taken for 1 to ``max_tokens`` rows of X, each once."""
    stand, tokens = [], 1
    while tokens < max_tokens:
        stand.append(tokens)
        tokens = counted_as(tokens + 1)
    found = (shares(experts, count, arch) for count in [*stand, max_tokens])
    return list(dict.fromkeys(share.plan for some in found for share in some))
