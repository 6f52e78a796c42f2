"""Mutants in drafts: how a DSpark draft is loaded, what it reads and what it proposes."""

from __future__ import annotations

from .mutant import Mutant

LOADING = "tests/checkpoint/test_dspark.py::test_"
DRAFTING = "tests/speculation/test_dspark.py::test_"
FORMULAS = DRAFTING + "a_draft_is_what_the_formulas_say"
LAYER = "dsv4.layers.dspark:"
DRAFT = "dsv4.speculation.dspark:"

MUTANTS = (
    Mutant(
        "draft",
        "DSpark experts loaded as NVFP4",
        "dsv4.checkpoint.options:Options.converts",
        "self.mxfp4 != 'keep' and entry.format == MXFP4",
        "entry.format == MXFP4 and (self.mxfp4 != 'keep' or names.is_mtp(entry.name))",
        LOADING + "the_draft_is_loaded_as_it_is_stored",
    ),
    Mutant(
        "draft",
        "the draft's experts written as NVFP4 in NVIDIA's layout",
        "dsv4.checkpoint.layouts:Layout.own_format",
        "self.name == 'nvidia' and names.is_mtp(name)",
        "False",
        LOADING + "the_files_are_those_of_the_published_ones",
    ),
    Mutant(
        "draft",
        "convert leaves the draft's experts NVFP4 in NVIDIA's layout",
        "dsv4.checkpoint.converting:_items",
        "layout.own_format(name) == MXFP4 and input_scale is None",
        "layout.name == 'deepseek' and layout.own_format(name) == MXFP4 and input_scale is None",
        LOADING + "a_draft_that_became_nvfp4_is_converted_back_for_nvidias_layout",
    ),
    Mutant(
        "draft",
        "stages counted by num_nextn_predict_layers",
        "dsv4.config.model_config:ModelConfig.draft_layers",
        "self.num_nextn_predict_layers if self.dspark is None else self.dspark.stages",
        "self.num_nextn_predict_layers",
        "tests/config/test_config.py::test_stages_are_counted_by_the_target_layers",
    ),
    Mutant(
        "draft",
        "a noise token beyond the vocabulary",
        "dsv4.config.dspark:DSparkConfig.contradictions",
        "self.noise_token_id >= vocabulary",
        "False",
        "tests/config/test_config.py::test_contradictory_fields_of_a_dspark_draft",
    ),
    Mutant(
        "draft",
        "a confidence head that is left out is not said",
        "dsv4.checkpoint.report:report_of",
        "number = sum(map(names.is_confidence, tensors))",
        "number = 0",
        LOADING + "a_confidence_head_that_is_switched_off_is_left_out_and_said",
    ),
    Mutant(
        "draft",
        "taps of the streams before their layers",
        "dsv4.model.backbone:DeepseekV4Model._run_layers",
        "taps.take(number, streams)",
        "taps.take(number + 1, streams)",
        DRAFTING + "taps_are_the_mean_of_the_streams_after_their_layers",
    ),
    Mutant(
        "draft",
        "taps of one stream",
        LAYER + "Taps.take",
        "streams.mean(dim=-2)",
        "streams[..., 0, :]",
        DRAFTING + "taps_are_the_mean_of_the_streams_after_their_layers",
    ),
    Mutant(
        "draft",
        "the context rotated as in compressed layers",
        DRAFT + "DSparkDraft.commit",
        "self._attention.rotary_emb(context, positions)",
        "self._attention.rotary_emb(context, positions, 'compress')",
        DRAFTING + "stages_rotate_as_sliding_layers_whatever_the_tapped_layers_are",
    ),
    Mutant(
        "draft",
        "a causal block",
        LAYER + "DraftBlocks.seen",
        "return self.written().view(-1, self.rows).repeat_interleave(self.rows, 0)",
        "seen = self.written().view(-1, self.rows).repeat_interleave(self.rows, 0)\n"
        "own = torch.arange(seen.shape[0], device=seen.device).unsqueeze(1) % self.rows\n"
        "return torch.where(torch.arange(self.rows, device=seen.device) > own, -1, seen)",
        DRAFTING + "later_rows_of_a_block_matter_to_the_first",
    ),
    Mutant(
        "draft",
        "a context of the window that ends with the anchor",
        LAYER + "DraftBlocks.context",
        "self.anchors - 1",
        "self.anchors",
        DRAFTING + "a_draft_reads_a_window_before_the_anchor_and_nothing_else",
    ),
    Mutant(
        "draft",
        "confidence of the normed hidden states",
        DRAFT + "DSparkDraft._chosen",
        "last.confidence_head(hidden[:, row], vectors)",
        "last.confidence_head(last.norm(hidden[:, row]), vectors)",
        DRAFTING + "confidence_is_of_the_hidden_states_before_the_norm",
    ),
    Mutant(
        "draft",
        "every row takes the anchor for the token before",
        DRAFT + "DSparkDraft._chosen",
        "last.markov_head.vectors(before)",
        "last.markov_head.vectors(anchors)",
        DRAFTING + "the_token_before_changes_logits_by_its_markov_bias_alone",
    ),
    Mutant(
        "draft",
        "the context of rejected tokens is stored",
        DRAFT + "last_tokens",
        "new if accepted is None else accepted",
        "new",
        DRAFTING + "the_context_of_rejected_tokens_is_never_stored",
    ),
    Mutant(
        "draft",
        "the first tokens of a prompt in the context in place of the last",
        DRAFT + "last_tokens",
        "stay.unsqueeze(1) - back",
        "count - back.unsqueeze(0).expand(len(stay), -1)",
        DRAFTING + "last_tokens_are_those_that_a_loop_finds",
    ),
    Mutant(
        "draft",
        "tokens of two steps drawn by the same random numbers",
        "dsv4.reference.verify:verify_sampled",
        "args.position.repeat_interleave(count) + step",
        "args.position.repeat_interleave(count)",
        "tests/speculation/test_verify.py"
        "::test_the_token_after_accepted_drafts_is_that_of_plain_sampling",
    ),
    Mutant(
        "draft",
        "confidence in place of survival",
        DRAFT + "DSparkDraft.draft",
        "confidence.cumprod(-1)",
        "confidence",
        FORMULAS,
    ),
    Mutant(
        "draft",
        "tokens from logits that are NaN are proposed",
        DRAFT + "DSparkDraft.draft",
        "(sequences >= 0).unsqueeze(1) & finite",
        "(sequences >= 0).unsqueeze(1).expand_as(tokens)",
        DRAFTING + "logits_that_are_not_finite_drop_the_tokens_from_there_on",
    ),
    Mutant(
        "draft",
        "pools give back the oldest page that a draft reads",
        "dsv4.config.model_config:ModelConfig.raw_history",
        "self.sliding_window - (self.dspark is None)",
        "self.sliding_window - 1",
        DRAFTING + "pools_keep_the_page_of_the_oldest_position_that_a_draft_reads",
    ),
)
