"""Is a result right? Rows of it are compared with float32, before anything is timed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.shapes import GroupedShape, sampled_rows

# Largest error over the row's RMS, and RMS error over it. bfloat16 rounds the result to 2^-9 of itself, and a row of normal data reaches about 5 RMS.
LIMITS = {"bfloat16": (4e-2, 1e-2), "float32": (1e-3, 1e-4)}


def within_limits(max_err: float, rms_err: float, dtype: str) -> bool:
    """NaN is outside."""
    return max_err <= LIMITS[dtype][0] and rms_err <= LIMITS[dtype][1]


def grouped_errors(pass_name: str, shape: GroupedShape, out: jax.Array, inputs: tuple[jax.Array, ...], offsets: np.ndarray) -> tuple[float, float]:
    """(largest error over RMS, RMS error over RMS) of a pass's result, the worst of the sampled rows. inputs are lhs, rhs, dout.

    A row that must be zero and is not counts as infinitely wrong.
    """
    groups, rows = sampled_rows(pass_name, shape, offsets)
    right_shape = {"fwd": (shape.M, shape.N), "dgrad": (shape.M, shape.K), "wgrad": (shape.G, shape.K, shape.N)}[pass_name]
    if out.shape != right_shape:
        raise ValueError(f"{pass_name} returned {out.shape}, it must be {right_shape}.")
    worst = _errors(pass_name, out, *inputs, jnp.asarray(offsets), jnp.asarray(groups), jnp.asarray(rows))
    return float(worst[0]), float(worst[1])


@functools.partial(jax.jit, static_argnums=0)
def _errors(pass_name: str, out, lhs, rhs, dout, offsets, groups, rows):
    # One row of the result after another, as a multiply and a reduction: exact float32 (no TF32), no [G, M, K], and no GEMM that XLA would tune first.
    def row_errors(index):
        g, r = index
        if pass_name == "fwd":
            want, got = jnp.sum(lhs[r].astype(jnp.float32)[:, None] * rhs[g].astype(jnp.float32), axis=0), out[r]
        elif pass_name == "dgrad":
            want, got = jnp.sum(dout[r].astype(jnp.float32)[None, :] * rhs[g].astype(jnp.float32), axis=1), out[r]
        else:
            m = jnp.arange(lhs.shape[0])
            column = jnp.where((offsets[g] <= m) & (m < offsets[g + 1]), lhs[:, r].astype(jnp.float32), 0)
            want, got = jnp.sum(column[:, None] * dout.astype(jnp.float32), axis=0), out[g, r]
        diff = got.astype(jnp.float32) - want
        rms, max_err, rms_err = jnp.sqrt(jnp.mean(want**2)), jnp.max(jnp.abs(diff)), jnp.sqrt(jnp.mean(diff**2))
        relative = jnp.stack([max_err, rms_err]) / jnp.where(rms > 0, rms, 1)
        return jnp.where((rms > 0) | (max_err == 0), relative, jnp.inf)

    return jnp.max(lax.map(row_errors, (groups, rows)), axis=0)  # max passes NaN on
