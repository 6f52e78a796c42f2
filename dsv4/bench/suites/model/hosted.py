"""``bench model --host-experts``: placement, and decode steps by routing with their hit rates."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from dsv4.bench.problem import UsageError
from dsv4.bench.suites.hosted_steps import (
    ROUTINGS,
    draw_experts,
    drawn_routing,
    fits_slots,
    reloads,
    timed_steps,
)
from dsv4.bench.suites.model.document import HostedRow
from dsv4.bench.suites.model.measure import (
    Measurement,
    SkippedError,
    has_graphs,
    seconds_of,
)
from dsv4.bench.suites.model.memory import caches_of, free_bytes, model_bytes, reserve_bytes
from dsv4.bench.suites.model.request import ModelRequest
from dsv4.bench.suites.whole_model import DecodeStep, replay_ms
from dsv4.checkpoint.host_experts import KEPT_GPU_BYTES, ExpertSizes
from dsv4.layers import _host_memory
from dsv4.layers._expert_staging import STAGED_STEP_TOKENS
from dsv4.layers.early_experts import early_layers
from dsv4.layers.host_experts import HostExperts, Hosting, hosted_of
from dsv4.layers.step_tokens import prompt_bytes


def placed(request: ModelRequest) -> ModelRequest:
    """Return the request with ``--host-experts`` resolved.

    Raises:
        UsageError: if the placement does not fit the model, or no memory holds it.
    """
    if request.host_experts is None:
        return request
    config, size = request.config, model_bytes(request)
    sizes = ExpertSizes(
        config.num_hidden_layers,
        config.n_routed_experts,
        config.num_experts_per_tok,
        size.layer_expert,
        size.resident,
        prompt_bytes(config, STAGED_STEP_TOKENS),
    )
    try:
        if request.host_experts == "auto":
            if request.device.type != "cuda":
                raise UsageError(
                    "--host-experts is auto, and on a CPU all experts are in host memory: wanted "
                    "STATIC+SLOTS, or without"
                )
            placement = _placement(request, sizes)
        else:
            assert isinstance(request.host_experts, HostExperts)
            placement = request.host_experts
        placement.check(sizes.experts, sizes.layers, sizes.top_k)
        _host_memory.check_available(sizes.host_bytes(placement))
    except UsageError:  # names the option
        raise
    except (ValueError, MemoryError) as error:
        raise UsageError(f"--host-experts: {error}") from error
    return replace(request, host_experts=placement)


def _placement(request: ModelRequest, sizes: ExpertSizes) -> HostExperts:
    """Return the placement that leaves room for the largest cache that the device holds.

    Raises:
        MemoryError: if GPU and host memory do not suffice for the smallest one.
        UsageError: if all experts fit.
    """
    host = _host_memory.available_bytes() - _host_memory.KEPT_BYTES
    free, reserve = free_bytes(request.device), reserve_bytes(request.device)
    caches = sorted(caches_of(request).values(), reverse=True)
    for number, cache in enumerate(caches):
        try:
            placement = sizes.placement(free, host, max(KEPT_GPU_BYTES, cache + reserve))
        except MemoryError:
            if number == len(caches) - 1:
                raise
            continue
        if placement is not None:
            return placement
    raise UsageError("--host-experts is auto, and all experts fit: wanted STATIC+SLOTS, or without")


def hosting(request: ModelRequest) -> Hosting | None:
    """Return what moves a random model's experts to host memory, or None."""
    if not isinstance(request.host_experts, HostExperts):
        return None
    return Hosting(request.host_experts, request.config.num_hidden_layers)


def measure(measurement: Measurement, tokens: int, context: int) -> list[HostedRow]:
    """Measure decode steps of some sequences at a context, a row for each routing."""
    placement = measurement.request.host_experts
    assert isinstance(placement, HostExperts)
    rows = [
        HostedRow(
            measurement.named,
            tokens=tokens,
            context=context,
            routing=routing,
            static=placement.static,
            slots=placement.slots,
        )
        for routing in ROUTINGS
    ]
    for row in rows:
        _count_bytes(row, measurement.model)
        figures = ("step_ms", "hit_rate", "loaded_bytes")
        measurement.take(row, figures, partial(_time, measurement, row))
        measurement.take(row, ("gather_rate",), partial(_time_gather, measurement, row))
    return rows


def _count_bytes(row: HostedRow, model: nn.Module) -> None:
    """Count the bytes of experts on both sides."""
    buffers = {}
    for hosted in hosted_of(model):
        static = hosted.layout.slot_bytes * hosted.static_slots // hosted.slots
        row.host_bytes += hosted.rows.nbytes
        row.static_bytes += static
        row.slot_bytes += hosted.layout.slot_bytes - static
        if hosted.staging is not None:
            buffers[id(hosted.staging)] = hosted.staging.nbytes
    row.buffer_bytes = sum(buffers.values())


@torch.inference_mode()
def _time_gather(measurement: Measurement, row: HostedRow) -> None:
    """Time the kernels that load as many experts as a step did, without anything else."""
    if row.loaded_bytes is None:
        raise SkippedError("the steps were not timed")
    layers, device = hosted_of(measurement.model), measurement.request.device
    loads = reloads(layers, math.ceil(row.loaded_bytes / layers[0].layout.row_bytes))
    row.gather_bytes = sum(load.nbytes for load in loads)
    if not loads:
        raise SkippedError("the steps loaded no expert")

    def gather() -> None:
        for load in loads:
            load()

    gather()  # compiles, if anything is to be compiled
    if has_graphs(device):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            gather()
        milliseconds = replay_ms(graph, measurement.request.replays)
    else:
        milliseconds = 1e3 * seconds_of(device, gather)
    row.gather_rate = row.gather_bytes / milliseconds / 1e6


@torch.inference_mode()
def _time(measurement: Measurement, row: HostedRow) -> None:
    model, request = measurement.model, measurement.request
    config, gpu = model.config, has_graphs(request.device)
    warm = request.slot_steps
    drawn = draw_experts(
        ROUTINGS[row.routing],
        warm + (request.replays if gpu else request.steps),
        config.num_hidden_layers,
        row.tokens,
        config.num_experts_per_tok,
        config.n_routed_experts,
        request.weights.seed,
    ).to(request.device)
    step = DecodeStep(model, row.tokens, row.context, request.weights.seed)
    with drawn_routing(model, row.tokens) as chosen:
        row.captured = gpu and fits_slots(model, row.tokens)
        run = step.captured().replay if row.captured else step
        row.early_layers = early_layers(model.model.layers, row.tokens) if row.captured else 0
        row.step_ms, use = timed_steps(model, chosen, drawn, run, warm)
    row.steps = use.steps
    row.hit_rate = use.hit_rate
    row.loaded_bytes = use.loaded_bytes / max(1, use.steps)
