"""A decoder language model whose feed-forward blocks are mixtures of experts."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models.precision import grouped_linear_layer, linear_layer


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Sizes of a `MoELM`.

    Attributes:
      hidden: width inside one expert.
      context: tokens of a training sequence.
      vocab: 256, since the tokens are bytes.
      dtype: dtype of the computation; parameters, router and logits are float32.
      attention: implementation of `jax.nn.dot_product_attention`.
      recipe: of attention's and experts' matrix products in FP8; None leaves them in dtype. Embedding, router and logits are never in FP8.
      backend: of the experts' matrix products, and of all those in FP8.
    """

    layers: int
    width: int
    heads: int
    experts: int
    top_k: int
    hidden: int
    context: int
    vocab: int = 256
    tie_embeddings: bool = True
    rope_base: float = 10_000.0
    dtype: str = "float32"
    recipe: str | None = None
    attention: Literal["xla", "cudnn"] = "xla"
    backend: str = "auto"


class Routing(NamedTuple):
    """What the routers did: `balance` is the load-balancing loss (1 when uniform), `load` the share of the assignments that each expert got."""

    balance: jax.Array
    load: jax.Array


@jax.custom_vjp
def permute(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """`rows[order]` for a permutation and its inverse; the gradient is a gather too, where JAX would scatter and add."""
    return rows[order]


def _permute_fwd(rows, order, inverse):
    return rows[order], inverse


def _permute_bwd(inverse, ct):
    return ct[inverse], None, None


permute.defvjp(_permute_fwd, _permute_bwd)


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Rotary position embedding of x [B, T, heads, head_dim] (Su et al. 2021, arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    angle = jnp.outer(jnp.arange(x.shape[1], dtype=jnp.float32), base ** (-jnp.arange(half, dtype=jnp.float32) / half))
    sin, cos = jnp.sin(angle)[None, :, None], jnp.cos(angle)[None, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        self.config = config
        linear = linear_layer(config.recipe, config.backend)
        self.qkv = linear(config.width, 3 * config.width, use_bias=False, dtype=jnp.dtype(config.dtype), rngs=rngs)
        self.out = linear(config.width, config.width, use_bias=False, dtype=jnp.dtype(config.dtype), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        q, k, v = jnp.unstack(self.qkv(x).reshape(*x.shape[:2], 3, c.heads, c.width // c.heads), axis=2)
        mixed = jax.nn.dot_product_attention(rotate(q, c.rope_base), rotate(k, c.rope_base), v, is_causal=True, implementation=c.attention)
        return self.out(mixed.reshape(x.shape))


class MoE(nnx.Module):
    """SwiGLU experts behind a softmax top-k router. No token is dropped, nothing is padded, and no count is read by the host."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        dtype, grouped_linear = jnp.dtype(c.dtype), grouped_linear_layer(c.recipe, c.backend)
        self.router = nnx.Linear(c.width, c.experts, use_bias=False, dtype=jnp.float32, rngs=rngs)
        self.gate_up = grouped_linear(c.experts, c.width, 2 * c.hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.down = grouped_linear(c.experts, c.hidden, c.width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        """x: [tokens, width] -> ([tokens, width], Routing of this layer)."""
        tokens, k, E = x.shape[0], self.config.top_k, self.config.experts
        probs = jax.nn.softmax(self.router(x))
        weights, chosen = jax.lax.top_k(probs, k)
        weights /= jnp.sum(weights, axis=-1, keepdims=True)

        expert = chosen.reshape(-1)
        counts = jnp.bincount(expert, length=E)
        offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
        order = jnp.argsort(expert, stable=True)
        inverse = jnp.zeros_like(order).at[order].set(jnp.arange(tokens * k, dtype=order.dtype), unique_indices=True)

        rows = jnp.broadcast_to(x[:, None], (tokens, k, x.shape[1])).reshape(tokens * k, -1)
        gate, up = jnp.split(self.gate_up(permute(rows, order, inverse), offsets), 2, axis=-1)
        out = permute(self.down(jax.nn.silu(gate) * up, offsets), inverse, order)
        combined = jnp.einsum("tkd,tk->td", out.reshape(tokens, k, -1), weights.astype(out.dtype))

        # Switch Transformer (Fedus et al. 2021, arXiv:2101.03961), equation 4; for k > 1 as a share of all assignments.
        load = counts / (tokens * k)
        balance = E * jnp.sum(load * jnp.mean(probs, axis=0))
        return combined, Routing(balance, load)


class Block(nnx.Module):
    """Pre-norm attention, then pre-norm experts."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.attention_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.moe_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.moe = MoE(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        x = x + self.attention(self.attention_norm(x))
        out, routing = self.moe(self.moe_norm(x).reshape(-1, x.shape[-1]))
        return x + out.reshape(x.shape), routing


class MoELM(nnx.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        self.config = config
        dtype = jnp.dtype(config.dtype)
        self.embed = nnx.Embed(config.vocab, config.width, embedding_init=nnx.initializers.normal(config.width**-0.5), dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.head = None if config.tie_embeddings else nnx.Linear(config.width, config.vocab, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, Routing]:
        """tokens: [B, T] integers -> (logits [B, T, vocab] float32, Routing with balance [layers] and load [layers, experts])."""
        x = self.embed(tokens)
        routings = []
        for block in self.blocks:
            x, routing = block(x)
            routings.append(routing)
        x = self.norm(x)
        logits = self.embed.attend(x) if self.head is None else self.head(x)
        return logits.astype(jnp.float32), jax.tree.map(lambda *leaves: jnp.stack(leaves), *routings)


def loss_fn(model: MoELM, windows: jax.Array) -> tuple[jax.Array, Routing]:
    """Mean cross-entropy, in nats a byte, of predicting windows[:, 1:] from what stands before; windows is [B, T + 1] integers."""
    windows = windows.astype(jnp.int32)
    logits, routing = model(windows[:, :-1])
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), windows[:, 1:, None], axis=-1)
    return -jnp.mean(picked), routing


def generate(model: MoELM, prompt: jax.Array, key: jax.Array, length: int, temperature: float = 0.8) -> jax.Array:
    """Samples `length` bytes after prompt [T]. The whole window is computed again for each byte: slow, and simple."""

    def step(window, key):
        logits, _ = model(window[None])
        byte = jax.random.categorical(key, logits[0, -1] / temperature).astype(window.dtype)
        return jnp.append(window[1:], byte), byte

    return jax.lax.scan(step, prompt, jax.random.split(key, length))[1]
