"""Wrong arguments are named before anything happens."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.config import ModelConfig
from dsv4.layers import quantize_
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving.sampling import Sampler
from dsv4.testing.models import random_model

CONFIG = ModelConfig.tiny()
VOCABULARY = CONFIG.vocab_size
LAST = VOCABULARY - 1


@pytest.fixture(scope="module")
def model() -> DeepseekV4ForCausalLM:
    return random_model(CONFIG, 2)


PROMPTS: list[tuple[Any, type[Exception], str]] = [
    ("hello", TypeError, "prompts is 'hello' (str), wanted a list of lists of token ids"),
    (["hello"], TypeError, "prompts[0] is 'hello' (str), wanted a list of token ids"),
    ([0, 5, 6], TypeError, "prompts[0] is 0 (int), wanted a list of token ids"),
    (5, TypeError, "prompts is 5 (int), wanted a list of lists"),
    (torch.ones(1, 3), TypeError, "prompts is a tensor of shape [1, 3], wanted a list of lists"),
    ([torch.ones(3)], TypeError, "prompts[0] is a tensor, wanted a list of token ids"),
    ([[1], []], ValueError, "prompts[1]: a prompt is empty, wanted at least one token"),
    ([[1.0, 2]], TypeError, "prompts[0][0] is 1.0 (float), wanted an int"),
    ([[1, True]], TypeError, "prompts[0][1] is True (bool), wanted an int"),
    ([[1, np.bool_(True)]], TypeError, "wanted an int"),
    ([[1, None]], TypeError, "prompts[0][1] is None (NoneType), wanted an int"),
    ([[3], [1, -2]], ValueError, f"prompts[1][1] is -2, wanted 0 to {LAST}, the vocabulary"),
    ([[3, VOCABULARY]], ValueError, f"prompts[0][1] is {VOCABULARY}, wanted 0 to {LAST}"),
]


@pytest.mark.parametrize(("prompts", "error", "words"), PROMPTS)
def test_wrong_prompts_are_named(model, prompts, error, words) -> None:
    with pytest.raises(error, match=re.escape(words)):
        model.generate(prompts, 2)
    cache = model.new_cache(2, 9)
    rows = [cache.allocate() for _ in range(2)]
    with pytest.raises(error, match=re.escape(words)):
        model.prefill(prompts, cache, rows)
    assert cache.lengths.tolist() == [0, 0]
    assert [count.high for count in cache._counts] == [0, 0]


@given(st.lists(st.lists(st.integers(-3, VOCABULARY + 3), max_size=4), max_size=3))
def test_ids_pass_or_the_first_bad_one_is_named(model, prompts) -> None:
    bad = [
        (i, j)
        for i, ids in enumerate(prompts)
        for j, t in enumerate(ids)
        if not 0 <= t < VOCABULARY
    ]
    empty = [i for i, ids in enumerate(prompts) if not ids]
    if not bad and not empty:
        assert model.generate(prompts, 0) == [[] for _ in prompts]
        return
    with pytest.raises(ValueError, match=r"vocabulary|empty") as caught:
        model.generate(prompts, 0)
    names = [f"prompts[{i}][{j}] is {prompts[i][j]}," for i, j in bad]
    names += [f"prompts[{i}]: a prompt is empty" for i in empty]
    assert any(name in str(caught.value) for name in names)


@pytest.mark.parametrize("like", [tuple, np.array])
def test_any_sequence_of_ints_is_a_prompt(model, like) -> None:
    assert model.generate(like([[1, 2, 3]]), 2, stop_ids=[]) == model.generate(
        [[1, 2, 3]], 2, stop_ids=[]
    )


NUMBERS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_new_tokens": -3}, ValueError, "max_new_tokens is -3, wanted 0 or more"),
    ({"max_new_tokens": 2.0}, TypeError, r"max_new_tokens is 2\.0 \(float\), wanted an int"),
    ({"max_new_tokens": True}, TypeError, r"max_new_tokens is True \(bool\), wanted an int"),
    ({"chunk": 0}, ValueError, "chunk is 0, wanted 1 or more"),
    ({"chunk": 1.5}, TypeError, r"chunk is 1\.5 \(float\), wanted an int"),
    ({"stop_ids": "12"}, TypeError, r"stop_ids is '12' \(str\), wanted a list"),
    ({"stop_ids": 12}, TypeError, r"stop_ids is 12 \(int\), wanted a list"),
    ({"stop_ids": [1.0]}, TypeError, r"stop_ids\[0\] is 1\.0 \(float\), wanted an int"),
    ({"stop_ids": [1, VOCABULARY]}, ValueError, rf"stop_ids\[1\] is {VOCABULARY}, wanted 0 to"),
    ({"stop_ids": torch.ones(2)}, TypeError, "stop_ids has dtype float32, wanted int64"),
    ({"max_new_tokens": 1022}, ValueError, "at most 1024 together .max_position_embeddings"),
]


@pytest.mark.parametrize(("given_values", "error", "words"), NUMBERS)
def test_wrong_numbers_are_named(model, given_values, error, words) -> None:
    with pytest.raises(error, match=f"generate: .*{words}"):
        model.generate([[1, 2, 3]], **{"max_new_tokens": 2, **given_values})


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(0, 5), st.booleans())
@example(2, True)
def test_stop_tokens_of_a_tensor_stop(model, which, several) -> None:
    prompt = [3, 1, 4, 1, 5]
    free = model.generate([prompt], 6, stop_ids=())[0]
    stop = torch.tensor([free[which], 0] if several else free[which])
    expected = model.generate([prompt], 6, stop_ids=stop.flatten().tolist())
    assert model.generate([prompt], 6, stop_ids=stop) == expected
    assert model.generate([prompt], 6, stop_ids=iter(stop.flatten().tolist())) == expected
    assert expected[0] == free[: free.index(free[which]) + 1] or several


def test_a_chunk_longer_than_all_prompts_is_as_long_as_they_are(model) -> None:
    prompts = [[1, 2, 3], [4]]
    assert model.generate(prompts, 3, chunk=512) == model.generate(prompts, 3, chunk=3)


def test_more_tokens_than_positions_are_refused(model) -> None:
    with pytest.raises(ValueError, match="new_cache: max_tokens is 1025, wanted at most 1024"):
        model.new_cache(1, 1025)
    for sizes in ({"max_tokens": 8.0}, {"max_tokens": 8, "max_chunk": True}):
        with pytest.raises(TypeError, match=r"max_(tokens|chunk) is .*, wanted an int"):
            model.new_cache(1, **sizes)


TOKENS: list[tuple[Any, type[Exception], str]] = [
    ([1, 2], TypeError, r"tokens is \[1, 2\] \(list\), wanted a tensor \[B\] of int64"),
    (torch.ones(2), TypeError, "tokens has dtype float32, wanted int64"),
    (torch.ones(2, dtype=torch.bool), TypeError, "tokens has dtype bool, wanted int64"),
    (torch.ones(3).long(), ValueError, r"tokens has shape \[3\], wanted \[2\], one for each"),
    (torch.ones(2, 1).long(), ValueError, r"tokens has shape \[2, 1\], wanted \[2\]"),
    (torch.tensor([1, VOCABULARY]), ValueError, rf"tokens\[1\] is {VOCABULARY}, wanted 0 to"),
    (torch.tensor([-1, 0]), ValueError, r"tokens\[0\] is -1, wanted 0 to"),
    (torch.ones(2, device="meta").long(), ValueError, "tokens is on meta, wanted cpu"),
]


@pytest.mark.parametrize("pools", [{}, {"pool_tokens": 512}])
@pytest.mark.parametrize(("tokens", "error", "words"), TOKENS)
def test_wrong_tokens_are_named(model, tokens, error, words, pools) -> None:
    cache = model.new_cache(2, 9, **pools)
    rows = [cache.allocate(), cache.allocate()]
    model.prefill([[1, 2], [3]], cache, rows)
    for given_rows in (rows, torch.tensor(rows)):
        with pytest.raises(error, match=f"decode: {words}"):
            model.decode(tokens, cache, given_rows)
    assert cache.lengths.tolist() == [count.high for count in cache._counts] == [2, 1]


ROWS: list[tuple[list[int], str]] = [
    ([0, 0], r"sequences are \[0, 0\], wanted distinct ones"),
    ([0, 2], "sequence is 2, wanted one that is allocated"),
    ([0, 7], "sequence is 7, wanted one that is allocated"),
    ([0, -2], "sequence is -2, wanted one that is allocated"),
    ([1, 0], r"would reach 4 \+ 1 tokens, wanted at most max_tokens \(4\)"),
]


@pytest.mark.parametrize("pools", [{}, {"pool_tokens": 768}])
@pytest.mark.parametrize("like", [list, torch.tensor])
@pytest.mark.parametrize(("rows", "words"), ROWS)
def test_wrong_rows_are_named_as_a_list_and_as_a_tensor(model, rows, words, like, pools) -> None:
    cache = model.new_cache(3, 4, **pools)
    used = [cache.allocate() for _ in range(2)]
    model.prefill([[1], [2, 3, 4, 5]], cache, used)
    with pytest.raises(ValueError, match=words):
        model.decode(torch.tensor([1, 2]), cache, like(rows))
    assert cache.lengths.tolist() == [1, 4, 0]


@pytest.mark.costly(2)
@pytest.mark.parametrize("pools", [{}, {"pool_tokens": 512}])
@settings(max_examples=10)
@given(st.lists(st.sampled_from(["list", "tensor", "prepared"]), min_size=1, max_size=6))
def test_rows_as_a_list_and_as_a_tensor_are_the_same(model, pools, ways) -> None:
    """This holds where the caller has prepared the step, as before a graph."""
    result = []
    for how in (ways, ["list"] * len(ways)):
        cache = model.new_cache(2, 20, **pools)
        rows = [cache.allocate(), cache.allocate()]
        logits = [model.prefill([[1, 2], [3]], cache, rows)]
        for way in how:
            if way == "prepared":
                cache.prepare(rows, [1, 1])
            given_rows = rows if way == "list" else torch.tensor(rows)
            logits.append(model.decode(logits[-1].argmax(-1), cache, given_rows))
        result.append(torch.stack(logits))
        assert (
            cache.lengths.tolist()
            == [count.high for count in cache._counts]
            == [2 + len(ways), 1 + len(ways)]
        )
    assert torch.equal(*result)


def test_wrong_prompts_and_rows_of_a_prefill_are_named(model) -> None:
    cache = model.new_cache(2, 9)
    rows = [cache.allocate(), cache.allocate()]
    for prompts, given_rows, error, words in (
        ([], [], ValueError, "there is no prompt, wanted at least one"),
        ([[1]], rows, ValueError, "1 prompts and 2 sequences, wanted as many of each"),
        ([[1]], [0.0], TypeError, r"sequences\[0\] is 0\.0 \(float\), wanted an int"),
        ([[1]], "0", TypeError, "sequences is '0'"),
        ([[1]], torch.zeros(1), TypeError, "sequences is a tensor of dtype float32"),
        ([[1], [2]], [1, 1], ValueError, r"sequences are \[1, 1\], wanted distinct ones"),
    ):
        with pytest.raises(error, match=words):
            model.prefill(prompts, cache, given_rows)
    assert [count.high for count in cache._counts] == [0, 0]


def test_ids_of_a_forward_and_of_a_draft_are_named() -> None:
    model = random_model(CONFIG, 2, mtp=True)
    ids = torch.tensor([[1, 2], [3, VOCABULARY]])
    with pytest.raises(ValueError, match=rf"input_ids\[1, 1\] is {VOCABULARY}, wanted 0 to {LAST}"):
        model(ids)
    _, streams = model.model(ids.clamp(max=LAST))
    with pytest.raises(ValueError, match=rf"next_ids\[1, 1\] is {VOCABULARY}, wanted 0 to {LAST}"):
        model.draft(ids, streams)
    with pytest.raises(ValueError, match="draft: layer is 1, wanted one of 1"):
        model.draft(ids.clamp(max=LAST), streams, 1)


@given(
    st.lists(st.sampled_from(["fine", "nan", "inf", "none"]), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.7]),
    st.integers(0, 2**20),
)
@example(["nan", "fine"], 0.0, 0)
def test_a_row_without_a_finite_maximum_has_no_token(kinds, temperature, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(kinds), 9, generator=generator)
    for row, kind in zip(logits, kinds, strict=True):
        if kind == "none":
            row[:] = -torch.inf
        elif kind != "fine":
            row[seed % 9] = float(kind)
    chosen = Sampler(temperature=temperature, generator=generator)(logits)
    assert [token >= 0 for token in chosen.tolist()] == [kind == "fine" for kind in kinds]
    if temperature == 0:
        fine = torch.tensor([kind == "fine" for kind in kinds])
        assert torch.equal(chosen[fine], logits[fine].argmax(-1))


@pytest.mark.parametrize("sampler", [None, Sampler(temperature=1.0)])
@pytest.mark.parametrize("first", [1, 3])
def test_nan_logits_are_an_error_that_names_prompt_and_token(first, sampler) -> None:
    model = random_model(CONFIG, 2)
    plain, calls = model.logits, []

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(hidden)
        logits = plain(hidden)
        if len(calls) == first:
            logits[1] = torch.nan
        return logits

    model.logits = broken  # type: ignore[method-assign]
    words = f"generate: the logits of prompt 1 for new token {first} have no finite maximum"
    with pytest.raises(RuntimeError, match=words):
        model.generate([[1, 2], [3]], 5, stop_ids=[], sampler=sampler)


@pytest.mark.parametrize("names", ["*.experts", "*", b"*"])
def test_patterns_in_one_string_are_refused(names) -> None:
    model = random_model(CONFIG, 2)
    with pytest.raises(TypeError, match=r"quantize_: names is .*, wanted a list of patterns: \["):
        quantize_(model, "nvfp4", names)
    with pytest.raises(TypeError, match=r"names\[1\] is 3, wanted a pattern as str"):
        quantize_(model, "nvfp4", ["*", 3])
    assert all(getattr(m, "format", None) is None for m in model.modules())
