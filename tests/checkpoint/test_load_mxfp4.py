"""MXFP4 becomes NVFP4 on loading where no value changes, and MXFP4 again on saving."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv4.checkpoint import CheckpointError, load, save
from dsv4.checkpoint.mxfp4 import pair_to_nvfp4, to_mxfp4, to_nvfp4
from dsv4.layers import Linear
from dsv4.ops.quantize import dequantize
from dsv4.quant.formats import FRAGMENTS, LINEAR, MXFP4, NVFP4, SWIZZLED, QuantizedTensor
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise
from tests.checkpoint.cases import edit, make_model, saved
from tests.checkpoint.load_cases import CONFIG, experts_of, mixed, packable, same_values


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
        result = to_nvfp4(q)
        rounded = to_nvfp4(q, rounds=True)
        exact = torch.equal(values(rounded), values(q))
        assert (result is not None) == exact
        assert exact or span > 17
        if result is not None:
            back = to_mxfp4(result)
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
        for linear, was in zip(pair, (gate, up), strict=True):
            assert_bitwise(values(linear), values(was), "value")
        assert torch.equal(pair[0].global_scale, pair[1].global_scale)

    @given(seed=strategies.seeds(), bits=st.integers(0, 2**32 - 1), same=st.booleans())
    @example(seed=3, bits=0x3F800000, same=True)
    @example(seed=3, bits=0x3F800000, same=False)
    @example(seed=3, bits=0x00000001, same=True)
    @example(seed=3, bits=0x3FC00000, same=True)
    def test_back_is_exact_or_refused(self, seed, bits, same):
        """Any NVFP4 matrix: the result of ``to_mxfp4`` has its values."""
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


class TestMxfp4:
    @pytest.mark.slow
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
        unconverted = load(folder, mxfp4="keep", pack=False, progress=False)
        model = load(folder, mxfp4="lossless", pack=pack, progress=False)
        same_values(model, unconverted)
        bad = {name for name, powers in names.items() if powers > 17}
        conversion = model.load_report.conversion
        assert set(conversion.inexact) == {f"{name}.weight" for name in bad}
        stay = {f"model.{name.partition('.ffn')[0]}" for name in bad}
        for name, module in experts_of(model).items():
            assert module.format == (MXFP4 if name in stay else NVFP4), name
            packed = pack and name not in stay
            assert module.layout == (FRAGMENTS if packed else LINEAR), name
            for e in range(4 if module.format == NVFP4 else 0):
                gate, up, _ = experts_of(unconverted)[name].get_expert(e)
                is_shared = module.gate_up_proj_scale_2[e].unique().numel() == 1
                assert is_shared == (pair_to_nvfp4(gate, up) is not None)
        assert (conversion.unconverted, conversion.converted) == (
            12 * len(stay),
            12 * (4 - len(stay)),
        )

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
        assert "they were rounded" in record.message
        assert {m.format for m in experts_of(model).values()} == {NVFP4}

    @pytest.mark.parametrize("pack", [False, FRAGMENTS, SWIZZLED])
    def test_comes_back_as_it_was(self, tmp_path, pack):
        """DeepSeek's layout keeps the file, other layouts the values."""
        source = saved(make_model(CONFIG), tmp_path / "a", layout="deepseek")
        unconverted = load(source, mxfp4="keep", pack=False, progress=False)
        model = load(source, mxfp4="lossless", pack=pack, progress=False)
        for layout in ("deepseek", "nvidia", "transformers", "bf16"):
            save(model, tmp_path / layout, layout=layout, plain_dtype=None, plain=("*",))
            options: Any = {"mxfp4": "keep", "pack": False, "progress": False}
            again = load(tmp_path / layout, **options)
            same_values(again, unconverted)
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
        unconverted = load(source, mxfp4="keep", progress=False)
        model = load(source, mxfp4="lossless", pack=FRAGMENTS, progress=False)
        same_values(model, unconverted)
        assert {m.format for m in packable(model)} == {NVFP4}
        assert {m.layout for m in packable(model)} == {FRAGMENTS}
        linear = sum(isinstance(m, Linear) for m in packable(model))
        assert model.load_report.conversion.converted == linear + 4 * 12

    def test_an_unknown_mode_is_refused(self, tmp_path):
        source = saved(make_model(CONFIG), tmp_path)
        with pytest.raises(ValueError, match="mxfp4 is 'exact', wanted one of 'keep', 'lossless'"):
            load(source, mxfp4="exact", progress=False)
