"""Every order in which the roles of Blackwell's kernels can proceed, on a small model of them.

Five kinds of processes a cluster: warps that copy, their copies in flight, the warp that
multiplies, the tensor core, and warps that load results; of the grouped kernel also warps that turn
scales. A step of one is enabled when the barrier
it waits for has passed the phase. All reachable states are visited: none but the last may be
without a step, and no step may touch what another still needs.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from dsv4.cute.sm100.dense_plan import DensePlan
from dsv4.cute.sm100.grouped_plan import GroupedPlan


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a process.

    Attributes:
        waits: Barrier and parity, or None.
        after: Process and how many of its steps must be over: what was asked for comes later.
        arrives: Barriers that are arrived at.
        needs: The same as ``after``, but a mistake of the kernel if it does not hold.
        name: What it is.
    """

    name: str
    waits: tuple | None = None
    after: tuple | None = None
    arrives: tuple = ()
    needs: tuple = ()


class Model:
    """Processes of a plan with so few stages, tiles and stages of K."""

    def __init__(self, plan, stages, tiles, steps, early=True):
        self.plan, self.stages, self.tiles, self.steps = plan, stages, tiles, steps
        self.blocks = range(plan.blocks)
        self.early, self.turns = early, isinstance(plan, GroupedPlan)
        self.counts = {}
        for block in self.blocks:
            for stage in range(stages):
                self.counts["full", block, stage] = plan.full_arrivals + plan.blocks
                self.counts["empty", block, stage] = 1
            for which in range(plan.sum_stages):
                self.counts["sums full", block, which] = 1
                self.counts["sums empty", block, which] = plan.blocks
        self.processes = {("multiply",): self.multiply(), ("core",): self.core()}
        for block in self.blocks:
            if self.turns:
                self.processes["turn", block] = self.turn(block)
            self.processes["copy", block] = self.copy(block)
            self.processes["flight", block] = self.flight(block)
            self.processes["results", block] = self.results(block)
        self.names = list(self.processes)
        self.arrivals = {
            name: list(itertools.accumulate((s.arrives for s in run), initial=()))
            for name, run in self.processes.items()
        }

    def fills(self):
        """Number, stage and the parity of the consumer's wait, of every stage that is filled."""
        for number in range(self.tiles * self.steps):
            yield number, number % self.stages, number // self.stages % 2

    def copy(self, block):
        run = []
        for number, stage, parity in self.fills():
            announced = (("full", 0, stage),) if block == 0 else ()
            run.append(
                Step(f"ask {number}", (("empty", block, stage), parity ^ 1), arrives=announced)
            )
        end = self.tiles * self.steps
        for number in range(end, end + self.stages):
            stage, parity = number % self.stages, number // self.stages % 2 ^ 1
            run.append(Step("drain", (("empty", block, stage), parity)))
        return run

    def turn(self, block):
        return [
            Step(
                f"turn {number}",
                (("empty", block, stage), parity ^ 1),
                arrives=(("full", 0, stage),),
                needs=((("core",), self.core_step(number - self.stages)),),
            )
            for number, stage, parity in self.fills()
        ]

    def flight(self, block):
        return [
            Step(
                f"write {number}",
                after=(("copy", block), number + 1),
                arrives=(("full", 0, stage),),
                needs=((("core",), self.core_step(number - self.stages)),),
            )
            for number, stage, _ in self.fills()
        ]

    def core_step(self, number):
        """Steps of the tensor core up to and with the product of a stage."""
        return 0 if number < 0 else number + number // self.steps + 1

    def multiply(self):
        run = []
        for tile in range(self.tiles):
            which, parity = self.plan.sums(tile)
            run.append(Step("begin", (("sums empty", 0, which), parity ^ 1)))
            for k in range(self.steps):
                number = tile * self.steps + k
                stage, parity = number % self.stages, number // self.stages % 2
                run.append(Step(f"multiply {number}", (("full", 0, stage), parity)))
        for tile in range(self.tiles, self.tiles + self.plan.sum_stages):
            which, parity = self.plan.sums(tile)
            run.append(Step("drain", (("sums empty", 0, which), parity ^ 1)))
        return run

    def core(self):
        run = []
        for tile in range(self.tiles):
            loaded = self.loads_over(tile - 2, whole=True)
            if self.plan.overlap:
                loaded = max(loaded, self.loads_over(tile - 1, whole=False))
            for k in range(self.steps):
                number = tile * self.steps + k
                needs = [(("results", block), loaded) for block in self.blocks]
                needs += [(("flight", block), number + 1) for block in self.blocks]
                if self.turns:
                    needs += [(("turn", block), number + 1) for block in self.blocks]
                asked = tile * (self.steps + 1) + 1 + k + 1
                stage = number % self.stages
                empties = tuple(("empty", block, stage) for block in self.blocks)
                run.append(
                    Step(f"product {number}", None, (("multiply",), asked), empties, tuple(needs))
                )
            which, _ = self.plan.sums(tile)
            full = tuple(("sums full", block, which) for block in self.blocks)
            run.append(Step(f"end {tile}", None, (("multiply",), asked), full))
        return run

    def loads_over(self, tile, whole):
        """Steps of the results up to a tile's last load, or its last of shared columns."""
        return 0 if tile < 0 else tile * 3 + (3 if whole else 1)

    def results(self, block):
        run = []
        for tile in range(self.tiles):
            which, parity = self.plan.sums(tile)
            over = ((("core",), self.core_step((tile + 1) * self.steps - 1) + 1),)
            release = Step(f"release {tile}", arrives=(("sums empty", 0, which),))
            first = Step(f"load {tile}", (("sums full", block, which), parity), needs=over)
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
        """How many states there are; raises for one that is stuck or breaks a need."""
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
@pytest.mark.parametrize("tokens", [64, 256], ids=["apart", "shared columns"])
def test_one_block_never_stops(tokens, size):
    assert Model(DensePlan(tokens, 1, False), *size).explore() > 50


@pytest.mark.parametrize("size", [(1, 3, 1), (2, 3, 2), (3, 3, 2)], ids=str)
@pytest.mark.parametrize("tokens", [64, 256], ids=["apart", "shared columns"])
def test_two_blocks_never_stop(tokens, size):
    assert Model(DensePlan(tokens, 2, False), *size).explore() > 200


@pytest.mark.parametrize("size", [(1, 3, 1), (2, 3, 2), (3, 3, 2)], ids=str)
@pytest.mark.parametrize("how", [(64, 1), (256, 1), (64, 2)], ids=str)
def test_with_scales_that_are_turned_none_stops(how, size):
    few = (2, 2, 1) if how[1] == 2 and size[0] == 3 else size
    assert Model(GroupedPlan(*how, False), *few).explore() > 50


def without(model, process, name, **changes):
    """The model with one step changed."""
    run = model.processes[process]
    at = next(i for i, step in enumerate(run) if step.name == name)
    run[at] = dataclasses.replace(run[at], **changes)
    arrives = (step.arrives for step in run)
    model.arrivals[process] = list(itertools.accumulate(arrives, initial=()))
    return model


def test_a_release_that_is_missing_stops_it():
    model = Model(DensePlan(64, 1, False), 2, 3, 1)
    with pytest.raises(AssertionError, match="stuck"):
        without(model, ("results", 0), "release 0", arrives=()).explore()


def test_a_wait_that_is_missing_is_seen():
    model = Model(DensePlan(64, 1, False), 2, 3, 1)
    with pytest.raises(AssertionError, match=r"does 'write 2' before"):
        without(model, ("copy", 0), "ask 2", waits=None).explore()


def test_a_release_before_the_load_is_seen(monkeypatch):
    """Accumulators that do not share columns must be loaded as a whole."""
    monkeypatch.setattr(DensePlan, "early_chunks", 1)
    with pytest.raises(AssertionError, match="does 'product 2' before"):
        Model(DensePlan(64, 1, False), 3, 3, 1).explore()


def test_scales_that_are_turned_too_early_are_seen():
    model = Model(GroupedPlan(64, 1, False), 2, 3, 1)
    with pytest.raises(AssertionError, match=r"turn.* does 'turn 2' before"):
        without(model, ("turn", 0), "turn 2", waits=None).explore()


def test_a_product_that_does_not_wait_for_scales_is_seen(monkeypatch):
    """Where tensor copies alone fill a stage, the other block's scales may come later."""
    monkeypatch.setattr(GroupedPlan, "full_arrivals", 2)
    with pytest.raises(AssertionError, match="does 'product 0' before"):
        Model(GroupedPlan(64, 2, False), 1, 1, 1).explore()
