"""A block: attention, then a gated unit or experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.decoder.attention import Attention, KeysValues, LatentAttention, Seen, Window
from models.decoder.config import DecoderConfig
from models.decoder.experts import Experts, Routed
from models.decoder.weights import GatedUnit, normalized


class Block(nnx.Module):
    """Pre-norm attention, then a pre-norm gated unit, as in dense_layers, or experts."""

    def __init__(self, config: DecoderConfig, *, dense: bool = False, sharded: bool = False, rngs: nnx.Rngs):
        c = config
        norm = functools.partial(nnx.RMSNorm, c.width, epsilon=c.norm_epsilon, dtype=jnp.dtype(c.dtype), rngs=rngs)
        self.attention_norm = norm()
        self.attention = (Attention if c.latent is None else LatentAttention)(c, rngs=rngs)
        self.mlp_norm = norm()
        if c.experts and not dense:
            of_experts = c if c.fp8_experts else dataclasses.replace(c, recipe=None)
            self.mlp = Experts(of_experts, sharded=sharded, rngs=rngs)
        else:
            self.mlp = GatedUnit(c, c.dense_hidden if dense and c.dense_hidden else c.hidden, rngs=rngs)

    def __call__(
        self, x: jax.Array, seen: Seen, window: Window, mask: jax.Array | None = None
    ) -> tuple[jax.Array, Routed | None, KeysValues]:
        """Also what the router gave, and what `seen.remember` returned.

        Args:
          mask: which of own rows of x choose experts; None for all.
          window: int32 scalar or a number, how many tokens a token sees; None for all.
        """
        mixed, kept = self.attention(normalized(self.attention_norm, x), seen, window)
        x = checkpoint_name(x + mixed, "middle")
        y, routed = self.mlp(normalized(self.mlp_norm, x), mask)
        return x + y, routed, kept
