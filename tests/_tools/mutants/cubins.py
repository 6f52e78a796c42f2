"""Mistakes in the cache of compiled kernels: damaged or planted code reaches the driver."""

from __future__ import annotations

from .mutant import Mutant

IMAGES, TRUSTED = "dsv4/cute/runtime/cubin_cache.py", "dsv4/cute/runtime/trusted.py"
TEST = "tests/cute/runtime/test_cubin_cache.py::"
BITS = "tests/cute/runtime/test_cubin_file.py::test_any_flipped_bit_is_found"
PLANTED = TEST + "TestOtherUsers::test_planted_files_are_refused"
FOLDERS = TEST + "TestOtherUsers::test_a_folder_of_others_is_neither_read_nor_written"
REASONS = TEST + "TestTrust::test_reasons"

MUTANTS = (
    Mutant(
        "cubin",
        "the unverified cubin",
        "dsv4.cute.runtime.cubin_file:decode",
        "hashlib.sha256(memoryview(content)[_HASHED.size:]).digest() != digest",
        "len(digest) != 32",
        BITS,
    ),
    Mutant(
        "cubin",
        "the hash of the cubin alone, not of what its launch needs",
        "dsv4.cute.runtime.cubin_file:encode",
        "hashlib.sha256(rest)",
        "hashlib.sha256(image.cubin)",
        "tests/cute/runtime/test_cubin_file.py::test_what_was_encoded_is_decoded",
    ),
    Mutant(
        "cubin",
        "another kernel's file",
        "dsv4.cute.runtime.cubin_file:decode",
        "made_for != key",
        "len(made_for) != len(key)",
        TEST + "TestDamage::test_a_swapped_file_is_not_the_other_kernel",
    ),
    Mutant(
        "cubin",
        "a second read after the check",
        "dsv4.cute.runtime.cubin_cache:find",
        "return decode(trusted.read_file(str(file)))",
        "decode(trusted.read_file(str(file)))\nreturn decode(file.read_bytes())",
        TEST + "TestDamage::test_a_file_is_read_once",
    ),
    Mutant(
        "cubin",
        "another user's file",
        "dsv4.cute.runtime.trusted:others_reason",
        "status.st_uid not in (_ROOT, user.uid)",
        "status.st_uid < 0",
        PLANTED,
    ),
    Mutant(
        "cubin",
        "a folder that everyone can write",
        "dsv4.cute.runtime.trusted:others_reason",
        "mode & stat.S_IWOTH",
        "mode & stat.S_IWOTH and stat.S_ISREG(status.st_mode)",
        FOLDERS,
    ),
    Mutant(
        "cubin",
        "files in a sticky folder count as protected",
        "dsv4.cute.runtime.trusted:others_reason",
        "stat.S_ISDIR(status.st_mode) and mode & stat.S_ISVTX",
        "mode & stat.S_ISVTX",
        REASONS,
    ),
    Mutant(
        "cubin",
        "a link in the place of a file",
        "dsv4.cute.runtime.trusted:",
        "getattr(os, 'O_NOFOLLOW', 0) | getattr(os, 'O_CLOEXEC', 0)",
        "getattr(os, 'O_CLOEXEC', 0)",
        TEST + "TestOtherUsers::test_what_is_no_regular_file",
    ),
    Mutant(
        "cubin",
        "what lies above the folder is not checked",
        "dsv4.cute.runtime.trusted:check_folder",
        "_check_entry(entry, status, user)",
        "",
        FOLDERS,
    ),
    Mutant(
        "cubin",
        "half a file stays where the disk is full",
        "dsv4.cute.runtime.trusted:write_file",
        "os.unlink(temporary)",
        "pass",
        TEST + "TestFolders::test_a_full_or_read_only_disk",
    ),
)
