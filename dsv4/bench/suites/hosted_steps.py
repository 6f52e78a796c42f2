"""Decode steps of a model with experts in host memory, under routing that is drawn.

A step that is replayed with the same tokens would choose the same experts, which are in slots from
the second replay on. So each layer's router computes as ever, and experts drawn in advance replace
its choice: other ones in every step. Those of hash layers are still known before the step begins,
so a captured step loads them early, as it does without this. Popularity falls with the number of
the expert, so the static experts, the first ones, are the most used, as after
``dsv4.layers.repin_``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dsv4.layers import DeepseekV4SparseMoeBlock
from dsv4.layers._hosted_experts import HostedExperts
from dsv4.layers.early_experts import ChoosesByToken
from dsv4.layers.host_experts import CacheUse, cache_use, slot_tokens
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.ops.expert_slots import expert_gather

ROUTINGS = {"uniform": 0.0, "zipf 0.7": 0.7, "zipf 1": 1.0}  # exponents of the popularity
SLOT_STEPS = 96  # before those that are timed: one and a half times the decay of use counts


class DrawnRouter(nn.Module):
    """A router whose choice of experts is replaced.

    Args:
        router: Computes weights, and a choice that is dropped.
        chosen: int64 ``[T, k]``, the experts of up to T tokens, written before each step. Steps of
            more tokens (prompts) keep the router's choice.
    """

    def __init__(self, router: nn.Module, chosen: torch.Tensor) -> None:
        super().__init__()
        self.router = router
        self.chosen = chosen

    def forward(
        self, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return scores, weights and chosen experts, as a router does."""
        scores, weights, indices = self.router(*args, **options)
        tokens = len(indices)
        if tokens > len(self.chosen):
            return scores, weights, indices
        chosen = self.chosen[:tokens].to(indices.dtype)
        if options.get("routed") is not None:  # some go to no expert
            chosen = torch.where(indices < 0, indices, chosen)
        return scores, weights, chosen


class DrawnHashRouter(DrawnRouter, ChoosesByToken):
    """A hash layer's router whose table is replaced: its experts are known before the step."""

    def experts_of(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the drawn experts, or those of the router's table for more tokens."""
        tokens = len(input_ids)
        if tokens > len(self.chosen):
            table = self.router.tid2eid
            assert isinstance(table, torch.Tensor)
            return table[input_ids]
        return self.chosen[:tokens]


def draw_experts(
    exponent: float, steps: int, layers: int, tokens: int, top_k: int, experts: int, seed: int = 0
) -> torch.Tensor:
    """Draw different experts for each token, by popularity ``rank ** -exponent``.

    Returns:
        int64 ``[steps, layers, tokens, top_k]`` on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (steps, layers, tokens, experts)
    # The largest keys are a draw without replacement (Gumbel).
    uniform = torch.rand(shape, generator=generator, dtype=torch.float32).clamp_(1e-20, 1 - 1e-7)
    keys = -(-uniform.log()).log()
    ranks = torch.arange(1, experts + 1, dtype=torch.float32, device="cpu")
    return (keys - exponent * ranks.log()).topk(top_k).indices


@contextmanager
def drawn_routing(
    model: DeepseekV4ForCausalLM, tokens: int, draft: bool = False
) -> Iterator[torch.Tensor]:
    """Replace the choice of every layer's router inside the block.

    Args:
        model: The model.
        tokens: Most tokens of a step.
        draft: Whether to replace those of draft layers, too, which come after the main ones.

    Yields:
        int64 ``[layers, tokens, top_k]``: the experts of the next step, on the model's device.
    """
    modules = [*model.model.modules(), *(model.mtp.modules() if draft else ())]
    blocks = [m for m in modules if isinstance(m, DeepseekV4SparseMoeBlock)]
    shape = (len(blocks), tokens, model.config.num_experts_per_tok)
    chosen = torch.zeros(shape, dtype=torch.int64, device=model.device)
    routers = [block.gate for block in blocks]
    for block, own in zip(blocks, chosen, strict=True):
        kind = DrawnHashRouter if block.is_hash else DrawnRouter
        setattr(block, "gate", kind(block.gate, own))  # noqa: B010  (another type)
    try:
        yield chosen
    finally:
        for block, router in zip(blocks, routers, strict=True):
            block.gate = router


def fits_slots(model: DeepseekV4ForCausalLM, tokens: int) -> bool:
    """Return whether slots hold all experts that a step can choose, so that it can be captured."""
    return all(tokens <= most for most in slot_tokens(model))


@dataclass(frozen=True)
class Reload:
    """Loads experts of a layer again to the slots that hold them, which changes nothing.

    Attributes:
        hosted: Experts of the layer.
        experts: int32, experts in slots that are not static.
        targets: int32, these slots.
    """

    hosted: HostedExperts
    experts: torch.Tensor
    targets: torch.Tensor

    def __call__(self) -> None:
        """Launch the kernel."""
        hosted = self.hosted
        expert_gather(
            hosted.memory, hosted.rows, hosted.row_of, self.experts, self.targets, hosted.chunks
        )

    @property
    def nbytes(self) -> int:
        """Bytes that are loaded."""
        return len(self.experts) * self.hosted.layout.row_bytes


def reloads(layers: Sequence[HostedExperts], experts: int) -> list[Reload]:
    """Spread a number of experts evenly over layers, each of which loads them again.

    Args:
        layers: Experts of the layers.
        experts: How many are to be loaded; fewer if fewer are in slots that are not static.
    """
    result = []
    for number, hosted in enumerate(layers):
        share = experts * (number + 1) // len(layers) - experts * number // len(layers)
        held = hosted.state.expert_in.tolist()
        slots = [n for n in range(hosted.static_slots, hosted.slots) if held[n] >= 0][:share]
        if slots:
            tables = ([held[slot] for slot in slots], slots)
            result.append(
                Reload(
                    hosted, *(torch.tensor(t, dtype=torch.int32).to(hosted.device) for t in tables)
                )
            )
    return result


def timed_steps(
    model: DeepseekV4ForCausalLM,
    chosen: torch.Tensor,
    drawn: torch.Tensor,
    step: Callable[[], object],
    warm: int = SLOT_STEPS,
) -> tuple[float, CacheUse]:
    """Run steps with drawn experts; return milliseconds of those after ``warm``, and their hits.

    Args:
        model: With experts in host memory.
        chosen: What ``drawn_routing`` yields.
        drawn: int64 ``[steps, layers, tokens, top_k]``, on the model's device.
        step: Runs or replays one step.
        warm: Steps that are not timed.
    """
    for experts in drawn[:warm]:
        chosen.copy_(experts)
        step()
    before = cache_use(model)
    milliseconds = _milliseconds(model.device, lambda: _run(chosen, drawn[warm:], step))
    return milliseconds / max(1, len(drawn) - warm), cache_use(model).since(before)


def _run(chosen: torch.Tensor, drawn: torch.Tensor, step: Callable[[], object]) -> None:
    for experts in drawn:
        chosen.copy_(experts)
        step()


def _milliseconds(device: torch.device, call: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begin)
