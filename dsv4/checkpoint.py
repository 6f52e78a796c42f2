"""Reading and writing DeepSeek-V4 checkpoints.

``load`` builds a model from a folder: NVIDIA's NVFP4, ModelOpt's exports, compressed-tensors
(llm-compressor), AMD Quark's NVFP4, DeepSeek's MXFP4 and FP8, or plain weights (specification,
section 11.5), with DeepSeek's names, transformers' or a mixture. ``save`` writes five layouts.
``Checkpoint`` gives the tensors one by one, ``fill`` puts them into any module tree with
transformers' names, and ``write`` makes a checkpoint of any size from a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dsv4._checkpoint import layouts, transaction
from dsv4._checkpoint.arguments import as_dtype, check_prepare, check_reserve
from dsv4._checkpoint.dry_run import dry_run
from dsv4._checkpoint.entries import Entry
from dsv4._checkpoint.filling import Filled, each_slot
from dsv4._checkpoint.folder import existing
from dsv4._checkpoint.items import Item, items_of
from dsv4._checkpoint.opened import Checkpoint
from dsv4._checkpoint.options import Options
from dsv4._checkpoint.packing import PackChoice, mxfp4_mode, report_packing
from dsv4._checkpoint.pairs import Pairing
from dsv4._checkpoint.problems import raise_all
from dsv4._checkpoint.progress import Progress
from dsv4._checkpoint.report import LoadReport, left_out, mtp_layers, report_of
from dsv4._checkpoint.shards import (
    CheckpointError,
    MissingCheckpointError,
)
from dsv4._checkpoint.slots import ExpertsSlot, Slot, slots_of
from dsv4._checkpoint.writer import ShardWriter
from dsv4.config import ModelConfig
from dsv4.layers.reserve import STEP_TOKENS, warm_allocator

if TYPE_CHECKING:
    from dsv4.model import DeepseekV4ForCausalLM

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Entry",
    "Filled",
    "Item",
    "LoadReport",
    "MissingCheckpointError",
    "fill",
    "load",
    "recover",
    "save",
    "write",
]


def recover(path: str | Path) -> bool:
    """Complete a save that was killed while it moved its files into a folder.

    ``load`` reads such a folder as it is, and the next ``save`` completes it. Other programs find
    no config.json until then.

    Returns:
        Whether there was such a save.

    Raises:
        BlockingIOError: if a save into the folder is under way.
    """
    return transaction.recover(existing(path))


def fill(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    prefix: str = "",
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    activation: str = "bf16",
    mxfp4: str | None = "keep",
    pack: bool | str = False,
    input_scales: str = "stored",
    float32: Collection[str] = (),
    ignore: Sequence[str] = (),
    check_values: bool = True,
    progress: bool = True,
) -> Filled:
    """Fill a module tree that has transformers' names.

    Everything is checked before anything is written: names, shapes and dtypes from the headers,
    then (``check_values``) the values. Modules with ``set_weight`` and ``set_expert`` take
    quantised weights as they are; into all others quantised weights are dequantised.

    Args:
        model: Any module; parameters on meta are created, others replaced.
        checkpoint: Where from.
        prefix: What the checkpoint's names have before the module's, e.g. ``"model."``.
        device: Where the values go; None keeps each parameter's device, and puts meta on the CPU.
        dtype: Dtype of plain floating tensors, or its name; None keeps the checkpoint's (bfloat16
            for what is dequantised). Tensors that are float32 by definition are never narrower, and
            weights of norms never narrower than stored.
        activation: ``"nvfp4"`` demands input scales of NVFP4 routed experts (pitfall 26).
        mxfp4: As for ``load``.
        pack: As for ``load``. Each layer is packed as soon as it has its weight.
        input_scales: ``"stored"`` takes the calibrated scales of activations from the checkpoint;
            ``"token"`` leaves them out, so that NVFP4 layers make one per token.
        float32: Canonical names of other plain tensors that are never narrower than float32.
        ignore: Shell patterns of canonical names that may be left over, e.g. ``"mtp.*"``.
        check_values: Read all values once before writing any. Without it a bad value is found
            while filling, and what was filled before it stays.
        progress: Whether to show a progress bar on stderr.

    Returns:
        What was packed and converted.

    Raises:
        CheckpointError: counting what is missing, extra, mis-shaped or of the wrong dtype, with
            examples; or naming the first tensor with a bad value.
        TypeError: if ``dtype`` is not a floating torch.dtype.
        ValueError: if ``mxfp4``, ``pack`` or ``input_scales`` is unknown.
    """
    dtype = as_dtype(dtype)
    choice = PackChoice.of(pack, dtype or checkpoint.dtype)
    place = None if device is None else torch.device(device)
    mode = mxfp4_mode(mxfp4, choice, torch.device("cpu") if place is None else place)
    if input_scales not in ("stored", "token"):
        raise ValueError(f"input_scales is {input_scales!r}, wanted 'stored' or 'token'")
    options = Options(place, dtype, activation, mode, input_scales, frozenset(float32))
    slots = slots_of(model, prefix)
    plan = dry_run(slots, checkpoint.entries, checkpoint.stray, options, _matcher(ignore))
    raise_all(f"{checkpoint.path} does not fit the model", plan.problems, plan.notes)
    total = plan.nbytes
    for reason, unused in checkpoint.unused.items():
        left_out(checkpoint.path, len(unused), reason)
    source = (slots, checkpoint.entries, checkpoint.close)
    if check_values:
        bar = Progress("checking", total, progress)
        each_slot(*source, bar, lambda slot: slot.check_values(checkpoint.entries, options))
    packer = choice.packer(model)

    def fill_slot(slot: Slot) -> None:
        slot.fill(checkpoint.entries, options)
        if packer is not None:
            packer.pack(slot.module)

    each_slot(*source, Progress("loading", total, progress), fill_slot)
    options.conversion.report(checkpoint.path)
    if packer is not None:
        report_packing(checkpoint.path, model, packer.report)
    return Filled(None if packer is None else packer.report, options.conversion)


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def load(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    numerics: str = "deepseek",
    activation: str = "bf16",
    dtype: torch.dtype | str | None = None,
    mtp: bool | None = None,
    mxfp4: str | None = None,
    pack: bool | str = True,
    reserve_tokens: int = STEP_TOKENS,
    input_scales: str = "stored",
    prepare: bool | str = True,
    progress: bool = True,
) -> DeepseekV4ForCausalLM:
    """A model from a checkpoint folder, ready to run on its device.

    Each weight has the format it is stored in, but for MXFP4 (``mxfp4``). NVFP4 weights are packed
    for the device's tensor cores (``pack``), each layer as soon as it is read; no value changes.
    Memory holds the model and less than one layer more: the files are mapped a part at a time.

    ``save`` and ``state_dict`` write a packed model as an unpacked one. MXFP4 weights that were
    converted are written as NVFP4 with the same values, and as MXFP4 by ``save`` with
    ``layout="deepseek"`` (with ``"nvidia"``, those of MTP layers).

    Headers, shapes, dtypes and the sizes of files are checked, and values that no sound checkpoint
    holds (NaN, infinite weights, scales of 0) are refused. safetensors has no checksum: a byte of a
    value that was changed into another finite value cannot be seen. Compare digests of the files
    with those of their publisher where that matters.

    The model's ``load_report`` says what was found and left out; the logger ``dsv4.checkpoint``
    says the same, with a warning for each kind of tensor that was left out.

    Args:
        path: Folder with config.json and safetensors.
        device: Where the model goes.
        numerics: ``"deepseek"`` or ``"transformers"``, see ``ModelConfig``.
        activation: ``"bf16"`` or ``"nvfp4"``.
        dtype: Dtype of plain weights, or its name; None keeps the checkpoint's. Weights of norms,
            sinks, hyper-connections and biases are not rounded to it.
        mtp: Multi-token-prediction layers. None loads those whose tensors are there, whatever
            config.json says. True demands at least one, and as many as config.json says. False
            leaves them out. This package has no layers for a DSpark draft head: None and False
            leave it out, True raises.
        mxfp4: What to do with MXFP4 weights, for which there are no packed kernels.
            ``"lossless"`` converts a matrix to NVFP4 if no value changes, which holds if the
            exponents of its block scales differ by at most 17; gate and up of an expert get one
            global scale where that changes no value. Otherwise the matrix stays MXFP4 (in an
            expert: all experts of the layer), and a warning says so. ``"nvfp4"`` converts all and
            rounds where that is needed; ``"keep"`` converts none. None: ``"lossless"`` where the
            experts are packed, else ``"keep"``.
        pack: True packs the layers for which the device has kernels that take packed weights: NVFP4
            ones of a bfloat16 model on GPUs of compute capability 9.0, 10.0 and 10.3, linear layers
            from 8.0 on. On a CPU none is packed. ``"fragments_16x64"`` or ``"swizzled_128x4"``
            packs in this layout on any device, see ``dsv4.layers.pack_``. False keeps the layout of
            the checkpoint. The logger says which layers are not packed and why.
        reserve_tokens: On a GPU, tokens of a step whose memory PyTorch's allocator gets now, see
            ``dsv4.layers.warm_allocator``: for 4096 tokens 0.5 GB in Flash and 0.86 GB in Pro.
            Larger steps get more when they come. 0: none.
        input_scales: ``"stored"``: with ``activation="nvfp4"``, routed experts in NVFP4 need the
            calibrated input scales of the checkpoint. ``"token"``: stored input scales are left
            out, every NVFP4 layer makes a scale per token; ``dsv4.layers.calibrate`` can fix them
            later.
        prepare: On a GPU, what is done now so that the first prompt takes no longer than later
            ones. True: the kernels of all steps are compiled, in parallel processes, or loaded if
            they were compiled before or are in a bundle (``dsv4.warmup``); then the runner of
            ``generate`` is made for one sequence of 8192 tokens and its CUDA graphs are captured
            (``dsv4.serving.prepare``, which says what memory that holds until
            ``dsv4.serving.release``). ``"kernels"``: the kernels alone, for a
            ``dsv4.serving.Runner`` of your own, whose ``warm_up`` captures its graphs. False:
            nothing; kernels are compiled at their first launch. Without memory for it, or where a
            capture fails, a warning says so, and the first ``generate`` does it.
        progress: Whether to show progress on stderr.

    Raises:
        CheckpointError: if the checkpoint is damaged or contradicts its configuration, or has not
            the layers or scales that were demanded.
        FileNotFoundError: if there is no such folder, or no config.json in it.
        TypeError: if ``dtype`` is not a floating torch.dtype, ``mtp`` neither None nor a bool, or
            ``reserve_tokens`` no integer.
        torch.OutOfMemoryError: if the device has no room for the model and a step.
        ValueError: if an option is unknown, or config.json is not a configuration this package
            implements.
    """
    from dsv4 import serving
    from dsv4.compilation.warmup import warm_loaded
    from dsv4.model import DeepseekV4ForCausalLM

    dtype = as_dtype(dtype)
    check_reserve(reserve_tokens)
    check_prepare(prepare)
    with Checkpoint.open(path) as checkpoint:
        config = checkpoint.config(numerics=numerics, activation=activation)
        count = mtp_layers(checkpoint, config.num_nextn_predict_layers, mtp)
        config = config.replace(num_nextn_predict_layers=count)
        checkpoint.check_size(config)
        with torch.device("meta"):
            model = DeepseekV4ForCausalLM(config)
        filled = fill(
            model,
            checkpoint,
            device=device,
            dtype=dtype,
            activation=activation,
            mxfp4=mxfp4,
            pack=pack,
            input_scales=input_scales,
            ignore=() if count else ("mtp.*", "model.mtp.*"),
            check_values=False,  # nothing to protect: on an error the model is dropped
            progress=progress,
        )
        model.load_report = report_of(checkpoint, count, input_scales, filled)
    warm_allocator(model, reserve_tokens, model.dtype)
    model.eval()
    if prepare:
        warmed = warm_loaded(model, max(reserve_tokens, STEP_TOKENS), progress)
        # Without its kernels a step could raise, which is for the step's caller.
        if prepare is True and warmed is not None and not warmed.failed:
            serving.prepare(model)
    return model


def save(
    source: nn.Module | Iterable[Item],
    path: str | Path,
    *,
    layout: str = "nvidia",
    config: Any = None,
    max_shard_bytes: int = 5 << 30,
    overwrite: bool = False,
    plain: Sequence[str] = (),
    plain_dtype: torch.dtype | None = torch.bfloat16,
) -> None:
    """Write a model as a checkpoint folder: shards, index and config.json.

    Plain weights are quantised as the layout demands; quantised ones are stored as they are (see
    ``dsv4._checkpoint.layouts`` for both), packed ones as if they were not packed. Experts that
    ``load`` converted from MXFP4 are stored as NVFP4 with the same values, or as MXFP4 again where
    that is the layout's format: all in ``"deepseek"``, those of MTP layers in ``"nvidia"``.

    Gate and up of an MLP in NVFP4 get one global scale, because engines take one for both; where
    that would change a value they keep their own, and the logger ``dsv4.checkpoint`` warns once
    with their number. A checkpoint that is replaced stays whole until the new one is, whatever
    fails, and only its own files go: see ``dsv4._checkpoint.transaction``. The disk must have room
    for both.

    Args:
        source: A model of this package or of transformers, or a stream of (canonical name, tensor,
            input scale or None); a stream is written as it comes, and of it no more is held than
            gate projections whose up projection has not come.
        path: Folder, made if missing.
        layout: ``"nvidia"``, ``"deepseek"``, ``"transformers"``, ``"compressed-tensors"`` or
            ``"bf16"``.
        config: ModelConfig or transformers' config; default ``source.config``.
        max_shard_bytes: A new shard is begun rather than exceed this.
        overwrite: Whether to replace a checkpoint that is there.
        plain: Shell patterns of canonical names that stay plain whatever the layout.
        plain_dtype: Dtype of plain weights; None keeps each one's own.

    Raises:
        FileExistsError: if the folder holds a checkpoint and ``overwrite`` is false, or a file that
            is not the checkpoint's is in the way.
        BlockingIOError: if another save into the folder is under way.
        ValueError: if the layout is unknown or cannot hold a weight; the folder is left as it was.
    """
    if layout not in layouts.LAYOUTS:
        raise ValueError(f"layout is {layout!r}, wanted one of {', '.join(layouts.LAYOUTS)}")
    given = ModelConfig.of(_config_of(source, config))
    how = layouts.Layout(layout, _matcher(plain), as_dtype(plain_dtype, "plain_dtype"))
    stream = items_of(source, how.own_format) if isinstance(source, nn.Module) else source
    pairing = Pairing(how)
    with ShardWriter(path, max_shard_bytes=max_shard_bytes, overwrite=overwrite) as writer:
        for name, value, input_scale in pairing.convert(stream):
            for stored, tensor in how.encode(name, value, input_scale):
                writer.add(stored, tensor)
        writer.finish(layouts.documents(how, given))
    pairing.report(path)


def _config_of(source: Any, config: Any) -> Any:
    """The configuration to save with, which a model of DeepSeek-V4 has."""
    if isinstance(source, nn.Module):
        found = getattr(source, "config", None) if config is None else config
        if found is None or not any(isinstance(s, ExpertsSlot) for s in slots_of(source)):
            raise ValueError(
                f"source is {type(source).__name__}, wanted a DeepseekV4ForCausalLM of dsv4 or of "
                "transformers, or a stream of (name, tensor, input scale)"
            )
        return found
    if isinstance(source, (str, bytes, Mapping)) or not isinstance(source, Iterable):
        raise TypeError(
            f"source is {type(source).__name__}, wanted a model, or a stream of "
            "(name, tensor, input scale)"
        )
    if config is None:
        raise ValueError("config is None, wanted one: a stream has none of its own")
    return config


write = save
