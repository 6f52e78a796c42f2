"""Expected results of attention, for the tests of its kernels."""

from __future__ import annotations

import torch

from dsv4.testing.assertions import unit_roundoff
from dsv4.testing.strategies import normal

U = unit_roundoff(torch.float32)


def softmax(q, kv, sink, scale, parts=0.0):
    """The result in float64, and how far a kernel may be off.

    Logits err by (D + 3) u sum |q k| scale, weights by twice that; then float32 sums, of which some
    are scaled again for each block and program. Weights are rounded to bfloat16, in the numerator
    and in the denominator alike: a weight w that is off by u w moves the mean by u w (v - o).
    Sums of some of the entries may be off by ``parts`` of each before they are added.
    """
    logits = torch.cat((q @ kv.T * scale, sink[:, None]), dim=1)
    weights = logits.softmax(-1)[:, :-1]
    truth = weights @ kv
    size = float((q.abs() @ kv.abs().T).max()) * abs(scale)
    delta = (q.shape[-1] + 3) * U * size + U * max(size, float(sink.abs().max()))
    relative = 2 * delta + (2 * kv.shape[0] + 40) * U
    spread = (weights[:, :, None] * (kv - truth[:, None]).abs()).sum(1)
    rounded = 1.01 * unit_roundoff(torch.bfloat16) * (spread + truth.abs())
    rounded = rounded + parts * (weights @ kv.abs())
    return truth, 1.01 * relative * float(kv.abs().max()) + rounded + 1e-38


def angles(seed, tokens, half, device):
    """cos and sin of any angles, float32 ``[tokens, half]``."""
    angle = 3 * normal(seed, (tokens, half), torch.float64)
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rotated_back(truth, budget, cos, sin):
    """``softmax``'s results ``[heads, D]`` after the inverse rotation of their last dims.

    An error of either dim of a pair reaches both, times a cosine and a sine; then a product, a sum.
    """
    unrotated = truth.shape[-1] - 2 * cos.shape[-1]
    cos, sin = cos.double(), sin.double()

    def turn(x, sign, c, s):
        even, odd = x[:, unrotated:].unflatten(-1, (-1, 2)).unbind(-1)
        pairs = torch.stack((even * c + odd * s, odd * c - sign * even * s), -1)
        return torch.cat((x[:, :unrotated], pairs.flatten(-2)), -1)

    budget = turn(torch.as_tensor(budget).expand_as(truth), -1, cos.abs(), sin.abs())
    size = turn(truth.abs(), -1, cos.abs(), sin.abs())
    truth = turn(truth, 1, cos, sin)
    return truth, budget + (3 * U + unit_roundoff(torch.bfloat16)) * size


def same_nans(out, expected):
    """NaN at the same positions; neither has an infinity."""
    assert bool((out.isnan() == expected.isnan()).all())
    assert not out.isinf().any()
    assert not expected.isinf().any()
