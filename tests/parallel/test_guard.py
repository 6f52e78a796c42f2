"""Streams that differ between ranks are seen, and the layer is named."""

from __future__ import annotations

import pytest
import torch

from dsv4.parallel.guard import StreamsDifferError, guard, hash64
from dsv4.parallel.local_model import local_model
from dsv4.serving import Runner
from dsv4.testing.ranks import run_ranks
from tests.parallel.cases import model, prompt


@pytest.fixture(scope="module")
def whole():
    return model(dtype=torch.bfloat16)


def spoil(layer):
    """Change the last bit of one number of the streams behind a layer."""

    def hook(module, args, output):
        changed = output.clone()
        changed.view(torch.int16).view(-1)[17] ^= 1
        return changed

    layer.register_forward_hook(hook)


def test_equal_streams_pass(whole, caplog):
    def work(context):
        local = local_model(whole, context)
        with guard(local, every=1), Runner(local, max_sequences=1, max_tokens=16) as runner:
            return runner.add([1, 2, 3], max_new_tokens=4, stop_ids=()).result()

    first, second = run_ranks(2, work)
    assert first == second
    assert "guard" not in caplog.text


@pytest.mark.parametrize("number", [0, 2])
def test_one_other_bit_on_one_rank_is_seen_behind_its_layer(whole, number):
    def work(context):
        local = local_model(whole, context)
        if context.rank == 1:
            spoil(local.model.layers[number])
        with guard(local, every=1), torch.no_grad():
            local(prompt(local))

    with pytest.raises(StreamsDifferError, match=f"behind model.layers.{number} differ .* rank 1"):
        run_ranks(2, work)


def test_every_n_th_step_is_checked(whole):
    def work(context):
        local = local_model(whole, context)
        before = len(context.group.gathered)
        with guard(local, every=3), torch.no_grad():
            for _ in range(7):
                local(prompt(local, 2))
        shape = (len(local.model.layers) + 1,)
        return context.group.gathered[before:].count(shape)

    assert run_ranks(2, work) == [3, 3]


def test_steps_that_a_graph_captures_are_left_out_and_that_is_said(whole, monkeypatch, caplog):
    """A comparison waits for the device, which ends a capture with an error."""
    monkeypatch.setattr("dsv4.parallel.guard._is_captured", lambda streams: True)

    def work(context):
        local = local_model(whole, context)
        if context.rank == 1:
            spoil(local.model.layers[0])
        with guard(local, every=1), torch.no_grad():
            local(prompt(local))
            caplog.clear()

    run_ranks(2, work)
    assert "guard: no eager step ran, so nothing was compared" in caplog.text


def test_a_model_of_one_process_and_a_wrong_number(whole):
    with pytest.raises(ValueError, match="in one process"), guard(whole):
        pass
    whole_of_two = type("Model", (), {"parallel": object()})()
    with pytest.raises(ValueError, match="every is 0, wanted 1 or more"), guard(whole_of_two, 0):
        pass


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_hashes_of_other_bits_differ(dtype):
    values = torch.randn(5, 8).to(dtype)
    bits = values.view(torch.uint8)
    hashes = {int(hash64(values)), int(hash64(values.flip(0)))}
    for byte in range(0, bits.numel(), 7):
        changed = bits.clone()
        changed.view(-1)[byte] ^= 1 << (byte % 8)
        hashes.add(int(hash64(changed.view(dtype))))
    assert len(hashes) == 2 + len(range(0, bits.numel(), 7))
