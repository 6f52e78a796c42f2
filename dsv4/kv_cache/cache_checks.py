"""Checks of a paged cache's sizes, of the rows and tokens of its steps, and of the model's fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dsv4.config import ModelConfig
from dsv4.kv_cache.atomic_steps import AtomicSteps
from dsv4.kv_cache.layer_cache import CacheSize, check_layers
from dsv4.kv_cache.page_tables import CacheFullError, PageTable


class CacheChecks(AtomicSteps):
    """Checks of a cache, whose errors name the argument and the expected value."""

    size: CacheSize
    _live: list[bool]
    _brought: bool
    _fits: tuple[ModelConfig, torch.dtype] | None  # the latest model that fits

    @property
    def max_sequences(self) -> int:
        """The number of sequences that live at one time."""
        return self.size.sequences

    @property
    def max_tokens(self) -> int:
        """The tokens of the longest sequence."""
        return self.size.max_tokens

    @property
    def max_chunk(self) -> int:
        """The most new tokens of one sequence in one step."""
        return self.size.max_chunk

    @property
    def rollback(self) -> int:
        """The tokens of a sequence that can be taken back."""
        return self.size.rollback

    @property
    def pooled(self) -> bool:
        """Whether sequences share pools, so that ``prepare`` comes before every step."""
        return bool(self._tables)

    def _check_pages(self, what: str, table: PageTable, need: int, free: int) -> None:
        if need > free:
            window = table is self._tables.get(0)
            raise CacheFullError(
                f"PagedCache.{what}: needs {need} {table.pool.name} pages, and {free} of "
                f"{table.pool.size} are free; free a sequence, "
                f"{'give a step fewer tokens, ' if window else ''}or make the cache with a larger "
                f"{'window_pages' if window else 'pool_tokens'}"
            )

    def _check_owner(self, what: str) -> None:
        if self._brought:
            raise RuntimeError(
                f"PagedCache.{what}: the pages were brought; who brought them gives them out"
            )

    def _check_allocated(self, what: str, sequence: int) -> None:
        self._check_owner(what)
        if not 0 <= sequence < self.max_sequences or not self._live[sequence]:
            raise ValueError(
                f"PagedCache.{what}: sequence is {sequence}, wanted one that is allocated"
            )

    def check_rows(self, what: str, sequences: Sequence[int]) -> None:
        """Raise unless rows are distinct and, but for -1, in use.

        Raises:
            ValueError: naming the row.
        """
        rows = [row for row in sequences if row != -1]
        if len(set(rows)) < len(rows):
            raise ValueError(f"PagedCache.{what}: sequences are {rows}, wanted distinct ones")
        for i, row in enumerate(sequences):
            if row == -1:
                continue
            if self._brought and not 0 <= row < self.max_sequences:
                raise ValueError(
                    f"PagedCache.{what}: sequences[{i}] is {row}, wanted -1 to "
                    f"{self.max_sequences - 1}"
                )
            if not self._brought:
                self._check_allocated(what, row)

    def _check_step(
        self, sequences: Sequence[int], lengths: Sequence[int], starts: Sequence[int]
    ) -> None:
        if not len(sequences) == len(lengths) == len(starts):
            raise ValueError(
                f"PagedCache.prepare: {len(sequences)} sequences, {len(lengths)} lengths and "
                f"{len(starts)} starts, wanted as many of each"
            )
        self.check_rows("prepare", sequences)
        for i, (row, new, start) in enumerate(zip(sequences, lengths, starts, strict=True)):
            if new < 0:
                raise ValueError(f"PagedCache.prepare: lengths[{i}] is {new}, wanted >= 0")
            if row == -1:
                continue
            count = self._counts[row]
            held = 0 if self._brought and start == 0 else count.high
            # Without pools ``prepare`` need not have been called. Who brings pages says where
            # sequences go back, and starts say how many tokens open steps have kept.
            least = count.reach(self.rollback) if self._brought and start else held
            least = count.low if count.open else least
            most = held if self.pooled else start
            if not least <= start <= most:
                raise ValueError(
                    f"PagedCache.prepare: starts[{i}] is {start}, wanted {held}: the tokens that "
                    f"sequence {row} was prepared for, and positions neither go back nor skip any: "
                    "roll_back takes tokens back"
                )

    def check(
        self, lengths: Sequence[int], starts: Sequence[int], certain: Sequence[int] | None = None
    ) -> None:
        """Raise unless the cache can take a batch whose numbers the host knows.

        Args:
            lengths: New tokens of each sequence.
            starts: Tokens each has already.
            certain: How many new tokens of each are certainly kept; None: all.

        Raises:
            ValueError: naming the sequence that has too many tokens, in the chunk or in all.
        """
        for i, (new, start) in enumerate(zip(lengths, starts, strict=True)):
            if new > self.max_chunk:
                raise ValueError(
                    f"PagedCache: entry {i} of the batch has {new} new tokens, wanted at most "
                    f"max_chunk ({self.max_chunk})"
                )
            least = new if certain is None else certain[i]
            if start < 0 or start + least > self.max_tokens:
                raise ValueError(
                    f"PagedCache: entry {i} of the batch would reach {start} + {least} tokens, "
                    f"wanted at most max_tokens ({self.max_tokens})"
                )

    def _check_certain(
        self, sequences: Sequence[int], lengths: Sequence[int], certain: Sequence[int]
    ) -> None:
        if len(certain) != len(lengths):
            raise ValueError(
                f"PagedCache.prepare: {len(lengths)} lengths and {len(certain)} certain, wanted as "
                "many"
            )
        for i, (row, new, least) in enumerate(zip(sequences, lengths, certain, strict=True)):
            if not 0 <= least <= new or (row >= 0 and new - least > self.rollback):
                raise ValueError(
                    f"PagedCache.prepare: certain[{i}] is {least}, wanted "
                    f"{max(0, new - self.rollback)} to {new}: {new} new tokens, of which rollback "
                    f"({self.rollback}) can be taken back"
                )

    def check_tables(self) -> None:
        """Raise if a page table points outside its pool: for brought tables that were changed.

        Reads the tables back from the device, so use it for debugging, not for each step.

        Raises:
            ValueError: naming the layer, the table and the page.
        """
        check_layers(self.config, self.layers, self.size)

    def check_model(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """Raise unless a model of this configuration and dtype can use the cache.

        Raises:
            TypeError: if plain pages or the compressor state are of another dtype.
            ValueError: if the cache was made for other layers, dims or numerics.
        """
        if self._fits is not None and self._fits[0] is config and self._fits[1] == dtype:
            return
        if config is not self.config:
            for name, own, expected in _shaping(self.config, config):
                if own != expected:
                    raise ValueError(
                        f"PagedCache: made for {name} {own}, wanted {expected} as the model has"
                    )
        for i, layer in enumerate(self.layers):
            data = layer.window.data
            if layer.window.entry_format == "plain" and data.dtype != dtype:
                raise TypeError(
                    f"PagedCache: plain pages of layer {i} have dtype {_name(data.dtype)}, wanted "
                    f"{_name(dtype)} as the model's hidden states"
                )
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            if layer.state is not None and layer.state.dtype != wide:
                raise TypeError(
                    f"PagedCache: state of layer {i} has dtype {_name(layer.state.dtype)}, wanted "
                    f"{_name(wide)} for hidden states of {_name(dtype)}"
                )
        self._fits = config, dtype


def checked_size(
    max_sequences: int,
    max_tokens: int,
    max_chunk: int | None,
    pool_tokens: int | None,
    window_pages: int | None,
    rollback: int,
) -> CacheSize:
    """Check the sizes of a cache and return them."""
    max_chunk = max_tokens if max_chunk is None else max_chunk
    for name, value in (
        ("max_sequences", max_sequences),
        ("max_tokens", max_tokens),
        ("max_chunk", max_chunk),
        ("pool_tokens", pool_tokens),
        ("window_pages", window_pages),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"PagedCache: {name} is {value!r}, wanted an int")
        if value is not None and value < 1:
            raise ValueError(f"PagedCache: {name} is {value}, wanted >= 1")
    if isinstance(rollback, bool) or not isinstance(rollback, int):
        raise TypeError(f"PagedCache: rollback is {rollback!r}, wanted an int")
    if rollback < 0:
        raise ValueError(f"PagedCache: rollback is {rollback}, wanted >= 0")
    if window_pages is not None and pool_tokens is None:
        raise ValueError(
            f"PagedCache: window_pages is {window_pages} and pool_tokens None, wanted both: pools "
            "are of window pages and compressed pages alike"
        )
    return CacheSize(
        max_sequences,
        max_tokens,
        min(max_chunk, max_tokens),
        pool_tokens,
        window_pages,
        rollback,
    )


def _shaping(*configs: ModelConfig) -> list[tuple[Any, ...]]:
    """Return, by name and for each configuration, what gives a cache its shape and its content."""
    dims = ("head_dim", "qk_rope_head_dim", "index_head_dim", "sliding_window")
    names = ("num_hidden_layers", *dims, "numerics")
    rows = [(name, *(getattr(c, name) for c in configs)) for name in names]
    rates = (tuple(c.compress_rate(i) for i in range(c.num_hidden_layers)) for c in configs)
    return [*rows, ("compression rates", *rates)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
