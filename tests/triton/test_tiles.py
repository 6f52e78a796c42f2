"""Tiles that depend on a GPU's shared memory; no GPU takes part."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import device
from dsv4.triton import compressor_projections, gemm_fp8
from dsv4.triton._lib import mixing_gemm, router_logits
from dsv4.triton._runtime import launch_options

GPUS = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
HOPPER = device.shared_memory((9, 0))
gpus = st.sampled_from(GPUS)
tokens = st.integers(1, 8192)


@given(gpus, tokens, st.sampled_from([8, 256, 384, 512]))
def test_the_routers_stages_fit(gpu, tokens, experts):
    shared = device.shared_memory(gpu)
    tile = router_logits._tile(tokens, experts, torch.bfloat16, shared)
    width = tile.tokens + tile.columns + tile.rest
    assert tile.stages >= 2
    assert 2 * tile.stages * tile.block * width < shared
    if shared == HOPPER:
        assert tile == router_logits._measured_tile(tokens, experts, torch.bfloat16)


@given(gpus, tokens, st.integers(1, 64), st.integers(1, 8192))
def test_stages_of_fp8_weights_fit(gpu, tokens, rows, columns):
    shared = device.shared_memory(gpu)
    plan = gemm_fp8.plan(tokens, 128 * rows, columns, 1, 132, shared)
    assert plan.stages >= 2
    assert plan.stages * 128 * (plan.rows + 2 * plan.tokens) < shared
    if shared == HOPPER:
        assert plan.stages == {128: 4, 64: 4, 32: 5, 16: 6}[plan.tokens]


@pytest.mark.parametrize("gpu", GPUS)
def test_stages_of_the_mixing_gemm_fit(gpu):
    shared = device.shared_memory(gpu)
    tile = group, block, stages, _ = mixing_gemm._large_m_tile(shared)
    assert 2 * stages * block * (group + 128) < shared
    assert (tile == mixing_gemm._LARGE_M_TILE) == (shared == HOPPER)


@pytest.mark.parametrize("gpu", GPUS)
def test_a_gpu_that_is_pretended_decides(gpu):
    x = torch.empty(0, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_options, "capability", lambda tensor: gpu)
        assert launch_options.sm(x) == 10 * gpu[0] + gpu[1]
        assert launch_options.shared_memory(x) == device.shared_memory(gpu)
        assert launch_options.has_descriptors(x) == (gpu >= (9, 0))
        assert launch_options.has_wide_tiles(x) == (gpu[0] in (9, 10))


def test_a_gpu_that_is_not_known_has_the_least():
    assert device.shared_memory((13, 7)) == 99 * 1024


@given(gpus, tokens, st.sampled_from([256, 4096, 7168]))
def test_the_compressors_stages_fit(gpu, tokens, hidden):
    """Of a pipeline's stages one has no shared memory: its operands are in registers."""
    shared = device.shared_memory(gpu)
    tile = compressor_projections.tile_of(tokens, hidden, shared)
    assert tile.stages >= 3
    assert 2 * (tile.stages - 1) * tile.block * (tile.tokens + tile.rows) < shared
    if shared == HOPPER:
        assert tile.stages == 4


@given(gpus, st.integers(1, 8), st.integers(0, 99 * 1024))
def test_resident_programs_fit_an_sm(gpu, most, shared):
    """One program fits always; Hopper keeps numbers that were measured there."""
    memory = device.shared_memory(gpu)
    resident = launch_options.resident(memory, most, shared)
    if memory == HOPPER:
        assert resident == most
    else:
        assert 1 <= resident <= most
        assert resident * (shared + 1024) <= memory + 1024
        assert resident == most or (resident + 1) * (shared + 1024) > memory + 1024
