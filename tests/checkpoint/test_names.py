"""Names of tensors in any mixture of spellings, and what is said of names that do not fit."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.checkpoint import CheckpointError, load, names
from tests.checkpoint.cases import assert_same_state, calibrated, edit, make_model, saved, state

ATTENTION = {
    "sinks": "attn_sink",
    "q_a_proj.weight": "wq_a.weight",
    "q_a_norm.weight": "q_norm.weight",
    "q_b_proj.weight": "wq_b.weight",
    "kv_proj.weight": "wkv.weight",
    "kv_norm.weight": "norm.weight",
    "o_a_proj.weight": "wo_a.weight",
    "o_b_proj.weight": "wo_b.weight",
}
COMPRESSOR = {
    "kv_proj.weight": "wkv.weight",
    "gate_proj.weight": "wgate.weight",
    "position_bias": "ape",
    "kv_norm.weight": "norm.weight",
}
MLP = {
    "gate_proj.weight": ("w1.weight", "wgate.weight"),
    "up_proj.weight": ("w3.weight",),
    "down_proj.weight": ("w2.weight",),
}


def _products(*parts):
    return ["".join(choice) for choice in itertools.product(*parts)]


def _block() -> dict[str, list[str]]:
    """Spellings inside a decoder layer by canonical name, written out part by part."""
    attention, mlp = ("self_attn.", "attn."), ("mlp.", "ffn.")
    out = {
        "input_layernorm.weight": ["input_layernorm.weight", "attn_norm.weight"],
        "post_attention_layernorm.weight": ["post_attention_layernorm.weight", "ffn_norm.weight"],
        "mlp.gate.weight": _products(mlp, ("gate.weight",)),
        "mlp.gate.e_score_correction_bias": _products(
            mlp, ("gate.",), ("bias", "e_score_correction_bias")
        ),
        "mlp.gate.tid2eid": _products(mlp, ("gate.tid2eid",)),
        "mlp.experts.gate_up_proj": _products(mlp, ("experts.gate_up_proj",)),
    }
    for part in ("attn", "ffn"):
        for leaf in ("fn", "base", "scale"):
            out[f"{part}_hc.{leaf}"] = [f"{part}_hc.{leaf}", f"hc_{part}_{leaf}"]
    for ours, theirs in ATTENTION.items():
        out["self_attn." + ours] = _products(attention, (ours, theirs))
    indexer = _products(attention, ("indexer.", "compressor.indexer."), ("", "compressor."))
    for ours, theirs in COMPRESSOR.items():
        out["self_attn.compressor." + ours] = _products(attention, ("compressor.",), (ours, theirs))
        out["self_attn.compressor.indexer." + ours] = _products(indexer, (ours, theirs))
    for ours, theirs in (("q_b_proj", "wq_b"), ("scorer.weights_proj", "weights_proj")):
        spelled = (f"{ours}.weight", f"{theirs}.weight")
        out[f"self_attn.compressor.indexer.{ours}.weight"] = _products(indexer, spelled)
    for ours, theirs in MLP.items():
        for prefix in ("shared_experts.", "experts.7."):
            out[f"mlp.{prefix}{ours}"] = _products(mlp, (prefix,), (ours, *theirs))
    return out


BLOCK = _block()
ROOT = {
    "model.embed_tokens.weight": ["embed.weight", "embed_tokens.weight"],
    "lm_head.weight": ["head.weight", "lm_head.weight"],
    "model.norm.weight": ["norm.weight"],
    **{f"model.hc_head.hc_{p}": [f"hc_head_{p}", f"hc_head.hc_{p}"] for p in ("fn", "base")},
}
SPELLINGS = {
    **{name: _products(("", "model."), rest) for name, rest in ROOT.items()},
    **{
        f"model.layers.12.{name}": _products(("", "model."), ("layers.12.",), rest)
        for name, rest in BLOCK.items()
    },
    **{
        f"mtp.0.layer.{name}": _products(("", "model."), ("mtp.0.",), ("", "layer."), rest)
        for name, rest in BLOCK.items()
    },
    "mtp.0.hc_head.hc_scale": ["mtp.0.hc_head_scale", "mtp.0.hc_head.hc_scale"],
    "mtp.0.enorm.weight": ["mtp.0.enorm.weight", "model.mtp.0.enorm.weight"],
}
EVERY = {spelling for spellings in SPELLINGS.values() for spelling in spellings}


@given(st.data())
def test_every_spelling_has_its_canonical_name(data):
    name = data.draw(st.sampled_from(sorted(SPELLINGS)))
    spelling = data.draw(st.sampled_from(SPELLINGS[name]))
    assert names.canonical(spelling) == name


def test_all_spellings_are_distinct():
    """No spelling means two tensors."""
    assert len(EVERY) == sum(map(len, SPELLINGS.values())) > 400
    assert {names.canonical(spelling) for spelling in EVERY} == set(SPELLINGS)


@given(st.sampled_from(sorted(make_model().state_dict())))
@example("model.layers.2.mlp.gate.e_score_correction_bias")
def test_original_names_come_back(name):
    original = names.to_original(name)
    assert names.canonical(name) == name
    if original is not None:
        assert names.canonical(original) == name


@given(st.text(max_size=40))
@example("layers.0.attn.extra.weight")
@example("layers.0.ffn.experts.0.w4.weight")
@example("layers.1234567890123.attn_norm.weight")
@example("model.mtp.0")
@example("layers.0.attn.wq_a.weight.weight")
@example("layers.0.mlp.gate_proj.weight")
@example("")
def test_other_names_are_unknown(name):
    assert names.canonical(name) is None or name in EVERY


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return saved(make_model(), tmp_path_factory.mktemp("plain"), layout="nvidia")


@pytest.mark.parametrize("seed", range(3))
def test_a_mixture_of_spellings_loads(plain, tmp_path, seed):
    """Matrices and their scales may even be spelled differently."""
    generator = torch.Generator().manual_seed(seed)
    swaps = [("attn.", "self_attn."), ("ffn.", "mlp."), (".wq_a.", ".q_a_proj.")]
    swaps += [(".w1.", ".gate_proj."), (".attn_sink", ".sinks"), ("layers.", "model.layers.")]

    def change(tensors):
        for name in list(tensors):
            new = name
            for old, other in swaps:
                if old in new and float(torch.rand((), generator=generator)) < 0.5:
                    new = new.replace(old, other, 1)
            tensors[new] = tensors.pop(name)

    for path in plain.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    mixed = load(edit(tmp_path, change), progress=False)
    assert_same_state(state(mixed), state(load(plain, progress=False)))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("layers.0.attn.attn_sink", "model.layers.0.self_attn.sinks"),
        ("layers.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
        ("layers.0.ffn.experts.1.w1.weight", "layers.0.mlp.experts.1.gate_proj.weight"),
        ("layers.0.ffn.experts.1.w1.weight_scale_2", "layers.0.ffn.experts.1.wgate.weight_scale_2"),
        ("layers.0.ffn.experts.1.w1.input_scale", "layers.00.ffn.experts.1.w1.input_scale"),
        ("head.weight", "lm_head.weight"),
        ("mtp.0.attn.wkv.weight", "mtp.0.layer.attn.wkv.weight"),
    ],
)
def test_two_spellings_of_one_tensor_are_an_error_that_names_both(tmp_path, name, other):
    folder = calibrated(tmp_path)
    edit(folder, lambda tensors: tensors.update({other: tensors[name].clone()}))
    with pytest.raises(CheckpointError, match="in two spellings") as error:
        load(folder, progress=False)
    assert f"{name} (" in str(error.value)
    assert f"{other} (" in str(error.value)


def test_a_weight_and_a_packed_weight_are_an_error(tmp_path):
    folder = saved(make_model(), tmp_path, layout="compressed-tensors")
    stem = "model.layers.0.mlp.experts.0.gate_proj"
    edit(folder, lambda t: t.update({stem + ".weight": torch.zeros(32, 64)}))
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight_packed .*: wanted one weight"):
        load(folder, progress=False)


def test_names_of_another_kind_are_shown_where_all_are_missing(plain, tmp_path):
    for path in plain.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    edit(
        tmp_path,
        lambda tensors: [tensors.update({"net." + n: tensors.pop(n)}) for n in list(tensors)],
    )
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, progress=False)
    text = str(error.value)
    assert len(text) < 400
    assert re.search("no tensor has the name of one in a layer; names found instead: net\\.", text)


def test_the_nearest_name_is_shown_for_a_missing_one(plain, tmp_path):
    for path in plain.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    edit(
        tmp_path,
        lambda t: t.update({"layers.1.attn.q_nrm.weight": t.pop("layers.1.attn.q_norm.weight")}),
    )
    with pytest.raises(
        CheckpointError, match=r"nearest names found: layers\.1\.attn\.q_nrm\.weight"
    ):
        load(tmp_path, progress=False)
