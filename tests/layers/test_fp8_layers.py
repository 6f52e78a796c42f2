"""Layers of FP8 activations: what they compute, and which weights they know to be exact in FP8."""

from __future__ import annotations

import copy
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import device as machine
from dsv4 import dispatch, layers
from dsv4.bench.suites.random_model import Weights, random_model
from dsv4.config import ModelConfig
from dsv4.layers import DeepseekV4Experts, Linear, _rounded
from dsv4.layers._rounded import rounded_norm, rounded_once
from dsv4.layers.observer import AmaxObserver
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.exact_fp8 import Exactness, to_e4m3
from dsv4.quant.formats import FRAGMENTS, SWIZZLED, QuantizedTensor, mxfp4_to_nvfp4
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise

CONFIG = ModelConfig.tiny(
    hidden_size=128, moe_intermediate_size=128, n_routed_experts=4, activation="fp8"
)


def cast(seed, rows, columns):
    """NVFP4 as of MXFP4: block scales are powers of two."""
    values = strategies.normal(seed, (rows, columns))
    return mxfp4_to_nvfp4(quantize(values, "mxfp4"))[0]


def linear(seed, rows=32, columns=128, exact=True):
    layer = Linear(columns, rows, activation="fp8").requires_grad_(False)
    weight = quantize(strategies.normal(seed, (rows, columns)), scaling="weight")
    layer.set_weight(cast(seed, rows, columns) if exact else weight)
    return layer


def experts(exact=True, seed=0):
    module = DeepseekV4Experts(CONFIG).requires_grad_(False)
    module.to_format("nvfp4")
    for e in range(4):
        module.set_expert(e, *(cast(seed + 3 * e + i, 128, 128) for i in range(3)))
    if not exact:
        module.down_proj_scale.view(torch.uint8)[2, 5, 1] ^= 1
    return module


class TestLinear:
    @given(seed=strategies.seeds(), exact=st.booleans(), tokens=st.integers(0, 4))
    def test_multiplies_rounded_activations(self, seed, exact, tokens):
        layer = linear(seed, exact=exact)
        x = 3 * strategies.normal(seed, (tokens, 128), torch.float64)
        expected = (
            dequantize(quantize(x, "fp8_token"), torch.float64) @ layer.dense_weight(x.dtype).T
        )
        packed = copy.deepcopy(layer)
        packed.pack()
        for module in (layer, packed):
            assert torch.allclose(module(x), expected, rtol=0, atol=1e-12)

    def test_formats_but_plain_weights_round(self):
        x = strategies.normal(1, (3, 128))
        rounded = dequantize(quantize(x, "fp8_token"))
        for name in ("mxfp4", "fp8_block"):
            layer = Linear(128, 128, activation="fp8").requires_grad_(False)
            layer.quantize(name)
            assert torch.allclose(layer(x), rounded @ layer.dense_weight().T, atol=1e-4)
        plain = Linear(128, 128, activation="fp8").requires_grad_(False)
        assert_bitwise(plain(x), torch.nn.functional.linear(x, plain.weight), "plain")

    def test_packing_finds_what_is_exact(self):
        layer, other = linear(1), linear(1, exact=False)
        assert layer.quantized_weight().row_exponent is None
        for module in (layer, other):
            module.pack()
        weight = layer.quantized_weight()
        assert layer.exactness == Exactness(32 * 8)
        assert_bitwise(layer.weight_exponent, weight.row_exponent, "exponent")
        scale = weight.row_scale().double() * 2.0 ** weight.row_exponent.double()
        values = to_e4m3(weight).double() * scale[:, None]
        assert_bitwise(values, dequantize(weight, torch.float64), "value")
        assert other.quantized_weight().row_exponent is None
        assert other.exactness.no_power
        layer.unpack()
        assert layer.quantized_weight().row_exponent is None
        assert layer.exactness is None
        layer.pack(SWIZZLED)
        assert layer.exactness is layer.weight_exponent is None
        assert "weight_exponent" not in layer.state_dict()

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_fused_weights_keep_the_exponents_of_their_rows(self, interleaved):
        parts = [linear(seed) for seed in (1, 2)]
        parts[1].weight_scale.view(torch.uint8)[7] = 1  # a row of the scale 2^-9
        for layer in parts:
            layer.pack()
        own = [layer.weight_exponent.clone() for layer in parts]
        assert own[1][7] == -1
        assert layers.join_weights(parts, interleaved=interleaved)
        expected = torch.stack(own, 1).flatten() if interleaved else torch.cat(own)
        assert_bitwise(parts[0].fused.whole().row_exponent, expected, "exponent")
        assert parts[0].fused.whole().validate()
        assert parts[0].weight_exponent is None
        if not interleaved:
            assert_bitwise(parts[1].quantized_weight().row_exponent, own[1], "exponent")
        mixed = [linear(1), linear(2, exact=False)]
        for layer in mixed:
            layer.pack()
        assert layers.join_weights(mixed, interleaved=interleaved)
        assert mixed[0].fused.whole().row_exponent is None

    def test_copies_moves_and_casts(self):
        layer = linear(1)
        layer.pack()
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.bfloat16()):
            weight = other.quantized_weight().validate()
            assert_bitwise(weight.row_exponent, layer.weight_exponent, "exponent")
            assert weight.row_exponent.dtype == torch.int8


class TestExperts:
    def test_stacks_qualify_one_by_one(self):
        module = experts(exact=False)
        module.pack()
        assert module.exactness["gate_up_proj"].is_exact
        inexact = Exactness(4 * 128 * 8, no_power=1, by_matrix=(0, 0, 1, 0))
        assert module.exactness["down_proj"] == inexact
        assert inexact.reason == (
            "1 of 4096 block scales are no power of two; 1 of 4 matrices of the stack have such "
            "blocks: 2 (blocks: 1)"
        )
        up, down = (module.quantized_weight(n) for n in ("gate_up_proj", "down_proj"))
        assert up.validate().row_exponent.shape == (4, 256)
        assert down.row_exponent is None
        linear_up = experts(exact=False).quantized_weight("gate_up_proj")
        gates = linear_up.scales.view(torch.uint8).view(4, 2, 128, 8).transpose(1, 2)
        moved = QuantizedTensor(
            up.codes, gates.reshape(4, 256, 8).view(torch.float8_e4m3fn), up.global_scale, up.format
        )
        lowest = moved.scales.double().log2().amin(-1)
        assert_bitwise(up.row_exponent, (lowest + 8).clamp(max=2).to(torch.int8), "exponent")
        module.unpack()
        assert module.gate_up_proj_exponent is None
        assert module.exactness == {}

    @pytest.mark.parametrize("exact", [True, False])
    @pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
    def test_a_packed_bfloat16_layer_passes_codes(self, exact, numerics, monkeypatch):
        """Codes in the order of the weight's; their order changes no bit."""
        module = experts(exact)
        module.numerics = numerics
        module.pack()
        seen = []
        original = layers.experts.grouped_gemm

        def watched(rows, *args, **options):
            seen.append(rows)
            return original(rows, *args, **options)

        monkeypatch.setattr(layers.experts, "grouped_gemm", watched)
        x = strategies.normal(1, (5, 128), torch.bfloat16)
        ids = torch.tensor([[0, 1], [1, 2], [3, 3], [2, 0], [1, 0]])
        weights = torch.rand(5, 2, generator=strategies.generator(1))
        got = module(x, ids, weights)
        [rows] = seen
        assert rows.format.name == "fp8_token"
        assert rows.layout == (FRAGMENTS if exact else "linear")
        module.gate_up_proj_exponent = module.down_proj_exponent = None
        assert_bitwise(module(x, ids, weights), got, "result")
        assert seen[1].layout == "linear"


class TestModel:
    def test_pack_reports_every_quantised_weight(self):
        model = DeepseekV4ForCausalLM(CONFIG).bfloat16().requires_grad_(False)
        layers.quantize_(model, "nvfp4", ["*.mlp.experts"])
        layers.quantize_(model, "fp8_block", ["*.shared_experts.*"])
        report = layers.pack_(model)
        shared = [
            n for n, m in model.named_modules() if getattr(m, "format", None) and "shared" in n
        ]
        assert shared
        assert all(report.fp8[name].is_exact for name in shared)
        stacks = [n for n in report.fp8 if "mlp.experts." in n]
        assert len(stacks) == 2 * (len(model.model.layers) + len(model.mtp))
        assert all(report.fp8[name].no_power for name in stacks)
        assert set(report.fp8) == {*shared, *stacks}

    def test_fp8_is_nearer_to_the_truth_than_nvfp4(self):
        """KL divergence of a random model from float64, whose own noise is that of bfloat16."""
        torch.manual_seed(0)
        model = DeepseekV4ForCausalLM(CONFIG).requires_grad_(False)
        layers.quantize_(model, "nvfp4", ["*.mlp.experts", "*.shared_experts.*"])
        ids = torch.arange(24)[None]
        quantised = [m for m in model.modules() if isinstance(m, (Linear, DeepseekV4Experts))]

        def log_probabilities(candidate, activation, dtype):
            for module in quantised:
                module.activation = activation
            with torch.no_grad():
                return copy.deepcopy(candidate).to(dtype)(ids).double().log_softmax(-1)

        truth = log_probabilities(model, "bf16", torch.float64)
        divergence = {
            activation: float(
                (truth.exp() * (truth - log_probabilities(model, activation, torch.float64)))
                .sum(-1)
                .mean()
            )
            for activation in ("bf16", "fp8", "nvfp4")
        }
        assert divergence["bf16"] == 0 < divergence["fp8"] < divergence["nvfp4"] / 2


class TestMemoryOfConvertedWeights:
    def test_the_largest_weight_counts(self, monkeypatch):
        layer, other, stack = linear(1, rows=64), linear(2, rows=128), experts()
        model = torch.nn.ModuleList([layer, other, stack, linear(3, rows=256, exact=False)])
        device = torch.device("cpu")
        assert layers.reserve.converted_bytes(model) == {}  # nothing is packed
        layers.pack_(model)
        matrix = 2 * 128 * 128  # gate and up of one of four experts
        assert layers.reserve.converted_bytes(model) == {device: 4 * matrix}
        assert layers.reserve.converted_bytes(torch.nn.ModuleList([layer, other])) == {
            device: 128 * 128
        }
        for limit, size in ((3 * matrix + 5, 3 * matrix), (matrix - 1, matrix)):
            monkeypatch.setattr(layers.reserve, "MOST_CONVERTED", limit)
            assert layers.reserve.converted_bytes(stack) == {device: size}

    def test_other_activations_convert_nothing(self):
        layer = linear(1)
        layer.pack()
        layer.activation = "bf16"
        assert layers.reserve.converted_bytes(layer) == {}


class Quantisers:
    """Names of the operators that made FP8 codes of activations."""

    NAMES = ("quantize_fp8_token", "rms_norm_fp8", "swiglu_fp8")

    def __init__(self):
        self.ran = Counter()

    def __call__(self, call, row):
        if call.op in self.NAMES:
            self.ran[call.op] += 1


def by_each_layer(run):
    """Return the result with every layer rounding its own input."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_rounded, "_common_layout", lambda layers, x: None)
        return run()


def shared(run):
    """Return the result, and which operators made codes outside the GEMMs."""
    seen = Quantisers()
    with dispatch.watching(seen), torch.no_grad():
        result = run()
    return result, seen.ran


@pytest.fixture(scope="module", params=["nvfp4", "nvidia"])
def model(request):
    weights = Weights("mxfp4-cast", request.param)
    return random_model(CONFIG.replace(q_lora_rank=128), torch.device("cpu"), weights)


class TestSharedInputs:
    """One rounding for all projections of an input, with the bits of one for each."""

    def test_models_have_equal_bits(self, model):
        ids = torch.arange(19)[None]
        got, ran = shared(lambda: model(ids))
        assert ran["rms_norm_fp8"] == len(model.model.layers)
        assert ran["swiglu_fp8"] == (0 if is_packed(model) else len(model.model.layers))
        # FP8 weights of one input are not fused: its quantiser is shared.
        assert ran["quantize_fp8_token"] == (0 if is_packed(model) else 2 * len(model.model.layers))
        with torch.no_grad():
            assert_bitwise(by_each_layer(lambda: model(ids)), got, "logits")

    def test_a_paged_step_has_equal_bits(self, model):
        def run():
            return model.generate([list(range(19))], max_new_tokens=2)

        got, ran = shared(run)
        assert ran["rms_norm_fp8"]
        assert by_each_layer(run) == got

    @pytest.mark.parametrize("exact", [True, False])
    def test_layouts_that_differ_are_not_shared(self, exact):
        """Weights that are exact take the order of fragments, others the linear one."""
        parts = [linear(1, 16, exact=True), linear(2, 16, exact=exact)]
        for layer in parts:
            layer.pack()
        x = strategies.normal(3, (5, 128), torch.bfloat16)
        codes = rounded_once(x, parts)
        assert isinstance(codes, QuantizedTensor) == exact
        if exact:
            assert codes.layout == FRAGMENTS
            assert_bitwise(parts[1](codes), parts[1](x), "result")

    def test_who_gets_values(self):
        layer, norm = linear(1, 16), layers.DeepseekV4RMSNorm(128).bfloat16().requires_grad_(False)
        x = strategies.normal(3, (2, 5, 128), torch.bfloat16)
        codes = rounded_norm(norm, x, [layer])
        assert codes.shape == (2, 5, 128)
        assert_bitwise(layer(codes), layer(norm(x)), "result")
        wide = copy.deepcopy(norm).float()
        assert isinstance(rounded_norm(wide, x.float(), [layer]), torch.Tensor)
        for change in ("activation", "observer", "hook", "class", "format", "norm"):
            other, its_norm = copy.deepcopy(layer), copy.deepcopy(norm)
            if change == "activation":
                other.activation = "bf16"
            elif change == "observer":
                other.observer = AmaxObserver()
            elif change == "class":
                other.__class__ = type("Theirs", (Linear,), {})
            elif change == "format":
                other.set_weight(other.dense_weight(torch.bfloat16))
            else:
                watched = other if change == "hook" else its_norm
                watched.register_forward_hook(lambda *_: None)
            got = rounded_norm(its_norm, x, [layer, other])
            assert isinstance(got, torch.Tensor), change
            assert_bitwise(got, norm(x), change)

    @pytest.mark.parametrize("change", ["activation", "observer", "format"])
    def test_a_layer_that_wants_values_refuses_codes(self, change):
        layer = linear(1, 16)
        codes = quantize(strategies.normal(3, (5, 128)), "fp8_token")
        if change == "activation":
            layer.activation = "nvfp4"
        elif change == "observer":
            layer.observer = AmaxObserver()
        else:
            layer.set_weight(layer.dense_weight())
        with pytest.raises(ValueError, match="x is in 'fp8_token' and the layer is "):
            layer(codes)

    @pytest.mark.parametrize("recipe", ["nvfp4", "nvidia"])
    def test_kernels_have_equal_bits(self, recipe):
        """In Triton's interpreter: the shared expert, and the projections of queries."""
        config = CONFIG.replace(
            q_lora_rank=128,
            num_hidden_layers=2,
            layer_types=CONFIG.layer_types[:2],
            mlp_layer_types=CONFIG.mlp_layer_types[:2],
        )
        model = random_model(config, torch.device("cpu"), Weights("mxfp4-cast", recipe))
        block, x = model.model.layers[1], strategies.normal(3, (5, 128), torch.bfloat16)

        def run():
            residual, kv = block.self_attn._down(x)
            queries = block.self_attn.q_b_proj(residual)
            index = block.self_attn.compressor.index_queries(residual)
            return torch.cat([kv, queries, index.flatten(1), block.mlp.shared_experts(x)], 1)

        with machine.interpret_triton(), torch.no_grad():
            got, ran = shared(run)
            assert ran["rms_norm_fp8"] == 1
            assert_bitwise(by_each_layer(run), got, "results")


def is_packed(model):
    return model.model.layers[0].self_attn.q_b_proj.layout == FRAGMENTS
