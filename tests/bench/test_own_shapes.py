"""``--shape``: sizes of one's own for every operator and group, and sizes that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsv4.bench import environment, results
from dsv4.bench.cases import MAKERS, cases, own
from dsv4.bench.cases.own import Shape, own_cases
from dsv4.bench.cli import main
from dsv4.bench.measure import verify
from dsv4.bench.problem import Draw, UsageError

CPU = torch.device("cpu")
NAMED = own._FIELDS.keys() - {"grouped_gemm"}
FOLLOWS = {"quantize": {"N"}, "pool_windows": {"W"}, "gemm": set(), "expert_decide": {"N"}}
for name in ("compressor_update", "compress_write", "compress_write_paged"):
    FOLLOWS[name] = {"B"}


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = environment.Rates(0.02, 0.01, 0.1)
    monkeypatch.setattr(environment, "rates", lambda device: rates)


def shape_of(case) -> Shape:
    sizes = {k: v for k, v in case.shape.items() if k not in FOLLOWS.get(case.op, ())}
    return Shape.of(",".join(f"{name}={size}" for name, size in sizes.items()))


@pytest.mark.parametrize("op", MAKERS)
def test_sizes_of_a_model_as_sizes_of_ones_own_are_its_cases(op: str):
    """Of attention without entries there is none: a size is at least 1."""
    for case in cases(op, "tiny", 9):
        if 0 in case.shape.values():
            continue
        same = own_cases(op, shape_of(case), 9)
        assert all(case.shape.items() >= shape_of(case).sizes.items() for case in same)
        assert {c.name for c in same} >= ({case.name} if op in NAMED else set())


@pytest.mark.parametrize(
    ("op", "text"),
    [
        ("gemm", "N=48,K=80"),
        ("gemm", "N=32,K=64,G=3"),
        ("gemm_swiglu", "N=64,K=96"),
        ("grouped_gemm", "E=3,N=48,K=32,k=2"),
        ("rms_norm", "D=100"),
        ("rms_norm", "h=3,D=24"),
        ("rope", "h=5,D=48,R=20"),
        ("rope_quantize", "h=6,D=32,R=16,G=3"),
        ("route_hash", "E=12,H=48,k=3,V=77"),
        ("hc_pre", "n=3,H=40"),
        ("compress_write", "m=4,d=64"),
        ("compressor_update", "m=3,d=24"),
        ("indexer_select", "h=16,d=64,C=192,k=33"),
        ("sparse_attention", "h=3,D=64,window=5,entries=70"),
        ("entry_slots", "k=300"),
        ("prefix_slots", "C=77"),
        ("read_kv", "D=64,window=11"),
    ],
)
def test_own_sizes_are_measured_and_right(op: str, text: str):
    made = own_cases(op, Shape.of(text), 5)
    assert made
    for case in made:
        verdict = verify(case.build(Draw(0, CPU)), "reference")
        assert verdict.match, f"{case.name}: {verdict.message}"


def rows_of(tmp_path: Path, *arguments: str) -> list[results.Row]:
    path = tmp_path / "x.json"
    command = [*arguments, "--repeat", "1", "--device", "cpu", "--json", str(path)]
    assert main(command) == 0
    return list(results.read_json(str(path)).rows)


def test_several_shapes_are_several_rows(tmp_path):
    shapes = ["--shape", "D=32", "--shape", "D=48", "--shape", "h=2,D=16"]
    rows = rows_of(tmp_path, "run", "rms_norm", *shapes, "--tokens", "1,3")
    measured = [(row.shape, row.tokens) for row in rows]
    sizes = ({"D": 32}, {"D": 48}, {"h": 2, "D": 16})
    assert measured == [(size, tokens) for size in sizes for tokens in (1, 3)]


@pytest.mark.parametrize(
    ("group", "text", "count"),
    [
        ("attention", "h=4,D=64,window=8,entries=20", 1),
        ("indexer", "h=16,d=32,C=64,k=8", 3),
        ("attention_layer", "H=64,h=4,context=64", 3),
    ],
)
def test_groups_of_attention(group, text, count, tmp_path):
    more = ["--baselines", "none", "--tokens", "2"]
    rows = rows_of(tmp_path, "run", group, "--shape", text, *more)
    assert len(rows) == count
    for row in rows:
        assert row.match
        assert row.case.startswith("own")
        assert row.shape.items() == Shape.of(text).sizes.items()


def test_routed_experts(tmp_path):
    sizes = ["--shape", "E=4,H=128,I=256,k=2", "--routings", "uniform", "--tokens", "3"]
    rows = rows_of(tmp_path, "moe", *sizes, "--baselines", "none")
    assert {row.case.split()[0] for row in rows} == {"own(E=4,H=128,I=256,k=2)"}
    for row in rows:
        assert row.match
        assert row.shape.items() >= {"E": 4, "H": 128, "I": 256, "k": 2}.items()


def test_explain(capsys):
    assert main(["explain", "swiglu", "--shape", "I=40", "--device", "cpu"]) == 0
    assert "swiglu I=40, 16 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gemm", "--shape", "N=4"], "--shape is 'N=4', wanted N=,K= or N=,K=,G= for gemm"),
        (["gemm", "--shape", "N=4,K=16,x=1"], "wanted N=,K= or N=,K=,G= for gemm"),
        (["gemm", "--shape", "N=4,N=5"], "which has N twice"),
        (["gemm", "--shape", "N=0,K=16"], "wanted names with integers of 1 or more"),
        (["gemm", "--shape", "N"], "wanted names with integers"),
        (["gemm", "--shape", ""], "wanted names with integers"),
        (["gemm", "--shape", "N=4,K=17"], "K is 17, wanted a multiple of 16"),
        (["rms_norm", "--shape", "N=4"], "wanted D= or h=,D= for rms_norm"),
        (["rope", "gemm", "--shape", "N=4,K=16"], "wanted h=,D=,R= for rope"),
        (["--shape", "N=4,K=16"], "--shape is for operators that are named"),
        (["rope", "--shape", "h=2,D=8,R=16"], "head_dim is 8, wanted at least qk_rope_head_dim"),
        (["gemm_swiglu", "--shape", "N=31,K=64"], "wanted a multiple of 2 as N"),
        (["indexer_select", "--shape", "h=16,d=32,C=65,k=8"], "wanted a multiple of 64 as C"),
        (["indexer", "--shape", "h=16,d=32,C=65,k=8"], "wanted a multiple of 64 as C"),
        (["attention", "--shape", "h=2"], "wanted h=,D=,window=,entries= for attention"),
        (["attention_layer", "--shape", "H=64,h=4,context=5000"], "a context of at most 4096"),
        (["moe", "--shape", "E=4"], "wanted E=,H=,I=,k= for moe"),
        (["moe", "--shape", "E=4,H=100,I=128,k=2"], "wanted H and I that make whole tiles of"),
        (["rope", "--shape", "h=2,D=8,R=4", "--shapes", "pro"], "are in place of --shapes"),
        (["gemm", "--check", "--shape", "N=4,K=16"], "--check has sizes of its own"),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments, message, capsys):
    assert main(["run", *arguments, "--device", "cpu"]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1


def test_an_unknown_operator():
    with pytest.raises(UsageError, match="operator is 'x'"):
        own_cases("x", Shape.of("N=1"), 1)
