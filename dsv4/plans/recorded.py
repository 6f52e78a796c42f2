"""Parts of a recording: where tensors lie, and the steps that a tape repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Location:
    """The place of a recorded tensor.

    Attributes:
        slot: Number of the argument or, after the arguments, of the allocation.
        offset: Bytes from its first element.
    """

    slot: int
    offset: int


@dataclass(frozen=True)
class View:
    """A tensor inside the memory of a slot."""

    location: Location
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, slot: int) -> View:
        """Return the same part of another slot."""
        return replace(self, location=Location(slot, self.location.offset))

    def __call__(self, slots: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make the tensor, given the tensors of all slots."""
        whole = slots[self.location.slot]
        if whole.dtype == self.dtype:
            begin = whole.storage_offset() + self.location.offset // whole.element_size()
            return whole.as_strided(self.shape, self.strides, begin)
        storage = whole.untyped_storage()
        begin = whole.data_ptr() - storage.data_ptr() + self.location.offset
        made = torch.empty(0, dtype=self.dtype, device=whole.device)
        return made.set_(storage, begin // made.element_size(), self.shape, self.strides)


@dataclass(frozen=True)
class KernelLaunch:
    """A recorded kernel launch.

    Attributes:
        kernel: The ``FastKernel``.
        launch: Function that launches it through the driver; None where it is interpreted.
        grid: Number of programs.
        scalars: Arguments of ``launch`` other than addresses.
        args: Positional arguments, with ``View`` in place of tensors, also inside of tuples.
        options: Arguments by name.
    """

    kernel: Any
    launch: Any
    grid: Any
    scalars: tuple[Any, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class DriverLaunch:
    """Recorded launches of a compiled kernel.

    Attributes:
        run: Launches, given a stream and the addresses of all locations.
        locations: Locations of its tensors; None where it takes 0 in place of an address.
    """

    run: Callable[[int, Sequence[int]], None]
    locations: tuple[Location | None, ...]


@dataclass(frozen=True)
class TorchCall:
    """A recorded operation of ``REPEATED``.

    Attributes:
        run: Function that repeats it.
        args: Arguments, with ``View`` in place of tensors, also inside of tuples and lists.
        options: Arguments by name.
        slot: Slot of its result.
    """

    run: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    options: dict[str, Any]
    slot: int


@dataclass(frozen=True)
class WholeOperator:
    """A registered operator that is called again, because its parts could not be recorded.

    Attributes:
        name: The registered name.
        args: Arguments of the recorded call; tensors are alive no longer than the recorder.
        views: The same arguments with ``View`` in place of tensors.
        slots: Slots of its results.
    """

    name: str
    args: tuple[Any, ...]
    views: tuple[Any, ...]
    slots: tuple[int, ...]


Step = KernelLaunch | DriverLaunch | TorchCall | WholeOperator


def flat(value: Any) -> Iterator[Any]:
    """Yield the parts of nested lists and tuples."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from flat(part)
    else:
        yield value
