"""Layers and operator calls of a capture, with the graph nodes that each of them added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from dsv4 import dispatch
from dsv4.layers.decoder import DeepseekV4DecoderLayer
from dsv4.layers.linear import Linear

# Operators that read all of their arguments once. Others read some pages, states or experts, so the
# sizes of their arguments are not the bytes that they read.
_WHOLE = frozenset(
    (
        *("gemm", "gemm_swiglu", "compressor_projections", "route_topk", "rms_norm"),
        *("rms_norm_pair", "rms_norm_quantize", "head_norm_rope_", "swiglu", "swiglu_quantize"),
        *("hc_pre", "hc_post", "hc_head", "hc_pre_norm", "hc_post_pre_norm", "quantize_nvfp4"),
        *("hc_combine_post", "hc_combine_post_pre_norm"),
        *("hc_pre_norm_quantize", "hc_post_pre_norm_quantize", "quantize_index_queries"),
        *("rope", "rope_quantize", "quantize_fp8_token", "all_reduce"),
        *("rms_norm_fp8", "swiglu_fp8"),
    )
)


@dataclass(frozen=True)
class Mark:
    """Work that added nodes to a graph.

    Attributes:
        name: A layer's type, or an operator.
        first: Its first node, by place in the order of launches.
        end: The node after its last.
        bytes: Bytes that it reads and writes; None if they do not follow from sizes.
        layer: Number of the layer; None for an operator.
    """

    name: str
    first: int
    end: int
    bytes: int | None = None
    layer: int | None = None


@dataclass
class Marks:
    """Marks of a capture.

    Attributes:
        layers: Marks of decoder layers.
        calls: Marks of operators and of plain linear layers, in the order of calls.
    """

    layers: list[Mark] = field(default_factory=list)
    calls: list[Mark] = field(default_factory=list)


@contextmanager
def marking(model: nn.Module, count: Callable[[], int]) -> Iterator[Marks]:
    """Mark layers and operators while the block captures a step of the model.

    Args:
        model: Decoder layers and plain linear layers that it runs are marked.
        count: Returns how many nodes the graph has.
    """
    marks = Marks()
    begun: list[int] = []
    run, run_layer = dispatch.run, DeepseekV4DecoderLayer._run

    def counted(op: str, args: Any, *rest: Any, **named: Any) -> Any:
        first = count()
        result = run(op, args, *rest, **named)
        moved = moved_bytes((args, result)) if op in _WHOLE else None
        marks.calls.append(Mark(op, first, count(), moved))
        return result

    def begin(module: nn.Module, inputs: Any) -> None:
        begun.append(count())

    def marked(layer: Any, *args: Any) -> Any:
        first, attention = count(), layer.self_attn
        result = run_layer(layer, *args)
        mark = Mark(attention.layer_type, first, count(), layer=attention.layer_idx)
        marks.layers.append(mark)
        return result

    def end_linear(module: Any, inputs: Any, output: Any) -> None:
        moved = moved_bytes((inputs, module.weight, output))
        marks.calls.append(Mark("linear", begun.pop(), count(), moved))

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, Linear) and module.format is None:
                stack.callback(module.register_forward_pre_hook(begin).remove)
                stack.callback(module.register_forward_hook(end_linear).remove)
        # No hooks: a layer that has one leaves the beginning of the next layer to that.
        stack.enter_context(mock.patch.object(DeepseekV4DecoderLayer, "_run", marked))
        stack.enter_context(mock.patch.object(dispatch, "run", counted))
        yield marks


def moved_bytes(values: Any) -> int:
    """Return the bytes of all distinct tensors in nested tuples and lists."""
    sizes: dict[tuple[int, int], int] = {}
    stack = [values]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            sizes[value.data_ptr(), value.nbytes] = value.nbytes
        elif isinstance(value, (tuple, list)):
            stack.extend(value)
    return sum(sizes.values())


def mark_of(marks: Sequence[Mark], node: int) -> Mark | None:
    """Return the innermost mark that contains a node, or None."""
    holding = [mark for mark in marks if mark.first <= node < mark.end]
    return min(holding, key=lambda mark: mark.end - mark.first, default=None)
