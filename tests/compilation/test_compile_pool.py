"""Jobs in worker processes: each result comes back, and what fails fails alone."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.compilation import bundle, compiler, worker
from dsv4.compilation import forks as _compile_forks
from dsv4.compilation import pool as _compile_pool
from dsv4.cute.runtime import cubin_cache
from tests.compilation.compile_job_cases import Doubled, Ending, Failing, Kernel, Printing, Seeing

ROOT = Path(__file__).parents[2]


def results(jobs, workers=None, arch=""):
    return {f.job: (f.done.result, f.done.error) for f in _compile_pool.run(jobs, workers, arch)}


@pytest.mark.parametrize("workers", [2, 3])  # interpreters, and forks of one
def test_every_job_is_done_and_what_fails_fails_alone(workers):
    numbers = [Doubled(i) for i in range(6)]
    result = results([*numbers[:3], Failing(), Ending(), Printing(), *numbers[3:]], workers)
    assert result == {
        **{job: (2 * job.number, "") for job in numbers},
        Failing(): (None, "ValueError: number is 3, wanted 4"),
        Ending(): (None, "its process ended with status 7"),
        Printing(): ("printed", ""),
    }


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_have_the_search_path_of_the_parent_and_no_gpu(monkeypatch, tmp_path, workers):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.py").write_text("raise RuntimeError('of the current folder')")
    seen = [result for result, _ in results([Seeing(str(i)) for i in range(3)], workers).values()]
    for actual in seen:
        assert actual["process"] != os.getpid()
        assert actual["path"] == [os.path.abspath(path) for path in sys.path]
        assert not actual["interpreted"]
        assert (actual["devices"], actual["main"]) == ("", None)
        assert actual["threads"] == 1


def test_what_cannot_be_sent_fails_alone():
    jobs = [Doubled(lambda: 1), *[Doubled(i) for i in range(3)]]
    result = [f.done for f in _compile_pool.run(jobs, 1)]
    assert "pickle" in result[0].error.lower()
    assert sorted(done.result for done in result[1:]) == [0, 2, 4]


def test_few_jobs_are_done_here(monkeypatch):
    monkeypatch.setattr(_compile_pool, "start", lambda: pytest.fail("a process was started"))
    assert results([Doubled(1), Failing()])[Doubled(1)] == (2, "")
    monkeypatch.setattr(_compile_pool, "can_start", lambda: False)
    assert len(results([Doubled(i) for i in range(9)])) == 9
    assert results([]) == {}


def test_a_system_without_processes_does_the_jobs_here(monkeypatch):
    monkeypatch.setattr(_compile_pool, "start", lambda: None)
    assert results([Doubled(i) for i in range(5)], 2)[Doubled(4)] == (8, "")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_who_stops_early_ends_the_workers(monkeypatch, workers):
    started, ask = {}, _compile_pool._ask

    def asked(process, job):
        done = ask(process, job)
        if done.result is not None:
            started[process] = done.result["process"]
        return done

    monkeypatch.setattr(_compile_pool, "_ask", asked)
    running = _compile_pool.run([Seeing(str(i)) for i in range(200)], workers)
    next(running)
    running.close()
    assert started
    for process, number in started.items():
        assert process.poll() is not None
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


@pytest.mark.parametrize("arch", ["", "sm_90a"])
def test_workers_are_forks_where_they_are_several(monkeypatch, arch):
    """Of a process that has imported what compiles for an architecture, and nothing else."""
    monkeypatch.setattr(_compile_pool, "start", lambda: pytest.fail("a second interpreter"))
    jobs = [Seeing(str(i)) for i in range(12)]
    actual = [result for result, _ in results(jobs, 3, arch).values()]
    parents = {result["parent"] for result in actual}
    assert len(parents) == 1
    assert parents != {os.getpid()}
    assert all(result["imported"] == bool(arch) for result in actual)
    assert all(result["threads"] == 1 for result in actual)


def test_a_worker_that_ended_is_replaced():
    jobs = [Ending(), Ending("another"), Ending("a third"), *[Doubled(i) for i in range(9)]]
    result = results(jobs, 3)
    assert [result[job][0] for job in jobs[3:]] == [2 * i for i in range(9)]


@pytest.mark.parametrize("fault", ["no process", "no forks"])
def test_without_forks_there_are_interpreters(monkeypatch, fault):
    """The process that forks cannot be started, or ends at once."""
    forks, interpreter = _compile_forks, _compile_forks.interpreter

    def faulty(code, **options):
        if "main_of_forks" not in code:
            return interpreter(code, **options)
        return interpreter("pass", **options) if fault == "no forks" else None

    monkeypatch.setattr(forks, "interpreter", faulty)
    assert results([Doubled(i) for i in range(9)], 3)[Doubled(8)] == (16, "")


@pytest.mark.slow
def test_no_fork_where_there_are_threads():
    """A library that starts a thread when it is imported; the lock of one that is lost is held."""
    code = (
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True)"
        ".start(); from dsv4.compilation import worker as w; w.main_of_forks([1], []); "
        "print(1)"
    )
    process = _compile_forks.interpreter(code)
    assert process is not None
    assert process.communicate(timeout=60)[0] == b""
    assert process.returncode == 0


def test_jobs_are_added_while_others_are_done():
    with _compile_pool.Pool(3) as pool:
        pool.add([Doubled(i) for i in range(4)])
        result = []
        for finished in pool.finished():
            result.append(finished.done.result)
            if finished.job.number < 8:
                pool.add([Doubled(finished.job.number + 8)])
    assert sorted(result) == sorted(2 * i for i in [*range(4), *range(8, 12)])


def test_what_takes_longest_is_begun_first(monkeypatch):
    monkeypatch.setattr(_compile_pool, "can_start", lambda: False)
    jobs = [SimpleNamespace(seconds=n, run=lambda n=n: n) for n in (1, 3, 2, 3)]
    result = [finished.done.result for finished in _compile_pool.run(jobs)]
    assert result == [3, 3, 2, 1]


def test_bad_numbers_of_workers():
    with pytest.raises(ValueError, match="workers is 0, wanted at least 1 or None"):
        results([Doubled(1)], 0)


@pytest.mark.slow
def test_a_script_without_a_guard_runs_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            from dsv4.compilation import pool as _compile_pool
            from tests.compilation.compile_job_cases import Doubled
            print("begins")
            jobs = [Doubled(i) for i in range(4)]
            print(sorted(f.done.result for f in _compile_pool.run(jobs, 2)))
        """)
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "begins\n[0, 2, 4, 6]\n"


@given(st.binary(max_size=300), st.integers(0, 400))
def test_half_a_message_is_none(content, length):
    stream = io.BytesIO()
    worker.send(stream, content)
    whole = stream.getvalue()
    assert worker.receive(io.BytesIO(whole)) == content
    if length < len(whole):
        with pytest.raises(EOFError):
            worker.receive(io.BytesIO(whole[:length]))


class TestCompileAll:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, str(tmp_path / "kernels"))
        monkeypatch.setattr(_compile_pool, "can_start", lambda: False)
        monkeypatch.setattr(bundle.active(), "fresh", {})
        return tmp_path / "kernels"

    @staticmethod
    def compile_all(jobs):
        ready = []
        with _compile_pool.Pool() as pool:
            count = SimpleNamespace(expected=0, done=0)
            count.expect = lambda more: setattr(count, "expected", count.expected + more)
            count.advance = lambda: setattr(count, "done", count.done + 1)
            work = compiler.Compilation(pool, count, ready.append)
            work.add(jobs)
            work.finish()
        assert count.done == count.expected == len(work.outcome.jobs)
        assert {job.key for job in ready} == {*work.outcome.stored, *work.outcome.compiled}
        return work.outcome

    @given(st.lists(st.sampled_from(("missing", "stored", "failing")), max_size=8))
    def test_each_kernel_is_stored_compiled_or_failed(self, states):
        jobs = [Kernel(f"k{i}", state) for i, state in enumerate(states)]
        outcome = self.compile_all([*jobs, *jobs])
        assert outcome.jobs == jobs, "each once"
        of = {state: [j for j in jobs if j.state == state] for state in ("stored", "missing")}
        assert outcome.stored == {j.key: b"stored " + j.key for j in of["stored"]}
        assert outcome.compiled == {j.key: b"compiled " + j.key for j in of["missing"]}
        failing = {j.name for j in jobs if j.state == "failing"}
        assert outcome.failed == dict.fromkeys(failing, "ValueError: no such instruction")
        assert [image.name for image in outcome.images()] == [
            j.name for j in jobs if j.state != "failing"
        ]

    def test_they_are_kept_on_disk(self, folder):
        self.compile_all([Kernel("a")])
        assert (folder / "a.kernel").read_bytes() == b"compiled " + Kernel("a").key
        assert bundle.active().fresh == {}

    def test_without_a_folder_they_stay_in_memory(self, monkeypatch):
        monkeypatch.setattr(cubin_cache, "folder", lambda: None)
        self.compile_all([Kernel("a")])
        assert bundle.image("sm_90a", Kernel("a").key) == b"compiled " + Kernel("a").key
