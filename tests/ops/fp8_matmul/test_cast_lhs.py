"""Tiles(cast_lhs=True): the Pallas product casts its rows in its launch, to the bits of a cast before it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.fp8_matmul import Plan, Tiles
from tests.arrays import put
from tests.ops.fp8_matmul.cases import Case, make_case, options_of

BY = ["interpret", pytest.param("gpu", marks=pytest.mark.gpu)]
TILES = {
    "plain": Tiles("pallas", 16, 32, panel=2),
    "swapped": Tiles("pallas", 8, 64, 4, 2, swap=True),
    "split": Tiles("pallas", 32, 32, 4, 2, split=2),
}


@functools.partial(jax.jit, static_argnames=("plan", "recipe", "pow2"))
def results(x, w, dy, offsets, plan: Plan, recipe: str, pow2: bool):
    op = jaxops.fp8_matmul if offsets is None else functools.partial(jaxops.fp8_grouped_matmul, group_offsets=offsets)
    y, vjp = jax.vjp(lambda x, w: op(x, w, recipe=recipe, plan=plan, pow2_scales=pow2), x, w)
    return y, *vjp(dy)


def plans(tiles: Tiles) -> list[Plan]:
    """The product casts its rows, and a cast before it."""
    wgrad = Tiles("pallas", 16, 32)
    ways = [dataclasses.replace(tiles, cast_lhs=cast) for cast in (True, False)]
    return [Plan("pallas", fwd=way, dgrad=way, wgrad=wgrad) for way in ways]


def check(case: Case, tiles: Tiles, run: str, *, recipe: str = "blockwise", pow2: bool = False) -> list[np.ndarray]:
    """y, dx, dw: the same bits."""
    options_of(run)
    one, two = (results(case.x, case.w, case.dy, case.offsets, plan, recipe, pow2) for plan in plans(tiles))
    for inside, before in zip(one, two, strict=True):
        assert inside.dtype == before.dtype
        np.testing.assert_array_equal(np.asarray(inside, np.float32), np.asarray(before, np.float32))
    return [np.asarray(x, np.float32) for x in one]


@pytest.mark.parametrize("run", BY)
@pytest.mark.parametrize(
    ("tiles", "dtype", "recipe", "pow2"),
    [
        ("plain", "bfloat16", "blockwise", True),
        ("swapped", "float16", "blockwise_with_gw_hp", False),
        ("split", "float32", "blockwise_with_gw_hp", False),
    ],
)
def test_equals_a_cast_before(tiles, dtype, recipe, pow2, run):
    """Dense and over groups; no size is a multiple of 128. Rows outside the groups are NaN, and zeros in results."""
    check(make_case(37, 300, 139, dtype=dtype), TILES[tiles], run, recipe=recipe, pow2=pow2)
    case = make_case(37, 300, 139, sizes=(9, 0, 1, 17), before=3, dtype=dtype)
    y, dx, dw = check(case, TILES[tiles], run, recipe=recipe, pow2=pow2)
    assert not y[case.outside].any()
    assert not dx[case.outside].any()
    assert not dw[1].any()


@pytest.mark.parametrize(("recipe", "kept"), [("blockwise", "float32"), ("blockwise_with_gw_hp", "bfloat16")])
def test_what_is_kept_of_rows(recipe, kept):
    """For a weight gradient in half precision x is kept in it."""
    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((37, 300), (300, 139)))
    plan = plans(TILES["plain"])[0]
    _, vjp = jax.eval_shape(
        lambda *given: jax.vjp(lambda *of: jaxops.fp8_matmul(*of, recipe=recipe, plan=plan), *given), x, w
    )
    assert [leaf.dtype for leaf in jax.tree.leaves(vjp) if leaf.shape == x.shape] == [kept]


@pytest.mark.parametrize("run", BY)
def test_what_is_not_finite(run):
    """NaN and infinities make their own row NaN only, and affect no scale; zeros stay; tiny numbers become zero."""
    case = make_case(20, 300, 33, dtype="bfloat16")
    x = np.array(case.x.astype(jnp.float32))
    x[3, 5], x[4, 299], x[6, 200], x[7] = np.nan, -np.nan, -np.inf, np.nan
    x[8], x[9, 128:256], x[10], x[11] = 0, 0, 1e-38, 1e33
    case = dataclasses.replace(case, x=put(x, jnp.bfloat16), w=case.w / 256)  # so that no sum becomes infinite
    y = check(case, TILES["plain"], run)[0]
    assert set(np.flatnonzero(np.isnan(y).all(axis=1))) == {3, 4, 6, 7}
    assert np.isfinite(np.delete(y, [3, 4, 6, 7], axis=0)).all()
    assert not y[[8, 10]].any()


def test_one_launch():
    """No cast beside the product; quantized rows are multiplied as they are; under vmap each example has its scales."""
    options, w8 = {"plan": plans(TILES["plain"])[0]}, jaxops.quantize(jnp.ones((128, 32)), scaling="block_128x128")
    matmul = functools.partial(jaxops.fp8_matmul, rhs=w8.T.T, **options)
    x = jnp.arange(1.0, 5)[:, None, None] * jnp.ones((4, 3, 128))
    text = str(jax.make_jaxpr(matmul)(x[0]))
    assert text.count("name=fp8_matmul_rows") == 1
    assert "quantize" not in text
    np.testing.assert_array_equal(jax.vmap(matmul)(x), jnp.stack([matmul(one) for one in x]))
    np.testing.assert_array_equal(matmul(jaxops.quantize(x[1])), matmul(x[1]))
