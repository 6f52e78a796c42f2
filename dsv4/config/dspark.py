"""Configuration of DSpark, the draft of the 0731 and 0813 releases (specification, section 9.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dsv4.config.fields import DSPARK_EXPERTS, DSPARK_REQUIRED, is_integer
from dsv4.config.json_file import show

# A block is attended to as a whole; published models have 5 rows.
MOST_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """Sizes of a DSpark draft.

    Attributes:
        block_size: Rows of a block, which is the number of tokens that one pass drafts.
        noise_token_id: Token of all rows but the first, which has the anchor.
        target_layer_ids: Main layers after which the draft reads the residual streams, ascending.
            There are as many stages.
        markov_rank: Width of the head that adds to logits by the token before.
        n_routed_experts: Experts of a stage; None: as many as in a main layer.
        num_experts_per_tok: Experts of a token in a stage; None: as many as in a main layer.
        confidence_head: Whether the draft says how likely each token is to be accepted.

    Raises:
        ValueError: if a field has the wrong type or is out of range.
    """

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    confidence_head: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.target_layer_ids, list):
            object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        problems = list(_problems(self.to_dict()))
        if problems:
            raise ValueError("DSparkConfig: " + "; ".join(problems))

    @property
    def stages(self) -> int:
        """Number of stages: blocks of the draft, each with a KV cache of its own."""
        return len(self.target_layer_ids)

    def contradictions(self, sizes: Mapping[str, Any]) -> Iterator[str]:
        """Yield how the fields contradict those of the main model, by their names.

        Args:
            sizes: ``num_hidden_layers``, ``vocab_size``, ``n_routed_experts`` and
                ``num_experts_per_tok`` of the main model.
        """
        layers, vocabulary = sizes["num_hidden_layers"], sizes["vocab_size"]
        if self.target_layer_ids[-1] >= layers:
            yield (
                f"dspark_target_layer_ids is {list(self.target_layer_ids)}, "
                f"wanted layers 0 to {layers - 1}"
            )
        if self.noise_token_id >= vocabulary:
            yield (
                f"dspark_noise_token_id is {self.noise_token_id}, wanted a token of the "
                f"vocabulary (below {vocabulary})"
            )
        experts = self.n_routed_experts or sizes["n_routed_experts"]
        chosen = self.num_experts_per_tok or sizes["num_experts_per_tok"]
        if chosen > experts:
            yield f"a DSpark stage chooses {chosen} of {experts} experts, wanted at most {experts}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of config.json."""
        values: dict[str, Any] = {
            "dspark_block_size": self.block_size,
            "dspark_noise_token_id": self.noise_token_id,
            "dspark_target_layer_ids": _as_list(self.target_layer_ids),
            "dspark_markov_rank": self.markov_rank,
        }
        for name in DSPARK_EXPERTS:
            value = getattr(self, name.removeprefix("dspark_"))
            if value is not None:
                values[name] = value
        if self.confidence_head is not True:
            values["enable_confidence_head"] = self.confidence_head
        return values


def read_dspark(values: Mapping[str, Any], problems: list[str]) -> DSparkConfig | None:
    """Return the draft that a config.json describes; None if it has no field of one.

    Args:
        values: Fields of config.json.
        problems: Sentences about missing, wrong and contradictory fields are added here.
    """
    names = (*DSPARK_REQUIRED, *DSPARK_EXPERTS)
    present = {name: values[name] for name in names if values.get(name) is not None}
    if not present:
        return None
    missing = [name for name in DSPARK_REQUIRED if name not in present]
    if missing:
        problems.append(f"{', '.join(missing)} missing beside {next(iter(present))}")
        return None
    if values.get("enable_confidence_head") is not None:
        present["enable_confidence_head"] = values["enable_confidence_head"]
    wrong = list(_problems(present))
    problems.extend(wrong)
    if wrong:
        return None
    enabled = present.pop("enable_confidence_head", True)
    fields = {name.removeprefix("dspark_"): value for name, value in present.items()}
    return DSparkConfig(**fields, confidence_head=enabled)


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the fields of config.json, each by itself."""
    for name in (*DSPARK_REQUIRED, *DSPARK_EXPERTS):
        if name == "dspark_target_layer_ids" or name not in values:
            continue
        least = 0 if name == "dspark_noise_token_id" else 1
        if not is_integer(values[name], least):
            yield f"{name} is {show(values[name])}, wanted an integer >= {least}"
        elif name == "dspark_block_size" and values[name] > MOST_ROWS:
            yield f"{name} is {show(values[name])}, wanted at most {MOST_ROWS}"
    ids = values["dspark_target_layer_ids"]
    if not _is_ascending(ids):
        yield f"dspark_target_layer_ids is {show(ids)}, wanted a list of ascending layer numbers"
    enabled = values.get("enable_confidence_head", True)
    if not isinstance(enabled, bool):
        yield f"enable_confidence_head is {show(enabled)}, wanted true or false"


def _is_ascending(ids: Any) -> bool:
    if not isinstance(ids, (list, tuple)) or not ids or not all(map(is_integer, ids)):
        return False
    return all(low < high for low, high in pairwise(ids))


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
