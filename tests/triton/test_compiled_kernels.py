"""Triton's quantising kernels as compiled for Hopper and Blackwell, run on the CPU.

Bit for bit what the reference gives, by few rows' kernels and by many rows'. The interpreter runs
neither the instructions that are written out for a GPU nor what the compiler does with threads.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests._tools import forked
from tests._tools.ptx import arithmetic as ptx_arithmetic
from tests._tools.ptx import grid as ptx_grid

_HEAD = """
.visible .entry kernel(.param .u64 .ptr .global .align 1 kernel_param_0)
{ .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>;
ld.param.b64 %rd1, [kernel_param_0]; mov.u32 %r1, %tid.x; mad.wide.u32 %rd2, %r1, 4, %rd1;
"""


def ran(body, threads=32, shared=0, size=None):
    """The words that ``body`` leaves, a thread's at ``%rd2``."""
    out = torch.full((size or threads,), -7, dtype=torch.int32)
    ptx_grid.launch(_HEAD + body + "ret; }", [out], (1, 1, 1), threads, shared)
    return out.tolist()


# Left to the nightly profile: other cases run these kernels, with fewer rows or smaller groups.
_ALIKE = {
    *("few norm static", "few gather swizzled", "few gather static", "many swiglu static"),
    *("many rope", "many rope, parts of heads", "many quantize swizzled", "many gather"),
    *("few quantize swizzled", "few rope, parts of heads", "few swiglu", "few gather"),
    *("many rope, half a group", "many norm static", "many gather swizzled", "many gather static"),
    *(
        "few quantize small",
        "fp8, ragged",
        "fp8 swiglu, drawn",
        "many fp8, part of rows",
        "index keys, bf16 queries",
    ),
}


@pytest.mark.first
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "all_cases"),
    [(90, False), *(pytest.param(arch, True, marks=pytest.mark.nightly) for arch in (90, 100))],
)
def test_they_give_the_references_bits(arch, all_cases):
    cases = [] if all_cases else ["--without", *sorted(_ALIKE)]
    done = forked.run_module("tests._tools.run_compiled", str(arch), *cases)
    lines = [line.split(" | ") for line in done.stdout.splitlines()]
    assert not [line for line in lines if line[2] != "equal"], done.stderr[-4000:]
    assert len(lines) == (46 if arch == 100 else 48) - (0 if all_cases else len(_ALIKE))
    kernels = {name for line in lines for name in line[1].split()}
    assert {"_rope_quantize_kernel", "_rope_quantize_row_kernel", "_nvfp4_row_kernel"} <= kernels
    assert {"_fp8_token_kernel", "_fp8_token_many_kernel"} <= kernels
    assert {"_norm_fp8_kernel", "_swiglu_fp8_kernel"} <= kernels
    assert {"_gather_fp8_kernel", "_decode_fp8_kernel"} <= kernels
    assert done.returncode == 0


# Without instructions that 8.0 lacks: E4M3, and in the indexer ``xorsign`` and ``mul.bf16x2``.
OLDEST = [
    *(
        "few quantize",
        "many rope, heads of two chunks",
        "fp8 swiglu",
        "E4M3 to float32",
        "float32 to E4M3",
    ),
    *("entries", "entries behind a norm", "compressed entries", "index queries, many"),
    *("index keys, mxfp4", "index keys, fp8", "attention", "GEMM, fp8", "GEMM, nvfp4"),
    "GEMM, nvfp4, grouped",
]


# GEMMs with four-bit weights, which every architecture compiles to other code.
FOUR_BITS = ["W4A16, 128 tokens", "experts, SwiGLU, 32 rows", "experts, MXFP4, 32 rows"]


def run_of(arch, names):
    """Run cases in another process; return the names of the kernels that ran and the cases' number.

    Every case has to be equal.
    """
    done = forked.run_module("tests._tools.run_compiled", str(arch), *names)
    lines = [line.split(" | ") for line in done.stdout.splitlines()]
    assert [line[2] for line in lines] == ["equal"] * len(lines), (done.stdout, done.stderr[-4000:])
    return {name for line in lines for name in line[1].split()}, len(lines)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 120])
def test_four_bit_weights_on_other_gpus_are_near_float64(arch):
    """A sample of ``compiled_four_bit.CASES``; the nightly profile runs them all."""
    kernels, number = run_of(arch, FOUR_BITS)
    assert number == len(FOUR_BITS)
    assert {"_packed_gemm_kernel", "_packed_sum_kernel", "_grouped_kernel"} <= kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "names"),
    [
        (80, OLDEST),
        *(pytest.param(arch, [], marks=pytest.mark.nightly) for arch in (80, 86, 89, 120)),
    ],
)
def test_kernels_of_other_gpus_give_the_references_bits(arch, names):
    """Quantisers and caches do; GEMMs are near float64 (``OF_REGISTERS``)."""
    kernels, number = run_of(arch, names)
    assert number == (len(names) or 87)
    assert kernels >= {
        *("_queries_kernel", "score_pages_kernel", "_attend_kernel", "_merge_kernel"),
        *("_write_kernel", "_read_kernel", "_entry_kernel", "_gemm_kernel", "_grouped_kernel"),
    }


class TestGrid:
    """The grid that runs compiled kernels."""

    def test_a_parameter_may_be_read_by_its_address(self):
        result = ran("""
            mov.b32 %r3, kernel_param_0; ld.param.b64 %rd3, [%r3];
            mad.wide.u32 %rd4, %r1, 4, %rd3; st.global.b32 [%rd4], %r1;
        """)
        assert result == list(range(32))

    def test_threads_that_branch_apart_meet_again(self):
        result = ran("""
            and.b32 %r2, %r1, 1; setp.eq.b32 %p1, %r2, 0; mov.b32 %r3, 5;
            @%p1 bra $there; mov.b32 %r3, 9; $there: add.s32 %r3, %r3, 1;
            st.global.b32 [%rd2], %r3;""")
        assert result == [6, 10] * 16

    def test_a_barrier_that_some_do_not_reach_is_reported(self):
        with pytest.raises(RuntimeError, match="barrier"):
            ran("setp.lt.u32 %p1, %r1, 32; @%p1 bra $on; bar.sync 0; $on:", threads=64)

    @pytest.mark.parametrize("position", ["%rd1+-4", "%rd2+4"])
    def test_an_access_outside_tensors_is_reported(self, position):
        with pytest.raises(IndexError, match="outside every tensor"):
            ran(f"st.global.b32 [{position}], %r1;")

    def test_an_access_beyond_shared_memory_is_reported(self):
        with pytest.raises(IndexError, match="shared memory"):
            ran("shl.b32 %r2, %r1, 2; st.shared.b32 [%r2], %r1;", shared=124)

    def test_an_unknown_instruction_is_reported(self):
        with pytest.raises(NotImplementedError, match=r"tanh\.approx"):
            ran("tanh.approx.f32 %r2, %r1;")

    def test_names_of_a_scope_are_its_own(self):
        result = ran("""
            mov.b32 %r2, 1; { .reg .b32 x; mov.b32 x, 3; add.s32 %r2, %r2, x; }
            { .reg .b32 x<2>; mov.b32 x1, %r2; add.s32 %r2, %r2, x1; }
            st.global.b32 [%rd2], %r2;""")
        assert result == [8] * 32

    def test_exchanges_within_a_warp(self):
        result = ran("""
            shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; shfl.sync.up.b32 %r3|%p1, %r2, 2, 0, -1;
            redux.sync.max.s32 %r4, %r1, -1; @!%p1 mov.b32 %r3, %r4;
            st.global.b32 [%rd2], %r3;""")
        other = [i ^ 1 for i in range(32)]
        assert result == [31, 31, *other[:-2]]

    def test_a_conversion_of_16_bits_to_others(self):
        result = ran("""
            { .reg .b16 a<3>; cvt.rn.f16.s32 a0, %r1; cvt.bf16.f16 a1, a0; cvt.f32.bf16 %r2, a1;
            cvt.rzi.s32.f32 %r3, %r2; } st.global.b32 [%rd2], %r3;""")
        assert result == list(range(32))

    def test_what_lies_in_shared_memory_is_everyones(self):
        result = ran(
            """
            shl.b32 %r2, %r1, 2; sub.s32 %r3, 252, %r2; st.shared.b32 [%r2], %r1; bar.sync 0;
            ld.shared.b32 %r4, [%r3]; st.global.b32 [%rd2], %r4;""",
            threads=64,
            shared=256,
        )
        assert result == list(range(63, -1, -1))


def exactly(x, y, z):
    """``x * y + z`` rounded once, by way of integers."""
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    near = np.float32(float(exact))  # rounded twice: one of three candidates
    neighbours = [np.nextafter(near, np.float32(s)) for s in (-np.inf, np.inf)]
    return min(
        (near, *neighbours),
        key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.uint32)) & 1),
    )


def test_a_fused_multiply_add_rounds_once():
    """A float64 in between would make a tie of what is none."""
    generator = np.random.default_rng(0)
    x, y = (generator.uniform(1, 2, 2000).astype(np.float32) for _ in range(2))
    shifts = generator.integers(-60, 30, 2000)
    z = np.float32(1) * generator.uniform(-2, 2, 2000).astype(np.float32) * 2.0**shifts
    z[:500] = -(x[:500] * y[:500])
    z = z.astype(np.float32)
    # The product, 2^24 + 1, is a tie in float32, which the last term, lost in float64, decides.
    x[:3], y[:3] = 97, 172961
    z[:3] = [0, 2.0**-40, -(2.0**-40)]
    expected = [exactly(*terms) for terms in zip(x, y, z, strict=True)]
    assert expected[:3] == [2**24, 2**24 + 2, 2**24]
    assert ptx_arithmetic.fma(x, y, z).tolist() == [float(w) for w in expected]
