"""Compile the Triton GEMMs with four-bit weights for a GPU that this machine need not have.

    python -m tests._tools.compile_packed 80 [--quick | --brief]   (without TRITON_INTERPRET)

The launchers run on uninitialised CPU tensors, and a compilation replaces Triton's launch. The
program prints one line of JSON per compiled kernel, like ``tests._tools.compile_kernels``. The line
has the kernel's constants and, where the weight is in fragments, ``spills`` (loads and stores of
local memory in its machine code), ``exchanges`` (stores to shared memory, and shuffles; such a
weight needs none before its sum is complete; of one stage, x passes through shared memory in the
loop), ``narrow`` (loads from global memory in the loop of less than 8 bytes a thread), ``reloads``
(accesses to local memory in the loop), ``products`` (Hopper's asynchronous ones) and ``stops``
(waits until all of them have ended).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator

import torch
from triton.runtime.jit import JITFunction

from dsv4.device import interpret_triton
from dsv4.ops.gemm import gemm
from dsv4.ops.gemm_swiglu import gemm_swiglu
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu
from dsv4.quant.formats import FRAGMENTS, LINEAR, MXFP4, NVFP4, SWIZZLED, QuantizedTensor
from tests._tools.compile_kernels import arguments, print_reports, report_of, tool
from tests._tools.other_gpu import replace_launches

DENSE = ((4096, 4096), (32768, 1024), (8192, 1024), (512, 4096))
EXPERTS = ((256, 4096, 4096), (256, 4096, 2048), (384, 7168, 3072))
TOKENS = (1, 16, 24, 64, 512, 4096)
_CONSTANTS = ("LAYOUT", "TILES", "TOKENS", "BLOCKS", "STAGES", "PREFETCHED", "JOINED", "OVERLAPPED")


def _weight(shape: tuple[int, ...], layout: str) -> QuantizedTensor:
    fmt = MXFP4 if layout == LINEAR else NVFP4
    *batch, rows, columns = shape
    codes = torch.empty((*batch, rows, columns // 2), dtype=torch.uint8)
    dtype = {LINEAR: torch.float8_e8m0fnu, SWIZZLED: torch.float8_e4m3fn, FRAGMENTS: torch.uint8}
    size = [rows, columns // fmt.block[1]]
    if layout == SWIZZLED:
        size = [-(-rows // 128) * 128 * columns // 16]
    scales = torch.empty((*batch, *size), dtype=torch.uint8).view(dtype[layout])
    total = None if fmt == MXFP4 else torch.empty((*batch, 1))
    return QuantizedTensor(codes, scales, total, fmt, layout)


def _run(quick: bool, has_fp4: bool) -> None:
    counts = (1, 64, 512) if quick else TOKENS
    for layout in (FRAGMENTS, *((SWIZZLED,) if has_fp4 else ()), LINEAR):
        for tokens in counts[: 1 if quick and layout != FRAGMENTS else None]:
            for shape in DENSE[::2] if quick else DENSE:  # the last is cut along K
                x, weight = (
                    torch.empty(tokens, shape[1], dtype=torch.bfloat16),
                    _weight(shape, layout),
                )
                gemm_swiglu(x, weight, 10.0, backend="triton")
                gemm(x, weight, backend="triton")
    for layout in (FRAGMENTS, SWIZZLED, LINEAR):
        for tokens in counts[: 1 if quick and layout != FRAGMENTS else None]:
            for shape in EXPERTS[:1] if quick else EXPERTS:
                rows = 64 * tokens
                x, weight = (
                    torch.empty(rows, shape[2], dtype=torch.bfloat16),
                    _weight(shape, layout),
                )
                offsets = torch.empty(shape[0] + 1, dtype=torch.int32)
                weights = torch.empty(rows)
                grouped_gemm_swiglu(x, weight, offsets, 10.0, row_weight=weights, backend="triton")
                grouped_gemm(x, weight, offsets, backend="triton")


def compile_all(arch: int, quick: bool = False, brief: bool = False) -> Iterator[dict]:
    """Compile every kernel that the sizes above launch; one report for each.

    Args:
        arch: Compute capability times 10.
        quick: Some of the sizes.
        brief: Of these, one specialisation for each layout, tile of tokens and number of blocks
            that are prefetched: the first, which is that with SwiGLU.
    """
    result: dict[str, tuple[str, object]] = {}
    run, seen = JITFunction.run, set()

    def compiled(self, *args, grid, warmup, **kwargs):
        kind = (self.__name__, *map(kwargs.get, ("LAYOUT", "TOKENS", "PREFETCHED")))
        if brief and kind in seen:
            return None
        seen.add(kind)
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        constants = {name: kwargs[name] for name in _CONSTANTS if name in kwargs}
        result[kernel.hash] = (self.__name__, kernel, constants)
        return kernel

    replace_launches(arch, compiled)
    with interpret_triton():
        _run(quick or brief, arch // 10 == 12)
    for name, kernel, constants in result.values():
        in_fragments = constants.get("LAYOUT") == 0
        listed = _counts(kernel) if in_fragments else {}
        listed["prefetches"] = _prefetches(kernel.asm["ptx"])
        yield {**report_of("packed", name, kernel), **constants, **listed}


def _counts(kernel) -> dict[str, int]:
    """Count accesses to local memory; exchanges and narrow loads in the loop that multiplies."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = tool("nvdisasm", "-c", file.name)
    local = len(re.findall(r"\b(?:LDL|STL)\b", listing))
    loop = _loop(listing)
    loads = re.findall(r"\bLDG(?:STS)?\.\S+", loop)
    return {
        "spills": local,
        "exchanges": len(re.findall(r"\b(?:STS|SHFL|STSM)\b", loop)),
        "narrow": sum(re.search(r"\.(?:64|128)\b", load) is None for load in loads),
        "reloads": len(re.findall(r"\b(?:LDL|STL)\b", loop)),
        "products": listing.count("HGMMA."),
        "stops": len(re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b", listing)),
    }


def _prefetches(ptx: str) -> bool:
    """Return whether a kernel prefetches before it waits for the preceding one."""
    return "prefetch.global.L2" in ptx.partition("griddepcontrol.wait")[0]


def _loop(listing: str) -> str:
    """The shortest loop of a listing that has tensor core instructions; empty if there is none."""
    lines = listing.splitlines()
    labels = {line.strip()[:-1]: i for i, line in enumerate(lines) if line.strip().endswith(":")}
    loops = []
    for i, line in enumerate(lines):
        jump = re.search(r"BRA\S* .*`\((\S+)\)", line)
        if jump and labels.get(jump[1], i) < i:
            loops.append("\n".join(lines[labels[jump[1]] : i]))
    return min((loop for loop in loops if "MMA" in loop), key=len, default="")


if __name__ == "__main__":
    parser = arguments()
    parser.add_argument("--brief", action="store_true")
    print_reports(compile_all, parser)
