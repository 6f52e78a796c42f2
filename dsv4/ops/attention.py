"""Attention over the chosen entries of two paged caches, with a sink."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.kv_cache.pages import Pages
from dsv4.ops import _check
from dsv4.ops._library import define
from dsv4.ops._plans import planned
from dsv4.ops.kv_cache import expected_pages


class SparseAttentionArgs(NamedTuple):
    """Arguments of ``sparse_attention``: attention over the chosen entries of two paged caches.

    Attributes:
        q: ``[T, h, D]`` floating.
        window: Storage of the pages of raw entries.
        window_page_size: Entries of such a page.
        window_format: Format of raw entries.
        window_slots: ``[T, Kw]`` int, ``page * page_size + entry``; negative: none.
        compressed: Storage of the pages of compressed entries, or None.
        compressed_page_size: Entries of such a page.
        compressed_format: Format of compressed entries.
        compressed_slots: ``[T, Kc]`` int likewise; None exactly if ``compressed`` is.
        sink: ``[h]`` floating; -inf: no sink.
        rope_dim: Trailing dims that ``"fp8"`` entries keep in bfloat16.
        scale: Factor on ``q . k``.
        cos: ``[T, R/2]`` floating, rotates the result back; None: no rotation.
        sin: Like ``cos``.
    """

    q: torch.Tensor
    window: torch.Tensor
    window_page_size: int
    window_format: str
    window_slots: torch.Tensor
    compressed: torch.Tensor | None
    compressed_page_size: int
    compressed_format: str
    compressed_slots: torch.Tensor | None
    sink: torch.Tensor
    rope_dim: int
    scale: float
    cos: torch.Tensor | None
    sin: torch.Tensor | None


def _fake(args: SparseAttentionArgs) -> torch.Tensor:
    return torch.empty_like(args.q, memory_format=torch.contiguous_format)


def _check_slots(op: str, args: SparseAttentionArgs) -> None:
    _check.below(
        op, "window_slots", args.window_slots, args.window.shape[0] * args.window_page_size
    )
    if args.compressed is not None and args.compressed_slots is not None:
        slots = args.compressed.shape[0] * args.compressed_page_size
        _check.below(op, "compressed_slots", args.compressed_slots, slots)


_sparse_attention = define("sparse_attention", SparseAttentionArgs, _fake, _check_slots)


@planned
def sparse_attention(
    q: torch.Tensor,
    window: Pages,
    window_slots: torch.Tensor,
    compressed: Pages | None,
    compressed_slots: torch.Tensor | None,
    sink: torch.Tensor,
    *,
    scale: float,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute one softmax over entries of both caches (specification, section 4.2, steps 6 to 8).

    ``o_h = sum_j exp(s_hj) k_j / (sum_j exp(s_hj) + exp(sink_h))`` with ``s_hj = scale * q_h.k_j``;
    an entry is key and value at once. The sink is a raw logit: ``scale`` does not multiply it, and
    it has no value. Computed in float32 (float64 for float64 q), with one rounding at the end. For
    bfloat16 q an implementation may also round the weights ``exp(s_hj)`` to bfloat16, equally in
    both sums, and may round sums of a part of a token's entries, before it adds them, by 2^-11.6 of
    each: a sixth of the last rounding; values that bfloat16 holds do not change. An entry whose
    slot occurs twice counts twice. If every slot is negative and the sink is -inf, the result is 0.
    An entry that is in no slot of a token has no effect on the token, even if it is NaN. A NaN in q
    makes its token and head NaN if the token has an entry; so does an Inf, unless all its logits
    are -inf.

    With ``cos`` and ``sin`` the last R dims of the result are then rotated by the opposite angle,
    as ``rope(inverse=True)`` rotates them, in the same float32 (or float64): the one rounding is
    still at the end. ``rope`` of a result without them rounds twice, and so may differ in the last
    place.

    Args:
        q: ``[T, h, D]`` after norm and RoPE.
        window: Pages of raw KV entries, D dims.
        window_slots: ``[T, Kw]`` int64 or int32, ``page * page_size + entry``; negative: none.
        compressed: Pages of compressed entries, or None.
        compressed_slots: ``[T, Kc]`` likewise; None exactly if ``compressed`` is.
        sink: ``[h]``; -inf: no sink.
        scale: Factor on the products, ``D^-0.5``.
        cos: ``[T, R/2]``, see ``rope_tables``; R is taken from this argument. None: no rotation.
        sin: Like ``cos``; None exactly if ``cos`` is.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[T, h, D]`` in ``q.dtype``, contiguous; after the inverse RoPE if there are tables.

    Raises:
        TypeError: if a dtype is none of these.
        ValueError: if a shape differs, the tensors are on different devices, or only one of
            ``compressed`` and ``compressed_slots``, or of ``cos`` and ``sin``, is given.
        IndexError: if a slot lies past the last page (on the CPU; undefined on a GPU).
    """
    op = "sparse_attention"
    expected: list[_check.Expected] = [
        ("q", q, _check.FLOATS, ("T", "h", window.head_dim)),
        ("sink", sink, _check.FLOATS, ("h",)),
        expected_pages(op, "window", window),
        ("window_slots", window_slots, _check.INTEGERS, ("T", "Kw")),
        ("cos", cos, _check.FLOATS, ("T", "R/2")),
        ("sin", sin, _check.FLOATS, ("T", "R/2")),
    ]
    if (compressed is None) != (compressed_slots is None):
        raise ValueError(f"{op}: compressed and compressed_slots go together, found one of them")
    if (cos is None) != (sin is None):
        raise ValueError(f"{op}: cos and sin go together, found one of them")
    if compressed is not None:
        _check_like(compressed, window)
        expected.append(expected_pages(op, "compressed", compressed))
        expected.append(("compressed_slots", compressed_slots, _check.INTEGERS, ("T", "Kc")))
    _check.tensors(op, *expected)
    if cos is not None and not torch.compiler.is_compiling() and 2 * cos.shape[1] > q.shape[2]:
        raise ValueError(
            f"{op}: cos has shape {list(cos.shape)}, wanted [{q.shape[0]}, R/2] with "
            f"R <= {q.shape[2]} (dims of q)"
        )
    return _sparse_attention(
        SparseAttentionArgs(
            q,
            window.data,
            window.page_size,
            window.entry_format,
            window_slots,
            None if compressed is None else compressed.data,
            1 if compressed is None else compressed.page_size,
            window.entry_format if compressed is None else compressed.entry_format,
            compressed_slots,
            sink,
            window.rope_dim,
            float(scale),
            cos,
            sin,
        ),
        backend,
    )


def _check_like(compressed: Pages, window: Pages) -> None:
    """Raise ValueError unless the entries of both pools have the same dims."""
    for field in ("head_dim", "rope_dim"):
        value, expected = getattr(compressed, field), getattr(window, field)
        if value != expected:
            raise ValueError(
                f"sparse_attention: compressed.{field} is {value}, wanted window's, {expected}"
            )
