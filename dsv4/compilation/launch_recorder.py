"""Record what operators launch on a GPU that need not be there.

Every operator's call is put to the dispatcher as if its tensors were on that GPU, and where a
Triton kernel is chosen its launcher runs, with Triton's compiler replaced by a list of what it is
asked for. So the list follows from the code that chooses and launches.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import device as machine
from dsv4 import dispatch
from dsv4.compilation.target import Target
from dsv4.cute import gemm_nvfp4, grouped_nvfp4
from dsv4.ops._library import OPERATIONS
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.gemm_swiglu import GemmSwigluArgs
from dsv4.ops.grouped_gemm import GroupedGemmArgs
from dsv4.ops.grouped_gemm_swiglu import GroupedGemmSwigluArgs, GroupedGemmSwigluQuantizeArgs
from dsv4.ops.grouped_gemm_swiglu_fp8 import GroupedGemmSwigluFp8Args, gemm_record
from dsv4.ops.quantize import bfloat16_operand, block_values, fp8_operand, fp8_values, quantize
from dsv4.quant.formats import FP8_TOKEN, FRAGMENTS, LINEAR, NVFP4

_GROUPED_RECORDS = (
    GroupedGemmArgs,
    GroupedGemmSwigluArgs,
    GroupedGemmSwigluQuantizeArgs,
    GroupedGemmSwigluFp8Args,
)
_GEMM_RECORDS = (GemmArgs, GemmSwigluArgs, *_GROUPED_RECORDS)
_GPU = torch.device("cuda", 0)


@dataclass
class Ran:
    """The implementation that runs an operator.

    Attributes:
        reasons: Reasons of the implementations before it in the table, the first of each.
        kernels: Names of the Triton kernels that it launches.
    """

    reasons: dict[str, str] = field(default_factory=dict)
    kernels: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Steps:
    """The operators and kernels that were found.

    Attributes:
        ran: By operator and implementation.
        requests: Specialisations of Triton kernels, by key.
        known: Names of those that are stored already, by key, of a list that was kept.
    """

    ran: dict[tuple[str, str], Ran] = field(default_factory=dict)
    requests: dict[bytes, Any] = field(default_factory=dict)
    known: dict[bytes, str] = field(default_factory=dict)

    def add(self, others: Steps) -> None:
        """Take what other steps launch, too."""
        self.requests.update(others.requests)
        for key, ran in others.ran.items():
            own = self.ran.setdefault(key, Ran())
            own.reasons = {**ran.reasons, **own.reasons}
            own.kernels |= ran.kernels


def impossible() -> str | None:
    """Return why Triton kernels cannot be compiled in this process, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "TRITON_INTERPRET is set, so kernels are interpreted in this process"
    return None


class LaunchRecorder(TorchDispatchMode):
    """Records every operator call of a step and runs the calls that compile kernels."""

    def __init__(self, steps: Steps, names: list[str]) -> None:
        super().__init__()
        self.steps, self.names = steps, names
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "dsv4":
            self._look(func, args)
        return func(*args, **(kwargs or {}))

    def _look(self, func: Any, args: tuple[Any, ...]) -> None:
        operation = OPERATIONS[func._opname]
        op, arguments = operation.op, operation.arguments(args)
        key = repr((op, [_described(arg) for arg in arguments]))
        if key in self.seen:
            return
        self.seen.add(key)
        call = dispatch.Call(op, arguments, _GPU)
        reasons = {}
        for row in dispatch.implementations(op):
            why = row.unsupported_reason(call, dispatch.AUTO)
            if why is None:
                break
            reasons[row.name] = why
        ran = self.steps.ran.setdefault((op, row.name), Ran())
        ran.reasons = {**reasons, **ran.reasons}
        self.names.clear()
        with self:
            if row.name in ("cute", "small_m", "tcgen05", "fp8"):
                if isinstance(arguments, _GEMM_RECORDS):
                    self._before_gemm(row, arguments)
                if op == "indexer_select":  # Triton has a part in it
                    dispatch.first(op, arguments)
            elif isinstance(arguments, GroupedGemmSwigluFp8Args) and row.name == "parts":
                inner = torch.ops.dsv4.grouped_gemm_swiglu(*gemm_record(arguments), dispatch.AUTO)
                torch.ops.dsv4.quantize_fp8_token(inner, arguments.result_layout, dispatch.AUTO)
            elif row.name != "reference":
                if row.name in ("triton", "cublas") and isinstance(arguments, _GEMM_RECORDS):
                    self._before_gemm(row, arguments)
                dispatch.first(op, arguments)
                if op == "moe_gather_quantize":  # and with the scales of calibrated experts
                    experts = arguments.offsets.shape[0] - 1
                    scales = arguments.offsets.new_empty(experts, dtype=torch.float32)
                    dispatch.first(op, arguments._replace(input_scale=scales))
        ran.kernels.update(self.names)

    def _before_gemm(self, row: dispatch.Implementation, args: Any) -> None:
        """Note how a GEMM quantises its input, in NVFP4 with a scale per row and a calibrated one.

        Blackwell's GEMMs and those of FP8 tensor cores multiply the codes. All others dequantize
        their input again, also one that is quantised already.
        """
        if row.name == "fp8":
            if args.x_scales is None and args.activation == "fp8":
                layout = FRAGMENTS if args.format == NVFP4.name else LINEAR
                quantize(args.x.reshape(-1, args.x.shape[-1]), FP8_TOKEN, layout=layout)
            return
        grouped = isinstance(args, _GROUPED_RECORDS)
        if not grouped:
            fp8_operand(args)
        elif args.x_scales is not None and row.name != "tcgen05":
            block_values(args.x, args.x_scales, torch.bfloat16, args.x_layout)
        elif args.activation == "fp8":
            fp8_values(args.x)
        if args.activation != NVFP4.name:
            return
        experts = args.offsets.shape[0] - 1 if grouped else 1
        for scale in (None, torch.empty(experts, dtype=torch.float32, device=args.x.device)):
            if row.name != "tcgen05":
                row_scale = scale if scale is None else scale[:1]
                bfloat16_operand(args.x, row_scale)
            elif grouped:
                grouped_nvfp4.quantized(args.x, None, None, scale, args.offsets)
            else:
                gemm_nvfp4.quantized(args.x, scale)


def _described(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return tuple(arg.shape), arg.stride(), arg.dtype
    return arg


@contextmanager
def listing_for(target: Target, steps: Steps) -> Iterator[list[str]]:
    """Make launches list the kernels they would compile on the GPU; yields their names."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from dsv4.cute import indexer as cute_indexer
    from dsv4.triton._runtime import kernel_store, launch_options

    capability = target.capability
    names: list[str] = []
    launch, call = JITFunction.run, dispatch.Call
    kernels: dict[int, Any] = {}

    def listed(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        names.append(self.__name__)
        kernels[id(self)] = self
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    def collect(request: Any) -> Any:
        steps.requests[request.key] = request
        return request

    replaced = [
        (JITFunction, "run", listed),
        (launch_options, "capability", lambda tensor: capability),
        (launch_options, "sm_count", lambda device: target.sms),
        (dispatch, "Call", lambda op, args, device: call(op, args, _GPU)),
        # CuTeDSL kernels, which are listed elsewhere:
        (cute_indexer, "indexer_logits", lambda *args: None),
        (cute_indexer, "topk", lambda *args: None),
    ]
    driver = triton.runtime.driver
    with ExitStack() as undo:
        undo.enter_context(
            machine.pretend(capability=capability, sms=target.sms, plans=target.plans)
        )
        for owner, name, value in replaced:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        undo.callback(setattr, driver, "_active", driver._active)
        device = _Driver(GPUTarget("cuda", 10 * capability[0] + capability[1], 32), steps)
        driver.set_active(device)
        undo.callback(lambda: [k.device_caches.pop(steps, None) for k in kernels.values()])
        undo.enter_context(kernel_store.collecting(collect))
        yield names


def launches_of(call: Callable[[], None], target: Target) -> Steps:
    """List what ``call`` launches; its tensors are on the meta device.

    Not to be called while another thread runs operators.
    """
    steps = Steps()
    with (
        listing_for(target, steps) as names,
        torch.inference_mode(),
        LaunchRecorder(steps, names),
    ):
        call()
    return steps


class _Driver:
    """The answers of a driver that Triton asks for before it launches.

    Compiled kernels are kept by device, so it is one that no GPU is.
    """

    def __init__(self, target: Any, device: Any) -> None:
        self.target, self.device = target, device

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> Any:
        return self.device

    def get_current_stream(self, device: Any) -> int:
        return 0
