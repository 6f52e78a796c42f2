"""Drafts from a table on the device, and greedy texts compared with those without drafts.

A table holds the token that is drafted for each position of each row, so captured steps can read
it. A greedy text is that without drafts up to ties: kernels may sum in another order for several
tokens than for one. A tie is a token at which the two largest logits are closer than twice the
largest difference of logits at tokens that are equal; what follows it is compared with the text of
the longer prompt. Scaling the output head would scale margins and differences alike, so the share
of ties is bounded instead.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4.serving import Request, Runner, SamplingOptions
from dsv4.serving.request import TokenLogprobs
from dsv4.speculation.mtp import Drafts
from dsv4.speculation.verify import NO_DRAFT

REPORTED = 4  # most probable tokens whose log-probabilities are compared
KINDS = ("right", "wrong", "mixed")


def greedy(count: int) -> SamplingOptions:
    return SamplingOptions(max_new_tokens=count, stop_ids=(), logprobs=REPORTED)


def proposed(text: Sequence[int], kind: str, vocabulary: int, seed: int = 0) -> list[int]:
    """Return the draft of each position of a text: right, wrong, or either by a seed."""
    draws = torch.rand(len(text), generator=torch.Generator().manual_seed(seed))
    least = {"right": 0.0, "wrong": 1.0, "mixed": 0.3}[kind]
    right = (draws >= least).tolist()
    return [t if r else (t + 1) % vocabulary for t, r in zip(text, right, strict=True)]


def draft_from_tables(runner: Runner, tables: Sequence[Sequence[int]]) -> None:
    """Make a runner draft what tables say, whatever its draft module proposes.

    Args:
        runner: With a draft, and without requests.
        tables: The draft of each position of the first requests, in their order.
    """
    steps, cache = runner._steps.speculative, runner.cache
    assert steps is not None
    drafter: Any = steps._drafter
    inner, allocate, waiting = drafter.draft, cache.allocate, iter(tables)
    shape = (cache.max_sequences + 1, max(map(len, tables)) + 1)
    table = torch.full(shape, NO_DRAFT, dtype=torch.int64, device=runner.model.device)

    def allocated() -> int:
        row = allocate()
        tokens = next(waiting)
        table[row, : len(tokens)] = torch.tensor(tokens, device=table.device)
        return row

    def looked_up(anchors: Any, rows: Any, lengths: Any, count: int, *rest: Any) -> Drafts:
        drafts = inner(anchors, rows, lengths, count, *rest)
        after = lengths.unsqueeze(1) + torch.arange(1, count + 1, device=table.device)
        known = table[rows].gather(1, after.clamp(max=table.shape[1] - 1))
        return Drafts(known, drafts.probabilities)

    drafter.draft, cache.allocate = looked_up, allocated


@dataclass
class Counted:
    """Counts of verified steps.

    Attributes:
        steps: Steps with drafts, each of one sequence.
        accepted: Least and greatest number of accepted drafts: the last step of a text may accept
            drafts behind its end.
        whole: Steps whose drafts are all accepted.
    """

    steps: int = 0
    accepted: tuple[int, int] = (0, 0)
    whole: int = 0


def counted(
    texts: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    tables: Sequence[Sequence[int]],
    drafts: int,
) -> Counted:
    """Walk along texts, prompts included, as steps with the drafts of tables must."""
    steps = whole = least = most = 0
    for text, prompt, table in zip(texts, prompts, tables, strict=True):
        position = len(prompt)
        while position < len(text) - 1:
            following = [*text[position + 1 :], *[NO_DRAFT] * drafts][:drafts]
            offered = table[position + 1 :][:drafts]
            right = [a == b for a, b in zip(following, offered, strict=True)]
            accepted = [*right, False].index(False)
            at_end = position + 1 + accepted >= len(text)
            steps, whole = steps + 1, whole + (accepted == drafts)
            least, most = least + accepted, most + (drafts if at_end else accepted)
            position += 1 + accepted
    return Counted(steps, (least, most), whole)


@dataclass(frozen=True)
class Tie:
    """A token that differs from that without drafts.

    Attributes:
        request: Number of the request.
        index: Of the token in its answer.
        tokens: The token without drafts, and that with drafts.
        margin: How far the second largest logit was below the largest one without drafts.
    """

    request: int
    index: int
    tokens: tuple[int, int]
    margin: float


@dataclass
class Comparison:
    """Texts beside those without drafts.

    Attributes:
        tokens: Number of compared tokens.
        differences: Largest difference of the logits of each token that is equal.
        ties: Where they differ.
    """

    tokens: int = 0
    differences: list[float] = field(default_factory=list)
    ties: list[Tie] = field(default_factory=list)

    @property
    def difference(self) -> float:
        return max(self.differences, default=0.0)

    @property
    def median(self) -> float:
        return statistics.median(self.differences)

    def __str__(self) -> str:
        ties = f"{len(self.ties)} ties of {self.tokens} tokens"
        return f"{ties}, logits differ by {self.median:.2e}, at most {self.difference:.2e}"

    def check(self, share: float) -> None:
        """Assert that tokens differ at ties alone, and that ties are at most a share of them."""
        wrong = [tie for tie in self.ties if tie.margin >= 2 * self.difference]
        assert not wrong, f"no ties at a difference of logits of {self.difference:.2e}: {wrong}"
        assert len(self.ties) <= share * self.tokens, self.ties


@dataclass(frozen=True)
class _Rest:
    """What is not compared yet: the tokens of a request from an index on."""

    request: int
    prompt: list[int]
    reports: list[TokenLogprobs]
    index: int = 0


def compare(
    plain: Callable[[list[tuple[list[int], int]]], list[Request]],
    drafted: Sequence[Request],
    expected: Sequence[Request],
) -> Comparison:
    """Compare texts with those without drafts.

    Args:
        plain: Generates without drafts: takes prompts and numbers of tokens.
        drafted: Requests with drafts.
        expected: The same requests without drafts.
    """
    result, before = Comparison(), list(expected)
    rests = [_Rest(i, list(r.prompt), r.logprobs) for i, r in enumerate(drafted)]
    while rests:
        left = list[_Rest]()
        for rest, other in zip(rests, before, strict=True):
            left += _compared(result, rest, other.logprobs)
        rests = left
        before = plain([(rest.prompt, len(rest.reports)) for rest in rests])
    return result


def _compared(result: Comparison, rest: _Rest, expected: Sequence[TokenLogprobs]) -> list[_Rest]:
    """Compare up to the first tie; return what is behind it."""
    for i, (mine, other) in enumerate(zip(rest.reports, expected, strict=False)):
        result.tokens += 1
        if mine.token == other.token:
            result.differences.append(_difference(mine, other))
            continue
        margin = other.top[0][1] - other.top[1][1]
        result.ties.append(Tie(rest.request, rest.index + i, (other.token, mine.token), margin))
        prompt = [*rest.prompt, *(report.token for report in rest.reports[: i + 1])]
        behind = rest.reports[i + 1 :]
        return [_Rest(rest.request, prompt, behind, rest.index + i + 1)] if behind else []
    return []


def _difference(mine: TokenLogprobs, other: TokenLogprobs) -> float:
    known = dict(mine.top)
    return max(abs(value - known[token]) for token, value in other.top if token in known)
