"""Loading packs and converts as it reads: nothing changes but the layout, and little is held."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoint_cases import assert_same_state, edit, make_model, quantised_modules, saved, state
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import _support, layers
from dsv4._checkpoint.mxfp4 import pair_to_nvfp4, to_mxfp4, to_nvfp4
from dsv4._checkpoint.packing import report_packing
from dsv4.checkpoint import Checkpoint, CheckpointError, fill, load, save
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.formats import FRAGMENTS, LINEAR, MXFP4, NVFP4, SWIZZLED, QuantizedTensor
from dsv4.layers import DeepseekV4Experts, Linear
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.ops.quantize import dequantize
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise

# Experts, attention and the rest are whole tiles of both layouts.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "n_routed_experts": 4,
    "vocab_size": 64,
}
CONFIG = ModelConfig.tiny(layer_types=(SLIDING, CSA, HCA), **SIZES)
LAYOUTS = st.sampled_from([FRAGMENTS, SWIZZLED])
MESSAGE = "layers are not packed"


def pretend_gpu(
    monkeypatch: pytest.MonkeyPatch, *, experts: str | None = None, linear: str | None = None
) -> None:
    """Let the CPU be a device whose kernels take packed weights, but for the reasons given."""

    def reason(device: torch.device, dtype: torch.dtype, **options: bool) -> str | None:
        return experts if options["experts"] else linear

    monkeypatch.setattr(_support, "no_packed_weights", reason)
    monkeypatch.setattr(_support, "packed_layout", lambda device, activation: FRAGMENTS)


def packable(model: torch.nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, (Linear, DeepseekV4Experts))]


def joint(module: Any) -> int | None:
    """Where the matrix that a layer shares with others begins."""
    shared = getattr(module, "joint", None)
    return None if shared is None else int(shared.codes.data_ptr())


def mixed(seed: int, formats: list[str | None]) -> DeepseekV4ForCausalLM:
    """A model whose layers have these formats, one after another."""
    model = make_model(CONFIG, seed)
    for number, (_, module) in enumerate(quantised_modules(model)):
        chosen = formats[number % len(formats)]
        if chosen is not None:
            module.quantize(chosen)
    return model


class TestPacked:
    @given(
        seed=strategies.seeds(),
        formats=st.lists(
            st.sampled_from([None, "nvfp4", "mxfp4", "fp8_block"]), min_size=1, max_size=5
        ),
        activation=st.sampled_from(["bf16", "nvfp4"]),
        layout=LAYOUTS,
    )
    @example(seed=1, formats=["nvfp4"], activation="nvfp4", layout=SWIZZLED)
    @example(seed=1, formats=["nvfp4"], activation="bf16", layout=FRAGMENTS)
    @settings(max_examples=8)
    def test_is_what_pack_makes_of_it(self, tmp_path_factory, seed, formats, activation, layout):
        """The layers that ``pack_`` packs are packed and joined, and no bit of a weight changes."""
        folder = tmp_path_factory.mktemp("model")
        save(mixed(seed, formats), folder, layout="transformers", plain=("*",), plain_dtype=None)
        options: Any = {
            "activation": activation,
            "input_scales": "token",
            "mxfp4": "keep",
            "progress": False,
        }
        plain = load(folder, pack=False, **options)
        model = load(folder, pack=layout, **options)
        assert_same_state(state(model), state(plain))
        wanted = layers.pack_(plain, layout)
        found = model.load_report.packing
        assert (sorted(found.packed), found.kept) == (sorted(wanted.packed), wanted.kept)
        assert sorted(found.joined) == sorted(wanted.joined)
        for one, other in zip(packable(model), packable(plain), strict=True):
            assert one.layout == other.layout
        before = [joint(m) for m in packable(model)]
        again = layers.pack_(model, layout)
        assert (sorted(again.packed), again.kept) == (sorted(found.packed), found.kept)
        assert before == [joint(m) for m in packable(model)]
        buffers = dict(plain.named_buffers())
        for name, buffer in model.named_buffers():
            assert_bitwise(buffer, buffers[name], name)

    def test_a_saved_one_is_the_same_file(self, tmp_path):
        source = saved(mixed(1, ["nvfp4"]), tmp_path / "a", layout="transformers")
        model = load(source, pack=FRAGMENTS, progress=False)
        assert all(m.layout == FRAGMENTS for m in packable(model))
        save(model, tmp_path / "b", layout="transformers")
        left, right = ((tmp_path / x / "model.safetensors").read_bytes() for x in "ab")
        assert left == right

    def test_each_layer_is_packed_before_the_next_is_read(self, tmp_path, monkeypatch):
        source = saved(mixed(1, ["nvfp4"]), tmp_path, layout="transformers")
        events: list[tuple[str, str]] = []

        def recorded(kind: type, name: str) -> None:
            original = getattr(kind, name)

            def method(self: Any, *args: Any, **options: Any) -> Any:
                events.append((name, str(id(self))))
                return original(self, *args, **options)

            monkeypatch.setattr(kind, name, method)

        for kind, setter in ((Linear, "set_weight"), (DeepseekV4Experts, "set_expert")):
            recorded(kind, setter)
            recorded(kind, "pack")
        model = load(source, pack=FRAGMENTS, progress=False)
        order = list(dict.fromkeys(layer for _, layer in events))
        assert len(order) == len(packable(model))
        groups = [[name for name, layer in events if layer == which] for which in order]
        flat = [(name, layer) for layer, g in zip(order, groups, strict=True) for name in g]
        assert events == flat, "the calls of a layer are not together"
        assert all(group[-1] == "pack" and group.count("pack") == 1 for group in groups)

    @pytest.mark.parametrize("pack", ["linear", "swizzled", 1, None])
    def test_unknown_layouts_are_refused(self, tmp_path, pack):
        source = saved(make_model(), tmp_path)
        with pytest.raises(ValueError, match=r"pack is .*, wanted True, False, 'fragments_16x64'"):
            load(source, pack=pack, progress=False)


class TestDefault:
    @pytest.mark.parametrize("layout", ["nvidia", "deepseek", "transformers"])
    def test_on_a_cpu_nothing_is_packed_or_converted(self, tmp_path, caplog, layout):
        source = saved(make_model(CONFIG), tmp_path, layout=layout)
        with caplog.at_level(logging.INFO, logger="dsv4.checkpoint"):
            model = load(source, progress=False)
        assert_same_state(state(model), state(load(source, pack=False, progress=False)))
        assert {m.layout for m in packable(model)} == {LINEAR}
        [record] = [r for r in caplog.records if MESSAGE in r.message]
        assert record.levelno == logging.INFO
        assert f"{len(packable(model))} {MESSAGE}: " in record.message
        assert "on cpu" in record.message
        assert set(model.load_report.packing.kept) == {n for n, _ in quantised_modules(model)}
        assert not [r for r in caplog.records if r.levelno > logging.INFO]

    def test_false_says_nothing(self, tmp_path, caplog):
        source = saved(make_model(CONFIG), tmp_path)
        with caplog.at_level(logging.INFO, logger="dsv4.checkpoint"):
            model = load(source, pack=False, progress=False)
        assert model.load_report.packing is None
        assert MESSAGE not in caplog.text

    @pytest.mark.parametrize("pack", [True, False])
    def test_converts_what_it_packs(self, tmp_path, monkeypatch, pack):
        source = saved(make_model(CONFIG), tmp_path, layout="deepseek")
        pretend_gpu(monkeypatch)
        model = load(source, pack=pack, progress=False)
        experts = [m for m in model.modules() if isinstance(m, DeepseekV4Experts)]
        assert len(experts) == 4
        assert {m.format for m in experts} == {NVFP4 if pack else MXFP4}
        assert {m.layout for m in experts} == {FRAGMENTS if pack else LINEAR}

    def test_experts_without_kernels_stay_as_they_are(self, tmp_path, monkeypatch, caplog):
        source = saved(mixed(1, ["nvfp4"]), tmp_path / "a", layout="transformers")
        pretend_gpu(monkeypatch, experts="there is no kernel")
        with caplog.at_level(logging.INFO, logger="dsv4.checkpoint"):
            model = load(source, progress=False)
        kept = model.load_report.packing.kept
        assert set(kept.values()) == {"there is no kernel"}
        for module in packable(model):
            wanted = LINEAR if isinstance(module, DeepseekV4Experts) else FRAGMENTS
            assert module.layout == wanted
        [record] = [r for r in caplog.records if MESSAGE in r.message]
        assert "4 layers are not packed: there is no kernel" in record.message
        assert "model.layers.0.mlp.experts" in record.message
        original = saved(make_model(CONFIG), tmp_path / "b", layout="deepseek")
        model = load(original, progress=False)
        assert {m.format for m in packable(model) if isinstance(m, DeepseekV4Experts)} == {MXFP4}

    def test_a_layer_that_a_gpu_runs_slowly_is_a_warning(self, tmp_path, caplog):
        """On the meta device, which is no CPU: experts, and linear layers in NVFP4 or MXFP4."""
        model = mixed(1, [None, "nvfp4", "mxfp4", "fp8_block"])
        slow = [
            name
            for name, module in quantised_modules(model)
            if isinstance(module, DeepseekV4Experts) or module.format in (NVFP4, MXFP4)
        ]
        kept = dict.fromkeys((name for name, _ in quantised_modules(model)), "it is so")
        for device, level in (("cpu", logging.INFO), ("meta", logging.WARNING)):
            caplog.clear()
            with caplog.at_level(logging.INFO, logger="dsv4.checkpoint"):
                report_packing(tmp_path, model.to(device), layers.Packing(kept=kept))
            found = {r.levelno: r.message for r in caplog.records if MESSAGE in r.message}
            number = len(slow) if device == "meta" else len(kept)
            assert f": {number} layers are not packed: it is so" in found[level]
            assert len(found) == (2 if device == "meta" else 1)
            assert 0 < len(slow) < len(kept)

    @pytest.mark.parametrize(
        ("capability", "dtype", "experts", "linear"),
        [
            ((9, 0), torch.float32, "the model is torch.float32", "the model is torch.float32"),
            ((7, 5), torch.bfloat16, "the GPU has 7.5", "8.0 or newer, the GPU has 7.5"),
            ((8, 0), torch.bfloat16, "the GPU has 8.0", None),
            ((9, 0), torch.bfloat16, None, None),
            ((10, 3), torch.bfloat16, None, None),
            ((12, 0), torch.bfloat16, "the GPU has 12.0", None),
        ],
    )
    def test_reasons(self, monkeypatch, capability, dtype, experts, linear):
        monkeypatch.setattr(_support, "_capability", lambda device: capability)
        monkeypatch.setattr(_support, "_has", lambda package: True)
        for check in (_support._no_cute, _support._no_triton):
            monkeypatch.setattr(_support, check.__name__, check.__wrapped__)
        for wanted, of_experts in ((experts, True), (linear, False)):
            found = _support.no_packed_weights(torch.device("cuda", 0), dtype, experts=of_experts)
            assert (found is None) if wanted is None else (wanted in found)

    @pytest.mark.parametrize(
        ("capability", "activation", "layout"),
        [
            ((8, 0), "nvfp4", FRAGMENTS),
            ((9, 0), "nvfp4", FRAGMENTS),
            ((10, 0), "bf16", FRAGMENTS),
            ((10, 0), "nvfp4", SWIZZLED),
            ((10, 3), "nvfp4", SWIZZLED),
        ],
    )
    def test_layout_of_a_gpu(self, monkeypatch, capability, activation, layout):
        monkeypatch.setattr(_support, "_capability", lambda device: capability)
        assert _support.packed_layout(torch.device("cuda", 0), activation) == layout

    def test_fill_keeps_the_layout_by_default(self, tmp_path, monkeypatch):
        source = saved(make_model(CONFIG), tmp_path, layout="deepseek")
        pretend_gpu(monkeypatch)
        with torch.device("meta"):
            model = DeepseekV4ForCausalLM(CONFIG)
        with Checkpoint.open(source) as checkpoint:
            done = fill(model, checkpoint, progress=False)
        assert done.packing is None
        assert {m.layout for m in packable(model)} == {LINEAR}
        assert MXFP4 in {m.format for m in packable(model)}


def random_mxfp4(seed: int, rows: int, columns: int, low: int, high: int) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    shape = (rows, columns // 32)
    scales = torch.randint(low, high + 1, shape, dtype=torch.uint8, generator=generator)
    return QuantizedTensor(codes, scales.view(torch.float8_e8m0fnu), None, MXFP4)


def values(q: QuantizedTensor) -> torch.Tensor:
    return dequantize(q, torch.float64)


class TestConversion:
    @given(seed=strategies.seeds(), low=st.integers(20, 200), span=st.integers(0, 40))
    @example(seed=0, low=100, span=17)
    @example(seed=0, low=100, span=18)
    def test_is_exact_or_refused(self, seed, low, span):
        q = random_mxfp4(seed, 6, 96, low, low + span)
        found = to_nvfp4(q)
        rounded = to_nvfp4(q, rounds=True)
        exact = torch.equal(values(rounded), values(q))
        assert (found is not None) == exact
        assert exact or span > 17
        if found is not None:
            back = to_mxfp4(found)
            assert_bitwise(values(back), values(q), "value")
            if span <= 17:
                assert_bitwise(back.codes, q.codes, "code")

    @given(
        seed=strategies.seeds(),
        low=st.integers(60, 180),
        other=st.integers(-30, 30),
        span=st.integers(0, 20),
    )
    @example(seed=0, low=100, other=0, span=17)
    @example(seed=0, low=100, other=30, span=0)
    def test_a_pair_has_one_global_scale_or_is_refused(self, seed, low, other, span):
        gate = random_mxfp4(seed, 3, 64, low, low + span)
        up = random_mxfp4(seed + 1, 3, 64, low + other, low + other + span)
        pair = pair_to_nvfp4(gate, up)
        if abs(other) + span <= 17:
            assert pair is not None
        if pair is None:
            return
        for one, was in zip(pair, (gate, up), strict=True):
            assert_bitwise(values(one), values(was), "value")
        assert torch.equal(pair[0].global_scale, pair[1].global_scale)

    @given(seed=strategies.seeds(), bits=st.integers(0, 2**32 - 1), same=st.booleans())
    @example(seed=3, bits=0x3F800000, same=True)
    @example(seed=3, bits=0x3F800000, same=False)
    @example(seed=3, bits=0x00000001, same=True)
    @example(seed=3, bits=0x3FC00000, same=True)
    def test_back_is_exact_or_refused(self, seed, bits, same):
        """Any NVFP4 matrix: what ``to_mxfp4`` gives has its values."""
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 256, (2, 32), dtype=torch.uint8, generator=generator)
        powers = torch.tensor([1, 2, 4, *range(8, 127, 8), 0x7F], dtype=torch.uint8)
        scales = powers[torch.randint(0, len(powers), (2, 4), generator=generator)]
        if same:
            scales = scales[:, ::2].repeat_interleave(2, -1)
        whole = torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32)
        q = QuantizedTensor(codes, scales.view(torch.float8_e4m3fn), whole, NVFP4)
        back = to_mxfp4(q)
        if back is not None:
            assert_bitwise(values(back), values(q), "value")
        if same and bits == 0x3F800000:
            assert back is not None

    def test_other_matrices_are_not_taken_back(self):
        q = to_nvfp4(random_mxfp4(1, 4, 64, 120, 125))
        scales = q.scales.view(torch.uint8).clone()
        scales[0, 0] = 0x39  # 1.125
        scales[0, 1] = 0x39
        wrong = QuantizedTensor(q.codes, scales.view(torch.float8_e4m3fn), q.global_scale, NVFP4)
        assert to_mxfp4(wrong) is None
        per_row = QuantizedTensor(q.codes, q.scales, torch.ones(4), NVFP4)
        assert to_mxfp4(per_row) is None


def mxfp4_checkpoint(folder, spread: dict[str, int], seed: int = 0):
    """DeepSeek's layout; ``spread`` says by how many powers the scales of a matrix differ.

    Its first block scale is so far below the second, whose code is not a power of two.
    """

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, powers in spread.items():
            codes, scales = tensors[f"{name}.weight"], tensors[f"{name}.scale"]
            data = scales.view(torch.uint8)
            data.fill_(120)
            codes.fill_(0x22)
            codes.view(torch.uint8)[0, 0] = 0x21  # 0.5, the value that is lost first
            data[0, 0] = 120 - powers

    save(make_model(CONFIG, seed), folder, layout="deepseek")
    return edit(folder, change)


def experts_of(model: torch.nn.Module) -> dict[str, DeepseekV4Experts]:
    found = {n: m for n, m in model.named_modules() if isinstance(m, DeepseekV4Experts)}
    return {name.removesuffix(".mlp.experts"): module for name, module in found.items()}


def same_values(left: torch.nn.Module, right: torch.nn.Module) -> None:
    for one, other in zip(packable(left), packable(right), strict=True):
        if isinstance(one, Linear):
            assert_bitwise(one.dense_weight(), other.dense_weight(), "weight")
            continue
        for name in ("gate_up_proj", "down_proj"):
            assert_bitwise(one.dense_weight(name), other.dense_weight(name), name)


class TestMxfp4:
    @given(
        seed=strategies.seeds(),
        spread=st.dictionaries(
            st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from(["w1", "w2", "w3"])),
            st.integers(0, 22),
            max_size=4,
        ),
        pack=st.sampled_from([False, FRAGMENTS]),
    )
    @example(seed=0, spread={(1, 2, "w2"): 17}, pack=FRAGMENTS)
    @example(seed=0, spread={(1, 2, "w2"): 18, (1, 3, "w1"): 18}, pack=FRAGMENTS)
    @settings(max_examples=8)
    def test_is_converted_where_no_value_changes(self, tmp_path_factory, seed, spread, pack):
        names = {f"layers.{n}.ffn.experts.{e}.{w}": p for (n, e, w), p in spread.items()}
        folder = mxfp4_checkpoint(tmp_path_factory.mktemp("model"), names, seed % 7)
        kept = load(folder, mxfp4="keep", pack=False, progress=False)
        model = load(folder, mxfp4="lossless", pack=pack, progress=False)
        same_values(model, kept)
        bad = {name for name, powers in names.items() if powers > 17}
        conversion = model.load_report.conversion
        assert set(conversion.inexact) == {f"{name}.weight" for name in bad}
        stay = {f"model.{name.partition('.ffn')[0]}" for name in bad}
        for name, module in experts_of(model).items():
            assert module.format == (MXFP4 if name in stay else NVFP4), name
            packed = pack and name not in stay
            assert module.layout == (FRAGMENTS if packed else LINEAR), name
            for e in range(4 if module.format == NVFP4 else 0):
                gate, up, _ = experts_of(kept)[name].get_expert(e)
                one = module.gate_up_proj_scale_2[e].unique().numel() == 1
                assert one == (pair_to_nvfp4(gate, up) is not None)
        assert (conversion.kept, conversion.converted) == (12 * len(stay), 12 * (4 - len(stay)))

    def test_what_stays_is_said_once(self, tmp_path, caplog):
        name = "layers.1.ffn.experts.2.w2"
        folder = mxfp4_checkpoint(tmp_path, {name: 18, "layers.2.ffn.experts.0.w1": 20})
        load(folder, mxfp4="lossless", pack=FRAGMENTS, progress=False)
        [record] = [r for r in caplog.records if "MXFP4" in r.message]
        assert record.levelno == logging.WARNING
        assert "2 MXFP4 matrices have values that NVFP4 does not" in record.message
        assert "24 matrices stay MXFP4" in record.message
        assert record.message.endswith(f"The first: {name}.weight")
        caplog.clear()
        model = load(folder, mxfp4="nvfp4", pack=FRAGMENTS, progress=False)
        [record] = [r for r in caplog.records if "MXFP4" in r.message]
        assert "2 MXFP4 matrices" in record.message
        assert "were rounded" in record.message
        assert {m.format for m in experts_of(model).values()} == {NVFP4}

    @pytest.mark.parametrize("pack", [False, FRAGMENTS, SWIZZLED])
    def test_comes_back_as_it_was(self, tmp_path, pack):
        """In DeepSeek's layout the file, in others the values."""
        source = saved(make_model(CONFIG), tmp_path / "a", layout="deepseek")
        kept = load(source, mxfp4="keep", pack=False, progress=False)
        model = load(source, mxfp4="lossless", pack=pack, progress=False)
        for layout in ("deepseek", "nvidia", "transformers", "bf16"):
            save(model, tmp_path / layout, layout=layout, plain_dtype=None, plain=("*",))
            options: Any = {"mxfp4": "keep", "pack": False, "progress": False}
            again = load(tmp_path / layout, **options)
            same_values(again, kept)
            formats = {n: m.format for n, m in experts_of(again).items()}
            main = {"deepseek": MXFP4, "bf16": None}.get(layout, NVFP4)
            assert formats["model.layers.0"] == main
            assert formats["mtp.0.layer"] == (MXFP4 if layout == "nvidia" else main)
        left, right = ((tmp_path / x / "model.safetensors").read_bytes() for x in ("a", "deepseek"))
        assert left == right

    def test_a_layer_of_nvfp4_goes_back_as_a_whole_or_not_at_all(self, tmp_path):
        """One expert that could be MXFP4 among others that could not stays NVFP4."""
        model = make_model(CONFIG)
        experts = model.mtp[0].layer.mlp.experts
        experts.gate_up_proj.data[1] = 0
        experts.down_proj.data[1] = 0
        experts.quantize("nvfp4")
        assert all(to_mxfp4(part) is not None for part in experts.get_expert(1))
        save(model, tmp_path, layout="nvidia")
        again = load(tmp_path, progress=False).mtp[0].layer.mlp.experts
        assert again.format == NVFP4
        for name in ("gate_up_proj", "down_proj"):
            assert_bitwise(again.dense_weight(name), experts.dense_weight(name), name)

    def test_nvidias_layout_refuses_what_it_would_round(self, tmp_path):
        name = "layers.1.ffn.experts.2.w2"
        folder = mxfp4_checkpoint(tmp_path / "a", {name: 18})
        model = load(folder, mxfp4="lossless", pack=FRAGMENTS, progress=False)
        with pytest.raises(ValueError, match=r"layers.1.*experts.2.down_proj.weight is mxfp4 with"):
            save(model, tmp_path / "b", layout="nvidia")
        assert not list((tmp_path / "b").glob("*.safetensors"))
        for layout in ("deepseek", "transformers"):
            save(model, tmp_path / layout, layout=layout)
            again = experts_of(load(tmp_path / layout, mxfp4="keep", progress=False))
            for name, module in experts_of(model).items():
                same_values(again[name], module)

    def test_a_layer_of_two_formats_that_cannot_be_one_is_refused(self, tmp_path):
        left, right = (tmp_path / x for x in ("a", "b"))
        name = "layers.1.ffn.experts.0.w1"
        mxfp4_checkpoint(left, {name: 18})
        save(make_model(CONFIG), right, layout="nvidia")
        from safetensors.torch import load_file

        theirs = load_file(right / "model.safetensors")

        def change(tensors: dict[str, torch.Tensor]) -> None:
            del tensors["layers.1.ffn.experts.3.w2.scale"]
            for suffix in ("weight", "weight_scale", "weight_scale_2"):
                full = f"layers.1.ffn.experts.3.w2.{suffix}"
                tensors[full] = theirs[full]

        edit(left, change)
        with pytest.raises(CheckpointError, match="wanted one format in a layer"):
            load(left, mxfp4="keep", progress=False)
        with pytest.raises(CheckpointError, match=rf"{name}.weight has values .*mxfp4='nvfp4'"):
            load(left, mxfp4="lossless", progress=False)
        model = load(left, mxfp4="nvfp4", progress=False)
        assert experts_of(model)["model.layers.1"].format == NVFP4

    def test_gate_and_up_keep_their_scales_where_one_does_not_hold_both(self, tmp_path):
        def change(tensors: dict[str, torch.Tensor]) -> None:
            stem = "layers.0.ffn.experts.1"
            tensors[f"{stem}.w1.scale"].view(torch.uint8).fill_(100)
            tensors[f"{stem}.w3.scale"].view(torch.uint8).fill_(140)
            for which in ("w1", "w3"):
                tensors[f"{stem}.{which}.weight"].fill_(0x11)

        folder = edit(saved(make_model(CONFIG), tmp_path, layout="deepseek"), change)
        model = load(folder, mxfp4="lossless", pack=FRAGMENTS, progress=False)
        same_values(model, load(folder, mxfp4="keep", progress=False))
        gate, up = experts_of(model)["model.layers.0"].gate_up_proj_scale_2.unbind(1)
        assert (gate == up).tolist() == [True, False, True, True]

    def test_linear_layers(self, tmp_path):
        source = saved(mixed(1, ["mxfp4"]), tmp_path, layout="transformers")
        kept = load(source, mxfp4="keep", progress=False)
        model = load(source, mxfp4="lossless", pack=FRAGMENTS, progress=False)
        same_values(model, kept)
        assert {m.format for m in packable(model)} == {NVFP4}
        assert {m.layout for m in packable(model)} == {FRAGMENTS}
        linear = sum(isinstance(m, Linear) for m in packable(model))
        assert model.load_report.conversion.converted == linear + 4 * 12

    def test_an_unknown_mode_is_refused(self, tmp_path):
        source = saved(make_model(CONFIG), tmp_path)
        with pytest.raises(ValueError, match="mxfp4 is 'exact', wanted one of 'keep', 'lossless'"):
            load(source, mxfp4="exact", progress=False)


class LiveBytes(TorchDispatchMode):
    """The most bytes that new tensors held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self.see(tensor.untyped_storage())
        return out

    def see(self, storage: torch.UntypedStorage) -> None:
        known = self.alive.get(storage._cdata)
        if storage.nbytes() < 1024 or (known is not None and not known[0].expired()):
            return
        self.alive = {k: v for k, v in self.alive.items() if not v[0].expired()}
        self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))


def held(work: Callable[[], Any]) -> tuple[Any, int]:
    with LiveBytes() as live:
        out = work()
    return out, live.peak


def own_bytes(model: torch.nn.Module) -> int:
    """Bytes of all storages of a model."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in (*model.parameters(), *model.buffers())
    }
    return sum(storages.values())


class TestMemory:
    def test_the_measure_sees_what_is_held(self):
        """A copy of a layer that is kept until the end is found."""
        _, peak = held(lambda: [torch.zeros(5000, dtype=torch.uint8) for _ in range(7)])
        assert peak == 35000
        _, peak = held(lambda: [torch.zeros(5000, dtype=torch.uint8).sum() for _ in range(7)])
        assert peak == 5000

    @pytest.mark.parametrize("layout", ["transformers", "deepseek"])
    def test_is_the_model_and_two_experts(self, tmp_path, layout):
        """Packing and converting included: much less than a layer more than the model."""
        config = ModelConfig.tiny(
            layer_types=(SLIDING,) * 3, **{**SIZES, "n_routed_experts": 12}
        ).replace(num_nextn_predict_layers=0)
        model = make_model(config)
        if layout == "transformers":
            layers.quantize_(model)
        source = saved(model, tmp_path, layout=layout)
        del model
        options: Any = {"pack": FRAGMENTS, "mxfp4": "lossless", "progress": False}
        load(source, **options)  # tables that are made once
        model, peak = held(lambda: load(source, **options))
        experts = model.model.layers[0].mlp.experts
        assert (experts.format, experts.layout) == (NVFP4, FRAGMENTS)
        size, expert = own_bytes(model), own_bytes(experts) / 12
        assert own_bytes(model.model.layers[0]) > 10 * expert
        assert size <= peak <= size + 2 * expert, (size, peak, expert)


@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.mark.parametrize("layout", ["nvidia", "deepseek", "transformers"])
    def test_memory_is_the_model_and_at_most_a_layer(self, tmp_path, layout):
        config = ModelConfig.tiny(
            layer_types=(SLIDING,) * 4,
            **{**SIZES, "hidden_size": 512, "moe_intermediate_size": 256},
        ).replace(n_routed_experts=64, num_nextn_predict_layers=0)
        source = saved(make_model(config), tmp_path, layout=layout)
        options: Any = {"device": "cuda", "reserve_tokens": 0, "progress": False}
        load(source, **options)  # what libraries take on first use
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = load(source, **options)
        peak = torch.cuda.max_memory_allocated() - before
        final = torch.cuda.memory_allocated() - before
        layer = own_bytes(model.model.layers[0])
        assert final >= own_bytes(model)
        assert peak - final <= layer, (peak, final, layer)
        device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
        packed = _support.no_packed_weights(device, dtype, experts=True) is None
        for module in experts_of(model).values():
            assert (module.layout != LINEAR) == packed
            assert module.format == NVFP4 or not packed

    def test_memory_of_a_step_is_there(self, tmp_path):
        model = load(
            saved(make_model(CONFIG), tmp_path),
            device="cuda",
            reserve_tokens=65536,
            progress=False,
        )
        torch.cuda.synchronize()
        sizes = layers.reserve.step_buffers(model, 65536)
        [shapes] = sizes.values()
        free = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        assert free >= sum(2 * rows * columns for rows, columns in shapes)
        reserved = torch.cuda.memory_reserved()
        rooms = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes]
        assert torch.cuda.memory_reserved() == reserved
        del rooms

    @pytest.mark.parametrize("layout", ["nvidia", "deepseek", "transformers"])
    def test_a_loaded_model_generates_and_is_saved_as_it_was(self, tmp_path, layout):
        source = saved(make_model(CONFIG), tmp_path / "a", layout=layout)
        model = load(source, device="cuda", progress=False)
        host = load(source, progress=False)
        same_values(model.cpu(), host)
        model.cuda()
        assert len(model.generate([[1, 2, 3]], 4, stop_ids=())[0]) == 4
        save(model, tmp_path / "b", layout=layout)
        left, right = ((tmp_path / x / "model.safetensors").read_bytes() for x in "ab")
        assert left == right


class TestReserve:
    def test_shapes_are_those_of_the_experts(self):
        model = make_model(CONFIG)
        [(device, shapes)] = layers.reserve.step_buffers(model, 7).items()
        assert device.type == "cpu"
        layers.reserve_experts(model, 7)
        workspace = experts_of(model)["model.layers.0"].workspace
        assert shapes == [tuple(t.shape) for t in (workspace.rows, workspace.inner)] + shapes[:1]

    def test_nothing_on_a_cpu(self):
        assert layers.warm_allocator(make_model(CONFIG), 10**15) == 0

    def test_wrong_numbers_are_named(self, tmp_path):
        with pytest.raises(ValueError, match="max_tokens is -1, wanted 0 or more"):
            layers.warm_allocator(make_model(), -1)
        for wrong, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
            with pytest.raises(error, match=f"reserve_tokens is {wrong}, wanted"):
                load(tmp_path / "nowhere", reserve_tokens=wrong)
