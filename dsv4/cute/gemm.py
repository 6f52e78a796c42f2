"""CuTeDSL products with NVFP4 weights in the layout ``"fragments_16x64"``."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from dsv4.cute._driver import Kernel, Parameters, tensor_map
from dsv4.cute._images import image
from dsv4.cute.sm90.few_plan import TOKENS
from dsv4.cute.sm90.many_plan import ManyPlan
from dsv4.cute.sm90.plans import Plan, Product, choose, choose_few, token_counts
from dsv4.ops.quantize import bfloat16_operand

_ARCH = "sm_90a"
_NEVER = 2**31 - 1
_NO_CUTS = (_NEVER, _NEVER, _NEVER)
_SPAN = 1024  # tokens that come one after another before the next rows: X of them stays in cache

# Parameters of the kernels, in the order of ``FewKernel.kernel`` and ``ManyKernel.kernel``. Before
# the latter's come what tensor copies need, the sizes of X, and a layout without any content.
FEW_PARAMETERS = Parameters(*"qqqqqq", *"iii", *"qq", *"iiiiii", "f")
MANY_PARAMETERS = Parameters("128s", "2i", "s", *"qqqqqq", *"iiiiiii", *"qq", *"iiiiii", "f")


@functools.cache
def _kernel(plan: Plan, arch: str) -> Kernel:
    return Kernel(image(plan, arch))


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
    x = _aligned(x)
    *tensors, segments = weight
    addresses = _addresses(*tensors)
    rest = _rest(x, weight[2], segments, product.groups, limit)
    if torch.cuda.current_device() == x.device.index:
        _launch(product, x, row_scale, out, addresses, rest)
    else:
        with torch.cuda.device(x.device):
            _launch(product, x, row_scale, out, addresses, rest)
    return out


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x itself if bulk and tensor copies can read its rows, else a copy."""
    strides = x.stride()
    fits = x.data_ptr() % 16 == 0 and strides[-1] == 1 and strides[0] > 0 == strides[0] % 8
    fits = fits and (x.dim() == 2 or strides[1] == x.shape[2])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _addresses(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    return tuple(0 if t is None else t.data_ptr() for t in tensors)


def _rest(
    x: torch.Tensor,
    global_scale: torch.Tensor,
    segments: Sequence[int],
    groups: int,
    limit: float,
) -> tuple[float, ...]:
    """The last parameters of both kernels.

    Strides of X, first rows of the second to fourth segment, whether every row has a global scale
    of its own, groups, the 16 that a kernel must not know, and the clamp's bound.
    """
    cuts: tuple[int, ...] = _NO_CUTS
    if len(segments) > 1:
        ends = [sum(segments[: i + 1]) for i in range(len(segments) - 1)]
        cuts = (*ends, *_NO_CUTS[len(ends) :])
    per_row = not segments and global_scale.shape[-1] > 1
    return (x.stride(0), 0 if groups == 1 else x.stride(1), *cuts, per_row, groups, 16, limit)


def _launch(
    product: Product,
    x: torch.Tensor,
    row_scale: torch.Tensor | None,
    out: torch.Tensor,
    weight: tuple[int, ...],
    rest: tuple[float, ...],
) -> None:
    """On the current device."""
    plan = choose(product, x.shape[0])
    if isinstance(plan, ManyPlan):
        _many(plan, product, x, row_scale, out, weight, rest)
        return
    for first in range(0, x.shape[0], TOKENS):
        part = slice(first, first + TOKENS)
        scale = None if row_scale is None else row_scale[part]
        _few(product, x[part], scale, out[part], weight, rest)


def _few(
    product: Product,
    x: torch.Tensor,
    row_scale: torch.Tensor | None,
    out: torch.Tensor,
    weight: tuple[int, ...],
    rest: tuple[float, ...],
) -> None:
    """One launch for at most 16 tokens."""
    tokens, row_tiles, index = x.shape[0], product.rows // 16, x.device.index
    plan = choose_few(product, tokens)
    assert plan is not None
    kernel = _kernel(plan, _ARCH)
    kernel.prepare(index)
    parameters = FEW_PARAMETERS.pack(
        *weight,
        *_addresses(x, row_scale, out),
        tokens,
        row_tiles,
        row_tiles // product.groups,
        *rest,
    )
    blocks = -(-row_tiles // plan.warps) * plan.blocks
    kernel.launch(blocks, _stream(index), FEW_PARAMETERS, parameters)


def _many(
    plan: ManyPlan,
    product: Product,
    x: torch.Tensor,
    row_scale: torch.Tensor | None,
    out: torch.Tensor,
    weight: tuple[int, ...],
    rest: tuple[float, ...],
) -> None:
    """One launch for any number of tokens."""
    tokens, index = x.shape[0], x.device.index
    columns = product.columns * product.groups
    token_tiles, row_blocks = -(-tokens // plan.token_block), -(-product.rows // plan.rows)
    kernel = _kernel(plan, _ARCH)
    resident, tiles = kernel.prepare(index), token_tiles * row_blocks
    parameters = MANY_PARAMETERS.pack(
        tensor_map(x.data_ptr(), tokens, columns, x.stride(0), plan.token_block),
        tokens,
        columns,
        b"",
        *weight,
        *_addresses(x, row_scale, out),
        tokens,
        token_tiles,
        max(1, _SPAN // plan.token_block),
        product.columns // 64,
        product.rows // 16,
        row_blocks,
        max(1, row_blocks // product.groups),
        *rest,
    )
    clusters = tiles if plan.blocks > 1 else min(tiles, resident)
    kernel.launch(clusters * plan.blocks, _stream(index), MANY_PARAMETERS, parameters)


def _stream(index: int) -> int:
    """The current stream's handle; what Triton's launcher calls, a tenth of the public object."""
    return torch._C._cuda_getCurrentRawStream(index)


def warmup(plans: Sequence[Plan], device: torch.device) -> None:
    """Compile or load kernels now, so that no later call does, e.g. while a graph is captured."""
    with torch.cuda.device(device):
        for plan in plans:
            _kernel(plan, _ARCH).prepare(device.index)


def plans(
    rows: int,
    columns: int,
    groups: int,
    activation: str,
    out_dtype: torch.dtype,
    max_tokens: int,
) -> list[Plan]:
    """The configurations that ``gemm`` takes for 1 to ``max_tokens`` tokens, each once.

    Args:
        rows: N, of all groups, a multiple of 16 in each.
        columns: K, a multiple of 64.
        groups: Groups of rows with an input each.
        activation: ``"bf16"`` or ``"nvfp4"``.
        out_dtype: bfloat16 or float32.
        max_tokens: At least 1.
    """
    product = Product(rows, columns, groups, out_dtype == torch.float32, activation == "nvfp4")
    found = (choose(product, tokens) for tokens in token_counts(max_tokens))
    return list(dict.fromkeys(plan for plan in found if plan is not None))
