"""Memory for the sorted rows of routed experts, allocated once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class Buffers(NamedTuple):
    """Buffers for the results of the steps of one forward; None to allocate them.

    Attributes:
        rows: ``[R, H]``: the gathered rows, and later, when the first GEMM has read them, the
            results of the second.
        inner: ``[R, I]``: SwiGLU of the first GEMM.
    """

    rows: torch.Tensor | None = None
    inner: torch.Tensor | None = None


class Workspace(nn.Module):
    """Buffers for a number of tokens, shared by layers that run one after another.

    It is a submodule of each of those layers, so moving, casting or copying a model moves, casts or
    copies it once and the layers still share it. No state dict holds it.

    Args:
        max_tokens: Tokens of a forward.
        top_k: Experts of each.
        hidden: H.
        inner: I.
        dtype: Dtype of the hidden states.
        device: Device of the experts.
    """

    rows: torch.Tensor
    inner: torch.Tensor

    def __init__(
        self,
        max_tokens: int,
        top_k: int,
        hidden: int,
        inner: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        with torch.inference_mode(False):  # it is written to in inference mode and outside of it
            for name, columns in (("rows", hidden), ("inner", inner)):
                rows = torch.empty((max_tokens * top_k, columns), dtype=dtype, device=device)
                self.register_buffer(name, rows, persistent=False)

    def buffers_for(self, x: torch.Tensor, top_k: int) -> Buffers:
        """Return buffers for the tokens ``x`` with ``top_k`` experts each.

        Raises:
            ValueError: if there are too many, or they are on another device or of another dtype.
        """
        again = "call dsv4.layers.reserve_experts again"
        count = x.shape[0] * top_k
        if count > self.rows.shape[0]:
            per_token = self.rows.shape[0] // self.max_tokens
            raise ValueError(
                f"Experts: there are {x.shape[0]} tokens with {top_k} experts each, but memory is "
                f"reserved for {self.max_tokens} tokens with {per_token} each: {again} with a "
                "larger max_tokens"
            )
        if (x.dtype, x.device) != (self.rows.dtype, self.rows.device):
            raise ValueError(
                f"Experts: the tokens are {x.dtype} on {x.device}, but memory is reserved for "
                f"{self.rows.dtype} on {self.rows.device}: {again}"
            )
        return Buffers(self.rows[:count], self.inner[:count])

    def extra_repr(self) -> str:
        """Tokens and dtype."""
        return f"max_tokens={self.max_tokens}, {self.rows.dtype}"
