"""The router's product of few tokens as one Pallas kernel lowered through Triton, in float32 throughout."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.arrays.sums import steps_of_part, sum_of_parts
from jaxops._lib.pallas.launch_pallas import launch
from jaxops._lib.planning.traced_once import traced_once

# Reading the kernel takes nearly all of the time, and one program's loads are too few for it: sums over D are split. A
# program has 32 experts, which are whole lines of memory, of 128 rows, and so 32 numbers a thread in flight.
_COLUMNS, _ROWS, _MOST_PARTS, _WARPS = 32, 128, 16, 4


def _kernel(x_ref, kernel_ref, out_ref):
    """A program's token and part of D: its sums for some experts."""
    (D, E), parts = kernel_ref.shape, out_ref.shape[0]
    columns, rows = min(_COLUMNS, power_of_2(E)), min(_ROWS, power_of_2(D))
    token, part = pl.program_id(1), pl.program_id(2)
    column = pl.program_id(0) * columns + jnp.arange(columns, dtype=jnp.int32)
    first, steps = steps_of_part(pl.cdiv(D, rows), parts, part)

    def add(i, sums):
        row = i * rows + jnp.arange(rows, dtype=jnp.int32)
        x = plgpu.load(x_ref.at[token, row], mask=row < D, other=0.0)
        mask = (row < D)[:, None] & (column < E)[None, :]
        weight = plgpu.load(kernel_ref.at[row[:, None], column[None, :]], mask=mask, other=0.0)
        return sums + x.astype(jnp.float32)[:, None] * weight

    sums = lax.fori_loop(first, first + steps, add, jnp.zeros((rows, columns), jnp.float32))
    plgpu.store(out_ref.at[part, token, column], jnp.sum(sums, axis=0), mask=column < E)


@traced_once("interpret")
def logits_pallas(x: jax.Array, kernel: jax.Array, *, interpret: bool) -> jax.Array:
    """x [T, D] @ float32 kernel [D, E], float32. No size is 0. Each token reads the whole kernel, from L2 but once."""
    (T, D), E = x.shape, kernel.shape[1]
    parts = min(_MOST_PARTS, pl.cdiv(D, _ROWS))
    sums = launch(
        _kernel,
        x,
        kernel,
        out=out_struct((parts, T, E), jnp.float32, like=x),
        grid=(pl.cdiv(E, min(_COLUMNS, power_of_2(E))), T, parts),
        warps=_WARPS,
        interpret=interpret,
        name="router_logits",
        flops=2 * T * D * E,
    )
    return sum_of_parts(sums)
