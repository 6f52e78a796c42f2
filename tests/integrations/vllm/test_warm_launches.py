"""No step under vLLM waits for a compiler: its kernels are among those of the plugin's warm-up.

Launches are listed in a process in which Triton is not interpreted; see ``launches_process``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM 0.33 is not installed; make test-vllm has it")

from dsv4.cute.sm90.gemm_fp8_wgmma_plan import fp8_plan
from dsv4.cute.sm90.plans import GemmProblem
from dsv4.integrations.vllm import warm
from tests.integrations.vllm import engine_process, launches_process
from tests.integrations.vllm.launches_process import (
    ANSWER,
    DSPARK,
    MAIN,
    MTP,
    Setting,
    Step,
    asked,
)

_ROOT = Path(__file__).resolve().parents[3]
MOST, SEQUENCES = 2048, 16
ENGINE = {"max_len": 4096, "max_tokens": MOST, "max_sequences": SEQUENCES}
_CAPTURED = 512  # most tokens of a captured graph


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """Names the kernels of a step that the warm-up does not launch."""
    folder = tmp_path_factory.mktemp("launches")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = engine_process.environment("V1")
    environment |= {"DSV4_VLLM": "all", "DSV4_VLLM_CHECK": "0", "PYTHONPATH": str(_ROOT)}
    environment |= {"DSV4_CACHE_DIR": str(folder / "cache")}
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", launches_process.__name__, str(port), str(folder)],
            env={key: value for key, value in environment.items() if key != "TRITON_INTERPRET"},
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(setting, step):
        print(asked(setting, step), file=process.stdin, flush=True)
        for line in process.stdout:
            if line.startswith(ANSWER):
                answer = json.loads(line.removeprefix(ANSWER))
                assert answer["warm"] > 20
                return answer["late"]
        raise AssertionError(log.read_text()[-6000:])

    yield ask
    process.kill()
    process.wait()


@st.composite
def steps(draw, most=MOST):
    """A step with any number of tokens, of sequences of any length that the engine takes."""
    tokens = draw(st.one_of(st.integers(1, 64), st.integers(1, most)))
    fewest = -(-tokens // SEQUENCES)
    longest = draw(st.one_of(st.integers(fewest, 2048), st.integers(fewest, ENGINE["max_len"])))
    padding = draw(st.integers(0, min(16, most - tokens)))
    how = draw(st.sampled_from(("eager", "captured", "pieces"))) if tokens <= _CAPTURED else "eager"
    prefilled = draw(st.one_of(st.just(0), st.just(tokens), st.integers(0, tokens)))
    return Step(tokens, longest, padding, how == "captured", how == "pieces", prefilled)


@pytest.mark.slow
@pytest.mark.costly(3)
@pytest.mark.parametrize("drafts", ["", DSPARK])
@given(step=steps())
# Two prompts that are shorter than the step.
@example(step=Step(2000, 1030))
@example(step=Step(1500, 512))
# Few tokens in a graph with eager pieces, while all entries are taken.
@example(step=Step(11, 1030, 5, pieces=True))
# No multiple of 16, and neither few nor many tiles of columns.
@example(step=Step(130, 130, prefilled=130))
@example(step=Step(67, 4000, 0, captured=True))
@settings(deadline=None)
def test_any_step_launches_what_the_warm_up_launches(late, drafts, step):
    assert late(Setting(MAIN, drafts, **ENGINE), step) == []


@pytest.mark.slow
@pytest.mark.costly(3)
@pytest.mark.parametrize("model", [MTP, DSPARK])
@given(step=steps())
@example(step=Step(1500, 2000, prefilled=1500))
@settings(deadline=None)
def test_neither_does_a_draft_launch_others(late, model, step):
    assert late(Setting(model, **ENGINE), step) == []


@pytest.mark.slow
@pytest.mark.costly(2)
@given(step=steps())
@example(step=Step(2000, 1030))
@example(step=Step(11, 1030, 5, pieces=True))
@settings(deadline=None, max_examples=10)
def test_nor_does_one_of_several_ranks(late, step):
    """It has half the heads and half the columns of each expert."""
    assert late(Setting(ranks=2, **ENGINE), step) == []


@pytest.mark.slow
@given(step=steps(most=600))
@example(step=Step(200, 300))
@settings(deadline=None, max_examples=10)
def test_tables_are_as_wide_as_the_engine_makes_them(late, step):
    """Sequences of 1000 tokens have tables for 1024."""
    sizes = {"max_len": 1000, "max_tokens": 600, "max_sequences": SEQUENCES}
    longest = min(step.longest, 1000)
    assert late(Setting(**sizes), Step(step.tokens, longest, step.padding)) == []


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["", DSPARK])
def test_every_number_of_tokens(late, drafts):
    """With each width of tables in turn."""
    widths = [256, 512, 1024, 2048, 4096]
    for tokens in range(1, MOST + 1):
        able = [width for width in widths if tokens <= width * SEQUENCES]
        step = Step(tokens, able[tokens % len(able)], pieces=tokens <= _CAPTURED)
        assert late(Setting(MAIN, drafts, **ENGINE), step) == [], step


# Rows and columns of the FP8 layers of Flash: of layers, then of the input of DSpark and its
# contexts' entries.
LINEARS = (
    *((1536, 4096, 1), (32768, 1024, 1), (8192, 4096, 8), (4096, 8192, 1), (4096, 4096, 1)),
    *((4096, 2048, 1), (8192, 1024, 1), (4096, 12288, 1), (1536, 4096, 1)),
)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("sizes", LINEARS)
def test_linear_layers_run_every_kernel_of_their_sizes(sizes, folded):
    """Whatever is compiled before: of drafts, as well."""
    problem = GemmProblem(*sizes, False, False)
    most = 4096 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 1024
    needed = {fp8_plan(problem, tokens, folded) for tokens in range(1, most + 1)}
    warmed = {fp8_plan(problem, tokens, folded) for tokens in warm.linear_token_counts(most)}
    assert needed == warmed
