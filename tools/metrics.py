"""Measure how the code reads: ``python tools/metrics.py [FILE.json]``.

Prints one figure per line and writes them to a file if one is named: import cycles, modules at the
root of the package, untyped kernel inputs, arguments read by position, comments in kernels, coined
words, duplicated runs of lines, and Python frames per call.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dsv4"
_RUN = 8  # lines that count as duplicated when they stand in two places


def sources(folder: Path = PACKAGE) -> list[Path]:
    """Python files below a folder, sorted."""
    return sorted(folder.rglob("*.py"))


def module_name(file: Path) -> str:
    """Dotted name of a file of the package."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(*, inside_functions: bool) -> dict[str, set[str]]:
    """Modules of the package that each module imports, those for types alone included."""
    names = {module_name(file) for file in sources()}
    imported: dict[str, set[str]] = {name: set() for name in names}
    for file in sources():
        own = module_name(file)
        tree = ast.parse(file.read_text())
        is_lazy = file.name == "__init__.py"  # names for type checkers, loaded when asked for
        for node in ast.walk(tree) if inside_functions else _outer(tree.body, not is_lazy):
            if isinstance(node, ast.Import):
                asked = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                asked = [f"{node.module}.{alias.name}" for alias in node.names]
                asked = [name if name in names else node.module for name in asked]
            else:
                continue
            imported[own] |= {name for name in asked if name in names and name != own}
    return imported


def _outer(statements: list[ast.stmt], conditional: bool) -> Iterator[ast.stmt]:
    """Statements of a module that stand in no function and no class."""
    for node in statements:
        yield node
        if isinstance(node, ast.If) and conditional:
            yield from _outer(node.body + node.orelse, conditional)


def cycles(*, inside_functions: bool = False) -> list[list[str]]:
    """Groups of modules that import each other (strongly connected components)."""
    graph = imports(inside_functions=inside_functions)
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set[str](), [start]
        while todo:
            for follower in graph[todo.pop()] - seen:
                seen.add(follower)
                todo.append(follower)
        reach[start] = seen
    groups = {
        tuple(sorted({name, *(other for other in reach[name] if name in reach[other])}))
        for name in graph
        if name in reach[name]
    }
    return [list(group) for group in sorted(groups)]


def comments_per_100_lines(folder: Path) -> float:
    """Comments, each line of one counted, per 100 lines of code that are neither blank nor text."""
    comments = lines = 0
    for file in sources(folder):
        text = file.read_text()
        code = set[int]()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                comments += not token.string.startswith(("# fmt", "# noqa", "# type"))
            elif token.type not in (
                tokenize.NL,
                tokenize.NEWLINE,
                tokenize.INDENT,
                tokenize.DEDENT,
                tokenize.STRING,
                tokenize.ENDMARKER,
            ):
                code.update(range(token.start[0], token.end[0] + 1))
        lines += len(code)
    return round(100 * comments / max(lines, 1), 1)


def matches(pattern: str, folder: Path = PACKAGE) -> int:
    """Return how often a regular expression is found in the sources."""
    return sum(len(re.findall(pattern, file.read_text())) for file in sources(folder))


def coined_words() -> int:
    """Uses of words that ``tools/words.toml`` bans, in the package."""
    import words  # in the folder of this program

    return len(words.check(words.load(), [str(PACKAGE)]))


def duplicated_runs() -> int:
    """Runs of lines that stand in two places: distinct windows of 8 lines of code."""
    windows: dict[tuple[str, ...], int] = defaultdict(int)
    for file in sources():
        lines = [line.strip() for line in file.read_text().splitlines()]
        lines = [line for line in lines if len(line) > 8 and not line.startswith(("#", "from"))]
        for i in range(len(lines) - _RUN + 1):
            windows[tuple(lines[i : i + _RUN])] += 1
    return sum(count > 1 for count in windows.values())


def frames(call: Callable[[], Any]) -> tuple[int, int]:
    """Python frames of this package that a call enters, and files that they are in."""
    entered: Counter[str] = Counter()

    def see(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and str(PACKAGE) in frame.f_code.co_filename:
            entered[frame.f_code.co_filename] += 1

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sum(entered.values()), len(entered)


def layer_frames() -> int:
    """Frames per layer of a decode step outside of implementations, on a CPU."""
    import torch

    import dsv4
    from dsv4.testing.frames import frames_outside_implementations
    from dsv4.testing.models import random_model

    model = random_model(dsv4.ModelConfig.tiny(), 0, mtp=False)
    cache = model.new_cache(1, 64, 32)
    row = cache.allocate()
    with torch.inference_mode():
        model.prefill([[1, 2, 3, 4, 5]], cache, [row])
        rows, ids = torch.tensor([row]), torch.tensor([7])
        for _ in range(2):
            cache.prepare([row], [1])
            model.decode(ids, cache, rows)
        cache.prepare([row], [1])
        entered = frames_outside_implementations(lambda: model.decode(ids, cache, rows))
    return entered.total() // model.config.num_hidden_layers


def call_frames() -> dict[str, list[int]]:
    """Frames and files of a repeated call of ``gemm`` and of ``sparse_attention`` on a CPU."""
    import torch

    from dsv4 import ops
    from dsv4.kv_cache.pages import Pages

    weight = ops.quantize(torch.randn(32, 64), scaling="weight")
    x = torch.randn(2, 64).bfloat16()
    q = torch.randn(2, 4, 64).bfloat16()
    pages = Pages(torch.randn(2, 16, 64).bfloat16(), 16, "plain", 64, 16)
    slots, sinks = torch.arange(8).repeat(2, 1), torch.zeros(4)

    def attend() -> None:
        ops.sparse_attention(q, pages, slots, None, None, sinks, scale=0.1)

    attend()
    return {
        "gemm": list(frames(lambda: ops.gemm(x, weight))),
        "sparse_attention": list(frames(attend)),
    }


def figures() -> Iterator[tuple[str, Any]]:
    """Every figure with its name."""
    groups = cycles()
    yield "import cycles", len(groups)
    yield "modules in them", [len(group) for group in groups]
    late = cycles(inside_functions=True)
    yield "modules in cycles of imports inside functions", [len(group) for group in late]
    root = [file for file in PACKAGE.glob("*.py") if not file.name.startswith("__")]
    yield "modules at the root", len(root)
    yield "inputs typed Value", matches(r": Value\b")
    yield "call.args unpacked or indexed", matches(r", \w+ = call\.args|call\.args\[|\*call\.args")
    yield "coined words", coined_words()
    yield "duplicated runs of 8 lines", duplicated_runs()
    yield "comments per 100 lines in cute", comments_per_100_lines(PACKAGE / "cute")
    yield "comments per 100 lines in triton", comments_per_100_lines(PACKAGE / "triton")
    for name, (count, files) in call_frames().items():
        yield f"frames, files per call of {name}", [count, files]
    yield "frames per decode layer", layer_frames()


def main() -> None:
    """Print, and write if a file is named."""
    measured = dict(figures())
    for name, value in measured.items():
        print(f"{name:<48}{value}")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
