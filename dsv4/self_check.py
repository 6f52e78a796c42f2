"""Check kernels on the user's GPU before ``"auto"`` uses them there.

Some kernels are compiled for GPUs on which they have never been seen to be right
(``implementations.Implementation.proven``). On such a GPU the first call of a configuration runs
the kernel and the reference implementation on the same operands, the weight as it is and random
activations, and compares them. The verdict decides every later call of the configuration: red, the
kernel is passed over with the reason, which is logged once. Verdicts are kept on disk beside the
compiled kernels, by GPU, driver and versions, so the check runs once per machine.

A configuration is an operator, its implementation, the dtypes, layouts and shapes of its operands
and its options; the number of tokens counts up to the next power of two, because a kernel of many
tokens has other tiles.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4.compilation import sealed_file
from dsv4.compilation.versions import Versions
from dsv4.cute.runtime import cubin_cache
from dsv4.cute.runtime import driver as cuda_driver
from dsv4.quant.elements import decode_e2m1

_MAGIC = b"dsv4chk\n"
_SEED = 0
# Largest error of a row relative to its norm. Both sides add in float32 and round once: bfloat16
# rounds by 2^-9. Codes of 4 bits may differ by a step where a value lies between two of them; a
# wrong scale, tile or layout is off by far more.
_TOLERANCE = {torch.float32: 2.0**-10, torch.bfloat16: 2.0**-6}
_CODES_TOLERANCE = 2.0**-4
# Errors of CUDA that name a capture: cudaErrorStreamCaptureUnsupported and those after it.
_CAPTURE_CODES = range(900, 909)
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_MEMORY_WORDS = re.compile(r"\bCUDA\b.*out of memory")
_CAPTURE_WORDS = re.compile(r"\bCUDA\b.*captur")
_BEFORE_CAPTURE = (
    "it was never seen right on this GPU, and the check of it cannot run while a CUDA graph is "
    "captured; call it once before"
)

_log = logging.getLogger(__name__)
_holding: ContextVar[bool] = ContextVar("dsv4_checking", default=False)
is_checking = _holding.get  # whether this thread runs a check and holds the lock of verdicts
Implement = Callable[..., Any]


@dataclass(frozen=True)
class Configuration:
    """The configuration that a verdict is about.

    Attributes:
        op: The operator.
        implementation: Name of the implementation that is checked.
        operands: Text that stands for the arguments; see ``describe``.
        gpu: Name, compute capability and driver.
    """

    op: str
    implementation: str
    operands: str
    gpu: str

    @property
    def key(self) -> bytes:
        """SHA-256 of the configuration and of the versions of everything that compiles kernels."""
        made_from = [self, Versions.current(), torch.__version__]
        return hashlib.sha256(repr(made_from).encode()).digest()

    @property
    def file_name(self) -> str:
        """Return where the verdict is kept, in the folder of compiled kernels."""
        return f"{self.key.hex()[:32]}.verdict"


@dataclass(eq=False)
class Verdicts:
    """Verdicts of a process: a reason why a configuration is not used, or None.

    Attributes:
        known: By configuration.
        absent: Configurations that ``look_up`` did not find on disk and does not look for again.
        lock: Held while a check runs.
    """

    known: dict[Configuration, str | None] = field(default_factory=dict)
    absent: set[Configuration] = field(default_factory=set)
    lock: Any = field(default_factory=threading.RLock)

    def reason(self, configuration: Configuration, check: Callable[[], str | None]) -> str | None:
        """The verdict: from memory, from disk, or of ``check``, which is then kept."""
        if configuration in self.known:
            return self.known[configuration]
        with self.lock:
            if configuration not in self.known:
                stored = _stored(configuration)
                if stored is None:
                    token = _holding.set(True)
                    try:
                        stored = [check()]
                    finally:
                        _holding.reset(token)
                    _keep(configuration, stored[0])
                self._decide(configuration, stored[0])
        return self.known[configuration]

    def look_up(self, configuration: Configuration, default: str | None = None) -> str | None:
        """Return the verdict that is in memory or on disk, else ``default``."""
        if configuration in self.known:
            return self.known[configuration]
        stored = None if configuration in self.absent else _stored(configuration)
        if stored is None:
            self.absent.add(configuration)
            return default
        return stored[0]

    def replace(self, configuration: Configuration, reason: str | None) -> None:
        """Store a verdict in place of an earlier one."""
        with self.lock:
            _keep(configuration, reason)
            self._decide(configuration, reason)

    def _decide(self, configuration: Configuration, reason: str | None) -> None:
        self.known[configuration] = reason
        if reason is not None:
            _log.error(
                "%s: the kernel %r is wrong on this GPU and is not used: %s",
                configuration.op,
                configuration.implementation,
                reason,
            )


@functools.cache
def verdicts() -> Verdicts:
    """Return the verdicts of this process."""
    return Verdicts()


def _stored(configuration: Configuration) -> list[str | None] | None:
    def decode(file: bytes) -> list[str | None]:
        return [json.loads(sealed_file.decode(_MAGIC, configuration.key, file))["reason"]]

    return cubin_cache.find("", configuration.key, configuration.file_name, decode)


def _keep(configuration: Configuration, reason: str | None) -> None:
    words = json.dumps({"reason": reason}).encode()
    file = sealed_file.encode(_MAGIC, configuration.key, words)
    cubin_cache.keep(configuration.file_name, file)


def unsupported(
    op: str, name: str, args: Any, implement: Implement, reference: Implement
) -> str | None:
    """Return why an implementation that was never seen right on a GPU is not used there, or None.

    The first call of a configuration checks it, which takes about as long as the reference. A call
    without tokens checks nothing, and its kernel computes nothing.

    Args:
        op: The operator, a GEMM; its activations are ``x``.
        name: Name of the implementation.
        args: See ``dispatch.Call``.
        implement: Runs the implementation.
        reference: Runs the reference implementation.
    """
    device = args.x.device
    if args.x.numel() == 0:
        return None
    configuration = Configuration(op, name, describe(args), gpu(device))
    if configuration not in verdicts().known and is_capturing(device):
        return _BEFORE_CAPTURE
    return verdicts().reason(configuration, lambda: check(args, implement, reference))


def known(op: str, name: str, args: Any) -> str | None:
    """The reason of a red verdict that is there already; None for green or no verdict.

    Args:
        op: The operator.
        name: Name of the implementation.
        args: See ``dispatch.Call``.
    """
    if args.x.is_meta:
        return None
    return verdicts().look_up(Configuration(op, name, describe(args), gpu(args.x.device)))


@functools.cache
def gpu(device: torch.device) -> str:
    """Name, compute capability and driver of a GPU, as text."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return str(device.type)
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    return f"{properties.name} {capability} driver {cuda_driver.driver_version()}"


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured, so that no result can be read."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_of_a_capture(error: Exception) -> bool:
    """Return whether CUDA refused a call because some thread captures a graph.

    CUDA reports whether one stream is captured, but not whether any stream of the process is. So
    the error decides: by its code if it has one (PyTorch's errors), else by CUDA's words (errors of
    Triton and of ``dsv4.cute.runtime.driver``).
    """
    code = getattr(error, "error_code", None)
    if isinstance(code, int):
        return code in _CAPTURE_CODES
    return isinstance(error, RuntimeError) and bool(_CAPTURE_WORDS.search(str(error)))


def is_of_memory(error: BaseException) -> bool:
    """Return whether a call failed because the GPU or the host has too little memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    code = getattr(error, "error_code", None)
    if isinstance(code, int):
        return code == _OUT_OF_MEMORY
    return isinstance(error, RuntimeError) and bool(_MEMORY_WORDS.search(str(error)))


def describe(args: Any) -> str:
    """Text for a call's arguments: dtypes, shapes and values; tokens up to a power of two."""
    tokens = args.x.shape[0]
    rounded = 1 << max(0, tokens - 1).bit_length()
    return repr([_described(arg, tokens, rounded) for arg in args])


def _described(arg: Any, tokens: int, rounded: int) -> Any:
    if not isinstance(arg, torch.Tensor):
        return arg
    shape = [rounded if size == tokens and i == 0 else size for i, size in enumerate(arg.shape)]
    return (str(arg.dtype), shape, arg.is_contiguous())


def check(args: Any, implement: Implement, reference: Implement) -> str | None:
    """Compare an implementation with the reference on random activations; what differs, or None.

    Args:
        args: See ``dispatch.Call``. ``x`` is replaced by random values of its dtype and strides.
        implement: Runs the implementation.
        reference: Runs the reference implementation.
    """
    drawn = args._replace(x=random_like(args.x))
    with torch.no_grad():
        try:
            actual = _tensors(implement(drawn))
            if actual[0].is_cuda:  # the device's other streams may be captured
                torch.cuda.current_stream(actual[0].device).synchronize()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if is_of_a_capture(error):
                raise
            return f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        expected = _tensors(reference(drawn))
        return _difference(actual, expected)


def random_like(x: torch.Tensor) -> torch.Tensor:
    """Random activations of the same dtype, shape and strides: normal values, or random bytes."""
    generator = torch.Generator(x.device).manual_seed(_SEED)
    drawn = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    if x.is_floating_point():
        return drawn.copy_(torch.randn(x.shape, generator=generator, device=x.device))
    assert x.dtype == torch.uint8, x.dtype
    return drawn.random_(0, 256, generator=generator)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _difference(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> str | None:
    """Return what differs by more than rounding, or None."""
    for left, right in zip(actual, expected, strict=True):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return (
                f"the result is {left.dtype} {list(left.shape)}, "
                f"wanted {right.dtype} {list(right.shape)}"
            )
    if actual[0].dtype != torch.uint8:
        return _compared(actual[0], expected[0], _TOLERANCE[actual[0].dtype])
    return _compared_codes(actual, expected)


def _compared_codes(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str | None:
    """Compare NVFP4 codes and block scales, these where the reference has written any."""
    codes, scales = zip(actual[:2], expected[:2], strict=True)
    wrong = _compared(_unpacked(codes[0]), _unpacked(codes[1]), _CODES_TOLERANCE)
    if wrong is not None:
        return f"codes: {wrong}"
    left, right = (part.view(torch.float8_e4m3fn).float().flatten() for part in scales)
    written = right != 0
    wrong = _compared(left[written], right[written], _CODES_TOLERANCE)
    return None if wrong is None else f"block scales: {wrong}"


def _unpacked(codes: torch.Tensor) -> torch.Tensor:
    """Values of packed codes, two per byte."""
    return torch.stack([decode_e2m1(codes & 15), decode_e2m1(codes >> 4)], -1).flatten(-2)


def _compared(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str | None:
    left, right = actual.float(), expected.float()
    wrong = int((left.isfinite() != right.isfinite()).sum())
    if wrong:
        return f"{wrong} of {left.numel()} values are finite here and not there"
    error = (left - right).nan_to_num().norm(dim=-1)
    size = right.nan_to_num().norm(dim=-1)
    worst = float((error / size.clamp_min(torch.finfo(torch.float32).tiny)).max())
    if worst > tolerance:
        return f"a row is off by {worst:.3g} of its norm, wanted at most {tolerance:.3g}"
    return None
