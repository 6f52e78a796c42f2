"""Mutants of the drop-in for transformers: arguments that are swallowed, settings that are lost.

They are no pitfalls of the specification; here they are called HF.
"""

from __future__ import annotations

from .mutant import LAYERS, Mutant

ARGUMENTS = "tests/integrations/test_transformers_arguments.py::test_"
SETTINGS = "tests/integrations/test_transformers_settings.py::test_"
BOTH_NAMES = ARGUMENTS + "both_names_of_the_cache_are_taken_alike"

MUTANTS = (
    Mutant(
        "HF",
        "the cache is swallowed under the name of transformers 5.24",
        LAYERS + "_pooling:one_cache",
        "cache is None or past_key_values is cache",
        "cache is not past_key_values or cache is None",
        BOTH_NAMES,
    ),
    Mutant(
        "HF",
        "the attention of a swapped model swallows the cache",
        "dsv4.integrations._modules:DeepseekV4Attention.forward",
        "super().forward(hidden_states, position_embeddings, position_ids, attention_mask, "
        "past_key_values, cache=cache)",
        "super().forward(hidden_states, position_embeddings, position_ids, attention_mask, "
        "past_key_values)",
        BOTH_NAMES,
    ),
    Mutant(
        "HF",
        "unknown keyword arguments are swallowed",
        "dsv4.integrations._arguments:check_options",
        "unknown = [name for name in options if name not in WITHOUT_EFFECT]",
        "unknown: list[str] = []",
        ARGUMENTS + "an_unknown_keyword_is_refused_by_name",
    ),
    Mutant(
        "HF",
        "forwards are swapped without a look at their arguments",
        "dsv4.integrations._applying:swap_modules",
        "plan.check()",
        "",
        ARGUMENTS + "an_argument_that_is_not_known_is_an_error_before_the_swap",
    ),
    Mutant(
        "HF",
        "a mask is cut to the window",
        LAYERS + "_mask:masked_slots",
        "if beyond:\n"
        "    numbers = torch.arange(keys, device=mask.device)\n"
        "    return torch.where(shown, numbers, -1).expand(batch, queries, keys)",
        "if beyond and (not beyond):\n"
        "    numbers = torch.arange(keys, device=mask.device)\n"
        "    return torch.where(shown, numbers, -1).expand(batch, queries, keys)",
        ARGUMENTS + "a_mask_shows_what_it_shows_in_transformers",
    ),
    Mutant(
        "HF",
        "of a paged cache's mask the diagonal alone is read",
        "dsv4.integrations._cache:PagedTransformersCache._check",
        "same.all() & ~is_bias(mask)",
        "same.any()",
        ARGUMENTS + "a_paged_cache_refuses_masks_and_positions_that_it_would_not_obey",
    ),
    Mutant(
        "HF",
        "positions begin at 0 behind a filled cache",
        LAYERS + "attention:following_positions",
        "0 if past is None else past.get_seq_length(layer_idx)",
        "0",
        ARGUMENTS + "positions_follow_the_tokens_of_a_cache",
    ),
    Mutant(
        "HF",
        "changed rotary buffers are lost",
        "dsv4.integrations._swap:Plan.execute",
        "adopt_frequencies(swap.new, self.frequencies)",
        "",
        SETTINGS + "rotary_buffers_mean_what_they_mean_in_transformers",
    ),
    Mutant(
        "HF",
        "what transformers keeps in float32 is rounded",
        "dsv4.integrations._loading:_filled",
        "_float32_names(model)",
        "frozenset()",
        SETTINGS + "what_transformers_keeps_in_float32_stays_so",
    ),
    Mutant(
        "HF",
        "norms are rounded to the dtype of the model",
        "dsv4.checkpoint.options:Options.plain_dtype",
        "torch.promote_types(dtype, stored) if names.is_norm(name) else dtype",
        "dtype",
        SETTINGS + "loading_in_bfloat16_rounds_no_norm",
    ),
)
