"""``python -m dsv4.bench moe``: its routings, checks, baselines and files."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from dsv4.bench import environment, results, timing
from dsv4.bench.baselines import experts as moe_baselines
from dsv4.bench.checks import moe as moe_checks
from dsv4.bench.cli import main
from dsv4.bench.measure import Options
from dsv4.bench.problem import Draw
from dsv4.bench.suites import moe, moe_layer, moe_parts
from dsv4.layers import DeepseekV4SparseMoeBlock
from dsv4.ops import dequantize
from dsv4.quant.formats import FRAGMENTS, LINEAR, NVFP4, QuantizedTensor

CPU = torch.device("cpu")
OPTIONS = Options(CPU, repeat=1)
RATES = environment.Rates(0.02, 0.01, 0.1)
GROUPED_MM = "torch._grouped_mm (bf16 weights)"
HUMMING = "Humming (one global scale)"
THEIRS = ("eager", "grouped_mm", "batched_mm")


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "rates", lambda device: RATES)


@pytest.fixture
def without_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_baselines, "BASELINES", {})


@pytest.fixture(scope="module")
def layer() -> moe_parts.Layer:
    return moe_parts.draw_layer("tiny", Draw(0, CPU))


@pytest.fixture(scope="module")
def whole(layer) -> DeepseekV4SparseMoeBlock:
    return moe_layer.build(layer.config, layer.gate_up, layer.down, Draw(5, CPU))


def inputs_of(layer: moe_parts.Layer, routing: str, tokens: int, seed: int = 0) -> moe_parts.Inputs:
    return moe_parts.draw_inputs(layer.config, routing, tokens, Draw(seed, CPU))


def rows_of(path: Path) -> list[dict]:
    document = json.loads(path.read_text())
    results.validate(document)
    return document["rows"]


def command(path: Path, *more: str) -> int:
    options = ["--tokens", "1,5", "--repeat", "1", "--device", "cpu", "--json", str(path)]
    return main(["moe", *options, *more])


@pytest.mark.parametrize("kind", moe_parts.ROUTINGS)
@given(
    seed=st.integers(0, 2**31 - 1),
    tokens=st.integers(1, 40),
    experts=st.integers(3, 50),
    data=st.data(),
)
def test_a_token_chooses_distinct_experts(kind, seed, tokens, experts, data):
    k = data.draw(st.integers(2, experts - 1))
    ids = moe_parts.ROUTINGS[kind](Draw(seed, CPU), tokens, k, experts)
    assert (ids.shape, ids.dtype) == ((tokens, k), torch.int64)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < experts
    ordered = ids.sort(1).values
    assert bool((ordered[:, 1:] > ordered[:, :-1]).all())
    assert torch.equal(ids, moe_parts.ROUTINGS[kind](Draw(seed, CPU), tokens, k, experts))


@given(seed=st.integers(0, 2**31 - 1), tokens=st.integers(1, 60))
def test_one_expert_has_every_token_and_is_no_choice_after_the_first(seed, tokens):
    ids = moe_parts.single(Draw(seed, CPU), tokens, 4, 20)
    assert bool((ids[:, 0] == ids[0, 0]).all())
    assert not bool((ids[:, 1:] == ids[0, 0]).any())


def shares(kind: str, experts: int = 16, k: int = 1, tokens: int = 200_000) -> torch.Tensor:
    """Return each expert's share of the choices, the most frequent expert first."""
    ids = moe_parts.ROUTINGS[kind](Draw(3, CPU), tokens, k, experts)
    counts = torch.bincount(ids.flatten(), minlength=experts).sort(descending=True).values
    return counts / ids.numel()


def test_first_choices_follow_zipf():
    weights = 1 / torch.arange(1, 17)
    torch.testing.assert_close(shares("zipf"), weights / weights.sum(), atol=0.005, rtol=0)


def test_later_choices_are_in_proportion_to_what_is_left():
    """Two of three without putting back: the chance of each expert, by hand."""
    p = [6 / 11, 3 / 11, 2 / 11]

    def chosen(i: int) -> float:
        return p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(3) if j != i)

    share = 2 * shares("zipf", experts=3, k=2)
    torch.testing.assert_close(
        share, torch.tensor([chosen(i) for i in range(3)]), atol=5e-3, rtol=0
    )


def test_uniform_is_even_and_the_others_of_single_too():
    assert float(shares("uniform", k=4).max()) < 1.02 / 16
    share = shares("single", k=4)
    assert float(share[0]) == pytest.approx(1 / 4)
    assert float(share[1]) < 1.02 * 3 / 4 / 15


def test_zipf_ranks_experts_by_seed():
    most = {
        int(torch.bincount(moe_parts.zipf(Draw(seed, CPU), 500, 2, 64).flatten()).argmax())
        for seed in range(8)
    }
    assert len(most) > 3


def test_weights_are_in_fragments_with_healthy_scales(layer):
    c = layer.config
    experts, inner, hidden = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
    assert layer.gate_up.shape == (experts, 2 * inner, hidden)
    assert layer.down.shape == (experts, hidden, inner)
    assert layer.gate_up.global_scale.shape == (experts, 2 * inner)
    assert layer.down.global_scale.shape == (experts, 1)
    for weight in (layer.gate_up, layer.down):
        weight.validate(check_values=True)
        scales = weight.with_layout(LINEAR).scales.float()
        assert 2**-4 <= float(scales.min()) < float(scales.max()) <= 2


@pytest.mark.parametrize("preset", ["flash", "pro"])
def test_published_sizes(preset):
    c = moe_parts.config_of(preset)
    sizes = (c.n_routed_experts, c.moe_intermediate_size, c.hidden_size)
    assert sizes == {"flash": (256, 2048, 4096), "pro": (384, 3072, 7168)}[preset]


@pytest.mark.parametrize("kind", moe_parts.ROUTINGS)
def test_rows_lie_by_expert(layer, kind):
    inputs = inputs_of(layer, kind, 9)
    for expert in range(layer.config.n_routed_experts):
        start, end = inputs.offsets[expert : expert + 2].tolist()
        slots = (inputs.ids == expert).nonzero()
        assert end - start == len(slots)
        assert torch.equal(inputs.rows[start:end], inputs.x[slots[:, 0]])
        assert torch.equal(inputs.row_weight[start:end], inputs.weights[slots[:, 0], slots[:, 1]])
    assert inputs.touched == len(inputs.ids.unique())


def test_the_bound_counts_what_has_to_be_moved(layer):
    c, tokens, touched = layer.config, 7, 5
    costs = moe_parts.costs(layer, tokens, touched)
    rows, h, i = tokens * c.num_experts_per_tok, c.hidden_size, c.moe_intermediate_size
    expert = 2 * i * h * 9 // 16 + 4 * 2 * i, h * i * 9 // 16 + 4
    assert costs["gate_up"] == (5 * expert[0] + 2 * rows * (h + i), 4 * rows * h * i)
    assert costs["down"] == (5 * expert[1] + 2 * rows * (h + i), 2 * rows * h * i)
    assert costs["pair"] == tuple(map(sum, zip(costs["gate_up"], costs["down"], strict=True)))
    assert costs["block"][1] == costs["pair"][1]
    assert costs["block"][0] == 5 * sum(expert) + tokens * h * 2 * 3 + rows * 12
    ids, positions, weight, offsets = 8 * rows, 4 * rows, 4 * rows, 4 * 9
    assert costs["sort"] == (2 * h * (tokens + rows) + ids + 2 * weight + positions + offsets, 0)
    assert costs["combine"] == (2 * h * (rows + 2 * tokens) + positions + offsets, 0)
    assert costs["around"] == (costs["sort"][0] + costs["combine"][0], 0)


def test_the_bound_of_the_layer_counts_router_and_shared_expert_too(layer, whole):
    c, tokens, touched = layer.config, 7, 5
    h, i, experts = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts
    expert = 2 * i * h * 9 // 16 + 4 * 2 * i + h * i * 9 // 16 + 4
    router = 2 * experts * h + 4 * experts
    flops = 2 * tokens * (3 * (c.num_experts_per_tok + 1) * h * i + experts * h)
    expected = (touched + 1) * expert + router + 2 * 2 * tokens * h, flops
    assert moe_layer.costs(whole, tokens, touched) == expected


def test_the_layer_holds_the_weights_that_are_there(layer, whole):
    experts = whole.experts
    for name, weight in (("gate_up_proj", layer.gate_up), ("down_proj", layer.down)):
        held = experts.quantized_weight(name)
        assert held.layout == FRAGMENTS
        for part in ("codes", "scales", "global_scale"):
            assert getattr(held, part).data_ptr() == getattr(weight, part).data_ptr()
    tensors = dict(whole.named_parameters()) | dict(whole.named_buffers())
    assert not any(t.is_meta or t.requires_grad for t in tensors.values())
    assert whole.gate.weight.dtype == torch.bfloat16
    assert whole.shared_experts.gate_proj.fused.interleaved


def test_the_router_chooses_almost_evenly(whole):
    ids = whole.gate(Draw(1, CPU).normal(4000, whole.gate.hidden_dim))[2]
    counts = torch.bincount(ids.flatten(), minlength=whole.gate.num_experts)
    assert float(counts.max()) < 1.5 * float(counts.float().mean())


@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.parametrize("kind", moe_parts.ROUTINGS)
def test_the_reference_is_right(layer, kind, tokens):
    verdicts = moe_checks.verify(layer, inputs_of(layer, kind, tokens))
    assert set(verdicts) == set(moe_parts.PARTS)
    assert all(verdict.match for verdict in verdicts.values()), verdicts


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("gate_up", {"gate_up", "pair", "block"}),
        ("down", {"down", "pair", "block"}),
        ("combine", {"combine", "around", "block"}),
        ("around", {"around"}),
        ("block", {"block"}),
    ],
)
@pytest.mark.parametrize("value", [1.05, float("nan")])
def test_a_wrong_part_has_no_time(layer, monkeypatch, part, wrong, value):
    right = getattr(moe_parts, part)
    damaged = []

    def other(*args):
        out = right(*args).clone()
        damaged.append(out)
        out[0, 0] = out[0, 0] * value + (value - 1) * out[0].norm()
        return out

    monkeypatch.setattr(moe_parts, part, other)
    rows = moe.measure(layer, "single", 8, OPTIONS, RATES)
    assert damaged
    if part == "gate_up" and math.isnan(value):
        wrong = {*wrong, "down"}  # a product of NaN is NaN, which the check of down cannot judge
    assert {name for name, row in rows.items() if row.match is False} == wrong
    assert all((row.us is None) == (name in wrong) for name, row in rows.items())
    results.validate(results.document(_header(), rows.values()))
    line = moe.cells(("tiny", "single", 8, 0.0), rows)
    assert line[moe.HEADINGS.index("check")] == "WRONG"


@pytest.mark.parametrize("name", ["the sorted rows", "their weights", "places"])
def test_a_wrong_sort_has_no_time(layer, monkeypatch, name):
    right = moe_parts.sort

    def moved(*args):
        rows, row_weight, offsets, positions = right(*args)
        wrong = {
            "the sorted rows": (rows.flip(0), row_weight, offsets, positions),
            "their weights": (rows, row_weight.flip(0), offsets, positions),
            "places": (rows, row_weight, offsets, positions.roll(1, 0)),
        }
        return wrong[name]

    monkeypatch.setattr(moe_parts, "sort", moved)
    rows = moe.measure(layer, "uniform", 8, OPTIONS, RATES)
    assert rows["sort"].us is None
    assert rows["block"].us is None
    assert f"{name} differs" in rows["sort"].message
    assert {name for name, row in rows.items() if row.match} >= {"gate_up", "down", "combine"}


@pytest.mark.parametrize("tokens", [1, 30])
def test_the_layer_is_right_and_has_a_time(layer, whole, tokens):
    row = moe.measure_layer(layer, whole, tokens, OPTIONS, RATES)
    assert (row.match, row.case, row.tokens) == (True, "tiny router layer", tokens)
    assert row.us > 0
    assert 0 < row.error < 0.01


@pytest.mark.parametrize("part", ["gate", "experts", "shared_experts", "weights"])
def test_a_wrong_layer_has_no_time(layer, whole, monkeypatch, part):
    module = whole.gate if part == "weights" else getattr(whole, part)
    right = type(module).forward

    def other(self, *args):
        out = right(self, *args)
        if part == "gate":  # the second choice twice
            return out[0], out[1], out[2][:, 1:].expand(-1, 2)
        if part == "weights":
            return out[0], out[1] * 1.001, out[2]
        return out * 1.05

    monkeypatch.setattr(type(module), "forward", other)
    row = moe.measure_layer(layer, whole, 8, OPTIONS, RATES)
    assert (row.match, row.us) == (False, None)
    results.validate(results.document(_header(), [row]))
    line = moe.cells(("tiny", "router", 8, 0.0), {"layer": row})
    assert line[moe.HEADINGS.index("check")] == "WRONG"
    assert line[moe.HEADINGS.index("layer us")] == "-"


def _header() -> dict:
    header = {"gpu": "g", "driver": "d", "versions": {}, "commit": "c", "command": "x"}
    return (
        header
        | dict.fromkeys(("copy_tbs", "read_tbs", "bf16_tflops", "node_us"), 1.0)
        | {"date": "d"}
    )


@pytest.mark.slow
def test_a_run_on_the_cpu(tmp_path: Path, capsys):
    path = tmp_path / "moe.json"
    assert command(path, "--routings", "uniform,zipf,single") == 0
    rows = rows_of(path)
    points = [(kind, tokens) for kind in moe_parts.ROUTINGS for tokens in (1, 5)]
    expected = [(f"tiny {kind} {part}", t) for kind, t in points for part in moe_parts.PARTS]
    expected += [("tiny router layer", 1), ("tiny router layer", 5)]
    assert [(row["case"], row["tokens"]) for row in rows] == expected
    for row in rows:
        assert row["op"] == "moe"
        assert row["match"] is True
        assert row["us"] > 0
        assert row["bound_us"] == pytest.approx(RATES.bound_us(row["bytes"], row["flops"]))
        assert 2 <= row["shape"]["touched"] <= min(8, 2 * row["tokens"])
        several = row["case"].endswith(("pair", "around", "block", "layer"))
        assert row["backend"] == ("auto" if several else "reference")
    printed = capsys.readouterr().out.splitlines()
    headings = [line for line in printed if line.startswith("shapes")]
    assert all(name in "  ".join(headings) for name in moe.HEADINGS)
    assert max(map(len, printed)) <= 120
    assert printed[-1] == f"PASSED: {len(rows)} checks passed"


@pytest.mark.slow
def test_cooled_times_have_rows_and_lines_of_their_own(tmp_path: Path, capsys, monkeypatch):
    seen = []
    measured = timing.measure

    def slept(calls, device, repeat, rest=0.0):
        seen.append(rest)
        return measured(calls, device, repeat)

    monkeypatch.setattr(timing, "measure", slept)
    path = tmp_path / "moe.json"
    assert command(path, "--routings", "single", "--rest", "0.25") == 0
    cases = [row["case"] for row in rows_of(path)]
    parts = [f"tiny single {part}" for part in moe_parts.PARTS]
    layers = ["tiny router layer", "tiny router layer cooled"]
    assert cases == [*parts, *(f"{part} cooled" for part in parts)] * 2 + layers * 2
    # Each part twice, and what baselines have, in the condition of the line they are printed in.
    assert seen.count(0.25) * 2 == len(seen) >= len(cases)
    printed = capsys.readouterr().out.splitlines()
    index = [line.split("  ")[0] for line in printed].index("shapes")
    at = printed[index].index("timed")
    kinds = [line[at:].split("  ")[0] for line in printed[index + 2 : index + 8]]
    assert kinds == ["sustained", "cooled"] * 3


def test_few_tokens_by_default_on_the_cpu(tmp_path: Path, without_baselines):
    path = tmp_path / "moe.json"
    assert main(["moe", "--repeat", "1", "--device", "cpu", "--json", str(path)]) == 0
    measured = [(row["case"], row["tokens"]) for row in rows_of(path)]
    kinds = ("uniform", "zipf", "single")
    expected = [(f"tiny {k} {p}", t) for k in kinds for t in (1, 8) for p in moe_parts.PARTS]
    assert measured == [*expected, ("tiny router layer", 1), ("tiny router layer", 8)]


def test_markdown_and_a_folder(tmp_path: Path, capsys, without_baselines):
    assert command(f"{tmp_path}/", "--routings", "single", "--markdown") == 0
    folder = tmp_path / "results" / environment.slug(environment.device_name(CPU))
    count = 2 * len(moe_parts.PARTS) + 2
    assert len(rows_of(next(folder.iterdir()))) == count
    assert sum(line.startswith("| moe") for line in capsys.readouterr().out.splitlines()) == count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--routings", "zipf,even"],
            "--routings has 'even', wanted some of uniform, zipf, single",
        ),
        (["--activation", "nvfp4"], "--activation is 'nvfp4', wanted one of bf16, fp8"),
        (["--baselines", "cutlass"], "--baselines has 'cutlass', wanted some of"),
        (["--shapes", "huge"], "shapes are 'huge', wanted one of tiny, flash, pro"),
        (["--shapes", "tiny,huge"], "shapes are 'huge', wanted one of tiny, flash, pro"),
        (["--tokens", "0"], "0 is below 1"),
        (["--repeat", "0"], "0 is below 1"),
        (["--device", "cuda:99"], "--device is 'cuda:99'"),
    ],
)
@pytest.mark.parametrize("command", [["moe"], ["run", "moe"]], ids=" ".join)
def test_bad_commands_say_what_to_write(command, arguments: list[str], message: str, capsys):
    assert main([*command, *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""  # nothing was measured before


@pytest.mark.parametrize(
    ("stop", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted after 1 points"),
        (torch.OutOfMemoryError("no room"), 1, "no room"),
        (TypeError("a bug"), 1, "a bug"),
    ],
)
def test_what_was_measured_before_a_stop_is_written(
    monkeypatch, capsys, tmp_path: Path, without_baselines, stop, status, said
):
    measure = moe.measure

    def once(layer, routing, tokens, *rest):
        if tokens > 1:
            raise stop
        return measure(layer, routing, tokens, *rest)

    monkeypatch.setattr(moe, "measure", once)
    assert command(tmp_path / "x.json") == status
    assert len(rows_of(tmp_path / "x.json")) == len(moe_parts.PARTS)
    printed = capsys.readouterr()
    assert said in printed.err + printed.out
    assert printed.out.splitlines()[-1].startswith(f"STOPPED: {len(moe_parts.PARTS)} checks passed")


def test_seeds_give_other_weights_and_routings():
    draws = [moe_parts.draw_layer("tiny", Draw(seed, CPU)) for seed in (0, 0, 1)]
    assert torch.equal(draws[0].gate_up.codes, draws[1].gate_up.codes)
    assert not torch.equal(draws[0].gate_up.codes, draws[2].gate_up.codes)
    other = dataclasses.replace(OPTIONS, seed=7)
    seeded = (OPTIONS, OPTIONS, other)
    ids = [moe_parts.all_inputs(draws[0], "uniform", 9, options)[0].ids for options in seeded]
    assert torch.equal(ids[0], ids[1])
    assert not torch.equal(ids[0], ids[2])


def test_calls_of_a_graph_have_routings_of_their_own(layer, monkeypatch):
    """Pretend to be on a GPU: only inputs are drawn here."""
    monkeypatch.setattr(moe_parts, "Draw", lambda seed, device: Draw(seed, CPU))
    options = dataclasses.replace(OPTIONS, device=torch.device("cuda"))
    drawn = moe_parts.all_inputs(layer, "uniform", 3, options)
    assert len(drawn) == 8
    assert len({tuple(inputs.ids.flatten().tolist()) for inputs in drawn}) == 8


def measured(monkeypatch, tmp_path: Path, **baselines) -> list[dict]:
    monkeypatch.setattr(moe_baselines, "BASELINES", baselines)
    assert command(tmp_path / "r.json", "--routings", "zipf") == 0
    return rows_of(tmp_path / "r.json")


def test_a_baseline_that_fails_says_why(monkeypatch, tmp_path: Path, capsys):
    def fails(gate_up, down):
        raise OSError("no compiler\nand more")

    def breaks(gate_up, down):
        def product(x, ends):
            raise RuntimeError("")

        return moe_baselines.Pair(product, product, lambda offsets: offsets, "all")

    rows = measured(monkeypatch, tmp_path, absent=fails, broken=breaks)
    for row in rows:
        assert row["us"] > 0
        assert row["baselines"] == {}
        pair = row["case"].endswith("pair")
        assert row["message"] == ("absent: OSError: no compiler; broken: RuntimeError: " * pair)
    assert "absent: OSError: no compiler" in capsys.readouterr().out
    table, csv_file = ("--routings", "zipf", "--markdown"), tmp_path / "r.csv"
    assert command(tmp_path / "r.json", *table, "--csv", str(csv_file)) == 0
    assert "absent: OSError: no compiler" in capsys.readouterr().out
    assert "absent: OSError: no compiler" in csv_file.read_text()


def test_rows_are_written_before_each_baseline(monkeypatch, tmp_path: Path):
    """A baseline may end the process, or hold up an interrupt for minutes."""
    path, there = tmp_path / "r.json", []

    def prepare(gate_up, down):
        there.append(rows_of(path))
        raise KeyboardInterrupt

    monkeypatch.setattr(moe_baselines, "BASELINES", {"a": absent, "b": prepare})
    assert command(path, "--routings", "zipf", "--tokens", "1") == 130
    (rows,) = there
    assert all(row["us"] > 0 for row in rows)
    assert "a: OSError: no compiler" in [row["message"] for row in rows]


def absent(gate_up, down):
    raise OSError("no compiler")


def test_what_a_library_prints_is_on_stderr_without_empty_lines(capsys):
    def prints():
        print("", "a warning", "", sep="\n")
        raise OSError("why")

    assert moe_baselines.attempt(prints) == "OSError: why"
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "a warning\n")


def one_after_another(gate_up, down) -> moe_baselines.Pair:
    """Right, and in plain PyTorch."""

    def product(weight):
        dense = dequantize(weight, torch.bfloat16)

        def multiply(x, bounds):
            pairs = zip(itertools.pairwise(bounds), dense, strict=True)
            return torch.cat([F.linear(x[a:b], matrix) for (a, b), matrix in pairs])

        return multiply

    return moe_baselines.Pair(product(gate_up), product(down), torch.Tensor.tolist, "all")


def test_grouped_mm_multiplies_what_was_packed(layer):
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this PyTorch has no _grouped_mm")
    inputs = inputs_of(layer, "zipf", 20)
    try:
        made = moe_baselines.grouped_mm(layer.gate_up, layer.down)
        made.gate_up(inputs.rows, made.offsets(inputs.offsets))
    except RuntimeError as refusal:
        pytest.skip(str(refusal))
    moe_baselines.compare(made, inputs.rows, inputs.offsets, (layer.gate_up, layer.down))


def test_a_baseline_that_is_wrong_is_left_out(monkeypatch, tmp_path: Path):
    def halves(gate_up, down):
        made = one_after_another(gate_up, down)
        return dataclasses.replace(made, down=lambda x, ends: made.down(x, ends) / 2)

    rows = measured(monkeypatch, tmp_path, right=one_after_another, wrong=halves)
    for row in rows:
        timed = row["case"].endswith(("gate_up", "down", "pair"))
        assert set(row["baselines"]) == ({"right"} if timed else set())
        if row["case"].endswith("pair"):
            assert row["message"].startswith("wrong: ValueError: off by 5.0e-01")


class HummingLayer(torch.nn.Module):
    """Humming's operands, multiplied by PyTorch."""

    def __init__(self, shape_n, shape_k, num_experts, weight_config, torch_dtype):
        super().__init__()
        assert weight_config == {"quant_method": "modelopt", "quant_algo": "nvfp4"}
        self.sizes, self.dense = (num_experts, shape_n, shape_k), None

    def load_from_tensors(self, tensors):
        scale = tensors["weight_scale_2"]
        assert scale.shape == self.sizes[:1]
        weight = QuantizedTensor(
            tensors["weight"], tensors["weight_scale"], scale.unsqueeze(1), NVFP4
        ).validate()
        assert weight.shape == self.sizes
        self.stored = weight

    def transform(self):
        self.dense = dequantize(self.stored, torch.bfloat16)

    def forward(self, x, expert_layout, compute_config):
        assert compute_config == {"gemm_type": "grouped_contiguous"}
        assert expert_layout.dtype == torch.int64
        pairs = zip(itertools.pairwise(expert_layout.tolist()), self.dense, strict=True)
        return torch.cat([F.linear(x[a:b], matrix) for (a, b), matrix in pairs])


def test_humming_is_given_rows_and_one_scale(monkeypatch, tmp_path: Path):
    library, others = SimpleNamespace(HummingLayer=HummingLayer), importlib.import_module

    def module(name):
        return library if name.startswith("humming") else others(name)

    monkeypatch.setattr(moe_baselines.importlib, "import_module", module)
    rows = measured(monkeypatch, tmp_path, humming=moe_baselines.humming)
    timed = [row for row in rows if row["case"].endswith(("gate_up", "down", "pair"))]
    assert len(timed) == 2 * 3
    assert all(set(row["baselines"]) == {"humming"} for row in timed)


def test_baselines_that_do_not_fit_are_not_made(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 << 30, 140 << 30))
    device = torch.device("cuda")
    moe_baselines.check_memory(device, 40 << 30)
    with pytest.raises(RuntimeError, match=r"take 52 GB and 17 to spare, 64 GB are free"):
        moe_baselines.check_memory(device, 48 << 30)


def test_baselines_may_be_chosen(monkeypatch, tmp_path: Path, capsys):
    prepared = []
    known = {name: lambda *_, name=name: prepared.append(name) for name in ("One (note)", "Two")}
    monkeypatch.setattr(moe_baselines, "BASELINES", known)
    monkeypatch.setattr(moe, "_baseline_times", lambda *_: {})
    assert command(tmp_path / "r.json", "--routings", "single", "--baselines", "one") == 0
    assert prepared == ["One (note)"]
    assert command(tmp_path / "r.json", "--baselines", "one,three") == 2
    message = "--baselines has 'three', wanted some of One (note), Two"
    assert message in capsys.readouterr().err


def test_baselines_are_named():
    theirs = (f"transformers {kind} (bf16 weights)" for kind in THEIRS)
    assert set(moe_baselines.BASELINES) == {GROUPED_MM, HUMMING, *theirs}


@pytest.mark.parametrize("kind", THEIRS)
def test_experts_of_transformers_stand_beside_the_block(kind, monkeypatch, tmp_path: Path):
    pytest.importorskip("transformers.models.deepseek_v4")
    prepare = functools.partial(moe_baselines.transformers_experts, kind)
    rows = measured(monkeypatch, tmp_path, theirs=prepare)
    for row in rows:
        assert set(row["baselines"]) == ({"theirs"} if row["case"].endswith("block") else set())
        assert not row["message"]


def test_wrong_experts_of_transformers_are_left_out(layer):
    pytest.importorskip("transformers.models.deepseek_v4")
    made = moe_baselines.transformers_experts("eager", layer.gate_up, layer.down)
    inputs = inputs_of(layer, "uniform", 5)
    routed, weights = (inputs.x, inputs.ids, inputs.weights), (layer.gate_up, layer.down)
    moe_baselines.compare_whole(made, routed, 10.0, weights)
    for changed in (lambda *args: 1.05 * made.forward(*args), lambda *_: inputs.x * math.nan):
        with pytest.raises(ValueError, match=r"off by .*, left out"):
            moe_baselines.compare_whole(moe_baselines.Whole(changed), routed, 10.0, weights)
    with pytest.raises(ValueError, match=r"off by .*, left out"):
        moe_baselines.compare_whole(made, routed, 0.01, (layer.gate_up, _halved(layer.down)))


def _halved(weight: QuantizedTensor) -> QuantizedTensor:
    return dataclasses.replace(weight, global_scale=weight.global_scale / 2)
