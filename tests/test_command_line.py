"""``python -m dsv4``, and the wheel of kernels."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dsv4
from dsv4 import __main__ as command_line
from dsv4.compilation import bundle as _bundle
from dsv4.compilation import compiler, launch_recorder
from dsv4.compilation import warmup as _warmup
from dsv4.compilation.bundle import Compiled
from dsv4.compilation.versions import Versions
from dsv4.compilation.warmup import Warmup
from dsv4.parallel.context import Ranks
from tools import kernels_wheel

ARCH = "sm_90a"
IMAGES = [Compiled(bytes([i]) * 32, f"kernel {i}", b"code " * (i + 1)) for i in range(3)]


@pytest.fixture
def asked(monkeypatch):
    """Nothing is compiled; return the configurations that would be."""
    result = []

    def compile_model(config, arch, max_tokens, progress, workers, use_list, ranks):
        result.append((config, arch, max_tokens, workers, ranks))
        outcome = compiler.Outcome([], failed=dict(failed))
        monkeypatch.setattr(outcome, "images", lambda: IMAGES)
        return Warmup(3, 1, 2.0, 5, 4), outcome

    failed = {}
    monkeypatch.setattr(launch_recorder, "impossible", lambda: None)
    monkeypatch.setattr(_warmup, "compile_model", compile_model)
    result.append(failed)
    return result


@pytest.mark.parametrize("module", ["dsv4", "dsv4.bench"])
def test_a_command_does_not_pass_on_that_pytorch_misses_numpy(module, tmp_path):
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")")
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_versions_and_help_are_printed_by_the_module():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "dsv4", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stderr == ""
    assert re.fullmatch(
        r"dsv4 \S+ \(Triton \S+( installed)?, CuTeDSL \S+( installed)?; kernels [0-9a-f]{12}\)\n",
        done.stdout,
    )
    assert dsv4.__version__ in done.stdout


@pytest.mark.parametrize("line", [["dsv4.bench", "list"], ["dsv4", "--help"]])
def test_a_reader_that_ends_early_ends_a_command_without_words(line):
    """``python -m dsv4.bench list | head``."""
    reading, writing = os.pipe()
    os.close(reading)
    python = [sys.executable, "-m", *line]
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run(python, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr


def test_help(capsys):
    assert command_line.main([]) == 0
    assert "warmup" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        command_line.main(["warmup", "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for word in ("--arch", "--preset", "--config", "--out", "$DSV4_KERNELS", "examples:"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["warmup"], "--arch"),
        (["warmup", "--arch", "sm_75"], "invalid choice: 'sm_75'"),
        (["warmup", "--arch", ARCH, "--preset", "tiny"], "invalid choice: 'tiny'"),
        (["warmup", "--arch", ARCH, "--preset", "pro", "--config", "x"], "not allowed with"),
        (["warmup", "--arch", ARCH, "--workers", "0"], "is '0', wanted an integer above 0"),
        (["warm"], "invalid choice: 'warm'"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_both_models_with_both_activations_are_compiled(asked, tmp_path, capsys):
    out = tmp_path / "kernels.dsv4"
    assert command_line.main(["warmup", "--arch", ARCH, "--out", str(out), "--workers", "3"]) == 0
    assert asked[1:] == [
        (getattr(dsv4.ModelConfig, preset)(activation=activation), ARCH, 8192, 3, Ranks(1))
        for activation in ("bf16", "nvfp4")
        for preset in ("flash", "pro")
    ]
    bundle = _bundle.read(out, ARCH)
    assert {key: bundle.image(key) for key in bundle.entries} == {i.key: i.content for i in IMAGES}
    printed = capsys.readouterr().out
    assert "flash, bf16 activations: 3 CuTeDSL kernels, 1 of them compiled now; 5 Tri" in printed
    assert printed.splitlines()[-1].endswith("kernels.dsv4: 3 kernels, 0.0 MB")


@pytest.mark.parametrize(("more", "mode"), [([], "tp"), (["--parallel", "dp"], "dp")])
def test_the_kernels_of_one_of_several_ranks(asked, more, mode):
    arguments = ["warmup", "--arch", ARCH, "--preset", "flash", "--activation", "bf16", "--quiet"]
    assert command_line.main([*arguments, "--ranks", "4", *more]) == 0
    config = dsv4.ModelConfig.flash(activation="bf16")
    assert asked[1:] == [(config, ARCH, 8192, None, Ranks(4, mode))]


def test_a_mode_of_one_rank_is_refused(asked, capsys):
    arguments = ["warmup", "--arch", ARCH, "--preset", "flash", "--parallel", "dp"]
    assert command_line.main(arguments) == 2
    assert "--parallel is 'dp' and --ranks is 1, wanted 2 or more" in capsys.readouterr().err


def test_a_configuration_that_is_not_there_is_named(asked, tmp_path, capsys):
    arguments = ["warmup", "--arch", ARCH, "--config", str(tmp_path / "none")]
    assert command_line.main(arguments) == 2
    printed = capsys.readouterr().err
    assert "--config is" in printed
    assert "wanted a config.json or the folder of one" in printed


def test_a_configuration_file(asked, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    arguments = ["warmup", "--arch", ARCH, "--activation", "bf16", "--config", str(tmp_path)]
    assert command_line.main(arguments) == 2
    assert capsys.readouterr().err.startswith("python -m dsv4 warmup: ")


def test_a_failed_kernel_is_named_and_no_bundle_is_written(asked, tmp_path, capsys):
    asked[0]["kernel 7"] = "no such instruction"
    out = tmp_path / "kernels.dsv4"
    assert command_line.main(["warmup", "--arch", ARCH, "--quiet", "--out", str(out)]) == 1
    printed = capsys.readouterr()
    assert (printed.out, out.exists()) == ("", False)
    assert printed.err == "failed: kernel 7: no such instruction\n"


def test_a_missing_folder_is_found_before_anything_is_compiled(asked, tmp_path, capsys):
    arguments = ["warmup", "--arch", ARCH, "--out", str(tmp_path / "none" / "b")]
    assert command_line.main(arguments) == 2
    assert len(asked) == 1
    assert "is no folder" in capsys.readouterr().err


def test_where_kernels_are_interpreted_it_says_so(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert command_line.main(["warmup", "--arch", ARCH]) == 1
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


class TestWheel:
    def bundles(self, folder, archs=(ARCH, "sm_100a")):
        folder.mkdir(exist_ok=True)
        for arch in archs:
            path = folder / f"{arch}.dsv4"
            _bundle.write(path, _bundle.encode(arch, IMAGES, Versions.current()))
            yield path

    def test_it_is_a_wheel_in_which_kernels_are_found(self, tmp_path, monkeypatch):
        wheel = kernels_wheel.make(tmp_path / "dist", list(self.bundles(tmp_path)))
        assert wheel.name == f"dsv4_kernels-{dsv4.__version__}-py3-none-any.whl"
        site = tmp_path / "site"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
            names = archive.namelist()
        record = (site / f"dsv4_kernels-{dsv4.__version__}.dist-info" / "RECORD").read_text()
        rows = {name: (digest, size) for name, digest, size in csv.reader(io.StringIO(record))}
        assert set(rows) == set(names)
        for name, (digest, size) in rows.items():
            content = (site / name).read_bytes()
            if not name.endswith("RECORD"):
                expected = hashlib.sha256(content).digest()
                assert kernels_wheel._line(name, content) == f"{name},{digest},{size}\n"
                assert len(expected) == 32
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delenv(_bundle.VARIABLE, raising=False)
        _bundle.active.cache_clear()
        try:
            for arch in (ARCH, "sm_100a"):
                assert _bundle.image(arch, IMAGES[1].key) == IMAGES[1].content
            assert _bundle.image("sm_103a", IMAGES[1].key) is None
        finally:
            _bundle.active.cache_clear()

    def test_equal_bundles_give_equal_bytes(self, tmp_path):
        paths = list(self.bundles(tmp_path))
        first, second = (kernels_wheel.make(tmp_path / name, paths) for name in "ab")
        assert first.read_bytes() == second.read_bytes()

    def test_two_bundles_of_one_architecture(self, tmp_path):
        (path,) = self.bundles(tmp_path, (ARCH,))
        other = tmp_path / "other.dsv4"
        other.write_bytes(path.read_bytes())
        with pytest.raises(ValueError, match="wanted one for each architecture"):
            kernels_wheel.make(tmp_path, [path, other])
        with pytest.raises(ValueError, match="there is no bundle"):
            kernels_wheel.make(tmp_path, [])

    def test_pip_installs_it(self, tmp_path):
        wheel = kernels_wheel.make(tmp_path / "dist", list(self.bundles(tmp_path, (ARCH,))))
        options = ["--no-deps", "--no-index", "--quiet", "--target", str(tmp_path / "site")]
        command = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
        subprocess.run(command, check=True, capture_output=True)
        assert (tmp_path / "site" / "dsv4_kernels" / f"{ARCH}.dsv4").is_file()
