"""Plans of quantize: tuned rows, heuristic, candidates, tuning; what is lowered for an H200."""

import dataclasses
import re

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import jaxops
from jaxops._lib.planning.device import Device
from jaxops._lib.planning.tuned import tuned_rows
from jaxops.ops import quantize
from jaxops.ops.quantize import Plan, Problem, Tiles, candidates
from jaxops.ops.quantize.plan import LAYOUTS, PASSES, PLANNER, heuristic
from tests.hopper import lower_for_h200
from tests.ops.quantize.cases import SCALINGS
from tests.plans import by_choices

pytestmark = pytest.mark.versions

make_plan = by_choices(quantize.make_plan)

H200 = Device("NVIDIA H200", "gpu")
PROBLEM = Problem(1000, 4096, "bfloat16")
SHIPPED = list(tuned_rows("quantize", H200))
MARK = {"cast": Tiles(2, 2048, warps=1), "amax": Tiles(4, 1024, warps=1)}  # no heuristic gives them


def row(pass_name: str, problem: Problem = PROBLEM, **change) -> dict:
    sizes = {name: getattr(problem, name) for name in ("M", "K", "dtype", "scaling", "layouts")}
    return {"op": "quantize", "pass": pass_name, **sizes, "tiles": dataclasses.asdict(MARK[pass_name]), **change}


def test_explicit_then_tuned_then_heuristic():
    rows = [row("cast"), row("amax")]
    explicit = Tiles(8, 128)
    assert make_plan(PROBLEM, H200, rows, plan=Plan(cast=explicit)) == Plan("pallas", explicit, MARK["amax"])
    plan = make_plan(PROBLEM, H200, [row("cast"), row("cast", tiles=vars(explicit))])
    assert plan == Plan("pallas", MARK["cast"], heuristic("amax", PROBLEM, H200))
    assert make_plan(PROBLEM, H200) == Plan("pallas", *(heuristic(name, PROBLEM, H200) for name in PASSES))


def test_a_row_serves_every_length_and_its_own_widths():
    """Of blocks every width, of whole rows those of the same power of two."""
    assert make_plan(Problem(7, 133, "bfloat16"), H200, [row("cast")]).cast == MARK["cast"]
    rowwise = Problem(7, 4096, "bfloat16", "rowwise")
    rows = [row("cast", rowwise)]
    assert make_plan(dataclasses.replace(rowwise, K=2049), H200, rows).cast == MARK["cast"]
    assert make_plan(dataclasses.replace(rowwise, K=4097), H200, rows).cast != MARK["cast"]


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    M=st.integers(1, 1 << 20),
    K=st.integers(1, 70_000),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    scaling=st.sampled_from(SCALINGS),
    layouts=st.sampled_from(LAYOUTS),
    pass_name=st.sampled_from(PASSES),
)
def test_heuristic_and_candidates_are_legal(M, K, dtype, scaling, layouts, pass_name):
    """make_plan refuses what no kernel can have; a tile fits into registers."""
    problem = Problem(M, K, dtype, scaling, layouts)
    found = candidates(pass_name, problem, H200)
    assert found[0] == heuristic(pass_name, problem, H200)
    assert len(set(found)) == len(found)
    for tile in found:
        assert getattr(make_plan(problem, H200, plan=Plan(**{pass_name: tile})), pass_name) == tile
        assert tile.rows * tile.cols <= 128 * 32 * tile.warps


def test_no_two_shipped_rows_have_one_key():
    assert len({PLANNER.row_key(row) for row in SHIPPED}) == len(SHIPPED)


@pytest.mark.parametrize("row", SHIPPED, ids=lambda row: "-".join(str(x) for x in PLANNER.row_key(row)))
def test_shipped_row(row):
    """It says what was measured, is found, and is among what tuning would measure again."""
    assert row["device"] == H200.kind
    problem = Problem(row["M"], row["K"], row["dtype"], row["scaling"], row["layouts"])
    assert getattr(make_plan(problem, H200, SHIPPED), row["pass"]) == Tiles(**row["tiles"])
    assert Tiles(**row["tiles"]) in candidates(row["pass"], problem, H200)


KERNEL = "__gpu$xla.gpu.triton"  # the target of its custom call in StableHLO


def kernels_of(
    shape=(512, 1000), x_dtype="bfloat16", groups: int | None = None, **options
) -> tuple[list[str], set[str]]:
    """The kernels' names in order, and XLA's own operations."""
    s = jax.ShapeDtypeStruct
    arrays = [s(shape, x_dtype), *([] if groups is None else [s((groups + 1,), "int32")])]
    return kernels_in(lower_for_h200(lambda x, o=None: jaxops.quantize(x, group_offsets=o, **options), *arrays))


def kernels_in(text: str) -> tuple[list[str], set[str]]:
    return re.findall(r'"((?:quantize|schedule)_\w+)"', text), set(re.findall(r"= \"?stablehlo\.(\w+)", text)) - {
        "custom_call"
    }


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_call_is_these_kernels(scaling, layouts):
    """One pass over x writes every layout. Before it a kernel finds the largest magnitudes of columns, or XLA that of a
    whole tensor."""
    kernels, others = kernels_of(scaling=scaling, layouts=layouts)
    looks = scaling == "rowwise" and layouts != "row"
    assert kernels == ["quantize_amax"] * looks + ["quantize_cast"]
    if looks or scaling == "tensorwise":
        assert "reduce" in others
        assert not others & {"transpose", "pad", "gather", "concatenate", "copy"}
    else:
        assert others <= {"reshape", "broadcast_in_dim"}


def test_very_long_rows_are_looked_at_first():
    assert kernels_of((64, 16_384), scaling="rowwise")[0] == ["quantize_cast"]
    assert kernels_of((64, 16_385), scaling="rowwise")[0] == ["quantize_amax", "quantize_cast"]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_lower_for_an_h200(dtype):
    for scaling in ("rowwise", "block_1x128"):
        assert (
            kernels_of(
                (129, 257),
                dtype,
                scaling=scaling,
                layouts="both",
                dtype=jax.numpy.float8_e5m2,
                key=np.zeros(2, np.uint32),
            )[0][-1]
            == "quantize_cast"
        )


@pytest.mark.parametrize(
    ("scaling", "layouts"), [("block_1x128", "both"), ("block_1x128", "row"), ("rowwise", "row"), ("tensorwise", "row")]
)
def test_candidates_lower_for_an_h200(scaling, layouts):
    """One of each shape: warps and panels change nothing that is lowered."""
    problem = Problem(512, 1000, "bfloat16", scaling, layouts)
    cast = {(t.rows, t.cols, t.patch, t.near): t for t in candidates("cast", problem, H200)}
    amax = {(t.rows, t.cols): t for t in candidates("amax", problem, H200)}
    for i, tile in enumerate(list(cast.values())[::2]):
        plan = Plan("pallas", tile, list(amax.values())[i % len(amax)])
        assert kernels_of(scaling=scaling, layouts=layouts, plan=plan)[0][-1] == "quantize_cast"
