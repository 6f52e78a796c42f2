"""Answers of DeepSeek-V4: token ids become reasoning, content and calls of tools, as they come.

Markers are known by their ids, so that text which spells one stays text. Nothing is trimmed: of a
block of calls only the blank line before it is left out, which the model always writes. An answer
that is rendered again by ``chat_prompt`` therefore has the tokens that were sampled, as far as the
model wrote them as it has learnt to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dsv4.text import markers
from dsv4.text.answer_events import (
    CallArguments,
    CallEnd,
    CallIncomplete,
    CallStart,
    ContentText,
    Event,
    ReasoningText,
)
from dsv4.text.answer_grammar import SYMBOLS, AnswerGrammar
from dsv4.text.chat import CONTENT
from dsv4.text.stream import Utf8Stream
from dsv4.text.tokenizer import Tokenizer
from dsv4.text.tool_calls import ToolCall


@dataclass(frozen=True)
class Answer:
    """An answer, or as much of it as has come.

    Attributes:
        reasoning: What is before ``</think>``; all of an answer that ends before it.
        content: The text of the answer.
        calls: Complete calls, which may be run.
        incomplete: Calls that the answer broke off in, or that are not well formed: not to be run.
            Their arguments are no JSON.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    incomplete: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """The message for ``chat_prompt``; calls get the ids ``call_0``, ``call_1`` and so on."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id or f"call_{i}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for i, call in enumerate(self.calls)
            ]
        return message


class _Call:
    def __init__(self, name: str) -> None:
        self.name = name
        self.arguments: list[str] = []
        self.is_complete = False

    def frozen(self) -> ToolCall:
        return ToolCall(self.name, "".join(self.arguments))


class AnswerParser:
    """Reads an answer token by token; a token behind EOS is not read."""

    def __init__(self, tokenizer: Tokenizer, start: str = CONTENT) -> None:
        """Begin an answer.

        Args:
            tokenizer: Of the checkpoint.
            start: ``Prompt.start``: where the answer begins.
        """
        self._bytes_of = tokenizer.bytes_of
        self._eos = tokenizer.token_id(markers.EOS)
        self._symbols = {tokenizer.token_id(name): symbol for name, symbol in SYMBOLS.items()}
        self._characters = Utf8Stream()
        self._grammar = AnswerGrammar(start)
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[_Call] = []
        self._is_over = False

    @property
    def is_reasoning(self) -> bool:
        """Whether the next token is one of reasoning."""
        return self._grammar.is_reasoning

    @property
    def answer(self) -> Answer:
        """Return the part that has come; a call that has not ended is an incomplete one."""
        return Answer(
            "".join(self._reasoning),
            "".join(self._content),
            tuple(call.frozen() for call in self._calls if call.is_complete),
            tuple(call.frozen() for call in self._calls if not call.is_complete),
        )

    def push(self, token: int) -> list[Event]:
        """Return the events that one token more makes certain, if any."""
        return self.extend((token,))

    def extend(self, tokens: Iterable[int]) -> list[Event]:
        """Return the events that several tokens more make certain."""
        return self._take(self._grammar.feed("".join(map(self._text, tokens))))

    def finish(self) -> list[Event]:
        """The rest, after the last token."""
        events = self._grammar.feed(self._characters.flush())
        return self._take([*events, *self._grammar.close()])

    def _text(self, token: int) -> str:
        """Text that is certain, with a symbol for each marker."""
        if self._is_over:
            return ""
        if token == self._eos:
            self._is_over = True
            return ""
        symbol = self._symbols.get(token)
        if symbol is None:
            return self._characters.push(self._bytes_of(token))
        return self._characters.flush() + symbol

    def _take(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, ReasoningText):
                self._reasoning.append(event.text)
            elif isinstance(event, ContentText):
                self._content.append(event.text)
            elif isinstance(event, CallStart):
                self._calls.append(_Call(event.name))
            elif isinstance(event, CallArguments):
                self._calls[event.index].arguments.append(event.text)
            elif isinstance(event, CallEnd):
                self._calls[event.index].is_complete = True
            else:
                assert isinstance(event, CallIncomplete)
        return events


def parse_answer(tokenizer: Tokenizer, ids: Iterable[int], start: str = CONTENT) -> Answer:
    """The answer of all its tokens; EOS ends it.

    Args:
        tokenizer: Of the checkpoint.
        ids: Tokens.
        start: ``Prompt.start``: where the answer begins.
    """
    parser = AnswerParser(tokenizer, start)
    parser.extend(ids)
    parser.finish()
    return parser.answer
