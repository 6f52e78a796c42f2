"""Every CuTeDSL kernel that dispatch can choose compiles for Hopper, on a machine without one.

Compiled and inspected, not run: what runs is tested elsewhere.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass")
triton = pytest.importorskip("triton")

from dsv4.cute import _images, gemm  # noqa: E402
from dsv4.cute.sm90.few_plan import FewPlan, few_plan  # noqa: E402
from dsv4.cute.sm90.many_plan import ManyPlan  # noqa: E402
from dsv4.cute.sm90.plans import Product, choose, counted_as, token_counts  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MOST_SHARED = 227 * 1024
REGISTER_FILE = 65536
# N, K and groups of DeepSeek-V4's matrices, Pro then Flash (specification sections 1 and 4).
MATRICES = [
    (65536, 1536, 1),
    (7168, 16384, 1),
    (6144, 7168, 1),
    (7168, 3072, 1),
    (2048, 7168, 1),
    (16384, 4096, 16),
    (8192, 1536, 1),
    (32768, 1024, 1),
    (4096, 8192, 1),
    (4096, 4096, 1),
    (4096, 2048, 1),
    (1536, 4096, 1),
    (8192, 4096, 8),
    (8192, 1024, 1),
]


def plan_of(rows, columns, groups, tokens, float32_out=False, row_scaled=False):
    tiles = rows // 16
    return few_plan(tiles, tiles // groups, columns, tokens, float32_out, row_scaled)


def plans():
    """Each matrix with every kind of result and scale, at 1 and at 16 tokens."""
    kinds = itertools.product((False, True), repeat=2)
    chosen = itertools.product(MATRICES, (1, 16), kinds)
    found = {plan_of(*matrix, tokens, *kind) for matrix, tokens, kind in chosen}
    return sorted(found, key=repr)


def plans_of_many():
    """Every configuration that one of the matrices takes for up to 8192 tokens."""
    found = {
        choose(Product(*matrix, *kind), tokens)
        for matrix in MATRICES
        for kind in itertools.product((False, True), repeat=2)
        for tokens in token_counts(8192)
    }
    return sorted((plan for plan in found if isinstance(plan, ManyPlan)), key=repr)


def inspected(cubin, folder):
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    run = {"capture_output": True, "text": True, "check": True}
    usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file], **run).stdout
    code = subprocess.run([TOOLS / "nvdisasm", "-c", file], **run).stdout
    numbers = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return numbers, re.findall(r"\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)", code)


@pytest.mark.slow
@pytest.mark.parametrize("plan", plans(), ids=repr)
def test_few_tokens(plan, tmp_path):
    image = _images.compile_image(plan, "sm_90a")
    numbers, instructions = inspected(image.cubin, tmp_path)
    assert numbers["STACK"] == numbers["LOCAL"] == 0
    assert not [i for i in instructions if i.startswith(("LDL", "STL"))]
    assert numbers["REG"] * plan.threads <= REGISTER_FILE
    assert image.shared_bytes <= MOST_SHARED
    # 16 bytes of codes a lane; the tensor core; X by bulk copies; results by whole sectors.
    assert any(i.startswith("LDG.E") and ".128" in i for i in instructions)
    assert instructions.count("HMMA.16816.F32.BF16") >= 4 * plan.token_tiles
    assert "UBLKCP.S.G" in instructions
    assert any(i.startswith("STG.E.128") for i in instructions)
    assert "ACQBULK" in instructions, "the kernel does not wait for the one before it"


@pytest.mark.slow
@pytest.mark.parametrize("plan", plans_of_many(), ids=repr)
def test_many_tokens(plan, tmp_path):
    image = _images.compile_image(plan, "sm_90a")
    numbers, instructions = inspected(image.cubin, tmp_path)
    assert numbers["STACK"] == numbers["LOCAL"] == 0
    assert not [i for i in instructions if i.startswith(("LDL", "STL"))]
    assert plan.mma_registers * 128 * plan.warpgroups + 40 * 128 <= REGISTER_FILE
    assert numbers["REG"] * plan.threads <= REGISTER_FILE
    assert image.shared_bytes <= MOST_SHARED
    # The weights are operands from registers: one product of 64 rows for each 16 columns ahead.
    assert sum(i.startswith("HGMMA") for i in instructions) == 4 * plan.depth
    # Were the operands of a product in flight overwritten, it would wait after every one.
    assert sum(i.startswith("WARPGROUP.DEPBAR") for i in instructions) == plan.depth + 1
    assert any(i.startswith("LDG.E") and ".128" in i for i in instructions)
    assert any(i.startswith("UTMALDG.2D") for i in instructions)
    if not plan.float32_out:
        assert any(i.startswith("STSM") for i in instructions)
        assert any(i.startswith("STG.E.128") for i in instructions)
    assert "ACQBULK" in instructions, "the kernel does not wait for the one before it"


@pytest.mark.slow
@pytest.mark.parametrize("float32_out", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 32, 64, 256, 512, 4096])
def test_swiglu(tokens, float32_out, tmp_path):
    """Interleaved gate and up: the same products, an exponential and half the results."""
    plan = choose(Product(6144, 7168, 1, float32_out, False, swiglu=True), tokens)
    numbers, instructions = inspected(_images.compile_image(plan, "sm_90a").cubin, tmp_path)
    assert numbers["STACK"] == numbers["LOCAL"] == 0
    assert any(i.startswith("MUFU.EX2") for i in instructions)
    assert any(i.startswith("SHFL.BFLY") for i in instructions)
    if isinstance(plan, FewPlan):
        assert instructions.count("HMMA.16816.F32.BF16") >= 4 * plan.token_tiles
    else:
        assert sum(i.startswith("HGMMA") for i in instructions) == 4 * plan.depth


@pytest.mark.parametrize("tokens", [1, 64])
def test_parameters_lie_where_the_kernel_reads_them(tokens, tmp_path):
    """The bytes that are packed for a launch, against what the compiled kernel declares."""
    plan = choose(Product(6144, 7168, 1, False, False), tokens)
    module, name = plan.kernel.split(":")
    kernel = getattr(importlib.import_module(module), name)(**dataclasses.asdict(plan))
    made = kernel.compile(f"--gpu-arch sm_90a --keep-cubin --keep-ptx --dump-dir {tmp_path}")
    end, offsets, sizes = 0, [], []
    for kind, align, size in re.findall(
        r"\.param (?:\.(u32|f32|u64)|\.align (\d+) \.b8) \w+(?:\[(\d+)\])?[,\n]", made.__ptx__
    ):
        width = {"u32": 4, "f32": 4, "u64": 8}.get(kind) or int(size)
        start = -(-end // int(align or width)) * int(align or width)
        end = start + width
        offsets.append(start)
        sizes.append(width)
    packed = gemm.FEW_PARAMETERS if tokens == 1 else gemm.MANY_PARAMETERS
    assert packed.offsets == offsets
    assert [struct.calcsize(kind) for kind in packed.kinds] == sizes
    assert packed.size == end


def test_plans_of_many_tokens_fit_their_matrix():
    for rows, columns, groups in MATRICES:
        product = Product(rows, columns, groups, False, False)
        for tokens in token_counts(8192):
            plan = choose(product, tokens)
            if isinstance(plan, ManyPlan):
                assert columns // 64 % (plan.blocks * plan.depth) == 0
                assert plan.token_block % (8 * plan.blocks) == 0
                assert groups == 1 or rows // groups % plan.rows == 0
                sums = plan.token_block * plan.rows * 4
                assert plan.blocks == 1 or plan.stages * plan.x_bytes >= sums
            else:
                assert tokens <= 16


def test_numbers_of_tokens_stand_for_others():
    stand = token_counts(10000)
    assert stand == sorted(set(stand))
    assert all(counted_as(tokens) >= min(tokens, 8192) for tokens in range(1, 9000))
    assert {counted_as(tokens) for tokens in range(17, 20000)} <= set(stand)


def test_every_matrix_has_a_plan():
    for matrix in MATRICES:
        for tokens in range(1, 17):
            plan = plan_of(*matrix, tokens)
            assert isinstance(plan, FewPlan)
            assert plan.tiles * plan.blocks * 64 == matrix[1]
            assert plan.tiles % plan.depth == 0
            assert matrix[0] // 16 // matrix[2] % plan.warps == 0 or matrix[2] == 1
            assert plan.shared_bytes <= MOST_SHARED


def test_a_plan_depends_on_tokens_by_eights_alone():
    for matrix in MATRICES:
        assert len({plan_of(*matrix, tokens) for tokens in range(1, 9)}) == 1
        assert len({plan_of(*matrix, tokens) for tokens in range(9, 17)}) == 1


def test_a_kept_kernel_needs_no_compiler(tmp_path, monkeypatch):
    """From disk in a process that never imports CuTeDSL, and quickly."""
    monkeypatch.setenv(_images.CACHE_VARIABLE, str(tmp_path))
    plan = plan_of(32, 128, 1, 1)
    first = _images.image(plan, "sm_90a")
    assert len(list(tmp_path.iterdir())) == 1
    code = (
        "import sys, time; from dsv4.cute import _images; "
        "from dsv4.cute.sm90.few_plan import few_plan; start = time.perf_counter(); "
        "image = _images.image(few_plan(2, 2, 128, 1, False, False), 'sm_90a'); "
        "print(time.perf_counter() - start, 'cutlass' in sys.modules, len(image.cubin))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    seconds, imported, size = done.stdout.split()
    assert imported == "False"
    assert int(size) == len(first.cubin)
    assert float(seconds) < 0.05


def test_a_damaged_file_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv(_images.CACHE_VARIABLE, str(tmp_path))
    plan = plan_of(32, 128, 1, 1)
    first = _images.image(plan, "sm_90a")
    _images.path(plan, "sm_90a").write_bytes(b"{}\n")
    assert _images.image(plan, "sm_90a").name == first.name


def test_without_the_compiler_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv(_images.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(_images, "compiler", lambda: None)
    with pytest.raises(RuntimeError, match="nvidia-cutlass-dsl is not installed"):
        _images.image(plan_of(32, 128, 1, 1), "sm_90a")
