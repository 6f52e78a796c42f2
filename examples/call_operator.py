"""Call one operator: multiply by a matrix of a checkpoint in NVFP4, and ask what runs it.

    pip install "dsv4[cute]"
    python examples/call_operator.py DeepSeek-V4-Flash-NVFP4

An operator takes tensors and knows no model. ``explain`` lists each implementation with the reason
why it is not taken on this machine, and runs nothing.
"""

from __future__ import annotations

import argparse

import torch

from dsv4 import QuantizedTensor, explain, ops
from dsv4.checkpoint import Checkpoint


def read_matrix(path: str, name: str) -> QuantizedTensor:
    """A matrix of a checkpoint in NVFP4: as it is stored, or quantised here."""
    with Checkpoint.open(path) as checkpoint:
        weight = checkpoint.read(name)
    if isinstance(weight, torch.Tensor):
        weight = ops.quantize(weight, "nvfp4", scaling="weight")
    return weight


def main() -> None:
    parser = argparse.ArgumentParser(description="Multiply by a matrix of a checkpoint.")
    parser.add_argument("path", help="folder of a checkpoint")
    parser.add_argument("--name", default="model.layers.0.mlp.experts.0.gate_proj.weight")
    parser.add_argument("--tokens", type=int, default=4)
    options = parser.parse_args()

    weight = read_matrix(options.path, options.name)
    if torch.cuda.is_available():
        weight = weight.to("cuda")
    x = torch.randn(options.tokens, weight.shape[-1], device=weight.device).bfloat16()

    print(f"{options.name}: {weight.format.name}, {tuple(weight.shape)}")
    exact = x.double() @ ops.dequantize(weight, torch.float64).T

    # Kernels for the tensor cores want the weight in their layout; the values stay the same.
    packed = weight.with_layout("fragments_16x64")
    for activation in ("bf16", "nvfp4"):  # nvfp4: tokens are quantised, too, 16 columns a scale
        y = ops.gemm(x, packed, activation=activation)
        error = (y.double() - exact).norm() / exact.norm()
        print(f"\nactivation {activation}: off by {error:.1e}")
        print(explain(ops.gemm, x, packed, activation=activation))


if __name__ == "__main__":
    main()
