"""vLLM's warm-up of its own kernels, after the plugin has replaced modules."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import logging
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("vllm", reason="vLLM 0.33 is not installed; make test-vllm has it")

import vllm
from vllm.config import VllmConfig
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.platforms import current_platform

from dsv4.config import DSparkConfig
from dsv4.integrations.vllm import (
    attention,
    compressor,
    deepseek,
    draft,
    hyper_connection,
    indexer,
    jit_warmup,
    places,
    switches,
)
from tests.integrations.vllm import build

pytestmark = pytest.mark.usefixtures("vllm_world")
_VLLM = Path(vllm.__file__).parent
_OPS = "models/deepseek_v4/nvidia/ops"
_ROUTER = "vllm.model_executor.kernels.linear.cute_dsl"
_ANSWERS = {
    f"{_ROUTER}.ll_bf16.is_available": False,
    f"{_ROUTER}.ll_fp32w.is_available": False,
    f"{type(current_platform).__module__}.{type(current_platform).__name__}.is_cuda": True,
    "vllm.model_executor.layers.sparse_attn_indexer.has_deep_gemm": True,
    "vllm.utils.deep_gemm.is_deep_gemm_supported": True,
    "vllm.utils.import_utils.has_cutedsl": True,
}
# Modules of kernels whose compilers are not installed here.
_STANDING_IN = (
    "model_executor/kernels/mhc/tilelang_kernels.py",
    f"{_OPS}/dequant_gather_k_cutedsl.py",
    f"{_OPS}/fused_indexer_q_cutedsl.py",
    f"{_OPS}/sparse_attn_compress_cutedsl.py",
)
LAYER = {"MhcPreBigFuseTileLangKernel", "MhcFusedTileLangKernel"}
HYPER_CONNECTION = {*LAYER, "MhcPostTileLangKernel", "HcHeadFusedTileLangKernel"}
NORM = {"FusedQKVRMSNormKernel"}
MQA = {
    *("FusedInvRopeFP8QuantKernel", "CombineTopkSwaIndicesKernel"),
    *("ComputeGlobalTopkIndicesAndLensKernel", "DequantGatherKCacheKernel"),
}
WINDOW = {"ComputePrefillMetadataKernel", "ComputeSWAIndicesAndLensKernel"}
SLOTS = {"CompressedSlotMappingKernel"}
ENTRIES = {"BuildC128ATopkMetadataKernel", *SLOTS}
KEYS = {"PrepareUniformDecodeKernel", "BuildPrefillChunkMetadataKernel"}
COMPRESSOR = {
    *("SavePartialStatesKernel", "SparseAttnCompressC128Block8Kernel"),
    *("SparseAttnCompressNormRopeStoreC4Kernel", "SparseAttnNormRopeStoreKernel"),
    "FusedKVCompressNormRopeInsertIndexerTritonKernel",
}
INDEXER = {"IndexerQFp8Kernel", "PackSeqTritonKernel", "UnpackSeqTritonKernel"}
ATTENTION = {*NORM, *MQA, *WINDOW, *ENTRIES, *KEYS, *COMPRESSOR, *INDEXER}
EVERY = {*HYPER_CONNECTION, *ATTENTION}
SPARK = DSparkConfig(block_size=5, noise_token_id=47, target_layer_ids=(0, 1, 2), markov_rank=128)
DSPARK = {"ComputeDSparkNoncausalSWAIndicesKernel"}


def kernels_of(path):
    """Names of the constants in a file of vLLM that are kernels, and of their classes."""
    text = (_VLLM / path).read_text(encoding="utf-8")
    tree = ast.parse(text if "JitKernel" in text else "")
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return {
        target.id: node.value.func.id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name)
        if isinstance(node.value.func, ast.Name) and node.value.func.id in classes
    }


class StandingIn:
    """A kernel that registers, and has no compiler."""

    def register_warmup(self, *args, **kwargs):
        """Do as vLLM's kernels."""
        JitWarmupRegistry.register(self, *args, **kwargs)


def standing_in(path):
    """A module with the kernels of a file of vLLM, which register alone."""
    name = "vllm." + path.removesuffix(".py").replace("/", ".")
    module = ModuleType(name)
    for constant, class_name in kernels_of(path).items():
        setattr(module, constant, type(class_name, (StandingIn,), {})())
    return name, module


@contextmanager
def cuda(config):
    """Let vLLM register what it registers on an NVIDIA GPU with all compilers."""
    config.kernel_config.enable_jit_warmup = True
    config.compilation_config.static_forward_context.clear()
    with ExitStack() as stack:
        for name, module in map(standing_in, _STANDING_IN):
            # Only these: no other module may be imported twice.
            stack.callback(sys.modules.pop, name)
            sys.modules[name] = module
        for target, answer in _ANSWERS.items():
            stack.enter_context(mock.patch(target, return_value=answer))
        stack.enter_context(build.hopper(config))
        yield


def registered(config, model=deepseek.DeepseekV4ForCausalLM):
    """Names of the kernels that vLLM would compile after a model is built, and their calls."""
    registry = JitWarmupRegistry(config)
    with cuda(config), registry.activate():
        model(vllm_config=config)
    return {type(kernel).__name__: calls for kernel, calls in registry._registrations.items()}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build.checkpoint(folder, "nvidia")
    return build.engine_config(folder)


@pytest.fixture(scope="module")
def stock(config):
    """What vLLM's own model registers."""
    return registered(config, deepseek.vllm_model.DeepseekV4ForCausalLM)


@pytest.fixture
def heard(caplog, monkeypatch):
    """The plugin's log."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level("INFO", "vllm"):
        yield caplog


PARTS = [chosen for n in range(1, 5) for chosen in itertools.combinations(switches.PARTS, n)]


def expected(parts):
    """Kernels that remain where these parts are replaced."""
    replaced = set()
    if switches.HYPER_CONNECTION in parts:
        replaced |= HYPER_CONNECTION | NORM
    if switches.ATTENTION in parts:
        replaced |= ATTENTION
    return EVERY - replaced


def test_vllm_registers_these_kernels(stock):
    assert stock.keys() == EVERY


@pytest.mark.parametrize("parts", PARTS, ids=",".join)
def test_kernels_that_only_replaced_modules_launch_are_not_compiled(
    config, stock, parts, monkeypatch
):
    """The others are registered as vLLM does, in its order and with its arguments."""
    monkeypatch.setenv("DSV4_VLLM", ",".join(parts))
    left = registered(config)
    assert left.keys() == expected(parts)
    assert list(left) == [name for name in stock if name in left]
    for name, calls in left.items():
        assert len(calls) == len(stock[name])
        assert [kwargs.keys() for _, kwargs in calls] == [kw.keys() for _, kw in stock[name]]


def but_the_first(reason_of):
    """A function that refuses the first module of the model."""
    asked = []

    def reason(*args):
        asked.append(args)
        return "left out" if len(asked) == 1 else reason_of(*args)

    return reason


LEFT = {
    "a decoder layer": (hyper_connection, "_layer_reason", {*LAYER, "MhcPostTileLangKernel"}),
    # A layer of the compression ratio 1, whose builders are vLLM's, too, and its norm is not.
    "an attention": (attention, "reason_against", {*MQA, *WINDOW, *ENTRIES}),
    "an indexer": (indexer, "reason_against", {*INDEXER, *KEYS, *SLOTS, *COMPRESSOR}),
}


@pytest.mark.parametrize("what", LEFT)
def test_kernels_of_what_is_left_to_vllm_stay(config, what, monkeypatch):
    module, name, stay = LEFT[what]
    monkeypatch.setattr(module, name, but_the_first(getattr(module, name)))
    monkeypatch.setenv("DSV4_VLLM", "all")
    left = registered(config)
    assert stay <= left.keys()
    gone = EVERY - left.keys()
    assert gone >= {"HcHeadFusedTileLangKernel", *NORM}
    if what != "a decoder layer":
        assert gone >= HYPER_CONNECTION
    if what == "an indexer":
        assert gone >= MQA


def test_a_left_compressor_keeps_its_kernels_and_its_metadata(config, monkeypatch):
    reason = but_the_first(compressor.reason_against)
    monkeypatch.setattr(compressor, "reason_against", reason)
    left = registered(config)
    assert left.keys() >= COMPRESSOR | ENTRIES | WINDOW
    assert not left.keys() & (MQA | HYPER_CONNECTION)


def test_a_compression_without_own_metadata_keeps_the_builders(config, monkeypatch):
    monkeypatch.setattr(attention, "adopt_metadata", lambda *_: False)
    left = registered(config)
    assert left.keys() == WINDOW | ENTRIES | KEYS


def test_an_unknown_registry_is_left_untouched(config, stock, heard, monkeypatch):
    module = "vllm.model_executor.warmup.jit_warmup"
    other = places.Place(module, "JitWarmupRegistry.register", "kernels")
    monkeypatch.setattr(places, "JIT_WARMUP", (other,))
    assert registered(config).keys() == stock.keys()
    assert "leaves vLLM's warm-up of its own kernels as it is" in heard.text
    assert "JitWarmupRegistry.register has the parameters" in heard.text


def test_so_is_one_that_stores_otherwise(config, heard, monkeypatch):
    monkeypatch.setattr(JitWarmupRegistry, "__init__", lambda self, vllm_config: None)
    with jit_warmup.Registrations(config).held() as registry:
        assert registry is None
    assert "as it is: its registry has no registrations" in heard.text


def test_an_unknown_model_keeps_all(config, stock, monkeypatch):
    """Nothing is adopted, so that everything is launched."""
    other = places.Place("vllm.config", "VllmConfig", "self")
    monkeypatch.setattr(places, "CORE", (other,))
    assert registered(config).keys() == stock.keys()


def test_one_line_of_the_log_names_them(config, heard):
    registered(config)
    lines = [record.getMessage() for record in heard.records if "warm up" in record.getMessage()]
    assert len(lines) == 1
    assert all(name in lines[0] for name in EVERY)


def test_without_a_registry_nothing_is_registered(config, heard):
    """As vLLM builds drafts, and with ``enable_jit_warmup`` off."""
    with cuda(config):
        deepseek.DeepseekV4ForCausalLM(vllm_config=config)
        config.kernel_config.enable_jit_warmup = False
        config.compilation_config.static_forward_context.clear()
        registry = JitWarmupRegistry(config)
        with registry.activate():
            deepseek.DeepseekV4ForCausalLM(vllm_config=config)
    assert not registry._registrations


def drafting_by(folder, method, tokens, **sizes):
    """An engine whose checkpoint has the drafts."""
    build.checkpoint(folder, "nvidia", **sizes)
    options = {"method": method, "num_speculative_tokens": tokens}
    with mock.patch.object(VllmConfig, "use_v2_model_runner", True):
        return build.engine_config(folder, speculative_config=options)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    return drafting_by(tmp_path_factory.mktemp("mtp"), "mtp", 1, num_nextn_predict_layers=1)


# Drafts need all metadata of vLLM but those of index keys.
METADATA = WINDOW | ENTRIES


def test_with_drafts_that_are_replaced_metadata_stay(drafting):
    assert registered(drafting).keys() == METADATA


def test_so_do_those_of_dspark_drafts(tmp_path):
    layers = {"num_nextn_predict_layers": 0, "dspark": SPARK}
    config = drafting_by(tmp_path, "dspark", SPARK.block_size, **layers)
    assert registered(config).keys() == METADATA | DSPARK


@pytest.mark.parametrize("name", ["moe_backend", "attention_backend", "kv_cache_dtype"])
def test_drafts_with_their_own_settings_keep_all(drafting, heard, name, monkeypatch):
    monkeypatch.setattr(drafting.speculative_config, name, "triton")
    assert registered(drafting).keys() == EVERY
    assert f"too: drafts have their own {name}" in heard.text


def test_other_drafts_keep_all(drafting, heard, monkeypatch):
    config = drafting.speculative_config.draft_model_config
    monkeypatch.setattr(config, "model", "/elsewhere")
    assert registered(drafting).keys() == EVERY
    assert "drafts have a checkpoint of their own, /elsewhere" in heard.text
    monkeypatch.setattr(jit_warmup, "DRAFT_CLASSES", {})
    assert registered(drafting).keys() == EVERY
    assert "drafts of the method mtp are vLLM's" in heard.text


def test_drafts_of_another_vllm_keep_all(drafting, monkeypatch):
    other = places.Place("vllm.config", "VllmConfig", "self")
    monkeypatch.setattr(places, "DRAFT", (other,))
    assert registered(drafting).keys() == EVERY


def test_drafts_without_a_model_change_nothing(config):
    speculative = SimpleNamespace(method="ngram", draft_model_config=config.model_config)
    asked = SimpleNamespace(speculative_config=speculative, model_config=config.model_config)
    assert not jit_warmup.reason_to_keep(SimpleNamespace(modules=list), asked)


def test_a_draft_is_built_with_no_registry(drafting):
    """What it registers would be lost, in vLLM, too; so its main model keeps what it needs."""
    with cuda(drafting):
        draft.DeepSeekV4MTP(vllm_config=drafting)
    assert JitWarmupRegistry._active.get() is None


# Files of vLLM that call the kernels of the table.
CALLERS = {
    "model_executor/kernels/mhc/tilelang.py",
    "models/common/ops/fused_qk_rmsnorm.py",
    "models/deepseek_v4/common/ops/cache_utils.py",
    "models/deepseek_v4/common/ops/fused_compress_quant_cache.py",
    "models/deepseek_v4/common/ops/fused_indexer_q.py",
    "models/deepseek_v4/common/ops/fused_inv_rope_fp8_quant.py",
    "models/deepseek_v4/compressor.py",
    "models/deepseek_v4/nvidia/ops/sparse_attn_compress_cutedsl.py",
    "models/deepseek_v4/sparse_mla.py",
    "v1/attention/backends/mla/compressor_utils.py",
    "v1/attention/backends/mla/indexer.py",
    "v1/attention/backends/mla/sparse_swa.py",
    "v1/attention/ops/common.py",
}
# And the functions around them with the methods, modules and builders that call these.
WRAPPERS = {
    "mhc_pre_tilelang": {"nvidia/model.py"},
    "mhc_pre_broadcast_tilelang": {"nvidia/model.py"},
    "mhc_fused_post_pre_tilelang": {"nvidia/model.py"},
    "mhc_post_tilelang": {"nvidia/model.py", "nvidia/mtp.py", "nvidia/dspark.py"},
    "hc_head_fused_kernel_tilelang": {"nvidia/model.py", "nvidia/mtp.py", "nvidia/dspark.py"},
    "fused_q_kv_rmsnorm": {"attention.py"},
    "fused_inv_rope_fp8_quant": {"nvidia/ops/o_proj.py"},
    "fused_indexer_q_rope_quant": {"attention.py"},
    "combine_topk_swa_indices": {"nvidia/flashmla.py"},
    "dequantize_and_gather_k_cache": {"nvidia/flashmla.py"},
    "compute_global_topk_indices_and_lens": {"nvidia/flashmla.py", "nvidia/flashinfer_sparse.py"},
    "get_compressed_slot_mapping": {"sparse_mla.py"},
    "build_c128a_topk_metadata": {"sparse_mla.py"},
}
_FOLDERS = ("models/deepseek_v4", "models/common", "v1/attention", "model_executor/kernels/mhc")
_ELSEWHERE = ("amd", "xpu", "cpu")


def calls_in(folder):
    """Yield the files of a folder, with the names of what they call."""
    for path in sorted((_VLLM / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        elsewhere = set(path.relative_to(_VLLM).parts) & set(_ELSEWHERE)
        if not elsewhere and ("_KERNEL" in text or any(name in text for name in WRAPPERS)):
            tree = ast.parse(text)
            called = {
                node.func.id
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            yield path.relative_to(_VLLM).as_posix(), called


def test_kernels_are_launched_where_the_table_says():
    """A new vLLM that launches one elsewhere fails here."""
    table = {kernel for launched in jit_warmup.LAUNCHED for kernel in launched.kernels}
    files = {path: called for folder in _FOLDERS for path, called in calls_in(folder)}
    constants = {}
    for path in files:
        constants |= {k: v for k, v in kernels_of(path).items() if v in table}
    assert set(constants.values()) == table, "each is a kernel of vLLM"
    assert {path for path, called in files.items() if called & constants.keys()} == CALLERS
    for wrapper, users in WRAPPERS.items():
        calling = {
            path.removeprefix("models/deepseek_v4/")
            for path, called in files.items()
            if path.startswith("models/deepseek_v4/") and wrapper in called
        }
        assert calling == users, wrapper


def test_methods_of_the_table_are_vllms():
    modules = ("attention", "compressor", "sparse_mla", "nvidia.model")
    names = [f"vllm.models.deepseek_v4.{name}" for name in modules]
    names += [f"vllm.v1.attention.backends.mla.{name}" for name in ("indexer", "sparse_swa")]
    assert all(importlib.util.find_spec(name) for name in names)
    classes = {k: v for name in names for k, v in vars(importlib.import_module(name)).items()}
    for launched in jit_warmup.LAUNCHED:
        for method in launched.methods:
            owner, _, name = method.partition(".")
            assert callable(getattr(classes[owner], name)), method
