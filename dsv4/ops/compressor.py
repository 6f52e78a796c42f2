"""Compression of each window of tokens to one entry, over whole sequences or in pieces."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch

from dsv4.kv_cache.pages import PAGE_FORMATS, Pages
from dsv4.ops import _check
from dsv4.ops._library import Written, define
from dsv4.ops._plans import planned
from dsv4.ops.kv_cache import expected_pages

_ENTRY_FLOATS = (torch.bfloat16, torch.float32, torch.float64)
_STATE_FLOATS = (torch.float32, torch.float64)


class PoolWindowsArgs(NamedTuple):
    """Arguments of ``pool_windows``: pooling of whole windows.

    Attributes:
        kv: ``[R, W, m, c*d]`` floating; c is 2 with overlap, else 1.
        score: Like ``kv``, ape added.
        previous_kv: ``[R, m, d]``, of the window before the first; None: there is none.
        previous_score: Like ``previous_kv``.
        overlap: Whether windows overlap.
    """

    kv: torch.Tensor
    score: torch.Tensor
    previous_kv: torch.Tensor | None
    previous_score: torch.Tensor | None
    overlap: bool


class CompressorUpdateArgs(NamedTuple):
    """Arguments of ``compressor_update``: pooling of the next tokens of sequences.

    Attributes:
        kv: ``[T, c*d]`` floating; c is 2 with overlap, else 1.
        score: ``[T, c*d]`` floating, without ape.
        ape: ``[m, c*d]`` floating.
        state: ``[S, slots, 2, c*d]`` float32 or float64.
        cu_seqlens: ``[B + 1]`` int.
        starts: ``[B]`` int.
        sequences: ``[B]`` int, rows of the state; negative: padding.
        overlap: Whether windows overlap.
    """

    kv: torch.Tensor
    score: torch.Tensor
    ape: torch.Tensor
    state: Written
    cu_seqlens: torch.Tensor
    starts: torch.Tensor
    sequences: torch.Tensor
    overlap: bool


class CompressWriteArgs(NamedTuple):
    """Arguments of ``compress_write``: compression of the next tokens of sequences into pages.

    Attributes:
        kv: ``[T, c*d]`` floating; c is 2 with overlap, else 1.
        score: ``[T, c*d]`` floating, without ape.
        ape: ``[m, c*d]`` floating.
        state: ``[S, slots, 2, c*d]`` float32 or float64.
        cu_seqlens: ``[B + 1]`` int.
        starts: ``[B]`` int.
        sequences: ``[B]`` int, rows of the state; negative: padding.
        norm_weight: ``[d]`` floating.
        inv_freq: float32 ``[R/2]``.
        data: ``[pages, ...]``, the pages' storage.
        page_size: Entries of a page.
        entry_format: Format of the pages, see ``dsv4.kv_cache.pages``.
        head_dim: D, dims of an entry.
        rope_dim: Trailing dims that ``"fp8"`` entries keep in bfloat16.
        page_table: ``[S, P]`` int: page of the entries ``p * page_size`` and on.
        overlap: Whether windows overlap.
        eps: Epsilon of the norm, added to mean squares.
        rotate_quantize: Whether Hadamard transform and rounding to FP4 follow.
        dtype: Dtype of the entries before they are stored.
        table_dtype: Dtype that cosines and sines are rounded to.
    """

    kv: torch.Tensor
    score: torch.Tensor
    ape: torch.Tensor
    state: Written
    cu_seqlens: torch.Tensor
    starts: torch.Tensor
    sequences: torch.Tensor
    norm_weight: torch.Tensor
    inv_freq: torch.Tensor
    data: Written
    page_size: int
    entry_format: str
    head_dim: int
    rope_dim: int
    page_table: torch.Tensor
    overlap: bool
    eps: float
    rotate_quantize: bool
    dtype: torch.dtype
    table_dtype: torch.dtype


def _pool_fake(args: PoolWindowsArgs) -> torch.Tensor:
    wide = torch.float64 if torch.float64 in (args.kv.dtype, args.score.dtype) else torch.float32
    width = args.kv.shape[3] // 2 if args.overlap else args.kv.shape[3]
    return args.kv.new_empty((args.kv.shape[0], args.kv.shape[1], width), dtype=wide)


def _update_fake(args: CompressorUpdateArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    bound = args.kv.shape[0] // args.ape.shape[0] + args.starts.shape[0]
    width = args.kv.shape[1] // 2 if args.overlap else args.kv.shape[1]
    return (
        args.state.new_empty((bound, width)),
        args.state.new_empty((bound,), dtype=torch.int64),
        args.state.new_empty((bound,), dtype=torch.int64),
    )


def _write_fake(args: CompressWriteArgs) -> None:
    return None


def _check_batch(op: str, args: CompressorUpdateArgs) -> None:
    _entries_with_tokens(op, args, args.state.shape[0])


def _check_batch_and_pages(op: str, args: CompressWriteArgs) -> None:
    data = args.data
    rows = min(args.state.shape[0], args.page_table.shape[0])
    has_tokens = _entries_with_tokens(op, args, rows)
    # Windows that close are entries ``first`` to ``last - 1`` of a sequence.
    first = args.starts // args.ape.shape[0]
    last = (args.starts + args.cu_seqlens.diff()) // args.ape.shape[0]
    writes = has_tokens & (first < last)
    if not bool(writes.any()):
        return
    entry = args.page_size * torch.arange(args.page_table.shape[1], device=args.page_table.device)
    holds = (entry + args.page_size > first.unsqueeze(1)) & (entry < last.unsqueeze(1))
    pages = args.page_table[args.sequences.where(writes, 0)]
    past = writes.unsqueeze(1) & holds & (pages >= data.shape[0])
    if bool(past.any()):
        _check.none_bad(op, "page_table[sequences]", pages, past, f"below {data.shape[0]}")


def _entries_with_tokens(
    op: str, args: CompressorUpdateArgs | CompressWriteArgs, rows: int
) -> torch.Tensor:
    """Check the entries of the batch and return which are not ignored.

    Args:
        op: Name of the operator.
        args: Its arguments.
        rows: What ``sequences`` has to be below.
    """
    starts, sequences = args.starts, args.sequences
    _check.within(op, "cu_seqlens", args.cu_seqlens, args.kv.shape[0] + 1)
    has_tokens = (args.cu_seqlens.diff() > 0) & (sequences >= 0)
    bad = has_tokens & ((sequences >= rows) | (starts < 0))
    if bool(bad.any()):
        _check.none_bad(op, "sequences", sequences, bad & (sequences >= rows), f"below {rows}")
        _check.none_bad(op, "starts", starts, bad & (starts < 0), "from 0 on")
    return has_tokens


_pool_windows = define("pool_windows", PoolWindowsArgs, _pool_fake)
_compressor_update = define("compressor_update", CompressorUpdateArgs, _update_fake, _check_batch)
_compress_write = define("compress_write", CompressWriteArgs, _write_fake, _check_batch_and_pages)


@planned
def pool_windows(
    kv: torch.Tensor,
    score: torch.Tensor,
    previous_kv: torch.Tensor | None = None,
    previous_score: torch.Tensor | None = None,
    *,
    overlap: bool,
    backend: str = "auto",
) -> torch.Tensor:
    """Pool each window of m tokens into one entry (specification, section 5.2).

    Each channel is averaged with a softmax over the scores of that channel. Without overlap the
    slots are the window's m tokens. With overlap there are 2m: the window before, columns
    ``0 .. d-1``, then the window itself, columns ``d .. 2d-1``; for window 0 of a sequence the
    first m are absent. float32, or float64 if an input is.

    Args:
        kv: ``[R, W, m, c*d]``: W consecutive windows of R sequences; c is 2 with overlap, else 1.
        score: ``[R, W, m, c*d]``, ape already added.
        previous_kv: With overlap, ``[R, m, d]``: columns ``0 .. d-1`` of the window before the
            first; None: there is none.
        previous_score: Scores of the same window (-inf: absent).
        overlap: Whether windows overlap.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[R, W, d]`` float32 or float64, before norm, RoPE and quantisation.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if a shape differs, the width is odd with overlap, or only one of
            ``previous_kv`` and ``previous_score`` is given, or either without overlap.
    """
    _check.tensors(
        "pool_windows",
        ("kv", kv, _check.FLOATS, ("R", "W", "m", "c d")),
        ("score", score, _check.FLOATS, ("R", "W", "m", "c d")),
        ("previous_kv", previous_kv, _check.FLOATS, None),
        ("previous_score", previous_score, _check.FLOATS, None),
    )
    if overlap and not torch.compiler.is_compiling() and kv.shape[-1] % 2:
        _refuse_odd("pool_windows", kv)
    if (previous_kv is None) != (previous_score is None) or (
        previous_kv is not None and not overlap
    ):
        raise ValueError(
            "pool_windows: previous_kv and previous_score go together, and only with overlap"
        )
    for name, before in (("previous_kv", previous_kv), ("previous_score", previous_score)):
        if before is not None:
            halves = [kv.shape[0], kv.shape[2], kv.shape[3] // 2]
            _check.shape("pool_windows", name, before, halves)
    return _pool_windows(PoolWindowsArgs(kv, score, previous_kv, previous_score, overlap), backend)


@planned
def compressor_update(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    sequences: torch.Tensor,
    *,
    overlap: bool,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pool the next tokens of some sequences; return an entry for every window that closes.

    Specification, sections 5.2 and 5.3. The entries do not depend on how a sequence is cut into
    calls. Mutates ``state`` in the rows ``sequences``: it writes the last new tokens, at most as
    many as there are slots, and nothing else. A call that writes none of the slots that it reads,
    such as one of a single token, can therefore be repeated. With D slots more than windows need,
    so can one of D + 1 tokens; and D tokens can be taken back, by a later call with smaller
    ``starts``, as if they had never been there.

    Entry b of the batch has the tokens ``cu_seqlens[b] : cu_seqlens[b+1]`` at the positions
    ``starts[b], starts[b] + 1, ...``. An entry without tokens is ignored, whatever its ``starts``
    and ``sequences`` are; so are entries with a negative ``sequences`` (padding) and tokens past
    ``cu_seqlens[B]``. ``starts[b] == 0`` begins a new sequence, whatever the state holds.

    Args:
        kv: ``[T, c*d]``; c is 2 with overlap, else 1.
        score: ``[T, c*d]``, WITHOUT ape.
        ape: ``[m, c*d]``, added to the scores: row = position modulo m. m is the ratio.
        state: ``[S, slots, 2, c*d]`` float32 or float64, the dtype of the computation. slots is
            2m with overlap, else m, or more. Slot ``p % slots`` holds the token at position p, of
            the last ``slots`` positions; slots of positions below 0 hold anything.
            ``[..., 0, :]`` is kv, ``[..., 1, :]`` score + ape.
        cu_seqlens: ``[B+1]`` int, starts with 0.
        starts: ``[B]`` int, tokens each sequence has seen before.
        sequences: ``[B]`` int, state rows; distinct among entries with tokens.
        overlap: Whether windows overlap.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(pooled [M, d], positions [M] int64, sequence [M] int64)`` with ``M = T // m + B``:
        the entries in batch order then position order, the position of the first token of each
        entry's window (m * w, where its RoPE is applied), and the state row it belongs to. Rows
        past the last entry hold 0, -1, -1.

    Raises:
        TypeError: if a dtype is none of these.
        ValueError: if a shape differs, the width is odd with overlap, the tensors are on different
            devices, or ``state`` overlaps itself.
        IndexError: if a value of ``cu_seqlens`` is not from 0 to T, or an entry with tokens has
            a negative start or a sequence past the state's (on the CPU; undefined on a GPU).
    """
    op = "compressor_update"
    _check.tensors(
        op, *_expected_tokens(op, kv, score, ape, state, cu_seqlens, starts, sequences, overlap)
    )
    _check_state(op, kv, ape, state, overlap)
    return _compressor_update(
        CompressorUpdateArgs(kv, score, ape, state, cu_seqlens, starts, sequences, overlap), backend
    )


@planned
def compress_write(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    sequences: torch.Tensor,
    norm_weight: torch.Tensor,
    inv_freq: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    *,
    overlap: bool,
    eps: float = 1e-6,
    rotate_quantize: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    table_dtype: torch.dtype = torch.float32,
    backend: str = "auto",
) -> None:
    """Write a compressor's projections as cached entries (specification, sections 5.2 and 5.3).

    ``pooled, positions, sequence = compressor_update(...)``, then for every entry that closed
    ``rope(rms_norm(pooled.to(dtype), norm_weight, eps), *rope_tables(positions, inv_freq))``, then
    ``indexer_rotate_quantize`` if asked, then ``write_kv``, with the roundings to ``dtype`` that
    the parts make. The entry at ``positions`` is number ``positions / m`` of its sequence and is
    stored in the slot of ``entry_slots``; an entry whose page is negative or that lies past the
    table is skipped. Mutates ``state`` in the rows ``sequences``, and the pages.

    For ``"index_fp8"`` and ``"index_mxfp4"`` pages ``rotate_quantize`` means the Hadamard transform
    alone, rounded to ``dtype``: these pages round entries when they are stored, the latter to the
    same values.

    Args:
        kv: ``[T, c*d]``; see ``compressor_update``, also for the next six.
        score: ``[T, c*d]``, WITHOUT ape.
        ape: ``[m, c*d]``.
        state: ``[S, slots, 2, c*d]`` float32 or float64.
        cu_seqlens: ``[B+1]`` int.
        starts: ``[B]`` int.
        sequences: ``[B]`` int, rows of ``state`` and of ``page_table``; negative: padding.
        norm_weight: ``[d]``.
        inv_freq: ``[R/2]`` float32, of the rotation of the last R dims, ``R <= d``.
        pages: Pages to write to; ``pages.head_dim`` is d.
        page_table: ``[S, P]`` int: page of the entries ``p * page_size`` and on of a sequence.
        overlap: Whether windows overlap.
        eps: Epsilon of the norm.
        rotate_quantize: Whether the Hadamard transform and, except for compact index pages, the
            rounding to FP4 follow.
        dtype: Dtype of the entries before they are stored: bfloat16, float32 or float64.
        table_dtype: Dtype that cosines and sines are rounded to; transformers takes the model's.
        backend: Implementation name, see ``dsv4.dispatch``.

    Raises:
        TypeError: if a dtype is none of these.
        ValueError: if a shape differs, the width is odd with overlap, R is more than d, d is not a
            power of two of at least 32 with ``rotate_quantize``, the tensors are on different
            devices, or ``state`` or the pages' data overlaps itself.
        IndexError: as ``compressor_update``, and if such a sequence is no row of the table, or the
            page of an entry that closes does not exist (on the CPU; undefined on a GPU).
    """
    op = "compress_write"
    width = kv.shape[-1] // (2 if overlap else 1) if kv.dim() else 0
    _check.tensors(
        op,
        *_expected_tokens(op, kv, score, ape, state, cu_seqlens, starts, sequences, overlap),
        ("norm_weight", norm_weight, _check.FLOATS, (width,)),
        ("inv_freq", inv_freq, (torch.float32,), ("R/2",)),
        ("page_table", page_table, _check.INTEGERS, ("S", "P")),
        expected_pages(op, "pages", pages, PAGE_FORMATS),
    )
    _check_state(op, kv, ape, state, overlap)
    if not pages.data.is_contiguous():
        _check.no_overlap(op, "pages.data", pages.data)
    _check_entries(op, width, pages.head_dim, inv_freq, rotate_quantize)
    for name, value in (("dtype", dtype), ("table_dtype", table_dtype)):
        if value not in _ENTRY_FLOATS:
            raise TypeError(f"{op}: {name} is {value}, wanted bfloat16, float32 or float64")
    _compress_write(
        CompressWriteArgs(
            kv,
            score,
            ape,
            state,
            cu_seqlens,
            starts,
            sequences,
            norm_weight,
            inv_freq,
            pages.data,
            pages.page_size,
            pages.entry_format,
            pages.head_dim,
            pages.rope_dim,
            page_table,
            overlap,
            eps,
            rotate_quantize,
            dtype,
            table_dtype,
        ),
        backend,
    )


def _expected_tokens(
    op: str,
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    sequences: torch.Tensor,
    overlap: bool,
) -> tuple[_check.Expected, ...]:
    """Return what ``_check.tensors`` is to check of the tokens and the state."""
    ratio = ape.shape[0] if ape.dim() else 0
    batch = starts.shape[0] if starts.dim() else 0
    if ape.dim() and not torch.compiler.is_compiling() and ratio < 1:
        raise ValueError(f"{op}: ape has shape {list(ape.shape)}, wanted a row at least")
    return (
        ("kv", kv, _check.FLOATS, ("T", "c d")),
        ("score", score, _check.FLOATS, ("T", "c d")),
        ("ape", ape, _check.FLOATS, ("m", "c d")),
        ("state", state, _STATE_FLOATS, (None, None, 2, "c d")),
        ("starts", starts, _check.INTEGERS, ("B",)),
        ("sequences", sequences, _check.INTEGERS, ("B",)),
        ("cu_seqlens", cu_seqlens, _check.INTEGERS, (batch + 1,)),
    )


def _check_entries(
    op: str, width: int, head_dim: int, inv_freq: torch.Tensor, rotate_quantize: bool
) -> None:
    if torch.compiler.is_compiling():
        return
    if head_dim != width:
        raise ValueError(f"{op}: pages has head_dim {head_dim}, wanted {width} (dims of an entry)")
    if 2 * inv_freq.shape[0] > width:
        raise ValueError(
            f"{op}: inv_freq has shape {list(inv_freq.shape)}, wanted [R/2] with R <= {width} "
            "(dims of an entry)"
        )
    if rotate_quantize and (width < 32 or width & (width - 1)):
        raise ValueError(
            f"{op}: entries have {width} dims, wanted a power of two >= 32 with rotate_quantize"
        )


def _check_state(
    op: str, kv: torch.Tensor, ape: torch.Tensor, state: torch.Tensor, overlap: bool
) -> None:
    """Raise ValueError unless the state, which is written, can hold the windows of ``kv``."""
    if not state.is_contiguous():
        _check.no_overlap(op, "state", state)
    if torch.compiler.is_compiling():
        return
    if overlap and kv.shape[-1] % 2:
        _refuse_odd(op, kv)
    least = ape.shape[0] * (2 if overlap else 1)
    if state.shape[1] < least:
        raise ValueError(
            f"{op}: state has {state.shape[1]} slots, wanted at least {least}: "
            f"{'two windows' if overlap else 'a window'} of {ape.shape[0]} tokens"
        )


def _refuse_odd(op: str, kv: torch.Tensor) -> NoReturn:
    """Raise ValueError: overlapping windows have the columns of two."""
    raise ValueError(f"{op}: kv has {kv.shape[-1]} columns, wanted an even number with overlap")
