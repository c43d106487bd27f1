"""The tile scheduler of the persistent Gluon kernels: which tile of the result a program computes next, and where its
operands lie."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxops._lib.gluon.layouts_triton import one_number
from jaxops._lib.ragged.work_list import PANEL_BASE as _PANEL_BASE

# What the groups divide. ROWS: A's and C's rows; each group has a B of its own. CONTRACTION: the rows that are summed
# over; each group has a C of its own.
ROWS, CONTRACTION = gl.constexpr(0), gl.constexpr(1)
PANEL_BASE = gl.constexpr(_PANEL_BASE)


@gluon.jit
def opaque(x):
    """x, int32, as a copy that the compiler cannot see through: it computes nothing from x early, to keep in registers
    or to spill."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(x)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def program_of_cluster(programs):
    """In PTX: which of a cluster's programs this is."""
    return "%cluster_ctarank" if programs > 1 else "0"


@gluon.jit
def start_fetch_add(counter):
    """Starts an atomic increment, by one warp, and does not wait: `finish_fetch_add` returns the old value. (Triton's
    atomic_add waits.) In a cluster the first program increments: see `share_number`."""
    PROGRAM: gl.constexpr = program_of_cluster(gl.num_ctas())
    assembly: gl.constexpr = f"""{{
        .reg .pred first;
        .reg .b32 lane, program;
        mov.u32 lane, %laneid;
        mov.u32 program, {PROGRAM};
        or.b32 lane, lane, program;
        setp.eq.u32 first, lane, 0;
        mov.b32 $0, 0;
        @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
    }}"""
    return gl.inline_asm_elementwise(assembly, "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def finish_fetch_add(value):
    assembly: gl.constexpr = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"
    return gl.inline_asm_elementwise(assembly, "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1)


# Slots that a cluster's `share_number` writes in turn. The first program is at most as many steps ahead of the other
# one as the pipeline has stages, and a tile passes at least one stage. With more slots than stages none is written
# again before it is read.
RING = gl.constexpr(8)


@gluon.jit
def share_number(slot, number, before):
    """The number of the cluster's first program, for the other one, too. By one warp of each.

    slot: in global memory, zero before the launch; another one for each number, RING in turn. A number in it that is
    greater than `before`, this tile's, is the next one, since numbers only rise.
    """
    assembly: gl.constexpr = """{
        .reg .pred first, waiting;
        .reg .b32 program;
        mov.u32 program, %cluster_ctarank;
        setp.eq.u32 first, program, 0;
        mov.b32 $0, $2;
        @first st.relaxed.gpu.global.u32 [$1], $2;
        @first bra.uni known;
        again:
        ld.relaxed.gpu.global.u32 $0, [$1];
        setp.le.s32 waiting, $0, $3;
        @waiting bra again;
        known:
    }"""
    return gl.inline_asm_elementwise(
        assembly, "=&r,l,r,r", [slot.to(gl.int64), number, before], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def start_fetch_add_of_warps(counter, WARPS: gl.constexpr, ORDER: gl.constexpr = "relaxed"):
    """As `start_fetch_add`, by several warps, the first thread of which increments. In a cluster each program has a
    counter of its own; they lie beside each other. ORDER: of memory accesses."""
    PROGRAM: gl.constexpr = program_of_cluster(gl.num_ctas())
    assembly: gl.constexpr = f"""{{
        .reg .pred first;
        .reg .b32 program;
        .reg .b64 own;
        mov.b32 $0, 0;
        setp.eq.u32 first, $2, 0;
        mov.u32 program, {PROGRAM};
        mad.wide.u32 own, program, 4, $1;
        @first atom.{ORDER}.gpu.global.add.u32 $0, [own], 1;
    }}"""
    thread = gl.arange(0, 32 * WARPS, layout=one_number(WARPS, gl.num_ctas()))
    address = counter.to(gl.int64) + gl.zeros_like(thread)
    return gl.inline_asm_elementwise(assembly, "=r,l,r", [address, thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def finish_fetch_add_of_warps(value):
    return gl.sum(value, 0)


@gluon.jit
def write_tile(tiles, s, values, WARPS: gl.constexpr):
    """The producer passes a tile descriptor, five integers, to the consumers with the tile's first stage s."""
    ONE: gl.constexpr = one_number(WARPS, gl.num_ctas())
    for i in gl.static_range(5):
        tiles.index(5 * s + i).store(gl.full([1], values[i], gl.int32, ONE))


@gluon.jit
def read_tile(tiles, s):
    ONE: gl.constexpr = one_number(4, gl.num_ctas())
    group = tiles.index(5 * s).load(ONE).item()
    row = tiles.index(5 * s + 1).load(ONE).item()
    end = tiles.index(5 * s + 2).load(ONE).item()
    col = tiles.index(5 * s + 3).load(ONE).item()
    steps = tiles.index(5 * s + 4).load(ONE).item()
    # Triton puts a barrier between a read of shared memory and the next wait for an mbarrier: here once a tile, not in
    # each step of the mainloop.
    gl.barrier()
    return group, row, end, col, steps


@gluon.jit
def first_tile(tiles):
    """A program's first tile; `tiles` or more if there is none. Where there are fewer tiles than programs, no TPC gets
    two of them while another one has none: its two multiprocessors share their path to L2, and in a full grid they run
    programs 2i and 2i + 1 (H100, 2026-11-27, waves.csv in profiles/)."""
    t = gl.program_id(0)
    programs = gl.num_programs(0)
    if gl.num_ctas() == 1 and tiles < programs:
        twice = max(tiles - gl.cdiv(programs, 2), 0)  # pairs with two tiles, which often load the same operand
        alone = gl.where(t % 2 == 0, twice + t // 2, tiles)
        t = gl.where(t // 2 < twice, t, alone)
    return t


@gluon.jit
def swizzle(t, num_i, num_j, PANEL: gl.constexpr):
    """Row and column of tile t: column by column within panels of PANEL tile rows, so that concurrent programs share
    operands in L2."""
    first = t // (PANEL * num_j) * PANEL
    height = min(num_i - first, PANEL)
    return first + t % (PANEL * num_j) % height, t % (PANEL * num_j) // height


@gluon.jit
def place_in_panel_of_group(t, schedule, entries, num_j):
    """Row and column of tile t, column by column within the panels of a list by `schedule_rows`. A panel lies in one
    group, so that its tiles of a column multiply the same part of the weights."""
    listed = t // num_j  # a row tile of the panel: before it are the panels before, each with all its columns
    place = gl.load(schedule + 3 * entries + listed)
    first = listed - place // PANEL_BASE
    height = place % PANEL_BASE
    t -= first * num_j
    return first + t % height, t // height


@gluon.jit
def skip_panels(t, first, num_i, num_j, PANEL: gl.constexpr):
    """Of the tile t tiles behind the start of the panel at tile row `first`: its number in its own panel, and the tile
    row at which that starts; past the last tile num_i or more."""
    while (first < num_i) & (t >= min(num_i - first, PANEL) * num_j):
        t -= PANEL * num_j
        first += PANEL
    return t, first


@gluon.jit
def place_in_panel(t, first, num_i, PANEL: gl.constexpr):
    """Row and column of tile t of a panel, as by `swizzle`; without a division in a whole panel."""
    height = min(num_i - first, PANEL)
    i = t % PANEL
    j = t // PANEL
    if height < PANEL:
        i = t % height
        j = t // height
    return first + i, j


@gluon.jit
def count_tiles(work, sizes, places, tiles, BM: gl.constexpr, BN: gl.constexpr, KIND: gl.constexpr, CUT: gl.constexpr):
    """Row tiles (ROWS: of all groups, read from the work list; CONTRACTION: of one group's C), and tiles in all (with
    CUT, see `locate`, of all parts, read from the work list).

    work: the work list and its entries. places, tiles: arguments of the launch that only other schedulers need.
    """
    schedule, entries = work
    G, M, _K, N = sizes
    num_i = gl.load(schedule + 4 * entries) if KIND == ROWS else gl.cdiv(M, BM)
    tiles = num_i * gl.cdiv(N, BN)
    if CUT:
        tiles *= gl.load(schedule + 4 * entries)
    elif KIND == CONTRACTION:
        tiles *= G
    return num_i, tiles


@gluon.jit
def locate(
    t, work, num_i, sizes, places, BM: gl.constexpr, BN: gl.constexpr, PANEL: gl.constexpr, KIND: gl.constexpr,
    CUT: gl.constexpr,
):  # fmt: skip
    """Where tile t lies.

    Returns:
      its label for the consumers: the group, -1 outside the groups and for groups whose sum is empty. CUT, a
        contraction whose work list is by `schedule_parts`: the list's column of parts instead, 0 for a whole sum;
      which pair of operands it multiplies;
      the group's matrix in B or C;
      first row in C, end of the group's rows, first column;
      where the contraction starts, and its length (0 outside the groups and for empty groups).
    """
    schedule, entries = work
    G, M, K, N = sizes
    num_j = gl.cdiv(N, BN)
    if KIND == ROWS:
        i, j = place_in_panel_of_group(t, schedule, entries, num_j)
        group = gl.load(schedule + i)
        row = gl.load(schedule + entries + i)
        end = gl.load(schedule + 2 * entries + i)
        size = gl.where(group < G, K, 0)
        first = gl.where(size > 0, 0, K)
        return gl.where(size > 0, group, -1), 0, min(group, G - 1), row, end, j * BN, first, size
    rank = t // (num_i * num_j)
    i, j = swizzle(t % (num_i * num_j), num_i, num_j, PANEL)
    group = gl.load(schedule + rank)
    first = gl.load(schedule + entries + rank)
    size = gl.load(schedule + 2 * entries + rank) - first
    label = group
    if CUT:
        label = gl.load(schedule + 3 * entries + rank)
    return gl.where(size > 0, label, -1), 0, group, i * BM, M, j * BN, first, size
