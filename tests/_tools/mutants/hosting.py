"""Mutants of experts in host memory: the buffer through which those of long prompts pass."""

from __future__ import annotations

from .mutant import LAYERS, Mutant

STAGING = LAYERS + "_expert_staging:"
TESTS = "tests/layers/test_expert_staging.py::"
BITS = TESTS + "TestLayers::test_has_the_bits_of_all_resident_experts"
AHEAD = TESTS + "TestCopies::test_run_ahead_of_the_next_layer"
CHANGED = TESTS + "TestCopies::test_are_made_again_if_the_slots_changed"

MUTANTS = (
    Mutant(
        "hosted",
        "a copy does not wait for the GEMMs that read its half",
        STAGING + "ExpertStaging._start",
        "self._side.wait_event(half.read)",
        "",
        BITS,
    ),
    Mutant(
        "hosted",
        "the first copy does not wait for the former use of its memory",
        STAGING + "ExpertStaging._start",
        "self._side.wait_stream(current)",
        "",
        BITS,
    ),
    Mutant(
        "hosted",
        "GEMMs do not wait for the copy of their half",
        STAGING + "ExpertStaging.take",
        "torch.cuda.current_stream(self.device).wait_event(half.copied)",
        "pass",
        BITS,
    ),
    Mutant(
        "hosted",
        "copies that ran ahead are read though the slots changed",
        STAGING + "ExpertStaging.begin",
        "staged != upcoming[:len(staged)]",
        "False",
        CHANGED,
    ),
    Mutant(
        "hosted",
        "copies do not run ahead of the next layer",
        STAGING + "ExpertStaging.begin",
        "[*loads, *following]",
        "[*loads]",
        AHEAD,
    ),
)
