"""An empty cache again, whatever an interrupted step has left of its bookkeeping."""

from __future__ import annotations

import torch

from dsv4.cache import PagedCache
from dsv4.page_tables import PagePool, PageTable


@torch.inference_mode()
def clear_cache(cache: PagedCache) -> None:
    """Free every row and page, without reading what is held: that may be half changed."""
    for ratio, table in cache._tables.items():
        table.table.fill_(-1)
        pool = PagePool(table.pool.name, table.pool.size)
        cache._tables[ratio] = PageTable(pool, table.page_size, table.table)  # type: ignore[index]
    cache._live = [False] * cache.max_sequences
    cache._tokens = [0] * cache.max_sequences
    cache._grown = set()
    cache.lengths.zero_()
