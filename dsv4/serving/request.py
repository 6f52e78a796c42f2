"""A request and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsv4.serving.options import SamplingOptions


class RequestError(RuntimeError):
    """A request failed; others continue."""


class LogitsError(RequestError):
    """The logits of a position hold NaN or infinity, so no token can be chosen."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the log-softmax of the unmodified logits.

    Attributes:
        token: The chosen token.
        logprob: Its log-probability.
        top: The most probable tokens with their log-probabilities, in descending order.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Emitted:
    """One token of an answer, with its log-probabilities if they were requested."""

    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Outcome:
    """The way a request ended."""

    reason: str
    error: RequestError | None = None


class Request:
    """A prompt, its options and the tokens so far; ``Runner.add`` makes it.

    Iterating yields the tokens from the first on, and runs the runner's steps until the request has
    ended. A request ends by one assignment, and a token is added by one append, so that an
    interrupted step leaves neither half done.

    Attributes:
        number: Order of arrival.
        prompt: Token ids.
        options: The validated options.
        seed: Seed of the random numbers.
        stop_ids: Tokens that end the answer.
    """

    def __init__(
        self,
        number: int,
        prompt: tuple[int, ...],
        options: SamplingOptions,
        seed: int,
        stop_ids: frozenset[int],
        step: Callable[[], bool],
    ) -> None:
        self.number = number
        self.prompt = prompt
        self.options = options
        self.seed = seed
        self.stop_ids = stop_ids
        self._step = step
        self._emitted: list[Emitted] = []
        self._outcome: Outcome | None = None
        self._sequence = prompt

    @property
    def tokens(self) -> list[int]:
        """The answer so far."""
        return [emitted.token for emitted in self._emitted]

    def tokens_from(self, start: int) -> list[int]:
        """Tokens of the answer so far from number ``start`` on."""
        return [emitted.token for emitted in self._emitted[start:]]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The log-probabilities, one per token, if the options ask for them."""
        return [e.logprobs for e in self._emitted if e.logprobs is not None]

    @property
    def done(self) -> bool:
        """Return whether it has ended."""
        return self._outcome is not None

    @property
    def finish_reason(self) -> str | None:
        """``"stop"``, ``"length"``, ``"cancelled"``, ``"error"``, or None before the end."""
        return None if self._outcome is None else self._outcome.reason

    @property
    def error(self) -> RequestError | None:
        """Return why it failed, if it did."""
        return None if self._outcome is None else self._outcome.error

    def result(self) -> list[int]:
        """Run steps until the request has ended; return its tokens.

        Raises:
            RequestError: if the request failed.
        """
        return list(self)

    def __iter__(self) -> Iterator[int]:
        yielded = 0
        while True:
            while yielded < len(self._emitted):
                yielded += 1
                yield self._emitted[yielded - 1].token
            if self._outcome is not None:
                if self._outcome.error is not None:
                    raise self._outcome.error
                return
            self._step()

    def __repr__(self) -> str:
        state = self.finish_reason or "open"
        return (
            f"Request({self.number}, {len(self.prompt)} prompt tokens, "
            f"{len(self._emitted)} of {self.options.max_new_tokens} new, {state})"
        )

    def sequence(self) -> tuple[int, ...]:
        """The prompt and the answer so far."""
        if len(self._sequence) != len(self.prompt) + len(self._emitted):
            self._sequence = (*self.prompt, *self.tokens)
        return self._sequence

    def emit(self, emitted: Emitted) -> None:
        """Add a token, and end the request if it is the last."""
        self._emitted.append(emitted)
        self.check_end()

    def check_end(self) -> None:
        """End the request if its last token is a stop token or it has all its tokens."""
        if self._outcome is not None or not self._emitted:
            return
        if self._emitted[-1].token in self.stop_ids:
            self._outcome = Outcome("stop")
        elif len(self._emitted) >= self.options.max_new_tokens:
            self._outcome = Outcome("length")

    def cancel(self) -> None:
        """End it, unless it has ended; ``Runner.cancel`` calls this."""
        if self._outcome is None:
            self._outcome = Outcome("cancelled")

    def fail(self, reason: str, kind: type[RequestError] = RequestError) -> None:
        """End it with an error, unless it has ended."""
        if self._outcome is None:
            self._outcome = Outcome("error", kind(f"request {self.number}: {reason}"))
