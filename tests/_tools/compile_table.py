"""Print a table of what compiled kernels need, from the reports of other programs.

    python -m tests._tools.compile_kernels 80 --quick >80.jsonl
    python -m tests._tools.compile_packed 80 --brief >>80.jsonl
    python -m tests._tools.compile_table 80=80.jsonl 89=89.jsonl

A row for each kernel, a column for each architecture. A cell has the number of specialisations, and
of these the most registers of a thread, bytes of shared memory of a program and, if there is any,
bytes of stack of a thread.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

_Reports = list[dict[str, int]]


def table(reports: dict[str, list[dict]]) -> str:
    """Return the table in Markdown.

    Args:
        reports: By architecture, in the order of columns; of ``compile_kernels.report_of``.
    """
    cells: dict[str, dict[str, _Reports]] = defaultdict(lambda: defaultdict(list))
    for arch, listed in reports.items():
        for report in listed:
            cells[report["kernel"]][arch].append(report)
    head = ["kernel", *(f"sm_{arch}" for arch in reports)]
    rows = [
        [f"`{name}`", *(_cell(cells[name][arch]) for arch in reports)] for name in sorted(cells)
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(reports: _Reports) -> str:
    if not reports:
        return "-"
    most = {name: max(r[name] for r in reports) for name in ("registers", "shared", "stack")}
    text = f"{len(reports)}: {most['registers']}, {most['shared']}"
    return text + (f", stack {most['stack']}" if most["stack"] else "")


if __name__ == "__main__":
    files = dict(argument.split("=") for argument in sys.argv[1:])
    lines = {arch: Path(name).read_text().splitlines() for arch, name in files.items()}
    print(table({arch: [json.loads(line) for line in listed] for arch, listed in lines.items()}))
