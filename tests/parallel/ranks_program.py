"""What the processes of tests/parallel/test_processes.py do.

One start of N processes runs all checks for N, because importing torch takes most of the time.
Each process writes what it found to a file; the test compares.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dsv4
from dsv4 import __main__ as command_line
from dsv4.bench import environment
from dsv4.bench.cli import main as bench_main
from dsv4.parallel import process_group
from dsv4.parallel.guard import guard
from dsv4.parallel.reduce import all_reduce
from dsv4.serving import Runner
from dsv4.serving.sampling import Sampler

PROMPTS = [[5, 9, 2], list(range(1, 31)), [7]]
NEW = 6
COMMAND = ["--device", "cpu", "--prompt", "Hello", "--max-new-tokens", "6"]


def start(rank: int, size: int, folder: str, last: str) -> None:
    """Run as one of ``size`` processes; ``last`` is the failure that ends them."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="unused")
    torch.set_num_threads(1)
    path = Path(folder)
    store = f"file://{path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    report: dict[str, Any] = {}
    file = path / f"rank{rank}.pt"
    checks = [tensors, whole_life, command, several_requests, meshes, copies]
    checks += [own_tokens]
    checks += [bench] * (size == 2) + FAILURES[last]
    try:
        for check in checks:
            report[check.__name__] = check(path, rank, size)
            torch.save(report, file)
    except BaseException:
        report["traceback"] = traceback.format_exc()
        torch.save(report, file)
    # Without the destructors of torch.distributed, which wait for processes that were killed.
    os._exit(0)


def mesh(size: int) -> Any:
    return dist.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def loaded(path: Path, size: int, **options: Any) -> Any:
    options = {"device_mesh": mesh(size), "parallel": "tp", "progress": False, **options}
    return dsv4.load(path / "checkpoint", **options)


def tensors(path: Path, rank: int, size: int) -> Any:
    """Sums of every dtype, in the order of ranks, and host values of every length."""
    context = loaded(path, size).parallel
    drawn = torch.randn(size, 3, 50, generator=torch.Generator().manual_seed(0)) * 100
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        parts = drawn.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        total = parts[0].to(wide)
        for part in parts[1:]:
            total = total + part.to(wide)
        assert torch.equal(all_reduce(context, parts[rank]), total.to(dtype))
        strided = parts[rank].t() if parts[rank].dim() == 2 else parts[rank]
        assert torch.equal(all_reduce(context, strided), total.to(dtype).t())
    assert all_reduce(context, torch.zeros(0, 4)).shape == (0, 4)
    for length in (0, 1, 4000, 5000, 100_000):
        text = str(rank) * length if rank == size - 1 else ""
        assert context.group.exchange((rank, text))[-1] == (size - 1, str(size - 1) * length)
        expected = "x" * length
        assert context.group.broadcast(expected if rank == 0 else None) == expected
    return True


def whole_life(path: Path, rank: int, size: int) -> Any:
    """Load, generate in float32, greedily and drawn; process chunks in an unpooled cache."""
    model = loaded(path, size, dtype="float32")
    sampler = Sampler(temperature=1.0, top_p=0.9, generator=torch.Generator().manual_seed(7))
    with guard(model, every=2):
        greedy = model.generate(PROMPTS, NEW, stop_ids=[])
    drawn = model.generate(PROMPTS, NEW, stop_ids=[], sampler=sampler, chunk=8)
    cache = model.new_cache(2, 64, max_chunk=8)
    logits = model.prefill(PROMPTS[:2], cache, [cache.allocate(), cache.allocate()])
    none = model.model(torch.zeros(1, 0, dtype=torch.long))[0].shape
    return greedy, drawn, logits, tuple(none), model.load_report.bytes_read


def command(path: Path, rank: int, size: int) -> Any:
    """``python -m dsv4 generate``, in the processes that torchrun would have started."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = command_line.main(["generate", str(path / "checkpoint"), *COMMAND])
    return status, out.getvalue()


def several_requests(path: Path, rank: int, size: int) -> Any:
    """Rank 0 has requests, the others none."""
    model = loaded(path, size, dtype="float32")
    with Runner(model, max_sequences=2, max_tokens=64, max_chunk=16) as runner:
        if rank:
            runner.follow()
            return None
        requests = [runner.add(p, max_new_tokens=NEW, stop_ids=()) for p in PROMPTS]
        runner.run()
        return [request.result() for request in requests]


def own_tokens(path: Path, rank: int, size: int) -> Any:
    """``parallel="dp"``: prompts of each rank, the command, and an error on the last rank."""
    model = loaded(path, size, dtype="float32", parallel="dp")
    tokens = model.generate(PROMPTS[rank:], NEW, stop_ids=[])
    read = model.load_report.bytes_read
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        line = ["generate", str(path / "checkpoint"), "--parallel", "dp", *COMMAND]
        status = command_line.main(line)

    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError("by the test")

    if rank == size - 1:
        model.model.layers[1].mlp.experts.register_forward_pre_hook(fail)
    failure = _failed(lambda: model.generate(PROMPTS[rank:], NEW))
    return tokens, read, (status, out.getvalue()), failure


def bench(path: Path, rank: int, size: int) -> Any:
    """``python -m dsv4.bench model --parallel dp``: the exit status; rank 0 writes a file."""
    environment.rates = lambda device: environment.Rates(0.02, 0.01, 0.1)
    sizes = ["--layers", "1", "--tokens", "3", "--context", "9", "--prompts", "none"]
    columns = ["--columns", "eager,runner,generate", "--steps", "2", "--repeat", "1"]
    file = path / f"bench{rank}.json"
    line = ["model", "--device", "cpu", *sizes, *columns, "--out", str(file)]
    with contextlib.redirect_stdout(io.StringIO()):
        status = bench_main([*line, "--parallel", "dp"])
    return status, json.loads(file.read_text()) if file.exists() else None


def meshes(path: Path, rank: int, size: int) -> Any:
    """Meshes that are refused, a process group, and a group of one."""
    messages = []
    both = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    other = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("pp", "tp"))
    unnamed = dist.init_device_mesh("cpu", (1, size))
    for changes in (
        {"device_mesh": other},
        {"device_mesh": unnamed},
        {"device_mesh": both, "parallel": "dp"},
    ):
        try:
            loaded(path, size, **changes)
        except ValueError as error:
            messages.append(str(error))
    assert loaded(path, size, device_mesh=both).parallel.size == size
    assert loaded(path, size, device_mesh=both["tp"]).parallel.size == size
    assert loaded(path, size, device_mesh=both["dp"]).parallel is None
    assert loaded(path, size, device_mesh=dist.group.WORLD).parallel.rank == rank
    return messages


def copies(path: Path, rank: int, size: int) -> Any:
    """A mesh of two rows: each has a model, and prompts of its own.

    The first row goes through a step more than the second, which does not wait for it. With one
    rank in ``"tp"`` the mesh is also one for ranks with tokens of their own.
    """
    rows = dist.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    row = rows.get_local_rank("dp")
    model = loaded(path, size, device_mesh=rows, dtype="float32")
    shape = (1, 0) if model.parallel is None else (model.parallel.size, model.parallel.rank)
    assert shape == (size // 2, rows.get_local_rank("tp"))
    tokens = model.generate(PROMPTS[row:], NEW - row, stop_ids=[])
    own = None
    if size == 2:
        context = loaded(path, size, device_mesh=rows, parallel="dp").parallel
        own = (context.rank, context.size)
    return row, tokens, own


def _failed(action: Callable[[], Any]) -> tuple[str, str, float]:
    """Return the error of a call, and the seconds that it took."""
    began = time.monotonic()
    try:
        action()
    except (ValueError, ZeroDivisionError, FileNotFoundError, RuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - began
    raise AssertionError("it did not fail")


def an_exception(path: Path, rank: int, size: int) -> Any:
    """An exception on the last rank: while loading, in the middle of a step, and outside of one."""
    is_last = rank == size - 1

    def load_elsewhere() -> None:
        loaded(path / "nowhere" if is_last else path, size)

    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError("by the test")

    reports = [_failed(load_elsewhere)]
    # Before a process group is known on the last rank, which can try again.
    wrong = {"reserve_tokens": -1, "parallel": "no such mode", "device": "no such device"}
    for name, value in wrong.items():
        changes = {name: value} if is_last else {}
        reports.append(_failed(lambda changes=changes: loaded(path, size, **changes)))
    model = loaded(path, size)
    if is_last:
        model.model.layers[1].mlp.register_forward_pre_hook(fail)
    reports.append(_failed(lambda: model.generate(PROMPTS, NEW)))
    reports.append(_failed(lambda: model.generate(PROMPTS, NEW)))  # the group is closed
    process_group.STEP_PATIENCE = 1.0
    model = loaded(path, size)
    if is_last:
        model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: time.sleep(3))
    reports.append(_failed(lambda: model.generate(PROMPTS, NEW)))
    return reports


def _die(*arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def a_killed_rank(path: Path, rank: int, size: int) -> Any:
    """The last rank is killed in the middle of a step."""
    model = loaded(path, size)

    if rank == size - 1:
        model.model.layers[1].mlp.register_forward_pre_hook(_die)
    return [_failed(lambda: model.generate(PROMPTS, NEW))]


def a_killed_rank_with_tokens_of_its_own(path: Path, rank: int, size: int) -> Any:
    """``parallel="dp"`` on the first two ranks, of which the second one, without requests, dies."""
    if rank > 1:
        return None
    group = dist.new_group([0, 1], backend="gloo", use_local_synchronization=True)
    model = loaded(path, size, device_mesh=group, parallel="dp")
    if rank:
        model.model.layers[1].mlp.experts.register_forward_pre_hook(_die)
    return _failed(lambda: model.generate(PROMPTS[: 1 - rank], NEW))


FAILURES = {
    "exception": [an_exception],
    "kill": [a_killed_rank, a_killed_rank_with_tokens_of_its_own],
}
