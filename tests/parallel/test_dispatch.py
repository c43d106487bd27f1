"""Tokens to the devices of their experts and back, against token by token: the same bits, for who sends to whom."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.parallel import collect, dispatch, ragged_exchange
from jaxops.parallel.plan import WAYS
from tests.devices import needs_four, needs_two
from tests.parallel import exchanges
from tests.parallel.cases import mesh_of
from tests.parallel.exchanges import OWN, D, K, T, compiled, operands, patterns, use_kernel, wanted
from tests.parallel.test_plan import H200, NEWER

pytestmark = pytest.mark.versions


@pytest.fixture(params=["padded", "mosaic"])
def way(request, monkeypatch):
    if request.param == "mosaic" and jax.default_backend() != "gpu":
        use_kernel(monkeypatch)
    return request.param


def all_sends(devices: int) -> np.ndarray:
    """Every pattern of who sends to whom; over four devices, those in which devices 0 and 2, and 1 and 3, do alike."""
    rows = min(devices, 3) if devices < 4 else 2
    numbers = np.arange(2 ** (rows * devices))
    sends = (numbers[:, None] >> np.arange(rows * devices) & 1).astype(bool).reshape(-1, rows, devices)
    return sends if devices < 4 else np.concatenate([sends, sends], axis=1)


def check(given: tuple, got: tuple, devices: int, rows: int | None = None) -> None:
    for number, of_one in enumerate(zip(*given, strict=True)):
        for want, found in zip(wanted(of_one, devices, rows), got, strict=True):
            np.testing.assert_array_equal(np.asarray(found[number]), want, str(number))


@pytest.mark.parametrize("devices", [2, 3, 4])
@needs_four
def test_every_pattern_of_empty_sends(devices, way):
    given = operands(patterns(all_sends(devices)))
    check(given, compiled((devices,), "i", None, way)(*given), devices)


@pytest.mark.parametrize("rows", [1, 2, 5])
@needs_four
def test_rows_beyond_the_bound_are_dropped_in_order(rows, way):
    """Of the last devices, and of those the last tokens."""
    given = operands(patterns(all_sends(3)[::7]))
    got = compiled((3,), "i", rows, way)(*given)
    assert np.asarray(got[2]).any(), "nothing is dropped"
    check(given, got, 3, rows)


@pytest.mark.parametrize("axis", [("i", "j"), ("j", "i")])
@needs_four
def test_two_axes(axis, way):
    """In the order of the axes that are passed; and with check_vma=False."""
    given = operands(patterns(all_sends(4)[3::19]))
    check(given, compiled((2, 2), axis, None, way, check_vma=False)(*given), 4)


@needs_four
def test_more_devices_than_choices_and_repeated_experts(way):
    """With four devices and two choices a token's devices are compared pairwise."""
    rng = np.random.default_rng(3)
    given = operands(rng.integers(-1, 4 * OWN, size=(20, 4 * T, K)).astype(np.int32))
    check(given, compiled((4,), "i", None, way)(*given), 4)


def over(f, count: int = 2, check_vma: bool = True):
    return jax.jit(
        jax.shard_map(f, mesh=mesh_of(count, names=("i",)), in_specs=P("i"), out_specs=P("i"), check_vma=check_vma)
    )


@needs_four
def test_sums_are_rounded_once():
    """bfloat16 rows of 256, 1, 1 and 1 are 259 in float32, rounded to 260."""

    def f(x):
        experts = jnp.arange(4, dtype=jnp.int32)[None, :]
        received = dispatch(x, jaxops.route_choices(experts, jnp.ones((1, 4)), 4), "i")
        value = jnp.where(lax.axis_index("i") == 0, 256, 1).astype(x.dtype)
        out, vjp = jax.vjp(lambda y: collect(y, received), jnp.full(received.x.shape, value))
        dx = jax.vjp(lambda x: dispatch(x, jaxops.route_choices(experts, jnp.ones((1, 4)), 4), "i").x, x)[1]
        return out, dx(jnp.full(received.x.shape, value))[0], vjp(out)[0][:1]

    for found in over(f, 4)(jnp.ones((4, 2), jnp.bfloat16)):
        np.testing.assert_array_equal(np.asarray(found, np.float32), 260)


@needs_four
def test_transformations():
    """Under checkpoint and scan, and twice differentiable."""
    given = operands(patterns(all_sends(2)[11:12]), seed=2)
    x, experts, weights, dout = (array[0] for array in given)

    def step(x, experts, weights):
        return exchanges.layer((x, experts, weights), "i", None, 2)[0]

    def scanned(x, experts, weights):
        body = jax.checkpoint(lambda x, _: (step(x, experts, weights), None))
        return jax.lax.scan(body, x, None, length=2)[0]

    def f(x, experts, weights, dout):
        gradient = lambda g, x: jax.vjp(g, x, experts, weights)[1](dout)[0]
        of_scan = gradient(scanned, x)
        twice = gradient(lambda x, e, w: step(step(x, e, w), e, w), x)
        second = jax.vjp(lambda w: gradient(lambda x, e, _: step(x, e, w), x), weights)[1](x)[0]
        return of_scan, twice, second

    of_scan, twice, second = over(f)(x, experts, weights, dout)
    factor = (weights * (experts + 1)).sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(twice, factor**2 * dout)
    np.testing.assert_array_equal(of_scan, twice)
    np.testing.assert_array_equal(second, (experts + 1) * (x * dout).sum(axis=1, keepdims=True))


@needs_four
def test_x64():
    given = operands(patterns(all_sends(2)[5:9]))
    with jax.enable_x64(True):
        check(given, compiled.__wrapped__((2,), "i", None, "padded")(*given), 2)


@pytest.mark.gpu
@needs_two
def test_the_kernel():
    """Each pattern of sends over two devices; then a thousand calls, each with another delay on each device, give the
    same bits."""
    given = operands(patterns(all_sends(2)))
    check(given, compiled((2,), "i", None, "mosaic")(*given), 2)
    x, experts, weights, _ = (array[7] for array in given)

    def delayed(waits, x, experts, weights):
        slow = lax.fori_loop(0, waits[lax.axis_index("i")], lambda _, a: jnp.sin(a) + 1, jnp.ones((64, 64)))
        x, _ = lax.optimization_barrier((x, slow))
        return exchanges.layer((x, experts, weights), "i", None, 2, "mosaic")[0]

    specs = P(), *[P("i")] * 3
    f = jax.jit(
        jax.shard_map(delayed, mesh=mesh_of(2, names=("i",)), in_specs=specs, out_specs=P("i"), check_vma=False)
    )
    rng, first = np.random.default_rng(0), f(jnp.zeros(2, jnp.int32), x, experts, weights)
    outs = [f(jnp.asarray(rng.integers(0, 300, 2), jnp.int32), x, experts, weights) for _ in range(1000)]
    assert all(jax.device_get([jnp.array_equal(out, first) for out in outs]))


@pytest.mark.gpu
@needs_two
@pytest.mark.parametrize(("tokens", "width"), [(20_000, 200), (1500, 4100), (300, 20_000)])
def test_the_kernel_with_many_rows(tokens, width):
    """Chunks of 20 rows, of one, and in fewer slots; runs of any length, most to one device: the bits of all_to_all."""
    rng = np.random.default_rng(0)
    experts = np.where(rng.random((2 * tokens, K)) < 0.8, rng.integers(0, OWN, (2 * tokens, K)), rng.integers(-1, 4))
    given = rng.normal(size=(2 * tokens, width)), experts, rng.random((2 * tokens, K))
    given = [jnp.asarray(array, dtype) for array, dtype in zip(given, ("float32", "int32", "float32"), strict=True)]
    got, want = (over(lambda *g, way=way: exchanges.layer(g, "i", None, 2, way))(*given) for way in WAYS)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@NEWER
@pytest.mark.parametrize(("sizes", "order"), [((4,), 1), ((2, 2), 1), ((4,), -1)])
@needs_four
def test_lowering(sizes, order):
    """Tokens and what is beside them go in one kernel, results in another, and so do the gradients; no kernel runs over
    devices out of order."""
    axes = ("i", "j")[: len(sizes)]
    f = lambda x, experts, weights: exchanges.layer((x, experts, weights), axes, None, 4)[0]
    split = jax.shard_map(f, mesh=mesh_of(*sizes, names=axes, order=order), in_specs=P(axes), out_specs=P(axes))
    x, experts, weights, dout = (array[0] for array in operands(patterns(all_sends(4)[:1])))

    @jax.jit
    def step(x, weights):
        out, vjp = jax.vjp(lambda x, weights: split(x, experts, weights), x, weights)
        return out, vjp(dout)

    with mock.patch.object(ragged_exchange, "current_device", return_value=H200):
        traced = step.trace(x, weights)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == (4 if order == 1 else 0)
    assert ("stablehlo.all_to_all" in text) == (order != 1)


@needs_four
def test_no_tokens():
    shapes = [np.zeros((0, *shape), dtype) for shape, dtype in (((D,), "f4"), ((K,), "i4"), ((K,), "f4"))]
    assert over(lambda *given: exchanges.layer(given, "i", None, 2)[0])(*shapes).shape == (0, D)


@needs_four
def test_errors():
    x, routing = jnp.ones((4, D)), jaxops.route(jnp.ones((4, 3)), 1)
    with pytest.raises(ValueError, match=r"axis_name='i' is not an axis here: call inside jax\.shard_map"):
        dispatch(x, routing, "i")
    cases: tuple[tuple[dict[str, Any], type, str], ...] = (
        ({}, ValueError, "routing has 3 experts, and axis_name='i' 2 devices"),
        ({"rows": 0}, ValueError, "rows=0 must be at least 1"),
        ({"backend": "xla"}, ValueError, "backend='xla': write 'auto', 'mosaic', 'padded'"),
        ({"backend": "mosaic"}, NotImplementedError, r"backend='mosaic': .* needs a Hopper GPU, .*'auto' or 'padded'"),
    )
    for how, error, found in cases:
        E = 3 if not how else 4
        call = lambda x, how=how, E=E: dispatch(x, jaxops.route(jnp.ones((x.shape[0], E)), 1), "i", **how).x
        if how.get("backend") != "mosaic" or jax.default_backend() == "cpu":
            with pytest.raises(error, match=found):
                over(call)(x)
    with pytest.raises(ValueError, match=r"x's number of rows is 2, but T of routing\.row_positions is 4"):
        over(lambda x: dispatch(x, routing, "i").x)(x)
    with pytest.raises(ValueError, match=r"pass the routing of all experts, not Routing\.own"):
        over(lambda x: dispatch(x, jaxops.route(x[:, :4], 1).own(2, "i"), "i").x)(x)
    for name in (3, (), ("i", None)):
        with pytest.raises(TypeError, match="must be the name of a mesh axis, or a tuple of names"):
            dispatch(x, routing, name)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"received is .*; pass the result of jaxops\.parallel\.dispatch"):
        collect(x, routing)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="y's number of rows is 1"):
        over(lambda x: collect(x[:1], dispatch(x, jaxops.route(x[:, :4], 1), "i")))(x)
