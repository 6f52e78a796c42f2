"""How many tokens a row of the cache has, also while the device alone knows how many were kept."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class OpenStep:
    """A step of which the host does not know yet how many tokens are kept.

    Attributes:
        certain: How many certainly are.
        new: How many may be.
    """

    certain: int
    new: int

    @property
    def exact(self) -> bool:
        """Whether all are kept."""
        return self.certain == self.new


@dataclass(frozen=True)
class RowCount:
    """Tokens of a row.

    Attributes:
        low: Tokens that it has at least: confirmed ones, and those that open steps certainly keep.
        high: Tokens that it may have; pages are reserved for them.
        top: Most tokens that were ever written since the row was empty, taken back or not; without
            open steps, see ``written``.
        floor: Fewest tokens whose window still has all of its entries.
        open: Steps since the last confirmed length, if any of them may keep fewer tokens.
    """

    low: int = 0
    high: int = 0
    top: int = 0
    floor: int = 0
    open: tuple[OpenStep, ...] = ()

    @classmethod
    def of(cls, tokens: int) -> RowCount:
        """Return the count of a row whose tokens were all kept."""
        return cls(tokens, tokens, tokens)

    def after(self, start: int, step: OpenStep) -> RowCount:
        """Return the count after a step; ``start`` is ``high``, or known to be right."""
        low, high = self.low if self.open else start, start + step.new
        exact = step.exact and not self.open
        steps = () if exact else (*self.open, step)
        top = max(self.top, high) if exact else self.top
        return RowCount(low + step.certain, high, top, self.floor, steps)

    @property
    def written(self) -> int:
        """The most tokens that can ever have been written."""
        return max(self.top, self.high)

    def reach(self, rollback: int) -> int:
        """Return the fewest tokens that the row can go back to."""
        return max(0, self.floor, self.written - rollback)

    def at(self, length: int) -> RowCount:
        """Return the count of the row with exactly ``length`` tokens."""
        return RowCount(length, length, max(self.written, length), min(self.floor, length))

    def oldest(self) -> tuple[int, int]:
        """Return the fewest and the most tokens that the row had after its oldest open step."""
        rest = self.open[1:]
        low = self.low - sum(step.certain for step in rest)
        return low, self.high - sum(step.new for step in rest)

    def confirmed(self, length: int) -> RowCount:
        """Return the count, knowing how many tokens there were after the oldest open step.

        Steps after it that keep all tokens need no confirmation.
        """
        low, high, rest = length, length, self.open[1:]
        top = max(self.top, self.oldest()[1])
        while rest and rest[0].exact:
            low, high, rest = low + rest[0].new, high + rest[0].new, rest[1:]
            top = max(top, high)
        low += sum(step.certain for step in rest)
        high += sum(step.new for step in rest)
        return RowCount(low, high, top, self.floor, rest)

    def undone(self, before: RowCount) -> RowCount:
        """Return the count before a step that was not completed.

        Entries that it has overwritten or whose pages it has released stay lost.
        """
        top = before.top if self == before else max(self.written, before.top)
        return replace(before, top=top, floor=max(self.floor, before.floor))
