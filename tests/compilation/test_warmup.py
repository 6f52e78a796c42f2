"""Warming up: which kernels, compiled once, loaded where, and what is said meanwhile."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import time

import pytest
import torch
from torch import nn

import dsv4
from dsv4 import device as machine
from dsv4 import layers
from dsv4.compilation import kernel_calls as _kernel_calls
from dsv4.compilation import meta_model, pool, progress_line
from dsv4.compilation import warmup as _warmup
from dsv4.compilation.kernel_calls import (
    Attention,
    Fp8Gemm,
    GroupedGemm,
    PackedGemm,
    attentions,
    fp8_gemms,
    grouped_gemms,
    kernel_plans,
    packed_gemms,
)
from dsv4.cute import attention as cute_attention
from dsv4.cute import gemm as cute_gemm
from dsv4.cute import grouped_gemm as cute_grouped
from dsv4.cute.grouped_problem import Experts
from dsv4.cute.runtime import cubin_cache
from dsv4.cute.runtime.driver import Image
from dsv4.cute.sm90 import indexer_logits_plan
from dsv4.cute.sm100 import grouped_gemm_plan
from dsv4.cute.sm100 import plans as blackwell
from dsv4.integrations._swap import OutputHead
from dsv4.parallel.context import DATA, Ranks
from dsv4.parallel.emulated import emulated_rank
from dsv4.parallel.local_model import local_model
from dsv4.quant.formats import FRAGMENTS, SWIZZLED
from dsv4.testing.models import random_model

# Every matrix is a whole number of tiles.
WHOLE = {
    "hidden_size": 128,
    "q_lora_rank": 64,
    "moe_intermediate_size": 64,
    "o_lora_rank": 32,
    "num_nextn_predict_layers": 1,
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def no_steps(monkeypatch):
    """Triton's kernels are another file's."""
    monkeypatch.setattr(_warmup._launch_recorder, "impossible", lambda: "not here")


@pytest.fixture
def compiled(monkeypatch):
    """Kernels are not compiled, but listed here."""
    made = []
    monkeypatch.setattr(pool, "can_start", lambda: False)

    def compile_image(plan, arch):
        made.append((plan, arch))
        return Image(b"code", "name", plan.threads, plan.ctas, plan.shared_bytes)

    monkeypatch.setattr(cubin_cache, "compile_image", compile_image)
    return made


def launched(model, monkeypatch, packed=FRAGMENTS):
    """The products with packed weights of one run of everything the model can do."""
    result = []

    def recording(name):
        module = importlib.import_module(f"dsv4.ops.{name}")
        run, swiglu = getattr(module, f"_{name}"), name == "gemm_swiglu"

        def record(args, backend, **options):
            if args.layout == packed:
                groups = 1 if swiglu else args.groups
                shape = (args.codes.shape[0], args.codes.shape[1] * 2, groups)
                kind = (args.activation, args.out_dtype, swiglu, args.layout)
                result.append(PackedGemm(*shape, *kind))
            return run(args, backend, **options)

        monkeypatch.setattr(module, f"_{name}", record)

    recording("gemm")
    recording("gemm_swiglu")
    run_everything(model)
    return result


def run_everything(model):
    with torch.inference_mode():
        model.generate([list(range(1, 20))], 2, stop_ids=())
        ids = torch.arange(1, 20).unsqueeze(0)
        _, streams = model.model(ids)
        model.draft(ids, streams)


def launched_of_experts(model, top_k, monkeypatch):
    """The same of packed experts."""
    plain = importlib.import_module("dsv4.ops.grouped_gemm")
    fused = importlib.import_module("dsv4.ops.grouped_gemm_swiglu")
    result = []

    def recording(module, name):
        run = getattr(module, name)

        def record(args, *rest):
            swiglu, quantized = "swiglu" in name, "quantize" in name
            experts, rows, half = args.weight.shape
            scaled = args.activation == "nvfp4" or args.row_scale is not None
            weighed = swiglu and args.row_weight is not None
            float32 = not quantized and args.out_dtype == torch.float32
            kind = (float32, scaled, swiglu, weighed, quantized)
            sizes = Experts(rows, 2 * half, experts, *kind)
            result.append(GroupedGemm(sizes, top_k, args.layout))
            return run(args, *rest)

        monkeypatch.setattr(module, name, record)

    recording(plain, "_grouped_gemm")
    recording(fused, "_grouped_gemm_swiglu")
    recording(fused, "_grouped_gemm_swiglu_quantize")
    run_everything(model)
    return result


@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
@pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
def test_the_products_are_those_that_the_model_runs(numerics, activation, monkeypatch):
    config = dsv4.ModelConfig.tiny(numerics=numerics, activation=activation, **WHOLE)
    model = random_model(config, 0, mtp=True).to(torch.bfloat16)
    layers.quantize_(model, names=_plain_names(model))
    result = packed_gemms(model)
    assert layers.pack_(model).joined
    assert set(result) == set(packed_gemms(model)) == set(launched(model, monkeypatch))
    assert len(result) == len(set(result))
    assert {p.activation for p in result} >= {activation}
    assert {p.groups for p in result} == {1, config.o_groups}
    assert [p.rows for p in result if p.swiglu] == [2 * config.moe_intermediate_size]


@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
@pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
@pytest.mark.parametrize("calibrated", [False, True])
def test_so_are_those_of_experts(numerics, activation, calibrated, monkeypatch):
    config = dsv4.ModelConfig.tiny(numerics=numerics, activation=activation, **WHOLE)
    model = random_model(config, 0, mtp=True).to(torch.bfloat16)
    assert grouped_gemms(model) == [], "plain"
    layers.quantize_(model, names=["*.experts"])
    if calibrated:
        with layers.calibrate(model):
            run_everything(model)
    result = grouped_gemms(model)
    assert len(layers.pack_(model).packed) == config.total_layers
    assert result == grouped_gemms(model)
    launched = launched_of_experts(model, config.num_experts_per_tok, monkeypatch)
    assert set(result) == set(launched)
    assert len(result) == 2
    assert result[0].experts.quantized_out == (calibrated and activation == "nvfp4")
    of_config = grouped_gemms(config)
    assert set(result) <= set(of_config)
    assert len(of_config) == (3 if activation == "nvfp4" else 2), "scales may come or not"


def test_on_blackwell_quantised_activations_have_swizzled_weights(monkeypatch):
    """Kernels before packing and after, and of launches; others are not compiled there."""
    config = dsv4.ModelConfig.tiny(activation="nvfp4", **{**WHOLE, "q_lora_rank": 128})
    model = random_model(config, 0, mtp=True).to(torch.bfloat16)
    layers.quantize_(model, names=[*_plain_names(model), "*.experts"])
    with layers.calibrate(model):
        run_everything(model)
    result, experts = packed_gemms(model, "sm_100a"), grouped_gemms(model, "sm_100a")
    assert {p.layout for p in (*result, *experts)} == {FRAGMENTS, SWIZZLED}
    assert any(p.swiglu for p in result)
    layers.pack_(model, SWIZZLED)
    assert set(result) == set(packed_gemms(model, "sm_100a"))
    assert experts == grouped_gemms(model, "sm_100a")
    with monkeypatch.context() as patch:
        ran = launched(model, patch, SWIZZLED)
    assert {p for p in result if p.layout == SWIZZLED} == set(ran)
    assert set(experts) == set(launched_of_experts(model, config.num_experts_per_tok, monkeypatch))
    assert all(p.layout == SWIZZLED for p in experts)
    assert kernel_plans(experts, 64, "sm_90a") == []
    assert all(plan.quantized_out for plan in experts[0].plans(64, "sm_100a"))


def test_of_blackwells_products_every_configuration_is_compiled():
    config = meta_model.of_each_kind(dsv4.ModelConfig.flash().replace(activation="nvfp4"))
    dense = [p for p in packed_gemms(config, "sm_103a") if p.layout == SWIZZLED]
    assert {p.groups for p in dense} == {1, config.o_groups}
    for p in dense:
        problem = blackwell.GemmProblem(p.rows, p.columns, p.groups, False, p.swiglu)
        problem = problem._replace(float32_out=p.out_dtype == torch.float32)
        assert p.plans(300, "sm_103a") == blackwell.plans(problem, 300)
    experts = grouped_gemms(config, "sm_103a")
    kinds = [(p.experts.swiglu, p.experts.quantized_out) for p in experts]
    assert kinds == [(True, False), (False, False), (True, True)], "scales may come or not"
    for p in experts:
        assert p.plans(300, "sm_103a") == grouped_gemm_plan.plans(p.experts, 300 * 6)


def test_ranks_that_draft_by_dspark_have_its_products():
    """No other layer has the kernels of ``main_proj``; ranks with own tokens draft nothing."""
    draft = dsv4.config.DSparkConfig(
        block_size=5, noise_token_id=0, target_layer_ids=(0, 1, 2), markov_rank=256
    )
    config = meta_model.of_each_kind(dsv4.ModelConfig.flash()).replace(
        num_nextn_predict_layers=0, dspark=draft
    )
    projection = (config.hidden_size, 3 * config.hidden_size)
    for ranks, has_draft in ((Ranks(), True), (Ranks(2), True), (Ranks(2, DATA), False)):
        shapes = {(p.rows, p.columns) for p in packed_gemms(config, ranks=ranks)}
        assert (projection in shapes) == has_draft


def test_experts_in_host_memory_have_those_of_all_experts():
    """Steps in slots and waves are multiplied as if all experts were there."""
    config = dsv4.ModelConfig.tiny(**WHOLE)
    model = random_model(config, 0, mtp=True).to(torch.bfloat16)
    layers.quantize_(model, names=["*.experts"])
    layers.pack_(model)
    result = grouped_gemms(model)
    slots = config.num_experts_per_tok
    layers.host_experts_(model, layers.HostExperts(1, slots))
    assert result
    assert set(grouped_gemms(model)) == set(result)


def test_experts_that_cannot_be_packed_need_no_kernel():
    config = dsv4.ModelConfig.tiny(moe_intermediate_size=32)
    experts = layers.DeepseekV4Experts(config).requires_grad_(False)
    experts.quantize()
    assert grouped_gemms(experts) == grouped_gemms(config) == []
    model = random_model(dsv4.ModelConfig.tiny(**WHOLE), 0)
    layers.quantize_(model, names=["*.experts"])
    assert grouped_gemms(model) == [], "float32"


def test_kernels_of_experts_are_for_every_choice_of_every_token():
    config = dsv4.ModelConfig.flash()
    first, second = (p.experts for p in grouped_gemms(config))
    assert first == Experts(4096, 4096, 256, False, False, True, True)
    assert second == Experts(4096, 2048, 256, False, False)
    for tokens in (1, 64, 8192):
        expected = [*cute_grouped.plans(first, 6 * tokens), *cute_grouped.plans(second, 6 * tokens)]
        assert kernel_plans(grouped_gemms(config), tokens) == expected
    w4a4 = grouped_gemms(config.replace(activation="nvfp4", numerics="transformers"))
    assert w4a4[0].experts == Experts(4096, 4096, 256, False, True, True, False)
    assert w4a4[1].experts == Experts(4096, 2048, 256, False, True)
    assert w4a4[2].experts == w4a4[0].experts._replace(quantized_out=True)


@pytest.mark.parametrize("ranks", [2, 8])
def test_experts_of_ranks_with_tokens_of_their_own_get_those_of_all(ranks):
    """Of a configuration and of a rank's model: at most 8192 rows at once."""
    config = dsv4.ModelConfig.tiny(**WHOLE, n_routed_experts=8)
    shared = Ranks(ranks, DATA)
    calls = grouped_gemms(config, ranks=shared)
    assert {call.experts.experts for call in calls} == {8 // ranks}
    model = random_model(config, 0).to(torch.bfloat16)
    layers.quantize_(model, names=["*.experts"])
    local = local_model(model, emulated_rank(shared, config, with_mailboxes=False))
    assert set(grouped_gemms(local)) == set(calls)
    for tokens, rows in ((1, ranks), (40, 40 * ranks), (8192, 8192)):
        expected = [plan for c in calls for plan in cute_grouped.plans(c.experts, rows * c.top_k)]
        assert kernel_plans(calls, tokens) == list(dict.fromkeys(expected))
    whole = packed_gemms(config)
    assert set(packed_gemms(config, ranks=shared)) == set(whole), "everything else is whole"


def test_kernels_of_experts_are_compiled_too(compiled):
    config = dsv4.ModelConfig.tiny(**WHOLE)
    done = dsv4.warmup(config, arch="sm_90a", max_tokens=64, progress=False)
    dense, grouped = (kernel_plans(result(config), 64) for result in (packed_gemms, grouped_gemms))
    assert grouped
    assert done.kernels == len(dense) + len(grouped)
    assert len(compiled) == done.kernels
    assert set(compiled) == {(plan, "sm_90a") for plan in [*dense, *grouped]}


HEADS = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 64}


class TestIndexer:
    def test_the_published_models_have_it(self):
        plans = indexer_logits_plan.plans()
        assert len(plans) == len(set(plans)) == 18  # selections also give slots
        for config in (dsv4.ModelConfig.flash(), dsv4.ModelConfig.pro()):
            assert _kernel_calls.indexers(config) == [_kernel_calls.Indexer()]
            result = kernel_plans(_kernel_calls.every_call(config), 64)
            assert [plan for plan in result if plan in plans] == plans
            for arch in ("sm_100a", "sm_103a"):
                assert not set(plans) & set(
                    kernel_plans(_kernel_calls.every_call(config), 64, arch)
                )

    def test_other_sizes_have_none(self):
        assert _kernel_calls.indexers(dsv4.ModelConfig.tiny(**HEADS)) == []


class TestAttention:
    def test_the_published_models_have_it(self):
        flash, pro = dsv4.ModelConfig.flash(), dsv4.ModelConfig.pro()
        assert attentions(flash) == [Attention(64)]
        assert attentions(pro) == [Attention(128)]
        plans = cute_attention.plans()
        assert len(plans) == len(set(plans)) == 17
        for config in (flash, pro):
            result = kernel_plans(_kernel_calls.every_call(config), 64)
            assert [plan for plan in result if plan in plans] == plans

    @pytest.mark.parametrize("heads", [8, 16, 17, 64, 128])
    def test_it_is_taken_for_one_token(self, heads):
        assert Attention(heads).plans(1) == cute_attention.plans()

    def test_blackwell_has_none(self):
        config = dsv4.ModelConfig.flash()
        plans = set(cute_attention.plans())
        for arch in ("sm_100a", "sm_103a"):
            assert not plans & set(kernel_plans(_kernel_calls.every_call(config), 8192, arch))

    def test_other_entries_and_other_sizes_have_none(self):
        config = dsv4.ModelConfig.tiny(**HEADS)
        assert attentions(config) == [Attention(config.num_attention_heads)]
        assert attentions(config.replace(numerics="transformers")) == []
        assert attentions(dsv4.ModelConfig.tiny(**{**HEADS, "head_dim": 256})) == []
        assert attentions(dsv4.ModelConfig.tiny(**{**HEADS, "qk_rope_head_dim": 32})) == []

    def test_of_a_model_and_of_a_layer(self):
        config = dsv4.ModelConfig.tiny(**HEADS, num_hidden_layers=2)
        with torch.device("meta"):
            model = dsv4.DeepseekV4ForCausalLM(config)
        assert attentions(model) == [], "float32"
        assert attentions(model.to(torch.bfloat16)) == [Attention(config.num_attention_heads)]
        assert attentions(model.model.layers[0]) == attentions(model)
        assert attentions(layers.Linear(64, 32)) == []

    def test_a_module_that_is_not_this_package_s_names_it(self, compiled):
        """As a model of vLLM does: one call compiles its layers' kernels and these."""
        model = layers.Linear(128, 64).to(torch.bfloat16)
        options = {"others": [Attention(64)], "progress": False}
        done, _ = _warmup.compile_model(model, "sm_90a", 64, **options)
        own = kernel_plans(packed_gemms(model), 64)
        assert {plan for plan, _ in compiled} == {*own, *cute_attention.plans()}
        assert done.kernels == len(compiled)

    def test_its_kernels_are_compiled_with_the_others(self, compiled):
        config = dsv4.ModelConfig.tiny(**HEADS)
        done = dsv4.warmup(config, arch="sm_90a", max_tokens=64, progress=False)
        dense = kernel_plans([*packed_gemms(config), *grouped_gemms(config)], 64)
        assert done.kernels == done.compiled == len(dense) + 17
        assert {plan for plan, _ in compiled} == {*dense, *cute_attention.plans()}


def _plain_names(model):
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, layers.Linear) and module.format is None
    ]


def test_a_configuration_is_a_model_with_every_layer_in_nvfp4():
    config = dsv4.ModelConfig.tiny(**WHOLE)
    model = random_model(config, 0, mtp=True).to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, layers.Linear):
            module.to_format("nvfp4")
    assert set(packed_gemms(config)) == set(packed_gemms(model))


def test_every_kind_of_gemm_is_found():
    result = packed_gemms(dsv4.ModelConfig.flash())
    bfloat16, float32 = torch.bfloat16, torch.float32
    assert PackedGemm(32768, 1024, 1, "bf16", bfloat16) in result
    assert PackedGemm(8192, 4096, 8, "bf16", bfloat16) in result, "groups"
    assert PackedGemm(1024 + 512, 4096, 1, "bf16", bfloat16) in result, "joined"
    assert PackedGemm(2 * 2048, 4096, 1, "bf16", bfloat16, True) in result, (
        "gate and up interleaved"
    )
    assert PackedGemm(1024, 4096, 1, "bf16", float32) in result, (
        "the compressor computes in float32"
    )
    assert PackedGemm(129280, 4096, 1, "bf16", float32) in result, "logits"
    w4a4 = packed_gemms(dsv4.ModelConfig.flash().replace(activation="nvfp4"))
    assert PackedGemm(32768, 1024, 1, "nvfp4", bfloat16) in w4a4


@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
def test_fp8_gemms_are_those_that_the_model_runs(numerics, monkeypatch):
    config = dsv4.ModelConfig.tiny(**WHOLE).replace(numerics=numerics)
    model = random_model(config, 0, mtp=True).to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, layers.Linear):
            module.quantize("fp8_block")
    module, result = importlib.import_module("dsv4.ops.gemm"), []
    run = module._gemm

    def record(args, backend, **options):
        assert args.format == "fp8_block"
        kind = (args.groups, args.activation, args.out_dtype, args.scales.dtype)
        result.append(Fp8Gemm(*args.codes.shape, *kind))
        return run(args, backend, **options)

    monkeypatch.setattr(module, "_gemm", record)
    run_everything(model)
    assert set(result) == set(fp8_gemms(model))
    assert packed_gemms(model) == []


def test_fp8_kernels_are_hoppers_and_of_whole_blocks(compiled):
    layer = layers.Linear(256, 160).to(torch.bfloat16)
    layer.to_format("fp8_block")
    [product] = fp8_gemms(layer)
    plans = product.plans(300)
    assert plans == list(dict.fromkeys(plans))
    assert product.plans(300, "sm_100a") == []
    assert dataclasses.replace(product, columns=192).plans(300) == []
    dsv4.warmup(layer, arch="sm_90a", max_tokens=300, progress=False)
    assert [plan for plan, _ in compiled] == plans
    assert fp8_gemms(dsv4.ModelConfig.flash()) == []


def test_what_is_not_packed_needs_no_kernel():
    config = dsv4.ModelConfig.tiny(**WHOLE)
    assert packed_gemms(layers.DeepseekV4MLP(config)) == [], "plain"
    mlp = layers.DeepseekV4MLP(dsv4.ModelConfig.tiny())
    layers.quantize_(mlp)
    assert [p.columns for p in packed_gemms(mlp)] == [64], "down has 32 columns"
    model = random_model(config, 0)
    layers.quantize_(model, names=_plain_names(model))
    assert model.dtype == torch.float32
    assert packed_gemms(model) == []


def test_layers_that_quantise_differently_are_not_joined():
    mlp = layers.DeepseekV4MLP(dsv4.ModelConfig.tiny(**WHOLE))
    layers.quantize_(mlp)
    assert [(p.rows, p.swiglu) for p in packed_gemms(mlp)] == [(128, True), (128, False)]
    mlp.up_proj.activation = "nvfp4"
    assert {(p.rows, p.activation) for p in packed_gemms(mlp)} == {
        (64, "bf16"),
        (64, "nvfp4"),
        (128, "bf16"),
    }


def test_one_layer_is_a_model():
    layer = layers.Linear(64, 32)
    layers.quantize_(nn.ModuleList([layer]))
    assert packed_gemms(layer) == [PackedGemm(32, 64, 1, "bf16", torch.bfloat16)]
    head = OutputHead(64, 32)
    layers.quantize_(nn.ModuleList([head]))
    assert packed_gemms(head) == [PackedGemm(32, 64, 1, "bf16", torch.float32)]


@pytest.mark.parametrize(("most", "kinds"), [(1, 1), (8, 1), (9, 2), (64, 4)])
def test_as_many_tokens_as_are_asked_for(most, kinds):
    plans = kernel_plans([PackedGemm(6144, 7168, 1, "nvfp4", torch.float32)], most)
    assert len(plans) == kinds
    assert all(plan.row_scaled and plan.float32_out for plan in plans)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_plans_are_those_of_the_product(arch, monkeypatch):
    """The kernels of a GEMM for every token count, with groups, dtypes and SwiGLU."""
    taken = []

    class StopError(Exception):
        pass

    def kernel(plan, arch):
        taken.append(plan)
        raise StopError

    monkeypatch.setattr(cute_gemm, "loaded", kernel)
    monkeypatch.setattr(cute_gemm, "architecture", lambda index: arch)
    for groups, swiglu in ((2, False), (1, True)):
        taken.clear()
        product = (384, 256, groups, True, True, swiglu)
        for tokens in range(1, 301):
            with pytest.raises(StopError):
                cute_gemm._prepared(product, tokens, 256 * groups, (), 1, 1.0, 0, 0, 0)
        shape = (384, 256, groups, "nvfp4", torch.float32, 300)
        expected = cute_gemm.plans(*shape, swiglu=swiglu, arch=arch)
        assert list(dict.fromkeys(taken)) == expected
        assert {plan.swiglu for plan in taken} == {swiglu}


def test_kernels_are_compiled_once(compiled, folder):
    config = dsv4.ModelConfig.tiny()
    first = dsv4.warmup(config, arch="sm_90a", progress=False)
    plans = kernel_plans(packed_gemms(config), 64)
    assert compiled == [(plan, "sm_90a") for plan in plans]
    assert first.kernels == first.compiled == len(plans) == len(os.listdir(folder)) > 4
    second = dsv4.warmup(config, arch="sm_90a", progress=False)
    assert (second.kernels, second.compiled) == (len(plans), 0)
    assert len(compiled) == len(plans)
    third = dsv4.warmup(config.replace(activation="nvfp4"), arch="sm_90a", progress=False)
    assert 0 < third.compiled < third.kernels


def test_damaged_files_count_as_compiled(folder, compiled):
    config = dsv4.ModelConfig.tiny()
    first = dsv4.warmup(config, arch="sm_90a", progress=False)
    for name in sorted(os.listdir(folder))[:3]:
        (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    again = dsv4.warmup(config, arch="sm_90a", progress=False)
    assert (again.kernels, again.compiled) == (first.kernels, 3)
    assert dsv4.warmup(config, arch="sm_90a", progress=False).compiled == 0


def test_a_second_call_reads_from_disk(folder):
    pytest.importorskip("cutlass")
    layer = layers.Linear(64, 32)
    layers.quantize_(nn.ModuleList([layer]))
    result = dsv4.warmup(layer, arch="sm_90a", max_tokens=8, progress=False)
    assert (result.kernels, result.compiled) == (1, 1)
    start = time.perf_counter()
    again = dsv4.warmup(layer, arch="sm_90a", max_tokens=8, progress=False)
    assert (again.kernels, again.compiled) == (1, 0)
    assert again.seconds <= time.perf_counter() - start < 0.5


def test_without_the_compiler_it_says_so(monkeypatch):
    monkeypatch.setattr(cubin_cache, "compiler", lambda: None)
    with pytest.raises(RuntimeError, match=r"nvidia-cutlass-dsl is not installed.*dsv4\[cute\]"):
        dsv4.warmup(dsv4.ModelConfig.tiny(), arch="sm_90a", progress=False)


class TestDevices:
    @pytest.fixture
    def loaded(self, monkeypatch):
        """A machine with two GPUs; what is loaded, and where."""
        result = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(cute_gemm, "warmup", lambda plans, device: result.append(device))
        with machine.pretend(capability=(9, 0)):
            yield result

    @pytest.fixture(scope="class")
    def kernels(self, tmp_path_factory):
        """A folder where they are compiled once: where they are loaded does not depend on it."""
        return tmp_path_factory.mktemp("kernels")

    @pytest.mark.slow
    @pytest.mark.parametrize(("argument", "index"), [(None, 1), ("cuda", 1), ("cuda:0", 0), (0, 0)])
    def test_kernels_are_loaded(self, argument, index, loaded, kernels, monkeypatch):
        monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, str(kernels))
        first = not any(kernels.iterdir())
        done = dsv4.warmup(dsv4.ModelConfig.tiny(), argument, progress=False)
        assert done.kernels > 0
        assert done.compiled == (done.kernels if first else 0)
        assert loaded == [torch.device("cuda", index)] * done.kernels

    def test_another_gpu_has_no_kernels(self, loaded):
        machine.MACHINE.pretend(capability=(11, 0))
        done = dsv4.warmup(dsv4.ModelConfig.tiny())
        assert (done.kernels, done.compiled, loaded) == (0, 0, [])
        with pytest.raises(ValueError, match="arch is 'sm_90a', but cuda:1 wants none"):
            dsv4.warmup(dsv4.ModelConfig.tiny(), "cuda", "sm_90a")

    def test_an_architecture_alone_loads_nothing(self, loaded, compiled):
        assert dsv4.warmup(dsv4.ModelConfig.tiny(), arch="sm_90a", progress=False).compiled
        assert loaded == []

    def test_no_gpu(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(RuntimeError, match=r"there is no CUDA GPU.*arch='sm_90a'"):
            dsv4.warmup(dsv4.ModelConfig.tiny())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"arch": "sm_75"}, "wanted one of 'sm_80', 'sm_86', .*'sm_90a', .*'sm_121a'$"),
            ({"device": "cpu"}, "device is cpu, wanted a CUDA GPU"),
            ({"arch": "sm_90a", "max_tokens": 0}, "max_tokens is 0, wanted at least 1"),
        ],
    )
    def test_bad_arguments(self, options, message):
        with pytest.raises(ValueError, match=message):
            dsv4.warmup(dsv4.ModelConfig.tiny(), **options)


class TestProgress:
    def run(self, capsys, **options):
        done = dsv4.warmup(dsv4.ModelConfig.tiny(), arch="sm_90a", **options)
        printed = capsys.readouterr()
        assert printed.out == ""
        return done.kernels, printed.err

    def test_silent(self, compiled, capsys):
        assert self.run(capsys, progress=False)[1] == ""

    def test_a_line_without_rich(self, compiled, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "rich", None)
        kernels, printed = self.run(capsys)
        assert printed.startswith(f"kernels {kernels} of {kernels}, ")
        assert printed.count("\n") == 1

    def test_a_line_on_a_terminal(self, capsys):
        line = progress_line.Line()
        line.expect(2)
        line.terminal = True
        line.advance()
        line.advance()
        line.end()
        printed = capsys.readouterr().err
        assert [part.split(",")[0] for part in printed.split("\r")[1:]] == [
            "kernels 1 of 2",
            "kernels 2 of 2",
            "kernels 2 of 2",
        ]

    def test_a_bar_with_rich(self, compiled, capsys):
        pytest.importorskip("rich")
        assert "100%" in self.run(capsys)[1]

    def test_what_fails_ends_the_line(self, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "rich", None)
        monkeypatch.setattr(cubin_cache, "compiler", lambda: None)
        with pytest.raises(RuntimeError):
            self.run(capsys)
        assert capsys.readouterr().err.endswith("s\n")
