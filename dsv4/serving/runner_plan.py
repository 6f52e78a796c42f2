"""The arguments of a runner, and the sizes and choices that follow from them for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsv4.kv_cache.paged_cache import PagedCache
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel.agreement import agree
from dsv4.parallel.context import has_own_tokens
from dsv4.serving._setup import (
    Limits,
    check_buckets,
    check_prompt_buckets,
    check_window,
    default_index_format,
    default_window_pages,
    resolve_capture,
)
from dsv4.serving.device_steps import DeviceSteps, StepSizes
from dsv4.serving.drafting import Drafting, Verification, drafting_of, same_draws
from dsv4.serving.rank_link import RankLink
from dsv4.serving.shared_steps import SharedSteps
from dsv4.serving.split_sampler import VocabularyPart
from dsv4.speculation.verify import verify_sampled


@dataclass(frozen=True, kw_only=True)
class RunnerRequest:
    """Arguments of ``Runner`` beside the model, by their names there, not checked yet."""

    max_sequences: int
    max_tokens: int
    max_chunk: int | None
    pool_tokens: int | None
    window_pages: int | None
    index_format: str | None
    buckets: Sequence[int] | None
    prompt_buckets: Sequence[int] | None
    capture: bool | None
    prefix_sequences: int
    deterministic: bool
    speculate: str | None
    draft_tokens: int | None
    confidence_threshold: float | None
    verify: Verification | None

    def resolved(self, model: DeepseekV4ForCausalLM) -> RunnerPlan:
        """Check the arguments and resolve their defaults; see ``Runner`` for errors."""
        self._check_deterministic(model)
        limits = Limits.of(
            model, self.max_sequences, self.max_tokens, self.max_chunk, self.prefix_sequences
        )
        pool = limits.pool_tokens() if self.pool_tokens is None else self.pool_tokens
        if self.max_chunk is None:
            limits = limits.within_memory(model, pool, self._index_format(model))
        enough_pages = default_window_pages(model.config, limits)
        pages = enough_pages if self.window_pages is None else self.window_pages
        drafting = drafting_of(
            model,
            self.speculate,
            self.draft_tokens,
            threshold=self.confidence_threshold,
            deterministic=self.deterministic,
        )
        is_scarce = pool < limits.pool_tokens() or pages < enough_pages
        together = 1 if self.deterministic else self.max_sequences  # of a decode step, at most
        captured = resolve_capture(model, self.capture, together * drafting.certain_tokens)
        return RunnerPlan(
            limits=limits,
            pool_tokens=pool,
            window_pages=pages,
            index_format=self._index_format(model),
            sizes=self._step_sizes(model, limits, captured, is_scarce),
            captured=captured,
            deterministic=self.deterministic,
            drafting=drafting,
            verify=self._verification(),
        )

    def _check_deterministic(self, model: DeepseekV4ForCausalLM) -> None:
        if not isinstance(self.deterministic, bool):
            raise TypeError(
                f"Runner: deterministic is {self.deterministic!r}, wanted True or False"
            )
        if self.deterministic and has_own_tokens(getattr(model, "parallel", None)):
            raise ValueError(
                "Runner: deterministic is True, wanted False with parallel='dp', whose steps have "
                "the sizes of all ranks' requests"
            )

    def _step_sizes(
        self, model: DeepseekV4ForCausalLM, limits: Limits, captured: bool, is_scarce: bool
    ) -> StepSizes:
        chunk, alone = limits.max_chunk, self.deterministic
        return StepSizes(
            check_buckets(self.buckets, self.max_sequences, captured, alone),
            check_prompt_buckets(model, self.prompt_buckets, chunk, captured, alone),
            is_scarce=is_scarce,
        )

    def _index_format(self, model: DeepseekV4ForCausalLM) -> str:
        if self.index_format is None:
            return default_index_format(model.config)
        return self.index_format

    def _verification(self) -> Verification:
        if self.verify is not None:
            if not callable(self.verify):
                raise TypeError(f"Runner: verify is {self.verify!r}, wanted a function or None")
            if self.speculate is None:
                raise ValueError("Runner: verify is given and speculate None, wanted a method, too")
            return self.verify
        return same_draws if self.deterministic else verify_sampled


@dataclass(frozen=True)
class RunnerRanks:
    """The connections of a rank's runner to the others; nothing in a process that runs alone.

    Attributes:
        link: To the runners of ranks that share all requests.
        shared: To those of ranks with requests of their own.
        part: This rank's part of the vocabulary, where it has a part of the logits alone.
    """

    link: RankLink | None = None
    shared: SharedSteps | None = None
    part: VocabularyPart | None = None


@dataclass(frozen=True, kw_only=True)
class RunnerPlan:
    """The sizes and choices of a runner.

    Attributes:
        limits: Most requests, tokens and chunks.
        pool_tokens: See ``Runner``.
        window_pages: See ``Runner``.
        index_format: See ``Runner``.
        sizes: Sizes that steps are padded to.
        captured: Whether steps are CUDA graphs.
        deterministic: See ``Runner``.
        drafting: How tokens are drafted, or why not.
        verify: How drafts are accepted.
    """

    limits: Limits
    pool_tokens: int
    window_pages: int
    index_format: str
    sizes: StepSizes
    captured: bool
    deterministic: bool
    drafting: Drafting
    verify: Verification

    @property
    def rows_per_sequence(self) -> int:
        """The tokens of a sequence in a decode step, drafts included."""
        return 1 if self.drafting.plan is None else 1 + self.drafting.plan.tokens

    @property
    def grid(self) -> int | None:
        """The tokens at whose multiples chunks of a deterministic runner begin, else None."""
        return self.limits.max_chunk if self.deterministic else None

    def agreed(self, model: DeepseekV4ForCausalLM) -> tuple[RunnerPlan, RunnerRanks]:
        """Return the plan of all ranks that run the model, and the connections of this one.

        Raises:
            RankError: if another rank failed.
            ValueError: if the ranks have other arguments.
        """
        context = model.parallel
        if context is not None:
            self._check_agreement(model)
        tokens = self.limits.max_tokens
        plan = replace(self, drafting=self.drafting.at_sizes(model, self.sizes.buckets, tokens))
        if context is None:
            return plan, RunnerRanks()
        if has_own_tokens(context):
            return plan, RunnerRanks(shared=SharedSteps(context))
        link = RankLink(context)
        # The costs follow from a rank's bytes, which may differ a little.
        plan = replace(plan, drafting=context.group.broadcast(plan.drafting))
        # Drafts are verified against all logits, which each rank gathers.
        gathers = plan.drafting.plan is not None
        part = None if gathers else VocabularyPart(context, model.model.vocabulary)
        return plan, RunnerRanks(link=link, part=part)

    def _check_agreement(self, model: DeepseekV4ForCausalLM) -> None:
        assert model.parallel is not None
        agree(
            model.parallel,
            {
                "limits of the runner": self.limits,
                "buckets": self.sizes.buckets,
                "prompt_buckets": self.sizes.prompts,
                "capture": self.captured,
                "drafts": self.drafting.plan,
                "pool_tokens": self.pool_tokens,
                "window_pages": self.window_pages,
                "index_format": self.index_format,
                "deterministic": self.deterministic,
            },
        )

    def new_cache(self, model: DeepseekV4ForCausalLM) -> PagedCache:
        """Allocate the cache.

        Raises:
            ValueError: if its window cannot hold a chunk.
        """
        limits = self.limits
        cache = model.new_cache(
            limits.rows,
            limits.max_tokens,
            max(limits.max_chunk, self.rows_per_sequence),
            self.index_format,
            self.pool_tokens,
            self.window_pages,
        )
        check_window(cache, limits.max_chunk)
        return cache

    def new_steps(
        self, model: DeepseekV4ForCausalLM, cache: PagedCache, part: VocabularyPart | None
    ) -> DeviceSteps:
        """Make the steps on the device."""
        return DeviceSteps(
            model,
            cache,
            self.limits,
            self.sizes,
            self.captured,
            part,
            self.drafting,
            self.verify,
            fixed=self.deterministic,
        )
