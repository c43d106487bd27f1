"""The heuristics of Hopper's kernels: the tiles that were fastest as measured, and how sums are split."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxops._lib.planning.device import Device
from jaxops._lib.ragged.work_list import least_rows_of_part
from jaxops.ops.grouped_matmul import Problem, make_plan
from jaxops.ops.grouped_matmul.plan import heuristic

H200, H100 = Device("NVIDIA H200", "gpu"), Device("NVIDIA H100 80GB HBM3", "gpu")
pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("jax_triton")]


@pytest.mark.parametrize(
    ("pass_name", "sizes", "fastest"),
    [
        ("wgrad", (13, 2278, 5688, 1864), (256, 256, 4)),
        ("wgrad", (5, 30000, 3976, 4104), (256, 256, 4)),
        ("wgrad", (1, 40000, 1400, 1800), (256, 256, 4)),
        ("wgrad", (1, 50000, 1024, 2304), (128, 256, 3)),
        ("wgrad", (36, 45570, 280, 840), (128, 128, 6)),
        ("wgrad", (8, 7001, 2448, 848), (256, 128, 4)),
        ("dgrad", (17, 46646, 3040, 1016), (256, 256, 4)),
        ("fwd", (5, 30000, 3976, 4104), (256, 256, 4)),
        ("wgrad", (12, 2820, 1408, 560), (128, 128, 6)),
        ("fwd", (31, 3789, 416, 304), (256, 128, 4)),
        ("fwd", (128, 32768, 2048, 768), (128, 256, 4)),
        ("fwd", (128, 16384, 2048, 768), (128, 256, 3)),
        ("dgrad", (150, 2400, 4872, 536), (128, 128, 6)),
        ("fwd", (150, 2400, 4872, 536), (128, 256, 3)),
        ("fwd", (90, 2083, 800, 344), (128, 128, 6)),
    ],
)
def test_fastest_tiles(pass_name, sizes, fastest):
    """As measured on an H100 (profiles/tiles.csv, clusters.csv, unseen_shapes.jsonl)."""
    found = heuristic(pass_name, Problem(*sizes, "bfloat16"), H200, "triton")
    assert (found.bm, found.bn, found.stages) == fastest


@pytest.mark.parametrize(
    ("sizes", "dynamic"),
    [
        ((64, 32768, 2048, 1024), False),
        ((64, 12288, 2048, 1024), True),
        ((64, 32768, 2048, 1032), True),
        ((64, 32768, 2056, 1024), True),
        ((16, 32768, 2048, 1032), False),
        ((16, 32768, 2056, 1032), True),
    ],
)
def test_dynamic_tiles(sizes, dynamic):
    """For groups of few rows, and where rows of arrays are no whole sectors."""
    problem, device = Problem(*sizes, "bfloat16"), dataclasses.replace(H200, shared=True)  # without clusters
    found = [heuristic(pass_name, problem, device, "triton") for pass_name in ("fwd", "dgrad", "wgrad")]
    assert [tiles.dynamic for tiles in found] == [dynamic, dynamic, True]


def test_thin_tiles():
    """Of few rows by a little more than 256, 512 or 768 columns: the Pallas kernel, whichever way rhs lies."""

    def taken(pass_name, *sizes, transpose_rhs=False, device=H100):
        tiles = getattr(make_plan(Problem(*sizes, "bfloat16", transpose_rhs), device), pass_name)
        return tiles.kernel, tiles.bm, tiles.bn, tiles.warps

    assert taken("fwd", 146, 2364, 4952, 552) == ("pallas", 64, 256, 8)
    assert taken("fwd", 146, 2364, 4952, 552, device=H200) == ("pallas", 128, 128, 4)
    assert taken("dgrad", 146, 2364, 552, 4952, transpose_rhs=True) == ("pallas", 64, 256, 8)
    for pass_name, *sizes in (
        ("dgrad", 146, 2364, 4952, 552),
        ("fwd", 146, 2364, 4952, 584),
        ("fwd", 146, 2364, 4952, 1064),
        ("fwd", 146, 146 * 32, 4952, 552),
    ):
        assert taken(pass_name, *sizes)[0] == "triton"


def test_short_groups():
    """Many of them are bound by memory; a few have too few tiles for the card: smaller ones."""
    tiles = lambda G: heuristic("fwd", Problem(G, 40 * G, 4096, 1024, "bfloat16"), H200, "triton")
    assert (tiles(64).bn, tiles(8).bn) == (256, 128)


def test_wgrad_of_few_tiles():
    """As measured: as many as fit the multiprocessors once."""

    def tiles(*sizes):
        found = make_plan(Problem(*sizes, "bfloat16"), H200).wgrad
        return found.bm, found.bn

    assert tiles(1, 50000, 1024, 2304) == (128, 256)
    assert tiles(1, 64338, 1032, 2408) == (256, 256)
    assert tiles(1, 4779, 792, 1872) == (128, 128)


def test_wgrad_of_short_groups():
    """As measured: it only writes, which the Pallas kernel does faster where memory is slow, or rows are no whole
    sectors."""

    def kernels(rows, N):
        problem = Problem(128, 128 * rows, 2048, N, "bfloat16")
        return [make_plan(problem, device).wgrad.kernel for device in (H200, H100)]

    assert kernels(16, 768) == ["triton", "pallas"]
    assert kernels(16, 776) == ["pallas", "pallas"]
    assert kernels(32, 776) == ["triton", "pallas"]
    assert kernels(33, 768) == ["triton", "triton"]


def test_tiles_of_wgrad_of_short_groups():
    """As measured: 64 rows on an H100, 128 on an H200."""

    def tiles(*sizes, device=H100):
        found = heuristic("wgrad", Problem(*sizes, "bfloat16"), device)
        return found.bm, found.bn, found.bk

    assert tiles(200, 2100, 1200, 872) == tiles(150, 2400, 4872, 536) == tiles(96, 3000, 1536, 1000) == (64, 128, 32)
    assert tiles(200, 2100, 1200, 872, device=H200) == (128, 128, 16)


def test_split_of_long_sums():
    """Where one group of nearly all rows would leave the card empty, and its tiles do not fill it."""

    def split(*sizes, **change):
        return make_plan(Problem(*sizes, "bfloat16", **change), H200).wgrad.split

    assert split(151, 31231, 352, 1680) > 3
    assert split(35, 49611, 272, 1192) > 1
    assert split(35, 49611, 272, 1192, transpose_rhs=True) == split(35, 49611, 1192, 272)
    assert split(1, 51560, 504, 1600) > 3
    assert split(1, 50000, 1024, 2304) == split(1, 64000, 2048, 1536) == 4, "three waves of quarters, not one of wholes"
    assert split(4, 50000, 640, 2816) == 3
    assert split(1, 64338, 1032, 2408) == split(1, 33000, 1048, 2440) == 1, "L2 bounds rows that cross cache lines"
    assert split(21, 16712, 3136, 560) == 3, "groups that are not split take no longer for it"
    assert split(64, 32768, 2048, 1408) == 1, "a group's tiles nearly fill the card"
    assert split(8, 32768, 4096, 14336) == split(8, 32768, 14336, 4096) == split(256, 32768, 7168, 2048) == 1
    assert split(0, 0, 256, 256) == split(0, 5000, 256, 256) == split(4, 0, 256, 256) == 1
    assert split(4, 128, 256, 256) == split(4, 1, 64, 64) == 1, "parts of few rows take longer to add than to multiply"


@hypothesis.given(
    st.integers(1, 256), st.integers(1, 200_000), st.integers(1, 1000), st.integers(1, 1000), st.booleans()
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_parts_of_sums_are_few(G, M, K, N, transpose):
    """Their memory is bounded, and balanced groups of several tiles a multiprocessor are whole."""
    problem = Problem(G, M, 8 * K, 8 * N, "bfloat16", transpose)
    tiles = make_plan(problem, H200, backend="triton").wgrad
    count = -(-8 * (N if transpose else K) // tiles.bm) * -(-8 * (K if transpose else N) // tiles.bn)
    if tiles.split > 1:
        assert 4 * tiles.split * count * tiles.bm * tiles.bn <= 2**27
        assert 256 * tiles.split <= M
    if G * count > 6 * H200.cores and G > 32:
        assert 2 * least_rows_of_part(M, tiles.split) > M // G
