"""One name for every tensor: DeepSeek's original names and transformers' names, both ways.

The canonical name is transformers' (specification section 10, with the prefix ``model.`` and one
entry per expert: ``model.layers.3.mlp.experts.7.gate_proj.weight``). transformers has no MTP; its
block is ``mtp.<i>.layer.*`` here, beside ``mtp.<i>.{e_proj,h_proj,enorm,hnorm,norm}.weight`` and
``mtp.<i>.hc_head.*``.
"""

from __future__ import annotations

import re

_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"hc_attn_{p}": f"attn_hc.{p}" for p in ("fn", "base", "scale")},
    **{f"hc_ffn_{p}": f"ffn_hc.{p}" for p in ("fn", "base", "scale")},
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": ("self_attn.compressor.indexer.scorer.weights_proj.weight"),
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
}
for _theirs, _ours in (
    ("attn.compressor.", "self_attn.compressor."),
    ("attn.indexer.compressor.", "self_attn.compressor.indexer."),
):
    _BLOCK[_theirs + "wkv.weight"] = _ours + "kv_proj.weight"
    _BLOCK[_theirs + "wgate.weight"] = _ours + "gate_proj.weight"
    _BLOCK[_theirs + "ape"] = _ours + "position_bias"
    _BLOCK[_theirs + "norm.weight"] = _ours + "kv_norm.weight"
_HEAD = {f"hc_head_{p}": f"hc_head.hc_{p}" for p in ("fn", "base", "scale")}
_ROOT = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    **{theirs: "model." + ours for theirs, ours in _HEAD.items()},
}
_MTP = {
    **{f"{p}.weight": f"{p}.weight" for p in ("e_proj", "h_proj", "enorm", "hnorm", "norm")},
    **_HEAD,
}
_EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def _reversed(table: dict[str, str]) -> dict[str, str]:
    return {ours: theirs for theirs, ours in table.items()}


_BLOCK_BACK, _ROOT_BACK, _MTP_BACK, _EXPERT_BACK = map(_reversed, (_BLOCK, _ROOT, _MTP, _EXPERT))
# An indexer of transformers 5.8 and earlier holds the projection itself.
_OLD_INDEXER = re.compile(r"\.compressor\.indexer\.weights_proj\.")
_MTP_COPY = re.compile(r"mtp\.\d+\.(emb[^.]*|head|lm_head|shared_head)\.")
_ORIGINAL_LAYER = re.compile(r"(layers|mtp)\.(\d+)\.(.+)")
_OURS_LAYER = re.compile(r"(model\.layers\.\d+|mtp\.\d+)\.(.+)")
_ORIGINAL_EXPERT = re.compile(r"ffn\.experts\.(\d+)\.(w[123])\.weight")
_OURS_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_ROUTED = re.compile(r"\.mlp\.experts\.(?:\d+\.)?\w+_proj(?:\.weight)?$")
# Float32 whatever the checkpoint (specification section 14).
_FLOAT32 = re.compile(
    r"\.(attn_hc|ffn_hc)\.\w+$|(^|\.)hc_head\.hc_\w+$"
    r"|\.(sinks|position_bias|e_score_correction_bias)$"
)


def is_mtp_copy(name: str) -> bool:
    """Whether a tensor is a second copy of the embedding or head, kept under ``mtp.``."""
    return _MTP_COPY.match(name) is not None


def is_mtp(name: str) -> bool:
    """Whether a canonical name belongs to an MTP layer."""
    return name.startswith("mtp.")


def is_routed(name: str) -> bool:
    """Whether a canonical name is a routed expert's matrix."""
    return _ROUTED.search(name) is not None


def is_float32(name: str) -> bool:
    """Whether a canonical name is one of the tensors kept in float32."""
    return _FLOAT32.search(name) is not None


def is_norm(name: str) -> bool:
    """Whether a canonical name is the weight of a norm, which a cast must not round."""
    return name.endswith("norm.weight")


def is_original(names: list[str]) -> bool:
    """Whether a checkpoint uses DeepSeek's original names."""
    return any(n in _ROOT or n.startswith("layers.") for n in names)


def layer_of(name: str) -> str:
    """The decoder or MTP layer of a canonical name, as a prefix; ``""`` outside the layers."""
    match = _OURS_LAYER.match(name)
    return match.group(1) if match else ""


def from_original(name: str) -> str | None:
    """Canonical name of an original one, or None if it is unknown."""
    if name in _ROOT:
        return _ROOT[name]
    match = _ORIGINAL_LAYER.fullmatch(name)
    if match is None:
        return None
    kind, number, rest = match.groups()
    if kind == "mtp" and rest in _MTP:
        return f"mtp.{number}.{_MTP[rest]}"
    prefix = f"model.layers.{number}." if kind == "layers" else f"mtp.{number}.layer."
    expert = _ORIGINAL_EXPERT.fullmatch(rest)
    if expert is not None:
        return f"{prefix}mlp.experts.{expert.group(1)}.{_EXPERT[expert.group(2)]}.weight"
    return prefix + _BLOCK[rest] if rest in _BLOCK else None


def to_original(name: str) -> str | None:
    """Original name of a canonical one, or None if there is none."""
    if name in _ROOT_BACK:
        return _ROOT_BACK[name]
    match = _OURS_LAYER.fullmatch(name)
    if match is None:
        return None
    prefix, rest = match.groups()
    prefix = prefix.removeprefix("model.")
    if prefix.startswith("mtp."):
        if rest in _MTP_BACK:
            return f"{prefix}.{_MTP_BACK[rest]}"
        if not rest.startswith("layer."):
            return None
        rest = rest.removeprefix("layer.")
    expert = _OURS_EXPERT.fullmatch(rest)
    if expert is not None:
        return f"{prefix}.ffn.experts.{expert.group(1)}.{_EXPERT_BACK[expert.group(2)]}.weight"
    return f"{prefix}.{_BLOCK_BACK[rest]}" if rest in _BLOCK_BACK else None


def from_transformers(name: str) -> str:
    """Canonical name of a transformers name: itself, but for spellings of older versions."""
    return _OLD_INDEXER.sub(".compressor.indexer.scorer.weights_proj.", name)
