"""Tools and calls of tools as DeepSeek-V4 reads and writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dsv4.text.markers import DSML, Segment, marker, template

BLOCK = "tool_calls"
_TOOLS = f"""\
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<{DSML}{BLOCK}>" block like the following:

<{DSML}{BLOCK}>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}{BLOCK}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, \
booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_AFTER_TOOLS = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_RESPONSE_FORMAT = """\
## Response Format:

You MUST strictly adhere to the following schema to reply:
"""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        name: Of the tool.
        arguments: A JSON object as text.
        id: What the result of the call refers to; None: nothing does.
    """

    name: str
    arguments: str
    id: str | None = None

    def values(self) -> dict[str, Any]:
        """The arguments by name.

        Raises:
            ValueError: if they are no JSON object.
        """
        try:
            values = json.loads(self.arguments, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"arguments of the call of {self.name!r} are no JSON: {error}"
            ) from error
        if not isinstance(values, dict):
            raise ValueError(
                f"arguments of the call of {self.name!r} are {type(values).__name__}, "
                "wanted a JSON object"
            )
        return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def as_json(what: str, value: Any) -> str:
    """JSON as the model has learnt it: on one line, with characters beyond ASCII as they are.

    Raises:
        ValueError: if a value has no JSON.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} cannot be written as JSON: {error}") from None


def functions_of(tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The functions of tools, which are OpenAI's tables or their ``function`` alone.

    Raises:
        TypeError: if they are no sequence of tables.
        ValueError: if a tool is no function or has no name, or two have one name.
    """
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise TypeError(f"tools is {type(tools).__name__}, wanted a list of tables")
    functions: list[Mapping[str, Any]] = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise TypeError(f"tools[{i}] is {type(tool).__name__}, wanted a table")
        if "type" in tool and tool["type"] != "function":
            raise ValueError(f"tools[{i}] has type {tool['type']!r}, wanted 'function'")
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        check_name(f"tools[{i}]", name)
        if any(other["name"] == name for other in functions):
            raise ValueError(f"tools[{i}] has the name {name!r} of another tool")
        functions.append(function)
    return tuple(functions)


def check_name(what: str, name: Any) -> str:
    """A name that a call can be written with.

    Raises:
        ValueError: if it is empty or has a character that would end it.
    """
    if not isinstance(name, str) or not name or any(c in name for c in '"\n\r'):
        raise ValueError(
            f"{what} has the name {name!r}, wanted a string without quotation marks and line breaks"
        )
    return name


def tools_block(functions: Iterable[Mapping[str, Any]]) -> Iterator[Segment]:
    """Return the part of a system message about tools."""
    yield from template(_TOOLS)
    yield Segment("\n".join(as_json(f"tool {f['name']!r}", f) for f in functions))
    yield from template(_AFTER_TOOLS)


def response_format_block(schema: Any) -> Iterator[Segment]:
    """Return the part of a system message about the answer's JSON schema."""
    yield Segment(_RESPONSE_FORMAT)
    yield Segment(as_json("response_format", schema))


def schema_of(response_format: Any) -> Any:
    """The JSON schema of a response format; None if it is text.

    Args:
        response_format: A JSON schema, or OpenAI's table with ``type`` ``"text"``,
            ``"json_object"`` or ``"json_schema"``.

    Raises:
        TypeError: if it is no table.
        ValueError: if it is a ``json_schema`` without schema.
    """
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise TypeError(f"response_format is {response_format!r}, wanted a table")
    kind = response_format.get("type")
    if kind in ("text", "json_object"):
        return None
    if kind != "json_schema":
        return response_format
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ValueError("response_format has no json_schema.schema, wanted a JSON schema")
    return schema


def calls_block(calls: Sequence[ToolCall]) -> Iterator[Segment]:
    """Calls as the model writes them; nothing if there are none."""
    if not calls:
        return
    yield from template(f"\n\n<{DSML}{BLOCK}>\n")
    for call in calls:
        yield from _tag(f'invoke name="{check_name("a call", call.name)}">\n')
        parameters = [_parameter(call, name, value) for name, value in call.values().items()]
        for i, segments in enumerate(parameters):
            yield Segment("\n" if i else "")
            yield from segments
        yield Segment("\n")
        yield from _tag("invoke>\n", closing=True)
    yield from _tag(f"{BLOCK}>", closing=True)


def open_block() -> Iterator[Segment]:
    """The beginning of calls, which the model is to go on with."""
    return template(f"\n\n<{DSML}{BLOCK}>\n")


def _tag(rest: str, closing: bool = False) -> Iterator[Segment]:
    yield Segment("</" if closing else "<")
    yield marker(DSML)
    yield Segment(rest)


def _parameter(call: ToolCall, name: str, value: Any) -> list[Segment]:
    if '"' in name:
        raise ValueError(
            f"the call of {call.name!r} has an argument {name!r}, wanted a name without "
            "quotation marks"
        )
    is_string = isinstance(value, str)
    text = value if is_string else as_json(f"argument {name!r} of {call.name!r}", value)
    return [
        *_tag(f'parameter name="{name}" string="{"true" if is_string else "false"}">'),
        Segment(text),
        *_tag("parameter>", closing=True),
    ]
