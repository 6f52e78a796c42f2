"""Mistakes in packing and converting while a checkpoint is read."""

from __future__ import annotations

from .mutant import Mutant

MXFP4 = "dsv4/checkpoint/mxfp4.py"
OPTIONS = "dsv4/checkpoint/options.py"
SLOTS = "dsv4/checkpoint/expert_slots.py"
ITEMS = "dsv4/checkpoint/items.py"
PACKING = "dsv4/checkpoint/packing.py"
FILLING = "dsv4/checkpoint/filling.py"
TESTS = "tests/test_load_packed.py::"
MXFP4_TESTS = "tests/test_load_mxfp4.py::"
CONVERTED = MXFP4_TESTS + "TestMxfp4::test_is_converted_where_no_value_changes"
RETURNS = MXFP4_TESTS + "TestMxfp4::test_comes_back_as_it_was"

MUTANTS = (
    Mutant(
        "load",
        "values that NVFP4 does not have are rounded unasked",
        OPTIONS,
        "        exact = to_nvfp4(value)\n",
        "        exact = to_nvfp4(value, rounds=True)\n",
        CONVERTED,
    ),
    Mutant(
        "load",
        "gate and up that could share a global scale have one each",
        SLOTS,
        "        if pair is not None:\n",
        "        if False:\n",
        CONVERTED,
    ),
    Mutant(
        "load",
        "up takes the rows of gate",
        MXFP4,
        "_rows(both, gate.rows, both.rows))",
        "_rows(both, 0, gate.rows))",
        CONVERTED,
    ),
    Mutant(
        "load",
        "what stays MXFP4 is not said",
        MXFP4,
        "        if not self.inexact:\n",
        "        if self.inexact:\n",
        MXFP4_TESTS + "TestMxfp4::test_what_stays_is_said_once",
    ),
    Mutant(
        "load",
        "experts of two formats become one by leaving some unset",
        SLOTS,
        "        if others:\n",
        "        if False:\n",
        MXFP4_TESTS + "TestMxfp4::test_a_layer_of_two_formats_that_cannot_be_one_is_refused",
    ),
    Mutant(
        "load",
        "a block of 32 takes the scale of its first half",
        MXFP4,
        "    if not torch.equal(halves[..., 0], halves[..., 1]):\n",
        "    if False:\n",
        MXFP4_TESTS + "TestConversion::test_back_is_exact_or_refused",
    ),
    Mutant(
        "load",
        "a global scale that is no power of two is rounded to one",
        MXFP4,
        "    if mantissa != 0.5:\n",
        "    if mantissa < 0.5:\n",
        MXFP4_TESTS + "TestConversion::test_back_is_exact_or_refused",
    ),
    Mutant(
        "load",
        "exponents beyond E8M0 wrap",
        MXFP4,
        "(fraction == 0.5) & (powers >= -127) & (powers <= 127)",
        "(fraction == 0.5)",
        MXFP4_TESTS + "TestConversion::test_back_is_exact_or_refused",
    ),
    Mutant(
        "load",
        "converted experts are not stored as MXFP4 again",
        ITEMS,
        '    if getattr(module, "format", None) != NVFP4 or formats != {MXFP4}:\n',
        "    if formats:\n",
        RETURNS,
    ),
    Mutant(
        "load",
        "experts of a layer are stored in two formats",
        ITEMS,
        "        if back:\n",
        "        if slot.name[:3] == 'mtp' and all(to_mxfp4(p) is not None for p in parts):\n",
        MXFP4_TESTS + "TestMxfp4::test_a_layer_of_nvfp4_goes_back_as_a_whole_or_not_at_all",
    ),
    Mutant(
        "load",
        "NVIDIA's layout rounds MXFP4 silently",
        "dsv4/checkpoint/layouts.py",
        "            if not report.exact:\n",
        "            if False:\n",
        MXFP4_TESTS + "TestMxfp4::test_nvidias_layout_refuses_what_it_would_round",
    ),
    Mutant(
        "load",
        "layers are packed when all are read",
        FILLING,
        "                packer.pack(slot.module)\n\n        self._each_slot(Progress"
        '("loading", nbytes, self.progress), fill_slot)\n',
        "                pass\n\n        self._each_slot(Progress"
        '("loading", nbytes, self.progress), fill_slot)\n'
        "        for slot in self.slots:\n            if packer: packer.pack(slot.module)\n",
        TESTS + "TestPacked::test_each_layer_is_packed_before_the_next_is_read",
    ),
    Mutant(
        "load",
        "layers that go together are not joined",
        "dsv4/layers/pack.py",
        "                self.report.joined += group.join()\n",
        "                pass\n",
        TESTS + "TestPacked::test_is_what_pack_makes_of_it",
    ),
    Mutant(
        "load",
        "MXFP4 is converted where nothing is packed",
        PACKING,
        'return "lossless" if choice.experts_packed(device) else "keep"',
        'return "lossless"',
        TESTS + "TestDefault::test_experts_without_kernels_stay_as_they_are",
    ),
    Mutant(
        "load",
        "routed experts without a kernel are not warned of",
        PACKING,
        "        level = logging.WARNING if slow else logging.INFO\n",
        "        level = logging.INFO\n",
        TESTS + "TestDefault::test_a_layer_that_a_gpu_runs_slowly_is_a_warning",
    ),
    Mutant(
        "load",
        "all experts are read before the first is set",
        SLOTS,
        "        for expert, three in enumerate(experts):\n",
        "        held = [[options.read(e, device) for e in three] for three in experts]\n"
        "        for expert, three in enumerate(experts):\n",
        TESTS + "TestMemory::test_is_the_model_and_two_experts",
    ),
)
