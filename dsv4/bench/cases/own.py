"""Cases of sizes that a user chooses: ``--shape N=4096,K=7168``.

The names of sizes are those that an operator's rows have (``Case.shape``). A shape becomes the
fields of a small model's configuration, from which the operator's own maker makes its cases; those
whose sizes are the ones asked for are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from dsv4.bench.cases import MAKERS, gemm, sequence
from dsv4.bench.problem import Case, UsageError
from dsv4.config import ModelConfig
from dsv4.config.layer_types import CompressRates

Sizes = Mapping[str, int]

_HIDDEN, _INNER = {"H": "hidden_size"}, {"I": "moe_intermediate_size"}
_STREAMS = {"n": "hc_mult", "H": "hidden_size"}
_EXPERTS, _CHOSEN = {"E": "n_routed_experts"}, {"k": "num_experts_per_tok"}
_HEADS = {"h": "num_attention_heads", "D": "head_dim"}
_ENTRY = {"D": "head_dim", "R": "qk_rope_head_dim"}
_INDEX = {"h": "index_n_heads", "d": "index_head_dim"}
_ROTATED = {"R": "qk_rope_head_dim"}
_VOCABULARY = {"V": "vocab_size"}
_WINDOWS = (
    {"m": "csa", "d": "head_dim"},
    {"m": "hca", "d": "head_dim"},
)
_COMPACT = {"m": "csa", "d": "index_head_dim"}
_DOWN = {"N": "hidden_size", "K": "moe_intermediate_size"}
_GATE_UP = {"N": "twice moe_intermediate_size", "K": "hidden_size"}
# Fields of a configuration by the names of sizes, in each of the ways that an operator has.
_FIELDS: dict[str, tuple[dict[str, str], ...]] = {
    "quantize": ({"K": "hidden_size"},),
    "dequantize": (_DOWN,),
    "gemm_swiglu": (_GATE_UP,),
    "grouped_gemm": ({**_EXPERTS, **_DOWN, **_CHOSEN},),
    "grouped_gemm_swiglu": ({**_EXPERTS, **_GATE_UP, **_CHOSEN},),
    "grouped_gemm_swiglu_quantize": ({**_EXPERTS, **_GATE_UP, **_CHOSEN},),
    "grouped_gemm_swiglu_fp8": ({**_EXPERTS, **_GATE_UP, **_CHOSEN},),
    "mark_nonfinite_": (_STREAMS,),
    "all_reduce": (_HIDDEN,),
    "rms_norm": ({"D": "hidden_size"}, _HEADS),
    "rms_norm_pair": ({"D1": "q_lora_rank", "D2": "head_dim"},),
    "head_norm_rope_": ({**_HEADS, **_ROTATED},),
    "rms_norm_quantize": ({"D": "hidden_size"},),
    "rms_norm_fp8": ({"D": "hidden_size"},),
    "rope_tables": (_ROTATED,),
    "rope": ({**_HEADS, **_ROTATED},),
    "swiglu": (_INNER,),
    "route_topk": ({**_EXPERTS, **_HIDDEN, **_CHOSEN},),
    "route_hash": ({**_EXPERTS, **_HIDDEN, **_CHOSEN, "V": "vocab_size"},),
    "moe_permute": ({**_EXPERTS, **_CHOSEN},),
    "moe_gather": ({**_HIDDEN, **_CHOSEN},),
    "moe_sort": ({**_EXPERTS, **_HIDDEN, **_CHOSEN},),
    "moe_combine": ({**_HIDDEN, **_CHOSEN},),
    "moe_send": ({**_EXPERTS, **_HIDDEN, **_CHOSEN},),
    "moe_return": ({**_EXPERTS, **_HIDDEN, **_CHOSEN},),
    "hc_pre": (_STREAMS,),
    "hc_post": (_STREAMS,),
    "hc_head": (_STREAMS,),
    "hc_combine_post": ({**_STREAMS, **_CHOSEN},),
    "hc_combine_post_pre_norm": ({**_STREAMS, **_CHOSEN},),
    "moe_gather_quantize": ({**_HIDDEN, **_CHOSEN},),
    "rope_quantize": ({**_HEADS, **_ROTATED, "G": "o_groups"},),
    "swiglu_quantize": (_INNER,),
    "moe_gather_fp8": ({**_HIDDEN, **_CHOSEN},),
    "swiglu_fp8": (_INNER,),
    "expert_decide": ({**_EXPERTS, **_CHOSEN},),
    "expert_gather": ({**_HIDDEN, **_INNER},),
    "hc_post_pre_norm": (_STREAMS,),
    "hc_reduce_post": (_STREAMS,),
    "hc_reduce_post_pre_norm": (_STREAMS,),
    "hc_pre_norm": (_STREAMS,),
    "hc_pre_norm_quantize": (_STREAMS,),
    "hc_post_pre_norm_quantize": (_STREAMS,),
    "pool_windows": _WINDOWS,
    "compressor_projections": (
        {"C": "head_dim", "H": "hidden_size"},
        {"C": "twice head_dim", "c": "twice index_head_dim", "n": "index_n_heads", **_HIDDEN},
    ),
    "compressor_update": _WINDOWS,
    "compress_write": (*_WINDOWS, _COMPACT),
    "compress_write_paged": (*_WINDOWS, _COMPACT),
    "indexer_rotate_quantize": (_INDEX,),
    "window_slots": ({"window": "sliding_window"},),
    "norm_rope_write_kv": (_ENTRY,),
    "head_norm_rope_write_kv": ({**_HEADS, **_ROTATED},),
    "indexer_queries": ({**_INDEX, **_ROTATED},),
    "quantize_index_queries": ({**_INDEX, **_ROTATED},),
    "write_kv": (_ENTRY,),
    "read_kv": ({"D": "head_dim", "window": "sliding_window"},),
    "fake_quantize_kv": (_ENTRY,),
    "verify_greedy": (_VOCABULARY,),
    "verify_sampled": (_VOCABULARY,),
    "draw_draft": (_VOCABULARY,),
}
# Sizes that are arguments of a maker.
_ATTENTION = {**_HEADS, "window": "sliding_window", "entries": ""}
_SELECTION = {**_INDEX, "C": "", "k": "index_topk"}
_ARGUMENTS: dict[str, tuple[dict[str, str], ...]] = {
    "gemm": ({"N": "", "K": ""}, {"N": "", "K": "", "G": ""}),
    "sparse_attention": (_ATTENTION,),
    "indexer_select": (_SELECTION,),
    "entry_slots": ({"k": ""},),
    "prefix_slots": ({"C": ""},),
}
_TWICE = "twice "


@dataclass(frozen=True)
class Shape:
    """Sizes as they were given.

    Attributes:
        text: The option's text, for messages.
        sizes: Sizes by name.
    """

    text: str
    sizes: dict[str, int]

    @classmethod
    def of(cls, text: str) -> Shape:
        """Parse ``"N=4096,K=7168"``.

        Raises:
            UsageError: if the text has another form, a size twice, or one below 1.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            if not name or not equals or not value.isdecimal() or int(value) < 1:
                raise UsageError(
                    f"--shape is {text!r}, wanted names with integers of 1 or more, as "
                    "N=4096,K=7168"
                )
            if name in sizes:
                raise UsageError(f"--shape is {text!r}, which has {name} twice")
            sizes[name] = int(value)
        return cls(text, sizes)

    def check(self, what: str, known: tuple[Mapping[str, str], ...]) -> None:
        """Raise a UsageError unless the names are those of one of the ``known`` ways."""
        if any(self.sizes.keys() == names.keys() for names in known):
            return
        ways = " or ".join(",".join(f"{name}=" for name in names) for names in _distinct(known))
        raise UsageError(f"--shape is {self.text!r}, wanted {ways} for {what}")


def _distinct(known: tuple[Mapping[str, str], ...]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(tuple(names) for names in known))


def own_cases(op: str, shape: Shape, tokens: int) -> list[Case]:
    """Return the cases of an operator at a user's sizes.

    Raises:
        UsageError: if the operator or a name of a size is unknown, one is missing, or the operator
            cannot have the sizes.
    """
    if op not in MAKERS:
        raise UsageError(f"operator is {op!r}, wanted one of {', '.join(MAKERS)}")
    known = _FIELDS.get(op) or _ARGUMENTS[op]
    shape.check(op, known)
    made = []
    for fields in known:
        if fields.keys() == shape.sizes.keys():
            made += _made(op, shape, fields, tokens)
    sizes = shape.sizes.items()
    chosen = {case.name: case for case in made if sizes <= case.shape.items()}
    if not chosen:
        raise UsageError(f"--shape is {shape.text!r}, which {op} cannot have")
    return list(chosen.values())


def _made(op: str, shape: Shape, fields: Mapping[str, str], tokens: int) -> list[Case]:
    sizes = shape.sizes
    if op == "gemm":
        return gemm.own_gemm(sizes["N"], sizes["K"], tokens, sizes.get("G", 1))
    config = config_of(shape, fields)
    if op == "sparse_attention":
        return [sequence.attention_case(config, tokens, "own", sizes["entries"])]
    if op == "indexer_select":
        multiple_of(shape, "C", 64)
        return list(sequence.indexer_select(config, tokens, sizes["C"]))
    if op == "entry_slots":
        return list(sequence.entry_slots(config, tokens, sizes["k"]))
    if op == "prefix_slots":
        return list(sequence.prefix_slots(config, tokens, sizes["C"]))
    made = list(MAKERS[op](config, tokens))
    if op == "grouped_gemm":  # of sizes alone it is neither of the model's two GEMMs
        return [dataclasses.replace(case, name=case.name.replace("down", "own")) for case in made]
    return made


def multiple_of(shape: Shape, name: str, step: int) -> None:
    """Raise a UsageError unless a size is a multiple of ``step``."""
    if shape.sizes[name] % step:
        raise UsageError(f"--shape is {shape.text!r}, wanted a multiple of {step} as {name}")


def config_of(shape: Shape, fields: Mapping[str, str]) -> ModelConfig:
    """Return a small model's configuration with the sizes in its fields.

    Fields that a size restricts follow: groups of heads, experts, and rotated dimensions.

    Raises:
        UsageError: if no model has such sizes.
    """
    base = ModelConfig.tiny()
    changes: dict[str, int] = {}
    for name, field in fields.items():
        if field.startswith(_TWICE):
            multiple_of(shape, name, 2)
            changes[field.removeprefix(_TWICE)] = shape.sizes[name] // 2
        elif field:
            changes[field] = shape.sizes[name]
    rates = _rates(changes.pop("csa", None), changes.pop("hca", None))
    if "num_attention_heads" in changes:
        changes.setdefault("o_groups", 1)
    if "num_experts_per_tok" in changes:
        least = max(base.n_routed_experts, changes["num_experts_per_tok"])
        changes.setdefault("n_routed_experts", least)
    narrow = min(changes.get(name, 16) for name in ("head_dim", "index_head_dim"))
    changes.setdefault("qk_rope_head_dim", max(2, narrow - narrow % 2))
    rotated = changes["qk_rope_head_dim"]
    changes.setdefault("head_dim", max(base.head_dim, rotated))
    changes.setdefault("index_head_dim", max(32, 1 << (rotated - 1).bit_length()))
    try:
        return base.replace(compress_rates=rates, **changes)
    except ValueError as error:
        raise UsageError(f"--shape is {shape.text!r}: {error}") from error


def _rates(csa: int | None, hca: int | None) -> CompressRates:
    """Rates of the two compressed layer types, which differ."""
    if csa is not None:
        return CompressRates(csa, 8 * csa)
    return CompressRates(4, 8) if hca is None else CompressRates(4 if hca != 4 else 2, hca)
