"""Convert a checkpoint from any layout to any other, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from dsv4.checkpoint import layouts
from dsv4.checkpoint.arguments import Patterns, as_dtype
from dsv4.checkpoint.folder import open_folder
from dsv4.checkpoint.items import Item
from dsv4.checkpoint.mxfp4 import to_mxfp4
from dsv4.checkpoint.pairs import Pairing
from dsv4.checkpoint.progress import Progress
from dsv4.checkpoint.reader import Checkpoint
from dsv4.checkpoint.report import UNKNOWN, left_out
from dsv4.checkpoint.saving import save
from dsv4.checkpoint.shards import CheckpointError, Shards
from dsv4.quant.formats import MXFP4, NVFP4, QuantizedTensor


def convert(
    source: str | Path,
    target: str | Path,
    *,
    layout: str = "nvidia",
    overwrite: bool = False,
    plain: Sequence[str] = (),
    plain_dtype: torch.dtype | None = torch.bfloat16,
    max_shard_bytes: int = 5 << 30,
    progress: bool = True,
) -> int:
    """Write a checkpoint again in another layout, and compare what was written with the source.

    Memory holds a few matrices at a time. Values are quantised only where the layout needs it; what
    ``save`` says of layouts holds. An interrupted conversion leaves the target as it was. Draft
    layers, of MTP or DSpark, are converted as well.

    Args:
        source: Folder of a checkpoint in any layout that ``load`` reads.
        target: Another folder, made if missing.
        layout: See ``save``.
        overwrite: See ``save``.
        plain: See ``save``.
        plain_dtype: See ``save``.
        max_shard_bytes: See ``save``.
        progress: Whether to show progress on stderr.

    Returns:
        Bytes of all tensors that were written.

    Raises:
        CheckpointError: if the source is damaged, or the files of the target do not hold what was
            written.
        FileExistsError: see ``save``.
        FileNotFoundError: if there is no source.
        ValueError: if the layout is unknown or cannot hold a weight, a pattern of ``plain`` matches
            nothing, or both folders are the same.
    """
    if layout not in layouts.LAYOUTS:
        raise ValueError(f"layout is {layout!r}, wanted one of {', '.join(layouts.LAYOUTS)}")
    if Path(source).resolve() == Path(target).resolve():
        raise ValueError(f"target is {target}, wanted another folder than the source")
    with Checkpoint.open(source) as checkpoint:
        config = checkpoint.config()
        checkpoint.check_size(config)
        for reason, left in {UNKNOWN: checkpoint.stray, **checkpoint.unused}.items():
            if left:
                left_out(checkpoint.path, len(left), reason)
        exceptions = Patterns(plain, "plain")
        for name in checkpoint.entries:
            exceptions(name)
        exceptions.check_all_matched()
        chosen = layouts.Layout(layout, exceptions, as_dtype(plain_dtype, "plain_dtype"))
        bar = Progress("convert", checkpoint.nbytes, progress)
        save(
            _items(checkpoint, chosen, bar),
            target,
            layout=layout,
            config=config,
            max_shard_bytes=max_shard_bytes,
            overwrite=overwrite,
            plain=plain,
            plain_dtype=plain_dtype,
            companions=source,
        )
        bar.finish()
        bar = Progress("compare", checkpoint.nbytes, progress)
        written = _compare(_items(checkpoint, chosen, bar), chosen, target)
        bar.finish()
    return written


def _items(checkpoint: Checkpoint, layout: layouts.Layout, bar: Progress) -> Iterator[Item]:
    """Yield a checkpoint's tensors; NVFP4 is MXFP4 where the layout wants it and no value changes.

    Where a value would change the layout raises.
    """
    for item, entry in zip(checkpoint.items(), checkpoint.entries.values(), strict=True):
        name, value, input_scale = item
        if layout.own_format(name) == MXFP4 and input_scale is None:
            value = _as_mxfp4(value)
        yield name, value, input_scale
        bar.advance(entry.nbytes)


def _as_mxfp4(value: torch.Tensor | QuantizedTensor) -> torch.Tensor | QuantizedTensor:
    if not isinstance(value, QuantizedTensor) or value.format != NVFP4:
        return value
    return to_mxfp4(value) or value


def _compare(stream: Iterator[Item], layout: layouts.Layout, target: str | Path) -> int:
    """Return the bytes of the tensors in a folder, each equal to the stream's encoded again.

    Raises:
        CheckpointError: naming the first that is missing, differs or is superfluous.
    """
    folder = open_folder(target)
    shards, rest, total = Shards(folder.path, folder.paths), dict(folder.tensors), 0
    try:
        for name, value, input_scale in Pairing(layout).convert(stream):
            for stored, tensor in layout.encode(name, value, input_scale):
                info = rest.pop(stored, None)
                if info is None or not _same(shards.read(info), tensor):
                    state = "is missing" if info is None else "differs from what was written"
                    raise CheckpointError(f"{folder.path}: {stored} {state}")
                total += info.nbytes
    finally:
        shards.close()
    if rest:
        raise CheckpointError(f"{folder.path}: {min(rest)} was not written by this conversion")
    return total


def _same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if tensor.dtype != other.dtype or tensor.shape != other.shape:
        return False
    flat, other_flat = tensor.contiguous().view(-1), other.contiguous().view(-1)
    return bool(torch.equal(flat.view(torch.uint8), other_flat.view(torch.uint8)))
