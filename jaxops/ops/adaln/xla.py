"""The portable backend: gathered modulation rows and XLA's fusion. CPU, TPU, and the benchmarks' plain-XLA side."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.numerics.activations import activate
from jaxops._lib.numerics.fp8 import BLOCK, FP8, kept, quantize_blocks
from jaxops._lib.ragged.offsets import group_of_rows
from jaxops.ops.adaln.plan import Arrays, Spec


def forward_xla(spec: Spec, arrays: Arrays) -> dict[str, jax.Array]:
    """As `forward_pallas`, without statistics."""
    x, h, gate, scale, shift, weight, bias, offsets = arrays
    B = offsets.shape[0] - 1
    sequence = group_of_rows(offsets, x.shape[0])
    inside, sequence = ((sequence >= 0) & (sequence < B))[:, None], jnp.clip(sequence, 0, B - 1)

    # Outside rows are zeroed before every product, not after: zero times NaN is NaN, in gradients too.
    def of_rows(values):
        values = values.astype(jnp.float32)
        return jnp.where(inside, values if spec.per_row else values[sequence], 0)

    results = {}
    if gate is not None:
        assert h is not None  # comes with the gate
        update = of_rows(gate) * jnp.where(inside, h, 0).astype(jnp.float32)
        x = results["residual"] = jnp.where(inside, (x.astype(jnp.float32) + update).astype(x.dtype), x)
    if spec.norm is None:
        return results
    n = jnp.where(inside, x, 0).astype(jnp.float32)
    if spec.norm == "layer":
        n = n - jnp.mean(n, axis=1, keepdims=True)
    square = jnp.where(inside, jnp.mean(n * n, axis=1, keepdims=True), 1)  # 1: finite with epsilon 0
    u = n * lax.rsqrt(square + spec.epsilon)
    if weight is not None:
        u = u * weight.astype(jnp.float32)[None, :]
    if bias is not None:
        u = u + bias.astype(jnp.float32)[None, :]
    y = jnp.where(inside, activate(u, spec.activation) * (1 + of_rows(scale)) + of_rows(shift), 0)
    if spec.out_dtype in FP8:
        D = y.shape[1]
        y, scales = quantize_blocks(jnp.pad(y, ((0, 0), (0, -D % BLOCK))), spec.out_dtype)
        y, results["y_scales"] = kept(y[:, :D]), scales.T
    return results | {"y": y.astype(spec.out_dtype)}


def backward_xla(spec: Spec, arrays: Arrays, dx_in, dy) -> dict[str, jax.Array]:
    """As `backward_pallas`: JAX's gradients of `forward_xla`, first of the norm at x, then of the gated residual."""
    gradients, dx = {}, dx_in
    if spec.norm is not None:
        ungated = arrays._replace(h=None, gate=None)
        given = {name: x for name, x in ungated._asdict().items() if x is not None and name != "offsets"}
        _, vjp = jax.vjp(lambda given: forward_xla(spec, ungated._replace(**given))["y"], given)
        (gradients,) = vjp(dy)
        dx = gradients["x"] if dx_in is None else gradients["x"] + dx_in
    if arrays.gate is not None:
        only_gate, gated = dataclasses.replace(spec, norm=None), arrays._replace(x=jnp.zeros_like(arrays.x))
        given = {"h": arrays.h, "gate": arrays.gate}
        _, vjp = jax.vjp(lambda given: forward_xla(only_gate, gated._replace(**given))["residual"], given)
        gradients |= vjp(dx)[0]
    return gradients | {"x": dx}
