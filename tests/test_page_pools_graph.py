"""One captured step for sequences that grow, join, fork and leave between replays.

On a CPU the same steps run eagerly, against each sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from attention_stack import Stack, small, tokens

from dsv4.cache import Batch, PagedCache
from dsv4.config import CSA, HCA, ModelConfig
from dsv4.testing.assertions import assert_bitwise

SLOTS = 4
BROKEN = 2  # row of the sequence that sees NaN


class Step:
    """One new token of up to ``SLOTS`` sequences; the rest of the batch is padding."""

    def __init__(self, stack: Stack, cache: PagedCache) -> None:
        self.stack, self.cache = stack, cache
        weight = stack.attention[0].kv_proj.weight
        shape = (SLOTS, stack.config.hidden_size)
        self.hidden = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.rows = torch.full((SLOTS,), -1, device=weight.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.out = self._run()

    def capture(self) -> None:
        """With nothing but padding: no sequence has a token (trap T22), none may matter (T21)."""
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self._run()

    def _run(self) -> torch.Tensor:
        batch = Batch.decode(self.cache.lengths[self.rows], self.rows)
        return self.stack.run(self.hidden, self.cache, batch)

    def __call__(self, rows: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        self.cache.prepare(rows, [1] * SLOTS)
        self.rows.copy_(torch.tensor(rows))
        self.hidden.copy_(hidden)
        if self.graph is None:
            return self._run()
        self.out.fill_(-7)
        self.graph.replay()
        return self.out.clone()


class Story:
    """What happens to a cache; the same whatever runs the steps."""

    def __init__(self, stack: Stack, cache: PagedCache) -> None:
        self.stack, self.cache = stack, cache
        self.step = Step(stack, cache)
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
        """One token of each row, -1 for padding; that of ``broken`` is NaN."""
        hidden = self.new(SLOTS)
        for i, row in enumerate(rows):
            if row >= 0:
                hidden[i] = torch.nan if row == broken else hidden[i]
                self.seen[row] = torch.cat((self.seen[row], hidden[i : i + 1]))
        found = dict(zip(rows, self.step(rows, hidden), strict=True))
        found.pop(-1, None)
        for row, out in found.items():
            self.outs[row][len(self.seen[row]) - 1] = out
        return found

    def tell(self) -> list[dict[int, torch.Tensor]]:
        """Across the borders at 1, 3, 4, 64, 127 to 129 and 256 tokens."""
        found = []
        a, b, c = self.join(125), self.join(0), self.join(253)
        found += [self.decode([b, a, -1, c]) for _ in range(3)]
        found += [self.decode([a, -1, c, b], broken=c) for _ in range(2)]
        self.leave(b)
        d = self.fork(a)
        found += [self.decode([d, c, a, -1]) for _ in range(2)]
        self.leave(c)
        e, f = self.join(62), self.join(1)
        found += [self.decode([f, d, e, a]) for _ in range(4)]
        found += [self.decode([-1, -1, e, -1])]
        assert self.cache.lengths[[a, d, e, f]].tolist() == [136, 136, 67, 5]
        for row in (a, d, e, f):
            self.leave(row)
        return found


def published(**changes: object) -> ModelConfig:
    return small(sliding_window=128, compress_rates={CSA: 4, HCA: 128}, **changes)


def pooled(stack: Stack) -> PagedCache:
    return stack.cache(4, 300, max_chunk=253, pool_tokens=1536, index_format="index_mxfp4")


def test_padded_steps_are_each_sequence_alone_and_nan_stays_where_it_is() -> None:
    stack = Stack(published(numerics="deepseek"), 5)
    story = Story(stack, pooled(stack))
    for i, found in enumerate(story.tell()):
        for row, out in found.items():
            assert bool(out.isnan().all()) == (row == BROKEN and 3 <= i < 7)
    assert len(story.left) == 6
    for x, outs in story.left:
        wanted = stack.whole(x)
        for position, out in outs.items():
            if not x[: position + 1].isnan().any():
                assert float((out - wanted[position]).norm() / out.norm()) < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
def test_a_captured_step_is_the_eager_one(numerics: str) -> None:
    """Replayed with other rows, lengths and page tables; bit for bit, twice."""
    index = "index_mxfp4" if numerics == "deepseek" else "plain"
    # Wide enough for the kernels that dispatch would choose for a published model.
    config = published(
        numerics=numerics, hidden_size=128, head_dim=512, qk_rope_head_dim=64,
        num_attention_heads=16, index_head_dim=128, q_lora_rank=64, o_groups=2,
    )  # fmt: skip
    stack = Stack(config, 5, torch.bfloat16).cuda()
    told = []
    for captured in (False, True, True):
        sizes = {"max_chunk": 253, "pool_tokens": 1536, "index_format": index}
        story = Story(stack, stack.cache(4, 300, **sizes))
        if captured:
            story.step.capture()
        told.append(story.tell())
    for eager, *replayed in zip(*told, strict=True):
        for each in replayed:
            assert each.keys() == eager.keys()
            for row, out in eager.items():
                assert_bitwise(each[row], out, f"row {row}")
                assert row == BROKEN or out.isfinite().all()
