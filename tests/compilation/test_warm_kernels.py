"""A warmed-up process compiles nothing: the kernels of any step are among those found.

Kernels are not interpreted in the worker processes that these tests ask, and no GPU is needed.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import textwrap
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import dsv4
from dsv4 import layers
from dsv4.compilation import pool, sealed_file
from dsv4.compilation.draft_steps import MOST_SEQUENCES, DraftShape, draft_shapes
from dsv4.compilation.jobs import FindJob, TritonJob
from dsv4.compilation.kernel_calls import PackedGemm, every_call
from dsv4.compilation.launch_recorder import Ran, Steps
from dsv4.compilation.listing import Listing
from dsv4.compilation.recipe import Recipe, Weight
from dsv4.compilation.step_shapes import StepShape, every_shape, step_shapes
from dsv4.compilation.target import Target
from dsv4.config import DSparkConfig
from dsv4.cute.runtime import cubin_cache
from dsv4.kv_cache.layer_cache import ROLLBACK
from dsv4.layers._expert_staging import STAGED_STEP_TOKENS
from dsv4.serving import Runner, SamplingOptions
from dsv4.testing.models import random_model
from tests._tools import forked

pytest.importorskip("triton")
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
MOST = 8192
WHOLE = {
    "hidden_size": 128,
    "q_lora_rank": 64,
    "moe_intermediate_size": 64,
    "o_lora_rank": 32,
}


@pytest.fixture(scope="module")
def worker():
    """Does a job in another process."""
    process = pool.start()

    def ask(job):
        done = pool._ask(process, job)
        assert not done.error, done.details
        return done.result

    yield ask
    pool._end(process)


@pytest.fixture(scope="module")
def kernels_of(worker):
    """The kernels of some steps, by key."""
    known = {}

    def find(recipe, target, *shapes):
        key = (recipe, target, shapes)
        if key not in known:
            chosen = shapes or tuple(step_shapes(MOST, recipe.config.max_position_embeddings))
            steps = worker(FindJob(recipe, target, MOST, chosen))
            known[key] = {k: request.name for k, request in steps.requests.items()}
        return known[key]

    return find


# Modules with hooks, by which sums of experts and norms run in kernels of their own.
WATCHED = (
    layers.DeepseekV4Experts,
    layers.DeepseekV4DecoderLayer,
    layers.DeepseekV4RMSNorm,
    layers.DeepseekV4HyperConnection,
)
HOOKS = ((), (), (nn.Module,), *((kind,) for kind in WATCHED), WATCHED[:2], WATCHED[:3])


@st.composite
def step(draw):
    """A step with any number of tokens and sequences, of any cache."""
    tokens = draw(st.one_of(st.integers(1, 64), st.integers(1, MOST)))
    sequences = draw(st.one_of(st.just(1), st.just(tokens), st.integers(1, min(tokens, 1024))))
    if 32 <= tokens <= 1536:
        sequences = draw(st.one_of(st.just(sequences), st.integers(1, 64)))  # some of padding
    context = draw(st.one_of(st.integers(64, 65536), st.integers(64, 1 << 20)))
    index_format = draw(st.sampled_from((None, "plain")))
    return StepShape(tokens, sequences, context, index_format, draw(st.sampled_from(HOOKS)))


POINTS = [("sm_90a", "flash", "bf16")]
if NIGHTLY:
    POINTS += [("sm_90a", "pro", "bf16"), ("sm_100a", "flash", "nvfp4"), ("sm_90a", "pro", "nvfp4")]


@pytest.mark.slow
@pytest.mark.costly(3)
@pytest.mark.parametrize(("arch", "preset", "activation"), POINTS)
@given(shape=step())
@example(shape=StepShape(1, 1, 256))
@example(shape=StepShape(21, 1, 1024))
@example(shape=StepShape(9, 9, 4096, watched=WATCHED[:1]))
@example(shape=StepShape(300, 2, 4096, watched=WATCHED[2:]))
@example(shape=StepShape(833, 1, 64, watched=(nn.Module,)))
@example(shape=StepShape(897, 1, 64, watched=(nn.Module,)))
@example(shape=StepShape(4096, 1, 65536))
@example(shape=StepShape(32, 64, 1024))
@example(shape=StepShape(185, 17, 2052))  # few more keys than are selected, in shared tiles
@example(shape=StepShape(1, 1, 131104))  # an odd number of pages
@example(shape=StepShape(8000, 1, 50176, "plain"))  # scored in parts of an odd number of tokens
@settings(deadline=None)
def test_any_step_launches_what_was_found(arch, preset, activation, shape, kernels_of):
    recipe = Recipe.of(getattr(dsv4.ModelConfig, preset)(activation=activation))
    warm = kernels_of(recipe, Target(arch))
    asked = kernels_of(recipe, Target(arch), shape)
    assert len(asked) > 20
    assert [name for key, name in asked.items() if key not in warm] == []


@pytest.mark.slow
@pytest.mark.nightly
@given(
    tokens=st.one_of(st.integers(4097, STAGED_STEP_TOKENS), st.just(STAGED_STEP_TOKENS)),
    sequences=st.sampled_from((1, 2, 7, 100)),
    context=st.integers(STAGED_STEP_TOKENS, 1 << 20),
)
@example(tokens=8184, sequences=1, context=8184)
@example(tokens=16384, sequences=1, context=16385)
@settings(deadline=None, max_examples=20)
def test_long_steps_with_experts_in_host_memory_are_in_the_list(
    tokens, sequences, context, kernels_of
):
    """Those of a default chunk, of which only some numbers of tokens are listed."""
    recipe = Recipe.of(dsv4.ModelConfig.flash().replace(num_nextn_predict_layers=0))
    hosted = tuple(
        (name, dataclasses.replace(weight, hosted=(148, 60, 24)))
        if name.endswith(".experts")
        else (name, weight)
        for name, weight in recipe.weights
    )
    recipe, target = dataclasses.replace(recipe, weights=hosted), Target("sm_90a")
    sizes = step_shapes(STAGED_STEP_TOKENS, recipe.config.max_position_embeddings)
    warm = kernels_of(recipe, target, *sizes)
    asked = kernels_of(recipe, target, StepShape(tokens, sequences, context))
    assert len(asked) > 20
    assert [name for key, name in asked.items() if key not in warm] == []


@pytest.mark.slow
def test_the_number_of_kernels_is_bounded(kernels_of):
    """One more number of tokens must not be one more kernel."""
    recipe = Recipe.of(dsv4.ModelConfig.flash())
    warm = kernels_of(recipe, Target("sm_90a"))
    names = set(warm.values())
    assert {"_small_m_logits_kernel", "_slots_kernel", "_filter_kernel", "_pack_kernel"} <= names
    assert len(warm) < 320


@st.composite
def draft_step(draw):
    """A step that verifies and drafts, of any number of sequences, or a prompt before drafts."""
    sequences = draw(st.integers(1, MOST_SEQUENCES))
    context = draw(st.sampled_from((256, 4096, 65536)))
    if draw(st.booleans()):
        return DraftShape(sequences, draw(st.integers(sequences, MOST)), context, prompt=True)
    return DraftShape(sequences, draw(st.integers(2, ROLLBACK + 1)), context)


DSPARK = DSparkConfig(
    block_size=5, noise_token_id=0, target_layer_ids=(40, 41, 42), markov_rank=256
)


@pytest.mark.slow
@pytest.mark.parametrize("dspark", [None, DSPARK], ids=["mtp", "dspark"])
@given(shape=draft_step())
@example(shape=DraftShape(1, 2, 4096))
@example(shape=DraftShape(1, 9, 65536))
@example(shape=DraftShape(7, 6, 4096))
@example(shape=DraftShape(64, 3, 65536))
@example(shape=DraftShape(3, 4095, 65536, prompt=True))
@settings(deadline=None, max_examples=8)
def test_any_step_of_a_draft_launches_what_was_found(dspark, shape, kernels_of):
    """Verification, drafting, and what is stored of prompts."""
    recipe, target = Recipe.of(dsv4.ModelConfig.flash()), Target("sm_90a")
    warm = dict(kernels_of(recipe, target))
    if dspark is not None:
        recipe = Recipe.of(dsv4.ModelConfig.flash(dspark=dspark))
    assert recipe.has_draft
    of_drafts = kernels_of(recipe, target, *draft_shapes(MOST, 65536))
    added = {name for key, name in of_drafts.items() if key not in warm}
    assert {"_candidates_kernel", "_distribution_kernel", "_floors_kernel"} <= added
    assert len(set(of_drafts) - set(warm)) < 30
    asked = kernels_of(recipe, target, shape)
    assert [name for key, name in asked.items() if key not in {**warm, **of_drafts}] == []


def test_a_model_s_draft_is_in_its_list():
    """With the formats of the draft's own weights, and its head's copy among the GEMMs."""
    config = dsv4.ModelConfig.tiny(**WHOLE, num_nextn_predict_layers=1)
    model = random_model(config, 0, mtp=True).to(torch.bfloat16)
    model.mtp[0].layer.mlp.experts.quantize("mxfp4")
    recipe = Recipe.of(model)
    assert recipe.has_draft
    assert dict(recipe.weights)["mtp.0.layer.mlp.experts"] == Weight("mxfp4")
    built = recipe.build("sm_90a")
    assert len(built.mtp) == 1
    rows, columns = config.vocab_size, config.hidden_size
    copy = PackedGemm(rows, columns, 1, "bf16", torch.float32)
    assert copy in every_call(model)
    assert copy not in every_call(model, "sm_100a"), "it is not taken there"
    without = Recipe.of(random_model(config, 0, mtp=False).to(torch.bfloat16))
    assert not without.has_draft
    shapes = every_shape(64, 256, drafts=True)
    assert set(every_shape(64, 256, drafts=False)) < set(shapes)
    assert any(isinstance(shape, DraftShape) and shape.tokens == 9 for shape in shapes)
    layers = {"layer_types": ("sliding_attention",) * 2, "mlp_layer_types": ("moe",) * 2}
    short = dsv4.ModelConfig.tiny(
        num_hidden_layers=2, **layers, dspark=dataclasses.replace(DSPARK, target_layer_ids=(0, 1))
    )
    assert Recipe.of(short).config.num_hidden_layers == 2, "as many as the draft reads"


def test_a_model_is_warmed_up_with_the_formats_that_it_has(kernels_of):
    model = random_model(dsv4.ModelConfig.tiny(**WHOLE), 0, mtp=False).to(torch.bfloat16)
    layers.quantize_(model, names=["*.experts"])
    first = model.model.layers[0].self_attn
    first.o_b_proj.quantize("fp8_block")
    recipe = Recipe.of(model)
    weights = dict(recipe.weights)
    assert weights["model.layers.0.mlp.experts"] == Weight("nvfp4")
    assert weights["model.layers.0.self_attn.o_b_proj"].format == "fp8_block"
    assert weights["model.layers.1.self_attn.o_b_proj"] == Weight(None)
    built = recipe.build("sm_90a")
    assert {name: Weight.of(built.get_submodule(name)) for name in weights} == weights
    assert recipe.config.num_hidden_layers == len(set(_kinds(model)))
    shape = StepShape(3, 3, 256)
    plain = Recipe.of(random_model(model.config, 0, mtp=False).to(torch.bfloat16))
    of = [set(kernels_of(origin, Target("sm_90a"), shape).values()) for origin in (recipe, plain)]
    # Of the FP8 weight, and of experts too small for CuTeDSL's kernels.
    assert of[0] - of[1] == {"_gemm_kernel", "_grouped_kernel"}


@pytest.mark.parametrize("staged", [0, 5])
def test_experts_in_host_memory_are_in_the_list(staged, kernels_of):
    """Steps in slots, with the kernels that decide and load, and steps in waves."""
    config = dsv4.ModelConfig.tiny(**WHOLE, n_routed_experts=32, num_experts_per_tok=2)
    model = random_model(config, 0, mtp=False).to(torch.bfloat16)
    layers.quantize_(model, names=["*.experts"])
    layers.pack_(model)
    target, sizes = Target("sm_90a"), step_shapes(24, 128)
    plain = kernels_of(Recipe.of(model), target, *sizes)
    layers.host_experts_(model, layers.HostExperts(9, 8, staged=staged))
    recipe = Recipe.of(model)
    weights = dict(recipe.weights)
    assert weights["model.layers.0.mlp.experts"] == Weight("nvfp4", hosted=(9, 8, staged))
    built = recipe.build("sm_90a")
    assert {name: Weight.of(built.get_submodule(name)) for name in weights} == weights
    warm = kernels_of(recipe, target, *sizes)
    added = [name for key, name in warm.items() if key not in plain]
    assert {"_decide_kernel", "_load_kernel"} <= set(added)
    assert len(added) < 10
    for count in (1, 4, 5, 23):
        asked = kernels_of(recipe, target, StepShape(count, 1, 128))
        assert ("_load_kernel" in asked.values()) == (count <= 4)
        assert [name for key, name in asked.items() if key not in warm] == []


def _kinds(model):
    types, routers = model.config.layer_types, model.config.mlp_layer_types
    for layer, *kind in zip(model.model.layers, types, routers, strict=True):
        yield *kind, *[Weight.of(m) for m in layer.modules() if hasattr(m, "to_format")]


# Compiles one kernel as for a GPU, in a process of its own, and says what was compiled.
LAUNCH = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from dsv4.compilation import launch_recorder
from dsv4.debug import compilations
from dsv4.ops.slots import WindowSlotsArgs
from dsv4.triton import slots
from dsv4.triton._runtime import launch_options

run = JITFunction.run
def only_compile(self, *args, grid, warmup, **kwargs):
    global kernel
    kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
    return kernel
JITFunction.run = only_compile
launch_options.options = lambda tensor, small=False: {"PDL": 1, "launch_pdl": True}
driver.set_active(launch_recorder._Driver(GPUTarget("cuda", 90, 32), 0))
table = torch.zeros((2, 4), dtype=torch.int32, device="meta")
for tokens in (3, 3, 4, 16):
    numbers = torch.zeros(tokens, dtype=torch.int64, device="meta")
    slots.window_slots(WindowSlotsArgs(table, 64, numbers, numbers, 128))
print(dict(compilations()), kernel.metadata.name, kernel.metadata.shared, len(kernel.asm["cubin"]),
      hash(kernel.asm["ptx"]), kernel.metadata.launch_pdl)
"""


@pytest.mark.slow
def test_a_kernel_is_compiled_once_for_all_processes(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {cubin_cache.CACHE_VARIABLE: str(tmp_path / "kernels")}

    def launched(caches):
        command = [sys.executable, "-c", textwrap.dedent(LAUNCH)]
        env = {**environment, "TRITON_CACHE_DIR": str(tmp_path / caches), "PYTHONHASHSEED": "0"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.split("} ")

    first, described = launched("a")
    assert first == "{'_slots_kernel': 1"
    again, same = launched("b")
    assert again == "{", "compiled though it is stored"
    assert same == described, "another kernel than the one that was compiled"
    assert "_slots_kernel" in same
    (file,) = (tmp_path / "kernels").iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert launched("d")[0] == "{'_slots_kernel': 1", "a damaged file was used"


@given(st.dictionaries(st.binary(min_size=32, max_size=32), st.text(), max_size=4), st.data())
def test_a_list_is_used_while_all_of_its_kernels_are_stored(names, data):
    requests = {key: SimpleNamespace(name=name) for key, name in names.items()}
    ran = {("gemm", "cute"): Ran({"tcgen05": "no"}, {"a", "b"})}
    listing = Listing(Recipe.of(dsv4.ModelConfig.tiny()), Target("sm_90a"), 8)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv(cubin_cache.CACHE_VARIABLE, folder)
        assert listing.stored() is None
        listing.keep(Steps(ran, requests))
        remaining = [key for key in names if data.draw(st.booleans())]
        for key in remaining:
            cubin_cache.keep(f"{key.hex()[:32]}.triton", b"code")
        result = listing.stored()
        if len(remaining) < len(names):
            assert result is None
        else:
            assert result is not None
            assert (result.known, result.ran, result.requests) == (names, ran, {})
        shorter = dataclasses.replace(listing, max_tokens=7).stored()
        assert (shorter is None) == (result is None), "longer steps launch what these do"
        for other in (
            dataclasses.replace(listing, max_tokens=9),
            dataclasses.replace(listing, target=Target("sm_90a", 131)),
            dataclasses.replace(listing, recipe=Recipe.of(dsv4.ModelConfig.flash())),
        ):
            assert other.stored() is None


def test_what_a_worker_compiles_is_what_a_launch_finds(worker, tmp_path, monkeypatch):
    recipe = Recipe.of(dsv4.ModelConfig.flash())
    steps = worker(FindJob(recipe, Target("sm_90a"), MOST, (StepShape(1, 1, 256),)))
    triton_images = pytest.importorskip("dsv4.triton._runtime.kernel_store")
    request = next(r for r in steps.requests.values() if r.name == "_slots_kernel")
    monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, str(tmp_path))
    compiled = worker(TritonJob(request))
    assert compiled.key == request.key
    assert TritonJob(request).stored() is None
    assert cubin_cache.keep(TritonJob(request).file_name, compiled.content)
    assert TritonJob(request).stored() == compiled.content
    content = sealed_file.decode(triton_images._MAGIC, request.key, compiled.content)
    words, ptx, cubin = triton_images.parts_of(content)
    assert b".entry _slots_kernel(" in ptx
    for part in (words, ptx, cubin):
        assert b"dsv4/triton" not in part, "a path of this machine"


@pytest.mark.slow
def test_keys_do_not_depend_on_what_was_hashed_before():
    """Triton 3.6 hashes a kernel otherwise if a function that it calls was hashed before."""
    script = """
        from triton.backends.compiler import GPUTarget
        from dsv4.triton._runtime.kernel_store import request_of
        from dsv4.triton.norm import _rms_norm_kernel as kernel
        from dsv4.triton.swiglu import _swiglu_kernel as other

        def key(of):
            fields = ({"x": "*bf16"}, {}, {}, {"num_warps": 4}, GPUTarget("cuda", 90, 32))
            return request_of(of.kernel, *fields).key

        first = key(kernel)
        assert first != key(other)
        kernel.kernel.hash = "the hash of another order"
        assert key(kernel) == first
    """
    done = forked.run_source(textwrap.dedent(script))
    assert done.returncode == 0, done.stderr


def test_slices_of_a_router_s_logits_are_not_taken_for_the_logits(worker):
    """On the meta device every address is 0, so equal addresses mean nothing."""
    recipe = Recipe.of(dsv4.ModelConfig.flash())
    steps = worker(FindJob(recipe, Target("sm_90a"), MOST, (StepShape(3000, 1, 8192),)))
    result = set()
    for request in steps.requests.values():
        if request.name in ("_topk_kernel", "_hash_kernel"):
            names = list(request.signature)
            constants = {names[position]: value for (position,), value in request.constants.items()}
            result.add((constants["SPLITS"] > 1, constants["STORED"]))
    assert result == {(True, False)}


def test_drafts_of_one_sequence_may_be_at_any_address(worker):
    """A slice of one row of tokens begins 8 bytes after it; the list is made with address 0."""
    recipe = Recipe.of(dsv4.ModelConfig.flash())
    steps = worker(FindJob(recipe, Target("sm_90a"), MOST, (DraftShape(1, 3, 4096),)))
    assumed = {}
    for request in steps.requests.values():
        if "drafts" in request.signature:
            assumed[request.name] = request.attrs[(list(request.signature).index("drafts"),)]
    assert assumed == {"_greedy_kernel": [], "_candidates_kernel": [], "_emit_kernel": []}


def test_ids_and_positions_may_be_at_any_address(worker):
    """Those of a decode step may be a slice of the whole text's, as transformers makes them."""
    recipe = Recipe.of(dsv4.ModelConfig.flash())
    steps = worker(FindJob(recipe, Target("sm_90a"), MOST, (StepShape(1, 1, 4096),)))
    names = {"_hash_kernel": "input_ids", "_tables_kernel": "positions"}
    assumed = {}
    for request in steps.requests.values():
        if request.name in names:
            position = list(request.signature).index(names[request.name])
            assumed[request.name] = request.attrs[(position,)]
    assert assumed == {"_hash_kernel": [], "_tables_kernel": []}


# Warms up where nothing has used CUDA; the GPU that is not the current one, too, if there is one.
FRESH = """
import torch, dsv4
config = dsv4.ModelConfig.tiny(hidden_size=128, q_lora_rank=64, moe_intermediate_size=64)
for device in ("cuda", torch.cuda.device_count() - 1):
    done = dsv4.warmup(config, device, max_tokens=64, progress=False)
    assert done.kernels and done.triton and not done.failed, done
"""


@pytest.mark.gpu
def test_a_process_that_has_not_used_cuda_is_warmed_up(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {cubin_cache.CACHE_VARIABLE: str(tmp_path / "kernels")}
    command = [sys.executable, "-c", FRESH]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
class TestOnGpu:
    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(cubin_cache.CACHE_VARIABLE, str(tmp_path_factory.mktemp("kernels")))
            yield self._warm_model()

    def _warm_model(self):
        config = dsv4.ModelConfig.tiny(**WHOLE)
        model = random_model(config, 0, mtp=False).to("cuda", torch.bfloat16)
        layers.quantize_(model)
        layers.pack_(model)
        dsv4.warmup(model, max_tokens=512, progress=False)
        return model

    def test_after_a_warm_up_nothing_compiles(self, model):
        from dsv4.debug import compilations

        before = compilations()
        most = model.config.max_position_embeddings
        options = [
            SamplingOptions(max_new_tokens=3, stop_ids=()),
            SamplingOptions(max_new_tokens=4, temperature=0.7, top_p=0.9, stop_ids=()),
            SamplingOptions(max_new_tokens=2, repetition_penalty=1.2, logprobs=3, stop_ids=()),
        ]
        for sequences in (1, 2, 5, 8):
            with Runner(model, max_sequences=sequences, max_tokens=min(most, 512)) as runner:
                for length in (1, 2, 3, 15, 16, 17, 21, 64, 65, 100, 128, 200, 257):
                    if length + 4 <= min(most, 512):
                        runner.add([1] * length, options[length % 3])
                runner.run()
        assert compilations() - before == {}

    def test_kernels_of_other_caches_neither(self, model):
        from dsv4.debug import compilations

        before = compilations()
        for prompts in ([[1, 2, 3]], [[1] * 30, [2] * 7], [[3] * 56] * 9):
            model.generate(prompts, 3, stop_ids=())
        assert compilations() - before == {}
