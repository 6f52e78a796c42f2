"""The choice of a runner's draft, and how drafts are accepted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dsv4.kv_cache.layer_cache import ROLLBACK
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving.sampler import Parameters, Variant
from dsv4.speculation.verify import Verified, verify_same_draws

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
