"""vLLM's own model for NVIDIA's GPUs, built and loaded on a CPU from checkpoints of each layout."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import dsv4
from dsv4.compilation import kernel_calls
from dsv4.config import ModelConfig
from dsv4.layers._routed_rows import RoutedRows
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear
from dsv4.testing.assertions import assert_bitwise

pytest.importorskip("vllm", reason="vLLM 0.33 is not installed; make test-vllm has it")

from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.models.deepseek_v41.quant_config import DeepseekV4FP8Config

from dsv4.integrations.vllm import (
    compile_kernels,
    deepseek,
    linear,
    places,
    shared_expert,
    switches,
    warm,
)
from dsv4.integrations.vllm.report import Report, path_of_stage
from tests.integrations.vllm import build

pytestmark = pytest.mark.usefixtures("vllm_world")
vllm_quant_method = DeepseekV4FP8Config.get_quant_method
# Names in vLLM's layers, and this package's, whose matrices they are.
LINEARS = {
    "attn.fused_wqa_wkv": ("self_attn.q_a_proj", "self_attn.kv_proj"),
    "attn.wq_b": ("self_attn.q_b_proj",),
    "attn.wo_b": ("self_attn.o_b_proj",),
    "attn.indexer.wq_b": ("self_attn.compressor.indexer.q_b_proj",),
    "ffn.shared_experts.gate_up_proj": (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
    ),
    "ffn.shared_experts.down_proj": ("mlp.shared_experts.down_proj",),
}


class Loaded:
    """vLLM's model with this package's modules, and this package's model, of one checkpoint."""

    def __init__(self, folder, layout):
        self.sizes = build.checkpoint(folder, layout)
        self.config = build.engine_config(folder)
        with build.hopper(self.config):
            self.model = deepseek.DeepseekV4ForCausalLM(vllm_config=self.config)
            build.load_model(self.model, self.config)
        self.own = dsv4.load(
            folder, device="cpu", dtype=torch.bfloat16, progress=False, mxfp4="lossless", mtp=False
        )

    @property
    def layers(self):
        return zip(self.model.model.layers, self.own.model.layers, strict=True)


@pytest.fixture(scope="module", params=["nvidia", "deepseek"])
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    environment = {"DSV4_VLLM": "experts,linear", "DSV4_CACHE_DIR": str(folder / "cache")}
    with mock.patch.dict("os.environ", environment):
        yield Loaded(folder / "model", request.param)


def test_every_linear_has_the_checkpoint_s_values(loaded):
    count = 0
    for theirs, ours in loaded.layers:
        for name, parts in LINEARS.items():
            if name == "attn.indexer.wq_b" and theirs.attn.indexer is None:
                continue
            matrices = [ours.get_submodule(part).dense_weight() for part in parts]
            assert_bitwise(
                theirs.get_submodule(name).dsv4_linear.dense_weight(), torch.cat(matrices)
            )
            count += 1
    assert count == len(LINEARS) * 4 - 2


def test_experts_shared_experts_and_scaling_factor_count_once(loaded):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, loaded.sizes.hidden_size, generator=generator).to(torch.bfloat16)
    ids = torch.rand(5, 8, generator=generator).argsort(-1)[:, :2]
    routing = torch.rand(5, 2, generator=generator)
    for theirs, ours in loaded.layers:
        runner = theirs.ffn.experts
        assert runner.routed_scaling_factor == 1.0
        assert runner.router.routed_scaling_factor == loaded.sizes.routed_scaling_factor
        # A CPU lacks vLLM's operators for routing.
        answer = (routing, ids.int())
        routed = mock.patch.object(runner.router, "_compute_routing", return_value=answer)
        with set_forward_context(None, loaded.config), routed, torch.inference_mode():
            result = theirs.ffn(x, torch.arange(5))
        assert type(runner) is shared_expert.Runner
        shared = theirs.ffn.shared_experts(x)
        assert_bitwise(result, ours.mlp.experts(x, ids, routing, shared))


def test_the_report_names_every_place_and_is_saved(loaded):
    report = loaded.model.dsv4.report
    replaced = [row.place for row in report.rows if row.replaced]
    assert len(replaced) == 2 * 4 + len(LINEARS) * 4 - 2
    assert len(set(replaced)) == len(replaced)
    linears = {
        name
        for name, module in loaded.model.named_modules()
        if isinstance(module, LinearBase | ParallelLMHead)
    }
    assert linears == {row.place for row in report.rows if row.part == "linear"}
    others = [row for row in report.rows if not row.replaced]
    plain = {row.place.rpartition(".")[2] for row in others if "not quantised" in row.reason}
    assert plain == {"gate", "weights_proj", "fused_wkv_wgate", "lm_head"}
    names = {row.place.rpartition(".")[2] for row in others}
    assert names - plain == {"wo_a"}, "the attention alone reads it, which is not asked for"
    assert report.complete
    path = path_of_stage(0, 1)
    assert path.name == "report-0-of-1.json"
    assert Report.read(path) == report
    assert len(json.loads(path.read_text())) == len(report.rows)


def test_one_layer_of_each_kind_runs_before_requests(loaded, monkeypatch):
    layers = list(warm.kinds(loaded.model))
    sizes = {(layer.in_features, layer.out_features) for layer in layers[:-1]}
    assert sizes == {(256, 640), (128, 2048), (256, 256), (128, 256)}
    assert len(layers) == 5
    calls = []
    hooks = [
        layer.register_forward_hook(lambda *call: calls.append((call[1][0].shape[0], call[2])))
        for layer in layers[:-1]
    ]
    summed = []
    combined = RoutedRows.combined
    monkeypatch.setattr(
        RoutedRows, "combined", lambda rows: summed.append((rows.shared, combined(rows)))
    )
    for layer in layers:
        warm.run(layer, 5)
    for hook in hooks:
        hook.remove()
    assert sorted(tokens for tokens, _ in calls) == sorted([*range(1, 6)] * len(hooks))
    assert [len(out) for _, out in summed] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [shared is None for shared, _ in summed] == [True, False] * 5, "as both runners do"
    assert all(not out.float().any() for _, out in calls + summed)
    most = loaded.config.scheduler_config.max_num_batched_tokens
    assert warm.most_tokens(loaded.model.dsv4) == most


def test_kernels_are_listed_by_the_formats_of_the_checkpoint(loaded):
    config = ModelConfig.of(loaded.config.model_config.hf_config)
    own = compile_kernels.same_steps(loaded.model, config, "sm_90a")
    formats = {
        name: layer.format.name
        for name, layer in own.named_modules()
        if isinstance(layer, Linear | DeepseekV4Experts) and layer.format is not None
    }
    linears = {name for name, layer in formats.items() if layer == "fp8_block"}
    assert {name.rpartition(".")[2] for name in linears} == {
        *("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert {name for name, layer in formats.items() if layer == "nvfp4"} == {
        f"model.layers.{i}.mlp.experts" for i in range(own.config.num_hidden_layers)
    }
    calls = kernel_calls.every_call(own)
    kinds = {type(call) for call in calls}
    assert kinds == {
        getattr(kernel_calls, name) for name in ("Fp8Gemm", "GroupedGemm", "Indexer", "Attention")
    }
    assert kernel_calls.fp8_gemms(loaded.model), "of the replaced modules"


@pytest.fixture
def compilations(monkeypatch):
    """The arguments of each compilation, by one pool of processes."""
    done = []

    def compile_once(model, tokens, progress, recipe=None, others=()):
        done.append(SimpleNamespace(model=model, tokens=tokens, recipe=recipe, others=others))

    monkeypatch.setattr(compile_kernels, "warm_loaded", compile_once)
    monkeypatch.setattr(compile_kernels, "capability", lambda device: (9, 0))
    return done


def test_all_kernels_are_compiled_at_once(loaded, compilations):
    """GEMMs are those of the replaced modules; a second list would be compiled afterwards."""
    compile_kernels.compile_replaced(loaded.model, loaded.model.dsv4, 64)
    (asked,) = compilations
    assert asked.model is loaded.model
    assert asked.tokens == 64
    assert {type(call) for call in asked.others} == {kernel_calls.Indexer, kernel_calls.Attention}
    weights = {weight.format for _, weight in asked.recipe.weights}
    assert weights == {"fp8_block", "nvfp4", None}
    sizes = asked.recipe.config
    assert sizes.num_hidden_layers <= loaded.sizes.num_hidden_layers
    assert (sizes.num_nextn_predict_layers, sizes.dspark) == (0, None)


def test_of_a_draft_the_gemms_alone_are_compiled(loaded, compilations):
    compile_kernels.compile_replaced(loaded.model, loaded.model.dsv4, 64, steps=False)
    (asked,) = compilations
    assert asked.model is loaded.model
    assert (asked.recipe, list(asked.others)) == (None, [])


@pytest.mark.parametrize("reason", ["no list", "no GPU of this package"])
def test_without_a_list_the_gemms_are_compiled(loaded, compilations, monkeypatch, caplog, reason):
    def fail(*_):
        raise ValueError("a layer of another kind")

    if reason == "no list":
        monkeypatch.setattr(compile_kernels, "same_steps", fail)
    else:
        monkeypatch.setattr(compile_kernels, "capability", lambda device: (7, 5))
    with caplog.at_level("WARNING"):
        compile_kernels.compile_replaced(loaded.model, loaded.model.dsv4, 64)
    (asked,) = compilations
    assert (asked.recipe, list(asked.others)) == (None, [])
    text = "dsv4's kernels are compiled at their first launch: a layer of another kind"
    assert (text in caplog.text) == (reason == "no list")


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_compile_the_kernels_of_their_sizes_one_after_the_other(loaded, monkeypatch, rank):
    """The first rank's kernels are on disk when the others look for them."""
    done = []
    group = SimpleNamespace(rank_in_group=rank, world_size=2, barrier=lambda: done.append("wait"))
    monkeypatch.setattr(compile_kernels, "get_tp_group", lambda: group)
    monkeypatch.setattr(loaded.config.parallel_config, "tensor_parallel_size", 2)
    monkeypatch.setattr(compile_kernels, "capability", lambda device: (9, 0))
    monkeypatch.setattr(
        compile_kernels, "warm_loaded", lambda *_, recipe, **__: done.append(recipe)
    )
    compile_kernels.compile_replaced(loaded.model, loaded.model.dsv4, 64)
    recipe = done.pop(rank)
    assert done == ["wait"]
    assert recipe.ranks.size == 2
    own = recipe.build("sm_90a")
    heads = {layer.self_attn.sinks.shape[0] for layer in own.model.layers}
    assert heads == {loaded.sizes.num_attention_heads // 2}


def test_a_first_rank_that_fails_leaves_no_other_waiting(loaded, monkeypatch):
    waited = []
    group = SimpleNamespace(rank_in_group=0, world_size=2, barrier=lambda: waited.append(0))
    monkeypatch.setattr(compile_kernels, "get_tp_group", lambda: group)
    monkeypatch.setattr(compile_kernels, "capability", lambda device: (9, 0))
    monkeypatch.setattr(compile_kernels, "warm_loaded", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compile_kernels.compile_replaced(loaded.model, loaded.model.dsv4, 64)
    assert waited == [0]


def test_strict_refuses_what_is_left(tmp_path):
    """Parts that need no other part are all replaced; one matrix that is not is an error."""
    build.checkpoint(tmp_path, "nvidia", num_hidden_layers=1)
    config = build.engine_config(tmp_path)
    environment = {"DSV4_VLLM": "experts,linear", "DSV4_VLLM_STRICT": "1"}
    with mock.patch.dict("os.environ", environment), build.hopper(config):
        model = deepseek.DeepseekV4ForCausalLM(vllm_config=config)
        build.load_model(model, config)
        left = next(row for row in model.dsv4.report.rows if row.place.endswith("wo_a"))
        assert left.reason in str(model.dsv4.report)
        unread = mock.patch.object(linear, "_unread", return_value="nobody reads it")
        config.compilation_config.static_forward_context.clear()
        model = deepseek.DeepseekV4ForCausalLM(vllm_config=config)
        with unread, pytest.raises(RuntimeError, match=r"(?s)not replace everything.*nobody"):
            build.load_model(model, config)


def test_strict_refuses_a_part_with_nothing_to_replace(tmp_path):
    build.checkpoint(tmp_path, "nvidia", num_hidden_layers=1)
    config = build.engine_config(tmp_path)
    environment = {"DSV4_VLLM": "linear", "DSV4_VLLM_STRICT": "1"}
    plain = mock.patch.object(DeepseekV4FP8Config, "get_quant_method", _plain)
    with mock.patch.dict("os.environ", environment), build.hopper(config), plain:
        model = deepseek.DeepseekV4ForCausalLM(vllm_config=config)
        report = model.dsv4.report
        assert report.rows
        assert not report.complete
        with pytest.raises(RuntimeError, match=r"(?s)not replace everything.*no module that this"):
            deepseek.finish(model, model.dsv4)
    assert [row.place for row in report.rows if row.asked] == ["*"]


@contextmanager
def compressed_tensors_kernels():
    """Stand for vLLM's choice of kernels, which a CPU does not have."""
    folder = "vllm.model_executor.layers.quantization.compressed_tensors.schemes"
    with (
        mock.patch(f"{folder}.compressed_tensors_w8a16_fp8.init_wfp8_a16_linear_kernel"),
        mock.patch(f"{folder}.compressed_tensors_w8a8_fp8.init_fp8_linear_kernel"),
    ):
        yield


def _plain(self, layer, prefix):
    """Quantise no linear layer, as if the checkpoint named all of them in ``ignore``."""
    if isinstance(layer, LinearBase):
        return UnquantizedLinearMethod()
    return vllm_quant_method(self, layer, prefix)


@pytest.mark.parametrize("stored", [False, True], ids=["missing", "stored"])
def test_input_scales_may_be_missing(tmp_path, monkeypatch, stored):
    """Scales of inputs change nothing, because inputs stay bfloat16; both designs load."""
    build.checkpoint(tmp_path, "nvidia", num_hidden_layers=1)
    own = dsv4.load(tmp_path, device="cpu", dtype=torch.bfloat16, progress=False, mtp=False)
    matrices = 3 * own.config.n_routed_experts
    assert set_input_scales(tmp_path, 0.125 if stored else None) == matrices
    config = build.engine_config(tmp_path)
    monkeypatch.setenv("DSV4_VLLM", "experts,linear")
    monkeypatch.setenv("DSV4_VLLM_STRICT", "1")
    with build.hopper(config):
        model = deepseek.DeepseekV4ForCausalLM(vllm_config=config)
        build.load_model(model, config)
    assert model.dsv4.report.complete
    theirs = model.model.layers[0].ffn.experts.routed_experts.dsv4_experts
    x = torch.randn(3, theirs.hidden_dim, generator=torch.Generator().manual_seed(2)).bfloat16()
    ids = torch.tensor([[0, 3], [7, 1], [2, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.3, 0.7], [0.9, 0.2], [0.5, 0.5]])
    ours = own.model.layers[0].mlp.experts
    assert_bitwise(theirs(x, ids, weights), ours(x, ids, weights))


def set_input_scales(folder, value):
    """Rewrite a checkpoint with this input scale of each NVFP4 matrix, or None; count those."""
    matrices = 0
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("weight_scale_2")]:
        matrices += 1
        tensors.pop(name.replace("weight_scale_2", "input_scale"), None)
        if value is not None:
            tensors[name.replace("weight_scale_2", "input_scale")] = torch.tensor(value)
    save_file(tensors, path, metadata={"format": "pt"})
    for index in folder.glob("*.index.json"):
        names = json.loads(index.read_text())
        names["weight_map"] = dict.fromkeys(tensors, path.name)
        index.write_text(json.dumps(names))
    return matrices


def test_compressed_tensors_is_refused_in_one_sentence(tmp_path, monkeypatch, caplog):
    """vLLM's own loader then ends at the first name that it does not know."""
    build.checkpoint(tmp_path, "compressed-tensors", num_hidden_layers=1)
    config = build.engine_config(tmp_path)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setenv("DSV4_VLLM", "all")
    monkeypatch.setenv("DSV4_VLLM_STRICT", "1")
    with build.hopper(config), compressed_tensors_kernels():
        with pytest.raises(RuntimeError, match="DSV4_VLLM=model serves them"):
            deepseek.DeepseekV4ForCausalLM(vllm_config=config)
        monkeypatch.setenv("DSV4_VLLM_STRICT", "0")
        config.compilation_config.static_forward_context.clear()
        with caplog.at_level("WARNING", "vllm"):
            model = deepseek.DeepseekV4ForCausalLM(vllm_config=config)
        assert "untouched: vLLM's DeepSeek-V4 does not know the names" in caplog.text
        assert {(row.part, row.place) for row in model.dsv4.report.rows} == {
            (part, "*") for part in switches.PARTS
        }
        with pytest.raises(ValueError, match="no module or parameter named 'lm_lm_head'"):
            build.load_model(model, config)


def test_a_changed_place_of_vllm_leaves_its_part(tmp_path, caplog, monkeypatch):
    changed = places.Place("vllm.model_executor.layers.linear", "LinearBase.forward", "self, y")
    monkeypatch.setattr(places, "LINEAR", (changed,))
    monkeypatch.setenv("DSV4_VLLM", "experts,linear")
    build.checkpoint(tmp_path, "nvidia", num_hidden_layers=1)
    config = build.engine_config(tmp_path)
    with build.hopper(config):
        model = deepseek.DeepseekV4ForCausalLM(vllm_config=config)
    rows = model.dsv4.report.rows
    assert [(row.part, row.place) for row in rows] == [("linear", "*")]
    assert "LinearBase.forward" in rows[0].reason
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path / "config.json"))  # no folder
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level("WARNING", "vllm"), build.hopper(config):
        build.load_model(model, config)
    assert "report was not saved" in caplog.text
