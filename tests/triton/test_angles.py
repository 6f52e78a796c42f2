"""Cosine and sine in kernels, against float64, up to the largest position float32 holds."""

from __future__ import annotations

import math

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from dsv4.testing.assertions import assert_bitwise, assert_within_budget  # noqa: E402
from dsv4.testing.strategies import generator  # noqa: E402
from dsv4.triton import _angles  # noqa: E402

KERNELS = ("triton",)
REFERENCE = False
BLOCK = 4096


@triton.jit
def _cos_sin(x, cos, sin, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c, s = _angles.cos_sin(tl.load(x + i))
    tl.store(cos + i, c)
    tl.store(sin + i, s)


def angles() -> torch.Tensor:
    """Small and large ones, neighbours of multiples of pi / 2, and whole numbers."""
    spread = torch.rand(4 * BLOCK, generator=generator(0))
    turns = torch.arange(BLOCK, dtype=torch.float64)
    multiples = torch.cat((turns, 651 * turns)) * (math.pi / 2)
    whole = torch.arange(BLOCK, dtype=torch.float64) * 256 + 1
    return torch.cat(
        (spread[:BLOCK] * 1e-3, spread[BLOCK:] * 1e6, -spread[:BLOCK] * 100, multiples, whole)
    ).float()


def test_each_is_right_to_two_units_of_float32(device):
    """Polynomial 1 unit in 2^-24, reduction and rounding less than another; see ``cos_sin``."""
    x = angles().to(device)
    cos, sin = torch.empty_like(x), torch.empty_like(x)
    _cos_sin[(x.numel() // BLOCK,)](x, cos, sin, BLOCK)
    assert_within_budget(cos, x.double().cos(), 2.0**-23, "cos")
    assert_within_budget(sin, x.double().sin(), 2.0**-23, "sin")


def test_no_angle_is_no_turn(device):
    """Dims that do not turn are given the angle 0 and must come out bit for bit."""
    x = torch.zeros(BLOCK, device=device)
    cos, sin = torch.empty_like(x), torch.empty_like(x)
    _cos_sin[(1,)](x, cos, sin, BLOCK)
    assert_bitwise(cos, torch.ones_like(x))
    assert_bitwise(sin, torch.zeros_like(x))
