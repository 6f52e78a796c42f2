"""Options of a request, checked when it is made."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MAX_LOGPROBS = 20  # alternatives per token; the size of the sampler's output
_SEEDS = 1 << 63


@dataclass(frozen=True)
class SamplingOptions:
    """Options by which the tokens of a request are chosen.

    The distribution is made in this order. ``repetition_penalty`` changes the logits of tokens that
    the prompt or the answer contains. The logits are divided by ``temperature``. ``top_k`` keeps
    the tokens for which fewer than ``top_k`` tokens have a larger logit. ``top_p`` keeps, of those,
    the tokens for which the more probable ones hold less than ``top_p`` of the probability of all
    of those. ``min_p`` keeps the tokens with at least ``min_p`` times the largest probability.
    Equal logits are kept or dropped together.

    Attributes:
        temperature: Divides the logits; 0 is greedy, and a tie goes to the lowest token id.
        top_k: Most tokens to choose from, except for ties; None: all.
        top_p: Probability to keep, in (0, 1]; 1: all.
        min_p: Smallest probability to keep, as a share of the largest, in [0, 1].
        repetition_penalty: A positive logit of a repeated token is divided by it, a negative one
            multiplied; 1: none.
        seed: Seed of the random numbers, 0 to 2**63 - 1. They depend on the seed and on the
            position of the token alone. None: the runner draws one; ``Request.seed`` says which.
        stop_ids: Tokens that end the answer and belong to it; None: ``eos_token_id`` of the
            model's configuration.
        logprobs: None, or how many most probable tokens to report besides the chosen one, 0 to 20.
            Log-probabilities are those of the unmodified distribution: the log-softmax of the
            model's logits.
        max_new_tokens: Most tokens of the answer, at least 1.

    Raises:
        TypeError: if a value is of the wrong kind.
        ValueError: if a value is out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_ids: Sequence[int] | None = None
    logprobs: int | None = None
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        self._number("temperature", "0 or more", lambda x: 0 <= x < math.inf)
        self._number("top_p", "more than 0 and at most 1", lambda x: 0 < x <= 1)
        self._number("min_p", "0 to 1", lambda x: 0 <= x <= 1)
        self._number("repetition_penalty", "more than 0", lambda x: 0 < x < math.inf)
        self._integer("max_new_tokens", 1, None)
        if self.top_k is not None:
            self._integer("top_k", 1, None)
        if self.seed is not None:
            self._integer("seed", 0, _SEEDS - 1)
        if self.logprobs is not None:
            self._integer("logprobs", 0, MAX_LOGPROBS)
        if self.stop_ids is not None:
            object.__setattr__(self, "stop_ids", _token_ids("stop_ids", self.stop_ids))

    @classmethod
    def of(cls, options: SamplingOptions | None, changes: dict[str, Any]) -> SamplingOptions:
        """Return ``options``, or the defaults, with some fields changed.

        Raises:
            TypeError: if a name is none of the fields, or a value is of the wrong kind.
            ValueError: if a value is out of range.
        """
        if options is not None and not isinstance(options, cls):
            raise TypeError(f"options is {type(options).__name__}, wanted SamplingOptions")
        if options is not None and not changes:
            return options
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in changes if name not in names]
        if unknown:
            raise TypeError(f"option {unknown[0]!r} is unknown, wanted one of {', '.join(names)}")
        return cls(**changes) if options is None else dataclasses.replace(options, **changes)

    def _number(self, name: str, expected: str, within: Any) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} is {value!r}, wanted a number, {expected}")
        if not within(value):
            raise ValueError(f"{name} is {value}, wanted {expected}")
        object.__setattr__(self, name, float(value))

    def _integer(self, name: str, low: int, high: int | None) -> None:
        value = _index(name, getattr(self, name))
        if value < low or (high is not None and value > high):
            expected = f"{low} or more" if high is None else f"{low} to {high}"
            raise ValueError(f"{name} is {value}, wanted {expected}")
        object.__setattr__(self, name, value)


def _index(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value}, wanted an integer")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, wanted an integer") from None


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} is {values!r}, wanted a sequence of token ids")
    values = tuple(values)
    if set(map(type, values)) <= {int}:
        return values
    return tuple(_index(f"{name}[{i}]", value) for i, value in enumerate(values))


def token_ids(name: str, values: Any, vocab_size: int) -> tuple[int, ...]:
    """Check token ids and return them as a tuple of integers.

    Raises:
        TypeError: if ``values`` is no sequence of integers.
        ValueError: if one of them is outside the vocabulary.
    """
    ids = _token_ids(name, values)
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        i = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise ValueError(f"{name}[{i}] is {ids[i]}, wanted 0 to {vocab_size - 1}")
    return ids
