"""Add the shared expert's output when the routed experts' rows are combined.

vLLM's runner of a mixture of experts runs the shared expert, on a side stream if steps are small,
and adds its output to that of the routed experts in a separate kernel. ``moe_combine`` can add it
in float32, before it rounds its sum. This saves a launch and a rounding in every layer.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import (
    SharedExperts,
    SharedExpertsOrder,
)

from dsv4.overlap import IN_ORDER, Streams

KERNEL = "moe_combine (adds the shared expert)"


class SharedStream(Streams):
    """vLLM's stream on which the shared expert runs, for ``DeepseekV4Experts``.

    vLLM keeps the output's memory until its own code has waited for the stream. The caller of
    ``join`` must keep it likewise.
    """

    def __init__(self, shared: SharedExperts) -> None:
        self._shared = shared

    def join(self, name: str, *results: torch.Tensor) -> None:
        """Make the current stream wait for the shared expert."""
        del name, results
        self._shared.wait()


class Runner(MoERunner):
    """``MoERunner`` whose experts add the shared expert's output; only ``adopt`` makes one."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sum of shared and routed experts, over all ranks.

        Raises:
            ValueError: if the shared expert has its own input; DeepSeek-V4 has none.
        """
        if shared_experts_input is not None:
            raise ValueError(
                "shared_experts_input is a tensor, expected None: DeepSeek-V4 has none"
            )
        _, output = self._forward_entry(
            hidden_states, router_logits, hidden_states, input_ids, self._encode_layer_name(), 0
        )
        return self._maybe_reduce_final_output(output, None, False)  # type: ignore[no-any-return]

    def _apply_quant_method(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None = None,
        shared_experts_overlapping: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return nothing in place of the shared expert's output, and the sum."""
        shared, streams = self._shared_experts, IN_ORDER
        assert shared is not None
        self._maybe_apply_shared_experts(shared_experts_input, SharedExpertsOrder.NO_OVERLAP)
        weights, ids = self.router.select_experts(
            hidden_states=hidden_states,
            router_logits=router_logits,
            topk_indices_dtype=self._quant_method.topk_indices_dtype,
            input_ids=input_ids,
        )
        if shared_experts_overlapping:
            streams = SharedStream(shared)
        output = self.routed_experts.dsv4_experts(
            hidden_states, ids, weights, shared.output, streams
        )
        return output.new_empty(0), output


def adopt(runner: Any) -> bool:
    """Change the class of a runner with replaced experts, if no step separates them from the sum.

    Returns:
        Whether it was changed. If not, vLLM adds both outputs.
    """
    if type(runner) is not MoERunner or runner.shared_experts is None:
        return False
    between = (
        runner.routed_input_transform,
        runner.routed_output_transform,
        runner.shared_expert_gate,
    )
    if (
        any(part is not None for part in between)
        or runner.routed_scaling_factor != 1.0
        or runner.do_naive_dispatch_combine
        or runner.moe_config.pcp_size > 1
        or isinstance(runner.router, ZeroExpertRouter)
    ):
        return False
    runner.__class__ = Runner
    return True
