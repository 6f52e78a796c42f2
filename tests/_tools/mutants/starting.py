"""Mutants in what is compiled ahead: a wrong kernel is loaded, or one is compiled after all."""

from __future__ import annotations

from .mutant import TRITON, Mutant

BUNDLES = "tests/compilation/test_bundle.py::"
WARM = "tests/compilation/test_warm_kernels.py::"
POOLS = "tests/compilation/test_compile_pool.py::"
AHEAD = "tests/compilation/test_ahead.py::"
READING = "tests/checkpoint/test_kernels_ahead.py::"

MUTANTS = (
    Mutant(
        "start",
        "an image of a bundle that is not verified",
        "dsv4.compilation.bundle:Bundle.image",
        "hashlib.sha256(image).hexdigest() != entry.sha256",
        "len(entry.sha256) != 64",
        BUNDLES + "test_a_changed_byte_is_found",
    ),
    Mutant(
        "start",
        "a bundle of other versions",
        "dsv4.compilation.bundle:read",
        "difference is not None",
        "difference is not None and (not bundle.entries)",
        BUNDLES + "TestUse::test_of_other_versions_it_is_not_used",
    ),
    Mutant(
        "start",
        "a bundle in a place that others control",
        "dsv4.compilation.bundle:read",
        "trusted.read_file(str(file), MOST_BYTES)",
        "file.read_bytes()",
        BUNDLES + "TestUse::test_a_missing_file_and_one_that_others_can_write",
    ),
    Mutant(
        "start",
        "steps of powers of two alone",
        "dsv4.compilation.step_shapes:token_counts",
        "{48, *range(65, min(most, _FINE_TOKENS), 64), *range(_FINE_TOKENS + 1, most, 512)}",
        "set()",
        WARM + "test_any_step_launches_what_was_found",
    ),
    Mutant(
        "start",
        "no small caches",
        "dsv4.compilation.step_shapes:_contexts",
        "[power for power in powers if power < most]",
        "[]",
        WARM + "test_any_step_launches_what_was_found",
    ),
    Mutant(
        "start",
        "a ring whose length is a constant of its kernel",
        TRITON + "slots:_slots_kernel",
        "['stride', 'tokens', 'width', 'blocks', 'pages']",
        "['stride', 'tokens', 'width', 'blocks']",
        WARM + "test_any_step_launches_what_was_found",
    ),
    Mutant(
        "start",
        "scores of an odd number of tokens at a time",
        TRITON + "indexer_select:rows_at_a_time",
        "rows - rows % 16 if rows >= 16 else rows",
        "rows",
        WARM + "test_any_step_launches_what_was_found",
    ),
    Mutant(
        "start",
        "a compiled kernel that is not kept",
        TRITON + "_runtime.kernel_store:_compiled",
        "cubin_cache.keep(file_name(request.key), encode(made, request.key))",
        "encode(made, request.key)",
        WARM + "test_a_kernel_is_compiled_once_for_all_processes",
    ),
    Mutant(
        "start",
        "modules of the current folder in the workers",
        "dsv4.compilation.forks:",
        "f'import json, os, sys; sys.path[:] = json.loads(os.environ.pop({_PATH!r})); '",
        "f'import json, os, sys; sys.path[1:] = json.loads(os.environ.pop({_PATH!r})); '",
        POOLS + "test_workers_have_the_search_path_of_the_parent_and_no_gpu",
    ),
    Mutant(
        "start",
        "jobs beside the reading that this process does, where others run operators",
        "dsv4.compilation.pool:Pool._done",
        "done(job) if self._here else Done(error='no worker process can be started')",
        "done(job)",
        AHEAD + "test_where_no_process_can_be_started_this_one_does_nothing",
    ),
    Mutant(
        "start",
        "a list of shorter steps",
        "dsv4.compilation.listing:Listing.stored",
        "content is None or content['max_tokens'] < self.max_tokens",
        "content is None",
        WARM + "test_a_list_is_used_while_all_of_its_kernels_are_stored",
    ),
    Mutant(
        "start",
        "kernels that begin when the weights are read",
        "dsv4.checkpoint.loading:_filled",
        "fill_module(model, checkpoint, values, hosting, before_reading=begin)",
        "(fill_module(model, checkpoint, values, hosting), begin and begin())[0]",
        READING + "test_the_list_is_that_of_the_filled_model",
    ),
    Mutant(
        "start",
        "weights of one scale dtype",
        "dsv4.checkpoint.kernels_ahead:_expected_weight",
        "Weight(name, options.scale_dtype(entry))",
        "Weight(name, torch.float32)",
        READING + "test_the_list_is_that_of_the_filled_model",
    ),
)
