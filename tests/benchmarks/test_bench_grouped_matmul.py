"""The grouped matmul benchmark: a run on a CPU, a wrong kernel in it, torch's process, and the report of its rows."""

import json

import pytest

from benchmarks import harness
from benchmarks.harness import report
from benchmarks.ops import bench_grouped_matmul
from benchmarks.peers import jax_passes as peers_jax
from tests.command_line import run

FAKE_TORCH = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    print("torch says something else first")
    if request["do"] == "time":
        answer = {"us": [7.0] * request["iterations"]}
    elif request["pass"] == "dense":
        answer = {"us": 5.0, "recipe": "fake"}
    elif request["pass"] == "fwd" and request["dist"] == "skewed":
        answer = {"error": "RuntimeError: strides"}
    elif request["pass"] == "wgrad" and request["dist"] == "skewed":
        sys.exit(3)
    else:
        answer = {"us": 5.0, "recipe": "fake", "max_err": 0.01, "rms_err": 0.002}
    print(json.dumps({"answer": answer}), flush=True)
"""


def rows_of(folder):
    return [json.loads(line) for line in (folder / "grouped_matmul.jsonl").read_text().splitlines()]


@pytest.fixture
def fake_torch(torch_answers):
    torch_answers(FAKE_TORCH)


def test_smoke_run_writes_a_row_a_case_and_side(tmp_path, fake_torch):
    options = ["--passes", "fwd,wgrad", "--dists", "balanced,skewed", "--peers", "ragged_dot,torch_grouped_mm,cublas"]
    options.append("--held-out")  # compiles ahead
    result = run(bench_grouped_matmul.main, "--smoke", "--out", str(tmp_path), "--rounds", "1", *options)
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path)
    sides = {(row["pass"], row["dist"], row["backend"]) for row in rows if row["op"] == "grouped_matmul"}
    assert {(p, d, b) for p in ("fwd", "wgrad") for d in ("balanced", "skewed") for b in ("pallas", "cublas")} <= sides
    assert {(p, d) for p, d, b in sides if b == "ragged_dot"} == {("fwd", "balanced"), ("wgrad", "balanced")}
    assert {(p, d) for p, d, b in sides if b == "torch_grouped_mm"} == {("fwd", "balanced"), ("wgrad", "balanced")}
    assert "torch_grouped_mm at smoke skewed fwd: RuntimeError: RuntimeError: strides" in result.output
    assert "torch_grouped_mm at smoke skewed wgrad: RuntimeError: torch's process ended with 3" in result.output
    assert {(row["op"], row["name"]) for row in rows} >= {
        ("copy", "copy"),
        ("matmul", "dense_square"),
        ("matmul", "dense_wide"),
    }
    for row in rows:
        assert set(harness.ROW_KEYS) <= set(row)
        assert row.get("tflops", row.get("gbps")) > 0
        assert (row["vs"] != {}) == (row["backend"] == "pallas")
    own = next(row for row in rows if row["backend"] == "pallas" and row["pass"] == "fwd" and row["dist"] == "balanced")
    peer = next(
        row for row in rows if row["backend"] == "cublas" and row["pass"] == "fwd" and row["dist"] == "balanced"
    )
    assert own["vs"]["cublas"] == pytest.approx(peer["us_p50"] / own["us_p50"], rel=1e-2, abs=1e-3)
    assert 0 < own["max_err"] < 4e-2
    copy, dense = (
        next(row["gbps"] for row in rows if row["op"] == "copy"),
        max(row["tflops"] for row in rows if row["op"] == "matmul"),
    )
    assert {row["of_ceiling"] for row in rows if row["op"] == "matmul" and row["tflops"] == dense} == {1.0}
    for row in (own, peer):
        G, M, K, N = (row["shape"][name] for name in "GMKN")
        assert row["tflops"] == pytest.approx(2 * M * K * N / row["us_p50"] / 1e6, rel=1e-2)
        least_us = max(2 * M * K * N / dense / 1e6, 2 * (M * K + M * N + G * K * N) / copy / 1e3)
        assert row["of_ceiling"] == pytest.approx(least_us / row["us_p50"], rel=1e-2, abs=1e-4)


def test_a_failed_check_writes_no_row_and_fails_the_run(tmp_path, monkeypatch):
    def wrong(backend):
        passes = peers_jax.jaxops_passes("xla")
        return passes | {"fwd": lambda *args: passes["fwd"](*args) * 1.1}

    monkeypatch.setattr(bench_grouped_matmul, "jaxops_passes", wrong)
    options = ["--dists", "balanced", "--peers", "ragged_dot", "--passes", "fwd"]
    result = run(bench_grouped_matmul.main, "--smoke", "--out", str(tmp_path), "--rounds", "1", *options)
    assert result.exit_code == 1
    assert "left out: jaxops at smoke balanced fwd: ArithmeticError: wrong result" in result.output
    assert [row["backend"] for row in rows_of(tmp_path) if row["op"] == "grouped_matmul"] == ["ragged_dot"]


def row_of(backend, us, vs, dist="balanced", **more):
    dims = {"G": 2, "M": 4, "K": 8, "N": 16}
    case = {
        "op": "grouped_matmul",
        "pass": "fwd",
        "name": "dsv3",
        "shape": dims,
        "dtype": "bfloat16",
        "dist": dist,
        "backend": backend,
    }
    return harness.make_row(case, harness.Times(us - 1, us, us + 1), 0.5, vs, 0.01, **({"tflops": 1000 / us} | more))


def test_report_tables_and_plot(tmp_path):
    rows = [
        row_of("pallas", 99.0, {"ragged_dot": 9.9}),
        row_of("pallas", 10.0, {"ragged_dot": 5.0, "torch_grouped_mm": 0.8}),
        row_of("pallas", 20.0, {"torch_grouped_mm": 1.25}, dist="skewed"),
        row_of("ragged_dot", 50.0, {}),
        row_of("torch_grouped_mm", 8.0, {}, recipe="torch 2"),
    ]
    for row in rows:
        harness.append_row(tmp_path / "grouped_matmul.jsonl", row)
    result = run(report.main, str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "## grouped_matmul, fwd" in result.output
    assert (
        "| dsv3 | balanced | bfloat16 | pallas | 10.0 (9.0 to 11.0) | 100 TFLOP/s | 50 % | 5.00 | 0.80 |"
        in result.output
    )
    assert "99.0" not in result.output  # the newest row of a case counts
    assert "| grouped_matmul | fwd | torch_grouped_mm | 0.80 | dsv3 balanced | 1.00 | 2 |" in result.output
    assert (tmp_path / "grouped_matmul.png").stat().st_size > 1000
