"""CuTeDSL products with NVFP4 weights in the layout ``"fragments_16x64"``, or FP8 ones."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch

from dsv4._leaving import left
from dsv4.cute import gemm_fp8
from dsv4.cute._architectures import HOPPER
from dsv4.cute._driver import Kernel, Launch, Matrix, Parameters
from dsv4.cute._launch import (
    aligned,
    architecture,
    current_device,
    cuts,
    loaded,
    run_noted,
    stream_of,
)
from dsv4.cute.sm90.few_plan import TOKENS, FewPlan
from dsv4.cute.sm90.many_plan import ManyPlan
from dsv4.cute.sm90.plans import Plan, Product, choose, token_counts
from dsv4.formats import FP8_BLOCK
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.gemm_swiglu import GemmSwigluArgs
from dsv4.ops.quantize import bfloat16_operand

_SPAN = 1024  # tokens that come one after another before the next rows: X of them stays in cache

# Parameters of the kernels, in the order of ``FewKernel.kernel`` and ``ManyKernel.kernel``. Before
# the latter's come what tensor copies need, the sizes of X, codes and scales, and a layout without
# any content.
FEW_PARAMETERS = Parameters(*"qqqqqq", *"iii", *"qq", *"iiiiii", "f")
MANY_PARAMETERS = Parameters(
    *["128s"] * 3, *["2i"] * 3, "s", *"qqqq", *"iiiiiii", *"qq", *"iiiiii", "f"
)
# The same in pieces: what comes before the addresses (and after the maps), they, and the rest.
_MANY_BEFORE = struct.Struct("@6is0q")
_FEW_ADDRESSES, _MANY_ADDRESSES = struct.Struct("@6q"), struct.Struct("@4q")
_FEW_AFTER, _MANY_AFTER = struct.Struct("@3i2q6if"), struct.Struct("@7i2q6if")

_Product = tuple[int, int, int, bool, bool, bool]  # a Product's fields, without its name
_ROW_SCALED = 4


def gemm(args: GemmArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm.gemm``; ``x`` is ``[T, K]``, or ``[T, G, K]`` with several groups.

    FP8 weights are ``gemm_fp8``'s. Nothing but the result is allocated for bfloat16 activations
    whose rows begin at multiples of 16 bytes and whose groups follow one another.
    """
    x, groups = args.x, args.groups
    if args.format == FP8_BLOCK.name:
        return gemm_fp8.gemm(args)
    assert args.global_scale is not None
    rows, half = args.codes.shape
    kind = (args.out_dtype == torch.float32, args.activation == "nvfp4", False)
    product = (rows, 2 * half, groups, *kind)
    shape = (x.shape[0], rows) if groups == 1 else (x.shape[0], groups, rows // groups)
    out = x.new_empty(shape, dtype=args.out_dtype)
    weight = (args.codes, args.scales, args.global_scale)
    return _product(product, x, weight, args.segments, args.input_scale, math.inf, out, shape[0])


def gemm_swiglu(args: GemmSwigluArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm_swiglu.gemm_swiglu``; allocates as ``gemm`` does."""
    assert args.global_scale is not None
    tokens, (rows, half) = args.x.shape[0], args.codes.shape
    product = (rows, 2 * half, 1, args.out_dtype == torch.float32, args.activation == "nvfp4", True)
    out = args.x.new_empty((tokens, rows // 2), dtype=args.out_dtype)
    weight = (args.codes, args.scales, args.global_scale)
    bound = math.inf if args.limit is None else args.limit
    return _product(product, args.x, weight, args.segments, args.input_scale, bound, out, tokens)


def _product(
    product: _Product,
    x: torch.Tensor,
    weight: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    segments: Sequence[int],
    input_scale: torch.Tensor | None,
    limit: float,
    out: torch.Tensor,
    tokens: int,
) -> torch.Tensor:
    """Fills and returns ``out``."""
    if not tokens:
        return out
    device = x.get_device()
    if current_device() != device:
        with torch.cuda.device(device):
            return _product(product, x, weight, segments, input_scale, limit, out, tokens)
    row_scale = None
    if product[_ROW_SCALED]:
        x, row_scale = bfloat16_operand(x, input_scale)
    x, _, token_stride = aligned(x, tokens)
    codes, scales, global_scale = weight
    kind = (product, tokens, token_stride, tuple(segments), global_scale.numel(), limit, device)
    operands = (x, codes, scales, global_scale, row_scale, out)
    run_noted(functools.partial(_launch, kind), stream_of(device), operands)
    return out


def _launch(kind: tuple[Any, ...], stream: int, addresses: Sequence[int]) -> None:
    """Launch a product on the current GPU.

    Args:
        kind: What ``_prepared`` takes first.
        stream: The driver's handle.
        addresses: Of X, codes, block scales, global scales, scales of the rows of X or 0, and the
            result.
    """
    start, codes, scales, global_scale, row_scale, out = addresses
    for launch, of_x, of_scale, of_out in _prepared(*kind, left(), get_ident()):
        x = start + of_x
        row_scales = row_scale and row_scale + of_scale
        launch(stream, x, codes, scales, global_scale, x, row_scales, out + of_out)


@functools.lru_cache(maxsize=4096)
def _prepared(
    product: _Product,
    tokens: int,
    token_stride: int,
    segments: tuple[int, ...],
    scales: int,
    limit: float,
    device: int,
    leave: int,
    thread: int,
) -> tuple[tuple[Launch, int, int, int], ...]:
    """Launches, and where X, its scales and the result begin for each, in bytes.

    Made once in every thread, because it takes longer than a launch.
    """
    wanted = Product(*product)
    arch = architecture(device)
    plan = choose(wanted, tokens, arch)
    assert plan is not None
    kernel = loaded(plan, arch)
    resident = kernel.prepare(device)
    groups = wanted.groups
    scale_rows = not segments and scales > 1
    group_stride = 0 if groups == 1 else wanted.columns
    rest = (token_stride, group_stride, *cuts(segments), scale_rows, groups, 16, limit)
    if isinstance(plan, FewPlan):
        steps = range(0, tokens, TOKENS)
        few = [_few(kernel, resident, wanted, plan, min(TOKENS, tokens - n), rest) for n in steps]
        out_bytes = wanted.rows // (2 if wanted.swiglu else 1) * (4 if wanted.float32_out else 2)
        places = ((2 * n * token_stride, 4 * n * groups, n * out_bytes) for n in steps)
        return tuple((launch, *place) for launch, place in zip(few, places, strict=True))
    launch = _many(kernel, max(1, resident - leave), wanted, plan, tokens, rest)
    if leave:
        launch.begin_late()
    return ((launch, 0, 0, 0),)


def _few(
    kernel: Kernel,
    resident: int,
    product: Product,
    plan: FewPlan,
    tokens: int,
    rest: tuple[Any, ...],
) -> Launch:
    tiles = product.rows // 16
    after = _FEW_AFTER.pack(tokens, tiles, tiles // product.groups, *rest)
    clusters = -(-tiles // plan.warps)
    if plan.blocks == product.groups == 1:
        clusters = min(clusters, resident)  # each takes row tiles in turn
    return Launch(kernel, clusters * plan.blocks, FEW_PARAMETERS, b"", _FEW_ADDRESSES, after)


def _many(
    kernel: Kernel,
    resident: int,
    product: Product,
    plan: ManyPlan,
    tokens: int,
    rest: tuple[Any, ...],
) -> Launch:
    columns = product.columns * product.groups
    token_tiles, row_blocks = -(-tokens // plan.token_block), -(-product.rows // plan.rows)
    after = _MANY_AFTER.pack(
        tokens,
        token_tiles,
        max(1, _SPAN // plan.token_block),
        product.columns // 64,
        product.rows // 16,
        row_blocks,
        max(1, row_blocks // product.groups),
        *rest,
    )
    tiles = token_tiles * row_blocks
    blocks = plan.blocks * (tiles if plan.blocks > 1 else min(tiles, resident))
    of_x = Matrix(tokens, columns, rest[0], plan.token_block)
    matrices = (of_x, *packed_matrices(plan, product.rows // 16, product.columns // 64))
    before = _MANY_BEFORE.pack(*(size for m in matrices for size in (m.rows, m.columns)), b"")
    return Launch(kernel, blocks, MANY_PARAMETERS, before, _MANY_ADDRESSES, after, matrices)


def packed_matrices(plan: ManyPlan, row_tiles: int, k_blocks: int) -> tuple[Matrix, Matrix]:
    """Codes and scales of so many tiles, as tensor copies of a block's stage read them."""
    codes, scales = k_blocks * 128, k_blocks * 16
    return (
        Matrix(row_tiles, codes, codes, plan.row_tiles, plan.code_bytes // 4, True),
        Matrix(row_tiles, scales, scales, plan.row_tiles, plan.scale_bytes // 4, True),
    )


def warmup(plans: Sequence[Plan], device: torch.device) -> None:
    """Compile or load kernels now, so that no later call does, e.g. while a graph is captured."""
    with torch.cuda.device(device):
        for plan in plans:
            loaded(plan, architecture(device.index)).prepare(device.index)


def plans(
    rows: int,
    columns: int,
    groups: int,
    activation: str,
    out_dtype: torch.dtype,
    max_tokens: int,
    *,
    swiglu: bool = False,
    arch: str = HOPPER,
) -> list[Plan]:
    """The configurations that a product takes for 1 to ``max_tokens`` tokens, each once.

    Args:
        rows: N, of all groups, a multiple of 16 in each.
        columns: K, a multiple of 64.
        groups: Groups of rows with an input each.
        activation: ``"bf16"`` or ``"nvfp4"``.
        out_dtype: bfloat16 or float32.
        max_tokens: At least 1.
        swiglu: Whether for ``gemm_swiglu``, else for ``gemm``.
        arch: What they are compiled for.
    """
    kind = (out_dtype == torch.float32, activation == "nvfp4", swiglu)
    product = Product(rows, columns, groups, *kind)
    found = (choose(product, tokens, arch) for tokens in token_counts(max_tokens))
    return list(dict.fromkeys(plan for plan in found if plan is not None))
