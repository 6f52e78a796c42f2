"""The caller's default dtype and device change no result."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.checkpoint import load, save
from dsv4.config import ModelConfig
from dsv4.layers import calibrate, pack_, quantize_, unpack_
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving.sampling import Sampler
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import random_model

PACKAGE = Path(__file__).resolve().parent.parent / "dsv4"
MAKERS = {"empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "eye", "linspace"}
# Parameters of a new model take the default dtype and device, as those of any torch module.
OF_THE_MODULE = {
    "layers/_module.py": 1,
    "layers/_pooling.py": 1,
    "layers/attention.py": 1,
    "layers/hyper_connection.py": 4,
    "layers/norm.py": 1,
    "layers/router.py": 2,
    "model/backbone.py": 1,
}

DEFAULTS: tuple[tuple[torch.dtype, str | None, str | None], ...] = (
    (torch.bfloat16, None, None),
    (torch.float64, None, None),
    (torch.float16, "meta", None),
    (torch.float32, None, "meta"),
)


@contextmanager
def defaults(dtype: torch.dtype, device: str | None, within: str | None) -> Iterator[None]:
    """Torch's default dtype and device, and the device of a ``with`` block."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        if device is not None:
            torch.set_default_device(device)
        if within is None:
            yield
        else:
            with torch.device(within):
                yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_bitwise(actual[name], value, name)


def config_of(numerics: str) -> ModelConfig:
    return ModelConfig.tiny(numerics=numerics)


def plain(model: DeepseekV4ForCausalLM) -> None:
    del model


def quantised(model: DeepseekV4ForCausalLM) -> None:
    quantize_(model, "nvfp4", ["*experts"])
    quantize_(model, "fp8_block", ["*q_b_proj"])
    quantize_(model, "mxfp4", ["*o_b_proj"])


def calibrated(model: DeepseekV4ForCausalLM) -> None:
    quantize_(model)
    with calibrate(model):
        model(torch.arange(12, device="cpu").unsqueeze(0))


def packed(model: DeepseekV4ForCausalLM) -> None:
    quantize_(model)
    pack_(model)
    unpack_(model)
    pack_(model)


WORK: tuple[Callable[[DeepseekV4ForCausalLM], None], ...] = (plain, quantised, calibrated, packed)


@torch.no_grad()
def results(work: Callable[[DeepseekV4ForCausalLM], None], numerics: str, seed: int, around: Any):
    """State, logits, cached logits and tokens of a model; all but its making within ``around``."""
    dtype = torch.bfloat16 if work is packed else torch.float32
    model = random_model(config_of(numerics), seed, dtype)
    ids = torch.arange(22).view(2, 11)
    generator = torch.Generator("cpu").manual_seed(seed)
    with around:
        work(model)
        sampler = Sampler(temperature=1.0, top_p=0.9, generator=generator)
        paged = model.new_cache(3, 64, 8, pool_tokens=768, index_format="index_mxfp4")
        rows = [paged.allocate(), paged.allocate()]
        logits = model.prefill([list(range(19)), [3]], paged, rows)
        tokens = model.generate([[1, 2, 3], [4]], 4, stop_ids=[], sampler=sampler, chunk=2)
        result = {
            "dense": model(ids),
            "prefill": logits,
            "decode": model.decode(logits.argmax(-1), paged, rows),
            "forked": model.decode(logits.argmax(-1)[:1], paged, [paged.fork(rows[0])]),
        }
    return {**result, **dict(model.state_dict())}, tokens


@cache
def untouched(work: Callable[[DeepseekV4ForCausalLM], None], numerics: str, seed: int):
    return results(work, numerics, seed, defaults(torch.float32, None, None))


@pytest.mark.slow
@pytest.mark.parametrize("work", WORK)
@given(
    seed=st.integers(0, 1),
    numerics=st.sampled_from(["deepseek", "transformers"]),
    chosen=st.sampled_from(DEFAULTS),
)
@settings(max_examples=4)
def test_a_model_gives_the_same_bits_under_other_defaults(work, seed, numerics, chosen) -> None:
    expected, tokens = untouched(work, numerics, seed)
    actual, others = results(work, numerics, seed, defaults(*chosen))
    assert_same(actual, expected)
    assert others == tokens


@pytest.mark.parametrize("chosen", DEFAULTS[:2])
def test_a_model_built_under_another_default_dtype_keeps_what_is_wide(chosen) -> None:
    """Weights follow the default dtype, as torch's do; what is float32 by definition does not."""
    config = config_of("deepseek")
    with defaults(*chosen):
        model = DeepseekV4ForCausalLM(config)
        built = {name: t.dtype for name, t in model.state_dict().items()}
    cast = DeepseekV4ForCausalLM(config).to(chosen[0])
    assert built == {name: t.dtype for name, t in cast.state_dict().items()}


@pytest.mark.parametrize("chosen", DEFAULTS[:2])
def test_formats_declared_under_another_default_dtype_hold_what_is_loaded(chosen) -> None:
    """Serving engines build models like this: declare, load, run."""
    model = random_model(config_of("deepseek"), 3)
    quantize_(model)
    ids = torch.arange(9).unsqueeze(0)
    with defaults(*chosen):
        built = DeepseekV4ForCausalLM(config_of("deepseek"), mtp=False).to(torch.float32)
        for name, module in model.named_modules():
            if getattr(module, "format", None) is not None:
                built.get_submodule(name).to_format(module.format)
        built.load_state_dict(model.state_dict())
        assert_same(dict(built.state_dict()), dict(model.state_dict()))
        with torch.no_grad():
            assert_bitwise(built(ids), model(ids))


@pytest.mark.parametrize("chosen", DEFAULTS)
@pytest.mark.parametrize("layout", ["transformers", "nvidia"])
def test_a_checkpoint_is_written_and_read_under_other_defaults(tmp_path, chosen, layout) -> None:
    model = random_model(config_of("deepseek"), 3)
    quantize_(model, "nvfp4", ["*experts"])
    save(model, tmp_path / "plain", layout=layout)
    with defaults(*chosen):
        save(model, tmp_path / "other", layout=layout)
        result = load(tmp_path / "other", mtp=False).state_dict()
    assert_same(dict(result), dict(load(tmp_path / "plain", mtp=False).state_dict()))


def makers(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that take the caller's defaults, because they name no dtype or no device."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in MAKERS:
            named = {keyword.arg for keyword in node.keywords}
            needed = {"device"} if node.func.attr == "arange" else {"device", "dtype"}
            if not needed <= named:
                yield node


def test_every_tensor_names_its_dtype_and_device() -> None:
    result: dict[str, int] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        if not name.startswith(("bench/", "testing/")):
            count = len(list(makers(ast.parse(file.read_text()))))
            result |= {name: count} if count else {}
    assert result == OF_THE_MODULE
