"""`streamed` accepts elementwise updates, and no others: pieces give the same as the whole."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jaxops.offload import streamed
from tests.arrays import put

ROWS = 6
PARAMS = {
    "a": np.sin(np.arange(48.0).reshape(ROWS, 8)),
    "b": np.cos(np.arange(60.0).reshape(ROWS, 2, 5)),
    "c": np.linspace(-1.0, 1.0, ROWS),
    "t": np.float64(2),
}
GRADS = {name: put(np.cos(3 * p), "float32") for name, p in PARAMS.items()}
PARAMS = {name: put(p, "float32") for name, p in PARAMS.items()}


def of_each(f: Callable) -> optax.GradientTransformation:
    """A stateless transformation of each stacked gradient."""
    return optax.stateless(lambda grads, params: jax.tree.map(lambda g: f(g) if g.ndim else g, grads))


def of_tree(f: Callable) -> optax.GradientTransformation:
    return optax.stateless(lambda grads, params: f(grads))


def wide(mask: Callable) -> Callable:
    return lambda params: jax.tree.map(mask, params)


TAKEN = {
    "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 9), mask=wide(lambda p: p.ndim > 1)),
    "adan": optax.adan(0.1),
    "schedule-free": optax.contrib.schedule_free_adamw(0.1),
    "custom-jvp": of_each(jax.nn.relu),
    "remat-jit": of_each(jax.jit(jax.checkpoint(jnp.sin))),
    "while": of_each(lambda g: lax.fori_loop(0, 3, lambda i, g: jnp.sin(g), g)),
    "scan": of_each(lambda g: lax.scan(lambda g, c: (g * c, None), g, jnp.arange(1.0, 4.0))[0]),
    "numbers": of_each(lambda g: jnp.where(g > 0, g, jnp.clip(g, -0.5, 0.5) * jnp.sum(jnp.arange(3.0)))),
    "columns": of_each(lambda g: g * jnp.broadcast_to(jnp.arange(g.shape[-1]), g.shape) if g.ndim > 1 else g),
}

TAKES = "tx.update is not elementwise: it takes a "
OF_A = r"rows of params\['a'\]"
OTHER = "mixes parameters, or uses the length of a first axis"
PIECES = "one thing for whole arrays and another for pieces"
REFUSED = {
    "cumsum": (of_each(lambda g: jnp.cumsum(g, 0)), f"{TAKES}cumsum of {OF_A}"),
    "norm": (of_each(lambda g: g / jnp.linalg.norm(g)), f"{TAKES}reduce_sum of {OF_A}"),
    "row-norms": (optax.centralize(), f"{TAKES}reduce_sum of {OF_A}"),
    "rolled": (of_each(lambda g: jnp.roll(g, 1, 0)), f"{TAKES}(slice|concatenate)"),
    "gather": (of_each(lambda g: g * g[:1]), f"{TAKES}gather of {OF_A}"),
    "gather-one": (of_each(lambda g: g * g[0][None]), f"{TAKES}dim_as_value of the number of rows"),
    "scatter": (of_each(lambda g: g.at[0].set(0.0)), f"{TAKES}scatter of {OF_A}"),
    "reshape": (of_each(lambda g: jnp.sort(g.reshape(-1)).reshape(g.shape)), f"{TAKES}reshape of {OF_A}"),
    "product": (of_each(lambda g: g * jnp.sum(jnp.tensordot(g, g, (0, 0)))), f"{TAKES}dot_general of {OF_A}"),
    "in-cond": (of_each(lambda g: lax.cond(True, lambda g: jnp.cumsum(g, 0), jnp.sin, g)), f"{TAKES}cumsum of {OF_A}"),
    "in-loop": (of_each(lambda g: lax.fori_loop(0, 2, lambda i, g: g - jnp.mean(g), g)), TAKES),
    "over-rows": (
        of_each(lambda g: lax.scan(lambda s, row: (s + jnp.float32(1), row * s), 0.0, g)[1]), f"{TAKES}scan of {OF_A}",
    ),
    "repeated": (of_each(lambda g: jnp.broadcast_to(g[None], (1, *g.shape))[0]), f"{TAKES}broadcast_in_dim of {OF_A}"),
    "numbered": (
        of_each(lambda g: g * jnp.reshape(jnp.arange(g.shape[0]), (-1,) + (1,) * (g.ndim - 1))), "dim_as_value|iota",
    ),
    "random": (of_each(lambda g: g + jax.random.normal(jax.random.key(0), g.shape)), TAKES),
    "counted": (of_each(lambda g: g / g.shape[0]), f"{TAKES}dim_as_value"),
    "counted-on-the-host": (of_each(lambda g: g / math.sqrt(g.shape[0])), OTHER),
    "counted-by-ones": (of_each(lambda g: g * jnp.sum(jnp.ones_like(g))), f"{TAKES}reduce_sum of {OF_A}"),
    "longer-than": (of_each(lambda g: g if g.shape[0] > 3 else 2 * g), OTHER),
    "as-long-as": (optax.adamw(0.1, mask=wide(lambda p: p.shape[:1] == (ROWS,))), PIECES),
    "its-number": (of_each(lambda g: g * (2.0 if g.shape[0] == ROWS else 3.0)), PIECES),
    "constant": (of_each(lambda g: g * jnp.ones((ROWS,) + (1,) * (g.ndim - 1))), OTHER),
    "all-rows": (of_each(lambda g: jnp.zeros((ROWS, *g.shape[1:]))), r"makes updates\['a'\] float32\[6, 8\]; it"),
    "other-parameter": (of_tree(lambda grads: grads | {"c": grads["c"] * jnp.sum(grads["a"], 1)}), OTHER),
    "clip_by_global_norm": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
        f"{TAKES}reduce_sum of {OF_A}.*optax.clip_by_global_norm.*offload_state",
    ),
    "zero_nans": (optax.zero_nans(), f"{TAKES}reduce_or of {OF_A}"),
    "lamb": (optax.lamb(0.1), f"{TAKES}reduce_sum of {OF_A}"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_pieces_give_what_the_whole_gives(name):
    """Two steps, in pieces of two rows. The momentum after each transformation is on the host, and so streamed."""
    tx = optax.chain(TAKEN[name], optax.trace(0.5))
    state = tx.init(PARAMS)
    step = jax.jit(streamed(tx, pieces=3).apply)
    here = jax.tree.leaves(PARAMS)[0].sharding
    on_host = jax.tree.map(lambda x: jax.device_put(x, here.with_memory_kind("pinned_host") if x.ndim else here), state)
    got, wanted = (jax.device_put(PARAMS, here), on_host), (PARAMS, state)  # one program for both steps
    for _ in range(2):
        updates, after = jax.jit(tx.update)(GRADS, wanted[1], wanted[0])
        wanted, got = (optax.apply_updates(wanted[0], updates), after), step(*got, GRADS)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    tx, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        streamed(tx, pieces=3).apply(PARAMS, tx.init(PARAMS), GRADS)


def test_scalars_may_be_mixed():
    """Scalars are whole in every piece's update, such as a schedule's numbers."""
    params, grads = {"a": jnp.ones((ROWS, 2)), "t": jnp.float32(2)}, {"a": jnp.ones((ROWS, 2)), "t": jnp.float32(3)}
    tx = of_tree(lambda grads: grads | {"t": jnp.cumsum(jnp.stack([grads["t"], jnp.float32(1)]))[-1]})
    got, _ = streamed(tx, pieces=3).apply(params, tx.init(params), grads)
    assert got["t"] == 6


def test_the_shape_with_the_fault_is_named():
    """Each shape has its own symbol, also the eleventh. Arrays of one shape are cut alike, and may be mixed."""
    params = {f"p{i:02d}": jnp.zeros((4, 2 + i // 2)) for i in range(25)}
    mixed = optax.chain(optax.adam(0.1), of_tree(lambda grads: grads | {"p00": grads["p01"], "p01": grads["p00"]}))
    refused = of_tree(lambda grads: grads | {"p23": jnp.cumsum(grads["p23"], 0)})
    jax.eval_shape(streamed(mixed).apply, params, mixed.init(params), params)
    with pytest.raises(ValueError, match=r"cumsum of rows of params\['p22'\] or params\['p23'\],"):
        jax.eval_shape(streamed(refused).apply, params, refused.init(params), params)
