"""A mixture of experts in which each modality has its own router, and experts of its own number and width."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jaxops
from models.distributed.mesh import AXES, EXPERTS, varying

Sides = tuple[jax.Array, jax.Array]  # the logits for text and for images
init_experts = nnx.initializers.lecun_normal(batch_axis=(0,))


class Routed(NamedTuple):
    """What the routers decided, stacked over [layers]."""

    aux_loss: jax.Array  # each modality's `jaxops.Routing.aux_loss`, weighted by its share of the rows
    load: jax.Array  # assignments of each expert, those for text first


class Counts(NamedTuple):
    """What `Routed` is computed from, of a device's rows; sharded, the load is of all rows of the axes `EXPERTS`."""

    scores: jax.Array  # [experts] each expert's mean score times the rows of its modality, those for text first
    rows: jax.Array  # [2] of text and of images
    load: jax.Array  # [experts] assignments, device by device, on each one text's experts first

    def routed(self, config: Any, *, sharded: bool) -> Routed:
        """Of one layer. By `jax.vmap` of all: the counts are summed over devices once, not in each layer of a scan."""
        c, devices = config, 1
        scores, rows, load = self
        if sharded:
            devices = lax.axis_size(EXPERTS)
            # Each device of EXPERTS has counted the same assignments.
            scores, rows, load = lax.psum((scores, rows, load), AXES)
            load = load // devices
        loads = [part.ravel() for part in jnp.split(load.reshape(devices, -1), [c.text_experts // devices], axis=1)]
        each = zip(loads, jnp.split(scores, [c.text_experts]), rows, strict=True)
        losses = [x.shape[0] * jnp.sum(x * score) / jnp.maximum(c.top_k * count, 1) for x, score, count in each]
        return Routed(sum(losses) / jnp.maximum(jnp.sum(rows), 1), jnp.concatenate(loads))


class Side(nnx.Module):
    """A modality's router and gated units (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, width: int, hidden: int, experts: int, *, rngs: nnx.Rngs):
        make = lambda *shape: nnx.Param(init_experts(rngs.params(), shape, jnp.float32))
        self.router = nnx.Linear(width, experts, use_bias=False, precision=lax.Precision.HIGHEST, rngs=rngs)
        self.gate, self.up = make(experts, width, hidden), make(experts, width, hidden)
        self.down = make(experts, hidden, width)

    def weights(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """gate and up [experts, width, hidden], down [experts, hidden, width]."""
        return self.gate[...], self.up[...], self.down[...]


class ModalityExperts(nnx.Module):
    """Experts by modality (MoMa, Lin et al. 2024, arXiv:2407.21770) without token drops, padding or host sync.

    The rows of both modalities are sorted by expert in one pass, text's experts first, and each product is one
    `jaxops.modality_grouped_matmul`. MoMa's experts choose their tokens, which a causal model cannot do when it
    generates; here tokens choose experts.

    Sharded, each device has some experts of each modality: its rows are exchanged over the mesh axes `EXPERTS`.
    """

    def __init__(self, config: Any, *, sharded: bool = False, rngs: nnx.Rngs):
        """config: a `models.multimodal.MultimodalConfig`."""
        c = self.config = config
        self.sharded = sharded
        self.text = Side(c.width, c.text_hidden, c.text_experts, rngs=rngs)
        self.image = Side(c.width, c.image_hidden, c.image_experts, rngs=rngs)

    def __call__(self, x: jax.Array, of_image: jax.Array, in_document: jax.Array) -> tuple[jax.Array, Counts]:
        """Of rows x [T, width] by the experts of their modality; zeros where in_document is False, both [T] bool."""
        logits = self.text.router(x.astype(jnp.float32)), self.image.router(x.astype(jnp.float32))
        if not self.sharded:
            y, routing = self._mixed(x, logits, of_image, in_document, 1)
            return y, self._counts(logits, of_image, in_document, routing.load)
        of_image, in_document = varying(of_image), varying(in_document)
        gathered: Any = functools.partial(lax.all_gather, axis_name=EXPERTS, tiled=True)
        all_rows = gathered(x), gathered(logits), gathered(of_image), gathered(in_document)
        devices = lax.axis_size(EXPERTS)
        y, routing = self._mixed(*all_rows, devices)
        # Partial sums of the devices are added in float32 and rounded once, as on one device.
        own = lax.psum_scatter(y, EXPERTS, tiled=True).astype(x.dtype)
        return own, self._counts(logits, of_image, in_document, routing.load)

    def _mixed(
        self, x: jax.Array, logits: Sides, of_image: jax.Array, in_document: jax.Array, devices: int
    ) -> tuple[jax.Array, jaxops.Routing]:
        """Each row chooses among the experts of its modality: the others' logits are -inf.

        Experts are device by device, on each one text's first.
        """
        c, T = self.config, of_image.shape[0]
        masked = [
            jnp.where(mine[:, None], some, -jnp.inf).reshape(T, devices, -1)
            for some, mine in zip(logits, (~of_image, of_image), strict=True)
        ]
        joined = jnp.concatenate(masked, axis=2).reshape(T, -1)
        routing = jaxops.route(joined, mask=in_document, k=c.top_k, normalize=c.normalize, backend=c.backend)
        if self.sharded:
            routing = routing.own((c.text_experts + c.image_experts) // devices, EXPERTS)
        dtype = jnp.dtype(c.dtype)
        out_dtype = jnp.float32 if self.sharded else dtype
        how: dict[str, Any]
        if c.recipe is not None:
            how = {"compute_dtype": dtype, "out_dtype": out_dtype, "backend": c.backend}
            return self._mixed_fp8(x, routing, **how), routing
        how = {"group_offsets": routing.group_offsets, "compute_dtype": dtype, "backend": c.backend}
        multiply = functools.partial(jaxops.modality_grouped_matmul, **how)
        gate, up, down = zip(self.text.weights(), self.image.weights(), strict=True)
        rows = jaxops.permute(x, routing, backend=c.backend)
        rows = multiply(jax.nn.silu(multiply(rows, gate)) * multiply(rows, up), down)
        return jaxops.combine(rows, routing, out_dtype=out_dtype, backend=c.backend), routing

    def _mixed_fp8(self, x: jax.Array, routing: jaxops.Routing, **how: Any) -> jax.Array:
        """A `jaxops.moe_mlp` for each modality: FP8 has no product for all. Experts have no history for "delayed"."""
        recipe, first, mixed = "tensorwise" if self.config.recipe == "delayed" else self.config.recipe, 0, []
        for side in (self.text, self.image):
            weights = side.weights()
            end = first + weights[0].shape[0]
            mine = dataclasses.replace(routing, group_offsets=routing.group_offsets[first : end + 1])
            mixed.append(jaxops.moe_mlp(x, *weights, mine, recipe=recipe, **how))
            first = end
        return mixed[0] + mixed[1]  # a row's experts are of one modality: the others are zeros

    def _counts(self, logits: Sides, of_image: jax.Array, in_document: jax.Array, load: jax.Array) -> Counts:
        mine = in_document & ~of_image, in_document & of_image
        each = zip(logits, mine, strict=True)
        scores = [jnp.sum(jnp.where(own[:, None], jax.nn.softmax(x), 0), 0) for x, own in each]
        rows = jnp.stack([jnp.sum(own, dtype=jnp.float32) for own in mine])
        return Counts(jnp.concatenate(scores), rows, load)
