"""Compile the GEMMs of NVFP4 by NVFP4 for 12.0 and 12.1, which this machine need not have.

    python -m tests._tools.compile_block_scaled [--small]   (without TRITON_INTERPRET)

The launchers run on uninitialised CPU tensors, and a compilation replaces Triton's launch. The
program prints one line of JSON per compiled kernel: name, architecture, registers, stack, shared
memory, threads, accesses to local memory, instructions that multiply, and constants. ``--small``
compiles the kernels of ``SMALL``, whose sizes have no divisors, and prints their PTX as well, so
that ``tests/triton/test_block_scaled.py`` can run them on any operands.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from dsv4.device import interpret_triton
from dsv4.ops.gemm import gemm
from dsv4.ops.gemm_swiglu import gemm_swiglu
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu
from dsv4.quant.formats import LINEAR, NVFP4, SWIZZLED, QuantizedTensor, swizzled_size
from dsv4.triton import gemm_nvfp4, grouped_nvfp4
from dsv4.triton._lib.block_scaled_plan import BlockScaledPlan
from tests._tools.compile_kernels import report_of, tool
from tests._tools.other_gpu import replace_launches

DENSE = ((1536, 4096), (32768, 1024), (4096, 8192))
EXPERTS = ((256, 4096, 4096), (256, 4096, 2048), (384, 7168, 3072))
TOKENS = (1, 16, 64, 4096)
BACKEND = "fp4"
ARCHITECTURES = (120, 121)
KERNELS = ("_nvfp4_gemm_kernel", "_grouped_nvfp4_kernel")
_RUN = JITFunction.run
LIMIT = 10.0


@dataclass(frozen=True)
class Small:
    """A kernel that tests run on operands of any size.

    Attributes:
        plan: Its tiling.
        layout: Layout of the weight's block scales.
        scales: Global scales of a weight: ``"one"``, ``"segments"`` or ``"rows"``.
        swiglu: Whether SwiGLU follows, of a grouped GEMM.
        experts: Experts of a grouped GEMM; 0: a dense one.
    """

    plan: BlockScaledPlan
    layout: str = LINEAR
    scales: str = "one"
    swiglu: bool = False
    experts: int = 0


SMALL = (
    Small(BlockScaledPlan(128, 128, 128, 8), SWIZZLED, "segments"),
    Small(BlockScaledPlan(64, 16, 128, 4), LINEAR, "rows", experts=3),
    Small(BlockScaledPlan(16, 8, 64, 2), LINEAR, "rows"),
    Small(BlockScaledPlan(64, 32, 64, 4), SWIZZLED, swiglu=True, experts=3),
)
_ON_BOTH = 2  # kernels of ``SMALL`` that are compiled for 12.1 as well


@contextmanager
def planned(plan: BlockScaledPlan) -> Iterator[None]:
    """Let both launchers take one tiling."""
    before = gemm_nvfp4.dense_plan, grouped_nvfp4.grouped_plan
    gemm_nvfp4.dense_plan = grouped_nvfp4.grouped_plan = lambda *_: plan
    try:
        yield
    finally:
        gemm_nvfp4.dense_plan, grouped_nvfp4.grouped_plan = before


def _weight(shape: tuple[int, ...], layout: str, scales: str = "one") -> QuantizedTensor:
    *batch, rows, columns = shape
    codes = torch.empty((*batch, rows, columns // 2), dtype=torch.uint8)
    size = [rows, columns // 16]
    size = [swizzled_size(*size)] if layout == SWIZZLED else size
    blocks = torch.empty((*batch, *size), dtype=torch.float8_e4m3fn)
    segments = (rows // 2, rows - rows // 2) if scales == "segments" else ()
    count = len(segments) or (rows if scales == "rows" else 1)
    return QuantizedTensor(codes, blocks, torch.empty(*batch, count), NVFP4, layout, segments)


def _rows(count: int, columns: int) -> torch.Tensor:
    return torch.zeros(count, columns, dtype=torch.bfloat16)


def _launch_small(kernel: Small) -> None:
    x, how = _rows(5, 256), {"activation": "nvfp4", "out_dtype": torch.float32, "backend": BACKEND}
    if not kernel.experts:
        gemm(x, _weight((40, 256), kernel.layout, kernel.scales), **how)
        return
    weight = _weight((kernel.experts, 40, 256), kernel.layout, kernel.scales)
    offsets = torch.empty(kernel.experts + 1, dtype=torch.int32)
    if kernel.swiglu:
        grouped_gemm_swiglu(x, weight, offsets, LIMIT, row_weight=torch.empty(5), **how)
    else:
        grouped_gemm(x, weight, offsets, **how)


def _launch_all() -> None:
    """Launch every tiling of the published models' sizes, and each kind of result once."""
    how = {"activation": "nvfp4", "backend": BACKEND}
    for tokens in TOKENS:
        for shape in DENSE:
            gemm(_rows(tokens, shape[1]), _weight(shape, SWIZZLED), **how)
            gemm_swiglu(_rows(tokens, shape[1]), _weight(shape, LINEAR), LIMIT, **how)
        for shape in EXPERTS:
            x, weight = _rows(64 * tokens, shape[2]), _weight(shape, SWIZZLED)
            offsets = torch.empty(shape[0] + 1, dtype=torch.int32)
            grouped_gemm(x, weight, offsets, **how)
            weights = torch.empty(len(x))
            grouped_gemm_swiglu(x, weight, offsets, LIMIT, row_weight=weights, **how)


def compile_all(arch: int, small: bool) -> Iterator[dict]:
    """Compile every kernel that is launched; one report for each."""
    result: dict[str, tuple[str, Any, list[str]]] = {}

    def compiled(self, *args, grid, warmup, **kwargs):
        if self.__name__ not in KERNELS:
            return None
        kernel = _RUN(self, *args, grid=grid, warmup=True, **kwargs)
        result[kernel.hash] = (self.__name__, kernel, self.arg_names)
        return kernel

    replace_launches(arch, compiled)
    with interpret_triton():
        if small:
            for kernel in SMALL[: None if arch == ARCHITECTURES[0] else _ON_BOTH]:
                with planned(kernel.plan):
                    _launch_small(kernel)
        else:
            _launch_all()
    for name, kernel, names in result.values():
        described = _described(kernel, names, small)
        yield {**report_of(BACKEND, name, kernel), "arch": arch, **described}


def _described(kernel: Any, names: list[str], with_ptx: bool) -> dict:
    """Return constants and instructions of a compiled kernel."""
    ptx = kernel.asm["ptx"]
    parts = {
        "constants": {names[path[0]]: value for path, value in kernel.src.constants.items()},
        "multiplied": sorted(set(re.findall(r"\bw?g?mma\.\S+", ptx))),
        "spills": _local(kernel),
    }
    return parts | ({"ptx": ptx} if with_ptx else {})


def _local(kernel: Any) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return len(re.findall(r"\b(?:LDL|STL)\b", tool("nvdisasm", "-c", file.name)))


if __name__ == "__main__":
    assert not os.environ.get("TRITON_INTERPRET"), "kernels would be interpreted"
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    for arch in ARCHITECTURES:
        for report in compile_all(arch, options.small):
            print(json.dumps(report), flush=True)
