"""The first boundary that is not finite: found wherever a value is planted, without waiting."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.boundaries import Boundaries, Boundary, Rows, Steps, token_rows
from dsv4.config import ModelConfig
from dsv4.debug import monitor
from dsv4.testing.models import random_model
from tests.boundary_cases import Stack, boundaries

WHERE = boundaries()


def forward(model, tokens=5, shape=None):
    ids = torch.arange(tokens) % 10
    ids = ids if shape is None else ids.view(shape)
    return model(ids.to(model.embed.weight.device), ids)


class TestMonitor:
    @pytest.mark.parametrize("where", WHERE, ids=" ".join)
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_value_planted_before_every_boundary(self, where, value):
        model = Stack()
        with monitor(model) as watched:
            for rows in ([4], [2, 3], [0]):
                watched.reset()
                forward(model)
                assert watched.first() is None
                model.planted.where, model.planted.rows, model.planted.value = where, rows, value
                forward(model)
                model.planted.where = None
                finding = watched.first()
                assert (finding.boundary.module, finding.boundary.side) == where
                assert finding.row == rows[0]
                assert finding.before is not None
        forward(model)
        assert not model._forward_hooks
        assert not model.layers[0].attn._forward_pre_hooks

    def test_rows_of_a_batch_are_numbered_flat(self):
        model = Stack()
        model.planted.where, model.planted.rows = ("layers.1.ffn", "output"), [4]
        with monitor(model) as watched:
            forward(model, 6, (2, 3))
            assert watched.first().row == 4
            assert "row 4: output of layers.1.ffn (Part), after the input of layers.1.ffn" in str(
                watched.first()
            )

    def test_a_model_of_this_package(self):
        model = random_model(ModelConfig.tiny())
        ids = torch.arange(6).view(2, 3)
        with monitor(model) as watched, torch.no_grad():
            model(ids)
            assert watched.first() is None
            norm = model.model.layers[1].post_attention_layernorm
            norm.weight[0] = math.nan
            model(ids)
            finding = watched.first()
        assert finding.boundary.module == "model.layers.1.post_attention_layernorm"
        assert (finding.boundary.side, finding.row) == ("output", 0)

    @pytest.mark.gpu
    def test_a_graph_captured_within_marks_at_every_replay(self):
        model = Stack().cuda()
        poison = torch.zeros(5, 8, device="cuda")
        model.layers[1].ffn.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {"x": kwargs["x"] + poison}), with_kwargs=True
        )
        ids = torch.arange(5, device="cuda")
        with monitor(model) as watched:
            model(ids, ids)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                model(ids, ids)
            for row in (3, 1, 4):
                poison.zero_()
                watched.reset()
                graph.replay()
                assert watched.first() is None
                poison[row, 2] = math.nan
                graph.replay()
                assert (watched.first().boundary.module, watched.first().row) == (
                    "layers.1.ffn",
                    row,
                )


class TestOrder:
    def watched(self, *names):
        made = Boundaries("cpu")
        numbers = {name: made.add(Boundary(name, "output", "Part")) for name in names}
        made.reset()

        def run(*order, bad=()):
            made.begin({1: Rows()})
            for name in order:
                value = math.nan if name in bad else 0.0
                made.mark(numbers[name], torch.tensor([[value]]))
            made.end()

        return made, run

    def test_the_longest_pass_orders(self):
        made, run = self.watched("a", "b", "c")
        run("c")  # a pass that profiles leaves parts out
        run("b", "a", "c")
        run("a", "c", bad=("a", "c"))
        finding = made.first(made.marks)
        assert (finding.boundary.module, finding.before.module) == ("a", "b")

    def test_what_only_a_short_pass_has_is_not_lost(self):
        made, run = self.watched("a", "b", "c")
        run("a", "b")
        run("c", bad=("c",))
        run("a", "b")
        assert made.first(made.marks).boundary.module == "c"


class TestRows:
    def marked(self, x, rows, own=None):
        watched = Boundaries("cpu")
        number = watched.add(Boundary("part", "input", "Part"))
        watched.reset()
        watched.begin(rows)
        watched.mark(number, x, own)
        return watched.first(watched.marks)

    @given(rows=st.integers(1, 6), bad=st.integers(0, 5), padded=st.sets(st.integers(0, 5)))
    def test_padding_is_left_out(self, rows, bad, padded):
        x = torch.zeros(rows, 3)
        x[bad % rows] = math.nan
        padding = torch.tensor([i in padded for i in range(rows)])
        finding = self.marked(x, {rows: Rows(padding, first=10)})
        assert (finding is None) == (bad % rows in padded)
        assert finding is None or finding.row == 10 + bad % rows

    def test_what_has_no_row_per_token_is_left_out(self):
        bad = torch.full((4, 3), math.nan)
        assert self.marked(bad, {5: Rows()}) is None
        assert self.marked(bad[0, 0], {1: Rows()}) is None
        assert self.marked(bad[:0], {0: Rows()}) is None
        assert self.marked(bad.long(), {4: Rows()}) is None
        assert self.marked(bad, {}, Rows()).row == 0
        assert self.marked({"a": [bad.long(), bad]}, {4: Rows()}).row == 0
        assert self.marked(bad.view(2, 2, 3), {4: Rows()}).row == 0

    @pytest.mark.parametrize(
        ("inputs", "rows"),
        [
            ([torch.zeros(2, 3).long()], 6),
            ([torch.zeros(7).long()], 7),
            ([torch.zeros(4, 8)], 4),
            ([torch.zeros(2, 3, 8)], 6),
            ([torch.zeros(2, 3, 4, 8)], 6),
        ],
    )
    def test_rows_of_the_first_input(self, inputs, rows):
        assert list(token_rows(inputs)) == [rows]
        assert token_rows([]) == {}


class TestSteps:
    def steps(self):
        watched = Boundaries("cpu")
        number = watched.add(Boundary("part", "output", "Part"))
        watched.reset()
        watched.begin({2: Rows()})
        return Steps(watched), lambda x: watched.mark(number, torch.tensor([[0.0], [x]]))

    def test_each_finding_has_its_own_step(self):
        steps, mark = self.steps()
        values = [0.0, math.nan, 0.0, math.inf]
        for step, value in enumerate(values):
            steps.begin(step)
            mark(value)
        assert [step for step, _ in steps.findings()] == [1]
        steps.end()
        assert not steps.is_open
        assert [(step, f.row) for step, f in steps.findings(wait=True)] == [(3, 1)]
        assert list(steps.findings(wait=True)) == []

    def test_what_was_marked_before_a_step_is_forgotten(self):
        steps, mark = self.steps()
        mark(math.nan)
        steps.begin("first")
        steps.end()
        steps.end()
        assert list(steps.findings()) == []

    def test_a_step_that_nobody_announced_keeps_its_marks(self):
        steps, mark = self.steps()
        mark(math.nan)
        steps.resume("replayed")
        steps.end()
        assert [step for step, _ in steps.findings()] == ["replayed"]

    def test_marks_that_have_not_arrived_are_left(self):
        steps, mark = self.steps()
        steps.begin(0)
        mark(math.nan)
        steps.end()

        class Event:
            there = False

            def query(self):
                return self.there

            def synchronize(self):
                self.there = True

        steps._sent[0].event = Event()
        assert list(steps.findings()) == []
        assert [step for step, _ in steps.findings(wait=True)] == [0]

    @pytest.mark.gpu
    def test_marks_reach_the_host_without_a_wait(self):
        watched = Boundaries("cuda")
        number = watched.add(Boundary("part", "output", "Part"))
        watched.reset()
        watched.begin({64: Rows()})
        steps = Steps(watched)
        x = torch.zeros(64, 4096, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(8):
                steps.begin(step)
                x[step].fill_(math.nan if step % 2 else 0.0)
                watched.mark(number, x)
                steps.end()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [(s, f.row) for s, f in steps.findings(wait=True)] == [
            (step, 1) for step in range(1, 8)
        ]
