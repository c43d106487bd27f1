"""A diffusion transformer over packed images of different sizes, trained as a rectified flow."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxops
from jaxops.nn import AdaLayerNorm, AdaLNZeroBlock
from models.distributed.mesh import Splits, whole_part
from models.distributed.tensor_parallel import (
    WholeLinear,
    check_heads,
    devices,
    first_row,
    narrow,
    own_rows,
    total,
    wide,
)
from models.layers import apply_layers, options_of, stacked
from models.precision import Attends, Computation, linear_layer


@dataclasses.dataclass(frozen=True)
class DiTConfig(Computation):
    """Sizes and choices of a `DiT`.

    The residual stream is float32. Never in FP8 are the embeddings of tokens, times and labels, the modulations (a row
    an image) and the output projection. Names for a policy: "attention" (the residuals of attention), "mlp",
    "branch.attention" and "branch.mlp" (outputs of the branches, for the gates' gradients).

    Attributes:
      token: values of a token, patch * patch * channels.
      classes: labels; one more is "any class" (Ho & Salimans 2022, arXiv:2207.12598).
      longest: tokens of the largest image.
      attention: backend of `jaxops.packed_attention`.
    """

    layers: int
    width: int
    heads: int
    token: int
    classes: int
    longest: int
    attention: Attends = "auto"

    def check_tensor(self, devices: int) -> None:
        """Checks whether so many devices of the mesh axis `tensor` divide the heads."""
        check_heads(devices, heads=self.heads)


def named_gelu(x: jax.Array) -> jax.Array:
    # The backward computes the slope from x, which it keeps anyway: otherwise XLA keeps intermediates of that size too.
    return jax.checkpoint(jax.nn.gelu)(checkpoint_name(x, "mlp"))


def waves(x: jax.Array, features: int, longest_period: float) -> jax.Array:
    """[N] -> [N, features] sines and cosines, with wavelengths from 2 pi to longest_period in geometric progression."""
    half = features // 2
    angle = jnp.outer(
        x.astype(jnp.float32),
        (longest_period / (2 * jnp.pi)) ** (-jnp.arange(half, dtype=jnp.float32) / max(1, half - 1)),
    )
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=1)


def position_embedding(sequence_offsets: jax.Array, grids: jax.Array, rows: int, width: int) -> jax.Array:
    """[rows, width]: a patch's distance from all four edges of its image, which also gives the image's size."""
    sequence, _ = segments(sequence_offsets, rows)
    index = jnp.arange(rows, dtype=jnp.int32) - sequence_offsets[sequence]
    height, columns = grids[sequence, 0], jnp.maximum(grids[sequence, 1], 1)
    row, column = index // columns, index % columns
    edges = (row, column, height - 1 - row, columns - 1 - column)
    return jnp.concatenate([waves(edge, width // 4, 100.0) for edge in edges], axis=1)


class TimeEmbedding(nnx.Sequential):
    """Times [N] from 0 to 1 -> [N, width]."""

    def __init__(self, width: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, width, width, dtype=dtype, rngs=rngs)
        super().__init__(linear(), jax.nn.silu, linear())
        self.width = width

    def __call__(self, time: jax.Array) -> jax.Array:
        return super().__call__(waves(1000 * time, self.width, 60_000.0))


def segments(sequence_offsets: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Each row's sequence, int32 [rows] from 0 to B - 1, and whether it is in one, bool [rows]."""
    # By comparison with every offset: searchsorted would be a while loop in every layer.
    at = jnp.sum(sequence_offsets[None, :] <= jnp.arange(rows, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32) - 1
    B = sequence_offsets.shape[0] - 1
    return jnp.clip(at, 0, B - 1), (at >= 0) & (at < B)


class Attention(nnx.Module):
    """Self-attention inside each image. Columns of qkv are head by head: its query, key and value.

    Over a mesh axis `tensor` each device attends with its own heads, to all rows.
    """

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        self.config = config
        linear = linear_layer(config.recipe, config.backend)
        self.qkv = linear(config.width, 3 * config.width, dtype=jnp.dtype(config.dtype), rngs=rngs)
        self.out = linear(config.width, config.width, dtype=jnp.dtype(config.dtype), rngs=rngs)

    def __call__(self, y: jax.Array, sequence_offsets: jax.Array) -> jax.Array:
        c = self.config
        (qkv,) = wide(y, self.qkv)
        q, k, v = jnp.unstack(qkv.reshape(-1, c.heads // devices(), 3, c.width // c.heads), axis=2)
        mixed = jaxops.packed_attention(q, k, v, sequence_offsets, longest=c.longest, backend=c.attention)
        return checkpoint_name(narrow(mixed.reshape(mixed.shape[0], -1), self.out), "branch.attention")


class Mlp(nnx.Module):
    """Two products with a GELU between."""

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        linear, dtype = linear_layer(config.recipe, config.backend), jnp.dtype(config.dtype)
        self.wide = linear(config.width, 4 * config.width, dtype=dtype, rngs=rngs)
        self.narrow = linear(4 * config.width, config.width, dtype=dtype, rngs=rngs)

    def __call__(self, y: jax.Array) -> jax.Array:
        (h,) = wide(y, self.wide)
        return checkpoint_name(narrow(named_gelu(h), self.narrow), "branch.mlp")


class DiT(nnx.Module):
    """Noisy tokens in, the velocity from image to noise out (Peebles & Xie 2022, arXiv:2212.09748)."""

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        self.splits: Splits | None = None  # set by `models.distributed.mesh.over`
        dtype = jnp.dtype(c.dtype)
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        modulated: dict[str, Any] = {"per": "sequence", "dtype": dtype, "backend": c.backend, "linear": WholeLinear}

        def block(rngs: nnx.Rngs) -> AdaLNZeroBlock:
            attention, mlp = Attention(c, rngs=rngs), Mlp(c, rngs=rngs)
            return AdaLNZeroBlock(c.width, c.width, attention, mlp, **modulated, rngs=rngs)

        self.enter = linear(c.token, c.width)
        self.time = TimeEmbedding(c.width, dtype=dtype, rngs=rngs)
        self.label = nnx.Embed(c.classes + 1, c.width, dtype=dtype, rngs=rngs)
        self.blocks = stacked(block, c.layers, rngs)
        self.norm = AdaLayerNorm(c.width, c.width, **modulated, rngs=rngs)
        self.leave = linear(c.width, c.token, kernel_init=nnx.initializers.zeros_init())
        self.use_running_average = False  # what `nnx.Module.eval` sets: then no state of the blocks is written

    def __call__(
        self, tokens: jax.Array, time: jax.Array, labels: jax.Array, sequence_offsets: jax.Array, grids: jax.Array
    ) -> jax.Array:
        """Velocities [T, token] in float32; rows outside the images are undefined and affect no other row.

        Over a mesh axis `tensor` the result has own rows only.

        Args:
          tokens: [T, token], the images' tokens one after another.
          time: [B] from 0 (image) to 1 (noise).
          labels: [B] int32; `classes` for any class.
          sequence_offsets: [B + 1] int32.
          grids: [B, 2] int32, rows and columns of patches.
        """
        c, width = self.config, self.config.width
        c.check_tensor(devices())
        part = functools.partial(whole_part, self)
        cond = part("time")(time) + part("label")(labels)
        own = own_rows(tokens)
        # Where the images are among own rows: from below 0 to more than there are, and of AdaLN's within them.
        offsets = sequence_offsets - first_row(tokens.shape[0])
        x = part("enter")(own).astype(jnp.float32) + position_embedding(offsets, grids, own.shape[0], width)
        offsets = jnp.clip(offsets, 0, own.shape[0])
        call = lambda block, x, _: (block(x, cond, offsets, mixer_offsets=sequence_offsets), None)
        how = options_of(self, "blocks")
        x, _ = apply_layers((self.blocks,), call, x, layers=(range(c.layers),), each=(None,), **how)
        return part("leave")(part("norm")(x, cond, offsets)).astype(jnp.float32)


def loss_fn(model: DiT, batch, key: jax.Array, label_dropout: float = 0.1) -> jax.Array:
    """Mean squared error of the velocity noise - image, over rows of images (Liu et al. 2022, arXiv:2209.03003).

    batch is a `models.data.images.Batch`. Each image has its own time, drawn with more weight in the middle (Esser et
    al. 2024, arXiv:2403.03206, section 3.1).
    """
    time_key, noise_key, label_key = jax.random.split(key, 3)
    B, T = batch.labels.shape[0], batch.tokens.shape[0]
    sequence, inside = segments(batch.sequence_offsets, T)
    time = jax.nn.sigmoid(jax.random.normal(time_key, (B,)))
    noise = jax.random.normal(noise_key, batch.tokens.shape)
    labels = jnp.where(jax.random.uniform(label_key, (B,)) < label_dropout, model.config.classes, batch.labels)
    at = time[sequence][:, None]
    velocity = model((1 - at) * batch.tokens + at * noise, time, labels, batch.sequence_offsets, batch.grids)
    error = jnp.mean((velocity - own_rows(noise - batch.tokens)) ** 2, axis=1)
    return total(jnp.sum(jnp.where(own_rows(inside), error, 0))) / jnp.maximum(jnp.sum(inside), 1)


def integrate(velocity: Callable[[jax.Array, jax.Array], jax.Array], noise: jax.Array, steps: int) -> jax.Array:
    """From noise to images by Heun's method; velocity takes (patches, time), with one time for all."""

    def step(x: jax.Array, times: jax.Array) -> tuple[jax.Array, None]:
        here, there = times
        first = velocity(x, here)
        second = velocity(x + (there - here) * first, there)
        return x + (there - here) * (first + second) / 2, None

    times = jnp.linspace(1.0, 0.0, steps + 1)
    return jax.lax.scan(step, noise, jnp.stack([times[:-1], times[1:]], axis=1))[0]


def generate(model: DiT, batch, key: jax.Array, steps: int = 32, guidance: float = 2.0) -> jax.Array:
    """Tokens [T, token] of new images with a batch's labels and sizes, by Heun's method with classifier-free guidance.

    batch is a `models.data.images.Batch`, whose tokens are not used.
    """
    B = batch.labels.shape[0]
    anything = jnp.full((B,), model.config.classes, jnp.int32)

    def velocity(x: jax.Array, time: jax.Array) -> jax.Array:
        times = jnp.full((B,), time)
        guided, free = (
            model(x, times, labels, batch.sequence_offsets, batch.grids) for labels in (batch.labels, anything)
        )
        return free + guidance * (guided - free)

    return integrate(velocity, jax.random.normal(key, batch.tokens.shape), steps)
