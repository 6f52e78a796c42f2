"""Tables of the README, between markers.

A marker is a comment, ``<!-- bench report: NAME -->``, and ``<!-- bench report: end -->`` closes
the block. Text outside of the blocks is not touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from dsv4.bench.pages.folder import Published, ResultFile, ResultsFolder
from dsv4.bench.pages.tables import cell, paragraph, table
from dsv4.bench.problem import UsageError
from dsv4.bench.suites.model.document import DecodeRow, ModelResults

GPU, SUITE, LONG_CONTEXT = "nvidia-h100", "model_flash_nvfp4", "model_flash_nvfp4_131072"
GPUS, SPLIT = "nvidia-h200-x2", "model_flash_nvfp4_tp2"
LARGE_GPU, HOSTED = "nvidia-h200", "model_flash_nvfp4_host_experts"
DRAFTED = "model_flash_nvfp4_mtp"
_BLOCK = re.compile(r"<!-- bench report: (?P<name>\w+) -->\n.*?<!-- bench report: end -->", re.S)


def rewritten(text: str, folder: ResultsFolder) -> str:
    """Return a document with its blocks rewritten.

    Raises:
        UsageError: if it has no block, a block that is not known, or results are missing.
    """
    names = [match["name"] for match in _BLOCK.finditer(text)]
    markers = text.count("<!-- bench report: ")
    if not names or markers != 2 * len(names):
        raise UsageError(
            f"README: found {markers} markers and {len(names)} blocks, wanted blocks between "
            "<!-- bench report: NAME --> and <!-- bench report: end -->"
        )
    unknown = [name for name in names if name not in _BLOCKS]
    if unknown:
        raise UsageError(f"README: the block is {unknown[0]!r}, wanted one of {', '.join(_BLOCKS)}")

    def block(match: re.Match[str]) -> str:
        lines = _BLOCKS[match["name"]](folder)
        opening = f"<!-- bench report: {match['name']} -->"
        return "\n".join([opening, *lines, "<!-- bench report: end -->"])

    return _BLOCK.sub(block, text)


def _file(folder: ResultsFolder, suite: str) -> tuple[ResultFile, ModelResults]:
    file = folder.find(GPU, suite)
    if file is None or file.model is None:
        raise UsageError(f"README: {folder.root}/{GPU} has no results of {suite}")
    return file, file.model


def _row(results: ModelResults, tokens: int) -> DecodeRow:
    rows = [row for row in results.rows if row.tokens == tokens and row.generate_ms is not None]
    if not rows:
        raise UsageError(f"README: the results have no generate of {tokens} sequences")
    return rows[0]


def _per_token(what: str, per_token: float, *, bold: bool = False) -> list[str]:
    shown = f"{per_token:.1f}"
    return [what, f"**{shown}**" if bold else shown, f"{1e3 / per_token:.0f}"]


def _split(folder: ResultsFolder) -> list[list[str]]:
    """A step of the whole model over several GPUs, if it was measured."""
    file = folder.find(GPUS, SPLIT)
    if file is None or file.model is None:
        return []
    [step] = [row for row in file.model.rows if row.tokens == 1 and row.context == 4096]
    if step.step_ms is None:
        raise UsageError(f"README: {SPLIT} has no step of one sequence")
    what = (
        f"**dsv4, {file.machine.replace('NVIDIA ', '')}**, whole "
        f"{step.model.preset.capitalize()} \\*, context {step.context}, no drafts, captured step"
    )
    return [_per_token(what, step.step_ms, bold=True)]


def _hosted(folder: ResultsFolder) -> list[list[str]]:
    """Steps of the whole model on one GPU with experts in host memory, if they were measured."""
    file = folder.find(LARGE_GPU, HOSTED)
    if file is None or file.model is None:
        return []
    times = {row.routing: row.step_ms for row in file.model.hosted if row.tokens == 1}
    uniform, skewed = times.get("uniform"), times.get("zipf 1")
    if uniform is None or skewed is None:
        raise UsageError(f"README: {HOSTED} has no steps of one sequence, uniform and zipf 1")
    what = (
        f"**dsv4, 1 x {file.machine.replace('NVIDIA ', '')}**, whole Flash \\*, experts in host "
        "memory, uniform routing"
    )
    return [
        _per_token(what, uniform, bold=True),
        _per_token("the same, routing by Zipf's law, exponent 1", skewed),
    ]


def _drafted(folder: ResultsFolder) -> list[list[str]]:
    """Steps with drafts that a seed accepts, if they were measured."""
    file = folder.find(LARGE_GPU, DRAFTED)
    if file is None or file.model is None:
        return []
    drawn = [row for row in file.model.speculation if row.forced and row.drawn == "uniform"]
    row = next((row for row in drawn if row.tokens == 1), None)
    if row is None or row.token_ms is None:
        raise UsageError(f"README: {DRAFTED} has no forced drafts of one sequence, uniform")
    what = (
        f"**dsv4, 1 x {file.machine.replace('NVIDIA ', '')}**, "
        f"{row.model.preset.capitalize()}, {row.model.experts} "
        f"experts \\*, {row.drafts} {row.method.upper()} drafts, "
        f"{row.share:g} set as right"
    )
    return [_per_token(what, row.token_ms, bold=True)]


def _model(folder: ResultsFolder) -> list[str]:
    """One request beside the published figures."""
    file, results = _file(folder, SUITE)
    near = _row(results, 1)
    named = near.model
    assert near.generate_ms is not None
    ours = (
        f"**dsv4, 1 x H100**, {named.preset.capitalize()} with {named.experts} of "
        f"{named.experts_of_model} experts \\*, context {near.context}, no drafts"
    )
    body = [
        _per_token(ours, near.generate_ms, bold=True),
        *_drafted(folder),
        *_hosted(folder),
        *_split(folder),
        *(_per_token(_published(figure), figure.ms_per_token) for figure in _newest(folder)),
    ]
    reads = sorted({figure.read for figure in folder.published})
    note = (
        "\\* Random weights and routing. With one request, a step of a model with fewer experts "
        "reads as many bytes as a step of the whole model; with many requests it reads fewer. "
        f"On one H100 the bytes alone take at least {near.bytes_ms:.1f} ms "
        f"([all figures]({folder.root.name}/{GPU}/index.md), {file.date}). "
        f"Others' figures are [as published]({folder.root.name}/index.md), read on {reads[-1]}. "
        "[Drafts](docs/speculation.md#speed): the bench sets how many are right."
    )
    headings = ["one request", "ms/token", "tokens/s"]
    return [*table(headings, body), "", *paragraph(note)]


def _newest(folder: ResultsFolder) -> list[Published]:
    """Return the newest figure of each kind of GPUs, model and drafts."""
    ordered = sorted(folder.published, key=lambda figure: figure.published)
    by_kind = {(f.gpus, f.model, f.drafts): f for f in ordered}
    return [figure for figure in folder.published if figure in by_kind.values()]


def _published(figure: Published) -> str:
    drafts = "no drafts" if figure.drafts == "none" else f"{figure.drafts} drafts"
    source = _source(figure.source)
    return f"{figure.system}, {figure.gpus}, {figure.model}, {drafts} ({source})"


def _source(address: str) -> str:
    """A source in short: ``"owner/name#1"`` for a thread on GitHub, else its host."""
    thread = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+)/(?:pull|issues)/(\d+)", address)
    return f"{thread[1]}#{thread[2]}" if thread else address.split("/")[2]


def _speed(folder: ResultsFolder) -> list[str]:
    """Steps of several sequences, prompts, and the start."""
    _, results = _file(folder, SUITE)
    body = [
        [
            f"{row.tokens}, {row.context}",
            *map(cell, (row.bound_ms, row.step_ms, row.generate_ms, row.eager_ms)),
        ]
        for row in results.rows
    ]
    headings = ["sequences, context", "bound by bytes", "captured step", "`generate`", "eager"]
    text = f"{_prompts(results)} {_start(results, _file(folder, LONG_CONTEXT)[1])}"
    return [*table(headings, body), "", *paragraph(text)]


def _prompts(results: ModelResults) -> str:
    """Say when first tokens come."""
    times = {row.prompt: row.generate_ms for row in results.prompts if row.generate_ms is not None}
    lengths, shown = map(str, times), (f"{time:.0f}" for time in times.values())
    return (
        f"With prompts of {_listed(lengths)} tokens `generate` returns the first token after "
        f"{_listed(shown)} ms."
    )


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _start(results: ModelResults, warm: ModelResults) -> str:
    start, again = results.start, warm.start
    present = start.kernels - start.kernels_compiled
    stored = f" ({present} were on disk)" if present else ""
    words = f"The bench warmed up {start.kernels} kernels in {start.kernels_s:.0f} s{stored}"
    if not again.kernels_compiled:
        words += f", in {again.kernels_s:.1f} s with all on disk"
    return words + "."


_BLOCKS: dict[str, Callable[[ResultsFolder], Iterable[str]]] = {"model": _model, "speed": _speed}
