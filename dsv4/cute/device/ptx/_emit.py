"""Emits inline PTX with named operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

# ``Any``, because CuTeDSL's types say nothing of an element of a register tensor.
Float = Float32 | Any
Word = Int32 | Uint32 | Any  # 32 bits


def assembly(code: str, outputs: Sequence[Any] = (), inputs: Sequence[Any] = ()) -> Any:
    """Emit PTX text: outputs are ``{$w0}``, ``{$w1}``, ..., inputs ``{$r0}``, ``{$r1}``, ...

    Args:
        code: The text. Braces that belong to PTX need no escape other than Python's.
        outputs: CuTeDSL types of the results.
        inputs: Values that the text reads.

    Returns:
        The result, a tuple of several, or None.
    """
    return cute.arch.inline_ptx(
        code, write_only_types=list(outputs) or None, read_only_args=list(inputs)
    )


def _outs(count: int) -> str:
    return "{" + ", ".join(f"{{$w{i}}}" for i in range(count)) + "}"


def _ins(first: int, count: int) -> str:
    return "{" + ", ".join(f"{{$r{i}}}" for i in range(first, first + count)) + "}"
