"""Decode with experts in host memory for a long time; check bits, tables and memory.

    python -m tests._tools.host_soak SECONDS [--device cpu] [--every SECONDS]
    python -m tests._tools.host_soak SECONDS --flash 6 256 --place 96 40 24

One copy of a small model, or of one with Flash's widths, has all experts on the device, the other
has some in host memory. Both replay the captured decode step of one sequence (on a CPU they call
it), with other tokens and so other experts each time. At intervals the program compares logits bit
by bit, repeats a request, checks the tables of slots, exchanges static experts, and reads the time
of a step and the memory in use; growth of memory is an error. Nightly, 30 min:
``HYPOTHESIS_PROFILE=nightly pytest tests/layers/test_host_experts_gpu.py -k soak``.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dsv4
from dsv4 import layers
from dsv4.bench.suites.random_model import Weights, random_model
from dsv4.bench.suites.whole_model import DecodeStep
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.layers import HostExperts
from dsv4.layers.host_experts import experts_of, hosted_of
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving import Runner
from dsv4.serving.request import TokenLogprobs
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import randomize_

_FIRST_CHECKS = 3  # checks after which memory must not grow
_SMALL = HostExperts(3, 4)
# Bytes that may come and go: a runner's last step may hold some tensors of its own.
_DRIFT = {"allocated": 1 << 20, "used": 32 << 20, "resident": 32 << 20, "locked": 0}


@dataclass(frozen=True)
class Memory:
    """Bytes in use.

    Attributes:
        allocated: By PyTorch's tensors on the GPU.
        used: Of the GPU, by everybody.
        resident: Of the process in host memory.
        locked: Bytes of experts in host memory whose pages CUDA has locked. The system counts no
            memory that ``cudaHostRegister`` locks (``VmPin`` and ``VmLck`` stay 0).
    """

    allocated: int
    used: int
    resident: int
    locked: int

    @classmethod
    def of(cls, model: DeepseekV4ForCausalLM) -> Memory:
        """Return what is in use now, by a model and besides it."""
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        resident, locked, device = pages * 4096, locked_bytes(model), model.device
        if device.type != "cuda":
            return cls(0, 0, resident, locked)
        free, total = torch.cuda.mem_get_info(device)
        return cls(torch.cuda.memory_allocated(device), total - free, resident, locked)

    def __str__(self) -> str:
        sizes = (self.allocated, self.used, self.resident, self.locked)
        allocated, used, resident, locked = (f"{nbytes / 1e6:.1f}" for nbytes in sizes)
        return (
            f"{allocated} MB allocated, {used} MB of the GPU, {resident} MB of the host, "
            f"{locked} MB locked"
        )


def locked_bytes(model: DeepseekV4ForCausalLM) -> int:
    """Return the bytes of a model's experts in host memory that CUDA has locked; 0 on a CPU."""
    if model.device.type != "cuda":
        return 0
    return sum(hosted.rows.nbytes for hosted in hosted_of(model) if hosted.rows.is_pinned())


def small_model(device: torch.device, *, mtp: bool = False) -> DeepseekV4ForCausalLM:
    """Return a model of three layers with 16 experts each, packed on a GPU."""
    config = ModelConfig.tiny(
        layer_types=(SLIDING, CSA, HCA),
        vocab_size=512,
        hidden_size=256,
        moe_intermediate_size=128,
        n_routed_experts=16,
        num_experts_per_tok=4,
        num_nextn_predict_layers=int(mtp),
    )
    model = DeepseekV4ForCausalLM(config, mtp=mtp).requires_grad_(False)
    randomize_(model, 3)
    model = model.to(device, torch.bfloat16).eval()
    layers.quantize_(model)
    if device.type == "cuda":
        layers.pack_(model)
    return model


def flash_model(device: torch.device, count: int, experts: int) -> DeepseekV4ForCausalLM:
    """Return a packed model of random weights with Flash's widths, and fewer layers and experts."""
    config = ModelConfig.flash()
    config = config.replace(
        num_hidden_layers=count,
        layer_types=config.layer_types[:count],
        mlp_layer_types=config.mlp_layer_types[:count],
        n_routed_experts=experts,
        num_nextn_predict_layers=0,
    )
    return random_model(config, device, Weights())


@dataclass
class Window:
    """Steps since the last check.

    Attributes:
        steps: How many.
        seconds: How long they took.
        longest: Seconds of the longest one.
    """

    steps: int = 0
    seconds: float = 0.0
    longest: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one step."""
        self.steps += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)

    def __str__(self) -> str:
        mean = 1e3 * self.seconds / max(1, self.steps)
        return f"{mean:.3f} ms a step, at most {1e3 * self.longest:.1f}"


class Asker:
    """Sends one request to a runner of a model again and again.

    Args:
        model: The model.
        new_tokens: Tokens of the prompt, and of the answer.
    """

    def __init__(self, model: DeepseekV4ForCausalLM, new_tokens: int) -> None:
        self._prompt = [2 + i % 97 for i in range(new_tokens)]
        self._options: dict[str, Any] = {"stop_ids": (), "logprobs": 3, "seed": 1}
        self._options["max_new_tokens"] = new_tokens
        tokens = len(self._prompt) + new_tokens
        # Hosted experts are planned on the host for a prompt, which is therefore not padded.
        own: dict[str, Any] = {"prompt_buckets": (), "prefix_sequences": 0, "speculate": None}
        self._runner = Runner(model, max_sequences=1, max_tokens=tokens, **own)

    def answer(self) -> tuple[list[int], list[TokenLogprobs]]:
        """Return the greedy tokens and their log-probabilities."""
        request = self._runner.add(self._prompt, **self._options)
        self._runner.run()
        return list(request.tokens), list(request.logprobs)


@torch.inference_mode()
def soak(
    seconds: float,
    device: str,
    every: float = 10.0,
    say: Callable[[str], object] = print,
    make: Callable[[torch.device], DeepseekV4ForCausalLM] = small_model,
    placement: HostExperts = _SMALL,
) -> int:
    """Decode for some seconds; return the number of steps.

    Args:
        seconds: How long.
        device: Where.
        every: Seconds from one check to the next.
        say: Takes a line for each check.
        make: Makes the model, packed on a GPU.
        placement: Which experts lie in host memory.

    Raises:
        AssertionError: if bits differ, the answer to a repeated request does, tables contradict
            each other, memory grows, or on a GPU experts in host memory are not locked.
    """
    target = torch.device(device)
    on_gpu = target.type == "cuda"
    resident = make(target)
    hosted = copy.deepcopy(resident)
    layers.host_experts_(hosted, placement)
    if on_gpu:
        dsv4.warmup(hosted, max_tokens=64, progress=False)
    steps = [DecodeStep(model, 1, 64) for model in (resident, hosted)]
    runs = [step.captured().replay if on_gpu else step for step in steps]
    new_tokens = 32 if on_gpu else 2
    answer, asker = Asker(resident, new_tokens).answer(), Asker(hosted, new_tokens)
    generator = torch.Generator().manual_seed(1)
    count, checks, noted, window = 0, 0, Memory.of(hosted), Window()
    rows = sum(layer.rows.nbytes for layer in hosted_of(hosted))
    start = checked = time.perf_counter()
    while (now := time.perf_counter()) - start < seconds:
        token = torch.randint(2, resident.config.vocab_size, (1,), generator=generator)
        steps[1].tokens.copy_(token)
        logits = runs[1]()
        if on_gpu:
            torch.cuda.synchronize(target)
        count += 1
        window.add(time.perf_counter() - now)
        if now - checked < every and count > 1:
            continue
        steps[0].tokens.copy_(token)
        expected = runs[0]()
        pair = (steps[1].logits, steps[0].logits) if on_gpu else (logits, expected)
        assert_bitwise(pair[0], pair[1], f"step {count}")
        check_tables(hosted, count)
        assert asker.answer() == answer, f"step {count}: a repeated request has another answer"
        if checks % 3 == 2:
            layers.repin_(hosted)
        checks, checked, memory = checks + 1, time.perf_counter(), Memory.of(hosted)
        assert not on_gpu or memory.locked == rows, f"{memory.locked} of {rows} bytes are locked"
        hits = 100 * layers.cache_use(hosted).hit_rate
        say(f"{now - start:7.1f} s, {count} steps, hits {hits:.1f} %, {window}: {memory}")
        window = Window()
        if checks <= _FIRST_CHECKS:
            noted = memory
            continue
        for name, most in _DRIFT.items():
            grown = getattr(memory, name) - getattr(noted, name)
            assert grown <= most, f"{name} memory grew by {grown} bytes: {noted} to {memory}"
    say(f"since check {_FIRST_CHECKS}: {noted}, then {Memory.of(hosted)}")
    return count


def check_tables(model: DeepseekV4ForCausalLM, steps: int) -> None:
    """Check that slots and experts are inverse to each other, and that all steps were counted."""
    for name, experts in experts_of(model):
        assert experts.hosted is not None
        state = experts.hosted.state
        slot_of, expert_in = state.slot_of.tolist(), state.expert_in.tolist()
        held = {expert: slot for slot, expert in enumerate(expert_in) if expert >= 0}
        assert {e: slot for e, slot in enumerate(slot_of) if slot >= 0} == held, name
        counted, asked, loaded = state.counters.tolist()
        assert counted >= steps, name
        assert 0 <= loaded <= asked, name
        assert int(state.totals.sum()) >= asked, name


def main() -> None:
    """Run it as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--every", type=float, default=10.0)
    parser.add_argument("--flash", type=int, nargs=2, metavar=("LAYERS", "EXPERTS"))
    parser.add_argument(
        "--place", type=int, nargs=3, default=(3, 4, 0), metavar=("STATIC", "SLOTS", "STAGED")
    )
    options = parser.parse_args()
    static, slots, staged = options.place
    count = soak(
        options.seconds,
        options.device,
        options.every,
        lambda line: print(line, flush=True),
        (lambda device: flash_model(device, *options.flash)) if options.flash else small_model,
        HostExperts(static, slots, staged=staged),
    )
    print(
        f"{count} steps, {options.seconds:.0f} s: bits and tables as they should be, no memory lost"
    )


if __name__ == "__main__":
    main()
