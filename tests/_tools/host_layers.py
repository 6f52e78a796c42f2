"""Compare the experts of each layer of whole Flash in host memory with all of them on the GPU.

    python -m tests._tools.host_layers [--layers 43] [--static 156] [--slots 64] [--staged 18]

One layer after another: its experts are drawn on the device, a copy stays there, and ``Hosting``
moves them to slots and host memory, as ``load`` does. What slots held is poisoned. Then captured
steps of one token (on a CPU they are called), a step in waves, and a prompt through the buffer
have to have the bits of the copy. A prompt passes through the layer before, too, which starts this
layer's copies. Two layers are in memory at a time.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import dsv4
from dsv4.bench.suites.hosted_steps import draw_experts
from dsv4.bench.suites.random_model import Weights, random_experts
from dsv4.config import ModelConfig
from dsv4.layers import DeepseekV4Experts, HostExperts
from dsv4.layers._expert_staging import CHOICES_PER_EXPERT
from dsv4.layers._hosted_experts import HostedExperts
from dsv4.layers.host_experts import Hosting
from dsv4.testing.assertions import assert_bitwise

_EXPONENT = 0.7  # of the popularity of experts


@dataclass(frozen=True)
class Sizes:
    """What is compared.

    Attributes:
        config: Widths and numbers of experts.
        layers: Number of layers.
        placement: Which experts lie in host memory.
        steps: Captured steps of one token.
    """

    config: ModelConfig
    layers: int
    placement: HostExperts
    steps: int = 50

    @property
    def wave_tokens(self) -> int:
        """Tokens of a step that chooses more experts than there are slots."""
        return 2 * (self.placement.slots // self.config.num_experts_per_tok + 1)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a step that passes through the buffer."""
        choices = CHOICES_PER_EXPERT * self.config.n_routed_experts
        return -(-choices // self.config.num_experts_per_tok) + 1


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Pair:
    """The experts of a layer twice.

    Attributes:
        number: Which layer.
        resident: All on the device.
        moved: Some in host memory.
    """

    number: int
    resident: DeepseekV4Experts
    moved: DeepseekV4Experts

    @classmethod
    def make(cls, number: int, sizes: Sizes, hosting: Hosting, device: torch.device) -> Pair:
        """Draw, copy and move them; poison the slots that are not static."""
        moved = random_experts(sizes.config, device, Weights(seed=number))
        moved.pack()
        resident = copy.deepcopy(moved)
        hosting.move(moved)
        pair = cls(number, resident, moved)
        hosted = pair.hosted
        static = hosted.static_slots
        held = hosted.state.expert_in.tolist()[:static]
        hosted.state.set_slots([*held, *[-1] * hosted.cached_slots])
        for tensor in hosted.tensors.values():
            tensor[static:].view(torch.uint8).fill_(0xFF)
        return pair

    @property
    def hosted(self) -> HostedExperts:
        """Slots and rows of those in host memory."""
        assert self.moved.hosted is not None
        return self.moved.hosted

    def check(self, inputs: Inputs, what: str) -> None:
        """Compare one step.

        Raises:
            AssertionError: if a bit differs.
        """
        result, expected = self.moved(*inputs), self.resident(*inputs)
        assert torch.isfinite(expected.float()).all(), f"layer {self.number}, {what}: not finite"
        assert_bitwise(result, expected, f"layer {self.number}, {what}")


def steps(sizes: Sizes, number: int, tokens: int, device: torch.device) -> Iterator[Inputs]:
    """Yield inputs of steps of some tokens, without end."""
    config, seed = sizes.config, 1000 * number + tokens
    generator = torch.Generator(device).manual_seed(seed)
    shape = (1, tokens, config.num_experts_per_tok, config.n_routed_experts)
    while True:
        ids = draw_experts(_EXPONENT, 1, *shape, seed=seed)[0, 0].to(device)
        x = torch.randn(tokens, config.hidden_size, generator=generator, device=device)
        weights = torch.rand(ids.shape, generator=generator, device=device)
        yield x.bfloat16(), ids, weights
        seed += 1


def check_tokens(pair: Pair, sizes: Sizes, device: torch.device) -> None:
    """Compare captured steps of one token with other experts each; on a CPU call after call."""
    drawn = steps(sizes, pair.number, 1, device)
    inputs = next(drawn)
    run: Callable[[], object]
    if device.type == "cuda":
        pair.moved(*inputs)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = pair.moved(*inputs)
        run = graph.replay
    else:
        result = pair.resident(*inputs)

        def run() -> None:
            result.copy_(pair.moved(*inputs))

    for step in range(sizes.steps):
        for buffer, new in zip(inputs, next(drawn), strict=True):
            buffer.copy_(new)
        run()
        assert_bitwise(result, pair.resident(*inputs), f"layer {pair.number}, step {step}")


def check_layer(pair: Pair, before: Pair | None, sizes: Sizes, device: torch.device) -> str:
    """Compare all kinds of steps of a layer; return a line about it.

    Raises:
        AssertionError: if a bit differs, or a step took another way than it should.
    """
    check_tokens(pair, sizes, device)
    counters = pair.hosted.state.counters.tolist()
    hits = 100 * (1 - counters[2] / max(1, counters[1]))
    assert pair.hosted.obstacle(sizes.wave_tokens * sizes.config.num_experts_per_tok) is not None
    pair.check(next(steps(sizes, pair.number, sizes.wave_tokens, device)), "waves")
    prompt = next(steps(sizes, pair.number, sizes.prompt_tokens, device))
    slots = pair.hosted.state.expert_in.tolist()
    for checked in (before, pair):
        if checked is not None:
            checked.check(prompt, "prompt through the buffer")
    assert pair.hosted.state.expert_in.tolist() == slots, "a prompt through the buffer left slots"
    return (
        f"layer {pair.number}: {sizes.steps} steps of one token ({hits:.1f} % of experts in slots),"
        f" {sizes.wave_tokens} tokens in waves, {sizes.prompt_tokens} through the buffer: all equal"
    )


@torch.inference_mode()
def compare(sizes: Sizes, device: torch.device, say: Callable[[str], object]) -> None:
    """Compare all layers, one after another; say a line for each.

    Raises:
        AssertionError: if a bit differs.
    """
    hosting, before, begin = Hosting(sizes.placement, sizes.layers), None, time.perf_counter()
    for number in range(sizes.layers):
        pair = Pair.make(number, sizes, hosting, device)
        if number == 0 and device.type == "cuda":  # in parallel processes
            dsv4.warmup(pair.resident, max_tokens=sizes.prompt_tokens, progress=False)
        line = check_layer(pair, before, sizes, device)
        say(f"[{time.perf_counter() - begin:6.1f} s] {line}")
        before = pair


def main() -> int:
    """Run it as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=43)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--static", type=int, default=156)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--staged", type=int, default=18)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    config = ModelConfig.flash().replace(n_routed_experts=options.experts)
    placement = HostExperts(options.static, options.slots, staged=options.staged)
    sizes = Sizes(config, options.layers, placement, options.steps)
    compare(sizes, torch.device(options.device), lambda line: print(line, flush=True))
    print(f"done: {options.layers} layers of {options.experts} experts, all bits equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
