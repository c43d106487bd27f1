"""Runs of rows to other devices' memory, by a kernel of copies alone.

A run is one piece of memory in both arrays, since it has whole rows. Programs claim shares of runs from a counter and
copy them in chunks through shared memory. None waits before all that it claimed is sent, so the kernel ends however few
of its programs run at a time. Then each waits until all shares of all devices have arrived.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxops._lib.arrays.manual_axes import vary_as
from jaxops._lib.planning.costs import Cost
from jaxops.parallel.mainloop_mosaic import COUNTER, SENT, claim_next, plgpu, wait_for
from jaxops.parallel.plan import MOST, ROW_BYTES
from jaxops.parallel.sending_mosaic import IN_A_ROW

# Two H200s, 67 MB to the other one: 192 us, with 64 programs and chunks of 32 KB 245 (2026-11-29).
PROGRAMS, SHARES, SLOTS, CHUNK_BYTES = 128, 64, 4, 16_384


def send_runs(
    operands: tuple[jax.Array, ...], at: jax.Array, sizes: jax.Array, theirs: jax.Array, R: int, axes: tuple[str, ...]
) -> tuple[jax.Array, ...]:
    """[R, D] of each operand [S, D]: rows at[d] to at[d] + sizes[d] - 1 are written to the result of device d of the
    mesh axes, from its row theirs[d] on. Rows of the result that no device sends are unspecified.

    Args:
      at, sizes, theirs: int32 [devices]; the rows lie inside of both arrays. A row of all operands has at most
        ROW_BYTES, with each operand's filled up to a multiple of 128.
    """
    devices, S = lax.axis_size(axes), operands[0].shape[0]
    columns = [x.shape[1] for x in operands]
    # Copies are multiples of 128 bytes.
    operands = tuple(jnp.pad(x, ((0, 0), (0, -x.shape[1] % (128 // x.dtype.itemsize)))) for x in operands)
    widths = [x.shape[1] * x.dtype.itemsize for x in operands]
    rows = max(1, min(CHUNK_BYTES // max(widths), S, R))  # of a chunk
    slots = max(1, min(SLOTS, ROW_BYTES // sum(widths)))  # fewer for rows that are wider than a chunk

    def body(*refs):
        x_refs, refs = refs[: len(operands)], refs[len(operands) :]
        (at_ref, sizes_ref, theirs_ref), refs = refs[:3], refs[3:]
        out_refs, refs = refs[: len(operands)], refs[len(operands) :]
        *smems, loaded, tile_smem = refs
        semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((SENT + MOST,)))
        own = jnp.int32(0)
        for name in axes:
            own = own * lax.axis_size(name) + lax.axis_index(name)

        def place(device):
            numbers = {}
            for name in reversed(axes):
                size = jnp.int32(lax.axis_size(name))
                numbers[name], device = lax.rem(device, size), lax.div(device, size)
            return numbers

        def copy(target, count, source_row, target_row, slot):
            barrier, parts = loaded.at[slot], [smem.at[slot, pl.ds(0, count)] for smem in smems]
            for x_ref, part in zip(x_refs, parts, strict=True):
                plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(source_row, count)], part, barrier, **IN_A_ROW)
            plgpu.barrier_wait(barrier)
            for out_ref, part in zip(out_refs, parts, strict=True):
                there = plgpu.remote_ref(out_ref, place(target))
                plgpu.copy_smem_to_gmem(part, there.at[pl.ds(target_row, count)], commit_group=False)
            plgpu.commit_smem_to_gmem_group()

        def send(share, sent):
            target = lax.rem(own + 1 + lax.div(share, jnp.int32(SHARES)), jnp.int32(devices))
            number = lax.rem(share, jnp.int32(SHARES))
            first, size, to = at_ref[target], sizes_ref[target], theirs_ref[target]
            whole = size >= rows  # the last chunk begins early enough to end with the run: some rows are sent twice
            chunks = jnp.where(whole, lax.div(size + rows - 1, jnp.int32(rows)), size)
            each, more = lax.div(chunks, jnp.int32(SHARES)), lax.rem(chunks, jnp.int32(SHARES))
            begin = number * each + jnp.minimum(number, more)
            end = begin + each + (number < more).astype(jnp.int32)

            def one(chunk, sent):
                slot = lax.rem(sent, jnp.int32(slots))
                plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)

                @pl.when(whole)
                def _():
                    row = jnp.minimum(chunk * rows, size - rows)
                    copy(target, rows, first + row, to + row, slot)

                @pl.when(jnp.logical_not(whole))
                def _():
                    copy(target, 1, first + chunk, to + chunk, slot)

                return sent + 1

            sent = lax.fori_loop(begin, end, one, sent)
            plgpu.wait_smem_to_gmem(0)
            pl.semaphore_signal(semaphores.at[SENT + own], 1, device_id=place(target))
            return sent

        def claim():
            claim_next(semaphores.at[COUNTER], tile_smem)
            return tile_smem[0]

        def step(state):
            share, sent = state
            sent = send(share, sent)
            return claim(), sent

        lax.while_loop(lambda state: state[0] < devices * SHARES, step, (claim(), jnp.int32(0)))
        for source in range(devices):
            wait_for(semaphores.at[SENT + source], SHARES)

    def kernel(*refs):
        with Cost.detached():
            body(*refs)

    kernel.__name__ = "send_runs"
    out_type = [jax.ShapeDtypeStruct((R, x.shape[1]), x.dtype) for x in operands]
    launch = plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=[
            *(plgpu.SMEM((slots, rows, x.shape[1]), x.dtype) for x in operands),
            plgpu.Barrier(num_arrivals=len(operands), num_barriers=slots),
            plgpu.SMEM((1,), jnp.int32),
        ],
        grid=(PROGRAMS,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    given = [*operands, at, sizes, theirs]
    with jax.enable_x64(False), Cost.of(0, given, out_type, None).attached():
        outs = launch(*given)
    return tuple(vary_as(jax.typeof(x), y)[:, :D] for x, y, D in zip(operands, outs, columns, strict=True))
