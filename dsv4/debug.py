"""Find where the first NaN came from, and which expert ids were chosen that do not exist.

``first_nonfinite(model, input_ids)`` runs one forward pass with a hook on every submodule and names
the first one, in execution order, that was given good tensors and returned bad ones, together with
its own bad parameters. ``watch`` does the same around any code. ``check_parameters`` looks at the
weights alone.

NaN and infinity are distinguished, because infinities can be meant (masks, padding heads' sinks): a
module is the origin of a NaN if none of its inputs has a NaN, even if one of them has infinities.

Every check waits for the device: this is for looking, not for production. Hooks see only modules
that are called as ``module(...)``, and nothing inside a compiled region.

``monitor`` does not wait and works in CUDA graphs: it says which module's input or output was the
first that was not finite, and of which token, and nothing about counts or parameters.

``count_dropped`` counts expert ids that are out of range, which a device drops in silence: on the
device, without waiting for it, and in CUDA graphs, too.

``count_gemms`` counts which implementation multiplied each quantised weight, and with which
activations: whether FP8 tensor cores ran.

``compilations`` counts the kernels that this process compiled: none after ``dsv4.warmup``.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dsv4.boundaries import Boundaries, Finding, tensors_in, token_rows
from dsv4.compilation import counts as _compilations
from dsv4.gemm_counts import GemmCall as GemmCall
from dsv4.gemm_counts import GemmCounts as GemmCounts
from dsv4.gemm_counts import count_gemms as count_gemms
from dsv4.ops.moe import out_of_range

# float4_e2m1fn_x2 has no NaN and no infinity, and torch cannot convert it.
_CHECKED = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
)
_CHUNK = 1 << 24


@dataclass(frozen=True)
class BadTensor:
    """A tensor with NaN or infinite elements.

    Attributes:
        name: Path of the tensor, e.g. ``"layers.0.weight_scale_2"`` or ``"output[1]"``.
        shape: Its shape.
        dtype: Its dtype.
        nan: Number of NaN elements.
        infinite: Number of infinite elements.
        first: Coordinate of the first bad element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nan: int
    infinite: int
    first: tuple[int, ...]

    def __str__(self) -> str:
        counts = [f"{n} {word}" for n, word in ((self.nan, "NaN"), (self.infinite, "Inf")) if n]
        total, dtype = math.prod(self.shape), str(self.dtype).removeprefix("torch.")
        return (
            f"{self.name} {dtype} {list(self.shape)}: {' and '.join(counts)} of {total}, "
            f"first at {list(self.first)}"
        )


@dataclass(frozen=True)
class Origin:
    """A module that was given good tensors and returned bad ones.

    Attributes:
        kind: ``"NaN"`` or ``"Inf"``.
        module: Path of the module, ``""`` for the watched module itself.
        class_name: Its class.
        call: Number of the call among all submodule calls, from 0.
        outputs: The bad outputs.
        parameters: The module's bad parameters and buffers, its children's included.
        entered: Path of the first submodule that was GIVEN a bad tensor during that call: the bad
            value arose in the module's own forward, before that submodule. None if there is none.
    """

    kind: str
    module: str
    class_name: str
    call: int
    outputs: tuple[BadTensor, ...]
    parameters: tuple[BadTensor, ...]
    entered: str | None

    def __str__(self) -> str:
        where = f"{self.module or '(the watched module)'} ({self.class_name}, call {self.call})"
        lines = [f"first {self.kind} from {where}: inputs without {self.kind}, but"]
        lines += [f"  {bad}" for bad in self.outputs]
        if self.entered is not None:
            lines.append(
                f"  it arose in this module's own forward, before it called {self.entered}"
            )
        if self.parameters:
            lines.append("  bad parameters and buffers of this module:")
            lines += [f"    {bad}" for bad in self.parameters]
        else:
            lines.append("  its parameters and buffers are all finite")
        return "\n".join(lines)


@dataclass
class Report:
    """The observations of ``watch`` so far.

    Attributes:
        first_nan: First module whose outputs have a NaN and whose inputs have none, or None.
        first_infinite: Likewise for infinities.
        inputs: Paths and kinds of bad tensors that the watched module itself received.
        calls: Module calls seen.
    """

    first_nan: Origin | None = None
    first_infinite: Origin | None = None
    inputs: list[BadTensor] = field(default_factory=list)
    calls: int = 0

    @property
    def given(self) -> list[BadTensor]:
        """The former name of ``inputs``."""
        return self.inputs

    @property
    def first(self) -> Origin | None:
        """The earlier of ``first_nan`` and ``first_infinite``, or None if all was finite."""
        origins = [o for o in (self.first_nan, self.first_infinite) if o is not None]
        return min(origins, key=lambda origin: origin.call, default=None)

    def __bool__(self) -> bool:
        return self.first is not None or bool(self.inputs)

    def __str__(self) -> str:
        if not self:
            return f"no NaN and no Inf in the outputs of {self.calls} module calls"
        lines = [f"given to the watched module: {bad}" for bad in self.inputs]
        origins = [o for o in (self.first_nan, self.first_infinite) if o is not None]
        lines += [str(origin) for origin in sorted(origins, key=lambda origin: origin.call)]
        return "\n".join(lines)


class DroppedIds:
    """Expert ids out of range that reached the routed experts of a model.

    The counts are on the device, one per experts module; reading any waits for it.
    """

    def __init__(self, counters: Mapping[str, torch.Tensor]) -> None:
        self._counters = dict(counters)

    def per_module(self) -> dict[str, int]:
        """The count of each experts module by its path, zeros included."""
        return {name: int(counter) for name, counter in self._counters.items()}

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.per_module().values())

    def reset(self) -> None:
        """Start again from 0."""
        for counter in self._counters.values():
            counter.zero_()

    def __bool__(self) -> bool:
        return self.total > 0

    def __str__(self) -> str:
        counts = self.per_module()
        if not any(counts.values()):
            return f"no expert id out of range in {len(counts)} layers of experts"
        lines = [f"{sum(counts.values())} expert ids out of range, which choose no expert:"]
        lines += [f"  {name or '(the module)'}: {n}" for name, n in counts.items() if n]
        return "\n".join(lines)


# A CUDA graph writes to the counters it was captured with: they live as long as their modules.
_COUNTERS: weakref.WeakKeyDictionary[nn.Module, dict[torch.device, torch.Tensor]]
_COUNTERS = weakref.WeakKeyDictionary()


@contextmanager
def count_dropped(module: nn.Module) -> Iterator[DroppedIds]:
    """Count expert ids out of range, for the length of the block, in every layer of experts.

    An id is out of range if it is neither an expert's of the whole model nor -1 or the number of
    experts, which choose none; those of other ranks' experts are in range. On the CPU such an id
    raises; a GPU drops it, and only a count tells.

    A CUDA graph captured in the block goes on counting whenever it is replayed, also after it; one
    that was captured before does not count. Without the block nothing is counted and costs nothing.

    Args:
        module: A model, or anything that holds ``DeepseekV4Experts`` of this package or of
            transformers, on one device.

    Yields:
        The counts, starting from 0. They can be read whenever the device may be waited for, that
        is, not while a graph is captured.

    Raises:
        ValueError: if ``module`` holds no experts.
    """
    by_name = {name: m for name, m in module.named_modules() if _is_experts(m)}
    if not by_name:
        raise ValueError(f"count_dropped: {type(module).__name__} holds no DeepseekV4Experts")
    counters = {name: _counter(experts) for name, experts in by_name.items()}
    report = DroppedIds(counters)
    report.reset()
    handles = [
        experts.register_forward_pre_hook(_counting(counters[name]), with_kwargs=True)
        for name, experts in by_name.items()
    ]
    try:
        yield report
    finally:
        for handle in handles:
            handle.remove()


def _is_experts(module: nn.Module) -> bool:
    return any(base.__name__ == "DeepseekV4Experts" for base in type(module).__mro__)


def _counter(experts: nn.Module) -> torch.Tensor:
    device = next(experts.parameters()).device
    known = _COUNTERS.setdefault(experts, {})
    if device not in known:
        with torch.inference_mode(False):  # it is written to in and out of that mode
            known[device] = torch.zeros((), dtype=torch.int64, device=device)
    return known[device]


def _counting(counter: torch.Tensor) -> Any:
    def before(experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        counter.add_(out_of_range(ids, experts.num_experts).sum())

    return before


def check_parameters(module: nn.Module) -> list[BadTensor]:
    """Parameters and buffers of ``module`` that have a NaN or an infinity, in declaration order.

    FP8 codes, E4M3 and E8M0 scales are decoded first (E8M0 byte 255 is NaN). Integer tensors,
    packed FP4 codes and tensors on ``meta`` have nothing to check.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    return [bad for name, tensor in named if (bad := _inspect(name, tensor)) is not None]


def first_nonfinite(module: nn.Module, *args: Any, **kwargs: Any) -> Report:
    """Run ``module(*args, **kwargs)`` once, without gradients, and report the first NaN and Inf.

    The report is false (``not report``) if everything was finite; print it to read it.
    """
    with watch(module) as report, torch.no_grad():
        module(*args, **kwargs)
    return report


@contextmanager
def watch(module: nn.Module) -> Iterator[Report]:
    """Hook ``module`` and all its submodules for the length of the block.

    Yields:
        The report, filled as modules are called; also valid after the block, and after an error.
    """
    watcher = _Watcher(module)
    handles = [h for name, m in module.named_modules() for h in watcher.hooks(name, m)]
    try:
        yield watcher.report
    finally:
        for handle in handles:
            handle.remove()


# A CUDA graph writes to the marks it was captured with: they live as long as their modules.
_MARKED: weakref.WeakKeyDictionary[nn.Module, list[Boundaries]] = weakref.WeakKeyDictionary()


class Monitor:
    """Marks at the inputs and outputs of a module's submodules, see ``monitor``."""

    def __init__(self, boundaries: Boundaries) -> None:
        self._boundaries = boundaries

    def first(self) -> Finding | None:
        """Return the first boundary that was not finite since ``reset``; waits for the device.

        Rows are numbered as tokens ``[B, S]`` are, flat.
        """
        return self._boundaries.first(self._boundaries.marks.cpu())

    def reset(self) -> None:
        """Forget what was marked."""
        self._boundaries.reset()


@contextmanager
def monitor(module: nn.Module) -> Iterator[Monitor]:
    """Mark, for the length of the block, which input or output of a submodule is not finite.

    No call waits for the device. A CUDA graph captured in the block goes on marking whenever it is
    replayed, also after it. Tensors without a row per token, and FP8, are not looked at.

    Args:
        module: On one device; its first tensor argument has ids ``[B, S]`` or ``[T]``, or values
            ``[B, S, ...]`` or ``[T, H]``.

    Yields:
        What ``first`` reads, which waits for the device: not while a graph is captured.
    """
    device = next(module.parameters()).device
    boundaries = Boundaries(device)
    _MARKED.setdefault(module, []).append(boundaries)

    def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = [tensor for _, tensor in tensors_in("", (args, kwargs))]
        boundaries.begin(token_rows(inputs))

    def end(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        boundaries.end()

    handles = [module.register_forward_pre_hook(begin, with_kwargs=True)]
    handles += [h for name, m in module.named_modules() for h in boundaries.hook(m, name)]
    handles.append(module.register_forward_hook(end, with_kwargs=True))
    boundaries.reset()
    try:
        yield Monitor(boundaries)
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Open:
    """A call that has begun: what was bad in its inputs, and who was given bad tensors within."""

    kinds: frozenset[str]
    entered: dict[str, str] = field(default_factory=dict)


class _Watcher:
    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.report = Report()
        self.open: list[tuple[nn.Module, _Open]] = []

    def hooks(self, name: str, module: nn.Module) -> Iterator[Any]:
        def before(m: nn.Module, args: Any, kwargs: Any) -> None:
            self.enter(name, m, [*tensors_in("input", args), *tensors_in("input", kwargs)])

        def after(m: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.leave(name, m, output)

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after, with_kwargs=True)

    def enter(self, name: str, module: nn.Module, inputs: list[tuple[str, torch.Tensor]]) -> None:
        # Inputs are judged now: the forward may overwrite them.
        bad = [b for n, t in inputs if (b := _inspect(n, t)) is not None]
        if module is self.root:
            self.report.inputs += bad
        kinds = _kinds(bad)
        for _, outer in self.open:
            for kind in kinds - outer.kinds:
                outer.entered.setdefault(kind, name)
        self.open.append((module, _Open(kinds)))

    def leave(self, name: str, module: nn.Module, output: Any) -> None:
        call = self._close(module)
        number = self.report.calls
        self.report.calls += 1
        bad = [b for n, t in tensors_in("output", output) if (b := _inspect(n, t)) is not None]
        for kind in _kinds(bad) - call.kinds:
            slot = "first_nan" if kind == "NaN" else "first_infinite"
            if getattr(self.report, slot) is None:
                parameters = tuple(check_parameters(module))
                origin = Origin(
                    kind, name, type(module).__name__, number, tuple(bad), parameters,
                    call.entered.get(kind),
                )  # fmt: skip
                setattr(self.report, slot, origin)

    def _close(self, module: nn.Module) -> _Open:
        # Calls that ended in an exception the model caught never close; they are dropped here.
        while True:
            opened, call = self.open.pop()
            if opened is module:
                return call


def _kinds(bad: list[BadTensor]) -> frozenset[str]:
    nan = {"NaN"} if any(b.nan for b in bad) else set()
    return frozenset(nan | ({"Inf"} if any(b.infinite for b in bad) else set()))


def _inspect(name: str, tensor: torch.Tensor) -> BadTensor | None:
    if tensor.dtype not in _CHECKED or tensor.is_meta or tensor.numel() == 0:
        return None
    nan = infinite = 0
    first = -1
    # In chunks: the decoded copy of an FP8 tensor would take four times its memory.
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        part = part.float() if part.element_size() == 1 else part
        good = part.isfinite()
        if bool(good.all()):
            continue
        nan += int(part.isnan().sum())
        infinite += int(part.isinf().sum())
        first = start + int((~good).nonzero()[0]) if first < 0 else first
    if first < 0:
        return None
    shape = tuple(tensor.shape)
    return BadTensor(name, shape, tensor.dtype, nan, infinite, _coordinate(first, shape))


def _coordinate(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    coordinates = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        coordinates.append(rest)
    return tuple(reversed(coordinates))


def compilations() -> Counter[str]:
    """Names of the kernels that this process compiled, and how often, since it began.

    CuTeDSL kernels by the class of their plan, Triton kernels by their function, once for each
    specialisation. What a worker process of ``dsv4.warmup`` compiled does not count.
    """
    return _compilations.of_this_process().copy()
