"""Commands of the bench and their options."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any, NoReturn

from dsv4.bench.cases import PRESETS
from dsv4.bench.problem import UsageError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parser() -> argparse.ArgumentParser:
    """The commands, by name in ``command``, and their options."""
    top = _Parser(
        prog="python -m dsv4.bench",
        description="Without a command: check generation and every operator on this machine.",
        epilog="The last line says what failed and where, or that all passed.",
    )
    _common(top)
    top.add_argument("--version", action="store_true", help="print versions and exit")
    top.set_defaults(command="main job")
    commands = top.add_subparsers(metavar="command", parser_class=_Parser)
    _run(
        commands.add_parser(
            "run", help="check, then time operators; `run gemm --check` validates every kernel"
        )
    )
    listing = commands.add_parser("list", help="operators, their cases and implementations")
    listing.set_defaults(command="list")
    layer = commands.add_parser(
        "layer", help="a decode step of one layer without its GEMMs, on a GPU"
    )
    _sizes(layer)
    layer.add_argument("--context", type=_positive, default=8192, help="tokens before; 8192")
    _common(layer, refused=("--repeat", "--seed"))
    layer.set_defaults(command="layer")
    _moe(
        commands.add_parser("moe", help="routed experts and the block around them, by routing"),
    )
    _crossover(
        commands.add_parser(
            "crossover", help="from how many tokens on FP8 arithmetic is faster, by shape"
        )
    )
    _all_reduce(
        commands.add_parser("all_reduce", help="sums over ranks, by size and implementation"),
    )
    _model(
        commands.add_parser("model", help="whole models of random weights: ms per token, prompts"),
    )
    env = commands.add_parser("env", help="this machine: names, versions, measured rates")
    env.add_argument("--device", default=argparse.SUPPRESS)
    env.set_defaults(command="env")
    explain = commands.add_parser("explain", help="which implementation runs, and why")
    explain.add_argument("op", metavar="OP")
    _sizes(explain)
    _own_sizes(explain)
    explain.add_argument("--backend", default="auto")
    explain.add_argument("--device", default=argparse.SUPPRESS)
    explain.set_defaults(command="explain")
    _compare(
        commands.add_parser("compare", help="two files of results, row by row; status 1 if slower")
    )
    _tune(commands.add_parser("tune", help="measure plans of kernels for this GPU, and keep them"))
    _report(commands.add_parser("report", help="pages and charts from files of results"))
    return top


def _run(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "ops",
        nargs="*",
        metavar="OP",
        help="operators, as dsv4.ops names them; default: all. Or attention, indexer or "
        "attention_layer alone, which have sizes of their own",
    )
    _sizes(run)
    _own_sizes(run)
    run.add_argument(
        "--cases",
        type=_names,
        help="shell patterns over the names of cases, comma-separated, e.g. 'q_b,*w4a4'",
    )
    run.add_argument("--backend", default="auto", help="implementations, comma-separated")
    _baselines(run, "cublas,quack; default: those quick to prepare")
    run.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="validate every GEMM kernel and print a report to send back; "
        "--no-check: time unchecked. Default: check each result, then time it",
    )
    _rest(run)
    _common(run)
    run.set_defaults(command="run")


def _moe(moe: argparse.ArgumentParser) -> None:
    _sizes(moe, None)
    _shape(moe)
    moe.add_argument(
        "--routings",
        type=_names,
        default=["uniform", "zipf", "single"],
        help="uniform, zipf, single, comma-separated; default all",
    )
    moe.add_argument(
        "--activation",
        default="bf16",
        help="what the experts multiply: bf16 (default), or fp8, with weights that are exact in "
        "FP8 (cast from MXFP4)",
    )
    _baselines(moe, "Humming; default all")
    _rest(moe)
    _common(moe)
    moe.set_defaults(command="moe")


def _crossover(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names = ", ".join(PRESETS)
    add("--shapes", help=f"{names}, comma-separated; default flash,pro, on a CPU tiny")
    usual = "64 to 8192 in powers of two, on a CPU 1,8"
    add("--tokens", type=_numbers, help=f"e.g. 64,256,1024; default {usual}")
    add(
        "--experts",
        type=_numbers,
        help="routed experts; default 64 and the model's, on a CPU the model's",
    )
    add(
        "--cases",
        type=_names,
        default=["*"],
        help="shell patterns over the names of GEMMs, comma-separated, e.g. 'flash q_b,*experts*'",
    )
    add("--seconds", type=_limit, default=600.0, help="no measurement begins later; default 600")
    _common(parser, file="<date>-crossover", repeat="1, on a GPU 10")
    parser.set_defaults(command="crossover")


def _all_reduce(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--bytes", type=_numbers, help="of the sums; default a token, 64 and 4096 of the models")
    add("--backend", type=_names, help="implementations, comma-separated; default all")
    add(
        "--ranks",
        type=_positive,
        help="virtual ranks on one GPU: kernels without NVLink. Without it start the command by "
        "torchrun, a process per rank",
    )
    _common(parser, repeat="20, on a GPU 50")
    parser.set_defaults(command="all_reduce")


def _model(model: argparse.ArgumentParser) -> None:
    add = model.add_argument
    add("--preset", help=f"{', '.join(PRESETS)}; default flash, on a CPU tiny")
    add("--experts", type=_positive, help="routed experts of a layer; default: the preset's")
    add("--layers", type=_positive, help="the first layers; default: all of the preset's")
    add("--tokens", type=_numbers, help="sequences of a step; default 1,8,64, on a CPU 1,2")
    add("--context", type=_numbers, help="tokens of each before it; default 4096, on a CPU 64")
    add("--prompts", help="lengths, or none; default 21,512,4096,32768, on a CPU 5,21")
    add("--weights", help="random (default), or mxfp4-cast: powers of two as block scales")
    add("--recipe", help="nvfp4 (default), or nvidia: FP8 attention and shared experts")
    add("--activation", help="what quantised weights multiply: bf16 (default), nvfp4 or fp8")
    add("--checkpoint", metavar="DIR", help="load it in place of a preset and random weights")
    add(
        "--columns",
        type=_names,
        help="step,kernels,runner,generate,eager, which is the default, and deterministic: a "
        "runner whose decode steps have one sequence",
    )
    add("--steps", type=_positive, help="timed steps of runner and generate; default 32, CPU 4")
    add(
        "--prefill-limit",
        type=_positive,
        default=1 << 19,
        metavar="TOKENS",
        help="most prompt tokens to bring a batch of runner and generate to its context; 524288",
    )
    add(
        "--host-experts",
        metavar="STATIC+SLOTS[+STAGED]",
        help="experts in host memory: how many of a layer are static on the GPU, how many slots "
        "there are for the others and how many a half of the buffer for long prompts holds (0), or "
        "auto; decode steps under drawn routing and their hit rates, with --speculate those with "
        "drafts, too",
    )
    add("--speculate", metavar="METHOD", help="mtp or dspark: steps with drafts, too")
    add(
        "--draft-tokens",
        type=_positive,
        help="drafts per step; default 2 of mtp, 5 of dspark, 1 of either with --host-experts",
    )
    add(
        "--accept",
        type=_share,
        metavar="SHARE",
        help="count drafts as right by a seed, so that this share of them is accepted, 0 to 1; "
        "default: as the model verifies them, which with random weights accepts none",
    )
    add(
        "--confidence-threshold",
        type=_share,
        metavar="P",
        help="verify DSpark drafts that are accepted with at least this probability, 0: all; "
        "default: by costs, of random weights 0, because their confidence means nothing",
    )
    add("--limit", type=_limit, metavar="SECONDS", help="no measurement begins after it")
    add(
        "--emulate-peers",
        type=_positive,
        metavar="N",
        help="rank 0's share of a model on N GPUs, with the mailboxes of the others on this one: "
        "times without NVLink. Several GPUs: start the command by torchrun",
    )
    add(
        "--parallel",
        help="how several ranks share the model: tp (default), or dp, where each rank has --tokens "
        "sequences of its own",
    )
    add("--profile", action="store_true", help="print each captured step's kernels by operator")
    add(
        "--trace",
        metavar="PATH",
        help="map the captured step: a Chrome trace with its launches, their waits and the "
        "critical path, and a table by operator; one of --tokens and --context, on a CUDA GPU",
    )
    file = "<date>-model_<preset>_<recipe>"
    _common(model, "--out", file=file, refused=("--csv", "--markdown"))
    model.set_defaults(command="model")


def _tune(tune: argparse.ArgumentParser) -> None:
    add = tune.add_argument
    add(
        "--out",
        metavar="FILE",
        help="the data file; default: the one that launchers of this user read",
    )
    add("--only", nargs="+", metavar="OP", help="operators, or families as the report names them")
    add(
        "--seconds",
        type=_limit,
        default=600.0,
        help="no measurement begins later; what was measured until then is kept; default 600",
    )
    add("--dry-run", action="store_true", help="list what would be measured, and write nothing")
    add("--shapes", default="flash,pro", help=f"{', '.join(PRESETS)}, comma-separated")
    add("--repeat", type=_positive, default=20, help="timed runs; default 20")
    add("--seed", type=int, default=argparse.SUPPRESS, help="of the random inputs; default 0")
    add("--device", default=argparse.SUPPRESS, help="default: cuda:0 if there is one, else cpu")
    tune.set_defaults(command="tune")


def _compare(compare: argparse.ArgumentParser) -> None:
    compare.add_argument("a", metavar="A.json", help="results before")
    compare.add_argument("b", metavar="B.json", help="results after")
    compare.add_argument(
        "--threshold",
        type=_percent,
        default=5.0,
        metavar="PERCENT",
        help="a smaller difference counts as none, a row that is slower by more gives status 1; "
        "default 5",
    )
    compare.set_defaults(command="compare")


def _report(report: argparse.ArgumentParser) -> None:
    add = report.add_argument
    add("folder", nargs="?", default="results", metavar="FOLDER", help="default: results")
    add(
        "--readme",
        metavar="FILE",
        help="document whose marked blocks are written; default: README.md beside FOLDER; or none",
    )
    add(
        "--check",
        action="store_true",
        help="write nothing; status 1 and one sentence if a page, a chart or a block is out of "
        "date",
    )
    add(
        "--redraw",
        action="store_true",
        help="draw charts whose numbers have not changed, too, with the installed matplotlib",
    )
    report.set_defaults(command="report")


def _common(
    to: argparse.ArgumentParser,
    *names_of_json: str,
    file: str = "<date>-<op>",
    repeat: str = "5, on a GPU 50",
    refused: Sequence[str] = (),
) -> None:
    """Add the options that most commands take.

    Args:
        to: Parser of a command.
        names_of_json: Other names of ``--json``.
        file: Name of the file in a folder of results.
        repeat: Default of ``--repeat``, in words.
        refused: Options that the command refuses, which its help leaves out.
    """
    # Suppressed defaults: a command's parser must not undo what was given before the command.
    none = argparse.SUPPRESS

    def add(name: str, *others: str, help: str, **how: Any) -> None:
        said = none if name in refused else help
        to.add_argument(name, *others, default=none, help=said, **how)

    folder = f"a file, or DIR/ for results/<gpu>/{file}.json"
    add("--json", *names_of_json, dest="json", metavar="PATH", help=folder)
    add("--csv", metavar="PATH", help="a file")
    add("--markdown", action="store_true", help="print a Markdown table")
    add("--repeat", type=_positive, help=f"timed runs; default {repeat}")
    add("--seed", type=int, help="of the random inputs; default 0")
    add("--device", help="default: cuda:0 if there is one, else cpu")


def _baselines(to: argparse.ArgumentParser, example: str) -> None:
    to.add_argument(
        "--baselines",
        "--rivals",
        dest="baselines",
        type=lambda text: () if text == "none" else tuple(text.split(",")),
        metavar="NAMES",
        help=f"what to time for comparison, comma-separated, or none; e.g. {example} "
        "(--rivals: the old name)",
    )


def _rest(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--rest",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="time everything, baselines too, once more with so much rest before each timed run, "
        "in rows named 'cooled' (a GPU at its power limit has a lower clock without); "
        "0.06, say",
    )


def _sizes(to: argparse.ArgumentParser, tokens: Sequence[int] | None = (16,)) -> None:
    to.add_argument("--shapes", default="tiny", help=f"{', '.join(PRESETS)}, comma-separated")
    usual = "16" if tokens else "1,8,64,512,4096, on a CPU 1,8"
    to.add_argument(
        "--tokens", type=_numbers, default=tokens, help=f"e.g. 1,16,256; default {usual}"
    )


def _own_sizes(to: argparse.ArgumentParser) -> None:
    _shape(to)
    for name, what in (("n", "N, rows of the weight"), ("k", "K, its columns")):
        to.add_argument(
            f"--{name}",
            type=_positive,
            metavar=name.upper(),
            help=f"{what}, for gemm alone, in place of --shapes; M is --tokens",
        )


def _shape(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--shape",
        action="append",
        metavar="NAME=SIZE,...",
        help="sizes of one's own in place of --shapes, by the names that rows have, as "
        "N=4096,K=7168; may be given several times",
    )


def _names(text: str) -> list[str]:
    return text.split(",")


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer, wanted 1 or more") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 60:
        raise argparse.ArgumentTypeError(f"{text} is not within 0 to 60 seconds")
    return value


def _limit(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time, wanted 0 seconds or more")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share, wanted 0 to 1")
    return value


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not within 0 to 1000 percent")
    return value


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]
