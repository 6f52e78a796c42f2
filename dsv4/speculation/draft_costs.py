"""Compute costs and gains of drafts from sizes: whether drafts pay, and how many to verify.

A step takes ``bytes / rate + layers * latency + operations / rate``. Bytes are those of weights,
which a step reads once. It reads only the routed experts that tokens choose. With uniform and
independent routing, T tokens with k experts each choose ``E (1 - (1 - k / E) ** T)`` of E.
A step of few sequences therefore reads more experts for each further token. A step of many reads
all experts anyway. A step of very many is bound by operations; a draft costs as much as a token.
KV entries are left out, because their number is the same with and without drafts, up to the L2.
With experts in host memory, a step also loads the chosen experts that are in no slot. Their share
is that of uniform routing, because the routing of the text is not known before.

Tokens of a step follow from the shares of drafts that published measurements had accepted. Nothing
here changes a token that is generated greedily, only how fast it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dsv4.layers._workspace import Workspace
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.host_experts import slot_tokens
from dsv4.layers.linear import Linear
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.speculation.draft_head import read_bytes

MTP_TOKENS = 2  # the layer was trained for one; drafts get worse with each that is made of drafts
# One H100, 2026-11, Flash with 64 experts: decode steps of 1, 8 and 64 tokens took 5.20, 12.95 and
# 21.16 ms (sum here: 5.19, 11.3, 20.0), prompts of 512 and 4096 tokens 40.6 and 224 (41.3, 219).
# Another GPU changes all three alike, as far as the comparison of two steps on it goes.
_BYTES_PER_MS = 3.1e9
_LAYER_MS = 0.0538  # of 43 layers, what a step takes beyond its bytes, see ``parallel.planner``
_OPERATIONS_PER_MS = 5.5e11
_LOADED_PER_MS = 5.08e7  # bytes of experts from host memory: 6 of Flash took 1.675 ms (H200)
# Shares of steps in which draft j and all before it were accepted: MTP of Flash, random text,
# temperature 1 (vllm-project/vllm#41044); DSpark of Flash-0731 (vllm-ascend#13640). Code and
# reasoning had up to 0.88 and 0.9; the lower ones say when drafts pay in any case.
_ACCEPTED = {"mtp": (0.70, 0.287), "dspark": (0.739, 0.478, 0.261, 0.174, 0.130)}


def accepted(method: str, count: int) -> tuple[float, ...]:
    """Return the share of steps in which each of ``count`` drafts is accepted."""
    shares = list(_ACCEPTED[method][:count])
    ratio = _ACCEPTED[method][-1] / _ACCEPTED[method][-2]
    while len(shares) < count:
        shares.append(shares[-1] * ratio)
    return tuple(shares)


@dataclass(frozen=True)
class Part:
    """Layers that a step runs.

    Attributes:
        dense: Bytes of weights that all tokens read.
        expert: Bytes of one routed expert, of all layers.
        experts: Routed experts of a layer.
        chosen: Experts of a token.
        layers: Number of layers.
        operations: Multiplications and additions of a token, 2 per multiply-accumulate.
        missed: Share of the chosen experts that are loaded from host memory, if routing is uniform.
    """

    dense: float
    expert: float
    experts: int
    chosen: int
    layers: int
    operations: float
    missed: float = 0.0

    @classmethod
    def of(cls, module: nn.Module, more: float = 0.0) -> Part:
        """Return the part that a module is, with ``more`` bytes that all tokens read."""
        moe = [m for m in module.modules() if isinstance(m, DeepseekV4Experts)]
        linear = [m for m in module.modules() if isinstance(m, Linear)]
        experts = max(m.num_experts for m in moe)
        chosen = max(m.num_experts_per_tok for m in moe)
        weights = sum(m.in_features * m.out_features for m in linear)
        weights += sum(
            3 * chosen * m.hidden_dim * m.intermediate_dim * m.num_local_experts // _shared(m)
            for m in moe
        )
        tables = sum(weight_bytes(m) for m in module.modules() if isinstance(m, nn.Embedding))
        dense = weight_bytes(module) - sum(map(weight_bytes, moe)) - tables + more
        expert = sum(weight_bytes(m) / _shared(m) for m in moe)
        missed = sum(map(_missed, moe)) / len(moe)
        return cls(dense, expert, experts, chosen, len(moe), 2.0 * weights, missed)

    def ms(self, tokens: float, routed: float | None = None) -> float:
        """Return the milliseconds of some tokens, of which ``routed`` go to experts; None: all."""
        routed = tokens if routed is None else routed
        read = self.experts * (1 - (1 - self.chosen / self.experts) ** routed)
        return (
            (self.dense + read * self.expert) / _BYTES_PER_MS
            + read * self.missed * self.expert / _LOADED_PER_MS
            + self.layers * _LAYER_MS
            + tokens * self.operations / _OPERATIONS_PER_MS
        )


@dataclass(frozen=True)
class Choice:
    """A number of drafts at a number of sequences.

    Attributes:
        drafts: Drafts of a sequence.
        verified: Expected number of drafts that go to experts; the others have too little
            confidence.
        theta: Least probability of acceptance of a verified draft; None: all drafts are verified.
        ms: Milliseconds of a step.
        length: Tokens of a sequence in a step.
        gain: Tokens per second, divided by those without drafts.
    """

    drafts: int
    verified: int
    theta: float | None
    ms: float
    length: float
    gain: float


@dataclass(frozen=True)
class DraftCosts:
    """Costs of steps with drafts.

    Attributes:
        main: The main model.
        draft: A pass of the draft.
        rows: Rows of a sequence in a pass; 1: there is a pass for each draft.
        accepted: Share of steps in which each draft is accepted, for the most drafts.
        has_confidence: Whether drafts may be left out.
        threshold: Least share at which a draft is verified; None: the share with the most tokens.
        most_tokens: Most tokens of a step whose experts fit in the slots for experts in host
            memory; None: any number.
    """

    main: Part
    draft: Part
    rows: int
    accepted: tuple[float, ...]
    has_confidence: bool = False
    threshold: float | None = None
    most_tokens: int | None = None

    @classmethod
    def of(
        cls, model: DeepseekV4ForCausalLM, method: str, tokens: int, threshold: float | None = None
    ) -> DraftCosts:
        """Return the costs of a model's drafts.

        Args:
            model: With its draft layers.
            method: ``"mtp"`` or ``"dspark"``.
            tokens: Most drafts of a sequence.
            threshold: See ``Runner``.
        """
        main = Part.of(model.model, weight_bytes(model.lm_head))
        head, dspark = float(read_bytes(model)), model.config.dspark
        most, shares = min(slot_tokens(model), default=None), accepted(method, tokens)
        if method == "mtp" or dspark is None:
            return cls(main, Part.of(model.mtp, head), 1, shares, most_tokens=most)
        assert model.dspark is not None
        markov = model.dspark.last.markov_head
        # The rows of a block share the head; each reads the matrix of the Markov head, which is
        # among the stages' bytes once, and a row of its table.
        again = weight_bytes(markov.markov_w2) * (dspark.block_size - 1)
        again -= weight_bytes(markov.markov_w1)
        draft = Part.of(model.mtp, head + again)
        return cls(main, draft, dspark.block_size, shares, dspark.confidence_head, threshold, most)

    def choice(self, sequences: int, drafts: int) -> Choice:
        """Return cost and gain of a number of drafts, which may be 0, for some sequences."""
        if not drafts:
            return Choice(0, 0, None, self.main.ms(sequences), 1.0, 1.0)
        verified, theta = drafts, self.threshold
        if theta is not None:
            verified = sum(share >= theta for share in self.accepted[:drafts])
        elif self.has_confidence:
            counts = range(1, drafts + 1)
            verified = max(counts, key=lambda count: self._gain(sequences, drafts, count))
            theta = self._theta(sequences, drafts, verified)
        ms, length = self._ms(sequences, drafts, verified), self._length(verified)
        return Choice(drafts, verified, theta, ms, length, self._gain(sequences, drafts, verified))

    def best(self, sequences: int) -> Choice:
        """Return the most drafts that are not slower than none, which may be none.

        The shares of accepted drafts are low here: predictable text gains more from more drafts.
        With experts in host memory, a step has only as many tokens as the slots have experts for.
        """
        most = len(self.accepted)
        if self.most_tokens is not None:
            most = min(most, self.most_tokens // sequences - 1)
        choices = (self.choice(sequences, count) for count in range(most, 0, -1))
        return next((c for c in choices if c.gain >= 1), self.choice(sequences, 0))

    def explain(self, steps: Sequence[tuple[int, int]]) -> str:
        """Return a table of steps; a step is a number of sequences and the drafts of each.

        A step without drafts has the gain of one draft, too, which is below 1.
        """
        lines = ["sequences   drafts   verified   threshold   plain ms   step ms   tokens   gain"]
        for sequences, drafts in steps:
            step = self.choice(sequences, drafts)
            cells = (
                f"{sequences:9}",
                f"{drafts:6}",
                f"{step.verified:8}",
                "        -" if step.theta is None else f"{step.theta:9.2f}",
                f"{self.main.ms(sequences):8.2f}",
                f"{step.ms:7.2f}",
                f"{step.length:6.2f}",
                f"{step.gain:4.2f}",
            )
            lines.append("   ".join(cells) + ("" if drafts else self._loss(sequences)))
        if self.main.missed:
            lines.append(
                f"experts in host memory: {100 * self.main.missed:.0f} % of those that a step "
                "chooses are loaded, if routing is uniform"
            )
        return "\n".join(lines)

    def _loss(self, sequences: int) -> str:
        """Say what one draft would bring where there is none."""
        if self.most_tokens is not None and self.most_tokens < 2 * sequences:
            return f"   (slots have experts for {self.most_tokens} tokens)"
        return f"   (1 draft: {self.choice(sequences, 1).gain:.2f})"

    def _length(self, verified: int) -> float:
        return 1 + sum(self.accepted[:verified])

    def _ms(self, sequences: int, drafts: int, verified: int) -> float:
        main = self.main.ms(sequences * (1 + drafts), sequences * (1 + verified))
        passes = drafts if self.rows == 1 else 1
        return main + passes * self.draft.ms(sequences * self.rows)

    def _gain(self, sequences: int, drafts: int, verified: int) -> float:
        ms = self._ms(sequences, drafts, verified)
        return self._length(verified) * self.main.ms(sequences) / ms

    def _theta(self, sequences: int, drafts: int, verified: int) -> float:
        """Return the share of a token that the next draft has to bring to be worth its time.

        Of one sequence of Flash this is 0.28.
        """
        more = min(verified + 1, drafts)
        extra = self._ms(sequences, drafts, more) - self._ms(sequences, drafts, more - 1)
        return extra / self._ms(sequences, drafts, verified) * self._length(verified)


def _missed(experts: DeepseekV4Experts) -> float:
    """Return the share of experts that are in no slot."""
    if experts.hosted is None:
        return 0.0
    return 1 - experts.num_local_experts / experts.num_experts


def _shared(experts: DeepseekV4Experts) -> int:
    """Return the experts that share the weights held here.

    With several ranks, each rank has a share of a token's experts. Slots for experts in host memory
    hold whole experts.
    """
    return experts.num_experts if experts.hosted is None else experts.num_local_experts


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's weights; memory that several tensors share counts once."""
    sizes = dict[int, int]()
    for part in module.modules():
        if isinstance(part, Workspace):
            continue
        tensors: list[torch.Tensor | None] = [*part._parameters.values(), *part._buffers.values()]
        for tensor in tensors:
            if tensor is not None:
                sizes[tensor.data_ptr() or id(tensor)] = tensor.nbytes
    return sum(sizes.values())
