"""The columns of a head on Hopper, in parts of a power of two each: loads, products, and sums, a tensor a part."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from jaxops._lib.gluon.layouts_triton import accumulator
from jaxops._lib.gluon.stores_triton import as_block


@gluon.jit
def parts_of(bufs, i, PARTS: gl.constexpr):
    """Array i of bufs, in which the parts of each array follow each other: a tuple."""
    parts = ()
    for n in gl.static_range(PARTS):
        parts += (bufs.index(i * PARTS + n),)
    return parts


@gluon.jit
def load_parts(desc, parts, full, box):
    """By TMA. box: coordinates of the rows, without the column."""
    for n in gl.static_range(len(parts)):
        at = box + (n * desc.block_shape[len(box)],)  # noqa: RUF005 - Triton has no starred tuples
        tma.async_load(desc, at, full, as_block(parts[n], desc))


@gluon.jit
def start_products(left, right):
    """Starts the products of each row of left with each row of right: a wgmma for each part."""
    COLUMNS: gl.constexpr = right[0].shape[0]
    products = gl.zeros([left[0].shape[0], COLUMNS], gl.float32, accumulator(COLUMNS))
    for n in gl.static_range(len(left)):
        products = warpgroup_mma(left[n], right[n].permute((1, 0)), products, use_acc=n > 0, is_async=True)
    return products


@gluon.jit
def zero_sums(ROWS: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr):
    sums = ()
    for _ in gl.static_range(PARTS):
        sums += (gl.zeros([ROWS, COLUMNS], gl.float32, accumulator(COLUMNS)),)
    return sums


@gluon.jit
def start_sums(factors, parts, sums):
    """Starts to add factors, an operand in registers, times the rows of parts: a wgmma for each part."""
    started = ()
    for n in gl.static_range(len(parts)):
        started += (warpgroup_mma(factors, parts[n], sums[n], is_async=True),)
    return started


@gluon.jit
def finish_sums(sums):
    """Waits for all wgmmas."""
    finished = warpgroup_mma_wait(0, deps=sums)
    if len(sums) == 1:
        finished = (finished,)
    return finished


@gluon.jit
def store_sums(desc, parts, sums, FACTOR: gl.constexpr, sees, row, head):
    """Starts the stores of FACTOR * sums by TMA, through parts. sees: None, or which rows are not zeros."""
    for n in gl.static_range(len(parts)):
        x = sums[n] * FACTOR
        if sees is not None:  # rows outside the sequences may hold NaN: selected, not multiplied
            x = gl.where(sees, x, 0.0)
        parts[n].store(x.to(desc.dtype))
    fence_async_shared()
    for n in gl.static_range(len(parts)):
        tma.async_store(desc, [row, head, n * desc.block_shape[2]], as_block(parts[n], desc))
