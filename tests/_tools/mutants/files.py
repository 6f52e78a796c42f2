"""Mistakes with files of checkpoints: replaced by a save, or damaged and hostile ones read."""

from __future__ import annotations

from .mutant import Mutant

SAVES = "tests/checkpoint/test_save_failures.py::"
BOMBS = "tests/checkpoint/test_bombs.py::"

MUTANTS = (
    Mutant(
        "files",
        "a save removes every safetensors file, a stranger's too",
        "dsv4._checkpoint.transaction:_old_files",
        "(name for name in _indexed(folder) if name in shards)",
        "(n for n in shards if (folder / n).is_file())",
        SAVES + "test_what_no_index_names_stays",
    ),
    Mutant(
        "files",
        "config.json moves into the folder before the shards",
        "dsv4._checkpoint.transaction:Transaction.commit",
        "sorted(names, key=lambda name: name == CONFIG)",
        "sorted(names)",
        SAVES + "test_every_operation_may_fail",
    ),
    Mutant(
        "files",
        "an old file is removed whatever has taken its name",
        "dsv4._checkpoint.transaction:_remove_old",
        "_mark(folder / name) == list(old[name])",
        "_mark(folder / name) is not None",
        SAVES + "test_a_program_that_writes_after_an_interrupted_save_is_not_mixed_in",
    ),
    Mutant(
        "files",
        "two saves share the lock",
        "dsv4._checkpoint.transaction:_locked",
        "fcntl.LOCK_EX",
        "fcntl.LOCK_SH",
        SAVES + "test_of_two_saves_at_once_one_is_refused",
    ),
    Mutant(
        "files",
        "a configuration of more layers and experts than there are is built",
        "dsv4._checkpoint.bounds:_at_most",
        "value > most",
        "value > most > 2 ** 31",
        BOMBS + "test_stacks_of_experts_are_counted",
    ),
    Mutant(
        "files",
        "the length of a header is not checked",
        "dsv4._checkpoint.shards:_check_header",
        "length > _MAX_HEADER",
        "length > 2 ** 63",
        BOMBS + "test_headers_of_odd_size_or_depth",
    ),
)
