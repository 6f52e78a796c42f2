"""The steps of a runner on its device: captured ones, and what happens if a capture fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dsv4 import dispatch
from dsv4.kv_cache.paged_cache import CacheFullError, PagedCache
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving._capture import CaptureError
from dsv4.serving._setup import Limits, captures_drafts, warn_eager
from dsv4.serving.drafters import Drafter, drafter_of
from dsv4.serving.drafting import Drafting, Verification
from dsv4.serving.graphs import Chosen, DecodeStep, Graphs, SamplerStep
from dsv4.serving.options import SamplingOptions
from dsv4.serving.prompts import Part, PromptStep, Size
from dsv4.serving.row_state import RowState
from dsv4.serving.sampler import Variant
from dsv4.serving.speculative import SpeculativeStep
from dsv4.serving.split_sampler import VocabularyPart

_RECORDED = 2  # runs after which calls of one shape are planned, see ``dsv4.ops._plans``


@dataclass(frozen=True)
class StepSizes:
    """Sizes that steps are padded to.

    Attributes:
        buckets: Sequences of decode steps, ascending; the largest holds every batch.
        prompts: Tokens of prompt steps, ascending.
        is_scarce: Whether the cache may have no pages for drafts, so that steps go without.
    """

    buckets: tuple[int, ...]
    prompts: tuple[int, ...]
    is_scarce: bool = False


class DeviceSteps:
    """Prompt steps, decode steps and the sampler over one cache.

    Args:
        model: The model.
        cache: Its cache, with pools.
        limits: Of the runner.
        sizes: Sizes of the steps.
        captured: Whether steps are CUDA graphs.
        part: The tokens whose logits this rank has; None: all.
        drafting: How tokens are drafted.
        verify: How drafts are accepted.
        fixed: Whether steps of a sequence have the same number of rows whatever they draft.

    Attributes:
        is_captured: Whether steps are CUDA graphs; false after a failed capture.
        state: State of the cache's rows.
        sampler: Chooses tokens.
        decode: Steps without drafts.
        speculative: Steps with drafts, in place of ``decode``; None: there are none.
        prompts: Steps of prompts.
    """

    def __init__(
        self,
        model: DeepseekV4ForCausalLM,
        cache: PagedCache,
        limits: Limits,
        sizes: StepSizes,
        captured: bool,
        part: VocabularyPart | None,
        drafting: Drafting,
        verify: Verification,
        fixed: bool = False,
    ) -> None:
        self._model, self._cache, self._limits, self._sizes = model, cache, limits, sizes
        self.is_captured = captured
        self._capture_prompts = True  # unless a capture failed
        self.state = RowState(limits.rows, model.config.vocab_size, model.device, part)
        self._graphs = Graphs()
        self.sampler = SamplerStep(model, cache, self.state, sizes.buckets, self._graphs)
        self.decode = DecodeStep(model, cache, self.state, self.sampler, self._graphs)
        self._drafts = {size: drafting.drafts_at(size) for size in sizes.buckets}
        plan = drafting.plan
        drafter: Drafter | None = None
        self.speculative: SpeculativeStep | None = None
        if plan is not None:
            least = {size: drafting.theta_at(size) for size in sizes.buckets}
            thetas = {size: theta for size, theta in least.items() if theta is not None}
            drafter = drafter_of(plan, model, cache, thetas)
            self.speculative = SpeculativeStep(
                model,
                cache,
                self.state,
                self.sampler,
                self._graphs,
                drafter,
                plan.tokens,
                verify,
                captures_drafts=captured and captures_drafts(model, limits.max_sequences),
                fixed=fixed,
            )
        self.prompts = PromptStep(model, cache, self.sampler, self._graphs, sizes.prompts, drafter)

    @property
    def captures(self) -> int:
        """The number of CUDA graphs captured so far."""
        return sum(step.captures for step in self._all)

    @property
    def _all(self) -> list[DecodeStep | SpeculativeStep | SamplerStep | PromptStep]:
        """All steps that have graphs."""
        decode = self.decode if self.speculative is None else self.speculative
        return [decode, self.sampler, self.prompts]

    @property
    def _replays(self) -> bool:
        """Return whether steps replay graphs now."""
        return self.is_captured and dispatch.is_free(dispatch.AUTO)

    def drafts_of(self, sequences: int) -> int:
        """Return the drafts of each sequence in a step of some."""
        return self._drafts[self.sampler.bucket(sequences)]

    def process(
        self, parts: Sequence[Part], variant: Variant, size: Size | None = None
    ) -> Chosen | None:
        """Process parts of prompts, captured if possible; see ``PromptStep.run``."""
        size = self.prompts.size(parts) if size is None else size
        if self._replays:
            self._capture_prompt(size)
            try:
                return self.prompts.run(parts, variant, captured=True, size=size)
            except CaptureError as error:
                self._go_on_eagerly(error)
        return self.prompts.run(parts, variant, captured=False, size=size)

    def next_tokens(
        self, rows: Sequence[int], drafts: int, variant: Variant, size: int | None = None
    ) -> Chosen:
        """Decode each row, with ``drafts`` of each, captured if possible.

        Args:
            rows: Distinct cache rows, for which the cache is prepared.
            drafts: Drafts of each.
            variant: Variant that covers the needs of every row.
            size: Bucket that the step is padded to; None: the smallest.

        Returns:
            ``drafts + 1`` tokens of each row, flat; on the device, until the next step.
        """
        if self._replays:
            try:
                return self._decoded(rows, drafts, variant, size, captured=True)
            except CaptureError as error:
                self._go_on_eagerly(error)
        return self._decoded(rows, drafts, variant, size, captured=False)

    def _decoded(
        self,
        rows: Sequence[int],
        drafts: int,
        variant: Variant,
        size: int | None,
        captured: bool,
    ) -> Chosen:
        if self.speculative is None:
            return self.decode.run(rows, variant, captured, size=size)
        assert size is None  # ranks with tokens of their own draft nothing
        return self.speculative.run(rows, drafts, variant, captured)

    def warm_up(self, variants: Sequence[Variant], wait: Callable[[torch.Tensor], object]) -> None:
        """Capture the graphs of every bucket, and process a long prompt; see ``Runner.warm_up``.

        Args:
            variants: Distinct variants of later steps.
            wait: Reads back tokens ``[n]`` of no request.
        """
        try:
            self._capture_all(variants)
            self.rehearse(variants, wait)
        except CaptureError as error:
            self._go_on_eagerly(error)

    def _capture_all(self, variants: Sequence[Variant]) -> None:
        """Capture each graph and replay it with padding: its first replay takes longer."""
        # The largest are captured first; the others use their memory.
        for size in reversed(self.prompts.sizes):
            self._capture_prompt(size)
            self.prompts.replay_padding(size)
        for batch in reversed(self.sampler.buckets):
            for variant in variants:
                self._capture_decode(batch, variant)

    def _capture_decode(self, batch: int, variant: Variant) -> None:
        if self.speculative is None:
            self.decode.capture(batch, variant)
            self.decode.replay_padding(batch, variant)
            return
        self.sampler.capture(batch, variant)
        # With fewer pages drafts may be dropped, in steps that have graphs of their own.
        counts = {self._drafts[batch]} | ({0} if self._sizes.is_scarce else set())
        for drafts in sorted(counts, reverse=True):
            self.speculative.capture(batch, drafts, variant)
            self.speculative.replay_padding(batch, drafts, variant)

    def rehearse(self, variants: Sequence[Variant], wait: Callable[[torch.Tensor], object]) -> None:
        """Process a long prompt, decode a token, and forget the sequence."""
        if not variants:
            return
        count = min(self._limits.max_chunk, self._limits.max_tokens - 1)
        tokens = [i % self._model.config.vocab_size for i in range(count)]
        is_eager = all(size.tokens < count for size in self.prompts.sizes)
        try:
            for _ in range(_RECORDED if is_eager else 1):
                self._rehearse_sequence(tokens, variants[0], wait)
        except CacheFullError:
            return  # running sequences have warmed up the buckets that they need

    def _rehearse_sequence(
        self, tokens: Sequence[int], variant: Variant, wait: Callable[[torch.Tensor], object]
    ) -> None:
        row = self._cache.allocate()
        try:
            self.state.join(row, SamplingOptions(), 0, ())
            self._cache.prepare([row], [len(tokens)])
            self.process([Part(row, 0, tokens, is_last=True)], variant)
            drafts = self.drafts_of(1)
            self._cache.prepare([row], [1 + drafts], certain=[1])
            chosen = self.next_tokens([row], drafts, variant)
            wait(chosen.tokens[: 1 + drafts])
        finally:
            self._cache.free(row)

    def _capture_prompt(self, size: Size) -> None:
        """Capture steps of prompts; if that fails, decode steps do not change."""
        if not self._capture_prompts:
            return
        try:
            self.prompts.capture(size)
        except CaptureError as error:
            if self._model.parallel is not None:
                raise
            self._capture_prompts = False
            self.prompts.release()
            warn_eager(self._model, f"a capture failed with {error}", "prompt")

    def _go_on_eagerly(self, error: CaptureError) -> None:
        if self._model.parallel is not None:
            raise error  # other ranks would replay their graphs
        self.is_captured = False
        for step in (*self._all, self._graphs):
            step.release()
        warn_eager(self._model, f"a capture failed with {error}")
