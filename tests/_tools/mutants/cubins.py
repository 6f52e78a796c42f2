"""Mistakes in the cache of compiled kernels: damaged or planted code reaches the driver."""

from __future__ import annotations

from .mutant import Mutant

IMAGES, TRUSTED = "dsv4/cute/runtime/cubin_cache.py", "dsv4/cute/runtime/trusted.py"
FORMAT = "dsv4/cute/runtime/cubin_file.py"
TEST = "tests/cute/runtime/test_cubin_cache.py::"
BITS = "tests/cute/runtime/test_cubin_file.py::test_any_flipped_bit_is_found"
PLANTED = TEST + "TestOtherUsers::test_planted_files_are_refused"
FOLDERS = TEST + "TestOtherUsers::test_a_folder_of_others_is_neither_read_nor_written"
REASONS = TEST + "TestTrust::test_reasons"

MUTANTS = (
    Mutant(
        "cubin",
        "the unverified cubin",
        FORMAT,
        "if hashlib.sha256(memoryview(content)[_HASHED.size :]).digest() != digest:",
        "if len(digest) != 32:",
        BITS,
    ),
    Mutant(
        "cubin",
        "the hash of the cubin alone, not of what its launch needs",
        FORMAT,
        "    rest = fields + name + image.cubin\n"
        "    return _HASHED.pack(MAGIC, hashlib.sha256(rest).digest()) + rest",
        "    rest = fields + name + image.cubin\n"
        "    return _HASHED.pack(MAGIC, hashlib.sha256(image.cubin).digest()) + rest",
        "tests/cute/runtime/test_cubin_file.py::test_what_was_encoded_is_decoded",
    ),
    Mutant(
        "cubin",
        "another kernel's file",
        FORMAT,
        "if made_for != key:",
        "if len(made_for) != len(key):",
        TEST + "TestDamage::test_a_swapped_file_is_not_the_other_kernel",
    ),
    Mutant(
        "cubin",
        "a second read after the check",
        IMAGES,
        "        return decode(trusted.read_file(str(file)))",
        "        decode(trusted.read_file(str(file)))\n        return decode(file.read_bytes())",
        TEST + "TestDamage::test_a_file_is_read_once",
    ),
    Mutant(
        "cubin",
        "another user's file",
        TRUSTED,
        "    if status.st_uid not in (_ROOT, user.uid):\n        allowed",
        "    if status.st_uid < 0:\n        allowed",
        PLANTED,
    ),
    Mutant(
        "cubin",
        "a folder that everyone can write",
        TRUSTED,
        "if mode & stat.S_IWOTH:",
        "if mode & stat.S_IWOTH and stat.S_ISREG(status.st_mode):",
        FOLDERS,
    ),
    Mutant(
        "cubin",
        "files in a sticky folder count as protected",
        TRUSTED,
        "if stat.S_ISDIR(status.st_mode) and mode & stat.S_ISVTX:",
        "if mode & stat.S_ISVTX:",
        REASONS,
    ),
    Mutant(
        "cubin",
        "a link in the place of a file",
        TRUSTED,
        '_OPEN = getattr(os, "O_NOFOLLOW", 0) | getattr',
        "_OPEN = getattr",
        TEST + "TestOtherUsers::test_what_is_no_regular_file",
    ),
    Mutant(
        "cubin",
        "what lies above the folder is not checked",
        TRUSTED,
        "        _check_entry(entry, status, user)\n        place = entry",
        "        place = entry",
        FOLDERS,
    ),
    Mutant(
        "cubin",
        "half a file stays where the disk is full",
        TRUSTED,
        "            os.unlink(temporary)",
        "            pass",
        TEST + "TestFolders::test_a_full_or_read_only_disk",
    ),
)
