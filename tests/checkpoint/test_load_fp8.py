"""Loading with FP8 activations, and what loading says of weights that are exact in FP8."""

from __future__ import annotations

import logging

import pytest
import torch

from dsv4 import device, dispatch
from dsv4.checkpoint import load
from dsv4.checkpoint.packing import report_fp8
from dsv4.cute import supports
from dsv4.layers.linear import Linear
from dsv4.layers.pack import Packing
from dsv4.ops.gemm import gemm
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.exact_fp8 import Exactness
from dsv4.quant.formats import NVFP4
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise, assert_within_budget
from tests.checkpoint.cases import make_model, saved
from tests.checkpoint.load_cases import CONFIG, mixed
from tests.checkpoint.test_load_packed import pretend_gpu

HINT = "activation='fp8' multiplies them"


def loaded(folder, caplog, **options):
    """A loaded model, and what was logged of FP8."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="dsv4.checkpoint"):
        model = load(folder, progress=False, **options)
    return model, [r.getMessage() for r in caplog.records if "FP8" in r.getMessage()]


@pytest.fixture
def has_kernels(monkeypatch):
    """Let the CPU be a device with FP8 tensor cores."""
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(supports, "no_fp8_gemm", lambda device: None)


def test_what_deepseek_publishes_is_exact(tmp_path, caplog, has_kernels):
    """Experts from MXFP4 and linear layers in FP8: one line says so, unless FP8 was requested."""
    source = saved(make_model(CONFIG), tmp_path, layout="deepseek")
    model, [line] = loaded(source, caplog)
    counts = model.load_report.packing.fp8
    assert counts
    assert all(of.is_exact for of in counts.values())
    assert f"{len(counts)} of {len(counts)} quantised weights are exact in FP8: {HINT}" in line
    assert {n for n in counts if n.endswith("gate_up_proj") and "experts" in n}
    model, [line] = loaded(source, caplog, activation="fp8")
    assert line.endswith(f"{len(counts)} of {len(counts)} quantised weights are exact in FP8")
    assert model.config.activation == "fp8"
    with torch.no_grad():
        assert model(torch.arange(9)[None]).isfinite().all()


@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
def test_the_hint_is_seen_once_whatever_is_logged(tmp_path, caplog, capsys, has_kernels, level):
    """Python's default drops INFO: the line then goes where the progress bar goes."""
    source = saved(make_model(CONFIG), tmp_path, layout="deepseek")
    with caplog.at_level(level, logger="dsv4.checkpoint"):
        load(source)
    logged = [r.getMessage() for r in caplog.records if HINT in r.getMessage()]
    printed = [line for line in capsys.readouterr().err.splitlines() if HINT in line]
    assert (len(logged), len(printed)) == ((0, 1) if level == logging.WARNING else (1, 0))
    assert (logged + printed)[0].startswith(f"{source}: ")
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="dsv4.checkpoint"):
        load(source, progress=False)
        load(source, activation="fp8")
    assert not caplog.records
    assert HINT not in capsys.readouterr().err


def test_scales_from_data_are_counted(tmp_path, caplog, has_kernels):
    source = saved(mixed(1, ["nvfp4"]), tmp_path, layout="transformers")
    model, lines = loaded(source, caplog)
    assert lines == []  # nothing to gain
    total = sum(model.load_report.packing.fp8.values(), Exactness(0))
    model, lines = loaded(source, caplog, activation="fp8")
    counts = model.load_report.packing.fp8
    assert f"0 of {len(counts)} quantised weights are exact in FP8" in lines[0]
    assert f"{total.no_power} of {total.blocks} block scales are no power of two" in lines[1]


def with_powers_of_two(model, largest):
    """Give linear layers scales of 1; a row of one layer has 2^-9 and ``2 ** largest``.

    Returns:
        The name of that layer.
    """
    name, layer = next((n, m) for n, m in model.named_modules() if n.endswith("q_a_proj"))
    for other in (m for m in model.modules() if isinstance(m, Linear) and m.format == NVFP4):
        scales = torch.ones(other.weight_scale.shape)
        if other is layer:
            scales[3, 0], scales[3, 2] = 2.0**largest, 2.0**-9
        other.weight_scale.data.copy_(scales)
    return name


@pytest.mark.parametrize("largest", [5, 6])
def test_a_span_one_beyond_the_limit_falls_back(tmp_path, caplog, has_kernels, largest):
    """In one block of a weight: the report, the log, ``explain`` and results follow."""
    made, beyond = mixed(1, ["nvfp4"]), largest == 6
    name = with_powers_of_two(made, largest)
    source = saved(made, tmp_path, layout="transformers")
    model, lines = loaded(source, caplog, activation="fp8")
    exactness = model.load_report.packing.fp8[name]
    assert (exactness.no_power, exactness.wide_rows) == (0, int(beyond))
    assert exactness.wide_blocks == int(beyond)
    assert exactness.is_exact != beyond
    assert ("1 blocks are too far below" in " ".join(lines)) == beyond

    layer = model.get_submodule(name)
    weight, x = layer.quantized_weight(), strategies.normal(2, (5, layer.in_features))
    call = dispatch.arguments(gemm, x.bfloat16(), weight, activation="fp8")
    call = dispatch.Call(call.op, call.args, torch.device("cuda", 0))
    with device.pretend(packages=True):
        device.MACHINE.pretend(capability=(9, 0))
        explanation = dispatch._explanation(call, "fp8")
        automatic = dispatch._explanation(call, "auto")
    reason = dict(explanation.candidates)["fp8"]
    if beyond:
        assert reason.startswith("the weight is not exact in FP8")
        assert automatic.chosen == "cute"
        assert f"1 of {exactness.blocks} blocks are more than 2^14 below" in automatic.note
    else:
        assert (explanation.chosen, reason) == ("fp8", None)
    expected = gemm(x, weight.with_layout("linear"), activation="fp8")
    assert_bitwise(gemm(x, weight, activation="fp8"), expected, "product")
    left, right = dequantize(quantize(x, "fp8_token")), dequantize(weight)
    assert_within_budget(
        expected, left.double() @ right.double().T, 1e-5 * left.abs() @ right.abs().T, "product"
    )


def test_without_kernels_no_hint_is_given(tmp_path, caplog, monkeypatch):
    source = saved(make_model(CONFIG), tmp_path, layout="deepseek")
    pretend_gpu(monkeypatch)
    assert loaded(source, caplog)[1] == []
    lines = loaded(source, caplog, activation="fp8")[1]
    assert any("FP8 activations are multiplied as bfloat16: " in line for line in lines)
    rows = dispatch.implementations("gemm")
    there = supports.no_fp8_gemm(torch.device("cpu"))
    assert ("no GEMM by FP8 tensor cores" in there) == all(row.name != "fp8" for row in rows)


def test_experts_that_keep_a_stack_in_bfloat16_are_named(tmp_path, caplog):
    counts = {
        "experts.gate_up_proj": Exactness(300, 2, by_matrix=(0, 2, 0), first=8),
        "experts.down_proj": Exactness(300, 9, by_matrix=(3, 4, 2)),
        "q_a_proj": Exactness(100, 1),
    }
    with caplog.at_level(logging.INFO, logger="dsv4.checkpoint"):
        report_fp8(tmp_path, torch.nn.Linear(2, 2), Packing(fp8=counts), "fp8")
    named = [r.getMessage() for r in caplog.records if "because of some experts" in r.getMessage()]
    assert [line.partition(": ")[2] for line in named] == [
        "experts.gate_up_proj is multiplied as bfloat16 because of some experts: "
        "1 of 3 matrices of the stack have such blocks: 9 (blocks: 2)"
    ]


def test_a_model_without_quantised_weights_has_nothing_to_say(caplog, tmp_path):
    with caplog.at_level(logging.INFO, logger="dsv4.checkpoint"):
        report_fp8(tmp_path, torch.nn.Linear(2, 2), Packing(), "bf16")
    assert not caplog.records


def test_unknown_activations_are_refused(tmp_path):
    source = saved(make_model(CONFIG), tmp_path)
    with pytest.raises(ValueError, match="activation is 'fp4', wanted one of bf16, nvfp4, fp8"):
        load(source, activation="fp4", progress=False)
