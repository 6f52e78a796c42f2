"""Messages of a conversation, checked: OpenAI's tables become turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsv4.text.markers import TASKS
from dsv4.text.tool_calls import ToolCall, as_json

_KEYS = {
    "system": ("content", "tools", "response_format"),
    "user": ("content", "task"),
    "tool": ("content", "tool_call_id", "name"),
    "latest_reminder": ("content",),
    "assistant": (
        "content",
        "reasoning",
        "reasoning_content",
        "tool_calls",
        "prefix",
        "wo_eos",
        "task",
    ),
}


@dataclass(frozen=True)
class SystemTurn:
    """Message that stands before the conversation.

    Attributes:
        content: Its text.
        tools: Tools it brings, unchecked; None: none.
        response_format: The format it asks for, unchecked; None: none.
    """

    content: str
    tools: Any = None
    response_format: Any = None


@dataclass(frozen=True)
class Part:
    """A part of a user turn.

    Attributes:
        text: Its content.
        is_result: Whether it is the result of a call.
        call_id: Of the call, if it is known.
    """

    text: str
    is_result: bool = False
    call_id: str | None = None


@dataclass(frozen=True)
class UserTurn:
    """Adjacent messages of users and tools."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class ReminderTurn:
    """A reminder for the user turn that follows."""

    content: str


@dataclass(frozen=True)
class AssistantTurn:
    """An answer.

    Attributes:
        content: Its text.
        reasoning: What came before ``</think>``.
        calls: Calls of tools.
        is_open: Whether the model is to go on with it.
        is_reasoning_open: Whether the model is to go on with its reasoning.
    """

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    is_open: bool = False
    is_reasoning_open: bool = False


Turn = SystemTurn | UserTurn | ReminderTurn | AssistantTurn


@dataclass(frozen=True)
class Conversation:
    """Checked turns.

    Attributes:
        turns: In their order, a system turn first if there is one.
        task: Of the last message, one of ``TASKS``; None: none.
    """

    turns: tuple[Turn, ...]
    task: str | None = None


def conversation(messages: Sequence[Mapping[str, Any]]) -> Conversation:
    """Check messages and merge them into turns.

    Raises:
        TypeError: if messages or their fields are of the wrong kind.
        ValueError: if a role or a field is unknown, or a message has no place where it stands.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"messages is {type(messages).__name__}, wanted a list of tables")
    if not messages:
        raise ValueError("messages is empty, wanted at least one")
    turns: list[Turn] = []
    task = None
    for i, message in enumerate(messages):
        what = f"messages[{i}]"
        turn = _turn(what, message)
        _check_order(what, turn, turns[-1] if turns else None)
        task = _task(what, message, is_last=i == len(messages) - 1)
        previous = turns[-1] if turns else None
        if isinstance(turn, UserTurn) and isinstance(previous, UserTurn):
            turns[-1] = UserTurn(previous.parts + turn.parts)
        else:
            turns.append(turn)
    _check_end(f"messages[{len(messages) - 1}]", turns[-1], task)
    return Conversation(tuple(_sorted_results(turns)), task)


def _turn(what: str, message: Any) -> Turn:
    if not isinstance(message, Mapping):
        raise TypeError(f"{what} is {type(message).__name__}, wanted a table")
    role = message.get("role")
    if role == "developer":
        raise ValueError(
            f"{what} has the role 'developer', which DeepSeek-V4 uses for a search agent: "
            "wanted 'system'"
        )
    if not isinstance(role, str) or role not in _KEYS:
        raise ValueError(f"{what} has the role {role!r}, wanted one of {', '.join(_KEYS)}")
    for key, value in message.items():
        if key != "role" and key not in _KEYS[role] and value is not None:
            raise ValueError(
                f"{what} has {key!r}, wanted only {', '.join(_KEYS[role])} in a message of "
                f"role {role!r}"
            )
    content = _content(what, message.get("content"))
    if role == "system":
        return SystemTurn(content, message.get("tools"), message.get("response_format"))
    if role == "user":
        return UserTurn((Part(content),))
    if role == "tool":
        call_id = _optional_text(what, message, "tool_call_id")
        return UserTurn((Part(content, is_result=True, call_id=call_id),))
    if role == "latest_reminder":
        return ReminderTurn(content)
    return _assistant(what, message, content)


def _content(what: str, content: Any) -> str:
    """The text of a content: a string, a list of text parts, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, (bytes, Mapping)) or not isinstance(content, Sequence):
        raise TypeError(f"{what}: content is {type(content).__name__}, wanted a string or a list")
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise ValueError(f"{what}: content[{i}] is a part of type {kind!r}, wanted 'text'")
        texts.append(text)
    return "\n\n".join(texts)


def _optional_text(what: str, message: Mapping[str, Any], key: str) -> str | None:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{what}: {key} is {type(value).__name__}, wanted a string")
    return value


def _flag(what: str, message: Mapping[str, Any], key: str) -> bool:
    value = message.get(key)
    if value not in (None, True, False):
        raise TypeError(f"{what}: {key} is {value!r}, wanted True or False")
    return bool(value)


def _assistant(what: str, message: Mapping[str, Any], content: str) -> AssistantTurn:
    thoughts = [_optional_text(what, message, key) for key in ("reasoning", "reasoning_content")]
    if None not in thoughts and thoughts[0] != thoughts[1]:
        raise ValueError(f"{what} has reasoning and another reasoning_content, wanted one of them")
    reasoning = thoughts[0] if thoughts[0] is not None else thoughts[1] or ""
    calls = _calls(what, message.get("tool_calls"))
    prefix, without_eos = _flag(what, message, "prefix"), _flag(what, message, "wo_eos")
    if calls and (prefix or without_eos):
        raise ValueError(f"{what} has tool_calls and is to be continued, wanted one of the two")
    return AssistantTurn(
        content,
        reasoning,
        calls,
        is_open=prefix or without_eos,
        is_reasoning_open=prefix and not without_eos and not content,
    )


def _calls(what: str, calls: Any) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence):
        raise TypeError(f"{what}: tool_calls is {type(calls).__name__}, wanted a list of tables")
    return tuple(_call(what, i, call) for i, call in enumerate(calls))


def _call(what: str, index: int, call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f"{what}: tool_calls[{index}] has no function, wanted a table of its own")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = as_json(f"{what}: tool_calls[{index}].function.arguments", dict(arguments))
    if not isinstance(arguments, str):
        raise TypeError(
            f"{what}: tool_calls[{index}].function.arguments is {type(arguments).__name__}, "
            "wanted a JSON object as text or as a table"
        )
    name, call_id = function.get("name"), call.get("id")
    if not isinstance(name, str):
        raise TypeError(f"{what}: tool_calls[{index}].function.name is {name!r}, wanted a string")
    return ToolCall(name, arguments, call_id if isinstance(call_id, str) else None)


def _task(what: str, message: Mapping[str, Any], is_last: bool) -> str | None:
    task = message.get("task")
    if task is None:
        return None
    if not isinstance(task, str) or task not in TASKS:
        raise ValueError(f"{what} has the task {task!r}, wanted one of {', '.join(TASKS)}")
    if not is_last:
        raise ValueError(f"{what} has a task, wanted one in the last message alone")
    return task


def _check_order(what: str, turn: Turn, previous: Turn | None) -> None:
    """Raise where DeepSeek's encoders disagree about what follows what."""
    if isinstance(previous, AssistantTurn) and previous.is_open:
        raise ValueError(f"{what} follows an answer to be continued, wanted that one at the end")
    if isinstance(turn, SystemTurn) and previous is not None:
        raise ValueError(
            f"{what} is a system message, wanted one, before all others: join them, or use the "
            "role latest_reminder"
        )
    if isinstance(turn, ReminderTurn) and isinstance(previous, UserTurn):
        raise ValueError(f"{what} is a latest_reminder, wanted before messages of users and tools")
    if isinstance(turn, AssistantTurn) and not isinstance(previous, (UserTurn, SystemTurn)):
        raise ValueError(
            f"{what} is an answer of the assistant, wanted a message of a user, a tool or the "
            "system before it"
        )


def _check_end(what: str, turn: Turn, task: str | None) -> None:
    if isinstance(turn, ReminderTurn):
        raise ValueError(f"{what} is a latest_reminder, wanted a message of a user after it")
    if isinstance(turn, AssistantTurn):
        if not turn.is_open and task is None:
            raise ValueError(
                f"{what}, the last, is an answer of the assistant: wanted a message of a user, or "
                "'prefix': True if the model is to continue it"
            )
        if turn.is_open and task is not None:
            raise ValueError(f"{what} has a task and is to be continued, wanted one of the two")


def _sorted_results(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with results in the order of the calls that they answer."""
    order: dict[str | None, int] = {}
    result: list[Turn] = []
    for turn in turns:
        if isinstance(turn, AssistantTurn) and turn.calls:
            order = {call.id: i for i, call in enumerate(turn.calls) if call.id is not None}
        if isinstance(turn, UserTurn):
            results = [part for part in turn.parts if part.is_result]
            # As in DeepSeek's encoder: what answers no known call comes with the first.
            ranked = iter(sorted(results, key=lambda part: order.get(part.call_id, 0)))
            parts = tuple(next(ranked) if part.is_result else part for part in turn.parts)
            turn = replace(turn, parts=parts)
        result.append(turn)
    return result
