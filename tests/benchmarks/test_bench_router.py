"""The router benchmark's bytes and sides."""

import jax
import pytest

from benchmarks.ops import bench_router
from benchmarks.ops.bench_router import PASSES, SMOKE, Case
from benchmarks.shapes import moe as shapes_moe


def test_bytes_are_those_of_every_input_and_output():
    shape, T, D, E = shapes_moe.PERMUTES["qwen3_30b_t4096"], 4096, 2048, 128
    once = 2 * T * D + 4 * D * E + 4 * T * E
    assert [Case(shape, pass_name).moved_bytes for pass_name in PASSES] == [once, 3 * once]


@pytest.mark.parametrize("pass_name", PASSES)
def test_only_xla_asks_for_float32(pass_name):
    T, D, E = SMOKE.T, SMOKE.D, SMOKE.E
    inputs = {
        name: jax.ShapeDtypeStruct(shape, dtype)
        for name, shape, dtype in (
            ("x", (T, D), "bfloat16"),
            ("kernel", (D, E), "float32"),
            ("dlogits", (T, E), "float32"),
        )
    }
    found = {
        name: str(jax.make_jaxpr(bench_router.side(Case(SMOKE, pass_name), name))(inputs)).count("HIGHEST")
        for name in ("xla", "tf32")
    }
    assert found["xla"] > 0
    assert found["tf32"] == 0
