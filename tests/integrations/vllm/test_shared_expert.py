"""The sum of shared and routed experts in vLLM's runner, and runners that keep vLLM's sum."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from dsv4.testing.assertions import assert_bitwise

pytest.importorskip("vllm", reason="vLLM 0.33 is not installed; make test-vllm has it")

from dsv4.integrations.vllm import shared_expert

ORDER = shared_expert.SharedExpertsOrder


def runner_with(**changes):
    """A runner of vLLM's class with the attributes that ``adopt`` reads."""
    runner = shared_expert.MoERunner.__new__(shared_expert.MoERunner)
    nn.Module.__init__(runner)
    method = SimpleNamespace(supports_internal_mk=False, topk_indices_dtype=None, moe_kernel=None)
    config = {"pcp_size": 1, "dp_size": 1, "is_sequence_parallel": False, **changes}
    attributes = {
        "_shared_experts": nn.Identity(),
        "routed_input_transform": None,
        "routed_output_transform": None,
        "shared_expert_gate": None,
        "routed_scaling_factor": 1.0,
        "router": nn.Identity(),
        "routed_experts": SimpleNamespace(quant_method=method),
        "moe_config": SimpleNamespace(**config),
    }
    for name, value in {**attributes, **changes}.items():
        setattr(runner, name, value)
    return runner


def test_a_runner_with_nothing_in_between_adds_in_the_combination():
    runner = runner_with()
    assert shared_expert.adopt(runner)
    assert type(runner) is shared_expert.Runner
    assert not shared_expert.adopt(runner)  # a second time nothing changes


@pytest.mark.parametrize(
    "changes",
    [
        {"_shared_experts": None},
        {"routed_input_transform": nn.Identity()},
        {"routed_output_transform": nn.Identity()},
        {"shared_expert_gate": nn.Identity()},
        {"routed_scaling_factor": 2.5},
        {"pcp_size": 2},
        {"dp_size": 2},
        {"is_sequence_parallel": True},
    ],
)
def test_whatever_comes_between_leaves_the_sum_to_vllm(changes):
    runner = runner_with(**changes)
    assert not shared_expert.adopt(runner)
    assert type(runner) is shared_expert.MoERunner


@pytest.mark.parametrize("overlapping", [False, True])
def test_the_stream_is_waited_for_when_all_else_is_launched(overlapping):
    """Experts join an output that is still being computed, and do not join a ready one."""
    order, output = [], torch.full((2, 4), 3.0)
    shared = mock.Mock(output=output, wait=lambda: order.append("wait"))
    runner = runner_with()
    assert shared_expert.adopt(runner)
    del runner._shared_experts, runner.router  # modules, in whose place nothing else can be put
    runner._shared_experts = shared
    runner.router = SimpleNamespace(
        select_experts=lambda **_: (torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64))
    )

    def experts(x, ids, weights, added, streams):
        order.append("multiply")
        streams.join("shared", added)
        return x + added

    runner.routed_experts.dsv4_experts = experts
    x = torch.ones(2, 4)
    nothing, result = runner._apply_quant_method(x, x, x, None, overlapping)
    assert nothing.numel() == 0
    assert_bitwise(result, torch.full((2, 4), 4.0))
    assert order == (["multiply", "wait"] if overlapping else ["multiply"])
    shared.assert_called_once_with(x, ORDER.NO_OVERLAP)  # vLLM's, which does nothing in the other


def test_another_input_of_the_shared_expert_raises():
    runner, x = runner_with(), torch.ones(2, 4)
    assert shared_expert.adopt(runner)
    with pytest.raises(ValueError, match="shared_experts_input is a tensor, expected None"):
        runner(x, x, None, x)
