"""Command line of the bench.

Exit status: 0 if every check passed, 2 if one failed, 1 if the command cannot be carried out, 130
if it was interrupted; the rows measured until then are written.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import torch

from dsv4 import dispatch
from dsv4.bench import environment, main_job, report, results
from dsv4.bench.cases import MAKERS, PRESETS, cases
from dsv4.bench.measure import Options, measure
from dsv4.bench.problem import Case, Draw, UsageError
from dsv4.bench.results import Row

ATTENTION = ("attention", "indexer", "attention_layer")
OK, IMPOSSIBLE, WRONG, INTERRUPTED = 0, 1, 2, 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        # A command of its own, as it has routings; asked for as operators are, it is the same.
        command = arguments[1:] if arguments[:2] == ["run", "moe"] else arguments
        options = parser().parse_args(command)
        options.arguments = arguments
        return options.command(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return IMPOSSIBLE


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = _Parser(
        prog="python -m dsv4.bench",
        description="Without a command: check generation and every operator on this machine.",
    )
    _common(top)
    top.set_defaults(command=_main_job)
    commands = top.add_subparsers(metavar="command", parser_class=_Parser)
    run = commands.add_parser(
        "run", help="check, then time operators; `run gemm --check` validates every kernel"
    )
    run.add_argument(
        "ops",
        nargs="*",
        metavar="OP",
        help="operators; default: all. Or attention, indexer or attention_layer alone, which have "
        "sizes of their own",
    )
    _sizes(run)
    run.add_argument(
        "--cases",
        type=lambda text: text.split(","),
        help="shell patterns over the names of cases, comma-separated, e.g. 'q_b,*w4a4'",
    )
    run.add_argument("--backend", default="auto", help="implementations, comma-separated")
    run.add_argument(
        "--rivals",
        type=lambda text: tuple(text.split(",")),
        help="which to time beside, comma-separated, e.g. cublas,quack; "
        "default: those quick to prepare",
    )
    run.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="validate every kernel of the product and print a report to send back; "
        "--no-check: time unchecked. Default: check each result, then time it",
    )
    _rest(run)
    _common(run)
    run.set_defaults(command=_run)
    listing = commands.add_parser("list", help="operators, their cases and implementations")
    listing.set_defaults(command=_list)
    layer = commands.add_parser(
        "layer", help="a decode step of one layer without its products, on a GPU"
    )
    _sizes(layer)
    layer.add_argument("--context", type=_positive, default=8192, help="tokens before; 8192")
    _common(layer)
    layer.set_defaults(command=_layer)
    moe = commands.add_parser("moe", help="routed experts and the block around them, by routing")
    _sizes(moe, None)
    moe.add_argument(
        "--routings",
        type=lambda text: text.split(","),
        default=["uniform", "zipf", "single"],
        help="uniform, zipf, single, comma-separated; default all",
    )
    moe.add_argument(
        "--rivals",
        type=lambda text: tuple(text.split(",")),
        help="which to time beside, comma-separated, e.g. Humming; default all",
    )
    _rest(moe)
    _common(moe)
    moe.set_defaults(command=_moe)
    env = commands.add_parser("env", help="this machine: names, versions, measured rates")
    env.add_argument("--device", default=argparse.SUPPRESS)
    env.set_defaults(command=_env)
    explain = commands.add_parser("explain", help="which implementation runs, and why")
    explain.add_argument("op", metavar="OP")
    _sizes(explain)
    explain.add_argument("--backend", default="auto")
    explain.add_argument("--device", default=argparse.SUPPRESS)
    explain.set_defaults(command=_explain)
    return top


def _common(to: argparse.ArgumentParser) -> None:
    # Suppressed defaults: a command's parser must not undo what was given before the command.
    add = to.add_argument
    none = argparse.SUPPRESS
    add("--json", metavar="PATH", default=none, help="a file, or DIR/ for results/<gpu>/<op>.json")
    add("--csv", metavar="PATH", default=none, help="a file")
    add("--markdown", action="store_true", default=none, help="print a Markdown table")
    add("--repeat", type=_positive, default=none, help="timed runs; default 5, on a GPU 50")
    add("--seed", type=int, default=none, help="of the random inputs; default 0")
    add("--device", default=none, help="default: cuda:0 if there is one, else cpu")


def _rest(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--rest",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="time everything, rivals too, once more with so much rest before each timed run, "
        "in rows named 'rested' (a GPU at its power limit has a lower clock without); 0.06, say",
    )


def _sizes(to: argparse.ArgumentParser, tokens: Sequence[int] | None = (16,)) -> None:
    to.add_argument("--shapes", default="tiny", help=f"{', '.join(PRESETS)}, comma-separated")
    usual = "16" if tokens else "1,8,64,512,4096, on a CPU 1,8"
    to.add_argument(
        "--tokens", type=_numbers, default=tokens, help=f"e.g. 1,16,256; default {usual}"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 60:
        raise argparse.ArgumentTypeError(f"{text} is not within 0 to 60 seconds")
    return value


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _device(options: argparse.Namespace) -> torch.device:
    wanted = getattr(options, "device", None)
    if wanted is None:
        return environment.default_device()
    if wanted.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"--device is {wanted!r}, wanted cpu, cuda or cuda:<number>")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device is {wanted!r}, found {torch.cuda.device_count()} CUDA devices")
    return device


def _measuring(options: argparse.Namespace, backend: str = "auto") -> Options:
    device = _device(options)
    repeat = getattr(options, "repeat", 50 if device.type == "cuda" else 5)
    check, seed = getattr(options, "check", True), getattr(options, "seed", 0)
    rivals = getattr(options, "rivals", None)
    rest = getattr(options, "rest", 0.0)
    return Options(device, backend, check, repeat, seed, rivals, rest)


def _chosen(options: argparse.Namespace, ops: Sequence[str]) -> list[Case]:
    """Each case at all token counts before the next: they share weights, which are kept."""
    found = []
    for op in ops:
        for preset in options.shapes.split(","):
            by_tokens = [cases(op, preset, tokens) for tokens in options.tokens]
            found += [case for same in zip(*by_tokens, strict=True) for case in same]
    patterns = getattr(options, "cases", None)
    if patterns is None:
        return found
    chosen = [case for case in found if any(fnmatchcase(case.name, p) for p in patterns)]
    if not chosen:
        names = ", ".join(dict.fromkeys(case.name for case in found if case.name))
        raise UsageError(f"--cases matches none of {names or 'these operators, which have one'}")
    return chosen


def _run(options: argparse.Namespace) -> int:
    if options.rest and (options.check or any(name in ATTENTION for name in options.ops)):
        raise UsageError(f"--rest is for operators, not for --check and {', '.join(ATTENTION)}")
    if options.check:
        return _validate(options)
    options.check = options.check is None
    if any(name in ATTENTION for name in options.ops):
        return _attention(options)
    chosen = _chosen(options, options.ops or list(MAKERS))
    header = _print_header(options)
    backends = options.backend.split(",")
    rates = environment.rates(_device(options))
    wanted = [(case, backend) for case in chosen for backend in backends]
    rows: list[Row] = []
    try:
        for case, backend in wanted:
            timed = _measuring(options, backend).conditions()
            rows += [measure(case, each, rates) for each in timed]
    except KeyboardInterrupt:
        print(f"interrupted: {len(rows)} of {len(wanted)} rows", file=sys.stderr)
        return _finish(options, header, rows) or INTERRUPTED
    return _finish(options, header, rows)


def _attention(options: argparse.Namespace) -> int:
    from dsv4.bench import attention

    if len(options.ops) > 1 or "," in options.backend:
        raise UsageError(f"{', '.join(ATTENTION)}: wanted one at a time, by one backend")
    (group,), device = options.ops, _device(options)
    gpu, given = device.type == "cuda", options.arguments
    shapes = options.shapes if _names(given, "--shapes") or not gpu else "flash,pro"
    tokens = options.tokens if _names(given, "--tokens") else attention.usual_tokens(group, gpu)
    measuring = _measuring(options, options.backend)
    rows: list[Row] = []
    header, stopped = _print_header(options), OK
    try:
        rates = environment.rates(device)
        patterns = options.cases or ["*"]
        attention.run(group, shapes.split(","), tokens, patterns, measuring, rates, rows)
    except KeyboardInterrupt:
        stopped = INTERRUPTED
        print(f"interrupted after {len(rows)} rows", file=sys.stderr)
    if not rows and stopped == OK:
        raise UsageError("--cases matches none; names are like 'pro C4A 128 heads'")
    return _finish(options, header, rows, attention.table(rows)) or stopped


def _validate(options: argparse.Namespace) -> int:
    from dsv4.bench import validate
    from dsv4.bench.validate_kernel import Request

    if options.ops != ["gemm"]:
        raise UsageError("--check validates gemm: run gemm --check")
    if hasattr(options, "csv") or hasattr(options, "markdown"):
        raise UsageError("--check prints its report and writes --json alone")
    if getattr(options, "json", "").endswith("/"):
        raise UsageError(f"--json is {options.json!r}, wanted a file for --check")
    device = _device(options)
    usual = ("flash,pro", validate.TOKENS) if device.type == "cuda" else ("tiny", [1, 17])
    given = options.arguments
    shapes = options.shapes if _names(given, "--shapes") else usual[0]
    tokens = options.tokens if _names(given, "--tokens") else usual[1]
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
    found = validate.run(shapes.split(","), request)
    print("\n".join(found.lines()))
    if hasattr(options, "json"):
        print(f"wrote {validate.write_json(options.json, found, header)}")
    return WRONG if found.wrong or not found.kernels else OK


def _names(arguments: Sequence[str], option: str) -> bool:
    """Whether an option was given."""
    return any(a == option or a.startswith(f"{option}=") for a in arguments)


def _print_header(options: argparse.Namespace) -> dict[str, Any]:
    header = environment.header(_device(options), options.arguments)
    print("\n".join(environment.lines(header)), flush=True)
    return header


def _finish(
    options: argparse.Namespace, header: dict[str, Any], rows: list[Row], table: str | None = None
) -> int:
    """Print and write the rows, with a table of one's own or the usual one; the exit status."""
    print()
    if getattr(options, "markdown", False):
        print(report.markdown(rows), end="")
    elif table is not None:
        print(table)
    else:
        report.table(rows)
    written = []
    if hasattr(options, "json"):
        written += results.write_json(options.json, header, rows)
    if hasattr(options, "csv"):
        written.append(report.write_csv(options.csv, rows))
    for path in written:
        print(f"wrote {path}")
    wrong = [row for row in rows if row.match is False]
    if wrong:
        print(f"{len(wrong)} of {len(rows)} checks failed", file=sys.stderr)
    return WRONG if wrong else OK


def _main_job(options: argparse.Namespace) -> int:
    header = _print_header(options)
    generated = main_job.generation(_device(options), getattr(options, "seed", 0))
    rates = environment.rates(_device(options))
    rows = main_job.operators(_measuring(options), rates)
    status = _finish(options, header, rows)
    return status if generated else WRONG


def _list(options: argparse.Namespace) -> int:
    body = []
    for op in dispatch.operators():
        names = [case.name for case in cases(op, "tiny", 1) if case.name]
        backends = [row.name for row in dispatch.implementations(op)]
        body.append((op, ", ".join(backends), ", ".join(names)))
    print("\n".join(report.plain(("operator", "implementations", "cases"), body)))
    return OK


def _layer(options: argparse.Namespace) -> int:
    from dsv4.bench import layer

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
    from dsv4.bench import moe

    header = _print_header(options)
    found: moe.Found = {}
    stopped = OK
    try:
        usual = [1, 8, 64, 512, 4096] if _device(options).type == "cuda" else [1, 8]
        wanted = options.shapes.split(","), options.routings, options.tokens or usual
        moe.run(*wanted, _measuring(options), environment.rates(_device(options)), found)
    except KeyboardInterrupt:
        stopped = INTERRUPTED
        print(f"interrupted after {len(found)} points", file=sys.stderr)
    except UsageError:
        raise
    except Exception:  # whatever it is, what was measured until then is kept
        stopped = IMPOSSIBLE
        print(f"error: after {len(found)} points", file=sys.stderr)
        traceback.print_exc()
    rows = [row for parts in found.values() for row in parts.values()]
    return _finish(options, header, rows, moe.table(found)) or stopped


def _env(options: argparse.Namespace) -> int:
    _print_header(options)
    return OK


def _explain(options: argparse.Namespace) -> int:
    for case in _chosen(options, [options.op]):
        problem = case.build(Draw(0, _device(options)))
        found = dispatch.explain(
            problem.function, *problem.args, **problem.kwargs, backend=options.backend
        )
        print(f"{case.name or case.op} {case.shape} tokens={case.tokens}\n{found}\n")
    return OK
