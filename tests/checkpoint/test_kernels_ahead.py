"""Loading begins with the kernels of a model before it reads weights, by the headers alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.checkpoint import CheckpointError, load, names, save
from dsv4.checkpoint import kernels_ahead as _kernels_ahead
from dsv4.checkpoint.entries import Entry
from dsv4.compilation import warmup as preparing_kernels
from dsv4.compilation.ahead import KernelsAhead
from dsv4.compilation.kernel_calls import every_call
from dsv4.compilation.listing import Listing
from dsv4.compilation.recipe import Recipe
from dsv4.compilation.target import Target
from dsv4.compilation.warmup import target_of
from dsv4.config import DSparkConfig
from dsv4.cute.runtime import cubin_cache
from dsv4.debug import compilations
from dsv4.layers import HostExperts
from dsv4.layers.step_tokens import STEP_TOKENS
from dsv4.quant.formats import FRAGMENTS, MXFP4, SWIZZLED
from dsv4.testing import strategies
from tests.checkpoint.cases import LAYOUTS, SMALL, edit, make_model, saved
from tests.checkpoint.load_cases import CONFIG, mixed

DSPARK = DSparkConfig(block_size=5, noise_token_id=63, target_layer_ids=(0, 1, 2), markov_rank=8)


class Watched:
    """What loading does, in its order: lists that are begun, and names of entries that are read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: list[Any] = []
        read = Entry.read

        def noted(entry: Entry, *args: Any) -> Any:
            self.done.append(entry.name)
            return read(entry, *args)

        patch.setattr(_kernels_ahead, "impossible", lambda: None)
        patch.setattr(_kernels_ahead.warmup, "target_of", lambda device: Target("sm_90a"))
        patch.setattr(KernelsAhead, "begin", lambda ahead, listing: self.done.append(listing))
        patch.setattr(KernelsAhead, "wait", lambda ahead, progress: self.done.append("wait"))
        patch.setattr(Entry, "read", noted)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def same_lists(listing: Any, model: Any) -> bool:
    """Return whether a list that was begun is the one that ``warmup`` looks for."""
    return repr(listing.recipe) == repr(Recipe.of(model))


@pytest.mark.costly(2)
@given(
    seed=strategies.seeds(),
    formats=st.lists(
        st.sampled_from([None, "nvfp4", "mxfp4", "fp8_block"]), min_size=1, max_size=5
    ),
    activation=st.sampled_from(["bf16", "nvfp4"]),
    layout=st.sampled_from([FRAGMENTS, SWIZZLED]),
    mxfp4=st.sampled_from(["keep", "nvfp4"]),
    dtype=st.sampled_from([None, "float32", "bfloat16"]),
)
@example(1, ["nvfp4"], "bf16", FRAGMENTS, "keep", "bfloat16")
@example(2, ["fp8_block", "nvfp4"], "bf16", FRAGMENTS, "keep", "bfloat16")
@example(3, ["mxfp4"], "nvfp4", SWIZZLED, "nvfp4", None)
@settings(max_examples=6)
def test_the_list_is_that_of_the_filled_model(
    tmp_path_factory, seed, formats, activation, layout, mxfp4, dtype
):
    folder = tmp_path_factory.mktemp("model")
    save(mixed(seed, formats), folder, layout="transformers", plain=("*",), plain_dtype=None)
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch)
        model = load(
            *(folder,),
            activation=activation,
            input_scales="token",
            mxfp4=mxfp4,
            pack=layout,
            dtype=dtype,
            progress=False,
        )
    listing, *others = watched.done
    assert isinstance(listing, Listing), "values are read before"
    assert same_lists(listing, model)
    if layout == FRAGMENTS:  # as Hopper's
        assert set(every_call(model)) == set(every_call(listing.recipe.build("sm_90a")))
    assert (listing.max_tokens, listing.target) == (STEP_TOKENS, Target("sm_90a"))
    assert others[-1] == "wait"
    assert len(others) > len(model.model.layers), "values are read afterwards"


@pytest.mark.parametrize(
    ("layout", "config", "mtp"),
    [
        *((layout, CONFIG, None) for layout in LAYOUTS),
        ("nvidia", CONFIG, False),
        ("deepseek", SMALL.replace(dspark=DSPARK), None),
    ],
)
def test_so_it_is_of_other_layouts(layout, config, mtp, tmp_path, watched):
    folder = saved(make_model(config), tmp_path / "model", layout=layout)
    model = load(folder, mtp=mtp, progress=False, reserve_tokens=9000)
    assert same_lists(watched.done[0], model)
    assert watched.done[0].max_tokens == 9000


def test_weights_that_stay_mxfp4_are_another_list(tmp_path, watched):
    """The kernels that differ are compiled when that is known."""
    model = make_model(SMALL)
    for layer in model.model.layers:
        layer.mlp.experts.quantize(MXFP4)
    save(model, tmp_path / "model", layout="transformers", plain=("*",), plain_dtype=None)
    loaded = load(tmp_path / "model", mxfp4="keep", progress=False)
    assert same_lists(watched.done[0], loaded)


def test_fp8_activations_expect_exact_weights(tmp_path, watched):
    model = make_model(CONFIG)
    folder = saved(model, tmp_path / "model", layout="deepseek")
    loaded = load(folder, activation="fp8", pack=FRAGMENTS, progress=False)
    assert all(counts.is_exact for counts in loaded.load_report.packing.fp8.values())
    assert same_lists(watched.done[0], loaded)


def test_nothing_begins_without_use(tmp_path, watched, monkeypatch):
    folder = saved(make_model(SMALL), tmp_path / "model", layout="nvidia")
    load(folder, prepare=False, progress=False)
    load(folder, host_experts=HostExperts(2, 2), progress=False)
    monkeypatch.setattr(_kernels_ahead.warmup, "target_of", target_of)
    load(folder, progress=False)  # on a CPU
    monkeypatch.setattr(_kernels_ahead, "impossible", lambda: "not here")
    load(folder, progress=False)
    assert all(isinstance(name, str) for name in watched.done)


def test_a_checkpoint_that_does_not_fit_begins_nothing(tmp_path, watched):
    folder = saved(make_model(SMALL), tmp_path / "model", layout="nvidia")
    edit(folder, lambda tensors: tensors.pop(min(tensors)))
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load(folder, progress=False)
    assert watched.done == []


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("formats", [["nvfp4"], ["fp8_block", "nvfp4"]])
def test_a_recipe_has_the_dtypes_of_the_model(formats, dtype, tmp_path):
    """Norms stay in float32 where they are stored so: their kernels were compiled by requests."""
    folder = tmp_path / "model"
    save(mixed(1, formats), folder, layout="transformers", plain=("*",), plain_dtype=None)
    model = load(folder, dtype=dtype, mtp=False, pack=FRAGMENTS, progress=False)
    assert {norm.dtype for norm in norms_of(model).values()} == {torch.float32}
    built = Recipe.of(model).build("sm_90a")
    assert dtypes_of(built) == dtypes_of(model)


def norms_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.named_parameters() if names.is_norm(name)}


def dtypes_of(model: torch.nn.Module) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in model.state_dict().items()}


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [["nvfp4"], ["fp8_block", "nvfp4"]])
def test_a_gpu_finds_every_kernel_and_compiles_none_later(formats, tmp_path, monkeypatch):
    monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, str(tmp_path / "kernels"))
    folder = tmp_path / "model"
    save(mixed(1, formats), folder, layout="transformers", plain=("*",), plain_dtype=None)
    results, warm = [], preparing_kernels.warm_ranks
    monkeypatch.setattr(
        preparing_kernels, "warm_ranks", lambda *rest: results.append(warm(*rest)) or results[-1]
    )
    model = load(folder, device="cuda", dtype="bfloat16", mtp=False, progress=False)
    [done] = results
    assert (done.compiled, done.triton_compiled, done.failed, done.skipped) == (0, 0, {}, "")
    assert done.triton > 0
    before = compilations()
    for length in (1, 21, 40):
        assert len(model.generate([[1] * length], 3, stop_ids=())[0]) == 3
    assert compilations() - before == {}
