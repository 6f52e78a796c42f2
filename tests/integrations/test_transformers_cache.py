"""transformers' generate over this package's pages: equal to the path without them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.config import ModelConfig
from dsv4.integrations.transformers import PARTS, apply, generate_assisted, paged_cache
from dsv4.kv_cache.paged_cache import CacheFullError
from dsv4.testing.configs import chunkings, tiny_configs
from dsv4.testing.models import random_model, transformers_twin

transformers = pytest.importorskip("transformers")

EXACT = 1e-12
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}
LOGITS: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}


def swapped(
    numerics: str = "transformers", dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Any, ModelConfig]:
    config = ModelConfig.tiny(numerics="transformers")
    model: Any = transformers_twin(random_model(config, 4), dtype)
    apply(model, numerics=numerics, **options)
    return model, config


def ids_of(config: ModelConfig, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, config.vocab_size, (batch, length), generator=generator)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def assert_same(actual: Any, expected: Any, rows: slice = slice(None)) -> None:
    assert torch.equal(actual.sequences[rows, -6:], expected.sequences[:, -6:])
    for a, b in zip(actual.logits, expected.logits, strict=True):
        assert relative(a[rows], b) < EXACT


POOLS = {"pool_tokens": 768, "max_chunk": 5}


@pytest.mark.parametrize(
    ("numerics", "sizes", "options"),
    [
        ("transformers", {}, {}),
        ("deepseek", {"index_format": "index_mxfp4"}, {"do_sample": True}),
        ("transformers", POOLS, {"prefill_chunk_size": 5}),
        ("deepseek", POOLS, {"prefill_chunk_size": 5}),
    ],
)
def test_generate_equals_the_dense_path(numerics: str, sizes: Any, options: Any) -> None:
    model, config = swapped(numerics)
    ids = ids_of(config, 3, 11)
    cache = paged_cache(model, max_tokens=26, max_sequences=4, **sizes)
    outputs = []
    for past in ({"past_key_values": cache}, {}):
        torch.manual_seed(5)
        outputs.append(model.generate(ids, **past, **LOGITS, **{**GREEDY, **options}))
    assert_same(*outputs)
    assert outputs[0].past_key_values is cache
    assert cache.paged.lengths.tolist() == [16, 16, 16, 0]
    cache.reset()
    if options:
        return
    torch.manual_seed(5)
    again = model.generate(ids, past_key_values=cache, **LOGITS, **{**GREEDY, **options})
    assert torch.equal(again.sequences, outputs[0].sequences)


@pytest.mark.parametrize("numerics", ["transformers", "deepseek"])
def test_in_bfloat16_it_is_as_near_the_truth_as_the_dense_path(
    device: torch.device, numerics: str
) -> None:
    """Results are close, not the same bits: pages hold the compressors' state in float32."""
    truth_model, config = swapped(numerics)
    model = swapped(numerics, torch.bfloat16)[0].to(device)
    ids = ids_of(config, 2, 19)
    cache = paged_cache(model, max_tokens=40, max_sequences=2)
    assert cache.paged.layers[0].window.entry_format == ("plain", "fp8")[numerics == "deepseek"]
    with torch.no_grad():
        truth, dense = truth_model(ids).logits, model(ids.to(device)).logits
        pieces = ids.to(device).split([9, 1, 9], dim=1)
        result = torch.cat([model(p, past_key_values=cache).logits for p in pieces], 1)
    rows = [(x.double().cpu() - truth).norm(dim=-1).median() for x in (result, dense)]
    assert rows[0] < 1.5 * rows[1]
    assert rows[0] < 0.1 * truth.norm(dim=-1).median()


@pytest.mark.parametrize("sizes", [{}, POOLS])
@pytest.mark.parametrize("numerics", ["transformers", "deepseek"])
def test_generates_in_bfloat16_what_the_truth_would(
    device: torch.device, numerics: str, sizes: dict[str, int]
) -> None:
    """Each token is its logits' largest, and these are the truth's of what was generated so far."""
    truth_model, config = swapped(numerics)
    model = swapped(numerics, torch.bfloat16)[0].to(device)
    ids = ids_of(config, 3, 11).to(device)
    options = {"prefill_chunk_size": 5} if sizes else {}
    result = []
    for _ in range(2):
        cache = paged_cache(model, max_tokens=26, max_sequences=4, **sizes)
        result.append(model.generate(ids, past_key_values=cache, **LOGITS, **GREEDY, **options))
    assert torch.equal(result[0].sequences, result[1].sequences)
    logits = torch.stack(result[0].logits, 1).cpu()
    assert torch.equal(logits, torch.stack(result[1].logits, 1).cpu())
    sequences = result[0].sequences.cpu()
    assert torch.equal(sequences[:, 11:], logits.argmax(-1))
    with torch.no_grad():
        truth = truth_model(sequences).logits[:, 10:-1]
    off = (logits.double() - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert off.median() < 0.1


@settings(max_examples=4)
@given(config=tiny_configs(numerics="transformers", sliding_window=5), data=st.data())
def test_chunks_equal_the_whole(config: ModelConfig, data: st.DataObject) -> None:
    """The model called in pieces, with attention alone replaced or all parts."""
    model: Any = transformers_twin(random_model(config, 1), torch.float64)
    parts = data.draw(st.sampled_from([PARTS, ("attention",)]))
    apply(model, parts=parts)
    ids = ids_of(config, 2, 29)
    cache = paged_cache(model, max_tokens=29, max_sequences=2)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        pieces = ids.split(data.draw(chunkings(29)), dim=1)
        result = [model(p, past_key_values=cache, use_cache=True).logits for p in pieces]
    # transformers' own norms and hyper-connections work in float32 whatever the model's dtype.
    assert relative(torch.cat(result, 1), whole) < (EXACT if parts == PARTS else 1e-5)
    assert cache.get_seq_length() == 29


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 1}])
def test_a_left_padded_batch_gives_what_each_prompt_gives_alone(options: Any) -> None:
    """transformers' own cache cannot do this once a compressor has closed a window."""
    model, config = swapped()
    prompts = [ids_of(config, 1, n, n) for n in (23, 14, 1)]
    ids = torch.zeros(3, 23, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, 23 - prompt.shape[1] :], mask[row, 23 - prompt.shape[1] :] = prompt, 1
    cache = paged_cache(model, max_tokens=40, max_sequences=3)
    together = model.generate(
        ids, attention_mask=mask, past_key_values=cache, pad_token_id=0,
        **LOGITS, **GREEDY, **options,
    )  # fmt: skip
    assert cache.paged.lengths.tolist() == [28, 19, 6]
    for row, prompt in enumerate(prompts):
        alone = paged_cache(model, max_tokens=40)
        expected = model.generate(prompt, past_key_values=alone, **LOGITS, **GREEDY)
        assert_same(together, expected, slice(row, row + 1))
    dense = model.generate(prompts[0], **LOGITS, **GREEDY)
    assert_same(together, dense, slice(0, 1))


def test_a_cache_goes_on_where_it_was() -> None:
    model, config = swapped()
    ids = ids_of(config, 2, 9)
    cache = paged_cache(model, max_tokens=60, max_sequences=2, pool_tokens=512)
    first = model.generate(ids, past_key_values=cache, **GREEDY)
    more = torch.cat((first, ids_of(config, 2, 7, 1)), 1)
    result = model.generate(more, past_key_values=cache, **LOGITS, **GREEDY)
    assert_same(result, model.generate(more, **LOGITS, **GREEDY))


# float32 on a GPU: there kernels run, and no two logits are so near that a sum's order counts.
DEVICES = [
    pytest.param("cpu", torch.float64, id="cpu"),
    pytest.param("cuda", torch.float32, id="cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("where", "dtype"), DEVICES)
@pytest.mark.parametrize("sizes", [{}, {"pool_tokens": 512}], ids=["rings", "pools"])
def test_assisted_generation_is_greedy_generation(sizes: dict[str, Any], where, dtype) -> None:
    """Guesses by prompt lookup, most of them wrong, over the borders of windows of 4 and 8."""
    model, config = swapped(dtype=dtype)
    model.to(where)
    ids = ids_of(config, 1, 5).repeat(1, 4).to(where)  # so that there is something to look up
    options = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    plain = paged_cache(model, max_tokens=60, **sizes)
    expected = model.generate(ids, past_key_values=plain, **options)
    cache = paged_cache(model, max_tokens=60, **sizes)
    crops = []
    with mock.patch.object(cache, "crop", lambda n: (crops.append(n), type(cache).crop(cache, n))):
        actual = generate_assisted(
            model, ids, past_key_values=cache, prompt_lookup_num_tokens=5, **options
        )
    assert actual.tolist() == expected.tolist()
    assert min(crops) <= -3
    assert cache.paged.lengths[0] == cache.get_seq_length() <= plain.get_seq_length() + 1
    assert model._is_stateful


@pytest.mark.parametrize(
    ("where", "numerics", "dtype"),
    [
        pytest.param("cpu", "transformers", torch.float64, id="cpu"),
        pytest.param("cuda", "deepseek", torch.bfloat16, id="cuda", marks=pytest.mark.gpu),
    ],
)
def test_crop_is_as_if_never_stepped(where, numerics, dtype) -> None:
    model, config = swapped(numerics, dtype)
    model.to(where)
    ids = ids_of(config, 2, 30).to(where)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    results = []
    with torch.no_grad():
        for guess in (True, False):
            cache = paged_cache(model, max_tokens=60, max_sequences=2)
            model(ids[:, :19], attention_mask=mask[:, :19], past_key_values=cache)
            if guess:
                wrong = ids[:, 19:27].flip(1)
                model(wrong, attention_mask=mask[:, :27], past_key_values=cache)
                cache.crop(-8)
            assert cache.paged.lengths.tolist() == [19, 16]
            results.append(model(ids[:, 19:], attention_mask=mask, past_key_values=cache).logits)
    assert torch.equal(*results)


def test_what_a_paged_cache_cannot_is_refused_with_a_reason() -> None:
    model, config = swapped()
    ids = ids_of(config, 2, 9)

    def cache(**sizes: Any) -> Any:
        return paged_cache(model, **{"max_tokens": 30, "max_sequences": 4, **sizes})

    with pytest.raises(NotImplementedError, match="beam search reorders rows, wanted num_beams=1"):
        model.generate(ids, past_key_values=cache(), num_beams=2, **GREEDY)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful"):
        model.generate(ids[:1], past_key_values=cache(), prompt_lookup_num_tokens=2, **GREEDY)
    with pytest.raises(TypeError, match="past_key_values is a NoneType, wanted a paged_cache"):
        generate_assisted(model, ids[:1], prompt_lookup_num_tokens=2, **GREEDY)
    assert model._is_stateful
    with pytest.raises(ValueError, match=r"crop\(2\), wanted 0 or minus a number of tokens"):
        cache().crop(2)
    cache().crop(0)
    filled = cache()
    model.generate(ids, past_key_values=filled, **GREEDY)
    before = filled.paged.lengths.tolist()
    with pytest.raises(ValueError, match=r"of which rollback \(8\) can be taken back"):
        filled.crop(-9)
    assert (filled.paged.lengths.tolist(), filled.get_seq_length()) == (before, before[0])
    for refused in ("batch_repeat_interleave", "batch_select_indices"):
        with pytest.raises(NotImplementedError, match="a batch of its final size"):
            getattr(cache(), refused)(torch.tensor([0]))
    with pytest.raises(ValueError, match=r"batch of 2, wanted at most max_sequences \(1\)"):
        model.generate(ids, past_key_values=cache(max_sequences=1), **GREEDY)
    with pytest.raises(ValueError, match=r"9 new tokens, wanted at most max_chunk \(4\)"):
        model.generate(ids, past_key_values=cache(max_chunk=4), **GREEDY)
    with pytest.raises(ValueError, match=r"reach 12 \+ 1 tokens, wanted at most max_tokens \(12\)"):
        model.generate(ids, past_key_values=cache(max_tokens=12), **GREEDY)
    sizes = {"max_tokens": 200, "pool_tokens": 512, "window_pages": 1}
    with pytest.raises(CacheFullError, match="needs 3 window pages, and 1 of 1 are free"):
        model.generate(ids_of(config, 1, 150), past_key_values=cache(**sizes), **GREEDY)
    used = cache()
    model.generate(ids, past_key_values=used, **GREEDY)
    with pytest.raises(ValueError, match="batch of 3, wanted 2 as before; reset"):
        model(ids_of(config, 3, 2), past_key_values=used)


@pytest.mark.parametrize("sizes", [{}, {"pool_tokens": 768}])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_forward_that_failed_did_not_happen(layer: int, sizes: Any) -> None:
    """Whatever its batch was: the next one gives the bits of a cache that saw no failure."""
    model, config = swapped()
    ids = ids_of(config, 2, 16)
    cache, untroubled = (paged_cache(model, max_tokens=30, max_sequences=2, **sizes) for _ in "ab")
    for piece in ids.split([7, 1, 8], 1):
        for batch in (piece, piece[:, -1:]):
            hook = model.model.layers[layer].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(batch, past_key_values=cache)
            hook.remove()
        actual, expected = (model(piece, past_key_values=c).logits for c in (cache, untroubled))
        assert torch.equal(actual, expected)
    assert cache.get_seq_length() == 16
    assert cache.paged.free_pages == untroubled.paged.free_pages


def test_a_failed_first_forward_keeps_no_rows() -> None:
    model, config = swapped()
    cache = paged_cache(model, max_tokens=30, max_sequences=2, max_chunk=4)
    with pytest.raises(ValueError, match="max_chunk"):
        model(ids_of(config, 2, 9), past_key_values=cache)
    assert model(ids_of(config, 1, 3), past_key_values=cache).logits.shape[0] == 1
    assert cache.paged.lengths.tolist() == [3, 0]


def test_a_prompt_that_the_cache_holds_already_is_refused() -> None:
    """transformers passes what follows the cache's tokens: nothing."""
    model, config = swapped()
    cache, ids = paged_cache(model, max_tokens=64), ids_of(config, 1, 3)
    options = {**GREEDY, "past_key_values": cache}
    first = model.generate(ids, **options)
    with pytest.raises(ValueError, match=r"no new token, and a row has 8 already.*reset\(\)"):
        model.generate(ids, **options)
    cache.reset()
    assert torch.equal(model.generate(ids, **options), first)


def test_a_failed_forward_that_cannot_be_undone_has_to_be_reset() -> None:
    model, config = swapped()
    ids = ids_of(config, 1, 9)
    cache = paged_cache(model, max_tokens=30, max_sequences=2)
    hook = model.model.layers[2].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids, past_key_values=cache)
    hook.remove()
    cache.paged.allocate()
    with pytest.raises(RuntimeError, match=r"did not come to its end.*reset"):
        model(ids, past_key_values=cache)
    cache.reset()
    actual, expected = model(ids, past_key_values=cache).logits, model(ids).logits
    assert relative(actual, expected) < EXACT
    attention = model.model.layers[1].self_attn
    with pytest.raises(RuntimeError, match="first layer of a forward is 1, wanted 0"):
        attention(torch.zeros(1, 1, config.hidden_size).double(), past_key_values=cache)


def test_attention_that_is_not_ours_is_refused() -> None:
    config = ModelConfig.tiny(numerics="transformers")
    model: Any = transformers_twin(random_model(config, 4))
    with pytest.raises(TypeError, match=r"layers.0.self_attn is a transformers.*wanted dsv4's"):
        paged_cache(model, max_tokens=30)
    with pytest.raises(TypeError, match=r"model is a torch.*Linear, wanted"):
        paged_cache(torch.nn.Linear(2, 2), max_tokens=30)
    report = apply(model)
    cache = paged_cache(model, max_tokens=30)
    report.undo()
    with pytest.raises(TypeError, match="paged cache in an attention that is not dsv4's"):
        model(ids_of(config, 1, 3), past_key_values=cache)
