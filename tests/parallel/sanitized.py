"""The collective kernels for `tests/sanitize.py`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tests.parallel.cases import AXIS, DEVICES, PRODUCTS, SIZES, make, mesh_of, over, results, whole
from tests.parallel.exchanges import OWN, K, layer


def collective_products() -> None:
    """Forward and gradients, with bounds on the rows that are valid, none, all or out of range. Needs two GPUs."""
    if DEVICES < 2:
        print("collective_products: left out, it needs two GPUs", flush=True)
        return
    for name in PRODUCTS:
        f = over(mesh_of(DEVICES), name, bias=True, rows=True, backend="mosaic")
        for m, k, n in SIZES[:4]:
            x, w, bias, dy = make(*whole(name, m, k, n), "bfloat16")
            for rows in (DEVICES * m, m + 1, 1, 0, -(2**31), 2**31 - 1):
                jax.block_until_ready(results(f, (x, w, bias), (jnp.int32(rows),), dy))
            print(name, m, k, n, "done", flush=True)


def tokens_to_experts() -> None:
    """The kernel that sends runs: chunks of several rows and of one, from all tokens to none for a device, and for
    choices that are no expert's number. Needs two GPUs."""
    if DEVICES < 2:
        print("tokens_to_experts: left out, it needs two GPUs", flush=True)
        return
    rng = np.random.default_rng(0)
    for T, D in ((300, 200), (40, 4100), (3, 5)):
        for low, high in ((-1, OWN * DEVICES), (0, 1), (-(2**31), 2**31 - 1)):
            experts = jnp.asarray(rng.integers(low, high, size=(DEVICES * T, K)), jnp.int32)
            x, weights = (jnp.asarray(rng.normal(size=(DEVICES * T, n)), jnp.float32) for n in (D, K))
            f = lambda *given: layer(given, AXIS, None, DEVICES, "mosaic")[0]
            split = jax.shard_map(f, mesh=mesh_of(DEVICES), in_specs=P(AXIS), out_specs=P(AXIS))
            loss = lambda *given, split=split: split(*given).sum()
            jax.block_until_ready(jax.jit(jax.grad(loss, (0, 2)))(x, experts, weights))
        print(T, D, "done", flush=True)
