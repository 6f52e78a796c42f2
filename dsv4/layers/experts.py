"""The routed experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from dsv4 import dispatch
from dsv4.config import ModelConfig
from dsv4.layers._expert_weights import ExpertWeights
from dsv4.layers._routed_rows import RoutedRows
from dsv4.layers._workspace import Buffers, Workspace
from dsv4.layers.observer import AmaxObserver
from dsv4.ops.fp8_token import code_layout, moe_gather_fp8
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu, grouped_gemm_swiglu_quantize
from dsv4.ops.grouped_gemm_swiglu_fp8 import grouped_gemm_swiglu_fp8
from dsv4.ops.moe import moe_gather_quantize, moe_permute, moe_sort
from dsv4.ops.swiglu import swiglu
from dsv4.overlap import IN_ORDER, Streams
from dsv4.quant.formats import LINEAR, SWIZZLED, QuantizedTensor

# The shared expert's output ``[T, H]``, or what launches its last GEMM and returns it.
Shared = torch.Tensor | Callable[[], torch.Tensor] | None


class _Part(NamedTuple):
    """The part of a step's experts that one GEMM multiplies.

    Attributes:
        slots: Their slots in the layer; None: all.
        step_rows: Rows of the step, see ``grouped_gemm``; 0: as many as the call has.
        step_experts: Experts of the step, likewise.
        tensors: Stacks that have these slots, by name, instead of the layer's; None: the layer's.
    """

    slots: slice | None = None
    step_rows: int = 0
    step_experts: int = 0
    tensors: Mapping[str, torch.Tensor] | None = None

    def of(self, name: str, stack: torch.Tensor) -> torch.Tensor:
        """Return the slots of a stack of the layer, or of the one of this name."""
        stack = stack if self.tensors is None else self.tensors[name]
        return stack if self.slots is None else stack[self.slots]


_WHOLE = _Part()


class DeepseekV4Experts(ExpertWeights):
    """The routed experts of a layer, or a range of them for expert parallelism, stacked.

    With a range, ``forward`` returns the sum of those experts alone, rounded like the whole: the
    caller adds up the ranges' results, and passes ``shared`` to one range alone.

    Parameters of plain experts: ``gate_up_proj [E, 2I, H]`` (gate rows first) and
    ``down_proj [E, H, I]``. Of quantised ones: the same names for the codes, and with the suffixes
    ``_scale`` (block scales), ``_scale_2`` (global scales, ``[E, 2]`` for gate and up, ``[E, 1]``
    for down; multiply) and ``_input_scale [E]`` (activation global scales; multiply).

    With DeepSeek's numerics the routing weight multiplies before the down projection, with
    transformers' after it: equal in exact arithmetic, not after rounding (specification, section
    8.2).

    ``pack`` re-lays NVFP4 weights for tensor cores, gate and up rows interleaved; then
    ``gate_up_proj_scale`` and ``down_proj_scale`` are uint8 for Hopper's, and ``[E, bytes]`` for
    Blackwell's. Packed layers round nothing between the first GEMM and SwiGLU, where others round
    its result to the dtype of ``hidden_states``. State dicts do not depend on the layout: a packed
    layer writes what an unpacked one writes, and raises on loading.

    Args:
        config: A ``ModelConfig`` or transformers' configuration.
        first_expert: The first expert held here.
        num_local_experts: E, the number of experts held here; None for all from ``first_expert``
            on.

    Raises:
        ValueError: if there are no such experts.

    Attributes:
        format: None for plain weights, else their ``Format``.
        layout: Layout of the weights: ``"linear"``, or ``"fragments_16x64"`` or
            ``"swizzled_128x4"`` when packed.
        activation: ``"bf16"`` leaves the inputs of both GEMMs as they are; ``"nvfp4"`` quantises
            them, with the scales of their expert or, without those, with a scale per row; ``"fp8"``
            rounds them to FP8 by rows.
        exactness: By name of packed weights for Hopper, whether FP8 tensor cores can multiply them
            without a rounding, and what is in the way.
        workspace: Memory for the rows, shared with other layers (``reserve_experts``), or None.
        hosted: Slots and host memory, where not all experts are on the device
            (``dsv4.layers.host_experts``); ``num_local_experts`` is the number of slots then.
    """

    def __init__(
        self, config: Any, first_expert: int = 0, num_local_experts: int | None = None
    ) -> None:
        config = ModelConfig.of(config)
        super().__init__(config, first_expert, num_local_experts)
        self.num_experts_per_tok = config.num_experts_per_tok
        self.limit = config.swiglu_limit
        self.numerics = config.numerics
        self.activation = config.activation
        self.observers: dict[str, AmaxObserver] | None = None
        self.workspace: Workspace | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        shared: Shared = None,
        streams: Streams = IN_ORDER,
        slots: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the sum of the chosen experts' outputs, of those held here, times their weights.

        Args:
            hidden_states: See ``routed_rows``, also for the following arguments.
            top_k_index: ``[T, k]``.
            top_k_weights: ``[T, k]``.
            shared: ``[T, H]``, added in float32 before rounding, or None; or see ``routed_rows``.
            streams: Side streams.
            slots: Slots of hosted experts, or None.

        Returns:
            ``[T, H]`` in ``hidden_states.dtype``.

        Raises:
            ValueError: as ``routed_rows``.
        """
        return self.routed_rows(
            hidden_states, top_k_index, top_k_weights, shared, streams, slots
        ).combined()

    def routed_rows(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        shared: Shared = None,
        streams: Streams = IN_ORDER,
        slots: Callable[[], torch.Tensor] | None = None,
    ) -> RoutedRows:
        """Return the chosen experts' outputs, of those held here, to be added up for each token.

        Args:
            hidden_states: ``[T, H]``.
            top_k_index: ``[T, k]`` int64; other ranks' experts, -1 and the number of experts add
                nothing. Anything else raises on the CPU, and adds nothing on another device, where
                ``dsv4.debug.count_dropped`` counts it.
            top_k_weights: ``[T, k]``.
            shared: ``[T, H]``, the shared expert's output, one of the summands; or a function that
                launches its last GEMM and returns it, called when the rows are sorted.
            streams: Side streams on which the work ``"shared"`` makes ``shared``; it is joined when
                everything else is launched.
            slots: Waits for experts in host memory that are being loaded already
                (``dsv4.layers.early_experts``), and returns the slots of all choices; None: this
                call loads the missing experts.

        Returns:
            The rows, in ``hidden_states.dtype``; in reserved memory until the next call of a layer.

        Raises:
            ValueError: if the reserved memory (``dsv4.layers.reserve_experts``) is for fewer
                tokens, or for another dtype or device.
        """
        part = _WHOLE if self.hosted is None else _Part(step_experts=self.num_experts)
        if self.hosted is not None:
            if self.hosted.obstacle(top_k_index.numel()) is not None:
                shared = shared() if callable(shared) else shared
                return self._in_waves(hidden_states, top_k_index, top_k_weights, shared, streams)
            top_k_index = self.fetch(top_k_index) if slots is None else slots()
        buffers = self._buffers_for(hidden_states, top_k_index.shape[1])
        rows, row_weight, offsets, row_of_slot = self._sorted(
            hidden_states, top_k_index, top_k_weights, buffers.rows
        )
        if callable(shared):
            shared = shared()
        weights: torch.Tensor | None = None
        if self.numerics != "deepseek":
            row_weight, weights = None, top_k_weights
        inner = self._activated(rows, offsets, row_weight, buffers.inner, part)
        out = self._project("down_proj", inner, offsets, buffers.rows, part, hidden_states.dtype)
        if shared is not None:
            streams.join("shared", shared)
        return RoutedRows(out, row_of_slot, offsets, weights, shared)

    def fetch(self, ids: torch.Tensor) -> torch.Tensor:
        """Load the missing experts of a step; return the slots ``[T, k]`` of all choices.

        Raises:
            ValueError: if none are in host memory, or the layer is being calibrated or compiled.
        """
        if self.hosted is None:
            raise ValueError("fetch: no expert is in host memory, wanted some (host_experts_)")
        self._check_hosted()
        return self.hosted.fetch(ids)

    def _check_hosted(self) -> None:
        if self.observers is not None:
            raise ValueError(
                "Experts: the layer is being calibrated, wanted all experts on one device: load "
                "the model with host_experts=None"
            )
        # torch.compile then runs the layer eagerly, or with fullgraph raises.
        if torch.compiler.is_compiling():
            raise ValueError("Experts: experts in host memory cannot be compiled by torch.compile")

    def _in_waves(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None,
        streams: Streams,
    ) -> RoutedRows:
        """Do what ``routed_rows`` does for a step that may need more experts than slots hold.

        The host reads which experts the step needs. Rows are sorted once, in the order of the
        waves; each wave multiplies its rows by a slice of the slots, or of the buffer that long
        prompts pass their experts through.
        """
        self._check_hosted()
        hosted = self.hosted
        assert hosted is not None
        step = hosted.plan(ids)
        position, bounds = step.waves.position, step.bounds
        table = torch.tensor([*position, -1], dtype=torch.int64, device="cpu").to(ids.device)
        buffers = self._buffers_for(x, ids.shape[1])
        rows, row_weight, offsets, row_of_slot = moe_sort(
            x, table[hosted.numbers(ids)], weights, self.num_experts, out=buffers.rows
        )
        scaled = self.numerics == "deepseek"
        out = torch.empty_like(rows) if buffers.rows is None else buffers.rows
        for loaded in hosted.run(step):
            wave = loaded.wave
            start, stop = bounds[wave.first], bounds[wave.stop_first]
            if start == stop:  # no token chose an expert of the buffer
                continue
            offsets_of = offsets[wave.first : wave.stop_first + 1] - start
            slots = slice(wave.start, wave.stop)
            part = _Part(slots, len(rows), self.num_experts, loaded.tensors)
            row_weights = row_weight[start:stop] if scaled else None
            memory = None if buffers.inner is None else buffers.inner[start:stop]
            inner = self._activated(rows[start:stop], offsets_of, row_weights, memory, part)
            self._project("down_proj", inner, offsets_of, out[start:stop], part, x.dtype)
        if shared is not None:
            streams.join("shared", shared)
        return RoutedRows(out, row_of_slot, offsets, None if scaled else weights, shared)

    def gemm_calls(self, tokens: int, dtype: torch.dtype) -> tuple[dispatch.Call, dispatch.Call]:
        """Return the operator calls of both GEMMs, for ``dispatch.choose``; run nothing.

        Args:
            tokens: T.
            dtype: Dtype of ``hidden_states``.
        """
        device, count = self.gate_up_proj.device, tokens * self.num_experts_per_tok
        offsets = torch.empty(self.num_local_experts + 1, dtype=torch.int32, device=device)
        rows, inner = (
            torch.empty((count, columns), dtype=dtype, device=device)
            for columns in (self.hidden_dim, self.intermediate_dim)
        )
        part = _WHOLE if self.hosted is None else _Part(step_experts=self.num_experts)
        first = dispatch.arguments(self._activated, rows, offsets, None, None, part)
        return first, dispatch.arguments(self._project, "down_proj", inner, offsets, None, part)

    def reserve(self, workspace: Workspace | None) -> None:
        """Use this memory from now on; with None, memory of the allocator."""
        if self.workspace is not None:
            del self.workspace  # out of the submodules, which would keep and print a None
        self.workspace = workspace

    def _buffers_for(self, x: torch.Tensor, top_k: int) -> Buffers:
        if self.workspace is None or torch.compiler.is_compiling():
            return Buffers()
        return self.workspace.buffers_for(x, top_k)

    def _sorted(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor | QuantizedTensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Sort rows (``moe_sort``) to ``out``, quantised if the first GEMM takes codes.

        The first GEMM takes codes with FP8 activations, and on Blackwell with NVFP4 activations.
        The rows are therefore quantised as they are sorted, in one pass. The kernels of a layer
        with all experts sort the slots of hosted experts, whatever the number of slots.
        """
        experts = self.num_experts
        held: Any = {
            "first_expert": self.first_expert,
            "num_local_experts": self.num_local_experts if self.hosted is None else experts,
        }
        may_quantise = self.activation != "bf16" and x.dtype == torch.bfloat16
        rounds = may_quantise and self._rounds and self.layout != LINEAR
        quantises = may_quantise and self._quantises and self.layout == SWIZZLED
        if not (rounds or quantises):
            gathered = moe_sort(x, ids, weights, experts, out=out, **held)
            if self.hosted is not None:  # slots come first among the experts that are held
                held_offsets = gathered[2][: self.num_local_experts + 1]
                return (*gathered[:2], held_offsets, gathered[3])
            return gathered
        order, offsets, row_of_slot = moe_permute(ids, experts, **held)
        if self.hosted is not None:
            offsets = offsets[: self.num_local_experts + 1]
        if rounds:
            layout = code_layout(self.quantized_weight("gate_up_proj"))
            coded, coded_weight = moe_gather_fp8(x, row_of_slot, weights, result_layout=layout)
            return coded, coded_weight, offsets, row_of_slot
        scale = self.gate_up_proj_input_scale
        rows = moe_gather_quantize(x, row_of_slot, offsets, input_scale=scale)
        row_weight = weights.reshape(-1)[order.long()] if self.numerics == "deepseek" else None
        return rows, row_weight, offsets, row_of_slot

    @property
    def _quantises(self) -> bool:
        """Return whether GEMMs quantise to NVFP4; not while an observer looks at their rows."""
        return self.activation == "nvfp4" and self.observers is None

    @property
    def _rounds(self) -> bool:
        """Return whether GEMMs round their rows to FP8; as in ``Linear``, not plain weights'."""
        return self.activation == "fp8" and self.observers is None and self.format is not None

    def _activated(
        self,
        rows: torch.Tensor | QuantizedTensor,
        offsets: torch.Tensor,
        row_weight: torch.Tensor | None,
        out: torch.Tensor | None,
        part: _Part = _WHOLE,
    ) -> torch.Tensor | QuantizedTensor:
        """Return SwiGLU of the first GEMM, ``[R, I]``; in ``out`` if the layer is packed.

        The experts are those of ``part``. The result is quantised if the layer is packed and the
        second GEMM would do so, to NVFP4 only with given scales.
        """
        name = "gate_up_proj"
        options: Any = {
            "row_weight": row_weight,
            "step_rows": part.step_rows,
            "step_experts": part.step_experts,
        }
        if isinstance(rows, torch.Tensor):
            if self.layout == LINEAR:
                gate_up = self._project(name, rows, offsets, None, part)
                return swiglu(gate_up, self.limit, row_weight=row_weight)
            activation, scale = self._quantising(name, rows, offsets, part)
            options |= {"activation": activation, "input_scale": scale}
        weight = self.quantized_weight(name, part.slots, part.tensors)
        operands = (rows, weight, offsets, self.limit)
        if self._quantises and self.down_proj_input_scale is not None:
            result_scale = part.of("down_proj_input_scale", self.down_proj_input_scale)
            return grouped_gemm_swiglu_quantize(*operands, result_scale, **options)
        if self._rounds:
            layout = code_layout(self.quantized_weight("down_proj"))
            return grouped_gemm_swiglu_fp8(*operands, result_layout=layout, **options)
        return grouped_gemm_swiglu(*operands, out=out, **options)

    def _project(
        self,
        name: str,
        rows: torch.Tensor | QuantizedTensor,
        offsets: torch.Tensor,
        out: torch.Tensor | None = None,
        part: _Part = _WHOLE,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Multiply rows, or codes of rows, by the weights ``name``.

        The result has ``dtype``; None: that of rows, which are no codes then.
        """
        options: Any = {
            "out": out,
            "out_dtype": dtype,
            "step_rows": part.step_rows,
            "step_experts": part.step_experts,
        }
        if isinstance(rows, torch.Tensor):
            activation, scale = self._quantising(name, rows, offsets, part)
            if self.format is None:
                return grouped_gemm(rows, part.of(name, getattr(self, name)), offsets, **options)
            options |= {"activation": activation, "input_scale": scale}
        options["settled"] = name == "down_proj"
        weight = self.quantized_weight(name, part.slots, part.tensors)
        return grouped_gemm(rows, weight, offsets, **options)

    def _quantising(
        self, name: str, rows: torch.Tensor, offsets: torch.Tensor, part: _Part
    ) -> tuple[str, torch.Tensor | None]:
        """Return how a GEMM takes its rows, and with which scales; an observer sees them first."""
        if self.observers is not None:
            self._observe(name, rows, offsets)
        if self.activation == "bf16":
            return "bf16", None
        if self._quantises:
            name += "_input_scale"
            scale = getattr(self, name)
            return "nvfp4", None if scale is None else part.of(name, scale)
        return "fp8" if self._rounds else "bf16", None

    def _observe(self, name: str, rows: torch.Tensor, offsets: torch.Tensor) -> None:
        assert self.observers is not None
        bounds = offsets.tolist()
        for expert, (start, stop) in enumerate(pairwise(bounds)):
            self.observers[name].see(rows[start:stop], expert)

    def extra_repr(self) -> str:
        """Sizes, format, activation, and the layout of packed weights."""
        layout = "" if self.layout == LINEAR else f", layout={self.layout}"
        name = "plain" if self.format is None else self.format.name
        return (
            f"{self._range()} experts, {self.hidden_dim} -> {self.intermediate_dim}, {name}, "
            f"activation={self.activation}{layout}"
        )
