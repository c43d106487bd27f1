"""Gluon pieces that the Hopper kernels share: the ring of buffers between producer and consumers, the order of tiles, the stores. For inside kernels."""

import jax
import jax.numpy as jnp
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma


@gluon.jit
def advance(s, phase, STAGES: gl.constexpr):
    """The buffer after buffer s, and the phase of its barriers."""
    s += 1
    if s == STAGES:
        s = 0
        phase ^= 1
    return s, phase


@gluon.jit
def take_number(counter):
    """The next of the numbers that the grid's programs draw; by one warp. It comes when `number_taken` asks for it, so that the way there and back lies beside
    what is done meanwhile (an atomic_add of Triton's waits at once)."""
    assembly: gl.constexpr = """{
        .reg .pred first;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        mov.b32 $0, 0;
        @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
    }"""
    return gl.inline_asm_elementwise(assembly, "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def number_taken(number):
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def panel_order(p, num_i, num_j, PANEL: gl.constexpr):
    """Tile (i, j) of number p: columns of PANEL row tiles, so that neighbours in time share operands in L2."""
    first = p // (PANEL * num_j) * PANEL
    height = min(num_i - first, PANEL)
    return first + p % (PANEL * num_j) % height, p % (PANEL * num_j) // height


@gluon.jit
def window(row, end, HEIGHT: gl.constexpr):
    """Of `row_windows`: the first row of a window, and the row in it, where a box that starts at `row` is cut off at `end`.

    It is not where the window would start before row 0: then the box goes on to row HEIGHT. `row` lies before `end`.
    """
    first = max(min(row, end - HEIGHT), 0)
    return first, row - first


@gluon.jit
def send(c_desc, c_buf, row, end, col):
    """A buffer's rows by TMA through `row_windows`, as far as they lie before `end`, before which there are as many at least."""
    first, at = window(row, end, c_buf.shape[0])
    tma.async_store(c_desc, [first, at, col], c_buf.reshape([1, c_buf.shape[0], c_buf.shape[1]]))


@gluon.jit
def store(
    acc,
    c_desc,
    c_ptr,
    c_buf,
    row,
    end,
    col,
    N,
    MMA: gl.constexpr,
    WHOLE: gl.constexpr,
    ALIGNED: gl.constexpr,
    PENDING: gl.constexpr = 0,
):
    """A consumer's rows of a tile of C, as far as they lie before `end`; the first one does.

    WHOLE: `end` is C's own. ALIGNED: C's rows start at whole 16 bytes, as c_desc demands where it is given. PENDING: how many stores from other buffers may
    still be under way.
    """
    BM: gl.constexpr = acc.shape[0]
    BN: gl.constexpr = acc.shape[1]
    if c_ptr.dtype.element_ty.primitive_bitwidth == 16:
        # Through shared memory: by TMA, which goes on while the next tile is multiplied, or 16 bytes a thread.
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [4, 1], [1, 0])
        # One of 16 bytes a thread is none of those that are waited for: with it in between, the count would tell of another buffer.
        if PENDING > 0 and c_desc is not None and min(row + BM, end) >= BM:
            tma.store_wait(PENDING)
        else:
            tma.store_wait(0)
        c_buf.store(acc.to(c_ptr.dtype.element_ty))
        if c_desc is None:
            store_tile(c_buf.load(LAYOUT), c_ptr, row, end, col, N, LAYOUT, ALIGNED)
        elif len(c_desc.block_shape) == 3:
            if min(row + BM, end) >= BM:
                fence_async_shared()
                send(c_desc, c_buf, row, end, col)
            else:
                store_tile(c_buf.load(LAYOUT), c_ptr, row, end, col, N, LAYOUT, ALIGNED)
        elif WHOLE or row + BM <= end:  # of whole tiles: it knows no end of a group
            fence_async_shared()
            tma.async_store(c_desc, [row, col], c_buf)
        else:
            store_tile(c_buf.load(LAYOUT), c_ptr, row, end, col, N, LAYOUT, ALIGNED)
    else:  # float32 fills whole sectors from where it lies
        store_tile(acc, c_ptr, row, end, col, N, MMA, ALIGNED)


@gluon.jit
def columns(x):
    """Its left half and its right one."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def store_columns(acc, c_desc, c_ptr, c_buf, row, end, col, N, AT_A_TIME: gl.constexpr):
    """As `store`, of as many columns at a time as the buffer has: half of them, or all. Rows and columns are whole 16 bytes, and `end` a group's."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, AT_A_TIME, 16])
    if acc.shape[1] == AT_A_TIME:
        store(acc, c_desc, c_ptr, c_buf, row, end, col, N, MMA, False, True)
    else:
        left, right = columns(acc)
        store(
            gl.convert_layout(left, MMA, assert_trivial=True), c_desc, c_ptr, c_buf, row, end, col, N, MMA, False, True
        )
        if col + AT_A_TIME < N:
            store(
                gl.convert_layout(right, MMA, assert_trivial=True),
                c_desc,
                c_ptr,
                c_buf,
                row,
                end,
                col + AT_A_TIME,
                N,
                MMA,
                False,
                True,
            )


@gluon.jit
def tile_at(ptr, row, end, col, N, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, ALIGNED: gl.constexpr):
    """Pointers to a tile of an array with N columns, and which of them lie in it, before `end`."""
    # A copy that the compiler cannot see through: else N's multiples, the same for every tile, would take registers from the sums.
    stride = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(N)], dtype=gl.int32, is_pure=False, pack=1
    )
    stride = stride // 8 * 8 if ALIGNED else stride  # rows start at whole 16 bytes
    rows = gl.arange(0, SHAPE[0], layout=gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, SHAPE[1], layout=gl.SliceLayout(0, LAYOUT))
    corner = ptr + (gl.cast(row, gl.int64) * stride + col)
    return corner + (rows[:, None] * stride + cols[None, :]), (rows < end - row)[:, None] & (cols < stride - col)[
        None, :
    ]


@gluon.jit
def store_tile(tile, c_ptr, row, end, col, N, LAYOUT: gl.constexpr, ALIGNED: gl.constexpr):
    pointers, mask = tile_at(c_ptr, row, end, col, N, tile.shape, LAYOUT, ALIGNED)
    gl.store(pointers, tile, mask=mask)


@gluon.jit
def result_buffers(c_ptr, CONSUMERS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """What `store` stores each consumer's part, BM x BN, from. float32 needs none: the least there is, for a partition's arguments are there all the same."""
    NARROW: gl.constexpr = c_ptr.dtype.element_ty.primitive_bitwidth == 16
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BN], gl.bfloat16)
    TYPE: gl.constexpr = c_ptr.dtype.element_ty if NARROW else gl.bfloat16
    return gl.allocate_shared_memory(TYPE, [CONSUMERS, BM, BN] if NARROW else [CONSUMERS, 8, 64], LAYOUT)


def tile_layout(dtype, shape: tuple[int, ...]) -> gl.NVMMASharedLayout:
    """Of tiles as wgmma and TMA want them."""
    return gl.NVMMASharedLayout.get_default_for(list(shape), _ELEMENTS[jnp.dtype(dtype).name])


_ELEMENTS = {
    "float8_e4m3fn": gl.float8e4nv,
    "float8_e5m2": gl.float8e5,
    "bfloat16": gl.bfloat16,
    "float16": gl.float16,
    "float32": gl.float32,
}


def whole_16_bytes(x: jax.Array) -> jax.Array:
    """TMA wants rows that start at multiples of 16 bytes: a copy where they do not."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % (16 // x.dtype.itemsize))))
