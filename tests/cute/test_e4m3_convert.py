"""Conversion of NVFP4 weights to E4M3: the compiled kernel, on the CPU and on Hopper."""

from __future__ import annotations

import functools
import tempfile

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.cute.sm90.e4m3_converted_plan import CONVERT, convert_grid
from dsv4.quant.elements import pack
from dsv4.quant.exact_fp8 import to_e4m3, with_row_exponent
from dsv4.quant.formats import FRAGMENTS, NVFP4, QuantizedTensor
from dsv4.quant.fragments import fragment_columns
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise


def weight_of(seed, rows, columns, low):
    """Every code and exponent that a row may have, from ``low`` on."""
    made = strategies.generator(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=made, dtype=torch.uint8)
    exponents = low + torch.randint(0, 15, (rows, columns // 16), generator=made)
    scales = torch.exp2(exponents.float()).to(torch.float8_e4m3fn)
    weight = QuantizedTensor(pack(codes), scales, torch.ones(1), NVFP4)
    weight, exactness = with_row_exponent(weight.with_layout(FRAGMENTS))
    assert exactness.is_exact
    return weight


def expected(weight):
    return fragment_columns(to_e4m3(weight)).view(torch.uint8)


@functools.cache
def ptx():
    pytest.importorskip("cutlass")
    from dsv4.cute.runtime import cubin_cache

    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch sm_90a --keep-ptx --dump-dir {folder}"
        return cubin_cache.kernel_of(CONVERT).compile(options).__ptx__


@settings(max_examples=3)
@given(seed=strategies.seeds(), stages=st.integers(1, 3), low=st.integers(-9, -6))
@example(0, 18, -9)
@example(1, 2, -6)
def test_compiled_kernel(seed, stages, low):
    """Run the PTX of the kernel, one instruction at a time; 18 blocks of columns need two CTAs."""
    from tests._tools.ptx import grid

    weight = weight_of(seed, 32, 128 * stages, low)
    out = torch.zeros(32, 128 * stages, dtype=torch.uint8)
    ctas, chunks = convert_grid(32, 128 * stages)
    operands = [weight.codes, weight.scales, weight.row_exponent, out]
    grid.launch(ptx(), [*operands, stages, chunks, 16], (ctas, 1, 1), CONVERT.threads, 0)
    assert_bitwise(out, expected(weight), "weights")


@pytest.mark.gpu
@settings(max_examples=10)
@given(
    seed=strategies.seeds(),
    row_tiles=st.integers(1, 60),
    stages=st.integers(1, 40),
    low=st.integers(-9, -6),
)
@example(0, 256, 64, -9)
def test_on_a_gpu(seed, row_tiles, stages, low):
    from dsv4.cute.gemm_e4m3 import convert

    weight = weight_of(seed, 16 * row_tiles, 128 * stages, low)
    moved = weight.to("cuda")
    out = torch.full((16 * row_tiles, 128 * stages), 0x7F, dtype=torch.uint8, device="cuda")
    operands = (moved.codes, moved.scales, moved.row_exponent)
    addresses = tuple(operand.data_ptr() for operand in operands)
    stream = torch.cuda.current_stream().cuda_stream
    convert(out.shape[0], out.shape[1], out.get_device(), stream, addresses, out.data_ptr())
    assert_bitwise(out.cpu(), expected(weight), "weights")
