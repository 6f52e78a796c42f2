"""Inline PTX with named operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute

Value = Any  # a DSL scalar


def assembly(code: str, outputs: Sequence[Any] = (), inputs: Sequence[Value] = ()) -> Any:
    """Results of instructions that name them ``{$w0}`` on, what they read ``{$r0}`` on."""
    return cute.arch.inline_ptx(
        code, write_only_types=list(outputs) or None, read_only_args=list(inputs)
    )


def _outs(count: int) -> str:
    return "{" + ", ".join(f"{{$w{i}}}" for i in range(count)) + "}"


def _ins(first: int, count: int) -> str:
    return "{" + ", ".join(f"{{$r{i}}}" for i in range(first, first + count)) + "}"
