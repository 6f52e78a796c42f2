"""What the sanitizers run of a named kernel."""

from __future__ import annotations

import pytest
import torch

from dsv4 import dispatch
from dsv4.device import pretend
from dsv4.quant.formats import FRAGMENTS
from tests._tools import sanitized_problems

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("op", ["gemm", "gemm_swiglu", "grouped_gemm", "grouped_gemm_swiglu"])
def test_of_triton_every_four_bit_format_is_run(monkeypatch, op):
    made = dispatch.arguments

    def on_gpu(*args, **kwargs):
        return made(*args, **kwargs)._replace(device=GPU)

    monkeypatch.setattr(dispatch, "arguments", on_gpu)
    with pretend(capability=(9, 0), packages=True):
        taken = list(sanitized_problems.problems(op, "small", 3, CPU, "triton"))
    weights = [problem.args[1] for problem in taken]
    assert {weight.format.name for weight in weights} >= {"nvfp4", "mxfp4"}
    assert FRAGMENTS in [weight.layout for weight in weights]
    have_row_weights = ["row_weight" in problem.kwargs for problem in taken]
    assert any(have_row_weights) == (op == "grouped_gemm_swiglu")
    assert not all(have_row_weights)
