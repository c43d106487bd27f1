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
from jaxops.ops.route.plan import TINY, Spec, Tiles
from jaxops.ops.route.routing import Routing
from jaxops.ops.route.scores import loss_factors


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
        dscores, direct = dweights * spec.weight_scale, None

        def through(dvalues, values, small):
            """Splits a gradient of values: that of the scores, and that of the logits where values are not scores."""
            so_far = 0.0 if direct is None else direct
            return jnp.where(small, 0.0, dvalues), so_far + jnp.where(small, dvalues * values, 0.0)

        if spec.normalize:
            # A dropped choice has weight 0, but its score is in the sum that normalizes the others.
            values, small = row_scores.summable(row_scores.scores, jnp.where(member, logits, -jnp.inf), spec)
            sums = jnp.sum(jnp.where(member, values, 0.0), axis=1, keepdims=True) + TINY
            mean = jnp.sum(dscores * values, axis=1, keepdims=True) / sums
            dscores = jnp.where(member, (dscores - mean) / sums, 0.0)
            if small is not None:
                dscores, direct = through(dscores, values, small)
        if spec.score == "softmax":
            dscores = dscores + dshare
            mean = jnp.sum(row_scores.softmax * dscores, axis=1, keepdims=True)
            dlogits = row_scores.softmax * (dscores - mean + dz * row_scores.logsumexp)
        else:
            dvalues = (dshare - jnp.sum(row_scores.share * dshare, axis=1, keepdims=True)) / row_scores.total
            dvalues, direct = through(dvalues, row_scores.values, row_scores.small)
            dscores = dscores + dvalues
            dlogits = dscores * row_scores.scores * (1 - row_scores.scores) + row_scores.softmax * (
                dz * row_scores.logsumexp
            )
        if direct is not None:
            dlogits = dlogits + direct
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
