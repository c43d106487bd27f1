"""Interleaving, the ceilings, the rows, and their report."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import harness, shapes
from benchmarks.harness import machine, normal, report
from tests.benchmarks.conftest import rows_of
from tests.command_line import run

SHAPE = shapes.GroupedShape("tiny", 3, 40, 16, 24)
CASE = harness.case_of("grouped_matmul", "fwd", SHAPE, jnp.bfloat16, "balanced")


def test_normal_is_normal_and_not_the_same_in_each_group():
    x = np.asarray(normal(0, (3, 64, 64), jnp.float32))
    assert abs(x.std() - 1) < 0.05
    assert not np.array_equal(x[0], x[1])


def test_interleave_alternates_in_changing_order():
    calls = []

    def timer(name):
        return lambda n: calls.append(name) or [float(len(calls))] * n

    times = harness.interleave([harness.Variant(name, timer(name), 2) for name in "abc"], rounds=6)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, 18, 3)]
    assert {"".join(sorted(turn)) for turn in rounds} == {"abc"}
    assert len(set(rounds)) > 2
    assert times["a"].us_p20 <= times["a"].us_p50 <= times["a"].us_p80


@pytest.mark.parametrize(
    ("calls", "work_us", "want"), [(30, 10_000, 10), (30, 1000, 3), (2, 1000, 2), (30, 30_000, 30)]
)
def test_less_work_a_round_is_fewer_calls(calls, work_us, want):
    made = []
    variant = harness.Variant("a", lambda n: made.append(n) or [1.0] * n, calls)
    harness.interleave([variant], rounds=2, work_us=work_us)
    assert made == [want, want]


@pytest.mark.parametrize(("peers_us", "again"), [(96.0, True), (98.0, False)])
def test_a_case_that_misses_is_timed_once_more(tmp_path, peers_us, again):
    """The second times count, of both sides."""
    us = {"own": [100.0, 90.0], "peer": [peers_us, 99.0]}
    run = harness.Run(file=tmp_path / "rows.jsonl", rounds=1, ceiling=None, peers=[], again_below={"peer": 0.97})
    sides = {name: harness.Variant(name, lambda n, name=name: [us[name].pop(0)], 1) for name in us}
    makers = {name: lambda side=side: harness.Ready(side, None, {}) for name, side in sides.items()}
    run.measure("own", CASE, makers, "tflops", 1e9)
    rows = rows_of(run.file)
    assert [row["us_p50"] for row in rows] == ([90, 99] if again else [100, 98])
    assert [row.get("again") for row in rows] == [again or None] * 2


def test_a_variant_that_raises_is_left_out_with_its_reason(capsys):
    def fails(n):
        raise NotImplementedError("no such kernel")

    times = harness.interleave([harness.Variant("bad", fails), harness.Variant("good", lambda n: [1.0] * n)], rounds=2)
    assert list(times) == ["good"]
    assert capsys.readouterr().out.count("left out: bad: NotImplementedError: no such kernel") == 1


def test_what_does_not_fit_is_refused(monkeypatch):
    stats = {"bytes_limit": 80_000_000_000, "bytes_in_use": 2_000_000_000}
    device = type("Device", (), {"memory_stats": lambda self: stats})()
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    harness.demand_room(78_000_000_000, "state")
    with pytest.raises(MemoryError, match=r"needs 78\.1 GB of state, 78\.0 GB are left"):
        harness.demand_room(78_100_000_000, "state")


@pytest.mark.parametrize(
    ("us", "out_bytes", "want"),
    [(1.0, 8, 50), (1000, 8, 30), (60_000, 8, 3), (200_000, 8, 1), (1000, 7.5e9, 2), (1000, 30e9, 1)],
)
def test_iterations_follow_time_and_memory(us, out_bytes, want):
    assert harness.iterations_for(us, out_bytes) == want


def at(us: float) -> harness.Times:
    return harness.Times(0.9 * us, us, 1.1 * us)


@pytest.mark.parametrize(("rate", "work"), [("tflops", 600e9), ("gbps", 600e6)])
def test_rates_and_their_part_of_the_ceiling(tmp_path, rate, work):
    """600 GFLOP (or MB) in 2 and 4 ms are 300 and 150 TFLOP/s (GB/s): half and a quarter of 600."""
    run = harness.Run(file=tmp_path / "a" / "rows.jsonl", rounds=1, ceiling=600.0, peers=["peer"])
    sides = {name: harness.Ready(harness.Variant(name, lambda n: []), 0.0123456, {}) for name in ("own", "peer")}
    run.write("own", CASE, sides, {"own": at(2000.0), "peer": at(4000.0)}, rate, work)
    own, peer = rows_of(run.file)
    assert set(own) == set(harness.ROW_KEYS) | {rate}
    assert (own["backend"], own[rate], own["of_ceiling"], own["vs"]) == ("own", 300.0, 0.5, {"peer": 2.0})
    assert (peer["backend"], peer[rate], peer["of_ceiling"], peer["vs"]) == ("peer", 150.0, 0.25, {})
    assert (own["us_p20"], own["us_p50"], own["us_p80"], own["max_err"]) == (1800.0, 2000.0, 2200.0, 0.0123)
    with pytest.raises(ValueError, match="lacks"):
        harness.make_row({"op": "grouped_matmul"}, at(1.0), None, {}, None)


def test_what_the_machine_reaches(tmp_path, monkeypatch):
    """A copy reads and writes: 4 GiB in 1 ms for 2 GiB. The better of the dense products counts."""
    times = {"copy": at(1000.0), machine.SQUARE: at(100.0), machine.WIDE: at(800.0)}
    monkeypatch.setattr(harness, "interleave", lambda variants, *_: {v.name: times[v.name] for v in variants})
    alone = machine.measure_ceilings(tmp_path / "copy.jsonl", smoke=True)
    assert alone.copy_gbps == pytest.approx(2 * (1 << 20) / 1e-3 / 1e9)
    assert np.isnan(alone.dense_tflops)
    ceilings = machine.measure_ceilings(tmp_path / "rows.jsonl", smoke=True, dtype=jnp.float32, wide=(64, 128, 96))
    assert ceilings.dense_tflops == pytest.approx(2 * 64**3 / 100e-6 / 1e12)
    copy, square, wide = rows_of(tmp_path / "rows.jsonl")
    assert (copy["op"], copy["shape"], copy["of_ceiling"]) == ("copy", {"bytes": 1 << 20}, 1)
    assert (square["name"], square["shape"], square["of_ceiling"]) == ("dense_square", {"M": 64, "K": 64, "N": 64}, 1)
    assert wide["of_ceiling"] == pytest.approx(64 * 128 * 96 / 800 / (64**3 / 100), rel=1e-2)


def test_report(tmp_path):
    """Of a case that was measured twice the newest row counts."""
    rows = [
        ("pallas", 99.0, {"ragged_dot": 9.9}, "balanced", {}),
        ("pallas", 10.0, {"ragged_dot": 5.0, "torch_grouped_mm": 0.8}, "balanced", {}),
        ("pallas", 20.0, {"torch_grouped_mm": 1.25}, "skewed", {}),
        ("ragged_dot", 50.0, {}, "balanced", {}),
        ("torch_grouped_mm", 8.0, {}, "balanced", {"recipe": "torch 2"}),
    ]
    for backend, us, vs, dist, more in rows:
        times, case = harness.Times(us - 1, us, us + 1), CASE | {"dist": dist, "backend": backend}
        row = harness.make_row(case, times, 0.5, vs, 0.01, tflops=1000 / us, **more)
        harness.append_row(tmp_path / "grouped_matmul.jsonl", row)
    output = run(report.main, str(tmp_path)).output
    assert "## grouped_matmul, fwd" in output
    line = "| tiny | balanced | bfloat16 | pallas | 10.0 (9.0 to 11.0) | 100 TFLOP/s | 50 % | 5.00 | 0.80 |"
    assert line in output
    assert "99.0" not in output
    assert "| grouped_matmul | fwd | torch_grouped_mm | 0.800 | tiny balanced | 1.000 | 2 | 1, 1, 1, 1 |" in output
