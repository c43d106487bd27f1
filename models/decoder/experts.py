"""A block's mixture of experts."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jaxops
from jaxops.nn import MoE, Router
from models.decoder.config import DecoderConfig
from models.decoder.weights import GatedUnit, StoredFp8, decodes
from models.distributed.mesh import AXES, EXPERTS


class Routed(NamedTuple):
    """Results of the routers, stacked over [layers]; None for a model without experts.

    aux_loss and z_loss as in `jaxops.Routing`; load: assignments of each expert.
    """

    aux_loss: jax.Array
    z_loss: jax.Array
    load: jax.Array

    def summed(self) -> "Routed":
        """Of all devices' tokens, from each device's by a sharded `DecoderRouter`, with one sum for all layers.

        A sum in each layer has nothing beside it in a scan: with the preset 30b and `fsdp=4` on four H200s 1.3 ms a
        layer were exposed (2026-11-26).

        aux_loss is not a mean over devices: it multiplies two means over tokens. Devices count different numbers of
        tokens, which are their means' weights.
        """
        load = lax.psum(self.load, AXES)
        # 1 where all devices count equally many tokens, so that the mean has the bits of one without weights.
        weight = lax.axis_size(AXES) * _assignments(self.load) / _assignments(load)
        shares, z_loss = lax.pmean((weight[:, None] * self.aux_loss, weight * self.z_loss), AXES)
        load = load // lax.axis_size(EXPERTS)  # each device of EXPERTS has counted the same tokens
        chosen = load / _assignments(load)[:, None]
        return Routed(load.shape[1] * jnp.sum(chosen * shares, axis=1), z_loss, load)


def _assignments(load: jax.Array) -> jax.Array:
    """Of [layers, experts] the sum over experts, float32; at least 1, to divide by."""
    return jnp.maximum(jnp.sum(load, axis=1), 1).astype(jnp.float32)


class DecoderRouter(Router):
    """A `Router` whose logits may have a bias.

    Sharded, load and z_loss are of the tokens of the device's own mesh axes `EXPERTS`, and aux_loss is `mean_shares` of
    them, for `Routed.summed`.
    """

    def __init__(self, config: DecoderConfig, *, sharded: bool, rngs: nnx.Rngs):
        c = config
        super().__init__(
            c.width,
            c.experts,
            c.top_k,
            score=c.score,
            normalize=c.normalize,
            weight_scale=c.weight_scale,
            expert_groups=c.expert_groups,
            top_expert_groups=c.top_expert_groups,
            use_bias=c.selection_bias,
            backend=c.backend,
            rngs=rngs,
        )
        self.sharded = sharded
        self.bias: Any = nnx.Param(jnp.zeros(c.experts, jnp.float32)) if c.expert_bias else nnx.data(None)

    def logits(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        logits = super().logits(x, mask)
        return logits if self.bias is None else logits + self.bias[...][None, :]

    def choose(self, logits: jax.Array, mask: jax.Array | None = None) -> jaxops.Routing:
        routing = super().choose(logits, mask)
        return dataclasses.replace(routing, aux_loss=self.mean_shares(logits, mask)) if self.sharded else routing


class StoredExperts(nnx.Module):
    """The parameters of a `MoE` with stored float8 experts."""

    def __init__(self, config: DecoderConfig, router: Router):
        c = config
        self.router = router
        self.gate = StoredFp8(c.experts, c.width, c.hidden)
        self.up = StoredFp8(c.experts, c.width, c.hidden)
        self.down = StoredFp8(c.experts, c.hidden, c.width)


class Experts(nnx.Module):
    """A mixture of experts without token drops, padding or host synchronization.

    Sharded, each device has some of the experts: its tokens are exchanged over the mesh axes `EXPERTS`.
    """

    def __init__(self, config: DecoderConfig, *, sharded: bool = False, rngs: nnx.Rngs):
        c = self.config = config
        self.sharded = sharded
        router = DecoderRouter(c, sharded=sharded, rngs=rngs)
        self.moe: Any
        if c.stored_fp8:
            self.moe = StoredExperts(c, router)
        else:
            self.moe = MoE(
                c.experts,
                c.width,
                c.hidden,
                router=router,
                activation="silu" if c.clamp is None else "swiglu_oai",
                use_bias=c.expert_bias,
                expert_axis=EXPERTS if sharded else None,
                gather_tokens=sharded,
                recipe="tensorwise" if c.recipe == "delayed" else c.recipe,  # experts have no history
                dtype=jnp.dtype(c.dtype),
                backend=c.backend,
                rngs=rngs,
            )
        self.shared = GatedUnit(c, c.shared_hidden, rngs=rngs) if c.shared_hidden else nnx.data(None)
        self.shared_gate = (
            nnx.Linear(c.width, 1, use_bias=False, precision=lax.Precision.HIGHEST, rngs=rngs)
            if c.shared_gate
            else nnx.data(None)
        )

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> tuple[jax.Array, Routed]:
        """mask: which tokens count, bool, of x's leading axes; None for all. The others choose no experts."""
        y, routing = self._of_stored(x, mask) if self.config.stored_fp8 else self.moe(x, mask)
        return self._with_shared(x, y), Routed(routing.aux_loss, routing.z_loss, routing.load)

    def _with_shared(self, x: jax.Array, y: jax.Array) -> jax.Array:
        if self.shared is None:
            return y
        shared, _ = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * jax.nn.sigmoid(self.shared_gate(x.astype(jnp.float32))).astype(shared.dtype)
        return y + shared

    def _of_stored(self, x: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jaxops.Routing]:
        """Stored FP8: product by product, of quantized tokens. Single tokens, as in decoding, are one op, which does
        not quantize them."""
        c, tokens = self.config, x.reshape(-1, x.shape[-1])
        mask = None if mask is None else mask.ravel()
        if self.sharded:
            tokens, mask = lax.all_gather((tokens, mask), EXPERTS, tiled=True)
        routing = self.moe.router(tokens, mask)
        own = routing.own(c.experts // lax.axis_size(EXPERTS), EXPERTS) if self.sharded else routing
        # Partial sums of the devices are added in float32 and rounded once, as on one device.
        dtype, out_dtype = jnp.dtype(c.dtype), jnp.float32 if self.sharded else jnp.dtype(c.dtype)
        gate, up, down = (getattr(self.moe, name).quantized(c.dtype) for name in ("gate", "up", "down"))
        if decodes(x):
            how: dict[str, Any] = {"out_dtype": out_dtype, "backend": c.backend}
            y = jaxops.moe_mlp(tokens.astype(dtype), gate, up, down, own, **how)
        else:
            how = {"group_offsets": own.group_offsets, "backend": c.backend}
            multiply = functools.partial(jaxops.fp8_grouped_matmul, **how)
            rows = jaxops.permute(tokens.astype(dtype), own)
            rows = multiply(jax.nn.silu(multiply(rows, gate)) * multiply(rows, up), down)
            y = jaxops.combine(rows, own, out_dtype=out_dtype)
        if self.sharded:
            y = lax.psum_scatter(y, EXPERTS, tiled=True).astype(dtype)
        return y.reshape(x.shape), routing
