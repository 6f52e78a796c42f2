"""Ranks on GPUs of their own: NCCL, symmetric memory, and models over them.

One start of processes runs the checks of a part (``multi_gpu_program.PARTS``); each check is a test
here, and says what failed, on which rank.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.checkpoint import save
from dsv4.config import ModelConfig
from dsv4.parallel.context import ParallelContext
from dsv4.parallel.local_model import local_model
from dsv4.serving import Runner
from dsv4.testing.models import random_model
from dsv4.testing.ranks import run_ranks
from tests.parallel import multi_gpu_program
from tests.parallel.cases import CONFIG as SMALL
from tests.parallel.multi_gpu_program import (
    CONFIG,
    PARTS,
    in_place_of_decode_steps,
    name_of,
)

_SECONDS = {"cuda": 150.0, "cpu": 900.0}  # until the processes of a part are killed
_GRACE = 20.0  # seconds that the others have once one has failed
_KILLED = ("killed", "killed_nccl", "killed_dp")
GPUS = torch.cuda.device_count()
RANKS = [2] + [4] * (GPUS >= 4)


@dataclass(frozen=True)
class Outcome:
    """What the processes of a part reported.

    Attributes:
        reports: Of each rank, its checks by name.
        output: The end of what each rank printed.
        ended: Seconds between the first end of a process and that of each, or None: it was killed.
    """

    reports: list[dict[str, dict[str, Any]]]
    output: list[str]
    ended: list[float | None]

    def check(self, name: str) -> list[dict[str, Any]]:
        """The reports of a check; fails if it failed on a rank, or did not run there."""
        reports = [of_rank.get(name) for of_rank in self.reports]
        for rank, report in enumerate(reports):
            if report is not None and report["error"]:
                pytest.fail(f"on rank {rank}: {report['error']}", pytrace=False)
        for rank, report in enumerate(reports):
            if report is None:
                failed = [
                    f"{check} on rank {other}"
                    for other, of_rank in enumerate(self.reports)
                    for check, outcome in of_rank.items()
                    if outcome["error"]
                ]
                why = f"it waited or did not run, after {failed or 'no failed check'}"
                said = "\n".join(self.output)
                pytest.fail(f"no report of rank {rank}: {why}\n{said}", pytrace=False)
        print(f"{name}: {max(r['seconds'] for r in reports)} s, {reports[0].get('measured')}")
        return reports


def run(part: str, ranks: int, folder: Path, kind: str = "cuda") -> Outcome:
    """Start the processes of a part in a folder with the checkpoint; wait for all, or kill them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "tests.parallel.multi_gpu_program", part, str(folder), kind]
    processes = []
    for rank in range(ranks):
        with (folder / f"{rank}.txt").open("w") as output:
            processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    ended = _wait(processes, _SECONDS[kind], part in _KILLED)
    reports = []
    for rank in range(ranks):
        file = folder / f"{rank}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        reports.append({report["check"]: report for report in map(json.loads, lines)})
    output = [(folder / f"{rank}.txt").read_text()[-2500:] for rank in range(ranks)]
    return Outcome(reports, output, ended)


def _wait(
    processes: list[subprocess.Popen[bytes]], seconds: float, one_ends: bool
) -> list[float | None]:
    """Wait until all have ended, a while after one has failed, or for the time limit."""
    deadline, first = time.monotonic() + seconds, 0.0
    ended: dict[int, float] = {}
    while len(ended) < len(processes) and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank not in ended and process.poll() is not None:
                first = first or time.monotonic()
                ended[rank] = time.monotonic() - first
                if process.returncode and not one_ends:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.wait()
    return [ended.get(rank) for rank in range(len(processes))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("multi_gpu") / "checkpoint"
    save(random_model(CONFIG, 1, torch.bfloat16, mtp=True), folder, layout="nvidia")
    return folder


@pytest.fixture(scope="module")
def outcome_of(checkpoint, tmp_path_factory):
    """Runs a part once for each number of ranks; those that wait for an end all at once."""
    runs: dict[tuple[str, int], Future[Outcome]] = {}

    def start(pool: ThreadPoolExecutor, part: str, ranks: int) -> None:
        folder = tmp_path_factory.mktemp(f"{part}{ranks}")
        (folder / "checkpoint").symlink_to(checkpoint)
        runs[part, ranks] = pool.submit(run, part, ranks, folder)

    def of(part: str, ranks: int) -> Outcome:
        with ThreadPoolExecutor() as pool:
            if (part, ranks) not in runs:
                for name in _KILLED if part in _KILLED else (part,):
                    start(pool, name, ranks)
            return runs[part, ranks].result()

    return of


CHECKS = [(part, name_of(check)) for part in ("sums", "tp", "dp") for check in PARTS[part]]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("part", "check"), CHECKS, ids=["-".join(pair) for pair in CHECKS])
def test_ranks_on_gpus(part, check, ranks, outcome_of):
    outcome_of(part, ranks).check(check)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("part", _KILLED)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_killed_rank_ends_the_others(part, ranks, outcome_of):
    """In the middle of captured steps; with an error, and without a process that stays."""
    assert_killed(outcome_of(part, ranks))


def assert_killed(result: Outcome) -> None:
    """All ranks but the last have an error that says so, and their processes ended in time."""
    *others, last = result.reports
    wrong = [f"rank {len(others)} was to end in a decode step, and reported {last}"] if last else []
    for rank, report in enumerate(others):
        killed = report.get("killed")
        if killed is None or killed["error"] or killed["measured"]["after"] >= 60:
            wrong.append(f"rank {rank}, wanted a RankError within 60 s, reported {report}")
    if any(seconds is None or seconds >= 60 for seconds in result.ended):
        wrong.append(f"seconds until the processes ended: {result.ended}, wanted less than 60")
    if wrong:
        said = (f"rank {rank} printed:\n{text}" for rank, text in enumerate(result.output))
        pytest.fail("\n".join([*wrong, *said]).replace("\\n", "\n"), pytrace=False)
    print([report["killed"]["measured"] for report in others], result.ended)


def test_logits_of_ranks_have_a_bound_that_wrong_experts_exceed(tmp_path, monkeypatch):
    """The checks themselves, with ranks that are threads."""
    config = SMALL.replace(vocab_size=1024, max_position_embeddings=256)
    whole = random_model(config, 1, torch.bfloat16)
    save(whole, tmp_path / "checkpoint", layout="bf16")
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(multi_gpu_program, "PROMPTS", [[5, 9, 2], [7], [1000, 30, 4]])

    def work(context: ParallelContext) -> torch.Tensor:
        return multi_gpu_program._prefilled(local_model(whole, context))

    worker = multi_gpu_program.Worker(0, 2, tmp_path, torch.device("cpu"))
    ours = worker.shared["logits"] = run_ranks(2, work)[0]
    measured = multi_gpu_program._compared(worker, ours)
    assert max(measured["errors"]) > 0
    multi_gpu_program.virtual_ranks(worker)
    experts = whole.model.layers[-1].mlp.experts
    experts.down_proj.data = experts.down_proj.data.roll(1, 0)
    wrong = worker.shared["logits"] = run_ranks(2, work)[0]
    with pytest.raises(AssertionError, match="'errors'"):
        multi_gpu_program._compared(worker, wrong)
    with pytest.raises(AssertionError, match="apart"):
        multi_gpu_program.virtual_ranks(worker)


class _LaunchedError(Exception):
    """Raised in place of a decode step."""


def test_a_rank_that_is_to_be_killed_is_in_a_decode_step():
    """The hook of ``killed``: without it the rank ends with its whole text."""

    def launched(*args: Any) -> bool:
        raise _LaunchedError

    model = random_model(ModelConfig.tiny(), 1, torch.float32)
    runner = Runner(model, max_sequences=1, max_tokens=16, speculate=None)
    request = runner.add([1, 2, 3], max_new_tokens=8, stop_ids=())
    runner.step()
    with in_place_of_decode_steps(launched), pytest.raises(_LaunchedError):
        runner.run()
    runner.run()
    assert len(request.result()) == 8


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["tp", "dp", "killed", "killed_dp"])
def test_the_program_itself_on_a_cpu(part, tmp_path, monkeypatch):
    """What needs no GPU, over gloo."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save(
        random_model(CONFIG, 1, torch.bfloat16, mtp=True), tmp_path / "checkpoint", layout="nvidia"
    )
    result = run(part, 2, tmp_path, "cpu")
    if part in _KILLED:
        assert_killed(result)
        return
    for check in PARTS[part]:
        result.check(name_of(check))
