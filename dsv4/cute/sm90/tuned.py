"""Measured figures of a GPU that decide plans of kernels, read from a data file.

A file names the GPU, the date and the versions of its measurement. All Hopper GPUs use the figures
of an H200.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

SCHEMA = "dsv4 plans 1"
_FOLDER = Path(__file__).parent / "data"
_H200 = "nvidia_h200.json"

R = TypeVar("R")


class TunedFileError(ValueError):
    """A data file of plans has a wrong schema, field or value."""


class SmallMKey(NamedTuple):
    """A matrix and a number of tokens of the small-M GEMM.

    Attributes:
        token_tiles: Tiles of 8 tokens, 1 or 2.
        row_tiles: N / 16, all groups.
        group_tiles: Row tiles that share an input.
        columns: K.
    """

    token_tiles: int
    row_tiles: int
    group_tiles: int
    columns: int


@dataclass(frozen=True)
class SmallMConfiguration:
    """The fastest configuration that a search found for a key, with bfloat16 results.

    Attributes:
        ctas: CTAs of a cluster.
        warps: Warps of a CTA.
        stages: Weight tiles that a lane has prefetched.
        rounds: Sets of registers for them.
        ring: Whether the kernel with rings in shared memory was the faster one.
    """

    ctas: int
    warps: int
    stages: int
    rounds: int
    ring: bool


@dataclass(frozen=True)
class SmallMData:
    """Data of the small-M GEMM.

    Attributes:
        enough_warps: Number of warps from which K is not split over more CTAs: about two for each
            quarter of the GPU's SMs.
        few_tokens: Most tokens for which this kernel is faster than the one for large M.
        small_matrix: Most weights of a matrix for which it is faster for up to 16 tokens.
        configurations: Measured configurations, those with rings first.
    """

    enough_warps: int
    few_tokens: int
    small_matrix: int
    configurations: Mapping[SmallMKey, tuple[SmallMConfiguration, ...]]

    def of(self, key: SmallMKey) -> tuple[SmallMConfiguration, ...]:
        """Return the measured configurations of a key, the fastest first."""
        return self.configurations.get(key, ())


@dataclass(frozen=True)
class TunedData:
    """Content of a data file.

    Attributes:
        gpu: Name of the GPU that was measured.
        date: Date of the measurement.
        versions: Version of each package.
        source: How the figures were measured.
        sms: SMs of the GPU.
        clusters: Number of clusters that the GPU holds at a time, by CTAs of a cluster.
        gemm_small_m: Data of the small-M GEMM.
    """

    gpu: str
    date: str
    versions: Mapping[str, str]
    source: str
    sms: int
    clusters: Mapping[int, int]
    gemm_small_m: SmallMData


@functools.cache
def tuned() -> TunedData:
    """Return the data that plans are chosen by."""
    return read(_FOLDER / _H200)


def read(path: Path) -> TunedData:
    """Read a data file.

    Raises:
        TunedFileError: naming the file, the field, what was found and what was expected.
    """
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise TunedFileError(f"{path}: wanted a file of schema {SCHEMA!r}")
    small = _checked(path, "gemm_small_m", content.get("gemm_small_m"), SmallMData)
    measured_of: dict[SmallMKey, tuple[SmallMConfiguration, ...]] = {}
    for i, entry in enumerate(small["configurations"]):
        where = f"gemm_small_m.configurations[{i}]"
        names = set(SmallMKey._fields)
        if not isinstance(entry, dict) or not names <= entry.keys():
            raise TunedFileError(f"{path}: {where} has no {sorted(names)}")
        key = SmallMKey(*(entry[name] for name in SmallMKey._fields))
        rest = {name: value for name, value in entry.items() if name not in names}
        made = SmallMConfiguration(**_checked(path, where, rest, SmallMConfiguration))
        measured_of[key] = (
            (made, *measured_of.get(key, ())) if made.ring else (*measured_of.get(key, ()), made)
        )
    rest = {name: value for name, value in content.items() if name != "schema"}
    values = _checked(path, "the file", rest, TunedData)
    clusters = {int(ctas): count for ctas, count in values["clusters"].items()}
    data = SmallMData(**{**small, "configurations": measured_of})
    return TunedData(**{**values, "clusters": clusters, "gemm_small_m": data})


def _checked(path: Path, where: str, content: Any, record: type[R]) -> dict[str, Any]:
    """Return the fields of a record; raise if one is missing, unknown, or no positive number."""
    names = {field.name: field.type for field in fields(record)}  # type: ignore[arg-type]
    if not isinstance(content, dict) or content.keys() != names.keys():
        have = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise TunedFileError(f"{path}: {where} has {have}, wanted {sorted(names)}")
    for name, kind in names.items():
        value = content[name]
        if kind == "int" and (type(value) is not int or value < 1):
            raise TunedFileError(f"{path}: {where}.{name} is {value!r}, wanted 1 or more")
        if kind == "bool" and type(value) is not bool:
            raise TunedFileError(f"{path}: {where}.{name} is {value!r}, wanted true or false")
    return content
