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
    """Add the command."""
    parser = commands.add_parser(
        "env",
        help="versions, GPUs and settings, to paste into an issue",
        description="Print versions, GPUs and settings, without paths of home folders.",
    )
    parser.add_argument(
        "--selftest",
        action="store_true",
        help="then run every kernel on small cases and compare it with the reference, on each GPU",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status: 1 if a kernel is wrong, or no GPU can be tested."""
    print("\n".join(lines(os.environ)))
    return test_gpus() if options.selftest else 0


def test_gpus() -> int:
    """Print the self-test of each GPU; returns the exit status."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        print("self-test: there is no CUDA GPU")
    return max([_test_gpu(index) for index in range(count)], default=1)


def _test_gpu(index: int) -> int:
    import torch

    from dsv4.bench.guarded_self_test import run_guarded
    from dsv4.device import dotted
    from dsv4.self_test import mark_of_gpu

    device = torch.device("cuda", index)
    print(f"self-test of GPU {index}, compute capability {dotted(device)}:", flush=True)
    wrong = right = 0
    for tested in run_guarded(device):
        print(f"  {tested}", flush=True)
        wrong += tested.wrong is not None
        right += tested.wrong is None and tested.untested is None
    print(f"  {right} right, {wrong} wrong; kernels on such a GPU: {mark_of_gpu(device)}")
    return int(wrong > 0 or right == 0)


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
