"""Candidates that hang, crash, raise or are wrong fail alone: what is right is kept."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.bench.child import Child, FailedError
from dsv4.bench.measure import Options
from dsv4.bench.self_test import config as small_config
from dsv4.bench.tune import search
from dsv4.bench.tune.families import ALL
from dsv4.bench.tune.guarded_timer import GuardedTimer, Limits, Setup
from dsv4.bench.tune.work import Work, WrongError
from dsv4.cute.sm90 import tuned
from tests.bench.stub_measurer import (
    CRASHES,
    GOOD,
    HANGS,
    RAISES,
    WRONG,
    GpuMeasurer,
    StubCandidate,
    StubMeasurer,
)

FAMILIES = ("gemm_small_m", "attention")
LIMITS = Limits(draw=120.0, candidate=2.0)
REASONS = {
    RAISES: "raised RuntimeError: an illegal memory access was encountered",
    CRASHES: "crashed: its process ended with status 3",
    HANGS: "hung: us has no result after 2 seconds",
}


class StubTimer(GuardedTimer):
    """The timer with nothing to compile."""

    def prepare(self, works):
        pass


def works_of(kinds):
    """Return problems of two families in turn, whose candidates do what lists of kinds say."""
    return [
        Work(FAMILIES[i % 2], str(i), None, i, tuple(map(StubCandidate, range(len(does)), does)))
        for i, does in enumerate(kinds)
    ]


def tried(works):
    """Return the candidates of each problem that a search tries, by the rule for giving up."""
    failures, candidates_of = dict.fromkeys(FAMILIES, 0), []
    for work in works:
        candidates_of.append([])
        for candidate in work.candidates:
            if failures[work.family] < search.MOST_FAILURES:
                candidates_of[-1].append(candidate)
                failures[work.family] += candidate.does in REASONS
    return candidates_of


kinds = st.lists(
    st.lists(st.sampled_from([GOOD] * 4 + [WRONG, RAISES, CRASHES, HANGS]), max_size=4),
    max_size=5,
)


@given(kinds=kinds)
@settings(max_examples=6)
def test_good_candidates_are_kept_whatever_the_others_do(kinds):
    works, measured = works_of(kinds), []
    with Child(StubMeasurer) as child:
        timer = StubTimer(child, (), LIMITS)
        assert search.run(works, timer, 1e9, time.monotonic, measured) == ""
    by_work = {m.work: m for m in measured}
    for work, candidates in zip(works, tried(works), strict=True):
        if work not in by_work:
            assert candidates == []
            assert search.given_up(measured, work.family)
            continue
        own = by_work[work]
        assert own.us == {c: float(c.number) for c in candidates if c.does == GOOD}
        assert own.wrong == {c: "row 3 is off by 0.5" for c in candidates if c.does == WRONG}
        assert own.failed == {c: REASONS[c.does] for c in candidates if c.does in REASONS}
        assert own.is_whole == (len(candidates) == len(work.candidates))


def test_a_family_is_given_up_with_the_reason_and_the_others_go_on():
    works = works_of([[GOOD, CRASHES, CRASHES], [GOOD], [CRASHES, GOOD], [GOOD, GOOD], [GOOD]])
    measured, lines = [], []
    with Child(StubMeasurer) as child:
        search.run(works, StubTimer(child, (), LIMITS), 1e9, time.monotonic, measured, lines.append)
    assert [m.work.name for m in measured] == ["0", "1", "2", "3"]
    assert [m.is_whole for m in measured] == [True, True, False, True]
    assert search.given_up(measured, "attention") == ""
    assert search.given_up(measured, "gemm_small_m") == (
        "given up after 3 failed candidates, the last one crashed: its process ended with status 3"
    )
    assert len(lines) == 3
    assert lines[0] == (
        "failed, left out: gemm_small_m 0, StubCandidate(number=1, does='crashes'): "
        "crashed: its process ended with status 3"
    )


def test_one_process_measures_until_a_candidate_fails():
    with Child(StubMeasurer) as child:
        timer = StubTimer(child, (), LIMITS)
        [work] = works_of([[GOOD, WRONG, CRASHES]])
        good, wrong, crashes = work.candidates
        first = timer.clusters()
        timer.us(work, good)
        with pytest.raises(WrongError):
            timer.us(work, wrong)
        assert timer.clusters() == first
        with pytest.raises(FailedError):
            timer.us(work, crashes)
        second = timer.clusters()
        assert second != first
    for number in (*first, *second):
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


@pytest.fixture
def interruptible():
    """SIGINT raises, also where a shell started the tests in the background and has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_the_process_and_passes(interruptible):
    with Child(StubMeasurer) as child:
        timer = StubTimer(child, (), Limits(120.0, 60.0))
        [work] = works_of([[HANGS]])
        [number] = timer.clusters()
        main = threading.main_thread().ident
        threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            timer.us(work, work.candidates[0])
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


def test_a_signal_is_named_and_a_measurer_that_cannot_be_made_fails():
    with Child(StubMeasurer) as child:
        [number] = child.call("clusters", seconds=120.0)
        os.kill(number, signal.SIGSEGV)
        with pytest.raises(FailedError, match="crashed: its process ended with signal SIGSEGV"):
            child.call("clusters", seconds=120.0)
    with (
        Child(functools.partial(StubMeasurer, 1, 2)) as child,
        pytest.raises(FailedError, match="crashed: its process ended with status 1"),
    ):
        child.call("clusters", seconds=120.0)


def test_a_child_process_finds_the_problems_of_its_parent():
    """Names are unique, and a setup and candidates can be pickled."""
    configs = {"small": small_config(), "tiny": small_config()}
    base = tuned.resolve(None)
    setup = Setup(tuple(f.name for f in ALL), configs, base, Options(torch.device("cpu")))
    assert pickle.loads(pickle.dumps(setup)) == setup
    works = [work for family in ALL for work in family.works(configs)]
    assert len({(work.family, work.name) for work in works}) == len(works) > 0
    for work in works:
        assert pickle.loads(pickle.dumps(work.candidates)) == work.candidates
    work = works[0]
    with Child(setup.measurer) as child:
        child.call("draw", (work.family, work.name), seconds=600.0)
        with pytest.raises(FailedError, match="raised"):  # there is no GPU
            child.call("us", (work.family, work.name), work.candidates[0], seconds=60.0)


@pytest.mark.gpu
def test_kernels_that_hang_or_break_the_context_fail_alone():
    works, measured = works_of([[GOOD, HANGS, GOOD, RAISES, GOOD]]), []
    with Child(GpuMeasurer) as child:
        timer = StubTimer(child, (), Limits(120.0, 10.0))
        search.run(works, timer, 1e9, time.monotonic, measured)
    [own] = measured
    assert [c.number for c in own.us] == [0, 2, 4]
    assert own.us == {c: float(c.number) for c in own.us}
    hung, raised = own.failed.values()
    assert hung == "hung: us has no result after 10 seconds"
    assert raised.startswith("raised ")
