"""vLLM's ``wo_a`` on this package's GEMM, in every form that it may have after loading."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dsv4.ops.quantize import dequantize, quantize
from dsv4.testing.assertions import assert_bitwise, assert_within_budget
from dsv4.testing.strategies import normal

pytest.importorskip("vllm", reason="vLLM is not installed")

from dsv4.integrations.vllm.o_projection import grouped_projection

GROUPS, ROWS, COLUMNS = 2, 128, 256


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    x = normal(0, (3, GROUPS, COLUMNS)).to(torch.bfloat16)
    return x, normal(1, (GROUPS * ROWS, COLUMNS)).to(torch.bfloat16)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    grouped = weight.double().view(GROUPS, ROWS, COLUMNS)
    return torch.einsum("tgk,gnk->tgn", x.double(), grouped)


@pytest.mark.parametrize("dims", [2, 3])
def test_plain_weights(dims):
    x, weight = inputs()
    shape = (GROUPS, ROWS, COLUMNS) if dims == 3 else weight.shape
    project = grouped_projection(SimpleNamespace(weight=weight.view(shape)), GROUPS)
    truth = product(x, weight)
    assert_within_budget(project(x), truth, 2.0**-7 * truth.abs().amax())


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("scales", [torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("dims", [2, 3])
def test_fp8_weights_as_vllm_has_them_on_hopper(dims, scales, name):
    """``[groups * rows, in]`` as loaded, or ``[groups, rows, in]`` for its einsum."""
    x, weight = inputs()
    value = quantize(weight, "fp8_block", scale_dtype=scales)
    codes, blocks = value.codes, value.scales
    if dims == 3:
        codes, blocks = codes.view(GROUPS, ROWS, COLUMNS), blocks.view(GROUPS, 1, 2)
    module = SimpleNamespace(weight=codes, **{name: blocks})
    truth = product(x, dequantize(value, torch.float64))
    result = grouped_projection(module, GROUPS)(x)
    assert_within_budget(result, truth, 2.0**-7 * truth.abs().amax())


def test_a_layer_of_the_linear_part_is_used():
    x, weight = inputs()
    module = SimpleNamespace(weight=weight, dsv4_linear=lambda y: y + 1)
    assert_bitwise(grouped_projection(module, GROUPS)(x), x + 1)


@pytest.mark.parametrize(
    "module",
    [
        SimpleNamespace(weight=torch.zeros(256, 128, dtype=torch.uint8)),
        SimpleNamespace(weight=torch.zeros(256, 128).to(torch.float8_e4m3fn)),
        SimpleNamespace(
            weight=torch.zeros(256, 128).to(torch.float8_e4m3fn),
            weight_scale_inv=torch.zeros(256, 1, dtype=torch.int32),
        ),
    ],
)
def test_other_forms_are_refused(module):
    with pytest.raises(ValueError, match=r"wo_a has a weight of .* add 'linear' to DSV4_VLLM"):
        grouped_projection(module, GROUPS)
