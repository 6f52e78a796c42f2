"""One captured step for sequences that grow, join, fork and leave between replays.

On a CPU the same steps run eagerly, against each sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dsv4.config import CSA, HCA, ModelConfig
from dsv4.kv_cache.paged_cache import Batch, PagedCache
from dsv4.testing.assertions import assert_bitwise
from tests.kv_cache.attention_stack import Stack, shuffled, small, tokens

SLOTS = 4
BROKEN = 2  # row of the sequence that sees NaN


class Step:
    """``count`` new tokens of up to ``SLOTS`` sequences; the rest of the batch is padding."""

    def __init__(self, stack: Stack, cache: PagedCache, count: int) -> None:
        self.stack, self.cache, self.count = stack, cache, count
        weight = stack.attention[0].kv_proj.weight
        shape = (SLOTS * count, stack.config.hidden_size)
        self.hidden = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.rows = torch.full((SLOTS,), -1, device=weight.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.out = self._run()

    def capture(self) -> None:
        """Padding only: no sequence has a token, none may matter (pitfalls 21 and 22)."""
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self._run()

    def _run(self) -> torch.Tensor:
        starts = self.cache.lengths[self.rows]
        if self.count == 1:
            return self.stack.run(self.hidden, self.cache, Batch.decode(starts, self.rows))
        number = torch.arange(self.count, device=starts.device)
        first = self.count * torch.arange(SLOTS + 1, device=starts.device)
        positions = (starts[:, None] + number).flatten()
        owners = self.rows[:, None].expand(-1, self.count).flatten()
        batch = Batch(first, starts, self.rows, positions, owners)
        return self.stack.run(self.hidden, self.cache, batch)

    def __call__(self, rows: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        self.cache.prepare(rows, [self.count] * SLOTS)
        self.rows.copy_(torch.tensor(rows))
        self.hidden.copy_(hidden)
        if self.graph is None:
            return self._run()
        self.out.fill_(-7)
        self.graph.replay()
        return self.out.clone()


class Story:
    """Events of a cache; the same whatever runs the steps."""

    def __init__(self, stack: Stack, cache: PagedCache, count: int = 1) -> None:
        self.stack, self.cache = stack, cache
        self.step = Step(stack, cache, count)
        self.seen: dict[int, torch.Tensor] = {}
        self.outs: dict[int, dict[int, torch.Tensor]] = {}
        self.left: list[tuple[torch.Tensor, dict[int, torch.Tensor]]] = []
        self.seed = 0

    def new(self, count: int) -> torch.Tensor:
        self.seed += 1
        like = self.step.hidden
        return tokens(self.seed, count, self.stack.config).to(like.dtype).to(like.device)

    def join(self, length: int) -> int:
        row, x = self.cache.allocate(), self.new(length)
        if length:
            self.stack.step(self.cache, [row], [x])
        self.seen[row], self.outs[row] = x, {}
        return row

    def fork(self, row: int) -> int:
        other = self.cache.fork(row)
        self.seen[other], self.outs[other] = self.seen[row], {}
        return other

    def leave(self, row: int) -> None:
        self.cache.free(row)
        self.left.append((self.seen.pop(row), self.outs.pop(row)))

    def decode(self, rows: Sequence[int], broken: int | None = None) -> dict[int, torch.Tensor]:
        """Tokens of each row, -1 for padding; those of ``broken`` are NaN."""
        count = self.step.count
        hidden = self.new(SLOTS * count)
        for row, new in zip(rows, hidden.split(count), strict=True):
            if row >= 0:
                if row == broken:
                    new.fill_(torch.nan)
                self.seen[row] = torch.cat((self.seen[row], new))
        result = dict(zip(rows, self.step(rows, hidden).split(count), strict=True))
        result.pop(-1, None)
        for row, out in result.items():
            end = len(self.seen[row])
            self.outs[row] |= zip(range(end - count, end), out, strict=True)
        return result

    def tell(self, nan: bool = True) -> list[dict[int, torch.Tensor]]:
        """Steps cross the borders at 1, 3, 4, 64, 127 to 129 and 256 tokens; one has NaN."""
        result = []
        a, b, c = self.join(125), self.join(0), self.join(253)
        result += [self.decode([b, a, -1, c]) for _ in range(3)]
        result += [self.decode([a, -1, c, b], broken=c if nan else None) for _ in range(2)]
        self.leave(b)
        d = self.fork(a)
        result += [self.decode([d, c, a, -1]) for _ in range(2)]
        self.leave(c)
        e, f = self.join(62), self.join(1)
        result += [self.decode([f, d, e, a]) for _ in range(4)]
        result += [self.decode([-1, -1, e, -1])]
        lengths = [len(self.seen[row]) for row in (a, d, e, f)]
        assert self.cache.lengths[[a, d, e, f]].tolist() == lengths
        assert self.step.count > 1 or lengths == [136, 136, 67, 5]
        for row in (a, d, e, f):
            self.leave(row)
        return result


def published(**changes: object) -> ModelConfig:
    return small(sliding_window=128, compress_rates={CSA: 4, HCA: 128}, **changes)


def pooled(stack: Stack) -> PagedCache:
    return stack.cache(4, 300, max_chunk=253, pool_tokens=1536, index_format="index_mxfp4")


def broken_at(step: int, row: int) -> bool:
    """Return whether a sequence has seen NaN; its row and its pages are others' afterwards."""
    return row == BROKEN and 3 <= step < 7


def assert_same_story(
    actual: list[dict[int, torch.Tensor]], expected: list[dict[int, torch.Tensor]], *, calm: bool
) -> None:
    """Bit for bit; where one is ``calm``, of the sequences that saw no NaN."""
    for i, (steps, others) in enumerate(zip(actual, expected, strict=True)):
        assert steps.keys() == others.keys()
        for row, out in others.items():
            if not (calm and broken_at(i, row)):
                assert_bitwise(steps[row], out, f"row {row} of step {i}")


@pytest.mark.parametrize("count", [1, 2])
def test_padded_steps_are_each_sequence_alone_and_nan_stays_where_it_is(count: int) -> None:
    stack = Stack(published(numerics="deepseek"), 5)
    story = Story(stack, pooled(stack), count)
    actual = story.tell()
    for i, outs in enumerate(actual):
        for row, out in outs.items():
            assert bool(out.isnan().all()) == broken_at(i, row)
    assert len(story.left) == 6
    for x, outs in story.left:
        expected = stack.whole(x)
        for position, out in outs.items():
            if not x[: position + 1].isnan().any():
                assert float((out - expected[position]).norm() / out.norm()) < 1e-12
    for nan in (True, False):
        other = Story(stack, shuffled(pooled(stack), 7), count)
        assert_same_story(other.tell(nan), actual, calm=not nan)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
def test_a_captured_step_is_the_eager_one(numerics: str, count: int) -> None:
    """Replayed with other rows, lengths and page tables, bit for bit.

    Twice; with the pages of all pools in another order; and with numbers where NaN was.
    """
    index = "index_mxfp4" if numerics == "deepseek" else "plain"
    # Wide enough for the kernels that dispatch would choose for a published model.
    config = published(
        numerics=numerics, hidden_size=128, head_dim=512, qk_rope_head_dim=64,
        num_attention_heads=16, index_head_dim=128, q_lora_rank=64, o_groups=2,
    )  # fmt: skip
    stack = Stack(config, 5, torch.bfloat16).cuda()
    sizes = {"max_chunk": 253, "pool_tokens": 1536, "index_format": index}
    eager = Story(stack, stack.cache(4, 300, **sizes), count).tell()
    for i, outs in enumerate(eager):
        assert all(out.isfinite().all() or broken_at(i, row) for row, out in outs.items())
    for seed, nan in ((None, True), (None, True), (1, True), (None, False)):
        cache = stack.cache(4, 300, **sizes)
        story = Story(stack, cache if seed is None else shuffled(cache, seed), count)
        story.step.capture()
        assert_same_story(story.tell(nan), eager, calm=not nan)
