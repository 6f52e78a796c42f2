"""Triton's GEMMs with four-bit weights compile for every architecture, within its limits."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from tests._tools import forked

REGISTER_FILE = 65536
# Shared memory of a program: 1 KB of the SM's is the driver's.
MOST_SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99, 121: 99}
MOST_STACK = 16  # bytes; the assembler keeps one or two values from outside the loop there
MOST_SPILLS = 8  # loads and stores of these values


def stores_of_x(kernel):
    """Stores of a thread, 16 bytes each, that bring x to shared memory: with one stage, no copy."""
    if kernel["STAGES"] > 1:
        return 0
    return max(1, 64 * kernel["BLOCKS"] * kernel["TOKENS"] * 2 // (16 * kernel["threads"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "how"),
    [
        (80, ["--brief"]),
        (90, ["--brief"]),
        (120, ["--brief"]),
        *(pytest.param(arch, [], marks=pytest.mark.nightly) for arch in MOST_SHARED),
    ],
)
def test_every_kernel_compiles_and_fits(arch, how):
    done = forked.run_module("tests._tools.compile_packed", str(arch), *how)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    names = {kernel["kernel"] for kernel in kernels}
    assert names == {"_packed_gemm_kernel", "_packed_sum_kernel", "_grouped_kernel"}
    for kernel in kernels:
        assert kernel["shared"] <= MOST_SHARED[arch] * 1024, kernel
        assert kernel["registers"] * kernel["threads"] <= REGISTER_FILE, kernel
        assert kernel["stack"] <= MOST_STACK, kernel
        assert kernel.get("spills", 0) <= (MOST_SPILLS if kernel["stack"] else 0), kernel
        assert kernel["waits"] == (arch >= 90), kernel
        # The next iteration overwrites registers that an unfinished instruction still reads.
        assert kernel["unfinished"] == 0, kernel
        # A weight in fragments is in registers as the tensor cores take it (layout 0).
        if kernel.get("LAYOUT") == 0 and arch != 100:
            assert kernel["exchanges"] <= stores_of_x(kernel), kernel
            assert kernel["narrow"] == 0, kernel  # the compiler knows how operands are aligned
        # Weights come while the preceding kernel ends, where programs leave it room.
        assert kernel["prefetches"] == (arch >= 90 and kernel.get("PREFETCHED", 0) > 0), kernel
    overlapped = [kernel for kernel in kernels if kernel.get("OVERLAPPED")]
    assert bool(overlapped) == (arch == 90)
    for kernel in overlapped:
        # Two programs on an SM, which reserves 1 KB of its 228 for each.
        assert 2 * kernel["registers"] * kernel["threads"] <= REGISTER_FILE, kernel
        assert 2 * (kernel["shared"] + 1024) <= 228 * 1024, kernel
        assert kernel["reloads"] == 0, kernel
        # A block of 64 columns is four products; the assembler lets none wait for another.
        assert 4 * kernel["stops"] <= kernel["products"] > 0, kernel
    assert any(kernel.get("JOINED") for kernel in kernels)
    assert arch != 90 or any(kernel.get("PREFETCHED") for kernel in kernels)
