"""Sums over ranks: the push kernel bit for bit, and which implementation is chosen, and why."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import device as machine
from dsv4 import dispatch, ops
from dsv4.dispatch import explain
from dsv4.ops.all_reduce import AllReduceArgs
from dsv4.parallel import groups, mailboxes, multicast, supports
from dsv4.parallel.process_group import context_of
from dsv4.reference.all_reduce import rank_ordered_sum
from dsv4.testing.assertions import assert_bitwise

KERNELS = ("triton",)
REFERENCE = False
INTERPRETED_SHARE = 4
GROUP = "of the tests"
PRE = {"norm_eps": 1e-6, "hc_eps": 1e-6, "iterations": 3}


def partial_sums(ranks, shape, device, seed=0):
    """Partial sums with cancellation, so that another order gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(shape, generator=generator) for _ in range(ranks)]
    if ranks > 2:
        parts[0] *= 2.0**24
        parts[2] = -parts[0]
    return [part.bfloat16().to(device) for part in parts]


class TestPush:
    """Ranks of one process push in turn, and then all of them add."""

    @given(
        ranks=st.integers(1, 8),
        shapes=st.lists(
            st.sampled_from([(1,), (7,), (1024,), (2, 1030), (3, 0), (2, 3, 5)]),
            min_size=4,
            max_size=6,
        ),
        seed=st.integers(0, 99),
    )
    def test_all_ranks_get_the_rank_ordered_sum(self, device, ranks, shapes, seed):
        from dsv4.triton import all_reduce

        boxes = mailboxes.virtual(ranks, 8192, device)
        for shape in shapes:
            parts = partial_sums(ranks, shape, device, seed)
            if parts[0].numel():
                for box, part in zip(boxes, parts, strict=True):
                    all_reduce.push_flat(box, part)
            expected = rank_ordered_sum(parts)
            for box, part in zip(boxes, parts, strict=True):
                assert_bitwise(all_reduce.sum_pushed(box, part), expected)

    def test_order_matters_to_the_drawn_sums(self, device):
        first, second, third = partial_sums(3, (1024,), device)
        total = rank_ordered_sum([first, second, third])
        assert not torch.equal(total, rank_ordered_sum([first, third, second]))

    def test_one_launch_pushes_and_adds(self, device):
        from dsv4.triton import all_reduce

        (box,) = mailboxes.virtual(1, 4096, device)
        for seed in range(2 * mailboxes.GENERATIONS):
            (part,) = partial_sums(1, (2, 700), device, seed)
            assert_bitwise(all_reduce.exchange(box, part), part)
        assert box.counter.tolist() == [2 * mailboxes.GENERATIONS, 0]

    def test_calls_are_counted_from_1_again(self, device):
        from dsv4.triton import all_reduce
        from dsv4.triton._lib import mailbox

        last = mailbox._LAST_CALL.value
        assert last % mailboxes.GENERATIONS == 0
        boxes = mailboxes.virtual(2, 256, device)
        for box in boxes:
            box.counter[0] = last - 1
        for seed in range(4):
            parts = partial_sums(2, (100,), device, seed)
            for box, part in zip(boxes, parts, strict=True):
                all_reduce.push_flat(box, part)
            for box, part in zip(boxes, parts, strict=True):
                assert_bitwise(all_reduce.sum_pushed(box, part), rank_ordered_sum(parts))
        assert boxes[0].counter.tolist() == [3, 0]

    @pytest.mark.parametrize(
        ("ranks", "tokens", "hidden"), [(2, 1, 1056), (4, 3, 40), (3, 5, 24), (8, 1, 64)]
    )
    def test_the_fused_consumer_gives_the_bits_of_its_parts(self, device, ranks, tokens, hidden):
        """Up to 4 tokens the sum is added in the mixing GEMM, above in the write-back's launch."""
        from dsv4.ops._library import as_record
        from dsv4.ops.hyper_connection import HcPostPreNormArgs
        from dsv4.triton import all_reduce, hyper_connection

        boxes = mailboxes.virtual(ranks, tokens * 2048 * 2, device)
        for seed in range(2):
            args = between_sublayers(tokens, hidden, device, seed)
            parts = partial_sums(ranks, (tokens, hidden), device, seed)
            whole = as_record(HcPostPreNormArgs, args, y=rank_ordered_sum(parts))
            expected = hyper_connection.hc_post_pre_norm(whole)
            pushed = [all_reduce.push(b, part) for b, part in zip(boxes, parts, strict=True)]
            for box_of_rank in pushed[: 1 + seed]:
                results = hyper_connection.reduced_post_pre_norm(args, box_of_rank)
                for result, right in zip(results, expected, strict=True):
                    assert_bitwise(result, right)


def test_reading_before_a_rank_pushed_is_an_error_in_the_interpreter():
    """On a GPU the kernel waits; where nothing else runs it would wait for ever."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled in this process, not interpreted")
    from dsv4.triton import all_reduce

    boxes = mailboxes.virtual(2, 256)
    parts = partial_sums(2, (100,), "cpu")
    all_reduce.push_flat(boxes[0], parts[0])
    with pytest.raises(Exception, match="a rank has not pushed yet"):
        all_reduce.sum_pushed(boxes[0], parts[0])


def between_sublayers(tokens, hidden, device, seed):
    """Arguments of ``hc_post_pre_norm`` with a ``y`` of NaN, which nothing may read."""
    from dsv4.ops.hyper_connection import HcPostPreNormArgs

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    return HcPostPreNormArgs(
        y=torch.full((tokens, hidden), float("nan"), device=device).bfloat16(),
        streams=normal(tokens, 4, hidden).bfloat16(),
        post=normal(tokens, 4).sigmoid(),
        comb=normal(tokens, 4, 4).softmax(-1),
        fn=normal(24, 4 * hidden) / hidden,
        scale=normal(3),
        base=normal(24),
        norm_weight=normal(hidden).bfloat16(),
        **PRE,
    )


class TestContract:
    def test_of_one_rank_it_is_a_copy(self):
        partial = torch.randn(3, 5)[:, ::2]
        total = ops.all_reduce(partial)
        assert_bitwise(total, partial.contiguous())
        assert total.is_contiguous()
        assert total.data_ptr() != partial.data_ptr()

    def test_the_fused_operator_of_one_rank_is_its_second_part(self):
        args = between_sublayers(3, 16, "cpu", 0)
        y = torch.randn(3, 16)
        fields = {k: v for k, v in args._asdict().items() if k != "y"}
        results = ops.hc_reduce_post_pre_norm(y, **fields)
        for result, right in zip(results, ops.hc_post_pre_norm(y, **fields), strict=True):
            assert_bitwise(result, right)
        with pytest.raises(ValueError, match=r"partial has shape \[3, 8\], wanted \[3, 16\]"):
            ops.hc_reduce_post_pre_norm(y[:, :8], **fields)

    def test_torch_knows_the_operators(self):
        x = torch.randn(4)
        torch.library.opcheck(torch.ops.dsv4.all_reduce.default, (x, "", "auto"))
        compiled = torch.compile(
            lambda x: ops.all_reduce(x) + 1, fullgraph=True, backend="aot_eager"
        )
        assert torch.equal(compiled(x), x + 1)

    def test_bad_arguments(self):
        with pytest.raises(TypeError, match="partial has dtype int32, wanted bfloat16"):
            ops.all_reduce(torch.ones(2, dtype=torch.int32))
        with pytest.raises(ValueError, match=r"group is 'tp', and torch\.distributed is not init"):
            ops.all_reduce(torch.ones(2), "tp")

    def test_rounding_is_one_of_a_float32_sum(self):
        parts = partial_sums(8, (4096,), "cpu")
        exact = sum(part.double() for part in parts)
        largest = torch.stack(parts).abs().amax(0).double()
        error = (rank_ordered_sum(parts).double() - exact).abs()
        assert bool((error <= 2.0**-8 * exact.abs() + 8 * 2.0**-23 * largest).all())


@pytest.fixture
def eight_gpus(monkeypatch):
    """A group of GPUs with mailboxes, as dispatch sees it: nothing can run, all can be asked."""
    box = mailboxes.virtual(8, 1 << 20)[0]
    box.workspace = torch.empty(1 << 25, dtype=torch.bfloat16, device="meta")
    monkeypatch.setitem(mailboxes._OPEN, GROUP, box)
    monkeypatch.setattr(groups, "size", lambda name: box.ranks)
    monkeypatch.setattr(groups, "transport", lambda name, device: "nccl")
    monkeypatch.setattr(type(box), "device", property(lambda self: torch.device("cuda", 0)))
    monkeypatch.setattr(supports, "no_triton", lambda device: None)
    monkeypatch.setattr(supports, "sms", lambda device: 132)
    return box


def chosen(numel, dtype=torch.bfloat16):
    """The first row for a sum on a GPU, and the reasons against those before it."""
    partial = torch.empty(numel, dtype=dtype, device="meta")
    call = dispatch.Call("all_reduce", AllReduceArgs(partial, GROUP), torch.device("cuda", 0))
    explanation = dispatch._explanation(call, "auto")
    return explanation.chosen, dict(explanation.candidates)


@pytest.mark.usefixtures("eight_gpus")
class TestChoice:
    """By the size of the sum, the same on every rank."""

    def test_of_few_bytes_every_rank_sends_all(self):
        assert chosen(4096)[0] == "push"
        assert chosen(131072)[0] == "push"

    def test_of_many_bytes_each_element_is_summed_by_one_rank(self):
        name, reasons = chosen(131072 + 8)
        assert name == "two_shot"
        assert "each rank would receive 2097280 bytes" in reasons["push"]

    def test_of_most_bytes_nccl(self):
        name, reasons = chosen(1 << 24)
        assert name == "nccl"
        assert "a slot holds 524288" in reasons["push"]
        assert "from 33554432 on NCCL is chosen" in reasons["two_shot"]

    def test_other_dtypes_go_to_nccl(self):
        name, reasons = chosen(4096, torch.float32)
        assert name == "nccl"
        assert reasons["push"] == "the partial sum is torch.float32, and mailboxes hold bfloat16"

    def test_a_kernel_that_failed_its_check_is_passed_over(self, eight_gpus):
        eight_gpus.defect = "its check found wrong sums on 1 of 8 ranks"
        name, reasons = chosen(4096)
        assert name == "one_shot"
        assert reasons["push"] == eight_gpus.defect

    def test_without_workspace_torchs_kernels_are_passed_over(self, eight_gpus):
        eight_gpus.workspace = None
        assert chosen(131072 + 8)[0] == "nccl"

    def test_without_mailboxes_nccl_and_the_reason(self, monkeypatch):
        monkeypatch.delitem(mailboxes._OPEN, GROUP)
        name, reasons = chosen(4096)
        assert name == "nccl"
        assert "has no mailboxes, which dsv4.parallel.mailboxes.symmetric makes" in reasons["push"]

    def test_multicast_is_never_chosen(self):
        assert chosen(4096)[1]["multimem"] == multicast.REFUSED


class TestMulticast:
    def test_by_name_it_is_refused(self):
        with pytest.raises(NotImplementedError, match=r"NVLink multicast .* is never used"):
            ops.all_reduce(torch.ones(2), backend="multimem")
        assert explain(ops.all_reduce, torch.ones(2), backend="multimem").chosen is None

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("NCCL_NVLS_ENABLE", "1"),
            ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0"),
            ("NVSHMEM_DISABLE_NVLS", "0"),
            ("NCCL_ALGO", "NVLSTree"),
        ],
    )
    def test_an_environment_that_asks_for_it_is_refused(self, monkeypatch, name, value):
        for variable in (*multicast.OFF, "NCCL_ALGO"):
            monkeypatch.delenv(variable, raising=False)
        assert multicast.requested({}) is None
        assert multicast.requested({"NCCL_ALGO": "^NVLS"}) is None
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=f"{name} is '{value}', wanted"):
            multicast.turn_off()

    @pytest.fixture
    def says_nothing(self, monkeypatch):
        """An environment without the variables, which is restored."""
        for variable in (*multicast.OFF, "NCCL_ALGO"):
            monkeypatch.delenv(variable, raising=False)
            monkeypatch.setitem(os.environ, variable, "")  # so that it is restored
            monkeypatch.delenv(variable)

    def test_it_is_turned_off_for_this_process_and_its_children(self, says_nothing):
        multicast.turn_off()
        assert {name: os.environ[name] for name in multicast.OFF} == dict(multicast.OFF)

    def test_load_turns_it_off_where_the_environment_says_nothing(self, says_nothing, caplog):
        """NCCL uses it by default, in groups that it connects; an earlier one may have."""
        for was_unset in (True, False):
            caplog.clear()
            with pytest.raises(TypeError, match="device_mesh is object"):
                context_of(object(), "tp", torch.device("cuda", 0))
            assert {name: os.environ[name] for name in multicast.OFF} == dict(multicast.OFF)
            assert ("NCCL_NVLS_ENABLE was unset, wanted '0'" in caplog.text) == was_unset


class TestMailboxes:
    def test_sizes(self):
        (box,) = mailboxes.virtual(1, 5000)
        assert (box.capacity, box.chunks) == (3072, 48)
        assert box.unfit(1, 3072) is None
        assert box.unfit(1, 3073) == "the sum has 3073 elements, and a slot holds 3072"
        assert box.unfit(49, 2) == "the sum has 49 chunks, and a slot has flags for 48"

    def test_each_rank_writes_to_itself_last(self):
        boxes = mailboxes.virtual(3, 2)
        assert [box.peers for box in boxes] == [(1, 2, 0), (2, 0, 1), (0, 1, 2)]

    @pytest.mark.parametrize(("ranks", "nbytes"), [(0, 1), (17, 1), (2, 0)])
    def test_bad_sizes(self, ranks, nbytes):
        with pytest.raises(ValueError, match="mailboxes: "):
            mailboxes.virtual(ranks, nbytes)

    def test_a_sum_that_does_not_fit_is_not_written(self):
        pytest.importorskip("triton")
        from dsv4.triton import all_reduce

        (box,) = mailboxes.virtual(1, 2)
        with pytest.raises(ValueError, match="the sum has 1025 elements, and a slot holds 1024"):
            all_reduce.push_flat(box, torch.ones(1025).bfloat16())

    def test_those_of_gpus_need_one(self):
        for make in (mailboxes.ipc, mailboxes.symmetric):
            with pytest.raises(ValueError, match="device is cpu, wanted a CUDA GPU"):
                make("", 1, torch.device("cpu"))

    @pytest.mark.parametrize(("sms", "most"), [(48, 384), (108, 864), (132, 1024), (148, 1024)])
    def test_programs_that_wait_for_peers_are_all_on_the_gpu(self, sms, most):
        """A launch of 1024 would not be on GPUs with few SMs."""
        with machine.pretend(sms=sms):
            assert supports._most_programs(torch.device("cuda", 0)) == most
        assert supports._most_programs(torch.device("cpu")) == 1024
