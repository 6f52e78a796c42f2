"""Text streams over a runner: a real one with a small model, and one whose tokens are chosen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.config import ModelConfig
from dsv4.serving import Request, RequestError, Runner, SamplingOptions
from dsv4.serving.request import Emitted
from dsv4.testing.models import random_model
from dsv4.text import markers
from dsv4.text.answer_events import CallEnd, CallStart, ContentText, ReasoningText
from dsv4.text.effort import RELEASE_0731
from dsv4.text.generate import TextGenerator, Usage
from dsv4.text.parsing import Answer
from dsv4.text.stream import find_stop
from tests.text.test_chat import CONTENT, USER, WEATHER
from tests.text.test_parsing import BLOCK, CALLS, ids_of
from tests.text.test_tokenizer import STOPS


class Scripted:
    """A runner whose requests get the tokens that a test chose."""

    def __init__(self, vocab_size: int, *scripts: list[int]) -> None:
        self.model = SimpleNamespace(config=SimpleNamespace(vocab_size=vocab_size))
        self.scripts = [iter(script) for script in scripts]
        self.requests: list[Request] = []
        self.steps = 0

    def add(self, prompt, options):
        stops = frozenset(options.stop_ids)
        number = len(self.requests)
        self.requests.append(Request(number, tuple(prompt), options, 0, stops, self.step))
        return self.requests[-1]

    def cancel(self, request):
        request.cancel()

    def step(self):
        self.steps += 1
        for request, script in zip(self.requests, self.scripts, strict=True):
            if not request.done:
                token = next(script, None)
                if token is None:
                    request.fail("the script has ended")
                else:
                    request.emit(Emitted(token))
        return not all(request.done for request in self.requests)


def scripted(tokenizer, *texts, eos=True):
    scripts = [ids_of(tokenizer, text + (markers.EOS if eos else "")) for text in texts]
    runner = Scripted(tokenizer.vocab_size, *scripts)
    return TextGenerator(runner, tokenizer, efforts=RELEASE_0731)


class TestComplete:
    @given(text=CONTENT.filter(lambda text: markers.EOS not in text), stops=STOPS)
    def test_the_pieces_are_the_text_up_to_the_first_stop_string(self, small, text, stops):
        generator = scripted(small, text)
        request = generator.complete("Hi", stop=stops, max_new_tokens=1000)
        pieces = list(request)
        match = find_stop(small.decode(ids_of(small, text)), stops)
        assert "".join(pieces) == request.text == (text if match is None else match.text)
        assert request.stop == (None if match is None else match.stop)
        assert request.finish_reason == "stop"
        assert all(pieces)
        assert request.request.done
        tokens = ids_of(small, text + markers.EOS)
        read = request.usage.completion_tokens
        assert request.usage == Usage(3, read)
        assert request.request.prompt == (small.ids[markers.BOS], *small.encode("Hi"))
        if match is None:
            assert read == len(tokens)
        else:  # not one token more than it takes
            assert find_stop(small.decode(tokens[: read - 1]), stops) is None

    def test_a_request_that_ends_by_its_length(self, small):
        request = scripted(small, "abcéd").complete("", max_new_tokens=4)
        assert list(request) == ["a", "b", "c", "�"]
        assert request.finish_reason == "length"
        assert request.usage == Usage(1, 4)

    def test_a_stop_string_in_the_last_token_is_a_stop(self, small):
        request = scripted(small, "abc").complete("", max_new_tokens=3, stop=["bc"])
        assert (request.result(), request.finish_reason, request.stop) == ("a", "stop", "bc")

    def test_held_text_is_shown_at_the_end(self, small):
        request = scripted(small, "ab").complete("", max_new_tokens=9, stop=["bcd"])
        assert list(request) == ["a", "b"]

    def test_another_stop_token_is_not_shown(self, small):
        options = SamplingOptions(stop_ids=small.encode("c"), max_new_tokens=9)
        request = scripted(small, "abcd").complete("", options=options)
        assert (request.result(), request.finish_reason) == ("ab", "stop")

    def test_a_request_that_fails(self, small):
        request = scripted(small, "ab", eos=False).complete("")
        with pytest.raises(RequestError, match="the script has ended"):
            request.result()
        assert (request.text, request.finish_reason) == ("ab", "error")
        assert request.error is not None

    def test_a_cancelled_request(self, small):
        request = scripted(small, "abc").complete("")
        assert next(iter(request)) == "a"
        request.cancel()
        assert (request.result(), request.finish_reason) == ("a", "cancelled")
        assert request.error is None

    def test_many_at_once_each_end_at_their_own_stop_string(self, small):
        generator = scripted(small, "abcdef", "xyzxyz", "ab")
        first = generator.complete("", stop=["cd"])
        second = generator.complete("", stop=["zx"])
        third = generator.complete("")
        assert list(first) == ["a", "b"]
        assert second.finish_reason == "stop"  # read while the first ran
        assert second.text == "xy"
        assert generator.runner.steps == 4
        assert third.result() == "ab"


class TestChat:
    def test_reasoning_content_and_calls(self, deepseek):
        generator = scripted(deepseek, f"plan</think>ok{BLOCK}")
        request = generator.chat([USER], tools=[WEATHER], max_new_tokens=1000)
        events = list(request)
        assert request.answer == Answer("plan", "ok", CALLS)
        assert request.finish_reason == "tool_calls"
        kinds = [type(event) for event in events]
        assert kinds[:2] == [ReasoningText, ContentText]
        assert events[-1] == CallEnd(1)
        assert CallStart(0, "get_weather") in events
        assert request.usage.reasoning_tokens == 2  # one word and the end of reasoning
        sampled = ids_of(deepseek, f"plan</think>ok{BLOCK}{markers.EOS}")
        assert request.usage.completion_tokens == len(sampled)

    def test_stop_strings_end_the_content_alone(self, deepseek):
        request = scripted(deepseek, "a END b</think>c END d").chat([USER], stop=["END"])
        assert request.result() == Answer("a END b", "c ")
        assert (request.finish_reason, request.stop) == ("stop", "END")
        text = BLOCK.replace("杭州", "END")
        request = scripted(deepseek, f"a</think>E{text}").chat([USER], stop=["END"])
        assert request.result().content == "E"  # held back, then no stop string
        assert len(request.answer.calls) == 2

    def test_an_answer_that_is_cut_off_in_a_call(self, deepseek):
        tokens = ids_of(deepseek, f"p</think>{BLOCK}")
        request = scripted(deepseek, f"p</think>{BLOCK}").chat(
            [USER], tools=[WEATHER], max_new_tokens=len(tokens) - 12
        )
        answer = request.result()
        assert request.finish_reason == "length"
        assert (answer.calls, len(answer.incomplete)) == (CALLS[:1], 1)

    def test_chat_without_thinking_and_continued_answers(self, deepseek):
        request = scripted(deepseek, " there").chat([USER], thinking=False)
        assert request.result() == Answer("", " there")
        last = {"role": "assistant", "content": "", "reasoning": "so", "prefix": True}
        request = scripted(deepseek, " on</think>x").chat([USER, last])
        assert request.result() == Answer(" on", "x")
        assert request.usage.reasoning_tokens == 2

    def test_a_table_of_efforts_is_needed_to_think(self, deepseek):
        generator = TextGenerator(Scripted(deepseek.vocab_size), deepseek)
        with pytest.raises(ValueError, match="efforts is None"):
            generator.chat([USER])
        assert generator.runner.requests == []


def test_wrong_stop_strings_queue_no_request(small):
    generator = scripted(small, "a")
    with pytest.raises(TypeError, match="stop is 'END', wanted a list of strings"):
        generator.complete("", stop="END")
    assert generator.runner.requests == []


def test_a_tokenizer_of_another_model(small):
    with pytest.raises(ValueError, match="the tokenizer has 277 ids and the model 128"):
        TextGenerator(Scripted(128), small)


@pytest.fixture(scope="module")
def model():
    return random_model(ModelConfig.tiny(vocab_size=288), 5)


class TestRealRunner:
    """A small model on the CPU, whose tokens are random bytes."""

    @pytest.fixture
    def generator(self, model, small):
        with Runner(model, max_sequences=4, max_tokens=64) as runner:
            yield TextGenerator(runner, small, efforts=RELEASE_0731)

    def test_text_is_that_of_generate(self, generator, small, model):
        prompt = [small.ids[markers.BOS], *small.encode("Hello")]
        (tokens,) = model.generate([prompt], 12, stop_ids=[small.ids[markers.EOS]])
        request = generator.complete("Hello", max_new_tokens=12)
        assert "".join(request) == small.decode(t for t in tokens if t != small.ids[markers.EOS])
        assert request.usage == Usage(6, len(tokens))

    def test_a_stop_string_frees_the_runner(self, generator, small):
        whole = generator.complete("Hello", max_new_tokens=12).result()
        stop = whole[3:5]
        request = generator.complete("Hello", max_new_tokens=50, stop=[stop])
        other = generator.complete("Hello", max_new_tokens=12)
        assert request.result() == find_stop(whole, [stop]).text
        assert request.finish_reason == "stop"
        assert request.usage.completion_tokens <= 12
        assert request.request.finish_reason == "cancelled"
        assert other.result() == whole
        generator.run()
        assert not generator.runner.has_work

    @pytest.mark.costly(8)
    @given(st.integers(0, 20))
    def test_chats_of_random_tokens(self, generator, seed):
        request = generator.chat(
            [USER], effort="low", temperature=1.5, seed=seed, max_new_tokens=20
        )
        events = list(request)
        assert request.answer.reasoning == "".join(
            event.text for event in events if isinstance(event, ReasoningText)
        )
        assert request.finish_reason in ("stop", "length")


def test_public_names():
    import dsv4.text

    for name in dsv4.text.__all__:
        assert getattr(dsv4.text, name) is not None
    assert set(dsv4.text.__all__) == set(dsv4.text._LAZY)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dsv4.text.nothing
