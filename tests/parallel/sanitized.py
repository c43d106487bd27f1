"""The collective kernels for `tests/sanitize.py`."""

import jax
import jax.numpy as jnp

from tests.parallel.cases import DEVICES, PRODUCTS, SIZES, make, mesh_of, over, results, whole


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
