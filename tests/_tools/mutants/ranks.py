"""Mutants of models that are split over several ranks."""

from __future__ import annotations

from .mutant import LAYERS, Mutant

_SPLIT = "tests/parallel/test_split.py::"
LOGITS = _SPLIT + "test_logits_are_those_of_one_rank"
BITS = _SPLIT + "test_streams_are_bitwise_equal_on_all_ranks"
BLOCKS = _SPLIT + "test_quantised_weights_are_split_at_their_blocks"
SUM = _SPLIT + "test_sums_are_wide_and_rounded_once"
TOKENS = "tests/parallel/test_split_sampler.py::test_tokens_are_those_of_one_process"
RUNNER = "tests/parallel/test_runner.py::"
LOAD = "tests/parallel/test_load.py::"
EMULATED = "tests/parallel/test_emulated.py::"

MUTANTS = (
    Mutant(
        "ranks",
        "the indexes of ranks may have other formats",
        "dsv4.serving.runner_plan:RunnerPlan._check_agreement",
        "self.index_format",
        "'the same'",
        RUNNER + "TestErrors::test_another_cache_on_a_rank",
    ),
    Mutant(
        "ranks",
        "ranks may take plans of kernels from other figures",
        "dsv4.parallel.kernel_facts:kernel_facts",
        "digest(tuned())",
        "'the same'",
        LOAD + "TestRefusals::test_other_plans_on_a_rank",
    ),
    Mutant(
        "ranks",
        "the planner takes ranks that cut blocks of weights",
        "dsv4.parallel.planner:plan",
        "_cut(weights, machine, mode)",
        "None",
        "tests/parallel/test_planner.py::test_blocks_that_would_be_cut",
    ),
    Mutant(
        "ranks",
        "the decoder adds up sublayers that are summed already",
        "dsv4.layers.decoder:DeepseekV4DecoderLayer._run",
        "{'reduce': False}",
        "{'reduce': True}",
        LOGITS,
    ),
    Mutant(
        "ranks",
        "what is pushed to a peer of an emulated group arrives in the first slot",
        "dsv4.parallel.mailboxes:emulated",
        "slots[i * shape.capacity:]",
        "slots[0 * i * shape.capacity:]",
        EMULATED + "test_what_is_pushed_to_a_peer_arrives_as_if_it_had_pushed_it",
    ),
    Mutant(
        "ranks",
        "the sampler of all logits is listed for ranks, which have a part of them",
        "dsv4.compilation.steps:_choose_tokens",
        "_gather(split)",
        "_sample(model.config)",
        "tests/compilation/test_steps.py::test_kernels_of_ranks_are_those_of_their_sizes",
    ),
    Mutant(
        "ranks",
        "every rank has the sinks of rank 0",
        "dsv4.parallel.windows:window_of",
        "Window(number, part.start, part.stop)",
        "Window(number, part.start, part.stop) if len(shape) > 1 else "
        "Window(0, 0, part.stop - part.start)",
        LOGITS,
    ),
    Mutant(
        "ranks",
        "every rank has the rows of wo_a of the first groups",
        "dsv4.parallel.local_model:_take_linear",
        "part_of(value, axis_of(f'{name}.weight', context.mode), context)",
        "part_of(value, axis_of(f'{name}.weight', context.mode), type(context)("
        "0 if 'o_a_proj' in name else context.rank, context.size, context.group))",
        LOGITS,
    ),
    Mutant(
        "ranks",
        "columns are those of the other end",
        "dsv4.parallel.windows:window_of",
        "share(shape[number], context)",
        "share(shape[number], context if axis is not Axis.COLUMNS else type(context)("
        "context.size - 1 - context.rank, context.size, context.group))",
        LOGITS,
    ),
    Mutant(
        "ranks",
        "block scales are those of the first rank",
        "dsv4.parallel.windows:matrix_windows",
        "window.scaled(fmt.block[window.axis])",
        "Window(window.axis, 0, (window.stop - window.start) // fmt.block[window.axis] or 1)",
        BLOCKS,
    ),
    Mutant(
        "ranks",
        "two codes to a byte are counted along rows",
        "dsv4.parallel.windows:matrix_windows",
        "fmt.packed and window.axis == 1",
        "fmt.packed and window.axis == 0",
        BLOCKS,
    ),
    Mutant(
        "ranks",
        "token ids are not moved to the rank's part of the embedding",
        "dsv4.model.backbone:DeepseekV4Model.embed",
        "input_ids - self.vocabulary.start",
        "input_ids + 0",
        LOGITS,
    ),
    Mutant(
        "ranks",
        "the best token is numbered within the rank's vocabulary",
        "dsv4.serving.split_sampler:VocabularyPart.best",
        "top.indices + self.tokens.start",
        "top.indices",
        TOKENS,
    ),
    Mutant(
        "ranks",
        "random words begin at a multiple of four tokens",
        "dsv4.serving.philox:token_words",
        "tokens.start - 4 * first",
        "0",
        TOKENS,
    ),
    Mutant(
        "ranks",
        "top-p counts the tokens of each rank alone",
        "dsv4.serving.split_sampler:_prefix_with",
        "sum_integers(part.context, sums)",
        "sums",
        TOKENS,
    ),
    Mutant(
        "ranks",
        "attention is not summed over the ranks",
        LAYERS + "hyper_connection:DeepseekV4HyperConnection.post_pre",
        "all_reduce(parallel, output)",
        "output",
        LOGITS,
    ),
    Mutant(
        "ranks",
        "every rank begins the sum with its own part",
        "dsv4.parallel.reduce:all_reduce",
        "context.group.all_gather(partial)",
        "(lambda p: p[context.rank :] + p[: context.rank])(context.group.all_gather(partial))",
        BITS,
    ),
    Mutant(
        "ranks",
        "sums are rounded after each rank",
        "dsv4.parallel.reduce:all_reduce",
        "torch.promote_types(partial.dtype, torch.float32)",
        "partial.dtype",
        SUM,
    ),
    Mutant(
        "ranks",
        "an expert without calibration takes the largest scale of its rank",
        "dsv4.checkpoint.expert_slots:ExpertsSlot._largest",
        "self.of_layer",
        "self.held",
        LOAD + "test_input_scales_are_those_of_all_experts",
    ),
    Mutant(
        "ranks",
        "whole matrices are read and cut in memory",
        "dsv4.checkpoint.shards:Shards.read",
        "self.bytes_read += copy.nbytes",
        "self.bytes_read += math.prod(info.file_shape or info.shape) * info.dtype.itemsize",
        LOAD + "test_a_rank_reads_its_share_alone",
    ),
    Mutant(
        "ranks",
        "each rank draws a seed of its own",
        "dsv4.serving.rank_link:RankLink.request",
        "own.seed = arrival.seed",
        "",
        RUNNER + "test_a_random_seed_is_that_of_rank_0",
    ),
    Mutant(
        "ranks",
        "a request that was cancelled before its first step is not announced",
        "dsv4.serving.rank_link:RankLink.lead",
        "(*open_, *arrivals)",
        "open_",
        RUNNER + "test_requests_of_rank_0_alone",
    ),
)
