"""Who decides: an explicit plan, then what grouped_matmul would take for each modality, in as few launches as their tiles allow."""

import dataclasses

import pytest
from jaxops.ops.modality_grouped_matmul.parts import Part, launches, parts_of

from jaxops._lib import device as device_facts
from jaxops._lib.device import Device
from jaxops.ops import modality_grouped_matmul
from jaxops.ops.grouped_matmul import Problem as Product
from jaxops.ops.grouped_matmul import Tiles
from jaxops.ops.grouped_matmul import make_plan as make_product_plan
from jaxops.ops.modality_grouped_matmul import Plan, Problem
from jaxops.ops.modality_grouped_matmul.plan import PASSES
from tests.plans import by_choices

make_plan = by_choices(modality_grouped_matmul.make_plan)

H200, A100 = Device("NVIDIA H200", "gpu"), Device("NVIDIA A100-SXM4-80GB", "gpu")
CPU, TPU = Device("cpu", "cpu"), Device("TPU v5 lite", "tpu")
VISION, TEXT, AUDIO = (8, 2048, 4096), (64, 2048, 1024), (16, 1024, 1408)
PROBLEM = Problem(32768, (VISION, TEXT, AUDIO), "bfloat16")


@pytest.fixture(autouse=True)
def jax_triton(monkeypatch):
    """As if it were installed, on Python 3.11, too: a plan is made without it."""
    monkeypatch.setattr(device_facts, "gluon_missing", lambda: "")


def mark(panel: int, **change) -> Tiles:
    """Tiles that no heuristic gives, told apart by their panel."""
    return Tiles(16, 16, 16, warps=1, stages=1, panel=panel, **change)


def of_each(problem: Problem, device: Device, **how) -> list:
    rows = -(-problem.M // len(problem.shapes))
    return [
        make_product_plan(Product(G, rows, K, N, problem.dtype, problem.transpose_rhs), device, **how)
        for G, K, N in problem.shapes
    ]


def size(tiles: Tiles) -> tuple:
    return tiles.kernel, tiles.bm, tiles.bn, tiles.bk, tiles.warps, tiles.turns


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.kind)
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_each_modality_has_the_size_that_grouped_matmul_gives_it(device, transpose_rhs):
    problem = dataclasses.replace(PROBLEM, transpose_rhs=transpose_rhs)
    plan = make_plan(problem, device)
    assert plan.backend == ("triton" if device is H200 else "pallas")
    for name in PASSES:
        assert [size(tiles) for tiles in getattr(plan, name)] == [
            size(getattr(found, name)) for found in of_each(problem, device)
        ]


def test_tiles_of_one_size_are_the_largest_matrices():
    """Their panels and depths differ; alone, each has its own."""
    problem = dataclasses.replace(PROBLEM, shapes=(VISION, TEXT, (16, 1024, 128)))
    plan = make_plan(problem, H200, backend="triton")
    alone = of_each(problem, H200)
    assert alone[0].fwd != alone[1].fwd
    assert plan.fwd == (alone[0].fwd, alone[0].fwd, alone[2].fwd)
    assert len(launches(problem.shapes, plan.fwd)) == 2
    swapped = make_plan(dataclasses.replace(PROBLEM, shapes=(TEXT, VISION)), H200, backend="triton")
    assert swapped.fwd == (of_each(dataclasses.replace(PROBLEM, shapes=(TEXT, VISION)), H200)[1].fwd,) * 2


def test_explicit_then_tuned():
    """Rows are grouped_matmul's, found by each modality's own shape."""
    G, K, N = TEXT
    row = {
        "pass": "fwd",
        "G": G,
        "M": 32768 // 3,
        "K": K,
        "N": N,
        "dtype": "bfloat16",
        "tiles": dataclasses.asdict(mark(100)),
    }
    plan = make_plan(PROBLEM, A100, [row])
    assert plan.fwd[1] == mark(100)
    assert plan.fwd[0] == make_plan(PROBLEM, A100).fwd[0]
    given = Plan("pallas", fwd=(mark(1), mark(2), mark(1)))
    plan = make_plan(PROBLEM, H200, [row], plan=given)
    assert plan == dataclasses.replace(make_plan(PROBLEM, H200, backend="pallas"), fwd=given.fwd)


def test_whole_explicit_plan_is_kept():
    plan = Plan("pallas", *((mark(i), mark(i + 1), mark(i + 2)) for i in (1, 5, 9)))
    assert make_plan(PROBLEM, A100, plan=plan) == plan


def test_backends():
    assert make_plan(PROBLEM, CPU) == make_plan(PROBLEM, TPU) == make_plan(PROBLEM, H200, backend="xla") == Plan("xla")
    assert make_plan(PROBLEM, CPU, backend="pallas").backend == "pallas"
    odd = dataclasses.replace(PROBLEM, shapes=(VISION, (8, 100, 64)))
    for problem in (odd, dataclasses.replace(PROBLEM, dtype="float32")):
        plan = make_plan(problem, H200)
        assert plan.backend == "pallas"
        assert {tiles.kernel for name in PASSES for tiles in getattr(plan, name)} == {"pallas"}
        with pytest.raises(NotImplementedError, match="multiples of 8"):
            make_plan(problem, H200, backend="triton")
    with pytest.raises(NotImplementedError, match="TPU"):
        make_plan(PROBLEM, TPU, backend="pallas")
    few = dataclasses.replace(PROBLEM, M=96)
    assert {tiles.kernel for tiles in make_plan(few, H200).fwd} == {"pallas"}  # tiny groups, as grouped_matmul has them
    assert {tiles.kernel for tiles in make_plan(few, H200, backend="triton").fwd} == {"triton"}


def test_parts_have_every_run_once():
    """Of modalities without groups and without columns, too: the one before them writes their rows, or the first one of all."""
    assert parts_of(((2, 8, 8), (3, 8, 8))) == [Part(0, (0, 2), (0, 3)), Part(1, (2, 5), (3, 7))]
    found = parts_of(((0, 8, 8), (2, 0, 8), (3, 8, 8), (1, 8, 0), (2, 8, 8), (0, 1, 1), (4, 0, 0)))
    assert found == [Part(2, (2, 5), (0, 7)), Part(4, (6, 8), (7, 14))]
    assert parts_of(((0, 8, 8), (2, 0, 8))) == []


def test_launches():
    """One for all modalities of equal tiles, of the Hopper kernel no more than four."""
    shapes = ((1, 8, 8),) * 6
    a, b = mark(1), mark(2)
    assert [(tiles, [part.number for part in parts]) for tiles, parts in launches(shapes, (a, b, a, a, b, a))] == [
        (a, [0, 2, 3, 5]),
        (b, [1, 4]),
    ]
    assert len(launches(shapes, (a,) * 6)) == 1
    hopper = Tiles(128, 256, 64, 8, 3, kernel="triton")
    assert [[part.number for part in parts] for _, parts in launches(shapes, (hopper,) * 6)] == [[0, 1, 2, 3], [4, 5]]
