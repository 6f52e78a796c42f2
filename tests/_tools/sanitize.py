"""Run every kernel once per problem size of the bench, for NVIDIA's compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
        --error-exitcode 9 python -m tests._tools.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests._tools.sanitize

Operators may be named, and sizes: ``gemm --sizes tiny:5,flash:19``, to share the work out; of
``grouped_gemm*`` also rows an expert: ``--sizes none --rows 150,300``. The tool's option
``--kernel-name kns=kernel_cutlass`` checks CuTeDSL's kernels alone. An operator has up to 41 of
them, which a run without the tool compiles and keeps: under it that takes minutes. Without caching,
each tensor is an allocation of its own, so a step past its end is seen.

``--fused`` runs the launches of ``FUSED`` alone: those that were merged, with the options and at
the numbers of tokens that have code of their own. ``--dry-run`` lists the calls and needs no GPU.

``gemm --backend triton --sizes small:1,wide:19`` runs the calls that a named kernel takes, in forms
that the bench does not have: ``tests._tools.sanitized_problems``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dsv4 import dispatch
from dsv4.bench.cases import MAKERS, PRESETS, cases, operators
from dsv4.bench.cases.gemm import own_gemm
from dsv4.bench.cases.sequence import indexer_select as selections
from dsv4.bench.problem import Case, Draw, Outputs
from dsv4.cute.runtime.driver import Kernel
from dsv4.cute.sm90 import indexer_logits_plan
from dsv4.ops.indexer import indexer_select
from tests._tools.sanitized_problems import problems
from tests.cute.test_indexer import Coded, chosen, randomize_scales, rows_of

SIZES = (
    ("tiny", 1),
    ("tiny", 5),
    ("tiny", 130),
    ("flash", 1),
    ("flash", 19),
    ("tiny", 1100),  # many, of kernels that take many rows
    ("flash", 130),  # many values, of those that take many of these
)
# An expert has them on average: of GEMMs of few rows, of each step, and of very many.
ROWS = (1, 6, 8, 24, 40, 60, 80, 100, 150, 300)


@dataclass(frozen=True)
class Launching:
    """A call that is run.

    Attributes:
        case: The problem.
        backend: Name of an implementation, or ``"auto"``.
        named: Arguments by name that the case does not have.
    """

    case: Case
    backend: str = "auto"
    named: dict[str, Any] = field(default_factory=dict)

    def run(self, device: torch.device, backend: str | None = None) -> Outputs:
        """Draw the inputs and run; ``backend`` replaces the call's own."""
        problem = self.case.build(Draw(0, device))
        problem = replace(problem, kwargs=problem.kwargs | self.named)
        return problem.run(self.backend if backend is None else backend)

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.case.shape.items())
        options = "".join(f", {name}={value}" for name, value in self.named.items())
        of_case = f"{self.case.op} {self.case.name}".strip()
        return f"{of_case}, {self.case.tokens} tokens, {sizes}: {self.backend}{options}"


def _at(op: str, *sizes: tuple[str, int]) -> Callable[[], Iterator[Launching]]:
    """Return a function that makes the calls of the bench's cases at some sizes."""

    def make() -> Iterator[Launching]:
        for preset, tokens in sizes:
            yield from map(Launching, cases(op, preset, tokens))

    return make


def _slots() -> Iterator[Launching]:
    """Selections that return slots: by Triton, and of more than 8192 entries by CuTeDSL."""
    for preset, tokens in (("tiny", 1), ("tiny", 5), ("flash", 1), ("flash", 5), ("flash", 19)):
        for case in cases("indexer_select", preset, tokens):
            yield Launching(case, named={"slots": True})
    for tokens in (1, 5):
        for case in selections(PRESETS["flash"](), tokens, 9000):
            yield Launching(case, named={"slots": True})


def _fp8_few_tokens() -> Iterator[Launching]:
    """GEMMs with FP8 weights by the kernel for few tokens, whichever kernel is faster."""
    for tokens in (1, 8, 9, 19, 32):
        for rows, columns, groups in _FP8_WEIGHTS:
            for case in own_gemm(rows, columns, tokens, groups):
                if case.name == "own fp8":
                    yield Launching(case, "small_m")


_FP8_WEIGHTS = ((96, 256, 1), (1536, 4096, 1), (2048, 1024, 1), (128, 512, 4))  # N, K, groups
_DECODE = (("tiny", 1), ("tiny", 2), ("tiny", 5), ("flash", 1), ("flash", 2), ("flash", 5))
_SUMS = (*_DECODE, ("flash", 8), ("flash", 64), ("flash", 65))  # where launches are split
_COMPRESSED = (("tiny", 1), ("tiny", 5), ("tiny", 130), ("flash", 1), ("flash", 5), ("flash", 130))
# Launches that several operators were merged into, and those that they wait for.
FUSED: dict[str, Callable[[], Iterator[Launching]]] = {
    "hc_combine_post": _at("hc_combine_post", *_SUMS),
    "hc_combine_post_pre_norm": _at("hc_combine_post_pre_norm", *_SUMS),
    "head_norm_rope_write_kv": _at("head_norm_rope_write_kv", *_DECODE, ("flash", 128)),
    "compressor_projections": _at("compressor_projections", *_DECODE),
    "indexer_select": _slots,
    "gemm": _fp8_few_tokens,
    "compressor_update": _at("compressor_update", *_COMPRESSED),
    "compress_write": _at("compress_write", *_COMPRESSED),
    "compress_write_paged": _at("compress_write_paged", *_COMPRESSED),
}


def fused(ops: list[str], *, dry_run: bool = False) -> int:
    """Run the calls of ``FUSED``, or list them.

    Args:
        ops: Its operators; none: all.
        dry_run: Whether calls are listed, not run.

    Returns:
        The number of calls.
    """
    calls = 0
    for op in ops or list(FUSED):
        for launching in FUSED[op]():
            if dry_run:
                print(launching)
            else:
                launching.run(torch.device("cuda", 0))
                torch.cuda.synchronize()
            calls += 1
        print(op, flush=True)
    return calls


def main(
    ops: list[str], sizes: list[tuple[str, int]], rows: list[int], backend: str = "auto"
) -> int:
    """Run the operators named, or all, by an implementation; the number of calls."""
    calls = 0
    for op in ops or list(MAKERS):
        if all(
            dispatch.implementations(operator)[0].name == "reference" for operator in operators(op)
        ):
            continue
        for preset, tokens in sizes:
            for problem in problems(op, preset, tokens, torch.device("cuda", 0), backend):
                problem.run(backend)
                torch.cuda.synchronize()
                calls += 1
        print(op, flush=True)
        if backend not in ("auto", "cute"):
            continue
        if op == "indexer_select":
            calls += long_rows()
        if op.startswith("grouped_gemm"):
            calls += routed(op, rows)
    return calls


def routed(op: str, every: list[int]) -> int:
    """Return that number of rows per expert, of whole tiles, by three CTAs: each has many."""
    config = PRESETS["tiny"]().replace(hidden_size=1280, moe_intermediate_size=384)
    fitting, calls = Kernel.prepare, 0
    Kernel.prepare = lambda kernel, device: min(3, fitting(kernel, device))
    for rows in every:
        tokens = rows * config.n_routed_experts // config.num_experts_per_tok
        for case in MAKERS[op](config, tokens):
            case.build(Draw(rows, torch.device("cuda", 0))).run("cute")
            torch.cuda.synchronize()
            calls += 1
        print(f"{op}, {rows} rows an expert", flush=True)
    Kernel.prepare = fitting
    return calls


def long_rows() -> int:
    """Select from rows of MXFP4 keys that no case of the bench has, scales far apart in half."""
    indexer_logits_plan._LARGE = 0
    for share in (0.0, 0.02):
        for tokens, entries in ((2, 9000), (2, 16500), (140, 300)):
            case = Coded(tokens, entries, 0, device="cuda")
            randomize_scales(case, share)
            indexer_select(**case.arguments(256), backend="cute")
    # Rows that eight and four blocks share, and one has.
    for tokens, group in ((1, 16), (16, 16), (2, 8), (31, 8)):
        for kind in ("normal", "blocks"):
            scores = rows_of(kind, 0, tokens, 20000).cuda()
            chosen(scores, torch.full((tokens,), 19999), 512, group)
    torch.cuda.synchronize()
    return 14


def sizes_of(text: str) -> list[tuple[str, int]]:
    """Keys of ``sanitized_problems.CONFIGS`` and tokens: ``tiny:5,flash:19``."""
    pairs = [size.split(":") for size in listed(text)]
    return [(preset, int(tokens)) for preset, tokens in pairs]


def rows_of_one(text: str) -> list[int]:
    """Rows an expert: ``150,300``."""
    return [int(rows) for rows in listed(text)]


def listed(text: str) -> list[str]:
    """Split at commas; ``none`` is nothing."""
    return [] if text == "none" else text.split(",")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="OP")
    parser.add_argument("--backend", default="auto", help="whose calls to run, such as triton")
    parser.add_argument("--sizes", type=sizes_of)
    parser.add_argument("--rows", type=rows_of_one)
    parser.add_argument("--fused", action="store_true", help="the calls of FUSED alone")
    parser.add_argument("--dry-run", action="store_true", help="with --fused: list its calls")
    arguments = parser.parse_args()
    if arguments.dry_run and not arguments.fused:
        parser.error("--dry-run lists the calls of --fused, which is missing")
    narrowed = arguments.sizes is not None or arguments.rows is not None
    if arguments.fused and (narrowed or arguments.backend != "auto"):
        parser.error("--backend, --sizes and --rows are not for --fused, whose calls have theirs")
    unknown = [op for op in arguments.ops if arguments.fused and op not in FUSED]
    if unknown:
        parser.error(f"OP is {', '.join(unknown)}, wanted some of {', '.join(FUSED)}")
    if arguments.fused:
        number = fused(arguments.ops, dry_run=arguments.dry_run)
    else:
        sizes = list(SIZES) if arguments.sizes is None else arguments.sizes
        rows = list(ROWS) if arguments.rows is None else arguments.rows
        number = main(arguments.ops, sizes, rows, arguments.backend)
    print(f"{number} calls")
