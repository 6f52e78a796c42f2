"""Control tokens of DeepSeek-V4 by their spelling, and prompts as text and markers.

A prompt is a list of segments. A marker becomes its token; text becomes ordinary tokens, even where
a user spells a marker in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
LATEST_REMINDER = "<｜latest_reminder｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
# A message with a task ends in one of these; see ``dsv4.text.chat``.
TASKS = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}
# Markers without which neither prompts nor answers can be read; a tokenizer must have them.
REQUIRED = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML)

_IN_TEMPLATES = re.compile("|".join(map(re.escape, (THINK, END_THINK, DSML))))


@dataclass(frozen=True)
class Segment:
    """A part of a prompt.

    Attributes:
        text: The text, or the spelling of the marker.
        is_marker: Whether it becomes one control token.
    """

    text: str
    is_marker: bool = False


def marker(spelling: str) -> Segment:
    """The segment of a control token."""
    return Segment(spelling, is_marker=True)


def template(text: str) -> Iterator[Segment]:
    """Segments of this package's own text, in which spellings of markers are markers."""
    end = 0
    for match in _IN_TEMPLATES.finditer(text):
        yield Segment(text[end : match.start()])
        yield marker(match[0])
        end = match.end()
    yield Segment(text[end:])


def joined(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """The same prompt with adjacent texts joined: they are encoded as one, and none is empty."""
    result: list[Segment] = []
    for segment in segments:
        if segment.is_marker or not result or result[-1].is_marker:
            if segment.text:
                result.append(segment)
        else:
            result[-1] = Segment(result[-1].text + segment.text)
    return tuple(result)


def spelled(segments: Iterable[Segment]) -> str:
    """The prompt as one string."""
    return "".join(segment.text for segment in segments)
