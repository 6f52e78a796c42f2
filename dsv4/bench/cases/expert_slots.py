"""Problem sizes of slots for experts in host memory; see ``dsv4.bench.cases``.

Half of the experts are static and a quarter has slots. Rows are those of NVFP4 experts; only as
many experts as a step loads have one here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4 import ops
from dsv4.bench.checks.judge import bitwise
from dsv4.bench.problem import Case, Draw, Problem, nbytes
from dsv4.config import ModelConfig
from dsv4.ops.expert_slots import COUNTERS


def expert_decide(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """A step whose experts are drawn uniformly, in the middle of a conversation."""
    experts, k = c.n_routed_experts, c.num_experts_per_tok
    static = experts // 2
    slots = static + min(experts - static, max(experts // 4, tokens * k))

    def build(draw: Draw) -> Problem:
        ids, device = draw.distinct(tokens, k, experts), draw.device
        expert_in = torch.arange(slots, dtype=torch.int32, device=device)
        slot_of = torch.full((experts,), -1, dtype=torch.int32, device=device)
        slot_of[:slots] = expert_in
        used = draw.integers(0, 50, (experts,), torch.int32)
        last = draw.integers(0, 50, (experts,), torch.int32)
        totals = used.long()
        counters = torch.full((COUNTERS,), 50, dtype=torch.int64, device=device)
        args = (ids, slot_of, expert_in, used, last, totals, counters)
        names = ("slots", "experts", "targets", "slot_of", "expert_in", "used", "last", "totals")
        return Problem(
            ops.expert_decide,
            args,
            {"static_slots": static},
            bitwise(*names, "counters"),
            nbytes(*args),
            mutates=(1, 2, 3, 4, 5, 6),
        )

    sizes = {"E": experts, "N": slots, "k": k}
    yield Case("expert_decide", "", sizes, tokens, build)


def expert_gather(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """An expert is loaded from pinned memory; on a CPU from its own memory."""
    inner, hidden = c.moe_intermediate_size, c.hidden_size
    words = [inner * hidden // 4, inner * hidden // 32, inner * hidden // 8, inner * hidden // 64]

    def build(draw: Draw) -> Problem:
        total, device = sum(words), draw.device
        row_bytes = -(-4 * total // 16) * 16
        rows = draw.integers(0, 256, (2, row_bytes), torch.uint8)
        if device.type == "cuda":
            rows = rows.cpu().pin_memory()
        slots = torch.zeros(4 * 3 * total, dtype=torch.uint8, device=device)
        starts = [sum(words[:i]) for i in range(len(words))]
        chunks = [[start, 3 * start, n, n] for start, n in zip(starts, words, strict=True)]
        tables = ([1, 0, -1], [1, -1], [2, -1], chunks)
        row_of, experts, targets, table = (
            torch.tensor(values, dtype=torch.int32, device=device) for values in tables
        )
        return Problem(
            ops.expert_gather,
            (slots, rows, row_of, experts, targets, table),
            {},
            bitwise("slots"),
            4 * total,
            writes=4 * total,
            mutates=(0,),
        )

    yield Case("expert_gather", "one expert", {"H": hidden, "I": inner}, tokens, build)
