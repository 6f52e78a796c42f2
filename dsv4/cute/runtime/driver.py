"""Loading and launching of compiled kernels through the CUDA driver, with ``ctypes`` alone.

A cubin is loaded once per process, for all GPUs; a launch costs a few microseconds. Nothing here
needs CuTeDSL, so a process whose kernels are on disk starts without importing it. Triton's kernels
are launched with the same pieces (``dsv4.triton._runtime.launcher``).
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsv4.plans.recorder import current_recorder

_MAX_DYNAMIC_SHARED, _LARGE_CLUSTERS = 8, 14  # attributes of a kernel
_PORTABLE_CLUSTER = 8
_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_LAUNCH = 6


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint),
        ("pad", ctypes.c_uint),
        ("value", ctypes.c_uint * 16),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def driver_version() -> int:
    """The CUDA version that the installed driver supports, 13000 for 13.0.

    Raises:
        OSError: if there is no CUDA driver.
        RuntimeError: if it does not say.
    """
    version = ctypes.c_int()
    check(_driver().cuDriverGetVersion(ctypes.byref(version)), "asking for the driver's version")
    return version.value


def launcher() -> Any:
    """The driver's ``cuLaunchKernelEx``."""
    return _driver().cuLaunchKernelEx


def config(*, threads: int, shared_bytes: int, attributes: ctypes.Array[_Attribute]) -> _Config:
    """Make the description of a launch for the driver, without its grid and its stream.

    Args:
        threads: Threads of a block.
        shared_bytes: Dynamic shared memory of a block.
        attributes: Attributes of the launch; the result keeps them alive.
    """
    made = _Config()
    made.block[0:3] = (threads, 1, 1)
    made.shared_bytes = shared_bytes
    made.attributes = attributes
    made.attribute_count = len(attributes)
    return made


def programmatic_launch() -> ctypes.Array[_Attribute]:
    """Attributes of a launch whose blocks may begin before the preceding kernel has ended."""
    attributes = (_Attribute * 1)()
    attributes[0].id = _PROGRAMMATIC_LAUNCH
    attributes[0].value[0] = 1
    return attributes


def no_attributes() -> ctypes.Array[_Attribute]:
    """Attributes of a launch that begins when the preceding kernel has ended."""
    return (_Attribute * 0)()


def need_context(device: int) -> None:
    """Make a GPU's context current if this thread has none, as before anything has used the GPU.

    Args:
        device: Index of the current CUDA device.

    Raises:
        RuntimeError: if the driver refuses.
    """
    driver, context, handle = _driver(), ctypes.c_void_p(), ctypes.c_int()
    check(driver.cuCtxGetCurrent(ctypes.byref(context)), "the current context")
    if context.value is not None:
        return
    check(driver.cuDeviceGet(ctypes.byref(handle), device), f"device {device}")
    check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"device {device}")
    check(driver.cuCtxSetCurrent(context), f"the context of device {device}")


def check(status: int, what: str) -> None:
    """Raise RuntimeError, with the driver's text, unless ``status`` is 0."""
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        message = (text.value or b"unknown error").decode()
        raise RuntimeError(f"{what}: CUDA error {status}, {message}")


class Parameters:
    """Kinds of a kernel's parameters, in order, as ``struct`` writes them: ``"i"``, ``"128s"``."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds
        self.size = struct.calcsize("@" + "".join(kinds))
        self.offsets = [
            struct.calcsize("@" + "".join(kinds[:i]) + "0" + kind[-1])
            for i, kind in enumerate(kinds)
        ]

    def pointers(self, buffer: ctypes.Array[ctypes.c_char]) -> ctypes.Array[ctypes.c_void_p]:
        """Return where each parameter lies in a buffer of ``size`` bytes."""
        start = ctypes.addressof(buffer)
        return (ctypes.c_void_p * len(self.offsets))(*[start + o for o in self.offsets])


_WORDS, _BFLOAT16, _SWIZZLE_128, _PROMOTE_256 = 2, 9, 3, 3
_MAP_BYTES = 128


class Matrix(NamedTuple):
    """The matrix that TMA copies read, without its address.

    Attributes:
        rows: Rows of the matrix. Those beyond are read as zeros.
        columns: Columns of the matrix.
        stride: Elements between rows, 16 bytes or a multiple.
        box_rows: Rows of one copy.
        box_columns: Its columns, at most 256.
        words: Whether an element is a word of 32 bits, as it is in shared memory; else it is
            bfloat16, and 16-byte pieces of 128-byte rows are exchanged there (``SWIZZLE_128B``).
    """

    rows: int
    columns: int
    stride: int
    box_rows: int
    box_columns: int = 64
    words: bool = False


@functools.lru_cache(maxsize=4096)
def tensor_map(address: int, matrix: Matrix) -> bytes:
    """The description by which TMA copies read a matrix, a kernel's parameter.

    It holds numbers alone, so the same ones give the same bytes.

    Args:
        address: A multiple of 16.
        matrix: What lies there.

    Raises:
        RuntimeError: if the driver refuses.
    """
    buffer = (ctypes.c_uint8 * 192)()
    aligned = (ctypes.c_uint8 * _MAP_BYTES).from_buffer(buffer, -ctypes.addressof(buffer) % 64)
    kind, width, swizzle = (_WORDS, 4, 0) if matrix.words else (_BFLOAT16, 2, _SWIZZLE_128)
    sizes = (ctypes.c_uint64 * 2)(matrix.columns, matrix.rows)
    strides = (ctypes.c_uint64 * 1)(width * matrix.stride)
    box = (ctypes.c_uint32 * 2)(matrix.box_columns, matrix.box_rows)
    status = _driver().cuTensorMapEncodeTiled(
        aligned, kind, 2, ctypes.c_void_p(address), sizes, strides, box,
        (ctypes.c_uint32 * 2)(1, 1), 0, swizzle, _PROMOTE_256, 0,
    )  # fmt: skip
    check(status, f"describing {matrix} at {address:#x}")
    return bytes(aligned)


@dataclass(frozen=True)
class Image:
    """A compiled kernel and what its launch needs.

    Attributes:
        cubin: The machine code.
        name: Name of the entry.
        threads: Threads of a block.
        cluster: Blocks of a cluster.
        shared_bytes: Dynamic shared memory of a block.
    """

    cubin: bytes
    name: str
    threads: int
    cluster: int
    shared_bytes: int


class Kernel:
    """A loaded ``Image``."""

    def __init__(self, image: Image) -> None:
        self.image = image
        library, handle = ctypes.c_void_p(), ctypes.c_void_p()
        load = _driver().cuLibraryLoadData
        check(
            load(ctypes.byref(library), image.cubin, None, None, 0, None, None, 0),
            f"loading {image.name}",
        )
        find = _driver().cuLibraryGetKernel
        check(find(ctypes.byref(handle), library, image.name.encode()), f"finding {image.name}")
        self.handle = handle
        self._attributes = (_Attribute * 2)()
        self._attributes[0].id = _CLUSTER_DIMENSION
        self._attributes[0].value[0:3] = (image.cluster, 1, 1)
        self._attributes[1].id = _PROGRAMMATIC_LAUNCH  # the last, which a launch may leave out
        self._attributes[1].value[0] = 1
        self._prepared: dict[int, int] = {}

    def prepare(self, device: int) -> int:
        """Make the kernel ready on the current GPU, once; how many clusters fit it at a time.

        Args:
            device: Index of the current CUDA device.

        Raises:
            RuntimeError: if none fits, or the driver refuses.
        """
        prepared = self._prepared.get(device)
        if prepared is None:
            prepared = self._prepared[device] = self._prepare(device)
        return prepared

    def _prepare(self, device: int) -> int:
        need_context(device)
        driver, name = _driver(), self.image.name
        handle, count = ctypes.c_int(), ctypes.c_int()
        check(driver.cuDeviceGet(ctypes.byref(handle), device), f"device {device}")
        size = ctypes.c_int(self.image.shared_bytes)
        set_attribute = driver.cuKernelSetAttribute
        check(set_attribute(_MAX_DYNAMIC_SHARED, size, self.handle, handle), f"memory of {name}")
        if self.image.cluster > _PORTABLE_CLUSTER:
            allow = set_attribute(_LARGE_CLUSTERS, ctypes.c_int(1), self.handle, handle)
            check(allow, f"clusters of {name}")
        cluster = self.config(self.image.cluster)
        ask = driver.cuOccupancyMaxActiveClusters
        check(ask(ctypes.byref(count), self.handle, ctypes.byref(cluster)), f"clusters of {name}")
        if not count.value:
            raise RuntimeError(f"{name}: no block of {self.image.shared_bytes} bytes fits the GPU")
        return count.value

    def config(self, blocks: int) -> _Config:
        """Launch configuration of the driver for a number of CTAs, without the stream."""
        made = config(
            threads=self.image.threads,
            shared_bytes=self.image.shared_bytes,
            attributes=self._attributes,
        )
        made.grid[0:3] = (blocks, 1, 1)
        return made


class Launch:
    """A launch of a kernel but for its stream and addresses, for one thread at a time.

    The driver receives the offset of each parameter, because it does not keep to C's alignment: one
    that has to lie at a multiple of 64 is preceded by a gap that depends on the GPU.
    """

    def __init__(
        self,
        kernel: Kernel,
        blocks: int,
        kinds: Parameters,
        before: bytes,
        addresses: struct.Struct,
        after: bytes,
        matrices: Sequence[Any] = (),
        describe: Callable[[int, Any], bytes] | None = None,
    ) -> None:
        """Prepare it.

        Args:
            kernel: Made ready on the current GPU.
            blocks: Blocks of the grid.
            kinds: Kinds of the parameters.
            before: Parameters before the addresses, as ``struct`` packs them.
            addresses: Addresses of the kernel's operands.
            after: Parameters after the addresses.
            matrices: What TMA copies read: their tensor maps are the first parameters.
            describe: Makes the tensor map of one of ``matrices`` at an address; by default
                ``tensor_map``, for ``Matrix``.
        """
        described = bytes(_MAP_BYTES * len(matrices))
        packed = described + before + bytes(addresses.size) + after
        self._name, self._matrices = kernel.image.name, tuple(matrices)
        self._describe = describe or tensor_map
        self._described: tuple[int, ...] = ()
        self._buffer = (ctypes.c_char * kinds.size).from_buffer_copy(packed)
        first = len(described) + len(before)
        self._write = functools.partial(addresses.pack_into, self._buffer, first)
        self._config, pointers = kernel.config(blocks), kinds.pointers(self._buffer)
        arguments = (ctypes.byref(self._config), kernel.handle, pointers, None)
        self._start = functools.partial(launcher(), *arguments)

    def begin_late(self) -> None:
        """Make all blocks wait for the end of the preceding kernel before they begin."""
        self._config.attribute_count = 1

    def __call__(
        self, stream: int, pointers: Sequence[int], described: tuple[int, ...] = ()
    ) -> None:
        """Launch on a stream of the GPU that the kernel was made ready on, the current one.

        Args:
            stream: The driver's handle.
            pointers: Addresses that the kernel is given, in its order (``KernelAbi.pointers``).
            described: Addresses of what TMA copies read, in the order of ``matrices``.
        """
        if described and self._described != described:
            maps = b"".join(map(self._describe, described, self._matrices))
            ctypes.memmove(self._buffer, maps, len(maps))
            self._described = described
        self._write(*pointers)
        self._config.stream = stream
        status = self._start()
        if status:
            check(status, f"launching {self._name}")
        recorder = current_recorder()
        if recorder is not None:
            recorder.driver_launched()
