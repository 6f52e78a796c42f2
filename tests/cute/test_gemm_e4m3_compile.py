"""GEMMs with FP8 arithmetic compile for Hopper, on a machine without one."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("triton")

from dsv4.cute.runtime import cubin_cache
from dsv4.cute.runtime.driver import Image
from dsv4.cute.sm90.e4m3_converted_plan import (
    CONVERT,
    ConvertedE4m3Plan,
    converted_plans,
    grouped_converted_plan,
)
from dsv4.cute.sm90.gemm_e4m3_plan import (
    BlockE4m3Plan,
    E4m3Plan,
    GroupedE4m3Plan,
    block_e4m3_plans,
    e4m3_plans,
    grouped_e4m3_plan,
)
from tests._tools.ptx.machine_code import REGISTER_FILE, instructions_of, usage_of

MOST_SHARED = 227 * 1024


class Compiled(NamedTuple):
    """A plan's kernel.

    Attributes:
        ptx: Its PTX.
        parameters: Its parameters as they are packed.
        usage: Its resources, by cuobjdump's names.
        listing: Its instructions.
        names: Their names.
    """

    ptx: str
    parameters: Any
    usage: dict[str, int]
    listing: list[str]
    names: list[str]


def compiled(plan, folder):
    kernel = cubin_cache.kernel_of(plan)
    made = kernel.compile(f"--gpu-arch sm_90a --keep-cubin --keep-ptx --dump-dir {folder}")
    image = Image(made.__cubin__, "kernel", plan.threads, plan.ctas, plan.shared_bytes)
    (listing,) = instructions_of([image], "sm_90a", folder / "code")
    names = [line.split()[0] for line in listing]
    usage = usage_of(image, folder / "cubin")
    return Compiled(made.__ptx__, kernel.abi.parameters, usage, listing, names)


def every_plan():
    """All that any sizes take."""
    yes_or_no = (False, True)
    plans = [
        plan
        for of_kind in (e4m3_plans, converted_plans, block_e4m3_plans)
        for float32_out in yes_or_no
        for other in yes_or_no
        for plan in of_kind(float32_out, other)
    ]
    kinds = [(float32_out, False, False, False) for float32_out in yes_or_no]
    kinds += [(wide, True, weighted, False) for wide in yes_or_no for weighted in yes_or_no]
    kinds += [(False, True, weighted, True) for weighted in yes_or_no]
    plans += [grouped_e4m3_plan(rows, 8, *kind) for rows in (64, 8192) for kind in kinds]
    plans += [grouped_converted_plan(128, *kind) for kind in kinds]
    return list(dict.fromkeys(plans))


# Of each kind the one with the most registers; the others in the nightly profile.
QUICK = (
    E4m3Plan(2, 3, 3, False),
    BlockE4m3Plan(2, 4, 0, False),
    GroupedE4m3Plan(2, 3, 2, False, True, row_weighted=True, quantized_out=True),
    ConvertedE4m3Plan(2, 4, 0, False),
    grouped_converted_plan(128, False, True, True, True),
)


@pytest.mark.parametrize(
    "plan",
    [
        *QUICK,
        *(
            pytest.param(plan, marks=pytest.mark.nightly)
            for plan in every_plan()
            if plan not in QUICK
        ),
    ],
    ids=repr,
)
def test_machine_code_and_parameters(plan, tmp_path):
    """No spills in the loop, MMAs in flight together, registers of each warpgroup, parameters."""
    made = compiled(plan, tmp_path)
    usage, names = made.usage, made.names
    # CUDA 12's assembler stores two registers of one kernel before its loop; CUDA 13's none.
    assert usage["LOCAL"] == 0
    assert usage["STACK"] <= 8
    mmas = [i for i, name in enumerate(names) if name.startswith("QGMMA")]
    assert not any(name.startswith(("LDL", "STL")) for name in names[mmas[0] : mmas[-1]])
    assert plan.shared_bytes <= MOST_SHARED

    blocks = plan.token_rows * plan.row_parts
    assert names.count("QGMMA.64x128x32.F32.E4M3.E4M3") == 4 * blocks
    # One wait for the four MMAs of a block: ptxas did not serialise them.
    assert sum(name.startswith("WARPGROUP.DEPBAR") for name in names) == blocks
    assert not any(name.startswith("LDG") and ".CONSTANT" in name for name in names)
    assert not any(name.startswith("LDG") for name in names[: names.index("ACQBULK")])

    groups = [plan.copy_registers, plan.dequant_registers, plan.mma_registers]
    if not plan.dequant_warps:
        groups.remove(plan.dequant_registers)
    registers = 128 * (plan.copy_registers + 2 * plan.mma_registers)
    registers += 128 * plan.dequant_warpgroups * plan.dequant_registers
    assert registers <= REGISTER_FILE // plan.threads // 8 * 8 * plan.threads
    starts = [i for i, name in enumerate(names) if name.startswith("USETMAXREG")]
    ends = [*starts[1:], len(names)]
    for most, start, end in zip(groups, starts, ends, strict=True):
        used = [int(r) for line in made.listing[start:end] for r in re.findall(r"\bR(\d+)\b", line)]
        assert max(used) < most
    assert_parameters(made.ptx, made.parameters)


def test_conversion(tmp_path):
    """No spills, a wait before the first load, all loads before the first store."""
    made = compiled(CONVERT, tmp_path)
    usage, names = made.usage, made.names
    assert usage["LOCAL"] == usage["STACK"] == 0
    assert usage["REG"] <= 72
    loads = [i for i, name in enumerate(names) if name.startswith("LDG")]
    assert loads[0] > names.index("ACQBULK")
    stores = [i for i, name in enumerate(names) if name.startswith("STG.E.128")]
    assert len(stores) == 2 * CONVERT.pieces
    assert loads[-1] < stores[0]
    assert_parameters(made.ptx, made.parameters)


def assert_parameters(ptx, packed):
    """Parameters lie where the kernel reads them."""
    end, offsets, sizes = 0, [], []
    for kind, align, size in re.findall(
        r"\.param (?:\.(u32|f32|u64)|\.align (\d+) \.b8) \w+(?:\[(\d+)\])?[,\n]", ptx
    ):
        width = {"u32": 4, "f32": 4, "u64": 8}.get(kind) or int(size)
        start = -(-end // int(align or width)) * int(align or width)
        end = start + width
        offsets.append(start)
        sizes.append(width)
    assert packed.offsets == offsets
    assert [struct.calcsize(kind) for kind in packed.kinds] == sizes
    assert packed.size == end


def test_the_documented_plans_are_those_that_are_compiled():
    page = (Path(__file__).parents[2] / "docs" / "kernels" / "gemm_e4m3.md").read_text()
    plans = (E4m3Plan(2, 3, 3, False), E4m3Plan(1, 5, 3, False), *converted_plans(False, False))
    plans += (*block_e4m3_plans(False, False), QUICK[2], QUICK[4])
    for plan in plans:
        stages = f"{plan.stages} + {plan.dequantized_stages}".removesuffix(" + 0")
        dequantizing = plan.dequant_registers if plan.dequant_warps else "-"
        row = (
            f"| {plan.token_block} | {stages} | {plan.threads} | {plan.copy_registers}, "
            f"{dequantizing}, {plan.mma_registers} | {plan.shared_bytes:,} |"
        )
        assert row in page


def loop_plan(*sizes):
    """The plan that dequantizes in the loop and has the least estimate."""
    return min(e4m3_plans(False, False), key=lambda plan: plan.dense_us(*sizes))


def test_wide_tiles_where_they_fill_the_gpu():
    assert loop_plan(4096, 4096, 256).token_rows == 1
    assert loop_plan(4096, 4096, 1024).token_rows == 2
    assert loop_plan(32768, 1024, 1024).token_rows == 2
    assert loop_plan(4096, 4096, 4096).token_rows == 2
    assert grouped_e4m3_plan(128 * 8, 8, False, False, False, False).token_rows == 1
    assert grouped_e4m3_plan(256 * 8, 8, False, False, False, False).token_rows == 2
