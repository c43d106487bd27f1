"""The loss of a decoder language model."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from models.data.packing import Batch
from models.decoder import Decoder, Routed
from models.distributed.tensor_parallel import devices, nats

LOGITS = 1 << 28  # 1 GB, of 8,192 tokens with 32,768 logits each


def loss_fn(model: Decoder, batch: Batch, packed: bool = True) -> tuple[jax.Array, Routed | None]:
    """Mean cross-entropy, in nats a token, of the counted predictions of rows [B, T].

    Not counted: padding, predictions across the end of a document, and those that `Batch.scored` leaves out.

    Args:
      packed: as of `Decoder.hidden`.
    """
    x, routed = model.hidden(batch.tokens.astype(jnp.int32), batch.documents, packed=packed)
    targets = batch.targets.astype(jnp.int32).ravel()
    logits = functools.partial(model.logits, last=model.last_layer())
    losses = cross_entropies(logits, model.config.vocab, x.reshape(-1, x.shape[-1]), targets)
    return jnp.sum(jnp.where(batch.counts().ravel(), losses, 0.0)) / jnp.maximum(batch.counted(), 1), routed


def cross_entropies(
    logits: Callable[[jax.Array], jax.Array], vocab: int, x: jax.Array, targets: jax.Array
) -> jax.Array:
    """Cross-entropies [N] in nats of logits(x) [N, vocab] and targets [N].

    At most `LOGITS` logits are in memory: long batches are computed in pieces, and again in the backward. Over a mesh
    axis `tensor` x are own rows, and all devices get the cross-entropies of all rows.
    """
    own, rows = x.shape[0], max(1, LOGITS // vocab)

    def of(piece: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, targets = piece
        return nats(logits(x), targets)

    if rows >= own:
        return of((x, targets))
    rows = -(-own // -(-own // rows))  # of as many pieces equal ones

    def cut(a: jax.Array) -> jax.Array:
        """[devices, own, ...] -> [pieces, devices * rows, ...]: a piece has some rows of each device."""
        a = jnp.pad(a, ((0, 0), (0, -own % rows), *[(0, 0)] * (a.ndim - 2)))
        return a.reshape(a.shape[0], -1, rows, *a.shape[2:]).swapaxes(0, 1).reshape(-1, a.shape[0] * rows, *a.shape[2:])

    losses = jax.lax.map(jax.checkpoint(of, prevent_cse=False), (cut(x[None]), cut(targets.reshape(devices(), own))))
    return losses.reshape(-1, devices(), rows).swapaxes(0, 1).reshape(devices(), -1)[:, :own].ravel()
