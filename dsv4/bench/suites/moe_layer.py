"""The whole MoE layer for ``dsv4.bench.suites.moe``: router, routed experts, shared expert.

The routed experts' weights are those that are there already, so a layer adds little memory.
"""

from __future__ import annotations

import torch
from torch import nn

from dsv4 import ops
from dsv4.bench.checks import budgets, fused_judges
from dsv4.bench.checks import judge as check
from dsv4.bench.problem import Draw, Outputs, Problem, Verdict, nbytes
from dsv4.config import ModelConfig
from dsv4.layers import DeepseekV4Experts, DeepseekV4MLP, DeepseekV4SparseMoeBlock, pack_
from dsv4.quant.formats import FRAGMENTS, QuantizedTensor


def build(
    config: ModelConfig, gate_up: QuantizedTensor, down: QuantizedTensor, draw: Draw
) -> DeepseekV4SparseMoeBlock:
    """A layer with these routed experts, in fragments and not copied; the rest is drawn and packed.

    Gate weights are normal and no expert is preferred, so the router chooses almost evenly.
    """
    with torch.device("meta"):
        block = DeepseekV4SparseMoeBlock(config, config.num_hidden_layers - 1)
    assert not block.is_hash
    gate, shared = block.gate, _shared(block)
    gate.weight = _frozen(draw.normal(*gate.weight.shape, scale=config.hidden_size**-0.5))
    gate.e_score_correction_bias = torch.zeros(gate.num_experts, device=draw.device)
    for linear in (shared.gate_proj, shared.up_proj, shared.down_proj):
        linear.set_weight(draw.quantized(linear.out_features, linear.in_features))
    _hold(block.experts, gate_up, down)
    unpacked = pack_(block).kept
    assert not unpacked, unpacked
    return block


def _hold(experts: DeepseekV4Experts, gate_up: QuantizedTensor, down: QuantizedTensor) -> None:
    """Take weights in fragments. Rows of gate and up may each have a global scale of its own."""
    assert gate_up.global_scale is not None
    assert down.global_scale is not None
    experts.to_format(gate_up.format)
    for name, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
        setattr(experts, name, _frozen(weight.codes))
        setattr(experts, f"{name}_scale", _frozen(weight.scales))
    # A forward takes the scales of all rows; these two stand for them in a state dict alone.
    experts.gate_up_proj_scale_2 = _frozen(gate_up.global_scale[:, :2])
    experts.gate_up_row_scale = gate_up.global_scale
    experts.down_proj_scale_2 = _frozen(down.global_scale)
    experts.layout = FRAGMENTS


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _shared(block: DeepseekV4SparseMoeBlock) -> DeepseekV4MLP:
    assert block.shared_experts is not None
    return block.shared_experts


def _shared_weights(block: DeepseekV4SparseMoeBlock) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Gate and up, interleaved, and down."""
    mlp = _shared(block)
    gate_up = mlp.gate_proj.fused
    assert gate_up is not None
    return gate_up.whole(), mlp.down_proj.quantized_weight()


def forward(block: DeepseekV4SparseMoeBlock, x: torch.Tensor) -> torch.Tensor:
    """Run the layer on tokens ``[T, H]``."""
    return block(x.unsqueeze(0)).squeeze(0)


def costs(block: DeepseekV4SparseMoeBlock, tokens: int, touched: float) -> tuple[int, int]:
    """Bytes that a forward has to move, and operations of its GEMMs.

    Weights of the experts that have rows, of the shared one and of the router, once; tokens and the
    result, nothing between them.
    """
    experts, gate = block.experts, block.gate
    routed = [experts.quantized_weight(name).nbytes for name in ("gate_up_proj", "down_proj")]
    others = nbytes(gate.weight, gate.e_score_correction_bias, *_shared_weights(block))
    moved = round(touched * sum(routed) / experts.num_experts) + others
    matrix = 3 * experts.intermediate_dim * experts.hidden_dim
    per_token = (experts.num_experts_per_tok + 1) * matrix + gate.weight.numel()
    return moved + 4 * tokens * experts.hidden_dim, 2 * tokens * per_token


def verify_router(
    block: DeepseekV4SparseMoeBlock, x: torch.Tensor, routed: Outputs, sample: torch.Tensor
) -> Verdict:
    """Check the router's output for the tokens ``sample`` of ``x`` with the float64 oracle."""
    gate = block.gate
    args = (x[sample], gate.weight, gate.e_score_correction_bias)
    kwargs = {"top_k": gate.top_k, "scaling_factor": gate.routed_scaling_factor}
    kwargs["logits_dtype"] = torch.float32
    problem = Problem(ops.route_topk, args, kwargs, budgets.routing, 0)
    actual = tuple(part[sample] for part in routed)
    return problem.judge(problem, actual, problem.widened().run("reference"))


def verify_shared(
    block: DeepseekV4SparseMoeBlock, x: torch.Tensor, shared: torch.Tensor, sample: torch.Tensor
) -> Verdict:
    """Both GEMMs of the shared expert, the second on the actual output of the first."""
    gate_up, down = _shared_weights(block)
    limit = _shared(block).limit
    inner = ops.gemm_swiglu(x, gate_up, limit)[sample]
    first = Problem(ops.gemm_swiglu, (x[sample], gate_up, limit), {}, fused_judges.gemm_swiglu, 0)
    second = Problem(ops.gemm, (inner, down), {}, check.within(budgets.gemm), 0)
    return check.combine(
        *(
            problem.judge(problem, (actual,), problem.widened().run("reference"))
            for problem, actual in ((first, inner), (second, shared[sample]))
        )
    )
