"""The runner that a model on a GPU keeps for ``generate``, and ``prepare``, which makes it ahead.

It keeps the graphs of steps, whose capture takes longer than most answers, and the cache that they
read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4 import dispatch
from dsv4.layers.step_tokens import prepared_tokens
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel.context import has_own_tokens
from dsv4.serving._setup import why_eager
from dsv4.serving._weights import Weights
from dsv4.serving.arguments import checked_count
from dsv4.serving.drafting import AUTO, DraftPlan, drafting_of
from dsv4.serving.graphs import default_buckets
from dsv4.serving.options import SamplingOptions
from dsv4.serving.prefix_cache import BLOCK
from dsv4.serving.prompts import BUCKETS
from dsv4.serving.request import LogitsError
from dsv4.serving.runner import Runner
from dsv4.serving.sampling import Sampler

_ATTRIBUTE = "_kept_runner"
_STEP = 1024  # tokens that the longest sequence is rounded up to
# Options of the sampler that ``generate`` can need: greedy, a temperature, top_p.
_VARIANTS = (
    SamplingOptions(),
    SamplingOptions(temperature=1.0),
    SamplingOptions(temperature=1.0, top_p=0.9),
)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capacity:
    """The capacity that a call of ``generate`` needs, or that a kept runner has.

    Attributes:
        sequences: Sequences at one time.
        tokens: Tokens of the longest sequence.
        pool: Tokens of all sequences together, in whole blocks.
    """

    sequences: int
    tokens: int
    pool: int

    @classmethod
    def of_prompts(cls, prompts: Sequence[Sequence[int]], new: int) -> Capacity:
        """Return the capacity for prompts and ``new`` tokens after each."""
        totals = [len(prompt) + new for prompt in prompts]
        return cls(len(prompts), max(totals, default=0), sum(map(_in_blocks, totals)))

    @classmethod
    def of_equal(cls, sequences: int, tokens: int) -> Capacity:
        """Return the capacity for sequences of one length."""
        return cls(sequences, tokens, sequences * _in_blocks(tokens))

    def holds(self, other: Capacity) -> bool:
        """Return whether another capacity fits in this one."""
        return (
            self.sequences >= other.sequences
            and self.tokens >= other.tokens
            and self.pool >= other.pool
        )

    def rounded(self, most: int) -> Capacity:
        """Return a larger capacity, for calls that need a little more.

        ``most`` is the limit of any sequence.
        """
        tokens = max(self.tokens, min(_rounded(self.tokens, _STEP), most))
        return Capacity.of_equal(self.sequences, tokens)

    def grown(self, need: Capacity, most: int) -> Capacity:
        """Return a capacity for this and for ``need``; what is too small at least doubles."""
        sequences, tokens, pool = self.sequences, self.tokens, self.pool
        if need.sequences > sequences:
            more = max(need.sequences, 2 * sequences)
            sequences = next(n for n in default_buckets(_rounded(more, 8)) if n >= more)
        if need.tokens > tokens:
            tokens = min(_rounded(max(need.tokens, 2 * tokens), _STEP), most)
        if need.pool > pool:
            pool = max(need.pool, 2 * pool)
        # More sequences get as many tokens as this call's, not as the longest.
        pool = max(pool, sequences * need.rounded(most).pool // need.sequences, _in_blocks(tokens))
        return Capacity(sequences, tokens, min(pool, Capacity.of_equal(sequences, tokens).pool))

    def __str__(self) -> str:
        if self.sequences == 1:
            return f"a sequence of {self.tokens} tokens"
        return f"{self.sequences} sequences of {self.tokens} tokens, {self.pool} together"


@dataclass(frozen=True)
class Kind:
    """Options of a call of ``generate`` that its runner must have, apart from its capacity.

    Attributes:
        chunk: Most prompt tokens of a step; None: the runner's own.
        plan: How tokens are drafted; None: they are not.
    """

    chunk: int | None = None
    plan: DraftPlan | None = None


@dataclass(frozen=True)
class Prepared:
    """The result of ``prepare``; ``print`` shows it.

    Attributes:
        capacity: Capacity of the kept runner; None if there is none.
        graphs: Number of CUDA graphs that it captured.
        seconds: Time that this took.
        bytes: Growth of the memory that PyTorch's allocator holds: cache, graphs, and the buffers
            of a step, which other work may use between steps.
        skipped: Why there is no runner; empty if there is one.
    """

    capacity: Capacity | None = None
    graphs: int = 0
    seconds: float = 0.0
    bytes: int = 0
    skipped: str = ""

    def __str__(self) -> str:
        if self.skipped:
            return f"nothing is prepared: {self.skipped}"
        return (
            f"room for {self.capacity}; {self.graphs} graphs, {self.bytes / 1e9:.2f} GB, "
            f"{self.seconds:.1f} s"
        )


@dataclass(eq=False)
class KeptRunner:
    """A model's runner, with its capacity and weights; a copy of the model does not get it.

    Attributes:
        runner: The runner, or None.
        capacity: Its capacity.
        weights: The weights whose addresses its graphs hold.
        kind: Its other options.
        lock: Lock held while the runner is used or replaced.
    """

    runner: Runner | None = None
    capacity: Capacity | None = None
    weights: Weights | None = None
    kind: Kind | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, model: DeepseekV4ForCausalLM) -> KeptRunner:
        """Return the kept runner of a model, made at its first use."""
        held: KeptRunner = model.__dict__.setdefault(_ATTRIBUTE, cls())
        return held

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptRunner:
        return KeptRunner()

    def __reduce__(self) -> tuple[type[KeptRunner], tuple[()]]:
        return KeptRunner, ()

    def fit(self, model: DeepseekV4ForCausalLM, need: Capacity, kind: Kind) -> tuple[Runner, bool]:
        """Return a runner with room for ``need`` whose graphs read memory of the model.

        Returns:
            The runner, and whether it is new. If it is not, the weights may have been changed
            since.
        """
        runner, capacity, most = self.runner, self.capacity, model.config.max_position_embeddings
        if runner is None or capacity is None or self.weights is None:
            grown = need.rounded(most)
        elif not self.weights.are_in_place(model) or self.kind != kind:
            _logger.info(
                "the model's weights, chunk or drafts changed: generate captures graphs again"
            )
            grown = need.rounded(most)
        elif capacity.holds(need):
            return runner, False
        else:
            grown = capacity.grown(need, most)
            _logger.warning(
                "generate needs room for %s, and its runner has it for %s: it makes one for %s and "
                "captures graphs again, which takes about a second. "
                "dsv4.serving.prepare(model, sequences, tokens) does so ahead",
                *(need, capacity, grown),
            )
        runner = None
        self.drop()  # frees its memory before more is allocated
        return self.make(model, grown, kind, least=need), True

    def make(
        self,
        model: DeepseekV4ForCausalLM,
        capacity: Capacity,
        kind: Kind,
        least: Capacity | None = None,
    ) -> Runner:
        """Make and keep a runner; there must be none.

        Raises:
            torch.OutOfMemoryError: if the GPU has no memory for ``least``, or, if that is None, for
                ``capacity``.
        """
        try:
            runner = new_runner(model, capacity, kind)
        except torch.OutOfMemoryError:
            if least is None or least == capacity or model.parallel is not None:
                raise  # other ranks may have had the memory
            runner = None
        if runner is None and least is not None:  # nothing holds the failed allocations here
            capacity = least
            runner = new_runner(model, capacity, kind)
        self.runner, self.capacity, self.kind = runner, capacity, kind
        self.weights = Weights(model)
        assert runner is not None
        return runner

    def drop(self) -> None:
        """Free the runner."""
        runner = self.runner
        self.runner = self.capacity = self.weights = None
        if runner is not None:
            runner.close()  # waits for the GPU


def new_runner(model: DeepseekV4ForCausalLM, capacity: Capacity, kind: Kind) -> Runner:
    """Make a runner with the options that ``generate`` uses."""
    plan = kind.plan
    return Runner(
        model,
        max_sequences=capacity.sequences,
        max_tokens=capacity.tokens,
        max_chunk=kind.chunk,
        pool_tokens=max(capacity.pool, _in_blocks(capacity.tokens)),
        prefix_sequences=0,
        **({"speculate": None} if plan is None else plan.arguments()),
    )


@dataclass(eq=False)
class Lease:
    """The use of a runner for one call.

    Attributes:
        runner: The runner.
    """

    runner: Runner
    _model: DeepseekV4ForCausalLM
    _owner: KeptRunner | None = None  # None: the runner is this call's own
    _is_new: bool = True

    def is_current(self) -> bool:
        """Return whether the runner was made for the weights as they are now, on all ranks."""
        if self._owner is None or self._is_new:
            return True
        weights = self._owner.weights
        is_current = weights is not None and weights.are_those_of(self._model)
        parallel = self._model.parallel
        if parallel is None or not has_own_tokens(parallel):
            return is_current
        return all(parallel.group.exchange(is_current))

    def renew(self, need: Capacity, kind: Kind) -> None:
        """Replace the runner: it is not current."""
        assert self._owner is not None
        _logger.info("the model's weights changed: generate captures graphs again")
        self._owner.drop()
        del self.runner  # frees its memory before more is allocated
        self.runner, self._is_new = self._owner.fit(self._model, need, kind)


@contextmanager
def lease(model: DeepseekV4ForCausalLM, need: Capacity, kind: Kind) -> Iterator[Lease]:
    """Use the kept runner on a GPU if nobody else uses it, otherwise a new runner."""
    owner = KeptRunner.of(model)
    if not _keeps(model) or not owner.lock.acquire(blocking=False):
        rounded = need.rounded(model.config.max_position_embeddings)
        with new_runner(model, rounded, kind) as runner:
            yield Lease(runner, model)
        return
    try:
        runner, is_new = owner.fit(model, need, kind)
        yield Lease(runner, model, owner, is_new)
    finally:
        owner.lock.release()


def release(model: DeepseekV4ForCausalLM) -> None:
    """Free the cache and the graphs that ``generate`` keeps for a model; on all of its ranks.

    Raises:
        TypeError: if it is no model of this package.
    """
    from dsv4.model import DeepseekV4ForCausalLM

    if not isinstance(model, DeepseekV4ForCausalLM):
        kind = type(model).__name__
        raise TypeError(f"release: model is {kind}, wanted a dsv4.model.DeepseekV4ForCausalLM")
    held = model.__dict__.get(_ATTRIBUTE)
    if held is not None:
        with held.lock:
            held.drop()


@torch.inference_mode()
def prepare(
    model: DeepseekV4ForCausalLM,
    sequences: int = 1,
    tokens: int | None = None,
    *,
    speculate: str | None = AUTO,
    draft_tokens: int | None = None,
    confidence_threshold: float | None = None,
) -> Prepared:
    """Make the kept runner and its graphs and launch each once, before ``generate`` needs them.

    Afterwards ``generate`` captures no graph and waits for no memory, for up to as many prompts and
    tokens, greedy or with a temperature and ``top_p``. ``dsv4.load`` calls it; ``dsv4.warmup``
    should have compiled the kernels. A runner that is kept already is replaced.

    It captures decode steps and steps of up to 1536 prompt tokens, runs one of as many tokens as a
    step has by default (4096), and calls ``generate`` with prompts of each captured size. No
    sequence stays in the cache, and no random number is drawn from a generator of others.

    The GPU holds, until ``release``, the cache (for one sequence of 8192 tokens 0.16 GB in Flash
    and 0.22 GB in Pro), the buffers of the graphs and those of a step of 4096 tokens;
    ``Prepared.bytes`` has the sum. For Flash's 43 layers the cache and the graphs took 0.5 GB, and
    with the buffers of a step, which other work may use in between, 2.8 GB (H100).

    Args:
        model: A model of ``dsv4.load``, or a packed one.
        sequences: Prompts of a call.
        tokens: Most tokens of a sequence, prompt and answer; at most
            ``max_position_embeddings`` are taken. None: twice the tokens of a step by default,
            8192; with experts in host memory and a buffer for long prompts up to 32768.
        speculate: How the calls draft, see ``Runner``.
        draft_tokens: See there.
        confidence_threshold: See there.

    Returns:
        A report. Nothing is prepared where steps are not captured, for instance on a CPU, or, with
        a warning, where memory does not suffice or a capture fails; ``generate`` works in all
        cases.

    Raises:
        TypeError: if ``model`` is no model, or a number is no int.
        ValueError: if ``sequences`` is below 1 or ``tokens`` below 2, or ``speculate`` names drafts
            that cannot be used.
    """
    if not isinstance(getattr(model, "_orig_mod", model), DeepseekV4ForCausalLM):
        raise TypeError(f"prepare: model is {type(model).__name__}, wanted what dsv4.load gives")
    checked_count("prepare", "sequences", sequences, 1)
    if tokens is None:
        tokens = prepared_tokens(model)
    checked_count("prepare", "tokens", tokens, 2)
    drafting = drafting_of(model, speculate, draft_tokens, threshold=confidence_threshold)
    kind = Kind(plan=drafting.plan)
    capacity = Capacity.of_equal(sequences, min(tokens, model.config.max_position_embeddings))
    reason = why_eager(model, sequences * drafting.certain_tokens)
    if reason is None and not dispatch.is_free(dispatch.AUTO):
        reason = "a backend is asked for by name"
    if reason is not None:
        _logger.info("generate is not prepared, its steps run eagerly: %s", reason)
        return Prepared(skipped=reason)
    drafts = {
        "speculate": speculate,
        "draft_tokens": draft_tokens,
        "confidence_threshold": confidence_threshold,
    }
    with torch.cuda.device(model.device):
        return _prepared(model, capacity, kind, drafts)


def _prepared(
    model: DeepseekV4ForCausalLM, capacity: Capacity, kind: Kind, drafts: Mapping[str, Any]
) -> Prepared:
    """Make the kept runner and rehearse calls; warn with the reason if that fails.

    ``drafts``: arguments of ``generate`` that give ``kind``.
    """
    device, held = model.device, KeptRunner.of(model)
    with held.lock:
        held.drop()
    torch.cuda.empty_cache()  # as each capture does; else `bytes` would count what that gives back
    start, before, reason = time.perf_counter(), torch.cuda.memory_reserved(device), ""
    try:
        with held.lock:
            held.drop()  # another thread may have made one
            graphs = held.make(model, capacity, kind).warm_up(_VARIANTS)
        if graphs:
            _rehearse(model, capacity, drafts)
            torch.cuda.synchronize(device)
        else:
            reason = "a capture failed"
    except torch.OutOfMemoryError as error:
        if model.parallel is not None:
            raise  # other ranks may have had the memory
        reason = str(error).partition("\n")[0]
    if reason:
        with held.lock:
            held.drop()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        _logger.warning(
            "generate is not prepared, for %s with %.2f of %.1f GB of the GPU free: %s; its first "
            "call tries again",
            *(capacity, free / 1e9, total / 1e9, reason),
        )
        return Prepared(skipped=reason)
    grown = torch.cuda.memory_reserved(device) - before
    done = Prepared(capacity, graphs, time.perf_counter() - start, grown)
    _logger.info("generate is prepared: %s", done)
    return done


def _rehearse(model: DeepseekV4ForCausalLM, capacity: Capacity, drafts: Mapping[str, Any]) -> None:
    """Call ``generate`` with prompts of every captured size, greedily and with a sampler.

    The first call imports modules, runs Python code that no step has run, and allocates pinned
    memory for inputs. Before this rehearsal the first prompt of 21 tokens took 3 to 4 ms longer
    than the next (H200, 16 ms). The sampler has a generator of its own, so that the numbers that
    others draw do not change.
    """
    new = min(2, capacity.tokens - 1)
    lengths = [length for length in (1, *BUCKETS) if length + new <= capacity.tokens]
    most = (capacity.sequences, 1)
    sampler = Sampler(1.0, 0.9, torch.Generator(model.device))
    greedy = dict.fromkeys([*((1, length) for length in lengths), most])
    for (sequences, length), chosen in [*((size, None) for size in greedy), (most, sampler)]:
        prompt = [i % model.config.vocab_size for i in range(length)]
        try:
            model.generate([prompt] * sequences, new, sampler=chosen, stop_ids=(), **drafts)
        except RuntimeError as error:
            # If logits are not finite, a later call says so; other ranks go on here.
            if not isinstance(error.__context__, LogitsError):
                raise


def _keeps(model: DeepseekV4ForCausalLM) -> bool:
    """Return whether a model keeps a runner."""
    return model.device.type == "cuda"


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step


def _in_blocks(tokens: int) -> int:
    return _rounded(tokens, BLOCK)
