"""Mutants in packing and converting while a checkpoint is read."""

from __future__ import annotations

from .mutant import LAYERS, Mutant

MXFP4 = "dsv4/_checkpoint/mxfp4.py"
TESTS = "tests/checkpoint/test_load_packed.py::"
MXFP4_TESTS = "tests/checkpoint/test_load_mxfp4.py::"
CONVERTED = MXFP4_TESTS + "TestMxfp4::test_is_converted_where_no_value_changes"
RETURNS = MXFP4_TESTS + "TestMxfp4::test_comes_back_as_it_was"

MUTANTS = (
    Mutant(
        "load",
        "values that NVFP4 does not have are rounded unasked",
        "dsv4.checkpoint.options:Options.converted",
        "to_nvfp4(value)",
        "to_nvfp4(value, rounds=True)",
        CONVERTED,
    ),
    Mutant(
        "load",
        "gate and up that could share a global scale have one each",
        "dsv4.checkpoint.expert_slots:_converted",
        "pair is not None",
        "False",
        CONVERTED,
    ),
    Mutant(
        "load",
        "up takes the rows of gate",
        "dsv4.checkpoint.mxfp4:pair_to_nvfp4",
        "_rows(both, gate.rows, both.rows)",
        "_rows(both, 0, gate.rows)",
        CONVERTED,
    ),
    Mutant(
        "load",
        "what stays MXFP4 is not said",
        "dsv4.checkpoint.mxfp4:Conversion.report",
        "not self.inexact",
        "self.inexact",
        MXFP4_TESTS + "TestMxfp4::test_what_stays_is_said_once",
    ),
    Mutant(
        "load",
        "experts of two formats become one by leaving some unset",
        "dsv4.checkpoint.expert_slots:ExpertsSlot._check_alike",
        "if others:\n"
        '    raise CheckpointError(f"{self.name}: experts are MXFP4 and {others[0].kind}, '
        "wanted one format in a layer; {options.conversion.inexact[-1]} has values that "
        "NVFP4 does not: pass mxfp4='nvfp4' to round them\")",
        "if False:\n"
        '    raise CheckpointError(f"{self.name}: experts are MXFP4 and {others[0].kind}, '
        "wanted one format in a layer; {options.conversion.inexact[-1]} has values that "
        "NVFP4 does not: pass mxfp4='nvfp4' to round them\")",
        MXFP4_TESTS + "TestMxfp4::test_a_layer_of_two_formats_that_cannot_be_one_is_refused",
    ),
    Mutant(
        "load",
        "a block of 32 takes the scale of its first half",
        "dsv4.checkpoint.mxfp4:to_mxfp4",
        "not torch.equal(halves[..., 0], halves[..., 1])",
        "False",
        MXFP4_TESTS + "TestConversion::test_back_is_exact_or_refused",
    ),
    Mutant(
        "load",
        "a global scale that is no power of two is rounded to one",
        "dsv4.checkpoint.mxfp4:to_mxfp4",
        "mantissa != 0.5",
        "mantissa < 0.5",
        MXFP4_TESTS + "TestConversion::test_back_is_exact_or_refused",
    ),
    Mutant(
        "load",
        "exponents beyond E8M0 wrap",
        "dsv4.checkpoint.mxfp4:to_mxfp4",
        "(fraction == 0.5) & (powers >= -127) & (powers <= 127)",
        "fraction == 0.5",
        MXFP4_TESTS + "TestConversion::test_back_is_exact_or_refused",
    ),
    Mutant(
        "load",
        "converted experts are not stored as MXFP4 again",
        "dsv4.checkpoint.items:_returns",
        "getattr(module, 'format', None) != NVFP4 or formats != {MXFP4}",
        "formats",
        RETURNS,
    ),
    Mutant(
        "load",
        "experts of a layer are stored in two formats",
        "dsv4.checkpoint.items:_experts_items",
        "if back:\n    parts = tuple(map(to_mxfp4, parts))",
        "if slot.name[:3] == 'mtp' and all((to_mxfp4(p) is not None for p in parts)):\n"
        "    parts = tuple(map(to_mxfp4, parts))",
        MXFP4_TESTS + "TestMxfp4::test_a_layer_of_nvfp4_goes_back_as_a_whole_or_not_at_all",
    ),
    Mutant(
        "load",
        "NVIDIA's layout rounds MXFP4 silently",
        "dsv4.checkpoint.layouts:Layout.convert",
        "not report.exact",
        "False",
        MXFP4_TESTS + "TestMxfp4::test_nvidias_layout_refuses_what_it_would_round",
    ),
    Mutant(
        "load",
        "layers are packed when all are read",
        "dsv4.checkpoint.filling:_Filling.run",
        "if packer is not None:\n    packer.pack(slot.module)",
        "if packer is not None and slot is self.slots[-1]:\n"
        "    for other in self.slots:\n"
        "        packer.pack(other.module)",
        TESTS + "TestPacked::test_each_layer_is_packed_before_the_next_is_read",
    ),
    Mutant(
        "load",
        "layers that go together are not joined",
        LAYERS + "pack:Packer.pack",
        "self.report.joined += group.join()",
        "pass",
        TESTS + "TestPacked::test_is_what_pack_makes_of_it",
    ),
    Mutant(
        "load",
        "MXFP4 is converted where nothing is packed",
        "dsv4.checkpoint.packing:mxfp4_mode",
        "'lossless' if choice.experts_packed(device) else 'keep'",
        "'lossless'",
        TESTS + "TestDefault::test_layers_without_kernels_stay_as_they_are",
    ),
    Mutant(
        "load",
        "routed experts without a kernel are not warned of",
        "dsv4.checkpoint.packing:report_packing",
        "logging.WARNING if slow else logging.INFO",
        "logging.INFO",
        TESTS + "TestDefault::test_a_layer_that_a_gpu_runs_slowly_is_a_warning",
    ),
    Mutant(
        "load",
        "all experts are read before the first is set",
        "dsv4.checkpoint.expert_slots:ExpertsSlot._fill_quantised",
        "before = len(options.conversion.inexact)\n"
        "for expert, three in enumerate(experts):\n"
        "    matrices = _converted(three, [options.read(e, device) for e in three], options)\n"
        "    if matrices is not None:\n"
        "        own = None if scales is None else scales.of(expert)\n"
        "        self.module.set_expert(expert, *matrices, input_scales=own)",
        "before = len(options.conversion.inexact)\n"
        "held = [[options.read(e, device) for e in three] for three in experts]\n"
        "for expert, three in enumerate(experts):\n"
        "    matrices = _converted(three, [options.read(e, device) for e in three], options)\n"
        "    if matrices is not None:\n"
        "        own = None if scales is None else scales.of(expert)\n"
        "        self.module.set_expert(expert, *matrices, input_scales=own)",
        TESTS + "TestMemory::test_is_the_model_and_two_experts",
    ),
)
