"""Linear layers in vLLM's model: bitwise this package's ``Linear``, whatever a rank holds."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsv4.layers.linear import DeepseekV4GroupedLinear, Linear
from dsv4.ops.quantize import quantize
from dsv4.quant.formats import FP8_BLOCK, NVFP4, QuantizedTensor, cat_rows
from dsv4.testing.assertions import assert_bitwise

pytest.importorskip("vllm", reason="vLLM 0.33 is not installed; make test-vllm has it")

from vllm.model_executor import parameter
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

from dsv4.integrations.vllm import linear as adopted
from dsv4.integrations.vllm.report import Row
from tests.integrations.vllm import build

pytestmark = pytest.mark.usefixtures("vllm_world")
NAME = "model.layers.0.attn.wq_b"
BF16_OPTIONS = {"bias": False, "params_dtype": torch.bfloat16}


class Attention(nn.Module):
    """The owner of a layer, as vLLM has it."""


def quant_config(format, scale_dtype=torch.float8_e8m0fnu):
    if format == NVFP4:
        return ModelOptNvFp4Config("NVFP4", True, None, [], 16)
    return build.v4_quant_config(expert_dtype="fp4" if scale_dtype != torch.float32 else "fp8")


def built(kind, *sizes, **options):
    with build.kernels():
        return kind(*sizes, prefix=NAME, **BF16_OPTIONS, **options)


def matrix(generator, rows, columns, format, scale_dtype):
    size = 2.0 ** torch.randint(-3, 4, (1,), generator=generator).item()
    weight = size * torch.randn(rows, columns, generator=generator)
    value = quantize(weight, format)
    if format == FP8_BLOCK and scale_dtype == torch.float32:
        noise = 1 + torch.rand(value.scales.shape, generator=generator)
        return QuantizedTensor(value.codes, value.scales.float() * noise, None, FP8_BLOCK)
    return value


def tensors_of(value):
    """By the names of vLLM's parameters."""
    if value.format == FP8_BLOCK:
        return {"weight": value.codes, "weight_scale_inv": value.scales}
    return {
        "weight": value.codes,
        "weight_scale": value.scales,
        "weight_scale_2": value.global_scale.reshape(()),
    }


def load(layer, parts):
    for shard, value in enumerate(parts):
        for name, tensor in tensors_of(value).items():
            param = getattr(layer, name)
            arguments = (shard,) if len(parts) > 1 else ()
            param.weight_loader(param, tensor, *arguments)


def owned(layer, owner=None):
    """A model in which ``owner`` has the layer."""
    model = build.in_model(nn.Identity() if owner is None else owner, NAME.rpartition(".")[0])
    model.get_submodule(NAME.rpartition(".")[0]).add_module("wq_b", layer)
    return model


def part(value, dim, number, count):
    """A rank's rows (dim 0) or columns (dim 1)."""
    codes, scales = (
        t.view(torch.uint8).chunk(count, dim)[number].contiguous().view(t.dtype)
        if t.element_size() == 1
        else t.chunk(count, dim)[number].contiguous()
        for t in (value.codes, value.scales)
    )
    return QuantizedTensor(codes, scales, value.global_scale, value.format)


@contextmanager
def rank(number, count):
    """A process of a tensor-parallel group, while layers are built."""
    with ExitStack() as stack:
        for module in (vllm_linear, parameter):
            for name, value in (("rank", number), ("world_size", count)):
                target = f"get_tensor_model_parallel_{name}"
                stack.enter_context(mock.patch.object(module, target, lambda v=value: v))
        yield


def processed(layer, context=None):
    context = build.context() if context is None else context
    adopted.adopt(owned(layer), context)
    return context


FORMATS = pytest.mark.parametrize(
    ("format", "scale_dtype"),
    [
        (FP8_BLOCK, torch.float8_e8m0fnu),
        (FP8_BLOCK, torch.float32),
        (NVFP4, torch.float8_e4m3fn),
    ],
    ids=["FP8, powers of two", "FP8, float32 scales", "NVFP4"],
)


@FORMATS
@given(
    widths=st.lists(st.sampled_from([128, 256]), min_size=1, max_size=2),
    columns=st.sampled_from([128, 256]),
    number=st.integers(0, 1),
    count=st.integers(1, 2),
    by_rows=st.booleans(),
    tokens=st.integers(0, 4),
    seed=st.integers(0, 999),
)
@settings(max_examples=15)
def test_layers_are_bitwise_linear(
    format, scale_dtype, widths, columns, number, count, by_rows, tokens, seed
):
    number = min(number, count - 1)
    config = quant_config(format, scale_dtype)
    options = {"quant_config": config}
    if not by_rows:
        widths, columns = widths[:1], columns * count
        kind, sizes = RowParallelLinear, (columns, widths[0])
        options["reduce_results"] = False
    else:
        widths = [width * count for width in widths]
        kind = ColumnParallelLinear if len(widths) == 1 else MergedColumnParallelLinear
        sizes = (columns, widths[0] if len(widths) == 1 else widths)
    with rank(number, count):
        layer = built(kind, *sizes, **options)
    generator = torch.Generator().manual_seed(seed)
    parts = [matrix(generator, width, columns, format, scale_dtype) for width in widths]
    context = processed(layer)
    load(layer, parts)
    codes = layer.weight.data_ptr()
    layer.quant_method.process_weights_after_loading(layer)
    (row,) = context.report.rows
    assert row.replaced
    assert layer.dsv4_linear.weight.data_ptr() == codes  # not copied

    own = [part(value, 0 if by_rows else 1, number, count) for value in parts]
    whole = cat_rows(own) if len(own) > 1 else own[0]
    if whole.segments:
        whole = QuantizedTensor(whole.codes, whole.scales, whole.row_scale(), format)
    expected = Linear(whole.columns, whole.rows)
    expected.set_weight(whole)
    x = torch.randn(tokens, whole.columns, generator=generator).to(torch.bfloat16)
    mine = layer.quant_method.apply(layer, x)
    assert mine.dtype == torch.bfloat16
    assert_bitwise(mine, expected(x))


def test_fused_nvfp4_matrices_with_one_global_scale_have_one():
    config = quant_config(NVFP4)
    layer = built(MergedColumnParallelLinear, 128, [128, 64], quant_config=config, disable_tp=True)
    generator = torch.Generator().manual_seed(1)
    whole = quantize(torch.randn(192, 128, generator=generator), NVFP4)
    parts = [
        QuantizedTensor(whole.codes[rows], whole.scales[rows], whole.global_scale, NVFP4)
        for rows in (slice(0, 128), slice(128, 192))
    ]
    processed(layer)
    load(layer, parts)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.dsv4_linear.weight_scale_2.shape == (1,)


class Adopted(Attention):
    """An attention whose projections this package multiplies."""


Adopted.__module__ = "dsv4.integrations.vllm.attention"


def grouped(owner):
    config = quant_config(FP8_BLOCK)
    layer = built(ColumnParallelLinear, 128, 512, quant_config=config, return_bias=False)
    layer.is_bmm, layer.bmm_batch_size = True, 2
    context = build.context()
    adopted.adopt(owned(layer, owner), context)
    value = matrix(torch.Generator().manual_seed(3), 512, 128, FP8_BLOCK, torch.float8_e8m0fnu)
    load(layer, [value])
    layer.quant_method.process_weights_after_loading(layer)
    return layer, value, context


def test_wo_a_is_a_grouped_linear_if_the_attention_is_replaced():
    layer, value, context = grouped(Adopted())
    assert context.report.complete
    expected = DeepseekV4GroupedLinear(128, 512, 2)
    expected.set_weight(value)
    x = torch.randn(3, 2, 128).to(torch.bfloat16)
    assert_bitwise(layer.dsv4_linear(x), expected(x))
    with pytest.raises(ValueError, match="called with a grouped weight"):
        layer.quant_method.apply(layer, x)


def test_wo_a_stays_vllm_s_if_the_attention_does():
    layer, _, context = grouped(Attention())
    (row,) = context.report.rows
    assert row.reason == "Attention multiplies it itself; the part attention replaces that"
    assert type(layer.quant_method) is adopted.Fp8LinearMethod
    assert layer.quant_method.fp8_linear.processed == 1  # vLLM's own processing ran
    assert not hasattr(layer, "dsv4_linear")


def test_what_cannot_be_replaced_is_left_with_its_reason(monkeypatch):
    def reason(change, format=FP8_BLOCK, columns=128):
        layer = built(ColumnParallelLinear, columns, 128, quant_config=quant_config(format))
        change(layer)
        context = processed(layer)
        (row,) = context.report.rows
        assert row.kernel == type(layer.quant_method).__name__
        assert not row.kernel.startswith("Dsv4")
        return row.reason

    assert reason(lambda x: setattr(x, "params_dtype", torch.float16)) == (
        "the model computes in torch.float16, wanted torch.bfloat16"
    )
    assert "[1, 128]" in reason(lambda x: setattr(x, "weight_block_size", [1, 128]))
    assert "[64, 64] rows" in reason(lambda x: setattr(x, "logical_widths", [64, 64]))
    assert "128 x 96 per rank" in reason(lambda x: None, NVFP4, 96)
    other = SimpleNamespace(weight="fp8", activation=None)
    assert "neither FP8" in reason(lambda x: setattr(x.quant_method, "spec", other), NVFP4)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert reason(lambda x: None) == "VLLM_BATCH_INVARIANT=1 asks for vLLM's own kernels"


def test_a_layer_takes_no_bias_and_no_quantised_inputs():
    layer = built(ColumnParallelLinear, 128, 128, quant_config=quant_config(NVFP4))
    layer._input_quant_key = mock.sentinel.key
    processed(layer)
    assert not hasattr(layer, "_input_quant_key")
    with pytest.raises(ValueError, match="called with a bias"):
        layer.quant_method.apply(layer, torch.zeros(1, 128), torch.zeros(128))


def test_plain_layers_are_not_asked_for():
    layer = built(ColumnParallelLinear, 128, 128)
    report = processed(layer).report
    (row,) = report.rows
    assert row == Row("linear", NAME, "UnquantizedLinearMethod", row.reason, asked=False)
    assert row.reason == "the weight is not quantised"
    assert not report.complete, "nothing was replaced"


def test_a_layer_with_another_method_is_refused():
    layer = built(ColumnParallelLinear, 128, 128, quant_config=quant_config(FP8_BLOCK))
    layer.quant_method = OtherMethod()
    report = processed(layer).report
    (row,) = report.rows
    assert row.kernel == "OtherMethod"
    assert row.reason == "its weight is neither FP8 with scales of 128 x 128 blocks nor NVFP4"
    assert report.refused


class OtherMethod(vllm_linear.LinearMethodBase):
    """A method for a format that this package does not know."""

    def create_weights(self, *args, **options):
        """Make nothing."""

    def apply(self, *args):
        """Multiply nothing."""
