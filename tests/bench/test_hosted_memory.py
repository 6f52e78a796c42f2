"""Memory of ``bench model --host-experts``: what a model takes while it is built, and later."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsv4.bench.cases import PRESETS
from dsv4.bench.problem import UsageError
from dsv4.bench.suites import random_model as random_model_module
from dsv4.bench.suites.model import hosted, memory
from dsv4.bench.suites.model.memory import ACTIVATIONS, model_bytes
from dsv4.bench.suites.model.request import DraftRequest
from dsv4.bench.suites.random_model import Weights, random_model
from dsv4.checkpoint.host_experts import FILLING_GPU_BYTES
from dsv4.config import ModelConfig
from dsv4.layers import HostExperts, _host_memory
from dsv4.layers.host_experts import Hosting, experts_of
from tests.bench.test_model import request_of

GB = 10**9


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made inside of the block held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if self._total() > self.peak:  # some of them may be gone
            self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
            self.peak = max(self.peak, self._total())
        return result

    def _total(self) -> int:
        return sum(nbytes for _, nbytes in self._alive.values())


@pytest.mark.parametrize("drafts", [None, DraftRequest("mtp", 1)])
def test_a_model_takes_no_more_than_is_counted_while_it_is_built(drafts, monkeypatch):
    """An embedding drawn at once in float32 would be the peak, as on a GPU that ran out of it."""
    monkeypatch.setattr(random_model_module, "_DRAWN_NUMBERS", 1 << 12)
    config = ModelConfig.tiny(
        hidden_size=64,
        moe_intermediate_size=64,
        n_routed_experts=24,
        vocab_size=4096,
        num_hidden_layers=2,
        layer_types=ModelConfig.tiny().layer_types[:1] * 2,
        mlp_layer_types=("moe",) * 2,
        num_nextn_predict_layers=int(drafts is not None),
    )
    placement = HostExperts(4, 6, staged=3)
    request = request_of(config=config, host_experts=placement, drafts=drafts)
    counted = model_bytes(request).with_slots(placement)
    gc.collect()
    with PeakBytes() as used:
        hosting = Hosting(placement, 2)
        model = random_model(
            config, torch.device("cpu"), Weights(), hosting=hosting, mtp=drafts is not None
        )
    in_host = sum(experts.hosted.rows.nbytes for _, experts in experts_of(model))
    assert hosting.staging is not None
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) + hosting.staging.nbytes
    assert held <= 1.02 * (counted.peak - 24 * counted.layer_expert)
    temporaries = 4 * 2 * (1 << 12) + 8 * counted.layer_expert
    assert held < used.peak - in_host <= counted.peak + temporaries


@pytest.fixture(scope="module", params=[None, "mtp"])
def auto(request):
    """Whole Flash on a GPU, with two sizes of cache, with a draft and without."""
    drafts = None if request.param is None else DraftRequest(request.param, 1)
    config = PRESETS["flash"]().replace(num_nextn_predict_layers=int(drafts is not None))
    request = request_of(preset="flash", config=config, tokens=(1, 16), drafts=drafts)
    request = dataclasses.replace(
        request, contexts=(4096,), device=torch.device("cuda"), host_experts="auto"
    )
    size, caches = model_bytes(request), memory.caches_of(request)
    patch = pytest.MonkeyPatch()
    for module in (hosted, memory):
        patch.setattr(module, "model_bytes", lambda _: size)
        patch.setattr(module, "caches_of", lambda _: caches)
    yield request, caches
    patch.undo()


@given(gpu=st.integers(15, 200))
@settings(max_examples=40)
def test_what_auto_chooses_fits(auto, gpu):
    """Stacks of a layer while it is filled; cache and activations of every row afterwards."""
    request, caches = auto
    draft = 0 if request.drafts is None else 4
    with pytest.MonkeyPatch.context() as patch:
        for module in (hosted, memory):
            patch.setattr(module, "free_bytes", lambda _: gpu * GB)
        patch.setattr(_host_memory, "available_bytes", lambda: 300 * GB)
        patch.setattr(_host_memory, "check_available", lambda nbytes: None)
        try:
            placed = hosted.placed(request)
        except UsageError:
            assert gpu < 27 + draft or gpu > 170
            return
        fitted = memory.fitted(placed)
        size = memory.model_bytes(request).with_slots(placed.host_experts)
    assert gpu < 29 + draft or not fitted.left_out, "the largest cache was counted"
    assert (1, 4096) not in fitted.left_out
    assert size.peak + FILLING_GPU_BYTES <= gpu * GB
    weights = size.peak - size.stacked * size.layer_expert
    rows = caches.keys() - fitted.left_out.keys()
    assert weights + max(caches[row] for row in rows) + ACTIVATIONS <= gpu * GB


def test_a_placement_of_ones_own_that_does_not_fit_is_refused(auto):
    request, _ = auto
    own = dataclasses.replace(request, host_experts=HostExperts(200, 30))
    with pytest.raises(UsageError, match="wanted --host-experts auto, or fewer static experts"):
        memory.fitted(own, 140 * GB)
