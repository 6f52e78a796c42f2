"""One rank of vLLM's DeepSeek-V4 with this package's modules, on a CPU over gloo.

``python -m tests.integrations.vllm.ranks_process RANK RANKS PORT FOLDER OUT`` builds vLLM's model
for NVIDIA's GPUs under vLLM's own groups, first tensor-parallel, then with expert parallelism. It
loads the checkpoint in FOLDER and saves what its sublayers give, summed over the ranks by vLLM, in
OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

TOKENS = 5


def inputs(hidden: int, experts: int, top_k: int) -> dict[str, torch.Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(TOKENS, hidden, generator=generator).to(torch.bfloat16),
        "ids": torch.rand(TOKENS, experts, generator=generator).argsort(-1)[:, :top_k].int(),
        "weights": torch.rand(TOKENS, top_k, generator=generator),
    }


def run(config: Any) -> list[dict[str, Any]]:
    """Build, load and run on this rank; per layer what it gives."""
    from vllm.forward_context import set_forward_context

    from dsv4.integrations.vllm import deepseek
    from tests.integrations.vllm import build

    with build.hopper(config):
        model = deepseek.DeepseekV4ForCausalLM(vllm_config=config)
        build.load_model(model, config)
    assert model.dsv4.report.complete, model.dsv4.report
    sizes = config.model_config.hf_config
    data = inputs(sizes.hidden_size, sizes.n_routed_experts, sizes.num_experts_per_tok)
    outputs = []
    for layer in model.model.layers:
        experts = layer.ffn.experts.routed_experts.dsv4_experts
        answer = (data["weights"], data["ids"])
        routed = mock.patch.object(
            layer.ffn.experts.router, "_compute_routing", return_value=answer
        )
        with set_forward_context(None, config), routed, torch.inference_mode():
            qr = layer.attn.fused_wqa_wkv(data["x"])[0][:, : layer.attn.q_lora_rank]
            heads = layer.attn.wq_b(qr.contiguous())
            outputs.append(
                {
                    "ffn": layer.ffn(data["x"], torch.arange(TOKENS)),
                    "heads": heads,
                    "out": layer.attn.wo_b(heads[:, : layer.attn.wo_b.input_size_per_partition]),
                    "range": (experts.first_expert, experts.num_local_experts),
                    "inner": experts.intermediate_dim,
                }
            )
    return outputs


def main(rank: int, ranks: int, port: int, folder: Path, out: Path) -> None:
    """Run both ways of splitting one after the other."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    from tests.integrations.vllm import build

    results = {}
    for name, expert_parallel in (("tensor", False), ("expert", True)):
        config = build.engine_config(
            folder, tensor_parallel_size=ranks, enable_expert_parallel=expert_parallel
        )
        config.parallel_config.rank = rank
        with set_current_vllm_config(config):
            init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
            initialize_model_parallel(ranks, 1)
            results[name] = run(config)
            destroy_model_parallel()
    torch.save(results, out)


if __name__ == "__main__":
    number, count, where = (int(argument) for argument in sys.argv[1:4])
    main(number, count, where, Path(sys.argv[4]), Path(sys.argv[5]))
