"""Command line of the bench.

The last line says what failed and where, or that all passed (``dsv4.bench.verdict``).

Exit status: 0 if every check passed, 1 if one failed, 2 if the command cannot be carried out, 130
if it was interrupted; the rows measured until then are written.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import traceback
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from dsv4 import dispatch
from dsv4.bench import baselines, environment, report, results, tables, verdict
from dsv4.bench.arguments import parser
from dsv4.bench.cases import MAKERS, PRESETS, cases, operators
from dsv4.bench.cases.own import Shape, own_cases
from dsv4.bench.measure import Options, attempt, explained
from dsv4.bench.problem import Case, Draw, UsageError
from dsv4.bench.results import Row
from dsv4.bench.suites import all_reduce, main_job
from dsv4.bench.verdict import Check
from dsv4.parallel import groups, processes
from dsv4.parallel.context import RankError

ATTENTION = ("attention", "indexer", "attention_layer")
OK, WRONG, IMPOSSIBLE, INTERRUPTED = 0, 1, 2, 130
_WITHOUT_ROWS = ("list", "env", "explain", "compare", "tune", "report")
# What the groups of cases with sizes of their own run.
_OPERATORS = {"attention": "sparse_attention", "indexer": "indexer_select"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        command = arguments[1:] if _is_command(arguments) else arguments
        options = parser().parse_args(command)
        options.arguments = arguments
        if options.version:
            print("\n".join(environment.version_lines()))
            return OK
        _check_outputs(options)
        return _COMMANDS[options.command](options)
    except UsageError as error:
        if processes.is_first():  # all processes have the same options
            print(f"error: {error}", file=sys.stderr)
        return IMPOSSIBLE
    except RankError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG


def _check_outputs(options: argparse.Namespace) -> None:
    """Check that a command that measures no rows is not asked to write them.

    Raises:
        UsageError: naming the option and the command.
    """
    for name in ("json", "csv", "markdown"):
        if options.command in _WITHOUT_ROWS and hasattr(options, name):
            raise UsageError(f"--{name} is not for {options.command}, which measures no rows")


def _is_command(arguments: Sequence[str]) -> bool:
    """Return whether ``run NAME`` stands for a command of its own, with options of its own.

    ``run all_reduce`` in a single process without ``--ranks`` is the operator of one rank.
    """
    if arguments[:2] == ["run", "all_reduce"]:
        return _names(arguments, "--ranks") or processes.launched() is not None
    return arguments[:2] == ["run", "moe"]


def _device(options: argparse.Namespace) -> torch.device:
    name = getattr(options, "device", None)
    if name is None:
        return environment.default_device()
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"--device is {name!r}, wanted cpu, cuda or cuda:<number>")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device is {name!r}, found {torch.cuda.device_count()} CUDA devices")
    return device


def _measuring(options: argparse.Namespace, backend: str = "auto") -> Options:
    device = _device(options)
    repeat = getattr(options, "repeat", 50 if device.type == "cuda" else 5)
    check, seed = getattr(options, "check", True), getattr(options, "seed", 0)
    named = getattr(options, "baselines", None)
    rest = getattr(options, "rest", 0.0)
    return Options(device, backend, check, repeat, seed, named, rest)


def _chosen(options: argparse.Namespace, ops: Sequence[str]) -> list[Case]:
    """List cases, each at all token counts before the next: they share weights, which are kept."""
    candidates = []
    shapes = own_shapes(options)
    for op in ops:
        for preset in shapes or options.shapes.split(","):
            by_tokens = [_cases(op, preset, tokens) for tokens in options.tokens]
            candidates += [case for same in zip(*by_tokens, strict=True) for case in same]
    patterns = getattr(options, "cases", None)
    if patterns is None:
        return candidates
    chosen = [case for case in candidates if any(fnmatchcase(case.name, p) for p in patterns)]
    if not chosen:
        names = ", ".join(dict.fromkeys(case.name for case in candidates if case.name))
        raise UsageError(f"--cases matches none of {names or 'these operators, which have one'}")
    return chosen


def _cases(op: str, sizes: str | Shape, tokens: int) -> list[Case]:
    """Return the cases of a model, or of a user's sizes."""
    if isinstance(sizes, Shape):
        return own_cases(op, sizes, tokens)
    return cases(op, sizes, tokens)


def own_shapes(options: argparse.Namespace) -> list[Shape]:
    """Return the sizes of ``--shape``, and those of ``--n`` and ``--k``; empty without them.

    Raises:
        UsageError: if they are combined with what they stand in place of, or for no operator that
            is named.
    """
    shapes = [Shape.of(text) for text in getattr(options, "shape", None) or []]
    rows, columns = getattr(options, "n", None), getattr(options, "k", None)
    ops = getattr(options, "ops", None) or [getattr(options, "op", "")]
    if rows is not None or columns is not None:
        if rows is None or columns is None or ops != ["gemm"]:
            raise UsageError("--n and --k go together, for gemm alone: gemm --n 4096 --k 7168")
        shapes.append(Shape.of(f"N={rows},K={columns}"))
    if shapes and _names(options.arguments, "--shapes"):
        raise UsageError("--shape, --n and --k are in place of --shapes")
    if shapes and options.command == "run" and not options.ops:
        raise UsageError("--shape is for operators that are named, as run gemm --shape N=64,K=64")
    return shapes


def _check_baselines(options: argparse.Namespace, ops: Sequence[str]) -> None:
    """Refuse names of baselines that none of the operators has."""
    called = [name for op in ops for name in operators(op)]
    known = [name for op in called for name in baselines.BASELINES.get(op, {})]
    baselines.check_names(options.baselines, known)


def _run(options: argparse.Namespace) -> int:
    if options.rest and (options.check or any(name in ATTENTION for name in options.ops)):
        raise UsageError(f"--rest is for operators, not for --check and {', '.join(ATTENTION)}")
    if options.check:
        if options.n or options.k or options.shape or options.baselines is not None:
            raise UsageError("--check has sizes of its own and no --shape, --n, --k, --baselines")
        return _validate(options)
    options.check = options.check is None
    if any(name in ATTENTION for name in options.ops):
        return _attention(options)
    ops = options.ops or list(MAKERS)
    chosen = _chosen(options, ops)
    _check_baselines(options, ops)
    header = _print_header(options)
    backends = options.backend.split(",")
    rates = environment.rates(_device(options))
    runs = [(case, backend) for case in chosen for backend in backends]
    rows: list[Row] = []
    try:
        for case, backend in runs:
            timed = _measuring(options, backend).conditions()
            rows += [attempt(case, condition, rates) for condition in timed]
    except KeyboardInterrupt:
        stopped = f"interrupted after {len(rows)} of {len(runs)} rows"
        return _finish(options, header, rows, stopped=stopped) or INTERRUPTED
    return _finish(options, header, rows)


def _attention(options: argparse.Namespace) -> int:
    from dsv4.bench.suites import attention

    if len(options.ops) > 1 or "," in options.backend:
        raise UsageError(f"{', '.join(ATTENTION)}: wanted one at a time, by one backend")
    (group,), device = options.ops, _device(options)
    own = own_shapes(options)
    _check_group_baselines(options, group)
    gpu, arguments = device.type == "cuda", options.arguments
    shapes = options.shapes if _names(arguments, "--shapes") or not gpu else "flash,pro"
    tokens = options.tokens if _names(arguments, "--tokens") else attention.usual_tokens(group, gpu)
    measuring = _measuring(options, options.backend)
    rows: list[Row] = []
    header, stopped = _print_header(options), ""
    try:
        rates = environment.rates(device)
        patterns = options.cases or ["*"]
        sizes = own or shapes.split(",")
        attention.run(group, sizes, tokens, patterns, measuring, rates, rows)
    except KeyboardInterrupt:
        stopped = f"interrupted after {len(rows)} rows"
    if not rows and not stopped:
        raise UsageError("--cases matches none; names are like 'pro C4A 128 heads'")
    status = _finish(options, header, rows, attention.lines(rows), stopped)
    return status or (INTERRUPTED if stopped else OK)


def _check_group_baselines(options: argparse.Namespace, group: str) -> None:
    if group in _OPERATORS:
        _check_baselines(options, [_OPERATORS[group]])
        return
    from dsv4.bench.baselines import inductor, transformers_attention

    known = (transformers_attention.EAGER, transformers_attention.COMPILED, inductor.NAME)
    baselines.check_names(options.baselines, known)


def _validate(options: argparse.Namespace) -> int:
    from dsv4.bench.validate import command as validate
    from dsv4.bench.validate.kernel import Request

    if options.ops != ["gemm"]:
        raise UsageError("--check validates gemm: run gemm --check")
    if hasattr(options, "csv") or hasattr(options, "markdown"):
        raise UsageError("--check prints its report and writes --json alone")
    if getattr(options, "json", "").endswith("/"):
        raise UsageError(f"--json is {options.json!r}, wanted a file for --check")
    device = _device(options)
    usual = ("flash,pro", validate.TOKENS) if device.type == "cuda" else ("tiny", [1, 17])
    arguments = options.arguments
    shapes = options.shapes if _names(arguments, "--shapes") else usual[0]
    tokens = options.tokens if _names(arguments, "--tokens") else usual[1]
    patterns = options.cases or ["*"]
    if not any(fnmatchcase(name, pattern) for name in validate.NAMES for pattern in patterns):
        raise UsageError(f"--cases matches none of {', '.join(validate.NAMES)}")
    header = _print_header(options)
    print()
    request = Request(
        tokens,
        lambda name: any(fnmatchcase(name, pattern) for pattern in patterns),
        device,
        getattr(options, "repeat", 10 if device.type == "cuda" else 1),
        getattr(options, "seed", 0),
        options.backend.split(","),
    )
    validation = validate.run(shapes.split(","), request)
    print("\n".join(validation.lines()))
    if hasattr(options, "json"):
        print(f"wrote {validate.write_json(options.json, validation, header)}")
    print(validation.verdict(), flush=True)
    return WRONG if validation.wrong or not validation.kernels else OK


def _names(arguments: Sequence[str], option: str) -> bool:
    """Return whether an option was given."""
    return any(a == option or a.startswith(f"{option}=") for a in arguments)


def _print_header(options: argparse.Namespace) -> dict[str, Any]:
    header = environment.header(_device(options), options.arguments)
    print("\n".join(environment.lines(header)), flush=True)
    return header


def _finish(
    options: argparse.Namespace,
    header: dict[str, Any],
    rows: list[Row],
    lines: list[str] | None = None,
    stopped: str = "",
    checks: Sequence[Check] = (),
    document: dict[str, Any] | None = None,
    markdown: str | None = None,
) -> int:
    """Print and write the rows, and say the verdict.

    Args:
        options: Options of the command.
        header: Header of the files.
        rows: All that were measured.
        lines: A table of one's own in place of the usual one.
        stopped: Why the command ended early.
        checks: What was checked besides the rows.
        document: Content of the JSON file in place of the rows.
        markdown: A Markdown table of one's own in place of that of the rows.

    Returns:
        The exit status.
    """
    print()
    if getattr(options, "markdown", False):
        print(report.markdown(rows) if markdown is None else markdown, end="")
        print("\n".join(["", *report.notes(rows), *report.wrong(rows)]))
    elif lines is not None:
        print("\n".join([*lines, *report.wrong(rows)]))
    else:
        report.table(rows)
    if any(row.timer == "clock" for row in rows):
        print(environment.WITHOUT_GPU)
    print()
    written = []
    if document is None:
        written += _write_json(options, header, rows)
    elif hasattr(options, "json"):
        written.append(results.write_document(options.json, options.command, document))
    if hasattr(options, "csv"):
        written.append(report.write_csv(options.csv, rows))
    for path in written:
        print(f"wrote {path}")
    every = [*checks, *map(verdict.of_row, rows)]
    print(verdict.line(every, stopped), flush=True)
    return WRONG if any(check.passed is False for check in every) else OK


def _write_json(options: argparse.Namespace, header: dict[str, Any], rows: list[Row]) -> list[Path]:
    """Write the rows where ``--json`` says, if it does; return the files."""
    return results.write_json(options.json, header, rows) if hasattr(options, "json") else []


def _main_job(options: argparse.Namespace) -> int:
    header = _print_header(options)
    rows: list[Row] = []
    checks: list[Check] = []
    try:
        checks = main_job.generation(_device(options), getattr(options, "seed", 0))
        rates = environment.rates(_device(options))
        main_job.operators(_measuring(options), rates, rows)
    except KeyboardInterrupt:
        stopped = f"interrupted after {len(rows)} rows"
        return _finish(options, header, rows, None, stopped, checks) or INTERRUPTED
    return _finish(options, header, rows, checks=checks)


def _list(options: argparse.Namespace) -> int:
    body = []
    for op in MAKERS:
        names = [case.name for case in cases(op, "tiny", 1) if case.name]
        every = [row.name for name in operators(op) for row in dispatch.implementations(name)]
        body.append((op, ", ".join(dict.fromkeys(every)), ", ".join(names)))
    print("\n".join(tables.plain(("operator", "implementations", "cases"), body)))
    return OK


def _layer(options: argparse.Namespace) -> int:
    from dsv4.bench.suites import layer

    for name in ("repeat", "seed"):
        if hasattr(options, name):
            raise UsageError(f"--{name} is not for layer, whose inputs and runs are fixed")
    device = _device(options)
    if device.type != "cuda":
        raise UsageError("layer: needs a CUDA GPU, the device is the CPU")
    header = _print_header(options)
    rates = environment.rates(device)
    rows = []
    for preset in options.shapes.split(","):
        for tokens in options.tokens:
            config = PRESETS[preset]()
            row, kernels = layer.row(preset, config, tokens, options.context, rates, device)
            rows.append(row)
            print(f"\n{preset}, {tokens} tokens: kernels of ours, microseconds")
            for name, us in kernels:
                print(f"{us:8.2f}  {name[:100]}")
    return _finish(options, header, rows)


def _moe(options: argparse.Namespace) -> int:
    from dsv4.bench.suites import moe

    usual = [1, 8, 64, 512, 4096] if _device(options).type == "cuda" else [1, 8]
    sizes = own_shapes(options) or options.shapes.split(",")
    measuring = _measuring(options)
    moe.check(sizes, options.routings, measuring, options.activation)
    header = _print_header(options)
    points: moe.Measured = {}
    failed, stopped = OK, ""
    try:
        selection = sizes, options.routings, options.tokens or usual
        rates = environment.rates(_device(options))
        for _ in moe.run(*selection, measuring, rates, points, options.activation):
            # A process that does not survive the next baseline leaves this.
            _write_json(options, header, moe.rows_of(points))
    except KeyboardInterrupt:
        failed, stopped = INTERRUPTED, f"interrupted after {len(points)} points"
    except UsageError:
        raise
    except Exception:  # whatever it is, what was measured until then is kept
        failed, stopped = WRONG, f"error after {len(points)} points"
        traceback.print_exc()
    return _finish(options, header, moe.rows_of(points), moe.lines(points), stopped) or failed


def _crossover(options: argparse.Namespace) -> int:
    from dsv4.bench.suites import crossover, crossover_results

    device = _device(options)
    gpu = device.type == "cuda"
    presets = (options.shapes or ("flash,pro" if gpu else "tiny")).split(",")
    usual = crossover.TOKENS if gpu else crossover.TOKENS_ON_CPU
    tokens = sorted(set(options.tokens or usual))
    measuring = dataclasses.replace(
        _measuring(options), repeat=getattr(options, "repeat", 10 if gpu else 1)
    )
    request = crossover.Request(
        presets, options.experts, tokens, options.cases, options.seconds, measuring
    )
    crossover.subjects(request)
    header, measured, stopped = _print_header(options), crossover_results.Crossovers(), ""
    try:
        crossover.run(request, measured)
    except KeyboardInterrupt:
        stopped = f"interrupted after {len(measured.gemms)} GEMMs"
    if measured.left_out:
        stopped = stopped or f"the time was over before {', '.join(measured.left_out)}"
    rows = list(crossover_results.rows(measured.gemms))
    document = crossover_results.document(header, measured.gemms)
    lines = crossover_results.lines(measured.gemms)
    status = _finish(
        *(options, header, rows, lines, stopped),
        document=document,
        markdown=crossover_results.markdown(measured.gemms),
    )
    return status or (INTERRUPTED if stopped else OK)


def _all_reduce(options: argparse.Namespace) -> int:
    device = _device(options)
    if options.ranks is not None:
        return _sums(options, device, is_virtual=True)
    if processes.launched() is None:
        raise UsageError("all_reduce: wanted --ranks, or several processes started by torchrun")
    with processes.joined(device.type) as own:
        return _sums(options, own, is_virtual=False)


def _sums(options: argparse.Namespace, device: torch.device, *, is_virtual: bool) -> int:
    """Measure sums over virtual ranks, or over those of all processes."""
    group = "" if is_virtual else groups.everyone()
    usual = all_reduce.SIZES if device.type == "cuda" else all_reduce.SIZES_ON_CPU
    repeat = getattr(options, "repeat", 50 if device.type == "cuda" else 20)
    seed = getattr(options, "seed", 0)
    request = all_reduce.Request(options.bytes or usual, options.backend, repeat, seed, device)
    left_out: list[str] = []
    if is_virtual:
        rows = all_reduce.virtual(request, options.ranks)
    else:
        rows, left_out = all_reduce.over_ranks(request, group)
    if not all_reduce.is_first(group):
        return WRONG if any(row.match is False for row in rows) else OK
    header = _print_header(options)
    print("\n".join(["", *left_out]))
    return _finish(options, header, rows)


def _model(options: argparse.Namespace) -> int:
    device = _device(options)
    if processes.launched() is None:
        return _measured_model(options, device)
    with processes.joined(device.type) as own:
        return _measured_model(options, own)


def _measured_model(options: argparse.Namespace, device: torch.device) -> int:
    from dsv4.bench.suites.model import command
    from dsv4.bench.suites.model.document import ModelResults

    measured = ModelResults()
    measured.start.process_s = command.seconds_since_process_start()
    request = command.prepare(options, device)
    header = _print_header(options) if command.leads() else {}
    command.measure(request, environment.rates(device), measured)
    good = command.finish(options, request, header, measured)
    if measured.stopped:
        return INTERRUPTED
    return OK if good else WRONG


def _env(options: argparse.Namespace) -> int:
    _print_header(options)
    return OK


def _explain(options: argparse.Namespace) -> int:
    for case in _chosen(options, [options.op]):
        problem = case.build(Draw(0, _device(options)))
        explanation = explained(problem, options.backend)
        row = Row(case.op, case.name, case.shape, case.tokens, "")
        print(f"{verdict.where(row)}\n{dataclasses.replace(explanation, op=case.op)}\n")
    return OK


def _compare(options: argparse.Namespace) -> int:
    from dsv4.bench.compare import comparison

    compared = comparison(options.a, options.b, options.threshold)
    print("\n".join(compared.lines()), flush=True)
    return WRONG if compared.failed() else OK


def _tune(options: argparse.Namespace) -> int:
    from dsv4.bench.tune import command

    return command.run(options, _measuring(options))


def _report(options: argparse.Namespace) -> int:
    from dsv4.bench.pages import command

    report = command.read(Path(options.folder), options.readme)
    if options.check:
        old = report.out_of_date()
        if old:
            print(command.complaint(old, "python -m dsv4.bench report"), file=sys.stderr)
        return WRONG if old else OK
    for path in report.write(options.redraw):
        print(f"wrote {path}" if path.exists() else f"removed {path}")
    return OK


_COMMANDS = {
    "main job": _main_job,
    "run": _run,
    "list": _list,
    "layer": _layer,
    "moe": _moe,
    "crossover": _crossover,
    "all_reduce": _all_reduce,
    "model": _model,
    "env": _env,
    "explain": _explain,
    "compare": _compare,
    "tune": _tune,
    "report": _report,
}
