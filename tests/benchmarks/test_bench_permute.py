"""The permutation benchmark's bytes, kernels and check."""

import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks.harness import checks
from benchmarks.ops import bench_permute
from benchmarks.ops.bench_permute import DTYPE, OPS, PASSES, SMOKE, Case
from benchmarks.shapes import moe as shapes_moe
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
        assert checks.worst_errors(parts, parts) == (0, 0)
        for name, values in parts.items():
            for wrong in (values.at[5].multiply(1.2), jnp.roll(values, 1, axis=0), values.at[5, 0].set(jnp.nan)):
                assert not checks.within_limits(*checks.worst_errors(parts | {name: wrong}, parts), DTYPE)
