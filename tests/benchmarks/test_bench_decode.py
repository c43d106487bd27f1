"""The benchmark of decode steps: its smoke run, what it counts, and the real sizes lowered for an H200."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.harness import checks
from benchmarks.training import bench_decode
from benchmarks.training.bench_decode import OURS, OURS_FP8, QWEN3_30B, SMOKE, Workload
from models.decoder import Experts
from tests.benchmarks.conftest import rows_of
from tests.command_line import run

ARGUMENTS = ("--smoke", "--batches", "3", "--calls", "1")
# Two layers take half as long again to compile; `test_experts_that_are_counted` has both.
SHALLOW = dataclasses.replace(SMOKE, layers=1)


def test_smoke_run_writes_a_row_a_case(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_decode, "SMOKE", SHALLOW)
    result = run(bench_decode.main, *ARGUMENTS, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    copy, *rows = rows_of(tmp_path / "decode.jsonl")
    assert [(row["backend"], row["recipe"], row["shape"]["B"]) for row in rows] == [
        (OURS, None, 3),
        (OURS_FP8, "blockwise", 3),
    ]
    for row in rows:
        total = sum(row["bytes_read"].values())
        assert row["gbps"] == pytest.approx(total / row["us_p50"] / 1e3, rel=1e-2)
        assert row["of_ceiling"] == pytest.approx(row["gbps"] / copy["gbps"], rel=1e-2, abs=1e-4)
        assert row["tokens_per_s"] == pytest.approx(3e6 / row["us_p50"], rel=1e-3)
        assert 2 <= row["experts_chosen"] <= 6
        # 20 tokens before, 16 in the first call; then each of 16 steps has one more.
        keys_values = 2 * SMOKE.kv_heads * SMOKE.head_dim * 2 * SHALLOW.layers
        assert row["bytes_read"]["cache"] == 3 * np.mean([37 + step for step in range(16)]) * keys_values
        assert row["max_err"] is not None


def test_a_wrong_result_is_not_written(tmp_path, monkeypatch):
    """One with more than 1.25 times the error of the portable backends in the same dtype. It is not run before."""
    errors = iter([[0.4, 0.13], [0.4, 0.1]])
    monkeypatch.setattr(bench_decode, "SMOKE", SHALLOW)
    monkeypatch.setattr(bench_decode, "compile_advance", lambda *_: None)
    monkeypatch.setattr(bench_decode, "needed_bytes", lambda _: (0, 0))
    monkeypatch.setattr(checks, "relative_errors", lambda *_: jnp.array(next(errors)))
    result = run(bench_decode.main, *ARGUMENTS, "--sides", OURS, "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "left out: jaxops at 3 rows: ArithmeticError" in result.output
    assert len((tmp_path / "decode.jsonl").read_text().splitlines()) == 1


def test_experts_that_are_counted(monkeypatch):
    """Those among the largest products with the router."""
    graphdef, shapes = bench_decode.shapes_of(SMOKE)
    params = bench_decode.random_params(shapes)
    rows = bench_decode.random_rows(bench_decode.row_shapes(graphdef, params, 3, 16), SMOKE.vocab, 7)
    call = Experts.__call__

    @jax.jit
    def inputs_and_routers(params, rows):
        seen = []
        watched = lambda self, x, _: seen.append((x[:, 0], self.moe.router.kernel[...])) or call(self, x)
        monkeypatch.setattr(Experts, "__call__", watched)
        nnx.merge(graphdef, params).extend(rows.token[:, None], rows.cache, rows.at, jnp.ones(3, jnp.int32))
        return seen

    seen = inputs_and_routers(params, rows)
    assert len(seen) == SMOKE.layers
    monkeypatch.undo()
    wanted = []
    for x, router in seen:
        logits = np.asarray(x.astype(jnp.float32)) @ np.asarray(router)
        wanted.append(len(np.unique(np.argsort(logits, axis=1)[:, -SMOKE.top_k :])))
    np.testing.assert_array_equal(bench_decode.experts_chosen(graphdef, params, rows), wanted)


@pytest.mark.parametrize("side", [OURS, OURS_FP8])
def test_bytes_of_the_real_sizes(side):
    """From the published sizes: 8 of 128 experts, 1,000 tokens of one row."""
    graphdef, shapes = bench_decode.shapes_of(bench_decode.configured(Workload("", QWEN3_30B, 0), side))
    cache = bench_decode.row_shapes(graphdef, shapes, 1, 1152).cache
    read = bench_decode.bytes_read(shapes, cache, np.full(48, 8), 1000)
    each = (1 + 4 / 128**2) if side == OURS_FP8 else 2
    attention = 2048 * (2 * 32 + 2 * 4) * 128
    norms_and_router = 4 * (2 * 2048 + 2 * 128 + 2048 * 128)
    head, embedding = 2 * 151_936 * 2048, 2 * 2048
    assert read["experts"] == pytest.approx(48 * 8 * 3 * 2048 * 768 * each, rel=1e-6)
    assert read["weights"] == pytest.approx(
        48 * (attention * each + norms_and_router) + 4 * 2048 + head + embedding, rel=1e-6
    )
    assert read["cache"] == 48 * 1000 * 2 * 4 * 128 * 2
