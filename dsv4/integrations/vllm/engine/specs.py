"""Pages of a model as vLLM's KV cache specs, and the groups of layers that share a block table.

| kind | vLLM's spec | a block stands for | and holds |
|---|---|---|---|
| window | sliding window, ``config.sliding_window`` | 64 tokens | 64 raw KV entries |
| compressed | MLA, ``tokens_per_state`` 4 or 128 | 256 tokens | 64 or 2 entries |
| index | MLA, ``tokens_per_state`` 4 | 256 tokens | 64 index keys |
| rows | ``rows.RowSpec`` | a request | nothing |

Layouts are those of ``dsv4.kv_cache.pages``. Compressed entries and index keys of all layers share
a block table. A block holds the pages of all layers of its group side by side (layout BLHNC), and
blocks of all groups are as large as the largest: in Flash 1.6 MB if windows were one group, while
compressed entries take 0.9. So windows are split into groups about as large as that of the
compressed entries, of which a long request has the most blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from dsv4.config import CSA, ModelConfig
from dsv4.kv_cache.layer_cache import BLOCK, WINDOW_PAGE
from dsv4.kv_cache.pages import Pages

WINDOW, COMPRESSED, INDEX, ROWS = "window", "compressed", "index", "rows"
ALIGNMENT = 64  # bytes; CuTeDSL kernels copy 16 at a time, Triton kernels and caches like lines


@dataclass(frozen=True)
class PageLayout:
    """Pages of one kind of one layer.

    Attributes:
        layer: Number of the layer.
        kind: ``"window"``, ``"compressed"`` or ``"index"``.
        block_tokens: Tokens that a page stands for.
        pages: Empty pages of this layout.
    """

    layer: int
    kind: str
    block_tokens: int
    pages: Pages

    @property
    def name(self) -> str:
        """Name of the module, from which vLLM reads the number of the layer."""
        return f"model.layers.{self.layer}.{self.kind}"

    @property
    def key(self) -> tuple[int, str]:
        """Layer and kind."""
        return self.layer, self.kind

    @property
    def block_bytes(self) -> int:
        """Bytes of a page, rounded up so that they divide by its entries, too."""
        unit = math.lcm(ALIGNMENT, self.pages.page_size)
        return -(-self.pages.page_bytes() // unit) * unit

    def spec(self, sliding_window: int) -> AttentionSpec:
        """Return vLLM's KV cache spec."""
        pages = self.pages
        common = {
            "block_size": self.block_tokens,
            "num_kv_heads": 1,
            "head_size": pages.head_dim,
            "dtype": torch.uint8,  # vLLM does not look into a page
            "tokens_per_state": self.block_tokens // pages.page_size,
            "state_content_bytes": self.block_bytes // pages.page_size,
            "block_stride_alignment": ALIGNMENT,
            "dcp_sharded": False,
        }
        if self.kind == WINDOW:
            return SlidingWindowMLASpec(sliding_window=sliding_window, **common)
        return MLAAttentionSpec(**common)

    def of_blocks(self, blocks: torch.Tensor) -> Pages:
        """Pages in vLLM's memory, without a copy.

        Args:
            blocks: uint8 ``[blocks, 1, page_size, bytes]``, as vLLM binds it to the module.

        Raises:
            ValueError: if bytes of a block do not follow one another.
        """
        entries, size = self.pages.page_size, self.block_bytes // self.pages.page_size
        expected = [entries, size, [size, 1]]
        actual = [*blocks.shape[2:], list(blocks.stride()[2:])]
        if blocks.dtype != torch.uint8 or blocks.dim() != 4 or actual != expected:
            raise ValueError(
                f"{self.name}: vLLM's KV cache is {blocks.dtype} {list(blocks.shape)} with strides "
                f"{list(blocks.stride())}, expected uint8 [blocks, 1, {entries}, {size}] with "
                f"strides [..., {size}, 1]"
            )
        offset = blocks.storage_offset()
        flat = blocks.as_strided((blocks.shape[0], entries * size), (blocks.stride(0), 1), offset)
        data = flat[:, : self.pages.page_bytes()]
        if self.pages.entry_format == "plain":
            data = data.view(self.pages.data.dtype).unflatten(1, (entries, self.pages.head_dim))
        return Pages(
            data, entries, self.pages.entry_format, self.pages.head_dim, self.pages.rope_dim
        )


@dataclass(frozen=True)
class Formats:
    """Formats of entries.

    Attributes:
        entry: Of KV entries, ``"fp8"`` or ``"plain"``.
        index: Of index keys, ``"plain"``, ``"index_fp8"`` or ``"index_mxfp4"``.
        dtype: Of plain entries.
    """

    entry: str
    index: str
    dtype: torch.dtype


def page_layouts(config: ModelConfig, formats: Formats) -> list[PageLayout]:
    """Pages of every layer, in the order of the layers.

    Raises:
        ValueError: if a block of ``BLOCK`` tokens is no whole number of compressed entries.
    """
    layouts = []
    for layer in range(config.num_hidden_layers):
        pages = _pages(config, WINDOW_PAGE, config.head_dim, formats.entry, formats.dtype)
        layouts.append(PageLayout(layer, WINDOW, WINDOW_PAGE, pages))
        ratio = config.compress_rate(layer)
        if not ratio:
            continue
        if BLOCK % ratio:
            raise ValueError(
                f"layer {layer} compresses {ratio} tokens to an entry, expected a divisor of "
                f"{BLOCK}, the tokens of a block"
            )
        pages = _pages(config, BLOCK // ratio, config.head_dim, formats.entry, formats.dtype)
        layouts.append(PageLayout(layer, COMPRESSED, BLOCK, pages))
        if config.layer_type(layer) == CSA:
            dim = config.index_head_dim
            pages = _pages(config, BLOCK // ratio, dim, formats.index, formats.dtype)
            layouts.append(PageLayout(layer, INDEX, BLOCK, pages))
    return layouts


def _pages(
    config: ModelConfig, size: int, dim: int, entry_format: str, dtype: torch.dtype
) -> Pages:
    return Pages.allocate(0, size, dim, config.qk_rope_head_dim, entry_format, dtype, "cpu")


def window_groups(page_bytes: Mapping[str, int]) -> list[list[str]]:
    """Names of the window modules that share a block table.

    Args:
        page_bytes: Bytes of a page by name of the module, of every kind but the rows.
    """
    windows = [name for name in page_bytes if kind_of(name) == WINDOW]
    total = sum(page_bytes[name] for name in windows)
    others = sum(page_bytes.values()) - total
    count = -(-total // others) if others else 1
    size = -(-len(windows) // min(count, len(windows)))
    return [windows[begin : begin + size] for begin in range(0, len(windows), size)]


def groups(specs: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Split specs by what is in the blocks: windows, compressed entries with index keys, rows.

    Args:
        specs: By name of the module.
    """
    rows = [name for name in specs if kind_of(name) == ROWS]
    entries = [name for name in specs if kind_of(name) in (COMPRESSED, INDEX)]
    sizes = {name: spec.page_size_bytes for name, spec in specs.items() if name not in rows}
    members = [*window_groups(sizes), entries, rows]
    return [
        KVCacheGroupSpec(names, _group_spec({name: specs[name] for name in names}))
        for names in members
        if names
    ]


def kind_of(name: str) -> str:
    """Kind of a module, the last part of its name."""
    return name.rpartition(".")[2]


def _group_spec(group: dict[str, KVCacheSpec]) -> KVCacheSpec:
    first, *others = group.values()
    if not others:
        return first
    return UniformTypeKVCacheSpecs(block_size=first.block_size, kv_cache_specs=group)
