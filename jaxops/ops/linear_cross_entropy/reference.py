"""linear_cross_entropy in plain jnp and float32."""

from typing import Any

import jax
import jax.numpy as jnp


def linear_cross_entropy_reference(a: dict[str, Any]) -> Any:
    """a: the parameters of the op by name."""
    w = a["w"].T if a["transpose_w"] else a["w"]
    logits = jnp.dot(a["x"], w, precision="highest") + (0.0 if a["bias"] is None else a["bias"][None])
    if a["soft_cap"] is not None:
        logits = a["soft_cap"] * jnp.tanh(logits / a["soft_cap"])
    log_sums, V = jax.nn.logsumexp(logits, axis=1), logits.shape[1]
    counts = a["targets"] != a["ignore_index"]
    smooth = a["label_smoothing"]
    wanted = (1 - smooth) * jax.nn.one_hot(a["targets"], V) + smooth / V
    losses = log_sums - jnp.sum(wanted * logits, axis=1) + a["z_loss"] * log_sums**2
    losses = jnp.where((a["targets"] >= 0) & (a["targets"] < V), losses, jnp.nan)
    losses, log_sums = jnp.where(counts, losses, 0.0), jnp.where(counts, log_sums, 0.0)
    if a["reduction"] == "none":
        return losses, log_sums
    weights = counts * (1.0 if a["weights"] is None else a["weights"])
    loss, total = jnp.sum(weights * losses), jnp.sum(weights)
    if a["reduction"] == "mean":
        loss = loss / jnp.where(total == 0, 1, total)
    return loss
