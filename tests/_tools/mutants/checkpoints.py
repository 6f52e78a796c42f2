"""Mutants in reading and writing what other tools read and write."""

from __future__ import annotations

from .mutant import Mutant

TESTS = "tests/checkpoint/test_"
TIED = TESTS + "pairs.py::test_an_engine_that_takes_the_scale_of_w1_for_both_reads_the_same"
TWICE = TESTS + "names.py::test_two_spellings_of_one_tensor_are_an_error_that_names_both"
NARROW = TESTS + "drafts.py::test_narrow_fp8_block_scales_multiply_exactly"
SINKS = TESTS + "drafts.py::test_sinks_of_nan_and_infinity_are_refused"
TOOLS = TESTS + "tools.py::test_weights_are_bitwise_what_the_tool_dequantises"

MUTANTS = (
    Mutant(
        "checkpoint",
        "quantised gate and up keep different global scales",
        "dsv4.checkpoint.pairs:Pairing._values",
        "tied = tie(first.with_layout('linear'), second.with_layout('linear'))\n"
        "if tied is None:\n"
        "    self.untied.append(gate[0])\n"
        "    return (first, second)",
        "tied = tie(first.with_layout('linear'), second.with_layout('linear'))\n"
        "tied = None\n"
        "if tied is None:\n"
        "    self.untied.append(gate[0])\n"
        "    return (first, second)",
        TIED,
    ),
    Mutant(
        "checkpoint",
        "plain gate and up are quantised apart",
        "dsv4.checkpoint.pairs:Pairing._values",
        "formats == {NVFP4}",
        "not formats",
        TIED,
    ),
    Mutant(
        "checkpoint",
        "the common global scale with the old block scales",
        "dsv4.checkpoint.pairs:_encoded",
        "own == common",
        "own",
        TESTS + "pairs.py::test_scales_a_power_of_two_apart_are_tied_exactly",
    ),
    Mutant(
        "checkpoint",
        "block scales rounded for a common global scale",
        "dsv4.checkpoint.pairs:_encoded",
        "coded.double() * common == scales",
        "coded.double() * common > 0.9 * scales",
        TESTS + "pairs.py::test_what_is_tied_keeps_every_value",
    ),
    Mutant(
        "checkpoint",
        "different global scales are not said",
        "dsv4.checkpoint.pairs:Pairing._values",
        "self.untied.append(gate[0])",
        "pass",
        TESTS + "pairs.py::test_pairs_that_cannot_be_tied_keep_their_values_and_it_is_said",
    ),
    Mutant(
        "checkpoint",
        "BF16 block scales rounded to powers of two",
        "dsv4.checkpoint.entries:Entry.read",
        "scales.float",
        "scales.float().log2().round().exp2",
        NARROW,
    ),
    Mutant(
        "checkpoint",
        "BF16 block scales are not known",
        "dsv4.checkpoint.entries:_format",
        "(*FP8_BLOCK.scale_dtypes, *_WIDENED)",
        "FP8_BLOCK.scale_dtypes",
        TOOLS,
    ),
    Mutant(
        "checkpoint",
        "the later of two spellings wins",
        "dsv4.checkpoint.entries:group",
        "if other is not info:\n"
        "    text = f'{other} and {info} are both {_logical(canonical, last)}, wanted one "
        "of them'\n"
        "    problems.append(Problem('in two spellings', text))",
        "parts[canonical][last] = info\n"
        "if other is None:\n"
        "    text = f'{other} and {info} are both {_logical(canonical, last)}, wanted one "
        "of them'\n"
        "    problems.append(Problem('in two spellings', text))",
        TWICE,
    ),
    Mutant(
        "checkpoint",
        "sinks may hold anything",
        "dsv4.checkpoint.entries:Entry._check_plain",
        "bad = ~torch.isfinite(values)",
        "if self.name.endswith('.sinks'):\n    return\nbad = ~torch.isfinite(values)",
        SINKS,
    ),
    Mutant(
        "checkpoint",
        "the gate projection of late linear experts is not known",
        "dsv4.checkpoint.names:",
        "{**_EXPERT, 'wgate': 'gate_proj'}",
        "_EXPERT",
        TOOLS,
    ),
    Mutant(
        "checkpoint",
        "input_scale_2 of Quark is not read",
        "dsv4.checkpoint.entries:_input_scale",
        "names_of = ('input_global_scale',) if packed else ('input_scale', 'input_scale_2')\n"
        "input_scales = [parts[last] for last in _INPUT_SCALES if last in parts]",
        "names_of = ('input_global_scale',) if packed else ('input_scale', 'input_scale_2')\n"
        "parts = {k: v for k, v in parts.items() if k != 'input_scale_2'}\n"
        "input_scales = [parts[last] for last in _INPUT_SCALES if last in parts]",
        TESTS + "tools.py::test_input_scale_2_of_quark_is_an_input_scale",
    ),
    Mutant(
        "checkpoint",
        "a DSpark head is taken for MTP layers",
        "dsv4.checkpoint.reader:Checkpoint.mtp_layers",
        "0 if self.has_dspark else len(self._draft_layers())",
        "len(self._draft_layers())",
        TESTS + "dspark.py::test_inspect_says_what_the_draft_is",
    ),
    Mutant(
        "checkpoint",
        "what is left out is not said",
        "dsv4.checkpoint.report:left_out",
        "_logger.warning",
        "_logger.debug",
        TESTS + "tools.py::test_scales_of_a_kv_cache_are_accepted_and_it_is_said",
    ),
)
