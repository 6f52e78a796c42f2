"""The list of what the warm-up of replaced modules launches.

``test_warm_launches`` compares its contents with what steps launch.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("vllm", reason="vLLM 0.33 is not installed; make test-vllm has it")

from dsv4.compilation.counts import of_this_process
from dsv4.compilation.launch_recorder import Steps
from dsv4.compilation.listing import Listing
from dsv4.compilation.target import Target
from dsv4.integrations.vllm import compile_kernels, listed, warm
from dsv4.layers.linear import Linear

TARGET = Target("sm_90a")


class Part(nn.Module):
    """A module with tensors in all places, of which it remembers more when it runs."""

    def __init__(self, shared):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6)[:, ::2], requires_grad=False)
        self.shared = shared
        self.register_buffer("table", torch.ones(3))
        self.cache = torch.ones(2)
        self.dsv4_state = SimpleNamespace(limits=3, projection=None, window=torch.ones(1))

    def dsv4_warm(self, tokens):
        """Remember things."""
        self.cache = self.later = self.dsv4_state.window = self.table + tokens
        self.dsv4_state.projection = self.weight.t()
        self.register_buffer("made", self.table)


def model():
    shared = nn.Parameter(torch.ones(5), requires_grad=False)
    return nn.Sequential(Part(shared), nn.Sequential(Part(shared), Linear(8, 16)))


def attributes(module):
    """All that a model and its states hold, by the objects' identity."""
    holders = [
        holder
        for part in module.modules()
        for holder in (vars(part), part._parameters, part._buffers, vars_of_state(part))
    ]
    return [{name: id(value) for name, value in holder.items()} for holder in holders]


def vars_of_state(part):
    return vars(part.dsv4_state) if hasattr(part, "dsv4_state") else {}


def tensors(module):
    for part in module.modules():
        own = [*vars(part).values(), *part._parameters.values(), *part._buffers.values()]
        yield from (t for t in [*own, *vars_of_state(part).values()] if torch.is_tensor(t))


@pytest.mark.parametrize("fails", [False, True])
def test_modules_have_no_values_inside_and_forget_what_they_did(fails):
    whole = model()
    before = attributes(whole)
    with suppress(ZeroDivisionError), listed.without_values(whole):
        assert all(t.is_meta for t in tensors(whole))
        assert whole[0].weight.stride() == (6, 2)
        assert whole[0].shared is whole[1][0].shared
        for part in (whole[0], whole[1][0]):
            part.dsv4_warm(3)
        if fails:
            raise ZeroDivisionError
    assert attributes(whole) == before
    assert not any(t.is_meta for t in tensors(whole))
    assert "made" not in dict(whole.named_buffers())


@given(fails=st.lists(st.booleans(), max_size=4))
def test_each_piece_is_listed_unless_it_fails(fails):
    """The model has values while kernels of a piece are compiled."""
    whole = model()

    def piece(number):
        assert all(t.is_meta for t in tensors(whole))
        if fails[number]:
            raise NotImplementedError(f"piece {number}\nand more")

    def launches_of(call, target):
        assert target is TARGET
        call()
        return Steps()

    def pieces():
        return [lambda i=i: piece(i) for i in range(len(fails))]

    made = listed.Listed(whole, SimpleNamespace(), pieces)
    count = 0
    with mock.patch.object(listed, "launches_of", launches_of):
        for _ in made.parts(TARGET):
            assert not any(t.is_meta for t in tensors(whole))
            count += 1
    assert count == fails.count(False)
    assert made.problems == [
        f"NotImplementedError: piece {i}" for i, bad in enumerate(fails) if bad
    ]


def context(**changes):
    values = {
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "user_specified_block_size": False,
        "block_size": 64,
        "cache_dtype": "fp8_ds_mla",
        "tensor_parallel_size": 1,
        "hidden": 8,
        "speculative_config": None,
        **changes,
    }
    own = SimpleNamespace(**values)
    own.hf_config = SimpleNamespace(to_json_string=lambda: json.dumps(values["hidden"]))
    names = ("model_config", "scheduler_config", "cache_config", "parallel_config")
    config = SimpleNamespace(**dict.fromkeys(names, own), speculative_config=own.speculative_config)
    return SimpleNamespace(vllm_config=config)


class OnGpu(Part):
    """A module on a GPU, as far as the warm-up asks."""

    def parameters(self, recurse=True):
        """Yield a tensor of a GPU."""
        yield SimpleNamespace(device=torch.device("cuda"))

    def dsv4_warm(self, tokens):
        """Compile a kernel that was not listed, for one number of tokens."""
        if tokens == 3:
            with of_this_process().compiling("late"):
                pass


def test_the_log_says_how_many_kernels_were_compiled_one_by_one(monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(warm, "compile_replaced", lambda *args, **options: asked.append(options))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(warm, "most_tokens", lambda own: 4)
    whole = OnGpu(nn.Parameter(torch.ones(5)))
    with caplog.at_level("INFO", "vllm"):
        warm.warm_replaced(whole, context(), draft=True)
    (options,) = asked
    assert options["steps"] is False
    assert len(list(options["listed"].pieces())) == 1
    assert "kernels of 1 kinds in" in caplog.text
    assert "first launches, which compiled 1 kernels" in caplog.text


CHANGES = (
    {"max_model_len": 8192},
    {"max_num_seqs": 17},
    {"user_specified_block_size": True},
    {"cache_dtype": "auto"},
    {"tensor_parallel_size": 2},
    {"hidden": 9},
    {"speculative_config": "mtp"},
)


def key(whole, own):
    return Listing(listed.Settings.of(whole, own), TARGET, 64).file_name


def test_a_list_has_a_key_of_all_that_decides_it():
    whole = model()
    assert key(whole, context()) == key(model(), context())
    assert key(whole, context(block_size=128)) == key(whole, context()), "nobody asked for it"
    keys = {key(whole, context(**change)) for change in ({}, *CHANGES)}
    whole[1][1] = Linear(64, 32)
    keys.add(key(whole, context()))
    whole[1][1].to_format("nvfp4")
    keys.add(key(whole, context()))
    assert len(keys) == len(CHANGES) + 3


@pytest.mark.parametrize(
    ("ranks", "problems", "possible"),
    [
        (1, [], True),
        (1, ["NotImplementedError: a"], True),
        (1, [], False),
        (2, [], True),
        (2, ["an exchange"], True),
    ],
)
def test_the_list_is_compiled_and_this_packages_model_where_there_is_none(
    monkeypatch, ranks, problems, possible
):
    own, calls = SimpleNamespace(), []
    group = SimpleNamespace(rank_in_group=0, world_size=ranks, barrier=lambda: None)
    made = SimpleNamespace(problems=problems, settings="settings", parts=lambda target: target)

    def warm_loaded(whole, tokens, progress, recipe=None, others=(), parts=None):
        calls.append((recipe, parts, tuple(others)))

    for name, value in {
        "get_tp_group": lambda: group,
        "_own_steps": lambda *_: own,
        "indexers": lambda _: ["indexer"],
        "attentions": lambda _: ["attention"],
        "target_of": lambda _: TARGET,
        "impossible": lambda: None if possible else "interpreted",
        "Recipe": SimpleNamespace(of=lambda _: "recipe"),
        "warm_loaded": warm_loaded,
    }.items():
        monkeypatch.setattr(compile_kernels, name, value)
    compile_kernels.compile_replaced(model(), context(), 64, listed=made)
    others = ("indexer", "attention")
    listing = [("settings", TARGET, others)] if possible else []
    instead = [] if listing and not problems else [("recipe", None, others)]
    assert calls == listing + instead
