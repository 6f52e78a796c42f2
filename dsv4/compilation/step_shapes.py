"""Sizes of a model's steps that together launch every kernel that its steps can launch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from dsv4.compilation.draft_steps import DraftShape, draft_shapes
from dsv4.serving.prompts import BUCKETS

_PADDED_SEQUENCES = (2, 8, 64)  # and to which of its sequences it may be padded, or more
_NARROWEST = 64  # tokens of the smallest cache that is looked at
# Beyond it launchers choose nothing by the number of tiles that they do not choose below, and each
# shape takes time to look at.
_FINE_TOKENS = 8192
_SHARING = 128  # tokens from which neighbours share index keys that Triton scores


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step.

    Attributes:
        tokens: Tokens of all sequences.
        sequences: Their number; in a decode step that of tokens, and more where a step is padded.
        context: Tokens that a sequence has room for.
        index_format: Format of the indexer's keys; None: a runner's default.
        watched: Classes of the modules that have hooks: such a module is called, and no kernel of
            its neighbours does its work.
    """

    tokens: int
    sequences: int
    context: int
    index_format: str | None = None
    watched: tuple[type[nn.Module], ...] = ()


def step_shapes(max_tokens: int, context: int) -> list[StepShape]:
    """Shapes that together launch what steps of up to that many tokens do.

    Launchers choose by powers of two of tokens and sequences, and by how many tiles of 16 to 256
    tokens there are: each power and, up to 8192 tokens, each tile of 64 begins a shape. CuTeDSL
    scores index keys if all tokens together have many; so at contexts between two powers Triton may
    score them.

    Args:
        max_tokens: Most tokens of a step.
        context: Most tokens of a sequence.
    """
    tokens = token_counts(max_tokens)
    powers = [count for count in tokens if count & (count - 1) == 0]
    beyond = [power + 1 for power in powers if power < max_tokens]
    shapes = [StepShape(count, 1, context) for count in tokens]
    shapes += [StepShape(n, n, context) for n in sorted({*tokens[:16], *powers, *beyond})]
    for count in beyond:
        counts = [n for n in (2 * count, 16 * count, max_tokens) if count < n <= max_tokens]
        shapes += [StepShape(n, count, context) for n in counts]
    padded = [bucket for bucket in BUCKETS if bucket <= max_tokens]
    shapes += [StepShape(n, m, context) for n in padded for m in _PADDED_SEQUENCES]
    for narrow in _contexts(context):
        shapes += [StepShape(n, n, narrow) for n in powers]
        shapes += [StepShape(n, n, narrow, "plain") for n in (1, 16, 64, 1024) if n <= max_tokens]
        if max_tokens >= _SHARING:
            shapes.append(StepShape(_SHARING, _SHARING, narrow + narrow // 2))
    shapes += [StepShape(n, m, context, "plain") for n in powers for m in (1, n)]
    # Hooks change which kernels norms and sums of experts run in, by the number of tokens alone: by
    # powers of two and, up to 1024, by tiles, which share the columns of the mixing.
    hooked, tiles = (nn.Module,), [count for count in tokens if 64 < count < 1024]
    numbers = sorted({*powers, *beyond, *tiles})
    shapes += [StepShape(n, n, context, watched=hooked) for n in numbers]
    return list(dict.fromkeys(shapes))


def every_shape(max_tokens: int, context: int, drafts: bool) -> list[StepShape | DraftShape]:
    """Return the shapes of a model's steps, of those that draft and verify if there is a draft."""
    shapes: list[StepShape | DraftShape] = [*step_shapes(max_tokens, context)]
    return [*shapes, *draft_shapes(max_tokens, context)] if drafts else shapes


def token_counts(most: int) -> list[int]:
    """Return numbers of tokens up to ``most`` at which launchers may choose other kernels."""
    powers = [1 << i for i in range(most.bit_length())]
    counts = {*range(1, 17), *powers, *(power + 1 for power in powers)}
    counts |= {48, *range(65, min(most, _FINE_TOKENS), 64), *range(_FINE_TOKENS + 1, most, 512)}
    counts.add(most)
    return sorted(count for count in counts if count <= most)


def _contexts(most: int) -> list[int]:
    """Powers of two: tables and rows of scores are as wide."""
    powers = [_NARROWEST << i for i in range(max(0, (most // _NARROWEST).bit_length()))]
    return [power for power in powers if power < most]
