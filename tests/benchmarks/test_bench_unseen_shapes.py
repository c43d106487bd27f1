"""Untuned shapes: which they are, their candidates, and a run on a CPU."""

import numpy as np

from benchmarks import harness, shapes
from benchmarks.ops import bench_unseen_shapes
from benchmarks.ops.bench_unseen_shapes import DISTS, SMOKE, unseen
from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.planning import device
from jaxops._lib.planning.device import Device
from jaxops.ops.grouped_matmul import Tiles, make_plan
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


def test_todays_tiles_were_measured(monkeypatch):
    """The figures in docs/speed.md are those of today's tiles, the tile order aside."""
    monkeypatch.setattr(device, "gluon_missing", lambda: "")
    kind = ("kernel", "bm", "bn", "stages", "ping_pong", "dynamic", "split")
    file = harness.ROOT / "benchmarks" / "results" / "nvidia_h100_80gb_hbm3" / "unseen_shapes.jsonl"
    measured = {  # a later row counts
        (row["name"], row["pass"]): {name: row["tiles"][name] for name in kind}
        for row in rows_of(file)
        if row["op"] == "grouped_matmul" and row["backend"] == bench_unseen_shapes.OURS
    }
    today = {
        (shape.name, each): {name: getattr(getattr(plan, each), name) for name in kind}
        for shape in unseen(20)
        for plan in (make_plan(bench_unseen_shapes.problem_of(shape), H100),)
        for each in shapes.PASSES
    }
    assert today == {key: measured[key] for key in today}


def test_smoke_run_writes_a_row_a_pass_and_side(tmp_path):
    result = run(bench_unseen_shapes.main, "--smoke", "--out", str(tmp_path), "--rounds", "1", "--passes", "fwd,wgrad")
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "unseen_shapes.jsonl")[2:]  # after the ceilings
    want = [(name, dist, side) for name in ("fwd", "wgrad") for dist in DISTS for side in ("jaxops", "tuned")]
    assert [(row["pass"], row["dist"], row["backend"]) for row in rows] == want
    for row in rows:
        assert set(harness.ROW_KEYS) <= set(row)
        assert row["shape"] == SMOKE.dims
        assert ("tuned" in row["vs"]) == (row["backend"] == "jaxops")
        assert row["tiles"]["kernel"] == "pallas"


def test_the_fastest_over_both_splits_is_the_tuned_side(tmp_path, monkeypatch):
    """Of three: the second is the fastest with even groups, the third over both."""
    tiles = [Tiles(bm, 16, 16) for bm in (16, 32, 64)]
    times = iter([(3.0, 1.0, 2.0), (3.0, 9.0, 2.0)])

    def interleave(sides, rounds=3, work_us=0):
        us = next(times) if len(sides) == len(tiles) else [1.0] * len(sides)  # others are of the machine
        return {side.name: harness.Times(each, each, each) for side, each in zip(sides, us, strict=True)}

    monkeypatch.setattr(bench_unseen_shapes, "tiles_of", lambda shape, pass_name: tiles)
    monkeypatch.setattr(harness, "interleave", interleave)
    result = run(bench_unseen_shapes.main, "--smoke", "--out", str(tmp_path), "--passes", "fwd")
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "unseen_shapes.jsonl")[2:]
    want = [("jaxops", 16, 3.0, {"tuned": 0.667}), ("tuned", 64, 2.0, {})] * 2
    assert [(row["backend"], row["tiles"]["bm"], row["us_p50"], row["vs"]) for row in rows] == want
    assert {row["tried"] for row in rows} == {3}
