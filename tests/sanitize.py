"""Every kernel once, small, for compute-sanitizer: `compute-sanitizer --tool memcheck python tests/sanitize.py` (or racecheck). Needs an NVIDIA GPU.

Each array is an allocation of its own here, so that memcheck sees the first byte out of bounds; the offsets are good, then broken in every way.
"""

import os

os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}  # before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from jaxops.ops.grouped_matmul import Plan, Tiles

M, K, N = 300, 200, 136  # no multiple of any tile below
OFFSETS = [[0, 70, 70, 300], [11, 40, 168, 290], [-9, 50, 90, 400], [250, 100, 299, 300], [2**31 - 1, -(2**31), 7, 300]]
TILES = [Tiles(64, 64, 32), Tiles(128, 128, 64, stages=2, peel=True), Tiles(16, 128, 32, peel=True), Tiles(128, 256, 64, warps=8)]


def main() -> None:
    rng = np.random.default_rng(0)
    lhs, rhs, bias, dout, acc = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((M, K), (3, K, N), (3, N), (M, N), (3, K, N)))
    for tiles in TILES:
        plan = Plan("pallas", tiles, tiles, tiles)

        @jax.jit
        def run(offsets, plan=plan):
            out, vjp = jax.vjp(lambda lhs, rhs, bias: jaxops.grouped_matmul(lhs, rhs, offsets, bias=bias, plan=plan), lhs, rhs, bias)
            return out, vjp(dout), jaxops.grouped_wgrad(lhs, dout, offsets, accumulate_into=acc, plan=plan)

        for offsets in OFFSETS:
            jax.block_until_ready(run(jnp.array(offsets, jnp.int32)))
        print(tiles, "done", flush=True)


if __name__ == "__main__":
    main()
