"""Break the code once for every known way of getting it wrong, and watch a test fail.

``python -m tests.traps [T9 ...]`` copies the package and the tests, applies one mutant at a time
and runs the test that must catch it. A mutant that survives is a hole in the tests. The numbers are
those of the specification's list of traps (section 15; D2 is in section 1).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIRED = tuple([f"T{n}" for n in (*range(1, 15), 19, *range(25, 34), 35, 41)])


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        trap: Its number in the specification.
        what: The mistake in words.
        file: Where it is made.
        old: Text that stands exactly once in the file.
        new: What the mistake makes of it.
        test: The test that must fail.
    """

    trap: str
    what: str
    file: str
    old: str
    new: str
    test: str


REFERENCE = "dsv4/reference/"
FORMULA = "tests/test_layers.py::test_trap_t1_t2_t3_t4_t5_t6_t13_t14_attention_is_its_formula"
ATTENTION = "tests/test_attention.py::test_trap_"
HYPER = "tests/test_hyper_connection.py::test_trap_t8_pre_against_explicit_loops"
SWIGLU = "tests/test_swiglu.py::test_trap_t9_by_hand"
ROUTER = "tests/test_router.py::test_trap_"
KV = "tests/test_kv_cache.py::test_trap_"
QUANTISED = "tests/test_quantized_layers.py::test_trap_"
FORMATS = "tests/test_formats.py::TestTraps::test_trap_"
ZERO_BLOCKS = (
    "tests/test_quantize.py::TestNvfp4::test_trap_t30_zero_blocks_and_the_ends_of_the_range"
)
DAMAGE = "tests/test_checkpoint_damage.py"
PRODUCERS = "tests/test_checkpoint_producers.py::"

MUTANTS = (
    Mutant(
        "D2",
        "a file without a schedule is not refused",
        "dsv4/_config_file.py",
        '        (("compress_ratios", "layer_types"), "there is no default layer schedule"),\n',
        "",
        "tests/test_config.py::test_a_wrong_file_is_refused_by_name",
    ),
    Mutant(
        "T1",
        "one table for all layer types",
        "dsv4/config.py",
        "return self.rope_compress if self.compress_rate(layer_idx) else self.rope_main",
        "return self.rope_main",
        "tests/test_rope.py::test_trap_t1_base_and_yarn_belong_to_the_layer_type",
    ),
    Mutant(
        "T1",
        "compressed layers rotate q and kv by the main table",
        "dsv4/layers/attention.py",
        '"compress" if config.compress_rate(layer_idx) else "main"',
        '"main"',
        FORMULA,
    ),
    Mutant(
        "T1",
        "compressors rotate entries by the main table",
        "dsv4/layers/_pooling.py",
        'rope_layer_type = "compress"',
        'rope_layer_type = "main"',
        FORMULA,
    ),
    Mutant(
        "T2",
        "YaRN's amplitude on cos and sin",
        "dsv4/ops/rope.py",
        "return angles.cos(), angles.sin()",
        "return 1.2773 * angles.cos(), 1.2773 * angles.sin()",
        "tests/test_rope.py::test_trap_t2_tables_have_no_amplitude",
    ),
    Mutant(
        "T2",
        "YaRN's amplitude in the softmax scale",
        "dsv4/layers/attention.py",
        "self.scaling = config.head_dim**-0.5",
        "self.scaling = config.head_dim**-0.5 * 1.2773**2",
        FORMULA,
    ),
    Mutant(
        "T3",
        "entries rotated at their number",
        "dsv4/layers/_pooling.py",
        "positions = first + self.compress_rate * torch.arange(windows, device=kv.device)",
        "positions = first + torch.arange(windows, device=kv.device)",
        FORMULA,
    ),
    Mutant(
        "T3",
        "entries rotated at their last token",
        REFERENCE + "compressor.py",
        "torch.where(used, window * ratio, -1)",
        "torch.where(used, window * ratio + ratio - 1, -1)",
        "tests/test_compressor.py::test_trap_t3_position_is_the_first_token_of_the_window",
    ),
    Mutant(
        "T4",
        "no inverse rotation of the output",
        "dsv4/layers/attention.py",
        "        out = rope(out, cos.unsqueeze(-2), sin.unsqueeze(-2), inverse=True)\n",
        "",
        FORMULA,
    ),
    Mutant(
        "T4",
        "the inverse negates the cosine",
        REFERENCE + "rope.py",
        "        sin = -sin\n",
        "        cos = -cos\n",
        "tests/test_rope.py::test_trap_t4_the_inverse_turns_by_the_opposite_angle",
    ),
    Mutant(
        "T5",
        "split halves instead of pairs",
        REFERENCE + "rope.py",
        "even, odd = x[..., kept:].to(wide).unflatten(-1, (-1, 2)).unbind(-1)",
        "even, odd = x[..., kept:].to(wide).chunk(2, -1)",
        "tests/test_rope.py::test_trap_t5_last_dims_in_interleaved_pairs",
    ),
    Mutant(
        "T6",
        "no norm per head",
        "dsv4/layers/attention.py",
        "self.q_b_norm(self.q_b_proj(q_residual).unflatten(-1, (self.num_heads, self.head_dim)))",
        "self.q_b_proj(q_residual).unflatten(-1, (self.num_heads, self.head_dim))",
        FORMULA,
    ),
    Mutant(
        "T6",
        "two weighted norms on the q path",
        "dsv4/layers/attention.py",
        "q_residual = self.q_a_norm(q_a)",
        "q_residual = self.q_a_norm(self.q_a_norm(q_a))",
        FORMULA,
    ),
    Mutant(
        "T7",
        "comb not transposed",
        REFERENCE + "hyper_connection.py",
        "comb.to(wide).transpose(-1, -2) @ streams.to(wide)",
        "comb.to(wide) @ streams.to(wide)",
        "tests/test_hyper_connection.py::test_trap_t7_post_against_explicit_loops",
    ),
    Mutant(
        "T7",
        "comb not transposed, seen at the layer",
        REFERENCE + "hyper_connection.py",
        "comb.to(wide).transpose(-1, -2) @ streams.to(wide)",
        "comb.to(wide) @ streams.to(wide)",
        "tests/test_layers.py::test_trap_t7_the_layer_mixes_streams_by_the_transpose",
    ),
    Mutant(
        "T8",
        "exponential instead of softmax",
        REFERENCE + "hyper_connection.py",
        "comb = logits.softmax(-1) + eps",
        "comb = logits.exp() + eps",
        HYPER,
    ),
    Mutant(
        "T8",
        "no eps after the softmax",
        REFERENCE + "hyper_connection.py",
        "comb = logits.softmax(-1) + eps",
        "comb = logits.softmax(-1)",
        HYPER,
    ),
    Mutant(
        "T8",
        "one iteration more",
        REFERENCE + "hyper_connection.py",
        "for _ in range(iterations - 1):",
        "for _ in range(iterations):",
        HYPER,
    ),
    Mutant(
        "T8",
        "softmax over columns",
        REFERENCE + "hyper_connection.py",
        "comb = logits.softmax(-1) + eps",
        "comb = logits.softmax(-2) + eps",
        HYPER,
    ),
    Mutant(
        "T8",
        "no eps on pre",
        REFERENCE + "hyper_connection.py",
        "torch.sigmoid(mixes[..., :n] * scale[0] + base[:n]) + hc_eps",
        "torch.sigmoid(mixes[..., :n] * scale[0] + base[:n])",
        HYPER,
    ),
    Mutant(
        "T8",
        "post without its factor 2",
        REFERENCE + "hyper_connection.py",
        "post = 2 * torch.sigmoid",
        "post = torch.sigmoid",
        HYPER,
    ),
    Mutant(
        "T9",
        "gate clamped below as well",
        REFERENCE + "swiglu.py",
        "gate.clamp(max=limit)",
        "gate.clamp(-limit, limit)",
        SWIGLU,
    ),
    Mutant(
        "T9",
        "gate not clamped",
        REFERENCE + "swiglu.py",
        "gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)",
        "up = up.clamp(-limit, limit)",
        SWIGLU,
    ),
    Mutant(
        "T9",
        "up clamped above only",
        REFERENCE + "swiglu.py",
        "up.clamp(-limit, limit)",
        "up.clamp(max=limit)",
        SWIGLU,
    ),
    Mutant(
        "T9",
        "clamp after SiLU",
        REFERENCE + "swiglu.py",
        "out = torch.nn.functional.silu(gate) * up",
        "out = torch.nn.functional.silu(wide.chunk(2, -1)[0]).clamp(max=limit) * up",
        SWIGLU,
    ),
    Mutant(
        "T9",
        "the shared expert does not clamp",
        "dsv4/layers/mlp.py",
        "swiglu(gate_up, self.limit)",
        "swiglu(gate_up, None)",
        "tests/test_layers.py::test_trap_t9_the_shared_expert_clamps_too",
    ),
    Mutant(
        "T10",
        "log(1 + exp(x)) in float32",
        REFERENCE + "router.py",
        "(torch.log1p(torch.exp(-logits.abs())) + logits.clamp(min=0)).sqrt()",
        "torch.log(1 + torch.exp(logits)).sqrt()",
        ROUTER + "t10_scores_are_stable_from_minus_1000_to_1000",
    ),
    Mutant(
        "T10",
        "no floor under the sum",
        REFERENCE + "router.py",
        "_SUM_FLOOR = 1e-20",
        "_SUM_FLOOR = 0.0",
        ROUTER + "t10_by_hand",
    ),
    Mutant(
        "T11",
        "sigmoid scores",
        REFERENCE + "router.py",
        "(torch.log1p(torch.exp(-logits.abs())) + logits.clamp(min=0)).sqrt()",
        "logits.sigmoid()",
        ROUTER + "t11_other_scorings_choose_other_experts",
    ),
    Mutant(
        "T11",
        "softmax scores",
        REFERENCE + "router.py",
        "(torch.log1p(torch.exp(-logits.abs())) + logits.clamp(min=0)).sqrt()",
        "logits.softmax(-1)",
        ROUTER + "t11_other_scorings_choose_other_experts",
    ),
    Mutant(
        "T12",
        "hash layers choose by score",
        REFERENCE + "router.py",
        "    weights = _weights(scores, ids, scaling_factor)\n    return logits, _poison(weights, "
        "logits.isfinite().all(-1) & known), ids",
        "    ids = scores.topk(ids.shape[-1]).indices\n"
        "    weights = _weights(scores, ids, scaling_factor)\n    return logits, _poison(weights, "
        "logits.isfinite().all(-1) & known), ids",
        ROUTER + "t12_experts_by_token_id_weights_by_score",
    ),
    Mutant(
        "T12",
        "missing token ids taken for token 0",
        "dsv4/layers/router.py",
        "        if input_ids is None:\n",
        "        if input_ids is None:\n"
        "            input_ids = torch.zeros(flat.shape[0], dtype=torch.long)\n"
        "        if input_ids is None:\n",
        "tests/test_layers.py::test_trap_t12_hash_layers_need_token_ids",
    ),
    Mutant(
        "T13",
        "a token does not see the entry it closes",
        "dsv4/layers/_pooling.py",
        "return (position_ids + 1).div(",
        "return position_ids.div(",
        FORMULA,
    ),
    Mutant(
        "T13",
        "mask of the wrong polarity in the indexer",
        REFERENCE + "indexer.py",
        "torch.where(seen, scores, -torch.inf)",
        "torch.where(~seen, scores, -torch.inf)",
        "tests/test_indexer.py::test_trap_t13_a_decode_step_sees_every_entry",
    ),
    Mutant(
        "T13",
        "a lone token drops the compressed entries",
        REFERENCE + "attention.py",
        "if compressed is not None and compressed_slots is not None:",
        "if compressed is not None and compressed_slots is not None and tokens > 1:",
        ATTENTION + "t13_one_token_alone_sees_what_it_sees_in_a_batch",
    ),
    Mutant(
        "T13",
        "the prefix is one entry short",
        "dsv4/cache.py",
        "torch.where(entry < visible.unsqueeze(-1), entry, -1)",
        "torch.where(entry < visible.unsqueeze(-1) - 1, entry, -1)",
        "tests/test_cache.py::test_trap_t13_any_chunking_sees_what_the_specification_says",
    ),
    Mutant(
        "T14",
        "sink scaled",
        REFERENCE + "attention.py",
        "sink = sink.view(1, -1, 1)",
        "sink = sink.view(1, -1, 1) * scale",
        ATTENTION + "t14_the_sink_is_not_scaled",
    ),
    Mutant(
        "T14",
        "no sink",
        REFERENCE + "attention.py",
        " + torch.exp(sink - top)",
        "",
        ATTENTION + "t14_the_sink_is_in_the_denominator_only",
    ),
    Mutant(
        "T14",
        "sink in the numerator",
        REFERENCE + "attention.py",
        "weights @ kv / total",
        "(weights @ kv + torch.exp(sink - top)) / total",
        ATTENTION + "t14_the_sink_is_in_the_denominator_only",
    ),
    Mutant(
        "T14",
        "one sink for all heads",
        REFERENCE + "attention.py",
        "sink = sink.view(1, -1, 1)",
        "sink = sink.mean().expand(q.shape[1]).reshape(1, -1, 1)",
        ATTENTION + "t14_one_sink_per_head",
    ),
    Mutant(
        "T14",
        "no sink at the layer",
        "dsv4/layers/attention.py",
        "            slots,\n            self.sinks,\n",
        "            slots,\n            self.sinks - torch.inf,\n",
        FORMULA,
    ),
    Mutant(
        "T16",
        "padded length taken for the true one",
        REFERENCE + "compressor.py",
        "end=starts + cu.diff()",
        "end=starts + (cu.diff() + ape.shape[0] - 1) // ape.shape[0] * ape.shape[0]",
        "tests/test_compressor.py::test_trap_t16_true_lengths",
    ),
    Mutant(
        "T17",
        "RoPE dims through FP8",
        REFERENCE + "kv_cache.py",
        "_bfloat16(rope).contiguous()",
        "_bfloat16(rope.to(torch.float8_e4m3fn)).contiguous()",
        KV + "t17_rope_dims_hold_one_value",
    ),
    Mutant(
        "T19",
        "rows of 584 bytes",
        "dsv4/pages.py",
        "return page_size * self.data_bytes + entry * self.scale_bytes",
        "return entry * 584 + 576",
        KV + "t19_page_geometry",
    ),
    Mutant(
        "T19",
        "scales beside their entry",
        REFERENCE + "kv_cache.py",
        "after_data + entry.unsqueeze(-1) * layout.scale_bytes + scale",
        "(entry.unsqueeze(-1) + 1) * layout.data_bytes + scale",
        KV + "t19_scales_after_all_data_of_the_page",
    ),
    Mutant(
        "T19",
        "pages not padded",
        "dsv4/pages.py",
        "return -(-used // self.data_bytes) * self.data_bytes",
        "return used",
        KV + "t19_page_geometry",
    ),
    Mutant(
        "T19",
        "byte offsets of 32 bits",
        REFERENCE + "kv_cache.py",
        "    return page.unsqueeze(-1), column",
        "    width = layout.page_bytes(page_size)\n"
        "    flat = (page.unsqueeze(-1) * width + column).to(torch.int32).long()\n"
        "    return flat // width, flat % width",
        KV + "t19_offsets_past_two_gigabytes",
    ),
    Mutant(
        "T20",
        "slot -1 writes the last entry",
        REFERENCE + "_scatter.py",
        "    keep = index >= 0\n",
        "    keep = index >= -1\n",
        KV + "t20_slot_minus_one_changes_nothing",
    ),
    Mutant(
        "T21",
        "everything selected without scoring",
        REFERENCE + "indexer.py",
        "    wide = compute_dtype(q, weights)\n",
        "    wide = compute_dtype(q, weights)\n    if k == capacity:\n"
        "        e = torch.arange(k, device=q.device)\n"
        "        return torch.where(e < visible.unsqueeze(-1), e, -1)\n",
        "tests/test_indexer.py::test_trap_t21_selecting_all_still_scores",
    ),
    Mutant(
        "T22",
        "at least one entry visible",
        REFERENCE + "indexer.py",
        "out[part] = torch.where(ids < visible[part].unsqueeze(-1), ids, -1)",
        "out[part] = torch.where(ids < visible[part].clamp(min=1).unsqueeze(-1), ids, -1)",
        "tests/test_indexer.py::test_trap_t22_nothing_visible",
    ),
    Mutant(
        "T25",
        "compressed-tensors' scale not inverted",
        "dsv4/formats.py",
        "return (scale if scale.dim() else scale.reshape(1)).reciprocal()",
        "return scale if scale.dim() else scale.reshape(1)",
        FORMATS + "t25_compressed_tensors_scale_is_a_reciprocal",
    ),
    Mutant(
        "T26",
        "a missing input_scale is not noticed",
        "dsv4/_checkpoint/slots.py",
        "if entry.format == NVFP4 and entry.input_scale is None:",
        "if False:",
        DAMAGE,
    ),
    Mutant(
        "T27",
        "fused parts take the smaller input scale",
        "dsv4/layers/linear.py",
        "torch.cat(known).amax(0, keepdim=True)",
        "torch.cat(known).amin(0, keepdim=True)",
        QUANTISED + "t27_fused_parts_take_the_larger_input_scale",
    ),
    Mutant(
        "T27",
        "a dynamic scale that is not the row's own",
        REFERENCE + "quantize.py",
        'scaling = "token" if input_scale is None else "static"',
        'scaling = "tensor" if input_scale is None else "static"',
        "tests/test_quantized_layers.py::test_nvfp4_activations_are_quantised_before_the_product",
    ),
    Mutant(
        "T28",
        "one global scale for a fused matrix",
        "dsv4/layers/linear.py",
        "    weight = cat_rows([layer.quantized_weight() for layer in layers])\n",
        "    weight = cat_rows([layer.quantized_weight() for layer in layers])\n"
        "    weight = QuantizedTensor(weight.codes, weight.scales, "
        "weight.global_scale.amax(0, keepdim=True), weight.format)\n",
        QUANTISED + "t28_fused_parts_keep_their_own_global_scale",
    ),
    Mutant(
        "T28",
        "one global scale in the product",
        REFERENCE + "gemm.py",
        "row = formats.expand_segments(global_scale, segments, codes.shape[0]).to(compute)",
        "row = global_scale.amax().expand(codes.shape[0]).to(compute)",
        "tests/test_gemm.py::TestTraps::test_trap_t28_a_fused_matrix_keeps_both_global_scales",
    ),
    Mutant(
        "T28",
        "one global scale for gate and up",
        REFERENCE + "grouped_gemm.py",
        "row = formats.expand_segments(global_scale[expert], segments, weight.shape[1])",
        "row = global_scale[expert].amax().expand(weight.shape[1])",
        "tests/test_grouped_gemm.py::TestValues::test_trap_t28_gate_and_up_keep_their_global_scales",
    ),
    Mutant(
        "T29",
        "global scale folded into E4M3 block scales",
        REFERENCE + "gemm.py",
        "    weight = operand(codes, scales, format, layout, compute)\n    row = None\n",
        "    if global_scale is not None and scales.dtype == torch.float8_e4m3fn:\n"
        "        fold = global_scale.amax()\n"
        "        scales = (scales.float() * fold).to(torch.float8_e4m3fn)\n"
        "        global_scale = global_scale / fold\n"
        "    weight = operand(codes, scales, format, layout, compute)\n    row = None\n",
        "tests/test_gemm.py::TestTraps::test_trap_t29_the_global_scale_multiplies_the_sum",
    ),
    Mutant(
        "T30",
        "block scales not clamped above",
        "dsv4/elements.py",
        "return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)",
        "return torch.where(values.abs() > 464, torch.nan, values).to(torch.float8_e4m3fn)",
        ZERO_BLOCKS,
    ),
    Mutant(
        "T30",
        "division by a block scale of zero",
        REFERENCE + "quantize.py",
        "codes = torch.where((usable & (product > 0))[..., None], codes, 0)",
        "codes = torch.where(usable[..., None], codes, 0)",
        ZERO_BLOCKS,
    ),
    Mutant(
        "T30",
        "converted block scales not clamped",
        "dsv4/elements.py",
        "block_scale = _power_of_two(relative.clamp(-9, 8))",
        "block_scale = _power_of_two(relative.clamp(-100, 100))",
        "tests/test_formats.py::TestMxfp4ToNvfp4::test_trap_t30_block_scales_stay_inside_e4m3",
    ),
    Mutant(
        "T31",
        "padding of swizzled scales not written",
        "dsv4/scales.py",
        "padded = torch.zeros((*batch, high * 128, wide * 4), dtype=torch.uint8, "
        "device=scales.device)",
        "padded = torch.full((*batch, high * 128, wide * 4), 0x7F, dtype=torch.uint8)",
        "tests/test_formats.py::TestScales::test_trap_t31_padding_of_swizzled_scales_is_written",
    ),
    Mutant(
        "T32",
        "clamp on products without their global scale",
        "dsv4/layers/experts.py",
        "swiglu(gate_up, self.limit, out_dtype",
        "swiglu(gate_up, self.limit * float(self.gate_up_proj_scale_2.amax()), out_dtype",
        QUANTISED + "t32_the_clamp_acts_on_real_values",
    ),
    Mutant(
        "T32",
        "the clamp is dropped",
        "dsv4/layers/experts.py",
        "swiglu(gate_up, self.limit, out_dtype",
        "swiglu(gate_up, None, out_dtype",
        QUANTISED + "t32_the_clamp_acts_on_real_values",
    ),
    Mutant(
        "T33",
        "E8M0 scales cast by value",
        "dsv4/scales.py",
        "    byte = scales.contiguous().view(torch.uint8).to(torch.int32)\n    bits =",
        "    byte = scales.float().to(torch.uint8).to(torch.int32)\n    bits =",
        "tests/test_formats.py::TestScales::test_trap_t33_e8m0_moves_by_view_not_by_value",
    ),
    Mutant(
        "T33",
        "experts' E8M0 scales copied by value",
        "dsv4/layers/experts.py",
        "return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor",
        "return tensor.to(torch.uint8) if tensor.element_size() == 1 else tensor",
        "tests/test_quantized_layers.py::test_stacking_expert_by_expert_copies_bits",
    ),
    Mutant(
        "T35",
        "high nibble first",
        "dsv4/elements.py",
        "return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)",
        "return torch.stack((packed >> 4, packed & 15), -1).flatten(-2)",
        FORMATS + "t35_bytes_are_uint8_row_major_with_untransposed_scales",
    ),
    Mutant(
        "T36",
        "MTP tensors left out on writing",
        "dsv4/checkpoint.py",
        "    for slot in slots_of(model):\n",
        "    for slot in slots_of(model):\n"
        "        if slot.name.startswith('mtp.'):\n            continue\n",
        "tests/test_checkpoint.py::test_mtp_is_not_dropped",
    ),
    Mutant(
        "T41",
        "ape row by token of the chunk",
        REFERENCE + "compressor.py",
        "(starts[b] + index - cu[b]) % ape.shape[0]",
        "(index - cu[b]) % ape.shape[0]",
        "tests/test_compressor.py::"
        "test_trap_t41_ape_row_is_the_position_and_the_first_columns_are_the_overlap_half",
    ),
    Mutant(
        "T41",
        "halves of ape swapped in memory",
        REFERENCE + "compressor.py",
        "score = score.to(state.dtype) + ape.to(state.dtype)[phase]",
        "score = score.to(state.dtype) + ape.roll(ape.shape[1] // 2, 1).to(state.dtype)[phase]",
        "tests/test_compressor.py::"
        "test_trap_t41_ape_row_is_the_position_and_the_first_columns_are_the_overlap_half",
    ),
)


def watch(mutant: Mutant) -> bool:
    """Whether the test fails with the mistake, having passed without it in the same copy."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("dsv4", "tests"):
            ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, copy)
        passed = _run(mutant.test, copy)
        assert passed == 0, f"{mutant.test} fails on the unbroken code (exit code {passed})"
        file = copy / mutant.file
        text = file.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.what}: its text is not there once"
        file.write_text(text.replace(mutant.old, mutant.new))
        return _run(mutant.test, copy) == 1  # 1: tests ran and failed; not 2 to 5


def _run(test: str, folder: Path) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(folder),
        "HYPOTHESIS_PROFILE": "ci",
    }
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode


def main(wanted: list[str]) -> int:
    """Watch the mutants of the wanted traps, all by default; 1 if one survives."""
    chosen = [m for m in MUTANTS if not wanted or m.trap in wanted]
    survivors = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, killed in zip(chosen, pool.map(watch, chosen), strict=True):
            survivors += not killed
            state = "killed  " if killed else "SURVIVED"
            print(f"{mutant.trap:4} {state} {mutant.what}: {mutant.test}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mistakes are caught")
    return int(survivors > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
