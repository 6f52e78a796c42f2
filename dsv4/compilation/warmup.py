"""Compile or load a model's kernels before its first step, or on another machine."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from dsv4 import device as machine
from dsv4 import dispatch
from dsv4.compilation import bundle as _bundle
from dsv4.compilation import compiler as _compile
from dsv4.compilation import launch_recorder as _launch_recorder
from dsv4.compilation import pool as _compile_pool
from dsv4.compilation.compiler import Outcome
from dsv4.compilation.jobs import CuteJob, KernelJob
from dsv4.compilation.kernel_calls import Call, every_call, kernel_plans
from dsv4.compilation.launch_recorder import Steps
from dsv4.compilation.listing import Listing
from dsv4.compilation.progress_line import progress as progress_line
from dsv4.compilation.recipe import Recipe
from dsv4.compilation.target import Target
from dsv4.config import ModelConfig
from dsv4.cute import gemm as cute_gemm
from dsv4.cute.runtime.architectures import EVERY_ARCHITECTURE
from dsv4.cute.sm90 import tuned
from dsv4.device import capability
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel import mailboxes
from dsv4.parallel.context import ALONE, MODES, TENSOR, Ranks
from dsv4.parallel.split import check_divides


@dataclass(frozen=True)
class Operator:
    """The implementation that runs an operator of a step.

    Attributes:
        name: Name of the operator; ``"fragments"`` for the packing of weights.
        implementation: Which one dispatch chooses there.
        kernels: Names of its Triton kernels, which are compiled now.
        refused: Implementations that come first elsewhere, and why they do not run there.
    """

    name: str
    implementation: str
    kernels: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        kernels = f": {', '.join(self.kernels)}" if self.kernels else ""
        reasons = "".join(f"; not {name}: {why}" for name, why in self.refused)
        return f"{self.name:<26}{self.implementation}{kernels}{reasons}"


@dataclass(frozen=True)
class Warmup:
    """The result of ``warmup``; ``print`` shows all of it.

    Attributes:
        kernels: How many CuTeDSL kernels the GEMMs and attention need.
        compiled: How many of them were neither in a bundle nor on disk.
        seconds: How long it took.
        triton: How many Triton kernels the steps need, every specialisation counted.
        triton_compiled: How many of them were neither in a bundle nor on disk.
        failed: Names of kernels that could not be compiled, and why. They are compiled in the
            process that first launches them, which then raises what is wrong.
        operators: What runs each operator of the steps; empty where they were not looked at.
        skipped: Why they were not.
        passed_over: Names of kernels that fail the self-test on this GPU, and the reasons.
    """

    kernels: int
    compiled: int
    seconds: float
    triton: int = 0
    triton_compiled: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    operators: tuple[Operator, ...] = ()
    skipped: str = ""
    passed_over: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"{self.kernels} CuTeDSL kernels, {self.compiled} of them compiled now; "
            f"{self.triton} Triton kernels, {self.triton_compiled} of them; {self.seconds:.1f} s"
        ]
        if self.skipped:
            lines.append(f"Triton kernels were left out: {self.skipped}")
        lines += [f"failed: {name}: {why}" for name, why in self.failed.items()]
        lines += [f"passed over: {name}: {why}" for name, why in self.passed_over.items()]
        first = [operator for operator in self.operators if not operator.refused]
        others = [operator for operator in self.operators if operator.refused]
        for title, listed in (("compiled", first), ("no kernel of its own", others)):
            if listed:
                lines += [f"{title}:", *(f"  {operator}" for operator in listed)]
        return "\n".join(lines)


_log = logging.getLogger(__name__)


def warmup(
    model: Any,
    device: torch.device | str | int | None = None,
    arch: str | None = None,
    max_tokens: int = 8192,
    *,
    progress: bool = True,
    bundle: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    ranks: int = 1,
    parallel: str = TENSOR,
) -> Warmup:
    """Compile every kernel that a model would launch, or load it, before the first step.

    CuTeDSL kernels and, of a configuration or a ``DeepseekV4ForCausalLM``, the Triton kernels of
    steps of decoding and prefill, of packing and of the sampler; ``Warmup.operators`` names them
    and says what runs where there is none. They are found in a bundle (``bundle``,
    ``$DSV4_KERNELS`` or the installed package ``dsv4-kernels``), on disk, or are compiled in
    parallel processes.

    Without it the first call of each shape compiles its kernel, for one to eight seconds, and
    inside the capture of a CUDA graph, too. Kernels stay on disk, in ``$DSV4_CACHE_DIR`` or
    ``~/.cache/dsv4/kernels``; those of another machine's GPU can be made by naming ``arch``.

    Of a model, the NVFP4 layers count that are packed or can be, on Hopper also those with FP8
    weights, and none if its dtype is not bfloat16; of a configuration, every linear layer and all
    routed experts that can be packed, as if all were NVFP4 in a bfloat16 model. What is not packed
    yet counts as packed for the GPU: with swizzled scales for Blackwell where activations are
    quantised, else in fragments. Attention counts on Hopper if its cache holds FP8 entries by
    default, as DeepSeek's numerics want, of 512 dims with 64 rotated.

    Args:
        model: A module, a ``ModelConfig`` or transformers' configuration.
        device: The GPU to load the kernels on. By default that of the model or the current one;
            with ``arch``, none: the kernels are only compiled.
        arch: ``"sm_80"``, ``"sm_86"``, ``"sm_89"``, ``"sm_90a"``, ``"sm_100a"``, ``"sm_103a"``,
            ``"sm_120a"`` or ``"sm_121a"``; by default that of the GPU.
        max_tokens: Most tokens of a step. Above 8192 there are no further CuTeDSL kernels.
        progress: Whether to show progress on stderr, as a bar if rich is installed.
        bundle: A file that ``python -m dsv4 warmup`` wrote.
        workers: Processes that compile; None: as many as processors, at most 32.
        ranks: Ranks that share a model of a configuration: the kernels are those of one rank's
            sizes. A model has its own.
        parallel: How they share it, as ``load`` takes it. A model knows.

    Returns:
        Counts, all 0 on a GPU that these kernels are not for, and what runs each operator.

    Raises:
        ValueError: if ``arch`` is not one there are kernels for or not that of ``device``,
            ``device`` is no GPU, ``max_tokens`` or ``workers`` is below 1, or the model cannot be
            split over ``ranks``.
        RuntimeError: if there is no GPU and no ``arch``, ``bundle`` cannot be used, or a CuTeDSL
            kernel has to be compiled and nvidia-cutlass-dsl is not installed.
    """
    start = time.perf_counter()
    if max_tokens < 1:
        raise ValueError(f"warmup: max_tokens is {max_tokens}, wanted at least 1")
    if workers is not None and workers < 1:
        raise ValueError(f"warmup: workers is {workers}, wanted at least 1 or None")
    gpu = _gpu(model, device, arch)
    chosen = _architecture(gpu, arch)
    if chosen is None:
        return Warmup(0, 0, time.perf_counter() - start)
    if bundle is not None:
        _bundle.use(bundle, chosen)
    return _warm(model, chosen, max_tokens, gpu, progress, workers, Ranks(ranks, parallel))


def _warm(
    model: Any,
    arch: str,
    max_tokens: int,
    gpu: torch.device | None,
    progress: bool,
    workers: int | None = None,
    ranks: Ranks = ALONE,
    recipe: Any = None,
    others: Sequence[Call] = (),
    parts: Iterable[Steps] | None = None,
) -> Warmup:
    """Do what ``warmup`` does with checked arguments; see ``compile_model``."""
    start = time.perf_counter()
    ready = None if gpu is None else functools.partial(_load, gpu)
    done, outcome = compile_model(
        model,
        arch,
        max_tokens,
        gpu,
        progress,
        workers,
        ready=ready,
        ranks=ranks,
        recipe=recipe,
        others=others,
        parts=parts,
    )
    for name, why in outcome.failed.items():
        _log.warning("%s was not compiled: %s", name, why)
    wrong = {} if gpu is None else _self_tested(done, gpu)
    return replace(done, passed_over=wrong, seconds=time.perf_counter() - start)


def _self_tested(done: Warmup, gpu: torch.device) -> dict[str, str]:
    """Test kernels without a verdict on this GPU before a capture; return those that are wrong."""
    wrong = {}
    for operator in done.operators:
        if operator.name in dispatch.operators():
            reason = dispatch.self_tested(operator.name, operator.implementation, gpu)
            if reason is not None:
                wrong[f"{operator.name} {operator.implementation}"] = reason
    return wrong


def warm_loaded(
    model: nn.Module,
    max_tokens: int,
    progress: bool,
    recipe: Any = None,
    others: Sequence[Call] = (),
    parts: Iterable[Steps] | None = None,
) -> Warmup | None:
    """``warmup`` of a model that was just loaded; None if it is not on a GPU.

    A kernel that cannot be compiled is a warning: the step that launches it raises.

    Args:
        model: The model.
        max_tokens: Most tokens of a step.
        progress: Whether to show progress on stderr.
        recipe: Recipe of a model that is not of this package; None: of one that is.
        others: Calls of further CuTeDSL kernels, which no layer of the model makes; only with a
            recipe.
        parts: See ``compile_model``.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        return None
    try:
        if recipe is None:
            return warmup(model, device, max_tokens=max(1, max_tokens), progress=progress)
        gpu = _gpu(model, device, None)
        arch = _architecture(gpu, None)
        if arch is None:
            return Warmup(0, 0, 0.0)
        most = max(1, max_tokens)
        own: dict[str, Any] = {"recipe": recipe, "others": others, "parts": parts}
        return _warm(model, arch, most, gpu, progress, **own)
    except RuntimeError as error:
        _log.warning("kernels are compiled at their first launch: %s", error)
        return None


def warm_ranks(model: DeepseekV4ForCausalLM, max_tokens: int, progress: bool) -> Warmup | None:
    """Do ``warm_loaded`` for a model of one or several ranks.

    Rank 0 compiles first, in one process per processor. The other ranks need the same kernels and
    then load them from disk.

    Returns:
        What this rank did, with the failures of other ranks, too; None if it is not on a GPU.
    """
    context = model.parallel
    if context is None:
        return warm_loaded(model, max_tokens, progress)
    done = None
    for ranks in (range(1), range(1, context.size)):
        if context.rank in ranks:
            done = warm_loaded(model, max_tokens, progress)
        context.group.exchange(None)
    failed: dict[str, str] = {}
    for theirs in context.group.exchange(None if done is None else done.failed):
        if theirs is None:
            return None
        failed |= theirs
    return done and replace(done, failed=failed)


def compile_model(
    model: Any,
    arch: str,
    max_tokens: int,
    gpu: torch.device | None = None,
    progress: bool = False,
    workers: int | None = None,
    *,
    use_list: bool = True,
    ready: Callable[[KernelJob], None] | None = None,
    ranks: Ranks = ALONE,
    recipe: Any = None,
    others: Sequence[Call] = (),
    parts: Iterable[Steps] | None = None,
) -> tuple[Warmup, Outcome]:
    """Do what ``warmup`` does without loading the kernels; see there.

    Args:
        model: See there, as for what follows.
        arch: What to compile for.
        max_tokens: See there.
        gpu: Whose number of SMs counts; None: that of the architecture's usual GPU.
        progress: See there.
        workers: See there.
        use_list: Whether a list of Triton kernels that was kept will do. Their files are then not
            among those of the outcome.
        ready: Called with each kernel of which there is a file, while others are compiled.
        ranks: Ranks that share a model of a configuration.
        recipe: Recipe of a model that is not of this package; None: of one that is.
        others: Calls of further CuTeDSL kernels, which no layer of the model makes.
        parts: With a recipe, parts of the list, which this process makes when they are asked for;
            None: worker processes make it.
    """
    start = time.perf_counter()
    if ranks != ALONE:
        check_ranks(model, ranks)
    listing, skipped = _listing(model, arch, max_tokens, gpu, ranks, recipe)
    stored = listing.stored() if listing is not None and use_list else None
    with (
        _compile_pool.Pool(workers, arch) as pool,
        progress_line(progress) as count,
    ):
        work = _compile.Compilation(pool, count, ready)
        if listing is not None and stored is None:  # begin before plans are made for a second
            pool.start()
            if parts is None:
                work.find(listing)
        with _plans_for(gpu):
            calls = [*every_call(model, arch, ranks), *others]
            plans = kernel_plans(calls, max_tokens, arch)
        work.add(CuteJob(plan, arch) for plan in plans)
        if listing is not None and stored is None and parts is not None:
            work.take(parts)
        work.finish()
    outcome, steps = work.outcome, stored or Steps()
    if listing is not None and stored is None:
        steps, skipped = _steps_of(work)
        if steps.requests and not outcome.failed:
            listing.keep(steps)
            outcome.lists.append(listing.encode(steps))
    new = [job for job in outcome.jobs if job.key in outcome.compiled]
    number = sum(isinstance(job, CuteJob) for job in new)
    operators = tuple(
        Operator(name, implementation, tuple(sorted(ran.kernels)), tuple(ran.reasons.items()))
        for (name, implementation), ran in steps.ran.items()
    )
    seconds = time.perf_counter() - start
    sizes = (len(plans), number, seconds, len(steps.requests) + len(steps.known), len(new) - number)
    return Warmup(*sizes, outcome.failed, operators, skipped), outcome


def _plans_for(gpu: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """Choose plans by the usual figures of Hopper, not of this machine, unless for its GPU."""
    if gpu is not None or machine.hopper() is None:
        return contextlib.nullcontext()
    return machine.pretend(plans=tuned.resolve(None))


def check_ranks(model: Any, ranks: Ranks) -> None:
    """Raise unless a configuration can be split over these ranks.

    Raises:
        ValueError: naming the number, or for a module, which has the sizes of its own rank.
    """
    if isinstance(model, nn.Module):
        raise ValueError(
            f"warmup: ranks is {ranks.size}, parallel is {ranks.mode!r} and model a module, wanted "
            "a configuration, or neither of them"
        )
    if ranks.mode not in MODES:
        raise ValueError(f"warmup: parallel is {ranks.mode!r}, wanted one of {', '.join(MODES)}")
    if not 1 <= ranks.size <= mailboxes.MOST_RANKS:
        raise ValueError(f"warmup: ranks is {ranks.size}, wanted 1 to {mailboxes.MOST_RANKS}")
    check_divides(ModelConfig.of(model), ranks.size, ranks.mode)


def _listing(
    model: Any,
    arch: str,
    max_tokens: int,
    gpu: torch.device | None,
    ranks: Ranks = ALONE,
    recipe: Any = None,
) -> tuple[Listing | None, str]:
    """Return the list of a whole model, or why there is none."""
    has_none = recipe is None and not isinstance(model, DeepseekV4ForCausalLM)
    if has_none and isinstance(model, nn.Module):
        reason = f"{type(model).__name__} is not a whole model of this package"
        return None, reason
    reason = _launch_recorder.impossible() or ""
    if reason:
        return None, reason
    target = Target(arch) if gpu is None else Target.of(gpu, arch)
    return Listing(recipe or Recipe.of(model, ranks), target, max_tokens), ""


def target_of(device: torch.device) -> Target | None:
    """Return the target of a model's kernels on a device; None if there are none for it."""
    if device.type != "cuda":
        return None
    gpu = _gpu(None, device, None)
    arch = _architecture(gpu, None)
    return None if arch is None else Target.of(gpu, arch)


def _steps_of(work: _compile.Compilation) -> tuple[Steps, str]:
    """The list, or why it could not be made: then kernels are compiled at their first launch."""
    try:
        return work.steps(), ""
    except RuntimeError as error:
        _log.warning("Triton kernels are compiled at their first launch: %s", error)
        return Steps(), str(error).partition("\n")[0]


def _load(gpu: torch.device, job: KernelJob) -> None:
    """Load a compiled kernel, so that its first launch does not."""
    if isinstance(job, CuteJob):
        cute_gemm.warmup([job.plan], gpu)
    else:
        importlib.import_module("dsv4.triton._runtime.kernel_store").load_stored(job.request, gpu)


def _gpu(model: Any, device: torch.device | str | int | None, arch: str | None) -> Any:
    """Return where to load the kernels, with its index; None for nowhere."""
    if device is None:
        if arch is not None:
            return None
        tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
        device = next((t.device for t in tensors if t.device.type == "cuda"), "cuda")
        if not torch.cuda.is_available():
            raise RuntimeError(
                "warmup: there is no CUDA GPU; name one to compile for, e.g. arch='sm_90a'"
            )
    target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if target.type != "cuda":
        raise ValueError(f"warmup: device is {target}, wanted a CUDA GPU")
    index = torch.cuda.current_device() if target.index is None else target.index
    return torch.device("cuda", index)


def _architecture(gpu: torch.device | None, arch: str | None) -> str | None:
    """The name to compile for; None if there are no kernels for the GPU."""
    if arch is not None and arch not in EVERY_ARCHITECTURE.values():
        known = ", ".join(map(repr, EVERY_ARCHITECTURE.values()))
        raise ValueError(f"warmup: arch is {arch!r}, wanted one of {known}")
    if gpu is None:
        return arch
    own = EVERY_ARCHITECTURE.get(capability(gpu))
    if arch is not None and arch != own:
        raise ValueError(f"warmup: arch is {arch!r}, but {gpu} wants {own or 'none'}")
    return own
