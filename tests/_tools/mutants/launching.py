"""Mutants of plans, tapes and launches: each repeats something for tensors that are not alike."""

from __future__ import annotations

from .mutant import TRITON, Mutant

REPLAYED = "tests/ops/test_plans.py::test_replayed_launches_are_the_function"
CLASSES = "tests/triton/test_launcher.py::test_classes_of_scalars"
TRITONS_OWN = "tests/triton/test_launcher.py::test_launches_are_tritons_own"

MUTANTS = (
    Mutant(
        "P1",
        "a plan for tensors of any metadata",
        "dsv4.ops._plans:PlanCache.call",
        "plan.is_like(*tensors)",
        "True",
        "tests/ops/test_plans.py::test_bad_arguments_raise_as_ever",
    ),
    Mutant(
        "P1",
        "a plan for addresses of any alignment",
        "dsv4.ops._plans:PlanCache.call",
        "plan.remainders != remainders(addresses)",
        "False",
        "tests/ops/test_plans.py::test_alignment_has_plans_of_its_own",
    ),
    Mutant(
        "P1",
        "plans of tensors that want a gradient",
        "dsv4.ops._plans:are_plain",
        "type(t) not in _TENSORS or t.is_neg() or t.is_meta or (grad and t.requires_grad)",
        "type(t) not in _TENSORS or t.is_neg() or t.is_meta",
        "tests/ops/test_plans.py::test_only_plain_tensors_are_planned",
    ),
    Mutant(
        "P1",
        "0.0 and -0.0 in one plan",
        "dsv4.ops._plans:",
        "float.hex",
        "abs",
        "tests/ops/test_plans.py::test_equal_values_of_other_types_and_signs_are_apart",
    ),
    Mutant(
        "P1",
        "a plan whatever implementation is asked for",
        "dsv4.ops._plans:is_plain_call",
        "dispatch.is_free(backend) and dispatch.run is _RUN and (not _library.is_watched())",
        "dispatch.run is _RUN and (not _library.is_watched())",
        "tests/ops/test_plans.py::test_a_choice_by_name_is_heard",
    ),
    Mutant(
        "P1",
        "a plan although a profile watches",
        "dsv4.ops._plans:is_plain_call",
        "dispatch.is_free(backend) and dispatch.run is _RUN and (not _library.is_watched())",
        "dispatch.is_free(backend) and dispatch.run is _RUN",
        "tests/ops/test_plans.py::test_who_watches_sees_the_operator",
    ),
    Mutant(
        "P1",
        "plans that are kept for ever",
        "dsv4.ops._plans:PlanCache._add",
        "[plan, *self._plans.get(key, ())][:_MOST_OF_KEY]",
        "[plan, *self._plans.get(key, ())]",
        "tests/ops/test_plans.py::test_the_cache_is_bounded",
    ),
    Mutant(
        "P1",
        "a tensor that is given twice is taken for one",
        "dsv4.ops._plans:_recorded",
        "tensor.detach() if is_there else tensor",
        "tensor",
        "tests/ops/test_plans.py::test_a_tensor_given_twice_and_then_two",
    ),
    Mutant(
        "P1",
        "guards that overlook strides",
        "dsv4.ops._guards:_metadata",
        "(type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, "
        "tensor.requires_grad, tensor.is_inference(), tensor.is_neg(), "
        "torch.is_inference_mode_enabled())",
        "(type(tensor), tensor.dtype, tensor.shape, tensor.device, tensor.requires_grad, "
        "tensor.is_inference(), tensor.is_neg(), torch.is_inference_mode_enabled())",
        "tests/ops/test_plans.py::test_guards_tell_metadata_apart",
    ),
    Mutant(
        "P2",
        "a function that computes with tensors is repeated",
        "dsv4.plans.recorder:Recorder.__torch_dispatch__",
        "self.outside = str(func)",
        "pass",
        "tests/ops/test_plans.py::test_what_reads_or_changes_values_is_not_repeated",
    ),
    Mutant(
        "P2",
        "views begin where their tensors do",
        "dsv4.plans.recorder:Recorder._viewed",
        "location.offset + shift",
        "location.offset",
        "tests/ops/test_plans.py::test_views_are_found_again",
    ),
    Mutant(
        "P2",
        "a launch that nobody noted",
        "dsv4.plans.recorder:Recorder.driver_launched",
        "not self._is_noting",
        "False",
        "tests/ops/test_plans.py::test_driver_launches_tell_the_recorder",
    ),
    Mutant(
        "P2",
        "the first allocation in place of each",
        "dsv4.plans.recorder:Recorder._add",
        "len(self.tensors) + len(self.allocated)",
        "len(self.tensors)",
        REPLAYED,
    ),
    Mutant(
        "P3",
        "a kernel for aligned pointers, whatever they are",
        TRITON + "_runtime.launcher:FastKernel._launch",
        "(unaligned and tuple([address % _ALIGNMENT == 0 for address in addresses]), "
        "*map(_get_device, tensors), *map(_dtype, tensors), *map(scalar_class, scalars), "
        "*layout.constants(parts), *options.values())",
        "(*map(_get_device, tensors), *map(_dtype, tensors), *map(scalar_class, scalars), "
        "*layout.constants(parts), *options.values())",
        TRITONS_OWN,
    ),
    Mutant(
        "P3",
        "integers that are multiples of 16 and others alike",
        TRITON + "_runtime.launcher:integer_class",
        "(int, value == 1, value % _ALIGNMENT == 0, width)",
        "(int, value == 1, width)",
        TRITONS_OWN,
    ),
    Mutant(
        "P3",
        "1 is an integer like others",
        TRITON + "_runtime.launcher:integer_class",
        "(int, value == 1, value % _ALIGNMENT == 0, width)",
        "(int, value % _ALIGNMENT == 0, width)",
        CLASSES,
    ),
    Mutant(
        "P3",
        "integers of 32 and of 64 bits alike",
        TRITON + "_runtime.launcher:integer_class",
        "(int, value == 1, value % _ALIGNMENT == 0, width)",
        "(int, value == 1, value % _ALIGNMENT == 0)",
        CLASSES,
    ),
    Mutant(
        "P3",
        "any constants",
        TRITON + "_runtime.launcher:FastKernel._launch",
        "(unaligned and tuple([address % _ALIGNMENT == 0 for address in addresses]), "
        "*map(_get_device, tensors), *map(_dtype, tensors), *map(scalar_class, scalars), "
        "*layout.constants(parts), *options.values())",
        "(unaligned and tuple([address % _ALIGNMENT == 0 for address in addresses]), "
        "*map(_get_device, tensors), *map(_dtype, tensors), *map(scalar_class, scalars), "
        "*layout.constants(parts))",
        TRITONS_OWN,
    ),
    Mutant(
        "P3",
        "the grid of the launch before",
        TRITON + "_runtime.launcher:Launch.__call__",
        "mine.grid != grid",
        "mine.grid is None",
        TRITONS_OWN,
    ),
    Mutant(
        "P3",
        "no blocks begin early",
        TRITON + "_runtime.launcher:_Buffers.__init__",
        "programmatic if metadata.launch_pdl else plain",
        "plain",
        TRITONS_OWN,
    ),
)
