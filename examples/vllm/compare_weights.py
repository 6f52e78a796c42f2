"""Random weights of Flash's widths for compare.py; greedy text does not depend on rounding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

LAYOUTS = ("nvidia", "deepseek")
DRAFTS = ("mtp", "dspark")


def flash_config(layers: int, experts: int, draft: str = "mtp") -> Any:
    """Return the configuration of Flash with fewer layers, experts and tokens.

    Args:
        layers: Layers; with DSpark at least three, whose streams its stages read.
        experts: Routed experts of a layer.
        draft: Of ``DRAFTS``. DSpark's is that of the 0731 release.
    """
    from dsv4.config import DSparkConfig, ModelConfig

    whole = ModelConfig.flash()
    config = whole.replace(
        num_hidden_layers=layers,
        layer_types=whole.layer_types[:layers],
        mlp_layer_types=whole.mlp_layer_types[:layers],
        n_routed_experts=experts,
        vocab_size=16384,
    )
    if draft == "mtp":
        return config
    dspark = DSparkConfig(
        block_size=5,
        noise_token_id=config.vocab_size - 1,
        target_layer_ids=tuple(range(layers)[-3:]),
        markov_rank=256,
    )
    return config.replace(num_nextn_predict_layers=0, dspark=dspark)


def random_checkpoint(folder: Path, config: Any, device: str, layout: str = "nvidia") -> None:
    """Write random weights with a draft, MTP or DSpark, whose experts are MXFP4.

    The head prefers one successor of each token, so that the greedy text does not depend on
    rounding, while its log-probabilities depend on the context. The draft reads the last token
    alone and knows most successors: some drafts are right and some are wrong.

    Args:
        folder: Where to write.
        config: As ``flash_config`` returns it.
        device: Where the weights are drawn.
        layout: Of ``LAYOUTS``; with ``"deepseek"`` all routed experts are MXFP4.
    """
    import torch

    import dsv4
    from dsv4.bench.suites.random_model import Weights, random_model

    weights = Weights(recipe="nvidia")
    model = random_model(config, torch.device(device), weights, pack=False, mtp=True)
    prefer_successors(model)
    layers = [draft.layer for draft in model.mtp]
    draw_mxfp4_experts(layers if layout == "nvidia" else [*model.model.layers, *layers])
    dsv4.save(model, folder, layout=layout)


def draw_mxfp4_experts(layers: Sequence[Any]) -> None:
    """Draw the experts of layers of a random model again, in DeepSeek's format.

    Args:
        layers: Decoder layers, not packed; changed in place.
    """
    import torch

    from dsv4.ops.quantize import quantize

    for layer in layers:
        experts = layer.mlp.experts
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
        wrong: Tokens after which the draft is wrong.
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
        if model.dspark is not None:
            _markov_successors(model.dspark.last.markov_head, successor[:active], wrong)
            return
        for draft in model.mtp:
            # Its drafts after the tokens whose embeddings it reflects are wrong.
            reflected = torch.eye(width, device=embedding.device)
            for direction in known[:wrong]:
                reflected -= 2 * torch.outer(direction, direction @ reflected)
            draft.e_proj.set_weight(quantize(4.0 * reflected, "fp8_block"))
            draft.h_proj.set_weight(quantize(1e-3 * reflected, "fp8_block"))


def _markov_successors(head: Any, successor: Any, wrong: int, strength: float = 12.0) -> None:
    """Let DSpark's head of low rank prefer the successors of all tokens but the first ones.

    Args:
        head: DSpark's ``markov_head``; changed in place.
        successor: ``[active]``, the successor of each of the first tokens.
        wrong: Tokens about which the head says nothing.
        strength: What it adds to the logit of a successor.
    """
    import torch

    table, matrix = head.markov_w1.weight, head.markov_w2.weight
    generator = torch.Generator(table.device).manual_seed(5)
    size = len(successor), table.shape[1]
    drawn = torch.randn(size, generator=generator, device=table.device)
    vectors = torch.nn.functional.normalize(drawn, dim=1)
    vectors[:wrong] = 0
    table.zero_()
    matrix.zero_()
    table[: len(successor)] = vectors.to(table.dtype)
    matrix[successor] = (strength * vectors).to(matrix.dtype)
