"""Times of decode steps and prompts, each on its own: what raises becomes a reason in the row."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial

import torch

from dsv4.bench.environment import Rates
from dsv4.bench.suites import whole_model
from dsv4.bench.suites.model import profile
from dsv4.bench.suites.model.document import (
    DecodeRow,
    ExpectedRow,
    Measured,
    Named,
    ProfileRow,
    PromptRow,
)
from dsv4.bench.suites.model.marks import decode_ms, marked
from dsv4.bench.suites.model.request import (
    DETERMINISTIC,
    EAGER,
    GENERATE,
    KERNELS,
    RUNNER,
    STEP,
    WARM_STEPS,
    ModelRequest,
)
from dsv4.bench.suites.model.trace.capture import mapped
from dsv4.bench.suites.model.trace.step_map import StepMap
from dsv4.bench.suites.whole_model import DecodeStep
from dsv4.bench.tables import short
from dsv4.kv_cache.layer_cache import BLOCK
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel.context import has_own_tokens, tensor_parallel
from dsv4.parallel.planner import StepParts
from dsv4.serving import Prepared, Request, Runner, prepare, release

NOT_ASKED = "not in --columns"
_KERNELS = ("kernels_ms", "launches")
_REASON = 160  # characters of an error
_PROMPTS = 3  # timed prompts of a length
_TAIL = 16  # tokens of a prompt that are its own where prompts begin alike


class SkippedError(Exception):
    """A figure cannot be had here; the message says why."""


class WrongError(RuntimeError):
    """A result is wrong, so its time is not given."""


def has_graphs(device: torch.device) -> bool:
    """Return whether decode steps can be captured there."""
    return device.type == "cuda"


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(device: torch.device, call: Callable[[], object]) -> float:
    """Wall time of a call, with the work that it leaves to the device."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begin


class Measurement:
    """Measures one model.

    Attributes:
        profiles: Kernels of the steps that were captured.
        prepared: What ``dsv4.serving.prepare`` did before each prompt length.
        named: The model, for rows.
    """

    def __init__(self, model: DeepseekV4ForCausalLM, request: ModelRequest, rates: Rates) -> None:
        self.model = model
        self.request = request
        self.rates = rates
        self.profiles: list[ProfileRow] = []
        self.prepared: list[Prepared] = []
        self.named = Named(**request.named())
        self._seed = request.weights.seed
        if model.parallel is not None and has_own_tokens(model.parallel):
            self._seed += model.parallel.rank  # prompts of its own
        self._generator = torch.Generator().manual_seed(self._seed + 1)

    def prompt(self, tokens: int) -> PromptRow:
        """Time to the first token of a prompt."""
        flops = whole_model.prompt_flops(self.model, tokens)
        row = PromptRow(self.named, prompt=tokens, flops=flops)
        row.flops_ms = 1e-3 * self.rates.bound_us(0, flops)
        self.take(row, ("first_ms", "generate_ms"), lambda: self._first_tokens(row))
        self.take(row, ("runner_ms",), lambda: self._runner_first_tokens(row))
        return row

    def decode(self, tokens: int, context: int) -> DecodeRow:
        """Decode steps of some sequences at a context."""
        uniform = whole_model.uniform_held(self.request.config, tokens, self.model.parallel)
        row = DecodeRow(self.named, tokens=tokens, context=context, experts_uniform=uniform)
        self._model_steps(row)
        if self._is_requested(row, RUNNER, "runner_ms", "capture_s"):
            self.take(row, ("runner_ms", "capture_s"), lambda: self._runner_steps(row))
        if self._is_requested(row, GENERATE, "generate_ms"):
            self.take(row, ("generate_ms",), lambda: self._generate_steps(row))
        if self._is_requested(row, DETERMINISTIC, "deterministic_ms"):
            self.take(row, ("deterministic_ms",), lambda: self._deterministic_steps(row))
        if self._is_requested(row, KERNELS, *_KERNELS):
            row.missing.update(dict.fromkeys(_KERNELS, "the command ended before"))
        return row

    def kernels(self, row: DecodeRow) -> None:
        """Kernels of a row's captured step; after all other times, which a profiler could change.

        Args:
            row: A row that ``decode`` returned.
        """
        if self._is_requested(row, KERNELS, *_KERNELS):
            for name in _KERNELS:
                row.missing.pop(name, None)
            self.take(row, _KERNELS, lambda: self._profiled_step(row))

    def map(self, row: DecodeRow) -> StepMap:
        """Map the launches of a row's captured step.

        Raises:
            RuntimeError: if the driver cannot list the nodes of the step's graph.
            ValueError: if the profiler's record does not fit the graph.
        """
        with torch.inference_mode():
            title = f"{row.tokens} at {row.context}"
            return mapped(self._new_step(row), title)

    def _is_requested(self, row: Measured, column: str, *figures: str) -> bool:
        """Return whether a column was asked for; if not, the row says so."""
        if column in self.request.columns:
            return True
        row.missing.update(dict.fromkeys(figures, NOT_ASKED))
        return False

    def take(self, row: Measured, names: Sequence[str], measure: Callable[[], object]) -> None:
        """Measure figures of a row; the row says why one of them is missing."""
        reason, failed = self._left_out(row) or self._spent(), False
        if reason is None:
            try:
                with torch.inference_mode():
                    measure()
            except SkippedError as error:
                reason = str(error)
            except Exception as error:
                if self._has_peers:  # they wait for this rank, and all of them end
                    raise
                # Whatever it is, other figures are still measured.
                traceback.print_exc()
                reason, failed = short(f"{type(error).__name__}: {error}", _REASON), True
            self._free()
        for name in names:
            if getattr(row, name) is None and name not in row.missing:
                row.missing[name] = reason or "not measured"
                row.failed += [name] * failed

    def _left_out(self, row: Measured) -> str | None:
        """Return the reason why a row is not measured, the same on all ranks, or None."""
        sizes = getattr(row, "tokens", 0), getattr(row, "context", 0)
        return self.request.left_out.get(sizes)

    @property
    def _has_peers(self) -> bool:
        return self.request.ranks > 1 and not self.request.emulated

    def _spent(self) -> str | None:
        """Return why nothing more is started, on all ranks what rank 0 says."""
        spent = self.request.budget.spent()
        context = self.model.parallel
        return spent if context is None else context.group.broadcast(spent)

    def _free(self) -> None:
        """Give back what ``generate`` keeps, and memory that nothing uses."""
        release(self.model)
        if self.request.device.type == "cuda":
            torch.cuda.empty_cache()

    def draw_prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Draw prompts of some tokens."""
        shape = (count, tokens)
        vocabulary = whole_model.drawn_vocabulary(self.model)
        return torch.randint(2, vocabulary, shape, generator=self._generator).tolist()

    def expected(self, row: DecodeRow) -> ExpectedRow | None:
        """Compute a row's step by the model of several GPUs; None for one, or several sequences.

        The model is of ranks that process the same tokens.
        """
        request, context = self.request, tensor_parallel(self.model.parallel)
        if context is None or row.tokens > 1 or row.bytes_ms is None:
            return None
        layers = request.config.num_hidden_layers
        parts = StepParts.of(layers, request.ranks, row.bytes_ms)
        if parts is None:
            return None
        figures = (parts.latency, parts.bytes, parts.sums, parts.total)
        return ExpectedRow(self.named, row.context, *figures)

    # Prompts

    def _first_tokens(self, row: PromptRow) -> None:
        """Time to first token of ``generate``, prepared as ``dsv4.load`` leaves a model.

        The first call, and the median of later ones.
        """
        self.prepared.append(prepare(self.model, speculate=None))
        times = [
            1e3 * seconds_of(self.request.device, partial(self._generate, [prompt], 1))
            for prompt in self.draw_prompts(1 + _PROMPTS, row.prompt)
        ]
        row.first_ms, row.generate_ms = times[0], statistics.median(times[1:])

    def _generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        return self.model.generate(prompts, count, stop_ids=(), speculate=None)

    def _runner_first_tokens(self, row: PromptRow) -> None:
        """Time to first token of a runner, median, without its first prompt."""
        times = []
        tokens = row.prompt + 1
        with Runner(
            self.model, max_sequences=1, max_tokens=tokens, prefix_sequences=0, speculate=None
        ) as runner:
            for prompt in self.draw_prompts(1 + _PROMPTS, row.prompt):
                seconds = seconds_of(self.request.device, partial(_run_alone, runner, prompt))
                times.append(1e3 * seconds)
        row.runner_ms = statistics.median(times[1:])

    # Steps of the model

    def _model_steps(self, row: DecodeRow) -> None:
        """The step by itself: bounds, eager, captured."""
        columns = {STEP: "step_ms", EAGER: "eager_ms"}
        asked = [name for name, figure in columns.items() if self._is_requested(row, name, figure)]
        figures = [columns[name] for name in asked]
        self.take(row, ("experts_read", *figures), lambda: self._of_step(row, asked))
        cost = whole_model.step_cost(self.model, row.tokens, row.context + 1, row.experts_read)
        row.bytes, row.flops = round(cost.weight_bytes + cost.kv_bytes), round(cost.flops)
        row.bytes_ms, row.flops_ms = cost.bytes_ms(self.rates), cost.flops_ms(self.rates)

    def _of_step(self, row: DecodeRow, columns: Sequence[str]) -> None:
        device, step = self.request.device, self._new_step(row)
        row.fill = str(step.fill)
        row.experts_read = step.experts_read()
        logits = step().clone()
        if not bool(logits.isfinite().all()):
            raise WrongError("the logits of the step are not finite")
        if EAGER in columns:
            times = [seconds_of(device, step) for _ in range(max(3, self.request.replays // 10))]
            row.eager_ms = 1e3 * statistics.median(times)
        if STEP not in columns:
            return
        self._check_graphs()
        graph = step.captured()
        graph.replay()
        synchronize(device)
        if not torch.equal(step.logits.view(torch.uint8), logits.view(torch.uint8)):
            raise WrongError("the captured step's logits are not bitwise those of the eager step")
        row.step_ms = whole_model.replay_ms(graph, self.request.replays)

    def _new_step(self, row: DecodeRow) -> DecodeStep:
        return DecodeStep(self.model, row.tokens, row.context, self._seed)

    def _check_graphs(self) -> None:
        if not has_graphs(self.request.device):
            raise SkippedError(_no_graphs(self.request.device))

    def _profiled_step(self, row: DecodeRow) -> None:
        """Profile the captured step, made once more."""
        self._check_graphs()
        step = self._new_step(row)  # holds the memory that the graph reads
        graph = step.captured()
        try:
            kernels = profile.profile_replays(graph.replay)
        except profile.NoKernelsError as error:
            raise SkippedError(str(error)) from error
        row.kernels_ms, row.launches = kernels.ms, kernels.launches
        self.profiles.append(ProfileRow(self.named, row.tokens, row.context, kernels))

    # Steps of a runner and of generate

    def _runner_steps(self, row: DecodeRow) -> None:
        """``Runner.step`` while all sequences decode greedily."""
        request, count, context = self.request, row.tokens, row.context
        own = count * context <= request.prefill_limit
        if not own and (context > request.prefill_limit or context <= _TAIL):
            raise SkippedError(request.too_long(1, context))
        tokens = context + request.new_tokens(count, context)
        runner = Runner(
            self.model,
            max_sequences=count,
            max_tokens=tokens,
            pool_tokens=(count + (not own)) * -(-tokens // BLOCK) * BLOCK,
            buckets=(count,) if has_graphs(request.device) else None,
            prefix_sequences=0 if own else 1,
            speculate=None,
        )
        with runner:
            self._capture(runner, row)
            prompts = self._row_prompts(runner, row, own)
            row.runner_ms = self._step_ms(runner, prompts, tokens - context)

    def _capture(self, runner: Runner, row: DecodeRow) -> None:
        """Capture the runner's graphs ahead of its requests."""
        graphs: list[int] = []
        device = self.request.device
        seconds = seconds_of(device, lambda: graphs.append(runner.warm_up()))
        if graphs[0]:
            row.capture_s = seconds
        elif has_graphs(device):
            row.missing["capture_s"] = "the runner decodes eagerly, for the reason that it logged"
        else:
            row.missing["capture_s"] = _no_graphs(device)

    def _deterministic_steps(self, row: DecodeRow) -> None:
        """Measure a runner whose decode steps have one sequence."""
        request, count, context = self.request, row.tokens, row.context
        if count * context > request.prefill_limit:
            raise SkippedError(request.too_long(count, context))
        new = request.new_tokens(count, context)
        with Runner(
            self.model,
            max_sequences=count,
            max_tokens=context + new,
            prefix_sequences=0,
            deterministic=True,
            speculate=None,
        ) as runner:
            runner.warm_up()
            row.deterministic_ms = self._step_ms(runner, self.draw_prompts(count, context), new)

    def _step_ms(self, runner: Runner, prompts: list[list[int]], new: int) -> float:
        """Milliseconds per step, with ``new`` tokens to each prompt.

        Raises:
            WrongError: if a sequence does not get one token in each timed step.
        """
        steps = self.request.steps
        requests = [runner.add(prompt, max_new_tokens=new, stop_ids=()) for prompt in prompts]
        step_until(runner, requests, WARM_STEPS)
        before = [len(request.tokens) for request in requests]
        total = seconds_of(self.request.device, lambda: _steps(runner, steps))
        gained = {len(request.tokens) - n for request, n in zip(requests, before, strict=True)}
        if gained != {steps}:
            raise WrongError(f"sequences got {sorted(gained)} tokens in {steps} timed steps")
        return 1e3 * total / steps

    def _row_prompts(self, runner: Runner, row: DecodeRow, own: bool) -> list[list[int]]:
        """Prompts of the row's own, or with a common beginning that the runner keeps."""
        count, context = row.tokens, row.context
        if own:
            row.runner_fill = f"{count} prompt{'s' * (count > 1)} of {context} tokens"
            return self.draw_prompts(count, context)
        row.runner_fill = f"1 prompt of {context - _TAIL} tokens, its pages shared"
        (stem,) = self.draw_prompts(1, context - _TAIL)
        runner.add(stem, max_new_tokens=1, stop_ids=()).result()
        return [stem + tail for tail in self.draw_prompts(count, _TAIL)]

    def _generate_steps(self, row: DecodeRow) -> None:
        """Time the decode steps of one call of ``generate``, all sequences together."""
        request, count, context = self.request, row.tokens, row.context
        if count * context > request.prefill_limit:
            raise SkippedError(request.too_long(count, context))
        new = request.new_tokens(count, context)
        # Compiles and captures: the same batch and the same longest sequence, few tokens.
        longest = context + new - WARM_STEPS
        self._generate(
            [*self.draw_prompts(count - 1, 1), *self.draw_prompts(1, longest)], WARM_STEPS
        )
        with marked() as marks:
            self._generate(self.draw_prompts(count, context), new)
        row.generate_ms = decode_ms(marks, count, WARM_STEPS // 2, request.steps)
        if row.generate_ms is None:
            raise WrongError(f"found fewer than {request.steps} decode steps in a call of generate")


def _no_graphs(device: torch.device) -> str:
    return f"needs a CUDA GPU, the device is {device}"


def _run_alone(runner: Runner, prompt: Sequence[int]) -> None:
    runner.add(prompt, max_new_tokens=1, stop_ids=()).result()


def _steps(runner: Runner, count: int) -> None:
    for _ in range(count):
        runner.step()


def step_until(runner: Runner, requests: Sequence[Request], tokens: int) -> None:
    """Run steps until every request has some tokens.

    Raises:
        RequestError: of a request that failed.
    """
    while any(len(request.tokens) < tokens for request in requests):
        runner.step()
        for request in requests:
            if request.error is not None:
                raise request.error
