"""TileKernels: DeepSeek's own kernels in TileLang.

Each is compiled with the CUDA compiler when first used, in a second or two. They run as the
library has them by default, without programmatic dependent launch. Seen with tile_kernels 2.1.0,
which runs with PyTorch 2.11 and CUDA 13.0 though it asks for later ones:

- The GEMM with ``fn`` of the hyper-connections, and that of the router, are not in the library:
  "(no GEMM)" is given it, in as many parts as the library's reduction takes by default.
- It quantises with block scales alone: "(no global scale)" has no second scale to find or to apply,
  and writes block scales in rows, whatever the layout asked for.
- Rotation and the round trip through FP8 are done in place: "(in place)" need not write the
  dimensions that stay as they are.
- Its quantisers multiply by a reciprocal where we divide.
- It has no permutation, gathering or combining of tokens, no pages and no compressor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsv4.bench.baselines._prepare import Baseline, Call, FromLibrary, Table
from dsv4.ops.hyper_connection import (
    HcHeadArgs,
    HcPostArgs,
    HcPostPreNormArgs,
    HcPreArgs,
    HcPreNormArgs,
)
from dsv4.ops.kv_cache import FakeQuantizeKvArgs
from dsv4.ops.norm import HeadNormRopeArgs, RmsNormArgs
from dsv4.ops.quantize import (
    DequantizeArgs,
    QuantizeFp8BlockArgs,
    QuantizeMxfp4Args,
    QuantizeNvfp4Args,
)
from dsv4.ops.rope import RopeArgs
from dsv4.ops.router import RouteTopkArgs
from dsv4.ops.swiglu import SwigluArgs
from dsv4.quant.formats import LINEAR, NVFP4

_SPLITS = 16
Read = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _of(prepare: Callable[..., Call]) -> Baseline:
    return FromLibrary("tile_kernels", prepare)


def _partial_sums(streams: torch.Tensor, fn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sums of the GEMM with ``fn [M, n H]``, and of squares: ``[S, T, ...]``."""
    parts = streams.flatten(1).float().unflatten(1, (_SPLITS, -1)).transpose(0, 1)
    factors = fn.float().unflatten(1, (_SPLITS, -1)).permute(1, 2, 0)
    return torch.bmm(parts, factors), parts.square().sum(-1)


def _reader(
    library: Any,
    args: HcPreArgs | HcPreNormArgs | HcPostPreNormArgs,
    partial_sums: tuple[torch.Tensor, torch.Tensor],
) -> Read:
    """Streams ``[T, n, H]`` to the layer's input, post and comb, in one launch after the GEMM."""
    fuse, eps = library.mhc.mhc_pre_big_fuse_fwd, (args.norm_eps, args.hc_eps, args.hc_eps)
    scale, base, iterations = args.scale, args.base, args.iterations

    def read(streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, n, hidden = streams.shape
        layer_input = streams.new_empty(tokens, hidden)
        post = torch.empty(tokens, n, device=streams.device)
        comb = torch.empty(tokens, n * n, device=streams.device)
        fuse(*partial_sums, scale, base, streams, post, comb, layer_input, *eps, 2.0, iterations)
        return layer_input, post, comb.view(tokens, n, n)

    return read


def _pre(library: Any, args: HcPreArgs) -> Call:
    read = _reader(library, args, _partial_sums(args.streams, args.fn))
    return lambda: read(args.streams)


def _pre_norm(library: Any, args: HcPreNormArgs) -> Call:
    read = _reader(library, args, _partial_sums(args.streams, args.fn))

    def call() -> tuple[torch.Tensor, ...]:
        layer_input, post, comb = read(args.streams)
        normed = _norm(library, RmsNormArgs(layer_input, args.norm_weight, args.norm_eps))()
        return normed, post, comb

    return call


def _post_pre_norm(library: Any, args: HcPostPreNormArgs) -> Call:
    write = _post(library, args)
    read = _reader(library, args, _partial_sums(write(), args.fn))

    def call() -> tuple[torch.Tensor, ...]:
        mixed = write()
        layer_input, *coefficients = read(mixed)
        normed = _norm(library, RmsNormArgs(layer_input, args.norm_weight, args.norm_eps))()
        return mixed, normed, *coefficients

    return call


def _post(library: Any, args: HcPostArgs | HcPostPreNormArgs) -> Call:
    operands = (args.y[None], args.streams[None], args.post[None, ..., None], args.comb[None])
    return lambda: library.mhc.mhc_post_fwd(*operands)[0]


def _head(library: Any, args: HcHeadArgs) -> Call:
    """Three launches: add the partial sums and normalise, the weights, the weighted sum."""
    streams = args.streams
    mhc, (tokens, n, hidden) = library.mhc, streams.shape
    parts, squares = (part.unsqueeze(2) for part in _partial_sums(streams, args.fn))

    def call() -> torch.Tensor:
        summed, mixes, weights = (
            torch.empty(shape, device=streams.device)
            for shape in ((tokens, 1, n), (tokens, n), (tokens, n))
        )
        square = torch.empty(tokens, 1, device=streams.device)
        out = streams.new_empty(tokens, hidden)
        mhc.mhc_reduce_partials_and_rmsnorm_fwd(
            parts, squares, summed, square, mixes, n * hidden, args.norm_eps, _SPLITS
        )
        mhc.mhc_head_compute_mix_fwd(mixes, args.scale, args.base, weights, args.hc_eps)
        mhc.mhc_pre_apply_mix_fwd(streams, weights, out)
        return out

    return call


def _nvfp4(library: Any, args: QuantizeNvfp4Args) -> Call:
    return lambda: library.quant.per_token_cast(args.x, "e2m1", 16, use_e4m3_sf=True)


def _mxfp4(library: Any, args: QuantizeMxfp4Args) -> Call:
    cast = library.quant.per_token_cast
    return lambda: cast(args.x, "e2m1", 32, round_sf=True, use_packed_ue8m0=True)


def _fp8_block(library: Any, args: QuantizeFp8BlockArgs) -> Call:
    powers = args.scale_dtype == torch.float8_e8m0fnu
    return lambda: library.quant.per_block_cast(args.x, "e4m3", (128, 128), round_sf=powers)


def _dequantize(library: Any, args: DequantizeArgs) -> Call:
    format, layout, dtype = args.format, args.layout, args.dtype
    names = {torch.bfloat16: "bf16", torch.float32: "fp32"}
    if format != NVFP4.name or layout != LINEAR or dtype not in names:
        raise ValueError(f"{format}, {layout} to {dtype}")
    pair = (args.codes.view(torch.int8), args.scales)
    return lambda: library.quant.cast_back(pair, names[dtype], (1, 16))


def _norm(library: Any, args: RmsNormArgs) -> Call:
    return lambda: library.quant.norm_forward(args.x, args.weight, args.eps)[0]


def _swiglu(library: Any, args: SwigluArgs) -> Call:
    if args.layout != "concatenated" or args.out_dtype != torch.bfloat16:
        raise ValueError(f"{args.layout} to {args.out_dtype}")
    x, limit, weights = args.gate_up, args.limit, {"topk_weights": args.row_weight}
    return lambda: library.quant.swiglu_forward(x, "bf16", clamp_value=limit, **weights)


def _rotation(
    library: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rotates the last dimensions of a tensor shaped as ``x [T, h, D]``; one angle per token."""
    table = torch.cat((cos, sin), -1).view(x.shape[0], -1)
    width = table.shape[-1]

    def rotate(own: torch.Tensor) -> torch.Tensor:
        end = own[..., -width:]
        library.transform.rope_kernel.apply_rotary(end, table, interleaved=True, conjugate=inverse)
        return own

    return rotate


def _rope(library: Any, args: RopeArgs) -> Call:
    rotate, own = _rotation(library, args.x, args.cos, args.sin, args.inverse), args.x.clone()
    return lambda: rotate(own)


def _head_norm_rope(library: Any, args: HeadNormRopeArgs) -> Call:
    rotate = _rotation(library, args.q, args.cos, args.sin, False)
    norm = _norm(library, RmsNormArgs(args.q, None, args.eps))
    return lambda: rotate(norm())


def _fake_quantize(library: Any, args: FakeQuantizeKvArgs) -> Call:
    own = args.x.clone()
    start = own[:, : args.x.shape[1] - args.rope_dim]

    def call() -> torch.Tensor:
        library.quant.per_token_cast_and_cast_back(start, "e4m3", 64, round_sf=True)
        return own

    return call


def _route(library: Any, args: RouteTopkArgs) -> Call:
    logits = torch.nn.functional.linear(args.x.float(), args.weight.float())
    gate = library.moe.moe_topk_gate_forward

    def call() -> tuple[torch.Tensor, ...]:
        ids, weights = gate(logits, args.top_k, False, 0, args.scaling_factor, 0, bias=args.bias)
        return logits, weights, ids

    return call


BASELINES: Table = {
    "hc_pre": {"TileKernels (no GEMM)": _of(_pre)},
    "hc_post": {"TileKernels": _of(_post)},
    "hc_pre_norm": {"TileKernels (no GEMM)": _of(_pre_norm)},
    "hc_post_pre_norm": {"TileKernels (no GEMM)": _of(_post_pre_norm)},
    "hc_head": {"TileKernels (no GEMM)": _of(_head)},
    "quantize_nvfp4": {"TileKernels (no global scale)": _of(_nvfp4)},
    "quantize_mxfp4": {"TileKernels (scales in rows)": _of(_mxfp4)},
    "quantize_fp8_block": {"TileKernels": _of(_fp8_block)},
    "dequantize": {"TileKernels (no global scale)": _of(_dequantize)},
    "rms_norm": {"TileKernels": _of(_norm)},
    "swiglu": {"TileKernels": _of(_swiglu)},
    "rope": {"TileKernels (in place)": _of(_rope)},
    "head_norm_rope_": {"TileKernels (two launches)": _of(_head_norm_rope)},
    "fake_quantize_kv": {"TileKernels (in place)": _of(_fake_quantize)},
    "route_topk": {"TileKernels (no GEMM)": _of(_route)},
}
