"""What the tests of packed layers share."""

from __future__ import annotations

import torch

from dsv4.testing import strategies


def normal(seed, *shape):
    return torch.randn(shape, generator=strategies.generator(seed), dtype=torch.float64)


def raw(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


def same_state(one, two):
    assert list(one) == list(two)
    for name in one:
        assert one[name].dtype == two[name].dtype, name
        assert one[name].shape == two[name].shape, name
        assert torch.equal(raw(one[name]), raw(two[name])), name
