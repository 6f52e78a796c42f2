"""What fits on which GPUs: figures against those worked out by hand in the design notes."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch

import dsv4
from dsv4 import ModelConfig
from dsv4 import __main__ as command_line
from dsv4.bench.suites.model.document import parse
from dsv4.checkpoint import Checkpoint, save
from dsv4.parallel import planner
from dsv4.parallel.planner import Machine, Plan, StepParts, Weights, plan, token_ms
from dsv4.testing.ranks import run_ranks
from tests.parallel.cases import WIDE, model

FLASH, PRO = ModelConfig.flash(), ModelConfig.pro()
# Per number of ranks and mode: GB left and sequences on H100, H200, B200, B300; None: does not fit.
FITS = {
    "flash": {
        (1, "tp"): (None, None, (9, 19), (117, 244)),
        (2, "tp"): (None, (60, 125), (91, 189), (199, 414)),
        (2, "dp"): (None, (56, 234), (87, 362), (195, 812)),
        (4, "tp"): ((36, 74), (101, 210), (132, 274), (240, 499)),
        (4, "dp"): ((30, 248), (95, 792), (126, 1048), (234, 1948)),
        (8, "tp"): ((56, 116), (121, 252), (152, 317), (260, 542)),
        (8, "dp"): ((49, 816), (115, 1912), (146, 2424), (254, 4224)),
    },
    "pro": {
        (4, "tp"): (None, None, None, (55, 79)),
        (4, "dp"): (None, None, None, (36, 204)),
        (8, "tp"): (None, (28, 40), (59, 84), (167, 241)),
        (8, "dp"): (None, (6, 64), (37, 424), (145, 1672)),
        (16, "tp"): ((18, 26), (84, 121), (114, 166), (222, 323)),
    },
}


@pytest.fixture(scope="module")
def weights():
    """Of both models in NVIDIA's formats."""
    return {name: Weights.of_config(getattr(ModelConfig, name)()) for name in FITS}


@pytest.mark.parametrize(
    ("name", "routed", "split", "replicated", "embedding", "expert"),
    [("flash", 155.83, 5.41, 1.30, 1.06, 14.156), ("pro", 870.41, 21.43, 3.54, 1.85, 37.159)],
)
def test_weights_by_how_they_are_split(weights, name, routed, split, replicated, embedding, expert):
    """The notes leave out hash tables, which are 19 MB."""
    result = weights[name]
    assert result.routed / 1e9 == pytest.approx(routed, abs=0.005)
    assert result.split / 1e9 == pytest.approx(split, abs=0.006)
    assert result.replicated / 1e9 == pytest.approx(replicated, abs=0.025)
    assert result.embedding / 1e9 == pytest.approx(embedding, abs=0.005)
    assert result.head == result.embedding
    assert result.expert / 1e6 == pytest.approx(expert, abs=0.0005)


@pytest.mark.parametrize(
    ("name", "mode", "gigabytes"),
    [
        ("flash", "tp", (83.0, 42.1, 21.7, 11.5)),
        ("flash", "dp", (86.7, 47.8, 28.3, 18.6)),
        ("pro", "tp", (451, 227, 115.5, 59.5)),
        ("pro", "dp", (464, 246, 137.5, 83.1)),
    ],
)
def test_weights_of_a_rank(weights, name, mode, gigabytes):
    for ranks, expected in zip((2, 4, 8, 16), gigabytes, strict=True):
        result = weights[name].of_rank(ranks, mode) / 1e9
        assert result == pytest.approx(expected, abs=0.5 if expected > 200 else 0.075)


@pytest.mark.parametrize(
    ("name", "case", "gpu"),
    [
        (name, case, gpu)
        for name, cases in FITS.items()
        for case, gpu in itertools.product(cases, range(4))
    ],
)
def test_what_fits(weights, name, case, gpu):
    ranks, mode = case
    config = getattr(ModelConfig, name)()
    uncut = dataclasses.replace(weights[name], matrices=())  # as if blocks were padded
    result = plan(config, uncut, Machine(ranks, list(planner.GPUS)[gpu]), mode)
    expected = FITS[name][case][gpu]
    assert result.fits == (expected is not None)
    if expected is not None:
        assert result.left / 1e9 == pytest.approx(expected[0], abs=0.55)
        assert result.sequences == pytest.approx(expected[1], abs=max(ranks, 0.01 * expected[1]))


def test_a_sequence():
    """KV per token, and what does not depend on its length."""
    for config, of_token, fixed in ((FLASH, 3514, 19.6e6), (PRO, 5031, 29.1e6)):
        empty = planner.sequence_bytes(config, 0)
        assert empty == pytest.approx(fixed, rel=0.011)
        assert planner.sequence_bytes(config, 1 << 20) - empty == pytest.approx(
            of_token * (1 << 20),
            rel=0.002,  # pages are padded
        )


def test_experts_of_the_busiest_rank():
    assert [planner.largest_share(FLASH, n) for n in (1, 2, 4, 8)] == pytest.approx(
        [6, 3.93, 2.80, 2.16], abs=0.005
    )


def test_the_share_is_that_of_drawn_experts():
    drawn = torch.rand(4000, 8, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :3]
    counts = torch.nn.functional.one_hot(drawn // 2, 4).sum(1)
    config = ModelConfig.tiny(num_experts_per_tok=3)
    assert planner.largest_share(config, 4) == pytest.approx(
        counts.amax(1).float().mean().item(), rel=0.02
    )


# The notes' bytes: NVFP4 in what is split, FP8 in what every rank has, as the measured model then.
NOTED = Weights(155.83e9, 4.12e9 - 1.059e9, 1.30e9, 1.059e9, 1.059e9, 3.65e9 / 258)


@pytest.mark.parametrize(
    ("gpu", "ms"), [("H100", (5.24, 4.60, 4.05, 3.92)), ("H200", (4.38, 4.06, 3.66, 3.63))]
)
def test_time_of_a_token(gpu, ms):
    result = [token_ms(FLASH, NOTED, Machine(ranks, gpu)) for ranks in (1, 2, 4, 8)]
    assert result == pytest.approx(ms, abs=0.0075)
    of_preset = Weights.of_config(FLASH, "nvfp4")
    for ranks, expected in zip((1, 2, 4, 8), ms, strict=True):
        assert token_ms(FLASH, of_preset, Machine(ranks, gpu)) == pytest.approx(expected, abs=0.08)


RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.skipif(not RESULTS.exists(), reason="no results beside the package")
def test_computed_steps_are_near_those_that_were_measured():
    """With the bytes that a step read, at the measured rate of the same run."""
    compared = 0
    for path in RESULTS.glob("*/*-model_*_tp*.json"):
        measured = parse(json.loads(path.read_text()))
        steps = {row.context: row for row in measured.rows if row.tokens == 1}
        for computed in measured.expected:
            row = steps[computed.context]
            assert computed.total == pytest.approx(row.step_ms, rel=0.15), path.name
            parts = StepParts.of(row.model.layers, row.model.ranks, row.bytes_ms)
            assert parts.total == pytest.approx(computed.total, rel=1e-6), "the constants changed"
            compared += 1
    assert compared >= 4
    step = token_ms(FLASH, Weights.of_config(FLASH, "nvfp4"), Machine(2, "H200"))
    assert step == pytest.approx(4.09, rel=0.05)


def test_time_of_a_token_of_pro(weights):
    assert token_ms(PRO, weights["pro"], Machine(8, "H200")) == pytest.approx(6.7, abs=0.05)
    assert token_ms(PRO, weights["pro"], Machine(16, "H200")) is None


def test_what_cannot_be_divided(weights):
    result = plan(FLASH, weights["flash"], Machine(3, "H100"), "tp")
    assert not result.fits
    assert str(result) == (
        "tp: not possible, 3 ranks do not divide 256 experts and 8 o_groups and 2048 columns of "
        "the shared expert and 129280 rows of the vocabulary"
    )
    assert plan(FLASH, weights["flash"], Machine(16, "H100"), "tp").refused == (
        "16 ranks do not divide 8 o_groups"
    )
    assert plan(FLASH, weights["flash"], Machine(16, "H100"), "dp").fits


def test_blocks_that_would_be_cut(weights):
    """FP8 blocks of Pro's shared expert forbid 16 ranks; NVFP4 blocks and tiles do not."""
    machine = Machine(16, "H200")
    result = plan(PRO, weights["pro"], machine, "tp")
    assert not result.fits
    assert str(result) == (
        "tp: not possible, model.layers.0.mlp.shared_experts.gate_proj.weight has 3072 rows, 192 "
        "on each of 16 ranks, wanted a multiple of 128 there, because fp8_block blocks are not cut"
    )
    assert plan(PRO, weights["pro"], machine, "dp").fits
    assert plan(PRO, Weights.of_config(PRO, "nvfp4"), machine, "tp").fits


@pytest.mark.parametrize("inner", [128, 256])
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_not_possible_is_what_load_refuses(tmp_path, inner, ranks):
    config = WIDE.replace(moe_intermediate_size=inner)
    save(model(config, torch.bfloat16), tmp_path, layout="nvidia")
    with Checkpoint.open(tmp_path) as checkpoint:
        planned = plan(config, Weights.of_checkpoint(checkpoint), Machine(ranks, "B300"), "tp")
    try:
        run_ranks(
            ranks,
            lambda c: dsv4.load(tmp_path, device_mesh=c, parallel="tp", pack=False, progress=False),
        )
    except ValueError as error:
        said = str(error).removeprefix("parallel: ")
        assert planned.refused is not None
        assert "do not divide" in planned.refused or planned.refused == said
    else:
        assert planned.refused is None
    assert (planned.refused is None) == (inner == 256 and ranks == 2)


def test_what_does_not_fit_says_by_how_much():
    result = Plan(Machine(2, "H100"), "tp", None, 83e9, -5.3e9)
    assert str(result) == "tp: does not fit, 83.0 GB of weights per rank, 5.3 GB too few"


@pytest.mark.parametrize("text", ["", "4x", "0xH100", "4xA100", "x4H100", "4 H100"])
def test_bad_machines(text):
    with pytest.raises(ValueError, match="is no machine, wanted a number and one of H100, H200"):
        Machine.parse(text)


def test_bad_names(weights):
    assert Machine.parse("4xh100") == Machine(4, "H100")
    assert Machine.parse("B300") == Machine(1, "B300")
    with pytest.raises(ValueError, match="mode is 'pp', wanted one of tp, dp"):
        plan(FLASH, weights["flash"], Machine(1, "B300"), "pp")
    with pytest.raises(ValueError, match="recipe is 'fp4', wanted one of nvidia, nvfp4"):
        Weights.of_config(FLASH, "fp4")


def test_inspect_of_a_preset(capsys):
    assert command_line.main(["inspect", "--preset", "flash", "--gpus", "4xH100"]) == 0
    first, machine, tp, dp = capsys.readouterr().out.splitlines()
    assert first == "flash, formats as 'nvidia', without draft layers"
    assert machine.startswith("4 x H100 (83.7 GB each")
    assert machine.endswith("computed, not measured:")
    assert tp.startswith("  tp: fits, 42.2 GB of weights per rank, 35.5 GB left, ")
    assert tp.endswith(" ms per token of one sequence")
    assert dp.startswith("  dp: fits, 47.8 GB of weights per rank, 29.9 GB left, ")


def test_inspect_of_a_checkpoint(tmp_path, capsys):
    folder = tmp_path / "checkpoint"
    save(model(WIDE, torch.bfloat16), folder, layout="nvidia")
    assert command_line.main(["inspect", str(folder), "--gpus", "2xH200"]) == 0
    assert "  tp: fits, 0.0 GB of weights per rank, " in capsys.readouterr().out
    with Checkpoint.open(folder) as checkpoint:
        result = Weights.of_checkpoint(checkpoint)
        loaded = [e.nbytes for n, e in checkpoint.entries.items() if not n.startswith("mtp.")]
    parts = (result.routed, result.split, result.replicated, result.embedding, result.head)
    assert min(parts) > 0
    assert sum(parts) == sum(loaded)


def test_inspect_of_a_configuration_alone(tmp_path, capsys):
    """What is computed of Flash's config.json is what is computed of the preset."""
    (tmp_path / "config.json").write_text(json.dumps(FLASH.to_transformers_dict()))
    machines = ["--gpus", "4xH100", "--gpus", "8xH200"]
    assert command_line.main(["inspect", str(tmp_path), *machines]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.endswith(
        ": config.json without weights, formats as 'nvidia', without draft layers"
    )
    assert command_line.main(["inspect", "--preset", "flash", *machines]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == lines
    assert command_line.main(["inspect", str(tmp_path)]) == 2
    assert "holds neither model.safetensors" in capsys.readouterr().err


def test_inspect_wants_one_model(capsys):
    for arguments in ([], ["somewhere", "--preset", "flash"]):
        assert command_line.main(["inspect", *arguments]) == 2
        assert "wanted the PATH of a checkpoint or --preset" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command_line.main(["inspect", "--preset", "flash", "--gpus", "4xA100"])
    assert "'4xA100' is no machine" in capsys.readouterr().err
