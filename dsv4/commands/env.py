"""``python -m dsv4 env``: what a report of a problem needs to say of a machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_PACKAGES = (
    "triton",
    "nvidia-cutlass-dsl",
    "safetensors",
    "transformers",
    "tokenizers",
    "vllm",
    "numpy",
)
# Variables that change what runs; none of them holds a secret.
_PREFIXES = ("DSV4_", "TRITON_", "CUDA_", "CUTE_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "OMP_")
_HOMES = re.compile(r"/(?:home|Users)/[^/:\s]+")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command, which has no options."""
    commands.add_parser(
        "env",
        help="versions, GPUs and settings, to paste into an issue",
        description="Print versions, GPUs and settings, without paths of home folders.",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    print("\n".join(lines(os.environ)))
    return 0


def lines(environment: Mapping[str, str]) -> Iterator[str]:
    """The report, a line each."""
    import torch

    from dsv4.bench.environment import commit, driver
    from dsv4.compilation.versions import Versions

    versions = Versions.current()
    yield f"dsv4 {versions.dsv4} (commit {commit()}, kernels {versions.sources[:12]})"
    yield f"Python {platform.python_version()}, {platform.platform()}"
    yield f"torch {torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    for package in _PACKAGES:
        yield f"{package} {_version(package)}"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield "GPU: none that PyTorch finds"
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        memory = facts.total_memory / 1e9
        yield (
            f"GPU {index}: {facts.name}, {memory:.0f} GB, compute capability "
            f"{facts.major}.{facts.minor}, {facts.multi_processor_count} SMs, "
            f"driver {driver(torch.device('cuda', index))}"
        )
    settings = sorted(name for name in environment if name.startswith(_PREFIXES))
    for name in settings:
        yield f"{name}={without_homes(environment[name])}"
    if not settings:
        yield "environment variables: none that change what runs"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def without_homes(text: str) -> str:
    """A text with ``~`` in place of home folders."""
    own = str(Path.home())
    text = text.replace(own, "~") if own != "/" else text
    return _HOMES.sub("~", text)
