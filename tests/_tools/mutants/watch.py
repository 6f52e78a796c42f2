"""Apply each mutant to a copy of the repository and run its test."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from . import MUTANTS, Mutant
from .mutant import StaleMutantError

ROOT = Path(__file__).resolve().parents[3]
# Imported once and forked from: importing torch takes longer than most of the tests.
_PRELOADED = [
    "torch",
    "pytest",
    "hypothesis",
    "ml_dtypes",
    "compressed_tensors",
    "transformers.models.deepseek_v4.modeling_deepseek_v4",
]
_FORKS = multiprocessing.get_context("forkserver")
# Code that does not even run proves nothing about the test that trips over it.
_BROKEN = re.compile(
    r"\b(NameError|UnboundLocalError|AttributeError|SyntaxError|IndentationError|ImportError"
    r"|ModuleNotFoundError): "
)


@dataclass(frozen=True)
class Outcome:
    """The result of one test.

    Attributes:
        code: pytest's exit code; negative for a signal.
        failures: Exception of every test that failed.
        errors: Exception of every test that could not be run: fixtures, imports, broken code.
    """

    code: int
    failures: tuple[str, ...]
    errors: tuple[str, ...]

    @property
    def killed(self) -> bool:
        """Return whether a test failed as tests do."""
        return self.code == 1 and bool(self.failures) and not self.errors

    def __str__(self) -> str:
        if self.killed:
            return f"killed by {self.failures[0]}"
        return f"SURVIVED: {self.errors[0] if self.errors else f'exit code {self.code}'}"


def snapshot(target: Path) -> None:
    """Copy what the tests need, once: the working tree may change while the mutants run."""
    ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for name in ("dsv4", "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, target)


def run(test: str, copy: Path) -> Outcome:
    """Run one test of a copy of the repository, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder) / "report.xml", Path(folder) / "output.txt"
        process = _FORKS.Process(target=_pytest, args=(test, copy, report, output))
        process.start()
        process.join()
        code = process.exitcode
        assert code is not None
        if not report.exists():
            return Outcome(code, (), (output.read_text()[-500:],) if output.exists() else ())
        return outcome(code, report)


def _pytest(test: str, copy: Path, report: Path, output: Path) -> None:
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    # This module is imported from the original; the tests are those of the copy.
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    os.environ.update(PYTHONPATH=str(copy), HYPOTHESIS_PROFILE="mutants")
    with output.open("w") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junit-xml={report}"]
        code = pytest.main([*options, test])
    raise SystemExit(int(code))


def outcome(code: int, report: Path) -> Outcome:
    """Read a JUnit report and pytest's exit code."""
    failures, errors = [], []
    for result in ElementTree.parse(report).getroot().iter():
        if result.tag in ("failure", "error"):
            text = f"{result.get('message')}\n{result.text}"
            broken = _BROKEN.search(text)
            name = re.split(r"[:\s]", text, maxsplit=1)[0]
            name = "AssertionError" if name == "assert" else name
            if broken or result.tag == "error":
                errors.append(broken.group(1) if broken else f"error in {name}")
            else:
                failures.append(name)
    return Outcome(code, tuple(failures), tuple(errors))


def watch(mutant: Mutant, original: Path) -> Outcome:
    """Run the test on a copy with the mutant."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(original, copy)
        file = copy / mutant.file
        file.write_text(mutant.apply(file.read_text()))
        return run(mutant.test, copy)


def problems(chosen: Sequence[Mutant], original: Path, pool: ThreadPoolExecutor) -> list[str]:
    """Return why the experiment is void: mutants that do not apply, tests that fail anyway."""
    reasons = []
    for mutant in chosen:
        try:
            mutant.apply((original / mutant.file).read_text())
        except (StaleMutantError, OSError) as error:
            reasons.append(f"{mutant.topic} {mutant.what}: {error}")
    tests = sorted({m.test for m in chosen})
    for test, result in zip(tests, pool.map(partial(run, copy=original), tests), strict=True):
        if result.code:
            why = ", ".join(result.failures + result.errors)
            reasons.append(f"{test} fails on the unbroken code (exit code {result.code}): {why}")
    return reasons


def main(names: Sequence[str]) -> int:
    """Run the mutants of the named topics (``9`` is ``pitfall 9``), all by default.

    Returns:
        0; or 1 if a mutant survives, that is, if its test still passes, or fails because the mutant
        does not run at all: a survivor is a hole in the tests; or 2 if a name is unknown, a test
        fails on the unbroken code, or a function no longer has what a mutant replaces in it.
    """
    start = time.monotonic()
    topics = [f"pitfall {name}" if name.isdigit() else name for name in names]
    chosen = [m for m in MUTANTS if not topics or m.topic in topics]
    if unknown := set(topics) - {m.topic for m in chosen}:
        print(f"no mutant for {', '.join(sorted(unknown))}")
        return 2
    os.environ["OMP_NUM_THREADS"] = "1"
    # What is preloaded imports Triton, whose own functions are interpreted only if this is set
    # by then; the tests say so too late. Mutants run on the CPU.
    os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    _FORKS.set_forkserver_preload(_PRELOADED)
    jobs = min(8, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        original = Path(folder)
        snapshot(original)
        if void := problems(chosen, original, pool):
            print("\n".join(void))
            return 2
        survivors = _watch_all(chosen, original, pool)
    seconds = time.monotonic() - start
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants are killed, in {seconds:.0f} s")
    return int(survivors > 0)


def _watch_all(chosen: Sequence[Mutant], original: Path, pool: ThreadPoolExecutor) -> int:
    width = max(len(m.what) for m in chosen)
    survivors = 0
    print(f"pitfall    | {'what was broken':{width}} | {'result':25} | test", flush=True)
    results = pool.map(partial(watch, original=original), chosen)
    for mutant, result in zip(chosen, results, strict=True):
        survivors += not result.killed
        row = (f"{mutant.topic:10}", f"{mutant.what:{width}}", f"{result!s:25}", mutant.test)
        print(" | ".join(row), flush=True)
    return survivors
