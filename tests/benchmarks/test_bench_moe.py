"""The layer's benchmark: its sides compute the same, what is wrong is left out, and its own path on a CPU."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import bench_moe, harness, shapes, shapes_moe
from benchmarks.bench_moe import SMOKE
from tests.command_line import run


def test_flops_are_those_of_the_routed_rows():
    shape = shapes_moe.MOES["qwen3_30b_t4096"]
    assert shape.flops("fwd") == 3 * shapes.GROUPED["qwen3_30b"].flops
    assert shape.flops("fwd+bwd") == 3 * shape.flops("fwd")


def test_the_check_sees_a_wrong_result():
    inputs = (jnp.asarray(shapes_moe.preferences("skewed", SMOKE)), *bench_moe.make_inputs(SMOKE))
    results = {
        side: jax.jit(bench_moe.program(side, SMOKE, "fwd+bwd"))(*inputs)
        for side in ("xla", "ragged_dot", "jaxops", "jaxops_unfused")
    }
    assert len(results["xla"]) == 6  # y, and the gradients of tokens, router, gate, up, down
    for side in ("ragged_dot", "jaxops", "jaxops_unfused"):
        assert float(bench_moe.errors(results[side], results["xla"])[1]) < 3e-2
    for i, result in enumerate(results["xla"]):
        wrong = list(results["xla"])
        wrong[i] = result.at[1].multiply(1.5)
        assert float(bench_moe.errors(tuple(wrong), results["xla"])[1]) > 3e-2
        wrong[i] = result.at[1].set(jnp.nan)
        assert not float(bench_moe.errors(tuple(wrong), results["xla"])[1]) < 3e-2


def test_smoke_run_writes_a_row_a_case_and_side(tmp_path):
    result = run(bench_moe.main, "--smoke", "--out", str(tmp_path), "--rounds", "1", "--peers", "ragged_dot,nobody")
    assert result.exit_code == 0, result.output
    assert "left out: nobody at smoke router fwd" in result.output
    rows = [json.loads(line) for line in (tmp_path / "moe.jsonl").read_text().splitlines()]
    assert [(row["pass"], row["dist"], row["backend"]) for row in rows[1:]] == [
        (p, *case)
        for p in bench_moe.PASSES
        for case in (("router", "jaxops"), ("router", "ragged_dot"), ("balanced", "jaxops"), ("skewed", "jaxops"))
    ]
    for row in rows:
        assert set(harness.ROW_KEYS) <= set(row)
    for row in rows[1:]:
        assert (row["vs"] != {}) == (row["backend"] == "jaxops" and row["dist"] == "router")
        assert row["temp_bytes"] > 0
        assert row["tflops"] == pytest.approx(SMOKE.flops(row["pass"]) / row["us_p50"] / 1e6, rel=1e-2)


def test_without_a_gpu_nothing_lands_among_the_results():
    assert run(bench_moe.main).exit_code == 2
