"""Commands in several processes: one sentence, one status, and an end that waits for nobody."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest
import torch

from dsv4 import __main__ as command_line
from dsv4.bench import cli
from dsv4.parallel import processes
from dsv4.parallel.context import RankError
from dsv4.parallel.processes import BAD_INPUT, FAILED, Launched, launched
from tests.parallel.ranks_program import COMMAND
from tests.parallel.test_processes import checkpoint

_LIMIT = 100  # seconds until processes that hang are killed
FAILS = """
import torch.distributed as dist
from dsv4.commands import guarded
from dsv4.parallel import processes
from dsv4.parallel.agreement import reported
from dsv4.parallel.process_group import context_of

def work():
    with processes.joined("cpu") as device:
        context = context_of(dist.group.WORLD, "tp", device)
        with reported(context):
            if context.rank == 1:
                raise ValueError("bad weights")
            context.group.exchange(None)
    return 0

processes.run(lambda: guarded("work", work))
"""


@dataclass(frozen=True)
class Ended:
    """The end of a process: its status, and what it printed."""

    status: int
    out: str
    err: str


def launch(ranks: int, *arguments: str) -> list[Ended]:
    """Run Python with some arguments in processes as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=_LIMIT) for process in started]
    finally:
        for process in started:
            process.kill()
    return [
        Ended(process.returncode, *texts) for process, texts in zip(started, printed, strict=True)
    ]


def own_lines(text: str) -> list[str]:
    """Lines of a text, without those that libraries print."""
    return [line for line in text.splitlines() if "nanobind" not in line and line[:2] != " -"]


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_one_sentence_and_one_status_on_all_ranks():
    sizes = ["--preset", "pro", "--tokens", "900", "--context", "100000", "--prompts", "none"]
    ended = launch(2, "-m", "dsv4.bench", "model", "--device", "cpu", *sizes)
    assert [process.status for process in ended] == [BAD_INPUT, BAD_INPUT], ended
    (said,) = own_lines(ended[0].err)
    assert said.startswith("error: the model needs")
    assert "are free on a rank: weights" in said
    assert own_lines(ended[1].err) == []
    assert [process.out for process in ended] == ["", ""]


@pytest.mark.slow
def test_torchrun_generates_what_one_process_does(tmp_path, capsys):
    """By torchrun itself, with what it sets in the environment."""
    arguments = ["generate", str(checkpoint(tmp_path / "model")), *COMMAND]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [sys.executable, *command, "-m", "dsv4", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=_LIMIT,
    )
    assert ended.returncode == 0, ended.stderr
    assert command_line.main(arguments) == 0
    assert ended.stdout.decode() == capsys.readouterr().out


@pytest.mark.slow
def test_an_error_of_one_rank_is_said_by_rank_0_and_ends_all():
    began = time.monotonic()
    first, last = launch(2, "-c", FAILS)
    assert time.monotonic() - began < 60
    assert own_lines(first.err) == [
        "python -m dsv4 work: rank 1 failed: ValueError: bad weights",
    ]
    assert (first.status, last.status) == (FAILED, BAD_INPUT)
    assert own_lines(last.err) == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("x"), BAD_INPUT),
        (FileNotFoundError("x"), BAD_INPUT),
        (RankError("rank 0 failed: x", failed=0), None),
        (RankError("rank 2 failed: x", failed=2), FAILED),
        (RankError("a rank ended without a report"), None),
        (RuntimeError("x"), None),
        (torch.OutOfMemoryError("x"), None),
    ],
)
def test_which_errors_another_rank_than_0_leaves_to_it(error, status):
    assert processes._status_without_words(error, Launched(1, 4, 1)) == status
    assert processes._status_without_words(error, Launched(0, 4, 0)) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_bad_input_is_said_once_before_the_processes_are_joined(rank, monkeypatch, capsys):
    variables = {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    missing = ["generate", "/no/such/folder", "--prompt", "x", "--device", "cpu"]
    for main, arguments in (
        (command_line.main, missing),
        (cli.main, ["run", "no_such_operator", "--device", "cpu"]),
    ):
        assert main(arguments) == BAD_INPUT
        assert len(own_lines(capsys.readouterr().err)) == (rank == 0)


def test_words_that_are_left_to_rank_0_are_logged(monkeypatch, caplog):
    """Only this rank fails, before ranks report to each other."""
    monkeypatch.setattr(processes, "launched", lambda: Launched(1, 2, 1))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    caplog.set_level("INFO", "dsv4")
    with pytest.raises(SystemExit) as end, processes.joined("cpu"):
        raise FileNotFoundError("no such folder here")
    assert end.value.code == BAD_INPUT
    assert "rank 1" in caplog.text
    assert "no such folder here" in caplog.text


def test_a_process_alone_is_not_launched(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert launched() is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launched() is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert launched() == Launched(1, 2, 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launched() == Launched(1, 2, 1)


def test_a_group_that_does_not_end_is_left_after_some_seconds(monkeypatch, caplog):
    """NCCL's end may wait for a rank that is gone."""
    monkeypatch.setattr(processes, "_PATIENCE", 0.05)
    for name in ("synchronize", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    released = threading.Event()
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: released.wait(60))
    began = time.monotonic()
    processes._leave(torch.device("cuda", 0))
    assert time.monotonic() - began < 30
    released.set()
    assert "NCCL did not end" in caplog.text


def test_a_command_alone_ends_as_python_does(monkeypatch):
    monkeypatch.setattr(processes, "launched", lambda: None)
    with pytest.raises(SystemExit) as end:
        processes.run(lambda: 3)
    assert end.value.code == 3


def _fails() -> int:
    raise RuntimeError("by the test")


def _exits() -> int:
    raise SystemExit("argparse's words")


@pytest.mark.parametrize(("main", "status"), [(lambda: 3, 3), (_fails, FAILED), (_exits, FAILED)])
def test_one_process_of_several_ends_without_destructors(main, status, monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(processes, "launched", lambda: Launched(1, 2, 1))
    monkeypatch.setattr(os, "_exit", ended.append)
    processes.run(main)
    assert ended == [status]
    assert ("RuntimeError: by the test" in capsys.readouterr().err) == (main is _fails)
