"""The model's configuration, read from the config.json of any DeepSeek-V4 checkpoint.

``ModelConfig`` uses the attribute names of transformers' ``DeepseekV4Config`` wherever one exists,
so layers accept either. The values and their meaning are in specification, section 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4.config import config_json
from dsv4.config.dspark import DSparkConfig
from dsv4.config.fields import MAX_INTEGER, is_number
from dsv4.config.json_file import parse, read_bytes, show
from dsv4.config.layer_types import CSA, HCA, LAYER_TYPES, MLP_LAYER_TYPES, SLIDING, CompressRates
from dsv4.config.presets import PRO, TINY, flash_sizes
from dsv4.config.rope_parameters import RopeParameters

NUMERICS = ("deepseek", "transformers")
ACTIVATIONS = ("bf16", "nvfp4", "fp8")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The configuration of one DeepSeek-V4: everything that fixes its shapes and mathematics.

    Field names are those of transformers' ``DeepseekV4Config``; ``rope_main`` and
    ``rope_compress`` stand for its nested ``rope_parameters``. ``numerics`` is ``"deepseek"`` (the
    reference behaviour: FP8 KV, Hadamard and FP4 in the indexer, fp32 routing) or
    ``"transformers"``; ``activation`` is what quantised linears multiply: ``"bf16"``,
    ``"nvfp4"`` or ``"fp8"``.

    ``dspark`` is the draft of the 0731 and 0813 releases, which has the place of MTP layers: then
    ``num_nextn_predict_layers`` is what config.json says and counts nothing.

    ``layer_types`` and ``mlp_layer_types`` have no default, because a model with a wrong schedule
    runs and writes nonsense (pitfall 42). ``swiglu_limit`` None means no clamp.

    Raises:
        TypeError: if a field has the wrong type.
        ValueError: if a field is out of range or two contradict; every problem is named.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float | None
    hc_mult: int
    hc_sinkhorn_iters: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    rope_main: RopeParameters
    rope_compress: RopeParameters
    max_position_embeddings: int
    compress_rates: CompressRates = field(default_factory=CompressRates)
    num_nextn_predict_layers: int = 0
    num_key_value_heads: int = 1
    n_shared_experts: int = 1
    rms_norm_eps: float = 1e-6
    hc_eps: float = 1e-6
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1
    initializer_range: float = 0.02
    numerics: str = "deepseek"
    activation: str = "bf16"
    dspark: DSparkConfig | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.compress_rates, CompressRates):
            rates = config_json.rates(self.compress_rates)
            object.__setattr__(self, "compress_rates", CompressRates(*rates))
        for name in ("layer_types", "mlp_layer_types"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.eos_token_id, list):
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        self._check_numbers()
        problems = [*self._schedule_problems(), *self._shape_problems(), *self._mode_problems()]
        if self.dspark is not None:
            problems += self.dspark.contradictions(vars(self))
        if problems:
            raise ValueError("ModelConfig: " + "; ".join(problems))

    def _check_numbers(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.type == "int":
                least = 0 if f.name in ("num_nextn_predict_layers", "num_hidden_layers") else 1
                if isinstance(value, bool) or not isinstance(value, int):
                    raise TypeError(f"ModelConfig: {f.name} is {value!r}, wanted an integer")
                if value < least:
                    raise ValueError(f"ModelConfig: {f.name} is {show(value)}, wanted >= {least}")
                if value > MAX_INTEGER:
                    most = f"wanted at most {MAX_INTEGER}"
                    raise ValueError(f"ModelConfig: {f.name} is {show(value)}, {most}")
            elif f.type in ("float", "float | None") and value is not None:
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise TypeError(f"ModelConfig: {f.name} is {value!r}, wanted a number")
                if not is_number(value):
                    shown = show(value)
                    raise ValueError(f"ModelConfig: {f.name} is {shown}, wanted a number > 0")

    def _schedule_problems(self) -> Iterator[str]:
        n = self.num_hidden_layers
        for name, allowed in (("layer_types", LAYER_TYPES), ("mlp_layer_types", MLP_LAYER_TYPES)):
            values = getattr(self, name)
            if len(values) != n:
                yield f"{name} has {len(values)} entries, num_hidden_layers is {n}"
            for value in sorted({v for v in values if v not in allowed}, key=str):
                yield f"{name} holds {value!r}, wanted one of {', '.join(allowed)}"
        csa, hca = self.compress_rates.csa, self.compress_rates.hca
        if csa < 1 or hca < 1 or csa == hca:
            yield f"compress_rates are {csa} and {hca}, wanted two different numbers >= 1"

    def _shape_problems(self) -> Iterator[str]:
        if self.num_attention_heads % self.o_groups:
            yield (
                f"num_attention_heads is {self.num_attention_heads}, "
                f"wanted a multiple of o_groups ({self.o_groups})"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            yield (
                f"num_experts_per_tok is {self.num_experts_per_tok}, "
                f"wanted at most n_routed_experts ({self.n_routed_experts})"
            )
        for name in ("head_dim", "index_head_dim"):
            if getattr(self, name) < self.qk_rope_head_dim:
                yield (
                    f"{name} is {getattr(self, name)}, "
                    f"wanted at least qk_rope_head_dim ({self.qk_rope_head_dim})"
                )
        if self.index_head_dim & (self.index_head_dim - 1) or self.index_head_dim % 32:
            yield (
                f"index_head_dim is {self.index_head_dim}, wanted a power of two >= 32 "
                "(the Hadamard transform and its FP4 groups)"
            )
        for name in ("rope_main", "rope_compress"):
            if getattr(self, name).dim != self.qk_rope_head_dim:
                yield (
                    f"{name}.dim is {getattr(self, name).dim}, "
                    f"wanted qk_rope_head_dim ({self.qk_rope_head_dim})"
                )

    def _mode_problems(self) -> Iterator[str]:
        if self.num_key_value_heads != 1:
            yield f"num_key_value_heads is {self.num_key_value_heads}, wanted 1"
        if self.n_shared_experts != 1:
            yield f"n_shared_experts is {self.n_shared_experts}, wanted 1"
        if self.numerics not in NUMERICS:
            yield f"numerics is {self.numerics!r}, wanted one of {', '.join(NUMERICS)}"
        if self.activation not in ACTIVATIONS:
            yield f"activation is {self.activation!r}, wanted one of {', '.join(ACTIVATIONS)}"

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], *, numerics: str = "deepseek", activation: str = "bf16"
    ) -> ModelConfig:
        """Make the configuration that a parsed config.json describes, whichever tool wrote it.

        Reads the fields of DeepSeek's, NVIDIA's, compressed-tensors' and transformers' files
        (specification, sections 1, 10 and 11.5).

        Raises:
            ValueError: naming every missing, unknown or contradictory field at once. A file
                without a layer schedule is an error: there is no default one (pitfall 42).
        """
        fields = config_json.parse(values)
        for name in ("rope_main", "rope_compress"):
            fields[name] = RopeParameters(**fields[name])
        fields["compress_rates"] = CompressRates(*fields["compress_rates"])
        try:
            return cls(**fields, numerics=numerics, activation=activation)
        except ValueError as error:
            if numerics not in NUMERICS or activation not in ACTIVATIONS:
                raise
            raise ValueError(str(error).replace("ModelConfig: ", "config.json: ", 1)) from None

    @classmethod
    def from_json(
        cls, text: str | bytes, *, numerics: str = "deepseek", activation: str = "bf16"
    ) -> ModelConfig:
        """Call ``from_dict`` with the content of a JSON text.

        Raises:
            ValueError: also if it is not strict JSON, or longer or deeper than any published file.
        """
        values = parse(text, "config.json")
        return cls.from_dict(values, numerics=numerics, activation=activation)

    @classmethod
    def from_path(
        cls, path: str | Path, *, numerics: str = "deepseek", activation: str = "bf16"
    ) -> ModelConfig:
        """Call ``from_json`` with a file, or with the config.json in a folder."""
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        values = parse(read_bytes(file), str(file))
        return cls.from_dict(values, numerics=numerics, activation=activation)

    @classmethod
    def of(cls, config: Any, *, numerics: str | None = None) -> ModelConfig:
        """Return ``config`` if it is a ModelConfig, else convert a transformers config.

        Args:
            config: ModelConfig, dict, or an object with ``to_dict()``.
            numerics: Requested numerics; None keeps a ModelConfig's own and means
                ``"transformers"`` for a transformers config.
        """
        if isinstance(config, ModelConfig):
            keep = numerics is None or numerics == config.numerics
            return config if keep else config.replace(numerics=numerics)
        if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
            kind = type(config).__name__
            raise TypeError(f"config is {kind}, wanted a ModelConfig or a DeepseekV4Config")
        values = config if isinstance(config, Mapping) else config.to_dict()
        return cls.from_dict(values, numerics=numerics or "transformers")

    @classmethod
    def pro(cls, **changes: Any) -> ModelConfig:
        """DeepSeek-V4-Pro (specification, section 1)."""
        types = (HCA, HCA, *((CSA, HCA) * 30))[:61]
        return cls(**flash_sizes(types)).replace(**{**PRO, **changes})

    @classmethod
    def flash(cls, **changes: Any) -> ModelConfig:
        """DeepSeek-V4-Flash (specification, section 1)."""
        types = (SLIDING, SLIDING, *((CSA, HCA) * 21))[:43]
        return cls(**flash_sizes(types)).replace(**changes)

    @classmethod
    def tiny(cls, **changes: Any) -> ModelConfig:
        """Make a model of a few hundred thousand parameters with every layer type and router.

        If only ``layer_types`` or ``num_hidden_layers`` is given, the other fields of the schedule
        follow from it: layers cycle through sliding, CSA, HCA, CSA, and the first half routes by
        hash.
        """
        cycle = (SLIDING, CSA, HCA, CSA)
        count = changes.get("num_hidden_layers", len(changes.get("layer_types", cycle)))
        types = tuple(changes.pop("layer_types", (cycle * count)[:count]))
        base = cls(**flash_sizes(types, hash_layers=(count + 1) // 2))
        # A short original context makes YaRN matter at positions that tests reach.
        yarn = RopeParameters(160000.0, 64, 16.0, original_max_position=64)
        return base.replace(rope_compress=yarn).replace(**{**TINY, **changes})

    def replace(self, **changes: Any) -> ModelConfig:
        """Return a copy with some fields changed; the rope tables follow ``qk_rope_head_dim``."""
        dim = changes.get("qk_rope_head_dim", self.qk_rope_head_dim)
        for name in ("rope_main", "rope_compress"):
            if name not in changes and getattr(self, name).dim != dim:
                changes[name] = dataclasses.replace(getattr(self, name), dim=dim)
        return dataclasses.replace(self, **changes)

    def without_draft(self) -> ModelConfig:
        """Return a copy without draft layers."""
        return self.replace(num_nextn_predict_layers=0, dspark=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the config.json of DeepSeek or NVIDIA, without quantization_config."""
        return config_json.deepseek_style(self._plain())

    def to_transformers_dict(self) -> dict[str, Any]:
        """Return the config.json of transformers; ``DeepseekV4Config(**it)`` accepts it.

        It does not if ``swiglu_limit`` is None: for no clamp transformers writes infinity, which
        JSON does not have.
        """
        return config_json.transformers_style(self._plain())

    def _plain(self) -> dict[str, Any]:
        """Return the fields as plain values: ropes as tables, rates by layer type."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("rope_main", "rope_compress"):
            values[name] = dataclasses.asdict(values[name])
        values["dspark"] = {} if self.dspark is None else self.dspark.to_dict()
        values["draft_layers"] = self.draft_layers
        return {**values, "compress_rates": dict(self.compress_rates)}

    @property
    def draft_layers(self) -> int:
        """MTP layers, or stages of a DSpark draft, never both."""
        return self.num_nextn_predict_layers if self.dspark is None else self.dspark.stages

    @property
    def total_layers(self) -> int:
        """Main layers plus draft layers; draft layer i has the number ``num_hidden_layers + i``."""
        return self.num_hidden_layers + self.draft_layers

    @property
    def raw_history(self) -> int:
        """Positions before a sequence's end whose raw KV entries a later token may read.

        A token sees itself and the ``sliding_window - 1`` before it. A DSpark block sees
        ``sliding_window`` positions before its first row.
        """
        return self.sliding_window - (self.dspark is None)

    @property
    def stage(self) -> ModelConfig:
        """The configuration of a DSpark stage's block: this one with the stage's experts."""
        if self.dspark is None:
            raise ValueError("ModelConfig.stage: dspark is None, wanted a DSpark draft")
        experts = self.dspark.n_routed_experts or self.n_routed_experts
        chosen = self.dspark.num_experts_per_tok or self.num_experts_per_tok
        return self.replace(n_routed_experts=experts, num_experts_per_tok=chosen)

    @property
    def nope_head_dim(self) -> int:
        """Dimensions of a head that are not rotated (the first ones)."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def heads_per_group(self) -> int:
        """Attention heads that share one group of the output projection."""
        return self.num_attention_heads // self.o_groups

    def layer_type(self, layer_idx: int) -> str:
        """Return the attention type of a layer; draft layers are ``"sliding_attention"``."""
        self._check_layer(layer_idx)
        return self.layer_types[layer_idx] if layer_idx < self.num_hidden_layers else SLIDING

    def mlp_layer_type(self, layer_idx: int) -> str:
        """Return ``"hash_moe"`` or ``"moe"``; draft layers are ``"moe"``."""
        self._check_layer(layer_idx)
        return self.mlp_layer_types[layer_idx] if layer_idx < self.num_hidden_layers else "moe"

    def compress_rate(self, layer_idx: int) -> int:
        """Return the tokens per compressed entry of a layer, 0 for a sliding-window layer."""
        return self.compress_rates.get(self.layer_type(layer_idx), 0)

    def rope(self, layer_idx: int) -> RopeParameters:
        """Return the layer's rotary table: plain for sliding and draft layers, else YaRN's."""
        return self.rope_compress if self.compress_rate(layer_idx) else self.rope_main

    def is_hash(self, layer_idx: int) -> bool:
        """Return whether the layer routes by token id."""
        return self.mlp_layer_type(layer_idx) == "hash_moe"

    def _check_layer(self, layer_idx: int) -> None:
        if not 0 <= layer_idx < self.total_layers:
            raise ValueError(f"layer_idx is {layer_idx}, wanted 0 to {self.total_layers - 1}")
