"""Mistakes of plans, tapes and launches: each repeats something for tensors that are not alike."""

from __future__ import annotations

from .mutant import Mutant

PLANS = "dsv4/ops/_plans.py"
RECORDER = "dsv4/plans/recorder.py"
LAUNCHER = "dsv4/triton/_runtime/launcher.py"
GUARDS = "dsv4/ops/_guards.py"
REPLAYED = "tests/test_plans.py::test_replayed_launches_are_the_function"
CLASSES = "tests/test_launcher.py::test_classes_of_scalars"
TRITONS_OWN = "tests/test_launcher.py::test_launches_are_tritons_own"

MUTANTS = (
    Mutant(
        "P1",
        "a plan for tensors of any metadata",
        PLANS,
        "            if plan.is_like(*tensors):\n",
        "            if True:\n",
        "tests/test_plans.py::test_bad_arguments_raise_as_ever",
    ),
    Mutant(
        "P1",
        "a plan for addresses of any alignment",
        PLANS,
        "                if plan.remainders != remainders(addresses):\n",
        "                if False:\n",
        "tests/test_plans.py::test_alignment_has_plans_of_its_own",
    ),
    Mutant(
        "P1",
        "plans of tensors that want a gradient",
        PLANS,
        "t.is_meta or (grad and t.requires_grad)",
        "t.is_meta",
        "tests/test_plans.py::test_only_plain_tensors_are_planned",
    ),
    Mutant(
        "P1",
        "0.0 and -0.0 in one plan",
        PLANS,
        "    return value or str(value)\n",
        "    return value\n",
        "tests/test_plans.py::test_equal_values_of_other_types_and_signs_are_apart",
    ),
    Mutant(
        "P1",
        "a plan whatever implementation is asked for",
        PLANS,
        "    return dispatch.is_free(backend) and ",
        "    return ",
        "tests/test_plans.py::test_a_choice_by_name_is_heard",
    ),
    Mutant(
        "P1",
        "a plan although a profile watches",
        PLANS,
        " and not _library.is_watched()",
        "",
        "tests/test_plans.py::test_who_watches_sees_the_operator",
    ),
    Mutant(
        "P1",
        "plans that are kept for ever",
        PLANS,
        "[plan, *self._plans.get(key, ())][:_MOST_OF_KEY]",
        "[plan, *self._plans.get(key, ())]",
        "tests/test_plans.py::test_the_cache_is_bounded",
    ),
    Mutant(
        "P1",
        "a tensor that is given twice is taken for one",
        PLANS,
        "tensor.detach() if is_there else tensor",
        "tensor",
        "tests/test_plans.py::test_a_tensor_given_twice_and_then_two",
    ),
    Mutant(
        "P1",
        "guards that overlook strides",
        GUARDS,
        "        tensor.stride(),\n",
        "",
        "tests/test_plans.py::test_guards_tell_metadata_apart",
    ),
    Mutant(
        "P2",
        "a function that computes with tensors is repeated",
        RECORDER,
        "                self.outside = str(func)\n",
        "                pass\n",
        "tests/test_plans.py::test_what_reads_or_changes_values_is_not_repeated",
    ),
    Mutant(
        "P2",
        "views begin where their tensors do",
        RECORDER,
        "Place(place.slot, place.offset + shift)",
        "Place(place.slot, place.offset)",
        "tests/test_plans.py::test_views_are_found_again",
    ),
    Mutant(
        "P2",
        "a launch that nobody noted",
        RECORDER,
        "        if not self._is_noting:\n            self.refuse",
        "        if False:\n            self.refuse",
        "tests/test_plans.py::test_driver_launches_tell_the_recorder",
    ),
    Mutant(
        "P2",
        "the first allocation in place of each",
        RECORDER,
        "        slot = len(self.tensors) + len(self.allocated)\n",
        "        slot = len(self.tensors)\n",
        REPLAYED,
    ),
    Mutant(
        "P3",
        "a kernel for aligned pointers, whatever they are",
        LAUNCHER,
        "            unaligned and tuple([address % _ALIGNMENT == 0 for address in addresses]),\n",
        "",
        TRITONS_OWN,
    ),
    Mutant(
        "P3",
        "integers that are multiples of 16 and others alike",
        LAUNCHER,
        "value == 1, value % _ALIGNMENT == 0, width)",
        "value == 1, width)",
        TRITONS_OWN,
    ),
    Mutant(
        "P3",
        "1 is an integer like others",
        LAUNCHER,
        "(int, value == 1, value",
        "(int, value",
        CLASSES,
    ),
    Mutant(
        "P3",
        "integers of 32 and of 64 bits alike",
        LAUNCHER,
        "value % _ALIGNMENT == 0, width)",
        "value % _ALIGNMENT == 0)",
        CLASSES,
    ),
    Mutant(
        "P3",
        "any constants",
        LAUNCHER,
        "            *options.values(),\n        )\n",
        "        )\n",
        TRITONS_OWN,
    ),
    Mutant(
        "P3",
        "the grid of the launch before",
        LAUNCHER,
        "        if mine.grid != grid:\n",
        "        if mine.grid is None:\n",
        TRITONS_OWN,
    ),
    Mutant(
        "P3",
        "no blocks begin early",
        LAUNCHER,
        "(programmatic if metadata.launch_pdl else plain)()",
        "plain()",
        TRITONS_OWN,
    ),
)
