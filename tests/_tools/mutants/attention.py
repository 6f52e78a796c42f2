"""Mutants in the schedule, rotary embedding, attention and the entries it sees."""

from __future__ import annotations

from .mutant import LAYERS, REFERENCE, Mutant

FORMULA = "tests/layers/test_layers.py::test_pitfalls_1_2_3_4_5_6_13_14_attention_is_its_formula"
LAYER_TABLE = "tests/layers/test_layers.py::test_pitfall_1_each_layer_type_has_its_own_table"
TRANSFORMERS = "tests/layers/test_layers.py::test_each_layer_equals_transformers"
CONFIG = "tests/config/test_config.py::"
ROPE = "tests/ops/test_rope.py::"
ATTENTION = "tests/ops/test_attention.py::test_pitfall_"
WRONG_FILE = CONFIG + "test_a_wrong_file_is_refused_by_name"
CHUNKS = "tests/kv_cache/test_cache.py::test_pitfall_13_any_chunking_sees_all_it_should"
MODEL_CHUNKS = "tests/test_model.py::test_any_chunking_is_the_same_for_the_model"

MUTANTS = (
    Mutant(
        "pitfall 42",
        "a file without a schedule is not refused",
        "dsv4.config.config_json:_missing",
        "((('compress_ratios', 'layer_types'), 'there is no default layer schedule'), "
        "(('num_hash_layers', 'mlp_layer_types'), 'there is no default routing schedule'), "
        "(('qk_rope_head_dim', 'partial_rotary_factor'), 'the rotated width is not known'))",
        "((('num_hash_layers', 'mlp_layer_types'), 'there is no default routing "
        "schedule'), (('qk_rope_head_dim', 'partial_rotary_factor'), 'the rotated width is "
        "not known'))",
        WRONG_FILE,
    ),
    Mutant(
        "pitfall 42",
        "two schedules that contradict each other are not refused",
        "dsv4.config.config_json:_layer_types",
        "problems.append('layer_types contradicts compress_ratios')",
        "pass",
        WRONG_FILE,
    ),
    Mutant(
        "pitfall 1",
        "one table for all layer types",
        "dsv4.config.model_config:ModelConfig.rope",
        "self.rope_compress if self.compress_rate(layer_idx) else self.rope_main",
        "self.rope_main",
        ROPE + "test_pitfall_1_base_and_yarn_belong_to_the_layer_type",
    ),
    Mutant(
        "pitfall 1",
        "MTP layers take the table of compressed layers",
        "dsv4.config.model_config:ModelConfig.rope",
        "self.compress_rate(layer_idx)",
        "self.compress_rate(layer_idx) or layer_idx >= self.num_hidden_layers",
        CONFIG + "test_rope_follows_the_layer_type",
    ),
    Mutant(
        "pitfall 1",
        "compressed layers rotate q and kv by the main table",
        LAYERS + "attention:DeepseekV4Attention.__init__",
        "'compress' if config.compress_rate(layer_idx) else 'main'",
        "'main'",
        FORMULA,
    ),
    Mutant(
        "pitfall 1",
        "sliding layers rotate by the table of compressed ones",
        LAYERS + "attention:DeepseekV4Attention.__init__",
        "'compress' if config.compress_rate(layer_idx) else 'main'",
        "'compress'",
        FORMULA,
    ),
    Mutant(
        "pitfall 1",
        "compressors rotate entries by the main table",
        LAYERS + "_pooling:PoolingModule",
        "rope_layer_type = 'compress'",
        "rope_layer_type = 'main'",
        FORMULA,
    ),
    Mutant(
        "pitfall 1",
        "no YaRN on compressed layers",
        "dsv4.config.rope_parameters:RopeParameters.inv_freq",
        "self.factor is None",
        "True",
        ROPE + "test_pitfall_1_base_and_yarn_belong_to_the_layer_type",
    ),
    Mutant(
        "pitfall 1",
        "YaRN on the main table of a file",
        "dsv4.config.config_json:_ropes",
        "{'theta': theta, 'dim': dim}",
        "{'theta': theta, 'dim': dim, **_yarn(compress, problems)}",
        CONFIG + "test_every_style_of_file_gives_the_same_configuration_back",
    ),
    Mutant(
        "pitfall 1",
        "the layer's labels are exchanged",
        LAYERS + "rotary:DeepseekV4RotaryEmbedding.__init__",
        "{'main': config.rope_main, 'compress': config.rope_compress}",
        "{'main': config.rope_compress, 'compress': config.rope_main}",
        LAYER_TABLE,
    ),
    Mutant(
        "pitfall 2",
        "YaRN's amplitude on cos and sin",
        REFERENCE + "rope:rope_tables",
        "(angles.cos(), angles.sin())",
        "(1.2773 * angles.cos(), 1.2773 * angles.sin())",
        ROPE + "test_pitfall_2_tables_have_no_amplitude",
    ),
    Mutant(
        "pitfall 2",
        "YaRN's amplitude in the softmax scale",
        LAYERS + "attention:DeepseekV4Attention.__init__",
        "config.head_dim ** (-0.5)",
        "config.head_dim ** (-0.5) * 1.2773 ** 2",
        FORMULA,
    ),
    Mutant(
        "pitfall 3",
        "entries rotated at their number",
        LAYERS + "_pooling:PoolingModule._dense_windows",
        "self.compress_rate * torch.arange(windows, device=kv.device)",
        "torch.arange(windows, device=kv.device)",
        FORMULA,
    ),
    Mutant(
        "pitfall 3",
        "entries rotated at their last token",
        LAYERS + "_pooling:PoolingModule._dense_windows",
        "first + self.compress_rate * torch.arange(windows, device=kv.device)",
        "first + self.compress_rate - 1 + self.compress_rate * torch.arange(windows, "
        "device=kv.device)",
        FORMULA,
    ),
    Mutant(
        "pitfall 3",
        "entries not rotated",
        LAYERS + "_pooling:PoolingModule._finish",
        "rope(entries, cos, sin)",
        "entries",
        FORMULA,
    ),
    Mutant(
        "pitfall 3",
        "entries of the paged cache rotated at their last token",
        REFERENCE + "compressor:compressor_update",
        "window * ratio",
        "window * ratio + ratio - 1",
        "tests/ops/test_compressor.py::test_pitfall_3_position_is_the_first_token_of_the_window",
    ),
    Mutant(
        "pitfall 3",
        "entries of the paged cache rotated at their number",
        REFERENCE + "compressor:compress_write",
        "positions.clamp(min=0)",
        "positions.clamp(min=0) // args.ape.shape[0]",
        MODEL_CHUNKS,
    ),
    Mutant(
        "pitfall 4",
        "no inverse rotation of the output",
        LAYERS + "attention:DeepseekV4Attention._attend_dense",
        "sparse_attention(q, plain_pages(kv), _flat_slots(shown, kv.shape[1]), compressed, "
        "slots, self.sinks, scale=self.scaling, cos=cos, sin=sin)",
        "sparse_attention(q, plain_pages(kv), _flat_slots(shown, kv.shape[1]), compressed, "
        "slots, self.sinks, scale=self.scaling)",
        FORMULA,
    ),
    Mutant(
        "pitfall 4",
        "no inverse rotation of the output with a paged cache",
        LAYERS + "attention:DeepseekV4Attention._attend_paged",
        "sparse_attention(q, layer.window, seen, layer.compressed, slots, self.sinks, "
        "scale=self.scaling, cos=cos, sin=sin)",
        "sparse_attention(q, layer.window, seen, layer.compressed, slots, self.sinks, "
        "scale=self.scaling)",
        MODEL_CHUNKS,
    ),
    Mutant(
        "pitfall 4",
        "the output is rotated by the reference forwards",
        REFERENCE + "attention:sparse_attention",
        "RopeArgs(attended, *angles, inverse=True)",
        "RopeArgs(attended, *angles, inverse=False)",
        ATTENTION + "4_the_last_dims_are_turned_back",
    ),
    Mutant(
        "pitfall 4",
        "the result is rounded before it is turned",
        REFERENCE + "attention:sparse_attention",
        "RopeArgs(attended, *angles, inverse=True)",
        "RopeArgs(attended.to(q.dtype), *angles, inverse=True)",
        ATTENTION + "4_the_turned_result_is_rounded_once",
    ),
    Mutant(
        "pitfall 4",
        "the output is rotated forwards",
        LAYERS + "attention:DeepseekV4Attention._attend_dense",
        "sparse_attention(q, plain_pages(kv), _flat_slots(shown, kv.shape[1]), compressed, "
        "slots, self.sinks, scale=self.scaling, cos=cos, sin=sin)",
        "sparse_attention(q, plain_pages(kv), _flat_slots(shown, kv.shape[1]), compressed, "
        "slots, self.sinks, scale=self.scaling, cos=cos, sin=-sin)",
        FORMULA,
    ),
    Mutant(
        "pitfall 4",
        "the inverse negates the cosine",
        REFERENCE + "rope:rope",
        "sin = -sin",
        "cos = -cos",
        ROPE + "test_pitfall_4_the_inverse_turns_by_the_opposite_angle",
    ),
    Mutant(
        "pitfall 4",
        "the inverse negates both",
        REFERENCE + "rope:rope",
        "sin = -sin",
        "cos, sin = (-cos, -sin)",
        ROPE + "test_pitfall_4_the_inverse_turns_by_the_opposite_angle",
    ),
    Mutant(
        "pitfall 4",
        "sines read from the columns of the cosines",
        REFERENCE + "rope:rope_tables",
        "angles.sin",
        "angles.cos",
        ROPE + "test_tables_are_float32_of_the_float32_angle",
    ),
    Mutant(
        "pitfall 5",
        "split halves instead of pairs",
        REFERENCE + "rope:rope",
        "x[..., unrotated:].to(wide).unflatten(-1, (-1, 2)).unbind(-1)",
        "x[..., unrotated:].to(wide).chunk(2, -1)",
        ROPE + "test_pitfall_5_last_dims_in_interleaved_pairs",
    ),
    Mutant(
        "pitfall 5",
        "pairs read interleaved, written as halves",
        REFERENCE + "rope:rope",
        "torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)",
        "torch.stack((even * cos - odd * sin, odd * cos + even * sin), -2)",
        ROPE + "test_pitfall_5_by_hand",
    ),
    Mutant(
        "pitfall 5",
        "the first dims are rotated",
        REFERENCE + "rope:rope",
        "unrotated = x.shape[-1] - 2 * cos.shape[-1]\n"
        "even, odd = x[..., unrotated:].to(wide).unflatten(-1, (-1, 2)).unbind(-1)",
        "unrotated = x.shape[-1] - 2 * cos.shape[-1]\n"
        "if unrotated:\n"
        "    swapped = torch.cat((x[..., -unrotated:], x[..., :-unrotated]), -1)\n"
        "    swapped = rope(swapped[..., unrotated:], cos, sin, False)\n"
        "    return torch.cat((swapped, x[..., -unrotated:]), -1)\n"
        "even, odd = x[..., unrotated:].to(wide).unflatten(-1, (-1, 2)).unbind(-1)",
        ROPE + "test_pitfall_5_last_dims_in_interleaved_pairs",
    ),
    Mutant(
        "pitfall 6",
        "no norm per head",
        LAYERS + "attention:DeepseekV4Attention._queries",
        "head_norm_rope_(q, *tables, self.q_b_norm.eps)",
        "q = rope(q, *(table.unsqueeze(1) for table in tables))",
        FORMULA,
    ),
    Mutant(
        "pitfall 6",
        "one norm over all heads",
        LAYERS + "attention:DeepseekV4Attention._queries",
        "head_norm_rope_(q, *tables, self.q_b_norm.eps)",
        "q = self.q_b_norm(q.flatten(-2)).view_as(q)\n"
        "q = rope(q, *(table.unsqueeze(1) for table in tables))",
        FORMULA,
    ),
    Mutant(
        "pitfall 6",
        "two weighted norms on the q path",
        LAYERS + "attention:DeepseekV4Attention._down",
        "self.q_a_norm(q_a)",
        "self.q_a_norm(self.q_a_norm(q_a))",
        FORMULA,
    ),
    Mutant(
        "pitfall 6",
        "no weighted norm on the q path",
        LAYERS + "attention:DeepseekV4Attention._down",
        "self.q_a_norm(q_a)",
        "q_a",
        FORMULA,
    ),
    Mutant(
        "pitfall 6",
        "the indexer's queries are normed per head",
        LAYERS + "indexer:DeepseekV4Indexer.project_queries",
        "return self.q_b_proj(q_residual).unflatten(-1, (self.num_heads, self.head_dim))",
        "q = self.q_b_proj(q_residual).unflatten(-1, (self.num_heads, self.head_dim))\n"
        "return q * q.square().mean(-1, keepdim=True).rsqrt()",
        TRANSFORMERS,
    ),
    Mutant(
        "pitfall 13",
        "a token does not see the entry it closes",
        LAYERS + "_pooling:PoolingModule.visible",
        "position_ids + 1",
        "position_ids",
        FORMULA,
    ),
    Mutant(
        "pitfall 13",
        "a token sees the entry that is still open",
        LAYERS + "_pooling:PoolingModule.visible",
        "position_ids + 1",
        "position_ids + self.compress_rate",
        FORMULA,
    ),
    Mutant(
        "pitfall 13",
        "mask of the wrong polarity",
        LAYERS + "compressor:DeepseekV4HCACompressor.select",
        "torch.where(numbers < visible, numbers, -1)",
        "torch.where(numbers < visible, -1, numbers)",
        FORMULA,
    ),
    Mutant(
        "pitfall 13",
        "mask of the wrong polarity in the indexer",
        REFERENCE + "indexer:indexer_select",
        "torch.where(seen, scores, -torch.inf)",
        "torch.where(~seen, scores, -torch.inf)",
        "tests/ops/test_indexer.py::test_pitfall_13_a_decode_step_sees_every_entry",
    ),
    Mutant(
        "pitfall 13",
        "the indexer shows a lone token nothing",
        REFERENCE + "indexer:indexer_select",
        "keys = read_kv(as_record(ReadKvArgs, args, head_dim=d, slots=slots.flatten(1), "
        "dtype=wide))\n"
        "seen = entry < args.visible[part].unsqueeze(-1)",
        "keys = read_kv(as_record(ReadKvArgs, args, head_dim=d, slots=slots.flatten(1), "
        "dtype=wide))\n"
        "args = args._replace(visible=args.visible * (tokens > 1))\n"
        "seen = entry < args.visible[part].unsqueeze(-1)",
        "tests/ops/test_indexer.py::test_pitfall_13_one_token_alone_sees_what_it_sees_in_a_batch",
    ),
    Mutant(
        "pitfall 13",
        "a lone token drops the compressed entries",
        REFERENCE + "attention:sparse_attention",
        "args.compressed is not None and args.compressed_slots is not None",
        "args.compressed is not None and args.compressed_slots is not None and (tokens > 1)",
        ATTENTION + "13_one_token_alone_sees_what_it_sees_in_a_batch",
    ),
    Mutant(
        "pitfall 13",
        "the prefix is one entry short",
        REFERENCE + "slots:prefix_slots",
        "args.counts.unsqueeze(-1)",
        "args.counts.unsqueeze(-1) - 1",
        CHUNKS,
    ),
    Mutant(
        "pitfall 13",
        "a lone token has no prefix",
        REFERENCE + "slots:prefix_slots",
        "args.counts.unsqueeze",
        "(args.counts * (args.counts.shape[0] > 1)).unsqueeze",
        CHUNKS,
    ),
    Mutant(
        "pitfall 14",
        "sink scaled",
        REFERENCE + "attention:_attend",
        "sink.view",
        "(sink * scale).view",
        ATTENTION + "14_the_sink_is_not_scaled",
    ),
    Mutant(
        "pitfall 14",
        "sink scaled at the layer",
        LAYERS + "attention:DeepseekV4Attention._attend_dense",
        "self.sinks",
        "self.sinks * self.scaling",
        FORMULA,
    ),
    Mutant(
        "pitfall 14",
        "no sink",
        REFERENCE + "attention:_attend",
        "weights.sum(-1, keepdim=True) + torch.exp(sink - top)",
        "weights.sum(-1, keepdim=True)",
        ATTENTION + "14_the_sink_is_in_the_denominator_only",
    ),
    Mutant(
        "pitfall 14",
        "no sink at the layer",
        LAYERS + "attention:DeepseekV4Attention._attend_dense",
        "self.sinks",
        "self.sinks - torch.inf",
        FORMULA,
    ),
    Mutant(
        "pitfall 14",
        "no sink with a paged cache",
        LAYERS + "attention:DeepseekV4Attention._attend_paged",
        "self.sinks",
        "self.sinks - torch.inf",
        MODEL_CHUNKS,
    ),
    Mutant(
        "pitfall 14",
        "sink in the numerator",
        REFERENCE + "attention:_attend",
        "weights @ kv",
        "weights @ kv + torch.exp(sink - top)",
        ATTENTION + "14_the_sink_is_in_the_denominator_only",
    ),
    Mutant(
        "pitfall 14",
        "one sink for all heads",
        REFERENCE + "attention:_attend",
        "sink.view",
        "sink.mean().expand(q.shape[1]).reshape",
        ATTENTION + "14_one_sink_per_head",
    ),
    Mutant(
        "pitfall 14",
        "0/0 where there is neither key nor sink",
        REFERENCE + "attention:_attend",
        "torch.where(total == 0, 0, weights @ kv / total)",
        "weights @ kv / total",
        ATTENTION + "14_nothing_to_attend_to",
    ),
    Mutant(
        "pitfall 14",
        "sinks are cast with the model",
        LAYERS + "attention:DeepseekV4Attention",
        "frozenset({'sinks'})",
        "frozenset()",
        "tests/layers/test_layers.py::test_casting_a_model_keeps_what_must_not_be_cast",
    ),
)
