"""Hypothesis strategies: seeds, shapes, magnitudes, special blocks; tensors come from a seed.

Hypothesis draws small things (a seed, a shape, an exponent, a kind of special value) and the tensor
is built from them with ``torch.Generator``, so that a failure prints a handful of numbers and
shrinks, and large tensors cost nothing to draw. Needs the ``test`` extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

SPECIALS = ("none", "zero", "denormal", "tiny", "saturating", "nan", "inf", "-inf", "huge")
FINITE_SPECIALS = ("none", "zero", "denormal", "tiny", "saturating", "huge")


@dataclass(frozen=True)
class Draw:
    """The values that Hypothesis drew for one tensor; ``build`` makes it, always the same.

    Attributes:
        seed: Seed of the generator.
        exponent: The values are standard normal times ``2 ** exponent``.
        special: One of ``SPECIALS``; which values overwrite ``where``.
        where: Where in ``0 <= x < 1`` of the flattened tensor the special block starts.
    """

    seed: int
    exponent: int = 0
    special: str = "none"
    where: float = 0.0

    def build(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        block: int = 16,
    ) -> torch.Tensor:
        """The tensor: normal values times ``2 ** exponent`` with one block of special values."""
        values = normal(self.seed, shape) * 2.0**self.exponent
        flat = values.view(-1)
        if self.special != "none" and flat.numel():
            blocks = -(-flat.numel() // block)
            start = int(self.where * blocks) * block
            end = min(start + block, flat.numel())
            flat[start:end] = special_block(self.special, flat[start:end], self.seed)
        return values.to(dtype).to(device)


def generator(seed: int) -> torch.Generator:
    """A CPU generator, so that every device sees the same numbers."""
    return torch.Generator().manual_seed(seed)


def normal(seed: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal values of that seed, on the CPU."""
    return torch.randn(tuple(shape), generator=generator(seed)).to(dtype)


def small_integers(
    seed: int, shape: Sequence[int], dtype: torch.dtype = torch.float32, limit: int = 4
) -> torch.Tensor:
    """Integers in ``[-limit, limit]``: products and short sums of them are exact in any order."""
    drawn = torch.randint(-limit, limit + 1, tuple(shape), generator=generator(seed))
    return drawn.to(dtype)


def special_block(kind: str, values: torch.Tensor, seed: int) -> torch.Tensor:
    """``values`` (float32) replaced by, or with one entry of, the special kind.

    ``zero``, ``denormal`` and ``tiny`` (near 2^-120) replace the whole block; ``saturating`` scales
    it by 2^10; the others overwrite one entry: NaN, an infinity, or ``huge`` (3e38).
    """
    if kind == "none":
        return values
    if kind == "zero":
        return torch.zeros_like(values)
    if kind in ("denormal", "tiny"):
        return values * (2.0**-140 if kind == "denormal" else 2.0**-120)
    if kind == "saturating":
        return values * 2.0**10
    out = values.clone()
    entry = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf"), "huge": 3e38}[kind]
    out[seed % out.numel()] = entry
    return out


def seeds() -> st.SearchStrategy[int]:
    """Seeds of a ``torch.Generator``."""
    return st.integers(0, 2**31 - 1)


def magnitudes(low: int = -20, high: int = 20) -> st.SearchStrategy[int]:
    """Binary exponents of a tensor's scale; shrinks to 0."""
    return st.integers(low, high)


def specials(kinds: Sequence[str] = SPECIALS) -> st.SearchStrategy[str]:
    """Names of special blocks; shrinks to the first."""
    return st.sampled_from(tuple(kinds))


def draws(
    low: int = -20, high: int = 20, kinds: Sequence[str] = SPECIALS
) -> st.SearchStrategy[Draw]:
    """A seed, a magnitude and a special block: ``draw.build(shape, dtype, device)``."""
    where = st.floats(0, 1, exclude_max=True, width=32)
    return st.builds(Draw, seeds(), magnitudes(low, high), specials(kinds), where)


def finite_draws(low: int = -20, high: int = 20) -> st.SearchStrategy[Draw]:
    """``draws`` without NaN and infinities."""
    return draws(low, high, FINITE_SPECIALS)


def rows(largest: int = 40, smallest: int = 0) -> st.SearchStrategy[int]:
    """Token or row counts; 0 and 1 included unless ``smallest`` says otherwise."""
    return st.integers(smallest, largest)


def multiples(of: int, largest: int, smallest: int = 1) -> st.SearchStrategy[int]:
    """``of * i`` for ``smallest <= i <= largest``; for axes made of blocks."""
    return st.integers(smallest, largest).map(lambda i: of * i)


def shapes(
    last: st.SearchStrategy[int], dims: int = 3, largest: int = 6
) -> st.SearchStrategy[tuple[int, ...]]:
    """``[..., D]`` with up to ``dims`` leading axes (0-sized ones included) and D from ``last``."""
    leading = st.lists(st.integers(0, largest), min_size=0, max_size=dims)
    return st.tuples(leading, last).map(lambda pair: (*pair[0], pair[1]))


def float_dtypes() -> st.SearchStrategy[torch.dtype]:
    """bfloat16, float16, float32 and float64."""
    return st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a gap between entries of the last axis: a non-contiguous view."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype, device=tensor.device)
    wide[..., 0] = tensor
    return wide[..., 0]


@st.composite
def overlapping(draw: st.DrawFn, like: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape, dtype and device of ``like`` of which at least two are one in memory.

    ``like`` has more than one element. Strides are contiguous but for one that is too small.
    """
    strides = list(torch.empty(like.shape, device="meta").stride())
    axis = draw(st.sampled_from([i for i, size in enumerate(like.shape) if size > 1]))
    strides[axis] = draw(st.integers(0, strides[axis] - 1))
    return torch.zeros_like(like).contiguous().as_strided(like.shape, strides)


def group_sizes(groups: int, largest: int = 12) -> st.SearchStrategy[list[int]]:
    """Rows of each of ``groups`` groups; empty ones and one-takes-all included."""
    spread = st.lists(st.integers(0, largest), min_size=groups, max_size=groups)
    single = st.tuples(st.integers(0, groups - 1), st.integers(1, largest)).map(
        lambda pair: [pair[1] if i == pair[0] else 0 for i in range(groups)]
    )
    return st.one_of(spread, single)


def partitions(total: int) -> st.SearchStrategy[list[int]]:
    """Positive chunk lengths that sum to ``total``: random chunkings of a sequence."""
    if total <= 0:
        return st.just([])
    cuts = st.sets(st.integers(1, total - 1)) if total > 1 else st.just(set())
    return cuts.map(lambda s: [b - a for a, b in zip([0, *sorted(s)], [*sorted(s), total])])  # noqa: B905
