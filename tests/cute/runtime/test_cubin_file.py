"""The file format of a compiled kernel: whatever was changed is found."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.cute.runtime import cubin_file
from dsv4.cute.runtime.driver import Image

KEY = bytes(range(32))
IMAGE = Image(bytes(range(256)) * 5, "kernel_entry", 384, 2, 200_000)
CONTENT = cubin_file.encode(IMAGE, KEY)


def test_what_was_encoded_is_decoded():
    assert cubin_file.decode(CONTENT, KEY) == IMAGE
    assert CONTENT.endswith(IMAGE.name.encode() + IMAGE.cubin)


@given(
    cubin=st.binary(max_size=300),
    name=st.text(max_size=20),
    key=st.binary(min_size=32, max_size=32),
)
def test_round_trip(cubin, name, key):
    image = Image(cubin, name, 1, 1, 0)
    assert cubin_file.decode(cubin_file.encode(image, key), key) == image


def test_any_truncation_is_found():
    for length in range(len(CONTENT)):
        with pytest.raises(cubin_file.DamagedError):
            cubin_file.decode(CONTENT[:length], KEY)


def test_any_flipped_bit_is_found():
    for position in range(len(CONTENT)):
        for bit in range(8):
            damaged = bytearray(CONTENT)
            damaged[position] ^= 1 << bit
            with pytest.raises(cubin_file.DamagedError):
                cubin_file.decode(bytes(damaged), KEY)


@given(more=st.binary(min_size=1, max_size=50))
def test_any_longer_file_is_found(more):
    with pytest.raises(cubin_file.DamagedError):
        cubin_file.decode(CONTENT + more, KEY)


@given(start=st.integers(0, len(CONTENT)), other=st.binary(max_size=2000))
@example(start=0, other=b"")
@example(start=0, other=b"{}\n")
@example(start=8, other=bytes(2000))
def test_any_planted_file_is_found(start, other):
    planted = CONTENT[:start] + other
    if planted != CONTENT:
        with pytest.raises(cubin_file.DamagedError):
            cubin_file.decode(planted, KEY)


@given(key=st.binary(min_size=32, max_size=32))
def test_a_file_under_another_name_is_found(key):
    if key != KEY:
        with pytest.raises(cubin_file.DamagedError, match="another kernel"):
            cubin_file.decode(CONTENT, key)
