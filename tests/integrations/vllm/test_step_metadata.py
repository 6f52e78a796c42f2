"""Metadata that replaced attention reads, from vLLM's builders, without its kernels' plans."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dsv4.config import CSA, HCA, SLIDING
from dsv4.testing.assertions import assert_bitwise

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.forward_context import ForwardContext, override_forward_context
from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekSparseSWAFlashMLABackend
from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLABackend
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import indexer as vllm_indexer
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata

from dsv4.integrations.vllm import attention, attention_step, compressor, indexer, step_metadata
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.switches import Switches
from tests.integrations.vllm import attention_modules as modules
from tests.integrations.vllm.attention_modules import Sizes, Step, Tables
from tests.integrations.vllm.test_attention import (
    WINDOW,
    assert_close,
    engine,
    inputs_of,
    own_layer,
    products_in_float32,
)

__all__ = ["products_in_float32"]  # a fixture for every test


def adopted(layer_type: str, vllm_config: SimpleNamespace) -> attention.Attention:
    module = modules.vllm_module(own_layer(layer_type, 0, ratio=128), Sizes())
    if module.indexer is not None:
        module.indexer.k_cache = modules.bare(DeepseekV4IndexerCache)
    for part in (module.compressor, getattr(module.indexer, "compressor", None)):
        if part is not None:
            part.state_cache = modules.bare(CompressorStateCache)
            part.state_cache.dtype = torch.float32
    module.swa_cache_layer.backend_cls = DeepseekSparseSWAFlashMLABackend
    model = torch.nn.Module()
    model.attn = module
    attention.adopt(model, Adoption(vllm_config, Switches()))
    return module


@pytest.mark.parametrize("layer_type", [CSA, HCA])
def test_replaced_modules_name_their_builders(layer_type):
    module = adopted(layer_type, engine())
    backend = module.get_attn_backend()
    assert backend.get_builder_cls() is step_metadata.EntriesBuilder
    assert backend.get_name() == DeepseekV4FlashMLABackend.get_name()
    assert module.swa_cache_layer.backend_cls is step_metadata.WindowBackend
    assert step_metadata.WindowBackend.get_builder_cls() is step_metadata.WindowBuilder
    states = module.compressor.state_cache.get_attn_backend()
    assert states.get_builder_cls() is step_metadata.StatesBuilder
    if module.indexer is not None:
        assert type(module.indexer.compressor.state_cache) is step_metadata.StatesCache
        keys = module.indexer.k_cache.get_attn_backend()
        assert keys.get_builder_cls() is step_metadata.KeysBuilder
        assert keys.get_supported_kernel_block_sizes() == [256]


def test_engines_with_drafts_keep_vllm_builders_but_for_index_keys():
    """DeepGEMM plans nothing for an indexer that is replaced."""
    config = engine()
    config.speculative_config = SimpleNamespace()
    module = adopted(CSA, config)
    assert module.get_attn_backend() is DeepseekV4FlashMLABackend
    assert type(module.indexer.k_cache) is step_metadata.KeysCache
    assert type(module.compressor.state_cache) is CompressorStateCache
    assert module.swa_cache_layer.backend_cls is DeepseekSparseSWAFlashMLABackend


def test_an_indexer_that_is_left_keeps_vllm_builder():
    module = modules.vllm_module(own_layer(CSA, 0), Sizes())
    module.indexer.k_cache = modules.bare(DeepseekV4IndexerCache)
    module.indexer.indexer_op.candidate_blocks = torch.zeros(1)
    model = torch.nn.Module()
    model.attn = module
    attention.adopt(model, Adoption(engine(), Switches()))
    assert type(module.indexer.k_cache) is DeepseekV4IndexerCache
    assert module.get_attn_backend() is step_metadata.EntriesBackend


def common() -> CommonAttentionMetadata:
    return CommonAttentionMetadata(
        query_start_loc=torch.tensor([0, 4, 5]),
        query_start_loc_cpu=torch.tensor([0, 4, 5]),
        seq_lens=torch.tensor([9, 300]),
        num_reqs=2,
        num_actual_tokens=5,
        max_query_len=4,
        max_seq_len=300,
        block_table_tensor=torch.ones(2, 3, dtype=torch.int32),
        slot_mapping=torch.zeros(8, dtype=torch.int64),
        _token_to_req_indices_cache=torch.tensor([0, 0, 0, 0, 1], dtype=torch.int32),
    )


def builder_of(cls: type, ratio: int) -> SimpleNamespace:
    builder = cls.__new__(cls)
    builder.kv_cache_spec = SimpleNamespace(num_states=256 // ratio, block_size=256)
    builder.compress_ratio, builder.topk_tokens = ratio, 512
    builder.req_id_per_token_buffer = torch.zeros(16, dtype=torch.int32)
    return builder


def test_no_slots_are_found_and_nothing_is_planned(monkeypatch):
    """No kernel of DeepGEMM, whose plan vLLM makes in every step."""
    for name in ("get_paged_mqa_logits_metadata", "split_decodes_and_prefills"):
        monkeypatch.setattr(vllm_indexer, name, lambda *args, **options: pytest.fail("planned"))
    step = common()
    entries, keys, others = (
        builder_of(cls, ratio).build(0, step)
        for cls, ratio in (
            (step_metadata.EntriesBuilder, 4),
            (step_metadata.KeysBuilder, 4),
            (step_metadata.EntriesBuilder, 128),
        )
    )
    for made in (entries, keys, others):
        assert made.block_table is step.block_table_tensor
        assert made.max_seq_len == 300
        assert made.slot_mapping is None
    assert (keys.decode, keys.prefill) == (None, None)
    assert entries.req_id_per_token.tolist() == [0, 0, 0, 0, 1]
    assert entries.c128a_global_decode_topk_indices is None


def test_states_have_vllm_tables():
    step = common()
    builder = step_metadata.StatesBuilder.__new__(step_metadata.StatesBuilder)
    builder.block_size, builder.token_to_req_indices = 8, torch.zeros(16, dtype=torch.int32)
    made = builder.build(0, step)
    assert made.block_table is step.block_table_tensor
    assert made.slot_mapping is step.slot_mapping
    assert made.token_to_req_indices.tolist() == [0, 0, 0, 0, 1]
    assert made.block_size == 8


def test_windows_have_no_plans_and_no_slots():
    step = common()
    builder = step_metadata.WindowBuilder.__new__(step_metadata.WindowBuilder)
    builder.block_size, builder.token_to_req_indices = 64, torch.zeros(16, dtype=torch.int32)
    made = builder.build(0, step)
    assert made.block_table is step.block_table_tensor
    assert made.slot_mapping is step.slot_mapping
    assert (made.num_decode_tokens, made.num_prefill_tokens, made.block_size) == (5, 0, 64)
    assert made.decode_swa_indices is None
    assert made.is_valid_token is None
    assert made.tile_sched_c4a is None
    with pytest.raises(ValueError, match="replay_start is a tensor, expected None"):
        builder.build(0, step, replay_start=torch.zeros(2))


def caches_of(module: attention.Attention) -> list[str]:
    """Names of the caches of entries and keys that close with a token."""
    names = [module.prefix] if module.compressor is not None else []
    return names + ([module.indexer.k_cache.prefix] if module.indexer is not None else [])


@pytest.mark.parametrize("layer_type", [CSA, HCA])
def test_a_compressor_that_is_left_keeps_vllm_builders(layer_type, monkeypatch):
    """It reads the slots of entries, and vLLM's builders find these."""
    monkeypatch.setattr(compressor, "reason_against", lambda module: "no")
    module = adopted(layer_type, engine())
    assert module.get_attn_backend() is DeepseekV4FlashMLABackend
    assert type(module.compressor.state_cache) is CompressorStateCache
    assert module.swa_cache_layer.backend_cls is DeepseekSparseSWAFlashMLABackend


def test_slots_that_were_not_made_raise():
    """Slots cannot be made on a side stream, but their first reader may run on one."""
    context = ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={})
    with (
        override_forward_context(context),
        pytest.raises(RuntimeError, match="slots of entries at ratio 4 were not made"),
    ):
        attention_step.stored_slots(torch.zeros(1, 1), 64, 4)


@pytest.mark.parametrize("layer_type", [SLIDING, CSA, HCA])
def test_layers_give_the_same_without_slots_of_vllm(layer_type, products_in_float32):
    """Windows that are full, that are not, and padding; the order of a short window differs.

    Beside drafts only index keys are without, which changes no bit.
    """
    layer, sizes = own_layer(layer_type, 1, ratio=128), Sizes()
    steps = [
        Step([(0, 0, 140), (1, 0, 9)], 0),
        Step([(0, 140, 1), (1, 9, 3), (2, 0, 17)], 2),
        Step([(0, 141, 1), (1, 12, 1)], 2, 2),
    ]
    results = {}
    for own in ("none", "keys", "all"):
        module = modules.vllm_module(layer, sizes)
        attention.adopt_attention(module)
        if module.compressor is not None:
            compressor.adopt_compressor(module.compressor)
        if module.indexer is not None:
            indexer.adopt_indexer(module.indexer)
        tables, outs = Tables(module, sizes, 0), []
        for step, x in zip(steps, inputs_of(layer, steps, 0), strict=True):
            made, positions = modules.metadata(module, tables, step, WINDOW)
            window = made[module.swa_cache_layer.prefix]
            count = window.num_decode_tokens + window.num_prefill_tokens
            if own == "keys" and module.indexer is not None:
                made[module.indexer.k_cache.prefix].slot_mapping = None
            if own == "all":
                made[module.swa_cache_layer.prefix] = DeepseekSparseSWAMetadata(
                    block_table=window.block_table,
                    slot_mapping=window.slot_mapping,
                    block_size=window.block_size,
                    token_to_req_indices=window.token_to_req_indices,
                    num_decode_tokens=count,
                )
                for cache in caches_of(module):
                    made[cache].slot_mapping = None
            out = modules.run(module, made, positions, x)
            outs.append(out[: count - step.padding])
        results[own] = outs
    for theirs, keys, mine in zip(*results.values(), strict=True):
        assert_close(mine, theirs)
        assert_bitwise(keys, theirs)
