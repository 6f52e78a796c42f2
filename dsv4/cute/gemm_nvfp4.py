"""CuTeDSL products with both operands in NVFP4, on Blackwell.

The weight is in the layout ``"swizzled_128x4"``: codes as in the checkpoint, scales moved.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dsv4 import dispatch
from dsv4.cute.runtime.architectures import ARCHITECTURES
from dsv4.cute.runtime.driver import Kernel, Parameters
from dsv4.cute.runtime.launch import cuts, loaded, on, stream_of
from dsv4.cute.sm100 import plans as _plans
from dsv4.cute.sm100._maps import tensor_map
from dsv4.cute.sm100.dense_plan import Box, DensePlan
from dsv4.cute.sm100.plans import Product, choose
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.gemm_swiglu import GemmSwigluArgs
from dsv4.ops.quantize import QuantizeNvfp4Args
from dsv4.quant.formats import SWIZZLED

_SPAN = 2048  # tokens that come one after another before the next rows: X of them stays in cache

# Parameters of the kernel, in the order of ``DenseKernel.kernel``: descriptions of both operands'
# codes and scales, addresses of the other tensors, and the rest.
PARAMETERS = Parameters(*["128s"] * 4, *"qqq", *"i" * 12, "f")
_ADDRESSES, _AFTER = struct.Struct("@3q"), struct.Struct("@12if")


class _Prepared(NamedTuple):
    """A launch but for its addresses and stream."""

    kernel: Kernel
    blocks: int
    boxes: tuple[Box, Box, Box, Box]
    after: bytes


def gemm(args: GemmArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm.gemm``; ``x`` is ``[T, K]``, or ``[T, G, K]`` with several groups.

    Allocates the quantised activations. Block scales must not have their sign bit set: the tensor
    cores take them as unsigned.
    """
    assert args.global_scale is not None
    x, rows, groups = args.x, args.codes.shape[0], args.groups
    product = Product(rows, x.shape[-1], groups, args.out_dtype == torch.float32)
    weight = (args.codes, args.scales, args.global_scale, args.segments)
    out = x.new_empty((x.shape[0], *x.shape[1:-1], rows // groups), dtype=args.out_dtype)
    return _product(product, x, weight, args.input_scale, math.inf, out)


def gemm_swiglu(args: GemmSwigluArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm_swiglu.gemm_swiglu``; allocates as ``gemm`` does."""
    assert args.global_scale is not None
    rows = args.codes.shape[0]
    product = Product(rows, args.x.shape[-1], 1, args.out_dtype == torch.float32, swiglu=True)
    out = args.x.new_empty((args.x.shape[0], rows // 2), dtype=args.out_dtype)
    weight = (args.codes, args.scales, args.global_scale, args.segments)
    bound = math.inf if args.limit is None else args.limit
    return _product(product, args.x, weight, args.input_scale, bound, out)


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
    with on(x.get_device()):
        x_codes, x_scales, token_scale = quantized(x, input_scale)
        codes, scales, global_scale, segments = weight
        launch = _prepared(
            product,
            x.shape[0],
            tuple(segments),
            not segments and global_scale.shape[-1] > 1,
            input_scale is None,
            limit,
            x.device.index,
        )
        operands = (codes, scales, x_codes, x_scales)
        places = (global_scale.data_ptr(), token_scale.data_ptr(), out.data_ptr())
        packed = [tensor_map(t.data_ptr(), b) for t, b in zip(operands, launch.boxes, strict=True)]
        packed += [_ADDRESSES.pack(*places), launch.after]
        launch.kernel.launch(launch.blocks, stream_of(x.device.index), PARAMETERS, b"".join(packed))
    return out


def quantized(
    x: torch.Tensor, input_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and swizzled scales, each group's tokens together, and global scales of the tokens."""
    if x.dim() == 3:
        x = x.transpose(0, 1)
        input_scale = None if input_scale is None else input_scale.expand(x.shape[0], 1)
    scaling = "token" if input_scale is None else "static"
    found = dispatch.first("quantize_nvfp4", QuantizeNvfp4Args(x, input_scale, scaling, SWIZZLED))
    codes, scales, total = found
    return codes.contiguous(), scales.contiguous(), total.contiguous()


@functools.lru_cache(maxsize=4096)
def _prepared(
    product: Product,
    tokens: int,
    segments: tuple[int, ...],
    scale_rows: bool,
    scale_tokens: bool,
    limit: float,
    device: int,
) -> _Prepared:
    """Made once, because it takes longer than a launch."""
    plan = choose(product, tokens)
    kernel = loaded(plan, ARCHITECTURES[torch.cuda.get_device_capability(device)])
    token_tiles, row_blocks = -(-tokens // plan.token_block), -(-product.rows // plan.rows)
    after = _AFTER.pack(
        tokens,
        token_tiles,
        max(1, _SPAN // plan.token_block),
        plan.steps(product.columns),
        product.rows,
        row_blocks,
        row_blocks // product.groups,
        *cuts(segments),
        scale_rows,
        scale_tokens,
        limit,
    )
    tiles, resident = token_tiles * row_blocks, kernel.prepare(device)
    clusters = tiles if plan.parts > 1 else min(tiles, resident)
    boxes = plan.boxes(product.rows, product.columns, tokens, product.groups)
    return _Prepared(kernel, clusters * plan.blocks, boxes, after)


def warmup(plans: Sequence[DensePlan], device: torch.device) -> None:
    """Compile or load kernels now, so that no later call does, e.g. while a graph is captured."""
    arch = ARCHITECTURES[torch.cuda.get_device_capability(device)]
    with torch.cuda.device(device):
        for plan in plans:
            loaded(plan, arch).prepare(device.index)


def plans(
    rows: int,
    columns: int,
    groups: int,
    out_dtype: torch.dtype,
    max_tokens: int,
    *,
    swiglu: bool = False,
) -> list[DensePlan]:
    """The configurations that a product takes for 1 to ``max_tokens`` tokens, each once.

    Args:
        rows: N, of all groups, a multiple of 16, and of 128 in each of several groups.
        columns: K, a multiple of 32.
        groups: Groups of rows with an input each.
        out_dtype: bfloat16 or float32.
        max_tokens: At least 1.
        swiglu: Whether for ``gemm_swiglu``, else for ``gemm``.
    """
    product = Product(rows, columns, groups, out_dtype == torch.float32, swiglu)
    return _plans.plans(product, max_tokens)
