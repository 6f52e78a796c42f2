"""Long prompts pass their experts through a buffer: bits, order of streams, what is copied when."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4 import layers
from dsv4.layers import HostExperts
from dsv4.layers import experts as experts_module
from dsv4.layers._expert_staging import ExpertStaging
from dsv4.layers._expert_waves import plan_stream
from dsv4.layers.host_experts import Hosting
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise
from tests.layers.test_host_experts import (
    EXPERTS,
    TOP_K,
    experts_in_slots,
    make_experts,
    poison,
    tokens,
)

SIDE = "copies"


@functools.cache
def cached_experts(kind: str, seed: int) -> layers.DeepseekV4Experts:
    return make_experts(kind, seed)


def staged(
    kinds: list[str], static: int, slots: int, half: int, least: float = 0
) -> tuple[list[layers.DeepseekV4Experts], list[layers.DeepseekV4Experts], ExpertStaging]:
    """Layers with all experts, the same with a buffer of two times ``half`` experts, and it."""
    plain = [cached_experts(kind, seed) for seed, kind in enumerate(kinds)]
    hosted = copy.deepcopy(plain)
    hosting = Hosting(HostExperts(static, slots, staged=half), len(kinds))
    for layer in hosted:
        hosting.move(layer)
    assert hosting.staging is not None
    hosting.staging.choices_per_expert = least
    return plain, hosted, hosting.staging


@dataclass
class Clocks:
    """Streams as vector clocks: what has certainly ended when an operation begins."""

    of: dict[str, dict[str, int]] = field(default_factory=dict)

    def operate(self, stream: str) -> dict[str, int]:
        """Launch an operation; return the clock at its begin, with its own number."""
        clock = self.of.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        return dict(clock)

    def merge(self, stream: str, other: dict[str, int]) -> None:
        clock = self.of.setdefault(stream, {})
        for name, number in other.items():
            clock[name] = max(clock.get(name, 0), number)


@dataclass(frozen=True)
class Access:
    """A copy to a half, a GEMM that reads one, or a use of its memory before the buffer had it."""

    kind: str
    half: int
    stream: str
    clock: dict[str, int]

    def ended_before(self, other: Access) -> bool:
        return other.clock.get(self.stream, 0) >= self.clock[self.stream]


@contextlib.contextmanager
def recorded(staging: ExpertStaging):
    """Yield a list of accesses to the halves, with streams and events that are clocks."""
    clocks, accesses, active, patch = Clocks(), [], ["compute"], pytest.MonkeyPatch()

    class Stream:
        def __init__(self, name=SIDE):
            self.name = name if isinstance(name, str) else SIDE

        def wait_stream(self, other):
            clocks.merge(self.name, clocks.of.get(other.name, {}))

        def wait_event(self, event):
            clocks.merge(self.name, event)

        def record_event(self):
            return dict(clocks.of.get(self.name, {}))

    @contextlib.contextmanager
    def stream(which):
        active.append(which.name)
        yield
        active.pop()

    def access(kind, half):
        accesses.append(Access(kind, half, active[-1], clocks.operate(active[-1])))

    original = ExpertStaging._copy

    def copying(self, half, load):
        access("copy", half.memory.data_ptr())
        original(self, half, load)

    first = staging._halves[0].memory
    middle = first.data_ptr() + first.numel()

    def reading(function):
        def call(x, weight, *rest, **options):
            codes = weight if isinstance(weight, torch.Tensor) else weight.codes
            if first.data_ptr() <= codes.data_ptr() < first.data_ptr() + staging.nbytes:
                access("read", middle if codes.data_ptr() >= middle else first.data_ptr())
            else:
                clocks.operate("compute")
            return function(x, weight, *rest, **options)

        return call

    with patch.context() as patched:
        patched.setattr(staging, "device", torch.device("cuda"))
        patched.setattr(torch.cuda, "current_stream", lambda _: Stream("compute"))
        patched.setattr(torch.cuda, "Stream", Stream)
        patched.setattr(torch.cuda, "stream", stream)
        patched.setattr(torch.Tensor, "record_stream", lambda *_: None)
        patched.setattr(ExpertStaging, "_copy", copying)
        for name in [name for name in vars(experts_module) if name.startswith("grouped_gemm")]:
            patched.setattr(experts_module, name, reading(getattr(experts_module, name)))
        if staging._side is None:
            for half in staging._halves:
                access("former", half.memory.data_ptr())
        yield accesses


def check_order(accesses: list[Access]) -> None:
    """Every copy follows the last readers of its half, every read follows the copy before it."""
    last: dict[int, list[Access]] = {}
    for access in accesses:
        before = last.setdefault(access.half, [])
        if access.kind == "former":
            before.append(access)
        elif access.kind == "copy":
            assert all(other.ended_before(access) for other in before), "overwritten while read"
            last[access.half] = [access]
        else:
            assert before, "a half is read that holds nothing"
            assert before[0].kind == "copy"
            assert before[0].ended_before(access), "read while it is copied"
            before.append(access)


def poison_halves(staging: ExpertStaging) -> None:
    """All bits of the buffer are one, and nothing that was copied there counts."""
    staging._staged.clear()
    for half in staging._halves:
        half.memory.fill_(0xFF)


class TestLayers:
    @given(
        seed=strategies.seeds(),
        kind=st.sampled_from(["plain", "nvfp4", "packed", "exact"]),
        static=st.integers(0, EXPERTS - 1),
        spare=st.integers(0, 3),
        half=st.integers(1, 5),
        sizes=st.lists(st.sampled_from([1, 2, 9, 12]), min_size=1, max_size=4),
        least=st.sampled_from([0, 2]),
        poisoned=st.booleans(),
        repinned=st.booleans(),
    )
    @settings(max_examples=5)
    @example(1, "packed", 4, 0, 2, [9, 1, 9], 0, True, False)
    @example(2, "exact", 0, 0, 5, [9, 1, 9], 0, True, True)
    @example(4, "packed", 2, 1, 1, [9, 1, 12], 2, False, True)
    def test_has_the_bits_of_all_resident_experts(
        self, seed, kind, static, spare, half, sizes, least, poisoned, repinned
    ):
        """Three layers in turn: prompts through the buffer or in waves, and steps in slots."""
        others = EXPERTS - static
        slots = min(others, min(TOP_K, others) + spare)
        plain, hosted, staging = staged([kind] * 3, static, slots, min(half, others), least)
        with recorded(staging) as accesses:
            for step, count in enumerate(sizes):
                if poisoned:
                    poison(hosted[step % 3])
                    poison_halves(staging)
                for number, (truth, layer) in enumerate(zip(plain, hosted, strict=True)):
                    x, ids, weights = tokens(seed + 5 * step + number, count, padding=True)
                    before = layer.hosted.state.expert_in.tolist()
                    result = layer(x, ids, weights, x)
                    assert_bitwise(result, truth(x, ids, weights, x), f"step {step}")
                    choices = int((ids >= 0).sum())
                    if layer.hosted.obstacle(ids.numel()) and staging.takes(choices, EXPERTS):
                        assert layer.hosted.state.expert_in.tolist() == before, "slots changed"
                if repinned:
                    layers.repin_(torch.nn.ModuleList(hosted))
        check_order(accesses)

    def test_calibrated_experts_have_their_own_input_scales(self):
        (plain,), (layer,), _ = staged(["calibrated"], 2, 3, 2)
        for seed in range(3):
            x, ids, weights = tokens(seed, 12)
            assert_bitwise(layer(x, ids, weights), plain(x, ids, weights), f"seed {seed}")

    def test_layers_of_different_layouts_share_the_buffer(self):
        """The last one is the largest: the buffer grows while the model is filled."""
        plain, hosted, staging = staged(["nvfp4", "packed", "plain"], 2, 3, 3)
        assert len({layer.hosted.layout for layer in hosted}) == 3
        for seed in range(2):
            poison_halves(staging)
            for truth, layer in zip(plain, hosted, strict=True):
                x, ids, weights = tokens(seed, 12)
                assert_bitwise(layer(x, ids, weights), truth(x, ids, weights), f"seed {seed}")


class TestCopies:
    @pytest.fixture
    def three(self):
        return staged(["nvfp4"] * 3, 2, 3, 2)

    def test_run_ahead_of_the_next_layer(self, three):
        """7 experts of a layer are 4 loads. Its last two copies are the next layer's first."""
        _, hosted, staging = three
        with recorded(staging) as accesses:
            for number, layer in enumerate(hosted):
                layer(*tokens(number, 30))
                copies = sum(access.kind == "copy" for access in accesses)
                assert copies == min(12, 4 * (number + 1) + 2), "each expert once"
        halves = [access.half for access in accesses if access.kind == "copy"]
        assert all(a != b for a, b in itertools.pairwise(halves)), "in turn"
        kinds = [access.kind for access in accesses]
        assert kinds[2:5] == ["copy", "copy", "read"], "both halves are filled before a GEMM"
        streams = {access.kind: access.stream for access in accesses[2:]}
        assert streams == {"copy": SIDE, "read": "compute"}

    def test_wait_for_no_router(self, three, monkeypatch):
        """A step reads the slots of the next layer beside its own; the choices change no copy."""
        _, hosted, _ = three
        read, tolist = [], torch.Tensor.tolist
        monkeypatch.setattr(torch.Tensor, "tolist", lambda t: read.append(tolist(t)) or read[-1])
        monkeypatch.setattr("dsv4.layers._hosted_experts.check_ids", lambda *_: None)
        steps = [hosted[0].hosted.plan(tokens(seed, 30)[1]) for seed in (0, 1)]
        assert [values[EXPERTS:] for values in read] == [[0, 1, 2, 3, 4] * 2] * 2
        assert read[0][:EXPERTS] != read[1][:EXPERTS]
        assert steps[0].loads == steps[1].loads
        assert steps[0].following == steps[1].following
        assert [load.experts for load in steps[0].following] == [(5, 6), (7, 8), (9, 10), (11,)]

    @pytest.mark.parametrize(
        ("event", "message"),
        [("read", "overwritten while read"), ("copied", "read while it is copied")],
    )
    def test_an_order_that_is_wrong_is_seen(self, three, event, message, monkeypatch):
        """Without the events behind the last reader, or behind the copy, the check fails."""
        _, hosted, staging = three
        start = ExpertStaging._start

        def without(self, half, load):
            if half.read is not None and event == "read":
                half.read = {}
            start(self, half, load)
            if event == "copied":
                half.copied = {}

        with recorded(staging) as accesses:
            monkeypatch.setattr(ExpertStaging, "_start", without)
            hosted[0](*tokens(0, 30))
        with pytest.raises(AssertionError, match=message):
            check_order(accesses)

    def test_are_made_again_if_the_slots_changed(self, three):
        """Decode steps of the next layer, or an exchange, follow copies that ran ahead."""
        plain, hosted, staging = three
        with recorded(staging) as accesses:
            hosted[0](*tokens(0, 30))
            assert len(staging._staged) == 2
            for seed in range(9):
                hosted[1](*tokens(seed, 1))
            for number in (1, 2, 0):
                arguments = tokens(number, 30)
                assert_bitwise(hosted[number](*arguments), plain[number](*arguments), "result")
        check_order(accesses)

    @pytest.mark.parametrize("after", [1, 2, 5])
    def test_of_an_interrupted_step_do_no_harm(self, three, after, monkeypatch):
        plain, hosted, staging = three
        left, gemm = [after], experts_module.grouped_gemm

        def interrupted(*arguments, **options):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return gemm(*arguments, **options)

        with recorded(staging) as accesses:
            with monkeypatch.context() as patch:
                patch.setattr(experts_module, "grouped_gemm", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    hosted[0](*tokens(0, 30))
            assert staging._taken is None
            for number in (0, 1, 2):
                arguments = tokens(number, 30)
                assert_bitwise(hosted[number](*arguments), plain[number](*arguments), "result")
        check_order(accesses)

    def test_are_counted(self):
        """Hits are of asked experts; bytes are of all that were copied."""
        _, (layer,), _ = staged(["nvfp4"], 2, 3, 2)
        x, _, weights = tokens(0, 6)
        ids = torch.tensor([[0, 3, 11], [1, 4, 11]]).repeat(3, 1)
        layer(x, ids, weights)
        use = layers.cache_use(torch.nn.ModuleList([layer]))
        assert (use.asked, use.loaded, use.unasked) == (5, 1, 6)
        assert use.hit_rate == 0.8
        assert use.loaded_bytes == 7 * layer.hosted.layout.row_bytes
        assert use.since(use).unasked == 0

    def test_are_for_many_choices_alone(self):
        """16 choices per expert: 683 tokens of Flash; with fewer the slots take the experts."""
        assert not ExpertStaging(1, torch.device("cpu")).takes(682 * 6, 256)
        assert ExpertStaging(1, torch.device("cpu")).takes(683 * 6, 256)
        _, (layer,), staging = staged(["nvfp4"], 2, 3, 2, least=16)
        with recorded(staging) as accesses:
            x, ids, weights = tokens(0, 80)
            ids[63:] = -1  # padding is no choice
            layer(x, ids, weights)
            assert {access.kind for access in accesses} == {"former"}
            layer(*tokens(0, 64))
            assert len(accesses) > 7


@given(
    seed=strategies.seeds(),
    static=st.integers(0, 6),
    cached=st.integers(0, 7),
    capacity=st.integers(1, 9),
    empty=st.sets(st.integers(0, 6)),
)
def test_a_stream_holds_every_expert_once(seed, static, cached, capacity, empty):
    experts = 16
    generator = strategies.generator(seed)
    expert_in = experts_in_slots(generator, experts, static, cached, empty)
    plan = plan_stream(expert_in, static, experts, capacity)
    assert list(plan.expert_in) == expert_in
    assert sorted(plan.position) == list(range(experts))
    positions = []
    for wave in plan.waves:
        inside = {slot: e for e, slot in wave.loads} if wave.staged else expert_in
        assert not wave.staged or len(wave.loads) == wave.stop <= capacity
        for slot in range(wave.start, wave.stop):
            assert plan.position[inside[slot]] == wave.first + slot - wave.start
        positions += range(wave.first, wave.stop_first)
    assert positions == list(range(experts))


def test_a_model_is_freed_with_its_last_owner():
    """No cycle keeps 100 GB of locked memory until the garbage collector runs."""
    _, hosted, staging = staged(["nvfp4"] * 2, 2, 3, 2)
    hosted[0](*tokens(0, 30))
    assert staging._staged
    alive = [weakref.ref(layer.hosted) for layer in hosted]
    gc.disable()
    try:
        hosted.clear()
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("number", [-1, 10])
def test_a_buffer_that_does_not_fit_is_refused(number):
    with pytest.raises(ValueError, match=f"staged is {number}, wanted 0 to 9"):
        layers.host_experts_(make_experts("nvfp4"), HostExperts(3, 4, staged=number))
