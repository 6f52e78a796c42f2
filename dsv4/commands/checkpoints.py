"""``python -m dsv4 inspect`` and ``verify``: what a checkpoint holds, and whether it is sound.

``inspect --gpus 4xH100`` also computes how the weights would lie on several GPUs: of a checkpoint,
of a folder with a config.json alone, or, with ``--preset``, of a published model that need not be
there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dsv4.config import ModelConfig
from dsv4.parallel import planner

if TYPE_CHECKING:
    from dsv4.checkpoint import Checkpoint
    from dsv4.checkpoint.host_experts import ExpertSizes

# Memory in GB, as sold.
_GPUS = {"H100": 80, "H200": 141, "B200": 180, "B300": 288}
_HOPPER = ("H100", "H200")
_PRESETS = ("flash", "pro")
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)  # of steps whose drafts are printed
_USUAL = ("2xH200", "4xH100", "8xH200")  # GPUs that a preset is planned for, if none are named


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both commands."""
    inspect = commands.add_parser(
        "inspect",
        help="what a checkpoint holds",
        description="Print what a checkpoint holds. Reads headers, no tensors.",
        epilog="example: python -m dsv4 inspect --preset flash --gpus 4xH100",
    )
    verify = commands.add_parser(
        "verify",
        help="read a checkpoint once and check it",
        description="Read a checkpoint once and check all that loading it would check.",
    )
    inspect.add_argument("path", metavar="PATH", nargs="?", help="folder of a checkpoint")
    inspect.add_argument("--preset", choices=_PRESETS, help="a published model in place of PATH")
    inspect.add_argument(
        "--recipe",
        choices=planner.RECIPES,
        help="formats of weights that are not there: FP8 (nvidia, default) or NVFP4 linear layers",
    )
    inspect.add_argument(
        "--gpus",
        metavar="NxGPU",
        type=_machine,
        action="append",
        help=f"compute whether it fits, e.g. 4xH100; {', '.join(planner.GPUS)}; repeatable",
    )
    verify.add_argument("path", metavar="PATH", help="folder of a checkpoint")


def _machine(text: str) -> planner.Machine:
    try:
        return planner.Machine.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@dataclass(frozen=True)
class _Model:
    """What is inspected: a checkpoint, or a configuration without weights.

    Attributes:
        config: Configuration.
        weights: Bytes of the weights, without draft layers.
        text: Lines about it.
        sizes: Sizes that decide which experts lie in host memory, with the draft layers that
            ``load`` loads; None: those of ``weights``.
    """

    config: ModelConfig
    weights: planner.Weights
    text: list[str]
    sizes: ExpertSizes | None = None


def run_inspect(options: argparse.Namespace) -> int:
    """Run ``inspect``; returns the exit status."""
    if (options.path is None) == (options.preset is None):
        raise ValueError("wanted the PATH of a checkpoint or --preset, and not both")
    model = _model(options)
    text = model.text
    usual = _USUAL if options.preset else ()
    for machine in options.gpus or map(planner.Machine.parse, usual):
        text += planner.lines(model.config, model.weights, machine)
        if machine.ranks == 1:
            text += _host_lines(model.sizes or _sizes_of(model), machine)
    print("\n".join(text))
    return 0


def _model(options: argparse.Namespace) -> _Model:
    """Return the model that the options name."""
    from dsv4.checkpoint import Checkpoint

    if options.preset:
        name, config = options.preset, getattr(ModelConfig, options.preset)()
    elif options.gpus and _is_config_alone(Path(options.path)):
        name = f"{options.path}: config.json without weights"
        config = ModelConfig.from_path(options.path)
    else:
        if options.recipe is not None:
            raise ValueError(
                f"--recipe is {options.recipe!r} and PATH {options.path!r} has weights, wanted "
                "--preset, or --gpus and a PATH with config.json alone"
            )
        with Checkpoint.open(options.path) as checkpoint:
            weights = planner.Weights.of_checkpoint(checkpoint)
            sizes = _sizes_in(checkpoint) if options.gpus else None
            return _Model(checkpoint.config(), weights, list(lines(checkpoint)), sizes)
    recipe = options.recipe or planner.RECIPES[0]
    weights = planner.Weights.of_config(config, recipe)
    line = f"{name}, formats as {recipe!r}, without draft layers"
    return _Model(config, weights, [line])


def _is_config_alone(folder: Path) -> bool:
    """Return whether a folder has a configuration and no list of tensors."""
    from dsv4.checkpoint.transaction import CONFIG, INDEX, SINGLE

    return (folder / CONFIG).is_file() and not any((folder / n).exists() for n in (INDEX, SINGLE))


def _sizes_in(checkpoint: Checkpoint) -> ExpertSizes:
    """Return the sizes of a checkpoint as ``load`` on a Hopper GPU counts them."""
    from dsv4.checkpoint.filling import FillRequest
    from dsv4.checkpoint.host_experts import ExpertSizes
    from dsv4.checkpoint.report import draft_of

    config = draft_of(checkpoint, checkpoint.config(), None)
    return ExpertSizes.of(checkpoint, config, FillRequest(mxfp4="lossless"))


def _sizes_of(model: _Model) -> ExpertSizes:
    """Return the sizes of a model without a checkpoint, and without draft layers."""
    from dsv4.checkpoint.host_experts import ExpertSizes
    from dsv4.layers._expert_staging import STAGED_STEP_TOKENS
    from dsv4.layers.step_tokens import prompt_bytes

    config, weights = model.config, model.weights
    other = weights.split + weights.replicated + weights.embedding + weights.head
    return ExpertSizes(
        config.num_hidden_layers,
        config.n_routed_experts,
        config.num_experts_per_tok,
        int(weights.expert),
        int(other),
        prompt_bytes(config, STAGED_STEP_TOKENS),
    )


def _host_lines(sizes: ExpertSizes, machine: planner.Machine) -> Iterator[str]:
    """Describe one GPU with experts in host memory, if it needs them and they suffice.

    The host memory of this machine counts if it has such a GPU; otherwise the line names how much
    must be free.
    """
    from dsv4.checkpoint.host_experts import describe
    from dsv4.layers import _host_memory

    reserve, own = _host_memory.KEPT_BYTES, _is_here(machine)
    host = _host_memory.available_bytes() - reserve if own else sizes.total
    try:
        placement = sizes.placement(int(machine.gpu.memory), host)
    except MemoryError as error:
        if own:
            yield f"  host_experts='auto': does not fit this machine: {error}"
        return
    if placement is not None:
        if own:
            where = f"this machine, whose host has {(host + reserve) / 1e9:.1f} GB free"
        else:
            needed = (sizes.host_bytes(placement) + reserve) / 1e9
            where = f"if the host has {needed:.1f} GB free"
        yield f"  host_experts='auto': fits {where}: {describe(sizes, placement)}"


def _is_here(machine: planner.Machine) -> bool:
    """Return whether this machine has a GPU of a kind."""
    import torch

    return torch.cuda.is_available() and machine.name in torch.cuda.get_device_name().upper()


def run_verify(options: argparse.Namespace) -> int:
    """Run ``verify``; returns the exit status, 1 for a damaged checkpoint."""
    from dsv4.checkpoint import CheckpointError, MissingCheckpointError, verify

    try:
        nbytes = verify(options.path, progress=sys.stderr.isatty())
    except MissingCheckpointError:
        raise
    except CheckpointError as error:
        raise RuntimeError(str(error)) from error
    print(f"{options.path}: {size_text(nbytes)} of tensors are there, fit config.json, finite")
    return 0


@dataclass
class _Group:
    """Tensors of one format."""

    number: int = 0
    nbytes: int = 0


def lines(checkpoint: Checkpoint) -> Iterator[str]:
    """Return the content of a checkpoint, a line for each fact."""
    from dsv4.checkpoint.report import UNKNOWN

    config = checkpoint.config()
    yield f"{checkpoint.path}: quantised by {checkpoint.producer}"
    yield (
        f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}, "
        f"{config.n_routed_experts} experts, vocabulary {config.vocab_size}"
    )
    draft = "none"
    if checkpoint.has_mtp:
        draft = f"{checkpoint.mtp_layers} MTP layers"
    elif checkpoint.has_dspark:
        confidence = "with" if checkpoint.has_confidence_head else "without"
        draft = f"{checkpoint.dspark_stages} DSpark stages, {confidence} a confidence head"
    yield f"for speculation: {draft}"
    copy = _head_copy(checkpoint)
    if copy:
        yield f"an NVFP4 copy of the head for drafts, by default on Hopper: {size_text(copy)}"
    yield from _draft_lines(checkpoint, copy)
    groups: dict[str, _Group] = {}
    for entry in checkpoint.entries.values():
        name = str(entry.weight.dtype).removeprefix("torch.")
        group = groups.setdefault(name if entry.format is None else entry.format.name, _Group())
        group.number += 1
        group.nbytes += entry.nbytes
    for name, group in sorted(groups.items(), key=lambda item: -item[1].nbytes):
        yield f"{name}: {group.number} tensors, {size_text(group.nbytes)}"
    others = {UNKNOWN: checkpoint.stray, **checkpoint.unused}
    for reason, names in others.items():
        if names:
            yield f"{reason}: {len(names)}"
    yield from _files(checkpoint.path)
    yield f"weights: {size_text(checkpoint.nbytes)}, to which the KV cache and a step's memory come"
    for name, memory in _GPUS.items():
        left = memory - (checkpoint.nbytes + (copy if name in _HOPPER else 0)) / 1e9
        yield f"  {name} ({memory} GB): " + (
            f"{left:.1f} GB left" if left > 0 else f"{-left:.1f} GB too few"
        )
    yield from own_gpus()


def _draft_lines(checkpoint: Checkpoint, head_copy: int) -> Iterator[str]:
    """Say at how many sequences ``speculate="auto"`` drafts, and why not at others."""
    from dsv4.speculation.checkpoint_costs import costs_of

    costs = costs_of(checkpoint, head_copy)
    if costs is None:
        return
    yield "drafts of speculate='auto' on one GPU with all experts, as computed for an H100:"
    steps = [(size, costs.best(size).drafts) for size in _SEQUENCES]
    yield from (f"  {line}" for line in costs.explain(steps).splitlines())


def own_gpus() -> Iterator[str]:
    """Yield a line for each GPU of this machine: how well kernels are known on such GPUs.

    On Hopper there are lines of where plans of kernels are from, too.
    """
    from dsv4.cute.sm90.tuned import lines as plan_lines
    from dsv4.device import hopper
    from dsv4.self_test import MEASURED, RUN, mark_of_gpu

    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        known = mark_of_gpu(torch.device("cuda", index))
        advice = "" if known in (MEASURED, RUN) else "; python -m dsv4 env --selftest runs them"
        name = torch.cuda.get_device_name(index)
        yield f"GPU {index} of this machine, {name}; kernels on it: {known}{advice}"
    if hopper() is not None:
        yield from plan_lines()


def _head_copy(checkpoint: Checkpoint) -> int:
    """Return the bytes of the NVFP4 copy of the head that drafts use; 0 if they use none."""
    from dsv4.speculation.draft_head import copy_bytes

    head = checkpoint.entries.get("lm_head.weight")
    if not (checkpoint.has_mtp or checkpoint.has_dspark) or head is None:
        return 0
    plain = head.format is None and head.weight.dtype == torch.bfloat16
    return copy_bytes(checkpoint.config()) if plain else 0


def size_text(nbytes: int) -> str:
    """Bytes as text."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10_000_000 else f"{nbytes / 1e6:.2f} MB"


def _files(folder: Path) -> Iterator[str]:
    """Tokenizer and effort table."""
    from dsv4.text.effort import EffortTable

    has_tokenizer = (folder / "tokenizer.json").is_file()
    yield f"tokenizer: {'tokenizer.json' if has_tokenizer else 'none'}"
    table = EffortTable.from_path(folder)
    yield f"reasoning efforts: {'unknown' if table is None else ', '.join(table.texts)}"
