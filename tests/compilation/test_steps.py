"""Launches of a model's steps on a GPU that is not there: every operator finds its kernel."""

from __future__ import annotations

import json
import os
import re
from types import SimpleNamespace

import pytest
import torch

import dsv4
from dsv4 import layers
from dsv4.compilation import draft_steps, kernel_calls, launch_recorder, meta_model, pool
from dsv4.compilation import recipe as recipes
from dsv4.compilation import steps as _steps
from dsv4.compilation.bundle import Compiled
from dsv4.compilation.jobs import CuteJob, FindJob, TritonJob
from dsv4.compilation.launch_recorder import Ran, Steps
from dsv4.compilation.recipe import Recipe
from dsv4.compilation.target import Target
from dsv4.compilation.warmup import Operator
from dsv4.layers._projections import are_merged
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel import mailboxes
from dsv4.parallel.context import Ranks
from dsv4.parallel.emulated import emulated_context
from dsv4.quant.formats import FRAGMENTS, SWIZZLED
from dsv4.testing.models import random_model
from tests._tools import forked

pytest.importorskip("triton")
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
# In a process where kernels are not interpreted. Compiles only if the first argument is true.
SOURCE = """
import json, sys
from dataclasses import replace
from triton.runtime.jit import JITFunction
from dsv4 import ModelConfig, device, dispatch
from dsv4.compilation.recipe import Recipe, Weight
from dsv4.compilation.step_shapes import StepShape
from dsv4.compilation.steps import find_steps
from dsv4.compilation.target import Target
from dsv4.triton.moe_gather_quantize import _gather_quantize_kernel
from dsv4.triton._runtime import kernel_store, launch_options

def recipe_of(config, dense):
    recipe = Recipe.of(config)
    if not dense:
        return recipe
    is_dense = lambda name, weight: weight.format and not name.endswith("experts")
    weights = ((n, Weight(dense) if is_dense(n, w) else w) for n, w in recipe.weights)
    return replace(recipe, weights=tuple(weights))

def static(request):
    position = _gather_quantize_kernel.arg_names.index("STATIC")
    return request.constants[(position,)]

real, points = map(json.loads, sys.argv[1:])
found = {}
for arch, preset, activation in points:
    # A format behind the activation is that of dense weights.
    rounded, _, dense = activation.partition(" ")
    config = getattr(ModelConfig, preset)().replace(activation=rounded)
    def patched():
        return JITFunction.run, launch_options.options, device.MACHINE.pretended, dispatch.Call
    before = patched()
    sizes = ((1, 1), (16, 16), (64, 64), (2048, 1))
    shapes = [StepShape(*n, 65536, form) for n in sizes for form in (None, "plain")]
    steps = find_steps(recipe_of(config, dense).build(arch), Target(arch), 8192, shapes)
    assert before == patched()
    requests = list(steps.requests.values())
    for request in requests:
        assert request.arch == arch
        options = request.options
        assert options["launch_pdl"] or options["enable_fp_fusion"] or arch < "sm_90"
        if real:
            kernel_store.compile_request(request)
    ran = [[*key, sorted(ran.kernels), ran.reasons] for key, ran in steps.ran.items()]
    if (preset, activation, arch) == ("flash", "nvfp4", "sm_100a"):
        both = {static(r) for r in requests if r.name == "_gather_quantize_kernel"}
        assert both == {False, True}, "scales may come or not"
    found["-".join((arch, preset, activation))] = len(requests), ran
print(json.dumps(found))
"""
STEP_OPS = {
    *("hc_pre_norm", "hc_post_pre_norm", "hc_combine_post", "hc_head"),
    *("hc_combine_post_pre_norm", "rms_norm", "head_norm_rope_write_kv"),
    *("window_slots", "sparse_attention", "route_hash", "route_topk"),
    *("moe_sort", "moe_combine", "hc_post", "compress_write", "indexer_queries"),
    *("quantize_index_queries", "compressor_projections"),
    *("indexer_select", "prefix_slots", "fragments", "rope_tables"),
}
PRODUCTS = {"gemm", "gemm_swiglu", "grouped_gemm", "grouped_gemm_swiglu"}


# The same for ranks of a group of four: the first, the last, and a whole model.
RANKS = """
import json
import torch
from dsv4 import ModelConfig
from dsv4.compilation.draft_steps import DraftShape
from dsv4.compilation.recipe import Recipe
from dsv4.compilation.step_shapes import StepShape, step_shapes
from dsv4.compilation.steps import find_steps
from dsv4.compilation.target import Target
from dsv4.layers.pack import join_packed_
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel.context import ParallelContext, Ranks

# 18, the last's first, is no multiple
drafting = ModelConfig.flash().replace(n_routed_experts=24)
config = drafting.replace(num_nextn_predict_layers=0)
shapes = [StepShape(*n, 4096) for n in ((1, 1), (5, 5), (256, 1))]

def found(model, more=()):
    steps = find_steps(model, Target("sm_90a"), 256, [*shapes, *more])
    experts = {
        value
        for request in steps.requests.values() if request.name == "_sort_kernel"
        for value in request.constants.values() if value in (6, 24)
    }
    ran = {f"{op} {name}": sorted(ran.kernels) for (op, name), ran in steps.ran.items()}
    names = sorted({request.name for request in steps.requests.values()})
    return {"keys": sorted(key.hex() for key in steps.requests), "ran": ran, "names": names,
            "experts": sorted(experts)}

def first_and_last(mode):
    recipe = Recipe.of(config, Ranks(4, mode))
    first = recipe.build("sm_90a")
    with torch.device("meta"):
        context = ParallelContext(3, 4, first.parallel.group, mode)
        last = DeepseekV4ForCausalLM(first.config, mtp=False, parallel=context).to(torch.bfloat16)
        for name, weight in recipe.weights:
            weight.declare(last.get_submodule(name), "sm_90a")
        join_packed_(last)
    return {f"{mode} first": found(first), f"{mode} last": found(last)}

result = first_and_last("tp") | first_and_last("dp")
result["whole"] = found(Recipe.of(config).build("sm_90a"))
drafts = [DraftShape(1, 3, 4096), DraftShape(1, 9, 4096, prompt=True)]
result["drafts"] = found(Recipe.of(drafting, Ranks(4)).build("sm_90a"), drafts)

# Of ranks with tokens of their own: sizes of steps between those of the list.
model = Recipe.of(config, Ranks(6, "dp")).build("sm_90a")
target = Target("sm_90a")
listed = find_steps(model, target, 90, step_shapes(90, 64)).requests
for tokens in (22, 43, 86):  # from here on there are more rows than a power of two
    for sequences in (1, tokens):
        shape = StepShape(tokens, sequences, 64)
        others = find_steps(model, target, 90, [shape]).requests
        new = [request.name for key, request in others.items() if key not in listed]
        assert not new, (shape, new)
print(json.dumps(result))
"""

# Steps with drafts of ranks that share a model, at sizes between those of the list.
DRAFTS_OF_RANKS = """
import json
from dataclasses import replace
from dsv4 import ModelConfig
from dsv4.compilation import draft_steps
from dsv4.compilation.draft_steps import DraftShape
from dsv4.compilation.recipe import Recipe
from dsv4.compilation.step_shapes import every_shape
from dsv4.compilation.steps import find_steps
from dsv4.compilation.target import Target
from dsv4.config import CSA, HCA, SLIDING, DSparkConfig
from dsv4.parallel.context import Ranks

mtp = ModelConfig.flash().replace(
    n_routed_experts=24, num_hidden_layers=3, layer_types=(SLIDING, CSA, HCA),
    mlp_layer_types=("hash_moe", "moe", "moe"),
)
draft = DSparkConfig(block_size=5, noise_token_id=0, target_layer_ids=(0, 1, 2), markov_rank=256)
dspark = mtp.replace(num_nextn_predict_layers=0, dspark=draft)
target, most = Target("sm_90a"), 24
between = [
    DraftShape(*n, 64)
    for n in ((1, 1), (1, 4), (1, 8), (3, 3), (3, 8), (5, 4), (7, 3), (12, 2))
]
between += [DraftShape(*n, 64, True) for n in ((1, 7), (1, 23), (3, 21), (9, 24))]
result = {}
for name, config in (("mtp", mtp), ("dspark", dspark)):
    recipe = Recipe.of(config, Ranks(2))
    plain_head = tuple((name, w) for name, w in recipe.weights if name != "lm_head")
    model = replace(recipe, weights=plain_head).build("sm_90a")
    assert model.lm_head.format is None
    assert draft_steps.has_draft(model)
    assert not draft_steps.has_draft(Recipe.of(config, Ranks(2, "dp")).build("sm_90a"))
    listed = find_steps(model, target, most, every_shape(most, 64, True))
    others = find_steps(model, target, most, between)
    new = sorted({r.name for key, r in others.requests.items() if key not in listed.requests})
    names = sorted({request.name for request in listed.requests.values()})
    result[name] = {"new": new, "names": names}
print(json.dumps(result))
"""


@pytest.mark.slow
def test_drafts_of_ranks_launch_nothing_that_is_not_listed():
    for drafts in json.loads(printed(DRAFTS_OF_RANKS)).values():
        assert drafts["new"] == []
        verified = {"_greedy_kernel", "_candidates_kernel", "_emit_kernel", "_distribution_kernel"}
        assert verified | {"_push_kernel"} <= set(drafts["names"])


@pytest.mark.slow
def test_kernels_of_ranks_are_those_of_their_sizes():
    """Every rank launches the same ones, and after the first rank's list none is compiled."""
    ranks = json.loads(printed(RANKS))
    first, own, whole = ranks["tp first"], ranks["dp first"], ranks["whole"]
    for mode, of_first in (("tp", first), ("dp", own)):
        assert of_first["keys"] == ranks[f"{mode} last"]["keys"]
        assert of_first["ran"] == ranks[f"{mode} last"]["ran"]
        assert (of_first["experts"], whole["experts"]) == ([6], [6, 24])  # 6 is also K
    assert "_push_kernel" in first["ran"]["hc_reduce_post_pre_norm push"]
    assert "_push_kernel" in first["ran"]["hc_reduce_post push"]
    assert first["ran"]["all_reduce push"] == ["_push_kernel"]
    # 256 tokens are more than a slot holds, and NCCL sums them.
    assert "_post_kernel" in first["ran"]["hc_reduce_post parts"]
    assert "_push_kernel" not in whole["names"]
    sampler = {"_largest_kernel", "_scores_kernel", "_filter_kernel"}
    assert sampler <= set(whole["names"])
    assert not sampler & set(first["names"])
    # Drafts are verified against all logits.
    assert sampler <= set(ranks["drafts"]["names"])
    assert set(first["keys"]) <= set(ranks["drafts"]["keys"])
    # Ranks with tokens of their own: they exchange these, and sample as one process does.
    exchange = {"send push": ["_receive_kernel", "_send_kernel"]}
    exchange["return push"] = ["_collect_kernel", "_return_kernel"]
    assert {name: own["ran"][f"moe_{name}"] for name in exchange} == exchange
    assert sampler <= set(own["names"])
    assert not any("reduce" in name for name in own["ran"])
    pushed = {name for names in exchange.values() for name in names}
    # Their results come from other ranks, not from rows that are added up here.
    without = {key for key in whole["ran"] if not key.startswith(("moe_", "hc_combine_"))}
    without.add("hc_post triton")
    assert {key for key in own["ran"] if not key.startswith("moe_")} == without
    assert pushed <= set(own["names"])


def traced(points, *, real=False):
    return json.loads(printed(SOURCE, json.dumps(real), json.dumps(points)))


def printed(source, *arguments):
    done = forked.run_source(source, *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def check(name, compiled, ran):
    by_op = {}
    for op, implementation, kernels, reasons in ran:
        by_op.setdefault(op, {})[implementation] = (kernels, reasons)
    blackwell = name.startswith("sm_10") and name.endswith("nvfp4")
    ops = STEP_OPS | PRODUCTS
    if blackwell:
        ops = ops - {"moe_sort"} | {"moe_permute", "moe_gather_quantize"}
    assert set(by_op) - {"quantize_nvfp4", "dequantize"} == ops
    for op in set(by_op) - PRODUCTS:
        assert set(by_op[op]) <= {"triton", "cute"}, op
        assert by_op[op].get("triton", (["cute"],))[0], f"{op} launches nothing"
    if name.startswith("sm_90a"):
        assert {op: list(by_op[op]) for op in PRODUCTS} == {op: ["cute"] for op in PRODUCTS}
    elif blackwell:
        for op in PRODUCTS:
            assert list(by_op[op]) == ["tcgen05"], op
        for op in PRODUCTS - {"grouped_gemm_swiglu"}:
            assert "_nvfp4_row_kernel" in by_op[op]["tcgen05"][0], op
    else:
        assert sorted(by_op["gemm"]) == ["cublas", "cute"]
        assert sorted(by_op["gemm_swiglu"]) == ["cute", "parts"]
        assert "_dequantize_kernel" in by_op["gemm"]["cublas"][0]
        assert {"_dequantize_kernel", "_swiglu_kernel"} <= set(by_op["gemm_swiglu"]["parts"][0])
        assert "wanted at most 64" in by_op["gemm"]["cublas"][1]["cute"]
        assert [list(by_op[op]) for op in sorted(PRODUCTS)[2:]] == [["cute"], ["cute"]]
    quantises = name.endswith("nvfp4") and not blackwell
    assert ("quantize_nvfp4" in by_op) == ("dequantize" in by_op) == quantises
    assert compiled > 40


@pytest.mark.slow
def test_every_operator_of_a_step_has_a_kernel():
    points = [
        ("sm_103a", "flash", "bf16"),
        ("sm_90a", "pro", "nvfp4"),
        ("sm_100a", "flash", "nvfp4"),
    ]
    for name, (compiled, ran) in traced(points).items():
        check(name, compiled, ran)


OTHER_GPUS = ("sm_80", "sm_86", "sm_89", "sm_120a", "sm_121a")
# Activations, then the format of dense weights if it is not NVFP4. The cache's entries are FP8.
FORMATS = ("nvfp4", "fp8", "bf16 fp8_block")


def check_other(compiled, ran):
    """Steps of a GPU without CuTeDSL kernels for all calls: no operator runs on the reference."""
    by_op = {}
    for op, implementation, *_ in ran:
        by_op.setdefault(op, set()).add(implementation)
    assert not {op for op, implementations in by_op.items() if "reference" in implementations}
    assert all(by_op[op] <= {"triton", "cute"} for op in STEP_OPS & set(by_op))
    assert compiled > 40


@pytest.mark.slow
def test_steps_of_other_gpus_have_kernels():
    """Decode and prefill, on GPUs with and without conversions to E4M3."""
    every = [(arch, "flash", formats) for arch in OTHER_GPUS for formats in FORMATS]
    points = every if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else every[::2]
    assert {arch for arch, _, _ in points} == set(OTHER_GPUS)
    assert {formats for _, _, formats in points} == set(FORMATS)
    steps = traced(points)
    assert len(steps) == len(points)
    for compiled, ran in steps.values():
        check_other(compiled, ran)


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["flash", "pro"])
@pytest.mark.parametrize("arch", OTHER_GPUS)
def test_kernels_of_other_gpus_compile(arch, preset):
    for formats in ("nvfp4", "bf16 fp8_block"):
        for compiled, ran in traced([(arch, preset, formats)], real=True).values():
            check_other(compiled, ran)


@pytest.mark.slow
def test_fp8_activations_have_kernels():
    """Codes pass between the experts' GEMMs, whichever kernel multiplies them."""
    [(_, ran)] = traced([("sm_90a", "flash", "fp8")]).values()
    kernels = {(op, name): set(kernel_names) for op, name, kernel_names, _ in ran}
    assert "_fp8_token_kernel" in kernels["quantize_fp8_token", "triton"]
    assert "_gather_fp8_kernel" in kernels["moe_gather_fp8", "triton"]
    assert "_norm_fp8_kernel" in kernels["rms_norm_fp8", "triton"]  # of the queries' input
    implementations = {op: name for op, name, _, _ in ran if "gemm" in op}
    assert {*(PRODUCTS - {"grouped_gemm_swiglu"}), "grouped_gemm_swiglu_fp8"} <= set(
        implementations
    )
    assert "reference" not in implementations.values()


@pytest.mark.skipif(not NIGHTLY, reason="compiles some 300 kernels, for minutes")
@pytest.mark.parametrize("preset", ["flash", "pro"])
def test_they_all_compile(preset):
    for name, (compiled, ran) in traced([("sm_100a", preset, "nvfp4")], real=True).items():
        check(name, compiled, ran)


@pytest.mark.parametrize("layout", [FRAGMENTS, SWIZZLED])
def test_a_model_without_values_is_packed_as_one_with_values(layout):
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "hc_mult": 4, "q_lora_rank": 128}
    activation = "nvfp4" if layout == SWIZZLED else "bf16"
    config = dsv4.ModelConfig.tiny(**sizes, activation=activation).without_draft()
    model = random_model(config, 0, mtp=False).to(torch.bfloat16)
    plain = [n for n, m in model.named_modules() if isinstance(m, layers.Linear) and not m.format]
    layers.quantize_(model, names=[*plain, "*.experts"])
    report = layers.pack_(model, layout)
    assert report.packed
    assert report.joined
    empty = meta_model.packed_model(config, layout)
    assert dict(forms(empty)) == dict(forms(model))
    arch = "sm_100a" if layout == SWIZZLED else "sm_90a"
    published = random_model(config, 0, mtp=False).to(torch.bfloat16)
    layers.quantize_(published, names=[*(n for n in plain if not recipes.is_plain(n)), "*.experts"])
    layers.pack_(published, layout)
    ours, theirs = Recipe.of(config), Recipe.of(published)
    assert ours == theirs, "a list made for one would not be found by the other"
    built = ours.build(arch)
    short = meta_model.packed_model(meta_model.of_each_kind(config), layout)
    actual, expected = (
        {n: f for n, f in forms(made) if not recipes.is_plain(n.rpartition(".")[0])}
        for made in (built, short)
    )
    assert actual == expected


def forms(model):
    for name, module in model.named_modules():
        own = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for part, tensor in (pair for pairs in own for pair in pairs):
            yield f"{name}.{part}", (tuple(tensor.shape), tensor.dtype)


def test_one_layer_of_each_kind():
    config = dsv4.ModelConfig.pro()
    short = meta_model.of_each_kind(config)
    kinds = list(zip(short.layer_types, short.mlp_layer_types, strict=True))
    assert len(kinds) == len(set(kinds)) == short.num_hidden_layers
    assert set(kinds) == set(zip(config.layer_types, config.mlp_layer_types, strict=True))


class TestWarmup:
    @pytest.fixture(autouse=True)
    def nothing_is_compiled(self, monkeypatch, tmp_path):
        monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path))

        monkeypatch.setattr(launch_recorder, "impossible", lambda: None)
        monkeypatch.setattr(pool, "can_start", lambda: False)
        monkeypatch.setattr(CuteJob, "stored", lambda self: b"code")
        monkeypatch.setattr(TritonJob, "stored", lambda job: b"code" if job.key < b"2" else None)
        monkeypatch.setattr(TritonJob, "name", "a kernel")
        monkeypatch.setattr(TritonJob, "file_name", "a kernel")
        monkeypatch.setattr(TritonJob, "run", lambda job: Compiled(job.key, job.name, b"code"))

        def steps(self):
            ran = {
                ("rope", "triton"): Ran(kernels={"_rope_kernel"}),
                ("gemm", "cublas"): Ran({"cute": "too many"}, {"_dequantize_kernel"}),
            }
            requests = {key: SimpleNamespace(key=key, name="k") for key in (b"0", b"1", b"2")}
            return Steps(ran, requests)

        monkeypatch.setattr(FindJob, "run", steps)

    def test_it_says_what_runs_and_what_has_no_kernel(self, capsys):
        done = dsv4.warmup(dsv4.ModelConfig.tiny(), arch="sm_100a", progress=False)
        assert (done.triton, done.triton_compiled, done.compiled) == (3, 1, 0)
        assert done.operators == (
            Operator("rope", "triton", ("_rope_kernel",)),
            Operator("gemm", "cublas", ("_dequantize_kernel",), (("cute", "too many"),)),
        )
        lines = str(done).splitlines()
        assert lines[0].startswith(f"{done.kernels} CuTeDSL kernels, {done.compiled} of them ")
        assert [line.split() for line in lines[1:]] == [
            ["compiled:"],
            ["rope", "triton:", "_rope_kernel"],
            ["no", "kernel", "of", "its", "own:"],
            ["gemm", "cublas:", "_dequantize_kernel;", "not", "cute:", "too", "many"],
        ]

    def test_a_list_that_cannot_be_made_is_said(self, monkeypatch, caplog):
        def fails(*args):
            raise RuntimeError("no meta kernel\ndetails")

        monkeypatch.setattr(FindJob, "run", fails)
        done = dsv4.warmup(dsv4.ModelConfig.tiny(), arch="sm_100a", progress=False)
        assert (done.triton, done.operators) == (0, ())
        assert re.fullmatch(
            r"the list of Triton kernels of \d+ steps failed: RuntimeError: no meta kernel",
            done.skipped,
        )
        assert "compiled at their first launch: the list" in caplog.text

    def test_a_layer_has_no_steps(self):
        layer = layers.Linear(64, 32)
        done = dsv4.warmup(layer, arch="sm_100a", progress=False)
        assert (done.triton, done.operators) == (0, ())
        assert "left out: Linear is not a whole model" in str(done)

    def test_an_interpreter_cannot_compile(self, monkeypatch):
        monkeypatch.undo()
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert "TRITON_INTERPRET is set" in launch_recorder.impossible()
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        assert launch_recorder.impossible() is None

    def test_plans_are_those_of_the_architecture(self):
        config = dsv4.ModelConfig.tiny(hidden_size=128)
        every = kernel_calls.every_call(config)
        for arch, has_wgmma in (("sm_90a", True), ("sm_100a", False), ("sm_103a", False)):
            kinds = {type(plan).__name__ for plan in kernel_calls.kernel_plans(every, 8192, arch)}
            assert ("WgmmaPlan" in kinds) == has_wgmma
            assert "SmallMPlan" in kinds


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_list_of_drafts_has_the_copy_of_a_head_that_can_have_one(ranks, monkeypatch):
    """A rank has a part of the head, which is not copied; the list is made all the same."""
    made = []
    monkeypatch.setattr(draft_steps.DraftHead, "of", lambda *arguments: made.append(arguments))
    context = emulated_context(ranks) if ranks > 1 else None
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(dsv4.ModelConfig.tiny(), mtp=True, parallel=context)
    model.to(torch.bfloat16)
    draft_steps._quantise_head(model)
    assert len(made) == (ranks == 1)


def test_a_list_leaves_the_emulated_ranks_of_its_process(monkeypatch):
    """Without a worker, this process makes the list, and its own ranks may be emulated, too."""
    context = emulated_context(2)
    name, seen = context.group.name, []
    monkeypatch.setattr(
        _steps, "find_steps", lambda model, *_: seen.append(mailboxes.of_group(name).device.type)
    )
    recipe = Recipe.of(dsv4.ModelConfig.tiny(), Ranks(2))
    FindJob(recipe, Target("sm_90a"), 8, ()).run()
    assert seen == ["meta"]
    assert mailboxes.of_group(name) is context.group.mailbox


@pytest.mark.parametrize("ranks", [Ranks(1), Ranks(2)])
def test_the_list_of_a_configuration_has_the_projections_of_compressors(ranks):
    """One launch multiplies their weights, which published checkpoints leave plain."""
    config = dsv4.ModelConfig.flash().replace(n_routed_experts=24)
    model = Recipe.of(config, ranks).build("sm_90a")
    x = torch.empty(1, config.hidden_size, dtype=torch.bfloat16, device="meta")
    compressors = [m for n, m in model.named_modules() if n.endswith("compressor")]
    assert len(compressors) >= 3
    for compressor in compressors:
        assert are_merged([compressor.kv_proj, compressor.gate_proj], x)
