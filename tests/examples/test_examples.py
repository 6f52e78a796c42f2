"""Every script of examples/ runs on a small checkpoint, which one of them writes."""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dsv4
from dsv4.checkpoint import Checkpoint, verify
from dsv4.text import Tokenizer, markers
from dsv4.text.effort import ORIGINAL
from tests.text.tokenizers import small_table

FOLDER = Path(dsv4.__file__).resolve().parent.parent / "examples"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no examples beside the package")
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
DAMAGED = "model.layers.1.self_attn.kv_norm"


def run_script(name: str, *arguments: object) -> None:
    """Run a script in this process, as ``python examples/NAME ARGUMENTS`` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(FOLDER / name), run_name="__main__")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What small_checkpoint.py writes, with a tokenizer of few tokens."""
    root = tmp_path_factory.mktemp("examples")
    tokenizer = root / "table.json"
    tokenizer.write_text(json.dumps(small_table()), encoding="utf-8")
    run_script("small_checkpoint.py", root / "small", "--tokenizer", tokenizer)
    return root / "small"


@pytest.fixture
def printed(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Run a script on the checkpoint; what it prints."""
    # The scripts take a GPU if there is one; what is compared here is the CPU's.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(name: str, *arguments: object, stdin: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        run_script(name, checkpoint, *arguments)
        return capsys.readouterr().out

    return run


def test_the_small_checkpoint_is_sound_and_has_nvfp4_experts(checkpoint: Path) -> None:
    assert verify(checkpoint, progress=False) > 0
    with Checkpoint.open(checkpoint) as opened:
        assert opened.entries["model.layers.0.mlp.experts.0.gate_proj.weight"].format == dsv4.NVFP4


def test_a_small_checkpoint_may_have_a_draft_layer(checkpoint: Path, tmp_path: Path) -> None:
    options = ("--tokenizer", checkpoint / "tokenizer.json", "--mtp")
    run_script("small_checkpoint.py", tmp_path / "drafts", *options)
    for folder, drafts in ((checkpoint, False), (tmp_path / "drafts", True)):
        with Checkpoint.open(folder) as opened:
            assert any(name.startswith("mtp.0.") for name in opened.entries) is drafts


def test_generate_text_prints_the_greedy_text(checkpoint: Path, printed: Callable) -> None:
    tokenizer = Tokenizer.from_path(checkpoint)
    ids = [tokenizer.token_id(markers.BOS), *tokenizer.encode("Hello")]
    (tokens,) = dsv4.load(checkpoint, progress=False).generate([ids], 12, stop_ids=[])
    text = tokenizer.decode(tokens)
    options = ("--prompt", "Hello", "--max-new-tokens", 12)
    assert printed("generate_text.py", *options).startswith("Hello" + text[:4])
    stopped = printed("generate_text.py", *options, "--stop", text[3:5])
    assert stopped.startswith("Hello" + text[: text.find(text[3:5])] + "\n[")
    assert "ended by stop" in stopped


def test_a_chat_has_as_many_answers_as_lines(checkpoint: Path, printed: Callable) -> None:
    text = printed("chat.py", "--max-new-tokens", 4, stdin="Hello\nAnd you?\n")
    assert len(re.findall(r"^\[4 tokens, ended by length\]$", text, re.MULTILINE)) == 2
    assert "(" not in text.splitlines()[0]
    folder = checkpoint / "encoding"
    folder.mkdir()
    table = f"REASONING_EFFORT_MAX = {ORIGINAL.texts['max']!r}"
    (folder / "encoding_dsv4.py").write_text(table, encoding="utf-8")
    assert printed("chat.py", "--max-new-tokens", 4, stdin="Hello\n").startswith("(")


def test_requests_are_served_and_one_is_cancelled(printed: Callable) -> None:
    lines = printed("serve_requests.py", "--max-new-tokens", 8).splitlines()
    reasons = [line.partition(": ")[0] for line in lines[-4:]]
    assert reasons[1] == "cancelled"
    assert {reasons[0], *reasons[2:]} <= {"length", "stop"}


def test_a_transformers_model_generates(printed: Callable) -> None:
    pytest.importorskip("transformers", reason="the extra hf")
    text = printed("transformers_model.py", "--prompt", "Hello", "--max-new-tokens", 3)
    assert "DeepseekV4Attention" in text
    assert f"{markers.BOS}Hello" in text


def test_a_checkpoint_is_converted(checkpoint: Path, tmp_path: Path, printed: Callable) -> None:
    target = tmp_path / "converted"
    text = printed("convert_checkpoint.py", target)
    assert f"{target}: by compressed-tensors" in text
    assert text.endswith("read, sound\n")


def test_an_operator_says_what_runs_it(printed: Callable) -> None:
    text = printed("call_operator.py")
    assert text.count("-> reference: supported") == 2
    static, dynamic = (float(error) for error in re.findall(r"off by (\S+)", text))
    assert 0 < static < 0.01 < dynamic < 0.3


def test_a_nan_is_found(printed: Callable) -> None:
    sound = printed("find_nan.py")
    assert sound.startswith("no NaN and no Inf")
    assert sound.endswith("all was finite\n")
    lines = printed("find_nan.py", "--damage", DAMAGED).splitlines()
    assert all(DAMAGED in line for line in (lines[0], lines[1], lines[-1]))


def test_every_script_is_short_tested_and_listed() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name in SCRIPTS:
        source = (FOLDER / name).read_text(encoding="utf-8")
        assert len(source.splitlines()) <= 64, name
        assert source.startswith('"""'), name
        assert f"python examples/{name} " in source, name
        assert f'"{name}"' in tests, name
        assert f"({name})" in readme, name
