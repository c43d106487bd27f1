"""Interleaving, the check before the clock, and the rows."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer

from benchmarks import harness, shapes
from benchmarks.harness import checks, normal
from benchmarks.peers.jax_passes import jaxops_passes, vjp_passes
from benchmarks.shapes import GroupedShape

SHAPE = GroupedShape("tiny", 3, 40, 16, 24)
CASE = {
    "op": "grouped_matmul",
    "pass": "fwd",
    "name": "tiny",
    "shape": SHAPE.dims,
    "dtype": "bfloat16",
    "dist": "balanced",
    "backend": "pallas",
}


@pytest.fixture(scope="module")
def inputs():
    dims = [(SHAPE.M, SHAPE.K), (SHAPE.G, SHAPE.K, SHAPE.N), (SHAPE.M, SHAPE.N)]
    return tuple(harness.normal(seed, size, jnp.bfloat16) for seed, size in enumerate(dims))


def test_normal_is_normal_and_not_the_same_in_each_group():
    x = np.asarray(normal(0, (3, 64, 64), jnp.float32))
    assert abs(x.std() - 1) < 0.05
    assert not np.array_equal(x[0], x[1])


def test_a_name_that_is_unknown():
    assert harness.names("a,,b", ("a", "b", "c")) == ["a", "b"]
    with pytest.raises(typer.BadParameter, match=r"d, e: write some of a, b\."):
        harness.names("a,d,e", ("a", "b"))


def test_interleave_alternates_in_changing_order():
    calls = []

    def timer(name):
        return lambda n: calls.append(name) or [float(len(calls))] * n

    times = harness.interleave([harness.Variant(name, timer(name), 2) for name in "abc"], rounds=6)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, 18, 3)]
    assert {"".join(sorted(turn)) for turn in rounds} == {"abc"}
    assert len(set(rounds)) > 2
    assert times["a"].us_p20 <= times["a"].us_p50 <= times["a"].us_p80


def test_a_variant_that_raises_is_left_out_with_its_reason(capsys):
    def fails(n):
        raise NotImplementedError("no such kernel")

    times = harness.interleave([harness.Variant("bad", fails), harness.Variant("good", lambda n: [1.0] * n)], rounds=2)
    assert list(times) == ["good"]
    assert capsys.readouterr().out.count("left out: bad: NotImplementedError: no such kernel") == 1


def test_what_does_not_fit_is_refused(monkeypatch):
    stats = {"bytes_limit": 80_000_000_000, "bytes_in_use": 2_000_000_000}
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(memory_stats=lambda: stats)])
    harness.demand_room(78_000_000_000, "state")
    with pytest.raises(MemoryError, match=r"needs 78\.1 GB of state, 78\.0 GB are left"):
        harness.demand_room(78_100_000_000, "state")


@pytest.mark.parametrize(
    ("us", "out_bytes", "want"),
    [(1.0, 8, 50), (1000, 8, 30), (60_000, 8, 3), (200_000, 8, 1), (1000, 7.5e9, 2), (1000, 30e9, 1)],
)
def test_iterations_follow_time_and_memory(us, out_bytes, want):
    assert harness.iterations_for(us, out_bytes) == want


@pytest.mark.parametrize("dist", shapes.DISTS)
@pytest.mark.parametrize("pass_name", shapes.PASSES)
def test_the_check_passes_what_is_right_and_fails_what_is_not(pass_name, dist, inputs):
    offsets = shapes.group_offsets(shapes.group_sizes(dist, SHAPE.G, SHAPE.M))
    sizes = jnp.asarray(np.diff(offsets))
    out = vjp_passes(jax.lax.ragged_dot)[pass_name](*inputs, jnp.asarray(offsets), sizes)
    errors = checks.grouped_errors(pass_name, SHAPE, out, inputs, offsets)
    assert checks.within_limits(*errors, "bfloat16")
    assert errors[0] > 0
    assert not checks.within_limits(*checks.grouped_errors(pass_name, SHAPE, out * 1.05, inputs, offsets), "bfloat16")
    assert not checks.within_limits(
        *checks.grouped_errors(pass_name, SHAPE, out.at[...].set(jnp.nan), inputs, offsets), "bfloat16"
    )


def test_an_empty_groups_gradient_must_be_zero(inputs):
    offsets = shapes.group_offsets(shapes.group_sizes("one_group", SHAPE.G, SHAPE.M))
    out = jaxops_passes("xla")["wgrad"](*inputs, jnp.asarray(offsets), None)
    assert checks.grouped_errors("wgrad", SHAPE, out, inputs, offsets)[0] < 4e-2
    assert checks.grouped_errors("wgrad", SHAPE, out.at[0].set(1e-30), inputs, offsets)[0] == np.inf


def test_a_result_of_another_shape_is_refused(inputs):
    offsets = shapes.group_offsets(shapes.group_sizes("balanced", SHAPE.G, SHAPE.M))
    with pytest.raises(ValueError, match=r"fwd returned \(40, 16\), it must be \(40, 24\)"):
        checks.grouped_errors("fwd", SHAPE, inputs[0], inputs, offsets)


def test_ceilings_take_the_one_that_binds():
    ceilings = harness.Ceilings(copy_gbps=4000, dense_tflops=800)
    assert ceilings.least_us(flops=8e12, moved_bytes=4e9) == pytest.approx(10_000)
    assert ceilings.least_us(flops=8e9, moved_bytes=4e9) == pytest.approx(1000)
    measured, times = harness.measure_ceilings(32, jnp.float32, 1 << 12, rounds=1, dense=(16, 32, 64))
    assert set(times) == {"copy", "dense_square", "dense_wide"}
    assert min(measured.copy_gbps, measured.dense_tflops) > 0


def at(us: float) -> harness.Times:
    return harness.Times(0.9 * us, us, 1.1 * us)


def test_percentiles():
    assert harness.Times.of([float(us) for us in range(101)]) == harness.Times(20.0, 50.0, 80.0)


@pytest.mark.parametrize(
    ("rate", "work", "reached"), [("tflops", 600e9, [300.0, 150.0]), ("gbps", 600e6, [300.0, 150.0])]
)
def test_rates_and_their_part_of_the_ceiling(tmp_path, rate, work, reached):
    """600 GFLOP (or MB) in 2 and 4 ms are 300 and 150 TFLOP/s (GB/s): half and a quarter of 600."""
    run = harness.Run(file=tmp_path / "rows.jsonl", rounds=1, ceiling=600.0, peers=["peer"])
    sides = {name: harness.Ready(harness.Variant(name, lambda n: []), 0.01, {}) for name in ("own", "peer")}
    run.write(
        "own",
        {key: value for key, value in CASE.items() if key != "backend"},
        sides,
        {"own": at(2000.0), "peer": at(4000.0)},
        rate,
        work,
    )
    rows = [json.loads(line) for line in run.file.read_text().splitlines()]
    assert [(row["backend"], row[rate], row["of_ceiling"], row["vs"]) for row in rows] == [
        ("own", reached[0], 0.5, {"peer": 2.0}),
        ("peer", reached[1], 0.25, {}),
    ]


def test_what_the_machine_reaches(tmp_path, monkeypatch):
    """A copy reads and writes: 4 GiB in 1 ms for 2 GiB.

    A product of M, K and N is 2 M K N operations; the better of the two shapes counts.
    """
    times = {"copy": at(1000.0), "dense_square": at(100.0), "dense_wide": at(800.0)}
    monkeypatch.setattr(
        harness, "interleave", lambda variants, rounds: {variant.name: times[variant.name] for variant in variants}
    )
    assert harness.measure_copy(1 << 20)[0] == pytest.approx(2 * (1 << 20) / 1e-3 / 1e9)
    ceilings, _ = harness.measure_ceilings(32, jnp.float32, 1 << 12, dense=(64, 128, 96))
    assert ceilings.copy_gbps == pytest.approx(2 * (1 << 12) / 1e-3 / 1e9)
    assert ceilings.dense_tflops == pytest.approx(2 * 64 * 128 * 96 / 800e-6 / 1e12)
    assert harness.copy_row(1 << 30, at(1000.0))["gbps"] == pytest.approx(2 * (1 << 30) / 1e-3 / 1e9, rel=1e-4)
    assert harness.write_copy(tmp_path / "copy.jsonl", smoke=True) == pytest.approx(2 * (1 << 20) / 1e-3 / 1e9)
    assert harness.write_dense(tmp_path / "dense.jsonl", jnp.float32, smoke=True) == pytest.approx(
        2 * 64**3 / 100e-6 / 1e12
    )


def test_a_row_has_every_key_and_is_written_at_once(tmp_path):
    times = harness.Times(1.0, 2.0, 3.0)
    row = harness.make_row(CASE, times, 0.912345, {"ragged_dot": 3.14159}, 0.0123456, tflops=612.3456)
    assert set(harness.ROW_KEYS) | {"tflops"} == set(row)
    assert (row["us_p50"], row["of_ceiling"], row["vs"], row["max_err"], row["tflops"]) == (
        2.0,
        0.9123,
        {"ragged_dot": 3.142},
        0.0123,
        612.35,
    )
    harness.append_row(tmp_path / "a" / "b.jsonl", row)
    harness.append_row(tmp_path / "a" / "b.jsonl", row)
    assert [json.loads(line) for line in (tmp_path / "a" / "b.jsonl").read_text().splitlines()] == [row, row]
    with pytest.raises(ValueError, match="lacks"):
        harness.make_row({"op": "grouped_matmul"}, times, None, {}, None)
