"""Sizes and checks of a runner."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from dsv4.config import ModelConfig
from dsv4.kv_cache.layer_cache import WINDOW_PAGE
from dsv4.kv_cache.paged_cache import PagedCache
from dsv4.layers._workspace import Workspace
from dsv4.layers.host_experts import slot_tokens
from dsv4.layers.step_tokens import (
    STEP_TOKENS,
    cache_bytes,
    chunk_bytes,
    free_bytes,
    shorter,
    step_tokens,
)
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving import prompts
from dsv4.serving._capture import draft_obstacle, obstacle
from dsv4.serving.graphs import default_buckets
from dsv4.serving.options import token_ids
from dsv4.serving.prefix_cache import BLOCK

_EAGER = "_said_eager"  # attribute of a model: logged reasons why steps run eagerly
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """The limits of a runner: sequences, tokens and chunks.

    Attributes:
        max_sequences: Requests that run at one time.
        max_tokens: Most tokens of a request.
        max_chunk: Most prompt tokens of a step.
        prefix_sequences: Rows that are kept for shared prefixes.
    """

    max_sequences: int
    max_tokens: int
    max_chunk: int
    prefix_sequences: int

    @classmethod
    def of(
        cls,
        model: Any,
        max_sequences: int,
        max_tokens: int,
        max_chunk: int | None,
        prefix_sequences: int,
    ) -> Limits:
        """Check the arguments and return limits."""
        if not isinstance(getattr(model, "_orig_mod", model), DeepseekV4ForCausalLM):
            raise TypeError(f"Runner: model is {type(model).__name__}, wanted what dsv4.load gives")
        _at_least("max_sequences", max_sequences, 1)
        _at_least("max_tokens", max_tokens, 2)
        _at_least("prefix_sequences", prefix_sequences, 0)
        most = model.config.max_position_embeddings
        if max_tokens > most:
            raise ValueError(
                f"Runner: max_tokens is {max_tokens}, wanted at most {most} "
                "(max_position_embeddings of the model)"
            )
        chunk = min(step_tokens(model), max_tokens) if max_chunk is None else max_chunk
        _at_least("max_chunk", chunk, 1)
        return cls(max_sequences, max_tokens, min(chunk, max_tokens), prefix_sequences)

    @property
    def rows(self) -> int:
        """The number of rows of the cache."""
        return self.max_sequences + self.prefix_sequences

    def pool_tokens(self) -> int:
        """The tokens of all running sequences at their longest."""
        return self.max_sequences * -(-self.max_tokens // BLOCK) * BLOCK

    def within_memory(self, model: DeepseekV4ForCausalLM, pool: int, index_format: str) -> Limits:
        """Return limits whose chunk is as short as free memory demands, but at least 4096.

        On a GPU, for a model with a buffer for long prompts. Other chunks stay.

        Args:
            model: The model.
            pool: Tokens of all sequences that fit in the cache.
            index_format: Format of the indexer's keys.
        """
        if model.device.type != "cuda" or step_tokens(model) == STEP_TOKENS:
            return self
        free, chunk = free_bytes(model.device), self.max_chunk
        while chunk > STEP_TOKENS:
            sizes = (self.max_tokens, chunk, self.rows, pool)
            needed = cache_bytes(model.config, *sizes, index_format=index_format)
            needed += chunk_bytes(model.config, chunk, self.max_tokens)
            if needed <= free:
                break
            chunk = shorter(chunk)
            _logger.info(
                "steps have up to %d prompt tokens, because longer ones and the cache need %.1f GB "
                "of the GPU, and %.1f GB are free",
                *(chunk, needed / 1e9, free / 1e9),
            )
        return replace(self, max_chunk=chunk)

    def check_request(self, prompt: int, new: int) -> None:
        """Raise if a request could have more tokens than any sequence."""
        if prompt + new > self.max_tokens:
            raise ValueError(
                f"prompt has {prompt} tokens and max_new_tokens is {new}, wanted at most "
                f"max_tokens ({self.max_tokens}) together"
            )


def _at_least(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Runner: {name} is {value!r}, wanted an integer")
    if value < low:
        raise ValueError(f"Runner: {name} is {value}, wanted {low} or more")


def default_window_pages(config: ModelConfig, limits: Limits) -> int:
    """Return the number of pages of raw KV entries that suffices for every step.

    Each row holds a window that begins within a page; each sequence of a step adds the pages of its
    new tokens, of which the first and the last may be partly used.
    """
    window = -(-config.sliding_window // WINDOW_PAGE) + 1
    chunk = -(-(config.sliding_window - 1 + limits.max_chunk) // WINDOW_PAGE)
    return limits.rows * window + chunk + 2 * limits.max_sequences


def default_index_format(config: ModelConfig) -> str:
    """Return the smallest format of index keys that holds the same values as ``"plain"``."""
    same = config.numerics == "deepseek" and config.index_head_dim % 32 == 0
    return "index_mxfp4" if same else "plain"


def check_window(cache: PagedCache, chunk: int) -> None:
    """Raise if a single sequence could not process ``chunk`` tokens in a step.

    Raises:
        ValueError: naming the number of pages and the number needed.
    """
    entries = min(cache.config.sliding_window - 1 + chunk, cache.max_tokens)
    need = -(-entries // WINDOW_PAGE)
    pages = cache.layers[0].window.num_pages
    if need > pages:
        raise ValueError(
            f"Runner: window_pages is {pages}, wanted at least {need} for max_chunk ({chunk})"
        )


def check_fits(cache: PagedCache, tokens: int) -> None:
    """Raise if a single sequence could not grow to ``tokens`` tokens.

    Raises:
        ValueError: naming the number of pages and the number needed.
    """
    for layer in cache.layers:
        if layer.compressed is None:
            continue
        entries = (tokens - 1) // layer.ratio  # the last token is never processed
        need, pages = -(-entries // layer.compressed.page_size), layer.compressed.num_pages
        if need > pages:
            raise ValueError(
                f"a request of {tokens} tokens needs {need} compressed pages, and the cache has "
                f"{pages}: make the runner with a larger pool_tokens"
            )


def _distinct(name: str, sizes: Sequence[int]) -> list[int]:
    """Return the integers of a sequence, ascending and each once."""
    try:
        return sorted({operator.index(size) for size in sizes})
    except TypeError as error:
        raise TypeError(
            f"Runner: {name} is {sizes!r}, wanted a sequence of integers or None"
        ) from error


def check_buckets(
    buckets: Sequence[int] | None, max_sequences: int, captured: bool, deterministic: bool
) -> tuple[int, ...]:
    """Return the batch sizes, ascending.

    Raises:
        TypeError: if they are no sequence of integers.
        ValueError: if one is not within 1 and ``max_sequences``, the largest is too small for a
            batch, or they are given for a deterministic runner.
    """
    if deterministic:
        if buckets is not None:
            raise ValueError(
                f"Runner: buckets are {list(buckets)}, wanted None with deterministic=True, "
                "whose decode steps have one sequence each"
            )
        return (1,)
    if buckets is None:
        return default_buckets(max_sequences) if captured else tuple(range(1, max_sequences + 1))
    sizes = _distinct("buckets", buckets)
    if not sizes or sizes[0] < 1 or sizes[-1] != max_sequences:
        raise ValueError(
            f"Runner: buckets are {list(buckets)}, wanted numbers from 1 to max_sequences "
            f"({max_sequences}), which is one of them"
        )
    return tuple(sizes)


def check_prompt_buckets(
    model: nn.Module,
    buckets: Sequence[int] | None,
    max_chunk: int,
    captured: bool,
    deterministic: bool,
) -> tuple[int, ...]:
    """Return the numbers of tokens that steps of prompts are padded to, ascending.

    Bits depend on the padding, so a deterministic runner pads whether it captures or not.

    Raises:
        TypeError: if they are no sequence of integers.
        ValueError: if one is not within 1 and ``max_chunk``, or they are given for a deterministic
            runner.
    """
    if buckets is None:
        most = min(max_chunk, prompts.BUCKETS[-1], *_reserved_tokens(model))
        if captured:  # with more, a step of experts in host memory is planned on the host
            most = min([most, *slot_tokens(model)])
        smaller = {size for size in prompts.BUCKETS if size < most}
        return tuple(sorted(smaller | {most})) if captured or deterministic else ()
    if deterministic:
        raise ValueError(
            f"Runner: prompt_buckets are {buckets!r}, wanted None with deterministic=True, "
            "whose bits depend on them"
        )
    sizes = _distinct("prompt_buckets", buckets)
    if sizes and not 1 <= sizes[0] <= sizes[-1] <= max_chunk:
        raise ValueError(
            f"Runner: prompt_buckets are {list(buckets)}, wanted numbers from 1 to max_chunk "
            f"({max_chunk})"
        )
    return tuple(sizes)


def _reserved_tokens(model: nn.Module) -> list[int]:
    """Return the tokens for which memory is reserved; with more, a step raises."""
    workspaces = (module for module in model.modules() if isinstance(module, Workspace))
    return [workspace.max_tokens for workspace in workspaces]


def resolve_capture(model: DeepseekV4ForCausalLM, capture: bool | None, max_tokens: int) -> bool:
    """Decide whether decode steps are captured; log why not if the model's weights prevent it.

    Args:
        model: The model.
        capture: Whether the caller wants captured steps; None: if they can be captured.
        max_tokens: Most tokens of a step, drafts included.

    Raises:
        ValueError: if ``capture`` is true and they cannot be.
    """
    if capture is not None and not capture:
        return False
    reason = why_eager(model, max_tokens)
    if reason is None:
        return True
    if capture:
        raise ValueError(f"Runner: capture is True, but {reason}; wanted None or False")
    if model.device.type == "cuda" and not is_compiled(model):
        warn_eager(model, reason)
    return False


def why_eager(model: DeepseekV4ForCausalLM, max_tokens: int) -> str | None:
    """Return why steps of a model of up to that many tokens cannot be captured, or None."""
    if model.device.type != "cuda":
        return f"the model is on {model.device.type}"
    if is_compiled(model):
        return "the model is compiled by torch.compile"
    return obstacle(model, sorted({1, max_tokens}), model.device)


def captures_drafts(model: DeepseekV4ForCausalLM, max_sequences: int) -> bool:
    """Return whether drafts of a model whose steps are captured are, too; log why not."""
    rows = 1 if model.config.dspark is None else model.config.dspark.block_size
    reason = draft_obstacle(model, sorted({rows, rows * max_sequences}), model.device)
    if reason is not None:
        warn_eager(model, reason, "draft")
    return reason is None


def warn_eager(model: DeepseekV4ForCausalLM, reason: str, steps: str = "decode") -> None:
    """Log once for each model, kind of steps and reason that they run eagerly."""
    said = model.__dict__.setdefault(_EAGER, {})
    if said.get(steps) != reason:
        _logger.warning("%s steps run eagerly, not as CUDA graphs: %s", steps, reason)
        said[steps] = reason


def is_compiled(model: nn.Module) -> bool:
    """Return whether ``torch.compile`` made the model, or compiled a module of it in place."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def stop_tokens(config: ModelConfig, stop_ids: Sequence[int] | None) -> frozenset[int]:
    """Return the tokens that end a request.

    Raises:
        ValueError: if one is outside the vocabulary.
    """
    if stop_ids is not None:
        return frozenset(token_ids("stop_ids", stop_ids, config.vocab_size))
    eos = config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset((eos,) if isinstance(eos, int) else eos)
