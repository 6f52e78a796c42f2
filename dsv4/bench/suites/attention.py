"""Attention as decode and prefill steps call it, its indexer, and the whole sublayer.

``run attention``, ``run indexer`` and ``run attention_layer`` are these, at sizes of their own.
Every call of a timed graph has caches and slots of its own, and the L2 is cleared before
a replay. A result is checked in some of its tokens before it is timed.

* ``attention``: FP8 entries, pages of 64. C4A: the window and as many chosen entries as the indexer
  gives, anywhere in the pool. C128A: the window and all entries of 131072 tokens, in pages of 2;
  "1M", for a decode step: of 1048576.
  Tokens up to ``MOST_DECODED`` are of as many sequences; more are one prefill, whose window is
  causal and whose chosen entries are shared. With the model's heads and with 16, a part of them.
* ``indexer``: each token of a sequence of its own that has 131072 or 1048576 tokens.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch

from dsv4 import ops
from dsv4.bench.baselines import flash_mla
from dsv4.bench.cases import PRESETS
from dsv4.bench.cases.own import Shape, config_of, multiple_of
from dsv4.bench.cases.sequence import angles
from dsv4.bench.checks import budgets
from dsv4.bench.checks.judge import within
from dsv4.bench.environment import Rates, device_name
from dsv4.bench.measure import Options, measure
from dsv4.bench.problem import Case, Draw, Problem, UsageError, nbytes
from dsv4.bench.report import baseline_table, check, number
from dsv4.bench.results import Row
from dsv4.bench.suites import attention_layer
from dsv4.bench.tables import plain, wrapped
from dsv4.config import ModelConfig
from dsv4.kv_cache.pages import Pages, entry_layout

MOST_DECODED = 64  # more tokens are a prefill
_PAGE = 64
_SHARED = 8192  # entries that the tokens of a prefill choose from
_FEW_HEADS = 16
_KEYS = ("plain", "index_fp8", "index_mxfp4")
_CONTEXT, _CONTEXTS = 131072, (131072, 1048576)
# Terabytes and teraFLOP a second that count as an H200's, whatever one machine reaches on a day.
_H200 = (4.38, 790.0)


def usual_tokens(group: str, gpu: bool) -> Sequence[int]:
    """The numbers of tokens of a group that are measured unless others are asked for."""
    if not gpu:
        return (1, 3)
    return {"attention": (1, 16, 64, 4096), "indexer": (1, 64)}.get(group, (1, 64, 4096))


def published(device: torch.device, rates: Rates) -> Rates:
    """Rates that the roofline bound is computed from."""
    if "H200" not in device_name(device):
        return rates
    return dataclasses.replace(rates, read_tbs=_H200[0], bf16_tflops=_H200[1])


def attention(preset: str, tokens: int) -> Iterator[Case]:
    """See the module."""
    c = _config(preset)
    ratio = c.compress_rates.hca
    counts = {"C4A": c.index_topk, "C128A": _bounded(_CONTEXT, c) // ratio}
    longest = _bounded(_CONTEXTS[-1], c) // ratio
    if tokens <= MOST_DECODED and longest > counts["C128A"]:
        counts["C128A 1M"] = longest
    for heads in dict.fromkeys((min(_FEW_HEADS, c.num_attention_heads), c.num_attention_heads)):
        for kind, count in counts.items():
            yield _attention(c, f"{preset} {kind} {heads} heads", tokens, heads, count)


def _attention(c: ModelConfig, name: str, tokens: int, heads: int, count: int) -> Case:
    d, reach, prefix = c.head_dim, c.sliding_window, " C128A " in name

    def build(draw: Draw) -> Problem:
        q, sink = draw.normal(tokens, heads, d), draw.normal(heads, dtype=torch.float32)
        if tokens <= MOST_DECODED:
            window, slots = _own(c, draw, tokens, reach, _PAGE)
            entries, chosen = _own(c, draw, tokens, count, 2 if prefix else 1)
        else:
            window, slots = _causal(c, draw, tokens)
            entries, chosen = _shared(c, draw, tokens, count, prefix)
        used = [slots[slots >= 0], chosen[chosen >= 0]]
        layout = entry_layout("fp8", d, c.qk_rope_head_dim)
        distinct = sum(int(s.unique().numel()) for s in used)
        return Problem(
            ops.sparse_attention,
            (q, window, slots, entries, chosen, sink),
            {"scale": d**-0.5, **angles(c, draw, tokens)},
            within(budgets.attention),
            nbytes(q, slots, chosen, sink) + distinct * (layout.data_bytes + layout.scale_bytes),
            4 * heads * d * sum(s.numel() for s in used),
            writes=nbytes(q),
            of_tokens=(0, 2, 4, "cos", "sin"),
        )

    sizes = {"h": heads, "D": d, "window": reach, "entries": count}
    return Case("sparse_attention", name, sizes, tokens, build)


def _filled(c: ModelConfig, draw: Draw, count: int, size: int) -> Pages:
    pages = Pages.allocate(
        -(-count // size), size, c.head_dim, c.qk_rope_head_dim, device=draw.device
    )
    every = torch.arange(pages.num_slots, device=draw.device)
    x = draw.normal(pages.num_slots, c.head_dim)
    ops.write_kv(pages, x, every, backend="reference")
    return pages


def _own(
    c: ModelConfig, draw: Draw, tokens: int, count: int, run: int
) -> tuple[Pages, torch.Tensor]:
    """Entries that only one token reads, in runs of ``run`` that follow one another nowhere."""
    run = min(run, count)
    runs = -(-count // run)
    pages = _filled(c, draw, tokens * runs * run, run if run == 2 else _PAGE)
    order = draw.permutation(tokens * runs).view(tokens, runs, 1) * run
    slots = (order + torch.arange(run, device=draw.device)).flatten(1)[:, :count]
    return pages, slots.contiguous()


def _causal(c: ModelConfig, draw: Draw, tokens: int) -> tuple[Pages, torch.Tensor]:
    """The tokens before each, of the one sequence."""
    steps = torch.arange(1 - c.sliding_window, 1, device=draw.device)
    slots = torch.arange(tokens, device=draw.device).unsqueeze(1) + steps
    return _filled(c, draw, tokens, _PAGE), slots.clamp(min=-1)


def _shared(
    c: ModelConfig, draw: Draw, tokens: int, count: int, prefix: bool
) -> tuple[Pages, torch.Tensor]:
    """Entries of one sequence: chosen ones, or those closed before each of its last tokens."""
    if not prefix:
        shared = max(count, min(_SHARED, 4 * count))
        return _filled(c, draw, shared, _PAGE), draw.integers(0, shared, (tokens, count))
    ratio = c.compress_rates.hca
    seen = (count * ratio - tokens + 1 + torch.arange(tokens, device=draw.device)) // ratio
    entry = torch.arange(count, device=draw.device).expand(tokens, count)
    return _filled(c, draw, count, 2), torch.where(entry < seen.unsqueeze(1), entry, -1)


def indexer(preset: str, tokens: int) -> Iterator[Case]:
    """See the module."""
    c = _config(preset)
    for context in dict.fromkeys(_bounded(context, c) for context in _CONTEXTS):
        for name in _KEYS:
            yield _select(c, f"{preset} {context} tokens {name}", tokens, context, name)


def _select(c: ModelConfig, name: str, tokens: int, context: int, entry_format: str) -> Case:
    h, d = c.index_n_heads, c.index_head_dim
    count = -(-context // c.compress_rates.csa // _PAGE)

    def build(draw: Draw) -> Problem:
        pages = Pages.allocate(tokens * count, _PAGE, d, 0, entry_format, device=draw.device)
        for part in torch.arange(pages.num_slots, device=draw.device).split(1 << 20):
            ops.write_kv(pages, draw.normal(part.numel(), d), part, backend="reference")
        table = draw.permutation(tokens * count).view(tokens, count).to(torch.int32)
        sequence = torch.arange(tokens, device=draw.device)
        visible = torch.full_like(sequence, context // c.compress_rates.csa)
        q: object = draw.normal(tokens, h, d)
        weights = draw.normal(tokens, h, dtype=torch.float32, scale=(d * h) ** -0.5)
        if entry_format != "plain":
            none = weights.new_empty((tokens, 0))
            q, weights = ops.quantize_index_queries(
                q,  # type: ignore[arg-type]
                none,
                none,
                weights,
                rotate=False,
                query_format=entry_format.removeprefix("index_"),
                backend="reference",
            )
        return Problem(
            ops.indexer_select,
            (q, weights, pages, table, sequence, visible),
            {"top_k": c.index_topk},
            budgets.selection,
            nbytes(pages.data, q, weights, table),
            2 * h * d * int(visible.sum()),
            writes=8 * tokens * min(c.index_topk, count * _PAGE),
            of_tokens=(0, 1, 4, 5),
        )

    sizes = {"h": h, "d": d, "C": count * _PAGE, "k": c.index_topk}
    return Case("indexer_select", name, sizes, tokens, build)


def _config(preset: str) -> ModelConfig:
    if preset not in PRESETS:
        raise UsageError(f"shapes are {preset!r}, wanted one of {', '.join(PRESETS)}")
    return PRESETS[preset]()


def _bounded(context: int, c: ModelConfig) -> int:
    """Return the context, for a tiny model at most a part of what it takes."""
    return min(context, c.max_position_embeddings // 8 if c.hidden_size < 1024 else context)


CASES: dict[str, Callable[[str, int], Iterator[Case]]] = {
    "attention": attention,
    "indexer": indexer,
}
GROUPS = (*CASES, "attention_layer")


def run(
    group: str,
    presets: Sequence[str | Shape],
    tokens: Sequence[int],
    patterns: Sequence[str],
    options: Options,
    rates: Rates,
    rows: list[Row],
) -> None:
    """Measure a group into ``rows``, a line printed for each.

    Args:
        group: One of ``GROUPS``.
        presets: Names of configurations, or a user's sizes.
        tokens: Tokens of a step.
        patterns: Shell patterns over the names of cases.
        options: How to measure.
        rates: The machine's.
        rows: Appended to.

    Raises:
        UsageError: if a name is unknown, or sizes are impossible.
    """
    rates = published(options.device, rates)
    for preset in presets:
        _checked(group, preset)
    for preset in presets:
        for count in tokens:
            for row in _measured(group, preset, count, patterns, options, rates):
                rows.append(row)
                print("  ".join(cells(row)), flush=True)


def _checked(group: str, preset: str | Shape) -> tuple[str, ModelConfig]:
    """Return the name and the configuration of sizes.

    Raises:
        UsageError: if there are none.
    """
    if not isinstance(preset, Shape):
        return preset, _config(preset)
    names = _OWN[group]
    preset.check(group, (names,))
    if group == "indexer":
        multiple_of(preset, "C", _PAGE)
    config = config_of(preset, names)
    if "context" in names:
        context, most = preset.sizes["context"], attention_layer.MOST_CONTEXT
        if context > most:
            raise UsageError(f"--shape is {preset.text!r}, wanted a context of at most {most}")
        # A layer's steps take an eighth of the positions that a model has.
        config = config.replace(max_position_embeddings=8 * context)
    return "own", config


# Fields of a configuration by the names of sizes; "": an argument of the case.
_OWN = {
    "attention": {
        "h": "num_attention_heads",
        "D": "head_dim",
        "window": "sliding_window",
        "entries": "",
    },
    "indexer": {"h": "index_n_heads", "d": "index_head_dim", "C": "", "k": "index_topk"},
    "attention_layer": {"H": "hidden_size", "h": "num_attention_heads", "context": ""},
}


def _cases(group: str, preset: str | Shape, tokens: int) -> Iterator[Case]:
    if not isinstance(preset, Shape):
        yield from CASES[group](preset, tokens)
        return
    name, config = _checked(group, preset)
    sizes = preset.sizes
    if group == "attention":
        yield _attention(config, name, tokens, sizes["h"], sizes["entries"])
        return
    context = sizes["C"] * config.compress_rates.csa
    for entry_format in _KEYS:
        yield _select(config, f"{name} {entry_format}", tokens, context, entry_format)


def _measured(
    group: str,
    preset: str | Shape,
    tokens: int,
    patterns: Sequence[str],
    options: Options,
    rates: Rates,
) -> Iterator[Row]:
    def is_selected(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    if group in CASES:
        for case in _cases(group, preset, tokens):
            if is_selected(case.name):
                yield measure(case, options, rates)
        return
    name, config = _checked(group, preset)
    for kind in attention_layer.KINDS:
        if is_selected(f"{name} {kind}"):
            yield attention_layer.measure(config, name, kind, tokens, options, rates)


HEADINGS = (
    *("case", "tokens", "backend", "check", "us", "bound us", "us / bound", "TFLOP/s", "TB/s"),
    "speedup",
)


def cells(row: Row) -> tuple[str, ...]:
    """The texts of a row, in the order of ``HEADINGS``."""
    rates = ["-"] * 3
    if row.us is not None:
        speeds = row.flops / row.us / 1e6, row.bytes / row.us / 1e6
        rates = [f"{row.us / row.bound_us:.2f}", *map(number, speeds)]
    return (
        row.case,
        str(row.tokens),
        row.backend,
        check(row.match),
        "-" if row.us is None else number(row.us),
        number(row.bound_us),
        *rates,
        "-" if row.baseline_ratio is None else f"{row.baseline_ratio:.2f}",
    )


def lines(rows: Sequence[Row]) -> list[str]:
    """A line a row, baselines, why a timer is no graph, and baselines that are not there."""
    table = plain(HEADINGS, [cells(row) for row in rows], keys=2)
    notes = dict.fromkeys(
        f"{row.case}: {row.message}" for row in rows if row.message and row.match is not False
    )
    if any(row.op == "sparse_attention" for row in rows):
        try:
            importlib.import_module(flash_mla.MODULE)
        except Exception as missing:  # whatever it is that another's library does not find
            notes[f"{flash_mla.NAME} was not run: {missing}"] = None
    return [*table, *baseline_table(rows), *(line for note in notes for line in wrapped(note))]
