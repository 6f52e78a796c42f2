"""State of each sequence on the device besides its cache: last token, sampling parameters.

There is one entry per cache row, and one more that padding reads and writes. A new sequence's entry
is written in stream order; captured graphs find it by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from dsv4 import dispatch
from dsv4.device import no_triton
from dsv4.kv_cache.page_tables import to_device
from dsv4.ops.unsupported import float64_tensor
from dsv4.serving import split_sampler
from dsv4.serving.options import SamplingOptions
from dsv4.serving.sampler import Logprobs, Parameters, Variant, greedy, logprobs, sample
from dsv4.serving.split_sampler import VocabularyPart

_NEUTRAL = (0.0, 1.0, -math.inf, 1.0)


class RowState:
    """Device arrays with an entry per cache row and one for padding.

    Attributes:
        vocab_size: Vocabulary size of the model.
        part: The tokens whose logits this rank has; None: all.
        tokens: ``[rows + 1]`` int64: the token that each sequence processes next; 0 for padding.
        numbers: ``[rows + 1, 4]`` float64: temperature, top_p, log_min_p, penalty.
        integers: ``[rows + 1, 2]`` int64: top_k, seed.
        present: ``[rows + 1, width]`` bool: tokens of prompt and answer, of rows with a penalty;
            None until a sequence has one.
    """

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        device: torch.device,
        part: VocabularyPart | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.part = part
        self.padding = rows
        self.tokens = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        numbers = torch.tensor(_NEUTRAL, dtype=torch.float64, device=device)
        self.numbers = numbers.repeat(rows + 1, 1)
        integers = torch.tensor([vocab_size, 0], dtype=torch.int64, device=device)
        self.integers = integers.repeat(rows + 1, 1)
        self.present: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """The number of tokens whose logits are here."""
        return self.vocab_size if self.part is None else len(self.part.tokens)

    def join(self, row: int, options: SamplingOptions, seed: int, tokens: Sequence[int]) -> None:
        """Write the entry of a sequence that holds ``tokens``, without waiting for the device."""
        device = self.tokens.device
        min_p = options.min_p
        values = (
            options.temperature,
            options.top_p,
            math.log(min_p) if min_p > 0 else -math.inf,
            options.repetition_penalty,
        )
        numbers = torch.tensor(values, dtype=torch.float64, device="cpu")
        if device.type == "cuda":
            numbers = numbers.pin_memory()
        self.numbers[row].copy_(numbers, non_blocking=True)
        top_k = min(options.top_k or self.vocab_size, self.vocab_size)
        self.integers[row].copy_(to_device([top_k, seed], device))
        if options.repetition_penalty != 1:
            present = self.with_present()[row]
            present.zero_()
            here = range(self.vocab_size) if self.part is None else self.part.tokens
            held = [token - here.start for token in sorted(set(tokens)) if token in here]
            present.index_fill_(0, to_device(held, device), True)

    def with_present(self) -> torch.Tensor:
        """Return ``present``, made at its first use."""
        if self.present is None:
            shape = (self.padding + 1, self.width)
            self.present = torch.zeros(shape, dtype=torch.bool, device=self.tokens.device)
        return self.present

    def entries(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the index of each cache row's entry; for padding, -1, the last."""
        return torch.where(rows < 0, self.padding, rows)

    def parameters(
        self, entries: torch.Tensor, positions: torch.Tensor, penalty: bool
    ) -> Parameters:
        """Return the parameters of some entries, whose next tokens have these positions."""
        numbers, integers = self.numbers[entries], self.integers[entries]
        present = self.with_present()[entries] if penalty else None
        return Parameters(
            temperature=numbers[:, 0],
            top_p=numbers[:, 1],
            log_min_p=numbers[:, 2],
            penalty=numbers[:, 3],
            top_k=integers[:, 0],
            seed=integers[:, 1],
            position=positions,
            present=present,
        )

    def next_tokens(
        self,
        logits: torch.Tensor,
        entries: torch.Tensor,
        positions: Callable[[], torch.Tensor],
        variant: Variant,
    ) -> torch.Tensor:
        """Sample a token for each row of logits; see ``dsv4.serving.sampler.sample``.

        Where Triton runs, its kernels sample in three launches. Positions are computed only if
        needed.
        """
        if self.part is not None:
            if variant.plain:
                return split_sampler.greedy(self.part, logits)
            parameters = self.parameters(entries, positions(), variant.penalty)
            return split_sampler.sample(self.part, logits, parameters, variant)
        if variant.plain:
            return greedy(logits)
        if not _kernels_run(logits):
            return sample(logits, self.parameters(entries, positions(), variant.penalty), variant)
        from dsv4.triton import sampling

        present = self.with_present() if variant.penalty else None
        return sampling.sample(
            logits,
            entries,
            self.numbers,
            self.integers,
            positions(),
            present,
            filters=variant.filters,
        )

    def chosen(self, entries: torch.Tensor, tokens: torch.Tensor, penalty: bool) -> None:
        """Store the chosen tokens as those to process next."""
        tokens = tokens.clamp(min=0)  # a failed row ends later; until then it needs a token
        self.tokens[entries] = tokens
        # Experts multiply rows of padding together with others, so their token must always be the
        # same.
        self.tokens[self.padding :].zero_()
        if penalty:
            present, here = self.with_present(), torch.ones_like(tokens, dtype=torch.bool)
            if self.part is not None:
                tokens, here = self.part.local(tokens)
                here = here | present[entries, tokens]
            present.index_put_((entries, tokens), here)

    def emitted(
        self, entries: torch.Tensor, tokens: torch.Tensor, accepted: torch.Tensor, penalty: bool
    ) -> None:
        """Store the tokens of a verified step; the last of each row is processed next.

        Args:
            entries: ``[B]``, see ``entries``.
            tokens: ``[B, n]``; the first ``accepted + 1`` of a row are its tokens.
            accepted: ``[B]`` int64.
            penalty: Whether a row has a repetition penalty.
        """
        tokens = tokens.clamp(min=0)
        self.tokens[entries] = tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)
        self.tokens[self.padding :].zero_()
        if penalty:
            column = torch.arange(tokens.shape[1], device=tokens.device)
            counts = column <= accepted.unsqueeze(1)
            owners = torch.where(counts, entries.unsqueeze(1), self.padding)
            present, here = self.with_present(), torch.ones_like(tokens, dtype=torch.bool)
            present.index_put_((owners, tokens), here)

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> Logprobs:
        """Return log-probabilities; see ``dsv4.serving.sampler.logprobs``."""
        if self.part is not None:
            return split_sampler.logprobs(self.part, logits, tokens)
        return logprobs(logits, tokens)


def _kernels_run(logits: torch.Tensor) -> bool:
    """Return whether Triton samples: the choice is that of an operator with a kernel."""
    allowed = dispatch.requested_backend() in (dispatch.AUTO, "triton")
    return allowed and (no_triton(logits.device) or float64_tensor([logits])) is None
