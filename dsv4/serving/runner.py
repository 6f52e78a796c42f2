"""The runner: decodes the sequences of many requests, which come and go, together."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from dsv4.kv_cache.paged_cache import PagedCache
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel.agreement import before_agreeing, reported
from dsv4.parallel.context import RankError
from dsv4.serving._setup import check_fits, stop_tokens
from dsv4.serving.drafting import AUTO, Verification
from dsv4.serving.launched_steps import LaunchedSteps
from dsv4.serving.options import SamplingOptions, token_ids
from dsv4.serving.prefix_cache import PrefixCache
from dsv4.serving.rank_link import Orders, RankLink
from dsv4.serving.request import Request, RequestError
from dsv4.serving.runner_plan import RunnerPlan, RunnerRequest
from dsv4.serving.sampler import Variant
from dsv4.serving.scheduler import Piece, Scheduler
from dsv4.serving.shared_steps import Needs
from dsv4.serving.speculative import DraftCounts
from dsv4.serving.step_launcher import StepLauncher

_PREFIX_SEQUENCES = 4


class Runner:
    """Decodes many requests over one paged cache, in captured CUDA graphs on a GPU.

    A step processes at most ``max_chunk`` prompt tokens, then decodes one token of every running
    sequence. The tokens of a step reach the host during the next one. The text of a request does
    not depend on other requests, up to rounding: kernels may sum in another order in another batch.
    With ``deterministic`` it does not depend on them at all.

    If a step is interrupted or fails, the next step processes the open requests again from the
    tokens that they have; random numbers depend on positions alone, so their text stays the same.
    A runner is not safe for use by several threads at once.

    With a model on several ranks, each rank makes a runner with the same arguments. An error in a
    step ends the runners of all ranks. With ``parallel="tp"`` ranks call the same methods in the
    same order. Rank 0 decides which requests there are. Other ranks may add the same requests to
    get their tokens, or add none and ``follow`` until rank 0 closes its runner.

    With ``parallel="dp"`` each rank has requests of its own, or none. A step is one of all ranks,
    with the sizes of the largest: ranks with less to do process padding. So a rank that steps waits
    until all others do, by ``step``, ``run`` or ``result``. ``run`` returns on all ranks when the
    requests of all have ended. A rank that expects no more requests calls ``follow`` or ``close``,
    which take part until all ranks do so.

    With drafts, a decode step processes a token of every sequence and some drafts after it, and
    keeps the drafts that are right. Greedy text is the same as without drafts. Sampled tokens have
    the same distribution; the tokens that a seed draws depend on the drafts.

    Attributes:
        model: The model.
        cache: The model's paged cache, with pools.
        limits: Most requests, tokens and chunks.
        drafting: How tokens are drafted, or why not.
        draft_counts: Counts of drafts so far.
    """

    def __init__(
        self,
        model: DeepseekV4ForCausalLM,
        *,
        max_sequences: int,
        max_tokens: int,
        max_chunk: int | None = None,
        pool_tokens: int | None = None,
        window_pages: int | None = None,
        index_format: str | None = None,
        buckets: Sequence[int] | None = None,
        prompt_buckets: Sequence[int] | None = None,
        capture: bool | None = None,
        prefix_sequences: int = _PREFIX_SEQUENCES,
        deterministic: bool = False,
        speculate: str | None = AUTO,
        draft_tokens: int | None = None,
        confidence_threshold: float | None = None,
        verify: Verification | None = None,
    ) -> None:
        """Allocate the cache.

        Args:
            model: The model, on its device, in evaluation mode.
            max_sequences: Requests that run at one time; more wait.
            max_tokens: Most tokens of a request, prompt and answer.
            max_chunk: Most prompt tokens per step, of all requests; None: 4096, at most
                ``max_tokens``. With experts in host memory and a buffer for long prompts (its
                ``staged``) 16384, or 8192 or 4096 where free memory does not hold such a step.
            pool_tokens: Tokens of all requests together that fit in the cache; None: as many as all
                sequences can have. With fewer, requests wait or are preempted.
            window_pages: Pages of raw KV entries; None: enough for every step.
            index_format: Format of the indexer's keys, see ``PagedCache``; None: ``"index_mxfp4"``
                where it holds the same values as ``"plain"``.
            buckets: Batch sizes of decode steps, which smaller batches are padded to; None: 1, 2,
                4 and multiples of 8 in captured steps, no padding in eager ones.
            prompt_buckets: Numbers of prompt tokens per step, which fewer are padded to; a step
                of more, or of more than 64 prompts, is eager. None: eight, from 32 to 1536, in
                captured steps and with ``deterministic``, no padding in eager ones. Empty: prompts
                are processed eagerly.
            capture: Whether steps are CUDA graphs; None: on a CUDA device, unless the model
                is compiled by ``torch.compile`` or has routed experts for which there is no kernel,
                those that are not packed for instance, which is logged. Whatever this is, steps are
                eager while a backend is requested by name and after a failed capture.
            prefix_sequences: Cache rows kept for prompts that begin like earlier ones; 0: none.
            deterministic: Whether the text and the log-probabilities of a request depend, bit for
                bit, on its prompt, its options, the model, ``max_tokens`` and ``max_chunk`` alone:
                not on other requests, prefixes in the cache, preemptions, or how many sequences
                there is room for. Prompts are processed one after another, in chunks of
                ``max_chunk`` tokens, and every decode step has one sequence, so eight sequences
                take eight times as long as one. With drafts the text depends on ``draft_tokens``,
                too, up to rounding, because it decides on the rows of a step, and not on which
                drafts are right.
            speculate: ``"mtp"`` or ``"dspark"``: draft tokens by these layers of the model;
                ``"auto"``: by those that it holds, if that can be done, in steps of as many
                sequences as it pays for; None: not at all. ``drafting`` says which, and
                ``drafting.explain()`` at how many sequences.
            draft_tokens: Most drafts per step; None: 2 of MTP, all of a DSpark block, 1 of either
                where experts are in host memory. At most ``max_tokens - 1`` are made.
            confidence_threshold: Of DSpark: drafts are verified while the probability that they
                are accepted, which the draft estimates, is at least this; 0: all are verified, 1:
                hardly any. None: by what a draft more costs at the number of sequences, see
                ``drafting.explain()``; 0.28 for one sequence of Flash. (transformers'
                ``assistant_confidence_threshold``, llama.cpp's ``--draft-p-min``.)
            verify: How drafts are accepted; None: by rejection sampling, with ``deterministic`` if
                plain sampling draws the same. Another function is for measurements.

        Raises:
            TypeError: if ``model`` is no model of this package, or an option of another type.
            ValueError: if a size is wrong, ``capture`` is true where nothing can be captured,
                buckets are given with ``deterministic``, or that with ``parallel="dp"``, or
                ``speculate`` names drafts that cannot be used here.
            RankError: on several ranks, if another one failed or has such an argument.
        """
        request = RunnerRequest(
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            max_chunk=max_chunk,
            pool_tokens=pool_tokens,
            window_pages=window_pages,
            index_format=index_format,
            buckets=buckets,
            prompt_buckets=prompt_buckets,
            capture=capture,
            prefix_sequences=prefix_sequences,
            deterministic=deterministic,
            speculate=speculate,
            draft_tokens=draft_tokens,
            confidence_threshold=confidence_threshold,
            verify=verify,
        )
        self.model = model
        with before_agreeing(getattr(model, "parallel", None)):
            plan = request.resolved(model)
        self._build(plan)

    def _build(self, plan: RunnerPlan) -> None:
        """Make the cache, the steps on the device, and what schedules them."""
        model, limits = self.model, plan.limits
        with reported(model.parallel):
            plan, ranks = plan.agreed(model)
            self.cache: PagedCache = plan.new_cache(model)
            self._steps = plan.new_steps(model, self.cache, ranks.part)
        self.limits, self.drafting, self.draft_counts = limits, plan.drafting, DraftCounts()
        self._link, self._shared = ranks.link, ranks.shared
        self._prefixes = PrefixCache(self.cache, limits.prefix_sequences, grid=plan.grid)
        peers = None if model.parallel is None else model.parallel.group
        most = limits.max_sequences * plan.rows_per_sequence
        self._launched = LaunchedSteps(self.cache, most, self.draft_counts, peers)
        self._scheduler = Scheduler(
            self.cache, self._prefixes, limits.max_sequences, self._launched.read, plan.grid
        )
        self._launcher = StepLauncher(
            self._steps, self._scheduler, self._prefixes, self._launched, plan.deterministic
        )
        self._arrivals: deque[Request] = deque()
        self._open: list[Request] = []
        self._count = 0  # requests so far
        self._unfinished = False  # whether a step began and did not end
        self._closed = False

    def add(
        self, prompt: Sequence[int], options: SamplingOptions | None = None, **changes: Any
    ) -> Request:
        """Queue a request.

        Args:
            prompt: Token ids, at least one.
            options: Options of sampling; None: the defaults of ``SamplingOptions``.
            **changes: Fields of ``options`` to change, e.g. ``temperature=0.7``.

        Returns:
            The request: iterate over its tokens, or call ``result``.

        Raises:
            RuntimeError: if the runner is closed.
            TypeError: if the prompt or an option is of the wrong kind.
            ValueError: if the prompt is empty or has a token outside the vocabulary, an option is
                out of range, or the request could never fit the cache.
        """
        if self._closed or (self._shared is not None and self._shared.closes):
            raise RuntimeError("Runner.add: the runner is closed")
        options = SamplingOptions.of(options, changes)
        vocab_size = self.model.config.vocab_size
        tokens = token_ids("prompt", prompt, vocab_size)
        if not tokens:
            raise ValueError("prompt is empty, wanted at least one token")
        self.limits.check_request(len(tokens), options.max_new_tokens)
        check_fits(self.cache, len(tokens) + options.max_new_tokens)
        seed = secrets.randbits(63) if options.seed is None else options.seed
        stops = stop_tokens(self.model.config, options.stop_ids)
        request = Request(self._count, tokens, options, seed, stops, self.step)
        self._count += 1
        if self._link is not None and not self._link.leads:
            self._link.expect(request)
        else:
            self._arrivals.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Cancel a request; its row and pages are free after the next step.

        Raises:
            TypeError: if ``request`` is no request.
        """
        if not isinstance(request, Request):
            raise TypeError(f"request is {type(request).__name__}, wanted what Runner.add returned")
        request.cancel()

    @property
    def captures(self) -> int:
        """The number of CUDA graphs captured so far."""
        return self._steps.captures

    @property
    def has_work(self) -> bool:
        """Return whether a step has something to do."""
        return self._unfinished or self._has_requests

    @property
    def _has_requests(self) -> bool:
        """Return whether there are requests, or results that were not read."""
        scheduler = self._scheduler
        return any((self._arrivals, scheduler.waiting, scheduler.running, self._launched))

    def run(self) -> None:
        """Run steps until all requests have ended, those of other ranks, too."""
        while self.step():
            pass

    @torch.inference_mode()
    def step(self) -> bool:
        """Process prompt tokens, decode each sequence, and read the step before.

        Returns:
            Whether requests are left, with ``parallel="dp"`` on any rank before the step.
        """
        if self._closed:
            return False
        with self._failing(), reported(self.model.parallel):
            if self._link is not None:
                self._obey(self._link)
            return not self._closed and self._step()

    def follow(self) -> None:
        """Take part in the steps of rank 0, on another rank, until rank 0 closes its runner.

        With ``parallel="dp"``, on any rank: in the steps of all others, until all follow or close.

        Raises:
            RankError: if another rank failed.
            ValueError: on rank 0, or without several ranks.
        """
        if self._shared is not None:
            self._shared.closes = True
            while not self._closed:
                self.step()
            return
        if self._link is None or self._link.leads:
            raise ValueError("Runner.follow is for other ranks than 0 of several")
        while not self._closed:
            self.step()

    def _obey(self, link: RankLink) -> None:
        """Take over the requests of rank 0 and how they ended; on rank 0, send them."""
        if link.leads:
            link.lead(self._scheduler.digest(), self._arrivals, self._open)
            return
        orders = link.receive()
        if orders.closes:
            self._shut()
            return
        link.check(orders, self._scheduler.digest())
        self._take_orders(link, orders)

    def _take_orders(self, link: RankLink, orders: Orders) -> None:
        for arrival in orders.arrivals:
            self._arrivals.append(link.request(arrival, self.step))
            self._count = max(self._count, arrival.number + 1)
        for request in (*self._open, *self._arrivals):
            if request.number in orders.ended:
                request.cancel()

    def _step(self) -> bool:
        if self._unfinished:
            self._recover()
        self._unfinished = True
        self._take_arrivals()
        self._scheduler.sweep()
        self._scheduler.admit()
        pieces = self._scheduler.prefill_pieces(self.limits.max_chunk)
        pieces = self._scheduler.reserve(pieces)
        common = self._common(pieces)
        if common is not None and common.closes:
            self._shut()
            return False
        prefilled = self._launcher.prompts(pieces, common)
        decoded = self._launcher.decode(common)
        # The host waits for earlier steps while the device works on the latest one.
        self._launched.read(newest=1 if prefilled or decoded else 0)
        self._scheduler.sweep()
        self._unfinished = False
        return self.has_work if common is None else common.has_work

    def _common(self, pieces: Sequence[Piece]) -> Needs | None:
        """Return the needs of a step of all ranks; None if this one decides alone."""
        shared = self._shared
        if shared is None:
            return None
        tokens, decodes = sum(p.count for p in pieces), self._scheduler.most_decodes(pieces)
        return shared.agree(Needs(self._has_requests, shared.closes, tokens, len(pieces), decodes))

    @torch.inference_mode()
    def warm_up(self, variants: Iterable[SamplingOptions] = (SamplingOptions(),)) -> int:
        """Capture and replay the graphs of every bucket and run an eager chunk, before any step.

        The chunk has as many tokens as a step may have, and runs twice if no graph holds it, so
        that the allocator has its memory and its calls are planned. It is skipped while all rows or
        pages are in use. No sequence stays in the cache, and running ones do not change.

        Args:
            variants: Options of later requests; the sampler of a batch depends on whether its
                requests have a temperature, filters, a repetition penalty and log-probabilities.

        Returns:
            The number of graphs captured so far; 0 if steps are eager, where nothing is done.

        Raises:
            torch.OutOfMemoryError: if the GPU has no memory for a step.
        """
        if self._steps.is_captured and not self._closed:
            distinct = sorted({Variant.of(options) for options in variants}, key=repr)
            with reported(self.model.parallel):
                if self._shared is not None:
                    self._shared.check_warm_up(self._has_requests, distinct)
                self._steps.warm_up(distinct, self._launched.wait_for)
        return self.captures

    @torch.inference_mode()
    def close(self) -> None:
        """Cancel the open requests and release all rows and pages.

        Rank 0 of several closes the runners of all; others wait for that. With ``parallel="dp"``
        all wait until all close.
        """
        if self._closed:
            return
        if self._shared is not None:
            self._cancel_all()
            self.follow()
        elif self._link is None:
            self._shut()
        elif self._link.leads:
            self._link.close()
            self._shut()
        else:
            self.follow()

    def _cancel_all(self) -> None:
        for request in (*self._open, *self._arrivals):
            request.cancel()

    def _shut(self) -> None:
        self._cancel_all()
        self._arrivals.clear()
        self._recover()
        self._closed = True

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """End what runs on the device and waits for a rank that failed in the block."""
        try:
            yield
        except BaseException:
            if self.model.parallel is not None:
                self.model.parallel.group.abandon(self.model.device)
            raise

    def _abandon(self) -> None:
        """Close without waiting for the device, where kernels may wait for a rank that is gone."""
        self._cancel_all()
        self._arrivals.clear()
        self._closed = True

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        parallel = self.model.parallel
        own = self._shared is not None and isinstance(error, RequestError)  # of one request alone
        if error is None or parallel is None or own:
            self.close()
            return
        if not isinstance(error, RankError):  # the others do not come to close theirs
            parallel.group.report(error)
        self._abandon()

    def _take_arrivals(self) -> None:
        if self._arrivals:
            self._open = [request for request in self._open if not request.done]
        while self._arrivals:
            request = self._arrivals[0]
            self._open.append(request)
            self._arrivals.popleft()
            self._prefixes.remember(request.prompt)
            self._scheduler.waiting.append(request)

    def _recover(self) -> None:
        """Rebuild all state from the open requests, because a step did not end."""
        self._unfinished = True
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        while self._arrivals and self._open and self._arrivals[0] is self._open[-1]:
            self._arrivals.popleft()
        self._launched.forget()
        for request in self._open:
            request.check_end()
        self.cache.clear()
        self._prefixes.forget()
        self._scheduler.reset(request for request in self._open if not request.done)
        self._unfinished = False
