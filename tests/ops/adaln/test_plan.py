"""Plans of the AdaLN ops: tuned rows, heuristic, candidates; what is lowered for an H200."""

import dataclasses
import re

import hypothesis
import hypothesis.strategies as st
import jax
import pytest

import jaxops
from jaxops._lib.planning.device import Device
from jaxops._lib.planning.tuned import tuned_rows
from jaxops.ops import adaln
from jaxops.ops.adaln import Plan, Problem, Tiles, candidates
from jaxops.ops.adaln.plan import PASSES, PLANNER, heuristic
from tests.hopper import lower_for_h200
from tests.ops.adaln.cases import OPERANDS, Variant, apply
from tests.plans import by_choices

pytestmark = pytest.mark.versions

make_plan = by_choices(adaln.make_plan)

H200 = Device("NVIDIA H200", "gpu")
PROBLEM = Problem(1000, 1152, 8, "bfloat16")
WIDTHS = [64, 1000, 1024, 3072, 4096, 16384]
SHIPPED = list(tuned_rows("adaln", H200))


def mark(rows: int) -> Tiles:
    """Tiles that no heuristic chooses; their rows identify them."""
    return Tiles(rows, 1, 16, 32)


def row(pass_name: str, rows: Tiles, problem: Problem = PROBLEM, **change) -> dict:
    sizes = {name: getattr(problem, name) for name in ("T", "D", "B", "dtype", "gated")}
    return {"op": "adaln", "pass": pass_name, **sizes, "tiles": dataclasses.asdict(rows), **change}


def test_explicit_then_tuned_then_heuristic():
    rows = [row("fwd", mark(2)), row("bwd", mark(4))]
    assert make_plan(PROBLEM, H200, rows, plan=Plan(fwd=mark(8), save_stats=True)) == Plan(
        "pallas", mark(8), mark(4), save_stats=True
    )
    plan = make_plan(PROBLEM, H200, rows[:1])
    assert (plan.fwd, plan.bwd) == (mark(2), heuristic("bwd", PROBLEM, H200))


@pytest.mark.parametrize(
    "change", [{"dtype": "float32"}, {"D": 1153}, {"gated": True}], ids=lambda c: "-".join(map(str, *c.items()))
)
def test_row_of_another_key_is_not_taken(change):
    rows = [row(name, mark(2), **change) for name in PASSES]
    assert make_plan(PROBLEM, H200, rows) == make_plan(PROBLEM, H200)
    assert make_plan(dataclasses.replace(PROBLEM, **change), H200, rows).fwd == mark(2)


def test_statistics_are_saved_where_it_pays():
    """Measured: plan.py says where."""
    saved = [
        make_plan(dataclasses.replace(PROBLEM, D=D, gated=gated), H200).save_stats
        for D in (1024, 2048)
        for gated in (False, True)
    ]
    assert saved == [False, False, False, True]


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    T=st.integers(0, 1 << 20),
    D=st.integers(1, 40_000),
    B=st.integers(0, 5000),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    gated=st.booleans(),
    pass_name=st.sampled_from(PASSES),
)
def test_heuristic_and_candidates_are_legal(T, D, B, dtype, gated, pass_name):
    """Tiles raises for what no kernel supports. A row is held in registers: less than twice its columns."""
    problem = Problem(T, D, B, dtype, gated)
    found = candidates(pass_name, problem, H200)
    chosen = heuristic(pass_name, problem, H200)
    assert chosen == found[0]
    assert len(set(found)) == len(found)
    for rows in found:
        arrays = -(-D // rows.block)
        assert rows.block <= max(32, 2 * D)
        assert arrays * rows.block < max(64, D + rows.block)
    assert getattr(make_plan(problem, H200), pass_name) == chosen


def test_no_two_shipped_rows_have_one_key():
    """The second would never be found."""
    assert len({PLANNER.row_key(row) for row in SHIPPED}) == len(SHIPPED)


@pytest.mark.parametrize("row", SHIPPED, ids=lambda row: "-".join(str(x) for x in PLANNER.row_key(row)))
def test_shipped_row(row):
    """It names its device, is found at its own width, and is a candidate (and so lowered below)."""
    assert row["device"] == H200.kind
    problem = Problem(65536, row["D"], 64, row["dtype"], row["gated"])
    plan = make_plan(problem, H200, SHIPPED)
    assert getattr(plan, row["pass"]) == Tiles(**row["tiles"])
    assert Tiles(**row["tiles"]) in candidates(row["pass"], problem, H200)


def test_few_rows_are_spread_over_the_card():
    """A tuned row, too, owns fewer rows where there would not be warps enough; an explicit one is obeyed."""
    tuned = {
        "op": "adaln",
        "pass": "bwd",
        "D": 1024,
        "dtype": "bfloat16",
        "gated": False,
        "tiles": vars(Tiles(64, 2, 512, 4, True)),
    }
    found = {
        T: make_plan(Problem(T, 1024, 4, "bfloat16"), H200, [tuned]).bwd.rows for T in (65536, 32768, 16384, 4096, 1)
    }
    assert found == {65536: 64, 32768: 32, 16384: 16, 4096: 16, 1: 16}
    explicit = Plan("pallas", bwd=Tiles(64, 2, 512, 4))
    assert make_plan(Problem(1, 1024, 4, "bfloat16"), H200, [tuned], plan=explicit).bwd == explicit.bwd
    assert heuristic("fwd", Problem(65536, 1024, 4, "bfloat16"), H200).rows == 16
    assert heuristic("fwd", Problem(1024, 1024, 4, "bfloat16"), H200).rows == 4


H100 = Device("NVIDIA H100 80GB HBM3", "gpu")
# Rows a program, as measured: shorter in a forward of few rows without a gate, longer in a backward of long sequences;
# and 512 programs of 32 rows are one wave, four a multiprocessor, where 532 would be two, of which one is nearly empty.
MEASURED = [
    ("bwd", H100, (30_011, 1152, 7), 64),
    ("bwd", H100, (30_011, 1152, 128), 16),
    ("bwd", H100, (20_011, 2432, 7), 32),
    ("bwd", H100, (16_384, 1024, 16), 32),
    ("bwd", H100, (16_384, 3072, 16), 64),
    ("bwd", H200, (17_000, 1536, 1), 16),
    ("bwd", H200, (16_384, 1536, 1), 32),
    ("bwd", H200, (400_000, 1536, 1), 64),
    ("bwd", dataclasses.replace(H200, cores=134), (17_000, 1536, 1), 32),
    ("fwd", H100, (30_011, 1152, 7), 8),
    ("fwd", H100, (16_384, 3072, 7), 16),
    ("fwd", H100, (1000, 3072, 7), 4),
]


@pytest.mark.parametrize(("name", "device", "sizes", "rows"), MEASURED)
def test_rows_a_program(name, device, sizes, rows):
    assert heuristic(name, Problem(*sizes, "bfloat16"), device).rows == rows


def test_tiles_of_a_forward():
    """With a gate, which was not measured, longer ones. Tuned ones that many rows use stay as they are."""
    problem = Problem(20_011, 2432, 7, "bfloat16")
    assert heuristic("fwd", problem, H100) == Tiles(8, 1, 512, 4, True)
    assert heuristic("fwd", dataclasses.replace(problem, gated=True), H100) == Tiles(16, 1, 512, 8, True)
    assert heuristic("fwd", Problem(16_384, 64, 7, "bfloat16"), H100) == Tiles(8, 8, 64, 1, True)
    assert make_plan(Problem(16_384, 3072, 16, "bfloat16"), H200, SHIPPED).fwd == Tiles(16, 1, 1024, 8, True)
    assert make_plan(Problem(65_536, 3072, 64, "bfloat16"), H200, SHIPPED).fwd.rows == 32


KERNEL = "__gpu$xla.gpu.triton"  # the target of its custom call in StableHLO


def lowered(
    variant: Variant, problem: Problem, plan: Plan | None, backward: bool, modulation_dtype: str | None = None
) -> str:
    """The StableHLO of one op's forward, or of its forward and backward."""
    s, T, D, B = jax.ShapeDtypeStruct, problem.T, problem.D, problem.B
    shapes = {name: (T, D) if name in ("x", "h") or variant.per_row else (B, D) for name in OPERANDS[variant.op]}
    shapes |= {name: (D,) for name in ("weight", "bias") if variant.affine}
    given = {
        name: s(shape, problem.dtype if name in ("x", "h") else modulation_dtype or problem.dtype)
        for name, shape in shapes.items()
    }
    results = {"adaln": ["y"], "gated_residual": ["residual"]}.get(variant.op, ["residual", "y"])
    cotangents = dict.fromkeys(results, s((T, D), problem.dtype))

    def forward(given, offsets):
        return apply(variant, plan, given, offsets)

    def both(given, cotangents, offsets):
        found, vjp = jax.vjp(lambda given: forward(given, offsets), given)
        return found, vjp(cotangents)

    offsets = s((B + 1,), "int32")
    return lower_for_h200(both, given, cotangents, offsets) if backward else lower_for_h200(forward, given, offsets)


def kernels_of(text: str) -> list[str]:
    """The kernels' names in order; the program has nothing else: no copy, transpose, gather or cast of an operand."""
    operations = re.findall(r"= \"?stablehlo\.(\w+)", text)
    assert set(operations) == {"custom_call"}, operations
    assert text.count(KERNEL) == len(operations)
    return re.findall(r'"((?:adaln|gated_residual)_(?:fwd|bwd|sums))"', text)


SMALL = Problem(512, 1000, 5, "bfloat16")
LOWERED = [
    pytest.param(Variant(plan="auto"), ["adaln_fwd"], ["adaln_bwd", "adaln_sums"], id="adaln"),
    pytest.param(Variant(per_row=True, activation="gelu"), ["adaln_fwd"], ["adaln_bwd"], id="adaln-per-row"),
    pytest.param(
        Variant("gated_residual"), ["gated_residual_fwd"], ["gated_residual_bwd", "adaln_sums"], id="gated_residual"
    ),
    pytest.param(
        Variant("gated_residual", per_row=True),
        ["gated_residual_fwd"],
        ["gated_residual_bwd"],
        id="gated_residual-per-row",
    ),
    pytest.param(
        Variant("gated_residual_adaln", "rms", "silu"),
        ["adaln_fwd"],
        ["adaln_bwd", "adaln_sums"],
        id="gated_residual_adaln",
    ),
]


@pytest.mark.parametrize(("variant", "fwd", "bwd"), LOWERED)
def test_a_call_is_these_kernels(variant, fwd, bwd):
    """A user's call: "auto" takes the kernels. One forward; the backward and, with a vector a sequence, the sums."""
    assert kernels_of(lowered(variant, SMALL, None, False)) == fwd
    for save_stats in (False, True):
        assert kernels_of(lowered(variant, SMALL, Plan(save_stats=save_stats), True, "float32")) == fwd + bwd


def test_a_learned_affine_costs_one_sum_over_sequences():
    text = lowered(Variant(affine=True), SMALL, None, True)
    assert text.count(KERNEL) == 3
    assert not re.search(r"stablehlo\.(transpose|gather|scatter|dot|dot_general|while|sort|concatenate|pad)\b", text)


@pytest.mark.parametrize(("D", "dtype"), [*((D, "bfloat16") for D in WIDTHS), (1000, "float32"), (129, "float16")])
def test_heuristic_lowers_for_an_h200(D, dtype):
    problem = dataclasses.replace(SMALL, D=D, dtype=dtype)
    assert len(kernels_of(lowered(Variant("gated_residual_adaln", activation="gelu"), problem, None, True))) == 3


@pytest.mark.parametrize("D", [1000, 3072])
def test_candidates_lower_for_an_h200(D):
    """Some of them: warps and rows change no shape in a kernel, and each way to cut a row stands beside some step."""
    problem = dataclasses.replace(SMALL, D=D)
    found = {name: list({r.block: r for r in candidates(name, problem, H200)[1:]}.values()) for name in PASSES}
    for i in range(max(map(len, found.values()))):
        fwd, bwd = (found[name][i % len(found[name])] for name in PASSES)
        assert len(kernels_of(lowered(Variant("adaln", "rms"), problem, Plan("pallas", fwd, bwd), True))) == 3


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("D", [64, 1000, 4096])
def test_fp8_lowers_for_an_h200(D, dtype):
    s = jax.ShapeDtypeStruct
    shapes = [s((512, D), "bfloat16"), s((5, D), "bfloat16"), s((5, D), "bfloat16"), s((6,), "int32")]
    assert kernels_of(lower_for_h200(lambda *args: jaxops.adaln(*args, out_dtype=dtype), *shapes)) == ["adaln_fwd"]
