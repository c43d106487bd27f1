"""The JAX sides of the AdaLN comparison: the passes as functions of named inputs.

Inputs: x (the residual) [T, D]; scale, shift [B, D]; offsets [B + 1]; sequence_ids [T], each row's sequence; the
cotangent dy; and for gated_residual_adaln h, gate and dnew_residual. A pass returns its results by name: y,
new_residual, and the gradients dx, dh, dgate, dscale, dshift.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxops.ops.adaln import adaln, gated_residual_adaln

Named = dict[str, jax.Array]
OPERANDS = {"adaln": ("x", "scale", "shift"), "gated_residual_adaln": ("x", "h", "gate", "scale", "shift")}
OUTPUTS = {"adaln": ("y",), "gated_residual_adaln": ("new_residual", "y")}


@dataclasses.dataclass(frozen=True)
class Side:
    """One implementation of an op.

    Attributes:
      op: "adaln" or "gated_residual_adaln".
      call: (inputs) -> the op's results as a tuple, differentiable in the operands.
    """

    op: str
    call: Callable[[Named], tuple[jax.Array, ...]]

    def fwd(self, inputs: Named) -> Named:
        return dict(zip(OUTPUTS[self.op], self.call(inputs), strict=True))

    def saved(self, inputs: Named) -> Callable:
        """What the backward reads: JAX's vjp, a pytree that jitted functions take and return."""
        return self._vjp(inputs)[1]

    def bwd(self, vjp: Callable, inputs: Named) -> Named:
        cotangents = tuple(inputs[f"d{name}"] for name in OUTPUTS[self.op])
        return {f"d{name}": grad for name, grad in zip(OPERANDS[self.op], vjp(cotangents), strict=True)}

    def fwd_bwd(self, inputs: Named) -> Named:
        """All results and all gradients, so that XLA drops nothing."""
        results, vjp = self._vjp(inputs)
        return dict(zip(OUTPUTS[self.op], results, strict=True)) | self.bwd(vjp, inputs)

    def _vjp(self, inputs: Named):
        names = OPERANDS[self.op]
        return jax.vjp(
            lambda *operands: self.call(inputs | dict(zip(names, operands, strict=True))),
            *(inputs[name] for name in names),
        )


def jaxops_side(op: str, backend: str) -> Side:
    if op == "adaln":
        return Side(op, lambda i: (adaln(i["x"], i["scale"], i["shift"], i["offsets"], backend=backend),))
    return Side(
        op,
        lambda i: gated_residual_adaln(
            i["x"], i["h"], i["gate"], i["scale"], i["shift"], i["offsets"], backend=backend
        ),
    )


def plain(inputs: Named) -> tuple[jax.Array, ...]:
    """AdaLN in plain JAX: modulation rows gathered by a given index, float32 inside."""
    ids = inputs["sequence_ids"]
    x = inputs["x"]
    if "h" in inputs:
        x = (x.astype(jnp.float32) + inputs["gate"].astype(jnp.float32)[ids] * inputs["h"].astype(jnp.float32)).astype(
            x.dtype
        )
    n = x.astype(jnp.float32)
    n = n - jnp.mean(n, axis=-1, keepdims=True)
    n = n * lax.rsqrt(jnp.mean(n * n, axis=-1, keepdims=True) + 1e-6)
    y = (n * (1 + inputs["scale"].astype(jnp.float32)[ids]) + inputs["shift"].astype(jnp.float32)[ids]).astype(x.dtype)
    return (x, y) if "h" in inputs else (y,)


def jax_side(op: str, name: str) -> Side:
    """
    Raises:
      ValueError: no such side.
    """
    if name in ("pallas", "jaxops_xla"):
        return jaxops_side(op, name.removeprefix("jaxops_"))
    if name == "xla":
        return Side(op, plain)
    raise ValueError(f"peer {name!r}: write xla, torch_compile or jaxops_xla, the portable backend of jaxops.")
