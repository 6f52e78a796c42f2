"""The choice of a runner's draft, and how drafts are accepted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dsv4.kv_cache.layer_cache import ROLLBACK
from dsv4.layers.host_experts import slot_tokens
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel.context import has_own_tokens
from dsv4.serving._capture import obstacle
from dsv4.serving.sampler import Parameters, Variant
from dsv4.speculation.draft_costs import MTP_TOKENS, DraftCosts
from dsv4.speculation.verify import Verified, verify_same_draws

AUTO, MTP, DSPARK = "auto", "mtp", "dspark"
METHODS = (AUTO, MTP, DSPARK)
HOSTED_TOKENS = 1  # with experts in host memory, because each token must load its experts
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
    """Accept the drafts that plain sampling would draw, so a seed gives the text without drafts.

    It is a function for the argument ``verify`` of ``Runner``. It accepts fewer sampled drafts than
    the default.
    """
    return verify_same_draws(logits, drafts, parameters, variant)


@dataclass(frozen=True)
class DraftPlan:
    """How tokens are drafted.

    Attributes:
        method: ``"mtp"`` or ``"dspark"``.
        tokens: Most drafted tokens of a sequence per step.
        by_size: Whether steps have fewer, or none, at numbers of sequences at which as many do not
            pay, see ``DraftCosts.best``.
        threshold: Least probability of acceptance of a draft that is verified, by the draft's
            confidence; None: what ``DraftCosts`` says, or, without a confidence, all are verified.
    """

    method: str
    tokens: int
    by_size: bool = False
    threshold: float | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a runner with this plan."""
        return {
            "speculate": AUTO if self.by_size else self.method,
            "draft_tokens": self.tokens,
            "confidence_threshold": self.threshold,
        }

    def within(self, max_tokens: int) -> DraftPlan:
        """Return the plan for sequences of at most some tokens, 2 and up."""
        return replace(self, tokens=min(self.tokens, max_tokens - 1))

    def __str__(self) -> str:
        most = "up to " if self.by_size else ""
        return f"{most}{self.tokens} {self.method} draft{'s' * (self.tokens > 1)} a step"


@dataclass(frozen=True)
class Drafting:
    """Whether tokens are drafted.

    Attributes:
        plan: How tokens are drafted; None: they are not.
        reason: Why not, if a draft was asked for.
        costs: Costs of drafts, if the plan depends on them.
        sizes: Numbers of sequences that steps are padded to, ascending.
    """

    plan: DraftPlan | None = None
    reason: str = ""
    costs: DraftCosts | None = field(default=None, repr=False)
    sizes: tuple[int, ...] = field(default=(), repr=False)

    @property
    def certain_tokens(self) -> int:
        """Tokens of a sequence in every step; 1 if steps may have fewer drafts, or none."""
        if self.plan is None or self.plan.by_size:
            return 1
        return 1 + self.plan.tokens

    def at_sizes(
        self, model: DeepseekV4ForCausalLM, sizes: Sequence[int], max_tokens: int
    ) -> Drafting:
        """Return the drafts of steps of these numbers of sequences, by what they cost.

        A plan with ``by_size`` whose drafts pay at none of these numbers is dropped, and the reason
        is logged once.

        Args:
            model: The model.
            sizes: Numbers of sequences that steps are padded to, ascending.
            max_tokens: Longest sequence, 2 and up.
        """
        if self.plan is None:
            return replace(self, sizes=tuple(sizes))
        plan = self.plan.within(max_tokens)
        if not (plan.by_size or _has_confidence(model, plan.method)):
            return replace(self, plan=plan, sizes=tuple(sizes))
        costs = DraftCosts.of(model, plan.method, plan.tokens, plan.threshold)
        drafting = replace(self, plan=plan, costs=costs, sizes=tuple(sizes))
        _logger.info("%s, by the number of sequences:\n%s", drafting, drafting.explain())
        most = max(map(drafting.drafts_at, sizes))
        if most:
            return replace(drafting, plan=replace(plan, tokens=most))
        reason = f"drafts would be slower at {sizes[0]} to {sizes[-1]} sequences, by bytes read"
        slots = costs.most_tokens
        if slots is not None and slots < 2 * sizes[0]:
            tokens = f"{slots} token{'s' * (slots > 1)}"
            reason = f"experts in host memory have slots for {tokens} of a step"
        _say(model, reason)
        return Drafting(None, reason, costs, tuple(sizes))

    def drafts_at(self, sequences: int) -> int:
        """Return the drafts of each sequence in a step of some."""
        if self.plan is None:
            return 0
        if self.costs is None or not self.plan.by_size:
            return self.plan.tokens
        return self.costs.best(sequences).drafts

    def theta_at(self, sequences: int) -> float | None:
        """Return the least probability of acceptance of a draft that is verified; None: any."""
        drafts = self.drafts_at(sequences)
        if self.costs is None or not drafts:
            return None
        return self.costs.choice(sequences, drafts).theta or None

    def explain(self) -> str:
        """Return, for each number of sequences, the drafts, and the times that decide on them.

        Times are computed from the bytes and operations of a step for an H100, see
        ``dsv4.speculation.draft_costs``.
        """
        if self.costs is None:
            return str(self)
        return self.costs.explain([(size, self.drafts_at(size)) for size in self.sizes])

    def __str__(self) -> str:
        if self.plan is not None:
            return str(self.plan)
        return f"no drafts: {self.reason or 'none are asked for'}"


def drafting_of(
    model: DeepseekV4ForCausalLM,
    speculate: str | None,
    draft_tokens: int | None = None,
    *,
    threshold: float | None = None,
    deterministic: bool = False,
) -> Drafting:
    """Choose the draft of a model.

    Args:
        model: The model.
        speculate: ``"mtp"`` or ``"dspark"``; ``"auto"``: the one that the model holds, if it can
            be used; None: none.
        draft_tokens: Drafted tokens per step; None: 2 of MTP, all of a DSpark block, and 1 of
            either where experts are in host memory.
        threshold: ``confidence_threshold`` of ``Runner``.
        deterministic: Whether the runner is.

    Raises:
        TypeError: if ``draft_tokens`` is no int, or ``confidence_threshold`` no number.
        ValueError: if ``speculate`` is no method, or one that cannot be used, or ``draft_tokens``
            is not within what the draft can make, or comes without a method or for a model without
            draft layers; likewise ``confidence_threshold``, for which the draft needs a confidence
            head.
    """
    if speculate is not None and speculate not in METHODS:
        words = ", ".join(map(repr, METHODS))
        raise ValueError(f"speculate is {speculate!r}, wanted {words} or None")
    if draft_tokens is not None:
        _check_tokens(draft_tokens, speculate)
    if threshold is not None:
        _check_threshold(threshold, speculate)
    if speculate is None:
        return Drafting()
    held = _held(model)
    if held is None and speculate == AUTO:
        _check_unused(draft_tokens=draft_tokens, confidence_threshold=threshold)
    method = held if speculate == AUTO else speculate
    reason = _obstacle(model, method, held, deterministic)
    if reason:
        if speculate != AUTO:
            raise ValueError(f"speculate is {speculate!r}, but {reason}; wanted 'auto' or None")
        if held is not None:
            _say(model, reason)
        return Drafting(reason=reason)
    assert method is not None
    if threshold is not None and not _has_confidence(model, method):
        raise ValueError(
            f"confidence_threshold is {threshold}, wanted None: the {method} draft has no "
            "confidence head"
        )
    count, by_size = _count(model, method, draft_tokens), speculate == AUTO
    return Drafting(DraftPlan(method, count, by_size, threshold))


def _check_tokens(draft_tokens: Any, speculate: str | None) -> None:
    if isinstance(draft_tokens, bool) or not isinstance(draft_tokens, int):
        raise TypeError(f"draft_tokens is {draft_tokens!r}, wanted an int or None")
    if draft_tokens < 1:
        raise ValueError(f"draft_tokens is {draft_tokens}, wanted 1 or more")
    if speculate is None:
        raise ValueError(f"draft_tokens is {draft_tokens} and speculate None, wanted a method, too")


def _check_threshold(threshold: Any, speculate: str | None) -> None:
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
        raise TypeError(f"confidence_threshold is {threshold!r}, wanted a number or None")
    if not 0 <= threshold <= 1:
        raise ValueError(f"confidence_threshold is {threshold}, wanted 0 to 1")
    if speculate is None:
        raise ValueError(
            f"confidence_threshold is {threshold} and speculate None, wanted a method, too"
        )


def _check_unused(**options: float | None) -> None:
    """Refuse options of drafts for a model without draft layers."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} is {value}, wanted None: the model holds no draft layers")


def _has_confidence(model: DeepseekV4ForCausalLM, method: str) -> bool:
    dspark = model.config.dspark
    return method == DSPARK and dspark is not None and dspark.confidence_head


def _held(model: DeepseekV4ForCausalLM) -> str | None:
    """Return the method of the draft layers that a model holds."""
    if model.dspark is not None:
        return DSPARK
    return MTP if len(model.mtp) else None


def _obstacle(
    model: DeepseekV4ForCausalLM, method: str | None, held: str | None, deterministic: bool
) -> str:
    """Return why a draft cannot be used, or an empty text."""
    if has_own_tokens(model.parallel):
        return "each rank has tokens of its own (parallel='dp'), of which none are drafted"
    if held is None:
        return "the model holds no draft layers"
    if method != held:
        layers = {MTP: "layers of multi-token prediction", DSPARK: "a DSpark draft"}
        return f"the model holds {layers[held]}"
    if method == MTP and len(model.mtp) != 1:
        return f"the model holds {len(model.mtp)} layers of multi-token prediction, not 1"
    return _changes_bits(model) if deterministic else ""


def _changes_bits(model: DeepseekV4ForCausalLM) -> str:
    """Return why rows of a step are not those of another of equal size, or an empty text.

    See ``dsv4.speculation.fixed_rows``.
    """
    if model.device.type == "cpu" and model.dtype != torch.bfloat16:
        return (
            "the bits of a deterministic runner would depend on accepted drafts: on a CPU "
            f"products of {model.dtype} treat the last rows of a matrix otherwise"
        )
    reason = None
    if model.device.type == "cuda":
        reason = obstacle(model, [1 + ROLLBACK], model.device)
    if reason is not None:
        return f"the bits of a deterministic runner would depend on accepted drafts: {reason}"
    return ""


def _count(model: DeepseekV4ForCausalLM, method: str, draft_tokens: int | None) -> int:
    most = ROLLBACK
    if method == DSPARK:
        assert model.config.dspark is not None
        most = min(most, model.config.dspark.block_size)
    if draft_tokens is None and slot_tokens(model):
        return HOSTED_TOKENS
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
