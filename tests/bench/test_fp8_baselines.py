"""Baselines of GEMMs with FP8 activations, with stand-ins for the libraries."""

from __future__ import annotations

import dataclasses
import importlib
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import ops
from dsv4.bench import environment, measure
from dsv4.bench.baselines import BASELINES, SLOW, _prepare, experts, experts_fp8, fp8
from dsv4.bench.cases.gemm import gemm_case, own_gemm
from dsv4.bench.cli import main
from dsv4.bench.problem import Case, Draw, Problem
from dsv4.bench.suites import moe_parts
from dsv4.quant.formats import FP8_BLOCK, LINEAR, MXFP4, NVFP4, QuantizedTensor

CPU = torch.device("cpu")
OPTIONS = measure.Options(CPU, repeat=1)
RATES = environment.Rates(0.02, 0.01, 0.1)
CAST, BLOCKS, PLAIN = "own w4a8 (mxfp4 cast)", "own w8a8", "own"


def case_of(name: str, tokens: int = 5, rows: int = 144, columns: int = 256) -> Case:
    (case,) = (case for case in own_gemm(rows, columns, tokens) if case.name == name)
    return case


def problem_of(name: str, *, coded: bool = False, tokens: int = 5) -> Problem:
    if not coded:
        return case_of(name, tokens).build(Draw(0, CPU))
    format = NVFP4 if name == CAST else FP8_BLOCK
    case = gemm_case(tokens, (144, 256, 1, ()), "", "fp8", format, coded=True)
    return case.build(Draw(0, CPU))


def arguments(problem: Problem):
    return _prepare.captured(problem).args


def error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth.double()).norm() / truth.double().norm())


class DeepGemm:
    """DeepGEMM's operands, checked and multiplied by PyTorch."""

    def __init__(self, wrong: float = 0.0, step: int = 128) -> None:
        self.wrong, self.step, self.calls = wrong, step, 0

    def fp8_gemm_nt(self, left, right, out) -> None:
        self.calls += 1
        out.copy_((_values(*left) @ _values(*right, rows=128).T) * (1 + self.wrong))

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return self.step

    def m_grouped_fp8_gemm_nt_contiguous(self, left, right, out, expert_of_row) -> None:
        assert expert_of_row.dtype == torch.int32
        assert len(expert_of_row) == len(left[0]) == len(out)
        assert len(expert_of_row) % self.step == 0
        for block in expert_of_row.split(self.step):
            assert set(block.tolist()) <= {int(block[0]), -1}, "a block has rows of two experts"
            assert int(block[0]) >= 0
        values = _values(*left)
        for expert in range(len(right[0])):
            of_expert = expert_of_row == expert
            weight = _values(right[0][expert], right[1][expert], rows=128)
            out[of_expert] = ((values[of_expert] @ weight.T) * (1 + self.wrong)).bfloat16()


def _values(codes: torch.Tensor, scales: torch.Tensor, rows: int = 1) -> torch.Tensor:
    assert codes.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.float32
    if rows == 1:
        assert (scales.stride(0), scales.stride(1) % 4) == (1, 0), "not as TMA copies read them"
    assert tuple(scales.shape) == (-(-codes.shape[0] // rows), -(-codes.shape[1] // 128))
    wide = scales.repeat_interleave(rows, 0)[: len(codes)].repeat_interleave(128, 1)
    return codes.float() * wide[:, : codes.shape[1]]


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("name", [CAST, BLOCKS])
def test_deep_gemm_gets_operands_in_its_layout(name: str, coded: bool):
    problem, library = problem_of(name, coded=coded), DeepGemm()
    result = fp8._deep_gemm(library, arguments(problem))()
    # FP8 weights have scales as DeepGEMM wants them; NVFP4 ones are rounded.
    assert error(result, problem.run("reference")[0]) < (0.005 if name == BLOCKS else 0.05)
    assert library.calls == 2  # one is compared


@pytest.mark.parametrize("name", [CAST, BLOCKS])
def test_a_wrong_deep_gemm_is_left_out(name: str):
    with pytest.raises(ValueError, match=r"off by 1\.0e-01"):
        fp8._deep_gemm(DeepGemm(0.1), arguments(problem_of(name)))


def test_deep_gemm_wants_whole_blocks_of_columns():
    problem = case_of(BLOCKS, columns=192).build(Draw(0, CPU))
    with pytest.raises(ValueError, match="K is 192, wanted a multiple of 128"):
        fp8._deep_gemm(DeepGemm(), arguments(problem))


@given(tokens=st.integers(1, 40), columns=st.integers(1, 9))
def test_scales_lie_by_columns(tokens: int, columns: int):
    scales = torch.rand(tokens, columns)
    laid = fp8.columns_first(scales)
    assert torch.equal(laid, scales)
    assert laid.stride(0) == 1
    assert laid.stride(1) * laid.element_size() % 16 == 0
    assert laid.stride(1) < tokens + 4


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("name", [CAST, BLOCKS])
def test_scaled_mm_multiplies_the_codes(name: str, coded: bool):
    def scaled_mm(x, weight, scale_a, scale_b, out_dtype, use_fast_accum):
        assert x.dtype == weight.dtype == torch.float8_e4m3fn
        assert (weight.stride(0), scale_a.item(), scale_b.item()) == (1, 1, 1)
        assert use_fast_accum
        return (x.float() @ weight.float()).to(out_dtype)

    problem = problem_of(name, coded=coded)
    result = fp8._scaled_mm(SimpleNamespace(_scaled_mm=scaled_mm), arguments(problem))()
    assert result.shape == problem.run("reference")[0].shape
    assert result.dtype == torch.bfloat16
    if name == CAST:  # codes times a power of two and a global scale are the values
        x, weight = problem.args
        values = ops.dequantize(weight).div(weight.row_scale()[:, None])
        values /= (2.0 ** weight.row_exponent.float())[:, None]
        codes = x if isinstance(x, QuantizedTensor) else ops.quantize(x, "fp8_token")
        truth = codes.with_layout(LINEAR).codes.float() @ values.T
        assert error(result, truth) < 0.005


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("name", [CAST, BLOCKS])
def test_the_own_baseline_has_bfloat16_activations(name: str, coded: bool):
    problem = problem_of(name, coded=coded)
    call = fp8.own(problem)
    assert call is not None
    x, weight = problem.args
    if coded:
        x = ops.dequantize(x, torch.bfloat16)
    (result,) = call()
    assert torch.equal(result, ops.gemm(x, weight))


@pytest.mark.parametrize("name", sorted(set(BASELINES["gemm"]) & set(fp8.BASELINES["gemm"])))
def test_other_activations_are_refused(name: str):
    with _prepare.reasons() as said:
        assert BASELINES["gemm"][name](problem_of(PLAIN)) is None
    assert said == ["the activations are not FP8"]


def row_of(name: str, baselines: tuple[str, ...] | None = None):
    options = dataclasses.replace(OPTIONS, baselines=baselines)
    return measure.measure(case_of(name), options, RATES)


def test_a_row_says_why_a_baseline_has_no_time():
    on_cpu = "runs on a CUDA GPU, the tensors are on cpu"
    message = row_of(CAST).message
    for name, module in ((fp8.SCALED_MM, "torch"), (fp8.ROUNDED_DEEP_GEMM, "deep_gemm")):
        assert f"baseline {name} was not timed: {module}: {on_cpu}" in message
    assert fp8.DEEP_GEMM not in message  # it is for the other weights
    assert fp8.HUMMING in SLOW  # and is asked by name alone
    assert fp8.DEEP_GEMM in row_of(BLOCKS).message
    assert row_of(PLAIN).message == ""
    assert row_of(CAST, ()).message == ""
    assert (
        f"{fp8.HUMMING} was not timed: humming.layer: {on_cpu}"
        in row_of(CAST, ("humming",)).message
    )


def test_the_bound_counts_the_rate_of_fp8():
    fast = environment.Rates(1e9, 1e9, 1e-6)
    with_fp8, without = (
        measure.measure(case_of(name), dataclasses.replace(OPTIONS, baselines=()), fast)
        for name in (CAST, PLAIN)
    )
    assert with_fp8.flops == without.flops
    assert with_fp8.bound_us == pytest.approx(without.bound_us / 2)


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    step=st.sampled_from([1, 8, 128]),
)
def test_experts_begin_at_multiples(counts: list[int], step: int):
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    slots, expert_of_row = experts_fp8.padded(offsets, step)
    assert len(slots) == sum(counts)
    assert len(slots.unique()) == len(slots)
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        own = slots[start:end]
        assert torch.equal(own, own[:1] + torch.arange(end - start))
        assert bool((own[:1] % step == 0).all())
        assert bool((expert_of_row[own] == expert).all())
    assert int((expert_of_row >= 0).sum()) == sum(counts)
    assert len(expert_of_row) == sum(-(-count // step) * step for count in counts)


@given(seed=st.integers(0, 99))
def test_scales_of_a_cast_weight_are_mxfp4(seed: int):
    weight = Draw(seed, CPU).quantized(16, 128, mxfp4_cast=True)
    (scales,) = fp8.mxfp4_scales(weight).values()
    values = scales.view(torch.float8_e8m0fnu).float().repeat_interleave(2, -1)
    assert torch.equal(values, weight.scales.float())


def test_other_scales_are_not_mxfp4():
    with pytest.raises(ValueError, match="were not cast from MXFP4"):
        fp8.mxfp4_scales(Draw(0, CPU).quantized(16, 128))


class HummingLayer(torch.nn.Module):
    """Humming's operands with FP8 activations, multiplied by PyTorch."""

    def __init__(self, shape_n, shape_k, num_experts, weight_config, input_config, torch_dtype):
        super().__init__()
        assert weight_config == {"quant_method": "mxfp4"}
        assert input_config == {"quant_method": "humming", "dtype": "float8e4m3"}
        self.sizes, self.dense = (shape_n, shape_k), None

    def load_from_tensors(self, tensors):
        codes, scales = tensors["weight"], tensors["weight_scale"]
        assert scales.shape[-2:] == (self.sizes[0], self.sizes[1] // 32)
        assert codes.dtype == scales.dtype == torch.uint8
        wide = QuantizedTensor(codes, scales.view(torch.float8_e8m0fnu), None, MXFP4)
        self.dense = ops.dequantize(wide)

    def transform(self):
        pass

    def forward(self, x, expert_layout=None, compute_config=None):
        x = ops.dequantize(ops.quantize(x, "fp8_token"))
        if expert_layout is None:
            return (x @ self.dense.T).bfloat16()
        assert expert_layout.dtype == torch.int64
        pairs = zip(pairwise(expert_layout.tolist()), self.dense, strict=True)
        return torch.cat([(x[a:b] @ matrix.T).bfloat16() for (a, b), matrix in pairs])


@pytest.mark.parametrize("coded", [False, True])
def test_humming_gets_mxfp4_weights(coded: bool):
    problem = problem_of(CAST, coded=coded)
    library = SimpleNamespace(HummingLayer=HummingLayer)
    result = fp8._humming(library, arguments(problem))()
    scale = problem.args[1].global_scale
    assert error(result * scale, problem.run("reference")[0]) < 0.005


def rows_of(path: Path) -> list[dict]:
    return json.loads(path.read_text())["rows"]


def moe(path: Path, *more: str) -> int:
    how = ["--tokens", "3", "--repeat", "1", "--routings", "zipf", "--device", "cpu"]
    return main(["moe", "--activation", "fp8", *how, "--json", str(path), *more])


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "deep_gemm": DeepGemm(step=8),
        "humming.layer": SimpleNamespace(HummingLayer=HummingLayer),
    }
    others = importlib.import_module

    def module(name):
        return known.get(name) or others(name)

    monkeypatch.setattr(experts_fp8.importlib, "import_module", module)
    monkeypatch.setattr(environment, "rates", lambda device: RATES)


def test_experts_stand_beside_their_baselines(tmp_path: Path, libraries, monkeypatch, capsys):
    def grouped(x, weight, scale_a, scale_b, offs, out_dtype, use_fast_accum):
        assert x.dtype == weight.dtype == torch.float8_e4m3fn
        assert (weight.stride(1), len(scale_a), scale_b.shape) == (1, len(x), weight.shape[::2])
        assert offs[-1] == len(x)
        return x.new_zeros((len(x), weight.shape[2]), dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", grouped, raising=False)
    monkeypatch.setattr(experts, "BASELINES", {})
    assert moe(tmp_path / "m.json") == 0
    rows = {row["case"].split()[2]: row for row in rows_of(tmp_path / "m.json")}
    assert set(rows) == set(moe_parts.PARTS)
    assert {row["op"] for row in rows.values()} == {"moe_fp8"}
    assert all(row["case"].endswith(" w4a8 (mxfp4 cast)") for row in rows.values())
    gemms = set(experts_fp8.BASELINES)
    for part, row in rows.items():
        timed = gemms if part in ("gate_up", "down", "pair") else set()
        assert set(row["baselines"]) == (timed or ({fp8.OWN} if part == "block" else set()))
        assert row["message"] == ""
    assert "the whole layer is measured with bf16 activations alone" in capsys.readouterr().out


def test_wrong_libraries_of_experts_are_left_out(tmp_path: Path, libraries, monkeypatch):
    monkeypatch.setattr(DeepGemm, "__init__", lambda self: None)
    wrong = DeepGemm()
    wrong.wrong, wrong.step = 0.1, 8
    others = importlib.import_module
    monkeypatch.setattr(
        experts_fp8.importlib,
        "import_module",
        lambda name: wrong if name == "deep_gemm" else others(name),
    )
    assert moe(tmp_path / "m.json", "--baselines", "DeepGEMM,this package") == 0
    (pair,) = (row for row in rows_of(tmp_path / "m.json") if " pair " in row["case"])
    assert set(pair["baselines"]) == {fp8.OWN}
    assert f"{fp8.ROUNDED_DEEP_GEMM}: ValueError: off by 1.0e-01" in pair["message"]


def test_missing_libraries_of_experts_are_said(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(environment, "rates", lambda device: RATES)
    assert moe(tmp_path / "m.json", "--baselines", "DeepGEMM") == 0
    (pair,) = (row for row in rows_of(tmp_path / "m.json") if " pair " in row["case"])
    assert "No module named 'deep_gemm'" in pair["message"]


def test_an_unknown_activation_is_refused(capsys):
    assert main(["moe", "--activation", "nvfp4", "--device", "cpu"]) == 2
    assert "--activation is 'nvfp4', wanted one of bf16, fp8" in capsys.readouterr().err
    assert main(["moe", "--device", "cpu", "--baselines", "DeepGEMM"]) == 2
    assert "--baselines has 'DeepGEMM', wanted some of torch._grouped_mm" in capsys.readouterr().err


@pytest.mark.gpu
def test_rows_with_fp8_activations_on_a_gpu(tmp_path: Path):
    """Small experts and a small matrix: right, and each baseline has a time or a reason."""
    sizes = ["--shape", "E=8,H=512,I=256,k=2", "--routings", "uniform", "--tokens", "300"]
    path, quick = tmp_path / "m.json", ["--repeat", "2", "--json"]
    assert main(["moe", "--activation", "fp8", *sizes, *quick, str(path)]) == 0
    (pair,) = (row for row in rows_of(path) if " pair " in row["case"])
    for name in experts_fp8.BASELINES:
        assert (name in pair["baselines"]) != (name in pair["message"]), name
    assert pair["baselines"][fp8.OWN] > 0
    matrix = ["--shape", "N=512,K=512", "--tokens", "300", "--cases", "*w?a8*"]
    assert main(["run", "gemm", *matrix, *quick, str(path)]) == 0
    for row in rows_of(path):
        assert fp8.OWN in row["baselines"]
        assert (fp8.SCALED_MM in row["baselines"]) != (fp8.SCALED_MM in row["message"])
