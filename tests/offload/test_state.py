"""A streamed step is optax's step, to the bit, wherever pieces begin and end; and the state stays on the host."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxops.offload import offload_state, streamed
from jaxops.offload.state import _fewest_bytes
from tests.compare import OPTIMISED
from tests.devices import needs_four

SHAPES = {
    "kernel": (6, 8, 4),
    "scale": (6, 8),
    "embedding": (7, 3),
    "temperature": (),
    "empty": (0, 3),
    "flat": (6, 0),
    "head": {"bias": (2,)},
}


def by_rank(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def by_path(params):
    return jax.tree.map_with_path(lambda path, _: "bias" not in jax.tree_util.keystr(path), params)


HALF = {"b1": 0.5, "b2": 0.5}
# Products with powers of two are exact: whether the compiler fuses a product and a sum changes no bit.
OPTIMIZERS = {
    "adamw": optax.adamw(optax.piecewise_constant_schedule(0.5, {1: 0.5}), **HALF, weight_decay=0.25, mask=by_rank),
    "adamw-by-path": optax.adamw(
        optax.piecewise_interpolate_schedule("linear", 0.5, {2: 0.5}), **HALF, weight_decay=0.25, mask=by_path
    ),
    "lion": optax.lion(0.25, **HALF, weight_decay=0.25),
    "momentum": optax.sgd(0.25, momentum=0.5, nesterov=True),
    "rmsprop": optax.rmsprop(0.25, decay=0.5),
    "no-state": optax.sgd(0.25),
    "amsgrad": optax.inject_hyperparams(optax.amsgrad)(0.25, **HALF),
    "two": optax.partition(
        {"a": optax.adam(0.25, **HALF), "b": optax.lion(0.25, **HALF)},
        lambda params: jax.tree.map(lambda p: "a" if p.ndim > 1 else "b", params),
    ),
    "accumulated": optax.MultiSteps(optax.adam(0.25, **HALF), 2),
}


def draw(seed: int, shapes: Any = SHAPES, dtype=jnp.float32) -> Any:
    """On the device for good, as the results of a step: one program for all steps."""
    shapes, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    rng, device = np.random.default_rng(seed), jax.devices()[0]
    arrays = [rng.normal(size=shape).astype(np.float32).astype(jnp.dtype(dtype)) for shape in shapes]
    return tree.unflatten([jax.device_put(x, device) for x in arrays])


def kinds(tree: Any) -> list[str]:
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


def assert_equal(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=jax.tree_util.keystr(path))


@functools.cache
def plain_step(tx):
    """optax's step, compiled once for all pieces."""

    @functools.partial(jax.jit, compiler_options=OPTIMISED)
    def plain(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return plain


def assert_same_steps(tx, params: Any, pieces: int | None, min_bytes: int = 0, steps: int = 3) -> None:
    """Equal to plain optax. The initial state is random, so that wrong fetches show in the first step."""
    plain = plain_step(tx)
    shapes = jax.tree.map(lambda p: p.shape, params)
    step = jax.jit(streamed(tx, pieces=pieces).apply, donate_argnums=(0, 1), compiler_options=OPTIMISED)
    state = jax.tree.map(
        lambda x: abs(draw(7, x.shape, x.dtype)) if x.ndim and x.dtype != bool else jax.device_put(x, jax.devices()[0]),
        tx.init(params),
    )
    wanted, got = (
        (params, state),
        (jax.tree.map(jnp.copy, params), offload_state(jax.tree.map(jnp.copy, state), min_bytes=min_bytes)),
    )
    places = kinds(got)
    for i in range(steps):
        grads = draw(i, shapes, jax.tree.leaves(params)[0].dtype)
        wanted, got = plain(grads, wanted[1], wanted[0]), step(*got, grads)
        assert kinds(got) == places
    assert_equal(got, wanted)


@pytest.mark.parametrize(
    ("name", "pieces"),
    [("adamw", 50), ("adamw", None), ("lion", 2), ("rmsprop", 1),
     *((name, 3) for name in OPTIMIZERS if name not in ("adamw", "lion", "rmsprop"))],
)  # fmt: skip
def test_pieces(name, pieces):
    """Remaining rows: kernel has 0, 2 or 6 of its 6, embedding 1, 3 or 7 of its 7, bias 0 or 2."""
    assert_same_steps(OPTIMIZERS[name], draw(9), pieces, steps=4)


@pytest.mark.parametrize(("dtype", "min_bytes"), [("float32", 100), ("float32", 1 << 20), ("bfloat16", 0)])
def test_some_on_the_device(dtype, min_bytes):
    assert_same_steps(OPTIMIZERS["adamw"], draw(9, dtype=dtype), 3, min_bytes)


def test_bfloat16_parameters_with_a_state_in_float32():
    tx, grads = OPTIMIZERS["adamw"], draw(1)
    params, state = draw(9, dtype=jnp.bfloat16), tx.init(draw(9))
    updates, wanted = jax.jit(tx.update)(grads, state, params)
    got = jax.jit(streamed(tx, pieces=3).apply)(params, offload_state(state, min_bytes=0), grads)
    assert_equal(got, (jax.jit(optax.apply_updates)(params, updates), wanted))


def test_trees():
    """Two equal arrays in a list are as many as a chain has states; a single array has the structure of a count."""
    assert_same_steps(optax.chain(optax.trace(0.5), optax.scale(-0.25)), draw(9, [(6, 4), (6, 4)]), 3)
    for params in ((6, 4), {"a": (6, 4), "none": None}):
        assert_same_steps(OPTIMIZERS["adamw"], draw(9, params), 3)
    state = optax.adamw(0.1).init({})
    assert streamed(optax.adamw(0.1)).apply({}, state, {}) == ({}, optax.adamw(0.1).update({}, state, {})[1])


def test_init():
    """Large arrays are on the host, with the values of tx.init."""
    tx = optax.GradientTransformation(
        lambda params: (jnp.int32(3), params, jax.tree.map(jnp.cos, params)),
        lambda grads, state, params=None: (grads, state),
    )
    params = {"large": draw(0, (512, 512)), "small": draw(1, (8,))}
    state = streamed(tx).init(params)
    assert_equal(state, tx.init(params))
    assert kinds(state) == ["device", *2 * ["pinned_host", "device"]]
    assert kinds(offload_state({"a": draw(0, (512, 511)), "b": 1.0}, min_bytes=512 * 511 * 4)["a"]) == ["pinned_host"]
    assert kinds(offload_state(jnp.int32(0), min_bytes=0)) == ["device"]


def test_donation():
    """Donated arrays are deleted, on the host too: the new state is written over the old one."""
    params = draw(0, {"kernel": (6, 8, 4)})
    state = offload_state(optax.adam(0.1).init(params), min_bytes=0)
    step = jax.jit(streamed(optax.adam(0.1), pieces=3).apply, donate_argnums=(0, 1))
    new = step(params, state, draw(1, {"kernel": (6, 8, 4)}))
    assert all(x.is_deleted() for x in jax.tree.leaves((state[0].mu, state[0].nu, params)))
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(new))


@needs_four
def test_shardings_stay():
    mesh = Mesh(np.array(jax.devices()), "x")
    split = NamedSharding(mesh, P(None, "x"))
    params = jax.device_put(draw(0, {"kernel": (6, 8, 4), "norm": (6, 8)}), split)
    tx = OPTIMIZERS["adamw"]
    optimizer = streamed(tx, pieces=3)
    state = offload_state(tx.init(params), min_bytes=0)
    for leaf in jax.tree.leaves((state[0].mu, state[0].nu)):
        assert leaf.sharding == split.with_memory_kind("pinned_host")
    grads = jax.device_put(draw(1, {"kernel": (6, 8, 4), "norm": (6, 8)}), split)
    got = jax.jit(optimizer.apply)(params, state, grads)
    for leaf in jax.tree.leaves((got[1][0].mu, got[1][0].nu)):
        assert leaf.sharding.is_equivalent_to(split.with_memory_kind("pinned_host"), leaf.ndim)
    updates, wanted = jax.jit(tx.update)(grads, tx.init(params), params)
    assert_equal(got, (optax.apply_updates(params, updates), wanted))
    made = optimizer.init(jax.device_put(draw(0, {"kernel": (6, 512, 512)}), split))[0]
    assert made.mu["kernel"].sharding == made.nu["kernel"].sharding == split.with_memory_kind("pinned_host")


@pytest.mark.parametrize(
    ("shapes", "pieces"),
    [([(32, 4, 4)], 32), ([(80, 4, 4)], 40), ([(4096, 4)], 64), ([(6, 4), (35, 1)], 6), ([(1, 4)], 1), ([], 1)],
    ids=str,
)
def test_default_pieces(shapes, pieces):
    """The number of layers up to 64, else a divisor; arrays that are not stacked are cut anyway."""
    assert _fewest_bytes([jnp.zeros(shape) for shape in shapes]) == pieces


class Doubling(optax.GradientTransformation):
    def __new__(cls, of_state: bool):
        twice = lambda x: jnp.concatenate([x, x])
        update = lambda grads, state, params=None: (
            (grads, jax.tree.map(twice, state)) if of_state else (jax.tree.map(twice, grads), state)
        )
        return super().__new__(cls, lambda params: jax.tree.map(jnp.zeros_like, params), update)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (Doubling(True), r"makes state\['w'\] float32\[12, 8\]; it must be float32\[6, 8\]"),
        (Doubling(False), r"makes updates\['w'\] float32\[12, 8\]"),
        (optax.add_noise(0.1, 0.1, 0), r"rng_key is key<fry>\[\], neither a number"),
        (optax.adafactor(0.1, min_dim_size_to_factor=4), "neither a number nor of the shape of a parameter"),
    ],
    ids=["state", "updates", "noise", "adafactor"],
)
def test_what_cannot_be_streamed(tx, message):
    params = draw(0, {"w": (6, 8)})
    with pytest.raises(ValueError, match=message):
        streamed(tx, pieces=3).apply(params, tx.init(params), params)


def test_errors():
    params, others = draw(0, {"w": (6, 4)}), draw(0, {"w": (6, 4), "v": (6, 4)})
    adam = optax.adam(0.1)
    with pytest.raises(ValueError, match="pieces is 0; it must be at least 1"):
        streamed(adam, pieces=0)
    with pytest.raises(TypeError, match="pieces is a float; it must be a Python integer"):
        streamed(adam, pieces=2.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"tx is a function; pass an optax.GradientTransformation"):
        streamed(adam.update)
    with pytest.raises(ValueError, match="min_bytes is -1; it must be at least 0"):
        offload_state(params, min_bytes=-1)
    with pytest.raises(ValueError, match=r"state has the structure .*'v'.*, but tx.init\(params\)"):
        streamed(adam).apply(params, adam.init(others), params)
    with pytest.raises(ValueError, match=r"\.mu\['w'\] is float32\[5, 4\]"):
        streamed(adam).apply(params, adam.init(draw(0, {"w": (5, 4)})), params)
    with pytest.raises(ValueError, match=r"grads have the structure"):
        streamed(adam).apply(params, adam.init(params), others)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    with pytest.raises(ValueError, match=r"makes state\[0\]\.mu\['w'\] float32\[6, 4\]; it must be bfloat16\[6, 4\]"):
        streamed(adam).apply(half, adam.init(half), params)
