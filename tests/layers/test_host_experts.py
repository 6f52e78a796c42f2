"""Experts in host memory: the bits of all-resident layers, whatever is in which slot."""

from __future__ import annotations

import contextlib
import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4 import layers, use_backend
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.layers import HostExperts
from dsv4.layers import _host_memory as host_memory
from dsv4.layers import _hosted_experts as hosted_module
from dsv4.layers import experts as experts_module
from dsv4.layers._expert_waves import plan_waves
from dsv4.layers._host_memory import available_bytes, check_available
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving import Runner
from dsv4.serving.drafting import drafting_of
from dsv4.speculation.draft_costs import DraftCosts
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import randomize_
from tests._tools import host_soak

EXPERTS, TOP_K, HIDDEN = 12, 3, 64
KINDS = ["plain", "nvfp4", "mxfp4", "packed", "calibrated", "exact"]


def make_experts(kind: str, seed: int = 0, numerics: str = "deepseek") -> layers.DeepseekV4Experts:
    config = ModelConfig.tiny(
        hidden_size=HIDDEN,
        moe_intermediate_size=64,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        numerics=numerics,
    )
    experts = layers.DeepseekV4Experts(config).requires_grad_(False)
    randomize_(experts, seed)
    if kind != "plain":
        experts.quantize("mxfp4" if kind == "mxfp4" else "nvfp4")
    if kind == "exact":
        experts.activation = "fp8"
        for name in ("gate_up_proj_scale", "down_proj_scale"):
            getattr(experts, name).view(torch.uint8).bitwise_and_(0x78).clamp_(0x30, 0x60)
    if kind == "calibrated":
        experts.activation = "nvfp4"
        for name in ("gate_up_proj_input_scale", "down_proj_input_scale"):
            scales = torch.rand(EXPERTS, generator=strategies.generator(seed)) / 64 + 0.01
            setattr(experts, name, torch.nn.Parameter(scales, requires_grad=False))
    if kind in ("packed", "exact"):
        experts.pack()
    return experts.to(torch.bfloat16)


def hosted(experts: layers.DeepseekV4Experts, static: int, slots: int, **options):
    other = copy.deepcopy(experts)
    layers.host_experts_(other, HostExperts(static, slots, **options))
    return other


def tokens(seed: int, count: int, *, padding: bool = False):
    generator = strategies.generator(seed)
    x = torch.randn(count, HIDDEN, generator=generator).to(torch.bfloat16)
    keys = torch.rand(count, EXPERTS, generator=generator) ** 3
    ids = keys.topk(TOP_K).indices
    if padding:
        ids[torch.rand(count, TOP_K, generator=generator) < 0.2] = -1
    weights = torch.rand(count, TOP_K, generator=generator)
    return x, ids, weights


def poison(experts: layers.DeepseekV4Experts) -> None:
    """All bits of the cached slots are one, which is NaN in every float; no expert is in them."""
    state = experts.hosted
    before = state.state.expert_in.tolist()
    state.state.set_slots([*before[: state.static_slots], *[-1] * state.cached_slots])
    for name, tensor in state.tensors.items():
        if not name.endswith("input_scale"):  # on a CPU operators check the values of all
            tensor[state.static_slots :].view(torch.uint8).fill_(0xFF)


class TestLayer:
    @given(
        seed=strategies.seeds(),
        kind=st.sampled_from(KINDS),
        static=st.integers(0, EXPERTS - 1),
        spare=st.integers(0, 4),
        sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
        numerics=st.sampled_from(["deepseek", "transformers"]),
        reserved=st.booleans(),
        poisoned=st.booleans(),
    )
    @settings(max_examples=14)
    @example(1, "packed", 4, 0, [1, 1, 9, 1, 2], "deepseek", True, True)
    @example(2, "packed", 0, 0, [9, 1, 9], "transformers", False, True)
    @example(3, "calibrated", 3, 2, [1, 8, 2], "deepseek", True, False)
    @example(4, "exact", 3, 2, [1, 8, 2], "deepseek", True, True)
    def test_has_the_bits_of_all_resident_experts(
        self, seed, kind, static, spare, sizes, numerics, reserved, poisoned
    ):
        """Steps that fit the slots and steps in waves, in turn, padding among their tokens."""
        plain = make_experts(kind, seed % 3, numerics)
        others = EXPERTS - static
        layer = hosted(plain, static, min(others, min(TOP_K, others) + spare))
        if reserved:
            layers.reserve_experts(layer, 9)
        for step, count in enumerate(sizes):
            if poisoned:
                poison(layer)
            x, ids, weights = tokens(seed + step, count, padding=True)
            shared = x * 2 if step % 2 else None
            assert_bitwise(
                layer(x, ids, weights, shared), plain(x, ids, weights, shared), f"step {step}"
            )
        totals = torch.zeros(EXPERTS, dtype=torch.int64)
        for step, count in enumerate(sizes):
            ids = tokens(seed + step, count, padding=True)[1]
            totals += torch.bincount(ids[ids >= 0], minlength=EXPERTS)
        assert layers.expert_counts(layer)[0].tolist() == totals.tolist()

    @pytest.mark.parametrize("kind", ["plain", "packed", "calibrated", "exact"])
    @pytest.mark.parametrize("count", [1, 8])
    def test_kernels_are_those_of_the_whole_step(self, kind, count, monkeypatch):
        """Slots and waves change no bit; kernels for other sizes may sum in another order."""
        layer, calls = hosted(make_experts(kind), 3, 4), []

        def recorded(name):
            function = getattr(experts_module, name)

            def call(x, *rest, **options):
                step = [options.get("step_rows") or x.shape[0], options.get("step_experts")]
                calls.append([name, *step])
                return function(x, *rest, **options)

            monkeypatch.setattr(experts_module, name, call)

        gemms = [name for name in vars(experts_module) if name.startswith("grouped_gemm")]
        for name in gemms:
            recorded(name)
        sort, sorted_for = experts_module.moe_sort, []
        monkeypatch.setattr(
            experts_module, "moe_sort", lambda *a, **b: sorted_for.append(a[3]) or sort(*a, **b)
        )
        layer(*tokens(0, count, padding=True))
        assert len(calls) > (2 if count > 1 else 1)
        assert {tuple(call[1:]) for call in calls} == {(count * TOP_K, EXPERTS)}
        assert set(sorted_for) <= {EXPERTS}, "a kernel would be compiled for each number"

    def test_a_long_run_has_the_bits_and_no_leak(self):
        plain = make_experts("plain")
        layer = hosted(plain, 3, 4)
        addresses = [t.data_ptr() for t in layer.hosted.tensors.values()]
        versions = [t._version for t in layer.parameters()]
        for step in range(300):
            x, ids, weights = tokens(step, 5 if step % 50 == 49 else 1)
            assert_bitwise(layer(x, ids, weights), plain(x, ids, weights), f"step {step}")
            if step % 100 == 99:
                assert layers.repin_(layer) >= 0
        assert [t.data_ptr() for t in layer.hosted.tensors.values()] == addresses
        assert [t.data_ptr() for t in layer.parameters()] == addresses
        assert [t._version for t in layer.parameters()] == versions, "graphs are captured again"
        use = layers.cache_use(layer)
        assert use.steps == 300
        assert 0 < use.loaded < use.asked
        assert use.hit_rate == 1 - use.loaded / use.asked
        assert use.loaded_bytes == use.loaded * layer.hosted.layout.row_bytes
        tables = layer.hosted.state
        for slot, expert in enumerate(tables.expert_in.tolist()):
            assert tables.slot_of[expert] == slot

    def test_a_decode_step_reads_nothing_on_the_host(self, monkeypatch):
        """A tensor without contents cannot be read; the kernel that loads reads none either."""
        layer = hosted(make_experts("packed"), 4, 4)

        def refuse(*_: object) -> None:
            raise AssertionError("a value was read on the host")

        monkeypatch.setattr(hosted_module, "expert_gather", lambda *_: None)
        _, ids, _ = tokens(1, 1)
        for name in ("item", "tolist", "__bool__", "__int__", "__index__", "nonzero"):
            monkeypatch.setattr(torch.Tensor, name, refuse)
        with use_backend("reference"):
            meta = ids.to("meta")
            state = layer.hosted.state
            for field in vars(state):
                object.__setattr__(state, field, getattr(state, field).to("meta"))
            assert layer.hosted.fetch(meta).shape == (1, TOP_K)

    def test_replays_follow_their_ids(self):
        """The same buffers with other ids: what a captured graph does, call by call."""
        plain = make_experts("packed")
        layer = hosted(plain, 2, 3)
        x, ids, weights = tokens(0, 1)
        for step in range(40):
            for buffer, new in zip((x, ids, weights), tokens(step, 1), strict=True):
                buffer.copy_(new)
            assert_bitwise(layer(x, ids, weights), plain(x, ids, weights), f"replay {step}")

    def test_the_most_used_experts_are_static(self):
        plain = make_experts("packed")
        counts = torch.tensor([[0, 5, 1, 9, 0, 7, 0, 0, 2, 0, 3, 0]])
        layer = hosted(plain, 3, 4, counts=counts)
        assert layer.hosted.static_experts() == [1, 3, 5]
        assert layers.repin_(layer, counts.flip(1)) == 3
        assert layer.hosted.static_experts() == [6, 8, 10]
        assert layers.repin_(layer, counts.flip(1)) == 0
        for step, count in enumerate((1, 6, 1)):
            arguments = tokens(step, count)
            assert_bitwise(layer(*arguments), plain(*arguments), "after an exchange")
        with pytest.raises(ValueError, match=r"counts have shape \[1, 2\], wanted \[1, 12\]"):
            layers.repin_(layer, counts[:, :2])

    @pytest.mark.parametrize("kind", ["nvfp4", "packed"])
    def test_experts_can_be_read_and_nothing_else(self, kind):
        plain = make_experts(kind)
        layer = hosted(plain, 3, 4)
        for expert in range(EXPERTS):
            for got, truth in zip(layer.get_expert(expert), plain.get_expert(expert), strict=True):
                assert_bitwise(got.codes, truth.codes, "codes")
                assert_bitwise(got.scales, truth.scales, "scales")
                assert_bitwise(got.global_scale, truth.global_scale, "global scale")
        assert layer.to("cpu") is layer
        assert layer.bfloat16() is layer
        for action in (
            layer.state_dict,
            lambda: layer.load_state_dict(plain.state_dict()),
            lambda: layer.dense_weight("down_proj"),
            lambda: layer.to_format("nvfp4"),
            lambda: layers.unpack_(layer) if kind == "packed" else layers.pack_(layer).kept[""],
            lambda: layer.set_expert(0, *plain.get_expert(0)),
        ):
            try:
                message = action()
            except ValueError as error:
                message = str(error)
            assert "9 of 12 experts are in host memory" in message or "packed" in message
        with pytest.raises(ValueError, match="cannot be copied"):
            copy.deepcopy(layer)
        with pytest.raises(ValueError, match="are in host memory already"):
            layers.host_experts_(layer, HostExperts(3, 4))

    @pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
    def test_exponents_of_rows_go_with_their_expert(self, name):
        plain = make_experts("exact")
        getattr(plain, name + "_exponent").add_(torch.arange(EXPERTS, dtype=torch.int8)[:, None])
        layer, truth = hosted(plain, 3, 4), plain.quantized_weight(name)
        for step in range(6):
            layer(*tokens(step, 1 if step % 2 else 8))
            weight, state = layer.quantized_weight(name).validate(), layer.hosted.state
            for slot, expert in enumerate(state.expert_in.tolist()):
                assert_bitwise(weight[slot].row_exponent, truth[expert].row_exponent, "exponent")

    @pytest.mark.parametrize("count", [1, 8])
    def test_an_id_out_of_range_is_refused(self, count):
        """Also in waves, whose plan counts valid ids only."""
        layer = hosted(make_experts("nvfp4"), 3, 3)
        x, ids, weights = tokens(0, count)
        ids[0, 1] = EXPERTS + 1
        with pytest.raises(ValueError, match=r"ids\[0, 1\] is 13, wanted an expert, 0 to 11"):
            layer(x, ids, weights)

    def test_no_step_overtakes_the_copies_of_an_interrupted_one(self, monkeypatch):
        waited = []

        class Stream:
            def wait_stream(self, other):
                waited.append(other)

        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
        state = hosted(make_experts("nvfp4"), 3, 4).hosted
        state._side = object()
        waves = state.run(state.plan(tokens(0, 8)[1]))
        next(waves)
        assert not waited
        waves.close()
        assert waited == [state._side]

    def test_all_experts_can_be_static(self):
        plain = make_experts("nvfp4")
        layer = hosted(plain, EXPERTS, 0)
        for count in (0, 1, 8):
            arguments = tokens(count, count)
            assert_bitwise(layer(*arguments), plain(*arguments), "result")
        assert layers.cache_use(layer).loaded == 0

    def test_plain_experts_cannot_be_cast(self):
        layer = hosted(make_experts("plain"), 3, 4)
        with pytest.raises(ValueError, match=r"is to become torch\.float32 on cpu"):
            layer.float()

    @pytest.mark.nightly
    @pytest.mark.parametrize("count", [1, 8])
    def test_torch_compile_leaves_them_as_they_are(self, count):
        plain = make_experts("packed")
        layer, arguments = hosted(plain, 3, 4), tokens(0, count)
        with torch.no_grad():
            compiled = torch.compile(layer, backend="eager")(*arguments)
        assert_bitwise(compiled, plain(*arguments), "result")

    def test_an_interrupted_load_is_forgotten(self, monkeypatch):
        plain = make_experts("packed")
        layer = hosted(plain, 3, 3)
        arguments = tokens(3, 1)
        arguments[1][:] = torch.tensor([0, 9, 11])

        def interrupted(*_: object, **options: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(hosted_module, "expert_gather", interrupted)
            with pytest.raises(KeyboardInterrupt):
                layer(*arguments)
        assert_bitwise(layer(*arguments), plain(*arguments), "after an interrupt")
        with monkeypatch.context() as patch:
            patch.setattr("dsv4.layers.experts.grouped_gemm", interrupted)
            with pytest.raises(KeyboardInterrupt):
                layer(*tokens(4, 8))
        for count in (1, 8, 1):
            arguments = tokens(count, count)
            assert_bitwise(layer(*arguments), plain(*arguments), "after an interrupted wave")

    @pytest.mark.parametrize(
        ("placement", "message"),
        [
            (HostExperts(13, 0), "static is 13, wanted 0 to 12"),
            (HostExperts(3, 2), "slots is 2, wanted 3 to 9"),
            (HostExperts(3, 10), "slots is 10, wanted 3 to 9"),
            (
                HostExperts(3, 4, torch.zeros(1, 5).long()),
                r"counts have shape \[1, 5\], wanted \[1, 12\]",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(self, placement, message):
        with pytest.raises(ValueError, match=message):
            layers.host_experts_(make_experts("nvfp4"), placement)

    @pytest.mark.parametrize("changes", [{"static": 3.0}, {"slots": True}, {"staged": "4"}])
    def test_numbers_of_another_type_are_refused(self, changes):
        with pytest.raises(TypeError, match=rf"{next(iter(changes))} is .*, wanted an integer"):
            HostExperts(**{"static": 3, "slots": 4, **changes})
        for counts, message in (
            (torch.rand(1, 12), r"counts have dtype torch\.float32, wanted torch\.int64"),
            (torch.ones(1, 12, dtype=torch.bool), r"counts have dtype torch\.bool, wanted torch"),
        ):
            with pytest.raises(TypeError, match="HostExperts: " + message):
                HostExperts(3, 4, counts)
            with pytest.raises(TypeError, match="repin_: " + message):
                layers.repin_(hosted(make_experts("plain"), 3, 4), counts)
        with pytest.raises(ValueError, match="HostExperts: a count is -2, wanted 0 or more"):
            HostExperts(3, 4, torch.tensor([[5, -2, 7]]))
        with pytest.raises(TypeError, match="counts is list, wanted a tensor or None"):
            HostExperts(3, 4, [1])

    def test_layers_that_have_no_rows_are_refused(self):
        experts = make_experts("nvfp4")
        experts.layout = "swizzled_128x4"
        with pytest.raises(ValueError, match="have layout 'swizzled_128x4'"):
            layers.host_experts_(experts, HostExperts(3, 4))
        with pytest.raises(ValueError, match="no DeepseekV4Experts"):
            layers.host_experts_(torch.nn.Linear(1, 1), HostExperts(3, 4))
        with pytest.raises(ValueError, match="no experts in host memory"):
            layers.cache_use(make_experts("plain"))


def experts_in_slots(generator, experts, static, cached, empty):
    """The expert that each slot holds, static ones first; -1 in the cached slots of ``empty``."""
    expert_in = torch.randperm(experts, generator=generator).tolist()[: static + cached]
    for slot in empty & set(range(cached)):
        expert_in[static + slot] = -1
    return expert_in


@given(
    seed=strategies.seeds(),
    static=st.integers(0, 6),
    cached=st.integers(1, 7),
    count=st.integers(0, 16),
    empty=st.sets(st.integers(0, 6)),
)
@example(seed=0, static=0, cached=7, count=16, empty={1, 2, 5})  # between needed ones
def test_waves_hold_every_expert_once(seed, static, cached, count, empty):
    experts = 16
    generator = strategies.generator(seed)
    expert_in = experts_in_slots(generator, experts, static, cached, empty)
    needed = torch.randperm(experts, generator=generator)[:count].tolist()
    plan = plan_waves(needed, expert_in, static, experts)
    assert plan.positions <= experts
    slots, multiplied = list(expert_in), []
    for number, wave in enumerate(plan.waves):
        for expert, slot in wave.loads:
            assert slot >= static
            slots[slot] = expert
        if wave.loads and number and plan.waves[number - 1].loads and cached > 1:
            assert plan.waves[number - 1].half != wave.half, "a half is loaded while it is read"
        for slot in range(wave.start, wave.stop):
            if (
                slots[slot] in needed
                and plan.position[slots[slot]] == wave.first + slot - wave.start
            ):
                multiplied.append(slots[slot])
    assert sorted(multiplied) == sorted(needed)
    assert list(plan.expert_in) == slots
    assert all((p >= 0) == (e in needed) for e, p in enumerate(plan.position))


def test_host_memory_that_does_not_suffice_is_said():
    check_available(10**9, lambda: 10**10)
    with pytest.raises(MemoryError, match=r"need 64.5 GB .* but 20.0 GB are available"):
        check_available(64_500_000_000, lambda: 20 * 10**9)
    assert available_bytes() > 0


class Blocks:
    """Blocks that were taken and released, and by which threads."""

    def __init__(self, fails_at: int = -1) -> None:
        self.taken: list[torch.Tensor] = []
        self.released: list[torch.Tensor] = []
        self.threads: list[threading.Thread] = []
        self.fails_at = fails_at
        self.again = threading.Event()

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if len(self.taken) == self.fails_at:
            raise MemoryError("no more")
        self.threads.append(threading.current_thread())
        self.taken.append(torch.zeros(nbytes, dtype=torch.uint8, device=device))
        if len(self.taken) > 1:
            self.again.set()
        return self.taken[-1]

    def release(self, tensor: torch.Tensor, device: torch.device) -> None:
        self.released.append(tensor)


def host_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("dsv4 host memory")]


class TestBlocksAhead:
    CPU = torch.device("cpu")

    @given(sizes=st.lists(st.integers(1, 3), max_size=6), count=st.integers(0, 7))
    @settings(max_examples=30)
    def test_every_block_is_taken_once_and_the_rest_released(self, sizes, count):
        blocks = Blocks()
        with host_memory.BlocksAhead(count, blocks.take, blocks.release) as ahead:
            received = [ahead.allocate(size, self.CPU) for size in sizes]
        assert [block.nbytes for block in received] == sizes
        assert len({id(block) for block in received}) == len(sizes)
        assert {id(b) for b in blocks.taken} == {id(b) for b in (*received, *blocks.released)}
        assert len(blocks.taken) == len(sizes) + len(blocks.released)
        if len(set(sizes)) == 1 and len(sizes) == count:
            assert not blocks.released
        assert not host_threads()

    def test_the_next_block_is_allocated_while_the_caller_works(self):
        blocks = Blocks()
        with host_memory.BlocksAhead(2, blocks.take, blocks.release) as ahead:
            ahead.allocate(5, self.CPU)
            assert blocks.again.wait(20), "nothing was allocated while the caller worked"
            assert ahead.allocate(5, self.CPU) is blocks.taken[1]
        assert blocks.threads[0] is threading.current_thread() is not blocks.threads[1]

    def test_errors_reach_the_caller_and_an_interrupt_leaves_nothing(self):
        blocks = Blocks(fails_at=1)

        def two() -> None:
            with host_memory.BlocksAhead(3, blocks.take, blocks.release) as ahead:
                ahead.allocate(5, self.CPU)
                ahead.allocate(5, self.CPU)

        with pytest.raises(MemoryError, match="no more"):
            two()
        assert not host_threads()
        blocks = Blocks()

        def interrupted() -> None:
            with host_memory.BlocksAhead(3, blocks.take, blocks.release) as ahead:
                ahead.allocate(5, self.CPU)
                assert blocks.again.wait(20)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert not host_threads()
        assert [id(block) for block in blocks.released] == [id(blocks.taken[1])]


def test_a_soak_counts_its_steps():
    said = []
    assert host_soak.soak(0.5, "cpu", every=0.2, say=said.append) > 0
    assert "steps, hits" in said[0]
    assert "ms a step" in said[0]


def test_locked_bytes_are_those_that_cuda_locked(monkeypatch):
    def rows(nbytes: int, locked: bool):
        return SimpleNamespace(rows=SimpleNamespace(nbytes=nbytes, is_pinned=lambda: locked))

    made = [rows(5, True), rows(7, False), rows(11, True)]
    monkeypatch.setattr(host_soak, "hosted_of", lambda model: made)
    assert host_soak.locked_bytes(SimpleNamespace(device=torch.device("cuda"))) == 16
    assert host_soak.locked_bytes(SimpleNamespace(device=torch.device("cpu"))) == 0


class TestAllocation:
    @pytest.fixture
    def answer(self, monkeypatch):
        """A CUDA runtime that locks memory, or answers 2; "forgotten" when its error is taken."""
        calls = []

        class Runtime:
            def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
                calls.append((address, nbytes, flags))
                return calls[0] if calls[0] in (0, 2) else 0

        monkeypatch.setattr(torch.cuda, "cudart", Runtime)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(host_memory, "_forget_error", lambda _: calls.append("forgotten"))
        return calls

    def test_is_locked_where_it_is(self, answer):
        memory = host_memory.allocate(12345, torch.device("cuda", 0))
        assert answer == [(memory.data_ptr(), 12345, 3)]
        assert (memory.shape, memory.dtype) == ((12345,), torch.uint8)
        assert memory.data_ptr() % 4096 == 0
        memory[-1] = 7
        assert int(memory.sum()) == 7

    def test_of_nothing_is_not_locked(self, answer):
        assert host_memory.allocate(0, torch.device("cuda", 0)).shape == (0,)
        assert not answer

    def test_says_how_much_there_is(self, answer, monkeypatch):
        answer.append(2)
        with pytest.raises(MemoryError, match=r"returned 2\); \d+\.\d GB are available"):
            host_memory.allocate(4096, torch.device("cuda", 0))
        assert answer[-1] == "forgotten", "or the next launch raises CUDA's last error"
        with pytest.raises(MemoryError, match=r"but \d+\.\d GB are available"):
            host_memory.allocate(1 << 62, torch.device("cuda", 0))
        monkeypatch.setattr(host_memory, "check_available", lambda _: None)
        with pytest.raises(MemoryError, match=r"cannot be locked .*; \d+\.\d GB are available"):
            host_memory.allocate(1 << 62, torch.device("cuda", 0))


class TestModel:
    @pytest.fixture
    def model(self):
        return self.make_model()

    @pytest.fixture
    def drafting_model(self):
        return self.make_model(layer_types=(SLIDING, CSA), num_nextn_predict_layers=1)

    def make_model(self, **options):
        sizes = {"n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K, "vocab_size": 64}
        sizes |= {"layer_types": (SLIDING, CSA, HCA), "moe_intermediate_size": 64, **options}
        config = ModelConfig.tiny(hidden_size=64, **sizes)
        model = DeepseekV4ForCausalLM(config).requires_grad_(False)
        randomize_(model, 3)
        layers.quantize_(model, names=["*.mlp.experts"])
        return model.eval()

    def test_generates_the_same(self, model):
        """A prompt in waves, then one layer by layer; decode steps; exchanges between requests."""
        hosted_model = copy.deepcopy(model)
        assert layers.host_experts_(hosted_model, HostExperts(4, 4, staged=3)) > 0
        staging = hosted_model.model.layers[0].mlp.experts.hosted.staging
        prompt = list(range(1, 12))
        for choices in (16, 0):
            staging.choices_per_expert = choices
            expected = model.generate([prompt, prompt[:3]], 8)
            assert hosted_model.generate([prompt, prompt[:3]], 8) == expected
            layers.repin_(hosted_model)
        logits = [m(torch.tensor([prompt])) for m in (model, hosted_model)]
        assert_bitwise(logits[1], logits[0], "logits")
        assert layers.cache_use(hosted_model).hit_rate < 1
        assert layers.expert_counts(hosted_model).shape == (3, EXPERTS)

    def test_drafts_have_the_same_text(self, drafting_model):
        """One draft per sequence by default; the same text as with all experts resident."""
        model, prompts = drafting_model, [[1, 2, 3, 4, 5, 6, 7], [9, 8]]
        expected = model.generate(prompts, 7, stop_ids=(), speculate=None)
        hosted_model = copy.deepcopy(model)
        layers.host_experts_(hosted_model, HostExperts(3, 8))
        assert hosted_model.mtp[0].layer.mlp.experts.hosted is None
        assert drafting_of(model, "mtp").plan.tokens == 2
        assert drafting_of(hosted_model, "mtp").plan.tokens == 1
        assert drafting_of(hosted_model, "mtp", 3).plan.tokens == 3
        for options in ({}, {"draft_tokens": 3}):
            with Runner(
                hosted_model, max_sequences=2, max_tokens=32, speculate="mtp", **options
            ) as runner:
                requests = [runner.add(p, max_new_tokens=7, stop_ids=()) for p in prompts]
                runner.run()
                assert runner.draft_counts.drafted > 0
            assert [request.tokens for request in requests] == expected
        assert 0 < layers.cache_use(hosted_model).hit_rate < 1

    def test_drafts_are_no_more_than_slots_hold(self, drafting_model, monkeypatch):
        """Drafts fit the slots if their number adapts; other steps are planned on the host."""
        layers.host_experts_(drafting_model, HostExperts(0, 8))  # for two tokens
        monkeypatch.setattr(DraftCosts, "_gain", lambda *_: 2.0)  # drafts pay wherever they fit
        for tokens in (None, 3):
            auto = drafting_of(drafting_model, "auto", tokens)
            adapted = auto.at_sizes(drafting_model, (1, 2, 3), 64)
            assert [adapted.drafts_at(n) for n in (1, 2, 3)] == [1, 0, 0]
            assert adapted.plan.tokens == 1
        none = auto.at_sizes(drafting_model, (2, 3), 64)
        assert none.plan is None
        assert none.reason == "experts in host memory have slots for 2 tokens of a step"
        assert auto.certain_tokens == 1
        assert drafting_of(drafting_model, "mtp").certain_tokens == 2

    @pytest.mark.parametrize(
        ("options", "tokens"),
        [
            ({}, 3),  # as many drafts as fit
            ({"speculate": "mtp"}, 6),
            ({"speculate": "mtp", "draft_tokens": 3}, 12),
            ({"speculate": None}, 3),
            ({"speculate": None, "deterministic": True}, 1),  # one sequence a step
        ],
    )
    def test_a_step_is_captured_by_its_most_tokens(
        self, drafting_model, options, tokens, monkeypatch
    ):
        layers.host_experts_(drafting_model, HostExperts(0, 8))
        asked = []
        monkeypatch.setattr(
            "dsv4.serving.runner_plan.resolve_capture", lambda *args: asked.append(args[2]) or False
        )
        Runner(drafting_model, max_sequences=3, max_tokens=32, **options).close()
        assert asked == [tokens]

    def test_padding_loads_nothing(self, model):
        """Steps padded to four rows choose the experts of their two sequences alone."""
        counts, texts = [], []
        for buckets in (None, (4,)):
            hosted_model = copy.deepcopy(model)
            layers.host_experts_(hosted_model, HostExperts(0, EXPERTS))
            with Runner(
                hosted_model, max_sequences=4, max_tokens=32, buckets=buckets, speculate=None
            ) as runner:
                requests = [runner.add(p, max_new_tokens=6, stop_ids=()) for p in ([1, 2], [3])]
                while not all(request.done for request in requests):
                    runner.step()
                texts.append([request.tokens for request in requests])
            counts.append(layers.expert_counts(hosted_model))
        assert texts[0] == texts[1]
        assert counts[0].tolist() == counts[1].tolist()
