"""How plans are chosen, whatever the op: an explicit plan, then a tuned row, then the heuristic; backend; errors."""

import builtins
import dataclasses
import json
import pathlib
from typing import Literal

import pytest

from jaxops._lib.arrays.powers import covering
from jaxops._lib.planning.device import Device
from jaxops._lib.planning.plans import ADA, AMPERE, BasePlan, Planner, check_fields

H200, L4, A100 = Device("NVIDIA H200", "gpu"), Device("NVIDIA L4", "gpu"), Device("NVIDIA A100-SXM4-80GB", "gpu")
V100, MI300X = Device("Tesla V100-SXM2-16GB", "gpu"), Device("AMD Instinct MI300X", "gpu")
CPU, TPU = Device("cpu", "cpu"), Device("TPU v5 lite", "tpu")


@dataclasses.dataclass(frozen=True)
class Tiles:
    rows: int
    kernel: str = "pallas"

    def __post_init__(self):
        check_fields(self, "rows", power_of_2=True, least=2, most=64)
        check_fields(self, "kernel", among=("pallas", "triton"))


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    backend: Literal["triton", "pallas", "xla"] = "pallas"
    fwd: Tiles | None = None
    bwd: Tiles | None = None
    note: str | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    size: int
    fp8: bool = False


def heuristic(name, problem, device, kernel):
    return Tiles(4 if name == "fwd" else 8, kernel)


def fit(name, tiles, call):
    if tiles.rows > call.problem.size:
        raise ValueError(f"plan.{name}: too many rows")
    return tiles


def others(call):
    return {"note": call.plan.note or f"{call.backend} on {call.device.kind}, {'free' if call.free else call.asked}"}


OP = Planner(
    Plan,
    Tiles,
    ("fwd", "bwd"),
    heuristic,
    lambda name, problem, device, kernel: [
        Tiles(2, kernel),
        heuristic(name, problem, device, kernel),
        Tiles(2, kernel),
    ],
    lambda name, *, size, **_: (name, size),
    lambda problem: ADA if problem.fp8 else AMPERE,
    triton=lambda problem, device: device.is_hopper and not problem.fp8,
    fit=fit,
    others=others,
)
PROBLEM = Problem(32)


def row(name: str, rows: int, kernel: str = "triton", **change) -> dict:
    return {"op": OP.op, "pass": name, "size": 32, "tiles": {"rows": rows, "kernel": kernel}, "us": 1.0, **change}


def test_explicit_then_tuned_then_heuristic():
    rows = [row("fwd", 16), row("fwd", 2)]
    plan = OP.make_plan(PROBLEM, H200, rows)
    assert plan == Plan("triton", Tiles(16, "triton"), Tiles(8, "triton"), "triton on NVIDIA H200, free", device=H200)
    plan = OP.make_plan(PROBLEM, H200, rows, plan=Plan("triton", bwd=Tiles(32), note="mine"))
    assert plan == Plan("triton", Tiles(16, "triton"), Tiles(32), "mine", device=H200)
    whole = Plan("triton", Tiles(2), Tiles(4), "mine", device=H200)
    assert OP.make_plan(PROBLEM, A100, [*rows, row("bwd", 2)], plan=whole) == whole  # for its own device
    assert "fwd=Tiles(rows=2, kernel='pallas')" in str(whole)


@pytest.mark.parametrize("change", [{"size": 33}, {"pass": "dgrad"}, {"tiles": {"rows": 16}}], ids=str)
def test_rows_of_another_key_or_kernel_are_not_taken(change):
    assert OP.make_plan(PROBLEM, H200, [row("fwd", 16, **change) | change]) == OP.make_plan(PROBLEM, H200)


def test_rows_without_a_kernel_are_for_pallas():
    rows = [row("fwd", 16, tiles={"rows": 16})]
    assert OP.make_plan(PROBLEM, H200, rows, backend="pallas").fwd == Tiles(16)
    assert OP.row_key(rows[0]) == ("fwd", 32, "pallas")


def test_backend():
    devices = (H200, A100, L4, V100, MI300X, CPU, TPU)
    chosen = [[OP.choose(Problem(32, fp8), device, "auto", None)[1] for device in devices] for fp8 in (False, True)]
    assert chosen[0] == ["triton", "pallas", "pallas", "xla", "xla", "xla", "xla"]
    assert chosen[1] == ["pallas", "xla", "pallas", "xla", "xla", "xla", "xla"]
    assert OP.make_plan(PROBLEM, H200, backend="xla") == Plan("xla", note="xla on NVIDIA H200, xla", device=H200)
    assert OP.make_plan(PROBLEM, H200, plan=Plan("xla", Tiles(2))).fwd is None
    assert OP.make_plan(PROBLEM, CPU, backend="pallas").backend == "pallas"  # interpreted


@pytest.mark.parametrize(
    ("error", "message", "device", "how"),
    [
        (ValueError, "backend='cuda': write 'auto', 'triton', 'pallas' or 'xla'", H200, {"backend": "cuda"}),
        (ValueError, "backend=None: write", H200, {"backend": None}),
        (ValueError, "contradicts plan.backend='xla'", H200, {"backend": "pallas", "plan": Plan("xla")}),
        (ValueError, "plan.fwd: too many rows", H200, {"plan": Plan(fwd=Tiles(64))}),
        (TypeError, "plan is a str; .*a backend by itself is passed as backend=", H200, {"plan": "pallas"}),
        (TypeError, r"plan is a dict; this op takes a .*test_plans\.Plan\.$", H200, {"plan": {}}),
        (NotImplementedError, r"8\.0 or newer .*this is TPU.*backend='xla'", TPU, {"backend": "pallas"}),
        (NotImplementedError, r"8\.0 or newer .*this is TPU", TPU, {"plan": Plan()}),
        (NotImplementedError, r"8\.0 or newer .*this is AMD", MI300X, {"backend": "pallas"}),
    ],
)
def test_errors(error, message, device, how):
    with pytest.raises(error, match=message):
        OP.make_plan(PROBLEM, device, **how)


def test_fp8_needs_ada():
    with pytest.raises(NotImplementedError, match=r"capability 8\.9 or newer .*A100"):
        OP.make_plan(Problem(32, fp8=True), A100, backend="pallas")


def test_an_op_without_tiles_and_triton():
    planner = Planner(Plan, others=lambda call: {"note": "only this"})
    assert planner.make_plan(PROBLEM, H200) == Plan("pallas", note="only this", device=H200)
    with pytest.raises(ValueError, match="write 'auto', 'pallas' or 'xla'"):
        planner.make_plan(PROBLEM, H200, backend="triton")


def test_plans_inside_a_plan():
    """They are chosen freely where this one is; otherwise an explicit one is completed, and others have its backend."""

    def part(backend: str = "auto", plan: Plan | None = None, inner: Plan | None = None) -> str:
        found = []
        outer = Planner(
            Plan,
            triton=lambda problem, device: False,
            others=lambda call: found.append(call.part(OP.make_plan, call.problem, inner)) or {},
        )
        outer.make_plan(PROBLEM, H200, backend=backend, plan=plan)
        return found[0].backend

    assert part() == "triton"
    assert part("pallas") == part(plan=Plan("pallas")) == "pallas"
    assert part("pallas", inner=Plan("xla")) == "xla"


def test_candidates():
    """The heuristic's first, and each once."""
    assert OP.candidates("fwd", PROBLEM, H200) == [Tiles(4), Tiles(2)]
    assert OP.candidates("bwd", PROBLEM, H200, "triton") == [Tiles(8, "triton"), Tiles(2, "triton")]


def test_make_plan_is_pure(monkeypatch):
    """No file is opened, and the rows are not changed."""
    rows = [row("fwd", 16)]
    before = json.dumps(rows)

    def refuse(*args, **kwargs):
        raise AssertionError("make_plan read a file")

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", refuse)
        patch.setattr(pathlib.Path, "open", refuse)
        patch.setattr(pathlib.Path, "read_text", refuse)
        first, second = (OP.make_plan(PROBLEM, H200, iter(rows)) for _ in range(2))
    assert first == second
    assert json.dumps(rows) == before


@pytest.mark.parametrize(
    ("rows", "kernel", "message"),
    [
        (1, "pallas", r"Tiles\.rows=1 must be a power of two and at least 2 and at most 64"),
        (24, "pallas", r"Tiles\.rows=24 must be a power of two"),
        (128, "pallas", r"Tiles\.rows=128 .* at most 64"),
        (-4, "pallas", r"Tiles\.rows=-4 .* at least 2"),
        (4, "cuda", r"Tiles\.kernel='cuda' must be one of 'pallas', 'triton'"),
    ],
)
def test_checked_fields(rows, kernel, message):
    with pytest.raises(ValueError, match=message):
        Tiles(rows, kernel)


def test_covering():
    assert [covering(size, 16, 128) for size in (1, 16, 17, 96, 100, 128, 130, 192, 1000)] == [
        *(16, 16, 32, 32, 16, 128, 16, 64, 16)
    ]
