"""Tests of tools/words.py, which bans coined words."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies

FILE = Path(__file__).resolve()
ROOT = next(folder for folder in FILE.parents if (folder / "pyproject.toml").is_file())


def _tool():
    spec = importlib.util.spec_from_file_location("dsv4_words", ROOT / "tools" / "words.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


words = _tool()
BANNED = words.load()


def reported(source: str, file: str = "dsv4/device.py") -> list[str]:
    return [hit.word for hit in words.hits(BANNED, file, source)]


@pytest.mark.parametrize(
    "source",
    [
        "wanted = 1",
        "def f(given): ...",
        "def f(*, found=0): ...",
        "def kept(): ...",
        "class Found: ...",
        "for one in range(2): ...",
        "[each for each in ()]",
        "class A:\n    some: int",
        "self.found = 1",
        "try: ...\nexcept OSError as found: ...",
        "import os as kept",
        "with open('f') as given: ...",
        "_KEPT = 1",
        "def side(): return lambda wanted: 0",
        "if (found := 1): ...",
    ],
)
def test_names_that_say_nothing_are_caught_wherever_they_are_bound(source):
    assert len(reported(source)) == 1


@pytest.mark.parametrize(
    "name",
    [
        "beside_in_two",
        "told_of",
        "turned_bytes",
        "_load_turned",
        "rope_place",
        "is_settled",
        "RIVALS",
        "RivalTimes",
        "rows_in_turn",
        "_MULTIPROCESSORS",
        "joint_linear",
        "expert_place",
        "hand_over",
    ],
)
def test_parts_of_names_are_caught(name):
    assert reported(f"{name} = 1") == [name]


@pytest.mark.parametrize(
    "name",
    ["wanted_shape", "founder", "placement", "grace", "someone", "onehot", "displace", "intolds"],
)
def test_longer_words_are_not_names_of_the_list(name):
    assert reported(f"{name} = 1") == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Times of rivals.", "rivals"),
        ("Loads it anew.", "anew"),
        ("What lies in the level-2 cache.", "level-2 cache"),
        ("One block per multiprocessor.", "multiprocessor"),
        ("It is refused in words.", "refused in words"),
        ("The same as there.", "as there"),
        ("What a kernel is told of it.", "is told"),
        ("Pages of key-values.", "key-values"),
        ("The known traps.", "traps"),
        ("Grouped products of experts.", "grouped products"),
        ("After the kernel in front.", "kernel in front"),
        ("One tensor copy per stage.", "tensor copy"),
        ("Scores of so many rows.", "so many"),
        ("The rows that are its.", "that are its"),
    ],
)
@pytest.mark.parametrize(
    "shape",
    [
        '"""{}"""',
        'def f():\n    """Return.\n\n    {}\n    """',
        "x = 1  # {}",
        "raise ValueError('{}')",
        "raise ValueError(f'{{x}} {}')",
        "message = '{}'",
    ],
)
def test_phrases_are_caught_in_docstrings_comments_and_messages(text, word, shape):
    assert word in reported(shape.format(text))


def test_phrases_are_caught_across_the_lines_of_a_comment_and_a_docstring():
    assert reported("# It is refused\n# in words.") == ["refused in words"]
    (hit,) = words.hits(BANNED, "dsv4/a.py", '"""First line.\n\nIt is refused\nin words.\n"""')
    assert (hit.line, hit.word) == (3, "refused in words")


def test_names_of_tests_are_prose():
    assert reported("def test_every_rival_is_timed(): ...") == ["rival"]
    assert reported("def test_a_path_is_found_in_each_place(): ...") == []


def test_the_name_of_a_file_and_of_a_package_is_checked():
    assert reported("", "dsv4/bench/moe_rivals.py") == ["moe_rivals"]
    assert reported("", "dsv4/bench/rivals/__init__.py") == ["rivals"]


@pytest.mark.parametrize(
    "text",
    [
        "Adds each row to one of some tokens, in place.",
        "found 3, wanted 4",
        "Whatever was kept is given back.",
        "There is room for 3 rows; this takes the place of a page.",
        "The product of both scales, an inner product.",
        "NaN and infinity are told apart.",
        "The keys are scored in turn.",
        "Turned off by default.",
        "Caught by mistake.",
        "A list of key-value pairs.",
        "Each stands beside its scale.",
        "See ``rivals`` and ``run_rival``.",
        "As many as there are tokens.",
    ],
)
def test_ordinary_english_is_not_caught(text):
    assert reported(f'"""{text}"""\n# {text}\nraise ValueError("{text}")') == []


def test_a_ban_holds_in_its_folders_alone():
    assert reported("depth = 1", "dsv4/cute/gemm.py") == ["depth"]
    assert reported("depth = 1", "dsv4/config/json_file.py") == []


@given(strategies.integers(0, 20), strategies.sampled_from(["wanted = 1", "# rivals"]))
def test_lines_are_counted(blank, source):
    (hit,) = words.hits(BANNED, "dsv4/a.py", "\n" * blank + source)
    assert hit.line == blank + 1


def test_an_exemption_takes_one_word_of_one_file_and_needs_a_reason(tmp_path):
    file = tmp_path / "words.toml"
    text = '[[identifier]]\nwords = ["rivals"]\nmatch = "part"\nuse = "baselines"\n'
    text += '[[exemption]]\nfile = "a/*.py"\nword = "rivals"\nreason = "{}"\n'
    file.write_text(text.format("a public keyword"))
    banned = words.load(file)
    assert not words.hits(banned, "a/b.py", "rivals = 1")
    assert words.hits(banned, "a/b.py", "no_rivals = 1")
    assert words.hits(banned, "b/b.py", "rivals = 1")
    file.write_text(text.format(" "))
    with pytest.raises(ValueError, match="an exemption needs a reason"):
        words.load(file)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('[[identifier]]\nwords = ["a"]\nuse = "b"', "missing keys ['match']"),
        ('[[identifier]]\nwords = ["a"]\nuse = "b"\nmatch = "any"', "match is 'any'"),
        ('[[prose]]\nwords = ["a"]\nuse = "b"\nmatch = "part"', "unknown keys ['match']"),
    ],
)
def test_entries_that_cannot_be_meant_are_refused(entry, message, tmp_path):
    file = tmp_path / "words.toml"
    file.write_text(entry)
    with pytest.raises(ValueError, match=re.escape(message)):
        words.load(file)


def test_the_command_prints_hits_and_fails(tmp_path, capsys):
    (tmp_path / "pyproject.toml").touch()
    file = tmp_path / "dsv4" / "a.py"
    file.parent.mkdir()
    file.write_text("x = 1\nrivals = 2  # timed anew\n")
    assert words.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        'dsv4/a.py:2: identifier "rivals": write baseline, baselines',
        'dsv4/a.py:2: prose "anew": write again; of a compiler barrier, opaque',
    ]
    file.write_text("x = 1\n")
    assert words.main([str(file)]) == 0
    with pytest.raises(FileNotFoundError, match="does not exist"):
        words.main([str(tmp_path / "b")])
