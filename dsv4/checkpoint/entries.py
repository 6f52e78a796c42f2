"""Group the tensors of a checkpoint that belong together, and recognise their formats.

The format of each matrix is decided by its dtype and companions (specification, section 11.5),
because the producers disagree about which matrices are quantised, and config.json does not say.

=====================  ====================================================  ==================
weight                 companions                                            format
=====================  ====================================================  ==================
U8                     weight_scale E4M3, weight_scale_2, [input_scale]      NVFP4 (ModelOpt)
U8                     weight_scale E4M3, weight_scale_2, [input_scale_2]    NVFP4 (AMD Quark)
U8 ``weight_packed``   weight_scale E4M3, weight_global_scale, [input_...]   NVFP4, reciprocals
I8 or U8               scale E8M0                                            MXFP4
F8_E4M3                scale or weight_scale[_inv], E8M0, F32, BF16 or F16   FP8, 128x128 blocks
float, I64, I32        none                                                  plain
=====================  ====================================================  ==================
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from dsv4.checkpoint import names
from dsv4.checkpoint.problems import Problem, raise_all
from dsv4.checkpoint.shards import DTYPE_NAMES, CheckpointError, Reading, Shards, TensorInfo
from dsv4.quant.formats import FP8_BLOCK, MXFP4, NVFP4, Format, QuantizedTensor

_PLAIN = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
)
_BLOCK_SCALES = ("weight_scale", "scale", "weight_scale_inv")
_INPUT_SCALES = ("input_scale", "input_scale_2", "input_global_scale")
_COMPANIONS = (*_BLOCK_SCALES, "weight_scale_2", "weight_global_scale", *_INPUT_SCALES)
_WEIGHTS = ("weight", "weight_packed")
# Dtypes of FP8 block scales that are widened to float32, which has all their values.
_WIDENED = (torch.bfloat16, torch.float16)
MTP_COPY = "copies of the embedding or head under mtp, which share the main model's"
CACHE_SCALE = "scales of a quantised KV cache, whose formats here need none"


@dataclass(frozen=True)
class Entry:
    """One logical tensor of a checkpoint: a plain tensor, or codes with their scales.

    Attributes:
        name: Canonical name.
        weight: The plain tensor or the codes.
        format: None for a plain tensor.
        scales: Block scales.
        global_scale: Scalar global scale of the weight, as stored.
        input_scale: Scalar global scale of the activation, as stored.
        reciprocal: Whether the stored global scales divide (compressed-tensors).
        shards: Files to read from.
    """

    name: str
    weight: TensorInfo
    shards: Shards
    format: Format | None = None
    scales: TensorInfo | None = None
    global_scale: TensorInfo | None = None
    input_scale: TensorInfo | None = None
    reciprocal: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        if self.format is None or not self.format.packed:
            return self.weight.shape
        return (*self.weight.shape[:-1], 2 * self.weight.shape[-1])

    @property
    def scale_dtype(self) -> torch.dtype | None:
        """Dtype of the block scales in memory, None for a plain tensor."""
        if self.scales is None:
            return None
        return torch.float32 if self.scales.dtype in _WIDENED else self.scales.dtype

    @property
    def input_scale_name(self) -> str:
        """The name of the activation's global scale in the file, whether it exists or not."""
        if self.input_scale is not None:
            return self.input_scale.name
        last = "input_global_scale" if self.reciprocal else "input_scale"
        return f"{self.weight.name.rpartition('.')[0]}.{last}"

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        parts = (self.weight, self.scales, self.global_scale, self.input_scale)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def _is_stack(self) -> bool:
        return self.format is None and len(self.weight.shape) == 3

    @property
    def kind(self) -> str:
        """The format's name, or the dtype of a plain tensor, for messages."""
        return DTYPE_NAMES[self.weight.dtype] if self.format is None else self.format.name

    def readings(self, *, input_scale: bool = False) -> Iterator[Reading]:
        """Yield what ``read`` reads, in its order.

        Args:
            input_scale: Whether ``read_input_scale`` is called after it.
        """
        for part in (self.weight, self.scales, self.global_scale):
            if part is not None:
                yield Reading(part)
        if input_scale and self.input_scale is not None:
            yield Reading(self.input_scale)

    def matrix_readings(self) -> Iterator[Reading]:
        """Yield what ``matrices`` reads, in its order."""
        for number in range(self.weight.shape[0]):
            yield Reading(self.weight, number)

    def check_readings(self) -> Iterator[Reading]:
        """Yield what ``check_values`` reads, in its order."""
        if self._is_stack:
            yield from self.matrix_readings()
        else:
            yield from self.readings(input_scale=True)

    def read(self, device: torch.device | str = "cpu") -> torch.Tensor | QuantizedTensor:
        """Read the values to ``device``, as a copy.

        Raises:
            CheckpointError: if a scale or a plain value is NaN or infinite, or a global scale is
                not above 0.
        """
        weight = self.shards.read(self.weight, device)
        if self.format is None:
            self._check_plain(weight)
            return weight
        assert self.scales is not None
        # A view, because a cast destroys E8M0 bytes and 4-bit codes (pitfalls 33 and 35).
        weight = weight.view(self.format.codes_dtype)
        self._check_codes(weight)
        scales = self.shards.read(self.scales, device)
        self._check_scales(scales)
        if scales.dtype in _WIDENED:
            scales = scales.float()
        scale = None if self.global_scale is None else self._scalar(self.global_scale, device)
        return QuantizedTensor(weight, scales, scale, self.format)

    def matrices(self, device: torch.device | str = "cpu") -> Iterator[torch.Tensor]:
        """Yield the matrices of a plain stack ``[E, N, K]``, as ``read`` gives the stack.

        A stack of experts has up to 34 GB; one matrix at a time is held.

        Raises:
            CheckpointError: if a value is NaN or infinite.
        """
        assert self.format is None
        for number in range(self.weight.shape[0]):
            matrix = self.shards.read(self.weight, device, number)
            self._check_plain(matrix, number)
            yield matrix

    def read_input_scale(self, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """Read the activation's global scale, float32 ``[1]``, which multiplies; None if unknown.

        compressed-tensors writes exactly 1.0 for a matrix that saw no calibration data: this means
        unknown, not an amax of 2688.

        Raises:
            CheckpointError: if it is not finite and above 0.
        """
        if self.input_scale is None:
            return None
        value = self._scalar(self.input_scale, device)
        return None if self.reciprocal and bool(value == 1.0) else value

    def check_values(self) -> None:
        """Read everything once and raise CheckpointError where ``read`` would."""
        if self._is_stack:
            for _ in self.matrices():
                pass
        else:
            self.read()
        self.read_input_scale()

    def _scalar(self, info: TensorInfo, device: torch.device | str) -> torch.Tensor:
        value = self.shards.read(info, "cpu").reshape(1)
        number = value.item()
        if not 0 < number < math.inf:
            raise CheckpointError(f"{info} is {number}, wanted a finite value above 0")
        # 1/x of a denormal or of a huge x is no usable scale.
        out = value.reciprocal() if self.reciprocal else value
        if self.reciprocal and not 0 < out.item() < math.inf:
            raise CheckpointError(f"{info} is {number}, whose reciprocal is {out.item()}")
        return out.to(device)

    # Each check is one pass, if possible without a temporary of the tensor's size: embedding and
    # head of a published model have 1 to 2 GB. Only a tensor that fails is searched.

    def _check_scales(self, scales: torch.Tensor) -> None:
        assert self.scales is not None
        if scales.dtype in (torch.float32, *_WIDENED):
            low, high = _range(scales)
            if not (low >= 0 and high < float("inf")):
                self._complain(self.scales, ~(torch.isfinite(scales) & (scales >= 0)))
            return
        data = scales.view(torch.uint8)
        last = 0xFE if scales.dtype == torch.float8_e8m0fnu else 0x7E
        if _range(data)[1] <= last:
            return
        # E4M3 has a sign, which no scale uses, but -0 is harmless.
        harmless = data == (0x80 if last == 0x7E else 0)
        self._complain(self.scales, (data > last) & ~harmless)

    def _check_codes(self, codes: torch.Tensor) -> None:
        if codes.dtype == torch.float8_e4m3fn:
            magnitude = codes.view(torch.uint8) & 0x7F
            if _range(magnitude)[1] == 0x7F:
                self._complain(self.weight, magnitude == 0x7F)

    def _check_plain(self, values: torch.Tensor, number: int | None = None) -> None:
        if not values.is_floating_point():
            return
        low, high = _range(values)
        # A sink of -inf means a head without sink; NaN or +inf would destroy every token.
        lowest = low >= -float("inf") if self.name.endswith(".sinks") else low > -float("inf")
        if not (lowest and high < float("inf")):
            bad = ~torch.isfinite(values)
            if self.name.endswith(".sinks"):
                bad &= values != -float("inf")
            self._complain(self.weight, bad, number)

    def _complain(self, info: TensorInfo, bad: torch.Tensor, number: int | None = None) -> None:
        if bool(bad.any()):
            kind = "NaN, infinite or negative" if info is self.scales else "NaN or infinite"
            where = torch.nonzero(bad)[0].tolist()
            matrix = "" if number is None else f", matrix {number},"
            raise CheckpointError(
                f"{info}{matrix} holds {int(bad.sum())} values that are {kind}, the first at "
                f"{where}, wanted finite ones"
            )


def _range(values: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and largest value; NaN if there is one; zeros without values."""
    if values.numel() == 0:
        return 0.0, 0.0
    low, high = torch.aminmax(values)
    return low.item(), high.item()


@dataclass
class Grouped:
    """The tensors of a checkpoint, grouped to entries.

    Attributes:
        entries: Logical tensors by canonical name.
        stray: Names of tensors that belong to no known entry.
        unused: Names of known tensors without effect here, by the reason.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    stray: list[str] = field(default_factory=list)
    unused: dict[str, list[str]] = field(default_factory=dict)


def group(tensors: Mapping[str, TensorInfo], shards: Shards) -> Grouped:
    """Group the tensors of a checkpoint to entries.

    Raises:
        CheckpointError: listing every tensor with two spellings, and every matrix whose tensors do
            not fit together.
    """
    out = Grouped()
    parts: dict[str, dict[str, TensorInfo]] = {}
    problems: list[Problem] = []
    matrices: dict[str, str | None] = {}
    for name, info in tensors.items():
        reason = _unused(name)
        if reason is not None:
            out.unused.setdefault(reason, []).append(name)
            continue
        canonical, last = _part_of(name, matrices)
        if canonical is None:
            out.stray.append(name)
            continue
        other = parts.setdefault(canonical, {}).setdefault(last, info)
        if other is not info:
            text = f"{other} and {info} are both {_logical(canonical, last)}, wanted one of them"
            problems.append(Problem("in two spellings", text))
    for canonical, members in parts.items():
        weights = [members[last] for last in _WEIGHTS if last in members]
        if not weights:
            out.stray += [info.name for info in members.values()]
            continue
        try:
            companions = {k: v for k, v in members.items() if k not in _WEIGHTS}
            out.entries[canonical] = _entry(canonical, weights, companions, shards)
        except CheckpointError as error:
            problems.append(Problem("matrices", str(error)))
    raise_all("the tensors do not fit together", problems)
    out.stray.sort()
    return out


def _unused(name: str) -> str | None:
    """Return why a known tensor has no effect here; None if it has one, or is unknown."""
    if name.endswith("_scale") and names.is_cache_scale(name):
        return CACHE_SCALE
    return MTP_COPY if names.is_mtp_copy(name) else None


def _part_of(name: str, matrices: dict[str, str | None]) -> tuple[str | None, str]:
    """Return the canonical name of a tensor's entry, or None, and the tensor's role in it.

    ``matrices`` caches the result for a stem, because up to four tensors share one.
    """
    stem, _, last = name.rpartition(".")
    if last in _WEIGHTS or last in _COMPANIONS:
        if stem not in matrices:
            matrices[stem] = names.canonical(f"{stem}.weight")
        matrix = matrices[stem]
        if matrix is not None:
            return matrix, last
    return names.canonical(name), "weight"


def _logical(canonical: str, last: str) -> str:
    return canonical if last == "weight" else f"{canonical.removesuffix('.weight')}.{last}"


def _entry(
    name: str, weights: list[TensorInfo], parts: dict[str, TensorInfo], shards: Shards
) -> Entry:
    if len(weights) > 1:
        raise CheckpointError(f"{weights[0]} and {weights[1]}: wanted one weight")
    info = weights[0]
    packed = info.name.endswith(".weight_packed")
    scale_names = [last for last in _BLOCK_SCALES if last in parts]
    if not packed and not scale_names and info.dtype in _PLAIN:
        # Quantisers that do not quantise a matrix may still store its input scale.
        stray = [str(p) for last, p in parts.items() if last not in _INPUT_SCALES]
        if stray:
            raise CheckpointError(f"{info} is plain, but has {', '.join(stray)}")
        return Entry(name, info, shards)
    if len(scale_names) != 1:
        scale_list = ", ".join(scale_names) or "none"
        raise CheckpointError(
            f"{info} needs one tensor of block scales ({', '.join(_BLOCK_SCALES)}), "
            f"found {scale_list}"
        )
    scales = parts[scale_names[0]]
    fmt = _format(info, scales, packed)
    entry = Entry(
        name,
        info,
        shards,
        fmt,
        scales,
        _part(parts, "weight_global_scale" if packed else "weight_scale_2", fmt, info),
        _input_scale(parts, packed, info),
        packed,
    )
    _check_entry(entry)
    return entry


def _format(info: TensorInfo, scales: TensorInfo, packed: bool) -> Format:
    nibbles = info.dtype in (torch.uint8, torch.int8)
    if nibbles and scales.dtype == torch.float8_e4m3fn and info.dtype == torch.uint8:
        return NVFP4
    if nibbles and scales.dtype == torch.float8_e8m0fnu and not packed:
        return MXFP4
    fp8_scales = (*FP8_BLOCK.scale_dtypes, *_WIDENED)
    if info.dtype == torch.float8_e4m3fn and scales.dtype in fp8_scales and not packed:
        return FP8_BLOCK
    raise CheckpointError(
        f"{info} with {scales}: wanted U8 with F8_E4M3 scales (NVFP4), I8 with F8_E8M0 (MXFP4) "
        "or F8_E4M3 with F8_E8M0, F32, BF16 or F16 (FP8)"
    )


def _part(
    parts: dict[str, TensorInfo], last: str, fmt: Format, info: TensorInfo
) -> TensorInfo | None:
    if not fmt.has_global_scale:
        return None
    if last not in parts:
        raise CheckpointError(f"{info} is {fmt.name} but has no {last}")
    return parts[last]


def _input_scale(parts: dict[str, TensorInfo], packed: bool, info: TensorInfo) -> TensorInfo | None:
    """Return the activation's global scale: a reciprocal with packed weights, else a factor."""
    names_of = ("input_global_scale",) if packed else ("input_scale", "input_scale_2")
    input_scales = [parts[last] for last in _INPUT_SCALES if last in parts]
    if len(input_scales) > 1:
        raise CheckpointError(
            f"{info} has {input_scales[0]} and {input_scales[1]}, wanted one input scale"
        )
    other = [last for last in _INPUT_SCALES if last in parts and last not in names_of]
    if other:
        raise CheckpointError(f"{info} has {input_scales[0]}, wanted {' or '.join(names_of)}")
    return input_scales[0] if input_scales else None


def _check_entry(entry: Entry) -> None:
    assert entry.format is not None
    assert entry.scales is not None
    if len(entry.weight.shape) < 2:
        raise CheckpointError(f"{entry.weight}: wanted a matrix")
    block = entry.format.block[1]
    if entry.format.packed and entry.shape[-1] % block:
        raise CheckpointError(
            f"{entry.weight}: {entry.shape[-1]} columns, wanted a multiple of {block}"
        )
    scales_shape = entry.format.scales_shape(entry.shape)
    if entry.scales.shape != scales_shape:
        raise CheckpointError(
            f"{entry.scales}: wanted shape {list(scales_shape)} beside {entry.weight}"
        )
    for info in (entry.global_scale, entry.input_scale):
        if info is None:
            continue
        if info.dtype != torch.float32 or info.shape not in ((), (1,)):
            raise CheckpointError(f"{info}: wanted one F32 value")
