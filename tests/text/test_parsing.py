"""Answers: what was rendered is read, streamed as unstreamed, and nothing incomplete is run."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dsv4.text import markers
from dsv4.text.answer_events import (
    CallArguments,
    CallEnd,
    CallIncomplete,
    CallStart,
    ContentText,
    ReasoningText,
)
from dsv4.text.markers import Segment, joined, marker
from dsv4.text.parsing import Answer, AnswerParser, parse_answer
from dsv4.text.tool_calls import ToolCall, calls_block
from tests.text.test_chat import ARGUMENTS, CONTENT, NAME, USER, call, prompt, result

D = markers.DSML
BLOCK = (
    f'\n\n<{D}tool_calls>\n<{D}invoke name="get_weather">\n'
    f'<{D}parameter name="city" string="true">杭州 "x"\n</{D}parameter>\n'
    f'<{D}parameter name="days" string="false">2</{D}parameter>\n</{D}invoke>\n'
    f'<{D}invoke name="f">\n\n</{D}invoke>\n</{D}tool_calls>'
)
CALLS = (
    ToolCall("get_weather", '{"city": "杭州 \\"x\\"\\n", "days": 2}'),
    ToolCall("f", "{}"),
)
SPELLED = (*markers.REQUIRED, markers.LATEST_REMINDER)


def ids_of(tokenizer, text):
    """Ids of an answer in which spellings of markers are markers."""
    segments, rest = [], text
    while rest:
        ends = [(rest.find(s), s) for s in SPELLED if s in rest]
        at, spelling = min(ends, default=(len(rest), ""))
        segments += [Segment(rest[:at]), *([marker(spelling)] if spelling else [])]
        rest = rest[at + len(spelling) :]
    return tokenizer.encode_segments(segments)


def streamed(tokenizer, ids, start):
    """All events of an answer that comes token by token, and the answer."""
    parser = AnswerParser(tokenizer, start)
    events = [event for token in ids for event in parser.push(token)]
    return [*events, *parser.finish()], parser.answer


def merged(events):
    """Events with texts of one kind joined."""
    result = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, CallArguments) and isinstance(last, CallArguments):
            assert event.index == last.index
            result[-1] = CallArguments(event.index, last.text + event.text)
        elif isinstance(event, ReasoningText | ContentText) and type(event) is type(last):
            result[-1] = type(event)(last.text + event.text)
        else:
            result.append(event)
    return result


@pytest.mark.parametrize(
    ("start", "text", "answer"),
    [
        ("reasoning", "\nt\n\n</think>\n\nHello \n", Answer("\nt\n\n", "\n\nHello \n")),
        ("reasoning", f"plan</think>ok\n\n{BLOCK}after", Answer("plan", "ok\n\n", CALLS)),
        ("reasoning", f"plan{BLOCK}", Answer("plan", "", CALLS)),
        ("reasoning", "only reasoning\n", Answer("only reasoning\n")),
        ("reasoning", "<think>a</think>b", Answer("a", "b")),
        ("content", "\n\nHi</think>x", Answer("", "\n\nHix")),
        ("content", f"a <{D}other>", Answer("", f"a <{D}other>")),
        ("content", f"\n\n<{D}tool_ca", Answer("", f"\n\n<{D}tool_ca")),
        ("content", f"a</{D}tool_calls>{D}", Answer("", f"a</{D}tool_calls>{D}")),
        ("content", BLOCK.replace("tool_calls", "toolcalls"), Answer("", "", CALLS)),
        ("content", BLOCK.replace("tool_calls", "tool"), Answer("", "", CALLS)),
        ("content", BLOCK.replace(f"<{D}tool_calls>\n", "", 1), Answer("", "", CALLS)),
        ("calls", BLOCK.split("tool_calls>\n", 1)[1], Answer("", "", CALLS)),
        ("content", f'<{D}invoke name="f"/>', Answer("", "", CALLS[1:])),
        (
            "content",
            f'<{D}invoke name="f">\n{{"a":[1]}}\n</{D}invoke>',
            Answer("", "", (ToolCall("f", '{"a": [1]}'),)),
        ),
        (
            "content",
            f'<{D}invoke name="f"><{D}parameter name="a">1e3</{D}parameter>'
            f'<{D}parameter name="b" string="false">x</{D}parameter>'
            f'<{D}parameter name="c" string="false">NaN</{D}parameter></{D}invoke>',
            Answer("", "", (ToolCall("f", '{"a": 1000.0, "b": "x", "c": "NaN"}'),)),
        ),
        (
            "content",
            f'<{D}invoke name="f"><{D}parameter name="a" string="true"></think><{D}b></{D}c>'
            f"</{D}parameter></{D}invoke>",
            Answer("", "", (ToolCall("f", f'{{"a": "</think><{D}b></{D}c>"}}'),)),
        ),
        ("content", f"a{markers.EOS}b", Answer("", "a")),
    ],
)
def test_answers(deepseek, start, text, answer):
    ids = ids_of(deepseek, text)
    assert parse_answer(deepseek, ids, start) == answer
    assert streamed(deepseek, ids, start)[1] == answer


@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        ('invoke name="get', "get", ""),
        ('invoke name="get"', "get", ""),
        ('invoke name="get">\n', "get", ""),
        (f'invoke name="f">\n<{D}parameter name="a" string="true">Pa', "f", '{"a": "Pa'),
        (f'invoke name="f">\n<{D}parameter name="a" string="false">12', "f", ""),
        (f'invoke name="f">\n<{D}parameter name="a" string="t', "f", ""),
        (f'invoke name="f">\n</{D}tool_calls>', "f", ""),
        (f'invoke name="f">\ntext\n</{D}invoke>', "f", ""),
        (f'invoke name="f">\n[1]\n</{D}invoke>', "f", ""),
        (f'invoke name="f" x>\n</{D}invoke>', "f", ""),
        (f'invoke name="">\n</{D}invoke>', "", ""),
        (f'invoke name="f<{D}invoke>', "f<", ""),
        (f'invoke name="f">\n<{D}parameter name="a" kind="b">1</{D}parameter>', "f", ""),
    ],
)
def test_calls_that_are_cut_off_or_malformed_are_incomplete(deepseek, body, name, arguments):
    ids = ids_of(deepseek, f"x{BLOCK[: -len(f'</{D}tool_calls>')]}<{D}{body}")
    for answer in (parse_answer(deepseek, ids), streamed(deepseek, ids, "content")[1]):
        assert answer == Answer("", "x", CALLS, (ToolCall(name, arguments),))
    events, _ = streamed(deepseek, ids, "content")
    assert events[-1] == CallIncomplete(2)


def test_a_call_after_a_malformed_one_is_read(deepseek):
    broken = f'<{D}invoke name="g">\nnothing\n</{D}invoke>\n<{D}invoke name="h">\n'
    text = BLOCK.replace(f'<{D}invoke name="f">', f'{broken}<{D}invoke name="f">')
    answer = parse_answer(deepseek, ids_of(deepseek, text))
    assert answer.calls == CALLS
    assert [call.name for call in answer.incomplete] == ["g", "h"]


def test_events_come_as_soon_as_they_are_certain(deepseek):
    parser = AnswerParser(deepseek, "reasoning")
    seen = []
    for token in ids_of(deepseek, f"plan</think>ok{BLOCK}"):
        seen += parser.push(token)
    expected = [
        ReasoningText("plan"),
        ContentText("ok"),
        CallStart(0, "get_weather"),
        CallArguments(0, CALLS[0].arguments),
        CallEnd(0),
        CallStart(1, "f"),
        CallArguments(1, "{}"),
        CallEnd(1),
    ]
    assert merged(seen) == expected  # before finish
    assert len(seen) > len(expected)
    assert parser.finish() == []


def test_strings_of_arguments_are_streamed(deepseek):
    parser = AnswerParser(deepseek, "calls")
    parser.extend(ids_of(deepseek, f'<{D}invoke name="f"><{D}parameter name="a" string="true">'))
    texts = []
    for token in deepseek.encode('one two "three" four'):
        texts += [event.text for event in parser.push(token)]
    assert len(texts) > 3
    assert "".join(texts) == 'one two \\"three\\" four'


MARKERS = st.sampled_from(SPELLED)
GRAMMAR = st.sampled_from(
    [
        f"<{D}tool_calls>",
        f"</{D}tool_calls>",
        f'<{D}invoke name="f">',
        f'<{D}invoke name="',
        f"</{D}invoke>",
        f'<{D}parameter name="a" string="true">',
        f'<{D}parameter name="b" string="false">',
        f'<{D}parameter name="',
        f"</{D}parameter>",
        '{"a": 1}',
        "\n",
        "\n\n",
        "<",
        "</",
        '"',
        ">",
        "x",
        "12",
        "杭",
    ]
)
WILD = st.lists(GRAMMAR | MARKERS | CONTENT, max_size=12).map("".join)


@given(WILD, st.sampled_from(["reasoning", "content", "calls"]), st.data())
@example(f'<{D}invoke name="f>', "content", None)
def test_streamed_is_unstreamed(deepseek, small, text, start, data):
    """Whatever is in the answer, and wherever its tokens end."""
    for tokenizer in (deepseek, small):
        ids = ids_of(tokenizer, text)
        if data is not None:
            any_id = st.integers(0, tokenizer.vocab_size - 1)
            ids += data.draw(st.lists(any_id, max_size=5))
        parser = AnswerParser(tokenizer, start)
        at_once = [*parser.extend(ids), *parser.finish()]
        events, answer = streamed(tokenizer, ids, start)
        assert merged(events) == merged(at_once)
        assert answer == parser.answer == parse_answer(tokenizer, ids, start)
        for complete in answer.calls:
            assert isinstance(json.loads(complete.arguments), dict)
        number = sum(isinstance(event, CallStart) for event in events)
        assert number == len(answer.calls) + len(answer.incomplete)


@given(WILD, st.sampled_from(["reasoning", "content", "calls"]), st.integers(0, 40))
def test_no_event_is_taken_back(deepseek, text, start, cut):
    """What an answer has when it breaks off is the beginning of what it has later."""
    ids = ids_of(deepseek, text)
    cut = min(cut, len(ids))
    parser = AnswerParser(deepseek, start)
    early = parser.extend(ids[:cut])
    late = early + parser.extend(ids[cut:]) + parser.finish()
    whole = AnswerParser(deepseek, start)
    assert merged(late) == merged([*whole.extend(ids), *whole.finish()])


@st.composite
def regular(draw):
    """An answer as the model has learnt to write it."""
    calls = [
        ToolCall(draw(NAME), json.dumps(draw(ARGUMENTS | st.just({})), ensure_ascii=False))
        for _ in range(draw(st.integers(0, 3)))
    ]
    return Answer(draw(CONTENT), draw(CONTENT), tuple(calls))


@given(regular(), st.booleans())
def test_an_answer_that_is_rendered_again_has_the_tokens_that_were_sampled(
    deepseek, answer, thinking
):
    """So that a cache of prompts that begin alike finds it."""
    if not thinking:
        answer = Answer("", answer.content, answer.calls)
    before = prompt([USER], thinking=thinking, drop_thinking=False)
    sampled = [Segment(answer.reasoning), marker(markers.END_THINK)] if thinking else []
    sampled += [Segment(answer.content), *calls_block(answer.calls), marker(markers.EOS)]
    ids = deepseek.encode_segments(joined(sampled))
    parsed = parse_answer(deepseek, ids, before.start)
    assert parsed == answer
    after = prompt([USER, parsed.message(), USER], thinking=thinking, drop_thinking=False)
    history = [*before.ids(deepseek), *ids]
    assert after.ids(deepseek)[: len(history)] == history


def recipe_answer(encoder, ids):
    """What DeepSeek's package reads in an answer in thinking mode."""
    recipe = encoder[0]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"model": "DeepSeek-V4-Pro", "messages": [USER], "tools": [tool], "stream": True}
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "id", "m")
    stream = recipe.StreamProcessor(generator, request.parsing_options, encoder[2])
    chunks = [
        chunk for token in ids for chunk in stream.push(recipe.InferenceChunk.tokens([token]))
    ]
    chunks += stream.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    deltas = [json.loads(chunk.to_json())["choices"][0]["delta"] for chunk in chunks]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls") or ()]
    names = [p["function"]["name"] for p in pieces if "name" in p["function"]]
    arguments = [
        "".join(p["function"]["arguments"] for p in pieces if p["index"] == i)
        for i in range(len(names))
    ]
    reasoning, content = (
        "".join(delta.get(key) or "" for delta in deltas)
        for key in ("reasoning_content", "content")
    )
    calls = [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]
    return reasoning, content, calls


@given(regular())
def test_answers_are_those_that_deepseeks_package_reads(deepseek, encoder, answer):
    """But for line breaks, which it trims, and not behind ``<``."""
    assume(not answer.content.endswith("<"))
    sampled = [Segment(answer.reasoning), marker(markers.END_THINK), Segment(answer.content)]
    ids = deepseek.encode_segments([*sampled, *calls_block(answer.calls)])
    reasoning, content, calls = recipe_answer(encoder, ids)
    parsed = parse_answer(deepseek, ids, "reasoning")
    assert reasoning == parsed.reasoning.strip("\n")
    trimmed = parsed.content.strip("\n") if calls else parsed.content.lstrip("\n")
    assert content == trimmed
    assert calls == [(call.name, call.values()) for call in parsed.calls]


def test_a_message_of_an_answer_goes_on_with_results(deepseek):
    message = parse_answer(deepseek, ids_of(deepseek, BLOCK)).message()
    assert [c["id"] for c in message["tool_calls"]] == ["call_0", "call_1"]
    rendered = prompt([USER, message, result("x", "call_1"), result("y", "call_0")])
    assert "<tool_result>y</tool_result>\n\n<tool_result>x</tool_result>" in rendered.text
    assert message["tool_calls"][1] == call("f", "{}", "call_1")


def test_wrong_start(deepseek):
    with pytest.raises(ValueError, match="start is 'end', wanted one of reasoning, content, calls"):
        AnswerParser(deepseek, "end")
