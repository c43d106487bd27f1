"""The benchmark of whole training steps: every code path on tiny models, and how it counts."""

import dataclasses

import numpy as np
import pytest

from benchmarks.harness.machine import Ceilings
from benchmarks.training import bench_train_step
from models.data.packing import Batch
from models.training.presets import PRESETS
from tests.benchmarks.conftest import rows_of
from tests.command_line import run


def test_smoke_run_writes_a_row_a_side(tmp_path, monkeypatch):
    """Both sides of the language model, without experts, which take thrice as long to compile. The DiT runs with jaxops
    only: a side takes 2.5 s, mostly XLA's compiler."""
    monkeypatch.setattr(bench_train_step, "measure_ceilings", lambda *_, **__: Ceilings(1.0, 0.125))
    make, preset = bench_train_step.SMOKE["moe_smoke"]
    dense = dataclasses.replace(preset, model=dataclasses.replace(preset.model, experts=0, top_k=0))
    monkeypatch.setitem(bench_train_step.SMOKE, "moe_smoke", (make, dense))
    models, runs = bench_train_step.SMOKE, [("moe_smoke", "jaxops,xla"), ("dit_smoke", "jaxops")]
    assert set(models) == {name for name, _ in runs}
    for name, sides in runs:
        monkeypatch.setattr(bench_train_step, "SMOKE", {name: models[name]})
        result = run(bench_train_step.main, "--smoke", "--out", str(tmp_path), "--sides", sides, "--steps", "4")
        assert result.exit_code == 0, result.output
    steps = rows_of(tmp_path / "train_step.jsonl")
    names = [("moe_smoke", "xla"), ("moe_smoke", "jaxops"), ("dit_smoke", "jaxops")]
    assert [(row["name"], row["backend"]) for row in steps] == names
    for row in steps:
        assert row["tokens_per_s"] == pytest.approx(1e6 * row["shape"]["T"] / row["us_p50"], rel=1e-3)
        assert row["of_ceiling"] == pytest.approx(row["tflops"] / 0.125, rel=1e-2, abs=1e-4)
        assert row["mfu"] == pytest.approx(row["tflops"] / 989, rel=1e-3)
        assert row["peak_bytes"] > 4 * 4 * row["shape"]["D"] ** 2
        assert (set(row["vs"]) == {"xla"}) == ((row["name"], row["backend"]) == ("moe_smoke", "jaxops"))


def test_flops_of_the_language_model():
    """Six for each active parameter, without embeddings, and pairs within documents."""
    preset = PRESETS["3b"]
    c = preset.model
    documents = np.zeros((1, 1, 2048), np.int32)
    documents[..., 512:] = 1
    work = 6 * 2048 * (c.layers * (2 * 2048 * 2048 + 2 * 2048 * 512 + 8 * 3 * 2048 * 512 + 2048 * 64) + 2048 * 32768)
    pairs = (512**2 + 1536**2) / 2
    assert bench_train_step.lm_flops(preset, Batch(documents, documents, documents)) == pytest.approx(
        work + 12 * c.layers * 2048 * pairs, rel=1e-6
    )
