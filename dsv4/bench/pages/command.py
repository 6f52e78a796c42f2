"""``report``: write pages and charts, or check that they are up to date."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dsv4.bench.pages import charts, index, readme
from dsv4.bench.pages.charts import Chart
from dsv4.bench.pages.folder import ResultsFolder
from dsv4.bench.problem import UsageError

README = "README.md"


@dataclass(frozen=True)
class Report:
    """Content of the pages and charts of a folder.

    Attributes:
        pages: Text by path.
        charts: Chart by path.
        left_over: Charts of files of results that are gone.
    """

    pages: dict[Path, str]
    charts: dict[Path, Chart]
    left_over: list[Path] = field(default_factory=list)

    @classmethod
    def of(cls, folder: ResultsFolder, document: Path | None) -> Report:
        """Make the report of a folder, and of a document with blocks if there is one."""
        pages = {folder.root / "index.md": index.root_page(folder)}
        drawn: dict[Path, Chart] = {}
        left_over: list[Path] = []
        for gpu in folder.gpus:
            pages[folder.root / gpu / "index.md"] = index.gpu_page(folder, gpu)
            for file in folder.newest(gpu):
                chart = index.chart_of(file)
                if chart is not None:
                    drawn[file.path.with_suffix(".svg")] = chart
            svgs = sorted((folder.root / gpu).glob("*.svg"))
            left_over += [path for path in svgs if path not in drawn and _data(path) is not None]
        if document is not None:
            pages[document] = readme.rewritten(_text(document), folder)
        return cls(pages, drawn, left_over)

    def out_of_date(self) -> list[Path]:
        """Return the files that differ from what they should be, sorted."""
        old = [path for path, text in self.pages.items() if _existing(path) != text]
        old += [path for path, chart in self.charts.items() if _data(path) != chart.data()]
        return sorted([*old, *self.left_over])

    def write(self, redraw: bool) -> list[Path]:
        """Write or remove what is out of date; return the paths.

        Args:
            redraw: Whether to draw charts whose numbers have not changed, too.
        """
        changed = self.out_of_date()
        for path, chart in self.charts.items():
            if redraw or path in changed:
                path.write_text(charts.draw(chart))
        for path, text in self.pages.items():
            if path in changed:
                path.write_text(text)
        for path in self.left_over:
            path.unlink()
        return sorted({*changed, *(self.charts if redraw else ())})


def read(root: Path, document: str | None) -> Report:
    """Return the report of a folder.

    Args:
        root: The folder of results.
        document: Document with blocks; ``"none"``: none; None: the README beside the folder if
            there is one.

    Raises:
        UsageError: if a file is wrong or missing.
    """
    neighbour = root.resolve().parent / README
    if document is None:
        path = _shown(neighbour) if neighbour.exists() else None
    else:
        path = None if document == "none" else Path(document)
    return Report.of(ResultsFolder.read(root), path)


def _shown(path: Path) -> Path:
    """Return the path from here if it is below here."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise UsageError(f"{path}: {error}") from error


def _existing(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _data(path: Path) -> str | None:
    return charts.data_of(path.read_text()) if path.exists() else None


def complaint(paths: list[Path], command: str) -> str:
    """Say in one sentence which files are out of date and what to run."""
    verb = "is" if len(paths) == 1 else "are"
    return f"{', '.join(map(str, paths))} {verb} out of date: run {command}"
