"""The README's picture: bars of one cluster are of one run."""

import pytest

from benchmarks.picture import PANELS, PICTURE, draw, newest_run, values


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.file)
def test_every_bar_has_a_value(panel):
    drawn = values(panel)
    assert list(drawn) == list(panel.backends)
    assert all(len(bars) == len(panel.cases) and min(bars) > 0 for bars in drawn.values())


def test_newest_run_with_all_backends():
    rows = [{"commit": "a", "backend": "x", "n": 1}, {"commit": "a", "backend": "y", "n": 2}]
    rows += [{"commit": "b", "backend": backend, "n": 3} for backend in "xy"]
    rows += [{"commit": "c", "backend": "x", "n": 4}]
    assert [row["n"] for row in newest_run(rows, {"x", "y"}).values()] == [3, 3]
    with pytest.raises(ValueError, match="no run measured all"):
        newest_run(rows, {"x", "z"})


def test_picture(tmp_path):
    draw(tmp_path / "gain.svg")
    assert (tmp_path / "gain.svg").stat().st_size < 300_000
    assert PICTURE.is_file()
