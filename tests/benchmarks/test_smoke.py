"""Benchmarks of one shape of code: their smoke runs on a CPU, with a row a case and side; and what all refuse."""

import dataclasses
import importlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import harness
from benchmarks.layers import bench_moe
from benchmarks.ops import bench_modality_grouped_matmul, bench_permute, bench_route, bench_router
from tests.command_line import run

FILES = sorted((harness.ROOT / "benchmarks").glob("*/bench_*.py"))


@dataclasses.dataclass(frozen=True)
class Smoke:
    """A benchmark's run.

    Attributes:
      sides: (op, pass, dist, backend) of its rows, in their order.
      rate, work: "gbps" or "tflops", and bytes or operations of a row's case.
      options: of the command.
      left_out: what the output must name.
    """

    module: Any
    sides: list[tuple[str, str, str, str]]
    rate: str
    work: Callable[[dict], float]
    options: tuple[str, ...] = ()
    left_out: str = ""

    @property
    def own(self) -> str:
        return self.sides[0][3]


MOE_SIDES = [("router", "jaxops"), ("router", "ragged_dot"), ("balanced", "jaxops"), ("skewed", "jaxops")]
SMOKES = {
    "permute": Smoke(
        bench_permute,
        [(op, p, "", b) for op in bench_permute.OPS for p in bench_permute.PASSES for b in ("pallas", "xla")],
        "gbps",
        lambda row: bench_permute.SMOKE.moved_bytes(row["op"], row["pass"]),
    ),
    "route": Smoke(
        bench_route,
        [("route", p, "", b) for p in bench_route.PASSES for b in ("pallas", "xla")],
        "gbps",
        lambda row: bench_route.SMOKE.moved_bytes(row["pass"]),
    ),
    "router": Smoke(
        bench_router,
        [("router", p, "", b) for p in bench_router.PASSES for b in ("jaxops", "xla", "tf32")],
        "gbps",
        lambda row: bench_router.Case(bench_router.SMOKE, row["pass"]).moved_bytes,
    ),
    "modality_grouped_matmul": Smoke(
        bench_modality_grouped_matmul,
        [("modality_grouped_matmul", "fwd", "skewed", b) for b in ("jaxops", "one_call_each", "padded")],
        "tflops",
        lambda row: bench_modality_grouped_matmul.SMOKE.flops,
        ("--passes", "fwd", "--dists", "skewed", "--peers", "one_call_each,padded,nobody"),
        "left out: nobody at smoke skewed fwd",
    ),
    "moe": Smoke(
        bench_moe,
        [("moe", p, dist, b) for p in bench_moe.PASSES for dist, b in MOE_SIDES],
        "tflops",
        lambda row: bench_moe.SMOKE.flops(row["pass"]),
        ("--peers", "ragged_dot,nobody"),
        "left out: nobody at smoke router fwd",
    ),
}


@pytest.mark.parametrize("smoke", SMOKES.values(), ids=SMOKES)
def test_smoke_run_writes_a_row_a_case_and_side(smoke, tmp_path):
    result = run(smoke.module.main, "--smoke", "--out", str(tmp_path), "--rounds", "1", *smoke.options)
    assert result.exit_code == 0, result.output
    assert smoke.left_out in result.output
    (file,) = tmp_path.iterdir()
    copy, *rows = (json.loads(line) for line in file.read_text().splitlines())
    assert copy["op"] == "copy"
    assert [(row["op"], row["pass"], row["dist"], row["backend"]) for row in rows] == smoke.sides
    for row in rows:
        assert set(harness.ROW_KEYS) <= set(row)
        assert row["shape"] == smoke.module.SMOKE.dims
        assert row[smoke.rate] == pytest.approx(
            smoke.work(row) / row["us_p50"] / {"gbps": 1e3, "tflops": 1e6}[smoke.rate], rel=1e-2
        )
        beside = {b for op, p, dist, b in smoke.sides if (op, p, dist) == (row["op"], row["pass"], row["dist"])}
        assert set(row["vs"]) == (beside - {smoke.own} if row["backend"] == smoke.own else set())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_without_a_gpu_nothing_lands_among_the_results(file):
    module = importlib.import_module(f"benchmarks.{file.parent.name}.{file.stem}")
    assert run(module.main).exit_code == 2
