"""Mistakes of the bench: what is wrong passes, or is not named."""

from __future__ import annotations

from .mutant import Mutant

BENCH = "dsv4/bench/"
REPORT, COMMANDS = "tests/test_bench_report.py::", "tests/test_bench_commands.py::"

MUTANTS = (
    Mutant(
        "bench",
        "a failed generation exits with 0",
        BENCH + "cli.py",
        "return WRONG if any(check.passed is False for check in every) else OK",
        "return WRONG if any(row.match is False for row in rows) else OK",
        REPORT + "TestMainJob::test_generation_that_differs_fails_the_job",
    ),
    Mutant(
        "bench",
        "the verdict names no failure",
        BENCH + "verdict.py",
        'named = "; ".join(f"{check.where}: {check.detail}" for check in failed[:_NAMED])',
        'named = "see above"',
        REPORT + "TestVerdict::test_what_failed_and_where",
    ),
    Mutant(
        "bench",
        "an operator that raises is left out",
        BENCH + "measure.py",
        "return dataclasses.replace(row, match=False, message=said)",
        "return dataclasses.replace(row, match=None, message=said)",
        REPORT + "TestVerdict::test_an_operator_that_raises_is_named_and_the_others_are_measured",
    ),
    Mutant(
        "bench",
        "what was not checked has passed",
        BENCH + "verdict.py",
        "count = sum(check.kind == kind and check.passed is not None for check in checks)",
        "count = sum(check.kind == kind for check in checks)",
        REPORT + "TestVerdict::test_unchecked_rows_are_not_passed",
    ),
    Mutant(
        "bench",
        "an unknown baseline is ignored",
        BENCH + "baselines/__init__.py",
        "        if not any(is_among(name, (asked,)) for name in known):",
        "        if not known:",
        COMMANDS + "TestBaselines::test_unknown_names_are_errors",
    ),
    Mutant(
        "bench",
        "a label as wide as it likes",
        BENCH + "tables.py",
        "        if len(joined) <= width:",
        "        if len(joined) <= WIDTH:",
        REPORT + "TestTables::test_rows_of_every_case_fit",
    ),
)
