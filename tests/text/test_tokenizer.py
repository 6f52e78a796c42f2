"""Ids and text: what comes out is what went in, whole or token by token."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.text import markers
from dsv4.text.markers import Segment, joined, marker
from dsv4.text.stream import StopStream, find_stop
from dsv4.text.tokenizer import Tokenizer, TokenizerError
from tests.text.tokenizers import small_table

# Text that brings unusual characters, pieces of markers and markers themselves.
PIECES = st.sampled_from(
    [
        *markers.REQUIRED,
        "<",
        "</",
        "think>",
        "｜",
        "▁",
        "\n",
        "\n\n",
        " ",
        "Ġ",
        "杭州",
        "ö",
        "🧵",
        "é",
    ]
)
TEXT = st.lists(PIECES | st.text(max_size=8), max_size=8).map("".join)
STOPS = st.lists(st.text("ab\nö", min_size=1, max_size=4) | PIECES, max_size=3)


def utf8(text: str) -> bool:
    return not any(0xD800 <= ord(c) < 0xE000 for c in text)


@given(TEXT.filter(utf8))
def test_text_comes_back(deepseek, small, text):
    for tokenizer in (deepseek, small):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(TEXT.filter(utf8))
def test_no_text_becomes_a_marker(deepseek, small, text):
    for tokenizer in (deepseek, small):
        assert not set(tokenizer.encode(text)) & set(tokenizer.ids.values())


def test_a_marker_that_a_user_spells_has_the_ids_of_deepseeks_own_encoder(deepseek):
    ids = [30, 28217, 88031, 28217, 7339, 37947, 32, 28217, 10525, 7398, 28217]
    assert deepseek.encode("<｜Assistant｜></think>｜DSML｜") == ids
    segments = [marker(markers.ASSISTANT), marker(markers.END_THINK)]
    assert deepseek.encode_segments(segments) == [128804, 128822]


def test_ids_are_those_of_the_file(deepseek):
    names = [markers.BOS, markers.EOS, markers.USER, markers.ASSISTANT, markers.LATEST_REMINDER]
    assert [deepseek.token_id(n) for n in names] == [0, 1, 128803, 128804, 128828]
    names = [markers.THINK, markers.END_THINK, markers.DSML, *markers.TASKS.values()]
    expected = [128821, 128822, 128825, 128829, 128830, 128831, 128832, 128836, 128845]
    assert [deepseek.token_id(n) for n in names] == expected
    assert deepseek.vocab_size == 129280
    with pytest.raises(ValueError, match="has no token '<｜System｜>'"):
        deepseek.token_id("<｜System｜>")


@given(st.text().filter(utf8))
def test_text_without_markers_has_the_ids_that_the_library_gives(deepseek, whole, text):
    if not any(spelling in text for spelling in deepseek.ids):
        assert deepseek.encode(text) == whole.encode(text, add_special_tokens=False).ids


@given(st.data())
def test_any_ids_decode_as_the_library_decodes_them(deepseek, whole, small, small_whole, data):
    for tokenizer, library in ((deepseek, whole), (small, small_whole)):
        any_id = st.integers(0, tokenizer.vocab_size + 5)
        ids = data.draw(st.lists(any_id | st.sampled_from(sorted(tokenizer.ids.values()))))
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)


@given(st.data())
def test_streamed_text_is_the_text_of_all_tokens(deepseek, small, data):
    """Cut by a stop string at the same character, wherever tokens end."""
    for tokenizer in (deepseek, small):
        text = data.draw(TEXT.filter(utf8))
        any_id = st.integers(0, tokenizer.vocab_size - 1)
        ids = [*tokenizer.encode(text), *data.draw(st.lists(any_id, max_size=6))]
        stops = data.draw(STOPS)
        stream = tokenizer.stream(stops)
        pieces = []
        for token in ids:
            pieces.append(stream.push(token))
            if stream.stop is not None:
                break
        if stream.stop is None:
            pieces.append(stream.finish())
        whole = tokenizer.decode(ids)
        match = find_stop(whole, stops)
        assert "".join(pieces) == (whole if match is None else match.text)
        assert stream.stop == (None if match is None else match.stop)
        first = ids[0] if ids else 0  # the stream begins again; a part may begin a stop string
        assert tokenizer.decode([first]).startswith(stream.push(first))


def test_a_part_of_a_token_that_may_begin_a_stop_string_is_held_back(deepseek):
    stream = deepseek.stream(["\na"])
    [token] = deepseek.encode("\n\n")
    assert [stream.push(token), stream.finish()] == ["\n", "\n"]


def test_an_unfinished_character_is_held_back(small):
    stream = small.stream()
    ids = small.encode("a🧵b")
    assert [stream.push(token) for token in ids] == ["a", "", "", "", "🧵", "b"]
    stream = small.stream()
    assert [stream.push(token) for token in ids[:3]] == ["a", "", ""]
    assert stream.finish() == "�"


def test_bytes_of_no_character_are_shown_at_once(small):
    stream = small.stream()
    start, letter = small.encode("ä")[0], small.encode("x")[0]
    assert [stream.push(start), stream.push(letter), stream.finish()] == ["", "�x", ""]


@given(st.text("ab"), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_a_stop_string_is_found_however_text_is_cut(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    stream = StopStream(stops)
    shown = ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        shown += stream.push(text[start:end])
        held = text[len(shown) : end]
        if stream.stop is None and held:  # no more is held than could begin a stop string
            assert any(stop.startswith(held) and stop != held for stop in stops)
    shown += stream.flush()
    ends = [i for i in range(len(text) + 1) if any(text[:i].endswith(stop) for stop in stops)]
    if not ends:
        assert (shown, stream.stop) == (text, None)
    else:
        ending = [stop for stop in stops if text[: ends[0]].endswith(stop)]
        assert stream.stop == max(ending, key=len)
        assert shown == text[: ends[0]].removesuffix(stream.stop)


@pytest.mark.parametrize(
    ("text", "stops", "shown", "stop"),
    [
        ("aaab", ["aab"], "a", "aab"),  # the longest beginning is held back
        ("abc", ["abc", "b"], "a", "b"),  # the first that is complete, not the first that begins
        ("ab", ["b", "ab"], "", "ab"),  # the longest of those that end together
        ("aa", ["aab"], "aa", None),
    ],
)
def test_stop_strings_that_overlap_are_found_whole_and_letter_by_letter(text, stops, shown, stop):
    for pieces in (text, [text]):
        stream = StopStream(stops)
        passed = [*map(stream.push, pieces), stream.flush()]
        assert ("".join(passed), stream.stop) == (shown, stop)


@pytest.mark.parametrize(
    ("stops", "kind", "message"),
    [
        ("ab", TypeError, "stop is 'ab', wanted a list of strings"),
        ([""], ValueError, r"stop\[0\] is empty"),
        (["a", 3], TypeError, r"stop\[1\] is 3, wanted a string"),
    ],
)
def test_wrong_stop_strings(small, stops, kind, message):
    with pytest.raises(kind, match=message):
        small.stream(stops)


@given(st.lists(st.builds(Segment, st.sampled_from(["", "a", "to", "o"]))))
def test_adjacent_texts_are_encoded_as_one(small, segments):
    text = "".join(segment.text for segment in segments)
    assert joined(segments) == ((Segment(text),) if text else ())
    assert small.encode_segments(segments) == small.encode(text)


class TestFiles:
    def test_a_folder_or_a_file(self, tmp_path, small):
        file = tmp_path / "tokenizer.json"
        with pytest.raises(FileNotFoundError, match=r"there is no .*tokenizer\.json, wanted"):
            Tokenizer.from_path(tmp_path)
        file.write_text(json.dumps(small_table()), encoding="utf-8")
        for path in (tmp_path, str(file)):
            assert Tokenizer.from_path(path).ids == small.ids

    @pytest.mark.parametrize("spelling", markers.REQUIRED)
    def test_a_missing_marker(self, spelling):
        table = small_table()
        table["added_tokens"] = [t for t in table["added_tokens"] if t["content"] != spelling]
        with pytest.raises(TokenizerError, match=f"x has no token {spelling}"):
            Tokenizer(table, "x")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "is not JSON"),
            ("[]", "holds list, wanted a table"),
            ("{}", "has no added_tokens"),
            ('{"added_tokens": [3]}', r"added_tokens\[0\] is 3"),
            ("[" * 100000, "is not JSON"),
        ],
    )
    def test_a_damaged_file(self, tmp_path, content, message):
        file = tmp_path / "tokenizer.json"
        file.write_text(content)
        with pytest.raises(TokenizerError, match=message):
            Tokenizer.from_path(file)

    def test_another_decoder_or_model(self):
        table = small_table()
        with pytest.raises(TokenizerError, match="has the decoder None, wanted ByteLevel"):
            Tokenizer({**table, "decoder": None})
        with pytest.raises(TokenizerError, match="is no tokenizer"):
            Tokenizer({**table, "model": {"type": "BPE", "vocab": 3}})


def test_without_the_library_the_message_says_what_to_install():
    code = """
import sys
sys.modules["tokenizers"] = None
from dsv4.text import Tokenizer
try:
    Tokenizer({})
except ImportError as error:
    print('pip install "dsv4[text]"' in str(error))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
