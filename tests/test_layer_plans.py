"""Plans of whole layers: a step gives what the layers give, and every change of a layer is seen.

On the CPU a layer's tape calls reference implementations, or kernels in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import _recorder, _tape, dispatch, layers, use_backend
from dsv4.cache import Batch, CacheStep, PagedCache
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.device import interpret_triton
from dsv4.layers import DeepseekV4DecoderLayer, DeepseekV4SparseMoeBlock, _layer_plan
from dsv4.layers._joint import JointWeight
from dsv4.layers.norm import DeepseekV4RMSNorm
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.ops import _guards, _library, _plans
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import random_model

ROWS, TOKENS = 5, 96
WARM = 4  # steps until one is replayed: the modules are looked at, the call begun, recorded


def tiny(*types: str, **changes: Any) -> DeepseekV4ForCausalLM:
    """Packed as far as it can be, with joint weights."""
    config = ModelConfig.tiny(
        layer_types=types, mlp_layer_types=("moe",) * len(types), num_nextn_predict_layers=0,
        **changes,
    )  # fmt: skip
    model = random_model(config, 3, torch.bfloat16)
    layers.quantize_(model)
    layers.pack_(model)
    return model


@dataclass
class Switch:
    """Plans of layers on a CPU, on or off; and how many layers ran by themselves."""

    is_on: bool = False
    ran: int = 0

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self.is_on, self.ran = True, 0
        try:
            yield
        finally:
            self.is_on = False


@contextlib.contextmanager
def switch() -> Iterator[Switch]:
    made, run = Switch(), DeepseekV4DecoderLayer._run

    def counted(*args: Any) -> torch.Tensor:
        made.ran += 1
        return run(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plans, "PLANS", _plans.PlanCache())
        patch.setattr(_plans, "is_worth_it", lambda tensor: made.is_on)
        patch.setattr(DeepseekV4DecoderLayer, "_run", counted)
        yield made


@pytest.fixture
def plans() -> Iterator[Switch]:
    with switch() as made:
        yield made


@dataclass
class Twins:
    """One model and two caches: one of steps with plans, one of steps without."""

    model: DeepseekV4ForCausalLM
    plans: Switch
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.caches = [self.new_cache() for _ in range(2)]

    def new_cache(self) -> PagedCache:
        return self.model.new_cache(ROWS, TOKENS, 16, **self.options)

    def both(self, call: Callable[[PagedCache], Any]) -> Any:
        with self.plans.on():
            found = call(self.caches[0])
        wanted = call(self.caches[1])
        if isinstance(found, torch.Tensor):
            assert_bitwise(found, wanted)
        else:
            assert found == wanted
        return found

    def begin(self, *prompts: list[int]) -> list[int]:
        rows = [self.both(PagedCache.allocate) for _ in prompts]
        self.both(lambda cache: self.model.prefill([*prompts], cache, rows))
        return rows

    def decode(self, tokens: list[int], rows: list[int]) -> torch.Tensor:
        given = torch.tensor(tokens)
        return self.both(lambda cache: self.model.decode(given, cache, rows))

    def same_caches(self) -> None:
        one, other = self.caches
        assert_bitwise(one.lengths, other.lengths)
        for pair in zip(one.layers, other.layers, strict=True):
            for (tensor, _), (wanted, _) in zip(*(layer.tensors() for layer in pair), strict=True):
                assert_bitwise(tensor, wanted)

    def warm(self) -> list[int]:
        """A row whose step was replayed last."""
        rows = self.begin([1, 2, 3])
        for token in range(WARM):
            self.decode([token], rows)
        assert self.plans.ran == 0, "nothing was replayed"
        return rows


@contextlib.contextmanager
def warmed(**changes: Any) -> Iterator[tuple[Twins, list[int]]]:
    """A model of one layer of every kind of tensor, whose steps of one row are replayed."""
    with switch() as made:
        twins = Twins(tiny(CSA, **changes), made)
        yield twins, twins.warm()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, ROWS)),
        st.tuples(st.just("prompt"), st.integers(1, 9)),
        st.tuples(st.sampled_from(["fork", "free"]), st.integers(0, ROWS)),
    ),
    min_size=4,
    max_size=14,
)


@pytest.fixture(scope="module")
def every_kind() -> DeepseekV4ForCausalLM:
    return tiny(SLIDING, CSA, HCA)


@given(ACTIONS, st.booleans(), st.integers(0, 2**31))
@settings(max_examples=12)
def test_steps_are_the_layers(every_kind, actions, pooled: bool, seed: int) -> None:
    """Bit for bit, in results and caches, while sequences come, go and are forked."""
    draw = torch.Generator().manual_seed(seed)
    options = {"pool_tokens": ROWS * TOKENS} if pooled else {}
    with switch() as made:
        twins = Twins(every_kind, made, options)
        rows, replayed = twins.begin([1, 2, 3]), 0

        def tokens(count: int) -> list[int]:
            return torch.randint(0, 64, (count,), generator=draw).tolist()

        def step(count: int) -> None:
            nonlocal replayed
            chosen = rows[:count]
            if chosen:
                twins.decode(tokens(len(chosen)), chosen)
                replayed += made.ran == 0

        for _ in range(WARM):
            step(1)
        for action, number in actions:
            if action == "step":
                step(number)
                step(number)
            elif action == "prompt" and len(rows) < ROWS:
                rows += twins.begin(tokens(number))
            elif action == "fork" and 0 < len(rows) < ROWS:
                source = rows[number % len(rows)]
                rows.append(twins.both(lambda cache, source=source: cache.fork(source)))
            elif action == "free" and rows:
                gone = rows.pop(number % len(rows))
                twins.both(lambda cache, gone=gone: cache.free(gone))
        twins.same_caches()
        assert replayed


def test_pages_end_and_windows_move_on(every_kind) -> None:
    """A sequence from its first token over all borders of windows and pages."""
    with switch() as made:
        twins = Twins(every_kind, made, {"pool_tokens": 2 * TOKENS})
        rows, replayed = twins.begin([5]), 0
        for token in range(TOKENS - 1):
            twins.decode([token % 64], rows)
            replayed += made.ran == 0
        twins.same_caches()
        assert replayed >= TOKENS - WARM - 1


@pytest.mark.parametrize("changes", [{"numerics": "transformers"}, {"activation": "nvfp4"}])
def test_other_models(changes: dict[str, Any]) -> None:
    with switch() as made:
        twins = Twins(tiny(CSA, HCA, **changes), made)
        rows = twins.warm()
        twins.decode([3], rows)
        twins.same_caches()


@pytest.mark.parametrize("index_format", ["index_fp8", "index_mxfp4"])
def test_index_keys_in_codes(index_format: str) -> None:
    with switch() as made:
        twins = Twins(tiny(CSA, index_head_dim=128), made, {"index_format": index_format})
        rows = twins.warm()
        twins.decode([3], rows)
        twins.same_caches()


def test_kernels_are_launched_again(monkeypatch) -> None:
    """In Triton's interpreter: launches of kernels, and operators that the reference runs."""
    pytest.importorskip("triton")
    monkeypatch.setattr(_library.Operation, "check_values", lambda self, args: None)
    with switch() as made, interpret_triton():
        twins = Twins(tiny(CSA), made)
        twins.warm()
        twins.same_caches()
        [plan] = plans_of(twins.model)
        assert plan.again.tape.launches >= 5


def plans_of(model: nn.Module) -> list[Any]:
    return [
        plan
        for layer in model.modules()
        if isinstance(layer, DeepseekV4DecoderLayer)
        for plans in layer.__dict__["_plans"].plans.values()
        for plan in plans
    ]


def layer_of(model: DeepseekV4ForCausalLM) -> Any:
    return model.model.layers[0]


class Doubled(DeepseekV4SparseMoeBlock):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * super().forward(*args, **kwargs)


def doubled(module: Any, args: Any, result: Any) -> Any:
    return 2 * result if isinstance(module, DeepseekV4SparseMoeBlock) else result


def halved(module: Any, args: Any) -> Any:
    return (args[0] / 2, *args[1:]) if isinstance(module, DeepseekV4SparseMoeBlock) else args


def replace_norm(layer: Any) -> None:
    layer.self_attn.q_a_norm = norm = DeepseekV4RMSNorm(layer.self_attn.q_a_norm.weight.shape[0])
    norm.weight = nn.Parameter(torch.rand_like(norm.weight).bfloat16(), requires_grad=False)


def add_experts(layer: Any) -> None:
    layer.mlp = copy.deepcopy(layer.mlp)
    layer.mlp.gate.weight.data.neg_()


def take_parameter(layer: Any) -> None:
    norm = layer.post_attention_layernorm
    norm.weight = nn.Parameter(torch.rand_like(norm.weight), requires_grad=False)


def set_data(layer: Any) -> None:
    layer.attn_hc.scale.data = layer.attn_hc.scale.data * 3


def set_strided(layer: Any) -> None:
    data = layer.attn_hc.fn.data
    layer.attn_hc.fn.data = (3 * data).t().contiguous().t()


def set_unaligned(layer: Any) -> None:
    data = layer.attn_hc.base.data
    layer.attn_hc.base.data = torch.cat((data.new_zeros(1), data + 1))[1:]


def write(layer: Any) -> None:
    layer.ffn_hc.scale.mul_(3)


def set_buffer(layer: Any) -> None:
    layer.mlp.gate.e_score_correction_bias = torch.rand_like(layer.mlp.gate.e_score_correction_bias)


def set_attribute(layer: Any) -> None:
    layer.ffn_hc.hc_sinkhorn_iters = 1


def set_limit(layer: Any) -> None:
    layer.mlp.experts.limit = 1e-3


def set_frequencies(layer: Any) -> None:
    rotary = layer.self_attn.compressor.rotary_emb
    rotary.set_inv_freq("compress", 2 * rotary.inv_freq(torch.device("cpu"), "compress"))


def set_forward(layer: Any) -> None:
    forward = layer.mlp.forward
    layer.mlp.forward = lambda *args, **kwargs: 2 * forward(*args, **kwargs)


def set_class(layer: Any) -> None:
    layer.mlp.__class__ = Doubled


def replace_by_subclass(layer: Any) -> None:
    old = layer.mlp
    layer.mlp = Doubled.__new__(Doubled)
    layer.mlp.__dict__.update(old.__dict__)


def replace_joint(layer: Any) -> None:
    q_a = layer.self_attn.q_a_proj
    old = q_a.joint
    other = JointWeight(old.whole(), old.rows, in_turn=False)
    other.global_scale = 2 * old.global_scale
    q_a.joint = layer.self_attn.kv_proj.joint = other


def load(layer: Any) -> None:
    state = {name: 2 * t for name, t in layer.attn_hc.state_dict().items()}
    layer.attn_hc.load_state_dict(state, assign=True)


def wrap(layer: Any) -> None:
    """As adapters of low rank do."""

    class Adapted(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self.inner(*args, **kwargs) + 1

    layer.mlp.shared_experts = Adapted(layer.mlp.shared_experts)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a submodule": add_experts,
    "a submodule below": replace_norm,
    "a joint weight": replace_joint,
    "a parameter": take_parameter,
    "a buffer": set_buffer,
    "a parameter's data": set_data,
    "a parameter's strides": set_strided,
    "a parameter's alignment": set_unaligned,
    "a parameter's values": write,
    "an attribute": set_attribute,
    "an attribute of experts": set_limit,
    "frequencies": set_frequencies,
    "a forward of its own": set_forward,
    "a class": set_class,
    "a subclass": replace_by_subclass,
    "an adapter": wrap,
    "loaded weights": load,
    "a hook": lambda layer: layer.mlp.register_forward_hook(doubled),
    "a hook in front": lambda layer: layer.mlp.register_forward_pre_hook(halved),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    """In the step after it, and later ones; and once more when plans are made of it."""
    with warmed() as (twins, rows):
        before = copy.deepcopy((twins.model, twins.caches[1]))
        CHANGES[change](layer_of(twins.model))
        changed = twins.decode([7], rows)
        unchanged = before[0].decode(torch.tensor([7]), before[1], rows)
        assert not torch.equal(changed, unchanged), "the test changes nothing"
        for token in range(WARM):
            twins.decode([token], rows)
        twins.same_caches()


def test_hooks_of_all_modules_are_called() -> None:
    with warmed() as (twins, rows):
        seen: list[Any] = []
        for register in (
            nn.modules.module.register_module_forward_hook,
            nn.modules.module.register_module_forward_pre_hook,
        ):
            handle = register(lambda module, *_: seen.append(type(module)))
            try:
                twins.decode([1], rows)
            finally:
                handle.remove()
            assert seen.count(DeepseekV4SparseMoeBlock) == 2, "with plans, and without"
            seen.clear()
        twins.decode([1], rows)
        assert twins.plans.ran == 0


def test_hooks_come_and_go() -> None:
    """A plan waits for the end of a hook: ``debug.count_dropped`` has one."""
    from dsv4.debug import count_dropped

    with warmed() as (twins, rows):
        with count_dropped(twins.model):
            twins.decode([1], rows)
            assert twins.plans.ran == 1
        for _ in range(WARM):
            twins.decode([1], rows)
        assert twins.plans.ran == 0


def test_a_calibrated_model_is_observed() -> None:
    with warmed(activation="nvfp4") as (twins, rows):
        with layers.calibrate(twins.model) as report:
            twins.decode([1], rows)
            assert twins.plans.ran == 1
        assert len(report.calibrated) > 5
        for token in range(WARM):
            twins.decode([token], rows)
        twins.same_caches()
        assert twins.plans.ran == 0


@pytest.mark.parametrize("change", ["unpack", "reserve", "half", "train", "train one"])
def test_changes_of_a_whole_model(change: str) -> None:
    with warmed() as (twins, rows):
        model = twins.model
        if change == "unpack":
            layers.unpack_(model)
        elif change == "reserve":
            layers.reserve_experts(model, 4)
        elif change == "half":
            layer_of(model).mlp.experts.half()
            layer_of(model).mlp.experts.bfloat16()
        elif change == "train":
            model.train()
        else:
            layer_of(model).mlp.gate.train()
        twins.decode([1], rows)
        assert twins.plans.ran == (change != "half"), "a plan that was not made for this"
        for token in range(WARM):
            twins.decode([token], rows)
        twins.same_caches()


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def watched_dispatch() -> Iterator[None]:
    run = dispatch.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "run", lambda *args, **kwargs: run(*args, **kwargs))
        yield


WATCHERS = {
    "a mode": Seen,
    "a profile": torch.autograd.profiler.profile,
    "a name": lambda: use_backend("reference"),
    "dispatch": watched_dispatch,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.float16),
}


@pytest.mark.parametrize("guards", ["compiled", "interpreted"])
@pytest.mark.parametrize("how", WATCHERS)
def test_who_watches_sees_the_layer(how: str, guards: str, monkeypatch) -> None:
    if guards == "interpreted":
        monkeypatch.setattr(_guards, "_compiled", lambda tensors: None)
    with warmed() as (twins, rows):
        with WATCHERS[how]():
            twins.decode([1], rows)
            assert twins.plans.ran == 1
        twins.decode([1], rows)
        assert twins.plans.ran == 0


def test_gradients_are_wanted_of_the_layer() -> None:
    with warmed() as (twins, rows):
        model = twins.model
        streams = torch.randn(1, 1, 4, model.config.hidden_size).bfloat16()

        def forward(cache: PagedCache) -> torch.Tensor:
            batch = Batch.decode(cache.lengths[rows], torch.tensor(rows))
            ids = torch.zeros(1, 1, dtype=torch.int64)
            options = {"past_key_values": CacheStep(cache, batch)}
            return layer_of(model)(streams, ids, **options)

        for _ in range(WARM):
            twins.both(forward)
        assert twins.plans.ran == 0
        with torch.no_grad():
            twins.both(forward)
        assert twins.plans.ran == 1, "in another mode"
        streams.requires_grad_()
        for _ in range(WARM):
            twins.both(forward)
            assert twins.plans.ran == 1


def test_arguments_of_other_kinds_are_not_planned() -> None:
    """The words for them come from the attention."""
    with warmed() as (twins, rows):
        cache = twins.caches[0]
        batch = Batch.decode(cache.lengths[rows], torch.tensor(rows))
        streams = torch.randn(1, 1, 4, twins.model.config.hidden_size).bfloat16()
        layer, step = layer_of(twins.model), CacheStep(cache, batch)
        with twins.plans.on():
            for name in ("position_ids", "attention_mask"):
                given = torch.zeros(1, 1, 1, 1)
                with pytest.raises(ValueError, match=name):
                    layer(streams, past_key_values=step, **{name: given})
            with pytest.raises(TypeError, match="unknown"):
                layer.run(streams, None, {"past_key_values": step, "unknown": 1})


def test_a_step_remembers_what_layers_share(every_kind) -> None:
    """Nothing that a tape made, and all that layers without plans ask for."""
    with switch() as made:
        twins = Twins(every_kind, made)
        rows = twins.warm()
        steps = []

        @torch.inference_mode()
        def decode(cache: PagedCache) -> torch.Tensor:
            batch = Batch.decode(cache.lengths[rows], torch.tensor(rows))
            steps.append(CacheStep(cache, batch))
            return every_kind.model(torch.tensor([[3]]), None, steps[-1])[0]

        for _ in range(WARM):
            steps.clear()
            twins.both(decode)
        assert made.ran == 0
        found, wanted = (step._shared for step in steps)
        plain = [value for key, value in found.items() if key[0] != "plan"]
        assert len(plain) == len(wanted)
        for value, other in zip(plain, wanted.values(), strict=True):
            for one, two in zip(flat(value), flat(other), strict=True):
                assert_bitwise(one, two)


def flat(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


def test_what_a_layer_makes_for_a_step_rules_a_plan_out(monkeypatch) -> None:
    """Other layers would miss it in a step whose layers are replayed."""
    with switch() as made:
        twins = Twins(tiny(CSA), made)
        run = DeepseekV4DecoderLayer._run

        def leaking(self: Any, streams: Any, ids: Any, options: Any) -> torch.Tensor:
            options["past_key_values"].once("mine", lambda: torch.empty(3))
            return run(self, streams, ids, options)

        monkeypatch.setattr(DeepseekV4DecoderLayer, "_run", leaking)
        rows = twins.begin([1, 2])
        for token in range(2 * WARM):
            twins.decode([token], rows)
            assert made.ran == 1


@pytest.mark.parametrize("same", [True, False])
def test_two_caches_of_one_model(same: bool) -> None:
    """Of one size, which share a plan, or of two, which need two."""
    with warmed() as (twins, rows):
        other = Twins(twins.model, twins.plans, {} if same else {"pool_tokens": 5 * TOKENS})
        others = other.begin([9, 8, 7, 6])
        for token in range(WARM):
            twins.decode([token], rows)
            other.decode([token], others)
        assert twins.plans.ran == 0
        twins.same_caches()
        other.same_caches()
        assert len(plans_of(twins.model)) == 1 + (not same)


def test_two_models_of_one_cache_size(every_kind) -> None:
    with switch() as made:
        other = copy.deepcopy(every_kind)
        for parameter in layer_of(other).attn_hc.parameters():
            parameter.data.mul_(2)
        pairs = [Twins(model, made) for model in (every_kind, other)]
        rows = [twins.begin([1, 2, 3]) for twins in pairs]
        for token in range(WARM):
            results = [twins.decode([token], r) for twins, r in zip(pairs, rows, strict=True)]
        assert made.ran == 0
        assert not torch.equal(*results)


def test_copies_have_plans_of_their_own() -> None:
    with warmed() as (twins, rows):
        layer = layer_of(twins.model)
        plans = layer.__dict__["_plans"]
        assert copy.deepcopy(layer).__dict__["_plans"].plans == {}
        assert pickle.loads(pickle.dumps(plans)).plans == {}
        shallow = copy.copy(layer)
        twins.model.model.layers[0] = shallow
        for token in range(WARM):
            twins.decode([token], rows)
        assert shallow.__dict__["_plans"] is not plans
        assert layer.__dict__["_plans"] is plans
        assert len(plans.plans) == 1


def test_plans_keep_neither_modules_nor_tensors() -> None:
    """Replaced parts are gone at once, and so is a layer, without the garbage collector."""
    with warmed() as (twins, rows):
        layer = layer_of(twins.model)
        gc.collect()
        gc.disable()
        try:
            old = layer.mlp.experts.down_proj
            gone = [weakref.ref(layer.mlp), weakref.ref(old)]
            del old
            add_experts(layer)
            assert [ref() for ref in gone] == [None, None]
            twins.decode([1], rows)
            norm = weakref.ref(layer.input_layernorm.weight)
            take = layer.input_layernorm
            take.weight = nn.Parameter(torch.rand_like(take.weight), requires_grad=False)
            assert norm() is None
            del take
            for token in range(WARM):
                twins.decode([token], rows)
            gone = [weakref.ref(layer), weakref.ref(layer.mlp.experts.down_proj)]
            del layer
            twins.model.model.layers[0] = nn.Identity()
            assert [ref() for ref in gone] == [None, None]
        finally:
            gc.enable()


def test_plans_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(_layer_plan, "_MOST", 2)
    with switch() as made:
        twins = Twins(tiny(SLIDING), made)
        rows = twins.begin([1], [2], [3], [4])
        for count in (1, 2, 3, 4, 1, 2):
            for _ in range(3):
                twins.decode([5] * count, rows[:count])
            assert len(layer_of(twins.model).__dict__["_plans"].plans) <= 2
        assert made.ran == 0


def test_a_layer_that_cannot_be_planned_is_seldom_looked_at() -> None:
    with switch() as made, pytest.MonkeyPatch.context() as patch:
        twins = Twins(tiny(SLIDING), made)
        rows, looks, structure = twins.begin([1, 2]), [], _layer_plan.Structure
        wrap(layer_of(twins.model))
        patch.setattr(_layer_plan, "Structure", lambda x: (looks.append(1), structure(x))[1])
        for token in range(40):
            twins.decode([token], rows)
        assert len(looks) < 12


def test_threads_have_steps_of_their_own(every_kind) -> None:
    with switch() as made:
        twins = Twins(every_kind, made)
        twins.warm()
        prompts = [[1, 2], [3, 4, 5], [6]]
        caches = [every_kind.new_cache(1, TOKENS, 16) for _ in prompts]
        rows = [[cache.allocate()] for cache in caches]

        def work(i: int, out: list[torch.Tensor]) -> None:
            out.append(every_kind.prefill([prompts[i]], caches[i], rows[i]))
            for token in range(12):
                out.append(every_kind.decode(torch.tensor([token + i]), caches[i], rows[i]))

        wanted: list[list[torch.Tensor]] = [[] for _ in prompts]
        found: list[list[torch.Tensor]] = [[] for _ in prompts]
        for i, out in enumerate(wanted):
            work(i, out)
            caches[i].reset(rows[i][0])
        threads = [threading.Thread(target=work, args=(i, out)) for i, out in enumerate(found)]
        with made.on():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for one, other in zip(found, wanted, strict=True):
            assert len(one) == len(other)
            assert all(map(torch.equal, one, other))


def test_nothing_is_planned_on_the_cpu() -> None:
    model = tiny(SLIDING)
    cache = model.new_cache(1, TOKENS, 16)
    model.prefill([[1, 2]], cache, [cache.allocate()])
    for _ in range(WARM):
        model.decode(torch.tensor([1]), cache, [0])
    assert "_plans" not in layer_of(model).__dict__


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 700)), min_size=1, max_size=9))
def test_memory_of_a_tape_is_that_of_the_call(steps: list[tuple[int, int]]) -> None:
    """Copies from one allocation to another by address: none overlaps another."""
    x = torch.randint(0, 256, (700,), dtype=torch.uint8)

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = [x]
        for source, size in steps:
            given = made[source % len(made)]
            out = torch.empty(size, dtype=torch.uint8)
            count = min(size, given.numel())
            copies(count, given, out)
            made.append(out)
        # All of them are read in the end, by one that the tape has to give.
        out = torch.empty(sum(map(torch.Tensor.numel, made)), dtype=torch.uint8)
        begin = 0
        for part in made:
            copies(part.numel(), part, out[begin:])
            begin += part.numel()
        return (out,)

    def copies(count: int, source: torch.Tensor, target: torch.Tensor) -> None:
        def run(stream: int, addresses: Any) -> None:
            ctypes.memmove(addresses[1], addresses[0], count)

        recorder = _recorder.current_recorder()
        with recorder.noting(run, (source, target)) if recorder else contextlib.nullcontext():
            run(0, (source.data_ptr(), target.data_ptr()))

    torch.use_deterministic_algorithms(True)  # fills new memory
    try:
        recorder = _recorder.Recorder([x], lambda name, args: None)
        with recorder.watching():
            result = call(x)
        tape = _tape.tape_of(recorder, result)
        other = torch.randint(0, 256, (700,), dtype=torch.uint8)
        [found] = tape([other], [other.data_ptr()], 0)
        [wanted] = call(other)
    finally:
        torch.use_deterministic_algorithms(False)
    begin = 0
    for size in [700, *[size for _, size in steps]]:
        begin += size
    known = written(steps)
    assert torch.equal(found[known], wanted[known])


def written(steps: list[tuple[int, int]]) -> torch.Tensor:
    """Which bytes of the result of the test above come from its argument."""
    made = [torch.ones(700, dtype=torch.bool)]
    for source, size in steps:
        part = torch.zeros(size, dtype=torch.bool)
        given = made[source % len(made)][:size]
        part[: len(given)] = given
        made.append(part)
    return torch.cat(made)


def test_calls_of_torch_are_made_again() -> None:
    """Products, sums of views and copies of strided tensors, with other tensors."""

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product = torch.mm(x, weight.t())
        wide = product.double() * 0.5
        both = torch.cat([wide, x.t().reshape(x.shape).double()], dim=1)
        return torch.nn.functional.linear(both[:, 1:9], both[:3, :8])

    tensors = [torch.randn(4, 8), torch.randn(5, 8)]
    with torch.inference_mode():
        recorder = _recorder.Recorder(tensors, lambda name, args: None, composite=True)
        with recorder.watching():
            result = call(*tensors)
        tape = _tape.tape_of(recorder, result)
        for _ in range(2):
            others = [torch.randn(4, 8), torch.randn(5, 8)]
            assert_bitwise(tape.interpreted(others), call(*others))
            addresses = [tensor.data_ptr() for tensor in others]
            assert_bitwise(tape(others, addresses, 0), call(*others))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.add_(1),
        lambda x: torch.rand(3) + x,
        lambda x: x + torch.ones(3),
        lambda x: torch.mm(x.view(1, 3), x.view(3, 1)) if bool(x[0] > -9) else x,
    ],
)
def test_what_cannot_be_repeated_rules_a_tape_out(call: Any) -> None:
    x = torch.randn(3)
    recorder = _recorder.Recorder([x], lambda name, args: None, composite=True)
    with recorder.watching():
        result = call(x)
    assert _tape.tape_of(recorder, result) is None
