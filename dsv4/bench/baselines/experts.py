"""Baselines of grouped GEMMs over sorted rows, for ``dsv4.bench.suites.moe``.

No library's GEMM has the SwiGLU of these experts fused, so this package's SwiGLU kernel follows it,
and both are timed together.

* ``torch._grouped_mm`` multiplies bfloat16 weights, of 3.6 times the bytes.
* Humming multiplies NVFP4 weights packed its own way, with one global scale for an expert: it is
  given that of the expert's first row. Seen with humming-kernels 0.1.19.
* transformers' own experts take tokens and their choices, so they are compared with the block.
  ``eager`` loops over the experts that have rows, waits for the GPU and is not in a graph;
  ``grouped_mm`` sorts; ``batched_mm`` copies the weights of every choice. All have bfloat16
  weights, the routing weight after the second GEMM, and no shared expert.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import io
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dsv4 import ops
from dsv4.bench.tables import short
from dsv4.quant.formats import LINEAR, QuantizedTensor
from dsv4.reference.fragments import deinterleaved

_TOLERANCE = 0.01  # relative to the norm; a rounding to bfloat16 is 0.002
_SPARE = 16 << 30  # bytes reserved for inputs and results, whatever their size
_ROWS = 8
_MOST = 200  # characters of why a library fails
_TOKENS = 2  # each has k experts to dequantise
ALL, FIRST, NONE = "all", "first", "none"  # global scales
_T = TypeVar("_T")
Multiply = Callable[[torch.Tensor, Any], torch.Tensor]


@dataclass(frozen=True)
class Pair:
    """Both GEMMs of a baseline.

    Attributes:
        gate_up: Takes rows ``[R, H]`` and what ``offsets`` gave; returns ``[R, 2 I]``.
        down: Likewise, from ``[R, I]`` to ``[R, H]``.
        offsets: Turns offsets, int32 ``[E + 1]``, into what the library takes.
        scales: Global scales that it applies: ``ALL``, ``FIRST`` (that of an expert's first row
            stands for all of its rows) or ``NONE``.
        tolerance: Error of a product over its norm that is allowed.
    """

    gate_up: Multiply
    down: Multiply
    offsets: Callable[[torch.Tensor], Any]
    scales: str
    tolerance: float = _TOLERANCE


@dataclass(frozen=True)
class Whole:
    """All of a baseline's experts.

    Attributes:
        forward: From tokens ``[T, H]``, their choices ``[T, k]``, what these weigh, and the clamp's
            bound to ``[T, H]``.
    """

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float | None], torch.Tensor]


@dataclass(frozen=True)
class Operands:
    """Both GEMMs of a baseline on operands that are made before, without anything between them.

    Attributes:
        calls: Takes rows ``[R, H]`` in bfloat16 and offsets, int32 ``[E + 1]``; returns a call of
            each GEMM. The rows of the second are the first columns of those of the first.
    """

    calls: Callable[
        [torch.Tensor, torch.Tensor], tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]
    ]


@dataclass(frozen=True)
class Own:
    """This package's kernels for bfloat16 activations, with the weights that are there."""


Baseline = Pair | Whole | Operands | Own
Prepare = Callable[[QuantizedTensor, QuantizedTensor], Baseline]


def attempt(action: Callable[[], _T]) -> _T | str:
    """Return the result of ``action``, or why it fails: a library may fail in any way.

    What it prints goes to stderr in the end, without empty lines: Humming prints what its compiler
    said, which is nothing where an interrupt ended that.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            return action()
    except Exception as problem:
        first = (str(problem).splitlines() or [""])[0]
        return f"{type(problem).__name__}: {short(first, _MOST)}"
    finally:
        for line in filter(str.strip, printed.getvalue().splitlines()):
            print(line, file=sys.stderr)


def release(device: torch.device) -> None:
    """Give back the memory of a baseline that is gone, if the device still answers."""
    gc.collect()
    if device.type == "cuda":
        attempt(torch.cuda.empty_cache)


def of_expert(weight: QuantizedTensor, expert: int, scales: str) -> QuantizedTensor:
    """``[N, K]`` of one expert, with global scales as in ``Pair``."""
    matrix = weight[expert]
    assert matrix.global_scale is not None
    if scales == ALL:
        return matrix
    first = matrix.global_scale[:1].contiguous()
    scale = first if scales == FIRST else torch.ones_like(first)
    return dataclasses.replace(matrix, global_scale=scale)


def _dense(weight: QuantizedTensor, expert: int, scales: str) -> torch.Tensor:
    of_one = of_expert(weight, expert, scales)
    return ops.dequantize(of_one, torch.bfloat16, backend="reference")


def compare(
    made: Pair,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    weights: tuple[QuantizedTensor, QuantizedTensor],
) -> None:
    """Compare the first rows of the expert that has most with the dequantised weight's.

    Raises:
        ValueError: if the norm of the difference is more than the tolerance times the norm.
    """
    expert = int(offsets.diff().argmax())
    start, end = offsets[expert : expert + 2].tolist()
    sample = slice(start, min(end, start + _ROWS))
    inner = rows[:, : weights[1].columns].contiguous()
    for x, multiply, weight in ((rows, made.gate_up, weights[0]), (inner, made.down, weights[1])):
        result = multiply(x, made.offsets(offsets))[sample].float()
        truth = x[sample].float() @ _dense(weight, expert, made.scales).float().T
        error = float((result - truth).norm() / truth.norm())
        if not error <= made.tolerance:
            raise ValueError(f"off by {error:.1e}, left out")


def compare_whole(
    made: Whole,
    routed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    limit: float | None,
    weights: tuple[QuantizedTensor, QuantizedTensor],
) -> None:
    """Compare the first tokens with the dequantised weights' sums; raises as ``compare`` does."""
    x, ids, factors = routed
    result = made.forward(*routed, limit)[:_TOKENS].double()
    truth = torch.zeros_like(result)
    for token in range(len(truth)):
        for expert, factor in zip(ids[token].tolist(), factors[token].double(), strict=True):
            first, second = (_dense(weight, expert, ALL).double() for weight in weights)
            both = first @ x[token].double()
            truth[token] += factor * (second @ ops.swiglu(both, limit, layout="interleaved"))
    error = float((result - truth).norm() / truth.norm())
    if not error <= _TOLERANCE:
        raise ValueError(f"off by {error:.1e}, left out")


def check_memory(device: torch.device, needed: int) -> None:
    """Raise RuntimeError unless a GPU has ``needed`` bytes to spare."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    if needed + _SPARE > free:
        required = f"{needed / 1e9:.0f} GB and {_SPARE / 1e9:.0f} to spare"
        raise RuntimeError(f"its weights take {required}, {free / 1e9:.0f} GB are free")


def grouped_mm(gate_up: QuantizedTensor, down: QuantizedTensor) -> Pair:
    """bfloat16 weights, dequantised an expert at a time.

    Raises:
        RuntimeError: if they do not fit the GPU.
    """
    check_memory(gate_up.device, 2 * sum(w.codes.numel() * 2 for w in (gate_up, down)))
    multiply = getattr(torch, "_grouped_mm")  # noqa: B009, not in torch's annotations

    def multiplier(weight: torch.Tensor) -> Multiply:
        return lambda x, ends: multiply(x, weight, offs=ends)

    first, second = (multiplier(_stacked(w).transpose(1, 2)) for w in (gate_up, down))
    return Pair(first, second, lambda offsets: offsets[1:].contiguous(), ALL)


def _stacked(weight: QuantizedTensor) -> torch.Tensor:
    """``[E, N, K]`` in bfloat16."""
    dense = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    for expert in range(weight.shape[0]):
        dense[expert] = _dense(weight, expert, ALL)
    return dense


def transformers_experts(
    implementation: str, gate_up: QuantizedTensor, down: QuantizedTensor
) -> Whole:
    """transformers' module with one of its own implementations.

    Raises:
        ImportError: if it is not installed, or knows no DeepSeek-V4.
        RuntimeError: if the weights do not fit the GPU.
    """
    library = importlib.import_module("transformers")
    models = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    check_memory(gate_up.device, 2 * sum(w.codes.numel() * 2 for w in (gate_up, down)))
    experts, hidden, inner = down.shape
    config = library.DeepseekV4Config(
        n_routed_experts=experts, hidden_size=hidden, moe_intermediate_size=inner
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        module = models.DeepseekV4Experts(config).requires_grad_(False)
    both = deinterleaved(_stacked(gate_up))
    for name, weight in (("gate_up_proj", both), ("down_proj", _stacked(down))):
        assert getattr(module, name).shape == weight.shape
        setattr(module, name, torch.nn.Parameter(weight, requires_grad=False))

    def forward(
        x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, limit: float | None
    ) -> torch.Tensor:
        module.limit = math.inf if limit is None else limit
        with torch.no_grad():
            return module(x, ids, weights)

    return Whole(forward)


def humming(gate_up: QuantizedTensor, down: QuantizedTensor) -> Pair:
    """Humming's grouped kernel for rows that lie expert by expert.

    Raises:
        ImportError: if it is not installed.
        RuntimeError: if the weights do not fit the GPU twice.
    """
    library = importlib.import_module("humming.layer")
    check_memory(gate_up.device, 2 * gate_up.nbytes + down.nbytes)
    config = {"gemm_type": "grouped_contiguous"}

    def multiplier(weight: QuantizedTensor) -> Multiply:
        layer = _humming_layer(library, weight)
        return lambda x, offsets: layer(x, expert_layout=offsets, compute_config=config)

    first, second = (multiplier(weight) for weight in (gate_up, down))
    return Pair(first, second, lambda offsets: offsets.long(), FIRST)


def _humming_layer(library: Any, weight: QuantizedTensor) -> Any:
    experts, rows, columns = weight.shape
    codes = torch.empty_like(weight.codes)
    scales = torch.empty_like(weight.scales).view(torch.float8_e4m3fn)
    for expert in range(experts):
        linear = weight[expert].with_layout(LINEAR)
        codes[expert], scales[expert] = linear.codes, linear.scales
    layer = library.HummingLayer(
        shape_n=rows,
        shape_k=columns,
        num_experts=experts,
        weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
        torch_dtype=torch.bfloat16,
    ).to(weight.device)
    assert weight.global_scale is not None
    stored = {"weight": codes, "weight_scale": scales}
    layer.load_from_tensors({**stored, "weight_scale_2": weight.global_scale[:, 0].contiguous()})
    del codes, scales, stored
    layer.transform()
    release(weight.device)
    return layer


BASELINES: dict[str, Prepare] = {
    "torch._grouped_mm (bf16 weights)": grouped_mm,
    "Humming (one global scale)": humming,
    **{
        f"transformers {name} (bf16 weights)": functools.partial(transformers_experts, name)
        for name in ("eager", "grouped_mm", "batched_mm")
    },
}
