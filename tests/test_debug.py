"""dsv4.debug: the first NaN is traced to the module, the call and the parameter that made it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dsv4.debug import check_parameters, first_nonfinite, watch


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
    assert report.given[0].nan == 8
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
    (found,) = check_parameters(model)
    assert (found.name, found.nan, found.infinite, found.first) == ("bad", 1, 0, (1, 2))


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
    (found,) = check_parameters(model)
    assert (found.nan, found.first) == (2, (3, 4))


def test_works_on_device(device):
    model = chain(2).to(device)
    model[1].scale.scale.fill_(torch.nan)
    assert first_nonfinite(model, torch.ones(2, 4, device=device)).first.module == "1.scale"
