"""Random routings and rows, with NaN where nothing may be read, and the three ways to run them."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jaxops
from jaxops import Routing
from jaxops.ops.permute import Plan, Tiles
from jaxops.ops.permute.reference import combine_reference, permute_reference
from tests.arrays import put
from tests.compare import assert_close

# "interpret" runs the kernels in Pallas' interpreter on the CPU, "gpu" compiles the same kernels.
RUNS = ["xla", "interpret", pytest.param("gpu", marks=pytest.mark.gpu)]
TILE = Tiles(4, 8, 2, 1)  # smaller than the tests' sizes in every way


@dataclasses.dataclass(frozen=True)
class Variant:
    """The static part of a call: shapes, dtypes, tiles; and the experts of the routing, of which this device has those
    from `first` to `last` - 1."""

    T: int = 13
    D: int = 37
    k: int = 3
    E: int = 6
    dtype: str = "float32"
    out_dtype: str | None = None
    capacity: int | None = None
    first: int = 0
    last: int | None = None
    tile: Tiles = TILE

    def plan_for(self, run: str) -> Plan:
        return Plan("xla") if run == "xla" else Plan("pallas", self.tile, self.tile, self.tile)


# Rows before and after the groups, dropped choices, no size that is a power of two.
SHARD = Variant(capacity=6, first=1, last=5)


def make_routing(variant: Variant, seed: int = 0) -> Routing:
    """As `jaxops.route` makes it, in numpy; the weights of dropped choices are NaN."""
    v, rng = variant, np.random.default_rng(seed)
    experts = np.argsort(rng.random((v.T, v.E)), axis=1)[:, : v.k].astype(np.int32)
    R = v.T * v.k
    positions, indices, offsets = np.full((v.T, v.k), R, np.int32), np.zeros(R, np.int32), [0]
    for expert in range(v.E):
        tokens, choices = (places[: v.capacity] for places in np.nonzero(experts == expert))
        rows = offsets[-1] + np.arange(len(tokens))
        positions[tokens, choices], indices[rows] = rows, tokens
        offsets.append(offsets[-1] + len(tokens))
    load = np.bincount(experts.ravel(), minlength=v.E).astype(np.int32)
    weights = np.where(positions < R, rng.normal(size=positions.shape), np.nan).astype(np.float32)
    mine = np.array(offsets, np.int32)[v.first : (v.E if v.last is None else v.last) + 1]
    zero = np.zeros((), np.float32)
    return jax.tree.map(put, Routing(weights, experts, indices, positions, mine, load, zero, zero))


def inside(routing: Routing) -> np.ndarray:
    """Which rows are in a group."""
    row = np.arange(routing.row_indices.shape[0])
    return (row >= int(routing.group_offsets[0])) & (row < int(routing.group_offsets[-1]))


def has_row(routing: Routing) -> np.ndarray:
    """[T, k], which choices have a row in a group."""
    position, offsets = np.asarray(routing.row_positions), np.asarray(routing.group_offsets)
    return (position >= offsets[0]) & (position < offsets[-1])


def make_case(variant: Variant, seed: int = 0) -> dict:
    """routing, x [T, D], rows [R, D], and the cotangents drows of permute and dout of combine. Rows outside are NaN."""
    v, rng = variant, np.random.default_rng(seed + 100)
    routing = make_routing(v, seed)
    bad = np.where(inside(routing), 1, np.nan)[:, None]
    normal = {
        name: rng.normal(size=shape)
        for name, shape in (("x", (v.T, v.D)), ("dout", (v.T, v.D)), ("rows", bad.shape), ("drows", bad.shape))
    }
    normal |= {name: rng.normal(size=(v.T * v.k, v.D)) * bad for name in ("rows", "drows")}
    dtypes = {"dout": v.out_dtype or v.dtype}
    return {"routing": routing} | {name: put(array, dtypes.get(name, v.dtype)) for name, array in normal.items()}


def permute(variant: Variant, run: str, x, routing: Routing) -> jax.Array:
    if run == "reference":
        return permute_reference(x, routing).astype(x.dtype)
    return jaxops.permute(x, routing, plan=variant.plan_for(run))


def combine(variant: Variant, run: str, rows, routing: Routing, out_dtype=None) -> jax.Array:
    if run == "reference":
        return combine_reference(rows, routing).astype(out_dtype or rows.dtype)
    return jaxops.combine(rows, routing, out_dtype=out_dtype, plan=variant.plan_for(run))


@functools.cache
def compiled(run: str, variant: Variant):
    """A jitted function from a case to both results and all gradients by name; "reference" is reference.py."""

    def everything(case: dict) -> dict:
        routing = case["routing"]
        rows, permute_vjp = jax.vjp(lambda x: permute(variant, run, x, routing), case["x"])

        def weighted(rows, weights):
            return combine(variant, run, rows, dataclasses.replace(routing, weights=weights), variant.out_dtype)

        out, combine_vjp = jax.vjp(weighted, case["rows"], routing.weights)
        drows, dweights = combine_vjp(case["dout"])
        return {"rows": rows, "dx": permute_vjp(case["drows"])[0], "out": out, "drows": drows, "dweights": dweights}

    return jax.jit(everything)


def check(case: dict, variant: Variant, run: str) -> dict:
    """Everything equals the reference's: copies bit for bit, sums up to rounding; zeros outside."""
    got, want = compiled(run, variant)(case), compiled("reference", dataclasses.replace(variant, tile=TILE))(case)
    np.testing.assert_array_equal(got["rows"], want["rows"])
    dtypes = {"out": variant.out_dtype or variant.dtype, "dweights": "float32"}
    for name, values in got.items():
        dtype = dtypes.get(name, variant.dtype)
        assert values.dtype == dtype, name
        assert_close(values, want[name], dtype, name)
    outside, routing = ~inside(case["routing"]), case["routing"]
    assert not np.asarray(got["rows"], np.float32)[outside].any()
    assert not np.asarray(got["drows"], np.float32)[outside].any()
    assert not np.asarray(got["dweights"])[~has_row(routing)].any()
    return got
