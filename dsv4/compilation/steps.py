"""Find what the steps of a model launch on a GPU that need not be there.

The steps run on the meta device, where layers compute shapes alone, and ``launch_recorder`` lists
what their operators would launch. So the list follows from the code that chooses and launches;
``step_shapes`` adds the sizes at which that code changes.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from dsv4.compilation.draft_steps import DraftShape, has_draft, run_draft_step
from dsv4.compilation.launch_recorder import LaunchRecorder, Ran, Steps, listing_for
from dsv4.compilation.step_shapes import StepShape, every_shape
from dsv4.compilation.target import Target
from dsv4.config import ModelConfig
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.layers.step_tokens import step_tokens
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel.context import ParallelContext, tensor_parallel
from dsv4.serving._setup import Limits, default_index_format, default_window_pages

_PACKING = "fragments"


class OtherShape(Protocol):
    """A shape of a step of a model that others build, which knows how to run it."""

    def run(self, model: Any) -> None:
        """Run the step."""


Shape = StepShape | DraftShape | OtherShape


def find_steps(
    model: nn.Module,
    target: Target,
    max_tokens: int,
    shapes: Sequence[Shape] | None = None,
) -> Steps:
    """Find what steps of decoding and prefill launch, what packing does, and the sampler.

    Not to be called while another thread runs operators.

    Args:
        model: On the meta device, packed for the GPU where it can be.
        target: The GPU.
        max_tokens: Most tokens of a step.
        shapes: Shapes of the steps; None, of a model of this package: ``every_shape``.
    """
    own = model if isinstance(model, DeepseekV4ForCausalLM) else None
    if shapes is None:
        assert own is not None
        most = own.config.max_position_embeddings
        shapes = every_shape(max_tokens, most, has_draft(own))
    steps = Steps()
    with listing_for(target, steps) as names, torch.inference_mode():
        _pack(steps, names)
        if own is not None:
            _choose_tokens(own)
        with LaunchRecorder(steps, names):
            for shape in shapes:
                with _watching(model, shape):
                    _step(model, shape)
    return steps


def _choose_tokens(model: DeepseekV4ForCausalLM) -> None:
    """The sampler, or on several ranks what gathers its candidates."""
    split = tensor_parallel(model.parallel)
    if split is None or has_draft(model):
        _sample(model.config)
    if split is not None:
        _gather(split)


@contextmanager
def _watching(model: nn.Module, shape: Shape) -> Iterator[None]:
    """Give modules the hooks of a shape, as users, ``dsv4.debug`` and the bench do."""
    kinds = shape.watched if isinstance(shape, StepShape) else ()
    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, kinds):
                hooks.callback(module.register_forward_hook(_ignore).remove)
        yield


def _ignore(module: nn.Module, inputs: object, output: object) -> None:
    """See a result and do nothing."""


def _step(model: Any, shape: Shape) -> None:
    """A step as ``dsv4.serving.Runner`` runs it, or as its shape does."""
    if not isinstance(shape, StepShape | DraftShape):
        shape.run(model)
        return
    context = min(shape.context, model.config.max_position_embeddings)
    # The number of a cache's sequences decides nothing.
    limits = Limits(2, context, min(context, step_tokens(model)), 0)
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
