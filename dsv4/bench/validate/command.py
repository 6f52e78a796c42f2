"""``run gemm --check``: validates every GEMM kernel of this machine and reports.

Dense GEMMs (``validate_dense``), then those of the shared and of routed experts
(``validate_experts``).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4 import dispatch
from dsv4.bench.cases import PRESETS
from dsv4.bench.cases.gemm import matrices
from dsv4.bench.problem import UsageError
from dsv4.bench.tables import plain, wrapped
from dsv4.bench.validate import dense as validate_dense
from dsv4.bench.validate import experts as validate_experts
from dsv4.bench.validate.kernel import HEADINGS, Kernel, Refused, Request
from dsv4.bench.verdict import line

TOKENS = [1, 8, 16, 17, 64, 65, 300, 1024]
# Names of what is validated, whatever the model.
NAMES = [*matrices(PRESETS["tiny"]()), *validate_experts.CASES]


@dataclass(frozen=True)
class Validation:
    """A whole run.

    Attributes:
        kernels: Kernels in the order in which they ran.
        absent: By backend that ran nowhere, why not, for the several kinds of operands.
    """

    kernels: tuple[Kernel, ...]
    absent: dict[str, list[str]]

    @property
    def wrong(self) -> int:
        """Kernels of which a point failed."""
        return sum(1 for kernel in self.kernels if kernel.failed)

    def lines(self) -> list[str]:
        """The report without its header and its verdict."""
        lines = plain(HEADINGS, [kernel.cells() for kernel in self.kernels], keys=5)
        notes: list[str] = []
        for kernel in self.kernels:
            where = f"{kernel.backend} {kernel.matrix} {kernel.layout} {kernel.activation}"
            notes += [f"WRONG {where}: {message}" for message in kernel.messages]
        for backend, reasons in self.absent.items():
            notes += [f"not run: {backend}: {why}" for why in reasons]
        return [*lines, *(line for note in notes for line in wrapped(note))]

    def verdict(self) -> str:
        """Return what failed and where, or that all passed, in one line."""
        count = sum(kernel.points for kernel in self.kernels)
        if not self.kernels:
            return "FAILED: no kernel ran"
        checks = [kernel.check() for kernel in self.kernels]
        return f"{line(checks)}; {count} GEMMs compared"

    def document(self, header: dict[str, Any]) -> dict[str, Any]:
        """Return the content of a JSON file; an infinite error is the string ``"inf"``."""
        kernels = [dataclasses.asdict(kernel) for kernel in self.kernels]
        for kernel in kernels:
            for name, ratio in kernel["worst"].items():
                kernel["worst"][name] = "inf" if ratio == float("inf") else ratio
        return {"header": header, "kernels": kernels, "absent": self.absent}


def write_json(path: str, validation: Validation, header: dict[str, Any]) -> Path:
    """Write ``Validation.document``."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(validation.document(header), indent=1, allow_nan=False) + "\n")
    return target


def run(presets: Sequence[str], request: Request) -> Validation:
    """Validate every kernel.

    Args:
        presets: Keys of ``PRESETS``.
        request: What of them.

    Raises:
        UsageError: if a name is unknown.
    """
    known = [dispatch.AUTO, *(row.name for row in dispatch.implementations("gemm"))]
    for option, values, allowed in [
        ("backend", request.backends, known),
        ("shapes", presets, list(PRESETS)),
    ]:
        for value in values:
            if value not in allowed:
                raise UsageError(f"--{option} has {value!r}, wanted one of {', '.join(allowed)}")
    kernels: list[Kernel] = []
    refused: Refused = {}
    for preset in presets:
        kernels += validate_dense.validated(preset, request, refused)
        kernels += validate_experts.validated(preset, request, refused)
    ran = {kernel.backend for kernel in kernels}
    absent = {name: list(why.values()) for name, why in refused.items() if name not in ran}
    return Validation(tuple(kernels), absent)
