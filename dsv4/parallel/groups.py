"""Process groups by name, as operators take them: ``""`` is this process alone.

``"emulated:4"`` is a group of four ranks of which this process is rank 0 and the others are copies
of it, for measurements on one GPU and for tests: what they send is what this process sends.

The one place of this package that calls torch's private function for the group of a name, which is
what torch's own functional collectives do (tested in tests/parallel/test_groups.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

ALONE = ""
_EMULATED = "emulated:"


def emulated_name(ranks: int) -> str:
    """Return the name of the group of ``ranks`` ranks that are copies of this process."""
    return f"{_EMULATED}{ranks}"


def emulated_ranks(name: str) -> int | None:
    """Return the number of ranks of an emulated group; None for the name of another one."""
    head, _, ranks = name.partition(":")
    return int(ranks) if f"{head}:" == _EMULATED and ranks.isdecimal() else None


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


def everyone() -> str:
    """Return the name of the group of all processes; it must be initialised."""
    assert dist.group.WORLD is not None, "the caller has made it"
    return dist.group.WORLD.group_name


def size(name: str) -> int:
    """Return the number of ranks of a group."""
    return 1 if name == ALONE else emulated_ranks(name) or resolve(name).size()


def rank(name: str) -> int:
    """Return this process's rank within a group."""
    return 0 if name == ALONE or emulated_ranks(name) else resolve(name).rank()


def transport(name: str, device: torch.device) -> str | None:
    """Return what carries tensors of a device between the ranks: ``"gloo"``, ``"nccl"``, or None.

    None: nothing does, as with NCCL and tensors of the CPU, or in an emulated group.
    """
    if name == ALONE or emulated_ranks(name):
        return None
    group = resolve(name)
    kinds = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return kinds.get(device.type)


def gather(tensor: torch.Tensor, name: str) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in the order of the ranks; all have one shape and dtype."""
    if name == ALONE:
        return [tensor]
    copies = emulated_ranks(name)
    if copies:
        return [tensor] * copies
    group = resolve(name)
    own = tensor.contiguous()
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    return gathered
