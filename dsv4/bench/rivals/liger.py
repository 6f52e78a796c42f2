"""Liger-Kernel: its Triton kernels for manifold-constrained hyper-connections and RMS norm.

They are kernels for training. Seen with liger-kernel 0.8.5:

- The product with ``fn`` is by one program for 32 tokens, however few there are; a float32 ``fn``
  is multiplied in TF32. With ``fn`` in bfloat16, which its documentation recommends, tensor cores
  take the streams as they are; ``fn`` itself is then rounded.
- That product's loop is unrolled, and the token count is a constant of every kernel: each count
  compiles anew, for about a minute.
- The mixing matrix is the transpose of ours where it is applied: it is turned before timing.
- By default results are float32, and its autograd functions narrow them in a pass of PyTorch. Here
  the kernels store into tensors of the dtype wanted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dsv4.bench.rivals._prepare import Call, FromLibrary, Table

NAME = "Liger"
# By the dtype of the factor of the product.
SLOW = ("Liger (fn in fp32)", "Liger (fn in bf16)")
_MODULE = "liger_kernel.ops"
Read = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
Fused = Callable[..., Call]


def _reader(
    library: Any,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> Read:
    """Streams ``[T, n, H]`` to collapsed, post and comb, in three launches."""
    mhc = library.mhc
    phi, bias = fn.t().contiguous(), base.float()
    alphas = scale.float().unbind()
    eps = {"pre_eps": hc_eps, "sinkhorn_eps": hc_eps}

    def read(streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mixes, _ = mhc.mhc_mm_norm_fwd(streams.flatten(1), phi, norm_eps)
        pre, post, comb = mhc.mhc_split_sinkhorn_fwd(
            mixes, bias, *alphas, tmax=iterations, post_mult=2.0, **eps
        )
        collapsed = torch.empty_like(streams[:, 0])
        return mhc.mhc_pre_fwd(streams, pre, out=collapsed), post, comb

    return read


def _writer(
    library: Any,
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
) -> Callable[[], torch.Tensor]:
    turned = comb.transpose(-1, -2).contiguous()
    write = library.mhc.mhc_post_res_fwd
    return lambda: write(streams, y, post, turned, out=torch.empty_like(streams))


def _pre(library: Any, streams: torch.Tensor, fn: torch.Tensor, *rest: Any) -> Call:
    read = _reader(library, fn, *rest)
    return lambda: read(streams)


def _pre_norm(
    library: Any,
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    weight: torch.Tensor,
    norm_eps: float,
    *rest: Any,
) -> Call:
    read = _reader(library, fn, scale, base, norm_eps, *rest)

    def call() -> tuple[torch.Tensor, ...]:
        collapsed, post, comb = read(streams)
        return _norm(library, collapsed, weight, norm_eps)(), post, comb

    return call


def _post_pre_norm(
    library: Any,
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    weight: torch.Tensor,
    norm_eps: float,
    *rest: Any,
) -> Call:
    write = _writer(library, y, streams, post, comb)
    read = _reader(library, fn, scale, base, norm_eps, *rest)

    def call() -> tuple[torch.Tensor, ...]:
        mixed = write()
        collapsed, *coefficients = read(mixed)
        return mixed, _norm(library, collapsed, weight, norm_eps)(), *coefficients

    return call


def _norm(library: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> Call:
    # The casting of Gemma rounds once, at the end, as we do.
    forward = library.rms_norm.rms_norm_forward
    return lambda: forward(x, weight, eps, 0.0, "gemma", None)[0]


def _narrow(prepare: Fused, place: int) -> Fused:
    """``prepare`` with the argument at ``place``, ``fn``, in bfloat16."""

    @functools.wraps(prepare)
    def narrowed(library: Any, *args: Any) -> Call:
        fn = args[place].to(torch.bfloat16)
        return prepare(library, *args[:place], fn, *args[place + 1 :])

    return narrowed


def _both(prepare: Fused, place: int) -> dict[str, Any]:
    rival = functools.partial(FromLibrary, _MODULE)
    return dict(zip(SLOW, (rival(prepare), rival(_narrow(prepare, place))), strict=True))


RIVALS: Table = {
    "hc_pre": _both(_pre, 1),
    "hc_post": {NAME: FromLibrary(_MODULE, _writer)},
    "hc_pre_norm": _both(_pre_norm, 1),
    "hc_post_pre_norm": _both(_post_pre_norm, 4),
    "rms_norm": {NAME: FromLibrary(_MODULE, _norm)},
}
