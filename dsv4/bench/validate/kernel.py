"""Findings of ``run gemm --check`` about one kernel, and the error of a result."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4 import dispatch
from dsv4.bench import report
from dsv4.bench.verdict import Check
from dsv4.quant.formats import LINEAR

HEADINGS = (
    *("matrix", "shape", "weight", "activation", "backend"),
    *("points", "bf16 error", "f32 error", "check", "us by tokens"),
)


@dataclass
class Kernel:
    """Findings about one implementation, matrix and kind of operands.

    Attributes:
        matrix: Which, with its model.
        shape: Names and sizes.
        layout: Layout of the weight.
        activation: ``"bf16"``, ``"nvfp4"`` or ``"fp8"``.
        backend: The implementation.
        points: GEMMs compared.
        failed: Cases outside their budget, or that raised.
        worst: Largest error in units of the budget, by dtype of the result (uint8: codes, whose
            error is 0 or infinite); infinite for a NaN where there is none, and the other way
            round.
        us: Median microseconds by tokens; only of those that are right.
        messages: What failed, one line each.
    """

    matrix: str
    shape: dict[str, int]
    layout: str
    activation: str
    backend: str
    points: int = 0
    failed: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    us: dict[int, float] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def add(self, what: str, dtype: torch.dtype, ratio: float, message: str = "") -> None:
        """Count a point."""
        name = str(dtype).removeprefix("torch.")
        self.points += 1
        self.worst[name] = max(self.worst.get(name, 0.0), ratio)
        if ratio > 1:
            self.failed += 1
            self.messages.append(f"{what}, {name}: {message or f'{ratio:.3g} times the budget'}")

    def check(self) -> Check:
        """The check of all its points."""
        where = f"{self.matrix} {self.layout} {self.activation}, {self.backend}"
        worst = max(self.worst.values(), default=0.0)
        size = f"{worst:.3g} times its budget" if math.isfinite(worst) else "not the right bits"
        detail = f"{self.failed} of {self.points} GEMMs, error {size}" if self.failed else ""
        return Check("kernel", where, not self.failed, detail)

    def cells(self) -> tuple[str, ...]:
        """The texts of its line, in the order of ``HEADINGS``."""
        return (
            self.matrix,
            " ".join(f"{name}={size}" for name, size in self.shape.items()),
            self.layout,
            self.activation,
            self.backend,
            str(self.points),
            *(
                f"{self.worst[name]:.2g}" if name in self.worst else "-"
                for name in ("bfloat16", "float32")
            ),
            "ok" if not self.failed else f"{self.failed} WRONG",
            ", ".join(f"{tokens}: {report.number(us)}" for tokens, us in self.us.items()),
        )


# By backend and reason without its numbers.
Refused = dict[str, dict[str, str]]
REFERENCE = "reference"


@dataclass(frozen=True)
class Request:
    """The request: what to validate.

    Attributes:
        tokens: Token counts.
        includes: Says which matrices, by name.
        device: Where.
        repeat: Timed runs.
        seed: Seed of the inputs.
        backends: Names of implementations, or ``"auto"`` for all.
    """

    tokens: Sequence[int]
    includes: Callable[[str], bool]
    device: torch.device
    repeat: int
    seed: int = 0
    backends: Sequence[str] = (dispatch.AUTO,)

    def available(
        self, function: Any, args: tuple, kwargs: dict[str, Any], layout: str, refused: Refused
    ) -> list[str]:
        """Names of the implementations that take a call; the reference with linear scales alone.

        Args:
            function: Public function of ``dsv4.ops``.
            args: Its positional arguments.
            kwargs: Its keyword arguments, without ``backend``.
            layout: Layout of the weight.
            refused: Reasons against others are added to it.
        """
        call = dispatch.arguments(function, *args, **kwargs)
        able = []
        for row in dispatch.implementations(call.op):
            why = row.unsupported_reason(call)
            if why is not None:
                kind = re.sub(r"\d+", "", why)
                refused.setdefault(row.name, {}).setdefault(kind, why)
            elif row.name != REFERENCE or layout == LINEAR:
                able.append(row.name)
        return [name for name in able if dispatch.AUTO in self.backends or name in self.backends]
