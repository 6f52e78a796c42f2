"""Triton's interpreter without work that it repeats, and whether it computes as a GPU does.

For every call of a device function it looks through all of ``triton.language`` for functions to
replace by its own, all of which the kernel's launch has replaced before: more than half of a
kernel's time.
"""

from __future__ import annotations

import functools
import inspect

import numpy as np


@functools.cache
def install() -> None:
    """Let it look once for each launch. Idempotent; nothing on versions that differ."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    names = ("_patch_lang", "_LangPatchScope", "tl")
    if not all(hasattr(interpreter, name) for name in names):
        return
    language, scope, patch = interpreter.tl, interpreter._LangPatchScope, interpreter._patch_lang

    @functools.cache
    def seen_by(fn):
        return [m for m in fn.__globals__.values() if m is language or m is language.core]

    def patch_once(fn):
        # ``range`` is a class until it is replaced.
        seen = seen_by(fn)
        replaced = seen and not any(inspect.isclass(module.range) for module in seen)
        return scope() if replaced else patch(fn)

    interpreter._patch_lang = patch_once


def departures() -> str | None:
    """Return which float32 arithmetic it gets wrong, like Triton 3.6's interpreter, or None.

    Codes at a border differ from a GPU's where a fused multiply-add rounds twice, and scales where
    the smaller of a NaN and a number is NaN.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return None

    def number(value):
        return interpreter.TensorHandle(np.array([value], np.float32), interpreter.tl.float32)

    builder = interpreter.InterpreterBuilder()
    near = number(1 + 2.0**-12)
    if builder.create_fma(near, near, number(-1)).data[0] != 2.0**-11 + 2.0**-24:
        return "a fused multiply-add rounds twice"
    if np.isnan(builder.create_minnumf(number(1), number(np.nan)).data[0]):
        return "the smaller of a number and NaN is NaN"
    return None
