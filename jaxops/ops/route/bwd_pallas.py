"""The gradient of the logits in one pass over the tokens, as a Pallas kernel lowered through Triton. The scores are
recomputed from the logits."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.launch_pallas import launch_named
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.traced_once import traced_once
from jaxops.ops.route.columns_pallas import Columns, Scores, each_choice, each_step, load_column
from jaxops.ops.route.plan import TINY, Spec, Tiles
from jaxops.ops.route.routing import Routing


def _bwd_kernel(ref: dict, *, spec: Spec, tile: Tiles):
    (T, E), k = ref["logits"].shape, spec.k
    columns = Columns(E)
    experts, shape = columns.experts, (tile.step, columns.width)
    one = jnp.zeros((1, 1), jnp.int32)
    load = columns.load_vector(ref["load"], 0).astype(jnp.float32)
    dshare = plgpu.load(ref["daux"].at[one]) * (E / (T * T * k)) * load
    dz = plgpu.load(ref["dz"].at[one]) * (2 / T)

    def body(row, row_in, carry):
        found = Scores.of(columns.load(ref["logits"], row, row_in), spec)

        def add_choice(j, carry):
            dweights, member = carry
            column = load_column(ref["experts"], row, row_in, j, -1) == experts
            dweight = load_column(ref["dweights"], row, row_in, j, 0.0)
            if spec.capacity is not None:
                dweight = jnp.where(load_column(ref["row_positions"], row, row_in, j, T * k) < T * k, dweight, 0.0)
            return jnp.where(column, dweight, dweights), member | column

        dweights, member = each_choice(k, add_choice, (jnp.zeros(shape, jnp.float32), jnp.full(shape, False)))
        dscores = dweights * spec.weight_scale
        if spec.normalize:
            # A dropped choice has weight 0, but its score is in the sum that normalizes the others.
            sums = jnp.sum(jnp.where(member, found.scores, 0.0), axis=1, keepdims=True) + TINY
            mean = jnp.sum(dscores * found.scores, axis=1, keepdims=True) / sums
            dscores = jnp.where(member, (dscores - mean) / sums, 0.0)
        if spec.score == "softmax":
            dscores = dscores + dshare
            mean = jnp.sum(found.softmax * dscores, axis=1, keepdims=True)
            dlogits = found.softmax * (dscores - mean + dz * found.logsumexp)
        else:
            dscores = dscores + (dshare - jnp.sum(found.share * dshare, axis=1, keepdims=True)) / found.total
            dlogits = dscores * found.scores * (1 - found.scores) + found.softmax * (dz * found.logsumexp)
        columns.store(ref["dlogits"], row, row_in, dlogits)
        return carry

    each_step(pl.program_id(0), tile, T, body, 0)


@traced_once("spec", "tile", "interpret")
def backward_pallas(
    spec: Spec, tile: Tiles, logits: jax.Array, routing: Routing, cotangents: Routing, *, interpret: bool
) -> jax.Array:
    """The gradient of logits [T, E], in their dtype. T > 0."""
    operands = {"logits": logits, "experts": routing.experts, "load": routing.load, "dweights": cotangents.weights}
    operands |= {"daux": cotangents.aux_loss.reshape(1), "dz": cotangents.z_loss.reshape(1)}
    if spec.capacity is not None:
        operands["row_positions"] = routing.row_positions
    kernel, out = functools.partial(_bwd_kernel, spec=spec, tile=tile), out_struct(logits.shape, logits.dtype, logits)
    how: dict = {"grid": (pl.cdiv(logits.shape[0], tile.rows),), "warps": tile.warps, "interpret": interpret}
    # A logit: about 8 for its scores, a comparison with each choice, 6 for its gradient.
    flops = logits.size * (8 + spec.k + 6)
    return launch_named(kernel, operands, {"dlogits": out}, **how, name="route_bwd", flops=flops)["dlogits"]
