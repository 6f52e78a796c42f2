"""Text of an answer token by token: unfinished characters and stop strings are held back."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class Utf8Stream:
    """Decodes bytes that arrive in pieces, and holds the bytes of an unfinished character.

    All texts together are what ``bytes.decode("utf-8", "replace")`` makes of all bytes.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, content: bytes) -> str:
        """Text that is certain now."""
        return self._decoder.decode(content)

    def flush(self) -> str:
        """Text of held bytes, which no further bytes complete."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


@dataclass(frozen=True)
class StopMatch:
    """End of a text at a stop string.

    Attributes:
        text: What is before the stop string.
        stop: The stop string.
    """

    text: str
    stop: str


def find_stop(text: str, stops: Sequence[str]) -> StopMatch | None:
    """The stop string that is complete first; of those that end together, the longest.

    The answer does not depend on how the text came in pieces, and does not change with what
    follows.
    """
    ends = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    if not ends:
        return None
    _, start, stop = min(ends)
    return StopMatch(text[:start], stop)


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """Stop strings as a tuple.

    Raises:
        TypeError: if they are no sequence of strings.
        ValueError: if one is empty.
    """
    if isinstance(stops, (str, bytes)) or not isinstance(stops, Sequence):
        raise TypeError(f"stop is {stops!r}, wanted a list of strings")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise TypeError(f"stop[{i}] is {stop!r}, wanted a string")
        if not stop:
            raise ValueError(f"stop[{i}] is empty, wanted at least one character")
    return tuple(stops)


class StopStream:
    """Passes text on up to the first stop string; what could become one is held back.

    Attributes:
        stop: The stop string that ended the text; None before that.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stop: str | None = None
        self._stops = check_stops(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, text: str) -> str:
        """Text that no stop string can begin in; nothing once a stop string was complete."""
        if self.stop is not None or not text:
            return ""
        text = self._held + text
        self._held = ""
        match = find_stop(text, self._stops)
        if match is not None:
            self.stop = match.stop
            return match.text
        cut = len(text) - self._beginning(text)
        self._held = text[cut:]
        return text[:cut]

    def _beginning(self, text: str) -> int:
        """Length of the longest end of a text that some stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0

    def flush(self) -> str:
        """Text that was held back and began no stop string after all."""
        text, self._held = self._held, ""
        return text


class TextStream:
    """Text of an answer, token by token; ``Tokenizer.stream`` makes it.

    All texts together are what decoding all tokens at once gives, up to the first stop string.

    Attributes:
        stop: The stop string that ended the text; None before that.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], stops: Sequence[str] = ()) -> None:
        self._bytes_of = bytes_of
        self._characters = Utf8Stream()
        self._stops = StopStream(stops)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text; None before that."""
        return self._stops.stop

    def push(self, token: int) -> str:
        """Text that is certain with one token more; may be empty."""
        return self._stops.push(self._characters.push(self._bytes_of(token)))

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        return self._stops.push(self._characters.flush()) + self._stops.flush()
