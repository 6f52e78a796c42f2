"""This package's model under vLLM's engine on a CPU gives the tokens of ``model.generate``."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4
from dsv4.checkpoint import save
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.testing.models import random_model
from tests.integrations.vllm import compare_process, engine_process

pytest.importorskip("vllm", reason="vLLM is not installed")

_ROOT = Path(__file__).resolve().parents[3]
_PATIENCE = 900  # seconds; an engine starts in 40 on an idle machine
# Around what a page, a window of a compressor and a chunk end at, and one of several chunks.
_LENGTHS = (1, 3, 4, 5, 7, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, and what its model says to prompts."""

    folder: Path
    model: DeepseekV4ForCausalLM
    known: dict[str, list[list[int]]] = field(default_factory=dict)

    def texts(self, prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        """Greedy tokens."""
        key = json.dumps([prompts, max(new)])
        if key not in self.known:
            self.known[key] = self.model.generate(prompts, max(new), stop_ids=())
        return [text[:count] for text, count in zip(self.known[key], new, strict=True)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return _checkpoint(tmp_path_factory)


def _checkpoint(
    tmp_path_factory: pytest.TempPathFactory, layout: str = "nvidia", **sizes: int
) -> Checkpoint:
    # transformers 5.20 knows the compression ratios 0, 4 and 128 alone.
    rates, types = {CSA: 4, HCA: 128}, (SLIDING, CSA, HCA)
    config = ModelConfig.tiny(layer_types=types, compress_rates=rates, sliding_window=128, **sizes)
    folder = tmp_path_factory.mktemp("checkpoint")
    save(random_model(config, 3), folder, layout=layout)
    return Checkpoint(folder, dsv4.load(folder, dtype=torch.float32, mtp=False, progress=False))


def _prompts(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 128, (n,), generator=generator).tolist() for n in lengths]


def _run(
    runner: str, checkpoint: Checkpoint, request: dict[str, Any], **environment: str
) -> dict[str, Any]:
    process = subprocess.run(
        [sys.executable, "-m", engine_process.__name__],
        input=json.dumps({"model": str(checkpoint.folder), **request}),
        env=engine_process.environment(runner) | {"PYTHONPATH": str(_ROOT)} | environment,
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-8000:] + process.stdout[-2000:]
    answers = [line for line in process.stdout.splitlines() if line.startswith("{")]
    return json.loads(answers[-1])  # workers may log behind it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runner", "layout"), [("V1", "compressed-tensors"), ("V2", "nvidia")], ids=["V1", "V2"]
)
def test_tokens_are_those_of_generate_with_chunks_preemption_and_reused_pages(
    tmp_path_factory: pytest.TempPathFactory, runner: str, layout: str
) -> None:
    """Six requests at a time, chunks of 48 tokens, and blocks for about three of them."""
    checkpoint = _checkpoint(tmp_path_factory, layout)
    first, second = _prompts(_LENGTHS, 1), _prompts((60, 61, 62, 200, 30, 250), 2)
    # Long answers cross blocks, so that requests are preempted while they decode.
    batches = [(first, [8] * len(first)), (second, [70, 70, 70, 10, 40, 12])]
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 384}
    result = _run(
        runner,
        checkpoint,
        {
            "options": {**options, "num_gpu_blocks_override": 26},
            "batches": [{"prompts": prompts, "new": new} for prompts, new in batches],
        },
    )
    expected = [checkpoint.texts(*batch) for batch in batches]
    assert result["tokens"] == expected
    assert len({token for text in expected[1] for token in text}) > 16  # no text that says nothing
    assert result["finite"]
    assert result["preemptions"] > 0
    assert result["free_after"] == result["free"] == [25, 6]
    assert ("worker.gpu" in result["runner"] or "worker.cpu." in result["runner"]) == (
        runner == "V2"
    )
    assert result["chunk"] == 48
    assert not result["prefix_caching"]
    # DSV4_VLLM_CHECK names the broken weight: per request, or once where ids are not known.
    said = result["incidents"]
    assert all("first in the output of model.model.layers.1.self_attn.q_a_norm" in x for x in said)
    assert len(said) == (2 if runner == "V2" else 1)
    assert all("request" in line and "at position" in line for line in said)


@pytest.mark.slow
def test_fp8_activations_of_the_options_give_the_tokens_of_generate(checkpoint: Checkpoint) -> None:
    """Other tokens than bfloat16 activations give, so the option reaches every step."""
    model = dsv4.load(
        checkpoint.folder, dtype=torch.float32, activation="fp8", mtp=False, progress=False
    )
    prompts, new = _prompts((5, 64, 129, 200), 1), [12] * 4
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "max_model_len": 256}
    result = _run(
        "V1",
        checkpoint,
        {
            "options": options,
            "dsv4": {"activation": "fp8"},
            "batches": [{"prompts": prompts, "new": new}],
        },
    )
    expected = Checkpoint(checkpoint.folder, model).texts(prompts, new)
    assert result["activation"] == "fp8"
    assert result["finite"]
    assert result["tokens"] == [expected]
    assert expected != checkpoint.texts(prompts, new)


@pytest.mark.slow
def test_tokens_on_two_ranks_are_those_of_one(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two workers of vLLM's over gloo, each with its part of the model."""
    sizes = {"o_groups": 2, "num_attention_heads": 8, "moe_intermediate_size": 256}
    ranks = {"hidden_size": 128, "q_lora_rank": 128, "o_lora_rank": 128, "vocab_size": 256}
    checkpoint = _checkpoint(tmp_path_factory, "deepseek", **sizes, **ranks)
    prompts, new = _prompts((1, 5, 64, 129), 1), [6, 6, 6, 6]
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 48, "max_model_len": 256}
    options |= {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    batches = [{"prompts": prompts, "new": new}]
    request = {"options": options, "batches": batches}
    environment = {**_plugin(tmp_path), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    result = _run("V1", checkpoint, request, **environment)
    assert result["tokens"] == [checkpoint.texts(prompts, new)]
    assert result["ranks"] == [[0, 2], [1, 2]]


def _plugin(folder: Path) -> dict[str, str]:
    """Environment in which every process of vLLM's registers the model.

    By a plugin of its own, because this package need not be installed with its entry points.
    """
    info = folder / "dsv4_engine_test-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dsv4-engine-test\nVersion: 0.1\n")
    entry = f"dsv4_engine_test = {engine_process.__name__}:register"
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    path = os.pathsep.join([str(_ROOT), str(folder)])
    return {"PYTHONPATH": path, "VLLM_PLUGINS": "dsv4_engine_test"}


@dataclass(frozen=True)
class Server:
    """``vllm serve`` on this machine."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> None:
        """Until it answers."""
        import requests

        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-8000:]
            try:
                if requests.get(f"{self.address}/health", timeout=5).ok:
                    return
            except requests.RequestException:
                time.sleep(1)
        raise TimeoutError(self.log.read_text()[-8000:])

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        import requests

        lines = requests.get(f"{self.address}/metrics", timeout=60).text.splitlines()
        values = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{name}{{")]
        assert values, name
        return sum(map(float, values))

    async def generate(self, prompt: list[int], new: int, patience: float | None) -> list[int]:
        """Greedy tokens of a prompt; disconnects when patience ends, and then returns nothing."""
        import httpx

        parameters = {"temperature": 0.0, "max_tokens": new, "ignore_eos": True}
        body = {"token_ids": prompt, "sampling_params": parameters}
        async with httpx.AsyncClient(timeout=_PATIENCE if patience is None else patience) as client:
            try:
                reply = await client.post(f"{self.address}/inference/v1/generate", json=body)
            except httpx.TimeoutException:
                return []
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["token_ids"]


@pytest.fixture
def server(checkpoint: Checkpoint, tmp_path: Path) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = engine_process.environment("V1") | _plugin(tmp_path)
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint.folder)]
    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--max-model-len": 384,
        "--max-num-seqs": 6,
        "--max-num-batched-tokens": 48,
        "--num-gpu-blocks-override": 30,
        "--additional-config": json.dumps(engine_process.FLOAT32),
    }
    flags = ["--skip-tokenizer-init", "--enable-scale-out", "--enforce-eager"]
    arguments = [str(part) for pair in options.items() for part in pair]
    log = tmp_path / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *arguments, *flags], env=environment, cwd=_ROOT, stdout=file, stderr=file
        )
    try:
        running = Server(f"http://127.0.0.1:{port}", process, log)
        running.wait()
        yield running
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_concurrent_requests_over_http_with_cancellations(
    checkpoint: Checkpoint, server: Server
) -> None:
    """Every third client hangs up while it waits, prefills or decodes; the others get it all."""
    prompts = _prompts((_LENGTHS * 2)[:20], 4)
    new = [8 + i for i in range(20)]
    patience = [0.2 + 0.6 * i if i % 3 == 0 else None for i in range(20)]
    cancelled_new = [200 if p is not None else n for n, p in zip(new, patience, strict=True)]

    async def all_at_once() -> list[list[int]]:
        calls = map(server.generate, prompts, cancelled_new, patience)
        return list(await asyncio.gather(*calls))

    texts = asyncio.run(all_at_once())
    staying = [i for i in range(20) if patience[i] is None]
    assert [texts[i] for i in staying] == checkpoint.texts(
        [prompts[i] for i in staying], [new[i] for i in staying]
    )
    assert [] in texts  # somebody did hang up
    deadline = time.monotonic() + 120
    while server.metric("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.5)
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    # Rows came back: more requests than rows end, with the same tokens.
    again = [i for i in staying if len(prompts[i]) < 130][:7]

    async def once_more() -> list[list[int]]:
        return list(await asyncio.gather(*(server.generate(prompts[i], 4, None) for i in again)))

    assert asyncio.run(once_more()) == [texts[i][:4] for i in again]


@pytest.mark.slow
def test_the_example_with_many_requests(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """examples/vllm/serve_load.py with this package's model, which caches no prefixes."""
    environment = engine_process.environment("V1") | _plugin(tmp_path)
    for name, value in {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}.items():
        monkeypatch.setenv(name, value)
    serve_load = compare_process.load("serve_load")
    limits = ["--max-model-len", "384", "--max-num-seqs", "6", "--num-gpu-blocks-override", "30"]
    numbers = ["--requests", "30", "--longest", "100", "--seconds", str(_PATIENCE)]
    own = ["--enforce-eager", "--additional-config", json.dumps(engine_process.FLOAT32)]
    paths = [str(checkpoint.folder), "--out", str(tmp_path / "server.log")]
    options = serve_load.parsed([*paths, "--design", "model", *numbers, "--", *limits, *own])
    status = serve_load.run(options)
    printed = capsys.readouterr().out
    assert status == 0, printed + options.out.read_text()[-4000:]
    assert "every request that stayed got its tokens" in printed
    assert "8 of 8 texts are equal" in printed
