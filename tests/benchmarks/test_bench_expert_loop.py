"""The loop over experts multiplies what grouped_matmul does, and a run on a CPU writes both sides."""

import json

import numpy as np
import pytest

from benchmarks import bench_expert_loop, harness
from benchmarks.bench_expert_loop import LOOPS, MANY, SMOKE
from benchmarks.bench_grouped_matmul import Inputs
from benchmarks.peers_jax import jaxops_passes
from tests.command_line import run


@pytest.mark.parametrize("pass_name", LOOPS)
def test_loop(pass_name):
    args = Inputs.make(SMOKE).args("jaxops", np.array([0, 5, 5, 90, 96], np.int32))
    found, want = LOOPS[pass_name](*args), jaxops_passes("xla")[pass_name](*args)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, want)), rtol=2e-2, atol=2e-1)


def test_shapes_have_many_experts():
    assert set(MANY) == {"dsmoe16b", "qwen3_30b", "dsv3", "dsv3_small"}


def test_smoke_run_writes_both_sides(tmp_path):
    result = run(bench_expert_loop.main, "--smoke", "--out", str(tmp_path), "--rounds", "1", "--calls", "2")
    assert result.exit_code == 0, result.output
    _, *rows = [json.loads(line) for line in (tmp_path / "expert_loop.jsonl").read_text().splitlines()]
    assert [(row["pass"], row["backend"]) for row in rows] == [
        (name, side) for name in LOOPS for side in ("jaxops", "python_loop")
    ]
    for row in rows:
        assert set(harness.ROW_KEYS) <= set(row)
        assert 0 < row["host_us"] <= row["us_p80"]
    assert {tuple(row["vs"]) for row in rows} == {("python_loop",), ()}
    assert all(row["host_share"] > 0 for row in rows if row["vs"])
    assert run(bench_expert_loop.main).exit_code == 2


def test_a_wrong_side_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setitem(LOOPS, "fwd", lambda *args: 2 * bench_expert_loop.loop_fwd(*args))
    options = ("--smoke", "--out", str(tmp_path), "--rounds", "1", "--calls", "1", "--passes", "fwd")
    assert "left out: python_loop" in run(bench_expert_loop.main, *options).output
    _, *rows = [json.loads(line) for line in (tmp_path / "expert_loop.jsonl").read_text().splitlines()]
    assert [(row["backend"], row["vs"]) for row in rows] == [("jaxops", {})]
