"""Process groups by name, as operators take them: ``""`` is this process alone.

The one place of this package that calls torch's private function for the group of a name, which is
what torch's own functional collectives do (tested in tests/parallel/test_groups.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

ALONE = ""


def resolve(name: str) -> Any:
    """Return the ``ProcessGroup`` of a name.

    Raises:
        ValueError: if no group of this process has that name.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"group is {name!r}, and torch.distributed is not initialised; wanted {ALONE!r} for "
            "this process alone, or the group_name of a process group"
        )
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(
            f"group is {name!r}, wanted the group_name of a process group of this process, or "
            f"{ALONE!r}"
        ) from error


def size(name: str) -> int:
    """Return the number of ranks of a group."""
    return 1 if name == ALONE else resolve(name).size()


def rank(name: str) -> int:
    """Return this process's rank within a group."""
    return 0 if name == ALONE else resolve(name).rank()


def transport(name: str, device: torch.device) -> str | None:
    """Return what carries tensors of a device between the ranks: ``"gloo"``, ``"nccl"``, or None.

    None: nothing does, as with NCCL and tensors of the CPU.
    """
    if name == ALONE:
        return None
    group = resolve(name)
    kinds = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return kinds.get(device.type)


def gather(tensor: torch.Tensor, name: str) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in the order of the ranks; all have one shape and dtype."""
    if name == ALONE:
        return [tensor]
    group = resolve(name)
    own = tensor.contiguous()
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    return gathered
