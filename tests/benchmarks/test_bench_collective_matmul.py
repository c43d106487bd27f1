"""Products across host devices: every code path, the checks before the times, a fake torch."""

import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks import harness
from benchmarks.ops import bench_collective_matmul
from benchmarks.ops.bench_collective_matmul import SMOKE
from benchmarks.ops.collective_sides import AXIS, GATHER, MLP, OWN, SCATTER, SIDES
from tests.benchmarks.conftest import rows_of
from tests.command_line import run
from tests.devices import needs_four

FAKE_TORCH = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    slower, symmetric = asked["rank"] == 1, asked["side"] == "torch_symmetric"
    if asked["op"] == "matmul_reduce_scatter" and symmetric:
        answer = {"error": "RuntimeError: no symmetric memory"}
    else:
        way = lambda us: {"us": [us, us + 20 * slower], "host_us": 5.0 + slower, "max_err": 0.01, "rms_err": 0.001}
        ways = {"slow": way(300.0) | {"recipe": "slow"}, "fast": way(200.0) | {"recipe": "fast"}}
        answer = {"torch": "torch 0", "ways": ways}
    print(json.dumps({"answer": answer}), flush=True)
"""
SMOKE_RUN = ("--smoke", "--rounds", "1", "--out")


@pytest.fixture(autouse=True)
def fake_torch(torch_answers):
    torch_answers(FAKE_TORCH)


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    """In a program: XLA compiles each of them."""
    monkeypatch.setattr(bench_collective_matmul, "CALLS", dict.fromkeys(SIDES, 2))


@needs_four
def test_smoke_run_writes_a_row_for_each_side_that_works(tmp_path):
    result = run(bench_collective_matmul.main, *SMOKE_RUN, str(tmp_path))
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "collective_matmul.jsonl")
    found = {op: [row["backend"] for row in rows if row["op"] == op] for op in SIDES}
    assert sorted(found[GATHER]) == ["gemm", "jaxops", "torch_nccl", "torch_symmetric", "xla"]
    assert sorted(found[SCATTER]) == ["gemm", "jaxops", "torch_nccl", "xla"]
    assert sorted(found[MLP]) == ["jaxops", "jaxops_gathered", "xla", "xla_own_rows"]
    assert "left out: torch_symmetric at m1000_k64_n256 matmul_reduce_scatter: RuntimeError" in result.output
    for row in rows:
        assert set(harness.ROW_KEYS) <= set(row)
        assert row["devices"] == 4
        assert row["host_us"] > 0
        assert 0 < row["max_err"] < 0.1
        flops = (6 if row["op"] == MLP else 1) * SMOKE.flops / 4
        assert row["tflops"] == pytest.approx(flops / row["us_p50"] / 1e6, rel=1e-3)
    own, gemm, torch = (
        next(row for row in rows if row["op"] == GATHER and row["backend"] == name)
        for name in (OWN, "gemm", "torch_symmetric")
    )
    assert set(own["vs"]) == {"gemm", "xla", "torch_nccl", "torch_symmetric"}
    assert own["of_gemm"] == pytest.approx(own["us_p50"] / gemm["us_p50"], rel=1e-3)
    assert (torch["us_p50"], torch["host_us"], torch["recipe"]) == (210, 6, "torch 0, fast")


@needs_four
def test_a_wrong_result_is_not_written(tmp_path, monkeypatch):
    """One device's columns are another's, and one row of a gradient is missing."""
    wrong = {
        GATHER: lambda x, w: jnp.dot(lax.all_gather(x, AXIS, tiled=True), jnp.roll(w, 1, 1)),
        MLP: lambda *operands: tuple(y.at[3].set(0) for y in SIDES[MLP]["xla"].call(*operands)),
    }
    for op, call in wrong.items():
        monkeypatch.setitem(SIDES[op], OWN, SIDES[op][OWN]._replace(call=call))
    result = run(bench_collective_matmul.main, *SMOKE_RUN, str(tmp_path), "--ops", f"{GATHER},{MLP}", "--sides", "xla")
    assert result.exit_code == 1, result.output
    assert result.output.count("wrong result") == 2
    rows = rows_of(tmp_path / "collective_matmul.jsonl")
    assert [row["backend"] for row in rows] == ["xla", "xla"]
