"""The gated unit of few gathered rows and weights stored in FP8, as one Pallas kernel lowered through Triton."""

import jax
import jax.numpy as jnp

from jaxops._lib.planning.traced_once import traced_once
from jaxops.ops.fp8_matmul import Operand, Side, Tiles, part_of_steps, sums_of_rows, unquantized
from jaxops.ops.grouped_glu import Unit, launch_unit


@traced_once("activation", "tiles", "interpret")
def unit_of_stored(
    x: jax.Array, weights: tuple[Operand, Operand], offsets: jax.Array, indices: jax.Array, *, activation: str,
    tiles: Tiles, interpret: bool,
) -> jax.Array:  # fmt: skip
    """h [M, F] in x's dtype: row m is the unit of x[indices[m]]; rows outside the groups are zeros. No size is 0.

    Args:
      x: [T, K].
      weights: gate's and up's, stacks [E, F, K].
      offsets: [E + 1].
      indices: [M].
    """
    (_, F, K), bn, rows_of_x = weights[0].values.shape, tiles.bn, unquantized(x)

    def products(refs, group, rows, j, count, number):
        exists = jnp.arange(rows.shape[0], dtype=jnp.int32) < count
        a = Side(0, refs[0], refs[1], rows_of_x.scaling, (), jnp.int32(0), rows, exists)
        columns = jnp.minimum(j * bn + jnp.arange(bn, dtype=jnp.int32), F - 1)
        scalings = enumerate((w.scaling for w in weights), 1)
        bs = [Side(1, refs[2 * n], refs[2 * n + 1], each, (group,), j * bn, columns) for n, each in scalings]
        first, steps = part_of_steps(tiles, K, number)
        return sums_of_rows(tiles, a, bs, first, jnp.minimum(count, 1) * steps)

    operands = [rows_of_x.values, rows_of_x.scales[None], *(part for w in weights for part in (w.values, w.scales))]
    unit = Unit("moe_mlp_stored_unit", (indices.shape[0], F), x.dtype, activation, tiles, interpret)
    return launch_unit(unit, products, operands, offsets, indices)[0]
