"""Mutants in compressor state, cache pages, slots and the indexer's selection."""

from __future__ import annotations

from .mutant import LAYERS, REFERENCE, TRITON, Mutant

KV = "tests/ops/test_kv_cache.py::test_pitfall_"
CACHE = "tests/kv_cache/test_cache.py::test_pitfall_"
COMPRESSOR = "tests/ops/test_compressor.py::test_pitfall_"
INDEXER = "tests/ops/test_indexer.py::test_pitfall_"
FORK = (
    "tests/kv_cache/test_page_pools.py::test_pitfall_15_every_accepted_prefix_of_a_guess_is_serial"
)
ATOMIC = "tests/kv_cache/test_steps_atomic.py::test_failures_at_every_place_leave_nothing"
ROLLBACK = "tests/kv_cache/test_rollback.py::test_at_every_border_it_is_as_if_never_stepped"
TWICE = "tests/ops/test_compressor.py::test_one_token_can_be_taken_twice"
FORMULA = "tests/layers/test_layers.py::test_pitfalls_1_2_3_4_5_6_13_14_attention_is_its_formula"
PROMPTS = "tests/serving/test_prompts.py::test_"
BEHIND = "tests/triton/test_compile.py::test_pitfall_18_state_is_read_and_written_behind_the_wait"
COMPILES = "::test_compiles_without_spills"
APE = COMPRESSOR + "41_ape_row_is_the_position_and_the_first_columns_are_the_overlap_half"

MUTANTS = (
    Mutant(
        "pitfall 18",
        "nobody waits for the launch in front",
        TRITON + "_lib.numerics:wait_for_inputs",
        "tl_cuda.gdc_wait()",
        "",
        BEHIND,
    ),
    Mutant(
        "pitfall 18",
        "a compressor's step that does not wait",
        TRITON + "compressor:_update_kernel",
        "wait_for_inputs(PDL)",
        "",
        BEHIND,
    ),
    Mutant(
        "pitfall 18",
        "a pooled row that is stored without a wait for it",
        TRITON + "compressor:_entry_kernel",
        "wait_for_inputs(PDL)",
        "",
        BEHIND,
    ),
    Mutant(
        "pitfall 18",
        "slots that others write taken for constants, which are loaded before the wait",
        "dsv4.cute.device.ptx.memory:_load_or",
        "f'ld.global.v{words}.u32 {_outs(words)}, [{{$r0}}+{offset}];'",
        "f'ld.global.nc.v{words}.u32 {_outs(words)}, [{{$r0}}+{offset}];'",
        "tests/cute/test_attention.py" + COMPILES,
    ),
    Mutant(
        "pitfall 15",
        "a fork without the compressors' state",
        "dsv4.kv_cache.paged_cache:PagedCache._copy_rows",
        "tensor[target] = tensor[source].clone()",
        "continue",
        FORK,
    ),
    Mutant(
        "pitfall 15",
        "a fork with the last token of the compressors' state alone",
        "dsv4.kv_cache.paged_cache:PagedCache._copy_rows",
        "tensor[target] = tensor[source].clone()",
        "tensor[target, -1:] = tensor[source, -1:].clone()",
        FORK,
    ),
    Mutant(
        "pitfall 15",
        "a fork without the window",
        "dsv4.kv_cache.paged_cache:PagedCache._copy_pages",
        "layer.pools(ratio)",
        "layer.pools(ratio) if ratio else ()",
        FORK,
    ),
    Mutant(
        "pitfall 15",
        "a step that failed and whose tokens still count",
        "dsv4.kv_cache.atomic_steps:AtomicSteps._take_back",
        "self._counts[row] = self._counts[row].undone(count)",
        "pass",
        ATOMIC,
    ),
    Mutant(
        "pitfall 15",
        "a step that failed and whose pages stay in the table",
        "dsv4.kv_cache.atomic_steps:AtomicSteps._take_back",
        "table.restore(before)",
        "pass",
        ATOMIC,
    ),
    Mutant(
        "pitfall 15",
        "a step that failed after the lengths were set, which stay",
        "dsv4.kv_cache.atomic_steps:AtomicSteps._write_back",
        "self._set_lengths(record.batch, new, record.batch.starts)",
        "pass",
        ATOMIC,
    ),
    Mutant(
        "pitfall 15",
        "a step of several tokens that failed after it took slots of the open windows",
        "dsv4.kv_cache.layer_cache:State.loses",
        "first < start and end > first + self.tensor.shape[2]",
        "False",
        ATOMIC,
    ),
    Mutant(
        "pitfall 15",
        "a step that failed after a page took the place of another, whose entries are gone",
        "dsv4.kv_cache.page_tables:PageTable.overwrites",
        "not (growth.split and growth.shared)",
        "True",
        ATOMIC,
    ),
    Mutant(
        "pitfall 15",
        "a prompt of several chunks that failed after it overwrote the window",
        "dsv4.kv_cache.atomic_steps:AtomicSteps._save_windows",
        "record.saved += save([layer.window.data], 0, pages[key])",
        "",
        ATOMIC,
    ),
    Mutant(
        "pitfall 15",
        "a token that closes a window clears slots that its repetition reads",
        REFERENCE + "compressor:_store_state",
        "(source.end - source.slots).unsqueeze(-1) + slot",
        "(source.end - source.slots // 2).unsqueeze(-1) + slot",
        TWICE,
    ),
    Mutant(
        "pitfall 15",
        "a state without slots for tokens to be taken back",
        "dsv4.kv_cache.layer_cache:state_shape",
        "c * ratio + rollback",
        "c * ratio + rollback // 4",
        ROLLBACK,
    ),
    Mutant(
        "pitfall 15",
        "tokens of a closed window that are not stored, and cannot be pooled again",
        REFERENCE + "compressor:_store_state",
        "position >= source.start.unsqueeze(-1)",
        "position >= source.end.unsqueeze(-1) // source.ratio * source.ratio - source.ratio",
        ROLLBACK,
    ),
    Mutant(
        "pitfall 15",
        "window pages evicted by tokens that may be taken back",
        "dsv4.kv_cache.paged_cache:PagedCache._trim",
        "window.trim(row, self._window_low(self._counts[row].low))",
        "window.trim(row, self._window_low(self._counts[row].high))",
        "tests/kv_cache/test_rollback.py::test_rejected_guesses_leave_nothing",
    ),
    Mutant(
        "pitfall 16",
        "padded length taken for the true one",
        REFERENCE + "compressor:_source",
        "cu.diff()",
        "(cu.diff() + ape.shape[0] - 1) // ape.shape[0] * ape.shape[0]",
        COMPRESSOR + "16_true_lengths",
    ),
    Mutant(
        "pitfall 16",
        "the longest length taken for all",
        REFERENCE + "compressor:_source",
        "cu.diff",
        "cu.diff().amax",
        COMPRESSOR + "16_true_lengths",
    ),
    Mutant(
        "pitfall 17",
        "RoPE dims through FP8",
        REFERENCE + "kv_cache:_encode",
        "_bfloat16(rope)",
        "_bfloat16(rope.to(torch.float8_e4m3fn).to(rope.dtype))",
        KV + "17_rope_dims_hold_one_value",
    ),
    Mutant(
        "pitfall 17",
        "codes of the other dims run over the RoPE dims",
        REFERENCE + "kv_cache:write_kv",
        "data[page, column] = rows",
        "data[page, column] = rows\n"
        "data[page, column[:, layout.nope_dim:layout.nope_dim + 1]] = 66",
        KV + "17_rope_dims_hold_one_value",
    ),
    Mutant(
        "pitfall 19",
        "rows of 584 bytes",
        "dsv4.kv_cache.pages:EntryLayout.scale_offset",
        "page_size * self.data_bytes + entry * self.scale_bytes",
        "entry * 584 + 576",
        KV + "19_page_geometry",
    ),
    Mutant(
        "pitfall 19",
        "scales beside their entry",
        REFERENCE + "kv_cache:_bytes_of",
        "after_data + entry.unsqueeze(-1) * layout.scale_bytes",
        "(entry.unsqueeze(-1) + 1) * layout.data_bytes",
        KV + "19_scales_after_all_data_of_the_page",
    ),
    Mutant(
        "pitfall 19",
        "pages not padded",
        "dsv4.kv_cache.pages:EntryLayout.page_bytes",
        "-(-used // data_bytes) * data_bytes",
        "used",
        KV + "19_page_geometry",
    ),
    Mutant(
        "pitfall 19",
        "scales of an entry not padded",
        "dsv4.kv_cache.pages:EntryLayout.scale_bytes",
        "-(-self.groups // 8) * 8",
        "self.groups",
        KV + "19_page_geometry",
    ),
    Mutant(
        "pitfall 19",
        "byte offsets of 32 bits",
        REFERENCE + "kv_cache:_bytes_of",
        "return (page.unsqueeze(-1), column)",
        "width = layout.page_bytes(page_size)\n"
        "flat = (page.unsqueeze(-1) * width + column).to(torch.int32).long()\n"
        "return (flat // width, flat % width)",
        KV + "19_offsets_past_two_gigabytes",
    ),
    Mutant(
        "pitfall 20",
        "slot -1 writes the last entry",
        REFERENCE + "_scatter:merge_skipped",
        "index >= 0",
        "index >= -1",
        KV + "20_slot_minus_one_changes_nothing",
    ),
    Mutant(
        "pitfall 20",
        "slot -1 writes entry 0",
        REFERENCE + "_scatter:merge_skipped",
        "index = index.to(torch.int64)\nkeep = index >= 0",
        "index = index.to(torch.int64)\nindex = index.clamp(min=0)\nkeep = index >= 0",
        KV + "20_slot_minus_one_changes_nothing",
    ),
    Mutant(
        "pitfall 20",
        "slot -1 reads entry 0",
        REFERENCE + "kv_cache:read_kv",
        "out.masked_fill((args.slots < 0).unsqueeze(-1), 0)",
        "out",
        KV + "20_slot_minus_one_changes_nothing",
    ),
    Mutant(
        "pitfall 20",
        "slot -1 is attended to as an entry of zeros",
        REFERENCE + "attention:_attend",
        "(q @ kv.transpose(1, 2) * scale).masked_fill(absent.unsqueeze(1), -torch.inf)",
        "q @ kv.transpose(1, 2) * scale",
        "tests/ops/test_attention.py::test_pitfall_20_minus_one_is_not_the_last_entry",
    ),
    Mutant(
        "pitfall 20",
        "padding is written to slot 0",
        REFERENCE + "slots:_slots",
        "torch.where(inside, page * page_size + entry % page_size, -1)",
        "page * page_size + entry % page_size",
        CACHE + "20_padding_passes_through_as_minus_one",
    ),
    Mutant(
        "pitfall 20",
        "slots of 32 bits",
        REFERENCE + "slots:_slots",
        "page * page_size",
        "page.int() * page_size",
        CACHE + "20_slots_do_not_wrap_at_32_bits",
    ),
    Mutant(
        "pitfall 21",
        "everything selected without scoring",
        REFERENCE + "indexer:indexer_select",
        "wide = compute_dtype(q, args.weights)\nentry = torch.arange(capacity, device=q.device)",
        "wide = compute_dtype(q, args.weights)\n"
        "if bool((args.visible <= k).all()):\n"
        "    e = torch.arange(k, device=q.device)\n"
        "    return torch.where(e < args.visible.unsqueeze(-1), e, -1)\n"
        "entry = torch.arange(capacity, device=q.device)",
        INDEXER + "21_selecting_all_still_scores",
    ),
    Mutant(
        "pitfall 22",
        "at least one entry visible",
        REFERENCE + "indexer:indexer_select",
        "ids < args.visible[part].unsqueeze(-1)",
        "ids < args.visible[part].clamp(min=1).unsqueeze(-1)",
        INDEXER + "22_nothing_visible",
    ),
    Mutant(
        "pitfall 22",
        "a sequence without tokens writes its state",
        REFERENCE + "compressor:_store_state",
        "position >= source.start.unsqueeze(-1)",
        "position < source.end.unsqueeze(-1)",
        COMPRESSOR + "22_all_lengths_zero",
    ),
    Mutant(
        "pitfall 41",
        "ape row by token of the chunk",
        REFERENCE + "compressor:_source",
        "starts[b] + index",
        "index",
        APE,
    ),
    Mutant(
        "pitfall 41",
        "halves of ape exchanged in memory",
        REFERENCE + "compressor:_source",
        "ape.to",
        "ape.roll(ape.shape[1] // 2, 1).to",
        APE,
    ),
    Mutant(
        "pitfall 41",
        "the overlap takes the second half of the columns",
        REFERENCE + "compressor:_pool_rows",
        "kv = torch.cat((source.kv[:, :width][rows], kv[..., width:]), dim=1)\n"
        "score = torch.cat((source.score[:, :width][rows], score[..., width:]), dim=1)",
        "kv = torch.cat((source.kv[:, width:][rows], kv[..., :width]), dim=1)\n"
        "score = torch.cat((source.score[:, width:][rows], score[..., :width]), dim=1)",
        APE,
    ),
    Mutant(
        "pitfall 41",
        "the overlap takes the second half of the columns, without a cache",
        REFERENCE + "compressor:_with_window_before",
        "ca, cb = x.chunk(2, dim=-1)",
        "cb, ca = x.chunk(2, dim=-1)",
        FORMULA,
    ),
    Mutant(
        "pitfall 41",
        "halves of ape exchanged, without a cache",
        LAYERS + "_pooling:PoolingModule._dense_windows",
        "self.position_bias",
        "self.position_bias.roll(self.head_dim, 1)",
        FORMULA,
    ),
    Mutant(
        "pitfall 41",
        "ape rows shifted by one, without a cache",
        LAYERS + "_pooling:PoolingModule._dense_windows",
        "self.position_bias",
        "self.position_bias.roll(1, 0)",
        FORMULA,
    ),
    Mutant(
        "padding",
        "tokens of padding have a cache row",
        "dsv4.serving.prompts:Inputs.write",
        "(rows_of_tokens, -1)",
        "(rows_of_tokens, 0)",
        PROMPTS + "padding_of_prompts_changes_no_token",
    ),
    Mutant(
        "padding",
        "sequences of padding take tokens",
        "dsv4.serving.prompts:Inputs.write",
        "(cu_seqlens, end)",
        "(cu_seqlens, 0)",
        PROMPTS + "inputs_say_where_each_token_belongs",
    ),
    Mutant(
        "padding",
        "a replay has the inputs of the capture",
        "dsv4.serving.prompts:PromptStep.run",
        "inputs.write(parts)",
        "if size not in self._captured:\n    inputs.write(parts)",
        PROMPTS + "replayed_prompts_are_the_eager_ones",
    ),
    Mutant(
        "padding",
        "padding has the token that was sampled for it",
        "dsv4.serving.row_state:RowState.chosen",
        "self.tokens[self.padding:].zero_()",
        "",
        PROMPTS + "replayed_prompts_are_the_eager_ones",
    ),
)
