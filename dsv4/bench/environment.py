"""The machine: names, versions, and the rates that roofline bounds are computed from."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import platform
import re
import shutil
import subprocess
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath

import torch

import dsv4
from dsv4.bench import timing

WITHOUT_GPU = "no GPU: times are of the reference implementation on the CPU, not of any kernel"
_PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "transformers", "safetensors")


_IN = 10 * " "  # before the second line of an entry


@dataclass(frozen=True)
class Rates:
    """The rates that this machine reaches.

    Attributes:
        copy_tbs: Terabytes per second of a large copy, read and written bytes together.
        read_tbs: Terabytes per second of a large sum.
        bf16_tflops: Rate of a large bfloat16 GEMM.
        node_us: Microseconds of an empty kernel in a CUDA graph of many; 0 on a CPU.
    """

    copy_tbs: float
    read_tbs: float
    bf16_tflops: float
    node_us: float = 0.0

    def bound_us(self, nbytes: int, flops: int) -> float:
        """Time below which no implementation can be: moving the bytes, or doing the arithmetic."""
        return max(nbytes / (self.read_tbs * 1e6), flops / (self.bf16_tflops * 1e6))

    def copy_share(self, nbytes: int, us: float) -> float:
        """Bytes that had to be moved in ``us``, as a share of what a copy moves in that time."""
        return nbytes / (us * self.copy_tbs * 1e6)


def default_device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def device_name(device: torch.device) -> str:
    """``"NVIDIA H200"``, or the name of the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if match:
            return match.group(1).strip()
    return platform.processor() or platform.machine() or "CPU"


def slug(name: str) -> str:
    """A device's name, without its memory, as the name of a folder: ``"nvidia-h200"``."""
    short = re.sub(r"(?<![.\w])\d+ ?gb\b( hbm\w*)?", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", short).strip("-") or "unknown"


@functools.cache
def rates(device: torch.device) -> Rates:
    """Measure copy, read and bfloat16 rates; a second on a GPU, less on a CPU."""
    gpu = device.type == "cuda"
    count = (1 << 30) if gpu else (1 << 24)  # float32 values: 4 GiB or 64 MiB
    side, repeat = (8192, 20) if gpu else (512, 3)
    source = torch.empty(count, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    # A kernel, because a captured plain copy runs on the slower copy engine.
    copy = timing.measure([lambda: torch.neg(source, out=target)], device, repeat).us
    read = timing.measure([lambda: source.sum()], device, repeat).us
    gemm = timing.measure([lambda: left @ right], device, repeat).us
    size = 4 * count
    return Rates(
        2 * size / copy / 1e6,
        size / read / 1e6,
        2 * side**3 / gemm / 1e6,
        timing.empty_node_us(device, repeat),
    )


def versions() -> dict[str, str]:
    """Versions of Python, this package and what it can use; what is not installed is left out."""
    installed = {"python": platform.python_version(), "dsv4": dsv4.__version__}
    for name in _PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    installed["torch"] = torch.__version__  # names the build, e.g. +cpu, where the metadata may not
    if torch.version.cuda:
        installed["cuda"] = torch.version.cuda
    return installed


def version_lines() -> list[str]:
    """``versions``, a line each; what is not installed is named as such."""
    installed = versions()
    names = ["dsv4", *(name for name in installed if name != "dsv4")]
    names += [name for name in _PACKAGES if name not in installed]
    return [f"{name} {installed.get(name, 'not installed')}" for name in names]


def commit() -> str:
    """Commit of this package's checkout, ``-dirty`` if files differ; ``"unknown"`` outside one."""
    root = Path(dsv4.__file__).resolve().parent.parent
    if shutil.which("git") is None or not (root / ".git").exists():
        return "unknown"
    head = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return (head or "unknown") + ("-dirty" if changed else "")


def driver(device: torch.device) -> str:
    """The GPU driver's version; ``"none"`` on a CPU."""
    if device.type != "cuda":
        return "none"
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    query = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return query.splitlines()[0].strip() if query else "unknown"


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else ""


def header(device: torch.device, argv: list[str]) -> dict[str, object]:
    """Return the header of a results file: where its numbers come from."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "gpu": device_name(device),
        "driver": driver(device),
        "versions": versions(),
        "commit": commit(),
        "command": " ".join(["python -m dsv4.bench", *map(_without_folders, argv)]),
        "date": now.isoformat(timespec="seconds"),
        **asdict(rates(device)),
    }


def _without_folders(argument: str) -> str:
    """Shorten an absolute path to its last part: results are published, folders of a user are not.

    ``"--out=/home/me/x.json"`` becomes ``"--out=x.json"``.
    """
    option, equals, value = argument.rpartition("=")
    shown = PurePath(value).name if PurePath(value).is_absolute() else value
    return f"{option}{equals}{shown or '/'}" if value else argument


def lines(header: dict[str, object]) -> list[str]:
    """The header for people."""
    installed = header["versions"]
    assert isinstance(installed, dict)
    described = [
        f"device    {header['gpu']}, driver {header['driver']}, "
        f"{torch.get_num_threads()} CPU threads",
        "versions  " + ", ".join(f"{name} {version}" for name, version in installed.items()),
        f"platform  {platform.platform()}",
        f"commit    {header['commit']}, {header['date']}",
        f"rates     copy {header['copy_tbs']:.3g} TB/s (read + written), "
        f"read {header['read_tbs']:.3g} TB/s, bf16 GEMM {header['bf16_tflops']:.3g} TFLOP/s, "
        f"empty graph node {header['node_us']:.2f} us",
    ]
    if header["driver"] == "none":
        described.append(f"note      {WITHOUT_GPU}")
    return [part for line in described for part in textwrap.wrap(line, 120, subsequent_indent=_IN)]
