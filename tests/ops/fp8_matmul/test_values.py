"""y, dx and dw compared with a float64 reference: recipes, odd sizes, dtypes, groups, quantized input."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.fp8_matmul import RECIPES, Format, Recipe
from tests.arrays import put
from tests.compare import assert_close
from tests.jaxprs import equations
from tests.ops.fp8_matmul.cases import (
    DENSE,
    FEW,
    GROUPED,
    RUNS,
    Case,
    apply,
    check,
    delayed_amax,
    kind_of,
    make_case,
    options_of,
    quantized_w,
    reference,
    run_all,
    y_and_dx,
)
from tests.window import window


def every_recipe(names, interpreted=()) -> list:
    """On the CPU the interpreter runs each kind of scales over groups: that is every kernel. Compiling takes long."""
    return [
        pytest.param(name, run, id=f"{name}-{run}", marks=pytest.mark.gpu if run in ("gpu", "triton") else ())
        for name, run in itertools.product(names, ("xla", "interpret", "gpu", "triton"))
        if run != "interpret" or name in interpreted
    ]


@pytest.mark.parametrize(("recipe", "run"), every_recipe(DENSE))
def test_recipes(recipe, run):
    """More than one block of 128 in every dimension, none of them whole."""
    check(make_case(150, 139, 161), recipe, run)


KINDS = ("tensorwise", "rowwise", "blockwise")


@pytest.mark.parametrize(("recipe", "run"), every_recipe(GROUPED, KINDS))
def test_groups(recipe, run):
    """In one program: a group of several blocks of 128 rows, a short one, an empty one, rows outside at both ends; all
    rows in one group, none in any; whole blocks; groups of one row."""
    for sizes, before in (((17, 0, 145), 11), ((0, 191, 0), 0), ((0, 0, 0), 100), ((128, 63, 0), 0), ((1, 1, 1), 188)):
        check(make_case(191, 139, 45, sizes=sizes, before=before), recipe, run)


@pytest.mark.parametrize("run", RUNS)
def test_offsets_that_break_the_contract(run):
    """Below 0, past M, decreasing: any result of the right shape. On a GPU the sanitizer checks the accesses."""
    case = make_case(191, 139, 45, sizes=(17, 0, 145))
    for bad in ([-5, 10, 20, 10_000], [0, 130, 10, 191], [2**31 - 1, -(2**31), 0, 7], [191, 0, 191, 0]):
        offsets = put(np.array(bad, np.int32))
        y, dx, dw = jax.block_until_ready(run_all(dataclasses.replace(case, offsets=offsets), "blockwise", run))
        assert (y.shape, dx.shape, dw.shape) == (case.dy.shape, case.x.shape, case.w.shape)


def test_rows_that_int32_does_not_reach():
    """Either of the operands gets more rows, so that JAX counts in 64 bits."""
    case = make_case(75, 128, 60, sizes=(9, 4, 0, 30), before=3)
    y = jax.jit(
        lambda x, w, offsets, reached: apply(
            dataclasses.replace(case, offsets=offsets), x, w, "blockwise", "interpret"
        ),
        static_argnums=3,
    )
    for reached in (6000, 20_000):
        with window(reached):
            assert_close(y(case.x, case.w, case.offsets, reached), reference(case, "blockwise")[0], "float32")


@pytest.mark.parametrize("sizes", [None, [17, 0, 145]], ids=["dense", "groups"])
@pytest.mark.parametrize("half", [("dgrad", "wgrad"), ("dgrad",)], ids="+".join)
def test_a_recipe_is_one_entry(half, sizes, monkeypatch):
    """Rows in FP8 forward, gradients in half precision; and of lhs only. Neither is in the package."""
    row, name = Format("rowwise"), "own" + "-".join(half)
    monkeypatch.setitem(RECIPES, name, Recipe(name, row, row, row, frozenset(half)))
    case = make_case(191, 139, 45, sizes=sizes, before=11, dtype="bfloat16", w_dtype="float32")
    check(case, name, "xla")
    with pytest.raises(NotImplementedError, match="unquantized rhs for dlhs: pass the array"):
        y_and_dx(case, quantized_w(case.w, "rowwise", "both"), name, "xla")


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("recipe", KINDS)
def test_range(recipe, run):
    """Operands at the ends of the range that the docs name: a power of two as factor changes no digit. In the programs
    of `test_groups`."""
    case = make_case(191, 139, 45, sizes=(100, 0, 91))
    wanted = [np.asarray(y) for y in run_all(case, recipe, run)]
    top = 112 - 8 - int(np.ceil(np.log2(max(np.abs(x).max() for x in (case.x, case.w)))))  # no sum is of more than 2**8
    for of_x, of_w in ((top, 0), (0, top), (top, -40), (-80, 0), (0, -80), (-40, -40)):
        scaled = dataclasses.replace(case, x=case.x * 2.0**of_x, w=case.w * 2.0**of_w)
        for got, want, power in zip(run_all(scaled, recipe, run), wanted, (of_x + of_w, of_w, of_x), strict=True):
            np.testing.assert_array_equal(got, want * np.float32(2.0**power))


@pytest.mark.parametrize("run", FEW)
@pytest.mark.parametrize(
    ("recipe", "dtype", "w_dtype"),
    [
        ("blockwise", "bfloat16", "float32"),
        ("rowwise_with_gw_hp", "float32", "bfloat16"),
        ("blockwise_with_gw_hp", "float16", "float32"),
    ],
)
def test_dtypes(run, recipe, dtype, w_dtype):
    """A float32 master's gradient is float32, whatever x is. Scales are powers of two in some."""
    check(make_case(21, 130, 37, dtype=dtype, w_dtype=w_dtype), recipe, run, pow2=dtype == "bfloat16")


@pytest.mark.parametrize(("recipe", "run"), every_recipe(DENSE))
def test_an_infinity_stays_not_finite(recipe, run):
    """As in an unquantized product, an infinity makes its row of y (of w: its column) not finite, and no other;
    gradients too.
    """
    M, K, N = 150, 139, 161  # of test_recipes: compiled already
    case = make_case(M, K, N)
    x, w, dy = (np.array(value) for value in (case.x, case.w, case.dy))
    x[3, 5], x[4, 129], w[7, 2], dy[6, 8] = np.inf, -np.inf, np.inf, -np.inf
    # The infinities of x are not in its largest magnitude, nor are w's.
    largest = tuple(jnp.float32(np.max(np.abs(value[np.isfinite(value)]))) for value in (x, w))

    @jax.jit
    def run_delayed(x, w, dy):
        y, vjp, now = jax.vjp(
            lambda x, w: jaxops.fp8_matmul(x, w, recipe=recipe, amax=largest, **options_of(run)), x, w, has_aux=True
        )
        return y, *vjp(dy), now

    if recipe == "delayed":
        y, dx, dw, now = run_delayed(x, w, dy)
        np.testing.assert_array_equal(now, largest)
    else:
        y, dx, dw = run_all(Case(*map(put, (x, w, dy))), recipe, run)
    rows, columns, depth = np.arange(M)[:, None], np.arange(N)[None, :], np.arange(K)
    np.testing.assert_array_equal(np.isfinite(y), ~((rows == 3) | (rows == 4) | (columns == 2)))
    np.testing.assert_array_equal(np.isfinite(dx), ~((rows == 6) | (depth[None, :] == 7)))
    np.testing.assert_array_equal(np.isfinite(dw), ~((columns == 8) | (depth[:, None] == 5) | (depth[:, None] == 129)))


@pytest.mark.gpu
@pytest.mark.parametrize("run", ["gpu", "triton"])
@pytest.mark.parametrize("recipe", DENSE)
def test_large(run, recipe):
    check(make_case(1026, 1040, 784, dtype="bfloat16"), recipe, run)
    if recipe in GROUPED:
        check(make_case(1500, 528, 400, sizes=[500, 0, 1, 701, 128, 60], before=60, dtype="bfloat16"), recipe, run)


@pytest.mark.parametrize("run", FEW)
def test_delayed_measures_as_it_goes(run):
    case = make_case(9, 20, 11, dtype="bfloat16")
    amax = tuple(jnp.float32(value) for value in delayed_amax(case))
    w8 = quantized_w(case.w, "delayed", "both")

    @functools.partial(jax.jit, static_argnames="rows")
    def measured(x, w, rhs_quantized, rows=None):
        return jaxops.fp8_matmul(
            x[:rows], w, recipe="delayed", amax=amax, rhs_quantized=rhs_quantized, **options_of(run)
        )[1]

    want = [float(np.max(np.abs(np.asarray(v)))) for v in (case.x, case.w)]
    assert list(map(float, measured(case.x, case.w, None))) == want
    assert list(map(float, measured(case.x, case.w, None, rows=0))) == [0, want[1]]
    # A weight that is not read is not measured: its amax comes back.
    assert list(map(float, measured(case.x, w8, None))) == [want[0], float(amax[1])]
    assert list(map(float, measured(case.x, case.w, w8))) == [want[0], float(amax[1])]


@pytest.mark.parametrize("run", FEW)
def test_the_cache_is_what_is_multiplied(run):
    """Of other weights it gives their product, and the gradient of those that were passed."""
    case = make_case(21, 130, 37)
    other = make_case(21, 130, 37, seed=1)

    @jax.jit
    def f(x, w, dy, w8):
        y, vjp = jax.vjp(lambda x, w: apply(case, x, w, "blockwise", run, rhs_quantized=w8), x, w)
        return y, *vjp(dy)

    y, dx, dw = f(case.x, case.w, case.dy, quantized_w(other.w, "blockwise", "both"))
    want = reference(dataclasses.replace(case, w=other.w), "blockwise")
    for name, g, w in zip(("y", "dx", "dw"), (y, dx, dw), want, strict=True):
        assert_close(g, w, **kind_of(run, "float32"), name=name)


@pytest.mark.parametrize("run", FEW)
@pytest.mark.parametrize(
    ("recipe", "layouts", "sizes"),
    [
        ("blockwise", "col", None),
        ("tensorwise", "row", None),
        ("rowwise", "both", None),
        ("blockwise", "row", (9, 0, 12)),
    ],
    ids=lambda x: "groups" if isinstance(x, tuple) else str(x),
)
def test_quantized_w(run, recipe, layouts, sizes):
    """y and dx of a weight that came quantised: where its scales are those of its transpose, one layout is enough."""
    case = make_case(21, 130, 37, sizes=sizes)
    found = y_and_dx(case, quantized_w(case.w, recipe, layouts), recipe, run)
    for name, got, want in zip(("y", "dx"), found, reference(case, recipe), strict=False):
        assert_close(got, want, **kind_of(run, "float32"), name=name)


@pytest.mark.parametrize("run", FEW)
def test_quantized_x(run):
    """Quantised by the caller: the same bits, of y and of w's gradient; none for x."""
    case = make_case(21, 130, 37, sizes=(9, 0, 12))

    @jax.jit
    def f(x, w, dy):
        def results(x):
            y, vjp = jax.vjp(lambda w: apply(case, x, w, "blockwise", run, out_dtype="float32"), w)
            return y, *vjp(dy)

        return results(x), results(jaxops.quantize(x, layouts="both", group_offsets=case.offsets))

    for a, b in zip(*f(case.x, case.w, case.dy), strict=True):
        np.testing.assert_array_equal(a, b)


def fp8_casts(function, *args) -> int:
    """How many arrays of a traced function come from a cast to FP8."""
    made = equations(jax.make_jaxpr(function)(*args).jaxpr)
    casts = [equation for equation in made if equation.primitive.name == "convert_element_type"]
    return sum(equation.outvars[0].aval.dtype.itemsize == 1 for equation in casts)


@pytest.mark.parametrize(
    ("argnums", "recipe", "count"),
    [
        (None, "blockwise", 2),
        (0, "blockwise", 4),
        (1, "blockwise", 4),
        ((0, 1), "blockwise", 6),
        ((0, 1), "blockwise_with_gw_hp", 4),
    ],
)
def test_what_no_gradient_needs_is_not_cast(argnums, recipe, count):
    """Forward: lhs row, rhs column. dlhs: rhs row, dout row. drhs: lhs column, dout column; none in half precision."""
    loss = lambda x, w: jnp.sum(jaxops.fp8_matmul(x, w, recipe=recipe, backend="xla"))
    assert (
        fp8_casts(loss if argnums is None else jax.grad(loss, argnums), jnp.ones((21, 32)), jnp.ones((32, 48))) == count
    )


def test_residuals():
    """The residuals are x's column layout and w's row layout: one byte per number, and the scales."""
    s = jax.ShapeDtypeStruct
    residuals = lambda x, w: jax.vjp(lambda x, w: jaxops.fp8_matmul(x, w, backend="xla"), x, w)[1]
    saved = jax.tree.leaves(jax.eval_shape(residuals, s((256, 384), "bfloat16"), s((384, 512), "float32")))
    assert sorted((str(x.dtype), x.shape) for x in saved) == [
        ("float32", (2, 384)), ("float32", (3, 4)), ("float8_e4m3fn", (384, 256)), ("float8_e4m3fn", (384, 512))
    ]  # fmt: skip


def test_second_order_is_an_error():
    loss = lambda x: jnp.sum(jaxops.fp8_matmul(x, jnp.ones((32, 48)), backend="xla") ** 2)
    with pytest.raises(NotImplementedError, match="no gradient"):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x))), jnp.ones((21, 32)))
