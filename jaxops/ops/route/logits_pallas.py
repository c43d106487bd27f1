"""The router's product of few tokens as one Pallas kernel lowered through Triton, in float32 throughout."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.powers import power_of_2
from jaxops._lib.traced_once import traced_once

# A program has 8 experts, an L2 sector of each row of the kernel: few columns make many programs. Of 2,048 rows all
# loads are in flight at once, in 64 registers of a thread.
_COLUMNS, _ROWS, _WARPS = 8, 2048, 8


def _kernel(x_ref, kernel_ref, out_ref):
    """A program's token: its logits of some experts."""
    D, E = kernel_ref.shape
    columns, rows = min(_COLUMNS, power_of_2(E)), min(_ROWS, power_of_2(D))
    token = pl.program_id(1)
    column = pl.program_id(0) * columns + jnp.arange(columns, dtype=jnp.int32)

    def add(i, sums):
        row = i * rows + jnp.arange(rows, dtype=jnp.int32)
        x = plgpu.load(x_ref.at[token, row], mask=row < D, other=0.0)
        mask = (row < D)[:, None] & (column < E)[None, :]
        weight = plgpu.load(kernel_ref.at[row[:, None], column[None, :]], mask=mask, other=0.0)
        return sums + x.astype(jnp.float32)[:, None] * weight

    sums = lax.fori_loop(0, pl.cdiv(D, rows), add, jnp.zeros((rows, columns), jnp.float32))
    plgpu.store(out_ref.at[token, column], jnp.sum(sums, axis=0), mask=column < E)


@traced_once("interpret")
def logits_pallas(x: jax.Array, kernel: jax.Array, *, interpret: bool) -> jax.Array:
    """x [T, D] @ float32 kernel [D, E], float32. No size is 0. Each token reads the whole kernel, from L2 but once."""
    (T, D), E = x.shape, kernel.shape[1]
    return launch(
        _kernel,
        x,
        kernel,
        out=out_struct((T, E), jnp.float32, like=x),
        grid=(pl.cdiv(E, min(_COLUMNS, power_of_2(E))), T),
        warps=_WARPS,
        interpret=interpret,
        name="router_logits",
        flops=2 * T * D * E,
    )
