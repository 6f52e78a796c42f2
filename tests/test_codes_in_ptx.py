"""The instructions that make NVFP4 of results, and bfloat16 of E4M3, run one by one on the CPU."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.ops.quantize import quantize
from dsv4.testing import strategies
from tests import blackwell_emulator, ptx_machine

CODES = blackwell_emulator.emulated_source(blackwell_emulator.Global(), "dsv4.cute.sm90._codes")
_KINDS = [0.0, -0.0, math.nan, math.inf, -math.inf, 2.0**-133, 3e38, 6.0, 0.25, 0.75]


def coded(block, scale):
    """Bytes of codes and the scale byte of 16 bfloat16, as two lanes make them together."""
    words = block.view(torch.int16).numpy().view(np.uint32)
    halves = np.concatenate([words & 0x7FFF, words >> 16 & 0x7FFF])
    byte, *divisor = CODES._block_scale(int(halves.max()) << 16, np.float32(scale))
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
        for place, value in special:
            values[0, place] = value
        one = torch.tensor([scale])
        want = quantize(values, scaling="static", global_scale=one, backend="reference")
        codes, byte = coded(values[0], scale)
        assert byte == int(want.scales.view(torch.uint8))
        assert codes.tolist() == want.codes[0].tolist()


def test_every_pair_of_e4m3_codes_becomes_bfloat16(monkeypatch):
    """Exactly, in order, NaN as NaN; what is in the upper half of the word does not matter."""
    ptx = pytest.importorskip("dsv4.cute._ptx")
    monkeypatch.setattr(ptx, "assembly", ptx_machine.run)
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(torch.float8_e4m3fn).bfloat16().view(torch.int16).numpy().view(np.uint16)
    for low in range(256):
        high = (low * 37 + 11) % 256
        word = ptx.e4m3_to_bfloat16(0xABCD0000 | high << 8 | low)
        found = np.array([word & 0xFFFF, word >> 16], np.uint16)
        nan = (found & 0x7FFF) > 0x7F80
        expected = want[[low, high]]
        assert (nan == ((expected & 0x7FFF) > 0x7F80)).all()
        assert (found[~nan] == expected[~nan]).all()
