"""The gradients of k and v on Hopper, in Gluon.

A persistent kernel. A program takes blocks of key rows of one head, the longest first, and loops over the tiles of
queries, of all heads that share the keys, that see some of them: deterministic, without atomics. One producer warp
loads by TMA. Two consumer warp groups have 64 of the keys each, in shared memory, and the sums of both gradients in
registers. Scores are transposed, [keys, queries], so that probabilities and their gradients are left operands as they
are, from registers. Wide heads have a launch for dk and one for dv: registers have no room for the sums of both.

A tile of queries ends where the sequences end: its box is cut off there, since behind it may lie NaN.
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
from jaxops._lib.gluon.launch_triton import OutTile, Scratch, TensorDescriptor, triton_call
from jaxops._lib.gluon.layouts_triton import accumulator
from jaxops._lib.gluon.stores_triton import tile_layout
from jaxops._lib.gluon.tile_scheduler_triton import finish_fetch_add, opaque, start_fetch_add
from jaxops.ops.packed_attention.fwd_triton import (
    CONSUMERS,
    FIELDS,
    ROWS,
    as_operand,
    capped,
    load_block,
    make_barriers,
    mask,
    read_block,
    row_box,
    scales,
    section,
    window_box,
    write_block,
    write_end,
)
from jaxops.ops.packed_attention.parts_triton import (
    finish_sums,
    load_parts,
    parts_of,
    start_products,
    start_sums,
    store_sums,
    zero_sums,
)
from jaxops.ops.packed_attention.plan import Arrays, Spec, Tiles, gradients_apart, head_columns, hopper_memory
from jaxops.ops.packed_attention.visible import CONSUMER_ROWS, key_blocks


@gluon.aggregate
class Pipeline:
    """Shared memory and its synchronisation.

    k, v: [CONSUMERS * PARTS, ROWS, D] and [CONSUMERS * V_PARTS, ROWS, V], of a block.
    dk, dv: likewise; without APART in the memory of k and v.
    q, dout: [STAGES * PARTS, BQ, D] and [V_STAGES * V_PARTS, BQ, V].
    lse, along: [STAGES, 1, BQ] and [V_STAGES, 1, BQ], with q and dout.
    runs: [STAGES, 1, BQ], with q, of `write_runs`.
    block: what the consumers must know of a block: FIELDS numbers and the head.
    keys_*: an mbarrier for k and v. q_*, dout_*: an mbarrier a stage; with both dk and dv those of q are for dout, too.
    PARTS, V_PARTS: of D and V columns, which make a head of q and k, and of v.
    DK, DV: whether dk and dv are computed.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    dk: gl.shared_memory_descriptor
    dv: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    along: gl.shared_memory_descriptor
    runs: gl.shared_memory_descriptor
    block: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    keys_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    dout_full: gl.shared_memory_descriptor
    dout_empty: gl.shared_memory_descriptor
    D: gl.constexpr
    PARTS: gl.constexpr
    V: gl.constexpr
    V_PARTS: gl.constexpr
    BQ: gl.constexpr
    STAGES: gl.constexpr
    V_STAGES: gl.constexpr
    DK: gl.constexpr
    DV: gl.constexpr
    APART: gl.constexpr


@gluon.jit
def make_pipeline(
    dtype: gl.constexpr, D: gl.constexpr, PARTS: gl.constexpr, V: gl.constexpr, V_PARTS: gl.constexpr,
    BQ: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr,
    APART: gl.constexpr,
):  # fmt: skip
    OF_KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    OF_VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, V], dtype)
    OF_ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BQ, D], dtype)
    OF_DOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BQ, V], dtype)
    OF_NUMBERS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k = gl.allocate_shared_memory(dtype, [CONSUMERS * PARTS, ROWS, D], OF_KEYS)
    v = gl.allocate_shared_memory(dtype, [CONSUMERS * V_PARTS, ROWS, V], OF_VALUES)
    dk = k
    dv = v
    if APART:
        dk = gl.allocate_shared_memory(dtype, [CONSUMERS * PARTS, ROWS, D], OF_KEYS)
        dv = gl.allocate_shared_memory(dtype, [CONSUMERS * V_PARTS, ROWS, V], OF_VALUES)
    return Pipeline(
        k, v, dk, dv,
        gl.allocate_shared_memory(dtype, [STAGES * PARTS, BQ, D], OF_ROWS),
        gl.allocate_shared_memory(dtype, [V_STAGES * V_PARTS, BQ, V], OF_DOUT),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BQ], OF_NUMBERS),
        gl.allocate_shared_memory(gl.float32, [V_STAGES, 1, BQ], OF_NUMBERS),
        gl.allocate_shared_memory(gl.int32, [STAGES, 1, BQ], OF_NUMBERS),
        gl.allocate_shared_memory(gl.int32, [FIELDS + 1, 1], FLAT),
        make_barriers(1, 1), make_barriers(1, CONSUMERS), make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS),
        make_barriers(V_STAGES, 1), make_barriers(V_STAGES, CONSUMERS),
        D, PARTS, V, V_PARTS, BQ, STAGES, V_STAGES, DK, DV, APART,
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
def write_runs(buf, runs, key, at, end, BQ: gl.constexpr):
    """Which of the block's keys, from `key` on, each query of a tile sees: a word of 2 ** 16 * the first one + how
    many they are. The producer writes them, so that the consumers do not wait for the loads. TMA would load two
    words a query, for which shared memory has no room."""
    queries = end - BQ + gl.arange(0, BQ, layout=gl.BlockedLayout([BQ // 32], [32], [1], [0]))
    there = queries >= at
    first, stop = runs
    first = gl.load(first + queries, mask=there, other=0) - key
    stop = gl.load(stop + queries, mask=there, other=0) - key
    first = gl.minimum(gl.maximum(first, 0), CONSUMERS * ROWS)
    stop = gl.minimum(gl.maximum(stop, 0), CONSUMERS * ROWS)
    buf.reshape([BQ]).store(first * 65536 + stop - first)


@gluon.jit
def produce(pipe, q_desc, dout_desc, numbers, k_desc, v_desc, blocks, inside, sizes, SECTION: gl.constexpr):
    """Loads the operands of this program's blocks, until there are no more. numbers: of queries: descriptors of lse and
    along, and the runs of keys that they see."""
    rows, heads, group = sizes
    lse_desc, along_desc, runs = numbers
    BQ: gl.constexpr = pipe.BQ
    OF_Q: gl.constexpr = pipe.PARTS * q_desc.nbytes_per_cta + lse_desc.nbytes_per_cta
    OF_DOUT: gl.constexpr = pipe.V_PARTS * dout_desc.nbytes_per_cta + along_desc.nbytes_per_cta
    BOTH: gl.constexpr = pipe.DK and pipe.DV
    bounds = (gl.load(inside), gl.load(inside + 1))
    q_s = 0
    q_phase = 1
    dout_s = 0
    dout_phase = 1
    keys_phase = 1
    t = gl.program_id(0)
    while t < rows * heads:
        following = start_fetch_add(blocks + FIELDS * rows)
        values = load_block(blocks, t, rows, heads, SECTION)
        key, number, left, right, steps, head = values
        mbarrier.wait(pipe.keys_empty.index(0), keys_phase)
        keys_phase ^= 1
        write_block(pipe, values)
        keys_full = pipe.keys_full.index(0)
        OF_KEYS: gl.constexpr = pipe.PARTS * k_desc.nbytes_per_cta + pipe.V_PARTS * v_desc.nbytes_per_cta
        mbarrier.expect(keys_full, CONSUMERS * OF_KEYS)
        for n in gl.static_range(CONSUMERS):
            own = (key + n * ROWS, head)
            load_parts(k_desc, parts_of(pipe.k, n, pipe.PARTS), keys_full, own)
            load_parts(v_desc, parts_of(pipe.v, n, pipe.V_PARTS), keys_full, own)
        tiles = (number, left, right, steps, bounds)
        for each in range(group):
            q_head = head * group + each
            for step in range(steps):
                row, at, end = tile_of(step, tiles, BQ)
                box = (at, end - BQ - at, q_head)
                full = pipe.q_full.index(q_s)
                mbarrier.wait(pipe.q_empty.index(q_s), q_phase)
                if step < left + right:
                    write_runs(pipe.runs.index(q_s), runs, key, at, end, BQ)
                mbarrier.expect(full, OF_Q + OF_DOUT if BOTH else OF_Q)
                load_parts(q_desc, parts_of(pipe.q, q_s, pipe.PARTS), full, box)
                tma.async_load(lse_desc, [q_head, row], full, pipe.lse.index(q_s))
                if BOTH:
                    dout_s = q_s
                else:
                    full = pipe.dout_full.index(dout_s)
                    mbarrier.wait(pipe.dout_empty.index(dout_s), dout_phase)
                    mbarrier.expect(full, OF_DOUT)
                load_parts(dout_desc, parts_of(pipe.dout, dout_s, pipe.V_PARTS), full, box)
                tma.async_load(along_desc, [q_head, row], full, pipe.along.index(dout_s))
                q_s, q_phase = advance(q_s, q_phase, pipe.STAGES)
                dout_s, dout_phase = advance(dout_s, dout_phase, pipe.V_STAGES)
        t = gl.num_programs(0) + finish_fetch_add(following)
    mbarrier.wait(pipe.keys_empty.index(0), keys_phase)
    write_end(pipe, pipe.keys_full)


@gluon.jit
def numbers_of(buf, s, BQ: gl.constexpr):
    """A number a query, for each column of a tile's scores."""
    return buf.index(s).reshape([BQ]).load(gl.SliceLayout(0, accumulator(BQ)))[None, :]


@gluon.jit
def add_tiles(
    pipe, sums, places, span, last, SCALE: gl.constexpr, CAP: gl.constexpr, MASKED: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """Steps span[0] to span[1] - 1 of one head. last: the steps of the block's last head, 0 for the others."""
    dk, dv = sums
    q_s, q_phase, dout_s, dout_phase = places
    BQ: gl.constexpr = pipe.BQ
    for step in range(span[0], span[1]):
        if pipe.DK and pipe.DV:
            dout_s = q_s
        mbarrier.wait(pipe.q_full.index(q_s), q_phase)
        own = opaque(WHICH)  # else ptxas computes addresses before the loop, and spills them
        k = parts_of(pipe.k, own, pipe.PARTS)
        v = parts_of(pipe.v, own, pipe.V_PARTS)
        q = parts_of(pipe.q, q_s, pipe.PARTS)
        dout = parts_of(pipe.dout, dout_s, pipe.V_PARTS)
        scores = start_products(k, q)
        if pipe.DK:
            if not pipe.DV:
                mbarrier.wait(pipe.dout_full.index(dout_s), dout_phase)
            products = start_products(v, dout)
            scores = warpgroup_mma_wait(pipe.V_PARTS, deps=[scores])
        else:
            scores = warpgroup_mma_wait(0, deps=[scores])
        shares = capped(scores, CAP)
        scores = shares * SCALE - numbers_of(pipe.lse, q_s, BQ)
        if MASKED:  # behind: key - first, in the upper half of a word
            keys = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, accumulator(BQ)))
            runs = numbers_of(pipe.runs, q_s, BQ)
            scores = mask(scores, (keys * 65536 + 65535)[:, None] - runs, runs << 16)
        if not pipe.DK:
            mbarrier.arrive(pipe.q_empty.index(q_s), count=1)
        p = gl.exp2(scores)
        if pipe.DV:
            of_values = as_operand(p, pipe.dout.dtype, pipe.V)
            if not pipe.DK:
                mbarrier.wait(pipe.dout_full.index(dout_s), dout_phase)
            dv = start_sums(of_values, dout, dv)
        if pipe.DK:
            if CAP is not None:
                slope = 1.0 - shares * shares
                p = gl.where(p != 0.0, p * slope, 0.0) if MASKED else p * slope
            products = warpgroup_mma_wait(pipe.V_PARTS if pipe.DV else 0, deps=[products])
            if pipe.APART:  # the next block's k and v are loaded beside the rest of the last step
                mbarrier.arrive(pipe.keys_empty.index(0), count=1, pred=step + 1 == last)
            ds = p * (products - numbers_of(pipe.along, dout_s, BQ))
            if MASKED:  # keys outside may be NaN, and so are their products with dout
                ds = gl.where(p != 0.0, ds, 0.0)
            if not pipe.DV:
                mbarrier.arrive(pipe.dout_empty.index(dout_s), count=1)
            dk = start_sums(as_operand(ds, pipe.q.dtype, pipe.D), q, dk)
            dk = finish_sums(dk)
        if pipe.DV:
            dv = finish_sums(dv)
        if pipe.DK:
            mbarrier.arrive(pipe.q_empty.index(q_s), count=1)
        else:
            mbarrier.arrive(pipe.dout_empty.index(dout_s), count=1)
        q_s, q_phase = advance(q_s, q_phase, pipe.STAGES)
        dout_s, dout_phase = advance(dout_s, dout_phase, pipe.V_STAGES)
    return (dk, dv), (q_s, q_phase, dout_s, dout_phase)


@gluon.jit
def consume(
    pipe, dk_desc, dv_desc, group, SCALE: gl.constexpr, CAP: gl.constexpr, FACTOR: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    places = (0, 0, 0, 0)
    keys_phase = 0
    mbarrier.wait(pipe.keys_full.index(0), keys_phase)
    row, _, left, right, steps, head = read_block(pipe)
    while row >= 0:
        own = row + WHICH * ROWS
        masked = left + right
        # The compiler drops the sums of a gradient that is not computed.
        sums = (zero_sums(ROWS, pipe.D, pipe.PARTS), zero_sums(ROWS, pipe.V, pipe.V_PARTS))
        for each in range(group):
            last = gl.where(each + 1 == group, steps, 0)
            sums, places = add_tiles(pipe, sums, places, (0, masked), last, SCALE, CAP, True, WHICH)
            sums, places = add_tiles(pipe, sums, places, (masked, steps), last, SCALE, CAP, False, WHICH)
        dk, dv = sums
        tma.store_wait(0)
        if pipe.DK:
            store_sums(dk_desc, parts_of(pipe.dk, WHICH, pipe.PARTS), dk, FACTOR, None, own, head)
        if pipe.DV:
            store_sums(dv_desc, parts_of(pipe.dv, WHICH, pipe.V_PARTS), dv, 1.0, None, own, head)
        if pipe.APART:
            mbarrier.arrive(pipe.keys_empty.index(0), count=1, pred=steps == 0)
        else:
            tma.store_wait(0)
            mbarrier.arrive(pipe.keys_empty.index(0), count=1)
        keys_phase ^= 1
        mbarrier.wait(pipe.keys_full.index(0), keys_phase)
        row, _, left, right, steps, head = read_block(pipe)
    tma.store_wait(0)


@gluon.jit
def packed_attention_dkv_kernel(
    q_desc, dout_desc, lse_desc, along_desc, k_desc, v_desc, first, end, inside, blocks, dk_desc, dv_desc, dk, dv,
    sizes, D: gl.constexpr, PARTS: gl.constexpr, V: gl.constexpr, V_PARTS: gl.constexpr, BQ: gl.constexpr,
    STAGES: gl.constexpr, V_STAGES: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr, FACTOR: gl.constexpr,
    SECTION: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    DK: gl.constexpr = dk_desc is not None
    DV: gl.constexpr = dv_desc is not None
    pipe = make_pipeline(k_desc.dtype, D, PARTS, V, V_PARTS, BQ, STAGES, V_STAGES, DK, DV, APART)
    group = sizes[2]
    numbers = (lse_desc, along_desc, (first, end))
    loads = (pipe, q_desc, dout_desc, numbers, k_desc, v_desc, blocks, inside, sizes, SECTION)
    gl.warp_specialize([
        (consume, (pipe, dk_desc, dv_desc, group, SCALE, CAP, FACTOR, 0)),
        (consume, (pipe, dk_desc, dv_desc, group, SCALE, CAP, FACTOR, 1)),
        (produce, loads),
    ], [4, 1], [240, 24])  # fmt: skip


def in_tiles(bq: int, inside: jax.Array, *numbers: jax.Array) -> list[jax.Array]:
    """Numbers of rows [N, T] as tiles of bq lie in shared memory [N, tiles * bq]: at the end of their box, which ends
    where the sequences end. TMA could not load them from there, where rows start at no multiple of 16 bytes."""
    row = jnp.arange(-(-numbers[0].shape[1] // bq) * bq, dtype=jnp.int32)
    start = row // bq * bq
    row = row - start + jnp.minimum(start + bq, inside[1]) - bq
    there = row >= jnp.maximum(start, inside[0])  # the others see no key
    return [jnp.where(there, jnp.take(x, row, axis=1, mode="clip"), 0) for x in numbers]


def gradients_of_keys(
    spec: Spec, tiles: Tiles, arrays: Arrays, lse: jax.Array, along: jax.Array, dout: jax.Array, *, cores: int
) -> tuple[jax.Array, jax.Array]:
    """(dk [S, K, H], dv [S, K, V]). lse, along: of `row_numbers`."""
    q, k, v, first, end, inside, _ = arrays
    numbers = in_tiles(tiles.bq, inside, lse, along)
    (_, N, D), (S, K, V) = q.shape, v.shape
    (columns, part), (values, value_part) = head_columns(D), head_columns(V)
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    boxes_of_numbers = [TensorDescriptor.from_array(x, (1, tiles.bq), layout=flat) for x in numbers]
    blocks = key_blocks(first, end, S=S, bq=tiles.bq, bk=tiles.bk)
    scale, cap = scales(spec)
    memory = hopper_memory("dkv", tiles, (D, V))
    gradients = {"dk": (k, (CONSUMER_ROWS, 1, part)), "dv": (v, (CONSUMER_ROWS, 1, value_part))}

    def launch(name: str, *made: str) -> tuple[jax.Array, ...]:
        """made: "dk", "dv", or both in this order."""
        results: dict[str, OutTile | None] = dict.fromkeys(gradients)
        for i, each in enumerate(made):
            like, shape = gradients[each]
            results[each] = OutTile(shape, tile_layout(like.dtype, shape), result=i)
        products = D + ("dk" in made) * (D + V) + ("dv" in made) * V
        return triton_call(
            window_box(q, tiles.bq, part), window_box(dout, tiles.bq, value_part), *boxes_of_numbers,
            row_box(k, part), row_box(v, value_part), first, end, inside,
            Scratch(jnp.append(blocks.ravel(), jnp.int32(0))), *results.values(),
            kernel=packed_attention_dkv_kernel, name=name, grid=min(cores, blocks.shape[0] * K),
            out_type=tuple(out_struct(x.shape, x.dtype, like=x) for x, _ in map(gradients.__getitem__, made)),
            flops=2 * spec.pairs * N * products, sizes=(blocks.shape[0], K, N // K), D=part, PARTS=columns // part,
            V=value_part, V_PARTS=values // value_part, BQ=tiles.bq,
            STAGES=tiles.stages if "dk" in made else memory.early,
            V_STAGES=tiles.stages if "dv" in made else memory.early, SCALE=scale, CAP=cap, FACTOR=spec.scale,
            SECTION=min(max(section(q, dout) * K // N, 1), K), APART=memory.apart,
            **{each: None for each in gradients if each not in made},
        )  # fmt: skip

    if gradients_apart((D, V)):
        return *launch("packed_attention_dk", "dk"), *launch("packed_attention_dv", "dv")
    return launch("packed_attention_dkv", "dk", "dv")
