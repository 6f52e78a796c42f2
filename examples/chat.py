"""Talk with a model: each line of stdin is a message, and the answer is printed as it comes.

    pip install "dsv4[cute,text]"
    python examples/chat.py DeepSeek-V4-Flash-NVFP4
    echo "Why is the sky blue?" | python examples/chat.py DeepSeek-V4-Flash-NVFP4

The model reasons before it answers if the checkpoint has its table of reasoning efforts,
encoding/encoding_dsv4.py. The next message follows the tokens of the answer, which the runner
finds in its cache of prefixes and does not compute again.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

import dsv4
from dsv4.serving import Runner
from dsv4.text import ChatRequest, EffortTable, TextGenerator, Tokenizer
from dsv4.text.answer_events import ContentText, ReasoningText


def show(request: ChatRequest) -> None:
    """Print reasoning in parentheses, then the content."""
    is_reasoning = False
    for event in request:
        if isinstance(event, (ReasoningText, ContentText)):
            if isinstance(event, ReasoningText) != is_reasoning:
                print(")" if is_reasoning else "(", end="\n" if is_reasoning else "")
                is_reasoning = not is_reasoning
            print(event.text, end="", flush=True)
    print(")" if is_reasoning else "")
    print(f"[{request.usage.completion_tokens} tokens, ended by {request.finish_reason}]")


def main() -> None:
    parser = argparse.ArgumentParser(description="Talk with a model.")
    parser.add_argument("path", help="folder of a checkpoint")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = dsv4.load(options.path, device=device, prepare="kernels")
    tokenizer, efforts = Tokenizer.from_path(options.path), EffortTable.from_path(options.path)
    messages: list[dict[str, Any]] = []
    with Runner(model, max_sequences=1, max_tokens=8192) as runner:
        generator = TextGenerator(runner, tokenizer, efforts=efforts)
        for line in sys.stdin:
            messages.append({"role": "user", "content": line.rstrip("\n")})
            request = generator.chat(
                messages, thinking=efforts is not None, max_new_tokens=options.max_new_tokens
            )
            show(request)
            messages.append(request.answer.message())


if __name__ == "__main__":
    main()
