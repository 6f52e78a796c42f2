"""Mutants in NVFP4, its scales, fused matrices and checkpoints."""

from __future__ import annotations

from .mutant import LAYERS, REFERENCE, Mutant

QUANTISED = "tests/layers/test_quantized_layers.py::"
PACKED = "tests/layers/test_packed_layers.py::TestFusedWeights::"
FORMATS = "tests/quant/test_formats.py::"
FORMAT_PITFALLS = FORMATS + "TestPitfalls::test_pitfall_"
GEMM = "tests/ops/test_gemm.py::TestPitfalls::test_pitfall_"
GROUPED = "tests/ops/test_grouped_gemm.py::TestValues::"
NVFP4 = "tests/ops/test_quantize.py::TestNvfp4::"
ZERO_BLOCKS = NVFP4 + "test_pitfall_30_zero_blocks_and_the_ends_of_the_range"
SWIZZLE = FORMATS + "TestScales::"
EXPERT_SCALES = "tests/ops/test_expert_scales.py::TestLayout::"
DAMAGED = (
    "tests/checkpoint/test_damage.py::test_a_damaged_tensor_is_refused_and_nothing_overwritten"
)
PRODUCERS = "tests/checkpoint/test_producers.py::"
RECIPROCALS = PRODUCERS + "test_reciprocal_global_scales_are_inverted"
EXPERTS_CLAMP = QUANTISED + "test_pitfall_32_the_clamp_acts_on_real_values"
PACKED_EXPERTS = "tests/layers/test_packed_layers.py::TestExperts::"
PACKED_SHARED = "tests/layers/test_packed_mlp.py::TestValues::"
SHARED_CLAMP = QUANTISED + "test_pitfall_32_the_shared_expert_clamps_real_values"

MUTANTS = (
    Mutant(
        "pitfall 25",
        "compressed-tensors' scale not inverted",
        "dsv4.quant.formats:invert_global_scale",
        "(scale if scale.dim() else scale.reshape(1)).reciprocal()",
        "scale if scale.dim() else scale.reshape(1)",
        FORMAT_PITFALLS + "25_compressed_tensors_scale_is_a_reciprocal",
    ),
    Mutant(
        "pitfall 25",
        "a reciprocal taken for the scale, seen in the product",
        "dsv4.quant.formats:from_compressed_tensors",
        "invert_global_scale(global_scale)",
        "global_scale",
        GEMM + "25_a_reciprocal_scale_is_seen_in_the_product",
    ),
    Mutant(
        "pitfall 25",
        "a reciprocal that cannot be inverted is accepted",
        "dsv4.quant.formats:invert_global_scale",
        "not scale.is_meta",
        "False",
        FORMAT_PITFALLS + "25_a_reciprocal_that_cannot_be_inverted_is_an_error",
    ),
    Mutant(
        "pitfall 25",
        "a file's reciprocals taken for the scales",
        "dsv4.checkpoint.entries:Entry._scalar",
        "value.reciprocal() if self.reciprocal else value",
        "value",
        RECIPROCALS,
    ),
    Mutant(
        "pitfall 25",
        "a file's input reciprocal taken for the scale",
        "dsv4.checkpoint.entries:Entry.read_input_scale",
        "self._scalar(self.input_scale, device)",
        "self.shards.read(self.input_scale, device).reshape(1)",
        RECIPROCALS,
    ),
    Mutant(
        "pitfall 25",
        "weight scales written without inverting",
        "dsv4.checkpoint.layouts:_nvfp4",
        "invert_global_scale(value.global_scale.reshape(1))",
        "value.global_scale.reshape(1)",
        RECIPROCALS,
    ),
    Mutant(
        "pitfall 25",
        "input scales written without inverting",
        "dsv4.checkpoint.layouts:_nvfp4",
        "invert_global_scale(input_scale.reshape(1).float())",
        "input_scale.reshape(1).float()",
        RECIPROCALS,
    ),
    Mutant(
        "pitfall 26",
        "a missing input_scale is not noticed",
        "dsv4.checkpoint.expert_slots:_missing_input_scales",
        "entry.format == NVFP4 and entry.input_scale is None",
        "False",
        DAMAGED,
    ),
    Mutant(
        "pitfall 26",
        "an input_scale of 0 is accepted",
        "dsv4.checkpoint.entries:Entry.read_input_scale",
        "self._scalar(self.input_scale, device)",
        "self.shards.read(self.input_scale, device).reshape(1)",
        DAMAGED,
    ),
    Mutant(
        "pitfall 26",
        "an input_scale of 0 divides",
        REFERENCE + "quantize:quantize_nvfp4",
        "finite & torch.isfinite(row) & (row > 0)",
        "finite.expand(amax.shape)",
        NVFP4 + "test_a_bad_global_scale_gives_nan_where_it_cannot_be_read",
    ),
    Mutant(
        "pitfall 26",
        "a fused part without an input scale borrows the other's",
        LAYERS + "fusion:_common_input_scale",
        "len(present) == len(scales)",
        "present",
        QUANTISED + "test_pitfall_26_a_fused_part_without_an_input_scale_does_not_borrow_one",
    ),
    Mutant(
        "pitfall 27",
        "fused parts take the smaller input scale",
        LAYERS + "fusion:_common_input_scale",
        "torch.cat(present).amax",
        "torch.cat(present).amin",
        QUANTISED + "test_pitfall_27_fused_parts_take_the_larger_input_scale",
    ),
    Mutant(
        "pitfall 27",
        "gate and up of a file take the smaller input scale",
        "dsv4.checkpoint.expert_slots:ExpertsSlot._largest",
        "max((s for s in row if s is not None), default=None, key=float)",
        "min((s for s in row if s is not None), default=None, key=float)",
        PRODUCERS + "test_gate_and_up_use_the_larger_input_scale",
    ),
    Mutant(
        "pitfall 27",
        "a range of experts takes the input scales of the first ones",
        "dsv4.checkpoint.expert_slots:ExpertsSlot._largest",
        "self.held",
        "range(self.count)",
        PRODUCERS + "test_a_range_of_experts_takes_its_own_input_scales",
    ),
    Mutant(
        "pitfall 27",
        "an expert without calibration data keeps its placeholder",
        "dsv4.checkpoint.entries:Entry.read_input_scale",
        "None if self.reciprocal and bool(value == 1.0) else value",
        "value",
        PRODUCERS + "test_uncalibrated_experts_take_the_largest_scale",
    ),
    Mutant(
        "pitfall 27",
        "calibration remembers the last batch only",
        LAYERS + "observer:AmaxObserver.see",
        "torch.maximum(self.amax[slot], amax)",
        "amax",
        QUANTISED + "test_calibration_sets_scales_from_the_largest_activation_and_freezes_them",
    ),
    Mutant(
        "pitfall 27",
        "a dynamic scale that is not the row's own",
        REFERENCE + "quantize:fake_quantized",
        "'token' if input_scale is None else 'static'",
        "'tensor' if input_scale is None else 'static'",
        QUANTISED + "test_nvfp4_activations_are_quantised_before_the_product",
    ),
    Mutant(
        "pitfall 27",
        "every expert takes the input scale of the first",
        REFERENCE + "grouped_gemm:grouped_gemm",
        "args.input_scale[expert:expert + 1]",
        "args.input_scale[:1]",
        GROUPED + "test_equals_one_gemm_per_expert",
    ),
    Mutant(
        "pitfall 28",
        "the largest global scale for a fused matrix",
        LAYERS + "fusion:_one_gemm",
        "weight = _joined(layers)",
        "weight = _joined(layers)\n"
        "weight = QuantizedTensor(weight.codes, weight.scales, weight.global_scale.amax(0, "
        "keepdim=True), weight.format)",
        QUANTISED + "test_pitfall_28_fused_parts_keep_their_own_global_scale",
    ),
    Mutant(
        "pitfall 28",
        "the global scale of the first layer for every part of a fused weight",
        LAYERS + "_fused_weight:FusedWeight.part",
        "self.global_scale[index:index + 1]",
        "self.global_scale[:1]",
        PACKED + "test_gives_the_same_bits_without_a_copy",
    ),
    Mutant(
        "pitfall 28",
        "the largest global scale for a fused weight",
        LAYERS + "_fused_weight:FusedWeight.whole",
        "self.value_of(codes, scales, global_scale, *rest)",
        "self.value_of(codes, scales, global_scale.amax().expand(len(self.rows)), *rest)",
        PACKED + "test_gives_the_same_bits_without_a_copy",
    ),
    Mutant(
        "pitfall 28",
        "the largest global scale when rows are joined",
        "dsv4.quant.formats:_cat_global",
        "segments = [n for p in parts for n in p.segments or (p.rows,)]\n"
        "return (torch.cat(scales, -1), tuple(segments) if len(segments) > 1 else ())",
        "segments = [n for p in parts for n in p.segments or (p.rows,)]\n"
        "top = torch.cat(scales, -1).amax(-1, keepdim=True)\n"
        "scales = [top.expand_as(scale) for scale in scales]\n"
        "return (torch.cat(scales, -1), tuple(segments) if len(segments) > 1 else ())",
        FORMATS + "TestQuantizedTensor::test_cat_rows_keeps_every_value",
    ),
    Mutant(
        "pitfall 28",
        "the largest global scale in the product",
        REFERENCE + "gemm:gemm",
        "formats.expand_segments(args.global_scale, args.segments, args.codes.shape[0])",
        "args.global_scale.amax().expand(args.codes.shape[0])",
        GEMM + "28_a_fused_matrix_keeps_both_global_scales",
    ),
    Mutant(
        "pitfall 28",
        "one global scale for gate and up",
        REFERENCE + "grouped_gemm:grouped_gemm",
        "formats.expand_segments(args.global_scale[expert], args.segments, high)",
        "args.global_scale[expert].amax().expand(high)",
        GROUPED + "test_pitfall_28_gate_and_up_keep_their_global_scales",
    ),
    Mutant(
        "pitfall 28",
        "every expert takes the global scales of the first",
        REFERENCE + "grouped_gemm:grouped_gemm",
        "args.global_scale[expert]",
        "args.global_scale[0]",
        GROUPED + "test_equals_one_gemm_per_expert",
    ),
    Mutant(
        "pitfall 28",
        "the larger global scale stored for gate and up",
        LAYERS + "_expert_stacks:ExpertStacks._copy",
        "getattr(self, name + '_scale_2')[expert, segment] = source.global_scale.reshape(())",
        "getattr(self, name + '_scale_2')[expert, :] = source.global_scale.reshape(())",
        QUANTISED + "test_stacking_expert_by_expert_copies_bits",
    ),
    Mutant(
        "pitfall 29",
        "global scale folded into block scales in the product",
        REFERENCE + "gemm:gemm",
        "compute = compute_dtype(x)\n"
        "weight = operand(args.codes, args.scales, args.format, args.layout, compute)",
        "compute = compute_dtype(x)\n"
        "if args.global_scale is not None and args.scales.dtype == torch.float8_e4m3fn:\n"
        "    fold = args.global_scale.amax()\n"
        "    folded = (args.scales.float() * fold).clamp(max=448).to(torch.float8_e4m3fn)\n"
        "    args = args._replace(scales=folded, global_scale=args.global_scale / fold)\n"
        "weight = operand(args.codes, args.scales, args.format, args.layout, compute)",
        GEMM + "29_the_global_scale_multiplies_the_sum",
    ),
    Mutant(
        "pitfall 29",
        "global scale folded into block scales in the experts' GEMM",
        REFERENCE + "grouped_gemm:grouped_gemm",
        "'See ``dsv4.ops.grouped_gemm.grouped_gemm``.\\n\\n    Reads the offsets on the host "
        "and loops over the experts that have rows. Only the reference may\\n    do that: "
        "it synchronises and cannot be captured in a CUDA graph.\\n    '\n"
        "bounds = _bounds(args.offsets, args.x.shape[0])",
        "'See ``dsv4.ops.grouped_gemm.grouped_gemm``.\\n\\n    Reads the offsets on the host "
        "and loops over the experts that have rows. Only the reference may\\n    do that: "
        "it synchronises and cannot be captured in a CUDA graph.\\n    '\n"
        "if args.global_scale is not None and args.scales.dtype == torch.float8_e4m3fn:\n"
        "    fold = args.global_scale.amax()\n"
        "    folded = (args.scales.float() * fold).clamp(max=448).to(torch.float8_e4m3fn)\n"
        "    args = args._replace(scales=folded, global_scale=args.global_scale / fold)\n"
        "bounds = _bounds(args.offsets, args.x.shape[0])",
        GROUPED + "test_within_the_budget_of_the_dense_gemm",
    ),
    Mutant(
        "pitfall 29",
        "global scale folded into block scales on dequantising",
        REFERENCE + "quantize:dequantize",
        "compute = torch.float64 if args.dtype == torch.float64 else torch.float32\n"
        "values = operand(args.codes, args.scales, args.format, args.layout, compute)",
        "compute = torch.float64 if args.dtype == torch.float64 else torch.float32\n"
        "if args.global_scale is not None and args.scales.dtype == torch.float8_e4m3fn:\n"
        "    fold = args.global_scale.amax()\n"
        "    folded = (args.scales.float() * fold).clamp(max=448).to(torch.float8_e4m3fn)\n"
        "    args = args._replace(scales=folded, global_scale=args.global_scale / fold)\n"
        "values = operand(args.codes, args.scales, args.format, args.layout, compute)",
        FORMAT_PITFALLS + "29_global_scale_is_not_folded_into_block_scales",
    ),
    Mutant(
        "pitfall 30",
        "block scales not clamped above",
        "dsv4.quant.elements:encode_e4m3",
        "values.clamp(-448.0, 448.0)",
        "torch.where(values.abs() > 464, torch.nan, values)",
        ZERO_BLOCKS,
    ),
    Mutant(
        "pitfall 30",
        "block scales of weights not clamped below",
        REFERENCE + "quantize:_block_scale",
        "(amax / (six * row)).clamp(2.0 ** (-9), 448.0)",
        "(amax / (six * row)).clamp(max=448.0)",
        ZERO_BLOCKS,
    ),
    Mutant(
        "pitfall 30",
        "division by a block scale of zero",
        REFERENCE + "quantize:quantize_nvfp4",
        "usable & (product > 0)",
        "usable",
        ZERO_BLOCKS,
    ),
    Mutant(
        "pitfall 30",
        "zero blocks of weights get a scale of zero",
        REFERENCE + "quantize:_block_scale",
        "torch.where(amax == 0, 1.0, ratio)",
        "torch.where(amax == 0, 0.0, ratio)",
        ZERO_BLOCKS,
    ),
    Mutant(
        "pitfall 30",
        "zero tensors get a global scale of zero",
        REFERENCE + "quantize:dynamic_global_scale",
        "torch.where(amax == 0, 1.0, scale)",
        "torch.where(amax == 0, 0.0, scale)",
        NVFP4 + "test_all_zeros",
    ),
    Mutant(
        "pitfall 30",
        "converted block scales not clamped",
        "dsv4.quant.elements:mxfp4_as_nvfp4",
        "relative.clamp(-9, 8)",
        "relative.clamp(-100, 100)",
        FORMATS + "TestMxfp4ToNvfp4::test_pitfall_30_block_scales_stay_inside_e4m3",
    ),
    Mutant(
        "pitfall 31",
        "padding of swizzled scales not written",
        "dsv4.quant.scales:swizzle_scales",
        "torch.zeros",
        "torch.empty",
        SWIZZLE + "test_pitfall_31_padding_of_swizzled_scales_is_written",
    ),
    Mutant(
        "pitfall 31",
        "row stride without its padding in the offset of a scale",
        "dsv4.quant.scales:scale_offset",
        "-(-columns // 4)",
        "max(1, columns // 4)",
        SWIZZLE + "test_swizzle_is_a_bijection_and_equals_the_formula",
    ),
    Mutant(
        "pitfall 31",
        "padding of experts' swizzled scales not written",
        "dsv4.quant.scales:swizzle_expert_scales",
        "torch.zeros",
        "torch.empty",
        EXPERT_SCALES + "test_is_that_of_every_expert",
    ),
    Mutant(
        "pitfall 31",
        "an expert's swizzled scales begin where the one before ends",
        "dsv4.quant.scales:expert_rows",
        "before[expert.clamp(max=experts - 1)]",
        "0 * before[expert.clamp(max=experts - 1)]",
        EXPERT_SCALES + "test_is_that_of_every_expert",
    ),
    Mutant(
        "pitfall 31",
        "padding reaches the product",
        "dsv4.quant.scales:unswizzle_scales",
        "padded[..., :rows, :columns]",
        "padded[..., -rows:, -columns:]",
        GEMM + "31_padding_of_swizzled_scales_does_not_reach_the_product",
    ),
    Mutant(
        "pitfall 32",
        "experts clamp products that lack their global scale",
        LAYERS + "experts:DeepseekV4Experts._activated",
        "swiglu(gate_up, self.limit, row_weight=row_weight)",
        "swiglu(gate_up, self.limit * float(self.gate_up_proj_scale_2.amax()), "
        "row_weight=row_weight)",
        EXPERTS_CLAMP,
    ),
    Mutant(
        "pitfall 32",
        "the limit is divided by the global scale, of products that have it",
        LAYERS + "experts:DeepseekV4Experts._activated",
        "swiglu(gate_up, self.limit, row_weight=row_weight)",
        "swiglu(gate_up, self.limit / float(self.gate_up_proj_scale_2.amax()), "
        "row_weight=row_weight)",
        EXPERTS_CLAMP,
    ),
    Mutant(
        "pitfall 32",
        "quantised experts ignore the clamp",
        LAYERS + "experts:DeepseekV4Experts._activated",
        "swiglu(gate_up, self.limit, row_weight=row_weight)",
        "swiglu(gate_up, None if self.format else self.limit, row_weight=row_weight)",
        EXPERTS_CLAMP,
    ),
    Mutant(
        "pitfall 32",
        "packed experts ignore the clamp",
        LAYERS + "experts:DeepseekV4Experts._activated",
        "(rows, weight, offsets, self.limit)",
        "(rows, weight, offsets, None)",
        PACKED_EXPERTS + "test_pitfall_32_the_clamp_acts_on_real_values",
    ),
    Mutant(
        "pitfall 28",
        "global scales of gate and up one after the other, their rows interleaved",
        LAYERS + "_expert_weights:ExpertWeights.pack",
        "scale.detach().repeat(1, self.intermediate_dim)",
        "scale.detach().repeat_interleave(self.intermediate_dim, 1)",
        PACKED_EXPERTS + "test_gives_the_same",
    ),
    Mutant(
        "pitfall 32",
        "the shared expert clamps products that lack their global scale",
        LAYERS + "mlp:DeepseekV4MLP.inner",
        "rounded_swiglu(gate_up, self.limit, self.down_proj)",
        "rounded_swiglu(\n"
        "    gate_up, self.limit * float(self.gate_proj.weight_scale_2), self.down_proj\n"
        ")",
        SHARED_CLAMP,
    ),
    Mutant(
        "pitfall 32",
        "a quantised shared expert ignores the clamp",
        LAYERS + "mlp:DeepseekV4MLP.inner",
        "rounded_swiglu(gate_up, self.limit, self.down_proj)",
        "rounded_swiglu(gate_up, None if self.gate_proj.format else self.limit, self.down_proj)",
        SHARED_CLAMP,
    ),
    Mutant(
        "pitfall 32",
        "a packed shared expert ignores the clamp",
        LAYERS + "mlp:DeepseekV4MLP.inner",
        "fused_swiglu(gate, up, x, self.limit, reserve_sms=reserve_sms)",
        "fused_swiglu(gate, up, x, None, reserve_sms=reserve_sms)",
        PACKED_SHARED + "test_pitfall_32_the_clamp_acts_on_real_values",
    ),
    Mutant(
        "pitfall 32",
        "a packed shared expert's limit is divided by its global scale",
        LAYERS + "fusion:fused_swiglu",
        "weight = fused.whole()",
        "weight = fused.whole()\nlimit = limit and limit / float(fused.global_scale.amax())",
        PACKED_SHARED + "test_pitfall_32_the_clamp_acts_on_real_values",
    ),
    Mutant(
        "pitfall 28",
        "global scales of the shared gate and up one after the other, their rows interleaved",
        LAYERS + "_fused_weight:interleaved_rows",
        "torch.cat(layer_scales).repeat",
        "torch.cat(layer_scales).repeat_interleave",
        PACKED_SHARED + "test_gives_the_same",
    ),
    Mutant(
        "pitfall 33",
        "E8M0 scales cast by value",
        "dsv4.quant.scales:e8m0_to_float",
        "scales.contiguous().view",
        "scales.float().to",
        SWIZZLE + "test_pitfall_33_e8m0_moves_by_view_not_by_value",
    ),
    Mutant(
        "pitfall 33",
        "E8M0 bytes taken for values",
        "dsv4.quant.scales:scales_to_float",
        "e8m0_to_float(scales)",
        "scales.view(torch.uint8).to(torch.float32)",
        SWIZZLE + "test_pitfall_33_e8m0_moves_by_view_not_by_value",
    ),
    Mutant(
        "pitfall 33",
        "E8M0 scales made from bytes by value",
        "dsv4.quant.scales:e8m0_from_bytes",
        "exponents.to(torch.uint8).view",
        "exponents.to(torch.float32).to",
        SWIZZLE + "test_pitfall_33_e8m0_moves_by_view_not_by_value",
    ),
    Mutant(
        "pitfall 33",
        "E8M0 scales joined by value",
        "dsv4.quant.formats:_cat_bytes",
        "t.contiguous().view",
        "t.float().to",
        SWIZZLE + "test_pitfall_33_e8m0_moves_by_view_not_by_value",
    ),
    Mutant(
        "pitfall 33",
        "experts' E8M0 scales copied by value",
        LAYERS + "_expert_stacks:as_bytes",
        "tensor.view",
        "tensor.to",
        QUANTISED + "test_stacking_expert_by_expert_copies_bits",
    ),
    Mutant(
        "pitfall 33",
        "a file's E8M0 scales read by value",
        "dsv4.checkpoint.entries:Entry.read",
        "scales = self.shards.read(self.scales, device)\nself._check_scales(scales)",
        "scales = self.shards.read(self.scales, device)\n"
        "if scales.dtype == torch.float8_e8m0fnu:\n"
        "    scales = scales.float().to(torch.uint8).view(scales.dtype)\n"
        "self._check_scales(scales)",
        PRODUCERS + "test_every_e8m0_byte_survives",
    ),
    Mutant(
        "pitfall 35",
        "high nibble first",
        "dsv4.quant.elements:unpack",
        "(packed & 15, packed >> 4)",
        "(packed >> 4, packed & 15)",
        FORMAT_PITFALLS + "35_bytes_are_uint8_row_major_with_untransposed_scales",
    ),
    Mutant(
        "pitfall 35",
        "high nibble first on packing",
        "dsv4.quant.elements:pack",
        "pairs[..., 0] | pairs[..., 1] << 4",
        "pairs[..., 1] | pairs[..., 0] << 4",
        NVFP4 + "test_equals_compressed_tensors_bitwise",
    ),
    Mutant(
        "pitfall 35",
        "codes of another dtype are accepted",
        "dsv4.quant.formats:_check_storage",
        "q.codes.dtype != q.format.codes_dtype",
        "q.codes.element_size() != 1",
        FORMAT_PITFALLS + "35_bytes_are_uint8_row_major_with_untransposed_scales",
    ),
    Mutant(
        "pitfall 35",
        "transposed scales are accepted",
        "dsv4.quant.formats:_check_storage",
        "tuple(q.scales.shape) != wanted_shape",
        "q.scales.numel() != torch.Size(wanted_shape).numel()",
        FORMAT_PITFALLS + "35_bytes_are_uint8_row_major_with_untransposed_scales",
    ),
    Mutant(
        "pitfall 35",
        "block scales read transposed",
        REFERENCE + "quantize:operand",
        "return (blocks * scales_to_float(scales).to(dtype)[..., None]).flatten(-2)",
        "wide = scales_to_float(scales).to(dtype)\n"
        "wide = wide.transpose(-1, -2).reshape(wide.shape)\n"
        "return (blocks * wide[..., None]).flatten(-2)",
        FORMAT_PITFALLS + "35_bytes_are_uint8_row_major_with_untransposed_scales",
    ),
    Mutant(
        "pitfall 35",
        "a file's packed codes converted, not viewed",
        "dsv4.checkpoint.entries:Entry.read",
        "weight.view",
        "weight.float().clamp(min=0).to",
        PRODUCERS + "test_packed_codes_stay_bytes",
    ),
    Mutant(
        "pitfall 36",
        "MTP tensors left out on writing",
        "dsv4.checkpoint.items:items_of",
        "if isinstance(slot, ExpertsSlot):\n"
        "    yield from _experts_items(slot, format_of)\n"
        "elif hasattr(slot.module, 'set_weight'):\n"
        "    module = slot.module\n"
        "    plain = module.format is None\n"
        "    value = module.weight.detach() if plain else module.quantized_weight()\n"
        "    yield (slot.name, value, module.input_scale)\n"
        "else:\n"
        "    yield (slot.name, slot.tensor.detach(), None)",
        "if slot.name.startswith('mtp.'):\n"
        "    continue\n"
        "if isinstance(slot, ExpertsSlot):\n"
        "    yield from _experts_items(slot, format_of)\n"
        "elif hasattr(slot.module, 'set_weight'):\n"
        "    module = slot.module\n"
        "    plain = module.format is None\n"
        "    value = module.weight.detach() if plain else module.quantized_weight()\n"
        "    yield (slot.name, value, module.input_scale)\n"
        "else:\n"
        "    yield (slot.name, slot.tensor.detach(), None)",
        "tests/checkpoint/test_checkpoint.py::test_mtp_is_not_dropped",
    ),
    Mutant(
        "pitfall 28",
        "gate and up quantised in memory with a global scale each",
        LAYERS + "_expert_stacks:ExpertStacks.quantize",
        "quantize_pair(gate_up[e, :inner], gate_up[e, inner:], format)",
        "(quantize_weight(part, format) for part in gate_up[e].split(inner))",
        "tests/checkpoint/test_pairs.py::test_what_is_quantised_in_memory_is_tied",
    ),
    Mutant(
        "names",
        "one string of patterns is read letter by letter",
        LAYERS + "quantize:quantize_",
        "str | bytes",
        "bytes",
        "tests/test_requests.py::test_patterns_in_one_string_are_refused",
    ),
)
