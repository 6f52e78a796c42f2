"""``run gemm --check``: is every kernel of a product right on this machine, and a report of it.

Every implementation that can run here multiplies every matrix of the models, with activations as
they are and quantised, at several token counts, with results in bfloat16 and in float32. Then with
weights whose scales are all the largest, the smallest, or zero, and with tokens that hold a NaN and
an infinity. Errors are in units of what a right implementation can be off by (``check.sum_error``).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsv4 import dispatch, fragments
from dsv4.bench import report, timing
from dsv4.bench.cases import PRESETS, matrices
from dsv4.bench.check import U, storing, sum_error
from dsv4.bench.problem import Draw, UsageError
from dsv4.formats import FRAGMENTS, LINEAR, SWIZZLED, QuantizedTensor
from dsv4.ops.gemm import ACTIVATIONS, gemm
from dsv4.ops.quantize import dequantize, quantize

REFERENCE = "reference"
TOKENS = [1, 8, 16, 17, 64, 65, 300, 1024]
EXTREMES = {"scales 448": 448.0, "scales 2^-9": 2.0**-9, "scales 0": 0.0}
_SAMPLE = 64  # tokens of many that are compared with float64
_EXTREME_TOKENS = 17
_CHUNK = 8192  # rows of a weight that are widened at a time
# By backend and reason without its numbers.
Refused = dict[str, dict[str, str]]
HEADINGS = (
    *("matrix", "shape", "weight", "activation", "backend"),
    *("points", "bf16 error", "f32 error", "check", "us by tokens"),
)


@dataclass
class Kernel:
    """What was found of one implementation, matrix and kind of operands.

    Attributes:
        matrix: Which, with its model.
        shape: Names and sizes.
        layout: Of the weight.
        activation: ``"bf16"`` or ``"nvfp4"``.
        backend: The implementation.
        points: Products compared.
        failed: Those outside their budget, or that raised.
        worst: Largest error in units of the budget, by dtype of the result; infinite for a NaN
            where there is none, and the other way round.
        us: Median microseconds by tokens; only of those that are right.
        messages: What failed, one line each.
    """

    matrix: str
    shape: dict[str, int]
    layout: str
    activation: str
    backend: str
    points: int = 0
    failed: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    us: dict[int, float] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def add(self, what: str, dtype: torch.dtype, ratio: float, message: str = "") -> None:
        """Count a point."""
        name = str(dtype).removeprefix("torch.")
        self.points += 1
        self.worst[name] = max(self.worst.get(name, 0.0), ratio)
        if ratio > 1:
            self.failed += 1
            self.messages.append(f"{what}, {name}: {message or f'{ratio:.3g} times the budget'}")

    def cells(self) -> tuple[str, ...]:
        """The texts of its line, in the order of ``HEADINGS``."""
        return (
            self.matrix,
            " ".join(f"{name}={size}" for name, size in self.shape.items()),
            self.layout,
            self.activation,
            self.backend,
            str(self.points),
            *(f"{self.worst[name]:.2g}" for name in ("bfloat16", "float32")),
            "ok" if not self.failed else f"{self.failed} WRONG",
            ", ".join(f"{tokens}: {report.number(us)}" for tokens, us in self.us.items()),
        )


@dataclass(frozen=True)
class Found:
    """A whole run.

    Attributes:
        kernels: In the order in which they ran.
        absent: By backend that ran nowhere, why not, for the several kinds of operands.
    """

    kernels: tuple[Kernel, ...]
    absent: dict[str, list[str]]

    @property
    def wrong(self) -> int:
        """Kernels of which a point failed."""
        return sum(1 for kernel in self.kernels if kernel.failed)

    def lines(self) -> list[str]:
        """The report without its header."""
        lines = report.plain(HEADINGS, [kernel.cells() for kernel in self.kernels])
        for kernel in self.kernels:
            where = f"{kernel.backend} {kernel.matrix} {kernel.layout} {kernel.activation}"
            lines += [f"WRONG {where}: {message}" for message in kernel.messages]
        for backend, reasons in self.absent.items():
            lines += [f"not run: {backend}: {why}" for why in reasons]
        count = sum(kernel.points for kernel in self.kernels)
        lines.append(f"{len(self.kernels)} kernels, {count} products, {self.wrong} kernels wrong")
        return lines

    def document(self, header: dict[str, Any]) -> dict[str, Any]:
        """What a JSON file holds; an infinite error is the string ``"inf"``."""
        kernels = [dataclasses.asdict(kernel) for kernel in self.kernels]
        for kernel in kernels:
            for name, ratio in kernel["worst"].items():
                kernel["worst"][name] = "inf" if ratio == float("inf") else ratio
        return {"header": header, "kernels": kernels, "absent": self.absent}


def write_json(path: str, found: Found, header: dict[str, Any]) -> Path:
    """Write ``Found.document``."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(found.document(header), indent=1, allow_nan=False) + "\n")
    return target


def run(
    presets: Sequence[str],
    tokens: Sequence[int],
    wanted: Callable[[str], bool],
    device: torch.device,
    repeat: int,
    seed: int = 0,
    backends: Sequence[str] = (dispatch.AUTO,),
) -> Found:
    """Validate every kernel.

    Args:
        presets: Keys of ``PRESETS``.
        tokens: Token counts.
        wanted: Says which matrices, by name.
        device: Where.
        repeat: Timed runs.
        seed: Of the inputs.
        backends: Names of implementations, or ``"auto"`` for all.

    Raises:
        UsageError: if a name is unknown.
    """
    known = [dispatch.AUTO, *(row.name for row in dispatch.implementations("gemm"))]
    for name, some in [("backend", backends), ("shapes", presets)]:
        allowed = known if name == "backend" else list(PRESETS)
        for value in some:
            if value not in allowed:
                raise UsageError(f"--{name} has {value!r}, wanted one of {', '.join(allowed)}")
    kernels: list[Kernel] = []
    refused: Refused = {}
    for preset in presets:
        for name, sizes in matrices(PRESETS[preset]()).items():
            if not wanted(name):
                continue
            matrix = _Matrix(f"{preset} {name}", *sizes, Draw(seed, device))
            for activation in ACTIVATIONS:
                for kernel in _validated(matrix, activation, tokens, backends, refused):
                    if not kernel.failed:
                        kernel.us = _times(matrix, kernel, tokens, repeat)
                    kernels.append(kernel)
    ran = {kernel.backend for kernel in kernels}
    absent = {name: list(why.values()) for name, why in refused.items() if name not in ran}
    return Found(tuple(kernels), absent)


class _Matrix:
    """A weight in all its layouts, and inputs for it."""

    def __init__(
        self,
        name: str,
        rows: int,
        columns: int,
        groups: int,
        segments: tuple[int, ...],
        draw: Draw,
    ) -> None:
        self.name, self.rows, self.columns, self.groups = name, rows, columns, groups
        self.draw = draw
        self.weight = draw.quantized(groups * rows, columns, segments=segments)

    @property
    def shape(self) -> dict[str, int]:
        """Names and sizes."""
        shape = {"N": self.rows, "K": self.columns}
        return {**shape, "G": self.groups} if self.groups > 1 else shape

    def input(self, tokens: int) -> torch.Tensor:
        """bfloat16, with a group axis if there are groups."""
        middle = (self.groups,) if self.groups > 1 else ()
        return self.draw.normal(tokens, *middle, self.columns)

    def with_scales(self, value: float) -> QuantizedTensor:
        """The weight with all block scales equal."""
        old = self.weight.scales
        scales = torch.full(old.shape, value, device=old.device).to(old.dtype)
        return dataclasses.replace(self.weight, scales=scales)

    def layouts(self) -> list[str]:
        """Those that the weight can have."""
        packed = [FRAGMENTS] if fragments.fits(self.rows, self.columns) else []
        return [LINEAR, SWIZZLED, *packed]


@dataclass(frozen=True)
class _Point:
    """One product: operands, the truth for some tokens, and what it may be off by."""

    what: str
    x: torch.Tensor
    weight: QuantizedTensor
    input_scale: torch.Tensor | None
    sampled: torch.Tensor
    truth: torch.Tensor
    budget: torch.Tensor


def _validated(
    matrix: _Matrix,
    activation: str,
    tokens: Sequence[int],
    backends: Sequence[str],
    refused: Refused,
) -> list[Kernel]:
    """Every implementation at every point; the truth of each is computed once."""
    kernels: dict[tuple[str, str], Kernel] = {}
    for point in _points(matrix, activation, tokens):
        for layout in matrix.layouts():
            weight = point.weight.with_layout(layout)
            for backend in _available(matrix, point, weight, activation, refused):
                key = (layout, backend)
                if dispatch.AUTO not in backends and backend not in backends:
                    continue
                if key not in kernels:
                    kernels[key] = Kernel(matrix.name, matrix.shape, layout, activation, backend)
                for dtype in (torch.bfloat16, torch.float32):
                    _compare(kernels[key], matrix, point, weight, dtype)
    return [kernels[key] for key in sorted(kernels)]


def _points(matrix: _Matrix, activation: str, tokens: Sequence[int]) -> Iterator[_Point]:
    weight = matrix.weight
    for count in tokens:
        yield _point(matrix, f"{count} tokens", activation, matrix.input(count), weight)
    x = matrix.input(_EXTREME_TOKENS)
    if activation == "nvfp4":
        scale = (x.abs().amax() / 5376).float().reshape(1)  # clips what is in the upper half
        yield _point(matrix, "calibrated scale", activation, x, weight, scale)
    for what, value in EXTREMES.items():
        yield _point(matrix, what, activation, x, matrix.with_scales(value))
    x = x.clone()
    x[3, ..., 5], x[11, ..., matrix.columns - 1] = float("nan"), float("-inf")
    yield _point(matrix, "a NaN and an infinity", activation, x, weight)


def _point(
    matrix: _Matrix,
    what: str,
    activation: str,
    x: torch.Tensor,
    weight: QuantizedTensor,
    scale: torch.Tensor | None = None,
) -> _Point:
    """With the float64 product of sampled tokens, the first and the last among them."""
    step = max(1, -(-x.shape[0] // _SAMPLE))
    places = [*range(0, x.shape[0], step), x.shape[0] - 1]
    sampled = torch.tensor(sorted(set(places)), device=x.device)
    left = x[sampled].reshape(-1, matrix.columns)
    if activation == "nvfp4":
        scaling = "token" if scale is None else "static"
        q = quantize(left, scaling=scaling, global_scale=scale, backend=REFERENCE)
        left = dequantize(q, torch.float64, backend=REFERENCE)
    left = left.double().view(len(sampled), matrix.groups, matrix.columns)
    finite = torch.isfinite(x[sampled].double()).all(-1).view(len(sampled), matrix.groups, 1)
    left = torch.where(finite, left, 0.0)
    truth, magnitude = _widely(matrix, left, weight)
    truth = torch.where(finite, truth, torch.nan)
    budget = (sum_error(matrix.columns) + 3 * U) * magnitude
    return _Point(what, x, weight, scale, sampled, truth, budget)


def _widely(
    matrix: _Matrix, left: torch.Tensor, weight: QuantizedTensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 ``[T, G, N]``: the product, and that of the magnitudes."""
    scale = weight.row_scale()
    parts = []
    for group in range(matrix.groups):
        for begin in range(0, matrix.rows, _CHUNK):
            rows = slice(
                group * matrix.rows + begin,
                group * matrix.rows + min(begin + _CHUNK, matrix.rows),
            )
            part = QuantizedTensor(
                weight.codes[rows], weight.scales[rows], scale[rows].contiguous(), weight.format
            )
            right = dequantize(part, torch.float64, backend=REFERENCE).T
            parts.append((left[:, group] @ right, left[:, group].abs() @ right.abs()))
    shape = (left.shape[0], matrix.groups, matrix.rows)
    product, magnitude = (torch.cat(each, -1).view(shape) for each in zip(*parts, strict=True))
    return product, magnitude


def _available(
    matrix: _Matrix,
    point: _Point,
    weight: QuantizedTensor,
    activation: str,
    refused: Refused,
) -> list[str]:
    """Names of the implementations that take it; the reference with linear scales alone."""
    call = dispatch.arguments(
        gemm, point.x, weight, **_options(matrix, point, activation, torch.bfloat16)
    )
    found = []
    for row in dispatch.implementations("gemm"):
        why = row.supports(call)
        if why is not None:
            kind = re.sub(r"\d+", "", why)
            refused.setdefault(row.name, {}).setdefault(kind, why)
        elif row.name != REFERENCE or weight.layout == LINEAR:
            found.append(row.name)
    return found


def _options(matrix: _Matrix, point: _Point, activation: str, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "activation": activation,
        "input_scale": point.input_scale,
        "groups": matrix.groups,
        "out_dtype": dtype,
    }


def _compare(
    kernel: Kernel, matrix: _Matrix, point: _Point, weight: QuantizedTensor, dtype: torch.dtype
) -> None:
    options = _options(matrix, point, kernel.activation, dtype)
    try:
        out = gemm(point.x, weight, **options, backend=kernel.backend)
        kernel.add(point.what, dtype, _ratio(out[point.sampled].view(point.truth.shape), point))
    except Exception as error:  # whatever it is, the others are validated and it is reported
        words = str(error).splitlines() or [""]
        kernel.add(point.what, dtype, float("inf"), f"{type(error).__name__}: {words[0]}")


def _ratio(out: torch.Tensor, point: _Point) -> float:
    """Largest error over budget; infinite where only one of the two is NaN."""
    found, allowed = out.double(), point.budget + storing(point.truth, out.dtype)
    ratio = (found - point.truth).abs() / allowed
    nan = point.truth.isnan()
    ratio = torch.where(nan, torch.where(found.isnan(), 0.0, torch.inf), ratio)
    return float(ratio.nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def _times(matrix: _Matrix, kernel: Kernel, tokens: Sequence[int], repeat: int) -> dict[int, float]:
    """Of the result's usual dtype, bfloat16; on a GPU with the level-2 cache cleared before."""
    weight, found = matrix.weight.with_layout(kernel.layout), {}
    for count in tokens:
        x = matrix.input(count)
        options = {"activation": kernel.activation, "groups": matrix.groups}
        call = dispatch.arguments(gemm, x, weight, **options)
        row = next(r for r in dispatch.implementations("gemm") if r.name == kernel.backend)
        if row.supports(call) is None:

            def product(x: torch.Tensor = x, options: dict[str, Any] = options) -> torch.Tensor:
                return gemm(x, weight, **options, backend=kernel.backend)

            found[count] = timing.measure([product], x.device, repeat).us
    return found
