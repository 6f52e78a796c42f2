"""Check that a model can be captured in CUDA graphs; clean up captures that fail."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from dsv4 import dispatch
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear
from dsv4.model import DeepseekV4ForCausalLM

_Output = TypeVar("_Output")


class CaptureError(RuntimeError):
    """A capture failed, for the reason in ``__cause__``. No sequence has changed."""


def obstacle(
    model: DeepseekV4ForCausalLM, tokens: Sequence[int], device: torch.device
) -> str | None:
    """Return why decode steps of a model cannot be captured, or None.

    Args:
        model: An uncompiled model.
        tokens: Batch sizes of the steps.
        device: GPU on which they would run.
    """
    return _obstacle(model.model.named_modules(prefix="model"), tokens, model.dtype, device)


def draft_obstacle(
    model: DeepseekV4ForCausalLM, tokens: Sequence[int], device: torch.device
) -> str | None:
    """Return why drafts of a model cannot be captured, or None; see ``obstacle``."""
    return _obstacle(model.mtp.named_modules(prefix="mtp"), tokens, model.dtype, device)


def _obstacle(
    modules: Iterable[tuple[str, torch.nn.Module]],
    tokens: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    for name, layer in modules:
        if _observed(layer):
            return f"{name} is being calibrated, and its observer reads activations on the host"
        if isinstance(layer, DeepseekV4Experts) and layer.hosted is not None:
            reason = layer.hosted.obstacle(max(tokens) * layer.num_experts_per_tok)
            if reason is not None:
                most = layer.hosted.cached_slots // layer.num_experts_per_tok
                return f"{name}: {reason}; wanted at most {most} tokens in a decode step"
        if isinstance(layer, DeepseekV4Experts):
            reason = _wait(layer, tokens, dtype, device)
            if reason is not None:
                return (
                    f"{name}: {reason}, which reads the number of rows of each expert on the "
                    "host; wanted a bfloat16 model whose routed experts are MXFP4, or NVFP4 and "
                    "packed: dsv4.layers.quantize_, then dsv4.layers.pack_"
                )
    return None


def _observed(layer: torch.nn.Module) -> bool:
    if isinstance(layer, DeepseekV4Experts):
        return layer.observers is not None
    return isinstance(layer, Linear) and layer.observer is not None


def _wait(
    layer: DeepseekV4Experts, tokens: Sequence[int], dtype: torch.dtype, device: torch.device
) -> str | None:
    calls = [call for count in tokens for call in layer.gemm_calls(count, dtype)]
    reasons = (dispatch.wait_of(call._replace(device=device)) for call in calls)
    return next(filter(None, reasons), None)


def captured(work: Callable[[], _Output], pool: Any) -> tuple[torch.cuda.CUDAGraph, _Output]:
    """Capture a graph of ``work``; return it and its outputs in the memory of the graph.

    Args:
        work: A function that has run before, so that kernels are compiled and workspaces made.
        pool: Memory of the graph. It must not be used again after a failure.

    Raises:
        CaptureError: if the capture failed; PyTorch and the current stream are as before.
    """
    current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    first: list[BaseException] = []  # the end of the capture may raise another error
    try:
        # Calls of other threads that a capture forbids do not end this one.
        mode = "thread_local"
        with _uncollected(), torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            try:
                out = work()
            except BaseException as error:
                first.append(error)
                raise
    except BaseException as error:
        _clean_up(current, pool)
        raise _failure(first.pop() if first else error)  # noqa: B904  (it has its cause)
    return graph, out


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Run no garbage collection inside the block.

    A collection may destroy what earlier runners left in circles of references: CUDA graphs and
    loaded kernels, whose release CUDA forbids while this thread captures. The capture would fail,
    and whether it does would depend on how many objects the process has made so far.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _failure(cause: BaseException) -> BaseException:
    """Return the exception to raise: an interrupt as it is."""
    if not isinstance(cause, Exception):
        return cause
    line = str(cause).partition("\n")[0]
    error = CaptureError(f"{type(cause).__name__}: {line}")
    error.__cause__ = cause
    return error


def _clean_up(current: torch.cuda.Stream, pool: Any) -> None:
    """Reset the state that a capture leaves if its end raises.

    ``torch.cuda.graph`` then stays on its own stream, the allocator still counts a capture and
    defers reuse of memory, and the default generator expects to be captured.
    """
    torch.cuda.set_stream(current)
    torch.cuda.synchronize()
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        with contextlib.suppress(RuntimeError):  # the capture had ended
            end(current.device_index, pool)
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        # The end of this capture resets the generator.
        torch.zeros(1, dtype=torch.float32, device=current.device)
    torch.cuda.set_stream(current)
