"""Choice of the implementation of a GEMM by GPU; no GPU takes part."""

from __future__ import annotations

import pytest
import torch

from dsv4 import device, dispatch, ops
from dsv4.cute.grouped_problem import MOST_EXPERTS
from dsv4.ops.quantize import quantize
from dsv4.quant.formats import FRAGMENTS, LINEAR, SWIZZLED
from dsv4.triton import nvfp4_supports

GPU = torch.device("cuda", 0)
HOPPER, B200, B300, THOR, RTX = (9, 0), (10, 0), (10, 3), (11, 0), (12, 0)
ADA = (8, 9)
WEIGHT = quantize(torch.ones(64, 256), scaling="weight")
PACKED = WEIGHT.with_layout(FRAGMENTS)


@pytest.fixture(autouse=True)
def capability():
    """Every GPU is a B200; a test can have another. Every package is installed."""
    with device.pretend(capability=B200, packages=True) as be:
        yield lambda gpu: be(capability=gpu)


def candidates(op, *args, **kwargs):
    """The choice, and why each implementation is passed over, as if tensors were on the GPU."""
    call = dispatch.arguments(op, *args, **kwargs)._replace(device=GPU)
    rows = dispatch.implementations(call.op)
    result = {row.name: row.unsupported_reason(call, dispatch.AUTO) for row in rows}
    return next(name for name, why in result.items() if why is None), result


def dense(tokens, weight=PACKED, **options):
    return candidates(ops.gemm, torch.ones(tokens, 256).bfloat16(), weight, **options)


def routed(rows, **options):
    weight = quantize(torch.ones(4, 64, 256), scaling="weight").with_layout(FRAGMENTS)
    offsets = torch.tensor([0, 1, 1, rows, rows], dtype=torch.int32)
    x = torch.ones(rows, 256).bfloat16()
    return candidates(ops.grouped_gemm, x, weight, offsets, **options)


@pytest.mark.parametrize(
    ("gpu", "tokens", "chosen"),
    [
        (HOPPER, 1, "cute"),
        (HOPPER, 65, "cute"),
        *((gpu, tokens, "cute") for gpu in (B200, B300) for tokens in (0, 1, 17, 64)),
        *((gpu, tokens, "cublas") for gpu in (B200, B300) for tokens in (65, 4096)),
        *((gpu, tokens, "triton") for gpu in (THOR, ADA) for tokens in (1, 65, 512)),
        *((gpu, 513, "cublas") for gpu in (THOR, ADA, RTX)),
        *((RTX, tokens, name) for tokens, name in ((1, "cute"), (64, "cute"), (65, "triton"))),
    ],
)
@pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
def test_packed_weights(capability, gpu, tokens, chosen, activation):
    capability(gpu)
    assert dense(tokens, activation=activation)[0] == chosen


@pytest.mark.parametrize("gpu", [HOPPER, RTX])
def test_experts_of_a_step_count_that_are_not_in_the_call(capability, gpu):
    """Kernels are chosen for the experts of the step."""
    capability(gpu)
    assert routed(3, step_rows=900, step_experts=MOST_EXPERTS)[0] == "cute"
    chosen, why = routed(3, step_experts=MOST_EXPERTS + 1)
    assert chosen == "triton"
    assert f"there are {MOST_EXPERTS + 1} experts" in why["cute"]


@pytest.mark.parametrize("gpu", [B200, B300])
def test_many_tokens_are_refused_with_a_reason(capability, gpu):
    capability(gpu)
    why = dense(65)[1]["cute"]
    arch = "sm_100a" if gpu == B200 else "sm_103a"
    assert "wanted at most 64" in why
    assert why.endswith(f"that for more is Hopper's, whose wgmma {arch} lacks")


@pytest.mark.parametrize("gpu", [THOR, ADA])
def test_other_gpus_are_refused_with_a_reason(capability, gpu):
    capability(gpu)
    actual = ".".join(map(str, gpu))
    expected = f"compute capability 9.0, 10.0, 10.3, 12.0, 12.1, the GPU has {actual}"
    assert dense(1)[1]["cute"].endswith(expected)
    assert routed(6)[1]["cute"].endswith(expected)
    assert routed(6)[0] == "triton"


@pytest.mark.parametrize("gpu", [HOPPER, B200, B300, RTX])
@pytest.mark.parametrize("rows", [1, 6, 300])
def test_routed_experts(capability, gpu, rows):
    """Blackwell takes the kernel for few rows an expert, whatever their number."""
    capability(gpu)
    assert routed(rows)[0] == "cute"


@pytest.mark.parametrize("gpu", [B200, B300])
@pytest.mark.parametrize(("tokens", "chosen"), [(64, "cute"), (65, "parts")])
def test_swiglu(capability, gpu, tokens, chosen):
    capability(gpu)
    x = torch.ones(tokens, 256).bfloat16()
    assert candidates(ops.gemm_swiglu, x, PACKED, 10.0)[0] == chosen


@pytest.mark.parametrize(
    ("gpu", "layout", "chosen"),
    [
        *((gpu, LINEAR, "scaled_mm") for gpu in (B200, B300)),
        *((gpu, SWIZZLED, "tcgen05") for gpu in (B200, B300)),
        *((HOPPER, layout, "reference") for layout in (LINEAR, SWIZZLED)),
        *((RTX, layout, "fp4") for layout in (LINEAR, SWIZZLED)),
    ],
)
def test_weights_that_are_not_packed(capability, monkeypatch, gpu, layout, chosen):
    capability(gpu)
    monkeypatch.setattr(nvfp4_supports, "triton_version", lambda: "3.9.0")
    weight = WEIGHT.with_layout(layout)
    assert dense(4, weight, activation="nvfp4")[0] == chosen
    dequantized = "triton" if (gpu, layout) == (RTX, SWIZZLED) else "reference"
    assert dense(4, weight)[0] == dequantized, "bfloat16 activations"


def test_experts_that_do_not_fit_are_refused_with_a_reason(capability):
    """8 rows of Pro's 7168 columns need more shared memory than 12.0 has."""
    weight = quantize(torch.ones(2, 32, 7168), scaling="weight").with_layout(FRAGMENTS)
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
    call = (ops.grouped_gemm, torch.ones(2, 7168).bfloat16(), weight, offsets)
    capability(RTX)
    assert (
        candidates(*call)[1]["cute"] == "8 rows of 7168 columns do not fit 99 KB of shared memory"
    )
    capability(HOPPER)
    assert candidates(*call)[0] == "cute"
