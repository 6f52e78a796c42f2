"""Pages of cache entries: the byte layout that every implementation shares.

A slot is a global entry number, ``page * page_size + entry``; -1 stands for no entry.

| format | entry | bytes of an entry |
|---|---|---|
| ``"plain"`` | a row of floats | by its dtype |
| ``"fp8"`` | KV: E4M3, bfloat16, E8M0 scales (``EntryLayout``) | 584 of 448 + 64 dims |
| ``"index_fp8"`` | index key: E4M3, one float32 scale (``IndexLayout``) | 132 of 128 dims |
| ``"index_mxfp4"`` | index key: E2M1 pairs, E8M0 scales (``IndexLayout``) | 68 of 128 dims |
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

ENTRY_FORMATS = ("fp8", "plain")  # of KV entries
COMPACT_FORMATS = ("index_fp8", "index_mxfp4")  # of index keys, which may be "plain" as well
PAGE_FORMATS = (*ENTRY_FORMATS, *COMPACT_FORMATS)
GROUP = 64  # NoPE dims that share one E8M0 scale
FP4_GROUP = 32  # dims of an index key that share one E8M0 scale
# Numbers that the dims of an entry are a multiple of, where not 1: whole scales, aligned.
DIMS_MULTIPLES = {"index_fp8": 4, "index_mxfp4": FP4_GROUP}


@dataclass(frozen=True)
class EntryLayout:
    """The layout of an ``"fp8"`` entry in bytes (specification, section 7, for any dimensions).

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
        return self.head_dim + self.rope_dim

    @property
    def groups(self) -> int:
        """Scales per entry; the last group may be short."""
        return -(-(self.head_dim - self.rope_dim) // GROUP)

    @property
    def scale_bytes(self) -> int:
        """Bytes of one entry's scales, padded with zeros to a multiple of 8 (7 scales: 8)."""
        return -(-self.groups // 8) * 8

    def data_offset(self, entry: int) -> int:
        """Return the byte of the page at which the data of ``entry`` begins."""
        return entry * self.data_bytes

    def scale_offset(self, entry: int, page_size: int) -> int:
        """Return the byte of the page at which the scales of ``entry`` begin, after all data."""
        return page_size * self.data_bytes + entry * self.scale_bytes

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page, padded to a multiple of ``data_bytes`` (64 entries: 37440)."""
        data_bytes = self.data_bytes
        used = page_size * (data_bytes + self.scale_bytes)
        return -(-used // data_bytes) * data_bytes


@dataclass(frozen=True)
class IndexLayout:
    """The layout of a compact index key in bytes (specification, section 6).

    A page holds first the codes of all its entries, then the scales of all its entries.

    Attributes:
        head_dim: Dims per entry, a multiple of 4 (``"index_fp8"``) or 32 (``"index_mxfp4"``).
        entry_format: ``"index_fp8"``: a byte of E4M3 for each dim, and a float32 power of two;
            ``"index_mxfp4"``: a nibble of E2M1 for each dim, even dims low, and an E8M0 byte for
            each 32 dims.
    """

    head_dim: int
    entry_format: str

    @property
    def data_bytes(self) -> int:
        """Bytes of one entry's codes."""
        return self.head_dim if self.entry_format == "index_fp8" else self.head_dim // 2

    @property
    def scale_bytes(self) -> int:
        """Bytes of one entry's scales."""
        return 4 if self.entry_format == "index_fp8" else self.head_dim // FP4_GROUP

    def data_offset(self, entry: int) -> int:
        """Return the byte of the page at which the codes of ``entry`` begin."""
        return entry * self.data_bytes

    def scale_offset(self, entry: int, page_size: int) -> int:
        """Return the byte of the page at which the scales of ``entry`` begin, after all codes."""
        return page_size * self.data_bytes + entry * self.scale_bytes

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page (64 entries of 128 dims: 8448 or 4352)."""
        return page_size * (self.data_bytes + self.scale_bytes)


@dataclass(frozen=True, eq=False)
class Pages:
    """A pool of pages.

    Attributes:
        data: ``"plain"``: float ``[P, page_size, head_dim]``; else uint8 ``[P, page_bytes]``, see
            ``EntryLayout`` and ``IndexLayout``.
        page_size: Entries per page.
        entry_format: ``"fp8"``, ``"plain"``, ``"index_fp8"`` or ``"index_mxfp4"``.
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
        """Allocate pages of zeros.

        Args:
            num_pages: P.
            page_size: Entries per page.
            head_dim: Dims per entry.
            rope_dim: Trailing dims that carry the rotary embedding, ``0 <= rope_dim <= head_dim``.
            entry_format: ``"fp8"``, ``"plain"``, ``"index_fp8"`` or ``"index_mxfp4"``.
            dtype: Dtype of ``"plain"`` entries; pages of other formats are bytes whatever it is.
            device: Device of the pages.

        Raises:
            ValueError: if a size or the format is none of these.
        """
        _check_sizes(num_pages, page_size, head_dim, rope_dim, entry_format)
        if entry_format == "plain":
            data = torch.zeros(num_pages, page_size, head_dim, dtype=dtype, device=device)
        else:
            page_bytes = bytes_per_page(entry_format, head_dim, rope_dim, page_size)
            data = torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=device)
        return cls(data, page_size, entry_format, head_dim, rope_dim)

    @property
    def layout(self) -> EntryLayout:
        """Byte layout of an ``"fp8"`` entry of these dimensions."""
        return EntryLayout(self.head_dim, self.rope_dim)

    @property
    def index_layout(self) -> IndexLayout:
        """Byte layout of an ``"index_fp8"`` or ``"index_mxfp4"`` entry of these dimensions."""
        return IndexLayout(self.head_dim, self.entry_format)

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
        return bytes_per_page(self.entry_format, self.head_dim, self.rope_dim, self.page_size)


def dims_multiple(entry_format: str) -> int:
    """Return the number that an entry's dims are a multiple of: whole scales, aligned."""
    return DIMS_MULTIPLES.get(entry_format, 1)


def entry_layout(entry_format: str, head_dim: int, rope_dim: int) -> EntryLayout | IndexLayout:
    """Byte layout of entries of any format but ``"plain"``."""
    if entry_format == "fp8":
        return EntryLayout(head_dim, rope_dim)
    return IndexLayout(head_dim, entry_format)


@functools.cache
def bytes_per_page(entry_format: str, head_dim: int, rope_dim: int, page_size: int) -> int:
    """Bytes of a page of any format but ``"plain"``; every operator on pages asks for them."""
    return entry_layout(entry_format, head_dim, rope_dim).page_bytes(page_size)


def _check_sizes(
    num_pages: int, page_size: int, head_dim: int, rope_dim: int, entry_format: str
) -> None:
    if entry_format not in PAGE_FORMATS:
        words = ", ".join(map(repr, PAGE_FORMATS))
        raise ValueError(f"Pages: entry_format is {entry_format!r}, wanted one of {words}")
    if num_pages < 0 or page_size < 1:
        raise ValueError(
            f"Pages: num_pages is {num_pages} and page_size {page_size}, wanted >= 0 and >= 1"
        )
    if head_dim < 1 or not 0 <= rope_dim <= head_dim:
        raise ValueError(
            f"Pages: head_dim is {head_dim} and rope_dim {rope_dim}, "
            "wanted 0 <= rope_dim <= head_dim"
        )
    if head_dim % dims_multiple(entry_format):
        raise ValueError(
            f"Pages: head_dim is {head_dim}, wanted a multiple of {dims_multiple(entry_format)} "
            f"for {entry_format!r}"
        )
