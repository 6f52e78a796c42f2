"""Hash what every implementation computes: ``python tools/output_hashes.py write FILE``.

``write FILE`` runs every implementation that this machine supports on random inputs, two seeds of
each case of the bench, and writes one hash per result. ``compare FILE OTHER`` lists the results of
two files that differ, that only one of them has, and that differ between two runs in one file; it
exits with 1 if there are any. To compare two trees, run ``write`` with each tree's folder as
``PYTHONPATH`` on the same machine.

``--shapes`` and ``--tokens`` choose the sizes. ``--shard 2/8`` runs every eighth case, for eight
processes. Inputs are drawn on the device from the seed, so both trees see the same.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_SEEDS = (11, 12)
_LARGEST_REFERENCE = 64  # tokens of a published model; the reference takes seconds above it


def hashes(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Names of results and their hashes; an error's type and text in place of a hash."""
    for index, (name, case) in enumerate(_cases(arguments)):
        shard, shards = map(int, arguments.shard.split("/"))
        if index % shards != shard % shards:
            continue
        for seed in _SEEDS:
            problem = case.build(_module("problem").Draw(seed, torch.device(arguments.device)))
            for backend in _backends(problem):
                if backend == "reference" and _is_slow(name, case.tokens):
                    continue
                yield f"{name} seed {seed} {backend}", _result(problem, backend)


def _module(name: str) -> Any:
    """A module of the bench, wherever this tree has it."""
    for path in (f"dsv4.bench.{name}", f"dsv4.bench.cases.{name}", f"dsv4.bench.checks.{name}"):
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"dsv4.bench has no module {name!r}")


def _cases(arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    cases = importlib.import_module("dsv4.bench.cases")
    for op in cases.MAKERS:
        for shape in arguments.shapes.split(","):
            for tokens in map(int, arguments.tokens.split(",")):
                for case in cases.cases(op, shape, tokens):
                    yield f"{op} {case.name} {shape} {tokens}", case


def _is_slow(name: str, tokens: int) -> bool:
    return "tiny" not in name and tokens > _LARGEST_REFERENCE


def _backends(problem: Any) -> list[str]:
    """Implementations that support a call on this machine."""
    dispatch = importlib.import_module("dsv4.dispatch")
    explanation = dispatch.explain(problem.function, *problem.args, **problem.kwargs)
    return [name for name, reason in explanation.candidates if _runs(problem, name, reason)]


def _runs(problem: Any, name: str, reason: str | None) -> bool:
    dispatch = importlib.import_module("dsv4.dispatch")
    asked = {**problem.kwargs, "backend": name}
    return reason is None or (
        dispatch.explain(problem.function, *problem.args, **asked).chosen == name
    )


def _result(problem: Any, backend: str) -> str:
    """Hash of the bytes of two runs; both if they differ."""
    digests = sorted({_digest(problem.fresh().run(backend)) for _ in range(2)})
    return " and ".join(digests)


def _digest(outputs: tuple[torch.Tensor, ...]) -> str:
    digest = hashlib.sha256()
    for tensor in outputs:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:20]


def write(arguments: argparse.Namespace) -> int:
    """Write the hashes of this tree."""
    begin, results = time.perf_counter(), {}
    for name, result in hashes(arguments):
        results[name] = result
    Path(arguments.files[0]).write_text(json.dumps(results, indent=0))
    print(f"{len(results)} results in {time.perf_counter() - begin:.0f} s")
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """Compare two files, or two comma-separated lists of files; see the module."""
    left, right = (_read(names) for names in arguments.files)
    differing = [name for name in left if name in right and left[name] != right[name]]
    alone = sorted(left.keys() ^ right.keys())
    unsteady = [name for name in left if " and " in left[name]]
    for title, names in (("differs", differing), ("only in one", alone), ("unsteady", unsteady)):
        for name in names:
            print(f"{title}: {name}")
    same = len(left.keys() & right.keys()) - len(differing)
    print(f"{same} results are the same, {len(differing)} differ, {len(alone)} are in one file")
    return 1 if differing or alone or unsteady else 0


def _read(names: str) -> dict[str, str]:
    results: dict[str, str] = {}
    for name in names.split(","):
        results |= json.loads(Path(name).read_text())
    return results


def main(argv: list[str]) -> int:
    """Run one command; its exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("command", choices=("write", "compare"))
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--shapes", default="tiny")
    parser.add_argument("--tokens", default="1,5,70")
    parser.add_argument("--shard", default="0/1", metavar="I/N")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    return {"write": write, "compare": compare}[arguments.command](arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
