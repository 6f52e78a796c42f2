"""NVFP4 weights that are exact in E4M3, and the conversion there and back.

An E2M1 value is an integer of two bits times a power of two, so that times ``2 ** k`` it is an E4M3
number for k from -8 to 6: ``0.5 * 2^-8`` is E4M3's smallest subnormal number, ``6 * 2^7`` is above
its largest. A weight whose block scales are powers of two is therefore exact in E4M3 up to one
power of two for each row, ``2 ** row_exponent``, provided that the exponents of a row's scales
differ by at most 14::

    code * block scale = E4M3 * 2 ** row_exponent        (specification, section 11.7)

Weights of DeepSeek's MXFP4 checkpoints are such, converted to NVFP4 or not; NVFP4 scales that were
computed from data have mantissas, and a product then has one bit more than E4M3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dsv4.quant.elements import decode_e2m1, encode_e2m1, pack, unpack
from dsv4.quant.formats import FRAGMENTS, LINEAR, NVFP4, QuantizedTensor
from dsv4.quant.fragments import COLUMNS, ROWS

LOWEST, HIGHEST = -8, 6  # exponents k for which every E2M1 value times 2^k is an E4M3 number
SPAN = HIGHEST - LOWEST
# The largest exponent of an E4M3 scale, 8, becomes HIGHEST: so rows without small scales agree.
_USUAL = 8 - HIGHEST
# Bytes of converted weights that a GEMM holds at a time; a single matrix may take more.
MOST_CONVERTED = 256 << 20
_PIECE = 1 << 22  # block scales that are examined at once
_NAMED = 4  # matrices of a stack that a reason names
_NO_POWER = 127  # stands for the exponent of a scale that is no power of two


@dataclass(frozen=True)
class Exactness:
    """Counts of what keeps a weight from being exact in E4M3.

    Attributes:
        blocks: Block scales of the matrix, or of all matrices of a stack.
        no_power: Block scales that are no power of two (0 and NaN are none).
        wide_rows: Rows whose scales' exponents differ by more than 14.
        wide_blocks: Blocks of these rows that are too far below the largest of their row.
        by_matrix: Of a stack, how many such blocks (``no_power`` and ``wide_blocks``) each matrix
            has; empty for a single matrix, and if no matrix has any.
        first: Number of the stack's first matrix: of experts, the first one held here.
    """

    blocks: int
    no_power: int = 0
    wide_rows: int = 0
    wide_blocks: int = 0
    by_matrix: tuple[int, ...] = ()
    first: int = 0

    @property
    def is_exact(self) -> bool:
        """Return whether every value is an E4M3 number times its row's power of two."""
        return not (self.no_power or self.wide_rows)

    @property
    def reason(self) -> str | None:
        """Return why the weight is not exact in E4M3, or None.

        Of a stack it names the matrices that are not.
        """
        if self.no_power:
            said = f"{self.no_power} of {self.blocks} block scales are no power of two"
        elif self.wide_rows:
            said = (
                f"{self.wide_blocks} of {self.blocks} blocks are more than 2^{SPAN} below the "
                f"largest of their row, in {self.wide_rows} rows"
            )
        else:
            return None
        return f"{said}; {self.where}" if self.where else said

    @property
    def inexact(self) -> dict[int, int]:
        """Return the numbers of a stack's inexact matrices, with their counts of blocks."""
        return {self.first + n: count for n, count in enumerate(self.by_matrix) if count}

    @property
    def where(self) -> str | None:
        """Return which matrices of a stack are not exact, or None."""
        inexact = self.inexact
        if not inexact:
            return None
        named = [f"{number} (blocks: {count})" for number, count in inexact.items()]
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        return (
            f"{len(named)} of {len(self.by_matrix)} matrices of the stack have such blocks: "
            f"{', '.join(named[:_NAMED])}{more}"
        )

    def __add__(self, other: Exactness) -> Exactness:
        """Return the counts of both weights together, without those of single matrices."""
        return Exactness(
            self.blocks + other.blocks,
            self.no_power + other.no_power,
            self.wide_rows + other.wide_rows,
            self.wide_blocks + other.wide_blocks,
        )


@dataclass(frozen=True)
class Examined:
    """The result of ``examine``.

    Attributes:
        exactness: Counts.
        row_exponent: int8 ``[*batch, N]`` in the order of the rows; None if the weight is not exact
            in E4M3.
    """

    exactness: Exactness
    row_exponent: torch.Tensor | None


def examine(weight: QuantizedTensor) -> Examined:
    """Find out whether a weight is exact in E4M3; reads the counts on the host, once.

    Memory holds a few bytes for each block scale of one matrix of a stack, or of a part of it.

    Args:
        weight: NVFP4, ``[*batch, N, K]``, linear or in fragments.

    Raises:
        ValueError: if it has another format or layout.
    """
    if weight.format != NVFP4 or weight.layout not in (LINEAR, FRAGMENTS):
        raise ValueError(f"{weight!r}, wanted nvfp4, linear or in fragments")
    blocks, shape = weight.columns // 16, weight.codes.shape[:-1]
    if not weight.scales.numel():
        usual = torch.full(shape, _USUAL, dtype=torch.int8, device=weight.device)
        return Examined(Exactness(0), usual)
    matrices = weight.scales.view(torch.uint8).reshape(-1, weight.rows, blocks)
    height = max(1, _PIECE // (ROWS * blocks)) * ROWS
    pieces = [piece for matrix in matrices for piece in matrix.split(height)]
    parts = [_examined(piece, weight.layout) for piece in pieces]
    wrong = torch.stack([wrong for wrong, _ in parts]).view(len(matrices), -1, 3).sum(1)
    counts = _counts(matrices.numel(), wrong.tolist())
    if not counts.is_exact:
        return Examined(counts, None)
    return Examined(counts, torch.cat([exponent for _, exponent in parts]).view(shape))


def _counts(blocks: int, wrong: list[list[int]]) -> Exactness:
    """Return the counts of a weight of ``blocks`` from those of its matrices."""
    no_power, wide_rows, wide_blocks = (sum(column) for column in zip(*wrong, strict=True))
    by_matrix = tuple(scales + wide for scales, _, wide in wrong)
    is_stack = len(wrong) > 1 and any(by_matrix)
    return Exactness(blocks, no_power, wide_rows, wide_blocks, by_matrix if is_stack else ())


def _examined(scales: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Examine a few whole rows of tiles.

    Returns:
        int64 ``[3]``, counts as in ``Exactness`` without its blocks, and the rows' exponents.
    """
    exponents = scale_exponents(scales, layout)
    no_power = exponents == _NO_POWER
    largest = torch.where(no_power, -_NO_POWER, exponents).amax(-1, keepdim=True)
    too_low = (exponents < largest - SPAN) & ~no_power
    wrong = torch.stack([no_power.sum(), too_low.any(-1).sum(), too_low.sum()])
    lowest = torch.where(no_power, _NO_POWER, exponents).amin(-1)
    return wrong, (lowest.clamp(max=_USUAL + LOWEST) - LOWEST).to(torch.int8)


def scale_exponents(scales: torch.Tensor, layout: str) -> torch.Tensor:
    """Exponents of block scales, -9 to 8, and 127 where a scale is no power of two.

    Args:
        scales: Bytes ``[rows, K/16]`` of E4M3, or of whole rows of tiles in fragments.
        layout: ``"linear"`` or ``"fragments_16x64"``.

    Returns:
        int16 ``[rows, K/16]``, linear.
    """
    if layout == FRAGMENTS:
        rows, blocks = scales.shape
        tiles = scales.view(rows // ROWS, blocks * 16 // COLUMNS, 8, 4, 2)  # [.., l // 4, j, h]
        byte = tiles.permute(0, 4, 2, 1, 3).reshape(rows, blocks).to(torch.int16)
        exponent, low, high = (byte >> 3) - 10, -9, 8
    else:
        byte = scales.to(torch.int16)
        exponent, low, high = (byte >> 3) - 7, -6, 8
    is_power = ((byte & 7) == 0) & (exponent >= low) & (exponent <= high)
    exponents = torch.where(is_power, exponent, _NO_POWER)
    if layout == FRAGMENTS:
        return exponents
    for subnormal, value in ((1, -9), (2, -8), (4, -7)):
        exponents = torch.where(byte == subnormal, value, exponents)
    return exponents


def with_row_exponent(weight: QuantizedTensor) -> tuple[QuantizedTensor, Exactness]:
    """Return the weight with its ``row_exponent`` where it is exact in E4M3, and the counts."""
    examined = examine(weight)
    return replace(weight, row_exponent=examined.row_exponent), examined.exactness


def to_e4m3(weight: QuantizedTensor) -> torch.Tensor:
    """Convert a weight that is exact in E4M3: ``code * block scale / 2 ** row_exponent``.

    Nothing is rounded; -0 stays -0.

    Args:
        weight: NVFP4 with ``row_exponent``, linear or in fragments.

    Returns:
        float8_e4m3fn ``[*batch, N, K]``.

    Raises:
        ValueError: if it has no ``row_exponent``.
    """
    linear, power = _powers(weight)
    values = decode_e2m1(unpack(linear.codes)).unflatten(-1, (-1, 16))
    return (values * power[..., None]).flatten(-2).to(torch.float8_e4m3fn)


def from_e4m3(values: torch.Tensor, weight: QuantizedTensor) -> torch.Tensor:
    """Undo ``to_e4m3``: packed E2M1 codes, linear, from E4M3 numbers.

    Args:
        values: float8_e4m3fn ``[*batch, N, K]``.
        weight: The weight that was converted; its codes are not read.
    """
    _, power = _powers(weight)
    wide = values.to(torch.float32).unflatten(-1, (-1, 16))
    return pack(encode_e2m1(wide / power[..., None]).flatten(-2))


def _powers(weight: QuantizedTensor) -> tuple[QuantizedTensor, torch.Tensor]:
    """The weight, linear, and ``block scale / 2 ** row_exponent``, which are powers of two."""
    if weight.row_exponent is None:
        raise ValueError(f"{weight!r} has no row_exponent, wanted a weight that is exact in E4M3")
    linear = weight.with_layout(LINEAR)
    row = ((weight.row_exponent.to(torch.int32) + 127) << 23).view(torch.float32)
    return linear, linear.scales.to(torch.float32) / row[..., None]
