"""Check a configuration against the size of a checkpoint's tensors before a model is built.

A config.json of 1 kB may specify 10^9 layers. The headers must have them, so that the work of
building a model is bounded by the size of the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dsv4.checkpoint import names
from dsv4.checkpoint.entries import Entry
from dsv4.checkpoint.shards import CheckpointError
from dsv4.config import DSparkConfig, ModelConfig
from dsv4.config.fields import INTEGERS

_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
_EXAMPLES = 5  # names that an error shows
# Fields that are no dimension of a tensor.
_COUNTS = frozenset(
    (
        *("num_hidden_layers", "num_nextn_predict_layers", "n_routed_experts", "sliding_window"),
        *("hc_sinkhorn_iters", "index_topk", "max_position_embeddings", "num_key_value_heads"),
        *("n_shared_experts",),
    )
)


def check(config: ModelConfig, entries: Mapping[str, Entry], stray: Sequence[str]) -> None:
    """Raise if a configuration specifies more than the headers hold.

    Args:
        config: The configuration.
        entries: Tensors of the headers by canonical name.
        stray: Names of the headers that are no tensor of the model.

    Numbers of layers and of routed experts are compared with those of the names, any other
    dimension with the largest dimension of a tensor that has values. Later everything is compared
    tensor by tensor.

    Raises:
        CheckpointError: naming the field, its value and what the headers hold.
    """
    layers = {names.layer_of(name) for name in entries}
    layer_count = sum(n.startswith("model.") for n in layers)
    if stray and config.num_hidden_layers and not layer_count:
        raise CheckpointError(
            f"config.json: num_hidden_layers is {config.num_hidden_layers}, but no tensor has the "
            f"name of one in a layer; names found instead: {', '.join(stray[:_EXAMPLES])}"
        )
    _at_most(config, "num_hidden_layers", layer_count, "layers")
    drafts = sum(name.startswith("mtp.") for name in layers)
    # A checkpoint without any is left to the caller, who may not need them.
    if config.dspark is None:
        most = drafts or config.num_nextn_predict_layers
        _at_most(config, "num_nextn_predict_layers", most, "MTP")
    experts = _experts(entries)
    if experts:
        _at_most(config, "n_routed_experts", experts, "routed experts")
    largest = max(
        (max(e.shape) for e in entries.values() if e.shape and 0 not in e.shape), default=0
    )
    for name in INTEGERS:
        if name not in _COUNTS and getattr(config, name) > largest:
            raise CheckpointError(
                f"config.json: {name} is {getattr(config, name)}, but no tensor has a dimension "
                f"of more than {largest}"
            )
    if config.dspark is not None and drafts:
        _check_dspark(config.dspark, drafts, experts, largest)


def _check_dspark(dspark: DSparkConfig, stages: int, experts: int, largest: int) -> None:
    """Raise if a draft has more stages, experts or dimensions than the tensors."""
    for name, value, most, what in (
        ("dspark_target_layer_ids", dspark.stages, stages, "stages"),
        ("dspark_n_routed_experts", dspark.n_routed_experts or 0, experts, "routed experts"),
        ("dspark_markov_rank", dspark.markov_rank, largest, "columns at most"),
    ):
        if value > most:
            raise CheckpointError(
                f"config.json: {name} asks for {value} {what}, but the tensors have {most}"
            )


def _at_most(config: ModelConfig, name: str, most: int, what: str) -> None:
    value = getattr(config, name)
    if value > most:
        raise CheckpointError(
            f"config.json: {name} is {value}, but the tensors are those of {most} {what}"
        )


def _experts(entries: Mapping[str, Entry]) -> int:
    """Return the number of routed experts in the names of single experts, or in the stacks."""
    numbers = {match.group(1) for match in map(_EXPERT.search, entries) if match}
    stacks = (
        e.shape[0] for name, e in entries.items() if names.is_routed(name) and len(e.shape) == 3
    )
    return max(len(numbers), max(stacks, default=0))
