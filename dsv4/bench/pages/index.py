"""Index pages: one of each GPU, and one of all GPUs and of published figures."""

from __future__ import annotations

import re

from dsv4.bench.pages import models, operators
from dsv4.bench.pages.charts import Chart
from dsv4.bench.pages.folder import Published, ResultFile, ResultsFolder
from dsv4.bench.pages.tables import paragraph, table
from dsv4.bench.suites import crossover_results

WRITTEN = "`python -m dsv4.bench report` writes this page from the JSON files beside it."
_TITLES = {
    "all_reduce": "Sums over ranks",
    "attention": "Sparse attention",
    "attention_layer": "Attention sublayer",
    "crossover": "FP8 and bfloat16 GEMMs by tokens",
    "indexer": "Indexer",
    "layer": "A layer between its GEMMs",
    "moe": "Routed experts and the MoE layer",
    "moe_fp8": "Routed experts, FP8 activations",
}
_PARTS = {
    "gemm": "GEMM",
    "model": "Whole model",
    "flash": "Flash",
    "pro": "Pro",
    "nvfp4": "NVFP4",
    "mtp": "drafts by MTP",
    "dspark": "drafts by DSpark",
    "host-experts": "experts in host memory",
    "fp8": "FP8 activations",
}


def title(suite: str) -> str:
    """Return a heading: ``"GEMM, Pro"``."""
    if suite in _TITLES:
        return _TITLES[suite]
    named = re.sub(r"emulated_([td]p)(\d+)", r"\1\2_emulated rank of \2", suite)
    named = named.replace("host_experts", "host-experts")
    parts = [_PARTS.get(part, _mode(part)) for part in named.split("_")]
    if parts[0] == _PARTS["model"] and parts[-1].isdigit():
        parts[-1] = f"context {parts[-1]}"
    return ", ".join([parts[0].replace("_", " "), *(part.replace("-", " ") for part in parts[1:])])


def _mode(part: str) -> str:
    """``"tp2"`` in words; any other part as it is."""
    if part.startswith("tp") and part[2:].isdigit():
        return "tensor parallel"
    return "data parallel" if part.startswith("dp") and part[2:].isdigit() else part


def chart_of(file: ResultFile) -> Chart | None:
    """Return the chart of a file; None where it has none."""
    gpu = file.machine
    if file.model is not None:
        return models.chart(file.model, gpu, file.date)
    return operators.chart(file, gpu)


def gpu_page(folder: ResultsFolder, gpu: str) -> str:
    """Return the page of a GPU."""
    files = list(folder.newest(gpu))
    lines = [f"# {files[0].machine}", "", *paragraph(WRITTEN + _HOW), ""]
    lines += [f"- [{title(file.suite)}](#{_anchor(title(file.suite))})" for file in files]
    for file in files:
        lines += ["", f"## {title(file.suite)}", "", *_origin(file), ""]
        if chart_of(file) is not None:
            lines += [f"![{title(file.suite)}]({file.path.with_suffix('.svg').name})", ""]
        lines += _content(file)
    older = [file for file in folder.gpus[gpu] if file not in files]
    if older:
        links = ", ".join(f"[{file.path.name}]({file.path.name})" for file in older)
        lines += ["", "## Older files", "", *paragraph(links)]
    return "\n".join(lines) + "\n"


def _content(file: ResultFile) -> list[str]:
    if file.model is not None:
        return models.sections(file.model)
    if file.crossovers:
        body = crossover_results.body(file.crossovers)
        headings = crossover_results.headings(file.crossovers)
        return [*table(headings, body, texts=2), "", *paragraph(crossover_results.EXPLAINED)]
    return operators.sections(file)


_HOW = (
    " [Benchmarking](../../docs/benchmarking.md) says how times are taken. The bound of a row is "
    "what its bytes take at the GPU's measured rate of reading, or its operations at the measured "
    "rate of a bfloat16 GEMM, whichever is longer."
)


def _anchor(heading: str) -> str:
    plain = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return plain.replace(" ", "-")


def _origin(file: ResultFile) -> list[str]:
    header = file.header
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    lines = paragraph(
        f"[{file.path.name}]({file.path.name}): {file.date}, driver {header['driver']}, "
        f"{versions}, commit {header['commit']}; read {header['read_tbs']:.3g} TB/s, copy "
        f"{header['copy_tbs']:.3g} TB/s, bf16 GEMM {header['bf16_tflops']:.3g} TFLOP/s."
    )
    return [*lines, "", "```", *str(header["command"]).replace(" && ", "\n").split("\n"), "```"]


def root_page(folder: ResultsFolder) -> str:
    """Return the page of all GPUs."""
    lines = ["# Results", "", *paragraph(WRITTEN.replace(" beside it", " below it")), ""]
    body = []
    for gpu, files in folder.gpus.items():
        suites = "; ".join(title(file.suite) for file in folder.newest(gpu))
        dates = sorted({file.date for file in files})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        body.append([f"[{files[0].machine}]({gpu}/index.md)", suites, when])
    lines += table(["GPU", "what was measured", "when"], body, texts=3)
    if folder.published:
        lines += ["", "## Published figures of others", ""]
        lines += paragraph(
            "Milliseconds per token of one request, as published; not measured here. Their data is "
            "[published.json](published.json)."
        )
        lines += ["", *published_table(folder.published)]
    return "\n".join(lines) + "\n"


def published_table(figures: tuple[Published, ...]) -> list[str]:
    """Return the table of published figures with the source of each."""
    body = [
        [
            f.system,
            f.gpus,
            f.model,
            f"{f.ms_per_token:.2f}",
            f"drafts: {f.drafts}; {f.note} ([{f.published}]({f.source}), read {f.read})",
        ]
        for f in figures
    ]
    lines = table(["system", "GPUs", "model", "ms/token", "how, and source"], body, texts=5)
    lines[1] = "|---|---|---|---:|---|"
    return lines
