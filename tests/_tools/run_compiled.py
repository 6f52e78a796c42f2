"""Run what Triton's compiler makes of kernels, for a GPU that is not there, against the reference.

    python -m tests._tools.run_compiled 90 [[--without] CASE ...]     (without TRITON_INTERPRET)

A launch is compiled, and ``tests._tools.ptx.grid`` runs its PTX on the CPU tensors of the launch.
Prints a line for each case.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.jit import JITFunction

from dsv4.device import interpret_triton
from dsv4.ops.fp8_token import moe_gather_fp8, rms_norm_fp8, swiglu_fp8
from dsv4.ops.indexer import indexer_queries
from dsv4.ops.moe import moe_gather, moe_gather_quantize, moe_permute
from dsv4.ops.norm import rms_norm_quantize
from dsv4.ops.quantize import dequantize, quantize
from dsv4.ops.rope import rope, rope_quantize
from dsv4.ops.swiglu import swiglu, swiglu_quantize
from dsv4.quant.formats import FRAGMENTS, LINEAR, SWIZZLED, SWIZZLED_EXPERTS, QuantizedTensor
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise
from dsv4.triton import indexer_queries as query_kernels
from dsv4.triton import moe_gather_quantize as moe_kernels
from dsv4.triton import norm, quantize_fp8_token
from dsv4.triton._lib import nvfp4_tile
from tests._tools import compiled_caches, compiled_four_bit
from tests._tools.other_gpu import replace_launches
from tests._tools.ptx import grid as ptx_grid
from tests.ops.test_indexer import compact_case


def _flat(argument, kind) -> Iterator[torch.Tensor | int | float]:
    """Parameters that an argument is: none if it is known to the compiler, several of a tuple."""
    if isinstance(kind, tuple):
        for part, of_part in zip(argument, kind, strict=True):
            yield from _flat(part, of_part)
    elif kind != "constexpr":
        if not isinstance(argument, torch.Tensor | int | float):
            pytest.skip(f"tests._tools.ptx.grid takes no {type(argument).__name__}")
        yield argument


def install(arch: int) -> list[str]:
    """Let every launch run on the CPU; the list of kernels' names grows with each."""
    ran: list[str] = []
    compile_only = JITFunction.run

    def run(self, *args, grid, warmup, **options):
        kernel = compile_only(self, *args, grid=grid, warmup=True, **options)
        named = dict(zip(self.arg_names, args, strict=False)) | options
        arguments = [a for n, kind in kernel.src.signature.items() for a in _flat(named[n], kind)]
        blocks = (*grid, 1, 1)[:3]
        threads = 32 * kernel.metadata.num_warps
        try:
            ptx_grid.launch(kernel.asm["ptx"], arguments, blocks, threads, kernel.metadata.shared)
        except NotImplementedError as error:
            pytest.skip(f"tests._tools.ptx.grid has no {error}")
        ran.append(self.__name__)
        return kernel

    replace_launches(arch, run, processors=132)
    return ran


def same(actual, expected) -> None:
    """Codes, scales and global scales bit for bit."""
    for name in ("codes", "scales", "global_scale"):
        a, b = (getattr(x, name) for x in (actual, expected))
        if b is None:
            continue
        a, b = (x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in (a, b))
        assert_bitwise(a, b, name)


def values(rows: int, columns: int, exponent: int = 0) -> torch.Tensor:
    """Normal ones, a zero block, signed zeros, a NaN and an infinity in rows of their own."""
    x = strategies.normal(rows + columns, (rows, columns), torch.float32) * 2.0**exponent
    x[0, :16], x[0, 16:32:2] = 0, -0.0
    if rows > 1:
        x[1, 3], x[1, 40] = torch.nan, -torch.inf
    return x.to(torch.bfloat16)


def quantized(x, **options) -> None:
    same(quantize(x, **options, backend="triton"), quantize(x, **options, backend="reference"))


def by_rope(tokens: int, heads: int, dim: int, half: int, groups: int, **options) -> None:
    """Compare with rotating, then quantising, by the reference."""
    x = values(tokens, heads * dim).reshape(tokens, heads, dim)
    angles = strategies.normal(7, (tokens, half), torch.float32)
    cos, sin = angles.cos(), angles.sin()
    result = rope_quantize(x, cos, sin, inverse=True, groups=groups, **options, backend="triton")
    rotated = rope(x, cos[:, None], sin[:, None], inverse=True, backend="reference")
    same(result, quantize(rotated.reshape(tokens, groups, -1), **options, backend="reference"))


def normed(rows: int, columns: int, **options) -> None:
    """Compare with quantising the norm that the kernel itself returns."""
    x = values(rows, columns)
    weight = strategies.normal(5, (columns,), torch.float32).to(torch.bfloat16)
    y, result = rms_norm_quantize(x, weight, **options, backend="triton")
    same(result, quantize(y, **options, backend="reference"))


def activated(rows: int, columns: int, **options) -> None:
    """Compare with the quantised result of the plain kernel."""
    x = values(rows, 2 * columns)
    result = swiglu_quantize(x, 10.0, **options, backend="triton")
    same(result, quantize(swiglu(x, 10.0, backend="triton"), **options, backend="reference"))


def gathered(tokens: int, columns: int, static: bool, layout: str) -> None:
    """Six of eight experts a token, three of them another's."""
    ids = torch.stack([torch.randperm(8, generator=strategies.generator(i)) for i in range(tokens)])
    ids = torch.where(ids[:, :6] < 5, ids[:, :6], -1)
    _, offsets, rows = moe_permute(ids, 5, backend="reference")
    scales = strategies.normal(3, (5,), torch.float32).abs() + 0.01 if static else None
    arguments = (values(tokens, columns), rows, offsets)
    actual, expected = (
        moe_gather_quantize(*arguments, input_scale=scales, layout=layout, backend=name)
        for name in ("triton", "reference")
    )
    same(actual, expected)


def rotated(tokens: int, heads: int) -> None:
    """Index queries after RoPE, Hadamard transform and FP4; a NaN makes its row NaN."""
    q = values(tokens, heads * 128).reshape(tokens, heads, 128)
    angles = strategies.normal(7, (tokens, 32), torch.float32)
    results = (
        indexer_queries(q, angles.cos(), angles.sin(), rotate_quantize=True, backend=name)
        for name in ("triton", "reference")
    )
    assert_bitwise(*(torch.nan_to_num(result, 7.0) for result in results), "queries")


def rotated_as_many(tokens: int, heads: int) -> None:
    """The same by the programs of many queries, which have more rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_kernels, "_SMALL_VALUES", 0)
        rotated(tokens, heads)


def selected(queries) -> None:
    """Top MXFP4 index keys; values are small integers, so sums are exact in any order."""
    case = compact_case((0, 2, 1, 2, 64), "index_mxfp4", queries, "cpu", 128, heads=3)
    results = (case.run(9, backend=name) for name in ("triton", "reference"))
    assert_bitwise(*results, "entries")


def rounded(rows: int, columns: int, layout: str, skipped: int = 0) -> None:
    """FP8 by tokens, and its values back; a whole block is NaN, and rows may be a part of rows."""
    x = values(rows, columns + skipped)[:, :columns]
    x[-1, columns - columns % 128 - 128 :] = torch.nan
    q = quantize(x, "fp8_token", layout=layout, backend="triton")
    same(_without_signs_of_nan(q), by_tokens(x, layout))
    numbers = (dequantize(q, torch.float32, backend=name) for name in ("triton", "reference"))
    assert_bitwise(*(torch.nan_to_num(n, 7.0) for n in numbers), "values")


def rounded_draws(layout: str, name: str | None = None, examples: int = 12) -> None:
    """FP8 by tokens of drawn inputs, alone or behind the SwiGLU that the kernel itself returns.

    Normal numbers of any magnitude, with a block of zeros, subnormal, huge or non-finite ones; or
    small integers, of which those above 16 often lie in the middle of two codes.
    """
    wide = 2 if name == "swiglu" else 1

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(draw=strategies.draws(-130, 120), ties=st.booleans())
    def agree(draw: strategies.Draw, ties: bool) -> None:
        shape = (2, 256 * wide)
        x = draw.build(shape, torch.bfloat16)
        if ties:
            integers = strategies.small_integers(draw.seed, shape, limit=31)
            x = (integers * 2.0**draw.exponent).to(torch.bfloat16)
        if name == "swiglu":
            q = swiglu_fp8(x, 10.0, result_layout=layout, backend="triton")
            x = swiglu(x, 10.0, backend="triton")
        else:
            q = quantize(x, "fp8_token", layout=layout, backend="triton")
        same(_without_signs_of_nan(q), by_tokens(x, layout))

    agree()


def by_tokens(x: torch.Tensor, layout: str) -> QuantizedTensor:
    q = quantize(x, "fp8_token", layout=layout, backend="reference")
    return _without_signs_of_nan(q)


def _without_signs_of_nan(q: QuantizedTensor) -> QuantizedTensor:
    bits = q.codes.view(torch.uint8)
    bits = torch.where((bits & 0x7F) == 0x7F, 0x7F, bits)
    return replace(q, codes=bits.view(torch.float8_e4m3fn))


def rounded_behind(name: str, layout: str) -> None:
    """FP8 behind a norm, SwiGLU and a gather, compared with rounding their results."""
    x = values(3, 512)
    if name == "norm":
        y, q = rms_norm_fp8(x, values(1, 512)[0], result_layout=layout, backend="triton")
    elif name == "swiglu":
        q = swiglu_fp8(x, 10.0, result_layout=layout, backend="triton")
        y = swiglu(x, 10.0, backend="triton")
    else:
        ids = torch.tensor([[0, 2], [1, 0], [2, -1]])
        rows = moe_permute(ids, 3, backend="reference")[2]
        weights = strategies.normal(4, (3, 2), torch.float32)
        q, sorted_ones = moe_gather_fp8(x, rows, weights, result_layout=layout, backend="triton")
        assert_bitwise(sorted_ones[rows.long()], weights, "weights")
        y = moe_gather(x, rows, backend="reference")
    same(_without_signs_of_nan(q), by_tokens(y, layout))


# Constants up to which the launchers count rows as few.
_THRESHOLDS = (
    (nvfp4_tile, "_FEW_ROWS"),
    (norm, "_FEW_ROWS"),
    (moe_kernels, "_FEW_PROGRAMS"),
    (moe_kernels, "_SEPARATE_TOKENS"),
    (quantize_fp8_token, "_MANY_BLOCKS"),
)


def _take_large_m_paths() -> None:
    """Let the launchers take few rows as they take many."""
    for module, name in _THRESHOLDS:
        setattr(module, name, 0)


_STATIC = {"scaling": "static", "global_scale": 0.004}
_SMALL = {"scaling": "static", "global_scale": 2.0**-120}
_TOKEN = {"scaling": "token"}
_FEW_AND_MANY: dict[str, Callable[[], None]] = {
    "quantize": lambda: quantized(values(3, 2048), **_TOKEN),
    "quantize swizzled": lambda: quantized(values(5, 272), layout=SWIZZLED, scaling="tensor"),
    "quantize small": lambda: quantized(values(2, 2048, -110), **_SMALL),
    "quantize weight": lambda: quantized(values(2, 512), scaling="weight"),
    "rope": lambda: by_rope(2, 8, 512, 32, 1, **_STATIC),
    "rope, heads of two chunks": lambda: by_rope(2, 16, 128, 8, 2, **_STATIC),
    "rope, half a group": lambda: by_rope(2, 8, 512, 32, 2, **_TOKEN),
    "rope, parts of heads": lambda: by_rope(2, 2, 96, 16, 4, **_TOKEN),
    "norm": lambda: normed(3, 2048, **_TOKEN),
    "norm static": lambda: normed(2, 1536, **_STATIC),
    "swiglu": lambda: activated(3, 2048, **_TOKEN),
    "swiglu static": lambda: activated(2, 96, **_STATIC),
    "gather": lambda: gathered(3, 2048, False, LINEAR),
    "gather static": lambda: gathered(2, 272, True, LINEAR),
    "gather swizzled": lambda: gathered(2, 1024, False, SWIZZLED),
    "gather by expert": lambda: gathered(3, 1024, False, SWIZZLED_EXPERTS),
}
CASES = {f"few {name}": case for name, case in _FEW_AND_MANY.items()}
CASES |= {f"many {name}": case for name, case in _FEW_AND_MANY.items()}
CASES |= {
    "fp8": lambda: rounded(9, 256, LINEAR),
    "fp8, one token": lambda: rounded(1, 384, FRAGMENTS),
    "fp8, ragged": lambda: rounded(3, 200, LINEAR),
    "many fp8": lambda: rounded(9, 512, FRAGMENTS),
    "many fp8, linear": lambda: rounded(3, 256, LINEAR),
    "many fp8, part of rows": lambda: rounded(5, 384, FRAGMENTS, 64),
    "fp8 norm": lambda: rounded_behind("norm", LINEAR),
    "fp8 swiglu": lambda: rounded_behind("swiglu", FRAGMENTS),
    "fp8 gather": lambda: rounded_behind("gather", FRAGMENTS),
    "fp8, drawn": lambda: rounded_draws(FRAGMENTS),
    "many fp8, drawn": lambda: rounded_draws(FRAGMENTS),
    "fp8 swiglu, drawn": lambda: rounded_draws(LINEAR, "swiglu"),
}
INDEXER = {
    "index queries": lambda: rotated(2, 3),
    "index queries, many": lambda: rotated_as_many(2, 64),
    "index keys, mxfp4": lambda: selected("mxfp4"),
    "index keys, bf16 queries": lambda: selected(torch.bfloat16),
}
# For GPUs whose tensor cores take operands from registers.
OF_REGISTERS = compiled_caches.CASES | compiled_four_bit.CASES
CASES |= INDEXER | OF_REGISTERS


def cases_of(arch: int) -> list[str]:
    """Names of the cases that the grid can run; it runs ``mma.sync`` alone of tensor cores."""
    names = [name for name in CASES if arch // 10 != 10 or not name.startswith("index keys")]
    return [name for name in names if arch // 10 in (8, 12) or name not in OF_REGISTERS]


def main(arch: int, names: list[str]) -> int:
    """The number of cases that differ.

    Args:
        arch: Compute capability times 10.
        names: Cases, or ``--without`` and those that are left out; empty: all.
    """
    ran = install(arch)
    wrong = 0
    thresholds = [getattr(module, name) for module, name in _THRESHOLDS]
    if names[:1] == ["--without"]:
        names = [name for name in cases_of(arch) if name not in names]
    for name in names or cases_of(arch):
        for (module, constant), value in zip(_THRESHOLDS, thresholds, strict=True):
            setattr(module, constant, value)
        if name.startswith("many"):
            _take_large_m_paths()
        ran.clear()
        try:
            with interpret_triton():
                CASES[name]()
            result = "equal"
        except Exception as error:  # a case is reported, and the next is run
            wrong += 1
            result = f"{type(error).__name__}: {error}"
            print(*getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)  # what was drawn
        print(f"{name} | {' '.join(dict.fromkeys(ran))} | {result}", flush=True)
    return wrong


if __name__ == "__main__":
    assert not os.environ.get("TRITON_INTERPRET"), "kernels would be interpreted"
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]) > 0)
