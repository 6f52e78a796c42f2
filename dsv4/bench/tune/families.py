"""All families of kernels whose plans are measured.

Routed experts are not among them: their launches share experts in ranges of rows, and no plan of
one launch can be timed alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dsv4.bench.cases.sequence import attention_case
from dsv4.bench.problem import Problem, UsageError
from dsv4.bench.tune.gemm_families import E4m3, Fp8Wgmma, SmallM, SmallMFp8, Wgmma, spread
from dsv4.bench.tune.work import Candidate, Family, Work
from dsv4.config import ModelConfig
from dsv4.cute.sm90 import attention_plan
from dsv4.cute.sm90.attention_plan import AttentionPlan, ColumnsPlan, MergePlan, Sizes
from dsv4.cute.sm90.costs import Costs
from dsv4.cute.sm90.tuned import tuned
from dsv4.cute.sm90.tuned_records import (
    AttentionConfiguration,
    AttentionKey,
    Configuration,
    TunedData,
)

_TOKENS, _ENTRIES = (64, 16, 8, 256, 32), (512, 0, 64, 1024)


class Attention:
    """Sparse attention, but for few tokens, which have a kernel of their own.

    Attributes:
        name: As in data files.
        op: The operator.
        scaled: See ``Family``.
    """

    name = "attention"
    op = "sparse_attention"
    scaled = True

    def works(self, configs: Mapping[str, ModelConfig]) -> Iterator[Work]:
        """Problems that ``NarrowKernel`` is not for."""
        seen = set()
        for entries in _ENTRIES:
            for tokens in _TOKENS:
                for preset, config in configs.items():
                    heads, reach = config.num_attention_heads, config.sliding_window
                    key = AttentionKey(tokens, heads, reach, entries)
                    if key in seen or attention_plan.is_narrow(
                        tokens, heads, (reach, entries), tuned().sms
                    ):
                        continue
                    seen.add(key)
                    case = attention_case(config, tokens, "tune", entries)
                    name = f"{preset} {heads} heads, {entries} entries, {tokens} tokens"
                    yield self._work(name, case, key)

    def _work(self, name: str, case: Any, key: AttentionKey) -> Work:
        work = Work(self.name, name, case, key, ())
        every = list(attention_plan.candidates(_sizes(key)))
        every.sort(key=lambda form: self.estimate(tuned().costs, tuned(), work, form))
        able = dict.fromkeys((self.chosen(work), *spread(every)))
        return Work(self.name, name, case, key, tuple(able))

    def chosen(self, work: Work) -> Configuration:
        """Return the form that dispatch takes."""
        sizes = _sizes(work.key)
        plan, count = attention_plan.attention_plan(*sizes)
        if isinstance(plan, ColumnsPlan):
            return AttentionConfiguration(attention_plan.COLUMNS, count)
        assert isinstance(plan, AttentionPlan)
        form = attention_plan.PAIRED if plan.paired else attention_plan.SPLITS
        return AttentionConfiguration(form, count)

    def plans(self, work: Work, candidate: Any) -> list[Any]:
        """Return the configurations of the kernel and of the merge."""
        return [attention_plan.plan_of(candidate, _sizes(work.key))[0], MergePlan()]

    def backend(self, candidate: Candidate) -> str:
        """Name of the implementation."""
        return "cute"

    def call(self, candidate: Candidate, problem: Problem) -> Callable[[], Any]:
        """Return the call that is timed."""
        return functools.partial(problem.fresh().run, self.backend(candidate))

    def estimate(self, costs: Costs, data: TunedData, work: Work, candidate: Any) -> float:
        """Return estimated cycles."""
        sizes = _sizes(work.key, data.sms)
        return attention_plan.estimated_cycles(candidate, sizes, costs.attention)


def _sizes(key: Any, sms: int | None = None) -> Sizes:
    count = tuned().sms if sms is None else sms
    return Sizes(key.tokens, key.heads, (key.window, key.compressed), count)


ALL: tuple[Family, ...] = (SmallM(), Wgmma(), Attention(), E4m3(), Fp8Wgmma(), SmallMFp8())


def named(names: Sequence[str]) -> list[Family]:
    """Return the families of some operators, or of their own names; all of them for none.

    Raises:
        UsageError: naming the first that is unknown.
    """
    for name in names:
        if not any(name in (family.op, family.name) for family in ALL):
            known = dict.fromkeys((*(f.op for f in ALL), *(f.name for f in ALL)))
            raise UsageError(f"--only is {name!r}, wanted of {', '.join(known)}")
    return [f for f in ALL if not names or f.op in names or f.name in names]
