"""transformers' attention as a baseline of the whole sublayer: eager, and compiled by Inductor.

Its module alone, without the norm in front, with bfloat16 weights and its own cache. That is a
Python object which a step changes, so no CUDA graph holds it, and both are timed by the host's
clock. Every call has a copy of the cache as it was before the step: compiled code is made for these
sizes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dsv4.bench.baselines import inductor
from dsv4.bench.measure import Options
from dsv4.config import ModelConfig

EAGER, COMPILED = "transformers eager", "transformers inductor"
_MOST_STEPS = 20
_WARM_UP = 2  # calls of compiled code before it is timed
_SIZES = (
    *("hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank"),
    *("o_groups", "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim"),
    *("index_topk", "max_position_embeddings"),
)


@dataclass(frozen=True)
class Step:
    """The step that is timed.

    Attributes:
        config: Sizes of the layer.
        layer_type: Its type.
        tokens: Sequences, each with one token; for a prefill, tokens of its one sequence.
        context: Tokens of each sequence before the step; 0: a prefill.
    """

    config: ModelConfig
    layer_type: str
    tokens: int
    context: int


def times(step: Step, options: Options) -> tuple[dict[str, float], str]:
    """Microseconds of a step by name, and what could not be timed.

    Eager on a GPU, or wherever baselines are asked for; compiled where Inductor is; nothing if no
    baseline is wanted (``options.baselines`` is empty).
    """
    if options.baselines == ():
        return {}, ""
    asked = {name.lower() for name in options.baselines or ()}
    backends: dict[str, str | None] = {}
    if options.device.type == "cuda" or options.baselines is not None:
        backends[EAGER] = None
    if asked & {inductor.NAME, COMPILED}:
        backends[COMPILED] = inductor.NAME
    measured, missing = dict[str, float](), list[str]()
    for name, backend in backends.items():
        try:
            measured[name] = step_us(step, options, backend)
        except Exception as problem:  # another's library may fail in any way
            first = (str(problem).splitlines() or [""])[0]
            missing.append(f"{name}: {type(problem).__name__}: {first}")
    return measured, "; ".join(missing)


def step_us(step: Step, options: Options, backend: str | None = None) -> float:
    """Return the median duration of a step by the host's clock.

    Args:
        step: What is timed.
        options: How often, and where.
        backend: Backend of ``torch.compile``; None: eager mode.
    """
    run, renew = _prepared(step, options.device)
    if backend is not None:
        run = torch.compile(run, dynamic=False, backend=backend)
        for _ in range(_WARM_UP):
            renew()(run)
    times = []
    for _ in range(min(options.repeat, _MOST_STEPS)):
        call = renew()
        _synchronize(options.device)
        start = time.perf_counter()
        call(run)
        _synchronize(options.device)
        times.append(1e6 * (time.perf_counter() - start))
    return sorted(times)[len(times) // 2]


def _prepared(
    step: Step, device: torch.device
) -> tuple[Callable[..., Any], Callable[[], Callable[[Callable[..., Any]], Any]]]:
    """transformers' module, and what makes ready a call of it, or of what was compiled of it."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    from transformers.cache_utils import DynamicCache

    theirs = DeepseekV4Config(
        vocab_size=64,
        num_hidden_layers=1,
        layer_types=[step.layer_type],
        mlp_layer_types=["moe"],
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        **{name: getattr(step.config, name) for name in _SIZES},
    )
    with torch.device(device):
        model = DeepseekV4ForCausalLM(theirs).bfloat16().eval().model
    prefill = step.context == 0
    rows = 1 if prefill else step.tokens
    ids = torch.zeros((rows, max(step.context, 1)), dtype=torch.long, device=device)
    cache = DynamicCache(config=theirs)
    for part in ids[:, : step.context].split(1024, 1) if step.context else ():
        model(input_ids=part, past_key_values=cache, use_cache=True)
    attention = model.layers[0].self_attn
    arguments: dict[str, Any] = {}
    hook = attention.register_forward_pre_hook(
        lambda module, args, kwargs: arguments.update(args=args, kwargs=kwargs), with_kwargs=True
    )
    ids = torch.zeros((rows, step.tokens if prefill else 1), dtype=torch.long, device=device)
    model(input_ids=ids, past_key_values=copy.deepcopy(cache))
    hook.remove()

    def renew() -> Callable[[Callable[..., Any]], Any]:
        # Called "cache" from transformers 5.24 on.
        name = "cache" if "cache" in arguments["kwargs"] else "past_key_values"
        new = {**arguments["kwargs"], name: copy.deepcopy(cache)}
        return lambda run: run(*arguments["args"], **new)

    return attention, renew


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
