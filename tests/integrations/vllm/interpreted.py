"""vLLM's own Triton kernels in Triton's interpreter: the oracle where no GPU is.

Triton 3.6's interpreter rounds ties to bfloat16 and E4M3 up, and loses a carry into the exponent;
``rounding`` gives it the rounding of the hardware.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

_OPS = "vllm.models.deepseek_v4.common.ops"


@cache
def kernels(name: str) -> ModuleType:
    """A copy of a module of vLLM's whose kernels are interpreted.

    Without a GPU vLLM puts stand-ins in the place of Triton when it is imported, so the module's
    source runs again under another name, with Triton.
    """
    module = f"{_OPS}.{name}"
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    copy_spec = importlib.util.spec_from_file_location(f"{_OPS}._interpreted_{name}", spec.origin)
    assert copy_spec is not None
    assert copy_spec.loader is not None
    copy = importlib.util.module_from_spec(copy_spec)
    sys.modules[copy_spec.name] = copy
    with _triton_in_vllm():
        copy_spec.loader.exec_module(copy)
    return copy


@contextmanager
def _triton_in_vllm():
    import vllm.triton_utils as utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(utils, "triton", triton)
        patch.setattr(utils, "tl", tl)
        yield


_ROUNDED = {
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
}


@contextmanager
def rounding():
    """Round float32 to bfloat16 and E4M3 to the nearest, ties to even."""
    original = interpreter._convert_float

    def convert(data, source, target, mode):
        if source != tl.float32 or target not in _ROUNDED:
            return original(data, source, target, mode)
        dtype, bits = _ROUNDED[target]
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32).copy())
        return values.to(dtype).view(bits).numpy().reshape(data.shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        yield


def insert(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Store rotated ``kv [T, 512]`` in pages ``[blocks, entries, 584]`` as vLLM does."""
    blocks = cache.as_strided((cache.shape[0], cache.shape[1] * 584), (cache.stride(0), 1))
    with rounding():
        kernels("cache_utils").quantize_and_insert_k_cache(kv, blocks, slots, cache.shape[1])


def save_states(
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store states of tokens as vLLM does."""
    kv, score = kv_score.chunk(2, dim=-1)
    width = kv.shape[1]
    kernel = kernels("save_partial_states").SavePartialStatesKernel.kernel
    kernel[(slots.shape[0],)](
        kv,
        kv.stride(0),
        score,
        score.stride(0),
        ape,
        ape.stride(0),
        positions,
        state,
        state.stride(0),
        state.stride(1),
        slots,
        state.shape[1],
        HEAD_SIZE=width,
        TRITON_BLOCK_SIZE=triton.next_power_of_2(width),
        STATE_WIDTH=width,
        COMPRESS_RATIO=ape.shape[0],
    )


def compress(
    state: torch.Tensor,
    batch: tuple[torch.Tensor, ...],
    norm_weight: torch.Tensor,
    angles: torch.Tensor,
    cache: torch.Tensor,
    ratio: int,
) -> None:
    """Store the entries that close, from states, as vLLM does.

    ``batch``: rows of the table, positions, slots of states, table, slots of entries.
    """
    rows, positions, state_slots, table, slots = batch
    module, dims = kernels("fused_compress_quant_cache"), norm_weight.shape[0]
    is_key = dims == 128
    name = "indexer" if is_key else "sparse"
    kernel = getattr(module, f"_fused_kv_compress_norm_rope_insert_{name}_attn")
    with rounding():
        kernel[(positions.shape[0],)](
            state,
            state.stride(0),
            state.stride(1),
            rows,
            positions,
            state_slots,
            table,
            table.stride(0),
            state.shape[1],
            norm_weight,
            1e-6,
            angles,
            angles.stride(0),
            cache,
            slots,
            cache.shape[1],
            HEAD_SIZE=dims,
            TRITON_BLOCK_SIZE=dims,
            STATE_WIDTH=state.shape[2] // 2,
            COMPRESS_RATIO=ratio,
            OVERLAP=ratio == 4,
            ROPE_HEAD_DIM=angles.shape[1],
            FP8_MAX=448.0,
            QUANT_BLOCK=128 if is_key else 64,
            TOKEN_STRIDE=128 if is_key else 576,
            SCALE_DIM=4 if is_key else 8,
            KV_BLOCK_STRIDE=cache.stride(0),
            **({"MX_SCALE": False} if is_key else {"SANITIZE_CACHE_NANS": False}),
        )


def index_queries(
    positions: torch.Tensor, q: torch.Tensor, angles: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 queries and weights as vLLM makes them."""
    codes, folded = torch.empty_like(q, dtype=torch.float8_e4m3fn), torch.empty_like(weights)
    tokens, heads, dims = q.shape
    kernel = kernels("fused_indexer_q").FusedIndexerQRopeQuantTritonKernel.kernel
    with rounding():
        kernel[(tokens, heads)](
            positions,
            q,
            q.stride(0),
            q.stride(1),
            angles,
            angles.stride(0),
            angles.shape[1] // 2,
            codes,
            codes.stride(0),
            codes.stride(1),
            dims,
            weights,
            weights.stride(0),
            dims**-0.5,
            heads**-0.5,
            folded,
            folded.stride(0),
        )
    return codes, folded
