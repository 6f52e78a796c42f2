"""What all ranks do together after their configuration is agreed: mailboxes, and kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dsv4.compilation import warmup
from dsv4.compilation.warmup import Warmup, warm_ranks
from dsv4.config import ModelConfig
from dsv4.parallel import context as contexts
from dsv4.parallel import exchange_mailboxes, groups, mailboxes, opening
from dsv4.parallel.context import ParallelContext
from dsv4.parallel.process_group import DistributedGroup
from dsv4.testing.ranks import run_ranks

GPU = torch.device("cuda", 0)


class Ranks(DistributedGroup):
    """A group of threads that passes for one of processes."""

    def __init__(self, context: ParallelContext) -> None:
        self.name, self.mailbox = "of the tests", None
        self.exchange = context.group.exchange


def opened(monkeypatch, make):
    """Open the mailboxes of two ranks; the group of each."""

    def work(context):
        own = ParallelContext(context.rank, context.size, Ranks(context))
        opening.open_mailboxes(own, GPU)
        return own.group

    monkeypatch.setattr(opening, "_made", make)
    return run_ranks(2, work)


def test_all_ranks_have_them(monkeypatch):
    boxes = mailboxes.virtual(2, 16)
    made = opened(monkeypatch, lambda context, group, device: boxes[context.rank])
    assert [group.mailbox for group in made] == boxes


def test_where_one_rank_has_none_all_have_none(monkeypatch, caplog):
    def make(context, group, device):
        if context.rank:
            raise RuntimeError("no peer access\nsecond line")
        return mailboxes.virtual(2, 16)[0]

    made = opened(monkeypatch, make)
    assert [group.mailbox for group in made] == [None, None]
    said = [record.getMessage() for record in caplog.records]
    assert said == ["sums over ranks are those of the process group: no peer access"] * 2


def test_on_a_cpu_and_in_other_groups_there_are_none():
    for device in (torch.device("cpu"), GPU):
        group = SimpleNamespace(name="", mailbox=None)
        opening.open_mailboxes(ParallelContext(0, 2, group), device)
        assert group.mailbox is None


def test_gloo_between_gpus_has_none(monkeypatch, caplog):
    """Processes on one GPU share memory by IPC; several GPUs need NCCL's group."""

    def opened_for_tokens(context):
        own = ParallelContext(context.rank, context.size, Ranks(context), "dp")
        return exchange_mailboxes.open_for(own, ModelConfig.tiny(), GPU, torch.bfloat16)

    monkeypatch.setattr(groups, "transport", lambda name, device: "gloo")
    monkeypatch.setattr(mailboxes, "ipc", lambda *arguments: arguments)
    for uuids, kind in ((["a", "a"], tuple), (["a", "b"], None)):
        names = iter(2 * uuids)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device, names=names: SimpleNamespace(uuid=next(names)),
        )

        def work(context):
            return opening.make(Ranks(context), 16, GPU)

        if kind is None:
            with pytest.raises(RuntimeError, match="backend for cuda tensors is 'gloo', wanted"):
                run_ranks(2, work)
            assert run_ranks(2, opened_for_tokens) == [None, None]
            (record,) = caplog.records
            assert (
                "tokens are exchanged by the process group, not pushed: the group's"
                in record.message
            )
        else:
            assert run_ranks(2, work) == [("of the tests", 16, GPU)] * 2
            assert all(isinstance(made, kind) for made in run_ranks(2, opened_for_tokens))


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_rank_0_compiles_first_and_failures_are_everybodys(monkeypatch, failing):
    order = []

    def warmed(model, max_tokens, progress):
        rank = model.parallel.rank
        order.append(rank)
        return Warmup(1, 1, 0.0, failed={"kernel": "why"} if rank == failing else {})

    monkeypatch.setattr(warmup, "warm_loaded", warmed)
    done = run_ranks(3, lambda context: warm_ranks(SimpleNamespace(parallel=context), 8, False))
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]
    assert [d.failed for d in done] == [{} if failing is None else {"kernel": "why"}] * 3


def test_where_a_rank_has_no_gpu_nothing_is_warm(monkeypatch):
    monkeypatch.setattr(warmup, "warm_loaded", lambda model, *_: None)
    done = run_ranks(2, lambda context: warm_ranks(SimpleNamespace(parallel=context), 8, False))
    assert done == [None, None]
    assert warm_ranks(SimpleNamespace(parallel=None), 8, False) is None


@pytest.mark.parametrize("ranks", [0, 3, 32])
def test_a_configuration_that_cannot_be_split(ranks):
    with pytest.raises(ValueError, match=f"{ranks}( ranks|, wanted 1 to 16)"):
        warmup.check_ranks(ModelConfig.flash(), contexts.Ranks(ranks))
    with pytest.raises(ValueError, match="model a module, wanted a configuration"):
        warmup.check_ranks(torch.nn.Linear(2, 2), contexts.Ranks(ranks))
    with pytest.raises(ValueError, match="parallel is 'ep', wanted one of tp, dp"):
        warmup.check_ranks(ModelConfig.flash(), contexts.Ranks(2, "ep"))
    warmup.check_ranks(ModelConfig.flash(), contexts.Ranks(16, "dp"))  # divides experts alone
