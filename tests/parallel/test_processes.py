"""Two and four processes over gloo: from files to tokens, and failures that end all of them."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4
from dsv4 import __main__ as command_line
from dsv4.bench.cases import PRESETS
from dsv4.bench.suites.model.document import output_path, parse
from dsv4.bench.suites.whole_model import uniform_experts
from dsv4.checkpoint import save
from dsv4.serving.sampling import Sampler
from tests.parallel.cases import CONFIG, model
from tests.parallel.ranks_program import COMMAND, NEW, PROMPTS, start
from tests.text.tokenizers import small_table

_LIMIT = 150  # seconds until processes that hang are ended


def checkpoint(folder: Path) -> Path:
    config = CONFIG.replace(vocab_size=288, num_nextn_predict_layers=0)
    save(model(config, torch.float32), folder, layout="bf16")
    (folder / "tokenizer.json").write_text(json.dumps(small_table()), encoding="utf-8")
    (folder / "generation_config.json").write_text('{"temperature": 0.0}')
    return folder


def run(size: int, last: str, folder: Path) -> list[dict[str, Any]]:
    """Start the processes; return what each found."""
    path = checkpoint(folder / "checkpoint").parent
    # Forks of a process that has imported torch and done nothing else: an import takes seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.parallel.ranks_program"])
    processes = [
        context.Process(target=start, args=(rank, size, str(path), last)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(_LIMIT)
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    reports = [torch.load(path / f"rank{rank}.pt") for rank in range(size)]
    assert hanging == [], reports
    for report in reports:
        assert "traceback" not in report, report["traceback"]
    return reports


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return run(2, "exception", folder), folder / "checkpoint"


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    return run(4, "kill", folder), folder / "checkpoint"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["two", "four"])
def test_tokens_are_equal_on_all_ranks_and_those_of_one(ranks, request):
    """In float32. Prefill without pools, too, whose logits are equal up to rounding."""
    reports, path = request.getfixturevalue(ranks)
    whole = dsv4.load(path, dtype="float32", progress=False)
    sampler = Sampler(temperature=1.0, top_p=0.9, generator=torch.Generator().manual_seed(7))
    greedy = whole.generate(PROMPTS, NEW, stop_ids=[])
    drawn = whole.generate(PROMPTS, NEW, stop_ids=[], sampler=sampler, chunk=8)
    cache = whole.new_cache(2, 64, max_chunk=8)
    logits = whole.prefill(PROMPTS[:2], cache, [cache.allocate(), cache.allocate()])
    first = reports[0]["whole_life"]
    for report in reports:
        assert report["tensors"]
        assert report["whole_life"][:2] == (greedy, drawn)
        assert torch.equal(report["whole_life"][2], first[2])
        torch.testing.assert_close(report["whole_life"][2], logits, rtol=1e-3, atol=1e-3)
        assert report["whole_life"][3] == (1, 0, CONFIG.hidden_size)
        assert report["whole_life"][4] < 0.75 * whole.load_report.bytes_read
    assert [report["several_requests"] for report in reports] == [
        greedy,
        *[None] * len(reports[1:]),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["two", "four"])
def test_the_command_prints_on_rank_0_alone(ranks, request, capsys):
    reports, path = request.getfixturevalue(ranks)
    assert command_line.main(["generate", str(path), *COMMAND]) == 0
    printed = capsys.readouterr().out
    assert [report["command"] for report in reports] == [
        (0, printed),
        *[(0, "")] * len(reports[1:]),
    ]


@pytest.mark.slow
def test_the_bench_of_a_model_whose_ranks_have_tokens_of_their_own(two):
    """Rank 0 alone writes; its experts get the tokens of both ranks."""
    (status, written), of_other = (report["bench"] for report in two[0])
    assert status == 0
    assert of_other == (0, None)
    document = parse(written)
    (row,) = document.rows
    named = row.model
    assert (named.ranks, named.parallel, named.emulated) == (2, "dp", False)
    assert row.failed == []
    assert min(row.eager_ms, row.runner_ms, row.generate_ms) > 0
    assert row.experts_uniform == uniform_experts(PRESETS["tiny"](), 6) / 2
    assert 0 < row.experts_read <= 4
    assert document.expected == [], "computed of ranks that process the same tokens"
    name = output_path("out/", written["header"], named).name
    assert name.endswith("-model_tiny_nvfp4_dp2.json")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["two", "four"])
def test_ranks_with_tokens_of_their_own(ranks, request, capsys):
    """``parallel="dp"``: each rank has the tokens of its prompts, and rank 0 prints.

    Of four ranks the last one has none; then it fails.
    """
    reports, path = request.getfixturevalue(ranks)
    whole = dsv4.load(path, dtype="float32", progress=False)
    assert command_line.main(["generate", str(path), *COMMAND]) == 0
    printed = capsys.readouterr().out
    kinds = [*["RankError"] * (len(reports) - 1), "ZeroDivisionError"]
    for rank, report in enumerate(reports):
        tokens, read, command, (kind, message, seconds) = report["own_tokens"]
        assert tokens == whole.generate(PROMPTS[rank:], NEW, stop_ids=[])
        assert read < 0.95 * whole.load_report.bytes_read
        assert command == (0, "" if rank else printed)
        assert kind == kinds[rank]
        assert "ZeroDivisionError: by the test" in message or rank == len(reports) - 1
        assert seconds < 30


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["two", "four"])
def test_meshes_of_the_wrong_kind(ranks, request):
    reports, _ = request.getfixturevalue(ranks)
    for report in reports:
        size = len(reports)
        expected = [
            "device_mesh has 2 dimensions ('pp', 'tp'), wanted one, or ('dp', 'tp')",
            "device_mesh has 2 dimensions (), wanted one, or ('dp', 'tp')",
            f"parallel is 'dp' and device_mesh has {size} ranks in dimension 'tp', wanted 1, "
            "because attention is not split then; or parallel='tp'",
        ]
        assert report["meshes"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["two", "four"])
def test_each_row_of_a_mesh_has_a_copy_of_the_model(ranks, request):
    reports, path = request.getfixturevalue(ranks)
    whole = dsv4.load(path, dtype="float32", progress=False)
    expected = [whole.generate(PROMPTS[row:], NEW - row, stop_ids=[]) for row in range(2)]
    for rank, report in enumerate(reports):
        row, tokens, own = report["copies"]
        assert row == rank * 2 // len(reports)
        assert tokens == expected[row]
        assert own == ((rank, 2) if len(reports) == 2 else None)


@pytest.mark.slow
def test_an_exception_on_a_rank_ends_all_with_its_error(two):
    (first, last), _ = two
    kinds = [kind for kind, _, _ in last["an_exception"]]
    assert kinds[:4] == ["MissingCheckpointError", *["ValueError"] * 3]
    failures = [
        "MissingCheckpointError",
        "ValueError: reserve_tokens is -1",
        "ValueError: parallel is 'no such mode'",
        "ValueError: device is 'no such device'",
        *["ZeroDivisionError: by the te"] * 2,
    ]
    texts = [f"rank 1 failed: {failure}" for failure in failures]
    texts.append("did not answer for 1 s, as rank 0 sees it")
    for text, (kind, message, seconds) in zip(texts, first["an_exception"], strict=True):
        assert kind == "RankError"
        assert text in message
        assert seconds < 30
    assert "this rank failed before, with ZeroDivisionError" in last["an_exception"][5][1]
    assert "rank 0 failed: RankError: a rank ended or did not answer" in last["an_exception"][6][1]


@pytest.mark.slow
def test_a_killed_rank_ends_all(four):
    reports, _ = four
    assert "a_killed_rank" not in reports[3]
    for report in reports[:3]:
        kind, message, seconds = report["a_killed_rank"][0]
        assert kind == "RankError"
        assert "ended" in message
        assert seconds < 30
    own = [report.get("a_killed_rank_with_tokens_of_its_own", "none") for report in reports]
    assert own[1:] == ["none", None, "none"]
    kind, message, seconds = own[0]
    assert kind == "RankError"
    assert "ended" in message
    assert seconds < 30
