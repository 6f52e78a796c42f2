"""How each parameter of a model is split over the ranks that share it.

``RULES`` has one line per kind of parameter, by canonical name (``dsv4.checkpoint.names``); every
parameter fits exactly one. ``LocalSizes`` has the sizes that follow for the modules of a rank.
Nothing else knows the split.

Attention is split by groups of heads: each rank has the query heads, sinks and rows of ``o_a_proj``
of its groups, and the columns of ``o_b_proj`` that read them; the sum over ranks is the output. The
KV cache, compressors and indexer are on every rank, because all heads share one KV head. Routed
experts are split in contiguous ranges, and the shared expert by its intermediate size: every rank
routes all tokens and adds up its part. With ``mode="dp"`` a rank has its range of routed experts,
and the whole of everything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from dsv4.config import ModelConfig
from dsv4.parallel.context import DATA, TENSOR, ParallelContext
from dsv4.quant import fragments
from dsv4.quant.formats import NVFP4, Format


class Axis(Enum):
    """The part of a tensor that a rank holds."""

    WHOLE = "all of it"
    ROWS = "a range of its first axis"
    COLUMNS = "a range of its last axis"
    EXPERTS = "the matrices of a range of experts"


@dataclass(frozen=True)
class Rule:
    """The split of the parameters whose canonical names fit a pattern.

    Attributes:
        axis: The part that a rank holds.
        divided: Field of the configuration that the number of ranks must divide; empty: none.
        pattern: Regular expression for whole names.
    """

    axis: Axis
    divided: str
    pattern: re.Pattern[str]


def _rule(axis: Axis, divided: str, pattern: str) -> Rule:
    return Rule(axis, divided, re.compile(pattern))


_BLOCK = r"(?:model\.layers\.\d+|mtp\.\d+\.layer)\."
_ATTENTION, _MLP = _BLOCK + r"self_attn\.", _BLOCK + r"mlp\."
RULES = (
    _rule(Axis.ROWS, "vocab_size", r"model\.embed_tokens\.weight|lm_head\.weight"),
    _rule(Axis.ROWS, "o_groups", _ATTENTION + r"(?:(?:q_b_proj|o_a_proj)\.weight|sinks)"),
    _rule(Axis.COLUMNS, "o_groups", _ATTENTION + r"o_b_proj\.weight"),
    _rule(
        Axis.EXPERTS,
        "n_routed_experts",
        _MLP + r"experts\.(?:(?P<expert>\d+)\.(?:gate|up|down)_proj\.weight|(?:gate_up|down)_proj)",
    ),
    _rule(Axis.ROWS, "moe_intermediate_size", _MLP + r"shared_experts\.(?:gate|up)_proj\.weight"),
    _rule(Axis.COLUMNS, "moe_intermediate_size", _MLP + r"shared_experts\.down_proj\.weight"),
    _rule(Axis.WHOLE, "", _ATTENTION + r"(?:q_a_proj|q_a_norm|kv_proj|kv_norm)\.weight"),
    _rule(Axis.WHOLE, "", _ATTENTION + r"compressor\..+"),
    _rule(Axis.WHOLE, "", _MLP + r"gate\.\w+"),
    _rule(Axis.WHOLE, "", _BLOCK + r"(?:input|post_attention)_layernorm\.weight"),
    _rule(Axis.WHOLE, "", _BLOCK + r"(?:attn|ffn)_hc\.\w+"),
    _rule(Axis.WHOLE, "", r"(?:model|mtp\.\d+)\.(?:norm\.weight|hc_head\.hc_\w+)"),
    _rule(Axis.WHOLE, "", r"mtp\.\d+\.(?:e_proj|h_proj|enorm|hnorm)\.weight"),
    _rule(Axis.WHOLE, "", r"mtp\.\d+\.(?:main_proj|main_norm)\.weight"),
    _rule(Axis.WHOLE, "", r"mtp\.\d+\.(?:markov_head\.markov_w[12]|confidence_head\.proj)\.weight"),
)


def rule_of(name: str) -> Rule:
    """Return the rule for a canonical name.

    Raises:
        ValueError: if no rule knows it.
    """
    for rule in RULES:
        if rule.pattern.fullmatch(name):
            return rule
    raise ValueError(f"{name}: no rule says how it is split over ranks")


def axis_of(name: str, mode: str) -> Axis:
    """Return the part of a parameter that a rank holds in a mode, by its canonical name."""
    return _axis_in(rule_of(name), mode)


def _axis_in(rule: Rule, mode: str) -> Axis:
    return Axis.WHOLE if mode == DATA and rule.axis is not Axis.EXPERTS else rule.axis


def share(total: int, context: ParallelContext) -> slice:
    """Return this rank's range of ``total`` things, of which all ranks have as many."""
    size = total // context.size
    return slice(context.rank * size, (context.rank + 1) * size)


def expert_of(name: str) -> int | None:
    """Return the number of the expert whose single matrix has this canonical name, or None."""
    match = rule_of(name).pattern.fullmatch(name)
    number = match.groupdict().get("expert") if match else None
    return None if number is None else int(number)


@dataclass(frozen=True)
class LocalSizes:
    """Sizes of the modules of one rank; without a context, those of the whole model.

    Attributes:
        heads: Attention heads.
        groups: Groups of the output projection.
        experts: Numbers of its routed experts.
        inner: Intermediate size of the shared expert.
        vocabulary: Tokens whose embeddings and logits it has.
    """

    heads: int
    groups: int
    experts: range
    inner: int
    vocabulary: range

    @classmethod
    def of(cls, config: ModelConfig, context: ParallelContext | None) -> LocalSizes:
        """Return the sizes of a rank.

        Raises:
            ValueError: if the number of ranks does not divide what is split.
        """
        if context is None:
            return cls._whole(config, range(config.n_routed_experts))
        check_divides(config, context.size, context.mode)
        if context.mode == DATA:
            part = share(config.n_routed_experts, context)
            return cls._whole(config, range(part.start, part.stop))
        groups = config.o_groups // context.size
        experts, vocabulary = (
            share(total, context) for total in (config.n_routed_experts, config.vocab_size)
        )
        return cls(
            groups * config.heads_per_group,
            groups,
            range(experts.start, experts.stop),
            config.moe_intermediate_size // context.size,
            range(vocabulary.start, vocabulary.stop),
        )

    @classmethod
    def _whole(cls, config: ModelConfig, experts: range) -> LocalSizes:
        return cls(
            config.num_attention_heads,
            config.o_groups,
            experts,
            config.moe_intermediate_size,
            range(config.vocab_size),
        )


def check_divides(config: ModelConfig, size: int, mode: str = TENSOR) -> None:
    """Raise if a model cannot be split over ``size`` ranks.

    Raises:
        ValueError: naming the first field that ``size`` does not divide.
    """
    split = [rule for rule in RULES if _axis_in(rule, mode) is not Axis.WHOLE]
    for name in dict.fromkeys(rule.divided for rule in split):
        total = getattr(config, name)
        if total % size:
            raise ValueError(
                f"parallel: {size} ranks, wanted a number that divides {name} ({total})"
            )


def check_blocks(
    name: str, shape: Sequence[int], fmt: Format, size: int, *, tiles: bool, mode: str = TENSOR
) -> None:
    """Raise if the parts of a quantised matrix are not whole blocks of its format.

    Args:
        name: Canonical name of the matrix.
        shape: Its shape.
        fmt: Its format.
        size: Number of ranks.
        tiles: Whether NVFP4 weights are to be packed, so that the parts of a matrix of whole tiles
            must be whole tiles.
        mode: How the ranks share the model.

    Raises:
        ValueError: naming the matrix, the size of a part and the block.
    """
    axis = axis_of(name, mode)
    if axis not in (Axis.ROWS, Axis.COLUMNS):
        return
    number = 0 if axis is Axis.ROWS else 1
    total, block, what = shape[number - 2], fmt.block[number], f"{fmt.name} blocks"
    tile = (fragments.ROWS, fragments.COLUMNS)[number]
    if tiles and fmt == NVFP4 and total % tile == 0:
        block, what = tile, "tiles of packed weights"
    if total % size or total // size % block:
        word = ("rows", "columns")[number]
        raise ValueError(
            f"parallel: {name} has {total} {word}, {total / size:g} on each of {size} ranks, "
            f"wanted a multiple of {block} there, because {what} are not cut"
        )


def check_matrices(
    matrices: Iterable[tuple[str, Sequence[int], Format]],
    size: int,
    *,
    tiles: bool,
    mode: str = TENSOR,
) -> None:
    """Call ``check_blocks`` for the name, shape and format of each quantised matrix."""
    for name, shape, fmt in matrices:
        check_blocks(name, shape, fmt, size, tiles=tiles, mode=mode)


def local_bytes(sizes: Mapping[str, int], size: int, mode: str = TENSOR) -> float:
    """Return the bytes of one rank's share, given those of each entry of a checkpoint.

    Args:
        sizes: Bytes of each parameter, by canonical name.
        size: Number of ranks.
        mode: How they share the model.
    """
    return sum(
        count if axis_of(name, mode) is Axis.WHOLE else count / size
        for name, count in sizes.items()
    )
