"""A decoder language model: Llama, Qwen3, Mixtral or Qwen3-MoE, by its configuration.

models/hf.py reads and writes their checkpoints.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

import jaxops
from jaxops.nn import MoE, Router
from jaxops.offload import Policy, named
from models.layers import apply_layers, stacked
from models.mesh import AXES, gather
from models.precision import Backend, Dtype, Recipe, linear_layer


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and choices of a `Decoder`.

    Attributes:
      vocab, width, layers: number of tokens, width of the residual stream, number of blocks.
      heads, kv_heads, head_dim: of the attention; heads / kv_heads queries share a key and a value.
      hidden: width inside a block's gated unit, or inside each expert.
      experts, top_k: gated units of a block, and how many of them a token uses; 0 experts for one dense unit.
      normalize: whether a token's expert weights are divided by their sum.
      qk_norm: whether queries and keys are normalized, head by head (Qwen3).
      rope_base: of the rotary position embedding.
      norm_epsilon: added to the mean square in every norm.
      tie_embeddings: whether the output projection uses the embeddings.
      dtype: of the computation; parameters, logits and the router's product are float32.
      recipe: FP8 recipe of attention's and the gated units' products (`jaxops.fp8_matmul`); None for dtype. Embedding,
        router and logits are never in FP8.
      attention: "xla" or "cudnn" (bfloat16, on a GPU).
      max_documents: of a row, padding included; cuDNN needs it where documents share rows. With more the results are
        NaN.
      backend: of the experts' products, and of all FP8 products.
      policy: what a block's backward reads from the device or the host, and what it recomputes (`jaxops.offload`).
        Names: "carry" (the block's input), "attention" (the residuals of attention), "middle" (after attention), "mlp"
        (of a dense block), and those of jaxops' ops. None keeps everything.
      unroll: whether layers are unrolled instead of scanned: faster steps, longer compilation; not with an offloading
        policy.
    """

    vocab: PositiveInt
    width: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    hidden: PositiveInt
    experts: NonNegativeInt = 0
    top_k: NonNegativeInt = 0
    normalize: bool = True
    qk_norm: bool = False
    rope_base: PositiveFloat = 10_000.0
    norm_epsilon: PositiveFloat = 1e-6
    tie_embeddings: bool = False
    dtype: Dtype = "float32"
    recipe: Recipe | None = None
    attention: Literal["xla", "cudnn"] = "xla"
    max_documents: PositiveInt | None = None
    backend: Backend = "auto"
    policy: Policy | None = None
    unroll: bool = False

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads is {self.heads} and kv_heads {self.kv_heads}; heads must be a multiple of kv_heads."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary positions need an even one.")
        if not min(1, self.experts) <= self.top_k <= self.experts:
            raise ValueError(
                f"top_k is {self.top_k} of {self.experts} experts; it must be within 1 and experts, and 0 without "
                "experts."
            )


AnyLayer = TypeVar("AnyLayer", nnx.Embed, nnx.Linear)
KeysValues = tuple[jax.Array, jax.Array]
Attend = Callable[
    [jax.Array, jax.Array, jax.Array], tuple[jax.Array, KeysValues | None]
]  # of queries, keys and values: what they mix to, and what is kept


class Routed(NamedTuple):
    """Results of the routers, stacked over [layers]; None for a dense model.

    aux_loss and z_loss as in `jaxops.Routing`; load: assignments of each expert.
    """

    aux_loss: jax.Array
    z_loss: jax.Array
    load: jax.Array


def document_starts(documents: jax.Array) -> jax.Array:
    """documents [B, T], which change where a document starts -> bool [B, T], True at document and row starts."""
    return jnp.concatenate([jnp.ones_like(documents[:, :1], bool), documents[:, 1:] != documents[:, :-1]], axis=1)


def positions_in(starts: jax.Array) -> jax.Array:
    """Each token's place in its own document, int32 [B, T]."""
    at = jnp.arange(starts.shape[1], dtype=jnp.int32)[None, :]
    return at - jax.lax.cummax(jnp.where(starts, at, 0), axis=1)


def within_documents(starts: jax.Array, max_documents: int, backend: str) -> Attend:
    """Causal attention within documents: all rows are one packing of them."""
    offsets = jnp.nonzero(starts.ravel(), size=starts.shape[0] * max_documents + 1, fill_value=starts.size)[0].astype(
        jnp.int32
    )
    all_there = offsets[-1] == starts.size

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
        limits = {"longest": starts.shape[1], "crowd": max_documents}
        out = jaxops.packed_attention(flat[0], flat[1], flat[2], offsets, causal=True, backend=backend, **limits)
        return jnp.where(all_there, out.reshape(q.shape), jnp.nan), None

    return attend


def cudnn_rows(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
    """Causal attention within rows of one document each: cuDNN's dense layout."""
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    return named(attend, "attention")(q, k, v), None


def rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Rotary position embedding of x [B, T, heads, head_dim] at positions [B, T], in the half-split layout.

    Su et al. 2021, arXiv:2104.09864.
    """
    half = x.shape[-1] // 2
    angle = (
        positions[:, :, None, None].astype(jnp.float32)
        * (base ** (-jnp.arange(half, dtype=jnp.float32) / half))[None, None, None, :]
    )
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def normalized(norm: nnx.RMSNorm, x: jax.Array) -> jax.Array:
    """norm(x), whose backward keeps only x: recomputing the float32 intermediates costs less than storing them."""
    graphdef, params = nnx.split(norm)
    return jax.checkpoint(lambda params, x: nnx.merge(graphdef, params)(x), prevent_cse=False)(params, x)


class Attention(nnx.Module):
    """Self-attention with rotary positions and grouped queries. The caller chooses mask and residuals."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        dtype = jnp.dtype(c.dtype)
        linear = functools.partial(linear_layer(c.recipe, c.backend), use_bias=False, dtype=dtype, rngs=rngs)
        self.q = linear(c.width, c.heads * c.head_dim)
        self.k = linear(c.width, c.kv_heads * c.head_dim)
        self.v = linear(c.width, c.kv_heads * c.head_dim)
        self.out = linear(c.heads * c.head_dim, c.width)
        norm = functools.partial(nnx.RMSNorm, c.head_dim, epsilon=c.norm_epsilon, dtype=dtype, rngs=rngs)
        self.q_norm = norm() if c.qk_norm else nnx.data(None)
        self.k_norm = norm() if c.qk_norm else nnx.data(None)

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend) -> tuple[jax.Array, KeysValues | None]:
        c, (B, T, _) = self.config, x.shape
        q, k, v = (
            self.q(x).reshape(B, T, c.heads, -1),
            self.k(x).reshape(B, T, c.kv_heads, -1),
            self.v(x).reshape(B, T, c.kv_heads, -1),
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = normalized(self.q_norm, q), normalized(self.k_norm, k)
        q, k = rotate(q, positions, c.rope_base), rotate(k, positions, c.rope_base)
        mixed, kept = attend(q, k, v)
        return self.out(mixed.reshape(B, T, -1)), kept


class GatedUnit(nnx.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        linear = functools.partial(
            linear_layer(config.recipe, config.backend), use_bias=False, dtype=jnp.dtype(config.dtype), rngs=rngs
        )
        self.gate = linear(config.width, config.hidden)
        self.up = linear(config.width, config.hidden)
        self.down = linear(config.hidden, config.width)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        gate, up = checkpoint_name(self.gate(x), "mlp.gate"), checkpoint_name(self.up(x), "mlp.up")
        return self.down(jax.nn.silu(gate) * up), None


class Experts(nnx.Module):
    """A mixture of experts without token drops, padding or host synchronization.

    Sharded, each device has some of the experts: its tokens are exchanged over the mesh axis "expert".
    """

    def __init__(self, config: DecoderConfig, *, sharded: bool = False, rngs: nnx.Rngs):
        c = self.config = config
        self.sharded = sharded
        router = Router(c.width, c.experts, c.top_k, normalize=c.normalize, backend=c.backend, rngs=rngs)
        axis = "expert" if sharded else None
        self.moe = MoE(
            c.experts,
            c.width,
            c.hidden,
            router=router,
            expert_axis=axis,
            dtype=jnp.dtype(c.dtype),
            backend=c.backend,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routed]:
        if not self.sharded:
            y, routing = self._mixed(x)
            return y, Routed(routing.aux_loss, routing.z_loss, routing.load)
        y, routing = self._mixed(lax.all_gather(x, "expert", tiled=True))
        own = lax.dynamic_slice_in_dim(y, lax.axis_index("expert") * x.shape[0], x.shape[0])
        load = lax.psum(routing.load, AXES) // lax.axis_size("expert")  # each device of that axis has counted the same
        return own, Routed(self._balance(x, load), lax.pmean(routing.z_loss, AXES), load)

    def _balance(self, x: jax.Array, load: jax.Array) -> jax.Array:
        """aux_loss of all devices' tokens. Not a mean over devices: it multiplies two means over tokens."""
        assert isinstance(self.moe.router, Router)
        tokens = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        # In the precision of the router.
        logits = jnp.matmul(tokens, self.moe.router.kernel[...], precision=lax.Precision.HIGHEST)
        scores = jax.nn.softmax(logits)
        return self.config.experts * jnp.sum(load / jnp.sum(load) * lax.pmean(jnp.mean(scores, axis=0), AXES))

    def _mixed(self, x: jax.Array) -> tuple[jax.Array, jaxops.Routing]:
        return self.moe(x) if self.config.recipe is None else self._in_fp8(x)

    def _in_fp8(self, x: jax.Array) -> tuple[jax.Array, jaxops.Routing]:
        """Recipe "delayed" becomes tensorwise: groups have no history."""
        c, moe, tokens = self.config, self.moe, x.reshape(-1, x.shape[-1])
        routing = moe.router(tokens)
        offsets, own = routing.group_offsets, moe.gate.shape[0]
        if self.sharded:
            offsets = lax.dynamic_slice_in_dim(offsets, lax.axis_index("expert") * own, own + 1)
        assert c.recipe is not None
        recipe = "tensorwise" if c.recipe == "delayed" else c.recipe
        multiply = functools.partial(jaxops.fp8_grouped_matmul, group_offsets=offsets, recipe=recipe, backend=c.backend)
        rows = jaxops.permute(tokens, routing)
        gate, up = multiply(rows, moe.gate[...]), multiply(rows, moe.up[...])
        down = multiply(jax.nn.silu(gate) * up, moe.down[...])
        # Partial sums of the devices are added in float32 and rounded once, as on one device.
        y = (
            lax.psum(jaxops.combine(down, routing, out_dtype=jnp.float32), "expert").astype(down.dtype)
            if self.sharded
            else jaxops.combine(down, routing)
        )
        return y.reshape(x.shape), routing


class Block(nnx.Module):
    """Pre-norm attention, then a pre-norm gated unit or experts."""

    def __init__(self, config: DecoderConfig, *, sharded: bool = False, rngs: nnx.Rngs):
        norm = functools.partial(
            nnx.RMSNorm, config.width, epsilon=config.norm_epsilon, dtype=jnp.dtype(config.dtype), rngs=rngs
        )
        self.attention_norm = norm()
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = norm()
        self.mlp = Experts(config, sharded=sharded, rngs=rngs) if config.experts else GatedUnit(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, positions: jax.Array, attend: Attend
    ) -> tuple[jax.Array, Routed | None, KeysValues | None]:
        mixed, kept = self.attention(normalized(self.attention_norm, x), positions, attend)
        x = checkpoint_name(x + mixed, "middle")
        y, routed = self.mlp(normalized(self.mlp_norm, x))
        return x + y, routed, kept


class Decoder(nnx.Module):
    """Tokens in, logits of the next token out. The blocks' parameters are stacked.

    Args:
      sharded: whether it is called inside `models.mesh.split_objective`, with a device's parts of parameters and batch.
        Model and parameters are the same; `Routed` covers all devices' tokens.
    """

    def __init__(self, config: DecoderConfig, *, sharded: bool = False, rngs: nnx.Rngs):
        c = self.config = config
        self.sharded = sharded
        dtype = jnp.dtype(c.dtype)

        self.embed = nnx.Embed(
            c.vocab, c.width, embedding_init=nnx.initializers.normal(c.width**-0.5), dtype=dtype, rngs=rngs
        )
        self.blocks = stacked(lambda rngs: Block(c, sharded=sharded, rngs=rngs), c.layers, rngs)
        self.norm = nnx.RMSNorm(c.width, epsilon=c.norm_epsilon, dtype=dtype, rngs=rngs)
        self.head = (
            nnx.data(None) if c.tie_embeddings else nnx.Linear(c.width, c.vocab, use_bias=False, dtype=dtype, rngs=rngs)
        )
        self.use_running_average = False  # what `nnx.Module.eval` sets: then no state of the blocks is written

    def __call__(self, tokens: jax.Array, documents: jax.Array | None = None) -> tuple[jax.Array, Routed | None]:
        """tokens [B, T], document numbers [B, T] if rows are shared -> logits [B, T, vocab] float32, and `Routed`.

        Documents do not attend to each other, and each one's positions start at 0.
        """
        x, routed = self.hidden(tokens, documents)
        return self.logits(x), routed

    def hidden(self, tokens: jax.Array, documents: jax.Array | None = None) -> tuple[jax.Array, Routed | None]:
        """The input of `logits`, [B, T, width], from the model's inputs."""
        starts = document_starts(jnp.zeros_like(tokens) if documents is None else documents)
        positions, attend = positions_in(starts), self._attend(starts, shared=documents is not None)
        x, routed = apply_layers(
            self.blocks,
            lambda block, x: block(x, positions, attend)[:2],
            self._whole(self.embed)(tokens),
            policy=self.config.policy,
            unroll=self.config.unroll,
            training=not self.use_running_average,
            whole=gather if self.sharded else lambda params: params,
        )
        return x, routed

    def _attend(self, starts: jax.Array, shared: bool) -> Attend:
        """The attention function for documents that start there, of which several may share a row.

        Raises:
          ValueError: shared rows with cuDNN's attention, without max_documents.
        """
        c = self.config
        if c.attention == "xla":
            return within_documents(starts, starts.shape[1] if shared else 1, "xla")
        if not shared:
            return cudnn_rows
        if c.max_documents is None:
            raise ValueError(
                "attention is 'cudnn' and documents share rows: DecoderConfig.max_documents must say how many at the "
                "most."
            )
        return within_documents(starts, c.max_documents, "cudnn")

    def empty_cache(self, batch: int, length: int) -> KeysValues:
        """For `extend`: keys and values, [layers, batch, length, kv_heads, head_dim] in dtype."""
        c = self.config
        none = jnp.zeros((c.layers, batch, length, c.kv_heads, c.head_dim), c.dtype)
        return none, none

    def extend(
        self, tokens: jax.Array, cache: KeysValues, at: jax.Array, first: jax.Array
    ) -> tuple[jax.Array, KeysValues]:
        """tokens [B, T] after the cached ones -> (logits [B, vocab] float32 after the last token, the new cache).

        For inference.

        Args:
          cache: as of `empty_cache`; [B, first[b]:at] of row b are valid.
          at: int32, position of the first token, the same for all rows.
          first: [B] int32, start of each row; tokens before it pad a shorter prompt and are masked.
        """
        now = at + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        seen = jnp.arange(cache[0].shape[2], dtype=jnp.int32)
        mask = (seen[None, None, :] <= now[None, :, None]) & (seen[None, None, :] >= first[:, None, None])
        graphdef, state = nnx.split(self.blocks)

        def block(x: jax.Array, layer: tuple[nnx.State, KeysValues]) -> tuple[jax.Array, KeysValues]:
            state, (keys, values) = layer

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, KeysValues]:
                kept = (
                    jax.lax.dynamic_update_slice(keys, k, (0, at, 0, 0)),
                    jax.lax.dynamic_update_slice(values, v, (0, at, 0, 0)),
                )
                return jax.nn.dot_product_attention(q, *kept, mask=mask[:, None]), kept

            x, _, kept = nnx.merge(graphdef, state, copy=True)(x, now[None, :] - first[:, None], attend)
            assert kept is not None
            return x, kept

        x, cache = jax.lax.scan(block, self.embed(tokens), (state, cache))
        return self.logits(x[:, -1:])[:, 0], cache

    def logits(self, x: jax.Array) -> jax.Array:
        """[..., width] -> [..., vocab] float32."""
        x = self.norm(x)
        return (self._whole(self.embed).attend(x) if self.head is None else self._whole(self.head)(x)).astype(
            jnp.float32
        )

    def _whole(self, layer: AnyLayer) -> AnyLayer:
        if not self.sharded:
            return layer
        graphdef, params = nnx.split(layer)
        return nnx.merge(graphdef, gather(params))
