"""Memory for the routed experts of a model, made once for a stated number of tokens."""

from __future__ import annotations

import torch
from torch import nn

from dsv4.layers._workspace import Workspace
from dsv4.layers.experts import DeepseekV4Experts


def reserve_experts(
    model: nn.Module, max_tokens: int | None, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Let all routed experts of a model share memory for the rows of that many tokens.

    Every forward of a ``DeepseekV4Experts`` then writes its gathered rows, their SwiGLU and the
    results of its experts there, at the same addresses each time, and raises ValueError for more
    tokens. Without it these three, the largest, come from PyTorch's allocator, which grows.

    What still comes from the allocator: the sums of the tokens, the tables of the sort, what a
    product needs to quantise its rows (``activation="nvfp4"``), and the first product and its
    SwiGLU of layers that are not packed. Compiled code does not use it: ``torch.compile`` plans
    memory itself.

    The layers must run one after another: not two of them, nor one twice, at the same time on
    different streams; a copy of the model has memory of its own. CUDA graphs that were captured
    before must be captured again. Reserve after moving and casting the model; both take the memory
    along.

    Args:
        model: Any module; changed in place.
        max_tokens: Most tokens of a forward, at least 1; None to go back to the allocator.
        dtype: Of the hidden states.

    Returns:
        Bytes reserved, on all devices: one memory for the layers of equal sizes of each.

    Raises:
        ValueError: if ``max_tokens`` is below 1 or the model has no routed experts.
    """
    layers = [module for module in model.modules() if isinstance(module, DeepseekV4Experts)]
    if not layers:
        raise ValueError("reserve_experts: the model has no DeepseekV4Experts, wanted at least one")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"reserve_experts: max_tokens is {max_tokens}, wanted at least 1 or None")
    for layer in layers:
        layer.reserve(None)  # before more is reserved
    if max_tokens is None:
        return 0
    shared: dict[object, Workspace] = {}
    for layer in layers:
        sizes = (layer.num_experts_per_tok, layer.hidden_dim, layer.intermediate_dim)
        device = layer.gate_up_proj.device
        if (device, sizes) not in shared:
            shared[device, sizes] = Workspace(max_tokens, *sizes, dtype, device)
        layer.reserve(shared[device, sizes])
    return sum(room.nbytes for workspace in shared.values() for room in workspace.buffers())
