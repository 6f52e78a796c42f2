"""CuTeDSL kernels that dispatch can choose compile for Hopper, on a machine without one.

And those for few tokens for Blackwell. Compiled and inspected, not run: what runs is tested
elsewhere. Every one of them in the nightly profile, else a sample (``tests._tools.covering``).
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("triton")

from dsv4.cute import grouped_gemm
from dsv4.cute.grouped_problem import Experts
from dsv4.cute.runtime import cubin_cache
from dsv4.cute.runtime.architectures import BLACKWELL_NAMES, HOPPER, shared_limit
from dsv4.cute.sm90 import grouped_gemm_plans
from dsv4.cute.sm90.gemm_fp8_small_m_plan import SmallMFp8Plan, fp8_small_m_plan
from dsv4.cute.sm90.gemm_fp8_wgmma_plan import Fp8WgmmaPlan, fp8_plan
from dsv4.cute.sm90.gemm_small_m_plan import SmallMPlan, SmallMRingPlan, small_m_plan
from dsv4.cute.sm90.gemm_wgmma_plan import WgmmaPlan
from dsv4.cute.sm90.grouped_gemm_small_m_plan import GroupedSmallMPlan
from dsv4.cute.sm90.grouped_gemm_wgmma_plan import GroupedWgmmaPlan
from dsv4.cute.sm90.plans import GemmProblem, choose, counted_as, token_counts
from tests._tools import covering
from tests._tools.deepseek_sizes import INTERLEAVED, MATRICES, ROUTED
from tests._tools.ptx.machine_code import (
    REGISTER_FILE,
    assert_parameters_lie_where_they_are_read,
    instructions_of,
    machine_code,
    usage_of,
)

MOST_SHARED = 227 * 1024
TOP_K = 6
_BATCH = 8
# ``make quick`` runs none of the slow tests, and need not wait for what they are given.
_TOKENS = (64,) if os.environ.get("HYPOTHESIS_PROFILE") == "quick" else token_counts(8192)
# Those for few tokens, which Blackwell has, too.
SMALL_M = (SmallMPlan, SmallMRingPlan, GroupedSmallMPlan)


def plan_of(rows, columns, groups, tokens, float32_out=False, row_scaled=False):
    tiles = rows // 16
    return small_m_plan(tiles, tiles // groups, columns, tokens, float32_out, row_scaled)


@functools.cache
def plans():
    """Every configuration that one of the matrices takes for up to 8192 tokens."""
    return {
        choose(GemmProblem(*matrix, *kind), tokens)
        for matrix in MATRICES
        for kind in itertools.product((False, True), repeat=2)
        for tokens in _TOKENS
    }


@functools.cache
def plans_of_fp8():
    """Every configuration for FP8 weights and up to 8192 tokens."""
    return {
        fp8_plan(GemmProblem(*matrix, float32_out, False), tokens, folded)
        for matrix in MATRICES
        for float32_out in (False, True)
        for tokens in _TOKENS
        for folded in (False, True)
    }


def plans_of_fp8_and_few_tokens():
    """Every configuration for FP8 weights and up to 32 tokens."""
    return {
        fp8_small_m_plan(GemmProblem(*matrix, *kind), tokens, folded)
        for matrix in MATRICES
        for kind in itertools.product((False, True), repeat=2)
        for tokens in (8, 16, 32)
        for folded in (False, True)
    } - {None}


def plans_of_swiglu():
    """Interleaved gate and up."""
    return {
        choose(GemmProblem(*matrix, *kind, swiglu=True), tokens)
        for matrix in INTERLEAVED
        for kind in itertools.product((False, True), repeat=2)
        for tokens in (1, 16, 32, 64, 256, 512, 4096)
    }


def routed_kinds(experts, inner, hidden):
    """Both GEMMs of routed experts, with scales of rows, weights of them, float32 results."""
    for scaled, weighted in ((False, False), (False, True), (True, True)):
        yield Experts(2 * inner, hidden, experts, False, scaled, True, weighted)
    if experts == ROUTED[0][0]:
        yield Experts(2 * inner, hidden, experts, False, True, True, True, True)
        yield Experts(2 * inner, hidden, experts, False, True, True, True, True, True)
    for float32_out, scaled in ((False, False), (True, False), (False, True)):
        yield Experts(hidden, inner, experts, float32_out, scaled)


def plans_of_experts():
    """Configurations of routed experts for these numbers of tokens; for others, every tile."""
    every = [expected for sizes in ROUTED for expected in routed_kinds(*sizes)]
    chosen = {
        grouped_gemm_plans.typical_plan(expected, TOP_K * tokens)
        for expected in every
        for tokens in (1, 8, 64, 512, 4096, 32768)
    }
    actual = {plan for plan in chosen if isinstance(plan, GroupedWgmmaPlan)}
    tiles = {(plan.mma_widths, plan.warpgroups) for plan in actual}
    for expected in every:
        for plan in grouped_gemm.plans(expected, 32768 * TOP_K):
            if (
                isinstance(plan, GroupedWgmmaPlan)
                and (plan.mma_widths, plan.warpgroups) not in tiles
            ):
                tiles.add((plan.mma_widths, plan.warpgroups))
                actual.add(plan)
    return actual


def plans_of_few_rows():
    """Every configuration that these experts take while most of them have few rows."""
    every = [expected for sizes in ROUTED for expected in routed_kinds(*sizes)]
    return {
        grouped_gemm_plans.typical_plan(expected, rows)
        for expected in every
        for rows in (1, 2 * expected.experts, 8 * expected.experts)
    }


def every_kind(experts, inner, hidden):
    """Every kind of result that an expert's product can be asked for, those of no layer too."""
    for float32_out, scaled, weighted in itertools.product((False, True), repeat=3):
        yield Experts(hidden, inner, experts, float32_out, scaled)
        yield Experts(2 * inner, hidden, experts, float32_out, scaled, True, weighted)
        for swizzled in () if float32_out else (False, True):
            yield Experts(2 * inner, hidden, experts, False, scaled, True, weighted, True, swizzled)


def plans_of_other_kinds():
    """Configurations of an expert's GEMM on Hopper that no layer asks for."""
    most = 32768 * TOP_K
    actual = {
        plan for expected in every_kind(*ROUTED[0]) for plan in grouped_gemm.plans(expected, most)
    }
    return actual - plans_of_experts() - plans_of_few_rows()


def batches(plans, kind):
    """Those of some kinds, a few at a time: the disassembler takes longer to start than to read.

    A second of compiling is a configuration: the sample has every value of a field, and pairs of
    values are the nightly profile's.
    """
    return covering.batches([plan for plan in plans if type(plan) in kind], _BATCH, option=0)


def check_each(batch, folder, check, arch=HOPPER):
    """Compile and inspect all of a batch, and say which of them ``check`` objects to.

    Returns:
        What ``check`` returns for each plan, by its name: figures for a snapshot.
    """
    images = [cubin_cache.compile_image(plan, arch) for plan in batch]
    listings = instructions_of(images, arch, folder / "code")
    failures, figures = [], {}
    for plan, image, listing in zip(batch, images, listings, strict=True):
        numbers = usage_of(image, folder / "cubin")
        instructions = [line.split()[0] for line in listing]
        try:
            assert_only_weights_come_early(plan, instructions)
            assert_parameters_lie_where_they_are_read(plan, image)
            figures[repr(plan)] = check(plan, image, numbers, instructions)
        except AssertionError as error:
            failures.append(f"{plan}: {error}")
    assert not failures, "\n".join(failures)
    return figures


def counts_of(instructions, *names):
    """Return how many instructions begin with each name."""
    return {name: sum(i.startswith(name) for i in instructions) for name in names}


def subjects_of(batches):
    """Names of the configurations that are compiled in every profile."""
    return [repr(plan) for batch in batches if not batch.marks for plan in batch.values[0]]


def assert_only_weights_come_early(plan, instructions):
    """Constant loads are of weights: the assembler may move them to before the wait."""
    loads = [i for i in instructions if i.startswith("LDG.")]
    early = [i for i in instructions[: instructions.index("ACQBULK")] if i.startswith("LDG.")]
    assert all(".CONSTANT" in i for i in early)
    if not isinstance(plan, SmallMPlan | GroupedSmallMPlan):
        assert not any(".CONSTANT" in i for i in loads)


def copies_of_x(plan):
    """Bulk copies; of a dense GEMM from 9 tokens on, copies of all threads that then arrive."""
    dense = not isinstance(plan, GroupedSmallMPlan)
    return "ARRIVES.LDGSTSBAR" if dense and plan.token_tiles > 1 else "UBLKCP.S.G"


def loads_codes_by_16_bytes(plan, instructions):
    """Return whether a lane loads 16 bytes of codes at once, to registers or shared memory."""
    name = "LDGSTS.E" if isinstance(plan, SmallMRingPlan) else "LDG.E"
    return any(i.startswith(name) and ".128" in i for i in instructions)


MANY_TOKENS = batches(plans(), (WgmmaPlan,))
FP8_WEIGHTS = batches(plans_of_fp8(), (Fp8WgmmaPlan,))
EXPERTS = batches(plans_of_experts(), (GroupedWgmmaPlan,))
SWIGLU = batches(plans_of_swiglu(), (*SMALL_M, WgmmaPlan))


@pytest.mark.slow
@pytest.mark.parametrize("batch", batches(plans(), SMALL_M))
def test_few_tokens(batch, tmp_path):
    def check(plan, image, numbers, instructions):
        assert numbers["STACK"] == numbers["LOCAL"] == 0
        assert not [i for i in instructions if i.startswith(("LDL", "STL"))]
        assert numbers["REG"] * plan.threads * plan.ctas_per_sm <= REGISTER_FILE
        assert image.shared_bytes * plan.ctas_per_sm <= MOST_SHARED
        # 16 bytes of codes a lane; the tensor core; X by bulk copies; results by whole sectors.
        assert loads_codes_by_16_bytes(plan, instructions)
        assert instructions.count("HMMA.16816.F32.BF16") >= 4 * plan.token_tiles
        assert any(i.startswith(copies_of_x(plan)) for i in instructions)
        assert any(i.startswith("STG.E.128") for i in instructions)
        assert "ACQBULK" in instructions, "the kernel does not wait for the one before it"
        # It would wait for the weights, and X would be asked for after them.
        assert not [i for i in instructions if i.startswith("MEMBAR")]

    check_each(batch, tmp_path, check)


@pytest.mark.slow
@pytest.mark.parametrize("batch", MANY_TOKENS)
def test_many_tokens(batch, tmp_path, snapshots):
    def check(plan, image, numbers, instructions):
        def count(name):
            return sum(i.startswith(name) for i in instructions)

        assert numbers["STACK"] == numbers["LOCAL"] == count("LDL") == count("STL") == 0
        assert plan.mma_registers * 128 * plan.warpgroups + 40 * 128 <= REGISTER_FILE
        assert numbers["REG"] * plan.threads <= REGISTER_FILE
        assert image.shared_bytes == plan.shared_bytes <= MOST_SHARED
        # Were the operands of a product in flight overwritten, it would wait after every one: there
        # is one wait for every piece of 32 or 64 columns.
        assert 0 < count("WARPGROUP.DEPBAR") - 1 <= count("HGMMA") // plan.k_steps
        # Weights come by TMA copies, and from shared memory by 16 bytes a lane.
        assert count("UTMALDG.2D")
        assert count("LDS.128") >= plan.stage_k_blocks * plan.warp_tiles
        assert not [i for i in instructions if i.startswith("LDG.E") and ".128" in i]
        if not plan.float32_out:
            assert count("STSM" if not plan.swiglu else "STS")
            assert count("STG.E.128")
        assert "ACQBULK" in instructions, "the kernel does not wait for the one before it"
        # Sums go to the block that adds them without anybody waiting for their way, and no thread
        # waits at a barrier of the cluster for what it has loaded.
        assert bool(count("STAS.128")) == bool(count("UCGABAR")) == (plan.ctas > 1)
        assert not count("MEMBAR")
        # A GEMM of 64 rows for each 16 columns; copies of weights before and after the wait.
        return counts_of(instructions, "HGMMA", "WARPGROUP.DEPBAR", "UTMALDG.2D")

    snapshots.check("many tokens", check_each(batch, tmp_path, check))


@pytest.mark.slow
@pytest.mark.parametrize("batch", FP8_WEIGHTS)
def test_fp8_weights(batch, tmp_path, snapshots):
    def check(plan, image, numbers, instructions):
        def count(name):
            return sum(i.startswith(name) for i in instructions)

        assert numbers["STACK"] == numbers["LOCAL"] == count("LDL") == count("STL") == 0
        assert plan.mma_registers * 128 * plan.warpgroups + 40 * 128 <= REGISTER_FILE
        assert numbers["REG"] * plan.threads * plan.ctas_per_sm <= REGISTER_FILE
        assert image.shared_bytes == plan.shared_bytes
        assert (plan.shared_bytes + 1024) * plan.ctas_per_sm <= MOST_SHARED + 1024
        # Registers move from the warps that copy to those that multiply where a block is alone.
        assert bool(count("USETMAXREG")) == (plan.ctas_per_sm == 1)
        # GEMMs are waited for in groups, not one by one.
        assert 0 < count("WARPGROUP.DEPBAR") < count("HGMMA")
        # Codes and X come by TMA copies, a lane's pairs of codes from there by single loads.
        assert count("UTMALDG.2D")
        assert count("LDS.U16")
        assert bool(count("HMUL2.BF16")) == plan.folded
        assert "ACQBULK" in instructions, "the kernel does not wait for the one before it"
        if not plan.float32_out:
            assert count("STSM")
            assert count("STG.E.128")
        assert bool(count("STAS.128")) == bool(count("UCGABAR")) == (plan.ctas > 1)
        # The sums of a stage are scaled and added; of folded scales they go on.
        assert (count("FFMA") >= plan.token_block // 2) == (not plan.folded)
        assert not count("MEMBAR")
        # A stage has 32 pairs of codes a lane, its start 16, of which 8 are dequantized.
        codes = ("LDS.U16", "F2FP.F16.E4M3.UNPACK", "HMUL2.BF16")
        return counts_of(instructions, "HGMMA", "WARPGROUP.DEPBAR", "UTMALDG.2D", *codes)

    snapshots.check("FP8 weights", check_each(batch, tmp_path, check))


@pytest.mark.slow
@pytest.mark.parametrize("batch", batches(plans_of_fp8_and_few_tokens(), (SmallMFp8Plan,)))
def test_fp8_weights_and_few_tokens(batch, tmp_path):
    def check(plan, image, numbers, instructions):
        def count(name):
            return sum(i.startswith(name) for i in instructions)

        assert numbers["STACK"] == numbers["LOCAL"] == count("LDL") == count("STL") == 0
        assert numbers["REG"] * plan.threads * plan.ctas_per_sm <= REGISTER_FILE
        assert (image.shared_bytes + 1024) * plan.ctas_per_sm <= MOST_SHARED + 1024
        # Lanes copy 16 bytes of codes, of which pairs of lines come to L2, and read 16.
        assert count("LDGSTS.E.BYPASS.LTC256B.128") == 4 * plan.stages + 4 * (
            plan.stages < plan.blocks
        )
        assert count("LDS.128") >= 4 + 4 * plan.token_tiles
        # A pair of codes is converted once, whatever the tokens: 64 in 16 x 128 for 32 lanes.
        assert count("F2FP.F16.E4M3.UNPACK") == 32
        assert instructions.count("HMMA.16816.F32.BF16") == 8 * plan.token_tiles
        assert count("UBLKCP.S.G"), "X comes by bulk copies"
        assert count("UBLKPF"), "codes are prefetched to L2"
        assert bool(count("STAS.128")) == bool(count("UCGABAR")) == (plan.ctas > 1)
        assert count("STG.E.128")
        # Nothing is read before the preceding kernel's results are there.
        wait = instructions.index("ACQBULK")
        assert not [i for i in instructions[:wait] if i.startswith(("LDG", "UBLKCP"))]
        assert not count("MEMBAR")

    check_each(batch, tmp_path, check)


@pytest.mark.slow
@pytest.mark.parametrize("batch", EXPERTS)
def test_routed_experts(batch, tmp_path, snapshots):
    def check(plan, image, numbers, instructions):
        def count(name):
            return sum(i.startswith(name) for i in instructions)

        assert numbers["STACK"] == numbers["LOCAL"] == count("LDL") == count("STL") == 0
        assert plan.mma_registers * 128 * plan.warpgroups + 40 * 128 <= REGISTER_FILE
        assert numbers["REG"] * plan.threads <= REGISTER_FILE
        assert image.shared_bytes == plan.shared_bytes <= MOST_SHARED
        # GEMMs are waited for in groups, not one by one.
        assert 0 < count("WARPGROUP.DEPBAR") < count("HGMMA")
        # Weights come by TMA copies, and from shared memory by 16 bytes a lane.
        assert count("UTMALDG.2D")
        assert count("LDS.128") >= plan.stage_k_blocks * plan.warp_tiles
        # Codes by 4 bytes, block scales by 1; else rows that no expert owns are filled by 16.
        assert count("STG.E.U8") if plan.quantized_out else count("STG.E.128")
        assert "ACQBULK" in instructions, "offsets are the kernel before's"
        assert bool(count("MUFU.EX2")) == bool(count("SHFL.BFLY")) == plan.swiglu
        assert count("SHFL.UP"), "the sum of the experts' tiles before each"
        # Every round of dequantized scales is 4 words a lane: one before the loops, then in each.
        shared = len(plan.mma_widths) * plan.stage_k_blocks * plan.warp_tiles // 4 + 1
        assert count("STS.128") >= shared * plan.shares_scales
        # 4 GEMMs for each 64 columns and width, a wait for every 32 columns and after a loop.
        return counts_of(instructions, "HGMMA", "WARPGROUP.DEPBAR", "UTMALDG.2D", "SHFL.UP")

    snapshots.check("experts", check_each(batch, tmp_path, check))


@pytest.mark.slow
@pytest.mark.parametrize("batch", batches(plans_of_few_rows(), (GroupedSmallMPlan,)))
def test_routed_experts_of_few_rows(batch, tmp_path):
    def check(plan, image, numbers, instructions):
        def count(name):
            return sum(i.startswith(name) for i in instructions)

        assert numbers["STACK"] == numbers["LOCAL"] == count("LDL") == count("STL") == 0
        assert numbers["REG"] * plan.threads <= REGISTER_FILE
        assert image.shared_bytes == plan.shared_bytes <= MOST_SHARED
        assert loads_codes_by_16_bytes(plan, instructions)
        assert count("HMMA.16816.F32.BF16") >= 4 * plan.token_tiles
        assert count(copies_of_x(plan))
        assert count("STG.E.U8") if plan.quantized_out else count("STG.E.128")
        assert "ACQBULK" in instructions, "offsets are the kernel before's"
        assert bool(count("MUFU.EX2")) == bool(count("SHFL.BFLY")) == plan.swiglu

    check_each(batch, tmp_path, check)


@pytest.mark.slow
@pytest.mark.nightly
def test_other_kinds_of_experts(tmp_path):
    """They compile and fit; a few keep up to 80 bytes of a thread in local memory."""

    def check(plan, image, numbers, instructions):
        assert numbers["STACK"] <= 80
        assert numbers["REG"] * plan.threads <= REGISTER_FILE
        assert image.shared_bytes <= MOST_SHARED
        assert any(
            i.startswith("HMMA" if isinstance(plan, GroupedSmallMPlan) else "HGMMA")
            for i in instructions
        )

    plans = plans_of_other_kinds()
    assert len(plans) > 100
    for batch in batches(plans, (GroupedWgmmaPlan, GroupedSmallMPlan)):
        check_each(*batch.values, tmp_path, check)


@pytest.mark.slow
@pytest.mark.parametrize("batch", SWIGLU)
def test_swiglu(batch, tmp_path, snapshots):
    """The same GEMMs, an exponential and half the results."""

    def check(plan, image, numbers, instructions):
        assert numbers["STACK"] == numbers["LOCAL"] == 0
        assert any(i.startswith("MUFU.EX2") for i in instructions)
        assert any(i.startswith("SHFL.BFLY") for i in instructions)
        if isinstance(plan, SmallMPlan):
            assert instructions.count("HMMA.16816.F32.BF16") >= 4 * plan.token_tiles
            return {}
        return counts_of(instructions, "HGMMA")

    snapshots.check("SwiGLU", check_each(batch, tmp_path, check))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "batches"),
    [
        ("many tokens", MANY_TOKENS),
        ("FP8 weights", FP8_WEIGHTS),
        ("experts", EXPERTS),
        ("SwiGLU", SWIGLU),
    ],
)
def test_figures_are_of_these_configurations(group, batches, snapshots):
    snapshots.check_no_others(group, subjects_of(batches))


def plans_of_blackwell(arch):
    """Configurations that dispatch can choose there."""
    kinds = list(itertools.product((False, True), repeat=2))
    dense = [GemmProblem(*matrix, *kind) for matrix in MATRICES for kind in kinds]
    dense += [GemmProblem(*matrix, *kind, swiglu=True) for matrix in INTERLEAVED for kind in kinds]
    routed = [*every_kind(*ROUTED[0])]
    routed += [expected for sizes in ROUTED[1:] for expected in routed_kinds(*sizes)]
    actual = [choose(product, tokens, arch) for product in dense for tokens in (1, 16)]
    for expected in routed:
        actual += grouped_gemm.plans(expected, 4096 * TOP_K, arch)
    return list(dict.fromkeys(actual))


@pytest.mark.slow
@pytest.mark.parametrize("batch", batches(plans_of_blackwell("sm_100a"), SMALL_M))
def test_blackwell(batch, tmp_path):
    """The kernels of few tokens for another family: the same instructions, no spills."""

    def check(plan, image, numbers, instructions):
        def count(name):
            return sum(i.startswith(name) for i in instructions)

        assert numbers["STACK"] == numbers["LOCAL"] == count("LDL") == count("STL") == 0
        assert numbers["REG"] * plan.threads * plan.ctas_per_sm <= REGISTER_FILE
        assert image.shared_bytes == plan.shared_bytes <= MOST_SHARED
        assert loads_codes_by_16_bytes(plan, instructions)
        assert count("HMMA.16816.F32.BF16") >= 4 * plan.token_tiles
        assert count(copies_of_x(plan))
        codes = isinstance(plan, GroupedSmallMPlan) and plan.quantized_out
        assert count("STG.E.U8") if codes else count("STG.E.128")
        assert "ACQBULK" in instructions, "the kernel does not wait for the one before it"
        assert bool(count("MUFU.EX2")) == plan.swiglu

    check_each(batch, tmp_path, check, "sm_100f")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        kind if kind is SmallMPlan else pytest.param(kind, marks=pytest.mark.nightly)
        for kind in SMALL_M
    ],
    ids=lambda kind: kind.__name__,
)
def test_one_image_is_for_all_of_blackwell(kind):
    """The machine code for the family is that for each of its architectures."""
    every = plans_of_blackwell("sm_100a")
    assert every == plans_of_blackwell("sm_103a")
    assert {
        (type(plan), cubin_cache.target(plan, arch)) for plan in every for arch in BLACKWELL_NAMES
    } == {(kind, "sm_100f") for kind in SMALL_M}
    plan = next(plan for plan in every if type(plan) is kind)
    assert len(codes_of(plan, ("sm_100f", *BLACKWELL_NAMES))) == 1
    assert cubin_cache.target(plan, HOPPER) == HOPPER
    assert cubin_cache.target(WgmmaPlan(64, 4, 1, 2, False, False), "sm_103a") == "sm_103a"


def codes_of(plan, architectures):
    """The machine codes of a plan's kernel for some architectures, without repetitions."""
    return {machine_code(cubin_cache.compile_image(plan, arch).cubin) for arch in architectures}


def plans_of_rtx():
    """Configurations of the models' sizes that dispatch can choose with 99 KB of shared memory."""
    dense = [GemmProblem(*matrix, False, False) for matrix in MATRICES]
    actual = [choose(problem, tokens, "sm_120a") for problem in dense for tokens in (1, 16)]
    for sizes in ROUTED:
        for expected in routed_kinds(*sizes):
            actual += grouped_gemm.plans(expected, 4096 * TOP_K, "sm_120a")
    return list(dict.fromkeys(actual))


def test_plans_fit_the_shared_memory_of_rtx():
    limit = shared_limit("sm_120a")
    assert all(plan.shared_bytes <= limit for plan in plans_of_rtx())
    problem = GemmProblem(8192, 4096, 8, False, False)
    measured, smaller = (choose(problem, 16, arch) for arch in (HOPPER, "sm_120a"))
    assert measured.shared_bytes > limit >= smaller.shared_bytes
    others = [choose(GemmProblem(*m, False, False), 1, "sm_120a") for m in MATRICES]
    assert others.count(None) == 0
    flash, pro = (next(s for s in ROUTED if s[2] == hidden) for hidden in (4096, 7168))
    assert all(grouped_gemm.plans(kind, 64, "sm_120a") for kind in routed_kinds(*flash))
    assert not all(grouped_gemm.plans(kind, 64, "sm_120a") for kind in routed_kinds(*pro))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SMALL_M, ids=lambda kind: kind.__name__)
def test_rtx(kind, tmp_path):
    """Hopper's kernels of few tokens for compute capability 12.x: clusters, hardly any stack."""
    plans = [plan for plan in plans_of_rtx() if type(plan) is kind]
    chosen = plans if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else plans[:2]
    assert chosen

    def check(plan, image, numbers, instructions):
        assert numbers["STACK"] + numbers["LOCAL"] <= 24  # of 16 tokens by 65536 rows, float32 sums
        assert numbers["REG"] * plan.threads <= REGISTER_FILE
        assert image.shared_bytes == plan.shared_bytes <= shared_limit("sm_120a")
        assert any(name.startswith("HMMA.16816.F32.BF16") for name in instructions)
        assert "ACQBULK" in instructions, "the kernel does not wait for the one before it"

    names = ("sm_120a", "sm_121a")
    assert {cubin_cache.target(plan, arch) for plan in chosen for arch in names} == {"sm_120f"}
    assert len(codes_of(chosen[0], ("sm_120f", *names))) == 1
    check_each(chosen, tmp_path, check, "sm_120f")


@pytest.mark.parametrize("arch", BLACKWELL_NAMES)
def test_blackwell_has_the_kernels_of_few_tokens_for_any_number(arch):
    for matrix in MATRICES:
        product = GemmProblem(*matrix, False, False)
        assert {choose(product, tokens, arch) for tokens in (1, 8)} == {plan_of(*matrix, 1)}
        assert {choose(product, tokens, arch) for tokens in (9, 17, 9000)} == {plan_of(*matrix, 9)}
    for sizes in ROUTED:
        for expected in routed_kinds(*sizes):
            actual = grouped_gemm.plans(expected, 4096 * TOP_K, arch)
            assert all(isinstance(plan, GroupedSmallMPlan) for plan in actual)
            assert all(plan.shared_bytes <= MOST_SHARED for plan in actual)


def test_plans_of_many_tokens_fit_their_matrix():
    for rows, columns, groups in MATRICES:
        product = GemmProblem(rows, columns, groups, False, False)
        for tokens in token_counts(8192):
            plan = choose(product, tokens)
            if isinstance(plan, WgmmaPlan):
                assert columns // 64 % plan.stage_k_blocks == 0
                assert columns // 64 >= plan.ctas * plan.stage_k_blocks
                assert groups == 1 or rows // groups % plan.rows == 0
                ring = plan.stages * (plan.stage_k_blocks * plan.x_bytes + plan.weight_bytes)
                assert plan.ctas == 1 or plan.has_exchange_buffer or ring >= plan.exchange_bytes
                assert 1 <= plan.early_stages <= plan.stages
            else:
                assert tokens <= 16


@pytest.mark.parametrize("folded", [False, True])
def test_plans_of_fp8_fit_their_matrix(folded):
    for rows, columns, groups in MATRICES:
        for tokens in token_counts(8192):
            plan = fp8_plan(GemmProblem(rows, columns, groups, False, False), tokens, folded)
            assert plan.folded == folded
            assert plan.stages >= 2
            assert columns // 128 >= plan.ctas
            assert groups == 1 or rows // groups % plan.rows == 0
            ring = plan.stages * (2 * plan.x_bytes + plan.weight_bytes)
            assert plan.ctas == 1 or plan.has_exchange_buffer or ring >= plan.exchange_bytes


def test_fp8_plans_are_those_of_both_kinds_of_activations():
    for matrix, folded in itertools.product(MATRICES, (False, True)):
        with_scales, without = (GemmProblem(*matrix, False, scaled) for scaled in (True, False))
        for tokens in token_counts(8192):
            assert fp8_plan(with_scales, tokens, folded) == fp8_plan(without, tokens, folded)


def test_plans_of_experts_fit_their_matrix():
    for sizes in ROUTED:
        for expected in routed_kinds(*sizes):
            candidates = grouped_gemm.plans(expected, 4096 * TOP_K)
            assert candidates == list(dict.fromkeys(candidates))
            assert isinstance(candidates[-1], GroupedWgmmaPlan)
            for plan in (plan for plan in candidates if isinstance(plan, GroupedSmallMPlan)):
                assert (plan.columns, plan.ctas) == (expected.columns, 1)
                assert plan.segment_rows <= 8 * plan.token_tiles <= 16
                assert expected.columns // 64 % (plan.splits * plan.stages) == 0
                assert plan.shared_bytes <= MOST_SHARED
                kind = (plan.float32_out, plan.row_scaled, plan.swiglu, plan.row_weighted)
                assert (*kind, plan.quantized_out, plan.swizzled_out) == expected[3:]
            for plan in (plan for plan in candidates if isinstance(plan, GroupedWgmmaPlan)):
                assert expected.columns // 64 % plan.stage_k_blocks == 0
                assert (plan.ctas, plan.shared_bytes <= MOST_SHARED) == (1, True)
                kind = (plan.float32_out, plan.row_scaled, plan.swiglu, plan.row_weighted)
                assert (*kind, plan.quantized_out, plan.swizzled_out) == expected[3:]
            chosen = {
                grouped_gemm_plans.typical_plan(expected, rows)
                for rows in range(1, 4096 * TOP_K, 97)
            }
            assert chosen <= set(candidates)


def test_too_many_experts_have_no_plan():
    most = Experts(256, 256, grouped_gemm_plans.MOST_EXPERTS, False, False)
    assert grouped_gemm_plans.typical_plan(most, 64) is not None
    assert grouped_gemm_plans.typical_plan(most._replace(experts=most.experts + 1), 64) is None


def test_rows_of_experts_stand_for_others():
    counted = [grouped_gemm_plans.counted_as(rows) for rows in range(1, 5000)]
    assert counted == sorted(counted)
    assert all(result >= rows for rows, result in enumerate(counted, 1))
    assert all(2 * rows >= result for rows, result in enumerate(counted, 1))


def test_numbers_of_tokens_stand_for_others():
    stand = token_counts(10000)
    assert stand == sorted(set(stand))
    assert all(counted_as(tokens) >= min(tokens, 8192) for tokens in range(1, 9000))
    assert {counted_as(tokens) for tokens in range(17, 20000)} <= set(stand)


@pytest.mark.parametrize(
    "of_one_kind", [plans, plans_of_fp8, plans_of_swiglu, plans_of_experts, plans_of_few_rows]
)
def test_resources(of_one_kind):
    """This holds for every plan, compiled or not."""
    for plan in of_one_kind():
        assert plan.shared_bytes <= MOST_SHARED
        assert plan.threads <= 1024
        assert plan.threads % 32 == 0
        if isinstance(plan, WgmmaPlan | GroupedWgmmaPlan):
            assert plan.mma_registers * 128 * plan.warpgroups + 40 * 128 <= REGISTER_FILE


def test_every_matrix_has_a_plan():
    for matrix in MATRICES:
        for tokens in range(1, 17):
            plan = plan_of(*matrix, tokens)
            assert isinstance(plan, SmallMPlan)
            assert plan.tiles * plan.ctas * 64 == matrix[1]
            assert plan.stages <= plan.tiles
            any_rest = isinstance(plan, SmallMRingPlan) or plan.rounds == 2
            assert any_rest or plan.tiles % plan.stages == 0
            assert matrix[0] // 16 // matrix[2] % plan.warps == 0 or matrix[2] == 1
            assert plan.shared_bytes <= MOST_SHARED


def test_a_plan_depends_on_tokens_by_eights_alone():
    for matrix in MATRICES:
        assert len({plan_of(*matrix, tokens) for tokens in range(1, 9)}) == 1
        assert len({plan_of(*matrix, tokens) for tokens in range(9, 17)}) == 1


@pytest.mark.slow
def test_a_kept_kernel_needs_no_compiler(tmp_path, monkeypatch):
    """A kernel is loaded from disk in a process that never imports CuTeDSL, and quickly."""
    monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, str(tmp_path))
    plan = plan_of(32, 128, 1, 1)
    first = cubin_cache.image(plan, "sm_90a")
    assert len(list(tmp_path.iterdir())) == 1
    code = (
        "import sys, time; from dsv4.cute.runtime import cubin_cache; "
        "from dsv4.cute.sm90.gemm_small_m_plan import small_m_plan; start = time.perf_counter(); "
        "image = cubin_cache.image(small_m_plan(2, 2, 128, 1, False, False), 'sm_90a'); "
        "print(time.perf_counter() - start, 'cutlass' in sys.modules, len(image.cubin))"
    )
    for _ in range(5):  # until it is quick: other processes may hold the processor
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
        )
        taken, imported, size = done.stdout.split()
        assert imported == "False"
        assert int(size) == len(first.cubin)
        if float(taken) < 0.05:
            return
    pytest.fail(f"took {taken} s, wanted 0.05 at most in one of five processes")


def test_a_damaged_file_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, str(tmp_path))
    plan = plan_of(32, 128, 1, 1)
    first = cubin_cache.image(plan, "sm_90a")
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"{}\n")
    assert cubin_cache.image(plan, "sm_90a").name == first.name


def test_without_the_compiler_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(cubin_cache, "compiler", lambda: None)
    with pytest.raises(RuntimeError, match="nvidia-cutlass-dsl is not installed"):
        cubin_cache.image(plan_of(32, 128, 1, 1), "sm_90a")
