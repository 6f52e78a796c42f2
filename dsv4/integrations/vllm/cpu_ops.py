"""Operators that vLLM calls on a CPU and that its CUDA wheel lacks.

With ``VLLM_TARGET_DEVICE=cpu`` the Python of that wheel runs on a CPU, without the extension that
vLLM builds for CPUs. Tests and CI run it so. Three operators of that extension are all that a
model of this package needs; they are plain PyTorch here, and only where they are missing.
"""

from __future__ import annotations

import functools
import os

import torch

_NAMESPACE = "_C"


@functools.cache  # an operator is gone with its library
def provide() -> torch.library.Library | None:
    """Define the operators that are missing, once; None: vLLM does not run on a CPU."""
    if os.environ.get("VLLM_TARGET_DEVICE") != "cpu":
        return None
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    for schema, function in (
        ("init_cpu_memory_env(int[] nodes) -> ()", _init_cpu_memory_env),
        (
            "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, "
            "Tensor block_table, Tensor(a!) slot_mapping, int block_size) -> ()",
            _compute_slot_mapping,
        ),
        ("greedy_argmax(Tensor logits) -> Tensor", _greedy_argmax),
    ):
        name = schema.partition("(")[0]
        if not hasattr(getattr(torch.ops, _NAMESPACE), name):
            library.define(schema)
            library.impl(name, function, "CompositeExplicitAutograd")
    return library


def _init_cpu_memory_env(nodes: list[int]) -> None:
    """Bind no memory to NUMA nodes."""
    del nodes


def _compute_slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    """Slot of each token, from the block of its position; -1 past the last token."""
    tokens = int(query_start_loc[-1])
    counts = query_start_loc.diff().long()
    numbers = torch.arange(len(counts), device="cpu")
    request = torch.repeat_interleave(numbers, counts, output_size=tokens)
    position = positions[:tokens]
    blocks = block_table[request, position // block_size].long()
    slot_mapping[:tokens] = blocks * block_size + position % block_size
    slot_mapping[tokens:] = -1


def _greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)
