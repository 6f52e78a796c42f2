"""Tables of docs/specification.md against the code that they describe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsv4.bench.cases.gemm import matrices
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.quant.scales import scale_offset
from tests._tools.mutants import MUTANTS

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "specification.md").read_text()
MODELS = {"Pro": ModelConfig.pro(), "Flash": ModelConfig.flash()}
# Rows of the table in specification, section 12, and what dsv4.bench calls them.
GEMMS = {
    "q_a and kv": "q_a+kv",
    "q_b": "q_b",
    "o_a, per group": "o_a",
    "o_b": "o_b",
    "CSA kv and gate": "csa_kv+gate",
    "HCA kv and gate": "hca_kv+gate",
    "indexer q": "indexer_q",
    "indexer kv and gate": "indexer_kv+gate",
    "indexer weights": "indexer_weights",
    "gate and up, one expert": "gate_up",
    "down, one expert": "down",
}


def section(number: str) -> str:
    """The text of a section up to the next heading."""
    match = re.search(rf"^#+ {re.escape(number)}\.? .+?(?=^#+ )", TEXT, re.MULTILINE | re.DOTALL)
    assert match is not None, number
    return match[0]


def rows(number: str) -> dict[str, list[str]]:
    """The table of a section: first column to the others."""
    lines = [line for line in section(number).splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: others for first, *others in cells[1:]}


def test_the_values_of_the_published_models() -> None:
    for label, values in rows("1.1").items():
        name = re.findall(r"`(\w+)`", label)[0]
        for model, value in zip(MODELS.values(), values, strict=True):
            assert getattr(model, name) == float(value), name
    # The values that both models share follow the table in prose.
    for name, value in re.findall(r"`(\w+)` (\d[\d.e-]*\d|\d)(?=[;,. ])", section("1.1")):
        if hasattr(MODELS["Pro"], name):
            assert {getattr(model, name) for model in MODELS.values()} == {float(value)}, name


@pytest.mark.parametrize("name", MODELS)
def test_the_layer_schedules(name: str) -> None:
    types = MODELS[name].layer_types
    count = {"SWA": SLIDING, "CSA": CSA, "HCA": HCA}
    lines = section("1.2").replace("\n  ", " ").splitlines()
    line = next(line for line in lines if line.startswith(f"- {name}: "))
    found = re.findall(r"(\d+) (SWA|CSA|HCA)\b", line)
    assert sum(int(number) for number, _ in found) == len(types)
    for number, kind in found:
        assert types.count(count[kind]) == int(number), kind
    assert types[2:6] == (CSA, HCA, CSA, HCA)


@pytest.mark.parametrize("label", GEMMS)
def test_the_shapes_of_gemms(label: str) -> None:
    for model, value in zip(MODELS.values(), rows("12")[label], strict=True):
        numbers = list(map(int, re.findall(r"\d+", value)))
        out, columns, groups, _ = matrices(model)[GEMMS[label]]
        assert numbers == ([groups, out, columns] if groups > 1 else [out, columns])


def test_the_formula_of_swizzled_scales() -> None:
    formula = re.search(r"^`(\(\(r div .+?)`", section("11.3"), re.MULTILINE)
    assert formula is not None
    expression = formula[1].replace("div", "//").replace("mod", "%")
    for columns in (1, 4, 7, 24):
        for row in (0, 1, 31, 32, 127, 128, 300):
            for column in range(columns):
                names = {"r": row, "k": column, "P": -(-columns // 4)}
                assert eval(expression, {}, names) == scale_offset(row, column, columns)


def test_every_pitfall_with_a_mutant_is_one() -> None:
    known = set(map(int, re.findall(r"\*\*Pitfall (\d+)\. ", TEXT)))
    numbers = {int(m.topic.split()[1]) for m in MUTANTS if m.topic.startswith("pitfall ")}
    assert numbers <= known
