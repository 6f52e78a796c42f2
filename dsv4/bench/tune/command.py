"""The command ``tune``: options to a search, its report, and the data file."""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4.bench import environment, tables
from dsv4.bench.cases import PRESETS
from dsv4.bench.child import Child
from dsv4.bench.measure import Options
from dsv4.bench.problem import UsageError
from dsv4.bench.tune import outcome, search
from dsv4.bench.tune.families import named
from dsv4.bench.tune.guarded_timer import GuardedTimer, Setup
from dsv4.bench.tune.outcome import Fitted
from dsv4.bench.tune.work import Family, Measured, Timer, Work
from dsv4.cute.sm90 import tuned
from dsv4.cute.sm90.tuned_file import OF_KEY
from dsv4.cute.sm90.tuned_records import TunedData, merged
from dsv4.cute.supports import not_hopper
from dsv4.device import Gpu, gpu_of, has, pretend

OK, WRONG, INTERRUPTED = 0, 1, 130
_HEADINGS = ("family", "problem", "rule us", "best us", "faster", "best plan")


@dataclass(frozen=True)
class Search:
    """The request: what to measure, and where the results go.

    Attributes:
        families: Families of kernels.
        works: Their problems, in the order in which they are measured.
        base: Figures that hold without the user's file.
        seconds: Budget of the measurement.
        path: The data file; None: nothing is written.
        is_users: Whether that is the file that launchers read, whose other families are kept.
    """

    families: Sequence[Family]
    works: Sequence[Work]
    base: TunedData
    seconds: float
    path: Path | None
    is_users: bool


def run(options: argparse.Namespace, measuring: Options) -> int:
    """Run the command; return the exit status.

    Raises:
        UsageError: without a Hopper GPU and CuTeDSL, or for an unknown family or preset.
    """
    device = measuring.device
    reason = _impossible(device)
    if reason is not None and not options.dry_run:
        raise UsageError(f"tune: {reason}")
    gpu = gpu_of(torch.cuda.get_device_properties(device)) if reason is None else None
    base = tuned.resolve(gpu, user=False)
    with pretend(plans=base):
        families, configs = named(options.only or ()), _configs(options.shapes)
        works = search.interleaved([list(family.works(configs)) for family in families])
        if options.dry_run:
            print("\n".join(_listed(works, base, reason)))
            return OK
        assert gpu is not None
        path, is_users = _target(options.out, gpu)
        request = Search(families, works, base, options.seconds, path, is_users)
        setup = Setup(tuple(family.name for family in families), configs, base, measuring)
        with Child(setup.measurer) as child:
            return measure(request, gpu, GuardedTimer(child, families))


def _impossible(device: torch.device) -> str | None:
    """Return why nothing can be measured on a device, or None."""
    if device.type != "cuda":
        return f"needs a Hopper GPU (compute capability 9.0), the device is {device}"
    reason = not_hopper(device)
    if reason is None and not has("cutlass"):
        return "kernels of candidates have to be compiled, and nvidia-cutlass-dsl is not installed"
    return reason


def _configs(names: str) -> dict:
    unknown = [name for name in names.split(",") if name not in PRESETS]
    if unknown:
        raise UsageError(f"--shapes has {unknown[0]!r}, wanted of {', '.join(PRESETS)}")
    return {name: PRESETS[name]() for name in names.split(",")}


def _target(out: str | None, gpu: Gpu) -> tuple[Path, bool]:
    """Return the data file, and whether launchers read it."""
    users = tuned.user_path(gpu)
    if out is None and users is None:
        raise UsageError("tune: there is no home directory; name a file by --out")
    path = users if out is None else Path(out).absolute()
    assert path is not None
    folder = next(parent for parent in path.parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"--out is {str(path)!r}, and no file can be written there")
    return path, path == users


def _listed(works: Sequence[Work], base: TunedData, reason: str | None) -> Iterator[str]:
    """Describe what would be measured, a line for each problem."""
    if reason is not None:
        yield f"without such a GPU the plans are those of an {base.gpu}: tune {reason}"
    for work in works:
        yield f"{work.family}: {work.name}: {len(work.candidates)} candidates"
    count = sum(len(work.candidates) for work in works)
    yield f"{len(works)} problems, {count} candidates; nothing was measured"


def measure(
    request: Search, gpu: Gpu, timer: Timer, clock: Callable[[], float] = time.monotonic
) -> int:
    """Measure, fit, print the report and write the file; return the exit status.

    An interrupt, an error or the time limit ends the measurement early. The file then contains the
    problems of which all candidates were measured.
    """
    measured: list[Measured] = []
    stopped, status = "", OK
    try:
        stopped = search.run(request.works, timer, request.seconds, clock, measured, print)
        clusters = timer.clusters()
    except KeyboardInterrupt:
        stopped, status, clusters = "interrupted", INTERRUPTED, dict(request.base.clusters)
    except Exception as error:  # whatever it is, what was measured until then is kept
        traceback.print_exc()
        stopped, status = f"{type(error).__name__}: {error}", WRONG
        clusters = dict(request.base.clusters)
    if any(m.wrong or m.failed for m in measured):
        status = status or WRONG
    fits = [
        outcome.fitted(family, request.base, [m for m in measured if m.work.family == family.name])
        for family in request.families
    ]
    data = outcome.data(
        request.base,
        fits,
        measured,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        versions=environment.versions(),
        source=f"python -m dsv4.bench tune, commit {environment.commit()}",
        clusters=clusters,
    )
    print("\n".join(report(fits, measured, data)))
    if stopped:
        print(f"stopped: {stopped}")
    if not data.families:
        print("no problem was measured whole, so no file was written")
        return status or WRONG
    if request.path is not None:
        _write(request, gpu, data)
    return status


def _write(request: Search, gpu: Gpu, data: TunedData) -> None:
    """Write the file; a user's file keeps families that were not measured this time."""
    assert request.path is not None
    before = tuned.user_data(gpu) if request.is_users else None
    tuned.write(data if before is None else merged(before, data, OF_KEY), request.path)
    print(f"wrote {request.path}")
    if not request.is_users:
        print(f"launchers read it as {tuned.user_path(gpu)}")


def report(fits: Sequence[Fitted], measured: Sequence[Measured], data: TunedData) -> Iterator[str]:
    """Return the report: a line for each problem, then one for each family."""
    body = []
    for times in measured:
        if times.work.key not in data.entries or not times.is_whole:
            continue
        entry = data.entries[times.work.key]
        rule = "wrong" if entry.rule_us is None else f"{entry.rule_us:.2f}"
        gain = entry.rule_us / entry.us - 1 if entry.rule_us and entry.us else None
        faster = "" if gain is None else f"{gain:.1%}"
        plan = ", ".join(f"{name} {value}" for name, value in vars(entry.plan).items())
        row = (times.work.family, times.work.name, rule, f"{entry.us:.2f}", faster, plan)
        body.append(row)
    yield from tables.plain(_HEADINGS, body)
    for fit in fits:
        own = [m for m in measured if m.work.family == fit.family]
        yield _summary(fit, own, data)


def _summary(fit: Fitted, measured: Sequence[Measured], data: TunedData) -> str:
    """Return a family's line: problems, candidates left out, gains and residuals."""
    whole = [m for m in measured if m.is_whole]
    entries = [data.entries[m.work.key] for m in whole if m.work.key in data.entries]
    parts = [f"{len(whole)} problems"]
    wrong = sum(len(m.wrong) for m in measured)
    if wrong:
        parts.append(f"{wrong} wrong candidates left out")
    failed = sum(len(m.failed) for m in measured)
    if failed:
        some_failed = f"{failed} failed candidates left out"
        parts.append(search.given_up(measured, fit.family) or some_failed)
    gains = [e.rule_us / e.us - 1 for e in entries if e.us and e.rule_us]
    if gains:
        gain = f"the best plans are {statistics.fmean(gains):.1%} faster than the rule's on average"
        parts.append(f"{gain}, {max(gains):.1%} at most")
    if fit.before is not None:
        parts.append(f"residual of the rule's constants {fit.before.mean:.1%}")
    if fit.after is not None:
        parts.append(f"of the fitted ones {fit.after.mean:.1%} ({fit.after.worst:.1%} at worst)")
    if fit.words:
        parts.append(f"constants stay: {fit.words}")
    return f"{fit.family}: {'; '.join(parts)}"
