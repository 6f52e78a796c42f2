"""vLLM's own model, built and loaded on a CPU: its attention layers against this package's."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import dsv4
from dsv4.kv_cache.paged_cache import PagedCache

pytest.importorskip("vllm", reason="vLLM is not installed")
from dsv4.integrations.vllm import attention, deepseek
from tests.integrations.vllm import attention_modules as modules
from tests.integrations.vllm.attention_modules import Sizes, Step, Tables, cache_of
from tests.integrations.vllm.test_attention import (
    assert_close,
    inputs_of,
    own_outputs,
    products_in_float32,
)

build = pytest.importorskip("tests.integrations.vllm.build", reason="builds vLLM's model")
__all__ = ["products_in_float32"]
pytestmark = pytest.mark.usefixtures("vllm_world")
WINDOW = 128
STEPS = [
    Step([(0, 0, 30), (1, 0, 127)], 0),
    Step([(0, 30, 1), (1, 127, 3), (2, 0, 17)], 2),
    Step([(0, 31, 3), (1, 130, 1), (2, 17, 1)], 3, 2),
]


def bind(module: attention.Attention) -> None:
    """Give a layer the caches that vLLM's runner binds; no streams, which a CPU does not have."""
    module.aux_stream_list = None
    module.swa_cache_layer.kv_cache = cache_of(13, 64, 584)
    if module.compressor is None:
        return
    module.kv_cache = cache_of(4, 256 // module.compress_ratio, 584)
    compressors = [module.compressor]
    if module.indexer is not None:
        module.indexer.aux_stream = None
        module.indexer.k_cache.kv_cache = cache_of(4, 64, 132)
        compressors.append(module.indexer.compressor)
    for cache in (compressor.state_cache for compressor in compressors):
        shape = (3 * 256 // cache.block_size + 1, cache.block_size, cache.state_dim)
        cache.kv_cache = torch.full(shape, torch.nan)


def test_layers_of_vllm_own_model_equal_this_packages(tmp_path):
    """All entries are chosen: vLLM's index keys have no Hadamard transform, so choices differ."""
    build.checkpoint(tmp_path, "nvidia", index_topk=512)
    config = build.engine_config(tmp_path)
    config.cache_config.block_size = 16  # as on a GPU, until the model is built
    environment = {"DSV4_VLLM": "experts,linear", "DSV4_CACHE_DIR": str(tmp_path / "cache")}
    with mock.patch.dict("os.environ", environment), build.hopper(config):
        model = deepseek.DeepseekV4ForCausalLM(vllm_config=config)
        attention.adopt(model, model.dsv4)
        build.load_model(model, config)
    own = dsv4.load(tmp_path, device="cpu", dtype=torch.bfloat16, progress=False, mtp=False)
    assert model.dsv4.report.complete
    sizes = Sizes()
    for theirs, ours in zip(model.model.layers, own.model.layers, strict=True):
        module, layer = theirs.attn, ours.self_attn
        bind(module)
        tables, inputs = Tables(module, sizes, 0), inputs_of(layer, STEPS, 0)
        cache = PagedCache(
            own.config, max_sequences=3, max_tokens=256, max_chunk=128, entry_format="fp8"
        )
        expected = own_outputs(layer, sizes, STEPS, inputs, cache=cache)
        for step, x, result in zip(STEPS, inputs, expected, strict=True):
            made, positions = modules.metadata(module, tables, step, WINDOW)
            out = modules.run(module, made, positions, x)
            assert_close(out[: result.shape[0]], result)
