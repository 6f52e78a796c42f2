"""Which implementation of an operator runs, and why.

An implementation is data: a row of ``IMPLEMENTATIONS``. ``"auto"`` takes the first row of the
operator, in table order, whose ``supports`` finds no objection and that yields to none that is
faster. A name given explicitly, by ``backend=``, by ``use_backend`` or by the environment variable
``DSV4_BACKEND``, never falls back: that implementation runs or the call raises with its objection.
Where a row was never seen to be right on the GPU's architecture (``proven``), ``"auto"`` takes it
after a check on that GPU (``dsv4.self_check``); asked for by name it runs, with a warning.

The choice looks at shapes, dtypes, devices and plain arguments, never at tensor contents, so it is
the same inside ``torch.compile`` and CUDA-graph capture.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dsv4 import _support, self_check

AUTO = "auto"
ENVIRONMENT_VARIABLE = "DSV4_BACKEND"


class Call(NamedTuple):
    """One operator call as the dispatcher sees it.

    Attributes:
        op: Name of the operator.
        args: The operator's arguments by name, without ``backend``: the ``NamedTuple`` beside its
            public function, e.g. ``dsv4.ops.gemm.GemmArgs``.
        device: Device of the first tensor argument.
    """

    op: str
    args: Any
    device: torch.device

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability of ``device``, or None when it is not a CUDA device."""
        return _support._capability(self.device) if self.device.type == "cuda" else None


@dataclass(frozen=True)
class Implementation:
    """One way to run one operator.

    Attributes:
        op: Name of the operator.
        name: What the user writes as ``backend=``.
        target: ``"module:function"``, imported when first run. The function takes the operator's
            arguments as one record (``Call.args``), and ``out`` where the operator has it.
        supports: Returns None when it can run the call, otherwise the reason in words.
        yields: Returns None when no later row is faster, otherwise the reason in words.
        waits: Whether it reads tensors on the host, so that no CUDA graph can hold it.
        proven: Compute capabilities on which this project has seen it run right; None where that
            does not depend on the GPU.
    """

    op: str
    name: str
    target: str
    supports: Callable[[Call], str | None]
    yields: Callable[[Call], str | None] = lambda call: None
    waits: bool = False
    proven: frozenset[tuple[int, int]] | None = None

    def is_proven(self, call: Call) -> bool:
        """Whether it was seen right on the GPU of a call."""
        return self.proven is None or call.capability is None or call.capability in self.proven

    def objection(self, call: Call, requested: str) -> str | None:
        """Why it is passed over: it cannot run the call, or ``"auto"`` knows a faster one."""
        return self.supports(call) or (self.yields(call) if requested == AUTO else None)


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found: every candidate in order with its objection, and the choice."""

    op: str
    requested: str
    chosen: str | None
    candidates: tuple[tuple[str, str | None], ...]

    @property
    def reason(self) -> str:
        """Why ``chosen`` was taken, in one sentence."""
        if self.chosen is None:
            return f"nothing can run it: {dict(self.candidates)}"
        if self.requested != AUTO:
            return f"asked for by name ({self.requested!r})"
        refused = [f"{name}: {why}" for name, why in self.candidates if why and name != self.chosen]
        return "; ".join(refused) if refused else "first in the table that supports the call"

    def __str__(self) -> str:
        lines = [f"{self.op} (backend={self.requested!r})"]
        for name, why in self.candidates:
            mark = "->" if name == self.chosen else "  "
            lines.append(f"{mark} {name}: {'supported' if why is None else why}")
        return "\n".join(lines)


Objection = Callable[[Call], "str | None"]


def _anything(call: Call) -> str | None:
    return None


def _reference(row: str, *ops: str, waits: bool = False) -> tuple[Implementation, ...]:
    return tuple(
        Implementation(op, "reference", f"dsv4.reference.{row}:{op}", _anything, waits=waits)
        for op in ops
    )


def _triton(row: str, *ops: str, unless: Objection = _anything) -> tuple[Implementation, ...]:
    def supports(call: Call) -> str | None:
        return _support.triton(call.args, call.device) or unless(call)

    return tuple(Implementation(op, "triton", f"dsv4.triton.{row}:{op}", supports) for op in ops)


def _cute_grouped(
    module: str, name: str, supports: Objection, *ops: str, proven: frozenset[tuple[int, int]]
) -> tuple[Implementation, ...]:
    return tuple(
        Implementation(op, name, f"dsv4.cute.{module}:{op}", supports, proven=proven) for op in ops
    )


def _packed_triton(call: Call) -> str | None:
    return _support.packed(call) or _support.triton(call.args, call.device)


_ON_HOPPER = frozenset({(9, 0)})
_NOWHERE: frozenset[tuple[int, int]] = frozenset()
_GROUPED = ("grouped_gemm", "grouped_gemm_swiglu", "grouped_gemm_swiglu_quantize")
_NORM = ("rms_norm", "rms_norm_pair", "head_norm_rope_", "rms_norm_quantize")
_MOE = ("moe_permute", "moe_gather", "moe_sort", "moe_gather_quantize", "moe_combine")
_HYPER_QUANTIZE = ("hc_pre_norm_quantize", "hc_post_pre_norm_quantize")
_KV_CACHE = ("write_kv", "read_kv", "fake_quantize_kv", "norm_rope_write_kv")

# Rows of one operator stand in the order in which "auto" tries them: fastest first, reference last.
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *_triton(
        "quantize",
        "quantize_nvfp4",
        "quantize_mxfp4",
        "quantize_fp8_block",
        unless=_support.quantized,
    ),
    *_triton("dequantize", "dequantize", unless=_support.quantized),
    *_reference("quantize", "quantize_nvfp4", "quantize_mxfp4", "quantize_fp8_block", "dequantize"),
    Implementation(
        "gemm", "tcgen05", "dsv4.cute.gemm_nvfp4:gemm", _support.tcgen05, proven=_NOWHERE
    ),
    Implementation("gemm", "cute", "dsv4.cute.gemm:gemm", _support.cute_gemm, proven=_ON_HOPPER),
    Implementation("gemm", "cublas", "dsv4.triton.gemm:gemm", _packed_triton),
    Implementation("gemm", "scaled_mm", "dsv4.blas.gemm:gemm", _support.scaled_mm, proven=_NOWHERE),
    *_triton("gemm_fp8", "gemm", unless=_support.fp8_gemm),
    *_reference("gemm", "gemm"),
    Implementation(
        "gemm_swiglu",
        "tcgen05",
        "dsv4.cute.gemm_nvfp4:gemm_swiglu",
        _support.tcgen05,
        proven=_NOWHERE,
    ),
    Implementation(
        "gemm_swiglu", "cute", "dsv4.cute.gemm:gemm_swiglu", _support.cute_gemm, proven=_ON_HOPPER
    ),
    Implementation("gemm_swiglu", "parts", "dsv4.triton.gemm_swiglu:gemm_swiglu", _support.parts),
    *_reference("gemm_swiglu", "gemm_swiglu"),
    *_cute_grouped(
        "grouped_nvfp4", "tcgen05", _support.tcgen05_grouped, *_GROUPED, proven=_NOWHERE
    ),
    *_cute_grouped("grouped_gemm", "cute", _support.cute_grouped, *_GROUPED, proven=_ON_HOPPER),
    *_reference("grouped_gemm", *_GROUPED, waits=True),
    *_triton("norm", *_NORM, unless=_support.norm),
    *_reference("norm", *_NORM),
    *_triton("rope", "rope_tables", "rope", "rope_quantize", unless=_support.rope),
    *_reference("rope", "rope_tables", "rope", "rope_quantize"),
    *_triton("swiglu", "swiglu", "swiglu_quantize", unless=_support.swiglu),
    *_reference("swiglu", "swiglu", "swiglu_quantize"),
    *_triton("router", "route_topk", "route_hash", unless=_support.wide_result),
    *_reference("router", "route_topk", "route_hash"),
    *_triton("moe", *_MOE, unless=_support.moe),
    *_reference("moe", *_MOE),
    *_triton(
        "hyper_connection",
        "hc_pre",
        "hc_post",
        "hc_head",
        "hc_pre_norm",
        "hc_post_pre_norm",
        unless=_support.not_four_streams,
    ),
    *_reference(
        "hyper_connection", "hc_pre", "hc_post", "hc_head", "hc_pre_norm", "hc_post_pre_norm"
    ),
    *_triton("hyper_connection", *_HYPER_QUANTIZE, unless=_support.hyper_quantize),
    *_reference("hyper_connection", *_HYPER_QUANTIZE),
    *_triton("compressor", "pool_windows"),
    *_triton("compressor", "compressor_update", unless=_support.compressor_state),
    *_triton("compressor", "compress_write", unless=_support.compress_write),
    *_reference("compressor", "pool_windows", "compressor_update", "compress_write"),
    *_triton("indexer", "indexer_rotate_quantize", "indexer_queries"),
    *_triton("indexer", "quantize_index_queries", unless=_support.index_queries),
    Implementation(
        "indexer_select",
        "cute",
        "dsv4.cute.indexer:indexer_select",
        _support.cute_indexer,
        _support.only_triton,
    ),
    *_triton("indexer", "indexer_select", unless=_support.index_pages),
    *_reference("indexer", "indexer_rotate_quantize", "indexer_queries", "indexer_select"),
    *_reference("indexer", "quantize_index_queries"),
    Implementation(
        "sparse_attention",
        "cute",
        "dsv4.cute.attention:sparse_attention",
        _support.cute_attention,
    ),
    *_triton("attention", "sparse_attention", unless=_support.attention),
    *_reference("attention", "sparse_attention"),
    *_triton("slots", "entry_slots", "prefix_slots", "window_slots"),
    *_reference("slots", "entry_slots", "prefix_slots", "window_slots"),
    *_triton("kv_cache", *_KV_CACHE, unless=_support.kv_pages),
    *_reference("kv_cache", *_KV_CACHE),
)

# What ``os.environ`` keeps its variables in, where there is such a thing, and the name there.
_ENVIRONMENT: Any = getattr(os.environ, "_data", os.environ)
_VARIABLE: Any = ENVIRONMENT_VARIABLE
if _ENVIRONMENT is not os.environ:
    _VARIABLE = os.environ.encodekey(ENVIRONMENT_VARIABLE)
_override: ContextVar[str] = ContextVar("dsv4_backend", default=AUTO)
_explaining: ContextVar[bool] = ContextVar("dsv4_explaining", default=False)


class _Explained(Exception):  # noqa: N818  (control flow, not an error)
    def __init__(self, call: Call, requested: str) -> None:
        super().__init__(call.op)
        self.call = call
        self.requested = requested


@functools.cache
def implementations(op: str) -> tuple[Implementation, ...]:
    """Rows of one operator in the order in which ``"auto"`` tries them.

    Raises:
        KeyError: if no row has that operator.
    """
    rows = tuple(row for row in IMPLEMENTATIONS if row.op == op)
    if not rows:
        raise KeyError(f"no operator named {op!r}; known: {', '.join(operators())}")
    return rows


@functools.cache
def operators() -> tuple[str, ...]:
    """Names of all operators, in table order."""
    return tuple(dict.fromkeys(row.op for row in IMPLEMENTATIONS))


@functools.cache
def _load(target: str) -> Callable[..., Any]:
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)


def requested_backend(backend: str = AUTO) -> str:
    """The name that decides: the argument, else ``use_backend``, else ``DSV4_BACKEND``."""
    if backend != AUTO:
        return backend
    override = _override.get()
    if override != AUTO:
        return override
    # Whether it is there is asked first: os.environ itself would raise and catch a KeyError.
    return os.environ[ENVIRONMENT_VARIABLE] if _VARIABLE in _ENVIRONMENT else AUTO


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Ask for an implementation by name for every operator called inside the block.

    An operator that has no such implementation, or whose implementation objects, raises.
    """
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def choose(call: Call, backend: str = AUTO) -> Implementation:
    """Pick the implementation that runs ``call``.

    Raises:
        ValueError: if ``backend`` names no implementation of the operator.
        NotImplementedError: if the named implementation, or every one, objects; with the reasons.
    """
    requested = requested_backend(backend)
    rows = implementations(call.op)
    if requested != AUTO:
        rows = tuple(row for row in rows if row.name == requested)
        if not rows:
            known = ", ".join(row.name for row in implementations(call.op))
            raise ValueError(
                f"{call.op}: backend is {requested!r}, wanted 'auto' or one of {known}"
            )
    return _first(rows, call, requested)


def _first(rows: Sequence[Implementation], call: Call, requested: str) -> Implementation:
    """The first row that runs a call.

    Raises:
        NotImplementedError: with the reason of each, if none does.
    """
    reasons = []
    for row in rows:
        reason = row.objection(call, requested) or _unproven(row, call, requested)
        if reason is None:
            return row
        reasons.append(f"{row.name}: {reason}")
    raise NotImplementedError(f"{call.op}: " + "; ".join(reasons))


def _unproven(row: Implementation, call: Call, requested: str) -> str | None:
    """Why ``"auto"`` does not take a row on a GPU where it was never seen right, or None."""
    if row.is_proven(call):
        return None
    if requested != AUTO:
        _warn_unproven(row.op, row.name, call.capability)
        return None
    reference = implementations(row.op)[-1]
    return self_check.unsupported(
        row.op, row.name, call.args, _load(row.target), _load(reference.target)
    )


def _known_wrong(row: Implementation, call: Call, requested: str) -> str | None:
    """What an earlier check found wrong; None where there was none, which calls will make up."""
    if row.is_proven(call) or requested != AUTO:
        return None
    return self_check.known(row.op, row.name, call.args)


@functools.cache
def _warn_unproven(op: str, name: str, capability: tuple[int, int] | None) -> None:
    found = "None" if capability is None else ".".join(map(str, capability))
    warnings.warn(
        f"{op}: the implementation {name!r} was never seen right on compute capability "
        f"{found}, and asked for by name it is not checked; backend='auto' checks it first",
        RuntimeWarning,
        stacklevel=2,
    )


def run(op: str, args: Any, backend: str = AUTO, out: torch.Tensor | None = None) -> Any:
    """Run an operator.

    Args:
        op: Its name.
        args: Its arguments, see ``Call.args``.
        backend: Name of an implementation, or ``"auto"``.
        out: Takes the first result, for operators that can be told (``_library.define_out``).
    """
    call = Call(op, args, _device(args))
    if _explaining.get():
        raise _Explained(call, requested_backend(backend))
    implementation = _load(choose(call, backend).target)
    return implementation(args) if out is None else implementation(args, out=out)


def is_free(backend: str) -> bool:
    """Whether ``"auto"`` decides, and the call is made to run."""
    chosen = backend != AUTO or _override.get() != AUTO or _VARIABLE in _ENVIRONMENT
    return not (chosen or _explaining.get())


def implementation(op: str, args: Any) -> Callable[..., Any]:
    """What ``"auto"`` gives a call to; ``args`` as in ``Call``."""
    return _load(choose(Call(op, args, _device(args))).target)


def wait_of(call: Call) -> str | None:
    """Why the implementation that ``"auto"`` takes waits for the host, or None if it does not."""
    found = _explanation(call, AUTO)
    row = next(row for row in implementations(call.op) if row.name == found.chosen)
    return f"{call.op} runs as {row.name!r} ({found.reason})" if row.waits else None


def first(op: str, args: Any) -> Any:
    """Run the implementation that ``"auto"`` takes, whatever was asked for by name.

    For implementations that are made of other operators; ``args`` as in ``Call``.
    """
    call = Call(op, args, _device(args))
    return _load(_first(implementations(op), call, AUTO).target)(args)


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say which implementation a call would run and why every other one would not; runs nothing.

    Args:
        op: A public function of ``dsv4.ops``, e.g. ``dsv4.ops.gemm``.
        *args: What it would be called with.
        **kwargs: Likewise.

    Raises:
        ValueError: if ``op`` calls no operator.
    """
    found = _caught(op, args, kwargs)
    return _explanation(found.call, found.requested)


def arguments(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """The operator call that a public function would make; runs nothing.

    Its ``args`` is what every implementation of the operator takes.

    Args:
        op: A public function of ``dsv4.ops``, e.g. ``dsv4.ops.gemm``.
        *args: What it would be called with.
        **kwargs: Likewise.

    Raises:
        ValueError: if ``op`` calls no operator.
    """
    return _caught(op, args, kwargs).call


def _caught(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Explained:
    token = _explaining.set(True)
    try:
        op(*args, **kwargs)
    except _Explained as found:
        return found
    finally:
        _explaining.reset(token)
    raise ValueError(f"{op!r} called no dsv4 operator")


def _explanation(call: Call, requested: str) -> Explanation:
    candidates = tuple(
        (row.name, row.objection(call, requested) or _known_wrong(row, call, requested))
        for row in implementations(call.op)
    )
    wanted = [name for name, why in candidates if why is None and requested in (AUTO, name)]
    return Explanation(call.op, requested, wanted[0] if wanted else None, candidates)


def _device(args: Sequence[Any]) -> torch.device:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device
    return torch.device("cpu")
