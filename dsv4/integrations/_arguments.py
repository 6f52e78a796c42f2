"""Arguments of transformers' modules: those that ours take, and those without effect."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

_logger = logging.getLogger(__name__)

NEWEST_TESTED = (5, 24)

_FLASH = "packed batches of flash attention, which transformers never runs for DeepSeek-V4"
_RECORDED = "transformers records it by hooks on the modules, outside their forwards"
# Arguments that transformers' models pass to every decoder layer and its attention, unused there.
WITHOUT_EFFECT: dict[str, str] = {
    "num_items_in_batch": "divides the training loss, which is computed from the logits",
    "output_hidden_states": _RECORDED,
    "output_router_logits": _RECORDED,
    "output_attentions": f"{_RECORDED}; True is refused where the attention is dsv4's",
    "cu_seq_lens_q": _FLASH,
    "cu_seq_lens_k": _FLASH,
    "max_length_q": _FLASH,
    "max_length_k": _FLASH,
    "is_causal": "transformers' model reads it and makes the mask, which alone decides here",
    "seq_idx": "read by convolutions and state-space layers, which DeepSeek-V4 lacks",
    "cache_position": "older callers pass it; the cache knows its own positions",
}
# Two names of one argument: transformers' from 5.24 on, and the one up to 5.23, which is ours.
RENAMED: dict[str, str] = {"cache": "past_key_values"}


def check_options(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Raise for keyword arguments that are not known to be without effect.

    Raises:
        TypeError: naming them.
    """
    unknown = [name for name in options if name not in WITHOUT_EFFECT]
    if unknown:
        raise TypeError(
            f"{type(module).__name__}.forward: unexpected keyword arguments {', '.join(unknown)}; "
            f"dsv4 knows that {', '.join(WITHOUT_EFFECT)} have no effect there, "
            "and does not know what these would do"
        )


@dataclass(frozen=True)
class _Parameters:
    """Parameters of a forward without ``self``.

    Attributes:
        names: Arguments with a name, in order, each under this package's name.
        rest: Whether it takes other keyword arguments.
    """

    names: tuple[str, ...]
    rest: bool

    @classmethod
    def of(cls, module_class: type[nn.Module]) -> _Parameters:
        """Return the parameters of a class's forward."""
        parameters = list(inspect.signature(module_class.forward).parameters.values())[1:]
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        named = [RENAMED.get(p.name, p.name) for p in parameters if p.kind not in kinds]
        return cls(tuple(dict.fromkeys(named)), any(p.kind in kinds for p in parameters))


def check_signature(theirs: type[nn.Module], ours: type[nn.Module]) -> None:
    """Compare the forward of a class of transformers with that of its replacement.

    Raises:
        TypeError: naming the class, an argument that ours does not take or takes at another
            position, and transformers' version.
    """
    expected, known = _Parameters.of(theirs), _Parameters.of(ours)
    for problem in _differences(expected, known):
        raise TypeError(
            f"{theirs.__name__}.forward of transformers {transformers_version()}: {problem}. "
            f"Install transformers {'.'.join(map(str, NEWEST_TESTED))}, or leave the part that "
            "replaces it out of parts"
        )


def _differences(expected: _Parameters, known: _Parameters) -> Iterator[str]:
    for name in expected.names:
        if name not in known.names:
            yield f"dsv4 does not know its argument {name!r}"
    pairs = zip(expected.names, known.names, strict=False)
    for position, (name, ours) in enumerate(pairs):
        if name != ours:
            yield f"its argument {position} is {name!r}, wanted {ours!r}"
    if expected.rest and not known.rest:
        yield "it takes any keyword argument, and dsv4's takes none beyond its own"


def check_signatures(pairs: Iterable[tuple[type[nn.Module], type[nn.Module]]]) -> None:
    """``check_signature`` of each pair of a class of transformers and its replacement."""
    for theirs, ours in dict.fromkeys(pairs):
        check_signature(theirs, ours)


def transformers_version() -> str:
    """Return the installed version."""
    import transformers

    return str(transformers.__version__)


def warn_if_untested(version: str) -> None:
    """Log a warning, once per process and version, if transformers is newer than any tested one."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers > NEWEST_TESTED:
        _warn_untested(version)


@functools.cache
def _warn_untested(version: str) -> None:
    _logger.warning(
        "transformers %s is newer than %s, the newest that dsv4 was tested with",
        version,
        ".".join(map(str, NEWEST_TESTED)),
    )
