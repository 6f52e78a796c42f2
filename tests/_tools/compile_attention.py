"""Compile the attention kernel for a GPU that need not be there, with all of its shapes.

    python -m tests._tools.compile_attention 86 [--quick]   (without TRITON_INTERPRET)

The sizes are those of Flash and Pro: 512 dims, of which 64 are rotated, in ``"fp8"`` and plain
entries, with and without KV splits. Heads, the window and the number of selected entries are
arguments of the kernel, so it is the same for all. Prints one line of JSON per compiled kernel, as
``tests._tools.compile_kernels`` does, with the shape's ``bound`` of shared memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from triton.runtime.jit import JITFunction

from dsv4 import device
from dsv4.device import interpret_triton
from dsv4.kv_cache.pages import Pages
from dsv4.ops.attention import sparse_attention
from dsv4.triton import attention
from tests._tools.compile_kernels import print_reports, report_of
from tests._tools.other_gpu import replace_launches


def _attend(entry_format: str, heads: int) -> None:
    """Call the operator with the sizes of the models; nothing is filled."""
    window, other = (Pages.allocate(3, size, 512, 64, entry_format) for size in (128, 64))
    slots, chosen = (torch.zeros(1, width, dtype=torch.int64) for width in (128, 512))
    q, sink = torch.empty(1, heads, 512, dtype=torch.bfloat16), torch.empty(heads)
    tables = {name: torch.empty(1, 32) for name in ("cos", "sin")}
    arguments = (q, window, slots, other, chosen, sink)
    sparse_attention(*arguments, scale=0.1, backend="triton", **tables)


def compile_all(arch: int, quick: bool) -> Iterator[dict]:
    """Compile every shape of an architecture; with ``quick``, of FP8 entries without splits."""
    run, compiled = JITFunction.run, []

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.__name__, kernel))
        return kernel

    capability = replace_launches(arch, compile_only)
    formats, splits = (("fp8",), (1,)) if quick else (("fp8", "plain"), (1, 4))
    with interpret_triton(), device.pretend(capability=capability):
        for shape, entry_format, count in itertools.product(
            attention._shapes(arch), formats, splits
        ):
            attention.plan = lambda *sizes, chosen=(shape, count): chosen
            _attend(entry_format, 64)
            for name, kernel in compiled:
                report = report_of("sparse_attention", name, kernel)
                yield {**report, "bound": shape.shared, "entries": entry_format}
            compiled.clear()


if __name__ == "__main__":
    print_reports(compile_all)
