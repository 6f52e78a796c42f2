"""Measure steps with drafts: whole steps of a runner, and each part of a step alone.

A model with random weights gets experts that are drawn for each step, uniformly or by Zipf's law,
because the choice of its own routers is nearly uniform, and equal in each replay. With experts in
host memory, each step also counts hits in the expert slots and loaded bytes. The static experts are
those that are drawn most, as after ``dsv4.layers.repin_``.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dsv4.bench.suites.hosted_steps import ROUTINGS, draw_experts, drawn_routing, fits_slots
from dsv4.bench.suites.model.document import SpeculationRow
from dsv4.bench.suites.model.measure import (
    Measurement,
    SkippedError,
    has_graphs,
    seconds_of,
    step_until,
)
from dsv4.bench.suites.model.request import WARM_STEPS, DraftRequest, ModelRequest
from dsv4.bench.suites.whole_model import (
    DecodeStep,
    drawn_vocabulary,
    expert_bytes,
    experts_chosen,
    replay_ms,
)
from dsv4.kv_cache.paged_cache import Batch, CacheStep
from dsv4.layers.host_experts import CacheUse, HostExperts, cache_use, hosted_of
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel.split import LocalSizes
from dsv4.serving import Runner
from dsv4.serving.drafters import drafter_of
from dsv4.serving.drafting import DSPARK, DraftPlan
from dsv4.serving.graphs import Graphs, SamplerStep
from dsv4.serving.row_state import RowState
from dsv4.serving.speculative import SpeculativeStep
from dsv4.speculation.draft_head import AUTO, COPY, OWN, why_no_copy
from dsv4.speculation.forced import ForcedAcceptance
from dsv4.speculation.verify import verify_sampled

VERIFIED = (1, 2, 4, 6)  # tokens of a sequence in a verified step
DRAWN = ("uniform", "zipf 1")  # of ``ROUTINGS``; with experts in host memory, all of them
_DRAWS = 4096  # most tokens of all draws together, but at least 8 draws
PLAIN, DRAFTS, SINGLE = "plain", "drafts", "single"  # steps of which loaded experts are counted


def measure(
    measurement: Measurement, drafts: DraftRequest, tokens: int, context: int
) -> list[SpeculationRow]:
    """Measure steps with drafts: a row for each way to draw experts, or one of a checkpoint.

    Args:
        measurement: Of the model.
        drafts: Which drafts.
        tokens: Sequences.
        context: Tokens of each before the steps.
    """
    request = measurement.request
    placement = request.host_experts
    rows = [
        SpeculationRow(
            measurement.named,
            tokens=tokens,
            context=context,
            method=drafts.method,
            drafts=drafts.tokens,
            drawn=drawn,
            forced=drafts.share is not None,
            share=drafts.share or 0.0,
            threshold=drafts.threshold_words,
            placement=(
                f"{placement.static}+{placement.slots}"
                if isinstance(placement, HostExperts)
                else ""
            ),
        )
        for drawn in _ways(request)
    ]
    for row in rows:
        _measure(measurement, drafts, row)
    return rows


def _ways(request: ModelRequest) -> tuple[str, ...]:
    """Return how experts are drawn, by keys of ``ROUTINGS``; empty: routers choose them."""
    if request.checkpoint is not None:
        return ("",)
    return DRAWN if request.host_experts is None else tuple(ROUTINGS)


def _measure(measurement: Measurement, drafts: DraftRequest, row: SpeculationRow) -> None:
    take = measurement.take
    with _experts(measurement, row) as experts:
        take(row, ("draft_ms",), lambda: _time_parts(measurement, row, experts))
        take(row, ("plain_ms",), lambda: _time_plain(measurement, row, experts))
        figures = ("step_ms", "token_ms", "length")
        take(row, figures, lambda: _time_drafts(measurement, drafts, row, experts))


@dataclass(eq=False)
class Experts:
    """The experts of steps.

    Attributes:
        model: The model.
        chosen: int64 ``[layers, tokens, k]``, experts that routers return; None: their own choice.
        draws: ``[n, layers, tokens, k]``, successive values of ``chosen``.
    """

    model: DeepseekV4ForCausalLM
    chosen: torch.Tensor | None = None
    draws: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self._next = itertools.cycle(() if self.draws is None else self.draws)
        self._hosted = bool(hosted_of(self.model))
        self._before: CacheUse | None = None

    def start(self) -> None:
        """Count what steps load from host memory from now on; waits for the device."""
        if self._hosted:
            self._before = cache_use(self.model)

    def note(self, row: SpeculationRow, step: str, tokens: int) -> None:
        """Note in a row what steps loaded since ``start``; nothing if all experts are there.

        Args:
            row: The row.
            step: Name of the steps.
            tokens: Tokens of each sequence in them.
        """
        if self._before is None:
            return
        use, self._before = cache_use(self.model).since(self._before), None
        row.hit_rates[step] = use.hit_rate
        row.loaded[step] = use.loaded_bytes / max(1, use.steps)
        if not fits_slots(self.model, row.tokens * tokens):
            row.waves.append(step)

    def renew(self) -> None:
        """Draw the experts of the next step."""
        if self.chosen is not None:
            self.chosen.copy_(next(self._next))

    def read(self, tokens: int, step: Callable[[], object]) -> float:
        """Return the average number of distinct experts of a main layer that a step reads here.

        Args:
            tokens: Tokens of the step.
            step: Runs it.
        """
        if self.draws is None:
            return experts_chosen(self.model, step)
        config = self.model.config
        held = LocalSizes.of(config, self.model.parallel).experts
        main = self.draws[:, : config.num_hidden_layers, :tokens].flatten(2)
        counts = torch.zeros(*main.shape[:2], config.n_routed_experts, device=main.device)
        counts.scatter_(2, main, 1.0)
        return float(counts[..., held.start : held.stop].sum(-1).mean())


@contextmanager
def _experts(measurement: Measurement, row: SpeculationRow) -> Iterator[Experts]:
    """Draw the experts inside the block as a row says."""
    model, request = measurement.model, measurement.request
    if not row.drawn:
        yield Experts(model)
        return
    config = model.config
    most = row.tokens * max(*VERIFIED, row.drafts + 1)
    with drawn_routing(model, most, draft=True) as chosen:
        layers, _, top_k = chosen.shape
        count = _DRAWS // most
        if not row.placement:  # slots would hold what few draws repeat
            count = min(request.replays, count)
        count = max(8, count)
        sizes = (count, layers, most, top_k, config.n_routed_experts)
        draws = draw_experts(ROUTINGS[row.drawn], *sizes, request.weights.seed)
        if not row.placement:
            # Each layer has its own popular experts, and they may be on any rank.
            generator = torch.Generator().manual_seed(request.weights.seed)
            names = torch.rand(layers, config.n_routed_experts, generator=generator).argsort(1)
            draws = names.view(1, layers, 1, -1).expand(count, -1, most, -1).gather(3, draws)
        experts = Experts(model, chosen, draws.to(model.device))
        experts.renew()
        yield experts


class Parts:
    """The parts of steps with drafts, of some sequences at one context.

    Args:
        model: With its draft layers, packed.
        plan: The drafts.
        sequences: How many.
        context: Tokens of each before the step.
        most: Most tokens of a sequence in a step, at least one more than its drafts.
        seed: Seed of the prompts, and of the tokens that are verified.
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
        self._model, self._plan, self._size, self._most = model, plan, sequences, most
        self._filled = DecodeStep(model, sequences, context, seed, new_tokens=most)
        self._state = RowState(sequences, model.config.vocab_size, model.device)
        self._graphs = Graphs()
        cache = self._filled.cache
        self._sampler = SamplerStep(model, cache, self._state, (sequences,), self._graphs)
        self._state.tokens[:sequences] = self._filled.tokens
        self._sampler.write(self._filled.rows.tolist())
        self._step = self._step_with(AUTO)
        generator = torch.Generator().manual_seed(seed + 1)
        shape, vocabulary = (sequences, most), drawn_vocabulary(model)
        ids = torch.randint(2, vocabulary, shape, generator=generator)
        self._step.put(ids.to(model.device))

    def _step_with(self, head: str) -> SpeculativeStep:
        """Return a step whose draft has a head of a kind."""
        model, cache = self._model, self._filled.cache
        drafter = drafter_of(self._plan, model, cache, head=head)
        return SpeculativeStep(
            model,
            cache,
            self._state,
            self._sampler,
            self._graphs,
            drafter,
            self._most - 1,
            verify_sampled,
        )

    def draft(self) -> Callable[[], object]:
        """Return a call that drafts greedily."""
        return self._step.work("draft", self._size, self._plan.tokens)

    def draft_pass(self, head: str) -> Callable[[], object]:
        """Return a call of the draft's layers once, with a head of ``dsv4.speculation``."""
        drafts = self._plan.tokens if self._plan.method == DSPARK else 1
        return self._step_with(head).work("draft", self._size, drafts)

    def single(self) -> Callable[[], object]:
        """Return a call of the model on one token of each sequence, without a draft."""
        return self._decode

    def _decode(self) -> None:
        model, filled = self._model, self._filled
        batch = Batch.decode(filled.cache.lengths[filled.rows], filled.rows)
        step = CacheStep(filled.cache, batch)
        hidden, _ = model.model(filled.tokens.unsqueeze(0), None, step)
        model.logits(hidden[0])

    def verify(self, tokens: int) -> Callable[[], object]:
        """Return a call of the main model on some tokens of each sequence."""
        return self._step.work("forward", self._size, tokens - 1)

    def milliseconds(
        self, work: Callable[[], object], replays: int, experts: Experts, tokens: int = 0
    ) -> float:
        """Return the median time of a call: of replays of its graph, or of calls without a graph.

        Args:
            work: The call.
            replays: Number of replays.
            experts: Experts, drawn before each replay.
            tokens: Tokens of each sequence for which main layers choose experts. If slots cannot
                hold the experts that they may choose, nothing is captured.
        """
        device = self._model.device
        if has_graphs(device) and fits_slots(self._model, self._size * tokens):
            graph, _ = self._graphs.captured(work)
            experts.start()
            return replay_ms(graph, replays, experts.renew)
        experts.renew()
        work()
        experts.start()
        times = []
        for _ in range(replays):
            experts.renew()
            times.append(seconds_of(device, work))
        return 1e3 * statistics.median(times)


@torch.inference_mode()
def _time_parts(measurement: Measurement, row: SpeculationRow, experts: Experts) -> None:
    """Time the draft with each head, and the main model for each number of tokens."""
    request, plan = measurement.request, DraftPlan(row.method, row.drafts)
    model, replays = measurement.model, request.replays
    counts = sorted({*VERIFIED, row.drafts + 1})
    parts = Parts(model, plan, row.tokens, row.context, counts[-1], request.weights.seed)
    if row.placement:
        parts.milliseconds(parts.single(), request.slot_steps, experts, 1)
    row.single_ms = parts.milliseconds(parts.single(), replays, experts, 1)
    experts.note(row, SINGLE, 1)
    for tokens in counts:
        name, work = str(tokens), parts.verify(tokens)
        row.verify_ms[name] = parts.milliseconds(work, replays, experts, tokens)
        experts.note(row, name, tokens)
        row.verify_experts[name] = experts.read(row.tokens * tokens, work)
    if not row.placement:
        row.expert_ms = 1e-3 * measurement.rates.bound_us(round(expert_bytes(model)), 0)
        for name, ms in row.verify_ms.items():
            row.verify_over_single[name] = (ms - row.more_experts_ms(name)) / row.single_ms
    for head in (OWN, COPY) if not why_no_copy(model) else (OWN,):
        row.pass_ms[head] = parts.milliseconds(parts.draft_pass(head), replays, experts)
    row.draft_ms = parts.milliseconds(parts.draft(), replays, experts)


def _time_plain(measurement: Measurement, row: SpeculationRow, experts: Experts) -> None:
    """``Runner.step`` without drafts."""
    with _runner(measurement, row, speculate=None) as runner:
        total = _timed(measurement, row, runner, experts)
    row.plain_ms = total / measurement.request.steps
    experts.note(row, PLAIN, 1)


def _time_drafts(
    measurement: Measurement, drafts: DraftRequest, row: SpeculationRow, experts: Experts
) -> None:
    """``Runner.step`` with drafts."""
    verify = verify_sampled if drafts.share is None else ForcedAcceptance(drafts.share)
    with _runner(
        measurement,
        row,
        speculate=row.method,
        draft_tokens=row.drafts,
        confidence_threshold=drafts.threshold,
        verify=verify,
    ) as runner:
        total, steps = _timed(measurement, row, runner, experts), measurement.request.steps
    row.steps, row.step_ms = steps, total / steps
    experts.note(row, DRAFTS, 1 + row.drafts)
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


def _timed(
    measurement: Measurement, row: SpeculationRow, runner: Runner, experts: Experts
) -> float:
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

    def run(steps: int) -> None:
        for _ in range(steps):
            experts.renew()
            runner.step()

    run(request.slot_steps)
    experts.start()
    verified, accepted, before = counts.drafted, counts.accepted, counts.steps
    total = 1e3 * seconds_of(device, lambda: run(request.steps))
    row.verified, row.accepted = counts.drafted - verified, counts.accepted - accepted
    passed = counts.steps - before  # of each sequence
    row.drafted = passed * row.drafts
    if passed:
        row.length = 1 + row.accepted / passed
    for added in requests:
        if added.error is not None:
            raise added.error
        if added.done:
            raise SkippedError("a sequence ended before all of them were timed")
    return total
