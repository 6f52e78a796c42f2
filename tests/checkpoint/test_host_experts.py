"""``load(host_experts=)``: placements that fit, the bits of the model, and what is refused."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from dsv4 import layers
from dsv4.checkpoint import load, save
from dsv4.checkpoint.host_experts import ExpertSizes, describe
from dsv4.config import ModelConfig
from dsv4.layers import HostExperts
from dsv4.layers import _host_memory as host_memory
from dsv4.layers._expert_staging import STAGED_STEP_TOKENS
from dsv4.layers.host_experts import experts_of
from dsv4.layers.step_tokens import prompt_bytes
from dsv4.testing.assertions import assert_bitwise
from tests.checkpoint.load_cases import mixed

LAYERS, EXPERTS, TOP_K = 3, 4, 2
FLASH = ExpertSizes(
    43, 256, 6, 14_172_192, 12_400_000_000, prompt_bytes(ModelConfig.flash(), STAGED_STEP_TOKENS)
)
GB = 10**9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model = mixed(5, ["nvfp4"])
    save(model, path, layout="transformers", plain=("*",), plain_dtype=None)
    return path


def tensors_of(path):
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return tensors


class TestLoad:
    @pytest.mark.parametrize("pack", [False, "fragments_16x64"])
    @pytest.mark.parametrize("value", [HostExperts(1, 2), 1])
    def test_gives_the_same_model(self, folder, tmp_path, pack, value, caplog):
        options = {"pack": pack, "progress": False, "input_scales": "token"}
        plain = load(folder, **options)
        with caplog.at_level(logging.INFO, logger="dsv4.checkpoint"):
            model = load(folder, host_experts=value, **options)
        static = 1 if isinstance(value, HostExperts) else 3
        line = f"of 4 experts of each layer {static} are static and"
        assert sum(line in record.message for record in caplog.records) == 1
        assert all(e.hosted.static_slots == static for _, e in experts_of(model))
        ids = torch.arange(1, 9).unsqueeze(0)
        assert_bitwise(model(ids), plain(ids), "logits")
        prompts = [[1, 2, 3], [4, 5]]
        assert model.generate(prompts, 4) == plain.generate(prompts, 4)
        save(model, tmp_path, layout="transformers", plain=("*",), plain_dtype=None)
        again, before = tensors_of(tmp_path), tensors_of(folder)
        assert again.keys() == before.keys()
        for name, tensor in before.items():
            assert_bitwise(again[name], tensor, name)

    def test_counts_choose_the_static_experts(self, folder):
        counts = torch.tensor([[0, 1, 2, 3], [9, 0, 0, 8], [1, 1, 1, 1]])
        placement = HostExperts(2, 2, counts)
        model = load(folder, progress=False, host_experts=placement)
        hosted = [e.hosted.static_experts() for _, e in experts_of(model)]
        assert hosted == [[2, 3], [0, 3], [0, 1]]

    def test_auto_leaves_a_model_on_a_cpu(self, folder):
        model = load(folder, progress=False, host_experts="auto")
        assert all(e.hosted is None for _, e in experts_of(model))
        with pytest.raises(ValueError, match="no experts in host memory"):
            layers.expert_counts(model)

    @pytest.mark.parametrize(
        ("value", "error", "message"),
        [
            ("all", ValueError, "host_experts is 'all', wanted 'auto'"),
            (-1, ValueError, "host_experts is -1, wanted 'auto'"),
            (1.5, TypeError, "host_experts is 1.5, wanted 'auto'"),
            (torch.rand(3, 4), TypeError, "host_experts: counts have dtype torch.float32"),
            (torch.tensor([[-1]]), ValueError, "host_experts: a count is -1, wanted 0 or more"),
            # On a CPU, where no expert is moved, too.
            (torch.ones(4, 4).long(), ValueError, r"counts have shape \[4, 4\], wanted \[3, 4\]"),
            (HostExperts(1, 1), ValueError, "slots is 1, wanted 2 to 3"),
            (HostExperts(4, 1), ValueError, "slots is 1, wanted 0 to 0"),
        ],
    )
    def test_a_wrong_value_is_refused(self, folder, value, error, message):
        with pytest.raises(error, match=message):
            load(folder, progress=False, host_experts=value)

    def test_too_little_host_memory_is_said_before_anything_is_read(self, folder, monkeypatch):
        check = host_memory.check_available
        monkeypatch.setattr(host_memory, "check_available", lambda n: check(n, lambda: 3 * GB))
        with pytest.raises(MemoryError, match=r"but 3\.0 GB are available"):
            load(folder, progress=False, host_experts=1)


class TestPlacement:
    def test_of_flash_on_one_gpu(self):
        """Of 256 experts of a layer, 209 are on an H200 and 101 on an H100."""
        h200 = FLASH.placement(int(148.7 * GB), 120 * GB)
        h100 = FLASH.placement(int(83.2 * GB), 130 * GB)
        assert (h200.static, h200.slots) == (148, 60)
        assert (h100.static, h100.slots) == (72, 29)
        assert 64 * GB < FLASH.host_bytes(h200) < 66 * GB
        assert FLASH.placement(181 * GB, 0) is None

    def test_counts_leave_fewer_slots(self):
        """Static experts that are the most used ones save more loads than slots do."""
        counts = torch.arange(43 * 256).view(43, 256)
        plain = FLASH.placement(int(83.2 * GB), 130 * GB)
        counted = FLASH.placement(int(83.2 * GB), 130 * GB, counts=counts)
        assert counted.slots == 12
        assert counted.static + counted.slots == plain.static + plain.slots
        assert counted.static_of(3, 256) == list(range(256 - counted.static, 256))

    def test_counts_the_buffer_for_long_prompts(self):
        """Its halves hold the experts without a slot of a layer, or 0.54 GB of them."""
        h200 = FLASH.placement(int(148.7 * GB), 120 * GB)
        h100 = FLASH.placement(int(83.2 * GB), 130 * GB)
        assert (h200.staged, h100.staged) == (24, 37)
        assert FLASH.buffer_bytes(h200) == 48 * FLASH.expert_bytes
        line = "73.9 GB of weights and 1.0 GB for experts of long prompts on the GPU, 112.1 GB in"
        assert line in describe(FLASH, h100)
        assert "long prompts" not in describe(FLASH, HostExperts(72, 29))

    def test_leaves_room_for_the_stacks_of_a_layer(self):
        """Those of a layer of Pro are larger than what a step needs."""
        prompt = prompt_bytes(ModelConfig.pro(), STAGED_STEP_TOKENS)
        pro = ExpertSizes(61, 384, 6, 37_200_000, 30_000_000_000, prompt)
        placement = pro.placement(int(148.7 * GB), 1500 * GB)
        stacks = pro.experts * pro.expert_bytes
        assert stacks > 8 * GB
        assert pro.gpu_bytes(placement) + pro.buffer_bytes(placement) + stacks < 147 * GB
        assert FLASH.kept_bytes() == 8 * GB > FLASH.prompt_bytes
        assert pro.kept_bytes() > pro.prompt_bytes > 8 * GB

    @given(gpu=st.integers(0, 200), prompt=st.integers(0, 30))
    def test_leaves_room_for_a_prompt_in_one_step_if_it_can(self, gpu, prompt):
        """With more memory for a prompt there is a placement wherever there is one with less."""
        sizes = replace(FLASH, prompt_bytes=prompt * GB)
        try:
            short = replace(FLASH, prompt_bytes=0).placement(gpu * GB, 200 * GB)
        except MemoryError:
            with pytest.raises(MemoryError):
                sizes.placement(gpu * GB, 200 * GB)
            return
        placement = sizes.placement(gpu * GB, 200 * GB)
        assert (placement is None) == (short is None)
        if placement is None:
            return
        free = gpu * GB - sizes.gpu_bytes(placement) - sizes.buffer_bytes(placement)
        same = (placement.static, placement.slots) == (short.static, short.slots)
        assert free >= prompt * GB or same

    @given(gpu=st.integers(0, 200), host=st.integers(0, 200))
    def test_fits_or_says_what_there_is(self, gpu, host):
        try:
            placement = FLASH.placement(gpu * GB, host * GB)
        except MemoryError:
            with pytest.raises(MemoryError, match=rf"{host}\.0 GB are free for the others"):
                FLASH.placement(gpu * GB, host * GB)
            return
        if placement is None:
            assert FLASH.total < gpu * GB
            return
        placement.check(256, 43, 6)
        buffer = FLASH.buffer_bytes(placement)
        assert 0 < buffer <= 1.1 * GB
        assert FLASH.gpu_bytes(placement) + buffer + 8 * GB <= gpu * GB
        assert FLASH.host_bytes(placement) <= host * GB

    @given(nbytes=st.integers(1, 170), gpu=st.sampled_from([None, 30, 83, 149]))
    def test_of_a_number_of_bytes(self, nbytes, gpu):
        try:
            placement = FLASH.with_host_bytes(nbytes * GB, None if gpu is None else gpu * GB)
        except MemoryError:
            assert gpu is not None
            with pytest.raises(MemoryError, match="are free on the GPU for routed"):
                FLASH.with_host_bytes(nbytes * GB, gpu * GB)
            return
        placement.check(256, 43, 6)
        everything = placement.static == 0
        assert everything or FLASH.host_bytes(placement) >= nbytes * GB
        buffer = FLASH.buffer_bytes(placement)
        assert gpu is None or FLASH.gpu_bytes(placement) + buffer + 8 * GB <= gpu * GB
