"""Launch what a scheduler chose: parts of prompts, then a token or more of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsv4.serving.device_steps import DeviceSteps
from dsv4.serving.graphs import Chosen
from dsv4.serving.launched_steps import LaunchedSteps
from dsv4.serving.prefix_cache import PrefixCache
from dsv4.serving.prompts import Part
from dsv4.serving.sampler import Variant
from dsv4.serving.scheduler import Piece, RunningSequence, Scheduler
from dsv4.serving.shared_steps import Needs


@dataclass(frozen=True, eq=False)
class StepLauncher:
    """Launches the steps of a runner, and notes what its sequences hold afterwards.

    Attributes:
        steps: The steps on the device.
        scheduler: Chooses their sequences.
        prefixes: Keeps beginnings of prompts.
        launched: Gets their tokens.
        one_by_one: Whether each sequence is decoded in a step of its own.
    """

    steps: DeviceSteps
    scheduler: Scheduler
    prefixes: PrefixCache
    launched: LaunchedSteps
    one_by_one: bool

    def prompts(self, pieces: list[Piece], common: Needs | None) -> bool:
        """Process prompt tokens; return whether there were any.

        Args:
            pieces: The tokens, for which the cache is prepared.
            common: Needs of a step of all ranks; None: this one decides alone.
        """
        if not pieces and (common is None or not common.prompts):
            return False
        pieces.sort(key=lambda piece: not piece.is_last)  # the order of the sampler
        ending = [piece.sequence for piece in pieces if piece.is_last]
        for sequence in ending:
            self._join(sequence)
        size = None
        if common is not None:
            size = self.steps.prompts.size_of(common.prompt_tokens, common.prompts)
        chosen = self.steps.process([_part(piece) for piece in pieces], _variant(ending), size)
        for piece in pieces:
            sequence = piece.sequence
            sequence.fed += piece.count
            if sequence.fed == sequence.cut:
                self.prefixes.snapshot(sequence.row, sequence.fill[: sequence.cut])
        if chosen is not None:
            self.launched.add(ending, chosen)
        return bool(pieces)

    def decode(self, common: Needs | None) -> bool:
        """Decode every sequence past its prompt; return whether there were any."""
        pieces = self.scheduler.decode_pieces(self.steps.drafts_of)
        pieces = self.scheduler.reserve(pieces)
        if not pieces and (common is None or not common.decodes):
            return False
        sequences = [piece.sequence for piece in pieces]
        drafts = pieces[0].drafts if pieces else 0
        variant = _variant(sequences)
        if self.one_by_one:
            chosen = Chosen.joined([self._decoded_alone(s, drafts, variant) for s in sequences])
        else:
            size = None if common is None else self.steps.sampler.bucket(common.decodes)
            rows = [sequence.row for sequence in sequences]
            chosen = self.steps.next_tokens(rows, drafts, variant, size)
        for sequence in sequences:
            sequence.fed += 1
            sequence.unread += 1
            sequence.drafted |= drafts > 0
        if sequences:
            self.launched.add(sequences, chosen, drafts, decodes=True)
        return bool(sequences)

    def _join(self, sequence: RunningSequence) -> None:
        request = sequence.request
        self.steps.state.join(sequence.row, request.options, request.seed, sequence.fill)

    def _decoded_alone(self, sequence: RunningSequence, drafts: int, variant: Variant) -> Chosen:
        """Decode a sequence in a step of its own; log-probabilities are those of ``variant``."""
        own = replace(sequence.variant, logprobs=variant.logprobs)
        return self.steps.next_tokens([sequence.row], drafts, own).copied(1 + drafts)


def _part(piece: Piece) -> Part:
    sequence, fed = piece.sequence, piece.sequence.fed
    tokens = sequence.fill[fed : fed + piece.count]
    following = 0 if piece.is_last else sequence.fill[fed + piece.count]
    return Part(sequence.row, fed, tokens, piece.is_last, following)


def _variant(sequences: Sequence[RunningSequence]) -> Variant:
    variant = Variant()
    for sequence in sequences:
        variant = variant | sequence.variant
    return variant
