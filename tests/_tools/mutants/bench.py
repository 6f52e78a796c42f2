"""Mistakes of the bench: what is wrong passes, or is not named."""

from __future__ import annotations

from .mutant import Mutant

REPORT, COMMANDS = "tests/bench/test_report.py::", "tests/bench/test_commands.py::"

MUTANTS = (
    Mutant(
        "bench",
        "a failed generation exits with 0",
        "dsv4.bench.cli:_finish",
        "(check.passed is False for check in every)",
        "(row.match is False for row in rows)",
        REPORT + "TestMainJob::test_generation_that_differs_fails_the_job",
    ),
    Mutant(
        "bench",
        "the verdict names no failure",
        "dsv4.bench.verdict:line",
        "'; '.join((f'{check.where}: {check.detail}' for check in failed[:_NAMED]))",
        "'see above'",
        REPORT + "TestVerdict::test_what_failed_and_where",
    ),
    Mutant(
        "bench",
        "an operator that raises is left out",
        "dsv4.bench.measure:attempt",
        "dataclasses.replace(row, match=False, message=said)",
        "dataclasses.replace(row, match=None, message=said)",
        REPORT + "TestVerdict::test_an_operator_that_raises_is_named_and_the_others_are_measured",
    ),
    Mutant(
        "bench",
        "what was not checked has passed",
        "dsv4.bench.verdict:_count",
        "check.kind == kind and check.passed is not None",
        "check.kind == kind",
        REPORT + "TestVerdict::test_unchecked_rows_are_not_passed",
    ),
    Mutant(
        "bench",
        "an unknown baseline is ignored",
        "dsv4.bench.baselines.__init__:check_names",
        "any((is_among(name, (asked,)) for name in known))",
        "known",
        COMMANDS + "TestBaselines::test_unknown_names_are_errors",
    ),
    Mutant(
        "bench",
        "a label as wide as it likes",
        "dsv4.bench.tables:_label",
        "len(joined) <= width",
        "len(joined) <= WIDTH",
        REPORT + "TestTables::test_rows_of_every_case_fit",
    ),
)
