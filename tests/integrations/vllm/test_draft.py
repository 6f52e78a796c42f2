"""vLLM's drafts, MTP and DSpark, loaded from checkpoints, with this package's modules."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsv4
from dsv4.config import DSparkConfig
from dsv4.ops.kv_cache import norm_rope_write_kv
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.formats import MXFP4, NVFP4, QuantizedTensor
from dsv4.testing.assertions import assert_bitwise

pytest.importorskip("vllm", reason="vLLM 0.33 is not installed; make test-vllm has it")

from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import RoutedExperts

from dsv4.integrations.vllm import deepseek, draft, draft_experts, places, shared_expert, warm
from dsv4.integrations.vllm.cache_views import kv_pages
from dsv4.integrations.vllm.report import DRAFT, Report, path_of_stage
from dsv4.integrations.vllm.switches import HYPER_CONNECTION
from tests.integrations.vllm import build, compare_process
from tests.integrations.vllm.test_hyper_connection import Attention, AttentionOf, Experts, ExpertsOf

pytestmark = pytest.mark.usefixtures("vllm_world")
TOKENS, STAGES = 5, 3
SPARK = DSparkConfig(
    block_size=TOKENS, noise_token_id=47, target_layer_ids=(0, 1, 2), markov_rank=128
)


BUILT = {
    "mtp": (draft.DeepSeekV4MTP, 1, {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}),
    "dspark": (
        draft.DSparkDeepseekV4ForCausalLM,
        5,
        {"num_hidden_layers": 4, "num_nextn_predict_layers": 0, "dspark": SPARK},
    ),
}


class Loaded:
    """A draft of vLLM's and this package's model, of one checkpoint.

    Attributes:
        built: Formats of the experts that vLLM built, layer by layer.
    """

    def __init__(self, folder, method, write):
        self.sizes = write(folder)
        self.method, (model, drafts, _) = method, BUILT[method]
        options = {"method": method, "num_speculative_tokens": drafts}
        with mock.patch.object(VllmConfig, "use_v2_model_runner", True):
            self.config = build.engine_config(folder, speculative_config=options)
        with build.hopper(self.config):
            self.model = model(vllm_config=self.config)
            self.built = [draft_experts.built_format(layer) for layer in self.experts()]
            build.load_model(self.model, self.config)
        options = {"dtype": torch.bfloat16, "progress": False, "mxfp4": "lossless", "mtp": True}
        self.own = dsv4.load(folder, device="cpu", **options)

    def experts(self):
        """The routed experts of vLLM's draft, layer by layer."""
        return [m for m in self.model.modules() if isinstance(m, RoutedExperts)]

    def assert_own_experts(self):
        """Both models have the same weights of experts, bit for bit."""
        own = self.own.mtp if self.method == "mtp" else self.own.dspark
        for theirs, part in zip(self.experts(), own, strict=True):
            for name in ("gate_up_proj", "down_proj"):
                expected = part.layer.mlp.experts.dense_weight(name)
                assert_bitwise(theirs.dsv4_experts.dense_weight(name), expected, name)


def loaded(tmp_path_factory, method, write):
    """Write a checkpoint and load it with all parts of this package."""
    folder = tmp_path_factory.mktemp("draft")
    environment = {"DSV4_VLLM": "all", "DSV4_CACHE_DIR": str(folder / "cache")}
    with mock.patch.dict("os.environ", environment):
        made = Loaded(folder / "model", method, write)
        made.saved = Report.read(path_of_stage(DRAFT, 1))
    return made


def written(method, layout):
    """A function that writes a checkpoint with a draft."""
    *_, sizes = BUILT[method]
    return lambda folder: build.checkpoint(folder, layout, mtp=True, **sizes)


@pytest.fixture(scope="module")
def mtp(tmp_path_factory):
    return loaded(tmp_path_factory, "mtp", written("mtp", "deepseek"))


@pytest.fixture(scope="module")
def dspark(tmp_path_factory):
    made = loaded(tmp_path_factory, "dspark", written("dspark", "deepseek"))
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
    """How often each kernel is in a report in which everything that is asked for is replaced."""
    assert report.complete
    names = [row.kernel for row in report.rows if row.asked]
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


def ignoring(patterns, write):
    """A function that writes a checkpoint whose config.json leaves out of NVFP4 what they name."""

    def write_and_edit(folder):
        sizes = write(folder)
        values = json.loads((folder / "config.json").read_text())
        values["quantization_config"]["ignore"] = patterns
        (folder / "config.json").write_text(json.dumps(values))
        return sizes

    return write_and_edit


@pytest.mark.parametrize("method", list(BUILT))
@pytest.mark.parametrize("ignored", [True, False])
def test_mxfp4_experts_beside_nvfp4_ones(tmp_path_factory, method, ignored):
    """vLLM builds MXFP4 experts where config.json ignores ``mtp.*``, as NVIDIA's does."""
    write = written(method, "nvidia")
    made = loaded(tmp_path_factory, method, write if ignored else ignoring([], write))
    assert set(made.built) == {MXFP4 if ignored else NVFP4}
    assert made.saved.complete
    made.assert_own_experts()


@pytest.mark.parametrize("layout", ["nvidia", "deepseek"])
@pytest.mark.parametrize("method", list(BUILT))
def test_the_draft_of_compare_is_loaded_as_a_gpu_builds_it(tmp_path_factory, method, layout):
    """Checkpoints of examples/vllm/compare.py in small."""

    def write(folder):
        config = build.small_config(**BUILT[method][2])
        compare_weights.random_checkpoint(folder, config, "cpu", layout)
        return config

    compare_weights = compare_process.load("compare_weights")
    made = loaded(tmp_path_factory, method, write)
    assert set(made.built) == {MXFP4}
    assert made.saved.complete
    made.assert_own_experts()


def nvfp4_drafts(folder):
    """Write a checkpoint of NVIDIA's layout whose draft has experts in NVFP4, too."""
    *_, sizes = BUILT["mtp"]
    config = build.checkpoint(folder, "nvidia", mtp=True, **sizes)
    model = dsv4.load(folder, device="cpu", dtype=torch.bfloat16, progress=False, mtp=True)
    experts = model.mtp[0].layer.mlp.experts
    experts.to_format(NVFP4)
    for number in range(experts.num_local_experts):
        shapes = [(experts.intermediate_dim, experts.hidden_dim)] * 2
        shapes.append((experts.hidden_dim, experts.intermediate_dim))
        matrices = (quantize(normal(*shape, seed=number), NVFP4) for shape in shapes)
        experts.set_expert(number, *matrices)
    dsv4.save(model, folder, layout="nvidia", overwrite=True)
    return config


def test_nvfp4_drafts_need_layers_for_them(tmp_path_factory):
    with pytest.raises(ValueError, match=r"mtp\.0\.ffn\.experts.* wanted MXFP4 \(int8 weight"):
        loaded(tmp_path_factory, "mtp", ignoring(["mtp.*"], nvfp4_drafts))
    made = loaded(tmp_path_factory, "mtp", nvfp4_drafts)  # ``save`` names no such experts there
    assert made.built == [NVFP4]
    made.assert_own_experts()


EXPERT = "mtp.{}.ffn.experts.3."
MATRICES = ("w1", "w2", "w3")
OTHERS = [("mtp.0.norm.weight", torch.ones(3)), ("layers.0.x.scale", torch.zeros(2))]


def mxfp4(rows, seed, spread=2):
    """An MXFP4 matrix as files store it: codes and exponents."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (rows, 64), generator=generator, dtype=torch.int8)
    exponents = torch.randint(120, 121 + spread, (rows, 4), generator=generator)
    return codes, exponents.to(torch.uint8).view(torch.float8_e8m0fnu)


def mxfp4_expert(layer, spread=2):
    """An expert's tensors by name."""
    stored = {}
    for number, matrix in enumerate(MATRICES):
        codes, scales = mxfp4(8, number, spread)
        name = EXPERT.format(layer) + matrix
        stored |= {f"{name}.weight": codes, f"{name}.scale": scales}
    return stored


def nvfp4_expert(layer):
    """An expert's tensors by name, as NVIDIA stores those of main layers."""
    stored = {}
    for matrix in MATRICES:
        name, value = EXPERT.format(layer) + matrix, quantize(normal(8, 128), NVFP4)
        stored |= {f"{name}.weight": value.codes, f"{name}.weight_scale": value.scales}
        stored[f"{name}.weight_scale_2"] = value.global_scale.reshape(())
        stored[f"{name}.input_scale"] = torch.tensor(0.5)
    return stored


def draft_of(*formats):
    """A draft whose layers have experts that vLLM built in these formats."""
    algorithms = ["NVFP4" if format == NVFP4 else "" for format in formats]
    built = [build.experts_layer(4, 2, 128, 64, moe_quant_algo=name) for name in algorithms]
    return torch.nn.ModuleList(built)


def assert_the_same(converted, weights):
    """The tensors themselves are yielded, in their order."""
    for (name, tensor), (expected, stored) in zip(converted, weights, strict=True):
        assert name == expected
        assert tensor is stored


@given(
    order=st.permutations(range(6)),
    spread=st.sampled_from([0, 2, 30]),
    before=st.lists(st.sampled_from([MXFP4, NVFP4]), max_size=2),
)
def test_tensors_of_experts_come_in_any_order(order, spread, before):
    """A pair shares a global scale; what NVFP4 has no scale for is rounded to its nearest value."""
    stored = mxfp4_expert(len(before), spread)
    names = [list(stored)[i] for i in order]
    weights = [OTHERS[0], *((name, stored[name]) for name in names), OTHERS[1]]
    model = draft_of(*before, NVFP4)
    converted = dict(draft_experts.as_built(model, weights))
    assert len(converted) == 2 + 9
    assert all(converted[name] is tensor for name, tensor in OTHERS)
    expert = EXPERT.format(len(before))
    scales = {m: converted[f"{expert}{m}.weight_scale_2"] for m in MATRICES}
    assert scales["w1"] == scales["w3"]
    for matrix in scales:
        codes, exponents = stored[f"{expert}{matrix}.weight"], stored[f"{expert}{matrix}.scale"]
        before = QuantizedTensor(codes.view(torch.uint8), exponents, None, MXFP4)
        parts = [converted[f"{expert}{matrix}.{part}"] for part in ("weight", "weight_scale")]
        after = dequantize(QuantizedTensor(*parts, scales[matrix].reshape(1), NVFP4), torch.float32)
        expected = dequantize(before, torch.float32)
        if spread < 18:
            assert_bitwise(after, expected)
        else:
            assert (after - expected).abs().max() <= expected.abs().max() * 2.0**-17
    assert_the_same(draft_experts.as_built(model, converted.items()), converted.items())


@given(order=st.permutations(range(6)), spread=st.sampled_from([2, 30]), data=st.data())
def test_tensors_that_fit_their_layer_stay(order, spread, data):
    """MXFP4 in MXFP4 layers, NVFP4 in NVFP4 layers, and those of layers that are not built."""
    formats = data.draw(st.lists(st.sampled_from([MXFP4, NVFP4]), min_size=1, max_size=3))
    weights = list(OTHERS)
    for layer, format in enumerate(formats):
        expert = mxfp4_expert(layer, spread) if format == MXFP4 else nvfp4_expert(layer)
        weights += [list(expert.items())[i] for i in order]
    weights += [*mxfp4_expert(len(formats)).items(), *nvfp4_expert(len(formats)).items()]
    assert_the_same(draft_experts.as_built(draft_of(*formats), weights), weights)


@given(order=st.permutations(range(12)), before=st.sampled_from([(), (NVFP4,), (MXFP4, NVFP4)]))
def test_nvfp4_experts_for_an_mxfp4_layer_are_refused(order, before):
    """At the first tensor that MXFP4 does not have, whichever it is."""
    weights = [list(nvfp4_expert(len(before)).items())[i] for i in order]
    model, taken = draft_of(*before, MXFP4), []
    with pytest.raises(ValueError, match="wanted MXFP4") as error:
        taken.extend(name for name, _ in draft_experts.as_built(model, weights))
    first = next(name for name, _ in weights if not name.endswith(".weight"))
    assert str(error.value).startswith(f"{first} is a tensor of NVFP4 experts")
    assert [name for name, _ in weights[: len(taken) + 1]] == [*taken, first]


@given(lost=st.integers(0, 5), unsigned=st.booleans())
def test_a_part_of_an_mxfp4_expert_is_refused(lost, unsigned):
    """vLLM would take the rest for NVFP4; also codes of a dtype that files do not have."""
    stored = mxfp4_expert(0)
    name = list(stored)[lost]
    if unsigned and name.endswith(".weight"):
        stored[name] = stored[name].view(torch.uint8)
    else:
        del stored[name]
    together = draft_experts._TOGETHER[name.split(".")[5]]
    with pytest.raises(ValueError, match="whose other tensors are missing") as error:
        list(draft_experts.as_built(draft_of(NVFP4), stored.items()))
    assert str(error.value).split(".")[5] in together


def test_formats_of_layers_with_other_experts_are_unknown():
    layer = build.experts_layer(4, 2, 128, 64)
    del layer.w13_weight_scale
    assert draft_experts.built_format(layer) is None
    layer = build.experts_layer(4, 2, 128, 64, moe_quant_algo="")
    layer.w13_weight.data = layer.w13_weight.data.view(torch.float8_e4m3fn)  # MXFP8 of others
    assert draft_experts.built_format(layer) is None


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


def test_kernels_of_steps_of_a_draft_are_launched_and_not_listed(mtp, monkeypatch):
    """Those of its layers are the main model's, which has compiled them."""
    called = []
    monkeypatch.setattr(deepseek, "warm_replaced", lambda *_, **options: called.append(options))
    monkeypatch.setattr(deepseek, "publish", lambda *_, **options: called.append(options))
    mtp.model.process_weights_after_loading()
    assert called == [{"draft": True}, {"draft": True}]
    assert {type(part).__name__ for part in warm.self_warming(mtp.model)} >= {"DecoderLayer"}
