"""The first boundary of a model whose values are not finite, watched without waiting.

A boundary is the input or the output of a module. Each has a mark on the device, the number of the
first token whose values there are not finite, which ``ops.mark_nonfinite_`` lowers when the module
is called. No call reads a mark, so CUDA graphs hold those calls, and a mark follows every replay.

``Boundaries`` has the marks and hooks, ``Steps`` brings them to the host step by step.
``dsv4.debug.monitor`` does so for modules of PyTorch, ``dsv4.integrations.vllm.check`` under vLLM.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from dsv4.ops.nonfinite import NO_ROW, mark_nonfinite_

INPUT, OUTPUT = "input", "output"
_WATCHED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_PITCH = 4  # numbers from mark to mark: each has an address that Triton specialises on
S = TypeVar("S")


@dataclass(frozen=True)
class Boundary:
    """A point of the model at which tensors are looked at.

    Attributes:
        module: Qualified name of the module.
        side: ``INPUT`` or ``OUTPUT``.
        class_name: The module's class.
    """

    module: str
    side: str
    class_name: str

    def __str__(self) -> str:
        return f"{self.side} of {self.module or 'the model'} ({self.class_name})"


@dataclass(frozen=True)
class Rows:
    """Tokens that the rows of a tensor stand for.

    Attributes:
        padding: ``[T]`` bool, True for rows that stand for no token; None: all do.
        first: Number of the token of the first row.
    """

    padding: torch.Tensor | None = None
    first: int = 0


@dataclass(frozen=True)
class Finding:
    """The first values of a step that were not finite.

    Attributes:
        boundary: Where.
        row: Of which token.
        before: The boundary before it in the order of execution, None of the first.
    """

    boundary: Boundary
    row: int
    before: Boundary | None

    def __str__(self) -> str:
        after = "" if self.before is None else f", after the {self.before}"
        return f"not finite in row {self.row}: {self.boundary}{after}"


class Boundaries:
    """Marks of the boundaries of a model.

    Attributes:
        rows: By number of rows, what they stand for in the forward pass that is running. Tensors
            with another number are not looked at: their rows are no tokens.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.rows: dict[int, Rows] = {}
        self._boundaries: list[Boundary] = []
        self._marks = self._blank(0)
        self._views: list[torch.Tensor] = []
        # Numbers of boundaries in the order of execution: of the longest forward pass, of the last
        # one so far, and of all.
        self._order: list[int] = []
        self._running: dict[int, None] = {}
        self._marked: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._boundaries)

    def add(self, boundary: Boundary) -> int:
        """Make a mark; returns its number. ``reset`` has to follow before anything is marked."""
        self._boundaries.append(boundary)
        return len(self) - 1

    def _blank(self, count: int) -> torch.Tensor:
        with torch.inference_mode(False):  # it is written to in and out of that mode
            return torch.full((count, _PITCH), NO_ROW, dtype=torch.int32, device=self.device)

    def reset(self) -> None:
        """Begin again with marks that say that all was finite."""
        if self._marks.shape[0] == len(self):
            self._marks.fill_(NO_ROW)
            return
        self._marks = self._blank(len(self))
        self._views = [self._marks[i, :1] for i in range(len(self))]

    @property
    def marks(self) -> torch.Tensor:
        """All marks, int32 on the device; for ``first``, after a copy to the host."""
        return self._marks

    def begin(self, rows: dict[int, Rows]) -> None:
        """Note that a forward pass begins, whose tensors have such rows."""
        self.rows, self._running = rows, {}

    def end(self) -> None:
        """Note that it ends.

        The longest pass says the order of execution: parts are left out in passes that profile.
        """
        self.rows = {}
        if len(self._running) >= len(self._order):
            self._order = list(self._running)

    def mark(self, number: int, values: Any, rows: Rows | None = None) -> None:
        """Look at all floating tensors of ``values`` at a boundary.

        Args:
            number: From ``add``.
            values: Tensors, or nested sequences, mappings and dataclasses of tensors.
            rows: What the rows of these tensors stand for; None: what ``self.rows`` says.
        """
        tensors = [t.detach() for _, t in tensors_in("", values) if self._is_watched(t)]
        for tensor in tensors:
            self._mark(number, tensor, rows)

    def _is_watched(self, tensor: torch.Tensor) -> bool:
        on_device = tensor.device == self._marks.device
        return on_device and tensor.dtype in _WATCHED and tensor.ndim > 0 and tensor.numel() > 0

    def _mark(self, number: int, x: torch.Tensor, rows: Rows | None) -> None:
        if rows is None:
            if x.ndim > 2 and x.shape[0] not in self.rows:
                x = x.flatten(0, 1)  # [B, S, ...]
            rows = self.rows.get(x.shape[0])
        if rows is not None:
            self._running[number] = self._marked[number] = None
            mark_nonfinite_(self._views[number], x, rows.padding, first_row=rows.first)

    def first(self, marks: torch.Tensor) -> Finding | None:
        """Find the first boundary, in the order of execution, in marks on the host."""
        rows = marks[:, 0].tolist()
        before = None
        for number in dict.fromkeys([*self._order, *self._running, *self._marked]):
            if rows[number] != NO_ROW:
                return Finding(self._boundaries[number], rows[number], before)
            before = self._boundaries[number]
        return None

    def hook(self, module: nn.Module, name: str) -> list[Any]:
        """Watch both boundaries of a module from now on; returns handles that remove the hooks."""
        class_name = type(module).__name__
        before, after = (self.add(Boundary(name, side, class_name)) for side in (INPUT, OUTPUT))

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.mark(before, (args, kwargs))

        def leave(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.mark(after, output)

        return [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, with_kwargs=True),
        ]


@dataclass
class _Sent(Generic[S]):
    """Marks of a step on their way to the host."""

    step: S
    marks: torch.Tensor
    event: torch.cuda.Event | None

    @property
    def is_there(self) -> bool:
        return self.event is None or self.event.query()


@dataclass
class Steps(Generic[S]):
    """Marks of one step after another, examined when they have reached the host.

    Attributes:
        boundaries: The marks.
    """

    boundaries: Boundaries
    _open: list[S] = field(default_factory=list)
    _sent: deque[_Sent[S]] = field(default_factory=deque)

    def begin(self, step: S) -> None:
        """Begin a step; what is marked before and was not sent is forgotten."""
        self.end()
        self.boundaries.reset()
        self._open = [step]

    @property
    def is_open(self) -> bool:
        """Whether a step has begun and not ended."""
        return bool(self._open)

    def resume(self, step: S) -> None:
        """Begin a step of which some was already marked."""
        self._open = [step]

    def end(self) -> None:
        """Send the marks of the step that has begun, if there is one, behind its kernels."""
        if not self._open:
            return
        step = self._open.pop()
        marks = to_host(self.boundaries.marks)
        event = None
        if self.boundaries.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.boundaries.device))
        self._sent.append(_Sent(step, marks, event))

    def findings(self, wait: bool = False) -> Iterator[tuple[S, Finding]]:
        """Steps that had values that are not finite, of those whose marks have arrived.

        Args:
            wait: Whether to wait for those that are on their way.
        """
        while self._sent and (wait or self._sent[0].is_there):
            sent = self._sent.popleft()
            if sent.event is not None and wait:
                sent.event.synchronize()
            finding = self.boundaries.first(sent.marks)
            if finding is not None:
                yield sent.step, finding


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to pinned memory on the current stream, without waiting for it; on a CPU at once."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def token_rows(inputs: Sequence[torch.Tensor]) -> dict[int, Rows]:
    """Rows of a forward pass of this package's modules, by their first input.

    Ids ``[B, S]`` or ``[T]``, or values ``[B, S, ...]`` or ``[T, H]``.
    """
    if not inputs:
        return {}
    x = inputs[0]
    leading = 1 if x.ndim == 1 or (x.is_floating_point() and x.ndim == 2) else 2
    return {x.shape[:leading].numel(): Rows()}


def tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested sequences, mappings and dataclasses, with its path."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(f"{name}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors_in(f"{name}[{i}]", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from tensors_in(f"{name}.{f.name}", getattr(value, f.name, None))
