"""A kernel that was never seen right on a GPU is checked there before ``"auto"`` takes it."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4 import device, dispatch, self_check
from dsv4.ops.gemm import gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu_quantize
from dsv4.ops.quantize import quantize
from dsv4.quant.formats import FP8_BLOCK, LINEAR, NVFP4, SWIZZLED_EXPERTS
from dsv4.reference import gemm as reference
from dsv4.reference import grouped_gemm as grouped_reference
from tests._tools import fake_kernel

CAPABILITY = (10, 0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    yield from fake_kernel.no_verdicts(monkeypatch, tmp_path)


@pytest.fixture
def kernel(monkeypatch):
    """Puts a kernel that was proven nowhere in front of the reference; the list of its calls."""

    def install(implement, proven=frozenset()):
        row = dispatch.Implementation("gemm", "fake", "fake:gemm", proven=proven)
        return fake_kernel.install(monkeypatch, row, implement, CAPABILITY)

    return install


def operands(tokens=3, rows=32, columns=64, format=NVFP4):
    weight = quantize(torch.randn(rows, columns), format, scaling="weight")
    return torch.randn(tokens, columns).bfloat16(), weight


def wrong(args):
    out = reference.gemm(args)
    out[-1:] *= 1.1
    return out


def with_nan(args):
    out = reference.gemm(args)
    out[0, 0] = torch.nan
    return out


def raising(args):
    raise RuntimeError("CUDA error 700, illegal address")


def test_a_right_kernel_is_taken_after_one_check(kernel):
    calls = kernel(reference.gemm)
    x, weight = operands()
    for _ in range(3):
        assert torch.equal(gemm(x, weight), gemm(x, weight, backend="reference"))
    assert len(calls) == 4
    assert not torch.equal(calls[0].x, x), "the check draws its own activations"
    assert all(call.x is x for call in calls[1:])


def test_a_call_without_tokens_checks_nothing(kernel):
    """Nothing was compared, and yet the verdict held for one token; the comparison raised."""
    calls = kernel(wrong)
    x, weight = operands()
    assert gemm(x[:0], weight).shape == (0, 32)
    assert len(calls) == 1
    assert torch.equal(gemm(x[:1], weight), gemm(x[:1], weight, backend="reference"))


@pytest.mark.parametrize(
    ("implement", "said"),
    [
        (wrong, "a row is off by 0."),
        (with_nan, "1 of 96 values are finite here and not there"),
        (raising, "it raises RuntimeError: CUDA error 700, illegal address"),
        (lambda args: reference.gemm(args).float(), "the result is torch.float32"),
        (lambda args: reference.gemm(args)[:, :5], "wanted torch.bfloat16 [3, 32]"),
    ],
)
def test_a_wrong_kernel_is_passed_over_and_that_is_said_once(kernel, implement, said, caplog):
    calls = kernel(implement)
    x, weight = operands()
    for _ in range(3):
        assert torch.equal(gemm(x, weight), gemm(x, weight, backend="reference"))
    assert len(calls) == 1
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert said in caplog.text
    explained = dispatch.explain(gemm, x, weight)
    assert explained.chosen == "reference"
    assert said in str(explained)


@pytest.mark.parametrize("implement", [reference.gemm, wrong])
def test_the_verdict_is_kept_for_the_next_process(kernel, implement):
    calls = kernel(implement)
    x, weight = operands()
    gemm(x, weight)
    before = len(calls)
    self_check.verdicts.cache_clear()
    gemm(x, weight)
    assert len(calls) - before == (implement is reference.gemm)


def test_a_damaged_verdict_is_made_again(kernel, tmp_path):
    calls = kernel(wrong)
    x, weight = operands()
    gemm(x, weight)
    (file,) = tmp_path.glob("*.verdict")
    file.write_bytes(file.read_bytes().replace(b"off", b"OFF"))
    self_check.verdicts.cache_clear()
    gemm(x, weight)
    assert len(calls) == 2


def test_where_it_was_seen_right_nothing_is_checked(kernel):
    calls = kernel(wrong, proven=frozenset({CAPABILITY}))
    x, weight = operands()
    assert not torch.equal(gemm(x, weight), gemm(x, weight, backend="reference"))
    assert calls[0].x is x


def test_by_name_it_runs_with_a_warning(kernel):
    calls = kernel(wrong)
    x, weight = operands()
    with pytest.warns(RuntimeWarning, match=r"'fake' was never seen right on .* 10\.0"):
        gemm(x, weight, backend="fake")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gemm(x, weight, backend="fake")
    assert [call.x is x for call in calls] == [True, True]


def test_a_capture_takes_it_only_after_a_check(kernel, monkeypatch):
    calls = kernel(reference.gemm)
    x, weight = operands()
    with monkeypatch.context() as patch:
        patch.setattr(self_check, "is_capturing", lambda device: True)
        assert dispatch.choose(dispatch.arguments(gemm, x, weight)).name == "reference"
        assert calls == []
    gemm(x, weight)
    monkeypatch.setattr(self_check, "is_capturing", lambda device: True)
    assert dispatch.choose(dispatch.arguments(gemm, x, weight)).name == "fake"


def test_explaining_checks_nothing(kernel):
    calls = kernel(wrong)
    explained = dispatch.explain(gemm, *operands())
    assert (explained.chosen, calls) == ("fake", [])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 2]), st.booleans())
def test_a_configuration_has_tokens_up_to_a_power_of_two(first, second, height, fp8):
    format = FP8_BLOCK if fp8 else NVFP4
    texts = []
    for tokens, rows in ((first, 32), (second, 32 * height)):
        call = dispatch.arguments(gemm, *operands(tokens, rows, format=format))
        texts.append(self_check.describe(call.args))
    same = height == 1 and (first - 1).bit_length() == (second - 1).bit_length()
    assert (texts[0] == texts[1]) == same


def test_a_verdict_is_of_one_gpu_and_one_version(monkeypatch):
    configuration = self_check.Configuration("gemm", "fake", "[]", "GPU 10.0 driver 1")
    other = dataclasses.replace(configuration, gpu="GPU 10.0 driver 2")
    assert configuration.key == dataclasses.replace(configuration).key != other.key
    before = configuration.key
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert configuration.key != before


@pytest.mark.parametrize("scale_layout", [LINEAR, SWIZZLED_EXPERTS])
@pytest.mark.parametrize("part", [None, 0, 1])
def test_codes_and_their_scales_are_compared(scale_layout, part):
    weight = quantize(torch.randn(2, 128, 64), NVFP4, scaling="weight")
    x, offsets = torch.randn(5, 64).bfloat16(), torch.tensor([0, 2, 5], dtype=torch.int32)
    call = dispatch.arguments(
        grouped_gemm_swiglu_quantize,
        x,
        weight,
        offsets,
        10.0,
        torch.ones(2),
        scale_layout=scale_layout,
    )

    def implement(args):
        outputs = grouped_reference.grouped_gemm_swiglu_quantize(args)
        if part is not None:
            bytes_ = outputs[part].view(torch.uint8)
            bytes_.flatten()[: bytes_.shape[-1]] ^= 0x33
        return outputs

    actual = self_check.check(call.args, implement, grouped_reference.grouped_gemm_swiglu_quantize)
    expected = {None: None, 0: "codes", 1: "block scales"}[part]
    assert actual is None if expected is None else actual.startswith(expected)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Triton Error [CUDA]: operation not permitted when stream is capturing"),
    ],
)
def test_what_is_no_fault_of_the_kernel_is_no_verdict(kernel, error, tmp_path):
    def refused(args):
        raise error

    kernel(refused)
    with pytest.raises(type(error)):
        gemm(*operands())
    assert not list(tmp_path.glob("*.verdict"))


def test_no_row_of_blackwell_is_taken_unseen():
    for row in dispatch.IMPLEMENTATIONS:
        if row.name in ("tcgen05", "scaled_mm"):
            assert row.proven == frozenset(), "state on which GPU it was seen right"
        if row.name == "cute" and row.op.startswith(("gemm", "grouped")):
            assert row.proven == {(9, 0)}


def test_capability_is_asked_in_one_place():
    with device.pretend(capability=(7, 5)):
        assert dispatch.Call("gemm", (), torch.device("cuda", 0)).capability == (7, 5)
