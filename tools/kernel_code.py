"""Record the machine code of CuTeDSL kernels, or tell which kernels differ from a record.

``python tools/kernel_code.py write FILE`` compiles a sample of configurations of every kernel and
writes a hash of each one's machine code. ``python tools/kernel_code.py compare FILE`` compiles the
same configurations again and lists those whose code differs; it exits with 1 if there are any.
``--only TEXT`` (repeatable) restricts either command to requests that contain the text.

A refactoring of kernels should leave every hash as it was. The hash covers the instructions, the
registers, the layout of the parameters and the static shared memory; the names of kernels and of
plans do not enter it. A configuration is recorded as the request that chooses it (a matrix, a
number of tokens, ...), so that fields of plans and modules can be renamed between two runs.

The sample holds every pair of values of two fields of a kernel's plan, as the tests do
(``tests/_tools/covering.py``). Needs nvidia-cutlass-dsl, no GPU; takes 3 to 5 minutes of one core.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dsv4.cute import attention, grouped_gemm
from dsv4.cute.grouped_problem import Experts
from dsv4.cute.runtime import cubin_cache
from dsv4.cute.sm90 import indexer_logits_plan
from dsv4.cute.sm90.e4m3_converted_plan import CONVERT, converted_plan, grouped_converted_plan
from dsv4.cute.sm90.gemm_e4m3_plan import block_e4m3_plan, e4m3_plan, grouped_e4m3_plan
from dsv4.cute.sm90.gemm_fp8_wgmma_plan import fp8_plan
from dsv4.cute.sm90.grouped_gemm_plans import typical_plan
from dsv4.cute.sm90.plans import GemmProblem, choose, token_counts
from dsv4.cute.sm100 import grouped_gemm_plan as sm100_grouped
from dsv4.cute.sm100 import plans as sm100_gemm
from tests._tools.covering import covering
from tests._tools.deepseek_sizes import INTERLEAVED, MATRICES, ROUTED

Request = tuple[Any, ...]  # the chooser's name in ``CHOOSERS``, the architecture, its arguments

_BOTH = (False, True)
_MOST_ROWS = 6 * 32768
_ALL = 10  # kernels with so few plans are compiled in all of them
_NO_BITS = 8  # ELF section type without contents
_DENSE_E4M3 = {"nvfp4": e4m3_plan, "converted": converted_plan, "fp8": block_e4m3_plan}
_HASHED = (b".text", b".nv.info", b".nv.constant0", b".nv.shared")


def _gemm(arch: str, matrix: list[int], kind: list[bool], tokens: int) -> Any:
    return choose(GemmProblem(*matrix, *kind), tokens, arch)


def _gemm_fp8(arch: str, matrix: list[int], float32_out: bool, tokens: int, folded: bool) -> Any:
    return fp8_plan(GemmProblem(*matrix, float32_out, False), tokens, folded)


def _gemm_e4m3(arch: str, weights: str, rows: int, tokens: int, kind: list[bool]) -> Any:
    return _DENSE_E4M3[weights](rows, 128, tokens, *kind)


def _grouped_e4m3(arch: str, weights: str, rows: int, kind: list[bool]) -> Any:
    if weights == "converted":
        return grouped_converted_plan(128, *kind)
    return grouped_e4m3_plan(rows, 8, *kind)


def _convert_e4m3(arch: str) -> Any:
    return CONVERT


def _grouped(arch: str, experts: list[Any], rows: int) -> Any:
    return typical_plan(Experts(*experts), rows, arch)


def _grouped_share(arch: str, experts: list[Any], number: int) -> Any:
    return grouped_gemm.plans(Experts(*experts), _MOST_ROWS, arch)[number]


def _attention(arch: str, number: int) -> Any:
    return attention.plans()[number]


def _indexer(arch: str, number: int) -> Any:
    return indexer_logits_plan.plans()[number]


def _sm100_gemm(arch: str, kind: list[bool], number: int) -> Any:
    return sm100_gemm.candidates(sm100_gemm.GemmProblem(65536, 2048, 1, *kind))[number]


def _sm100_grouped(arch: str, experts: list[Any], number: int) -> Any:
    return sm100_grouped.candidates(Experts(*experts))[number]


CHOOSERS = {
    "gemm": _gemm,
    "gemm_fp8": _gemm_fp8,
    "gemm_e4m3": _gemm_e4m3,
    "grouped_e4m3": _grouped_e4m3,
    "convert_e4m3": _convert_e4m3,
    "grouped": _grouped,
    "grouped_share": _grouped_share,
    "attention": _attention,
    "indexer": _indexer,
    "sm100_gemm": _sm100_gemm,
    "sm100_grouped": _sm100_grouped,
}


def plan_of(request: Request) -> Any:
    """The plan that a request chooses; None if there is none."""
    chooser, arch, *arguments = request
    return CHOOSERS[chooser](arch, *arguments)


def _experts(experts: int, inner: int, hidden: int) -> Iterator[tuple[Any, ...]]:
    """Fields of ``Experts`` for every kind of result of both GEMMs of routed experts."""
    for float32_out, scaled, weighted in itertools.product(_BOTH, repeat=3):
        if not weighted:
            yield hidden, inner, experts, float32_out, scaled
        yield 2 * inner, hidden, experts, float32_out, scaled, True, weighted
        for swizzled in () if float32_out else _BOTH:
            yield 2 * inner, hidden, experts, False, scaled, True, weighted, True, swizzled


def _dense_requests() -> Iterator[Request]:
    kinds = [*itertools.product(_BOTH, repeat=2)]
    for matrix, kind, tokens in itertools.product(MATRICES, kinds, token_counts(8192)):
        yield "gemm", "sm_90a", matrix, kind, tokens
    for matrix, kind in itertools.product(INTERLEAVED, kinds):
        for tokens in (1, 16, 32, 64, 256, 512, 4096):
            yield "gemm", "sm_90a", matrix, (*kind, True), tokens
    for matrix, kind, tokens in itertools.product(MATRICES, kinds, (1, 16)):
        yield "gemm", "sm_100a", matrix, kind, tokens
    for matrix, kind, tokens in itertools.product(INTERLEAVED, kinds, (1, 16)):
        yield "gemm", "sm_100a", matrix, (*kind, True), tokens
    for matrix, float32_out, folded in itertools.product(MATRICES, _BOTH, _BOTH):
        for tokens in token_counts(8192):
            yield "gemm_fp8", "sm_90a", matrix, float32_out, tokens, folded


def _grouped_requests() -> Iterator[Request]:
    for sizes in ROUTED:
        for experts in _experts(*sizes):
            for rows in (1, 2 * sizes[0], 8 * sizes[0], 384, 3072, 24576, 196608):
                yield "grouped", "sm_90a", experts, rows
            for number in range(len(grouped_gemm.plans(Experts(*experts), _MOST_ROWS, "sm_90a"))):
                yield "grouped_share", "sm_90a", experts, number
            for rows in (1, 2 * sizes[0], 8 * sizes[0]):
                yield "grouped", "sm_100a", experts, rows


def _e4m3_requests() -> Iterator[Request]:
    pairs = [*itertools.product(_BOTH, repeat=2)]
    for weights, (rows, tokens), kind in itertools.product(
        _DENSE_E4M3, ((512, 1), (65536, 4096)), pairs
    ):
        yield "gemm_e4m3", "sm_90a", weights, rows, tokens, kind
    kinds = [(float32_out, False, False, False) for float32_out in _BOTH]
    kinds += [(float32_out, True, weighted, False) for float32_out, weighted in pairs]
    kinds += [(False, True, weighted, True) for weighted in _BOTH]
    for kind in kinds:
        yield "grouped_e4m3", "sm_90a", "nvfp4", 64, kind
        yield "grouped_e4m3", "sm_90a", "nvfp4", 8192, kind
        yield "grouped_e4m3", "sm_90a", "converted", 64, kind
    yield "convert_e4m3", "sm_90a"


def _other_requests() -> Iterator[Request]:
    for number in range(len(attention.plans())):
        yield "attention", "sm_90a", number
    for number in range(len(indexer_logits_plan.plans())):
        yield "indexer", "sm_90a", number
    for kind in itertools.product(_BOTH, repeat=2):
        for number in range(
            len(sm100_gemm.candidates(sm100_gemm.GemmProblem(65536, 2048, 1, *kind)))
        ):
            yield "sm100_gemm", "sm_100a", kind, number
    for experts in _experts(*ROUTED[0]):
        problem = Experts(*experts)
        if problem.row_scaled:
            for number in range(len(sm100_grouped.candidates(problem))):
                yield "sm100_grouped", "sm_100a", experts, number


def sample() -> list[Request]:
    """Requests of a sample of plans that holds every pair of values of two fields of a plan."""
    first: dict[tuple[str, str], dict[Any, Request]] = {}
    requests = _dense_requests(), _grouped_requests(), _e4m3_requests(), _other_requests()
    for request in itertools.chain(*requests):
        plan = plan_of(request)
        if plan is not None:
            kind = type(plan).__module__ + type(plan).__name__, request[1]
            first.setdefault(kind, {}).setdefault(plan, request)
    chosen = []
    for plans in first.values():
        chosen += plans.values() if len(plans) <= _ALL else map(plans.__getitem__, covering(plans))
    return chosen


def sections(cubin: bytes) -> Iterator[tuple[bytes, bytes | int]]:
    """Names of ELF sections without the kernel's, and their contents, or the size if none."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<2I4Q", cubin, table + i * size) for i in range(count)]
    start = headers[names][4]
    for name, kind, _, _, offset, length in headers:
        whole = cubin[start + name : cubin.index(b"\0", start + name)]
        contents = length if kind == _NO_BITS else cubin[offset : offset + length]
        yield whole.split(b".kernel_")[0], contents


def code_hash(cubin: bytes) -> str:
    """Hash of the machine code, parameters and resources of a compiled kernel, without its name."""
    hashed = [(name, data) for name, data in sections(cubin) if name in _HASHED]
    assert any(name == b".text" for name, _ in hashed)
    return hashlib.sha256(repr(hashed).encode()).hexdigest()[:24]


def compiled_hash(request: Request) -> str:
    """``code_hash`` and launch of the kernel that a request chooses, compiled now."""
    plan = plan_of(request)
    if plan is None:
        return "no plan"
    image = cubin_cache.compile_image(plan, cubin_cache.target(plan, request[1]))
    launch = f"{image.threads} threads, {image.cluster} CTAs, {image.shared_bytes} bytes"
    return f"{code_hash(image.cubin)}, {launch}"


def _write(file: Path, only: list[str]) -> int:
    hashes = {}
    for request in sample():
        name = json.dumps(request)
        if not only or any(text in name for text in only):
            hashes[name] = compiled_hash(request)
    file.write_text(json.dumps(hashes, indent=1) + "\n")
    print(f"{len(hashes)} kernels written to {file}")
    return 0


def _compare(file: Path, only: list[str]) -> int:
    recorded = json.loads(file.read_text())
    names = [name for name in recorded if not only or any(text in name for text in only)]
    different = 0
    for name in names:
        actual = compiled_hash(json.loads(name))
        if actual != recorded[name]:
            different += 1
            print(f"differs: {name}: {recorded[name]} -> {actual}", flush=True)
    print(f"{len(names) - different} of {len(names)} kernels have the recorded machine code")
    return 1 if different else 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    command = _write if arguments.command == "write" else _compare
    result = command(arguments.file, arguments.only)
    print(f"{time.perf_counter() - begin:.0f} s")
    return result


if __name__ == "__main__":
    sys.exit(main())
