"""vLLM's attention on this package's operators: against this package's own layer and operators."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsv4.config import CSA, HCA, SLIDING, CompressRates, ModelConfig
from dsv4.kv_cache.layer_cache import state_shape
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.kv_cache.pages import Pages
from dsv4.layers.attention import DeepseekV4Attention as Layer
from dsv4.ops.compressor import compress_write
from dsv4.ops.indexer import indexer_select, quantize_index_queries
from dsv4.ops.rope import rope_tables
from dsv4.testing.assertions import assert_bitwise, assert_within_budget
from dsv4.testing.strategies import generator, normal, seeds

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.models.deepseek_v4.attention import DeepseekV4Indexer
from vllm.models.deepseek_v4.compressor import DeepseekCompressor
from vllm.models.deepseek_v4.nvidia.flashinfer_sparse import DeepseekV4FlashInferMLAAttention

from dsv4.integrations.vllm import attention, compressor, indexer, places
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.attention_step import Tokens, columns_used, shared
from dsv4.integrations.vllm.report import Report
from dsv4.integrations.vllm.switches import Switches
from tests.integrations.vllm import attention_modules as modules
from tests.integrations.vllm.attention_modules import Sizes, Step, Tables

BF16 = torch.bfloat16
WINDOW = 24


@pytest.fixture(autouse=True)
def products_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.mm(..., out_dtype=)``, which a CPU does not have."""
    mm = torch.mm

    def with_out_dtype(x: Any, w: Any, *, out_dtype: Any = None) -> torch.Tensor:
        return mm(x, w) if out_dtype is None else mm(x.to(out_dtype), w.to(out_dtype))

    monkeypatch.setattr(torch, "mm", with_out_dtype)


def own_layer(layer_type: str, seed: int, ratio: int = 8) -> Layer:
    config = ModelConfig.tiny(
        layer_types=(layer_type,),
        numerics="deepseek",
        head_dim=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        index_n_heads=4,
        index_topk=512,
        sliding_window=WINDOW,
        compress_rates=CompressRates(4, ratio),
        num_nextn_predict_layers=0,
    )
    layer = Layer(config, 0).to(BF16)
    gen = generator(seed)
    for parameter in layer.parameters():
        values = torch.randn(parameter.shape, generator=gen)
        if parameter.dim() == 2:
            values *= parameter.shape[1] ** -0.5
        parameter.data = values.to(parameter.dtype)
        parameter.requires_grad = False
    return layer


def adopted(layer: Layer, sizes: Sizes) -> Any:
    module = modules.vllm_module(layer, sizes)
    attention.adopt_attention(module)
    if module.compressor is not None:
        compressor.adopt_compressor(module.compressor)
    if module.indexer is not None:
        indexer.adopt_indexer(module.indexer)
    return module


@st.composite
def runs(draw: st.DrawFn, sequences: int = 3, longest: int = 40) -> list[Step]:
    """Whole and chunked prompts, decode steps of one token or more, and both together."""
    ends, steps = [0] * sequences, []
    for _ in range(draw(st.integers(1, 4))):
        kinds = draw(st.lists(st.sampled_from("dvp-"), min_size=sequences, max_size=sequences))
        decodes, prefills = [], []
        for s, kind in enumerate(kinds):
            n = {"d": 1, "v": 3, "p": draw(st.integers(1, 20)), "-": 0}[kind]
            n = min(n, longest - ends[s])
            if n:
                (prefills if kind == "p" else decodes).append((s, ends[s], n))
                ends[s] += n
        if decodes or prefills:
            padding = draw(st.integers(0, 3))
            steps.append(Step(decodes + prefills, len(decodes), padding))
    return steps


def own_outputs(
    layer: Layer,
    sizes: Sizes,
    steps: list[Step],
    inputs: Any,
    device: str = "cpu",
    cache: PagedCache | None = None,
) -> list[torch.Tensor]:
    cache = cache or PagedCache(
        layer.config,
        max_sequences=sizes.sequences,
        max_tokens=sizes.max_len,
        max_chunk=128,
        entry_format="fp8",
        device=device,
    )
    outputs = []
    for step, x in zip(steps, inputs, strict=True):
        rows, starts, lengths = zip(*step.pieces, strict=True)
        batch = Batch.from_lengths(
            lengths, torch.tensor(starts, device=device), torch.tensor(rows, device=device)
        )
        count = sum(lengths)
        with torch.inference_mode():
            out, _ = layer(x[:count].unsqueeze(0), past_key_values=CacheStep(cache, batch))
        outputs.append(out[0])
    return outputs


@pytest.mark.parametrize("takes_all", [True, False])
@pytest.mark.parametrize("layer_type", [SLIDING, CSA, HCA])
@settings(max_examples=8)
@given(seeds(), runs())
def test_a_layer_equals_this_packages_own(layer_type, takes_all, seed, steps):
    """Whatever blocks its pages lie in, and however tokens are split into steps.

    The entries are the same bytes; sums over slots are in another order, which moves a result by a
    unit in the last place of bfloat16, and another one in the projections behind it.
    """
    layer, sizes = own_layer(layer_type, seed), Sizes()
    module = adopted(layer, sizes)
    if module.indexer is not None and not takes_all:
        object.__setattr__(module.indexer, "takes_all", lambda: False)
    inputs = inputs_of(layer, steps, seed)
    expected = own_outputs(layer, sizes, steps, inputs)
    for own, out in zip(expected, outputs(module, sizes, steps, inputs, seed), strict=True):
        assert_close(out[: own.shape[0]], own)


def inputs_of(layer: Layer, steps: list[Step], seed: int) -> list[torch.Tensor]:
    counts = [sum(n for *_, n in step.pieces) + step.padding for step in steps]
    hidden = layer.config.hidden_size
    return [normal(seed + i, (n, hidden)).to(BF16) for i, n in enumerate(counts)]


def outputs(
    module: Any, sizes: Sizes, steps: list[Step], inputs: list[torch.Tensor], seed: int
) -> list[torch.Tensor]:
    """What vLLM's forward returns for steps that follow one another."""
    tables, results = Tables(module, sizes, seed), []
    for step, x in zip(steps, inputs, strict=True):
        made, positions = modules.metadata(module, tables, step, WINDOW)
        out = modules.run(module, made, positions, x)
        assert out.shape == x.shape
        results.append(out)
    return results


def assert_close(out: torch.Tensor, own: torch.Tensor, part: float = 2.0**-6) -> None:
    assert_within_budget(out, own.double(), part * own.double().abs().amax())


def test_the_ratio_of_128():
    layer, sizes = own_layer(HCA, 3, 128), Sizes()
    steps = [
        Step([(0, 0, 100)], 0),
        Step([(1, 0, 3), (0, 100, 27)], 1),
        Step([(0, 127, 1), (1, 3, 125)], 1, 2),
        Step([(0, 128, 1), (1, 128, 3)], 2),
        Step([(0, 129, 126)], 0),
        Step([(0, 255, 1)], 1),
    ]
    inputs = inputs_of(layer, steps, 0)
    expected = own_outputs(layer, sizes, steps, inputs)
    for own, out in zip(
        expected, outputs(adopted(layer, sizes), sizes, steps, inputs, 0), strict=True
    ):
        assert_close(out[: own.shape[0]], own)


MIXED = [
    Step([(0, 0, 30), (1, 0, 9)], 0),
    Step([(0, 30, 1), (1, 9, 3), (2, 0, 17)], 2),
    Step([(0, 31, 3), (1, 12, 1), (2, 17, 1)], 3, 2),
]


@pytest.mark.parametrize("fp4_keys", [False, True])
@settings(max_examples=5)
@given(seeds(), runs(), st.integers(1, 4))
def test_chosen_entries_are_those_of_the_operators(fp4_keys, seed, steps, top_k):
    """Entry numbers, bit for bit, of keys and queries in this package's own pages and state."""
    layer = own_layer(CSA, seed)
    sizes = Sizes(top_k=top_k, fp4_keys=fp4_keys)
    module, chosen = adopted(layer, sizes), []
    select = indexer.Indexer.select

    def noted(self: Any, *arguments: Any) -> torch.Tensor:
        chosen.append(select(self, *arguments))
        return chosen[-1]

    object.__setattr__(module.indexer, "takes_all", lambda: False)
    inputs = inputs_of(layer, steps, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexer.Indexer, "select", noted)
        outputs(module, sizes, steps, inputs, seed)
    expected = own_choices(layer, sizes, steps, inputs)
    for actual, own in zip(chosen, expected, strict=True):
        assert_bitwise(actual[: own.shape[0]], own[:, : actual.shape[1]])
        assert bool((actual[own.shape[0] :] < 0).all())


def own_choices(
    layer: Layer, sizes: Sizes, steps: list[Step], inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Choices by the operators, without the Hadamard transform, as vLLM's pages have keys."""
    source: Any = layer.compressor.indexer
    entry_format = "index_mxfp4" if sizes.fp4_keys else "index_fp8"
    pages = Pages.allocate(sizes.sequences, 64, 128, 0, entry_format)
    table = torch.arange(sizes.sequences).unsqueeze(1)
    state = torch.zeros(state_shape(sizes.sequences, 4, True, 128))
    frequencies = layer.rotary_emb.inv_freq(torch.device("cpu"), "compress")
    results = []
    for step, padded in zip(steps, inputs, strict=True):
        rows, starts, lengths = zip(*step.pieces, strict=True)
        batch = Batch.from_lengths(lengths, torch.tensor(starts), torch.tensor(rows))
        x = padded[: sum(lengths)]
        with torch.inference_mode():
            compress_write(
                *source._project(x),
                source.position_bias,
                state,
                batch.cu_seqlens,
                batch.starts,
                batch.sequences,
                source.kv_norm.weight,
                frequencies,
                pages,
                table,
                overlap=True,
            )
            q = source.project_queries(layer.q_a_norm(layer.q_a_proj(x)))
            queries, weights = quantize_index_queries(
                q,
                *rope_tables(batch.positions, frequencies),
                source.scorer.weights_proj(x),
                rotate=False,
                query_format=entry_format.removeprefix("index_"),
                weight_scale=128**-0.5 * source.num_heads**-0.5,
            )
            results.append(
                indexer_select(
                    queries,
                    weights,
                    pages,
                    table,
                    batch.sequence_of_token,
                    (batch.positions + 1) // 4,
                    top_k=sizes.top_k,
                )
            )
    return results


@pytest.mark.parametrize("layer_type", [SLIDING, CSA, HCA])
@pytest.mark.parametrize("way", ["eager pieces", "narrow calls"])
def test_other_ways_give_the_same_bits(layer_type, way, monkeypatch):
    """vLLM's buffer in place of a tensor of our own; slots that do not fit in one call."""
    layer, sizes = own_layer(layer_type, 1), Sizes(top_k=3)
    inputs = inputs_of(layer, MIXED, 0)
    expected = outputs(adopted(layer, sizes), sizes, MIXED, inputs, 0)
    if way == "eager pieces":
        monkeypatch.setattr(attention, "_has_eager_pieces", lambda: True)
    else:
        monkeypatch.setattr(attention, "_SLOT_BYTES", 8 * 64 * 5)
    actual = outputs(adopted(layer, sizes), sizes, MIXED, inputs, 0)
    for step, a, b in zip(MIXED, actual, expected, strict=True):
        count = a.shape[0] - step.padding
        assert_bitwise(a[:count], b[:count])


def test_eager_pieces_are_seen(monkeypatch):
    """While a graph is captured in pieces; not in a full graph, nor when nothing is captured."""
    context = ForwardContext({}, {}, {}, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE)
    assert not attention._has_eager_pieces()
    monkeypatch.setattr(BreakableCUDAGraphCapture, "is_active", lambda: True)
    assert attention._has_eager_pieces()
    with override_forward_context(context):
        assert attention._has_eager_pieces()
        context.cudagraph_runtime_mode = CUDAGraphMode.FULL
        assert not attention._has_eager_pieces()


def test_vllm_indexer_may_stay():
    """It writes its choice to vLLM's buffer, where attention finds it."""
    layer, sizes = own_layer(CSA, 1), Sizes(top_k=3)
    module, other = (adopted(layer, sizes) for _ in range(2))
    for m in (module, other):
        object.__setattr__(m.indexer, "takes_all", lambda: False)
    stays: Any = other.indexer
    inputs = inputs_of(layer, MIXED, 0)
    expected = outputs(module, sizes, MIXED, inputs, 0)

    class Stays(DeepseekV4Indexer):
        """vLLM's class, with this package's choice in place of its CUDA kernels."""

        forward = indexer.Indexer.forward
        queries = indexer.Indexer.queries
        takes_all = indexer.Indexer.takes_all
        entry_format = indexer.Indexer.entry_format

    def choose(hidden: Any, q: torch.Tensor, k: None, weights: torch.Tensor) -> None:
        metadata = get_forward_context().attn_metadata
        tokens = Tokens(metadata[other.swa_cache_layer.prefix], current["positions"], WINDOW)
        ids = indexer.Indexer.select(stays, (q, None, weights), metadata, tokens)
        other.topk_indices_buffer.fill_(-1)
        other.topk_indices_buffer[: ids.shape[0], : ids.shape[1]] = ids

    stays.__class__ = Stays
    stays.indexer_op = choose
    tables, current = Tables(other, sizes, 0), {}
    for step, x, own in zip(MIXED, inputs, expected, strict=True):
        made, current["positions"] = modules.metadata(other, tables, step, WINDOW)
        out = modules.run(other, made, current["positions"], x)
        count = x.shape[0] - step.padding
        assert_bitwise(out[:count], own[:count])


@pytest.mark.parametrize("layer_type", [SLIDING, CSA, HCA])
def test_a_profile_run_has_no_metadata(layer_type):
    layer, sizes = own_layer(layer_type, 1), Sizes()
    x = normal(0, (5, layer.config.hidden_size)).to(BF16)
    module = adopted(layer, sizes)
    assert not modules.run(module, None, torch.arange(5), x).any()
    assert not module.swa_cache_layer.kv_cache.any()


def test_graphs_share_nothing_with_their_eager_pieces(monkeypatch):
    made = []

    def make() -> object:
        made.append(object())
        return made[-1]

    with override_forward_context(ForwardContext({}, {}, {})):
        first = shared(("x",), make)
        assert shared(("x",), make) is first
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        second = shared(("x",), make)
        assert second is not first
        table = torch.zeros(2, 40, dtype=torch.int32)
        assert columns_used(table, 256, 700).shape == (2, 40)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert shared(("x",), make) is first
        assert columns_used(table, 256, 700).shape == (2, 4)
        assert columns_used(table, 256, 0).shape == (2, 1)
        assert columns_used(table, 256, 1 << 20).shape == (2, 40)
    with override_forward_context(ForwardContext({}, {}, {})):
        assert shared(("x",), make) is not first


def engine(**changes: Any) -> SimpleNamespace:
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, **changes}
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=16, user_specified_block_size=False),
        model_config=SimpleNamespace(max_model_len=512),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        parallel_config=SimpleNamespace(**parallel),
    )


def report_of(module: nn.Module, vllm_config: Any) -> Report:
    model = nn.Module()
    model.attn = module
    context = Adoption(vllm_config, Switches())
    attention.adopt(model, context)
    return context.report


def test_what_is_adopted_is_reported():
    for layer_type, kernels in (
        (SLIDING, {"attn": "sparse_attention"}),
        (
            CSA,
            {
                "attn": "sparse_attention",
                "attn.compressor": "compress_write_paged",
                "attn.indexer": "indexer_select",
                "attn.indexer.compressor": "compress_write_paged",
            },
        ),
    ):
        module = modules.vllm_module(own_layer(layer_type, 0), Sizes())
        report = report_of(module, engine())
        assert report.complete
        assert {row.place: row.kernel for row in report.rows} == kernels
        assert type(module) is attention.Attention
        assert module.padded_heads == module.n_local_heads


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("kv_cache_dtype", "bfloat16", "the KV cache is bfloat16, expected fp8_ds_mla"),
        ("compress_ratio", 2, "the compression ratio is 2, expected 1, 4 or 128"),
        ("max_image_tokens", 9, "the model sees images"),
        ("rope_head_dim", 32, "the rotary table is .*, expected float32 with 32 columns"),
        ("__class__", DeepseekV4FlashInferMLAAttention, "vLLM chose DeepseekV4FlashInferMLA"),
    ],
)
def test_what_is_left_is_reported_with_the_reason(name, value, words):
    module = modules.vllm_module(own_layer(CSA, 0), Sizes())
    setattr(module, name, value)
    before = type(module)
    (row,) = report_of(module, engine()).rows
    assert re.search(words, row.reason)
    assert type(module) is before


def test_blocks_that_a_user_asks_for_hold_whole_entries_or_the_layer_is_left():
    """Without that vLLM's configuration has 16 until the model is built, and then 256."""
    vllm_config = engine()
    module = modules.vllm_module(own_layer(HCA, 0, ratio=128), Sizes())
    assert report_of(module, vllm_config).complete
    vllm_config.cache_config.user_specified_block_size = True
    module = modules.vllm_module(own_layer(HCA, 0, ratio=128), Sizes())
    (row,) = report_of(module, vllm_config).rows
    assert row.reason == "blocks of 16 tokens are no multiple of 128"


def test_engines_that_split_contexts_are_left():
    module = modules.vllm_module(own_layer(CSA, 0), Sizes())
    (row,) = report_of(module, engine(decode_context_parallel_size=2)).rows
    assert "split between ranks" in row.reason


def test_an_indexer_that_is_left_keeps_its_compressor():
    module = modules.vllm_module(own_layer(CSA, 0), Sizes())
    module.indexer.indexer_op.candidate_blocks = torch.zeros(1)
    report = report_of(module, engine())
    assert [row.reason for row in report.rows if not row.replaced] == [
        "candidates are chosen by blocks first"
    ]
    assert type(module.indexer) is DeepseekV4Indexer
    assert type(module.indexer.compressor) is DeepseekCompressor


def test_the_places_are_vllm_own():
    assert not places.mismatches(places.ATTENTION)
