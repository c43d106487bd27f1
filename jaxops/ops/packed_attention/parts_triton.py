"""The columns of a head on Hopper, in parts of a power of two each: loads, products, and sums, a tensor for each part.

A buffer [rows of parts, ROWS, columns] has the parts of one array beside each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from jaxops._lib.gluon.layouts_triton import accumulator
from jaxops._lib.gluon.stores_triton import as_block


@gluon.jit
def load_parts(desc, bufs, i, full, box, PARTS: gl.constexpr):
    """Array i of bufs by TMA. box: coordinates of its rows, without the column."""
    for n in gl.static_range(PARTS):
        at = box + (n * bufs.shape[2],)  # noqa: RUF005 - Triton has no starred tuples
        tma.async_load(desc, at, full, as_block(bufs.index(i * PARTS + n), desc))


@gluon.jit
def start_products(left, i, right, j, PARTS: gl.constexpr):
    """Starts the products of each row of array i of left with each row of array j of right: PARTS wgmmas."""
    COLUMNS: gl.constexpr = right.shape[1]
    products = gl.zeros([left.shape[1], COLUMNS], gl.float32, accumulator(COLUMNS))
    for n in gl.static_range(PARTS):
        rows = right.index(j * PARTS + n).permute((1, 0))
        products = warpgroup_mma(left.index(i * PARTS + n), rows, products, use_acc=n > 0, is_async=True)
    return products


@gluon.jit
def zero_sums(bufs, HEIGHT: gl.constexpr, PARTS: gl.constexpr):
    """Of HEIGHT rows with the columns of bufs."""
    COLUMNS: gl.constexpr = bufs.shape[2]
    sums = ()
    for _ in gl.static_range(PARTS):
        sums += (gl.zeros([HEIGHT, COLUMNS], gl.float32, accumulator(COLUMNS)),)
    return sums


@gluon.jit
def start_sums(factors, bufs, i, sums, PARTS: gl.constexpr):
    """Starts to add factors, an operand in registers, times array i of bufs: PARTS wgmmas."""
    started = ()
    for n in gl.static_range(PARTS):
        started += (warpgroup_mma(factors, bufs.index(i * PARTS + n), sums[n], is_async=True),)
    return started


@gluon.jit
def finish_sums(sums):
    """Waits for all wgmmas."""
    finished = warpgroup_mma_wait(0, deps=sums)
    if len(sums) == 1:
        finished = (finished,)
    return finished


@gluon.jit
def store_sums(desc, bufs, i, sums, FACTOR: gl.constexpr, sees, row, head, PARTS: gl.constexpr):
    """Starts the stores of FACTOR * sums by TMA, through array i of bufs. sees: None, or which rows are not zeros."""
    for n in gl.static_range(PARTS):
        x = sums[n] * FACTOR
        if sees is not None:  # rows outside the sequences may hold NaN: selected, not multiplied
            x = gl.where(sees, x, 0.0)
        bufs.index(i * PARTS + n).store(x.to(desc.dtype))
    fence_async_shared()
    for n in gl.static_range(PARTS):
        tma.async_store(desc, [row, head, n * bufs.shape[2]], as_block(bufs.index(i * PARTS + n), desc))
