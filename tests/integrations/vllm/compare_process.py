"""The engine of examples/vllm/compare.py on a CPU: a program that ``Engine.launch`` starts."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "vllm"


def load(name: str = "compare") -> ModuleType:
    """Import a module of the example, which is in no package."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)


if __name__ == "__main__":
    from tests.integrations.vllm import engine_process

    engine_process.register()
    load("compare_engine").serve(json.loads(sys.argv[1]))
