"""The gated unit and its gradients on the portable backend; XLA fuses each into one loop."""

import jax
import jax.numpy as jnp

from jaxops._lib.numerics.activations import unit, unit_gradients
from jaxops.ops.grouped_glu.plan import Halves, Spec


def _inside(offsets: jax.Array, M: int) -> jax.Array:
    """[M, 1] bool: whether a row is in a group."""
    row = jnp.arange(M, dtype=jnp.int32)[:, None]
    return (offsets[0] <= row) & (row < offsets[-1])


def _split(pre: Halves, inside: jax.Array) -> list[jax.Array]:
    """Gate and up; zero in rows outside the groups."""
    gate, up = jnp.split(pre[0], 2, axis=1) if len(pre) == 1 else pre
    return [jnp.where(inside, half, 0) for half in (gate, up)]


def fwd_xla(spec: Spec, pre: Halves, offsets: jax.Array) -> jax.Array:
    """As `unit_fwd_pallas`."""
    inside = _inside(offsets, pre[0].shape[0])
    gate, up = _split(pre, inside)
    return jnp.where(inside, unit(spec.activation, gate, up), 0).astype(spec.out_dtype)


def bwd_xla(spec: Spec, pre: Halves, dh: jax.Array, offsets: jax.Array) -> Halves:
    """As `unit_bwd_pallas`."""
    inside = _inside(offsets, dh.shape[0])
    gate, up = _split(pre, inside)
    found = tuple(
        half.astype(pre[0].dtype) for half in unit_gradients(spec.activation, gate, up, jnp.where(inside, dh, 0))
    )
    return (jnp.concatenate(found, axis=1),) if len(pre) == 1 else found
