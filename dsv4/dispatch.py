"""Choose which implementation of an operator runs, and explain why.

An implementation is data: a row of ``IMPLEMENTATIONS``. ``"auto"`` takes the first row of the
operator, in table order, for which ``supports`` returns no reason against it and no later row is
faster. A name given explicitly, by ``backend=``, by ``use_backend`` or by the environment variable
``DSV4_BACKEND``, never falls back: that implementation runs or the call raises with the reason.
The functions that a row names are imported when they are first needed, so this module imports no
backend. Where a row was never seen to be right on the GPU's architecture (``proven``), ``"auto"``
takes it after a check on that GPU, of the family (``dsv4.self_test``) or of each configuration
(``dsv4.self_check``); requested by name it runs, with a warning.

The choice looks at shapes, dtypes, devices and plain arguments, never at tensor contents, so it is
the same inside ``torch.compile`` and CUDA-graph capture.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dsv4 import self_check, self_test
from dsv4.device import capability

AUTO = "auto"
ENVIRONMENT_VARIABLE = "DSV4_BACKEND"


class Call(NamedTuple):
    """An operator call as the dispatcher sees it.

    Attributes:
        op: Name of the operator.
        args: The operator's arguments by name, without ``backend``: the ``NamedTuple`` beside its
            public function, e.g. ``dsv4.ops.gemm.GemmArgs``. The first one is a tensor.
        device: Device of the first tensor argument.
    """

    op: str
    args: Any
    device: torch.device

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability of ``device``, or None when it is not a CUDA device."""
        return capability(self.device) if self.device.type == "cuda" else None

    @property
    def is_meta(self) -> bool:
        """Whether tensors have no data, as where kernels are listed; ``device`` may be a GPU."""
        return next(iter(self.args)).is_meta


@dataclass(frozen=True)
class Implementation:
    """A way to run an operator: one row of the table.

    Attributes:
        op: Name of the operator.
        name: What the user writes as ``backend=``.
        target: ``"module:function"``, imported when first run. The function takes the operator's
            arguments as one record (``Call.args``), and ``out`` where the operator has it.
        supports: ``"module:function"``, which takes a ``Call`` and returns None when the
            implementation can run it, otherwise the reason; None: it runs every call.
        slower_than_later: ``"module:function"``, which returns None when no later row is faster,
            otherwise the reason; None: none ever is.
        waits: Whether it reads tensors on the host, so that no CUDA graph can hold it.
        proven: Compute capabilities on which this project has seen it run right; None where that
            does not depend on the GPU.
        proven_calls: ``"module:function"``, which says of a ``Call`` whether ``proven`` speaks of
            it; None: of every call.
        self_test: ``"module:function"``, a ``self_test.Test`` that decides on other GPUs; None:
            each configuration is checked on its own operands.
        reserves_sms: Whether the function takes ``reserve_sms``.
        note: ``"module:function"``, which says of a ``Call`` in a sentence what else a user should
            know, or returns None. ``explain`` alone asks it, so it may read tensors.
    """

    op: str
    name: str
    target: str
    supports: str | None = None
    slower_than_later: str | None = None
    waits: bool = False
    proven: frozenset[tuple[int, int]] | None = None
    proven_calls: str | None = None
    self_test: str | None = None
    reserves_sms: bool = False
    note: str | None = None

    def is_proven(self, call: Call) -> bool:
        """Return whether calls of this kind were seen right on the GPU of a call."""
        if self.proven is None or call.capability is None:
            return True
        if call.capability not in self.proven:
            return False
        return self.proven_calls is None or _named(self.proven_calls)(call)

    def is_always_proven(self, capability: tuple[int, int]) -> bool:
        """Return whether every call was seen right on GPUs of a compute capability."""
        return self.proven is None or (capability in self.proven and self.proven_calls is None)

    def run(self, args: Any) -> Any:
        """Run it on an operator's arguments, whether or not it supports them."""
        return _load(self.target)(args)

    def unsupported_reason(self, call: Call, requested: str | None = None) -> str | None:
        """Return why it cannot run a call, or None.

        With ``requested`` ``"auto"``, a reason is also that a later row is faster.
        """
        reason = None if self.supports is None else _reason(self.supports)(call)
        return self.slower_reason(call, requested) if reason is None else reason

    def slower_reason(self, call: Call, requested: str | None) -> str | None:
        """Return why ``"auto"`` passes over it although it can run a call, or None."""
        if requested != AUTO or self.slower_than_later is None:
            return None
        return _reason(self.slower_than_later)(call)


@dataclass(frozen=True)
class Explanation:
    """The result of ``explain``: every candidate in order, why it is not taken, and the choice.

    Attributes:
        op: Name of the operator.
        requested: Requested implementation, or ``"auto"``.
        chosen: Name of the implementation that would run.
        candidates: Names of all, and why each is not taken.
        note: What else to know of how the chosen one runs the call.
        mark: How well the chosen kernel is known on the GPU, see ``self_test.mark``; None where it
            does not depend on one.
    """

    op: str
    requested: str
    chosen: str | None
    candidates: tuple[tuple[str, str | None], ...]
    note: str | None = None
    mark: str | None = None

    @property
    def reason(self) -> str:
        """Return why ``chosen`` was taken, in one sentence."""
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
            if name == self.chosen:
                lines += [f"     {said}" for said in (self.note, self._marked()) if said]
        return "\n".join(lines)

    def _marked(self) -> str | None:
        return self.mark and f"on GPUs like this one: {self.mark}"


_ON_HOPPER = frozenset({(9, 0)})
_NOWHERE: frozenset[tuple[int, int]] = frozenset()
_SELF_TEST = "dsv4.bench.self_test:wrong"


def _reference(module: str, *ops: str, waits: bool = False) -> tuple[Implementation, ...]:
    assert ops, f"{module}: name its operators"
    return tuple(
        Implementation(op, "reference", f"dsv4.reference.{module}:{op}", waits=waits) for op in ops
    )


def _triton(
    module: str,
    supports: str,
    *ops: str,
    slower_than_later: str | None = None,
    proven: frozenset[tuple[int, int]] = _ON_HOPPER,
    proven_calls: str | None = None,
    note: str | None = None,
) -> tuple[Implementation, ...]:
    """Make rows for the operators of one module of Triton kernels."""
    assert ops, f"{module}: name its operators"
    check = f"dsv4.triton.supports:{supports}"
    slower = slower_than_later and f"dsv4.triton.supports:{slower_than_later}"
    return tuple(
        Implementation(
            op,
            "triton",
            f"dsv4.triton.{module}:{op}",
            check,
            slower,
            proven=proven,
            proven_calls=proven_calls and f"dsv4.triton.supports:{proven_calls}",
            self_test=_SELF_TEST,
            note=note,
        )
        for op in ops
    )


def _cute(
    name: str,
    module: str,
    supports: str,
    *ops: str,
    slower_than_later: str | None = None,
    proven: frozenset[tuple[int, int]] | None = None,
    reserves_sms: bool = False,
    note: str | None = None,
) -> tuple[Implementation, ...]:
    """Make rows for operators of one module of CuTeDSL launchers."""
    slower = slower_than_later and f"dsv4.cute.supports:{slower_than_later}"
    check = f"dsv4.cute.supports:{supports}"
    return tuple(
        Implementation(
            op,
            name,
            f"dsv4.cute.{module}:{op}",
            check,
            slower,
            proven=proven,
            reserves_sms=reserves_sms,
            note=note,
        )
        for op in ops
    )


def _over_ranks(
    op: str, name: str, target: str, supports: str, slower_than_later: str | None = None
) -> Implementation:
    """Make the row of an operator that sums over the ranks of a group."""
    slower = slower_than_later and f"dsv4.parallel.supports:{slower_than_later}"
    return Implementation(op, name, f"dsv4.{target}", f"dsv4.parallel.{supports}", slower)


def _reduced(op: str) -> tuple[Implementation, ...]:
    """Make the rows of an operator that goes on with a sum over ranks."""
    return (
        _over_ranks(op, "push", f"triton.all_reduce:{op}", "supports:push_rows", "push_is_slower"),
        _over_ranks(op, "parts", f"parallel.all_reduce:{op}", "supports:parts"),
    )


def _fp8(
    module: str, supports: str, op: str, slower_than_later: str, *, reserves_sms: bool = False
) -> Implementation:
    """Make the row of an operator whose GEMM FP8 tensor cores run, on Hopper."""
    return Implementation(
        op,
        "fp8",
        f"dsv4.cute.{module}:{op}",
        f"dsv4.cute.fp8_supports:{supports}",
        f"dsv4.cute.fp8_supports:{slower_than_later}",
        proven=_ON_HOPPER,
        reserves_sms=reserves_sms,
    )


_FP8_AS_BF16 = "dsv4.ops.fp8_note:multiplied_as_bfloat16"
_GROUPED = ("grouped_gemm", "grouped_gemm_swiglu", "grouped_gemm_swiglu_quantize")
_HYPER = ("hc_pre", "hc_post", "hc_head", "hc_pre_norm", "hc_post_pre_norm")
_HYPER_QUANTIZE = ("hc_pre_norm_quantize", "hc_post_pre_norm_quantize")
_SLOTS = ("entry_slots", "prefix_slots", "window_slots")
_VERIFY = ("verify_greedy", "verify_sampled", "draw_draft")

# Rows of one operator stand in the order in which "auto" tries them: fastest first, reference last.
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *_triton("quantize", "quantize_nvfp4", "quantize_nvfp4"),
    *_triton("quantize", "quantize_blocks", "quantize_mxfp4", "quantize_fp8_block"),
    *_triton("quantize_fp8_token", "quantize_blocks", "quantize_fp8_token"),
    *_triton("dequantize", "dequantize", "dequantize"),
    *_reference("quantize", "quantize_nvfp4", "quantize_mxfp4", "quantize_fp8_block", "dequantize"),
    *_reference("quantize", "quantize_fp8_token"),
    *_cute("tcgen05", "gemm_nvfp4", "tcgen05_gemm", "gemm", proven=_NOWHERE),
    _fp8("gemm_e4m3", "gemm", "gemm", "few_tokens", reserves_sms=True),
    *_cute(
        *("cute", "gemm", "gemm", "gemm"),
        proven=_ON_HOPPER,
        reserves_sms=True,
        note=_FP8_AS_BF16,
    ),
    *_triton(
        *("gemm_packed", "gemm", "gemm"),
        slower_than_later="dequantized_is_faster",
        proven_calls="has_fp8_weight",
        note=_FP8_AS_BF16,
    ),
    Implementation(
        "gemm",
        "cublas",
        "dsv4.triton.gemm:gemm",
        "dsv4.triton.supports:packed_gemm",
        proven=_ON_HOPPER,
        self_test=_SELF_TEST,
        note=_FP8_AS_BF16,
    ),
    Implementation(
        "gemm", "scaled_mm", "dsv4.blas.gemm:gemm", "dsv4.blas.supports:scaled_mm", proven=_NOWHERE
    ),
    *_reference("gemm", "gemm"),
    *_cute("tcgen05", "gemm_nvfp4", "tcgen05_gemm_swiglu", "gemm_swiglu", proven=_NOWHERE),
    _fp8("gemm_e4m3", "gemm_swiglu", "gemm_swiglu", "few_tokens", reserves_sms=True),
    *_cute(
        *("cute", "gemm", "gemm_swiglu", "gemm_swiglu"),
        proven=_ON_HOPPER,
        reserves_sms=True,
        note=_FP8_AS_BF16,
    ),
    *_triton(
        *("gemm_packed", "gemm_swiglu", "gemm_swiglu"),
        slower_than_later="dequantized_is_faster",
        proven=_NOWHERE,
        note=_FP8_AS_BF16,
    ),
    Implementation(
        "gemm_swiglu",
        "parts",
        "dsv4.triton.gemm_swiglu:gemm_swiglu",
        "dsv4.triton.supports:parts",
        proven=_ON_HOPPER,
        self_test=_SELF_TEST,
        note=_FP8_AS_BF16,
    ),
    *_reference("gemm_swiglu", "gemm_swiglu"),
    *_cute("tcgen05", "grouped_nvfp4", "tcgen05_grouped_gemm", *_GROUPED, proven=_NOWHERE),
    _fp8("grouped_gemm_e4m3", "grouped_gemm", "grouped_gemm", "few_rows"),
    _fp8("grouped_gemm_e4m3", "grouped_gemm", "grouped_gemm_swiglu", "few_rows"),
    *_cute(
        *("cute", "grouped_gemm", "grouped_gemm", *_GROUPED), proven=_ON_HOPPER, note=_FP8_AS_BF16
    ),
    *_triton("grouped_gemm", "grouped_gemm", *_GROUPED, proven=_NOWHERE, note=_FP8_AS_BF16),
    *_reference("grouped_gemm", *_GROUPED, waits=True),
    _fp8(*("grouped_gemm_e4m3", "grouped_gemm_swiglu_fp8", "grouped_gemm_swiglu_fp8"), "few_rows"),
    Implementation(
        "grouped_gemm_swiglu_fp8",
        "parts",
        "dsv4.triton.grouped_gemm_swiglu_fp8:grouped_gemm_swiglu_fp8",
        "dsv4.triton.supports:grouped_parts",
        proven=_ON_HOPPER,
        self_test=_SELF_TEST,
        note=_FP8_AS_BF16,
    ),
    *_reference("grouped_gemm", "grouped_gemm_swiglu_fp8", waits=True),
    *_triton("norm", "rms_norm", "rms_norm", "rms_norm_pair"),
    *_triton("norm", "head_norm_rope", "head_norm_rope_"),
    *_triton("norm", "rms_norm_quantize", "rms_norm_quantize"),
    *_reference("norm", "rms_norm", "rms_norm_pair", "head_norm_rope_", "rms_norm_quantize"),
    *_triton("rope", "any_call", "rope_tables", "rope"),
    *_triton("rope", "rope_quantize", "rope_quantize"),
    *_reference("rope", "rope_tables", "rope", "rope_quantize"),
    *_triton("swiglu", "any_call", "swiglu"),
    *_triton("swiglu", "swiglu_quantize", "swiglu_quantize"),
    *_reference("swiglu", "swiglu", "swiglu_quantize"),
    *_triton("fp8_token", "rms_norm_fp8", "rms_norm_fp8"),
    *_triton("fp8_token", "fp8_token", "swiglu_fp8", "moe_gather_fp8"),
    *_reference("fp8_token", "rms_norm_fp8", "swiglu_fp8", "moe_gather_fp8"),
    *_triton("router", "router", "route_topk", "route_hash"),
    *_reference("router", "route_topk", "route_hash"),
    *_triton("moe", "moe_sorting", "moe_permute"),
    *_triton("moe", "any_call", "moe_gather"),
    *_triton("moe", "moe_sorting", "moe_sort"),
    *_triton("moe", "moe_gather_quantize", "moe_gather_quantize"),
    *_triton("moe", "moe_combine", "moe_combine"),
    *_reference(
        "moe", "moe_permute", "moe_gather", "moe_sort", "moe_gather_quantize", "moe_combine"
    ),
    *_triton("expert_slots", "any_call", "expert_decide"),
    *_reference("expert_slots", "expert_decide"),
    *_triton("expert_slots", "expert_gather", "expert_gather"),
    *_reference("expert_slots", "expert_gather", waits=True),
    _over_ranks("moe_send", "push", "triton.moe_exchange:moe_send", "exchange_supports:push_send"),
    _over_ranks("moe_send", "nccl", "parallel.moe_exchange:nccl_send", "exchange_supports:nccl"),
    _over_ranks("moe_send", "gloo", "reference.moe_exchange:moe_send", "exchange_supports:gloo"),
    *_reference("moe_exchange", "moe_send"),
    _over_ranks(
        "moe_return", "push", "triton.moe_exchange:moe_return", "exchange_supports:push_return"
    ),
    _over_ranks(
        "moe_return", "nccl", "parallel.moe_exchange:nccl_return", "exchange_supports:nccl"
    ),
    _over_ranks(
        "moe_return", "gloo", "reference.moe_exchange:moe_return", "exchange_supports:gloo"
    ),
    *_reference("moe_exchange", "moe_return"),
    *_triton("hyper_connection", "hyper_connection", *_HYPER),
    *_triton("hyper_connection", "hyper_connection_quantize", *_HYPER_QUANTIZE),
    *_reference("hyper_connection", *_HYPER, *_HYPER_QUANTIZE),
    _over_ranks(
        "all_reduce", "push", "triton.all_reduce:all_reduce", "supports:push", "push_is_slower"
    ),
    _over_ranks(
        "all_reduce",
        "one_shot",
        "parallel.all_reduce:one_shot",
        "supports:one_shot",
        "one_shot_is_slower",
    ),
    _over_ranks(
        "all_reduce",
        "two_shot",
        "parallel.all_reduce:two_shot",
        "supports:two_shot",
        "two_shot_is_slower",
    ),
    _over_ranks("all_reduce", "nccl", "parallel.all_reduce:nccl", "supports:nccl"),
    _over_ranks("all_reduce", "gloo", "reference.all_reduce:all_reduce", "supports:gloo"),
    _over_ranks("all_reduce", "multimem", "parallel.multicast:refused", "multicast:unsupported"),
    *_reference("all_reduce", "all_reduce"),
    *_reduced("hc_reduce_post"),
    *_reduced("hc_reduce_post_pre_norm"),
    *_reference("all_reduce", "hc_reduce_post", "hc_reduce_post_pre_norm"),
    *_triton(*3 * ("compressor_projections",)),
    *_reference("compressor_projections", "compressor_projections"),
    *_triton("compressor", "any_call", "pool_windows"),
    *_triton("compressor", "compressor_update", "compressor_update"),
    *_triton("compressor", "compress_write", "compress_write"),
    *_reference("compressor", "pool_windows", "compressor_update", "compress_write"),
    *_triton("compressor_paged", "compress_write_paged", "compress_write_paged"),
    *_reference("compressor_paged", "compress_write_paged"),
    *_triton("indexer", "any_call", "indexer_rotate_quantize", "indexer_queries"),
    *_triton("indexer", "quantize_index_queries", "quantize_index_queries"),
    *_cute(
        "cute",
        "indexer",
        "indexer_select",
        "indexer_select",
        slower_than_later="indexer_select_is_slower",
        proven=_ON_HOPPER,
    ),
    *_triton("indexer", "indexer_select", "indexer_select"),
    *_reference("indexer", "indexer_rotate_quantize", "indexer_queries"),
    *_reference("indexer", "quantize_index_queries", "indexer_select"),
    *_cute("cute", "attention", "sparse_attention", "sparse_attention", proven=_ON_HOPPER),
    *_triton("attention", "sparse_attention", "sparse_attention"),
    *_reference("attention", "sparse_attention"),
    *_triton("nonfinite", "any_call", "mark_nonfinite_"),
    *_reference("nonfinite", "mark_nonfinite_"),
    *_triton("slots", "any_call", *_SLOTS),
    *_reference("slots", *_SLOTS),
    *_triton("verify", "verify", *_VERIFY),
    *_reference("verify", *_VERIFY),
    *_triton("kv_cache", "write_kv", "write_kv"),
    *_triton("kv_cache", "read_kv", "read_kv"),
    *_triton("kv_cache", "fake_quantize_kv", "fake_quantize_kv"),
    *_triton("kv_cache", "norm_rope_write_kv", "norm_rope_write_kv"),
    *_reference("kv_cache", "write_kv", "read_kv", "fake_quantize_kv", "norm_rope_write_kv"),
)

# The dictionary inside ``os.environ``, where Python has it, and the variable's name in it.
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
    """An implementation, by ``"module:function"``."""
    return _named(target)


@functools.cache
def _reason(check: str) -> Callable[[Call], str | None]:
    """A function that says why a call is not supported, by ``"module:function"``."""
    return _named(check)


def _named(name: str) -> Callable[..., Any]:
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


def requested_backend(backend: str = AUTO) -> str:
    """The name that decides: the argument, else ``use_backend``, else ``DSV4_BACKEND``."""
    if backend != AUTO:
        return backend
    override = _override.get()
    if override != AUTO:
        return override
    # A test for membership comes first: os.environ itself would raise and catch a KeyError.
    return os.environ[ENVIRONMENT_VARIABLE] if _VARIABLE in _ENVIRONMENT else AUTO


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Request an implementation by name for every operator called inside the block.

    An operator that has no such implementation, or whose implementation cannot run it, raises.
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
        NotImplementedError: if the named implementation, or every one, cannot run it; with the
            reasons.
    """
    return _first(call, requested_backend(backend))


def _first(call: Call, requested: str) -> Implementation:
    """Return the first row named ``requested`` that runs a call; see ``choose``."""
    reasons = []
    for row in implementations(call.op):
        if requested not in (AUTO, row.name):
            continue
        reason = None if row.supports is None else _reason(row.supports)(call)
        if reason is None and row.slower_than_later is not None:
            reason = row.slower_reason(call, requested)
        if reason is None and row.proven is not None and not row.is_proven(call):
            reason = _unproven(row, call, requested)
        if reason is None:
            return row
        reasons.append(f"{row.name}: {reason}")
    if not reasons:
        known = ", ".join(row.name for row in implementations(call.op))
        raise ValueError(f"{call.op}: backend is {requested!r}, wanted 'auto' or one of {known}")
    raise NotImplementedError(f"{call.op}: " + "; ".join(reasons))


def _unproven(row: Implementation, call: Call, requested: str) -> str | None:
    """Return why ``"auto"`` does not take a row on a GPU where it was never seen right, or None."""
    if call.is_meta or self_test.is_under_test(row.op, row.name, call.device):
        return None
    if requested != AUTO:
        _warn_unproven(row.op, row.name, call.capability)
        return None
    if row.self_test is not None:
        return self_test.unsupported(row.op, row.name, call.device, _load(row.self_test))
    reference = implementations(row.op)[-1]
    return self_check.unsupported(
        row.op, row.name, call.args, _load(row.target), _load(reference.target)
    )


def _known_wrong(row: Implementation, call: Call, requested: str) -> str | None:
    """Return what an earlier check found wrong, or None; a check that is due is left to calls."""
    if row.is_proven(call) or requested != AUTO:
        return None
    if row.self_test is not None:
        return self_check.verdicts().look_up(_subject(row, call))
    return self_check.known(row.op, row.name, call.args)


def _subject(row: Implementation, call: Call) -> self_check.Configuration:
    """Return what a verdict on a row would be about."""
    if row.self_test is not None:
        return self_test.family(row.op, row.name, call.device)
    operands = self_check.describe(call.args)
    return self_check.Configuration(row.op, row.name, operands, self_check.gpu(call.device))


def _mark(row: Implementation | None, call: Call) -> str | None:
    """Return how well a row's kernel is known on the GPU of a call; see ``self_test.mark``."""
    if row is None or row.proven is None or call.capability is None:
        return None
    if row.is_proven(call):
        return self_test.MEASURED
    return self_test.mark(None if call.is_meta else _subject(row, call), call.capability)


def self_tested(op: str, name: str, device: torch.device) -> str | None:
    """Return why the self-test of a row, which runs if it is due, lets ``"auto"`` pass it over.

    None for a row that is right, was always seen right on such GPUs, or has no self-test.
    """
    row = next(row for row in implementations(op) if row.name == name)
    if row.self_test is None or row.is_always_proven(capability(device)):
        return None
    return self_test.unsupported(op, name, device, _load(row.self_test))


@functools.cache
def _warn_unproven(op: str, name: str, capability: tuple[int, int] | None) -> None:
    version = "None" if capability is None else ".".join(map(str, capability))
    warnings.warn(
        f"{op}: the implementation {name!r} was never seen right on compute capability "
        f"{version}, and asked for by name it is not checked; backend='auto' checks it first",
        RuntimeWarning,
        stacklevel=2,
    )


def run(
    op: str,
    args: Any,
    backend: str = AUTO,
    out: torch.Tensor | None = None,
    reserve_sms: int = 0,
) -> Any:
    """Run an operator.

    Args:
        op: Name of the operator.
        args: The operator's arguments, see ``Call.args``.
        backend: Name of an implementation, or ``"auto"``.
        out: Takes the first result, for operators with ``_library.define_out``.
        reserve_sms: SMs to leave to work on other streams, if the implementation can.
    """
    call, requested = Call(op, args, args[0].device), backend
    if backend == AUTO and (_override.get() != AUTO or _VARIABLE in _ENVIRONMENT):
        requested = requested_backend()
    if _explaining.get():
        raise _Explained(call, requested)
    row = _first(call, requested)
    implementation = _load(row.target)
    if reserve_sms and row.reserves_sms:
        return implementation(args, reserve_sms=reserve_sms)
    return implementation(args) if out is None else implementation(args, out=out)


def is_free(backend: str) -> bool:
    """Return whether ``"auto"`` decides, and the call is to run, not to be explained."""
    chosen = backend != AUTO or _override.get() != AUTO or _VARIABLE in _ENVIRONMENT
    return not (chosen or _explaining.get())


def implementation(op: str, args: Any) -> Callable[..., Any]:
    """Return the implementation that ``"auto"`` gives a call to; ``args`` as in ``Call``."""
    return _load(choose(Call(op, args, args[0].device)).target)


def wait_of(call: Call) -> str | None:
    """Return why the implementation that ``"auto"`` takes waits for the host, or None."""
    explanation = _explanation(call, AUTO)
    row = next(row for row in implementations(call.op) if row.name == explanation.chosen)
    return f"{call.op} runs as {row.name!r} ({explanation.reason})" if row.waits else None


def first(op: str, args: Any) -> Any:
    """Run the implementation that ``"auto"`` takes, whatever was requested by name.

    For implementations that are made of other operators; ``args`` as in ``Call``.
    """
    return _load(_first(Call(op, args, args[0].device), AUTO).target)(args)


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say which implementation a call would run, and why not the others; run nothing.

    Args:
        op: A public function of ``dsv4.ops``, e.g. ``dsv4.ops.gemm``.
        *args: What it would be called with.
        **kwargs: Likewise.

    Raises:
        ValueError: if ``op`` calls no operator.
    """
    caught = _caught(op, args, kwargs)
    return _explanation(caught.call, caught.requested)


def arguments(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """Return the operator call that a public function would make; run nothing.

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
    except _Explained as explained:
        return explained
    finally:
        _explaining.reset(token)
    raise ValueError(f"{op!r} called no dsv4 operator")


def _explanation(call: Call, requested: str) -> Explanation:
    candidates = tuple(
        (row.name, row.unsupported_reason(call, requested) or _known_wrong(row, call, requested))
        for row in implementations(call.op)
    )
    able = [name for name, why in candidates if why is None and requested in (AUTO, name)]
    chosen = able[0] if able else None
    row = next((row for row in implementations(call.op) if row.name == chosen), None)
    note = None if row is None or row.note is None else _reason(row.note)(call)
    return Explanation(call.op, requested, chosen, candidates, note, _mark(row, call))
