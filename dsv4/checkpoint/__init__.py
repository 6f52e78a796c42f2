"""Read and write DeepSeek-V4 checkpoints.

``load`` builds a model from a folder: NVIDIA's NVFP4, ModelOpt's exports, compressed-tensors
(llm-compressor), AMD Quark's NVFP4, DeepSeek's MXFP4 and FP8, or plain weights (specification,
section 11.5), with DeepSeek's names, transformers' or a mixture. ``save`` writes five layouts.
``Checkpoint`` gives the tensors one by one, ``fill`` puts them into any module tree with
transformers' names, and ``write`` makes a checkpoint of any size from a stream.

Public names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_LAZY = {
    "Checkpoint": "reader",
    "CheckpointError": "shards",
    "Entry": "entries",
    "Filled": "report",
    "Item": "items",
    "LoadReport": "report",
    "MissingCheckpointError": "shards",
    "convert": "converting",
    "fill": "filling",
    "load": "loading",
    "recover": "saving",
    "save": "saving",
    "verify": "loading",
    "write": "saving",
}

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Entry",
    "Filled",
    "Item",
    "LoadReport",
    "MissingCheckpointError",
    "convert",
    "fill",
    "load",
    "recover",
    "save",
    "verify",
    "write",
]

if TYPE_CHECKING:  # the same names as in _LAZY, so that type checkers see them
    from dsv4.checkpoint.converting import convert as convert
    from dsv4.checkpoint.entries import Entry as Entry
    from dsv4.checkpoint.filling import fill as fill
    from dsv4.checkpoint.items import Item as Item
    from dsv4.checkpoint.loading import load as load
    from dsv4.checkpoint.loading import verify as verify
    from dsv4.checkpoint.reader import Checkpoint as Checkpoint
    from dsv4.checkpoint.report import Filled as Filled
    from dsv4.checkpoint.report import LoadReport as LoadReport
    from dsv4.checkpoint.saving import recover as recover
    from dsv4.checkpoint.saving import save as save
    from dsv4.checkpoint.saving import write as write
    from dsv4.checkpoint.shards import CheckpointError as CheckpointError
    from dsv4.checkpoint.shards import MissingCheckpointError as MissingCheckpointError


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'dsv4.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dsv4.checkpoint.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
