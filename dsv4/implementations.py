"""The table of implementations: what can run each operator, and where it was seen right.

A row names functions as ``"module:function"``. They are imported when they are first needed, so
this module imports no backend. ``dsv4.dispatch`` chooses among the rows of an operator.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dsv4.device import capability

AUTO = "auto"


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
        """Whether tensors have no data, in a list of kernels; ``device`` may still be a GPU."""
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
        lacks: ``"module:function"``, which takes a device and returns why the implementation runs
            no call there, or None; None: it runs some calls on every GPU that Triton supports.
        self_test: ``"module:function"``, a ``self_test.Test`` that decides on other GPUs; None:
            each configuration is checked on its own operands.
        reserves_sms: Whether the function takes ``reserve_sms``.
        plans: ``"module:function"``, which says of a ``Call`` where the plans of its kernel are
            from, or returns None. ``explain`` alone asks it.
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
    lacks: str | None = None
    self_test: str | None = None
    reserves_sms: bool = False
    plans: str | None = None
    note: str | None = None

    def is_proven(self, call: Call) -> bool:
        """Return whether calls of this kind were seen right on the GPU of a call."""
        if self.proven is None or call.capability is None:
            return True
        return self.is_always_proven(call.capability)

    def is_always_proven(self, capability: tuple[int, int]) -> bool:
        """Return whether every call was seen right on GPUs of a compute capability."""
        return self.proven is None or capability in self.proven

    def run(self, args: Any) -> Any:
        """Run it on an operator's arguments, whether or not it supports them."""
        return load(self.target)(args)

    def unsupported_reason(self, call: Call, requested: str | None = None) -> str | None:
        """Return why it cannot run a call, or None.

        With ``requested`` ``"auto"``, a reason is also that a later row is faster.
        """
        reason = None if self.supports is None else reason_of(self.supports)(call)
        return self.slower_reason(call, requested) if reason is None else reason

    def slower_reason(self, call: Call, requested: str | None) -> str | None:
        """Return why ``"auto"`` passes over it although it can run a call, or None."""
        if requested != AUTO or self.slower_than_later is None:
            return None
        return reason_of(self.slower_than_later)(call)


@functools.cache
def load(target: str) -> Callable[..., Any]:
    """An implementation, by ``"module:function"``."""
    return _named(target)


@functools.cache
def reason_of(check: str) -> Callable[[Call], str | None]:
    """A function that says why a call is not supported, by ``"module:function"``."""
    return _named(check)


def _named(name: str) -> Callable[..., Any]:
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


_ON_HOPPER = frozenset({(9, 0)})
_NOWHERE: frozenset[tuple[int, int]] = frozenset()
_ORIGINS = "dsv4.cute.plan_origins"
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
            proven=_ON_HOPPER,
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
    plans: str | None = None,
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
            plans=plans and f"{_ORIGINS}:{plans}",
            note=note,
        )
        for op in ops
    )


def _fp4(module: str, supports: str, *ops: str) -> tuple[Implementation, ...]:
    """Make rows for GEMMs with both operands in NVFP4 on the tensor cores of 12.0 and 12.1."""
    checks = "dsv4.triton.nvfp4_supports"
    return tuple(
        Implementation(
            op,
            "fp4",
            f"dsv4.triton.{module}:{op}",
            f"{checks}:{supports}",
            f"{checks}:reference_is_faster",
            proven=_NOWHERE,
            lacks=f"{checks}:no_block_scaled_mma",
            self_test=_SELF_TEST,
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
    module: str, supports: str, op: str, counted: str, *, reserves_sms: bool = False
) -> Implementation:
    """Make the row of an operator whose GEMM runs on the FP8 tensor cores of Hopper.

    ``counted``: ``"tokens"`` or ``"rows"`` of experts; it is too slow for few of them.
    """
    return Implementation(
        op,
        "fp8",
        f"dsv4.cute.{module}:{op}",
        f"dsv4.cute.fp8_supports:{supports}",
        f"dsv4.cute.fp8_supports:few_{counted}",
        proven=_ON_HOPPER,
        reserves_sms=reserves_sms,
        plans=f"{_ORIGINS}:gemm_e4m3",
        note=f"dsv4.cute.fp8_supports:{counted}_note",
    )


_FP8_AS_BF16 = "dsv4.ops.fp8_note:multiplied_as_bfloat16"
_GROUPED = ("grouped_gemm", "grouped_gemm_swiglu", "grouped_gemm_swiglu_quantize")
_HYPER = ("hc_pre", "hc_post", "hc_head", "hc_pre_norm", "hc_post_pre_norm")
_HYPER_COMBINE = ("hc_combine_post", "hc_combine_post_pre_norm")
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
    *_fp4("gemm_nvfp4", "gemm", "gemm"),
    _fp8("gemm_e4m3", "gemm", "gemm", "tokens", reserves_sms=True),
    *_cute(
        *("small_m", "gemm_fp8_small_m", "fp8_small_m_gemm", "gemm"),
        slower_than_later="fp8_wgmma_is_faster",
        proven=_ON_HOPPER,
        plans="gemm_fp8_small_m",
        note=_FP8_AS_BF16,
    ),
    *_cute(
        *("cute", "gemm", "gemm", "gemm"),
        proven=_ON_HOPPER,
        reserves_sms=True,
        plans="gemm",
        note=_FP8_AS_BF16,
    ),
    *_triton(
        *("gemm_packed", "gemm", "gemm"),
        slower_than_later="dequantized_is_faster",
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
    *_fp4("gemm_nvfp4", "gemm_swiglu", "gemm_swiglu"),
    _fp8("gemm_e4m3", "gemm_swiglu", "gemm_swiglu", "tokens", reserves_sms=True),
    *_cute(
        *("cute", "gemm", "gemm_swiglu", "gemm_swiglu"),
        proven=_ON_HOPPER,
        reserves_sms=True,
        plans="gemm",
        note=_FP8_AS_BF16,
    ),
    *_triton(
        *("gemm_packed", "gemm_swiglu", "gemm_swiglu"),
        slower_than_later="dequantized_is_faster",
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
    *_fp4("grouped_nvfp4", "grouped_gemm", *_GROUPED),
    _fp8("grouped_gemm_e4m3", "grouped_gemm", "grouped_gemm", "rows"),
    _fp8("grouped_gemm_e4m3", "grouped_gemm", "grouped_gemm_swiglu", "rows"),
    *_cute(
        *("cute", "grouped_gemm", "grouped_gemm", *_GROUPED),
        proven=_ON_HOPPER,
        plans="grouped_gemm",
        note=_FP8_AS_BF16,
    ),
    *_triton("grouped_gemm", "grouped_gemm", *_GROUPED, note=_FP8_AS_BF16),
    *_reference("grouped_gemm", *_GROUPED, waits=True),
    _fp8(*("grouped_gemm_e4m3", "grouped_gemm_swiglu_fp8", "grouped_gemm_swiglu_fp8"), "rows"),
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
    *_triton("fp8_token", "rms_norm", "rms_norm_fp8"),
    *_triton("fp8_token", "any_call", "swiglu_fp8", "moe_gather_fp8"),
    *_reference("fp8_token", "rms_norm_fp8", "swiglu_fp8", "moe_gather_fp8"),
    *_triton("router", "router", "route_topk", "route_hash"),
    *_reference("router", "route_topk", "route_hash"),
    *_triton("moe_sort", "moe_sorting", "moe_permute", "moe_sort"),
    *_triton("moe_gather", "any_call", "moe_gather"),
    *_triton(*3 * ("moe_gather_quantize",)),
    *_triton(*3 * ("moe_combine",)),
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
    *_triton(*2 * ("hyper_connection_combine",), *_HYPER_COMBINE),
    *_reference("hyper_connection_combine", *_HYPER_COMBINE),
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
    *_triton("pool_windows", "any_call", "pool_windows"),
    *_triton(*3 * ("compressor_update",)),
    *_triton(*3 * ("compress_write",)),
    *_reference("compressor", "pool_windows", "compressor_update", "compress_write"),
    *_triton("compressor_paged", "compress_write_paged", "compress_write_paged"),
    *_reference("compressor_paged", "compress_write_paged"),
    *_triton("indexer_queries", "any_call", "indexer_rotate_quantize", "indexer_queries"),
    *_triton("indexer_queries", "any_call", "quantize_index_queries"),
    *_cute(
        "cute",
        "indexer",
        "indexer_select",
        "indexer_select",
        slower_than_later="indexer_select_is_slower",
        proven=_ON_HOPPER,
    ),
    *_triton(*3 * ("indexer_select",)),
    *_reference("indexer", "indexer_rotate_quantize", "indexer_queries"),
    *_reference("indexer", "quantize_index_queries", "indexer_select"),
    *_cute(
        *("cute", "attention", "sparse_attention", "sparse_attention"),
        proven=_ON_HOPPER,
        plans="attention",
    ),
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
    *_triton("kv_cache", "any_call", "fake_quantize_kv"),
    *_triton("kv_cache", "norm_rope_write_kv", "norm_rope_write_kv"),
    *_reference("kv_cache", "write_kv", "read_kv", "fake_quantize_kv", "norm_rope_write_kv"),
    *_triton(*3 * ("head_norm_rope_write_kv",)),
    *_reference(*2 * ("head_norm_rope_write_kv",)),
)
