"""A block's attention: its projections, and the product of queries with keys and values."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxops.offload import named
from models.decoder.config import DecoderConfig
from models.decoder.rope import Turns, rotate
from models.decoder.weights import SideBySide, linear_of, matrix_of, normalized
from models.distributed.tensor_parallel import all_rows, narrow, wide

KeysValues = tuple[jax.Array, ...]  # keys and values; of latent attention one array
NAME = "attention"  # of what its backward needs (`jaxops.offload`)
Window = jax.Array | int | None  # how many tokens a token sees; None for all


class Seen(NamedTuple):
    """What the tokens of a call see of each other and of those before.

    Attributes:
      turns: the tokens' rotary angles.
      remember: from what a layer keeps of these tokens, arrays [B, T, ...], to the same of all tokens so far.
      attend: (queries, keys, values, window or None, sinks or None) -> what each token attends to, [B, T, heads, ...].
      at_once: all in one, of a single token a row: (queries, keys and values [B, heads, head_dim] side by side, the
        norms of queries' and keys' heads or None, window or None, sinks or None) -> (what each token attends to, what
        remember returns). It normalizes and rotates, too. None where there is no such op.
    """

    turns: Turns
    remember: Callable[..., KeysValues]
    attend: Callable[[jax.Array, jax.Array, jax.Array, Window, jax.Array | None], jax.Array]
    at_once: Callable[..., tuple[jax.Array, KeysValues]] | None = None


def soft_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, sinks: jax.Array | None, *, scale: float,
    heads_first: bool = False,
) -> jax.Array:  # fmt: skip
    """Softmax attention with what `jax.nn.dot_product_attention` lacks. Residuals are named "attention".

    Args:
      q: [B, T, heads, head_dim].
      k, v: [B, S, kv_heads, head_dim] and [B, S, kv_heads, value_dim]; if heads_first, [B, kv_heads, S, ...], of which
        the products need no transposed copy.
      mask: bool, [B or 1, T, S].
      sinks: [heads], a logit beside those of the keys, without a value; or None.
      scale: logits are scale * q @ k.
    """
    keys = "bksd" if heads_first else "bskd"

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, sinks: jax.Array | None) -> jax.Array:
        (B, T, heads, D), kv_heads = q.shape, k.shape[keys.index("k")]
        grouped = q.reshape(B, T, kv_heads, heads // kv_heads, D).transpose(0, 2, 3, 1, 4)
        logits = scale * jnp.einsum(f"bkgtd,{keys}->bkgts", grouped, k, preferred_element_type=jnp.float32)
        logits = jnp.where(mask[:, None, None], logits, -0.7 * float(jnp.finfo(jnp.float32).max))
        most = jnp.max(logits, axis=-1, keepdims=True)
        if sinks is not None:
            sinks = sinks.astype(jnp.float32).reshape(1, logits.shape[1], -1, 1, 1)
            most = jnp.maximum(most, sinks)
        most = lax.stop_gradient(most)
        shares = jnp.exp(logits - most)
        total = jnp.sum(shares, axis=-1, keepdims=True)
        if sinks is not None:
            total = total + jnp.exp(sinks - most)
        shares = jnp.where(mask[:, None, None], shares / total, 0)
        mixed = jnp.einsum(f"bkgts,{keys}->bkgtd", shares.astype(v.dtype), v)
        return mixed.transpose(0, 3, 1, 2, 4).reshape(B, T, heads, -1)

    return named(attention, NAME)(q, k, v, mask, sinks)


class Attention(nnx.Module):
    """Self-attention with rotary positions and grouped queries.

    Over a mesh axis `tensor` each device attends with its own heads, to all rows.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        linear = functools.partial(linear_of(c), use_bias=c.qkv_bias, rngs=rngs)
        self.q = linear(c.width, c.heads * c.head_dim)
        self.k = linear(c.width, c.kv_heads * c.head_dim)
        self.v = linear(c.width, c.kv_heads * c.head_dim)
        self.qkv: SideBySide | None = nnx.data(None)  # instead of these: `join`
        self.out = linear_of(c)(c.heads * c.head_dim, c.width, use_bias=c.out_bias, rngs=rngs)
        norm = functools.partial(nnx.RMSNorm, epsilon=c.norm_epsilon, dtype=jnp.dtype(c.dtype), rngs=rngs)
        whole = c.qk_norm == "all_heads"
        self.q_norm: Any = norm(c.head_dim * (c.heads if whole else 1)) if c.qk_norm else nnx.data(None)
        self.k_norm: Any = norm(c.head_dim * (c.kv_heads if whole else 1)) if c.qk_norm else nnx.data(None)
        self.sinks = nnx.Param(jnp.zeros(c.heads, jnp.float32)) if c.sinks else nnx.data(None)

    def __call__(self, x: jax.Array, seen: Seen, window: Window) -> tuple[jax.Array, KeysValues]:
        """Also what `seen.remember` returns."""
        c, (B, T) = self.config, seen.turns.cos.shape[:2]
        parts, sinks = self._project(x), None if self.sinks is None else self.sinks[...]
        norms = (self.q_norm, self.k_norm) if c.qk_norm is True else None
        if seen.at_once is not None:
            qkv = jnp.concatenate(parts, axis=-1).reshape(B, -1, c.head_dim)
            mixed, kept = seen.at_once(qkv, norms, window, sinks)
        else:
            q, k, v = (part.reshape(B, T, -1, c.head_dim) for part in parts)
            if norms is not None:
                q, k = normalized(self.q_norm, q), normalized(self.k_norm, k)
            q, k = (rotate(part, seen.turns, pairs=c.rope_pairs) for part in (q, k))
            kept = k, v = seen.remember(k, v)
            mixed = seen.attend(q, k, v, window, sinks)
        return narrow(mixed.reshape(B, T, -1), self.out), kept

    def _project(self, x: jax.Array) -> list[jax.Array]:
        """Queries, keys and values of own heads, [B, T, heads * head_dim], without the norms of single heads."""
        c = self.config
        parts = wide(x, self.q, self.k, self.v) if self.qkv is None else self.qkv.parts(x)
        if c.qk_norm == "all_heads":
            parts[:2] = normalized(self.q_norm, parts[0]), normalized(self.k_norm, parts[1])
        if c.qkv_clip is not None:
            parts = [jnp.clip(part, -c.qkv_clip, c.qkv_clip) for part in parts]
        return parts


class LatentAttention(nnx.Module):
    """Multi-head latent attention; see `Latent`. A cache holds the common rotary keys and the latents, in one array.

    Many tokens attend to keys and values that are made of all latents. A single token a row, as in decoding, attends to
    the latents themselves, as one key and value for all heads: the products that would make keys and values are applied
    to its queries and to its result instead (DeepSeek-V2, section 2.1.2).

    Over a mesh axis `tensor` each device makes the latents of its own rows, and attends with its own heads.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        assert c.latent is not None
        latent = self.latent = c.latent
        linear = functools.partial(linear_of(c), rngs=rngs)
        norm = functools.partial(nnx.RMSNorm, epsilon=1e-6, dtype=jnp.dtype(c.dtype), rngs=rngs)
        rank = latent.query_rank
        self.q_down = nnx.data(None) if rank is None else linear(c.width, rank, use_bias=c.qkv_bias)
        self.q_norm = nnx.data(None) if rank is None else norm(rank)
        self.q = linear(rank or c.width, c.heads * c.head_dim, use_bias=False)
        self.kv_down = linear(c.width, latent.rank + c.rotary, use_bias=c.qkv_bias)
        self.kv_norm = norm(latent.rank)
        self.kv = linear(latent.rank, c.heads * (c.head_dim - c.rotary + latent.value_dim), use_bias=False)
        self.out = linear(c.heads * latent.value_dim, c.width, use_bias=c.out_bias)

    def __call__(self, x: jax.Array, seen: Seen, window: Window) -> tuple[jax.Array, KeysValues]:
        """Also what `seen.remember` returns."""
        c, (B, T) = self.config, seen.turns.cos.shape[:2]
        fixed = c.head_dim - c.rotary
        turned = functools.partial(rotate, turns=seen.turns, pairs=c.rope_pairs)
        q = x if self.q_down is None or self.q_norm is None else normalized(self.q_norm, self.q_down(x))
        (q,) = wide(q, self.q)
        q_fixed, q_turned = jnp.split(q.reshape(B, T, -1, c.head_dim), [fixed], axis=-1)
        latents, k_turned = jnp.split(self.kv_down(x), [self.latent.rank], axis=-1)
        k_turned, latents = all_rows(k_turned, normalized(self.kv_norm, latents))
        own = turned(k_turned.reshape(B, T, 1, -1))[:, :, 0], latents.reshape(B, T, -1)
        kept = seen.remember(jnp.concatenate(own, axis=-1))
        if T == 1 and c.recipe is None:
            mixed = self._attend_to_latents(turned(q_turned), q_fixed, kept[0], seen, window)
        else:
            q = jnp.concatenate([turned(q_turned), q_fixed], axis=-1)
            k_turned, latents = jnp.split(kept[0], [c.rotary], axis=-1)
            kv = self.kv(latents).reshape(*latents.shape[:2], -1, fixed + self.latent.value_dim)
            k_fixed, v = jnp.split(kv, [fixed], axis=-1)
            k_turned = jnp.broadcast_to(k_turned[:, :, None, :], (*k_fixed.shape[:3], c.rotary))
            mixed = seen.attend(q, jnp.concatenate([k_turned, k_fixed], axis=-1), v, window, None)
        return narrow(mixed.reshape(B, T, -1), self.out), kept

    def _attend_to_latents(
        self, q_turned: jax.Array, q_fixed: jax.Array, kept: jax.Array, seen: Seen, window: Window
    ) -> jax.Array:
        """kept [B, S, rotary + rank] -> [B, T, heads, value_dim]."""
        kv = matrix_of(self.kv, kept.dtype).reshape(self.latent.rank, q_fixed.shape[2], -1)
        to_k, to_v = jnp.split(kv, [q_fixed.shape[-1]], axis=-1)
        q = jnp.concatenate([q_turned, jnp.einsum("bthf,rhf->bthr", q_fixed, to_k)], axis=-1)
        # Values with the rotary keys before them: without would be a copy of the cache.
        mixed = seen.attend(q, kept[:, :, None], kept[:, :, None], window, None)[..., self.config.rotary :]
        return jnp.einsum("bthr,rhv->bthv", mixed, to_v)
