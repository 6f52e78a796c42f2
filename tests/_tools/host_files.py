"""Load a large checkpoint with experts in host memory; compare it with all experts on the GPU.

    python -m tests._tools.host_files FOLDER [--layers 12] [--static 96] [--slots 40]

The checkpoint is written first, to the disk of FOLDER: random weights of Flash's widths in NVIDIA's
layout, one shard per layer, all cores writing. The number of layers falls to what the disk holds,
and to what it writes in ``--write-seconds``. Then the folder is loaded twice, with experts in host
memory and without. Greedy tokens with log-probabilities after several prompts, and the logits of
captured decode steps, have to be equal bit by bit. Lines that end in a time are measurements.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import dsv4
from dsv4 import layers
from dsv4.bench.suites.random_model import Weights, random_model
from dsv4.bench.suites.whole_model import DecodeStep
from dsv4.checkpoint import layouts
from dsv4.checkpoint.items import items_of
from dsv4.checkpoint.pairs import Pairing
from dsv4.checkpoint.shards import DTYPE_NAMES
from dsv4.checkpoint.transaction import INDEX
from dsv4.config import ModelConfig
from dsv4.layers import HostExperts
from dsv4.layers import _host_memory as host_memory
from dsv4.layers.host_experts import hosted_of
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving import Runner
from dsv4.testing.assertions import assert_bitwise
from tests._tools.host_soak import locked_bytes

_GB = 1e9
_SLICE = 64 << 20  # bytes of one write
_WRITERS = 8
_KEPT_DISK = 4_000_000_000


@dataclass
class Report:
    """Prints lines, each with the seconds since the start.

    Attributes:
        say: Takes a line.
    """

    say: Callable[[str], object] = print
    begin: float = field(default_factory=time.perf_counter)

    def line(self, text: str) -> None:
        """Print one line."""
        self.say(f"[{time.perf_counter() - self.begin:6.1f} s] {text}")

    @contextlib.contextmanager
    def timed(self, what: str, nbytes: int = 0) -> Iterator[None]:
        """Print how long a part took, and its rate."""
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        rate = f", {nbytes / _GB:.1f} GB, {nbytes / _GB / seconds:.2f} GB/s" if nbytes else ""
        self.line(f"{what}: {seconds:.1f} s{rate}")


@dataclass(frozen=True)
class Sizes:
    """The model, its placement, and how much is compared.

    Attributes:
        config: Configuration with as many layers as asked for.
        placement: Which experts lie in host memory.
        prompts: Lengths of prompts.
        new_tokens: Greedy tokens after each.
        steps: Captured decode steps whose logits are compared.
        context: Tokens before these steps.
    """

    config: ModelConfig
    placement: HostExperts
    prompts: tuple[int, ...] = (7, 300, 2500)
    new_tokens: int = 200
    steps: int = 200
    context: int = 1024


def flash(count: int, experts: int) -> ModelConfig:
    """Return Flash's widths with fewer layers and experts, and no draft layers."""
    whole = ModelConfig.flash()
    return whole.replace(
        num_hidden_layers=count,
        layer_types=whole.layer_types[:count],
        mlp_layer_types=whole.mlp_layer_types[:count],
        n_routed_experts=experts,
        num_nextn_predict_layers=0,
    )


def first_layers(config: ModelConfig, count: int) -> ModelConfig:
    """Return the configuration with its first layers alone."""
    return config.replace(
        num_hidden_layers=count,
        layer_types=config.layer_types[:count],
        mlp_layer_types=config.mlp_layer_types[:count],
    )


@dataclass
class Writer:
    """Writes a model's tensors as shards, several slices of a shard at once.

    Attributes:
        folder: Where.
        table: File of each tensor that was written.
        nbytes: Bytes that were written.
    """

    folder: Path
    pool: ThreadPoolExecutor
    table: dict[str, str] = field(default_factory=dict)
    nbytes: int = 0
    _buffer: torch.Tensor | None = None
    _syncs: deque[Future[None]] = field(default_factory=deque)

    def shard(self, name: str, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write one file, and wait until the disk has all but the last two."""
        # Tensors of few bytes come last, so that the others begin at multiples of 8.
        pairs = sorted(pairs, key=lambda pair: pair[1].nbytes % 8 != 0)
        header: dict[str, Any] = {}
        stop = 0
        for key, tensor in pairs:
            start, stop = stop, stop + tensor.nbytes
            header[key] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, stop],
            }
            self.table[key] = name
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        data = self._on_host([tensor for _, tensor in pairs], stop)
        self._write(self.folder / name, len(text).to_bytes(8, "little") + text, data)
        self.nbytes += stop

    def _on_host(self, tensors: Sequence[torch.Tensor], nbytes: int) -> torch.Tensor:
        """Return the bytes of tensors one after another, in a buffer that is used again."""
        parts = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
        device = parts[0].device
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self._free(device)
            self._buffer = host_memory.allocate(nbytes, device)
        return self._buffer[:nbytes].copy_(torch.cat(parts))

    def _free(self, device: torch.device) -> None:
        if self._buffer is not None:
            host_memory.release(self._buffer, device)
            self._buffer = None

    def close(self, device: torch.device) -> None:
        """Wait until the disk has everything."""
        self._free(device)
        while self._syncs:
            self._syncs.popleft().result()

    def _write(self, path: Path, head: bytes, data: torch.Tensor) -> None:
        view = memoryview((ctypes.c_char * data.nbytes).from_address(data.data_ptr())).cast("B")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.pwrite(fd, head, 0)
        starts = range(0, data.nbytes, _SLICE)
        list(self.pool.map(lambda s: _put(fd, view[s : s + _SLICE], len(head) + s), starts))
        self._syncs.append(self.pool.submit(_sync, fd))
        if len(self._syncs) > 2:
            self._syncs.popleft().result()


def _sync(fd: int) -> None:
    os.fsync(fd)
    os.close(fd)


def _put(fd: int, part: memoryview, offset: int) -> None:
    while part:
        count = os.pwrite(fd, part, offset)
        part, offset = part[count:], offset + count


def write_checkpoint(
    folder: Path, model: DeepseekV4ForCausalLM, seconds: float, report: Report
) -> ModelConfig:
    """Write a model, or its first layers where the disk is small or slow.

    Returns:
        The configuration that was written.
    """
    target = layouts.Layout("nvidia", lambda name: False)
    with ThreadPoolExecutor(_WRITERS) as pool:
        writer = Writer(folder, pool)
        rest = [part for part in _parts(model, target) if part[0] < 0]
        writer.shard("rest.safetensors", [pair for _, pairs in rest for pair in pairs])
        count, begin, begun = 0, time.perf_counter(), writer.nbytes
        for number, pairs in _parts(model, target):
            if number < 0:
                continue
            writer.shard(f"layer-{number:02d}.safetensors", pairs)
            count = number + 1
            passed = time.perf_counter() - begin
            layer_bytes = (writer.nbytes - begun) // count
            free = shutil.disk_usage(folder).free - _KEPT_DISK
            if passed * (count + 1) / count > seconds or free < layer_bytes:
                break
        writer.close(model.device)
        passed = time.perf_counter() - begin
    rate = (writer.nbytes - begun) / _GB / passed
    report.line(
        f"written: {count} layers, {writer.nbytes / _GB:.1f} GB, {rate:.2f} GB/s with fsync"
    )
    config = first_layers(model.config, count)
    index = {"metadata": {"total_size": writer.nbytes}, "weight_map": writer.table}
    for name, value in {INDEX: index, **layouts.documents(target, config)}.items():
        (folder / name).write_text(json.dumps(value), "utf-8")
    return config


def _parts(
    model: DeepseekV4ForCausalLM, target: layouts.Layout
) -> Iterator[tuple[int, list[tuple[str, torch.Tensor]]]]:
    """Yield the stored tensors of each layer with its number, and with -1 those around them."""
    for number, layer in enumerate(model.model.layers):
        yield number, _stored(layer, f"model.layers.{number}.", target)
    for name, module in model.model.named_children():
        if name != "layers":
            yield -1, _stored(module, f"model.{name}.", target)
    yield -1, _stored(model.lm_head, "lm_head.", target)


def _stored(
    module: torch.nn.Module, prefix: str, target: layouts.Layout
) -> list[tuple[str, torch.Tensor]]:
    items = (
        (prefix + name, value, scale) for name, value, scale in items_of(module, target.own_format)
    )
    return [
        pair
        for name, value, scale in Pairing(target).convert(items)
        for pair in target.encode(name, value, scale)
    ]


@dataclass(frozen=True)
class Memory:
    """Bytes in use: of the process in host memory, and on the GPU."""

    resident: int
    allocated: int
    used: int

    @classmethod
    def now(cls, device: torch.device) -> Memory:
        """Read them."""
        resident = status_bytes("VmRSS")
        if device.type != "cuda":
            return cls(resident, 0, 0)
        free, total = torch.cuda.mem_get_info(device)
        return cls(resident, torch.cuda.memory_allocated(device), total - free)

    def __str__(self) -> str:
        return (
            f"host {self.resident / _GB:.2f} GB; GPU {self.allocated / _GB:.2f} GB of tensors, "
            f"{self.used / _GB:.2f} GB in use"
        )


def status_bytes(name: str) -> int:
    """Return a field of /proc/self/status in bytes; 0 if the system has none of that name."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True)
class Answer:
    """The answer to a prompt: tokens, their log-probabilities with alternatives, and times."""

    tokens: tuple[int, ...]
    logprobs: tuple[Any, ...]
    first_ms: float
    token_ms: float


def answers(model: DeepseekV4ForCausalLM, sizes: Sizes) -> list[Answer]:
    """Answer each prompt alone, greedily, with the same chunks in every model, none padded."""
    generator = torch.Generator().manual_seed(11)
    vocabulary = model.config.vocab_size
    most = max(sizes.prompts) + sizes.new_tokens
    made = []
    options: dict[str, Any] = {"prompt_buckets": (), "prefix_sequences": 0, "speculate": None}
    with Runner(model, max_sequences=1, max_tokens=most, max_chunk=2048, **options) as runner:
        for length in sizes.prompts:
            prompt = torch.randint(2, vocabulary, (length,), generator=generator).tolist()
            begin = time.perf_counter()
            request = runner.add(
                prompt, max_new_tokens=sizes.new_tokens, stop_ids=(), logprobs=5, seed=1
            )
            while not request.tokens and runner.step():
                pass
            first = time.perf_counter()
            runner.run()
            last = time.perf_counter()
            made.append(
                Answer(
                    tuple(request.tokens),
                    tuple(request.logprobs),
                    1e3 * (first - begin),
                    1e3 * (last - first) / max(1, len(request.tokens) - 1),
                )
            )
    return made


@torch.inference_mode()
def step_logits(
    model: DeepseekV4ForCausalLM, sizes: Sizes, expected: torch.Tensor | None
) -> tuple[torch.Tensor, float]:
    """Replay captured steps with other tokens each time.

    Args:
        model: The model.
        sizes: How many steps.
        expected: bf16 or float32 ``[steps, vocabulary]``, logits on the CPU that the steps must
            have; None: they are returned.

    Returns:
        The logits, and the median milliseconds of a step.
    """
    step = DecodeStep(model, 1, sizes.context)
    on_gpu = model.device.type == "cuda"
    graph = step.captured() if on_gpu else None
    generator = torch.Generator().manual_seed(12)
    tokens = torch.randint(2, model.config.vocab_size, (sizes.steps,), generator=generator)
    measured, times = [], []
    for number, token in enumerate(tokens):
        step.tokens.copy_(token)
        if on_gpu:
            torch.cuda.synchronize(model.device)
        begin = time.perf_counter()
        if graph is None:
            logits = step()
        else:
            graph.replay()
            logits = step.logits
            torch.cuda.synchronize(model.device)
        times.append(1e3 * (time.perf_counter() - begin))
        measured.append(logits[0].cpu())
        if expected is not None:
            assert_bitwise(measured[-1], expected[number], f"logits of step {number}")
    return torch.stack(measured), statistics.median(times)


def compare(folder: Path, sizes: Sizes, device: torch.device, report: Report, nbytes: int) -> None:
    """Load the folder both ways and compare what the models compute.

    Raises:
        AssertionError: if a bit differs.
    """
    options: dict[str, Any] = {"device": device, "progress": False, "prepare": "kernels"}
    before = Memory.now(device)
    report.line(f"before loading: {before}")
    with report.timed("load with experts in host memory", nbytes):
        hosted = dsv4.load(folder, host_experts=sizes.placement, **options)
    rows, locked = sum(layer.rows.nbytes for layer in hosted_of(hosted)), locked_bytes(hosted)
    assert device.type != "cuda" or locked == rows, f"{locked} of {rows} bytes are locked"
    report.line(
        f"hosted: {rows / _GB:.1f} GB of experts in host memory, {locked / _GB:.1f} of them "
        f"locked; {Memory.now(device)}"
    )
    with report.timed("load with all experts on the device", nbytes):
        resident = dsv4.load(folder, **options)
    report.line(f"both: {Memory.now(device)}")

    expected, actual = [answers(model, sizes) for model in (resident, hosted)]
    for length, first, second in zip(sizes.prompts, expected, actual, strict=True):
        assert second.tokens == first.tokens, f"prompt of {length}: {second.tokens} {first.tokens}"
        assert second.logprobs == first.logprobs, f"prompt of {length}: log-probabilities differ"
        report.line(
            f"prompt of {length}: {len(first.tokens)} greedy tokens ({len(set(first.tokens))} "
            f"different) and log-probabilities equal; first token {first.first_ms:.1f} ms "
            f"resident, {second.first_ms:.1f} hosted; then {first.token_ms:.2f} and "
            f"{second.token_ms:.2f} ms"
        )
    logits, resident_ms = step_logits(resident, sizes, None)
    assert torch.isfinite(logits.float()).all(), "logits are not finite"
    use = layers.cache_use(hosted)
    _, hosted_ms = step_logits(hosted, sizes, logits)
    use = layers.cache_use(hosted).since(use)
    report.line(
        f"{sizes.steps} captured steps with random tokens: logits equal; {resident_ms:.3f} ms "
        f"resident, {hosted_ms:.3f} hosted; {100 * use.hit_rate:.1f} % of {use.asked} experts "
        f"found in slots, {use.loaded_bytes / max(1, sizes.steps) / 1e6:.0f} MB loaded a step"
    )
    changed = layers.repin_(hosted)
    step_logits(hosted, sizes, logits)
    report.line(f"repin_ made {changed} experts static, and the logits are the same")
    report.line(f"at the end: {Memory.now(device)}")
    del hosted
    gc.collect()
    report.line(f"hosted model gone: {Memory.now(device)}")


def run(folder: Path, sizes: Sizes, device: torch.device, seconds: float, report: Report) -> None:
    """Write, load and compare; the folder's files are removed afterwards.

    Args:
        folder: A new folder.
        sizes: What to compare.
        device: Where.
        seconds: Most seconds of writing.
        report: Takes lines.
    """
    folder.mkdir(parents=True)
    usage = shutil.disk_usage(folder)
    report.line(
        f"{folder}: {usage.free / _GB:.1f} of {usage.total / _GB:.1f} GB free; host memory "
        f"{host_memory.available_bytes() / _GB:.1f} GB available; {os.cpu_count()} CPUs"
    )
    try:
        with report.timed("random weights"):
            model = random_model(sizes.config, device, Weights(recipe="nvidia"), pack=False)
        warming = threading.Thread(target=_warm, args=(model, report))
        if device.type == "cuda":  # kernels compile in other processes meanwhile
            warming.start()
        config = write_checkpoint(folder, model, seconds, report)
        if device.type == "cuda":
            with report.timed("waited for kernels"):
                warming.join()
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        nbytes = sum(path.stat().st_size for path in folder.iterdir())
        compare(folder, replace(sizes, config=config), device, report, nbytes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _warm(model: DeepseekV4ForCausalLM, report: Report) -> None:
    done = dsv4.warmup(model, max_tokens=4096, progress=False)
    report.line(f"kernels: {str(done).splitlines()[0]}")
    for name, why in done.failed.items():
        report.line(f"kernel failed: {name}: {why}")


def main() -> int:
    """Run it as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--static", type=int, default=96)
    parser.add_argument("--slots", type=int, default=40)
    parser.add_argument("--staged", type=int, default=24)
    parser.add_argument("--write-seconds", type=float, default=60)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    report = Report(lambda text: print(text, flush=True))
    sizes = Sizes(
        flash(options.layers, options.experts),
        HostExperts(options.static, options.slots, staged=options.staged),
    )
    device = torch.device(options.device)
    run(options.folder, sizes, device, options.write_seconds, report)
    report.line("done: all bits equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
