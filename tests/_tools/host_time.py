"""Host time of an eager decode step, measured without a GPU.

    python -m tests._tools.host_time [--layers N] [--count] [--operators] [--profile]

Not with TRITON_INTERPRET.

Builds a Flash model of uninitialised packed weights on the CPU and lets it decode as on an H100:
dispatch chooses a GPU's implementations, launchers run, and kernels are compiled, but a mock CUDA
driver receives the launches. The extra cost of a CUDA tensor over one on the CPU, and side streams,
are not seen.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import cProfile
import json
import pstats
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch.nn import functional as F
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from dsv4 import ModelConfig, dispatch
from dsv4 import device as machine
from dsv4.compilation.meta_model import packed_model
from dsv4.cute.runtime import driver as cuda_driver
from dsv4.cute.runtime.architectures import HOPPER
from dsv4.cute.runtime.driver import Image, Kernel
from dsv4.layers import _layer_plan
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.ops import _library, _plans
from dsv4.testing.frames import frames_outside_implementations
from dsv4.triton._runtime import launch_options, launcher

GPU = torch.device("cuda", 0)
_PROCESSORS = 132
_CPU = -1  # what ``get_device`` says of a tensor on the CPU


class MockDriver:
    """CUDA's driver: every call succeeds, launches are counted."""

    def __init__(self) -> None:
        self.launches = self.by_triton = 0
        self.cuLaunchKernelEx = self._launch

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 0

    def cuOccupancyMaxActiveClusters(self, count: Any, kernel: Any, config: Any) -> int:  # noqa: N802
        count._obj.value = _PROCESSORS
        return 0

    def _launch(self, config: Any, kernel: Any, parameters: Any, extra: Any) -> int:
        self.launches += 1
        return 0


class MockTritonDriver:
    """The answers that Triton asks its driver for: an H100 whose launcher does nothing."""

    def __init__(self, cuda: MockDriver) -> None:
        self.target = GPUTarget("cuda", 90, 32)
        self.utils = types.SimpleNamespace(
            load_binary=lambda *arguments: (1, 1, 32, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
            unload_module=lambda module: None,
        )
        self.cuda = cuda

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            self.cuda.launches += 1
            self.cuda.by_triton += 1

        return launch

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _mock_kernel(plan: Any, arch: str) -> Kernel:
    kernel = _MOCK_KERNELS.get(plan)
    if kernel is None:
        names = ("threads", "blocks", "shared_bytes")
        threads, blocks, shared = (getattr(plan, name, 1) for name in names)
        kernel = _MOCK_KERNELS[plan] = Kernel(Image(b"", "mock", threads, blocks, shared))
    return kernel


_MOCK_KERNELS: dict[Any, Kernel] = {}


def replacements(cuda: MockDriver) -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and value of what is replaced while CPU tensors stand for those of an H100."""
    options = {"launch_pdl": True, "enable_fp_fusion": True}
    yield dispatch, "Call", lambda op, args, device, call=dispatch.Call: call(op, args, GPU)
    yield (
        launch_options,
        "options",
        lambda tensor, small=False: {**options, "PDL": 2 if small else 1},
    )
    yield launch_options, "capability", lambda tensor: (9, 0)
    yield launch_options, "sm_count", lambda device: _PROCESSORS
    yield launcher, "is_on_gpu", lambda tensor: True
    yield _plans, "PLANNED_DEVICES", frozenset({"cpu"})
    yield cuda_driver, "_driver", lambda: cuda
    yield cuda_driver, "tensor_map", lambda address, matrix: bytes(128)
    yield torch.cuda, "device", lambda device: contextlib.nullcontext()
    yield F, "linear", lambda x, weight: x.new_empty((*x.shape[:-1], weight.shape[0]))
    fakes = {
        "stream_of": lambda index: 0,
        "current_device": lambda: _CPU,
        "architecture": lambda index: HOPPER,
        "loaded": _mock_kernel,
        "_multiprocessors": lambda index: _PROCESSORS,
        "check_ids": lambda *arguments: None,
    }
    modules = [m for name, m in sys.modules.items() if name.startswith("dsv4.")]
    for module in modules:
        for name, fake in fakes.items():
            if hasattr(module, name):
                yield module, name, fake


@contextlib.contextmanager
def mocked() -> Iterator[MockDriver]:
    """CPU tensors are taken for tensors of an H100 inside; gives the driver that counts."""
    cuda = MockDriver()
    with contextlib.ExitStack() as undo:
        facts = {"capability": (9, 0), "sms": _PROCESSORS, "packages": True}
        undo.enter_context(machine.pretend(**facts))
        for owner, name, value in replacements(cuda):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        for operation in _library.OPERATIONS.values():
            # Checks of values, which a GPU's tensors skip; a frozen record has no setattr.
            undo.callback(vars(operation).__setitem__, "check", operation.check)
            vars(operation)["check"] = None
        undo.callback(setattr, triton.runtime.driver, "_active", triton.runtime.driver._active)
        triton.runtime.driver.set_active(MockTritonDriver(cuda))
        yield cuda


def build(layers: int, experts: int) -> tuple[DeepseekV4ForCausalLM, Any]:
    """A packed Flash model without values, and a decode step of one token."""
    config = ModelConfig.flash()
    config = config.replace(
        n_routed_experts=experts,
        num_hidden_layers=layers,
        layer_types=config.layer_types[:layers],
        mlp_layer_types=config.mlp_layer_types[:layers],
        num_nextn_predict_layers=0,
        vocab_size=256,
    )
    model = packed_model(config).to_empty(device="cpu").eval().requires_grad_(False)
    cache = model.new_cache(1, 4096, 64, index_format="index_mxfp4")
    cache.allocate()
    return model, cache


def import_launchers() -> None:
    """Import every implementation, so that what they hold can be replaced."""
    for row in dispatch.IMPLEMENTATIONS:
        with contextlib.suppress(ImportError):
            dispatch.load(row.target)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--count", action="store_true", help="count Python calls instead of time")
    parser.add_argument("--operators", action="store_true", help="time each operator by itself")
    parser.add_argument("--profile", action="store_true", help="and print where time goes")
    options = parser.parse_args()
    import_launchers()
    model, cache = build(options.layers, options.experts)
    token, row = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)

    def step() -> None:
        model.decode(token, cache, row)
        cache.lengths.zero_()

    with mocked() as cuda:
        for _ in range(6):  # compile, record operators and then layers, replay
            step()
        cuda.launches = cuda.by_triton = 0
        step()
        result: dict[str, Any] = {"layers": options.layers, "launches": cuda.launches}
        result["by_triton"] = cuda.by_triton
        if options.count:
            frames = frames_outside_implementations(step)
            result["frames_per_layer"] = round(frames.total() / options.layers)
            print(*frames.most_common(25), sep="\n", file=sys.stderr)
            result["calls_per_layer"] = round(_calls(step) / options.layers)
            result["plans"] = dict(collections.Counter(kind for _, kind in plan_kinds()))
            result["layer_plans"] = dict(collections.Counter(layer_plan_kinds(model)))
        else:
            best = min(_seconds(step) for _ in range(options.steps))
            result["us_per_launch"] = round(1e6 * best / result["launches"], 2)
            result["us_per_layer"] = round(1e6 * best / options.layers, 1)
        print(json.dumps(result))
        if options.operators:
            with torch.inference_mode():
                _time_operators(step)
        if options.profile:
            for name, kind in plan_kinds():
                print(f"{name:<28}{kind}")
            _profile(step)


def _seconds(step: Callable[[], None]) -> float:
    """Time of the processor, without other processes."""
    started = time.process_time()
    step()
    return time.process_time() - started


def _time_operators(step: Callable[[], None]) -> None:
    """Print us per call by plan, and without plans and with Triton's own launches."""
    calls: list[tuple[Any, ...]] = []
    call, devices, run = _plans.PLANS.call, _plans.PLANNED_DEVICES, JITFunction.run
    _plans.PLANS.call = lambda *arguments: (calls.append(arguments), call(*arguments))[1]  # type: ignore[method-assign]
    is_plain, _layer_plan._is_plain = _layer_plan._is_plain, lambda call: False
    step()
    _layer_plan._is_plain = is_plain
    del _plans.PLANS.call
    table: dict[str, list[tuple[float, float]]] = {}
    for function, args, kwargs in calls:
        planned = _best(lambda f=function, a=args, k=kwargs: call(f, a, k))
        JITFunction.run = lambda self, *a, **k: run(self, *a, **k)
        _plans.PLANNED_DEVICES = frozenset()
        before = _best(lambda f=function, a=args, k=kwargs: f(*a, **k))
        JITFunction.run, _plans.PLANNED_DEVICES = run, devices
        table.setdefault(function.__name__, []).append((planned, before))
    print(f"{'operator':<28}calls   us by plan   us before")
    for name, times in sorted(table.items(), key=lambda item: -sum(t for t, _ in item[1])):
        planned, before = (sum(column) / len(times) for column in zip(*times, strict=True))
        print(f"{name:<28}{len(times):>5}{planned:>13.2f}{before:>12.2f}")


def _best(run: Callable[[], Any]) -> float:
    def several() -> None:
        for _ in range(20):
            run()

    return 1e6 * min(_seconds(several) for _ in range(7)) / 20


def _calls(step: Callable[[], None]) -> int:
    """Calls of functions in Python and in C."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def plan_kinds() -> list[tuple[str, str]]:
    """Operator and kind of every plan."""
    return sorted(
        (arguments.function.__name__, "none" if p.again is None else type(p.again).__name__)
        for (arguments, *_), plans in _plans.PLANS._plans.items()
        for p in plans
    )


def layer_plan_kinds(model: DeepseekV4ForCausalLM) -> list[str]:
    """Kind of every plan of a layer."""
    return [
        type(plan.again).__name__
        for layer in model.model.layers
        for plans in layer.__dict__["_plans"].plans.values()
        for plan in plans
    ]


def _profile(step: Callable[[], None]) -> None:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(5):
        step()
    profile.disable()
    stats = pstats.Stats(profile)
    stats.sort_stats("cumulative").print_stats(70)
    stats.sort_stats("tottime").print_stats(60)


if __name__ == "__main__":
    main()
