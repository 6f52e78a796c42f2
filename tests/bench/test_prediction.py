"""The model of products: it predicts what was measured on an H200 as well as its page says."""

from __future__ import annotations

import dataclasses
import json
import statistics

import pytest

from dsv4.bench import prediction
from dsv4.bench.prediction import B200, FITTED, H200, HELD_OUT, Shape, Tile, block_scaled, predict

PAGE = prediction.RESULTS.parents[1] / "notes" / "2026-11_model_b200.md"
pytestmark = pytest.mark.skipif(
    not prediction.RESULTS.exists(), reason="no results beside the package"
)


def test_the_page_is_what_it_writes():
    """``python -m dsv4.bench.prediction > notes/2026-11_model_b200.md`` rewrites it."""
    assert PAGE.read_text() == prediction.markdown()


@pytest.mark.parametrize(
    ("files", "median", "worst"), [(FITTED, 0.09, 0.28), (HELD_OUT, 0.11, 0.37)]
)
def test_errors(files, median, worst):
    sizes = [abs(error) for error in prediction.errors(H200, files)]
    assert len(sizes) >= 50
    assert statistics.median(sizes) <= median
    assert max(sizes) <= worst


@pytest.mark.parametrize(
    "name", ["launch_us", "small_m_launch_us", "tile_cycles", "shared_cycles", "l2_bytes"]
)
def test_the_fitted_numbers_are_the_best(name):
    best = prediction.loss(H200)
    for factor in (0.9, 0.97, 1.03, 1.1):
        other = dataclasses.replace(H200, **{name: factor * getattr(H200, name)})
        assert prediction.loss(other) > 0.999 * best


def test_bytes_and_operations_are_those_of_the_bench():
    """But for the global scales and what X is."""
    rows = json.loads((prediction.RESULTS / FITTED[0]).read_text())["rows"]
    for row, (_, shape, _) in zip(rows, prediction.measured(*FITTED), strict=True):
        predicted = prediction.on_hopper(H200, shape)
        assert predicted.flops == row["flops"]
        assert 0 <= row["bytes"] - predicted.bytes <= 16
        assert predicted.bound_us == pytest.approx(row["floor_us"], rel=0.02)


def test_what_bounds_a_gemm():
    machine = dataclasses.replace(
        B200, launch_us=0.0, tile_cycles=0.0, shared_cycles=0.0, l2_bytes=1e9
    )
    wide, tile = Shape(148 * 128, 8192, 1, 256), Tile(128, 256, 1, 1, 4, "nvfp4")
    full = predict(machine, wide, tile)
    assert (full.tiles, full.waves, full.bound) == (148, 1, "tensor")
    assert full.us == pytest.approx(full.bound_us, rel=1e-3)
    more = predict(machine, wide._replace(rows=149 * 128), tile)
    assert (more.tiles, more.waves) == (149, 2)
    assert more.us == pytest.approx(2 * full.us, rel=1e-3)
    single = predict(machine, wide._replace(tokens=1), tile._replace(tokens=8))
    assert single.bound == "memory"
    assert single.us == pytest.approx(single.bytes / (machine.read_tbs * 1e6))
    narrow = dataclasses.replace(machine, l2_bytes=10.0)
    alone, pair = (predict(narrow, wide, tile._replace(pair=pair)) for pair in (False, True))
    assert alone.bound == pair.bound == "L2"
    assert pair.us < alone.us


@pytest.mark.parametrize("preset", ["pro", "flash"])
def test_a_b200_is_never_below_its_bound(preset):
    for _, shape in prediction.shapes(preset):
        predicted, small_m = block_scaled(B200, shape), prediction.small_m_on_blackwell(B200, shape)
        assert predicted.us >= predicted.bound_us + B200.launch_us - 1e-9
        assert (small_m is None) == (shape.tokens > 64)
        assert small_m is None or small_m.us >= small_m.bound_us
