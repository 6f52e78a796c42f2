"""CuTeDSL products with NVFP4 weights in the layout ``"fragments_16x64"``."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence

import torch

from dsv4.cute._architectures import HOPPER
from dsv4.cute._driver import Parameters, tensor_map
from dsv4.cute._launch import Prepared, aligned, architecture, cuts, loaded, stream_of
from dsv4.cute.sm90.few_plan import TOKENS, FewPlan
from dsv4.cute.sm90.many_plan import ManyPlan
from dsv4.cute.sm90.plans import Plan, Product, choose, token_counts
from dsv4.ops.quantize import bfloat16_operand

_SPAN = 1024  # tokens that come one after another before the next rows: X of them stays in cache

# Parameters of the kernels, in the order of ``FewKernel.kernel`` and ``ManyKernel.kernel``. Before
# the latter's come what tensor copies need, the sizes of X, and a layout without any content.
FEW_PARAMETERS = Parameters(*"qqqqqq", *"iii", *"qq", *"iiiiii", "f")
MANY_PARAMETERS = Parameters("128s", "2i", "s", *"qqqqqq", *"iiiiiii", *"qq", *"iiiiii", "f")
# The same in pieces: what comes before the addresses (and after the map), they, and the rest.
_MANY_BEFORE, _ADDRESSES = struct.Struct("@2is0q"), struct.Struct("@6q")
_FEW_AFTER, _MANY_AFTER = struct.Struct("@3i2q6if"), struct.Struct("@7i2q6if")


def gemm(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    segments: Sequence[int],
    format: str,
    layout: str,
    activation: str,
    input_scale: torch.Tensor | None,
    groups: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See ``dsv4.ops.gemm.gemm``; ``x`` is ``[T, K]``, or ``[T, G, K]`` with several groups.

    Nothing but the result is allocated for bfloat16 activations whose rows begin at multiples of
    16 bytes and whose groups follow one another.
    """
    assert global_scale is not None
    product = Product(
        codes.shape[0], x.shape[-1], groups, out_dtype == torch.float32, activation == "nvfp4"
    )
    weight = (codes, scales, global_scale, segments)
    shape = (x.shape[0], *x.shape[1:-1], codes.shape[0] // groups)
    return _product(product, x, weight, input_scale, math.inf, x.new_empty(shape, dtype=out_dtype))


def gemm_swiglu(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    segments: Sequence[int],
    format: str,
    layout: str,
    activation: str,
    input_scale: torch.Tensor | None,
    limit: float | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See ``dsv4.ops.gemm_swiglu.gemm_swiglu``; allocates as ``gemm`` does."""
    assert global_scale is not None
    rows, columns = codes.shape[0], x.shape[-1]
    product = Product(
        rows, columns, 1, out_dtype == torch.float32, activation == "nvfp4", swiglu=True
    )
    weight = (codes, scales, global_scale, segments)
    out = x.new_empty((x.shape[0], rows // 2), dtype=out_dtype)
    return _product(product, x, weight, input_scale, math.inf if limit is None else limit, out)


def _product(
    product: Product,
    x: torch.Tensor,
    weight: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Sequence[int]],
    input_scale: torch.Tensor | None,
    limit: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Fills and returns ``out``."""
    if x.shape[0] == 0:
        return out
    row_scale = None
    if product.row_scaled:
        x, row_scale = bfloat16_operand(x, input_scale)
    x = aligned(x)
    if torch.cuda.current_device() == x.device.index:
        _multiply(product, x, row_scale, weight, limit, out)
    else:
        with torch.cuda.device(x.device):
            _multiply(product, x, row_scale, weight, limit, out)
    return out


def _multiply(
    product: Product,
    x: torch.Tensor,
    row_scale: torch.Tensor | None,
    weight: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Sequence[int]],
    limit: float,
    out: torch.Tensor,
) -> None:
    """On the current device."""
    codes, scales, global_scale, segments = weight
    fixed = (tuple(segments), not segments and global_scale.shape[-1] > 1, limit, x.device.index)
    places = (codes.data_ptr(), scales.data_ptr(), global_scale.data_ptr())
    tokens = x.shape[0]
    if isinstance(choose(product, tokens, architecture(x.device.index)), ManyPlan):
        _launch(_prepared(product, tokens, x.stride(0), *fixed), x, row_scale, places, out)
        return
    for first in range(0, tokens, TOKENS):
        part = slice(first, first + TOKENS)
        launch = _prepared(product, min(TOKENS, tokens - first), x.stride(0), *fixed)
        scale = None if row_scale is None else row_scale[part]
        _launch(launch, x[part], scale, places, out[part])


@functools.lru_cache(maxsize=4096)
def _prepared(
    product: Product,
    tokens: int,
    token_stride: int,
    segments: tuple[int, ...],
    scale_rows: bool,
    limit: float,
    device: int,
) -> Prepared:
    """Made once, because it takes longer than a launch."""
    arch = architecture(device)
    plan = choose(product, tokens, arch)
    assert plan is not None
    kernel = loaded(plan, arch)
    resident = kernel.prepare(device)
    group_stride = 0 if product.groups == 1 else product.columns
    rest = (token_stride, group_stride, *cuts(segments), scale_rows, product.groups, 16, limit)
    if isinstance(plan, FewPlan):
        tiles = product.rows // 16
        after = _FEW_AFTER.pack(tokens, tiles, tiles // product.groups, *rest)
        clusters = -(-tiles // plan.warps)
        if plan.blocks == product.groups == 1:
            clusters = min(clusters, resident)  # each takes row tiles in turn
        blocks = clusters * plan.blocks
        return Prepared(kernel, blocks, FEW_PARAMETERS, b"", after, ())
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
    clusters = tiles if plan.blocks > 1 else min(tiles, resident)
    matrix = (tokens, columns, token_stride, plan.token_block)
    before = _MANY_BEFORE.pack(tokens, columns, b"")
    return Prepared(kernel, clusters * plan.blocks, MANY_PARAMETERS, before, after, matrix)


def _launch(
    launch: Prepared,
    x: torch.Tensor,
    row_scale: torch.Tensor | None,
    weight: tuple[int, int, int],
    out: torch.Tensor,
) -> None:
    start = x.data_ptr()
    scale = 0 if row_scale is None else row_scale.data_ptr()
    packed = launch.before + _ADDRESSES.pack(*weight, start, scale, out.data_ptr()) + launch.after
    if launch.matrix:
        packed = tensor_map(start, *launch.matrix) + packed
    launch.kernel.launch(launch.blocks, stream_of(x.device.index), launch.kinds, packed)


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
