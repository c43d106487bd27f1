"""The loss of a decoder language model."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from models.decoder import Decoder, Routed
from models.packing import Batch

LOGITS = 1 << 28  # 1 GB, of 8,192 tokens with 32,768 logits each


def loss_fn(model: Decoder, batch: Batch, packed: bool = True) -> tuple[jax.Array, Routed | None]:
    """Mean cross-entropy, in nats a token, of the counted predictions of rows [B, T].

    Not counted: padding, predictions across the end of a document, and those that `Batch.scored` leaves out.

    Args:
      packed: whether a row may hold several documents, which then do not attend to each other. Otherwise attention
        needs no mask: padding is at the end.
    """
    x, routed = model.hidden(batch.tokens.astype(jnp.int32), batch.documents if packed else None)
    targets = batch.targets.astype(jnp.int32).ravel()
    losses = cross_entropies(model.logits, model.config.vocab, x.reshape(-1, x.shape[-1]), targets)
    return jnp.sum(jnp.where(batch.counts().ravel(), losses, 0.0)) / jnp.maximum(batch.counted(), 1), routed


def cross_entropies(
    logits: Callable[[jax.Array], jax.Array], vocab: int, x: jax.Array, targets: jax.Array
) -> jax.Array:
    """Cross-entropies [N] in nats of logits(x) [N, vocab] and targets [N].

    At most `LOGITS` logits are in memory: long batches are computed in pieces, and again in the backward.
    """
    N, rows = x.shape[0], max(1, LOGITS // vocab)

    def of(piece: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, targets = piece
        return -jnp.take_along_axis(jax.nn.log_softmax(logits(x)), targets[:, None], axis=1)[:, 0]

    if rows >= N:
        return of((x, targets))
    rows = -(-N // -(-N // rows))  # of as many pieces equal ones
    pieces = [
        jnp.pad(a, ((0, -N % rows), *[(0, 0)] * (a.ndim - 1))).reshape(-1, rows, *a.shape[1:]) for a in (x, targets)
    ]
    return jax.lax.map(jax.checkpoint(of, prevent_cse=False), tuple(pieces)).ravel()[:N]
