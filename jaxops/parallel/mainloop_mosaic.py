"""What both collective products share: a persistent matrix product whose tiles are claimed in order.

Each program of a device has one warpgroup that loads tiles of 64 deep by TMA and sends rows to other devices, and two
that multiply. Programs claim tiles one by one from a counter. A tile waits only for other devices' work on tiles that
come before it in their order, so the kernel ends however few of its programs run, if any does: NCCL may hold
multiprocessors of one device and wait for those of another. Two such kernels must not run at once on a device; XLA runs
one after the other.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from jaxops._lib.planning.costs import Cost
from jaxops.parallel.plan import CONSUMERS, DEEP, HIGH, MOST, Tiles

plgpu: Any = mosaic_gpu  # the signatures of JAX 0.10, which pyright may read, differ
HALF = HIGH // CONSUMERS
# Semaphores: the tiles' counter, the first of those of sending devices, the first of those of tiles' parts.
COUNTER, SENT, PARTS = 0, 32, 32 + MOST
AHEAD = 2  # places for claimed tiles


@dataclasses.dataclass(frozen=True)
class Problem:
    """A product's sizes.

    Attributes:
      m: rows of a device.
      n: columns of the result.
      depths: contracted sizes, one for each pair of operands that is summed.
      transposed: whether w is [n, depth].
    """

    axis_name: str
    devices: int
    m: int
    n: int
    depths: tuple[int, ...]
    transposed: bool

    @property
    def steps(self) -> int:
        return sum(pl.cdiv(depth, DEEP) for depth in self.depths)

    def tiles(self, tiles: Tiles) -> tuple[int, int]:
        """How many tiles a device's rows have, down and across."""
        return pl.cdiv(self.m, HIGH), pl.cdiv(self.n, tiles.wide)

    def after(self, own, number):
        """The device that comes `number` after this one on the axis."""
        return lax.rem(own + number, jnp.int32(self.devices))


def call(
    name: str,
    body: Callable[..., None],
    p: Problem,
    tiles: Tiles,
    chunk: tuple[int, int],
    operands: list[jax.Array],
    out_types: list[jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    """The results of body(*refs, scratch), over all programs of a device. chunk: rows and columns sent at once."""
    dtype = out_types[0].dtype
    stages = tiles.stages
    scratch = {
        "a_smem": _views((stages, HIGH, DEEP), dtype),
        "b_smem": plgpu.SMEM(
            (stages, *((tiles.wide, DEEP) if p.transposed else (DEEP, tiles.wide))), dtype, transforms=_SWIZZLED
        ),
        "out_smem": _views((CONSUMERS, tiles.outputs, HALF, DEEP), dtype),
        "sent_smem": plgpu.SMEM((2, *chunk), dtype),
        "tile_smem": plgpu.SMEM((AHEAD,), jnp.int32),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        "loaded": plgpu.Barrier(num_barriers=2),
        "claimed": plgpu.Barrier(num_barriers=AHEAD),
        "taken": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=AHEAD),
    }

    def kernel(*refs, **scratch):
        with Cost.detached():
            body(*refs, scratch)

    kernel.__name__ = name
    launch = plgpu.kernel(
        kernel,
        out_type=out_types,
        scratch_types=scratch,
        grid=(tiles.programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    flops = 2 * p.devices * p.m * p.n * sum(p.depths)
    # Without x64, where every Python number and every index of a loop would be int64.
    with jax.enable_x64(False), Cost.of(flops, operands, out_types, None).attached():
        return launch(*operands)


_SWIZZLED = plgpu.TilingTransform((8, DEEP)), plgpu.SwizzleTransform(2 * DEEP)


def _views(shape: tuple[int, ...], dtype) -> Any:
    """Shared memory as TMA copies it, as wgmma and registers read and write it, and as bytes in a row.

    All are the same bytes: the array is one swizzled tile, 64 columns, wide. Mosaic's tiled copies take no arrays of a
    number of rows that is no multiple of 8, and another device's memory must be written in a row: see `sending_mosaic`.
    """
    copied = plgpu.SMEM(shape, dtype, transforms=_SWIZZLED[1:])
    written = plgpu.SMEM(shape, dtype, transforms=_SWIZZLED)
    return plgpu.RefUnion(copied, written, plgpu.SMEM((*shape[:-2], shape[-2] // HALF, HALF * DEEP), dtype))


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
def claim_next(_, counter, tile) -> None:
    """tile = counter, counter += 1, by the first thread of the warpgroup. Pallas has no atomic that returns a value."""
    asm = """{
      .reg .pred first; .reg .u32 lane, claimed;
      mov.u32 lane, %tid.x; and.b32 lane, lane, 127; setp.eq.u32 first, lane, 0;
      @first atom.global.add.u32 claimed, [$0], 1;
      @first st.shared.u32 [$1], claimed;
    }"""
    void = ir.Type.parse("!llvm.void")
    pointers = [utils.memref_ptr(counter), utils.memref_ptr(tile)]
    llvm.inline_asm(void, pointers, asm, "l,r", has_side_effects=True)
    utils.warpgroup_barrier()


@plgpu.inline_mgpu()
def _fence(_) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "fence.proxy.async;", "", has_side_effects=True)


def wait_for(semaphore, value: int) -> None:
    """Until the semaphore has this value. TMA may then read what was written before its signals."""
    pl.semaphore_wait(semaphore, value, decrement=False)
    _fence()


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tile lies.

    Attributes:
      phase: 0 for all devices' first tiles, and so on: each has one device's rows.
      number: in its phase.
      row, column: the first ones.
    """

    phase: jax.Array
    number: jax.Array
    row: jax.Array
    column: jax.Array


def _place(p: Problem, tiles: Tiles, tile) -> Place:
    down, across = p.tiles(tiles)
    phase, number = lax.div(tile, jnp.int32(down * across)), lax.rem(tile, jnp.int32(down * across))
    row, column = plgpu.planar_snake(number, (down, across), 0, tiles.group)
    return Place(phase, number, row * HIGH, column * tiles.wide)


def _each_tile(p: Problem, tiles: Tiles, body, init, scratch):
    """body(place, number of the tile in this program, carry) -> carry for this program's tiles."""
    down, across = p.tiles(tiles)

    def read(i):
        slot = lax.rem(i, jnp.int32(AHEAD))
        plgpu.barrier_wait(scratch["claimed"].at[slot])
        return scratch["tile_smem"][slot]

    def step(state):
        i, tile, carry = state
        carry = body(_place(p, tiles, tile), i, carry)
        return i + 1, read(i + 1), carry

    first = jnp.int32(0)
    state = first, read(first), init
    return lax.while_loop(lambda state: state[1] < p.devices * down * across, step, state)[2]


def bound_of(rows: jax.Array | None) -> list[jax.Array]:
    """The operand of a kernel that has `rows`; none without."""
    return [] if rows is None else [jnp.reshape(rows, (1,))]


def whole_tiles(w: jax.Array) -> jax.Array:
    """w with columns of zeros up to a multiple of 64, which Mosaic's tiled copies need. No copy if w has them."""
    return jnp.pad(w, ((0, 0), (0, more))) if (more := -w.shape[1] % DEEP) else w


def load_w(p: Problem, tiles: Tiles, w_ref, place: Place, k, smem, barrier) -> None:
    """Starts the copy of a step's tile of w."""
    rows, columns = pl.ds(k, DEEP), pl.ds(place.column, tiles.wide)
    plgpu.copy_gmem_to_smem(w_ref.at[columns, rows] if p.transposed else w_ref.at[rows, columns], smem, barrier)


def produce(p: Problem, tiles: Tiles, counter, load, sender, wait_for_rows, empty, load_parts, scratch) -> None:
    """The loading warpgroup.

    Args:
      load: (pair of operands, place, depth, a's shared memory, b's, barrier): starts two copies.
      sender: of rows, or None.
      wait_for_rows: (place, number of the tile in this program, the sender's state) -> its state: waits until the
        tile's rows are here; None if they always are.
      empty: (place) -> whether all its rows are past the bound.
      load_parts: (place, step, step -> slot) -> step: loads other devices' parts of the tile; None for none.
    """
    plgpu.set_max_registers(40, action="decrease")
    a_smem, b_smem, full, free = scratch["a_smem"][0], scratch["b_smem"], scratch["full"], scratch["free"]

    def claim(i):
        """This program's tile i. Claimed late: a program that started early would otherwise hold two early tiles."""
        slot = lax.rem(i, jnp.int32(AHEAD))
        pl.when(i >= AHEAD)(lambda: plgpu.barrier_wait(scratch["taken"].at[slot]))
        claim_next(counter, scratch["tile_smem"].at[slot])
        plgpu.barrier_arrive(scratch["claimed"].at[slot])

    def slot_of(step):
        slot = lax.rem(step, jnp.int32(tiles.stages))
        pl.when(step >= tiles.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
        return slot

    def of_tile(place: Place, i, carry):
        step, sent = carry
        if sender is not None:
            sent = sender.begin(place, sent)
        if wait_for_rows is not None:
            sent = wait_for_rows(place, i, sent)

        before = 0
        for operands, depth in enumerate(p.depths):

            def load_step(k, carry, operands=operands, before=before):
                step, sent = carry
                slot = slot_of(step)
                load(operands, place, k * DEEP, a_smem.at[slot], b_smem.at[slot], full.at[slot])
                return step + 1, sent if sender is None else sender.advance(before + k, sent)

            steps = pl.cdiv(depth, DEEP)
            count = steps if empty is None else jnp.where(empty(place), 0, steps)
            step, sent = lax.fori_loop(0, count, load_step, (step, sent))
            before += steps
        if sender is not None:
            sent = sender.end(sent)
        if load_parts is not None:
            step = load_parts(place, step, slot_of)
        claim(i + 1)  # after all that this tile waits for: meanwhile another program takes the next one
        return step, sent

    claim(jnp.int32(0))
    init = jnp.int32(0), jnp.int32(0) if sender is None else sender.start()
    _, sent = _each_tile(p, tiles, of_tile, init, scratch)
    if sender is not None:
        sender.finish(sent)


def consume(p: Problem, tiles: Tiles, store, stored, empty, parts, scratch) -> None:
    """A multiplying warpgroup.

    Args:
      store: (place, warpgroup, piece, shared memory, the same in a row): starts the copy of 64 rows and columns.
      stored: (phase, number of a tile in it): called when the tile's copies had time to end; phase -1 before the
        first tile. None if nothing waits for them.
      empty: as of `produce`.
      parts: (place) -> how many other devices' parts are added; None for none.
    """
    plgpu.set_max_registers(232, action="increase")
    full, free = scratch["full"], scratch["free"]
    (_, a_smem, _), b_smem = scratch["a_smem"], scratch["b_smem"]
    me = lax.axis_index("warpgroup")
    mine = pl.ds(me * HALF, HALF)
    slot_of = lambda step: lax.rem(step, jnp.int32(tiles.stages))
    pieces_of_tile = tiles.wide // DEEP

    def of_tile(place: Place, i, carry):
        first, *before = carry
        plgpu.barrier_arrive(scratch["taken"].at[lax.rem(i, jnp.int32(AHEAD))])
        steps = jnp.int32(p.steps) if empty is None else jnp.where(empty(place), 0, p.steps)

        def accumulate(acc_ref):
            def multiply(k, begin):
                slot = slot_of(first + k)
                plgpu.barrier_wait(full.at[slot])
                b = b_smem.at[slot]
                plgpu.wgmma(acc_ref, a_smem.at[slot, mine], b.transpose((1, 0)) if p.transposed else b)
                plgpu.wgmma_wait(1)
                pl.when(k > begin)(lambda: plgpu.barrier_arrive(free.at[slot_of(first + k - 1)]))
                return begin

            def multiply_steps(begin, end):
                lax.fori_loop(begin, end, multiply, begin)
                plgpu.wgmma_wait(0)
                pl.when(begin < end)(lambda: plgpu.barrier_arrive(free.at[slot_of(first + end - 1)]))

            if stored is None:
                multiply_steps(jnp.int32(0), steps)
            else:  # not within a loop, where ptxas would wait for each product
                half = lax.div(steps, jnp.int32(2))
                multiply_steps(jnp.int32(0), half)
                stored(*before)
                multiply_steps(half, steps)
            return acc_ref[...]

        acc = pl.run_scoped(accumulate, plgpu.ACC((HALF, tiles.wide), jnp.float32))
        pieces = tuple(acc[:, j * DEEP : (j + 1) * DEEP] for j in range(pieces_of_tile))
        others = jnp.int32(0) if parts is None else parts(place)
        if parts is not None:

            def add(number, pieces):
                sums = []
                for j, piece in enumerate(pieces):
                    slot = slot_of(first + steps + number * pieces_of_tile + j)
                    plgpu.barrier_wait(full.at[slot])
                    part = plgpu.load(a_smem.at[slot, mine], layout=plgpu.Layout.WGMMA)
                    plgpu.commit_smem()  # this read before TMA's next write
                    plgpu.barrier_arrive(free.at[slot])
                    sums.append(piece + part.astype(jnp.float32))
                return tuple(sums)

            pieces = lax.fori_loop(0, others, add, pieces)
        for j, piece in enumerate(pieces):
            copied, written, row = (view.at[me, j % tiles.outputs] for view in scratch["out_smem"])
            plgpu.wait_smem_to_gmem(tiles.outputs - 1, wait_read_only=True)
            written[...] = piece.astype(written.dtype)
            plgpu.commit_smem()
            store(place, me, j, copied, row)
        return first + steps + others * pieces_of_tile, place.phase, place.number

    _, *last = _each_tile(p, tiles, of_tile, (jnp.int32(0), jnp.int32(-1), jnp.int32(0)), scratch)
    if stored is not None:
        stored(*last)
    plgpu.wait_smem_to_gmem(0)
