"""Steps with drafts: those of a runner, and their parts alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from dsv4.bench.suites.model.document import SpeculationRow
from dsv4.bench.suites.model.measure import (
    Measurement,
    SkippedError,
    has_graphs,
    seconds_of,
    step_until,
)
from dsv4.bench.suites.model.request import WARM_STEPS, DraftRequest
from dsv4.bench.suites.whole_model import DecodeStep, replay_ms
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving import Runner
from dsv4.serving.drafters import drafter_of
from dsv4.serving.drafting import DSPARK, DraftPlan
from dsv4.serving.graphs import Graphs, SamplerStep
from dsv4.serving.row_state import RowState
from dsv4.serving.speculative import SpeculativeStep
from dsv4.speculation.forced import ForcedAcceptance
from dsv4.speculation.verify import verify_sampled

VERIFIED = (1, 2, 4, 6)  # tokens of a sequence in a verified step


def measure(
    measurement: Measurement, drafts: DraftRequest, tokens: int, context: int
) -> SpeculationRow:
    """Measure steps with drafts.

    Args:
        measurement: Of the model.
        drafts: Which drafts.
        tokens: Sequences.
        context: Tokens of each before the steps.
    """
    row = SpeculationRow(
        measurement.named,
        tokens=tokens,
        context=context,
        method=drafts.method,
        drafts=drafts.tokens,
        forced=drafts.share is not None,
        share=drafts.share or 0.0,
    )
    measurement.take(row, ("draft_ms",), lambda: _time_parts(measurement, row))
    measurement.take(row, ("plain_ms",), lambda: _time_plain(measurement, row))
    figures = ("step_ms", "token_ms", "length")
    measurement.take(row, figures, lambda: _time_drafts(measurement, drafts, row))
    return row


class Parts:
    """The parts of steps with drafts, of some sequences at one context.

    Args:
        model: With its draft layers, packed.
        plan: The drafts.
        sequences: How many.
        context: Tokens of each before the step.
        most: Most tokens of a sequence in a step, at least one more than its drafts.
        seed: Seed of the prompts.
    """

    def __init__(
        self,
        model: DeepseekV4ForCausalLM,
        plan: DraftPlan,
        sequences: int,
        context: int,
        most: int,
        seed: int = 0,
    ) -> None:
        self._size, self._drafts = sequences, plan.tokens
        filled = DecodeStep(model, sequences, context, seed, new_tokens=most)
        cache = filled.cache
        state = RowState(sequences, model.config.vocab_size, model.device)
        self._graphs = Graphs()
        sampler = SamplerStep(model, cache, state, (sequences,), self._graphs)
        drafter = drafter_of(plan, model, cache)
        self._step = SpeculativeStep(
            model, cache, state, sampler, self._graphs, drafter, most - 1, verify_sampled
        )
        state.tokens[:sequences] = filled.tokens
        sampler.write(filled.rows.tolist())

    def draft(self) -> Callable[[], object]:
        """Return a call that drafts greedily."""
        return self._step.work("draft", self._size, self._drafts)

    def verify(self, tokens: int) -> Callable[[], object]:
        """Return a call of the main model on some tokens of each sequence."""
        return self._step.work("forward", self._size, tokens - 1)

    def milliseconds(self, work: Callable[[], object], replays: int) -> float:
        """Time a call: the median replay of its graph, or without a GPU the median call."""
        device = self._step.device
        if not has_graphs(device):
            times = [seconds_of(device, work) for _ in range(1 + replays)]
            return 1e3 * statistics.median(times[1:])
        graph, _ = self._graphs.captured(work)
        return replay_ms(graph, replays)


@torch.inference_mode()
def _time_parts(measurement: Measurement, row: SpeculationRow) -> None:
    """The draft, and the main model by the number of tokens."""
    request, plan = measurement.request, DraftPlan(row.method, row.drafts)
    counts = sorted({*VERIFIED, row.drafts + 1})
    parts = Parts(
        measurement.model, plan, row.tokens, row.context, counts[-1], request.weights.seed
    )
    for tokens in counts:
        row.verify_ms[str(tokens)] = parts.milliseconds(parts.verify(tokens), request.replays)
    row.draft_ms = parts.milliseconds(parts.draft(), request.replays)


def _time_plain(measurement: Measurement, row: SpeculationRow) -> None:
    """``Runner.step`` without drafts."""
    with _runner(measurement, row, speculate=None) as runner:
        row.plain_ms = _timed(measurement, row, runner) / measurement.request.steps


def _time_drafts(measurement: Measurement, drafts: DraftRequest, row: SpeculationRow) -> None:
    """``Runner.step`` with drafts."""
    verify = verify_sampled if drafts.share is None else ForcedAcceptance(drafts.share)
    # The confidence of random weights means nothing, so all drafts are verified.
    threshold = 0.0 if row.method == DSPARK else None
    with _runner(
        measurement,
        row,
        speculate=row.method,
        draft_tokens=row.drafts,
        confidence_threshold=threshold,
        verify=verify,
    ) as runner:
        total, steps = _timed(measurement, row, runner), measurement.request.steps
    row.steps, row.step_ms = steps, total / steps
    assert row.length is not None
    row.token_ms = row.step_ms / row.length


def _runner(measurement: Measurement, row: SpeculationRow, **options: object) -> Runner:
    request, count = measurement.request, row.tokens
    if count * row.context > request.prefill_limit:
        raise SkippedError(request.too_long(count, row.context))
    return Runner(
        measurement.model,
        max_sequences=count,
        max_tokens=row.context + request.new_tokens(count, row.context),
        buckets=(count,) if has_graphs(request.device) else None,
        prompt_buckets=(),
        prefix_sequences=0,
        **options,  # type: ignore[arg-type]
    )


def _timed(measurement: Measurement, row: SpeculationRow, runner: Runner) -> float:
    """Milliseconds of all timed steps, in which every sequence decodes; counts drafts."""
    request, device = measurement.request, measurement.request.device
    runner.warm_up()
    new = request.new_tokens(row.tokens, row.context)
    prompts = measurement.draw_prompts(row.tokens, row.context)
    requests = [
        runner.add(prompt, max_new_tokens=new, stop_ids=(), seed=i)
        for i, prompt in enumerate(prompts)
    ]
    step_until(runner, requests, WARM_STEPS)
    counts = runner.draft_counts
    drafted, accepted, verified = counts.drafted, counts.accepted, counts.steps

    def steps() -> None:
        for _ in range(request.steps):
            runner.step()

    total = 1e3 * seconds_of(device, steps)
    row.drafted, row.accepted = counts.drafted - drafted, counts.accepted - accepted
    if counts.steps > verified:  # of each sequence
        row.length = 1 + row.accepted / (counts.steps - verified)
    for added in requests:
        if added.error is not None:
            raise added.error
        if added.done:
            raise SkippedError("a sequence ended before all of them were timed")
    return total
