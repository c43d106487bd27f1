"""What compute-sanitizer runs of the two attentions; see tests/sanitize.py."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from jaxops.ops import packed_attention as attending

M = 300
OFFSETS = [[0, 70, 70, 300], [11, 40, 168, 290], [-9, 50, 90, 400], [250, 100, 299, 300], [2**31 - 1, -(2**31), 7, 300]]


def packed_attention() -> None:
    """The kernels of both backends, with every mask, heads of widths that are powers of two or not; `visible_until`
    valid, then out of bounds."""
    rng = np.random.default_rng(0)
    for H, dtype in ((64, "bfloat16"), (72, "bfloat16"), (20, "float32")):
        q, k, v, dout = (jnp.asarray(rng.normal(size=(M, n, H)), dtype) for n in (6, 2, 2, 6))
        k, v = k[:217], v[:217]
        some = (None, attending.Tiles(64, 32, 4, 2), attending.Tiles(32, 64, 4, 1))
        plans = [attending.Plan("pallas", fwd=tiles, dq=tiles, dkv=tiles) for tiles in some]
        for plan in [*plans, *([attending.Plan("triton")] if dtype == "bfloat16" else [])]:

            @jax.jit
            def run(offsets, until, operands=(q, k, v), dout=dout, plan=plan):
                q, *kv = operands
                cross = {"kv_offsets": offsets // 2}
                found = []
                for own, how in (
                    (True, {}), (True, {"causal": True, "window": 40}), (True, {"visible_until": until}),
                    (False, cross), (False, cross | {"causal": True}),
                ):  # fmt: skip
                    rows = kv if not own else [jnp.pad(x, ((0, M - len(x)), (0, 0), (0, 0))) for x in kv]
                    attend = lambda *qkv, how=how: jaxops.packed_attention(*qkv, offsets, **how, plan=plan)
                    out, vjp = jax.vjp(attend, q, *rows)
                    found.append((out, vjp(dout)))
                return found

            wild = jnp.resize(jnp.array([-(2**31), 2**31 - 1, 5], jnp.int32), M)
            for offsets in OFFSETS:
                for until in (jnp.arange(1, M + 1, dtype=jnp.int32), wild):
                    jax.block_until_ready(run(jnp.array(offsets, jnp.int32), until))
            print(H, dtype, plan, "done", flush=True)


def cached_attention() -> None:
    """Rows whole and in parts, plain and with a window, sinks, norms and rotations; positions at both ends of the
    cache, then outside of it."""
    rng = np.random.default_rng(0)
    for (B, K, G, S, H), dtype in (((5, 2, 3, 61, 20), "float32"), ((2, 2, 8, 1100, 128), "bfloat16")):
        qkv, sinks = (jnp.asarray(rng.normal(size=(B, n, H)), dtype) for n in (K * (G + 2), K * G))
        turned = {"qk_norm": (sinks[0, 0], sinks[0, 1]), "rotary": (sinks[:, 0, : H // 2], sinks[:, 1, : H // 2])}
        caches = [jnp.asarray(rng.normal(size=(B, K, S, H)), dtype) for _ in range(2)]
        for how in ({}, {"window": S // 2, "sinks": sinks[0, :, 0]} | turned):
            run = jax.jit(lambda at, qkv=qkv, caches=caches, how=how: jaxops.cached_attention(qkv, *caches, at, **how))
            for at in ([S - 1, 0], [S, -1], [2**31 - 1, -(2**31)]):
                jax.block_until_ready(run(jnp.resize(jnp.array(at, jnp.int32), B)))
        print(B, S, dtype, "done", flush=True)
