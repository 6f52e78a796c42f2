"""Rows of a verified step are those of single-token steps, bit for bit, in steps of equal size."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.device import interpret_triton, pretend
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.layers.pack import pack_
from dsv4.layers.quantize import quantize_
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving._capture import obstacle
from dsv4.speculation.fixed_rows import FixedRows
from dsv4.testing.models import random_model

ROWS, TOKENS, PROMPT = 9, 40, 13
LAYERS = (SLIDING, CSA, HCA)


EXPERTS = ("*.experts",)
ALL = ("model.*",)


@cache
def model_of(device: str = "cpu", packed: tuple[str, ...] = ()) -> DeepseekV4ForCausalLM:
    """All types of layers, with windows that close several times; some weights are packed.

    Plain routed experts are multiplied one after another, each at its number of rows, so on a GPU
    their bits are those of no fixed shape.
    """
    sizes = {"hidden_size": 128, "q_lora_rank": 64, "moe_intermediate_size": 128}
    changes = {**sizes, "o_lora_rank": 32} if packed else {}
    config = ModelConfig.tiny(layer_types=LAYERS, sliding_window=8, **changes)
    model = random_model(config, 5, torch.bfloat16).to(device)
    if packed:
        quantize_(model, names=list(packed))
        pack_(model)
    return model


def text(count: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(3))


@torch.inference_mode()
def logits_of(model: DeepseekV4ForCausalLM, steps: list[tuple[int, int]]) -> torch.Tensor:
    """Logits of the tokens that stay, of steps of (rejected, accepted) tokens.

    A step processes the accepted tokens of the text and then wrong ones, which are taken back.
    """
    tokens = text(PROMPT + sum(accepted for _, accepted in steps), model.config.vocab_size)
    tokens, device = tokens.to(model.device), model.device
    paged = PagedCache(
        model.config, max_sequences=1, max_tokens=128, max_chunk=16, device=device,
        dtype=model.dtype,
    )  # fmt: skip
    row, done = paged.allocate(), PROMPT
    model.prefill([tokens[:PROMPT].tolist()], paged, [row])
    fixed, rows, staying = FixedRows(ROWS), torch.tensor([row], device=device), []
    for rejected, accepted in steps:
        wrong = (tokens[:rejected] + 7) % model.config.vocab_size
        ids = torch.cat((tokens[done : done + accepted], wrong))
        paged.prepare([row], [len(ids)], [done], certain=[accepted])
        batch = Batch.from_lengths([len(ids)], paged.lengths[rows], rows)
        step = CacheStep(paged, fixed.padded(batch))
        hidden, _ = model.model(fixed.filled(ids).unsqueeze(0), None, step)
        staying.append(model.logits(hidden[0])[:accepted])
        paged.advance(batch, torch.tensor([accepted], device=device))
        done += accepted
        if rejected:
            paged.confirm([row], [done])
    return torch.cat(staying)


@cache
def one_by_one(device: str = "cpu", packed: tuple[str, ...] = ()) -> torch.Tensor:
    return logits_of(model_of(device, packed), [(0, 1)] * TOKENS)


def steps_of(numbers: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Cut steps off where the text ends."""
    steps, left = [], TOKENS
    for rejected, accepted in numbers:
        accepted = min(accepted, left)
        if accepted:
            steps.append((min(rejected, ROWS - accepted), accepted))
            left -= accepted
    return steps


STEPS = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 9)), min_size=4, max_size=16)


@pytest.mark.costly(2)
@settings(max_examples=6)
@given(numbers=STEPS)
@example(numbers=[(0, 9)] * 4)
@example(numbers=[(8, 1)] * 12)
def test_rows_are_those_of_single_tokens(numbers: list[tuple[int, int]]) -> None:
    """Any steps of up to 9 tokens, some rejected, over the borders of all windows."""
    logits = logits_of(model_of(), steps_of(numbers))
    assert torch.equal(logits, one_by_one()[: len(logits)])


def test_rows_of_packed_weights_are_those_of_single_tokens() -> None:
    model = model_of(packed=ALL)
    together = logits_of(model, [(3, 6), (1, 2)])
    assert torch.equal(together, logits_of(model, [(0, 1)] * 8))


@pytest.mark.parametrize("packed", [EXPERTS, ALL], ids=["experts", "all"])
def test_experts_have_a_kernel_on_hopper(packed: tuple[str, ...]) -> None:
    """Without one they would be multiplied one after another."""
    with pretend(capability=(9, 0), sms=132, packages=True):
        assert obstacle(model_of(packed=packed), [ROWS], torch.device("cuda", 0)) is None


def test_steps_of_their_own_size_are_near_alone() -> None:
    """Why rows are fixed: bits depend on their number, here by torch's own products."""
    model, tokens = model_of(), text(9, model_of().config.vocab_size)
    with torch.inference_mode():
        together = model(tokens.unsqueeze(0))[0]
        alone = torch.stack([model(tokens[: i + 1].unsqueeze(0))[0, -1] for i in range(9)])
    assert torch.allclose(together, alone, atol=0.1)


@pytest.mark.nightly
def test_rows_are_those_of_single_tokens_in_the_interpreter() -> None:
    """By the Triton kernels; two steps of the fewest rows that differ."""
    with interpret_triton():
        config = ModelConfig.tiny(layer_types=(CSA,), num_hidden_layers=1, sliding_window=8)
        model = random_model(config, 5, torch.bfloat16)
        assert torch.equal(logits_of(model, [(1, 3)]), logits_of(model, [(0, 1)] * 3))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [EXPERTS, ALL], ids=["experts", "all"])
@pytest.mark.parametrize("numbers", [[(0, 9)] * 4, [(8, 1)] * 12, [(2, 3), (0, 7), (4, 5)] * 3])
def test_rows_are_those_of_single_tokens_on_a_gpu(packed: tuple[str, ...], numbers: list) -> None:
    steps = steps_of(numbers)
    logits = logits_of(model_of("cuda", packed), steps)
    assert torch.equal(logits, one_by_one("cuda", packed)[: len(logits)])


def test_steps_that_do_not_fit_are_said() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    batch = Batch.from_lengths([4], zero, zero)
    for call in (lambda: FixedRows(3).padded(batch), lambda: FixedRows(3).filled(zero.repeat(4))):
        with pytest.raises(ValueError, match="the step has 4 tokens, wanted at most 3"):
            call()
    with pytest.raises(ValueError, match="rows is 0, wanted 1 or more"):
        FixedRows(0)
    padded = FixedRows(6).padded(batch)
    assert padded.cu_seqlens.tolist() == [0, 4, 5, 6]
    assert padded.sequence_of_token.tolist() == [0, 0, 0, 0, -1, -1]
    assert FixedRows(6).filled(torch.arange(4), -1).tolist() == [0, 1, 2, 3, -1, -1]
