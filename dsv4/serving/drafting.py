"""The choice of a runner's draft, and the state that the draft keeps of each sequence."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4.kv_cache.batch import CacheStep
from dsv4.kv_cache.layer_cache import ROLLBACK
from dsv4.kv_cache.paged_cache import Batch, PagedCache
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving.sampler import Parameters, Variant
from dsv4.speculation.dspark import DSparkDraft, argmax
from dsv4.speculation.mtp import Drafts, MtpDraft
from dsv4.speculation.verify import Verified, draw_draft, verify_same_draws

AUTO, MTP, DSPARK = "auto", "mtp", "dspark"
METHODS = (AUTO, MTP, DSPARK)
MTP_TOKENS = 2  # the layer was trained for one; drafts get worse with each that is made of drafts
_SAID = "_said_undrafted"  # attribute of a model: logged reasons
_logger = logging.getLogger(__name__)

# Accepts drafts: logits [B, D + 1, vocab], drafts [B, D], parameters, variant, and what the drafts
# were drawn from, [B, D, vocab], or None: see ``dsv4.speculation.verify.verify_sampled``.
Verification = Callable[
    [torch.Tensor, torch.Tensor, Parameters, Variant, torch.Tensor | None], Verified
]


def same_draws(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    parameters: Parameters,
    variant: Variant,
    draft_probabilities: torch.Tensor | None,
) -> Verified:
    """Accept the drafts that plain sampling would draw: a seed has the text that it has without.

    An argument ``verify`` of ``Runner``. It accepts fewer drafts of drawn tokens than its default.
    """
    return verify_same_draws(logits, drafts, parameters, variant)


@dataclass(frozen=True)
class DraftPlan:
    """How tokens are drafted.

    Attributes:
        method: ``"mtp"`` or ``"dspark"``.
        tokens: Drafted tokens per step.
    """

    method: str
    tokens: int

    def within(self, max_tokens: int) -> DraftPlan:
        """Return the plan for sequences of at most some tokens, 2 and up."""
        return DraftPlan(self.method, min(self.tokens, max_tokens - 1))

    def __str__(self) -> str:
        return f"{self.tokens} {self.method} draft{'s' * (self.tokens > 1)} a step"


@dataclass(frozen=True)
class Drafting:
    """Whether tokens are drafted.

    Attributes:
        plan: How; None: they are not.
        reason: Why not, if a draft was asked for.
    """

    plan: DraftPlan | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.plan is not None:
            return str(self.plan)
        return f"no drafts: {self.reason or 'none are asked for'}"


def drafting_of(
    model: DeepseekV4ForCausalLM,
    speculate: str | None,
    draft_tokens: int | None = None,
    *,
    deterministic: bool = False,
) -> Drafting:
    """Choose the draft of a model.

    Args:
        model: The model.
        speculate: ``"mtp"`` or ``"dspark"``; ``"auto"``: the one that the model holds, if it can
            be used; None: none.
        draft_tokens: Drafted tokens per step; None: 2 of MTP, all of a DSpark block.
        deterministic: Whether the runner is.

    Raises:
        TypeError: if ``draft_tokens`` is no int.
        ValueError: if ``speculate`` is no method, or one that cannot be used, or ``draft_tokens``
            is not within what the draft can make, or comes without a method.
    """
    if speculate is not None and speculate not in METHODS:
        words = ", ".join(map(repr, METHODS))
        raise ValueError(f"speculate is {speculate!r}, wanted {words} or None")
    if draft_tokens is not None:
        _check_tokens(draft_tokens, speculate)
    if speculate is None:
        return Drafting()
    held = _held(model)
    method = held if speculate == AUTO else speculate
    reason = _obstacle(model, method, held, deterministic)
    if reason:
        if speculate != AUTO:
            raise ValueError(f"speculate is {speculate!r}, but {reason}; wanted 'auto' or None")
        if held is not None:
            _say(model, reason)
        return Drafting(reason=reason)
    assert method is not None
    return Drafting(DraftPlan(method, _count(model, method, draft_tokens)))


def _check_tokens(draft_tokens: Any, speculate: str | None) -> None:
    if isinstance(draft_tokens, bool) or not isinstance(draft_tokens, int):
        raise TypeError(f"draft_tokens is {draft_tokens!r}, wanted an int or None")
    if draft_tokens < 1:
        raise ValueError(f"draft_tokens is {draft_tokens}, wanted 1 or more")
    if speculate is None:
        raise ValueError(f"draft_tokens is {draft_tokens} and speculate None, wanted a method, too")


def _held(model: DeepseekV4ForCausalLM) -> str | None:
    """Return the method of the draft layers that a model holds."""
    if model.dspark is not None:
        return DSPARK
    return MTP if len(model.mtp) else None


def _obstacle(
    model: DeepseekV4ForCausalLM, method: str | None, held: str | None, deterministic: bool
) -> str:
    """Return why a draft cannot be used, or an empty text."""
    if model.parallel is not None:
        return f"the model is split over {model.parallel.size} ranks, where drafts are not built"
    if held is None:
        return "the model holds no draft layers"
    if method != held:
        layers = {MTP: "layers of multi-token prediction", DSPARK: "a DSpark draft"}
        return f"the model holds {layers[held]}"
    if method == MTP and len(model.mtp) != 1:
        return f"the model holds {len(model.mtp)} layers of multi-token prediction, not 1"
    if deterministic:
        return "a deterministic runner's bits may not depend on how many tokens a step has"
    return ""


def _count(model: DeepseekV4ForCausalLM, method: str, draft_tokens: int | None) -> int:
    most = ROLLBACK
    if method == DSPARK:
        assert model.config.dspark is not None
        most = min(most, model.config.dspark.block_size)
    if draft_tokens is None:
        return most if method == DSPARK else MTP_TOKENS
    if draft_tokens > most:
        raise ValueError(f"draft_tokens is {draft_tokens}, wanted 1 to {most} of {method}")
    return draft_tokens


def _say(model: DeepseekV4ForCausalLM, reason: str) -> None:
    """Log once for each model and reason that nothing is drafted."""
    said = model.__dict__.setdefault(_SAID, set())
    if reason not in said:
        _logger.warning("tokens are generated without drafts: %s", reason)
        said.add(reason)


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

    @abstractmethod
    def keep(self, rows: torch.Tensor, streams: torch.Tensor) -> None:
        """Keep the residual streams ``[B, n, H]`` of each row's last token."""


@dataclass(eq=False)
class MtpDrafter(Drafter):
    """Drafts by multi-token prediction.

    Attributes:
        model: The model.
        cache: Its cache.
        streams: ``[rows + 1, n, H]``, residual streams of each row's last token; zeros for padding.
    """

    model: DeepseekV4ForCausalLM
    cache: PagedCache
    streams: torch.Tensor = field(init=False)
    _draft: MtpDraft = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.config
        self._draft = MtpDraft(self.model)
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
    """

    model: DeepseekV4ForCausalLM
    cache: PagedCache
    _draft: DSparkDraft = field(init=False)

    def __post_init__(self) -> None:
        self._draft = DSparkDraft(self.model)

    def draft(
        self,
        anchors: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        count: int,
        parameters: Parameters | None,
        variant: Variant,
    ) -> Drafts:
        """See ``Drafter.draft``; all rows of a block are computed, because they see each other."""
        distributions = list[torch.Tensor]()

        def drawn(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            assert parameters is not None
            drafted = draw_draft(logits, parameters._replace(position=positions), variant)
            distributions.append(drafted.probabilities)
            return drafted.tokens

        sample = argmax if parameters is None else drawn
        drafts = self._draft.draft(anchors, self.cache, rows, lengths, sample=sample)
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

    def keep(self, rows: torch.Tensor, streams: torch.Tensor) -> None:
        """Do nothing: a draft reads no streams."""


def drafter_of(plan: DraftPlan, model: DeepseekV4ForCausalLM, cache: PagedCache) -> Drafter:
    """Return the draft of a plan over a cache."""
    kind = MtpDrafter if plan.method == MTP else DSparkDrafter
    return kind(model, cache)
