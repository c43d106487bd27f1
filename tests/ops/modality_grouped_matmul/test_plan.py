"""Each modality's plan is grouped_matmul's; tiles of one size are made equal; launches by tiles."""

import dataclasses

import pytest

from jaxops._lib.planning import device as device_facts
from jaxops._lib.planning.device import Device
from jaxops.ops.grouped_matmul import Plan, Problem, Tiles, make_plan
from jaxops.ops.grouped_matmul.modalities import launches
from jaxops.ops.grouped_matmul.plan import PASSES
from jaxops.ops.modality_grouped_matmul import make_plans

pytestmark = pytest.mark.versions

H200, A100 = Device("NVIDIA H200", "gpu"), Device("NVIDIA A100-SXM4-80GB", "gpu")
CPU, TPU = Device("cpu", "cpu"), Device("TPU v5 lite", "tpu")
VISION, TEXT, AUDIO = (8, 2048, 4096), (64, 2048, 1024), (16, 1024, 1408)


@pytest.fixture(autouse=True)
def jax_triton(monkeypatch):
    """As if it were installed, on Python 3.11, too: a plan is made without it."""
    monkeypatch.setattr(device_facts, "gluon_missing", lambda: "")


def problems(*shapes, M: int = 10923, dtype: str = "bfloat16", transpose_rhs: bool = False) -> list[Problem]:
    return [Problem(G, M, K, N, dtype, transpose_rhs) for G, K, N in shapes]


PROBLEMS = problems(VISION, TEXT, AUDIO)


def tiles_of(plans, name: str) -> tuple:
    return tuple(getattr(plan, name) for plan in plans)


def mark(panel: int, **change) -> Tiles:
    """Tiles that no heuristic chooses; the panel identifies them."""
    return Tiles(16, 16, 16, warps=1, stages=1, panel=panel, **change)


def size(tiles: Tiles) -> tuple:
    return tiles.kernel, tiles.bm, tiles.bn, tiles.bk, tiles.warps, tiles.ping_pong


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.kind)
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_each_modality_has_the_tile_size_of_grouped_matmul(device, transpose_rhs):
    each = problems(VISION, TEXT, AUDIO, transpose_rhs=transpose_rhs)
    plans = make_plans(each, device)
    assert {plan.backend for plan in plans} == {"triton" if device is H200 else "pallas"}
    for name in PASSES:
        alone = [make_plan(problem, device) for problem in each]
        assert [size(tiles) for tiles in tiles_of(plans, name)] == [size(tiles) for tiles in tiles_of(alone, name)]


def test_tiles_of_several_modalities_need_no_split():
    """Those of one modality may fill the card only with one."""
    few = Problem(1, 65536, 1024, 1024, "bfloat16")
    assert make_plan(few, H200).wgrad.split > 1
    for plan in make_plans([few, few], H200):
        assert (plan.wgrad.bm, plan.wgrad.bn, plan.wgrad.split) == (128, 128, 1), "64 tiles instead of 32"


def test_one_modality_has_grouped_matmuls_plan():
    for device in (H200, A100, CPU):
        assert make_plans(PROBLEMS[:1], device) == (make_plan(PROBLEMS[0], device),)


def test_tiles_of_one_size_are_those_of_the_largest_weights():
    """Their panels and depths differ; alone, each has its own."""
    shapes = ((8, 4104, 4096), TEXT, (16, 1024, 128))  # of long sums the forward has three stages
    plans = make_plans(problems(*shapes, M=7000), H200, backend="triton")
    alone = [make_plan(problem, H200) for problem in problems(*shapes, M=7000)]
    assert alone[0].fwd != alone[1].fwd
    assert tiles_of(plans, "fwd") == (alone[0].fwd, alone[0].fwd, alone[2].fwd)
    assert len(launches(shapes, tiles_of(plans, "fwd"))) == 2
    swapped = make_plans(problems(TEXT, shapes[0], M=7000), H200, backend="triton")
    assert tiles_of(swapped, "fwd") == (alone[0].fwd,) * 2


def test_explicit_then_tuned():
    """Rows are grouped_matmul's, found by each modality's own shape."""
    G, K, N = TEXT
    row = {"op": "grouped_matmul", "pass": "fwd", "G": G, "M": 10923, "K": K, "N": N, "dtype": "bfloat16"}
    row["tiles"] = dataclasses.asdict(mark(100))
    plans = make_plans(PROBLEMS, A100, [row])
    assert plans[1].fwd == mark(100)
    assert plans[0].fwd == make_plans(PROBLEMS, A100)[0].fwd
    given = [Plan("pallas", fwd=mark(i)) for i in (1, 2, 1)]
    plans, free = make_plans(PROBLEMS, H200, [row], plan=given), make_plans(PROBLEMS, H200, backend="pallas")
    assert tiles_of(plans, "fwd") == (mark(1), mark(2), mark(1))
    assert tiles_of(plans, "wgrad") == tiles_of(free, "wgrad")
    one = make_plans(PROBLEMS, A100, plan=Plan("pallas", mark(1), mark(2), mark(3)))
    assert [tiles_of(one, name) for name in PASSES] == [(mark(i),) * 3 for i in (1, 2, 3)]


def test_backends():
    for device, how in ((CPU, {}), (TPU, {}), (H200, {"backend": "xla"})):
        assert {plan.backend for plan in make_plans(PROBLEMS, device, **how)} == {"xla"}
    assert make_plans(PROBLEMS, CPU, backend="pallas")[0].backend == "pallas"
    for each in (problems(VISION, (8, 100, 64)), problems(VISION, TEXT, dtype="float32")):
        plans = make_plans(each, H200)
        assert {plan.backend for plan in plans} == {"pallas"}
        assert {tiles.kernel for name in PASSES for tiles in tiles_of(plans, name)} == {"pallas"}
        with pytest.raises(NotImplementedError, match="multiples of 8"):
            make_plans(each, H200, backend="triton")
    with pytest.raises(NotImplementedError, match="TPU"):
        make_plans(PROBLEMS, TPU, backend="pallas")
    few = problems(VISION, TEXT, AUDIO, M=32)  # tiny groups, which grouped_matmul leaves to Pallas
    assert {plan.fwd.kernel for plan in make_plans(few, H200)} == {"pallas"}
    assert {plan.fwd.kernel for plan in make_plans(few, H200, backend="triton")} == {"triton"}


def test_launches():
    """One for all modalities of equal tiles, of the Hopper kernel no more than four."""
    shapes = ((1, 8, 8),) * 6
    a, b = mark(1), mark(2)
    found = [(tiles, [part.number for part in parts]) for tiles, parts in launches(shapes, (a, b, a, a, b, a))]
    assert found == [(a, [0, 2, 3, 5]), (b, [1, 4])]
    assert len(launches(shapes, (a,) * 6)) == 1
    hopper = Tiles(128, 256, 64, 8, 3, kernel="triton")
    assert [[part.number for part in parts] for _, parts in launches(shapes, (hopper,) * 6)] == [[0, 1, 2, 3], [4, 5]]


def test_sums_of_several_modalities_are_whole():
    """One modality's product alone may split them. An explicit split of several raises."""
    problem = Problem(35, 49611, 272, 1192, "bfloat16")
    (alone,) = make_plans([problem], H200)
    assert alone.wgrad.split > 1
    assert [plan.wgrad.split for plan in make_plans([problem] * 2, H200)] == [1, 1]
    explicit = Plan("triton", wgrad=alone.wgrad)
    assert make_plans([problem], H200, plan=explicit)[0].wgrad == alone.wgrad
    with pytest.raises(ValueError, match=r"plan\.wgrad=.*sums of several modalities have no split"):
        make_plans([problem] * 2, H200, plan=explicit)
