"""The engine of examples/vllm/compare.py on a CPU: a program that ``Engine.launch`` starts."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

PROGRAM = Path(__file__).resolve().parents[3] / "examples" / "vllm" / "compare.py"


def load() -> ModuleType:
    """Import the example, which is in no package."""
    spec = importlib.util.spec_from_file_location("compare_vllm", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    from tests.integrations.vllm import engine_process

    engine_process.register()
    load().serve(json.loads(sys.argv[2]))
