"""Routed experts in one launch: configurations, the work list, the source on the CPU, machine code.

``small_m_emulator`` runs the source. A GPU runs it in ``tests/ops/test_expert_mlp.py``.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.compilation import kernel_calls
from dsv4.cute import expert_mlp
from dsv4.cute.grouped_problem import MOST_EXPERTS, Experts
from dsv4.cute.runtime import cubin_cache
from dsv4.cute.runtime.architectures import HOPPER, shared_limit
from dsv4.cute.sm90.expert_mlp_plan import (
    EXPERT_MLP_ABI,
    MOST_ROWS,
    ExpertMlpPlan,
    ExpertMlpSmallMArgs,
    expert_mlp_plan,
    unsupported_reason,
)
from dsv4.cute.sm90.grouped_gemm_plans import launch_plans
from dsv4.cute.sm90.grouped_gemm_small_m_plan import GroupedSmallMArgs, GroupedSmallMPlan
from dsv4.ops.expert_mlp import COUNTERS, ExpertMlpArgs
from tests._tools.deepseek_sizes import ROUTED
from tests._tools.emulator import small_m_emulator

NO_CUT = 2**31 - 1
SEGMENT_ROWS = 8


def problems(experts, inner, hidden, weighted=True):
    gate_up = Experts(2 * inner, hidden, experts, False, False, True, weighted)
    return gate_up, Experts(hidden, inner, experts, False, False)


# Configurations.


@pytest.mark.parametrize("sizes", ROUTED, ids=str)
@pytest.mark.parametrize("rows", [1, 6, 12, 24, 48])
def test_a_plan_has_the_splits_of_both_launches(sizes, rows):
    """So its results are the bits of two launches, and both GEMMs have the same warps."""
    gate_up, down = problems(*sizes)
    plan = expert_mlp_plan(gate_up, down, rows)
    for problem, own in ((gate_up, plan.gate_up), (down, plan.down)):
        [launch] = launch_plans(problem, rows)
        assert (own.splits, own.columns) == (launch.plan.splits, problem.columns)
        assert (own.swiglu, own.row_weighted) == (problem.swiglu, problem.row_weighted)
        assert own.split_tiles % own.stages == 0
        assert own.warps == plan.warps
    assert plan.shared_bytes <= shared_limit(HOPPER)
    assert plan in expert_mlp.plans(gate_up, down, 48)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rows": MOST_ROWS + 1}, "there are 65 rows, wanted at most 64"),
        ({"down": {"columns": 192}}, "of the same experts"),
        ({"down": {"experts": 7}}, "of the same experts"),
        ({"down": {"float32_out": True}}, "wanted bfloat16 inputs and results"),
        ({"gate_up": {"row_scaled": True}}, "wanted bfloat16 inputs and results"),
        ({"gate_up": {"swiglu": False}}, "and SwiGLU"),
        ({"gate_up": {"rows": 2**21}, "down": {"columns": 2**20}}, "row tiles, wanted at most"),
    ],
)
def test_what_one_launch_does_not_run(change, text):
    gate_up, down = problems(8, 128, 256)
    rows = change.get("rows", 6)
    sizes = gate_up._replace(**change.get("gate_up", {})), down._replace(**change.get("down", {}))
    assert text in unsupported_reason(*sizes, rows)
    assert expert_mlp_plan(*sizes, rows) is None


def test_several_launches_are_not_one():
    assert expert_mlp_plan(*problems(4, 128, 256), 60) is None


@pytest.mark.parametrize("rows", [0, 48])
def test_warm_up_compiles_what_layers_ask_for(monkeypatch, rows):
    monkeypatch.setattr(kernel_calls, "ONE_LAUNCH_ROWS", rows)
    gate_up, down = problems(256, 2048, 4096)
    plans = {problem: kernel_calls.GroupedGemm(problem, 6).plans(64) for problem in (gate_up, down)}
    fused = [plan for plan in plans[gate_up] if isinstance(plan, ExpertMlpPlan)]
    assert fused == expert_mlp.plans(gate_up, down, rows)
    assert bool(fused) == bool(rows)
    assert not [plan for plan in plans[down] if isinstance(plan, ExpertMlpPlan)]


# The work list.


def segments_of(counts):
    """Expert, first row and rows of every segment."""
    starts = itertools.accumulate(counts, initial=0)
    return [
        (expert, start + first, min(SEGMENT_ROWS, count - first))
        for expert, (start, count) in enumerate(zip(starts, counts, strict=False))
        for first in range(0, count, SEGMENT_ROWS)
    ]


def expected_groups(counts, units, ctas):
    """The groups of each CTA: lists of (number of the segment, its expert and rows, its units)."""
    segments, result = segments_of(counts), []
    total = len(segments) * units
    for cta in range(ctas):
        begin, end = (total * number // ctas for number in (cta, cta + 1))
        own = [(at // units, at % units) for at in range(begin, end)]
        parts = [
            (number, *segments[number], [unit for _, unit in items])
            for number, items in itertools.groupby(own, key=lambda item: item[0])
        ]
        groups = []
        while parts:
            together = (
                parts[:2] if sum(part[3] for part in parts[:2]) <= SEGMENT_ROWS else parts[:1]
            )
            groups.append(together)
            parts = parts[len(together) :]
        result.append(groups)
    return result


def groups_of(counts, units, ctas):
    """The groups that the source finds, in the form of ``expected_groups``."""
    grid = small_m_emulator.Grid()
    module = small_m_emulator.source("dsv4.cute.sm90.expert_mlp")
    plan = GroupedSmallMPlan(128, 1, 1, 1, False, False, 2)
    gemm = module.GroupedGemm(plan)
    table = module.ExpertTable(8192, 8192 + 4 * (MOST_EXPERTS + 1), len(counts))
    shared = module.SharedMemory(0, 0, 0, 0, 0, module.State(1024), table)
    offsets = np.array([0, *itertools.accumulate(counts)], np.int32)
    args = SimpleNamespace(offsets=grid.add(offsets), units=units, most_rows=NO_CUT)
    result = {}

    def body():
        here = small_m_emulator._HERE
        state, lane = shared.state, here.lane
        gemm._start(args, shared, here.cta.number, here.ctas, lane)
        meet = lambda: small_m_emulator._together(None)  # noqa: E731
        meet()
        own = []
        while gemm._write_segment(args, shared, lane):
            meet()
            jobs = range(state.load(module.JOBS))
            group = {}
            for job in jobs:
                segment = gemm._state_of(state, job)
                number = state.load(module._SEGMENT) + (segment.address > state.address)
                words = [segment.load(w) for w in (module.EXPERT, module.ROW, module.ROWS)]
                unit = segment.load(module.FIRST_UNIT) + job
                assert segment.load(module.WEIGHT_UNIT) + job == words[0] * units + unit
                group.setdefault((number, *words), []).append(unit)
            own.append([(*key, units_of_it) for key, units_of_it in group.items()])
            rows = gemm._rows_to_copy(state)
            assert rows == sum(part[3] for part in own[-1]) <= SEGMENT_ROWS
            counted = [gemm.own_units(state, number) for number in range(3)]
            assert counted[: len(own[-1])] == [len(part[4]) for part in own[-1]]
            assert not any(counted[len(own[-1]) :])
            meet()
            if lane == 0:
                gemm._end_segment(state)
            meet()
        if lane == 0:
            result[here.cta.number] = own

    grid.run(ctas, 32, body)
    return [result[cta] for cta in range(ctas)]


@settings(deadline=None, max_examples=20)
@given(
    st.one_of(
        st.lists(st.integers(0, 20), min_size=1, max_size=6),
        st.lists(st.sampled_from([0, 0, 0, 1, 8]), min_size=1, max_size=60),
    ),
    st.integers(1, 9),
    st.integers(1, 5),
)
@example([1, 1, 1, 1, 1, 1], 4, 5)
@example([0, 4, 4, 1, 0, 8], 3, 2)
@example([0, 0], 4, 3)
def test_the_work_list(counts, units, ctas):
    """Every unit of every segment is one CTA's, in groups of up to two segments and 8 rows."""
    assert groups_of(counts, units, ctas) == expected_groups(counts, units, ctas)


# The source of the kernel.

HIDDEN, INNER, EXPERTS = 64, 64, 4


class Launches:
    """Operands of a small problem, and what emulated launches make of them."""

    def __init__(self, counts, spare, splits, warps, columns=(HIDDEN, INNER)):
        random = np.random.default_rng(sum(counts))
        self.hidden, self.inner = columns
        self.rows, self.held = sum(counts) + spare, sum(counts)
        kind = {"splits": splits[0], "row_weighted": True}
        stages = [n // 64 // s for n, s in zip(columns, splits, strict=True)]
        self.gate_up = GroupedSmallMPlan(
            self.hidden, 1, warps, 1, False, False, stages[0], True, **kind
        )
        self.down = GroupedSmallMPlan(
            self.inner, 1, warps, 1, False, False, stages[1], splits=splits[1]
        )

        def codes(rows, columns):
            return random.integers(0, 256, (EXPERTS, rows, columns), np.uint8)

        self.operands = {
            "codes": codes(2 * self.inner, self.hidden // 2),
            "scales": codes(2 * self.inner, self.hidden // 16),
            "global_scale": random.random((EXPERTS, 2 * self.inner), np.float32) / 64,
            "down_codes": codes(self.hidden, self.inner // 2),
            "down_scales": codes(self.hidden, self.inner // 16),
            "down_global_scale": random.random((EXPERTS, 1), np.float32),
            "row_weight": random.random(self.rows, np.float32),
            "offsets": np.array([0, *itertools.accumulate(counts)], np.int32),
        }
        x = random.standard_normal((self.rows, self.hidden)).astype(np.float32)
        self.x = (x.view(np.uint32) >> 16).astype(np.uint16)

    def _memory(self):
        grid = small_m_emulator.Grid()
        made = {name: grid.add(array) for name, array in self.operands.items()}
        self.out = np.full((self.rows, self.hidden), 0x7FC1, np.uint16)
        inner = np.full((self.rows, self.inner), 0x7FC1, np.uint16)
        made |= {"x": grid.add(self.x), "inner": grid.add(inner), "out": grid.add(self.out)}
        return grid, made

    def fused(self, ctas, resident=None):
        """The result of one launch, whose every vector is stored once."""
        grid, made = self._memory()
        counters = np.zeros(COUNTERS, np.int32)
        args = ExpertMlpSmallMArgs(
            **made,
            counters=grid.add(counters),
            clear_end=self.rows,
            experts=EXPERTS,
            units=self.inner // 8,
            down_units=self.hidden // 16,
            token_stride=self.hidden,
            inner_stride=self.inner,
            expert_scales=2 * self.inner,
            down_expert_scales=1,
            **dict.fromkeys(("cut0", "cut1", "cut2", "no_cut"), NO_CUT),
            scale_rows=1,
            down_scale_rows=0,
            opaque_16=16,
            limit=np.float32(10),
        )
        module = small_m_emulator.source("dsv4.cute.sm90.expert_mlp")
        plan = ExpertMlpPlan(self.gate_up, self.down)
        kernel = module.ExpertMlpKernel(plan)
        grid.run(ctas, plan.threads, lambda: kernel.kernel(args), resident)
        assert not counters.any(), "counters end at zero"
        stores = grid.stores[made["out"]]
        assert (stores[: self.out.nbytes // 16] == 1).all(), "every result is stored once"
        return self.out

    def separate(self, ctas):
        """The result of two launches."""
        grid, made = self._memory()
        module = small_m_emulator.source("dsv4.cute.sm90.grouped_gemm_small_m")
        none = dict.fromkeys(
            ("token_scale", "result_scale", "out_block_scales", "out_row_scale", "ready"), 0
        )
        common = GroupedSmallMArgs(
            **{name: made[name] for name in ("codes", "scales", "global_scale", "x", "offsets")},
            **none,
            row_weight=made["row_weight"],
            out=made["inner"],
            clear_end=self.rows,
            experts=EXPERTS,
            units=self.inner // 8,
            token_stride=self.hidden,
            expert_scales=2 * self.inner,
            **dict.fromkeys(("cut0", "cut1", "cut2", "most_rows"), NO_CUT),
            scale_rows=1,
            opaque_16=16,
            limit=np.float32(10),
        )
        second = common._replace(
            codes=made["down_codes"],
            scales=made["down_scales"],
            global_scale=made["down_global_scale"],
            x=made["inner"],
            out=made["out"],
            units=self.hidden // 16,
            token_stride=self.inner,
            expert_scales=1,
            scale_rows=0,
        )
        for plan, args in ((self.gate_up, common), (self.down, second)):
            kernel = module.GroupedSmallMKernel(plan)
            grid.run(ctas, plan.threads, lambda kernel=kernel, args=args: kernel.kernel(args))
        return self.out


@pytest.mark.parametrize(
    ("counts", "spare", "ctas", "splits", "columns"),
    [
        ((1, 0, 2, 1), 1, 2, (1, 1), (64, 64)),
        pytest.param((5, 4, 0, 3), 2, 3, (1, 1), (64, 64), marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 1), 1, 5, (2, 2), (128, 128), marks=pytest.mark.slow),
        pytest.param((9, 0, 1, 7), 0, 2, (2, 1), (128, 64), marks=pytest.mark.slow),
        pytest.param((8, 8, 1, 0), 0, 4, (1, 2), (64, 128), marks=pytest.mark.slow),
        ((0, 0, 0, 0), 2, 2, (1, 1), (64, 64)),
    ],
)
def test_one_launch_has_the_bits_of_two(counts, spare, ctas, splits, columns):
    """Rows of no expert are zeros, a segment's rows wait for its own gate_up alone."""
    launches = Launches(counts, spare, splits, 2, columns)
    expected = launches.separate(ctas).copy()
    assert (launches.fused(ctas) == expected).all()
    assert not expected[launches.held :].any()


@pytest.mark.parametrize("resident", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fewer_ctas_run_at_a_time(resident):
    """A CTA that begins when others have ended finds their ranges taken; none waits for it."""
    launches = Launches((1, 0, 2, 1), 1, (1, 1), 2)
    expected = launches.fused(3).copy()
    assert (launches.fused(3, resident) == expected).all()


@pytest.mark.slow
def test_rows_with_nan_stay_apart():
    launches = Launches((2, 1, 0, 1), 0, (1, 1), 2)
    clean = launches.fused(2).copy()
    launches.x[1, 3] = 0x7FC0
    got = launches.fused(2)
    assert ((got[1] & 0x7FFF) > 0x7F80).all()
    assert (np.delete(got, 1, 0) == np.delete(clean, 1, 0)).all()


# Machine code.


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ROUTED, ids=str)
@pytest.mark.parametrize("rows", [6, 48])
def test_machine_code(sizes, rows, tmp_path):
    pytest.importorskip("cutlass")
    pytest.importorskip("triton")
    from tests._tools.ptx.machine_code import REGISTER_FILE, instructions_of, usage_of

    plan = expert_mlp_plan(*problems(*sizes), rows)
    image = cubin_cache.compile_image(plan, HOPPER)
    numbers = usage_of(image, tmp_path / "cubin")
    [listing] = instructions_of([image], HOPPER, tmp_path / "code")
    instructions = [line.split()[0] for line in listing]
    assert numbers["STACK"] == numbers["LOCAL"] == 0
    assert not [i for i in instructions if i.startswith(("LDL", "STL"))]
    assert numbers["REG"] * plan.threads <= REGISTER_FILE
    assert image.shared_bytes == plan.shared_bytes
    # Offsets, counters and X come after the wait; weights are the only constant loads.
    first = instructions.index("ACQBULK")
    assert not [i for i in instructions[:first] if i.startswith(("LDG", "ATOMG", "REDG"))]
    released = next(i for i, name in enumerate(instructions) if name.startswith("REDG"))
    fence = max(i for i in range(released) if instructions[i] == "MEMBAR.ALL.GPU")
    assert "BAR.SYNC.DEFER_BLOCKING" not in instructions[fence:released]
    assert sum(i == "MEMBAR.ALL.GPU" for i in instructions) == 1, "the wait has no fence"
    assert any(i.startswith("LDG.E.STRONG.GPU") for i in instructions)


# Launches.


def test_launch(monkeypatch):
    """All scalars and addresses by name, and a grid of CTAs that run at a time."""
    seen = {}

    class Kernel:
        image = SimpleNamespace(name="k")

        def prepare(self, device):
            return 132

    def launch(kernel, ctas, matrices, **values):
        seen.update(values, ctas=ctas)
        return lambda stream, pointers: seen.update(stream=stream, pointers=pointers)

    monkeypatch.setattr(EXPERT_MLP_ABI, "launch", launch)
    monkeypatch.setattr(expert_mlp, "loaded", lambda plan, arch: Kernel())
    monkeypatch.setattr(expert_mlp, "architecture", lambda device: HOPPER)
    monkeypatch.setattr(expert_mlp, "stream_of", lambda device: 77)
    monkeypatch.setattr(expert_mlp, "_prepared", expert_mlp._prepared.__wrapped__)
    experts, inner, hidden = 12, 128, 256
    operands = {
        "x": torch.zeros(6, hidden, dtype=torch.bfloat16),
        "weight": torch.zeros(experts, 2 * inner, hidden // 2, dtype=torch.uint8),
        "scales": torch.zeros(experts, 2 * inner, hidden // 16, dtype=torch.uint8),
        "global_scale": torch.zeros(experts, 2 * inner),
        "down": torch.zeros(experts, hidden, inner // 2, dtype=torch.uint8),
        "down_scales": torch.zeros(experts, hidden, inner // 16, dtype=torch.uint8),
        "down_global_scale": torch.zeros(experts, 1),
        "offsets": torch.zeros(experts + 1, dtype=torch.int32),
        "row_weight": torch.zeros(6),
        "counters": torch.zeros(COUNTERS, dtype=torch.int32),
    }
    args = ExpertMlpArgs(
        **operands,
        segments=[],
        down_segments=[],
        format="nvfp4",
        layout="fragments_16x64",
        limit=None,
        out_dtype=torch.bfloat16,
    )
    out = expert_mlp.expert_mlp(args)
    assert (out.shape, out.dtype) == ((6, hidden), torch.bfloat16)
    assert (seen["ctas"], seen["stream"]) == (132, 77)
    assert (seen["units"], seen["down_units"], seen["limit"]) == (16, 16, math.inf)
    assert (seen["scale_rows"], seen["down_scale_rows"], seen["clear_end"]) == (True, False, 6)
    by_name = dict(zip(list(EXPERT_MLP_ABI.fields), seen["pointers"], strict=False))
    names = {"weight": "codes", "down": "down_codes"}
    for name, tensor in operands.items():
        assert by_name[names.get(name, name)] == tensor.data_ptr()
    assert by_name["out"] == out.data_ptr()


def test_no_rows(monkeypatch):
    monkeypatch.setattr(expert_mlp, "run_noted", lambda *what: pytest.fail("a launch"))
    x = torch.zeros(0, 256, dtype=torch.bfloat16)
    codes = torch.zeros(3, 256, 128, dtype=torch.uint8)
    args = ExpertMlpArgs(
        *(x, codes, codes, None, [], torch.zeros(3, 256, 64, dtype=torch.uint8), codes, None, []),
        *(torch.zeros(4, dtype=torch.int32), "nvfp4", "fragments_16x64", 10.0, None),
        *(torch.zeros(COUNTERS, dtype=torch.int32), torch.bfloat16),
    )
    assert expert_mlp.expert_mlp(args).shape == (0, 256)
