"""Jobs in worker processes: each result comes back, and what fails fails alone."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import _bundle, _compile, _compile_pool, _compile_worker
from dsv4.cute.runtime import cubin_cache
from tests.compile_job_cases import Doubled, Ending, Failing, Kernel, Printing, Seeing

ROOT = Path(__file__).parent.parent


def results(jobs, workers=None):
    return {f.job: (f.done.result, f.done.error) for f in _compile_pool.run(jobs, workers)}


def test_every_job_is_done_and_what_fails_fails_alone():
    numbers = [Doubled(i) for i in range(6)]
    found = results([*numbers[:3], Failing(), Ending(), Printing(), *numbers[3:]], 2)
    assert found == {
        **{job: (2 * job.number, "") for job in numbers},
        Failing(): (None, "ValueError: number is 3, wanted 4"),
        Ending(): (None, "its process ended with status 7"),
        Printing(): ("printed", ""),
    }


def test_workers_have_the_search_path_of_the_parent_and_no_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.py").write_text("raise RuntimeError('of the current folder')")
    seen = [result for result, _ in results([Seeing(str(i)) for i in range(3)], 2).values()]
    for found in seen:
        assert found["process"] != os.getpid()
        assert found["path"] == [os.path.abspath(path) for path in sys.path]
        assert not found["interpreted"]
        assert (found["devices"], found["main"]) == ("", None)


def test_what_cannot_be_sent_fails_alone():
    jobs = [Doubled(lambda: 1), *[Doubled(i) for i in range(3)]]
    found = [f.done for f in _compile_pool.run(jobs, 1)]
    assert "pickle" in found[0].error.lower()
    assert sorted(done.result for done in found[1:]) == [0, 2, 4]


def test_few_jobs_are_done_here(monkeypatch):
    monkeypatch.setattr(_compile_pool, "start", lambda: pytest.fail("a process was started"))
    assert results([Doubled(1), Failing()])[Doubled(1)] == (2, "")
    monkeypatch.setattr(_compile_pool, "can_start", lambda: False)
    assert len(results([Doubled(i) for i in range(9)])) == 9
    assert results([]) == {}


def test_a_system_without_processes_does_the_jobs_here(monkeypatch):
    monkeypatch.setattr(_compile_pool, "start", lambda: None)
    assert results([Doubled(i) for i in range(5)], 2)[Doubled(4)] == (8, "")


def test_who_stops_early_ends_the_workers(monkeypatch):
    started, start = [], _compile_pool.start
    monkeypatch.setattr(_compile_pool, "start", lambda: started.append(start()) or started[-1])
    running = _compile_pool.run([Doubled(i) for i in range(50)], 1)
    next(running)
    running.close()
    assert [process.poll() is not None for process in started] == [True]


def test_bad_numbers_of_workers():
    with pytest.raises(ValueError, match="workers is 0, wanted at least 1 or None"):
        results([Doubled(1)], 0)


def test_a_script_without_a_guard_runs_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            from dsv4 import _compile_pool
            from tests.compile_job_cases import Doubled
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
    _compile_worker.send(stream, content)
    whole = stream.getvalue()
    assert _compile_worker.receive(io.BytesIO(whole)) == content
    if length < len(whole):
        with pytest.raises(EOFError):
            _compile_worker.receive(io.BytesIO(whole[:length]))


class TestCompileAll:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, str(tmp_path / "kernels"))
        monkeypatch.setattr(_compile_pool, "can_start", lambda: False)
        monkeypatch.setattr(_bundle.active(), "fresh", {})
        return tmp_path / "kernels"

    @given(st.lists(st.sampled_from(("missing", "stored", "failing")), max_size=8))
    def test_each_kernel_is_stored_compiled_or_failed(self, places):
        jobs = [Kernel(f"k{i}", place) for i, place in enumerate(places)]
        count = []
        outcome = _compile.compile_all(jobs, lambda: count.append(1))
        of = {place: [j for j in jobs if j.place == place] for place in ("stored", "missing")}
        assert outcome.stored == {j.key: b"stored " + j.key for j in of["stored"]}
        assert outcome.compiled == {j.key: b"compiled " + j.key for j in of["missing"]}
        failing = {j.name for j in jobs if j.place == "failing"}
        assert outcome.failed == dict.fromkeys(failing, "ValueError: no such instruction")
        assert len(count) == len(jobs)
        assert [image.name for image in outcome.images()] == [
            j.name for j in jobs if j.place != "failing"
        ]

    def test_they_are_kept_on_disk(self, folder):
        _compile.compile_all([Kernel("a")], lambda: None)
        assert (folder / "a.kernel").read_bytes() == b"compiled " + Kernel("a").key
        assert _bundle.active().fresh == {}

    def test_without_a_folder_they_stay_in_memory(self, monkeypatch):
        monkeypatch.setattr(cubin_cache, "folder", lambda: None)
        _compile.compile_all([Kernel("a")], lambda: None)
        assert _bundle.image("sm_90a", Kernel("a").key) == b"compiled " + Kernel("a").key
