"""The router benchmark's bytes and sides, and its own path on a CPU."""

import json

import jax
import pytest

from benchmarks import bench_router, harness, shapes_moe
from benchmarks.bench_router import PASSES, SMOKE, Case
from tests.command_line import run


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


def test_smoke_run_writes_a_row_a_case_and_side(tmp_path):
    result = run(bench_router.main, "--smoke", "--out", str(tmp_path), "--rounds", "1")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "router.jsonl").read_text().splitlines()]
    assert rows[0]["op"] == "copy"
    assert [(row["pass"], row["backend"]) for row in rows[1:]] == [
        (p, b) for p in PASSES for b in ("jaxops", "xla", "tf32")
    ]
    for row in rows:
        assert set(harness.ROW_KEYS) <= set(row)
        assert (set(row["vs"]) == {"xla", "tf32"}) == (row["backend"] == "jaxops")
