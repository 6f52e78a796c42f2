"""Loading packs as it reads: nothing changes but the layout, and little is held."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import device as machine
from dsv4 import layers
from dsv4.checkpoint import Checkpoint, fill, load, save
from dsv4.checkpoint.packing import report_packing
from dsv4.config import SLIDING, ModelConfig
from dsv4.cute import supports
from dsv4.layers import DeepseekV4Experts, Linear
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.quant.formats import FRAGMENTS, LINEAR, MXFP4, NVFP4, SWIZZLED
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise
from tests.checkpoint.cases import assert_same_state, make_model, quantised_modules, saved, state
from tests.checkpoint.load_cases import CONFIG, SIZES, experts_of, mixed, packable, same_values

LAYOUTS = st.sampled_from([FRAGMENTS, SWIZZLED])
MESSAGE = "layers are not packed"


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, reason: str | None = None) -> None:
    """Let the CPU be a device whose kernels take packed weights, but for the reason given."""
    monkeypatch.setattr(supports, "no_packed_weights", lambda device, dtype: reason)
    monkeypatch.setattr(supports, "packed_layout", lambda device, activation: FRAGMENTS)


def fused_address(module: Any) -> int | None:
    """Return where the matrix that a layer shares with others begins."""
    shared = getattr(module, "fused", None)
    return None if shared is None else int(shared.codes.data_ptr())


class TestPacked:
    @pytest.mark.costly(2)
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
        expected = layers.pack_(plain, layout)
        actual = model.load_report.packing
        assert (sorted(actual.packed), actual.kept) == (sorted(expected.packed), expected.kept)
        assert sorted(actual.joined) == sorted(expected.joined)
        for module, other in zip(packable(model), packable(plain), strict=True):
            assert module.layout == other.layout
        before = [fused_address(m) for m in packable(model)]
        again = layers.pack_(model, layout)
        assert (sorted(again.packed), again.kept) == (sorted(actual.packed), actual.kept)
        assert before == [fused_address(m) for m in packable(model)]
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

    def test_layers_without_kernels_stay_as_they_are(self, tmp_path, monkeypatch, caplog):
        source = saved(mixed(1, ["nvfp4"]), tmp_path / "a", layout="transformers")
        pretend_gpu(monkeypatch, "there is no kernel")
        with caplog.at_level(logging.INFO, logger="dsv4.checkpoint"):
            model = load(source, progress=False)
        reasons = model.load_report.packing.kept
        assert set(reasons.values()) == {"there is no kernel"}
        assert {module.layout for module in packable(model)} == {LINEAR}
        [record] = [r for r in caplog.records if MESSAGE in r.message]
        assert f"{len(reasons)} layers are not packed: there is no kernel" in record.message
        original = saved(make_model(CONFIG), tmp_path / "b", layout="deepseek")
        model = load(original, progress=False)
        assert {m.format for m in packable(model) if isinstance(m, DeepseekV4Experts)} == {MXFP4}

    def test_a_layer_that_a_gpu_runs_slowly_is_a_warning(self, tmp_path, caplog):
        """The meta device counts as no CPU: experts, and linear layers in NVFP4 or MXFP4."""
        model = mixed(1, [None, "nvfp4", "mxfp4", "fp8_block"])
        slow = [
            name
            for name, module in quantised_modules(model)
            if isinstance(module, DeepseekV4Experts) or module.format in (NVFP4, MXFP4)
        ]
        reasons = dict.fromkeys((name for name, _ in quantised_modules(model)), "it is so")
        for device, level in (("cpu", logging.INFO), ("meta", logging.WARNING)):
            caplog.clear()
            with caplog.at_level(logging.INFO, logger="dsv4.checkpoint"):
                report_packing(tmp_path, model.to(device), layers.Packing(kept=reasons))
            result = {r.levelno: r.message for r in caplog.records if MESSAGE in r.message}
            number = len(slow) if device == "meta" else len(reasons)
            assert f": {number} layers are not packed: it is so" in result[level]
            assert len(result) == (2 if device == "meta" else 1)
            assert 0 < len(slow) < len(reasons)

    @pytest.mark.parametrize(
        ("capability", "dtype", "expected"),
        [
            ((9, 0), torch.float32, "the model is torch.float32"),
            ((7, 5), torch.bfloat16, "8.0 or newer, the GPU has 7.5"),
            ((8, 0), torch.bfloat16, None),
            ((9, 0), torch.bfloat16, None),
            ((10, 3), torch.bfloat16, None),
            ((11, 0), torch.bfloat16, None),
            ((12, 0), torch.bfloat16, None),
        ],
    )
    def test_reasons(self, capability, dtype, expected):
        gpu = torch.device("cuda", 0)
        with machine.pretend(capability=capability, packages=True):
            actual = supports.no_packed_weights(gpu, dtype)
            assert (actual is None) if expected is None else (expected in actual)

    @pytest.mark.parametrize(
        ("capability", "activation", "layout"),
        [
            ((8, 0), "nvfp4", FRAGMENTS),
            ((9, 0), "nvfp4", FRAGMENTS),
            ((10, 0), "bf16", FRAGMENTS),
            ((10, 0), "nvfp4", SWIZZLED),
            ((10, 3), "nvfp4", SWIZZLED),
            ((12, 0), "nvfp4", FRAGMENTS),
        ],
    )
    def test_layout_of_a_gpu(self, capability, activation, layout):
        with machine.pretend(capability=capability):
            assert supports.packed_layout(torch.device("cuda", 0), activation) == layout

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
        # Without the smallest tensors, which the measure leaves out.
        assert 0.99 * size <= peak <= size + 2 * expert, (size, peak, expert)


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
        packed = supports.no_packed_weights(device, dtype) is None
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
        weights = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes]
        assert torch.cuda.memory_reserved() == reserved
        del weights

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
