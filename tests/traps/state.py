"""Mistakes in compressor state, cache pages, slots and the indexer's selection."""

from __future__ import annotations

from .mutant import LAYERS, REFERENCE, Mutant

KV = "tests/test_kv_cache.py::test_pitfall_"
CACHE = "tests/test_cache.py::test_pitfall_"
COMPRESSOR = "tests/test_compressor.py::test_pitfall_"
INDEXER = "tests/test_indexer.py::test_pitfall_"
FORK = "tests/test_page_pools.py::test_pitfall_15_every_accepted_prefix_of_a_guess_is_serial"
ATOMIC = "tests/test_steps_atomic.py::test_failures_at_every_place_leave_nothing"
TWICE = "tests/test_compressor.py::test_one_token_can_be_taken_twice"
FORMULA = "tests/test_layers.py::test_pitfalls_1_2_3_4_5_6_13_14_attention_is_its_formula"
PROMPTS = "tests/test_serving_prompts.py::test_"
BEHIND = "tests/test_triton_compile.py::test_pitfall_18_state_is_read_and_written_behind_the_wait"
COMPILES = "::test_compiles_without_spills_and_with_the_expected_products"
APE = COMPRESSOR + "41_ape_row_is_the_position_and_the_first_columns_are_the_overlap_half"
SLOT = "return torch.where(inside, page * page_size + entry % page_size, -1)"
HALVES = (
    "    kv = torch.cat((source.kv[:, :width][rows], kv[..., width:]), dim=1)\n"
    "    score = torch.cat((source.score[:, :width][rows], score[..., width:]), dim=1)"
)
SWAPPED_HALVES = (
    "    kv = torch.cat((source.kv[:, width:][rows], kv[..., :width]), dim=1)\n"
    "    score = torch.cat((source.score[:, width:][rows], score[..., :width]), dim=1)"
)

MUTANTS = (
    Mutant(
        "pitfall 18",
        "nobody waits for the launch in front",
        "dsv4/triton/_lib/numerics.py",
        "        tl_cuda.gdc_wait()\n",
        "",
        BEHIND,
    ),
    Mutant(
        "pitfall 18",
        "a compressor's step that does not wait",
        "dsv4/triton/compressor.py",
        "        wait_for_inputs(PDL)\n        program = tl.program_id(0)\n        slot",
        "        program = tl.program_id(0)\n        slot",
        BEHIND,
    ),
    Mutant(
        "pitfall 18",
        "a pooled row that is stored without a wait for it",
        "dsv4/triton/compressor.py",
        "    wait_for_inputs(PDL)\n    KEPT",
        "    KEPT",
        BEHIND,
    ),
    Mutant(
        "pitfall 18",
        "slots that others write taken for constants, which are loaded before the wait",
        "dsv4/cute/device/ptx/memory.py",
        'load = f"ld.global.v{words}.u32',
        'load = f"ld.global.nc.v{words}.u32',
        "tests/test_attention_cute.py" + COMPILES,
    ),
    Mutant(
        "pitfall 15",
        "a fork without the compressors' state",
        "dsv4/kv_cache/paged_cache.py",
        "tensor[target] = tensor[source].clone()",
        "continue",
        FORK,
    ),
    Mutant(
        "pitfall 15",
        "a fork with the last token of the compressors' state alone",
        "dsv4/kv_cache/paged_cache.py",
        "tensor[target] = tensor[source].clone()",
        "tensor[target, -1:] = tensor[source, -1:].clone()",
        FORK,
    ),
    Mutant(
        "pitfall 15",
        "a fork without the window",
        "dsv4/kv_cache/paged_cache.py",
        "            for data in layer.pools(ratio):\n",
        "            for data in layer.pools(ratio) if ratio else ():\n",
        FORK,
    ),
    Mutant(
        "pitfall 15",
        "a step that failed and whose tokens still count",
        "dsv4/kv_cache/atomic_steps.py",
        "            self._tokens[row] = tokens\n",
        "            pass\n",
        ATOMIC,
    ),
    Mutant(
        "pitfall 15",
        "a step that failed and whose pages stay in the table",
        "dsv4/kv_cache/atomic_steps.py",
        "            table.restore(before)\n",
        "            pass\n",
        ATOMIC,
    ),
    Mutant(
        "pitfall 15",
        "a step that failed after the lengths were set, which stay",
        "dsv4/kv_cache/atomic_steps.py",
        "            self._set_lengths(record.batch, new, record.batch.starts)\n",
        "            pass\n",
        ATOMIC,
    ),
    Mutant(
        "pitfall 15",
        "a step of several tokens that failed after it took slots of the open windows",
        "dsv4/kv_cache/layer_cache.py",
        "return first < start and end > first + slots",
        "return False",
        ATOMIC,
    ),
    Mutant(
        "pitfall 15",
        "a step that failed after a page took the place of another, whose entries are gone",
        "dsv4/kv_cache/page_tables.py",
        "        if not (growth.split and growth.shared):\n",
        "        if True:\n",
        ATOMIC,
    ),
    Mutant(
        "pitfall 15",
        "a prompt of several chunks that failed after it overwrote the window",
        "dsv4/kv_cache/atomic_steps.py",
        "            record.saved += save([layer.window.data], 0, pages[key])\n",
        "",
        ATOMIC,
    ),
    Mutant(
        "pitfall 15",
        "a token that closes a window clears slots that its repetition reads",
        REFERENCE + "compressor.py",
        "(position >= source.start.unsqueeze(-1)) & (position < source.end.unsqueeze(-1))",
        "position < source.end.unsqueeze(-1) + source.slots",
        TWICE,
    ),
    Mutant(
        "pitfall 16",
        "padded length taken for the true one",
        REFERENCE + "compressor.py",
        "end=starts + cu.diff()",
        "end=starts + (cu.diff() + ape.shape[0] - 1) // ape.shape[0] * ape.shape[0]",
        COMPRESSOR + "16_true_lengths",
    ),
    Mutant(
        "pitfall 16",
        "the longest length taken for all",
        REFERENCE + "compressor.py",
        "end=starts + cu.diff()",
        "end=starts + cu.diff().amax()",
        COMPRESSOR + "16_true_lengths",
    ),
    Mutant(
        "pitfall 17",
        "RoPE dims through FP8",
        REFERENCE + "kv_cache.py",
        "_bfloat16(rope).contiguous()",
        "_bfloat16(rope.to(torch.float8_e4m3fn).to(rope.dtype)).contiguous()",
        KV + "17_rope_dims_hold_one_value",
    ),
    Mutant(
        "pitfall 17",
        "codes of the other dims run over the RoPE dims",
        REFERENCE + "kv_cache.py",
        "    data[page, column] = rows\n",
        "    data[page, column] = rows\n"
        "    data[page, column[:, layout.nope_dim : layout.nope_dim + 1]] = 0x42\n",
        KV + "17_rope_dims_hold_one_value",
    ),
    Mutant(
        "pitfall 19",
        "rows of 584 bytes",
        "dsv4/kv_cache/pages.py",
        'begin: after all data of the page."""\n'
        "        return page_size * self.data_bytes + entry * self.scale_bytes",
        'begin: after all data of the page."""\n        return entry * 584 + 576',
        KV + "19_page_geometry",
    ),
    Mutant(
        "pitfall 19",
        "scales beside their entry",
        REFERENCE + "kv_cache.py",
        "after_data + entry.unsqueeze(-1) * layout.scale_bytes + scale",
        "(entry.unsqueeze(-1) + 1) * layout.data_bytes + scale",
        KV + "19_scales_after_all_data_of_the_page",
    ),
    Mutant(
        "pitfall 19",
        "pages not padded",
        "dsv4/kv_cache/pages.py",
        "return -(-used // self.data_bytes) * self.data_bytes",
        "return used",
        KV + "19_page_geometry",
    ),
    Mutant(
        "pitfall 19",
        "scales of an entry not padded",
        "dsv4/kv_cache/pages.py",
        "return -(-self.groups // 8) * 8",
        "return self.groups",
        KV + "19_page_geometry",
    ),
    Mutant(
        "pitfall 19",
        "byte offsets of 32 bits",
        REFERENCE + "kv_cache.py",
        "    return page.unsqueeze(-1), column",
        "    width = layout.page_bytes(page_size)\n"
        "    flat = (page.unsqueeze(-1) * width + column).to(torch.int32).long()\n"
        "    return flat // width, flat % width",
        KV + "19_offsets_past_two_gigabytes",
    ),
    Mutant(
        "pitfall 20",
        "slot -1 writes the last entry",
        REFERENCE + "_scatter.py",
        "    keep = index >= 0\n",
        "    keep = index >= -1\n",
        KV + "20_slot_minus_one_changes_nothing",
    ),
    Mutant(
        "pitfall 20",
        "slot -1 writes entry 0",
        REFERENCE + "_scatter.py",
        "    keep = index >= 0\n",
        "    index = index.clamp(min=0)\n    keep = index >= 0\n",
        KV + "20_slot_minus_one_changes_nothing",
    ),
    Mutant(
        "pitfall 20",
        "slot -1 reads entry 0",
        REFERENCE + "kv_cache.py",
        "return out.masked_fill((args.slots < 0).unsqueeze(-1), 0)",
        "return out",
        KV + "20_slot_minus_one_changes_nothing",
    ),
    Mutant(
        "pitfall 20",
        "slot -1 is attended to as an entry of zeros",
        REFERENCE + "attention.py",
        ".masked_fill(absent.unsqueeze(1), -torch.inf)",
        "",
        "tests/test_attention.py::test_pitfall_20_minus_one_is_not_the_last_entry",
    ),
    Mutant(
        "pitfall 20",
        "padding is written to slot 0",
        REFERENCE + "slots.py",
        SLOT,
        "return page * page_size + entry % page_size",
        CACHE + "20_padding_passes_through_as_minus_one",
    ),
    Mutant(
        "pitfall 20",
        "slots of 32 bits",
        REFERENCE + "slots.py",
        SLOT,
        SLOT.replace("page * page_size", "page.int() * page_size"),
        CACHE + "20_slots_do_not_wrap_at_32_bits",
    ),
    Mutant(
        "pitfall 21",
        "everything selected without scoring",
        REFERENCE + "indexer.py",
        "    wide = compute_dtype(q, args.weights)\n",
        "    wide = compute_dtype(q, args.weights)\n"
        "    if bool((args.visible <= k).all()):\n"
        "        e = torch.arange(k, device=q.device)\n"
        "        return torch.where(e < args.visible.unsqueeze(-1), e, -1)\n",
        INDEXER + "21_selecting_all_still_scores",
    ),
    Mutant(
        "pitfall 22",
        "at least one entry visible",
        REFERENCE + "indexer.py",
        "ids = torch.where(ids < args.visible[part].unsqueeze(-1), ids, capacity)",
        "ids = torch.where(ids < args.visible[part].clamp(min=1).unsqueeze(-1), ids, capacity)",
        INDEXER + "22_nothing_visible",
    ),
    Mutant(
        "pitfall 22",
        "a sequence without tokens writes its state",
        REFERENCE + "compressor.py",
        "torch.where(cu.diff() > 0, sequences.to(torch.int64), -1)",
        "sequences.to(torch.int64)",
        COMPRESSOR + "22_all_lengths_zero",
    ),
    Mutant(
        "pitfall 41",
        "ape row by token of the chunk",
        REFERENCE + "compressor.py",
        "(starts[b] + index - cu[b]) % ape.shape[0]",
        "(index - cu[b]) % ape.shape[0]",
        APE,
    ),
    Mutant(
        "pitfall 41",
        "halves of ape exchanged in memory",
        REFERENCE + "compressor.py",
        "score = score.to(state.dtype) + ape.to(state.dtype)[phase]",
        "score = score.to(state.dtype) + ape.roll(ape.shape[1] // 2, 1).to(state.dtype)[phase]",
        APE,
    ),
    Mutant(
        "pitfall 41",
        "the overlap takes the second half of the columns",
        REFERENCE + "compressor.py",
        HALVES,
        SWAPPED_HALVES,
        APE,
    ),
    Mutant(
        "pitfall 41",
        "the overlap takes the second half of the columns, without a cache",
        REFERENCE + "compressor.py",
        "    ca, cb = x.chunk(2, dim=-1)\n",
        "    cb, ca = x.chunk(2, dim=-1)\n",
        FORMULA,
    ),
    Mutant(
        "pitfall 41",
        "halves of ape exchanged, without a cache",
        LAYERS + "_pooling.py",
        "score = score + self.position_bias.to(score.dtype)",
        "score = score + self.position_bias.roll(self.head_dim, 1).to(score.dtype)",
        FORMULA,
    ),
    Mutant(
        "pitfall 41",
        "ape rows shifted by one, without a cache",
        LAYERS + "_pooling.py",
        "score = score + self.position_bias.to(score.dtype)",
        "score = score + self.position_bias.roll(1, 0).to(score.dtype)",
        FORMULA,
    ),
    Mutant(
        "padding",
        "tokens of padding have a cache row",
        "dsv4/serving/prompts.py",
        "(rows_of_tokens, -1)",
        "(rows_of_tokens, 0)",
        PROMPTS + "padding_of_prompts_changes_no_token",
    ),
    Mutant(
        "padding",
        "sequences of padding take tokens",
        "dsv4/serving/prompts.py",
        "(cu_seqlens, end)",
        "(cu_seqlens, 0)",
        PROMPTS + "inputs_say_where_each_token_belongs",
    ),
    Mutant(
        "padding",
        "a replay has the inputs of the capture",
        "dsv4/serving/prompts.py",
        "        inputs.write(parts)\n",
        "        if size not in self._captured:\n            inputs.write(parts)\n",
        PROMPTS + "replayed_prompts_are_the_eager_ones",
    ),
    Mutant(
        "padding",
        "padding has the token that was sampled for it",
        "dsv4/serving/row_state.py",
        "        self.tokens[self.padding :].zero_()\n",
        "",
        PROMPTS + "replayed_prompts_are_the_eager_ones",
    ),
)
