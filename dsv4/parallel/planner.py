"""Whether a model fits on GPUs, what is left for sequences, and how long a token takes: computed.

The split of weights is that of ``parallel="tp"`` (attention by heads, experts by ranges, vocabulary
by rows) and ``parallel="dp"`` (whole attention on every rank, experts by ranges). Memory follows
from shapes, times from a model with three measured constants of one H100 and from published
latencies of sums over ranks. A later run measured two H200 (Flash, NVFP4, 4096 tokens): a captured
step took 4.09 to 4.16 ms (computed: 4.01), and 4.30 ms in a runner, which also chooses tokens. A
test compares computed with measured steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dsv4.config import ModelConfig
from dsv4.config.layer_types import CSA, SLIDING
from dsv4.kv_cache.pages import bytes_per_page
from dsv4.parallel.split import check_matrices
from dsv4.quant.formats import FP8_BLOCK, NVFP4, Format

if TYPE_CHECKING:
    from dsv4.checkpoint import Checkpoint

MODES = ("tp", "dp")
RECIPES = ("nvidia", "nvfp4")
CONTEXT = 131072  # tokens of the sequences that are counted
# Bytes of a GPU that hold no weight and no KV cache: CUDA context, workspaces, graphs, mailboxes.
_OTHER = 6.0e9
# Microseconds of a layer that do not shrink with its bytes: of Flash's 5.24 ms a captured step on
# one H100, 2026-11-24, 9.07 GB took 2.93 at 3.1 TB/s, and the rest is of 43 layers.
_LAYER_US = (5.24e3 - 9.07e9 / 3.1e12 * 1e6) / 43
# Microseconds of one sum of up to 14 KB over ranks in a graph, with the wait for the slowest rank,
# by number of ranks, from figures of SGLang and vLLM (sglang#2904, vllm#24111). The sum alone takes
# 3.4 to 3.5 on two H200 (measured).
_ALL_REDUCE_US = {1: 0.0, 2: 5.0, 4: 5.0, 8: 7.0}
_SUMS_OF_LAYER = 2
# Rows of compressor state and entries of a window that speculative decoding needs.
_STATE_ROWS = {4: 16, 128: 136}
_WINDOW_ENTRIES = 192
_PAGE = 64  # entries of a page


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        memory: Bytes that a program can have.
        rate: Bytes per second that it reads.
    """

    memory: float
    rate: float


# H100 and H200: measured memory and read rates, 2026-11. B200 and B300: data sheets, and nine
# tenths of their rates, which is what the other two reach.
GPUS: Mapping[str, Gpu] = {
    "H100": Gpu(83.7e9, 3.1e12),
    "H200": Gpu(149.2e9, 4.38e12),
    "B200": Gpu(180e9, 7.2e12),
    "B300": Gpu(288e9, 7.2e12),
}
_PACKING = ("H100", "H200")  # ``load`` packs NVFP4 weights there


@dataclass(frozen=True)
class Machine:
    """Some GPUs of one kind, one for each rank."""

    ranks: int
    name: str

    @property
    def gpu(self) -> Gpu:
        """The kind."""
        return GPUS[self.name]

    @classmethod
    def parse(cls, text: str) -> Machine:
        """Read ``"4xH100"`` or ``"H100"``.

        Raises:
            ValueError: if it is something else.
        """
        match = re.fullmatch(r"(?:([1-9]\d{0,3})x)?(\w+)", text)
        if match is None or match[2].upper() not in GPUS:
            raise ValueError(
                f"{text!r} is no machine, wanted a number and one of {', '.join(GPUS)}, "
                "as in 4xH100"
            )
        return cls(int(match[1] or 1), match[2].upper())


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a checkpoint, or of one that a recipe would make."""

    name: str
    nbytes: float
    shape: tuple[int, ...]
    format: Format | None = None


@dataclass(frozen=True)
class Weights:
    """Bytes of a model's weights by how they are split; without multi-token prediction.

    Attributes:
        routed: Routed experts of all layers.
        split: Weights of attention that tensor parallelism splits, and of shared experts.
        replicated: Weights that every rank holds.
        embedding: Input embedding.
        head: Output head.
        expert: One routed expert.
        matrices: Names, shapes and formats of the quantised matrices that ranks may split.
    """

    routed: float
    split: float
    replicated: float
    embedding: float
    head: float
    expert: float
    matrices: tuple[tuple[str, tuple[int, ...], Format], ...] = ()

    @classmethod
    def of_config(cls, config: ModelConfig, recipe: str = "nvidia") -> Weights:
        """Return the bytes of a published recipe.

        Args:
            config: The model.
            recipe: ``"nvidia"``: NVFP4 routed experts, FP8 linear layers, the rest bfloat16.
                ``"nvfp4"``: NVFP4 linear layers, too.

        Raises:
            ValueError: if there is no such recipe.
        """
        if recipe not in RECIPES:
            raise ValueError(f"recipe is {recipe!r}, wanted one of {', '.join(RECIPES)}")
        return cls._of(config, _tensors_by_recipe(config, recipe))

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint) -> Weights:
        """Return the bytes of a checkpoint's tensors."""
        entries = checkpoint.entries.values()
        return cls._of(
            checkpoint.config(),
            (_Tensor(e.name, float(e.nbytes), tuple(e.shape), e.format) for e in entries),
        )

    @classmethod
    def _of(cls, config: ModelConfig, tensors: Iterable[_Tensor]) -> Weights:
        totals = dict.fromkeys(("routed", "split", "replicated", "embedding", "head"), 0.0)
        matrices = []
        for tensor in tensors:
            kind = kind_of(tensor.name)
            if kind is not None:
                totals[kind] += tensor.nbytes
            if kind not in (None, "routed", "replicated") and tensor.format is not None:
                matrices.append((tensor.name, tensor.shape, tensor.format))
        if not totals["head"]:  # tied to the embedding
            totals["head"] = totals["embedding"]
        experts = config.num_hidden_layers * config.n_routed_experts
        return cls(**totals, expert=totals["routed"] / experts, matrices=tuple(matrices))

    def of_rank(self, ranks: int, mode: str) -> float:
        """Return the bytes of one rank."""
        divided = self.split + self.embedding + self.head
        if mode == "dp":
            return self.routed / ranks + divided + self.replicated
        return (self.routed + divided) / ranks + self.replicated


# How a rank gets a tensor, by its name; the first that matches. None: not loaded.
_KINDS: tuple[tuple[str, str | None], ...] = (
    (r"mtp\.", None),
    (r".*\.mlp\.experts\.", "routed"),
    (r".*\.shared_experts\.", "split"),
    (r".*\.self_attn\.(q_b_proj|o_a_proj|o_b_proj|sinks)\b", "split"),
    (r".*embed_tokens\.", "embedding"),
    (r"lm_head\.", "head"),
    (r"", "replicated"),
)
# Linear layers that recipes quantise.
_LINEAR = (
    r"self_attn\.(q_a_proj|q_b_proj|kv_proj|o_a_proj|o_b_proj)\.|\.indexer\.q_b_proj\.|"
    r"\.shared_experts\."
)
_FLOAT32 = r"_hc\.|hc_head\.|sinks$|position_bias$|e_score_correction_bias$"


def kind_of(name: str) -> str | None:
    """Return a field of ``Weights`` for a tensor, or None if it is not loaded."""
    return next(kind for pattern, kind in _KINDS if re.match(pattern, name))


def _tensors_by_recipe(config: ModelConfig, recipe: str) -> Iterator[_Tensor]:
    from dsv4.model import DeepseekV4ForCausalLM

    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config, mtp=False)
    linear = FP8_BLOCK if recipe == "nvidia" else NVFP4
    for name, tensor in model.state_dict().items():
        count, shape = tensor.numel(), tuple(tensor.shape)
        if ".mlp.experts." in name:
            yield _Tensor(name, count * _bytes_of_element(NVFP4), shape, NVFP4)
        elif re.search(_LINEAR, name) and name.endswith("weight"):
            yield _Tensor(name, count * _bytes_of_element(linear), shape, linear)
        elif tensor.is_floating_point():
            yield _Tensor(name, float(count * (4 if re.search(_FLOAT32, name) else 2)), shape)
        else:
            yield _Tensor(name, float(tensor.nbytes), shape)


def _bytes_of_element(format: Format) -> float:
    shape = (128, 128)
    codes, scales = format.codes_shape(shape), format.scales_shape(shape)
    scale = 4 if format == FP8_BLOCK else 1
    return (math.prod(codes) + scale * math.prod(scales)) / math.prod(shape)


def sequence_bytes(config: ModelConfig, tokens: int = CONTEXT) -> float:
    """Return the bytes of one sequence's cache: fp8 entries, MXFP4 index keys, float32 state."""
    dims, rope = config.head_dim, config.qk_rope_head_dim
    entry = bytes_per_page("fp8", dims, rope, _PAGE) / _PAGE
    key = bytes_per_page("index_mxfp4", config.index_head_dim, rope, _PAGE) / _PAGE
    total = 0.0
    for layer, layer_type in enumerate(config.layer_types):
        total += _WINDOW_ENTRIES * entry
        if layer_type == SLIDING:
            continue
        ratio = config.compress_rate(layer)
        total += tokens / ratio * entry
        overlap = 2 if layer_type == CSA else 1
        rows = _STATE_ROWS.get(ratio, 2 * ratio)
        total += rows * 2 * overlap * dims * 4
        if layer_type == CSA:
            total += tokens / ratio * key + rows * 2 * overlap * config.index_head_dim * 4
    return total


def largest_share(config: ModelConfig, ranks: int) -> float:
    """Return how many of a token's experts are expected on the rank that has most of them.

    Routing is taken as uniform: all sets of experts of a token are equally likely.
    """
    chosen, own = config.num_experts_per_tok, config.n_routed_experts // ranks
    total = math.comb(config.n_routed_experts, chosen)
    expected = 0.0
    for most in range(chosen):
        counts = [1] + [0] * chosen  # ways to choose n experts, at most ``most`` on each rank
        for _ in range(ranks):
            counts = [
                sum(counts[n - k] * math.comb(own, k) for k in range(min(n, most) + 1))
                for n in range(chosen + 1)
            ]
        expected += 1 - counts[chosen] / total
    return expected


@dataclass(frozen=True)
class Plan:
    """A model on some GPUs; all figures are computed.

    Attributes:
        machine: The GPUs.
        mode: ``"tp"`` or ``"dp"``.
        refused: Why the model cannot be split so, or None.
        weights: Bytes of one rank's weights.
        left: Bytes of one rank that are left for sequences; negative: what is missing.
        sequences: Sequences of ``CONTEXT`` tokens that all ranks together have memory for.
        token_ms: Milliseconds per token of one sequence, or None where the model has no figure.
    """

    machine: Machine
    mode: str
    refused: str | None = None
    weights: float = 0.0
    left: float = 0.0
    sequences: int = 0
    token_ms: float | None = None

    @property
    def fits(self) -> bool:
        """Whether weights leave any memory."""
        return self.refused is None and self.left > 0

    def __str__(self) -> str:
        if self.refused is not None:
            return f"{self.mode}: not possible, {self.refused}"
        weights = f"{self.weights / 1e9:.1f} GB of weights per rank"
        if not self.fits:
            return f"{self.mode}: does not fit, {weights}, {-self.left / 1e9:.1f} GB too few"
        parts = [
            f"{self.mode}: fits, {weights}, {self.left / 1e9:.1f} GB left",
            f"{self.sequences} sequences of {CONTEXT} tokens",
        ]
        if self.token_ms is not None:
            parts.append(f"{self.token_ms:.2f} ms per token of one sequence")
        return ", ".join(parts)


def plan(config: ModelConfig, weights: Weights, machine: Machine, mode: str) -> Plan:
    """Compute how a model lies on GPUs.

    Raises:
        ValueError: if there is no such mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, wanted one of {', '.join(MODES)}")
    refused = None
    if machine.ranks > 1:  # one rank cuts nothing
        refused = _indivisible(config, machine.ranks, mode) or _cut(weights, machine, mode)
    if refused is not None:
        return Plan(machine, mode, refused)
    of_rank = weights.of_rank(machine.ranks, mode)
    left = machine.gpu.memory - _OTHER - of_rank
    sequences = max(0, int(left / sequence_bytes(config)))
    if mode == "dp":
        sequences *= machine.ranks
    ms = token_ms(config, weights, machine) if mode == "tp" else None
    return Plan(machine, mode, None, of_rank, left, sequences, ms)


def _indivisible(config: ModelConfig, ranks: int, mode: str) -> str | None:
    """Return what this number of ranks does not divide, or None."""
    split = {"experts": config.n_routed_experts}
    if mode == "tp":
        split |= {
            "o_groups": config.o_groups,
            "columns of the shared expert": config.moe_intermediate_size,
            "rows of the vocabulary": config.vocab_size,
        }
    wrong = [f"{count} {name}" for name, count in split.items() if count % ranks]
    return f"{ranks} ranks do not divide {' and '.join(wrong)}" if wrong else None


def _cut(weights: Weights, machine: Machine, mode: str) -> str | None:
    """Return which block or tile of a matrix the ranks would cut, or None."""
    packs = machine.name in _PACKING
    try:
        check_matrices(weights.matrices, machine.ranks, tiles=packs, mode=mode)
    except ValueError as error:
        return str(error).removeprefix("parallel: ")
    return None


@dataclass(frozen=True)
class StepParts:
    """Milliseconds of a decode step of one sequence, by the model of ``token_ms``.

    Attributes:
        latency: Time that does not depend on bytes.
        bytes: Time to read the bytes from memory.
        sums: Sums over ranks.
    """

    latency: float
    bytes: float
    sums: float

    @property
    def total(self) -> float:
        """Milliseconds of the whole step."""
        return self.latency + self.bytes + self.sums

    @classmethod
    def of(cls, layers: int, ranks: int, bytes_ms: float) -> StepParts | None:
        """Return the parts for a number of layers; None where sums have no figure."""
        if ranks not in _ALL_REDUCE_US:
            return None
        sums = _SUMS_OF_LAYER * layers * _ALL_REDUCE_US[ranks]
        return cls(layers * _LAYER_US / 1e3, bytes_ms, sums / 1e3)


def token_ms(config: ModelConfig, weights: Weights, machine: Machine) -> float | None:
    """Return the milliseconds of a decode step of one sequence with ``parallel="tp"``.

    ``layers * latency + bytes / rate + sums * latency of a sum``; None for a number of ranks whose
    sums have no figure. The latency of a layer is one H100's, taken for every GPU.
    """
    layers, ranks = config.num_hidden_layers, machine.ranks
    experts = layers * largest_share(config, ranks) * weights.expert
    read = weights.replicated + (weights.split + weights.head) / ranks + experts
    parts = StepParts.of(layers, ranks, read / machine.gpu.rate * 1e3)
    return None if parts is None else parts.total


def lines(config: ModelConfig, weights: Weights, machine: Machine) -> Iterator[str]:
    """Describe both modes, a line each."""
    memory, other = machine.gpu.memory / 1e9, _OTHER / 1e9
    yield (
        f"{machine.ranks} x {machine.name} ({memory:.1f} GB each, {other:.0f} GB of it for "
        "workspaces and graphs); computed, not measured:"
    )
    for mode in MODES if machine.ranks > 1 else MODES[:1]:
        yield f"  {plan(config, weights, machine, mode)}"
