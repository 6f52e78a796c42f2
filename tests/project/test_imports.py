"""Cost of imports, each in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dsv4

# None makes an import fail and a search find nothing, as if the package were not installed.
BLOCKED = """
import sys
for name in {blocked}:
    sys.modules[name] = None
"""
OPTIONAL = ("triton", "cutlass", "transformers", "rich", "matplotlib", "hypothesis")


def run(code: str, blocked: tuple[str, ...] = OPTIONAL) -> str:
    source = BLOCKED.format(blocked=blocked) + code
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_needs_torch_alone_and_touches_no_gpu() -> None:
    code = """
import torch
torch.cuda._lazy_init = lambda: (_ for _ in ()).throw(AssertionError("touched the GPU"))
before = set(sys.modules)
import dsv4
new = {m.split(".")[0] for m in set(sys.modules) - before}
print(dsv4.__version__, sorted(new), torch.cuda.is_initialized())
"""
    assert run(code).split(maxsplit=1) == [dsv4.__version__, "['dsv4'] False\n"]


@pytest.mark.slow
def test_the_whole_model_runs_without_the_extras() -> None:
    code = """
import torch, dsv4
model = dsv4.DeepseekV4ForCausalLM(dsv4.ModelConfig.tiny()).eval()
print(model.generate([[1, 2, 3]], 2, stop_ids=[])[0].__len__())
"""
    assert run(code) == "2\n"


@pytest.mark.slow
def test_a_model_without_weights_needs_no_compiler_of_torch() -> None:
    """Its import takes 2 to 4 s, which every start would wait for."""
    code = """
import sys, torch, dsv4
from dsv4.compilation.kernel_calls import every_call, kernel_plans
from dsv4.compilation.recipe import Recipe
with torch.device("meta"):
    model = dsv4.DeepseekV4ForCausalLM(dsv4.ModelConfig.tiny())
Recipe.of(model.config)
kernel_plans(every_call(model.config), 64)
print("torch._dynamo" in sys.modules, model.model.embed_tokens.weight.requires_grad)
"""
    assert run(code) == "False True\n"


def test_optional_parts_say_what_is_missing() -> None:
    code = """
import dsv4.integrations.transformers as t
try:
    t.from_pretrained("nowhere")
except ImportError as error:
    print("transformers" in str(error))
"""
    assert run(code) == "True\n"


def test_public_names() -> None:
    for name in dsv4.__all__:
        assert getattr(dsv4, name) is not None
    assert set(dsv4.__all__) <= set(dir(dsv4))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dsv4.nothing
