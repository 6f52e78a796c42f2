"""Every order in which the warp roles of the ``tcgen05`` kernels can proceed, on a small model.

Five kinds of processes a cluster: copy warps, their TMA copies in flight, the MMA warp, the tensor
core, and epilogue warps; of the grouped GEMM also scale warps. A step of one is enabled when the
mbarrier that it waits for has completed the phase. All reachable states are visited: none but the
last may be without a step, and no step may touch what another still needs.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from dsv4.cute.sm100.gemm_plan import Tcgen05Plan
from dsv4.cute.sm100.grouped_gemm_plan import GroupedTcgen05Plan


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a process.

    Attributes:
        name: What it is.
        waits: Barrier and parity, or None.
        after: Process and how many of its steps must be over: what was issued is executed later.
        arrives: Barriers that it arrives at.
        needs: Processes and steps that must be over; if they are not, the kernel is wrong.
    """

    name: str
    waits: tuple | None = None
    after: tuple | None = None
    arrives: tuple = ()
    needs: tuple = ()


class Model:
    """Processes of a plan with a given number of ring stages, tiles and stages of K."""

    def __init__(self, plan, stages, tiles, steps, early=True):
        self.plan, self.stages, self.tiles, self.steps = plan, stages, tiles, steps
        self.ctas = range(plan.ctas)
        self.early, self.has_scale_warp = early, isinstance(plan, GroupedTcgen05Plan)
        self.counts = {}
        for cta in self.ctas:
            for stage in range(stages):
                self.counts["full", cta, stage] = plan.full_arrivals + plan.ctas
                self.counts["empty", cta, stage] = 1
            for which in range(plan.accumulator_stages):
                self.counts["accumulator full", cta, which] = 1
                self.counts["accumulator empty", cta, which] = plan.ctas
        self.processes = {("multiply",): self.multiply(), ("core",): self.core()}
        for cta in self.ctas:
            if self.has_scale_warp:
                self.processes["scales", cta] = self.scales(cta)
            self.processes["copy", cta] = self.copy(cta)
            self.processes["flight", cta] = self.flight(cta)
            self.processes["epilogue", cta] = self.epilogue(cta)
        self.names = list(self.processes)
        self.arrivals = {
            name: list(itertools.accumulate((s.arrives for s in run), initial=()))
            for name, run in self.processes.items()
        }

    def fills(self):
        """Number, stage and the parity of the consumer's wait, of every stage that is filled."""
        for number in range(self.tiles * self.steps):
            yield number, number % self.stages, number // self.stages % 2

    def copy(self, cta):
        run = []
        for number, stage, parity in self.fills():
            announced = (("full", 0, stage),) if cta == 0 else ()
            run.append(
                Step(f"issue {number}", (("empty", cta, stage), parity ^ 1), arrives=announced)
            )
        end = self.tiles * self.steps
        for number in range(end, end + self.stages):
            stage, parity = number % self.stages, number // self.stages % 2 ^ 1
            run.append(Step("drain", (("empty", cta, stage), parity)))
        return run

    def scales(self, cta):
        return [
            Step(
                f"store {number}",
                (("empty", cta, stage), parity ^ 1),
                arrives=(("full", 0, stage),),
                needs=((("core",), self.core_step(number - self.stages)),),
            )
            for number, stage, parity in self.fills()
        ]

    def flight(self, cta):
        return [
            Step(
                f"write {number}",
                after=(("copy", cta), number + 1),
                arrives=(("full", 0, stage),),
                needs=((("core",), self.core_step(number - self.stages)),),
            )
            for number, stage, _ in self.fills()
        ]

    def core_step(self, number):
        """Steps of the tensor core up to and with the MMAs of a stage."""
        return 0 if number < 0 else number + number // self.steps + 1

    def multiply(self):
        run = []
        for tile in range(self.tiles):
            which, parity = self.plan.accumulator_phase(tile)
            run.append(Step("begin", (("accumulator empty", 0, which), parity ^ 1)))
            for k in range(self.steps):
                number = tile * self.steps + k
                stage, parity = number % self.stages, number // self.stages % 2
                run.append(Step(f"multiply {number}", (("full", 0, stage), parity)))
        for tile in range(self.tiles, self.tiles + self.plan.accumulator_stages):
            which, parity = self.plan.accumulator_phase(tile)
            run.append(Step("drain", (("accumulator empty", 0, which), parity ^ 1)))
        return run

    def core(self):
        run = []
        for tile in range(self.tiles):
            loaded = self.loads_over(tile - 2, whole=True)
            if self.plan.overlap:
                loaded = max(loaded, self.loads_over(tile - 1, whole=False))
            for k in range(self.steps):
                number = tile * self.steps + k
                needs = [(("epilogue", cta), loaded) for cta in self.ctas]
                needs += [(("flight", cta), number + 1) for cta in self.ctas]
                if self.has_scale_warp:
                    needs += [(("scales", cta), number + 1) for cta in self.ctas]
                issued = tile * (self.steps + 1) + 1 + k + 1
                stage = number % self.stages
                empties = tuple(("empty", cta, stage) for cta in self.ctas)
                run.append(
                    Step(f"mma {number}", None, (("multiply",), issued), empties, tuple(needs))
                )
            which, _ = self.plan.accumulator_phase(tile)
            full = tuple(("accumulator full", cta, which) for cta in self.ctas)
            run.append(Step(f"end {tile}", None, (("multiply",), issued), full))
        return run

    def loads_over(self, tile, whole):
        """Steps of the epilogue up to a tile's last load, or its last of common columns."""
        return 0 if tile < 0 else tile * 3 + (3 if whole else 1)

    def epilogue(self, cta):
        run = []
        for tile in range(self.tiles):
            which, parity = self.plan.accumulator_phase(tile)
            over = ((("core",), self.core_step((tile + 1) * self.steps - 1) + 1),)
            release = Step(f"release {tile}", arrives=(("accumulator empty", 0, which),))
            first = Step(f"load {tile}", (("accumulator full", cta, which), parity), needs=over)
            rest = Step(f"load rest of {tile}", needs=over)
            between = self.early and self.plan.early_chunks < self.plan.chunks
            run += [first, release, rest] if between else [first, rest, release]
        return run

    def phase(self, barrier, state):
        arrived = sum(
            self.arrivals[name][at].count(barrier)
            for name, at in zip(self.names, state, strict=True)
        )
        return arrived // self.counts[barrier]

    def enabled(self, step, state):
        if step.waits:
            barrier, parity = step.waits
            if self.phase(barrier, state) % 2 == parity:
                return False
        return not step.after or state[self.names.index(step.after[0])] >= step.after[1]

    def explore(self):
        """Return how many states there are; raise for one that is stuck or breaks a need."""
        ends = tuple(len(self.processes[name]) for name in self.names)
        start = (0,) * len(ends)
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            follow = []
            for i, name in enumerate(self.names):
                if state[i] == ends[i]:
                    continue
                step = self.processes[name][state[i]]
                if not self.enabled(step, state):
                    continue
                for other, count in step.needs:
                    at = state[self.names.index(other)]
                    assert at >= count, f"{name} does {step.name!r} before {other} is ready"
                follow.append((*state[:i], state[i] + 1, *state[i + 1 :]))
            assert follow or state == ends, f"stuck: {dict(zip(self.names, state, strict=True))}"
            fresh = [state for state in follow if state not in seen]
            seen.update(fresh)
            todo += fresh
        assert ends in seen
        return len(seen)


SIZES = [(1, 3, 1), (2, 3, 2), (3, 2, 2), (3, 5, 2), (4, 4, 3)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [64, 256], ids=["separate", "overlapping"])
def test_one_cta_never_stops(tokens, size):
    assert Model(Tcgen05Plan(tokens, 1, False), *size).explore() > 50


@pytest.mark.parametrize("size", [(1, 3, 1), (2, 3, 2), (3, 3, 2)], ids=str)
@pytest.mark.parametrize("tokens", [64, 256], ids=["separate", "overlapping"])
def test_two_ctas_never_stop(tokens, size):
    assert Model(Tcgen05Plan(tokens, 2, False), *size).explore() > 200


@pytest.mark.parametrize("size", [(1, 3, 1), (2, 3, 2), (3, 3, 2)], ids=str)
@pytest.mark.parametrize("how", [(64, 1), (256, 1), (64, 2)], ids=str)
def test_with_scale_warps_none_stops(how, size):
    explored_size = (2, 2, 1) if how[1] == 2 and size[0] == 3 else size
    assert Model(GroupedTcgen05Plan(*how, False), *explored_size).explore() > 50


def without(model, process, name, **changes):
    """The model with one step changed."""
    run = model.processes[process]
    at = next(i for i, step in enumerate(run) if step.name == name)
    run[at] = dataclasses.replace(run[at], **changes)
    arrives = (step.arrives for step in run)
    model.arrivals[process] = list(itertools.accumulate(arrives, initial=()))
    return model


def test_a_release_that_is_missing_stops_it():
    model = Model(Tcgen05Plan(64, 1, False), 2, 3, 1)
    with pytest.raises(AssertionError, match="stuck"):
        without(model, ("epilogue", 0), "release 0", arrives=()).explore()


def test_a_wait_that_is_missing_is_seen():
    model = Model(Tcgen05Plan(64, 1, False), 2, 3, 1)
    with pytest.raises(AssertionError, match=r"does 'write 2' before"):
        without(model, ("copy", 0), "issue 2", waits=None).explore()


def test_a_release_before_the_load_is_seen(monkeypatch):
    """Accumulators that do not overlap must be loaded as a whole."""
    monkeypatch.setattr(Tcgen05Plan, "early_chunks", 1)
    with pytest.raises(AssertionError, match="does 'mma 2' before"):
        Model(Tcgen05Plan(64, 1, False), 3, 3, 1).explore()


def test_scales_that_are_stored_too_early_are_seen():
    model = Model(GroupedTcgen05Plan(64, 1, False), 2, 3, 1)
    with pytest.raises(AssertionError, match=r"scales.* does 'store 2' before"):
        without(model, ("scales", 0), "store 2", waits=None).explore()


def test_mmas_that_do_not_wait_for_scales_are_seen(monkeypatch):
    """If TMA copies alone fill a stage, the other CTA's scales may come later."""
    monkeypatch.setattr(GroupedTcgen05Plan, "full_arrivals", 2)
    with pytest.raises(AssertionError, match="does 'mma 0' before"):
        Model(GroupedTcgen05Plan(64, 2, False), 1, 1, 1).explore()
