"""The benchmark of loading: its smoke run, and what it makes and measures."""

import dataclasses
import json
import os

import numpy as np
import pytest

from benchmarks import bench_load
from benchmarks.bench_decode import QWEN3_30B, SMOKE, nbytes
from models.hf.tensors import read_headers
from tests.command_line import run


def test_smoke_run_writes_a_row(tmp_path):
    result = run(bench_load.main, "--smoke", "--out", str(tmp_path), "--folder", str(tmp_path), "--rounds", "1")
    assert result.exit_code == 0, result.output
    (row,) = [json.loads(line) for line in (tmp_path / "load.jsonl").read_text().splitlines()]
    assert row["shape"]["files"] > 3
    assert row["gbps"] == pytest.approx(row["shape"]["bytes"] / row["us_p50"] / 1e3, rel=1e-3)
    assert row["of_ceiling"] == pytest.approx(row["gbps"] / row["disk_gbps"], rel=1e-2, abs=1e-4)
    assert row["host_bytes_peak"] >= row["host_bytes_before"] > 1e7
    assert [file.name for file in tmp_path.iterdir()] == ["load.jsonl"]


def test_the_made_up_checkpoint(tmp_path):
    """As large as the model in 16 bits; its rows differ."""
    bench_load.make_checkpoint(tmp_path, SMOKE, 100_000)
    tensors = [tensor for _, _, some in read_headers(tmp_path) for tensor in some]
    assert sum(tensor.end - tensor.start for tensor in tensors) == nbytes(bench_load.shapes_of(SMOKE)[1]) / 2
    for tensor in tensors:
        rows = np.atleast_2d(tensor.read().astype(np.float32))
        assert len(np.unique(rows, axis=0)) == len(rows)
        assert np.isfinite(rows).all()


def test_the_layers_of_so_many_bytes():
    config = bench_load.with_bytes(QWEN3_30B, 30e9)
    sizes = lambda layers: nbytes(bench_load.shapes_of(dataclasses.replace(QWEN3_30B, layers=layers))[1]) / 2
    assert sizes(config.layers) >= 30e9 > sizes(config.layers - 1)


def test_what_is_cached_is_seen(tmp_path):
    """All of a file that was read, if the system says it."""
    file = tmp_path / "file"
    file.write_bytes(os.urandom(1 << 20))
    bench_load.read_all([file])
    assert bench_load.cached([file]) in (1.0, None)
    bench_load.drop([file])  # in memory of the host (tmpfs) it stays


def test_the_peak_is_that_of_the_call():
    before, peak = bench_load.peak_of(lambda: np.ones(1 << 27, np.uint8).sum())
    assert peak >= before + (1 << 26)


def test_without_a_gpu_nothing_lands_among_the_results():
    assert run(bench_load.main).exit_code == 2
