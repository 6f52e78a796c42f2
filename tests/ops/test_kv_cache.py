"""Paged KV cache entries: bytes against an oracle from the specification, and properties."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.ops.kv_cache import (
    EntryLayout,
    Pages,
    fake_quantize_kv,
    norm_rope_write_kv,
    read_kv,
    write_kv,
)
from dsv4.ops.norm import rms_norm
from dsv4.ops.rope import rope, rope_tables
from dsv4.testing.assertions import assert_bitwise, assert_within_budget, unit_roundoff
from dsv4.testing.strategies import (
    draws,
    finite_draws,
    generator,
    normal,
    overlapping,
    seeds,
    strided,
)
from tests._tools import large_pages

KERNELS = ("triton",)
# (head_dim, rope_dim): the model's, a short last group, no rope, rope alone.
DIMS = [(512, 64), (128, 64), (100, 20), (70, 0), (24, 24), (600, 24)]
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
dims = st.sampled_from(DIMS)
dtypes = st.sampled_from(DTYPES)


def exponent_oracle(amax: float) -> int:
    """ceil(log2(max(amax, 1e-4) / 448)) in exact arithmetic."""
    expected = Fraction(max(amax, 1e-4)) / 448
    e = -200
    while Fraction(2) ** e < expected:
        e += 1
    return e


def entry_oracle(x: torch.Tensor, rope_dim: int) -> tuple[bytes, bytes]:
    """Data and scale bytes of one entry, by the words of specification, section 7."""
    nope = x[: x.shape[0] - rope_dim].to(torch.float32).numpy()
    rope = x[x.shape[0] - rope_dim :].to(torch.bfloat16)
    rope = torch.where(rope.isnan(), torch.nan, rope).view(torch.int16).numpy()
    codes, scales = b"", b""
    for first in range(0, len(nope), 64):
        group = nope[first : first + 64]
        if not np.isfinite(group).all():
            codes, scales = codes + b"\x7f" * len(group), scales + b"\xff"
            continue
        e = exponent_oracle(float(np.abs(group).max()))
        code = (group * np.float32(2.0**-e)).astype(ml_dtypes.float8_e4m3fn)
        codes, scales = codes + code.tobytes(), scales + bytes([e + 127])
    pad = -len(scales) % 8
    return codes + rope.tobytes(), scales + b"\0" * pad


def pages_oracle(
    entries: torch.Tensor, slots: list[int], num_pages: int, page_size: int, rope_dim: int
) -> np.ndarray:
    data_bytes = entries.shape[1] + rope_dim
    groups = -(-(entries.shape[1] - rope_dim) // 64)
    scale_bytes = -(-groups // 8) * 8
    page_bytes = page_size * (data_bytes + scale_bytes)
    page_bytes += -page_bytes % data_bytes
    out = np.zeros((num_pages, page_bytes), dtype=np.uint8)
    for x, slot in zip(entries, slots, strict=True):
        if slot < 0:
            continue
        page, i = slot // page_size, slot % page_size
        data, scale = entry_oracle(x, rope_dim)
        out[page, i * data_bytes : (i + 1) * data_bytes] = list(data)
        first = page_size * data_bytes + i * scale_bytes
        out[page, first : first + scale_bytes] = list(scale)
    return out


@st.composite
def slot_lists(draw: st.DrawFn, num_slots: int = 12) -> list[int]:
    """Distinct slots in any order with -1 in between."""
    chosen = draw(st.lists(st.integers(0, num_slots - 1), unique=True, max_size=num_slots))
    skipped = draw(st.integers(0, 3))
    return draw(st.permutations(chosen + [-1] * skipped))


@given(dims, dtypes, draws(-30, 30), slot_lists(), st.sampled_from([1, 2, 4]))
def test_written_bytes_equal_the_specification(device, dims, dtype, drawn, slots, page_size):
    head_dim, rope_dim = dims
    entries = drawn.build((len(slots), head_dim), dtype, block=8)
    pages = Pages.allocate(12 // page_size, page_size, head_dim, rope_dim, device=device)
    write_kv(pages, entries.to(device), torch.tensor(slots, dtype=torch.int64, device=device))
    expected = pages_oracle(entries, slots, 12 // page_size, page_size, rope_dim)
    assert_bitwise(pages.data.cpu(), torch.from_numpy(expected))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_nan_in_the_rope_dims_has_the_same_bytes_everywhere(device, sign):
    nan = torch.tensor(float("nan")).copysign(torch.tensor(sign))
    pages = Pages.allocate(1, 1, 24, 24, device=device)
    write_kv(pages, nan.expand(1, 24).to(device), torch.zeros(1, dtype=torch.int64, device=device))
    assert pages.data[0, :48].view(torch.int16).tolist() == [0x7FC0] * 24


@given(dims, dtypes, dtypes, draws(-30, 30), slot_lists())
def test_read_of_write_is_fake_quantize(device, dims, dtype, read_dtype, drawn, slots):
    head_dim, rope_dim = dims
    entries = drawn.build((len(slots), head_dim), dtype, device, block=8)
    index = torch.tensor(slots, dtype=torch.int64, device=device)
    pages = Pages.allocate(3, 4, head_dim, rope_dim, device=device)
    write_kv(pages, entries, index)
    back = read_kv(pages, index, read_dtype)
    wide = fake_quantize_kv(entries, rope_dim).to(read_dtype)
    assert_bitwise(back, wide.masked_fill((index < 0)[:, None], 0))


def test_many_entries_are_read_as_few_are(device, monkeypatch):
    """A program of eight entries, some of them skipped and some past the last."""
    kernels = pytest.importorskip("dsv4.triton.kv_cache")
    pages = Pages.allocate(3, 4, 512, 64, device=device)
    index = torch.arange(11, device=device)
    write_kv(pages, (torch.randn(11, 512) * 3).bfloat16().to(device), index)
    index = torch.where(index == 5, -1, index.flip(0))
    expected = read_kv(pages, index, torch.bfloat16)
    monkeypatch.setattr(kernels, "_MANY_ENTRIES", 0)
    assert_bitwise(read_kv(pages, index, torch.bfloat16), expected)


@given(dims, dtypes, finite_draws(-30, 30))
def test_rounding_error_is_bounded_and_finite(device, dims, dtype, drawn):
    head_dim, rope_dim = dims
    x = drawn.build((3, head_dim), dtype, device)
    nope = head_dim - rope_dim
    out = fake_quantize_kv(x, rope_dim).double()[:, :nope]
    truth = x.float().double()[:, :nope]
    assert bool(out.isfinite().all())
    # E4M3 has 3 mantissa bits: half a unit is 2^-4 of the value, or half a subnormal step of 2^-9.
    for first in range(0, nope, 64):
        part = slice(first, first + 64)
        amax = truth[:, part].abs().amax(-1, keepdim=True).clamp(min=1e-4)
        mantissa, exponent = torch.frexp(amax / 448)
        scale = torch.exp2((exponent - (mantissa == 0.5).int()).double())
        allowed = torch.maximum(truth[:, part].abs() * 2.0**-4, scale * 2.0**-10)
        assert bool(((out[:, part] - truth[:, part]).abs() <= allowed).all())


@given(dims, dtypes, draws(-30, 30))
def test_fake_quantize_is_idempotent_and_odd(device, dims, dtype, drawn):
    head_dim, rope_dim = dims
    x = drawn.build((2, head_dim), dtype, device)
    once = fake_quantize_kv(x, rope_dim)
    assert_bitwise(fake_quantize_kv(once, rope_dim), once)
    assert_bitwise(fake_quantize_kv(-x, rope_dim), -once)
    assert_bitwise(once[:, head_dim - rope_dim :], x[:, head_dim - rope_dim :].bfloat16().to(dtype))


@pytest.mark.parametrize("exponent", [-22, -21, -1, 0, 1, 30, 100, 119])
@pytest.mark.parametrize("step", [-1, 0, 1])
def test_scale_byte_at_the_borders(device, exponent, step):
    """Amax just below, at and just above 448 * 2^e: a rounded log2 is off by one here."""
    border = np.float32(448 * 2.0**exponent)
    amax = border if step == 0 else np.nextafter(border, np.float32(np.inf * step))
    x = torch.zeros(1, 64, device=device)
    x[0, 17] = -float(amax)
    pages = Pages.allocate(1, 1, 64, 0, device=device)
    write_kv(pages, x, torch.zeros(1, dtype=torch.int64, device=device))
    byte = int(pages.data[0, 64])
    assert byte == 127 + exponent + (step > 0) == 127 + exponent_oracle(float(amax))


def test_zero_group_has_the_smallest_scale(device):
    pages = Pages.allocate(1, 1, 512, 64, device=device)
    write_kv(pages, torch.zeros(1, 512, device=device), torch.tensor([0], device=device))
    scales = pages.data[0, 576:584].tolist()
    assert scales == [105] * 7 + [0]  # ceil(log2(1e-4 / 448)) = -22
    assert not pages.data[0, :576].any()


@settings(max_examples=20)
@given(dims, seeds(), st.sampled_from([float("nan"), float("inf"), -float("inf")]), st.data())
def test_nan_stays_in_its_own_group(device, dims, seed, bad, data):
    head_dim, rope_dim = dims
    clean = normal(seed, (4, head_dim)).to(device)
    at = data.draw(st.integers(0, head_dim - 1))
    dirty = clean.clone()
    dirty[2, at] = bad
    expected = fake_quantize_kv(clean, rope_dim)
    if at < head_dim - rope_dim:
        end = min(at // 64 * 64 + 64, head_dim - rope_dim)
        expected[2, at // 64 * 64 : end] = float("nan")
    else:
        expected[2, at] = bad
    assert_bitwise(fake_quantize_kv(dirty, rope_dim), expected)


def test_scale_byte_255_reads_as_nan_and_byte_0_as_two_to_minus_127(device, wide):
    pages = Pages.allocate(1, 2, 64, 0, device=device)
    pages.data[0, :128] = 0x38  # 1.0
    pages.data[0, 128], pages.data[0, 136] = 255, 0
    out = read_kv(pages, torch.tensor([0, 1], device=device), wide)
    assert bool(out[0].isnan().all())
    assert bool((out[1] == 2.0**-127).all())


def test_pitfall_19_page_geometry():
    """Sizes as in the published layout; 584 is not a row stride."""
    layout = EntryLayout(512, 64)
    assert (layout.data_bytes, layout.scale_bytes) == (576, 8)
    assert layout.data_bytes + layout.scale_bytes == 584
    assert layout.page_bytes(64) == 37440
    assert layout.page_bytes(2) == 1728
    assert Pages.allocate(3, 64, 512, 64).data.shape == (3, 37440)
    assert layout.page_bytes(64) % 576 == 0
    assert layout.scale_offset(0, 64) == 64 * 576
    assert layout.scale_offset(5, 64) == 64 * 576 + 5 * 8
    assert layout.data_offset(5) == 5 * 576


@given(seeds(), st.integers(0, 127))
def test_pitfall_19_scales_after_all_data_of_the_page(device, seed, slot):
    """Bytes by absolute offset from the start of the pool, written out by hand."""
    x = normal(seed, (1, 512), torch.bfloat16)
    pages = Pages.allocate(2, 64, 512, 64, device=device)
    write_kv(pages, x.to(device), torch.tensor([slot], device=device))
    flat = pages.data.cpu().flatten().tolist()
    base, i = 37440 * (slot // 64), slot % 64
    data, scales = entry_oracle(x[0], 64)
    assert flat[base + 576 * i : base + 576 * i + 576] == list(data)
    assert flat[base + 36864 + 8 * i : base + 36864 + 8 * i + 8] == list(scales)
    written = set(range(base + 576 * i, base + 576 * i + 576))
    written |= set(range(base + 36864 + 8 * i, base + 36864 + 8 * i + 8))
    assert not any(flat[j] for j in range(len(flat)) if j not in written)
    assert not any(flat[base + 37376 : base + 37440])


@pytest.mark.slow
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_pitfall_19_offsets_past_two_gigabytes(device, index_dtype):
    """Page 58000 begins at byte 2171520000 > 2^31. On a CPU the pool is memory never touched."""
    pages = large_pages.allocate(58002, 64, 512, 64, device=device)
    slots = torch.tensor([58000 * 64 + 63, 58001 * 64], dtype=index_dtype, device=device)
    assert 58000 * pages.page_bytes() > 2**31
    x, pool = normal(0, (2, 512), torch.bfloat16).to(device), pages.data
    write_kv(pages, x, slots)
    for row, page, entry in ((0, 58000, 63), (1, 58001, 0)):
        data, scales = entry_oracle(x[row].cpu(), 64)
        assert pool[page, entry * 576 : entry * 576 + 576].tolist() == list(data)
        assert pool[page, 36864 + entry * 8 : 36872 + entry * 8].tolist() == list(scales)
    assert_bitwise(read_kv(pages, slots), fake_quantize_kv(x, 64))


@settings(max_examples=20)
@given(seeds(), slot_lists(), st.sampled_from(["fp8", "plain"]), st.booleans())
def test_pitfall_20_slot_minus_one_changes_nothing(device, seed, slots, entry_format, wide):
    """It writes nowhere: not the last slot, which is what -1 indexes in Python, nor slot 0."""
    pages = Pages.allocate(3, 4, 48, 16, entry_format, torch.float32, device)
    write_kv(pages, normal(seed, (12, 48)).to(device), torch.arange(12, device=device))
    before = pages.data.clone()
    dtype = torch.int64 if wide else torch.int32
    index = torch.tensor(slots, dtype=dtype, device=device)
    entries = normal(seed + 1, (len(slots), 48)).to(device)
    entries[index < 0] = float("nan")
    write_kv(pages, entries, index)
    untouched = [s for s in range(12) if s not in slots]
    rest = torch.tensor(untouched, dtype=torch.int64, device=device)
    old = Pages(before, 4, entry_format, 48, 16)
    assert_bitwise(read_kv(pages, rest, torch.float32), read_kv(old, rest, torch.float32))
    if all(s < 0 for s in slots):
        assert_bitwise(pages.data, before)
    out = read_kv(pages, index, torch.float32)
    assert not out[index < 0].any()
    expected = fake_quantize_kv(entries, 16) if entry_format == "fp8" else entries
    assert_bitwise(out[index >= 0], expected[index >= 0])


@given(seeds(), st.integers(0, 3))
def test_pitfall_17_rope_dims_hold_one_value(device, seed, slot):
    """Rotated dims are stored once, as given, and the NoPE codes stop before them."""
    x = normal(seed, (1, 512), torch.bfloat16).to(device)
    pages = Pages.allocate(1, 4, 512, 64, device=device)
    pages.data.fill_(0xAA)
    write_kv(pages, x, torch.tensor([slot], device=device))
    stored = pages.data[0, slot * 576 + 448 : slot * 576 + 576].contiguous()
    assert_bitwise(stored.view(torch.bfloat16), x[0, 448:])
    # The next entry's data and the scales of the others are as they were.
    touched = torch.zeros_like(pages.data, dtype=torch.bool)
    touched[0, slot * 576 : slot * 576 + 576] = True
    touched[0, 4 * 576 + slot * 8 : 4 * 576 + slot * 8 + 8] = True
    assert bool((pages.data[~touched] == 0xAA).all())


_TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


@pytest.mark.parametrize("entry_format", ["fp8", "plain"])
def test_opcheck(device, entry_format):
    pages = Pages.allocate(3, 4, 40, 8, entry_format, torch.float32, device)
    fields = (pages.data, 4, entry_format, 40, 8)
    slots = torch.tensor([1, -1, 5], device=device)
    entries = normal(0, (3, 40)).to(device)
    ops = torch.ops.dsv4
    torch.library.opcheck(
        ops.write_kv.default, (*fields, entries, slots, "auto"), test_utils=_TESTS
    )
    read = (*fields, slots.view(1, 3), torch.bfloat16, "auto")
    torch.library.opcheck(ops.read_kv.default, read, test_utils=_TESTS)
    torch.library.opcheck(ops.fake_quantize_kv.default, (entries, 8, "auto"), test_utils=_TESTS)


@pytest.mark.parametrize("entry_format", ["fp8", "plain"])
def test_compiles_whole(device, entry_format):
    def step(pages: Pages, entries: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        write_kv(pages, entries, slots)
        return read_kv(pages, slots, entries.dtype) + fake_quantize_kv(entries, pages.rope_dim)

    entries = normal(0, (3, 40)).to(device)
    slots = torch.tensor([1, -1, 5], device=device)
    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        pages = Pages.allocate(3, 4, 40, 8, entry_format, torch.float32, device)
        results.append((function(pages, entries, slots), pages.data))
    assert_bitwise(results[1][0], results[0][0])
    assert_bitwise(results[1][1], results[0][1])


@pytest.mark.parametrize("entry_format", ["fp8", "plain"])
def test_empty_batch_and_empty_pool(device, entry_format):
    none = torch.zeros(0, dtype=torch.int64, device=device)
    for count in (0, 2):
        pages = Pages.allocate(count, 4, 40, 8, entry_format, device=device)
        write_kv(pages, torch.zeros(0, 40, device=device), none)
        assert read_kv(pages, none).shape == (0, 40)
        assert read_kv(pages, none.view(3, 0)).shape == (3, 0, 40)
        assert not pages.data.any()
    assert fake_quantize_kv(torch.zeros(0, 40, device=device), 8).shape == (0, 40)


@settings(max_examples=20)
@given(seeds(), st.sampled_from(["fp8", "plain"]))
def test_strided_input(device, seed, entry_format):
    x = normal(seed, (3, 48)).to(device)
    slots = torch.tensor([4, 0, 7], device=device)
    plain, gaps = (
        Pages.allocate(2, 4, 48, 16, entry_format, torch.float32, device) for _ in range(2)
    )
    write_kv(plain, x, slots)
    write_kv(gaps, strided(x), strided(slots))
    assert_bitwise(gaps.data, plain.data)
    assert_bitwise(fake_quantize_kv(strided(x), 16), fake_quantize_kv(x, 16))


def test_bad_input_is_named_and_changes_nothing(device):
    pages = Pages.allocate(2, 4, 40, 8, device=device)
    x, slots = torch.ones(3, 40, device=device), torch.tensor([0, 1, 2], device=device)
    with pytest.raises(TypeError, match="entries has dtype float16"):
        write_kv(pages, x.half(), slots)
    with pytest.raises(TypeError, match="slots has dtype float32"):
        write_kv(pages, x, slots.float())
    with pytest.raises(ValueError, match=r"entries has shape \[3, 39\], wanted \[any, 40\]"):
        write_kv(pages, x[:, :39], slots)
    with pytest.raises(ValueError, match=r"slots has shape \[2\], wanted \[3\]"):
        write_kv(pages, x, slots[:2])
    with pytest.raises(ValueError, match=r"pages.data has shape \[2, 584\]"):
        write_kv(Pages(pages.data.new_zeros(2, 584), 4, "fp8", 40, 8), x, slots)
    with pytest.raises(TypeError, match=r"pages.data has dtype float32, wanted uint8"):
        read_kv(Pages(torch.zeros(2, 4, 40, device=device), 4, "fp8", 40, 8), slots)
    with pytest.raises(ValueError, match="entry_format is 'int8'"):
        read_kv(Pages(pages.data, 4, "int8", 40, 8), slots)
    with pytest.raises(TypeError, match=r"dtype is torch\.float16"):
        read_kv(pages, slots, torch.float16)
    with pytest.raises(ValueError, match="rope_dim is 41, wanted 0 to 40"):
        fake_quantize_kv(x, 41)
    with pytest.raises(TypeError, match="x has dtype int64"):
        fake_quantize_kv(slots, 0)
    with pytest.raises(ValueError, match=r"fake_quantize_kv: x has shape \[\], wanted"):
        fake_quantize_kv(x[0, 0], 0)
    assert not pages.data.any()


def writers(pages: Pages, slots: torch.Tensor):
    """Operators that write ones to the slots, by name."""
    x = torch.ones(*slots.shape, pages.head_dim, device=slots.device)
    tables = [torch.ones(*slots.shape, 4, device=slots.device)] * 2
    return {
        "write_kv": lambda: write_kv(pages, x, slots),
        "norm_rope_write_kv": lambda: norm_rope_write_kv(pages, x, x[0], *tables, slots),
    }


@given(
    st.sampled_from(["fp8", "plain"]),
    st.lists(st.integers(-1, 7), min_size=1, max_size=4),
    st.integers(8, 2**31 - 1),
    st.sampled_from([torch.int32, torch.int64]),
    st.integers(0, 3),
    st.sampled_from([0, 2]),
)
@example("plain", [0], 8, torch.int64, 0, 2)
@example("fp8", [0], 0, torch.int64, 0, 0)
def test_slots_past_the_pool_raise_on_the_cpu(entry_format, good, bad, dtype, where, count):
    """Whatever implementation would run; nothing is written. Pools of two pages and of none."""
    pages = Pages.allocate(count, 4, 40, 8, entry_format)
    position = where % len(good)
    slots = torch.tensor([slot if count else -1 for slot in good], dtype=dtype)
    slots[position] = bad
    calls = {**writers(pages, slots), "read_kv": lambda: read_kv(pages, slots)}
    for op, call in calls.items():
        words = rf"{op}: slots\[{position}\] is {bad}, wanted below {4 * count}"
        with pytest.raises(IndexError, match=words):
            call()
    with pytest.raises(IndexError, match=rf"slots\[0, {position}\] is"):
        read_kv(pages, slots[None])
    assert not pages.data.any()


def test_a_compiled_call_checks_slots_when_it_runs():
    pages = Pages.allocate(2, 4, 40, 8)
    compiled = torch.compile(read_kv, fullgraph=True, backend="aot_eager")
    assert not compiled(pages, torch.tensor([7])).any()
    with pytest.raises(IndexError, match=r"read_kv: slots\[0\] is 8, wanted below 8"):
        compiled(pages, torch.tensor([8]))


@given(st.data(), st.sampled_from(["fp8", "plain"]))
def test_pages_that_overlap_are_refused_by_what_writes(data, entry_format):
    pages = Pages.allocate(2, 4, 40, 8, entry_format)
    pages = replace(pages, data=data.draw(overlapping(pages.data)))
    slots = torch.tensor([0, 5])
    for op, call in writers(pages, slots).items():
        with pytest.raises(ValueError, match=rf"{op}: pages\.data has shape .* overlap itself"):
            call()
    assert not read_kv(pages, slots).any()


@pytest.mark.parametrize("entry_format", ["fp8", "plain"])
@pytest.mark.parametrize("gaps", ["pages", "elements"])
def test_pages_with_gaps(device, entry_format, gaps):
    """Every second page, or element, of a tensor: the others stay as they were."""
    slots = torch.tensor([4, -1, 7], device=device)
    for op in ("write_kv", "norm_rope_write_kv"):
        pages = Pages.allocate(2, 4, 40, 8, entry_format, device=device)
        axis = 1 if gaps == "pages" else pages.data.dim()
        wide = torch.stack((pages.data, pages.data), axis)
        view = wide.select(axis, 0)
        spread = replace(pages, data=view)
        assert not view.is_contiguous()
        for target in (pages, spread):
            writers(target, slots)[op]()
        assert_bitwise(view.contiguous(), pages.data)
        assert int(wide.count_nonzero()) == int(pages.data.count_nonzero()) > 0
        assert_bitwise(read_kv(spread, slots), read_kv(pages, slots))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((1, 0, 40, 8), "page_size 0"),
        ((-1, 4, 40, 8), "num_pages is -1"),
        ((1, 4, 40, 41), "rope_dim 41"),
        ((1, 4, 0, 0), "head_dim is 0"),
    ],
)
def test_allocate_refuses_sizes(sizes, words):
    with pytest.raises(ValueError, match=words):
        Pages.allocate(*sizes)
    with pytest.raises(ValueError, match="entry_format is 'bf16'"):
        Pages.allocate(1, 4, 40, 8, "bf16")


def tokens_for(seed, head_dim, rotated, dtype, device, tokens=3):
    """kv, weight, cos and sin of ``norm_rope_write_kv``."""
    kv, weight = normal(seed, (tokens, head_dim), dtype), normal(seed + 1, (head_dim,), dtype)
    where = torch.arange(tokens, device=device) * 1000 + seed % 1000
    frequencies = torch.rand(rotated // 2, generator=generator(seed))
    return kv.to(device), weight.to(device), *rope_tables(where, frequencies.to(device))


def entries_oracle(kv, weight, cos, sin, eps):
    """Norm and rotation in float64, and how far the two roundings and float32 may be off."""
    u = unit_roundoff(kv.dtype)
    x, weight = kv.double(), weight.double()
    normed = weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    # As for rms_norm: the sum of D squares, halved by the root, six more operations; one rounding.
    off = normed.abs() * (1.01 * (x.shape[1] / 2 + 6) * 2.0**-24 + 1.01 * u) + 2.0**-126
    unrotated = x.shape[1] - 2 * cos.shape[1]
    (a, b), (a_off, b_off) = (
        t[:, unrotated:].unflatten(-1, (-1, 2)).unbind(-1) for t in (normed, off)
    )
    c, s = cos.double(), sin.double()
    rotated = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    size, moved = (
        torch.stack((p * c.abs() + q * s.abs(), q * c.abs() + p * s.abs()), -1).flatten(-2)
        for p, q in ((a.abs(), b.abs()), (a_off, b_off))
    )
    moved = moved + 1.01 * (2 * 2.0**-24 * size + u * (rotated.abs() + moved))
    truth = torch.cat((normed[:, :unrotated], rotated), -1)
    return truth, torch.cat((off[:, :unrotated], moved), -1)


class TestNormRopeWrite:
    # (head_dim, rope_dim of the pages, rotated dims): the model's; the rotation wider, narrower,
    # starting at an odd dim, and over everything.
    CASES = ((512, 64, 64), (100, 20, 40), (130, 24, 10), (71, 21, 20), (24, 24, 24), (70, 0, 70))

    @settings(max_examples=30)
    @given(st.sampled_from(CASES), dtypes, seeds(), st.sampled_from([1e-6, 1e-2]))
    def test_bytes_are_those_of_its_own_entries(self, device, case, dtype, seed, eps):
        """Plain pages show the entries; the bytes are what the reference stores of them."""
        head_dim, rope_dim, rotated = case
        arguments = tokens_for(seed, head_dim, rotated, dtype, device)
        slots = torch.tensor([6, -1, 1], device=device)
        plain = Pages.allocate(2, 4, head_dim, rope_dim, "plain", dtype, device)
        norm_rope_write_kv(plain, *arguments, slots, eps=eps)
        entries = read_kv(plain, slots, dtype)
        truth, off = entries_oracle(*arguments, eps)
        live = [0, 2]
        assert_within_budget(entries[live], truth[live], off[live], "entries")
        assert plain.data.view(8, -1)[[0, 2, 3, 4, 5, 7]].count_nonzero() == 0
        actual, expected = (
            Pages.allocate(2, 4, head_dim, rope_dim, device=device) for _ in range(2)
        )
        norm_rope_write_kv(actual, *arguments, slots, eps=eps)
        write_kv(expected, entries, slots, backend="reference")
        assert_bitwise(actual.data, expected.data, "pages")

    @pytest.mark.slow
    def test_offsets_past_two_gigabytes(self, device):
        """The bytes that they are in a small pool."""
        near, far = (large_pages.allocate(n, 64, 512, 64, device=device) for n in (2, 58002))
        slots = torch.tensor([63, -1, 64], device=device)
        arguments = tokens_for(0, 512, 64, torch.bfloat16, device)
        norm_rope_write_kv(near, *arguments, slots, eps=1e-6)
        norm_rope_write_kv(
            far, *arguments, torch.where(slots < 0, -1, slots + 58000 * 64), eps=1e-6
        )
        assert near.data.any(1).all()
        assert_bitwise(far.data[58000:], near.data)

    @given(dtypes, seeds())
    def test_reference_is_the_composition(self, dtype, seed):
        kv, weight, cos, sin = tokens_for(seed, 100, 20, dtype, "cpu")
        slots = torch.tensor([6, -1, 1])
        actual, expected = (Pages.allocate(2, 4, 100, 20) for _ in range(2))
        norm_rope_write_kv(actual, kv, weight, cos, sin, slots, eps=1e-6)
        write_kv(expected, rope(rms_norm(kv, weight, 1e-6), cos, sin), slots)
        assert_bitwise(actual.data, expected.data, "pages")

    @settings(max_examples=10)
    @given(seeds(), st.sampled_from([float("nan"), float("inf")]))
    def test_a_bad_token_stays_alone(self, device, seed, bad):
        kv, *rest = tokens_for(seed, 128, 64, torch.bfloat16, device)
        slots = torch.tensor([6, 2, 1], device=device)
        clean, dirty = (Pages.allocate(2, 4, 128, 64, device=device) for _ in range(2))
        norm_rope_write_kv(clean, kv, *rest, slots)
        kv[1, seed % 128] = bad
        norm_rope_write_kv(dirty, kv, *rest, slots)
        assert bool(read_kv(dirty, slots[1]).isnan().all())
        others = torch.tensor([0, 1, 3, 4, 5, 6, 7], device=device)
        assert_bitwise(read_kv(dirty, others), read_kv(clean, others))

    @settings(max_examples=10)
    @given(seeds(), st.booleans())
    def test_columns_of_a_wider_product(self, device, seed, narrow_slots):
        kv, weight, cos, sin = tokens_for(seed, 128, 64, torch.bfloat16, device)
        joined = torch.cat((torch.full_like(kv, torch.nan), kv), 1)
        slots = torch.tensor([6, 2, 1], device=device)
        whole, part, gaps = (Pages.allocate(2, 4, 128, 64, device=device) for _ in range(3))
        norm_rope_write_kv(whole, kv, weight, cos, sin, slots)
        index = slots.int() if narrow_slots else slots
        norm_rope_write_kv(part, joined[:, 128:], weight, cos, sin, index)
        assert_bitwise(part.data, whole.data)
        spread = (strided(t) for t in (kv, weight, cos, sin, slots))
        norm_rope_write_kv(gaps, *spread)
        assert_bitwise(gaps.data, whole.data)

    def test_no_tokens_and_no_pages(self, device):
        for pages, tokens in ((2, 0), (0, 0)):
            empty = Pages.allocate(pages, 4, 40, 8, device=device)
            slots = torch.zeros(tokens, dtype=torch.int64, device=device)
            inputs = tokens_for(0, 40, 8, torch.bfloat16, device, tokens)
            norm_rope_write_kv(empty, *inputs, slots)
            assert not empty.data.any()

    @pytest.mark.parametrize("entry_format", ["fp8", "plain"])
    def test_opcheck(self, device, entry_format):
        pages = Pages.allocate(3, 4, 40, 8, entry_format, torch.float32, device)
        inputs = tokens_for(0, 40, 8, torch.bfloat16, device)
        slots = torch.tensor([1, -1, 5], device=device)
        arguments = (pages.data, 4, entry_format, 40, 8, *inputs, slots, 1e-6, "auto")
        torch.library.opcheck(
            torch.ops.dsv4.norm_rope_write_kv.default, arguments, test_utils=_TESTS
        )

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_compiles_whole(self, device, dynamic):
        torch.compiler.reset()
        compiled = torch.compile(
            norm_rope_write_kv, fullgraph=True, backend="aot_eager", dynamic=dynamic
        )
        for tokens in (2, 5):
            inputs = tokens_for(tokens, 40, 8, torch.bfloat16, device, tokens)
            slots = torch.arange(tokens, device=device)
            actual, expected = (Pages.allocate(2, 4, 40, 8, device=device) for _ in range(2))
            compiled(actual, *inputs, slots)
            norm_rope_write_kv(expected, *inputs, slots)
            assert_bitwise(actual.data, expected.data)

    def test_bad_input_is_named_and_changes_nothing(self, device):
        pages = Pages.allocate(2, 4, 40, 8, device=device)
        kv, weight, cos, sin = tokens_for(0, 40, 8, torch.bfloat16, device)
        slots = torch.tensor([0, 1, 2], device=device)
        with pytest.raises(TypeError, match="kv has dtype float16"):
            norm_rope_write_kv(pages, kv.half(), weight, cos, sin, slots)
        with pytest.raises(TypeError, match="weight has dtype int32"):
            norm_rope_write_kv(pages, kv, weight.int(), cos, sin, slots)
        with pytest.raises(TypeError, match="slots has dtype float32"):
            norm_rope_write_kv(pages, kv, weight, cos, sin, slots.float())
        with pytest.raises(ValueError, match=r"kv has shape \[3, 39\], wanted \[any, 40\]"):
            norm_rope_write_kv(pages, kv[:, :39], weight, cos, sin, slots)
        with pytest.raises(ValueError, match=r"weight has shape \[39\], wanted \[40\]"):
            norm_rope_write_kv(pages, kv, weight[:39], cos, sin, slots)
        with pytest.raises(ValueError, match=r"cos has shape \[2, 4\], wanted \[3, any\]"):
            norm_rope_write_kv(pages, kv, weight, cos[:2], sin, slots)
        with pytest.raises(ValueError, match=r"sin has shape \[3, 3\], wanted \[3, 4\]"):
            norm_rope_write_kv(pages, kv, weight, cos, sin[:, :3], slots)
        wide = torch.ones(3, 21, device=device)
        with pytest.raises(ValueError, match=r"cos has shape \[3, 21\], wanted .* R <= 40"):
            norm_rope_write_kv(pages, kv, weight, wide, wide, slots)
        assert not pages.data.any()


def captured(function):
    """A CUDA graph of one call."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


@pytest.mark.gpu
@pytest.mark.parametrize("entry_format", ["fp8", "plain"])
def test_a_captured_graph_replays_with_other_values(entry_format):
    device = torch.device("cuda")
    eager, pages = (Pages.allocate(4, 4, 512, 64, entry_format, device=device) for _ in range(2))
    inputs = tokens_for(0, 512, 64, torch.bfloat16, device, 16)
    others = tokens_for(1, 512, 64, torch.bfloat16, device, 16)
    slots = torch.arange(16, device=device)
    order = torch.randperm(16, generator=generator(0)).to(device)
    order[3] = -1

    def step(to):
        norm_rope_write_kv(to, *inputs, slots)
        back = read_kv(to, slots)
        write_kv(to, back, slots)
        return back, fake_quantize_kv(inputs[0], 64)

    graph, out = captured(lambda: step(pages))
    for old, new in zip((*inputs, slots), (*others, order), strict=True):
        old.copy_(new)
    pages.data.zero_()
    for tensor in out:
        tensor.fill_(torch.nan)
    graph.replay()
    for actual, expected in zip(out, step(eager), strict=True):
        assert_bitwise(actual, expected)
    assert_bitwise(pages.data, eager.data)


@pytest.mark.gpu
def test_two_runs_give_the_same_bytes():
    device = torch.device("cuda")
    first, second = (Pages.allocate(80, 64, 512, 64, device=device) for _ in range(2))
    inputs = tokens_for(0, 512, 64, torch.bfloat16, device, 5000)
    slots = torch.randperm(5120, generator=generator(0))[:5000].to(device)
    for pages in (first, second):
        norm_rope_write_kv(pages, *inputs, slots)
    assert_bitwise(second.data, first.data)
