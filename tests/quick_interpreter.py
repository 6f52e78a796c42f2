"""Triton's interpreter without work that it repeats.

For every call of a device function it looks through all of ``triton.language`` for functions to
replace by its own, all of which the kernel's launch has replaced before: more than half of a
kernel's time.
"""

from __future__ import annotations

import functools
import inspect


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
