"""The conversions that all kernels share, over every bit pattern near a rounding border."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from dsv4.testing.assertions import assert_bitwise  # noqa: E402
from dsv4.triton._lib import index_keys, numerics  # noqa: E402
from dsv4.triton._runtime import launch_options  # noqa: E402

KERNELS = ("triton",)
REFERENCE = False


@triton.jit
def _narrow(x, y, n, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, numerics.narrow(tl.load(x + i, mask=i < n), DTYPE), mask=i < n)


@triton.jit
def _widen(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, numerics.widen(tl.load(x + i, mask=i < n)), mask=i < n)


@triton.jit
def _e4m3_bits(x, y, n, TILE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    bits = numerics.e4m3_tile(value) if TILE else numerics.e4m3_bits(value)
    tl.store(y + i, bits, mask=i < n)


@triton.jit
def _e4m3_value(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, numerics.e4m3_value(tl.load(x + i, mask=i < n)), mask=i < n)


@triton.jit
def _e4m3_bfloat16(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = index_keys.e4m3_values(tl.load(x + i, mask=i < n), tl.bfloat16)
    tl.store(y + i, values, mask=i < n)


@triton.jit
def _exponents(x, y, z, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exponent = numerics.ceil_log2(tl.load(x + i, mask=i < n, other=1.0))
    tl.store(y + i, exponent, mask=i < n)
    tl.store(z + i, numerics.power_of_two(tl.minimum(exponent, 127)), mask=i < n)


def around(values):
    """Each float32 value, the midpoints between neighbours, and one ulp to either side of all."""
    values = values[values.isfinite()].unique()
    middle = (values[1:].double() + values[:-1].double()) / 2
    points = torch.cat((values, middle.float()))
    up = torch.nextafter(points, torch.tensor(torch.inf))
    down = torch.nextafter(points, torch.tensor(-torch.inf))
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3.4e38, 1e-45, -1e-45])
    return torch.cat((points, up, down, special))


def every(dtype):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(dtype)


def run(kernel, x, out, *constants):
    n = x.numel()
    kernel[(triton.cdiv(n, 65536),)](x, out, n, *constants, BLOCK=65536)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rounds_to_nearest_even(device, dtype):
    x = around(every(dtype).float()).to(device)
    kind = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
    got = run(_narrow, x, torch.empty(x.shape, dtype=dtype, device=device), kind)
    assert_bitwise(got, x.to(dtype), "narrow")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widen_is_exact(device, dtype):
    x = every(dtype).to(device)
    got = run(_widen, x, torch.empty(x.shape, device=device))
    assert_bitwise(got, x.float(), "widen")


def encoded_values():
    """All bfloat16 values, and what decides about a code or its neighbour in float32."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    borders = around(torch.cat((codes.float(), torch.tensor([464.0, -464.0, 480.0, 1e9]))))
    return torch.cat((borders, every(torch.bfloat16).float()))


@pytest.mark.parametrize("tile", [False, True])
def test_e4m3_bits(device, tile):
    """The kernels' own conversion: an instruction where the GPU has one."""
    x = encoded_values().to(device)
    got = run(_e4m3_bits, x, torch.empty(x.shape, dtype=torch.uint8, device=device), tile)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert_bitwise(got.view(torch.float8_e4m3fn).float(), expected.float(), "E4M3")
    assert bool((got[x.isnan()] & 0x7F == 0x7F).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_e4m3_value(device, dtype):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).to(device)
    kernel = _e4m3_value if dtype == torch.float32 else _e4m3_bfloat16
    got = run(kernel, codes, torch.empty(256, dtype=dtype, device=device))
    assert_bitwise(got, codes.view(torch.float8_e4m3fn).to(dtype), "value")


@pytest.mark.gpu
def test_a_gpu_that_converts_gives_the_same_bits_by_integers():
    """Code of compute capability 8.0, compiled for the GPU that is there."""
    gpu = torch.device("cuda")
    x, codes = encoded_values().to(gpu), torch.arange(256, device=gpu).to(torch.uint8)
    bits, numbers = torch.empty(x.shape, dtype=torch.uint8, device=gpu), torch.empty(256).to(gpu)
    own_bits, own_numbers = torch.empty_like(bits), torch.empty_like(numbers)
    older = {"supported_fp8_dtypes": launch_options.OLDER_FP8}
    for options, coded, decoded in (({}, own_bits, own_numbers), (older, bits, numbers)):
        grid = (triton.cdiv(x.numel(), 1024),)
        _e4m3_bits[grid](x, coded, x.numel(), False, BLOCK=1024, **options)
        kernel = _e4m3_value[(1,)](codes, decoded, 256, BLOCK=256, **options)
        assert ("e4m3x2" in kernel.asm["ptx"]) == (not options)  # of cvt; names have e4m3 alone
    assert_bitwise(bits, own_bits, "codes")
    assert_bitwise(numbers, own_numbers, "values")


def test_exponents(device):
    x = torch.exp2(torch.arange(-126.0, 127.0))
    x = torch.cat((x, torch.nextafter(x, torch.tensor(torch.inf)), x * 1.99)).to(device)
    exponent = torch.empty(x.shape, dtype=torch.int32, device=device)
    power = torch.empty(x.shape, device=device)
    _exponents[(triton.cdiv(x.numel(), 1024),)](x, exponent, power, x.numel(), BLOCK=1024)
    mantissa, expected = torch.frexp(x)
    expected = torch.where(mantissa == 0.5, expected - 1, expected)
    assert_bitwise(exponent, expected.to(torch.int32), "exponent")
    assert_bitwise(power, torch.exp2(expected.double()).float(), "power")
