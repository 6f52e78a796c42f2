"""Start ``vllm serve`` with its default options and send it many requests, of which some hang up.

    python examples/vllm/serve_load.py small
    python examples/vllm/serve_load.py small --design model -- --max-num-seqs 64

Prompts have random lengths, and half of them begin with one of four long prefixes, so that prefix
caching finds pages. Every fifth client hangs up while it waits, prefills or decodes. Afterwards
each request that stayed must have got all of its tokens with finite log-probabilities, no request
may run, no page may be used, and some requests are sent again, when their prefixes are cached.
What stands behind ``--`` goes to ``vllm serve``. Only the standard library is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIXES, HANG_UP, AGAIN = 4, 5, 8
CLIENTS = 64
_FLOOR = -9998.0  # vLLM writes -9999 for a log-probability that is not finite


@dataclass(frozen=True)
class Request:
    """A request.

    Attributes:
        tokens: The prompt.
        new: Tokens of the answer.
        patience: Seconds after which the client hangs up; None: it stays.
    """

    tokens: list[int]
    new: int
    patience: float | None = None


def requests_of(count: int, vocabulary: int, longest: int, seed: int = 1) -> list[Request]:
    """Return random requests, half of them with one of a few prefixes.

    Args:
        count: How many.
        vocabulary: Tokens are below.
        longest: Most tokens of a prompt.
        seed: Of the draws.
    """
    draw = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return [draw.randrange(2, vocabulary) for _ in range(number)]

    prefixes = [tokens(longest // 2) for _ in range(PREFIXES)]
    made = []
    for i in range(count):
        prefix = prefixes[draw.randrange(PREFIXES)] if i % 2 else []
        prompt = prefix + tokens(draw.randint(1, longest - len(prefix)))
        leaves = i % HANG_UP == HANG_UP - 1
        patience = draw.uniform(0.05, 1.0) if leaves else None
        made.append(Request(prompt, 200 if leaves else draw.randint(1, 40), patience))
    return made


@dataclass(frozen=True)
class Server:
    """``vllm serve`` on this machine."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self, seconds: float) -> None:
        """Wait until it answers.

        Raises:
            RuntimeError: with the end of its log, if it ends or is late.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"vllm serve did not start:\n{self.log.read_text()[-3000:]}")

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels; 0 if there is none."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=60) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith(f"{name}{{"))

    def answer(self, request: Request, longest: float) -> dict[str, Any] | None:
        """Send a request; None if the client hung up.

        Args:
            request: What to send.
            longest: Seconds after which an answer is missing.
        """
        parameters = {"temperature": 0.0, "max_tokens": request.new, "ignore_eos": True}
        parameters["logprobs"] = 0
        body = {"token_ids": request.tokens, "sampling_params": parameters}
        call = urllib.request.Request(
            f"{self.address}/inference/v1/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        patience = longest if request.patience is None else request.patience
        try:
            with urllib.request.urlopen(call, timeout=patience) as reply:
                choice: dict[str, Any] = json.load(reply)["choices"][0]
                return choice
        except urllib.error.HTTPError as error:
            return {"error": f"status {error.code}: {error.read()[:300]!r}"}
        except OSError as error:  # the time is up, or the server has gone
            return None if request.patience is not None else {"error": str(error)}

    def answers(self, requests: Sequence[Request], longest: float) -> list[dict[str, Any] | None]:
        """Send requests from many clients at the same time."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            return list(pool.map(lambda request: self.answer(request, longest), requests))

    def idle(self, seconds: float) -> str:
        """Wait until no request runs; return what is left, or an empty string."""
        deadline = time.monotonic() + seconds
        while True:
            running = self.metric("vllm:num_requests_running")
            used = self.metric("vllm:kv_cache_usage_perc")
            if not running and not used:
                return ""
            if time.monotonic() > deadline:
                return f"{running:.0f} requests run, {100 * used:.1f} % of the pages are used"
            time.sleep(0.2)


@contextmanager
def served(
    folder: Path, environment: dict[str, str], log: Path, own: list[str]
) -> Iterator[Server]:
    """Run ``vllm serve`` in the block.

    Args:
        folder: The checkpoint.
        environment: What is added to this process's environment.
        log: File for what it prints.
        own: Further options.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    options = ["--host", "127.0.0.1", "--port", str(port)]
    options += ["--skip-tokenizer-init", "--enable-scale-out"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *options, *own],
            env={**os.environ, **environment},
            stdout=file,
            stderr=file,
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def problem(request: Request, choice: dict[str, Any] | None) -> str:
    """Return what is wrong with an answer; empty: nothing, or its client hung up."""
    if choice is None:
        return "" if request.patience is not None else "no answer"
    if "error" in choice:
        return str(choice["error"])
    if len(choice["token_ids"]) != request.new:
        return f"{len(choice['token_ids'])} tokens, expected {request.new}"
    values = [row["logprob"] for row in choice["logprobs"]["content"]]
    if not all(value is not None and math.isfinite(value) and value > _FLOOR for value in values):
        return "a log-probability is not finite"
    return ""


def load(server: Server, requests: Sequence[Request], longest: float) -> list[str]:
    """Send all requests and some of them again; print what happened, return what is wrong."""
    begin = time.perf_counter()
    choices = server.answers(requests, longest)
    seconds = time.perf_counter() - begin
    pairs = list(zip(requests, choices, strict=True))
    problems = [f"request {i}: {bad}" for i, pair in enumerate(pairs) if (bad := problem(*pair))]
    left = server.idle(60)
    if left:
        problems.append(f"after all requests {left}")
    gone = sum(choice is None for choice in choices)
    print(f"{len(requests)} requests in {seconds:.1f} s, {gone} clients hung up", flush=True)
    stayed = [(r, c) for r, c in pairs if r.patience is None and c and "error" not in c][:AGAIN]
    same = 0
    for request, first in stayed:
        again = server.answer(request, longest)
        bad = problem(request, again)
        if bad or again is None:
            problems.append(f"sent again: {bad}")
        else:
            same += again["token_ids"] == first["token_ids"]
    hits, asked = (server.metric(f"vllm:prefix_cache_{name}_total") for name in ("hits", "queries"))
    print(f"sent again one by one: {same} of {len(stayed)} texts are equal")
    print(f"prefix cache: {hits:.0f} of {asked:.0f} tokens found", flush=True)
    return problems


def main() -> int:
    """Run it as a program."""
    return run(parsed(sys.argv[1:]))


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; ``own`` has those of ``vllm serve``, behind ``--``."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="What stands behind -- goes to vllm serve."
    )
    parser.add_argument("folder", type=Path, help="a checkpoint")
    parser.add_argument("--design", choices=["parts", "model", "stock"], default="parts")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--longest", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--seconds", type=float, default=400, help="the start may take so long")
    parser.add_argument("--out", type=Path, default=Path("vllm_serve.log"))
    return argparse.Namespace(**vars(parser.parse_args(words[:end])), own=words[end + 1 :])


def run(options: argparse.Namespace) -> int:
    """Start the server, send the requests, end it.

    Returns:
        1 if something was wrong.
    """
    vocabulary = json.loads((options.folder / "config.json").read_text())["vocab_size"]
    requests = requests_of(options.requests, vocabulary, options.longest)
    design = {"parts": "all", "model": "model", "stock": "off"}[options.design]
    begin = time.perf_counter()
    with served(options.folder, {"DSV4_VLLM": design}, options.out, options.own) as server:
        server.wait(options.seconds)
        print(f"started in {time.perf_counter() - begin:.0f} s", flush=True)
        problems = load(server, requests, options.seconds)
    print("\n".join(problems) or "every request that stayed got its tokens")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
