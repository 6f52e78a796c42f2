"""Checkpoints of every layout in transformers' model class."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.checkpoint import CheckpointError, load, save
from dsv4.config import ModelConfig
from dsv4.integrations import _expert_parallel
from dsv4.integrations.transformers import from_pretrained, register_expert_parallel
from dsv4.layers import DeepseekV4Attention, DeepseekV4Experts, Linear
from dsv4.quant.formats import FRAGMENTS
from dsv4.testing.models import random_model, transformers_twin

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 14, "eos_token_id": None}


def tiny(**changes: Any) -> ModelConfig:
    return ModelConfig.tiny(numerics="transformers", **changes)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def checkpoint(folder: Path, layout: str = "nvidia", mtp: bool = True, **changes: Any) -> Path:
    config = tiny(hidden_size=128, moe_intermediate_size=64, **changes)
    save(random_model(config, 3, mtp=mtp), folder, layout=layout, plain_dtype=None)
    return folder


@pytest.mark.parametrize(
    "layout", ["nvidia", "deepseek", "transformers", "compressed-tensors", "bf16"]
)
def test_a_loaded_model_generates_the_tokens_of_the_dequantised_weights(
    layout: str, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path / "c", layout)
    model = from_pretrained(path, dtype=torch.float32, progress=False)
    twin: Any = transformers_twin(
        load(path, numerics="transformers", dtype=torch.float32, mtp=False, progress=False)
    )
    ids = torch.randint(2, 128, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert relative(model(ids).logits, twin(ids).logits) <= TOLERANCE
    assert torch.equal(model.generate(ids, **GREEDY), twin.generate(ids, **GREEDY))
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, DeepseekV4Experts)
    expected = {"deepseek": "mxfp4", "bf16": None}.get(layout, "nvfp4")
    assert (experts.format.name if experts.format else None) == expected


def test_a_model_is_loaded_and_swapped_on_any_device(device: torch.device, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c")
    ids = torch.randint(0, 128, (1, 17), generator=torch.Generator().manual_seed(1))
    host = from_pretrained(path, dtype=torch.float32, progress=False)
    with torch.no_grad():
        expected = host(ids).logits
        for parts in (None, ["norm"]):
            model = from_pretrained(
                path, device=device, dtype=torch.float32, parts=parts, progress=False
            )
            device_types = {t.device.type for t in (*model.parameters(), *model.buffers())}
            assert device_types == {device.type}
            assert relative(model(ids.to(device)).logits.cpu(), expected) <= TOLERANCE


@pytest.mark.parametrize("parts", [("attention",), ("experts",), ("norm", "lm_head")])
def test_parts_that_stay_transformers_take_dequantised_weights(
    parts: tuple[str, ...], tmp_path: Path
) -> None:
    path = checkpoint(tmp_path / "c")
    model = from_pretrained(path, dtype=torch.float32, parts=parts, progress=False)
    whole = from_pretrained(path, dtype=torch.float32, progress=False)
    ids = torch.randint(0, 128, (1, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert relative(model(ids).logits, whole(ids).logits) <= TOLERANCE
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, DeepseekV4Experts) == ("experts" in parts)
    attention = model.model.layers[0].self_attn
    assert isinstance(attention, DeepseekV4Attention) == ("attention" in parts)


@pytest.mark.parametrize("layout", ["transformers", "deepseek"])
@pytest.mark.parametrize("parts", [None, ("attention", "norm")])
def test_it_packs_what_load_packs(layout: str, parts: Any, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c", layout, q_lora_rank=64, o_lora_rank=32)
    common: dict[str, Any] = {"dtype": torch.float32, "progress": False}
    options: dict[str, Any] = {"mxfp4": "lossless", "pack": FRAGMENTS, **common}
    model = from_pretrained(path, parts=parts, **options)
    whole = load(path, numerics="transformers", mtp=False, **options)
    plain = from_pretrained(path, parts=parts, **common)
    expected = {
        name: module.layout
        for name, module in whole.named_modules()
        if isinstance(module, (Linear, DeepseekV4Experts))
        and (parts is None or ".self_attn." in name)
    }
    ours = (Linear, DeepseekV4Experts)
    actual = {n: m for n, m in model.named_modules() if isinstance(m, ours)}
    assert {name: module.layout for name, module in actual.items()} == expected
    assert (FRAGMENTS in expected.values()) == (layout == "transformers" or parts is None)
    packing, conversion = model.dsv4_report.packing, model.dsv4_report.conversion
    assert {n for n, layout in expected.items() if layout == FRAGMENTS} == set(packing.packed)
    experts = len(model.model.layers) * 3 * model.config.n_routed_experts
    converted = experts if layout == "deepseek" and parts is None else 0
    assert conversion.converted == converted
    assert plain.dsv4_report.packing.packed == []
    for name, module in actual.items():
        for part in ("gate_up_proj", "down_proj"):
            if isinstance(module, DeepseekV4Experts):
                left, right = (m.get_submodule(name).dense_weight(part) for m in (model, plain))
                assert torch.equal(left, right)
        if isinstance(module, Linear):
            assert torch.equal(module.dense_weight(), plain.get_submodule(name).dense_weight())
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()
    for folder, source in (("d", model), ("e", plain)):
        save(source, tmp_path / folder, layout=layout)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "d" / file).read_bytes() == (tmp_path / "e" / file).read_bytes()


def test_the_layers_that_transformers_lacks_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint(tmp_path / "c", num_nextn_predict_layers=1)
    with caplog.at_level(logging.WARNING):
        model = from_pretrained(path, progress=False)
    left_out = model.dsv4_report.left_out
    assert "mtp.0.e_proj.weight" in left_out
    assert all(name.startswith("mtp.0.") for name in left_out)
    assert f"{len(left_out)} mtp.* tensors were left out" in caplog.text
    assert "left out of the checkpoint" in str(model.dsv4_report)
    with pytest.raises(RuntimeError, match="never held"):
        model.dsv4_report.undo()
    caplog.clear()
    none = checkpoint(tmp_path / "d", mtp=False, num_nextn_predict_layers=0)
    assert from_pretrained(none, progress=False).dsv4_report.left_out == ()
    assert not caplog.text


def test_generation_follows_the_checkpoint(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c", bos_token_id=3, eos_token_id=(5, 7))
    result = from_pretrained(path, progress=False).generation_config
    assert (result.bos_token_id, result.eos_token_id) == (3, [5, 7])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9, "top_p": 0.5}))
    result = from_pretrained(path, progress=False).generation_config
    assert (result.eos_token_id, result.top_p) == (9, 0.5)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_deepseek_numerics_in_bfloat16_are_near_float32(dtype: Any, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c")
    ids = torch.randint(0, 128, (1, 17), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"numerics": "deepseek", "progress": False}
    narrow = from_pretrained(path, dtype=dtype or torch.bfloat16, **options)
    wide = from_pretrained(path, dtype=torch.float32, **options)
    with torch.no_grad():
        result = narrow(ids).logits
        assert result.dtype == torch.float32, "DeepSeek computes logits in float32"
        assert result.isfinite().all()
        # The last position of a short prompt sums few roundings; this is a sanity bound.
        assert (result - wide(ids).logits).norm() / result.norm() < 0.5


def test_wrong_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        from_pretrained(tmp_path / "nothing", progress=False)
    path = checkpoint(tmp_path / "c")
    with pytest.raises(CheckpointError, match="input_scale is missing"):
        from_pretrained(path, activation="nvfp4", progress=False)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, "hidden_size": 64}))
    with pytest.raises(CheckpointError, match="by the configuration"):
        from_pretrained(path, progress=False)
    (path / "config.json").write_text(json.dumps({**values, "vocab_size": -1}))
    with pytest.raises(ValueError, match="vocab_size"):
        from_pretrained(path, progress=False)


def test_unknown_options_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c")
    for option in (
        {"parts": ["moe"]},
        {"numerics": "exact"},
        {"activation": "int8"},
        {"pack": "rows"},
        {"mxfp4": "exact"},
        {"reserve_tokens": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(option))):
            from_pretrained(path, progress=False, **option)


def test_expert_parallelism_of_older_versions_is_refused_by_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed version, if it is an older one."""
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) >= (5, 24):
        version = "5.23.1"
        monkeypatch.setattr(_expert_parallel, "transformers_version", lambda: version)
    message = rf"expert parallelism needs transformers >= 5\.24, .* found {re.escape(version)}"
    path = checkpoint(tmp_path)
    with pytest.raises(ImportError, match=message):
        register_expert_parallel()
    with pytest.raises(ImportError, match=message):
        from_pretrained(path, distributed_config={"tp_size": 2}, progress=False)
