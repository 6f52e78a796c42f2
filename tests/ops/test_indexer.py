"""The indexer: transform and rounding against independent oracles, selection against a sort."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from dsv4.device import interpret_triton
from dsv4.dispatch import explain
from dsv4.kv_cache.pages import COMPACT_FORMATS, IndexLayout
from dsv4.ops.indexer import (
    QUERY_FORMATS,
    IndexerSelectArgs,
    indexer_queries,
    indexer_rotate_quantize,
    indexer_select,
    quantize_index_queries,
)
from dsv4.ops.kv_cache import Pages, fake_quantize_kv, norm_rope_write_kv, read_kv, write_kv
from dsv4.ops.quantize import dequantize, quantize
from dsv4.ops.rope import rope
from dsv4.ops.slots import entry_slots
from dsv4.quant.formats import MXFP4, NVFP4, QuantizedTensor
from dsv4.reference import indexer as reference
from dsv4.testing.assertions import assert_bitwise, assert_pure
from dsv4.testing.strategies import (
    finite_draws,
    generator,
    normal,
    seeds,
    small_integers,
    strided,
)

KERNELS = ("triton",)
widths = st.sampled_from([32, 64, 128, 256])
dtypes = st.sampled_from([torch.bfloat16, torch.float32, torch.float64])


def sylvester(d: int) -> np.ndarray:
    """Entry (i, j) is -1 to the number of bits that i and j share."""
    return np.array([[(-1) ** bin(i & j).count("1") for j in range(d)] for i in range(d)])


def fp4_oracle(x: np.ndarray) -> np.ndarray:
    """Groups of 32 through ml_dtypes' E2M1, scales by exact arithmetic."""
    out = np.empty_like(x)
    for i in np.ndindex(*x.shape[:-1], x.shape[-1] // 32):
        part = (*i[:-1], slice(32 * i[-1], 32 * i[-1] + 32))
        amax = max(Fraction(float(np.abs(x[part]).max())), Fraction(6) / 2**126)
        e = -126
        while Fraction(2) ** e < amax / 6:
            e += 1
        scale = x.dtype.type(2.0) ** x.dtype.type(e)
        out[part] = (x[part] / scale).astype(ml_dtypes.float4_e2m1fn).astype(x.dtype) * scale
    return out


@given(widths, seeds(), st.sampled_from([torch.float32, torch.float64]), st.integers(-30, 30))
def test_equals_the_oracles_bit_for_bit(device, d, seed, dtype, exponent):
    """Integers times a power of two: the transform is exact but for the factor d^-0.5."""
    x = small_integers(seed, (3, d), torch.float64, limit=9)
    total = x.numpy() @ sylvester(d).T * 2.0**exponent
    wide = np.float64 if dtype == torch.float64 else np.float32
    expected = fp4_oracle(total.astype(wide) * wide(d**-0.5))
    out = indexer_rotate_quantize((x * 2.0**exponent).to(dtype).to(device))
    assert_bitwise(out.cpu(), torch.from_numpy(expected))


@given(widths, seeds())
def test_bfloat16_rounds_the_rotated_value_first(device, d, seed):
    x = small_integers(seed, (3, d), torch.float64, limit=100)
    total = (x.numpy() @ sylvester(d).T).astype(np.float32) * np.float32(d**-0.5)
    rounded = total.astype(ml_dtypes.bfloat16).astype(np.float32)
    expected = torch.from_numpy(fp4_oracle(rounded))
    out = indexer_rotate_quantize(x.to(torch.bfloat16).to(device))
    assert_bitwise(out.cpu().float(), expected)
    assert_bitwise(out.cpu(), expected.to(torch.bfloat16))


@given(widths, dtypes, finite_draws(-20, 20))
def test_values_lie_on_the_grid(device, d, dtype, drawn):
    x = drawn.build((4, d), dtype, device)
    if drawn.special == "huge" or not bool(x.isfinite().all()):
        x = torch.zeros_like(x)
    out = indexer_rotate_quantize(x).double().unflatten(-1, (-1, 32))
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=device)
    # The scale is a power of two that makes every value one of the grid; the largest exceeds 3
    # unless the group is below the floor.
    amax = out.abs().amax(-1, keepdim=True)
    exponent = torch.floor(torch.log2(amax.clamp(min=2.0**-126) / 3.5))
    for shift in (0, 1):
        scaled = out.abs() / torch.exp2(exponent + shift)
        good = (scaled.unsqueeze(-1) == grid).any(-1).all(-1)
        if shift == 0:
            result = good
        result = result | good
    assert bool((result | (amax.squeeze(-1) <= 6 * 2.0**-126)).all())


@given(widths, seeds())
def test_transform_is_an_orthonormal_involution(d, seed):
    x = normal(seed, (5, d), torch.float64)
    rotated = reference._hadamard(x)
    torch.testing.assert_close(reference._hadamard(rotated), x, rtol=0, atol=1e-13)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=0)
    matrix = reference._hadamard(torch.eye(d, dtype=torch.float64))
    expected = torch.from_numpy(sylvester(d) * d**-0.5)
    assert_bitwise(matrix, expected)


@given(st.sampled_from([64, 256]), seeds())
def test_products_are_unchanged_by_the_transform(d, seed):
    """The result is exact if d^-0.5 is a power of two and the values are small integers."""
    q = small_integers(seed, (4, d), torch.float64)
    k = small_integers(seed + 1, (6, d), torch.float64)
    assert_bitwise(reference._hadamard(q) @ reference._hadamard(k).T, q @ k.T)


@pytest.mark.parametrize("ratio", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_ties_go_to_the_even_code(device, wide, ratio):
    """Go through the transform: x is the rotation of the expected row, so it rotates back to it."""
    even = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}[ratio]
    row = torch.zeros(1, 64, dtype=wide, device=device)
    row[0, 0], row[0, 1], row[0, 2] = 6.0, ratio, -ratio
    out = indexer_rotate_quantize(reference._hadamard(row))
    assert out[0, :3].tolist() == [6.0, even, -even]


@given(widths, dtypes, seeds(), st.sampled_from([float("nan"), float("inf")]))
def test_nan_stays_in_its_own_row(device, d, dtype, seed, bad):
    x = normal(seed, (3, 2, d), dtype).to(device)
    expected = indexer_rotate_quantize(x)
    x[1, 0, seed % d] = bad
    expected[1, 0] = torch.nan
    assert_bitwise(indexer_rotate_quantize(x), expected)


def test_zeros_stay_zero(device):
    x = torch.zeros(2, 128, dtype=torch.bfloat16, device=device)
    assert_bitwise(indexer_rotate_quantize(x), x)


def test_rotate_contract(device):
    tests = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    x = normal(0, (3, 2, 32)).to(device)
    op = torch.ops.dsv4.indexer_rotate_quantize.default
    torch.library.opcheck(op, (x, "auto"), test_utils=tests)
    compiled = torch.compile(indexer_rotate_quantize, fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(x), indexer_rotate_quantize(x))
    assert_bitwise(indexer_rotate_quantize(strided(x)), indexer_rotate_quantize(x))
    assert indexer_rotate_quantize(x[:0]).shape == (0, 2, 32)
    with pytest.raises(ValueError, match=r"x has shape \[\], wanted"):
        indexer_rotate_quantize(x[0, 0, 0])
    for d in (16, 48, 0):
        with pytest.raises(ValueError, match=f"last axis of x is {d}, wanted a power of two"):
            indexer_rotate_quantize(torch.zeros(1, d, device=device))
    with pytest.raises(TypeError, match="x has dtype float16"):
        indexer_rotate_quantize(x.half())


def queries_of(seed, tokens, heads, d, rotated, dtype, device="cpu"):
    """q, cos, sin; ``turned`` dims are rotated."""
    q = normal(seed, (tokens, heads, d), dtype).to(device)
    angles = normal(seed + 1, (tokens, rotated // 2)) * 3
    return q, angles.cos().to(device), angles.sin().to(device)


@given(
    st.sampled_from([(32, 32), (32, 6), (64, 0), (128, 64), (256, 64)]),
    st.integers(0, 4),
    st.integers(1, 5),
    seeds(),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.booleans(),
)
def test_queries_are_rope_then_rotation(device, dims, tokens, heads, seed, dtype, rotate):
    """The bits of the parts, computed apart; a NaN or Inf stays in its own head."""
    q, cos, sin = queries_of(seed, tokens, heads, *dims, dtype, device)
    if tokens > 1:
        q[1, 0, seed % dims[0]] = torch.inf if seed % 2 else torch.nan
    out = indexer_queries(q, cos, sin, rotate_quantize=rotate)
    parts = rope(q, cos.unsqueeze(1), sin.unsqueeze(1), backend="reference")
    if rotate:
        parts = indexer_rotate_quantize(parts, backend="reference")
    assert_bitwise(out, parts)
    assert bool(out[:1].isfinite().all())
    assert bool(out[1:, 1:].isfinite().all())


@pytest.mark.parametrize(
    ("dims", "tokens", "heads"),
    [((32, 32), 1, 5), ((64, 20), 3, 7), ((128, 64), 3, 13), ((256, 64), 2, 3)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("most", [0, 1 << 20])
@pytest.mark.parametrize("pad", [0, 8])
def test_many_queries_are_what_few_are(device, dims, tokens, heads, dtype, most, pad, monkeypatch):
    """Rows in two tiles or in tiles of 32 columns give the bits of the reference, codes too.

    And rows that are not loaded 16 bytes at a time: Triton's maximum of a group was wrong for them.
    """
    kernels = pytest.importorskip("dsv4.triton.indexer_queries")
    monkeypatch.setattr(kernels, "_SMALL_VALUES", 0)
    monkeypatch.setattr(kernels, "_LARGE_VALUES", most)
    q, cos, sin = queries_of(5, tokens, heads, *dims, dtype, device)
    q[-1, -1, 0], q[0, 0], q[-1, 1] = torch.nan, 0, q[-1, 1] * 2.0**-100
    q = torch.nn.functional.pad(q, (0, pad))[..., : dims[0]]
    weights = normal(6, (tokens, heads), dtype).to(device)

    def outputs(backend):
        yield indexer_queries(q, cos, sin, rotate_quantize=True, backend=backend)
        yield indexer_rotate_quantize(q, backend=backend)
        for query_format in ("fp8", "mxfp4"):
            actual, folded = quantize_index_queries(
                q, cos, sin, weights, rotate=True, query_format=query_format, backend=backend
            )
            yield folded
            parts = (actual.codes, actual.scales) if query_format == "mxfp4" else (actual,)
            yield from (part.view(torch.uint8) for part in parts)

    for got, expected in zip(outputs("auto"), outputs("reference"), strict=True):
        assert_bitwise(got, expected)


@given(seeds(), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_queries_of_other_widths(device, seed, dtype):
    """Any even width works without the transform; dims that are not rotated keep their bits."""
    q, cos, sin = queries_of(seed, 3, 3, 20, 6, dtype, device)
    out = indexer_queries(q, cos.to(dtype), sin.to(dtype), rotate_quantize=False)
    cos, sin = (x.to(dtype).unsqueeze(1) for x in (cos, sin))
    assert_bitwise(out, rope(q, cos, sin, backend="reference"))
    assert_bitwise(out[..., :14], q[..., :14])


@pytest.mark.parametrize("rotate", [False, True])
def test_queries_contract(device, rotate):
    q, cos, sin = queries_of(0, 3, 2, 32, 8, torch.bfloat16, device)
    op = torch.ops.dsv4.indexer_queries.default
    tests = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    torch.library.opcheck(op, (q, cos, sin, rotate, "auto"), test_utils=tests)
    assert_pure(op, q, cos, sin, rotate, "auto")
    expected = indexer_queries(q, cos, sin, rotate_quantize=rotate)

    def call(q, cos, sin):
        return indexer_queries(q, cos, sin, rotate_quantize=rotate)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(q, cos, sin), expected)
    assert_bitwise(call(strided(q), strided(cos), strided(sin)), expected)
    wide = torch.zeros(3, 2, 48, dtype=q.dtype, device=device)
    wide[..., 8:40] = q
    assert_bitwise(call(wide[..., 8:40], cos, sin), expected)
    assert call(q[:0], cos[:0], sin[:0]).shape == (0, 2, 32)
    double = indexer_queries(q.double(), cos, sin, rotate_quantize=rotate)
    assert double.dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": (3, 32)}, ValueError, r"q has shape \[3, 32\]"),
        ({"cos": (2, 4), "sin": (2, 4)}, ValueError, r"cos has shape \[2, 4\], wanted \[3, any\]"),
        ({"sin": (3, 5)}, ValueError, r"sin has shape \[3, 5\], wanted \[3, 4\]"),
        ({"cos": (3, 17), "sin": (3, 17)}, ValueError, "q has 32 dims and cos 17"),
        ({"q": (3, 2, 9)}, ValueError, "q has 9 dims and cos 4, wanted an even number"),
        ({"q": (3, 2, 48)}, ValueError, "last axis of q is 48, wanted a power of two"),
    ],
)
def test_bad_queries_are_named(change, error, words):
    shapes = {"q": (3, 2, 32), "cos": (3, 4), "sin": (3, 4)} | change
    with pytest.raises(error, match=words):
        indexer_queries(**{k: torch.zeros(v) for k, v in shapes.items()}, rotate_quantize=True)


def test_float16_queries_are_not_rotated():
    q = torch.zeros(1, 1, 32, dtype=torch.float16)
    table = torch.zeros(1, 4)
    assert indexer_queries(q, table, table, rotate_quantize=False).dtype == torch.float16
    with pytest.raises(TypeError, match="q has dtype float16, wanted bfloat16"):
        indexer_queries(q, table, table, rotate_quantize=True)


def fp8_oracle(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 bytes of rows through ml_dtypes, scales by exact arithmetic."""
    scales = np.empty(x.shape[:-1], np.float32)
    for i in np.ndindex(scales.shape):
        amax = max(Fraction(float(np.abs(x[i]).max())), Fraction(float(np.float32(1e-4))))
        e = -40
        while Fraction(2) ** e * 448 < amax:
            e += 1
        scales[i] = np.float32(2.0) ** e
    codes = (x / scales[..., None]).astype(ml_dtypes.float8_e4m3fn)
    return codes.view(np.uint8), scales


def values_of(queries: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    """float32 values that codes stand for, without a scale that is in the weights."""
    if isinstance(queries, QuantizedTensor):
        return dequantize(queries, backend="reference")
    return queries.float()


@given(
    st.sampled_from([(32, 32), (64, 0), (128, 64)]),
    st.integers(0, 3),
    st.integers(1, 5),
    seeds(),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.booleans(),
    st.integers(-20, 20),
)
def test_fp8_queries_and_their_weights(device, dims, tokens, heads, seed, dtype, rotate, exponent):
    q, cos, sin = queries_of(seed, tokens, heads, *dims, dtype, device)
    q = (q * 2.0**exponent).to(dtype)
    weights = normal(seed + 2, (tokens, heads), dtype).to(device)
    codes, folded = quantize_index_queries(
        q, cos, sin, weights, rotate=rotate, query_format="fp8", weight_scale=0.0078125
    )
    assert codes.dtype == torch.float8_e4m3fn
    rotated = rope(q, cos.unsqueeze(1), sin.unsqueeze(1), backend="reference")
    rotated = reference.rotated(rotated) if rotate else rotated
    expected, scale = fp8_oracle(rotated.float().cpu().numpy())
    assert_bitwise(codes.view(torch.uint8).cpu(), torch.from_numpy(expected))
    assert_bitwise(folded.cpu(), weights.float().cpu() * 0.0078125 * torch.from_numpy(scale))


@given(
    st.sampled_from([(32, 32), (64, 0), (128, 64), (96, 10)]),
    st.integers(0, 3),
    st.integers(1, 5),
    seeds(),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_mxfp4_queries_have_the_values_of_rounded_ones(device, dims, tokens, heads, seed, dtype):
    """The bytes are those of ``quantize`` where nothing is transformed."""
    q, cos, sin = queries_of(seed, tokens, heads, *dims, dtype, device)
    weights = normal(seed + 2, (tokens, heads), dtype).to(device)
    args, kwargs = (q, cos, sin, weights), {"query_format": "mxfp4", "weight_scale": 0.3}
    rotated = rope(q, cos.unsqueeze(1), sin.unsqueeze(1), backend="reference")
    actual, folded = quantize_index_queries(*args, rotate=False, **kwargs)
    expected = quantize(rotated, "mxfp4", backend="reference")
    assert_bitwise(actual.codes, expected.codes)
    assert_bitwise(actual.scales.view(torch.uint8), expected.scales.view(torch.uint8))
    assert_bitwise(folded, weights.float() * 0.3)
    if dims[0] & (dims[0] - 1) == 0:
        actual, folded = quantize_index_queries(*args, rotate=True, **kwargs)
        rounded = indexer_queries(q, cos, sin, rotate_quantize=True, backend="reference")
        assert_bitwise(values_of(actual), rounded.float())
        assert_bitwise(folded, weights.float() * 0.3)


@pytest.mark.parametrize("query_format", QUERY_FORMATS)
@given(seeds(), st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.booleans())
def test_a_bad_query_is_nan_in_its_own_head(device, query_format, seed, bad, rotate):
    q, cos, sin = queries_of(seed, 3, 2, 64, 16, torch.bfloat16, device)
    weights = normal(seed, (3, 2)).to(device)
    kwargs = {"rotate": rotate, "query_format": query_format}
    clean = quantize_index_queries(q, cos, sin, weights, **kwargs)
    q[1, 1, seed % 48] = bad
    dirty = quantize_index_queries(q, cos, sin, weights, **kwargs)
    broken = values_of(dirty[0]).isnan()
    assert not bool(broken[0].any() | broken[2].any() | broken[1, 0].any())
    assert bool(broken[1, 1].all() if rotate or query_format == "fp8" else broken[1, 1].any())
    assert_bitwise(values_of(dirty[0])[~broken], values_of(clean[0])[~broken])
    is_clean = ~dirty[1].isnan()
    assert is_clean.flatten().tolist() == [True] * 3 + [query_format == "mxfp4"] + [True] * 2
    assert_bitwise(dirty[1][is_clean], clean[1][is_clean])


@pytest.mark.parametrize("query_format", QUERY_FORMATS)
@pytest.mark.parametrize("rotate", [False, True])
def test_quantized_queries_contract(device, query_format, rotate):
    q, cos, sin = queries_of(0, 3, 2, 64, 16, torch.bfloat16, device)
    weights = normal(1, (3, 2), torch.bfloat16).to(device)
    op = torch.ops.dsv4.quantize_index_queries.default
    args = (q, cos, sin, weights, rotate, query_format, 0.25, "auto")
    torch.library.opcheck(op, args)
    assert_pure(op, *args)

    def call(q, cos, sin, weights):
        actual, folded = quantize_index_queries(
            q, cos, sin, weights, rotate=rotate, query_format=query_format, weight_scale=0.25
        )
        if isinstance(actual, QuantizedTensor):
            return actual.codes, actual.scales.view(torch.uint8), folded
        return actual.view(torch.uint8), folded

    expected = call(q, cos, sin, weights)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for other in (
        compiled(q, cos, sin, weights),
        call(strided(q), strided(cos), strided(sin), strided(weights)),
    ):
        for a, b in zip(other, expected, strict=True):
            assert_bitwise(a, b)
    assert call(q[:0], cos[:0], sin[:0], weights[:0])[-1].shape == (0, 2)
    double = quantize_index_queries(
        q.double(), cos, sin, weights.double(), rotate=rotate, query_format=query_format
    )
    assert double[1].dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "options", "error", "words"),
    [
        ({"q": (3, 32)}, {}, ValueError, r"q has shape \[3, 32\]"),
        ({"weights": (3, 3)}, {}, ValueError, r"weights has shape \[3, 3\], wanted \[3, 2\]"),
        ({"sin": (3, 5)}, {}, ValueError, r"sin has shape \[3, 5\], wanted \[3, 4\]"),
        ({"q": (3, 2, 48)}, {}, ValueError, "last axis of q is 48, wanted a power of two"),
        ({"q": (3, 2, 48)}, {"rotate": False}, ValueError, "q has 48 dims, wanted a multiple"),
        ({}, {"query_format": "nvfp4"}, ValueError, "query_format is 'nvfp4', wanted one of 'fp8'"),
    ],
)
def test_bad_queries_to_quantize_are_named(change, options, error, words):
    shapes = {"q": (3, 2, 32), "cos": (3, 4), "sin": (3, 4), "weights": (3, 2)} | change
    options = {"rotate": True, "query_format": "mxfp4"} | options
    with pytest.raises(error, match=words):
        quantize_index_queries(**{k: torch.zeros(v) for k, v in shapes.items()}, **options)


def test_dtypes_of_queries_to_quantize():
    q, table, weights = torch.zeros(1, 1, 32).half(), torch.zeros(1, 4), torch.zeros(1, 1)
    with pytest.raises(TypeError, match="q has dtype float16, wanted bfloat16"):
        quantize_index_queries(q, table, table, weights, rotate=True, query_format="fp8")
    with pytest.raises(TypeError, match="weights has dtype int64"):
        quantize_index_queries(q, table, table, weights.long(), rotate=False, query_format="fp8")


@given(st.sampled_from([4, 32, 96, 128]), st.integers(1, 5), seeds(), st.integers(-30, 30))
def test_bytes_of_fp8_keys(d, page_size, seed, exponent):
    """Codes of all entries of a page, then their scales (specification, section 6)."""
    count = 3 * page_size
    x = normal(seed, (count, d)) * 2.0**exponent
    pages = Pages.allocate(3, page_size, d, 0, "index_fp8")
    write_kv(pages, x, torch.arange(count))
    codes, scales = fp8_oracle(x.numpy())
    expected = torch.cat(
        (
            torch.from_numpy(codes).view(3, -1),
            torch.from_numpy(scales).view(3, -1).view(torch.uint8),
        ),
        1,
    )
    assert_bitwise(pages.data, expected)
    assert pages.page_bytes() == page_size * (d + 4)
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    read = read_kv(pages, torch.arange(count), torch.float32)
    assert_bitwise(read, values * torch.from_numpy(scales)[:, None])


@given(st.sampled_from([32, 96, 128]), st.integers(1, 5), seeds(), st.integers(-30, 30))
def test_bytes_of_mxfp4_keys(d, page_size, seed, exponent):
    count = 3 * page_size
    x = normal(seed, (count, d)) * 2.0**exponent
    pages = Pages.allocate(3, page_size, d, 0, "index_mxfp4")
    write_kv(pages, x, torch.arange(count))
    expected = quantize(x, "mxfp4")
    assert_bitwise(pages.data[:, : page_size * d // 2], expected.codes.view(3, -1))
    scales = expected.scales.view(torch.uint8).view(3, -1)
    assert_bitwise(pages.data[:, page_size * d // 2 :], scales)
    assert_bitwise(
        read_kv(pages, torch.arange(count), torch.float32), torch.from_numpy(fp4_oracle(x.numpy()))
    )


def test_compact_pages_have_the_sizes_of_the_specification():
    for name, size in (("index_fp8", 132), ("index_mxfp4", 68)):
        layout = IndexLayout(128, name)
        assert layout.data_bytes + layout.scale_bytes == size
        assert layout.page_bytes(64) == 64 * size
        assert layout.data_offset(3) == 3 * layout.data_bytes
        assert layout.scale_offset(3, 64) == 64 * layout.data_bytes + 3 * layout.scale_bytes
        assert Pages.allocate(2, 64, 128, 64, name).data.shape == (2, 64 * size)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("entry_format", COMPACT_FORMATS)
def test_a_bad_key_reads_back_as_nan_alone(entry_format, bad):
    x = normal(0, (4, 64))
    clean, dirty = (Pages.allocate(2, 2, 64, 0, entry_format) for _ in range(2))
    write_kv(clean, x, torch.arange(4))
    x[2, 40] = bad
    write_kv(dirty, x, torch.arange(4))
    actual, expected = (read_kv(pages, torch.arange(4), torch.float32) for pages in (dirty, clean))
    broken = torch.zeros_like(x, dtype=torch.bool)
    broken[2, 0 if entry_format == "index_fp8" else 32 :] = True
    assert_bitwise(actual.isnan(), broken)
    assert_bitwise(actual[~broken], expected[~broken])


def test_skipped_slots_and_empty_pools_of_compact_keys():
    for name in COMPACT_FORMATS:
        pages = Pages.allocate(2, 2, 32, 0, name)
        pages.data.fill_(0x35)
        before = pages.data.clone()
        write_kv(pages, normal(0, (2, 32)), torch.tensor([-1, -1]))
        assert_bitwise(pages.data, before)
        assert not read_kv(pages, torch.tensor([-1])).any()
        write_kv(Pages.allocate(0, 2, 32, 0, name), normal(0, (1, 32)), torch.tensor([-1]))


def test_bad_compact_pages_are_named():
    with pytest.raises(ValueError, match="head_dim is 6, wanted a multiple of 4 for 'index_fp8'"):
        Pages.allocate(1, 1, 6, 0, "index_fp8")
    with pytest.raises(ValueError, match="head_dim is 48, wanted a multiple of 32"):
        Pages.allocate(1, 1, 48, 0, "index_mxfp4")
    bad = Pages(torch.zeros(1, 25, dtype=torch.uint8), 1, "index_mxfp4", 48, 0)
    with pytest.raises(ValueError, match=r"pages\.head_dim is 48, wanted a multiple of 32"):
        write_kv(bad, torch.zeros(1, 48), torch.tensor([0]))
    short = Pages(torch.zeros(1, 67, dtype=torch.uint8), 1, "index_mxfp4", 128, 0)
    with pytest.raises(ValueError, match=r"pages\.data has shape \[1, 67\], wanted \[any, 68\]"):
        read_kv(short, torch.tensor([0]))
    wide = Pages(torch.zeros(1, 68), 1, "index_mxfp4", 128, 0)
    with pytest.raises(TypeError, match=r"pages\.data has dtype float32, wanted uint8"):
        read_kv(wide, torch.tensor([0]))
    keys, row = Pages.allocate(1, 1, 32, 0, "index_fp8"), torch.zeros(1, 32)
    table = torch.zeros(1, 0)
    with pytest.raises(ValueError, match="entry_format is 'index_fp8', wanted one of 'fp8'"):
        norm_rope_write_kv(keys, row, row[0], table, table, torch.tensor([0]))


class Case:
    """Small integers, so that scores are exact in float32 and ties are common."""

    def __init__(
        self,
        seed,
        tokens,
        sequences,
        pages,
        page_size,
        device="cpu",
        d=4,
        heads=2,
        dtype=torch.float32,
        entry_format="plain",
    ):
        gen = torch.Generator().manual_seed(seed)
        self.capacity = pages * page_size
        order = torch.randperm(sequences * pages + 1, generator=gen)[: sequences * pages]
        self.table = order.view(sequences, pages).to(device)
        self.keys = Pages.allocate(
            sequences * pages + 1, page_size, d, 0, entry_format, dtype, device
        )
        self.fill(small_integers(seed, (self.keys.num_slots, d), limit=2))
        self.q = small_integers(seed + 1, (tokens, heads, d), dtype, limit=2).to(device)
        self.weights = small_integers(seed + 2, (tokens, heads), limit=2).to(device)
        self.sequence = torch.randint(0, sequences, (tokens,), generator=gen).to(device)
        self.visible = torch.randint(0, self.capacity + 1, (tokens,), generator=gen).to(device)

    def fill(self, values):
        """Set every key; codes hold small integers exactly."""
        slots = torch.arange(self.keys.num_slots, device=self.keys.data.device)
        write_kv(self.keys, values.to(slots.device), slots, backend="reference")

    def quantize(self, query_format):
        """Replace queries and weights by codes."""
        none = self.weights.new_empty((self.q.shape[0], 0))
        self.q, self.weights = quantize_index_queries(
            self.q,
            none,
            none,
            self.weights,
            rotate=False,
            query_format=query_format,
            backend="reference",
        )

    def queries(self, rows):
        if isinstance(self.q, QuantizedTensor):
            return QuantizedTensor(self.q.codes[rows], self.q.scales[rows], None, MXFP4)
        return self.q[rows]

    def arguments(self, top_k, rows=slice(None)):
        return {
            "q": self.queries(rows),
            "weights": self.weights[rows],
            "keys": self.keys,
            "page_table": self.table,
            "sequence_of_token": self.sequence[rows],
            "visible": self.visible[rows],
            "top_k": top_k,
        }

    def run(self, top_k, rows=slice(None), backend="auto"):
        return indexer_select(**self.arguments(top_k, rows), backend=backend)

    def key(self, token: int, entry: int) -> torch.Tensor:
        size = self.keys.page_size
        page = int(self.table[self.sequence[token], entry // size])
        slot = torch.tensor(page * size + entry % size, device=self.keys.data.device)
        return read_kv(self.keys, slot, torch.float32, backend="reference")

    def oracle(self, top_k: int) -> torch.Tensor:
        k = min(top_k, self.capacity)
        out, values = [], values_of(self.q)
        for t in range(values.shape[0]):
            scores = []
            for c in range(int(self.visible[t])):
                dots = [float(q @ self.key(t, c)) for q in values[t]]
                pairs = zip(self.weights[t].tolist(), dots, strict=True)
                scores.append((-sum(w * max(x, 0.0) for w, x in pairs), c))
            ids = sorted(c for _, c in sorted(scores)[:k])
            out.append(ids + [-1] * (k - len(ids)))
        return torch.tensor(out, dtype=torch.int64, device=values.device).view(-1, k)


@st.composite
def cases(draw: st.DrawFn):
    return (
        draw(seeds()),
        draw(st.integers(0, 5)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 2, 4])),
    )


@given(cases(), st.integers(1, 14))
def test_selects_as_a_sort_does(device, drawn, top_k):
    case = Case(*drawn, device=device)
    assert_bitwise(case.run(top_k), case.oracle(top_k))


@given(cases(), st.booleans(), st.integers(0, 2**31), st.data())
@example((0, 1, 2, 2, 4), True, 0, None)
def test_rows_and_pages_out_of_range_raise_on_the_cpu(drawn, in_table, beyond, data):
    case = Case(*drawn)
    name, tensor, limit = "sequence_of_token", case.sequence, case.table.shape[0]
    if in_table:
        name, tensor, limit = "page_table", case.table, case.keys.num_pages
    if not tensor.numel():
        return
    position = (0,) * tensor.ndim
    if data is not None:
        position = tuple(data.draw(st.integers(0, size - 1)) for size in tensor.shape)
    tensor[position] = limit + beyond
    where = ", ".join(map(str, position))
    words = rf"indexer_select: {name}\[{where}\] is {limit + beyond}, wanted below {limit}"
    with pytest.raises(IndexError, match=words):
        case.run(3)


def test_tokens_need_a_row_of_the_table(device):
    case = Case(0, 2, 1, 2, 4, device=device)
    case.sequence[:] = -1
    case.visible[:] = 0
    assert bool((case.run(3) == -1).all())
    case.table = case.table[:0]
    with pytest.raises(
        ValueError, match=r"page_table has shape \[0, 2\], wanted a row .* 2 tokens"
    ):
        case.run(3)
    assert case.run(3, slice(0, 0)).shape == (0, 3)


def test_compact_keys_that_overlap_are_not_written():
    for name in COMPACT_FORMATS:
        pages = Pages.allocate(1, 2, 32, 0, name)
        shared = Pages(pages.data.expand(2, -1), 2, name, 32, 0)
        with pytest.raises(ValueError, match=r"write_kv: pages\.data has .* overlap itself"):
            write_kv(shared, normal(0, (1, 32)), torch.tensor([0]))
        assert not pages.data.any()


key_formats = st.sampled_from(["plain", *COMPACT_FORMATS])
query_formats = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, *QUERY_FORMATS])


def compact_case(drawn, key_format, query_format, device, d=32, dtype=torch.bfloat16, heads=2):
    """A case of these formats; a dtype as the format of queries stands for itself."""
    case = Case(*drawn, device=device, d=d, heads=heads, dtype=dtype, entry_format=key_format)
    if isinstance(query_format, str):
        case.quantize(query_format)
    else:
        case.q = case.q.to(query_format)
    return case


@given(cases(), st.integers(1, 14), key_formats, query_formats, st.sampled_from([32, 96]))
@example((0, 1, 1, 1, 2), 1, "plain", torch.float16, 32)
def test_codes_are_selected_as_a_sort_does(device, drawn, top_k, key_format, query_format, d):
    """Codes hold the small integers exactly, so the oracle is that of plain entries."""
    case = compact_case(drawn, key_format, query_format, device, d)
    assert_bitwise(case.run(top_k), case.oracle(top_k))


@given(cases(), st.integers(1, 14), st.sampled_from(COMPACT_FORMATS), st.data())
def test_hidden_codes_have_no_effect(device, drawn, top_k, key_format, data):
    """Bytes of NaN in every page that a token may not see, and pages that are not there."""
    case = compact_case(drawn, key_format, torch.bfloat16, device)
    if not case.q.shape[0]:
        return
    token = data.draw(st.integers(0, case.q.shape[0] - 1))
    expected = case.run(top_k)[token : token + 1]
    size, shown, row = case.keys.page_size, int(case.visible[token]), int(case.sequence[token])
    used = -(-shown // size)
    pages = case.table[row, :used].tolist()
    other = [p for p in range(case.keys.num_pages) if p not in pages]
    case.keys.data[other] = 0xFF
    if shown % size:
        nan = torch.full((size, 32), torch.nan, device=device)
        slots = pages[-1] * size + torch.arange(size, device=device)
        slots[: shown % size] = -1
        write_kv(case.keys, nan, slots, backend="reference")
    case.table[row, used:] = -1
    assert_bitwise(case.run(top_k, slice(token, token + 1)), expected)


@settings(max_examples=10)
@given(seeds(), st.sampled_from(COMPACT_FORMATS), st.sampled_from(QUERY_FORMATS))
def test_a_nan_code_ranks_first(device, seed, key_format, query_format):
    case = compact_case((seed, 2, 1, 2, 4), key_format, query_format, device)
    case.visible.fill_(8)
    bad = torch.full((1, 32), torch.nan, device=device)
    entry = seed % 8
    slot = case.table[0, entry // 4 : entry // 4 + 1] * 4 + entry % 4
    write_kv(case.keys, bad, slot, backend="reference")
    assert case.run(1).tolist() == [[entry], [entry]]


@given(cases(), st.integers(1, 14))
def test_work_pieces_do_not_matter(drawn, top_k):
    case = Case(*drawn)
    whole = case.run(top_k)
    before = reference._WORK_BYTES
    reference._WORK_BYTES = 1
    try:
        assert_bitwise(case.run(top_k), whole)
    finally:
        reference._WORK_BYTES = before


@given(cases(), st.integers(1, 14), st.data())
def test_hidden_keys_have_no_effect(device, drawn, top_k, data):
    """NaN in every key that a token may not see, and pages that are not there."""
    case = Case(*drawn, device=device)
    if not case.q.shape[0]:
        return
    token = data.draw(st.integers(0, case.q.shape[0] - 1))
    expected = case.run(top_k)[token : token + 1]
    size, shown = case.keys.page_size, int(case.visible[token])
    keep = case.keys.data.clone()
    case.keys.data.fill_(torch.nan)
    row = int(case.sequence[token])
    for c in range(shown):
        page = int(case.table[row, c // size])
        case.keys.data[page, c % size] = keep[page, c % size]
    case.table[row, -(-shown // size) :] = -1
    assert_bitwise(case.run(top_k, slice(token, token + 1)), expected)


@given(cases(), st.integers(1, 14), st.data())
def test_nan_ranks_first_and_ids_stay_in_range(device, drawn, top_k, data):
    case = Case(*drawn, device=device)
    tokens = case.q.shape[0]
    if not tokens:
        return
    clean = case.run(top_k)
    token = data.draw(st.integers(0, tokens - 1))
    case.q[token, 0, 0] = torch.nan
    out = case.run(top_k)
    others = [t for t in range(tokens) if t != token]
    assert_bitwise(out[others], clean[others])
    shown = int(case.visible[token])
    ids = list(range(min(shown, out.shape[1])))
    assert out[token].tolist() == ids + [-1] * (out.shape[1] - len(ids))


@given(seeds(), st.integers(1, 10), st.integers(1, 10))
def test_equal_scores_go_to_the_lowest_entry(device, seed, visible, top_k):
    case = Case(seed, 1, 1, 5, 2, device=device)
    case.keys.data.fill_(1)
    case.visible[0] = visible
    ids = list(range(min(visible, top_k)))
    assert case.run(top_k)[0].tolist() == ids + [-1] * (top_k - len(ids))


def test_negative_and_zero_scores_are_selected_too(device):
    """A score below zero, or equal to what hidden entries are filled with, is not 'none'."""
    keys = Pages.allocate(1, 4, 4, 0, "plain", torch.float32, device)
    keys.data[0, :, 0] = torch.tensor([1.0, 3.0, -2.0, 2.0], device=device)
    q = torch.tensor([[[1.0, 0, 0, 0]]], device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    shown = torch.tensor([3], device=device)
    # Scores -1, -3, 0; then -inf, -inf and NaN (-inf times relu(-2)), which ranks first.
    for weight in (-1.0, -torch.inf):
        w = torch.tensor([[weight]], device=device)
        ids = indexer_select(q, w, keys, zero.view(1, 1), zero, shown, top_k=4)
        assert ids[0].tolist() == [0, 1, 2, -1]


@settings(max_examples=5)
@given(seeds())
def test_fp8_keys_count_as_what_they_read_back_as(device, seed):
    keys = Pages.allocate(2, 4, 64, 16, "fp8", device=device)
    plain = Pages.allocate(2, 4, 64, 16, "plain", torch.float32, device)
    x = normal(seed, (8, 64)).to(device)
    write_kv(keys, x, torch.arange(8, device=device))
    write_kv(plain, fake_quantize_kv(x, 16), torch.arange(8, device=device))
    q = normal(seed + 1, (3, 2, 64)).to(device)
    w = normal(seed + 2, (3, 2)).to(device)
    table = torch.tensor([[1, 0]], device=device)
    rows, shown = (torch.tensor(x, device=device) for x in ([0, 0, 0], [8, 5, 1]))
    a, b = (indexer_select(q, w, k, table, rows, shown, top_k=6) for k in (keys, plain))
    assert_bitwise(a, b)


@given(cases(), st.integers(1, 14))
def test_pitfall_13_one_token_alone_sees_what_it_sees_in_a_batch(device, drawn, top_k):
    case = Case(*drawn, device=device)
    together = case.run(top_k)
    for t in range(case.q.shape[0]):
        assert_bitwise(case.run(top_k, slice(t, t + 1)), together[t : t + 1])


def test_pitfall_13_a_decode_step_sees_every_entry(device):
    """The last of 12 tokens at ratio 4: 3 entries, none hidden because it is one token."""
    case = Case(3, 1, 1, 2, 4, device=device)
    case.visible[0] = (11 + 1) // 4
    for top_k in (3, 8):  # a mask of the wrong polarity fills the first places with hidden ones
        assert sorted(case.run(top_k)[0].tolist()) == [-1] * (top_k - 3) + [0, 1, 2]


@pytest.mark.costly(4)
@given(seeds(), st.integers(1, 8))
def test_pitfall_21_selecting_all_still_scores(seed, visible):
    """A trace made where every entry is taken is replayed with more entries, as a graph is."""
    case = Case(seed, 3, 2, 4, 2)
    rest = (case.keys.data, 2, "plain", 0, case.table, case.sequence)

    def call(shown):
        args = IndexerSelectArgs(case.q, case.weights, *rest, shown, 3, None, False)
        return reference.indexer_select(args)

    trace = make_fx(call)(torch.full((3,), 2))
    case.visible.fill_(visible)
    assert_bitwise(trace(case.visible), case.oracle(3))


@given(seeds(), st.integers(0, 4), st.integers(1, 9))
def test_pitfall_22_nothing_visible(device, seed, tokens, top_k):
    """All-zero lengths, no pages given, NaN everywhere: -1, and nothing out of bounds."""
    case = Case(seed, tokens, 2, 2, 4, device=device)
    case.visible.zero_()
    case.table.fill_(-1)
    case.keys.data.fill_(torch.nan)
    out = case.run(top_k)
    assert out.shape == (tokens, min(top_k, 8))
    assert bool((out == -1).all())


@pytest.fixture(params=["narrowed", "narrowed in pieces", "shared"])
def small_limits(request, monkeypatch):
    """Limits of the kernels so small that a short row goes the ways of a long one."""
    kernels = pytest.importorskip("dsv4.triton.indexer_select")
    monkeypatch.setattr(kernels, "_SHARED_FROM", 2)
    if request.param != "shared":
        monkeypatch.setattr(kernels, "_SEARCHED", 0)
        monkeypatch.setattr(kernels, "_DIRECT", 16)
    if "pieces" in request.param:
        monkeypatch.setattr(kernels, "_LONG", 150)
        monkeypatch.setattr(kernels, "_FEWEST", 1)
        monkeypatch.setattr(kernels, "_MOST", 1)
    return request.param


@settings(max_examples=15)
@given(
    seeds(),
    st.integers(1, 5),
    st.sampled_from([(1, 40, 4), (2, 20, 8), (1, 3, 50)]),
    st.integers(1, 12),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_every_way_to_a_long_row(device, small_limits, seed, tokens, table, top_k, dtype):
    case = Case(seed, tokens, *table, device=device, dtype=dtype)
    assert_bitwise(case.run(top_k), case.run(top_k, backend="reference"))


TABLES = [(1, 40, 4), (2, 20, 8), (1, 3, 50), (3, 2, 64)]


def check_slots(case, top_k):
    """Slots are those of the selected entries, some of which are of no sequence."""
    case.sequence[::3] = -1
    ids = case.run(top_k)
    expected = entry_slots(case.table, case.keys.page_size, case.sequence, ids, backend="reference")
    arguments = case.arguments(top_k)
    assert_bitwise(indexer_select(**arguments, slots=True), expected)
    assert_bitwise(indexer_select(**arguments, slots=True, backend="reference"), expected)


@settings(max_examples=15)
@given(seeds(), st.integers(1, 5), st.sampled_from(TABLES), st.integers(1, 12), st.booleans())
@example(0, 2, (3, 2, 64), 9, False)
@example(0, 4, (2, 20, 8), 9, True)
@example(1, 4, (1, 3, 50), 9, True)  # a thread's entries lie in two pages
def test_slots_of_selected_entries(device, seed, tokens, table, top_k, narrow):
    case = Case(seed, tokens, *table, device=device)
    if narrow:
        case.table, case.sequence = case.table.int(), case.sequence.int()
    check_slots(case, top_k)


@settings(max_examples=10)
@given(seeds(), st.integers(1, 5), st.sampled_from(TABLES), st.integers(1, 12))
def test_slots_by_every_way_to_a_long_row(device, small_limits, seed, tokens, table, top_k):
    check_slots(Case(seed, tokens, *table, device=device), top_k)


def test_slots_of_rows_of_a_wider_table(device):
    """Columns and rows of the table lie further apart than it is wide."""
    case = Case(3, 4, 2, 20, 8, device=device)
    case.visible.fill_(100)
    table = case.table
    for spread in (strided(table), table.t().contiguous().t()):
        case.table = spread
        check_slots(case, 9)


def test_slots_take_no_launch_of_their_own(monkeypatch):
    slots = pytest.importorskip("dsv4.triton.slots")
    selection = pytest.importorskip("dsv4.triton.indexer_select")
    launched = []
    select = selection.launch_selection
    monkeypatch.setattr(slots, "_launch_slots", lambda *args: launched.append("slots"))
    monkeypatch.setattr(
        selection, "launch_selection", lambda *args: (launched.append("selection"), select(*args))
    )
    case = Case(3, 4, 2, 20, 8)
    with interpret_triton():
        indexer_select(**case.arguments(9), slots=True, backend="triton")
    assert launched == ["selection"]


@settings(max_examples=10)
@given(
    seeds(),
    st.integers(1, 5),
    st.sampled_from([(1, 40, 4), (2, 20, 8), (1, 3, 50)]),
    st.integers(1, 12),
    key_formats,
    query_formats,
)
def test_every_way_to_a_long_row_of_codes(
    device, small_limits, seed, tokens, table, top_k, key_format, query_format
):
    case = compact_case((seed, tokens, *table), key_format, query_format, device)
    assert_bitwise(case.run(top_k), case.run(top_k, backend="reference"))


@pytest.mark.parametrize("key_format", ["plain", *COMPACT_FORMATS])
@settings(max_examples=5)
@given(seeds(), st.integers(1, 3), query_formats, st.booleans())
@example(0, 2, "mxfp4", False)  # of fewer heads than a block has keys: did not compile on a GPU
def test_blocks_within_pages(device, key_format, seed, tokens, query_format, spread):
    """Sizes of the models: pages of 64 entries of 128 dims, whose codes are read in words.

    Small integers at scales far apart, by which everything is exact, then any values.
    """
    drawn = seed, tokens, 1 + seed % 2, 2, 64
    case = compact_case(drawn, key_format, query_format, device, 128, heads=3)
    if spread:
        small = small_integers(seed, (case.keys.num_slots, 4, 32), limit=2)
        far = torch.randint(-20, 20, (case.keys.num_slots, 4, 1), generator=generator(seed))
        far[:, 2:] = 0 if key_format == "index_mxfp4" else far[:, :1]
        far[:, 1] = far[:, 0]
        case.fill((small * torch.exp2(far)).flatten(1))
        case.q = normal(seed + 1, (*case.weights.shape, 128)).to(device)
        if isinstance(query_format, str):
            case.quantize(query_format)
        else:
            case.q = case.q.to(query_format)
        check_best(case, 9)
    else:
        assert_bitwise(case.run(9), case.run(9, backend="reference"))


@settings(max_examples=20)
@given(seeds(), st.integers(1, 4), st.sampled_from([torch.bfloat16, torch.float32]))
def test_no_entry_left_out_is_better(device, small_limits, seed, tokens, dtype):
    heads, d = 5, 24
    case = Case(seed, tokens, 2, 10, 8, device=device, d=d, heads=heads, dtype=dtype)
    case.fill(normal(seed, (case.keys.num_slots, d)))
    case.q = normal(seed + 1, case.q.shape, dtype).to(device)
    case.weights = normal(seed + 2, case.weights.shape).to(device)
    check_best(case, 9)


@settings(max_examples=15)
@given(seeds(), st.integers(1, 4), key_formats, query_formats)
def test_no_code_left_out_is_better(device, small_limits, seed, tokens, key_format, query_format):
    """Keys of very different sizes, so that their scales matter."""
    heads, d = 5, 64
    case = compact_case((seed, tokens, 2, 10, 8), key_format, torch.float32, device, d, heads=heads)
    spread = torch.randint(-3, 4, (case.keys.num_slots, 1), generator=generator(seed))
    case.fill(normal(seed, (case.keys.num_slots, d)) * torch.exp2(spread))
    case.q = normal(seed + 1, case.q.shape).to(device)
    case.weights = normal(seed + 2, case.weights.shape).to(device)
    if isinstance(query_format, str):
        case.quantize(query_format)
    else:
        case.q = case.q.to(query_format)
    check_best(case, 9)


def check_best(case, k):
    """The float64 scores tell, up to twice the error of two nested sums."""
    values, device = values_of(case.q), case.weights.device
    tokens, heads, d = values.shape
    ids = case.run(k)
    for t in range(tokens):
        shown = int(case.visible[t])
        result = ids[t][ids[t] >= 0]
        assert result.tolist() == sorted(set(result.tolist()))
        assert result.numel() == min(k, shown)
        if shown <= k:
            continue
        keys = torch.stack([case.key(t, c) for c in range(shown)]).double()
        q, w = values[t].double(), case.weights[t].double()
        scores = (torch.relu(keys @ q.T) * w).sum(1)
        sizes = (keys.abs() @ q.abs().T * w.abs()).sum(1)
        error = 2 * (d + heads + 2) * 2.0**-24 * float(sizes.max())
        left = torch.ones(shown, dtype=torch.bool, device=device).index_fill(0, result, False)
        assert float(scores[left].max()) <= float(scores[result].min()) + error


@settings(max_examples=10)
@given(seeds(), st.integers(1, 6))
def test_hidden_keys_have_no_effect_on_neighbours(device, small_limits, seed, top_k):
    """Tokens of one sequence share tiles; a NaN that one may see stays out of the others."""
    case = Case(seed, 4, 1, 10, 8, device=device, dtype=torch.bfloat16)
    expected = case.run(top_k)
    last = int(case.visible.argmax())
    shown = int(case.visible[last])
    others = [t for t in range(4) if int(case.visible[t]) < shown]
    if shown:
        case.keys.data[case.table[0, (shown - 1) // 8], (shown - 1) % 8] = torch.nan
    out = case.run(top_k)
    assert_bitwise(out[others], expected[others])
    assert shown == 0 or shown - 1 in out[last].tolist()


def test_pages_with_strides(device):
    case = Case(5, 3, 2, 4, 2, device=device)
    expected = case.run(3)
    wide = torch.full((*case.keys.data.shape[:2], 9), torch.nan, device=device)
    wide[..., 3:7] = case.keys.data
    for data in (wide[..., 3:7], strided(case.keys.data)):
        case.keys = Pages(data, 2, "plain", 4, 0)
        assert_bitwise(case.run(3), expected)


def test_too_large_a_selection_is_left_to_the_reference():
    case = Case(0, 1, 1, 5000, 1)
    case.visible.fill_(5000)
    with interpret_triton():
        assert "at most 4096" in str(explain(indexer_select, **case.arguments(4500)))
        assert_bitwise(case.run(4500), case.oracle(4500))


@pytest.mark.parametrize("key_format", ["plain", *COMPACT_FORMATS])
def test_two_runs_have_the_same_bits(device, key_format):
    case = Case(7, 4, 2, 10, 8, device=device, d=32, entry_format=key_format)
    case.fill(normal(7, (case.keys.num_slots, 32)))
    assert_bitwise(case.run(9), case.run(9))


@pytest.mark.parametrize("key_format", COMPACT_FORMATS)
def test_compact_pages_with_strides(device, key_format):
    """Pages further apart than their bytes; at odd addresses only the reference reads FP8."""
    case = Case(5, 3, 2, 4, 2, device=device, d=32, entry_format=key_format)
    expected, packed = case.run(3), case.keys.data
    size = packed.shape[1]
    for begin in (4, 3):
        wide = torch.full((packed.shape[0], size + 8), 0xFF, dtype=torch.uint8, device=device)
        data = wide[:, begin : begin + size]
        data.copy_(packed)
        case.keys = Pages(data, 2, key_format, 32, 0)
        assert_bitwise(case.run(3), expected)
    if device.type == "cuda" or key_format == "index_mxfp4":
        return
    with interpret_triton():
        assert "multiples of 4 bytes" in str(explain(indexer_select, **case.arguments(3)))


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [4096, 65536])
def test_a_graph_replays_with_other_lengths(capacity):
    """Captured where every entry is taken (pitfall 21), replayed with none and with all visible."""
    device = torch.device("cuda")
    case = Case(0, 3, 2, capacity // 64, 64, device=device, d=128, heads=64, dtype=torch.bfloat16)
    q, cos, sin = queries_of(1, 3, 64, 128, 64, torch.bfloat16, device)
    case.visible.fill_(5)

    def step():
        case.q = indexer_queries(q, cos, sin, rotate_quantize=True)
        return case.q, case.run(512)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for lengths in ([0, 0, 0], [capacity, 600, 512], [7, capacity - 1, capacity // 2]):
        case.visible.copy_(torch.tensor(lengths))
        q.copy_(normal(lengths[0], q.shape))
        for x in outputs:
            x.fill_(-7)
        graph.replay()
        replayed = [x.clone() for x in outputs]
        for a, b in zip(replayed, step(), strict=True):
            assert_bitwise(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("key_format", "query_format"), [*zip(COMPACT_FORMATS, QUERY_FORMATS, strict=True)]
)
def test_a_graph_of_codes_replays(key_format, query_format):
    device, capacity = torch.device("cuda"), 4096
    case = Case(0, 3, 2, 64, 64, device=device, d=128, heads=64, entry_format=key_format)
    q, cos, sin = queries_of(1, 3, 64, 128, 64, torch.bfloat16, device)
    weights = case.weights
    case.visible.fill_(5)

    def step():
        case.q, case.weights = quantize_index_queries(
            q, cos, sin, weights, rotate=True, query_format=query_format
        )
        return case.weights, case.run(512)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for lengths in ([0, 0, 0], [capacity, 600, 512], [7, capacity - 1, capacity // 2]):
        case.visible.copy_(torch.tensor(lengths))
        q.copy_(normal(lengths[0], q.shape))
        for x in outputs:
            x.fill_(-7)
        graph.replay()
        replayed = [x.clone() for x in outputs]
        for a, b in zip(replayed, step(), strict=True):
            assert_bitwise(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [512, 1024, 2048, 4096])
@pytest.mark.parametrize("kind", ["integers", "normal", "rising", "equal"])
def test_rows_of_a_million_tokens(top_k, kind):
    """Compare with a sort of the same scores: keys of one dim make the scores the keys."""
    device, capacity = torch.device("cuda"), 262144
    case = Case(top_k, 3, 1, capacity // 64, 64, device=device, d=16, heads=1)
    values = {
        "integers": small_integers(top_k, (capacity,), limit=200) + 200,
        "normal": normal(top_k, (capacity,)).abs(),
        "rising": torch.arange(capacity).float(),
        "equal": torch.ones(capacity),
    }[kind].to(device)
    case.q.zero_()
    case.q[..., 0] = 1
    case.weights.fill_(1)
    case.table.copy_(torch.arange(capacity // 64, device=device))
    case.keys.data.zero_()
    case.keys.data.view(-1, 16)[:capacity, 0] = values
    case.visible.copy_(torch.tensor([capacity, capacity - 77, 100000]))
    out = case.run(top_k)
    for t in range(3):
        order = values[: case.visible[t]].sort(descending=True, stable=True).indices
        assert_bitwise(out[t], order[:top_k].sort().values)


def test_select_contract(device):
    tests = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    case = Case(0, 4, 2, 2, 4, device=device)
    keys = case.keys
    args = (case.q, case.weights, keys.data, 4, "plain", 0, case.table, case.sequence, case.visible)
    op = torch.ops.dsv4.indexer_select.default
    for top_k, slots in ((3, False), (100, True)):
        torch.library.opcheck(op, (*args, top_k, None, slots, "auto"), test_utils=tests)
    expected = case.run(3)

    def call(q, weights):
        return indexer_select(q, weights, keys, case.table, case.sequence, case.visible, top_k=3)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(case.q, case.weights), expected)
    assert_bitwise(call(strided(case.q), strided(case.weights)), expected)
    case.table, case.sequence = case.table.int(), case.sequence.int()
    case.visible = case.visible.int()
    assert_bitwise(case.run(3), expected)
    assert case.run(3, slice(0, 0)).shape == (0, 3)


@pytest.mark.parametrize(
    ("key_format", "query_format"),
    [("plain", "fp8"), ("index_fp8", "fp8"), ("index_mxfp4", "mxfp4"), ("index_fp8", None)],
)
def test_select_contract_of_codes(device, key_format, query_format):
    torch.compiler.reset()
    query_format = query_format or torch.bfloat16
    case = compact_case((0, 4, 2, 2, 4), key_format, query_format, device)
    parts = case.q, None
    if isinstance(case.q, QuantizedTensor):
        parts = case.q.codes, case.q.scales
    keys, rest = case.keys, (case.table, case.sequence, case.visible)
    args = (parts[0], case.weights, keys.data, 4, key_format, 0, *rest, 3, parts[1], False, "auto")
    op = torch.ops.dsv4.indexer_select.default
    # Without test_schema: it compares inputs by torch.allclose, which cannot take float8.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, args, test_utils=tests)
    assert_pure(op, *args)
    expected = case.run(3)

    def call(weights):
        return indexer_select(case.q, weights, keys, *rest, top_k=3)

    assert_bitwise(torch.compile(call, fullgraph=True, backend="aot_eager")(case.weights), expected)
    assert case.run(3, slice(0, 0)).shape == (0, 3)
    if isinstance(case.q, QuantizedTensor):
        case.q = QuantizedTensor(*map(strided, parts), None, MXFP4)
    elif case.q.dtype == torch.float8_e4m3fn:
        case.q = strided(case.q.view(torch.uint8)).view(case.q.dtype)
    else:
        case.q = strided(case.q)
    assert_bitwise(case.run(3), expected)


def test_bad_codes_are_named():
    case = compact_case((0, 4, 2, 2, 4), "index_mxfp4", "mxfp4", "cpu")
    case.q = QuantizedTensor(case.q.codes[..., :8], case.q.scales, None, MXFP4)
    with pytest.raises(
        ValueError, match=r"q\.codes has shape \[4, 2, 8\], wanted \[any, any, 16\]"
    ):
        case.run(3)
    other = {"q": quantize(torch.zeros(4, 2, 32), NVFP4)}
    with pytest.raises(ValueError, match="q is a linear nvfp4 matrix, wanted a linear mxfp4 one"):
        indexer_select(**(case.arguments(3) | other))
    case.q = torch.zeros(4, 2, 16, dtype=torch.uint8)
    with pytest.raises(TypeError, match="q has dtype uint8, wanted bfloat16"):
        case.run(3)
    case.q = torch.zeros(4, 2, 28).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"q has shape \[4, 2, 28\], wanted \[any, any, 32\]"):
        case.run(3)
    case.keys = Pages(case.keys.data, 4, "index_int8", 32, 0)
    with pytest.raises(ValueError, match=r"keys\.entry_format is 'index_int8', wanted one of"):
        case.run(3)


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        (
            "q",
            lambda x: x[:, :, :3],
            ValueError,
            r"q has shape \[4, 2, 3\], wanted \[any, any, 4\]",
        ),
        ("weights", lambda x: x[:, :1], ValueError, r"weights has shape \[4, 1\]"),
        ("table", lambda x: x[0], ValueError, "page_table has shape"),
        ("table", lambda x: x.float(), TypeError, "page_table has dtype float32"),
        ("sequence", lambda x: x[:2], ValueError, r"sequence_of_token has shape \[2\], wanted"),
        ("visible", lambda x: x.float(), TypeError, "visible has dtype float32"),
        ("q", lambda x: x.long(), TypeError, "q has dtype int64"),
    ],
)
def test_bad_input_is_named(device, name, change, error, words):
    case = Case(0, 4, 2, 2, 4, device=device)
    setattr(case, name, change(getattr(case, name)))
    with pytest.raises(error, match=words):
        case.run(3)


def test_top_k_below_one_is_refused(device):
    with pytest.raises(ValueError, match="top_k is 0, wanted >= 1"):
        Case(0, 4, 2, 2, 4, device=device).run(0)


@pytest.mark.gpu
@pytest.mark.parametrize("pages", [16, 64, 256])
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_a_captured_graph_has_the_slots_of_selected_entries(tokens, pages):
    """Rows that are searched in registers, that are buffered, and that another kernel selects from.

    Lengths change between replays: all entries are taken, more than are taken, none.
    """
    device = torch.device("cuda")
    case = Case(tokens, tokens, 2, pages, 64, device=device, d=128, heads=64)
    case.q = case.q.bfloat16()
    if tokens > 1:
        case.sequence[::3] = -1
    arguments = case.arguments(512)
    indexer_select(**arguments, slots=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = indexer_select(**arguments, slots=True)
    for length in (case.capacity, 513, 512, 100, 0):
        case.visible.fill_(length)
        actual.fill_(-7)
        graph.replay()
        ids = indexer_select(**arguments)
        expected = entry_slots(case.table, 64, case.sequence, ids, backend="reference")
        assert_bitwise(actual, expected)
