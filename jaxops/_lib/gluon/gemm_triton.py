"""Products over ragged groups on Hopper, in Gluon: pipeline, producer and mainloop, once for all ops.

A persistent kernel. One producer (a warp; four warps if rows are gathered) takes tiles from the tile scheduler and
loads their operands by TMA into the pipeline's stages. Two consumer warp groups multiply (wgmma), run the op's epilogue
and store (epilogue_triton.py). Cooperative: both work on one tile, each on half of its rows. Ping-pong: each works on a
tile of its own; while one runs the epilogue, the other multiplies. Operands are read as they lie in memory, since wgmma
takes both of either order: no pass copies a transpose.

An op passes an epilogue and describes its operands: see `ragged_gemm`.

Clusters: two programs share a tile, each has half of each consumer's rows, and one loads B for both by TMA multicast.
That pays where L2's loads bound the products, since rows that are no whole cache lines take two (5 groups of 6,000
rows, K 3,976, N 4,104: forward 2,064 to 1,400 us, wgrad 2,014 to 1,430; H100, 2026-11-27, profiles/clusters.csv). At
Mixtral's shapes the card's power bounds both alike. The producer should only load: with code that zeroed rows in shared
memory, though hardly ever run, wgrad's clusters took 1.3 to 1.4 times as long.

Adding a group's last rows, up to 32, to the tile before them, so that both share the loads of B, gained nothing on
average: passes took 0.79 to 1.17 times as long (H100, 2026-11-26, profiles/tails.csv). The added rows cost 0.41 of a
tile's time, since a wgmma has at least 64 rows; as a tile of their own they cost 0.49.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jaxops._lib.gluon.layouts_triton import one_number, over_cluster
from jaxops._lib.gluon.stores_triton import as_block
from jaxops._lib.gluon.tile_scheduler_triton import (
    CONTRACTION,
    RING,
    ROWS,
    finish_fetch_add,
    first_tile,
    read_tile,
    share_number,
    start_fetch_add,
    write_tile,
)
from jaxops._lib.ragged.work_list import COLUMNS as _COLUMNS
from jaxops._lib.ragged.work_list import STEP_ROWS

COLUMNS = gl.constexpr(_COLUMNS)  # of a work list
BK = gl.constexpr(STEP_ROWS)  # length of a pipeline step along the contraction
GATHER_WARPS = gl.constexpr(4)  # of a producer that gathers rows
# Arrivals at a full barrier if rows are gathered: each thread of these warps, and TMA's one.
GATHER_ARRIVALS = gl.constexpr(GATHER_WARPS.value * 32 + 1)


@gluon.aggregate
class Pipeline:
    """The stages in shared memory and their synchronisation.

    a, b: operand tiles of each stage; a has a buffer a stage for each of the SPLIT consumers that share a tile.
    tiles: five integers a stage, the tile descriptor that the producer passes with a tile's first stage.
    full, empty: an mbarrier a stage.
    shared: in a cluster, an mbarrier a stage on which the consumers of both programs arrive, for loads of B to both.
    order: ping-pong only, an mbarrier on which consumer i waits before its mainloop.
    state: ping-pong only, the stage and phase where consumer i's mainloop starts.
    loads: an mbarrier a consumer for what its epilogue loads.
    """

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    shared: gl.shared_memory_descriptor
    order: gl.shared_memory_descriptor
    state: gl.shared_memory_descriptor
    loads: gl.shared_memory_descriptor
    BM: gl.constexpr
    BN: gl.constexpr
    STAGES: gl.constexpr
    KIND: gl.constexpr
    TRANSPOSED: gl.constexpr
    SPLIT: gl.constexpr
    GATHERED: gl.constexpr


@gluon.jit
def make_pipeline(
    dtype: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
    TRANSPOSED: gl.constexpr, SPLIT: gl.constexpr, GATHERED: gl.constexpr,
):  # fmt: skip
    gl.static_assert(gl.num_ctas() == 1 or (SPLIT == 2 and not GATHERED and STAGES < RING))
    A_SHAPE: gl.constexpr = [BM // SPLIT, BK] if KIND == ROWS else [BK, BM // SPLIT]
    B_SHAPE: gl.constexpr = [BN, BK] if TRANSPOSED else [BK, BN]
    PROGRAMS: gl.constexpr = gl.num_ctas()
    OF_A: gl.constexpr = over_cluster(PROGRAMS, 1, 0) if KIND == ROWS else over_cluster(PROGRAMS, 0, 1)
    OF_B: gl.constexpr = over_cluster(PROGRAMS, 0, 0)
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(A_SHAPE, dtype, cga_layout=OF_A)
    B_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(B_SHAPE, dtype, cga_layout=OF_B)
    a = gl.allocate_shared_memory(dtype, [SPLIT * STAGES, A_SHAPE[0], A_SHAPE[1]], A_LAYOUT)
    b = gl.allocate_shared_memory(dtype, [STAGES, B_SHAPE[0], B_SHAPE[1]], B_LAYOUT)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], over_cluster(PROGRAMS, 0))
    tiles = gl.allocate_shared_memory(gl.int32, [5 * STAGES, 1], FLAT)
    state = gl.allocate_shared_memory(gl.int32, [4, 1], FLAT)
    for i in gl.static_range(4):
        state.index(i).store(gl.full([1], 0, gl.int32, one_number(4, PROGRAMS)))
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    shared = empty
    if PROGRAMS > 1:
        shared = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=GATHER_ARRIVALS if GATHERED else 1)
        mbarrier.init(empty.index(s), count=SPLIT)
        if PROGRAMS > 1:
            mbarrier.init(shared.index(s), count=SPLIT)
    order = mbarrier.allocate_mbarrier(batch=2)
    loads = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
        mbarrier.init(order.index(i), count=1)
        mbarrier.init(loads.index(i), count=1)
    return Pipeline(
        a, b, tiles, full, empty, shared, order, state, loads, BM, BN, STAGES, KIND, TRANSPOSED, SPLIT, GATHERED
    )  # fmt: skip


@gluon.jit
def advance(s, phase, STAGES: gl.constexpr):
    """The stage after stage s, and its phase."""
    s += 1
    if s == STAGES:
        s = 0
        phase ^= 1
    return s, phase


@gluon.jit
def release(pipe, s, pred=True):
    """A consumer has read stage s."""
    mbarrier.arrive(pipe.empty.index(s), count=1, pred=pred)
    if gl.num_ctas() > 1:
        mbarrier.arrive(pipe.shared.index(s), count=1, pred=pred)


@gluon.jit
def finish_tiles(pipe, s, phase):
    """A tile of -1 steps ends a consumer's loop: one for both, or one for each in ping-pong."""
    for _ in gl.static_range(2 // pipe.SPLIT):
        mbarrier.wait(pipe.empty.index(s), phase)
        write_tile(pipe.tiles, s, (-1, 0, 0, 0, -1), GATHER_WARPS if pipe.GATHERED else 1)
        mbarrier.arrive(pipe.full.index(s), count=GATHER_ARRIVALS if pipe.GATHERED else 1)
        s, phase = advance(s, phase, pipe.STAGES)


@gluon.jit
def load_b(pipe, b_descs, full, s, matrix, at, col, N, BESIDE: gl.constexpr):
    """B's step at `at`. BESIDE: of two arrays of weights, or of the halves of one, [G, K, 2 N], side by side in one
    tile. There the first half's box may reach into the second: those columns are not stored."""
    CLUSTER: gl.constexpr = gl.num_ctas() > 1
    if pipe.TRANSPOSED:
        tma.async_load(b_descs[0], [matrix, col, at], full, as_block(pipe.b.index(s), b_descs[0]), multicast=CLUSTER)
    elif BESIDE:
        HALF: gl.constexpr = pipe.BN // 2
        tile = pipe.b.index(s).reshape([1, BK, pipe.BN])
        tma.async_load(b_descs[0], [matrix, at, col], full, tile.slice(0, HALF, dim=2))
        if len(b_descs) == 1:
            tma.async_load(b_descs[0], [matrix, at, N + col], full, tile.slice(HALF, HALF, dim=2))
        else:
            tma.async_load(b_descs[1], [matrix, at, col], full, tile.slice(HALF, HALF, dim=2))
    else:
        tma.async_load(b_descs[0], [matrix, at, col], full, as_block(pipe.b.index(s), b_descs[0]), multicast=CLUSTER)


@gluon.jit
def load_step(pipe, a_desc, b_descs, full, s, matrix, row, at, left, col, N, both, BESIDE: gl.constexpr):
    """A step of both operands. CONTRACTION: of `left` rows of a group, from `at` on, through `step_windows`. both:
    whether the second half of the tile's rows exists; it is not loaded otherwise, since short groups are bound by the
    L2."""
    PART: gl.constexpr = pipe.BM // pipe.SPLIT
    if pipe.KIND == ROWS:
        for i in gl.static_range(pipe.SPLIT):
            buf = pipe.a.index(pipe.SPLIT * s + i)
            tma.async_load(a_desc, [row + i * PART, at], full, buf, pred=both if i > 0 else True)
        load_b(pipe, b_descs, full, s, matrix, at, col, N, BESIDE)
    else:
        # The last step of a group: the box starts before the window, where TMA fills in zeros, and ends with the group.
        # In which of the step's rows they lie does not matter to the sum.
        before = left - BK
        for i in gl.static_range(pipe.SPLIT):
            buf = as_block(pipe.a.index(pipe.SPLIT * s + i), a_desc)
            tma.async_load(a_desc, [at, before, row + i * PART], full, buf)
        buf = as_block(pipe.b.index(s), b_descs[0])
        tma.async_load(b_descs[0], [at, before, col], full, buf, multicast=gl.num_ctas() > 1)


@gluon.jit
def gather_pointers(gather, K, row, inside, PART: gl.constexpr):
    """Pointers to the first BK columns of rows indices[row], indices[row + 1], ... of an array [T, K]."""
    x_ptr, indices, T = gather
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, PART, layout=gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, BK, layout=gl.SliceLayout(0, LAYOUT))
    index = gl.load(indices + row + rows, mask=rows < inside, other=0)
    pointers = x_ptr + (gl.minimum(gl.maximum(index, 0), T - 1).to(gl.int64) * K)[:, None] + cols[None, :]
    return pointers, (rows < inside)[:, None]


@gluon.jit
def load_gathered(pipe, b_descs, s, rows, matrix, at, col, N, BESIDE: gl.constexpr):
    """A step of B by TMA, and of A by the producer's threads. rows: by `gather_pointers`, of both consumers."""
    upper, upper_mask, lower, lower_mask = rows
    mbarrier.expect(pipe.full.index(s), b_descs[0].nbytes_per_cta * (2 if BESIDE else 1))
    load_b(pipe, b_descs, pipe.full.index(s), s, matrix, at, col, N, BESIDE)
    async_copy.async_load(pipe.a.index(2 * s), upper + at, mask=upper_mask)
    async_copy.async_load(pipe.a.index(2 * s + 1), lower + at, mask=lower_mask)
    async_copy.mbarrier_arrive(pipe.full.index(s), increment_count=False)


@gluon.jit
def load_pair(pipe, a_descs, b_descs, s, pair, matrix, row, end, at, left, col, N, BESIDE: gl.constexpr):
    """A step of the operands a_descs[pair] and b_descs[pair], by TMA. BESIDE: of a_descs[0] and all b_descs."""
    A_BYTES: gl.constexpr = a_descs[0].nbytes_per_cta
    B_BYTES: gl.constexpr = b_descs[0].nbytes_per_cta * (2 if BESIDE else 1)
    full = pipe.full.index(s)
    both = row + pipe.BM // pipe.SPLIT < end
    if pipe.KIND == ROWS and pipe.SPLIT > 1:
        mbarrier.expect(full, 2 * A_BYTES + B_BYTES, pred=both)
        mbarrier.expect(full, A_BYTES + B_BYTES, pred=not both)
    else:
        mbarrier.expect(full, pipe.SPLIT * A_BYTES + B_BYTES)
    if len(a_descs) == 1:
        load_step(pipe, a_descs[0], b_descs, full, s, matrix, row, at, left, col, N, both, BESIDE)
    else:
        for p in gl.static_range(len(a_descs)):
            if pair == p:
                load_step(pipe, a_descs[p], (b_descs[p],), full, s, matrix, row, at, left, col, N, both, False)


@gluon.jit
def ask_for_tile(counter, GATHERED: gl.constexpr):
    """The program's next tile, which `receive_tile` receives."""
    if GATHERED:  # several warps: one asks and passes the number on
        return gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
    else:  # asked for before a tile's loads, needed after them  # noqa: RET505
        return start_fetch_add(counter)


@gluon.jit
def receive_tile(following, t, slots, turn, GATHERED: gl.constexpr):
    """What `ask_for_tile` asked for, and the next turn among a cluster's slots.

    A cluster's first program passes each number to the other one, also where both know it: through tiles without steps,
    for which the first one loads nothing, the other one could otherwise run so far ahead that its arrivals at `shared`
    complete two phases, and the first one misses one.
    """
    if not GATHERED:
        following = gl.num_programs(0) + finish_fetch_add(following)
    if gl.num_ctas() > 1:
        following = share_number(slots + RING * gl.program_id(0) + turn, following, t)
        turn = (turn + 1) % RING
    return following, turn


@gluon.jit
def produce(
    pipe, a_descs, b_descs, gather, work, sizes, places, tiles, COUNT: gl.constexpr, LOCATE: gl.constexpr,
    OPERANDS: gl.constexpr, PANEL: gl.constexpr, CUT: gl.constexpr,
):  # fmt: skip
    """Loads the operands of this program's tiles, step by step, until there are no more.

    The next tile is the next one of all programs, by an atomic counter in the work list. So programs that share
    operands stay together. With every num_programs-th tile, those that get shorter tiles run ahead, and what they load
    has left L2 when the others need it (docs/notes/2026-11-28_one_rule.md).

    work: the work list and its entries; behind its columns are RING slots a cluster.
    COUNT, LOCATE: of the tile scheduler, as `count_tiles` and `locate`.
    """
    KIND: gl.constexpr = pipe.KIND
    GATHERED: gl.constexpr = pipe.GATHERED
    PART: gl.constexpr = pipe.BM // pipe.SPLIT
    BESIDE: gl.constexpr = OPERANDS == "beside"
    COLS: gl.constexpr = pipe.BN // 2 if BESIDE else pipe.BN  # of C
    WARPS: gl.constexpr = GATHER_WARPS if GATHERED else 1
    schedule, entries = work
    G, M, K, N = sizes
    num_i, tiles = COUNT(work, sizes, places, tiles, pipe.BM, COLS, KIND, CUT)
    if GATHERED:
        K = K // BK * BK  # no change: tells the compiler of the alignment
    s = 0
    phase = 1
    turn = 0
    t = first_tile(tiles)
    while t < tiles:
        following = ask_for_tile(schedule + 5 * entries, GATHERED)
        label, pair, matrix, row, end, col, first, size = LOCATE(
            t, work, num_i, (G, M, K, N), places, pipe.BM, COLS, PANEL, KIND, CUT
        )
        if GATHERED:
            inside = gl.where(size > 0, end - row, 0)
            upper, upper_mask = gather_pointers(gather, K, row, inside, PART)
            lower, lower_mask = gather_pointers(gather, K, row + PART, inside - PART, PART)
        mbarrier.wait(pipe.empty.index(s), phase)
        steps = gl.cdiv(size, BK)
        second = 0  # where the second summand's steps start
        if OPERANDS == "sum":
            second = steps * BK
            steps *= 2
        if KIND == ROWS:
            write_tile(pipe.tiles, s, (label, row, end, col, steps), WARPS)
        else:  # rows of all groups' C
            write_tile(pipe.tiles, s, (label, row + matrix * end, end + matrix * end, col, steps), WARPS)
        # A tile outside the groups, or of an empty group, passes a stage without operands.
        for at in range(first, first + max(steps, 1) * BK, BK):
            mbarrier.wait(pipe.empty.index(s), phase)
            if gl.num_ctas() > 1:
                mbarrier.wait(pipe.shared.index(s), phase)
            if steps == 0:
                mbarrier.arrive(pipe.full.index(s), count=GATHER_ARRIVALS if GATHERED else 1)
            elif GATHERED:
                load_gathered(pipe, b_descs, s, (upper, upper_mask, lower, lower_mask), matrix, at, col, N, BESIDE)
            elif OPERANDS == "sum":
                summand = gl.where(at < second, 0, 1)
                k = at - summand * second
                load_pair(pipe, a_descs, b_descs, s, summand, matrix, row, end, k, 0, col, N, False)
            else:
                left = min(first + size - at, BK)
                load_pair(pipe, a_descs, b_descs, s, pair, matrix, row, end, at, left, col, N, BESIDE)
            s, phase = advance(s, phase, pipe.STAGES)
        t, turn = receive_tile(following, t, schedule + COLUMNS * entries, turn, GATHERED)
    finish_tiles(pipe, s, phase)


@gluon.jit
def pass_order(pipe, s, phase, TO: gl.constexpr):
    """Ping-pong: consumer TO may start its mainloop, at this stage."""
    ONE: gl.constexpr = one_number(4, gl.num_ctas())
    pipe.state.index(2 * TO).store(gl.full([1], s, gl.int32, ONE))
    pipe.state.index(2 * TO + 1).store(gl.full([1], phase, gl.int32, ONE))
    mbarrier.arrive(pipe.order.index(TO), count=1)


@gluon.jit
def next_tile(pipe, s, phase, parity, WHICH: gl.constexpr):
    """This consumer's next tile, the stage and phase where it starts, and the parity of its next order barrier."""
    if pipe.SPLIT == 1:
        # The pipeline state comes with the order. An mbarrier has one parity bit: a consumer that counted the other
        # one's steps itself and waited early could see the previous phase as complete.
        mbarrier.wait(pipe.order.index(WHICH), parity)
        parity ^= 1
        ONE: gl.constexpr = one_number(4, gl.num_ctas())
        s = pipe.state.index(2 * WHICH).load(ONE).item()
        phase = pipe.state.index(2 * WHICH + 1).load(ONE).item()
    mbarrier.wait(pipe.full.index(s), phase)
    label, row, end, col, steps = read_tile(pipe.tiles, s)
    col = col // 8 * 8  # no change: tells the compiler of the alignment
    if pipe.SPLIT > 1:
        row += WHICH * (pipe.BM // pipe.SPLIT)
    return label, row, end, col, steps, s, phase, parity


@gluon.jit
def skip_tile(pipe, steps, s, phase, WHICH: gl.constexpr):
    """Releases the stages of a tile in which this consumer has no rows. In ping-pong that is the tile of -1 steps,
    which passes the order on."""
    if pipe.SPLIT == 1:
        s, phase = advance(s, phase, pipe.STAGES)
        pass_order(pipe, s, phase, 1 - WHICH)
    else:
        for _ in range(gl.where(steps == 0, 1, steps)):
            mbarrier.wait(pipe.full.index(s), phase)
            release(pipe, s)
            s, phase = advance(s, phase, pipe.STAGES)
    return s, phase


@gluon.jit
def mainloop(pipe, acc, steps, s, phase, WHICH: gl.constexpr):
    """acc + A @ B over the tile's steps. A stage is released while the next step is multiplied. A tile of 0 steps has
    one stage, which is released."""
    PART: gl.constexpr = WHICH if pipe.SPLIT > 1 else 0
    if steps > 0:  # around the loop: with a branch before it alone, ptxas serializes the wgmmas (its warning C7515)
        for k in range(steps):
            mbarrier.wait(pipe.full.index(s), phase)
            if pipe.GATHERED:  # written by threads, read by the tensor core
                fence_async_shared()
            a = pipe.a.index(pipe.SPLIT * s + PART)
            b = pipe.b.index(s)
            if pipe.KIND == CONTRACTION:
                a = a.permute((1, 0))
            if pipe.TRANSPOSED:
                b = b.permute((1, 0))
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            release(pipe, (s + pipe.STAGES - 1) % pipe.STAGES, k > 0)
            s, phase = advance(s, phase, pipe.STAGES)
        if pipe.SPLIT == 1:
            pass_order(pipe, s, phase, 1 - WHICH)
        acc = warpgroup_mma_wait(0, deps=[acc])
    else:  # a stage without operands
        s, phase = advance(s, phase, pipe.STAGES)
        if pipe.SPLIT == 1:
            pass_order(pipe, s, phase, 1 - WHICH)
    release(pipe, (s + pipe.STAGES - 1) % pipe.STAGES)
    return acc, s, phase
