"""Canonical names for tensors with DeepSeek's names, transformers' names, or mixtures.

The canonical name is transformers' (specification, section 10, with the prefix ``model.`` and one
entry per expert: ``model.layers.3.mlp.experts.7.gate_proj.weight``). transformers has no MTP; its
block is ``mtp.<i>.layer.*`` here, next to ``mtp.<i>.{e_proj,h_proj,enorm,hnorm,norm}.weight`` and
``mtp.<i>.hc_head.*``. Stages of a DSpark draft have the same names, but for what only it has:
``main_proj`` and ``main_norm`` of the first, ``markov_head`` and ``confidence_head`` of the last.

Files mix the two: transformers and the tools on top of it save original names below transformers'
prefix, ``model.layers.3.attn.wq_a.weight``, and module names that its reverse mapping misses. So
every part of a name is recognised on its own, with or without ``model.``.
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
_DSPARK = (
    *("main_proj.weight", "main_norm.weight", "confidence_head.proj.weight"),
    *("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
)
_MTP = {
    **{f"{p}.weight": f"{p}.weight" for p in ("e_proj", "h_proj", "enorm", "hnorm", "norm")},
    **{name: name for name in _DSPARK},
    **_HEAD,
}
_EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def _reversed(table: dict[str, str]) -> dict[str, str]:
    return {ours: theirs for theirs, ours in table.items()}


_BLOCK_BACK, _ROOT_BACK, _MTP_BACK, _EXPERT_BACK = map(_reversed, (_BLOCK, _ROOT, _MTP, _EXPERT))

# Spellings of parts of a block's names, by their position. The first that fits is used.
_ATTENTION = {
    "attn_sink": "sinks",
    "wq_a": "q_a_proj",
    "q_norm": "q_a_norm",
    "wq_b": "q_b_proj",
    "wkv": "kv_proj",
    "norm": "kv_norm",
    "wo_a": "o_a_proj",
    "wo_b": "o_b_proj",
}
_COMPRESSOR = {"wkv": "kv_proj", "wgate": "gate_proj", "ape": "position_bias", "norm": "kv_norm"}
_INDEXER = {**_COMPRESSOR, "wq_b": "q_b_proj", "weights_proj": "scorer.weights_proj"}
# ``wgate``: if a tool has turned experts into modules, transformers' reverse mapping gives their
# ``gate_proj`` the compressor's original name.
_MLP = {**_EXPERT, "wgate": "gate_proj"}
_SPELLINGS: tuple[tuple[re.Pattern[str], str, dict[str, str]], ...] = (
    (
        re.compile(r"(?:self_attn|attn)\.(?:compressor\.)?indexer\.(?:compressor\.)?(.+)"),
        "self_attn.compressor.indexer.",
        _INDEXER,
    ),
    (re.compile(r"(?:self_attn|attn)\.compressor\.(.+)"), "self_attn.compressor.", _COMPRESSOR),
    (re.compile(r"(?:self_attn|attn)\.(.+)"), "self_attn.", _ATTENTION),
    (re.compile(r"(?:mlp|ffn)\.gate\.(.+)"), "mlp.gate.", {"bias": "e_score_correction_bias"}),
    (re.compile(r"(?:mlp|ffn)\.shared_experts\.(.+)"), "mlp.shared_experts.", _MLP),
)
_PREFIX = re.compile(r"(?:model\.)?(?:(layers|mtp)\.(\d{1,9})\.)?(.+)", re.DOTALL)
_EXPERT_SPELLING = re.compile(r"(?:mlp|ffn)\.experts\.(\d{1,9})\.(\w+)\.weight")
_STACKS = re.compile(r"(?:mlp|ffn)\.experts\.(gate_up_proj|down_proj)")
_ROOT_NAMES = {
    **_ROOT,
    "embed_tokens.weight": "model.embed_tokens.weight",
    "lm_head.weight": "lm_head.weight",
    **{ours: "model." + ours for ours in _HEAD.values()},
}
_MTP_NAMES = {**_MTP, **{ours: ours for ours in _MTP.values()}}
_BLOCK_NAMES = {**_BLOCK, **{ours: ours for ours in _BLOCK.values()}}

_MTP_COPY = re.compile(r"(?:model\.)?mtp\.\d+\.(emb[^.]*|head|lm_head|shared_head)\.")
_DSPARK_PART = re.compile(
    r"(?:model\.)?mtp\.\d+\.(main_proj|main_norm|markov_head|confidence_head)\."
)
_CONFIDENCE = re.compile(r"(?:model\.)?mtp\.\d+\.confidence_head\.")
_OURS_LAYER = re.compile(r"(model\.layers\.\d+|mtp\.\d+)\.(.+)")
_OURS_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_ROUTED = re.compile(r"\.mlp\.experts\.(?:\d+\.)?\w+_proj(?:\.weight)?$")
_PAIRED = re.compile(r"(.*\.mlp\.(?:experts\.\d+|shared_experts)\.)(gate_proj|up_proj)\.weight")
# Scales of quantised KV caches, whose formats this package's cache does not have.
_CACHE_SCALE = re.compile(
    r"(?:model\.)?(?:layers|mtp)\.\d+\.(?:self_attn|attn)\.(?:\w+\.)*(?:q|k|v|kv|prob|p)_scale"
)
# Float32 in every model, whatever the checkpoint has (specification, section 14).
_FLOAT32 = re.compile(
    r"\.(attn_hc|ffn_hc)\.\w+$|(^|\.)hc_head\.hc_\w+$"
    r"|\.(sinks|position_bias|e_score_correction_bias)$"
)


def is_mtp_copy(name: str) -> bool:
    """Return whether a tensor is a second copy of the embedding or head, kept under ``mtp.``."""
    return _MTP_COPY.match(name) is not None


def is_dspark(name: str) -> bool:
    """Return whether a name, of a file or canonical, is of a part that only a DSpark draft has."""
    return _DSPARK_PART.match(name) is not None


def is_confidence(name: str) -> bool:
    """Return whether a name, of a file or canonical, is of a DSpark draft's confidence head."""
    return _CONFIDENCE.match(name) is not None


def is_cache_scale(name: str) -> bool:
    """Return whether a tensor of a file is the scale of a quantised KV cache."""
    return _CACHE_SCALE.fullmatch(name) is not None


def is_mtp(name: str) -> bool:
    """Return whether a canonical name belongs to an MTP layer or a stage of a DSpark draft."""
    return name.startswith("mtp.")


def is_routed(name: str) -> bool:
    """Return whether a canonical name is a routed expert's matrix."""
    return _ROUTED.search(name) is not None


def is_float32(name: str) -> bool:
    """Return whether a canonical name is one of the tensors kept in float32."""
    return _FLOAT32.search(name) is not None


def is_norm(name: str) -> bool:
    """Return whether a canonical name is the weight of a norm, which a cast must not round."""
    return name.endswith("norm.weight")


def pair_of(name: str) -> str | None:
    """Return the canonical name of a gate projection's up projection, or the reverse.

    It is None for all other names. Engines multiply both at once, with one global scale.
    """
    match = _PAIRED.fullmatch(name)
    if match is None:
        return None
    other = "up_proj" if match.group(2) == "gate_proj" else "gate_proj"
    return f"{match.group(1)}{other}.weight"


def layer_of(name: str) -> str:
    """Return the prefix of a canonical name's decoder or MTP layer, or ``""``."""
    match = _OURS_LAYER.match(name)
    return match.group(1) if match else ""


def canonical(name: str) -> str | None:
    """Return the canonical name of a file's tensor in any spelling; None if it is unknown."""
    match = _PREFIX.fullmatch(name)
    if match is None:
        return None
    kind, number, rest = match.groups()
    if kind is None:
        return _ROOT_NAMES.get(rest)
    if kind == "layers":
        inner = _block(rest)
        return None if inner is None else f"model.layers.{int(number)}.{inner}"
    if rest in _MTP_NAMES:
        return f"mtp.{int(number)}.{_MTP_NAMES[rest]}"
    inner = _block(rest.removeprefix("layer."))
    return None if inner is None else f"mtp.{int(number)}.layer.{inner}"


def _block(rest: str) -> str | None:
    """Return the canonical name inside a decoder layer."""
    if rest in _BLOCK_NAMES:
        return _BLOCK_NAMES[rest]
    expert = _EXPERT_SPELLING.fullmatch(rest)
    if expert is not None:
        projection = _MLP.get(expert.group(2), expert.group(2))
        known = projection in _EXPERT_BACK
        return f"mlp.experts.{int(expert.group(1))}.{projection}.weight" if known else None
    stack = _STACKS.fullmatch(rest)
    if stack is not None:
        return f"mlp.experts.{stack.group(1)}"
    for pattern, prefix, spellings in _SPELLINGS:
        match = pattern.fullmatch(rest)
        if match is not None:
            part, dot, last = match.group(1).partition(".")
            spelled = f"{prefix}{spellings.get(part, part)}{dot}{last}"
            return spelled if spelled in _BLOCK_BACK else None
    return None


def to_original(name: str) -> str | None:
    """Return the original name of a canonical one, or None if there is none."""
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
