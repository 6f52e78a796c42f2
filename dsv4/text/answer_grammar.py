"""The grammar of answers: a state machine over text in which symbols stand for markers.

A symbol is one lone surrogate, which decoded text never has. Text is passed on as soon as no tag
can begin in it; what is passed on does not depend on how the text comes in pieces. Where an answer
is not as the model has learnt to write it: ``<think>`` in reasoning and ``</think>`` in content are
left out, a block of calls inside reasoning ends it, what stands between calls and behind their
block is dropped, a call that breaks the grammar is incomplete, and other tags are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

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
from dsv4.text.tool_calls import BLOCK

THINK, END_THINK, DSML = "\ud800", "\ud801", "\ud802"
SYMBOLS = {markers.THINK: THINK, markers.END_THINK: END_THINK, markers.DSML: DSML}

_SYMBOL = re.compile(f"[{THINK}{END_THINK}{DSML}]")
_SPELLINGS = str.maketrans({symbol: spelling for spelling, symbol in SYMBOLS.items()})
# What may be the beginning of a block, with the blank line before it.
_HELD = re.compile(r"\n{0,2}<?\Z")
# Models write the first; vLLM has met the others.
_BLOCKS = tuple(f"{name}>" for name in (BLOCK, "toolcalls", "tool"))
_INVOKE, _END_INVOKE = 'invoke name="', "invoke>"
_PARAMETER, _END_PARAMETER = 'parameter name="', "parameter>"
_STRING = ' string="true">'
_VALUES = (_STRING, ' string="false">', ">")
_PARTIAL = ""


class AnswerGrammar:
    """Turns pieces of an answer into events.

    Attributes:
        is_reasoning: Whether what comes next is reasoning.
    """

    def __init__(self, start: str) -> None:
        steps = {"reasoning": self._prose, "content": self._prose, "calls": self._between_calls}
        if start not in steps:
            raise ValueError(f"start is {start!r}, wanted one of {', '.join(steps)}")
        self.is_reasoning = start == "reasoning"
        self._step: Callable[[], bool] = steps[start]
        self._pending = ""
        self._events: list[Event] = []
        self._index = -1
        self._name = ""
        self._is_open = False  # whether a call has begun and not ended
        self._parameters = 0
        self._loose: list[str] = []  # text of a call outside its parameters
        self._key = ""
        self._is_string = False
        self._raw: list[str] = []  # of a value that is no string

    def feed(self, text: str) -> list[Event]:
        """Events that are certain with more text."""
        self._pending += text
        while self._step():
            pass
        events, self._events = self._events, []
        return events

    def close(self) -> list[Event]:
        """Events of what was held back, at the end of the answer."""
        rest, self._pending = self._pending, ""
        if self._step == self._prose:
            self._emit_prose(rest)
        elif self._step == self._call_name:
            self._start(_spelled(rest))
        elif self._step == self._call_head:
            self._start(self._name)
        elif self._step == self._value:
            self._take_value(rest)
        self._break()
        self._step = self._behind
        events, self._events = self._events, []
        return events

    # Steps: each consumes pending text and returns whether there may be more to do with the rest.

    def _prose(self) -> bool:
        """Reasoning or content, up to a marker."""
        text = self._pending
        symbol = _SYMBOL.search(text)
        if symbol is None:
            self._hold(text, "")
            return False
        before, mark, after = text[: symbol.start()], symbol[0], text[symbol.end() :]
        if mark == DSML and before.endswith("<"):
            tag = _match(after, (*_BLOCKS, _INVOKE))
            if tag == _PARTIAL:
                self._hold(before, mark + after)
                return False
            if tag is not None:
                self._emit_prose(before.removesuffix("<").removesuffix("\n\n"))
                self.is_reasoning = False
                is_call = tag == _INVOKE
                self._pending = f"<{mark}{after}" if is_call else after[len(tag) :]
                return self._go(self._between_calls)
        self._emit_prose(before)
        if mark == END_THINK:
            self.is_reasoning = False
        elif mark == DSML or not self.is_reasoning:
            self._emit_prose(mark)
        self._pending = after
        return True

    def _hold(self, text: str, behind: str) -> None:
        held = _HELD.search(text)
        assert held is not None
        self._emit_prose(text[: held.start()])
        self._pending = held[0] + behind

    def _between_calls(self) -> bool:
        """Inside the block, outside calls: what is no tag is dropped."""
        before, mark, after = self._pending.partition(DSML)
        if not mark:
            self._pending = _tag_start(before)
            return False
        start = _tag_start(before)
        tags = {"</": _BLOCKS, "<": (_INVOKE,)}.get(start, ())
        tag = _match(after, tags)
        if tag == _PARTIAL:
            self._pending = start + mark + after
            return False
        if tag is None:
            self._pending = after
            return True
        self._pending = after[len(tag) :]
        return self._go(self._call_name if tag == _INVOKE else self._behind)

    def _behind(self) -> bool:
        """Behind the block: all is dropped."""
        self._pending = ""
        return False

    def _call_name(self) -> bool:
        name, quote, rest = self._pending.partition('"')
        symbol = _SYMBOL.search(name)
        if symbol is not None:
            self._start(name[: symbol.start()])
            self._pending = self._pending[len(_before_tag(name[: symbol.start()])) :]
            return self._break()
        if not quote:
            return False
        self._name, self._pending = name, rest
        return self._go(self._call_head)

    def _call_head(self) -> bool:
        """Behind the name: the end of the tag."""
        text = self._pending.lstrip(" ")
        tag = _match(text, (">", "/>"))
        if tag == _PARTIAL:
            return False
        self._start(self._name)
        if tag is None or not self._name:
            return self._break()
        self._pending = text[len(tag) :]
        if tag == ">":
            return self._go(self._call_body)
        self._end()
        return True

    def _call_body(self) -> bool:
        """Inside a call, outside its parameters."""
        before, mark, after = self._pending.partition(DSML)
        start = _tag_start(before)
        inside = before.removesuffix(start)
        if not mark:
            self._loose.append(inside)
            self._pending = start
            return False
        tags = {"</": (_END_INVOKE, *_BLOCKS), "<": (_PARAMETER, _INVOKE)}.get(start, ())
        tag = _match(after, tags)
        if tag is None:
            self._loose += (inside, start, mark)
            self._pending = after
            return True
        self._loose.append(inside)
        if tag == _PARTIAL:
            self._pending = start + mark + after
            return False
        if tag == _PARAMETER:
            self._pending = after[len(tag) :]
            return self._go(self._parameter_head)
        if tag == _END_INVOKE:
            self._pending = after[len(tag) :]
            self._end()
            return True
        self._pending = start + mark + after
        return self._break()

    def _parameter_head(self) -> bool:
        """The name of a parameter and the kind of its value."""
        key, quote, rest = self._pending.partition('"')
        if _SYMBOL.search(key):
            return self._break()
        if not quote:
            return False
        tag = _match(rest, _VALUES)
        if tag == _PARTIAL:
            return False
        if tag is None:
            return self._break()
        self._key, self._is_string = key, tag == _STRING
        self._pending = rest[len(tag) :]
        self._raw = []
        if self._is_string:
            self._emit_arguments(f'{self._separator()}{_json(key)}: "')
        return self._go(self._value)

    def _value(self) -> bool:
        before, mark, after = self._pending.partition(DSML)
        start = _tag_start(before)
        if not mark:
            self._take_value(before.removesuffix(start))
            self._pending = start
            return False
        tag = _match(after, (_END_PARAMETER,)) if start == "</" else None
        if tag is None:
            self._take_value(before + mark)
            self._pending = after
            return True
        self._take_value(before.removesuffix(start))
        if tag == _PARTIAL:
            self._pending = start + mark + after
            return False
        self._pending = after[len(tag) :]
        if self._is_string:
            self._emit_arguments('"')
        else:
            value = _normal("".join(self._raw))
            self._emit_arguments(f"{self._separator()}{_json(self._key)}: {value}")
        self._parameters += 1
        return self._go(self._call_body)

    # What the steps do.

    def _go(self, step: Callable[[], bool]) -> bool:
        self._step = step
        return True

    def _start(self, name: str) -> None:
        self._index += 1
        self._is_open = True
        self._parameters = 0
        self._loose = []
        self._events.append(CallStart(self._index, name))

    def _end(self) -> None:
        """Complete a call, if its text outside parameters is nothing or all its arguments."""
        loose = "".join(self._loose).strip()
        arguments = "}" if self._parameters else "{}"
        if loose:
            whole = None if self._parameters else _object(loose)
            if whole is None:
                self._break()
                return
            arguments = whole
        self._emit_arguments(arguments)
        self._events.append(CallEnd(self._index))
        self._is_open = False
        self._go(self._between_calls)

    def _break(self) -> bool:
        """Give up a call that has begun."""
        if self._is_open:
            self._events.append(CallIncomplete(self._index))
            self._is_open = False
        return self._go(self._between_calls)

    def _separator(self) -> str:
        return ", " if self._parameters else "{"

    def _take_value(self, text: str) -> None:
        text = _spelled(text)
        if self._is_string:
            self._emit_arguments(_json(text)[1:-1])
        else:
            self._raw.append(text)

    def _emit_prose(self, text: str) -> None:
        if not text:
            return
        text = _spelled(text)
        kind = ReasoningText if self.is_reasoning else ContentText
        last = self._events[-1] if self._events else None
        if isinstance(last, kind):
            self._events[-1] = kind(last.text + text)
        else:
            self._events.append(kind(text))

    def _emit_arguments(self, text: str) -> None:
        if not text:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, CallArguments) and last.index == self._index:
            self._events[-1] = CallArguments(self._index, last.text + text)
        else:
            self._events.append(CallArguments(self._index, text))


def _match(text: str, tags: Sequence[str]) -> str | None:
    """The tag that a text begins with; ``_PARTIAL`` if it may with more text; None if it cannot."""
    for tag in tags:
        if text.startswith(tag):
            return tag
    return _PARTIAL if any(tag.startswith(text) for tag in tags) else None


def _tag_start(text: str) -> str:
    """Return the end of a text with which a tag can begin."""
    return next((start for start in ("</", "<") if text.endswith(start)), "")


def _before_tag(text: str) -> str:
    return text.removesuffix(_tag_start(text))


def _spelled(text: str) -> str:
    return text.translate(_SPELLINGS)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _normal(text: str) -> str:
    """A value as JSON; a string if it is none."""
    try:
        return _json(json.loads(text))
    except (ValueError, RecursionError):
        return _json(text)


def _object(text: str) -> str | None:
    """A JSON object on one line; None if the text is none."""
    try:
        value = json.loads(text)
        return _json(value) if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None
