"""vLLM's drafts, MTP and DSpark, loaded from checkpoints, with this package's modules."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsv4
from dsv4.config import DSparkConfig
from dsv4.ops.kv_cache import norm_rope_write_kv
from dsv4.ops.quantize import dequantize
from dsv4.quant.formats import MXFP4, NVFP4, QuantizedTensor
from dsv4.testing.assertions import assert_bitwise

pytest.importorskip("vllm", reason="vLLM 0.33 is not installed; make test-vllm has it")

from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import RoutedExperts

from dsv4.integrations.vllm import deepseek, draft, draft_experts, places, shared_expert, warm
from dsv4.integrations.vllm.cache_views import kv_pages
from dsv4.integrations.vllm.report import DRAFT, Report, path_of_stage
from dsv4.integrations.vllm.switches import HYPER_CONNECTION
from tests.integrations.vllm import build
from tests.integrations.vllm.test_hyper_connection import Attention, AttentionOf, Experts, ExpertsOf

pytestmark = pytest.mark.usefixtures("vllm_world")
TOKENS, STAGES = 5, 3
SPARK = DSparkConfig(
    block_size=TOKENS, noise_token_id=47, target_layer_ids=(0, 1, 2), markov_rank=128
)


class Loaded:
    """A draft of vLLM's and this package's model, of one checkpoint."""

    def __init__(self, folder, method, built, drafts, layout="deepseek", **sizes):
        self.sizes = build.checkpoint(folder / "model", layout, mtp=True, **sizes)
        options = {"method": method, "num_speculative_tokens": drafts}
        with mock.patch.object(VllmConfig, "use_v2_model_runner", True):
            self.config = build.engine_config(folder / "model", speculative_config=options)
        with build.hopper(self.config):
            self.model = built(vllm_config=self.config)
            build.load_model(self.model, self.config)
        options = {"dtype": torch.bfloat16, "progress": False, "mxfp4": "lossless", "mtp": True}
        self.own = dsv4.load(folder / "model", device="cpu", **options)


def loaded(tmp_path_factory, *args, **sizes):
    folder = tmp_path_factory.mktemp("draft")
    environment = {"DSV4_VLLM": "all", "DSV4_CACHE_DIR": str(folder / "cache")}
    with mock.patch.dict("os.environ", environment):
        made = Loaded(folder, *args, **sizes)
        made.saved = Report.read(path_of_stage(DRAFT, 1))
    return made


@pytest.fixture(scope="module")
def mtp(tmp_path_factory):
    sizes = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    return loaded(tmp_path_factory, "mtp", draft.DeepSeekV4MTP, 1, **sizes)


@pytest.fixture(scope="module")
def dspark(tmp_path_factory):
    sizes = {"num_hidden_layers": 4, "num_nextn_predict_layers": 0, "dspark": SPARK}
    made = loaded(tmp_path_factory, "dspark", draft.DSparkDeepseekV4ForCausalLM, 5, **sizes)
    made.attentions = made.own.dspark.attentions()  # stand-ins take their places
    return made


def stand_in(theirs, ours, number):
    """Give a layer of each the same sublayers: a CPU has none of vLLM's kernels for them."""
    attention, experts = Attention(0.5 + number), Experts(0.25 - number)
    theirs.attn.forward, theirs.ffn.forward = attention.forward, experts.forward
    ours.self_attn, ours.mlp = AttentionOf(attention), ExpertsOf(experts)


def normal(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def kernels(report):
    """How often each kernel is in a report in which everything is replaced."""
    assert report.complete
    names = [row.kernel for row in report.rows]
    return {name: names.count(name) for name in names}


def test_every_place_of_a_draft_is_replaced(mtp, dspark):
    both = {"gemm (FP8 128 x 128 weights)": 8, "grouped_gemm (NVFP4 weights)": 1, "swiglu": 1}
    both |= {"sparse_attention": 1, "hc_pre_norm, hc_post_pre_norm": 1, shared_expert.KERNEL: 1}
    assert kernels(mtp.model.dsv4.report) == {**both, draft._KERNELS: 2}
    stages = {name: STAGES * count for name, count in both.items()}
    stages["gemm (FP8 128 x 128 weights)"] = 6 * STAGES + 2  # main_proj, context_wkv_proj
    expected = {**stages, draft._KERNELS: 1, "rms_norm": 2, "norm_rope_write_kv": 1}
    assert kernels(dspark.model.dsv4.report) == expected
    for made in (mtp, dspark):
        assert made.saved == made.model.dsv4.report


@pytest.mark.parametrize("method", ["mtp", "dspark"])
def test_mxfp4_experts_beside_nvfp4_ones_are_converted(tmp_path_factory, method):
    """In NVIDIA's layout, whose config.json names NVFP4 for all routed experts."""
    if method == "mtp":
        sizes = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
        made = loaded(tmp_path_factory, "mtp", draft.DeepSeekV4MTP, 1, "nvidia", **sizes)
        own = [layer.layer for layer in made.own.mtp]
    else:
        sizes = {"num_hidden_layers": 4, "num_nextn_predict_layers": 0, "dspark": SPARK}
        built = draft.DSparkDeepseekV4ForCausalLM
        made = loaded(tmp_path_factory, "dspark", built, 5, "nvidia", **sizes)
        own = [stage.layer for stage in made.own.dspark]
    theirs = [m.dsv4_experts for m in made.model.modules() if isinstance(m, RoutedExperts)]
    for experts, expected in zip(theirs, own, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            dense = expected.mlp.experts.dense_weight(name)
            assert_bitwise(experts.dense_weight(name), dense, name)


EXPERT = "mtp.0.ffn.experts.3."


def mxfp4(rows, seed, spread=2):
    """An MXFP4 matrix as files store it: codes and exponents."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (rows, 64), generator=generator, dtype=torch.int8)
    exponents = torch.randint(120, 121 + spread, (rows, 4), generator=generator)
    return codes, exponents.to(torch.uint8).view(torch.float8_e8m0fnu)


def draft_with(*scales):
    """A draft whose experts have parameters of these names."""
    experts = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(experts)
    for name in scales:
        experts.register_parameter(name, torch.nn.Parameter(torch.zeros(1)))
    model = torch.nn.Module()
    model.experts = experts
    return model


@given(order=st.permutations(range(6)), spread=st.sampled_from([0, 2, 30]))
def test_tensors_of_experts_come_in_any_order(order, spread):
    """A pair shares a global scale; what NVFP4 has no scale for is rounded to its nearest value."""
    stored = {}
    for number, matrix in enumerate(("w1", "w2", "w3")):
        codes, scales = mxfp4(8, number, spread)
        stored |= {f"{EXPERT}{matrix}.weight": codes, f"{EXPERT}{matrix}.scale": scales}
    others = [("mtp.0.norm.weight", torch.ones(3)), ("layers.0.x.scale", torch.zeros(2))]
    names = [list(stored)[i] for i in order]
    weights = [others[0], *((name, stored[name]) for name in names), others[1]]
    model = draft_with("w13_weight_scale_2")
    converted = dict(draft_experts.as_built(model, weights))
    assert len(converted) == 2 + 9
    assert all(converted[name] is tensor for name, tensor in others)
    scales = {m: converted[f"{EXPERT}{m}.weight_scale_2"] for m in ("w1", "w2", "w3")}
    assert scales["w1"] == scales["w3"]
    for matrix in scales:
        codes, exponents = stored[f"{EXPERT}{matrix}.weight"], stored[f"{EXPERT}{matrix}.scale"]
        before = QuantizedTensor(codes.view(torch.uint8), exponents, None, MXFP4)
        parts = [converted[f"{EXPERT}{matrix}.{part}"] for part in ("weight", "weight_scale")]
        after = dequantize(QuantizedTensor(*parts, scales[matrix].reshape(1), NVFP4), torch.float32)
        expected = dequantize(before, torch.float32)
        if spread < 18:
            assert_bitwise(after, expected)
        else:
            assert (after - expected).abs().max() <= expected.abs().max() * 2.0**-17
    # Experts that are MXFP4 in vLLM, too, and NVFP4 ones of a checkpoint, pass as they are.
    assert list(draft_experts.as_built(draft_with("w13_weight_scale"), weights)) == weights
    for name, tensor in draft_experts.as_built(model, converted.items()):
        assert tensor is converted[name]


@torch.inference_mode()
def test_an_mtp_draft_is_this_packages(mtp):
    own, model = mtp.own, mtp.model
    layer, ours = model.model.layers["2"], own.mtp[0]
    projections = layer.e_proj, layer.h_proj
    for theirs, expected in zip(projections, (ours.e_proj, ours.h_proj), strict=True):
        assert_bitwise(theirs.dsv4_linear.dense_weight(), expected.dense_weight())
    stand_in(layer.mtp_block, ours.layer, 1)
    streams = normal(TOKENS, 4, mtp.sizes.hidden_size)
    ids, positions = torch.tensor([3, 1, 4, 1, 5]), torch.arange(TOKENS) + 7
    embedded = normal(TOKENS, mtp.sizes.hidden_size, seed=2)
    result = model(ids, positions, streams.flatten(1), inputs_embeds=embedded)
    options = {"input_ids": ids[None], "position_ids": positions[None]}
    hidden, expected = ours(streams[None], embedded[None], **options)
    assert_bitwise(result, expected[0].flatten(1))

    seen = []
    processor = model.model.logits_processor
    with mock.patch.object(processor, "forward", lambda head, x: seen.append(x)):
        model.compute_logits(result)
    assert_bitwise(seen[0], hidden[0])
    # vLLM takes no token in at position 0.
    first = model(ids, positions * 0, streams.flatten(1), inputs_embeds=embedded)
    other = model(ids, positions * 0, streams.flatten(1), inputs_embeds=2 * embedded)
    assert_bitwise(first, other)


@torch.inference_mode()
def test_a_dspark_draft_is_this_packages(dspark):
    own, model = dspark.own.dspark, dspark.model
    for number, (theirs, stage) in enumerate(zip(model.model.layers, own, strict=True)):
        stand_in(theirs, stage.layer, number)
    ids, positions = torch.tensor([3, 1, 4, 1, 5]), torch.arange(TOKENS) + 7
    embedded = normal(TOKENS, dspark.sizes.hidden_size)
    result = model(ids, positions, embedded)
    streams = embedded[None, :, None].repeat(1, 1, 4, 1)
    for stage in own:
        streams = stage.layer(streams, ids[None], position_ids=positions[None])
    expected = own.last.hc_head(streams)[0]
    assert_bitwise(result, expected)
    assert_bitwise(model.model.norm(result), own.last.norm(expected))


def window():
    """Two blocks of raw entries as vLLM pads them."""
    memory = torch.zeros(2, 37440, dtype=torch.uint8)
    return memory.as_strided((2, 64, 584), (37440, 584, 1))


@torch.inference_mode()
def test_dspark_stores_the_context_of_every_stage(dspark):
    """In vLLM's pages; stages without slots, as in a profile run, store nothing."""
    own, inner = dspark.own.dspark, dspark.model.model
    taps = normal(TOKENS, STAGES * dspark.sizes.hidden_size)
    context = inner.combine_hidden_states(taps)
    assert_bitwise(context, own.context(taps[None])[0])
    positions, slots = torch.arange(TOKENS) + 7, torch.tensor([70, 3, -1, 71, 127])
    memory = [window() for _ in range(STAGES)]
    for layer, cache in zip(inner.layers, memory, strict=True):
        layer.attn.swa_cache_layer.kv_cache = cache
    inner.precompute_and_store_context_kv(context, positions)
    assert not any(cache.any() for cache in memory)
    inner.precompute_and_store_context_kv(context, positions, [slots, None, slots])
    assert not memory[1].any()
    cos, sin = inner.layers[0].attn.rotary_emb.cos_sin_cache[positions].chunk(2, dim=-1)
    for number in (0, 2):
        expected = window()
        attention = dspark.attentions[number]
        pages = kv_pages(expected, dspark.sizes.head_dim, dspark.sizes.qk_rope_head_dim)
        kv, weight = attention.kv_proj(context), attention.kv_norm.weight
        norm_rope_write_kv(pages, kv, weight, cos.contiguous(), sin.contiguous(), slots, eps=1e-6)
        assert torch.equal(memory[number], expected)
        assert expected.any()


def test_a_changed_place_leaves_what_a_draft_has_besides(mtp, monkeypatch):
    changed = places.Place("vllm.model_executor.layers.linear", "LinearBase.forward", "self, y")
    monkeypatch.setattr(places, "DRAFT", (changed,))
    context = build.context(parts=frozenset([HYPER_CONNECTION]))
    draft.adopt(mtp.model, context)
    (row,) = context.report.rows
    assert "LinearBase.forward" in row.reason
    off = build.context(parts=frozenset(["experts"]))
    draft.adopt(mtp.model, off)
    assert not off.report.rows


def test_the_places_are_as_this_vllm_has_them():
    assert places.mismatches(places.DRAFT) == []


def test_kernels_of_a_draft_are_launched_and_not_listed(mtp, monkeypatch):
    """Those of its layers are the main model's, which has compiled them."""
    called = []
    monkeypatch.setattr(deepseek, "warm_replaced", lambda *_, **options: called.append(options))
    monkeypatch.setattr(deepseek, "publish", lambda *_, **options: called.append(options))
    mtp.model.process_weights_after_loading()
    assert called == [{"compile_first": False}, {"draft": True}]
    assert {type(part).__name__ for part in warm.self_warming(mtp.model)} >= {"DecoderLayer"}
