"""Shared-memory layouts, and the stores of tiles whose rows may end with a group, for Hopper's Gluon kernels."""

import jax
import jax.numpy as jnp
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from jaxops._lib.gluon.layouts_triton import accumulator, over_cluster
from jaxops._lib.gluon.tile_scheduler_triton import opaque
from jaxops._lib.planning.device import SECTOR_BYTES


@gluon.jit
def window(row, end, HEIGHT: gl.constexpr):
    """Coordinates in a `row_windows` descriptor of the box that starts at `row` and is cut off at `end`, which lies
    behind `row`: window, row in the window. If `end` < HEIGHT, no window ends there, and the box goes on to row
    HEIGHT."""
    first = max(min(row, end - HEIGHT), 0)
    return first, row - first


@gluon.jit
def as_block(buf, desc):
    """A buffer as a block of a descriptor that has more dimensions. (`reshape` loses the layout of a cluster.)"""
    return buf.reinterpret(desc.dtype, desc.block_shape, desc.layout)


@gluon.jit
def store_window(desc, buf, row, end, col, HALF: gl.constexpr = -1):
    """Stores a buffer's rows by TMA as far as they lie before `end`, through `row_windows`. `end` is at least the
    buffer's height. HALF: see `pointers_to_tile`."""
    first, at = window(row, end, buf.shape[0])
    tma.async_store(desc, [window_of_half(first, HALF), at, col], as_block(buf, desc))


@gluon.jit
def window_of_half(first, HALF: gl.constexpr):
    """In a `row_windows` descriptor of an array's halves."""
    return first if HALF < 0 else 2 * first + HALF


SECTOR = gl.constexpr(SECTOR_BYTES)


@gluon.jit
def stored_by_tma(ptr, row, end, N, BM: gl.constexpr):
    """Whether a tile of C is stored by TMA: not a tile that ends within the first BM rows, nor where rows of C are no
    multiple of a sector. TMA stores a tile in pieces of 128 bytes a row, each of which would then end inside a sector;
    threads store whole rows of it. H100, 2026-11-26, wgrad of 150 groups of 16 rows, K 4872, N 520: 433 us by TMA, 363
    by threads. Where rows are whole sectors threads take 1 % longer."""
    SIZE: gl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    return (min(row + BM, end) >= BM) & (N * SIZE % SECTOR == 0)


@gluon.jit
def store(
    acc, desc, ptr, buf, row, end, col, N, MMA: gl.constexpr, ALIGNED: gl.constexpr, PENDING: gl.constexpr = 0,
    HALF: gl.constexpr = -1,
):  # fmt: skip
    """Stores a consumer's rows of a tile of C that lie before `end`; at least one does.

    desc: C as `row_windows`; or as a plain descriptor, which stores whole tiles only; or None. ALIGNED: C's rows start
    at multiples of 16 bytes (required by desc). PENDING: how many TMA stores from other buffers may still be in flight.
    HALF: see `pointers_to_tile`.
    """
    BM: gl.constexpr = acc.shape[0]
    BN: gl.constexpr = acc.shape[1]
    if buf.shape[0] == BM:
        # Through shared memory: by TMA, which overlaps the next tile's products, or by 16-byte stores of each thread.
        ROWS: gl.constexpr = over_cluster(gl.num_ctas(), 1, 0)
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [4, 1], [1, 0], ROWS)
        PLAIN: gl.constexpr = desc is not None and len(desc.block_shape) == 2
        # Stores by threads are not counted by store_wait: after one, PENDING would count stores of another buffer.
        gl.static_assert(PENDING == 0 or not PLAIN, "a plain descriptor stores some tiles by threads")
        if PENDING > 0 and desc is not None and stored_by_tma(ptr, row, end, N, BM):
            tma.store_wait(PENDING)
        else:
            tma.store_wait(0)
        buf.store(acc.to(ptr.dtype.element_ty))
        if desc is None:
            store_tile(buf.load(LAYOUT), ptr, row, end, col, N, LAYOUT, ALIGNED, HALF)
        elif PLAIN and row + BM <= end:
            fence_async_shared()
            tma.async_store(desc, [row, col], buf)
        elif not PLAIN and stored_by_tma(ptr, row, end, N, BM):
            fence_async_shared()
            store_window(desc, buf, row, end, col, HALF)
        else:
            store_tile(buf.load(LAYOUT), ptr, row, end, col, N, LAYOUT, ALIGNED, HALF)
    else:  # no buffer: from registers. float32 fills whole 32-byte sectors; 16 bits only where shared memory is short
        store_tile(acc.to(ptr.dtype.element_ty), ptr, row, end, col, N, MMA, ALIGNED, HALF)


@gluon.jit
def store_plain(acc, desc, ptr, buf, row, end, col, N, ALIGNED: gl.constexpr):
    """As `store`, through a plain descriptor, of as many columns at a time as it has: acc's or half of them. float32
    whole tiles, too, go through shared memory: their stores overlap the next tile's products."""
    BN: gl.constexpr = desc.block_shape[1]
    PARTS: gl.constexpr = acc.shape[1] // BN
    PART: gl.constexpr = accumulator(BN, gl.num_ctas())
    parts = (acc,)
    if PARTS > 1:
        parts = split_columns(acc)
    for i in gl.static_range(PARTS):
        part = gl.convert_layout(parts[i], PART, assert_trivial=True)
        if ptr.dtype.element_ty != gl.float32:
            store(part, desc, ptr, buf, row, end, col + i * BN, N, PART, ALIGNED)
        elif row + acc.shape[0] > end:
            store_tile(part, ptr, row, end, col + i * BN, N, PART, ALIGNED)
        else:
            tma.store_wait(0)
            buf.store(part)
            fence_async_shared()
            tma.async_store(desc, [row, col + i * BN], buf)


@gluon.jit
def split_columns(x):
    """The left half and the right half."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def pointers_to_tile(
    ptr, row, end, col, N, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, ALIGNED: gl.constexpr, HALF: gl.constexpr = -1
):
    """Pointers to a tile of an array with N columns, and the mask of those before row `end` and column N. HALF: 0 for
    the first half of an array with 2 N columns, 1 for the second."""
    stride = opaque(N)  # otherwise multiples of N, equal for all tiles, are kept in registers
    stride = stride // 8 * 8 if ALIGNED else stride  # tells the compiler that rows start at multiples of 16 bytes
    rows = gl.arange(0, SHAPE[0], layout=gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, SHAPE[1], layout=gl.SliceLayout(0, LAYOUT))
    first = col
    step = stride
    if HALF >= 0:
        first += HALF * stride
        step *= 2
    corner = ptr + (gl.cast(row, gl.int64) * step + first)
    mask = (rows < end - row)[:, None] & (cols < stride - col)[None, :]
    return corner + (rows[:, None] * step + cols[None, :]), mask


@gluon.jit
def store_tile(tile, ptr, row, end, col, N, LAYOUT: gl.constexpr, ALIGNED: gl.constexpr, HALF: gl.constexpr = -1):
    pointers, mask = pointers_to_tile(ptr, row, end, col, N, tile.shape, LAYOUT, ALIGNED, HALF)
    gl.store(pointers, tile, mask=mask)


@gluon.jit
def add(acc, desc, ptr, buf, row, end, col, N):
    """Adds a consumer's rows of a tile to what a float32 array holds, without waiting for it: L2 adds. By TMA, as many
    columns at a time as desc (`row_windows`) has. Deterministic where each element has one addition a launch."""
    BM: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    if desc.block_shape[2] < WIDTH:
        left, right = split_columns(acc)
        add(left, desc, ptr, buf, row, end, col, N)
        add(right, desc, ptr, buf, row, end, col + WIDTH // 2, N)
    elif stored_by_tma(ptr, row, end, N, BM):
        tma.store_wait(0)
        buf.store(gl.convert_layout(acc, accumulator(WIDTH, gl.num_ctas()), assert_trivial=True))
        fence_async_shared()
        first, at = window(row, end, BM)
        tma.async_atomic_add(desc, [first, at, col], as_block(buf, desc))
    else:
        add_from_registers(acc, ptr, row, end, col, N)


@gluon.jit
def add_from_registers(tile, ptr, row, end, col, N):
    WIDTH: gl.constexpr = tile.shape[1]
    if WIDTH > 32:  # few addresses at a time, or ptxas spills
        left, right = split_columns(tile)
        add_from_registers(left, ptr, row, end, col, N)
        add_from_registers(right, ptr, row, end, col + WIDTH // 2, N)
    else:
        LAYOUT: gl.constexpr = accumulator(WIDTH, gl.num_ctas())
        tile = gl.convert_layout(tile, LAYOUT, assert_trivial=True)
        pointers, mask = pointers_to_tile(ptr, row, end, col, N, tile.shape, LAYOUT, True)
        gl.atomic_add(pointers, tile, mask=mask, sem="relaxed")


@gluon.jit
def result_buffers(
    ptr, COUNT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, ROOM: gl.constexpr = True, ADDED: gl.constexpr = False
):
    """COUNT buffers of BM x BN for `store` or, if ADDED, `add`. Results in float32 that are not ADDED, or that shared
    memory has no ROOM for, are stored from registers and get the smallest possible: a partition's arguments cannot be
    left out."""
    WHOLE: gl.constexpr = ROOM and (ADDED or ptr.dtype.element_ty.primitive_bitwidth == 16)
    TYPE: gl.constexpr = ptr.dtype.element_ty if WHOLE else gl.bfloat16
    ROWS: gl.constexpr = over_cluster(gl.num_ctas(), 1, 0)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BN], TYPE, cga_layout=ROWS)
    return gl.allocate_shared_memory(TYPE, [COUNT, BM, BN] if WHOLE else [COUNT, 8 * gl.num_ctas(), 64], LAYOUT)


def tile_layout(dtype, shape: tuple[int, ...], over: list[list[int]] | None = None) -> gl.NVMMASharedLayout:
    """The swizzled layout of a tile for TMA and wgmma. over: see `over_cluster`."""
    return gl.NVMMASharedLayout.get_default_for(list(shape), _ELEMENTS[jnp.dtype(dtype).name], cga_layout=over)


_ELEMENTS = {
    "float8_e4m3fn": gl.float8e4nv,
    "float8_e5m2": gl.float8e5,
    "bfloat16": gl.bfloat16,
    "float16": gl.float16,
    "float32": gl.float32,
}


def pad_to_16_bytes(x: jax.Array) -> jax.Array:
    """A copy with padded rows if they do not start at multiples of 16 bytes, as TMA demands; else x."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % (16 // x.dtype.itemsize))))
