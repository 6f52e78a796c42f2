"""Cases of ``tests._tools.run_compiled``: E4M3 itself, caches, attention, the indexer, and GEMMs.

They are for GPUs whose tensor cores take operands from registers; the grid runs no others.
Quantisers have the bits of the reference. GEMMs are within 1e-6 of float64, attention within the
budget of its tests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dsv4.kv_cache.pages import Pages
from dsv4.ops.compressor import compress_write
from dsv4.ops.gemm import gemm
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.indexer import quantize_index_queries
from dsv4.ops.kv_cache import norm_rope_write_kv, read_kv, write_kv
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.formats import FRAGMENTS, QuantizedTensor
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise
from dsv4.triton import attention
from dsv4.triton._runtime import launch_options
from tests.ops import test_attention_kernels, test_compressor, test_compressor_paged, test_gemm_fp8
from tests.ops.test_indexer import compact_case
from tests.triton import test_numerics

_BOTH = ("triton", "reference")


def _values(*shape: int) -> torch.Tensor:
    """Normal values of many magnitudes; a NaN and an infinity in entries of their own."""
    x = strategies.normal(sum(shape), shape) * torch.exp2(strategies.normal(3, (shape[0], 1)) * 9)
    x[1, 3], x[2, 5], x[3, :64] = torch.nan, -torch.inf, 0.0
    return x


def _angles(rows: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = strategies.normal(7, (rows, half), torch.float32)
    return angles.cos(), angles.sin()


def _decoded() -> None:
    """All codes, and all in one program."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    got = torch.empty(256)
    test_numerics._e4m3_value[(1,)](codes, got, 256, BLOCK=256)
    assert_bitwise(got, codes.view(torch.float8_e4m3fn).float(), "values")


def _encoded(tile: bool) -> None:
    """All bfloat16 values, and the borders of the codes' intervals in float32."""
    x = test_numerics.encoded_values()
    got = torch.empty(x.shape, dtype=torch.uint8)
    test_numerics._e4m3_bits[(-(-x.numel() // 1024),)](x, got, x.numel(), tile, BLOCK=1024)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert_bitwise(torch.where(x.isnan(), 0x7F, got), torch.where(x.isnan(), 0x7F, expected))
    assert bool((got[x.isnan()] & 0x7F == 0x7F).all())


def _written(entry_format: str) -> None:
    """Entries, and their values back."""
    slots = torch.tensor([3, -1, 9, 0, 7, 12, 13])
    pages = [Pages.allocate(2, 8, 512, 64, entry_format) for _ in _BOTH]
    for page, name in zip(pages, _BOTH, strict=True):
        write_kv(page, _values(7, 512).bfloat16(), slots, backend=name)
    assert_bitwise(pages[0].data, pages[1].data, "pages")
    for dtype in (torch.float32, torch.bfloat16):
        values = [read_kv(pages[0], torch.arange(16), dtype, backend=name) for name in _BOTH]
        assert_bitwise(*(torch.nan_to_num(v, 7.0) for v in values), "values")


def _normed_and_written() -> None:
    """The bytes of exactly the entries that the kernel writes as floats."""
    slots = torch.tensor([3, -1, 9, 0, 7])
    weight = strategies.normal(5, (512,))
    plain, stored, expected = (
        Pages.allocate(2, 8, 512, 64, name, torch.float32) for name in ("plain", "fp8", "fp8")
    )
    for pages in (plain, stored):
        arguments = (pages, _values(5, 512), weight, *_angles(5, 32), slots)
        norm_rope_write_kv(*arguments, backend="triton")
    _assert_same_entries(plain, stored, expected)


def _assert_same_entries(plain: Pages, stored: Pages, expected: Pages) -> None:
    entries = read_kv(plain, torch.arange(plain.num_slots), torch.float32, backend="reference")
    written = (entries != 0).any(1)  # NaN too
    slots = torch.where(written, torch.arange(plain.num_slots), -1)
    write_kv(expected, entries, slots, backend="reference")
    assert bool(written.any())
    assert_bitwise(stored.data, expected.data, "bytes")


def _compressed(entry_format: str) -> None:
    """Two sequences' windows of four tokens."""
    batch = [(1, 4, 9), (0, 0, 6)]
    ragged = test_compressor.Ragged.make(0, (4, True), 128, batch, "cpu")
    weight = strategies.normal(5, (128,))
    frequencies = torch.rand(32, generator=strategies.generator(3))
    table = torch.arange(6).view(2, 3)
    rope_dim = 64 if entry_format == "fp8" else 0
    plain, stored, expected = (
        Pages.allocate(6, 4, 128, rope_dim, name, torch.float32)
        for name in ("plain", entry_format, entry_format)
    )
    for pages in (plain, stored):
        arguments = (*ragged.args(ragged.state.clone()), weight, frequencies, pages, table)
        compress_write(*arguments, overlap=True, dtype=torch.float32, backend="triton")
    _assert_same_entries(plain, stored, expected)


def _compressed_in_pages(entry_format: str) -> None:
    """The same by the kernels whose states are paged."""
    model = test_compressor_paged.Model.make(0, (4, True), 64, 16, 2, "cpu")
    plain, stored, expected = (
        model.pages(name, 16) for name in ("plain", entry_format, entry_format)
    )
    for pages in (plain, stored):
        engine = test_compressor_paged.Engine.of(model, 4)
        for pieces in test_compressor_paged.SHORT[:2]:
            engine.step(pieces, pages, 1, dtype=torch.float32, backend="triton")
    _assert_same_entries(plain, stored, expected)


def _queried() -> None:
    """Codes and weights of index queries in FP8, without rotation, which needs more roundings."""
    q, weights = _values(4, 256).view(4, 2, 128).bfloat16(), strategies.normal(2, (4, 2))
    arguments = (q, *_angles(4, 0), weights)
    results = [
        quantize_index_queries(*arguments, rotate=False, query_format="fp8", backend=name)
        for name in _BOTH
    ]
    codes = [codes.view(torch.uint8) for codes, _ in results]
    assert_bitwise(*(torch.where(c & 0x7F == 0x7F, 0x7F, c) for c in codes), "codes")
    assert_bitwise(*(torch.nan_to_num(w, 7.0) for _, w in results), "weights")


def _selected(page_size: int, queries: str | torch.dtype) -> None:
    """Top FP8 keys; values are small integers, so sums are exact in any order."""
    case = compact_case((0, 2, 1, 128 // page_size, page_size), "index_fp8", queries, "cpu", 128)
    assert_bitwise(*(case.run(9, backend=name) for name in _BOTH), "entries")


def _attended(entry_format: str) -> None:
    """With every shape of the GPU, whole and split."""
    case = test_attention_kernels.Case(0, "cpu", 1, (40, 56), entry_format, 16, (512, 64))
    for shape in attention._shapes(launch_options.sm(case.q)):
        for splits in (1, 2):
            with test_attention_kernels.launched(splits, shape, 1024):
                case.check(case.run())


def _near(got: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((got.double() - expected).abs().max() / expected.abs().max())
    assert error < 1e-6, error


def _multiplied(tokens: int, columns: int) -> None:
    weight = test_gemm_fp8.weight_of(0, 128, columns, "cpu")
    x = strategies.normal(1, (tokens, columns), torch.bfloat16)
    got = gemm(x, weight, out_dtype=torch.float32, backend="triton")
    _near(got, test_gemm_fp8.truth(x, weight)[0])


def _multiplied_packed(is_grouped: bool) -> None:
    # Dense: 17 steps of four blocks of columns, so that one of nine programs takes one, eight two.
    columns = 256 if is_grouped else 17 * 256
    values = strategies.normal(0, (2 if is_grouped else 1, 64, columns))
    weight = quantize(values, "nvfp4", scaling="weight", backend="reference")
    packed, x = weight.with_layout(FRAGMENTS), strategies.normal(1, (5, columns), torch.bfloat16)
    values = dequantize(weight, torch.float64)
    if not is_grouped:
        total = None if packed.global_scale is None else packed.global_scale[0]
        first = QuantizedTensor(packed.codes[0], packed.scales[0], total, packed.format, FRAGMENTS)
        _near(gemm(x, first, out_dtype=torch.float32, backend="triton"), x.double() @ values[0].T)
        return
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    got = grouped_gemm(x, packed, offsets, out_dtype=torch.float32, backend="triton")
    expected = torch.cat((x[:2].double() @ values[0].T, x[2:].double() @ values[1].T))
    _near(got, expected)


CASES: dict[str, Callable[[], None]] = {
    "E4M3 to float32": _decoded,
    "float32 to E4M3": lambda: _encoded(False),
    "float32 to E4M3, tiles": lambda: _encoded(True),
    "entries": lambda: _written("fp8"),
    "entries behind a norm": _normed_and_written,
    "compressed entries": lambda: _compressed("fp8"),
    "compressed entries in pages": lambda: _compressed_in_pages("fp8"),
    "index queries, fp8": _queried,
    "index keys, fp8": lambda: _selected(64, "fp8"),
    "index keys, fp8, bf16 queries": lambda: _selected(64, torch.bfloat16),
    "index keys, fp8, small pages": lambda: _selected(8, "fp8"),
    "attention": lambda: _attended("fp8"),
    "attention over floats": lambda: _attended("plain"),
    "GEMM, fp8": lambda: _multiplied(3, 256),
    "GEMM, fp8, many tokens": lambda: _multiplied(65, 256),
    "GEMM, nvfp4": lambda: _multiplied_packed(False),
    "GEMM, nvfp4, grouped": lambda: _multiplied_packed(True),
}
