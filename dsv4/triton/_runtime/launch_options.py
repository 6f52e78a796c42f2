"""Options that every launcher needs: the right device, and how the kernel is started."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from dsv4 import device as machine
from dsv4.cute.runtime.launch import on as cuda_device

_SMALL_WARPS = 1024
_NOWHERE = contextlib.nullcontext()
_INTERPRETED_AS = (9, 0)  # the interpreter takes the tiles and instructions of this GPU
_RESERVED = 1024  # bytes of shared memory that the driver takes for each program
# FP8 types that GPUs before 8.9 convert to. Triton has the same by itself; as an option of a launch
# they let a newer GPU run what older GPUs run (``numerics.converts_e4m3``).
OLDER_FP8 = ("fp8e4b15", "fp8e5")


def on(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the tensor's device the current one: Triton launches there, on its current stream."""
    return cuda_device(tensor.get_device()) if tensor.is_cuda else _NOWHERE


def options(tensor: torch.Tensor, small: bool = False) -> dict[str, Any]:
    """Keyword arguments of every launch: programmatic dependent launch where the GPU has it.

    Contraction of ``a * b + c`` to one rounding is asked for, because its default differs between
    versions of Triton. ``PDL`` goes to the kernel, which must begin with ``wait_for_inputs(PDL)``;
    ``launch_pdl`` to the launcher. Without a GPU (the interpreter) or before Hopper: off.

    Args:
        tensor: One that the kernel takes.
        small: Whether the launch has few programs of a kernel that has ``numerics.once``. They
            then wait with their addresses computed (PDL is 2, not 1), which was slower for many.
    """
    version = capability(tensor)
    if version is None:
        return {"PDL": 0}
    if version < (8, 9):
        return {"PDL": 0, "enable_fp_fusion": True, "supported_fp8_dtypes": OLDER_FP8}
    if version[0] < 9:
        return {"PDL": 0, "enable_fp_fusion": True}
    return {"PDL": 2 if small else 1, "launch_pdl": True, "enable_fp_fusion": True}


def is_small(programs: int, warps: int) -> bool:
    """Return whether a launch of ``programs`` programs of ``warps`` warps each is small."""
    return programs * warps <= _SMALL_WARPS


def in_order(tensor: torch.Tensor) -> dict[str, Any]:
    """The same for a kernel that writes weights, without programmatic launch and without ``PDL``.

    GEMMs load their weights before the preceding kernel has ended, and would find what was there
    before.
    """
    return {name: value for name, value in options(tensor).items() if "pdl" not in name.lower()}


def capability(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Compute capability of the tensor's GPU; None on the CPU."""
    if tensor.device.type != "cuda":
        return None
    return machine.capability(tensor.device)


def sm(tensor: torch.Tensor) -> int:
    """Ten times the compute capability of the tensor's GPU; on the CPU that of Hopper.

    Kernels take it if some GPUs lack an instruction; they have the same bits without it.
    """
    major, minor = capability(tensor) or _INTERPRETED_AS
    return 10 * major + minor


def shared_memory(tensor: torch.Tensor) -> int:
    """Bytes of shared memory that a program can have; on the CPU Hopper's."""
    return machine.shared_memory(capability(tensor) or _INTERPRETED_AS)


def resident(memory: int, most: int, shared: int) -> int:
    """Programs that an SM holds at a time: ``most``, or fewer if its shared memory ends before.

    An SM has what one program can have and, for each program, what the driver reserves. ``most`` is
    kept on GPUs with as much as Hopper: it was chosen by times there.

    Args:
        memory: Bytes of shared memory that a program can have.
        most: As many as are worthwhile, or as registers allow; at least 1.
        shared: Bytes of shared memory that a program takes.
    """
    if memory >= machine.shared_memory(_INTERPRETED_AS):
        return most
    return max(1, min(most, (memory + _RESERVED) // (shared + _RESERVED)))


def has_descriptors(tensor: torch.Tensor) -> bool:
    """Return whether tensor descriptors (TMA) load tiles: on Hopper and newer GPUs.

    Elsewhere Triton replaces them by pointers, which take registers from a large tile.
    """
    return sm(tensor) >= 90


def has_wide_tiles(tensor: torch.Tensor) -> bool:
    """Return whether tensor cores read operands from shared memory: Hopper, data-centre Blackwell.

    Other GPUs multiply operands in registers (``mma.sync``). A tile of 128 x 128 with separate
    pointers for each load does not fit there.
    """
    return is_wide(sm(tensor))


def is_wide(sm: int) -> bool:
    """``has_wide_tiles`` of a GPU by the result of ``sm``."""
    return sm // 10 in (9, 10, 11)


def sm_count(device: torch.device) -> int:
    """SMs of a GPU; 1 on the CPU."""
    return machine.sms(device)


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value`` and at least 1."""
    return 1 << max(0, value - 1).bit_length()
