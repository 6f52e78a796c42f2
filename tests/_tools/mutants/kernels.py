"""The same mutants in Triton kernels, which the reference's tests do not look at."""

from __future__ import annotations

from .mutant import TRITON, Mutant

KV = "tests/ops/test_kv_cache.py::test_pitfall_"
COMPRESSOR = "tests/ops/test_compressor.py::test_pitfall_"
INDEXER = "tests/ops/test_indexer.py::test_pitfall_"
ROUTER = "tests/ops/test_router.py::test_pitfall_"
SWIGLU = "tests/ops/test_swiglu.py::test_pitfall_9_on_both_sides_of_each_bound"
ATTENTION = "tests/ops/test_attention_kernels.py::"

MUTANTS = (
    Mutant(
        "pitfall 9",
        "a kernel that clamps the gate from below, too",
        TRITON + "swiglu:swiglu_of",
        "tl.minimum(gate, limit)",
        "tl.minimum(tl.maximum(gate, -limit), limit)",
        SWIGLU,
    ),
    Mutant(
        "pitfall 9",
        "a kernel that clamps up from above alone",
        TRITON + "swiglu:swiglu_of",
        "tl.maximum(up, -limit)",
        "up",
        SWIGLU,
    ),
    Mutant(
        "pitfall 10",
        "a kernel whose softplus overflows",
        TRITON + "router:_sqrt_softplus",
        "_log1p(_exp_of_minus(tl.abs(logit))) + tl.maximum(logit, 0.0)",
        "tl.log(1.0 + tl.exp(logit))",
        ROUTER + "10_scores_are_stable_from_minus_1000_to_1000",
    ),
    Mutant(
        "pitfall 11",
        "a kernel without the root",
        TRITON + "router:_sqrt_softplus",
        "tl.where(logit != logit, float('nan'), root)",
        "tl.where(logit != logit, float('nan'), root * root)",
        "tests/ops/test_router.py::test_bias_is_for_the_selection_alone",
    ),
    Mutant(
        "pitfall 11",
        "a kernel whose bias weighs, too",
        TRITON + "router:_topk_kernel",
        "tl.where(inside, scores, 0.0)",
        "tl.where(inside, tl.maximum(biased, 0.0), 0.0)",
        "tests/ops/test_router.py::test_bias_is_for_the_selection_alone",
    ),
    Mutant(
        "pitfall 13",
        "a kernel that shows an entry too few",
        TRITON + "_lib.topk:select_kernel",
        "tl.minimum(tl.load(visible + token), capacity).to(tl.int32)",
        "tl.minimum(tl.load(visible + token), capacity).to(tl.int32) - 1",
        INDEXER + "13_a_decode_step_sees_every_entry",
    ),
    Mutant(
        "pitfall 16",
        "a kernel that takes a padded length",
        TRITON + "compressor_update:_entry",
        "length = tl.load(cu + b + 1).to(tl.int64) - first\n"
        "start = tl.load(starts + b).to(tl.int64)",
        "length = tl.load(cu + b + 1).to(tl.int64) - first\n"
        "length = (length + 3) // 4 * 4\n"
        "start = tl.load(starts + b).to(tl.int64)",
        COMPRESSOR + "16_true_lengths",
    ),
    Mutant(
        "pitfall 17",
        "a kernel whose codes run over the RoPE dims",
        TRITON + "_lib.cache_entries:store_nope",
        "tl.store(address, codes, mask=written & (column < NOPE))",
        "tl.store(address, codes, mask=written & (column < NOPE + 1))",
        KV + "17_rope_dims_hold_one_value",
    ),
    Mutant(
        "pitfall 20",
        "a kernel that attends to slot -1",
        TRITON + "attention:_attend_kernel",
        "slot >= 0",
        "slot >= -1",
        ATTENTION + "test_equals_a_softmax",
    ),
    Mutant(
        "pitfall 20",
        "a kernel that writes slot -1",
        TRITON + "_lib.cache_entries:store_nope",
        "BLOCK: tl.constexpr = values.shape[1]\nwritten = (slots >= 0)[:, None]",
        "BLOCK: tl.constexpr = values.shape[1]\n"
        "slots = tl.maximum(slots, 0)\n"
        "written = (slots >= 0)[:, None]",
        KV + "20_slot_minus_one_changes_nothing",
    ),
    Mutant(
        "pitfall 22",
        "a kernel that shows one entry at least",
        TRITON + "_lib.topk:select_kernel",
        "tl.minimum(tl.load(visible + token), capacity)",
        "tl.maximum(tl.minimum(tl.load(visible + token), capacity), 1)",
        INDEXER + "22_nothing_visible",
    ),
)
