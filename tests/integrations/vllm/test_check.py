"""``DSV4_VLLM_CHECK``: the first boundary that is not finite, and whose token it was."""

from __future__ import annotations

import logging
import math
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM 0.33 is not installed; make test-vllm has it")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import override_forward_context
from vllm.models.deepseek_v4.nvidia import model as vllm_model
from vllm.v1.worker.gpu.model_states import default, resolve_model_state_cls

from dsv4.boundaries import Rows
from dsv4.integrations.vllm import check, hyper_connection, norm, places
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.batch import Batch
from dsv4.integrations.vllm.report import Report
from dsv4.integrations.vllm.switches import Switches
from dsv4.testing import strategies
from tests.boundary_cases import Stack, boundaries
from tests.integrations.vllm import test_hyper_connection as layers

CAPACITY = 16


class State:
    """Stands for Model Runner V2's state of a model."""

    def __init__(self):
        self.calls = []

    def preprocess_state(self, input_batch, *args, **kwargs):
        self.calls.append(("preprocess", args, kwargs))

    def remove_request(self, req_id):
        self.calls.append(("remove", req_id))


def context(v2=True, check_=True, **parallel):
    config = types.SimpleNamespace(
        use_v2_model_runner=v2,
        parallel_config=types.SimpleNamespace(
            **{"use_ubatching": False, "prefill_context_parallel_size": 1, **parallel}
        ),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=CAPACITY),
        model_config=types.SimpleNamespace(is_hybrid=False, is_attention_free=False),
        compilation_config=types.SimpleNamespace(static_forward_context={}),
    )
    return Adoption(config, Switches(check=check_), Report())


def input_batch(lengths, positions=None, drafts=0):
    """As ``InputBatch``: requests of these lengths, the i-th from position 100 i on."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    if positions is None:
        positions = np.concatenate([100 * i + np.arange(n) for i, n in enumerate(lengths)])
    logits = np.arange(len(lengths) + 1, dtype=np.int32) * (1 + drafts)
    return types.SimpleNamespace(
        req_ids=[f"r{i}" for i in range(len(lengths))],
        num_reqs=len(lengths),
        num_tokens=int(starts[-1]),
        query_start_loc_np=starts,
        cu_num_logits_np=logits,
        positions=torch.as_tensor(positions).long(),
    )


class Engine:
    """Runs steps as Model Runner V2 does."""

    def __init__(self, model=None, adoption=None):
        self.model = Stack() if model is None else model
        self.context = context() if adoption is None else adoption
        check.adopt(self.model, self.context)
        own = self.model.get_model_state_cls
        watch = own.__self__
        self.watch = watch
        self.state = check.watched_state(State, watch)()

    def step(self, lengths, padded=None, positions=None, drafts=0):
        batch = input_batch(lengths, positions, drafts)
        self.state.preprocess_state(batch, "tables", kv_cache_config="kv")
        tokens = batch.num_tokens
        self.forward(tokens if padded is None else padded)
        return batch

    def forward(self, tokens):
        ids = torch.arange(tokens) % 10
        return self.model(input_ids=ids, positions=ids, intermediate_tensors=None)

    def sample(self, hidden):
        return self.model.compute_logits(hidden)


@pytest.fixture
def said():
    """Lines that were logged as errors."""
    lines = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm.plugins.dsv4")
    logger.addHandler(handler)
    yield lambda: lines
    logger.removeHandler(handler)


class TestIncidents:
    @pytest.mark.parametrize("where", boundaries(), ids=" ".join)
    def test_every_boundary_is_named_with_its_token(self, said, where):
        engine = Engine()
        planted = engine.model.planted
        engine.step([2, 3], padded=8)
        planted.where, planted.rows = where, [3, 4, 7]
        engine.step([2, 3], padded=8)
        assert said() == []  # not before it has arrived
        planted.where = None
        engine.step([1, 1, 1])
        (line,) = said()
        module, side = where
        assert f"step 2: NaN or infinity, first in the {side} of {module} (" in line
        assert "row 3, request r1 at position 101." in line

    def test_padding_is_no_incident(self, said):
        engine = Engine()
        planted = engine.model.planted
        planted.where, planted.rows = ("layers.1.attn", "output"), [5, 6, 7]
        engine.forward(8)  # profiling, capture: no step
        engine.step([2, 3], padded=8)
        engine.step([5], padded=8)
        engine.watch.steps.end()
        engine.watch.examine(wait=True)
        assert said() == []
        engine.step([6], padded=8)
        engine.state.remove_request("r0")
        assert "row 5, request r0 at position 5" in said()[0]

    def test_an_incident_is_said_once_for_each_request(self, said):
        engine = Engine()
        planted = engine.model.planted
        planted.where, planted.rows = ("layers.2.ffn", "output"), [1]
        for _ in range(4):
            engine.step([1, 1])
        assert len(said()) == 1
        planted.rows = [0, 1]  # another request, too
        engine.step([1, 1])
        engine.step([1, 1])
        assert [line.count("request r0") for line in said()] == [0, 1]
        engine.state.remove_request("r0")  # an id may come again
        engine.step([1, 1])
        engine.step([1, 1])
        assert len(said()) == 3

    def test_the_last_step_is_said_when_its_request_ends(self, said):
        engine = Engine()
        engine.model.planted.where, engine.model.planted.rows = ("layers.0", "input"), [0]
        engine.step([1])
        assert said() == []
        engine.state.remove_request("r0")
        assert len(said()) == 1

    @given(
        lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
        drafts=st.integers(0, 2),
        data=st.data(),
    )
    def test_logits_belong_to_the_last_tokens(self, lengths, drafts, data):
        drafts = min(drafts, min(lengths) - 1)
        number = data.draw(st.integers(0, len(lengths) * (1 + drafts) - 1))
        batch = Batch.of_input_batch(1, input_batch(lengths, drafts=drafts))
        request, back = number // (1 + drafts), drafts - number % (1 + drafts)
        token = batch.logit(number)
        assert (token.request, token.number) == (f"r{request}", request)
        assert token.position == 100 * request + lengths[request] - 1 - back

    def test_logits_are_a_boundary(self, said):
        engine = Engine()
        engine.step([2, 3])
        engine.model.planted.where, engine.model.planted.rows = ("compute_logits", "output"), [1]
        logits = engine.sample(torch.zeros(2, 8))
        assert logits.isnan().any()
        engine.state.remove_request("r9")
        (line,) = said()
        assert (
            "first in the output of compute_logits (Stack): row 1, request r1 at position 102"
            in line
        )
        assert "The input of compute_logits (Stack), before it, was finite" in line

    @given(
        lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
        row=st.integers(0, 15),
    )
    def test_tokens_belong_to_requests(self, lengths, row):
        batch = Batch.of_input_batch(1, input_batch(lengths))
        token = batch.token(row)
        if row >= sum(lengths):
            assert (token.request, token.position) == ("", -1)
            assert str(token) == f"row {row}, a request that is not known"
            return
        owners = [i for i, n in enumerate(lengths) for _ in range(n)]
        assert token.request == f"r{owners[row]}"
        assert token.position == 100 * owners[row] + owners[:row].count(owners[row])


class TestModelRunnerV1:
    """No ids, but numbers of requests where the step ran eagerly."""

    def engine(self):
        adoption = context(v2=False)
        model = Stack()
        check.adopt(model, adoption)
        assert not hasattr(model, "get_model_state_cls")
        return model

    def forward(self, model, starts, padding):
        metadata = types.SimpleNamespace(query_start_loc_cpu=torch.tensor(starts))
        forward = types.SimpleNamespace(
            is_padding=torch.tensor(padding), attn_metadata={"layer": metadata}
        )
        with override_forward_context(forward):
            ids = torch.arange(len(padding))
            return model(ids, ids + 50)

    def test_eager_steps(self, said):
        model = self.engine()
        model.planted.where, model.planted.rows = ("layers.1.ffn", "input"), [2, 3]
        self.forward(model, [0, 1, 2], [False, False, True, True])
        model.compute_logits(torch.zeros(2, 8))
        self.forward(model, [0, 1, 3], [False, False, False, True])
        model.compute_logits(torch.zeros(2, 8))
        model.planted.where = None
        self.forward(model, [0, 1], [False])
        (line,) = said()
        assert "step 2: NaN or infinity, first in the input of layers.1.ffn (Part)" in line
        assert "row 2, request number 1 of the batch at position 52" in line

    def test_a_replayed_graph_is_examined_without_its_requests(self, said):
        model = self.engine()
        watch = model._forward_pre_hooks[next(iter(model._forward_pre_hooks))].__self__
        self.forward(model, [0, 1], [False])
        model.compute_logits(torch.zeros(1, 8))
        number = next(
            i
            for i, b in enumerate(watch.boundaries._boundaries)
            if (b.module, b.side) == ("layers.1.attn", "output")
        )
        watch.boundaries.mark(number, torch.full((1, 8), math.nan), Rows())  # as in a graph
        model.compute_logits(torch.zeros(1, 8))
        watch.examine()
        (line,) = said()
        assert "output of layers.1.attn (Part): row 0, a request that is not known" in line


class TestAdoption:
    def test_off_changes_nothing(self):
        model = Stack()
        check.adopt(model, context(check_=False))
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert "compute_logits" not in vars(model)
        assert "get_model_state_cls" not in vars(model)

    @pytest.mark.parametrize(
        "parallel", [{"use_ubatching": True}, {"prefill_context_parallel_size": 2}]
    )
    def test_what_cannot_be_watched_is_refused(self, parallel):
        with pytest.raises(ValueError, match="DSV4_VLLM_CHECK is 1 with microbatches"):
            check.adopt(Stack(), context(**parallel))

    def test_the_state_is_the_models_own_extended(self):
        engine = Engine()
        state = resolve_model_state_cls(engine.context.vllm_config, engine.model)
        assert issubclass(state, default.DefaultModelState)
        assert state.prepare_attn is default.DefaultModelState.prepare_attn
        assert state.preprocess_state is not default.DefaultModelState.preprocess_state
        again = resolve_model_state_cls(engine.context.vllm_config, engine.model)
        assert issubclass(again, default.DefaultModelState)

    def test_the_states_own_methods_still_run(self):
        engine = Engine()
        engine.step([2])
        engine.state.remove_request("r0")
        assert engine.state.calls == [
            ("preprocess", ("tables",), {"kv_cache_config": "kv"}),
            ("remove", "r0"),
        ]

    def test_the_places_are_as_this_vllm_has_them(self):
        assert places.CHECK
        assert places.mismatches(places.CHECK) == []


class TestVllmsLayers:
    """vLLM's decoder layers with this package's hyper-connections, watched."""

    def test_a_part_and_its_kernels_are_named(self, said, monkeypatch):
        group = types.SimpleNamespace(is_first_rank=True, is_last_rank=True)
        monkeypatch.setattr(vllm_model, "get_pp_group", lambda: group)
        monkeypatch.setattr(hyper_connection, "get_pp_group", lambda: group)
        with set_current_vllm_config(VllmConfig()):
            stack = layers.vllm_stack(strategies.generator(0))
        model = Wrapped(stack)
        adoption = context()
        hyper_connection.adopt(model, adoption)
        norm.adopt(model, adoption)
        engine = Engine(model, adoption)
        engine.step([2, 1], padded=4)
        stack.layers[1].hc_ffn_scale[0] = math.nan
        engine.step([2, 1], padded=4)
        engine.state.remove_request("r0")
        (line,) = said()
        assert "first in the input of model.layers.1.ffn (Experts)" in line
        assert "made by hc_pre_norm, hc_post_pre_norm: row 0, request r0 at position 0" in line
        stack.layers[1].hc_ffn_scale[0] = 1.0
        stack.norm.weight.data[3] = math.nan
        engine.step([2, 1], padded=4)
        engine.state.remove_request("r0")
        assert "first in the output of model.norm (FinalNorm), made by rms_norm" in said()[1]


class Wrapped(torch.nn.Module):
    def __init__(self, stack):
        super().__init__()
        self.model = stack

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states):
        return hidden_states
