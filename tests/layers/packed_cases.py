"""Helpers for the tests of packed layers."""

from __future__ import annotations

import torch

from dsv4.testing import strategies


def normal(seed, *shape):
    return torch.randn(shape, generator=strategies.generator(seed), dtype=torch.float64)


def raw(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


def same_state(first, two):
    assert list(first) == list(two)
    for name in first:
        assert first[name].dtype == two[name].dtype, name
        assert first[name].shape == two[name].shape, name
        assert torch.equal(raw(first[name]), raw(two[name])), name
