"""Experts over host devices: rows of the sides, and what the check refuses."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import bench_expert_exchange, harness
from benchmarks.bench_expert_exchange import ALONE, OURS, SMOKE, check
from tests.command_line import run
from tests.devices import needs_four


@needs_four
def test_smoke_run_writes_a_row_a_side(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_expert_exchange, "CALLS", 2)  # in a program: XLA compiles each of them
    how = ("--smoke", "--rounds", "1", "--passes", "fwd", "--sides", "alone,xla", "--out", str(tmp_path))
    result = run(bench_expert_exchange.main, *how)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "expert_exchange.jsonl").read_text().splitlines()]
    assert sorted(row["backend"] for row in rows) == ["alone", "jaxops", "xla"]
    alone = next(row["us_p50"] for row in rows if row["backend"] == "alone")
    for row in rows:
        assert set(harness.ROW_KEYS) <= set(row)
        assert (row["devices"], row["vs"] != {}) == (4, row["backend"] == "jaxops")
        assert row["of_alone"] == pytest.approx(row["us_p50"] / alone, rel=1e-2)
        assert row["tflops"] == pytest.approx(SMOKE.flops("fwd") / 4 / row["us_p50"] / 1e6, rel=1e-2)


def test_the_check():
    """Of `alone` the devices' parts are added; a result of another token or expert is wrong."""
    want = tuple(jnp.asarray(np.random.default_rng(0).normal(size=(SMOKE.T, SMOKE.D)), "float32") for _ in range(2))
    assert check(OURS, SMOKE, want, want) == 0
    assert check(ALONE, SMOKE, tuple(jnp.concatenate([x / 4, 3 * x / 4]) for x in want), want) < 1e-6
    for wrong in (jnp.roll(want[1], 1, axis=0), 1.1 * want[1], want[1].at[3].set(jnp.nan)):
        with pytest.raises(ArithmeticError, match="wrong result"):
            check(OURS, SMOKE, (want[0], wrong), want)


def test_an_unknown_side():
    result = run(bench_expert_exchange.main, "--smoke", "--sides", "deepep", "--out", "/nowhere")
    assert result.exit_code == 2
    assert "deepep" in result.output
