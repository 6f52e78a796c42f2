"""Prompts, byte for byte: goldens, DeepSeek's own package as an oracle, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.text import markers
from dsv4.text.chat import chat_prompt, completion_prompt
from dsv4.text.effort import DEFAULT, ORIGINAL, RELEASE_0731, EffortTable
from dsv4.text.markers import Segment
from tests.text.test_tokenizer import TEXT, utf8

# Made with vLLM's and DeepSeek's encoders, which agree on most; ids with DeepSeek's tokenizer.
GOLDENS = json.loads((Path(__file__).parent / "goldens.json").read_text(encoding="utf-8"))
WEATHER = {
    "name": "get_weather",
    "description": "Get weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
USER = {"role": "user", "content": "Hi"}


def prompt(messages, **options):
    if options.get("thinking", True):
        options.setdefault("efforts", RELEASE_0731)
    return chat_prompt(messages, **options)


def answer(content="", **fields):
    return {"role": "assistant", "content": content, **fields}


def call(name, arguments, number="a"):
    function = {"name": name, "arguments": arguments}
    return {"id": number, "type": "function", "function": function}


def result(content, number="a"):
    return {"role": "tool", "content": content, "tool_call_id": number}


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden["name"])
def test_goldens(golden, deepseek):
    rendered = prompt(
        golden["messages"],
        thinking=golden["thinking"],
        effort=golden["effort"],
        drop_thinking=golden["drop_thinking"],
        tools=[WEATHER] if golden["tools"] else None,
    )
    assert rendered.text == golden["text"]
    assert rendered.ids(deepseek) == golden["ids"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=5).filter(utf8),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text("ab<", max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
CONTENT = TEXT.filter(utf8)
NAME = st.text("abc_-", min_size=1, max_size=4)
ARGUMENTS = st.dictionaries(NAME, JSON | CONTENT, min_size=1, max_size=3)


@st.composite
def conversations(draw):
    """Messages whose form DeepSeek's package and this one agree on."""
    messages = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(CONTENT)})
    for _ in range(draw(st.integers(0, 3))):
        messages += draw(user_messages())
        messages += draw(answers())
    messages += draw(user_messages())
    # The package takes no calls beside an answer to be continued.
    if not any("tool_calls" in message for message in messages) and draw(st.booleans()):
        content = draw(CONTENT.filter(bool))
        messages.append(answer(content, reasoning_content=draw(CONTENT), prefix=True))
    return messages


@st.composite
def user_messages(draw):
    reminder = [{"role": "latest_reminder", "content": draw(CONTENT)}]
    # Of an empty one among others the package leaves out the blank line.
    texts = draw(st.lists(CONTENT.filter(bool), min_size=1, max_size=2))
    users = [{"role": "user", "content": text} for text in texts]
    if draw(st.booleans()):
        parts = [{"type": "text", "text": text} for text in texts]
        users = [{"role": "user", "content": parts}]
    return reminder * draw(st.integers(0, 1)) + users


@st.composite
def answers(draw):
    """An answer, maybe after calls and their results in any order."""
    messages = []
    for _ in range(draw(st.integers(0, 2))):
        numbers = [f"c{i}" for i in range(draw(st.integers(1, 3)))]
        arguments = [draw(ARGUMENTS) for _ in numbers]
        as_text = draw(st.booleans())
        calls = [
            call(draw(NAME), json.dumps(values, ensure_ascii=as_text), number)
            for number, values in zip(numbers, arguments, strict=True)
        ]
        messages.append(answer(draw(CONTENT), reasoning_content=draw(CONTENT), tool_calls=calls))
        messages += [result(draw(CONTENT), n) for n in draw(st.permutations(numbers))]
    return [*messages, answer(draw(CONTENT), reasoning_content=draw(CONTENT))]


TOOLS = st.lists(
    st.builds(
        lambda name, description, properties: {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {"type": "object", "properties": properties},
            },
        },
        NAME,
        CONTENT,
        st.dictionaries(NAME, st.just({"type": "string"}), max_size=2),
    ),
    max_size=2,
    unique_by=lambda tool: tool["function"]["name"],
)


@given(conversations(), TOOLS, st.sampled_from([None, "low", "high", "max"]), st.booleans())
def test_random_conversations_have_the_text_and_ids_of_deepseeks_encoder(
    deepseek, encoder, messages, tools, effort, with_schema
):
    recipe, oracle, _ = encoder
    request = {"model": "DeepSeek-V4-Pro", "messages": messages}
    options = {"thinking": effort is not None, "effort": effort}
    request |= {"reasoning_effort": effort} if effort else {"thinking": {"type": "disabled"}}
    if tools and not messages[-1].get("prefix"):  # as above
        request["tools"] = options["tools"] = tools
    if with_schema:
        schema = {"type": "object", "properties": {"ä": {"type": "string"}}}
        described = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        request["response_format"] = options["response_format"] = described
    talk = recipe.ChatCompletionRequest(request).convert(recipe.ConversionOptions()).conversation
    rendered = prompt(messages, **options)
    assert rendered.text == oracle.render_conversation(talk).prompt
    assert rendered.ids(deepseek) == oracle.encode(talk)


@given(conversations(), st.booleans())
def test_control_tokens_are_those_of_markers(deepseek, messages, thinking):
    """Whatever users, tools and answers spell."""
    rendered = prompt(messages, thinking=thinking)
    control = [t for t in rendered.ids(deepseek) if t in deepseek.ids.values()]
    expected = [deepseek.ids[s.text] for s in rendered.segments if s.is_marker]
    assert control == expected
    assert deepseek.decode(rendered.ids(deepseek)) == rendered.text
    for left, right in zip(rendered.segments, rendered.segments[1:], strict=False):
        assert left.is_marker or right.is_marker


@given(conversations())
def test_both_names_of_reasoning_render_alike(messages):
    renamed = [
        {("reasoning" if key == "reasoning_content" else key): v for key, v in message.items()}
        for message in messages
    ]
    assert prompt(messages) == prompt(renamed)


class TestStart:
    """Where the answer begins, for the parser."""

    @pytest.mark.parametrize(
        ("last", "thinking", "end", "start"),
        [
            ([], True, "<think>", "reasoning"),
            ([], False, "</think>", "content"),
            ([answer("A", reasoning="r", prefix=True)], True, "<think>r</think>A", "content"),
            ([answer("", reasoning="r", prefix=True)], True, "<think>r", "reasoning"),
            ([answer("", reasoning="r", wo_eos=True)], True, "<think>r</think>", "content"),
            ([answer("", prefix=True)], True, "<think>", "reasoning"),
            ([answer("", reasoning="r", prefix=True)], False, "</think>", "content"),
            ([answer("A", prefix=True)], True, "<think></think>A", "content"),
        ],
    )
    def test_answers_to_be_continued(self, last, thinking, end, start):
        rendered = prompt([USER, *last], thinking=thinking, effort="low" if thinking else None)
        assert rendered.text == f"{markers.BOS}{markers.USER}Hi{markers.ASSISTANT}{end}"
        assert rendered.start == start

    def test_a_required_call(self, deepseek):
        rendered = prompt([USER], thinking=False, tools=[WEATHER], tool_choice="required")
        assert rendered.text.endswith("<｜Assistant｜></think>\n\n<｜DSML｜tool_calls>\n")
        assert rendered.start == "calls"
        assert rendered.ids(deepseek).count(deepseek.ids[markers.DSML]) == 10

    @pytest.mark.parametrize("task", markers.TASKS)
    def test_tasks(self, task):
        rendered = prompt([{**USER, "task": task}], effort="low")
        header = "<｜Assistant｜><think>" if task == "action" else ""
        assert rendered.text == f"{markers.BOS}<｜User｜>Hi{header}<｜{task}｜>"
        assert rendered.start == "content"
        rendered = prompt([USER, answer("A", task=task)], thinking=False)
        assert rendered.text.endswith(f"<｜Assistant｜></think>A{markers.EOS}<｜{task}｜>")

    def test_a_system_message_alone(self):
        rendered = prompt([{"role": "system", "content": "S"}], thinking=False)
        assert rendered.text == f"{markers.BOS}S<｜Assistant｜></think>"

    def test_no_bos(self):
        assert prompt([USER], thinking=False, bos=False).segments[0] == Segment(
            "<｜User｜>", is_marker=True
        )

    def test_completion(self, deepseek):
        ids = completion_prompt("Hi<think>").ids(deepseek)
        assert ids[0] == 0
        assert deepseek.ids["<think>"] not in ids


def test_a_call_without_arguments_has_a_blank_line():
    """As in DeepSeek's and vLLM's Python encoders; ``deepseek-recipe`` leaves it out."""
    calls = [call("f", "{}")]
    rendered = prompt([USER, answer(tool_calls=calls), result("x")], thinking=False)
    assert '<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>' in rendered.text


def test_characters_beyond_ascii_stand_in_tools_and_calls_as_they_are():
    tool = {**WEATHER, "description": "Größe, 杭州"}
    messages = [USER, answer(tool_calls=[call("get_weather", '{"cities": ["\\u676d州"]}')])]
    text = prompt([*messages, result("x")], tools=[tool]).text
    assert '"description": "Größe, 杭州"' in text
    assert 'name="cities" string="false">["杭州"]<' in text


def test_results_go_to_the_order_of_their_calls_and_texts_stay():
    calls = [call("f", {"x": 1}, n) for n in "abc"]
    messages = [USER, answer(tool_calls=calls), result("C", "c"), {**USER, "content": "text"}]
    messages += [result("A", "a"), result("B", "b"), result("Z", "unknown")]
    parts = prompt(messages, thinking=False).text.split("<｜User｜>")[-1]
    results = ["<tool_result>A</tool_result>", "text", "<tool_result>Z</tool_result>"]
    results += ["<tool_result>B</tool_result>", "<tool_result>C</tool_result>"]
    assert parts.startswith("\n\n".join(results))


class TestEffort:
    def test_tables(self):
        assert [ORIGINAL.text(e) != "" for e in (None, "high", "max")] == [False, False, True]
        texts = [RELEASE_0731.text(e) != "" for e in (None, "low", "high", "max")]
        assert texts == [True, False, True, True]
        assert ORIGINAL.text("max") == RELEASE_0731.text("high")
        with pytest.raises(ValueError, match=r"effort is 'low', wanted one of high, max \(table"):
            ORIGINAL.text("low")

    def write(self, folder, source):
        (folder / "encoding").mkdir(exist_ok=True)
        (folder / "encoding" / "encoding_dsv4.py").write_text(source, encoding="utf-8")

    def test_the_table_of_a_checkpoint(self, tmp_path):
        assert EffortTable.from_path(tmp_path) is None
        for table, source in (
            (RELEASE_0731, f"import os\nREASONING_EFFORT_PROMPTS: dict = {RELEASE_0731.texts!r}"),
            (ORIGINAL, f"REASONING_EFFORT_MAX = ({ORIGINAL.texts['max']!r})\ndef f(): pass"),
        ):
            self.write(tmp_path, source)
            assert EffortTable.from_path(tmp_path) is table
        self.write(tmp_path, "REASONING_EFFORT_PROMPTS = {'high': 'x', 'other': ''}")
        table = EffortTable.from_path(tmp_path)
        assert (table.text(DEFAULT), table.text("other")) == ("x", "")
        # Names of a known release with other texts.
        self.write(tmp_path, "REASONING_EFFORT_PROMPTS = {'high': 'x', 'max': 'y'}")
        table = EffortTable.from_path(tmp_path)
        assert (table.text(DEFAULT), table.text("max")) == ("x", "y")

    @pytest.mark.parametrize(
        "source",
        [
            "x = 1",
            "REASONING_EFFORT_PROMPTS = make()",
            "REASONING_EFFORT_PROMPTS = {'high': 3}",
            "REASONING_EFFORT_PROMPTS = {'low': ''}",
            "def",
            "x = " + "(" * 300,
            "\0",
        ],
    )
    def test_a_file_that_tells_nothing(self, tmp_path, source):
        self.write(tmp_path, source)
        with pytest.raises(ValueError, match=r"encoding_dsv4\.py"):
            EffortTable.from_path(tmp_path)

    def test_the_file_is_not_run(self, tmp_path):
        marked = tmp_path / "ran"
        source = f"open({str(marked)!r}, 'w')\nREASONING_EFFORT_PROMPTS = dict(high='')"
        self.write(tmp_path, source)
        with pytest.raises(ValueError, match="cannot be read"):
            EffortTable.from_path(tmp_path)
        assert not marked.exists()


SYSTEM = {"role": "system", "content": "S"}
REMINDER = {"role": "latest_reminder", "content": "R"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([{"role": "developer", "content": "x"}], "wanted 'system'"),
        ([{"role": "robot"}], "has the role 'robot'"),
        ([{**USER, "name": "Bob"}], r"messages\[0\] has 'name', wanted only content, task"),
        ([USER, SYSTEM], r"messages\[1\] is a system message, wanted one, before all others"),
        ([SYSTEM, SYSTEM, USER], r"messages\[1\] is a system message"),
        ([answer("A"), USER], r"messages\[0\] is an answer of the assistant, wanted a message"),
        ([USER, answer("A"), answer("B"), USER], r"messages\[2\] is an answer"),
        ([USER, answer("A")], r"messages\[1\], the last, is an answer .* 'prefix': True"),
        ([USER, answer("A", prefix=True), USER], r"messages\[2\] follows an answer to be cont"),
        ([USER, answer("A", prefix=True, task="title")], "has a task and is to be continued"),
        ([USER, REMINDER, USER], r"messages\[1\] is a latest_reminder, wanted before"),
        ([REMINDER], "wanted a message of a user after it"),
        ([{**USER, "task": "sing"}], "has the task 'sing', wanted one of action, query"),
        ([{**USER, "task": "title"}, USER], "wanted one in the last message alone"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] is a part of ty"),
        ([USER, answer("", reasoning="a", reasoning_content="b"), USER], "another reasoning_con"),
        ([USER, answer(prefix=True, tool_calls=[call("f", "{}")])], "has tool_calls and is to be"),
        ([USER, answer(tool_calls=[call("f", "[]")]), USER], "are list, wanted a JSON object"),
        ([USER, answer(tool_calls=[call("f", "{")]), USER], "of 'f' are no JSON"),
        ([USER, answer(tool_calls=[call("f", '{"a": NaN}')]), USER], "NaN is no JSON"),
        ([USER, answer(tool_calls=[call("f", '{"a": 1e999}')]), USER], "cannot be written as JSON"),
        ([USER, answer(tool_calls=[call('f"', "{}")]), USER], "without quotation marks"),
        ([USER, answer(tool_calls=[call("f", '{"\\"": 1}')]), USER], "without quotation marks"),
        ([USER, answer(tool_calls=[{"id": "a"}]), USER], r"tool_calls\[0\] has no function"),
    ],
)
def test_messages_that_are_refused(messages, message):
    with pytest.raises(ValueError, match=message):
        prompt(messages, thinking=False)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages is str, wanted a list"),
        (["Hi"], r"messages\[0\] is str, wanted a table"),
        ([{"role": "user", "content": 3}], "content is int"),
        ([USER, answer(tool_calls=3), USER], "tool_calls is int"),
        ([USER, answer(reasoning=3), USER], "reasoning is int"),
        ([USER, answer(prefix="yes")], "prefix is 'yes'"),
        ([USER, answer(tool_calls=[call("f", 3)]), USER], "arguments is int"),
    ],
)
def test_messages_of_wrong_kinds(messages, message):
    with pytest.raises(TypeError, match=message):
        prompt(messages, thinking=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"efforts": None}, "efforts is None, wanted the checkpoint's table"),
        ({"thinking": False, "effort": "high"}, "effort is 'high' and thinking is off"),
        ({"effort": "medium"}, "effort is 'medium', wanted one of low, high, max"),
        ({"tool_choice": "required", "tools": [WEATHER]}, "wanted thinking=False with it"),
        ({"tool_choice": "required", "thinking": False}, "wanted tools"),
        ({"tool_choice": "f", "thinking": False}, "wanted 'auto' or 'required'"),
        ({"tools": [WEATHER, WEATHER]}, "has the name 'get_weather' of another tool"),
        ({"tools": [{"type": "web_search"}]}, "has type 'web_search', wanted 'function'"),
        ({"tools": [{"name": ""}]}, r"tools\[0\] has the name ''"),
        ({"tools": [{"name": "f", "parameters": {1, 2}}]}, "cannot be written as JSON"),
        ({"response_format": {"type": "json_schema"}}, "has no json_schema.schema"),
        ({"response_format": {"type": "json_object"}}, "wanted the word JSON in a message"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        prompt([USER], **options)


def test_tools_and_formats_stand_once():
    with pytest.raises(ValueError, match="tools stands in the system message, too"):
        prompt([{**SYSTEM, "tools": [WEATHER]}, USER], tools=[WEATHER])
    with pytest.raises(ValueError, match="response_format stands in the system message, too"):
        prompt([{**SYSTEM, "response_format": {}}, USER], response_format={"type": "text"})
    own = prompt([{**SYSTEM, "tools": [WEATHER]}, USER])
    assert own == prompt([SYSTEM, USER], tools=[{"type": "function", "function": WEATHER}])


def test_half_of_a_character_is_refused(deepseek):
    with pytest.raises(ValueError, match=r"text holds '\\ud800', which is half of a character"):
        prompt([{**USER, "content": "a\ud800b"}]).ids(deepseek)
