"""Parts of the engine without an engine: settings, rows, pages in vLLM's memory, batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.core import kv_cache_planning
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.worker.utils import allocate_kv_cache

import dsv4
from dsv4.checkpoint import save
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.cute import supports
from dsv4.integrations.vllm import places
from dsv4.integrations.vllm.engine import model, refusals, rows, specs
from dsv4.integrations.vllm.engine.cache import EngineCache, EngineSize, _batch
from dsv4.integrations.vllm.engine.options import Options
from dsv4.integrations.vllm.engine.pages import GroupStep
from dsv4.kv_cache.batch import Batch
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import random_model
from tests.checkpoint.cases import make_model
from tests.checkpoint.load_cases import CONFIG
from tests.checkpoint.test_load_packed import pretend_gpu

_TINY = ModelConfig.tiny(
    layer_types=(SLIDING, CSA, HCA, CSA), compress_rates={CSA: 4, HCA: 128}, sliding_window=128
)


# Settings


def _settings(folder: str, **changes: Any) -> SimpleNamespace:
    """A configuration that is served, with some attributes changed."""
    values: dict[str, dict[str, Any]] = {
        "parallel_config": {
            **dict.fromkeys((*refusals._PARALLEL, "tensor_parallel_size"), 1),
            **dict.fromkeys(("enable_expert_parallel", "enable_eplb", "use_ubatching"), False),
        },
        "model_config": {
            "dtype": torch.bfloat16,
            "runner_type": "generate",
            "model": folder,
            "hf_overrides": {},
            **dict.fromkeys(("enable_prompt_embeds", "enable_sleep_mode"), False),
        },
        "load_config": {"load_format": "auto"},
        "cache_config": {
            "user_specified_block_size": False,
            "block_size": 16,
            "cache_dtype": "auto",
        },
        "aux_output_config": {"enable_return_routed_experts": False},
        "scheduler_config": {"disable_hybrid_kv_cache_manager": False},
        "offload_config": {
            "uva": SimpleNamespace(cpu_offload_gb=0),
            "prefetch": SimpleNamespace(offload_group_size=0),
        },
    }
    top = ("lora_config", "speculative_config", "kv_transfer_config", "ec_transfer_config")
    features: dict[str, Any] = dict.fromkeys(top)
    for name, value in changes.items():
        owner = next((part for part in values.values() if name in part), features)
        assert name in owner
        owner[name] = value
    parts = {name: SimpleNamespace(**part) for name, part in values.items()}
    return SimpleNamespace(**parts, **features)


def test_settings_that_are_supported_pass(tmp_path: Any) -> None:
    refusals.check(_settings(str(tmp_path)))
    refusals.check(_settings(str(tmp_path), user_specified_block_size=True, block_size=256))
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    refusals.check(_settings(str(tmp_path), **ranks))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2, expected 1"),
        ({"data_parallel_size": 2}, "data_parallel_size is 2, expected 1"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel is True.*has all experts"),
        ({"enable_eplb": True}, "enable_eplb is True.*packed experts cannot move"),
        ({"use_ubatching": True}, "microbatches"),
        ({"lora_config": object()}, "LoRA is on"),
        ({"speculative_config": object()}, "speculative decoding is on"),
        ({"kv_transfer_config": object()}, "a KV connector is set"),
        ({"ec_transfer_config": object()}, "an encoder connector is set"),
        ({"uva": SimpleNamespace(cpu_offload_gb=4)}, "weights are offloaded"),
        ({"dtype": torch.float16}, "dtype is float16, expected bfloat16 or float32"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds is True"),
        ({"enable_sleep_mode": True}, "enable_sleep_mode is True"),
        ({"enable_return_routed_experts": True}, "enable_return_routed_experts is True"),
        ({"hf_overrides": {"index_topk": 1}}, "hf_overrides are set"),
        ({"runner_type": "pooling"}, "the runner is pooling"),
        ({"load_format": "dummy"}, "load_format is dummy, expected auto"),
        ({"load_format": "gguf"}, "load_format is gguf, expected auto"),
        ({"model": "deepseek-ai/DeepSeek-V4"}, "expected a folder"),
        ({"user_specified_block_size": True}, "block_size is 16, expected 256 or none"),
        ({"cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype is fp8_ds_mla, expected auto"),
        ({"disable_hybrid_kv_cache_manager": True}, "disable_hybrid_kv_cache_manager is True"),
    ],
)
def test_a_setting_that_is_not_supported_is_one_sentence(
    tmp_path: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        refusals.check(_settings(str(tmp_path), **changes))
    assert "\n" not in str(caught.value)
    assert ". " not in str(caught.value)


def test_an_unknown_signature_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert places.mismatches(places.MODEL) == []
    other = places.Place(places.__name__, "signature_of", "target, more")
    monkeypatch.setattr(places, "MODEL", (other,))
    with pytest.raises(RuntimeError, match=r"this vLLM is not known: .*signature_of"):
        refusals.check(_settings(str(tmp_path)))


def test_options_are_read_and_unknown_ones_refused() -> None:
    assert Options.of({}) == Options()
    assert Options.of({"dsv4": {"activation": "nvfp4"}}).activation == "nvfp4"
    with pytest.raises(ValueError, match="has speed, expected some of activation"):
        Options.of({"dsv4": {"speed": 1}})
    with pytest.raises(ValueError, match="is 7, expected a dictionary"):
        Options.of({"dsv4": 7})


# The class that vLLM builds


class _Stub(nn.Module):
    """A ``Dsv4ForCausalLM`` without vLLM's configuration."""

    def __init__(self, size: EngineSize) -> None:
        super().__init__()
        self.model = random_model(_TINY, 1)
        self.size = size
        self._loaded = False


def test_models_are_built_outside_vllms_default_dtype_and_device() -> None:
    """Global scales made under vLLM's bfloat16 would lose 16 bits."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            with model._own_defaults():
                assert torch.empty(1).dtype == torch.float32
                assert torch.empty(1).device.type == "cpu"
            assert torch.empty(1).dtype == torch.bfloat16
            assert torch.empty(1).device.type == "meta"
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def exact_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek's formats: experts from MXFP4 and FP8 128 x 128, all exact in FP8."""
    folder = tmp_path_factory.mktemp("exact")
    save(make_model(CONFIG), folder, layout="deepseek")
    return folder


@pytest.mark.parametrize("activation", ["bf16", "fp8"])
def test_activations_of_the_options_are_those_of_the_model(
    exact_checkpoint: Path,
    activation: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Logits are those of ``dsv4.load`` with them; without FP8 vLLM's log names it."""
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(supports, "no_fp8_gemm", lambda device: None)
    monkeypatch.setattr(model, "logger", lambda: logging.getLogger("dsv4_test"))
    options = Options.of({"dsv4": {"activation": activation, "dtype": "float32"}})
    settings = _settings(str(exact_checkpoint))
    with caplog.at_level(logging.INFO, logger="dsv4_test"):
        loaded = model._load(settings, options, torch.device("cpu"))
    assert loaded.config.activation == activation
    hints = [r for r in caplog.records if r.name == "dsv4_test"]
    assert [("activation='fp8'" in r.getMessage()) for r in hints] == [True] * (activation != "fp8")
    expected = dsv4.load(
        exact_checkpoint, activation=activation, dtype="float32", mtp=False, progress=False
    )
    other = "fp8" if activation == "bf16" else "bf16"
    differs = dsv4.load(
        exact_checkpoint, activation=other, dtype="float32", mtp=False, progress=False
    )
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert_bitwise(loaded(ids), expected(ids), "logits")
        assert not torch.equal(loaded(ids), differs(ids))


def test_a_profile_run_computes_as_many_tokens_as_a_step_has() -> None:
    """40 tokens where a request has at most 16: three requests, each as the model computes it."""
    stub = _Stub(EngineSize(4, 16, 16))
    ids = torch.randint(0, _TINY.vocab_size, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        hidden = model.Dsv4ForCausalLM._profile(stub, ids)
        alone = [stub.model.model(piece[None])[0][0] for piece in ids.split(16)]
    torch.testing.assert_close(hidden, torch.cat(alone), rtol=1e-4, atol=1e-4)


def test_weights_are_loaded_once_and_vllms_iterator_is_left_alone() -> None:
    stub = _Stub(EngineSize(1, 16, 16))

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("a tensor was read")
        yield "", torch.empty(0)

    names = model.Dsv4ForCausalLM.load_weights(stub, weights())
    assert names == {name for name, _ in stub.named_parameters()}
    with pytest.raises(RuntimeError, match="load_weights was called again"):
        model.Dsv4ForCausalLM.load_weights(stub, weights())


def test_inputs_that_the_model_does_not_read_are_refused() -> None:
    stub = _Stub(EngineSize(1, 16, 16))
    ids = torch.zeros(1, dtype=torch.int64)
    for extra in ({"inputs_embeds": torch.zeros(1, 4)}, {"mask": 1}, {"intermediate_tensors": 1}):
        with pytest.raises(ValueError, match="expected token ids alone"):
            model.Dsv4ForCausalLM.forward(stub, ids, ids, **extra)


# Rows


def _manager(count: int) -> rows.RowManager:
    pool = SimpleNamespace(null_block=None, num_gpu_blocks=9, free_blocks=list)
    rows.register()
    spec = rows.RowSpec.of(count, 300)
    manager_class = KVCacheSpecRegistry.get_manager_class(spec)
    assert manager_class is rows.RowManager
    return rows.RowManager(
        spec,
        block_pool=pool,
        enable_caching=False,
        kv_cache_group_id=2,
        scheduler_block_size=256,
    )


@given(count=st.integers(1, 5), steps=st.lists(st.integers(0, 7), max_size=40))
def test_every_running_request_has_a_row_of_its_own(count: int, steps: list[int]) -> None:
    """A number is a request: it starts if it does not run and a row is free, and else it ends."""
    manager, running = _manager(count), dict[str, int]()
    for step in map(str, steps):
        needed = manager.get_num_blocks_to_allocate(step, 10, [], 0, 0, 10)
        if step in running:
            assert needed == 0
            assert manager.allocate_new_blocks(step, 20, 20) == []
            assert [block.block_id for block in manager.req_to_blocks[step]] == [running[step]]
            assert manager.pop_blocks_for_free(step) == []  # vLLM's pool gets nothing
            del running[step]
        elif len(running) < count:
            assert needed == 0
            (block,) = manager.allocate_new_blocks(step, 10, 10)
            assert 1 <= block.block_id <= count
            assert block.block_id not in running.values()
            running[step] = block.block_id
        else:
            assert needed > 9  # more than the pool has: the request waits
    manager.free("never seen")


def test_rows_take_no_memory_and_one_column() -> None:
    spec = rows.RowSpec.of(4, 1000)
    assert spec.max_memory_usage_bytes(SimpleNamespace()) == 0
    assert spec.max_num_blocks_per_req(SimpleNamespace(), 1000) == 1
    assert spec.page_size_bytes == specs.ALIGNMENT
    assert spec.block_size >= 1000  # Model Runner V1 divides every position by it
    with pytest.raises(NotImplementedError, match="compressor state"):
        _manager(1).allocate_external_computed_blocks("a", 0, 7)


# Pages


def _bound(
    config: ModelConfig, formats: specs.Formats, blocks: int
) -> tuple[EngineCache, dict[str, torch.Tensor]]:
    """A cache over memory that vLLM's own code plans and allocates."""
    size = EngineSize(3, 1024, 64)
    cache = EngineCache.allocate(config, size, formats, torch.device("cpu"))
    names = {name: module.get_kv_cache_spec(None) for name, module in cache.modules.items()}
    groups = specs.groups(names)
    settings = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
            num_gpu_blocks_override=blocks,
            prefix_cache_retention_interval=None,
        ),
    )
    planned = kv_cache_planning.get_kv_cache_config_from_groups(settings, groups, 1 << 40)
    memory = allocate_kv_cache(planned, torch.device("cpu"), KVCacheLayout.BLHNC)
    for name, tensor in memory.items():
        cache.modules[name].bind_kv_cache(tensor)
    return cache, memory


_FORMATS = [
    specs.Formats("fp8", "index_mxfp4", torch.bfloat16),
    specs.Formats("fp8", "index_fp8", torch.bfloat16),
    specs.Formats("plain", "plain", torch.float32),
]


@pytest.mark.parametrize("formats", _FORMATS, ids=lambda formats: formats.index)
def test_pages_of_a_group_lie_side_by_side_and_pages_of_all_groups_are_whole(
    formats: specs.Formats,
) -> None:
    """Every page of a group keeps what is written to it when all others are written, too."""
    cache, _ = _bound(_TINY, formats, 5)
    pools: dict[str, list[torch.Tensor]] = {}
    for index, layer in enumerate(cache.paged.layers):
        pages = {
            specs.WINDOW: layer.window,
            specs.COMPRESSED: layer.compressed,
            specs.INDEX: layer.indexer_pages,
        }
        for kind, pool in pages.items():
            if pool is not None:
                pools.setdefault(cache.groups[index, kind], []).append(pool.data)
    assert len(pools) > 2
    for members in pools.values():
        # Groups share memory: only what one group wrote is looked at, before the next writes.
        for number, pool in enumerate(members):
            assert pool.shape[0] == 5
            for block in range(5):
                pool[block] = (17 * number + block) % 100
        for number, pool in enumerate(members):
            for block in range(5):
                assert (pool[block].float() == (17 * number + block) % 100).all()


def test_windows_that_share_a_block_table_are_pages_of_one_group() -> None:
    cache, memory = _bound(_TINY, _FORMATS[0], 5)
    group_of = {
        name: number
        for number, group in enumerate(
            specs.groups({n: m.get_kv_cache_spec(None) for n, m in cache.modules.items()})
        )
        for name in group.layer_names
    }
    assert set(group_of) == set(memory)
    for layout in cache.layouts:
        assert group_of[cache.groups[layout.key]] == group_of[layout.name]
    assert set(cache.tables) == set(cache.groups.values())


@pytest.mark.parametrize("config", [ModelConfig.flash(), ModelConfig.pro()], ids=["Flash", "Pro"])
def test_blocks_of_windows_are_no_larger_than_those_of_compressed_entries(
    config: ModelConfig,
) -> None:
    """Flash's blocks were 1.6 MB, and compressed entries filled 0.9 of them."""
    layouts = specs.page_layouts(config, _FORMATS[0])
    layer_specs = {layout.name: layout.spec(config.sliding_window) for layout in layouts}
    layer_specs["model.layers.0.rows"] = rows.RowSpec.of(8, 4096)
    windows, compressed = [], []
    for group in specs.groups(layer_specs):
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            kind = specs.kind_of(group.layer_names[0])
            (windows if kind == specs.WINDOW else compressed).append(spec.page_size_bytes)
    assert len(compressed) == 1
    assert max(windows) <= compressed[0]
    for layout in layouts:
        spec = layer_specs[layout.name]
        assert spec.page_size_bytes == layout.block_bytes >= layout.pages.page_bytes()
        assert spec.page_size_bytes % specs.ALIGNMENT == 0
        assert spec.page_size_bytes < layout.pages.page_bytes() + 64 * specs.ALIGNMENT
        assert spec.block_size == layout.pages.page_size * spec.tokens_per_state


def test_memory_of_another_layout_is_refused() -> None:
    (layout, *_) = specs.page_layouts(_TINY, _FORMATS[0])
    size = layout.block_bytes // 64
    layout.of_blocks(torch.zeros(3, 1, 64, size, dtype=torch.uint8))
    for wrong in (
        torch.zeros(3, 1, 64, size),
        torch.zeros(3, 1, 32, size, dtype=torch.uint8),
        torch.zeros(3, 64, 1, size, dtype=torch.uint8).transpose(1, 2)[:, :, :, ::2],
    ):
        with pytest.raises(ValueError, match=r"model.layers.0.window: vLLM's KV cache is"):
            layout.of_blocks(wrong)


def test_a_model_with_other_ratios_or_too_long_requests_is_refused() -> None:
    config = _TINY.replace(compress_rates={CSA: 4, HCA: 96})
    with pytest.raises(ValueError, match="layer 2 compresses 96 tokens to an entry, expected a"):
        specs.page_layouts(config, _FORMATS[0])
    size = EngineSize(1, _TINY.max_position_embeddings + 1, 64)
    with pytest.raises(ValueError, match="max_model_len is 1025, expected at most 1024"):
        EngineCache.allocate(_TINY, size, _FORMATS[0], torch.device("cpu"))


def test_a_step_before_memory_is_bound_is_refused() -> None:
    cache = EngineCache.allocate(_TINY, EngineSize(1, 64, 64), _FORMATS[0], torch.device("cpu"))
    with pytest.raises(RuntimeError, match="before it bound its KV cache"):
        _ = cache.paged


# Batches


@st.composite
def _steps(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int, int]:
    """Lengths, starts and rows of requests, requests and tokens that pad the step."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    starts = [draw(st.integers(0, 500)) for _ in lengths]
    ids = draw(st.permutations(range(1, 9)))[: len(lengths)]
    return lengths, starts, list(ids), draw(st.integers(0, 3)), draw(st.integers(0, 5))


@given(_steps())
def test_a_batch_of_vllm_is_that_of_its_lengths(
    step: tuple[list[int], list[int], list[int], int, int],
) -> None:
    lengths, starts, ids, requests, tokens = step
    expected = Batch.from_lengths(lengths, torch.tensor(starts), torch.tensor(ids))
    total, count = sum(lengths), len(lengths)
    # vLLM leaves what it likes in the lines that pad a step.
    cu_seqlens = [*expected.cu_seqlens.tolist(), *[total] * requests]
    seq_lens = [start + new for start, new in zip(starts, lengths, strict=True)] + [7] * requests
    table = torch.tensor([[row, 3] for row in ids] + [[0, 9], [99, 9], [2, 9]][:requests])
    actual = _batch(
        GroupStep(
            torch.tensor(cu_seqlens, dtype=torch.int32),
            torch.tensor(seq_lens, dtype=torch.int32),
            table.int(),
        ),
        9,
        total + tokens,
    )
    assert actual.sequences.tolist() == [*ids, *[-1] * requests]
    assert actual.starts[:count].tolist() == starts
    assert actual.cu_seqlens.tolist() == cu_seqlens
    assert actual.positions.tolist() == [*expected.positions.tolist(), *[0] * tokens]
    owners = expected.sequence_of_token.tolist()
    assert actual.sequence_of_token.tolist() == [*owners, *[-1] * tokens]


def test_a_made_up_row_belongs_to_nobody() -> None:
    """vLLM's warm-up numbers blocks by itself, and its dummy runs leave all at 0."""
    made_up = torch.tensor([[0], [9], [-1], [4]], dtype=torch.int32)
    ones = torch.arange(5, dtype=torch.int32)
    actual = _batch(GroupStep(ones, torch.ones(4, dtype=torch.int32), made_up), 9, 4)
    assert actual.sequences.tolist() == [-1, -1, -1, 4]
    assert actual.sequence_of_token.tolist() == [-1, -1, -1, 4]


@given(st.data())
def test_block_tables_are_copied_to_the_rows_of_the_step(data: st.DataObject) -> None:
    size = EngineSize(4, 1024, 64)
    cache = EngineCache.allocate(_TINY, size, _FORMATS[0], torch.device("cpu"))
    for table in cache.tables.values():
        table.fill_(-5)
    ids = data.draw(st.permutations(range(1, 5)))[: data.draw(st.integers(1, 4))]
    count = len(ids)
    requests = torch.arange(count + 1, dtype=torch.int32)
    lengths = torch.full((count,), 5, dtype=torch.int32)
    steps = {
        name: GroupStep(requests, lengths, torch.randint(1, 50, (count, table.shape[1] + 3)).int())
        for name, table in cache.tables.items()
    }
    steps["model.layers.0.rows"] = GroupStep(
        requests, lengths, torch.tensor(ids, dtype=torch.int32)[:, None]
    )
    batch = cache.begin(steps, count)
    assert batch.sequences.tolist() == ids
    for name, table in cache.tables.items():
        columns = table.shape[1]
        assert (table[ids] == steps[name].block_table[:, :columns]).all()
        others = [row for row in range(1, 5) if row not in ids]
        assert (table[others] == -5).all()
    narrow = {
        name: GroupStep(step.query_start_loc, step.seq_lens, step.block_table[:, :1])
        for name, step in steps.items()
    }
    with pytest.raises(ValueError, match="vLLM's block table has 1 columns, expected at least"):
        cache.begin(narrow, count)
