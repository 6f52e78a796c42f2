"""What rollback and drafts add to a sequence, as docs/speculation.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4.config import DSparkConfig, ModelConfig
from dsv4.kv_cache.layer_cache import ROLLBACK
from dsv4.kv_cache.paged_cache import PagedCache

PAGE = (Path(__file__).parents[2] / "docs/speculation.md").read_text()


def bytes_of(config: ModelConfig, rollback: int) -> int:
    cache = PagedCache(
        config, max_sequences=1, max_tokens=8192, device="meta", pool_tokens=8192,
        rollback=rollback, index_format="index_mxfp4",
    )  # fmt: skip
    return sum(cache.bytes_per_sequence(8192).values())


@pytest.mark.parametrize(("column", "preset"), [(0, "flash"), (1, "pro")])
def test_bytes_of_a_sequence(column: int, preset: str) -> None:
    config = getattr(ModelConfig, preset)()
    last = config.num_hidden_layers
    dspark = DSparkConfig(
        block_size=5, noise_token_id=1, target_layer_ids=(last - 3, last - 2, last - 1),
        markov_rank=256,
    )  # fmt: skip
    plain = config.without_draft()
    sizes = {
        "without rollback and draft": bytes_of(plain, 0),
        "with rollback": bytes_of(plain, ROLLBACK),
        "with rollback and MTP": bytes_of(config.replace(num_nextn_predict_layers=1), ROLLBACK),
        "with rollback and DSpark": bytes_of(config.replace(dspark=dspark), ROLLBACK),
    }
    for name, size in sizes.items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {name} |"))
        assert row.split("|")[2 + column].strip() == f"{size:,}"
