"""Reasons why GEMMs on the FP4 tensor cores of 12.x cannot run a call; None where they can.

Named in ``dsv4.implementations``. Nothing here imports Triton.
"""

from __future__ import annotations

import importlib.metadata

import torch

from dsv4.device import cached, capability, dotted
from dsv4.implementations import Call
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.gemm_swiglu import GemmSwigluArgs
from dsv4.ops.grouped_gemm import GroupedGemmArgs
from dsv4.ops.grouped_gemm_swiglu import GroupedGemmSwigluArgs, GroupedGemmSwigluQuantizeArgs
from dsv4.ops.unsupported import gapped, gemm_dtypes, misaligned, not_both_nvfp4, too_many
from dsv4.quant.formats import FP8_TOKEN, LINEAR, NVFP4, SWIZZLED
from dsv4.triton.supports import MOST_EXPERTS, any_call

GPUS = ((12, 0), (12, 1))
# Versions of Triton whose code was run in ``tests/_tools/ptx`` for both GPUs. 3.6 and 3.7 do not
# compile ``tl.dot_scaled`` for 12.1; 3.8.0 has open issues with it (triton-lang/triton#11733,
# #11735). A newer one joins when ``tests/triton/test_block_scaled.py`` passes with it.
VERSIONS = ("3.9",)
_TILE = 64  # columns of one instruction
_GroupedArgs = GroupedGemmArgs | GroupedGemmSwigluArgs | GroupedGemmSwigluQuantizeArgs


@cached
def triton_version() -> str:
    """Version of the installed Triton; empty if no package of that name is installed."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


def gemm(call: Call) -> str | None:
    """Return why ``gemm`` with both operands in NVFP4 is unsupported, or None."""
    args: GemmArgs = call.args
    return _dense(call, args) or too_many(args.groups, "groups")


def gemm_swiglu(call: Call) -> str | None:
    """Return why ``gemm_swiglu`` with both operands in NVFP4 is unsupported, or None."""
    args: GemmSwigluArgs = call.args
    return _dense(call, args)


def _dense(call: Call, args: GemmArgs | GemmSwigluArgs) -> str | None:
    return (
        not_both_nvfp4(args.format, args.activation)
        or _moved(args.layout)
        or gemm_dtypes(args.x.dtype, args.out_dtype)
        or any_call(call)
        or no_block_scaled_mma(call.device)
        or _stored(args.codes, args.scales)
    )


def grouped_gemm(call: Call) -> str | None:
    """Return why ``grouped_gemm`` and its fused forms, all in NVFP4, are unsupported, or None."""
    args: _GroupedArgs = call.args
    activation, dtype = args.activation, args.x.dtype
    if args.x_scales is not None:  # the activation of rows that come as codes is called "bf16"
        activation = NVFP4.name if dtype == NVFP4.codes_dtype else FP8_TOKEN.name
        dtype = torch.bfloat16
    result = dtype if isinstance(args, GroupedGemmSwigluQuantizeArgs) else args.out_dtype
    reason = (
        not_both_nvfp4(args.format, activation)
        or _moved(args.layout)
        or gemm_dtypes(dtype, result)
        or any_call(call)
        or no_block_scaled_mma(call.device)
    )
    if reason:
        return reason
    assert args.scales is not None
    experts = args.weight.shape[0]
    if experts > MOST_EXPERTS:
        return f"there are {experts} experts, wanted at most {MOST_EXPERTS}"
    tiles = experts + args.x.shape[0] // 8
    return _stored(args.weight, args.scales) or too_many(tiles, "experts and tiles of rows")


def reference_is_faster(call: Call) -> str | None:
    """Return why another implementation is faster on a CPU, where Triton interprets, or None."""
    if call.device.type == "cpu":
        return "Triton's interpreter is slower than the reference"
    return None


def _moved(layout: str) -> str | None:
    """Return a reason if codes do not lie as in a checkpoint."""
    if layout in (LINEAR, SWIZZLED):
        return None
    return (
        f"the weight has layout {layout!r}, wanted {SWIZZLED!r} or {LINEAR!r}: "
        "QuantizedTensor.with_layout or the layer's pack()"
    )


def no_block_scaled_mma(device: torch.device) -> str | None:
    """Return why a GPU does not multiply NVFP4 by ``mma.sync``; the interpreter does."""
    if device.type == "cpu":
        return None
    if capability(device) not in GPUS:
        return (
            "mma.sync multiplies NVFP4 on compute capability 12.0 and 12.1, "
            f"the GPU has {dotted(device)}"
        )
    version = triton_version()
    if not any(f"{version}.".startswith(f"{known}.") for known in VERSIONS):
        known = " or ".join(VERSIONS)
        return (
            f"Triton is {version or 'of an unknown version'}, wanted {known}: its code for "
            "tl.dot_scaled is known to be right"
        )
    return None


def _stored(codes: torch.Tensor, scales: torch.Tensor) -> str | None:
    """Return how a weight of NVFP4 has to lie in memory, if it does not."""
    columns = 2 * codes.shape[-1]
    if columns % _TILE:
        return f"the weight has {columns} columns, wanted a multiple of {_TILE}"
    return gapped("codes or scales", codes, scales) or misaligned(codes, scales)
