"""The whole model: against transformers, against itself in other chunks, and against the future."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4 import serving
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.kv_cache.paged_cache import Batch, CacheStep
from dsv4.layers import quantize_
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving.sampling import Sampler
from dsv4.testing.configs import chunkings, tiny_configs
from dsv4.testing.models import random_model, transformers_twin

LENGTH = 37  # every position phase of both compressors, several windows of each
TRANSFORMERS = 1e-5  # relative, float32: some ten layers of products of a few hundred terms
EXACT = 1e-12  # relative, float64: rounding alone, so no FP8 or FP4 code differs


def tokens(config: ModelConfig, seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, shape, generator=generator)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest relative error of a row."""
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())


def run_chunks(
    model: DeepseekV4ForCausalLM,
    prompts: list[list[int]],
    chunks: list[list[int]],
    index_format: str = "plain",
) -> list[torch.Tensor]:
    """Logits of every token of every prompt; prompt b enters in pieces of ``chunks[b]``."""
    longest = max(map(len, prompts))
    cache = model.new_cache(len(prompts), longest, longest, index_format)
    rows = torch.tensor([cache.allocate() for _ in prompts], device=model.device)
    at = [0] * len(prompts)
    out: list[list[torch.Tensor]] = [[] for _ in prompts]
    for turn in range(max(map(len, chunks))):
        lengths = [c[turn] if turn < len(c) else 0 for c in chunks]
        batch = Batch.from_lengths(lengths, cache.lengths[rows], rows)
        flat = [t for p, a, n in zip(prompts, at, lengths, strict=True) for t in p[a : a + n]]
        ids = torch.tensor([flat], device=model.device)
        logits = model(ids, None, CacheStep(cache, batch))[0]
        cache.advance(batch)
        for b, piece in enumerate(logits.split(lengths)):
            out[b].append(piece)
            at[b] += lengths[b]
    assert cache.lengths[rows].tolist() == [len(p) for p in prompts]
    return [torch.cat(pieces) for pieces in out]


@pytest.mark.costly(2)
@given(tiny_configs(numerics="transformers"), st.integers(0, 2**31), st.booleans())
@settings(max_examples=15)
def test_equals_transformers(config: ModelConfig, seed: int, quantised: bool) -> None:
    """All layer types, both routers, plain or NVFP4; against the dequantised weights."""
    model = random_model(config, seed)
    if quantised:
        quantize_(model)
    theirs = transformers_twin(model)
    ids = tokens(config, seed, 2, LENGTH)
    with torch.no_grad():
        assert distance(model(ids), theirs(ids).logits) < TRANSFORMERS


@pytest.mark.costly(2)
@given(st.data(), tiny_configs(numerics="transformers"), st.integers(0, 2**31), st.booleans())
@settings(max_examples=15)
def test_paged_chunks_equal_transformers(
    data: st.DataObject, config: ModelConfig, seed: int, quantised: bool
) -> None:
    model = random_model(config, seed)
    if quantised:
        quantize_(model)
    theirs = transformers_twin(model)
    ids = tokens(config, seed, LENGTH)
    chunks = data.draw(chunkings(LENGTH))
    with torch.no_grad():
        (ours,) = run_chunks(model, [ids.tolist()], [chunks])
        assert distance(ours, theirs(ids[None]).logits[0]) < TRANSFORMERS


@pytest.mark.parametrize("quantised", [False, True])
def test_generates_the_tokens_of_transformers(quantised: bool) -> None:
    config = ModelConfig.tiny(numerics="transformers")
    model = random_model(config, 5)
    if quantised:
        quantize_(model)
    theirs = transformers_twin(model)
    ids = tokens(config, 5, 1, 11)
    new = theirs.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 11:]
    assert model.generate(ids.tolist(), 12, stop_ids=[]) == [new.tolist()]


@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
@pytest.mark.parametrize("layer_type", [SLIDING, CSA, HCA])
@pytest.mark.costly(2)
@given(data=st.data(), seed=st.integers(0, 2**31))
@settings(max_examples=10)
def test_any_chunking_is_the_same(
    numerics: str, layer_type: str, data: st.DataObject, seed: int
) -> None:
    """Decode = prefill = any mixture, ragged, with another sequence beside it, and = no cache."""
    config = ModelConfig.tiny(layer_types=(layer_type,), numerics=numerics)
    _chunkings_agree(config, data, seed)


@pytest.mark.slow
@pytest.mark.costly(3)
@given(data=st.data(), config=tiny_configs(), seed=st.integers(0, 2**31))
@settings(max_examples=15)
def test_any_chunking_is_the_same_for_the_model(
    data: st.DataObject, config: ModelConfig, seed: int
) -> None:
    _chunkings_agree(config, data, seed)


def _chunkings_agree(config: ModelConfig, data: st.DataObject, seed: int) -> None:
    model = random_model(config, seed, torch.float64)
    lengths = [data.draw(st.integers(1, 45)) for _ in range(2)]
    prompts = [tokens(config, seed + i, n).tolist() for i, n in enumerate(lengths)]
    chunks = [data.draw(chunkings(n)) for n in lengths]
    with torch.no_grad():
        pieces = run_chunks(model, prompts, chunks)
        one_by_one = run_chunks(model, prompts, [[1] * n for n in lengths])
        for prompt, in_pieces, single in zip(prompts, pieces, one_by_one, strict=True):
            dense = model(torch.tensor([prompt]))[0]
            assert distance(in_pieces, dense) < EXACT
            assert distance(single, dense) < EXACT


@pytest.mark.costly(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(seed=st.integers(0, 2**31), data=st.data())
@settings(max_examples=5)
def test_mxfp4_index_keys_change_no_bit(dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
    """DeepSeek's numerics round index queries and keys to MXFP4 whatever holds them."""
    config = ModelConfig.tiny(layer_types=(CSA,), index_topk=3, numerics="deepseek")
    model, ids = random_model(config, seed, dtype), tokens(config, seed, LENGTH).tolist()
    chunks = [data.draw(chunkings(LENGTH))]
    with torch.no_grad():
        plain, compact = (
            run_chunks(model, [ids], chunks, name)[0] for name in ("plain", "index_mxfp4")
        )
    assert torch.equal(plain, compact)


@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
@pytest.mark.parametrize("index_format", ["index_fp8", "index_mxfp4"])
def test_the_index_format_matters_only_where_entries_are_chosen(
    numerics: str, index_format: str
) -> None:
    """Logits are those of plain keys while all entries are taken, and chunks agree beyond."""
    config = ModelConfig.tiny(layer_types=(CSA,), index_topk=3, numerics=numerics)
    model, ids = random_model(config, 0, torch.float32), tokens(config, 0, LENGTH).tolist()
    with torch.no_grad():
        plain, compact, single = (
            run_chunks(model, [ids], [chunks], name)[0]
            for name, chunks in (
                ("plain", [LENGTH]),
                (index_format, [LENGTH]),
                (index_format, [1] * LENGTH),
            )
        )
    every = 3 * config.compress_rates.csa
    assert torch.equal(plain[:every], compact[:every])
    assert distance(single, compact) < 1e-4


@given(config=tiny_configs(), seed=st.integers(0, 2**31), cut=st.integers(1, LENGTH - 1))
@settings(max_examples=15)
def test_the_future_changes_nothing(config: ModelConfig, seed: int, cut: int) -> None:
    model = random_model(config, seed, torch.float64)
    ids = tokens(config, seed, 1, LENGTH)
    other = ids.clone()
    other[:, cut:] = tokens(config, seed + 1, 1, LENGTH - cut)
    with torch.no_grad():
        assert distance(model(other)[:, :cut], model(ids)[:, :cut]) < EXACT


def test_the_past_does_change_something() -> None:
    """Guards the test above: the first token reaches the last through every layer type."""
    for layer_type in (CSA, HCA):
        config = ModelConfig.tiny(layer_types=(layer_type,))
        model = random_model(config, 3, torch.float64)
        ids = tokens(config, 3, 1, LENGTH)
        other = ids.clone()
        other[:, 0] = (ids[:, 0] + 1) % config.vocab_size
        with torch.no_grad():
            assert distance(model(other)[:, -1], model(ids)[:, -1]) > 1e-6


def test_a_freed_sequence_leaves_nothing_behind() -> None:
    config = ModelConfig.tiny()
    model = random_model(config, 9, torch.float64)
    cache = model.new_cache(1, 64)
    row = cache.allocate()
    model.prefill([tokens(config, 1, 40).tolist()], cache, [row])
    cache.free(row)
    prompt = tokens(config, 2, 21).tolist()
    again = model.prefill([prompt], cache, [cache.allocate()])
    fresh_cache = model.new_cache(1, 64)
    fresh = model.prefill([prompt], fresh_cache, [fresh_cache.allocate()])
    torch.testing.assert_close(again, fresh, rtol=0, atol=0)


def test_equals_itself_run_twice(device: torch.device) -> None:
    config = ModelConfig.tiny()
    model = random_model(config, 4).to(device)
    ids = tokens(config, 4, 2, LENGTH).to(device)
    with torch.no_grad():
        assert torch.equal(model(ids), model(ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_device_agrees_with_the_oracle(device: torch.device, dtype: torch.dtype) -> None:
    """Paged prefill and decode on the device, against float64 without a cache on the CPU."""
    config = ModelConfig.tiny(numerics="transformers")
    oracle = random_model(config, 6).to(dtype).double()
    model = random_model(config, 6).to(dtype).to(device)
    ids = tokens(config, 6, LENGTH)
    with torch.no_grad():
        (ours,) = run_chunks(model, [ids.tolist()], [[20, 1, 1, LENGTH - 22]])
        expected = oracle(ids[None])[0]
    ours = ours.double().cpu()
    assert ours.isfinite().all()
    if dtype == torch.float32:
        assert distance(ours, expected) < TRANSFORMERS
    else:
        # A discrete choice (an expert, an entry) may fall the other way in bfloat16, so the
        # typical row is held, not the worst.
        rows = (ours - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert rows.median() < 0.05


def published_width(numerics: str) -> ModelConfig:
    """Flash's own widths and all three layer types, with fewer layers, experts and tokens."""
    return ModelConfig.flash(
        num_hidden_layers=3,
        layer_types=(SLIDING, CSA, HCA),
        mlp_layer_types=("hash_moe", "moe", "moe"),
        num_nextn_predict_layers=0,
        n_routed_experts=12,
        vocab_size=2048,
        numerics=numerics,
    )


@pytest.mark.gpu
@pytest.mark.slow
def test_published_widths_equal_transformers() -> None:
    """Every compressed entry is chosen at 900 tokens, so no tie of the top-k takes part."""
    config = published_width("transformers")
    model = random_model(config, 1).cuda()
    quantize_(model)
    theirs = transformers_twin(model)
    theirs.cuda()
    ids = tokens(config, 1, 900)
    with torch.no_grad():
        (ours,) = run_chunks(model, [ids.tolist()], [[600, 1, 1, 298]])
        assert distance(ours, theirs(ids[None].cuda()).logits[0]) < TRANSFORMERS


@pytest.mark.gpu
@pytest.mark.slow
def test_any_chunking_is_the_same_at_published_widths() -> None:
    """584-byte FP8 entries, 128-wide Hadamard, a top-512 of 750 entries."""
    config = published_width("deepseek")
    model = random_model(config, 1, torch.float64).cuda()
    prompt = tokens(config, 1, 3000).tolist()
    with torch.no_grad():
        (ours,) = run_chunks(model, [prompt], [[1700, 1, 1, 1, 1297]])
        assert distance(ours, model(torch.tensor([prompt]).cuda())[0]) < EXACT


@pytest.mark.costly(2)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 20), min_size=1, max_size=4))
@settings(max_examples=5)
def test_a_batch_generates_what_each_prompt_alone_does(seed: int, lengths: list[int]) -> None:
    config = ModelConfig.tiny()
    model = random_model(config, seed, torch.float64)
    prompts = [tokens(config, seed + i, n).tolist() for i, n in enumerate(lengths)]
    together = model.generate(prompts, 6, chunk=7, stop_ids=[])
    alone = [model.generate([prompt], 6, stop_ids=[])[0] for prompt in prompts]
    assert together == alone


def test_generation_stops_at_a_stop_token() -> None:
    config = ModelConfig.tiny()
    model = random_model(config, 1)
    prompt = tokens(config, 1, 9).tolist()
    free = model.generate([prompt], 8, stop_ids=[])[0]
    stopped = model.generate([prompt, prompt[:3]], 8, stop_ids=[free[2]])[0]
    assert stopped == free[: free.index(free[2]) + 1]
    assert model.generate([prompt], 0) == [[]]


@given(st.integers(0, 2**31), st.floats(0.05, 1.0), st.integers(1, 6))
def test_top_p_keeps_the_smallest_set(seed: int, top_p: float, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 11, generator=generator) * 3
    drawn = Sampler(temperature=1.0, top_p=top_p, generator=generator)(logits)
    probabilities = logits.softmax(-1)
    for row, token in zip(probabilities, drawn.tolist(), strict=True):
        likelier = row[row > row[token]].sum()
        assert likelier < top_p


def test_samplers_limits() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0]])
    assert Sampler()(logits).item() == 1
    assert Sampler(temperature=1.0, top_p=1e-6)(logits).item() == 1
    with pytest.raises(ValueError, match="temperature is -1"):
        Sampler(temperature=-1)
    with pytest.raises(ValueError, match="top_p is 0"):
        Sampler(top_p=0)
    with pytest.raises(ValueError, match="temperature is inf"):
        Sampler(temperature=float("inf"))
    for name, value in (("temperature", "1"), ("temperature", True), ("top_p", None)):
        with pytest.raises(TypeError, match=f"{name} is {value!r}, wanted a number"):
            Sampler(**{name: value})
    with pytest.raises(TypeError, match=r"generator is int, wanted a torch\.Generator"):
        Sampler(generator=3)
    assert serving.Sampler is Sampler


def test_the_draft_layer_is_its_formula() -> None:
    """Specification, section 9, step by step in float64."""
    config = ModelConfig.tiny(numerics="transformers")
    model = random_model(config, 2, torch.float64, mtp=True)
    ids = tokens(config, 2, 1, 12)
    with torch.no_grad():
        _, streams = model.model(ids[:, :-1])
        logits, _ = model.draft(ids[:, 1:], streams)
        layer = model.mtp[0]

        def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

        embedded = rms(model.model.embed_tokens.weight[ids[:, 1:]], layer.enorm.weight)
        mixed = (embedded @ layer.e_proj.weight.T)[:, :, None] + rms(
            streams, layer.hnorm.weight
        ) @ layer.h_proj.weight.T
        hidden = layer.norm(layer.hc_head(layer.layer(mixed)))
        expected = hidden @ model.lm_head.weight.T
    assert distance(logits, expected) < EXACT
    assert layer.layer.self_attn.layer_type == SLIDING
    assert layer.layer.self_attn.rope_layer_type == "main"
    assert not layer.layer.mlp.is_hash


def test_bad_input_is_refused_with_a_reason() -> None:
    config = ModelConfig.tiny()
    model = random_model(config)
    with pytest.raises(TypeError, match=r"input_ids have dtype torch\.float32, wanted int64"):
        model(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"input_ids have shape \[3\], wanted \[B, S\]"):
        model(torch.zeros(3, dtype=torch.long))
    cache = model.new_cache(1, 8, 4)
    row = cache.allocate()
    with pytest.raises(ValueError, match="a prompt is empty"):
        model.prefill([[]], cache, [row])
    with pytest.raises(ValueError, match="chunk is 5, wanted 1 to 4"):
        model.prefill([[1, 2]], cache, [row], chunk=5)
    with pytest.raises(ValueError, match="max_tokens"):
        model.prefill([[1] * 9], cache, [row])


def test_no_tokens_is_a_valid_batch() -> None:
    config = ModelConfig.tiny()
    model = random_model(config)
    with torch.no_grad():
        assert model(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, config.vocab_size)
        assert model(torch.zeros(0, 4, dtype=torch.long)).shape == (0, 4, config.vocab_size)
