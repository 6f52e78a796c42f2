"""The same mistakes in Triton kernels, which the reference's tests do not look at."""

from __future__ import annotations

from .mutant import TRITON, Mutant

KV = "tests/test_kv_cache.py::test_pitfall_"
COMPRESSOR = "tests/test_compressor.py::test_pitfall_"
INDEXER = "tests/test_indexer.py::test_pitfall_"
ROUTER = "tests/test_router.py::test_pitfall_"
SWIGLU = "tests/test_swiglu.py::test_pitfall_9_against_float64"
ATTENTION = "tests/test_attention_kernels.py::"
SHOWN = "shown = tl.minimum(tl.load(visible + token), capacity).to(tl.int32)"
LENGTH = "    length = tl.load(cu + b + 1).to(tl.int64) - first\n"

MUTANTS = (
    Mutant(
        "pitfall 9",
        "a kernel that clamps the gate from below, too",
        TRITON + "swiglu.py",
        "        gate = tl.minimum(gate, limit)\n",
        "        gate = tl.minimum(tl.maximum(gate, -limit), limit)\n",
        SWIGLU,
    ),
    Mutant(
        "pitfall 9",
        "a kernel that clamps up from above alone",
        TRITON + "swiglu.py",
        "up = tl.minimum(tl.maximum(up, -limit), limit)",
        "up = tl.minimum(up, limit)",
        SWIGLU,
    ),
    Mutant(
        "pitfall 10",
        "a kernel whose softplus overflows",
        TRITON + "router.py",
        "soft = _log1p(_exp_of_minus(tl.abs(logit))) + tl.maximum(logit, 0.0)",
        "soft = tl.log(1.0 + tl.exp(logit))",
        ROUTER + "10_scores_are_stable_from_minus_1000_to_1000",
    ),
    Mutant(
        "pitfall 11",
        "a kernel without the root",
        TRITON + "router.py",
        '    return tl.where(logit != logit, float("nan"), root)',
        '    return tl.where(logit != logit, float("nan"), root * root)',
        "tests/test_router.py::test_bias_is_for_the_selection_alone",
    ),
    Mutant(
        "pitfall 11",
        "a kernel whose bias weighs, too",
        TRITON + "router.py",
        "bits = tl.where(inside, scores, 0.0).to(tl.int32, bitcast=True)",
        "bits = tl.where(inside, tl.maximum(biased, 0.0), 0.0).to(tl.int32, bitcast=True)",
        "tests/test_router.py::test_bias_is_for_the_selection_alone",
    ),
    Mutant(
        "pitfall 13",
        "a kernel that shows an entry too few",
        TRITON + "_lib/topk.py",
        SHOWN,
        SHOWN + " - 1",
        INDEXER + "13_a_decode_step_sees_every_entry",
    ),
    Mutant(
        "pitfall 16",
        "a kernel that takes a padded length",
        TRITON + "compressor.py",
        LENGTH,
        LENGTH + "    length = (length + 3) // 4 * 4\n",
        COMPRESSOR + "16_true_lengths",
    ),
    Mutant(
        "pitfall 17",
        "a kernel whose codes run over the RoPE dims",
        TRITON + "_lib/cache_entries.py",
        "tl.store(address, codes, mask=written & (column < NOPE))",
        "tl.store(address, codes, mask=written & (column < NOPE + 1))",
        KV + "17_rope_dims_hold_one_value",
    ),
    Mutant(
        "pitfall 20",
        "a kernel that attends to slot -1",
        TRITON + "attention.py",
        'logits = tl.where((slot >= 0)[None, :], logits, float("-inf"))',
        'logits = tl.where((slot >= -1)[None, :], logits, float("-inf"))',
        ATTENTION + "test_equals_a_softmax",
    ),
    Mutant(
        "pitfall 20",
        "a kernel that writes slot -1",
        TRITON + "_lib/cache_entries.py",
        "written = (slots >= 0)[:, None]\n    column = tl.arange(0, BLOCK)[None, :]\n    if data",
        "slots = tl.maximum(slots, 0)\n    written = (slots >= 0)[:, None]\n"
        "    column = tl.arange(0, BLOCK)[None, :]\n    if data",
        KV + "20_slot_minus_one_changes_nothing",
    ),
    Mutant(
        "pitfall 22",
        "a kernel that shows one entry at least",
        TRITON + "_lib/topk.py",
        SHOWN,
        "shown = tl.maximum(tl.minimum(tl.load(visible + token), capacity), 1).to(tl.int32)",
        INDEXER + "22_nothing_visible",
    ),
)
