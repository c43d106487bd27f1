"""The decoder: embedding, stacked blocks, and the logits of the next token."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxops
from models.decoder.attention import KeysValues, Seen, Window, soft_attention
from models.decoder.block import Block
from models.decoder.cache import Places, write
from models.decoder.config import DecoderConfig
from models.decoder.experts import Routed
from models.decoder.rope import Turns, turns
from models.decoder.weights import dot_general, normalized
from models.distributed.mesh import Splits, varying, whole_part
from models.distributed.tensor_parallel import attend, devices, embed, own_rows, wide
from models.layers import apply_layers, options_of, stacked

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # of queries, keys and values
Cache = tuple[KeysValues, ...]  # of each layer


def document_starts(documents: jax.Array) -> jax.Array:
    """documents [B, T], which change where a document starts -> bool [B, T], True at document and row starts."""
    return jnp.concatenate([jnp.ones_like(documents[:, :1], bool), documents[:, 1:] != documents[:, :-1]], axis=1)


def positions_in(starts: jax.Array) -> jax.Array:
    """Each token's place in its own document, int32 [B, T]."""
    at = jnp.arange(starts.shape[1], dtype=jnp.int32)[None, :]
    return at - jax.lax.cummax(jnp.where(starts, at, 0), axis=1)


def lengths_of(starts: jax.Array) -> jax.Array:
    """The length of each token's own document, int32 [B, T]."""
    T = starts.shape[1]
    at = jnp.arange(T, dtype=jnp.int32)[None, :]
    next_start = jnp.where(starts, at, T)[:, 1:]
    next_start = jnp.concatenate([next_start, jnp.full_like(at[:, :1], T, shape=(starts.shape[0], 1))], axis=1)
    end = jax.lax.cummin(next_start, axis=1, reverse=True)
    return end - at + positions_in(starts)


def within_documents(starts: jax.Array, max_documents: int, backend: str) -> Attend:
    """Causal attention within documents: all rows are one packing of them. NaN if there are more."""
    size = starts.shape[0] * max_documents + 1
    offsets = jnp.nonzero(starts.ravel(), size=size, fill_value=starts.size)[0].astype(jnp.int32)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        flat_q, flat_k, flat_v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        how: dict[str, Any] = {"causal": True, "longest": starts.shape[1], "backend": backend}
        out = jaxops.packed_attention(flat_q, flat_k, flat_v, offsets, **how)
        return jnp.where(offsets[-1] == starts.size, out.reshape(q.shape), jnp.nan)

    return attend


class Decoder(nnx.Module):
    """Tokens in, logits of the next token out. The blocks' parameters are stacked.

    Attributes:
      blocks: all blocks; of a model with experts those that have them. By `models.generate.inference` a list of all,
        one by one.
      dense_blocks: the blocks of dense_layers, or None.

    Args:
      sharded: whether it is called inside `models.distributed.mesh.split_objective`, with a device's parts.
        Model and parameters are the same; `Routed` covers all devices' tokens. Over an axis `tensor` "rows" below are
        all B * T tokens.
    """

    def __init__(self, config: DecoderConfig, *, sharded: bool = False, rngs: nnx.Rngs):
        c = self.config = config
        self.sharded = sharded
        self.splits: Splits | None = None  # set by `models.distributed.mesh.over`
        dtype = jnp.dtype(c.dtype)

        self.embed = nnx.Embed(
            c.vocab, c.width, embedding_init=nnx.initializers.normal(c.width**-0.5), dtype=dtype, rngs=rngs
        )
        layers = c.stacks()
        self.blocks: Any = stacked(lambda rngs: Block(c, sharded=sharded, rngs=rngs), len(layers[0]), rngs)
        self.dense_blocks = nnx.data(None)
        if len(layers) == 2:
            self.dense_blocks = stacked(lambda rngs: Block(c, dense=True, rngs=rngs), len(layers[1]), rngs)
        self.norm = nnx.RMSNorm(c.width, epsilon=c.norm_epsilon, dtype=dtype, rngs=rngs)
        head = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, dot_general=dot_general, rngs=rngs)
        self.head = nnx.data(None) if c.tie_embeddings else head(c.width, c.vocab)
        self.use_running_average = False  # what `nnx.Module.eval` sets: then no state of the blocks is written

    def __call__(self, tokens: jax.Array, documents: jax.Array | None = None) -> tuple[jax.Array, Routed | None]:
        """tokens [B, T], document numbers [B, T] if rows are shared -> logits [B, T, vocab] float32, and `Routed`.

        Documents do not attend to each other, and each one's positions start at 0. Document -1 is padding: it chooses
        no experts, and is not in `Routed`.
        """
        x, routed = self.hidden(tokens, documents)
        return self.logits(x), routed

    def hidden(
        self, tokens: jax.Array, documents: jax.Array | None = None, *, packed: bool = True
    ) -> tuple[jax.Array, Routed | None]:
        """The input of `logits`, [B, T, width], from the model's inputs; over an axis `tensor` own rows [rows, width].

        Args:
          packed: whether a row may have several documents. Otherwise attention needs no mask: padding is at the end.

        Raises:
          ValueError: another attention than "xla" of documents without max_documents, or of a model that it does not
            compute; what an axis `tensor` does not divide.
        """
        c, T = self.config, tokens.shape[1]
        c.check_tensor(devices())
        mask = None if documents is None else self._mask(documents)
        documents = documents if packed else None
        starts = document_starts(jnp.zeros_like(tokens) if documents is None else documents)
        angles = turns(c, positions_in(starts), lengths_of(starts))
        seen = Seen(angles, lambda *own: own, self._attend(starts, documents))
        call = lambda block, x, window: block(x, seen, window, mask)[:2]
        x, how = embed(whole_part(self, "embed"), tokens, c.backend), options_of(self, "blocks", "dense_blocks")
        x, outs = apply_layers(self._stacks(), call, x, layers=c.stacks(), each=self._windows(T), **how)
        return x, outs[0].summed() if self.sharded and outs[0] is not None else outs[0]

    def _mask(self, documents: jax.Array) -> jax.Array:
        """Which of own rows are no padding, of their leading axes."""
        mask = documents >= 0
        if devices() > 1:
            mask = own_rows(mask.ravel())
        return varying(mask) if self.sharded else mask

    def _stacks(self) -> tuple[Block, ...]:
        return (self.blocks,) if self.dense_blocks is None else (self.blocks, self.dense_blocks)

    def _windows(self, longest: int) -> tuple[jax.Array | None, ...]:
        """For each stack how many tokens a token sees, int32 [layers]; None where no layer slides in `longest`."""
        c = self.config
        if c.window is None or c.window >= longest:
            return (None,) * len(c.stacks())
        sizes = [[c.window if layer in c.sliding_layers else longest for layer in layers] for layers in c.stacks()]
        return tuple(jnp.asarray(np.array(size, np.int32)) for size in sizes)

    def _attend(self, starts: jax.Array, documents: jax.Array | None):
        """Causal attention within documents [B, T] that start there; within rows without documents."""
        c, T = self.config, starts.shape[1]
        slides = c.window is not None and c.window < T
        if c.attention != "xla" and (slides or not c.plain_attention):
            raise ValueError(f"attention is {c.attention!r}, and the model has windows, sinks or latents: write xla.")
        plain = self._plain(starts, shared=documents is not None)
        at = jnp.arange(T, dtype=jnp.int32)

        def attention(q: jax.Array, k: jax.Array, v: jax.Array, window: Window, sinks: jax.Array | None) -> jax.Array:
            if c.plain_attention and window is None:
                return plain(q, k, v)
            before = (at[:, None] - at[None, :])[None]
            sees = before >= 0 if window is None else (before >= 0) & (before < window)
            sees = sees if documents is None else sees & (documents[:, :, None] == documents[:, None, :])
            return soft_attention(q, k, v, sees, sinks, scale=c.scale)

        return attention

    def _plain(self, starts: jax.Array, shared: bool) -> Attend:
        """Attention without windows, sinks and latents. shared: whether several documents share a row."""
        c = self.config
        documents = 1 if not shared else starts.shape[1] if c.attention == "xla" else c.max_documents
        if documents is None:
            raise ValueError(
                f"attention is {c.attention!r} and documents share rows: DecoderConfig.max_documents must say how many "
                "at the most."
            )
        return within_documents(starts, documents, c.attention)

    def layers(self) -> list[Block]:
        """All blocks in order, one by one."""
        if isinstance(self.blocks, nnx.List):
            return list(self.blocks)
        found: dict[int, Block] = {}
        for stack, numbers in zip(self._stacks(), self.config.stacks(), strict=True):
            graphdef, state = nnx.split(stack)
            for i, number in enumerate(numbers):
                found[number] = nnx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], state))
        return [found[number] for number in sorted(found)]

    def empty_cache(self, batch: int, length: int) -> Cache:
        """For `extend`: of each layer keys and values, [batch, kv_heads, length, head_dim] in dtype; with latent
        attention one array, [batch, length, rotary + rank]."""
        c = self.config
        sizes = ((batch, c.kv_heads, length, c.head_dim),) * 2
        if c.latent is not None:
            sizes = ((batch, length, c.rotary + c.latent.rank),)
        return tuple(tuple(jnp.zeros(size, c.dtype) for size in sizes) for _ in range(c.layers))

    def extend(
        self, tokens: jax.Array, cache: Cache, at: jax.Array, count: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        """tokens [B, T] after the cached ones -> (logits [B, vocab] after each row's last token, the new cache).

        For inference. Logits are float32. Layers are unrolled: a scan would copy each one's weights and cache out of
        the stacks.

        Args:
          cache: as of `empty_cache`; the first at[b] positions of row b are valid.
          at: [B] int32, the position of each row's first token. The cache must have room: at + count is its length at
            most.
          count: [B] int32, how many tokens of each row are valid, from its first; the others are padding and leave no
            trace. A row of none has meaningless logits.
          lengths: [B] int32, tokens of each row's text as far as they are known, for rope_scaling of kind "dynamic": a
            prompt that comes in pieces has all of its own. By default at + count.
        """
        c, (B, T) = self.config, tokens.shape
        places = Places.after(at, count, T)
        positions, valid = places
        lengths = at + count if lengths is None else lengths
        angles = turns(c, positions, jnp.broadcast_to(lengths[:, None], (B, T)))
        # All padding is the same vector in all layers, and so chooses the same experts: few more are read.
        x = jnp.where(valid[:, :, None], self.embed(tokens), 0)
        new = []
        for number, (block, past) in enumerate(zip(self.layers(), cache, strict=True)):
            window = c.window if number in c.sliding_layers else None
            remember = lambda *own, past=past: write(past, own, places)
            seen = Seen(angles, remember, self._cached_attention(places), self._of_a_token(angles, places, past))
            x, _, kept = block(x, seen, window)
            new.append(kept)
        last = jnp.maximum(count - 1, 0)[:, None, None]
        return self.logits(jnp.take_along_axis(x, last, axis=1))[:, 0], tuple(new)

    def _cached_attention(self, places: Places):
        """Attention over what is cached up to a token's own position. The result of padding is zero."""
        c, heads_first = self.config, self.config.latent is None

        def attention(q: jax.Array, k: jax.Array, v: jax.Array, window: Window, sinks: jax.Array | None) -> jax.Array:
            then = jnp.arange(k.shape[2 if heads_first else 1], dtype=jnp.int32)
            before = places.positions[:, :, None] - then[None, None, :]
            sees = before >= 0 if window is None else (before >= 0) & (before < window)
            sees = sees & places.valid[:, :, None]
            return soft_attention(q, k, v, sees, sinks, scale=c.scale, heads_first=heads_first)

        return attention

    def _of_a_token(self, angles: Turns, places: Places, past: KeysValues):
        """`_cached_attention` of one token a row, which also normalizes, rotates and writes the cache; None for what
        the op does not have."""
        c = self.config
        if places.positions.shape[1] != 1 or c.latent is not None or c.rope_pairs:
            return None
        at = jnp.where(places.valid, places.positions, -1)[:, 0]
        how: dict[str, Any] = {"scale": c.scale, "epsilon": c.norm_epsilon, "rotary": [turn[:, 0] for turn in angles]}
        how["backend"] = "xla" if c.backend == "xla" else "auto"

        def attention(qkv: jax.Array, norms: Any, window: int | None, sinks: jax.Array | None):
            qk_norm = None if norms is None else tuple(norm.scale[...] for norm in norms)
            before = None if window is None else window - 1
            more = {"qk_norm": qk_norm, "window": before, "sinks": sinks}
            k_cache, v_cache = past
            mixed, *kept = jaxops.cached_attention(qkv, k_cache, v_cache, at, **how, **more)
            return mixed[:, None], tuple(kept)

        return attention

    def last_layer(self) -> Any:
        """Whose products with `last_rows` are the logits."""
        return whole_part(self, "embed" if self.head is None else "head")

    def last_rows(self, x: jax.Array) -> jax.Array:
        return normalized(self.norm, x)

    def logits(self, x: jax.Array) -> jax.Array:
        """[..., width] -> [..., vocab] float32; over an axis `tensor` own rows -> all rows, own words."""
        x, last = self.last_rows(x), self.last_layer()
        logits = attend(last, x) if self.head is None else wide(x, last)[0]
        return logits.astype(jnp.float32)
