"""The gradient of q on Hopper, in Gluon: the forward's blocks and tiles, with the probabilities of the saved
logarithms.

A consumer has 64 rows of q and dout in shared memory, and their sums of gradients in registers. Of each tile of keys it
multiplies for scores and for the products of dout with the values. Their gradients, from registers, are multiplied with
the keys. While one consumer computes exponentials, the other one multiplies.
"""

import jax
import jax.numpy as jnp
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.gluon.gemm_triton import advance
from jaxops._lib.gluon.launch_triton import OutTile, Scratch, triton_call
from jaxops._lib.gluon.layouts_triton import accumulator
from jaxops._lib.gluon.stores_triton import tile_layout
from jaxops._lib.gluon.tile_scheduler_triton import opaque
from jaxops.ops.packed_attention.fwd_triton import (
    ROWS,
    as_operand,
    capped,
    for_sums,
    make_pipeline,
    mask_keys,
    produce,
    read_block,
    row_box,
    scales,
    section,
    steps_of,
    tile_of,
    window_box,
)
from jaxops.ops.packed_attention.parts_triton import (
    finish_sums,
    parts_of,
    start_products,
    start_sums,
    store_sums,
    zero_sums,
)
from jaxops.ops.packed_attention.plan import Arrays, Spec, Tiles, head_columns, hopper_memory
from jaxops.ops.packed_attention.visible import CONSUMER_ROWS, query_blocks


@gluon.jit
def add_tiles(
    pipe, acc, places, tiles, span, rows, SCALE: gl.constexpr, CAP: gl.constexpr, MASKED: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Steps span[0] to span[1] - 1. acc: sums so far, of each part of the columns. places: stages and phases of k and
    v. rows: their lse and along, and runs of keys."""
    k_s, k_phase, v_s, v_phase = places
    lse, along, runs = rows
    BK: gl.constexpr = pipe.BK
    for step in range(span[0], span[1]):
        own = opaque(WHICH)  # else ptxas computes addresses before the loop, and spills them
        k = parts_of(pipe.k, k_s, pipe.PARTS)
        mbarrier.wait(pipe.k_full.index(k_s), k_phase)
        scores = start_products(parts_of(pipe.q, own, pipe.PARTS), k)
        mbarrier.wait(pipe.v_full.index(v_s), v_phase)
        products = start_products(parts_of(pipe.dout, own, pipe.V_PARTS), parts_of(pipe.v, v_s, pipe.V_PARTS))
        scores = warpgroup_mma_wait(pipe.V_PARTS, deps=[scores])
        shares = capped(scores, CAP)
        scores = shares * SCALE - lse[:, None]
        if MASKED:
            at, end = tile_of(step, tiles, BK)
            scores = mask_keys(scores, at, end, runs, BK)
        p = gl.exp2(scores)
        if CAP is not None:
            p *= 1.0 - shares * shares  # the cap's slope
        products = warpgroup_mma_wait(0, deps=[products])
        mbarrier.arrive(pipe.v_empty.index(v_s), count=1)
        if pipe.APART:  # the next block's q and dout are loaded beside the rest of the last step
            mbarrier.arrive(pipe.q_empty.index(0), count=1, pred=step + 1 == tiles[0])
        v_s, v_phase = advance(v_s, v_phase, pipe.V_STAGES)
        ds = as_operand(p * (products - along[:, None]), pipe.k.dtype, pipe.D)
        acc = finish_sums(start_sums(ds, k, acc))
        mbarrier.arrive(pipe.k_empty.index(k_s), count=1)
        k_s, k_phase = advance(k_s, k_phase, pipe.STAGES)
    return acc, (k_s, k_phase, v_s, v_phase)


@gluon.jit
def consume(
    pipe, dq_desc, of_rows, T, SCALE: gl.constexpr, CAP: gl.constexpr, FACTOR: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """of_rows: numbers of each row: first, end, lse and along."""
    BK: gl.constexpr = pipe.BK
    first_ptr, end_ptr, lse_ptr, along_ptr = of_rows
    places = (0, 0, 0, 0)
    q_phase = 0
    mbarrier.wait(pipe.q_full.index(0), q_phase)
    row, least, most, right, masked, head = read_block(pipe)
    while row >= 0:
        rows = row + WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, accumulator(BK)))
        there = rows < T
        first = gl.load(first_ptr + rows, mask=there, other=0)
        stop = gl.load(end_ptr + rows, mask=there, other=0)
        of_head = gl.cast(head, gl.int64) * T
        lse = gl.load(lse_ptr + of_head + rows, mask=there, other=0.0)
        along = gl.load(along_ptr + of_head + rows, mask=there, other=0.0)
        steps = steps_of(least, most, BK)
        tiles = (steps, least, most, right)
        own = (lse, along, (first, stop))
        masked = min(masked, steps)
        acc = zero_sums(ROWS, pipe.D, pipe.PARTS)
        acc, places = add_tiles(pipe, acc, places, tiles, (0, masked), own, SCALE, CAP, True, WHICH)
        acc, places = add_tiles(pipe, acc, places, tiles, (masked, steps), own, SCALE, CAP, False, WHICH)
        sees = for_sums(first < stop, pipe.D)
        tma.store_wait(0)
        store_sums(dq_desc, parts_of(pipe.out, WHICH, pipe.PARTS), acc, FACTOR, sees, row + WHICH * ROWS, head)
        if not pipe.APART:
            tma.store_wait(0)
            mbarrier.arrive(pipe.q_empty.index(0), count=1)
        q_phase ^= 1
        mbarrier.wait(pipe.q_full.index(0), q_phase)
        row, least, most, right, masked, head = read_block(pipe)
    tma.store_wait(0)


@gluon.jit
def packed_attention_dq_kernel(
    q_desc, k_desc, v_desc, dout_desc, first, end, lse, along, blocks, dq_desc, dq, T, sizes, D: gl.constexpr,
    PARTS: gl.constexpr, V: gl.constexpr, V_PARTS: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr, FACTOR: gl.constexpr,
    SECTION: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    pipe = make_pipeline(k_desc.dtype, D, PARTS, V, V_PARTS, BK, STAGES, V_STAGES, APART, True)
    of_rows = (first, end, lse, along)
    gl.warp_specialize([
        (consume, (pipe, dq_desc, of_rows, T, SCALE, CAP, FACTOR, 0)),
        (consume, (pipe, dq_desc, of_rows, T, SCALE, CAP, FACTOR, 1)),
        (produce, (pipe, q_desc, k_desc, v_desc, dout_desc, blocks, sizes, SECTION)),
    ], [4, 1], [240, 24])  # fmt: skip


def gradient_of_q(
    spec: Spec, tiles: Tiles, arrays: Arrays, lse: jax.Array, along: jax.Array, dout: jax.Array, *, cores: int
) -> jax.Array:
    """dq [T, N, H]. lse, along: of `row_numbers`."""
    q, k, v, first, end, *_ = arrays
    (T, N, D), (S, K, V) = q.shape, v.shape
    (columns, part), (values, value_part) = head_columns(D), head_columns(V)
    block = (CONSUMER_ROWS, 1, part)
    blocks = query_blocks(first, end, S=S, bq=tiles.bq, bk=tiles.bk)
    scale, cap = scales(spec)
    memory = hopper_memory("dq", tiles, (D, V))
    return triton_call(
        row_box(q, part), window_box(k, tiles.bk, part), window_box(v, tiles.bk, value_part), row_box(dout, value_part),
        first, end, lse, along, Scratch(jnp.append(blocks.ravel(), jnp.int32(0))),
        OutTile(block, tile_layout(q.dtype, block)),
        kernel=packed_attention_dq_kernel, name="packed_attention_dq", grid=min(cores, blocks.shape[0] * N),
        out_type=out_struct(q.shape, q.dtype, like=q), flops=2 * spec.pairs * N * (2 * D + V), T=T,
        sizes=(blocks.shape[0], N, N // K), D=part, PARTS=columns // part, V=value_part, V_PARTS=values // value_part,
        BK=tiles.bk, STAGES=tiles.stages, V_STAGES=memory.early, SCALE=scale, CAP=cap, FACTOR=spec.scale,
        SECTION=min(N // K * section(k, v), N), APART=memory.apart,
    )  # fmt: skip
