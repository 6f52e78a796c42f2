"""What one mistake is."""

from __future__ import annotations

from dataclasses import dataclass

REFERENCE = "dsv4/reference/"
TRITON = "dsv4/triton/"
LAYERS = "dsv4/layers/"


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        trap: ``pitfall N`` of the specification, or what else it concerns; see the package.
        what: The mistake in words.
        file: Where it is made.
        old: Text that stands exactly once in the file.
        new: What the mistake makes of it.
        test: The test that must fail.
    """

    trap: str
    what: str
    file: str
    old: str
    new: str
    test: str
