"""The forward pass on Hopper, in Gluon: FlashAttention-3's schedule (Shah et al. 2024, arXiv:2407.08608).

A persistent kernel. A program takes blocks of query rows of one head, the longest first. One producer warp loads q, and
the tiles of k and v into a pipeline of stages each, by TMA. Two consumer warp groups have 64 of the rows each.
While the softmax of a step runs, the last tile's probabilities, from registers, are multiplied with v. The groups issue
their products in turn, so that one's softmax runs beside the others' products.

A block's tiles start at the first key that one of its rows sees. A box of keys ends at the last one: behind it may lie
NaN, and zero times NaN is NaN. Tiles that all rows see whole come last, and run without a mask.
"""

import math

import jax
import jax.numpy as jnp
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.gluon.gemm_triton import advance
from jaxops._lib.gluon.launch_triton import OutTile, Scratch, TensorDescriptor, triton_call
from jaxops._lib.gluon.layouts_triton import accumulator, one_number
from jaxops._lib.gluon.stores_triton import as_block, tile_layout
from jaxops._lib.gluon.tile_scheduler_triton import finish_fetch_add, start_fetch_add
from jaxops.ops.packed_attention.parts_triton import load_parts, parts_of, start_products
from jaxops.ops.packed_attention.plan import Arrays, Spec, Tiles, head_columns, hopper_memory
from jaxops.ops.packed_attention.visible import CONSUMER_ROWS as _ROWS
from jaxops.ops.packed_attention.visible import FIELDS as _FIELDS
from jaxops.ops.packed_attention.visible import query_blocks
from jaxops.ops.packed_attention.xla import EXACT_BELOW

LOG2_E = 1.4426950408889634  # the GPU has 2 ** x, not e ** x
ROWS, FIELDS = gl.constexpr(_ROWS), gl.constexpr(_FIELDS)
CONSUMERS = gl.constexpr(2)
LOG2 = gl.constexpr(LOG2_E)
EXACT = gl.constexpr(LOG2_E * EXACT_BELOW)
# The largest score before the first one: with -inf, rows without keys are NaN.
NONE = gl.constexpr(float(jnp.finfo(jnp.float32).min))
LOW = gl.constexpr(-math.inf)  # of a masked key


@gluon.aggregate
class Pipeline:
    """Shared memory and its synchronisation.

    q: [CONSUMERS * PARTS, ROWS, D]. k: [STAGES * PARTS, BK, D]. v: [V_STAGES * V_PARTS, BK, V].
    dout: the backward's, [CONSUMERS * V_PARTS, ROWS, V]. out: the forward's result, likewise, or dq, as q; without
    APART in q's memory.
    PARTS, V_PARTS: of D and V columns, which make a head of q and k, and of v: its columns may be no power of two.
    block: what the consumers must know of a block: FIELDS numbers and the head.
    *_full, *_empty: an mbarrier a stage; q has one stage.
    order: an mbarrier for each consumer, on which it waits before it issues a step's products.
    """

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    block: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    order: gl.shared_memory_descriptor
    D: gl.constexpr
    PARTS: gl.constexpr
    V: gl.constexpr
    V_PARTS: gl.constexpr
    BK: gl.constexpr
    STAGES: gl.constexpr
    V_STAGES: gl.constexpr
    APART: gl.constexpr


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = mbarrier.allocate_mbarrier(batch=COUNT)
    for s in gl.static_range(COUNT):
        mbarrier.init(bars.index(s), count=ARRIVALS)
    return bars


@gluon.jit
def make_pipeline(
    dtype: gl.constexpr, D: gl.constexpr, PARTS: gl.constexpr, V: gl.constexpr, V_PARTS: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr, APART: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    OF_ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    OF_KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, D], dtype)
    OF_VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, V], dtype)
    OF_OUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, V], dtype)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(dtype, [CONSUMERS * PARTS, ROWS, D], OF_ROWS)
    dout = q
    if BACKWARD:
        dout = gl.allocate_shared_memory(dtype, [CONSUMERS * V_PARTS, ROWS, V], OF_OUT)
    out = q
    if APART and BACKWARD:
        out = gl.allocate_shared_memory(dtype, [CONSUMERS * PARTS, ROWS, D], OF_ROWS)
    elif APART:
        out = gl.allocate_shared_memory(dtype, [CONSUMERS * V_PARTS, ROWS, V], OF_OUT)
    return Pipeline(
        q,
        gl.allocate_shared_memory(dtype, [STAGES * PARTS, BK, D], OF_KEYS),
        gl.allocate_shared_memory(dtype, [V_STAGES * V_PARTS, BK, V], OF_VALUES),
        dout,
        out,
        gl.allocate_shared_memory(gl.int32, [FIELDS + 1, 1], FLAT),
        make_barriers(1, 1), make_barriers(1, CONSUMERS), make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS),
        make_barriers(V_STAGES, 1), make_barriers(V_STAGES, CONSUMERS), make_barriers(CONSUMERS, 1),
        D, PARTS, V, V_PARTS, BK, STAGES, V_STAGES, APART,
    )  # fmt: skip


@gluon.jit
def steps_of(least, most, BK: gl.constexpr):
    """Tiles of a block. One that sees nothing has one, of zeros."""
    return max(gl.cdiv(most - least, BK), 1)


@gluon.jit
def tile_of(step, tiles, BK: gl.constexpr):
    """The first key of a step's tile, and the end of its keys. The tiles at the right come first."""
    steps, least, most, right = tiles
    first = least + gl.where(step < right, steps - 1 - step, step - right) * BK
    return first, min(first + BK, most)


@gluon.jit
def load_keys(desc, bufs, full, empty, s, phase, tile, head, PARTS: gl.constexpr):
    """A tile's keys or values, as the last rows of a stage. The window starts with the tile, so that TMA fills the rows
    before it with zeros, as it does the columns behind a head's."""
    first, end = tile
    mbarrier.wait(empty.index(s), phase)
    mbarrier.expect(full.index(s), PARTS * desc.nbytes_per_cta)
    load_parts(desc, parts_of(bufs, s, PARTS), full.index(s), (first, end - bufs.shape[1] - first, head))


@gluon.jit
def place(t, rows, heads, SECTION: gl.constexpr):
    """Which block and which head tile t is: within a section of heads, whose keys L2 holds, the blocks by length."""
    section = t // (rows * SECTION)
    within = t % (rows * SECTION)
    width = min(heads - section * SECTION, SECTION)
    return within // width, section * SECTION + within % width


@gluon.jit
def load_block(blocks, t, rows, heads, SECTION: gl.constexpr):
    """The FIELDS numbers of tile t's block, and its head."""
    i, head = place(t, rows, heads, SECTION)
    block = blocks + FIELDS * i
    return gl.load(block), gl.load(block + 1), gl.load(block + 2), gl.load(block + 3), gl.load(block + 4), head


@gluon.jit
def write_block(pipe, values):
    """The producer's side of `read_block`."""
    for n in gl.static_range(FIELDS + 1):
        pipe.block.index(n).store(gl.full([1], values[n], gl.int32, one_number(1, 1)))


@gluon.jit
def write_end(pipe, full):
    """After the last block: the consumers return."""
    pipe.block.index(0).store(gl.full([1], -1, gl.int32, one_number(1, 1)))
    mbarrier.arrive(full.index(0), count=1)


@gluon.jit
def produce(pipe, q_desc, k_desc, v_desc, dout_desc, blocks, sizes, SECTION: gl.constexpr):
    """Loads the operands of this program's blocks, until there are no more. dout_desc: the backward's, or None."""
    rows, heads, group = sizes
    BK: gl.constexpr = pipe.BK
    k_s = 0
    k_phase = 1
    v_s = 0
    v_phase = 1
    q_phase = 1
    t = gl.program_id(0)
    while t < rows * heads:
        following = start_fetch_add(blocks + FIELDS * rows)
        values = load_block(blocks, t, rows, heads, SECTION)
        row, least, most, right, _, head = values
        kv_head = head // group
        mbarrier.wait(pipe.q_empty.index(0), q_phase)
        q_phase ^= 1
        write_block(pipe, values)
        q_full = pipe.q_full.index(0)
        if dout_desc is None:
            mbarrier.expect(q_full, CONSUMERS * pipe.PARTS * q_desc.nbytes_per_cta)
        else:
            OF_ROWS: gl.constexpr = pipe.PARTS * q_desc.nbytes_per_cta + pipe.V_PARTS * dout_desc.nbytes_per_cta
            mbarrier.expect(q_full, CONSUMERS * OF_ROWS)
        for n in gl.static_range(CONSUMERS):
            box = (row + n * ROWS, head)
            load_parts(q_desc, parts_of(pipe.q, n, pipe.PARTS), q_full, box)
            if dout_desc is not None:
                load_parts(dout_desc, parts_of(pipe.dout, n, pipe.V_PARTS), q_full, box)
        steps = steps_of(least, most, BK)
        tiles = (steps, least, most, right)
        for step in range(steps + 1):
            if step < steps:
                load_keys(
                    k_desc, pipe.k, pipe.k_full, pipe.k_empty, k_s, k_phase, tile_of(step, tiles, BK), kv_head,
                    pipe.PARTS,
                )  # fmt: skip
                k_s, k_phase = advance(k_s, k_phase, pipe.STAGES)
            if step > 0:
                load_keys(
                    v_desc, pipe.v, pipe.v_full, pipe.v_empty, v_s, v_phase, tile_of(step - 1, tiles, BK), kv_head,
                    pipe.V_PARTS,
                )  # fmt: skip
                v_s, v_phase = advance(v_s, v_phase, pipe.V_STAGES)
        t = gl.num_programs(0) + finish_fetch_add(following)
    mbarrier.wait(pipe.q_empty.index(0), q_phase)
    write_end(pipe, pipe.q_full)


@gluon.jit
def mask(scores, behind, number):
    """-inf where not 0 <= behind < number: one comparison, of unsigned numbers. In PTX, since LLVM packs the results
    into words of bits."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.u32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r", [scores, behind, number], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def mask_keys(scores, at, end, runs, BK: gl.constexpr):
    """Scores of a tile, -inf for keys that a row does not see."""
    keys = end - BK + gl.arange(0, BK, layout=gl.SliceLayout(0, accumulator(BK)))
    first, stop = runs
    first = gl.maximum(first, at)
    return mask(scores, keys[None, :] - first[:, None], gl.maximum(stop - first, 0)[:, None])


@gluon.jit
def capped(products, CAP: gl.constexpr):
    """As shares of the cap; without one unchanged."""
    if CAP is not None:
        products = gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [products * CAP], dtype=gl.float32, is_pure=True, pack=1
        )
    return products


@gluon.jit
def softmax(scores, top, total, at, end, runs, SCALE: gl.constexpr, MASKED: gl.constexpr):
    """A tile's exponentials, each row's largest score and sums of exponentials so far, and the factor on earlier sums.

    total: [ROWS, 4]; before the first tile a number, or None for 0. Each of the four threads that share a row sums its
    own columns: adding up their sums in each step costs 1 to 11 % (H200, 2026-11-29).
    at, end: the tile's keys are the last rows of the box. runs: of keys that each row sees.
    """
    BK: gl.constexpr = scores.shape[1]
    if MASKED:
        scores = mask_keys(scores, at, end, runs, BK)
    above = gl.maximum(top, gl.max(scores, 1) * SCALE)
    p = gl.exp2(scores * SCALE - above[:, None])
    before = gl.exp2(top - above)
    part = gl.sum(gl.sum(p.reshape([ROWS, BK // 8, 4, 2]), 3), 1)
    if total is not None:
        part += gl.convert_layout(before, gl.SliceLayout(1, part.type.layout), assert_trivial=True)[:, None] * total
    return p, above, part, before


@gluon.jit
def as_operand(p, dtype: gl.constexpr, COLUMNS: gl.constexpr):
    """Probabilities as the left operand of sums of so many columns, in registers: each thread has the numbers that it
    needs."""
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, accumulator(COLUMNS), 2), assert_trivial=True)


@gluon.jit
def for_sums(x, COLUMNS: gl.constexpr):
    """A number a row, as a factor on sums of so many columns."""
    return gl.convert_layout(x, gl.SliceLayout(1, accumulator(COLUMNS)), assert_trivial=True)[:, None]


@gluon.jit
def start_scores(pipe, s, phase, WHICH: gl.constexpr):
    mbarrier.wait(pipe.k_full.index(s), phase)
    return start_products(parts_of(pipe.q, WHICH, pipe.PARTS), parts_of(pipe.k, s, pipe.PARTS))


@gluon.jit
def attend(
    pipe, state, places, tiles, span, runs, SCALE: gl.constexpr, CAP: gl.constexpr, MASKED: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Steps span[0] to span[1] - 1.

    state: sums so far; the last tile's probabilities, which are not in them yet; each row's largest score and sums of
    exponentials. places: stages and phases of k and v, parity of the order. tiles: as `tile_of`.
    """
    acc, p, top, total = state
    k_s, k_phase, v_s, v_phase, parity = places
    V: gl.constexpr = pipe.V
    for step in range(span[0], span[1]):
        mbarrier.wait(pipe.order.index(WHICH), parity)
        parity ^= 1
        scores = start_scores(pipe, k_s, k_phase, WHICH)
        mbarrier.wait(pipe.v_full.index(v_s), v_phase)
        acc = warpgroup_mma(p, pipe.v.index(v_s), acc, is_async=True)
        mbarrier.arrive(pipe.order.index((WHICH + 1) % CONSUMERS), count=1)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(pipe.k_empty.index(k_s), count=1)
        k_s, k_phase = advance(k_s, k_phase, pipe.STAGES)
        at, end = tile_of(step, tiles, pipe.BK)
        new, top, total, before = softmax(capped(scores, CAP), top, total, at, end, runs, SCALE, MASKED)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(pipe.v_empty.index(v_s), count=1)
        v_s, v_phase = advance(v_s, v_phase, pipe.V_STAGES)
        acc *= for_sums(before, V)
        p = as_operand(new, pipe.v.dtype, V)
    return (acc, p, top, total), (k_s, k_phase, v_s, v_phase, parity)


@gluon.jit
def read_block(pipe):
    ONE: gl.constexpr = one_number(4, 1)
    row = pipe.block.index(0).load(ONE).item()
    least = pipe.block.index(1).load(ONE).item()
    most = pipe.block.index(2).load(ONE).item()
    right = pipe.block.index(3).load(ONE).item()
    masked = pipe.block.index(4).load(ONE).item()
    head = pipe.block.index(5).load(ONE).item()
    gl.barrier()  # here, not before the first wait of the loops: see `read_tile`
    return row, least, most, right, masked, head


@gluon.jit
def consume(
    pipe, out_desc, first_ptr, end_ptr, sinks_ptr, lse_ptr, T, SCALE: gl.constexpr, CAP: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    V: gl.constexpr = pipe.V
    BK: gl.constexpr = pipe.BK
    OF_ROW: gl.constexpr = gl.SliceLayout(1, accumulator(BK))
    k_s = 0
    k_phase = 0
    v_s = 0
    v_phase = 0
    q_phase = 0
    parity = 0
    if WHICH == CONSUMERS - 1:  # the first one begins
        mbarrier.arrive(pipe.order.index(0), count=1)
    mbarrier.wait(pipe.q_full.index(0), q_phase)
    row, least, most, right, masked, head = read_block(pipe)
    while row >= 0:
        rows = row + WHICH * ROWS + gl.arange(0, ROWS, layout=OF_ROW)
        first = gl.load(first_ptr + rows, mask=rows < T, other=0)
        stop = gl.load(end_ptr + rows, mask=rows < T, other=0)
        runs = (first, stop)
        steps = steps_of(least, most, BK)
        tiles = (steps, least, most, right)
        scores = warpgroup_mma_wait(0, deps=[start_scores(pipe, k_s, k_phase, WHICH)])
        mbarrier.arrive(pipe.k_empty.index(k_s), count=1)
        k_s, k_phase = advance(k_s, k_phase, pipe.STAGES)
        scores = capped(scores, CAP)
        top = gl.full([ROWS], NONE, gl.float32, OF_ROW)
        at, end = tile_of(0, tiles, BK)
        if sinks_ptr is None:
            p, top, total, _ = softmax(scores, top, None, at, end, runs, SCALE, True)
        else:  # has an exponential and no value
            top = gl.maximum(top, gl.load(sinks_ptr + head) * LOG2)
            p, top, total, _ = softmax(scores, top, 0.25, at, end, runs, SCALE, True)
        acc = gl.zeros([ROWS, V], gl.float32, accumulator(V))
        state = (acc, as_operand(p, pipe.v.dtype, V), top, total)
        places = (k_s, k_phase, v_s, v_phase, parity)
        state, places = attend(pipe, state, places, tiles, (1, masked), runs, SCALE, CAP, True, WHICH)
        span = (max(masked, 1), steps)
        state, places = attend(pipe, state, places, tiles, span, runs, SCALE, CAP, False, WHICH)
        acc, p, top, total = state
        k_s, k_phase, v_s, v_phase, parity = places
        if pipe.APART:
            mbarrier.arrive(pipe.q_empty.index(0), count=1)
        mbarrier.wait(pipe.v_full.index(v_s), v_phase)
        acc = warpgroup_mma(p, pipe.v.index(v_s), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(pipe.v_empty.index(v_s), count=1)
        v_s, v_phase = advance(v_s, v_phase, pipe.V_STAGES)
        sees = first < stop
        total = gl.where(sees, gl.convert_layout(gl.sum(total, 1), OF_ROW), 1.0)
        # Rows outside the sequences may hold NaN: selected, not multiplied.
        out = gl.where(for_sums(sees, V), acc * for_sums(1.0 / total, V), 0.0)
        tma.store_wait(0)
        pipe.out.index(WHICH).store(out.to(out_desc.dtype))
        fence_async_shared()
        buf = as_block(pipe.out.index(WHICH), out_desc)
        tma.async_store(out_desc, [row + WHICH * ROWS, head, 0], buf)
        if not pipe.APART:
            tma.store_wait(0)
            mbarrier.arrive(pipe.q_empty.index(0), count=1)
        lse = top + gl.log2(total)
        lse = gl.where(sees, gl.where(gl.maximum(lse, -lse) < EXACT, lse, LOW - LOW), 0.0)
        gl.store(lse_ptr + gl.cast(head, gl.int64) * T + rows, lse, mask=rows < T)
        q_phase ^= 1
        mbarrier.wait(pipe.q_full.index(0), q_phase)
        row, least, most, right, masked, head = read_block(pipe)
    tma.store_wait(0)


@gluon.jit
def packed_attention_fwd_kernel(
    q_desc, k_desc, v_desc, first, end, sinks, blocks, out_desc, out, lse, T, sizes, D: gl.constexpr,
    PARTS: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    SCALE: gl.constexpr, CAP: gl.constexpr, SECTION: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    pipe = make_pipeline(k_desc.dtype, D, PARTS, V, 1, BK, STAGES, STAGES, APART, False)
    loads = (pipe, q_desc, k_desc, v_desc, None, blocks, sizes, SECTION)
    gl.warp_specialize([
        (consume, (pipe, out_desc, first, end, sinks, lse, T, SCALE, CAP, 0)),
        (consume, (pipe, out_desc, first, end, sinks, lse, T, SCALE, CAP, 1)),
        (produce, loads),
    ], [4, 1], [240, 24])  # fmt: skip


_L2_BYTES = 2**25  # of keys and values of a section of heads: two thirds of L2


def window_box(x: jax.Array, rows: int, columns: int) -> TensorDescriptor:
    """Of x [S, K, H] a box of so many rows and columns of a head, of windows that start at each row: [first row of the
    window, row in it, head, column]. Columns past H are zeros."""
    (S, K, D), window = x.shape, (1, rows, 1, columns)
    return TensorDescriptor(x, (S, rows, K, D), (K * D, K * D, D, 1), window, tile_layout(x.dtype, window))


def row_box(x: jax.Array, columns: int) -> TensorDescriptor:
    """Of x [T, N, H] a box of a consumer's rows of a head."""
    block = (_ROWS, 1, columns)
    return TensorDescriptor.from_array(x, block, layout=tile_layout(x.dtype, block))


def padded(x: jax.Array) -> int:
    """Columns of a head of x [rows, heads, H] in shared memory."""
    return max(16, power_of_2(x.shape[2]))


def section(x: jax.Array, y: jax.Array) -> int:
    """Heads of x and y [rows, heads, H] that L2 holds at a time."""
    return max(_L2_BYTES // (x.shape[0] * (x.shape[2] + y.shape[2]) * x.dtype.itemsize), 1)


def scales(spec: Spec) -> tuple[float, float | None]:
    """SCALE and CAP: logarithms are SCALE * capped(products, CAP)."""
    if spec.soft_cap is None:
        return spec.scale * LOG2_E, None
    return spec.soft_cap * LOG2_E, spec.scale / spec.soft_cap


def forward_triton(spec: Spec, tiles: Tiles, arrays: Arrays, *, cores: int) -> tuple[jax.Array, jax.Array]:
    """(out [T, N, V], lse float32 [N, T]: each row's base 2 logarithm of the sum of exponentials). No size is 0."""
    q, k, v, first, end, _, sinks = arrays
    (T, N, D), (S, K, V) = q.shape, v.shape
    scale, cap = scales(spec)
    q = -q if scale < 0 else q  # so that the largest product is the largest score
    scale = max(abs(scale), 1e-30)  # 0 times a masked score's -inf were NaN
    block = (_ROWS, 1, padded(v))
    columns, part = head_columns(D)
    blocks = query_blocks(first, end, S=S, bq=tiles.bq, bk=tiles.bk)
    rows = blocks.shape[0]
    return triton_call(
        row_box(q, part), window_box(k, tiles.bk, part), window_box(v, tiles.bk, padded(v)), first, end, sinks,
        Scratch(jnp.append(blocks.ravel(), jnp.int32(0))), OutTile(block, tile_layout(q.dtype, block)),
        kernel=packed_attention_fwd_kernel, name="packed_attention_fwd", grid=min(cores, rows * N),
        out_type=(out_struct((T, N, V), q.dtype, like=q), out_struct((N, T), jnp.float32, like=q)),
        flops=2 * spec.pairs * N * (D + V), T=T, sizes=(rows, N, N // K), D=part, PARTS=columns // part,
        V=padded(v), BK=tiles.bk, STAGES=tiles.stages, SCALE=scale, CAP=cap,
        SECTION=min(N // K * section(k, v), N), APART=hopper_memory("fwd", tiles, (D, V)).apart,
    )  # fmt: skip
