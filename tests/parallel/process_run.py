"""What a process of a job makes, for test_peer_memory.py."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops
from tests.parallel import exchanges
from tests.parallel.cases import AXIS, PRODUCTS, make, mesh_of, over


def everything(devices: int) -> dict[str, np.ndarray]:
    """Results and gradients over so many devices, as whole arrays: both products, and tokens to experts and back.
    Products that the kernel takes on a GPU; runs in chunks of several rows."""
    mesh, found = mesh_of(devices), {}
    put = lambda x, spec: jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda at: np.asarray(x)[at])
    for name, (_, (of_x, of_w, _, of_y)) in PRODUCTS.items():
        M, K, N = (devices * 625, 1000, devices * 568) if of_x == P(AXIS) else (devices * 625, devices * 1000, 568)
        x, w, _, dy = make(M, K, N, "bfloat16")
        given = put(x, of_x), put(w, of_w), put(dy, of_y)

        @jax.jit
        def run(x, w, dy, name=name):
            y, vjp = jax.vjp(over(mesh, name), x, w)
            return y, *vjp(dy)

        found |= {f"{name} {i}": y for i, y in enumerate(run(*given))}
    T, D, K = 700, 136, exchanges.K
    rng = np.random.default_rng(0)
    experts = rng.integers(-1, exchanges.OWN * devices, size=(devices * T, K)).astype(np.int32)
    arrays = *rng.normal(size=(2, devices * T, D)).astype(np.float32), rng.random((devices * T, K), np.float32)
    x, dy, weights = (put(array, P(AXIS)) for array in arrays)

    def tokens(x, weights, experts):
        return exchanges.layer((x, experts, weights), AXIS, None, devices)[0]

    @jax.jit
    def both(x, weights, experts, dy):
        f = jax.shard_map(tokens, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
        y, vjp = jax.vjp(lambda x, weights: f(x, weights, experts), x, weights)
        return y, *vjp(dy)

    found |= {f"tokens {i}": y for i, y in enumerate(both(x, weights, put(experts, P(AXIS)), dy))}
    whole = jax.jit(lambda arrays: arrays, out_shardings=NamedSharding(mesh, P()))(found)
    return {name: np.asarray(y.astype(jnp.float32)) for name, y in jax.device_get(whole).items()}


def save(file: str) -> None:
    """The first process writes all devices' results."""
    found = everything(jax.device_count())
    if jax.process_index() == 0:
        np.savez(Path(file), **found, missing=np.array(jaxops.parallel.peer_memory_missing()))
    multihost_utils.sync_global_devices("the other processes wait for the first one's file")
