"""Tokens to the ranks of their experts and back: kernels bit for bit, and what is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import dispatch, ops
from dsv4.config import ModelConfig
from dsv4.ops.moe_exchange import MoeReturnArgs, MoeSendArgs
from dsv4.parallel import exchange_mailboxes, groups, mailboxes
from dsv4.parallel.context import ParallelContext
from dsv4.parallel.token_rows import RowLayout
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.ranks import run_ranks
from tests.parallel.exchange_cases import Exchange, exchange

KERNELS = ("triton",)
REFERENCE = False
INTERPRETED_SHARE = 4
GROUP = "of the tests"


def check_push(boxes, case) -> None:
    """All ranks push, then all of them read, both ways."""
    from dsv4.triton import moe_exchange as kernels

    for box, args in zip(boxes, case.sent, strict=True):
        kernels.push_tokens(box, args)
    for rank, box in enumerate(boxes):
        rows, ids, weights = kernels.receive_tokens(box, case.sent[rank])
        right_rows, right_ids, right_weights = case.received(rank)
        assert_bitwise(ids, right_ids)
        assert_bitwise(weights, right_weights)
        here = (ids >= 0).any(1)
        assert_bitwise(rows[here], right_rows[here])
    for rank, box in enumerate(boxes):
        args = case.returning(rank)
        absent = (args.received < 0).all(1, keepdim=True)
        poisoned = args.y.masked_fill(absent, float("nan"))  # rows that nothing may read
        kernels.push_results(box, args._replace(y=poisoned))
    for rank, box in enumerate(boxes):
        assert_bitwise(kernels.sum_results(box, case.returning(rank)), case.result(rank))


class TestPush:
    @given(
        ranks=st.integers(1, 8),
        steps=st.lists(
            st.tuples(st.sampled_from([0, 1, 3]), st.sampled_from([8, 40, 2056])),
            min_size=1,
            max_size=3,
        ),
        weights=st.sampled_from([torch.float32, torch.bfloat16]),
        seed=st.integers(0, 99),
    )
    def test_tokens_and_sums_are_those_of_the_reference(self, device, ranks, steps, weights, seed):
        boxes = mailboxes.virtual(ranks, 2 * 3 * 2080, device)
        for box in boxes:
            box.slots[box.rank].view(torch.int16).fill_(-1)  # NaN, and ids of -1
        for step, (tokens, hidden) in enumerate(steps):
            check_push(boxes, exchange(ranks, tokens, hidden, 3, 2, seed + step, device, weights))

    def test_a_token_goes_once_to_each_rank_that_needs_it(self, device):
        """Two of its experts are on rank 2, none on rank 1."""
        from dsv4.triton import moe_exchange as kernels

        boxes = mailboxes.virtual(3, 4096, device)
        for box in boxes:
            box.slots[box.rank].fill_(-7)
        ids = torch.tensor([[4, 0, 5]], device=device)
        x = torch.ones(1, 16, dtype=torch.bfloat16, device=device)
        args = MoeSendArgs(x, ids, torch.ones(1, 3, device=device), 6, "")
        kernels.push_tokens(boxes[1], args)
        layout = RowLayout.of(x, ids)
        values = slice(layout.head, layout.head + 16)
        written = [(box.slots[box.rank][1, 1, values] == 1).all().item() for box in boxes]
        assert written == [True, False, True]
        assert all(int(box.flags[box.rank][1, 1, 0]) == 1 for box in boxes)
        untouched = torch.cat([box.slots[box.rank][1, 1, layout.elements :] for box in boxes])
        assert bool((untouched == -7).all())

    def test_what_does_not_fit_is_not_written(self):
        pytest.importorskip("triton")
        from dsv4.triton import moe_exchange as kernels

        (box,) = mailboxes.virtual(1, 2)
        case = exchange(1, 49, 8)
        with pytest.raises(ValueError, match="each rank has 49 tokens, and a slot holds 16"):
            kernels.push_tokens(box, case.sent[0])
        with pytest.raises(ValueError, match="each rank has 49 tokens, and a slot holds 16"):
            kernels.push_results(box, case.returning(0))


class TestReference:
    @given(ranks=st.integers(1, 8), seed=st.integers(0, 99))
    def test_sums_do_not_depend_on_which_rank_has_the_token(self, ranks, seed):
        """Tokens in the reverse order of ranks give the reverse results."""
        case = exchange(ranks, 2, 8, seed=seed)
        mirrored = Exchange(
            case.sent[::-1],
            [y.view(ranks, 2, 8).flip(0).reshape(-1, 8) for y in case.y],
            case.shared[::-1],
        )
        for rank in range(ranks):
            assert_bitwise(mirrored.result(rank), case.result(ranks - 1 - rank))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_of_one_rank_it_is_a_copy_and_a_sum(self, dtype):
        x, ids = torch.randn(3, 8).to(dtype), torch.tensor([[0, 1], [-1, 2], [2, -1]])
        weights, shared = torch.rand(3, 2), torch.randn(3, 8).to(dtype)
        rows, received, row_weights = ops.moe_send(x, ids, weights, 2)
        here = torch.tensor([True, False, False])
        assert_bitwise(rows[here], x[here])
        assert received.tolist() == [[0, 1], [-1, -1], [-1, -1]]
        assert_bitwise(row_weights[here], weights[here])
        assert not row_weights[1:].any()
        total = ops.moe_return(rows, received, ids, 2, shared=shared)
        expected = torch.where(here[:, None], x, 0).to(torch.float64) + shared
        assert_bitwise(total, expected.to(dtype))

    def test_torch_knows_the_operators(self):
        x, ids, weights = torch.randn(3, 8), torch.zeros(3, 2, dtype=torch.long), torch.rand(3, 2)
        send = torch.ops.dsv4.moe_send.default
        kinds = ("test_schema", "test_faketensor")
        torch.library.opcheck(send, (x, ids, weights, 2, "", "auto"), test_utils=kinds)
        back = torch.ops.dsv4.moe_return.default
        args = (x, ids.int(), ids, None, 2, "", "auto")
        torch.library.opcheck(back, args, test_utils=kinds)

    def test_bad_arguments(self):
        x, ids, weights = torch.randn(3, 8), torch.zeros(3, 2, dtype=torch.long), torch.rand(3, 2)
        with pytest.raises(ValueError, match=r"moe_send: ids\[0, 0\] is 3, wanted an expert, 0 to"):
            ops.moe_send(x, ids + 3, weights, 2)
        with pytest.raises(ValueError, match="moe_send: num_experts is 0, wanted a multiple"):
            ops.moe_send(x, ids, weights, 0)
        with pytest.raises(ValueError, match=r"moe_return: received has shape \[2, 2\], wanted"):
            ops.moe_return(x, ids[:2].int(), ids, 2)
        with pytest.raises(ValueError, match=r"group is 'dp', and torch\.distributed is not init"):
            ops.moe_send(x, ids, weights, 2, "dp")


@pytest.fixture
def eight_gpus(monkeypatch):
    """A group of GPUs with mailboxes, as dispatch sees it: nothing can run, all can be asked."""
    from dsv4.parallel import exchange_supports

    box = mailboxes.virtual(8, RowLayout(6, 4096).nbytes(64))[0]
    monkeypatch.setitem(mailboxes._OPEN, GROUP, box)
    monkeypatch.setattr(groups, "size", lambda name: box.ranks)
    monkeypatch.setattr(groups, "transport", lambda name, device: "nccl")
    monkeypatch.setattr(type(box), "device", property(lambda self: torch.device("cuda", 0)))
    monkeypatch.setattr(exchange_supports, "no_triton", lambda device: None)
    return box


def chosen(op, tokens=64, dtype=torch.bfloat16, group=GROUP):
    """The first row for tokens on a GPU, and the reasons against those before it."""
    x = torch.empty(tokens, 4096, dtype=dtype, device="meta")
    ids = torch.empty(tokens, 6, dtype=torch.long, device="meta")
    weights = torch.empty(tokens, 6, device="meta")
    args = MoeSendArgs(x, ids, weights, 256, group)
    if op == "moe_return":
        args = MoeReturnArgs(x, ids, ids, None, 256, group)
    call = dispatch.Call(op, args, torch.device("cuda", 0))
    explanation = dispatch._explanation(call, "auto")
    return explanation.chosen, dict(explanation.candidates)


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize("op", ["moe_send", "moe_return"])
class TestChoice:
    """The same on every rank: by sizes, dtypes and the group's mailboxes."""

    def test_tokens_that_fit_a_slot_are_pushed(self, op):
        assert chosen(op)[0] == "push"

    def test_more_tokens_go_to_nccl(self, op):
        name, reasons = chosen(op, 65)
        assert name == "nccl"
        assert reasons["push"] == "each rank has 65 tokens, and a slot holds 64"

    def test_other_dtypes_go_to_nccl(self, op):
        name, reasons = chosen(op, dtype=torch.float32)
        assert name == "nccl"
        assert reasons["push"] == "the rows are torch.float32, and mailboxes hold bfloat16"

    def test_a_kernel_that_failed_its_check_is_passed_over(self, op, eight_gpus):
        eight_gpus.defect = "its check found wrong sums on 1 of 8 ranks"
        name, reasons = chosen(op)
        assert (name, reasons["push"]) == ("nccl", eight_gpus.defect)

    def test_without_mailboxes_nccl_and_the_reason(self, op, monkeypatch):
        monkeypatch.delitem(mailboxes._OPEN, GROUP)
        name, reasons = chosen(op)
        assert name == "nccl"
        assert "has no mailboxes, which dsv4.parallel.mailboxes.symmetric makes" in reasons["push"]

    def test_alone_there_is_nothing_to_exchange(self, op):
        name, reasons = chosen(op, group="")
        assert name == "reference"
        assert "this process alone" in reasons["push"]
        assert reasons["push"] == reasons["nccl"] == reasons["gloo"]


class TestMailboxes:
    def test_on_a_cpu_there_are_none(self):
        def work(context):
            own, cpu = replace(context, mode="dp"), torch.device("cpu")
            assert exchange_mailboxes.open_for(own, ModelConfig.tiny(), cpu, torch.bfloat16) is None

        run_ranks(2, work)
        gpu = torch.device("cuda", 0)
        assert exchange_mailboxes.open_for(None, ModelConfig.tiny(), gpu, torch.bfloat16) is None

    @pytest.mark.usefixtures("eight_gpus")
    def test_those_of_an_earlier_model_are_used_again(self, monkeypatch):
        """They must have room on all ranks; else all make new ones."""

        class Group:
            name, others = GROUP, True

            def exchange(self, value):
                return [value, self.others if value is True or value is False else value]

        def refuse(*arguments):
            raise RuntimeError("no peer access")

        monkeypatch.setattr(mailboxes, "symmetric", refuse)
        group, gpu = Group(), torch.device("cuda", 0)
        context = ParallelContext(0, 2, group, "dp")

        def opened():
            return exchange_mailboxes.open_for(context, ModelConfig.flash(), gpu, torch.bfloat16)

        assert opened() is None  # for 64 tokens: too small
        box = mailboxes.virtual(8, RowLayout(6, 4096).nbytes(exchange_mailboxes.PUSHED_TOKENS))[0]
        monkeypatch.setitem(mailboxes._OPEN, GROUP, box)
        assert opened() is box
        group.others = False
        assert opened() is None
