"""Find the draft layers of a checkpoint, and report loaded and left-out tensors."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4.checkpoint import names
from dsv4.checkpoint.mxfp4 import Conversion
from dsv4.checkpoint.shards import CheckpointError
from dsv4.config import ModelConfig
from dsv4.config.fields import DSPARK_REQUIRED
from dsv4.layers.pack import Packing

if TYPE_CHECKING:
    from dsv4.checkpoint.reader import Checkpoint

UNKNOWN = "tensors of no known name"
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
        dspark_stages: Stages of the model's DSpark draft.
    """

    mtp_layers: int
    draft: str
    left_out: Mapping[str, int]
    packing: Packing | None = None
    conversion: Conversion = field(default_factory=Conversion)
    path: Path | None = None
    bytes_read: int = 0
    dspark_stages: int = 0


def left_out(path: Path, number: int, reason: str) -> None:
    """Warn of tensors that are in a checkpoint and have no effect."""
    _logger.warning("%s: %d tensors left out: %s", path, number, reason)


def draft_of(checkpoint: Checkpoint, config: ModelConfig, mtp: bool | None) -> ModelConfig:
    """Return a configuration with the draft layers to load; see ``dsv4.checkpoint.load``.

    Raises:
        CheckpointError: if ``mtp`` is true and the layers are missing.
        TypeError: if ``mtp`` is neither None nor a bool.
    """
    if mtp not in (None, True, False):
        raise TypeError(f"mtp is {mtp!r}, wanted None, True or False")
    if mtp is False:
        return config.without_draft()
    if checkpoint.has_dspark:
        return _with_dspark(checkpoint, config, mtp)
    if config.dspark is not None:
        if mtp:
            raise CheckpointError(
                f"{checkpoint.path}: config.json has the fields of a DSpark draft, but no tensor "
                "is one of its heads, and mtp=True demands draft layers; pass mtp=None to load "
                "what is there"
            )
        _logger.warning(
            "%s: config.json has the fields of a DSpark draft, but no tensor is one of its heads",
            checkpoint.path,
        )
        config = config.replace(dspark=None)
    layers = _mtp_layers(checkpoint, config.num_nextn_predict_layers, mtp)
    return config.replace(num_nextn_predict_layers=layers)


def _with_dspark(checkpoint: Checkpoint, config: ModelConfig, mtp: bool | None) -> ModelConfig:
    """Return the configuration of a model with the DSpark draft of a checkpoint."""
    dspark = config.dspark
    if dspark is None:
        if mtp:
            raise CheckpointError(
                f"{checkpoint.path} has a DSpark draft under mtp.*, but config.json has no "
                f"{DSPARK_REQUIRED[0]}, and mtp=True demands draft layers; pass mtp=None to load "
                "the main model alone"
            )
        return config.without_draft()
    if dspark.confidence_head and not checkpoint.has_confidence_head:
        _logger.warning(
            "%s: the DSpark draft has no confidence head, so all of its tokens are verified",
            checkpoint.path,
        )
        dspark = dataclasses.replace(dspark, confidence_head=False)
    return config.replace(dspark=dspark)


def _mtp_layers(checkpoint: Checkpoint, configured: int, mtp: bool | None) -> int:
    """Return the number of MTP layers to load."""
    layers = checkpoint.mtp_layers
    if mtp is None:
        if layers != configured:
            _logger.warning(
                "%s: num_nextn_predict_layers is %d, but tensors of %d MTP layers were found; "
                "%d are loaded",
                checkpoint.path,
                configured,
                layers,
                layers,
            )
        return layers
    if layers == 0 or configured not in (0, layers):
        raise CheckpointError(
            f"{checkpoint.path} has tensors of {layers} MTP layers (mtp.*) and "
            f"num_nextn_predict_layers is {configured}, but mtp=True demands at least 1 and the "
            "number of the configuration; pass mtp=None to load what is there"
        )
    return layers


def ignored_drafts(config: ModelConfig) -> tuple[str, ...]:
    """Return patterns of draft tensors that the model of a configuration need not have."""
    if not config.draft_layers:
        return ("mtp.*", "model.mtp.*")
    if config.dspark is not None and not config.dspark.confidence_head:
        return ("mtp.*.confidence_head.*", "model.mtp.*.confidence_head.*")
    return ()


def report_of(
    checkpoint: Checkpoint, config: ModelConfig, input_scales: str, filled: Filled
) -> LoadReport:
    """Make the report of loading a model of a configuration, and log it."""
    # ``fill`` has logged these.
    unused = {reason: len(tensors) for reason, tensors in checkpoint.unused.items()}
    others: dict[str, int] = {}
    dspark = checkpoint.has_dspark
    tensors = [n for n in (*checkpoint.entries, *checkpoint.stray) if _is_draft(n)]
    if not config.draft_layers:
        others[_left_out_draft(checkpoint)] = len(tensors)
    elif config.dspark is not None and not config.dspark.confidence_head:
        number = sum(map(names.is_confidence, tensors))
        others["the confidence head, because enable_confidence_head is false"] = number
    if input_scales == "token":
        scales = [entry for entry in checkpoint.entries.values() if entry.input_scale]
        others["calibrated input scales, because of input_scales='token'"] = len(scales)
    others = {reason: number for reason, number in others.items() if number}
    for reason, number in others.items():
        left_out(checkpoint.path, number, reason)
    stages = 0 if config.dspark is None else config.dspark.stages
    layers = 0 if stages else config.num_nextn_predict_layers
    draft = "dspark" if dspark else "mtp" if checkpoint.has_mtp else "none"
    loaded = f"{stages} DSpark stages" if stages else f"{layers} MTP layers"
    _logger.info("%s: %s loaded, draft: %s", checkpoint.path, loaded, draft)
    counts = {**unused, **others}
    path = checkpoint.path.absolute()
    return LoadReport(
        *(layers, draft, counts, filled.packing, filled.conversion, path),
        bytes_read=checkpoint.bytes_read,
        dspark_stages=stages,
    )


def _is_draft(name: str) -> bool:
    return names.is_mtp(name.removeprefix("model."))


def _left_out_draft(checkpoint: Checkpoint) -> str:
    """Return the reason under which the tensors of an unused draft are counted."""
    if not checkpoint.has_dspark:
        return "MTP layers (mtp.*)"
    if any(checkpoint.values.get(name) is not None for name in DSPARK_REQUIRED):
        return "a DSpark draft (mtp.*)"
    return f"a DSpark draft (mtp.*), because config.json has no {DSPARK_REQUIRED[0]}"
