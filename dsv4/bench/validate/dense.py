"""Dense GEMMs for ``run gemm --check``: every implementation on every matrix.

Activations as they are and quantised, several token counts, results in bfloat16 and in float32.
Then weights whose scales are all the largest, the smallest, or zero, and tokens that hold a NaN and
an infinity. Errors are in units of what a right implementation can be off by (``check.sum_error``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsv4 import dispatch
from dsv4.bench import timing
from dsv4.bench.cases import PRESETS
from dsv4.bench.cases.gemm import matrices
from dsv4.bench.checks.judge import U, storing, sum_error, worst
from dsv4.bench.problem import Draw
from dsv4.bench.validate.kernel import REFERENCE, Kernel, Refused, Request
from dsv4.ops.gemm import ACTIVATIONS, gemm
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant import fragments
from dsv4.quant.formats import FRAGMENTS, LINEAR, SWIZZLED, QuantizedTensor

EXTREMES = {"scales 448": 448.0, "scales 2^-9": 2.0**-9, "scales 0": 0.0}
_SAMPLE = 64  # tokens of many that are compared with float64
_EXTREME_TOKENS = 17
_CHUNK = 8192  # rows of a weight that are widened at a time


def validated(preset: str, request: Request, refused: Refused) -> Iterator[Kernel]:
    """Validate each implementation of each requested matrix; add refusals to ``refused``."""
    for name, sizes in matrices(PRESETS[preset]()).items():
        if not request.includes(name):
            continue
        matrix = _Matrix(f"{preset} {name}", *sizes, Draw(request.seed, request.device))
        for activation in ACTIVATIONS:
            for kernel in _of_matrix(matrix, activation, request, refused):
                if not kernel.failed:
                    kernel.us = _times(matrix, kernel, request)
                yield kernel


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
        """Return the layouts that the weight can have."""
        packed = [FRAGMENTS] if fragments.fits(self.rows, self.columns) else []
        return [LINEAR, SWIZZLED, *packed]


@dataclass(frozen=True)
class _Point:
    """One GEMM: operands, the truth for some tokens, and what it may be off by."""

    what: str
    x: torch.Tensor
    weight: QuantizedTensor
    input_scale: torch.Tensor | None
    sampled: torch.Tensor
    truth: torch.Tensor
    budget: torch.Tensor


def _of_matrix(
    matrix: _Matrix, activation: str, request: Request, refused: Refused
) -> list[Kernel]:
    """Validate every implementation at every point; the truth of each is computed once."""
    kernels: dict[tuple[str, str], Kernel] = {}
    for point in _points(matrix, activation, request.tokens):
        for layout in matrix.layouts():
            weight = point.weight.with_layout(layout)
            options = _options(matrix, point, activation, torch.bfloat16)
            for backend in request.available(gemm, (point.x, weight), options, layout, refused):
                key = (layout, backend)
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
    """Make a point with the float64 GEMM of sampled tokens, the first and the last among them."""
    step = max(1, -(-x.shape[0] // _SAMPLE))
    sampled_rows = [*range(0, x.shape[0], step), x.shape[0] - 1]
    sampled = torch.tensor(sorted(set(sampled_rows)), device=x.device)
    left = x[sampled].reshape(-1, matrix.columns)
    if activation == "nvfp4":
        scaling = "token" if scale is None else "static"
        q = quantize(left, scaling=scaling, global_scale=scale, backend=REFERENCE)
        left = dequantize(q, torch.float64, backend=REFERENCE)
    elif activation == "fp8":
        q = quantize(left, "fp8_token", backend=REFERENCE)
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
    """float64 ``[T, G, N]``: the result, and that of the magnitudes."""
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
    result, magnitude = (torch.cat(chunks, -1).view(shape) for chunks in zip(*parts, strict=True))
    return result, magnitude


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
        result = out[point.sampled].view(point.truth.shape)
        allowed = point.budget + storing(point.truth, dtype)
        kernel.add(point.what, dtype, worst(result, point.truth, allowed))
    except Exception as error:  # whatever it is, the others are validated and it is reported
        words = str(error).splitlines() or [""]
        kernel.add(point.what, dtype, float("inf"), f"{type(error).__name__}: {words[0]}")


def _times(matrix: _Matrix, kernel: Kernel, request: Request) -> dict[int, float]:
    """Return microseconds with bfloat16 results; on a GPU with the L2 cleared before."""
    weight, times = matrix.weight.with_layout(kernel.layout), {}
    for count in request.tokens:
        x = matrix.input(count)
        options = {"activation": kernel.activation, "groups": matrix.groups}
        call = dispatch.arguments(gemm, x, weight, **options)
        row = next(r for r in dispatch.implementations("gemm") if r.name == kernel.backend)
        if row.unsupported_reason(call) is None:

            def run(x: torch.Tensor = x, options: dict[str, Any] = options) -> torch.Tensor:
                return gemm(x, weight, **options, backend=kernel.backend)

            times[count] = timing.measure([run], x.device, request.repeat).us
    return times
