"""A ``PagedCache`` over vLLM's memory, and the batch of a step, all on the device.

Before a step vLLM knows, per KV cache group, a block table with a line for each request of the
batch. Here every request has a row that stays its own while it runs, see ``rows``: its lines are
copied into the page tables of that row. No number is read back, so a CUDA graph can hold all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dsv4.config import CSA, ModelConfig
from dsv4.integrations.vllm.engine.pages import BlockPages, GroupStep
from dsv4.integrations.vllm.engine.rows import FIRST_ROW, RowSpec
from dsv4.integrations.vllm.engine.specs import (
    COMPRESSED,
    INDEX,
    ROWS,
    WINDOW,
    Formats,
    PageLayout,
    page_layouts,
    window_groups,
)
from dsv4.kv_cache.batch import Batch
from dsv4.kv_cache.layer_cache import ROLLBACK, LayerCache, state_shape
from dsv4.kv_cache.paged_cache import PagedCache
from dsv4.kv_cache.pages import Pages

_ROWS_NAME = f"model.layers.0.{ROWS}"


@dataclass(frozen=True)
class EngineSize:
    """Numbers of sequences and tokens that vLLM asks the model to hold.

    Attributes:
        max_requests: Requests that run at one time.
        max_tokens: Longest request.
        max_chunk: Most new tokens of a step.
    """

    max_requests: int
    max_tokens: int
    max_chunk: int

    @classmethod
    def of(cls, vllm_config: Any) -> EngineSize:
        """Read vLLM's configuration."""
        scheduler, tokens = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
        chunk = min(scheduler.max_num_batched_tokens, tokens)
        return cls(scheduler.max_num_seqs, tokens, chunk)

    @property
    def rows(self) -> int:
        """Rows of tables and state; row 0 belongs to nobody."""
        return FIRST_ROW + self.max_requests


@dataclass
class EngineCache:
    """Page tables and compressor state of all rows, and vLLM's pages once it has bound them.

    Attributes:
        config: The model's.
        size: How much it holds.
        layouts: Pages of every layer.
        modules: What vLLM binds its memory to, by name.
        tables: Page tables, ``[rows, columns]`` int64, by name of a module of the group.
        groups: Name of that module by layer and kind.
        states: Compressor state by layer and kind, ``"compressed"`` or ``"index"``.
    """

    config: ModelConfig
    size: EngineSize
    layouts: list[PageLayout]
    modules: dict[str, BlockPages]
    tables: dict[str, torch.Tensor]
    groups: dict[tuple[int, str], str]
    states: dict[tuple[int, str], torch.Tensor]
    _bound: dict[str, torch.Tensor] = field(default_factory=dict)
    _paged: PagedCache | None = None

    @classmethod
    def allocate(
        cls, config: ModelConfig, size: EngineSize, formats: Formats, device: torch.device
    ) -> EngineCache:
        """Allocate all that is not in vLLM's blocks: before vLLM measures what memory is left.

        Raises:
            ValueError: if requests may be longer than the model's positions, or what
                ``page_layouts`` raises.
        """
        if size.max_tokens > config.max_position_embeddings:
            raise ValueError(
                f"max_model_len is {size.max_tokens}, expected at most "
                f"{config.max_position_embeddings} (max_position_embeddings)"
            )
        layouts = page_layouts(config, formats)
        groups = _groups(layouts)
        tables = {
            layout.name: _table(size, layout.block_tokens, device)
            for layout in layouts
            if layout.name in groups.values()
        }
        keys = [layout.key for layout in layouts if layout.kind != WINDOW]
        states = {key: _state(config, size, *key, device) for key in keys}
        cache = cls(config, size, layouts, {}, tables, groups, states)
        specs = {layout.name: layout.spec(config.sliding_window) for layout in layouts}
        specs[_ROWS_NAME] = RowSpec.of(size.max_requests, size.max_tokens)
        for name, spec in specs.items():
            cache.modules[name] = BlockPages(spec, partial(cache._bind, name))
        return cache

    @property
    def nbytes(self) -> int:
        """Bytes that are not in vLLM's blocks."""
        return sum(tensor.nbytes for tensor in (*self.tables.values(), *self.states.values()))

    @property
    def paged(self) -> PagedCache:
        """The cache over vLLM's pages.

        Raises:
            RuntimeError: if vLLM has not bound its memory.
        """
        if self._paged is None:
            raise RuntimeError("vLLM ran a step with metadata before it bound its KV cache")
        return self._paged

    def _bind(self, name: str, blocks: torch.Tensor) -> None:
        """Take vLLM's memory of one module; with the last one the cache is made.

        Made here and not in the first step, which may be under capture: tables are checked, which
        reads them. vLLM binds memory again after it has profiled graphs with little of it.
        """
        self._bound[name] = blocks
        if len(self._bound) < len(self.modules):
            return
        pages = {layout.key: layout.of_blocks(self._bound[layout.name]) for layout in self.layouts}
        self._bound.clear()
        layers = [self._layer(index, pages) for index in range(self.config.num_hidden_layers)]
        self._paged = PagedCache.of_layers(
            self.config, layers, max_tokens=self.size.max_tokens, max_chunk=self.size.max_chunk
        )

    def _layer(self, index: int, pages: Mapping[tuple[int, str], Pages]) -> LayerCache:
        ratio = self.config.compress_rate(index)
        window, table = pages[index, WINDOW], self.tables[self.groups[index, WINDOW]]
        if not ratio:
            return LayerCache(window, table, self.config.sliding_window)
        return LayerCache(
            window,
            table,
            self.config.sliding_window,
            ratio=ratio,
            compressed=pages[index, COMPRESSED],
            compressed_table=self.tables[self.groups[index, COMPRESSED]],
            state=self.states[index, COMPRESSED],
            indexer_pages=pages.get((index, INDEX)),
            indexer_state=self.states.get((index, INDEX)),
        )

    def begin(self, steps: Mapping[str, GroupStep], tokens: int) -> Batch:
        """Fill the page tables of the rows of a step, and say which tokens are whose.

        Args:
            steps: Metadata by name of the module.
            tokens: Tokens of the step, with those that pad it.
        """
        batch = _batch(steps[_ROWS_NAME], self.size.rows, tokens)
        rows = batch.sequences.clamp(min=0)  # lines that pad the batch go to row 0
        for name, table in self.tables.items():
            _fill(table, rows, steps[name])
        return batch


def _groups(layouts: list[PageLayout]) -> dict[tuple[int, str], str]:
    """The first module of the group of each page, by layer and kind."""
    windows = window_groups({layout.name: layout.block_bytes for layout in layouts})
    first = {name: names[0] for names in windows for name in names}
    entries = [layout.name for layout in layouts if layout.kind != WINDOW]
    first.update(dict.fromkeys(entries, entries[0] if entries else ""))
    return {layout.key: first[layout.name] for layout in layouts}


def _table(size: EngineSize, block_tokens: int, device: torch.device) -> torch.Tensor:
    columns = -(-size.max_tokens // block_tokens)
    return torch.zeros(size.rows, columns, dtype=torch.int64, device=device)


def _state(
    config: ModelConfig, size: EngineSize, layer: int, kind: str, device: torch.device
) -> torch.Tensor:
    dim = config.index_head_dim if kind == INDEX else config.head_dim
    overlap = config.layer_type(layer) == CSA
    shape = state_shape(size.rows, config.compress_rate(layer), overlap, dim, ROLLBACK)
    state = torch.zeros(shape, dtype=torch.float32, device=device)
    state[:, :, 1] = -torch.inf
    return state


def _fill(table: torch.Tensor, rows: torch.Tensor, step: GroupStep) -> None:
    """Copy the block table of a step into rows of a page table."""
    columns = table.shape[1]
    blocks = step.block_table
    if blocks.shape[1] < columns:
        raise ValueError(
            f"vLLM's block table has {blocks.shape[1]} columns, expected at least {columns}"
        )
    table.index_copy_(0, rows, blocks[:, :columns].to(table.dtype))


def _batch(step: GroupStep, rows: int, tokens: int) -> Batch:
    """Say which tokens are whose.

    A request without new tokens pads the batch, and so does one whose row is 0 or past the last:
    vLLM's warm-up makes up block numbers. Its tokens, and those past the last request's, belong to
    nobody: their slots are -1.
    """
    cu_seqlens = step.query_start_loc.to(torch.int64)
    lengths = cu_seqlens.diff()
    starts = step.seq_lens.to(torch.int64) - lengths
    row = step.block_table[:, 0].to(torch.int64)
    sequences = torch.where((lengths > 0) & (row >= FIRST_ROW) & (row < rows), row, -1)
    index = torch.arange(tokens, device=cu_seqlens.device)
    entry = torch.searchsorted(cu_seqlens[1:], index, right=True)
    last = entry.clamp(max=sequences.shape[0] - 1)
    owner = torch.where(entry < sequences.shape[0], sequences[last], -1)
    positions = torch.where(owner >= 0, starts[last] + index - cu_seqlens[last], 0)
    return Batch(cu_seqlens, starts, sequences, positions, owner)
