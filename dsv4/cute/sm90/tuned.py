"""The figures that plans of kernels on Hopper are chosen by, and where they are from.

For each family of kernels, the first of these: the user's file, which ``python -m dsv4.bench tune``
wrote for this GPU; a file of this package for this GPU; the rule (``tuned_records.by_rule``), which
scales the figures of an H200 by the GPU's SMs and bandwidth. A process without a Hopper GPU has the
figures of an H200.

The user's file is in ``plans`` in the folder of compiled kernels (``$DSV4_CACHE_DIR`` or
``~/.cache/dsv4/kernels``). A file of another schema or GPU, or with anything else wrong, is not
used at all, and the reason is logged. Without CuTeDSL the figures of an H200 hold on every GPU,
because wheels of compiled kernels have those of their plans.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path

from dsv4.cute.runtime import trusted
from dsv4.cute.runtime.cubin_cache import folder
from dsv4.cute.sm90.tuned_file import FAMILIES, OF_KEY, TunedFileError, decode, encode
from dsv4.cute.sm90.tuned_records import RULE, SHIPPED, TUNED, Origin, TunedData, by_rule, combined
from dsv4.device import MACHINE, Gpu, cached, has, hopper

_FOLDER = Path(__file__).parent / "data"
_H200 = "nvidia_h200.json"
_MOST_BYTES = 1 << 22
_log = logging.getLogger(__name__)


@cached
def tuned() -> TunedData:
    """Return the figures that plans are chosen by."""
    pretended: TunedData | None = MACHINE.pretended.plans
    return resolve(hopper()) if pretended is None else pretended


def resolve(gpu: Gpu | None, *, user: bool = True) -> TunedData:
    """Return the figures of a GPU; of none: those of an H200.

    Args:
        gpu: The GPU.
        user: Whether the user's file counts.
    """
    base = _with_rule(read(_FOLDER / _H200))
    if gpu is None:
        return base
    if not has("cutlass"):
        origin = Origin(RULE, f"figures of {base.gpu}: without CuTeDSL no other kernel is compiled")
        return dataclasses.replace(base, origins=dict.fromkeys(base.origins, origin))
    own = _FOLDER / file_name(gpu.name).replace("-", "_")
    if is_of(base, gpu):
        below = base
    else:
        below = by_rule(base, gpu)
        if own.is_file() and is_of(shipped := read(own), gpu):
            below = combined(below, shipped, OF_KEY)
    above = user_data(gpu) if user else None
    return below if above is None else combined(below, above, OF_KEY)


def _with_rule(data: TunedData) -> TunedData:
    """Return the figures of a shipped file, with origins of families that it leaves out."""
    rule = dict.fromkeys(FAMILIES, Origin(RULE, f"constants fitted on {data.gpu}"))
    return dataclasses.replace(data, origins={**rule, **data.origins})


def read(path: Path) -> TunedData:
    """Read a file of this package, or one that a maintainer names.

    Raises:
        TunedFileError: naming the file, the field, what was found and what was expected.
        OSError: if it cannot be read.
    """
    return decode(path.read_text(), SHIPPED, path.name)


def user_path(gpu: Gpu) -> Path | None:
    """Return where the user's file of a GPU is; None without a home directory."""
    kernels = folder()
    return None if kernels is None else kernels / "plans" / file_name(gpu.name)


def file_name(gpu: str) -> str:
    """Return the name of a GPU's file: ``"nvidia-h200.json"``."""
    return (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "unknown") + ".json"


def user_data(gpu: Gpu) -> TunedData | None:
    """Return the user's file of a GPU; None if there is none that can be used."""
    path = user_path(gpu)
    if path is None or not path.is_file():
        return None
    try:
        trusted.check_folder(str(path.parent))
        text = trusted.read_file(str(path), _MOST_BYTES).decode()
        data = decode(text, TUNED, str(path))
        if not is_of(data, gpu):
            actual, expected = f"{data.gpu!r} with {data.sms} SMs", f"{gpu.name!r} with {gpu.sms}"
            raise TunedFileError(f"{path}: is of {actual}, wanted {expected}")
    except (TunedFileError, trusted.UntrustedError, OSError, UnicodeDecodeError) as reason:
        _log.warning("the plans in %s are not used: %s", path, reason)
        return None
    return data


def is_of(data: TunedData, gpu: Gpu) -> bool:
    """Return whether figures are of a GPU: of its name and its SMs."""
    return (data.gpu, data.sms) == (gpu.name, gpu.sms)


def write(data: TunedData, path: Path) -> None:
    """Write a file in one step: readers find the old one, none, or all of the new one.

    Raises:
        TunedFileError: if it could not be read back, and nothing is written.
        OSError: if it cannot be written; nothing is left behind.
        trusted.UntrustedError: if another user's file is there.
    """
    text = encode(data)
    decode(text, TUNED, path.name)
    trusted.make_folder(str(path.absolute().parent))
    trusted.write_file(str(path.absolute()), text.encode())


def said(family: str) -> str:
    """Return where the plans of a family are from, in words."""
    return f"plans: {tuned().origins[family]}"


def lines() -> list[str]:
    """Return where the plans of all families are from, families of one source in a line."""
    by_origin: dict[str, list[str]] = {}
    for name, origin in tuned().origins.items():
        by_origin.setdefault(str(origin), []).append(name)
    return [f"plans of {', '.join(names)}: {origin}" for origin, names in by_origin.items()]
