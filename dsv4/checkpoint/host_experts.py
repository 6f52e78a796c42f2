"""The argument ``host_experts`` of ``load``: how many experts stay on the GPU, and where others go.

The sizes are computed from headers, before anything is read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dsv4.checkpoint.entries import Entry
from dsv4.checkpoint.filling import FillRequest
from dsv4.checkpoint.reader import Checkpoint
from dsv4.config import ModelConfig
from dsv4.layers import _host_memory
from dsv4.layers._expert_staging import STAGED_STEP_TOKENS
from dsv4.layers.host_experts import HostExperts, Hosting, check_counts, check_shape
from dsv4.layers.step_tokens import prompt_bytes
from dsv4.quant.formats import MXFP4, NVFP4

_logger = logging.getLogger("dsv4.checkpoint")
_GB = 1e9
# Of the GPU at least, for the CUDA context, a step's memory, graphs and a KV cache.
KEPT_GPU_BYTES = 8_000_000_000
# Of the GPU while layers are filled, for the CUDA context, kernels, and the temporaries of packing
# and drawing weights. The stacks of one layer come on top.
FILLING_GPU_BYTES = 2_000_000_000
# Of a half of the buffer for long prompts. To fill both halves should take as long as a layer
# computes without them: for 16384 tokens of Flash on an H100 17 ms (computed). At 50.8 GB/s
# (measured on an H200) it is 21 ms.
_HALF_BYTES = 1 << 29
# Share of slots among the experts on the GPU. Simulated (tests/_tools/slot_shares.py), not
# measured: the policy of ``expert_decide`` in plain Python, 600 steps of one token after 300, 6 of
# 256 experts drawn by Zipf's law with exponent 1, popular ones anywhere. Times of the loads of
# Flash's 43 layers at 50.8 GB/s, in ms a token:
#   static + slots (H100)      101 + 12   80 + 33   49 + 64
#   most used experts static       10.6      11.4      12.3
#   first experts static           21.8      16.1      14.5
# With exponent 0.7: 19.6, 20.5, 21.8 and 30.3, 25.6, 24.0. On an H200 with exponent 1, 208 + 12 and
# 156 + 64: 1.9, 2.2 and 3.6, 3.1. So known counts want few slots, and unknown ones many; 29 % lies
# between, because ``repin_`` makes the most used experts static later.
_CACHED_SHARE = 0.29
_COUNTED_SHARE = 0.1
_LEAST_TOKENS = 2  # whose experts "auto" has slots for: a token and one draft
_DRAFT = "mtp."


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of a model that decide where experts lie.

    Attributes:
        layers: Layers with routed experts, without drafts.
        experts: Experts of a layer.
        top_k: Experts that a token chooses.
        expert_bytes: Bytes of an expert in memory.
        other_bytes: Bytes of everything else that is loaded.
        prompt_bytes: Bytes of the GPU, beside weights and buffer, for a prompt of as many tokens as
            a step has by default (``dsv4.layers.step_tokens.prompt_bytes``).
    """

    layers: int
    experts: int
    top_k: int
    expert_bytes: int
    other_bytes: int
    prompt_bytes: int = 0

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: ModelConfig, request: FillRequest) -> ExpertSizes:
        """Return those of a checkpoint's model."""
        options, _ = request.resolved(checkpoint)
        routed = other = 0
        for name, entry in checkpoint.entries.items():
            nbytes = entry.nbytes
            if entry.format == MXFP4 and options.converts(entry):
                nbytes = _nvfp4_bytes(entry)
            if ".mlp.experts." not in name or name.startswith(_DRAFT):
                other += nbytes if config.draft_layers or not name.startswith(_DRAFT) else 0
                continue
            routed += nbytes
        layers, experts = config.num_hidden_layers, config.n_routed_experts
        expert = -(-routed // (layers * experts))
        # Global scales of a packed layer's gate and up rows, and those of the matrices.
        expert += 4 * (2 * config.moe_intermediate_size + 8)
        prompt = prompt_bytes(config, STAGED_STEP_TOKENS)
        return cls(layers, experts, config.num_experts_per_tok, expert, other, prompt)

    def placement(
        self,
        gpu_bytes: int,
        host_bytes: int,
        step_bytes: int = KEPT_GPU_BYTES,
        counts: torch.Tensor | None = None,
    ) -> HostExperts | None:
        """Return the placement for memory that is free; None: all experts fit on the GPU.

        The slots of experts that are not static are 29 % of those on the GPU, with counts of use
        10 %, and at least as many as two tokens choose. Where host memory is short they are fewer,
        and more experts static. The buffer for long prompts holds a half of the experts without a
        slot in each of its halves, at most 0.54 GB of them. Where memory does not suffice with room
        for a prompt in one step, there is less room, and steps of prompts are shorter.

        Args:
            gpu_bytes: Free bytes of the GPU.
            host_bytes: Free bytes of the host.
            step_bytes: Bytes of the GPU beside weights and buffer that a step needs. While a layer
                is filled its stacks take this memory, so more is kept where they are larger.
            counts: Counts of use of each expert, by which the static ones are chosen; or None.

        Raises:
            MemoryError: if GPU and host memory together do not suffice.
        """
        short = replace(self, prompt_bytes=0)
        share = _CACHED_SHARE if counts is None else _COUNTED_SHARE
        capacity = gpu_bytes - self.other_bytes - short.kept_bytes(step_bytes)
        if capacity // (self.layers * self.expert_bytes) >= self.experts:
            return None
        try:
            placement = self._placement(gpu_bytes, host_bytes, step_bytes, share)
        except MemoryError:
            placement = short._placement(gpu_bytes, host_bytes, step_bytes, share)
        return replace(placement, counts=counts)

    def _placement(
        self, gpu_bytes: int, host_bytes: int, step_bytes: int, share: float
    ) -> HostExperts:
        """Return the placement of a model that does not fit the GPU; see ``placement``."""
        capacity = gpu_bytes - self.other_bytes - self.kept_bytes(step_bytes)
        capacity -= self._most_staged_bytes(self.experts)
        most = int(capacity // (self.layers * self.expert_bytes))
        in_host = int(max(0, host_bytes) // (self.layers * self.expert_bytes))
        for slots in range(max(round(share * most), self._least(most)), 0, -1):
            static = most - slots
            if slots < min(self.top_k, self.experts - static) or static < 0:
                break
            if self.experts - static <= in_host:
                return self._staging(static, min(slots, self.experts - static))
        raise MemoryError(
            f"host_experts: a model of {self.total / _GB:.1f} GB fits neither the GPU, where "
            f"{max(0, capacity) / _GB:.1f} GB are free for routed experts ({max(0, most)} of "
            f"{self.experts} of each layer), nor the host beside it, where "
            f"{max(0, host_bytes) / _GB:.1f} GB are free for the others"
        )

    def kept_bytes(self, step_bytes: int = KEPT_GPU_BYTES) -> int:
        """Return the bytes of the GPU that weights and buffer leave free.

        They hold a prompt of 16384 tokens in one step, with its cache: 6.9 GB in Flash, of which 8
        are free, and 10.5 GB in Pro, of which the stacks of a layer leave 16 free.

        Args:
            step_bytes: Bytes that a step needs.
        """
        return max(
            step_bytes, self.prompt_bytes, FILLING_GPU_BYTES + self.experts * self.expert_bytes
        )

    def _staging(self, static: int, slots: int) -> HostExperts:
        """Return a placement with a buffer for long prompts, if any expert has no slot."""
        missing = self.experts - static - slots
        return HostExperts(static, slots, staged=self._most_staged(missing) if missing else 0)

    def _most_staged(self, missing: int) -> int:
        return max(1, min(_HALF_BYTES // self.expert_bytes, -(-missing // 2)))

    def _most_staged_bytes(self, missing: int) -> int:
        return 2 * self._most_staged(missing) * self.expert_bytes

    def buffer_bytes(self, placement: HostExperts) -> int:
        """Return the bytes of the buffer for long prompts, on the GPU."""
        return 2 * placement.staged * self.expert_bytes

    @property
    def total(self) -> int:
        """Bytes of the whole model."""
        return self.other_bytes + self.layers * self.experts * self.expert_bytes

    def host_bytes(self, placement: HostExperts) -> int:
        """Return the bytes of host memory of a placement."""
        return (self.experts - placement.static) * self.layers * self.expert_bytes

    def gpu_bytes(self, placement: HostExperts) -> int:
        """Return the bytes of all weights on the GPU."""
        slots = placement.static + placement.slots
        return self.other_bytes + slots * self.layers * self.expert_bytes

    def with_host_bytes(self, nbytes: int, gpu_bytes: int | None) -> HostExperts:
        """Return the placement with at least this many bytes of experts in host memory.

        Args:
            nbytes: Bytes.
            gpu_bytes: Free bytes of the GPU, which the slots take; None: of a CPU, where a third of
                the experts in host memory has slots.

        Raises:
            MemoryError: if the GPU cannot hold the rest.
        """
        number = min(self.experts, -(-nbytes // (self.layers * self.expert_bytes)))
        static, least = self.experts - number, min(self.top_k, number)
        if gpu_bytes is None:
            return self._staging(static, min(number, max(least, number // 3)))
        capacity = gpu_bytes - self.other_bytes - self.kept_bytes()
        if capacity < (static + number) * self.layers * self.expert_bytes:
            capacity -= self._most_staged_bytes(number)
        most = int(capacity // (self.layers * self.expert_bytes))
        if most - static < least:
            if self.prompt_bytes:  # less room, and shorter steps of prompts
                return replace(self, prompt_bytes=0).with_host_bytes(nbytes, gpu_bytes)
            raise MemoryError(
                f"host_experts is {nbytes}, which leaves {static} static experts of each layer, "
                f"wanted at most {max(0, most - least)}: {max(0, capacity) / _GB:.1f} GB are free "
                "on the GPU for routed experts"
            )
        return self._staging(static, min(number, most - static))

    def _least(self, most: int) -> int:
        return min(_LEAST_TOKENS * self.top_k, most)


def _nvfp4_bytes(entry: Entry) -> int:
    rows, columns = entry.shape
    return rows * columns // 2 + rows * columns // NVFP4.block[1] + 4


def check_argument(value: object) -> None:
    """Check the type of ``host_experts``.

    Raises:
        TypeError: if it is none of those that ``load`` takes.
        ValueError: if it is a text other than ``"auto"``, a negative number, or has negative
            counts.
    """
    if isinstance(value, torch.Tensor):
        check_counts("host_experts", value)
        return
    if value is None or isinstance(value, HostExperts) or value == "auto":
        return
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        if isinstance(value, str) or value < 0:
            raise ValueError(
                f"host_experts is {value!r}, wanted 'auto', a number of bytes, a HostExperts, "
                "counts of use or None"
            )
        return
    raise TypeError(
        f"host_experts is {value!r}, wanted 'auto', a number of bytes, a HostExperts, counts of "
        "use or None"
    )


def hosting_of(
    value: str | int | HostExperts | torch.Tensor | None,
    checkpoint: Checkpoint,
    config: ModelConfig,
    request: FillRequest,
) -> Hosting | None:
    """Return the object that moves experts to host memory during filling; None: none is moved.

    Logs the choice in one line.

    Raises:
        MemoryError: if memory does not suffice.
        ValueError: if a placement or counts do not fit the model.
    """
    counts = value if isinstance(value, torch.Tensor) else None
    if counts is not None:
        check_shape("host_experts", counts, config.num_hidden_layers, config.n_routed_experts)
    value = "auto" if isinstance(value, torch.Tensor) else value
    if value is None or value == 0:
        return None
    device = torch.device("cpu" if request.device is None else request.device)
    on_gpu = device.type == "cuda"
    sizes = ExpertSizes.of(checkpoint, config, request)
    placement: HostExperts | None
    if isinstance(value, HostExperts):
        placement = value
    elif value == "auto":
        if not on_gpu:
            _logger.info("host_experts: the model is on the CPU, its experts are there already")
            return None
        host = _host_memory.available_bytes() - _host_memory.KEPT_BYTES
        placement = sizes.placement(_free(device), host, counts=counts)
    else:
        assert isinstance(value, int)
        placement = sizes.with_host_bytes(value, _free(device) if on_gpu else None)
    if placement is not None:
        placement.check(sizes.experts, sizes.layers, sizes.top_k)
    if placement is None or placement.static == sizes.experts:
        _logger.info("host_experts: all experts fit on the GPU, none is in host memory")
        return None
    _host_memory.check_available(sizes.host_bytes(placement))
    _logger.info("host_experts: %s", describe(sizes, placement, checkpoint.path))
    return Hosting(placement, sizes.layers)


def describe(sizes: ExpertSizes, placement: HostExperts, path: Path | None = None) -> str:
    """Return a placement in one line."""
    what = "" if path is None else f"{path}: "
    buffer = sizes.buffer_bytes(placement)
    staged = f" and {buffer / _GB:.1f} GB for experts of long prompts" if buffer else ""
    return (
        f"{what}of {sizes.experts} experts of each layer {placement.static} are static and "
        f"{placement.slots} slots are for the others; {sizes.gpu_bytes(placement) / _GB:.1f} GB of "
        f"weights{staged} on the GPU, {sizes.host_bytes(placement) / _GB:.1f} GB in host memory"
    )


def _free(device: torch.device) -> int:
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])
