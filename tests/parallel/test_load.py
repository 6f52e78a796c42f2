"""Each rank reads, holds and allocates its share of a checkpoint."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import dsv4
from dsv4.checkpoint import Checkpoint, save
from dsv4.compilation.versions import Versions
from dsv4.dispatch import use_backend
from dsv4.layers import quantize_
from dsv4.parallel import kernel_facts
from dsv4.parallel.context import MODES, ParallelContext
from dsv4.parallel.local_model import local_model
from dsv4.parallel.split import local_bytes
from dsv4.quant.formats import FRAGMENTS
from dsv4.testing.ranks import run_ranks
from tests.checkpoint.cases import assert_same_state
from tests.parallel.cases import WIDE, model


def _saved(folder: Path, layout: str, **changes: Any) -> Path:
    whole = model(WIDE.replace(**changes), torch.bfloat16)
    save(whole, folder, layout=layout)
    return folder


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory) -> Path:
    return _saved(tmp_path_factory.mktemp("nvidia"), "nvidia")


def load_ranks(path: Path, size: int, **options: Any) -> list[Any]:
    def work(context):
        return dsv4.load(path, device_mesh=context, parallel="tp", **options)

    options.setdefault("progress", False)
    return run_ranks(size, work)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("nvidia", {}),
        ("nvidia", {"pack": FRAGMENTS}),
        ("deepseek", {}),
        ("deepseek", {"mxfp4": "lossless", "pack": FRAGMENTS}),
        ("transformers", {}),
        ("compressed-tensors", {}),
        ("bf16", {}),
    ],
)
def test_ranks_hold_parts_of_what_one_process_loads(layout, options, tmp_path):
    path = _saved(tmp_path, layout)
    whole = dsv4.load(path, progress=False, **options)
    for rank, local in enumerate(load_ranks(path, 2, **options)):
        assert local.parallel.rank == rank
        expected = run_ranks(2, lambda context: local_model(whole, context))[rank]
        assert_same_state(local.state_dict(), expected.state_dict())


@pytest.mark.parametrize("layout", ["nvidia", "transformers"])
def test_a_rank_reads_its_share_alone(layout, tmp_path):
    """Within 5 % of the rule: what is split over N, and the rest once."""
    path = _saved(tmp_path, layout, vocab_size=1024)
    with Checkpoint.open(path) as checkpoint:
        sizes = {name: entry.nbytes for name, entry in checkpoint.entries.items()}
    rule = local_bytes(sizes, 2)
    assert rule < 0.7 * sum(sizes.values())  # a replicated model fails
    for local in load_ranks(path, 2):
        assert local.load_report.bytes_read == pytest.approx(rule, rel=0.05)
        held = sum(t.nbytes for t in local.state_dict().values())
        assert held == pytest.approx(rule, rel=0.05)


class _Peak(TorchDispatchMode):
    """Counts the bytes of storages that are alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor) and not value.is_meta:
                storage = value.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: v for key, v in self._alive.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_never_holds_more_than_its_share(tmp_path, mode):
    """The peak is the rule and the largest matrix, while it is copied."""
    path = _saved(tmp_path, "bf16", vocab_size=1024)
    with Checkpoint.open(path) as checkpoint:
        sizes = {name: entry.nbytes for name, entry in checkpoint.entries.items()}

    def work(context):
        with _Peak() as memory:
            local = dsv4.load(path, device_mesh=context, parallel=mode, progress=False)
        return local, memory.peak

    largest = max(size for name, size in sizes.items() if ".experts." not in name)
    largest /= 2 if mode == "tp" else 1
    for _, peak in run_ranks(2, work):
        assert peak <= 1.05 * (local_bytes(sizes, 2, mode) + largest)
        assert peak < (0.75 if mode == "tp" else 0.9) * sum(sizes.values())


def test_input_scales_are_those_of_all_experts(tmp_path):
    """An expert without calibration takes the largest scale of the layer, also of another rank."""
    whole = model(WIDE.replace(num_nextn_predict_layers=0), torch.bfloat16)
    quantize_(whole, "nvfp4", ["*.experts"])
    for layer in whole.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            scale = torch.full((8,), 0.01)
            scale[1] = 0.05
            setattr(layer.mlp.experts, name + "_input_scale", torch.nn.Parameter(scale, False))
    save(whole, tmp_path, layout="compressed-tensors")
    _forget_calibration(tmp_path, expert=7)
    options = {"activation": "nvfp4", "progress": False}
    expected = dsv4.load(tmp_path, **options).model.layers[0].mlp.experts
    locals_ = load_ranks(tmp_path, 2, **options)
    scales = [local.model.layers[0].mlp.experts.down_proj_input_scale for local in locals_]
    assert torch.equal(torch.cat(scales), expected.down_proj_input_scale)
    assert scales[1][3] == scales[0][1] > scales[0][0]


def _forget_calibration(folder: Path, expert: int) -> None:
    """Write the scale of a matrix that saw no calibration data, exactly 1."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = [n for n in tensors if f"experts.{expert}." in n and n.endswith("input_global_scale")]
    assert changed
    for name in changed:
        tensors[name] = torch.ones_like(tensors[name])
    save_file(tensors, file)


def test_a_part_of_a_model_is_not_saved(nvidia, tmp_path):
    local, _ = load_ranks(nvidia, 2)
    with pytest.raises(ValueError, match=r"size=2\) of a model, wanted a whole one"):
        save(local, tmp_path / "part")
    assert not (tmp_path / "part").exists()
    assert copy.deepcopy(local).parallel is local.parallel


def refuse(size, mode, path, options, message):
    """Load with options of each rank: all raise one sentence, before anything is allocated."""
    peaks = []

    def work(context):
        with _Peak() as memory:
            try:
                own = {"path": path, **options(context.rank)}
                return dsv4.load(device_mesh=context, parallel=mode, progress=False, **own)
            finally:
                peaks.append(memory.peak)

    with pytest.raises(ValueError, match=message) as raised:
        run_ranks(size, work)
    assert "\n" not in str(raised.value)
    assert peaks == [0] * size


class TestRefusals:
    @pytest.mark.parametrize(
        ("mode", "ranks", "divided"), [("tp", 4, "o_groups"), ("dp", 3, "n_routed_experts")]
    )
    def test_a_number_of_ranks_that_divides_not(self, nvidia, mode, ranks, divided):
        message = f"{ranks} ranks, wanted a number that divides {divided}"
        refuse(ranks, mode, nvidia, lambda rank: {}, message)

    def test_blocks_that_would_be_cut(self, tmp_path):
        path = _saved(tmp_path, "nvidia", moe_intermediate_size=128)
        with pytest.raises(ValueError, match="64 on each of 2 ranks, wanted a multiple of 128"):
            load_ranks(path, 2)

    def test_tiles_that_would_be_cut_where_weights_are_packed(self, tmp_path):
        whole = model(WIDE.replace(moe_intermediate_size=64), torch.bfloat16)
        quantize_(whole, "nvfp4", ["*.experts", "*.shared_experts.*"])
        save(whole, tmp_path, layout="compressed-tensors")
        assert load_ranks(tmp_path, 2, pack=False)
        with pytest.raises(ValueError, match="32 on each of 2 ranks, wanted a multiple of 64"):
            load_ranks(tmp_path, 2, pack=FRAGMENTS)

    @pytest.mark.parametrize("mode", MODES)
    def test_other_options_on_a_rank(self, nvidia, mode):
        def options(rank):
            return {"numerics": ("deepseek", "transformers")[rank]}

        refuse(2, mode, nvidia, options, r"numerics of config.json is 'deepseek' on rank 0")

    @pytest.mark.parametrize("mode", MODES)
    def test_another_configuration_on_a_rank(self, nvidia, mode, tmp_path):
        for file in nvidia.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        values = json.loads((nvidia / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**values, "swiglu_limit": 3.0}))

        def options(rank):
            return {"path": (nvidia, tmp_path)[rank]}

        refuse(2, mode, nvidia, options, r"swiglu_limit of config.json is .* and 3.0 on rank")

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("package", ["dsv4", "torch"])
    def test_another_version_on_a_rank(self, nvidia, mode, package, monkeypatch):
        class Installed:
            ranks = threading.local()

            def __getattr__(self, name):
                return getattr(importlib.import_module(package), name)

            @property
            def __version__(self):
                return f"1.{self.ranks.number}"

        installed = Installed()
        monkeypatch.setattr(kernel_facts, package, installed)

        def options(rank):
            installed.ranks.number = rank
            return {}

        message = rf"the version of {package} is '1\.0' on rank 0 and '1\.1' on rank 1"
        refuse(2, mode, nvidia, options, message)

    @pytest.mark.parametrize(
        ("name", "values", "message"),
        [
            ("triton", ("3.6.0", "3.7.0"), "the version of Triton is '3.6.0' on rank 0 and '3.7"),
            ("cutedsl", ("", "4.8.1"), "the version of CuTeDSL is '' on rank 0 and '4.8.1' on ran"),
            ("sources", ("a", "b"), "a hash of the kernels' sources is 'a' on rank 0 and 'b' on"),
        ],
    )
    def test_another_compiler_on_a_rank(self, nvidia, name, values, message, monkeypatch):
        own, ranks = Versions.current(), threading.local()

        def options(rank):
            ranks.number = rank
            return {}

        def current():
            return dataclasses.replace(own, **{name: values[ranks.number]})

        monkeypatch.setattr(Versions, "current", current)
        refuse(2, "tp", nvidia, options, message)

    @pytest.mark.parametrize("mode", MODES)
    def test_another_backend_on_a_rank(self, nvidia, mode):
        """Named by ``use_backend`` or ``DSV4_BACKEND``: kernels of others round differently."""

        def work(context):
            with use_backend(("auto", "reference")[context.rank]):
                dsv4.load(nvidia, device_mesh=context, parallel=mode, progress=False)

        message = "the requested backend is 'auto' on rank 0 and 'reference' on rank 1"
        with pytest.raises(ValueError, match=message):
            run_ranks(2, work)

    def test_other_plans_on_a_rank(self, nvidia, monkeypatch):
        """Of a file that ``bench tune`` wrote for one rank alone."""
        ranks = threading.local()

        def options(rank):
            ranks.number = rank
            return {}

        monkeypatch.setattr(kernel_facts, "tuned", lambda: ranks.number)
        refuse(2, "tp", nvidia, options, "a hash of the figures of kernels' plans is .* on rank 0")

    def test_another_gpu_on_a_rank(self, nvidia, monkeypatch):
        """Its plans may add up products in another order."""
        names, ranks = ("NVIDIA H100", "NVIDIA H200"), threading.local()

        def options(rank):
            ranks.number = rank
            return {"device": "cuda"}

        def properties(device):
            name = names[ranks.number]
            return SimpleNamespace(name=name, multi_processor_count=132, major=9, minor=0)

        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        refuse(2, "tp", nvidia, options, "the GPU is .*H100.* on rank 0 and .*H200.* on rank 1")

    @pytest.mark.parametrize(
        ("mesh", "parallel", "message"),
        [
            (None, "tp", "device_mesh is None"),
            (object(), None, "parallel is None, wanted 'tp'"),
            (None, "dp", "parallel is 'dp' and device_mesh is None, wanted a DeviceMesh"),
            (None, "multicast", "NVLink multicast is never used"),
            (None, "ep", "parallel is 'ep', wanted 'tp', 'dp' or None"),
        ],
    )
    def test_arguments(self, mesh, parallel, message, tmp_path):
        with pytest.raises(ValueError, match=message):
            dsv4.load(tmp_path, device_mesh=mesh, parallel=parallel)

    @pytest.mark.parametrize("mode", MODES)
    def test_experts_in_host_memory_are_refused_on_all_ranks(self, nvidia, mode):
        """They may have no such argument, and would wait."""
        errors = []
        group = SimpleNamespace(name="", mailbox=None, watch=None, report=errors.append)
        context = ParallelContext(0, 2, group, mode)
        with pytest.raises(ValueError, match="host_experts is 'auto' and parallel is ") as raised:
            dsv4.load(nvidia, device_mesh=context, parallel=mode, host_experts="auto")
        assert errors == [raised.value]

    def test_a_mesh_without_this_process(self, tmp_path, monkeypatch):
        class Mesh:
            ndim, device_type, mesh = 1, "cpu", torch.tensor([0, 1])

            def get_coordinate(self):
                return None

        monkeypatch.setattr(torch.distributed.device_mesh, "DeviceMesh", Mesh)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
        message = r"device_mesh has the ranks \[0, 1\], wanted one with this process, rank 2"
        with pytest.raises(ValueError, match=message):
            dsv4.load(tmp_path, device_mesh=Mesh(), parallel="tp")

    def test_a_mesh_of_another_kind_of_device(self, tmp_path, monkeypatch):
        monkeypatch.setattr(
            torch.distributed.device_mesh,
            "DeviceMesh",
            type("Mesh", (), {"ndim": 1, "device_type": "cuda", "get_coordinate": lambda _: None}),
        )
        mesh = torch.distributed.device_mesh.DeviceMesh()
        with pytest.raises(ValueError, match="is of cuda and device is cpu, wanted the same kind"):
            dsv4.load(tmp_path, device_mesh=mesh, parallel="tp")

    def test_a_mesh_of_another_type(self, tmp_path):
        with pytest.raises(TypeError, match="device_mesh is int, wanted"):
            dsv4.load(tmp_path, device_mesh=2, parallel="tp")

    @pytest.mark.parametrize(
        ("name", "value", "off"),
        [
            ("NCCL_NVLS_ENABLE", "1", "0"),
            ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0", "1"),
            ("NVSHMEM_DISABLE_NVLS", "0", "1"),
        ],
    )
    def test_multicast_of_the_environment(self, name, value, off, tmp_path, monkeypatch):
        monkeypatch.setenv(name, value)
        for mode in MODES:
            with pytest.raises(ValueError, match=f"{name} is '{value}', wanted '{off}' or unset"):
                dsv4.load(tmp_path, device_mesh=object(), parallel=mode)
