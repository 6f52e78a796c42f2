"""Find what the steps of a model launch on a GPU that need not be there.

The steps run on the meta device, where layers compute shapes alone. Every operator's call is put to
the dispatcher as if its tensors were on that GPU, and where a Triton kernel is chosen its launcher
runs, with Triton's compiler replaced by a list of what it is asked for. So the list follows from
the code that chooses and launches; ``step_shapes`` adds the sizes at which that code changes.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import device as machine
from dsv4 import dispatch
from dsv4.compilation.draft_steps import DraftShape, draft_shapes, has_draft, run_draft_step
from dsv4.config import ModelConfig
from dsv4.cute import gemm_nvfp4, grouped_nvfp4
from dsv4.cute.runtime.architectures import EVERY_ARCHITECTURE, HOPPER
from dsv4.cute.sm90 import tuned
from dsv4.cute.sm90.tuned_records import TunedData
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear
from dsv4.layers.pack import join_packed_
from dsv4.layers.reserve import STEP_TOKENS
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.ops._library import OPERATIONS
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.gemm_swiglu import GemmSwigluArgs
from dsv4.ops.grouped_gemm import GroupedGemmArgs
from dsv4.ops.grouped_gemm_swiglu import GroupedGemmSwigluArgs, GroupedGemmSwigluQuantizeArgs
from dsv4.ops.grouped_gemm_swiglu_fp8 import GroupedGemmSwigluFp8Args, gemm_record
from dsv4.ops.quantize import bfloat16_operand, block_values, fp8_values, quantize
from dsv4.parallel.context import ParallelContext, tensor_parallel
from dsv4.quant.formats import (
    FP8_TOKEN,
    FRAGMENTS,
    LINEAR,
    NVFP4,
    SWIZZLED,
    QuantizedTensor,
    swizzled_size,
)
from dsv4.serving._setup import Limits, default_index_format, default_window_pages
from dsv4.serving.prompts import BUCKETS

_PADDED_SEQUENCES = (2, 8, 64)  # and to which of its sequences it may be padded, or more
_NARROWEST = 64  # tokens of the smallest cache that is looked at
_SHARING = 128  # tokens from which neighbours share index keys that Triton scores
# SMs of an A100, A40, L40S, H200, B200, B300 (assumed), RTX PRO 6000 and GB10. They decide how work
# is split.
PROCESSORS = {
    "sm_80": 108,
    "sm_86": 84,
    "sm_89": 142,
    "sm_90a": 132,
    "sm_100a": 148,
    "sm_103a": 148,
    "sm_120a": 188,
    "sm_121a": 48,
}
_PACKING = "fragments"
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


@dataclass(frozen=True)
class Target:
    """A GPU that steps are to run on.

    Attributes:
        arch: A value of ``EVERY_ARCHITECTURE``.
        processors: Its SMs, which decide how work is split.
        plans: Figures that plans of CuTeDSL kernels are chosen by; None: those that Hopper GPUs
            have by default.
    """

    arch: str
    processors: int = 0
    plans: TunedData | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, device: torch.device, arch: str) -> Target:
        """A GPU of this machine."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        own = tuned.tuned() if arch == HOPPER else None
        is_usual = own is None or own.digest == tuned.resolve(None).digest
        return cls(arch, processors, None if is_usual else own)

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability."""
        return next(n for n, name in EVERY_ARCHITECTURE.items() if name == self.arch)

    @property
    def sms(self) -> int:
        """The number of SMs, by default that of the architecture's GPU that was measured."""
        return self.processors or PROCESSORS[self.arch]


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step.

    Attributes:
        tokens: Tokens of all sequences.
        sequences: Their number; in a decode step that of tokens, and more where a step is padded.
        context: Tokens that a sequence has room for.
        index_format: Format of the indexer's keys; None: a runner's default.
    """

    tokens: int
    sequences: int
    context: int
    index_format: str | None = None


def impossible() -> str | None:
    """Return why Triton kernels cannot be compiled in this process, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "TRITON_INTERPRET is set, so kernels are interpreted in this process"
    return None


def step_shapes(max_tokens: int, context: int) -> list[StepShape]:
    """Shapes that together launch what steps of up to that many tokens do.

    Launchers choose by powers of two of tokens and sequences, and by how many tiles of 16 to 256
    tokens there are: each power and each tile of 64 begins a shape. CuTeDSL scores index keys if
    all tokens together have many; so at contexts between two powers Triton may score them.

    Args:
        max_tokens: Most tokens of a step.
        context: Most tokens of a sequence.
    """
    tokens = token_counts(max_tokens)
    powers = [count for count in tokens if count & (count - 1) == 0]
    beyond = [power + 1 for power in powers if power < max_tokens]
    shapes = [StepShape(count, 1, context) for count in tokens]
    shapes += [StepShape(n, n, context) for n in sorted({*tokens[:16], *powers, *beyond})]
    for count in beyond:
        counts = [n for n in (2 * count, 16 * count, max_tokens) if count < n <= max_tokens]
        shapes += [StepShape(n, count, context) for n in counts]
    padded = [bucket for bucket in BUCKETS if bucket <= max_tokens]
    shapes += [StepShape(n, m, context) for n in padded for m in _PADDED_SEQUENCES]
    for narrow in _contexts(context):
        shapes += [StepShape(n, n, narrow) for n in powers]
        shapes += [StepShape(n, n, narrow, "plain") for n in (1, 16, 64, 1024) if n <= max_tokens]
        if max_tokens >= _SHARING:
            shapes.append(StepShape(_SHARING, _SHARING, narrow + narrow // 2))
    shapes += [StepShape(n, m, context, "plain") for n in powers for m in (1, n)]
    return list(dict.fromkeys(shapes))


def every_shape(max_tokens: int, context: int, drafts: bool) -> list[StepShape | DraftShape]:
    """Return the shapes of a model's steps, of those that draft and verify if there is a draft."""
    shapes: list[StepShape | DraftShape] = [*step_shapes(max_tokens, context)]
    return [*shapes, *draft_shapes(max_tokens, context)] if drafts else shapes


def token_counts(most: int) -> list[int]:
    """Return numbers of tokens up to ``most`` at which launchers may choose other kernels."""
    powers = [1 << i for i in range(most.bit_length())]
    counts = {*range(1, 17), *powers, *(power + 1 for power in powers)}
    counts |= {48, *range(65, most, 64), most}
    return sorted(count for count in counts if count <= most)


def _contexts(most: int) -> list[int]:
    """Powers of two: tables and rows of scores are as wide."""
    powers = [_NARROWEST << i for i in range(max(0, (most // _NARROWEST).bit_length()))]
    return [power for power in powers if power < most]


def find_steps(
    model: DeepseekV4ForCausalLM,
    target: Target,
    max_tokens: int,
    shapes: Sequence[StepShape | DraftShape] | None = None,
) -> Steps:
    """Find what steps of decoding and prefill launch, what packing does, and the sampler.

    Not to be called while another thread runs operators.

    Args:
        model: On the meta device, packed for the GPU where it can be.
        target: The GPU.
        max_tokens: Most tokens of a step.
        shapes: Shapes of the steps; None: ``every_shape``.
    """
    config = model.config
    if shapes is None:
        shapes = every_shape(max_tokens, config.max_position_embeddings, has_draft(model))
    steps = Steps()
    with _listing_for(target, steps) as names, torch.inference_mode():
        _pack(steps, names)
        split = tensor_parallel(model.parallel)
        if split is None or has_draft(model):
            _sample(config)
        if split is not None:
            _gather(split)
        with _Recorder(steps, names):
            for shape in shapes:
                _step(model, shape)
    return steps


def of_each_kind(config: ModelConfig) -> ModelConfig:
    """Return the configuration with one layer of each kind."""
    kinds = dict.fromkeys(zip(config.layer_types, config.mlp_layer_types, strict=True))
    types, routers = zip(*kinds, strict=True)
    return config.replace(
        num_hidden_layers=len(kinds), layer_types=types, mlp_layer_types=routers, dspark=None
    )


def packed_model(config: ModelConfig, layout: str = FRAGMENTS) -> DeepseekV4ForCausalLM:
    """A bfloat16 model on the meta device as ``pack_`` leaves one in NVFP4."""
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config, mtp=False).to(torch.bfloat16)
        for module in model.modules():
            if isinstance(module, Linear | DeepseekV4Experts):
                declare_packed(module, layout if module.activation == NVFP4.name else FRAGMENTS)
        join_packed_(model)
    return model


def declare_packed(
    layer: Linear | DeepseekV4Experts, layout: str, exact: Sequence[bool] = ()
) -> None:
    """Give a layer on the meta device NVFP4 weights, in a layout if that can be.

    Args:
        layer: The layer.
        layout: A layout.
        exact: Whether its matrix, or each of its stacks, is exact in FP8; empty: none is.
    """
    if isinstance(layer, Linear):
        _declare_linear(layer, layout, any(exact[:1]))
    else:
        _declare_experts(layer, layout, exact)


def _declare_linear(layer: Linear, layout: str, exact: bool) -> None:
    rows, columns = layer.out_features, layer.in_features
    codes, scales = (
        torch.empty((rows, columns // n), dtype=torch.uint8, device="meta") for n in (2, 16)
    )
    if layout == SWIZZLED:
        scales = torch.empty(
            swizzled_size(rows, columns // 16), dtype=torch.float8_e4m3fn, device="meta"
        )
    exponent = torch.empty(rows, dtype=torch.int8, device="meta") if exact else None
    scale = torch.empty(1, dtype=torch.float32, device="meta")
    try:
        layer.set_weight(QuantizedTensor(codes, scales, scale, NVFP4, layout, (), exponent))
    except ValueError:  # no whole number of tiles: pack_ leaves it
        layer.to_format(NVFP4)


def _declare_experts(layer: DeepseekV4Experts, layout: str, exact: Sequence[bool]) -> None:
    try:
        layer.declare_packed(layout, exact)
    except ValueError:  # no whole number of tiles: pack_ leaves them
        layer.to_format(NVFP4)


def _step(model: DeepseekV4ForCausalLM, shape: StepShape | DraftShape) -> None:
    """A step as ``dsv4.serving.Runner`` runs it."""
    context = min(shape.context, model.config.max_position_embeddings)
    # The number of a cache's sequences decides nothing.
    limits = Limits(2, context, min(context, STEP_TOKENS), 0)
    default = default_index_format(model.config)
    if isinstance(shape, DraftShape):
        run_draft_step(model, _pools(model.config, model.dtype, limits, default), shape)
        return
    cache = _pools(model.config, model.dtype, limits, shape.index_format or default)
    rows = torch.zeros(shape.sequences, dtype=torch.int64, device="meta")
    if shape.sequences == shape.tokens:
        batch = Batch.decode(cache.lengths[rows], rows)
    else:
        lengths = [shape.tokens // shape.sequences] * shape.sequences  # 0 of padding
        lengths[0] += shape.tokens - sum(lengths)
        batch = Batch.from_lengths(lengths, rows, rows)
    ids = torch.zeros((1, shape.tokens), dtype=torch.int64, device="meta")
    hidden, _ = model.model(ids, None, CacheStep(cache, batch))
    cache.advance(batch)
    model.logits(hidden[0, -shape.sequences :])


@functools.lru_cache(maxsize=4)
def _pools(
    config: ModelConfig, dtype: torch.dtype, limits: Limits, index_format: str
) -> PagedCache:
    """The cache of a runner with these limits."""
    return PagedCache(
        config,
        max_sequences=limits.rows,
        max_tokens=limits.max_tokens,
        max_chunk=limits.max_chunk,
        device=torch.device("meta"),
        dtype=dtype,
        index_format=index_format,
        pool_tokens=limits.pool_tokens(),
        window_pages=default_window_pages(config, limits),
    )


def _sample(config: ModelConfig) -> None:
    """The sampler's kernels, of every variant."""
    sampling = importlib.import_module("dsv4.triton.sampling")
    logits = torch.empty((2, config.vocab_size), dtype=torch.float32, device="meta")
    rows = torch.empty(2, dtype=torch.int64, device="meta")
    numbers = torch.empty((3, 4), dtype=torch.float64, device="meta")
    integers = torch.empty((3, 2), dtype=torch.int64, device="meta")
    present = torch.empty((3, config.vocab_size), dtype=torch.bool, device="meta")
    for filters in (False, True):
        for mask in (None, present):
            sampling.sample(logits, rows, numbers, integers, rows, mask, filters=filters)


def _gather(context: ParallelContext) -> None:
    """The kernel that gathers candidates of the sampler, of sizes that compile differently."""
    for count in (1, 4):  # 4 and 16 elements of a mailbox
        context.group.all_gather(torch.empty(count, dtype=torch.float64, device="meta"))


def _pack(steps: Steps, names: list[str]) -> None:
    """The kernels that re-lay weights, there and back."""
    packing = importlib.import_module("dsv4.triton.fragments")
    codes, scales = (
        torch.empty((32, 1536 // n), dtype=torch.uint8, device="meta") for n in (2, 16)
    )
    for pairs in (False, True):
        packing.pack(codes, scales, pairs)
        packing.unpack(codes, scales, pairs)
    steps.ran[_PACKING, "triton"] = Ran(kernels=set(names))


class _Recorder(TorchDispatchMode):
    """Looks at every operator call of a step, and runs what compiles."""

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
            if row.name in ("cute", "tcgen05", "fp8"):
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
            if args.activation == "fp8":
                layout = FRAGMENTS if args.format == NVFP4.name else LINEAR
                quantize(args.x.reshape(-1, args.x.shape[-1]), FP8_TOKEN, layout=layout)
            return
        grouped = isinstance(args, _GROUPED_RECORDS)
        if grouped and args.x_scales is not None and row.name != "tcgen05":
            block_values(args.x, args.x_scales, torch.bfloat16, args.x_layout)
        if args.activation == "fp8":
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
def _listing_for(target: Target, steps: Steps) -> Iterator[list[str]]:
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
        (
            cute_indexer,
            "indexer_logits",
            lambda *args: None,
        ),  # CuTeDSL kernels, which are listed elsewhere
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
