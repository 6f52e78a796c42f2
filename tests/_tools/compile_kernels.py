"""Compile every Triton kernel that the bench's cases launch, for a GPU that need not be there.

And those of ``dsv4.quant.fragments``, which is no operator, and of sums over ranks (``push``).

    python -m tests._tools.compile_kernels 90 [--quick | --brief | --prompt] [OP ...]

Without TRITON_INTERPRET.

Every launcher runs on CPU tensors with Triton's launch replaced by a compilation. Prints one line
of JSON per compiled kernel: name, registers, stack and local bytes, shared memory, threads, and
which of the instructions of interest it has.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from dsv4 import device, dispatch
from dsv4.bench.cases import MAKERS, cases, operators
from dsv4.bench.problem import Case, Draw, Problem
from dsv4.device import interpret_triton
from dsv4.ops.indexer import indexer_select
from dsv4.ops.moe_exchange import MoeReturnArgs, MoeSendArgs
from dsv4.ops.rope import rope_quantize
from dsv4.parallel import mailboxes
from dsv4.quant import fragments
from dsv4.triton import all_reduce, hyper_connection, moe_exchange
from tests._tools.other_gpu import replace_launches
from tests.ops.test_indexer import COMPACT_FORMATS, QUERY_FORMATS, compact_case

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
FRAGMENTS = "fragments"
PUSH = "push"
EXTRA = (FRAGMENTS, PUSH)  # what is compiled besides operators' rows named "triton"
# Kernels of which the order of loads and exchanges between threads is reported.
EXCHANGING = ("_rms_norm_kernel", "_post_kernel", "_norm_quantize_few_kernel")
# Kernels of which ``quick`` compiles one specialisation, that of a shorter row than the models'. A
# pass of Triton's takes time by loads and stores, times the square of all operations: of eight
# chunks 18 seconds.
_BY_SHORT_ROWS = ("_rope_quantize_row_kernel",)
# The first two, few tokens and many, have nearly all kernels.
SIZES = (("flash", 1), ("flash", 2048), ("flash", 64), ("pro", 1))
# These operators read a vocabulary's logits for each token; more tokens are more programs alone.
_MOST_TOKENS = {"verify_sampled": 16, "verify_greedy": 16}
# Of these operators' cases, those alone that a kernel takes: making the others' weights is slow.
_ENDINGS = {"gemm": " fp8"}
# The public function of each operator, whose cases are named by the rest of the operator's name.
_FUNCTIONS = {op: function for function in MAKERS for op in operators(function)}


class _Unfilled(Draw):
    """Inputs that nobody has drawn: kernels only look at their types."""

    def normal(self, *shape, dtype=torch.bfloat16, scale=1.0):
        return torch.empty(shape, dtype=dtype)

    def integers(self, low, high, shape, dtype=torch.int64):
        return torch.full(tuple(shape), low, dtype=dtype)

    def distinct(self, rows, count, below):
        return torch.arange(count).repeat(rows, 1)


def compile_all(
    arch: int,
    ops: list[str],
    quick: bool = False,
    brief: bool = False,
    prompt: bool = False,
) -> Iterator[dict]:
    """Compile what the bench's cases of ``ops`` launch; one report per kernel.

    Args:
        arch: Compute capability times 10.
        ops: Operators, and names of ``EXTRA``.
        quick: A sample: of a kernel one specialisation for each of the first two sizes, whatever
            operators launch it, and of the last two sizes only kernels that these have not.
        brief: Leave out the last two sizes.
        prompt: Compile the second size alone, and no launches but the bench's.
    """
    first, others = (SIZES[1:2], ()) if prompt else (SIZES[:2], () if brief else SIZES[2:])
    # Kernels of ``quick`` by a size and their name; those of ``EXTRA`` are launched in another way.
    sample: dict[tuple[object, ...], Any] = {}
    size: object = None
    extra = ""
    reports: dict[str, dict] = {}
    result: dict[str, tuple[str, object]] = {}
    run = JITFunction.run

    def compiled(self, *args, grid, warmup, **kwargs):
        of = first[0] if self.__name__ in _BY_SHORT_ROWS else size
        kernel = sample.get((of, extra, self.__name__)) if quick else None
        if kernel is None:
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
            sample[of, extra, self.__name__] = kernel
        result[kernel.hash] = (self.__name__, kernel)
        return kernel

    capability = replace_launches(arch, compiled)
    for op in ops:
        with interpret_triton(), device.pretend(capability=capability):
            size, extra = first[0], op if op in EXTRA else ""
            if not prompt:
                _OTHERS.get(op, lambda: None)()
            for size in first:
                _run(op, size)
            size = others
            sample.update({(others, extra, name): kernel for name, kernel in result.values()})
            for other in others:
                _run(op, other)
        for key in list(result):
            reports[key] = {**(reports.get(key) or report_of(op, *result[key])), "op": op}
            yield reports[key]
        result.clear()


def _run(op: str, size: tuple[str, int]) -> None:
    preset, tokens = size
    for case in _cases(op, preset, min(tokens, _MOST_TOKENS.get(op, tokens))):
        problem = case.build(_Unfilled(0, torch.device("cpu")))
        if _runs_by_triton(problem):
            problem.run("triton")


def _runs_by_triton(problem: Problem) -> bool:
    """Return whether a call with tensors on the CPU has a Triton kernel on the GPU."""
    call = dispatch.arguments(problem.function, *problem.args, **problem.kwargs)
    row = next(row for row in dispatch.implementations(call.op) if row.name == "triton")
    return row.unsupported_reason(call) is None


def _move() -> None:
    """Pack and unpack, with a number of tiles that is a multiple of 16 and one that is not."""
    for columns in (7168, 1536):
        codes, scales = (torch.zeros((32, columns // n), dtype=torch.uint8) for n in (2, 16))
        for pairs in (False, True):
            fragments.unpack(codes, scales, pairs=pairs)
            fragments.pack(codes, scales.view(torch.float8_e4m3fn), pairs=pairs)


def _select_with_few_heads() -> None:
    """Select with fewer heads than a block has keys; the models have as many, by chance."""
    for keys in ("plain", *COMPACT_FORMATS):
        for queries in (torch.bfloat16, *QUERY_FORMATS):
            case = compact_case((0, 2, 1, 2, 64), keys, queries, "cpu", 128, heads=3)
            case.run(9, backend="triton")
    _select_slots()


def _select_slots() -> None:
    """Select slots of a short row, and of the longest that is searched in registers."""
    for pages in (16, 64):
        case = compact_case((0, 2, 1, pages, 64), "plain", torch.bfloat16, "cpu", 128)
        for table in (case.table, case.table.int()):
            case.table = table
            arguments = case.arguments(512)
            indexer_select(**arguments, slots=True, backend="triton")


def _rotate_short_rows() -> None:
    """Rotate and quantise many rows of four chunks, of which one has rotated columns."""
    x, angles = torch.empty(64, 32, 512, dtype=torch.bfloat16), torch.empty(64, 32)
    rope_quantize(x, angles, angles, inverse=True, groups=8, backend="triton")


def _push() -> None:
    """Sum over ranks, alone and before a hyper-connection, in all forms of its kernels."""
    for ranks in (2, 8):
        mailbox = mailboxes.virtual(ranks, 1 << 20)[0]
        for tokens in (1, 80):
            [case] = cases("hc_post_pre_norm", "flash", tokens)
            problem = case.build(_Unfilled(0, torch.device("cpu")))
            call = dispatch.arguments(problem.function, *problem.args, **problem.kwargs)
            pushed = all_reduce.push(mailbox, call.args.y)
            hyper_connection.reduced_post_pre_norm(call.args, pushed)
        partial = torch.empty(4096, dtype=torch.bfloat16)
        all_reduce.push_flat(mailbox, partial)
        all_reduce.sum_pushed(mailbox, partial)
        all_reduce.exchange(mailbox, partial)
        all_reduce.gathered(mailbox, partial)
        _exchange_tokens(mailbox)


def _exchange_tokens(mailbox: mailboxes.Mailbox) -> None:
    """Tokens to the ranks of their experts, and results back."""
    x = torch.empty(2, 4096, dtype=torch.bfloat16)
    ids, weights = torch.empty(2, 6, dtype=torch.int64), torch.empty(2, 6, dtype=torch.float32)
    sent = MoeSendArgs(x, ids, weights, 256, "")
    moe_exchange.push_tokens(mailbox, sent)
    rows, received, _ = moe_exchange.receive_tokens(mailbox, sent)
    returned = MoeReturnArgs(rows, received, ids, x, 256, "")
    moe_exchange.push_results(mailbox, returned)
    moe_exchange.sum_results(mailbox, returned)


# Launches that are no case of the bench.
_OTHERS = {
    FRAGMENTS: _move,
    PUSH: _push,
    "indexer_select": _select_with_few_heads,
    "rope_quantize": _rotate_short_rows,
}


def _cases(op: str, preset: str, tokens: int) -> list[Case]:
    if op in EXTRA:
        return []
    function = _FUNCTIONS[op]
    ending = _ENDINGS.get(op, op.removeprefix(function).removeprefix("_"))
    return [c for c in cases(function, preset, tokens) if c.name.endswith(ending)]


def _is_compiled(row: dispatch.Implementation) -> bool:
    """Return whether a row's kernels are compiled here; ``compile_packed`` has the others."""
    others = ("dsv4.triton.grouped_gemm:", "dsv4.triton.gemm_packed:gemm_swiglu")
    return row.name == "triton" and not row.target.startswith(others)


def report_of(op: str, name: str, kernel) -> dict:
    """Return what a compiled kernel needs and waits for."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = tool("cuobjdump", "-res-usage", file.name)
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "op": op,
        "kernel": name,
        "registers": numbers["REG"],
        "stack": numbers["STACK"],
        "local": numbers["LOCAL"],
        "shared": kernel.metadata.shared,
        "threads": 32 * kernel.metadata.num_warps,
        "waits": _waits(kernel.asm["ptx"]),
        "unfinished": _unfinished(kernel.asm["ptx"]),
        "fences": "fence.acq_rel.gpu" in kernel.asm["ptx"],
        "dependents": "griddepcontrol.launch_dependents" in kernel.asm["ptx"],
        "e2m1": "cvt.rn.satfinite.e2m1x2" in kernel.asm["ptx"],
        "exchanges": _exchanges(kernel) if name in EXCHANGING else None,
    }


def _waits(ptx: str) -> bool:
    """Return whether every path waits for the preceding kernel before it touches memory."""
    lines = [line.split("//")[0].strip() for line in ptx.splitlines()]
    begun, seen = [next(i for i, line in enumerate(lines) if line.startswith("{"))], set()
    while begun:
        i = begun.pop()
        while i not in seen and "griddepcontrol.wait" not in lines[i]:
            seen.add(i)
            if re.search(r"\b(ld|st|red|atom)\.global|\bret;", lines[i]):
                return False
            jump = re.search(r"(@\S+\s+)?bra\S*\s+(\$\w+)", lines[i])
            if jump:
                begun.append(lines.index(jump[2] + ":"))
            i = begun.pop() if jump and not jump[1] else i + 1
    return True


def _unfinished(ptx: str) -> int:
    """Most ``wgmma`` groups that a wait leaves, if one reads an operand from registers; else 0."""
    products = re.findall(r"wgmma\.mma_async[^;]*;", ptx)
    if all(product.count("{") == 1 for product in products):
        return 0
    return max(int(left) for left in re.findall(r"wgmma\.wait_group\S* (\d+)", ptx))


def _exchanges(kernel) -> list[str]:
    """Loads, shuffles and barriers in their order: ``LDG``, ``SHFL``, ``BAR``."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = tool("nvdisasm", "-c", file.name)
    return re.findall(r"\b(LDG|SHFL|BAR)\.", listing)


def tool(name: str, *arguments: str) -> str:
    """Return what one of the tools that come with Triton prints."""
    command = [str(_TOOLS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the arguments that all programs that compile kernels have."""
    assert not os.environ.get("TRITON_INTERPRET"), "kernels would be interpreted"
    parser = argparse.ArgumentParser()
    parser.add_argument("arch", type=int)
    parser.add_argument("--quick", action="store_true")
    return parser


def print_reports(
    compile_all: Callable[..., Iterator[dict]], parser: argparse.ArgumentParser | None = None
) -> None:
    """Run a program that compiles kernels with its arguments: print a line of JSON for each."""
    options = (parser or arguments()).parse_args()
    for report in compile_all(**vars(options)):
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    parser = arguments()
    parser.add_argument("ops", nargs="*", default=[*_FUNCTIONS, *EXTRA])
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--prompt", action="store_true")
    options = parser.parse_intermixed_args()
    having = [
        op
        for op in options.ops
        if op in EXTRA or any(_is_compiled(row) for row in dispatch.implementations(op))
    ]
    sizes = {name: getattr(options, name) for name in ("quick", "brief", "prompt")}
    for report in compile_all(options.arch, having, **sizes):
        print(json.dumps(report), flush=True)
