"""vLLM's model with this package's modules on two ranks of vLLM's own groups."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dsv4

pytest.importorskip("vllm", reason="vLLM 0.33 is not installed; make test-vllm has it")

from tests.integrations.vllm import build, engine_process, ranks_process

_ROOT = Path(__file__).resolve().parents[3]
_RANKS = 2
_PATIENCE = 600


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each rank gives, by the way of splitting, and this package's whole model."""
    folder = tmp_path_factory.mktemp("ranks")
    build.checkpoint(folder / "model", "nvidia", num_hidden_layers=2, moe_intermediate_size=256)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = engine_process.environment("V1")
    environment |= {"DSV4_VLLM": "experts,linear", "PYTHONPATH": str(_ROOT)}
    environment |= {"DSV4_VLLM_CHECK": "0", "DSV4_CACHE_DIR": str(folder / "cache")}
    logs = [folder / f"{rank}.log" for rank in range(_RANKS)]
    command = [sys.executable, "-m", ranks_process.__name__]
    processes = []
    for rank, log in enumerate(logs):
        arguments = [rank, _RANKS, port, folder / "model", folder / f"{rank}.pt"]
        with log.open("wb") as file:
            processes.append(
                subprocess.Popen(
                    [*command, *map(str, arguments)],
                    env=environment,
                    cwd=_ROOT,
                    stdout=file,
                    stderr=file,
                )
            )
    try:
        codes = [process.wait(_PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * _RANKS, "\n".join(log.read_text()[-6000:] for log in logs)
    own = dsv4.load(
        folder / "model", dtype=torch.bfloat16, progress=False, mxfp4="lossless", mtp=False
    )
    return [torch.load(folder / f"{rank}.pt") for rank in range(_RANKS)], own


def close(actual, expected):
    """Within the rounding of two partial sums to bfloat16."""
    difference = (actual.float() - expected.float()).abs().max()
    return bool(difference <= 2**-6 * expected.float().abs().max())


@pytest.mark.parametrize("split", ["tensor", "expert"])
@torch.inference_mode()
def test_sums_over_ranks_are_those_of_one(outputs, split):
    """And the same bits on both ranks."""
    ranks, own = outputs
    sizes = own.config
    data = ranks_process.inputs(
        sizes.hidden_size, sizes.n_routed_experts, sizes.num_experts_per_tok
    )
    for number, layer in enumerate(own.model.layers):
        parts = [rank[split][number] for rank in ranks]
        half = (sizes.n_routed_experts // 2, sizes.moe_intermediate_size)
        whole = (sizes.n_routed_experts, sizes.moe_intermediate_size // 2)
        experts, inner = half if split == "expert" else whole
        assert [part["inner"] for part in parts] == [inner] * _RANKS
        firsts = [0, experts] if split == "expert" else [0, 0]
        assert [part["range"] for part in parts] == [(first, experts) for first in firsts]

        mlp, attention, x = layer.mlp, layer.self_attn, data["x"]
        expected = mlp.shared_experts(x) + mlp.experts(x, data["ids"].long(), data["weights"])
        assert torch.equal(parts[0]["ffn"], parts[1]["ffn"])
        assert close(parts[0]["ffn"], expected)

        heads = torch.cat([part["heads"] for part in parts], dim=-1)
        assert torch.equal(heads, attention.q_b_proj(attention.q_a_proj(x)))
        width = attention.o_b_proj.in_features // _RANKS
        joined = torch.cat([part["heads"][:, :width] for part in parts], dim=-1)
        assert torch.equal(parts[0]["out"], parts[1]["out"])
        assert close(parts[0]["out"], attention.o_b_proj(joined))
