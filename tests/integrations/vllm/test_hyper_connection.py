"""Hyper-connections and norms in vLLM's model: bitwise dsv4's layers, vLLM's own forward around."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsv4.config import ModelConfig
from dsv4.layers import decoder
from dsv4.layers.norm import DeepseekV4RMSNorm
from dsv4.ops.hyper_connection import hc_head, hc_post, hc_post_pre_norm, hc_pre_norm
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise, assert_within_budget

pytest.importorskip("vllm", reason="vLLM 0.33 is not installed; make test-vllm has it")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import override_forward_context
from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_torch
from vllm.model_executor.layers.activation import SiluAndMulWithClamp
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.models.deepseek_v4.nvidia import model as vllm_model
from vllm.sequence import IntermediateTensors

from dsv4.integrations.vllm import hyper_connection, norm, places
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.switches import Switches

STREAMS, HIDDEN, EPS, HC_EPS, ITERATIONS = 4, 64, 1e-6, 1e-6, 20
ROWS = (2 + STREAMS) * STREAMS


class Attention(nn.Module):
    """Stands for a sublayer: another function in each layer, of the token's position, too."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, positions, x, scaling=None):
        assert scaling is None
        return (x.float() * self.number + positions.unsqueeze(-1) * 0.125).to(x.dtype)


class Experts(nn.Module):
    use_native_mega_moe = False

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x, input_ids, mega_gate_metadata=None):
        assert mega_gate_metadata is None
        return (x.float() * self.number + (input_ids % 3).unsqueeze(-1)).to(x.dtype)


@pytest.fixture(autouse=True)
def _config():
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture(autouse=True)
def group(monkeypatch):
    """The pipeline stages that a model asks; both vLLM's module and ours."""
    group = types.SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(vllm_model, "get_pp_group", lambda: group)
    monkeypatch.setattr(hyper_connection, "get_pp_group", lambda: group)
    return group


def parameters(generator, rows):
    """``fn``, ``scale`` and ``base`` with logits of a few units."""
    fn = torch.randn(rows, STREAMS * HIDDEN, generator=generator) / 8
    scale = torch.rand(1 if rows == STREAMS else 3, generator=generator) + 0.5
    return fn, scale, torch.randn(rows, generator=generator)


def vllm_norm(generator, width=HIDDEN):
    made = RMSNorm(width, EPS, dtype=torch.bfloat16)
    made.weight.data = (torch.rand(width, generator=generator) + 0.5).bfloat16()
    return made


def vllm_layer(generator):
    """vLLM's layer without its constructor, which needs a device and weights."""
    layer = vllm_model.DeepseekV4DecoderLayer.__new__(vllm_model.DeepseekV4DecoderLayer)
    nn.Module.__init__(layer)
    numbers = torch.rand(2, generator=generator).tolist()
    layer.attn, layer.ffn = Attention(numbers[0]), Experts(numbers[1])
    layer.attn_norm, layer.ffn_norm = vllm_norm(generator), vllm_norm(generator)
    layer.hidden_size, layer.use_sequence_parallel, layer.rms_norm_eps = HIDDEN, False, EPS
    layer.hc_mult, layer.hc_sinkhorn_iters, layer.hc_eps = STREAMS, ITERATIONS, HC_EPS
    layer.hc_post_alpha = 2.0
    for sublayer in ("attn", "ffn"):
        for name, value in zip(("fn", "scale", "base"), parameters(generator, ROWS), strict=True):
            setattr(layer, f"hc_{sublayer}_{name}", nn.Parameter(value, requires_grad=False))
    layer.hc_attn_fn_broadcast = layer.hc_attn_fn.view(-1, STREAMS, HIDDEN).sum(1)
    return layer


def vllm_stack(generator, layers=3, mtp=False):
    """vLLM's model of some layers, likewise."""
    model = vllm_model.DeepseekV4Model.__new__(vllm_model.DeepseekV4Model)
    nn.Module.__init__(model)
    model.config = types.SimpleNamespace(hidden_size=HIDDEN)
    model.use_native_mega_moe = model.use_sequence_parallel = False
    model.hc_mult, model.hc_dim = STREAMS, STREAMS * HIDDEN
    model.hc_eps, model.rms_norm_eps = HC_EPS, EPS
    model.embed_tokens = nn.Embedding(50, HIDDEN, dtype=torch.bfloat16)
    model.embed_tokens.weight.data = torch.randn(50, HIDDEN, generator=generator).bfloat16()
    model.layers = nn.ModuleList(vllm_layer(generator) for _ in range(layers))
    model.start_layer, model.end_layer, model.has_local_hash_moe = 0, layers, False
    model.norm = vllm_norm(generator)
    for name, value in zip(("fn", "scale", "base"), parameters(generator, STREAMS), strict=True):
        setattr(model, f"hc_head_{name}", nn.Parameter(value, requires_grad=False))
    model._mtp_hidden_buffer = None
    if mtp:
        model._mtp_hidden_buffer = torch.zeros(16, STREAMS * HIDDEN, dtype=torch.bfloat16)
    return model.requires_grad_(False)


def adopted(model, *modules):
    context = Adoption(None, Switches())
    for module in modules or (hyper_connection,):
        module.adopt(model, context)
    return context.report


def inputs(generator, tokens):
    ids = torch.randint(0, 50, (tokens,), generator=generator)
    return ids, torch.randint(0, 9, (tokens,), generator=generator)


def dsv4_layer(layer):
    """This package's decoder layer with the parameters and sublayers of vLLM's."""
    config = ModelConfig.tiny(
        hidden_size=HIDDEN,
        hc_mult=STREAMS,
        hc_sinkhorn_iters=ITERATIONS,
        hc_eps=HC_EPS,
        rms_norm_eps=EPS,
        numerics="deepseek",
    )
    made = decoder.DeepseekV4DecoderLayer(config, 0).requires_grad_(False)
    for ours, sublayer in ((made.attn_hc, "attn"), (made.ffn_hc, "ffn")):
        for name in ("fn", "scale", "base"):
            setattr(ours, name, getattr(layer, f"hc_{sublayer}_{name}"))
    for ours, theirs in (
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ):
        replaced = DeepseekV4RMSNorm(HIDDEN, EPS).requires_grad_(False)
        replaced.weight = getattr(layer, theirs).weight
        setattr(made, ours, replaced)
    return made


class AttentionOf(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x, position_ids=None, **options):
        return self.attention(position_ids[0], x[0])[None], None


class ExpertsOf(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, input_ids=None):
        return self.experts(x[0], input_ids[0])[None]


class TestThisPackagesArithmetic:
    """First layer, middle layers, last layer and head, against ``dsv4.layers``, bitwise."""

    @given(seed=strategies.seeds(), layers=st.integers(1, 3), tokens=st.integers(0, 5))
    @settings(max_examples=20)
    def test_a_stack_is_this_packages_layers(self, seed, layers, tokens):
        generator = strategies.generator(seed)
        model = vllm_stack(generator, layers, mtp=True)
        ids, positions = inputs(generator, tokens)
        ours = [dsv4_layer(layer) for layer in model.layers]
        for made, layer in zip(ours, model.layers, strict=True):
            made.self_attn, made.mlp = AttentionOf(layer.attn), ExpertsOf(layer.ffn)
        adopted(model, hyper_connection, norm)
        got = model(ids, positions, None)

        embedded = model.embed_tokens(ids)
        streams = embedded[None, :, None].expand(1, tokens, STREAMS, HIDDEN).contiguous()
        for made in ours:
            streams = made(streams, ids[None], position_ids=positions[None])
        head = model.hc_head_fn, model.hc_head_scale, model.hc_head_base
        hidden = hc_head(streams[0], *head, norm_eps=EPS, hc_eps=HC_EPS)
        final = DeepseekV4RMSNorm(HIDDEN, EPS)
        final.weight = model.norm.weight
        assert_bitwise(got, final(hidden), "hidden states")
        buffer = model._mtp_hidden_buffer
        assert_bitwise(buffer[:tokens], streams[0].flatten(1), "streams for the draft")
        assert not buffer[tokens:].any()


def by_this_package(monkeypatch):
    """Let vLLM's own ``forward`` call this package's operators in place of its kernels."""

    def pre(residual, fn, scale, base, rms_eps, eps, sinkhorn_eps, alpha, iterations, *,
            norm_weight, norm_eps):  # fmt: skip
        assert (rms_eps, eps, alpha) == (norm_eps, sinkhorn_eps, 2.0)
        options = {"norm_eps": rms_eps, "hc_eps": eps, "iterations": iterations}
        x, post, comb = hc_pre_norm(residual, fn, scale, base, norm_weight, **options)
        return post.unsqueeze(-1), comb, x

    def broadcast(x, *args, fn_broadcast, **options):
        assert fn_broadcast.shape == (ROWS, HIDDEN)
        streams = x[:, None].repeat(1, STREAMS, 1)
        return streams, *pre(streams, *args, **options)

    def post_pre(x, residual, post, comb, fn, scale, base, rms_eps, eps, sinkhorn_eps, alpha,
                 iterations, *, n_splits, tile_n, norm_weight, norm_eps):  # fmt: skip
        options = {"norm_eps": rms_eps, "hc_eps": eps, "iterations": iterations}
        streams, x, post, comb = hc_post_pre_norm(
            x, residual, post[..., 0], comb, fn, scale, base, norm_weight, **options
        )
        return streams, post.unsqueeze(-1), comb, x

    monkeypatch.setattr(vllm_model, "mhc_pre_tilelang", pre)
    monkeypatch.setattr(vllm_model, "mhc_pre_broadcast_tilelang", broadcast)
    monkeypatch.setattr(vllm_model, "mhc_fused_post_pre_tilelang", post_pre)
    monkeypatch.setattr(
        vllm_model, "mhc_post_tilelang", lambda x, streams, p, c: hc_post(x, streams, p[..., 0], c)
    )
    monkeypatch.setattr(
        vllm_model,
        "hc_head_fused_kernel_tilelang",
        lambda x, fn, scale, base, norm_eps, hc_eps: hc_head(
            x, fn, scale, base, norm_eps=norm_eps, hc_eps=hc_eps
        ),
    )


def assert_same(got, expected):
    """Outputs of a model: a tensor, a tensor and auxiliary ones, or those of a pipeline stage."""
    assert type(got) is type(expected)
    if isinstance(got, IntermediateTensors):
        assert list(got.tensors) == list(expected.tensors)
        got, expected = list(got.tensors.values()), list(expected.tensors.values())
    if isinstance(got, torch.Tensor):
        got, expected = [got], [expected]
    if isinstance(got, tuple):
        got, expected = [got[0], *got[1]], [expected[0], *expected[1]]
    assert len(got) == len(expected)
    for result, oracle in zip(got, expected, strict=True):
        assert_bitwise(result, oracle, "output")


class TestVllmsForward:
    """vLLM's own ``forward``, calling this package's operators, does what ours does, bitwise."""

    def both(self, monkeypatch, seed, run, **options):
        results, buffers = [], []
        for own in (True, False):
            generator = strategies.generator(seed)
            model = vllm_stack(generator, **options)
            if own:
                by_this_package(monkeypatch)
            else:
                assert adopted(model).complete
                monkeypatch.undo()  # whatever vLLM's names are now, ours do not call them
            with monkeypatch.context() as patch:
                for module in (vllm_model, hyper_connection):
                    patch.setattr(module, "get_pp_group", lambda: self.group)
                results.append(run(model, generator))
            buffers.append(model._mtp_hidden_buffer)
        assert_same(results[1], results[0])
        if buffers[0] is not None:
            assert_bitwise(buffers[1], buffers[0], "buffer of the draft model")

    @pytest.fixture(autouse=True)
    def _group(self, group):
        self.group = group

    @pytest.mark.parametrize("tokens", [0, 1, 5])
    @pytest.mark.parametrize("mtp", [False, True])
    @pytest.mark.parametrize("aux", [(), (1,), (2, 3), (1, 2, 3)])
    def test_one_stage(self, monkeypatch, tokens, mtp, aux):
        def run(model, generator):
            model.aux_hidden_state_layers = aux
            ids, positions = inputs(generator, tokens)
            return model(ids, positions, None)

        self.both(monkeypatch, 7, run, mtp=mtp)

    def test_embeddings_in_place_of_ids(self, monkeypatch):
        def run(model, generator):
            ids, positions = inputs(generator, 3)
            embeds = torch.randn(3, HIDDEN, generator=generator).bfloat16()
            return model(ids, positions, None, inputs_embeds=embeds)

        self.both(monkeypatch, 8, run)

    @pytest.mark.parametrize("stage", ["first", "middle", "last"])
    def test_pipeline_stages(self, monkeypatch, stage):
        self.group.is_first_rank, self.group.is_last_rank = stage == "first", stage == "last"

        def run(model, generator):
            model.start_layer, model.end_layer = 1, 3
            model.aux_hidden_state_layers = (2, 3)
            before = {}
            if stage != "first":
                streams = torch.randn(4, STREAMS, HIDDEN, generator=generator).bfloat16()
                before["hidden_states"] = streams
            if stage == "last":
                model._aux_slot_base_cached = model._aux_upstream_total_cached = 1
                before["aux_hidden_states_0"] = streams[:, 0]
            ids, positions = inputs(generator, 4)
            return model(ids, positions, IntermediateTensors(before) if before else None)

        self.both(monkeypatch, 9, run)

    @pytest.mark.parametrize("tokens", [1, 4, 5])
    def test_sequence_parallelism(self, monkeypatch, tokens):
        """One of two ranks: collectives that make what the other would send out of what is here."""

        def run(model, generator):
            model.use_sequence_parallel = True
            for layer in model.layers:
                layer.use_sequence_parallel = True
            context = types.SimpleNamespace(is_padding=torch.zeros(tokens, dtype=torch.bool))
            with override_forward_context(context), monkeypatch.context() as patch:
                for module in (vllm_model, hyper_connection.sequence_parallel):
                    patch.setattr(module, "sp_all_gather", lambda x: torch.cat([x, x * 2]))
                    patch.setattr(module, "sp_reduce_scatter", lambda x: _first_half(x) + 1)
                    patch.setattr(module, "sp_shard", _first_half)
                    patch.setattr(module, "sp_padding_mask", lambda mask, x: _first_half(mask))
                ids, positions = inputs(generator, tokens)
                model.aux_hidden_state_layers = (2,)
                out = model(ids, positions, None)
            assert context.is_padding.shape == (-(-tokens // 2),)
            return out

        self.both(monkeypatch, 10, run, mtp=True)


def _first_half(x):
    return torch.nn.functional.pad(x, (0, 0) * (x.ndim - 1) + (0, x.shape[0] % 2)).chunk(2)[0]


class TestVllmsReference:
    """This package's operators against the plain PyTorch of ``vllm.model_executor.kernels.mhc``."""

    @given(
        seed=strategies.seeds(), tokens=st.integers(1, 6), size=st.sampled_from([1e-3, 1.0, 30.0])
    )
    def test_collapse_and_write_back(self, seed, tokens, size):
        generator = strategies.generator(seed)
        layer = vllm_layer(generator)
        streams = (torch.randn(tokens, STREAMS, HIDDEN, generator=generator) * size).bfloat16()
        y = (torch.randn(tokens, HIDDEN, generator=generator) * size).bfloat16()
        own = layer.hc_attn_fn, layer.hc_attn_scale, layer.hc_attn_base
        theirs = EPS, HC_EPS, HC_EPS, 2.0, ITERATIONS
        post, comb, pre = mhc_pre_torch(streams, *own, *theirs)
        adopted(layer)
        mixed = layer._hyper_connection("attn").pre(streams)

        # Both sum 256 float32 products in some order: at most 2 * 256 roundings of 2^-24 of the
        # sum of magnitudes, which is at most |fn row| sqrt(256) after the division by the RMS.
        # Logits are off by that times scale, and by the rounding of themselves.
        rows = layer.hc_attn_fn.norm(dim=1).max() * 16 * layer.hc_attn_scale.max()
        logits = float(2**-15 * rows + 2**-20)
        assert_within_budget(
            mixed.post, post.squeeze(-1), torch.full_like(mixed.post, logits), "post"
        )
        # A softmax passes on twice that, relatively; Sinkhorn's steps contract, and each adds the
        # roundings of two sums of 4 and two divisions.
        coefficients = comb * (4 * logits + ITERATIONS * 12 * 2**-24) + 2**-40
        assert_within_budget(mixed.comb, comb, coefficients, "comb")
        # Their norm of the collapsed streams, here as the operator has it: rounded in between. A
        # weight of the collapse is off by a quarter of the logits, the rounding before the norm by
        # one step of 2^-8 where the sums fall on both sides, and the one after it likewise.
        wide = pre.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        expected = wide * inverse * layer.attn_norm.weight.float()
        magnitude = streams.float().abs().sum(1) * logits * inverse * layer.attn_norm.weight.float()
        row = (magnitude / HIDDEN**0.5).norm(dim=-1, keepdim=True)  # what the mean square is off by
        budget = expected.abs() * (2**-7 + 2**-8 + row) * 1.01 + magnitude
        assert_within_budget(mixed.normed.float(), expected, budget, "normed")

        written = hc_post(y, streams, mixed.post, mixed.comb)
        expected = mhc_post_torch(y, streams, post, comb).float()
        magnitudes = torch.einsum("tij,tih->tjh", comb, streams.float().abs())
        magnitudes = magnitudes + post * y.float().abs().unsqueeze(1)
        budget = expected.abs() * 2**-7 + magnitudes * (5 * logits + 2**-18)
        assert_within_budget(written.float(), expected, budget, "streams")


class TestNorms:
    def test_the_pair_of_an_attention(self):
        generator = strategies.generator(3)
        attention = vllm_model.DeepseekV4FlashMLAAttention.__new__(
            vllm_model.DeepseekV4FlashMLAAttention
        )
        nn.Module.__init__(attention)
        attention.q_norm, attention.kv_norm = vllm_norm(generator, 48), vllm_norm(generator, 32)
        attention.eps = EPS
        report = adopted(attention, norm)
        assert [row.kernel for row in report.rows] == ["rms_norm_pair"]
        fused = torch.randn(5, 80, generator=generator).bfloat16()
        qr, scale, kv = attention._split_qkv_and_norm(fused)
        assert scale is None
        for got, x, module in (
            (qr, fused[:, :48], attention.q_norm),
            (kv, fused[:, 48:], attention.kv_norm),
        ):
            wide = x.float()
            exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
            exact = exact * module.weight.float()
            assert_within_budget(got.float(), exact, exact.abs() * 2**-8 * 1.01, "norm")

    @given(seed=strategies.seeds(), tokens=st.integers(0, 4))
    def test_the_activation(self, seed, tokens):
        with set_current_vllm_config(VllmConfig()):
            mlp = vllm_model.DeepseekV4MLP.__new__(vllm_model.DeepseekV4MLP)
            nn.Module.__init__(mlp)
            mlp.act_fn = SiluAndMulWithClamp(1.5, compile_native=False)
        mlp.gate_up_proj = nn.Linear(8, 32, dtype=torch.bfloat16)
        mlp.gate_up_proj.output_size_per_partition = 32
        mlp.gate_up_proj.params_dtype = torch.bfloat16
        x = (torch.randn(tokens, 32, generator=strategies.generator(seed)) * 2).bfloat16()
        exact = mlp.act_fn.forward_native(x.double())
        adopted(mlp, norm)
        assert type(mlp.act_fn) is norm.Swiglu
        budget = exact.abs() * 2**-8 + 2**-30
        assert_within_budget(mlp.act_fn(x).double(), exact, budget, "activation")

    def test_what_is_left_says_why(self):
        mlp = vllm_model.DeepseekV4MLP.__new__(vllm_model.DeepseekV4MLP)
        nn.Module.__init__(mlp)
        mlp.act_fn = SiluAndMulWithClamp(1.5, alpha=1.7, compile_native=False)
        report = adopted(mlp, norm)
        assert report.rows[0].reason == "alpha is 1.7 and beta 0.0, swiglu has 1 and 0"
        assert type(mlp.act_fn) is SiluAndMulWithClamp


class TestAdoption:
    def test_the_report_names_every_layer(self):
        model = nn.ModuleDict({"model": vllm_stack(strategies.generator(0))})
        report = adopted(model, hyper_connection, norm)
        assert report.complete
        named = {row.place: row.kernel for row in report.rows}
        assert named == {
            "model": "hc_post, hc_head",
            **{f"model.layers.{i}": "hc_pre_norm, hc_post_pre_norm" for i in range(3)},
            "model.norm": "rms_norm",
        }

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"hc_post_alpha": 1.0}, "hc_post_alpha is 1.0, the operators have 2.0"),
            ({"hc_mult": 2}, "2 residual streams, the kernels have 4"),
            ({"rms_norm_eps": 1e-5}, "attn_norm has the epsilon 1e-06, the mixing 1e-05"),
        ],
    )
    def test_a_layer_with_other_numbers_is_left(self, change, reason):
        layer = vllm_layer(strategies.generator(0))
        for name, value in change.items():
            setattr(layer, name, value)
        report = adopted(layer)
        assert type(layer) is vllm_model.DeepseekV4DecoderLayer
        assert reason in report.rows[0].reason
        assert not report.complete

    def test_batch_invariance_leaves_what_sums_over_rows_by_their_number(self, monkeypatch):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        report = adopted(vllm_stack(strategies.generator(0), 1), hyper_connection, norm)
        assert len(report.rows) == 3
        assert all("VLLM_BATCH_INVARIANT is 1" in row.reason for row in report.rows)

    def test_the_places_are_as_this_vllm_has_them(self):
        assert places.HYPER_CONNECTION
        assert places.mismatches(places.HYPER_CONNECTION) == []

    def test_vllms_classes_stay(self):
        before = vllm_model.DeepseekV4DecoderLayer.forward, vllm_model.DeepseekV4Model.forward
        names = {name: vars(vllm_model)[name] for name in dir(vllm_model) if "_tilelang" in name}
        adopted(vllm_stack(strategies.generator(0)), hyper_connection, norm)
        after = vllm_model.DeepseekV4DecoderLayer.forward, vllm_model.DeepseekV4Model.forward
        assert before == after
        assert all(vars(vllm_model)[name] is value for name, value in names.items())
