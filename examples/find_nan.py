"""Find where a NaN comes from: in the weights, in a forward pass, and while tokens are generated.

    pip install "dsv4[cute]"
    python examples/find_nan.py DeepSeek-V4-Flash-NVFP4
    python examples/find_nan.py DeepSeek-V4-Flash-NVFP4 --damage model.layers.1.self_attn.kv_norm

A checkpoint that loads has finite weights; ``--damage`` puts a NaN into a module, for the example.
"""

from __future__ import annotations

import argparse

import torch

import dsv4
from dsv4 import debug


def main() -> None:
    parser = argparse.ArgumentParser(description="Find where a NaN comes from.")
    parser.add_argument("path", help="folder of a checkpoint")
    parser.add_argument("--damage", metavar="MODULE", help="put a NaN into its weight")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = dsv4.load(options.path, device=device, prepare="kernels")
    if options.damage is not None:
        with torch.no_grad():
            model.get_submodule(options.damage).weight.view(-1)[0] = float("nan")

    for bad in debug.check_parameters(model):  # every parameter and buffer
        print(f"parameter {bad}")

    ids = torch.tensor([[0, 5, 9, 2]], device=device)
    print(debug.first_nonfinite(model, ids))  # with hooks that wait for the device: eager, slow

    with debug.monitor(model) as monitor:  # marks on the device: waits for nothing, also in graphs
        model(ids)
    print(monitor.first() or "all was finite")


if __name__ == "__main__":
    main()
