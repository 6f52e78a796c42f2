"""How far activations of each format move a full-depth model's answers from the float64 reference.

    python -m tests._tools.divergence [--seeds N] [--tokens N] [--layers N] [--device cuda]

Builds random models with Flash's schedule of layers and small widths, stored as NVIDIA publishes
(NVFP4 experts, here cast from MXFP4; FP8 128 x 128 elsewhere), and prints the KL divergence of the
next-token distribution from that of the same weights in float64 with activations that nothing
rounds. Each kind of activations runs in a bfloat16 model and in a float32 one. The float32 model
with unrounded activations is the noise floor: it differs from the reference by float32's rounding,
and by what that moves in top-k selections, routing and the FP8 codes of the KV cache.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dsv4 import dispatch
from dsv4.bench.suites.random_model import Weights, random_model
from dsv4.config import ModelConfig
from dsv4.layers import DeepseekV4Experts, Linear
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.ops.gemm import ACTIVATIONS

DTYPES = (torch.bfloat16, torch.float32)
# Random heads give logits of deviation 1, nearly uniform; those of trained models choose.
LOGIT_SCALE = 3.0


@dataclass(frozen=True)
class Divergence:
    """KL divergence from the reference, in nats.

    Attributes:
        activation: What quantised weights multiplied.
        dtype: Dtype of the model.
        mean: Mean over tokens.
        agreement: Share of tokens whose most likely successor is the reference's.
    """

    activation: str
    dtype: torch.dtype
    mean: float
    agreement: float


def small_flash(layers: int = 43) -> ModelConfig:
    """Return Flash's first layers with widths that a CPU multiplies."""
    flash = ModelConfig.flash()
    return flash.replace(
        num_hidden_layers=layers,
        layer_types=flash.layer_types[:layers],
        mlp_layer_types=flash.mlp_layer_types[:layers],
        num_nextn_predict_layers=0,
        vocab_size=512,
        hidden_size=256,
        num_attention_heads=8,
        head_dim=128,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=128,
        sliding_window=32,
        n_routed_experts=16,
        moe_intermediate_size=128,
        index_n_heads=8,
        index_head_dim=64,
        index_topk=16,
    )


@torch.no_grad()
def divergences(
    config: ModelConfig, seed: int, tokens: int, device: torch.device
) -> Iterator[Divergence]:
    """Compare a random model, in all activations and dtypes, with itself in float64."""
    weights = Weights("mxfp4-cast", "nvidia", seed)
    model = random_model(config, device, weights, pack=device.type == "cuda")
    model.lm_head.weight.mul_(LOGIT_SCALE)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (1, tokens), generator=generator).to(device)
    with dispatch.use_backend("reference"):
        truth = log_probabilities(model, ids, "bf16", torch.float64)
    for dtype in DTYPES:
        for activation in ACTIVATIONS:
            result = log_probabilities(model, ids, activation, dtype)
            of_tokens = (truth.exp() * (truth - result)).sum(-1)
            same = (truth.argmax(-1) == result.argmax(-1)).double()
            yield Divergence(activation, dtype, float(of_tokens.mean()), float(same.mean()))


def log_probabilities(
    model: DeepseekV4ForCausalLM, ids: torch.Tensor, activation: str, dtype: torch.dtype
) -> torch.Tensor:
    """Return the log-probabilities ``[1, S, V]`` of a copy of a model, float64."""
    made = copy.deepcopy(model).to(dtype)
    for module in made.modules():
        if isinstance(module, (Linear, DeepseekV4Experts)) and module.format is not None:
            module.activation = activation
    return made(ids).double().log_softmax(-1)


def table(by_seed: Sequence[Sequence[Divergence]]) -> str:
    """Return a table of several seeds' results: mean, smallest and largest of seeds, agreement."""
    lines = [
        "| activations | model | KL, nats | of seeds | same token |",
        "|---|---|---:|---:|---:|",
    ]
    for same in zip(*by_seed, strict=True):
        means, first = [result.mean for result in same], same[0]
        agreement = sum(result.agreement for result in same) / len(same)
        dtype = str(first.dtype).removeprefix("torch.")
        lines.append(
            f"| {first.activation} | {dtype} | {sum(means) / len(means):.2e} | "
            f"{min(means):.2e} to {max(means):.2e} | {100 * agreement:.1f} % |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests._tools.divergence")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--layers", type=int, default=43)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options = parser.parse_args(arguments)
    config = small_flash(options.layers)
    by_seed = []
    for seed in range(options.seeds):
        by_seed.append(list(divergences(config, seed, options.tokens, options.device)))
        print(
            f"seed {seed}: " + ", ".join(f"{result.mean:.2e}" for result in by_seed[-1]), flush=True
        )
    print(table(by_seed))


if __name__ == "__main__":
    main()
