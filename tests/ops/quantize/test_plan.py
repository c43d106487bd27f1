"""Plans of quantize: tuned rows, heuristic, candidates; what is lowered for an H200."""

import dataclasses
import functools
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
from jaxops.ops.quantize import Beside, Format, Gathered, Plan, Problem, Tiles, candidates, cast
from jaxops.ops.quantize.plan import LAYOUTS, PASSES, PLANNER, heuristic
from tests.hopper import costs_of, lower_for_h200
from tests.ops.quantize.cases import SCALINGS
from tests.plans import by_choices

pytestmark = pytest.mark.versions

make_plan = by_choices(quantize.make_plan)

H200 = Device("NVIDIA H200", "gpu")
SHIPPED = list(tuned_rows("quantize", H200))
MARK = Tiles(2, 2048, warps=1)  # no heuristic gives it


def test_a_row_serves_every_length_and_its_own_widths():
    """Of blocks every width, of whole rows those of the same power of two."""
    blocks, rowwise = Problem(1000, 4096, "bfloat16"), Problem(7, 4096, "bfloat16", "rowwise")
    of = lambda problem, row, **change: make_plan(dataclasses.replace(problem, **change), H200, [row]).cast
    row = {"op": "quantize", "pass": "cast", "tiles": dataclasses.asdict(MARK)}
    assert of(blocks, row | dataclasses.asdict(blocks), M=7, K=133) == MARK
    assert of(rowwise, row | dataclasses.asdict(rowwise), K=2049) == MARK
    assert of(rowwise, row | dataclasses.asdict(rowwise), K=4097) != MARK


@hypothesis.settings(max_examples=100)
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


@pytest.mark.parametrize("row", SHIPPED, ids=lambda row: "-".join(str(x) for x in PLANNER.row_key(row)))
def test_shipped_row(row):
    """It says what was measured, is found, and is among what tuning would measure again."""
    assert row["device"] == H200.kind
    assert [PLANNER.row_key(other) for other in SHIPPED].count(PLANNER.row_key(row)) == 1
    problem = Problem(row["M"], row["K"], row["dtype"], row["scaling"], row["layouts"])
    assert getattr(make_plan(problem, H200, SHIPPED), row["pass"]) == Tiles(**row["tiles"])
    assert Tiles(**row["tiles"]) in candidates(row["pass"], problem, H200)


def lowered(fn, *shapes) -> tuple[list[str], set[str], list[tuple[str, int, int]]]:
    """The kernels' names in order, XLA's own operations, and the kernels' costs."""
    text = lower_for_h200(fn, *shapes)
    others = set(re.findall(r"= \"?stablehlo\.(\w+)", text)) - {"custom_call"}
    return re.findall(r'"((?:quantize|schedule)_\w+)"', text), others, costs_of(text)


def kernels_of(shape=(512, 1000), x_dtype="bfloat16", **options) -> tuple[list[str], set[str]]:
    return lowered(functools.partial(jaxops.quantize, **options), jax.ShapeDtypeStruct(shape, x_dtype))[:2]


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
        options = {"layouts": "both", "dtype": jax.numpy.float8_e5m2, "key": np.zeros(2, np.uint32)}
        assert kernels_of((129, 257), dtype, scaling=scaling, **options)[0][-1] == "quantize_cast"


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


@pytest.mark.parametrize("scaling", SCALINGS[:3])
def test_gathered_rows_are_never_in_memory(scaling):
    """The kernels read the tokens. (XLA gathers for the largest magnitude of all, which experts give.)"""
    s, T, k, D = jax.ShapeDtypeStruct, 16_384, 8, 2048
    given = s((T, D), "bfloat16"), s((T * k,), "int32"), s((65,), "int32")

    def gathered(x, indices, offsets, amax=None):
        return cast(Gathered(x, indices), Format(scaling), "col", group_offsets=offsets, amax=amax)[0]

    kernels, others, costs = lowered(gathered, *given)
    assert kernels == ["quantize_amax"] * (scaling == "rowwise") + ["schedule_rows", "quantize_cast"]
    assert not others & {"dynamic_slice", "transpose", "pad", "concatenate", "copy"}
    assert ("gather" in others) == (scaling == "tensorwise")
    tokens = T * D * 2 + T * k * 4
    assert all(tokens < nbytes < 1.3 * tokens for name, _, nbytes in costs if name == "quantize_amax")
    assert tokens + T * k * D < costs[-1][2] < 1.1 * (tokens + T * k * D)  # a byte for each element of the rows
    if scaling == "tensorwise":
        assert lowered(gathered, *given, s((), "float32"))[0] == ["schedule_rows", "quantize_cast"]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_tensors_beside_are_never_one_in_memory(scaling):
    """And are counted once."""
    E, D = 64, 2048
    for F, layouts, dtype in ((512, "both", "bfloat16"), (500, "row", "float32"), (77, "col", "float32")):
        w = jax.ShapeDtypeStruct((E, D, F), dtype)
        beside = lambda *sides, layouts=layouts: cast(Beside(*sides), Format(scaling), layouts)[0]
        kernels, others, costs = lowered(beside, w, w)
        assert kernels == ["quantize_amax"] * (scaling == "rowwise" and layouts != "row") + ["quantize_cast"]
        assert not others & {"gather", "transpose", "pad", "concatenate", "copy"}
        read, written = 2 * E * D * F * w.dtype.itemsize, 2 * E * D * F * (1 + (layouts == "both"))
        assert read + written < costs[-1][2] < 1.1 * (read + written)
