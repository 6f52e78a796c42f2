"""NVLink multicast is never used.

A program that uses it can put all GPUs of a host out of service where the fabric manager does not
support it, and no sum of this package needs it. So there is no ``multimem`` implementation, and
variables of the environment keep libraries from it that would use multicast by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from dsv4.implementations import Call
from dsv4.ops.all_reduce import AllReduceArgs

NCCL = "NCCL_NVLS_ENABLE"
# What turns multicast off in NCCL, torch's symmetric memory and NVSHMEM.
OFF: Mapping[str, str] = {
    NCCL: "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
REFUSED = (
    "NVLink multicast (multimem) is never used: where a host does not support it, it can put all "
    "of its GPUs out of service"
)


def requested(environment: Mapping[str, str]) -> str | None:
    """Return how an environment asks for multicast, as a sentence, or None if it does not."""
    for name, off in OFF.items():
        value = environment.get(name)
        if value is not None and value != off:
            return f"{name} is {value!r}, wanted {off!r} or unset: {REFUSED}"
    algorithms = environment.get("NCCL_ALGO", "")
    if "NVLS" in algorithms.upper() and not algorithms.startswith("^"):
        return f"NCCL_ALGO is {algorithms!r}, wanted no NVLS algorithm: {REFUSED}"
    return None


def turn_off() -> None:
    """Set the variables of ``OFF`` in this process and its children.

    Libraries read them when they start: call it before ``init_process_group``.

    Raises:
        ValueError: if the environment asks for multicast; nothing is set then.
    """
    reason = requested(os.environ)
    if reason is not None:
        raise ValueError(reason)
    for name, value in OFF.items():
        os.environ[name] = value


def unsupported(call: Call) -> str:
    """Return why no call runs as ``"multimem"``."""
    return REFUSED


def refused(args: AllReduceArgs) -> torch.Tensor:
    """Raise: the row of the table is for a name that has no implementation; see ``unsupported``."""
    raise NotImplementedError(REFUSED)
