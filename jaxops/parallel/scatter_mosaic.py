"""A product, then reduce-scatter of its rows, in one kernel; beside it, the all-gather of other rows."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxops._lib.manual_axes import vary_as
from jaxops.parallel.mainloop_mosaic import CONSUMERS, HALF, Place, Problem, call, consume, produce
from jaxops.parallel.plan import DEEP, HIGH, Tiles
from jaxops.parallel.sending_mosaic import Sender


def matmul_scatter(
    operands: tuple[tuple[jax.Array, jax.Array], ...],
    x: jax.Array | None,
    rows: jax.Array | None,
    axis_name: str,
    tiles: Tiles,
    *,
    transposed: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """([m, n], all devices' rows [devices * m', k] of x) of pairs h [devices * m, K] and w [K, n], or [n, K].

    The products of the pairs are summed. Other devices' rows are multiplied first and written, rounded, to the memory
    of the device that they belong to; it adds them in float32, in the order of the devices from itself on.

    Args:
      x: [m', k] rows that are gathered too: a backward pass needs them later. None for none, and None is returned.
      rows: as of `gather_matmul`.
    """
    devices = lax.axis_size(axis_name)
    h, w = operands[0]
    m, n, last = h.shape[0] // devices, w.shape[0 if transposed else 1], devices - 1
    p = Problem(axis_name, devices, m, n, tuple(h.shape[1] for h, _ in operands), transposed)
    down, across = p.tiles(tiles)

    def body(*refs_and_scratch):
        *refs, scratch = refs_and_scratch
        pairs = [(refs[2 * i], refs[2 * i + 1]) for i in range(len(operands))]
        refs = refs[2 * len(operands) :]
        bound_ref, refs = (None, refs) if rows is None else (refs[0], refs[1:])
        x_ref, refs = (None, refs) if x is None else (refs[0], refs[1:])
        y_ref, parts_ref, *gathered_ref = refs
        semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((2 * devices + 1,)))
        received, sent = (semaphores.at[pl.ds(i * devices, devices)] for i in range(2))
        own, thread = lax.axis_index(axis_name), lax.axis_index("warpgroup")
        owner = lambda phase: p.after(own, 1 + phase)
        empty = None
        if bound_ref is not None:
            empty = lambda place: owner(place.phase) * m + place.row >= bound_ref[0]
        parts = lambda place: jnp.where(
            (place.phase == last) if empty is None else (place.phase == last) & ~empty(place), last, 0
        )

        def load(pair, place: Place, k, a_smem, b_smem, barrier):
            h_ref, w_ref = pairs[pair]
            plgpu.copy_gmem_to_smem(
                h_ref.at[owner(place.phase), pl.ds(place.row, HIGH), pl.ds(k, DEEP)], a_smem, barrier
            )
            rows, columns = pl.ds(k, DEEP), pl.ds(place.column, tiles.wide)
            w_tile = w_ref.at[columns, rows] if transposed else w_ref.at[rows, columns]
            plgpu.copy_gmem_to_smem(w_tile, b_smem, barrier)

        def wait(source) -> None:
            """For all its parts. Without them this kernel may not end: the next one may use their memory."""
            pl.semaphore_wait(received.at[source], CONSUMERS * down * across, decrement=False)

        def load_parts(place: Place, step, slot_of):
            def of_device(number, step):
                source = owner(number)
                wait(source)

                def load_part(j, step):
                    slot, columns = slot_of(step), pl.ds(place.column + j * DEEP, DEEP)
                    part, barrier = parts_ref.at[source, pl.ds(place.row, HIGH), columns], scratch["full"].at[slot]
                    plgpu.copy_gmem_to_smem(part, scratch["a_smem"][0].at[slot], barrier)
                    plgpu.barrier_arrive(barrier)  # for the copy of w, which there is none of
                    return step + 1

                return lax.fori_loop(0, tiles.wide // DEEP, load_part, step)

            return lax.fori_loop(0, parts(place), of_device, step)

        def store(place: Place, row, column, smem):
            rows, columns = pl.ds(row, HALF), pl.ds(column, DEEP)

            @pl.when(place.phase == last)
            def _():
                plgpu.copy_smem_to_gmem(smem, y_ref.at[rows, columns])

            for phase in range(last):  # a peer's TMA descriptors are made on the host, which knows no phase
                there = plgpu.remote_ref(parts_ref, {axis_name: owner(jnp.int32(phase))})

                @pl.when(place.phase == phase)
                def _(there=there):
                    plgpu.copy_smem_to_gmem(smem, there.at[own, rows, columns])

        def stored(phase):
            @pl.when((phase >= 0) & (phase != last))
            def _():
                plgpu.wait_smem_to_gmem(0)
                pl.semaphore_signal(received.at[own], 1, device_id={axis_name: owner(phase)})

        @pl.when(thread < CONSUMERS)
        def _():
            consume(p, tiles, store, stored, empty, parts, scratch)

        @pl.when(thread == CONSUMERS)
        def _():
            sender = None if x_ref is None else Sender(p, tiles, x_ref, gathered_ref[0], sent, scratch)
            produce(p, tiles, semaphores.at[2 * devices], load, sender, None, empty, load_parts, scratch)
            for number in range(last):
                wait(owner(number))

    shapes = [(m, n), (devices, m, n), *([] if x is None else [(devices, *x.shape)])]
    inputs = [array for h, w in operands for array in (h.reshape(devices, m, h.shape[1]), w)]
    inputs += [] if rows is None else [jnp.reshape(rows, (1,))]
    inputs += [] if x is None else [x]
    out_types = [jax.ShapeDtypeStruct(shape, h.dtype) for shape in shapes]
    found = call("matmul_reduce_scatter", body, p, tiles, out_types)(*inputs)
    y, _, *gathered = (vary_as(jax.typeof(h), array) for array in found)
    return y, gathered[0].reshape(-1, gathered[0].shape[2]) if gathered else None
