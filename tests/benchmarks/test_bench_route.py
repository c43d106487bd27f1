"""The routing benchmark's bytes and checks."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.ops import bench_route
from benchmarks.ops.bench_route import SMOKE, Case
from benchmarks.shapes import moe as shapes_moe


def test_bytes_are_those_of_every_input_and_output():
    shape = shapes_moe.ROUTES["dsv3_t4096"]
    assert shape.moved_bytes("fwd") == 4 * 4096 * (256 + 4 * 8)
    assert shape.moved_bytes("fwd+bwd") == 4 * 4096 * (3 * 256 + 6 * 8)
    assert len(shapes_moe.ROUTES) == 6


def test_the_check_passes_what_is_right_and_fails_what_is_not():
    parts = jax.jit(bench_route.side(Case(SMOKE, "fwd+bwd"), "xla"))(bench_route.make_inputs(SMOKE))
    assert bench_route.errors(parts, parts) == (0, 0)
    for name in ("weights", "dlogits"):
        assert bench_route.errors(parts | {name: parts[name].at[5].multiply(1.1)}, parts)[0] > 1e-2
        assert not bench_route.errors(parts | {name: parts[name].at[5, 0].set(jnp.nan)}, parts)[0] < 1e-2
    for name in ("row_indices", "row_positions", "group_offsets", "load"):
        with pytest.raises(ArithmeticError, match="tokens, experts, load, order of the rows are right"):
            bench_route.errors(parts | {name: jnp.roll(parts[name], 1, axis=0)}, parts)
    others = jax.jit(bench_route.side(Case(SMOKE, "fwd+bwd"), "xla"))(
        bench_route.make_inputs(SMOKE) | {"selection_bias": jnp.arange(SMOKE.E, dtype=jnp.float32)}
    )
    with pytest.raises(ArithmeticError, match=r"only 0\.\d+ of the tokens"):
        bench_route.errors(others, parts)
