"""Number formats and the container of a quantised matrix.

A format is data (``Format``); a quantised matrix is codes, block scales and at most one kind of
global scale (``QuantizedTensor``). Scales always **multiply**::

    value = code * block scale * global scale

Scale values and layouts are in ``dsv4.quant.scales``. Formulas: specification, section 11.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from dsv4.quant import fragments
from dsv4.quant.elements import mxfp4_as_nvfp4
from dsv4.quant.fragments import fragment_columns, linear_columns
from dsv4.quant.scales import (
    e8m0_from_bytes,
    e8m0_to_float,
    expert_tiles,
    scale_offset,
    scales_to_float,
    swizzle_expert_scales,
    swizzle_scales,
    swizzled_size,
    unswizzle_expert_scales,
    unswizzle_scales,
)

__all__ = [
    "FORMATS",
    "FP8_BLOCK",
    "FP8_TOKEN",
    "FRAGMENTS",
    "LAYOUTS",
    "LINEAR",
    "MXFP4",
    "NVFP4",
    "SWIZZLED",
    "SWIZZLED_EXPERTS",
    "Conversion",
    "Format",
    "QuantizedTensor",
    "cat_rows",
    "check_positive",
    "e8m0_from_bytes",
    "e8m0_to_float",
    "expand_segments",
    "expert_tiles",
    "format_named",
    "from_compressed_tensors",
    "invert_global_scale",
    "mxfp4_to_nvfp4",
    "scale_offset",
    "scales_to_float",
    "swizzle_expert_scales",
    "swizzle_scales",
    "swizzled_size",
    "to_compressed_tensors",
    "unswizzle_expert_scales",
    "unswizzle_scales",
]

E2M1_MAX = 6.0
E4M3_MAX = 448.0
LINEAR = "linear"
SWIZZLED = "swizzled_128x4"
FRAGMENTS = "fragments_16x64"
# Of rows sorted by expert: no operator takes it, because it means nothing without their offsets.
SWIZZLED_EXPERTS = "swizzled_128x4_experts"
LAYOUTS = (LINEAR, SWIZZLED, FRAGMENTS)


@dataclass(frozen=True)
class Format:
    """A number format: what the bytes of a quantised matrix are.

    Attributes:
        name: ``"nvfp4"``, ``"mxfp4"`` or ``"fp8_block"``; of activations ``"fp8_token"``.
        element: ``"e2m1"`` (4 bits, two per byte, low nibble = even column) or ``"e4m3"``.
        block: Rows and columns that share one block scale.
        scale_dtypes: Allowed dtypes of the block scales, the preferred one first.
        has_global_scale: Whether a float32 global scale multiplies on top.
    """

    name: str
    element: str
    block: tuple[int, int]
    scale_dtypes: tuple[torch.dtype, ...]
    has_global_scale: bool

    @functools.cached_property
    def packed(self) -> bool:
        """Return whether two codes share a byte."""
        return self.element == "e2m1"

    @property
    def codes_dtype(self) -> torch.dtype:
        """Dtype of the codes: uint8 (two 4-bit codes) or float8_e4m3fn."""
        return torch.uint8 if self.packed else torch.float8_e4m3fn

    @property
    def element_max(self) -> float:
        """Largest magnitude of one code: 6 or 448."""
        return E2M1_MAX if self.packed else E4M3_MAX

    def codes_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the codes of a matrix of logical shape ``[*batch, N, K]``.

        Raises:
            ValueError: if K is not a whole number of blocks of a 4-bit format.
        """
        *batch, rows, columns = shape
        if self.packed and columns % self.block[1]:
            raise ValueError(
                f"{self.name}: {columns} columns, wanted a multiple of {self.block[1]}"
            )
        return (*batch, rows, columns // 2 if self.packed else columns)

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the linear block scales of a matrix of logical shape ``[*batch, N, K]``."""
        *batch, rows, columns = shape
        high, wide = self.block
        return (*batch, -(-rows // high), -(-columns // wide))


NVFP4 = Format("nvfp4", "e2m1", (1, 16), (torch.float8_e4m3fn,), True)
MXFP4 = Format("mxfp4", "e2m1", (1, 32), (torch.float8_e8m0fnu,), False)
FP8_BLOCK = Format("fp8_block", "e4m3", (128, 128), (torch.float8_e8m0fnu, torch.float32), False)
FORMATS: dict[str, Format] = {f.name: f for f in (NVFP4, MXFP4, FP8_BLOCK)}
# Of activations: each row has scales of its own. No weight is stored in it: it is none of FORMATS.
FP8_TOKEN = Format("fp8_token", "e4m3", (1, 128), (torch.float8_e8m0fnu,), False)
ALL_FORMATS: dict[str, Format] = {**FORMATS, FP8_TOKEN.name: FP8_TOKEN}


def format_named(value: Format | str, formats: Mapping[str, Format] = FORMATS) -> Format:
    """The format itself, or the one of that name.

    Args:
        value: A format or its name.
        formats: Formats by name, those of weights unless others are named.

    Raises:
        ValueError: if no format has that name.
    """
    if isinstance(value, Format):
        return value
    if value not in formats:
        raise ValueError(f"format is {value!r}, wanted one of {', '.join(map(repr, formats))}")
    return formats[value]


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedTensor:
    """A quantised matrix, or a batch of them, of logical shape ``[*batch, N, K]``.

    Attributes:
        codes: uint8 ``[*batch, N, K/2]`` for 4-bit formats, else float8_e4m3fn ``[*batch, N, K]``.
        scales: Block scales. Linear: ``[*batch, N, K/16]`` float8_e4m3fn (NVFP4), ``[*batch, N,
            K/32]`` float8_e8m0fnu (MXFP4), ``[*batch, ceil(N/128), ceil(K/128)]`` float8_e8m0fnu
            or float32 (FP8). Swizzled: ``[*batch, bytes]``, see ``swizzle_scales``. Fragments:
            uint8 ``[*batch, N, K/16]``, see ``dsv4.quant.fragments``; the codes are moved too.
        global_scale: float32 ``[*batch, G]`` or None. It multiplies. G is 1, the number of
            ``segments``, or N (one per row).
        format: The number format.
        layout: ``"linear"``, ``"swizzled_128x4"`` (scales moved) or ``"fragments_16x64"`` (codes
            and scales moved for Hopper's tensor cores, NVFP4 only; of ``"fp8_token"`` the columns
            as weights in that layout have them). Of a result for others also
            ``"swizzled_128x4_experts"``, see ``swizzle_expert_scales``; no operator takes it.
        segments: Row counts that sum to N, one global scale each; ``()`` is one segment. A fused
            matrix keeps the global scale of each part: their maximum would mis-scale the others.
        row_exponent: int8 ``[*batch, N]``, or None. It is there only if every value but for global
            scales is exactly an E4M3 number times ``2 ** row_exponent`` of its row, see
            ``dsv4.quant.exact_fp8``. It changes no value.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None
    format: Format
    layout: str = LINEAR
    segments: tuple[int, ...] = ()
    row_exponent: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return its fields: what else it keeps holds for these tensors in this process."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __repr__(self) -> str:
        return (
            f"QuantizedTensor({self.format.name}, shape={list(self.shape)}, layout={self.layout!r},"
            f" segments={self.segments}, device={self.device})"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape ``[*batch, N, K]``."""
        *most, width = self.codes.shape
        return (*most, width * 2 if self.format.packed else width)

    @property
    def rows(self) -> int:
        """N."""
        return self.codes.shape[-2]

    @property
    def columns(self) -> int:
        """K."""
        return self.codes.shape[-1] * (2 if self.format.packed else 1)

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales, global scales and rows' exponents."""
        present = (self.codes, self.scales, self.global_scale, self.row_exponent)
        return sum(t.numel() * t.element_size() for t in present if t is not None)

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same matrix on ``device``."""
        moved = None if self.global_scale is None else self.global_scale.to(device)
        exponent = None if self.row_exponent is None else self.row_exponent.to(device)
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            global_scale=moved,
            row_exponent=exponent,
        )

    def __getitem__(self, index: int) -> QuantizedTensor:
        """Return one entry of the first batch axis.

        Raises:
            IndexError: if there is no batch axis, or no such entry.
        """
        if self.codes.dim() < 3:
            raise IndexError(f"{self!r} has no batch axis to index")
        scale = None if self.global_scale is None else self.global_scale[index]
        exponent = None if self.row_exponent is None else self.row_exponent[index]
        return replace(
            self,
            codes=self.codes[index],
            scales=self.scales[index],
            global_scale=scale,
            row_exponent=exponent,
        )

    def with_layout(self, layout: str) -> QuantizedTensor:
        """The same matrix, bit for bit, in ``layout``.

        Raises:
            ValueError: if a layout is unknown, or not one of the format's, or the matrix is not a
                whole number of its tiles, or (fragments) a block scale is negative.
        """
        for name in (layout, self.layout):
            check_layout(self.format, name)
        if layout == self.layout:
            return self
        if self.format == FP8_TOKEN:
            order = fragment_columns if layout == FRAGMENTS else linear_columns
            return replace(self, codes=order(self.codes), layout=layout)
        if self.layout == FRAGMENTS:
            codes, scales = fragments.unpack(self.codes, self.scales)
            linear = replace(self, codes=codes, scales=scales, layout=LINEAR)
            return linear.with_layout(layout)
        if layout == FRAGMENTS:
            linear = self.with_layout(LINEAR)
            codes, scales = fragments.pack(linear.codes, linear.scales)
            return replace(self, codes=codes, scales=scales, layout=FRAGMENTS)
        if layout == SWIZZLED:
            scales = swizzle_scales(self.scales)
        else:
            rows, columns = self.format.scales_shape(self.shape)[-2:]
            scales = unswizzle_scales(self.scales, rows, columns)
        return replace(self, scales=scales, layout=layout)

    def row_scale(self) -> torch.Tensor:
        """Global scale of every row, float32 ``[*batch, N]``; ones for a format without one."""
        if self.global_scale is None:
            return torch.ones(self.codes.shape[:-1], dtype=torch.float32, device=self.device)
        return expand_segments(self.global_scale, self.segments, self.rows)

    def validate(self, *, check_values: bool = False) -> QuantizedTensor:
        """Check dtypes and shapes, and with ``check_values`` the scales; returns itself.

        Args:
            check_values: Also require finite global scales above zero and block scales without
                NaN. This reads the scales back to the host.

        Raises:
            TypeError: if a dtype is not the format's.
            ValueError: if a shape does not fit, or a scale is not finite or not above zero.
        """
        _ = self.valid_shape
        if check_values:
            check_scale_values(self)
        return self

    @functools.cached_property
    def valid_shape(self) -> tuple[int, ...]:
        """``shape``, of a value that passed ``validate``: its checks take longer than a GEMM."""
        _check_storage(self)
        _check_global_scale(self)
        _check_row_exponent(self)
        return self.shape


def _check_storage(q: QuantizedTensor) -> None:
    name = q.format.name
    if q.codes.dtype != q.format.codes_dtype:
        raise TypeError(f"{name}: codes have dtype {q.codes.dtype}, wanted {q.format.codes_dtype}")
    moved = q.layout == FRAGMENTS and q.format == NVFP4
    scale_dtypes = (torch.uint8,) if moved else q.format.scale_dtypes
    if q.scales.dtype not in scale_dtypes:
        dtypes = " or ".join(map(str, scale_dtypes))
        raise TypeError(f"{name}: scales have dtype {q.scales.dtype}, wanted {dtypes}")
    if q.codes.dim() < 2:
        raise ValueError(f"{name}: codes have shape {list(q.codes.shape)}, wanted [..., N, bytes]")
    check_layout(q.format, q.layout)
    shape = q.shape
    q.format.codes_shape(shape)
    if q.format == FP8_TOKEN:
        check_token_columns(q.layout, shape[-1])
    wanted_shape = q.format.scales_shape(shape)
    if q.layout == SWIZZLED:
        wanted_shape = (*wanted_shape[:-2], swizzled_size(*wanted_shape[-2:]))
    if tuple(q.scales.shape) != wanted_shape:
        raise ValueError(
            f"{name}: scales have shape {list(q.scales.shape)}, wanted {list(wanted_shape)} "
            f"for a {q.layout} matrix of shape {list(shape)}"
        )
    devices = {t.device for t in (q.codes, q.scales, q.global_scale) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"{name}: parts are on {sorted(map(str, devices))}, wanted one device")


def _check_global_scale(q: QuantizedTensor) -> None:
    name = q.format.name
    if q.segments and sum(q.segments) != q.rows:
        raise ValueError(f"{name}: segments {q.segments} sum to {sum(q.segments)}, not {q.rows}")
    if (q.global_scale is not None) != q.format.has_global_scale:
        wants = "a" if q.format.has_global_scale else "no"
        raise ValueError(f"{name}: wanted {wants} global scale, found {q.global_scale}")
    if q.global_scale is None:
        return
    if q.global_scale.dtype != torch.float32:
        raise TypeError(f"{name}: global_scale has dtype {q.global_scale.dtype}, wanted float32")
    *batch, count = q.global_scale.shape or (0,)
    counts = (len(q.segments),) if q.segments else (1, q.rows)
    if tuple(batch) != tuple(q.codes.shape[:-2]) or count not in counts:
        shapes = " or ".join(str([*q.codes.shape[:-2], c]) for c in counts)
        raise ValueError(
            f"{name}: global_scale has shape {list(q.global_scale.shape)}, wanted {shapes}"
        )


def _check_row_exponent(q: QuantizedTensor) -> None:
    exponent = q.row_exponent
    if exponent is None:
        return
    name = q.format.name
    if exponent.dtype != torch.int8:
        raise TypeError(f"{name}: row_exponent has dtype {exponent.dtype}, wanted int8")
    if q.format != NVFP4 or exponent.shape != q.codes.shape[:-1] or exponent.device != q.device:
        raise ValueError(
            f"{name}: row_exponent has shape {list(exponent.shape)} on {exponent.device}, wanted "
            f"that of the rows of an nvfp4 matrix, {list(q.codes.shape[:-1])} on {q.device}"
        )


def check_layout(fmt: Format, layout: str) -> None:
    """Raise ValueError unless ``fmt`` can have its scales in ``layout``."""
    if layout == SWIZZLED_EXPERTS:
        raise ValueError(
            f"layout is {layout!r}, which means nothing without the experts' offsets: "
            "dsv4.quant.formats.unswizzle_expert_scales makes its scales linear"
        )
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, wanted one of {', '.join(map(repr, LAYOUTS))}")
    if layout == SWIZZLED and not fmt.packed:
        raise ValueError(f"layout is {SWIZZLED!r}, wanted 'linear': {fmt.name} has no swizzled one")
    if layout == FRAGMENTS and fmt not in (NVFP4, FP8_TOKEN):
        raise ValueError(f"layout is {FRAGMENTS!r}, wanted 'linear': only nvfp4 weights have it")


def check_token_columns(layout: str, columns: int) -> None:
    """Raise ValueError unless rows in ``"fp8_token"`` can have their columns in ``layout``."""
    if layout == FRAGMENTS and columns % FP8_TOKEN.block[1]:
        raise ValueError(
            f"{FP8_TOKEN.name}: {columns} columns, wanted a multiple of {FP8_TOKEN.block[1]} for "
            f"layout {layout!r}"
        )


def check_scale_layout(fmt: Format, layout: str) -> None:
    """Raise ValueError unless what quantises can write scales of ``fmt`` in ``layout``."""
    if layout == FRAGMENTS and fmt != FP8_TOKEN:
        raise ValueError(
            f"layout is {layout!r}, wanted 'linear' or {SWIZZLED!r}: that one is for weights, "
            "QuantizedTensor.with_layout makes it"
        )
    check_layout(fmt, layout)


def check_scale_values(q: QuantizedTensor) -> None:
    """Raise ValueError if a global scale is not finite and above 0, or a block scale is NaN."""
    if q.global_scale is not None:
        check_positive("global_scale", q.global_scale)
    wide = scales_to_float(q.with_layout(LINEAR).scales if q.layout == FRAGMENTS else q.scales)
    bad = ~torch.isfinite(wide) | (wide < 0)
    if bool(bad.any()):
        raise ValueError(
            f"{q.format.name}: {int(bad.sum())} block scales are NaN, infinite or negative, "
            f"the first at {torch.nonzero(bad)[0].tolist()}"
        )


def check_positive(name: str, scale: torch.Tensor) -> None:
    """Raise ValueError unless every entry of ``scale`` is finite and above 0 (reads the values)."""
    bad = ~(torch.isfinite(scale) & (scale > 0))
    if bool(bad.any()):
        where = torch.nonzero(bad)[0].tolist()
        number = float(scale[tuple(where)])
        raise ValueError(f"{name} is {number} at {where}, wanted finite values above 0")


def expand_segments(global_scale: torch.Tensor, segments: Sequence[int], rows: int) -> torch.Tensor:
    """Global scale of every row: ``[*batch, G]`` to ``[*batch, rows]``.

    G is 1, ``len(segments)`` (entry i covers ``segments[i]`` consecutive rows) or ``rows``.
    """
    batch = global_scale.shape[:-1]
    if segments:
        parts = [global_scale[..., i : i + 1].expand(*batch, n) for i, n in enumerate(segments)]
        return torch.cat(parts, -1)
    return global_scale.expand(*batch, rows)


def _cat_bytes(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    if tensors[0].element_size() != 1:
        return torch.cat(list(tensors), dim)
    return torch.cat([t.contiguous().view(torch.uint8) for t in tensors], dim).view(
        tensors[0].dtype
    )


def cat_rows(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Stack matrices of one format on the row axis; every part keeps its own global scale.

    The result is in fragments if all parts are, and swizzled if all are and all but the last have
    whole blocks of 128 rows, else linear. It has one segment per part (or per segment of a part),
    or one global scale per row if any part has that. Nothing is rescaled: the values are bitwise
    the parts'. It has ``row_exponent`` if all parts do.

    Raises:
        ValueError: if the list is empty, or formats, scale dtypes, columns or batch shapes differ,
            or an inner part of a format with 128-row blocks is not a multiple of 128 rows.
    """
    if not parts:
        raise ValueError("parts is empty, wanted at least one matrix")
    layout = parts[0].layout
    blocks = layout != SWIZZLED or all(part.rows % 128 == 0 for part in parts[:-1])
    if not blocks or any(part.layout != layout for part in parts):
        layout = LINEAR
    parts = [part.with_layout(layout) for part in parts]
    first = parts[0]
    for part in parts:
        same = (part.format, part.columns, part.codes.shape[:-2], part.scales.dtype)
        expected = (first.format, first.columns, first.codes.shape[:-2], first.scales.dtype)
        if same != expected:
            raise ValueError(f"parts differ: {part!r} beside {first!r}")
    high = first.format.block[0]
    if any(part.rows % high for part in parts[:-1]):
        rows = [part.rows for part in parts]
        raise ValueError(f"parts have {rows} rows, wanted multiples of {high} before the last")
    global_scale, segments = _cat_global(parts)
    exponents = [p.row_exponent for p in parts if p.row_exponent is not None]
    return QuantizedTensor(
        _cat_bytes([p.codes for p in parts], -2),
        _cat_bytes([p.scales for p in parts], -1 if layout == SWIZZLED else -2),
        global_scale,
        first.format,
        layout,
        segments,
        torch.cat(exponents, -1) if len(exponents) == len(parts) else None,
    )


def _cat_global(parts: Sequence[QuantizedTensor]) -> tuple[torch.Tensor | None, tuple[int, ...]]:
    scales = [p.global_scale for p in parts if p.global_scale is not None]
    if not scales:
        return None, ()
    if any(not p.segments and s.shape[-1] != 1 for p, s in zip(parts, scales, strict=True)):
        return torch.cat([p.row_scale() for p in parts], -1), ()
    segments = [n for p in parts for n in (p.segments or (p.rows,))]
    return torch.cat(scales, -1), tuple(segments) if len(segments) > 1 else ()


def from_compressed_tensors(
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
) -> QuantizedTensor:
    """A compressed-tensors NVFP4 matrix with a global scale that multiplies.

    compressed-tensors stores ``2688 / amax`` and divides by it (specification, section 11.4); here
    the scale multiplies, so it is inverted in float32, once. ``input_global_scale`` needs the same
    (``invert_global_scale``).

    Args:
        packed: ``weight_packed``, uint8 ``[*batch, N, K/2]``.
        scale: ``weight_scale``, float8_e4m3fn ``[*batch, N, K/16]``.
        global_scale: ``weight_global_scale``, float32 ``[*batch, 1]`` or ``[]``.

    Raises:
        TypeError: if a dtype differs.
        ValueError: if a shape does not fit or the global scale is not finite and above 0.
    """
    inverted = invert_global_scale(global_scale)
    return QuantizedTensor(packed, scale, inverted, NVFP4).validate()


def to_compressed_tensors(q: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(weight_packed, weight_scale, weight_global_scale)`` with the reciprocal global scale.

    Raises:
        ValueError: if the matrix is not NVFP4 with one global scale.
    """
    if q.format != NVFP4 or q.global_scale is None or q.global_scale.shape[-1] != 1:
        raise ValueError(f"{q!r}, wanted NVFP4 with one global scale")
    return q.codes, q.with_layout(LINEAR).scales, invert_global_scale(q.global_scale)


def invert_global_scale(scale: torch.Tensor) -> torch.Tensor:
    """``1 / scale`` in float32, between the dividing and the multiplying convention; ``[]`` to [1].

    Raises:
        TypeError: if the dtype is not float32.
        ValueError: if a value is not finite and above 0.
    """
    if scale.dtype != torch.float32:
        raise TypeError(f"global_scale has dtype {scale.dtype}, wanted float32")
    if not scale.is_meta:
        check_positive("global_scale", scale)
    return (scale if scale.dim() else scale.reshape(1)).reciprocal()


@dataclass(frozen=True)
class Conversion:
    """The values that ``mxfp4_to_nvfp4`` changed.

    Attributes:
        inexact: Bool ``[*batch, N, K/32]``: blocks whose values changed.
    """

    inexact: torch.Tensor

    @property
    def count(self) -> int:
        """Number of blocks whose values changed."""
        return int(self.inexact.sum())

    @property
    def exact(self) -> bool:
        """Return whether every value is bitwise the same."""
        return not bool(self.inexact.any())

    def __str__(self) -> str:
        blocks = self.inexact.numel()
        if self.exact:
            return f"all {blocks} blocks exact"
        return (
            f"{self.count} of {blocks} blocks rounded: more than 2^17 below the largest scale of "
            "their matrix, outside the range of E4M3"
        )


def mxfp4_to_nvfp4(q: QuantizedTensor) -> tuple[QuantizedTensor, Conversion]:
    """MXFP4 to NVFP4, bitwise the same values wherever the exponents allow.

    With kmax the largest exponent of a matrix's blocks that hold a non-zero code, the global scale
    is 2^(kmax-8) and each block of 32 becomes two of 16 with block scale 2^(k-kmax+8)
    (specification, section 11.5). E4M3 holds the powers 2^-9 to 2^8, so blocks with k < kmax - 17
    are rounded to nearest even at scale 2^-9, and those that changed are named in the report;
    nothing is clipped. Blocks of zeros get a scale in that range and stay zero, sign included. A
    NaN scale (byte 255) becomes a NaN scale.

    Args:
        q: MXFP4, any layout.

    Returns:
        NVFP4 (linear) with ``[*batch, 1]`` global scales, and the report. The codes are those of
        ``q``, not a copy, if none had to change.

    Raises:
        ValueError: if ``q`` is not MXFP4.
    """
    if q.format != MXFP4:
        raise ValueError(f"{q!r}, wanted mxfp4")
    linear = q.validate().with_layout(LINEAR)
    codes, scales, global_scale, inexact = mxfp4_as_nvfp4(linear.codes, linear.scales)
    return QuantizedTensor(codes, scales, global_scale, NVFP4), Conversion(inexact)
