"""Tables and verdict of ``python -m dsv4.bench model``."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4.bench.report import number
from dsv4.bench.suites.model.document import (
    DecodeRow,
    HostedRow,
    Measured,
    ModelResults,
    Named,
    ProfileRow,
    SpeculationRow,
)
from dsv4.bench.suites.model.measure import NOT_ASKED
from dsv4.bench.suites.model.request import LEFT_OUT, NOT_BEGUN
from dsv4.bench.tables import WIDTH, plain, short, wrapped
from dsv4.parallel.context import DATA

_MODEL = ("experts", "layers", "recipe", "routing")
_DECODE = ("tokens", "context", *_MODEL)
_TIMES = ("bytes", "flops", "kernels", "step", "runner", "generate", "eager", "gen / step")
_MORE = ("deterministic",)  # where it was asked for
_PROMPT = ("prompt", *_MODEL, "flops", "runner", "generate", "first", "tokens / s")
_DRAFTED = ("tokens", "context", "routing")
_SPECULATION = (
    "drafts", "accept", "plain", "step", "tokens / step", "per token", "gain", "draft", "pass",
    "nvfp4",
)  # fmt: skip
_HEADS = ("model", "nvfp4")
_VERIFIED = ("verified", "single", "verify", "experts", "more", "ratio")
_HOSTED = (
    "tokens", "context", "routing", "experts", "step", "ms", "hits %", "loaded MB", "GB / s",
    "alone",
)  # fmt: skip
_LOADED = ("step", "how", "ms", "hits %", "loaded MB", "MB / token", "GB / s")
_PROFILE = ("operator", "ms", "share %", "launches", "names")


def lines(results: ModelResults, *, profile: bool) -> list[str]:
    """Yield everything that is printed but the verdict.

    Args:
        results: What was measured.
        profile: Whether to print kernels by operator; of several ranks they are always printed.
    """
    return [
        *_start(results),
        *_decode(results.rows),
        *_expected(results),
        *_prompts(results),
        *_speculation(results.speculation),
        *_hosted(results.hosted),
        *(line for row in _profiled(results, profile) for line in profile_lines(row)),
        *_missing(results),
    ]


def _profiled(results: ModelResults, profile: bool) -> list[ProfileRow]:
    return [row for row in results.profiles if profile or row.model.ranks > 1]


def model_words(named: Named) -> str:
    """A model in a line."""
    words = (
        f"{named.preset}, {_experts(named)} experts, {_layers(named)} layers, {named.recipe} "
        f"recipe, weights {named.weights}, routing {named.routing}"
    )
    if named.activation != "bf16":
        words += f", {named.activation} activations"
    if named.ranks > 1:
        words += f", rank 0 of {named.ranks} ({named.parallel})"
    if named.emulated:
        words += " with emulated peers on the same GPU"
    if named.parallel == DATA:
        words += "; tokens are sequences of each rank"
    return words


def _experts(named: Named) -> str:
    return f"{named.experts}/{named.experts_of_model}"


def _layers(named: Named) -> str:
    return f"{named.layers}/{named.layers_of_model}"


def _model_cells(named: Named) -> tuple[str, ...]:
    return _experts(named), _layers(named), named.recipe, named.routing


def _ms(value: float | None) -> str:
    return "-" if value is None else number(value)


def _start(results: ModelResults) -> list[str]:
    every = _measured(results)
    start, words = results.start, []
    if every:
        words.append(f"model  {model_words(every[0].model)}")
    process = "" if start.process_s is None else f"process {start.process_s:.1f} s, "
    first = next((row for row in results.prompts if row.first_ms is not None), None)
    prompt = ""
    if first is not None and first.first_ms is not None:
        seconds = first.first_ms / 1e3
        prepared = start.prepare_s or 0.0
        total = (start.process_s or 0.0) + start.weights_s + start.kernels_s + prepared + seconds
        prompt = f", first prompt {seconds:.2f} s ({first.prompt} tokens), together {total:.1f} s"
    memory = f"{start.weight_bytes / 1e9:.3g} GB"
    if start.peak_bytes:
        memory += f", peak {start.peak_bytes / 1e9:.3g} GB"
    kernels = ""
    if start.kernels:
        later = sum(start.compiled_later.values())
        kernels = (
            f", {start.kernels} kernels {start.kernels_s:.1f} s "
            f"({start.kernels_compiled} compiled, {later} more later)"
        )
    if start.prepare_s is not None:
        kernels += f", generate prepared {start.prepare_s:.1f} s"
        kernels += f" ({start.prepare_bytes / 1e9:.2f} GB)"
    words.append(
        f"start  {process}{start.source} {start.weights_s:.1f} s ({memory}){kernels}{prompt}"
    )
    return [line for text in words for line in wrapped(text)]


def _decode(rows: Sequence[DecodeRow]) -> list[str]:
    if not rows:
        return []
    body, more = [], any(row.deterministic_ms is not None for row in rows)
    for row in rows:
        ratio = row.over_step(row.generate_ms)
        times = (row.bytes_ms, row.flops_ms, row.kernels_ms, row.step_ms, row.runner_ms)
        cells = [_ms(ms) for ms in (*times, row.generate_ms, row.eager_ms)]
        cells.append("-" if ratio is None else f"{ratio:.3f}")
        cells += [_ms(row.deterministic_ms)] * more
        body.append([str(row.tokens), str(row.context), *_model_cells(row.model), *cells])
    lines = [
        "",
        "ms per step, in which each of the sequences gets one token; bytes and flops: bounds",
    ]
    lines += plain((*_DECODE, *_TIMES, *(_MORE if more else ())), body, len(_DECODE))
    for row in rows:
        if row.experts_read is not None:
            lines += wrapped(
                f"{row.tokens} at {row.context}: {row.experts_read:.1f} experts of a layer read "
                f"(uniform {row.experts_uniform:.1f}); cache of the step: {row.fill}"
                + (f"; of the runner: {row.runner_fill}" if row.runner_fill else "")
            )
    return lines


def _expected(results: ModelResults) -> list[str]:
    """Return lines with computed and measured steps of several ranks."""
    body = []
    for row in results.expected:
        measured = [r for r in results.rows if r.tokens == 1 and r.context == row.context]
        step = measured[0].step_ms if measured else None
        cells = [f"{ms:.2f}" for ms in (row.latency, row.bytes, row.sums, row.total)]
        body.append([str(row.context), str(row.model.ranks), *cells, _ms(step)])
    if not body:
        return []
    return [
        "",
        "ms of one sequence's step by the model of dsv4 inspect --gpus, computed, and measured",
        *plain(("context", "ranks", "latency", "bytes", "sums", "computed", "step"), body, 0),
    ]


def _prompts(results: ModelResults) -> list[str]:
    if not results.prompts:
        return []
    body = []
    for row in results.prompts:
        cells = [_ms(ms) for ms in (row.flops_ms, row.runner_ms, row.generate_ms, row.first_ms)]
        rate = "-" if not row.generate_ms else f"{1e3 * row.prompt / row.generate_ms:.0f}"
        body.append([str(row.prompt), *_model_cells(row.model), *cells, rate])
    return [
        "",
        "ms to the first token; first: the first one after dsv4.serving.prepare",
        *plain(_PROMPT, body),
    ]


def _speculation(rows: Sequence[SpeculationRow]) -> list[str]:
    if not rows:
        return []
    body = []
    for row in rows:
        accepted = f"{row.share:g} forced" if row.forced else "verified"
        numbers = [_ms(row.plain_ms), _ms(row.step_ms)]
        numbers += ["-" if x is None else f"{x:.2f}" for x in (row.length,)]
        numbers += [_ms(row.token_ms), "-" if row.gain is None else f"{row.gain:.2f}"]
        numbers += [_ms(row.draft_ms)]
        numbers += [_ms(row.pass_ms.get(head)) for head in _HEADS]
        body.append([*_drafted_cells(row), f"{row.drafts} {row.method}", accepted, *numbers])
    lines = [
        "",
        "ms; plain: a step of the runner without drafts; step: one with drafts, then its time per",
        "token of a sequence; draft: all drafts of a step, then one pass with the model's head,",
        "then one pass with an NVFP4 copy of the head",
        *plain((*_DRAFTED, *_SPECULATION), body, 5),
        *_verified([row for row in rows if not row.placement]),
        *_loaded([row for row in rows if row.placement]),
    ]
    for row in rows:
        if row.length is not None:
            lines += wrapped(
                f"{row.tokens} at {row.context}, experts {row.drawn or 'of routers'}: "
                f"{row.drafted} drafts made, {row.verified} verified{_threshold(row)}, "
                f"{row.accepted} accepted in {row.steps} steps"
            )
    return lines


def _loaded(rows: Sequence[SpeculationRow]) -> list[str]:
    """Return lines with what steps load from host memory."""
    if not rows:
        return []
    body = []
    for row in rows:
        for step, cells in loads(row).items():
            how = "waves" if step in row.waves else "slots"
            shown = [_ms(cells[0]), *("-" if x is None else f"{x:.1f}" for x in cells[1:])]
            body.append([*_drafted_cells(row), row.placement, step, how, *shown])
    return [
        "",
        "ms of steps with experts in host memory, other experts in every step; plain, drafts: of",
        "the runner; single, and by numbers of tokens of a sequence: the main model's part; slots",
        "hold all experts of a step, or it is eager and in waves; loaded: from host memory per",
        "step, for each token that it brings, and over the time of the step",
        *plain((*_DRAFTED, "experts", *_LOADED), body, 6),
    ]


def loads(row: SpeculationRow) -> dict[str, list[float | None]]:
    """Return the figures of steps with experts in host memory, by step.

    They are milliseconds, hits in per cent, MB a step, MB a token, and GB/s over the step.
    """
    figures = {}
    for step, rate in row.hit_rates.items():
        ms, loaded = row.times()[step], row.loaded[step]
        token = row.loaded_per_token(step)
        over = loaded / ms / 1e6 if ms else None
        token = None if token is None else token / 1e6
        figures[step] = [ms, 100 * rate, loaded / 1e6, token, over]
    return figures


def _threshold(row: SpeculationRow) -> str:
    return f" (threshold {row.threshold})" if row.threshold else ""


def _drafted_cells(row: SpeculationRow) -> list[str]:
    return [str(row.tokens), str(row.context), row.drawn or "routers"]


def _verified(rows: Sequence[SpeculationRow]) -> list[str]:
    """Return lines with the main model's part of a step."""
    if not rows:
        return []
    body = []
    for row in rows:
        for count, ms in row.verify_ms.items():
            numbers = [_ms(row.single_ms), _ms(ms)]
            if count in row.verify_over_single:
                numbers += [f"{row.verify_experts[count]:.1f}", f"{row.more_experts_ms(count):.2f}"]
                numbers += [f"{row.verify_over_single[count]:.3f}"]
            body.append([*_drafted_cells(row), count, *numbers, *["-"] * (5 - len(numbers))])
    return [
        "",
        "ms of the main model's part of a step, by tokens of each sequence; single: a step of one",
        "token without a draft; more: ms to read the experts that a single step does not read;",
        "ratio: (verify - more) / single",
        *plain((*_DRAFTED, *_VERIFIED), body, 4),
    ]


def _hosted(rows: Sequence[HostedRow]) -> list[str]:
    if not rows:
        return []
    body = []
    for row in rows:
        loaded = None if row.loaded_bytes is None else row.loaded_bytes / 1e6
        cells = [str(row.tokens), str(row.context), row.routing, f"{row.static}+{row.slots}"]
        cells += ["graph" if row.captured else "eager", _ms(row.step_ms)]
        cells += ["-" if row.hit_rate is None else f"{100 * row.hit_rate:.1f}"]
        cells += ["-" if loaded is None else f"{loaded:.1f}"]
        cells += ["-" if x is None else f"{x:.1f}" for x in (row.loaded_rate, row.gather_rate)]
        body.append(cells)
    return [
        "",
        "ms per step with experts in host memory, other experts in every step; static + slots of a",
        "layer; loaded: from host memory per step, and that over the time of the step; alone: GB/s",
        "of the kernels that load as many experts, without the rest of the step",
        *plain(_HOSTED, body),
        *(line for words in memory_words(rows) for line in wrapped(words)),
    ]


def memory_words(rows: Sequence[HostedRow]) -> list[str]:
    """Say how many bytes of experts lie where, in a sentence for each placement."""
    known = [row for row in rows if row.host_bytes]
    return list(
        dict.fromkeys(
            f"Experts of {row.static}+{row.slots}: {row.host_bytes / 1e9:.1f} GB in host memory; "
            f"on the GPU {row.static_bytes / 1e9:.1f} GB static, {row.slot_bytes / 1e9:.1f} GB of "
            f"slots and {row.buffer_bytes / 1e9:.1f} GB of buffer for long prompts."
            for row in known
        )
    )


def profile_lines(row: ProfileRow) -> list[str]:
    """Kernels of a step by operator."""
    profile, body = row.profile, []
    for operator in profile.operators:
        share = 100 * operator.ms / profile.ms if profile.ms else 0.0
        kernels = ", ".join(short(name, 40) for name in operator.kernels[:3])
        more = f", {len(operator.kernels) - 3} more" if len(operator.kernels) > 3 else ""
        body.append(
            [
                operator.operator,
                f"{operator.ms:.3f}",
                f"{share:.1f}",
                f"{operator.launches:.0f}",
                short(kernels + more, 60),
            ]
        )
    title = (
        f"{row.tokens} at {row.context}: kernels of the captured step, {profile.ms:.3f} ms in "
        f"{profile.launches:.0f} launches, all streams together"
    )
    return ["", title, *plain(_PROFILE, body)]


def _where(row: Measured) -> str:
    if isinstance(row, HostedRow):
        return f"{row.tokens} at {row.context}, {row.routing}"
    if isinstance(row, SpeculationRow):
        return f"drafts of {row.tokens} at {row.context}"
    if isinstance(row, DecodeRow):
        return f"{row.tokens} at {row.context}"
    return f"prompt of {getattr(row, 'prompt', '?')}"


def _missing(results: ModelResults) -> list[str]:
    """Return why figures are missing, figures of one reason together."""
    said = []
    for row in _measured(results):
        reasons: dict[str, list[str]] = {}
        for figure, reason in row.missing.items():
            if reason != NOT_ASKED:
                reasons.setdefault(reason, []).append(figure)
        said += [f"none  {_where(row)}: {', '.join(f)}: {r}" for r, f in reasons.items()]
    return ["", *(line for text in said for line in wrapped(text))] if said else []


def _measured(results: ModelResults) -> list[Measured]:
    return [*results.rows, *results.prompts, *results.speculation, *results.hosted]


def failures(results: ModelResults) -> list[str]:
    """Figures whose measurement failed."""
    rows = _measured(results)
    return [f"{_where(row)}: {name}: {row.missing[name]}" for row in rows for name in row.failed]


def verdict(results: ModelResults) -> str:
    """The last line."""
    failed = failures(results)
    stopped = f"; {results.stopped}" if results.stopped else ""
    counts = f"{len(results.rows)} rows, {len(results.prompts)} prompts"
    if results.speculation:
        counts += f", {len(results.speculation)} with drafts"
    if results.hosted:
        counts += f", {len(results.hosted)} with experts in host memory"
    if failed:
        return short(f"FAILED: {len(failed)} figures of {counts}: {failed[0]}{stopped}", WIDTH)
    parts = [counts, *_worst(results.rows)]
    rows = _measured(results)
    late = sum(why.startswith(NOT_BEGUN) for row in rows for why in row.missing.values())
    if late:
        parts.append(f"{late} figures not begun (--limit)")
    small = sum(any(why.startswith(LEFT_OUT) for why in row.missing.values()) for row in rows)
    if small:
        parts.append(f"{small} of the rows left out because they do not fit")
    word = "STOPPED" if results.stopped else "MEASURED"
    return short(f"{word}: {'; '.join(parts)}{stopped}", WIDTH)


def _worst(rows: Sequence[DecodeRow]) -> list[str]:
    """The largest ratios to the captured step."""
    words = []
    for name, times in (
        ("generate", [(row, row.generate_ms) for row in rows]),
        ("runner", [(row, row.runner_ms) for row in rows]),
    ):
        ratios = [(row.over_step(ms), row) for row, ms in times if row.over_step(ms) is not None]
        if ratios:
            worst, row = max(ratios, key=lambda pair: pair[0] or 0.0)
            words.append(f"{name} {worst:.3g} (at {row.tokens})")
    return [f"over the step at most: {', '.join(words)}"] if words else []
