"""Load a transformers model from a checkpoint, with this package's modules in place of its own."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsv4.checkpoint.arguments import as_dtype
from dsv4.checkpoint.filling import FillRequest, fill_module
from dsv4.checkpoint.kernels_ahead import begin_kernels_of
from dsv4.checkpoint.reader import Checkpoint
from dsv4.compilation.ahead import KernelsAhead
from dsv4.compilation.warmup import warm_loaded
from dsv4.config import ModelConfig
from dsv4.integrations._applying import swap_modules
from dsv4.integrations._configs import generation_config, transformers_config, with_modes
from dsv4.integrations._expert_parallel import Distribution
from dsv4.integrations._recipe import SwappedRecipe
from dsv4.integrations._report import Report
from dsv4.layers.reserve import warm_allocator
from dsv4.layers.step_tokens import step_tokens

_logger = logging.getLogger("dsv4.integrations.transformers")


@dataclass(frozen=True, kw_only=True)
class PretrainedRequest:
    """Arguments of ``from_pretrained``, by their names there.

    Attributes:
        values: Those that say how values become those of the model.
        parts: Parts to swap.
    """

    path: str | Path
    values: FillRequest
    numerics: str
    parts: tuple[str, ...]
    reserve_tokens: int | None
    compile_kernels: bool
    distributed_config: Any

    @property
    def has_list(self) -> bool:
        """Whether the kernels of steps are listed and compiled.

        Steps of a rank launch kernels of transformers' own exchange, too, and have no list.
        """
        return self.compile_kernels and self.distributed_config is None

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return torch.device("cpu" if self.values.device is None else self.values.device)

    def distribution(self, modeling: Any, config: ModelConfig) -> Distribution | None:
        """Set up the processes that share the model; None: this one has it alone."""
        if self.distributed_config is None:
            return None
        return Distribution.prepare(
            self.distributed_config, modeling, config, self.parts, self.device
        )


def load_pretrained(request: PretrainedRequest, modeling: Any) -> Any:
    """Load the model that is requested; see ``from_pretrained`` for errors.

    Args:
        request: The request.
        modeling: transformers' module of DeepSeek-V4 code.
    """
    with KernelsAhead() as ahead:
        with Checkpoint.open(request.path) as checkpoint:
            config = with_modes(checkpoint.config(), request.numerics, request.values.activation)
            checkpoint.check_size(config)
            distribution = request.distribution(modeling, config)
            model = _filled(request, modeling, checkpoint, config, distribution, ahead)
        _narrow_norms(model, modeling)
        _finish(model, modeling, request.device)
        model.generation_config = generation_config(Path(request.path), config)
        _make_ready(model, request, config, ahead)
    _warn_of_left_out(request.path, model.dsv4_report)
    if distribution is not None:
        distribution.install(model)
    return model.eval().requires_grad_(False)


def _filled(
    request: PretrainedRequest,
    modeling: Any,
    checkpoint: Checkpoint,
    config: ModelConfig,
    distribution: Distribution | None,
    ahead: KernelsAhead,
) -> Any:
    """Build the model, swap its modules and fill it, while its kernels are compiled ahead.

    ``dsv4_report`` says what was replaced.
    """
    experts = None if distribution is None else distribution.experts
    with torch.device("meta"):
        theirs = transformers_config(config, as_dtype(request.values.dtype))
        model = modeling.DeepseekV4ForCausalLM(theirs)
    if experts is not None:
        experts.cut(model, modeling)
    report = swap_modules(model, modeling, config, request.parts, experts)
    others = () if experts is None else experts.others(config)  # of other ranks
    values = dataclasses.replace(
        request.values, ignore=("mtp.*", *others), float32=_float32_names(model)
    )

    def begin() -> None:
        def recipe_of(expected: Any) -> SwappedRecipe:
            _narrow_norms(expected, modeling)
            return SwappedRecipe.of(expected, config, request.parts)

        begin_kernels_of(ahead, model, checkpoint, values, recipe_of, request.reserve_tokens)

    filled = fill_module(
        model, checkpoint, values, before_reading=begin if request.has_list else None
    )
    report.packing, report.conversion = filled.packing, filled.conversion
    report.left_out = tuple(name for name in checkpoint.entries if name.startswith("mtp."))
    report.title = f"{report.title}, from {request.path}"
    report._undo = _not_undoable
    model.dsv4_report = report
    return model


def _make_ready(
    model: Any, request: PretrainedRequest, config: ModelConfig, ahead: KernelsAhead
) -> None:
    """Reserve the memory of a step, and compile its kernels if that is requested."""
    warm_allocator(model, request.reserve_tokens, model.get_input_embeddings().weight.dtype)
    if not request.compile_kernels:
        return
    ahead.wait(request.values.progress)
    recipe = SwappedRecipe.of(model, config, request.parts) if request.has_list else None
    tokens = max(request.reserve_tokens or 0, step_tokens(model))
    warm_loaded(model, tokens, request.values.progress, recipe)


def _float32_names(model: nn.Module) -> frozenset[str]:
    """Parameters and buffers that the installed transformers keeps float32 in a narrower model."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return frozenset(name for name, _ in tensors if any(pattern in name for pattern in patterns))


def _narrow_norms(model: Any, modeling: Any) -> None:
    """Give norms that stay transformers' the model's dtype where they cannot be float32.

    Up to 5.17 their results have the dtype of the weight, which the layer behind them refuses.
    """
    norm = modeling.DeepseekV4RMSNorm(1).float()
    if norm(torch.zeros(1, 1, dtype=torch.bfloat16, device="cpu")).dtype == torch.bfloat16:
        return
    for module in model.modules():
        if isinstance(module, modeling.DeepseekV4RMSNorm):
            module.to(model.get_input_embeddings().weight.dtype)


def _finish(model: nn.Module, modeling: Any, device: torch.device) -> None:
    """Compute the rotary tables that no checkpoint holds, and make sure that nothing is missing."""
    for module in model.modules():
        if isinstance(module, modeling.DeepseekV4RotaryEmbedding):
            fresh = modeling.DeepseekV4RotaryEmbedding(module.config)
            for name, buffer in fresh._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta]
    assert not empty, f"not filled: {empty}"


def _warn_of_left_out(path: str | Path, report: Report) -> None:
    if report.left_out:
        _logger.warning(
            "%s: %d mtp.* tensors were left out; transformers has no multi-token-prediction layers",
            path,
            len(report.left_out),
        )


def _not_undoable() -> None:
    raise RuntimeError("undo: the original modules never held this checkpoint's weights")
