"""The NVFP4 copy of the head: near the head, for drafts alone, and where it is taken."""

from __future__ import annotations

import pytest
import torch

from dsv4 import device as machine
from dsv4.commands.checkpoints import lines
from dsv4.compilation.kernel_calls import draft_heads
from dsv4.config import ModelConfig
from dsv4.cute.supports import few_token_gemm
from dsv4.kv_cache.paged_cache import Batch
from dsv4.layers.dspark import Taps
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel.context import ALONE, Ranks
from dsv4.parallel.emulated import emulated_rank
from dsv4.speculation.draft_head import DraftHead, copy_bytes
from dsv4.speculation.dspark import DSparkDraft
from dsv4.speculation.mtp import MtpDraft
from dsv4.testing.models import random_model
from tests.speculation.dspark_cases import small

GPU = torch.device("cuda", 0)
CONFIG = small(vocab_size=64, hidden_size=64)


def model_of(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> DeepseekV4ForCausalLM:
    return random_model(config, 1, dtype, mtp=True)


@pytest.fixture(scope="module")
def mtp_model() -> DeepseekV4ForCausalLM:
    return model_of(CONFIG.replace(dspark=None, num_nextn_predict_layers=1))


@pytest.fixture(scope="module")
def dspark_model() -> DeepseekV4ForCausalLM:
    return model_of(CONFIG)


@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
def test_the_copy_s_logits_are_near_the_head_s(numerics: str) -> None:
    """E2M1 rounds a weight by a sixth at most of its block's largest, most by far less."""
    model = model_of(CONFIG.replace(numerics=numerics))
    head = DraftHead.of(model, "nvfp4")
    hidden = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits, own = head(hidden), model.logits(hidden)
    assert logits.shape == own.shape == (2, 5, 64)
    assert logits.dtype == own.dtype
    error = (logits.double() - own.double()).norm() / own.double().norm()
    assert 0.01 < float(error) < 0.15
    assert head.copy is not None
    assert head.copy.layout == "fragments_16x64"
    weight = head.copy.dense_weight()
    bound = model.lm_head.weight.float().unflatten(1, (-1, 16)).abs().amax(-1) / 5
    assert bool(((weight - model.lm_head.weight).abs() <= bound.repeat_interleave(16, 1)).all())


def test_the_target_s_logits_are_untouched(mtp_model, dspark_model) -> None:
    """Same bits, same parameters, same state: the copy is none of the model's modules."""
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    for model, draft in ((mtp_model, MtpDraft), (dspark_model, DSparkDraft)):
        before, state = model(ids), model.state_dict()
        names = list(state)
        values = {name: tensor.clone() for name, tensor in state.items()}
        made = draft(model, draft_head="nvfp4")
        assert made.head.copy is not None
        assert torch.equal(model(ids), before)
        after = model.state_dict()
        assert list(after) == names
        assert all(torch.equal(after[name], values[name]) for name in names)
        assert all(after[name].data_ptr() == state[name].data_ptr() for name in names)


def test_drafts_use_the_copy(mtp_model, dspark_model) -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    for model in (mtp_model, dspark_model):
        logits = []
        for choice in ("model", "nvfp4"):
            cache = model.new_cache(1, 64, max_chunk=16)
            cache.allocate()
            seen: list[torch.Tensor] = []
            if model is dspark_model:
                made = DSparkDraft(model, choice)
                made.commit(
                    Taps((0, 1, 2), [torch.ones(1, 1, 64).bfloat16()] * 3),
                    cache,
                    Batch.decode(zero, zero),
                )
                seen.append(made.draft(zero, cache, zero, zero + 1).logits)
            else:
                made = MtpDraft(model, choice)
                head = made.head
                own = head.copy if head.copy is not None else model.lm_head
                hook = own.register_forward_hook(lambda *call, s=seen: s.append(call[-1]))
                made.draft(zero, torch.ones(1, 4, 64).bfloat16(), cache, zero, zero, 1)
                hook.remove()
            assert len(seen) == 1
            logits.append(seen[0].float())
        assert 0 < float((logits[0] - logits[1]).norm()) < 0.3 * float(logits[0].norm())


def test_by_default_it_is_taken_where_it_is_fast() -> None:
    """By a kernel that was measured, which is Hopper's."""
    flash = ModelConfig.flash()
    sizes = (flash.vocab_size, flash.hidden_size)
    with machine.pretend(capability=(9, 0), sms=132, packages=True):
        assert few_token_gemm(GPU, *sizes) is None
        reason = few_token_gemm(GPU, 100, 64)
        assert reason == "the weight is 100 x 64, wanted multiples of 16 x 64"
    with machine.pretend(capability=(10, 0), sms=148, packages=True):
        assert "never measured on compute capability 10.0" in str(few_token_gemm(GPU, *sizes))
    model = model_of(CONFIG)
    head = DraftHead.of(model)
    assert head.copy is None
    assert head.reason
    assert head.nbytes == 0
    assert "float32" in DraftHead.of(model_of(CONFIG, torch.float32)).reason
    hidden = torch.ones(1, 64).bfloat16()
    assert torch.equal(head(hidden), model.logits(hidden))


def test_its_bytes_are_counted() -> None:
    model = model_of(CONFIG)
    assert DraftHead.of(model, "nvfp4").nbytes == copy_bytes(model.config) == 64 * 36 + 4
    flash = ModelConfig.flash()
    assert copy_bytes(flash) == 129_280 * 4096 * 9 // 16 + 4


@pytest.mark.parametrize("bits", ["quantised", "unknown"])
def test_what_cannot_be_is_said(bits: str) -> None:
    model = model_of(CONFIG)
    if bits == "unknown":
        with pytest.raises(ValueError, match="draft_head is 'fp8', wanted one of 'auto', 'model'"):
            MtpDraft(model_of(CONFIG.replace(dspark=None, num_nextn_predict_layers=1)), "fp8")
        return
    model.lm_head.quantize("nvfp4")
    with pytest.raises(ValueError, match="draft_head is 'nvfp4', but the head is nvfp4 already"):
        DSparkDraft(model, "nvfp4")
    assert DSparkDraft(model).head.reason == "the head is nvfp4 already"


def test_a_head_of_several_ranks_has_no_copy() -> None:
    """Nor is a kernel for one compiled."""
    heads = []
    for ranks in (ALONE, Ranks(2)):
        context = emulated_rank(ranks, CONFIG, "meta")
        with torch.device("meta"):
            model = DeepseekV4ForCausalLM(CONFIG, parallel=context).to(torch.bfloat16)
        heads.append(len(draft_heads(model)))
    assert heads == [1, 0]
    assert DraftHead.of(model).reason == "the head is split over 2 ranks"
    with pytest.raises(ValueError, match="draft_head is 'nvfp4', but the head is split over 2"):
        DSparkDraft(model, "nvfp4")


def test_inspect_counts_the_copy(tmp_path) -> None:
    from dsv4.checkpoint import Checkpoint, save

    path = tmp_path / "model"
    save(model_of(CONFIG), path, layout="bf16")
    with Checkpoint.open(path) as checkpoint:
        text = "\n".join(lines(checkpoint))
    assert "an NVFP4 copy of the head for drafts, by default on Hopper: 0.00 MB" in text
