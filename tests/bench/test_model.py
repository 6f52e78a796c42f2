"""The command ``model`` of the bench: what it measures, options, memory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4 import checkpoint
from dsv4.bench import environment
from dsv4.bench.arguments import parser
from dsv4.bench.cases import PRESETS
from dsv4.bench.cli import main
from dsv4.bench.pages import models
from dsv4.bench.pages.tables import cell
from dsv4.bench.problem import UsageError
from dsv4.bench.suites import whole_model
from dsv4.bench.suites.model import (
    measure,
    memory,
    operators,
    profile,
    report,
    request,
    speculation,
)
from dsv4.bench.suites.model.document import (
    DecodeRow,
    Named,
    SpeculationRow,
    output_path,
    parse,
    validate,
)
from dsv4.bench.suites.model.memory import ModelBytes, model_bytes
from dsv4.bench.suites.model.profile import Launch
from dsv4.bench.suites.model.request import COLUMNS, Budget, ModelRequest
from dsv4.bench.suites.random_model import RECIPES, Weights, random_model
from dsv4.bench.suites.whole_model import DecodeStep
from dsv4.config import ModelConfig
from dsv4.layers import HostExperts, _host_memory
from dsv4.layers.host_experts import Hosting, hosted_of
from dsv4.testing.models import random_model as plain_model
from tests.speculation.dspark_cases import DSPARK

CPU = torch.device("cpu")
RATES = environment.Rates(0.02, 0.01, 0.1)
QUICK = ["--steps", "2", "--repeat", "1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "rates", lambda device: RATES)


def run(*arguments: str) -> int:
    return main(["model", *QUICK, *arguments])


def document_of(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    validate(content)
    return content


def request_of(**changes: Any) -> ModelRequest:
    values = {
        "preset": "tiny",
        "config": ModelConfig.tiny(),
        "weights": Weights(),
        "checkpoint": None,
        "tokens": (1,),
        "contexts": (8,),
        "prompts": (),
        "columns": COLUMNS,
        "steps": 2,
        "replays": 1,
        "prefill_limit": 1000,
        "budget": Budget(),
        "device": CPU,
    }
    return ModelRequest(**{**values, **changes})


class TestOnCpu:
    def test_a_model_is_measured_and_written(self, tmp_path: Path, capsys):
        path = tmp_path / "out" / "m.json"
        sizes = ["--experts", "2", "--layers", "3", "--tokens", "1,5", "--context", "17"]
        stored = ["--recipe", "nvidia", "--weights", "mxfp4-cast", "--activation", "fp8"]
        assert run(*sizes, "--prompts", "7", "--out", str(path), *stored) == 0
        document = document_of(path)
        assert document["header"]["command"].startswith("python -m dsv4.bench model")
        assert [(row["tokens"], row["context"]) for row in document["rows"]] == [(1, 17), (5, 17)]
        expected = {
            "preset": "tiny",
            "experts": 2,
            "experts_of_model": 8,
            "layers": 3,
            "layers_of_model": 4,
        }
        expected |= {"weights": "mxfp4-cast", "recipe": "nvidia", "routing": "random"}
        expected |= {"ranks": 1, "emulated": False, "parallel": "tp", "activation": "fp8"}
        for row in (*document["rows"], *document["prompts"]):
            assert row["model"] == expected
            assert row["failed"] == []
        for row in document["rows"]:
            assert row["experts_read"] == 2, "two experts are all that a token can choose"
            assert min(row[name] for name in ("eager_ms", "runner_ms", "generate_ms")) > 0
            without = {"step_ms", "kernels_ms", "launches", "capture_s"}
            assert set(row["missing"]) == {*without, "deterministic_ms"}
            assert row["missing"]["step_ms"] == "needs a CUDA GPU, the device is cpu"
            assert row["bytes_ms"] == pytest.approx(row["bytes"] / (RATES.read_tbs * 1e9))
        (prompt,) = document["prompts"]
        assert prompt["prompt"] == 7
        assert min(prompt[name] for name in ("first_ms", "generate_ms", "runner_ms")) > 0
        printed = capsys.readouterr().out.splitlines()
        assert printed[-1] == "MEASURED: 2 rows, 1 prompts"
        assert max(map(len, printed)) <= 120
        assert f"wrote {path}" in printed

    def test_a_rank_with_emulated_peers(self, tmp_path: Path, capsys):
        """Rank 0's share: its bytes, its experts, and the step that the planner computes."""
        paths = [tmp_path / "whole.json", tmp_path / "rank.json"]
        sizes = ["--layers", "1", "--tokens", "1,2", "--context", "8", "--prompts", "none"]
        for path, more in zip(paths, ([], ["--emulate-peers", "2"]), strict=True):
            columns = ["--columns", "eager,runner", "--out", str(path)]
            assert run(*sizes, *columns, *more) == 0
        whole, rank = map(document_of, paths)
        assert {(r["model"]["ranks"], r["model"]["emulated"]) for r in rank["rows"]} == {(2, True)}
        assert rank["start"]["weight_bytes"] < 0.9 * whole["start"]["weight_bytes"]
        for row, of_whole in zip(rank["rows"], whole["rows"], strict=True):
            assert row["failed"] == []
            assert row["bytes"] < of_whole["bytes"]
            assert row["experts_read"] <= min(4, 2 * row["tokens"])
            assert row["experts_uniform"] == of_whole["experts_uniform"] / 2
        (expected,) = rank["expected"]
        parts = [expected[name] for name in ("latency", "bytes", "sums")]
        assert expected["bytes"] == rank["rows"][0]["bytes_ms"]
        assert expected["sums"] == pytest.approx(2 * 5e-3)
        assert expected["total"] == pytest.approx(sum(parts))
        assert whole["expected"] == []
        printed = capsys.readouterr().out
        assert "rank 0 of 2 (tp) with emulated peers on" in " ".join(printed.split())
        parsed = parse(rank)
        assert parsed.rows[0].model.emulated
        assert output_path("out/", rank["header"], parsed.rows[0].model).name.endswith(
            "-model_tiny_nvfp4_emulated_tp2.json"
        )
        # Files of before have none of the fields.
        del whole["expected"]
        for row in whole["rows"]:
            del row["model"]["ranks"], row["model"]["emulated"], row["model"]["parallel"]
        assert parse(whole).rows[0].model.ranks == 1

    def test_a_rank_with_tokens_of_its_own_and_emulated_peers(self, tmp_path: Path, capsys):
        """It has everything but experts, of which its own get the tokens of both ranks."""
        path, whole_path = tmp_path / "rank.json", tmp_path / "whole.json"
        sizes = ["--layers", "1", "--tokens", "3", "--context", "8", "--prompts", "5"]
        columns = ["--columns", "eager,runner,generate", "--out"]
        assert run(*sizes, *columns, str(whole_path)) == 0
        more = ["--emulate-peers", "2", "--parallel", "dp"]
        assert run(*sizes, *columns, str(path), *more) == 0
        document, whole = document_of(path), document_of(whole_path)
        (row,), (of_whole,) = document["rows"], whole["rows"]
        assert row["failed"] == document["prompts"][0]["failed"] == []
        assert row["experts_uniform"] == whole_model.uniform_experts(PRESETS["tiny"](), 6) / 2
        assert 0 < row["experts_read"] <= 4
        assert row["flops"] == of_whole["flops"], "as many choices of an expert, of both ranks"
        assert document["start"]["weight_bytes"] < whole["start"]["weight_bytes"]
        assert "expected" not in document or document["expected"] == []
        model = parse(document).rows[0].model
        assert output_path("out/", document["header"], model).name.endswith("_emulated_dp2.json")
        printed = " ".join(capsys.readouterr().out.split())
        assert "(dp) with emulated peers on the same GPU; tokens are sequences of each" in printed

    @pytest.mark.parametrize(
        ("ranks", "message"),
        [("1", "wanted 2 to 16 ranks"), ("3", "3 ranks, wanted a number that divides vocab_size")],
    )
    def test_ranks_that_there_cannot_be(self, capsys, ranks, message):
        assert run("--emulate-peers", ranks) == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("mode", "message"),
        [
            ("dp", "'dp' in one process, wanted several, which torchrun starts, or"),
            ("pp", "--parallel is 'pp', wanted one of tp, dp"),
        ],
    )
    def test_ways_to_share_a_model_that_there_cannot_be(self, capsys, mode, message):
        assert run("--parallel", mode) == 2
        assert message in capsys.readouterr().err

    def test_ranks_with_tokens_of_their_own_decode_no_sequence_alone(self):
        options = {"ranks": 2, "parallel": "dp"}
        with pytest.raises(UsageError, match="--columns has 'deterministic' with --parallel dp"):
            request_of(**options).check_ranks()
        shares = {"columns": ("runner",), "config": ModelConfig.tiny(n_routed_experts=9)}
        with pytest.raises(UsageError, match="2 ranks, wanted a number that divides n_routed_exp"):
            request_of(**options, **shares).check_ranks()

    def test_a_folder_is_named_after_the_device(self, tmp_path: Path):
        assert run("--prompts", "none", "--columns", "eager", "--out", f"{tmp_path}/") == 0
        folder = tmp_path / "results" / environment.slug(environment.device_name(CPU))
        (path,) = folder.iterdir()
        document = document_of(path)
        assert path.name == f"{document['header']['date'][:10]}-model_tiny_nvfp4.json"
        (row, _) = document["rows"]
        assert row["missing"]["runner_ms"] == "not in --columns"

    def test_nothing_begins_after_the_limit(self, tmp_path: Path, capsys):
        path = tmp_path / "m.json"
        assert run("--limit", "0", "--prompts", "5", "--out", str(path)) == 0
        document = document_of(path)
        for row in (*document["rows"], *document["prompts"]):
            reasons = {*row["missing"].values()} - {"not in --columns"}
            assert reasons == {"not begun: --limit is 0 s, which had passed"}
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == "MEASURED: 2 rows, 1 prompts; 19 figures not begun (--limit)"

    @pytest.mark.slow
    def test_long_contexts_share_a_prompt_in_the_runner(self, monkeypatch, tmp_path: Path):
        tokens: list[int] = []
        path = tmp_path / "m.json"
        row_prompts = measure.Measurement._row_prompts

        def counted(self: Any, *arguments: Any) -> Any:
            def count(module: Any, inputs: Any) -> None:
                tokens.append(inputs[0].numel())

            self.model.model.register_forward_pre_hook(count)
            return row_prompts(self, *arguments)

        monkeypatch.setattr(measure.Measurement, "_row_prompts", counted)
        sizes = ["--tokens", "3", "--context", "400", "--prefill-limit", "500"]
        columns = ["--prompts", "none", "--columns", "runner,generate"]
        assert run(*sizes, *columns, "--out", str(path)) == 0
        (row,) = document_of(path)["rows"]
        assert row["runner_fill"] == "1 prompt of 384 tokens, its pages shared"
        assert row["runner_ms"] > 0
        assert sum(tokens) < 500, "one prompt, and 16 tokens of each sequence"
        reason = "3 prompts of 400 tokens are 1200 tokens to process, --prefill-limit is 500"
        assert row["missing"]["generate_ms"] == reason

    def test_a_deterministic_runner_is_a_column_of_its_own(self, tmp_path: Path, capsys):
        path = tmp_path / "m.json"
        sizes = ["--tokens", "3", "--context", "9", "--layers", "1", "--prompts", "none"]
        assert run(*sizes, "--columns", "runner,deterministic", "--out", str(path)) == 0
        (row,) = document_of(path)["rows"]
        assert row["deterministic_ms"] > row["runner_ms"], "three steps of one sequence"
        printed = capsys.readouterr().out.splitlines()
        assert sum("deterministic" in line.split() for line in printed) == 1
        assert max(map(len, printed)) <= 120

    @pytest.mark.parametrize("method", ["mtp", "dspark"])
    def test_drafts_are_timed_with_a_forced_share(self, method: str, tmp_path: Path, capsys):
        path = tmp_path / "m.json"
        drafts = ["--speculate", method, "--draft-tokens", "2", "--accept", "0.5"]
        sizes = ["--tokens", "1", "--context", "9", "--layers", "3", "--prompts", "none"]
        assert run(*sizes, *drafts, "--steps", "8", "--columns", "eager", "--out", str(path)) == 0
        rows = document_of(path)["speculation"]
        assert [row["drawn"] for row in rows] == ["uniform", "zipf 1"]
        for row in rows:
            assert (row["method"], row["drafts"]) == (method, 2)
            assert (row["forced"], row["share"]) == (True, 0.5)
            assert row["drafted"] == row["verified"] == 2 * 8
            assert row["threshold"] == ("0" if method == "dspark" else "")
            assert 0 < row["accepted"] < row["drafted"]
            assert row["length"] == pytest.approx(1 + row["accepted"] / 8)
            assert row["token_ms"] == pytest.approx(row["step_ms"] / row["length"])
            assert set(row["pass_ms"]) == {"model", "nvfp4"}
            times = [row["draft_ms"], row["plain_ms"], row["single_ms"], row["expert_ms"]]
            assert min(*times, *row["verify_ms"].values(), *row["pass_ms"].values()) > 0
            assert (row["missing"], row["failed"]) == ({}, [])
            assert row["verify_experts"]["1"] == 2
            counts = ["1", "2", "3", "4", "6"]
            for figures in (row["verify_ms"], row["verify_experts"], row["verify_over_single"]):
                assert list(figures) == counts
            read = row["verify_experts"]
            for count in counts:
                more = (read[count] - read["1"]) * row["expert_ms"]
                own = (row["verify_ms"][count] - more) / row["single_ms"]
                assert row["verify_over_single"][count] == pytest.approx(own)
        uniform, zipf = (row["verify_experts"]["6"] for row in rows)
        assert 0 < zipf < uniform < 8
        page = "\n".join(models.sections(parse(document_of(path))))
        for row in rows:
            accepted = f"{row['accepted']} of {row['drafted']} by a seed | {row['drawn']}"
            assert f"| 2 {method} | {accepted} | 1 | 9 | {cell(row['length'])} |" in page
        printed = capsys.readouterr().out.splitlines()
        assert max(map(len, printed)) <= 120
        lines = [line.split() for line in printed]
        assert sum(line[2:6] == ["uniform", "2", method, "0.5"] for line in lines) == 1
        assert sum(line[2:5] == ["zipf", "1", "6"] for line in lines) == 1
        assert printed[-1] == "MEASURED: 1 rows, 0 prompts, 2 with drafts"

    def test_a_checkpoint_s_routers_choose_the_experts_of_drafts(self, tmp_path: Path):
        folder, path = tmp_path / "weights", tmp_path / "m.json"
        config = ModelConfig.tiny(num_hidden_layers=2, num_nextn_predict_layers=1)
        checkpoint.save(plain_model(config, mtp=True), folder, layout="nvidia")
        sizes = ["--tokens", "1", "--context", "9", "--prompts", "none", "--steps", "4"]
        options = ["--checkpoint", str(folder), "--speculate", "mtp", "--columns", "eager"]
        assert run(*sizes, *options, "--out", str(path)) == 0
        (row,) = document_of(path)["speculation"]
        assert (row["drawn"], row["forced"], row["missing"]) == ("", False, {})
        assert row["verify_experts"]["1"] == config.num_experts_per_tok
        older = document_of(path)
        for name in ("drawn", "single_ms", "pass_ms", "verify_experts", "expert_ms", "verified"):
            del older["speculation"][0][name]
        del older["speculation"][0]["verify_over_single"]
        (read_again,) = parse(older).speculation
        assert read_again.verified == row["drafted"]
        assert read_again.verify_ms == row["verify_ms"]
        assert any("routers" in line for line in report.lines(parse(older), profile=False))

    def test_a_checkpoint_s_confidence_leaves_drafts_out(self, tmp_path: Path, capsys):
        folder, path = tmp_path / "weights", tmp_path / "m.json"
        config = ModelConfig.tiny(num_hidden_layers=3, num_nextn_predict_layers=0, dspark=DSPARK)
        checkpoint.save(plain_model(config, 0, torch.bfloat16, mtp=True), folder)
        sizes = ["--tokens", "1", "--context", "9", "--prompts", "none", "--steps", "4"]
        options = ["--checkpoint", str(folder), "--speculate", "dspark", "--columns", "eager"]
        options += ["--confidence-threshold", "0.9"]
        assert run(*sizes, *options, "--out", str(path)) == 0
        (row,) = document_of(path)["speculation"]
        assert row["threshold"] == "0.9"
        assert row["drafted"] == 5 * 4
        assert row["accepted"] <= row["verified"] < row["drafted"]
        words = f"20 drafts made, {row['verified']} verified (threshold {row['threshold']}), "
        assert words in " ".join(capsys.readouterr().out.split())
        page = "\n".join(models.sections(parse(document_of(path))))
        assert f"{row['accepted']} of {row['verified']}, 20 drafted" in page

    @pytest.mark.parametrize(
        ("folder", "option", "threshold", "words"),
        [
            (None, None, 0.0, "0"),
            ("weights", None, None, "by costs"),
            (None, 0.25, 0.25, "0.25"),
            ("weights", 0.0, 0.0, "0"),
        ],
    )
    def test_only_random_weights_verify_all_drafts(self, folder, option, threshold, words):
        config = ModelConfig.tiny(num_hidden_layers=3, num_nextn_predict_layers=0, dspark=DSPARK)
        options = SimpleNamespace(
            speculate="dspark", draft_tokens=None, accept=None, confidence_threshold=option,
            checkpoint=folder,
        )  # fmt: skip
        drafts = request._drafts(options, config)
        assert (drafts.threshold, drafts.threshold_words) == (threshold, words)
        assert [request._drafts(options, config, hosted).tokens for hosted in (0, 1)] == [5, 1]

    def test_experts_in_host_memory_have_hit_rates(self, tmp_path: Path, capsys):
        path = tmp_path / "m.json"
        sizes = ["--tokens", "1", "--context", "9", "--layers", "1", "--prompts", "none"]
        assert run(*sizes, "--host-experts", "2+3+2", "--steps", "12", "--out", str(path)) == 0
        rows = document_of(path)["hosted"]
        assert [row["routing"] for row in rows] == ["uniform", "zipf 0.7", "zipf 1"]
        for row in rows:
            assert (row["static"], row["slots"], row["steps"]) == (2, 3, 12)
            assert (row["missing"], row["captured"]) == ({}, False)
            assert 0 < row["hit_rate"] < 1
            assert row["loaded_bytes"] > 0
            assert row["gather_rate"] > 0
            expert = row["host_bytes"] / 6  # of 8 experts 6 are not static
            assert row["gather_bytes"] % expert == 0
            assert 0 < row["gather_bytes"] <= row["loaded_bytes"] + expert
            assert row["static_bytes"] == pytest.approx(2 * expert, rel=0.1)
            assert row["slot_bytes"] == pytest.approx(3 * expert, rel=0.1)
            assert row["buffer_bytes"] == pytest.approx(4 * expert, rel=0.1)
        assert rows[0]["hit_rate"] < rows[2]["hit_rate"]
        assert "3 with experts in host memory" in capsys.readouterr().out.splitlines()[-1]

    def test_all_ways_to_draw_experts_are_measured_with_host_memory(self):
        ways = [speculation._ways(request_of(host_experts=p)) for p in (None, HostExperts(2, 3))]
        assert ways == [("uniform", "zipf 1"), ("uniform", "zipf 0.7", "zipf 1")]

    @pytest.mark.parametrize("method", ["mtp", "dspark"])
    def test_drafts_with_experts_in_host_memory(
        self, method: str, tmp_path: Path, monkeypatch, capsys
    ):
        """Each kind of step has its hits; with three slots a draft is verified in waves."""
        monkeypatch.setattr(speculation, "VERIFIED", (1,))
        monkeypatch.setattr(speculation, "_ways", lambda request: ("uniform",))
        path = tmp_path / "m.json"
        sizes = ["--tokens", "1", "--context", "9", "--layers", "1", "--prompts", "none"]
        drafts = ["--speculate", method, "--accept", "0.5", "--host-experts", "2+3"]
        assert run(*sizes, *drafts, "--out", str(path)) == 0
        document = document_of(path)
        assert [row["missing"] for row in document["hosted"]] == [{}] * 3
        (row,) = document["speculation"]
        assert (row["missing"], row["failed"]) == ({}, [])
        assert (row["method"], row["drafts"], row["placement"]) == (method, 1, "2+3")
        assert (row["drafted"], row["forced"], row["steps"]) == (2, True, 2)
        assert list(row["hit_rates"]) == ["single", "1", "2", "plain", "drafts"]
        assert list(row["loaded"]) == list(row["hit_rates"])
        assert all(0 <= rate <= 1 for rate in row["hit_rates"].values())
        assert row["loaded"]["2"] > 0
        assert row["waves"] == ["2", "drafts"]
        assert row["verify_over_single"] == {}
        (shown,) = parse(document).speculation
        assert shown.loaded_per_token("drafts") == row["loaded"]["drafts"] / row["length"]
        assert shown.loaded_per_token("2") is None
        page = "\n".join(models.sections(parse(document)))
        assert "| uniform | drafts, in waves | 1 | 9 | 2+3 | " in page
        printed = capsys.readouterr().out.splitlines()
        assert max(map(len, printed)) <= 120
        lines = [line.split() for line in printed]
        assert sum(line[2:6] == ["uniform", "2+3", "drafts", "waves"] for line in lines) == 1
        assert printed[-1].endswith("1 with drafts, 3 with experts in host memory")

    def test_each_loaded_expert_is_counted_once(self):
        """Loads of the steps that are counted alone, not of those that warm up or draft."""
        config = request._with_draft(request._cut("tiny", None, 1), "mtp")
        hosting = Hosting(HostExperts(2, 2), 1)
        model = random_model(config, CPU, Weights(), mtp=True, hosting=hosting)
        row = SpeculationRow(Named(**request_of().named()), tokens=1, placement="2+2")
        experts = speculation.Experts(model)
        (layer,) = hosted_of(model)
        for ids in ([4, 5], [6, 7], [4, 5]):
            layer.fetch(torch.tensor([ids]))
        experts.start()
        for ids in ([4, 5], [0, 6], [1, 0], [7, 6]):
            layer.fetch(torch.tensor([ids]))
        experts.note(row, "single", 1)
        experts.note(row, "ignored", 1)
        assert row.hit_rates == {"single": 6 / 8}
        assert row.loaded == {"single": 2 * layer.layout.row_bytes / 4}
        assert row.waves == []

    @pytest.mark.parametrize("other", [["--columns", "step"], ["--profile"]])
    def test_other_figures_of_experts_in_host_memory_are_refused(self, other: list[str], capsys):
        assert run("--host-experts", "2+3", "--layers", "1", *other) == 2
        assert f"--host-experts is '2+3' with {other[0]}" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("auto", "error: --host-experts is auto, and on a CPU all experts are in host memory"),
            ("some", "wanted auto, or static experts and slots"),
            ("2+1", "slots is 1, wanted 2 to 6"),
            ("2+3+7", "staged is 7, wanted 0 to 6"),
        ],
    )
    def test_a_wrong_placement_is_refused(self, value: str, message: str, capsys):
        assert run("--host-experts", value, "--layers", "1") == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (
                ["--checkpoint", "weights"],
                "with --checkpoint weights, wanted it without: the bench",
            ),
            (["--layers", "1", "--emulate-peers", "2"], "with 2 ranks, wanted one: a model on"),
        ],
    )
    def test_what_host_memory_excludes_is_said_with_a_reason(self, other, message):
        options = parser().parse_args(["model", "--host-experts", "2+3", *other])
        with pytest.raises(UsageError, match=message):
            request._host_experts(options, options.emulate_peers or 1)

    def test_a_checkpoint_is_loaded(self, tmp_path: Path, capsys):
        folder = tmp_path / "weights"
        config = ModelConfig.tiny(num_hidden_layers=2)
        checkpoint.save(plain_model(config, mtp=True), folder, layout="nvidia")
        out = tmp_path / "m.json"
        columns = ["--prompts", "5", "--columns", "eager", "--tokens", "1", "--context", "9"]
        assert run("--checkpoint", str(folder), *columns, "--out", str(out)) == 0
        document = document_of(out)
        assert document["start"]["source"] == "checkpoint loaded"
        (row,) = document["rows"]
        assert row["eager_ms"] > 0
        assert row["model"]["preset"] == "weights"
        assert row["model"]["routing"] == row["model"]["recipe"] == "checkpoint"

    def test_an_interrupt_keeps_what_was_measured(self, monkeypatch, tmp_path: Path, capsys):
        decode = measure.Measurement.decode

        def interrupted(self: Any, tokens: int, context: int) -> DecodeRow:
            if tokens > 1:
                raise KeyboardInterrupt
            return decode(self, tokens, context)

        monkeypatch.setattr(measure.Measurement, "decode", interrupted)
        path = tmp_path / "m.json"
        assert run("--prompts", "none", "--columns", "eager", "--out", str(path)) == 130
        assert len(document_of(path)["rows"]) == 1
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == "STOPPED: 1 rows, 0 prompts; interrupted after 1 of 2 rows"

    def test_a_figure_that_raises_is_a_reason_and_a_failure(self, monkeypatch, tmp_path, capsys):
        def broken(*arguments: Any) -> None:
            raise RuntimeError("out of beans")

        monkeypatch.setattr(measure.Measurement, "_runner_steps", broken)
        path = tmp_path / "m.json"
        arguments = ["--prompts", "none", "--tokens", "1", "--context", "9"]
        assert run(*arguments, "--out", str(path)) == 1
        (row,) = document_of(path)["rows"]
        assert row["missing"]["runner_ms"] == "RuntimeError: out of beans"
        assert row["failed"] == ["runner_ms", "capture_s"]
        assert row["generate_ms"] > 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith("FAILED: 2 figures of 1 rows, 0 prompts: 1 at 9: runner_ms: Runtime")


class FakeGraph:
    """Replays a decode step on the CPU, as a graph would on a GPU."""

    def __init__(self, step: DecodeStep) -> None:
        self.step = step

    def replay(self) -> None:
        self.step.logits.copy_(self.step())


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A CPU whose steps are captured; ``error`` is added to the logits of a capture."""
    launches = [Launch("_small_m_logits_kernel", 5e3), Launch("nvjet", 15e3)]
    fake = SimpleNamespace(error=0.0, captures=2, launches=launches)

    def captured(step: DecodeStep) -> Any:
        step.logits = torch.zeros_like(step())
        graph = FakeGraph(step)
        if fake.error:
            graph.replay = lambda: step.logits.copy_(step() + fake.error)  # type: ignore
        return graph

    monkeypatch.setattr(measure, "has_graphs", lambda device: True)
    monkeypatch.setattr(DecodeStep, "captured", captured)
    monkeypatch.setattr(measure.Runner, "warm_up", lambda runner: fake.captures)
    monkeypatch.setattr(whole_model, "replay_ms", lambda graph, replays: 5.0)
    monkeypatch.setattr(profile, "recorded", lambda call: (call(), 5 * fake.launches)[1])
    return fake


class TestWithGraphs:
    def test_steps_and_kernels(self, graphs, tmp_path: Path, capsys):
        path = tmp_path / "m.json"
        sizes = ["--prompts", "none", "--tokens", "2", "--context", "9", "--layers", "2"]
        assert run(*sizes, "--profile", "--out", str(path)) == 0
        document = document_of(path)
        (row,) = document["rows"]
        assert (row["step_ms"], row["kernels_ms"], row["launches"]) == (5.0, 20.0, 2.0)
        assert row["missing"] == {"deterministic_ms": "not in --columns"}
        assert row["capture_s"] >= 0
        (kernels,) = document["profiles"]
        by_operator = [(row["operator"], row["ms"]) for row in kernels["profile"]["operators"]]
        assert by_operator == [(operators.CUBLAS, 15.0), (operators.ROUTER, 5.0)]
        printed = capsys.readouterr().out
        assert "kernels of the captured step, 20.000 ms in 2 launches" in printed
        last = printed.splitlines()[-1]
        assert last.startswith("MEASURED: 1 rows, 0 prompts; over the step at most: generate ")
        assert len(last) <= 120
        assert last.endswith(" (at 2)")

    def test_a_runner_without_graphs_is_said_to_decode_eagerly(self, graphs, tmp_path: Path):
        graphs.captures = 0
        path = tmp_path / "m.json"
        arguments = ["--prompts", "none", "--columns", "runner", "--context", "9", "--tokens", "1"]
        assert run(*arguments, "--layers", "1", "--out", str(path)) == 0
        (row,) = document_of(path)["rows"]
        assert row["runner_ms"] > 0
        reason = "the runner decodes eagerly, for the reason that it logged"
        assert row["missing"]["capture_s"] == reason

    def test_a_captured_step_that_is_wrong_is_not_timed(self, graphs, tmp_path: Path):
        graphs.error = 1e-3
        path = tmp_path / "m.json"
        arguments = ["--prompts", "none", "--columns", "step,kernels,eager", "--context", "9"]
        assert run(*arguments, "--out", str(path)) == 1
        for row in document_of(path)["rows"]:
            assert row["step_ms"] is None
            assert "not bitwise those of the eager step" in row["missing"]["step_ms"]
            assert row["eager_ms"] > 0

    def test_nothing_is_timed_after_the_profiler_was_used(self, graphs, monkeypatch):
        order: list[str] = []
        monkeypatch.setattr(
            whole_model, "replay_ms", lambda *arguments: (order.append("time"), 5.0)[1]
        )
        monkeypatch.setattr(
            profile, "recorded", lambda call: (order.append("profile"), graphs.launches)[1]
        )
        arguments = ["--prompts", "none", "--columns", "step,kernels", "--context", "9"]
        assert run(*arguments, "--layers", "1") == 0
        assert order == ["time", "time", "profile", "profile"]

    def test_without_a_profiler_the_column_says_why(self, graphs, tmp_path: Path):
        graphs.launches = []
        path = tmp_path / "m.json"
        arguments = ["--prompts", "none", "--columns", "step,kernels", "--context", "9"]
        assert run(*arguments, "--out", str(path)) == 0
        for row in document_of(path)["rows"]:
            assert row["step_ms"] == 5.0
            assert row["missing"]["kernels_ms"] == (
                "torch.profiler recorded no kernels: CUPTI is not available"
            )


class TestOptions:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--preset", "huge"], "--preset is 'huge', wanted one of tiny, flash, pro"),
            (["--experts", "1"], "--experts is 1, wanted 2 (chosen per token) to 8, which tiny"),
            (["--experts", "9"], "--experts is 9, wanted 2"),
            (["--layers", "5"], "--layers is 5, wanted 1 to 4, which tiny has"),
            (["--layers", "0"], "argument --layers: 0 is below 1"),
            (["--tokens", "1,x"], "argument --tokens: 'x' is no integer, wanted 1 or more"),
            (["--limit", "-1"], "argument --limit: '-1' is no time, wanted 0 seconds or more"),
            (["--limit", "nan"], "argument --limit: 'nan' is no time"),
            (["--speculate", "eagle"], "--speculate is 'eagle', wanted one of mtp, dspark"),
            (["--accept", "0.5"], "--accept is 0.5, wanted --speculate with it"),
            (
                ["--speculate", "mtp", "--confidence-threshold", "0.5"],
                "--confidence-threshold is 0.5, wanted none: the mtp draft has no confidence head",
            ),
            (["--speculate", "mtp", "--accept", "2"], "argument --accept: '2' is no share, wanted"),
            (["--speculate", "mtp", "--draft-tokens", "9"], "--draft-tokens is 9, wanted 1 to 8"),
            (["--tokens", "1,1"], "--tokens is 1,1, wanted distinct numbers"),
            (["--weights", "zero"], "--weights is 'zero', wanted one of random, mxfp4-cast"),
            (["--recipe", "fp8"], "--recipe is 'fp8', wanted one of nvfp4, nvidia"),
            (["--activation", "fp4"], "--activation is 'fp4', wanted one of bf16, nvfp4, fp8"),
            (["--columns", "step,speed"], "--columns has 'speed', wanted some of step, kernels"),
            (["--prompts", "0"], "--prompts is '0', wanted numbers of tokens"),
            (["--prompts", "5,x"], "--prompts is '5,x', wanted numbers of tokens"),
            (["--prompts", "1023"], "--prompts has 1023, wanted at most 1022"),
            (["--context", "1020"], "--context is 1020, which needs 1029 positions with 1 seq"),
            (["--columns", "step", "--profile"], "--profile: --columns is step, wanted kernels"),
            (["--csv", "x.csv"], "--csv is not for model"),
            (["--markdown"], "--markdown is not for model"),
            (["--out", "x.svg"], "--out is 'x.svg', wanted a JSON file"),
            (["--checkpoint", "/nowhere"], "--checkpoint is '/nowhere': "),
            (["--checkpoint", "x", "--preset", "tiny"], "--preset cannot be combined"),
        ],
    )
    def test_errors_name_argument_value_and_what_was_wanted(self, arguments, message, capsys):
        assert run(*arguments) == 2
        printed = capsys.readouterr()
        assert message in printed.err
        assert printed.out == "", "nothing was built"

    @given(sequences=st.integers(1, 128), context=st.integers(1, 20000), steps=st.integers(1, 64))
    @example(sequences=64, context=4096, steps=32)
    @example(sequences=64, context=64, steps=4)
    def test_no_sequence_ends_before_all_of_them_were_timed(self, sequences, context, steps):
        new = request_of(steps=steps).new_tokens(sequences, context)
        chunk = min(2048, context + new)  # of a runner for such sequences
        prompt_steps = -(-sequences * context // chunk)
        assert new > prompt_steps + steps


class TestMemory:
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_the_bytes_are_those_of_the_model(self, recipe):
        config = ModelConfig.tiny(n_routed_experts=4)
        request = request_of(config=config, weights=Weights(recipe=recipe))
        size = model_bytes(request)
        model = random_model(config, CPU, request.weights, pack=False)
        held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        assert size.other + size.experts * size.expert == held
        assert size.layer_expert == size.expert // config.num_hidden_layers

    @given(
        expert=st.integers(1, 10**9),
        layers=st.integers(1, 61),
        other=st.integers(0, 10**10),
        available=st.integers(0, 10**11),
    )
    def test_the_largest_number_of_experts_fits_and_one_more_does_not(
        self, expert, layers, other, available
    ):
        size = ModelBytes(layers * expert, expert, other, 1)
        most = size.experts_within(available)
        if most >= 0:
            assert dataclasses.replace(size, experts=most).peak <= available
        assert dataclasses.replace(size, experts=most + 1).peak > available

    def test_memory_of_files_that_were_read_counts_as_free(self, monkeypatch):
        """The page cache gives way: a host that has read a checkpoint has little memory unused."""
        monkeypatch.setattr(_host_memory, "available_bytes", lambda: 7)
        assert memory.free_bytes(torch.device("cpu")) == 7

    def test_what_does_not_fit_is_refused_before_it_is_built(self, monkeypatch, capsys):
        monkeypatch.setattr(memory, "free_bytes", lambda device: 60_000_000_000)
        arguments = ["--preset", "flash", "--tokens", "1", "--context", "4096", "--prompts", "none"]
        assert run(*arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "and 60.0 GB are free on cpu: weights 165.7 GB with --preset flash" in printed.err
        most = int(printed.err.split("wanted --experts ")[1].split()[0])
        assert 80 < most < 90
        monkeypatch.setattr(memory, "free_bytes", lambda device: 5_000_000_000)
        assert run(*arguments) == 2
        assert "no number of experts fits, wanted fewer --layers" in capsys.readouterr().err

    def test_a_row_that_does_not_fit_is_left_out_and_the_others_are_measured(
        self, tmp_path: Path, monkeypatch, capsys
    ):
        """The most sequences and the longest context need not fit together."""
        sizes = ["--layers", "1", "--tokens", "1,3", "--context", "9,70", "--prompts", "none"]
        monkeypatch.setattr(memory, "cache_bytes", lambda config, n, tokens: 10**9 * n * tokens)
        path = tmp_path / "m.json"
        monkeypatch.setattr(memory, "free_bytes", lambda device: 200 * 10**9)
        assert run(*sizes, "--columns", "eager", "--out", str(path)) == 0
        rows = {(row["tokens"], row["context"]): row for row in document_of(path)["rows"]}
        assert len(rows) == 4
        whole = rows.pop((3, 70))
        assert whole["eager_ms"] is None
        assert whole["missing"]["eager_ms"].startswith("left out: the model needs")
        assert all(row["eager_ms"] > 0 for row in rows.values())
        printed = capsys.readouterr().out
        assert "3 sequences at 70 left out: the model needs" in printed
        assert "1 of the rows left out because they do not fit" in printed.splitlines()[-1]

    def test_rows_are_measured_exactly_where_they_fit(self):
        request = request_of(tokens=(1, 7), contexts=(9, 300))
        need = {
            (n, context): model_bytes(request).peak
            + memory.cache_bytes(request.config, n, context + request.new_tokens(n, context))
            for context in request.contexts
            for n in request.tokens
        }
        for free in (*need.values(), *(count - 1 for count in need.values())):
            left_out = {row for row, count in need.items() if count > free}
            if len(left_out) == len(need):
                with pytest.raises(UsageError, match="the model needs"):
                    memory.fitted(request, free)
            else:
                assert memory.fitted(request, free).left_out.keys() == left_out


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_measured_in_every_column(tmp_path: Path, monkeypatch):
    """Flash's sizes, so that every kernel is the one of a whole model."""
    monkeypatch.undo()  # rates of this GPU
    path = tmp_path / "m.json"
    sizes = ["--preset", "flash", "--experts", "8", "--layers", "4", "--steps", "8"]
    rows = ["--tokens", "1,9", "--context", "300", "--prompts", "21"]
    assert main(["model", *sizes, *rows, "--profile", "--out", str(path)]) == 0
    results = document_of(path)
    assert results["start"]["compiled_later"] == {}
    for row in results["rows"]:
        assert set(row["missing"]) == {"deterministic_ms"}
        assert row["bytes_ms"] < row["step_ms"] < row["eager_ms"]
        assert 0.5 * row["step_ms"] < row["kernels_ms"]
    for row in results["profiles"]:
        times = {entry["operator"]: entry["ms"] for entry in row["profile"]["operators"]}
        assert times.get(operators.OTHER, 0.0) < 0.02 * row["profile"]["ms"]
        assert {operators.NVFP4_GEMM, operators.EXPERTS, operators.ATTENTION} <= set(times)


@pytest.mark.gpu
def test_drafts_with_experts_in_host_memory_on_a_gpu(tmp_path: Path, monkeypatch):
    """Flash's sizes; the slots hold two tokens, so more are verified in waves."""
    monkeypatch.undo()  # rates of this GPU
    path = tmp_path / "m.json"
    sizes = ["--preset", "flash", "--experts", "32", "--layers", "4", "--steps", "8"]
    rows = ["--tokens", "1", "--context", "300", "--prompts", "none", "--host-experts", "8+12+3"]
    drafts = ["--speculate", "mtp", "--accept", "0.88"]
    assert main(["model", *sizes, *rows, *drafts, "--out", str(path)]) == 0
    results = document_of(path)
    assert results["start"]["compiled_later"] == {}
    assert [row["drawn"] for row in results["speculation"]] == ["uniform", "zipf 0.7", "zipf 1"]
    for row in (*results["hosted"], *results["speculation"]):
        assert (row["missing"], row["failed"]) == ({}, [])
    for row in results["speculation"]:
        assert row["waves"] == ["4", "6"]
        assert row["accepted"] > 0
        assert row["loaded"]["single"] < row["loaded"]["2"] < row["loaded"]["6"]
        assert row["plain_ms"] < row["step_ms"]
