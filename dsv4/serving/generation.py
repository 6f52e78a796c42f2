"""``generate``: requests of one call over a runner, which a model on a GPU keeps for the next call.

What is kept are the graphs of decode steps, whose capture takes longer than most answers, and the
cache that they read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4._requests import check_choice
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.sampling import Sampler
from dsv4.serving._weights import Weights
from dsv4.serving.options import SamplingOptions
from dsv4.serving.request import LogitsError, Request
from dsv4.serving.runner import Runner
from dsv4.serving.sampler import FAILED

_ATTRIBUTE = "_kept_runner"
_STEP = 1024  # tokens that a kept cache is rounded up to


@dataclass(eq=False)
class _Kept:
    """A model's runner; a copy of the model does not get it."""

    runner: Runner | None = None
    weights: Weights | None = None  # whose addresses the graphs hold
    chunk: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def generate(
    model: DeepseekV4ForCausalLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampler: Sampler | None = None,
    stop_ids: Iterable[int] | None = None,
    chunk: int | None = None,
) -> list[list[int]]:
    """Continue prompts; see ``DeepseekV4ForCausalLM.generate``.

    Args:
        model: On its device.
        prompts: Token ids per sequence, at least one each.
        max_new_tokens: Most tokens to add, at least 1.
        sampler: Its generator draws one seed for each prompt; greedy if None.
        stop_ids: Tokens that end a sequence; None: ``eos_token_id`` of the configuration.
        chunk: Most prompt tokens per step; None: the runner's own.

    Raises:
        RuntimeError: if logits are not finite, naming the prompt.
        TypeError: if ``sampler`` is none.
    """
    if not prompts:
        return []
    sampler = Sampler() if sampler is None else sampler
    if not isinstance(sampler, Sampler):
        raise TypeError(f"generate: sampler is {type(sampler).__name__}, wanted a Sampler")
    stops = None if stop_ids is None else tuple(stop_ids)
    seeds = _seeds(sampler, len(prompts), model.device)
    options = SamplingOptions(
        temperature=sampler.temperature,
        top_p=sampler.top_p,
        stop_ids=stops,
        max_new_tokens=max_new_tokens,
    )
    longest = max(map(len, prompts)) + max_new_tokens
    with _runner(model, len(prompts), longest, chunk) as runner:
        requests = []
        try:
            for prompt, seed in zip(prompts, seeds, strict=True):
                requests.append(runner.add(prompt, options, seed=seed))
            return [_result(i, request) for i, request in enumerate(requests)]
        finally:
            for request in requests:
                request.cancel()  # what an error has left


def _result(prompt: int, request: Request) -> list[int]:
    try:
        return request.result()
    except LogitsError:
        check_choice("generate", [FAILED], [prompt], len(request.tokens) + 1)
        raise


def release(model: DeepseekV4ForCausalLM) -> None:
    """Free the cache and the graphs that ``generate`` keeps for a model."""
    kept = model.__dict__.get(_ATTRIBUTE)
    if kept is not None:
        with kept.lock:
            kept.runner = kept.weights = None


def _seeds(sampler: Sampler, count: int, device: torch.device) -> list[int]:
    if sampler.temperature == 0:
        return [0] * count
    generator = sampler.generator
    where = device if generator is None else generator.device
    seeds = torch.randint(2**63 - 1, (count,), generator=generator, dtype=torch.int64, device=where)
    return seeds.tolist()


@contextmanager
def _runner(
    model: DeepseekV4ForCausalLM, sequences: int, tokens: int, chunk: int | None
) -> Iterator[Runner]:
    """The kept runner if nobody uses it and it fits, or another one."""
    kept = model.__dict__.setdefault(_ATTRIBUTE, _Kept())
    if model.device.type != "cuda" or not kept.lock.acquire(blocking=False):
        with _new(model, sequences, tokens, chunk) as runner:
            yield runner
        return
    try:
        yield _fitting(kept, model, sequences, tokens, chunk)
    finally:
        kept.lock.release()


def _fitting(
    kept: _Kept, model: DeepseekV4ForCausalLM, sequences: int, tokens: int, chunk: int | None
) -> Runner:
    runner, weights = kept.runner, kept.weights
    if runner is not None and weights is not None:
        limits = runner.limits
        same = kept.chunk == chunk and weights.are_those_of(model)
        if same and limits.max_sequences >= sequences and limits.max_tokens >= tokens:
            return runner
        if same:  # grow, so that calls of changing sizes do not replace it every time
            sequences = max(sequences, limits.max_sequences)
            tokens = max(tokens, limits.max_tokens)
        kept.runner = runner = None  # its memory first
    rounded = -(-tokens // _STEP) * _STEP
    tokens = max(tokens, min(rounded, model.config.max_position_embeddings))
    kept.runner = _new(model, sequences, tokens, chunk)
    kept.weights, kept.chunk = Weights(model), chunk
    return kept.runner


def _new(model: DeepseekV4ForCausalLM, sequences: int, tokens: int, chunk: int | None) -> Runner:
    return Runner(
        model, max_sequences=sequences, max_tokens=tokens, max_chunk=chunk, prefix_sequences=0
    )
