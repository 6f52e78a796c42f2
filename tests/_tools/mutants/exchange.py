"""Mutants of ranks that have tokens of their own and exchange them."""

from __future__ import annotations

from .mutant import LAYERS, REFERENCE, TRITON, Mutant

_OWN = "tests/parallel/test_own_tokens.py::"
LOGITS = _OWN + "TestSums::test_logits_are_those_of_one_process"
BITS = _OWN + "TestSums::test_sums_are_bitwise_those_of_ranges_in_one_process"
RUNNER = _OWN + "TestRunner::"
PUSH = "tests/parallel/test_moe_exchange.py::TestPush::"

MUTANTS = (
    Mutant(
        "ranks",
        "results come back in the order of the ranks after this one",
        REFERENCE + "moe_exchange:collect",
        "rank.rank",
        "rank.rank - 1",
        LOGITS,
    ),
    Mutant(
        "ranks",
        "the shared expert is added first",
        REFERENCE + "moe_exchange:summed",
        "torch.zeros_like(parts[0], dtype=wide)",
        "torch.zeros_like(parts[0], dtype=wide) + (0 if args.shared is None else args.shared)",
        BITS,
    ),
    Mutant(
        "ranks",
        "padding is sent to experts",
        LAYERS + "moe:DeepseekV4SparseMoeBlock._exchanged",
        "own == UNROUTED",
        "own == UNROUTED - 1",
        RUNNER + "test_padding_goes_to_no_expert",
    ),
    Mutant(
        "ranks",
        "a rank takes the sizes of its own requests",
        "dsv4.serving.shared_steps:Needs.of_all",
        "max(own.decodes for own in needs)",
        "needs[0].decodes",
        RUNNER + "test_texts_are_those_of_one_process",
    ),
    Mutant(
        "ranks",
        "rows without an expert here are added",
        TRITON + "moe_exchange:_collect_kernel",
        "tl.where(_is_among(owners, source * distinct), hidden, 0)",
        "hidden",
        PUSH + "test_tokens_and_sums_are_those_of_the_reference",
    ),
    Mutant(
        "ranks",
        "a token is sent to every rank",
        TRITON + "moe_exchange:_send_kernel",
        "_is_among(owners, (rank + 1 + i) % RANKS * distinct)",
        "True",
        PUSH + "test_a_token_goes_once_to_each_rank_that_needs_it",
    ),
    Mutant(
        "ranks",
        "emulated ranks hold experts of their own, and read what nobody sent",
        TRITON + "moe_exchange:_distinct",
        "int(not mailbox.are_copies)",
        "1",
        "tests/parallel/test_emulated.py::test_tokens_come_from_peers_that_hold_the_same_experts",
    ),
    Mutant(
        "ranks",
        "kernels of experts are compiled for the tokens of one rank",
        "dsv4.compilation.kernel_calls:GroupedGemm.plans",
        "rows_of(max_tokens, self.ranks)",
        "max_tokens",
        "tests/compilation/test_warmup.py::"
        "test_experts_of_ranks_with_tokens_of_their_own_get_those_of_all",
    ),
    Mutant(
        "ranks",
        "the error of a failed rank keeps its connections, and others wait for their end",
        "dsv4.parallel.process_group:DistributedGroup._wait",
        "del work",
        "pass",
        "tests/parallel/test_processes.py::test_ranks_with_tokens_of_their_own",
    ),
)
