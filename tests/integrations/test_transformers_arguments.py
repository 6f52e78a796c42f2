"""Arguments of swapped modules: each has the effect that it has in transformers, or is refused."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4 import layers
from dsv4.config import ModelConfig
from dsv4.integrations import _arguments, _swap
from dsv4.integrations._arguments import WITHOUT_EFFECT
from dsv4.integrations.transformers import PARTS, apply, paged_cache
from dsv4.kv_cache.paged_cache import Batch, CacheStep
from dsv4.testing.models import random_model, transformers_twin

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
CONFIG = ModelConfig.tiny(numerics="transformers")
LENGTH = 13
VALUES: dict[str, Any] = {
    "num_items_in_batch": torch.tensor(3),
    "output_hidden_states": True,
    "output_router_logits": True,
    "output_attentions": False,
    "cu_seq_lens_q": torch.tensor([0, 5, 13]),
    "cu_seq_lens_k": torch.tensor([0, 5, 13]),
    "max_length_q": 5,
    "max_length_k": 5,
    "is_causal": False,
    "seq_idx": torch.zeros(1, LENGTH, dtype=torch.int32),
    "cache_position": torch.arange(3, 3 + LENGTH),
}


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    return transformers_twin(random_model(CONFIG, seed), dtype)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A swapped model and transformers' own with the same weights."""
    model, twin = model_of(), model_of()
    apply(model)
    return model, twin


def ids_of(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, CONFIG.vocab_size, (batch, length), generator=generator)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


# The list of arguments without effect --------------------------------------------------------


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
@torch.no_grad()
def test_what_has_no_effect_has_none_in_transformers_either(
    pair: tuple[Any, Any], name: str
) -> None:
    """A layer and its attention, and the whole model, which may read it, give the same."""
    x = torch.randn(1, LENGTH, CONFIG.hidden_size)
    streams = x.unsqueeze(2).expand(-1, -1, CONFIG.hc_mult, -1).contiguous()
    positions, ids = torch.arange(LENGTH)[None], ids_of(1, LENGTH)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for model in pair:
        arguments = {
            "position_embeddings": {
                label: model.model.rotary_emb(x, positions, label) for label in ("main", "compress")
            },
            "position_ids": positions,
            "attention_mask": torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(hidden, -1e9),
        }
        option = {name: VALUES[name]}
        for layer in model.model.layers:
            attention = layer.self_attn
            assert torch.equal(attention(x, **arguments, **option)[0], attention(x, **arguments)[0])
        assert torch.equal(
            layer(streams, ids, **arguments, **option), layer(streams, ids, **arguments)
        )
    actual, expected = (model(ids, **option).logits for model in pair)
    assert relative(actual, expected) <= TOLERANCE


def test_every_option_that_transformers_declares_is_known() -> None:
    from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
    from transformers.utils import TransformersKwargs

    declared = {*TransformersKwargs.__annotations__, *FlashAttentionKwargs.__annotations__}
    # position_ids is an argument of its own.
    assert declared - {"position_ids"} <= WITHOUT_EFFECT.keys()
    assert VALUES.keys() == WITHOUT_EFFECT.keys()
    assert all(WITHOUT_EFFECT.values())


@pytest.mark.parametrize("parts", [None, ("attention",), ("attention", "hyper_connection")])
@torch.no_grad()
def test_an_unknown_keyword_is_refused_by_name(parts: Any) -> None:
    model = model_of()
    apply(model, parts=parts)
    with pytest.raises(TypeError, match="unexpected keyword arguments surprise; dsv4 knows"):
        model(ids_of(1, 3), surprise=1)


def test_public_forwards_name_what_they_take() -> None:
    for name in layers.__all__:
        forward = getattr(getattr(layers, name), "forward", None)
        if forward is None:
            continue
        kinds = {p.kind for p in inspect.signature(forward).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds, name


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_both_names_of_the_cache_are_taken_alike(pair: tuple[Any, Any], name: str) -> None:
    """The attention, the decoder layer, the compressors and the indexer take both names."""
    model, _ = pair
    x, more = torch.randn(1, 9, CONFIG.hidden_size), torch.randn(1, 3, CONFIG.hidden_size)
    for layer in model.model.layers:
        attention = layer.self_attn
        whole = attention(torch.cat((x, more), 1))[0][:, 9:]
        past = transformers.DynamicCache(config=model.config)
        result = [attention(piece, **{name: past})[0] for piece in (x, more)]
        assert relative(result[1], whole) <= TOLERANCE
        with pytest.raises(TypeError, match="two names of one argument, wanted one of them"):
            attention(x, past_key_values=past, cache=transformers.DynamicCache())
        if attention.compressor is None:
            continue
        residual, positions = attention.q_a_norm(attention.q_a_proj(x)), torch.arange(9)[None]
        past = transformers.DynamicCache(config=model.config)
        index = {name: past, "layer_idx": attention.layer_idx}
        first = attention.compressor(x, residual, positions, **index)[0]
        second = attention.compressor(x, residual, positions + 9, **index)[0]
        assert second.shape[2] > first.shape[2] > 0
        with pytest.raises(TypeError, match="a cache without layer_idx, wanted both"):
            attention.compressor(x, residual, positions, **{name: past})


# Signatures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in _swap.RULES if k != "Linear"])
def test_an_argument_that_is_not_known_is_an_error_before_the_swap(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    theirs = getattr(modeling, kind)
    arguments = list(inspect.signature(theirs.forward).parameters.values())
    extra = inspect.Parameter("temperature", inspect.Parameter.KEYWORD_ONLY, default=1.0)
    named = [p for p in arguments if p.kind is not inspect.Parameter.VAR_KEYWORD]
    rest = [p for p in arguments if p.kind is inspect.Parameter.VAR_KEYWORD]

    def forward(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    forward.__signature__ = inspect.Signature([*named, extra, *rest])  # type: ignore[attr-defined]
    model = model_of()
    before = {name: id(module) for name, module in model.named_modules()}
    monkeypatch.setattr(theirs, "forward", forward)
    part = _swap.RULES[kind].part
    words = rf"{kind}\.forward of transformers {transformers.__version__}: .*'temperature'"
    # The containers of what stays would stay as well.
    with pytest.raises(TypeError, match=words):
        apply(model, parts=[part])
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert "save_pretrained" not in vars(model)
    others = [p for p in PARTS if p != part]
    assert apply(model, parts=others).replaced


def test_arguments_in_another_order_are_an_error() -> None:
    class Theirs(torch.nn.Module):
        def forward(self, input_ids: Any, hidden_states: Any) -> None:
            raise NotImplementedError

    with pytest.raises(TypeError, match="its argument 0 is 'input_ids', wanted 'hidden_states'"):
        _arguments.check_signature(Theirs, layers.DeepseekV4HashRouter)


def test_a_newer_transformers_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for version in ("5.24.0", "5.24.9", "5.17.0", "5.9999.0", "5.9999.0"):
            _arguments.warn_if_untested(version)
    assert len(caplog.records) == 1
    assert "transformers 5.9999.0 is newer than 5.24" in caplog.text


# Masks ---------------------------------------------------------------------------------------


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor:
    """Additive masks of 0 and -inf or like it, over all keys; each query sees itself."""
    seed = draw(st.integers(0, 2**16))
    share = draw(st.sampled_from([0.1, 0.5, 1.0]))
    hidden = draw(st.sampled_from([float("-inf"), torch.finfo(torch.float32).min, -1e9]))
    generator = torch.Generator().manual_seed(seed)
    shown = torch.rand(2, 1, LENGTH, LENGTH, generator=generator) < share
    shown |= torch.eye(LENGTH, dtype=torch.bool)
    if draw(st.booleans()):
        shown &= torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return torch.zeros(shown.shape).masked_fill(~shown, hidden)


@given(mask=masks(), seed=st.integers(0, 100))
@example(mask=torch.zeros(2, 1, LENGTH, LENGTH), seed=0)
@settings(max_examples=15)
def test_a_mask_shows_what_it_shows_in_transformers(
    pair: tuple[Any, Any], mask: torch.Tensor, seed: int
) -> None:
    """Beyond the window, and keys to come, too."""
    ids = ids_of(2, LENGTH, seed)
    with torch.no_grad():
        actual, expected = (m(ids, attention_mask=mask).logits for m in pair)
    assert relative(actual, expected) <= TOLERANCE


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_mask_that_cannot_be_obeyed_is_refused_and_the_cache_is_as_it_was(
    pair: tuple[Any, Any], tokens: int
) -> None:
    model, _ = pair
    ids = ids_of(1, 6 + tokens)
    past = transformers.DynamicCache(config=model.config)
    good = torch.zeros(1, 1, tokens, CONFIG.sliding_window - 1 + tokens)
    past_keys = min(CONFIG.sliding_window - 1, 6)
    good = good[..., : past_keys + tokens]
    biased, nan = good.clone(), good.clone()
    biased[..., 0], nan[..., 0] = -1.5, float("nan")
    wrong = {
        "neither 0 nor at most -10000": (biased, nan, good + 0.5),
        "is bool with 4 dimensions, wanted an additive": (good == 0,),
        r"has shape \[1, 4, .*, wanted \[1 or 1, 1": (good.expand(1, 4, -1, -1),),
        r"has shape \[1, 1, .*, wanted \[1 or 1, 1": (good[..., 1:], torch.cat((good, good), -1)),
    }
    with torch.no_grad():
        model(ids[:, :6], past_key_values=past)
        for words, cases in wrong.items():
            for mask in cases:
                with pytest.raises(ValueError, match=words):
                    model(ids[:, 6:], past_key_values=past, attention_mask=mask)
        result = model(ids[:, 6:], past_key_values=past).logits
        assert relative(result, model(ids).logits[:, 6:]) <= TOLERANCE


@torch.no_grad()
def test_a_paged_cache_refuses_masks_and_positions_that_it_would_not_obey() -> None:
    model = model_of()
    apply(model)
    ids = ids_of(2, LENGTH)
    cache = paged_cache(model, max_tokens=40, max_sequences=2)
    lower = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    band = lower & ~lower.tril(-CONFIG.sliding_window)
    hole = band.clone()
    hole[5, 4] = False
    for shown in (lower, hole, torch.ones_like(lower)):
        mask = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~shown, float("-inf"))
        with pytest.raises(ValueError, match="shows other keys than the window before each token"):
            model(ids, past_key_values=cache, attention_mask=mask)
    with pytest.raises(ValueError, match="position_ids are not those that follow"):
        model(ids, past_key_values=cache, position_ids=torch.arange(3, LENGTH + 3)[None])
    logits = model(ids[:1, :1], past_key_values=cache).logits  # a refusal leaves no rows behind
    assert relative(logits, model(ids[:1, :1]).logits) <= TOLERANCE
    cache.reset()
    mask = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~band, float("-inf"))
    positions = torch.arange(LENGTH)[None]
    result = model(ids, past_key_values=cache, attention_mask=mask, position_ids=positions).logits
    assert relative(result, model(ids).logits) <= TOLERANCE
    with pytest.raises(ValueError, match="position_ids are not those that follow"):
        model(ids[:, :1], past_key_values=cache, position_ids=torch.zeros(1, 1).long())
    late = torch.ones(2, LENGTH + 1).long()
    late[0, -1] = 0
    with pytest.raises(ValueError, match="calls a single token padding after every row has begun"):
        model(ids[:, :1], past_key_values=cache, attention_mask=late)


# Steps and positions -------------------------------------------------------------------------


def test_positions_and_masks_beside_a_step_are_refused() -> None:
    model = random_model(CONFIG)
    cache = model.new_cache(1, 32)
    row = torch.tensor([cache.allocate()])
    step = CacheStep(cache, Batch.from_lengths([5], cache.lengths[row], row))
    x, ids = torch.zeros(1, 5, CONFIG.hidden_size), ids_of(1, 5)
    positions, mask = torch.arange(5)[None], torch.zeros(1, 1, 5, 5)
    attention = model.model.layers[1].self_attn
    for call in (
        lambda: attention(x, position_ids=positions, past_key_values=step),
        lambda: model(ids, positions, step),
        lambda: model.model(ids, positions, step),
    ):
        with pytest.raises(ValueError, match="position_ids beside a CacheStep, wanted None"):
            call()
    with pytest.raises(ValueError, match="attention_mask beside a CacheStep, wanted None"):
        attention(x, attention_mask=mask, past_key_values=step)
    with torch.no_grad():
        assert relative(model(ids, None, step), model(ids)) <= TOLERANCE


@given(first=st.integers(1, 20), more=st.integers(1, 12))
@settings(max_examples=10)
def test_positions_follow_the_tokens_of_a_cache(first: int, more: int) -> None:
    """This holds in a layer alone, and in this package's model over a transformers cache."""
    model = random_model(CONFIG)
    theirs = transformers.DeepseekV4Config(**CONFIG.to_transformers_dict())
    past, layer_past = (transformers.DynamicCache(config=theirs) for _ in range(2))
    ids = ids_of(1, first + more)
    attention = model.model.layers[1].self_attn
    x = model.model.embed_tokens(ids)
    with torch.no_grad():
        model(ids[:, :first], None, past)
        result = model(ids[:, first:], None, past)
        assert relative(result, model(ids)[:, first:]) <= TOLERANCE
        attention(x[:, :first], past_key_values=layer_past)
        result = attention(x[:, first:], past_key_values=layer_past)[0]
        assert relative(result, attention(x)[0][:, first:]) <= TOLERANCE
