"""Mistakes of plans of whole layers: each repeats a step of a layer that is not as it was."""

from __future__ import annotations

from .mutant import Mutant

PLAN = "dsv4/layers/_layer_plan.py"
TAPE = "dsv4/plans/tape.py"
CHANGES = "tests/plans/test_layer_plan_changes.py::"
TESTS = "tests/plans/test_layer_plans.py::"
TAPES = "tests/plans/test_tape.py::"
CHANGE = CHANGES + "test_a_change_is_seen"


def _plan(words: str, old: str, new: str, test: str) -> Mutant:
    return Mutant("P4", words, PLAN, old, new, test)


def _unseen(what: str, old: str, new: str) -> Mutant:
    return Mutant("P4", f"{what} is not seen", PLAN, old, new, CHANGE)


MUTANTS = (
    _unseen("a class", "list(map(type, modules)) != self._types", "False"),
    _unseen("a forward of its own", "list(map(len, dicts)) != self._sizes", "False"),
    _unseen(
        "an attribute",
        "[get(d) for get, d in zip(self._getters, dicts, strict=True)] != self._attributes",
        "False",
    ),
    _unseen("a hook", "any(self._hooks)", "False"),
    _unseen("a submodule", "list(map(id, values)) == self._ids", "True"),
    _plan(
        "a parameter's strides are not seen",
        "if not plan.is_like(*tensors):",
        "if False:",
        CHANGES + "test_strides_have_plans_of_their_own",
    ),
    _plan(
        "modules of others are planned",
        'if kind.__module__.split(".")[0] != "dsv4":',
        "if False:",
        CHANGES + "test_modules_of_others_run_each_time",
    ),
    _plan(
        "a parameter's alignment is not seen",
        "if plan.remainders != _plans.remainders(addresses):",
        "if False:",
        CHANGES + "test_alignment_has_plans_of_its_own",
    ),
    _plan(
        "a class's forward is not seen",
        "list(map(_forward, self._classes)) != self._forwards",
        "False",
        CHANGES + "test_a_forward_of_a_class_is_seen",
    ),
    _plan(
        "an empty table stays empty",
        "list(map(len, self._tables)) != self._lengths",
        "False",
        CHANGES + "test_tables_of_modules_are_compared",
    ),
    _plan(
        "lists do not change",
        "if not (name in _IGNORED or name in rotary or _is_constant(value)):",
        "if False:",
        CHANGES + "test_attributes_that_may_change_in_place_rule_plans_out",
    ),
    _plan(
        "a plan although all modules have hooks",
        "        and not any(_GLOBAL_HOOKS)\n",
        "",
        CHANGES + "test_hooks_of_all_modules_are_called",
    ),
    _plan(
        "a plan whatever implementation is asked for",
        '        and _plans.is_plain_call("auto")\n',
        "",
        CHANGES + "test_who_watches_sees_the_layer",
    ),
    _plan(
        "positions beside a step",
        '        and options.get("position_ids") is None\n',
        "",
        CHANGES + "test_arguments_of_other_kinds_are_not_planned",
    ),
    _plan(
        "arguments that nobody knows",
        "        and _OPTIONS.issuperset(options)\n",
        "",
        CHANGES + "test_arguments_of_other_kinds_are_not_planned",
    ),
    _plan(
        "what a layer makes for others is left out",
        "if len(step._shared) != shared:",
        "if False:",
        CHANGES + "test_what_a_layer_makes_for_a_step_rules_a_plan_out",
    ),
    _plan(
        "tables of modules that are gone",
        "        part.clear()\n",
        "        pass\n",
        TESTS + "test_plans_keep_neither_modules_nor_tensors",
    ),
    _plan(
        "a copy's plans are the layer's",
        "or plans.owner() is not layer:",
        "or False:",
        TESTS + "test_copies_have_plans_of_their_own",
    ),
    _plan(
        "one plan for grad mode and others",
        "_plans._is_grad_enabled()",
        "False",
        CHANGES + "test_gradients_are_wanted_of_the_layer",
    ),
    _plan(
        "plans that are kept for ever",
        "if len(self.plans) >= _MOST:",
        "if False:",
        TESTS + "test_plans_are_bounded",
    ),
    _plan(
        "a layer is looked at before each call",
        "if self.failures > _PATIENCE:",
        "if False:",
        CHANGES + "test_a_layer_that_cannot_be_planned_is_seldom_looked_at",
    ),
    Mutant(
        "P4",
        "memory of two allocations overlaps",
        TAPE,
        "        offsets[slot - count] = total\n",
        "        offsets[slot - count] = total // 2\n",
        TAPES + "test_memory_of_a_tape_is_that_of_the_call",
    ),
)
