"""Names of the kinds of layers, and the tokens per compressed entry of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

SLIDING = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
LAYER_TYPES = (SLIDING, CSA, HCA)
MLP_LAYER_TYPES = ("hash_moe", "moe")


@dataclass(frozen=True)
class CompressRates(Mapping[str, int]):
    """Tokens per compressed entry of the two compressed layer types; a hashable mapping."""

    csa: int = 4
    hca: int = 128

    def __getitem__(self, layer_type: str) -> int:
        return {CSA: self.csa, HCA: self.hca}[layer_type]

    def __iter__(self) -> Iterator[str]:
        return iter((CSA, HCA))

    def __len__(self) -> int:
        return 2
