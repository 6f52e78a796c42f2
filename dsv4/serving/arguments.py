"""Checks of the arguments of a model's calls, made before anything is changed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

INTEGERS = (torch.int32, torch.int64)


def checked_prompts(op: str, prompts: Any, vocabulary: int) -> list[list[int]]:
    """Check prompts and return them as lists of ints.

    Raises:
        TypeError: if they are no sequence of sequences of ints.
        ValueError: if a prompt is empty, or an id is not of the vocabulary.
    """
    if isinstance(prompts, torch.Tensor):
        raise TypeError(
            f"{op}: prompts is a tensor of shape {list(prompts.shape)}, wanted a list of lists of "
            "token ids: prompts.tolist() of a [B, S] tensor"
        )
    if not _is_sequence(prompts):
        raise TypeError(f"{op}: prompts is {_shown(prompts)}, wanted a list of lists of token ids")
    return [_checked_ids(op, f"prompts[{i}]", ids, vocabulary) for i, ids in enumerate(prompts)]


def _checked_ids(op: str, name: str, ids: Any, vocabulary: int) -> list[int]:
    if isinstance(ids, torch.Tensor):
        raise TypeError(f"{op}: {name} is a tensor, wanted a list of token ids: tensor.tolist()")
    if not _is_sequence(ids):
        raise TypeError(f"{op}: {name} is {_shown(ids)}, wanted a list of token ids")
    if len(ids) == 0:
        raise ValueError(f"{op}: {name}: a prompt is empty, wanted at least one token")
    checked = list(ids) if set(map(type, ids)) == {int} else _integers(op, name, ids)
    if min(checked) < 0 or max(checked) >= vocabulary:
        index = next(i for i, token in enumerate(checked) if not 0 <= token < vocabulary)
        raise ValueError(
            f"{op}: {name}[{index}] is {checked[index]}, wanted 0 to {vocabulary - 1}, "
            "the vocabulary"
        )
    return checked


def _integers(op: str, name: str, values: Iterable[Any]) -> list[int]:
    integers = []
    for i, value in enumerate(values):
        if not _is_integer(value):
            raise TypeError(f"{op}: {name}[{i}] is {_shown(value)}, wanted an int")
        integers.append(operator.index(value))
    return integers


def checked_count(op: str, name: str, value: Any, least: int) -> int:
    """Check an int of at least ``least`` and return it.

    Raises:
        TypeError: if it is no int.
        ValueError: if it is smaller.
    """
    if not _is_integer(value):
        raise TypeError(f"{op}: {name} is {_shown(value)}, wanted an int")
    if value < least:
        raise ValueError(f"{op}: {name} is {value}, wanted {least} or more")
    return operator.index(value)


def checked_stops(op: str, stop_ids: Any, vocabulary: int) -> frozenset[int]:
    """Check stop tokens, also in a tensor, and return them.

    Raises:
        TypeError: if they are no collection of ints.
        ValueError: if one is not of the vocabulary.
    """
    if isinstance(stop_ids, torch.Tensor):
        if stop_ids.dtype not in INTEGERS:
            raise TypeError(
                f"{op}: stop_ids has dtype {_name(stop_ids.dtype)}, wanted int64 or int32"
            )
        stop_ids = stop_ids.flatten().tolist()
    if isinstance(stop_ids, str | bytes) or not isinstance(stop_ids, Iterable):
        raise TypeError(f"{op}: stop_ids is {_shown(stop_ids)}, wanted a list of token ids")
    tokens = _integers(op, "stop_ids", stop_ids)
    for i, token in enumerate(tokens):
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"{op}: stop_ids[{i}] is {token}, wanted 0 to {vocabulary - 1}, the vocabulary"
            )
    return frozenset(tokens)


def checked_rows(op: str, sequences: Any) -> list[int]:
    """Check rows of a cache, given on the host, and return them as ints.

    Raises:
        TypeError: if they are none.
    """
    if isinstance(sequences, torch.Tensor):
        if sequences.dtype not in INTEGERS or sequences.dim() != 1:
            raise TypeError(
                f"{op}: sequences is a tensor of dtype {_name(sequences.dtype)} and shape "
                f"{list(sequences.shape)}, wanted int64 and [B]"
            )
        sequences = sequences.tolist()
    if not _is_sequence(sequences):
        raise TypeError(f"{op}: sequences is {_shown(sequences)}, wanted a list of cache rows")
    return _integers(op, "sequences", sequences)


def check_tokens(op: str, tokens: Any, rows: int, vocabulary: int, device: torch.device) -> None:
    """Raise unless ``tokens`` is an id for each row; on a GPU its values are not read.

    Raises:
        TypeError: if it is no tensor of integers.
        ValueError: if its shape or device is wrong, or an id is not of the vocabulary.
    """
    if not isinstance(tokens, torch.Tensor):
        raise TypeError(f"{op}: tokens is {_shown(tokens)}, wanted a tensor [B] of int64")
    if tokens.dtype not in INTEGERS:
        raise TypeError(f"{op}: tokens has dtype {_name(tokens.dtype)}, wanted int64")
    if tuple(tokens.shape) != (rows,):
        raise ValueError(
            f"{op}: tokens has shape {list(tokens.shape)}, wanted [{rows}], one for each sequence"
        )
    if tokens.device != device:
        raise ValueError(f"{op}: tokens is on {tokens.device}, wanted {device}")
    check_vocabulary(f"{op}: tokens", tokens, vocabulary)


def check_vocabulary(name: str, ids: torch.Tensor, vocabulary: int) -> None:
    """Raise unless ids are of the vocabulary; ids on a GPU or on meta are not read.

    Raises:
        ValueError: naming the first that is not, and its place.
    """
    if torch.compiler.is_compiling() or type(ids) is not torch.Tensor or ids.device.type != "cpu":
        return
    bad = ((ids < 0) | (ids >= vocabulary)).nonzero()
    if len(bad):
        index = bad[0].tolist()
        token = int(ids[tuple(index)])
        raise ValueError(f"{name}{index} is {token}, wanted 0 to {vocabulary - 1}, the vocabulary")


def check_choice(op: str, chosen: Sequence[int], prompts: Sequence[int], step: int) -> None:
    """Raise if a sampler found no token to choose.

    Raises:
        RuntimeError: naming the prompt and the new token.
    """
    for prompt, token in zip(prompts, chosen, strict=True):
        if token < 0:
            raise RuntimeError(
                f"{op}: the logits of prompt {prompt} for new token {step} have no finite maximum "
                "(they hold NaN or infinity), so no token can be chosen"
            )


def _is_sequence(value: Any) -> bool:
    return (
        hasattr(value, "__getitem__")
        and hasattr(value, "__len__")
        and not isinstance(value, str | bytes | dict)
    )


def _is_integer(value: Any) -> bool:
    if isinstance(value, bool | torch.Tensor) or type(value).__name__ in ("bool", "bool_"):
        return False
    return hasattr(value, "__index__")


def _shown(value: Any) -> str:
    """Return a value as text for a message: short, with its type."""
    text = repr(value)
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
