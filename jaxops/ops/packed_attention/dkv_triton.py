"""The gradients of k and v on Hopper, in Gluon.

A persistent kernel. A program takes blocks of key rows of one head, the longest first, and loops over the tiles of
queries, of all heads that share the keys, that see some of them: deterministic, without atomics. One producer warp
loads by TMA. Two consumer warp groups have 64 of the keys each, in shared memory, and the sums of both gradients in
registers. Scores are transposed, [keys, queries], so that probabilities and their gradients are left operands as they
are, from registers.

A tile of queries ends where the sequences end: its box is cut off there, since behind it may lie NaN.
"""

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
from jaxops._lib.gluon.gemm_triton import advance
from jaxops._lib.gluon.launch_triton import OutTile, Scratch, TensorDescriptor, triton_call
from jaxops._lib.gluon.layouts_triton import accumulator
from jaxops._lib.gluon.stores_triton import as_block, tile_layout
from jaxops._lib.gluon.tile_scheduler_triton import finish_fetch_add, start_fetch_add
from jaxops.ops.packed_attention.fwd_triton import (
    FIELDS,
    LOW,
    ROWS,
    as_operand,
    capped,
    load_block,
    make_barriers,
    padded,
    read_block,
    row_box,
    scales,
    section,
    window_box,
    write_block,
    write_end,
)
from jaxops.ops.packed_attention.plan import Arrays, Spec, Tiles
from jaxops.ops.packed_attention.visible import CONSUMER_ROWS, key_blocks

CONSUMERS = gl.constexpr(2)


@gluon.aggregate
class Pipeline:
    """Shared memory and its synchronisation.

    k, v: [CONSUMERS, ROWS, D] and [CONSUMERS, ROWS, V], of a block; its gradients leave through them. q, dout:
    [STAGES, BQ, D] and [STAGES, BQ, V].
    lse, along: [STAGES, 1, BQ].
    block: what the consumers must know of a block: FIELDS numbers and the head.
    keys_*: an mbarrier for k and v. full, empty: an mbarrier a stage.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    along: gl.shared_memory_descriptor
    block: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    keys_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    D: gl.constexpr
    V: gl.constexpr
    BQ: gl.constexpr
    STAGES: gl.constexpr


@gluon.jit
def make_pipeline(dtype: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BQ: gl.constexpr, STAGES: gl.constexpr):
    OF_KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    OF_VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, V], dtype)
    OF_ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BQ, D], dtype)
    OF_DOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BQ, V], dtype)
    OF_NUMBERS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Pipeline(
        gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, D], OF_KEYS),
        gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, V], OF_VALUES),
        gl.allocate_shared_memory(dtype, [STAGES, BQ, D], OF_ROWS),
        gl.allocate_shared_memory(dtype, [STAGES, BQ, V], OF_DOUT),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BQ], OF_NUMBERS),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BQ], OF_NUMBERS),
        gl.allocate_shared_memory(gl.int32, [FIELDS + 1, 1], FLAT),
        make_barriers(1, 1), make_barriers(1, CONSUMERS), make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS),
        D, V, BQ, STAGES,
    )  # fmt: skip


@gluon.jit
def tile_of(step, tiles, BQ: gl.constexpr):
    """A step's tile: where its numbers start, its first query, and the end of its queries. Tiles that some row does not
    see whole come first."""
    number, left, right, steps, inside = tiles
    masked = left + right
    at = gl.where(step < left, step, gl.where(step < masked, steps - masked + step, step - right))
    row = (number + at) * BQ
    return row, max(row, inside[0]), min(row + BQ, inside[1])


@gluon.jit
def produce(
    pipe, q_desc, dout_desc, lse_desc, along_desc, k_desc, v_desc, blocks, inside, sizes, SECTION: gl.constexpr
):
    """Loads the operands of this program's blocks, until there are no more."""
    rows, heads, group = sizes
    BQ: gl.constexpr = pipe.BQ
    BYTES: gl.constexpr = q_desc.nbytes_per_cta + dout_desc.nbytes_per_cta + 2 * lse_desc.nbytes_per_cta
    bounds = (gl.load(inside), gl.load(inside + 1))
    s = 0
    phase = 1
    keys_phase = 1
    t = gl.program_id(0)
    while t < rows * heads:
        following = start_fetch_add(blocks + FIELDS * rows)
        values = load_block(blocks, t, rows, heads, SECTION)
        row, number, left, right, steps, head = values
        mbarrier.wait(pipe.keys_empty.index(0), keys_phase)
        keys_phase ^= 1
        write_block(pipe, values)
        keys_full = pipe.keys_full.index(0)
        mbarrier.expect(keys_full, CONSUMERS * (k_desc.nbytes_per_cta + v_desc.nbytes_per_cta))
        for n in gl.static_range(CONSUMERS):
            tma.async_load(k_desc, [row + n * ROWS, head, 0], keys_full, as_block(pipe.k.index(n), k_desc))
            tma.async_load(v_desc, [row + n * ROWS, head, 0], keys_full, as_block(pipe.v.index(n), v_desc))
        tiles = (number, left, right, steps, bounds)
        for each in range(group):
            q_head = head * group + each
            for step in range(steps):
                row, at, end = tile_of(step, tiles, BQ)
                full = pipe.full.index(s)
                mbarrier.wait(pipe.empty.index(s), phase)
                mbarrier.expect(full, BYTES)
                box = [at, end - BQ - at, q_head, 0]
                tma.async_load(q_desc, box, full, as_block(pipe.q.index(s), q_desc))
                tma.async_load(dout_desc, box, full, as_block(pipe.dout.index(s), dout_desc))
                tma.async_load(lse_desc, [q_head, row], full, pipe.lse.index(s))
                tma.async_load(along_desc, [q_head, row], full, pipe.along.index(s))
                s, phase = advance(s, phase, pipe.STAGES)
        t = gl.num_programs(0) + finish_fetch_add(following)
    mbarrier.wait(pipe.keys_empty.index(0), keys_phase)
    write_end(pipe, pipe.keys_full)


@gluon.jit
def numbers_of(buf, s, BQ: gl.constexpr):
    """A number a query, for each column of a tile's scores."""
    return buf.index(s).reshape([BQ]).load(gl.SliceLayout(0, accumulator(BQ)))[None, :]


@gluon.jit
def seen_from(keys, row, runs, BQ: gl.constexpr):
    """Which of a tile's queries see each key."""
    queries = row + gl.arange(0, BQ, layout=gl.SliceLayout(0, accumulator(BQ)))
    first = gl.load(runs[0] + queries)
    stop = gl.load(runs[1] + queries)
    return (first[None, :] <= keys[:, None]) & (keys[:, None] < stop[None, :])


@gluon.jit
def add_tiles(
    pipe, sums, places, tiles, span, rows, SCALE: gl.constexpr, CAP: gl.constexpr, MASKED: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Steps span[0] to span[1] - 1 of one head. rows: the keys, and where each query's runs of keys are."""
    dk, dv = sums
    keys, runs = rows
    s, phase = places
    BQ: gl.constexpr = pipe.BQ
    none = gl.zeros([ROWS, BQ], gl.float32, accumulator(BQ))
    for step in range(span[0], span[1]):
        mbarrier.wait(pipe.full.index(s), phase)
        q = pipe.q.index(s)
        dout = pipe.dout.index(s)
        scores = warpgroup_mma(pipe.k.index(WHICH), q.permute((1, 0)), none, use_acc=False, is_async=True)
        products = warpgroup_mma(pipe.v.index(WHICH), dout.permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        shares = capped(scores, CAP)
        scores = shares * SCALE - numbers_of(pipe.lse, s, BQ)
        if MASKED:
            row, _, _ = tile_of(step, tiles, BQ)
            scores = gl.where(seen_from(keys, row, runs, BQ), scores, LOW)
        p = gl.exp2(scores)
        of_values = as_operand(p, dout.dtype, pipe.V)
        if CAP is not None:
            slope = 1.0 - shares * shares
            p = gl.where(p != 0.0, p * slope, 0.0) if MASKED else p * slope
        dv = warpgroup_mma(of_values, dout, dv, is_async=True)
        products = warpgroup_mma_wait(1, deps=[products])
        ds = p * (products - numbers_of(pipe.along, s, BQ))
        if MASKED:  # keys outside may be NaN, and so are their products with dout
            ds = gl.where(p != 0.0, ds, 0.0)
        dk = warpgroup_mma(as_operand(ds, q.dtype, pipe.D), q, dk, is_async=True)
        dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
        mbarrier.arrive(pipe.empty.index(s), count=1)
        s, phase = advance(s, phase, pipe.STAGES)
    return (dk, dv), (s, phase)


@gluon.jit
def consume(
    pipe, dk_desc, dv_desc, runs, inside, group, SCALE: gl.constexpr, CAP: gl.constexpr, FACTOR: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = pipe.D
    V: gl.constexpr = pipe.V
    places = (0, 0)
    keys_phase = 0
    bounds = (gl.load(inside), gl.load(inside + 1))
    mbarrier.wait(pipe.keys_full.index(0), keys_phase)
    row, number, left, right, steps, head = read_block(pipe)
    while row >= 0:
        own = row + WHICH * ROWS
        keys = own + gl.arange(0, ROWS, layout=gl.SliceLayout(1, accumulator(pipe.BQ)))
        rows = (keys, runs)
        tiles = (number, left, right, steps, bounds)
        masked = left + right
        sums = (gl.zeros([ROWS, D], gl.float32, accumulator(D)), gl.zeros([ROWS, V], gl.float32, accumulator(V)))
        for _ in range(group):
            sums, places = add_tiles(pipe, sums, places, tiles, (0, masked), rows, SCALE, CAP, True, WHICH)
            sums, places = add_tiles(pipe, sums, places, tiles, (masked, steps), rows, SCALE, CAP, False, WHICH)
        dk, dv = sums
        pipe.k.index(WHICH).store((dk * FACTOR).to(dk_desc.dtype))
        pipe.v.index(WHICH).store(dv.to(dv_desc.dtype))
        fence_async_shared()
        tma.async_store(dk_desc, [own, head, 0], as_block(pipe.k.index(WHICH), dk_desc))
        tma.async_store(dv_desc, [own, head, 0], as_block(pipe.v.index(WHICH), dv_desc))
        tma.store_wait(0)
        mbarrier.arrive(pipe.keys_empty.index(0), count=1)
        keys_phase ^= 1
        mbarrier.wait(pipe.keys_full.index(0), keys_phase)
        row, number, left, right, steps, head = read_block(pipe)


@gluon.jit
def packed_attention_dkv_kernel(
    q_desc, dout_desc, lse_desc, along_desc, k_desc, v_desc, first, end, inside, blocks, dk_desc, dv_desc, dk, dv,
    sizes, D: gl.constexpr, V: gl.constexpr, BQ: gl.constexpr, STAGES: gl.constexpr, SCALE: gl.constexpr,
    CAP: gl.constexpr, FACTOR: gl.constexpr, SECTION: gl.constexpr,
):  # fmt: skip
    pipe = make_pipeline(k_desc.dtype, D, V, BQ, STAGES)
    group = sizes[2]
    runs = (first, end)
    loads = (pipe, q_desc, dout_desc, lse_desc, along_desc, k_desc, v_desc, blocks, inside, sizes, SECTION)
    gl.warp_specialize([
        (consume, (pipe, dk_desc, dv_desc, runs, inside, group, SCALE, CAP, FACTOR, 0)),
        (consume, (pipe, dk_desc, dv_desc, runs, inside, group, SCALE, CAP, FACTOR, 1)),
        (produce, loads),
    ], [4, 1], [240, 24])  # fmt: skip


def in_tiles(
    bq: int, inside: jax.Array, first: jax.Array, end: jax.Array, lse: jax.Array, along: jax.Array
) -> tuple[jax.Array, ...]:
    """Numbers of rows [..., T] as tiles of bq lie in shared memory [..., tiles * bq]: at the end of their box, which
    ends where the sequences end. TMA could not load them from there, where rows start at no multiple of 16 bytes."""
    row = jnp.arange(-(-first.shape[0] // bq) * bq, dtype=jnp.int32)
    start = row // bq * bq
    row = row - start + jnp.minimum(start + bq, inside[1]) - bq
    there = row >= jnp.maximum(start, inside[0])
    of = lambda x, other: jnp.where(there, jnp.take(x, row, axis=-1, mode="clip"), other)
    return of(first, 0), of(end, 0), of(lse, jnp.inf), of(along, 0)


def gradients_of_keys(
    spec: Spec, tiles: Tiles, arrays: Arrays, lse: jax.Array, along: jax.Array, dout: jax.Array, *, cores: int
) -> tuple[jax.Array, jax.Array]:
    """(dk [S, K, H], dv [S, K, V]). lse, along: of `row_numbers`."""
    q, k, v, first, end, inside, _ = arrays
    numbers = in_tiles(tiles.bq, inside, first, end, lse, along)
    (_, N, D), (S, K, V) = q.shape, v.shape
    shapes = [(CONSUMER_ROWS, 1, padded(x)) for x in (k, v)]
    results = [OutTile(shape, tile_layout(k.dtype, shape), result=i) for i, shape in enumerate(shapes)]
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    boxes_of_numbers = [TensorDescriptor.from_array(x, (1, tiles.bq), layout=flat) for x in numbers[2:]]
    blocks = key_blocks(first, end, S=S, bq=tiles.bq, bk=tiles.bk)
    scale, cap = scales(spec)
    return triton_call(
        *(window_box(x, tiles.bq, padded(x)) for x in (q, dout)), *boxes_of_numbers,
        *(row_box(x, padded(x)) for x in (k, v)), *numbers[:2], inside,
        Scratch(jnp.append(blocks.ravel(), jnp.int32(0))), *results,
        kernel=packed_attention_dkv_kernel, name="packed_attention_dkv", grid=min(cores, blocks.shape[0] * K),
        out_type=tuple(out_struct(x.shape, x.dtype, like=x) for x in (k, v)), flops=4 * spec.pairs * N * (D + V),
        sizes=(blocks.shape[0], K, N // K), D=padded(k), V=padded(v),
        BQ=tiles.bq, STAGES=tiles.stages, SCALE=scale, CAP=cap, FACTOR=spec.scale,
        SECTION=min(max(section(q, dout) * K // N, 1), K),
    )  # fmt: skip
