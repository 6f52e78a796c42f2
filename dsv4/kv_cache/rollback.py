"""Tokens of a paged cache that are taken back: on the host, or by the device within a graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsv4.kv_cache.batch import Batch
from dsv4.kv_cache.cache_checks import CacheChecks
from dsv4.kv_cache.page_tables import to_device
from dsv4.kv_cache.row_counts import RowCount


class Rollback(CacheChecks):
    """The lengths of a cache's sequences, which also go back."""

    _tops: torch.Tensor  # most tokens of steps of which some were not accepted

    def advance(self, batch: Batch, accepted: torch.Tensor | None = None) -> None:
        """Set ``lengths`` of the batch's sequences to what they are after it.

        Entries with a negative sequence or without tokens are ignored.

        Args:
            batch: The step's batch.
            accepted: ``[B]`` int, on the device: how many new tokens of each entry are kept,
                within the limits of ``prepare``; None: all. The others are taken back, within a
                captured graph and without waiting.
        """
        if self._within is not None and self._records:
            self._records[-1].batch = batch
        new = batch.cu_seqlens.diff()
        if accepted is None:
            self._set_lengths(batch, new, batch.starts + new)
            return
        row = batch.sequences.clamp(min=0)
        written = torch.where((batch.sequences >= 0) & (new > 0), batch.starts + new, 0)
        self._tops.scatter_reduce_(0, row, written, "amax")
        self._set_lengths(batch, new, batch.starts + accepted)

    def roll_back(self, sequences: Sequence[int], lengths: Sequence[int]) -> None:
        """Take back the last tokens of sequences, as if they had never been there.

        Every later result has the same bits. Up to ``rollback`` tokens can be taken back, counted
        from the most that the sequence ever had; with pools those of the latest step, and of a step
        with ``certain``, alone, because earlier window pages may be given back. Nothing is copied.
        Pages stay reserved. With pools the host does not wait; without, it reads ``lengths``.

        Args:
            sequences: Rows of the cache, distinct.
            lengths: Tokens that each is to have.

        Raises:
            ValueError: if a row is not allocated or has open steps, or a length is larger than the
                row's or too small; nothing is changed.
        """
        self._outside("roll_back")
        self._check_lengths("roll_back", sequences, lengths)
        counts = [self._counts[row] for row in sequences]
        if not self.pooled:
            held, tops = torch.stack((self.lengths, self._tops)).tolist()
            counts = [
                RowCount(held[row], held[row], max(self._counts[row].written, held[row], tops[row]))
                for row in sequences
            ]
        for row, length, count in zip(sequences, lengths, counts, strict=True):
            self._check_rollback(row, length, count)
        if not sequences:
            return
        self._records.clear()
        rows, there = to_device([sequences, lengths], self.lengths.device).unbind(0)
        self.lengths.index_copy_(0, rows, there)
        for row, length, count in zip(sequences, lengths, counts, strict=True):
            self._counts[row] = count.at(length)

    def confirm(self, sequences: Sequence[int], lengths: Sequence[int]) -> None:
        """Tell the host how many tokens sequences had after their oldest open step.

        Call it for every step that was prepared with ``certain`` fewer than its tokens, in their
        order, when the device's numbers have arrived; steps after it may be under way. The device
        is not told: ``advance`` set its ``lengths``.

        Args:
            sequences: Rows of the cache, distinct.
            lengths: Tokens of each after that step.

        Raises:
            ValueError: if a row is not allocated or has no open step, or a length is not one that
                the step allows; nothing is changed.
        """
        self._outside("confirm")
        self._check_lengths("confirm", sequences, lengths)
        for row, length in zip(sequences, lengths, strict=True):
            if not self._counts[row].open:
                raise ValueError(f"PagedCache.confirm: sequence {row} has no open step")
            low, high = self._counts[row].oldest()
            if not low <= length <= high:
                raise ValueError(
                    f"PagedCache.confirm: sequence {row} has {length} tokens, wanted {low} to "
                    f"{high}: what its oldest open step was prepared for"
                )
        self._records.clear()
        for row, length in zip(sequences, lengths, strict=True):
            self._counts[row] = self._counts[row].confirmed(length)
            self._grown.add(row)

    def truncate(self, sequence: int, length: int) -> bool:
        """Give a sequence exactly ``length`` tokens, though steps of it may be under way.

        The lengths that these steps set are replaced, in stream order and without waiting, so they
        need no confirmation. For caches with pools, whose host knows what steps certainly keep.

        Returns:
            Whether the sequence had as many tokens, and the others can be taken back (see
            ``roll_back``); if not, nothing is changed.

        Raises:
            RuntimeError: if the cache has no pools.
            ValueError: if the row is not allocated.
        """
        self._outside("truncate")
        self._check_allocated("truncate", sequence)
        if not self.pooled:
            raise RuntimeError("PagedCache.truncate: the cache has no pools, wanted pool_tokens")
        count = self._counts[sequence]
        if not count.reach(self.rollback) <= length <= count.low:
            return False
        self._records.clear()
        row, there = to_device([[sequence], [length]], self.lengths.device).unbind(0)
        self.lengths.index_copy_(0, row, there)
        self._counts[sequence] = count.at(length)
        return True

    def _check_lengths(self, what: str, sequences: Sequence[int], lengths: Sequence[int]) -> None:
        if len(sequences) != len(lengths):
            raise ValueError(
                f"PagedCache.{what}: {len(sequences)} sequences and {len(lengths)} lengths, "
                "wanted as many"
            )
        for sequence in sequences:
            self._check_allocated(what, sequence)
        if len(set(sequences)) < len(sequences):
            raise ValueError(
                f"PagedCache.{what}: sequences are {list(sequences)}, wanted distinct ones"
            )

    def _check_rollback(self, sequence: int, length: int, count: RowCount) -> None:
        if count.open:
            raise ValueError(
                f"PagedCache.roll_back: sequence {sequence} has steps of which the host does not "
                "know how many tokens were kept; confirm them first"
            )
        least = count.reach(self.rollback)
        if least <= length <= count.high:
            return
        reason = f"it has {count.high} tokens"
        if length < least:
            reason += (
                f" and had {count.written}, of which rollback ({self.rollback}) can be taken back"
            )
        if length < count.floor:
            reason += "; prepare gave window pages back or to later tokens before the last step"
        raise ValueError(
            f"PagedCache.roll_back: sequence {sequence} to {length} tokens, wanted {least} to "
            f"{count.high}: {reason}"
        )
