"""Instructions run one by one on the CPU.

Those that make NVFP4 of results and bfloat16 of E4M3, and those that pack sums of attention.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.ops.quantize import quantize
from dsv4.testing import strategies
from tests._tools.emulator import blackwell_emulator
from tests._tools.ptx import machine as ptx_machine

CODES = blackwell_emulator.emulated_source(blackwell_emulator.Global(), "dsv4.cute.device.quantize")
_KINDS = [0.0, -0.0, math.nan, math.inf, -math.inf, 2.0**-133, 3e38, 6.0, 0.25, 0.75]


def coded(block, scale):
    """Bytes of codes and the scale byte of 16 bfloat16, as two lanes make them together."""
    words = block.view(torch.int16).numpy().view(np.uint32)
    halves = np.concatenate([words & 0x7FFF, words >> 16 & 0x7FFF])
    byte, divisor = CODES._block_scale(int(halves.max()) << 16, np.float32(scale))
    codes = [
        CODES._packed(
            [CODES._rounded(int(w), half, divisor) for half in range(2) for w in words[i : i + 4]]
        )
        for i in (0, 4)
    ]
    return np.array(codes, np.uint32).view(np.uint8), byte


@given(
    strategies.seeds(),
    st.integers(-126, 100),
    st.integers(-130, 120),
    st.lists(st.tuples(st.integers(0, 15), st.sampled_from(_KINDS)), max_size=3),
)
@example(0, -126, -130, [])
@example(1, 100, 120, [])
@example(2, 0, 127, [(3, 3e38)])
def test_they_give_the_references_bits(seed, scale_exponent, exponent, special):
    generator = strategies.generator(seed)
    scale = float((torch.rand(1, generator=generator) + 1) * 2.0**scale_exponent)
    block = (torch.randn(1, 16, generator=generator) * 2.0**exponent).bfloat16()
    # Of the size that the scale is for, too, where codes are neither all 0 nor all saturated.
    near = (torch.randn(1, 16, generator=generator) * scale * 500).bfloat16()
    for values in (block, near):
        for position, value in special:
            values[0, position] = value
        global_scale = torch.tensor([scale])
        expected = quantize(
            values, scaling="static", global_scale=global_scale, backend="reference"
        )
        codes, byte = coded(values[0], scale)
        assert byte == int(expected.scales.view(torch.uint8))
        assert codes.tolist() == expected.codes[0].tolist()


def test_every_pair_of_e4m3_codes_becomes_bfloat16(monkeypatch):
    """Compare exactly, in order, NaN as NaN; the upper half of the word does not matter."""
    ptx = pytest.importorskip("dsv4.cute.device.ptx")
    ptx_machine.install(monkeypatch)
    codes = torch.arange(256, dtype=torch.uint8)
    converted = codes.view(torch.float8_e4m3fn).bfloat16().view(torch.int16).numpy().view(np.uint16)
    for low in range(256):
        high = (low * 37 + 11) % 256
        word = ptx.e4m3x2_to_bfloat16x2(0xABCD0000 | high << 8 | low)
        actual = np.array([word & 0xFFFF, word >> 16], np.uint16)
        nan = (actual & 0x7FFF) > 0x7F80
        expected = converted[[low, high]]
        assert (nan == ((expected & 0x7FFF) > 0x7F80)).all()
        assert (actual[~nan] == expected[~nan]).all()


def exchanged(values, ptx):
    """Eight float32 packed in five words, and back."""
    words = ptx.pack_accumulators([np.float32(value) for value in values])
    assert len(words) == 5
    halves = [ptx.unpack_accumulators(words[2 * h : 2 * h + 2], words[4], h) for h in range(2)]
    assert [word for half in halves for word in half] == [*ptx.unpack_all_accumulators(words)]
    return np.array([word & 0xFFFFFFFF for half in halves for word in half], np.uint32)


@given(st.lists(st.floats(width=32), min_size=8, max_size=8))
@example([1.0, -2.0, 3.0, -4.0, 5.0, -6.0, 7.0, -8.0])
@example([math.nan, math.inf, -math.inf, 0.0, -0.0, 2.0**-126, 2.0**-149, 3.4e38])
@example([float(np.nextafter(np.float32(2**i), np.float32(0))) for i in range(8)])
@example([1 + 2.0**-11 - 2.0**-23, 1 + 2.0**-12, 1.9999999, 1e30, -1e30, 1e-30, 1.0, 0.1])
def test_packed_sums_keep_twelve_bits_of_each(values):
    """Whatever their neighbours; NaN and infinities stay; what bfloat16 holds is exact."""
    ptx = pytest.importorskip("dsv4.cute.device.ptx")
    with pytest.MonkeyPatch.context() as patched:
        ptx_machine.install(patched)
        whole = np.array(values, np.float32)
        rounded = torch.from_numpy(whole.copy()).bfloat16().float().numpy()
        result, again = (exchanged(x, ptx).view(np.float32) for x in (whole, rounded))
    assert (np.isnan(result) == np.isnan(whole)).all()
    far = np.abs(whole) > 3.4e38  # the factor that makes up for bits left out may be one too many
    assert (result[np.isinf(whole)] == whole[np.isinf(whole)]).all()
    ordinary = np.isfinite(whole) & ~far
    off = np.abs(result[ordinary].astype(np.float64) - whole[ordinary])
    assert (off <= 2.0**-11.6 * np.abs(whole[ordinary].astype(np.float64)) + 2.0**-137).all()
    normal = np.isfinite(rounded) & (np.abs(rounded) >= 2.0**-126)
    assert (again[normal] == rounded[normal]).all()
    assert (again[rounded == 0] == 0).all()


def test_packed_sums_are_off_by_nothing_on_average():
    ptx = pytest.importorskip("dsv4.cute.device.ptx")
    values = strategies.normal(3, (250, 8), torch.float32).numpy()
    with pytest.MonkeyPatch.context() as patched:
        ptx_machine.install(patched)
        result = np.array([exchanged(eight, ptx) for eight in values], np.uint32).view(np.float32)
    relative = result.astype(np.float64) / values - 1
    # Of 2000 values that are each off by some 2^-13, the mean has an error of 2^-18.
    assert abs(relative.mean()) < 2.0**-15.5
    assert relative.min() > -(2.0**-11.6) < relative.max() < 2.0**-12
