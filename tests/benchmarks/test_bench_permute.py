"""The permutation benchmark's bytes, kernels and check, and its own path on a CPU."""

import json
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks import bench_permute, checks, harness, shapes_moe
from benchmarks.bench_permute import DTYPE, OPS, PASSES, SMOKE, Case
from tests.command_line import run
from tests.hopper import lower_for_h200

CASES = [Case(SMOKE, op, pass_name) for op in OPS for pass_name in PASSES]
KERNELS = {case.label: (case, case.op if case.pass_name == "fwd" else f"{case.op}_bwd") for case in CASES}


def test_bytes_are_those_of_every_input_and_output():
    shape, T, R, row = shapes_moe.PERMUTES["qwen3_30b_t4096"], 4096, 8 * 4096, 2 * 2048
    found = {(op, pass_name): shape.moved_bytes(op, pass_name) for op in OPS for pass_name in PASSES}
    assert found == {
        ("permute", "fwd"): row * (T + R) + 4 * R,
        ("permute", "bwd"): row * (T + R) + 4 * R,
        ("combine", "fwd"): row * (T + R) + 8 * R,
        ("combine", "bwd"): row * (T + 2 * R) + 12 * R,
    }
    assert len(shapes_moe.PERMUTES) == 3


@pytest.mark.parametrize(("case", "kernel"), KERNELS.values(), ids=KERNELS)
def test_a_case_times_its_own_pass_alone(case, kernel):
    """On a GPU the program has only that kernel."""
    inputs, routing = (
        jax.eval_shape(lambda make=make: make(SMOKE))
        for make in (bench_permute.make_inputs, bench_permute.make_routing)
    )
    assert set(re.findall(r'name = "(\w+)"', lower_for_h200(bench_permute.side(case, "pallas"), inputs, routing))) == {
        kernel
    }


def test_the_check_passes_what_is_right_and_fails_what_is_not():
    inputs, routing = bench_permute.make_inputs(SMOKE), bench_permute.make_routing(SMOKE)
    for case in CASES:
        parts = jax.jit(bench_permute.side(case, "xla"))(inputs, routing)
        assert bench_permute.errors(parts, parts) == (0, 0)
        for name, values in parts.items():
            for wrong in (values.at[5].multiply(1.2), jnp.roll(values, 1, axis=0), values.at[5, 0].set(jnp.nan)):
                assert not checks.within_limits(*bench_permute.errors(parts | {name: wrong}, parts), DTYPE)


def test_smoke_run_writes_a_row_a_case_and_side(tmp_path):
    result = run(bench_permute.main, "--smoke", "--out", str(tmp_path), "--rounds", "1")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "permute.jsonl").read_text().splitlines()]
    assert rows[0]["op"] == "copy"
    assert [(row["op"], row["pass"], row["backend"]) for row in rows[1:]] == [
        (o, p, b) for o in OPS for p in PASSES for b in ("pallas", "xla")
    ]
    for row in rows:
        assert set(harness.ROW_KEYS) <= set(row)
        assert (row["vs"] != {}) == (row["backend"] == "pallas")
    for row in rows[1:]:
        assert row["gbps"] == pytest.approx(SMOKE.moved_bytes(row["op"], row["pass"]) / row["us_p50"] / 1e3, rel=1e-2)
    assert rows[1]["shape"] == {"T": 40, "D": 96, "E": 8, "k": 3}


def test_without_a_gpu_nothing_lands_among_the_results():
    assert run(bench_permute.main).exit_code == 2
