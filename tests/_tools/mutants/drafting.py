"""Mutants in steps with drafts: what a runner keeps, takes back, and tells its requests."""

from __future__ import annotations

from .mutant import Mutant

SERVED = "tests/speculation/test_served.py::test_"
STEPS = "tests/serving/test_speculative.py::test_"
WHOLE = SERVED + "a_runner_drafts_what_whole_sequences_draft"
CUT = "tests/speculation/test_confidence.py::test_"
COSTS = "tests/speculation/test_draft_costs.py::test_"
STEP = "dsv4.serving.speculative:SpeculativeStep."

MUTANTS = (
    Mutant(
        "served",
        "a rejected draft stays in the cache",
        STEP + "_accept",
        "accepted + 1",
        "accepted.clamp(min=1) + 1",
        STEPS + "wrong_drafts_cost_steps_and_nothing_else",
    ),
    Mutant(
        "served",
        "positions of a step's tokens all alike",
        "dsv4.kv_cache.batch:Batch.equal",
        "torch.arange(count, device=device)",
        "torch.zeros(count, dtype=torch.int64, device=device)",
        STEPS + "equal_batches_are_ragged_ones",
    ),
    Mutant(
        "served",
        "MTP rows at the position of the next token",
        "dsv4.serving.drafters:MtpDrafter.draft",
        "lengths - 1",
        "lengths",
        WHOLE,
    ),
    Mutant(
        "served",
        "a step without drafts leaves a hole in the MTP window",
        "dsv4.serving.drafters:MtpDrafter.skip",
        "self._draft.write(anchors, self._of(rows).unsqueeze(0), step)",
        "return",
        WHOLE,
    ),
    Mutant(
        "served",
        "streams of the last row, accepted or not",
        STEP + "_accept",
        "torch.arange(size, device=rows.device) * count + accepted",
        "torch.arange(size, device=rows.device) * count + drafts",
        WHOLE,
    ),
    Mutant(
        "served",
        "MTP of a prompt with the tokens themselves in place of those that follow",
        "dsv4.serving.prompts:Inputs.write",
        "following += [*part.tokens[1:], part.following]",
        "following += part.tokens",
        WHOLE,
    ),
    Mutant(
        "served",
        "the chunk of a prompt is followed by nothing",
        "dsv4.serving.step_launcher:_part",
        "0 if piece.is_last else sequence.fill[fed + piece.count]",
        "0",
        WHOLE,
    ),
    Mutant(
        "served",
        "accepted tokens are not counted",
        "dsv4.serving.launched_steps:LaunchedSteps._count_kept",
        "sequence.fed += accepted",
        "sequence.fed += 0",
        STEPS + "right_drafts_are_all_accepted",
    ),
    Mutant(
        "served",
        "tokens behind a stop token are given",
        "dsv4.serving.launched_steps:_give",
        "if sequence.request.done:\n    return",
        "pass",
        STEPS + "the_text_of_a_request_is_that_without_drafts",
    ),
    Mutant(
        "served",
        "rows of ended requests are kept as they are",
        "dsv4.serving.scheduler:Scheduler._truncated",
        "self._cache.truncate(sequence.row, len(sequence.held()))",
        "True",
        STEPS + "a_conversation_goes_on_where_accepted_tokens_ended",
    ),
    Mutant(
        "served",
        "a full pool preempts before it drops drafts",
        "dsv4.serving.scheduler:Scheduler.reserve",
        "any((piece.drafts for piece in pieces))",
        "False",
        STEPS + "a_full_pool_drops_drafts_or_preempts",
    ),
    Mutant(
        "served",
        "a fork shares pages that a step under way may leave unfinished",
        "dsv4.kv_cache.sequence_rows:SequenceRows.copy",
        "min(count.reach(self.rollback), count.low)",
        "count.reach(self.rollback)",
        "tests/kv_cache/test_rollback.py::test_a_fork_shares_no_page_that_an_open_step_may_leave"
        "_unfinished",
    ),
    Mutant(
        "served",
        "a row is truncated beyond what is certainly there",
        "dsv4.kv_cache.rollback:Rollback.truncate",
        "count.low",
        "count.high",
        "tests/kv_cache/test_rollback.py::test_a_row_is_truncated_while_steps_are_under_way",
    ),
    Mutant(
        "served",
        "the proposal of a DSpark row drawn at the anchor's position",
        "dsv4.serving.drafters:DSparkDrafter.draft",
        "parameters._replace(position=positions)",
        "parameters",
        SERVED + "dspark_draws_each_row_by_its_own_random_numbers",
    ),
    Mutant(
        "served",
        "drafts that are left out go to experts",
        STEP + "_forward",
        "drafted.flatten() if self._drafter.leaves_out(size) else None",
        "None",
        CUT + "what_is_left_out_reads_no_experts",
    ),
    Mutant(
        "served",
        "a draft is verified however unlikely it is",
        "dsv4.serving.drafters:DSparkDrafter.draft",
        "self.thetas.get(len(rows))",
        "None",
        CUT + "text_is_that_without_drafts_at_any_threshold",
    ),
    Mutant(
        "served",
        "tokens without an expert have their last one",
        "dsv4.reference.router:_chosen",
        "ids.masked_fill((routed < 0).unsqueeze(-1), -1)",
        "ids",
        "tests/ops/test_router.py::test_tokens_that_are_not_routed_have_no_expert",
    ),
    Mutant(
        "served",
        "rows of a deterministic step are as many as its drafts",
        STEP + "_forward",
        "self._fixed is not None",
        "False",
        "tests/speculation/test_deterministic_drafts.py::test_steps_whose_drafts_are_dropped_have"
        "_the_same_bits",
    ),
    Mutant(
        "served",
        "drafts that are slower than none",
        "dsv4.speculation.draft_costs:DraftCosts.best",
        "c.gain >= 1",
        "True",
        COSTS + "steps_of_many_sequences_go_without",
    ),
    Mutant(
        "served",
        "experts are read once for each token",
        "dsv4.speculation.draft_costs:Part.ms",
        "self.experts * (1 - (1 - self.chosen / self.experts) ** routed)",
        "self.chosen * routed",
        COSTS + "flash_drafts_where_its_experts_are_few_or_all_read",
    ),
    Mutant(
        "served",
        "forced drafts that are missing are accepted",
        "dsv4.speculation.forced:ForcedAcceptance.__call__",
        "right & (drafts >= 0)",
        "right",
        "tests/speculation/test_verify.py::test_forced_acceptance_accepts_its_share",
    ),
)
