"""The loss of a `Multimodal`: next-token loss on text and rectified flow on images."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.distributed.tensor_parallel import cross_entropies, own_rows, rows_at, total
from models.multimodal.experts import Routed
from models.multimodal.interleaved import Batch
from models.multimodal.model import Multimodal, layout_of


class Losses(NamedTuple):
    """Sums, and of how many rows."""

    text: jax.Array  # cross-entropies in nats
    predictions: jax.Array
    image: jax.Array  # mean squared errors of a drawn patch's velocity
    patches: jax.Array


def losses_of(
    model: Multimodal, batch: Batch, key: jax.Array, *, time_shift: float, reading_noise: float
) -> tuple[Losses, Routed]:
    """The sums of a batch's losses.

    Each image that is drawn has its own time, logit-normal (Esser et al. 2024, arXiv:2403.03206, section 3.1), and its
    target is the velocity noise - image (Liu et al. 2022, arXiv:2209.03003). An image that is read has no such loss, as
    in BAGEL.

    Args:
      time_shift: odds of noise to image at the median time, BAGEL's timestep_shift: above 1 more images are mostly
        noise. There the prompt matters: of small images little noise leaves visible what they are.
      reading_noise: the latest time of an image that is read, drawn evenly from 0; Transfusion trains with up to half
        of the noise, BAGEL with none.
    """
    drawn_key, read_key, noise_key = jax.random.split(key, 3)
    layout, S = layout_of(batch), batch.is_image.shape[0]
    time = jnp.where(
        batch.is_read,
        reading_noise * jax.random.uniform(read_key, (S,)),
        jax.nn.sigmoid(jax.random.normal(drawn_key, (S,)) + math.log(time_shift)),
    )
    patches = jnp.where(layout.of_image[:, None], batch.patches, 0)
    noise, at = jax.random.normal(noise_key, patches.shape), time[layout.segment][:, None]
    x, routed = model(batch._replace(patches=(1 - at) * patches + at * noise), time)
    errors = jnp.mean((model.velocities(x) - own_rows(noise - patches)) ** 2, axis=1)
    drawn = layout.of_image & ~batch.is_read[layout.segment]
    predicted = batch.targets >= 0
    text = cross_entropies(model.last_layer(), rows_at(x, batch.predicting), jnp.where(predicted, batch.targets, -1))
    image = total(jnp.sum(jnp.where(own_rows(drawn), errors, 0)))
    return Losses(text, jnp.sum(predicted), image, jnp.sum(drawn)), routed


def loss_fn(
    model: Multimodal, batch: Batch, key: jax.Array, *, image_weight: float, time_shift: float, reading_noise: float
) -> tuple[jax.Array, Routed]:
    """Mean over predicted tokens and drawn patches of a token's cross-entropy, and image_weight times a patch's error.

    A mean over both kinds of rows together: micro-batches and devices, weighted by their rows, so add up to the whole
    batch, whatever each one has of text and images.
    """
    losses, routed = losses_of(model, batch, key, time_shift=time_shift, reading_noise=reading_noise)
    loss = losses.text + image_weight * losses.image
    return loss / jnp.maximum(losses.predictions + losses.patches, 1), routed
