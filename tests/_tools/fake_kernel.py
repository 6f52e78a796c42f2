"""Place a test's own kernel before an operator's reference; start with no verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4 import dispatch, self_check
from dsv4.cute.runtime import cubin_cache


def no_verdicts(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """Keep verdicts in a folder and forget those of the process, before and after; a fixture."""
    monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, str(folder))
    self_check.verdicts.cache_clear()
    dispatch._warn_unproven.cache_clear()
    yield
    self_check.verdicts.cache_clear()


def install(
    monkeypatch: pytest.MonkeyPatch,
    row: dispatch.Implementation,
    implement: Callable[[Any], Any],
    capability: tuple[int, int],
) -> list[Any]:
    """Give an operator two rows, this one and the reference; return the list of the row's calls.

    Args:
        monkeypatch: Undoes it.
        row: Its target is not imported.
        implement: What the row runs.
        capability: Compute capability of the device of every call.
    """
    calls = []

    def counted(args: Any) -> Any:
        calls.append(args)
        return implement(args)

    rows, load = dispatch.implementations, dispatch.load
    listed = (row, rows(row.op)[-1])
    monkeypatch.setattr(
        dispatch, "implementations", lambda op: listed if op == row.op else rows(op)
    )
    monkeypatch.setattr(
        dispatch, "load", lambda target: counted if target == row.target else load(target)
    )
    monkeypatch.setattr(dispatch.Call, "capability", capability)
    return calls
