"""Sizes that runners agree on if each rank has requests of its own (``parallel="dp"``).

Ranks exchange tokens in every layer, so they take the same steps with the same sizes. Before each
step every rank sends the sizes it needs, and all take the largest: a rank with fewer tokens adds
padding, and one without any processes padding alone. Everything else, which requests run in which
cache rows and which tokens are chosen, each rank decides for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4.parallel.agreement import agree
from dsv4.parallel.context import ParallelContext
from dsv4.serving.sampler import Variant


@dataclass(frozen=True)
class Needs:
    """Sizes that a step must have room for.

    Attributes:
        has_work: Whether there are requests, or results that were not read.
        closes: Whether no requests will come.
        prompt_tokens: Tokens of prompts.
        prompts: Prompts that they belong to.
        decodes: Most sequences that decode a token.
    """

    has_work: bool
    closes: bool
    prompt_tokens: int = 0
    prompts: int = 0
    decodes: int = 0

    @classmethod
    def of_all(cls, needs: Sequence[Needs]) -> Needs:
        """Return what the step of several ranks must have room for; they close together."""
        has_work = any(own.has_work for own in needs)
        return cls(
            has_work,
            not has_work and all(own.closes for own in needs),
            max(own.prompt_tokens for own in needs),
            max(own.prompts for own in needs),
            max(own.decodes for own in needs),
        )


@dataclass(eq=False)
class SharedSteps:
    """The connection of a rank's runner to those of the other ranks.

    Attributes:
        context: This rank.
        closes: Whether this rank gets no more requests.
    """

    context: ParallelContext
    closes: bool = False

    def agree(self, own: Needs) -> Needs:
        """Return the needs of the next step of all ranks; waits until all have come to it."""
        return Needs.of_all(self.context.group.exchange(own))

    def check_warm_up(self, has_requests: bool, variants: Sequence[Variant]) -> None:
        """Raise on all ranks unless they warm up the same, and none has requests."""
        if any(self.context.group.exchange(has_requests)):
            raise ValueError(
                "Runner.warm_up: a rank has requests, wanted none with parallel='dp', where all "
                "ranks run the same steps"
            )
        agree(self.context, {"variants of warm_up": variants})
