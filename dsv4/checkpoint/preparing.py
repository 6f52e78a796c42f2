"""Prepare a loaded model, so that its first prompt compiles, captures and imports nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from dsv4.checkpoint.load_request import LoadRequest
from dsv4.checkpoint.rank_loading import connect
from dsv4.layers.reserve import warm_allocator
from dsv4.layers.step_tokens import free_bytes, limit_step_tokens, step_tokens
from dsv4.parallel.context import ParallelContext

if TYPE_CHECKING:
    from dsv4.compilation.ahead import KernelsAhead
    from dsv4.model import DeepseekV4ForCausalLM

_logger = logging.getLogger("dsv4.checkpoint")


def make_ready(
    model: DeepseekV4ForCausalLM,
    request: LoadRequest,
    context: ParallelContext | None,
    ahead: KernelsAhead,
) -> None:
    """Reserve memory, connect the ranks, and prepare steps as the request says.

    Args:
        model: The model, filled.
        request: The request.
        context: The rank of this process; None: it is alone.
        ahead: Compiles kernels since before the model was filled.

    Raises:
        RankError: if another rank failed.
        torch.OutOfMemoryError: if the device has no room for a step.
    """
    if model.device.type == "cuda":
        limit_step_tokens(model, model.config, free_bytes(model.device))
    warm_allocator(model, request.reserve_tokens, model.dtype)
    model.eval()
    if context is not None:
        connect(model, context)
    if request.prepare:
        ahead.wait(request.values.progress)
        _prepare(model, request)
        _reserve_again(model, request.reserve_tokens)


def _prepare(model: DeepseekV4ForCausalLM, request: LoadRequest) -> None:
    """Load or compile the kernels of steps, and make the runner of ``generate`` if requested."""
    from dsv4 import serving
    from dsv4.compilation.warmup import warm_ranks

    tokens = max(request.reserve_tokens or 0, step_tokens(model))
    warmed = warm_ranks(model, tokens, request.values.progress)
    # Without its kernels a step could raise, which is for the step's caller.
    if request.prepare is True and warmed is not None and not warmed.failed:
        serving.prepare(model)


def _reserve_again(model: DeepseekV4ForCausalLM, reserve: int | None) -> None:
    """Reserve the memory of a step again, because each capture empties the allocator's cache.

    A step of ``reserve_tokens`` is the user's; where both have no room, the graphs are released.
    """
    from dsv4 import serving

    tokens = step_tokens(model) if reserve is None else reserve
    try:
        warm_allocator(model, tokens, model.dtype)
    except torch.OutOfMemoryError as error:
        if model.parallel is not None:
            raise  # other ranks keep their graphs
        serving.release(model)
        warm_allocator(model, tokens, model.dtype)
        _logger.warning(
            "generate is not prepared, because its graphs and a step of %d tokens (reserve_tokens) "
            "do not fit together: %s; its first call tries again",
            *(tokens, str(error).partition("\n")[0]),
        )
