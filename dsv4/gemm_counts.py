"""Count which implementation multiplied each quantised weight of a model.

``dsv4.debug.count_gemms`` is the public name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dsv4 import dispatch
from dsv4.implementations import Call, Implementation
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear
from dsv4.quant.formats import FP8_TOKEN, NVFP4

_STACKS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class GemmCall:
    """A kind of operator call that multiplied a weight.

    Attributes:
        weight: Name of a linear layer or of a stack of experts, as in ``Packing.fp8``.
        op: The operator.
        implementation: Name of the implementation that ran.
        activation: ``"bf16"``, ``"nvfp4"`` or ``"fp8"``, also of inputs that came as codes.
    """

    weight: str
    op: str
    implementation: str
    activation: str


@dataclass
class GemmCounts:
    """How often each weight of a model was multiplied.

    Attributes:
        calls: Counts by kind of call. A call with a fused weight counts for each of its layers.
        weights: Names of all quantised weights, multiplied or not.
    """

    calls: Counter[GemmCall] = field(default_factory=Counter)
    weights: tuple[str, ...] = ()

    def multiplied(
        self, *, activation: str | None = None, implementation: str | None = None
    ) -> set[str]:
        """Return the weights that some call multiplied.

        Args:
            activation: Calls with these activations alone count; None: all do.
            implementation: Calls that this implementation ran alone count; None: all do.
        """
        return {
            call.weight
            for call in self.calls
            if activation in (None, call.activation)
            and implementation in (None, call.implementation)
        }

    def __str__(self) -> str:
        lines = [f"{len(self.multiplied())} of {len(self.weights)} quantised weights multiplied"]
        for call, count in sorted(self.calls.items(), key=lambda item: item[0].weight):
            lines.append(
                f"  {call.weight}: {count} x {call.op} by {call.implementation!r}, "
                f"activations {call.activation}"
            )
        return "\n".join(lines)


@contextmanager
def count_gemms(module: nn.Module) -> Iterator[GemmCounts]:
    """Count, for the length of the block, which implementation multiplies each quantised weight.

    A weight that FP8 tensor cores multiplied counts under the implementation ``"fp8"``. Calls in
    the block are dispatched one by one, without plans, so they take longer. Only calls of this
    thread count. A CUDA graph calls no operator: capture it in the block to see what it replays.

    Args:
        module: A model with its weights in place; a layer that is packed, quantised or moved in the
            block is not recognised afterwards.

    Yields:
        The counts, filled as operators are called.
    """
    matrices = dict(_matrices(module))
    counts = GemmCounts(weights=tuple(matrices))
    spans = {name: _span(codes) for name, codes in matrices.items()}

    def seen(call: Call, row: Implementation) -> None:
        codes = _codes(call.args)
        if codes is None:
            return
        start, stop = _span(codes)
        for name, (first, end) in spans.items():
            if start < end and first < stop:
                counts.calls[GemmCall(name, call.op, row.name, _activation(call.args))] += 1

    with dispatch.watching(seen):
        yield counts


def _matrices(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and codes of all quantised weights; interleaved layers share the codes of both."""
    for name, layer in module.named_modules():
        if isinstance(layer, DeepseekV4Experts) and layer.format is not None:
            for stack in _STACKS:
                yield f"{name}.{stack}".lstrip("."), getattr(layer, stack)
        elif isinstance(layer, Linear) and layer.format is not None:
            fused = layer.fused
            if fused is not None and fused.interleaved:
                yield name, fused.codes
            else:
                yield name, layer.quantized_weight().codes


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the end of its last element."""
    start, size = tensor.data_ptr(), tensor.element_size()
    if not tensor.numel():
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + size * (1 + sum((count - 1) * step for count, step in steps))


def _codes(args: Any) -> torch.Tensor | None:
    """Return the weight of a GEMM's record; None of other operators and of plain weights."""
    if not hasattr(args, "row_exponent"):
        return None
    codes: torch.Tensor = args.codes if hasattr(args, "codes") else args.weight
    return codes


def _activation(args: Any) -> str:
    if args.x_scales is None:
        activation: str = args.activation
        return activation
    return "fp8" if args.x.dtype == FP8_TOKEN.codes_dtype else NVFP4.name
