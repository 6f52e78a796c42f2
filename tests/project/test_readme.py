"""Code in the README and the guides runs, as far as it needs no published checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import dsv4
from dsv4.testing.models import random_model, transformers_twin
from dsv4.text.effort import RELEASE_0731
from tests.text.tokenizers import small_table

ROOT = Path(dsv4.__file__).resolve().parent.parent
README = ROOT / "README.md"
GUIDES = ("quickstart", "checkpoints", "transformers", "vllm", "numerics", "debugging_nan",
          "benchmarking", "text", "speculation")  # fmt: skip
pytestmark = pytest.mark.skipif(not README.exists(), reason="no README beside the package")


def blocks(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small one in NVIDIA's layout, for documents that name the published one."""
    sizes = {"vocab_size": 8192, "max_position_embeddings": 8192}
    folder = tmp_path_factory.mktemp("readme") / "checkpoint"
    model = random_model(dsv4.ModelConfig.tiny(**sizes), 1, mtp=True)
    dsv4.save(model, folder, layout="nvidia")
    (folder / "tokenizer.json").write_text(json.dumps(small_table()), encoding="utf-8")
    (folder / "encoding").mkdir()
    table = f"REASONING_EFFORT_PROMPTS = {dict(RELEASE_0731.texts)!r}"
    (folder / "encoding" / "encoding_dsv4.py").write_text(table, encoding="utf-8")
    return folder


def run(document: Path, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Run the code of a document, one block after another; its names."""
    names: dict[str, Any] = {}
    for block in blocks(document):
        source = block.replace("DeepSeek-V4-Flash-NVFP4", str(checkpoint))
        source = source.replace(', device="cuda"', "").replace('"copy"', repr(str(folder / "copy")))
        if "another_loaded_model" in source:
            model = random_model(dsv4.ModelConfig.tiny(numerics="transformers"), 1)
            names["another_loaded_model"] = transformers_twin(model)
        exec(compile(source, str(document), "exec"), names)
    return names


@pytest.mark.slow
def test_every_block_of_the_readme_runs(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run(README, checkpoint, tmp_path)
    assert tuple(names["y"].shape) == (2, 16, 64)
    assert "reference: supported" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES)
def test_every_block_of_a_guide_runs(guide: str, checkpoint: Path, tmp_path: Path) -> None:
    document = ROOT / "docs" / f"{guide}.md"
    assert blocks(document)
    run(document, checkpoint, tmp_path)


def test_every_subcommand_and_variable_it_names_exists() -> None:
    text = README.read_text()
    assert dsv4.dispatch.ENVIRONMENT_VARIABLE in text
    for name in ("README.md", "docs/design.md", "CHANGELOG.md", "LICENSE"):
        assert (ROOT / name).exists()
    assert f"## [{dsv4.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_sizes_of_documents_stay_readable() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 100
    assert (ROOT / "docs" / "design.md").stat().st_size <= 20_000
    for page in (ROOT / "docs" / "kernels").glob("*.md"):
        assert 3_000 <= page.stat().st_size <= 5_120, page.name


def test_variables_of_the_vllm_guide_exist() -> None:
    from dsv4.integrations.vllm import switches

    text = (ROOT / "docs" / "vllm.md").read_text()
    source = Path(switches.__file__).read_text()
    assert {*re.findall(r"DSV4_VLLM\w*", text)} == {*re.findall(r"DSV4_VLLM\w*", source)}
    for part in switches.PARTS:
        assert f"`{part}`" in text
