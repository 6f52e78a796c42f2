"""Choose which requests have a cache row, and what the next step processes; host only.

Requests are admitted in their order of arrival. The youngest sequence is preempted when pages run
out: its row is freed, and its prompt and answer so far are processed again later. All state here
follows from the open requests, so ``reset`` rebuilds it after a failed step.

With a grid, the computation for a sequence follows from its own tokens: prompts are processed one
at a time in chunks that end at multiples of the grid, and after a preemption the answer so far is
decoded again, not processed like a prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from dsv4.kv_cache.paged_cache import CacheFullError, PagedCache
from dsv4.serving.prefix_cache import CachedRow, PrefixCache
from dsv4.serving.request import Request
from dsv4.serving.sampler import Variant


@dataclass(eq=False)
class RunningSequence:
    """A request that has a cache row.

    Attributes:
        request: Request whose tokens it makes.
        row: Row of the cache.
        fill: Tokens to process before the first new one: the prompt, and after a preemption the
            answer so far, unless there is a grid.
        repeats: Tokens of the answer so far that are still to be decoded again.
        fed: Tokens that the cache row holds, or will hold after the steps that were launched; of
            steps with drafts that were not read those that it certainly will.
        cut: Token at which prefill stops to keep a prefix for other prompts; 0: it does not stop.
        joined: Whether its sampling parameters are on the device.
        closed: Whether it lost its row; it has no part in later steps.
        drafted: Whether it had a step with drafts, after which the row may hold more tokens.
        unread: Decode steps that were launched and whose tokens were not read.
    """

    request: Request
    row: int
    fill: tuple[int, ...]
    fed: int = 0
    cut: int = 0
    joined: bool = False
    closed: bool = False
    repeats: int = 0
    drafted: bool = False
    unread: int = 0
    variant: Variant = field(init=False)

    def __post_init__(self) -> None:
        self.variant = Variant.of(self.request.options)

    @property
    def prefilling(self) -> bool:
        """Return whether tokens of ``fill`` are left."""
        return self.fed < len(self.fill)

    @property
    def decoding(self) -> bool:
        """Return whether another token is to be sampled by a decode step."""
        return self.decodes_after(0)

    def decodes_after(self, count: int) -> bool:
        """Return what ``decoding`` is when ``count`` tokens more are fed."""
        fed = self.fed + count
        limit = len(self.request.prompt) + self.request.options.max_new_tokens
        # The token after the last fed one was sampled; it is fed unless it is the answer's last.
        return len(self.fill) <= fed < limit - 1 and not self.request.done

    def held(self) -> tuple[int, ...]:
        """The tokens that the row holds, or with drafts those of them that belong to the request.

        They have all arrived on the host: a step feeds the tokens that the step before sampled, and
        those are read before the next step is launched.
        """
        tokens = self.request.sequence()
        assert self.drafted or self.fed <= len(tokens)
        return tokens[: self.fed]


@dataclass(frozen=True)
class Piece:
    """New tokens of one sequence in a step.

    Attributes:
        sequence: The sequence.
        count: New tokens, drafts included.
        drafts: How many of them are drafts, which may be wrong.
    """

    sequence: RunningSequence
    count: int
    drafts: int = 0

    @property
    def certain(self) -> int:
        """The tokens that are certainly kept."""
        return self.count - self.drafts

    def without_drafts(self) -> Piece:
        """Return the piece with its certain tokens alone."""
        return replace(self, count=self.certain, drafts=0)

    @property
    def is_last(self) -> bool:
        """Return whether no token to process is left behind them, so that a new one is sampled."""
        return self.sequence.fed + self.count >= len(self.sequence.fill)


class Scheduler:
    """Waiting requests and running sequences.

    Attributes:
        waiting: Requests without a row, in order of arrival.
        running: Sequences, in order of arrival.
    """

    def __init__(
        self,
        cache: PagedCache,
        prefixes: PrefixCache,
        max_sequences: int,
        drain: Callable[[], None],
        grid: int | None = None,
    ) -> None:
        """Make a scheduler without requests.

        Args:
            cache: Cache with the rows.
            prefixes: Prefix cache of the same grid, which keeps rows of the cache.
            max_sequences: Most running sequences.
            drain: Function that reads the results of every launched step.
            grid: See the module; None: no grid.
        """
        self.waiting: deque[Request] = deque()
        self.running: list[RunningSequence] = []
        self._cache, self._prefixes = cache, prefixes
        self._max_sequences = max_sequences
        self._drain = drain
        self._grid = grid

    def reset(self, requests: Iterable[Request]) -> None:
        """Restart with these requests waiting, because the cache was cleared."""
        for sequence in self.running:
            sequence.closed = True
        self.running.clear()
        self.waiting = deque(sorted(requests, key=lambda request: request.number))

    def digest(self) -> int:
        """Return a hash of the sequences, which is equal on all ranks."""
        return hash(tuple((s.row, s.fed, *s.request.tokens_from(-1)) for s in self.running))

    def sweep(self) -> None:
        """Take the rows of requests that have ended, and drop those that waited."""
        for sequence in [s for s in self.running if s.request.done]:
            self._close(sequence)
            if sequence.request.error is None and self._truncated(sequence):
                self._prefixes.keep(sequence.row, sequence.held())
            else:
                self._cache.free(sequence.row)
        if any(request.done for request in self.waiting):
            self.waiting = deque(request for request in self.waiting if not request.done)

    def _truncated(self, sequence: RunningSequence) -> bool:
        """Return whether the row holds ``held``; tokens of drafts behind them are taken back."""
        if not sequence.drafted:
            return True
        return self._cache.truncate(sequence.row, len(sequence.held()))

    def _close(self, sequence: RunningSequence) -> None:
        sequence.closed = True
        self.running.remove(sequence)

    def admit(self) -> None:
        """Give rows to waiting requests while there are rows and pages, in order."""
        while self.waiting and len(self.running) < self._max_sequences:
            request = self.waiting[0]
            fill = request.sequence() if self._grid is None else request.prompt
            cached = self._prefixes.find(fill)
            known = 0 if cached is None else len(cached.tokens)
            if self._will_share(fill, known) or not self._fits(len(fill), known, cached):
                return
            sequence = self._start(request, fill, cached)
            self.running.append(sequence)
            self.waiting.popleft()

    def _start(
        self, request: Request, fill: tuple[int, ...], cached: CachedRow | None
    ) -> RunningSequence:
        row, fed = self._row(cached)
        cut = self._prefixes.boundary(fill)
        repeats = len(request.prompt) + len(request.tokens) - len(fill)
        cut = cut if cut > fed else 0
        return RunningSequence(request, row, fill, fed=fed, cut=cut, repeats=repeats)

    def _row(self, cached: CachedRow | None) -> tuple[int, int]:
        """Return a row and the number of tokens that it holds."""
        if cached is not None:
            try:
                return self._prefixes.fork(cached), len(cached.tokens)
            except CacheFullError:
                pass  # its window needs pages; process the prompt from the beginning
        return self._cache.allocate(), 0

    def _will_share(self, fill: Sequence[int], known: int) -> bool:
        """Return whether a sequence is about to make a longer prefix of ``fill`` available."""
        return any(
            known < s.cut < len(fill) and s.fed < s.cut and s.fill[: s.cut] == fill[: s.cut]
            for s in self.running
        )

    def _fits(self, tokens: int, known: int, cached: CachedRow | None) -> bool:
        """Return whether the pages of a new sequence are free, and one more for each that runs.

        This is an estimate: a step that lacks pages preempts. A single sequence always fits,
        because ``Runner.add`` raises for a request that can never fit.
        """
        if not self.running:
            return True
        block = self._prefixes.block
        need = -(-tokens // block) - known // block + len(self.running)
        while min(self._free_pages(), default=need) < need:
            if not self._prefixes.evict(keep=cached):
                return False
        return True

    def _free_pages(self) -> list[int]:
        free = self._cache.free_pages
        return [count for name, count in free.items() if name != "window"]

    def prefill_pieces(self, budget: int) -> list[Piece]:
        """Return prompt tokens of the next step, at most ``budget``, the oldest sequences first."""
        pieces = []
        for sequence in self.running:
            if budget and sequence.prefilling and not sequence.request.done:
                end = len(sequence.fill)
                if sequence.fed < sequence.cut:
                    end = sequence.cut
                count = min(budget, end - sequence.fed)
                if self._grid is not None:
                    count = min(count, self._grid - sequence.fed % self._grid)
                    return [Piece(sequence, count)]
                pieces.append(Piece(sequence, count))
                budget -= count
        return pieces

    def decode_pieces(self, drafts_of: Callable[[int], int]) -> list[Piece]:
        """Return one token of every sequence that decodes, and drafts after it.

        Args:
            drafts_of: Drafts of each by the number of sequences, which is one with a grid.
        """
        decoding = [sequence for sequence in self.running if sequence.decoding]
        if not decoding:
            return []
        drafts = drafts_of(len(decoding) if self._grid is None else 1)
        return [Piece(sequence, 1 + drafts, drafts) for sequence in decoding]

    def most_decodes(self, pieces: Sequence[Piece]) -> int:
        """Return the most sequences that decode when these prompt tokens are processed."""
        counts = {piece.sequence: piece.count for piece in pieces}
        return sum(sequence.decodes_after(counts.get(sequence, 0)) for sequence in self.running)

    def reserve(self, pieces: list[Piece]) -> list[Piece]:
        """Prepare the cache for a step.

        Pages come from kept prefixes, then all drafts are dropped, and then pages come from the
        youngest sequence.

        Returns:
            The pieces whose sequences still have a row, with drafts or without; the cache is
            prepared for these.
        """
        while pieces:
            rows, counts = [p.sequence.row for p in pieces], [p.count for p in pieces]
            try:
                self._cache.prepare(rows, counts, certain=[p.certain for p in pieces])
                return pieces
            except CacheFullError as error:
                if not self._prefixes.evict():
                    if any(piece.drafts for piece in pieces):
                        pieces = [piece.without_drafts() for piece in pieces]
                        continue
                    self._reclaim(error)
            pieces = [p for p in pieces if not p.sequence.closed]
        return pieces

    def _reclaim(self, error: CacheFullError) -> None:
        before = len(self.running)
        self._drain()  # ended sequences release their pages, and no result is lost
        self.sweep()
        if len(self.running) < before or self._prefixes.evict():
            return
        youngest = self.running[-1]
        if len(self.running) == 1:
            youngest.request.fail(str(error))
            self.sweep()
            return
        self._close(youngest)
        self._cache.free(youngest.row)
        self.waiting.appendleft(youngest.request)
