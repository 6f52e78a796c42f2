"""Every layer: transformers' contract, compilation, storage, refusals, and the pitfalls."""

from __future__ import annotations

import copy
import inspect
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsv4 import layers
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.kv_cache.paged_cache import Batch, CacheStep
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.testing.configs import chunkings, tiny_configs
from dsv4.testing.models import random_model, randomize_, transformers_twin

CONFIG = ModelConfig.tiny(numerics="transformers")
RELATIVE = 1e-5
LAYER_OF = {kind: CONFIG.layer_types.index(kind) for kind in (SLIDING, CSA, HCA)}
SHARED_NAMES = [
    "RMSNorm",
    "UnweightedRMSNorm",
    "RotaryEmbedding",
    "GroupedLinear",
    "HCACompressor",
    "IndexerScorer",
    "Indexer",
    "CSACompressor",
    "Attention",
    "HyperConnection",
    "HyperHead",
    "MLP",
    "Experts",
    "TopKRouter",
    "HashRouter",
    "SparseMoeBlock",
    "DecoderLayer",
]


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(a: torch.Tensor, b: torch.Tensor, relative: float = RELATIVE) -> bool:
    return bool((a - b).norm() <= relative * b.norm())


@pytest.fixture(scope="module")
def pair() -> tuple[DeepseekV4ForCausalLM, nn.Module]:
    model = random_model(CONFIG, 7)
    return model, transformers_twin(model)


@pytest.mark.parametrize("name", SHARED_NAMES)
def test_names_constructors_and_parameters_are_transformers(name: str) -> None:
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    config = DeepseekV4Config(**CONFIG.to_transformers_dict())
    arguments = {
        "RMSNorm": (24,),
        "UnweightedRMSNorm": (),
        "GroupedLinear": (16, 24, 4),
        "Attention": (config, 1),
        "SparseMoeBlock": (config, 0),
        "DecoderLayer": (config, 2),
    }.get(name, (config,))
    ours = getattr(layers, f"DeepseekV4{name}")
    their = getattr(theirs, f"DeepseekV4{name}")
    mine, other = ours(*arguments).state_dict(), their(*arguments).state_dict()
    assert {k: v.shape for k, v in mine.items()} == {k: v.shape for k, v in other.items()}
    expected = [p for p in inspect.signature(their.__init__).parameters if p != "kwargs"]
    actual = list(inspect.signature(ours.__init__).parameters)
    assert actual[: len(expected)] == expected or name in ("Linear", "GroupedLinear")


def test_each_layer_equals_transformers(pair: tuple[DeepseekV4ForCausalLM, nn.Module]) -> None:
    ours, theirs = pair[0].model, pair[1].model
    x = normal(0, 2, 37, CONFIG.hidden_size)
    streams = normal(1, 2, 37, CONFIG.hc_mult, CONFIG.hidden_size)
    ids = torch.randint(0, CONFIG.vocab_size, (2, 37))
    positions = torch.arange(37)[None]
    with torch.no_grad():
        for label in ("main", "compress"):
            got = ours.rotary_emb(x, positions, label)
            expected = theirs.rotary_emb(x, positions, label)
            assert all(close(a, b) for a, b in zip(got, expected, strict=True))
        for i, (a, b) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
            assert close(a.input_layernorm(x), b.input_layernorm(x))
            for got, expected in zip(a.attn_hc(streams), b.attn_hc(streams), strict=True):
                assert close(got, expected)
            routed = (x, ids) if CONFIG.is_hash(i) else (x,)
            for got, expected in zip(a.mlp.gate(*routed), b.mlp.gate(*routed), strict=True):
                order = slice(None)
                assert close(
                    got.double().sort(-1).values[order], expected.double().sort(-1).values[order]
                )
            assert close(a.mlp.shared_experts(x), b.mlp.shared_experts(x))
            assert close(a.mlp(x, ids), b.mlp(x, ids))
            if a.self_attn.compressor is not None:
                _compare_compressors(a.self_attn, b.self_attn, x, positions, i)
        assert close(ours.hc_head(streams), theirs.hc_head(streams))


def _compare_compressors(
    ours: nn.Module, theirs: nn.Module, x: torch.Tensor, positions: torch.Tensor, layer: int
) -> None:
    residual = ours.q_a_norm(ours.q_a_proj(x))
    entries, bias = ours.compressor(x, residual, positions, None, layer)
    expected, expected_bias = theirs.compressor(x, residual, positions, None, layer)
    assert close(entries, expected)
    assert torch.equal(bias.expand_as(expected_bias), expected_bias)
    if ours.layer_type == CSA:
        actual = ours.compressor.indexer(x, residual, positions, None, layer)
        expected_tensor = theirs.compressor.indexer(x, residual, positions, None, layer)
        assert torch.equal(actual.sort(-1).values, expected_tensor.sort(-1).values)
        q = normal(3, 2, 5, CONFIG.index_n_heads, CONFIG.index_head_dim)
        keys = normal(4, 2, 6, CONFIG.index_head_dim)
        assert close(
            ours.compressor.indexer.scorer(q, keys, x[:, :5]),
            theirs.compressor.indexer.scorer(q, keys, x[:, :5]),
        )


@given(config=tiny_configs(numerics="transformers"), seed=st.integers(0, 2**31), data=st.data())
@settings(max_examples=10)
def test_layers_work_with_transformers_own_cache(
    config: ModelConfig, seed: int, data: st.DataObject
) -> None:
    """Attention of each type, chunk by chunk, each side with a DynamicCache of its own."""
    from transformers import DynamicCache
    from transformers.masking_utils import create_sliding_window_causal_mask

    # With a window of 1 transformers' cache keeps every key (it slices [-0:]) and disagrees with
    # its own mask.
    config = config.replace(sliding_window=max(2, config.sliding_window))
    model = random_model(config, seed)
    theirs = transformers_twin(model)
    caches = [DynamicCache(config=theirs.config) for _ in range(2)]
    x = normal(seed, 2, 33, config.hidden_size)
    at = 0
    with torch.no_grad():
        for size in data.draw(chunkings(33)):
            piece, positions = x[:, at : at + size], torch.arange(at, at + size)[None]
            mask = create_sliding_window_causal_mask(
                config=theirs.config,
                inputs_embeds=piece,
                attention_mask=None,
                past_key_values=caches[1],
                position_ids=positions,
            )
            tables = {
                label: theirs.model.rotary_emb(piece, positions, label)
                for label in ("main", "compress")
            }
            for a, b in zip(model.model.layers, theirs.model.layers, strict=True):
                got, weights = a.self_attn(piece, tables, positions, mask, caches[0])
                expected, _ = b.self_attn(piece, tables, positions, mask, caches[1])
                assert weights is None
                assert close(got, expected)
            at += size


def _calls(config: ModelConfig) -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    model = random_model(config, 3, mtp=True)
    x = normal(0, 2, 19, config.hidden_size)
    streams = normal(1, 2, 19, config.hc_mult, config.hidden_size)
    ids = torch.randint(0, config.vocab_size, (2, 19))
    positions = torch.arange(19)[None]
    by_type = dict(zip(config.layer_types, model.model.layers, strict=False))
    attention = {kind: layer.self_attn for kind, layer in by_type.items()}
    residual = attention[SLIDING].q_a_proj(x)
    moe, hashed = model.model.layers[-1].mlp, model.model.layers[0].mlp
    return {
        "norm": (model.model.norm, (x,)),
        "head norm": (attention[CSA].q_b_norm, (streams,)),
        "rotary": (model.model.rotary_emb, (x, positions, "compress")),
        "linear": (moe.shared_experts.gate_proj, (x,)),
        "grouped linear": (attention[CSA].o_a_proj, (normal(2, 2, 3, 2, 128),)),
        "hca": (attention[HCA].compressor, (x, residual, positions, None, 2)),
        "csa": (attention[CSA].compressor, (x, residual, positions, None, 1)),
        "indexer": (attention[CSA].compressor.indexer, (x, residual, positions, None, 1)),
        **{f"attention {kind}": (module, (x,)) for kind, module in attention.items()},
        "hyper connection": (by_type[CSA].attn_hc, (streams,)),
        "hyper head": (model.model.hc_head, (streams,)),
        "mlp": (moe.shared_experts, (x,)),
        "top-k router": (moe.gate, (x,)),
        "hash router": (hashed.gate, (x, ids)),
        "experts": (moe.experts, (x[0], torch.randint(0, 8, (19, 2)), x[0, :, :2])),
        "moe": (moe, (x,)),
        "hash moe": (hashed, (x, ids)),
        **{f"layer {kind}": (module, (streams, ids)) for kind, module in by_type.items()},
        "mtp": (_WithIds(model.mtp[0]), (streams, x, ids)),
    }


class _WithIds(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, streams: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> tuple:
        return self.inner(streams, x, input_ids=ids)


_CALLS = list(_calls(ModelConfig.tiny()))


# What ``quantize_`` leaves as it is.
_WITHOUT_WEIGHTS = (
    *("norm", "head norm", "rotary", "hyper connection", "hyper head"),
    *("top-k router", "hash router"),
)


def _case(name: str, format: str | None) -> object:
    """With plain weights in the nightly profile, where others are; in all, that of the model."""
    rare = format is None and name not in _WITHOUT_WEIGHTS
    return pytest.param(name, format, marks=[pytest.mark.nightly] if rare else [])


@pytest.mark.parametrize(
    ("name", "format"), [_case(name, format) for name in _CALLS for format in (None, "nvfp4")]
)
def test_compiles_to_one_graph(name: str, format: str | None) -> None:
    config = ModelConfig.tiny(activation="nvfp4")
    module, arguments = _calls(config)[name]
    if format is not None:
        if not any(
            isinstance(m, (layers.Linear, layers.DeepseekV4Experts)) for m in module.modules()
        ):
            pytest.skip("has no weight to quantise")
        layers.quantize_(module, format)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = module(*arguments)
        actual = torch.compile(module, fullgraph=True, backend="aot_eager")(*arguments)
    for a, b in zip(_flat(actual), _flat(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def _flat(out: object) -> list[torch.Tensor]:
    items = out if isinstance(out, tuple) else (out,)
    return [item for item in items if item is not None]


@pytest.mark.slow
def test_the_paged_path_compiles_to_one_graph() -> None:
    model = random_model(ModelConfig.tiny(), 1)
    outputs = []
    for run in (lambda m: m, lambda m: torch.compile(m, fullgraph=True, backend="aot_eager")):
        cache = model.new_cache(2, 64, 16)
        rows = torch.tensor([cache.allocate() for _ in range(2)])
        step = CacheStep(cache, Batch.from_lengths([3, 9], cache.lengths[rows], rows))
        torch._dynamo.reset()
        with torch.no_grad():
            outputs.append(run(model.model)(torch.arange(12)[None], None, step)[0])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)


@pytest.mark.parametrize("format", [None, "nvfp4", "mxfp4", "fp8_block"])
def test_meta_and_strict_state_dict(format: str | None) -> None:
    config = ModelConfig.tiny(moe_intermediate_size=128)
    source = random_model(config, 2, mtp=True)
    with torch.device("meta"):
        target = DeepseekV4ForCausalLM(config)
    assert all(t.is_meta for t in target.state_dict().values())
    if format is not None:
        layers.quantize_(source, format)
        for module in target.modules():
            if isinstance(module, (layers.Linear, layers.DeepseekV4Experts)):
                module.to_format(format)
    target.load_state_dict(source.state_dict(), strict=True, assign=True)
    ids = torch.arange(23)[None]
    with torch.no_grad():
        assert torch.equal(source(ids), target(ids))
    again = copy.deepcopy(target)
    with torch.no_grad():
        assert torch.equal(again(ids), source(ids))
    with pytest.raises(RuntimeError, match="Missing key"):
        target.load_state_dict({}, strict=True)
    extra = {**source.state_dict(), "model.surprise": torch.zeros(1)}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        target.load_state_dict(extra, strict=True)


def test_saves_and_loads_with_torch() -> None:
    model = random_model(ModelConfig.tiny(), 2)
    layers.quantize_(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(torch.equal(_bytes(a), _bytes(state[k])) for k, a in model.state_dict().items())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def test_casting_a_model_keeps_what_must_not_be_cast() -> None:
    model = random_model(ModelConfig.tiny(), 2)
    layers.quantize_(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for cast in (torch.bfloat16, torch.float16):
        model.to(cast)
    after = model.state_dict()
    unchanged = [k for k in before if before[k].dtype == after[k].dtype]
    for name in ("fn", "base", "scale", "sinks", "position_bias", "e_score_correction_bias"):
        assert any(k.endswith(f".{name}") for k in unchanged), name
    assert all(torch.equal(_bytes(before[k]), _bytes(after[k])) for k in unchanged)
    cast = {k.rsplit(".", 2)[-2] + "." + k.rsplit(".", 2)[-1] for k in before if k not in unchanged}
    assert not any("scale" in name for name in cast)
    assert model.to(torch.float64).model.layers[0].attn_hc.fn.dtype == torch.float64


def test_printing_a_model_says_what_is_quantised() -> None:
    model = random_model(ModelConfig.tiny(), 2)
    layers.quantize_(model, "nvfp4", ["*.mlp.experts"])
    text = repr(model)
    assert "8 experts, 64 -> 32, nvfp4, activation=bf16" in text
    assert "plain" in text


def test_each_layer_refuses_wrong_shapes_and_dtypes() -> None:
    calls = _calls(ModelConfig.tiny())
    refused = {
        "norm": (torch.zeros(2, 5),),
        "linear": (torch.zeros(2, 5),),
        "grouped linear": (torch.zeros(2, 3, 128),),
        f"attention {SLIDING}": (torch.zeros(2, 3, 5),),
        f"attention {CSA}": (torch.zeros(3, 64),),
        "hyper connection": (torch.zeros(2, 3, 3, 64),),
        "hyper head": (torch.zeros(2, 3, 4, 65),),
        "mlp": (torch.zeros(2, 63),),
        "top-k router": (torch.zeros(2, 63),),
        "hash router": (torch.zeros(1, 2, 64), torch.zeros(1, 3, dtype=torch.long)),
        "experts": (torch.zeros(3, 64), torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 2)),
        "moe": (torch.zeros(1, 2, 63),),
        **{
            name: (torch.zeros(1, 3, 63), torch.zeros(1, 3, 32), torch.arange(3)[None], None, 1)
            for name in ("hca", "csa", "indexer")
        },
        f"layer {CSA}": (torch.zeros(1, 3, 4, 63), torch.zeros(1, 3, dtype=torch.long)),
        "mtp": (torch.zeros(1, 3, 4, 64), torch.zeros(1, 3, 63), torch.zeros(1, 3).long()),
    }
    for name, arguments in refused.items():
        with pytest.raises(ValueError, match="wanted"):
            calls[name][0](*arguments)
    integers = torch.zeros(1, 2, 64, dtype=torch.long)
    positions = torch.arange(2)[None]
    wrong = {
        "norm": (integers,),
        "head norm": (integers,),
        "linear": (integers,),
        "grouped linear": (torch.zeros(1, 2, 128, dtype=torch.float64),),
        "hca": (integers, integers, positions, None, 2),
        "csa": (integers, integers, positions, None, 1),
        "indexer": (integers, integers, positions, None, 1),
        f"attention {SLIDING}": (integers,),
        "hyper connection": (torch.zeros(1, 2, 4, 64, dtype=torch.long),),
        "hyper head": (torch.zeros(1, 2, 4, 64, dtype=torch.long),),
        "mlp": (integers,),
        "top-k router": (integers,),
        "hash router": (torch.zeros(1, 2, 64), torch.zeros(1, 2)),
        "experts": (torch.zeros(2, 64), torch.zeros(2, 2), torch.zeros(2, 2)),
        "moe": (integers,),
        "hash moe": (torch.zeros(1, 2, 64), torch.zeros(1, 2)),
        f"layer {SLIDING}": (torch.zeros(1, 2, 4, 64), torch.zeros(1, 2)),
        "mtp": (torch.zeros(1, 2, 4, 64), integers, positions),
    }
    for name, arguments in wrong.items():
        with pytest.raises(TypeError, match=r"dtype .* wanted"):
            calls[name][0](*arguments)


def test_attention_refuses_a_mask_that_does_not_fit() -> None:
    attention = random_model(ModelConfig.tiny()).model.layers[0].self_attn
    x = torch.zeros(2, 3, 64)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 3\], wanted"):
        attention(x, attention_mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 1, 2, 3\], wanted"):
        attention(x, attention_mask=torch.zeros(1, 1, 2, 3))


@given(st.integers(0, 3), st.integers(0, 5), st.lists(st.integers(0, 6), max_size=3))
@settings(max_examples=20)
def test_positions_have_a_shape_that_the_tokens_have(batch: int, tokens: int, shape: list) -> None:
    attention = layers.DeepseekV4Attention(CONFIG, 0).requires_grad_(False)
    x = torch.zeros(batch, tokens, CONFIG.hidden_size)
    positions = torch.zeros(shape, dtype=torch.int64)
    if tuple(shape) in ((batch, tokens), (1, tokens), (tokens,)):
        assert attention(x, position_ids=positions)[0].shape == x.shape
        return
    with pytest.raises(ValueError, match=r"position_ids has shape \[.*\], wanted \["):
        attention(x, position_ids=positions)


def test_a_rotary_embedding_makes_its_frequencies_on_the_device_that_is_named() -> None:
    assert not layers.DeepseekV4RotaryEmbedding(CONFIG)._frequencies
    made = layers.DeepseekV4RotaryEmbedding(CONFIG, device="cpu")
    assert {*made._frequencies} == {(torch.device("cpu"), label) for label in ("main", "compress")}


def test_constructors_refuse() -> None:
    with pytest.raises(ValueError, match="bias is True"):
        layers.Linear(4, 4, bias=True)
    with pytest.raises(ValueError, match="activation is 'fp4'"):
        layers.Linear(4, 4, activation="fp4")
    with pytest.raises(ValueError, match="out_features is 6, wanted a multiple of 4"):
        layers.DeepseekV4GroupedLinear(4, 6, 4)
    with pytest.raises(ValueError, match="layer_idx is 9"):
        layers.DeepseekV4Attention(ModelConfig.tiny(), 9)
    with pytest.raises(ValueError, match="layer_type is 'csa'"):
        layers.DeepseekV4RotaryEmbedding(CONFIG)(torch.zeros(1), torch.zeros(1).long(), "csa")


def _attention(kind: str, **changes: object) -> nn.Module:
    config = ModelConfig.tiny(layer_types=(kind,), numerics="transformers", **changes)
    module = layers.DeepseekV4Attention(config, 0).double().eval().requires_grad_(False)
    return randomize_(module, 11)


def _explicit_attention(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One sequence ``[S, H]``, token by token and head by head, by formulas alone.

    Specification, sections 4.2 and 4.3.
    """
    config = module.config
    rope = config.rope(0)
    frequencies = rope.inv_freq()
    tail = config.qk_rope_head_dim

    def rotate(v: torch.Tensor, position: int, sign: float = 1.0) -> torch.Tensor:
        # The table is float32 by definition, so it is here too.
        angle = torch.tensor(float(position)) * frequencies
        turn = torch.complex(angle.cos().double(), sign * angle.sin().double())
        pairs = torch.view_as_complex(v[..., -tail:].reshape(*v.shape[:-1], tail // 2, 2))
        rotated = torch.view_as_real(pairs * turn).flatten(-2)
        return torch.cat([v[..., :-tail], rotated], -1)

    def rms(v: torch.Tensor, weight: torch.Tensor | float = 1.0) -> torch.Tensor:
        return weight * v / torch.sqrt(v.square().mean(-1, keepdim=True) + config.rms_norm_eps)

    count = x.shape[0]
    residual = rms(x @ module.q_a_proj.weight.T, module.q_a_norm.weight)
    q = rms((residual @ module.q_b_proj.weight.T).view(count, -1, config.head_dim))
    kv = rms(x @ module.kv_proj.weight.T, module.kv_norm.weight)
    kv = torch.stack([rotate(kv[p], p) for p in range(count)])
    entries, ratio = _explicit_entries(module, x, rotate, rms)
    out = []
    for p in range(count):
        keys = [kv[j] for j in range(max(0, p - config.sliding_window + 1), p + 1)]
        keys += entries[: (p + 1) // ratio] if ratio else []
        stacked = torch.stack(keys)
        scores = rotate(q[p], p) @ stacked.T * config.head_dim**-0.5
        weights = torch.cat([scores, module.sinks[:, None]], 1).softmax(1)[:, :-1]
        heads = rotate(weights @ stacked, p, -1.0)
        groups = heads.reshape(config.o_groups, -1)
        low = torch.cat(
            [
                w @ g
                for w, g in zip(module.o_a_proj.weight.chunk(config.o_groups), groups, strict=True)
            ]
        )
        out.append(module.o_b_proj.weight @ low)
    return torch.stack(out)


def _explicit_entries(module: nn.Module, x: torch.Tensor, rotate, rms) -> tuple[list, int]:
    compressor = module.compressor
    if compressor is None:
        return [], 0
    m, d = compressor.compress_rate, compressor.head_dim
    kv, gate = x @ compressor.kv_proj.weight.T, x @ compressor.gate_proj.weight.T
    entries = []
    for w in range(x.shape[0] // m):
        slots = []
        for t in range(m * (w - 1), m * (w + 1)):
            current = t >= m * w
            if t < 0 or (not current and not compressor.overlap):
                continue
            half = slice(None)
            if compressor.overlap:
                half = slice(d, 2 * d) if current else slice(0, d)
            bias = compressor.position_bias[t % m]
            slots.append((kv[t, half], gate[t, half] + bias[half]))
        values, scores = (torch.stack(s) for s in zip(*slots, strict=True))
        pooled = rms((scores.softmax(0) * values).sum(0), compressor.kv_norm.weight)
        entries.append(rotate(pooled, m * w))
    return entries, m


@pytest.mark.parametrize("kind", [SLIDING, CSA, HCA])
@given(seed=st.integers(0, 2**31))
@settings(max_examples=8)
def test_pitfalls_1_2_3_4_5_6_13_14_attention_is_its_formula(kind: str, seed: int) -> None:
    """Each of these pitfalls changes a line of the explicit form, so each breaks the equality.

    Base per layer type, amplitude, entry positions, inverse rotation, trailing interleaved pairs,
    two q norms, which entries are visible, the sink: pitfalls 1, 2, 3, 4, 5, 6, 13 and 14.
    """
    module = _attention(kind, index_topk=64)
    x = normal(seed, 21, module.config.hidden_size, dtype=torch.float64)
    result, _ = module(x[None])
    assert close(result[0], _explicit_attention(module, x), 1e-12)


def test_pitfall_1_each_layer_type_has_its_own_table() -> None:
    config = ModelConfig.flash()
    with torch.device("meta"):
        kinds = {i: layers.DeepseekV4Attention(config, i).rope_layer_type for i in (0, 2, 3, 43)}
    assert kinds == {0: "main", 2: "compress", 3: "compress", 43: "main"}
    rotary = layers.DeepseekV4RotaryEmbedding(config)
    assert rotary.parameters_of["main"].theta == 10000
    assert rotary.parameters_of["main"].factor is None
    assert rotary.parameters_of["compress"].theta == 160000
    assert rotary.parameters_of["compress"].factor == 16


def test_pitfall_12_hash_layers_need_token_ids() -> None:
    config = ModelConfig.tiny()
    model = random_model(config, 1)
    x = torch.zeros(1, 3, config.hidden_size)
    with pytest.raises(ValueError, match="input_ids is None"):
        model.model.layers[0].mlp(x)
    streams = torch.zeros(1, 3, config.hc_mult, config.hidden_size)
    with pytest.raises(ValueError, match="input_ids is None"):
        model.model.layers[0](streams)


def test_pitfall_9_the_shared_expert_clamps_too() -> None:
    config = ModelConfig.tiny()
    mlp = randomize_(layers.DeepseekV4MLP(config).double().requires_grad_(False), 4)
    x = 40 * normal(4, 6, config.hidden_size, dtype=torch.float64)
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    limit = config.swiglu_limit
    assert (gate > limit).any()
    assert (gate < -limit).any()
    assert (up.abs() > limit).any()
    inner = nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    assert close(mlp(x), inner @ mlp.down_proj.weight.T, 1e-12)


def test_pitfall_7_the_layer_mixes_streams_by_the_transpose() -> None:
    config = ModelConfig.tiny()
    model = random_model(config, 6, torch.float64)
    hc = model.model.layers[1].attn_hc
    streams = normal(5, 1, 2, config.hc_mult, config.hidden_size, dtype=torch.float64)
    y = normal(6, 1, 2, config.hidden_size, dtype=torch.float64)
    post, comb, _ = hc(streams)
    expected = torch.stack(
        [
            post[..., k, None] * y
            + sum(comb[..., j, k, None] * streams[..., j, :] for j in range(config.hc_mult))
            for k in range(config.hc_mult)
        ],
        -2,
    )
    assert close(hc.post(y, streams, post, comb), expected, 1e-12)


@pytest.mark.parametrize("kind", [SLIDING, CSA, HCA])
def test_a_nan_token_does_not_reach_other_sequences(kind: str) -> None:
    config = ModelConfig.tiny(layer_types=(kind,))
    layer = randomize_(layers.DeepseekV4DecoderLayer(config, 0).requires_grad_(False), 8)
    streams = normal(8, 2, 20, config.hc_mult, config.hidden_size)
    ids = torch.randint(0, config.vocab_size, (2, 20))
    clean = layer(streams, ids)
    dirty = streams.clone()
    dirty[0, 7, 1, 3] = float("nan")
    out = layer(dirty, ids)
    assert torch.equal(out[1], clean[1])
    assert torch.equal(out[0, :7], clean[0, :7])
    assert out[0, 7].isnan().all()
