"""One rank of an emulated group: its own mailboxes, sums, gathers, layers and plans."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import layers, ops
from dsv4.config import CSA, ModelConfig
from dsv4.device import interpret_triton
from dsv4.dispatch import explain
from dsv4.kv_cache.paged_cache import Batch, CacheStep
from dsv4.layers import DeepseekV4Experts
from dsv4.layers.moe import UNROUTED
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel import gather, groups, mailboxes
from dsv4.parallel.context import DATA, TENSOR, Ranks
from dsv4.parallel.emulated import emulated_context, emulated_exchange, emulated_rank
from dsv4.parallel.local_model import local_model
from dsv4.reference.all_reduce import rank_ordered_sum
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import random_model
from tests.parallel.exchange_cases import exchange
from tests.parallel.test_all_reduce import between_sublayers, partial_sums
from tests.plans.layer_plan_cases import Twins, plans_of, switch

KERNELS = ("triton",)
REFERENCE = False
INTERPRETED_SHARE = 4
RANKS = 2


def test_names():
    name = groups.emulated_name(4)
    assert (groups.size(name), groups.rank(name)) == (4, 0)
    assert groups.transport(name, torch.device("cpu")) is None
    assert groups.emulated_ranks("tp") is groups.emulated_ranks("emulated:") is None
    with pytest.raises(ValueError, match=r"emulated ranks: 17, wanted 2 to 16"):
        emulated_context(17)


@given(
    ranks=st.integers(2, 8),
    shapes=st.lists(st.sampled_from([(7,), (1024,), (2, 1030), (3, 0)]), min_size=4, max_size=6),
)
def test_what_is_pushed_to_a_peer_arrives_as_if_it_had_pushed_it(device, ranks, shapes):
    context = emulated_context(ranks, device)
    for seed, shape in enumerate(shapes):
        (part,) = partial_sums(1, shape, device, seed)
        total = ops.all_reduce(part, context.group.name, backend="push")
        assert_bitwise(total, rank_ordered_sum([part] * ranks))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]
)
def test_bits_are_gathered_by_mailboxes(device, dtype):
    """In order of the ranks; NaN and integers keep their bits."""
    boxes = mailboxes.virtual(3, 8192, device)
    from dsv4.triton import all_reduce

    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (3, 37 * 4), generator=generator).to(torch.int16)
    parts = [part.to(device).view(dtype) for part in bits]
    for box, part in zip(boxes, parts, strict=True):
        all_reduce.push_flat(box, part.view(torch.bfloat16))
    context = emulated_context(4, device)
    for part in parts:
        assert gather.unfit(mailboxes.of_group(context.group.name), part) is None
        gathered = context.group.all_gather(part.view(-1, 1))
        assert len(gathered) == 4
        for copy in gathered:
            assert copy.shape == (part.numel(), 1)
            assert torch.equal(copy.view(-1).view(torch.int16), part.view(torch.int16))


def test_ranks_are_gathered_in_their_order(device):
    """Each rank's part differs; ranks push in turn, and the last one's launch reads all."""
    from dsv4.triton import all_reduce

    boxes = mailboxes.virtual(3, 8192, device)
    for call in range(4):
        parts = partial_sums(3, (1500,), device, call)
        for box, part in list(zip(boxes, parts, strict=True))[:2]:
            all_reduce.push_flat(box, part)
        assert_bitwise(all_reduce.gathered(boxes[2], parts[2]), torch.stack(parts))


def test_what_mailboxes_do_not_gather():
    mailbox = mailboxes.emulated(2, 4096)
    odd = torch.zeros(3, dtype=torch.bool)
    assert "3 elements of 1 bytes" in gather.unfit(mailbox, odd)
    assert "Triton kernels" in gather.unfit(mailbox, torch.zeros(3))
    with interpret_triton():
        assert "a slot holds 2048" in gather.unfit(mailbox, torch.zeros(4096))
    mailbox.defect = "it is wrong"
    assert gather.unfit(mailbox, torch.zeros(3)) == "it is wrong"
    assert [copy.tolist() for copy in gather.gather(odd, groups.emulated_name(2))] == [
        [False] * 3
    ] * 2


@pytest.mark.parametrize(("ranks", "tokens", "hidden"), [(2, 1, 1056), (4, 5, 40)])
def test_operators_with_a_sum_have_the_bits_of_their_parts(device, ranks, tokens, hidden):
    """The fused operators, chosen by dispatch, and ``all_reduce`` before the plain ones."""
    name = emulated_context(ranks, device).group.name
    mailbox = mailboxes.emulated(ranks, 1 << 16, device)
    args = between_sublayers(tokens, hidden, device, 0)
    (partial,) = partial_sums(1, (tokens, hidden), device)
    fields = {key: value for key, value in args._asdict().items() if key != "y"}
    write_back = {key: fields[key] for key in ("streams", "post", "comb")}
    for op, plain, named in (
        (ops.hc_reduce_post_pre_norm, ops.hc_post_pre_norm, fields),
        (ops.hc_reduce_post, ops.hc_post, write_back),
    ):
        assert explain(op, partial, **named, group=name).chosen == "push"
        results = op(partial, **named, group=name)
        expected = plain(ops.all_reduce(partial, name), **named)
        if isinstance(results, torch.Tensor):
            results, expected = (results,), (expected,)
        for result, right in zip(results, expected, strict=True):
            assert_bitwise(result, right)
    assert mailbox.counter.tolist() == [4, 0]


def test_where_the_mailboxes_are_too_small_the_operators_say_so(device):
    name = groups.emulated_name(2)
    mailbox = mailboxes.emulated(2, 2048, device)
    args = between_sublayers(3, 1024, device, 0)
    partial = torch.ones(3, 1024, device=device).bfloat16()
    explanation = explain(
        ops.hc_reduce_post, partial, args.streams, args.post, args.comb, group=name
    )
    assert explanation.chosen != "push"
    assert (
        dict(explanation.candidates)["push"] == "the sum has 3072 elements, and a slot holds 1024"
    )
    result = ops.hc_reduce_post(partial, args.streams, args.post, args.comb, group=name)
    assert_bitwise(result, ops.hc_post(2 * partial, args.streams, args.post, args.comb))
    assert mailbox.counter.tolist() == [0, 0]


@given(
    ranks=st.integers(2, 8),
    steps=st.lists(st.integers(0, 5), min_size=3, max_size=6),
    seed=st.integers(0, 99),
)
def test_tokens_come_from_peers_that_hold_the_same_experts(device, ranks, steps, seed):
    """Also where a slot has tokens of an earlier call; rows that nothing may read are NaN."""
    config = ModelConfig.tiny(hidden_size=40, num_experts_per_tok=3)
    context = emulated_exchange(ranks, config, device)
    mailboxes.of_group(context.group.name).slots[0].view(torch.int16).fill_(-1)
    for step, tokens in enumerate(steps):
        case = exchange(ranks, tokens, 40, seed=seed + step, device=device)
        x, ids, weights, experts, _ = case.sent[0]
        sent = (x, ids, weights, experts, context.group.name)
        right = ops.moe_send(*sent, backend="reference")
        rows, received, row_weights = ops.moe_send(*sent, backend="push")
        assert_bitwise(received, right[1])
        assert_bitwise(row_weights, right[2])
        here = (received >= 0).any(1)
        assert here[:tokens].equal(((ids >= 0) & (ids < experts // ranks)).any(1))
        assert_bitwise(rows[here], x.repeat(ranks, 1)[here])
        y = case.y[0].masked_fill(~here.unsqueeze(1), float("nan"))
        back = (y, received, ids, experts, context.group.name)
        total = ops.moe_return(*back, shared=case.shared[0], backend="push")
        assert_bitwise(total, ops.moe_return(*back, shared=case.shared[0], backend="reference"))


def tiny_rank(mode: str = TENSOR, *, with_mailboxes: bool) -> DeepseekV4ForCausalLM:
    """Rank 0's part of a packed model of one layer; of two that have tokens of their own."""
    kinds = ("moe",) if mode == TENSOR else ("hash_moe", "moe")
    config = ModelConfig.tiny(
        layer_types=(CSA,) * len(kinds), mlp_layer_types=kinds, o_groups=2, n_routed_experts=8,
        num_nextn_predict_layers=0,
    )  # fmt: skip
    whole = random_model(config, 3, torch.bfloat16)
    layers.quantize_(whole)
    context = emulated_rank(Ranks(RANKS, mode), config, with_mailboxes=with_mailboxes)
    return local_model(whole, context)


def test_a_step_by_mailboxes_has_the_bits_of_sums_without():
    """The decoder's two fused sums, the embedding's, and the gather of logits, in kernels."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled in this process, not interpreted")

    def step(model: DeepseekV4ForCausalLM) -> list[torch.Tensor]:
        cache = model.new_cache(1, 16)
        rows = [cache.allocate()]
        logits = model.prefill([[1, 2, 3]], cache, rows)
        return [logits, model.decode(torch.tensor([4]), cache, rows)]

    with interpret_triton():
        pushed = tiny_rank(with_mailboxes=True)
        results = step(pushed)
        counter = mailboxes.of_group(groups.emulated_name(RANKS)).counter.tolist()
        del pushed
        expected = step(tiny_rank(with_mailboxes=False))
    # Per step: the embedding, two sums of the layer, and the logits.
    assert counter == [2 * 4, 0]
    for result, right in zip(results, expected, strict=True):
        assert_bitwise(result, right)


def test_a_block_by_mailboxes_has_the_bits_of_one_without():
    """Routed experts, which get the tokens of all ranks, and the shared expert, in kernels."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled in this process, not interpreted")
    x, ids = torch.randn(1, 3, 64).bfloat16(), torch.tensor([[5, UNROUTED, 9]])
    with interpret_triton(), torch.no_grad():
        pushed = tiny_rank(DATA, with_mailboxes=True)
        results = [layer.mlp(x, ids) for layer in pushed.model.layers]
        counter = mailboxes.of_group(groups.emulated_name(RANKS)).counter.tolist()
        del pushed
        copied = tiny_rank(DATA, with_mailboxes=False)
        expected = [layer.mlp(x, ids) for layer in copied.model.layers]
    assert counter == [2 * len(results), 0], "tokens went, and came back"
    for result, right in zip(results, expected, strict=True):
        assert_bitwise(result, right)


class Operators(TorchDispatchMode):
    """Names of this package's operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "dsv4":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_the_decoder_sums_where_it_writes_back():
    """Only the embedding's sum is an operator of its own."""
    model = tiny_rank(with_mailboxes=False)
    with Operators() as called:
        model.model(torch.tensor([[1, 2, 3]]))
    counts = {name: called.names.count(name) for name in called.names}
    assert counts["hc_reduce_post_pre_norm"] == counts["hc_reduce_post"] == 1
    assert counts["all_reduce"] == 1
    assert not {"hc_post", "hc_post_pre_norm"} & set(counts)


@pytest.mark.parametrize("mode", [TENSOR, DATA])
def test_layers_of_a_rank_are_planned(mode):
    """A replayed layer gives the layer's bits, with what goes over ranks as whole operators."""
    with switch() as made:
        model = tiny_rank(mode, with_mailboxes=False)
        twins = Twins(model, made)
        twins.warm()
        planned = [plan.again is not None for plan in plans_of(model)].count(True)
        assert planned == len(model.model.layers)
        twins.same_caches()


def test_planned_layers_leave_padding_out():
    """A replayed step has padding at another place; it goes to no expert of any rank."""
    chosen = []
    experts = DeepseekV4Experts.forward

    def seen(self, x, ids, *others):
        chosen.append(ids)
        return experts(self, x, ids, *others)

    with switch() as made, pytest.MonkeyPatch.context() as patch:
        twins = Twins(tiny_rank(DATA, with_mailboxes=False), made)
        rows = twins.begin([1, 2, 3], [4, 5])
        for is_padding in (False, False, True, False, True, True):
            padded = torch.tensor([rows[0], -1 if is_padding else rows[1]])
            tokens = torch.tensor([7, 0 if is_padding else 8])

            def step(cache, rows=padded, tokens=tokens):
                batch = Batch.decode(torch.where(rows < 0, 0, cache.lengths[rows]), rows)
                hidden, _ = twins.model.model(tokens[None], None, CacheStep(cache, batch))
                cache.advance(batch)
                return hidden[:, rows >= 0]

            present = rows[:1] if is_padding else rows
            for cache in twins.caches:
                cache.prepare(present, [1] * len(present), cache.lengths[present].tolist())
            twins.both(step)
        assert made.ran == 0, "the last step was replayed"
        twins.same_caches()
        patch.setattr(DeepseekV4Experts, "forward", seen)
        step(twins.caches[1])
    assert [ids.tolist()[1::2] for ids in chosen] == [[[-1, -1]] * RANKS] * 2
    assert all(int((ids >= 0).sum()) <= 2 * RANKS for ids in chosen)
