"""Drafts over the rows of a runner's cache, and the state that they keep of each sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from dsv4.kv_cache.batch import CacheStep
from dsv4.kv_cache.paged_cache import Batch, PagedCache
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving.drafting import MTP, DraftPlan
from dsv4.serving.sampler import Parameters, Variant
from dsv4.speculation.draft_head import AUTO
from dsv4.speculation.dspark import DSparkDraft, argmax
from dsv4.speculation.mtp import Drafts, MtpDraft
from dsv4.speculation.verify import draw_draft


class Drafter(ABC):
    """A draft over the rows of a runner's cache; nothing here reads a tensor on the host.

    ``forward`` runs the main model and stores what later drafts read of these tokens. Drafts are
    made at the beginning of a step, when the pages for their provisional entries are there.
    """

    @abstractmethod
    def draft(
        self,
        anchors: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        count: int,
        parameters: Parameters | None,
        variant: Variant,
    ) -> Drafts:
        """Draft tokens after the anchors.

        Args:
            anchors: ``[B]`` int64, tokens that were sampled last and are not processed yet.
            rows: ``[B]`` int64, rows of the cache; -1 for padding.
            lengths: ``[B]`` int64, tokens of the rows, which are the anchors' positions.
            count: Drafts of each.
            parameters: Of the requests, for the position after the anchor; None: take the most
                probable tokens.
            variant: Variant that covers the needs of every row.
        """

    @abstractmethod
    def skip(self, anchors: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """Store what ``draft`` would store of the tokens before the anchors, and draft nothing."""

    @abstractmethod
    def forward(
        self,
        ids: torch.Tensor,
        following: torch.Tensor,
        step: CacheStep,
        stored: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the main model.

        Args:
            ids: ``[1, T]`` tokens of the step.
            following: ``[T]`` int64, the token after each; for the last of a sequence any token,
                and any after it in place of one that is rejected.
            step: The cache, and the batch of the step.
            stored: ``[N]`` int64, tokens of which later drafts may read something; None: all.

        Returns:
            Normalised hidden states ``[1, T, H]`` and residual streams ``[1, T, n, H]``.
        """

    def leaves_out(self, sequences: int) -> bool:
        """Return whether drafts of a step of some sequences may be missing, by confidence."""
        return False

    @abstractmethod
    def keep(self, rows: torch.Tensor, streams: torch.Tensor) -> None:
        """Keep the residual streams ``[B, n, H]`` of each row's last token."""


@dataclass(eq=False)
class MtpDrafter(Drafter):
    """Drafts by multi-token prediction.

    Attributes:
        model: The model.
        cache: Its cache.
        head: The draft's head, see ``DraftHead.of``.
        streams: ``[rows + 1, n, H]``, residual streams of each row's last token; zeros for padding.
    """

    model: DeepseekV4ForCausalLM
    cache: PagedCache
    head: str = AUTO
    streams: torch.Tensor = field(init=False)
    _draft: MtpDraft = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.config
        self._draft = MtpDraft(self.model, self.head)
        self.streams = torch.zeros(
            (self.cache.max_sequences + 1, config.hc_mult, config.hidden_size),
            dtype=self.model.dtype,
            device=self.model.device,
        )

    def draft(
        self,
        anchors: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        count: int,
        parameters: Parameters | None,
        variant: Variant,
    ) -> Drafts:
        """See ``Drafter.draft``."""
        drawn = None if parameters is None else variant
        return self._draft.draft(
            anchors, self._of(rows), self.cache, rows, lengths - 1, count, parameters, drawn
        )

    def skip(self, anchors: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """See ``Drafter.skip``."""
        step = CacheStep(self.cache, Batch.decode(lengths - 1, rows))
        self._draft.write(anchors, self._of(rows).unsqueeze(0), step)

    def forward(
        self,
        ids: torch.Tensor,
        following: torch.Tensor,
        step: CacheStep,
        stored: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Drafter.forward``."""
        hidden, streams = self.model.model(ids, None, step)
        self._draft.write(following, streams, step, stored)
        return hidden, streams

    def keep(self, rows: torch.Tensor, streams: torch.Tensor) -> None:
        """See ``Drafter.keep``."""
        self.streams[self._entries(rows)] = streams
        self.streams[-1:].zero_()

    def _of(self, rows: torch.Tensor) -> torch.Tensor:
        return self.streams[self._entries(rows)]

    def _entries(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.where(rows < 0, self.streams.shape[0] - 1, rows)


@dataclass(eq=False)
class DSparkDrafter(Drafter):
    """Drafts by DSpark, whose context is all in the cache.

    Attributes:
        model: The model.
        cache: Its cache.
        thetas: By the number of sequences of a step, padding included: ``[]`` on the device, least
            probability of acceptance of a draft; where there is none, all are verified.
        head: The draft's head, see ``DraftHead.of``.
    """

    model: DeepseekV4ForCausalLM
    cache: PagedCache
    thetas: Mapping[int, torch.Tensor] = field(default_factory=dict)
    head: str = AUTO
    _draft: DSparkDraft = field(init=False)

    def __post_init__(self) -> None:
        self._draft = DSparkDraft(self.model, self.head)

    def draft(
        self,
        anchors: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        count: int,
        parameters: Parameters | None,
        variant: Variant,
    ) -> Drafts:
        """See ``Drafter.draft``; all rows of a block are computed, because they see each other.

        Drafts from the first on that is not likely enough to be accepted are ``NO_DRAFT``.
        """
        distributions = list[torch.Tensor]()

        def drawn(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            assert parameters is not None
            drafted = draw_draft(logits, parameters._replace(position=positions), variant)
            distributions.append(drafted.probabilities)
            return drafted.tokens

        sample = argmax if parameters is None else drawn
        drafts = self._draft.draft(
            anchors, self.cache, rows, lengths, sample=sample, theta=self.thetas.get(len(rows))
        )
        q = torch.stack(distributions[:count], 1) if distributions else None
        return Drafts(drafts.tokens[:, :count], q)

    def skip(self, anchors: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """Do nothing: the context of all tokens is stored already."""

    def forward(
        self,
        ids: torch.Tensor,
        following: torch.Tensor,
        step: CacheStep,
        stored: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Drafter.forward``; the draft leaves out tokens that it never reads by itself."""
        taps = self._draft.taps()
        hidden, streams = self.model.model(ids, None, step, taps=taps)
        self._draft.commit(taps, self.cache, step.batch)
        return hidden, streams

    def leaves_out(self, sequences: int) -> bool:
        """See ``Drafter.leaves_out``."""
        return sequences in self.thetas

    def keep(self, rows: torch.Tensor, streams: torch.Tensor) -> None:
        """Do nothing: a draft reads no streams."""


def drafter_of(
    plan: DraftPlan,
    model: DeepseekV4ForCausalLM,
    cache: PagedCache,
    thetas: Mapping[int, float] | None = None,
    head: str = AUTO,
) -> Drafter:
    """Return the draft of a plan over a cache.

    Args:
        plan: The plan.
        model: The model.
        cache: Its cache.
        thetas: Least probabilities of acceptance, see ``DSparkDrafter``; only of DSpark.
        head: The draft's head, see ``DraftHead.of``.
    """
    if plan.method == MTP:
        return MtpDrafter(model, cache, head)
    tensors = {
        size: torch.tensor(theta, dtype=torch.float32, device=model.device)
        for size, theta in (thetas or {}).items()
    }
    return DSparkDrafter(model, cache, tensors, head)
