"""The benchmark of the largest steps that fit."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from benchmarks import bench_largest, bench_scaling, free_memory
from benchmarks.bench_largest import ONE, Run, Size, largest
from benchmarks.harness import Compiled


def test_what_fits_by_four_sizes():
    """Of 10 + 2 rows + 3 layers + 4 rows * layers bytes."""
    needs = lambda size: 10 + 2 * size.rows + 3 * size.layers + 4 * size.rows * size.layers
    sizes = [Size(8, 3), Size(8, 7), Size(16, 3), Size(16, 7)]
    for what in bench_largest.WHAT:
        found = largest(sizes, [needs(size) for size in sizes], Size(8, 14), what, 5000.0)
        more = found._replace(**{what: getattr(found, what) + 1})
        assert needs(found) <= 5000 < needs(more), found


def made(tmp_path, budget):
    sizes = bench_scaling.SMOKE["lm"]  # experts take thrice as long to compile
    dense = dataclasses.replace(sizes.preset.model, experts=0, top_k=0)
    sizes = sizes._replace(preset=dataclasses.replace(sizes.preset, model=dense))
    cases = bench_scaling.Run(sizes, tmp_path / "largest.jsonl", "float32", float("inf"))
    return Run(cases, sizes.preset, (1, 2), budget, ThreadPoolExecutor(1))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A compiled step, which every run starts from the same state."""
    return made(tmp_path_factory.mktemp("built"), 1e8).build(ONE, Size(4, 1)).result()


def test_a_row(tmp_path, built):
    run = made(tmp_path, 1e8)
    run.measure(ONE, "rows", Size(4, 1), built)
    (row,) = map(json.loads, (tmp_path / "largest.jsonl").read_text().splitlines())
    assert (row["mesh"], row["grown"], row["rows"], row["layers"]) == ("one", "rows", 4, 1)
    assert row["shape"]["T"] == 4 * run.preset.context
    assert row["peak_bytes"] <= row["budget_bytes"]


def test_the_next_smaller_size_runs_where_the_expected_one_does_not_fit(tmp_path, monkeypatch):
    """Until nothing is left, which is an error."""
    tried = []
    monkeypatch.setattr(bench_largest, "needed_bytes", lambda step: (step.bytes, 0))
    built = lambda size: Compiled((None, SimpleNamespace(bytes=10 * size.layers), None), 0.0)

    def build(self, mesh, size):
        tried.append(size)
        return SimpleNamespace(result=lambda: built(size))

    monkeypatch.setattr(Run, "build", build)
    with pytest.raises(MemoryError, match=r"0\.0 GB"):
        made(tmp_path, 5.0).measure(ONE, "layers", Size(2, 3), built(Size(2, 3)))
    assert tried == [Size(2, 2), Size(2, 1)]


def test_a_step_whose_temporaries_lack_room_in_one_piece_does_not_run(tmp_path, monkeypatch, built):
    """On some device, which would leave the others waiting for it."""
    run, free = made(tmp_path, 1e8), {"largest_free_block_bytes": 1000}
    roomy, full = (SimpleNamespace(memory_stats=lambda free=free: free) for free in (None, free))
    monkeypatch.setattr(free_memory.jax, "local_devices", lambda: [roomy, full])
    assert run.run(built) is None
    free["largest_free_block_bytes"] = 10**10
    _, losses = run.run(built)
    assert len(losses) == bench_largest.STEPS


@pytest.mark.parametrize("said", ["RESOURCE_EXHAUSTED: Out of memory\nmore", "INTERNAL: other"])
def test_a_step_that_runs_out_of_memory_does_not_fit(tmp_path, monkeypatch, built, said):
    def fail(*_):
        raise bench_largest.jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(bench_largest, "run_steps", fail)
    run = made(tmp_path, 1e8)
    if said.startswith("RESOURCE"):
        assert run.run(built) is None
    else:
        with pytest.raises(bench_largest.jax.errors.JaxRuntimeError, match="other"):
            run.run(built)
