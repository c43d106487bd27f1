"""One transformer over documents of text and images: it continues text, draws from a prompt, and captions an image.

The recipe is Transfusion's (Zhou et al. 2024, arXiv:2408.11039): next-token loss on text, diffusion loss on an image's
patches, tokens around each image, text causal, an image whole. As in BAGEL (Deng et al. 2025, arXiv:2505.14683) the
diffusion is a rectified flow, an image that is read is clean and has no loss, and its patches share one position. As in
MoMa (Lin et al. 2024, arXiv:2407.21770) each modality has its own experts and router, and attention is shared. Image
rows are modulated by their time as in DiT (Peebles & Xie 2022, arXiv:2212.09748), whose patch embedding they have, too.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import PositiveFloat, PositiveInt

import jaxops
from models.decoder import DecoderConfig
from models.decoder.attention import Attention, Seen
from models.decoder.rope import turns
from models.distributed.mesh import Splits, whole_part
from models.distributed.tensor_parallel import WholeLinear, attend, devices, embed, first_row, own_rows, wide
from models.dit.model import TimeEmbedding, position_embedding, segments
from models.layers import apply_layers, options_of, stacked
from models.multimodal.experts import Counts, ModalityExperts, Routed
from models.multimodal.interleaved import Batch
from models.precision import Computation


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultimodalConfig(Computation):
    """Sizes and choices of a `Multimodal`.

    The residual stream is in dtype; modulations, logits, velocities and routers' products are float32. These and
    embeddings are never in FP8.

    Attributes:
      vocab: text tokens, with those around images.
      patch_values: numbers of a patch, patch * patch * channels.
      width, layers, heads, kv_heads, head_dim, qk_norm, rope_base, norm_epsilon, tie_embeddings: as of `DecoderConfig`,
        for both modalities.
      text_experts, text_hidden: gated units for text, and the width inside each.
      image_experts, image_hidden: for images.
      top_k: experts of a row.
      normalize: whether a row's expert weights are divided by their sum.
    """

    vocab: PositiveInt
    width: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    text_experts: PositiveInt
    text_hidden: PositiveInt
    image_experts: PositiveInt
    image_hidden: PositiveInt
    top_k: PositiveInt
    patch_values: PositiveInt
    normalize: bool = True
    qk_norm: bool = False
    rope_base: PositiveFloat = 10_000.0
    norm_epsilon: PositiveFloat = 1e-6
    tie_embeddings: bool = False

    def __post_init__(self):
        if self.top_k > min(self.text_experts, self.image_experts):
            raise ValueError(
                f"top_k is {self.top_k}, of {self.text_experts} experts for text and {self.image_experts} for images; "
                "it must be at most the smaller one."
            )
        if self.width % 8:
            raise ValueError(f"width is {self.width}; the embedding of a patch's place needs a multiple of 8.")
        self.decoder()

    def check_tensor(self, devices: int) -> None:
        """Checks whether the mesh axis `tensor` can have so many devices.

        Raises:
          ValueError: it does not divide the heads or the vocabulary.
        """
        self.decoder().check_tensor(devices)
        if self.vocab % devices:
            raise ValueError(
                f"tensor={devices} does not divide the vocabulary, {self.vocab}: write a model.vocab that it divides, "
                f"such as {self.vocab + -self.vocab % devices}."
            )

    def decoder(self) -> DecoderConfig:
        """Of the decoder that this model is for text alone."""
        names = {field.name for field in dataclasses.fields(DecoderConfig)} - {"attention"}
        shared = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return DecoderConfig(hidden=self.text_hidden, experts=self.text_experts, **shared)


class Layout(NamedTuple):
    """What all layers need of a batch's structure, the first three as of `models.multimodal.interleaved.Batch`.

    T are all rows of the batch. Over a mesh axis `tensor` blocks get `own`.
    """

    sequence_offsets: jax.Array
    segment_offsets: jax.Array
    is_image: jax.Array
    segment: jax.Array  # [T], each row's
    in_document: jax.Array  # [T] bool; False after the last one
    of_image: jax.Array  # [T] bool
    positions: jax.Array  # [T] int32, places in the document: of an image's patches all one
    visible_until: jax.Array  # [T] int32, the first row that a row sees no more

    def own(self) -> "Layout":
        """Of own rows what AdaLN and the experts read, of all rows what attention reads.

        Segments of own rows may begin or end on other devices: their offsets are moved, and clipped to own rows.
        """
        T = self.segment.shape[0]
        return self._replace(
            segment_offsets=jnp.clip(self.segment_offsets - first_row(T), 0, T // devices()),
            segment=own_rows(self.segment),
            in_document=own_rows(self.in_document),
            of_image=own_rows(self.of_image),
        )


def layout_of(batch: Batch) -> Layout:
    T = batch.tokens.shape[0]
    row = jnp.arange(T, dtype=jnp.int32)
    segment, inside = segments(batch.segment_offsets, T)
    document, _ = segments(batch.sequence_offsets, T)
    of_image = batch.is_image[segment] & inside
    start, end = batch.segment_offsets[:-1][segment], batch.segment_offsets[1:][segment]
    moved = jnp.cumsum(~of_image | (row == start), dtype=jnp.int32)
    return Layout(
        batch.sequence_offsets,
        batch.segment_offsets,
        batch.is_image,
        segment,
        inside,
        of_image,
        moved - moved[batch.sequence_offsets[:-1][document]],
        jnp.where(of_image, end, row + 1),
    )


class Modulation(nnx.Module):
    """AdaLN's vectors, `parts` of them for each segment: of images from their time, of text a learned norm's.

    Rows of text are so a plain RMS norm and a plain residual, in the same pass as images.
    """

    def __init__(self, config: MultimodalConfig, scales: int, *, gated: bool, rngs: nnx.Rngs):
        c, self.gated, self.parts = config, gated, scales * (3 if gated else 2)
        how: dict[str, Any] = {"dtype": jnp.dtype(c.dtype), "kernel_init": nnx.initializers.zeros_init()}
        self.head = WholeLinear(c.width, self.parts * c.width, **how, rngs=rngs)
        self.scale = nnx.Param(jnp.ones((scales, c.width)))

    def __call__(self, cond: jax.Array, layout: Layout) -> list[jax.Array]:
        """[S, width] float32 each: scale, shift and, if gated, gate, for each norm of a block."""
        image = jnp.split(self.head(jax.nn.silu(cond)).astype(jnp.float32), self.parts, axis=1)
        text = []
        for scale in self.scale[...]:
            text += [scale - 1, 0.0, 1.0] if self.gated else [scale - 1, 0.0]
        return [
            jnp.where(layout.is_image[:, None], of_image, of_text)
            for of_image, of_text in zip(image, text, strict=True)
        ]


class Block(nnx.Module):
    """Attention of all rows, then experts by modality, each after a norm and with a gate by segment."""

    def __init__(self, config: MultimodalConfig, *, sharded: bool = False, rngs: nnx.Rngs):
        self.config = config
        self.modulation = Modulation(config, 2, gated=True, rngs=rngs)
        self.attention = Attention(config.decoder(), rngs=rngs)
        self.moe = ModalityExperts(config, sharded=sharded, rngs=rngs)

    def __call__(self, x: jax.Array, cond: jax.Array, layout: Layout) -> tuple[jax.Array, Counts]:
        c = self.config
        scale1, shift1, gate1, scale2, shift2, gate2 = self.modulation(cond, layout)
        run = functools.partial(dict, backend=c.backend, per="sequence")
        norm = run(norm="rms", epsilon=c.norm_epsilon, out_dtype=jnp.dtype(c.dtype))
        y = jaxops.adaln(x, scale1, shift1, layout.segment_offsets, **norm)
        h = self._attend(y, layout)
        x, y = jaxops.gated_residual_adaln(x, h, gate1, scale2, shift2, layout.segment_offsets, **norm)
        h, counts = self.moe(y, layout.of_image, layout.in_document)
        return jaxops.gated_residual(x, h, gate2, layout.segment_offsets, **run()), counts

    def _attend(self, y: jax.Array, layout: Layout) -> jax.Array:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, *_: Any) -> jax.Array:
            how: dict[str, Any] = {"visible_until": layout.visible_until, "backend": self.config.backend}
            return jaxops.packed_attention(q[0], k[0], v[0], layout.sequence_offsets, **how)[None]

        positions = layout.positions[None]
        seen = Seen(turns(self.config.decoder(), positions, positions), lambda k, v: (k, v), attend)
        return self.attention(y[None], seen, None)[0].reshape(y.shape)


class Multimodal(nnx.Module):
    """A batch of documents in, logits of the next tokens and velocities from image to noise out.

    Args:
      sharded: whether it is called inside `models.distributed.mesh.split_objective`, with a device's parts.
        Model and parameters are the same; `Routed` covers all devices' rows.
    """

    def __init__(self, config: MultimodalConfig, *, sharded: bool = False, rngs: nnx.Rngs):
        c = self.config = config
        self.sharded = sharded
        self.splits: Splits | None = None  # set by `models.distributed.mesh.over`
        dtype = jnp.dtype(c.dtype)
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        self.embed = nnx.Embed(
            c.vocab, c.width, embedding_init=nnx.initializers.normal(c.width**-0.5), dtype=dtype, rngs=rngs
        )
        self.enter = linear(c.patch_values, c.width)
        self.time = TimeEmbedding(c.width, dtype=dtype, rngs=rngs)
        self.blocks = stacked(lambda rngs: Block(c, sharded=sharded, rngs=rngs), c.layers, rngs)
        self.modulation = Modulation(c, 1, gated=False, rngs=rngs)
        self.leave = linear(c.width, c.patch_values, kernel_init=nnx.initializers.zeros_init())
        self.head = nnx.data(None) if c.tie_embeddings else linear(c.width, c.vocab, use_bias=False)
        self.use_running_average = False  # what `nnx.Module.eval` sets: then no state of the blocks is written

    def __call__(self, batch: Batch, time: jax.Array) -> tuple[jax.Array, Routed]:
        """Normalized rows [T, width], for `logits` and `velocities`; rows after the last document are zero.

        Over a mesh axis `tensor` the result has own rows only.

        Args:
          batch: whose images are noisy already; its predictions and `is_read` are not used.
          time: [S] from 0 (image) to 1 (noise), of each segment; of text any number.
        """
        c = self.config
        c.check_tensor(devices())
        layout = layout_of(batch).own()
        of_image = layout.of_image[:, None]
        # Where segments are among own rows: from below 0 to more than there are.
        offsets = batch.segment_offsets - first_row(batch.size)
        place = position_embedding(offsets, batch.grids, of_image.shape[0], c.width)
        image = whole_part(self, "enter")(jnp.where(of_image, own_rows(batch.patches), 0)).astype(jnp.float32) + place
        x = jnp.where(of_image, image, embed(whole_part(self, "embed"), batch.tokens, c.backend)).astype(c.dtype)
        cond = whole_part(self, "time")(time)
        call, how = lambda block, x, _: block(x, cond, layout), options_of(self, "blocks")
        x, (counts,) = apply_layers((self.blocks,), call, x, layers=(range(c.layers),), each=(None,), **how)
        scale, shift = whole_part(self, "modulation")(cond, layout)
        how = {"norm": "rms", "epsilon": c.norm_epsilon, "per": "sequence", "backend": c.backend}
        routed = jax.vmap(lambda layer: layer.routed(c, sharded=self.sharded))(counts)
        return jaxops.adaln(x, scale, shift, layout.segment_offsets, **how), routed

    def last_layer(self) -> Any:
        """Whose products with normalized rows of text are the logits."""
        return whole_part(self, "embed" if self.head is None else "head")

    def logits(self, x: jax.Array) -> jax.Array:
        """Normalized rows of text [N, width] -> [N, vocab] float32.

        Over a mesh axis `tensor` from own rows: all rows, own words.
        """
        last = self.last_layer()
        return (attend(last, x) if self.head is None else wide(x, last)[0]).astype(jnp.float32)

    def velocities(self, x: jax.Array) -> jax.Array:
        """Normalized rows [N, width] -> [N, patch_values] float32, which mean nothing for text."""
        return whole_part(self, "leave")(x).astype(jnp.float32)
