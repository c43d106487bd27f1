"""The README's picture: today's rows, jaxops' bars of one cluster of one run."""

import re

import pytest

from benchmarks.harness.picture import PANELS, PICTURE, draw, drawn_rows, newest_rows, versions


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.file)
def test_every_bar_has_a_value(panel):
    drawn = drawn_rows(panel)
    assert list(drawn) == list(panel.backends)
    assert all(len(rows) == len(panel.cases) and min(row[panel.value] for row in rows) > 0 for rows in drawn.values())
    if panel.file == "train_step":
        both = zip(drawn["jaxops"], drawn["jaxops_fp8_tensorwise"], strict=True)
        assert all(plain["commit"] == fp8["commit"] and plain["us_p50"] > fp8["us_p50"] for plain, fp8 in both)


def test_own_rows_of_one_run_and_peers_newest():
    rows = [{"commit": "a", "backend": backend, "n": 1} for backend in ("jaxops", "jaxops_fp8", "x", "y")]
    rows += [{"commit": "b", "backend": backend, "n": 2} for backend in ("jaxops", "jaxops_fp8", "x")]
    rows += [{"commit": "c", "backend": backend, "n": 3} for backend in ("jaxops", "x")]
    chosen = newest_rows(rows, ("jaxops", "jaxops_fp8", "x", "y"))
    assert {backend: row["n"] for backend, row in chosen.items()} == {"jaxops": 2, "jaxops_fp8": 2, "x": 2, "y": 1}
    for missing in ("jaxops_fp8_blockwise", "z"):
        with pytest.raises(ValueError, match="no run measured all"):
            newest_rows(rows, ("jaxops", missing))


def test_picture(tmp_path):
    """The file in docs/ is today's: matplotlib writes each text as a comment."""
    row = {"jax": "0.11.2", "triton": "3.9.0", "date": "2026-11-27"}
    shown = versions([row, row | {"date": "2026-11-22"}])
    assert "JAX 0.11.2, cuDNN 9.19, Triton 3.9.0; measured from 2026-11-22 to 2026-11-27" in shown
    draw(tmp_path / "gain.svg")
    now, then = (re.findall(r"<!-- (.*?) -->", file.read_text("utf-8")) for file in (tmp_path / "gain.svg", PICTURE))
    assert len(now) > 50
    assert now == then, "run python -m benchmarks.harness.picture"
