"""Launches of ``dsv4.ops.hyper_connection_combine``.

For few tokens the launch that writes the streams back adds up the rows of the experts itself. For
more, ``moe_combine`` has a launch of its own.
"""

from __future__ import annotations

import torch

from dsv4.ops._library import as_record
from dsv4.ops.hyper_connection import HcPostArgs, HcPostPreNormArgs
from dsv4.ops.hyper_connection_combine import HcCombinePostArgs, HcCombinePostPreNormArgs
from dsv4.ops.moe import MoeCombineArgs
from dsv4.triton import hyper_connection
from dsv4.triton._lib.combined_rows import CombinedRows
from dsv4.triton.moe_combine import moe_combine

# Tokens up to which rows are added up where the streams are written back. Not measured: a row of
# 4096 columns less is written and read, and few tokens save the latency of a launch.
_FEW_TOKENS = 64


def hc_combine_post(args: HcCombinePostArgs) -> torch.Tensor:
    """See ``dsv4.ops.hyper_connection_combine.hc_combine_post``."""
    if _is_one_launch(args):
        after = as_record(HcPostArgs, args)
        return hyper_connection.reduced_post(after, CombinedRows.of(args))
    return hyper_connection.hc_post(as_record(HcPostArgs, args, y=_combined(args)))


def hc_combine_post_pre_norm(
    args: HcCombinePostPreNormArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.hyper_connection_combine.hc_combine_post_pre_norm``."""
    if _is_one_launch(args):
        after = as_record(HcPostPreNormArgs, args)
        return hyper_connection.reduced_post_pre_norm(after, CombinedRows.of(args))
    after = as_record(HcPostPreNormArgs, args, y=_combined(args))
    return hyper_connection.hc_post_pre_norm(after)


def _is_one_launch(args: HcCombinePostArgs | HcCombinePostPreNormArgs) -> bool:
    """Return whether one launch adds up the rows and writes the streams back."""
    return args.streams.numel() > 0 and args.rows.shape[0] <= _FEW_TOKENS


def _combined(args: HcCombinePostArgs | HcCombinePostPreNormArgs) -> torch.Tensor:
    """Return the sum ``[..., H]`` of each token's rows, in the dtype of ``args.y``."""
    combined = moe_combine(as_record(MoeCombineArgs, args, out_dtype=args.y.dtype))
    return combined.view(*args.streams.shape[:-2], args.streams.shape[-1])
