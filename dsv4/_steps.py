"""What a decode and a prefill step of a model launch on a GPU that need not be there.

The steps run on the meta device, where layers compute shapes alone. Every operator's call is put to
the dispatcher as if its tensors were on that GPU, and where a Triton kernel is chosen its launcher
runs, with Triton's launch replaced by a compilation. What it compiles lies in Triton's own cache.
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

from dsv4 import _support, dispatch
from dsv4.cache import Batch, CacheStep, PagedCache
from dsv4.config import ModelConfig
from dsv4.cute import gemm_nvfp4, grouped_nvfp4
from dsv4.cute._architectures import ARCHITECTURES, HOPPER
from dsv4.formats import FRAGMENTS, NVFP4, SWIZZLED, QuantizedTensor, swizzled_size
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear
from dsv4.layers.pack import join_packed_
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.ops.quantize import bfloat16_operand, block_values

DECODE = (1, 16, 64)
PREFILL = 2048
_CONTEXT = 65536
# Of an H200 and a B200. Of the B300 it is supposed: it decides how work is split.
_PROCESSORS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148}
_PACKING = "fragments"
_GPU = torch.device("cuda", 0)


@dataclass
class Ran:
    """What runs an operator.

    Attributes:
        objections: Of the implementations before it in the table, the first of each.
        kernels: Names of the Triton kernels that it launches.
    """

    objections: dict[str, str] = field(default_factory=dict)
    kernels: set[str] = field(default_factory=set)


@dataclass
class Steps:
    """What was found.

    Attributes:
        ran: By operator and implementation.
        compiled: Triton kernels, each specialisation counted.
    """

    ran: dict[tuple[str, str], Ran] = field(default_factory=dict)
    compiled: int = 0


def impossible() -> str | None:
    """Why Triton kernels cannot be compiled in this process, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "TRITON_INTERPRET is set, so kernels are interpreted in this process"
    return None


def compile_steps(
    config: ModelConfig,
    arch: str,
    max_tokens: int,
    on_kernel: Callable[[], None] = lambda: None,
) -> Steps:
    """Compile what decode steps and one of prefill launch, and what packing does.

    Of a bfloat16 model whose weights are NVFP4, packed for the GPU where they can be. Not to be
    called while another thread runs operators.

    Args:
        config: The model's.
        arch: A value of ``ARCHITECTURES``.
        max_tokens: Most tokens of a step.
        on_kernel: Called after each kernel.
    """
    model = packed_model(of_each_kind(config), layout_for(config.activation, arch))
    found = Steps()
    with _compiling_for(arch, found, on_kernel) as names, torch.inference_mode():
        _pack(found, names)
        with _Recorder(found, names):
            for tokens in DECODE:
                if tokens <= max_tokens:
                    _decode(model, tokens)
            _prefill(model, min(PREFILL, max_tokens))
    return found


def layout_for(activation: str, arch: str) -> str:
    """The layout that kernels for these activations want on a GPU."""
    return SWIZZLED if arch != HOPPER and activation == NVFP4.name else FRAGMENTS


def of_each_kind(config: ModelConfig) -> ModelConfig:
    """The same with one layer of each kind."""
    kinds = dict.fromkeys(zip(config.layer_types, config.mlp_layer_types, strict=True))
    types, routers = zip(*kinds, strict=True)
    return config.replace(num_hidden_layers=len(kinds), layer_types=types, mlp_layer_types=routers)


def packed_model(config: ModelConfig, layout: str = FRAGMENTS) -> DeepseekV4ForCausalLM:
    """A bfloat16 model on the meta device as ``pack_`` leaves one in NVFP4."""
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config, mtp=False).to(torch.bfloat16)
        for module in model.modules():
            if isinstance(module, Linear | DeepseekV4Experts):
                wanted = layout if module.activation == NVFP4.name else FRAGMENTS
                if isinstance(module, Linear):
                    _declare_packed(module, wanted)
                else:
                    _declare_experts(module, wanted)
        join_packed_(model)
    return model


def _declare_packed(layer: Linear, layout: str) -> None:
    rows, columns = layer.out_features, layer.in_features
    codes, scales = (torch.empty((rows, columns // n), dtype=torch.uint8) for n in (2, 16))
    if layout == SWIZZLED:
        scales = torch.empty(swizzled_size(rows, columns // 16), dtype=torch.float8_e4m3fn)
    try:
        layer.set_weight(
            QuantizedTensor(codes, scales, torch.empty(1, dtype=torch.float32), NVFP4, layout)
        )
    except ValueError:  # no whole number of tiles: pack_ leaves it
        layer.to_format(NVFP4)


def _declare_experts(layer: DeepseekV4Experts, layout: str) -> None:
    try:
        layer.declare_packed(layout)
    except ValueError:  # no whole number of tiles: pack_ leaves them
        layer.to_format(NVFP4)


def _decode(model: DeepseekV4ForCausalLM, tokens: int) -> None:
    cache = _cache(model, tokens)
    rows = torch.zeros(tokens, dtype=torch.int64, device="meta")
    model.decode(rows, cache, rows)


def _prefill(model: DeepseekV4ForCausalLM, tokens: int) -> None:
    cache = _cache(model, tokens)
    starts = torch.zeros(1, dtype=torch.int64, device="meta")
    batch = Batch.from_lengths([tokens], starts, starts)
    ids = torch.zeros((1, tokens), dtype=torch.int64, device="meta")
    hidden, _ = model.model(ids, None, CacheStep(cache, batch))
    cache.advance(batch)
    model.logits(hidden[0, -1:])


def _cache(model: DeepseekV4ForCausalLM, tokens: int) -> PagedCache:
    context = min(_CONTEXT, model.config.max_position_embeddings)
    return model.new_cache(tokens, context, tokens)


def _pack(found: Steps, names: list[str]) -> None:
    """The kernels that re-lay weights, there and back."""
    packing = importlib.import_module("dsv4.triton.fragments")
    codes, scales = (
        torch.empty((32, 1536 // n), dtype=torch.uint8, device="meta") for n in (2, 16)
    )
    for pairs in (False, True):
        packing.pack(codes, scales, pairs)
        packing.unpack(codes, scales, pairs)
    found.ran[_PACKING, "triton"] = Ran(kernels=set(names))


class _Recorder(TorchDispatchMode):
    """Looks at every operator call of a step, and runs what compiles."""

    def __init__(self, found: Steps, names: list[str]) -> None:
        super().__init__()
        self.found, self.names = found, names
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "dsv4":
            self._look(func, args)
        return func(*args, **(kwargs or {}))

    def _look(self, func: Any, args: tuple[Any, ...]) -> None:
        op, rest = func._opname, args[:-1]
        if op.endswith("_out"):
            op, rest = op.removesuffix("_out"), rest[:-1]
        key = repr((op, [_described(arg) for arg in rest]))
        if key in self.seen:
            return
        self.seen.add(key)
        call = dispatch.Call(op, rest, _GPU)
        objections = {}
        for row in dispatch.implementations(op):
            why = row.objection(call, dispatch.AUTO)
            if why is None:
                break
            objections[row.name] = why
        ran = self.found.ran.setdefault((op, row.name), Ran())
        ran.objections = {**objections, **ran.objections}
        self.names.clear()
        with self:
            if row.name in ("cute", "tcgen05"):
                names = [argument.name for argument in func._schema.arguments]
                self._before_product(row, dict(zip(names, args, strict=True)))
            elif row.name != "reference":
                dispatch.first(op, rest)
                if op == "moe_gather_quantize":  # and with the scales of calibrated experts
                    x, rows, offsets, _, layout = rest
                    scales = torch.empty(
                        offsets.shape[0] - 1, dtype=torch.float32, device=offsets.device
                    )
                    dispatch.first(op, (x, rows, offsets, scales, layout))
        ran.kernels.update(self.names)

    def _before_product(self, row: dispatch.Implementation, given: dict[str, Any]) -> None:
        """What products do to their input: quantise it, with a scale per row and a calibrated one.

        Hopper's expand it again, and what comes quantised.
        """
        x, scales = given.get("x"), given.get("x_scales")
        if x is None:
            return
        if scales is not None and row.name == "cute":
            block_values(x, scales, torch.bfloat16)
        if given.get("activation") != NVFP4.name:
            return
        experts = 1 if "offsets" not in given else given["offsets"].shape[0] - 1
        for scale in (None, torch.empty(experts, dtype=torch.float32, device=x.device)):
            if row.name == "cute":
                each = scale if scale is None else scale[:1]
                bfloat16_operand(x, each)
            elif "offsets" in given:
                grouped_nvfp4.quantized((x, None, None, scale), given["offsets"])
            else:
                gemm_nvfp4.quantized(x, scale)


def _described(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return tuple(arg.shape), arg.stride(), arg.dtype
    return arg


@contextmanager
def _compiling_for(arch: str, found: Steps, on_kernel: Callable[[], None]) -> Iterator[list[str]]:
    """Let launches compile instead, as on that GPU; gives the names of what was compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from dsv4.triton import _launch

    capability = next(number for number, name in ARCHITECTURES.items() if name == arch)
    names: list[str] = []
    hashes: set[str] = set()
    launch = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        names.append(self.__name__)
        if kernel.hash not in hashes:
            hashes.add(kernel.hash)
            found.compiled += 1
            on_kernel()
        return kernel

    options = {"launch_pdl": True, "enable_fp_fusion": True}
    replaced = [
        (JITFunction, "run", compiled),
        (_launch, "options", lambda tensor, few=False: {**options, "PDL": 2 if few else 1}),
        (_launch, "capability", lambda tensor: capability),
        (_launch, "multiprocessors", lambda device: _PROCESSORS[arch]),
        (_support, "_capability", lambda device: capability),
        (dispatch, "_device", lambda args: _GPU),
    ]
    driver = triton.runtime.driver
    with ExitStack() as undo:
        undo.callback(_support.forget_devices)
        for owner, name, value in replaced:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        _support.forget_devices()
        undo.callback(setattr, driver, "_active", driver._active)
        driver.set_active(_Driver(GPUTarget("cuda", 10 * capability[0] + capability[1], 32), arch))
        yield names


class _Driver:
    """What Triton asks of a driver before it launches.

    Compiled kernels are kept by device, so it is one that no GPU is.
    """

    def __init__(self, target: Any, device: str) -> None:
        self.target, self.device = target, device

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        return self.device

    def get_current_stream(self, device: Any) -> int:
        return 0
