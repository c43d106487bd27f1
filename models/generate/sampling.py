"""How the next token is drawn from the logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

LEAST = 1e-6  # logits over a lower temperature may be infinite in float32


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The order is temperature, top_k, top_p.

    Attributes:
      temperature: logits are divided by it; at 0 the likeliest token is taken, and of equal ones the first.
      top_k: draw from the top_k likeliest tokens; 0 for all.
      top_p: draw from the fewest likeliest tokens whose probabilities among those left add up to top_p or more; 1 for
        all. Holtzman et al. 2019, arXiv:1904.09751.

    Tokens as likely as the least likely one that is left are left, too.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if self.temperature != 0 and not LEAST <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0, or {LEAST} or more.")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 1 or more, or 0 for all tokens.")
        if not (np.float32(self.top_p) > 0 and self.top_p <= 1):
            raise ValueError(f"top_p is {self.top_p}; it must be above 0, and at most 1 for all tokens.")


def pick(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> jax.Array:
    """A token [B] int32 of each row of logits [B, vocab] float32, drawn with the row's own key of keys [B]."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = likeliest(logits / sampling.temperature, sampling)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def likeliest(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits [B, vocab] with -inf for the tokens that top_k and top_p leave out."""
    if 0 < sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        chances = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(chances, axis=-1) - chances  # the first token's is 0: one is always left
        least = jnp.min(jnp.where(before < sampling.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits
