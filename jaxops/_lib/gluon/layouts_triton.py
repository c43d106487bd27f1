"""Layouts of Hopper's Gluon kernels, also of those whose programs work in clusters of two."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def over_cluster(programs, *direction):
    """`cga_layout` of a layout: how the two programs of a cluster divide a block. Empty for one program.

    direction: a number for each dimension: 1 where the second program has the second half. All zeros: each program has
    a copy of the block.
    """
    return [list(direction)] if programs > 1 else []


@gluon.constexpr_function
def accumulator(columns, programs=1):
    """A consumer's sums of products of 16-bit numbers, by wgmma of so many columns. A cluster divides the rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16], over_cluster(programs, 1, 0))


@gluon.constexpr_function
def one_number(warps, programs):
    """A tensor of one number, which all threads hold."""
    return gl.BlockedLayout([1], [32], [warps], [0], over_cluster(programs, 0))
