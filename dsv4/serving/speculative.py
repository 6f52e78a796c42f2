"""Steps that draft tokens and verify them: captured on a GPU per bucket, else eager.

A step of n = D + 1 tokens per sequence has three parts, each a graph of its own: the draft
proposes D tokens after the last one, the main model processes all n, and the verification accepts
some of them, chooses the token after these, and sets the lengths of the sequences. Numbers that
the parts exchange stay on the device. A step of one token, for which the drafting is dropped,
has the same parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving.drafters import Drafter
from dsv4.serving.drafting import Verification
from dsv4.serving.graphs import Chosen, Graphs, SamplerStep
from dsv4.serving.readback import NOTHING, UNVERIFIED
from dsv4.serving.row_state import RowState
from dsv4.serving.sampler import Parameters, Variant
from dsv4.speculation.fixed_rows import FixedRows
from dsv4.speculation.verify import NO_DRAFT, Verified

_DRAFT, _FORWARD, _ACCEPT = "draft", "forward", "accept"


@dataclass(frozen=True)
class _Part:
    """A part of a step, which has a graph.

    Attributes:
        name: Which part.
        size: Sequences.
        drafts: Drafts of each.
        variant: What the sampler needs; None where nothing is sampled.
    """

    name: str
    size: int
    drafts: int
    variant: Variant | None = None


@dataclass
class DraftCounts:
    """Counts of drafts over all steps of all sequences that had drafts.

    Attributes:
        steps: Verified steps, each of one sequence.
        drafted: Drafts that were verified.
        accepted: Drafts that were accepted.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def length(self) -> float:
        """Tokens that a sequence got per step, the one after the accepted drafts included."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    def add(self, drafted: int, accepted: int) -> None:
        """Count a step of a sequence."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted

    def __str__(self) -> str:
        return f"{self.accepted} of {self.drafted} drafts accepted, {self.length:.2f} tokens a step"


class SpeculativeStep:
    """Steps over static buffers; rows come from the sampler's buffer.

    Args:
        model: The model.
        cache: Its cache, with pools.
        state: State of the cache's rows.
        sampler: Whose buckets and rows are used.
        graphs: Makes the graphs.
        drafter: Proposes tokens.
        drafts: Most drafts of a sequence.
        verify: Accepts them.
        captures_drafts: Whether the draft can be captured as the rest is.
        fixed: Whether the main model processes ``width`` rows in each step, of one sequence, filled
            up with padding. Then logits do not depend, bit for bit, on how many drafts there are.

    Attributes:
        width: Most tokens of a sequence in a step.
    """

    def __init__(
        self,
        model: DeepseekV4ForCausalLM,
        cache: PagedCache,
        state: RowState,
        sampler: SamplerStep,
        graphs: Graphs,
        drafter: Drafter,
        drafts: int,
        verify: Verification,
        captures_drafts: bool = True,
        fixed: bool = False,
    ) -> None:
        self._model, self._cache, self._state = model, cache, state
        self._sampler, self._graphs, self._drafter = sampler, graphs, drafter
        self._verify, self._captures_drafts = verify, captures_drafts
        self.width = drafts + 1
        self._fixed = FixedRows(self.width) if fixed else None
        most, device = sampler.buckets[-1], model.device
        wide = torch.promote_types(model.dtype, torch.float32)
        self._wide = wide
        # The last token of each sequence, then its drafts, NO_DRAFT where there is none.
        self._ids = torch.zeros((most, self.width), dtype=torch.int64, device=device)
        self._logits = torch.zeros((most * self.width, state.width), dtype=wide, device=device)
        config = model.config
        shape = (most * self.width, config.hc_mult, config.hidden_size)
        self._streams = torch.zeros(shape, dtype=model.dtype, device=device)
        self._q: torch.Tensor | None = None  # what drafts were drawn from
        self._captured: dict[_Part, tuple[torch.cuda.CUDAGraph, Chosen | None]] = {}

    @property
    def captures(self) -> int:
        """The number of graphs captured so far."""
        return len(self._captured)

    def run(self, rows: Sequence[int], drafts: int, variant: Variant, captured: bool) -> Chosen:
        """Process one token more of each row, and as many drafts as are right.

        Args:
            rows: Distinct cache rows, for which the cache is prepared.
            drafts: Drafts of each, 0 to ``width - 1``.
            variant: Variant that covers the needs of every row.
            captured: Whether to replay graphs, captured at their first use.

        Returns:
            ``drafts + 1`` tokens of each row, flat: accepted drafts, the token after them, then
            ``NOTHING`` for drafts that were rejected and ``UNVERIFIED`` for those that were not
            made; on the device, until the next step.

        Raises:
            CaptureError: if a capture failed; nothing has changed then.
        """
        size = self._sampler.bucket(len(rows))
        if captured:
            self.capture(size, drafts, variant)
        self._sampler.write(rows)
        return self._run(size, drafts, variant, captured)

    def capture(self, size: int, drafts: int, variant: Variant) -> None:
        """Capture the graphs of a bucket and variant, unless they are there.

        Raises:
            CaptureError: if a capture failed; nothing has changed then.
        """
        if variant.penalty:
            self._state.with_present()  # not in the memory of a graph
        if variant.draw:
            self._with_q()
        for part in self._parts(size, drafts, variant):
            if part not in self._captured and (self._captures_drafts or part.name != _DRAFT):
                self._sampler.write([])
                self._captured[part] = self._graphs.captured(self._work(part))

    def replay_padding(self, size: int, drafts: int, variant: Variant) -> None:
        """Replay the graphs that ``capture`` captured, without a sequence."""
        self._sampler.write([])
        self._run(size, drafts, variant, captured=True)

    @property
    def device(self) -> torch.device:
        """Where the steps run."""
        return self._model.device

    def work(self, name: str, size: int, drafts: int) -> Callable[[], object]:
        """Return a part of a greedy step on the sampler's rows, to be timed alone.

        Args:
            name: ``"draft"`` or ``"forward"``, which change no length.
            size: Sequences.
            drafts: Drafts of each.
        """
        return self._work(_Part(name, size, drafts))

    def put(self, ids: torch.Tensor) -> None:
        """Set the last token and the drafts ``[B, width]`` of the first rows, for ``work``."""
        self._ids[: len(ids)].copy_(ids)

    def release(self) -> None:
        """Free the graphs."""
        self._captured.clear()

    def _run(self, size: int, drafts: int, variant: Variant, captured: bool) -> Chosen:
        chosen = None
        for part in self._parts(size, drafts, variant):
            if captured and part in self._captured:
                graph, chosen = self._captured[part]
                graph.replay()
            else:
                chosen = self._work(part)()
        assert chosen is not None
        return chosen

    def _parts(self, size: int, drafts: int, variant: Variant) -> tuple[_Part, ...]:
        """Return the parts of a step in their order."""
        drawn = replace(variant, logprobs=False) if drafts and not variant.plain else None
        return (
            _Part(_DRAFT, size, drafts, drawn),
            _Part(_FORWARD, size, drafts),
            _Part(_ACCEPT, size, drafts, variant),
        )

    def _work(self, part: _Part) -> Callable[[], Chosen | None]:
        if part.name == _DRAFT:
            return lambda: self._draft(part.size, part.drafts, part.variant)
        if part.name == _FORWARD:
            return lambda: self._forward(part.size, part.drafts + 1)
        variant = part.variant
        assert variant is not None
        return lambda: self._accept(part.size, part.drafts, variant)

    def _draft(self, size: int, count: int, variant: Variant | None) -> None:
        """Write the last token of each row and its drafts."""
        rows, lengths = self._rows(size)
        entries = self._state.entries(rows)
        anchors = self._state.tokens[entries]
        self._ids[:size, 0].copy_(anchors)
        if not count:
            self._drafter.skip(anchors, rows, lengths)
            return
        parameters = None
        if variant is not None:
            parameters = self._state.parameters(entries, lengths + 1, variant.penalty)
        drafts = self._drafter.draft(
            anchors, rows, lengths, count, parameters, variant or Variant()
        )
        # Tokens of padding are always the same, because experts multiply all rows together.
        tokens = torch.where(rows.unsqueeze(1) < 0, NO_DRAFT, drafts.tokens)
        self._ids[:size, 1 : count + 1].copy_(tokens)
        if variant is not None and variant.draw:
            assert drafts.probabilities is not None
            self._with_q()[:size, :count].copy_(drafts.probabilities)

    def _forward(self, size: int, count: int) -> None:
        """Process ``count`` tokens of each row; lengths stay as they are."""
        rows, lengths = self._rows(size)
        drafted = self._ids[:size, :count]
        ids = drafted.clamp(min=0)
        following = torch.cat((ids[:, 1:], torch.zeros_like(ids[:, :1])), dim=1)
        batch, tokens = Batch.equal(lengths, rows, count), size * count
        # Drafts that are left out are computed and rejected; their experts would take the time.
        routed = drafted.flatten() if self._drafter.leaves_out(size) else None
        ids, following = ids.flatten(), following.flatten()
        if self._fixed is not None:
            batch = self._fixed.padded(batch)
            ids, following = self._fixed.filled(ids), self._fixed.filled(following)
            routed = None if routed is None else self._fixed.filled(routed, NO_DRAFT)
        step = CacheStep(self._cache, batch, routed)
        hidden, streams = self._drafter.forward(ids.unsqueeze(0), following, step)
        self._logits[:tokens].copy_(self._model.logits(hidden[0])[:tokens])
        self._streams[:tokens].copy_(streams[0, :tokens])

    def _accept(self, size: int, drafts: int, variant: Variant) -> Chosen:
        """Accept drafts and choose the token after them; its row processes it next."""
        rows, lengths = self._rows(size)
        entries, count = self._state.entries(rows), drafts + 1
        verified = self._verified(size, drafts, variant)
        accepted, tokens = verified.accepted, verified.tokens
        self._cache.advance(Batch.equal(lengths, rows, count), accepted + 1)
        last = torch.arange(size, device=rows.device) * count + accepted
        self._drafter.keep(rows, self._streams[last])
        self._state.emitted(entries, tokens, accepted, variant.penalty)
        column = torch.arange(count, device=rows.device)
        lost = torch.where(self._ids[:size, :count] < 0, UNVERIFIED, NOTHING)
        shown = torch.where(column > accepted.unsqueeze(1), lost, tokens).flatten()
        logits = self._logits[: size * count]
        report = self._state.logprobs(logits, tokens.flatten()) if variant.logprobs else None
        return Chosen(shown, report)

    def _verified(self, size: int, drafts: int, variant: Variant) -> Verified:
        rows, lengths = self._rows(size)
        entries, logits = self._state.entries(rows), self._logits[: size * (drafts + 1)]
        # Other kernels draw the token of a step without drafts, from other roundings.
        if not drafts and self._fixed is None:
            tokens = self._state.next_tokens(logits, entries, lambda: lengths + 1, variant)
            return Verified(torch.zeros_like(tokens), tokens.unsqueeze(1))
        parameters: Parameters = self._state.parameters(entries, lengths + 1, variant.penalty)
        q = self._with_q()[:size, :drafts] if variant.draw else None
        by_row = logits.view(size, drafts + 1, -1)
        return self._verify(by_row, self._ids[:size, 1 : drafts + 1], parameters, variant, q)

    def _rows(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows and their lengths; of padding any length, which nothing reads."""
        rows = self._sampler.rows[:size]
        return rows, self._cache.lengths[rows]

    def _with_q(self) -> torch.Tensor:
        """Return the memory of the drafts' distributions, made at its first use."""
        if self._q is None:
            most, vocab = self._ids.shape[0], self._state.vocab_size
            shape = (most, self.width - 1, vocab)
            self._q = torch.zeros(shape, dtype=self._wide, device=self._ids.device)
        return self._q
