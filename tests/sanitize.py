"""Run every kernel once per problem size of the bench, for NVIDIA's compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
        --error-exitcode 9 python -m tests.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.sanitize

Without caching, each tensor is an allocation of its own, so a step past its end is seen.
"""

from __future__ import annotations

import sys

import torch

from dsv4 import dispatch
from dsv4.bench.cases import MAKERS, cases
from dsv4.bench.problem import Draw

SIZES = (
    ("tiny", 1),
    ("tiny", 5),
    ("tiny", 130),
    ("flash", 1),
    ("flash", 19),
    ("tiny", 1100),  # many, of kernels that take many rows
    ("flash", 130),  # many values, of those that take many of these
)


def main(ops: list[str]) -> int:
    """Run the operators named, or all; the number of calls."""
    calls = 0
    for op in ops or list(MAKERS):
        if dispatch.implementations(op)[0].name == "reference":
            continue
        for preset, tokens in SIZES:
            for case in cases(op, preset, tokens):
                problem = case.build(Draw(0, torch.device("cuda", 0)))
                problem.run("auto")
                torch.cuda.synchronize()
                calls += 1
        print(op, flush=True)
    return calls


if __name__ == "__main__":
    print(f"{main(sys.argv[1:])} calls")
