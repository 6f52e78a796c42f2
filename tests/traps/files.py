"""Mistakes with files of checkpoints: replaced by a save, or damaged and hostile ones read."""

from __future__ import annotations

from .mutant import Mutant

TRANSACTION = "dsv4/checkpoint/transaction.py"
SAVES = "tests/test_save_failures.py::"
BOMBS = "tests/test_checkpoint_bombs.py::"

MUTANTS = (
    Mutant(
        "files",
        "a save removes every safetensors file, a stranger's too",
        TRANSACTION,
        "old.update(dict.fromkeys(name for name in _indexed(folder) if name in shards))",
        "old.update(dict.fromkeys(n for n in shards if (folder / n).is_file()))",
        SAVES + "test_what_no_index_names_stays",
    ),
    Mutant(
        "files",
        "config.json moves into the folder before the shards",
        TRANSACTION,
        "files = sorted(names, key=lambda name: name == CONFIG)",
        "files = sorted(names)",
        SAVES + "test_every_operation_may_fail",
    ),
    Mutant(
        "files",
        "an old file is removed whatever has taken its name",
        TRANSACTION,
        "if _mark(folder / name) == list(old[name]):",
        "if _mark(folder / name) is not None:",
        SAVES + "test_a_program_that_writes_after_an_interrupted_save_is_not_mixed_in",
    ),
    Mutant(
        "files",
        "two saves share the lock",
        TRANSACTION,
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        SAVES + "test_of_two_saves_at_once_one_is_refused",
    ),
    Mutant(
        "files",
        "a configuration of more layers and experts than there are is built",
        "dsv4/checkpoint/bounds.py",
        "    if value > most:\n",
        "    if value > most > 2**31:\n",
        BOMBS + "test_stacks_of_experts_are_counted",
    ),
    Mutant(
        "files",
        "the length of a header is not checked",
        "dsv4/checkpoint/shards.py",
        "            if length > _MAX_HEADER:\n",
        "            if length > 2**63:\n",
        BOMBS + "test_headers_of_odd_size_or_depth",
    ),
)
