"""Values that the attention layers of one forward share: tables, rows, counts and slots.

All of it is computed on the device from vLLM's metadata, whose padding has slot -1; numbers of
tokens and the longest context are vLLM's own host numbers, read where vLLM reads them, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from dsv4.ops.slots import entry_slots, prefix_slots, window_slots

_SHARED = "dsv4_attention"


def capturing() -> bool:
    """Return whether the current stream is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def shared(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return the value that ``make`` returned for ``key`` in this forward.

    A graph that is being captured shares nothing with what runs eagerly between its pieces: there
    the tensors are made again when it is replayed.
    """
    made = get_forward_context().additional_kwargs.setdefault(_SHARED, {})
    key = (capturing(), *key)
    if key not in made:
        made[key] = make()
    return made[key]


def tables(cos_sin_cache: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """cos and sin ``[T, R/2]`` of tokens, from vLLM's table ``[max, R]``.

    Has to be called first where no side stream runs.
    """

    def make() -> tuple[torch.Tensor, ...]:
        cos, sin = cos_sin_cache[positions].chunk(2, dim=-1)
        return cos.contiguous(), sin.contiguous()

    return shared(("tables", cos_sin_cache.data_ptr(), *_identity(positions)), make)


def _identity(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.shape[0]


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a step that attend: those of vLLM's decode part, then its prefill part.

    Attributes:
        metadata: vLLM's ``DeepseekSparseSWAMetadata``.
        positions: ``[T]`` int64, with padding behind the ``count`` tokens.
        window: Raw entries that a token sees at most.
    """

    metadata: Any
    positions: torch.Tensor
    window: int

    @property
    def count(self) -> int:
        """Tokens of both parts."""
        return self.metadata.num_decode_tokens + self.metadata.num_prefill_tokens

    def _shared(self, *key: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return shared((*key, id(self.metadata), *_identity(self.positions)), make)

    @property
    def sequences(self) -> torch.Tensor:
        """Row of the block tables of each token, ``[count]``; -1 for padding."""

        def make() -> torch.Tensor:
            rows, valid = self.metadata.token_to_req_indices, self.metadata.is_valid_token
            padding = self.metadata.slot_mapping < 0 if valid is None else ~valid
            return rows[: self.count].masked_fill(padding[: self.count], -1)

        return self._shared("sequences", make=make)

    def visible(self, ratio: int) -> torch.Tensor:
        """Compressed entries that each token sees, ``[count]`` int64; 0 for padding."""

        def make() -> torch.Tensor:
            entries = (self.positions[: self.count] + 1).div(ratio, rounding_mode="floor")
            return entries.masked_fill(self.sequences < 0, 0)

        return self._shared("visible", ratio, make=make)

    @property
    def window_slots(self) -> torch.Tensor:
        """Slots of the raw entries that each token sees, ``[count, width]`` int64, -1: none.

        If vLLM's builder has computed them, in a part for decode and one for prefill, those.
        """

        def make() -> torch.Tensor:
            metadata, parts = self.metadata, []
            if metadata.decode_swa_indices is not None and metadata.num_decode_tokens:
                parts.append(metadata.decode_swa_indices)
            if metadata.prefill_swa_indices is not None and metadata.num_prefill_tokens:
                parts.append(metadata.prefill_swa_indices)
            parts = [part.reshape(part.shape[0], -1).to(torch.int64) for part in parts]
            if parts:
                return parts[0] if len(parts) == 1 else _joined(parts)
            positions = self.positions[: self.count]
            table, size = metadata.block_table, metadata.block_size
            return window_slots(table, size, self.sequences, positions, self.window)

        return self._shared("window", make=make)

    def prefix_slots(
        self, block_table: torch.Tensor, page_size: int, ratio: int, longest: int
    ) -> torch.Tensor:
        """Slots of all compressed entries that each token sees, ``[count, entries]`` int64."""
        table = columns_used(block_table, page_size * ratio, longest)
        key = "prefix", ratio, page_size, block_table.data_ptr()
        return self._shared(
            *key,
            make=lambda: prefix_slots(table, page_size, self.sequences, self.visible(ratio)),
        )

    def store_slots(self, block_table: torch.Tensor, page_size: int, ratio: int) -> None:
        """Compute the result of ``stored_slots``; call it first, before side streams fork."""
        shared(
            _stored_key(block_table, page_size, ratio),
            lambda: entry_slots(block_table, page_size, self.sequences, self.visible(ratio) - 1),
        )


def stored_slots(block_table: torch.Tensor, page_size: int, ratio: int) -> torch.Tensor:
    """Return the slot of the last entry that each token sees, ``[count]`` int64; -1: no such entry.

    If an entry closes with the token, it is that entry.

    Raises:
        RuntimeError: if ``Tokens.store_slots`` was not called with these arguments in this forward.
    """

    def missing() -> torch.Tensor:
        raise RuntimeError(f"slots of entries at ratio {ratio} were not made in this forward")

    return shared(_stored_key(block_table, page_size, ratio), missing)  # type: ignore[no-any-return]


def _stored_key(block_table: torch.Tensor, page_size: int, ratio: int) -> tuple[Any, ...]:
    return "stored", ratio, page_size, block_table.data_ptr()


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Rows of unequal width below each other, the narrow ones padded with -1."""
    width = max(part.shape[1] for part in parts)
    padded = [torch.nn.functional.pad(p, (0, width - p.shape[1]), value=-1) for p in parts]
    return torch.cat(padded)


def columns_used(block_table: torch.Tensor, block_tokens: int, longest: int) -> torch.Tensor:
    """The columns of a block table that contexts of up to ``longest`` tokens have.

    A power of two of them, so that few shapes occur; all of them in a captured graph, which is
    replayed with longer contexts.
    """
    if capturing():
        return block_table
    blocks = max(1, -(-longest // block_tokens))
    return block_table[:, : 1 << (blocks - 1).bit_length()]
