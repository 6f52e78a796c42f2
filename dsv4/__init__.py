"""DeepSeek-V4 in NVFP4: kernels, layers, checkpoints and benchmarks.

Importing this package imports torch and nothing else, and touches no GPU. Everything below is
loaded on first use.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__path__ = [*__path__, str(Path(__file__).parent / "_moved")]  # old paths of modules

_LAZY = {
    "ModelConfig": "dsv4.config",
    "QuantizedTensor": "dsv4.quant.formats",
    "NVFP4": "dsv4.quant.formats",
    "MXFP4": "dsv4.quant.formats",
    "FP8_BLOCK": "dsv4.quant.formats",
    "PagedCache": "dsv4.kv_cache.paged_cache",
    "DeepseekV4ForCausalLM": "dsv4.model",
    "load": "dsv4.checkpoint",
    "save": "dsv4.checkpoint",
    "explain": "dsv4.dispatch",
    "use_backend": "dsv4.dispatch",
    "warmup": "dsv4.compilation.warmup",
}

__all__ = ["__version__", *sorted(_LAZY)]

if TYPE_CHECKING:  # the same names as in _LAZY, so that type checkers see them
    from dsv4.checkpoint import load as load
    from dsv4.checkpoint import save as save
    from dsv4.compilation.warmup import warmup as warmup
    from dsv4.config import ModelConfig as ModelConfig
    from dsv4.dispatch import explain as explain
    from dsv4.dispatch import use_backend as use_backend
    from dsv4.kv_cache.paged_cache import PagedCache as PagedCache
    from dsv4.model import DeepseekV4ForCausalLM as DeepseekV4ForCausalLM
    from dsv4.quant.formats import FP8_BLOCK as FP8_BLOCK
    from dsv4.quant.formats import MXFP4 as MXFP4
    from dsv4.quant.formats import NVFP4 as NVFP4
    from dsv4.quant.formats import QuantizedTensor as QuantizedTensor


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'dsv4' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
