"""A model split over ranks computes what the whole one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4.config import ModelConfig
from dsv4.layers import HostExperts, Linear, host_experts_, pack_, quantize_
from dsv4.parallel.local_model import local_model
from dsv4.parallel.reduce import all_reduce
from dsv4.parallel.split import RULES, LocalSizes, check_blocks, rule_of
from dsv4.quant.formats import FP8_BLOCK, FRAGMENTS, MXFP4, NVFP4, SWIZZLED
from dsv4.testing.models import random_model
from dsv4.testing.ranks import run_ranks
from tests.parallel.cases import CONFIG, WIDE, model, prompt


def logits_of_ranks(whole: Any, size: int, ids: torch.Tensor) -> list[torch.Tensor]:
    def work(context):
        with torch.no_grad():
            local = local_model(whole, context)
            hidden, streams = local.model(ids)
            drafted, after = local.draft(ids, streams)
            return torch.cat([local.logits(hidden), drafted]), torch.stack([streams, after])

    return run_ranks(size, work)


@torch.no_grad()
def whole_logits(whole: Any, ids: torch.Tensor) -> torch.Tensor:
    hidden, streams = whole.model(ids)
    return torch.cat([whole.logits(hidden), whole.draft(ids, streams)[0]])


def test_experts_in_host_memory_are_refused() -> None:
    whole = model()
    experts, top_k = whole.config.n_routed_experts, whole.config.num_experts_per_tok
    host_experts_(whole, HostExperts(experts - top_k - 1, top_k))
    with pytest.raises(ValueError, match=f"{top_k + 1} of {experts} experts are in host memory"):
        run_ranks(1, lambda context: local_model(whole, context))


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
@pytest.mark.parametrize("size", [2, 4])
def test_logits_are_those_of_one_rank(size, numerics):
    whole = model(CONFIG.replace(numerics=numerics))
    ids = prompt(whole)
    expected = whole_logits(whole, ids)
    for logits, _ in logits_of_ranks(whole, size, ids):
        assert relative_error(logits, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams_are_bitwise_equal_on_all_ranks(dtype):
    whole = model(dtype=dtype)
    first, *others = logits_of_ranks(whole, 4, prompt(whole))
    for other in others:
        assert torch.equal(first[0], other[0])
        assert torch.equal(first[1], other[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_are_wide_and_rounded_once(dtype):
    """The third part is less than half a unit of the sum before it, and two of them are more."""
    unit = torch.finfo(dtype).eps
    parts = torch.tensor([[1.0], [1.0], [unit * 0.9], [unit * 0.9]], dtype=torch.float64).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    expected = torch.tensor(0.0, dtype=wide)
    for part in parts:
        expected = expected + part.to(wide)
    for total in run_ranks(4, lambda context: all_reduce(context, parts[context.rank])):
        assert total.dtype == dtype
        assert torch.equal(total, expected.to(dtype))
    assert torch.equal(all_reduce(None, parts[2]), parts[2])


@pytest.mark.parametrize(
    ("format", "layout"),
    [
        ("nvfp4", None),
        ("nvfp4", FRAGMENTS),
        ("nvfp4", SWIZZLED),
        ("fp8_block", None),
        ("mxfp4", None),
    ],
)
def test_quantised_weights_are_split_at_their_blocks(format, layout):
    """Each rank's part has the bits of the whole matrix there; packed parts, too."""
    whole = model(WIDE, torch.float32)
    quantize_(whole, format)
    dense = {
        name: module.dense_weight(torch.float64)
        for name, module in whole.named_modules()
        if isinstance(module, Linear)
    }
    experts = [layer.mlp.experts.dense_weight("down_proj") for layer in whole.model.layers]
    if layout:
        assert pack_(whole, layout).packed
    locals_ = run_ranks(2, lambda context: local_model(whole, context))
    for name, matrix in dense.items():
        parts = [local.get_submodule(name).dense_weight(torch.float64) for local in locals_]
        axis = rule_of(f"{name}.weight").axis.name
        if axis == "WHOLE":
            assert all(torch.equal(part, matrix) for part in parts), name
        else:
            assert torch.equal(torch.cat(parts, 0 if axis == "ROWS" else 1), matrix), name
    for i, stack in enumerate(experts):
        parts = [local.model.layers[i].mlp.experts.dense_weight("down_proj") for local in locals_]
        assert torch.equal(torch.cat(parts), stack)


def test_a_quantised_model_computes_the_same_on_two_ranks():
    whole = model(WIDE, torch.float64)
    quantize_(whole, "nvfp4", ["*self_attn.[qo]*", "*experts*"])
    ids = prompt(whole)
    expected = whole_logits(whole, ids)
    for logits, _ in logits_of_ranks(whole, 2, ids):
        assert relative_error(logits, expected) < 1e-12


def test_every_parameter_has_one_rule():
    names = [*random_model(CONFIG, mtp=True).state_dict()]
    assert any(name.startswith("mtp.") for name in names)
    for name in names:
        assert [rule for rule in RULES if rule.pattern.fullmatch(name)] == [rule_of(name)]
    with pytest.raises(ValueError, match=r"model.layers.0.new.weight: no rule says"):
        rule_of("model.layers.0.new.weight")


def test_published_models_can_be_split_as_the_tables_say():
    for config, most in ((ModelConfig.flash(), 8), (ModelConfig.pro(), 16)):
        for size in (1, 2, 4, 8, 16):
            context = _Context(0, size)
            if size > most:
                with pytest.raises(ValueError, match=r"16 ranks, wanted a number that divides o_g"):
                    LocalSizes.of(config, context)
            else:
                sizes = LocalSizes.of(config, context)
                assert sizes.groups * size == config.o_groups
                assert sizes.heads == 8 * sizes.groups


class _Context:
    mode = "tp"

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def test_blocks_and_tiles_are_not_cut():
    down = "model.layers.0.mlp.shared_experts.down_proj.weight"
    gate = "model.layers.0.mlp.shared_experts.gate_proj.weight"
    with pytest.raises(ValueError, match=r"down_proj.weight has 3072 columns, 192 on each of 16"):
        check_blocks(down, (7168, 3072), FP8_BLOCK, 16, tiles=False)  # Pro
    with pytest.raises(ValueError, match=r"gate_proj.weight has 3072 rows, 192 on each of 16"):
        check_blocks(gate, (3072, 7168), FP8_BLOCK, 16, tiles=False)
    check_blocks(gate, (3072, 7168), NVFP4, 16, tiles=True)
    check_blocks(down, (64, 96), MXFP4, 3, tiles=False)
    with pytest.raises(ValueError, match="wanted a multiple of 32 there, because mxfp4 blocks"):
        check_blocks(down, (64, 96), MXFP4, 2, tiles=False)
    check_blocks(down, (64, 128), NVFP4, 4, tiles=False)
    with pytest.raises(ValueError, match="wanted a multiple of 64 there, because tiles of packed"):
        check_blocks(down, (64, 128), NVFP4, 4, tiles=True)
    check_blocks("model.layers.0.self_attn.q_a_proj.weight", (7, 7), FP8_BLOCK, 2, tiles=True)


@pytest.mark.parametrize("field", ["o_groups", "n_routed_experts", "vocab_size"])
def test_a_number_of_ranks_that_divides_not(field):
    config = CONFIG.replace(
        **{field: 6, **({"num_attention_heads": 48} if field[0] == "o" else {})}
    )
    with pytest.raises(ValueError, match=f"4 ranks, wanted a number that divides {field} \\(6\\)"):
        LocalSizes.of(config, _Context(0, 4))
