"""vLLM's model, loaded from a checkpoint, with this package's hyper-connections and the watch."""

from __future__ import annotations

import contextlib
import logging
import math
from unittest import mock

import pytest
import torch

import dsv4
from dsv4.testing.assertions import assert_bitwise

pytest.importorskip("vllm", reason="vLLM 0.33 is not installed; make test-vllm has it")

from dsv4.integrations.vllm import check, deepseek, hyper_connection, norm, warm
from dsv4.integrations.vllm.switches import HYPER_CONNECTION
from tests.integrations.vllm import build
from tests.integrations.vllm.test_check import State, input_batch
from tests.integrations.vllm.test_hyper_connection import Attention, AttentionOf, Experts, ExpertsOf

pytestmark = pytest.mark.usefixtures("vllm_world")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """vLLM's model and this package's, of one checkpoint, with the same stand-ins for sublayers.

    A CPU has none of vLLM's kernels for them.
    """
    folder = tmp_path_factory.mktemp("model")
    sizes = build.checkpoint(folder, "nvidia", num_hidden_layers=3)
    config = build.engine_config(folder)
    environment = {"DSV4_VLLM": f"experts,linear,{HYPER_CONNECTION}", "DSV4_VLLM_CHECK": "1"}
    with mock.patch.dict("os.environ", environment), build.hopper(config):
        with mock.patch.object(type(config), "use_v2_model_runner", True):
            model = deepseek.DeepseekV4ForCausalLM(vllm_config=config)
        build.load_model(model, config)
    own = dsv4.load(
        folder, device="cpu", dtype=torch.bfloat16, progress=False, mxfp4="lossless", mtp=False
    )
    for i, (theirs, ours) in enumerate(zip(model.model.layers, own.model.layers, strict=True)):
        attention, experts = Attention(0.5 + i), Experts(0.25 - i)
        theirs.attn.forward, theirs.ffn.forward = attention.forward, experts.forward
        ours.self_attn, ours.mlp = AttentionOf(attention), ExpertsOf(experts)
    return sizes, model, own


def test_every_place_is_replaced(loaded):
    _, model, _ = loaded
    rows = [row for row in model.dsv4.report.rows if row.part == HYPER_CONNECTION]
    assert all(row.replaced for row in rows)
    kernels = [row.kernel for row in rows]
    assert kernels.count("hc_pre_norm, hc_post_pre_norm") == 3
    assert kernels.count("rms_norm_pair") == kernels.count("swiglu") == 3
    assert kernels.count("hc_post, hc_head") == kernels.count("rms_norm") == 1
    assert type(model.model) is hyper_connection.Model
    assert type(model.model.norm) is norm.FinalNorm
    attention = model.model.layers[0].attn
    fused = torch.randn(3, attention.q_lora_rank + attention.head_dim).bfloat16()
    qr, _, kv = attention._split_qkv_and_norm(fused)
    assert (qr.shape[1], kv.shape[1]) == (attention.q_lora_rank, attention.head_dim)


def test_hidden_states_are_this_packages(loaded):
    sizes, model, own = loaded
    ids, positions = torch.tensor([3, 1, 4, 1, 5]), torch.arange(5)
    result = model(ids, positions)
    inner = own.model
    streams = inner.embed_tokens(ids)[None, :, None].expand(1, 5, 4, sizes.hidden_size).contiguous()
    for layer in inner.layers:
        streams = layer(streams, ids[None], position_ids=positions[None])
    assert_bitwise(result, inner.norm(inner.hc_head(streams))[0])


def test_parts_warm_themselves(loaded):
    """Without a change to buffers, by the operators that a forward pass calls."""
    _, model, _ = loaded
    parts = list(warm.self_warming(model))
    kinds = [type(part).__name__ for part in parts]
    attention = type(model.model.layers[0].attn).__name__
    assert sorted(kinds) == sorted(["Model", "DecoderLayer", attention, "Swiglu", "FinalNorm"])
    called = set()
    names = ["hc_pre_norm", "hc_post_pre_norm", "hc_post", "hc_head"]
    operators = [(hyper_connection, name) for name in names]
    operators += [(norm, name) for name in ("rms_norm", "rms_norm_pair", "swiglu")]
    names = [name for _, name in operators]
    with contextlib.ExitStack() as stack:
        for module, name in operators:
            operator = getattr(module, name)

            def counted(*args, _name=name, _operator=operator, **options):
                called.add((_name, args[0].shape[0]))
                return _operator(*args, **options)

            stack.enter_context(mock.patch.object(module, name, counted))
        for part in parts:
            warm.run_part(part, 3)
    assert called == {(name, tokens) for name in names for tokens in (1, 2, 3)}


def test_the_watch_names_the_layer_and_the_request(loaded):
    _, model, _ = loaded
    watch = model.get_model_state_cls.__self__
    state = check.watched_state(State, watch)()
    lines = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm.plugins.dsv4")
    logger.addHandler(handler)
    scale = model.model.layers[2].hc_attn_scale
    try:
        for value in (scale[1].item(), math.nan, scale[1].item()):
            scale.data[1] = value
            state.preprocess_state(input_batch([2, 3]))
            model(torch.arange(8), torch.arange(8))
    finally:
        logger.removeHandler(handler)
    (line,) = lines
    # A write-back weight is wrong: the streams are after the attention, and what is made of them.
    assert "step 2: NaN or infinity, first in the input of model.layers.2.ffn" in line
    assert "made by hc_pre_norm, hc_post_pre_norm: row 0, request r0 at position 0" in line
