"""Gate and up in NVFP4 are written with one global scale, and keep their values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv4._checkpoint.pairs import tie
from dsv4.checkpoint import Checkpoint, load, save, write
from dsv4.layers import quantize_
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.formats import NVFP4, QuantizedTensor
from tests.checkpoint.cases import SMALL, make_model, raw

E4M3 = torch.float8_e4m3fn


def _matrix(seed: int, low: int, high: int, scale: float, empty: bool = False) -> QuantizedTensor:
    """Random codes; block scales from the bytes ``low`` to ``high`` of E4M3."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(low, high + 1, (3, 2), generator=generator).to(torch.uint8)
    if empty:
        codes[1, :8] &= 0x88
        scales[1, 0] = 0x7E
    return QuantizedTensor(codes, scales.view(E4M3), torch.tensor([scale]), NVFP4)


def _exact(q: QuantizedTensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Values in float64, where their products are exact."""
    shared = q.global_scale if scale is None else scale
    one = QuantizedTensor(q.codes, q.scales, torch.ones(1), NVFP4)
    return dequantize(one, torch.float32).double() * shared.double()


# Bytes 0x20 to 0x5F are 2^-3 to 15: six binades below and five above are free in E4M3.
@given(
    seed=st.integers(0, 1000),
    exponent=st.integers(-5, 5),
    base=st.floats(2.0**-20, 2.0**10, width=32),
    empty=st.booleans(),
)
@example(seed=0, exponent=3, base=2.0**-12, empty=False)
@example(seed=0, exponent=-4, base=7e-5, empty=True)
def test_scales_a_power_of_two_apart_are_tied_exactly(seed, exponent, base, empty):
    base = torch.tensor(base).item()
    gate = _matrix(seed, 0x20, 0x5F, base, empty)
    up = _matrix(seed + 1, 0x20, 0x5F, base * 2.0**exponent)
    tied = tie(gate, up)
    assert tied is not None
    assert torch.equal(tied[0].global_scale, tied[1].global_scale)
    for before, after in zip((gate, up), tied, strict=True):
        assert torch.equal(_exact(before), _exact(after, tied[0].global_scale))
        assert torch.equal(raw(before.codes), raw(after.codes))


@given(
    seeds=st.tuples(st.integers(0, 1000), st.integers(0, 1000)),
    bytes_=st.lists(st.integers(0, 0x7E), min_size=4, max_size=4),
    ratio=st.one_of(st.integers(-30, 30).map(lambda k: 2.0**k), st.floats(0.125, 8, width=32)),
)
def test_what_is_tied_keeps_every_value(seeds, bytes_, ratio):
    bounds = [sorted(bytes_[:2]), sorted(bytes_[2:])]
    gate = _matrix(seeds[0], *bounds[0], 1e-3)
    up = _matrix(seeds[1], *bounds[1], torch.tensor(1e-3 * ratio).item())
    tied = tie(gate, up)
    if tied is None:
        return
    for before, after in zip((gate, up), tied, strict=True):
        assert torch.equal(_exact(before), _exact(after, tied[0].global_scale))


def test_scales_that_have_no_common_one_are_left_alone():
    assert tie(_matrix(0, 1, 0x7E, 1e-3), _matrix(1, 1, 0x7E, 1.1e-3)) is None
    assert tie(_matrix(0, 1, 0x7E, 1.0), _matrix(1, 1, 0x7E, 2.0**-30)) is None


def _louder_gates(config=SMALL):
    """A model whose gates are larger than their ups, so that separate scales differ."""
    model = make_model(config)
    with torch.no_grad():
        for layer in model.model.layers:
            for e in range(config.n_routed_experts):
                layer.mlp.experts.gate_up_proj[e, : config.moe_intermediate_size] *= 2.0 ** (e + 1)
            layer.mlp.shared_experts.gate_proj.weight *= 4.0
    return model


def _by_the_rule_of_vllm(tensors, stem: str, name: str) -> torch.Tensor:
    """A projection with the global scale of its gate."""
    first = "w1" if f"{stem}.w1.weight" in tensors else "gate_proj"
    value = QuantizedTensor(
        tensors[f"{stem}.{name}.weight"],
        tensors[f"{stem}.{name}.weight_scale"],
        tensors[f"{stem}.{first}.weight_scale_2"].reshape(1),
        NVFP4,
    )
    return dequantize(value)


@pytest.mark.parametrize("source", ["mxfp4", "mxfp4 loaded as nvfp4", "plain", "stream"])
def test_an_engine_that_takes_the_scale_of_w1_for_both_reads_the_same(tmp_path, source):
    model = _louder_gates()
    if source != "plain":
        for layer in model.model.layers:
            layer.mlp.experts.quantize("mxfp4")
    if source == "mxfp4 loaded as nvfp4":
        save(model, tmp_path / "mxfp4", layout="deepseek")
        model = load(tmp_path / "mxfp4", mxfp4="nvfp4", progress=False)
    if source == "stream":
        save(model, tmp_path / "mxfp4", layout="deepseek")
        with Checkpoint.open(tmp_path / "mxfp4") as checkpoint:
            backwards = reversed(list(checkpoint.items()))
            write(backwards, tmp_path / "out", layout="nvidia", config=SMALL)
    else:
        save(model, tmp_path / "out", layout="nvidia")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for number, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        inner = SMALL.moe_intermediate_size
        for e in range(SMALL.n_routed_experts):
            stem = f"layers.{number}.ffn.experts.{e}"
            if source == "plain":
                up = experts.gate_up_proj[e, inner:].detach()
                got = _by_the_rule_of_vllm(tensors, stem, "w3")
                assert float((got - up).norm() / up.norm()) < 0.2
            else:
                up = dequantize(experts.get_expert(e)[1])
                assert torch.equal(_by_the_rule_of_vllm(tensors, stem, "w3"), up)


def test_shared_experts_are_tied_too(tmp_path):
    model = _louder_gates()
    save(model, tmp_path, layout="transformers")
    tensors = load_file(tmp_path / "model.safetensors")
    for number, layer in enumerate(model.model.layers):
        stem = f"model.layers.{number}.mlp.shared_experts"
        up = layer.mlp.shared_experts.up_proj.weight.detach()
        got = _by_the_rule_of_vllm(tensors, stem, "up_proj")
        assert float((got - up).norm() / up.norm()) < 0.2


def test_what_is_quantised_in_memory_is_tied(tmp_path, caplog):
    model = _louder_gates()
    quantize_(model, "nvfp4", ["*.mlp.*"])
    for layer in model.model.layers:
        experts, shared = layer.mlp.experts, layer.mlp.shared_experts
        assert torch.equal(*experts.gate_up_proj_scale_2.unbind(1))
        assert torch.equal(shared.gate_proj.weight_scale_2, shared.up_proj.weight_scale_2)
        up = experts.dense_weight("gate_up_proj")[:, experts.intermediate_dim :]
        assert bool(up.isfinite().all())
    save(model, tmp_path, layout="nvidia")
    assert not [r for r in caplog.records if "weight_scale_2" in r.message]


def test_pairs_that_cannot_be_tied_keep_their_values_and_it_is_said(tmp_path, caplog):
    model = make_model()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        inner = experts.intermediate_dim
        gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
        experts.to_format("nvfp4")
        for e in range(experts.num_local_experts):
            parts = (gate_up[e, :inner], 1.1 * gate_up[e, inner:], down[e])
            experts.set_expert(e, *(quantize(part, NVFP4, scaling="weight") for part in parts))
    save(model, tmp_path, layout="nvidia")
    [record] = [r for r in caplog.records if "weight_scale_2" in r.message]
    count = SMALL.num_hidden_layers * SMALL.n_routed_experts
    assert f"{count} of {count} NVFP4 pairs" in record.message
    assert "experts.0.gate_proj.weight" in record.message
    loaded = load(tmp_path, progress=False)
    for left, right in zip(model.model.layers, loaded.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            wide = [layer.mlp.experts.dense_weight(name) for layer in (left, right)]
            assert torch.equal(*wide)


def test_a_gate_without_its_up_is_written(tmp_path):
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    value = quantize(torch.randn(4, 32), NVFP4, scaling="weight")
    write([(name, value, None)], tmp_path, layout="nvidia", config=SMALL)
    assert torch.equal(dequantize(Checkpoint.open(tmp_path).read(name)), dequantize(value))
