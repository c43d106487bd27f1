"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), and its scaling for long texts."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.decoder.config import DecoderConfig, RopeScaling


class Turns(NamedTuple):
    """cos, sin: [B, T, rotary / 2] float32, of each token's angles."""

    cos: jax.Array
    sin: jax.Array


def turns(config: DecoderConfig, positions: jax.Array, lengths: jax.Array) -> Turns:
    """The angles at positions [B or 1, T] of texts whose lengths are given, likewise."""
    scaling, base, half = config.rope_scaling, config.rope_base, config.rotary // 2
    exponents = np.arange(half, dtype=np.float32) / half
    if scaling is not None and scaling.kind == "dynamic":
        over = jnp.maximum(lengths / scaling.original_length, 1.0)
        bases = base * (scaling.factor * over - (scaling.factor - 1)) ** (half / max(half - 1, 1))
        frequencies = bases[:, :, None] ** -exponents[None, None, :]
    else:
        frequencies = jnp.asarray(_scaled(scaling, base, (base**-exponents).astype(np.float32)))[None, None, :]
    angles = positions[:, :, None].astype(jnp.float32) * frequencies
    magnitude = 1.0 if scaling is None else scaling.magnitude
    return Turns(magnitude * jnp.cos(angles), magnitude * jnp.sin(angles))


def _scaled(scaling: RopeScaling | None, base: float, frequencies: np.ndarray) -> np.ndarray:
    if scaling is None:
        return frequencies
    slower = frequencies / scaling.factor
    if scaling.kind == "llama3":
        rounds = scaling.original_length * frequencies / (2 * math.pi)
        kept = np.clip((rounds - scaling.low) / (scaling.high - scaling.low), 0, 1)
    elif scaling.kind == "yarn":
        dim = 2 * len(frequencies)
        # The dimension whose angle turns `rounds` times in original_length tokens.
        where = lambda rounds: dim * math.log(scaling.original_length / (rounds * 2 * math.pi)) / (2 * math.log(base))
        first, last = where(scaling.fast), where(scaling.slow)
        if scaling.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        last = last + 0.001 if first == last else last
        kept = 1 - np.clip((np.arange(len(frequencies)) - first) / (last - first), 0, 1)
    else:
        kept = 0.0
    return (kept * frequencies + (1 - kept) * slower).astype(np.float32)


def rotate(x: jax.Array, turns: Turns, *, pairs: bool = False) -> jax.Array:
    """x [B, T, heads, head_dim], with the first features turned by their token's angles.

    Args:
      pairs: whether a pair's features are neighbours; the result has them half apart all the same, which changes no
        product of a query and a key.
    """
    cos, sin = (t[:, :, None, :] for t in turns)
    rotary = 2 * cos.shape[-1]
    turned, rest = jnp.split(x, [rotary], axis=-1)
    turned = turned.astype(jnp.float32)
    a, b = (turned[..., 0::2], turned[..., 1::2]) if pairs else jnp.split(turned, 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return turned if rotary == x.shape[-1] else jnp.concatenate([turned, rest], axis=-1)
