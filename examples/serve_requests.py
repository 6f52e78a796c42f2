"""Serve requests that come and go: add them while others run, watch their tokens, cancel one.

    pip install "dsv4[cute,text]"
    python examples/serve_requests.py DeepSeek-V4-Flash-NVFP4

A step of the runner gives each running sequence a token, or processes a chunk of prompts. Requests
join and leave between steps; a server calls ``step`` as long as it returns True.
"""

from __future__ import annotations

import argparse

import torch

import dsv4
from dsv4.serving import Request, Runner, SamplingOptions
from dsv4.text import Tokenizer
from dsv4.text.markers import BOS

PROMPTS = ("Once upon a time", "def fibonacci(n):", "The three laws are", "In the year 2026")


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve requests that come and go.")
    parser.add_argument("path", help="folder of a checkpoint")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = dsv4.load(options.path, device=device, prepare="kernels")
    tokenizer = Tokenizer.from_path(options.path)
    sampling = SamplingOptions(temperature=0.7, top_p=0.95, max_new_tokens=options.max_new_tokens)
    waiting = [[tokenizer.token_id(BOS), *tokenizer.encode(text)] for text in PROMPTS]
    requests: list[Request] = []

    with Runner(model, max_sequences=3, max_tokens=1024) as runner:
        steps, is_left = 0, True
        while is_left or waiting:
            if steps % 2 == 0 and waiting:  # an arrival every other step
                requests.append(runner.add(waiting.pop(0), sampling, seed=steps))
            if steps == 6:  # a client that went away
                runner.cancel(requests[1])
            is_left = runner.step()
            steps += 1
            print(f"step {steps}: {[len(request.tokens) for request in requests]} tokens")

    for prompt, request in zip(PROMPTS, requests, strict=True):
        print(f"{request.finish_reason}: {prompt!r} + {tokenizer.decode(request.tokens)!r}")


if __name__ == "__main__":
    main()
