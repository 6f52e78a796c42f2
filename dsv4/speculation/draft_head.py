"""Output head of a draft: the model's own, or an NVFP4 copy of it.

Most of what a draft reads is the head: 1.06 GB of an MTP draft's 1.3 GB at Flash's size, 0.30 GB as
an NVFP4 copy. The copy cannot change what the model generates: drafts are verified against logits
of the model's own head, so a draft that the copy gets wrong is rejected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4.config import ModelConfig
from dsv4.cute.supports import few_token_gemm
from dsv4.layers._module import quantize_weight, wider
from dsv4.layers.linear import Linear
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.quant import fragments
from dsv4.quant.formats import FRAGMENTS, NVFP4

AUTO, OWN, COPY = "auto", "model", "nvfp4"
CHOICES = (AUTO, OWN, COPY)


@dataclass(frozen=True, eq=False)
class DraftHead:
    """Maps a draft's hidden states to logits.

    Attributes:
        model: The model, whose head and numerics count.
        copy: NVFP4 copy of the model's head; None: the head itself is used.
        reason: Why there is no copy; empty if there is one, or none was asked for.
    """

    model: DeepseekV4ForCausalLM
    copy: Linear | None = None
    reason: str = ""

    @classmethod
    def of(cls, model: DeepseekV4ForCausalLM, choice: str | DraftHead = AUTO) -> DraftHead:
        """Make the head of a model's drafts.

        Args:
            model: The model, on its device.
            choice: ``"nvfp4"``: an NVFP4 copy, packed where its size allows; ``"model"``: the
                model's head; ``"auto"``: the copy where a kernel that was measured multiplies by
                it, which is on Hopper. Or a head that was made, which is returned.

        Raises:
            ValueError: if there is no such choice, or a copy is asked for of a head that is
                quantised already, or split over ranks.
        """
        if isinstance(choice, DraftHead):
            return choice
        if choice not in CHOICES:
            words = ", ".join(map(repr, CHOICES))
            raise ValueError(f"draft_head is {choice!r}, wanted one of {words}")
        if choice == OWN:
            return cls(model)
        reason = why_no_copy(model)
        if reason and choice == COPY:
            raise ValueError(f"draft_head is {choice!r}, but {reason}; wanted 'auto' or 'model'")
        if not reason and choice == AUTO:
            reason = _slow(model)
        return cls(model, reason=reason) if reason else cls(model, _copied(model.lm_head))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[..., H]`` to ``[..., vocab]``, of the dtype that the model's logits have."""
        if self.copy is None:
            return self.model.logits(hidden)
        if self.model.config.numerics == "transformers":
            return self.copy(hidden)
        return self.copy(hidden, wider(hidden.dtype, torch.float32))

    @property
    def nbytes(self) -> int:
        """Bytes of the copy, which are not among the model's."""
        return 0 if self.copy is None else self.copy.quantized_weight().nbytes


def copy_bytes(config: ModelConfig) -> int:
    """Return the bytes of an NVFP4 copy of a model's head."""
    rows, columns = config.vocab_size, config.hidden_size
    return rows * columns // 2 + rows * (columns // 16) + 4


def read_bytes(model: DeepseekV4ForCausalLM) -> int:
    """Return the bytes of a head that ``"auto"`` makes for a model, which a draft reads."""
    if not (why_no_copy(model) or _slow(model)):
        return copy_bytes(model.config)
    head = model.lm_head
    return sum(t.nbytes for t in (*head.parameters(), *head.buffers()))


def why_no_copy(model: DeepseekV4ForCausalLM) -> str:
    """Return why a model's head can have no NVFP4 copy, or an empty text."""
    head = model.lm_head
    if model.parallel is not None:
        return f"the head is split over {model.parallel.size} ranks"
    if head.format is not None:
        return f"the head is {head.format.name} already"
    if head.in_features % 16:
        return f"the head has {head.in_features} columns, not a multiple of 16"
    return ""


def _slow(model: DeepseekV4ForCausalLM) -> str:
    """Return why a copy would not be faster than the head, or an empty text."""
    head = model.lm_head
    if head.weight.dtype != torch.bfloat16:
        return f"the head is {head.weight.dtype}, not torch.bfloat16"
    return few_token_gemm(head.device, head.out_features, head.in_features) or ""


def _copied(head: Linear) -> Linear:
    """Return an NVFP4 copy of a plain layer, packed if it is a whole number of tiles."""
    with torch.device("meta"):
        copy = Linear(head.in_features, head.out_features)
    copy.set_weight(quantize_weight(head.weight.detach(), NVFP4.name))
    packs = fragments.fits(head.out_features, head.in_features)
    if packs and head.device.type != "meta":
        copy.pack(FRAGMENTS)
    return copy.requires_grad_(False).eval()
