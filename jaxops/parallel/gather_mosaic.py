"""All-gather of rows, then a product, in one kernel."""

import jax
from jax import lax
from jax.experimental import pallas as pl

from jaxops._lib.arrays.manual_axes import vary_as
from jaxops.parallel.mainloop_mosaic import (
    CONSUMERS,
    COUNTER,
    HALF,
    SENT,
    Place,
    Problem,
    bound_of,
    call,
    consume,
    load_w,
    plgpu,
    produce,
    whole_tiles,
)
from jaxops.parallel.plan import DEEP, HIGH, Tiles
from jaxops.parallel.sending_mosaic import Sender, chunk_of


def gather_matmul(
    x: jax.Array, w: jax.Array, rows: jax.Array | None, axis_name: str, tiles: Tiles, *, transposed: bool
) -> tuple[jax.Array, jax.Array]:
    """([devices * m, n], all devices' rows [devices * m, K]) of x [m, K] and w [K, n], or [n, K] if transposed.

    The own rows are multiplied first, while they are sent; then each other device's, when they are here.

    Args:
      rows: int32 scalar: the result is zero from this row on, without its products; x is zero there. None for all.
    """
    devices = lax.axis_size(axis_name)
    (m, depth), n = x.shape, w.shape[0 if transposed else 1]
    p = Problem(axis_name, devices, m, n, (depth,), transposed)

    def body(*refs_and_scratch):
        *refs, scratch = refs_and_scratch
        x_ref, w_ref, *bound, y_ref, gathered_ref = refs
        semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((SENT + devices,)))
        own, thread = lax.axis_index(axis_name), lax.axis_index("warpgroup")
        source = lambda place: p.after(own, place.phase)
        empty = (lambda place: source(place) * m + place.row >= bound[0][0]) if bound else None

        def load(_, place: Place, k, a_smem, b_smem, barrier):
            window = pl.ds(place.row, HIGH), pl.ds(k, DEEP)

            @pl.when(place.phase == 0)
            def _():
                plgpu.copy_gmem_to_smem(x_ref.at[window], a_smem, barrier)

            @pl.when(place.phase != 0)
            def _():
                plgpu.copy_gmem_to_smem(gathered_ref.at[(source(place), *window)], a_smem, barrier)

            load_w(p, tiles, w_ref, place, k, b_smem, barrier)

        def store(place: Place, me, piece, smem, _):
            rows, columns = pl.ds(place.row + me * HALF, HALF), pl.ds(place.column + piece * DEEP, DEEP)
            plgpu.copy_smem_to_gmem(smem, y_ref.at[source(place), rows, columns])

        @pl.when(thread < CONSUMERS)
        def _():
            consume(p, tiles, store, None, empty, None, scratch)

        @pl.when(thread == CONSUMERS)
        def _():
            sender = Sender(p, tiles, x_ref, gathered_ref, semaphores, scratch)

            def wait(place: Place, i, sent):
                # Otherwise a program whose first tile waits for another device's rows would send its own only later.
                sent = sender.send_all((i == 0) & (place.phase > 0), sent)
                pl.when(place.phase > 0)(lambda: sender.wait(source(place)))
                return sent

            produce(p, tiles, semaphores.at[COUNTER], load, sender, wait, empty, None, scratch)

    out_types = [jax.ShapeDtypeStruct((devices, m, columns), x.dtype) for columns in (n, depth)]
    results = call("all_gather_matmul", body, p, tiles, chunk_of(x), [x, whole_tiles(w), *bound_of(rows)], out_types)
    y, gathered = (vary_as(jax.typeof(x), array) for array in results)
    return y.reshape(devices * m, n), gathered.reshape(devices * m, depth)
