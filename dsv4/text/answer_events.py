"""Events of an answer while it comes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningText:
    """More reasoning."""

    text: str


@dataclass(frozen=True)
class ContentText:
    """More content."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call of a tool begins.

    Attributes:
        index: Its number in the answer, from 0.
        name: Of the tool.
    """

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments.

    Attributes:
        index: Number of the call.
        text: All texts of a complete call together are a JSON object.
    """

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A call is complete and may be run."""

    index: int


@dataclass(frozen=True)
class CallIncomplete:
    """The answer ended inside a call, or the call is not well formed: it must not be run."""

    index: int


Event = ReasoningText | ContentText | CallStart | CallArguments | CallEnd | CallIncomplete
