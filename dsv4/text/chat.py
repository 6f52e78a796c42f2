"""Chat prompts of DeepSeek-V4: messages become markers and text.

DeepSeek ships a Python encoder with its checkpoints and publishes the package ``deepseek-recipe``.
This is an implementation of its own, compared with that package in tests, for three reasons: the
table of efforts is a property of the checkpoint, which the package does not know; old reasoning can
be kept and tasks rendered; and a prompt needs no compiled package with an image library. Where
DeepSeek's two encoders disagree, messages are refused with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4.text import markers
from dsv4.text.effort import EffortTable
from dsv4.text.markers import Segment, joined, marker, spelled
from dsv4.text.messages import (
    AssistantTurn,
    Conversation,
    Part,
    ReminderTurn,
    SystemTurn,
    Turn,
    UserTurn,
    conversation,
)
from dsv4.text.tokenizer import Tokenizer
from dsv4.text.tool_calls import (
    calls_block,
    functions_of,
    open_block,
    response_format_block,
    schema_of,
    tools_block,
)

# Where an answer begins: in its reasoning, in its content, or inside the block of calls.
REASONING, CONTENT, CALLS = "reasoning", "content", "calls"


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt.

    Attributes:
        segments: Markers and texts; no two texts are adjacent.
        start: Where the answer begins: ``"reasoning"``, ``"content"`` or ``"calls"``.
    """

    segments: tuple[Segment, ...]
    start: str = CONTENT

    @property
    def text(self) -> str:
        """The prompt as one string, which does not tell markers from text that spells them."""
        return spelled(self.segments)

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids."""
        return tokenizer.encode_segments(self.segments)


def completion_prompt(text: str) -> Prompt:
    """A prompt that the model continues: the beginning of a text."""
    return Prompt(joined((marker(markers.BOS), Segment(text))))


def chat_prompt(
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool = True,
    effort: str | None = None,
    efforts: EffortTable | None = None,
    drop_thinking: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str = "auto",
    response_format: Mapping[str, Any] | None = None,
    bos: bool = True,
) -> Prompt:
    """Render a conversation.

    Messages are OpenAI's tables with the roles system, user, assistant, tool and latest_reminder.
    Contents are strings or lists of text parts, never trimmed. An assistant message may have
    ``reasoning`` or ``reasoning_content``, and ``tool_calls``. The last message may be an answer
    to be continued: with ``"prefix": True`` its reasoning if it has no content, else its content,
    with ``"wo_eos": True`` its content in any case. Or it has a ``task``, one of
    ``dsv4.text.markers.TASKS``.

    Args:
        messages: The conversation.
        thinking: Whether the model reasons before it answers.
        effort: How much it reasons, a name of ``efforts``; None: ``"high"``.
        efforts: The checkpoint's table, ``EffortTable.from_path(folder)``; needed for thinking.
        drop_thinking: Whether reasoning before the last message of a user or tool is left out. With
            tools it is never left out.
        tools: What the model may call: OpenAI's tables, or their ``function`` alone.
        tool_choice: ``"auto"``, or ``"required"``: the answer begins with a call; not in thinking
            mode.
        response_format: A JSON schema or OpenAI's table. ``json_object`` adds nothing, and wants
            the word JSON in a message.
        bos: Whether the prompt begins with the BOS token.

    Raises:
        TypeError: if an argument or a field is of the wrong kind.
        ValueError: if a message, a tool or an option cannot be rendered.
    """
    talk = conversation(messages)
    system, turns = _with_system(talk, tools, response_format)
    functions = functions_of(system.tools) if system is not None and system.tools else ()
    schema = schema_of(system.response_format) if system is not None else None
    _check_json_object(response_format, messages)
    style = _Style(thinking, drop_thinking and not functions, _last_user(turns))
    segments = [
        *_beginning(bos, thinking, effort, efforts),
        *_system_turn(system, functions, schema),
    ]
    for i, turn in enumerate(turns):
        following = turns[i + 1] if i + 1 < len(turns) else None
        segments += _turn(turn, i, style)
        if isinstance(turn, AssistantTurn | ReminderTurn) or isinstance(
            following, ReminderTurn | UserTurn | SystemTurn
        ):
            continue
        if following is None and talk.task not in (None, "action"):
            continue
        segments += style.header(i)
    if talk.task is not None:
        segments.append(marker(markers.TASKS[talk.task]))
    start = _start(talk, style)
    if tool_choice != "auto":
        _check_required(tool_choice, thinking, functions, talk)
        segments += open_block()
        start = CALLS
    return Prompt(joined(segments), start)


@dataclass(frozen=True)
class _Style:
    """Style in which turns are rendered.

    Attributes:
        thinking: Whether the model reasons.
        drop: Whether old reasoning is left out.
        last_user: Index of the last user turn; -1: there is none.
    """

    thinking: bool
    drop: bool
    last_user: int

    def header(self, index: int) -> tuple[Segment, Segment]:
        """Return the text with which an answer after a turn begins."""
        reasons = self.thinking and (not self.drop or index >= self.last_user)
        return marker(markers.ASSISTANT), marker(markers.THINK if reasons else markers.END_THINK)

    def shows_reasoning(self, index: int) -> bool:
        """Whether an answer shows its reasoning."""
        return self.thinking and (not self.drop or index > self.last_user)


def _with_system(
    talk: Conversation, tools: Any, response_format: Any
) -> tuple[SystemTurn | None, tuple[Turn, ...]]:
    """The system turn with what the request adds, and all turns with it."""
    first = talk.turns[0]
    system = first if isinstance(first, SystemTurn) else None
    rest = talk.turns[1:] if system is not None else talk.turns
    for name, asked in (("tools", tools), ("response_format", response_format)):
        own = None if system is None else getattr(system, name)
        if asked is not None and own is not None:
            raise ValueError(f"{name} stands in the system message, too, wanted it once")
    if tools or schema_of(response_format) is not None:
        content = "" if system is None else system.content
        own_tools = None if system is None else system.tools
        own_format = None if system is None else system.response_format
        system = SystemTurn(content, tools or own_tools, response_format or own_format)
    return system, rest if system is None else (system, *rest)


def _check_json_object(response_format: Any, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise if an answer in JSON is asked for and no message says so: the model has to know."""
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "json_object" and "json" not in str([m.get("content") for m in messages]).lower():
        raise ValueError(
            "response_format is 'json_object', wanted the word JSON in a message: nothing else "
            "tells the model"
        )


def _last_user(turns: Sequence[Turn]) -> int:
    return max((i for i, turn in enumerate(turns) if isinstance(turn, UserTurn)), default=-1)


def _beginning(
    bos: bool, thinking: bool, effort: str | None, efforts: EffortTable | None
) -> Iterator[Segment]:
    if bos:
        yield marker(markers.BOS)
    if not thinking:
        if effort is not None:
            raise ValueError(f"effort is {effort!r} and thinking is off, wanted one of the two")
        return
    if efforts is None:
        raise ValueError(
            "efforts is None, wanted the checkpoint's table: EffortTable.from_path(folder), or "
            "dsv4.text.effort.ORIGINAL or RELEASE_0731 if the folder has no encoding/"
        )
    yield Segment(efforts.text(effort))


def _system_turn(
    system: SystemTurn | None, functions: Sequence[Mapping[str, Any]], schema: Any
) -> Iterator[Segment]:
    if system is None:
        return
    yield Segment(system.content)
    if functions:
        yield Segment("\n\n")
        yield from tools_block(functions)
    if schema is not None:
        yield Segment("\n\n")
        yield from response_format_block(schema)


def _turn(turn: Turn, index: int, style: _Style) -> Iterator[Segment]:
    if isinstance(turn, UserTurn):
        yield marker(markers.USER)
        yield Segment("\n\n".join(map(_part, turn.parts)))
    elif isinstance(turn, ReminderTurn):
        yield marker(markers.LATEST_REMINDER)
        yield Segment(turn.content)
    elif isinstance(turn, AssistantTurn):
        yield from _answer(turn, style.shows_reasoning(index))


def _part(part: Part) -> str:
    return f"<tool_result>{part.text}</tool_result>" if part.is_result else part.text


def _answer(turn: AssistantTurn, shows_reasoning: bool) -> Iterator[Segment]:
    if shows_reasoning:
        yield Segment(turn.reasoning)
        if turn.is_reasoning_open:
            return
        yield marker(markers.END_THINK)
    yield Segment(turn.content)
    yield from calls_block(turn.calls)
    if not turn.is_open:
        yield marker(markers.EOS)


def _start(talk: Conversation, style: _Style) -> str:
    last = talk.turns[-1]
    if talk.task is not None or not style.thinking:
        return CONTENT
    if isinstance(last, AssistantTurn):
        return REASONING if last.is_reasoning_open else CONTENT
    return REASONING


def _check_required(
    tool_choice: str, thinking: bool, functions: Sequence[Any], talk: Conversation
) -> None:
    if tool_choice != "required":
        raise ValueError(f"tool_choice is {tool_choice!r}, wanted 'auto' or 'required'")
    if thinking:
        raise ValueError("tool_choice is 'required', wanted thinking=False with it")
    if not functions:
        raise ValueError("tool_choice is 'required', wanted tools")
    if talk.task is not None or isinstance(talk.turns[-1], AssistantTurn):
        raise ValueError("tool_choice is 'required', wanted a message of a user or tool at the end")
