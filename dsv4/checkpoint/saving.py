"""Write a model or a stream of tensors as a checkpoint folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsv4.checkpoint import companions as companion_files
from dsv4.checkpoint import layouts, names, transaction
from dsv4.checkpoint.arguments import Patterns, as_dtype
from dsv4.checkpoint.expert_slots import ExpertsSlot
from dsv4.checkpoint.folder import existing
from dsv4.checkpoint.items import Item, items_of
from dsv4.checkpoint.module_tree import slots_of
from dsv4.checkpoint.pairs import Pairing
from dsv4.checkpoint.shard_writer import ShardWriter
from dsv4.config import ModelConfig
from dsv4.quant.formats import Format


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
    companions: str | Path | bool | None = None,
) -> None:
    """Write a model as a checkpoint folder: shards, index and config.json.

    The tokenizer, the generation defaults and the folder ``encoding`` are copied from the folder
    that the model was loaded from (``companions``).

    Plain weights are quantised as the layout requires; quantised ones are stored as they are (see
    ``dsv4.checkpoint.layouts`` for both), packed ones as if they were not packed. Experts that
    ``load`` converted from MXFP4 are stored as NVFP4 with the same values, or as MXFP4 again where
    that is the layout's format: all in ``"deepseek"``, those of draft layers in ``"nvidia"``.

    Gate and up of an MLP in NVFP4 get one global scale, because engines take one for both; where
    that would change a value they keep their own, and the logger ``dsv4.checkpoint`` warns once
    with their number. A checkpoint that is replaced stays complete until the new one is, whatever
    fails, and only its own files are removed: see ``dsv4.checkpoint.transaction``. The disk must
    have room for both.

    Args:
        source: A model of this package or of transformers, or a stream of (canonical name, tensor,
            input scale or None); a stream is written as it comes, and only gate projections whose
            up projection has not come yet are held.
        path: Folder, made if missing.
        layout: ``"nvidia"``, ``"deepseek"``, ``"transformers"``, ``"compressed-tensors"`` or
            ``"bf16"``.
        config: ModelConfig or transformers' config; the default is ``source.config``.
        max_shard_bytes: Most bytes of a shard, unless one tensor has more.
        overwrite: Whether to replace an existing checkpoint.
        plain: Shell patterns of canonical names that stay plain in any layout.
        plain_dtype: Dtype of plain weights; None keeps each one's own.
        companions: Folder whose tokenizer.json, tokenizer_config.json, special_tokens_map.json,
            generation_config.json, chat_template.jinja and files of ``encoding`` are copied, if it
            has them, after the checkpoint is complete. None: the folder that ``load`` read the
            model from. False: nothing is copied.

    Raises:
        FileExistsError: if the folder holds a checkpoint and ``overwrite`` is false, or a file that
            is not the checkpoint's is in the way, or a file to be copied is there with another
            content and ``overwrite`` is false.
        BlockingIOError: if another save into the folder is under way.
        ValueError: if the layout is unknown or cannot hold a weight, a pattern of ``plain`` matches
            nothing, or the model is a rank's part of one; the folder is left as it was.
    """
    if layout not in layouts.LAYOUTS:
        raise ValueError(f"layout is {layout!r}, wanted one of {', '.join(layouts.LAYOUTS)}")
    if getattr(source, "parallel", None) is not None:
        raise ValueError(
            f"source is {source.parallel!r} of a model, wanted a whole one: a rank has a part of "  # type: ignore[union-attr]
            "each matrix"
        )
    configuration = ModelConfig.of(_config_of(source, config))
    if isinstance(source, nn.Module):
        _check_whole(source)
    exceptions = Patterns(plain, "plain")
    target = layouts.Layout(layout, exceptions, as_dtype(plain_dtype, "plain_dtype"))
    stream = items_of(source, target.own_format) if isinstance(source, nn.Module) else source
    pairing = Pairing(target)
    report = getattr(source, "load_report", None)
    origin = companion_files.source_of(companions, getattr(report, "path", None))
    contents = companion_files.read(origin, Path(path))
    companion_files.check(Path(path), contents, overwrite)
    drafts: dict[int, Format | None] = {}
    with ShardWriter(path, max_shard_bytes=max_shard_bytes, overwrite=overwrite) as writer:
        for name, value, input_scale in pairing.convert(stream):
            exceptions(name)
            if names.is_mtp(name) and names.is_routed(name):
                drafts[int(name.split(".")[1])] = getattr(value, "format", None)
            for stored, tensor in target.encode(name, value, input_scale):
                writer.add(stored, tensor)
        exceptions.check_all_matched()
        writer.finish(layouts.documents(target, configuration, drafts))
        companion_files.write(writer.folder, contents)
    pairing.report(path)


def _check_whole(model: nn.Module) -> None:
    """Raise for a model that has some experts of a layer: the others would be missing."""
    for name, module in model.named_modules():
        count, own = (
            getattr(module, "num_experts", None),
            getattr(module, "num_local_experts", None),
        )
        if getattr(module, "hosted", None) is not None:
            continue  # the others are in host memory
        if isinstance(count, int) and isinstance(own, int) and own != count:
            raise ValueError(
                f"save: {name} holds {own} of {count} experts, those of one rank, wanted all"
            )


def _config_of(source: Any, config: Any) -> Any:
    """Return the configuration to save with, which a model of DeepSeek-V4 has."""
    if isinstance(source, nn.Module):
        own = getattr(source, "config", None) if config is None else config
        if own is None or not any(isinstance(s, ExpertsSlot) for s in slots_of(source)):
            raise ValueError(
                f"source is {type(source).__name__}, wanted a DeepseekV4ForCausalLM of dsv4 or of "
                "transformers, or a stream of (name, tensor, input scale)"
            )
        return own
    if isinstance(source, (str, bytes, Mapping)) or not isinstance(source, Iterable):
        raise TypeError(
            f"source is {type(source).__name__}, wanted a model, or a stream of "
            "(name, tensor, input scale)"
        )
    if config is None:
        raise ValueError("config is None, wanted one: a stream has none of its own")
    return config


write = save
