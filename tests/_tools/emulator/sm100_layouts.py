"""Print CuTeDSL's layouts of operands on Blackwell as JSON; run with ``CUTE_DSL_ARCH=sm_100a``.

Its layouts of shared memory and TMEM, and every number that a kernel made of its own MMAs, copies
and layouts is compiled to.
"""

from __future__ import annotations

import itertools
import json
import re
import sys

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as helpers
import cutlass.utils.blockscaled_layout as blockscaled
from cuda.bindings.driver import CUstream
from cutlass import Float4E2M1FN, Float8E4M3FN, Float32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

SHAPES = list(itertools.product((128, 256), (64, 128, 192, 256)))
STEP, STAGES = 256, 3


def tiled_mma(rows, tokens):
    group = tcgen05.CtaGroup.TWO if rows == 256 else tcgen05.CtaGroup.ONE
    k = OperandMajorMode.K
    return helpers.make_blockscaled_trivial_tiled_mma(
        Float4E2M1FN, Float4E2M1FN, k, k, Float8E4M3FN, 16, group, (rows, tokens)
    )


def layouts(rows, tokens):
    """Layouts of both operands, of both scales in shared and in tensor memory, and of the sums."""
    mma, tile = tiled_mma(rows, tokens), (rows, tokens, STEP)
    left_scales = blockscaled.make_smem_layout_sfa(mma, tile, 16, STAGES)
    right_scales = blockscaled.make_smem_layout_sfb(mma, tile, 16, STAGES)
    stage = (None, None, None, 0)
    return (
        helpers.make_smem_layout_a(mma, tile, Float4E2M1FN, STAGES),
        helpers.make_smem_layout_b(mma, tile, Float4E2M1FN, STAGES),
        left_scales,
        right_scales,
        blockscaled.make_tmem_layout_sfa(mma, tile, 16, cute.slice_(left_scales, stage)),
        blockscaled.make_tmem_layout_sfb(mma, tile, 16, cute.slice_(right_scales, stage)),
        mma.make_fragment_C(cute.append(mma.partition_shape_C(tile[:2]), 2)).layout,
    )


def plain(layout):
    """Shape and stride, and the swizzle if there is one."""
    if hasattr(layout, "outer"):
        return [layout.outer.shape, layout.outer.stride, str(layout.inner)]
    return [layout.shape, layout.stride]


def loaded():
    """The layout of ``16x256b.x4``: the column and row of each of a thread's registers."""
    atom = cute.make_copy_atom(tcgen05.Ld16x256bOp(tcgen05.Repetition.x4), Float32)
    start = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
    copy = tcgen05.make_tmem_copy(
        atom, cute.make_tensor(start, cute.make_layout((128, 64), stride=(65536, 1)))
    )
    return plain(copy.layout_dst_tv_tiled), str(copy)


class Kernel:
    """One instruction of each kind for every shape with ``rows`` rows.

    Kernels of one and of two CTAs are separate: ptxas refuses both kinds of instructions in one.
    """

    def __init__(self, rows):
        self.rows = rows

    @cute.jit
    def __call__(self, stream: CUstream):
        self.kernel().launch(grid=[2, 1, 1], block=[32, 1, 1], cluster=[2, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self):
        instructions([shape for shape in SHAPES if shape[0] == self.rows])


def instructions(shapes):
    buffer = cutlass.memory.SmemAllocator().allocate(1 << 17, 1024)
    for rows, tokens in shapes:
        mma = tiled_mma(rows, tokens)
        a, b, sfa, _, tsfa, tsfb, sums = layouts(rows, tokens)
        left = mma.make_fragment_A(pointed(buffer, a))
        right = mma.make_fragment_B(pointed(buffer + (1 << 16), b))
        total = cute.make_tensor(tensor_memory(Float32, 0), sums)[(None, None, None, 0)]
        left_scales = cute.make_tensor(tensor_memory(Float8E4M3FN, 464), tsfa)
        right_scales = cute.make_tensor(tensor_memory(Float8E4M3FN, 480), tsfb)
        group = tcgen05.CtaGroup.TWO if rows == 256 else tcgen05.CtaGroup.ONE
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(group), Float8E4M3FN)
        compact = cute.filter_zeros(left_scales)
        copy = tcgen05.make_s2t_copy(atom, compact)
        source = cute.make_tensor(cute.recast_ptr(buffer, None, Float8E4M3FN), sfa)
        slice_ = copy.get_slice(0)
        parts = slice_.partition_S(cute.filter_zeros(source))
        parts = tcgen05.get_s2t_smem_desc_tensor(copy, parts)
        cute.copy(copy, parts[(None, None, None, None, 0)], slice_.partition_D(compact))
        mma.set(tcgen05.Field.ACCUMULATE, True)
        mma.set(tcgen05.Field.SFA, left_scales[(None, None, 0)].iterator)
        mma.set(tcgen05.Field.SFB, right_scales[(None, None, 0)].iterator)
        first = (None, None, 0, 0)
        cute.gemm(mma, total, left[first], right[first], total)


def pointed(buffer, layout):
    return cute.make_tensor(cute.recast_ptr(buffer, layout.inner, Float4E2M1FN), layout.outer)


def tensor_memory(dtype, column):
    start = cute.make_ptr(Float32, column, cute.AddressSpace.tmem, assumed_align=16)
    return cute.recast_ptr(start, dtype=dtype)


@cute.jit
def evaluate():
    printed["loaded"] = loaded()
    printed["shapes"] = [(shape, [plain(layout) for layout in layouts(*shape)]) for shape in SHAPES]


if __name__ == "__main__":
    printed = {}
    evaluate()
    options = f"--gpu-arch sm_100a --keep-ptx --dump-dir {sys.argv[1]}"
    kernels = [Kernel(rows) for rows in dict.fromkeys(rows for rows, _ in SHAPES)]
    text = "".join(cute.compile(k, CUstream(0), options=options).__ptx__ for k in kernels)
    printed["numbers"] = sorted({int(n) for n in re.findall(r"\b\d{6,}\b", text)})
    printed["instructions"] = sorted(set(re.findall(r"tcgen05\.(?:mma|cp)[\w.:]+", text)))
    print(json.dumps(printed))
