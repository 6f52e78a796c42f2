"""RoPE: tables against the closed form, rotation against complex multiplication in float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.config import ModelConfig, RopeParameters
from dsv4.ops.quantize import quantize
from dsv4.ops.rope import rope, rope_quantize, rope_tables
from dsv4.testing import strategies as fuzz
from dsv4.testing.assertions import assert_bitwise, assert_pure, assert_within_budget, unit_roundoff

KERNELS = ("triton",)
U = unit_roundoff(torch.float32)
MAIN = RopeParameters(theta=10000.0)
YARN = RopeParameters(theta=160000.0, factor=16.0)
# Roundings of the length of a pair, by ``rotation_budget``: 3 in each of two.
ROTATION_ROUNDINGS = 1.01 * 3 * 2**0.5

positions = st.integers(0, 2**20)


def oracle(x, cos, sin, sign=1):
    """Multiply (x[D-R+2i] + j x[D-R+2i+1]) by (cos_i + j sign sin_i), in float64."""
    out = x.double()
    start = x.shape[-1] - 2 * cos.shape[-1]
    z = torch.complex(out[..., start::2], out[..., start + 1 :: 2])
    z = z * torch.complex(cos.double(), sign * sin.double())
    out = out.clone()
    out[..., start::2], out[..., start + 1 :: 2] = z.real, z.imag
    return out


def rotation_budget(x, cos, sin, truth):
    """Two products and one sum in the compute precision, one rounding to the result.

    |a cos| + |b sin| bounds the terms; each takes 2 roundings of at most u (float64: u = 2^-53),
    or, among denormals, of half the smallest one.
    """
    start = x.shape[-1] - 2 * cos.shape[-1]
    wide = unit_roundoff(torch.float64 if x.dtype == torch.float64 else torch.float32)
    pair = x.double()[..., start:].abs().unflatten(-1, (-1, 2))
    c, s = cos.double().abs(), sin.double().abs()
    a, b = pair.unbind(-1)
    terms = torch.stack((a * c + b * s, b * c + a * s), -1).flatten(-2)
    budget = torch.zeros_like(truth)
    smallest = 4 * torch.finfo(x.dtype).smallest_normal * unit_roundoff(x.dtype)
    out = unit_roundoff(x.dtype)
    budget[..., start:] = 1.01 * (2 * wide * terms + out * truth[..., start:].abs()) + smallest
    return budget


def tables_for(tokens, half, seed, device, parameters=MAIN):
    generator = fuzz.generator(seed)
    where = torch.randint(0, 2**20, (tokens,), generator=generator).to(device)
    parameters = dataclasses.replace(parameters, dim=2 * half)
    return tuple(t.unsqueeze(1) for t in rope_tables(where, parameters))


cases = st.fixed_dictionaries(
    {
        # Small enough that no rotation overflows float16.
        "draw": fuzz.draws(-20, 2, ("none", "zero", "denormal", "tiny", "saturating")),
        "tokens": fuzz.rows(6),
        "heads": st.integers(1, 3),
        "half": st.integers(1, 5),
        "kept": st.integers(0, 5),
        "dtype": fuzz.float_dtypes(),
    }
)


def build(case, device):
    x = case["draw"].build(
        (case["tokens"], case["heads"], case["kept"] + 2 * case["half"]), case["dtype"], device
    )
    cos, sin = tables_for(case["tokens"], case["half"], case["draw"].seed, device)
    return x, cos, sin


@given(case=cases)
def test_pitfall_5_last_dims_in_interleaved_pairs(device, case):
    x, cos, sin = build(case, device)
    truth = oracle(x, cos, sin)
    out = rope(x, cos, sin)
    assert out.dtype == x.dtype
    assert_within_budget(out, truth, rotation_budget(x, cos, sin, truth))


@given(case=cases)
def test_pitfall_4_the_inverse_turns_by_the_opposite_angle(device, case):
    x, cos, sin = build(case, device)
    truth = oracle(x, cos, sin, sign=-1)
    out = rope(x, cos, sin, inverse=True)
    assert_within_budget(out, truth, rotation_budget(x, cos, sin, truth))


def test_pitfall_5_by_hand(device):
    # A quarter turn takes the pair (a, b) to (-b, a); the pairs are neighbours at the end.
    x = torch.tensor([9.0, 8.0, 1.0, 2.0, 3.0, 4.0], device=device)
    cos, sin = torch.tensor([0.0, 1.0], device=device), torch.tensor([1.0, 0.0], device=device)
    assert rope(x, cos, sin).tolist() == [9.0, 8.0, -2.0, 1.0, 3.0, 4.0]
    assert rope(x, cos, sin, inverse=True).tolist() == [9.0, 8.0, 2.0, -1.0, 3.0, 4.0]


@given(case=cases)
def test_first_dims_are_copied_bit_for_bit(device, case):
    x, cos, sin = build(case, device)
    x = x.clone()
    x[..., : case["kept"]] = torch.nan
    unrotated = slice(0, case["kept"])
    assert_bitwise(rope(x, cos, sin)[..., unrotated], x[..., unrotated])
    assert rope(x, cos, sin)[..., case["kept"] :].isfinite().all()


@given(case=cases)
def test_inverse_undoes_the_rotation(device, case):
    x, cos, sin = build(case, device)
    back = rope(rope(x, cos, sin), cos, sin, inverse=True)
    # Per component, with r the length of the pair: the tables miss cos^2 + sin^2 = 1 by 4 u (one
    # ulp each), each rotation adds 2 u r and one rounding, and the first rotation's error is turned
    # once more (times sqrt 2).
    start = x.shape[-1] - 2 * cos.shape[-1]
    pairs = x.double()[..., start:].unflatten(-1, (-1, 2))
    length = pairs.norm(dim=-1, keepdim=True).expand_as(pairs).flatten(-2)
    out = unit_roundoff(x.dtype)
    smallest = 8 * torch.finfo(x.dtype).smallest_normal * out
    budget = torch.zeros_like(x, dtype=torch.float64)
    budget[..., start:] = (10 * U + 2.5 * out) * length + smallest
    assert_within_budget(back, x.double(), budget)


@given(case=cases)
def test_length_of_every_pair_is_kept(device, wide, case):
    x, cos, sin = build({**case, "dtype": wide}, device)
    start = x.shape[-1] - 2 * cos.shape[-1]
    before = x[..., start:].double().unflatten(-1, (-1, 2)).norm(dim=-1)
    after = rope(x, cos, sin)[..., start:].double().unflatten(-1, (-1, 2)).norm(dim=-1)
    # One ulp in each table entry; both of a pair off by ``rotation_budget``.
    smallest = 8 * torch.finfo(wide).smallest_normal * unit_roundoff(wide)
    budget = (4 * U + ROTATION_ROUNDINGS * unit_roundoff(wide)) * before + smallest
    assert_within_budget(after, before, budget)


@given(
    seed=fuzz.seeds(),
    query=st.integers(0, 2000),
    key=st.integers(0, 2000),
    shift=st.integers(0, 2000),
    parameters=st.sampled_from([MAIN, YARN]),
)
def test_dot_products_depend_on_the_distance_alone(
    device, wide, seed, query, key, shift, parameters
):
    where = torch.tensor([query, key, query + shift, key + shift], device=device)
    cos, sin = rope_tables(where, parameters)
    q, k = fuzz.normal(seed, (2, 64), wide).to(device)
    rotated = rope(torch.stack((q, k, q, k)), cos, sin).double()
    q, k = q.double(), k.double()
    dots = rotated[0] @ rotated[1], rotated[2] @ rotated[3]
    # Rounding the angle to float32 moves it by at most u times the angle, the tables add one ulp
    # (2 u) in each of cos and sin.
    frequency = parameters.inv_freq().double().to(device)
    moved = (where.double().unsqueeze(-1) * frequency * U + 4 * U).sum(0)
    pairs = q.unflatten(-1, (-1, 2)).norm(dim=-1) * k.unflatten(-1, (-1, 2)).norm(dim=-1)
    rounded = 4 * ROTATION_ROUNDINGS * unit_roundoff(wide) * pairs.sum()
    assert_within_budget(dots[0], dots[1], (pairs * moved).sum() + rounded + 1e-12)


def frequencies_of(parameters):
    """Angles of position 1, read back from the tables; all frequencies are at most 1 radian."""
    cos, sin = rope_tables(torch.tensor([1]), parameters)
    return torch.atan2(sin.double(), cos.double())[0]


def test_yarn_numbers():
    # Specification, section 4.3, by its own closed form: the ramp runs from pair 15 to pair 25.
    low = math.floor(64 * math.log(65536 / (32 * 2 * math.pi)) / (2 * math.log(160000)))
    high = math.ceil(64 * math.log(65536 / (2 * math.pi)) / (2 * math.log(160000)))
    assert (low, high) == (15, 25)
    actual = frequencies_of(YARN)
    for i in range(32):
        plain = 160000.0 ** (-2 * i / 64)
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        expected = plain * (1 - ramp) + plain / 16 * ramp
        assert actual[i].item() == pytest.approx(expected, rel=8 * U), i
    plain = frequencies_of(dataclasses.replace(YARN, factor=None))
    assert torch.equal(actual[:16], plain[:16])
    assert not torch.isclose(actual[16], plain[16], rtol=1e-3)


def test_pitfall_1_base_and_yarn_belong_to_the_layer_type():
    config = ModelConfig.flash()
    kinds = dict(zip(config.layer_types, range(config.num_hidden_layers), strict=True))
    result = {kind: frequencies_of(config.rope(layer)) for kind, layer in kinds.items()}
    assert set(result) == {
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    }
    exponents = -2 * torch.arange(32, dtype=torch.float64) / 64
    assert_within_budget(result["sliding_attention"], 10000.0**exponents, 1e-6 * 10000.0**exponents)
    compressed = 160000.0**exponents
    for kind in ("compressed_sparse_attention", "heavily_compressed_attention"):
        assert_within_budget(result[kind][:16], compressed[:16], 1e-6 * compressed[:16])
        assert_within_budget(result[kind][25:], compressed[25:] / 16, 1e-6 * compressed[25:] / 16)


@given(where=st.lists(positions, max_size=20), parameters=st.sampled_from([MAIN, YARN]))
def test_pitfall_2_tables_have_no_amplitude(device, where, parameters):
    cos, sin = rope_tables(torch.tensor(where, dtype=torch.int64, device=device), parameters)
    square = cos.double().square() + sin.double().square()
    assert_within_budget(square, torch.ones_like(square), 4 * U)  # one ulp (2 u) in each


@given(where=st.lists(positions, min_size=1, max_size=20), parameters=st.sampled_from([MAIN, YARN]))
def test_tables_are_float32_of_the_float32_angle(device, where, parameters):
    index = torch.tensor(where, device=device)
    cos, sin = rope_tables(index, parameters)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == (len(where), 32)
    angle = (index.float().unsqueeze(-1) * parameters.inv_freq().to(device)).double()
    assert_within_budget(cos, angle.cos(), 2 * U)
    assert_within_budget(sin, angle.sin(), 2 * U)


def test_tables_take_any_shape_of_positions_and_ready_frequencies(device):
    where = torch.arange(6, device=device, dtype=torch.int32).view(2, 3)
    cos, sin = rope_tables(where, YARN)
    assert cos.shape == (2, 3, 32)
    again = rope_tables(where.long(), YARN.inv_freq().to(device))
    assert_bitwise(again[0], cos)
    assert_bitwise(again[1], sin)


@pytest.mark.parametrize("parameters", [YARN, YARN.inv_freq()], ids=["parameters", "tensor"])
def test_tables_compile(device, parameters):
    if isinstance(parameters, torch.Tensor):
        parameters = parameters.to(device)
    compiled = torch.compile(rope_tables, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 5, 9):
        where = torch.arange(tokens, device=device) * 1001
        for actual, expected in zip(
            compiled(where, parameters), rope_tables(where, parameters), strict=True
        ):
            assert_bitwise(actual, expected)


@pytest.mark.parametrize("inverse", [False, True])
def test_compiles_without_graph_breaks(device, inverse):
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (2, 3, 7):
        x = fuzz.normal(tokens, (tokens, 2, 12), torch.bfloat16).to(device)
        cos, sin = tables_for(tokens, 4, tokens, device)
        expected = rope(x, cos, sin, inverse=inverse)
        assert_bitwise(compiled(x, cos, sin, inverse=inverse), expected)


def test_opcheck_of_tables(device):
    args = torch.arange(5, device=device).view(5, 1), YARN.inv_freq().to(device), "auto"
    torch.library.opcheck(torch.ops.dsv4.rope_tables.default, args)


@given(seed=fuzz.seeds(), shape=st.sampled_from([(0,), (1,), (9,), (2, 0), (3, 5)]))
def test_tables_of_strided_positions(device, seed, shape):
    where = torch.randint(0, 2**20, shape, generator=fuzz.generator(seed)).to(device)
    frequencies = YARN.inv_freq().to(device)
    expected = rope_tables(where, frequencies)
    strided = fuzz.strided(where) if where.numel() else where
    for actual, table in zip(
        rope_tables(strided, fuzz.strided(frequencies)), expected, strict=True
    ):
        assert_bitwise(actual, table)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_opcheck(device, dtype):
    x = fuzz.normal(0, (3, 2, 10), dtype).to(device)
    cos, sin = tables_for(3, 4, 0, device)
    torch.library.opcheck(torch.ops.dsv4.rope.default, (x, cos, sin, True, "auto"))


@given(case=cases)
def test_strided_input_gives_the_same_bits(device, case):
    x, cos, sin = build(case, device)
    expected = rope(x, cos, sin)
    out = rope(fuzz.strided(x), fuzz.strided(cos), fuzz.strided(sin))
    assert_bitwise(out, expected)
    assert out.is_contiguous()
    view = x.transpose(0, 1)
    assert_bitwise(
        rope(view, cos.transpose(0, 1), sin.transpose(0, 1)), expected.transpose(0, 1).contiguous()
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_row_stays_alone(device, bad):
    x = fuzz.normal(1, (5, 2, 10)).to(device)
    cos, sin = tables_for(5, 4, 1, device)
    clean = rope(x, cos, sin)
    x[2, 1, 7] = bad
    out = rope(x, cos, sin)
    assert not out[2, 1, 6:8].isfinite().any()
    hit = torch.zeros_like(out, dtype=torch.bool)
    hit[2, 1, 6:8] = True
    assert_bitwise(out[~hit], clean[~hit])


def test_no_tokens(device):
    cos, sin = rope_tables(torch.zeros(0, dtype=torch.int64, device=device), MAIN)
    assert rope(torch.zeros(0, 3, 64, device=device), cos[:, None], sin[:, None]).shape == (
        0,
        3,
        64,
    )


def test_bad_arguments_are_named(device):
    x = torch.zeros(3, 2, 10, device=device)
    cos = torch.ones(3, 1, 4, device=device)
    with pytest.raises(TypeError, match=r"rope: x has dtype int64"):
        rope(x.long(), cos, cos)
    with pytest.raises(TypeError, match=r"rope: sin has dtype int32"):
        rope(x, cos, cos.int())
    with pytest.raises(ValueError, match=r"rope: sin has shape \[3, 1, 3\], wanted \[3, 1, 4\]"):
        rope(x, cos, cos[..., :3])
    with pytest.raises(ValueError, match=r"rope: cos has shape \[3, 1, 6\]"):
        rope(x, torch.ones(3, 1, 6, device=device), torch.ones(3, 1, 6, device=device))
    with pytest.raises(ValueError, match=r"leading sizes \[3\], wanted .* \[3, 2\]"):
        rope(x, cos[:, 0], cos[:, 0])
    with pytest.raises(ValueError, match=r"leading sizes \[2, 3, 1\]"):
        rope(x, cos.expand(2, 3, 1, 4), cos.expand(2, 3, 1, 4))
    with pytest.raises(TypeError, match=r"rope_tables: positions has dtype float32"):
        rope_tables(torch.zeros(3, device=device), MAIN)
    with pytest.raises(TypeError, match=r"rope_tables: parameters has dtype float64"):
        rope_tables(torch.arange(3, device=device), torch.ones(4, device=device).double())
    with pytest.raises(ValueError, match=r"backend is 'nonsense'"):
        rope(x, cos, cos, backend="nonsense")


def assert_same(actual, expected):
    """Two quantised matrices have the same bits."""
    assert (actual.shape, actual.layout) == (expected.shape, expected.layout)
    assert_bitwise(actual.codes, expected.codes, "codes")
    assert_bitwise(actual.scales.view(torch.uint8), expected.scales.view(torch.uint8), "scales")
    assert_bitwise(actual.global_scale, expected.global_scale, "global scale")


def grouped_case(seed, tokens, heads, dims, half, dtype, device):
    x = fuzz.normal(seed, (tokens, heads, dims), dtype).to(device)
    cos, sin = tables_for(tokens, half, seed, device)
    return x, cos[:, 0], sin[:, 0]


class TestRopeQuantize:
    # heads, D, R/2, groups: rows of several heads, of one, of parts of one.
    SHAPES = ((4, 32, 4, 2), (2, 16, 8, 2), (3, 32, 3, 6), (2, 48, 5, 1), (4, 16, 1, 1))
    # The same of 32 blocks and more, which several programs share: all turn, 16 of 64, 10 of 64.
    SHAPES += ((16, 32, 16, 1), (9, 64, 8, 1), (8, 64, 5, 1))

    @settings(max_examples=30)
    @given(
        draw=fuzz.draws(-12, 8),
        tokens=fuzz.rows(3),
        shape=st.sampled_from(SHAPES),
        dtype=fuzz.float_dtypes(),
        inverse=st.booleans(),
        scaling=st.sampled_from(["token", "tensor scale", "row scale"]),
        layout=st.sampled_from(["linear", "linear", "linear", "swizzled_128x4"]),
        part=st.sampled_from([8, 128]),
    )
    def test_bits_are_those_of_the_parts(
        self, device, monkeypatch, draw, tokens, shape, dtype, inverse, scaling, layout, part
    ):
        monkeypatch.setattr("dsv4.triton._lib.nvfp4_tile._SHARE_BLOCKS", part)
        heads, dims, half, groups = shape
        x = draw.build((tokens, heads, dims), dtype, device)
        cos, sin = (t[:, 0] for t in tables_for(tokens, half, draw.seed, device))
        options = {"scaling": "token", "layout": layout}
        if scaling != "token":
            size = (tokens, groups) if scaling == "row scale" else (1,)
            scale = fuzz.normal(draw.seed, size).abs() * 2.0**-8 + 2.0**-12
            options |= {"scaling": "static", "global_scale": scale.to(device)}
        rotated = rope(x, cos.unsqueeze(1), sin.unsqueeze(1), inverse=inverse)
        expected = quantize(
            rotated.reshape(tokens, groups, -1 if tokens else 16), "nvfp4", **options
        )
        actual = rope_quantize(x, cos, sin, inverse=inverse, groups=groups, **options)
        if tokens:
            assert_same(actual, expected)
        assert actual.shape == (tokens, groups, heads * dims // groups)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_a_bad_value_stays_in_its_block(self, device, bad):
        x, cos, sin = grouped_case(3, 3, 4, 32, 4, torch.bfloat16, device)
        clean = rope_quantize(x, cos, sin, inverse=True, groups=2)
        x[1, 2, 7] = bad
        result = rope_quantize(x, cos, sin, inverse=True, groups=2)
        hit = torch.zeros_like(result.scales, dtype=torch.bool)
        hit[1, 1, 0] = True  # head 2 begins group 1
        scales, before = result.scales.view(torch.uint8), clean.scales.view(torch.uint8)
        assert bool((scales[hit] == 0x7F).all())
        hit[1, 1] = True  # the row's scale may follow from the lost maximum
        assert_bitwise(scales[~hit], before[~hit])
        assert bool(result.global_scale.isfinite().all())

    def test_columns_of_a_wider_tensor(self, device):
        x, cos, sin = grouped_case(5, 3, 4, 32, 4, torch.bfloat16, device)
        wide = torch.cat((torch.full_like(x, torch.nan), x), 1)[:, 4:]
        expected = rope_quantize(x, cos, sin, inverse=True, groups=2)
        assert_same(rope_quantize(wide, cos, sin, inverse=True, groups=2), expected)
        spread = (fuzz.strided(t) for t in (x, cos, sin))
        assert_same(rope_quantize(*spread, inverse=True, groups=2), expected)

    @pytest.mark.parametrize("scaling", ["token", "static"])
    def test_opcheck(self, device, scaling):
        x, cos, sin = grouped_case(0, 3, 4, 32, 4, torch.bfloat16, device)
        scale = torch.full((3, 1), 0.01, device=device) if scaling == "static" else None
        arguments = (x, cos, sin, True, 2, scale, scaling, "linear", "auto")
        op = torch.ops.dsv4.rope_quantize.default
        torch.library.opcheck(op, arguments)
        assert_pure(lambda *a: tuple(t.view(torch.uint8) for t in op(*a)), *arguments)

    def test_compiles_whole(self, device):
        def codes(x, cos, sin):
            return rope_quantize(x, cos, sin, inverse=True, groups=2).codes

        torch.compiler.reset()
        compiled = torch.compile(codes, fullgraph=True, backend="aot_eager", dynamic=True)
        for tokens in (2, 5):
            case = grouped_case(tokens, tokens, 4, 32, 4, torch.bfloat16, device)
            assert_bitwise(compiled(*case), codes(*case))

    def test_bad_arguments_are_named(self, device):
        x, cos, sin = grouped_case(0, 3, 4, 32, 4, torch.bfloat16, device)
        options = {"inverse": True, "groups": 2}
        with pytest.raises(TypeError, match="rope_quantize: x has dtype int64"):
            rope_quantize(x.long(), cos, sin, **options)
        with pytest.raises(ValueError, match=r"x has shape \[3, 128\]"):
            rope_quantize(x.flatten(1), cos, sin, **options)
        with pytest.raises(ValueError, match=r"cos has shape \[2, 4\], wanted \[3, any\]"):
            rope_quantize(x, cos[:2], sin, **options)
        with pytest.raises(ValueError, match=r"sin has shape \[3, 3\], wanted \[3, 4\]"):
            rope_quantize(x, cos, sin[:, :3], **options)
        wide = torch.ones(3, 17, device=device)
        with pytest.raises(ValueError, match=r"cos has shape \[3, 17\], wanted .* R <= 32"):
            rope_quantize(x, wide, wide, **options)
        for groups in (0, 3, 16):
            with pytest.raises(ValueError, match=f"groups is {groups} for x"):
                rope_quantize(x, cos, sin, inverse=True, groups=groups)
        with pytest.raises(ValueError, match="scaling is 'tensor'"):
            rope_quantize(x, cos, sin, **options, scaling="tensor")
        with pytest.raises(ValueError, match="global_scale is None"):
            rope_quantize(x, cos, sin, **options, scaling="static")
        with pytest.raises(ValueError, match="layout is 'rows'"):
            rope_quantize(x, cos, sin, **options, layout="rows")


@pytest.mark.gpu
def test_a_captured_graph_replays_with_other_values():
    device = torch.device("cuda")
    inputs, others = (grouped_case(s, 9, 64, 512, 32, torch.bfloat16, device) for s in (0, 1))

    def step():
        q = rope_quantize(*inputs, inverse=True, groups=8)
        x, cos, sin = inputs
        return rope(x, cos.unsqueeze(1), sin.unsqueeze(1)), q.codes, q.scales, q.global_scale

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for old, new in zip(inputs, others, strict=True):
        old.copy_(new)
    for tensor in out:
        tensor.view(torch.uint8).fill_(0xA5)
    graph.replay()
    for actual, again, expected in zip(out, step(), step(), strict=True):
        assert_bitwise(actual.view(torch.uint8), expected.view(torch.uint8))
        assert_bitwise(again.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (3, 128), (300, 64)])
def test_model_shapes_on_a_gpu(tokens, heads):
    """Many tokens take larger tiles, few one row per program: both give the same bits."""
    device = torch.device("cuda")
    x, cos, sin = grouped_case(0, tokens, heads, 512, 32, torch.bfloat16, device)
    rotated = rope(x, cos.unsqueeze(1), sin.unsqueeze(1), inverse=True)
    for token in (0, tokens - 1):
        row = rope(x[token], cos[token], sin[token], inverse=True)
        assert_bitwise(row, rotated[token])
    assert_bitwise(rotated[..., :448], x[..., :448])
    truth = oracle(x, cos.unsqueeze(1), sin.unsqueeze(1), sign=-1)
    budget = rotation_budget(x, cos.unsqueeze(1), sin.unsqueeze(1), truth)
    assert_within_budget(rotated, truth, budget)
    result = rope_quantize(x, cos, sin, inverse=True, groups=heads // 8)
    grouped = rotated.reshape(tokens, heads // 8, -1)
    assert_same(result, quantize(grouped, "nvfp4", scaling="token", backend="reference"))
