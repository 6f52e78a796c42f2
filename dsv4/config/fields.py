"""The fields of a config.json: which are read, fixed, without effect, or not supported.

A field that this table does not know is judged by its name. It is an error if the name mentions a
part of the model (a head, a norm, an expert, a rank): such a field may change the mathematics, and
a model that ignores it computes nonsense without an error. Any other unknown field (a run's name, a
tokenizer's id, a tool's version) cannot, and would only keep a sound checkpoint from loading: it is
ignored, and a warning names it once. A field whose value is null is not set, whatever its name.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

from dsv4.config.json_file import show

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "routed_scaling_factor",
    "swiglu_limit",
    "hc_mult",
    "hc_sinkhorn_iters",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "max_position_embeddings",
)
OPTIONAL = (
    "num_nextn_predict_layers",
    "num_key_value_heads",
    "n_shared_experts",
    "rms_norm_eps",
    "hc_eps",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
)
NUMBERS = ("routed_scaling_factor", "rms_norm_eps", "hc_eps", "initializer_range")
TOKEN_IDS = ("bos_token_id", "eos_token_id")
MAY_BE_ZERO = ("num_hidden_layers", "num_nextn_predict_layers")
INTEGERS = tuple(
    name for name in (*REQUIRED, *OPTIONAL) if name not in (*NUMBERS, *TOKEN_IDS, "swiglu_limit")
)
MAX_INTEGER = 2**31 - 1
# Fields of which only these values are implemented.
FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("deepseek_v4",),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, None),
    "tie_word_embeddings": (False,),
    "n_group": (1, 0, None),
    "topk_group": (1, 0, None),
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
    "num_key_value_heads": (1,),
    "n_shared_experts": (1,),
    "expert_dtype": ("fp4", "fp8", "bf16", None),
    "markov_head_type": ("vanilla", None),
    "sample_from_anchor": (True, None),
}
SCHEDULE = (
    "compress_ratios",
    "layer_types",
    "compress_rates",
    "compress_rate_csa",
    "compress_rate_hca",
    "num_hash_layers",
    "mlp_layer_types",
)
ROPE = (
    "rope_theta",
    "compress_rope_theta",
    "rope_scaling",
    "rope_parameters",
    "qk_rope_head_dim",
    "partial_rotary_factor",
)
# The draft of the 0731 and 0813 releases, see ``dsv4.config.dspark``.
DSPARK_REQUIRED = (
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_markov_rank",
)
DSPARK_EXPERTS = ("dspark_n_routed_experts", "dspark_num_experts_per_tok")
DSPARK = (*DSPARK_REQUIRED, *DSPARK_EXPERTS, "enable_confidence_head")
ALIASES = {"num_local_experts": "n_routed_experts"}
# Fields about training, generation, a tool, or the file itself. The rule below would refuse their
# names, or they are too common to warn about.
IGNORED = frozenset(
    re.findall(
        r"\w+",
        """
    _name_or_path _commit_hash architectures transformers_version torch_dtype dtype auto_map
    use_cache return_dict return_dict_in_generate output_hidden_states output_attentions
    output_router_logits output_scores is_encoder_decoder is_decoder add_cross_attention
    cross_attention_hidden_size tie_encoder_decoder chunk_size_feed_forward id2label label2id
    problem_type finetuning_task task_specific_params prefix pruned_heads torchscript tf_legacy_loss
    use_bfloat16 pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id
    forced_eos_token_id router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux ep_size
    pretraining_tp intermediate_size quantization_config compression_config attn_implementation
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal
    experts_implementation _experts_implementation tokenizer_class packed_modules_mapping
    unsloth_fixed unsloth_version max_length min_length do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids suppress_tokens
    begin_suppress_tokens num_return_sequences exponential_decay_length_penalty
    remove_invalid_values
    """,
    )
)
KNOWN = frozenset((*REQUIRED, *OPTIONAL, *FIXED, *IGNORED, *SCHEDULE, *ROPE, *ALIASES, *DSPARK))
# Words of field names that speak of a part of the model.
_PARTS = frozenset(
    re.findall(
        r"\w+",
        """
    act activation alpha alibi attention attn beta bias block cap chunk clamp compress
    compressed conv cross dense depth dilation dim dims dspark embed embedding embeddings
    engram eps epsilon expert experts factor ffn freq gate gated gates gating group groups hash
    hc head heads hidden hyper inner index indexer inter intermediate intermediates interleave
    interleaved k kernel kv lambda latent layer layernorm layers limit limits linear local logit
    logits lora lm mask mhc mlp mix mixer modulation moe mrope mtp mult multiplier nextn ngram
    norm normalization normalize nope o pattern patterns position positional positions proj
    projection q qk query rank ranks rate rates ratio ratios residual rms rope rotary route
    routed router routing scale scales scaling score scores scoring shared sink sinkhorn sinks
    sliding softcap softcapping softmax sparse sparsity ssm stride swiglu temperature theta tie
    tied top topk v vision vocab width window windows yarn
    """,
    )
)
_ANOTHER = "DeepSeek-V4.1"
_V41_FIELDS = re.compile(
    r"engram_\w+|kv_source_layer_ids|index_source_layer_ids|candidate_source_layer_ids?"
)
_V41 = (
    f"{_ANOTHER} is another architecture (40 layers, hidden size 5120, 384 experts, single-pass "
    "hyper-connections, Engram tables), which is not implemented here"
)


def another_model(values: Mapping[str, Any]) -> str | None:
    """Return a sentence that says that a file is another architecture's; None if it is not."""
    expected = FIXED["model_type"][0]
    kind = values.get("model_type", expected)
    if isinstance(kind, str) and kind.startswith("deepseek_v41"):
        return f"model_type is {show(kind)}, wanted {expected!r}: {_V41}"
    if kind != expected:
        return f"model_type is {show(kind)}, wanted {expected!r}"
    alien = sorted(str(name) for name in values if _V41_FIELDS.fullmatch(str(name)))
    alien = [name for name in alien if values[name] is not None]
    if alien:
        return f"{alien[0]} is a field of {_ANOTHER}, wanted those of {expected!r}: {_V41}"
    classes = values.get("architectures")
    ours = isinstance(classes, list) and any(str(n).startswith("DeepseekV4") for n in classes)
    if "model_type" not in values and classes and not ours:
        return f"architectures is {show(classes)}, wanted DeepseekV4ForCausalLM"
    return None


def unknown(values: Mapping[str, Any]) -> list[str]:
    """Return problems: fields that are not known and may change the mathematics.

    Other unknown fields are named in a warning, which Python shows once.
    """
    names = [str(name) for name, value in values.items() if name not in KNOWN and value is not None]
    refused = sorted(name for name in names if _speaks_of_the_model(name))
    harmless = sorted(show(name) for name in set(names).difference(refused))
    if harmless:
        count = f" and {len(harmless) - 20} more" if len(harmless) > 20 else ""
        warnings.warn(
            f"config.json: ignored without effect: {', '.join(harmless[:20])}{count}", stacklevel=1
        )
    shown = [f"unknown field {show(name)[1:-1]}" for name in refused[:20]]
    if refused:
        shown[-1] += (
            " (by its name it may change what the model computes; remove it if it does not)"
        )
    return shown


def _speaks_of_the_model(name: str) -> bool:
    return not _PARTS.isdisjoint(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower()))


def fixed(values: Mapping[str, Any]) -> list[str]:
    """Return problems: fields whose value is not implemented."""
    return [
        f"{name} is {show(values[name])}, wanted {' or '.join(map(repr, accepted))}"
        for name, accepted in FIXED.items()
        if name in values and not any(_same(values[name], value) for value in accepted)
    ]


def _same(value: Any, expected: Any) -> bool:
    """Compare values, and distinguish True from 1."""
    return isinstance(value, bool) == isinstance(expected, bool) and bool(value == expected)


def is_integer(value: Any, least: int = 0) -> bool:
    """Return whether a value is an integer of 32 bits and not a bool."""
    kind = isinstance(value, int) and not isinstance(value, bool)
    return kind and least <= value <= MAX_INTEGER


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number above 0 and not a bool."""
    kind = isinstance(value, (int, float)) and not isinstance(value, bool)
    return kind and 0 < value < 1e308


def wrong_types(values: Mapping[str, Any]) -> list[str]:
    """Return problems: numeric fields that hold something else."""
    problems = []
    for name in INTEGERS:
        least = 0 if name in MAY_BE_ZERO else 1
        if name in values and not is_integer(values[name], least):
            problems.append(f"{name} is {show(values[name])}, wanted an integer >= {least}")
    for name in NUMBERS:
        if name in values and not is_number(values[name]):
            problems.append(f"{name} is {show(values[name])}, wanted a number > 0")
    return [*problems, *_wrong_ids(values), *_wrong_limit(values)]


def _wrong_ids(values: Mapping[str, Any]) -> list[str]:
    problems = []
    for name in TOKEN_IDS:
        value = values.get(name)
        if value is None or is_integer(value):
            continue
        several = name == "eos_token_id" and isinstance(value, (list, tuple)) and len(value) > 0
        if not (several and all(map(is_integer, value))):
            expected = "an id, a list of ids or null" if name == "eos_token_id" else "an id or null"
            problems.append(f"{name} is {show(value)}, wanted {expected}")
    return problems


def _wrong_limit(values: Mapping[str, Any]) -> list[str]:
    """Check SwiGLU's limit: 0 is no clamp to DeepSeek's code, and a clamp at 0 to transformers."""
    value = values.get("swiglu_limit")
    if value is None or is_number(value):
        return []
    zero = not isinstance(value, bool) and isinstance(value, (int, float)) and value == 0
    why = ": DeepSeek's code reads 0 as no clamp, transformers as a clamp at 0" if zero else ""
    return [f"swiglu_limit is {show(value)}, wanted a number > 0, or null for no clamp{why}"]
