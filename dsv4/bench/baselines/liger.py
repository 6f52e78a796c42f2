"""Liger-Kernel: its Triton kernels for manifold-constrained hyper-connections and RMS norm.

They are kernels for training. Seen with liger-kernel 0.8.5:

- The GEMM with ``fn`` is by one program for 32 tokens, however few there are; a float32 ``fn``
  is multiplied in TF32. With ``fn`` in bfloat16, which its documentation recommends, tensor cores
  take the streams as they are; ``fn`` itself is then rounded.
- The loop of that GEMM is unrolled, and the token count is a constant of every kernel: each count
  compiles again, for about a minute.
- The mixing matrix is the transpose of ours where it is applied: it is transposed before timing.
- By default results are float32, and its autograd functions narrow them in a pass of PyTorch. Here
  the kernels store into tensors of the dtype wanted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dsv4.bench.baselines._prepare import Call, FromLibrary, Table
from dsv4.ops.hyper_connection import HcPostArgs, HcPostPreNormArgs, HcPreArgs, HcPreNormArgs
from dsv4.ops.norm import RmsNormArgs

NAME = "Liger"
# By the dtype of the factor of the GEMM.
SLOW = ("Liger (fn in fp32)", "Liger (fn in bf16)")
_MODULE = "liger_kernel.ops"
Read = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
Fused = Callable[..., Call]


def _reader(library: Any, args: HcPreArgs | HcPreNormArgs | HcPostPreNormArgs) -> Read:
    """Streams ``[T, n, H]`` to collapsed, post and comb, in three launches."""
    mhc = library.mhc
    phi, bias = args.fn.t().contiguous(), args.base.float()
    alphas = args.scale.float().unbind()
    eps = {"pre_eps": args.hc_eps, "sinkhorn_eps": args.hc_eps}

    def read(streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mixes, _ = mhc.mhc_mm_norm_fwd(streams.flatten(1), phi, args.norm_eps)
        pre, post, comb = mhc.mhc_split_sinkhorn_fwd(
            mixes, bias, *alphas, tmax=args.iterations, post_mult=2.0, **eps
        )
        layer_input = torch.empty_like(streams[:, 0])
        return mhc.mhc_pre_fwd(streams, pre, out=layer_input), post, comb

    return read


def _writer(library: Any, args: HcPostArgs | HcPostPreNormArgs) -> Callable[[], torch.Tensor]:
    y, streams, post = args.y, args.streams, args.post
    transposed = args.comb.transpose(-1, -2).contiguous()
    write = library.mhc.mhc_post_res_fwd
    return lambda: write(streams, y, post, transposed, out=torch.empty_like(streams))


def _pre(library: Any, args: HcPreArgs) -> Call:
    read = _reader(library, args)
    return lambda: read(args.streams)


def _pre_norm(library: Any, args: HcPreNormArgs) -> Call:
    read = _reader(library, args)

    def call() -> tuple[torch.Tensor, ...]:
        layer_input, post, comb = read(args.streams)
        normed = _norm(library, RmsNormArgs(layer_input, args.norm_weight, args.norm_eps))()
        return normed, post, comb

    return call


def _post_pre_norm(library: Any, args: HcPostPreNormArgs) -> Call:
    write, read = _writer(library, args), _reader(library, args)

    def call() -> tuple[torch.Tensor, ...]:
        mixed = write()
        layer_input, *coefficients = read(mixed)
        normed = _norm(library, RmsNormArgs(layer_input, args.norm_weight, args.norm_eps))()
        return mixed, normed, *coefficients

    return call


def _norm(library: Any, args: RmsNormArgs) -> Call:
    # The casting of Gemma rounds once, at the end, as we do.
    forward = library.rms_norm.rms_norm_forward
    return lambda: forward(args.x, args.weight, args.eps, 0.0, "gemma", None)[0]


def _narrow(prepare: Fused) -> Fused:
    """``prepare`` with ``fn`` in bfloat16."""

    @functools.wraps(prepare)
    def narrowed(library: Any, args: Any) -> Call:
        return prepare(library, args._replace(fn=args.fn.to(torch.bfloat16)))

    return narrowed


def _both(prepare: Fused) -> dict[str, Any]:
    baseline = functools.partial(FromLibrary, _MODULE)
    return dict(zip(SLOW, (baseline(prepare), baseline(_narrow(prepare))), strict=True))


BASELINES: Table = {
    "hc_pre": _both(_pre),
    "hc_post": {NAME: FromLibrary(_MODULE, _writer)},
    "hc_pre_norm": _both(_pre_norm),
    "hc_post_pre_norm": _both(_post_pre_norm),
    "rms_norm": {NAME: FromLibrary(_MODULE, _norm)},
}
