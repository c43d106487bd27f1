"""The portable backend: gathered modulation rows and XLA's own fusion. CPU, TPU, and the benchmarks' plain-XLA side."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.activations import activate
from jaxops._lib.fp8 import BLOCK, FP8, quantize_blocks
from jaxops.ops.adaln.plan import Arrays, Spec


def _rows(offsets: jax.Array, T: int) -> tuple[jax.Array, jax.Array]:
    """Each row's sequence, int32 [T], and whether it has one, bool [T, 1]."""
    row = jnp.arange(T, dtype=jnp.int32)
    sequence = jnp.searchsorted(offsets, row, side="right").astype(jnp.int32) - 1
    B = offsets.shape[0] - 1
    return jnp.clip(sequence, 0, B - 1), ((sequence >= 0) & (sequence < B))[:, None]


def forward_xla(spec: Spec, arrays: Arrays) -> dict[str, jax.Array]:
    """As `forward_pallas`, without statistics."""
    x, h, gate, scale, shift, weight, bias, offsets = arrays
    sequence, inside = _rows(offsets, x.shape[0])

    def of_rows(values):
        # where, as with h below: 0 times what an outside row's modulation holds must be a zero in every gradient.
        values = values.astype(jnp.float32)
        return jnp.where(inside, values if spec.per_row else values[sequence], 0)

    found = {}
    if gate is not None:
        # where before the product, too: what an outside row holds must not reach a gradient through a product with zero.
        assert h is not None  # comes with the gate
        update = of_rows(gate) * jnp.where(inside, h, 0).astype(jnp.float32)
        x = found["residual"] = jnp.where(inside, (x.astype(jnp.float32) + update).astype(x.dtype), x)
    if spec.norm is None:
        return found
    n = jnp.where(inside, x, 0).astype(jnp.float32)
    if spec.norm == "layer":
        n = n - jnp.mean(n, axis=1, keepdims=True)
    u = n * lax.rsqrt(
        jnp.where(inside, jnp.mean(n * n, axis=1, keepdims=True), 1) + spec.epsilon
    )  # with epsilon 0 an outside row is finite, too
    if weight is not None:
        u = u * weight.astype(jnp.float32)[None, :]
    if bias is not None:
        u = u + bias.astype(jnp.float32)[None, :]
    a = activate(u, spec.activation)
    y = jnp.where(inside, a * (1 + of_rows(scale)) + of_rows(shift), 0)
    if spec.out_dtype in FP8:
        D = y.shape[1]
        y, scales = quantize_blocks(jnp.pad(y, ((0, 0), (0, -D % BLOCK))), spec.out_dtype)
        y, found["y_scales"] = y[:, :D], scales.T
    return found | {"y": y.astype(spec.out_dtype)}


def backward_xla(spec: Spec, arrays: Arrays, dx_in, dy) -> dict[str, jax.Array]:
    """As `backward_pallas`: JAX's own gradients of `forward_xla`, of the norm at x and of the gated residual before it."""
    gradients, dx = {}, dx_in
    if spec.norm is not None:
        names = [name for name in ("x", "scale", "shift", "weight", "bias") if getattr(arrays, name) is not None]
        ungated = arrays._replace(h=None, gate=None)
        given = {name: getattr(arrays, name) for name in names}
        _, vjp = jax.vjp(lambda given: forward_xla(spec, ungated._replace(**given))["y"], given)
        (gradients,) = vjp(dy)
        dx = gradients["x"] = gradients["x"] if dx_in is None else gradients["x"] + dx_in
    if arrays.gate is not None:
        only_gate = dataclasses.replace(spec, norm=None)
        gated = arrays._replace(x=jnp.zeros_like(arrays.x))
        _, vjp = jax.vjp(
            lambda h, gate: forward_xla(only_gate, gated._replace(h=h, gate=gate))["residual"], arrays.h, arrays.gate
        )
        gradients |= dict(zip(("h", "gate"), vjp(dx), strict=True))
    return gradients
