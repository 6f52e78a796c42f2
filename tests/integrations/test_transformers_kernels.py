"""After ``from_pretrained`` nothing is compiled: prompts and steps launch what was listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4
from dsv4 import debug
from dsv4.checkpoint import kernels_ahead, save
from dsv4.checkpoint.entries import Entry
from dsv4.compilation import pool
from dsv4.compilation.ahead import KernelsAhead
from dsv4.compilation.jobs import FindJob
from dsv4.compilation.recipe import Weight
from dsv4.compilation.target import Target
from dsv4.integrations import transformers as integration
from dsv4.integrations._recipe import SwappedRecipe
from dsv4.integrations._steps import SwappedShape, swapped_shapes
from dsv4.integrations._swap import PARTS
from tests.checkpoint.cases import make_model, saved
from tests.checkpoint.load_cases import CONFIG
from tests.serving.cases import packed

pytest.importorskip("transformers")
pytest.importorskip("triton")
MOST = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed")
    save(packed("transformers"), path, layout="nvidia")
    return path


def recipe_of(path: Path, parts: tuple[str, ...] = PARTS) -> SwappedRecipe:
    model = integration.from_pretrained(path, parts=parts, pack="fragments_16x64", progress=False)
    config = dsv4.ModelConfig.from_path(path, numerics="transformers")
    return SwappedRecipe.of(model, config, parts)


def kernels_of(process: Any, recipe: SwappedRecipe, *shapes: SwappedShape) -> dict[bytes, str]:
    """Names of the kernels of some steps, by key."""
    done = pool._ask(process, FindJob(recipe, Target("sm_90a"), MOST, shapes))
    assert not done.error, done.details
    return {key: request.name for key, request in done.result.requests.items()}


@pytest.mark.slow
def test_prompts_and_steps_launch_what_was_listed(folder: Path) -> None:
    """With transformers' own cache and with pages; of another length than the listed ones."""
    recipe = recipe_of(folder)
    listed = [shape for shape in recipe.shapes(MOST) if shape.rows == 1 and shape.tokens > 14]
    prompts = [SwappedShape(21), SwappedShape(21, context=300)]
    assert not {21} & {shape.tokens for shape in listed}
    process = pool.start()  # interprets no kernel
    try:
        warm = kernels_of(process, recipe, *listed)
        asked = kernels_of(process, recipe, *prompts)
    finally:
        pool._end(process)
    assert [name for key, name in asked.items() if key not in warm] == []
    assert len(asked) > 40
    assert {"_attend_kernel", "_slots_kernel", "_combine_kernel"} <= set(asked.values())


def test_shapes_hold_each_length_only_as_often_as_kernels_change() -> None:
    shapes = swapped_shapes(4096, 65536)
    assert len(shapes) == len(set(shapes)) < 350
    assert all(shape.tokens * shape.rows <= 4096 for shape in shapes)
    assert {1, 2, 16} == {shape.rows for shape in shapes}


@pytest.mark.parametrize("parts", [PARTS, ("attention", "norm"), ("experts",)])
def test_a_recipe_builds_the_modules_of_the_model(folder: Path, parts: tuple[str, ...]) -> None:
    model = integration.from_pretrained(folder, parts=parts, pack="fragments_16x64", progress=False)
    built = recipe_of(folder, parts).build("sm_90a")
    expected = {n: (type(m), _weight(m)) for n, m in model.named_modules()}
    assert {n: (type(m), _weight(m)) for n, m in built.named_modules()} == expected
    tensors = dict(model.named_parameters())
    assert {n: t.dtype for n, t in built.named_parameters()} == {
        n: t.dtype for n, t in tensors.items()
    }


@pytest.mark.parametrize("layout", ["nvidia", "deepseek", "transformers"])
@pytest.mark.parametrize(
    ("parts", "dtype"), [(PARTS, None), (PARTS, "float32"), (("experts",), None), (("norm",), None)]
)
def test_kernels_are_begun_before_weights_are_read(
    layout: str, parts: tuple[str, ...], dtype: str | None, tmp_path: Path, monkeypatch: Any
) -> None:
    """The list is the one that is looked for when the model is filled."""
    saved(make_model(CONFIG), tmp_path / "model", layout=layout)
    begun: list[Any] = []
    read = Entry.read
    monkeypatch.setattr(kernels_ahead, "impossible", lambda: None)
    monkeypatch.setattr(kernels_ahead.warmup, "target_of", lambda device: Target("sm_90a"))
    monkeypatch.setattr(KernelsAhead, "begin", lambda ahead, listing: begun.append(listing))
    monkeypatch.setattr(KernelsAhead, "wait", lambda ahead, progress: begun.append("wait"))
    monkeypatch.setattr(Entry, "read", lambda *args: (begun.append(""), read(*args))[1])
    options: dict[str, Any] = {"parts": parts, "dtype": dtype, "progress": False}
    model = integration.from_pretrained(tmp_path / "model", pack="fragments_16x64", **options)
    config = dsv4.ModelConfig.from_path(tmp_path / "model", numerics="transformers")
    listing, *others = begun
    assert listing.recipe == SwappedRecipe.of(model, config, parts)
    assert others[-1] == "wait"
    assert len(others) > 20, "values are read afterwards"
    begun.clear()
    integration.from_pretrained(tmp_path / "model", compile_kernels=False, **options)
    assert set(begun) == {""}


def _weight(module: torch.nn.Module) -> Any:
    return Weight.of(module) if hasattr(module, "to_format") else None  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
def test_a_loaded_model_compiles_nothing(folder: Path, paged: bool) -> None:
    model = integration.from_pretrained(folder, device="cuda", progress=False)
    before = debug.compilations()
    for rows, tokens in ((1, 21), (1, 130), (2, 33)):
        ids = torch.arange(rows * tokens, device="cuda").view(rows, tokens) % 128
        options: dict[str, Any] = {}
        if paged:
            options["past_key_values"] = integration.paged_cache(
                model, max_tokens=256, max_sequences=rows
            )
        new = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None, **options)
        assert new.shape == (rows, tokens + 9)
        assert debug.compilations() == before
