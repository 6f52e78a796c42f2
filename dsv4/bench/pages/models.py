"""Tables and chart of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsv4.bench.pages.charts import Chart, Series
from dsv4.bench.pages.tables import cell, paragraph, table
from dsv4.bench.suites.model.document import (
    DecodeRow,
    HostedRow,
    ModelResults,
    ProfileRow,
    SpeculationRow,
)
from dsv4.bench.suites.model.report import loads, memory_words, model_words

_STEP: dict[str, Callable[[DecodeRow], float | None]] = {
    "bound": lambda row: row.bound_ms,
    "kernels' sum": lambda row: row.kernels_ms,
    "captured step": lambda row: row.step_ms,
    "runner's step": lambda row: row.runner_ms,
    "generate": lambda row: row.generate_ms,
}
_EAGER: dict[str, Callable[[DecodeRow], float | None]] = {
    "eager": lambda row: row.eager_ms,
    "deterministic": lambda row: row.deterministic_ms,
}


def sections(results: ModelResults) -> list[str]:
    """Return the tables of a file: steps, prompts, start, and kernels by operator."""
    measured = [*results.rows, *results.hosted, *results.prompts]
    return [
        *paragraph(model_words(measured[0].model) + "." if measured else ""),
        *_steps(results.rows),
        *_hosted(results.hosted),
        *_prompts(results),
        *_speculation(results.speculation),
        *_verified(results.speculation),
        *_loaded(results.speculation),
        "",
        *paragraph(start_words(results)),
        *(line for row in results.profiles[:1] for line in _profile(row)),
    ]


def _steps(rows: Sequence[DecodeRow]) -> list[str]:
    if not rows:
        return []
    times = {**_STEP, **_EAGER}
    shown = [n for n, time in times.items() if any(time(row) is not None for row in rows)]
    body = [
        [str(row.tokens), str(row.context), *(cell(times[name](row)) for name in shown)]
        for row in rows
    ]
    return [
        "",
        *paragraph(
            "Milliseconds of a step, in which each sequence gets a token; kernels on several "
            "streams overlap, so their sum exceeds the step:"
        ),
        "",
        *table(["sequences", "context", *shown], body, texts=0),
    ]


def _hosted(rows: Sequence[HostedRow]) -> list[str]:
    """Steps with experts in host memory."""
    if not rows:
        return []
    headings = ["experts", "sequences", "context", "static", "slots", "step", "hits %"]
    headings += ["loaded MB", "GB/s", "alone"]
    body = []
    for row in rows:
        sizes = [str(n) for n in (row.tokens, row.context, row.static, row.slots)]
        hits = None if row.hit_rate is None else 100 * row.hit_rate
        loaded = None if row.loaded_bytes is None else row.loaded_bytes / 1e6
        figures = (row.step_ms, hits, loaded, row.loaded_rate, row.gather_rate)
        body.append([row.routing, *sizes, *map(cell, figures)])
    words = (
        "Milliseconds of a step with experts in host memory, other experts in every step; static "
        "experts and slots of a layer on the GPU; bytes loaded in a step, and these over its time; "
        "alone: GB/s of the kernels that load as many experts, without the rest of the step:"
    )
    if all(row.gather_rate is None for row in rows):  # an older file
        headings, body = headings[:-1], [cells[:-1] for cells in body]
        words = words.partition("; alone")[0] + ":"
    memory = [line for text in memory_words(rows) for line in ("", *paragraph(text))]
    return ["", *paragraph(words), "", *table(headings, body, texts=1), *memory]


def _prompts(results: ModelResults) -> list[str]:
    if not results.prompts:
        return []
    body = [
        [str(row.prompt), *map(cell, (row.flops_ms, row.runner_ms, row.generate_ms, row.first_ms))]
        for row in results.prompts
    ]
    headings = ["prompt tokens", "bound by operations", "runner", "generate", "first generate"]
    return ["", "Milliseconds to the first token:", "", *table(headings, body, texts=0)]


def _speculation(rows: Sequence[SpeculationRow]) -> list[str]:
    """Steps with drafts: how many were accepted, and what they brought."""
    if not rows:
        return []
    headings = ["drafts", "accepted", "experts", "sequences", "context", "tokens a step"]
    headings += ["step without", "step", "per token", "gain"]
    body = []
    for row in rows:
        accepted = f"{row.accepted} of {row.verified}" + " by a seed" * row.forced
        if row.verified != row.drafted:
            accepted += f", {row.drafted} drafted"
        numbers = (row.length, row.plain_ms, row.step_ms, row.token_ms, row.gain)
        sizes = [str(row.tokens), str(row.context)]
        texts = [f"{row.drafts} {row.method}", accepted, row.drawn or "of routers"]
        body.append([*texts, *sizes, *map(cell, numbers)])
    words = "Milliseconds with drafts; tokens a step and per token are of each sequence:"
    return ["", *paragraph(words), "", *table(headings, body, texts=3)]


def _verified(rows: Sequence[SpeculationRow]) -> list[str]:
    """The main model's part of a step, by tokens of a sequence that it verifies."""
    rows = [row for row in rows if row.verify_over_single]
    if not rows:
        return []
    counts = list(dict.fromkeys(count for row in rows for count in row.verify_over_single))
    body = []
    for row in rows:
        times = [row.single_ms, *(row.verify_ms.get(count) for count in counts)]
        ratios = ["", *(cell(row.verify_over_single.get(count)) for count in counts)]
        name = f"{row.method}, {row.drawn or 'of routers'}"
        body += [[name, *map(cell, times)], [f"{name}: ratio", *ratios]]
    words = (
        "Milliseconds of the main model's part of a step, by the tokens of a sequence that it "
        "verifies; single: a step of one token without drafts. The ratio to single is without the "
        "time of reading the experts that a single step does not read:"
    )
    return ["", *paragraph(words), "", *table(["experts", "single", *counts], body)]


def _loaded(rows: Sequence[SpeculationRow]) -> list[str]:
    """What steps with drafts load, and those without, with experts in host memory."""
    rows = [row for row in rows if row.placement]
    if not rows:
        return []
    body = []
    for row in rows:
        for step, figures in loads(row).items():
            sizes = [str(row.tokens), str(row.context), row.placement]
            name = f"{step}, in waves" if step in row.waves else step
            body.append([row.drawn, name, *sizes, *map(cell, figures)])
    headings = ["experts", "step", "sequences", "context", "static+slots", "ms", "hits %"]
    headings += ["loaded MB", "MB a token", "GB/s"]
    words = (
        "Milliseconds of steps with experts in host memory, other experts in every step; plain and "
        "drafts: of the runner; single, and by numbers of tokens of a sequence: the main model's "
        "part; steps whose experts the slots cannot hold are eager and in waves; bytes loaded in a "
        "step, for each token that it brings, and over its time:"
    )
    return ["", *paragraph(words), "", *table(headings, body, texts=2)]


def start_words(results: ModelResults) -> str:
    """Say how long a start took, in a sentence or two."""
    start = results.start
    words = f"Start: {start.source} in {start.weights_s:.1f} s"
    words += f" ({start.weight_bytes / 1e9:.1f} GB)"
    if start.kernels:
        words += f", {start.kernels} kernels in {start.kernels_s:.1f} s"
        words += f", {start.kernels_compiled or 'none'} of them compiled and the others loaded"
    return words + "."


def _profile(row: ProfileRow) -> list[str]:
    profile = row.profile
    body = [
        [op.operator, cell(op.ms), f"{100 * op.ms / profile.ms:.1f}", f"{op.launches:.0f}"]
        for op in profile.operators
    ]
    sequences = "1 sequence" if row.tokens == 1 else f"{row.tokens} sequences"
    return [
        "",
        f"Kernels of the captured step of {sequences} at {row.context}, by operator:",
        "",
        *table(["operator", "ms", "%", "launches"], body),
    ]


def chart(results: ModelResults, gpu: str, date: str) -> Chart | None:
    """Return bars of every row; None if there are not two to compare."""
    if len(results.rows) < 2:
        return None
    labels = tuple(f"{row.tokens} at {row.context}" for row in results.rows)
    series = []
    for name, time in _STEP.items():
        values = [time(row) for row in results.rows]
        if any(value is not None for value in values):
            rounded = tuple(None if value is None else round(value, 4) for value in values)
            series.append(Series(name, rounded))
    notes = (f"{gpu}, {date}", model_words(results.rows[0].model))
    title = "Decoding: a step, in which each sequence gets one token"
    across = "sequences at context"
    return Chart("bars", title, notes, across, "ms per step", labels, tuple(series))
