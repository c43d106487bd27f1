"""Both products and their gradients over 1, 2 and 4 host devices, beside the product of whole arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.nn import ColumnParallelLinear
from tests.compare import assert_close
from tests.parallel.cases import AXIS, PRODUCTS, make, mesh_of, over, results, wanted

NAMES = ("y", "dx", "dw", "dbias")


def check(got: tuple, want: tuple, dtype: str, scale: float = 3) -> None:
    for name, g, w in zip(NAMES, got, want, strict=False):
        assert_close(g, w, dtype, scale=scale, name=name)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(
    ("dtype", "devices"), [("float32", 1), ("float32", 2), ("float32", 4), ("bfloat16", 4), ("float16", 2)]
)
def test_values_and_gradients(name, dtype, devices):
    x, w, bias, dy = make(12, 20, 8, dtype)
    got = results(over(mesh_of(devices), name, bias=True), (x, w, bias), (), dy)
    assert {a.dtype for a in got} == {jnp.dtype(dtype)}
    check(got, wanted(x, w, bias, dy), dtype)


@pytest.mark.parametrize("name", PRODUCTS)
def test_rows(name):
    """Those past `rows` are not read and come out zero, and so do their gradients; new values compile nothing."""
    x, w, bias, dy = make(12, 8, 8)
    f = over(mesh_of(4), name, bias=True, rows=True)
    compiled = results._cache_size()
    for rows in (12, 7, 3, 1, 0, -2, 99):
        past = (np.arange(12) >= rows)[:, None]
        got = results(f, (jnp.where(past, jnp.nan, x), w, bias), (jnp.int32(rows),), jnp.where(past, jnp.nan, dy))
        check(got, wanted(x, w, bias, dy, rows), "float32")
        for a in got[:2]:
            np.testing.assert_array_equal(np.asarray(a)[past[:, 0]], 0)
    assert results._cache_size() == compiled + 1


@pytest.mark.parametrize("save", ["own", "gathered"])
@pytest.mark.parametrize("rows", [None, 5])
def test_several_weights(rows, save):
    """x is gathered once, and its gradient is the sum's. NaN past `rows` is in nothing that is kept."""
    x, w, bias, dy = make(8, 12, 8)
    w2, dy2 = make(8, 12, 16, seed=1)[1::2]

    def product(x, w, w2, bias):
        return jaxops.all_gather_matmul(x, (w, w2), AXIS, bias=(bias, None), rows=rows, save=save)

    f = jax.shard_map(
        product, mesh=mesh_of(4), in_specs=(P(AXIS), P(None, AXIS), P(None, AXIS), P(AXIS)), out_specs=P(None, AXIS)
    )
    (y, y2), vjp = jax.vjp(jax.jit(f), x if rows is None else x.at[rows:].set(jnp.nan), w, w2, bias)
    first, second = wanted(x, w, bias, dy, rows), wanted(x, w2, np.zeros(16), dy2, rows)
    dx, dw, dw2, dbias = vjp((dy, dy2))
    check((y, dx, dw, dbias), (first[0], first[1] + second[1], *first[2:]), "float32")
    check((y2, dw2), (second[0], second[2]), "float32")
    text = jax.jit(f).lower(x, w, w2, bias).compile().as_text()
    assert text.count(" all-gather(") == 1


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("order", [1, -1])
def test_another_axis_beside(check_vma, order):
    """Data parallelism on another axis, with replicated weights: without check_vma their gradients are not summed."""
    mesh = mesh_of(2, 2, names=("data", AXIS), order=order)
    x, w, bias, dy = make(12, 8, 8)

    def block(x, w, bias):
        return jaxops.all_gather_matmul(x, w, AXIS, bias=bias)

    def step(x, w, bias, dy):
        y, vjp = jax.vjp(block, x, w, bias)
        dx, dw, dbias = vjp(dy)
        return (y, dx, dw, dbias) if check_vma else (y, dx, *(jax.lax.psum(a, "data") for a in (dw, dbias)))

    rows, columns = P(("data", AXIS)), P(None, AXIS)
    specs = (rows, columns, P(AXIS), P("data", AXIS))
    f = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=(specs[3], rows, columns, P(AXIS)), check_vma=check_vma
    )
    check(jax.jit(f)(x, w, bias, dy), wanted(x, w, bias, dy), "float32")


@pytest.mark.parametrize("name", PRODUCTS)
def test_float32_weights_under_bfloat16(name):
    """Their gradients are float32 and were never rounded."""
    x, w, bias, dy = make(12, 8, 8, "bfloat16")
    wide = w.astype(jnp.float32)
    y, dx, dw, dbias = results(over(mesh_of(2), name, bias=True, compute_dtype=jnp.bfloat16), (x, wide, bias), (), dy)
    assert [a.dtype for a in (y, dx, dw, dbias)] == [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.bfloat16]
    check((dw,), wanted(x, w, bias, dy)[2:], "float32")


@pytest.mark.parametrize(("name", "save"), [*((name, None) for name in PRODUCTS), ("all_gather_matmul", "gathered")])
def test_only_local_rows_are_kept(name, save):
    """The residuals of x and h are local; the backward of the first gathers again, after the cotangents exist. With
    save="gathered" all rows are kept, and gathered once."""
    x, w, _, dy = make(12, 8, 8)
    op, specs = PRODUCTS[name]
    kept = []

    def local(x, w, dy):
        y, vjp = jax.vjp(lambda x, w: op(x, w, AXIS, **({} if save is None else {"save": save})), x, w)
        kept.extend(a.shape for a in jax.tree.leaves(vjp))
        return y, *vjp(dy)

    f = jax.shard_map(local, mesh=mesh_of(4), in_specs=(*specs[:2], specs[3]), out_specs=(specs[3], *specs[:2]))
    text = jax.jit(f).lower(x, w, dy).as_text()
    again = name == "all_gather_matmul" and save is None
    residuals = [(3, 8), (8, 2)] if again else [(2, 8), (12, 2)] if save is None else [(8, 2), (12, 8)]
    assert sorted(kept) == residuals
    counts = text.count('"stablehlo.all_gather"'), text.count('"stablehlo.reduce_scatter"')
    assert counts == (1 + again, 1)
    assert text.count("optimization_barrier") == again


def test_a_layer_that_keeps_all_rows():
    """Its backward gathers none."""
    from flax import nnx

    for save, count in (("own", 2), ("gathered", 1)):
        layer = ColumnParallelLinear(8, 8, AXIS, use_bias=False, rngs=nnx.Rngs(0))
        layer.save = save
        graphdef, params = nnx.split(layer)
        split = nnx.map_state(lambda *_: P(None, AXIS), params)
        f = jax.shard_map(
            lambda params, x, graphdef=graphdef: nnx.merge(graphdef, params)(x),
            mesh=mesh_of(2), in_specs=(split, P(AXIS)), out_specs=P(None, AXIS),
        )  # fmt: skip
        loss = lambda params, x, f=f: jnp.sum(f(params, x) ** 2)
        text = jax.jit(jax.grad(loss)).lower(params, jnp.ones((6, 8))).as_text()
        assert text.count('"stablehlo.all_gather"') == count


def test_a_megatron_block():
    """Column-parallel, gelu, row-parallel under jit, donation, scan, remat and vmap: one device's values, the same bits
    twice.
    """
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 8, 12)), jnp.float32)
    up, down = (jnp.asarray(rng.normal(size=(2, *shape)) * 0.3, jnp.float32) for shape in ((12, 16), (16, 12)))

    def loss(block, weights, x):
        def layer(x, w):
            return x + jax.vmap(block, in_axes=(0, None, None))(x, *w), None

        return jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(layer), x, weights)[0]))

    def parallel(x, up, down):
        h = jax.nn.gelu(jaxops.all_gather_matmul(x, up, AXIS))
        return jaxops.matmul_reduce_scatter(h, down, AXIS)

    def inside(weights, x):
        return jax.lax.psum(loss(parallel, weights, x), AXIS)

    specs = ((P(None, None, AXIS), P(None, AXIS)), P(None, AXIS))
    f = jax.shard_map(inside, mesh=mesh_of(4), in_specs=specs, out_specs=P())
    gradients = jax.jit(jax.value_and_grad(f, argnums=(0, 1)), donate_argnums=0)
    first, again = (gradients(jax.tree.map(jnp.copy, (up, down)), x) for _ in range(2))
    alone = jax.value_and_grad(
        lambda weights, x: loss(lambda x, up, down: jax.nn.gelu(x @ up) @ down, weights, x), argnums=(0, 1)
    )
    for got, twice, want in zip(*map(jax.tree.leaves, (first, again, jax.jit(alone)((up, down), x))), strict=True):
        assert_close(got, want, "float32", scale=5)
        np.testing.assert_array_equal(got, twice)
