"""Attention masks over raw keys, as choices of keys; masks with other entries are not supported."""

from __future__ import annotations

import torch

# An additive entry at or below this leaves its key no weight, whatever the logits are.
HIDDEN = -1e4


def check_shape(mask: torch.Tensor, batch: int, queries: int, keys: int) -> None:
    """Raise unless a mask is ``[B or 1, 1, S, L]``.

    Raises:
        ValueError: if it has another shape.
    """
    shape = tuple(mask.shape)
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1:] != (1, queries, keys):
        raise ValueError(
            f"DeepseekV4Attention: attention_mask has shape {list(shape)}, "
            f"wanted [{batch} or 1, 1, {queries}, {keys}]"
        )


def shown_by(mask: torch.Tensor) -> torch.Tensor:
    """Return which keys a mask shows, bool."""
    return mask if mask.dtype == torch.bool else mask > HIDDEN


def is_bias(mask: torch.Tensor) -> torch.Tensor:
    """Return whether a mask has an entry that neither shows nor hides its key, a bool scalar."""
    if mask.dtype == torch.bool:
        return torch.zeros((), dtype=torch.bool, device=mask.device)
    return ((mask != 0) & ~(mask <= HIDDEN)).any()


def refuse_bias() -> None:
    """Raise with the reason why a mask with such an entry is not supported.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"attention_mask has an entry that is neither 0 nor at most {HIDDEN:g}, wanted a mask of "
        "such entries: dsv4's attention chooses keys and adds nothing to their logits"
    )


def window_band(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
    """Return which keys each query's window shows, ``[S, L]``; the last S keys are their own."""
    own = torch.arange(queries, device=device).unsqueeze(1) + (keys - queries)
    back = own - torch.arange(keys, device=device)
    return (back >= 0) & (back < window)


def window_slots(
    batch: int, queries: int, keys: int, window: int, device: torch.device
) -> torch.Tensor:
    """Return the key numbers ``[B, S, window]`` that queries see; the last S are their own."""
    own = torch.arange(queries, device=device) + (keys - queries)
    numbers = own.unsqueeze(1) + torch.arange(1 - window, 1, device=device)
    return torch.where(numbers < 0, -1, numbers).expand(batch, queries, window)


def masked_slots(
    mask: torch.Tensor, batch: int, queries: int, keys: int, window: int
) -> torch.Tensor:
    """Return the key numbers that a mask shows, -1 for none.

    Args:
        mask: ``[B or 1, 1, S, L]``.
        batch: B.
        queries: S.
        keys: L.
        window: Keys that a query sees without a mask.

    Returns:
        ``[B, S, window]``, or ``[B, S, L]`` if the mask shows a key outside the window.

    Raises:
        ValueError: if the shape is wrong or an entry neither shows nor hides its key. One token on
            a GPU is not checked, because reading its mask would wait for the GPU in every layer.
    """
    check_shape(mask, batch, queries, keys)
    shown = shown_by(mask[:, 0])
    has_values = not (mask.is_meta or torch.compiler.is_compiling())
    if has_values and (queries > 1 or mask.device.type == "cpu"):
        band = window_band(queries, keys, window, mask.device)
        biased, beyond = torch.stack((is_bias(mask), (shown & ~band).any())).tolist()
        if biased:
            refuse_bias()
        if beyond:
            numbers = torch.arange(keys, device=mask.device)
            return torch.where(shown, numbers, -1).expand(batch, queries, keys)
    slots = window_slots(batch, queries, keys, window, mask.device)
    return torch.where(shown.expand(batch, -1, -1).gather(2, slots.clamp(min=0)), slots, -1)
