"""vLLM's cache tensors as this package's pages, without a copy.

What was compared in both sources (vLLM 0.33, ``kv_cache_dtype`` ``fp8_ds_mla``), and is tested
byte by byte in ``tests/integrations/vllm/test_cache_views.py``:

| | vLLM | here |
|---|---|---|
| KV entry | 448 E4M3, 64 bfloat16; 7 scales and a zero after all data | ``EntryLayout`` |
| KV page | 64 entries of raw tokens, 64 (ratio 4) or 2 (ratio 128) others | ``page_size`` |
| padding | pages are multiples of 576 bytes: 37440, 37440, 1728 | ``page_bytes`` |
| block stride | pages of several layers share a block | ``data.stride(0)`` |
| scale | ``2^ceil(log2(max(amax, 1e-4) / 448))``, E8M0 | the same, in integers |
| RoPE | last 64 dims, neighbouring pairs; float32 table of 32 cos, 32 sin | ``rope`` |
| slot | ``block * page_size + entry``, -1: none | the same |
| index key | 128 E4M3 and a float32, or 64 bytes of E2M1 and 4 E8M0 | ``IndexLayout`` |
| index page | 64 keys, padded to a multiple of 576 bytes | the stride has the padding |
| state | float32 rows of kv and score + ape, 4 or 8 to a block | ``compress_write_paged`` |
| sink | a logit that the scale does not touch; -inf for padded heads | the same |
| top k | entry numbers within the sequence, -1 behind the last | the same |

Differences:

- NaN and Inf. Here their group of 64 has scale byte 255 and reads as NaN; vLLM's ``log2`` and clamp
  give bytes that depend on the device. Finite values have the same bytes.
- Index keys. vLLM makes no Hadamard transform before it rounds them (the specification, section 6,
  does); queries and keys must agree, so with vLLM's pages this package makes none either. On GPUs
  whose index products take MX scales vLLM stores four E8M0 bytes in place of the float32.
- Compressed entries. vLLM normalises and rotates the float32 pool and rounds once; here the pool,
  the norm and the rotation are each rounded to bfloat16 (specification, section 5.2), as DeepSeek's
  own code does.
- Queries. vLLM rounds once after norm and rotation, here the norm is rounded, too.
"""

from __future__ import annotations

import torch

from dsv4.kv_cache.pages import Pages, entry_layout


def kv_pages(cache: torch.Tensor, head_dim: int, rope_dim: int) -> Pages:
    """KV pages in a cache ``[blocks, page_size, bytes]`` of vLLM's.

    Args:
        cache: As bound to the layer; blocks may lie further apart than a page is long.
        head_dim: Dims of an entry.
        rope_dim: How many of them carry the rotary embedding.

    Raises:
        TypeError: if the cache is not of bytes.
        ValueError: if the shape or a stride is not that of such pages.
    """
    return _view("KV", cache, "fp8", head_dim, rope_dim)


def index_pages(cache: torch.Tensor, head_dim: int, entry_format: str) -> Pages:
    """Index keys in a cache ``[blocks, page_size, bytes]`` of vLLM's.

    Args:
        cache: As for ``kv_pages``.
        head_dim: Dims of a key.
        entry_format: ``"index_fp8"`` or ``"index_mxfp4"``.

    Raises:
        TypeError: if the cache is not of bytes.
        ValueError: if the shape or a stride is not that of such pages.
    """
    return _view("index", cache, entry_format, head_dim, 0)


def _view(name: str, cache: torch.Tensor, entry_format: str, head_dim: int, rope_dim: int) -> Pages:
    layout = entry_layout(entry_format, head_dim, rope_dim)
    entry_bytes = layout.data_bytes + layout.scale_bytes
    if cache.dtype != torch.uint8:
        raise TypeError(f"vLLM's {name} cache is {cache.dtype}, expected uint8 pages")
    if cache.dim() != 3 or cache.shape[2] != entry_bytes:
        raise ValueError(
            f"vLLM's {name} cache has shape {list(cache.shape)}, expected "
            f"[blocks, entries, {entry_bytes}]"
        )
    blocks, page_size, _ = cache.shape
    page_bytes, stride = layout.page_bytes(page_size), cache.stride(0)
    if cache.stride()[1:] != (entry_bytes, 1) or (blocks > 1 and stride < page_bytes):
        raise ValueError(
            f"vLLM's {name} cache has strides {list(cache.stride())}, expected "
            f"[{page_bytes} or more, {entry_bytes}, 1]"
        )
    data = cache.as_strided((blocks, page_bytes), (max(stride, page_bytes), 1))
    return Pages(data, page_size, entry_format, head_dim, rope_dim)


class PagesOf:
    """The last view of a cache tensor, which stays the same while vLLM's tensor does."""

    def __init__(self) -> None:
        self._cache: torch.Tensor | None = None
        self._pages: Pages | None = None

    def kv(self, cache: torch.Tensor, head_dim: int, rope_dim: int) -> Pages:
        """``kv_pages``, made once for a tensor."""
        if self._pages is None or cache is not self._cache:
            self._cache, self._pages = cache, kv_pages(cache, head_dim, rope_dim)
        return self._pages

    def index(self, cache: torch.Tensor, head_dim: int, entry_format: str) -> Pages:
        """``index_pages``, made once for a tensor."""
        if self._pages is None or cache is not self._cache:
            self._cache, self._pages = cache, index_pages(cache, head_dim, entry_format)
        return self._pages
