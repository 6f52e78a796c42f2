"""``convert`` writes what ``save`` of the loaded model writes, and notices what differs."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from dsv4 import __main__ as command_line
from dsv4.checkpoint import CheckpointError, convert, load, save, verify
from dsv4.checkpoint import converting as module
from tests.checkpoint.cases import LAYOUTS, calibrated, edit, make_model, raw, saved


def tensors(folder):
    return load_file(folder / "model.safetensors")


def assert_same_files(folder, other):
    left, right = tensors(folder), tensors(other)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(raw(left[name]), raw(right[name])), name
    assert (folder / "config.json").read_text() == (other / "config.json").read_text()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_any_layout_becomes_what_saving_the_loaded_model_makes_of_it(source, layout, tmp_path):
    """Or both raise: a layout that cannot hold the values says so."""
    origin = saved(make_model(), tmp_path / "origin", layout=source)
    model = load(origin, mxfp4="keep", progress=False)
    try:
        save(model, tmp_path / "saved", layout=layout)
    except ValueError:
        with pytest.raises(ValueError, match=layout):
            convert(origin, tmp_path / "converted", layout=layout, progress=False)
        assert not (tmp_path / "converted" / "config.json").exists()
        return
    nbytes = convert(origin, tmp_path / "converted", layout=layout, progress=False)
    assert_same_files(tmp_path / "converted", tmp_path / "saved")
    assert nbytes == sum(t.nbytes for t in tensors(tmp_path / "converted").values())
    verify(tmp_path / "converted", progress=False)


def test_input_scales_and_companions_come_along(tmp_path):
    origin = calibrated(tmp_path / "origin")
    (origin / "tokenizer.json").write_text("{}")
    convert(origin, tmp_path / "there", layout="transformers", progress=False)
    assert any(name.endswith("input_scale") for name in tensors(tmp_path / "there"))
    convert(origin, tmp_path / "back", layout="nvidia", progress=False)
    assert_same_files(tmp_path / "back", origin)
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"


def test_mxfp4_that_was_converted_becomes_mxfp4_again(tmp_path):
    model = make_model()
    origin = saved(model, tmp_path / "origin", layout="deepseek")
    try:
        convert(origin, tmp_path / "there", layout="nvidia", progress=False)
    except ValueError:
        pytest.skip("these random weights have no exact NVFP4")
    convert(tmp_path / "there", tmp_path / "back", layout="deepseek", progress=False)
    assert_same_files(tmp_path / "back", origin)


def test_a_file_that_changes_after_writing_is_noticed(tmp_path, monkeypatch):
    origin, target = saved(make_model(), tmp_path / "origin"), tmp_path / "target"

    def save_and_damage(*args, **options):
        save(*args, **options)

        def change(stored):
            stored["norm.weight"][0] += 1

        edit(target, change)

    monkeypatch.setattr(module, "save", save_and_damage)
    with pytest.raises(CheckpointError, match=r"norm\.weight differs from what was written"):
        convert(origin, target, progress=False)


def test_an_interruption_leaves_the_target_as_it_was(tmp_path, monkeypatch):
    origin = saved(make_model(), tmp_path / "origin")
    target = saved(make_model(seed=1), tmp_path / "target")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    advance, calls = module.Progress.advance, []

    def interrupted(self, count):
        calls.append(count)
        if len(calls) == 9:
            raise KeyboardInterrupt
        advance(self, count)

    monkeypatch.setattr(module.Progress, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(origin, target, overwrite=True, progress=False)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_a_pattern_of_plain_weights_that_matches_nothing_is_refused(tmp_path):
    origin, target = saved(make_model(), tmp_path / "origin"), tmp_path / "target"
    patterns = ("mtp.*", "*.shared_expert.*")  # it is shared_experts
    message = r"plain has '\*\.shared_expert\.\*', which no name matches"
    with pytest.raises(ValueError, match=message):
        save(make_model(), target, plain=patterns)
    with pytest.raises(ValueError, match=message):
        convert(origin, target, plain=patterns, progress=False)
    assert not (target / "config.json").exists()
    with pytest.raises(TypeError, match="plain is 'mtp', wanted a sequence of patterns"):
        save(make_model(), target, plain="mtp")


def test_the_command(tmp_path, capsys):
    origin = saved(make_model(), tmp_path / "origin")
    arguments = ["convert", str(origin), str(tmp_path / "target"), "--layout", "bf16"]
    assert command_line.main(arguments) == 0
    assert "of tensors in layout bf16, compared" in capsys.readouterr().out
    assert command_line.main(arguments) == 2
    assert "python -m dsv4 convert: " in capsys.readouterr().err
    assert command_line.main(["convert", str(origin), str(origin)]) == 2
    assert "wanted another folder than the source" in capsys.readouterr().err
    assert command_line.main(["convert", str(tmp_path / "none"), str(origin)]) == 2
