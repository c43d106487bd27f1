"""The renamed package stands alone, every op runs in both packages, and results that differ are refused."""

import importlib.resources
import pathlib
import re
import sys

import pytest

import jaxops
from benchmarks import harness
from benchmarks.harness import before
from benchmarks.ops import bench_before
from benchmarks.ops.before_cases import OPS, cases_of
from tests.benchmarks.conftest import rows_of
from tests.command_line import run

# Of each op one or two programs: each takes a second to compile.
NAMES = (
    "skewed dgrad,wgrad smoke skewed,glu smoke skewed fwd+bwd,moe smoke skewed fwd+bwd,tensorwise fwd+bwd,"
    "block_1x128 row,unequal fwd+bwd"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("before")
    before.rename_package(pathlib.Path(jaxops.__file__).parent, folder, "abc1234")
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == before.NAME]:
        del sys.modules[name]


def test_the_copy_uses_its_own_modules_rows_and_cache(folder):
    package, commit = before.load_before(folder)
    assert commit == "abc1234"
    assert package.grouped_matmul is not jaxops.grouped_matmul
    assert package.grouped_matmul.__module__.startswith(before.NAME)
    rows = importlib.resources.files(f"{before.NAME}.ops") / "grouped_matmul" / "tuned" / "nvidia_h200.jsonl"
    assert rows.is_file()
    sources = "".join(file.read_text() for file in (folder / before.NAME).rglob("*.py"))
    assert f'user_cache_path("{before.NAME}")' in sources
    assert not re.search(r"\bjaxops\b", sources)


def test_without_a_copy_the_command_is_named(tmp_path):
    with pytest.raises(ImportError, match=r"python -m benchmarks\.harness\.before COMMIT"):
        before.load_before(tmp_path)


def test_smoke_run_writes_both_sides_of_every_case(folder, tmp_path):
    result = run(
        bench_before.main, "--smoke", "--out", str(tmp_path), "--folder", str(folder), "--rounds", "1", "--names", NAMES
    )
    assert result.exit_code == 0, result.output
    summary = result.output[result.output.index("grouped_matmul  ") :]
    assert "all " in summary
    rows = rows_of(tmp_path / "before.jsonl")
    measured = [row for row in rows if row["op"] in (*OPS, "moe")]
    wanted = [case for op in OPS for case in cases_of(op, smoke=True) if any(n in case.label for n in NAMES.split(","))]
    assert len(measured) == 2 * len(wanted)
    assert {row["op"] for row in measured} == set(OPS)
    again = run(bench_before.main, "--summary", str(tmp_path / "before.jsonl"))
    assert again.output.splitlines()[0].split()[:3] == summary.splitlines()[0].split()[:3]
    assert set(bench_before.read_ratios(tmp_path / "before.jsonl")["moe"]) == {"moe smoke skewed fwd+bwd"}
    for row in measured:
        assert set(harness.ROW_KEYS) <= set(row)
        assert list(row["vs"]) == (["before"] if row["backend"] == "jaxops" else [])
        assert row["before"] == "abc1234"
        assert row["max_err"] == 0
