"""Find the draft layers of a checkpoint, and report loaded and left-out tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4.checkpoint import names
from dsv4.checkpoint.mxfp4 import Conversion
from dsv4.checkpoint.shards import CheckpointError
from dsv4.layers.pack import Packing

if TYPE_CHECKING:
    from dsv4.checkpoint.reader import Checkpoint

_logger = logging.getLogger("dsv4.checkpoint")


@dataclass(frozen=True)
class Filled:
    """The layers that ``fill`` packed and converted.

    Attributes:
        packing: Layers that are packed and that are not; None if none was to be packed.
        conversion: Counts of converted MXFP4 matrices.
    """

    packing: Packing | None
    conversion: Conversion


@dataclass(frozen=True)
class LoadReport:
    """The findings of ``load`` about a checkpoint, and what it left out.

    Attributes:
        mtp_layers: Multi-token-prediction layers of the model.
        draft: The checkpoint's layers for speculation: ``"mtp"``, ``"dspark"`` or ``"none"``.
        left_out: Number of tensors that were not loaded, by the reason.
        packing: Layers that are packed, and why others are not; None with ``pack=False``.
        conversion: Conversions of MXFP4 matrices.
        bytes_read: Bytes of tensors that were read, on several ranks by this one.
        path: The checkpoint's folder, from which ``save`` copies the tokenizer; None: unknown.
    """

    mtp_layers: int
    draft: str
    left_out: Mapping[str, int]
    packing: Packing | None = None
    conversion: Conversion = field(default_factory=Conversion)
    path: Path | None = None
    bytes_read: int = 0


def left_out(path: Path, number: int, reason: str) -> None:
    """Warn of tensors that are in a checkpoint and have no effect."""
    _logger.warning("%s: %d tensors left out: %s", path, number, reason)


def mtp_layers(checkpoint: Checkpoint, configured: int, mtp: bool | None) -> int:
    """Return the number of MTP layers to load; see ``dsv4.checkpoint.load``.

    Raises:
        CheckpointError: if ``mtp`` is true and the layers are missing.
        TypeError: if ``mtp`` is neither None nor a bool.
    """
    if mtp not in (None, True, False):
        raise TypeError(f"mtp is {mtp!r}, wanted None, True or False")
    layers = checkpoint.mtp_layers
    if mtp is None:
        if layers != configured and not checkpoint.has_dspark:
            _logger.warning(
                "%s: num_nextn_predict_layers is %d, but tensors of %d MTP layers were found; "
                "%d are loaded",
                checkpoint.path,
                configured,
                layers,
                layers,
            )
        return layers
    if not mtp:
        return 0
    if checkpoint.has_dspark:
        raise CheckpointError(
            f"{checkpoint.path} has a DSpark draft head under mtp.*, for which this package has no "
            "layers, but mtp=True demands MTP layers; pass mtp=None to load the main model alone"
        )
    if layers == 0 or configured not in (0, layers):
        raise CheckpointError(
            f"{checkpoint.path} has tensors of {layers} MTP layers (mtp.*) and "
            f"num_nextn_predict_layers is {configured}, but mtp=True demands at least 1 and the "
            "number of the configuration; pass mtp=None to load what is there"
        )
    return layers


def report_of(checkpoint: Checkpoint, mtp: int, input_scales: str, filled: Filled) -> LoadReport:
    """Make the report of loading, and log it."""
    # ``fill`` has logged these.
    unused = {reason: len(tensors) for reason, tensors in checkpoint.unused.items()}
    others: dict[str, int] = {}
    dspark = checkpoint.has_dspark
    if not mtp:
        stray = [
            name for name in checkpoint.stray if name.removeprefix("model.").startswith("mtp.")
        ]
        number = len(stray) + sum(map(names.is_mtp, checkpoint.entries))
        reason = "MTP layers (mtp.*)"
        if dspark:
            reason = "a DSpark draft head (mtp.*), for which this package has no layers"
        others[reason] = number
    if input_scales == "token":
        scales = [entry for entry in checkpoint.entries.values() if entry.input_scale]
        others["calibrated input scales, because of input_scales='token'"] = len(scales)
    others = {reason: number for reason, number in others.items() if number}
    for reason, number in others.items():
        left_out(checkpoint.path, number, reason)
    draft = "dspark" if dspark else "mtp" if checkpoint.has_mtp else "none"
    _logger.info("%s: %d MTP layers loaded, draft: %s", checkpoint.path, mtp, draft)
    counts = {**unused, **others}
    path = checkpoint.path.absolute()
    return LoadReport(
        mtp, draft, counts, filled.packing, filled.conversion, path, checkpoint.bytes_read
    )
