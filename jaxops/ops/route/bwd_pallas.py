"""The gradient of the logits in one pass over the tokens, as a Pallas kernel lowered through Triton. The scores are
recomputed from the logits."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.pallas.launch_pallas import launch_named
from jaxops._lib.planning.traced_once import traced_once
from jaxops.ops.route.columns_pallas import Columns, Scores, counted, each_choice, each_step, load_column
from jaxops.ops.route.plan import Spec, Tiles
from jaxops.ops.route.routing import Routing
from jaxops.ops.route.scores import loss_factors, shares_and_logsumexp


def _bwd_kernel(ref: dict, *, spec: Spec, tile: Tiles):
    (T, E), k = ref["logits"].shape, spec.k
    columns = Columns(E)
    experts, shape = columns.experts, (tile.step, columns.width)
    one = jnp.zeros((1, 1), jnp.int32)
    load = columns.load_vector(ref["load"], 0)
    tokens = jnp.sum(load, axis=1, keepdims=True, dtype=jnp.int32) // k if "mask" in ref else None
    of_aux, of_z = loss_factors(T, E, k, tokens)
    dshare = plgpu.load(ref["daux"].at[one]) * of_aux * load.astype(jnp.float32)
    dz = plgpu.load(ref["dz"].at[one]) * (2 * of_z)

    def body(row, exists, carry):
        row_in = counted(ref, row, exists)
        logits = columns.load(ref["logits"], row, row_in)
        row_scores = Scores.of(logits, spec)

        def add_choice(j, carry):
            dweights, member = carry
            column = load_column(ref["experts"], row, row_in, j, -1) == experts
            dweight = load_column(ref["dweights"], row, row_in, j, 0.0)
            if spec.capacity is not None:
                dweight = jnp.where(load_column(ref["row_positions"], row, row_in, j, T * k) < T * k, dweight, 0.0)
            return jnp.where(column, dweight, dweights), member | column

        dweights, member = each_choice(k, add_choice, (jnp.zeros(shape, jnp.float32), jnp.full(shape, False)))
        dweights = dweights * spec.weight_scale

        def through(shares, dshares):
            """The gradient of the logarithms whose exponentials over their sum are shares."""
            return shares * (dshares - jnp.sum(shares * dshares, axis=1, keepdims=True))

        dlogs = through(row_scores.shares, dshare)
        if spec.normalize:
            # A dropped choice has weight 0, but its score is in the sum that normalizes the others.
            weights, _ = shares_and_logsumexp(jnp.where(member, row_scores.logs, -jnp.inf))
            dlogs = dlogs + through(weights, dweights)
        elif spec.score == "softmax":
            dlogs = dlogs + through(row_scores.softmax, dweights)
        else:
            dlogs = dlogs + dweights * row_scores.scores
        dlogits = dlogs if spec.score == "softmax" else dlogs * (1 - row_scores.scores)
        dlogits = dlogits + row_scores.softmax * (dz * row_scores.logsumexp)
        if "mask" in ref:
            dlogits = jnp.where(row_in, dlogits, 0.0)
        columns.store(ref["dlogits"], row, exists, dlogits)
        return carry

    each_step(pl.program_id(0), tile, T, body, 0)


@traced_once("spec", "tile", "interpret")
def backward_pallas(
    spec: Spec, tile: Tiles, logits: jax.Array, mask: jax.Array | None, routing: Routing, cotangents: Routing, *,
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """The gradient of logits [T, E], in their dtype. T > 0."""
    operands: dict = {"logits": logits, "mask": mask, "experts": routing.experts, "load": routing.load}
    d = cotangents
    operands |= {"dweights": d.weights, "daux": d.aux_loss.reshape(1), "dz": d.z_loss.reshape(1)}
    if spec.capacity is not None:
        operands["row_positions"] = routing.row_positions
    kernel, out = functools.partial(_bwd_kernel, spec=spec, tile=tile), out_struct(logits.shape, logits.dtype, logits)
    options: dict = {"grid": (pl.cdiv(logits.shape[0], tile.rows),), "warps": tile.warps, "interpret": interpret}
    # A logit: about 8 for its scores, a comparison with each choice, 6 for its gradient.
    flops = logits.size * (8 + spec.k + 6)
    return launch_named(kernel, operands, {"dlogits": out}, **options, name="route_bwd", flops=flops)["dlogits"]
