"""What Pallas' products do where rows are few: split and swapped sums, rows that the product casts itself
(`Tiles.cast_lhs`), and rows that are not quantized (`quantize_lhs=False`)."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxops
from jaxops.ops.fp8_matmul import Plan, Tiles
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.fp8_matmul.cases import RUNS, Case, kind_of, make_case, options_of, quantized_w, reference, y_and_dx

BY = ["interpret", pytest.param("gpu", marks=pytest.mark.gpu)]
INSIDE = Tiles("pallas", 16, 32, panel=2, cast_lhs=True)


def plan_of(tiles: Tiles) -> Plan:
    return Plan("pallas", fwd=tiles, dgrad=tiles, wgrad=Tiles("pallas", 16, 32))


@functools.partial(jax.jit, static_argnames=("plan", "recipe", "pow2"))
def results(x, w, dy, offsets, plan: Plan, recipe: str, pow2: bool = False):
    """(y, dx), and dw where it is made of what such a product keeps: elsewhere it is that of test_values.py."""
    op = jaxops.fp8_matmul if offsets is None else functools.partial(jaxops.fp8_grouped_matmul, group_offsets=offsets)
    call = functools.partial(op, recipe=recipe, plan=plan, pow2_scales=pow2)
    y, vjp = jax.vjp(call, x, w) if plan.fwd and plan.fwd.cast_lhs else jax.vjp(lambda x: call(x, w), x)
    return y, *vjp(dy)


GROUPS = (9, 0, 1, 17)


@pytest.mark.parametrize("run", BY)
@pytest.mark.parametrize(
    ("tiles", "recipe", "dtype", "sizes"),
    [
        (Tiles("pallas", 8, 64, 4, 2, panel=2, swap=True), "tensorwise", "float32", None),
        (Tiles("pallas", 64, 128, 4, 2, split=4, swap=True), "rowwise", "float32", GROUPS),
        (Tiles("pallas", 32, 16, 4, 2, split=2), "blockwise", "float32", None),
        (INSIDE, "blockwise", "bfloat16", GROUPS),
        (Tiles("pallas", 8, 64, 4, 2, swap=True, cast_lhs=True), "blockwise_with_gw_hp", "float16", GROUPS),
        (Tiles("pallas", 32, 32, 4, 2, split=2, cast_lhs=True), "blockwise_with_gw_hp", "float32", None),
    ],
    ids=lambda x: f"{x.bm}x{x.bn}x{x.split}" if isinstance(x, Tiles) else "groups" if x == GROUPS else str(x),
)
def test_tiles(tiles, recipe, dtype, sizes, run):
    """Dense or over groups, rows outside which are NaN or huge; no size is a multiple of 128, sums are shorter than
    their parts. In bfloat16 scales are powers of two."""
    options_of(run)
    case, pow2 = make_case(37, 300, 139, sizes=sizes, before=3, dtype=dtype), dtype == "bfloat16"
    got = results(case.x, case.w, case.dy, case.offsets, plan_of(tiles), recipe, pow2)
    for name, g, want in zip(("y", "dx", "dw"), got, reference(case, recipe, pow2), strict=False):
        assert g.dtype == dtype
        assert_close(g, want, **kind_of(run, dtype), name=name)
    assert not any(np.asarray(g, np.float32)[case.outside].any() for g in got[:2])


@pytest.mark.parametrize(("recipe", "kept"), [("blockwise", "float32"), ("blockwise_with_gw_hp", "bfloat16")])
def test_what_is_kept_of_rows_that_the_product_casts(recipe, kept):
    """For a weight gradient in half precision x is kept in it."""
    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((37, 300), (300, 139)))
    call = functools.partial(jaxops.fp8_matmul, recipe=recipe, plan=plan_of(INSIDE))
    _, vjp = jax.eval_shape(functools.partial(jax.vjp, call), x, w)
    assert [leaf.dtype for leaf in jax.tree.leaves(vjp) if leaf.shape == x.shape] == [kept]


@pytest.mark.parametrize("run", BY)
def test_the_bits_of_a_cast_before(run):
    """Of NaN, infinities, zeros and tiny numbers, too: not finite is their own row only, and affects no scale."""
    options_of(run)
    case = make_case(20, 300, 33, dtype="bfloat16")
    x, (M, N) = np.array(case.x.astype(jnp.float32)), case.dy.shape
    x[3, 5], x[4, 299], x[6, 200], x[7] = np.nan, -np.nan, -np.inf, np.nan
    x[8], x[9, 128:256], x[10], x[11] = 0, 0, 1e-38, 1e33
    plans = [plan_of(tiles) for tiles in (INSIDE, dataclasses.replace(INSIDE, cast_lhs=False))]
    both = jax.jit(lambda x, w: [jaxops.fp8_matmul(x, w, plan=plan) for plan in plans])
    # So small a w that no sum becomes infinite.
    y, before = (np.asarray(y, np.float32) for y in both(put(x, jnp.bfloat16), case.w / 256))
    np.testing.assert_array_equal(y, before)
    finite = ~np.isin(np.arange(M), (3, 4, 6, 7))
    np.testing.assert_array_equal(np.isfinite(y), np.broadcast_to(finite[:, None], (M, N)))
    assert np.isnan(y[~finite]).all()
    assert not y[[8, 10]].any()


def test_one_launch():
    """No cast beside the product; quantized rows are multiplied as they are; under vmap each example has its scales."""
    w8 = jaxops.quantize(jnp.ones((128, 32)), scaling="block_128x128")
    matmul = functools.partial(jaxops.fp8_matmul, rhs=w8, plan=plan_of(INSIDE))
    x = jnp.arange(1.0, 5)[:, None, None] * jnp.ones((4, 3, 128))
    text = str(jax.make_jaxpr(matmul)(x[0]))
    assert text.count("name=fp8_matmul_rows") == 1
    assert "quantize" not in text
    np.testing.assert_array_equal(jax.vmap(matmul)(x), jnp.stack([matmul(one) for one in x]))
    np.testing.assert_array_equal(matmul(jaxops.quantize(x[1])), matmul(x[1]))


@jax.jit
def by_layout(w8: jaxops.Quantized) -> tuple[jax.Array, jax.Array]:
    """float32, of the column layout and of the row layout."""
    return jaxops.dequantize(w8.T, "float32").mT, jaxops.dequantize(w8, "float32")


def check_unquantized(case: Case, recipe: str, run: str, scale: float) -> None:
    """y and dx in half precision of each layout's own values."""
    w8 = quantized_w(case.w, recipe, "both")
    half = np.float16 if case.x.dtype == jnp.float16 else ml_dtypes.bfloat16
    x, dy = (np.asarray(v).astype(half).astype(np.float64) for v in (case.x, case.dy))
    for_y, for_dx = (np.asarray(w, np.float64).reshape(-1, *w.shape[-2:]) for w in by_layout(w8))
    bounds = [0, len(x)] if case.offsets is None else np.asarray(case.offsets).tolist()
    y, dx = np.zeros(dy.shape), np.zeros(x.shape)
    for g, (lo, hi) in enumerate(itertools.pairwise(bounds)):
        y[lo:hi], dx[lo:hi] = x[lo:hi] @ for_y[g], dy[lo:hi] @ for_dx[g].T
    for name, got, want in zip(("y", "dx"), y_and_dx(case, w8, recipe, run, quantize_lhs=False), (y, dx), strict=True):
        assert got.dtype == case.x.dtype
        assert_close(got, want, case.x.dtype.name, name=f"{name} of {case.x.shape, case.w.shape}", scale=scale)
        assert not np.asarray(got)[case.outside].any()


@pytest.mark.parametrize("run", RUNS[:3])  # Hopper's kernel multiplies FP8 by FP8
@pytest.mark.parametrize(
    ("recipe", "dtype", "sizes"),
    [
        ("blockwise", "bfloat16", None),
        ("tensorwise", "float16", None),
        ("rowwise", "float32", None),
        ("blockwise", "float32", (9, 0, 7, 2)),
        ("rowwise", "bfloat16", (0, 18)),
    ],
    ids=lambda x: "groups" if isinstance(x, tuple) else str(x),
)
def test_unquantized_rows(run, recipe, dtype, sizes):
    """K and N no multiples of 128."""
    case = make_case(21, 139, 150, sizes=sizes, before=0 if sizes is None else 2, dtype=dtype)
    check_unquantized(case, recipe, run, 10 if run == "gpu" else 1)


@pytest.mark.parametrize("run", BY)
def test_tiles_of_the_plans_choice(run):
    """Of sums that are split and not, of whole steps and not; few columns."""
    for M, K, N, sizes in (
        (9, 1024, 3, None),
        (130, 1030, 9, None),
        (8, 200, 1100, (3, 0, 5)),
        (40, 1030, 70, (21, 0, 19)),
    ):
        case = make_case(M, K, N, sizes=sizes, before=0, dtype="bfloat16")
        check_unquantized(case, "blockwise", "own", 10 if run == "gpu" else 1)


def test_unquantized_rows_are_not_cast():
    """Rows that FP8 would round to others are kept: 1 + 1/64 has no neighbour nearer than 1/16 in e4m3."""
    w8 = jaxops.quantize(jnp.eye(128), scaling="block_128x128", layouts="col")
    x = jnp.full((1, 128), 1 + 1 / 64)
    kept, cast = (jaxops.fp8_matmul(x, w8, quantize_lhs=each, backend="xla") for each in (False, True))
    np.testing.assert_array_equal(kept, x)
    assert float(jnp.max(jnp.abs(cast - x))) > 0  # 448 / (1 + 1/64) is no power of two
