"""Simulate how many experts a step loads, by the share of slots among the experts on the GPU.

    python -m tests._tools.slot_shares 113 12 33 64

The first number is static experts and slots of a layer together, the others are numbers of slots.
The policy is that of ``expert_decide``, as the tests' oracle has it in plain Python. Experts are
drawn as the bench draws them, and any of them may be popular. Static are the most used experts, as
counts of use would say, or the first ones. Nothing here is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4.bench.suites.hosted_steps import ROUTINGS, draw_experts
from tests.ops.test_expert_slots import Oracle

_EXPERT_MS = 14.156 / 50.8  # to load an expert of Flash at the rate that an H200 measured
_FLASH_LAYERS = 43


@dataclass(frozen=True)
class Sizes:
    """What is simulated.

    Attributes:
        total: Static experts and slots of a layer.
        experts: Experts of a layer.
        top_k: Experts of a token.
        warm: Steps before those that count.
        steps: Steps that count.
        layers: Layers, each with popular experts of its own.
    """

    total: int
    experts: int = 256
    top_k: int = 6
    warm: int = 300
    steps: int = 600
    layers: int = 3


def loads(sizes: Sizes, slots: int, exponent: float, *, counted: bool) -> float:
    """Return how many experts a layer loads in a step of one token, on average.

    Args:
        sizes: What is simulated.
        slots: Slots for experts that are not static.
        exponent: Of the popularity.
        counted: Whether the most used experts are static; else the first ones.
    """
    steps, static, loaded = sizes.warm + sizes.steps, sizes.total - slots, 0
    drawn = draw_experts(exponent, steps, sizes.layers, 1, sizes.top_k, sizes.experts, seed=7)
    for layer in range(sizes.layers):
        generator = torch.Generator().manual_seed(layer)
        names = torch.randperm(sizes.experts, generator=generator).tolist()
        chosen = names[:static] if counted else list(range(static))
        others = [e for e in range(sizes.experts) if e not in set(chosen)]
        oracle = Oracle(sizes.experts, static, [*chosen, *others[:slots]])
        before = 0
        for step, ids in enumerate(drawn[:, layer].tolist()):
            if step == sizes.warm:
                before = oracle.loaded
            oracle.decide([[names[e] for e in ids[0]]])
        loaded += oracle.loaded - before
    return loaded / (sizes.layers * sizes.steps)


def table(sizes: Sizes, shares: Sequence[int]) -> list[str]:
    """Return a line for each routing and choice of static experts, in ms of loads of 43 layers."""
    lines = []
    for routing, exponent in ROUTINGS.items():
        for counted in (True, False):
            cells = []
            for slots in shares:
                loaded = loads(sizes, slots, exponent, counted=counted)
                hits = 100 * (1 - loaded / sizes.top_k)
                ms = _FLASH_LAYERS * _EXPERT_MS * loaded
                cells.append(f"{sizes.total - slots}+{slots}: {ms:.1f} ms ({hits:.1f} %)")
            static = "most used static" if counted else "first static"
            lines.append(f"{routing}, {static}: " + ", ".join(cells))
    return lines


def main() -> None:
    """Run it as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("total", type=int)
    parser.add_argument("slots", type=int, nargs="+")
    options = parser.parse_args()
    print("\n".join(table(Sizes(options.total), options.slots)))


if __name__ == "__main__":
    main()
