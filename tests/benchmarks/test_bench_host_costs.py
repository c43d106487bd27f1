"""What a start costs: one process of its own, and the other programs in this one."""

import contextlib
import io
import json
import sys

from benchmarks.training import bench_host_costs
from tests.benchmarks.conftest import rows_of
from tests.command_line import run


def test_its_rows(tmp_path, monkeypatch):
    measured = bench_host_costs.measured

    def here(code: str, *words: str) -> dict[str, float]:
        if words == ("jax",):
            return measured(code, *words)
        monkeypatch.setattr(sys, "argv", ["-c", *words])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, {"json": json, "sys": sys})
        return json.loads(printed.getvalue())

    monkeypatch.setattr(bench_host_costs, "measured", here)
    result = run(bench_host_costs.main, "--smoke", "--out", str(tmp_path), "--trainings", "")
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in rows_of(tmp_path / "host_costs.jsonl")}
    calls = [f"{call} {op} {how}" for how in ("eager", "jit") for op in ("ragged_dot", "grouped_matmul")
             for call in ("first", "second")]  # fmt: skip
    assert list(rows) == ["import jax", "import jaxops", *calls]
    assert list(rows["import jaxops"]["vs"]) == ["jax"]
    for how in ("eager", "jit"):
        first, second = (rows[f"{call} grouped_matmul {how}"] for call in ("first", "second"))
        assert list(first["vs"]) == ["ragged_dot"]
        assert first["us_p50"] > second["us_p50"]  # which compiles nothing
