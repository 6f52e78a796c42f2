"""Plans of whole layers: a step gives what the layers give, bit for bit.

On the CPU a layer's tape calls reference implementations, or kernels in Triton's interpreter.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsv4.config import CSA, HCA, SLIDING
from dsv4.device import interpret_triton
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.layers import DeepseekV4DecoderLayer, _layer_plan
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.ops import _library, _plans
from dsv4.testing.assertions import assert_bitwise
from tests.plans.layer_plan_cases import (
    ROWS,
    TOKENS,
    WARM,
    Switch,
    Twins,
    layer_of,
    plans_of,
    switch,
    tiny,
    warmed,
)
from tests.serving.cases import packed


@pytest.fixture(scope="module")
def every_kind() -> DeepseekV4ForCausalLM:
    return tiny(SLIDING, CSA, HCA)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, ROWS)),
        st.tuples(st.just("prompt"), st.integers(1, 9)),
        st.tuples(st.sampled_from(["fork", "free"]), st.integers(0, ROWS)),
    ),
    min_size=4,
    max_size=14,
)


@pytest.mark.slow
@given(ACTIONS, st.booleans(), st.integers(0, 2**31))
@settings(max_examples=8)
def test_steps_are_the_layers(every_kind, actions, pooled: bool, seed: int) -> None:
    """Bit for bit, in results and caches, while sequences come, go and are forked."""
    draw = torch.Generator().manual_seed(seed)
    options = {"pool_tokens": ROWS * 256} if pooled else {}
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


@pytest.mark.slow
def test_pages_end_and_windows_move_on(every_kind) -> None:
    """A sequence from its first token over all borders of windows and pages."""
    with switch() as made:
        twins = Twins(every_kind, made, {"pool_tokens": 2 * 256})
        rows, replayed = twins.begin([5]), 0
        for token in range(TOKENS - 1):
            twins.decode([token % 64], rows)
            replayed += made.ran == 0
        twins.same_caches()
        assert replayed >= TOKENS - WARM - 1


@pytest.mark.parametrize(
    "changes", [{"numerics": "transformers"}, {"activation": "nvfp4"}, {"activation": "fp8"}]
)
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


@pytest.mark.slow
def test_kernels_are_launched_again(monkeypatch) -> None:
    """Triton's interpreter runs it: launches of kernels, and operators that the reference runs."""
    pytest.importorskip("triton")
    monkeypatch.setattr(_library.Operation, "check_values", lambda self, args: None)
    with switch() as made, interpret_triton():
        twins = Twins(tiny(CSA), made)
        twins.warm()
        twins.same_caches()
        [plan] = plans_of(twins.model)
        assert plan.again.tape.launches >= 5


def test_a_step_remembers_what_layers_share(every_kind) -> None:
    """A step holds nothing that a tape made, and all that layers without plans ask for."""
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
        actual, expected = (step._shared for step in steps)
        plain, other = by_name(actual), by_name(expected)
        assert plain.keys() == other.keys()
        for name, tensors in plain.items():
            for first, two in zip(tensors, other[name], strict=True):
                assert_bitwise(first, two)


def by_name(shared: dict[Any, Any]) -> dict[str, list[torch.Tensor]]:
    """Return what a step remembers, by keys without the numbers of objects."""
    result = {}
    for key, value in shared.items():
        name = str([part for part in key if not (isinstance(part, int) and part > 2**20)])
        if key[0] != "plan":
            assert name not in result
            result[name] = list(value) if isinstance(value, tuple) else [value]
    return result


@pytest.mark.parametrize("same", [True, False])
def test_two_caches_of_one_model(same: bool) -> None:
    """Layers of one size, which share a plan, or of two, which need two."""
    with warmed() as (twins, rows):
        other = Twins(twins.model, twins.plans, {} if same else {"pool_tokens": 9 * 256})
        others = other.begin([9, 8, 7, 6])
        for token in range(WARM):
            twins.decode([token], rows)
            other.decode([token], others)
        assert twins.plans.ran == 0
        twins.same_caches()
        other.same_caches()
        made = [plan for plan in plans_of(twins.model) if plan.again is not None]
        assert len(made) == 1 + (not same)


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
            layer.mlp = copy.deepcopy(layer.mlp)
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


@pytest.mark.slow
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

        expected: list[list[torch.Tensor]] = [[] for _ in prompts]
        actual: list[list[torch.Tensor]] = [[] for _ in prompts]
        for i, out in enumerate(expected):
            work(i, out)
            caches[i].reset(rows[i][0])
        threads = [threading.Thread(target=work, args=(i, out)) for i, out in enumerate(actual)]
        with made.on():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for first, other in zip(actual, expected, strict=True):
            assert len(first) == len(other)
            assert all(map(torch.equal, first, other))


def test_nothing_is_planned_on_the_cpu() -> None:
    model = tiny(SLIDING)
    cache = model.new_cache(1, TOKENS, 16)
    model.prefill([[1, 2]], cache, [cache.allocate()])
    for _ in range(WARM):
        model.decode(torch.tensor([1]), cache, [0])
    assert "_plans" not in layer_of(model).__dict__


@pytest.fixture
def on_gpu() -> Iterator[Twins]:
    """A model that kernels run, and plans as they are: ``Switch`` turns them off."""
    made, run, is_plain = Switch(), DeepseekV4DecoderLayer._run, _layer_plan._is_plain

    def counted(*args: Any) -> torch.Tensor:
        made.ran += made.is_on
        return run(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_layer_plan, "_is_plain", lambda call: made.is_on and is_plain(call))
        patch.setattr(DeepseekV4DecoderLayer, "_run", counted)
        yield Twins(packed().cuda().requires_grad_(False), made, {"pool_tokens": ROWS * 256})


@pytest.mark.gpu
def test_steps_are_the_layers_on_a_gpu(on_gpu) -> None:
    rows = on_gpu.warm()
    rows += on_gpu.begin([4, 5], [6])
    for token in range(80):
        if token == 40:
            rows.append(on_gpu.both(lambda cache: cache.fork(rows[1])))
        if token == 60:
            on_gpu.both(lambda cache: cache.free(rows[0]))
            del rows[0]
        on_gpu.decode([token, 9, 17, 33][: len(rows)], rows)
    assert on_gpu.plans.ran == 0
    on_gpu.same_caches()


@pytest.mark.gpu
def test_a_replayed_step_calls_no_operator_of_a_layer(on_gpu, monkeypatch) -> None:
    rows, calls = on_gpu.warm(), []
    call = _plans.PLANS.call
    monkeypatch.setattr(
        _plans.PLANS,
        "call",
        lambda *arguments: (calls.append(arguments[0].__name__), call(*arguments))[1],
    )
    with on_gpu.plans.on():
        on_gpu.model.decode(torch.tensor([1], device="cuda"), on_gpu.caches[0], rows)
    layers_of_model = len(on_gpu.model.model.layers)
    # Tables and slots that layers share, the last norm, the head.
    assert len(calls) <= 10, (layers_of_model, calls)
    for plan in plans_of(on_gpu.model):
        assert isinstance(plan.again, _plans.Replay | None)


@pytest.mark.gpu
def test_a_capture_is_of_the_layers(on_gpu) -> None:
    """It uses more streams than an eager step; what it replays is the same."""
    rows = on_gpu.warm()
    cache, model = on_gpu.caches[0], on_gpu.model
    tokens, row_tensor = torch.tensor([1], device="cuda"), torch.tensor(rows, device="cuda")
    with on_gpu.plans.on():
        for _ in range(2):
            cache.prepare(rows, [1])
            model.decode(tokens, cache, row_tensor)
        torch.cuda.synchronize()
        cache.prepare(rows, [1])
        graph = torch.cuda.CUDAGraph()
        on_gpu.plans.ran = 0
        with torch.cuda.graph(graph):
            model.decode(tokens, cache, row_tensor)
        assert on_gpu.plans.ran == len(model.model.layers)


@pytest.mark.gpu
def test_a_hook_of_launches_is_called(on_gpu) -> None:
    from triton import knobs

    rows, seen = on_gpu.warm(), []
    before = knobs.runtime.launch_enter_hook
    knobs.runtime.launch_enter_hook = lambda metadata: seen.append(metadata)
    try:
        on_gpu.decode([1], rows)
    finally:
        knobs.runtime.launch_enter_hook = before
    assert seen
    assert on_gpu.plans.ran == len(on_gpu.model.model.layers)
