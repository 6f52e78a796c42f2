"""Pages and charts of results: what they hold, that they are up to date, and how bad files fail."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.bench import environment, results
from dsv4.bench.cli import main
from dsv4.bench.pages import charts, command, index, operators, readme
from dsv4.bench.pages.charts import Chart, Series
from dsv4.bench.pages.folder import Published, ResultFile, ResultsFolder
from dsv4.bench.pages.tables import paragraph, table
from dsv4.bench.problem import UsageError
from dsv4.bench.results import Row
from dsv4.bench.suites.model.document import Named, output_path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
HEADER = {
    "gpu": "NVIDIA G1",
    "driver": "d",
    "versions": {"torch": "1"},
    "commit": "c",
    "command": "x && y",
    "date": "2026-01-02 03:04:05",
    "copy_tbs": 1.0,
    "read_tbs": 1.0,
    "bf16_tflops": 1.0,
    "node_us": 0.9,
}
ROWS = [
    Row("gemm", "q_b", {"N": 64, "K": 32}, tokens, "cute", us=2.0 * tokens, bound_us=1.0 * tokens,
        baselines={"cuBLAS": 3.0 * tokens}, match=True)
    for tokens in (1, 8, 64)
]  # fmt: skip
FIGURE = {
    "system": "S 1",
    "gpus": "2 x G",
    "model": "Flash",
    "drafts": "none",
    "ms_per_token": 9.5,
    "note": "one request",
    "source": "https://github.com/o/n/pull/3",
    "published": "2026-06",
    "read": "2026-11-28",
}
committed = pytest.mark.skipif(not RESULTS.exists(), reason="no results beside the package")
drawing = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


def written(root: Path, suite: str = "gemm", date: str = "2026-01-02", **changes: object) -> Path:
    """Write a file of results of a GPU."""
    path = root / "nvidia-g1" / f"{date}-{suite}.json"
    header = {**HEADER, "date": f"{date} 03:04:05", **changes}
    results.write_json(str(path), header, ROWS)
    return path


@committed
class TestCommitted:
    def test_pages_blocks_and_charts_are_up_to_date(self, monkeypatch, capsys):
        monkeypatch.chdir(ROOT)
        status = main(["report", "--check"])
        assert (status, capsys.readouterr().err) == (0, "")

    def test_files_of_a_machine_stay_small(self):
        files = [path for path in RESULTS.rglob("*") if path.is_file()]
        for folder in {path.parent for path in files}:
            assert sum(path.stat().st_size for path in files if path.parent == folder) <= 400_000
        kinds = {path.suffix for path in files}
        assert kinds == {".json", ".svg", ".md"}

    def test_no_page_is_written_by_hand(self):
        pages = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.md")}
        gpus = {path.name for path in RESULTS.iterdir() if path.is_dir()}
        assert pages == {"index.md", *(f"{gpu}/index.md" for gpu in gpus)}

    @pytest.mark.parametrize(
        "path", sorted(RESULTS.rglob("*.json")), ids=lambda p: p.relative_to(RESULTS).as_posix()
    )
    def test_no_folder_of_a_machine_is_named(self, path: Path):
        assert not re.findall(
            r"(?<![\w.:/])/(?:root|home|tmp|work|mnt|usr|opt)\b", path.read_text()
        )

    def test_published_figures_have_a_source_and_dates(self):
        folder = ResultsFolder.read(RESULTS)
        assert {"vLLM", "SGLang"} <= {figure.system.split()[0] for figure in folder.published}


class TestFolder:
    def test_the_newest_file_of_each_suite_comes_first(self, tmp_path):
        for suite, date in (("moe", "2026-01-02"), ("gemm", "2025-12-31"), ("gemm", "2026-02-01")):
            written(tmp_path, suite, date)
        folder = ResultsFolder.read(tmp_path)
        newest = [(file.suite, file.date) for file in folder.newest("nvidia-g1")]
        assert newest == [("gemm", "2026-02-01"), ("moe", "2026-01-02")]
        page = index.gpu_page(folder, "nvidia-g1")
        assert page.count("2025-12-31") == 2, "a link to the older file"

    @pytest.mark.parametrize(
        ("name", "changes", "message"),
        [
            ("gemm.json", {}, "the name is 'gemm.json', wanted <date>-<suite>.json"),
            ("2026-01-03-gemm.json", {}, "the date is '2026-01-03', its header says '2026-01-02'"),
            (
                "2026-01-02-gemm.json",
                {"gpu": "H"},
                "the folder is 'nvidia-g1', its header says 'h'",
            ),
        ],
    )
    def test_names_agree_with_headers(self, name, changes, message, tmp_path, capsys):
        path = tmp_path / "nvidia-g1" / name
        results.write_json(str(path), {**HEADER, **changes}, ROWS)
        assert main(["report", str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"error: {path}: {message}\n"

    def test_results_of_several_gpus_have_a_folder(self, tmp_path, capsys):
        """Sums over processes by NCCL; virtual ranks and emulated peers are on one GPU."""
        rows = [Row("all_reduce", "2 ranks", {"bytes": 8192}, 1, "push", us=7.0, match=True)]
        (path,) = results.write_json(f"{tmp_path}/results/", HEADER, rows)
        assert path.parent.name == "nvidia-g1-x2"
        folder = ResultsFolder.read(path.parent.parent)
        assert "# 2 x NVIDIA G1" in index.gpu_page(folder, "nvidia-g1-x2")
        assert "[2 x NVIDIA G1](nvidia-g1-x2/index.md)" in index.root_page(folder)
        alone = [dataclasses.replace(rows[0], case="2 virtual ranks, push")]
        assert results.write_json(f"{tmp_path}/results/", HEADER, alone)[0] != path
        named = Named("flash", 256, 256, 43, 43, "random", "nvfp4", "random", ranks=2)
        for changes, expected in (
            ({}, "nvidia-g1-x2/2026-01-02-model_flash_nvfp4_tp2.json"),
            ({"parallel": "dp"}, "nvidia-g1-x2/2026-01-02-model_flash_nvfp4_dp2.json"),
            ({"emulated": True}, "nvidia-g1/2026-01-02-model_flash_nvfp4_emulated_tp2.json"),
        ):
            written_to = output_path("out/", HEADER, dataclasses.replace(named, **changes))
            assert written_to.as_posix() == f"out/results/{expected}"
        drafted = output_path("out/", HEADER, named, hosted=True, drafts="mtp").name
        assert drafted == "2026-01-02-model_flash_nvfp4_host_experts_tp2_mtp.json"
        words = "Whole model, Flash, NVFP4, experts in host memory, drafts by MTP"
        assert index.title("model_flash_nvfp4_host_experts_mtp") == words

    @pytest.mark.parametrize("content", ["", "{}", "[1]", '{"schema": "dsv4.bench.model/1"}'])
    def test_what_is_no_file_of_results_is_named(self, content, tmp_path, capsys):
        path = tmp_path / "nvidia-g1" / "2026-01-02-gemm.json"
        path.parent.mkdir()
        path.write_text(content)
        assert main(["report", str(tmp_path), "--check"]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"error: {path}: ")
        assert printed.count("\n") == 1

    def test_a_folder_that_is_not_there(self, tmp_path, capsys):
        assert main(["report", str(tmp_path / "none")]) == 2
        assert "none is no folder, wanted one with" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"ms_per_token": 0}, "ms_per_token is 0, wanted a number > 0"),
            ({"ms_per_token": True}, "ms_per_token is True"),
            ({"source": "a blog"}, "source is 'a blog', wanted an address"),
            ({"published": "June"}, "published is 'June', wanted YYYY-MM"),
            ({"read": ""}, "read is '', wanted a text"),
        ],
    )
    def test_a_published_figure_is_whole(self, changes, message, tmp_path, capsys):
        (tmp_path / "published.json").write_text(json.dumps({"figures": [{**FIGURE, **changes}]}))
        assert main(["report", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err

    def test_an_unknown_field_of_a_figure_is_named(self, tmp_path, capsys):
        (tmp_path / "published.json").write_text(json.dumps({"figures": [{**FIGURE, "x": 1}]}))
        assert main(["report", str(tmp_path)]) == 2
        assert "'x'" in capsys.readouterr().err


class TestCommand:
    @drawing
    def test_what_was_written_is_up_to_date_and_written_once(self, tmp_path, capsys):
        path = written(tmp_path)
        assert main(["report", str(tmp_path)]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 3
        assert path.with_suffix(".svg").exists()
        assert main(["report", str(tmp_path)]) == 0
        assert main(["report", str(tmp_path), "--check"]) == 0
        assert capsys.readouterr().out == ""

    @drawing
    def test_what_is_out_of_date_is_one_sentence(self, tmp_path, capsys):
        path = written(tmp_path)
        main(["report", str(tmp_path)])
        rows = [dataclasses.replace(row, us=row.us + 1) for row in ROWS]
        results.write_json(str(path), HEADER, rows)
        capsys.readouterr()
        assert main(["report", str(tmp_path), "--check"]) == 1
        page = tmp_path / "nvidia-g1" / "index.md"
        assert capsys.readouterr().err == (
            f"{path.with_suffix('.svg')}, {page} are out of date: run python -m dsv4.bench report\n"
        )

    @drawing
    def test_a_chart_without_results_is_removed(self, tmp_path):
        path = written(tmp_path)
        main(["report", str(tmp_path)])
        path.rename(path.with_name("2026-01-02-other.json"))
        svg = path.with_suffix(".svg")
        other = svg.with_name("drawing.svg")
        other.write_text("<svg/>")
        assert svg in command.read(tmp_path, None).out_of_date()
        assert main(["report", str(tmp_path)]) == 0
        assert not svg.exists()
        assert other.exists()

    def test_without_matplotlib_pages_are_checked_and_charts_raise(self, tmp_path, monkeypatch):
        written(tmp_path)
        monkeypatch.setattr(charts.importlib.util, "find_spec", lambda name: None)
        report = command.read(tmp_path, None)
        assert len(report.out_of_date()) == 3
        with pytest.raises(UsageError, match="charts need matplotlib: pip install"):
            report.write(redraw=False)


@pytest.mark.parametrize("backends", [("push",), ("push", "nccl")])
def test_implementations_of_one_case_have_rows_of_their_own(backends, tmp_path):
    rows = [Row("all_reduce", "2 ranks", {"bytes": 8}, 1, b, us=3.0, match=True) for b in backends]
    path = tmp_path / "nvidia-g1-x2" / "2026-01-02-all_reduce.json"
    results.write_json(str(path), HEADER, rows)
    [file] = ResultsFolder.read(tmp_path).newest("nvidia-g1-x2")
    lines = [line for line in operators.sections(file) if line.startswith("| 2 ranks")]
    names = [f"2 ranks, {b}" for b in backends] if len(backends) > 1 else ["2 ranks"]
    assert lines == [f"| {name} | bytes=8 | 3.00 |" for name in names]


def test_modes_of_ranks_are_named_in_headings():
    assert index.title("model_flash_nvfp4_tp2") == "Whole model, Flash, NVFP4, tensor parallel"
    assert index.title("model_pro_nvfp4_dp16") == "Whole model, Pro, NVFP4, data parallel"
    emulated = "Whole model, Flash, NVFP4, tensor parallel, emulated rank of 4"
    assert index.title("model_flash_nvfp4_emulated_tp4") == emulated
    drafts = "Whole model, Flash, NVFP4, tensor parallel, drafts by MTP"
    assert index.title("model_flash_nvfp4_tp2_mtp") == drafts
    sequences = "Whole model, Flash, NVFP4, data parallel, 256 sequences"
    assert index.title("model_flash_nvfp4_dp2_256-sequences") == sequences


class TestReadme:
    @committed
    def test_text_outside_of_the_blocks_stays(self):
        folder = ResultsFolder.read(RESULTS)
        block = "<!-- bench report: model -->\nold\n<!-- bench report: end -->"
        text = readme.rewritten(f"before\n{block}\nafter\n", folder)
        assert text.startswith("before\n<!-- bench report: model -->\n| one request |")
        assert text.endswith("\n<!-- bench report: end -->\nafter\n")
        assert "old" not in text
        assert "2 MTP drafts, 0.88 set as right | **2.8** | 360 |" in text
        assert readme.rewritten(text, folder) == text

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("no block", "found 0 markers and 0 blocks"),
            ("<!-- bench report: model -->\nopen", "found 1 markers and 0 blocks"),
            (
                "<!-- bench report: x -->\n<!-- bench report: end -->",
                "the block is 'x', wanted one",
            ),
            ("<!-- bench report: model -->\n<!-- bench report: end -->", "has no results of model"),
        ],
    )
    def test_what_is_wrong_is_one_sentence(self, text, message, tmp_path, capsys):
        written(tmp_path)
        document = tmp_path / "text.md"
        document.write_text(text)
        assert main(["report", str(tmp_path), "--readme", str(document), "--check"]) == 2
        assert message in capsys.readouterr().err

    def test_of_equal_kinds_the_newest_figure_is_shown(self, tmp_path):
        figures = [Published(**{**FIGURE, "published": day}) for day in ("2026-06", "2026-07-01")]
        other = Published(**{**FIGURE, "gpus": "8 x G"})
        folder = ResultsFolder(tmp_path, {}, (*figures, other))
        assert readme._newest(folder) == [figures[1], other]
        assert readme._source(FIGURE["source"]) == "o/n#3"
        assert readme._source("https://a.b/c/d") == "a.b"


class TestTables:
    @given(st.lists(st.text("ab|\\", max_size=5), min_size=2, max_size=2))
    def test_cells_do_not_end_early(self, texts):
        line = table(["x", "y"], [texts])[2]
        assert len(re.findall(r"(?<!\\)\|", line.replace("\\\\", "  "))) >= 3
        assert line.count("|") == 3 + sum(text.count("|") for text in texts)

    @given(
        st.lists(st.sampled_from(["a", "word", "[l k](x y)", "([a b](c),", "b" * 40])),
    )
    def test_a_paragraph_keeps_its_words_and_breaks_no_link(self, words):
        lines = paragraph(" ".join(words), 30)
        assert " ".join(lines).split() == " ".join(words).split()
        assert all(len(line) <= 30 or line.count(" ") <= 1 for line in lines)
        assert all(line.count("[") == line.count("](") for line in lines)

    def test_a_page_has_times_bounds_and_baselines(self, tmp_path):
        written(tmp_path)
        page = index.gpu_page(ResultsFolder.read(tmp_path), "nvidia-g1")
        assert "| case | sizes | 1 | 8 | 64 |" in page
        assert "| q_b | N=64 K=32 | 2.00 | 16.0 | 128 |" in page
        assert "| q_b | N=64 K=32 | 2.00 | 2.00 | 2.00 |" in page, "time over the bound"
        assert "cuBLAS, its time over ours:\n" in page
        assert "| q_b | N=64 K=32 | 1.50 | 1.50 | 1.50 |" in page
        assert "```\nx\ny\n```" in page
        assert "(2026-01-02-gemm.svg)" in page

    def test_rows_that_failed_have_no_time(self, tmp_path):
        wrong = dataclasses.replace(ROWS[0], us=None, match=False, baselines={})
        file = ResultFile(tmp_path, "2026-01-02", "gemm", HEADER, (wrong, *ROWS[1:]))
        lines = operators.sections(file)
        assert "| q_b | N=64 K=32 | - | 16.0 | 128 |" in lines
        assert lines[-1] == "1 rows failed their check and have no time."


VALUES = st.one_of(st.none(), st.floats(1e-3, 1e5))


@drawing
class TestCharts:
    @pytest.mark.costly(5)
    @pytest.mark.parametrize("kind", ["bars", "lines"])
    @given(values=st.lists(VALUES, min_size=3, max_size=3))
    @example(values=[5.0, None, 842.0])
    @example(values=[None, None, None])
    def test_the_numbers_are_part_of_the_picture(self, kind, values):
        series = (Series("a <b>", tuple(values)), Series("c & d", (1.0, 2.0, 3.0)))
        chart = Chart(kind, "T & t", ("<note>",), "x", "ms", ("1", "8", "64"), series)
        svg = charts.draw(chart)
        assert charts.data_of(svg) == chart.data()
        assert json.loads(chart.data())["series"][0]["values"] == values

    def test_the_same_numbers_give_the_same_bytes(self):
        chart = Chart("bars", "T", ("n",), "x", "ms", ("1",), (Series("a", (2.0,)),))
        assert charts.draw(chart) == charts.draw(chart)

    def test_colours_of_text_and_paper_change_in_a_dark_scheme(self):
        chart = Chart("lines", "T", ("n",), "x", "ms", ("1", "2"), (Series("a", (2.0, 9.0)),))
        svg = charts.draw(chart)
        rules = re.findall(r'\[style\*="fill: (#\w+)"\]\{fill:(#\w+)!important\}', svg)
        used = set(re.findall(r'style="[^"]*?fill: (#\w+)', svg))
        assert {light for light, _ in rules} & used >= {"#1f2933", "#fdfdfe", "#56616c"}
        for light, dark in rules:
            assert (_brightness(light) < 0.5) == (_brightness(dark) > 0.5)
        for colour in (*charts._BARS, *charts._LINES):
            assert 0.3 < _brightness(colour) < 0.75, "visible on white and on black"

    def test_groups_have_no_names_and_something_in_common(self):
        chart = Chart("lines", "T", ("n",), "x", "ms", ("1", "2"), (Series("a", (2.0, 9.0)),))
        svg = charts.draw(chart)
        groups = re.findall(r"<g\b([^>]*)>", svg)
        assert all(re.fullmatch(r' clip-path="[^"]*"', group) for group in groups)
        assert svg.count("</g>") == len(groups) > 0
        assert "rotate(-0" not in svg

    def test_what_is_no_chart_has_no_numbers(self):
        assert charts.data_of("<svg/>") is None
        assert charts.data_of("no picture") is None


def _brightness(colour: str) -> float:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("/home/me/x.json", "x.json"),
        ("--out=/root/out/m.json", "--out=m.json"),
        ("results/", "results/"),
        ("--tokens", "--tokens"),
        ("N=4096,K=7168", "N=4096,K=7168"),
        ("/", "/"),
    ],
)
def test_headers_name_no_folder_of_a_user(argument, shown):
    assert environment._without_folders(argument) == shown


@committed
def test_the_text_of_a_document_is_the_document(tmp_path):
    for path in sorted(RESULTS.glob("*/*.json")):
        content = json.loads(path.read_text())
        text = results.text_of(content)
        assert json.loads(text) == content
        assert text == path.read_text(), f"{path} has another layout"
    shutil.rmtree(tmp_path)
