"""The parts of one row of the bench: sizes, random inputs, traffic, a judge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4.kv_cache.pages import Pages
from dsv4.quant.formats import FP8_BLOCK, MXFP4, NVFP4, Format, QuantizedTensor

Outputs = tuple[torch.Tensor, ...]
_WIDENED_DTYPES = ("dtype", "out_dtype", "logits_dtype")
_NARROW = (torch.bfloat16, torch.float16, torch.float32)
# E4M3 bytes of 2^-4 to 2^1: block scales of a healthy weight.
_SCALE_BYTES = (0x18, 0x40)


class UsageError(ValueError):
    """A request that does not exist or cannot run; the message says what to write instead."""


@dataclass
class Draw:
    """Random inputs from one seed, made on the device they are used on."""

    seed: int
    device: torch.device
    generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0
    ) -> torch.Tensor:
        """Normal values of standard deviation ``scale``."""
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return (drawn * scale).to(dtype)

    def integers(
        self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        """Uniform integers ``low <= i < high``."""
        return torch.randint(
            low, high, tuple(shape), generator=self.generator, device=self.device, dtype=dtype
        )

    def distinct(self, rows: int, count: int, below: int) -> torch.Tensor:
        """``[rows, count]`` int64, distinct within a row, ``0 <= i < below``."""
        keys = torch.rand((rows, below), generator=self.generator, device=self.device)
        return keys.topk(count, largest=False).indices

    def permutation(self, count: int) -> torch.Tensor:
        """The numbers ``0 .. count - 1`` in random order, int64."""
        return torch.randperm(count, generator=self.generator, device=self.device)

    def quantized(
        self,
        *shape: int,
        format: Format = NVFP4,
        segments: tuple[int, ...] = (),
        mxfp4_cast: bool = False,
    ) -> QuantizedTensor:
        """A quantised matrix of random codes and scales, every part with its own global scale.

        The codes are drawn themselves: a stack of experts of a large model would not fit in memory
        before quantisation.

        Args:
            *shape: ``[*batch, N, K]``.
            format: NVFP4, MXFP4 or FP8 blocks.
            segments: Rows of each part.
            mxfp4_cast: Whether NVFP4 scales are powers of two, one for 32 columns, as of MXFP4
                weights that were converted: then the matrix is exact in FP8.
        """
        columns = shape[-1]
        codes = self.integers(0, 256, format.codes_shape(shape), torch.uint8)
        scales_shape = format.scales_shape(shape)
        if format == FP8_BLOCK:
            codes = torch.where((codes & 0x7F) == 0x7F, 0x38, codes).view(torch.float8_e4m3fn)
        if format in (FP8_BLOCK, MXFP4):
            exponent = self.integers(110, 118, scales_shape, torch.uint8)
            scales = exponent.view(torch.float8_e8m0fnu)
            return QuantizedTensor(codes, scales, None, format)
        assert format == NVFP4, format
        drawn = self.integers(*_SCALE_BYTES, scales_shape, torch.uint8)
        if mxfp4_cast:
            drawn = (drawn[..., ::2] & 0x78).repeat_interleave(2, -1)[..., : scales_shape[-1]]
        scales = drawn.contiguous().view(torch.float8_e4m3fn)
        count = (*shape[:-2], max(1, len(segments)))
        spread = torch.rand(count, generator=self.generator, device=self.device)
        global_scale = (0.5 + spread) * columns**-0.5
        return QuantizedTensor(codes, scales, global_scale, format, segments=segments)


@dataclass(frozen=True)
class Verdict:
    """The comparison of a result with the float64 oracle.

    Attributes:
        match: Whether it is inside its budget.
        error: Largest error of a row relative to the row's norm; None: equal bit for bit.
        message: What is wrong, where and by how much; empty if nothing is.
        ratio: Largest error over what is allowed there; infinite where bits or NaNs are wrong.
    """

    match: bool
    error: float | None = None
    message: str = ""
    ratio: float = 0.0

    def __post_init__(self) -> None:
        if not self.match and self.ratio <= 1:
            object.__setattr__(self, "ratio", float("inf"))


@dataclass(frozen=True)
class Problem:
    """One operator call with random inputs.

    Attributes:
        function: Public function of ``dsv4.ops``.
        args: Its positional arguments.
        kwargs: Its keyword arguments, without ``backend``.
        judge: Compares outputs with those of the float64 oracle.
        reads: Bytes that have to be read, each input that is used once.
        flops: Operations of its GEMMs; 0 where moving data is all there is.
        writes: Bytes that have to be written; None: those of the outputs.
        mutates: Positions in ``args`` of tensors or pages changed in place; outputs too.
        backend: What made the outputs to be judged, for judges that make a difference.
        of_tokens: Positions in ``args`` and names in ``kwargs`` of what has a row for each token;
            if given, some tokens of the one output are judged for all.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    judge: Callable[[Problem, Outputs, Outputs], Verdict]
    reads: int
    flops: int = 0
    writes: int | None = None
    mutates: tuple[int, ...] = ()
    backend: str = "auto"
    of_tokens: tuple[int | str, ...] = ()

    @property
    def tensors(self) -> Outputs:
        """All inputs, used or not; those of pages and of quantised matrices one by one."""
        parts = [_data(arg) for arg in (*self.args, *self.kwargs.values())]
        return _flat([p for p in parts if isinstance(p, (torch.Tensor, QuantizedTensor))])

    @property
    def held(self) -> int:
        """Bytes of all inputs, used or not."""
        return nbytes(*self.tensors)

    def run(self, backend: str = "auto") -> Outputs:
        """Call the operator; its results and the tensors it changed, flat."""
        result = self.function(*self.args, **self.kwargs, backend=backend)
        changed = tuple(_data(self.args[i]) for i in self.mutates)
        return (*_flat(result), *changed)

    def fresh(self) -> Problem:
        """The same call with its own copy of what it changes in place."""
        return self._with_args(lambda i, arg: _copy(arg) if i in self.mutates else arg)

    def widened(self) -> Problem:
        """The same call on float64 inputs; quantised operands and their scales stay as they are."""
        wide = self._with_args(lambda i, arg: widen(arg, copy=i in self.mutates))
        kwargs = {name: _widen_named(name, value) for name, value in self.kwargs.items()}
        return dataclasses.replace(wide, kwargs=kwargs)

    def only(self, tokens: torch.Tensor) -> Problem:
        """The same call for these tokens alone."""
        narrowed = self._with_args(
            lambda i, arg: _rows(arg, tokens) if i in self.of_tokens else arg
        )
        kwargs = {k: _rows(v, tokens) if k in self.of_tokens else v for k, v in self.kwargs.items()}
        return dataclasses.replace(narrowed, kwargs=kwargs)

    def _with_args(self, change: Callable[[int, Any], Any]) -> Problem:
        return dataclasses.replace(self, args=tuple(change(i, a) for i, a in enumerate(self.args)))


@dataclass(frozen=True)
class Case:
    """A named problem size of one operator.

    Attributes:
        op: Operator, as ``dsv4.dispatch`` names it.
        name: Which of the operator's uses in the model; empty if there is only one.
        shape: Names and sizes.
        tokens: Tokens in the batch.
        build: Makes the inputs.
        brief: Whether the main job runs it.
    """

    op: str
    name: str
    shape: dict[str, int]
    tokens: int
    build: Callable[[Draw], Problem]
    brief: bool = True


def nbytes(*values: Any) -> int:
    """Bytes of tensors, quantised matrices and None."""
    total = 0
    for value in values:
        if isinstance(value, QuantizedTensor):
            total += value.nbytes
        elif value is not None:
            total += value.numel() * value.element_size()
    return total


def widen(value: Any, *, copy: bool = False) -> Any:
    """Floating tensors and plain pages in float64; anything else as it is (or a copy of it)."""
    if isinstance(value, torch.Tensor) and value.dtype in _NARROW:
        return value.to(torch.float64)
    if isinstance(value, Pages) and value.data.dtype in _NARROW:
        return dataclasses.replace(value, data=value.data.to(torch.float64))
    return _copy(value) if copy else value


def _widen_named(name: str, value: Any) -> Any:
    if name in _WIDENED_DTYPES and isinstance(value, torch.dtype):
        return torch.float64
    # Scales of quantised activations are float32 by definition.
    stays = ("input_scale", "global_scale", "result_scale", "inv_freq", "parameters")
    return value if name in stays else widen(value)


def _copy(value: Any) -> Any:
    if isinstance(value, Pages):
        return dataclasses.replace(value, data=value.data.clone())
    return value.clone() if isinstance(value, torch.Tensor) else value


def _rows(value: Any, tokens: torch.Tensor) -> Any:
    if isinstance(value, QuantizedTensor):
        codes, scales = value.codes[tokens], value.scales[tokens]
        return dataclasses.replace(value, codes=codes, scales=scales)
    return None if value is None else value[tokens]


def _data(value: Any) -> torch.Tensor:
    return value.data if isinstance(value, Pages) else value


def _flat(result: Any) -> Outputs:
    if result is None:
        return ()
    if isinstance(result, torch.Tensor):
        return (result,)
    if isinstance(result, QuantizedTensor):
        parts = (result.codes, result.scales, result.global_scale)
        return tuple(part for part in parts if part is not None)
    return tuple(part for value in result for part in _flat(value))
