"""Requirements, constraints files and what the README installs agree with one another."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from packaging.requirements import Requirement

import dsv4

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # of pytest's requirements, as packaging is

ROOT = Path(dsv4.__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="no pyproject.toml beside the package"
)
# Packages that bring modules of other names.
MODULES = {"cutlass": "nvidia-cutlass-dsl", "cuda": "nvidia-cutlass-dsl"}
MINORS = ("3.10", "3.11", "3.12", "3.13")


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@functools.cache
def tool():
    spec = importlib.util.spec_from_file_location("constraints", ROOT / "tools" / "constraints.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def constraints(minor: str) -> dict[str, str]:
    text = (ROOT / "constraints" / f"py{minor.replace('.', '')}.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[a-z0-9.]+", line) for line in lines), lines
    pairs = [line.split("==") for line in lines]
    assert len(dict(pairs)) == len(pairs), "a package stands twice"
    return dict(pairs)


def requirements(extras: tuple[str, ...], minor: str) -> list[Requirement]:
    table = project()
    lines = [*table["dependencies"]]
    for extra in extras:
        lines += table["optional-dependencies"][extra]
    result = [Requirement(line) for line in lines]
    environment = {"python_version": minor, "sys_platform": "linux", "extra": ""}
    return [r for r in result if r.marker is None or r.marker.evaluate(environment)]


@pytest.mark.parametrize("minor", MINORS)
def test_constraints_name_a_version_that_each_requirement_admits(minor: str) -> None:
    known = constraints(minor)
    for requirement in requirements(("cute", "hf", "bench", "test", "lint"), minor):
        name = tool().canonical(requirement.name)
        if name == "torch":
            assert name not in known, "TORCH of the Makefile chooses torch"
        else:
            assert requirement.specifier.contains(known[name]), requirement


def test_there_are_constraints_for_the_supported_pythons_alone() -> None:
    files = sorted(path.name for path in (ROOT / "constraints").iterdir())
    assert files == [f"py{minor.replace('.', '')}.txt" for minor in MINORS] + ["vllm.txt"]
    named = [c.rpartition(" ")[2] for c in project()["classifiers"] if "Python :: 3." in c]
    assert tuple(named) == MINORS


def test_the_list_for_vllm_has_what_the_extras_of_its_environment_require() -> None:
    lines = (ROOT / "constraints" / "vllm.txt").read_text().splitlines()
    versions = dict(line.split("==") for line in lines if not line.startswith("#"))
    for extra in ("hf", "test"):
        for line in project()["optional-dependencies"][extra]:
            requirement = Requirement(line)
            version = versions[tool().canonical(requirement.name)]
            assert requirement.specifier.contains(version), requirement
    assert Requirement("transformers<5.21").specifier.contains(versions["transformers"])


def test_the_makefile_tests_with_a_vllm_that_the_plugin_and_the_extra_admit() -> None:
    from dsv4.integrations.vllm.places import is_supported

    (version,) = re.findall(r"VLLM \?= vllm==(\S+)", (ROOT / "Makefile").read_text())
    (line,) = project()["optional-dependencies"]["vllm"]
    assert is_supported(version)
    assert Requirement(line).specifier.contains(version)


def test_cutedsl_has_an_upper_bound_wherever_it_is_named() -> None:
    lines = [line for extra in project()["optional-dependencies"].values() for line in extra]
    named = [Requirement(line) for line in lines if line.startswith("nvidia-cutlass-dsl")]
    assert len(named) == 2
    for requirement in named:
        assert requirement.specifier.contains("4.8.0")  # which vLLM 0.33.0 wants
        assert not requirement.specifier.contains("4.9.0")


def imported(folders: tuple[str, ...]) -> set[str]:
    """Top-level modules, not of Python's library, that the files of folders import."""
    result = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    result |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    result.add((node.module or "").partition(".")[0])
    return result - set(sys.stdlib_module_names) - {"dsv4"}


def test_the_readme_installs_every_package_that_kernels_and_models_import() -> None:
    lines = re.findall(r'pip install -e "\.\[([a-z,]+)\]"', (ROOT / "README.md").read_text())
    assert lines
    brought = {r.name for r in requirements(tuple(lines[0].split(",")), "3.12")}
    # dsv4.testing serves tests, dsv4.bench names the baselines that are not installed, and vLLM
    # imports the plugin.
    modules = imported(("dsv4",)) - {"hypothesis", "numpy", "ml_dtypes", "torchao", "vllm"}
    assert {MODULES.get(module, module) for module in modules} == brought


def test_fit_leaves_out_what_a_torch_with_cuda_brings_in_another_version() -> None:
    lines = ["# written", "triton==3.9.0", "cuda-bindings==13.5.0", "sympy==1.14.0  # a", ""]
    requires = [
        'triton==3.7.1; platform_system == "Linux"',
        'cuda_bindings<14,>=13.0.3; python_version < "3.15"',
        'sympy<1; extra == "old"',
        'sympy<1; python_version < "3.0"',
    ]
    if sys.platform == "linux":
        assert tool().fitting(lines, requires) == ["cuda-bindings==13.5.0", "sympy==1.14.0"]
    assert tool().fitting(lines, []) == ["triton==3.9.0", "cuda-bindings==13.5.0", "sympy==1.14.0"]
    with pytest.raises(ValueError, match="a constraint is 'a>=1', wanted name==version"):
        tool().fitting(["a>=1"], [])


NAMES = st.from_regex(r"[a-z](-?[a-z0-9])*", fullmatch=True)
VERSIONS = st.lists(st.integers(0, 30), min_size=1, max_size=3).map(
    lambda parts: ".".join(map(str, parts))
)


@given(st.dictionaries(NAMES, VERSIONS), st.dictionaries(NAMES, VERSIONS))
@example({"triton": "3.9.0"}, {"triton": "3.9.0"})
def test_fit_keeps_what_is_not_bounded_and_what_the_bound_admits(
    known: dict[str, str], bounds: dict[str, str]
) -> None:
    lines = [f"{name}=={version}" for name, version in known.items()]
    fitting = tool().fitting(lines, [f"{name}=={version}" for name, version in bounds.items()])
    assert set(fitting) <= set(lines)
    for name in known.keys() - bounds.keys():
        assert f"{name}=={known[name]}" in fitting
    for name in known.keys() & bounds.keys():
        admitted = Requirement(f"x=={bounds[name]}").specifier.contains(known[name])
        assert (f"{name}=={known[name]}" in fitting) == admitted


def test_written_versions_name_neither_torch_nor_what_comes_with_its_build() -> None:
    installed = {
        "torch": "2.13.0+cu130",
        "nvidia-cudnn-cu13": "9.20.0.48",
        "nvidia_nccl_cu13": "2.29.7",
        "cuda-toolkit": "13.0.3",
        "dsv4": "0.1.0",
        "pip": "26.3",
        "ml_dtypes": "0.6.0",
        "nvidia-cutlass-dsl-libs-base": "4.8.1",
    }
    assert tool().pins(installed) == ["ml-dtypes==0.6.0", "nvidia-cutlass-dsl-libs-base==4.8.1"]
