"""The loss of a decoder language model."""

import jax
import jax.numpy as jnp

from models.data.packing import Batch
from models.decoder import Decoder, Routed
from models.distributed.tensor_parallel import cross_entropies


def loss_fn(model: Decoder, batch: Batch, packed: bool = True) -> tuple[jax.Array, Routed | None]:
    """Mean cross-entropy, in nats a token, of the counted predictions of rows [B, T]; packed: as of `Decoder.hidden`.

    Not counted: padding, predictions across the end of a document, and those that `Batch.scored` leaves out.
    """
    x, routed = model.hidden(batch.tokens.astype(jnp.int32), batch.documents, packed=packed)
    targets = jnp.where(batch.counts(), batch.targets.astype(jnp.int32), -1).ravel()
    total = cross_entropies(model.last_layer(), model.last_rows(x), targets)
    return total / jnp.maximum(batch.counted(), 1), routed
