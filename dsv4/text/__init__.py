"""Text in, text out: tokenizer, chat prompts, parsing of answers, generation of text.

Needs the package ``tokenizers`` (``pip install "dsv4[text]"``), which nothing else in dsv4 imports.
Public names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_LAZY = {
    "Answer": "parsing",
    "AnswerParser": "parsing",
    "ChatRequest": "generate",
    "EffortTable": "effort",
    "Prompt": "chat",
    "TextGenerator": "generate",
    "TextRequest": "generate",
    "TextStream": "stream",
    "Tokenizer": "tokenizer",
    "TokenizerError": "tokenizer",
    "ToolCall": "tool_calls",
    "Usage": "generate",
    "chat_prompt": "chat",
    "completion_prompt": "chat",
    "parse_answer": "parsing",
}

__all__ = [
    "Answer",
    "AnswerParser",
    "ChatRequest",
    "EffortTable",
    "Prompt",
    "TextGenerator",
    "TextRequest",
    "TextStream",
    "Tokenizer",
    "TokenizerError",
    "ToolCall",
    "Usage",
    "chat_prompt",
    "completion_prompt",
    "parse_answer",
]

if TYPE_CHECKING:  # the same names as in _LAZY, so that type checkers see them
    from dsv4.text.chat import Prompt as Prompt
    from dsv4.text.chat import chat_prompt as chat_prompt
    from dsv4.text.chat import completion_prompt as completion_prompt
    from dsv4.text.effort import EffortTable as EffortTable
    from dsv4.text.generate import ChatRequest as ChatRequest
    from dsv4.text.generate import TextGenerator as TextGenerator
    from dsv4.text.generate import TextRequest as TextRequest
    from dsv4.text.generate import Usage as Usage
    from dsv4.text.parsing import Answer as Answer
    from dsv4.text.parsing import AnswerParser as AnswerParser
    from dsv4.text.parsing import parse_answer as parse_answer
    from dsv4.text.stream import TextStream as TextStream
    from dsv4.text.tokenizer import Tokenizer as Tokenizer
    from dsv4.text.tokenizer import TokenizerError as TokenizerError
    from dsv4.text.tool_calls import ToolCall as ToolCall


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'dsv4.text' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dsv4.text.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
