"""Both products across devices, each in one kernel with its communication: all-gather of rows, then a product; and a
product, then reduce-scatter of its rows, beside which other rows may be gathered."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxops._lib.arrays.manual_axes import vary_as
from jaxops.parallel.mainloop_mosaic import (
    CONSUMERS,
    COUNTER,
    HALF,
    PARTS,
    SENT,
    Place,
    Problem,
    bound_of,
    call,
    consume,
    load_w,
    plgpu,
    produce,
    wait_for,
    whole_tiles,
)
from jaxops.parallel.plan import DEEP, HIGH, Tiles
from jaxops.parallel.sending_mosaic import IN_A_ROW, Sender, chunk_of


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
    pieces = tiles.wide // DEEP

    def body(*refs_and_scratch):
        *refs, scratch = refs_and_scratch
        pairs = [(refs[2 * i], refs[2 * i + 1]) for i in range(len(operands))]
        refs = refs[2 * len(operands) :]
        bound_ref, refs = (None, refs) if rows is None else (refs[0], refs[1:])
        x_ref, refs = (None, refs) if x is None else (refs[0], refs[1:])
        y_ref, parts_ref, *gathered_ref = refs
        semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((PARTS + devices * down * across,)))
        part_of = lambda source, number: semaphores.at[PARTS + source * (down * across) + number]
        own, thread = lax.axis_index(axis_name), lax.axis_index("warpgroup")
        owner = lambda phase: p.after(own, 1 + phase)
        empty = None
        if bound_ref is not None:
            empty = lambda place: owner(place.phase) * m + place.row >= bound_ref[0]
        # An empty tile waits for its parts, too: the kernel must not end before they have arrived, because their memory
        # is then used for other things.
        awaited = lambda place: jnp.where(place.phase == last, last, 0)
        parts = awaited if empty is None else lambda place: jnp.where(empty(place), 0, awaited(place))

        def load(pair, place: Place, k, a_smem, b_smem, barrier):
            h_ref, w_ref = pairs[pair]
            plgpu.copy_gmem_to_smem(
                h_ref.at[owner(place.phase), pl.ds(place.row, HIGH), pl.ds(k, DEEP)], a_smem, barrier
            )
            load_w(p, tiles, w_ref, place, k, b_smem, barrier)

        def load_parts(place: Place, step, slot_of):
            def of_device(number, step):
                source = owner(number)
                wait_for(part_of(source, place.number), CONSUMERS)

                def load_part(piece, step):
                    slot = slot_of(step)
                    barrier = scratch["full"].at[slot]
                    plgpu.copy_gmem_to_smem(
                        parts_ref.at[source, place.number, piece], scratch["a_smem"][2].at[slot], barrier, **IN_A_ROW
                    )
                    plgpu.barrier_arrive(barrier)  # for the copy of w, which there is none of
                    return step + 1

                count = pieces if empty is None else jnp.where(empty(place), 0, pieces)
                return lax.fori_loop(0, count, load_part, step)

            return lax.fori_loop(0, awaited(place), of_device, step)

        def store(place: Place, me, piece, smem, in_a_row):
            @pl.when(place.phase == last)
            def _():
                rows, columns = pl.ds(place.row + me * HALF, HALF), pl.ds(place.column + piece * DEEP, DEEP)
                plgpu.copy_smem_to_gmem(smem, y_ref.at[rows, columns])

            @pl.when(place.phase != last)
            def _():
                there = plgpu.remote_ref(parts_ref, {axis_name: owner(place.phase)})
                plgpu.copy_smem_to_gmem(in_a_row, there.at[own, place.number, piece, pl.ds(me, 1)])

        def stored(phase, number):
            @pl.when((phase >= 0) & (phase != last))
            def _():
                plgpu.wait_smem_to_gmem(0)
                pl.semaphore_signal(part_of(own, number), 1, device_id={axis_name: owner(phase)})

        @pl.when(thread < CONSUMERS)
        def _():
            consume(p, tiles, store, stored, empty, parts, scratch)

        @pl.when(thread == CONSUMERS)
        def _():
            sender = None if x_ref is None else Sender(p, tiles, x_ref, gathered_ref[0], semaphores, scratch)
            produce(p, tiles, semaphores.at[COUNTER], load, sender, None, empty, load_parts, scratch)

    parts_shape = (devices, down * across, pieces, CONSUMERS, HALF * DEEP)
    shapes = [(m, n), parts_shape, *([] if x is None else [(devices, *x.shape)])]
    inputs = [array for h, w in operands for array in (h.reshape(devices, m, h.shape[1]), whole_tiles(w))]
    inputs += [*bound_of(rows), *([] if x is None else [x])]
    out_types = [jax.ShapeDtypeStruct(shape, h.dtype) for shape in shapes]
    results = call("matmul_reduce_scatter", body, p, tiles, (1, 8) if x is None else chunk_of(x), inputs, out_types)
    y, _, *gathered = (vary_as(jax.typeof(h), array) for array in results)
    return y, gathered[0].reshape(-1, gathered[0].shape[2]) if gathered else None
