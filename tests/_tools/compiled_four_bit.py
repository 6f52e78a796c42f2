"""Cases of ``tests._tools.run_compiled``: GEMMs with four-bit weights, in every tile of tokens.

Sums are within 1e-6 of float64, results of SwiGLU within 3e-6; both of the largest one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dsv4.ops.gemm import gemm
from dsv4.ops.gemm_swiglu import gemm_swiglu
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu
from dsv4.ops.quantize import dequantize
from dsv4.ops.swiglu import SwigluArgs
from dsv4.quant.formats import FRAGMENTS, LINEAR, SWIZZLED
from dsv4.reference.swiglu import swiglu
from dsv4.testing import strategies
from tests.ops.test_four_bit_gemms import weight_of

_LIMIT = 2.0  # of SwiGLU; sums are larger
_SPLIT = {"rows": 64, "columns": 17 * 256}  # 17 steps of four blocks of columns
_CPU = torch.device("cpu")


def _near(got: torch.Tensor, expected: torch.Tensor, most: float) -> None:
    error = float((got.double() - expected).abs().max() / expected.abs().max())
    assert error < most, error


def _activated(total: torch.Tensor, row_weight: torch.Tensor | None) -> torch.Tensor:
    return swiglu(SwigluArgs(total, _LIMIT, "interleaved", row_weight, torch.float64))


def _dense(
    tokens: int,
    layout: str = FRAGMENTS,
    *,
    is_activated: bool = False,
    rows: int = 128,
    columns: int = 256,
) -> None:
    weight = weight_of(0, (rows, columns), _CPU, layout, "segments")
    x = strategies.normal(1, (tokens, columns), torch.bfloat16)
    expected = x.double() @ dequantize(weight, torch.float64).T
    how = {"out_dtype": torch.float32, "backend": "triton"}
    if is_activated:
        _near(gemm_swiglu(x, weight, _LIMIT, **how), _activated(expected, None), 3e-6)
    else:
        _near(gemm(x, weight, **how), expected, 1e-6)


def _grouped(
    counts: tuple[int, ...], layout: str = FRAGMENTS, *, is_activated: bool = False
) -> None:
    """Experts with these numbers of rows, then a row of none; SwiGLU has weights of rows."""
    weight = weight_of(0, (len(counts), 128, 128), _CPU, layout, "segments")
    rows = sum(counts) + 1
    x = strategies.normal(1, (rows, 128), torch.bfloat16)
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    of_expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    values = dequantize(weight, torch.float64)
    expected = torch.zeros(rows, 128, dtype=torch.float64)
    expected[:-1] = torch.einsum("tk,tnk->tn", x[:-1].double(), values[of_expert])
    how = {"out_dtype": torch.float32, "backend": "triton"}
    if is_activated:
        row_weight = strategies.normal(2, (rows,))
        got = grouped_gemm_swiglu(x, weight, offsets, _LIMIT, row_weight=row_weight, **how)
        _near(got, _activated(expected, row_weight), 3e-6)
    else:
        _near(grouped_gemm(x, weight, offsets, **how), expected, 1e-6)


CASES: dict[str, Callable[[], None]] = {
    "W4A16, split, 16 tokens": lambda: _dense(16, **_SPLIT),
    "W4A16, split, SwiGLU, 3 tokens": lambda: _dense(3, is_activated=True, **_SPLIT),
    "W4A16, 32 tokens": lambda: _dense(32),
    "W4A16, 64 tokens": lambda: _dense(64),
    "W4A16, 128 tokens": lambda: _dense(128),
    "W4A16, SwiGLU, 5 tokens": lambda: _dense(5, is_activated=True),
    "W4A16, SwiGLU, 64 tokens": lambda: _dense(64, is_activated=True),
    "W4A16, swizzled, 5 tokens": lambda: _dense(5, SWIZZLED),
    "W4A16, swizzled, SwiGLU, 33 tokens": lambda: _dense(33, SWIZZLED, is_activated=True),
    "W4A16, MXFP4, 5 tokens": lambda: _dense(5, LINEAR),
    "W4A16, MXFP4, SwiGLU, 33 tokens": lambda: _dense(33, LINEAR, is_activated=True),
    "experts, 16 rows": lambda: _grouped((9, 5)),
    "experts, 32 rows": lambda: _grouped((33, 0, 5)),
    "experts, 64 rows": lambda: _grouped((65, 1)),
    "experts, 128 rows": lambda: _grouped((129, 40)),
    "experts, SwiGLU, 8 rows": lambda: _grouped((3, 0, 4), is_activated=True),
    "experts, SwiGLU, 32 rows": lambda: _grouped((33, 0, 5), is_activated=True),
    "experts, SwiGLU, 128 rows": lambda: _grouped((129, 40), is_activated=True),
    "experts, swizzled, SwiGLU, 8 rows": lambda: _grouped((3, 4), SWIZZLED, is_activated=True),
    "experts, swizzled, 32 rows": lambda: _grouped((20, 5), SWIZZLED),
    "experts, MXFP4, SwiGLU, 8 rows": lambda: _grouped((3, 4), LINEAR, is_activated=True),
    "experts, MXFP4, 32 rows": lambda: _grouped((20, 5), LINEAR),
}
