"""Mutants with files of checkpoints: replaced by a save, or damaged and hostile ones read."""

from __future__ import annotations

from .mutant import Mutant

SAVES = "tests/checkpoint/test_save_failures.py::"
BOMBS = "tests/checkpoint/test_bombs.py::"
AHEAD = "tests/checkpoint/test_read_ahead.py::"

MUTANTS = (
    Mutant(
        "files",
        "a save removes every safetensors file, a stranger's too",
        "dsv4.checkpoint.transaction:_old_files",
        "(name for name in _indexed(folder) if name in shards)",
        "(n for n in shards if (folder / n).is_file())",
        SAVES + "test_what_no_index_names_stays",
    ),
    Mutant(
        "files",
        "config.json moves into the folder before the shards",
        "dsv4.checkpoint.transaction:Transaction.commit",
        "sorted(names, key=lambda name: name == CONFIG)",
        "sorted(names)",
        SAVES + "test_every_operation_may_fail",
    ),
    Mutant(
        "files",
        "an old file is removed whatever has taken its name",
        "dsv4.checkpoint.transaction:_remove_old",
        "_mark(folder / name) == list(old[name])",
        "_mark(folder / name) is not None",
        SAVES + "test_a_program_that_writes_after_an_interrupted_save_is_not_mixed_in",
    ),
    Mutant(
        "files",
        "two saves share the lock",
        "dsv4.checkpoint.transaction:_locked",
        "fcntl.LOCK_EX",
        "fcntl.LOCK_SH",
        SAVES + "test_of_two_saves_at_once_one_is_refused",
    ),
    Mutant(
        "files",
        "a configuration of more layers and experts than there are is built",
        "dsv4.checkpoint.bounds:_at_most",
        "value > most",
        "value > most > 2 ** 31",
        BOMBS + "test_stacks_of_experts_are_counted",
    ),
    Mutant(
        "files",
        "the length of a header is not checked",
        "dsv4.checkpoint.shards:_check_header",
        "length > _MAX_HEADER",
        "length > 2 ** 63",
        BOMBS + "test_headers_of_odd_size_or_depth",
    ),
    Mutant(
        "files",
        "nothing is read ahead",
        "dsv4.checkpoint.shards:Shards.reading_ahead",
        "[piece for reading in plan for piece in _pieces_of(reading, most)]",
        "[]",
        AHEAD + "TestOverlap::test_a_load_reads_the_next_layers_while_one_is_filled",
    ),
    Mutant(
        "files",
        "one thread reads",
        "dsv4.checkpoint.read_ahead:ReadAhead.__init__",
        "min(_cpus(), _THREADS)",
        "1",
        AHEAD + "TestOverlap::test_a_load_reads_the_next_layers_while_one_is_filled",
    ),
    Mutant(
        "files",
        "an error of a reader is lost",
        "dsv4.checkpoint.read_ahead:ReadAhead._read",
        "batch.error = error",
        "pass",
        AHEAD + "TestReadAhead::test_an_error_of_a_reader_reaches_the_caller",
    ),
    Mutant(
        "files",
        "a slab is free while its batch is still requested",
        "dsv4.checkpoint.read_ahead:ReadAhead.copy_to",
        "not batch.left",
        "True",
        AHEAD + "TestReadAhead::test_any_order_of_requests_gives_the_bytes",
    ),
    Mutant(
        "files",
        "a file that is open may change",
        "dsv4.checkpoint.shards:ShardReader._read",
        "info.mark is not None and _mark(os.fstat(file.fileno())) != info.mark",
        "False",
        AHEAD + "TestShards::test_a_file_that_is_written_over_is_noticed",
    ),
)
