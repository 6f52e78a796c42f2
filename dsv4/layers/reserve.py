"""Memory for the routed experts of a model, made before the first step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from dsv4.layers._workspace import Workspace
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear
from dsv4.layers.step_tokens import step_tokens
from dsv4.parallel.expert_exchange import ExpertExchange
from dsv4.quant.exact_fp8 import MOST_CONVERTED


def reserve_experts(
    model: nn.Module, max_tokens: int | None, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Make all routed experts of a model share memory for the rows of that many tokens.

    Every forward of a ``DeepseekV4Experts`` then writes its gathered rows, their SwiGLU and the
    results of its experts there, at the same addresses each time, and raises ValueError for more
    tokens. Without it these three, the largest, come from PyTorch's allocator, which grows.

    The rest still comes from the allocator: the sums of the tokens, the tables of the sort, the
    codes of a GEMM that quantises its rows (``activation="nvfp4"``), and in unpacked layers the
    results of the first GEMM and of its SwiGLU. Compiled code does not use it: ``torch.compile``
    plans memory itself.

    The layers must run one after another: no two of them, and none twice, may run at the same time
    on different streams. A copy of the model has memory of its own. CUDA graphs that were captured
    before must be captured again. Reserve after moving and casting the model, because both also
    move or cast the memory.

    Args:
        model: Any module; changed in place.
        max_tokens: Most tokens of a forward, at least 1; None to go back to the allocator.
        dtype: Dtype of the hidden states.

    Returns:
        The bytes reserved on all devices; layers of equal sizes on one device share memory.

    Raises:
        ValueError: if ``max_tokens`` is below 1, the model has no routed experts, or they get
            tokens of other ranks.
    """
    layers = [module for module in model.modules() if isinstance(module, DeepseekV4Experts)]
    if not layers:
        raise ValueError("reserve_experts: the model has no DeepseekV4Experts, wanted at least one")
    if _exchange_of(model) is not None:
        raise ValueError(
            "reserve_experts: the model has parallel='dp', wanted one whose experts get the tokens "
            "of this process alone"
        )
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"reserve_experts: max_tokens is {max_tokens}, wanted at least 1 or None")
    for layer in layers:
        layer.reserve(None)  # freed before more is reserved
    if max_tokens is None:
        return 0
    shared: dict[object, Workspace] = {}
    for layer in layers:
        sizes = (layer.num_experts_per_tok, layer.hidden_dim, layer.intermediate_dim)
        device = layer.gate_up_proj.device
        if (device, sizes) not in shared:
            shared[device, sizes] = Workspace(max_tokens, *sizes, dtype, device)
        layer.reserve(shared[device, sizes])
    return sum(buffer.nbytes for workspace in shared.values() for buffer in workspace.buffers())


def warm_allocator(
    model: nn.Module, max_tokens: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Make PyTorch's allocator get the memory that routed experts need in a step on a GPU.

    It keeps that memory in its cache, so that the first step of that many tokens does not wait for
    the driver and does not run out of memory there. A larger step gets more. Addresses are not
    fixed: layers may run at the same time on different streams, and ``torch.cuda.empty_cache``
    frees the memory. These are the gathered rows, their SwiGLU and the results of the experts, the
    largest buffers of a layer: for 4096 tokens 0.5 GB in Flash and 0.86 GB in Pro, for 16384 tokens
    2.0 and 3.4 GB. With FP8 activations they also include the largest weight that a GEMM may
    convert to FP8 for a step.

    Args:
        model: Any module.
        max_tokens: Most tokens of a step; 0 for nothing; None: as many as a step has by default,
            4096, or 16384 where long prompts pass experts in host memory through a buffer.
        dtype: Dtype of the hidden states.

    Returns:
        Bytes on all GPUs; 0 for a model on a CPU.

    Raises:
        torch.OutOfMemoryError: if a GPU has less.
        ValueError: if ``max_tokens`` is negative.
    """
    if max_tokens is None:
        max_tokens = step_tokens(model)
    if max_tokens < 0:
        raise ValueError(f"warm_allocator: max_tokens is {max_tokens}, wanted 0 or more")
    total = 0
    converted = converted_bytes(model)
    for device, shapes in step_buffers(model, max_tokens).items():
        if device.type == "cuda" and max_tokens:
            buffers = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
            size = converted.get(device, 0)
            buffers.append(torch.empty(size, dtype=torch.uint8, device=device))
            total += sum(buffer.nbytes for buffer in buffers)
            del buffers  # back to the cache of the allocator
    return total


def _exchange_of(model: nn.Module) -> ExpertExchange | None:
    """Return how the experts of a model get tokens of other ranks, or None."""
    exchanges = (getattr(module, "exchange", None) for module in model.modules())
    return next((e for e in exchanges if isinstance(e, ExpertExchange)), None)


def step_buffers(model: nn.Module, tokens: int) -> dict[torch.device, list[tuple[int, int]]]:
    """Return the shapes of the largest expert buffers that are alive together, per device."""
    largest: dict[torch.device, list[tuple[int, int]]] = {}
    exchange = _exchange_of(model)
    if exchange is not None:
        tokens = exchange.rows_of(tokens)
    for layer in model.modules():
        if isinstance(layer, DeepseekV4Experts):
            rows, device = tokens * layer.num_experts_per_tok, layer.gate_up_proj.device
            columns = (layer.hidden_dim, layer.intermediate_dim, layer.hidden_dim)
            shapes = [(rows, width) for width in columns]
            largest[device] = max(largest.get(device, shapes), shapes)
    return largest


def converted_bytes(model: nn.Module) -> dict[torch.device, int]:
    """Return the most bytes of weights converted to FP8 that exist at a time, per device.

    Only weights that are exact in FP8, of layers with FP8 activations, are converted.
    """
    largest: dict[torch.device, int] = {}
    for layer in model.modules():
        if isinstance(layer, DeepseekV4Experts | Linear) and layer.activation == "fp8":
            for codes, size in _conversions(layer):
                largest[codes.device] = max(largest.get(codes.device, 0), size)
    return largest


def _conversions(layer: DeepseekV4Experts | Linear) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield a layer's packed codes, and the bytes of those that are converted together."""
    if isinstance(layer, DeepseekV4Experts):
        for name in ("gate_up_proj", "down_proj"):
            stack = getattr(layer, name)
            if getattr(layer, f"{name}_exponent") is not None:  # else it is not exact in FP8
                matrix = 2 * stack[0].numel()  # two codes a byte
                yield stack, matrix * min(len(stack), max(1, MOST_CONVERTED // matrix))
        return
    fused = layer.fused
    codes = layer.weight if fused is None else fused.codes
    exponent = layer.weight_exponent if fused is None else fused.row_exponent
    if exponent is not None and 2 * codes.numel() <= MOST_CONVERTED:
        yield codes, 2 * codes.numel()
