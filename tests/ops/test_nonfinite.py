"""The first row that is not finite: against a loop over rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.ops.nonfinite import NO_ROW, mark_nonfinite_
from dsv4.testing import strategies

KERNELS = ("triton",)
INTERPRETED_SHARE = 2
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BAD = (math.nan, math.inf, -math.inf)
# Of a program's tile: less than one, one, one and a bit, several.
SHAPES = ((), (1,), (7,), (64,), (4, 33), (4096,), (4097,), (2, 5000))


def blank(device):
    return torch.full((1,), NO_ROW, dtype=torch.int32, device=device)


def finite(seed, shape, dtype, device):
    """Of every magnitude, the largest and the smallest of the dtype included."""
    x = torch.randn(shape, generator=strategies.generator(seed)).to(dtype).flatten()
    limits = torch.finfo(dtype)
    special = [limits.max, limits.min, limits.smallest_normal / 4, 0.0, -0.0]
    x[:5] = torch.tensor(special, dtype=torch.float64).to(dtype)[: x.numel()]
    return x.view(shape).to(device)


def put(x, row, column, value):
    """Write to one element of a row."""
    flat = x[row].reshape(-1)
    flat[column % flat.numel()] = value
    x[row] = flat.view(x[row].shape)


class TestMark:
    @given(
        seed=strategies.seeds(),
        rows=st.integers(0, 6),
        trail=st.sampled_from(SHAPES),
        dtype=st.sampled_from((*DTYPES, torch.float64)),
        bad=st.lists(
            st.tuples(st.integers(0, 5), st.integers(0, 9999), st.sampled_from(BAD)), max_size=3
        ),
        padding=st.none() | st.lists(st.booleans(), min_size=6, max_size=6),
        first=st.sampled_from([0, 3, 2**20]),
    )
    @example(
        seed=0,
        rows=2,
        trail=(4097,),
        dtype=torch.bfloat16,
        bad=[(1, 4096, -math.inf)],
        padding=None,
        first=0,
    )
    def test_is_the_first_bad_row(self, device, seed, rows, trail, dtype, bad, padding, first):
        x = finite(seed, (rows, *trail), dtype, device)
        for row, column, value in bad:
            if row < rows:
                put(x, row, column, value)
        mask = None if padding is None else torch.tensor(padding[:rows]).bool().to(device)
        mark = blank(device)
        before = x.clone()
        mark_nonfinite_(mark, x, mask, first_row=first)
        counted = [row for row, _, _ in bad if row < rows and not (padding and padding[row])]
        assert mark.item() == (first + min(counted) if counted else NO_ROW)
        assert torch.equal(x.nan_to_num(), before.nan_to_num())

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("value", BAD)
    @pytest.mark.parametrize("trail", SHAPES)
    def test_every_kind_of_value_and_tile(self, device, dtype, value, trail):
        x = finite(1, (3, *trail), dtype, device)
        mark = blank(device)
        mark_nonfinite_(mark, x)
        assert mark.item() == NO_ROW
        put(x, 2, math.prod(trail) - 1, value)
        mark_nonfinite_(mark, x)
        assert mark.item() == 2

    def test_every_pattern_of_16_bits(self, device):
        bits = torch.arange(2**16).to(torch.int16).to(device)
        for dtype in (torch.bfloat16, torch.float16):
            values = bits.view(dtype)
            bad = ~values.float().isfinite()
            order = torch.argsort(bad.int(), stable=True)
            mark = blank(device)
            mark_nonfinite_(mark, values[order].view(-1, 256)[: int((~bad).sum()) // 256])
            assert mark.item() == NO_ROW
            for value in values[bad][:: 97 if device == "cpu" else 997]:
                mark = blank(device)
                mark_nonfinite_(mark, value.view(1, 1), first_row=5)
                assert mark.item() == 5

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rows_apart_and_other_strides(self, device, dtype):
        base = finite(2, (5, 3, 40), dtype, device)
        base[:, :, :4] = math.nan  # around what is looked at
        base[0] = math.inf
        views = {
            "columns": base[1:, 1, 4:],
            "every other row": base[1::2, 2, 4:],
            "a matrix per row": base[1:, :, 4:],
            "transposed": base[1:, :, 4:].transpose(1, 2),
            "broadcast": base[2, 1, 4:].expand(6, -1),
        }
        for name, view in views.items():
            mark = blank(device)
            mark_nonfinite_(mark, view)
            assert mark.item() == NO_ROW, name
        base[4, 1, 39] = math.nan
        expected = {"columns": 3, "every other row": NO_ROW, "broadcast": NO_ROW}
        for name, view in views.items():
            mark = blank(device)
            mark_nonfinite_(mark, view)
            assert mark.item() == expected.get(name, 3), name

    def test_a_mark_goes_down_only(self, device):
        mark = blank(device)
        x = torch.zeros(4, 2, device=device)
        x[2] = math.nan
        for first, expected in ((7, 9), (20, 9), (1, 3), (3, 3)):
            mark_nonfinite_(mark, x, first_row=first)
            assert mark.item() == expected

    def test_marks_side_by_side(self, device):
        marks = torch.full((5, 4), NO_ROW, dtype=torch.int32, device=device)
        mark_nonfinite_(marks[3, :1], torch.full((1, 2), math.nan, device=device))
        expected = torch.full((5, 4), NO_ROW, dtype=torch.int32)
        expected[3, 0] = 0
        assert torch.equal(marks.cpu(), expected)


class TestContract:
    def test_opcheck(self, device):
        x = torch.zeros(3, 4, device=device)
        padding = torch.zeros(3, dtype=torch.bool, device=device)
        for mask in (None, padding):
            args = (blank(device), x, mask, 0, "auto")
            torch.library.opcheck(torch.ops.dsv4.mark_nonfinite_.default, args)

    def test_compiles_whole(self, device):
        def marked(mark, x):
            mark_nonfinite_(mark, x)
            return mark + 1

        compiled = torch.compile(marked, fullgraph=True, backend="aot_eager")
        x = torch.tensor([[0.0], [math.nan]], device=device)
        assert compiled(blank(device), x).item() == 2

    WRONG = (
        ({"mark": torch.zeros(1)}, TypeError, "mark has dtype float32"),
        ({"mark": torch.zeros(2, dtype=torch.int32)}, ValueError, r"mark has shape \[2\]"),
        ({"x": torch.zeros(3).long()}, TypeError, "x has dtype int64"),
        ({"x": torch.tensor(0.0)}, ValueError, r"x has shape \[\], wanted \[T, ...\]"),
        ({"padding": torch.zeros(3)}, TypeError, "padding has dtype float32"),
        ({"padding": torch.zeros(2, dtype=torch.bool)}, ValueError, r"padding has shape \[2\]"),
        ({"first_row": -1}, ValueError, "first_row is -1, wanted at least 0"),
        ({"x": torch.zeros(3, device="meta")}, ValueError, "different devices"),
    )

    @pytest.mark.parametrize(("changes", "error", "words"), WRONG)
    def test_wrong_arguments_are_named(self, changes, error, words):
        good = {"mark": blank("cpu"), "x": torch.zeros(3, 2)}
        with pytest.raises(error, match=words):
            mark_nonfinite_(**{**good, **changes})

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_captured_graph_follows_its_inputs(self, dtype):
        x = torch.zeros(8, 4, 1792, dtype=dtype, device="cuda")
        padding = torch.zeros(8, dtype=torch.bool, device="cuda")
        mark = blank("cuda")
        mark_nonfinite_(mark, x, padding)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mark_nonfinite_(mark, x, padding)
        for row in (3, 7, 0, 5):
            x.zero_()
            x[row, 2, 1000] = math.nan
            for covered in (False, True):
                padding.zero_()
                padding[row] = covered
                mark.fill_(NO_ROW)
                graph.replay()
                assert mark.item() == (NO_ROW if covered else row)
