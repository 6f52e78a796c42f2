"""Print what Blackwell's kernels compile to: configurations, resources, instructions.

    python -m tests._tools.compiled > notes/2026-11_blackwell_compiled.md

Takes some ten minutes of one core. Needs nvidia-cutlass-dsl and triton, and no GPU.
"""

from __future__ import annotations

import collections
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from dsv4.cute.runtime import cubin_cache
from tests._tools.ptx.machine_code import instructions_of, usage_of
from tests.cute import test_compile as test_cute_compile
from tests.cute.sm100 import test_gemm_compile, test_grouped_gemm

ARCHITECTURES = ("sm_100a", "sm_103a")
# Column and what an instruction begins with.
COUNTED = {
    "block-scaled MMAs": "UTCOMMA",
    "scales to TMEM": "UTCCP",
    "TMA copies": "UTMALDG",
    "of them multicast": "UTMALDG.3D.MULTICAST",
    "mma.sync": "HMMA",
    "bulk copies": "UBLKCP",
}


def ctas_of(plan):
    return "1 CTA" if plan.ctas == 1 else f"{plan.ctas} CTAs"


def plans(arch):
    """All configurations of CuTeDSL kernels, by what tells their rows apart."""
    rows = collections.defaultdict(list)
    dense = [plan for ctas in (1, 2) for plan in test_gemm_compile.plans(ctas)]
    for plan in (*dense, *test_grouped_gemm.PLANS):
        how = f"{plan.token_block} tokens, {ctas_of(plan)}" + (
            f", K by {plan.k_splits}" if plan.k_splits > 1 else ""
        )
        rows[type(plan).__name__, how].append(plan)
    for plan in test_cute_compile.plans_of_blackwell(arch):
        rows[type(plan).__name__, ctas_of(plan)].append(plan)
    return rows


def row(name, how, arch, plans_of_row, folder):
    """One line of the table: the largest of each resource, the least and most of each count."""
    images = [cubin_cache.compile_image(plan, arch) for plan in plans_of_row]
    usages = [usage_of(image, folder / "cubin") for image in images]
    listings = instructions_of(images, arch, folder / "code")
    spilled = [u["STACK"] + u["LOCAL"] for u in usages]
    counts = [
        [sum(i.startswith(start) for i in listing) for listing in listings]
        for start in COUNTED.values()
    ]
    columns = (
        *(name, how, arch, len(plans_of_row), max(plan.threads for plan in plans_of_row)),
        max(usage["REG"] for usage in usages),
        max(spilled),
        f"{max(image.shared_bytes for image in images) / 1024:.0f}",
        span([getattr(plan, "barriers", 0) for plan in plans_of_row]),
        *map(span, counts),
        span([len(listing) for listing in listings]),
    )
    return "| " + " | ".join(map(str, columns)) + " |"


def span(numbers):
    """Least and most, or a dash for nothing at all."""
    low, high = min(numbers), max(numbers)
    return "-" if not high else str(low) if low == high else f"{low} to {high}"


def table(headings):
    print("| " + " | ".join(headings) + " |")
    print("|---|---|---|" + "---:|" * (len(headings) - 3))


def cute(folder):
    headings = ("kernel", "layout", "compiled for", "configurations", "threads", "registers")
    headings += ("bytes of stack", "KB shared", "barriers", *COUNTED, "instructions")
    table(headings)
    for arch in ARCHITECTURES:
        for (name, how), plans_of_row in plans(arch).items():
            print(row(name, how, arch, plans_of_row, folder), flush=True)


def triton():
    """The Triton kernels that the bench's cases launch, for sm_100a."""
    command = [sys.executable, "-m", "tests._tools.compile_kernels", "100"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    rows = collections.defaultdict(list)
    for line in done.stdout.splitlines():
        result = json.loads(line)
        rows[result["op"], result["kernel"]].append(result)
    headings = ("operator", "kernel", "compiled for", "specialisations", "threads", "registers")
    table((*headings, "bytes of stack", "bytes shared", "converts to E2M1"))
    for (op, kernel), kernels in rows.items():
        most = {
            key: max(result[key] for result in kernels)
            for key in kernels[0]
            if key not in _WITHOUT_MAXIMUM
        }
        columns = (op, kernel, "sm_100a", len(kernels), most["threads"], most["registers"])
        columns += (most["stack"] + most["local"], most["shared"], "yes" if most["e2m1"] else "-")
        print("| " + " | ".join(map(str, columns)) + " |")


_WITHOUT_MAXIMUM = ("op", "kernel", "exchanges")  # of which no largest is taken

if __name__ == "__main__":
    made = f"CuTeDSL {cubin_cache.compiler()}, triton {importlib.metadata.version('triton')}"
    print("# What Blackwell's kernels compile to\n")
    print(f"`python -m tests._tools.compiled` wrote this page: {made}.")
    print("Compiled and disassembled, never run. Of several configurations: the largest of each")
    print("resource, the least and most of each number of instructions. Tests ask for each of them")
    print("one by one, what it has to be.\n\n## CuTeDSL\n")
    with tempfile.TemporaryDirectory() as folder:
        cute(Path(folder))
    print("\n## Triton, as the bench's cases launch them\n")
    triton()
