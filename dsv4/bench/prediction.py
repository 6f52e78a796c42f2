"""Predicted time of a GEMM with NVFP4 weights: a model of few numbers, for two GPUs.

    python -m dsv4.bench.prediction

A GEMM is tiles of rows and tokens, whose K may be shared by the CTAs of a cluster. A CTA is bound
by its tensor cores, by dequantizing FP4 weights (where they are not multiplied as such) or by the
L2's bandwidth; all of them by memory, which is read once. Waves of tiles are whole. Five numbers
are fitted to times on an H200 (``loss``): the time of a launch and its first bytes, for small M and
for large M, the cycles of a tile outside its steps, those of a shared K, and the rate of the L2.
The rest are a machine's rates, measured or nominal.

The rates of ``B200`` are assumptions. No time there has been measured by this package.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dsv4.bench.cases import PRESETS
from dsv4.bench.cases.gemm import matrices
from dsv4.cute.sm90.gemm_small_m_plan import SmallMPlan
from dsv4.cute.sm90.plans import GemmProblem, choose

TOKENS = (1, 16, 64, 256, 1024, 4096)
RESULTS = Path(__file__).resolve().parents[2] / "results" / "nvidia-h200"


@dataclass(frozen=True)
class Machine:
    """A GPU's rates.

    Attributes:
        name: Name of the GPU.
        processors: SMs.
        ghz: Clock under load.
        read_tbs: Terabytes per second read from memory.
        tflops: TFLOP/s of the tensor cores, by element: ``"bf16"`` and, where there is one,
            ``"nvfp4"``.
        launch_us: A launch in a graph and the first bytes of memory.
        small_m_launch_us: The same of the kernel for small M, whose weights need no barriers.
        tile_cycles: Cycles of a tile, outside its steps: filling the pipeline, storing the
            results.
        shared_cycles: More of a tile whose K is shared by blocks.
        expanded: FP4 weights that an SM dequantizes to bfloat16 in a cycle, counted in SASS.
        l2_bytes: Bytes that the L2 gives an SM in a cycle.
    """

    name: str
    processors: int
    ghz: float
    read_tbs: float
    tflops: dict[str, float]
    launch_us: float
    small_m_launch_us: float
    tile_cycles: float
    shared_cycles: float
    expanded: float
    l2_bytes: float

    def flops_a_cycle(self, element: str) -> float:
        """Operations of one SM in a cycle."""
        return 1e3 * self.tflops[element] / (self.processors * self.ghz)


class Tile(NamedTuple):
    """The tiling of a GEMM by a kernel.

    Attributes:
        rows: Rows of the weight.
        tokens: Tokens of X, as many as the tensor cores multiply.
        blocks: CTAs that share K.
        resident: Number of such CTAs on an SM at a time.
        depth: Stages, or blocks of K, that are under way.
        element: What the tensor cores multiply.
        pair: Whether two blocks multiply together, each of which fetches half of the tokens.
        small_m: Whether by the kernel for small M.
    """

    rows: int
    tokens: int
    blocks: int
    resident: int
    depth: int
    element: str
    pair: bool = False
    small_m: bool = False


class Prediction(NamedTuple):
    """Prediction for one GEMM.

    Attributes:
        bytes: Weights, X and results, each once.
        flops: Operations asked for.
        tile: How it is cut.
        tiles: All of them.
        waves: Rounds of tiles.
        us: Predicted.
        bound_us: Bytes at the memory's rate or operations at the tensor cores'.
        bound: ``"memory"``, ``"tensor"``, ``"expansion"`` or ``"L2"``.
    """

    bytes: int
    flops: int
    tile: Tile
    tiles: int
    waves: int
    us: float
    bound_us: float
    bound: str


class Shape(NamedTuple):
    """Rows of a group, columns, groups and tokens."""

    rows: int
    columns: int
    groups: int
    tokens: int


def predict(machine: Machine, shape: Shape, tile: Tile, *, launches: int = 1) -> Prediction:
    """Predict the time of a GEMM.

    Args:
        machine: The GPU.
        shape: Sizes of the GEMM.
        tile: How it is tiled.
        launches: One after another, which share the tokens and read all weights each.
    """
    rows, columns, groups, tokens = shape
    a_value = 2.0 if tile.element == "bf16" else 9 / 16
    weights, x = groups * rows * columns * 9 / 16, groups * tokens * columns * a_value
    out = 2 * groups * rows * tokens
    flops = 2 * groups * rows * columns * tokens
    tiles = groups * -(-rows // tile.rows) * -(-tokens // tile.tokens)
    waves = -(-tiles * tile.blocks // (machine.processors * tile.resident))
    part, fetched = columns / tile.blocks, tile.tokens / (2 if tile.pair else 1)
    cycles = {
        "tensor": 2 * tile.rows * tile.tokens * part / machine.flops_a_cycle(tile.element),
        "expansion": tile.rows * part / machine.expanded if tile.element == "bf16" else 0.0,
        "L2": (tile.rows * 9 / 16 + fetched * a_value) * part / machine.l2_bytes,
    }
    step = max(cycles, key=lambda name: cycles[name])
    # CTAs resident on one SM share it.
    resident = min(tile.resident, -(-tiles * tile.blocks // machine.processors))
    more = machine.shared_cycles if tile.blocks > 1 else 0.0
    stored = tile.rows * tile.tokens * 2 / machine.l2_bytes
    of_tiles = waves * (resident * (cycles[step] + stored) + machine.tile_cycles + more)
    busy = of_tiles / (1e3 * machine.ghz)
    moved = weights * launches + x + out
    memory = moved / (1e6 * machine.read_tbs)
    launch = machine.small_m_launch_us if tile.small_m else machine.launch_us
    us = launches * launch + max(busy, memory)
    needed = weights + x + out
    bound_us = max(needed / machine.read_tbs, flops / machine.tflops[tile.element]) / 1e6
    bound = "memory" if memory >= busy else step
    return Prediction(round(needed), flops, tile, tiles, waves, us, bound_us, bound)


def of_plan(plan: Any) -> Tile:
    """Return the tiling of one of Hopper's kernels."""
    if isinstance(plan, SmallMPlan):
        tokens = 8 * plan.token_tiles
        rows, kind = 16 * plan.warps, "bf16"
        return Tile(rows, tokens, plan.ctas, plan.ctas_per_sm, plan.stages, kind, small_m=True)
    return Tile(plan.rows, plan.token_block, plan.ctas, 1, plan.stage_k_blocks, "bf16")


H200 = Machine("H200", 132, 1.7, 4.45, {"bf16": 791.0}, 3.86, 2.6, 0.0, 0.0, 73.0, 36.8)
# Memory: 8 TB/s times what the H200 reaches of its 4.8. Tensor cores: bfloat16 2250 TFLOP/s times
# what the H200 reaches of its 989, NVFP4 what DeepGEMM's GEMM of 8192^3 is published with. L2:
# what that GEMM needs of it at least, in tiles of 256 x 256 of two SMs. The clock is an assumption.
B200 = Machine(
    "B200", 148, 1.85, 7.42, {"bf16": 1800.0, "nvfp4": 5702.0}, 3.86, 2.6, 0.0, 0.0, 73.0, 46.0
)
# Published for a B200: N, K, tokens, TFLOP/s, of a GEMM with quantised activations.
PUBLISHED = {
    "DeepGEMM, MXFP4": (8192, 8192, 8192, 5702.0),
    "FlashInfer, 64 tokens": (6144, 4096, 64, 282.0),
    "FlashInfer, 512 tokens": (6144, 4096, 512, 2188.0),
    "FlashInfer, 4096 tokens": (6144, 4096, 4096, 3646.0),
}
_STAGE, _CAPACITY = 144, 220 * 1024  # bytes of 256 columns of a row: codes and scales; all stages


def on_hopper(machine: Machine, shape: Shape) -> Prediction:
    """Predict the kernel that dispatch chooses for bfloat16 activations and results."""
    rows, columns, groups, tokens = shape
    plan = choose(GemmProblem(rows * groups, columns, groups, False, False), tokens)
    return predict(machine, shape, of_plan(plan))


def small_m_on_blackwell(machine: Machine, shape: Shape) -> Prediction | None:
    """Predict Hopper's kernel for small M, 16 tokens at a time, bfloat16; None above 64."""
    rows, columns, groups, tokens = shape
    if tokens > 64:
        return None
    plan = choose(GemmProblem(rows * groups, columns, groups, False, False), tokens, "sm_100a")
    return predict(machine, shape, of_plan(plan), launches=-(-tokens // 16))


def block_scaled(machine: Machine, shape: Shape) -> Prediction:
    """Predict the GEMM by block-scaled tensor cores, given quantised activations.

    With the best of their tiles; K is shared for 64 tokens alone.
    """
    depths = {tokens: _CAPACITY // (_STAGE * (128 + tokens)) for tokens in (64, 128, 192, 256)}
    tiles = [
        Tile(128, tokens, 1, 1, depth, "nvfp4", pair)
        for tokens, depth in depths.items()
        for pair in (False, True)
    ]
    tiles += [Tile(128, 64, parts, 1, depths[64], "nvfp4") for parts in (2, 4, 8)]
    return min(
        (predict(machine, shape, tile) for tile in tiles), key=lambda prediction: prediction.us
    )


def measured(*files: str) -> Iterator[tuple[str, Shape, float]]:
    """Name, shape and microseconds of every row of results of Hopper's kernels."""
    for file in files:
        for row in json.loads((RESULTS / file).read_text())["rows"]:
            sizes = row["shape"]
            shape = Shape(sizes["N"], sizes["K"], sizes.get("G", 1), row["tokens"])
            yield row["case"], shape, row["us"]


FITTED = ("2026-11-23-gemm_pro.json",)
HELD_OUT = ("2026-11-23-gemm_flash.json",)


def loss(machine: Machine, files: Sequence[str] = FITTED) -> float:
    """Sum of squares of the logarithms of predicted over measured: what the numbers are fitted by.

    Those of ``H200`` are where it was smallest, changing one at a time.
    """
    pairs = ((on_hopper(machine, shape).us, us) for _, shape, us in measured(*files))
    return sum(math.log(predicted / us) ** 2 for predicted, us in pairs)


def errors(machine: Machine, files: Sequence[str]) -> list[float]:
    """Predicted over measured, less 1."""
    return [on_hopper(machine, shape).us / us - 1 for _, shape, us in measured(*files)]


def shapes(preset: str, tokens: Sequence[int] = TOKENS) -> Iterator[tuple[str, Shape]]:
    """The matrices of a model by name."""
    for name, (rows, columns, groups, _) in matrices(PRESETS[preset]()).items():
        for count in tokens:
            yield name, Shape(rows, columns, groups, count)


def _line(name: str, shape: Shape, prediction: Prediction, small_m: Prediction | None) -> str:
    rows, columns, groups, tokens = shape
    size = f"{rows} x {columns}" + (f", {groups} groups" if groups > 1 else "")
    tile = f"{prediction.tile.rows} x {prediction.tile.tokens}" + (
        ", pairs" if prediction.tile.pair else ""
    )
    tile += f", K by {prediction.tile.blocks}" if prediction.tile.blocks > 1 else ""
    cells = (
        f"{name} {size}",
        tokens,
        f"{prediction.bytes / 1e6:.1f}",
        f"{prediction.flops / 1e9:.2f}",
        tile,
        prediction.tiles,
        prediction.waves,
        prediction.tile.depth,
        f"{prediction.bound_us:.1f}",
        f"{prediction.us:.1f}",
        prediction.bound,
        "-" if small_m is None else f"{small_m.us:.1f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def markdown() -> str:
    """Errors of the model, and what it says of a B200."""
    lines = ["# NVFP4 GEMMs on a B200: predictions of a model", ""]
    lines += [
        "`python -m dsv4.bench.prediction` wrote this page. Nothing here was measured on a B200.",
        "",
    ]
    for title, files in (("fitted to", FITTED), ("not fitted to", HELD_OUT)):
        sizes = [abs(error) for error in errors(H200, files)]
        lines.append(
            f"- H200, {len(sizes)} times {title} ({', '.join(files)}): median error "
            f"{100 * statistics.median(sizes):.0f} %, worst {100 * max(sizes):.0f} %"
        )
    for name, (rows, columns, tokens, tflops) in PUBLISHED.items():
        shape = Shape(rows, columns, 1, tokens)
        us = 2e-6 * rows * columns * tokens / tflops
        predicted = block_scaled(B200, shape).us
        lines.append(
            f"- B200, published by {name}: {us:.1f} us; predicted {predicted:.1f} "
            f"({100 * (predicted / us - 1):+.0f} %)"
        )
    lines += [
        "",
        "MB and GFLOP: each byte once, operations asked for. Tile: rows x tokens; waves: rounds of "
        "tiles; depth: stages of",
        "256 columns. us: NVFP4 activations, block-scaled tensor cores. small M: bfloat16 "
        "activations, Hopper's kernel for",
        "small M, 16 tokens at a time.",
    ]
    for preset in ("pro", "flash"):
        lines += ["", f"## {preset.capitalize()}", ""]
        lines.append(
            "| matrix | tokens | MB | GFLOP | tile | tiles | waves | depth | roofline us | us "
            "| bound | small M us |"
        )
        lines.append("|---|" + "---:|" * 3 + "---|" + "---:|" * 5 + "---|---:|")
        for name, shape in shapes(preset):
            small_m = small_m_on_blackwell(B200, shape)
            lines.append(_line(name, shape, block_scaled(B200, shape), small_m))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
