"""Mistakes of plans of whole layers: each repeats a step of a layer that is not as it was."""

from __future__ import annotations

from .mutant import LAYERS, Mutant

CHANGES = "tests/plans/test_layer_plan_changes.py::"
TESTS = "tests/plans/test_layer_plans.py::"
TAPES = "tests/plans/test_tape.py::"
CHANGE = CHANGES + "test_a_change_is_seen"


MUTANTS = (
    Mutant(
        "P4",
        "a class is not seen",
        LAYERS + "_layer_plan:Structure.tensors",
        "list(map(type, modules)) != self._types",
        "False",
        CHANGE,
    ),
    Mutant(
        "P4",
        "a forward of its own is not seen",
        LAYERS + "_layer_plan:Structure.tensors",
        "list(map(len, dicts)) != self._sizes",
        "False",
        CHANGE,
    ),
    Mutant(
        "P4",
        "an attribute is not seen",
        LAYERS + "_layer_plan:Structure.tensors",
        "[get(d) for get, d in zip(self._getters, dicts, strict=True)] != self._attributes",
        "False",
        CHANGE,
    ),
    Mutant(
        "P4",
        "a hook is not seen",
        LAYERS + "_layer_plan:Structure.tensors",
        "any(self._hooks)",
        "False",
        CHANGE,
    ),
    Mutant(
        "P4",
        "a submodule is not seen",
        LAYERS + "_layer_plan:Structure.tensors",
        "list(map(id, values)) == self._ids",
        "True",
        CHANGE,
    ),
    Mutant(
        "P4",
        "a parameter's strides are not seen",
        LAYERS + "_layer_plan:LayerPlans.run",
        "not plan.is_like(*tensors)",
        "False",
        CHANGES + "test_strides_have_plans_of_their_own",
    ),
    Mutant(
        "P4",
        "modules of others are planned",
        LAYERS + "_layer_plan:_check",
        "kind.__module__.split('.')[0] != 'dsv4'",
        "False",
        CHANGES + "test_modules_of_others_run_each_time",
    ),
    Mutant(
        "P4",
        "a parameter's alignment is not seen",
        LAYERS + "_layer_plan:LayerPlans.run",
        "plan.remainders != _plans.remainders(addresses)",
        "False",
        CHANGES + "test_alignment_has_plans_of_its_own",
    ),
    Mutant(
        "P4",
        "a class's forward is not seen",
        LAYERS + "_layer_plan:Structure.tensors",
        "list(map(_forward, self._classes)) != self._forwards",
        "False",
        CHANGES + "test_a_forward_of_a_class_is_seen",
    ),
    Mutant(
        "P4",
        "an empty table stays empty",
        LAYERS + "_layer_plan:Structure.tensors",
        "list(map(len, self._tables)) != self._lengths",
        "False",
        CHANGES + "test_tables_of_modules_are_compared",
    ),
    Mutant(
        "P4",
        "lists do not change",
        LAYERS + "_layer_plan:_check",
        "not (name in _IGNORED or name in rotary or _is_constant(value))",
        "False",
        CHANGES + "test_attributes_that_may_change_in_place_rule_plans_out",
    ),
    Mutant(
        "P4",
        "a plan although all modules have hooks",
        LAYERS + "_layer_plan:_is_plain",
        "type(streams) is torch.Tensor and streams.dim() == 4 and (streams.shape[0] == 1) "
        "and (streams.numel() > 0) and is_few(streams.shape[1]) and "
        "_plans.is_worth_it(streams) and _plans.is_plain_call('auto') and "
        "_OPTIONS.issuperset(options) and (options.get('position_ids') is None) and "
        "(options.get('attention_mask') is None) and (not any(_GLOBAL_HOOKS)) and (not "
        "(streams.is_cuda and torch.cuda.is_current_stream_capturing()))",
        "type(streams) is torch.Tensor and streams.dim() == 4 and (streams.shape[0] == 1) "
        "and (streams.numel() > 0) and is_few(streams.shape[1]) and "
        "_plans.is_worth_it(streams) and _plans.is_plain_call('auto') and "
        "_OPTIONS.issuperset(options) and (options.get('position_ids') is None) and "
        "(options.get('attention_mask') is None) and (not (streams.is_cuda and "
        "torch.cuda.is_current_stream_capturing()))",
        CHANGES + "test_hooks_of_all_modules_are_called",
    ),
    Mutant(
        "P4",
        "a plan whatever implementation is asked for",
        LAYERS + "_layer_plan:_is_plain",
        "type(streams) is torch.Tensor and streams.dim() == 4 and (streams.shape[0] == 1) "
        "and (streams.numel() > 0) and is_few(streams.shape[1]) and "
        "_plans.is_worth_it(streams) and _plans.is_plain_call('auto') and "
        "_OPTIONS.issuperset(options) and (options.get('position_ids') is None) and "
        "(options.get('attention_mask') is None) and (not any(_GLOBAL_HOOKS)) and (not "
        "(streams.is_cuda and torch.cuda.is_current_stream_capturing()))",
        "type(streams) is torch.Tensor and streams.dim() == 4 and (streams.shape[0] == 1) "
        "and (streams.numel() > 0) and is_few(streams.shape[1]) and "
        "_plans.is_worth_it(streams) and _OPTIONS.issuperset(options) and "
        "(options.get('position_ids') is None) and (options.get('attention_mask') is None) "
        "and (not any(_GLOBAL_HOOKS)) and (not (streams.is_cuda and "
        "torch.cuda.is_current_stream_capturing()))",
        CHANGES + "test_who_watches_sees_the_layer",
    ),
    Mutant(
        "P4",
        "positions beside a step",
        LAYERS + "_layer_plan:_is_plain",
        "type(streams) is torch.Tensor and streams.dim() == 4 and (streams.shape[0] == 1) "
        "and (streams.numel() > 0) and is_few(streams.shape[1]) and "
        "_plans.is_worth_it(streams) and _plans.is_plain_call('auto') and "
        "_OPTIONS.issuperset(options) and (options.get('position_ids') is None) and "
        "(options.get('attention_mask') is None) and (not any(_GLOBAL_HOOKS)) and (not "
        "(streams.is_cuda and torch.cuda.is_current_stream_capturing()))",
        "type(streams) is torch.Tensor and streams.dim() == 4 and (streams.shape[0] == 1) "
        "and (streams.numel() > 0) and is_few(streams.shape[1]) and "
        "_plans.is_worth_it(streams) and _plans.is_plain_call('auto') and "
        "_OPTIONS.issuperset(options) and (options.get('attention_mask') is None) and (not "
        "any(_GLOBAL_HOOKS)) and (not (streams.is_cuda and "
        "torch.cuda.is_current_stream_capturing()))",
        CHANGES + "test_arguments_of_other_kinds_are_not_planned",
    ),
    Mutant(
        "P4",
        "arguments that nobody knows",
        LAYERS + "_layer_plan:_is_plain",
        "type(streams) is torch.Tensor and streams.dim() == 4 and (streams.shape[0] == 1) "
        "and (streams.numel() > 0) and is_few(streams.shape[1]) and "
        "_plans.is_worth_it(streams) and _plans.is_plain_call('auto') and "
        "_OPTIONS.issuperset(options) and (options.get('position_ids') is None) and "
        "(options.get('attention_mask') is None) and (not any(_GLOBAL_HOOKS)) and (not "
        "(streams.is_cuda and torch.cuda.is_current_stream_capturing()))",
        "type(streams) is torch.Tensor and streams.dim() == 4 and (streams.shape[0] == 1) "
        "and (streams.numel() > 0) and is_few(streams.shape[1]) and "
        "_plans.is_worth_it(streams) and _plans.is_plain_call('auto') and "
        "(options.get('position_ids') is None) and (options.get('attention_mask') is None) "
        "and (not any(_GLOBAL_HOOKS)) and (not (streams.is_cuda and "
        "torch.cuda.is_current_stream_capturing()))",
        CHANGES + "test_arguments_of_other_kinds_are_not_planned",
    ),
    Mutant(
        "P4",
        "what a layer makes for others is left out",
        LAYERS + "_layer_plan:_recorded",
        "len(step._shared) != shared",
        "False",
        CHANGES + "test_what_a_layer_makes_for_a_step_rules_a_plan_out",
    ),
    Mutant(
        "P4",
        "tables of modules that are gone",
        LAYERS + "_layer_plan:_forget",
        "part.clear()",
        "pass",
        TESTS + "test_plans_keep_neither_modules_nor_tensors",
    ),
    Mutant(
        "P4",
        "a copy's plans are the layer's",
        LAYERS + "_layer_plan:run",
        "plans.owner() is not layer",
        "False",
        TESTS + "test_copies_have_plans_of_their_own",
    ),
    Mutant(
        "P4",
        "one plan for grad mode and others",
        LAYERS + "_layer_plan:_arguments",
        "_plans._is_grad_enabled()",
        "False",
        CHANGES + "test_gradients_are_wanted_of_the_layer",
    ),
    Mutant(
        "P4",
        "plans that are kept for ever",
        LAYERS + "_layer_plan:LayerPlans._first",
        "len(self.plans) >= _MOST",
        "False",
        TESTS + "test_plans_are_bounded",
    ),
    Mutant(
        "P4",
        "a layer is looked at before each call",
        LAYERS + "_layer_plan:LayerPlans._begin",
        "self.failures > _PATIENCE",
        "False",
        CHANGES + "test_a_layer_that_cannot_be_planned_is_seldom_looked_at",
    ),
    Mutant(
        "P4",
        "memory of two allocations overlaps",
        "dsv4.plans.tape:_arena",
        "offsets[slot - count] = total",
        "offsets[slot - count] = total // 2",
        TAPES + "test_memory_of_a_tape_is_that_of_the_call",
    ),
)
