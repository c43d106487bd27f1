"""The AdaLN benchmark: sequences, bytes and checks; a run on a CPU with a fake torch; the report of its rows."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import harness, shapes
from benchmarks.harness import checks, report
from benchmarks.ops import bench_adaln
from benchmarks.ops.bench_adaln import SMOKE, Case
from benchmarks.peers import adaln as peers_adaln
from tests.command_line import run

FAKE_TORCH = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "time":
        answer = {"us": [7.0] * request["iterations"]}
    elif request["dist"] == "one":
        answer = {"error": "RuntimeError: index, default: wrong result"}
    else:
        assert request["limits"] == [0.1, 0.01] and request["ways"][0] == "index"
        answer = {"us": 5.0, "recipe": "fake", "max_err": 0.01, "rms_err": 0.002, "prepared_s": 1.0}
        answer |= {"tried": {"index, default": 5.0}, "refusals": ["repeat: no"]}
    print(json.dumps({"answer": answer}), flush=True)
"""


@pytest.mark.parametrize("dist", shapes.PACKED_DISTS)
@pytest.mark.parametrize(("B", "T"), [(64, 65536), (16, 16384), (5, 96), (3, 61), (1, 7)])
def test_lengths_sum_to_t_and_are_the_same_each_time(dist, B, T):
    lengths = shapes.sequence_lengths(dist, B, T)
    assert lengths.dtype == np.int32
    assert lengths.min() >= 0
    assert lengths.sum() == T
    np.testing.assert_array_equal(lengths, shapes.sequence_lengths(dist, B, T))
    assert len(lengths) == {"many": -(-T // 16), "single": 1}.get(dist, B)


@pytest.mark.parametrize("shape", shapes.PACKED.values(), ids=lambda shape: shape.name)
def test_what_the_distributions_are_called_for(shape):
    mean = shape.T / shape.B
    unequal = shapes.sequence_lengths("unequal", shape.B, shape.T)
    assert 0.24 * mean < unequal.min() < 0.3 * mean
    assert 1.7 * mean < unequal.max() < 1.76 * mean
    assert np.any(unequal % 8)
    assert np.any(np.diff(unequal) > 0)
    assert np.any(np.diff(unequal) < 0)
    assert np.count_nonzero(shapes.sequence_lengths("third_empty", shape.B, shape.T) == 0) == shape.B // 3
    assert sorted(shapes.sequence_lengths("one", shape.B, shape.T))[-2:] == [0, shape.T]
    assert set(shapes.sequence_lengths("many", shape.B, shape.T)[:-1]) == {16}  # the last one has the rest
    with pytest.raises(ValueError, match="write one of unequal"):
        shapes.sequence_lengths("skewed", shape.B, shape.T)


def test_bytes_are_those_of_every_input_and_output():
    shape = shapes.PACKED["t65536_d3072"]
    rows, vectors = 2 * 65536 * 3072, 2 * 64 * 3072
    assert shape.moved_bytes("adaln", "fwd") == 2 * rows + 2 * vectors
    assert shape.moved_bytes("adaln", "fwd+bwd") == 5 * rows + 4 * vectors
    assert shape.moved_bytes("gated_residual_adaln", "fwd") == 4 * rows + 3 * vectors
    assert shape.moved_bytes("gated_residual_adaln", "fwd+bwd") == 10 * rows + 6 * vectors
    many = shape.of_dist("many")
    assert many.dims == {"T": 65536, "D": 3072, "B": 4096}
    assert many.moved_bytes("adaln", "fwd") == 2 * rows + 64 * 2 * vectors


def case_of(op, pass_name, dist):
    offsets = shapes.group_offsets(shapes.sequence_lengths(dist, SMOKE.B, SMOKE.T))
    case = Case(op, SMOKE.of_dist(dist), pass_name, dist, offsets, SMOKE.B)
    return case, bench_adaln.case_inputs(case, bench_adaln.row_tensors(case.shape))


@pytest.mark.parametrize(("op", "dist"), [("adaln", "unequal"), ("gated_residual_adaln", "third_empty")])
def test_the_check_passes_what_is_right_and_fails_what_is_not(op, dist):
    case, inputs = case_of(op, "fwd+bwd", dist)
    results = jax.jit(peers_adaln.jax_side(op, "xla").fwd_bwd)(inputs)
    errors = checks.packed_errors(results, inputs, case.offsets)
    assert checks.within_limits(*errors, "bfloat16 adaln")
    assert errors[0] > 0
    row = shapes.sampled_packed_rows(case.offsets)[1][0]  # the first row of the shortest sequence
    for name, result in results.items():
        at = row if len(result) == SMOKE.T else int(np.argmax(np.diff(case.offsets)))
        wrong = results | {name: result.at[at].multiply(1.1)}
        assert not checks.within_limits(*checks.packed_errors(wrong, inputs, case.offsets), "bfloat16 adaln"), name
        nan = results | {name: result.at[at, 3].set(jnp.nan)}
        assert not checks.within_limits(*checks.packed_errors(nan, inputs, case.offsets), "bfloat16 adaln"), name
    # Rows that come from the neighbouring sequence's modulation.
    shifted = jax.jit(peers_adaln.jax_side(op, "xla").fwd_bwd)(
        inputs | {"sequence_ids": jnp.roll(inputs["sequence_ids"], 1)}
    )
    assert not checks.within_limits(*checks.packed_errors(shifted, inputs, case.offsets), "bfloat16 adaln")
    if dist == "third_empty":
        empty = int(np.flatnonzero(np.diff(case.offsets) == 0)[0])
        not_zero = results | {"dshift": results["dshift"].at[empty, 0].set(1e-30)}
        assert checks.packed_errors(not_zero, inputs, case.offsets)[0] == np.inf
    with pytest.raises(ValueError, match=r"dscale has shape \(4, 64\), it must be \(5, 64\)"):
        checks.packed_errors(results | {"dscale": results["dscale"][1:]}, inputs, case.offsets)


def test_the_backward_alone_gives_the_same_gradients():
    _, inputs = case_of("gated_residual_adaln", "bwd", "unequal")
    side = peers_adaln.jax_side("gated_residual_adaln", "xla")
    program = bench_adaln.Program.of(side, "bwd", inputs)
    grads, whole = program.compiled[0](*program.args(inputs)), jax.jit(side.fwd_bwd)(inputs)
    assert set(grads) == {"dx", "dh", "dgate", "dscale", "dshift"}
    assert set(whole) == set(grads) | {"y", "new_residual"}
    for name, grad in grads.items():
        np.testing.assert_allclose(
            np.asarray(grad, np.float32), np.asarray(whole[name], np.float32), atol=0.1, rtol=0.02
        )


@pytest.fixture
def fake_torch(torch_answers):
    torch_answers(FAKE_TORCH)


def test_smoke_run_writes_a_row_a_case_and_side(tmp_path, fake_torch):
    options = ["--ops", "adaln", "--passes", "fwd,bwd", "--dists", "one,unequal"]
    result = run(bench_adaln.main, "--smoke", "--out", str(tmp_path), "--rounds", "1", *options)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "adaln.jsonl").read_text().splitlines()]
    assert rows[0]["op"] == "copy"
    sides = {(row["pass"], row["dist"], row["backend"]) for row in rows[1:]}
    assert {(p, d, b) for p in ("fwd", "bwd") for d in ("unequal", "one") for b in ("pallas", "xla")} == {
        side for side in sides if side[2] != "torch_compile"
    }
    assert {side for side in sides if side[2] == "torch_compile"} == {("fwd", "unequal", "torch_compile")}
    assert (
        "torch_compile at adaln smoke one fwd: RuntimeError: RuntimeError: index, default: wrong result"
        in result.output
    )
    assert "torch_compile at adaln smoke unequal bwd: NotImplementedError" in result.output
    assert "refused: repeat: no" in result.output
    for row in rows:
        assert set(harness.ROW_KEYS) <= set(row)
        assert row["gbps"] > 0
        assert (row["vs"] != {}) == (row["backend"] == "pallas")
    own = next(row for row in rows if row["backend"] == "pallas" and row["dist"] == "one" and row["pass"] == "fwd")
    assert own["shape"] == {"T": 96, "D": 64, "B": 5}
    assert own["gbps"] == pytest.approx(2 * 64 * (2 * 96 + 2 * 5) / own["us_p50"] / 1e3, rel=1e-2)
    assert 0 < own["max_err"] < 4e-2
    tables = run(report.main, str(tmp_path), "--no-plots")
    assert tables.exit_code == 0, tables.output
    assert "## adaln, bwd" in tables.output
    assert "GB/s" in tables.output


def test_a_failed_check_writes_no_row_and_fails_the_run(tmp_path, monkeypatch):
    right = peers_adaln.jaxops_side
    wrong = lambda op, backend: peers_adaln.Side(
        op, lambda inputs: tuple(result * 1.1 for result in right(op, backend).call(inputs))
    )
    monkeypatch.setattr(peers_adaln, "jaxops_side", wrong)
    options = ["--ops", "adaln", "--passes", "fwd", "--dists", "unequal", "--peers", "xla"]
    result = run(bench_adaln.main, "--smoke", "--out", str(tmp_path), "--rounds", "1", *options)
    assert result.exit_code == 1
    assert "left out: pallas at adaln smoke unequal fwd: ArithmeticError: wrong result" in result.output
    rows = [json.loads(line) for line in (tmp_path / "adaln.jsonl").read_text().splitlines()]
    assert [(row["op"], row["backend"]) for row in rows] == [("copy", "xla"), ("adaln", "xla")]
