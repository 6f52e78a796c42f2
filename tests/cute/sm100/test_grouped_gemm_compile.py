"""Configurations of the ``tcgen05`` grouped GEMM compile for Blackwell, without one.

Compiled and inspected, not run. Every one of them in the nightly profile, else a sample with every
pair of values of two fields.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("triton")

from dsv4.cute.runtime import cubin_cache
from dsv4.cute.sm100.gemm_plan import SHARED_LIMIT
from dsv4.cute.sm100.grouped_gemm_plan import (
    GROUPED_TCGEN05_ABI,
    PREFETCHED_STAGES,
    GroupedTcgen05Plan,
)
from tests._tools import covering
from tests._tools.ptx.machine_code import REGISTER_FILE
from tests.cute.sm100.test_gemm_compile import (
    SPELLED,
    check_each,
    check_parameters,
    counted,
    subjects_of,
)
from tests.cute.sm100.test_grouped_gemm import PLANS


def check(plan, arch, image, numbers, instructions):
    def count(name):
        return sum(i.split()[0] == name for i in instructions)

    def begins(name):
        return sum(i.startswith(name) for i in instructions)

    assert numbers["STACK"] == numbers["LOCAL"] == begins("LDL") == begins("STL") == 0
    # Constant loads may be moved to before the wait for the preceding kernel.
    assert not any(".CONSTANT" in i for i in instructions)
    assert numbers["REG"] * plan.threads <= REGISTER_FILE
    assert image.shared_bytes == plan.shared_bytes <= SHARED_LIMIT
    assert (image.threads, image.cluster) == (256, plan.ctas)
    assert numbers["SHARED"] <= 1024, "what the system reserves of every CTA"
    # MMAs of 64 columns with a scale for 16, and copies of scales: of one CTA, or all of two.
    both = ".2CTA" if plan.cta_group == 2 else ""
    assert begins("UTCOMMA") == count(f"UTCOMMA{both}.{SPELLED[arch]}") > 0
    assert begins("UTCCP") == count(f"UTCCP.T.S{both}.4x32dp128bit") > 0
    # Codes of rows and of tokens, scales of rows; nothing is multicast.
    assert begins("UTMALDG.2D") == count(f"UTMALDG.2D{both}") > 0
    assert begins("UTMALDG.3D") == count(f"UTMALDG.3D{both}") > 0
    assert begins("UTMACCTL.PF"), "tensor maps are prefetched"
    # Scales of tokens are loaded and stored by 16 bytes a lane.
    assert count("LDG.E.128")
    assert count("STS.128")
    assert begins("FENCE.VIEW.ASYNC") >= PREFETCHED_STAGES, "the tensor core sees what was written"
    assert begins("MEMBAR.ALL.GPU") <= (2 if plan.cta_group == 2 else 0), (
        "only at barriers of the cluster"
    )
    # Commits of a stage and of an accumulator, to both CTAs.
    assert count("UTCBAR.2CTA.MULTICAST") == (begins("UTCBAR") if plan.cta_group == 2 else 0)
    # A chunk of 32 tokens of a warp's 32 rows.
    assert begins("LDTM") == count("LDTM.16dp256bit.x4") > 0
    assert begins("UTCATOMSWS"), "TMEM is allocated and freed"
    assert any(i.startswith("ACQBULK") for i in instructions), "griddepcontrol.wait"
    assert count("SHFL.UP"), "tiles are counted by a warp"
    # Gate and up are exchanged, and maxima of codes; sums of padding rows.
    assert bool(begins("MUFU.EX2")) == plan.swiglu
    assert bool(count("SHFL.BFLY")) == (plan.swiglu or plan.quantized_out or plan.swizzled_out)
    if plan.quantized_out:
        assert count("STG.E.U8"), "block scales"
        assert begins("STG.E.128") == 0
    else:
        assert begins("STG.E.128"), "rows of no expert, and results in bfloat16"
        assert not plan.float32_out or count("STG.E")
        assert plan.float32_out or bool(begins("STSM")) == (not plan.swiglu)
    return counted(instructions)


# All pairs: nothing here runs on the GPUs that tests have run on. The other architecture differs in
# the name of an instruction: every value of a field.
BATCHES = {
    "sm_100a": covering.batches(PLANS, 18, covering.ALL),
    "sm_103a": covering.batches(PLANS, 18, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "batch"),
    [
        pytest.param(arch, *batch.values, id=f"{arch}-{batch.id}", marks=batch.marks)
        for arch, batches in BATCHES.items()
        for batch in batches
    ],
)
def test_every_configuration(arch, batch, tmp_path, snapshots):
    snapshots.check(arch, check_each(batch, arch, tmp_path, check))


@pytest.mark.parametrize("arch", SPELLED)
def test_figures_are_of_these_configurations(arch, snapshots):
    snapshots.check_no_others(arch, subjects_of(BATCHES[arch]))


def test_instructions_and_parameters(tmp_path):
    """The PTX of one kernel: instructions, their order, and parameters as declared."""
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_100a")
    plan = GroupedTcgen05Plan(64, 2, False)
    kernel = cubin_cache.kernel_of(plan)
    text = kernel.compile(f"--gpu-arch sm_100a --keep-ptx --dump-dir {tmp_path}").__ptx__
    assert "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16 " in text
    assert "tcgen05.cp.cta_group::2.32x128b.warpx4 " in text
    assert f"{plan.instruction_descriptor:#x}" in text
    fence, arrival = "fence.proxy.async.shared::cta;", "mbarrier.arrive.shared::cluster.b64"
    pieces = text.split(fence)
    assert len(pieces) == PREFETCHED_STAGES + 1
    assert all(arrival in piece for piece in pieces[1:]), "the leader's arrival follows the fence"
    stored = [piece.count("st.shared.v4.u32") for piece in pieces]
    assert stored == [4 * plan.scale_tiles] * PREFETCHED_STAGES + [0], "stores precede the fence"
    check_parameters(GROUPED_TCGEN05_ABI, text)
