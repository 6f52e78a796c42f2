"""Decode with experts in host memory for a long time; check bits, tables and memory.

    python -m tests._tools.host_soak SECONDS [--device cpu] [--every SECONDS]

One copy of a small model has all experts on the device, the other has some in host memory. Both
replay the captured decode step of one sequence (on a CPU they call it), with other tokens and so
other experts each time. At intervals the program compares logits bit by bit, checks the tables of
slots, exchanges static experts and reads the memory in use; growth is an error. Nightly, 30 min:
``HYPOTHESIS_PROFILE=nightly pytest tests/layers/test_host_experts_gpu.py -k soak``.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import dsv4
from dsv4 import layers
from dsv4.bench.suites.whole_model import DecodeStep
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.layers import HostExperts
from dsv4.layers.host_experts import experts_of
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import randomize_

_FIRST_CHECKS = 3  # checks after which memory must not grow
_DRIFT = 32 << 20  # bytes of the process that may come and go


@dataclass(frozen=True)
class Memory:
    """Bytes in use.

    Attributes:
        allocated: By PyTorch's tensors on the GPU.
        used: Of the GPU, by everybody.
        resident: Of the process in host memory.
    """

    allocated: int
    used: int
    resident: int

    @classmethod
    def of(cls, device: torch.device) -> Memory:
        """Return what is in use now."""
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        resident = pages * 4096
        if device.type != "cuda":
            return cls(0, 0, resident)
        free, total = torch.cuda.mem_get_info(device)
        return cls(torch.cuda.memory_allocated(device), total - free, resident)

    def __str__(self) -> str:
        sizes = (self.allocated, self.used, self.resident)
        allocated, used, resident = (f"{nbytes / 1e6:.1f}" for nbytes in sizes)
        return f"{allocated} MB allocated, {used} MB of the GPU, {resident} MB of the host"


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


@torch.inference_mode()
def soak(
    seconds: float, device: str, every: float = 10.0, say: Callable[[str], object] = print
) -> int:
    """Decode for some seconds; return the number of steps.

    Args:
        seconds: How long.
        device: Where.
        every: Seconds from one check to the next.
        say: Takes a line for each check.

    Raises:
        AssertionError: if bits differ, tables contradict each other, or memory grows.
    """
    target = torch.device(device)
    resident = small_model(target)
    hosted = copy.deepcopy(resident)
    layers.host_experts_(hosted, HostExperts(3, 4))
    if target.type == "cuda":
        dsv4.warmup(hosted, max_tokens=64, progress=False)
    steps = [DecodeStep(model, 1, 64) for model in (resident, hosted)]
    runs = [step.captured().replay if target.type == "cuda" else step for step in steps]
    generator = torch.Generator().manual_seed(1)
    count, checks, noted = 0, 0, Memory.of(target)
    start = checked = time.perf_counter()
    while (now := time.perf_counter()) - start < seconds:
        token = torch.randint(2, resident.config.vocab_size, (1,), generator=generator)
        steps[1].tokens.copy_(token)
        logits = runs[1]()
        count += 1
        if now - checked < every and count > 1:
            continue
        steps[0].tokens.copy_(token)
        expected = runs[0]()
        pair = (logits, expected) if target.type != "cuda" else (steps[1].logits, steps[0].logits)
        assert_bitwise(pair[0], pair[1], f"step {count}")
        check_tables(hosted, count)
        if checks % 3 == 2:
            layers.repin_(hosted)
        checks, checked, memory = checks + 1, time.perf_counter(), Memory.of(target)
        use = layers.cache_use(hosted)
        say(f"{now - start:7.1f} s, {count} steps, hits {100 * use.hit_rate:.1f} %: {memory}")
        if checks <= _FIRST_CHECKS:
            noted = memory
            continue
        assert memory.allocated == noted.allocated, f"PyTorch's tensors grew: {noted} to {memory}"
        for name in ("used", "resident"):
            grown = getattr(memory, name) - getattr(noted, name)
            assert grown <= _DRIFT, f"{name} memory grew by {grown} bytes: {noted} to {memory}"
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
    options = parser.parse_args()
    count = soak(options.seconds, options.device, options.every)
    print(
        f"{count} steps, {options.seconds:.0f} s: bits and tables as they should be, no memory lost"
    )


if __name__ == "__main__":
    main()
