"""The gradient of the logits in one pass over the tokens, as a Pallas kernel lowered through Triton. The scores are found again from the logits."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.traced_once import traced_once
from jaxops.ops.route.columns_pallas import Columns, Scores, each, load_column, steps_of
from jaxops.ops.route.plan import TINY, Spec, Tiles
from jaxops.ops.route.routing import Cotangents, Saved


def _bwd_kernel(*refs, names: tuple[str, ...], spec: Spec, tile: Tiles):
    ref = dict(zip(names, refs, strict=True))
    (T, E), k = ref["logits"].shape, spec.k
    columns = Columns(E)
    experts, shape = columns.experts, (tile.step, columns.width)
    one = jnp.zeros((1, 1), jnp.int32)
    dshare = (
        plgpu.load(ref["daux"].at[one]) * (E / (T * T * k)) * columns.load_vector(ref["load"], 0).astype(jnp.float32)
    )
    dz = plgpu.load(ref["dz"].at[one]) * (2 / T)

    def body(row, row_in, carry):
        found = Scores.of(columns.load(ref["logits"], row, row_in), spec)

        def put(j, carry):
            dweights, member = carry
            mine = load_column(ref["experts"], row, row_in, j, -1) == experts
            dweight = load_column(ref["dweights"], row, row_in, j, 0.0)
            if spec.capacity is not None:
                dweight = jnp.where(load_column(ref["row_positions"], row, row_in, j, T * k) < T * k, dweight, 0.0)
            return jnp.where(mine, dweight, dweights), member | mine

        dweights, member = each(k, put, (jnp.zeros(shape, jnp.float32), jnp.full(shape, False)))
        dscores = dweights * spec.weight_scale
        if spec.normalize:
            # A dropped choice has no weight, but its score is in the sum that the others are divided by.
            sums = jnp.sum(jnp.where(member, found.scores, 0.0), axis=1, keepdims=True) + TINY
            mean = jnp.sum(dscores * found.scores, axis=1, keepdims=True) / sums
            dscores = jnp.where(member, (dscores - mean) / sums, 0.0)
        if spec.score == "softmax":
            dscores = dscores + dshare
            dlogits = found.softmax * (
                dscores - jnp.sum(found.softmax * dscores, axis=1, keepdims=True) + dz * found.logsumexp
            )
        else:
            dscores = dscores + (dshare - jnp.sum(found.share * dshare, axis=1, keepdims=True)) / found.total
            dlogits = dscores * found.scores * (1 - found.scores) + found.softmax * (dz * found.logsumexp)
        columns.store(ref["dlogits"], row, row_in, dlogits)
        return carry

    steps_of(pl.program_id(0), tile, T, body, 0)


@traced_once("spec", "tile", "interpret")
def backward_pallas(spec: Spec, tile: Tiles, saved: Saved, cotangents: Cotangents, *, interpret: bool) -> jax.Array:
    """The gradient of logits [T, E], in their dtype. T is not 0."""
    logits = saved.logits
    given = {"logits": logits, "experts": saved.experts, "load": saved.load} | (
        {} if spec.capacity is None else {"row_positions": saved.row_positions}
    )
    given |= {
        "dweights": cotangents.weights,
        "daux": cotangents.aux_loss.reshape(1),
        "dz": cotangents.z_loss.reshape(1),
    }
    return launch(
        functools.partial(_bwd_kernel, names=(*given, "dlogits"), spec=spec, tile=tile),
        *given.values(),
        out=out_struct(logits.shape, logits.dtype, like=logits),
        grid=(pl.cdiv(logits.shape[0], tile.rows),),
        warps=tile.warps,
        interpret=interpret,
        name="route_bwd",
    )
