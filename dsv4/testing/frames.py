"""Count Python frames: what the host does around kernels in a step."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dsv4

_PACKAGE = str(Path(dsv4.__file__).parent)
# Packages of implementations. What these call is part of an implementation, too.
_IMPLEMENTATIONS = tuple(f"{_PACKAGE}/{name}/" for name in ("reference", "triton", "cute", "blas"))


def frames_outside_implementations(call: Callable[[], Any]) -> Counter[str]:
    """Frames of this package that a call enters, by function; those of implementations left out.

    Args:
        call: Is called once, in this thread.

    Returns:
        How often each function was entered, by ``file:name``.
    """
    entered: Counter[str] = Counter()
    depth = 0

    def see(frame: Any, event: str, arg: Any) -> None:
        nonlocal depth
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE) or event not in ("call", "return"):
            return
        if file.startswith(_IMPLEMENTATIONS):
            depth += 1 if event == "call" else -1
        elif event == "call" and not depth:
            entered[f"{file[len(_PACKAGE) + 1 :]}:{frame.f_code.co_name}"] += 1

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered
