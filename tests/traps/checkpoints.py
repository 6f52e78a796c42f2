"""Mistakes in reading and writing what other tools read and write."""

from __future__ import annotations

from .mutant import Mutant

ENTRIES = "dsv4/checkpoint/entries.py"
NAMES = "dsv4/checkpoint/names.py"
PAIRS = "dsv4/checkpoint/pairs.py"
REPORT = "dsv4/checkpoint/report.py"
TESTS = "tests/test_checkpoint_"
TIED = TESTS + "pairs.py::test_an_engine_that_takes_the_scale_of_w1_for_both_reads_the_same"
TWICE = TESTS + "names.py::test_two_spellings_of_one_tensor_are_an_error_that_names_both"
NARROW = TESTS + "drafts.py::test_narrow_fp8_block_scales_multiply_exactly"
SINKS = TESTS + "drafts.py::test_sinks_of_nan_and_infinity_are_refused"
TOOLS = TESTS + "tools.py::test_weights_are_bitwise_what_the_tool_dequantises"

MUTANTS = (
    Mutant(
        "checkpoint",
        "quantised gate and up keep different global scales",
        PAIRS,
        "        if tied is None:\n",
        "        tied = None\n        if tied is None:\n",
        TIED,
    ),
    Mutant(
        "checkpoint",
        "plain gate and up are quantised apart",
        PAIRS,
        "if plain and formats == {NVFP4}:",
        "if plain and not formats:",
        TIED,
    ),
    Mutant(
        "checkpoint",
        "the common global scale with the old block scales",
        PAIRS,
        "    if own == common:\n",
        "    if own:\n",
        TESTS + "pairs.py::test_scales_a_power_of_two_apart_are_tied_exactly",
    ),
    Mutant(
        "checkpoint",
        "block scales rounded for a common global scale",
        PAIRS,
        "same = coded.double() * common == scales",
        "same = coded.double() * common > 0.9 * scales",
        TESTS + "pairs.py::test_what_is_tied_keeps_every_value",
    ),
    Mutant(
        "checkpoint",
        "different global scales are not said",
        PAIRS,
        "self.untied.append(gate[0])",
        "pass",
        TESTS + "pairs.py::test_pairs_that_cannot_be_tied_keep_their_values_and_it_is_said",
    ),
    Mutant(
        "checkpoint",
        "BF16 block scales rounded to powers of two",
        ENTRIES,
        "            scales = scales.float()\n",
        "            scales = scales.float().log2().round().exp2()\n",
        NARROW,
    ),
    Mutant(
        "checkpoint",
        "BF16 block scales are not known",
        ENTRIES,
        "fp8_scales = (*FP8_BLOCK.scale_dtypes, *_WIDENED)",
        "fp8_scales = FP8_BLOCK.scale_dtypes",
        TOOLS,
    ),
    Mutant(
        "checkpoint",
        "the later of two spellings wins",
        ENTRIES,
        "        if other is not info:\n",
        "        parts[canonical][last] = info\n        if other is None:\n",
        TWICE,
    ),
    Mutant(
        "checkpoint",
        "sinks may hold anything",
        ENTRIES,
        '        if not (lowest and high < float("inf")):\n            bad',
        '        if not (lowest and high < float("inf")):\n'
        "            if self.name.endswith('.sinks'):\n                return\n            bad",
        SINKS,
    ),
    Mutant(
        "checkpoint",
        "the gate projection of late linear experts is not known",
        NAMES,
        '_MLP = {**_EXPERT, "wgate": "gate_proj"}',
        "_MLP = _EXPERT",
        TOOLS,
    ),
    Mutant(
        "checkpoint",
        "input_scale_2 of Quark is not read",
        ENTRIES,
        'else ("input_scale", "input_scale_2")',
        'else ("input_scale", "input_scale_2")\n    parts = {k: v for k, v in parts.items() '
        'if k != "input_scale_2"}',
        TESTS + "tools.py::test_input_scale_2_of_quark_is_an_input_scale",
    ),
    Mutant(
        "checkpoint",
        "a DSpark head is taken for MTP layers",
        "dsv4/checkpoint/reader.py",
        "return 0 if self.has_dspark else len(self._draft_layers())",
        "return len(self._draft_layers())",
        TESTS + "drafts.py::test_the_main_model_of_a_dspark_checkpoint_loads_and_it_is_said",
    ),
    Mutant(
        "checkpoint",
        "what is left out is not said",
        REPORT,
        '_logger.warning("%s: %d tensors left out',
        '_logger.debug("%s: %d tensors left out',
        TESTS + "tools.py::test_scales_of_a_kv_cache_are_accepted_and_it_is_said",
    ),
)
