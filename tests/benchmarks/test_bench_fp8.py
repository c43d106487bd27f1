"""The FP8 benchmarks: bytes, floors and checks; runs on a CPU with a fake torch; the report of their rows."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import harness
from benchmarks.harness import checks, report
from benchmarks.ops import (
    bench_fp8_grouped_matmul,
    bench_fp8_matmul,
    bench_quantize,
    fp8_machine,
    fp8_products,
)
from benchmarks.ops.quantized_bytes import moved_bytes, reads_needed
from benchmarks.peers import fp8 as peers_fp8
from benchmarks.shapes import DENSE, DenseShape
from jaxops.ops.fp8_matmul import RECIPES
from tests.command_line import run

FAKE_TORCH = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "time":
        answer = {"us": [7.0] * request["iterations"]}
    elif request.get("dist") == "skewed":
        answer = {"error": "RuntimeError: strides"}
    else:
        assert request["limits"][0] in (0.3, 0.4)
        answer = {"us": 5.0, "recipe": "fake", "max_err": 0.01, "rms_err": 0.002}
    print(json.dumps({"answer": answer}), flush=True)
"""


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def fake_torch(torch_answers):
    torch_answers(FAKE_TORCH)


def test_bytes_of_a_quantisation():
    size = 256 * 384
    assert moved_bytes("block_1x128", 256, 384, "row") == 3 * size + 4 * 256 * 3
    assert moved_bytes("block_1x128", 256, 384, "both") == 4 * size + 4 * 256 * 3 + 4 * 2 * 384
    assert moved_bytes("block_128x128", 256, 384, "both") == 4 * size + 2 * 4 * 2 * 3
    assert moved_bytes("rowwise", 256, 384, "col") == 3 * size + 4 * 384
    assert moved_bytes("tensorwise", 256, 384, "row", reads=2) == 5 * size + 4
    assert reads_needed("tensorwise", "row") == reads_needed("rowwise", "both") == 2
    assert (
        reads_needed("rowwise", "row")
        == reads_needed("block_1x128", "both")
        == reads_needed("tensorwise", "both", given_amax=True)
        == 1
    )


def test_a_floor_counts_what_the_casts_must_move():
    M, K, N = 256, 384, 512
    mk, kn, mn = M * K, K * N, M * N
    counted = {
        (name, p): fp8_products.cast_bytes(RECIPES[name], p, M, K, N) for name in RECIPES for p in ("fwd", "fwd+bwd")
    }
    assert counted["tensorwise", "fwd"] == 5 * (mk + kn) + 2 * 4
    assert counted["delayed", "fwd"] == 3 * (mk + kn) + 2 * 4
    assert counted["tensorwise", "fwd+bwd"] == 6 * (mk + kn + mn) + 6 * 4
    assert counted["delayed", "fwd+bwd"] == 4 * (mk + kn) + 6 * mn + 6 * 4
    assert counted["blockwise", "fwd"] == 3 * (mk + kn) + 4 * (mk // 128 + kn // 128**2)
    assert counted["blockwise", "fwd+bwd"] == 4 * (mk + kn + mn) + 2 * 4 * (mk // 128 + mn // 128 + kn // 128**2)
    assert counted["blockwise_with_gw_hp", "fwd+bwd"] == 3 * (mk + mn) + 4 * kn + 4 * (
        mk // 128 + mn // 128 + 2 * kn // 128**2
    )
    assert {(s.M, s.K, s.N) for s in DENSE.values()} >= {(8192, 4096, 4096), (15872, 4096, 16384)}


def test_the_check_of_a_linear_sees_a_block_that_is_missing():
    shape = DenseShape(128, 256, 128)
    x, w, dy = bench_fp8_matmul.Inputs.make(shape).args
    right = {form: jax.jit(peers_fp8.fp8_passes(form)["fwd"])(x, w, dy)["y"] for form in ("scaled", "direct")} | {
        "bfloat16": x @ w
    }
    for name, y in right.items():
        max_err, rms_err = checks.linear_errors({"y": y}, x, w, dy)
        assert checks.within_limits(max_err, rms_err, "bfloat16" if name == "bfloat16" else "fp8")
        assert checks.within_limits(max_err, rms_err, "bfloat16") == (name == "bfloat16")
    dw = x.T @ dy
    assert checks.within_limits(*checks.linear_errors({"y": right["bfloat16"], "dw": dw}, x, w, dy), "bfloat16")
    assert not checks.within_limits(*checks.linear_errors({"y": x[:, 128:] @ w[128:]}, x, w, dy), "fp8")
    assert not checks.within_limits(
        *checks.linear_errors({"y": right["bfloat16"], "dw": dw.at[0, 0].set(jnp.nan)}, x, w, dy), "fp8 e5m2"
    )


@pytest.mark.parametrize("scaling", ["rowwise", "block_128x128"])
def test_plain_quantisation_gives_the_tensor_back(scaling):
    x = harness.normal(0, (256, 384), jnp.bfloat16)
    case = bench_quantize.Case(bench_quantize.MatrixShape(256, 384), scaling, "both")
    got = jax.jit(peers_fp8.quantize, static_argnums=(1, 2))(x, scaling, "both")
    assert checks.within_limits(*bench_quantize.peer_errors(case, got, x), "fp8 cast")
    wrong = got | {"values_t": got["values_t"].T.reshape(got["values_t"].shape)}
    assert not checks.within_limits(*bench_quantize.peer_errors(case, wrong, x), "fp8 cast")


def test_one_other_bit_is_found():
    want = {"values": jnp.array([1.0, jnp.nan], jnp.float8_e4m3fn), "scales": jnp.array([1.0], jnp.float32)}
    bench_quantize.demand_same_bits(want, want)
    with pytest.raises(ArithmeticError, match=r"other bits than the xla backend's: \{'scales': 1\}"):
        bench_quantize.demand_same_bits(want | {"scales": jnp.nextafter(want["scales"], 2)}, want)
    with pytest.raises(ArithmeticError, match="values must be"):
        bench_quantize.demand_same_bits(want | {"values": want["values"][:1]}, want)


def test_quantize_smoke_run(tmp_path, fake_torch):
    result = run(bench_quantize.main, "--smoke", "--out", str(tmp_path), "--rounds", "1", "--scalings", "block_1x128")
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "quantize.jsonl")
    assert rows[0]["op"] == "copy"
    sides = [(row["layouts"], row["backend"]) for row in rows[1:]]
    assert sides == [("row", "pallas"), ("row", "xla"), ("row", "torch_compile"), ("both", "pallas"), ("both", "xla")]
    own = rows[1]
    assert (own["max_err"], own["scaling"], own["passes"]) == (0, "block_1x128", 1)
    assert own["gbps"] == pytest.approx(moved_bytes("block_1x128", 256, 128, "row") / own["us_p50"] / 1e3, rel=1e-2)
    assert set(own["vs"]) == {"xla", "torch_compile"}
    assert len(report.read_rows(tmp_path)) == 6


def test_quantisation_that_is_off_by_a_bit_writes_no_row(tmp_path, monkeypatch):
    right = bench_quantize.jaxops_side

    def wrong(case, backend):
        def call(x):
            result = right(case, "xla")(x)
            return result | {"scales": result["scales"].at[0, 0].multiply(1 + 1e-6)} if backend == "pallas" else result

        return call

    monkeypatch.setattr(bench_quantize, "jaxops_side", wrong)
    options = ["--scalings", "block_1x128", "--layouts", "row", "--peers", ""]
    result = run(bench_quantize.main, "--smoke", "--out", str(tmp_path), "--rounds", "1", *options)
    assert result.exit_code == 1
    assert "left out: pallas at m256_k128 block_1x128 row: ArithmeticError: wrong result: other bits" in result.output
    assert [row["op"] for row in rows_of(tmp_path / "quantize.jsonl")] == ["copy"]


@pytest.fixture
def fp8_rate(monkeypatch):
    """Fakes a machine with cuBLASLt FP8 at 0.25 TFLOP/s."""
    measure = fp8_machine.measure_machine
    monkeypatch.setattr(fp8_machine, "measure_machine", lambda *args: (measure(*args)[0], 0.25))
    return 0.25


def test_fp8_matmul_smoke_run(tmp_path, fake_torch, fp8_rate):
    options = ["--recipes", "blockwise", "--passes", "fwd,gemm", "--peers", "xla_bf16,torch_compile"]
    result = run(bench_fp8_matmul.main, "--smoke", "--out", str(tmp_path), "--rounds", "1", *options)
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "fp8_matmul.jsonl")
    assert [row["op"] for row in rows[:2]] == ["copy", "matmul"]
    own, *peers = (row for row in rows if row["op"] == "fp8_matmul" and row["pass"] == "fwd")
    assert (own["recipe"], own["cast"], own["backend"]) == ("blockwise", "before", "xla")
    assert {row["backend"] for row in peers} == set(own["vs"]) == {"xla_bf16", "torch_compile"}
    cast_us = fp8_products.cast_bytes(RECIPES["blockwise"], "fwd", 128, 256, 128) / rows[0]["gbps"] / 1e3
    assert own["floor_us"] == pytest.approx(own["gemm_us"] + cast_us, rel=1e-2)
    assert own["of_floor"] == pytest.approx(own["floor_us"] / own["us_p50"], rel=1e-2)
    assert own["tflops"] == pytest.approx(2 * 128 * 256 * 128 / own["us_p50"] / 1e6, rel=1e-2)
    assert own["of_ceiling"] == pytest.approx(own["tflops"] / fp8_rate, rel=1e-2, abs=1e-4)
    gemms = [row for row in rows if row["pass"] == "gemm"]
    assert [row.get("recipe") for row in gemms] == ["blockwise", "blockwise wgrad", None]
    assert all(0.01 < row["max_err"] < 0.3 for row in gemms[:2])
    assert "left out: cublaslt at m128_k256_n128 gemm: NotImplementedError" in result.output
    tables = run(report.main, str(tmp_path), "--no-plots")
    assert tables.exit_code == 0, tables.output
    assert "| m128_k256_n128 blockwise before |" in tables.output
    assert "of floor" in tables.output


def test_a_wrong_linear_writes_no_row_and_fails_the_run(tmp_path, monkeypatch):
    right = bench_fp8_matmul.own_passes
    wrong = lambda recipe, plan: {"fwd": lambda *args: {"y": right(recipe, plan)["fwd"](*args)["y"] * 1.5}}
    monkeypatch.setattr(bench_fp8_matmul, "own_passes", wrong)
    options = ["--recipes", "tensorwise", "--passes", "fwd", "--peers", ""]
    result = run(bench_fp8_matmul.main, "--smoke", "--out", str(tmp_path), "--rounds", "1", *options)
    assert result.exit_code == 1
    assert "left out: tensorwise at m128_k256_n128 fwd: ArithmeticError: wrong result" in result.output
    assert {row["op"] for row in rows_of(tmp_path / "fp8_matmul.jsonl")} == {"copy", "matmul"}


def test_fp8_grouped_matmul_smoke_run(tmp_path, fake_torch, fp8_rate):
    options = ["--passes", "fwd,wgrad", "--peers", "jaxops_bf16,torch_grouped_mm"]
    result = run(bench_fp8_grouped_matmul.main, "--smoke", "--out", str(tmp_path), "--rounds", "1", *options)
    assert result.exit_code == 0, result.output
    copy, _, *rows = rows_of(tmp_path / "fp8_grouped_matmul.jsonl")
    sides = {(row["pass"], row["dist"], row["backend"]) for row in rows}
    jax_sides = {(p, d, b) for p in ("fwd", "wgrad") for d in ("balanced", "skewed") for b in ("xla", "jaxops_bf16")}
    assert sides == jax_sides | {("fwd", "balanced", "torch_grouped_mm")}
    assert "torch_grouped_mm at smoke skewed fwd: RuntimeError: RuntimeError: strides" in result.output
    own = next(row for row in rows if row["backend"] == "xla" and row["pass"] == "wgrad")
    assert own["recipe"] == "blockwise"
    assert set(own["vs"]) == {"jaxops_bf16"}
    assert 0.01 < own["max_err"] < 0.3
    for row in rows:
        G, M, K, N = (row["shape"][name] for name in "GMKN")
        assert row["tflops"] == pytest.approx(2 * M * K * N / row["us_p50"] / 1e6, rel=1e-2)
        if row["dist"] == "balanced":  # no group is empty
            moved = 2 * (M * K + M * N) + {"fwd": 1, "wgrad": 2}[row["pass"]] * G * K * N
            least_us = max(2 * M * K * N / fp8_rate / 1e6, moved / copy["gbps"] / 1e3)
            assert row["of_ceiling"] == pytest.approx(least_us / row["us_p50"], rel=1e-2, abs=1e-4)
