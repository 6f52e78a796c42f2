"""Every Triton kernel compiles for the GPUs that it may run on, on a machine without them.

For Hopper and data-centre Blackwell without spills; for others what spills is listed.

Compiled and inspected, not run: what runs is tested elsewhere.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from dsv4 import device, dispatch
from tests._tools import forked

REGISTER_FILE = 65536
FOUR_BIT = ("dsv4.triton.grouped_gemm:", "dsv4.triton.gemm_packed:gemm_swiglu")
KERNEL_OPS = {
    row.op
    for row in dispatch.IMPLEMENTATIONS
    # GEMMs with four-bit weights have their own test, which does not initialise weights.
    if row.name == "triton" and not row.target.startswith(FOUR_BIT)
}
# Operators whose launchers write NVFP4 codes, which Blackwell converts by an instruction.
E2M1_OPS = {op for op in KERNEL_OPS if op.endswith("_quantize")} - {"indexer_rotate_quantize"}
E2M1_OPS |= {"quantize_nvfp4", "quantize_mxfp4", "quantize_index_queries", "compress_write"}
E2M1_OPS |= {"compress_write_paged"}
# What writes weights: launched without programmatic dependence (``launch_options.in_order``).
IN_ORDER = {"fragments", "expert_gather"}


def compiled(arch, *arguments, program="compile_kernels"):
    done = forked.run_module(f"tests._tools.{program}", str(arch), *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_wait_is_looked_for_along_every_way():
    """Blocks need not lie in the order in which they run."""
    from tests._tools.compile_kernels import _waits

    lines = ["{{", "bra.uni $L1;", "$L2: // in a loop", "st.global.b32 [%rd1], %r1;"]
    lines += ["@%p1 bra $L1;", "ret;", "$L1:", "{}", "bra $L2;", "}}"]
    way = "\n".join(lines)
    assert _waits(way.format("griddepcontrol.wait;"))
    assert not _waits(way.format("ld.param.b32 %r1, [a];"))
    assert not _waits(way.format("@%p2 bra $L2;\ngriddepcontrol.wait;"))


STATEFUL = ("compressor_update", "compress_write", "compress_write_paged")


@pytest.fixture(scope="module")
def ordered():
    """Kernels of operators whose order with others is looked at, by one process for all."""
    return compiled(90, "--quick", "--brief", "expert_gather", *STATEFUL)


def test_a_kernel_that_loads_experts_ends_with_a_fence(ordered):
    """The kernel behind it lets a GEMM start, which loads weights before it waits."""
    [kernel] = (kernel for kernel in ordered if kernel["op"] == "expert_gather")
    assert (kernel["fences"], kernel["dependents"]) == (True, False)


@pytest.mark.parametrize("op", STATEFUL)
def test_pitfall_18_state_is_read_and_written_behind_the_wait(ordered, op):
    """The preceding kernel writes what this one pools, and may still read what this one writes."""
    kernels = [kernel for kernel in ordered if kernel["op"] == op]
    assert kernels
    assert all(kernel["waits"] for kernel in kernels)


def assert_loads_come_first(kernels):
    """One trip to memory, then one barrier to a row that 16 warps share; the compiler's choice.

    Where registers seem short it moves loads behind others' arrival, and a launch of 1.3 us gets
    slower by 0.1 to 0.3.
    """
    norms = [k for k in kernels if k["kernel"] == "_rms_norm_kernel" and k["threads"] == 512]
    assert norms
    assert all(k["exchanges"].count("BAR") == 1 for k in norms)
    for kernel in norms:
        if kernel["exchanges"].count("LDG") == 2:
            assert kernel["exchanges"][:2] == ["LDG", "LDG"], kernel
    shared = [k["exchanges"] for k in kernels if k["kernel"] == "_norm_quantize_few_kernel"]
    assert shared
    for exchanges in shared:
        first = next(i for i, what in enumerate(exchanges) if what == "SHFL")
        assert "LDG" not in exchanges[first:], exchanges
    posts = [k for k in kernels if k["kernel"] == "_post_kernel" and k["threads"] == 64]
    assert posts
    assert all(set(k["exchanges"]) == {"LDG"} for k in posts)


# Bytes of stack that the assembler of Triton 3.6 and 3.7 needs where that of 3.9 needs none.
_STACK_OF_OLDER = {
    "_rope_quantize_row_kernel": 24,
    "_attend_kernel": 8,
    "score_pages_kernel": 8,
}


# Bytes of stack that kernels need on GPUs whose tensor cores take operands from registers.
_STACK_OF_SMALLER = {
    "_gemm_kernel": 48,
    "_mixing_gemm_kernel": 8,
    "_post_kernel": 16,
    "_rope_quantize_row_kernel": 16,
    "score_kernel": 8,
}
# The same where E4M3 is converted by integers.
_STACK_OF_INTEGERS = {"_attend_kernel": 8, "_gemm_kernel": 144, "_pool_many_kernel": 8}
SMALLER = (80, 86, 89, 120, 121)


def _allowed_stack(arch, kernel):
    import triton

    version = tuple(map(int, triton.__version__.split(".")[:2]))
    allowed = 0 if version >= (3, 9) else _STACK_OF_OLDER.get(kernel, 0)
    if arch < 89:
        allowed = max(allowed, _STACK_OF_INTEGERS.get(kernel, 0))
    return max(allowed, _STACK_OF_SMALLER.get(kernel, 0)) if arch in SMALLER else allowed


def assert_fits(arch, kernel):
    assert kernel["stack"] <= _allowed_stack(arch, kernel["kernel"]), kernel
    assert not kernel["local"], kernel
    assert kernel["shared"] <= device.shared_memory(divmod(arch, 10)), kernel
    assert kernel["registers"] * kernel["threads"] <= REGISTER_FILE, kernel
    # The next iteration overwrites registers that an unfinished instruction still reads.
    assert kernel["unfinished"] == 0, kernel
    # Without the wait, programmatic launch would read what is still being written. What writes
    # weights is launched without it: products read them before they wait.
    assert kernel["waits"] == (arch >= 90 and kernel["op"] not in IN_ORDER), kernel


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.parametrize(
    ("arch", "how"),
    [(90, ["--quick"]), *(pytest.param(arch, [], marks=pytest.mark.nightly) for arch in (90, 100))],
    ids=["90 quick", "90", "100"],
)
def test_every_kernel_compiles_and_fits(arch, how):
    """One test, because compiling takes minutes: no local memory, resources, the wait, E2M1."""
    kernels = compiled(arch, *how)
    assert {kernel["op"] for kernel in kernels} == KERNEL_OPS | {"fragments", "push"}
    for kernel in kernels:
        assert_fits(arch, kernel)
    assert_loads_come_first(kernels)
    assert {k["op"] for k in kernels if k["e2m1"]} == (E2M1_OPS if arch >= 100 else set())


@pytest.mark.slow
def test_kernels_whose_code_differs_on_blackwell_fit_it():
    """Some that convert to E2M1 there, by the function that all have, and some on tensor cores.

    ``test_every_kernel_compiles_and_fits`` has all of them, nightly.
    """
    converting = {"quantize_nvfp4", "quantize_mxfp4", "swiglu_quantize", "quantize_index_queries"}
    assert converting <= E2M1_OPS
    ops = converting | {"hc_pre_norm", "gemm", "compressor_projections"}
    kernels = compiled(100, "--brief", *sorted(ops))
    assert {kernel["op"] for kernel in kernels} == ops
    for kernel in kernels:
        assert_fits(100, kernel)
    assert {k["op"] for k in kernels if k["e2m1"]} == converting


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "ops"),
    [
        (80, ["hc_pre_norm", "indexer_queries", "indexer_select"]),
        (86, ["compressor_projections", "norm_rope_write_kv", "read_kv", "quantize_nvfp4"]),
        (120, ["hc_pre_norm", "route_hash", "gemm"]),
    ],
)
def test_what_did_not_run_on_other_gpus_fits_them(arch, ops):
    """Tiles took as much shared memory as Hopper has, and code took instructions of newer GPUs.

    On 12.0 prompts of 1024 tokens (``hc_pre_norm``, ``route_*``) and FP8 weights of more than 64
    (``gemm``) raised, on 8.0 every step with an indexer, with 99 KB ``compressor_projections`` of
    more than 32 tokens. Before 8.9 nothing converts to E4M3 but integers. What goes wrong there is
    a prompt's; ``test_every_kernel_fits_other_gpus`` has all sizes, nightly.
    """
    kernels = compiled(arch, "--prompt", *ops)
    assert {kernel["op"] for kernel in kernels} == set(ops)
    for kernel in kernels:
        assert_fits(arch, kernel)


@pytest.mark.nightly
@pytest.mark.parametrize("arch", SMALLER)
def test_every_kernel_fits_other_gpus(arch):
    kernels = compiled(arch)
    assert {kernel["op"] for kernel in kernels} == KERNEL_OPS | {"fragments", "push"}
    for kernel in kernels:
        assert_fits(arch, kernel)
    assert {k["op"] for k in kernels if k["e2m1"]} == (E2M1_OPS if arch >= 100 else set())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "how"),
    [
        (86, ["--quick"]),
        (120, ["--quick"]),
        *(pytest.param(arch, [], marks=pytest.mark.nightly) for arch in (*SMALLER, 90, 100)),
    ],
)
def test_attention_fits_with_every_shape_that_may_be_chosen(arch, how):
    """And takes no more shared memory than its shape says, from which programs of an SM follow."""
    kernels = compiled(arch, *how, program="compile_attention")
    assert "_attend_kernel" in {kernel["kernel"] for kernel in kernels}
    for kernel in kernels:
        assert_fits(arch, kernel)
        assert kernel["shared"] <= kernel["bound"], kernel
