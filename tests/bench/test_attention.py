"""``python -m dsv4.bench run attention``, ``indexer`` and ``attention_layer``: checks and files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from dsv4.bench import cli, environment, measure, results
from dsv4.bench.baselines import _prepare, flash_mla, inductor, transformers_attention
from dsv4.bench.cli import main
from dsv4.bench.measure import Options
from dsv4.bench.problem import Draw, Problem
from dsv4.bench.suites import attention, attention_layer
from dsv4.config import CSA, SLIDING, ModelConfig

CPU = torch.device("cpu")
OPTIONS = Options(CPU, repeat=1)
RATES = environment.Rates(0.02, 0.01, 0.1)


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "rates", lambda device: RATES)


def command(path: Path, group: str, *more: str) -> int:
    return main(["run", group, "--repeat", "1", "--device", "cpu", "--json", str(path), *more])


def rows_of(path: Path) -> list[dict]:
    document = json.loads(path.read_text())
    results.validate(document)
    return document["rows"]


@pytest.mark.parametrize(
    ("group", "tokens", "cases"),
    [
        ("attention", "1,3,70", ["tiny C4A 4 heads", "tiny C128A 4 heads"]),
        ("indexer", "1,3", [f"tiny 128 tokens {k}" for k in ("plain", "index_fp8", "index_mxfp4")]),
        ("attention_layer", "2", ["tiny C4A", "tiny C128A", "tiny window"]),
        ("attention_layer", "70", ["tiny C128A"]),
    ],
)
def test_every_case_is_checked_and_timed(group, tokens, cases, tmp_path: Path, capsys):
    options = ["--tokens", tokens, "--cases", ",".join(cases)]
    assert command(tmp_path / "found.json", group, *options) == cli.OK
    rows = rows_of(tmp_path / "found.json")
    expected = [(case, int(count)) for count in tokens.split(",") for case in cases]
    assert [(row["case"], row["tokens"]) for row in rows] == expected
    assert all(row["match"] and row["us"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert attention.HEADINGS[-4] in printed
    assert (f"{flash_mla.NAME} was not run: No module" in printed) == (group == "attention")


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, [1024, 8192]), (64, [1024, 8192]), (65, [1024])]
)
def test_a_decode_step_of_c128a_has_the_entries_of_a_million_tokens(tokens, expected):
    cases = [c for c in attention.attention("pro", tokens) if " C128A " in c.name]
    for heads in (16, 128):
        assert [c.shape["entries"] for c in cases if c.shape["h"] == heads] == expected
    assert len({c.name for c in cases}) == len(cases)


@pytest.mark.parametrize("group", ["attention", "attention_layer"])
def test_baselines_none_times_none(group, tmp_path: Path, capsys):
    options = ["--tokens", "1", "--cases", "tiny C4A*", "--baselines", "none"]
    assert command(tmp_path / "found.json", group, *options) == cli.OK
    assert [row.get("baselines", {}) for row in rows_of(tmp_path / "found.json")] == [{}]


def test_names_are_those_of_the_commands():
    assert attention.GROUPS == cli.ATTENTION


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["rope"], "one at a time"),
        (["--backend", "auto,reference"], "by one backend"),
        (["--cases", "nothing"], "matches none"),
        (["--shapes", "huge"], "shapes are 'huge'"),
    ],
)
def test_bad_commands_say_what_to_write(more, message, capsys):
    assert main(["run", "attention", *more, "--device", "cpu"]) == cli.IMPOSSIBLE
    assert message in capsys.readouterr().err


def test_an_interrupted_run_keeps_its_rows(monkeypatch, tmp_path: Path):
    right, calls = attention.measure, []

    def second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return right(*args)

    monkeypatch.setattr(attention, "measure", second)
    assert command(tmp_path / "found.json", "indexer") == cli.INTERRUPTED
    assert len(rows_of(tmp_path / "found.json")) == 1


@pytest.mark.parametrize("token", [0, -1])
@pytest.mark.parametrize("group", ["attention", "indexer"])
def test_a_wrong_token_has_no_time(group, token, monkeypatch):
    """The first or the last of many; only some are judged."""
    right = Problem.run

    def wrong(self, backend="auto"):
        out = right(self, backend)
        if backend == "auto":
            out[0][token] = out[0][token].flip(-1) + 1
        return out

    monkeypatch.setattr(Problem, "run", wrong)
    case = next(attention.CASES[group]("tiny", 70))
    row = measure.measure(case, OPTIONS, RATES)
    assert row.match is False
    assert row.us is None
    assert attention.cells(row)[3:5] == ("WRONG", "-")


@pytest.mark.parametrize("kind", attention_layer.KINDS)
def test_a_wrong_sublayer_has_no_time(kind, monkeypatch):
    right = attention_layer.Sublayer.forward

    def wrong(self, x, cache, batch):
        out = right(self, x, cache, batch)
        wrong.calls += 1
        return out * 1.1 if wrong.calls == 3 else out  # after two prefills

    wrong.calls = 0
    monkeypatch.setattr(attention_layer.Sublayer, "forward", wrong)
    c = ModelConfig.tiny()
    row = attention_layer.measure(c, "tiny", kind, 2, OPTIONS, RATES)
    assert row.match is False
    assert row.us is None
    assert 0.08 < row.error < 0.12


@pytest.mark.parametrize("kind", attention_layer.KINDS)
def test_the_bound_of_a_sublayer_counts_what_it_reads(kind):
    """Counted by hand at position 127 of a window of 8, ratios 4 and 8, and 4 chosen entries."""
    c = attention_layer.one_layer(ModelConfig.tiny(), kind)
    draw = Draw(0, CPU)
    layer = attention_layer.build(c, draw)
    entries, keys = {"C4A": (8 + 4, 32), "C128A": (8 + 16, 0), "window": (8, 0)}[kind]
    linear = [m for m in layer.modules() if isinstance(m, attention_layer.Linear)]
    weights = sum(m.quantized_weight().nbytes for m in linear)
    matrix = sum(m.out_features * m.in_features for m in linear)
    entry = 48 + 2 * 16 + 8  # codes, bfloat16, scales
    moved, flops = attention_layer.costs(layer, 3)
    assert moved == weights + 3 * (4 * 64 + entries * entry + keys * (32 // 2 + 1))
    assert flops == 3 * (2 * matrix + 4 * 4 * 64 * entries + 2 * 16 * 32 * keys)


def test_decoded_tokens_share_no_entry_and_a_prefill_is_causal():
    for case in attention.attention("tiny", 5):
        problem = case.build(Draw(0, CPU))
        for slots in (problem.args[2], problem.args[4]):
            assert slots.unique().numel() == slots.numel()
            assert int(slots.min()) >= 0
    chosen, prefix = (case.build(Draw(0, CPU)).args for case in attention.attention("tiny", 70))
    reach = torch.arange(-7, 1)
    for args in (chosen, prefix):
        expected = torch.arange(70).unsqueeze(1) + reach
        assert torch.equal(args[2], expected.clamp(min=-1))
    seen = (prefix[4] >= 0).sum(1)
    assert torch.equal(seen, (128 - 70 + 1 + torch.arange(70)) // 8)
    assert int(chosen[4].min()) >= 0


def test_published_sizes():
    """Heads, entries and tokens without making any input."""
    cases = [*attention.attention("flash", 1), *attention.attention("pro", 1)]
    assert [case.name for case in cases] == [
        f"{preset} {kind} {heads} heads"
        for preset, most in (("flash", 64), ("pro", 128))
        for heads in (16, most)
        for kind in ("C4A", "C128A", "C128A 1M")
    ]
    entries = [case.shape["entries"] for case in cases]
    assert entries == 2 * [512, 1024, 8192] + 2 * [1024, 1024, 8192]
    assert {case.shape["C"] for case in attention.indexer("pro", 1)} == {32768, 262144}
    assert attention.usual_tokens("attention", True) == (1, 16, 64, 4096)
    assert attention.usual_tokens("indexer", True) == (1, 64)
    assert attention.usual_tokens("attention_layer", True) == (1, 64, 4096)


def test_bounds_on_an_h200(monkeypatch):
    assert attention.published(CPU, RATES) is RATES
    monkeypatch.setattr(attention, "device_name", lambda device: "NVIDIA H200")
    rates = attention.published(CPU, RATES)
    assert rates.bound_us(4_380_000, 0) == pytest.approx(1.0)
    assert rates.bound_us(0, 790_000_000) == pytest.approx(1.0)
    assert rates.copy_tbs == RATES.copy_tbs


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tokens", "context"), [(CSA, 2, 31), (SLIDING, 70, 0)])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_transformers_attention_is_timed_beside(kind, tokens, context, backend):
    pytest.importorskip("transformers")
    step = transformers_attention.Step(ModelConfig.tiny(), kind, tokens, context)
    with torch.inference_mode():
        assert transformers_attention.step_us(step, OPTIONS, backend) > 0


def test_which_of_transformers_are_timed(monkeypatch):
    """Eager on a GPU or where baselines are asked for, compiled where Inductor is; or none."""
    step = transformers_attention.Step(ModelConfig.tiny(), CSA, 1, 31)
    calls = []

    def step_us(step, options, backend):
        calls.append(backend)
        if backend:
            raise RuntimeError("no\nmore")
        return 3.0

    monkeypatch.setattr(transformers_attention, "step_us", step_us)
    asked = (None, (), ("QuACK",), ("Inductor",))
    named = {baselines: dataclasses.replace(OPTIONS, baselines=baselines) for baselines in asked}
    for names in (None, ()):
        assert transformers_attention.times(step, named[names]) == ({}, "")
    eager = {"transformers eager": 3.0}
    assert transformers_attention.times(step, named[("QuACK",)]) == (eager, "")
    said = "transformers inductor: RuntimeError: no"
    assert transformers_attention.times(step, named[("Inductor",)]) == (eager, said)
    assert calls == [None, None, "inductor"]


def test_a_compiled_reference_is_timed_for_few_tokens():
    short, long = (next(attention.attention("tiny", n)).build(Draw(0, CPU)) for n in (3, 70))
    baseline = inductor.of_reference("aot_eager")
    torch.testing.assert_close(baseline(short)(), short.run("reference")[0])
    assert baseline(long) is None


class Library:
    """FlashMLA's interface, by this package's reference."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.calls = factor, 0

    def get_mla_metadata(self):
        return "plan", None

    def flash_mla_with_kvcache(self, q, cache, table, lengths, dims, plan, **options):
        self.calls += 1
        assert (table, lengths, plan, options["is_fp8_kvcache"]) == (None, None, "plan", True)
        pools = [
            (cache, options["indices"]),
            (options["extra_k_cache"], options["extra_indices_in_kvcache"]),
        ]
        flat = []
        for pages, indices in pools:
            assert indices.shape[-1] % 64 == 0
            assert indices.dtype == torch.int32
            count, size, heads, width = pages.shape
            assert (heads, width, pages.stride(1)) == (1, 64 + 16 + 8, 64 + 16 + 8)
            data = pages.as_strided((count, pages.stride(0)), (pages.stride(0), 1))
            flat += [data, size, "fp8", indices.squeeze(1).long()]
        out = torch.ops.dsv4.sparse_attention.default(
            q.squeeze(1),
            *flat,
            options["attn_sink"],
            16,
            options["softmax_scale"],
            None,
            None,
            "reference",
        )
        return out.unsqueeze(1) * self.factor, None

    def flash_mla_sparse_fwd(self, q, kv, indices, scale, dims, sink):
        assert kv.dtype == torch.bfloat16
        assert (indices.shape[-1] % 64, indices.dtype) == (0, torch.int32)
        named = indices.squeeze(1).long()
        entries = kv.squeeze(1).double()[named.clamp(min=0)]
        logits = torch.einsum("thd,tnd->thn", q.double(), entries) * scale
        logits = logits.masked_fill(named.unsqueeze(1) < 0, -torch.inf)
        sinks = sink.double().view(1, -1, 1).expand(*logits.shape[:2], 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
        return torch.einsum("thn,tnd->thd", weights, entries).to(q.dtype) * self.factor, None, None


def test_flash_mla_gets_where_entries_of_padded_pages_are():
    data = torch.arange(2 * 37440, dtype=torch.int32).view(2, 37440)
    entries = flash_mla._cache(data, 64, 512, 64)
    assert entries.shape == (2, 64, 1, 584)
    assert entries[1, 63, 0, 583] == 37440 + 64 * 584 - 1


@pytest.mark.parametrize("prepare", [flash_mla._attention, flash_mla._prompts])
@pytest.mark.parametrize("tokens", [3, 70])
def test_flash_mla_is_given_the_same_entries(monkeypatch, prepare, tokens):
    monkeypatch.setattr(flash_mla, "_HEADS", (4,))
    problem = next(attention.attention("tiny", tokens)).build(Draw(0, CPU))
    captured = _prepare.captured(problem)
    call = prepare(Library(), captured.args)
    still = dataclasses.replace(problem, kwargs={"scale": problem.kwargs["scale"]})
    torch.testing.assert_close(call(), still.run("reference")[0])
    with pytest.raises(ValueError, match=r"off by 1\.0e-01"):
        prepare(Library(1.1), captured.args)
    monkeypatch.setattr(flash_mla, "_HEADS", (64,))
    with pytest.raises(ValueError, match="of 4 heads"):
        prepare(Library(), captured.args)
