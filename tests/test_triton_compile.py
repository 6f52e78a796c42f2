"""Every Triton kernel compiles for Hopper and Blackwell, without spills, on a machine without both.

Compiled and inspected, not run: what runs is tested elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from dsv4 import dispatch

MOST_SHARED = 227 * 1024
REGISTER_FILE = 65536
KERNEL_OPS = {row.op for row in dispatch.IMPLEMENTATIONS if row.name == "triton"}
# Operators whose launchers write NVFP4 codes, which Blackwell converts by an instruction.
E2M1_OPS = {op for op in KERNEL_OPS if op.endswith("_quantize")} - {"indexer_rotate_quantize"}
E2M1_OPS |= {"quantize_nvfp4", "quantize_mxfp4"}


@pytest.fixture(scope="module", params=[90, 100])
def kernels(request):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compile_kernels", str(request.param)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return request.param, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
class TestCompiled:
    def test_every_kernel_was_compiled(self, kernels):
        assert {kernel["op"] for kernel in kernels[1]} == KERNEL_OPS

    def test_nothing_lives_in_local_memory(self, kernels):
        spilling = [k for k in kernels[1] if k["stack"] or k["local"]]
        assert not spilling

    def test_resources_fit(self, kernels):
        for kernel in kernels[1]:
            assert kernel["shared"] <= MOST_SHARED, kernel
            assert kernel["registers"] * kernel["threads"] <= REGISTER_FILE, kernel

    def test_every_kernel_waits_for_the_one_before(self, kernels):
        """Without the wait, programmatic launch would read what is still being written."""
        assert all(kernel["waits"] for kernel in kernels[1])

    def test_blackwell_rounds_to_e2m1_by_instruction(self, kernels):
        arch, reports = kernels
        having = {k["op"] for k in reports if k["e2m1"]}
        assert having == (E2M1_OPS if arch >= 100 else set())
