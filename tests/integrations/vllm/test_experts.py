"""Routed experts in vLLM's layers: bitwise this package's module, whatever a rank holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.config import ModelConfig
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.ops.quantize import quantize
from dsv4.quant.formats import MXFP4, NVFP4, QuantizedTensor, mxfp4_to_nvfp4
from dsv4.testing.assertions import assert_bitwise

pytest.importorskip("vllm", reason="vLLM 0.33 is not installed; make test-vllm has it")

from dsv4.integrations.vllm import experts as adopted
from tests.integrations.vllm import build
from tests.integrations.vllm.build import NAME, Rank

pytestmark = pytest.mark.usefixtures("vllm_world")
PROJECTIONS = ("w1", "w3", "w2")


def matrices(seed, experts, hidden, inner, format):
    """An expert's three matrices, each with scales of its own, by the names of a checkpoint."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, columns):
        size = 2.0 ** torch.randint(-3, 4, (1,), generator=generator).item()
        return quantize(size * torch.randn(rows, columns, generator=generator), format)

    return [
        {
            "w1": matrix(inner, hidden),
            "w3": matrix(inner, hidden),
            "w2": matrix(hidden, inner),
        }
        for _ in range(experts)
    ]


def load(layer, weights):
    """Load as ``DeepseekV4Model.load_weights`` does; other ranks' experts are refused there."""
    for expert, named in enumerate(weights):
        for projection, value in named.items():
            stack = "w2_" if projection == "w2" else "w13_"
            tensors = {"weight": value.codes, "weight_scale": value.scales}
            if value.global_scale is not None:
                tensors["weight_scale_2"] = value.global_scale
            for suffix, tensor in tensors.items():
                if tensor.dtype == torch.float8_e8m0fnu:
                    tensor = tensor.view(torch.uint8)
                param = getattr(layer, stack + suffix)
                name = f"{NAME}.{stack}{suffix}"
                param.weight_loader(param, tensor, name, projection, expert, return_success=True)


def local(value, projection, rank):
    """The columns of w2, or the rows of w1 and w3, of a rank."""
    if rank.expert_parallel or rank.count == 1:
        return value

    def part(tensor, dim):
        size = tensor.shape[dim] // rank.count
        return tensor.narrow(dim, rank.number * size, size).contiguous()

    dim = 1 if projection == "w2" else 0
    scales = part(value.scales.view(torch.uint8), dim).view(value.scales.dtype)
    return replace(value, codes=part(value.codes, dim), scales=scales)


def own_module(weights, config, rank, held):
    """``DeepseekV4Experts`` of a rank, filled expert by expert."""
    module = DeepseekV4Experts(config, *held)
    module.to_format("nvfp4")
    for slot in range(held[1]):
        named = weights[held[0] + slot]
        parts = [local(named[p], p, rank) for p in PROJECTIONS]
        nvfp4 = [mxfp4_to_nvfp4(p)[0] if p.format == MXFP4 else p for p in parts]
        module.set_expert(slot, *nvfp4)
    return module.requires_grad_(False).eval()


@st.composite
def ranks(draw):
    count = draw(st.integers(1, 3))
    return Rank(draw(st.integers(0, count - 1)), count, draw(st.booleans()))


@pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=["NVIDIA's NVFP4", "DeepSeek's MXFP4"])
@given(
    rank=ranks(),
    experts=st.integers(3, 5),
    top_k=st.integers(1, 3),
    hidden=st.sampled_from([64, 128]),
    tokens=st.integers(0, 5),
    seed=st.integers(0, 999),
)
@settings(max_examples=15)
def test_experts_are_bitwise_the_module_s(format, rank, experts, top_k, hidden, tokens, seed):
    inner = 64 * (1 if rank.expert_parallel else rank.count)
    algorithm = "NVFP4" if format == NVFP4 else ""
    layer = build.experts_layer(experts, top_k, hidden, inner, rank, algorithm)
    context = build.context(parts=frozenset({"experts"}))
    adopted.adopt(build.in_model(layer), context)
    weights = matrices(seed, experts, hidden, inner, format)
    load(layer, weights)
    codes = layer.w13_weight.data_ptr()
    layer.quant_method.process_weights_after_loading(layer)
    assert [row.replaced for row in context.report.rows] == [True], str(context.report)
    assert layer.dsv4_experts.gate_up_proj.data_ptr() == codes  # not copied
    assert not [name for name, _ in layer.named_parameters(recurse=False)]

    config = ModelConfig.tiny().replace(
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        hidden_size=hidden,
        moe_intermediate_size=64,
        swiglu_limit=build.LIMIT,
    )
    held = adopted.expert_range(layer)
    own = own_module(weights, config, rank, held)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k]
    routing = torch.rand(tokens, top_k, generator=generator)
    mine = layer.forward_modular(x, routing, ids.to(torch.int32))
    assert mine.dtype == torch.bfloat16
    assert_bitwise(mine, own(x, ids, routing))
    assert layer.quant_method.get_fused_moe_quant_config(layer) is None
    assert not layer.quant_method.is_monolithic


@given(st.integers(1, 5), st.integers(1, 12))
def test_ranges_of_ranks_are_those_of_vllm(count, experts):
    group = [Rank(number, min(count, experts), True) for number in range(min(count, experts))]
    layers = [build.experts_layer(experts, 1, 64, 64, rank) for rank in group]
    held = [adopted.expert_range(layer) for layer in layers]
    assert [e for first, size in held for e in range(first, first + size)] == list(range(experts))


def test_mxfp4_that_nvfp4_cannot_hold_goes_back_to_vllm(monkeypatch):
    layer = build.experts_layer(3, 1, 64, 64, moe_quant_algo="")
    context = build.context()
    adopted.adopt(build.in_model(layer), context)
    weights = matrices(1, 3, 64, 64, MXFP4)
    scales = weights[2]["w3"].scales.view(torch.uint8)
    scales[0, 0], scales[1, 0] = 90, 140
    load(layer, weights)
    before = {name: p.clone() for name, p in layer.named_parameters()}
    calls = []
    monkeypatch.setattr(
        adopted.Mxfp4MoEMethod,
        "process_weights_after_loading",
        lambda self, layer: calls.append(layer),
    )
    layer.quant_method.process_weights_after_loading(layer)
    assert calls == [layer]
    assert type(layer.quant_method) is adopted.Mxfp4MoEMethod
    (row,) = context.report.rows
    assert row.kernel == "Mxfp4MoEMethod"
    assert "too far apart" in row.reason
    for name, p in layer.named_parameters():
        assert torch.equal(p.data, before[name])


def test_mxfp4_codes_that_change_keep_their_values():
    layer = build.experts_layer(3, 1, 64, 64, moe_quant_algo="")
    adopted.adopt(build.in_model(layer), build.context())
    weights = matrices(1, 3, 64, 64, MXFP4)
    down = weights[1]["w2"]
    down.codes.fill_(0x44)  # 2.0
    scales = down.scales.view(torch.uint8)
    scales.fill_(120)
    scales[3, 1] = 120 - 18  # 2^-18 of the largest: codes of half the value, at 2^-17
    load(layer, weights)
    layer.quant_method.process_weights_after_loading(layer)
    _, _, own = layer.dsv4_experts.get_expert(1)
    expected, report = mxfp4_to_nvfp4(QuantizedTensor(down.codes, down.scales, None, MXFP4))
    assert report.exact
    assert not torch.equal(expected.codes, down.codes)
    assert torch.equal(own.codes, expected.codes)
    assert torch.equal(own.scales.view(torch.uint8), expected.scales.view(torch.uint8))


@pytest.mark.parametrize(
    ("rank", "options", "sizes", "reason"),
    [
        (Rank(0, 1, True, eplb=True), {}, (64, 64), "EPLB moves experts"),
        (Rank(), {"swiglu_limit": None}, (64, 64), "SwiGLU is not clamped"),
        (Rank(), {"swiglu_alpha": 1.7}, (64, 64), "SwiGLU is not clamped"),
        (Rank(), {"is_lora_enabled": True}, (64, 64), "LoRA needs vLLM's own experts"),
        (Rank(), {"apply_router_weight_on_input": True}, (64, 64), "multiply the inputs"),
        (Rank(), {}, (64, 32), "a matrix is 64 x 32 per rank, no multiple of 16 x 64"),
        (
            Rank(0, 2, True, all2all="flashinfer_nvlink_two_sided", data_parallel=2),
            {},
            (64, 64),
            "all2all_backend flashinfer_nvlink_two_sided needs a kernel",
        ),
    ],
)
def test_what_cannot_be_replaced_is_left_with_its_reason(rank, options, sizes, reason):
    if rank.eplb:
        layer = build.experts_layer(4, 2, *sizes)
        layer.moe_config.moe_parallel_config.enable_eplb = True
    else:
        layer = build.experts_layer(4, 2, *sizes, rank, **options)
    context, method = build.context(), type(layer.quant_method)
    adopted.adopt(build.in_model(layer), context)
    (row,) = context.report.rows
    assert (row.place, row.kernel) == (NAME, "ModelOptNvFp4FusedMoE")
    assert reason in row.reason
    assert type(layer.quant_method) is method


def test_experts_of_another_format_are_left():
    layer = build.experts_layer(4, 2, 64, 64)
    layer.quant_method.__class__ = type("Other", (type(layer.quant_method),), {})
    context = build.context()
    adopted.adopt(build.in_model(layer), context)
    assert "neither NVFP4 nor MXFP4" in context.report.rows[0].reason
