"""First launches of the replaced layers, before vLLM captures graphs and serves requests.

vLLM's own warm-up runs steps of the sizes that it captures and one of the largest size. Kernels of
the sizes between would be compiled during requests.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dsv4.compilation.counts import of_this_process
from dsv4.compilation.step_shapes import token_counts
from dsv4.cute.sm90 import plans
from dsv4.integrations.vllm._log import logger
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.compile_kernels import compile_replaced
from dsv4.integrations.vllm.listed import Listed
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear


def warm_replaced(model: nn.Module, context: Adoption, *, draft: bool = False) -> None:
    """Run every kind of replaced layer once for each choice of kernels, on a GPU.

    Args:
        model: vLLM's model with replaced modules.
        context: Of the adoption.
        draft: Whether it is a draft, whose steps launch kernels that those of its main model have
            compiled, but for sizes of its own.
    """
    layers, parts = list(kinds(model)), list(self_warming(model))
    if not (layers or parts) or next(model.parameters()).device.type != "cuda":
        return
    begin, most = time.perf_counter(), most_tokens(context)
    listed = Listed(model, context, functools.partial(pieces, model, most))
    compile_replaced(model, context, most, steps=not draft, listed=listed)
    compiled, before = time.perf_counter(), of_this_process().copy()
    launch(model, most)
    torch.cuda.synchronize()
    late, end = (of_this_process().copy() - before).total(), time.perf_counter()
    logger().info(
        "dsv4 compiled or loaded kernels of %d kinds in %.1f s: %.1f s in parallel, then %.1f s of "
        "first launches, which compiled %d kernels",
        len(layers) + len(parts),
        end - begin,
        compiled - begin,
        end - compiled,
        late,
    )


def launch(model: nn.Module, most: int) -> None:
    """Run every kind of layer and part for the numbers of tokens up to ``most``."""
    for piece in pieces(model, most):
        piece()


def pieces(model: nn.Module, most: int) -> Iterator[Callable[[], None]]:
    """Yield functions that run a kind of layer or part for the numbers of tokens up to ``most``."""
    for layer in kinds(model):
        yield functools.partial(run, layer, most)
    for part in self_warming(model):
        yield functools.partial(run_part, part, most)


def most_tokens(context: Adoption) -> int:
    """Most rows of a step: with data-parallel ranks, experts see those of all of them."""
    config = context.vllm_config
    ranks = config.parallel_config.data_parallel_size
    return int(config.scheduler_config.max_num_batched_tokens * ranks)


def kinds(model: nn.Module) -> Iterator[Linear | DeepseekV4Experts]:
    """Yield one layer of each kind: of the same class, sizes, format and layout."""
    seen = set()
    for layer in model.modules():
        if isinstance(layer, Linear | DeepseekV4Experts):
            kind = (type(layer), layer.extra_repr(), _scale_dtype(layer))
            if kind not in seen:
                seen.add(kind)
                yield layer


def self_warming(model: nn.Module) -> Iterator[Any]:
    """Yield one module of each kind with ``dsv4_warm(tokens)``.

    A kind is a class, and in it the ``dsv4_kind`` of modules that have one: sizes are the same.
    """
    seen = set()
    for module in model.modules():
        kind = type(module), getattr(module, "dsv4_kind", None)
        if hasattr(module, "dsv4_warm") and kind not in seen:
            seen.add(kind)
            yield module


@torch.inference_mode()
def run_part(part: Any, most: int) -> None:
    """Let a module launch its own kernels for the numbers of tokens up to ``most``."""
    for tokens in token_counts(most):
        part.dsv4_warm(tokens)


def linear_token_counts(most: int) -> list[int]:
    """Return numbers of tokens at which a linear layer may launch another kernel, CuTeDSL's too."""
    return sorted({*token_counts(most), *plans.token_counts(most)})


@torch.inference_mode()
def run(layer: Linear | DeepseekV4Experts, most: int) -> None:
    """Run a layer for the numbers of tokens up to ``most`` at which launchers may choose again."""
    if isinstance(layer, DeepseekV4Experts):
        for tokens in token_counts(most):
            _run_experts(layer, tokens)
        return
    groups = (layer.groups,) if layer.groups > 1 else ()
    for tokens in linear_token_counts(most):
        size = (tokens, *groups, layer.in_features)
        layer(torch.zeros(size, dtype=torch.bfloat16, device=layer.device))


def _run_experts(layer: DeepseekV4Experts, tokens: int) -> None:
    """Run a step, and add up its rows without and with a shared expert's result."""
    device, top_k = _device(layer), layer.num_experts_per_tok
    x = torch.zeros(tokens, layer.hidden_dim, dtype=torch.bfloat16, device=device)
    slots = torch.arange(tokens * top_k, device=device).view(tokens, top_k)
    ids = (layer.first_expert + slots % layer.num_local_experts).to(torch.int32)  # as vLLM's
    weights = torch.ones(tokens, top_k, dtype=torch.float32, device=device)
    rows = layer.routed_rows(x, ids, weights)
    for shared in (None, x):
        rows._replace(shared=shared).combined()


def _device(layer: Linear | DeepseekV4Experts) -> torch.device:
    return layer.gate_up_proj.device if isinstance(layer, DeepseekV4Experts) else layer.device


def _scale_dtype(layer: Linear | DeepseekV4Experts) -> torch.dtype | None:
    scale = getattr(layer, "weight_scale", None)
    return None if scale is None else scale.dtype
