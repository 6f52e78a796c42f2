"""Metadata that replaced attention reads, from vLLM's builders, without its kernels' plans."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dsv4.config import CSA, HCA

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLABackend
from vllm.v1.attention.backends.mla import indexer as vllm_indexer

from dsv4.integrations.vllm import attention, step_metadata
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.switches import Switches
from tests.integrations.vllm import attention_modules as modules
from tests.integrations.vllm.attention_modules import Sizes
from tests.integrations.vllm.test_attention import engine, own_layer


def adopted(layer_type: str, vllm_config: SimpleNamespace) -> attention.Attention:
    module = modules.vllm_module(own_layer(layer_type, 0, ratio=128), Sizes())
    if module.indexer is not None:
        cache = modules.bare(DeepseekV4IndexerCache)
        cache.prefix, cache.kv_cache = "keys", module.indexer.k_cache.kv_cache
        module.indexer.k_cache = cache
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
    if module.indexer is not None:
        keys = module.indexer.k_cache.get_attn_backend()
        assert keys.get_builder_cls() is step_metadata.KeysBuilder
        assert keys.get_supported_kernel_block_sizes() == [256]


def test_engines_with_drafts_keep_vllm_builders():
    config = engine()
    config.speculative_config = SimpleNamespace()
    module = adopted(CSA, config)
    assert module.get_attn_backend() is DeepseekV4FlashMLABackend
    assert type(module.indexer.k_cache) is DeepseekV4IndexerCache


def test_an_indexer_that_is_left_keeps_vllm_builder():
    module = modules.vllm_module(own_layer(CSA, 0), Sizes())
    module.indexer.k_cache = modules.bare(DeepseekV4IndexerCache)
    module.indexer.indexer_op.candidate_blocks = torch.zeros(1)
    model = torch.nn.Module()
    model.attn = module
    attention.adopt(model, Adoption(engine(), Switches()))
    assert type(module.indexer.k_cache) is DeepseekV4IndexerCache
    assert module.get_attn_backend() is step_metadata.EntriesBackend


def test_keys_have_their_slots_and_nothing_is_planned(monkeypatch):
    """No kernel of DeepGEMM, whose plan vLLM makes in every step."""
    for name in ("get_paged_mqa_logits_metadata", "split_decodes_and_prefills"):
        monkeypatch.setattr(vllm_indexer, name, lambda *args, **options: pytest.fail("planned"))
    calls = []

    def slots_of(*args, **options):
        calls.append((args, options))
        return options["out"][: args[0]]

    monkeypatch.setattr(step_metadata, "get_compressed_slot_mapping", slots_of)
    builder = step_metadata.KeysBuilder.__new__(step_metadata.KeysBuilder)
    builder.kv_cache_spec = SimpleNamespace(num_states=64)
    builder.compress_ratio = 4
    builder.compressed_slot_mapping_buffer = torch.arange(16)
    common = SimpleNamespace(
        num_actual_tokens=5,
        slot_mapping=torch.zeros(8),
        query_start_loc=torch.tensor([0, 4, 5]),
        seq_lens=torch.tensor([9, 300]),
        max_seq_len=300,
        block_table_tensor=torch.ones(2, 3, dtype=torch.int32),
    )
    made = builder.build(0, common)
    ((args, options),) = calls
    assert args[5:] == (64, 4)
    assert options["out"] is builder.compressed_slot_mapping_buffer
    assert made.slot_mapping.tolist() == [0, 1, 2, 3, 4]
    assert made.block_table is common.block_table_tensor
    assert (made.max_seq_len, made.decode, made.prefill) == (300, None, None)


def test_slots_of_compressed_entries_are_not_listed():
    builder = step_metadata.EntriesBuilder.__new__(step_metadata.EntriesBuilder)
    assert builder._build_c128a_metadata(None, torch.zeros(1)) == {}
