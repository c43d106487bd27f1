"""Untuned shapes: which they are, their candidates, and a run on a CPU."""

import dataclasses

import numpy as np
import pytest

from benchmarks import harness, shapes
from benchmarks.ops import bench_unseen_shapes
from benchmarks.ops.bench_unseen_shapes import SETS, SMOKE, unseen
from benchmarks.shapes import GroupedShape
from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.planning import device
from jaxops._lib.planning.device import Device
from jaxops.ops.grouped_matmul import Tiles
from tests.benchmarks.conftest import rows_of
from tests.command_line import run

H100 = Device("NVIDIA H100 80GB HBM3", "gpu")


def test_shapes_are_random_and_always_the_same():
    found = unseen(20)
    assert found == unseen(20)
    assert found[:5] == unseen(5)
    assert not {shape.dims.values() for shape in found} & {shape.dims.values() for shape in shapes.GROUPED.values()}
    assert all(shape.K % 8 == shape.N % 8 == 0 for shape in found)
    filled = [size / power_of_2(size) for shape in found for size in (shape.M, shape.K, shape.N)]
    assert np.histogram(filled, bins=4, range=(0.5, 1))[0].min() >= 5  # anywhere between powers of two


@pytest.mark.parametrize("name", SETS)
def test_smoke_run_writes_a_row_a_pass_and_side(name, tmp_path):
    options = ["--shapes", name, "--rounds", "1", "--passes", "fwd,wgrad"]
    result = run(bench_unseen_shapes.main, "--smoke", "--out", str(tmp_path), *options)
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "unseen_shapes.jsonl")[2:]  # after the ceilings
    want = [(each, dist, side) for each in ("fwd", "wgrad") for dist in SETS[name] for side in ("jaxops", "tuned")]
    assert [(row["pass"], row["dist"], row["backend"]) for row in rows] == want
    for row in rows:
        assert set(harness.ROW_KEYS) <= set(row)
        assert row["shape"] == SMOKE.dims
        assert ("tuned" in row["vs"]) == (row["backend"] == "jaxops")
        assert row["tiles"]["kernel"] == "pallas"
        assert f"seed {row['seed']}\n" in result.output


def measured(tmp_path, monkeypatch, times: list[list[float]]) -> tuple[list[tuple], str]:
    """The rows of a case with three tiles, the plan's first, and what is printed; times: of its tiles, in each turn."""
    tiles, turns = [Tiles(bm, 16, 16) for bm in (16, 32, 64)], iter(times)

    def interleave(sides, *_):
        ceilings = len(sides) > 1 and sides[0].name == "copy"
        us = [1.0] * len(sides) if ceilings else next(turns)
        return {side.name: harness.Times(each, each, each) for side, each in zip(sides, us, strict=True)}

    monkeypatch.setattr(bench_unseen_shapes, "tiles_of", lambda shape, pass_name: tiles)
    monkeypatch.setattr(harness, "interleave", interleave)
    options = ["--passes", "fwd", "--dists", "router", "--seed", "3"]
    result = run(bench_unseen_shapes.main, "--smoke", "--out", str(tmp_path), *options)
    assert result.exit_code == 0, result.output
    assert not list(turns)
    rows = rows_of(tmp_path / "unseen_shapes.jsonl")[2:]
    assert {(row["tried"], row["seed"], row["dist"]) for row in rows} == {(3, 3, "router")}
    keys = ("backend", "us_p50", "vs", "again")
    return [(row["tiles"]["bm"], *(row.get(key) for key in keys)) for row in rows], result.output


def test_the_fastest_of_a_case_is_the_tuned_side(tmp_path, monkeypatch):
    rows, output = measured(tmp_path, monkeypatch, [[2.08, 3.0, 2.0]])
    assert rows == [(16, "jaxops", 2.08, {"tuned": 0.962}, None), (64, "tuned", 2.0, {}, None)]
    assert "1.040 times the fastest of 3\n" in output


def test_a_case_that_misses_is_timed_once_more(tmp_path, monkeypatch):
    rows, output = measured(tmp_path, monkeypatch, [[2.2, 3.0, 2.0], [2.0, 1.6, 2.1]])
    assert rows == [(16, "jaxops", 2.0, {"tuned": 0.8}, True), (32, "tuned", 1.6, {}, True)]
    assert "1.250 times the fastest of 3 | again" in output


def test_few_candidates_are_timed_beside_the_plan(tmp_path, monkeypatch):
    """The fastest in a single call: 64 rows take less than 32."""
    monkeypatch.setattr(bench_unseen_shapes, "MOST", 1)
    right = harness.checked
    monkeypatch.setattr(harness, "checked", lambda side, *args, **facts: of_us(right(side, *args, **facts), side))
    of_us = lambda ready, side: dataclasses.replace(ready, us={"0": 9.0, "1": 8.0, "2": 7.0}[side])
    rows, _ = measured(tmp_path, monkeypatch, [[2.0, 1.95]])
    assert [bm for bm, *_ in rows] == [16, 64]


def test_candidates(monkeypatch):
    """Of the plan's kernel and split; and what the plan's alternatives are where groups are short."""
    monkeypatch.setattr(device, "gluon_missing", lambda: "")
    monkeypatch.setattr(bench_unseen_shapes, "current_device", lambda: H100)
    monkeypatch.setattr(harness, "on_gpu", lambda: True)
    for M, kernels in ((1 << 16, {"triton"}), (1 << 12, {"triton", "pallas"})):
        own, *others = bench_unseen_shapes.tiles_of(GroupedShape("", 64, M, 4096, 2048), "fwd")
        assert 2 <= len(others) <= 20
        assert {tiles.kernel for tiles in (own, *others)} == kernels
    own, *others = bench_unseen_shapes.tiles_of(GroupedShape("", 1, 50_000, 1024, 2304), "wgrad")
    assert {tiles.split for tiles in others} == {1, own.split}
    assert own.split > 1
