"""DSpark drafts against the formulas in float64, and what may and may not matter to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.config import HCA, SLIDING
from dsv4.kv_cache.paged_cache import Batch
from dsv4.layers.dspark import DeepseekV4DSpark, Taps
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.ops.kv_cache import fake_quantize_kv
from dsv4.speculation.dspark import DSparkDraft, last_tokens
from tests.speculation.dspark_cases import DSPARK, Sequences, model_of, small
from tests.speculation.dspark_oracle import Oracle

CONFIG = small()
MODEL = model_of(CONFIG)
STATE = MODEL.state_dict()
WINDOW = CONFIG.sliding_window


def prompt(count: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(CONFIG.vocab_size, (count,), generator=draw).tolist()


def plain(count: int = 1, model=MODEL, **options) -> Sequences:
    """Sequences whose cache does not round."""
    return Sequences.of(model, count, entry_format="plain", **options)


def after(count: int) -> Sequences:
    """A sequence with that number of tokens."""
    sequences = plain()
    sequences.step({0: prompt(count)})
    return sequences


def same(left: torch.Tensor, right: torch.Tensor, bound: float = 1e-10) -> None:
    torch.testing.assert_close(left, right, rtol=bound, atol=bound)


@pytest.mark.parametrize("pieces", [[], [3], [7, 1], [8], [9], [5, 4, 16]], ids=str)
@pytest.mark.parametrize("entry_format", ["plain", "fp8"])
def test_a_draft_is_what_the_formulas_say(pieces, entry_format):
    sequences = Sequences.of(MODEL, 1, entry_format=entry_format)
    rounded = entry_format == "fp8"
    stored = (lambda kv: fake_quantize_kv(kv, CONFIG.qk_rope_head_dim)) if rounded else None
    oracle = Oracle(CONFIG, STATE, stored)
    first = 0
    for number, count in enumerate(pieces):
        oracle.commit(sequences.step({0: prompt(count, number)}), first)
        first += count
    for anchor in (3, 40):
        drafted = sequences.propose({0: anchor})
        tokens, logits, confidence = oracle.draft(anchor, first)
        assert drafted.tokens.tolist() == [tokens]
        same(drafted.logits[0], logits, 1e-6)
        same(drafted.confidence[0], confidence, 1e-6)
        same(drafted.survival[0], confidence.cumprod(0), 1e-6)


def test_stages_may_have_other_experts_than_main_layers_and_be_one_alone():
    dspark = replace(
        DSPARK, block_size=3, target_layer_ids=(1,), n_routed_experts=6, num_experts_per_tok=3
    )
    model = model_of(small(dspark))
    sequences = plain(model=model)
    oracle = Oracle(model.config, model.state_dict())
    oracle.commit(sequences.step({0: prompt(11)}), 0)
    tokens, logits, _ = oracle.draft(5, 11)
    drafted = sequences.propose({0: 5})
    assert drafted.tokens.tolist() == [tokens]
    same(drafted.logits[0], logits, 1e-6)


def test_taps_are_the_mean_of_the_streams_after_their_layers():
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda *call: outputs.append(call[-1]))
        for layer in MODEL.model.layers
    ]
    taps = Taps((1, 2))
    try:
        hidden, streams = MODEL.model(torch.tensor([prompt(6)]), taps=taps)
    finally:
        for hook in hooks:
            hook.remove()
    means = [sum(outputs[i][:, :, k] for k in range(4)) / 4 for i in (1, 2)]
    same(taps.joined(), torch.cat(means, -1), 1e-14)
    plain_hidden, plain_streams = MODEL.model(torch.tensor([prompt(6)]))
    assert torch.equal(hidden, plain_hidden)
    assert torch.equal(streams, plain_streams)
    MODEL.model(torch.tensor([[1]]), taps=taps)
    with pytest.raises(ValueError, match="4 layers were read, wanted 2"):
        taps.joined()


def test_later_rows_of_a_block_matter_to_the_first():
    sequences, hidden = after(12), []

    def perturbed(module, arguments):
        embedded, blocks = arguments
        change = torch.zeros_like(embedded)
        change[4] = 1.0
        return embedded + change, blocks

    dspark = MODEL.dspark
    watch = dspark.register_forward_hook(lambda *call: hidden.append(call[-1]))
    sequences.propose({0: 3})
    change = dspark.register_forward_pre_hook(perturbed)
    sequences.propose({0: 3})
    watch.remove()
    change.remove()
    assert ((hidden[0] - hidden[1]).abs().amax(1) > 1e-6).all()


@pytest.mark.parametrize("stage", range(3))
def test_a_draft_reads_a_window_before_the_anchor_and_nothing_else(stage):
    sequences = after(20)
    layer = sequences.cache.layers[CONFIG.num_hidden_layers + stage]
    before = sequences.propose({0: 3})
    entries = layer.window.data.view(-1, CONFIG.head_dim)
    for position, matters in ((20 - WINDOW - 1, False), (20 - WINDOW, True), (19, True)):
        slot = layer.window_write_slots(torch.tensor([0]), torch.tensor([position]))
        entry = entries[slot].clone()
        entries[slot] = torch.nan if not matters else entry + 1
        logits = sequences.propose({0: 3}).logits
        assert torch.equal(logits, before.logits) != matters, position
        entries[slot] = entry
    slots = layer.window_write_slots(torch.zeros(5, dtype=torch.int64), torch.arange(20, 25))
    entries[slots] = torch.nan  # those of the block itself are elsewhere
    assert torch.equal(sequences.propose({0: 3}).logits, before.logits)


def test_stages_rotate_as_sliding_layers_whatever_the_tapped_layers_are():
    config = small(layer_types=(SLIDING, HCA, HCA))
    model = model_of(config)
    sequences = plain(model=model)
    sequences.step({0: prompt(150)[:60]})
    oracle = Oracle(config, model.state_dict())
    oracle.commit(sequences.step({0: prompt(60, 1)}), 60)
    same(sequences.propose({0: 3}).logits[0], oracle.draft(3, 120)[1], 1e-6)


def chosen(sequences: Sequences, anchor: int, tokens: list[int]):
    """The draft whose stages see one anchor and whose heads another, with forced tokens."""
    draft, rows = sequences.draft, torch.tensor([0])
    position = sequences.cache.lengths[rows]
    hidden = draft._hidden(torch.tensor([3]), draft._layers(sequences.cache), rows, position)
    forced = iter(tokens)
    rows = draft._chosen(
        hidden, torch.tensor([anchor]), position, lambda *_: torch.tensor([next(forced)])
    )
    return hidden, torch.cat(rows.logits), torch.cat(rows.confidence)


def test_the_token_before_changes_logits_by_its_markov_bias_alone():
    sequences = after(12)
    hidden, left, confident = chosen(sequences, 7, [1, 2, 3, 4, 5])
    _, right, other = chosen(sequences, 9, [1, 2, 3, 4, 5])
    w1 = STATE["mtp.2.markov_head.markov_w1.weight"]
    w2 = STATE["mtp.2.markov_head.markov_w2.weight"]
    same(left[0] - right[0], w2 @ (w1[7] - w1[9]))
    assert torch.equal(left[1:], right[1:])
    assert torch.equal(confident[1:], other[1:])
    assert confident[0] != other[0]
    base = Oracle(CONFIG, STATE).base_logits(hidden[0])
    for row, before in enumerate([7, 1, 2, 3, 4]):
        same(left[row], base[row] + w2 @ w1[before])


def test_confidence_is_of_the_hidden_states_before_the_norm():
    model = model_of(CONFIG)
    sequences = plain(model=model)
    sequences.step({0: prompt(12)})
    _, logits, confidence = chosen(sequences, 7, [1, 2, 3, 4, 5])
    model.dspark.last.norm.weight.mul_(2.0)
    _, changed, still = chosen(sequences, 7, [1, 2, 3, 4, 5])
    assert torch.equal(confidence, still)
    assert not torch.allclose(logits, changed)


def test_a_sampler_sees_logits_and_positions_and_its_choice_is_the_token_before():
    sequences, seen = after(9), []

    def sample(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        seen.append((logits.clone(), positions.tolist()))
        return logits.argmin(-1)

    drafted = sequences.propose({0: 3}, sample=sample)
    assert [positions for _, positions in seen] == [[10], [11], [12], [13], [14]]
    assert torch.equal(drafted.logits[0], torch.cat([logits for logits, _ in seen]))
    assert drafted.tokens.tolist() == [[int(logits.argmin()) for logits, _ in seen]]
    first = sequences.propose({0: 3})
    assert torch.equal(first.logits[:, 0], drafted.logits[:, 0])
    assert not torch.allclose(first.logits[:, 1], drafted.logits[:, 1])


def test_theta_cuts_a_suffix_on_the_device():
    sequences = after(12)
    whole = sequences.propose({0: 3})
    assert whole.lengths.tolist() == [5]
    for count in range(5):
        theta = whole.survival[0, count]
        cut = sequences.propose({0: 3}, theta=theta)
        expected = int((whole.survival[0] >= theta).sum())
        assert cut.lengths.tolist() == [expected]
        assert torch.equal(cut.tokens[:, :expected], whole.tokens[:, :expected])
        assert (cut.tokens[:, expected:] == -1).all()
    assert sequences.propose({0: 3}, theta=torch.tensor(1.5)).lengths.tolist() == [0]
    assert sequences.propose({0: 3}, theta=torch.tensor(torch.nan)).lengths.tolist() == [0]


def test_temperatures_divide_the_logits_of_confidence():
    sequences = after(12)
    confidence = sequences.propose({0: 3}).confidence
    hot = sequences.propose({0: 3}, temperatures=torch.full((5,), 2.0, dtype=torch.float64))
    same(hot.confidence, torch.sigmoid(torch.logit(confidence) / 2))


def test_a_nan_in_the_confidence_drops_the_tokens_from_there_on():
    sequences = after(12)
    temperatures = torch.tensor([1.0, 1.0, torch.nan, 1.0, 1.0])
    drafted = sequences.propose({0: 3}, temperatures=temperatures, theta=torch.tensor(0.0))
    whole = sequences.propose({0: 3})
    assert drafted.tokens.tolist() == [[*whole.tokens[0, :2].tolist(), -1, -1, -1]]


def test_logits_that_are_not_finite_drop_the_tokens_from_there_on():
    model = model_of(CONFIG)
    sequences = plain(model=model)
    sequences.step({0: prompt(12)})
    forced = [1, 2, 3, 4, 5]

    def sample(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.tensor([forced[int(positions) - 13]])

    assert sequences.propose({0: 7}, sample=sample).tokens.tolist() == [forced]
    model.dspark.last.markov_head.markov_w1.weight[2] = torch.nan
    cut = sequences.propose({0: 7}, sample=sample)
    assert cut.tokens.tolist() == [[1, 2, -1, -1, -1]]
    assert cut.lengths.tolist() == [2]


def test_without_a_confidence_head_all_tokens_are_verified():
    model = model_of(small(replace(DSPARK, confidence_head=False)))
    assert model.dspark.last.confidence_head is None
    drafted = plain(model=model).propose({0: 3}, theta=torch.tensor(2.0))
    assert drafted.confidence is drafted.survival is None
    assert drafted.lengths.tolist() == [5]


def test_sequences_do_not_see_each_other_and_padding_drafts_nothing():
    alone = {}
    for row, count in ((0, 4), (1, 13)):
        sequences = plain(2)
        sequences.step({row: prompt(count, row)})
        alone[row] = sequences.propose({row: 3 + row})
    both = plain(2)
    both.step({1: prompt(13, 1), 0: prompt(4)})
    untouched = [layer.window.data.clone() for layer in both.cache.layers]
    together = both.propose({1: 4, -1: 9, 0: 3}, theta=torch.tensor(0.0))
    for number, row in ((0, 1), (2, 0)):
        same(together.logits[number], alone[row].logits[0])
        assert together.tokens[number].tolist() == alone[row].tokens[0].tolist()
    assert together.tokens[1].tolist() == [-1] * 5
    assert together.lengths.tolist() == [5, 0, 5]
    for layer, data in zip(both.cache.layers, untouched, strict=True):
        assert torch.equal(layer.window.data, data)  # a draft writes nothing to the cache


@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_the_context_of_rejected_tokens_is_never_stored(accepted):
    straight, rejected = after(10), after(10)
    tokens = prompt(4, 5)
    stages = slice(CONFIG.num_hidden_layers, None)
    straight.step({0: tokens[:accepted]})
    before = [layer.window.data.clone() for layer in rejected.cache.layers[stages]]
    rejected.step({0: tokens}, accepted={0: accepted})
    rejected.cache.lengths[0] = 10 + accepted
    for layer, data in zip(rejected.cache.layers[stages], before, strict=True):
        slots = layer.window_write_slots(torch.zeros(4, dtype=torch.int64), torch.arange(10, 14))
        now, was = (d.view(-1, CONFIG.head_dim)[slots] for d in (layer.window.data, data))
        assert torch.equal(now[accepted:], was[accepted:])
        assert not torch.equal(now[:accepted], was[:accepted])
    same(rejected.propose({0: 3}).logits, straight.propose({0: 3}).logits)


def test_a_chunk_stores_only_what_a_draft_can_read():
    """Also after the last tokens were taken back; of others not even the context is computed."""
    rows: list[int] = []
    watch = MODEL.mtp[0].main_proj.register_forward_hook(lambda *call: rows.append(len(call[-1])))
    sequences = after(40)
    watch.remove()
    reach = WINDOW + sequences.cache.rollback
    assert rows == [reach]
    layer = sequences.cache.layers[-1]
    slots = layer.window_write_slots(torch.zeros(40, dtype=torch.int64), torch.arange(40))
    stored = layer.window.data.view(-1, CONFIG.head_dim)[slots].abs().amax(1) > 0
    assert stored.tolist() == [False] * (40 - reach) + [True] * reach
    shorter = plain()
    shorter.step({0: prompt(40)[:32]})
    sequences.cache.roll_back([0], [32])
    same(sequences.propose({0: 3}).logits, shorter.propose({0: 3}).logits)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 30), st.booleans()),
             min_size=1, max_size=4),
    st.integers(1, 12), st.booleans(),
)  # fmt: skip
def test_last_tokens_are_those_that_a_loop_finds(entries, count, all_stay):
    lengths = [length for length, *_ in entries]
    stay = [length if all_stay else min(accepted, length) for length, accepted, *_ in entries]
    starts = torch.tensor([start for _, _, start, _ in entries])
    rows = torch.tensor([-1 if pad else i for i, (*_, pad) in enumerate(entries)])
    batch = Batch.from_lengths(lengths, starts, rows)
    chosen = last_tokens(batch, None if all_stay else torch.tensor(stay), count)
    tokens = torch.arange(sum(lengths)) if chosen.tokens is None else chosen.tokens
    assert len(tokens) == min(sum(lengths), count * len(entries))
    chosen_positions = {
        (row, position)
        for row, position in zip(chosen.sequences.tolist(), chosen.positions.tolist(), strict=True)
        if row >= 0
    }
    if sum(lengths):
        assert torch.equal(chosen.positions, batch.positions[tokens])
    expected = {
        (int(row), int(start) + i)
        for row, start, n in zip(rows, starts, stay, strict=True)
        for i in range(max(0, n - count), n)
        if row >= 0
    }
    assert chosen_positions >= expected
    ends = {int(r): int(s) + n for r, s, n in zip(rows, starts, stay, strict=True)}
    assert all(ends[row] - count <= position < ends[row] for row, position in chosen_positions)


def test_pools_keep_the_page_of_the_oldest_position_that_a_draft_reads():
    config = small(sliding_window=64)
    sequences = plain(2, model=model_of(config), pool_tokens=512, max_chunk=32)
    sequences.cache.free(1)
    for begin in range(0, 127, 32):
        sequences.step({0: prompt(127)[begin : begin + 32]})
    before = sequences.propose({0: 3})
    assert sequences.cache.fork(0) == 1
    for row in (0, 1):
        assert torch.equal(sequences.propose({row: 3}).logits, before.logits)


def test_nothing_is_read_on_the_host():
    """The meta device has no values to read."""
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(CONFIG).bfloat16()
    cache = model.new_cache(2, 256, max_chunk=16)
    draft = DSparkDraft(model)
    rows = torch.empty(3, dtype=torch.int64, device="meta")
    batch = Batch.decode(rows, rows)
    taps = Taps(DSPARK.target_layer_ids)
    for layer in range(3):
        taps.take(layer, torch.empty(1, 3, 4, 32, dtype=torch.bfloat16, device="meta"))
    draft.commit(taps, cache, batch, accepted=rows)
    theta = torch.empty((), device="meta")
    drafted = draft.draft(rows, cache, rows, rows, theta=theta)
    assert drafted.tokens.shape == (3, 5)
    assert drafted.logits.dtype == drafted.survival.dtype == torch.float32


def test_a_bfloat16_draft_is_near_the_one_in_float64():
    narrow = model_of(CONFIG, dtype=torch.bfloat16)
    wide = model_of(CONFIG, dtype=torch.bfloat16).to(torch.float64)
    logits = []
    for model in (narrow, wide):
        sequences = Sequences.of(model)
        sequences.step({0: prompt(12)})
        logits.append(sequences.propose({0: 3}).logits[0, 0].double())
    assert (logits[0] - logits[1]).abs().max() < 0.15 * logits[1].abs().max()


def test_errors_name_the_argument():
    sequences = after(6)
    draft, cache, zero = sequences.draft, sequences.cache, torch.tensor([0])
    with pytest.raises(ValueError, match=r"sequences has shape \[2\]"):
        draft.draft(zero, cache, torch.tensor([0, 1]), zero)
    taps = draft.taps()
    MODEL.model(torch.tensor([prompt(6)]), taps=taps)
    with pytest.raises(ValueError, match="batch has 1 tokens, wanted 6"):
        draft.commit(taps, cache, Batch.decode(zero, zero))
    with pytest.raises(ValueError, match="0 layers were read, wanted 3"):
        draft.commit(draft.taps(), cache, Batch.decode(zero, zero))
    plain_model = model_of(CONFIG.without_draft())
    with pytest.raises(ValueError, match="model has no DSpark draft"):
        DSparkDraft(plain_model)
    with pytest.raises(ValueError, match="cache has 0 layers after the main ones, wanted 3"):
        draft.draft(zero, plain_model.new_cache(1, 64), zero, zero)
    with pytest.raises(ValueError, match="has a DSpark draft, wanted layers of multi-token"):
        MODEL.draft(torch.tensor([[1]]), torch.zeros(1, 1, 4, 32, dtype=torch.float64))
    attention = MODEL.dspark.attentions()[0]
    with pytest.raises(TypeError, match="past_key_values is NoneType, wanted DraftBlocks"):
        attention(torch.zeros(1, 5, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"config\.dspark is None"):
        DeepseekV4DSpark(CONFIG.without_draft())
