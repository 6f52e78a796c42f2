"""Compile the kernels of a test's model in parallel, once for all processes of a test run.

A test on a GPU that runs a whole model launches some 150 kernels. Where none of them is on disk a
process compiles one after the other, each in about a second, and every worker of pytest-xdist the
same ones: such tests then take minutes. ``warmed`` compiles them on all processors before, in one
process of the run; the others wait and load them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import dsv4
from dsv4.model import DeepseekV4ForCausalLM


def warmed(model: DeepseekV4ForCausalLM, max_tokens: int) -> DeepseekV4ForCausalLM:
    """Compile or load what steps of a model launch, and return the model.

    Args:
        model: On a GPU, packed.
        max_tokens: Most tokens of a step of the test: few steps launch few kernels.
    """
    with _alone():
        done = dsv4.warmup(model, max_tokens=max_tokens, progress=False)
    assert not done.failed, done
    assert not done.skipped, done
    return model


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Wait until no other process of this machine compiles the kernels of a test."""
    name = f"dsv4-kernels-of-tests-{os.getuid()}.lock"
    with (Path(tempfile.gettempdir()) / name).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
