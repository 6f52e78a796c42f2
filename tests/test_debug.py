"""dsv4.debug: the first NaN is traced to the module, the call and the parameter that made it."""

from __future__ import annotations

import copy
import gc
import importlib.util
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dsv4.config import ModelConfig
from dsv4.debug import check_parameters, count_dropped, first_nonfinite, watch
from dsv4.layers import DeepseekV4Experts
from dsv4.ops.moe import moe_permute
from dsv4.testing import strategies as fuzz
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import random_model, randomize_

EXPERTS = 4


class Scale(nn.Module):
    def __init__(self, value: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.tensor([value]).to(dtype))

    def forward(self, x):
        return x * self.scale.float()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.scale = Scale()

    def forward(self, x):
        return x + self.scale(self.up(x))


def chain(blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)))


@given(blocks=st.integers(1, 5), data=st.data(), value=st.sampled_from(["nan", "inf", "-inf"]))
def test_a_planted_bad_scale_is_found_wherever_it_is(blocks, data, value):
    at = data.draw(st.integers(0, blocks - 1))
    model = chain(blocks)
    model[at].scale.scale.fill_(float(value))
    report = first_nonfinite(model, torch.ones(3, 4))
    origin = report.first
    assert origin is not None
    assert origin.module == f"{at}.scale"
    assert origin.class_name == "Scale"
    assert [p.name for p in origin.parameters] == ["scale"]
    assert origin.outputs[0].shape == (3, 4)
    assert f"{at}.scale (Scale" in str(report)
    assert "scale float32 [1]: 1 " in str(report)


def test_the_first_of_two_is_named():
    model = chain(4)
    model[3].scale.scale.fill_(torch.nan)
    model[1].scale.scale.fill_(torch.nan)
    assert first_nonfinite(model, torch.ones(2, 4)).first.module == "1.scale"


def test_a_finite_model_reports_nothing():
    report = first_nonfinite(chain(3), torch.ones(2, 4))
    assert not report
    assert report.first is None
    assert report.calls == 3 * 3 + 1
    assert str(report) == "no NaN and no Inf in the outputs of 10 module calls"


def test_row_and_count_of_the_bad_output_are_given():
    class OneRow(nn.Module):
        def forward(self, x):
            x = x.clone()
            x[2, 1] = torch.nan
            x[2, 3] = torch.inf
            return {"hidden": [x]}

    (bad,) = first_nonfinite(OneRow(), torch.ones(4, 5)).first.outputs
    assert (bad.name, bad.nan, bad.infinite, bad.first) == ("output['hidden'][0]", 1, 1, (2, 1))


def test_a_nan_made_between_children_is_the_parents():
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = Scale(), Scale()

        def forward(self, x):
            y = self.before(x)
            return self.after((y - y) / (y - y))

    origin = first_nonfinite(nn.Sequential(Parent()), torch.ones(2, 4)).first_nan
    assert origin.module == "0"
    assert origin.entered == "0.after"
    assert origin.parameters == ()
    assert "before it called 0.after" in str(origin)


def test_bad_input_is_not_blamed_on_a_module():
    report = first_nonfinite(chain(2), torch.full((2, 4), torch.nan))
    assert report
    assert report.first is None
    assert report.inputs[0].nan == 8
    assert "given to the watched module: input[0]" in str(report)


def test_a_nan_from_an_input_with_infinities_is_still_traced():
    class Masked(nn.Module):
        def forward(self, x, mask):
            return (x + mask).softmax(-1)

    x = torch.ones(2, 3)
    mask = torch.zeros(2, 3)
    mask[1] = -torch.inf
    origin = first_nonfinite(Masked(), x, mask=mask).first_nan
    assert origin.module == ""
    assert origin.outputs[0].first == (1, 0)


def test_inputs_overwritten_by_the_module_are_judged_as_they_came():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.fill_(torch.nan)

    assert first_nonfinite(InPlace(), torch.ones(2)).first.class_name == "InPlace"


def test_infinity_then_nan_are_both_reported_in_order():
    class Grow(nn.Module):
        def forward(self, x):
            return x * torch.inf

    class Cancel(nn.Module):
        def forward(self, x):
            return x - x

    report = first_nonfinite(nn.Sequential(Grow(), Cancel()), torch.ones(2))
    assert (report.first_infinite.module, report.first_nan.module) == ("0", "1")
    assert report.first is report.first_infinite
    assert str(report).index("first Inf from 0") < str(report).index("first NaN from 1")


def test_dataclass_outputs_are_searched():
    @dataclass
    class Output:
        hidden: torch.Tensor
        cache: object = None

    class Wrapped(nn.Module):
        def forward(self, x):
            return Output(x / 0)

    assert first_nonfinite(Wrapped(), torch.ones(2)).first.outputs[0].name == "output.hidden"


def test_hooks_are_gone_after_the_block_and_after_an_error():
    model = chain(2)
    with pytest.raises(RuntimeError), watch(model) as report:
        model(torch.ones(2, 5))
    assert report.calls == 0
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_an_exception_caught_inside_the_model_does_not_confuse_the_report():
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrong, self.right = nn.Linear(7, 4), Scale(torch.nan)

        def forward(self, x):
            try:
                return self.wrong(x)
            except RuntimeError:
                return self.right(x)

    assert first_nonfinite(Tries(), torch.ones(2, 4)).first.module == "right"


def test_a_call_that_never_returned_does_not_stand_for_its_caller():
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrong = nn.Linear(7, 4)

        def forward(self, x):
            try:
                return self.wrong(torch.ones(2, 4))
            except RuntimeError:
                return x

    # The failed child had good inputs; the caller, which hands its bad input on, did not.
    assert first_nonfinite(Tries(), torch.full((2, 4), torch.nan)).first is None


@pytest.mark.parametrize(
    ("dtype", "byte"), [(torch.float8_e4m3fn, 0x7F), (torch.float8_e8m0fnu, 0xFF)]
)
def test_check_parameters_decodes_one_byte_scales(dtype, byte):
    model = nn.Module()
    raw = torch.full((2, 3), 0x38, dtype=torch.uint8)
    model.register_buffer("good", raw.clone().view(dtype))
    raw[1, 2] = byte
    model.register_buffer("bad", raw.view(dtype))
    model.register_buffer("codes", torch.full((4,), 255, dtype=torch.uint8))
    (bad,) = check_parameters(model)
    assert (bad.name, bad.nan, bad.infinite, bad.first) == ("bad", 1, 0, (1, 2))


def test_check_parameters_skips_meta_and_lists_in_order():
    model = chain(2)
    with torch.no_grad():
        model[1].up.bias[2] = torch.inf
        model[0].up.weight[3, 1] = torch.nan
    assert [(b.name, b.first) for b in check_parameters(model)] == [
        ("0.up.weight", (3, 1)),
        ("1.up.bias", (2,)),
    ]
    assert check_parameters(chain(2).to("meta")) == []


def test_large_tensors_are_inspected_in_chunks(monkeypatch):
    monkeypatch.setattr("dsv4.debug._CHUNK", 7)
    model = nn.Module()
    value = torch.zeros(5, 6)
    value[3, 4] = value[4, 5] = torch.nan
    model.register_buffer("value", value)
    (bad,) = check_parameters(model)
    assert (bad.nan, bad.first) == (2, (3, 4))


def test_works_on_device(device):
    model = chain(2).to(device)
    model[1].scale.scale.fill_(torch.nan)
    assert first_nonfinite(model, torch.ones(2, 4, device=device)).first.module == "1.scale"


# Expert ids out of range -----------------------------------------------------------------------


def experts_of(first: int = 0, count: int | None = None, seed: int = 0) -> nn.Module:
    config = ModelConfig.tiny(n_routed_experts=EXPERTS)
    return randomize_(DeepseekV4Experts(config, first, count).requires_grad_(False), seed)


def call(experts, ids):
    ids = torch.as_tensor(ids)
    device = next(experts.parameters()).device
    x = fuzz.normal(0, (ids.shape[0], experts.hidden_dim))
    return experts(*(t.to(device) for t in (x, ids, torch.ones(ids.shape))))


def wrong(ids) -> int:
    """Counted by hand."""
    return sum(e < -1 or e > EXPERTS for row in torch.as_tensor(ids).tolist() for e in row)


@pytest.fixture
def unchecked(monkeypatch):
    """A CPU that drops ids out of range, as a device does."""
    modules = ["reference.moe"]
    if importlib.util.find_spec("triton"):
        modules.append("triton.moe_sort")
    for module in modules:
        monkeypatch.setattr(f"dsv4.{module}.check_ids", lambda ids, num_experts: None)


IDS = st.lists(st.lists(st.integers(-3, EXPERTS + 2), min_size=3, max_size=3), max_size=5)


@given(batches=st.lists(IDS, max_size=3), first=st.integers(0, EXPERTS - 1))
def test_ids_out_of_range_are_counted_and_others_ranks_are_not(device, unchecked, batches, first):
    experts = experts_of(first).to(device)
    batches = [torch.tensor(ids, dtype=torch.int64).view(-1, 3) for ids in batches]
    with count_dropped(experts) as dropped:
        for ids in batches:
            result = call(experts, ids)
            # Where they are not counted, either.
            assert_bitwise(
                result, call(copy.deepcopy(experts), ids.where((ids > -2) & (ids < 5), -1))
            )
    assert dropped.per_module() == {"": sum(map(wrong, batches))}
    assert bool(dropped) == (dropped.total > 0)
    call(experts, [[9, 9, 9]])
    assert dropped.total == sum(map(wrong, batches))


def test_each_layer_has_its_count(unchecked):
    model = nn.ModuleDict({"a": experts_of(), "b": experts_of(), "c": nn.Linear(2, 2)})
    with count_dropped(model) as dropped:
        assert str(dropped) == "no expert id out of range in 2 layers of experts"
        call(model["a"], [[0, -1, EXPERTS]])
        assert not dropped
        call(model["b"], [[7, 0, -2], [9, 1, 2]])
        assert dropped.per_module() == {"a": 0, "b": 3}
        assert str(dropped) == "3 expert ids out of range, which choose no expert:\n  b: 3"
        dropped.reset()
        assert dropped.total == 0
    for module in model.modules():
        assert not module._forward_pre_hooks
    with count_dropped(model) as again:
        assert again.total == 0


def test_on_the_cpu_they_raise_and_are_counted():
    experts = experts_of()
    with count_dropped(experts) as dropped:
        with pytest.raises(ValueError, match=r"ids\[1, 0\] is 9, wanted an expert, 0 to 3"):
            call(experts, [[0, 1], [9, 2]])
        assert dropped.total == 1
    with pytest.raises(ValueError, match="count_dropped: Linear holds no DeepseekV4Experts"):
        count_dropped(nn.Linear(2, 2)).__enter__()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("outer", [torch.inference_mode, torch.no_grad])
def test_counts_in_and_out_of_inference_mode(unchecked, mode, outer):
    experts = experts_of()
    with outer(), count_dropped(experts) as dropped:
        call(experts, [[9]])
    with mode(), count_dropped(experts) as dropped:
        call(experts, [[9]])
    assert dropped.total == 1


def test_a_whole_model_drops_nothing():
    model = random_model(ModelConfig.tiny())
    with count_dropped(model) as dropped:
        model(torch.tensor([[1, 2, 3]]))
    assert len(dropped.per_module()) == len(model.model.layers)
    assert dropped.total == 0


class Sorting(DeepseekV4Experts):
    """Experts whose forward can be captured on any GPU."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return moe_permute(top_k_index, self.num_experts)[1]


def check_replays(experts, ids):
    """A graph captured in the block counts on every replay, also after the block."""
    x = torch.ones(ids.shape[0], experts.hidden_dim, device="cuda", dtype=torch.bfloat16)
    weights, low = torch.ones(ids.shape, device="cuda"), -4
    with count_dropped(experts) as dropped, torch.inference_mode():
        experts(x, ids, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = experts(x, ids, top_k_weights=weights)
        dropped.reset()
        total = 0
        for seed in range(20):
            generator = fuzz.generator(seed)
            ids.copy_(torch.randint(low, EXPERTS - low, ids.shape, generator=generator))
            graph.replay()
            total += wrong(ids)
            assert dropped.total == total
            assert_bitwise(out, experts(x, ids.where((ids > -2) & (ids <= EXPERTS), -1), weights))
    graph.replay()
    assert dropped.total == total + wrong(ids)
    del dropped
    gc.collect()
    torch.cuda.empty_cache()
    others = torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
    graph.replay()
    assert not others.any()


@pytest.mark.gpu
def test_a_graph_counts_on_every_replay():
    experts = Sorting(ModelConfig.tiny(n_routed_experts=EXPERTS)).cuda()
    check_replays(experts, torch.zeros(5, 3, dtype=torch.int64, device="cuda"))


@pytest.mark.gpu
def test_a_graph_of_packed_experts_counts_on_every_replay():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("grouped GEMMs on other GPUs are the reference, which reads offsets")
    config = ModelConfig.tiny(n_routed_experts=EXPERTS, hidden_size=256, moe_intermediate_size=128)
    experts = randomize_(DeepseekV4Experts(config).requires_grad_(False), 0)
    experts.quantize()
    experts.pack()
    check_replays(experts.cuda(), torch.zeros(5, 3, dtype=torch.int64, device="cuda"))
