"""Mistakes in what is compiled ahead: a wrong kernel is loaded, or one is compiled after all."""

from __future__ import annotations

from .mutant import Mutant

BUNDLE, STEPS, POOL = (
    "dsv4/compilation/bundle.py",
    "dsv4/compilation/steps.py",
    "dsv4/compilation/forks.py",
)
BUNDLES = "tests/test_bundle.py::"
WARM = "tests/test_warm_kernels.py::"
POOLS = "tests/test_compile_pool.py::"

MUTANTS = (
    Mutant(
        "start",
        "an image of a bundle that is not verified",
        BUNDLE,
        "        if hashlib.sha256(found).hexdigest() != entry.sha256:",
        "        if len(entry.sha256) != 64:",
        BUNDLES + "test_a_changed_byte_is_found",
    ),
    Mutant(
        "start",
        "a bundle of other versions",
        BUNDLE,
        "    if difference is not None:",
        "    if difference is not None and not found.entries:",
        BUNDLES + "TestUse::test_of_other_versions_it_is_not_used",
    ),
    Mutant(
        "start",
        "a bundle in a place that others control",
        BUNDLE,
        "        found = decode(trusted.read_file(str(file), MOST_BYTES))",
        "        found = decode(file.read_bytes())",
        BUNDLES + "TestUse::test_a_missing_file_and_one_that_others_can_write",
    ),
    Mutant(
        "start",
        "steps of powers of two alone",
        STEPS,
        "    counts |= {48, *range(65, most, 64), most}",
        "    counts |= {most}",
        WARM + "test_any_step_launches_what_was_found",
    ),
    Mutant(
        "start",
        "no small caches",
        STEPS,
        "    return [power for power in powers if power < most]",
        "    return []",
        WARM + "test_any_step_launches_what_was_found",
    ),
    Mutant(
        "start",
        "a ring whose length is a constant of its kernel",
        "dsv4/triton/slots.py",
        '@triton.jit(do_not_specialize=["stride", "tokens", "width", "blocks", "pages"])',
        '@triton.jit(do_not_specialize=["stride", "tokens", "width", "blocks"])',
        WARM + "test_any_step_launches_what_was_found",
    ),
    Mutant(
        "start",
        "scores of an odd number of tokens at a time",
        "dsv4/triton/indexer.py",
        "    return rows - rows % 16 if rows >= 16 else rows",
        "    return rows",
        WARM + "test_any_step_launches_what_was_found",
    ),
    Mutant(
        "start",
        "a compiled kernel that is not kept",
        "dsv4/triton/_runtime/kernel_store.py",
        "        cubin_cache.keep(file_name(request.key), encode(made, request.key))",
        "        encode(made, request.key)",
        WARM + "test_a_kernel_is_compiled_once_for_all_processes",
    ),
    Mutant(
        "start",
        "modules of the current folder in the workers",
        POOL,
        "sys.path[:] = json.loads",
        "sys.path[1:] = json.loads",
        POOLS + "test_workers_have_the_search_path_of_the_parent_and_no_gpu",
    ),
)
