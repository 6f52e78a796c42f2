"""A step happens or does not: failures anywhere, repeated, give the bits of a run without them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.kv_cache import batch, step_preparation, step_record
from dsv4.kv_cache.page_tables import PageTable
from dsv4.kv_cache.paged_cache import Batch, PagedCache
from dsv4.kv_cache.row_counts import OpenStep
from dsv4.layers import _pooling, attention, decoder, indexer
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import random_model

ROWS = 3
ERRORS = (KeyboardInterrupt, RuntimeError, torch.cuda.OutOfMemoryError, MemoryError)
SIZES: tuple[dict[str, Any], ...] = (
    {},
    {"pool_tokens": 1200},
    {"pool_tokens": 1200, "index_format": "index_fp8"},
    {"index_format": "index_mxfp4"},
)


@cache
def model_of(window: int, numerics: str) -> DeepseekV4ForCausalLM:
    """One layer of each kind, small; a window of a page and a half splits pages of the ring."""
    config = ModelConfig.tiny(
        numerics=numerics,
        sliding_window=window,
        layer_types=(SLIDING, CSA, HCA),
        compress_rates={CSA: 4, HCA: 16},
        index_head_dim=128,
        index_topk=4,
    )
    return random_model(config, 7, torch.float32)


@dataclass
class Trouble:
    """Raises at the n-th of the fault points that a run passes, once."""

    at: int
    error: type[BaseException]
    passed: int = 0
    done: bool = False

    def visit(self) -> None:
        self.passed += 1
        if self.passed > self.at and not self.done:
            self.done = True
            raise self.error("injected")

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.visit()
            result = work(*args, **kwargs)
            self.visit()
            return result

        return guarded


# Everything a step goes through: host bookkeeping, device bookkeeping, layers and operators.
FAULT_POINTS: tuple[tuple[Any, str], ...] = (
    (PageTable, "grow"),
    (PageTable, "trim"),
    (PageTable, "flush"),
    (PageTable, "_put"),
    (PagedCache, "prepare"),
    (PagedCache, "advance"),
    (PagedCache, "_copy_pages"),
    (PagedCache, "_save_states"),
    (PagedCache, "_set_lengths"),
    (Batch, "__init__"),
    (step_preparation, "to_device"),
    (batch, "to_device"),
    (step_record, "to_device"),
    (torch.nn.Embedding, "forward"),
    (_pooling, "compress_write"),
    (attention, "head_norm_rope_write_kv"),
    (attention, "sparse_attention"),
    (indexer, "indexer_select"),
    (attention.DeepseekV4Attention, "forward"),
    (decoder.DeepseekV4DecoderLayer, "forward"),
    (decoder.DeepseekV4DecoderLayer, "run_joined"),
    (DeepseekV4ForCausalLM, "logits"),
)


@contextmanager
def injected(trouble: Trouble) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in FAULT_POINTS:
            patch.setattr(owner, name, trouble.around(getattr(owner, name)))
        yield


@dataclass
class Host:
    """The host's state of a cache, to compare."""

    tokens: list[tuple[int, int, tuple[OpenStep, ...]]]
    live: list[bool]
    free: dict[str, int]
    users: dict[int, list[int]]
    held: dict[int, list[tuple[int, int, int | None, dict[int, int]]]]
    lengths: list[int]
    tables: list[list[list[int]]] = field(default_factory=list)

    @classmethod
    def of(cls, paged: PagedCache) -> Host:
        tables = paged._tables
        return copy.deepcopy(
            cls(
                [(count.low, count.high, count.open) for count in paged._counts],
                paged._live,
                paged.free_pages,
                {ratio: t.pool._users for ratio, t in tables.items()},
                {
                    ratio: [(h.first, h.end, h.twin, h.pages) for h in t._held]
                    for ratio, t in tables.items()
                },
                paged.lengths.tolist(),
                [t.table.tolist() for t in tables.values()],
            )
        )


@dataclass(frozen=True)
class Action:
    """A caller's work: ``decode``, ``prefill`` of some rows in chunks, ``fork`` or ``renew``."""

    kind: str
    rows: tuple[int, ...]
    lengths: tuple[int, ...] = ()
    seed: int = 0


@dataclass
class Caller:
    """Does actions with a model and a cache, and keeps all logits."""

    model: DeepseekV4ForCausalLM
    cache: PagedCache
    out: list[torch.Tensor] = field(default_factory=list)
    allocated: bool = False

    def __post_init__(self) -> None:
        for _ in range(0 if self.allocated else ROWS):
            self.cache.allocate()

    def ids(self, seed: int, count: int) -> list[int]:
        drawn = torch.Generator().manual_seed(seed)
        vocabulary = self.model.config.vocab_size
        return torch.randint(0, vocabulary, (count,), generator=drawn).tolist()

    def do(self, action: Action) -> None:
        rows = list(action.rows)
        if action.kind == "decode":
            tokens = torch.tensor(self.ids(action.seed, len(rows)))
            given_rows = torch.tensor(rows) if action.seed % 2 else rows
            self.out.append(self.model.decode(tokens, self.cache, given_rows))
        elif action.kind == "prefill":
            prompts = [self.ids(action.seed + i, n) for i, n in enumerate(action.lengths)]
            self.out.append(self.model.prefill(prompts, self.cache, rows))
        elif action.kind == "renew":
            self.cache.free(rows[0])
            self.cache.allocate()
        else:
            self.cache.copy(*rows)


@st.composite
def runs(draw: st.DrawFn) -> list[Action]:
    """Steps of every kind; lengths that cross pages, windows and several chunks."""
    actions = []
    for turn in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["prefill", "prefill", "decode", "copy", "renew"]))
        rows = draw(st.permutations(range(ROWS)))
        count = {"copy": 2, "renew": 1}.get(kind) or draw(st.integers(1, ROWS))
        lengths = tuple(
            draw(st.one_of(st.integers(1, 6), st.integers(1, 90))) for _ in range(count)
        )
        actions.append(Action(kind, tuple(rows[:count]), lengths, 10 * turn + draw(st.booleans())))
    return actions


def caches(model: DeepseekV4ForCausalLM, chunk: int, sizes: dict[str, Any]) -> PagedCache:
    return model.new_cache(ROWS, 500, chunk, **sizes)


def compare(model: DeepseekV4ForCausalLM, chunk: int, sizes: dict[str, Any], actions, failures):
    """One run with failures and one without; ``failures`` are (place, error) by action."""
    plain, troubled = (Caller(model, caches(model, chunk, sizes)) for _ in range(2))
    with torch.inference_mode():
        for i, action in enumerate(actions):
            plain.do(action)
            for at, error in failures.get(i, ()):
                before = Host.of(troubled.cache)
                trouble, seen = Trouble(at, error), len(troubled.out)
                with injected(trouble), suppress(error):
                    troubled.do(action)
                if not trouble.done:
                    break
                assert len(troubled.out) == seen
                if action.kind in ("decode", "prefill"):
                    assert Host.of(troubled.cache) == before
            else:
                troubled.do(action)
            assert_bitwise(troubled.cache.lengths, plain.cache.lengths, "lengths")
    for actual, expected in zip(troubled.out, plain.out, strict=True):
        assert_bitwise(actual, expected, "logits")
    assert troubled.cache.free_pages == plain.cache.free_pages


def count_fault_points(model: DeepseekV4ForCausalLM, paged: PagedCache, action: Action) -> int:
    """The number of fault points of an action, counted with a caller that repeats nothing."""
    trouble = Trouble(1 << 30, RuntimeError)
    with injected(trouble), torch.inference_mode():
        Caller(model, paged, allocated=True).do(action)
    return trouble.passed


@dataclass(frozen=True)
class Scene:
    """Actions, of which the last fails at every place."""

    window: int
    chunk: int
    sizes: dict[str, Any]
    actions: tuple[Action, ...]


def pieces(*lengths: int, row: int = 0) -> tuple[Action, ...]:
    """Steps of one sequence; of one token: decoded, with rows as a list and as a tensor."""
    steps = enumerate(lengths)
    return tuple(
        Action("prefill" if n > 1 else "decode", (row,), (n,) if n > 1 else (), i) for i, n in steps
    )


# Places of a scene where it fails; where a scene has more, they are spread over it.
_MOST_TRIED = 100 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 35
POOLS: dict[str, Any] = {"pool_tokens": 1200}
SCENES = {
    "a token that closes a window of both compressors": Scene(5, 60, POOLS, pieces(15, 1)),
    "a token after them, of a row without pools": Scene(5, 60, {}, pieces(15, 1, 1)),
    "tokens that take slots of the open windows": Scene(5, 60, POOLS, pieces(10, 20)),
    "a page that leaves the place of another": Scene(96, 200, POOLS, pieces(127, 5, 151)),
    "the first chunks of a new row": Scene(5, 7, POOLS, pieces(18)),
    "chunks that go on, in a ring": Scene(5, 7, {}, pieces(62, 18)),
    "chunks that go on, in pools": Scene(64, 70, POOLS, pieces(70, 150)),
    "rows of different lengths, one new": Scene(
        5, 9, POOLS, (*pieces(30, row=2), Action("prefill", (2, 0), (11, 14), 50))
    ),
    "tokens of several rows beside a fork": Scene(
        5,
        60,
        {"pool_tokens": 1200, "index_format": "index_fp8"},
        (*pieces(15), Action("copy", (0, 1)), Action("decode", (1, 0), (), 60)),
    ),
}


@pytest.mark.parametrize("name", SCENES)
def test_failures_at_every_place_leave_nothing(name: str) -> None:
    scene = SCENES[name]
    model = model_of(scene.window, "deepseek")
    plain, troubled, counted = (
        Caller(model, caches(model, scene.chunk, scene.sizes)) for _ in range(3)
    )
    *first, last = scene.actions
    with torch.inference_mode():
        for action in first:
            for caller in (plain, troubled, counted):
                caller.do(action)
        before = Host.of(troubled.cache)
        count = count_fault_points(model, counted.cache, last)
        assert count > 40
        for at in range(0, count, 1 + count // _MOST_TRIED):
            error = ERRORS[at % len(ERRORS)]
            # Other tokens than those of the repetition, so that none is right by chance.
            other = replace(last, seed=last.seed + 100)
            with injected(Trouble(at, error)), pytest.raises(error, match="injected"):
                troubled.do(other)
            assert Host.of(troubled.cache) == before, at
        after = Action("decode", last.rows, (), 7), Action("prefill", last.rows[:1], (6,), 8)
        for action in (last, *after):
            plain.do(action)
            troubled.do(action)
    for actual, expected in zip(troubled.out, plain.out, strict=True):
        assert_bitwise(actual, expected, "logits")


@pytest.mark.slow
@pytest.mark.costly(4)
@given(
    actions=runs(),
    data=st.data(),
    window=st.sampled_from([5, 64, 96]),
    chunk=st.sampled_from([7, 60, 500]),
    sizes=st.sampled_from(SIZES),
    numerics=st.sampled_from(["deepseek", "transformers"]),
)
@settings(max_examples=40)
def test_a_run_with_failures_that_are_repeated_is_a_run_without(
    actions, data, window, chunk, sizes, numerics
) -> None:
    failures = {
        i: data.draw(
            st.lists(
                st.tuples(
                    st.one_of(st.integers(0, 30), st.integers(0, 150)), st.sampled_from(ERRORS)
                ),
                max_size=3,
            )
        )
        for i, action in enumerate(actions)
        if action.kind in ("decode", "prefill")
    }
    compare(model_of(window, numerics), chunk, sizes, actions, failures)
