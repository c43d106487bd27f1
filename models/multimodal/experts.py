"""A mixture of experts in which each modality has its own router, and experts of its own number and width."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jaxops
from models.distributed.mesh import AXES, EXPERTS, varying
from models.precision import Backend, Recipe

Sides = tuple[jax.Array, jax.Array]  # the logits for text and for images
init_experts = nnx.initializers.lecun_normal(batch_axis=(0,))


class Routed(NamedTuple):
    """What the routers decided, stacked over [layers].

    Attributes:
      aux_loss: load-balancing loss: each modality's `jaxops.Routing.aux_loss`, weighted by its share of the rows.
      load: assignments of each expert, those for text first.
    """

    aux_loss: jax.Array
    load: jax.Array


class Counts(NamedTuple):
    """What `Routed` is computed from, of a device's rows.

    Attributes:
      scores: [experts] each expert's mean score times the rows of its modality, those for text first.
      rows: [2] of text and of images.
      load: [experts] assignments in the order of `route_by_modality`; sharded, of all rows of the axes `EXPERTS`.
    """

    scores: jax.Array
    rows: jax.Array
    load: jax.Array

    def routed(self, config: Any, *, sharded: bool) -> Routed:
        """Of one layer. By `jax.vmap` of all: the counts are summed over devices once, not in each layer of a scan."""
        c, devices = config, 1
        scores, rows, load = self
        if sharded:
            devices = lax.axis_size(EXPERTS)
            # Each device of EXPERTS has counted the same assignments.
            scores, rows, load = lax.psum((scores, rows, load), AXES)
            load = load // devices
        loads = split_by_modality(load, c.text_experts, devices)
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
        """
        Args:
          x: [T, width].
          of_image: [T] bool, whose experts a row takes.
          in_document: [T] bool; other rows take none, and their result is zero.
        """
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
        c = self.config
        routing = route_by_modality(
            *logits, of_image, in_document, devices, k=c.top_k, normalize=c.normalize, backend=c.backend
        )
        if self.sharded:
            routing = routing.own((c.text_experts + c.image_experts) // devices, EXPERTS)
        units = [Units(side.gate[...], side.up[...], side.down[...]) for side in (self.text, self.image)]
        dtype = jnp.dtype(c.dtype)
        out_dtype = jnp.float32 if self.sharded else dtype
        if c.recipe is not None:
            how: dict[str, Any] = {"compute_dtype": dtype, "out_dtype": out_dtype, "backend": c.backend}
            return apply_units_fp8(x, units, routing, recipe=c.recipe, **how), routing
        rows = jaxops.permute(x, routing, backend=c.backend)
        down = apply_units(rows, units, routing.group_offsets, dtype=dtype, backend=c.backend)
        return jaxops.combine(down, routing, out_dtype=out_dtype, backend=c.backend), routing

    def _counts(self, logits: Sides, of_image: jax.Array, in_document: jax.Array, load: jax.Array) -> Counts:
        mine = in_document & ~of_image, in_document & of_image
        scores = [
            jnp.sum(jnp.where(own[:, None], jax.nn.softmax(x), 0), 0) for x, own in zip(logits, mine, strict=True)
        ]
        rows = jnp.stack([jnp.sum(own, dtype=jnp.float32) for own in mine])
        return Counts(jnp.concatenate(scores), rows, load)


def route_by_modality(
    text: jax.Array, image: jax.Array, of_image: jax.Array, in_document: jax.Array, devices: int, **how: Any
) -> jaxops.Routing:
    """A `jaxops.Routing` of all rows: each chooses among the experts of its modality.

    With several devices their experts are device by device, on each one text's first. Rows outside of documents choose
    none.

    Args:
      text, image: logits [T, experts].
    """
    T = text.shape[0]
    logits = [
        jnp.where(mine[:, None], some, -jnp.inf).reshape(T, devices, -1)
        for some, mine in ((text, ~of_image), (image, of_image))
    ]
    return jaxops.route(jnp.concatenate(logits, axis=2).reshape(T, -1), mask=in_document, **how)


def split_by_modality(of_experts: jax.Array, text_experts: int, devices: int) -> tuple[jax.Array, jax.Array]:
    """Numbers of all experts in the order of `route_by_modality` -> those of text's and of images' experts."""
    by_device = of_experts.reshape(devices, -1)
    first = text_experts // devices
    return by_device[:, :first].ravel(), by_device[:, first:].ravel()


class Units(NamedTuple):
    """Weights of a modality's gated units: gate and up [experts, width, hidden], down [experts, hidden, width]."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array


def apply_units(
    rows: jax.Array, units: Sequence[Units], group_offsets: jax.Array, *, dtype: Any, backend: Backend
) -> jax.Array:
    """[R, width]: each row through the gated unit of its group, which are those of all modalities in turn.

    Each product is one for all modalities.
    """
    multiply = functools.partial(
        jaxops.modality_grouped_matmul, group_offsets=group_offsets, compute_dtype=dtype, backend=backend
    )
    gate, up, down = zip(*units, strict=True)
    return multiply(jax.nn.silu(multiply(rows, gate)) * multiply(rows, up), down)


def apply_units_fp8(
    x: jax.Array, units: Sequence[Units], routing: jaxops.Routing, *, recipe: Recipe, **how: Any
) -> jax.Array:
    """[T, width]: as `jaxops.permute`, `apply_units` and `jaxops.combine`, a `jaxops.moe_mlp` for each modality.

    FP8 has no product for all modalities. Recipe "delayed" becomes tensorwise: experts have no history.
    """
    recipe, first, found = "tensorwise" if recipe == "delayed" else recipe, 0, []
    for unit in units:
        end = first + unit.gate.shape[0]
        mine = dataclasses.replace(routing, group_offsets=routing.group_offsets[first : end + 1])
        found.append(jaxops.moe_mlp(x, *unit, mine, recipe=recipe, **how))
        first = end
    return sum(found[1:], found[0])  # a row's experts are of one modality: the others are zeros
