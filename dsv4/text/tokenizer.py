"""The tokenizer of a checkpoint: text to token ids and back, bytes for bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4.config.json_file import JsonError, read_bytes, show
from dsv4.text.markers import REQUIRED, Segment, joined
from dsv4.text.stream import TextStream

FILE = "tokenizer.json"
_SURROGATE = re.compile("[\ud800-\udfff]")


class TokenizerError(ValueError):
    """A tokenizer file that cannot be used: the message names it and says what is wrong."""


class Tokenizer:
    """Encodes text and segments, decodes ids; its ids of markers come from the file.

    Text is encoded without the added vocabulary. A marker that a user spells out therefore stays
    text: only segments that are markers become control tokens.

    Attributes:
        ids: Id of each token of the added vocabulary, by its spelling.
        vocab_size: The largest id plus one.
    """

    def __init__(self, values: Mapping[str, Any], what: str = FILE) -> None:
        """Build the tokenizer from the table of a tokenizer.json.

        Args:
            values: The table.
            what: Name of the file, for messages.

        Raises:
            ImportError: if the package ``tokenizers`` is missing.
            TokenizerError: if the table is no byte-level tokenizer, or a marker is missing.
        """
        library = _library()
        self.ids = _added(values, what)
        missing = [spelling for spelling in REQUIRED if spelling not in self.ids]
        if missing:
            raise TokenizerError(
                f"{what} has no token {', '.join(missing)}, wanted the tokenizer of a "
                "DeepSeek-V4 checkpoint"
            )
        decoder = values.get("decoder")
        if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
            raise TokenizerError(f"{what} has the decoder {show(decoder)}, wanted ByteLevel")
        # Neither adds tokens nor finds markers in text; ids of the vocabulary stay what they are.
        plain = {**values, "added_tokens": [], "post_processor": None}
        plain |= {"truncation": None, "padding": None}
        try:
            self._text = library.Tokenizer.from_str(json.dumps(plain))
        except Exception as error:  # what tokenizers raises for a table that it cannot read
            raise TokenizerError(f"{what} is no tokenizer: {error}") from error
        self._spellings = {token: spelling for spelling, token in self.ids.items()}
        ids = self._text.get_vocab(with_added_tokens=False).values()
        self.vocab_size = 1 + max(*ids, *self._spellings) if ids else 1 + max(self._spellings)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer.json of a checkpoint's folder, or a file of this kind.

        Raises:
            FileNotFoundError: if there is none.
            ImportError: if the package ``tokenizers`` is missing.
            TokenizerError: if it cannot be used.
        """
        file = Path(path)
        if file.is_dir():
            file = file / FILE
        try:
            content = read_bytes(file)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"there is no {file}, wanted the tokenizer of the checkpoint: DeepSeek-V4's "
                f"repositories have it as {FILE}"
            ) from None
        except JsonError as error:
            raise TokenizerError(str(error)) from error
        try:
            values = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise TokenizerError(f"{file} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise TokenizerError(f"{file} holds {type(values).__name__}, wanted a table of fields")
        return cls(values, str(file))

    def token_id(self, spelling: str) -> int:
        """The id of a marker.

        Raises:
            ValueError: if the tokenizer has none of this spelling.
        """
        if spelling not in self.ids:
            raise ValueError(f"the tokenizer has no token {spelling!r}")
        return self.ids[spelling]

    def encode(self, text: str) -> list[int]:
        """Ids of text; spellings of markers in it stay text, and nothing is added."""
        if not isinstance(text, str):
            raise TypeError(f"text is {type(text).__name__}, wanted a string")
        half = _SURROGATE.search(text)
        if half is not None:
            raise ValueError(f"text holds {half[0]!r}, which is half of a character")
        return self._text.encode(text, add_special_tokens=False).ids

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of a prompt: one for each marker, and those of the texts between them."""
        ids: list[int] = []
        for segment in joined(segments):
            if segment.is_marker:
                ids.append(self.token_id(segment.text))
            else:
                ids += self.encode(segment.text)
        return ids

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; none for an id without a token."""
        content = self._bytes.get(token)
        if content is None:
            content = self._bytes[token] = self._look_up(token)
        return content

    def _look_up(self, token: int) -> bytes:
        if token in self._spellings:
            return self._spellings[token].encode()
        symbols = self._text.id_to_token(token) if token >= 0 else None
        if symbols is None:
            return b""
        try:
            return bytes(_BYTES[symbol] for symbol in symbols)
        except KeyError:  # not of the byte alphabet: the token is its own text
            return symbols.encode()

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, markers spelled out; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")

    def stream(self, stop: Sequence[str] = ()) -> TextStream:
        """Text of ids that come one by one.

        Args:
            stop: Strings that end the text; they are not shown.
        """
        return TextStream(self.bytes_of, stop)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "dsv4.text needs the package tokenizers, which is not installed: "
            'pip install "dsv4[text]"'
        ) from error
    return tokenizers


def _added(values: Mapping[str, Any], what: str) -> dict[str, int]:
    """Ids of the added vocabulary by their spelling."""
    tokens = values.get("added_tokens")
    if not isinstance(tokens, list):
        raise TokenizerError(f"{what} has no added_tokens, wanted a list of tokens")
    ids: dict[str, int] = {}
    for i, token in enumerate(tokens):
        spelling = token.get("content") if isinstance(token, dict) else None
        number = token.get("id") if isinstance(token, dict) else None
        if not isinstance(spelling, str) or type(number) is not int or number < 0:
            raise TokenizerError(
                f"{what}: added_tokens[{i}] is {show(token)}, wanted a table with content and id"
            )
        ids[spelling] = number
    return ids


def _byte_alphabet() -> dict[str, int]:
    """The byte that each symbol of a byte-level vocabulary stands for.

    Printable bytes of Latin-1 stand for themselves, the others are numbered from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
