"""Run programs of tests in forks of an interpreter that has imported what they need.

A process of the tests interprets Triton's kernels, so what compiles them is a process of its own.
To import PyTorch, Triton and this package takes three seconds of a processor; here they are
imported once for all such programs of a test process. A fork has nothing else of another program:
no kernel was compiled or hashed, and no model was made before it began.

What uses a GPU or measures an import starts an interpreter of its own.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from dsv4.compilation.worker import import_all

# Imported before any fork, with all that they import.
_MODULES = (
    "dsv4.bench.cases",
    "dsv4.compilation.steps",
    "tests._tools.compiled_caches",
    "tests._tools.compiled_four_bit",
    "tests._tools.ptx.grid",
    "tests.ops.test_indexer",
)
_PACKAGES = ("dsv4.triton",)  # with all their modules
_SERVE = "from tests._tools.forked import serve; serve()"


def run_module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m name arguments`` where kernels are not interpreted."""
    return _run({"module": name, "arguments": [name, *arguments]})


def run_source(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -c source arguments`` where kernels are not interpreted."""
    return _run({"source": source, "arguments": ["-c", *arguments]})


def _run(program: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    environment = _environment()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        request = {"environment": environment, "files": [str(file) for file in files], **program}
        status = _ask(request)
        said = [file.read_text() if file.exists() else "" for file in files]
    return subprocess.CompletedProcess(program["arguments"], status, *said)


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}


def _ask(request: dict[str, Any]) -> int:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, f"the interpreter that is forked has ended: {server.wait()}"
    return int(answer)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The interpreter that is forked; it ends with this process, whose pipe it reads."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _SERVE]
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=_environment())
    atexit.register(server.communicate)
    return server


def serve() -> None:
    """Run the programs that stdin asks for, a line of JSON each, and print their exit statuses."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_all(_PACKAGES)
    for name in _MODULES:
        importlib.import_module(name)
    gc.freeze()  # no collection of a fork looks at what was imported
    while line := sys.stdin.readline():
        number = os.fork()
        if number == 0:
            _become(json.loads(line))
            return  # to the interpreter's end
        _, status = os.waitpid(number, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _become(request: dict[str, Any]) -> None:
    """Run a program in this process as if an interpreter had started with it."""
    os.environ.clear()
    os.environ.update(request["environment"])
    for handle, path in enumerate((os.devnull, *request["files"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, handle)
        os.close(opened)
    sys.argv[:] = request["arguments"]
    if "module" in request:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(request["source"], "<string>", "exec"), main.__dict__)
