"""Layers, tokens with their routing, and the parts of a forward, for ``dsv4.bench.suites.moe``.

A part takes a ``Layer`` and ``Inputs`` and runs the operators that a layer runs. Tests put others
in their place, so callers ask this module for them. With FP8 activations the GEMMs take codes: the
sort rounds the rows, and the first GEMM its result.

Routings, each token choosing ``k`` distinct experts:

* ``uniform``: every set of k with the same probability.
* ``zipf``: experts in random order, the i-th with weight 1 / i; a token draws k times without
  putting back, each time in proportion to the weights of what is left.
* ``single``: every token's first choice is the same random expert, the other k - 1 are uniform
  among the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsv4 import ops
from dsv4.bench.cases import PRESETS
from dsv4.bench.cases.own import Shape
from dsv4.bench.cases.own import config_of as own_config
from dsv4.bench.measure import Options
from dsv4.bench.problem import Draw, UsageError
from dsv4.config import ModelConfig
from dsv4.ops.fp8_token import code_layout
from dsv4.quant import fragments
from dsv4.quant.exact_fp8 import with_row_exponent
from dsv4.quant.formats import FP8_TOKEN, FRAGMENTS, NVFP4, QuantizedTensor

BF16, FP8 = "bf16", "fp8"
ACTIVATIONS = (BF16, FP8)
PARTS = ("gate_up", "down", "pair", "sort", "combine", "around", "block")
_MOST_CALLS, _INPUT_BYTES = 8, 4 << 30  # of a graph
# Bytes of E4M3's 2^-4 to 2^1, whose exponents fragments store with 3 added.
_SCALE_BYTES = (0x18 + (3 << 3), 0x40 + (3 << 3))


@dataclass(frozen=True)
class Layer:
    """The routed experts of a layer.

    Attributes:
        preset: Name of ``config``.
        config: Sizes.
        gate_up: ``[E, 2 I, H]`` in fragments, gate and up rows interleaved, a global scale per row.
        down: ``[E, H, I]`` in fragments, a global scale per expert.
        activation: One of ``ACTIVATIONS``; weights for ``"fp8"`` are exact in FP8.
    """

    preset: str
    config: ModelConfig
    gate_up: QuantizedTensor
    down: QuantizedTensor
    activation: str = BF16

    @property
    def rows_layout(self) -> str | None:
        """Layout of the first GEMM's FP8 rows; None where rows are bfloat16."""
        return code_layout(self.gate_up) if self.activation == FP8 else None

    def in_bfloat16(self) -> Layer:
        """Return the same weights for bfloat16 activations."""
        return dataclasses.replace(self, activation=BF16)


@dataclass(frozen=True)
class Inputs:
    """Tokens and their routing.

    Attributes:
        x: ``[T, H]``.
        shared: ``[T, H]``, the shared expert's output.
        ids: ``[T, k]`` int64.
        weights: float32 ``[T, k]``.
        positions: int32 ``[T, k]``, the sorted row of each choice.
        offsets: int32 ``[E + 1]``.
        rows: ``[T k, H]``, sorted by expert.
        row_weight: float32 ``[T k]``.
        codes: ``rows`` in ``"fp8_token"``; None for bfloat16 activations.
    """

    x: torch.Tensor
    shared: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor
    row_weight: torch.Tensor
    codes: QuantizedTensor | None = None

    @property
    def touched(self) -> int:
        """Experts that have a row."""
        return int((self.offsets.diff() > 0).sum())


def uniform(draw: Draw, tokens: int, k: int, experts: int) -> torch.Tensor:
    """``[tokens, k]`` int64; see the module."""
    return draw.distinct(tokens, k, experts)


def zipf(draw: Draw, tokens: int, k: int, experts: int) -> torch.Tensor:
    """``[tokens, k]`` int64; see the module. The k largest of log weights with Gumbel noise."""
    rank = draw.permutation(experts) + 1
    noise = torch.rand((tokens, experts), generator=draw.generator, device=draw.device)
    return (-rank.log() - (-noise.log()).log()).topk(k).indices


def single(draw: Draw, tokens: int, k: int, experts: int) -> torch.Tensor:
    """``[tokens, k]`` int64; see the module."""
    first = draw.integers(0, experts, (1, 1)).expand(tokens, 1)
    others = draw.distinct(tokens, k - 1, experts - 1)
    return torch.cat((first, others + (others >= first)), 1)


Operand = torch.Tensor | QuantizedTensor
Sorted = tuple[Operand, torch.Tensor, torch.Tensor, torch.Tensor]
ROUTINGS: dict[str, Callable[[Draw, int, int, int], torch.Tensor]] = {
    "uniform": uniform,
    "zipf": zipf,
    "single": single,
}


_OWN = {
    "E": "n_routed_experts",
    "H": "hidden_size",
    "I": "moe_intermediate_size",
    "k": "num_experts_per_tok",
}


def config_of(preset: str | Shape) -> ModelConfig:
    """Sizes by name or a user's; the tiny ones widened to what kernels for packed weights take.

    Raises:
        UsageError: if the name is unknown, or sizes are impossible.
    """
    if isinstance(preset, Shape):
        preset.check("moe", (_OWN,))
        own = own_config(preset, _OWN)
        inner, hidden = own.moe_intermediate_size, own.hidden_size
        if not (fragments.fits(2 * inner, hidden) and fragments.fits(hidden, inner)):
            tile = f"{fragments.ROWS} x {fragments.COLUMNS}"
            said = f"wanted H and I that make whole tiles of {tile}"
            raise UsageError(f"--shape is {preset.text!r}, {said}")
        return own
    if preset not in PRESETS:
        raise UsageError(f"shapes are {preset!r}, wanted one of {', '.join(PRESETS)}")
    config = PRESETS[preset]()
    if preset == "tiny":
        return config.replace(hidden_size=128, moe_intermediate_size=128)
    return config


def draw_layer(preset: str | Shape, draw: Draw, activation: str = BF16) -> Layer:
    """Random weights; codes are drawn as they are stored, so they alone take memory.

    For FP8 activations they are such as a cast from MXFP4 makes, which are exact in FP8.
    """
    c = config_of(preset)
    experts, inner, hidden = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
    is_cast = activation == FP8
    gate_up = _packed(draw, (experts, 2 * inner, hidden), 2 * inner, is_cast)
    down = _packed(draw, (experts, hidden, inner), 1, is_cast)
    name = preset if isinstance(preset, str) else f"own({preset.text})"
    return Layer(name, c, gate_up, down, activation)


def _packed(
    draw: Draw, shape: tuple[int, int, int], global_scales: int, is_cast: bool
) -> QuantizedTensor:
    experts, rows, columns = shape
    assert fragments.fits(rows, columns)
    codes = draw.integers(0, 256, (experts, rows, columns // 2), torch.uint8)
    scales = draw.integers(*_SCALE_BYTES, (experts, rows, columns // 16), torch.uint8)
    if is_cast:
        scales = _powers(scales)
    spread = torch.rand((experts, global_scales), generator=draw.generator, device=draw.device)
    global_scale = (0.5 + spread) * columns**-0.5
    weight = QuantizedTensor(codes, scales, global_scale, NVFP4, FRAGMENTS)
    return with_row_exponent(weight)[0] if is_cast else weight


def _powers(scales: torch.Tensor) -> torch.Tensor:
    """Powers of two, each for 32 columns of a row, from block scales in fragments."""
    # A tile's bytes are [8 groups of rows, 2 pairs of blocks, 2 blocks of a pair, 2 rows].
    tiles = (scales & 0x78).view(-1, 8, 2, 2, 2)
    return tiles[..., :1, :].expand(tiles.shape).reshape(scales.shape)


def draw_inputs(
    c: ModelConfig, routing: str, tokens: int, draw: Draw, layout: str | None = None
) -> Inputs:
    """Tokens with one of ``ROUTINGS``; ``layout``: see ``Layer.rows_layout``."""
    k, experts = c.num_experts_per_tok, c.n_routed_experts
    ids = ROUTINGS[routing](draw, tokens, k, experts)
    weights = draw.normal(tokens, k, dtype=torch.float32).softmax(-1) * c.routed_scaling_factor
    x, shared = (draw.normal(tokens, c.hidden_size) for _ in range(2))
    return sorted_by(c, x, shared, ids, weights, layout)


def sorted_by(
    c: ModelConfig,
    x: torch.Tensor,
    shared: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    layout: str | None = None,
) -> Inputs:
    """Sorted by the reference, from tokens, the shared expert's output, choices and weights."""
    order, offsets, positions = ops.moe_permute(ids, c.n_routed_experts, backend="reference")
    rows = ops.moe_gather(x, positions, backend="reference")
    row_weight = weights.reshape(-1)[order.long()]
    codes = None
    if layout is not None:
        codes = ops.quantize(rows, FP8_TOKEN, layout=layout, backend="reference")
    return Inputs(x, shared, ids, weights, positions, offsets, rows, row_weight, codes)


def all_inputs(layer: Layer, routing: str, tokens: int, options: Options) -> list[Inputs]:
    """Draw the inputs of a graph's calls."""
    requested = draws(layer.config, tokens, options)
    drawn = (layer.config, routing, tokens)
    return [draw_inputs(*drawn, draw, layer.rows_layout) for draw in requested]


def draws(c: ModelConfig, tokens: int, options: Options) -> list[Draw]:
    """One for each of a graph's calls, as many as memory allows; on the CPU one."""
    width = c.num_experts_per_tok * (c.hidden_size + c.moe_intermediate_size) + 2 * c.hidden_size
    count = max(2, min(_MOST_CALLS, _INPUT_BYTES // (2 * width * tokens)))
    count = count if options.device.type == "cuda" else 1
    return [Draw(options.seed + 1 + i, options.device) for i in range(count)]


def gate_up(layer: Layer, inputs: Inputs) -> Operand:
    """The first GEMM and its SwiGLU, ``[T k, I]``; codes for FP8 activations."""
    limit, row_weight = layer.config.swiglu_limit, inputs.row_weight
    if layer.activation == FP8:
        assert inputs.codes is not None
        return ops.grouped_gemm_swiglu_fp8(
            *(inputs.codes, layer.gate_up, inputs.offsets, limit),
            row_weight=row_weight,
            result_layout=code_layout(layer.down),
        )
    operands = (inputs.rows, layer.gate_up, inputs.offsets, limit)
    return ops.grouped_gemm_swiglu(*operands, row_weight=row_weight)


def down(layer: Layer, inputs: Inputs, inner: Operand) -> torch.Tensor:
    """The second GEMM, ``[T k, H]``."""
    return ops.grouped_gemm(inner, layer.down, inputs.offsets, settled=True)


def pair(layer: Layer, inputs: Inputs) -> torch.Tensor:
    """Both GEMMs, ``[T k, H]``."""
    return down(layer, inputs, gate_up(layer, inputs))


def sort(layer: Layer, inputs: Inputs) -> Sorted:
    """Rows in the order of their experts, what they weigh, offsets, positions."""
    experts = layer.config.n_routed_experts
    if layer.rows_layout is not None:
        _, offsets, positions = ops.moe_permute(inputs.ids, experts)
        gathered = ops.moe_gather_fp8(
            inputs.x, positions, inputs.weights, result_layout=layer.rows_layout
        )
        return (*gathered, offsets, positions)
    return ops.moe_sort(inputs.x, inputs.ids, inputs.weights, experts)


def combine(layer: Layer, inputs: Inputs) -> torch.Tensor:
    """The sum of each token's rows and the shared expert's output, ``[T, H]``."""
    return ops.moe_combine(
        inputs.rows, inputs.positions, inputs.offsets, None, shared=inputs.shared
    )


def around(layer: Layer, inputs: Inputs) -> torch.Tensor:
    """The block with the gathered rows as the GEMMs' results, ``[T, H]``.

    FP8 rows are gathered as well, but the sum is that of bfloat16 rows.
    """
    return combine(layer, _own(layer, inputs))


def block(layer: Layer, inputs: Inputs) -> torch.Tensor:
    """Run what the layer runs, from the router's choice to the output, ``[T, H]``."""
    own = _own(layer, inputs)
    return combine(layer, dataclasses.replace(own, rows=pair(layer, own)))


def _own(layer: Layer, inputs: Inputs) -> Inputs:
    """Return the inputs sorted by this package."""
    rows, row_weight, offsets, positions = sort(layer, inputs)
    own = dataclasses.replace(inputs, row_weight=row_weight, offsets=offsets, positions=positions)
    if isinstance(rows, QuantizedTensor):
        return dataclasses.replace(own, codes=rows)
    return dataclasses.replace(own, rows=rows)


def costs(layer: Layer, tokens: int, touched: float) -> dict[str, tuple[int, int]]:
    """Bytes that each of ``PARTS`` has to move, and operations of its GEMMs.

    Weights of the experts that have rows, once; inputs and results of each operator. Of the block:
    weights, tokens and the result, nothing between them.
    """
    c = layer.config
    rows, inner, hidden = tokens * c.num_experts_per_tok, c.moe_intermediate_size, c.hidden_size
    experts = c.n_routed_experts
    weights = [round(touched * w.nbytes / experts) for w in (layer.gate_up, layer.down)]
    flops = [4 * rows * inner * hidden, 2 * rows * inner * hidden]
    taken = [_operand_bytes(layer, rows, columns) for columns in (hidden, inner)]
    moved = [weights[0] + sum(taken), weights[1] + taken[1] + 2 * rows * hidden]
    steps = {
        # Rows, what they weigh, and of each choice its expert and its position.
        "sort": 2 * tokens * hidden + taken[0] + 20 * rows + 4 * (experts + 1),
        "combine": 2 * (rows + 2 * tokens) * hidden + 4 * rows + 4 * (experts + 1),
    }
    return {
        "gate_up": (moved[0], flops[0]),
        "down": (moved[1], flops[1]),
        "pair": (sum(moved), sum(flops)),
        **{part: (moved_bytes, 0) for part, moved_bytes in steps.items()},
        "around": (sum(steps.values()), 0),
        "block": (sum(weights) + 6 * tokens * hidden + 12 * rows, sum(flops)),
    }


def _operand_bytes(layer: Layer, rows: int, columns: int) -> int:
    """Bytes of a GEMM's rows: bfloat16, or FP8 codes with a scale for 128 columns."""
    if layer.activation == BF16:
        return 2 * rows * columns
    return rows * (columns + -(-columns // FP8_TOKEN.block[1]))
