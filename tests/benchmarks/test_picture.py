"""The pictures of README.md and docs/speed.md: today's rows, jaxops' bars of one cluster of one run."""

import re

import pytest

from benchmarks.harness import ROOT
from benchmarks.harness.picture import FOLDER, PICTURES, backends, draw, drawn_rows, newest_rows, versions


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_todays(name, tmp_path):
    """By its texts, which have all heights."""
    texts = lambda file: re.findall(r">([^<>]+)</text>", file.read_text("utf-8"))
    now = texts(draw(name, tmp_path))
    assert len(now) > 8
    assert now == texts(FOLDER / f"{name}.svg"), "run python -m benchmarks.harness.picture"
    page = ROOT / ("README.md" if name == "gain" else "docs/speed.md")
    assert f"pictures/{name}.svg)" in page.read_text("utf-8")


def test_fp8_is_of_the_run_of_bfloat16():
    drawn = drawn_rows(PICTURES["gain"][-1])
    both = zip(drawn["jaxops"], drawn["jaxops, FP8"], strict=True)
    assert all(plain["commit"] == fp8["commit"] and plain["us_p50"] > fp8["us_p50"] for plain, fp8 in both)


def test_own_rows_of_one_run_and_peers_newest():
    rows = [{"commit": "a", "backend": backend, "n": 1} for backend in ("jaxops", "jaxops_fp8", "x", "y")]
    rows += [{"commit": "b", "backend": backend, "n": 2} for backend in ("jaxops", "jaxops_fp8", "x")]
    rows += [{"commit": "c", "backend": backend, "n": 3} for backend in ("jaxops", "x")]
    of = lambda *sides: newest_rows(rows, backends(**{side: side for side in sides}))
    chosen = of("jaxops", "jaxops_fp8", "x", "y")
    assert {side: row["n"] for side, row in chosen.items()} == {"jaxops": 2, "jaxops_fp8": 2, "x": 2, "y": 1}
    for missing in ("jaxops_fp8_blockwise", "z"):
        with pytest.raises(ValueError, match="no run measured all"):
            of("jaxops", missing)


def test_versions():
    row = {"device": "NVIDIA H200", "jax": "0.11.2", "triton": "3.9.0", "date": "2026-11-27"}
    shown = versions([row, row | {"date": "2026-11-22"}])
    assert shown == "NVIDIA H200, JAX 0.11.2, cuDNN 9.19, Triton 3.9.0; measured from 2026-11-22 to 2026-11-27"
