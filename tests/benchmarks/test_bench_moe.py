"""The layer's benchmark: its sides compute the same, what is wrong is left out."""

import jax
import jax.numpy as jnp

from benchmarks import shapes
from benchmarks.layers import bench_moe
from benchmarks.layers.bench_moe import SMOKE
from benchmarks.shapes import moe as shapes_moe


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
