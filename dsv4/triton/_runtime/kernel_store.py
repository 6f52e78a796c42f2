"""Compiled Triton kernels in this package's own store: found by key, compiled by any process.

``keep_images`` puts the store in front of a kernel's compiler. A specialisation that a bundle or
the folder of compiled kernels holds is verified and handed to Triton, which loads and launches it
as if it had compiled it; another one is compiled and kept. Triton's own cache stays behind it.

A ``Request`` is all that a specialisation is compiled from, without tensors and without a GPU, so
that another process can compile it. Its key covers the name of the kernel and the sources of all
Triton kernels of this package, the types and constants of its arguments, options, GPU architecture,
Triton's version and the environment variables that change what Triton compiles.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler import compile as triton_compile
from triton.runtime.jit import JITFunction

from dsv4.compilation import counts, sealed_file
from dsv4.compilation.versions import digest
from dsv4.cute.runtime import cubin_cache
from dsv4.cute.runtime.architectures import EVERY_ARCHITECTURE

_MAGIC = b"dsv4tri\n"
_FORMAT = 2  # of what a file holds: another one is another key
_LENGTHS = 3  # of metadata, PTX and cubin, 8 bytes each
Collector = Callable[["Request"], Any]
_collector: ContextVar[Collector | None] = ContextVar("dsv4_collector", default=None)


@dataclass(frozen=True, eq=False)
class Request:
    """A specialisation of a kernel.

    Attributes:
        module: Where the kernel is defined.
        name: Name of the kernel there.
        signature: Triton's type of each argument, by name.
        constants: Values of constant arguments, by path.
        attrs: Properties of other arguments, for example divisibility, by path.
        options: Options of the compiler.
        target: Backend, architecture and threads of a warp.
        key: SHA-256 of all that the compiled kernel depends on.
    """

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: tuple[str, int, int]
    key: bytes

    @property
    def arch(self) -> str:
        """Name of the architecture, as ``EVERY_ARCHITECTURE`` has it."""
        number = self.target[1]
        return EVERY_ARCHITECTURE.get(divmod(number, 10), f"sm_{number}")


def request_of(
    kernel: Any,
    signature: dict[str, Any],
    constants: dict[tuple[int, ...], Any],
    attrs: dict[tuple[int, ...], Any],
    options: dict[str, Any],
    target: Any,
) -> Request:
    """The request of what ``JITFunction`` is about to compile."""
    where = (target.backend, target.arch, target.warp_size)
    fields = (signature, constants, attrs, options, where)
    key = _key(kernel, *fields)
    return Request(kernel.fn.__module__, kernel.fn.__name__, *fields, key)


def _key(kernel: Any, *fields: Any) -> bytes:
    *types, options, where = fields
    known = {name: value for name, value in options.items() if name != "extern_libs"}
    libraries = [name for name, _ in options.get("extern_libs") or ()]
    source = [_FORMAT, triton.__version__, _source_key(kernel), environment()]
    text = [*source, *map(_text, types), _text(known), libraries, where]
    return hashlib.sha256(repr(text).encode()).digest()


def _source_key(kernel: Any) -> Any:
    """Return what a kernel's code depends on, the same in every process.

    Not Triton's own ``cache_key``: in Triton 3.6 that depends on which kernels were hashed before,
    because it leaves out the constants of functions that were not, so kernels compiled in a worker
    process were not found by the process that launched them.
    """
    if kernel.fn.__module__.startswith("dsv4.triton."):
        return (kernel.fn.__module__, kernel.fn.__qualname__, digest(("triton",)))
    return kernel.cache_key


def _text(value: Any) -> Any:
    """A value as text that is the same in every process."""
    if isinstance(value, dict):
        return sorted((repr(name), _text(part)) for name, part in value.items())
    if isinstance(value, list | tuple):
        return [_text(part) for part in value]
    if hasattr(value, "cache_key"):  # a function as a constant
        return repr(_source_key(value))
    assert " at 0x" not in repr(value), f"{value!r} is another text in every process"
    return repr(value)


def environment() -> list[tuple[str, str]]:
    """Settings of the environment that change what Triton compiles, but for debug information."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    variables = dict(get_cache_invalidating_env_vars())
    variables.pop("TRITON_DISABLE_LINE_INFO", None)
    assembler = os.environ.get("TRITON_PTXAS_PATH")
    return sorted({**variables, **({"ptxas": assembler} if assembler else {})}.items())


@contextlib.contextmanager
def collecting(collector: Collector) -> Iterator[None]:
    """Call ``collector`` in place of the compiler; what it returns is taken for the kernel."""
    token = _collector.set(collector)
    try:
        yield
    finally:
        _collector.reset(token)


def keep_images(kernel: Any) -> None:
    """Make a ``JITFunction`` ask the store of compiled kernels before its compiler."""
    kernel._do_compile = functools.partial(_compiled, kernel)


def _compiled(
    kernel: Any,
    key: Any,
    signature: Any,
    device: Any,
    constexprs: Any,
    options: Any,
    attrs: Any,
    warmup: bool,
) -> Any:
    """Compile or load a kernel; replaces ``JITFunction._do_compile``."""
    arguments = (key, signature, device, constexprs, options, attrs, warmup)
    collector = _collector.get()
    if collector is None and _is_watched():
        return _made(kernel, arguments)
    kernel_cache, _, target, *_ = kernel.device_caches[device]
    request = request_of(kernel, signature, constexprs, attrs, dict(options.__dict__), target)
    if collector is not None:
        kernel_cache[key] = collector(request)
        return kernel_cache[key]
    compiled = _loaded().get((device, request.key)) or stored(request)
    if compiled is not None:
        kernel_cache[key] = compiled
        return compiled
    made = _made(kernel, arguments)
    if made is not None:
        cubin_cache.keep(file_name(request.key), encode(made, request.key))
    return made


def _is_watched() -> bool:
    """Return whether somebody watches or changes what Triton compiles: then it compiles itself."""
    from triton.runtime import _async_compile

    runtime, compilation = knobs.runtime, knobs.compilation
    hooks = (runtime.jit_cache_hook, runtime.jit_post_compile_hook)
    settings = (compilation.override, compilation.dump_ir, compilation.always_compile)
    return bool(
        any(getattr(hook, "calls", hook) for hook in hooks)
        or runtime.add_stages_inspection_hook is not None
        or any(settings)
        or _async_compile.active_mode.get() is not None
    )


def _made(kernel: Any, arguments: tuple[Any, ...]) -> Any:
    with counts.of_this_process().compiling(kernel.fn.__name__):
        return JITFunction._do_compile(kernel, *arguments)


def file_name(key: bytes) -> str:
    """The name of a kernel's file in the folder of compiled kernels."""
    return f"{key.hex()[:32]}.triton"


@functools.cache
def _loaded() -> dict[tuple[int, bytes], CompiledKernel]:
    """Kernels that ``load`` has loaded, by index of the GPU and key."""
    return {}


def load_stored(request: Request, device: torch.device) -> None:
    """Load a kernel of the store on a GPU, so that its first launch does not.

    One that the store does not have is left out.

    Raises:
        RuntimeError: if the driver refuses.
    """
    slot = (device.index, request.key)
    compiled = None if slot in _loaded() else stored(request)
    if compiled is not None:
        with torch.cuda.device(device):
            load(compiled)
        _loaded()[slot] = compiled


def load(kernel: CompiledKernel) -> None:
    """Load a kernel on the current GPU, without a launcher until Triton launches it.

    Triton 3.6 compiles C for each, for a tenth of a second and more.
    """
    if kernel.module is not None:
        return
    active = triton.runtime.driver.active
    with _LOADING:  # another thread would take the replacement for the original
        own, made = vars(active), active.launcher_cls
        had = "launcher_cls" in own
        active.launcher_cls = functools.partial(LateLauncher, made)
        try:
            kernel._init_handles()
        finally:
            if had:
                active.launcher_cls = made
            else:
                del active.launcher_cls


_LOADING = threading.Lock()


class LateLauncher:
    """Triton's launcher of a kernel, made when it is first used."""

    def __init__(self, make: Callable[..., Any], source: Any, metadata: Any) -> None:
        self._make = functools.cache(functools.partial(make, source, metadata))

    def __call__(self, *args: Any) -> Any:
        return self._make()(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make(), name)


def stored(request: Request) -> CompiledKernel | None:
    """The compiled kernel from a bundle or from disk, verified; None if it has to be compiled."""
    file = stored_file(request)
    if file is None:
        return None
    return _kernel(request, sealed_file.decode(_MAGIC, request.key, file))


def stored_file(request: Request) -> bytes | None:
    """The same as the contents of its file."""

    def verified(file: bytes) -> bytes:
        sealed_file.decode(_MAGIC, request.key, file)
        return file

    return cubin_cache.find(request.arch, request.key, file_name(request.key), verified)


def compile_request(request: Request) -> bytes:
    """Compile a specialisation; needs no GPU. Returns the contents of its file."""
    source = _source(request)
    made = triton_compile(source, target=GPUTarget(*request.target), options=request.options)
    return encode(made, request.key)


def _source(request: Request) -> ASTSource:
    function = getattr(importlib.import_module(request.module), request.name)
    kernel = function.kernel or function  # of a ``FastKernel``, or the ``JITFunction`` itself
    return ASTSource(kernel, request.signature, request.constants, request.attrs)


def encode(kernel: CompiledKernel, key: bytes) -> bytes:
    """The contents of a file: what a launch needs, the PTX compressed."""
    metadata = {**kernel.metadata._asdict(), "extern_libs": []}
    words = json.dumps(metadata, default=vars, sort_keys=True).encode()
    parts = (words, zlib.compress(kernel.asm["ptx"].encode()), kernel.asm["cubin"])
    lengths = b"".join(len(part).to_bytes(8, "little") for part in parts)
    return sealed_file.encode(_MAGIC, key, lengths + b"".join(parts))


def parts_of(content: bytes) -> tuple[bytes, bytes, bytes]:
    """Metadata, PTX and cubin of a verified file's content."""
    lengths = [int.from_bytes(content[8 * i : 8 * i + 8], "little") for i in range(_LENGTHS)]
    begin, parts = 8 * _LENGTHS, []
    for length in lengths:
        parts.append(content[begin : begin + length])
        begin += length
    words, ptx, cubin = parts
    return words, zlib.decompress(ptx), cubin


def _kernel(request: Request, content: bytes) -> CompiledKernel:
    """Triton's object of a verified file. Triton reads it from a folder that only we can write."""
    with tempfile.TemporaryDirectory() as folder:
        names = [f"kernel.{ending}" for ending in ("json", "ptx", "cubin")]
        group = {name: str(Path(folder) / name) for name in names}
        for path, part in zip(group.values(), parts_of(content), strict=True):
            Path(path).write_bytes(part)
        return CompiledKernel(_source(request), group, request.key.hex())
