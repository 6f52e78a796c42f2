"""Load a checkpoint as a transformers model whose layers are dsv4's, and generate with it.

    pip install "dsv4[cute,hf,text]"
    python examples/transformers_model.py DeepSeek-V4-Flash-NVFP4

transformers alone cannot load NVFP4. The model is transformers' DeepseekV4ForCausalLM, and its own
``generate`` runs; the report says which modules were replaced, and which were not and why.
"""

from __future__ import annotations

import argparse

import torch

from dsv4.integrations.transformers import from_pretrained
from dsv4.text import Tokenizer
from dsv4.text.markers import BOS


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate with a transformers model.")
    parser.add_argument("path", help="folder of a checkpoint")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = from_pretrained(options.path, device=device)
    print(model.dsv4_report)

    tokenizer = Tokenizer.from_path(options.path)
    ids = [tokenizer.token_id(BOS), *tokenizer.encode(options.prompt)]
    tokens = model.generate(
        torch.tensor([ids], device=device),
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
    )
    print(tokenizer.decode(tokens[0].tolist()))


if __name__ == "__main__":
    main()
