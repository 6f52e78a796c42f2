"""Random weights of Flash's widths for compare.py; greedy text does not depend on rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def flash_config(layers: int, experts: int) -> Any:
    """Return the configuration of Flash with fewer layers, experts and tokens."""
    from dsv4.config import ModelConfig

    whole = ModelConfig.flash()
    return whole.replace(
        num_hidden_layers=layers,
        layer_types=whole.layer_types[:layers],
        mlp_layer_types=whole.mlp_layer_types[:layers],
        n_routed_experts=experts,
        vocab_size=16384,
    )


def random_checkpoint(folder: Path, config: Any, device: str) -> None:
    """Write random weights in NVIDIA's layout, with an MTP layer whose experts are MXFP4.

    The head prefers one successor of each token, so that the greedy text does not depend on
    rounding, while its log-probabilities depend on the context. The draft reads the last token
    alone and knows most successors: some drafts are right and some are wrong.
    """
    import torch

    import dsv4
    from dsv4.bench.suites.random_model import Weights, random_model

    weights = Weights(recipe="nvidia")
    model = random_model(config, torch.device(device), weights, pack=False, mtp=True)
    prefer_successors(model)
    draw_mxfp4_experts(model)
    dsv4.save(model, folder, layout="nvidia")


def draw_mxfp4_experts(model: Any) -> None:
    """Draw the experts of a random model's draft again, in the format of NVIDIA's drafts.

    Args:
        model: Not packed; changed in place.
    """
    import torch

    from dsv4.ops.quantize import quantize

    for draft in model.mtp:
        experts = draft.layer.mlp.experts
        inner, hidden = experts.intermediate_dim, experts.hidden_dim
        device = experts.gate_up_proj.device
        generator = torch.Generator(device).manual_seed(4)
        experts.to_format("mxfp4")
        for number in range(experts.num_local_experts):
            drawn = (
                columns**-0.5 * torch.randn(rows, columns, generator=generator, device=device)
                for rows, columns in ((inner, hidden), (inner, hidden), (hidden, inner))
            )
            experts.set_expert(number, *(quantize(matrix, "mxfp4") for matrix in drawn))


def prefer_successors(model: Any, strength: float = 0.15, wrong: int = 96) -> None:
    """Change embedding, head and draft of a random model as ``random_checkpoint`` says.

    Args:
        model: Not packed; changed in place.
        strength: Share of a row of the head that is the preceding token's embedding.
        wrong: Directions of embeddings that the draft reflects: its drafts after these tokens
            are wrong.
    """
    import torch

    from dsv4.ops.quantize import quantize

    with torch.no_grad():
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        size, width = embedding.shape
        generator = torch.Generator(embedding.device).manual_seed(3)
        # Successors of the first tokens are among the first ones, so that a text stays there.
        active = min(size, 512)
        order = torch.randperm(active, generator=generator, device=embedding.device)
        successor = torch.arange(size, device=embedding.device) % active
        successor[order] = order.roll(-1)
        known = torch.nn.functional.normalize(embedding[:active].float(), dim=1)
        head.mul_((1 - strength**2) ** 0.5)
        # A row of variance 1 / width has length 1.
        head[successor[:active]] += (strength * known).to(head.dtype)
        embedding.mul_(4.0 * width**0.5 / embedding.float().norm(dim=1).mean())
        for draft in model.mtp:
            reflected = torch.eye(width, device=embedding.device)
            for direction in known[:wrong]:
                reflected -= 2 * torch.outer(direction, direction @ reflected)
            draft.e_proj.set_weight(quantize(4.0 * reflected, "fp8_block"))
            draft.h_proj.set_weight(quantize(1e-3 * reflected, "fp8_block"))
