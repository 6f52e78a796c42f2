"""The arguments of ``load`` as one value, which its steps share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4.checkpoint.arguments import check_prepare, check_reserve
from dsv4.checkpoint.filling import FillRequest
from dsv4.checkpoint.host_experts import check_argument
from dsv4.layers.host_experts import HostExperts


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """Arguments of ``load``, by their names there, without those that say which ranks load.

    Attributes:
        values: Those that say how values become those of the model.
    """

    path: str | Path
    values: FillRequest
    numerics: str
    mtp: bool | None
    reserve_tokens: int | None
    prepare: bool | str
    host_experts: str | int | HostExperts | torch.Tensor | None

    def check(self) -> None:
        """Check what needs no checkpoint.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if an argument has an unknown value.
        """
        check_reserve(self.reserve_tokens)
        check_prepare(self.prepare)
        check_argument(self.host_experts)
