"""Configurations of the ``tcgen05`` GEMM compile for Blackwell, on a machine without one.

Compiled and inspected, not run. Every one of them in the nightly profile, else a sample with every
pair of values of two fields.
"""

from __future__ import annotations

import collections
import itertools
import os
import re
import struct

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("triton")

from dsv4.cute.runtime import cubin_cache
from dsv4.cute.sm100.gemm_plan import (
    K_SPLITS,
    SHARED_LIMIT,
    TCGEN05_ABI,
    TOKEN_BLOCKS,
    Tcgen05Plan,
)
from dsv4.cute.sm100.plans import GemmProblem, candidates
from tests._tools import covering
from tests._tools.ptx.machine_code import REGISTER_FILE, instructions_of, parameters_of, usage_of

SPELLED = {"sm_100a": "4X", "sm_103a": "BLOCK16"}  # four scales for the 64 columns of an MMA
BOTH = (False, True)


def layouts(ctas):
    """Tokens of a tile, CTAs of a cluster and parts of K, with one CTA or two to an MMA."""
    if ctas == 1:
        splits = [(64, splits, splits) for splits in K_SPLITS]
        return [(tokens, 1, 1) for tokens in TOKEN_BLOCKS] + splits
    return [(tokens, 2, 1) for tokens in TOKEN_BLOCKS]


def plans(ctas):
    """Every configuration."""
    return [
        Tcgen05Plan(tokens, cluster, *kind, splits)
        for kind in itertools.product(BOTH, BOTH)
        for tokens, cluster, splits in layouts(ctas)
    ]


def test_these_are_all_there_are():
    chosen = {
        plan
        for kind in itertools.product(BOTH, BOTH)
        for plan in candidates(GemmProblem(65536, 2048, 1, *kind))
    }
    assert chosen == {plan for ctas in (1, 2) for plan in plans(ctas)}


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
    assert numbers["SHARED"] <= 1024, "what the system reserves of every CTA"
    # MMAs of 64 columns with a scale for 16, and copies of scales: of one CTA, or all of two.
    both = ".2CTA" if plan.cta_group == 2 else ""
    assert begins("UTCOMMA") == count(f"UTCOMMA{both}.{SPELLED[arch]}") > 0
    assert begins("UTCCP") == count(f"UTCCP.T.S{both}.4x32dp128bit") > 0
    assert begins("UTMALDG.2D") == count(f"UTMALDG.2D{both}") > 0
    scales, shared = count(f"UTMALDG.3D{both}"), count(f"UTMALDG.3D.MULTICAST{both}")
    assert begins("UTMALDG.3D") == scales + shared
    assert bool(shared) == plan.multicasts_scales
    # Commits of a stage and of an accumulator, to both CTAs.
    assert count("UTCBAR.2CTA.MULTICAST") == (begins("UTCBAR") if plan.multicasts_scales else 0)
    # A chunk of 32 tokens of a warp's 32 rows.
    assert begins("LDTM") == count("LDTM.16dp256bit.x4") > 0
    assert begins("UTMACCTL.PF"), "tensor maps are prefetched"
    assert begins("UTCATOMSWS"), "TMEM is allocated and freed"
    assert any(i.startswith("ACQBULK") for i in instructions), "griddepcontrol.wait"
    assert bool(begins("MUFU.EX2")) == bool(begins("SHFL.BFLY")) == plan.swiglu
    # Sums of the other parts of K are read by 16 bytes a lane.
    assert bool(count("LD.E.128")) == (plan.k_splits > 1)
    if plan.float32_out:
        assert begins("STSM") == begins("STG.E.128") == 0
        assert begins("STG.E")
    else:
        assert begins("STG.E.128")
        assert bool(begins("STSM")) == (not plan.swiglu)
    return counted(instructions)


COUNTED = ("UTCOMMA", "UTCCP", "UTMALDG", "UTCBAR", "LDTM", "UTMACCTL.PF")
COUNTED += ("LD.E.128", "LDG.E.128", "STG.E", "STS", "SHFL", "MUFU.EX2")


def counted(instructions):
    """Return how many instructions there are of each spelling of these.

    Stores of 4 bytes to shared memory are left out: their number differs by one between CuTeDSL's
    libraries for CUDA 12 and for CUDA 13.
    """
    names = (i.split()[0] for i in instructions)
    spellings = (name for name in names if name.startswith(COUNTED) and name != "STS")
    return dict(collections.Counter(spellings))


def check_each(plans, arch, folder, check):
    """Compile and inspect all of a batch, and name those that fail ``check``.

    Returns:
        What ``check`` returns for each plan, by its name: figures for a snapshot.
    """
    images = [cubin_cache.compile_image(plan, arch) for plan in plans]
    listings = instructions_of(images, arch, folder / "code")
    failures, figures = [], {}
    for plan, image, instructions in zip(plans, images, listings, strict=True):
        try:
            usage = usage_of(image, folder / "cubin")
            figures[repr(plan)] = check(plan, arch, image, usage, instructions)
        except AssertionError as error:
            failures.append(f"{plan}: {error}")
    assert not failures, "\n".join(failures)
    return figures


def check_parameters(abi, text):
    """The parameters of a launch are those that PTX declares."""
    offsets, sizes, end = parameters_of(text)
    assert abi.parameters.offsets == offsets
    assert [struct.calcsize(kind) for kind in abi.parameters.kinds] == sizes
    assert abi.parameters.size == end


def subjects_of(batches):
    """Names of the configurations that are compiled in every profile."""
    return [repr(plan) for batch in batches if not batch.marks for plan in batch.values[0]]


# All pairs: nothing here runs on the GPUs that tests have run on. The other architecture differs in
# the name of an instruction: every value of a field.
BATCHES = {
    "sm_100a": covering.batches([*plans(1), *plans(2)], 16, covering.ALL),
    "sm_103a": covering.batches([*plans(1), *plans(2)], 16, 0),
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
    """The PTX of one kernel: instructions, and parameters as ``TCGEN05_ABI`` declares them."""
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_100a")
    plan = Tcgen05Plan(256, 2, False)
    kernel = cubin_cache.kernel_of(plan)
    text = kernel.compile(f"--gpu-arch sm_100a --keep-ptx --dump-dir {tmp_path}").__ptx__
    assert "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16 " in text
    assert "tcgen05.cp.cta_group::2.32x128b.warpx4 " in text
    assert "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r" in text
    assert f"{plan.instruction_descriptor:#x}" in text
    # Copies complete bytes in the CTA of even rank: bit 24 of the mbarrier's address is 0.
    masks = set(map(int, re.findall(r"and\.b32\s+%r\d+, %r\d+, (-\d{8,});", text)))
    assert masks
    assert all(mask & 1 << 24 == 0 and mask | 1 << 24 | 1023 == -1 for mask in masks)
    check_parameters(TCGEN05_ABI, text)
