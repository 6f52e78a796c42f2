"""Convert MXFP4 weights to NVFP4 and back without changing a value.

MXFP4 has a power of two per 32 codes, NVFP4 an E4M3 number per 16 codes and a float32 number per
matrix. E4M3 holds the powers of two from 2^-9 to 2^8, so the codes stay as they are if the
exponents of a matrix differ by at most 17. NVFP4 takes 4.5 bits per weight, MXFP4 4.25.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from dsv4.quant.formats import LINEAR, MXFP4, NVFP4, QuantizedTensor, cat_rows, mxfp4_to_nvfp4

MODES = ("keep", "lossless", "nvfp4")
_logger = logging.getLogger("dsv4.checkpoint")
_NAN = 0x7F


@dataclass
class Conversion:
    """Counts of the MXFP4 matrices of a checkpoint that were converted, and of those that were not.

    Attributes:
        converted: Number of those that are NVFP4 now.
        inexact: Names of those with values that NVFP4 does not have. They were rounded if that was
            requested; otherwise they stay MXFP4, for an expert with all experts of its layer.
        unconverted: Number of those that stay MXFP4 for that reason.
    """

    converted: int = 0
    inexact: list[str] = field(default_factory=list)
    unconverted: int = 0

    @property
    def kept(self) -> int:
        """The old name of ``unconverted``."""
        return self.unconverted

    def count(self, matrices: int, *, stays: bool) -> None:
        """Add matrices that were converted, or (``stays``) that were not."""
        if stays:
            self.unconverted += matrices
        else:
            self.converted += matrices

    def report(self, path: Path) -> None:
        """Log the converted matrices, and warn if NVFP4 cannot hold some."""
        if self.converted:
            _logger.info("%s: %d MXFP4 matrices are NVFP4 in memory", path, self.converted)
        if not self.inexact:
            return
        what = "they were rounded"
        if self.unconverted:
            what = (
                f"{self.unconverted} matrices stay MXFP4, for which there are no packed kernels; "
                "mxfp4='nvfp4' rounds them"
            )
        _logger.warning(
            "%s: %d MXFP4 matrices have values that NVFP4 does not (block scales more than 2^17 "
            "below the largest of the matrix): %s. The first: %s",
            path,
            len(self.inexact),
            what,
            self.inexact[0],
        )


def to_nvfp4(value: QuantizedTensor, *, rounds: bool = False) -> QuantizedTensor | None:
    """Convert an MXFP4 matrix to NVFP4; None if values would change and ``rounds`` is false."""
    converted, report = mxfp4_to_nvfp4(value)
    return converted if rounds or report.exact else None


def pair_to_nvfp4(
    gate: QuantizedTensor, up: QuantizedTensor
) -> tuple[QuantizedTensor, QuantizedTensor] | None:
    """Convert two MXFP4 matrices to NVFP4 with one global scale; None if values would change."""
    both = to_nvfp4(cat_rows([gate, up]))
    return None if both is None else (_rows(both, 0, gate.rows), _rows(both, gate.rows, both.rows))


def _rows(value: QuantizedTensor, start: int, stop: int) -> QuantizedTensor:
    return replace(value, codes=value.codes[start:stop], scales=value.scales[start:stop])


def to_mxfp4(value: QuantizedTensor) -> QuantizedTensor | None:
    """Convert an NVFP4 matrix to MXFP4; None if values would change.

    Its scales must be powers of two, the same for both halves of 32 columns. Every matrix that
    ``to_nvfp4`` returned without rounding is converted back to the same values.
    """
    scale = value.global_scale
    if value.format != NVFP4 or scale is None or scale.numel() != 1 or value.columns % 32:
        return None
    mantissa, exponent = math.frexp(scale.item())
    if mantissa != 0.5:
        return None
    linear = value.with_layout(LINEAR)
    halves = linear.scales.view(torch.uint8).unflatten(-1, (value.columns // 32, 2))
    if not torch.equal(halves[..., 0], halves[..., 1]):
        return None
    fraction, powers = torch.frexp(linear.scales[..., ::2].float())
    powers = powers - 1 + exponent - 1
    invalid = halves[..., 0] == _NAN
    if not bool((invalid | ((fraction == 0.5) & (powers >= -127) & (powers <= 127))).all()):
        return None
    scales = torch.where(invalid, 255, powers + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return QuantizedTensor(linear.codes, scales, None, MXFP4)
