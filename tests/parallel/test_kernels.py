"""The kernels on two GPUs or more, beside float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxops
from tests.compare import assert_close
from tests.devices import needs_two
from tests.parallel.cases import AXIS, DEVICES, PRODUCTS, SIZES, make, mesh_of, over, results, wanted, whole
from tests.parallel.test_values import check

pytestmark = [pytest.mark.versions, pytest.mark.gpu, needs_two]


@pytest.mark.parametrize(
    ("sizes", "dtype"), [*((sizes, "bfloat16") for sizes in SIZES), (SIZES[1], "float16")], ids=str
)
@pytest.mark.parametrize("name", PRODUCTS)
def test_values_and_gradients(name, sizes, dtype):
    x, w, bias, dy = make(*whole(name, *sizes), dtype)
    f = over(mesh_of(DEVICES), name, bias=True, backend="mosaic")
    got, again = (results(f, (x, w, bias), (), dy) for _ in range(2))
    check(got, wanted(x, w, bias, dy), dtype, scale=4)
    jax.tree.map(np.testing.assert_array_equal, got, again)


def first_rows(found: tuple, rows: int) -> tuple:
    """Without the zeros past `rows`: a limit is a share of the RMS."""
    return *(a[: max(rows, 0)] for a in found[:2]), *found[2:]


@pytest.mark.parametrize("rows", [False, True])
def test_kept_rows(rows):
    """With save="gathered" the kernel of the gradient of the rows gathers none; the same bits as with it."""
    x, w, bias, dy = make(*whole("all_gather_matmul", 200, 256, 320), "bfloat16")
    more = (jnp.int32(DEVICES * 200 - 77),) if rows else ()
    kept, again = (
        results(
            over(mesh_of(DEVICES), "all_gather_matmul", bias=True, rows=rows, backend="mosaic", save=save),
            (x, w, bias),
            more,
            dy,
        )
        for save in ("gathered", "own")
    )
    jax.tree.map(np.testing.assert_array_equal, kept, again)


@pytest.mark.parametrize("name", PRODUCTS)
def test_rows(name):
    """Those past `rows` may be NaN."""
    m = 200
    x, w, bias, dy = make(*whole(name, m, 256, 320), "bfloat16")
    f = over(mesh_of(DEVICES), name, bias=True, rows=True, backend="mosaic")
    for rows in (DEVICES * m, DEVICES * m - 1, m + 129, m, 128, 1, 0, -2, DEVICES * m + 5):
        past = (np.arange(DEVICES * m) >= rows)[:, None]
        got = results(f, (jnp.where(past, jnp.nan, x), w, bias), (jnp.int32(rows),), jnp.where(past, jnp.nan, dy))
        for a in got[:2]:
            np.testing.assert_array_equal(np.asarray(a, np.float32)[past[:, 0]], 0)
        check(first_rows(got, rows), first_rows(wanted(x, w, bias, dy, rows), rows), "bfloat16", scale=4)


def test_a_model_under_scan_remat_vmap_and_nccl():
    """Its loss and gradients beside XLA's, with NCCL's sums of replicated gradients between the kernels."""
    layers, width, hidden, rows = 3, 256, DEVICES * 320, DEVICES * 264
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.bfloat16)
    weights = draw(layers, width, hidden), draw(layers, width, hidden), draw(layers, hidden, width)
    scale, x = jnp.ones((layers, width), jnp.bfloat16), draw(2, rows, width)

    def loss(call, params, x):
        def layer(x, p):
            weights, scale = p
            return x + jax.vmap(lambda x: call(x * scale[None], *weights))(x), None

        y, _ = lax.scan(jax.checkpoint(layer), x, params)
        return lax.psum(jnp.sum(jnp.sin(y.astype(jnp.float32))), AXIS)

    split = (P(None, None, AXIS), P(None, None, AXIS), P(None, AXIS))
    specs = ((split, P()), P(None, AXIS))
    found = {}
    for backend in ("mosaic", "xla"):

        def call(x, up, gate, down, backend=backend):
            h, g = jaxops.all_gather_matmul(x, (up, gate), AXIS, backend=backend)
            return jaxops.matmul_reduce_scatter(jax.nn.gelu(h) * g, down, AXIS, backend=backend)

        f = jax.shard_map(functools.partial(loss, call), mesh=mesh_of(DEVICES), in_specs=specs, out_specs=P())
        step = jax.jit(jax.value_and_grad(f, argnums=(0, 1)))
        found[backend] = step((weights, scale), x)
        for got, again in zip(jax.tree.leaves(found[backend]), jax.tree.leaves(step((weights, scale), x)), strict=True):
            np.testing.assert_array_equal(got, again)
    for got, want in zip(jax.tree.leaves(found["mosaic"]), jax.tree.leaves(found["xla"]), strict=True):
        assert_close(got, np.asarray(want, np.float64), "bfloat16", scale=4)


@pytest.mark.parametrize("name", PRODUCTS)
def test_auto_takes_the_kernels(name):
    """Under vmap, where enough tiles send the rows: the bits of an explicit backend."""
    x, w, bias, dy = make(*whole(name, 4232, 512, 512), "bfloat16")
    operands, cotangents = (jnp.stack([x, -x]), w, bias), jnp.stack([dy, 2 * dy])
    auto, explicit = (
        jax.vmap(over(mesh_of(DEVICES), name, bias=True, backend=backend), (0, None, None))
        for backend in ("auto", "mosaic")
    )
    text = results.lower(auto, operands, (), cotangents).as_text()
    assert "mosaic_gpu" in text
    assert not [op for op in ("stablehlo.all_gather", "stablehlo.reduce_scatter") if op in text]
    got, want = (results(f, operands, (), cotangents) for f in (auto, explicit))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("name", PRODUCTS)
def test_delays(name):
    """A thousand calls, each with another delay on each device, give the same bits."""
    x, w, _, _ = make(*whole(name, 300, 512, 576), "bfloat16")
    op, (of_x, of_w, _, of_y) = PRODUCTS[name]

    def call(x, w, waits):
        wait = waits[lax.axis_index(AXIS)]
        slow = lax.fori_loop(0, wait, lambda _, a: jnp.sin(a) + 1, jnp.ones((64, 64)))
        x, _ = lax.optimization_barrier((x, slow))
        return op(x, w, AXIS, backend="mosaic")

    specs = (of_x, of_w, P())
    f = jax.jit(jax.shard_map(call, mesh=mesh_of(DEVICES), in_specs=specs, out_specs=of_y, check_vma=False))
    rng, first = np.random.default_rng(0), f(x, w, jnp.zeros(DEVICES, jnp.int32))
    same = jnp.bool_(True)
    equal = jax.jit(lambda a, b: jnp.all(a == b))
    for _ in range(1000):
        same &= equal(first, f(x, w, jnp.asarray(rng.integers(0, 50, DEVICES), jnp.int32)))
    assert bool(same)
