"""The search for plans with a timer that needs no GPU: fits, choices, budgets, interrupts."""

from __future__ import annotations

import dataclasses
import json
import random
import time

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4 import device as machine
from dsv4.bench.child import Child, FailedError
from dsv4.bench.cli import main
from dsv4.bench.measure import Options
from dsv4.bench.problem import UsageError
from dsv4.bench.self_test import config as small_config
from dsv4.bench.tune import command, fit, outcome, search
from dsv4.bench.tune.command import Search
from dsv4.bench.tune.families import ALL, named
from dsv4.bench.tune.gpu_timer import BrokenGpuError, GpuTimer
from dsv4.bench.tune.guarded_timer import GuardedTimer, Setup
from dsv4.bench.tune.outcome import CYCLES_PER_US
from dsv4.bench.tune.work import Baseline, Measured, WrongError
from dsv4.config import ModelConfig
from dsv4.cute.runtime.cubin_cache import key as cubin_key
from dsv4.cute.sm90 import tuned
from dsv4.cute.sm90.costs import Costs, flat, with_values
from dsv4.cute.sm90.tuned_file import FAMILIES, decode
from dsv4.cute.sm90.tuned_records import TUNED, Entry
from dsv4.device import Gpu

FLASH = {"flash": ModelConfig.flash()}
GPU = Gpu("NVIDIA H200", 132, 4.8)
BY_NAME = {family.name: family for family in ALL}


@pytest.fixture(scope="module")
def works():
    """The first problems of each family."""
    return {family.name: list(family.works(FLASH))[:16] for family in ALL}


@dataclasses.dataclass
class FakeTimer:
    """Times by constants that are known; a small-M plan's time is drawn by the plan."""

    costs: Costs = dataclasses.field(default_factory=Costs)
    wrong: tuple = ()
    failed: tuple = ()
    seconds: float = 0.0
    stop_at: int = 10**9
    error: type[BaseException] = KeyboardInterrupt
    asked: list = dataclasses.field(default_factory=list)
    prepared: list = dataclasses.field(default_factory=list)

    def prepare(self, works):
        self.prepared += works

    def clusters(self):
        return {1: 131, 2: 65, 3: 38, 4: 29, 6: 16, 8: 14}

    def clock(self):
        return self.seconds

    def us(self, work, candidate):
        assert work in self.prepared
        self.asked.append((work, candidate))
        self.seconds += 1
        if len(self.asked) > self.stop_at:
            raise self.error("stopped")
        if candidate in self.wrong:
            raise WrongError("row 3 is off by 0.5")
        if candidate in self.failed:
            raise FailedError("hung: us has no result after 60 seconds")
        family = BY_NAME[work.family]
        estimate = family.estimate(self.costs, tuned.tuned(), work, candidate)
        if not estimate:
            return 1 + random.Random(repr((work.key, candidate))).random()
        return estimate / (CYCLES_PER_US if family.scaled else 1)


def request(works, path=None, seconds=1e9, names=None, is_users=False):
    families = [family for family in ALL if names is None or family.name in names]
    listed = [work for family in families for work in works[family.name]]
    return Search(families, listed, tuned.resolve(GPU, user=False), seconds, path, is_users)


def other_costs(name, seed=1):
    """Constants of a family that differ from the rule's by up to a fifth."""
    drawn = random.Random(seed)
    own = {key: v * drawn.uniform(0.8, 1.2) for key, v in flat(getattr(Costs(), name)).items()}
    return with_values(Costs(), {f"{name}.{key}": value for key, value in own.items()})


@given(
    known=st.tuples(*(st.floats(0.2, 5.0) for _ in range(3))),
    noise=st.integers(0, 100),
)
def test_a_linear_fit_recovers_constants(known, noise):
    """Launch, rounds and bytes, as cost models have them."""
    drawn = random.Random(noise)
    points = [(1, drawn.randint(1, 9), drawn.uniform(1, 90)) for _ in range(20)]

    def model(values):
        return [sum(v * x for v, x in zip(values.values(), p, strict=True)) for p in points]

    names = ("launch", "round", "byte")
    times = model(dict(zip(names, known, strict=True)))
    fitted = fit.least_squares(model, times, dict.fromkeys(names, 1.0))
    assert list(fitted.values()) == pytest.approx(known, rel=1e-4)


def test_constants_that_no_time_depends_on_stay_and_zero_stays_zero():
    start = {"used": 1.0, "unused": 3.0, "absent": 0.0}
    fitted = fit.least_squares(lambda v: [2 * v["used"], 3 * v["used"]], [8.0, 12.0], start)
    assert fitted == pytest.approx({"used": 4.0, "unused": 3.0, "absent": 0.0}, rel=1e-6)


def test_no_constant_becomes_zero_or_negative():
    points = (1.0, 2.0, 3.0)
    fitted = fit.least_squares(
        lambda v: [v["constant"] + v["slope"] * x for x in points],
        [0.5, 1.6, 2.9],
        {"constant": 1.0, "slope": 1.0},
    )
    assert 0.0 < fitted["constant"] <= 0.001
    assert fitted["slope"] > 0.5


@given(st.lists(st.floats(0.001, 1e4), min_size=2, max_size=6))
@example([1e4, 0.001])
def test_a_constant_that_the_model_divides_by_stays_positive(times):
    def model(values):
        return [values["work"] * min(1.0, 2 / values["limit"]) for _ in times]

    fitted = fit.least_squares(model, times, {"work": 1.0, "limit": 4.0})
    assert min(fitted.values()) > 0.0


@pytest.mark.parametrize("name", ["gemm_wgmma", "gemm_fp8_wgmma", "gemm_e4m3", "attention"])
def test_the_fit_recovers_the_times_of_known_constants(name, works):
    family, costs, base = BY_NAME[name], other_costs(name), tuned.resolve(GPU, user=False)
    timer, measured = FakeTimer(costs), []
    assert search.run(works[name], timer, 1e9, timer.clock, measured) == ""
    fitted = outcome.fitted(family, base, measured)
    assert fitted.words == ""
    assert fitted.after.mean < 0.02 < fitted.before.mean
    # The plan of the least estimate is the fastest one, at sizes that were not measured, too.
    others = list(family.works({"pro": ModelConfig.pro()}))[:20]
    fitted_costs = dataclasses.replace(base.costs, **{name: fitted.constants})
    lost = []
    for work in others:
        plans = [plan for plan in work.candidates if not isinstance(plan, Baseline)]
        true = {plan: family.estimate(costs, base, work, plan) for plan in plans}
        chosen = min(plans, key=lambda p, w=work: family.estimate(fitted_costs, base, w, p))
        lost.append(true[chosen] / min(true.values()) - 1)
    assert sum(lost) / len(lost) < 0.02


def test_linear_constants_are_recovered_themselves(works):
    """Times of tiles, of conversions, and of the bfloat16 kernels."""
    costs, base = other_costs("gemm_e4m3"), tuned.resolve(GPU, user=False)
    timer, measured = FakeTimer(costs), []
    search.run(works["gemm_e4m3"], timer, 1e9, timer.clock, measured)
    fitted = flat(outcome.fitted(BY_NAME["gemm_e4m3"], base, measured).constants)
    known = flat(costs.gemm_e4m3)
    for name in (
        *("loop_wide.stage", "block_narrow.stage", "conversion_byte"),
        *("bfloat16_launch", "bfloat16_block.multiply"),
    ):
        assert fitted[name] == pytest.approx(known[name], rel=0.02)
    unmeasured = flat(base.costs.gemm_e4m3)
    assert fitted["experts_loop_wide.stage"] == unmeasured["experts_loop_wide.stage"]


def test_too_few_times_leave_the_constants(works):
    base, timer, measured = tuned.resolve(GPU, user=False), FakeTimer(), []
    search.run(works["gemm_wgmma"][:1], timer, 1e9, timer.clock, measured)
    fitted = outcome.fitted(BY_NAME["gemm_wgmma"], base, measured)
    assert fitted.constants == base.costs.gemm_wgmma
    assert "times are too few for" in fitted.words


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path))
    return tmp_path / "plans"


def test_the_chosen_plans_are_the_fastest_of_the_measured(works, folder, capsys):
    timer = FakeTimer(other_costs("gemm_wgmma"))
    path = tuned.user_path(GPU)
    assert command.measure(request(works, path), GPU, timer, timer.clock) == 0
    data = decode(path.read_text(), TUNED, "x")
    assert set(data.families) == set(BY_NAME)
    assert (data.clusters[1], data.clusters[8]) == (131, 14)
    times: dict = {}
    for work, candidate in list(timer.asked):
        if not isinstance(candidate, Baseline):
            times.setdefault(work.key, {})[candidate] = timer.us(work, candidate)
    assert set(data.entries) == set(times)
    for key, entry in data.entries.items():
        assert entry.us == min(times[key].values()) == times[key][entry.plan]
        assert entry.us <= entry.rule_us
    facts = {"capability": (9, 0), "sms": 132, "packages": True}
    with machine.pretend(**facts, name=GPU.name, bandwidth=4.8):
        for name, listed in works.items():
            for work in listed:
                assert BY_NAME[name].chosen(work) == data.plan_of(work.key)
            assert "tuned on this machine" in tuned.said(name)
    printed = capsys.readouterr().out
    assert "gemm_wgmma: 16 problems; the best plans are" in printed
    assert "constants stay: the family has no cost model" in printed
    assert f"wrote {path}" in printed


def test_a_wrong_candidate_is_named_and_left_out(works, folder, capsys):
    listed = {"gemm_small_m": works["gemm_small_m"][:2]}
    work = listed["gemm_small_m"][0]
    timer = FakeTimer()
    fastest = min(work.candidates, key=lambda c: FakeTimer(prepared=[work]).us(work, c))
    timer.wrong = (fastest,)
    path = folder / "x.json"
    asked_for = request(listed, path, names=["gemm_small_m"])
    assert command.measure(asked_for, GPU, timer, timer.clock) == command.WRONG
    assert decode(path.read_text(), TUNED, "x").plan_of(work.key) != fastest
    printed = capsys.readouterr().out
    assert f"wrong, left out: gemm_small_m {work.name}, {fastest}: row 3 is off by 0.5" in printed
    assert "wrong candidates left out" in printed


@pytest.mark.parametrize("count", [1, 2, 3])
def test_failed_candidates_are_named_and_end_their_family(count, works, folder, capsys):
    first, second = works["gemm_wgmma"][:2]
    timer, path = FakeTimer(failed=first.candidates[-count:]), folder / "x.json"
    asked_for = request({"gemm_wgmma": [first, second]}, path, names=["gemm_wgmma"])
    assert command.measure(asked_for, GPU, timer, timer.clock) == command.WRONG
    entries = decode(path.read_text(), TUNED, "x").entries
    assert entries[first.key].plan in first.candidates[:-count]
    assert (second.key in entries) == (count < search.MOST_FAILURES)
    printed = capsys.readouterr().out
    assert f"failed, left out: gemm_wgmma {first.name}, {first.candidates[-1]}: hung: " in printed
    if count < search.MOST_FAILURES:
        assert f"{count} failed candidates left out" in printed
    else:
        assert "given up after 3 failed candidates, the last one hung: us has no" in printed


def test_the_rule_can_be_wrong(works, folder, capsys):
    listed = {"gemm_small_m": works["gemm_small_m"][:1]}
    [work] = listed["gemm_small_m"]
    timer = FakeTimer(wrong=(work.candidates[0],))
    path = folder / "x.json"
    command.measure(request(listed, path, names=["gemm_small_m"]), GPU, timer, timer.clock)
    [entry] = decode(path.read_text(), TUNED, "x").entries.values()
    assert entry.rule_us is None
    assert entry.plan != work.candidates[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenGpuError, torch.OutOfMemoryError])
def test_what_stops_a_run_keeps_whole_problems(error, works, folder, capsys):
    first, second = works["gemm_wgmma"][:2]
    timer = FakeTimer(stop_at=len(first.candidates) + 3, error=error)
    path, asked_for = folder / "x.json", {"gemm_wgmma": [first, second]}
    status = command.measure(
        request(asked_for, path, names=["gemm_wgmma"]), GPU, timer, timer.clock
    )
    assert status == (130 if error is KeyboardInterrupt else 1)
    assert set(decode(path.read_text(), TUNED, "x").entries) == {first.key}
    assert "stopped: " in capsys.readouterr().out


def test_without_a_whole_problem_no_file_is_written(works, folder, capsys):
    timer = FakeTimer(stop_at=3)
    path = folder / "x.json"
    asked_for = request({"gemm_wgmma": works["gemm_wgmma"]}, path, names=["gemm_wgmma"])
    assert command.measure(asked_for, GPU, timer, timer.clock) == 130
    assert not folder.exists()
    assert "no file was written" in capsys.readouterr().out


def test_an_interrupt_leaves_the_file_before(works, folder):
    path = tuned.user_path(GPU)
    timer = FakeTimer()
    first = request({"attention": works["attention"]}, path, names=["attention"], is_users=True)
    assert command.measure(first, GPU, timer, timer.clock) == 0
    before = path.read_text()
    stopped = FakeTimer(stop_at=0)
    assert command.measure(first, GPU, stopped, stopped.clock) == 130
    assert path.read_text() == before
    second = request({"gemm_wgmma": works["gemm_wgmma"]}, path, names=["gemm_wgmma"], is_users=True)
    command.measure(second, GPU, timer, timer.clock)
    assert set(decode(path.read_text(), TUNED, "x").families) == {"attention", "gemm_wgmma"}
    assert [file.name for file in folder.iterdir()] == [path.name]


def test_no_candidate_begins_after_the_time(works):
    timer, measured = FakeTimer(), []
    listed = works["gemm_wgmma"]
    stopped = search.run(listed, timer, 30, timer.clock, measured)
    assert len(timer.asked) == 30
    whole = sum(m.is_whole for m in measured)
    assert stopped == f"30 seconds are over after {whole} of {len(listed)} problems"
    assert whole == sum(len(m.us) == len(m.work.candidates) for m in measured) > 0
    assert set(outcome.entries(measured)) == {m.work.key for m in measured if m.is_whole}


def test_families_take_turns(works):
    order = search.interleaved([works["gemm_wgmma"][:3], works["attention"][:1]])
    assert [w.family for w in order] == ["gemm_wgmma", "attention", "gemm_wgmma", "gemm_wgmma"]


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_candidates_can_be_chosen_and_compiled(family, works):
    """Each is what dispatch takes if it is the measured one, and has a kernel to compile."""
    module, function = FAMILIES[family.name].fits.split(":")
    fits = getattr(__import__(module, fromlist=[function]), function)
    base, seen = tuned.resolve(GPU, user=False), set()
    for work in works[family.name][::5]:
        assert work.candidates[0] == family.chosen(work)
        assert len(set(work.candidates)) == len(work.candidates) >= 2
        assert work.key not in seen
        seen.add(work.key)
        for candidate in work.candidates:
            kernels = family.plans(work, candidate)
            assert all(cubin_key(plan, "sm_90a") for plan in kernels)
            if isinstance(candidate, Baseline):
                continue
            assert kernels
            assert fits(work.key, candidate)
            entries = {**base.entries, work.key: Entry(candidate)}
            with machine.pretend(plans=dataclasses.replace(base, entries=entries)):
                assert family.chosen(work) == candidate


class CpuTimer(GpuTimer):
    """The real timer, with launches that the reference implementation makes."""

    def clusters(self):
        return dict(self._base.clusters)


def test_the_real_timer_checks_before_it_times(works, monkeypatch):
    """A result that is wrong has no time; one that is right has one, on any device."""
    family = BY_NAME["gemm_wgmma"]
    work = next(w for w in family.works({"small": small_config()}) if w.key.tokens == 32)
    timer = CpuTimer(
        [family], tuned.resolve(GPU, user=False), Options(torch.device("cpu"), repeat=1)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(type(family), "backend", lambda self, candidate: "reference")
    candidate = work.candidates[1]
    assert timer.us(work, candidate) > 0
    timer._expected = tuple(1.5 * part for part in timer._expected)
    with pytest.raises(WrongError, match="outside its error budget"):
        timer.us(work, candidate)
    monkeypatch.setattr(type(family), "backend", lambda self, candidate: "cute")
    with pytest.raises(WrongError, match="raised"):
        timer.us(work, candidate)
    monkeypatch.setattr(type(family), "chosen", lambda self, work: None)
    with pytest.raises(WrongError, match="not the plan that dispatch takes"):
        timer.us(work, candidate)


def test_without_a_gpu_it_raises_with_the_reason(capsys):
    assert main(["tune", "--device", "cpu"]) == 2
    assert (
        "needs a Hopper GPU (compute capability 9.0), the device is cpu" in capsys.readouterr().err
    )


def test_a_dry_run_lists_and_measures_nothing(folder, capsys):
    arguments = ["tune", "--device", "cpu", "--dry-run", "--only", "sparse_attention"]
    assert main([*arguments, "--shapes", "flash"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "without such a GPU the plans are those of an NVIDIA H200" in lines[0]
    assert all(line.startswith("attention: flash 64 heads") for line in lines[1:-1])
    assert lines[-1].endswith("candidates; nothing was measured")
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "rms_norm"], "--only is 'rms_norm', wanted of gemm, sparse_attention, gemm_sm"),
        (["--shapes", "flush"], "--shapes has 'flush', wanted of tiny, flash, pro"),
        (["--seconds", "-1"], "'-1' is no time"),
    ],
)
def test_options_that_do_not_exist(arguments, message, capsys):
    assert main(["tune", "--device", "cpu", "--dry-run", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_where_no_file_can_be_written_nothing_begins(folder, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "x.json"):
        with pytest.raises(UsageError, match="no file can be written there"):
            command._target(str(out), GPU)
    assert command._target(None, GPU) == (folder / "nvidia-h200.json", True)
    assert command._target(str(folder / "x.json"), GPU) == (folder / "x.json", False)


def test_families_by_operator_and_by_name():
    assert [f.name for f in named(["gemm_e4m3", "sparse_attention"])] == ["attention", "gemm_e4m3"]
    assert [f.op for f in named(["gemm"])] == ["gemm"] * 5
    with pytest.raises(UsageError):
        named(["gemm", "x"])


def test_measured_plans_leave_the_baseline_out():
    fitted = Measured(None, {Baseline(): 1.0})
    assert fitted.plans == {}


def test_the_file_is_json_that_a_person_can_read(works, folder):
    timer = FakeTimer()
    command.measure(request(works, folder / "x.json"), GPU, timer, timer.clock)
    content = json.loads((folder / "x.json").read_text())
    assert content["gpu"] == "NVIDIA H200"
    assert "torch" in content["versions"]
    assert content["source"].startswith("python -m dsv4.bench tune, commit ")
    assert {"date", "constants", "residual", "plans"} == set(content["families"]["attention"])
    assert content["families"]["gemm_wgmma"]["residual"]["points"] > 100


@pytest.mark.gpu
@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_candidates_are_right_on_a_gpu_and_have_times(family):
    """The first problem of each family, as ``tune`` measures it."""
    device = torch.device("cuda", 0)
    reason = command._impossible(device)
    if reason is not None:
        pytest.skip(reason)
    base = tuned.resolve(machine.gpu_of(torch.cuda.get_device_properties(0)), user=False)
    with machine.pretend(plans=base):
        work = next(family.works(FLASH))
    setup, measured = Setup((family.name,), FLASH, base, Options(device, repeat=3)), []
    with Child(setup.measurer) as child:
        timer = GuardedTimer(child, [family])
        stopped = search.run([work], timer, 120, time.monotonic, measured)
        clusters = timer.clusters()
    assert stopped == ""
    assert measured[0].wrong == measured[0].failed == {}
    assert set(measured[0].us) == set(work.candidates)
    assert all(0 < us < 1e5 for us in measured[0].us.values())
    assert clusters[1] >= 2 * clusters[2] > 0
