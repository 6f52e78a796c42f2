"""``python -m dsv4 vllm-report``: what the plugin knows, is asked for, and did last."""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Iterator
from pathlib import Path

from dsv4.integrations.vllm import places
from dsv4.integrations.vllm.report import Report, folder
from dsv4.integrations.vllm.switches import PARTS, Switches

DESCRIPTION = """\
Say which vLLM is installed and known, which parts of its DeepSeek-V4 this package can replace, what
the environment variables DSV4_VLLM, DSV4_VLLM_STRICT and DSV4_VLLM_CHECK ask for, and what was
replaced in the engine that was started last. Imports vLLM, which takes seconds."""


def text(last_only: bool) -> str:
    """Return what the command prints.

    Args:
        last_only: Whether that is the last saved table alone.

    Raises:
        ValueError: if an environment variable has an unknown value, or a report is damaged, or
            ``last_only`` and there is none.
    """
    if last_only:
        return "\n".join(_last())
    return "\n".join([*_versions(), *_switches(), *_places(), *_last_if_any()])


def _versions() -> Iterator[str]:
    supported = ", ".join(f"{version}.x" for version in places.VERSIONS)
    version = _installed()
    if not version:
        yield f"vLLM: not installed; supported: {supported}"
    elif places.is_supported(version):
        yield f"vLLM: {version}, supported"
    else:
        yield f"vLLM: {version}, not supported ({supported} is): the plugin leaves it untouched"


def _installed() -> str:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _switches() -> Iterator[str]:
    switches = Switches.of()
    if switches.off:
        yield "DSV4_VLLM: off, vLLM stays as it is"
    elif switches.model:
        yield "DSV4_VLLM: this package's model under vLLM's engine"
    else:
        asked = ", ".join(part for part in PARTS if part in switches.parts)
        yield f"DSV4_VLLM: parts of vLLM's model: {asked}"
    yield f"DSV4_VLLM_STRICT: {_on(switches.strict)}, DSV4_VLLM_CHECK: {_on(switches.check)}"


def _on(switch: bool) -> str:
    return "on" if switch else "off"


def _places() -> Iterator[str]:
    if not _installed():
        return
    for part in places.NAMES:
        known = places.of_part(part)
        different = places.mismatches(known)
        verdict = f"{len(different)} differ" if different else "all as expected"
        yield f"{part}: {len(known)} functions and classes of vLLM, {verdict}"
        yield from (f"  {sentence}" for sentence in different)


def _last_if_any() -> Iterator[str]:
    if saved():
        yield from _last()
    else:
        yield f"No report was saved in {folder()}."


def _last() -> Iterator[str]:
    paths = saved()
    if not paths:
        raise ValueError(
            f"--last: there is no report in {folder()}; vLLM saves one when it has loaded a "
            "DeepSeek-V4 with this plugin"
        )
    for path in paths:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        yield f"{path.name}, {when}"
        yield str(_read(path))


def _read(path: Path) -> Report:
    try:
        return Report.read(path)
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it") from error


def saved() -> list[Path]:
    """Return the reports of the engine that was started last, a file per pipeline stage."""
    reports = folder()
    if reports is None or not reports.is_dir():
        return []
    paths = sorted(reports.glob("report-*-of-*.json"), key=lambda path: path.stat().st_mtime)
    if not paths:
        return []
    stages = _stages(paths[-1])
    return sorted((path for path in paths if _stages(path) == stages), key=lambda path: path.name)


def _stages(path: Path) -> str:
    return path.stem.rpartition("-")[2]
