"""Compile the kernels of a test's model in parallel, once for all processes of a test run.

A test that runs a whole model on a GPU launches some 150 kernels. If none of them is on disk, a
process compiles one after the other, each in about a second, and all workers of pytest-xdist
compile the same ones. Such tests then take minutes. ``warmed`` compiles the kernels first, on all
processors and in one process of the run; the other processes wait and load them.
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
    """Compile or load the kernels that steps of a model launch, and return the model.

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
