"""Reading and writing the fields of a config.json, for ``dsv4.config``.

Four producers write them (specification sections 1, 10 and 11.5). Every field of a file is either
read, checked against the one value that is implemented, known to have no effect here, or an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4.config import ModelConfig, RopeParameters

SLIDING = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"

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
# Fields whose other values are not implemented: the values accepted.
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
}
# Fields about training, generation defaults, or the file itself.
IGNORED = frozenset(
    (
        "_name_or_path",
        "architectures",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "auto_map",
        "use_cache",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "output_router_logits",
        "is_encoder_decoder",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "problem_type",
        "pad_token_id",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
        "pretraining_tp",
        "intermediate_size",
        "quantization_config",
        "compression_config",
        "attn_implementation",
        "_attn_implementation",
        "experts_implementation",
        "_experts_implementation",
        "tokenizer_class",
        "unsloth_fixed",
    )
)
# The draft head of the 0731 and 0813 releases, which is not built here.
IGNORED_PREFIXES = ("dspark_",)
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
ALIASES = {"num_local_experts": "n_routed_experts"}
KNOWN = frozenset((*REQUIRED, *OPTIONAL, *FIXED, *IGNORED, *SCHEDULE, *ROPE, *ALIASES))


def parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of ModelConfig, with ropes and rates still as plain values.

    Raises:
        ValueError: naming every missing, unknown or contradictory field.
    """
    problems = [
        *_unknown(values),
        *_fixed_problems(values),
        *_missing(values),
        *_alias_problems(values),
    ]
    found = {name: values[name] for name in (*REQUIRED, *OPTIONAL) if name in values}
    if not found.get("swiglu_limit"):
        found["swiglu_limit"] = None  # DeepSeek's code writes "no clamp" as 0
    if not problems:
        found["compress_rates"] = _read_rates(values, problems)
        found["layer_types"] = _layer_types(values, found["compress_rates"], problems)
        found["mlp_layer_types"] = _mlp_layer_types(values, problems)
        found.update(_ropes(values, problems))
    if problems:
        raise ValueError("config.json: " + "; ".join(problems))
    return found


def _unknown(values: Mapping[str, Any]) -> list[str]:
    names = [k for k in values if k not in KNOWN and not str(k).startswith(IGNORED_PREFIXES)]
    return [f"unknown field {name}" for name in sorted(names)]


def _fixed_problems(values: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} is {values[name]!r}, wanted {' or '.join(map(repr, wanted))}"
        for name, wanted in FIXED.items()
        if name in values and values[name] not in wanted
    ]


def _missing(values: Mapping[str, Any]) -> list[str]:
    lost = [f"{name} is missing" for name in REQUIRED if name not in values]
    alternatives = (
        (("compress_ratios", "layer_types"), "there is no default layer schedule"),
        (("num_hash_layers", "mlp_layer_types"), "there is no default routing schedule"),
        (("qk_rope_head_dim", "partial_rotary_factor"), "the rotated width is not known"),
    )
    for names, why in alternatives:
        if all(values.get(name) is None for name in names):
            lost.append(f"{' and '.join(names)} are both missing: {why}, one of them must be given")
    return lost


def _alias_problems(values: Mapping[str, Any]) -> list[str]:
    return [
        f"{alias} is {values[alias]}, which contradicts {name} ({values[name]})"
        for alias, name in ALIASES.items()
        if alias in values and name in values and values[alias] != values[name]
    ]


def rates(table: Mapping[str, int]) -> tuple[int, int]:
    """(CSA rate, HCA rate) of transformers' ``compress_rates``, which must name just these two."""
    if set(table) != {CSA, HCA}:
        raise ValueError(f"compress_rates names {sorted(table)}, wanted {CSA} and {HCA}")
    return int(table[CSA]), int(table[HCA])


def _read_rates(values: Mapping[str, Any], problems: list[str]) -> tuple[int, int]:
    table = values.get("compress_rates")
    csa, hca = rates(table) if table is not None else (4, 128)
    for name, current in (("compress_rate_csa", csa), ("compress_rate_hca", hca)):
        given = values.get(name)
        if table is not None and given is not None and given != current:
            problems.append(f"{name} is {given}, which contradicts compress_rates ({current})")
    return values.get("compress_rate_csa") or csa, values.get("compress_rate_hca") or hca


def _layer_types(
    values: Mapping[str, Any], compress_rates: tuple[int, int], problems: list[str]
) -> tuple[str, ...]:
    types = values.get("layer_types")
    ratios = values.get("compress_ratios")
    if ratios is None:
        return tuple(types or ())
    by_ratio = {0: SLIDING, compress_rates[0]: CSA, compress_rates[1]: HCA}
    strange = sorted({str(r) for r in ratios if r not in by_ratio})
    if strange:
        wanted = ", ".join(map(str, by_ratio))
        problems.append(f"compress_ratios holds {', '.join(strange)}, wanted {wanted}")
        return ()
    count = values["num_hidden_layers"]
    total = count + values.get("num_nextn_predict_layers", 0)
    if len(ratios) < total:
        problems.append(
            f"compress_ratios has {len(ratios)} entries, wanted at least {total} "
            "(num_hidden_layers + num_nextn_predict_layers)"
        )
    if any(ratios[count:]):
        problems.append(
            f"compress_ratios is {list(ratios[count:])} after the main layers, wanted zeros: "
            "MTP layers use sliding-window attention"
        )
    from_ratios = tuple(by_ratio[r] for r in ratios[:count])
    if types is not None and tuple(types) != from_ratios:
        problems.append("layer_types contradicts compress_ratios")
    return from_ratios


def _mlp_layer_types(values: Mapping[str, Any], problems: list[str]) -> tuple[str, ...]:
    types = values.get("mlp_layer_types")
    hashed = values.get("num_hash_layers")
    if hashed is None:
        return tuple(types or ())
    count = values["num_hidden_layers"]
    from_count = tuple("hash_moe" if i < hashed else "moe" for i in range(count))
    if types is not None and tuple(types) != from_count:
        problems.append(f"mlp_layer_types contradicts num_hash_layers ({hashed})")
    return from_count


def _ropes(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    nested = values.get("rope_parameters") or {}
    scaling = values.get("rope_scaling")
    if "main" in nested or "compress" in nested:
        main, compress = dict(nested.get("main") or {}), dict(nested.get("compress") or {})
    else:
        main, compress = {}, dict(nested or scaling or {})
        if nested and scaling is not None and scaling != nested:
            problems.append("rope_scaling contradicts rope_parameters")
        compress.pop("rope_theta", None)
    dim = _rope_dim(values, (main, compress), problems)
    theta = _theta("rope_theta", values, main, problems)
    compress_theta = _theta("compress_rope_theta", values, compress, problems)
    if main.get("rope_type", main.get("type", "default")) != "default":
        problems.append(f"rope_parameters.main is {main}, wanted rope_type 'default'")
    return {
        "qk_rope_head_dim": dim,
        "rope_main": {"theta": theta, "dim": dim},
        "rope_compress": {"theta": compress_theta, "dim": dim, **_yarn(compress, problems)},
    }


def _rope_dim(
    values: Mapping[str, Any], tables: tuple[Mapping[str, Any], ...], problems: list[str]
) -> int:
    head_dim = values["head_dim"]
    dim = values.get("qk_rope_head_dim")
    if dim is None:
        dim = round(head_dim * values["partial_rotary_factor"])
    for table in (values, *tables):
        factor = table.get("partial_rotary_factor")
        if factor is not None and round(head_dim * factor) != dim:
            problems.append(
                f"partial_rotary_factor is {factor}, which contradicts qk_rope_head_dim ({dim}) "
                f"with head_dim {head_dim}"
            )
    return dim


def _theta(
    name: str, values: Mapping[str, Any], table: Mapping[str, Any], problems: list[str]
) -> float:
    nested, flat = table.get("rope_theta"), values.get(name)
    if nested is None and flat is None:
        problems.append(f"{name} is missing")
        return 10000.0
    if nested is not None and flat is not None and nested != flat:
        problems.append(f"{name} is {flat}, which contradicts rope_parameters ({nested})")
    return float(flat if nested is None else nested)  # type: ignore[arg-type]


_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}


def _yarn(table: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    kinds = {table[k] for k in ("type", "rope_type") if table.get(k) is not None} or {"default"}
    if kinds == {"default"}:
        return {}
    if kinds != {"yarn"}:
        problems.append(f"rope_scaling type is {', '.join(sorted(kinds))}, wanted yarn")
        return {}
    lost = [k for k in ("factor", "original_max_position_embeddings") if k not in table]
    problems.extend(f"rope_scaling lacks {name}" for name in lost)
    problems.extend(_yarn_extras(table))
    return {ours: table[theirs] for theirs, ours in _YARN.items() if table.get(theirs) is not None}


def _yarn_extras(table: Mapping[str, Any]) -> list[str]:
    """Fields that would change the amplitude, which this model never scales (trap T2)."""
    problems = []
    if table.get("attention_factor") not in (None, 1.0):
        problems.append(f"attention_factor is {table['attention_factor']}, wanted 1.0")
    if table.get("truncate") not in (None, True):
        problems.append(f"truncate is {table['truncate']}, wanted True")
    if table.get("mscale") != table.get("mscale_all_dim"):
        problems.append(
            f"mscale is {table.get('mscale')} and mscale_all_dim {table.get('mscale_all_dim')}, "
            "wanted them equal: cos and sin are not scaled"
        )
    harmless = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "attention_factor"}
    known = harmless | {"truncate", "mscale", "mscale_all_dim"} | set(_YARN)
    problems.extend(f"unknown field rope_scaling.{k}" for k in sorted(set(table) - known))
    return problems


def _common(config: ModelConfig) -> dict[str, Any]:
    names = [n for n in (*REQUIRED, *OPTIONAL) if n != "swiglu_limit"]
    values = {name: getattr(config, name) for name in names}
    if isinstance(config.eos_token_id, tuple):
        values["eos_token_id"] = list(config.eos_token_id)
    fixed = ("model_type", "scoring_func", "norm_topk_prob", "hidden_act", "attention_bias")
    values.update({name: FIXED[name][0] for name in (*fixed, "tie_word_embeddings")})
    values["swiglu_limit"] = config.swiglu_limit or 0.0
    values["architectures"] = ["DeepseekV4ForCausalLM"]
    values["rope_theta"] = config.rope_main.theta
    values["compress_rope_theta"] = config.rope_compress.theta
    return values


def _yarn_dict(rope: RopeParameters, key: str) -> dict[str, Any]:
    if rope.factor is None:
        return {key: "default"}
    return {key: "yarn", **{theirs: getattr(rope, ours) for theirs, ours in _YARN.items()}}


def deepseek_style(config: ModelConfig) -> dict[str, Any]:
    """Fields as DeepSeek and NVIDIA name them; see ``ModelConfig.to_dict``.

    ``compress_ratios`` knows the rates 0, 4 and 128 and ``num_hash_layers`` only a prefix, so a
    schedule outside these also gets transformers' fields.
    """
    values = _common(config)
    by_type = {SLIDING: 0, CSA: config.compress_rates.csa, HCA: config.compress_rates.hca}
    values["compress_ratios"] = [by_type[t] for t in config.layer_types]
    values["compress_ratios"] += [0] * config.num_nextn_predict_layers
    hashed = config.mlp_layer_types.count("hash_moe")
    if all(kind == "hash_moe" for kind in config.mlp_layer_types[:hashed]):
        values["num_hash_layers"] = hashed
    else:
        values["mlp_layer_types"] = list(config.mlp_layer_types)
    if (config.compress_rates.csa, config.compress_rates.hca) != (4, 128):
        values["compress_rates"] = dict(config.compress_rates)
    scaled = config.rope_compress.factor is not None
    values["rope_scaling"] = _yarn_dict(config.rope_compress, "type") if scaled else None
    values["qk_rope_head_dim"] = config.qk_rope_head_dim
    values["topk_method"] = "noaux_tc"
    values["torch_dtype"] = "bfloat16"
    return values


def transformers_style(config: ModelConfig) -> dict[str, Any]:
    """Fields as transformers names them; see ``ModelConfig.to_transformers_dict``."""
    values = _common(config)
    partial = config.qk_rope_head_dim / config.head_dim
    if int(config.head_dim * partial) != config.qk_rope_head_dim:
        partial = math.nextafter(partial, 1.0)  # transformers truncates the product
    main = {
        "rope_type": "default",
        "rope_theta": config.rope_main.theta,
        "partial_rotary_factor": partial,
    }
    compress = {
        **_yarn_dict(config.rope_compress, "rope_type"),
        "rope_theta": config.rope_compress.theta,
        "partial_rotary_factor": partial,
    }
    if config.rope_compress.factor is not None:
        compress["attention_factor"] = 1.0
    values.update(
        layer_types=list(config.layer_types),
        mlp_layer_types=list(config.mlp_layer_types),
        compress_rates=dict(config.compress_rates),
        rope_parameters={"main": main, "compress": compress},
        partial_rotary_factor=partial,
        dtype="bfloat16",
    )
    return values


def producer(values: Mapping[str, Any]) -> str:
    """Who quantised the checkpoint of this config.json.

    Returns:
        ``"nvidia"`` (``moe_quant_algo`` NVFP4: quant_method still says fp8, specification section
        11.5b), ``"compressed-tensors"``, ``"modelopt"``, ``"deepseek"`` (fp8) or ``"none"``.

    Raises:
        ValueError: if quantization_config names a method that is none of these.
    """
    table = values.get("quantization_config") or values.get("compression_config") or {}
    method = table.get("quant_method")
    if table.get("moe_quant_algo") is not None:
        if table["moe_quant_algo"] != "NVFP4":
            raise ValueError(
                f"config.json: moe_quant_algo is {table['moe_quant_algo']!r}, wanted 'NVFP4'"
            )
        return "nvidia"
    known = {
        "compressed-tensors": "compressed-tensors",
        "modelopt": "modelopt",
        "modelopt_fp4": "modelopt",
        "fp8": "deepseek",
        None: "none",
    }
    if method not in known:
        raise ValueError(
            f"config.json: quantization_config.quant_method is {method!r}, "
            f"wanted one of {', '.join(str(k) for k in known)}"
        )
    return known[method]
