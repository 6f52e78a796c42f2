"""Continue a text, and print it as it comes.

    pip install "dsv4[cute,text]"
    python examples/generate_text.py DeepSeek-V4-Flash-NVFP4 --prompt "The capital of France is"

The text is decoded token by token: a character of several tokens is printed when it is complete,
and a stop string is not shown, wherever tokens cut it.
"""

from __future__ import annotations

import argparse

import torch

import dsv4
from dsv4.serving import Runner
from dsv4.text import TextGenerator, Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Continue a text.")
    parser.add_argument("path", help="folder of a checkpoint")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--stop", action="append", default=[], help="ends the text; repeats")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The runner captures CUDA graphs of its own, so load needs to compile the kernels alone.
    model = dsv4.load(options.path, device=device, prepare="kernels")
    tokenizer = Tokenizer.from_path(options.path)
    with Runner(model, max_sequences=1, max_tokens=1024) as runner:
        text = TextGenerator(runner, tokenizer).complete(
            options.prompt, stop=options.stop, max_new_tokens=options.max_new_tokens
        )
        print(options.prompt, end="")
        for piece in text:
            print(piece, end="", flush=True)
    print(f"\n[{text.usage.completion_tokens} tokens, ended by {text.finish_reason}]")


if __name__ == "__main__":
    main()
