"""Tokenizer files go with a checkpoint."""

from __future__ import annotations

import logging
import os

import pytest

from dsv4.checkpoint import Checkpoint, CheckpointError, companions, load, save, write
from tests.checkpoint.cases import SMALL, make_model

CONTENTS = {
    "tokenizer.json": b'{"model": "\xc3\xa4"}',
    "tokenizer_config.json": b"{}",
    "generation_config.json": b'{"temperature": 1.0}',
    "encoding/encoding_dsv4.py": b"REASONING_EFFORT_MAX = ''\n",
    "encoding/README.md": b"# encoding\r\n",
}


def put(folder, contents=CONTENTS):
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def files(folder):
    """All files but those of the checkpoint itself."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    own = ("config.json", "hf_quant_config.json", "model.safetensors")
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths if p.name not in own}


@pytest.fixture
def source(tmp_path):
    """A checkpoint with all companions, and files that are none."""
    folder = tmp_path / "source"
    save(make_model(), folder)
    put(folder)
    put(folder, {"README.md": b"x", "encoding/tests/a.json": b"{}", "other.json": b"{}"})
    return folder


def test_a_model_that_was_loaded_brings_them_along(source, tmp_path):
    model = load(source, progress=False)
    assert model.load_report.path == source
    save(model, tmp_path / "copy")
    assert files(tmp_path / "copy") == CONTENTS
    save(load(tmp_path / "copy", progress=False), tmp_path / "third", layout="bf16")
    assert files(tmp_path / "third") == CONTENTS


def test_a_stream_gets_them_by_name(source, tmp_path):
    with Checkpoint.open(source) as checkpoint:
        write(checkpoint.items(), tmp_path / "a", config=SMALL, layout="bf16")
        assert files(tmp_path / "a") == {}
        write(checkpoint.items(), tmp_path / "b", config=SMALL, companions=source)
        assert files(tmp_path / "b") == CONTENTS


def test_a_model_that_was_made_has_none(tmp_path):
    save(make_model(), tmp_path)
    assert files(tmp_path) == {}


def test_they_can_be_left_out(source, tmp_path):
    save(load(source, progress=False), tmp_path / "copy", companions=False)
    assert files(tmp_path / "copy") == {}


def test_a_save_over_the_source_leaves_them(source):
    model = load(source, progress=False)
    before = {name: os.stat(source / name).st_ino for name in CONTENTS}
    save(model, source, overwrite=True)
    assert {name: os.stat(source / name).st_ino for name in CONTENTS} == before


def test_another_tokenizer_is_replaced_only_if_asked_for(source, tmp_path):
    model, target = load(source, progress=False), tmp_path / "target"
    put(target, {"tokenizer.json": b"{}"})
    with pytest.raises(FileExistsError, match=r"tokenizer\.json is there with another content"):
        save(model, target)
    assert files(target) == {"tokenizer.json": b"{}"}
    assert not (target / "config.json").exists()
    save(model, target, overwrite=True)
    assert files(target) == CONTENTS


def test_the_same_files_may_be_there(source, tmp_path):
    put(tmp_path / "target")
    save(load(source, progress=False), tmp_path / "target")
    assert files(tmp_path / "target") == CONTENTS


@pytest.mark.parametrize("name", ["encoding", "tokenizer.json"])
def test_what_is_in_the_way_is_named_before_anything_is_written(source, tmp_path, name):
    target = tmp_path / "target"
    target.mkdir()
    if name == "encoding":
        (target / name).write_text("a file")
    else:
        (target / name).mkdir()
    with pytest.raises(FileExistsError, match=name):
        save(load(source, progress=False), target, overwrite=True)
    assert not (target / "config.json").exists()


def test_links_are_followed_where_files_are_read_and_not_where_they_are_written(source, tmp_path):
    (source / "tokenizer.json").rename(tmp_path / "blob")
    (source / "tokenizer.json").symlink_to(tmp_path / "blob")
    target, outside = tmp_path / "target", tmp_path / "outside"
    target.mkdir()
    outside.write_bytes(b"mine")
    (target / "tokenizer_config.json").symlink_to(outside)
    save(load(source, progress=False), target, overwrite=True)
    assert files(target) == CONTENTS
    assert outside.read_bytes() == b"mine"


def test_a_source_that_is_gone_is_said(source, tmp_path, caplog):
    model = load(source, progress=False)
    source.rename(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING, "dsv4.checkpoint"):
        save(model, tmp_path / "copy")
    assert "its tokenizer is not copied" in caplog.text
    assert files(tmp_path / "copy") == {}
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        save(model, tmp_path / "other", companions=source)
    with pytest.raises(TypeError, match="companions is True"):
        save(model, tmp_path / "other", companions=True)
    assert not (tmp_path / "other").exists()


def test_a_pipe_is_not_read(source, tmp_path):
    (source / "tokenizer.json").unlink()
    os.mkfifo(source / "tokenizer.json")
    with pytest.raises(CheckpointError, match="is a pipe, wanted a regular file"):
        save(load(source, progress=False), tmp_path / "copy")


def test_a_copy_that_fails_leaves_a_whole_checkpoint(source, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    model = load(source, progress=False)
    monkeypatch.setattr(companions.os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        save(model, tmp_path / "copy")
    assert files(tmp_path / "copy") == {}
    load(tmp_path / "copy", progress=False)
