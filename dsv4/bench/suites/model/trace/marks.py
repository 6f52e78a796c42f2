"""Layers and operator calls of a capture, with the graph nodes that each of them added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from torch import nn

from dsv4 import dispatch
from dsv4.bench.suites.model.trace.traffic import Count, moved_bytes, traffic_of
from dsv4.layers.decoder import DeepseekV4DecoderLayer
from dsv4.layers.linear import Linear


@dataclass(frozen=True)
class Mark:
    """Work that added nodes to a graph.

    Attributes:
        name: A layer's type, or an operator.
        first: Its first node, by place in the order of launches.
        end: The node after its last.
        bytes: Bytes that it has to read and write (``traffic``); None if they are not known, or
            not counted yet.
        layer: Number of the layer; None for an operator.
        count: Counts the bytes once the step has run; None if that is not needed.
    """

    name: str
    first: int
    end: int
    bytes: int | None = None
    layer: int | None = None
    count: Count | None = None

    def counted(self) -> Mark:
        """Return it with its bytes, after the step has run."""
        return self if self.count is None else replace(self, bytes=self.count(), count=None)


@dataclass
class Marks:
    """Marks of a capture.

    Attributes:
        layers: Marks of decoder layers.
        calls: Marks of operators and of plain linear layers, in the order of calls.
    """

    layers: list[Mark] = field(default_factory=list)
    calls: list[Mark] = field(default_factory=list)

    def counted(self) -> Marks:
        """Return the marks with the bytes of all calls, after the step has run.

        The numbers that these depend on are those of the last replay. They are still there, because
        the marks hold them: memory of a graph's tensors that nothing holds gets other contents.
        """
        return Marks(self.layers, [mark.counted() for mark in self.calls])


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
        moved = traffic_of(op, args, result)
        known, later = (None, moved) if callable(moved) else (moved, None)
        marks.calls.append(Mark(op, first, count(), known, count=later))
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


def mark_of(marks: Sequence[Mark], node: int) -> Mark | None:
    """Return the innermost mark that contains a node, or None."""
    holding = [mark for mark in marks if mark.first <= node < mark.end]
    return min(holding, key=lambda mark: mark.end - mark.first, default=None)
