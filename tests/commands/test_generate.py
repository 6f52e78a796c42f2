"""``python -m dsv4 generate`` on small checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4 import __main__ as command_line
from dsv4.checkpoint import load, save
from dsv4.commands import generate
from dsv4.config import ModelConfig
from dsv4.testing.models import random_model
from dsv4.text import Tokenizer, markers
from dsv4.text.effort import ORIGINAL
from tests.text.test_generate import scripted
from tests.text.tokenizers import small_table

PROMPT = ["--prompt", "Hello", "--max-new-tokens", "6"]
CHAT = ["--chat", "Hello", "--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with a tokenizer."""
    return written(tmp_path_factory.mktemp("checkpoint"), 0)


def written(path, mtp_layers):
    """A folder with a small checkpoint."""
    config = ModelConfig.tiny(vocab_size=288, num_nextn_predict_layers=mtp_layers)
    save(random_model(config, 5, mtp=True), path, layout="bf16")
    (path / "tokenizer.json").write_text(json.dumps(small_table()), encoding="utf-8")
    (path / "generation_config.json").write_text('{"temperature": 0.0}')
    (path / "encoding").mkdir()
    source = f"REASONING_EFFORT_MAX = {ORIGINAL.texts['max']!r}"
    (path / "encoding" / "encoding_dsv4.py").write_text(source)
    return path


def run(folder, *arguments):
    return command_line.main(["generate", str(folder), "--device", "cpu", *arguments])


def test_a_text_is_continued(folder, capsys):
    assert run(folder, *PROMPT) == 0
    printed = capsys.readouterr()
    tokenizer = Tokenizer.from_path(folder)
    ids = [tokenizer.ids[markers.BOS], *tokenizer.encode("Hello")]
    (tokens,) = load(folder, progress=False).generate([ids], 6, stop_ids=[])
    assert printed.out.removesuffix("\n") == tokenizer.decode(tokens).removesuffix("\n")
    assert printed.err == ""


def test_experts_in_host_memory_change_no_text(folder, capsys):
    assert run(folder, *PROMPT) == 0
    text = capsys.readouterr().out
    for value in ("auto", "1"):
        assert run(folder, *PROMPT, "--host-experts", value) == 0
        assert capsys.readouterr().out == text


def test_statistics_and_stop_strings(folder, capsys):
    assert run(folder, *PROMPT, "--stats") == 0
    whole = capsys.readouterr()
    assert "6 prompt tokens, 6 new ones, ended by length\n" in whole.err
    assert "tokens/s" in whole.err
    text = whole.out
    stop = text[2:4]
    assert run(folder, *PROMPT, "--stop", "none", "--stop", stop, "--stats") == 0
    printed = capsys.readouterr()
    assert printed.out.rstrip("\n") == text[: text.find(stop)].rstrip("\n")
    assert "ended by stop" in printed.err


def test_drafts_change_no_greedy_text(tmp_path, capsys):
    folder, texts = written(tmp_path, 1), set()
    for options, words in (
        (["--speculate", "none"], "no drafts: none are asked for"),
        ([], "2 mtp drafts a step: "),
        (["--speculate", "mtp", "--draft-tokens", "3"], "3 mtp drafts a step: "),
    ):
        assert run(folder, *PROMPT, *options, "--stats") == 0
        printed = capsys.readouterr()
        texts.add(printed.out)
        assert words in printed.err
    assert len(texts) == 1


def test_seeds_repeat(folder, capsys):
    texts = []
    for seed in (1, 1, 2):
        options = ["--temperature", "2", "--top-p", "0.9", "--seed", str(seed)]
        assert run(folder, *PROMPT, *options) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("options", [["--effort", "max"], ["--no-thinking"], ["--system", "Be"]])
def test_chats_run(folder, options, capsys):
    assert run(folder, *CHAT, *options, "--stats") == 0
    reasons = options != ["--no-thinking"]
    assert ("of reasoning" in capsys.readouterr().err) == reasons


def test_conversations_of_files(folder, tmp_path, capsys):
    messages = [{"role": "user", "content": "Hello"}]
    tool = {"name": "f", "description": "", "parameters": {"type": "object"}}
    file = tmp_path / "chat.json"
    for values in (messages, {"messages": messages, "tools": [tool]}):
        file.write_text(json.dumps(values))
        assert run(folder, "--chat", str(file), "--max-new-tokens", "2", "--stats") == 0
        assert "prompt tokens, 2 new ones" in capsys.readouterr().err


def test_content_and_calls_go_to_stdout_and_reasoning_to_stderr(folder, capsys):
    small = Tokenizer(small_table())
    d = markers.DSML
    call = f'<{d}invoke name="f"><{d}parameter name="a" string="false">1</{d}parameter>'
    text = f"plan</think>answer\n\n<{d}tool_calls>{call}</{d}invoke><{d}invoke name='g"
    text = text.replace("'", '"')
    arguments = ["generate", str(folder), *CHAT, "--stop", "END"]
    task = generate._task(command_line._parser().parse_args(arguments))
    options = task.options.__class__(max_new_tokens=1000)
    task = task.__class__(small, task.efforts, options, None, task.chat)
    request, _ = generate._stream(scripted(small, text), task, ["END"])
    printed = capsys.readouterr()
    assert printed.out == 'answer\n{"name": "f", "arguments": {"a": 1}}\n'
    assert printed.err == "plan\na call of 'g' is not complete\n"
    assert request.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PROMPT, "--effort", "high"], "--effort is for --chat, and --prompt is given"),
        ([*PROMPT, "--no-thinking"], "--thinking is for --chat"),
        ([*PROMPT, "--temperature", "-1"], "temperature is -1.0, wanted 0 or more"),
        ([*PROMPT, "--top-p", "2"], "top_p is 2.0"),
        ([*PROMPT, "--seed", "-1"], "seed is -1"),
        ([*PROMPT, "--max-new-tokens", "0"], "max_new_tokens is 0, wanted 1 or more"),
        ([*PROMPT, "--stop", ""], "stop[0] is empty"),
        ([*PROMPT, "--speculate", "mtp"], "'mtp', but the model holds no draft layers; wanted"),
        ([*PROMPT, "--speculate", "none", "--draft-tokens", "2"], "--speculate none, wanted a"),
        ([*PROMPT, "--device", "tpu"], "--device is 'tpu', wanted cuda, cuda:N or cpu"),
        ([*PROMPT, "--max-new-tokens", "99999999"], "--max-new-tokens is 99999999 and the prompt"),
        ([*PROMPT, "--parallel", "dp"], "--parallel is 'dp' in one process, wanted several"),
        ([*PROMPT, "--parallel", "tp"], "--parallel is 'tp' in one process, wanted several"),
        ([*CHAT, "--no-thinking", "--effort-table", "0731"], "--effort-table is given and --no-th"),
        ([*CHAT, "--effort", "low"], "effort is 'low', wanted one of high, max"),
        ([*CHAT, "--no-thinking", "--effort", "max"], "thinking is off"),
        (["--chat", "none.json"], "there is no file 'none.json'"),
        (["--chat", "none.json", "--system", "x"], "--system is for --chat TEXT"),
    ],
)
def test_bad_input_is_one_sentence(folder, arguments, message, capsys):
    assert run(folder, *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("python -m dsv4 generate: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("3", "holds int, wanted a list of messages"),
        ('{"messages": [], "model": "x"}', "holds model, wanted a list of messages"),
        ("[]", "messages is empty"),
        ('[{"role": "user", "content": 3}]', "content is int"),
    ],
)
def test_bad_conversations(folder, tmp_path, content, message, capsys):
    file = tmp_path / "chat.json"
    file.write_text(content)
    assert run(folder, "--chat", str(file)) == 2
    assert message in capsys.readouterr().err


def test_bad_checkpoints(folder, tmp_path, capsys):
    assert run(tmp_path / "none", *PROMPT) == 2
    assert "wanted the folder of a checkpoint" in capsys.readouterr().err
    assert run(tmp_path, *PROMPT) == 2
    assert "tokenizer.json, wanted the tokenizer of the checkpoint" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    assert run(tmp_path, *PROMPT) == 2
    assert "config.json is missing" in capsys.readouterr().err
    assert run(tmp_path, *CHAT) == 2
    assert "wanted --effort-table or --no-thinking" in capsys.readouterr().err
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    assert run(tmp_path, *PROMPT) == 2
    assert "generation_config.json: temperature is -1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["x"],
        ["x", "--prompt", "a", "--chat", "b"],
        ["x", "--prompt", "a", "--host-experts", "-1"],
    ],
)
def test_wrong_usage(arguments):
    with pytest.raises(SystemExit) as ended:
        command_line.main(["generate", *arguments])
    assert ended.value.code == 2


def test_the_command_writes_utf8_and_ends_with_its_reader(folder):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "LC_ALL": "C"}
    command = [sys.executable, "-m", "dsv4", "generate", str(folder), "--device", "cpu"]
    done = subprocess.run(
        f"{' '.join(command)} --prompt Hello --max-new-tokens 6 | true",
        shell=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")
