"""Reference implementation of ``dsv4.ops.hyper_connection_combine``."""

from __future__ import annotations

import torch

from dsv4.ops._library import as_record
from dsv4.ops.hyper_connection import HcPostArgs, HcPostPreNormArgs
from dsv4.ops.hyper_connection_combine import HcCombinePostArgs, HcCombinePostPreNormArgs
from dsv4.ops.moe import MoeCombineArgs
from dsv4.reference import hyper_connection
from dsv4.reference.moe import moe_combine


def hc_combine_post(args: HcCombinePostArgs) -> torch.Tensor:
    """See ``dsv4.ops.hyper_connection_combine.hc_combine_post``."""
    return hyper_connection.hc_post(as_record(HcPostArgs, args, y=_combined(args)))


def hc_combine_post_pre_norm(
    args: HcCombinePostPreNormArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.hyper_connection_combine.hc_combine_post_pre_norm``."""
    after = as_record(HcPostPreNormArgs, args, y=_combined(args))
    return hyper_connection.hc_post_pre_norm(after)


def _combined(args: HcCombinePostArgs | HcCombinePostPreNormArgs) -> torch.Tensor:
    """Return the sum ``[..., H]`` of each token's rows, in the dtype of ``args.y``."""
    combined = moe_combine(as_record(MoeCombineArgs, args, out_dtype=args.y.dtype))
    return combined.view(*args.streams.shape[:-2], args.streams.shape[-1])
