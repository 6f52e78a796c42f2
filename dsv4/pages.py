"""Pages of cache entries: the byte layout that every implementation shares.

A slot is a global entry number, ``page * page_size + entry``; -1 stands for no entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ENTRY_FORMATS = ("fp8", "plain")
GROUP = 64  # NoPE dims that share one E8M0 scale


@dataclass(frozen=True)
class EntryLayout:
    """Where the bytes of an ``"fp8"`` entry lie (specification section 7, for any dimensions).

    A page holds first the data of all its entries, then the scales of all its entries, then
    padding up to a multiple of ``data_bytes``.

    Attributes:
        head_dim: Dims per entry.
        rope_dim: How many of them, at the end, carry the rotary embedding.
    """

    head_dim: int
    rope_dim: int

    @property
    def nope_dim(self) -> int:
        """Dims stored as one E4M3 byte each."""
        return self.head_dim - self.rope_dim

    @property
    def data_bytes(self) -> int:
        """Bytes of one entry's data: E4M3 NoPE dims, then bfloat16 RoPE dims (576 for 448 + 64)."""
        return self.nope_dim + 2 * self.rope_dim

    @property
    def groups(self) -> int:
        """Scales per entry; the last group may be short."""
        return -(-self.nope_dim // GROUP)

    @property
    def scale_bytes(self) -> int:
        """Bytes of one entry's scales, padded with zeros to a multiple of 8 (7 scales: 8)."""
        return -(-self.groups // 8) * 8

    def data_offset(self, entry: int) -> int:
        """Byte of the page at which the data of ``entry`` begins."""
        return entry * self.data_bytes

    def scale_offset(self, entry: int, page_size: int) -> int:
        """Byte of the page at which the scales of ``entry`` begin: after all data of the page."""
        return page_size * self.data_bytes + entry * self.scale_bytes

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page, padded to a multiple of ``data_bytes`` (64 entries: 37440)."""
        used = page_size * (self.data_bytes + self.scale_bytes)
        return -(-used // self.data_bytes) * self.data_bytes


@dataclass(frozen=True, eq=False)
class Pages:
    """A pool of pages.

    Attributes:
        data: ``"fp8"``: uint8 ``[P, page_bytes]``, see ``EntryLayout``; ``"plain"``: float
            ``[P, page_size, head_dim]``.
        page_size: Entries per page.
        entry_format: ``"fp8"`` or ``"plain"``.
        head_dim: Dims per entry.
        rope_dim: How many of them, at the end, stay bfloat16 in the ``"fp8"`` format.
    """

    data: torch.Tensor
    page_size: int
    entry_format: str
    head_dim: int
    rope_dim: int

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        page_size: int,
        head_dim: int,
        rope_dim: int,
        entry_format: str = "fp8",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> Pages:
        """Zeroed pages.

        Args:
            num_pages: P.
            page_size: Entries per page.
            head_dim: Dims per entry.
            rope_dim: Trailing dims that carry the rotary embedding, ``0 <= rope_dim <= head_dim``.
            entry_format: ``"fp8"`` or ``"plain"``.
            dtype: Of ``"plain"`` entries; ``"fp8"`` pages are bytes whatever it is.
            device: Where.

        Raises:
            ValueError: if a size or the format is none of these.
        """
        _check_sizes(num_pages, page_size, head_dim, rope_dim, entry_format)
        if entry_format == "plain":
            data = torch.zeros(num_pages, page_size, head_dim, dtype=dtype, device=device)
        else:
            page_bytes = EntryLayout(head_dim, rope_dim).page_bytes(page_size)
            data = torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=device)
        return cls(data, page_size, entry_format, head_dim, rope_dim)

    @property
    def layout(self) -> EntryLayout:
        """Byte layout of an ``"fp8"`` entry of these dimensions."""
        return EntryLayout(self.head_dim, self.rope_dim)

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self.data.shape[0]

    @property
    def num_slots(self) -> int:
        """Entries in the pool: valid slots are ``0 .. num_slots - 1``."""
        return self.data.shape[0] * self.page_size

    def page_bytes(self) -> int:
        """Bytes of one page."""
        if self.entry_format == "plain":
            return self.page_size * self.head_dim * self.data.element_size()
        return self.layout.page_bytes(self.page_size)


def _check_sizes(
    num_pages: int, page_size: int, head_dim: int, rope_dim: int, entry_format: str
) -> None:
    if entry_format not in ENTRY_FORMATS:
        raise ValueError(f"Pages: entry_format is {entry_format!r}, wanted 'fp8' or 'plain'")
    if num_pages < 0 or page_size < 1:
        raise ValueError(
            f"Pages: num_pages is {num_pages} and page_size {page_size}, wanted >= 0 and >= 1"
        )
    if head_dim < 1 or not 0 <= rope_dim <= head_dim:
        raise ValueError(
            f"Pages: head_dim is {head_dim} and rope_dim {rope_dim}, "
            "wanted 0 <= rope_dim <= head_dim"
        )
