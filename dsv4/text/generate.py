"""Text in, a stream of text out, over ``dsv4.serving.Runner``."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4.serving.options import SamplingOptions
from dsv4.serving.request import Request, RequestError
from dsv4.serving.runner import Runner
from dsv4.text import markers
from dsv4.text.answer_events import ContentText, Event
from dsv4.text.chat import Prompt, chat_prompt, completion_prompt
from dsv4.text.effort import EffortTable
from dsv4.text.parsing import Answer, AnswerParser
from dsv4.text.stream import StopStream, check_stops
from dsv4.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Usage:
    """Tokens of a request.

    Attributes:
        prompt_tokens: Of the prompt.
        completion_tokens: Sampled up to the end of the text, stop token included.
        reasoning_tokens: Those of them that are reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


class _Answering(ABC):
    """A request of the runner whose tokens become pieces.

    ``update`` reads the tokens that have come. Whoever iterates runs steps of all requests.
    """

    def __init__(self, generator: TextGenerator, request: Request) -> None:
        self.request = request
        self._generator = generator
        self._read = 0
        self._reason: str | None = None
        self._pieces: list[Any] = []

    @property
    def done(self) -> bool:
        """Whether the text has ended."""
        return self._reason is not None

    @property
    def finish_reason(self) -> str | None:
        """``"stop"`` (EOS, a stop token or a stop string), ``"length"``, ``"cancelled"``,
        ``"error"``, in a chat also ``"tool_calls"``; None before the end.
        """
        return self._reason

    @property
    def error(self) -> RequestError | None:
        """Why it failed, if it did."""
        return self.request.error

    @property
    def usage(self) -> Usage:
        """Counts so far; tokens that the runner sampled behind a stop string do not count."""
        return Usage(len(self.request.prompt), self._read, self._reasoning_tokens())

    def cancel(self) -> None:
        """End the request; what has come stays."""
        self._generator.runner.cancel(self.request)
        self.update()

    def update(self) -> None:
        """Read the tokens that have come; ``TextGenerator.step`` calls it."""
        if self.done:
            return
        for token in self.request.tokens_from(self._read):
            self._read += 1
            if token not in self.request.stop_ids:
                self._push(token)
            if self._stop() is not None:
                self._generator.runner.cancel(self.request)
                self._reason = "stop"
                return
        reason = self.request.finish_reason
        if reason is not None:
            self._finish()
            self._reason = "stop" if self._stop() is not None else self._final_reason(reason)

    def _iterate(self) -> Iterator[Any]:
        yielded = 0
        while True:
            self.update()
            while yielded < len(self._pieces):
                yielded += 1
                yield self._pieces[yielded - 1]
            if self.done:
                if self.error is not None:
                    raise self.error
                return
            self._generator.step()

    def _final_reason(self, reason: str) -> str:
        return reason

    def _reasoning_tokens(self) -> int:
        return 0

    @abstractmethod
    def _stop(self) -> str | None:
        """The stop string that has come."""

    @abstractmethod
    def _push(self, token: int) -> None:
        """Take a token that belongs to the text."""

    @abstractmethod
    def _finish(self) -> None:
        """Take the end of the tokens."""


class TextRequest(_Answering):
    """A text that is continued; ``TextGenerator.complete`` makes it.

    Iterating gives its pieces as they come, and runs steps of the runner until it has ended.
    """

    def __init__(self, generator: TextGenerator, request: Request, stops: Sequence[str]) -> None:
        super().__init__(generator, request)
        self._stream = generator.tokenizer.stream(stops)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text; None if none did."""
        return self._stream.stop

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def result(self) -> str:
        """Run steps until the request has ended; its text.

        Raises:
            RequestError: if the request failed.
        """
        return "".join(self)

    def __iter__(self) -> Iterator[str]:
        return self._iterate()

    def _stop(self) -> str | None:
        return self._stream.stop

    def _push(self, token: int) -> None:
        self._take(self._stream.push(token))

    def _finish(self) -> None:
        self._take(self._stream.finish())

    def _take(self, text: str) -> None:
        if text:
            self._pieces.append(text)


class ChatRequest(_Answering):
    """An answer in a conversation; ``TextGenerator.chat`` makes it.

    Iterating gives its events as they come (``dsv4.text.answer_events``), and runs steps of the
    runner until it has ended. Stop strings end the content; in reasoning and calls they are text.
    """

    def __init__(
        self, generator: TextGenerator, request: Request, stops: Sequence[str], start: str
    ) -> None:
        super().__init__(generator, request)
        self._parser = AnswerParser(generator.tokenizer, start)
        self._content = StopStream(stops)
        self._reasoning = 0

    @property
    def stop(self) -> str | None:
        """The stop string that ended the content; None if none did."""
        return self._content.stop

    @property
    def answer(self) -> Answer:
        """Return the part of the answer that has come."""
        texts = [piece.text for piece in self._pieces if isinstance(piece, ContentText)]
        return dataclasses.replace(self._parser.answer, content="".join(texts))

    def result(self) -> Answer:
        """Run steps until the request has ended; the answer.

        Raises:
            RequestError: if the request failed.
        """
        for _ in self:
            pass
        return self.answer

    def __iter__(self) -> Iterator[Event]:
        return self._iterate()

    def _stop(self) -> str | None:
        return self._content.stop

    def _reasoning_tokens(self) -> int:
        return self._reasoning

    def _final_reason(self, reason: str) -> str:
        return "tool_calls" if reason == "stop" and self._parser.answer.calls else reason

    def _push(self, token: int) -> None:
        self._reasoning += self._parser.is_reasoning
        self._take(self._parser.push(token))

    def _finish(self) -> None:
        self._take(self._parser.finish())
        self._take_content(self._content.flush())

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, ContentText):
                self._take_content(self._content.push(event.text))
            else:
                self._take_content(self._content.flush())  # content ends where a call begins
                self._pieces.append(event)
            if self._content.stop is not None:
                return

    def _take_content(self, text: str) -> None:
        if text:
            self._pieces.append(ContentText(text))


class TextGenerator:
    """Texts and conversations over a runner, which may also serve requests of token ids.

    Attributes:
        runner: What runs the model.
        tokenizer: Of the checkpoint.
        efforts: The checkpoint's table; None: ``chat`` must get it or not think.
    """

    def __init__(
        self, runner: Runner, tokenizer: Tokenizer, *, efforts: EffortTable | None = None
    ) -> None:
        """Bind a runner and a tokenizer.

        Raises:
            ValueError: if the tokenizer has ids that the model has not.
        """
        vocab_size = runner.model.config.vocab_size
        if tokenizer.vocab_size > vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} ids and the model {vocab_size}, "
                "wanted the tokenizer of the model's checkpoint"
            )
        self.runner = runner
        self.tokenizer = tokenizer
        self.efforts = efforts
        self._open: list[_Answering] = []

    def complete(
        self,
        text: str,
        *,
        stop: Sequence[str] = (),
        options: SamplingOptions | None = None,
        **changes: Any,
    ) -> TextRequest:
        """Continue a text.

        Args:
            text: Its beginning; spellings of control tokens in it stay text.
            stop: Strings that end it; they are not shown.
            options: How tokens are chosen; ``stop_ids`` None: EOS.
            **changes: Fields of ``options`` to change, e.g. ``temperature=0.7``.

        Raises:
            TypeError: if an argument is of the wrong kind.
            ValueError: if an option is out of range, or the request could never fit the cache.
        """
        stops = check_stops(stop)
        request = self._add(completion_prompt(text), options, changes)
        return self._opened(TextRequest(self, request, stops))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = True,
        effort: str | None = None,
        drop_thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        response_format: Mapping[str, Any] | None = None,
        stop: Sequence[str] = (),
        options: SamplingOptions | None = None,
        **changes: Any,
    ) -> ChatRequest:
        """Answer a conversation; see ``dsv4.text.chat_prompt``.

        Args:
            messages: OpenAI's tables.
            thinking: Whether the model reasons before it answers.
            effort: How much; None: ``"high"``.
            drop_thinking: Whether old reasoning is left out.
            tools: What the model may call.
            tool_choice: ``"auto"`` or ``"required"``.
            response_format: A JSON schema or OpenAI's table.
            stop: Strings that end the content; they are not shown.
            options: How tokens are chosen; ``stop_ids`` None: EOS.
            **changes: Fields of ``options`` to change.

        Raises:
            TypeError: if an argument is of the wrong kind.
            ValueError: if a message, a tool or an option is wrong, or the request could never fit
                the cache.
        """
        stops = check_stops(stop)
        prompt = chat_prompt(
            messages,
            thinking=thinking,
            effort=effort,
            efforts=self.efforts,
            drop_thinking=drop_thinking,
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
        )
        request = self._add(prompt, options, changes)
        return self._opened(ChatRequest(self, request, stops, prompt.start))

    def step(self) -> bool:
        """Run a step of the runner, and read what came of it for every text.

        Returns:
            Whether requests are left.
        """
        is_left = self.runner.step()
        for answering in self._open:
            answering.update()
        self._open = [answering for answering in self._open if not answering.done]
        return is_left

    def run(self) -> None:
        """Run steps until all requests have ended."""
        while self.step():
            pass

    def _add(
        self, prompt: Prompt, options: SamplingOptions | None, changes: dict[str, Any]
    ) -> Request:
        options = SamplingOptions.of(options, changes)
        if options.stop_ids is None:
            stops = (self.tokenizer.token_id(markers.EOS),)
            options = dataclasses.replace(options, stop_ids=stops)
        return self.runner.add(prompt.ids(self.tokenizer), options)

    def _opened(self, answering: Any) -> Any:
        self._open.append(answering)
        return answering
