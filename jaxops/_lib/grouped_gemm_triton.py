"""The Gluon skeleton of a product over ragged groups on Hopper: a producer warp that takes tiles and loads what they multiply, and what its consumers do.

The groups' row tiles, or their parts of a sum, stand in a schedule (schedule_pallas.py). The producer tells its consumers, beside a tile's first step, where
the tile lies. Either both consumers have half of each tile's rows, or they take turns at whole tiles: then one stores while the other multiplies.
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

from jaxops._lib.hopper_triton import advance, number_taken, panel_order, take_number, window

# What the groups cut: A's and C's rows, each group with a B of its own; or the rows over which is summed, each group with a C of its own.
ROWS, CONTRACTION = gl.constexpr(0), gl.constexpr(1)
BK = gl.constexpr(64)
ARRIVALS = gl.constexpr(
    4 * 32 + 1
)  # at a step of which rows are gathered: of every thread of four warps, and that of what TMA brings


@gluon.jit
def make_ring(
    b_desc, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, TRANSPOSED: gl.constexpr, PARTS: gl.constexpr,
    GATHERED: gl.constexpr = False,
):  # fmt: skip
    """Buffers and barriers: what the producer tells and loads, and whose turn it is."""
    PART: gl.constexpr = BM // PARTS
    A_SHAPE: gl.constexpr = [PART, BK] if KIND == ROWS else [BK, PART]
    B_SHAPE: gl.constexpr = [BN, BK] if TRANSPOSED else [BK, BN]
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(A_SHAPE, b_desc.dtype)
    B_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(B_SHAPE, b_desc.dtype)
    a_bufs = gl.allocate_shared_memory(b_desc.dtype, [PARTS * STAGES, A_SHAPE[0], A_SHAPE[1]], A_LAYOUT)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, B_SHAPE[0], B_SHAPE[1]], B_LAYOUT)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    facts = gl.allocate_shared_memory(gl.int32, [5 * STAGES, 1], FLAT)
    places = gl.allocate_shared_memory(gl.int32, [4, 1], FLAT)
    for i in gl.static_range(4):
        places.index(i).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=ARRIVALS if GATHERED else 1)
        mbarrier.init(empty.index(s), count=PARTS)
    mbarrier.init(full.index(STAGES), count=1)  # of what is mended
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    return facts, places, a_bufs, b_bufs, full, empty, turns


@gluon.jit
def count_tiles(schedule, entries, G, M, N, BM: gl.constexpr, BN: gl.constexpr, KIND: gl.constexpr):
    """Row tiles (of all groups, as they lie; or of one), and tiles in all."""
    num_i = gl.load(schedule + 4 * entries) if KIND == ROWS else gl.cdiv(M, BM)
    tiles = num_i * gl.cdiv(N, BN)
    return num_i, tiles if KIND == ROWS else tiles * G


@gluon.jit
def locate(
    t, schedule, entries, num_i, G, M, N, K, BM: gl.constexpr, BN: gl.constexpr, PANEL: gl.constexpr, KIND: gl.constexpr
):
    """Of tile t: group, first row, end of the group's rows, first column, where its sum starts, over how much it goes (nothing outside the groups)."""
    num_j = gl.cdiv(N, BN)
    if KIND == ROWS:
        i, j = panel_order(t, num_i, num_j, PANEL)
        group = gl.load(schedule + i)
        return (
            min(group, G - 1),
            gl.load(schedule + entries + i),
            gl.load(schedule + 2 * entries + i),
            j * BN,
            0,
            gl.where(group < G, K, 0),
        )
    rank = t // (num_i * num_j)
    i, j = panel_order(t % (num_i * num_j), num_i, num_j, PANEL)
    first = gl.load(schedule + entries + rank)
    return gl.load(schedule + rank), i * BM, M, j * BN, first, gl.load(schedule + 2 * entries + rank) - first


@gluon.jit
def zero_rows(buf, first):
    """Zeroes the rows of a buffer of 64-column pieces from `first` on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    for i in gl.static_range(buf.shape[0] // 8):
        if first < 8 * i + 8:
            for j in gl.static_range(buf.shape[1] // 64):
                piece = buf.slice(8 * i, 8, dim=0).slice(64 * j, 64, dim=1)
                value = piece.load(LAYOUT)
                piece.store(gl.where(rows + 8 * i < first, value, gl.zeros_like(value)))


@gluon.jit
def tell(facts, s, group, row, end, col, steps, WARPS: gl.constexpr = 1):
    """To the consumers, beside a tile's first step."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    for i in gl.static_range(5):
        facts.index(5 * s + i).store(gl.full([1], (group, row, end, col, steps)[i], gl.int32, ONE))


@gluon.jit
def told(facts, s):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    group = facts.index(5 * s).load(ONE).item()
    row = facts.index(5 * s + 1).load(ONE).item()
    end = facts.index(5 * s + 2).load(ONE).item()
    col = facts.index(5 * s + 3).load(ONE).item() // 8 * 8  # as it is: so the compiler sees whole 16 bytes
    return group, row, end, col, facts.index(5 * s + 4).load(ONE).item()


@gluon.jit
def end_tiles(
    facts,
    full,
    empty,
    s,
    phase,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    WARPS: gl.constexpr = 1,
    COUNT: gl.constexpr = 1,
):
    """A tile of no steps is the last one, of each consumer that takes turns. COUNT: of arrivals at a step."""
    for _ in gl.static_range(2 // PARTS):
        mbarrier.wait(empty.index(s), phase)
        tell(facts, s, -1, 0, 0, 0, 0, WARPS)
        mbarrier.arrive(full.index(s), count=COUNT)
        s, phase = advance(s, phase, STAGES)


@gluon.jit
def mend_step(arrived, mended, full, a_bufs, b_bufs, s, left, PARTS: gl.constexpr):
    """Of a sum's last step, which came with the next group's rows, those from `left` on are made zeros before the consumers see it; the next phase of
    `arrived`."""
    mbarrier.wait(arrived, mended)
    for i in gl.static_range(PARTS):
        zero_rows(a_bufs.index(PARTS * s + i), left)
    zero_rows(b_bufs.index(s), left)
    fence_async_shared()
    mbarrier.arrive(full.index(s), count=1)
    return mended ^ 1


@gluon.jit
def load_weights(b_desc, second, arrived, b_bufs, s, at, group, col, N, COLS: gl.constexpr, TRANSPOSED: gl.constexpr):
    """B of a step of KIND ROWS."""
    BN: gl.constexpr = b_bufs.shape[1] if TRANSPOSED else b_bufs.shape[2]
    if TRANSPOSED:
        tma.async_load(b_desc, [group * N + col, at], arrived, b_bufs.index(s))
    elif second is None:
        tma.async_load(b_desc, [group, at, col], arrived, b_bufs.index(s).reshape([1, BK, BN]))
    else:
        tma.async_load(b_desc, [group, at, col], arrived, b_bufs.index(s).reshape([1, BK, BN]).slice(0, COLS, dim=2))
        tma.async_load(second, [group, at, col], arrived, b_bufs.index(s).reshape([1, BK, BN]).slice(COLS, COLS, dim=2))


@gluon.jit
def load_rows(
    a_desc, b_desc, second, arrived, a_bufs, b_bufs, s, row, both, at, group, col, N, COLS: gl.constexpr, TRANSPOSED: gl.constexpr, PARTS: gl.constexpr
):  # fmt: skip
    """A step of KIND ROWS. both: whether the second of two parts has rows; else it is not loaded, for what comes from the L2 is what short groups wait for."""
    PART: gl.constexpr = a_bufs.shape[1]
    for i in gl.static_range(PARTS):
        tma.async_load(a_desc, [row + i * PART, at], arrived, a_bufs.index(PARTS * s + i), pred=both if i > 0 else True)
    load_weights(b_desc, second, arrived, b_bufs, s, at, group, col, N, COLS, TRANSPOSED)


@gluon.jit
def produce(
    made, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr, DYNAMIC: gl.constexpr,
    KIND: gl.constexpr, TRANSPOSED: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Takes tiles until there are none, and loads each one's steps.

    DYNAMIC: as programs get free, instead of each its own. second: None, or another B's descriptor: then a tile has BN / 2 columns of both, side by side.
    more: descriptors of another A and B of the same shapes, whose product is added, or two Nones.
    """
    a_desc, b_desc, second, more, schedule, facts, a_bufs, b_bufs, full, empty, entries, G, M, N, K = made
    PART: gl.constexpr = BM // PARTS
    COLS: gl.constexpr = BN if second is None else BN // 2
    num_i, tiles = count_tiles(schedule, entries, G, M, N, BM, COLS, KIND)
    s = 0
    phase = 1
    mended = 0
    t = gl.program_id(0)
    while t < tiles:
        following = t + gl.num_programs(0)
        if DYNAMIC:  # asked for now, needed when this tile is loaded
            following = take_number(schedule + 5 * entries)
        group, row, end, col, first, size = locate(t, schedule, entries, num_i, G, M, N, K, BM, COLS, PANEL, KIND)
        mbarrier.wait(empty.index(s), phase)
        # What lies outside the groups, and an empty group's result, is the sum of one step of zeros: so TMA fills what lies past K, or a window's end.
        whose = gl.where(size > 0, group, -1)
        steps = gl.cdiv(max(size, 1), BK)
        both = row + PART < end
        turn = 0  # where the second product's steps start
        if KIND == ROWS:
            if more[0] is not None:
                turn = gl.where(size > 0, steps * BK, K + BK)
                steps = gl.where(size > 0, 2 * steps, steps)
            tell(facts, s, whose, row, end, col, steps)
            first = gl.where(size > 0, 0, K)
        else:
            tell(facts, s, whose, row + group * M, end + group * M, col, steps)
        for at in range(first, first + steps * BK, BK):
            mbarrier.wait(empty.index(s), phase)
            # The last rows of a sum are a group's last ones; the next group's come as zeros, but for groups that end within the first BK rows of all:
            # those are mended before the consumers see them.
            left = min(first + size - at, BK)
            mend = KIND == CONTRACTION and left < BK and at + left < BK
            arrived = full.index(STAGES if mend else s)
            EACH: gl.constexpr = a_desc.nbytes_per_cta + b_desc.nbytes_per_cta * (BN // COLS)
            if KIND == ROWS and PARTS > 1:
                mbarrier.expect(arrived, EACH + a_desc.nbytes_per_cta, pred=both)
                mbarrier.expect(arrived, EACH, pred=not both)
            else:
                mbarrier.expect(arrived, EACH + (PARTS - 1) * a_desc.nbytes_per_cta)
            if KIND == ROWS:
                if more[0] is None:  # noqa: SIM114  # known when it is compiled; the other is not
                    load_rows(
                        a_desc,
                        b_desc,
                        second,
                        arrived,
                        a_bufs,
                        b_bufs,
                        s,
                        row,
                        both,
                        at,
                        group,
                        col,
                        N,
                        COLS,
                        TRANSPOSED,
                        PARTS,
                    )
                elif at < turn:
                    load_rows(
                        a_desc,
                        b_desc,
                        second,
                        arrived,
                        a_bufs,
                        b_bufs,
                        s,
                        row,
                        both,
                        at,
                        group,
                        col,
                        N,
                        COLS,
                        TRANSPOSED,
                        PARTS,
                    )
                else:
                    load_rows(
                        more[0],
                        more[1],
                        second,
                        arrived,
                        a_bufs,
                        b_bufs,
                        s,
                        row,
                        both,
                        at - turn,
                        group,
                        col,
                        N,
                        COLS,
                        TRANSPOSED,
                        PARTS,
                    )
            else:
                start, inside = window(at, at + left, BK)
                for i in gl.static_range(PARTS):
                    tma.async_load(
                        a_desc,
                        [start, inside, row + i * PART],
                        arrived,
                        a_bufs.index(PARTS * s + i).reshape([1, BK, PART]),
                    )
                tma.async_load(b_desc, [start, inside, col], arrived, b_bufs.index(s).reshape([1, BK, BN]))
            if mend:
                mended = mend_step(arrived, mended, full, a_bufs, b_bufs, s, left, PARTS)
            s, phase = advance(s, phase, STAGES)
        t = gl.num_programs(0) + number_taken(following) if DYNAMIC else following
    end_tiles(facts, full, empty, s, phase, STAGES, PARTS)


@gluon.jit
def produce_gathered(
    made, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr, DYNAMIC: gl.constexpr
):
    """As `produce` of KIND ROWS, in two parts, by four warps: row r of A is row indices[r] of an array of T rows and K columns, a multiple of BK."""
    a_ptr, indices, T, b_desc, second, schedule, facts, a_bufs, b_bufs, full, empty, entries, G, M, N, K = made
    PART: gl.constexpr = BM // 2
    COLS: gl.constexpr = BN if second is None else BN // 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    num_i, tiles = count_tiles(schedule, entries, G, M, N, BM, COLS, ROWS)
    rows = gl.arange(0, PART, layout=gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, BK, layout=gl.SliceLayout(0, LAYOUT))
    K = K // BK * BK  # as it is: so the compiler sees whole 16 bytes
    s = 0
    phase = 1
    t = gl.program_id(0)
    while t < tiles:
        following = t + gl.num_programs(0)
        if DYNAMIC:  # four warps: one asks, and tells the others
            following = gl.num_programs(0) + gl.atomic_add(schedule + 5 * entries, 1, sem="relaxed")
        group, row, end, col, _, size = locate(t, schedule, entries, num_i, G, M, N, K, BM, COLS, PANEL, ROWS)
        inside = gl.where(size > 0, end - row, 0)
        number = gl.load(indices + row + rows, mask=rows < inside, other=0)
        first = a_ptr + (gl.minimum(gl.maximum(number, 0), T - 1).to(gl.int64) * K)[:, None] + cols[None, :]
        number = gl.load(indices + row + PART + rows, mask=rows < inside - PART, other=0)
        further = a_ptr + (gl.minimum(gl.maximum(number, 0), T - 1).to(gl.int64) * K)[:, None] + cols[None, :]
        mbarrier.wait(empty.index(s), phase)
        steps = gl.where(size > 0, K // BK, 1)
        tell(facts, s, gl.where(size > 0, group, -1), row, end, col, steps, 4)
        for k in range(steps):
            at = gl.where(size > 0, k * BK, K)  # past K, where there is nothing to sum, TMA brings zeros
            mbarrier.wait(empty.index(s), phase)
            mbarrier.expect(full.index(s), b_desc.nbytes_per_cta * (BN // COLS))
            load_weights(b_desc, second, full.index(s), b_bufs, s, at, group, col, N, COLS, False)
            async_copy.async_load(a_bufs.index(2 * s), first + at, mask=(rows < inside)[:, None])
            async_copy.async_load(a_bufs.index(2 * s + 1), further + at, mask=(rows < inside - PART)[:, None])
            async_copy.mbarrier_arrive(full.index(s), increment_count=False)
            s, phase = advance(s, phase, STAGES)
        t = following
    end_tiles(facts, full, empty, s, phase, STAGES, 2, 4, ARRIVALS)


@gluon.jit
def place(places, WHICH: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return places.index(2 * WHICH).load(ONE).item(), places.index(2 * WHICH + 1).load(ONE).item()


@gluon.jit
def hand_over(turns, places, s, phase, TO: gl.constexpr):
    """The next turn, with the place in the ring where it starts."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    places.index(2 * TO).store(gl.full([1], s, gl.int32, ONE))
    places.index(2 * TO + 1).store(gl.full([1], phase, gl.int32, ONE))
    mbarrier.arrive(turns.index(TO), count=1)


@gluon.jit
def give_back(full, empty, steps, s, phase, STAGES: gl.constexpr):
    """The steps of a tile in which this consumer's half has no rows, as they come."""
    for _ in range(steps):
        mbarrier.wait(full.index(s), phase)
        mbarrier.arrive(empty.index(s), count=1)
        s, phase = advance(s, phase, STAGES)
    return s, phase


@gluon.jit
def next_tile(facts, places, full, turns, s, phase, waited, WHICH: gl.constexpr, BM: gl.constexpr, PARTS: gl.constexpr):
    """What a consumer is told of its next tile, its own first row among it; where that starts in the ring; and the phase of its next turn."""
    if PARTS == 1:
        # The place in the ring comes with the turn. A barrier tells a phase only from the next: who came early would take an old filling for its own.
        mbarrier.wait(turns.index(WHICH), waited)
        waited ^= 1
        s, phase = place(places, WHICH)
    mbarrier.wait(full.index(s), phase)
    group, row, end, col, steps = told(facts, s)
    if PARTS > 1:
        row += WHICH * (BM // PARTS)
    return group, row, end, col, steps, s, phase, waited


@gluon.jit
def pass_tile(
    full, empty, turns, places, steps, s, phase, WHICH: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr
):
    """One in which the consumer has no rows: its steps are given back; of those who take turns only the last one is such."""
    if PARTS == 1:
        s, phase = advance(s, phase, STAGES)
        hand_over(turns, places, s, phase, 1 - WHICH)
    else:
        s, phase = give_back(full, empty, steps, s, phase, STAGES)
    return s, phase


@gluon.jit
def sum_steps(
    acc, a_bufs, b_bufs, full, empty, turns, places, steps, s, phase, WHICH: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
    TRANSPOSED: gl.constexpr, PARTS: gl.constexpr, GATHERED: gl.constexpr = False,
):  # fmt: skip
    """acc + A @ B over all steps, one at least; one is multiplied while the one before is given back. GATHERED: by `produce_gathered`."""
    PART: gl.constexpr = WHICH if PARTS > 1 else 0
    for k in range(steps):
        mbarrier.wait(full.index(s), phase)
        if GATHERED:  # what threads have copied, the tensor core is to see
            fence_async_shared()
        a = a_bufs.index(PARTS * s + PART)
        b = b_bufs.index(s)
        if KIND == CONTRACTION:
            a = a.permute((1, 0))
        if TRANSPOSED:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((s + STAGES - 1) % STAGES), count=1, pred=k > 0)
        s, phase = advance(s, phase, STAGES)
    if PARTS == 1:
        hand_over(turns, places, s, phase, 1 - WHICH)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((s + STAGES - 1) % STAGES), count=1)
    return acc, s, phase
