"""Reading and writing the fields of a config.json, for ``dsv4.config``.

Four producers write them (specification, sections 1, 10 and 11.5). Every field of a file is either
read, checked against the one value that is implemented, known to have no effect here, or judged by
its name (``dsv4.config.fields``). A file may be damaged or hostile: types are checked before
values are used, and lengths before a schedule is made of a count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dsv4.config import fields
from dsv4.config.dspark import DSparkConfig, read_dspark
from dsv4.config.fields import FIXED, OPTIONAL, REQUIRED, is_integer, is_number
from dsv4.config.json_file import show
from dsv4.config.layer_types import CSA, HCA, SLIDING


def parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of ModelConfig, with ropes and rates still as plain values.

    Raises:
        ValueError: naming every missing, unknown or contradictory field, or, for a file of another
            model, that model alone.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"config.json: holds {type(values).__name__}, wanted a table of fields")
    another = fields.another_model(values)
    if another is not None:
        raise ValueError(f"config.json: {another}")
    problems = [
        *fields.unknown(values),
        *fields.fixed(values),
        *_missing(values),
        *fields.wrong_types(values),
        *_alias_problems(values),
    ]
    known_values = {name: values[name] for name in (*REQUIRED, *OPTIONAL) if name in values}
    if not problems:
        known_values["dspark"] = read_dspark(values, problems)
    if not problems:
        known_values["compress_rates"] = _read_rates(values, problems)
        known_values["layer_types"] = _layer_types(known_values, values, problems)
        known_values["mlp_layer_types"] = _mlp_layer_types(values, problems)
        known_values.update(_ropes(values, problems))
    if problems:
        raise ValueError("config.json: " + "; ".join(problems))
    return known_values


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
        f"{alias} is {show(values[alias])}, which contradicts {name} ({show(values[name])})"
        for alias, name in fields.ALIASES.items()
        if alias in values and name in values and values[alias] != values[name]
    ]


def rates(table: Any) -> tuple[int, int]:
    """(CSA rate, HCA rate) of transformers' ``compress_rates``, which must name just these two."""
    if not isinstance(table, Mapping) or set(table) != {CSA, HCA}:
        names = sorted(map(str, table)) if isinstance(table, Mapping) else table
        raise ValueError(f"compress_rates names {show(names)}, wanted {CSA} and {HCA}")
    for name, rate in table.items():
        if not is_integer(rate, 1):
            raise ValueError(f"compress_rates.{name} is {show(rate)}, wanted an integer >= 1")
    return table[CSA], table[HCA]


def _read_rates(values: Mapping[str, Any], problems: list[str]) -> tuple[int, int]:
    table = values.get("compress_rates")
    pair = [4, 128]
    try:
        pair = [4, 128] if table is None else list(rates(table))
    except ValueError as error:
        problems.append(str(error))
    for index, name in enumerate(("compress_rate_csa", "compress_rate_hca")):
        rate = values.get(name)
        if rate is None:
            continue
        if not is_integer(rate, 1):
            problems.append(f"{name} is {show(rate)}, wanted an integer >= 1 or null")
        elif table is not None and rate != pair[index]:
            problems.append(f"{name} is {rate}, which contradicts compress_rates ({pair[index]})")
        else:
            pair[index] = rate
    return pair[0], pair[1]


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    )


def _types(values: Mapping[str, Any], name: str, problems: list[str]) -> tuple[str, ...] | None:
    """A schedule given as a list of names, one for each layer."""
    types, count = values.get(name), values["num_hidden_layers"]
    if types is None:
        return None
    if not _is_list_of(types, str):
        problems.append(f"{name} is {show(types)}, wanted a list of names")
    elif len(types) != count:
        problems.append(f"{name} has {len(types)} entries, num_hidden_layers is {count}")
    else:
        return tuple(types)
    return None


def _layer_types(
    known_values: Mapping[str, Any], values: Mapping[str, Any], problems: list[str]
) -> tuple[str, ...]:
    compress_rates, dspark = known_values["compress_rates"], known_values["dspark"]
    types = _types(values, "layer_types", problems)
    ratios = values.get("compress_ratios")
    if ratios is None:
        return types or ()
    if not _is_list_of(ratios, int):
        problems.append(f"compress_ratios is {show(ratios)}, wanted a list of integers")
        return ()
    by_ratio = {0: SLIDING, compress_rates[0]: CSA, compress_rates[1]: HCA}
    strange = sorted({show(r) for r in ratios if r not in by_ratio})
    if strange:
        known = ", ".join(map(str, by_ratio))
        problems.append(f"compress_ratios holds {', '.join(strange[:6])}, wanted {known}")
        return ()
    count = values["num_hidden_layers"]
    problems.extend(_length_problems(len(ratios), count, values, dspark))
    if any(ratios[count:]):
        problems.append(
            f"compress_ratios is {show(list(ratios[count:]))} after the main layers, wanted zeros: "
            "MTP layers use sliding-window attention"
        )
    from_ratios = tuple(by_ratio[r] for r in ratios[:count])
    if values.get("layer_types") is not None and types != from_ratios:
        problems.append("layer_types contradicts compress_ratios")
    return from_ratios


def _length_problems(
    length: int, count: int, values: Mapping[str, Any], dspark: DSparkConfig | None
) -> list[str]:
    """Return what is wrong with the length of compress_ratios, which have draft layers, too.

    num_nextn_predict_layers of published DSpark checkpoints is 1, whatever their stages are.
    """
    if dspark is None:
        total = count + values.get("num_nextn_predict_layers", 0)
        fits, asked = length >= total, f"at least {total} (num_hidden_layers + num_nextn_predict"
        return [] if fits else [f"compress_ratios has {length} entries, wanted {asked}_layers)"]
    if length == count + dspark.stages:
        return []
    return [
        f"compress_ratios has {length} entries, which contradicts num_hidden_layers ({count}) and "
        f"the {dspark.stages} stages of dspark_target_layer_ids"
    ]


def _mlp_layer_types(values: Mapping[str, Any], problems: list[str]) -> tuple[str, ...]:
    types = _types(values, "mlp_layer_types", problems)
    hashed = values.get("num_hash_layers")
    if hashed is None:
        return types or ()
    if not is_integer(hashed):
        problems.append(f"num_hash_layers is {show(hashed)}, wanted an integer >= 0")
    if problems:  # the count of layers may be anything while its schedule contradicts it
        return ()
    count = values["num_hidden_layers"]
    from_count = tuple("hash_moe" if i < hashed else "moe" for i in range(count))
    if types is not None and types != from_count:
        problems.append(f"mlp_layer_types contradicts num_hash_layers ({hashed})")
    return from_count


def _ropes(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    main, compress = _rope_tables(values, problems)
    dim = _rope_dim(values, (main, compress), problems)
    theta = _theta("rope_theta", values, main, problems)
    compress_theta = _theta("compress_rope_theta", values, compress, problems)
    if main and _kind("rope_parameters.main", main, problems) not in (None, "default"):
        problems.append(f"rope_parameters.main is {show(main)}, wanted rope_type 'default'")
    yarn = _yarn(compress, problems) if compress else {}
    return {
        "qk_rope_head_dim": dim,
        "rope_main": {"theta": theta, "dim": dim},
        "rope_compress": {"theta": compress_theta, "dim": dim, **yarn},
    }


def _rope_tables(
    values: Mapping[str, Any], problems: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables of main and of compressed layers, empty where a file has none.

    DeepSeek's ``rope_scaling`` is null or YaRN's table. transformers' ``rope_parameters`` holds two
    tables, or, in files of older releases, YaRN's alone.
    """
    tables: dict[str, dict[str, Any]] = {}
    for name in ("rope_parameters", "rope_scaling"):
        table = values.get(name)
        if table is not None and not (isinstance(table, Mapping) and table):
            problems.append(f"{name} is {show(table)}, wanted a table with its type, or null")
        elif table is not None:
            tables[name] = dict(table)
    nested = tables.get("rope_parameters", {})
    scaling = tables.get("rope_scaling", {})
    if "main" not in nested and "compress" not in nested:
        if nested and scaling and scaling != nested:
            problems.append("rope_scaling contradicts rope_parameters")
        return {}, _flat(values, nested or scaling, problems)
    pair = []
    for name in ("main", "compress"):
        table = nested.pop(name, None)
        if not (isinstance(table, Mapping) and table):
            problems.append(f"rope_parameters.{name} is {show(table)}, wanted a table")
            table = {}
        pair.append(dict(table))
    # transformers drops what it finds in addition to the two tables.
    problems.extend(f"unknown field rope_parameters.{show(k)[1:-1]}" for k in nested)
    if scaling and any(scaling.get(k) != pair[1].get(k) for k in _YARN):
        problems.append("rope_scaling contradicts rope_parameters")
    return pair[0], pair[1]


def _flat(values: Mapping[str, Any], table: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """YaRN's table alone: its theta, if it has one, repeats one of the two next to it."""
    theta = table.pop("rope_theta", None)
    thetas = [values.get("rope_theta"), values.get("compress_rope_theta")]
    if theta is not None and theta not in thetas:
        problems.append(f"rope_theta of the rope table is {show(theta)}, wanted one of {thetas}")
    return table


def _rope_dim(
    values: Mapping[str, Any], tables: tuple[Mapping[str, Any], ...], problems: list[str]
) -> int:
    head_dim = values["head_dim"]
    dim = values.get("qk_rope_head_dim")
    factors = [table.get("partial_rotary_factor") for table in (values, *tables)]
    strange = [factor for factor in factors if factor is not None and not is_number(factor)]
    problems.extend(f"partial_rotary_factor is {show(f)}, wanted a number > 0" for f in strange)
    if dim is not None and not (is_integer(dim, 2) and dim % 2 == 0):
        problems.append(f"qk_rope_head_dim is {show(dim)}, wanted an even number >= 2")
    if problems:
        return 2
    if dim is None:
        dim = round(head_dim * values["partial_rotary_factor"])
    for factor in factors:
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
    theta = flat if nested is None else nested
    if theta is None:
        problems.append(f"{name} is missing")
    elif not (is_number(theta) and theta > 1):
        problems.append(f"{name} is {show(theta)}, wanted a number > 1")
    elif nested is not None and flat is not None and nested != flat:
        problems.append(f"{name} is {show(flat)}, which contradicts rope_parameters ({nested})")
    else:
        return float(theta)
    return 10000.0


_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
_ROPE_KNOWN = frozenset(
    (
        *("type", "rope_type", "rope_theta", "partial_rotary_factor"),
        *("attention_factor", "truncate", "mscale", "mscale_all_dim"),
        *_YARN,
    )
)


def _kind(what: str, table: Mapping[str, Any], problems: list[str]) -> str | None:
    """Return the type that a rope table names, under either of its keys; None after a problem.

    A table without a type is not supported: its numbers are there for a reason, and by default they
    would have no effect.
    """
    kinds = [table[key] for key in ("type", "rope_type") if table.get(key) is not None]
    if not kinds:
        problems.append(f"{what} has no type, wanted type or rope_type 'default' or 'yarn'")
    elif any(kind not in ("default", "yarn") for kind in kinds) or len(set(kinds)) > 1:
        shown = ", ".join(kind if isinstance(kind, str) else show(kind) for kind in kinds)
        problems.append(f"{what} type is {shown[:80]}, wanted yarn or default")
    else:
        return kinds[0]
    return None


def _yarn(table: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    kind = _kind("rope_scaling", table, problems)
    problems.extend(_yarn_extras(table))
    if kind == "default":
        idle = [name for name in _YARN if table.get(name) is not None]
        problems.extend(f"rope_scaling.{name} has no effect with type 'default'" for name in idle)
    if kind != "yarn":
        return {}
    lost = [k for k in ("factor", "original_max_position_embeddings") if k not in table]
    problems.extend(f"rope_scaling lacks {name}" for name in lost)
    problems.extend(_yarn_types(table))
    return {ours: table[theirs] for theirs, ours in _YARN.items() if table.get(theirs) is not None}


def _yarn_types(table: Mapping[str, Any]) -> list[str]:
    problems = []
    for name in _YARN:
        value: Any = table.get(name)
        whole = name == "original_max_position_embeddings"
        optional = name in ("beta_fast", "beta_slow")  # null is the default, as in transformers
        if name not in table or (optional and value is None):
            continue
        if whole:
            sound, expected = is_integer(value, 1), "an integer >= 1"
        elif optional:
            sound, expected = is_number(value), "a number > 0"
        else:
            sound, expected = is_number(value) and not value < 1, "a number >= 1"
        if not sound:
            problems.append(f"rope_scaling.{name} is {show(value)}, wanted {expected}")
    return problems


def _yarn_extras(table: Mapping[str, Any]) -> list[str]:
    """Fields that would change the amplitude, which this model never scales (pitfall 2)."""
    problems = []
    factor, truncate = table.get("attention_factor"), table.get("truncate")
    if factor is not None and (isinstance(factor, bool) or factor != 1.0):
        problems.append(f"rope_scaling.attention_factor is {show(factor)}, wanted 1.0")
    if truncate is not None and truncate is not True:
        problems.append(f"rope_scaling.truncate is {show(truncate)}, wanted True")
    if table.get("mscale") != table.get("mscale_all_dim"):
        problems.append(
            f"rope_scaling.mscale is {show(table.get('mscale'))} and mscale_all_dim "
            f"{show(table.get('mscale_all_dim'))}, wanted them equal: cos and sin are not scaled"
        )
    strange = sorted(str(key) for key in table if key not in _ROPE_KNOWN)
    problems.extend(f"unknown field rope_scaling.{show(key)[1:-1]}" for key in strange[:20])
    return problems


def _common(config: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: config[name] for name in (*REQUIRED, *OPTIONAL)}
    if isinstance(config["eos_token_id"], tuple):
        values["eos_token_id"] = list(config["eos_token_id"])
    fixed = ("model_type", "scoring_func", "norm_topk_prob", "hidden_act", "attention_bias")
    values.update({name: FIXED[name][0] for name in (*fixed, "tie_word_embeddings")})
    values["architectures"] = ["DeepseekV4ForCausalLM"]
    values.update(config["dspark"])
    values["rope_theta"] = config["rope_main"]["theta"]
    values["compress_rope_theta"] = config["rope_compress"]["theta"]
    return values


def _yarn_dict(rope: Mapping[str, Any], key: str) -> dict[str, Any]:
    if rope["factor"] is None:
        return {key: "default"}
    return {key: "yarn", **{theirs: rope[ours] for theirs, ours in _YARN.items()}}


def deepseek_style(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields as DeepSeek and NVIDIA name them; see ``ModelConfig.to_dict``.

    ``compress_ratios`` can say the rates 0, 4 and 128, and ``num_hash_layers`` a prefix of the
    layers. A schedule that these cannot express also gets transformers' fields.

    Args:
        config: Fields of a ModelConfig; its ropes as tables, its rates by layer type, the fields
            of its DSpark draft as config.json has them, and ``draft_layers``.
    """
    values, rates_by_type = _common(config), config["compress_rates"]
    by_type = {SLIDING: 0, **rates_by_type}
    values["compress_ratios"] = [by_type[t] for t in config["layer_types"]]
    values["compress_ratios"] += [0] * config["draft_layers"]
    routers = list(config["mlp_layer_types"])
    hashed = routers.count("hash_moe")
    if all(kind == "hash_moe" for kind in routers[:hashed]):
        values["num_hash_layers"] = hashed
    else:
        values["mlp_layer_types"] = routers
    if rates_by_type != {CSA: 4, HCA: 128}:
        values["compress_rates"] = dict(rates_by_type)
    rope = config["rope_compress"]
    values["rope_scaling"] = None if rope["factor"] is None else _yarn_dict(rope, "type")
    values["qk_rope_head_dim"] = config["qk_rope_head_dim"]
    values["topk_method"] = "noaux_tc"
    values["torch_dtype"] = "bfloat16"
    return values


def transformers_style(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields as transformers names them; see ``ModelConfig.to_transformers_dict``.

    Args:
        config: See ``deepseek_style``.
    """
    values, rope = _common(config), config["rope_compress"]
    head_dim, rotated = config["head_dim"], config["qk_rope_head_dim"]
    partial = rotated / head_dim
    if int(head_dim * partial) != rotated:
        partial = math.nextafter(partial, 1.0)  # transformers truncates the product
    main = {
        "rope_type": "default",
        "rope_theta": config["rope_main"]["theta"],
        "partial_rotary_factor": partial,
    }
    compress = {
        **_yarn_dict(rope, "rope_type"),
        "rope_theta": rope["theta"],
        "partial_rotary_factor": partial,
    }
    if rope["factor"] is not None:
        compress["attention_factor"] = 1.0
    values.update(
        layer_types=list(config["layer_types"]),
        mlp_layer_types=list(config["mlp_layer_types"]),
        compress_rates=dict(config["compress_rates"]),
        rope_parameters={"main": main, "compress": compress},
        partial_rotary_factor=partial,
        dtype="bfloat16",
    )
    return values


def producer(values: Mapping[str, Any]) -> str:
    """The tool that quantised the checkpoint of this config.json.

    Returns:
        ``"nvidia"`` (``moe_quant_algo`` NVFP4: quant_method still says fp8, specification,
        section 11.5.2), ``"compressed-tensors"``, ``"modelopt"``, ``"deepseek"`` (fp8) or
        ``"none"``.

    Raises:
        ValueError: if quantization_config names a method that is none of these.
    """
    table = values.get("quantization_config") or values.get("compression_config") or {}
    if not isinstance(table, Mapping):
        raise ValueError(f"config.json: quantization_config is {show(table)}, wanted a table")
    method, routed = table.get("quant_method"), table.get("moe_quant_algo")
    if routed is not None:
        if routed != "NVFP4":
            raise ValueError(f"config.json: moe_quant_algo is {show(routed)}, wanted 'NVFP4'")
        return "nvidia"
    producers = {
        "compressed-tensors": "compressed-tensors",
        "modelopt": "modelopt",
        "modelopt_fp4": "modelopt",
        "fp8": "deepseek",
    }
    if method is None:
        return "none"
    if not isinstance(method, str) or method not in producers:
        raise ValueError(
            f"config.json: quantization_config.quant_method is {show(method)}, "
            f"wanted one of {', '.join(producers)} or null"
        )
    return producers[method]
