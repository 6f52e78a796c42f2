"""The README's code runs, as far as it needs no published checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dsv4
from dsv4.testing.models import random_model

ROOT = Path(dsv4.__file__).resolve().parent.parent
README = ROOT / "README.md"
pytestmark = pytest.mark.skipif(not README.exists(), reason="no README beside the package")


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.slow
def test_every_block_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The README's code runs with a small checkpoint in NVIDIA's layout."""
    model = random_model(
        dsv4.ModelConfig.tiny(vocab_size=8192, max_position_embeddings=8192), 1, mtp=True
    )
    dsv4.save(model, tmp_path / "checkpoint", layout="nvidia")
    names: dict[str, object] = {}
    for block in blocks():
        source = block.replace("DeepSeek-V4-Flash-NVFP4", str(tmp_path / "checkpoint"))
        source = source.replace(', device="cuda"', "")
        if "another_loaded_model" in source:
            names["another_loaded_model"] = _theirs()
        exec(source, names)
    assert tuple(names["y"].shape) == (2, 16, 64)  # type: ignore[attr-defined]
    assert "reference: supported" in capsys.readouterr().out


def _theirs() -> object:
    from dsv4.testing.models import transformers_twin

    return transformers_twin(random_model(dsv4.ModelConfig.tiny(numerics="transformers"), 1))


def test_every_subcommand_and_variable_it_names_exists() -> None:
    text = README.read_text()
    assert dsv4.dispatch.ENVIRONMENT_VARIABLE in text
    for name in ("README.md", "DESIGN.md", "CHANGELOG.md", "LICENSE"):
        assert (ROOT / name).exists()
    assert f"## [{dsv4.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
