"""Page tables turned into slots: against a dictionary walked in Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.ops.slots import entry_slots, prefix_slots, window_slots
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise, assert_pure

KERNELS = ("triton",)
INTS = st.sampled_from([torch.int32, torch.int64])
SIZES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))


def drawn_table(seed, sequences, pages, dtype, device):
    order = torch.randperm(sequences * pages, generator=strategies.generator(seed))
    return order.view(sequences, pages).to(dtype).to(device)


def slot(table, page_size, sequence, entry):
    if sequence < 0 or not 0 <= entry < table.shape[1] * page_size:
        return -1
    return int(table[sequence, entry // page_size]) * page_size + entry % page_size


def numbers(seed, low, high, shape, dtype, device):
    drawn = torch.randint(low, high, shape, generator=strategies.generator(seed))
    return drawn.to(dtype).to(device)


class TestValues:
    @given(
        seed=strategies.seeds(),
        sizes=SIZES,
        tokens=st.integers(0, 5),
        k=st.integers(0, 7),
        dtype=INTS,
        flat=st.booleans(),
    )
    def test_entries(self, device, seed, sizes, tokens, k, dtype, flat):
        rows, pages, size = sizes
        table = drawn_table(seed, rows, pages, dtype, device)
        sequences = numbers(seed, -1, rows, (tokens,), dtype, device)
        shape = (tokens,) if flat else (tokens, k)
        entries = numbers(seed + 1, -2, pages * size + 2, shape, dtype, device)
        got = entry_slots(table, size, sequences, entries)
        wide = entries.reshape(tokens, -1) if tokens else entries.new_empty((0, 1))
        expected = [
            [slot(table, size, int(s), e) for e in row.tolist()]
            for s, row in zip(sequences, wide, strict=True)
        ]
        expected = torch.tensor(expected, dtype=torch.int64, device=device).reshape(shape)
        assert_bitwise(got, expected, "slots")

    @given(seed=strategies.seeds(), sizes=SIZES, tokens=st.integers(0, 5), dtype=INTS)
    def test_prefix(self, device, seed, sizes, tokens, dtype):
        rows, pages, size = sizes
        table = drawn_table(seed, rows, pages, dtype, device)
        sequences = numbers(seed, -1, rows, (tokens,), dtype, device)
        counts = numbers(seed + 1, 0, pages * size + 3, (tokens,), dtype, device)
        got = prefix_slots(table, size, sequences, counts)
        expected = [
            [slot(table, size, s, e) if e < n else -1 for e in range(pages * size)]
            for s, n in zip(sequences.tolist(), counts.tolist(), strict=True)
        ]
        expected = torch.tensor(expected, dtype=torch.int64, device=device).reshape(got.shape)
        assert_bitwise(got, expected, "slots")

    @given(
        seed=strategies.seeds(),
        sizes=SIZES,
        tokens=st.integers(0, 5),
        dtype=INTS,
        window=st.integers(1, 9),
    )
    def test_window(self, device, seed, sizes, tokens, dtype, window):
        rows, pages, size = sizes
        table = drawn_table(seed, rows, pages, dtype, device)
        sequences = numbers(seed, -1, rows, (tokens,), dtype, device)
        positions = numbers(seed + 1, 0, 40, (tokens,), dtype, device)
        got = window_slots(table, size, sequences, positions, window)
        ring = pages * size
        expected = [
            [slot(table, size, s, q % ring if q >= 0 else -1) for q in range(p - window + 1, p + 1)]
            for s, p in zip(sequences.tolist(), positions.tolist(), strict=True)
        ]
        expected = torch.tensor(expected, dtype=torch.int64, device=device).reshape(got.shape)
        assert_bitwise(got, expected, "slots")

    def test_slots_beyond_32_bits(self, device):
        table = torch.tensor([[2**31 - 1]], dtype=torch.int32, device=device)
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        assert entry_slots(table, 64, zero, zero + 3).tolist() == [(2**31 - 1) * 64 + 3]

    def test_a_column_without_a_page_has_no_slots(self, device):
        table = torch.tensor([[2, -1]], dtype=torch.int64, device=device)
        zero = torch.zeros(3, dtype=torch.int64, device=device)
        entries = torch.tensor([3, 4, 7], device=device)
        for slots in (
            entry_slots(table, 4, zero, entries),
            window_slots(table, 4, zero, entries, 1)[:, 0],
            prefix_slots(table, 4, zero[:1], entries[2:] + 1)[0, 3::2][:3],
        ):
            assert slots[0] == 11
            assert bool((slots[1:] < 0).all())

    def test_a_table_without_pages_has_no_slots(self, device):
        table = torch.empty(2, 0, dtype=torch.int64, device=device)
        zero = torch.zeros(2, dtype=torch.int64, device=device)
        assert entry_slots(table, 4, zero, zero).tolist() == [-1, -1]
        assert window_slots(table, 4, zero, zero, 1).tolist() == [[-1], [-1]]
        assert prefix_slots(table, 4, zero, zero).shape == (2, 0)


class TestContract:
    @pytest.mark.parametrize("op", ["entry_slots", "prefix_slots", "window_slots"])
    def test_opcheck(self, device, op):
        table = drawn_table(0, 2, 3, torch.int64, device)
        rows = torch.tensor([0, 1, -1], device=device)
        extra = {"entry_slots": (rows * 5,), "prefix_slots": (rows + 4,), "window_slots": (rows, 3)}
        args = (table, 4, rows, *extra[op], "auto")
        overload = getattr(torch.ops.dsv4, op).default
        torch.library.opcheck(overload, args)
        assert_pure(overload, *args)

    def test_compiles_whole(self, device):
        table = drawn_table(0, 2, 3, torch.int64, device)

        def both(rows, positions):
            window = window_slots(table, 4, rows, positions, 3)
            return window, prefix_slots(table, 4, rows, entry_slots(table, 4, rows, positions))

        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
        rows, positions = torch.tensor([[0, 1, 1], [3, 9, 0]], device=device)
        for got, expected in zip(compiled(rows, positions), both(rows, positions), strict=True):
            assert_bitwise(got, expected, "slots")

    BAD = (
        ({"page_table": torch.zeros(2, 2)}, TypeError, "page_table has dtype float32"),
        ({"page_table": torch.zeros(2).long()}, ValueError, r"page_table has shape \[2\]"),
        ({"sequences": torch.zeros(3).long()}, ValueError, r"entries has shape \[2\] for 3"),
        ({"entries": torch.zeros(2, 1, 1).long()}, ValueError, r"wanted \[T\] or \[T, k\]"),
        ({"page_size": 0}, ValueError, "page_size is 0, wanted >= 1"),
        ({"entries": torch.zeros(2, device="meta").long()}, ValueError, "different devices"),
    )

    @pytest.mark.parametrize(("changes", "error", "words"), BAD)
    def test_wrong_arguments_are_named(self, changes, error, words):
        two = torch.zeros(2).long()
        good = {"page_table": torch.zeros(2, 2).long(), "page_size": 4, "sequences": two}
        with pytest.raises(error, match=words):
            entry_slots(**{**good, "entries": two, **changes})
        with pytest.raises(ValueError, match="window is 0, wanted >= 1"):
            window_slots(**good, positions=two, window=0)

    @given(
        good=st.lists(st.integers(-1, 1), min_size=1, max_size=4),
        bad=st.integers(2, 2**31 - 1),
        where=st.integers(0, 3),
        dtype=INTS,
    )
    @example(good=[0], bad=2, where=0, dtype=torch.int64)
    def test_sequences_past_the_table_raise_on_the_cpu(self, good, bad, where, dtype):
        table, position = torch.zeros(2, 2).long(), where % len(good)
        rows = torch.tensor(good, dtype=dtype)
        rows[position] = bad
        calls = {
            "entry_slots": lambda: entry_slots(table, 4, rows, rows * 0),
            "prefix_slots": lambda: prefix_slots(table, 4, rows, rows * 0),
            "window_slots": lambda: window_slots(table, 4, rows, rows * 0, 1),
        }
        for op, call in calls.items():
            words = rf"{op}: sequences\[{position}\] is {bad}, wanted below 2"
            with pytest.raises(IndexError, match=words):
                call()

    @pytest.mark.gpu
    def test_a_captured_graph_follows_its_inputs(self):
        table = drawn_table(0, 4, 8, torch.int64, "cuda")
        rows, positions = (torch.zeros(4, dtype=torch.int64, device="cuda") for _ in range(2))
        window_slots(table, 16, rows, positions, 128)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = window_slots(table, 16, rows, positions, 128)
        for seed in range(5):
            rows.copy_(numbers(seed, -1, 4, (4,), torch.int64, "cuda"))
            positions.copy_(numbers(seed, 0, 1000, (4,), torch.int64, "cuda"))
            out.fill_(-7)
            graph.replay()
            expected = window_slots(table, 16, rows, positions, 128, backend="reference")
            assert_bitwise(out, expected, "slots")
