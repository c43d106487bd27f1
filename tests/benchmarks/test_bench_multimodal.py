"""The benchmark of the multimodal model: what replaces an optimization computes the same, and our side runs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import bench_multimodal, harness
from benchmarks.bench_multimodal import documents, flops, padded_to_the_widest, products_apart
from models.multimodal.experts import Units, apply_units
from models.multimodal.interleaved import Room, lay_out
from tests.arrays import put
from tests.command_line import run
from tests.compare import assert_close


@pytest.mark.parametrize("apply", [products_apart, padded_to_the_widest])
def test_experts_without_the_common_product(apply):
    """Values and gradients, with an empty group and rows outside."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: put(rng.normal(size=shape), jnp.float32)
    rows, offsets = draw(23, 8), jnp.array([0, 4, 4, 9, 20], jnp.int32)
    units = [Units(draw(2, 8, h), draw(2, 8, h), draw(2, h, 8)) for h in (5, 12)]
    how = {"dtype": jnp.float32, "backend": "xla"}
    both = lambda apply: jax.jit(jax.value_and_grad(lambda *x: jnp.sum(apply(*x, offsets, **how) ** 2), (0, 1)))
    for got, want in zip(*(jax.tree.leaves(both(f)(rows, units)) for f in (apply, apply_units)), strict=True):
        assert_close(got, want, "float32", scale=10)


def test_half_of_the_rows_are_of_images_and_flops_are_counted():
    preset = bench_multimodal.MULTIMODAL_PRESETS["2b"]
    c = preset.model
    room = Room(preset.rows, preset.predictions, preset.documents, 2, 12)
    batch = lay_out(documents(room, preset.longest, c.vocab, 0), room)
    lengths = np.diff(batch.segment_offsets)
    total, image = lengths.sum(), lengths[batch.is_image].sum()
    assert room.rows - 2 * preset.longest - 2 < total <= room.rows
    assert image / total == pytest.approx(0.5, abs=0.01)
    active = c.layers * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2 * 2048 * (512 + 1536) / 2) + 2048 * 32768 / 2
    assert flops(c, batch) == pytest.approx(6 * total * active, rel=0.15)


def test_smoke_run(tmp_path, monkeypatch):
    """Two sides that are one program on a CPU, which the second one loads."""
    monkeypatch.setattr(harness, "write_dense", lambda *_: 0.125)
    case = bench_multimodal.SMOKE["multimodal_smoke"]
    few = bench_multimodal.Case(case.preset, [("xla_adaln", 128), ("jaxops", 128)], [])
    monkeypatch.setattr(bench_multimodal, "SMOKE", {"multimodal_smoke": few})
    result = run(bench_multimodal.main, "--smoke", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "multimodal.jsonl").read_text().splitlines()]
    assert [row["backend"] for row in rows] == ["xla_adaln", "jaxops"]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-4)
    assert set(rows[1]["vs"]) == {"xla_adaln"}
