"""The command: build a model, measure prompts and decode steps, print and write."""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from dsv4 import checkpoint
from dsv4.bench.environment import Rates
from dsv4.bench.suites.model import hosted, report, speculation
from dsv4.bench.suites.model.document import (
    ModelResults,
    Named,
    document,
    output_path,
    write,
)
from dsv4.bench.suites.model.measure import Measurement, synchronize
from dsv4.bench.suites.model.memory import fitted, free_bytes
from dsv4.bench.suites.model.request import ModelRequest
from dsv4.bench.suites.model.trace.step_map import lines_of
from dsv4.bench.suites.random_model import random_model
from dsv4.compilation.warmup import warm_ranks
from dsv4.debug import compilations
from dsv4.layers.step_tokens import step_tokens
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel import groups, processes
from dsv4.parallel.agreement import reported
from dsv4.parallel.context import ParallelContext, has_own_tokens
from dsv4.parallel.emulated import emulated_rank


def seconds_since_process_start() -> float | None:
    """Age of this process; None where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def measure(request: ModelRequest, rates: Rates, results: ModelResults) -> None:
    """Measure into ``results``; what was measured before an interrupt stays there."""
    gpu = request.device.type == "cuda"
    with torch.cuda.device(request.device) if gpu else nullcontext():
        _measure(request, rates, results)


def _measure(request: ModelRequest, rates: Rates, results: ModelResults) -> None:
    before = compilations()
    try:
        context = _ranks(request)
        with reported(context):
            model = _build(request, results, context)
            _warm(model, results)
            before = compilations()
            _measure_rows(Measurement(model, request, rates), results)
    except KeyboardInterrupt:
        hosted_rows = {(row.tokens, row.context) for row in results.hosted}
        rows = len(results.rows) + len(hosted_rows) + len(results.prompts)
        asked = len(request.prompts) + len(request.contexts) * len(request.tokens)
        results.stopped = f"interrupted after {rows} of {asked} rows"
    results.start.compiled_later = dict(compilations() - before)


def _measure_rows(measurement: Measurement, results: ModelResults) -> None:
    request = measurement.request
    results.profiles = measurement.profiles
    for (tokens, context), reason in request.left_out.items():
        _say(f"{tokens} sequences at {context} {reason}")
    for tokens in request.prompts:
        results.prompts.append(measurement.prompt(tokens))
        _take_prepared(measurement, results)
        _say(f"prompt of {tokens} tokens")
    for context in request.contexts:
        for tokens in request.tokens:
            _measure_steps(measurement, results, tokens, context)
    if request.drafts is not None:
        for context in request.contexts:
            for tokens in request.tokens:
                results.speculation += speculation.measure(
                    measurement, request.drafts, tokens, context
                )
                _say(f"drafts of {tokens} sequences at {context}")
    if request.host_experts is not None:
        return
    for row in results.rows:
        measurement.kernels(row)
    _say("kernels")
    if request.trace is not None:
        _map_step(measurement, results, request.trace)


def _measure_steps(
    measurement: Measurement, results: ModelResults, tokens: int, context: int
) -> None:
    """Measure decode steps without drafts of some sequences at a context."""
    if measurement.request.host_experts is not None:
        results.hosted += hosted.measure(measurement, tokens, context)
        _say(f"{tokens} sequences at {context}, experts in host memory")
        return
    row = measurement.decode(tokens, context)
    results.rows.append(row)
    expected = measurement.expected(row)
    if expected is not None:
        results.expected.append(expected)
    _say(f"{tokens} sequences at {context}")


def _map_step(measurement: Measurement, results: ModelResults, path: Path) -> None:
    """Map the one row's step, print the table and write the Chrome trace."""
    try:
        step_map = measurement.map(results.rows[0])
        step_map.write(path)
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # what was measured is written all the same
        results.stopped = f"the step was not mapped: {error}"
        return
    print("\n".join(["", *lines_of(step_map), f"wrote {path}"]), flush=True)


def _ranks(request: ModelRequest) -> ParallelContext | None:
    """Return this process's rank; None for a model of one GPU."""
    if request.ranks == 1:
        return None
    if request.emulated:
        return emulated_rank(request.shared, request.config, request.device)
    import torch.distributed as dist

    from dsv4.parallel.exchange_mailboxes import open_exchange
    from dsv4.parallel.opening import open_mailboxes
    from dsv4.parallel.process_group import context_of

    context = context_of(dist.group.WORLD, request.parallel, request.device)
    assert context is not None
    if has_own_tokens(context):
        open_exchange(context, request.config, request.device, torch.bfloat16)
    else:
        open_mailboxes(context, request.device)
    return context


def _build(
    request: ModelRequest, results: ModelResults, context: ParallelContext | None
) -> DeepseekV4ForCausalLM:
    device, start = request.device, results.start
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of measuring rates
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    if request.checkpoint is None:
        model = random_model(
            request.config,
            device,
            request.weights,
            parallel=context,
            mtp=request.drafts is not None,
            hosting=hosted.hosting(request),
        )
        start.source = "weights drawn on the device and packed"
    else:
        model = checkpoint.load(
            request.checkpoint,
            device=device,
            activation=request.config.activation,
            mtp=request.drafts is not None,
            prepare=False,
            progress=False,
            device_mesh=context,
            parallel=None if context is None else request.parallel,
        )
        start.source = "checkpoint loaded"
    synchronize(device)
    start.weights_s = time.perf_counter() - begin
    if device.type == "cuda":
        start.peak_bytes = torch.cuda.max_memory_allocated(device)
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    start.weight_bytes = sum(tensors.values())
    _say(f"{start.source}, {start.weights_s:.1f} s")
    return model


def _warm(model: DeepseekV4ForCausalLM, results: ModelResults) -> None:
    """Compile or load kernels as ``dsv4.load`` does."""
    done, start = warm_ranks(model, step_tokens(model), progress=False), results.start
    if done is not None:
        start.kernels = done.kernels + done.triton
        start.kernels_compiled = done.compiled + done.triton_compiled
        start.kernels_s = done.seconds
        _say(f"{start.kernels} kernels, {start.kernels_compiled} of them compiled now")


def _take_prepared(measurement: Measurement, results: ModelResults) -> None:
    """Time of the first preparation; later ones find launches planned."""
    if measurement.prepared and measurement.prepared[0].capacity is not None:
        first = measurement.prepared[0]
        results.start.prepare_s, results.start.prepare_bytes = first.seconds, first.bytes


def _say(what: str) -> None:
    if not leads():
        return
    age = seconds_since_process_start()
    print(f"{'' if age is None else f'{age:6.1f} s  '}{what}", flush=True)


def leads() -> bool:
    """Return whether this process prints and writes, which of several the first does."""
    return processes.is_first()


def prepare(options: argparse.Namespace, device: torch.device) -> ModelRequest:
    """The request, checked before anything is built.

    Raises:
        UsageError: if an option is wrong, or the model does not fit the device.
    """
    own = processes.launched()
    if own is None:
        return fitted(hosted.placed(ModelRequest.of(options, device)))
    request = ModelRequest.of(options, device, own.size)
    free = torch.tensor([free_bytes(device)], device=device)
    # All ranks leave out, or refuse, the rows that do not fit the rank with the least memory.
    return fitted(request, min(map(int, groups.gather(free, groups.everyone()))))


def finish(
    options: argparse.Namespace,
    request: ModelRequest,
    header: dict[str, Any],
    results: ModelResults,
) -> bool:
    """Print and write, on rank 0; whether no measurement failed."""
    if not leads():
        return not report.failures(results)
    print()
    print("\n".join(report.lines(results, profile=options.profile)))
    print()
    if hasattr(options, "json"):
        named, hosts = Named(**request.named()), request.host_experts is not None
        drafts = "" if request.drafts is None else request.drafts.method
        path = output_path(options.json, header, named, hosted=hosts, drafts=drafts)
        write(path, document(header, results))
        print(f"wrote {path}")
    print(report.verdict(results), flush=True)
    return not report.failures(results)
