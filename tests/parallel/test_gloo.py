"""Two processes on the CPU: sums over ranks, and experts that transformers distributes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from dsv4 import ops
from dsv4.reference.all_reduce import rank_ordered_sum
from dsv4.testing.assertions import assert_bitwise
from tests.parallel import gloo_program
from tests.parallel.exchange_cases import exchange

transformers = pytest.importorskip("transformers")
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 24), reason="transformers is older than 5.24")
SECONDS = 240


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small NVFP4 checkpoint, of sizes that can be packed."""
    from dsv4.checkpoint import save
    from tests.checkpoint.cases import SMALL, make_model

    folder = tmp_path_factory.mktemp("checkpoint")
    save(make_model(SMALL.replace(moe_intermediate_size=64)), folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def ranks(checkpoint, tmp_path_factory):
    """What both processes came to."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.parallel.gloo_program", str(checkpoint), str(folder)]
    processes = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        output = (folder / f"{rank}.txt").open("w")
        processes.append(
            subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        )
    try:
        for process in processes:
            process.wait(SECONDS)
    finally:
        for process in processes:
            process.kill()
    said = "\n".join((folder / f"{rank}.txt").read_text()[-4000:] for rank in range(2))
    assert [process.returncode for process in processes] == [0, 0], said
    results = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    results[0]["file"] = (folder / "b.json").read_text()
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sums_are_in_rank_order_and_the_same_on_all_ranks(ranks, dtype):
    parts = [gloo_program.partial_of(rank, (3, 64), dtype) for rank in range(2)]
    expected = rank_ordered_sum(parts)
    for rank in ranks:
        assert_bitwise(rank["sums"][f"sum {dtype}"], expected)
        assert_bitwise(rank["sums"][f"strided sum {dtype}"], expected[:, ::2].contiguous())


def test_the_fused_operator_is_the_sum_and_what_follows(ranks):
    y = sum(gloo_program.partial_of(rank, (3, 8), torch.float64) for rank in range(2))
    fields = gloo_program.between_sublayers(8)
    expected = ops.hc_post_pre_norm(y, **fields, norm_eps=1e-6, hc_eps=1e-6, iterations=3)
    for rank in ranks:
        for result, right in zip(rank["sums"]["fused"], expected, strict=True):
            assert_bitwise(result, right)


def test_the_choice_and_its_reasons(ranks):
    for number, rank in enumerate(ranks):
        sums = rank["sums"]
        assert (sums["rank"], sums["size"], sums["chosen"]) == (number, 2, "gloo")
        assert "NCCL sums tensors of CUDA GPUs, the tensor is on cpu" in sums["nccl"]
        assert "group is 'no such group', wanted the group_name" in sums["unknown"]


def test_tokens_reach_the_ranks_of_their_experts(ranks):
    case = exchange(2, 3, 8, seed=5)
    for number, rank in enumerate(ranks):
        result = rank["exchanged"]
        for tensor, right in zip(result["received"], case.received(number), strict=True):
            assert_bitwise(tensor, right)
        assert_bitwise(result["total"], case.result(number))
        assert result["chosen"] == "gloo"
        assert "has no mailboxes" in result["push"]
        assert "num_experts is 5, wanted a multiple of the number of ranks (2)" in result["uneven"]


def test_logits_are_those_of_one_process(ranks, checkpoint):
    from dsv4.integrations.transformers import from_pretrained

    model = from_pretrained(checkpoint, dtype="float64", progress=False)
    ids = torch.arange(2, 26).view(2, 12)
    with torch.no_grad():
        logits = model(ids).logits
        tokens = model.generate(ids, max_new_tokens=3, do_sample=False)
    scale = logits.abs().max()
    for rank in ranks:
        assert (rank["model"]["logits"] - logits).abs().max() <= 1e-10 * scale
        assert torch.equal(rank["model"]["tokens"], tokens)
    assert_bitwise(ranks[0]["model"]["logits"], ranks[1]["model"]["logits"])


def test_each_rank_holds_its_experts_alone(ranks, checkpoint):
    from dsv4.integrations.transformers import from_pretrained
    from dsv4.layers import DeepseekV4Experts

    model = from_pretrained(checkpoint, dtype="float64", progress=False)
    experts = [m for m in model.modules() if isinstance(m, DeepseekV4Experts)]
    whole = sum(p.nbytes for e in experts for p in e.parameters())
    count = experts[0].num_experts // 2
    for number, rank in enumerate(ranks):
        result = rank["model"]
        assert result["ranges"] == [(number * count, count)] * len(experts)
        assert set(result["layouts"]) == {"fragments_16x64"}
        assert result["bytes"] == whole // 2
        assert f"holds {count} of {2 * count} experts, those of one rank" in result["save"]


@pytest.mark.parametrize("name", ["auto", "all_to_all", "all_reduce"])
def test_transformers_own_implementations_are_refused(ranks, name):
    for rank in ranks:
        assert f"ep_implementation is '{name}', wanted 'dsv4': transformers'" in rank["model"][name]
        assert "one rank would run all of them" in rank["model"][name]


def test_another_configuration_on_a_rank_is_refused_on_both(ranks):
    for rank in ranks:
        assert rank["other configuration"] == (
            "swiglu_limit of config.json is 3.0 on rank 0 and 4.0 on rank 1, wanted the same on "
            "all ranks"
        )


def test_plain_experts_get_ids_of_their_own(ranks):
    """``num_local_experts``, 2, stands for the other rank's experts."""
    assert ranks[0]["plain"]["ids"].tolist() == [[0, 2], [1, 2]]
    assert ranks[1]["plain"]["ids"].tolist() == [[2, 1], [2, 0]]
    assert ranks[0]["plain"]["weights"].tolist() == [[0.5, 0], [1, 0]]
    for rank in ranks:
        assert rank["plain"]["total"].tolist() == [[0.75] * 4, [3.0] * 4]


def test_the_bench_checks_and_times_sums(ranks):
    """Only the first rank prints and writes."""
    assert [rank["bench"] for rank in ranks] == [0, 0]
    content = json.loads(ranks[0]["file"])
    rows = [(row["backend"], row["case"], row["match"]) for row in content["rows"]]
    assert rows == [("gloo", "2 ranks", True), ("reference", "2 ranks", True)]
    assert all(row["us"] > 0 for row in content["rows"])


def test_the_bench_of_virtual_ranks_needs_a_gpu(capsys):
    from dsv4.bench import cli

    assert cli.main(["run", "all_reduce", "--ranks", "2", "--device", "cpu"]) == cli.IMPOSSIBLE
    assert "virtual ranks need a CUDA GPU" in capsys.readouterr().err
    assert cli.main(["all_reduce", "--device", "cpu"]) == cli.IMPOSSIBLE
    assert "wanted --ranks, or several processes started by torchrun" in capsys.readouterr().err


class TestConfigurations:
    """What is refused before a process group is made."""

    def reason(self, parts=("experts",), **fields):
        from transformers.distributed import DistributedConfig

        from dsv4 import ModelConfig
        from dsv4.integrations._expert_parallel import unsupported

        usual = {"tp_size": 2, "ep_size": 2, "tp_plan": {}, "ep_implementation": "dsv4"}
        distributed = DistributedConfig(**{**usual, **fields})
        return unsupported(distributed, ModelConfig.tiny(), parts)

    def test_what_is_supported(self):
        assert self.reason() is None

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            (
                {"ep_implementation": "deepgemm_megamoe"},
                "ep_implementation is 'deepgemm_megamoe', wanted 'dsv4': transformers' own read",
            ),
            ({"ep_implementation": "mine"}, "ep_implementation is 'mine', wanted 'dsv4'"),
            ({"tp_size": 1, "ep_size": 1}, "ep_size is 1, wanted the number of ranks"),
            ({"tp_size": 1, "fsdp_size": 2}, "tp_size is 1, wanted 2: all ranks process the same"),
            ({"fsdp_size": 2}, "fsdp_size is 2, wanted 1"),
            ({"tp_plan": None}, "tp_plan is None, wanted {}: attention, embedding and head"),
            ({"ep_plan": {}}, "ep_plan is given, wanted None"),
            ({"parts": ("attention",)}, "parts leaves out 'experts'"),
            ({"tp_size": 3, "ep_size": 3}, "ep_size is 3, which does not divide 8 experts"),
        ],
    )
    def test_what_is_not(self, fields, words):
        assert words in self.reason(**fields)
