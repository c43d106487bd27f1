"""Products over modalities for Hopper, in Gluon: one kernel for all three passes, built as grouped_matmul's, with a TMA descriptor of each modality's arrays.

A forward or dgrad goes through the tiles of one modality after the other, and then through those columns of each that are zeros, so that the programs, which
take every 132nd tile, get as much of each. The descriptors know each modality's widths: past its K come zeros, whatever a row holds there.
"""

import dataclasses

import jax
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from jaxops._lib.grouped_gemm_triton import (
    BK,
    CONTRACTION,
    ROWS,
    end_tiles,
    make_ring,
    mend_step,
    next_tile,
    pass_tile,
    sum_steps,
    tell,
)
from jaxops._lib.hopper_triton import (
    advance,
    number_taken,
    panel_order,
    result_buffers,
    store_columns,
    take_number,
    tile_layout,
    window,
)
from jaxops._lib.launch_triton import OutTile, Scratch, TensorDescriptor, row_windows, triton_call
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.schedule_pallas import COLUMNS, schedule_groups, schedule_rows
from jaxops._lib.tiling import tile_bound
from jaxops.ops.grouped_matmul import Tiles
from jaxops.ops.modality_grouped_matmul.parts import MOST, Part, Shapes, first_groups

_UNUSED = (None,) * MOST


@gluon.jit
def _locate_rows(t, schedule, entries, sizes, N, BN: gl.constexpr, PANEL: gl.constexpr, COUNT: gl.constexpr):
    """Of tile t: row tile, first column, and part; one that is not multiplied has part COUNT and more."""
    part = 0
    before = 0  # of the part's tiles
    first = 0
    high = 1
    wide = 1
    left = 0
    reached = 0
    for p in gl.static_range(2 * COUNT):
        start = 0
        if p % COUNT > 0:
            start = gl.load(schedule + 4 * entries + p % COUNT - 1)
        rows = gl.load(schedule + 4 * entries + p % COUNT) - start
        there = gl.cdiv(sizes[p % COUNT][3], BN)
        across = there
        if p >= COUNT:
            across = gl.cdiv(N, BN) - there
        here = t >= reached  # what has no tiles ends where it starts, and the next one, or none, has t
        part = gl.where(here, p, part)
        before = gl.where(here, reached, before)
        first = gl.where(here, start, first)
        high = gl.where(here, rows, high)
        left = gl.where(here, 0 if p < COUNT else there, left)
        wide = gl.where(here, across, wide)
        reached += rows * across
    i, j = panel_order(t - before, high, wide, PANEL)
    return first + i, (left + j) * BN, part


@gluon.jit
def _locate_sums(t, sizes, BM: gl.constexpr, BN: gl.constexpr, PANEL: gl.constexpr, COUNT: gl.constexpr):
    """Of tile t: the place of its group in the work list, first row and column of the group's matrix, and part."""
    part = 0
    before = 0
    first = 0
    num_i = 1
    num_j = 1
    reached = 0
    for p in gl.static_range(COUNT):
        high = gl.cdiv(sizes[p][2], BM)
        wide = gl.cdiv(sizes[p][3], BN)
        here = t >= reached
        part = gl.where(here, p, part)
        before = gl.where(here, reached, before)
        first = gl.where(here, sizes[p][0], first)
        num_i = gl.where(here, high, num_i)
        num_j = gl.where(here, wide, num_j)
        reached += (sizes[p][1] - sizes[p][0]) * high * wide
    t -= before
    i, j = panel_order(t % (num_i * num_j), num_i, num_j, PANEL)
    return first + t // (num_i * num_j), i * BM, j * BN, part


@gluon.jit
def _size(sizes, part, WHICH: gl.constexpr, COUNT: gl.constexpr):
    found = sizes[0][WHICH]
    for p in gl.static_range(1, COUNT):
        found = gl.where(part == p, sizes[p][WHICH], found)
    return found


@gluon.jit
def _load(
    a_desc, b_desc, arrived, a_bufs, b_bufs, s, row, at, end, group, col, KIND: gl.constexpr, TRANSPOSED: gl.constexpr, PARTS: gl.constexpr
):  # fmt: skip
    """A step of both operands; in a wgrad the rows from `at` to `end`."""
    PART: gl.constexpr = a_bufs.shape[2] if KIND == CONTRACTION else a_bufs.shape[1]
    BN: gl.constexpr = b_bufs.shape[1] if TRANSPOSED else b_bufs.shape[2]
    if KIND == ROWS:
        for i in gl.static_range(PARTS):
            tma.async_load(a_desc, [row + i * PART, at], arrived, a_bufs.index(PARTS * s + i))
        if TRANSPOSED:
            tma.async_load(b_desc, [group, col, at], arrived, b_bufs.index(s).reshape([1, BN, BK]))
        else:
            tma.async_load(b_desc, [group, at, col], arrived, b_bufs.index(s).reshape([1, BK, BN]))
    else:
        start, inside = window(at, end, BK)
        for i in gl.static_range(PARTS):
            tma.async_load(
                a_desc, [start, inside, row + i * PART], arrived, a_bufs.index(PARTS * s + i).reshape([1, BK, PART])
            )
        tma.async_load(b_desc, [start, inside, col], arrived, b_bufs.index(s).reshape([1, BK, BN]))


@gluon.jit
def _produce(
    made, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr, DYNAMIC: gl.constexpr, KIND: gl.constexpr,
    TRANSPOSED: gl.constexpr, PARTS: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    """As grouped_gemm_triton.produce, over COUNT parts. Instead of the group it tells: how many columns are the modality's; in a wgrad the part."""
    a_descs, b_descs, schedule, facts, a_bufs, b_bufs, full, empty, entries, sizes, tiles, N = made
    if KIND == ROWS:
        tiles = gl.load(schedule + 4 * entries + COUNT - 1) * gl.cdiv(N, BN)
    s = 0
    phase = 1
    mended = 0
    t = gl.program_id(0)
    while t < tiles:
        following = t + gl.num_programs(0)
        if DYNAMIC:  # asked for now, needed when this tile is loaded
            following = take_number(schedule + 5 * entries)
        if KIND == ROWS:
            entry, col, part = _locate_rows(t, schedule, entries, sizes, N, BN, PANEL, COUNT)
            multiplied = part < COUNT
            part = part % COUNT
            group = gl.load(schedule + entry)
            row = gl.load(schedule + entries + entry)
            end = gl.load(schedule + 2 * entries + entry)
            K = _size(sizes, part, 2, COUNT)
            width = _size(sizes, part, 3, COUNT)
            group_first = _size(sizes, part, 0, COUNT)
            multiplied = multiplied & (group >= group_first) & (group < _size(sizes, part, 1, COUNT))
            # A tile that nobody multiplies is the sum of one step of zeros: TMA fills what lies past K.
            size = gl.where(multiplied, K, 0)
            first = gl.where(multiplied, 0, K)
            group = gl.where(multiplied, group - group_first, 0)
        else:
            entry, row, col, part = _locate_sums(t, sizes, BM, BN, PANEL, COUNT)
            group = gl.load(schedule + entry)
            first = gl.load(schedule + entries + entry)
            size = gl.load(schedule + 2 * entries + entry) - first
            K = _size(sizes, part, 2, COUNT)
            group -= _size(sizes, part, 0, COUNT)
            end = K
            width = part
        mbarrier.wait(empty.index(s), phase)
        steps = gl.cdiv(max(size, 1), BK)
        if KIND == ROWS:
            tell(facts, s, width, row, end, col, steps)
        else:
            tell(facts, s, width, row + group * K, end + group * K, col, steps)
        for at in range(first, first + steps * BK, BK):
            mbarrier.wait(empty.index(s), phase)
            # As in produce: the next group's rows come as zeros, but for groups that end within the first BK rows of all, which are mended.
            left = min(first + size - at, BK)
            mend = KIND == CONTRACTION and left < BK and at + left < BK
            arrived = full.index(STAGES if mend else s)
            mbarrier.expect(arrived, PARTS * a_descs[0].nbytes_per_cta + b_descs[0].nbytes_per_cta)
            for p in gl.static_range(COUNT):
                if part == p:
                    _load(
                        a_descs[p],
                        b_descs[p],
                        arrived,
                        a_bufs,
                        b_bufs,
                        s,
                        row,
                        at,
                        at + left,
                        group,
                        col,
                        KIND,
                        TRANSPOSED,
                        PARTS,
                    )
            if mend:
                mended = mend_step(arrived, mended, full, a_bufs, b_bufs, s, left, PARTS)
            s, phase = advance(s, phase, STAGES)
        t = gl.num_programs(0) + number_taken(following) if DYNAMIC else following
    end_tiles(facts, full, empty, s, phase, STAGES, PARTS)


@gluon.jit
def _consume(
    used, WHICH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, TRANSPOSED: gl.constexpr, PARTS: gl.constexpr,
    COUNT: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    c_descs, c_ptrs, facts, places, a_bufs, b_bufs, c_bufs, full, empty, turns, sizes, N = used
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    s = 0
    phase = 0
    waited = 1 - WHICH  # the first consumer has the first turn
    more = True
    while more:
        width, row, end, col, steps, s, phase, waited = next_tile(
            facts, places, full, turns, s, phase, waited, WHICH, BM, PARTS
        )
        more = steps > 0
        if row < end:
            acc = gl.zeros([BM // PARTS, BN], gl.float32, MMA)
            acc, s, phase = sum_steps(
                acc, a_bufs, b_bufs, full, empty, turns, places, steps, s, phase, WHICH, STAGES, KIND, TRANSPOSED, PARTS
            )
            if KIND == ROWS:
                if width < col + BN:  # a row may hold NaN, and its columns past the modality's are zeros nevertheless
                    cols = col + gl.arange(0, BN, layout=gl.SliceLayout(0, MMA))
                    acc = gl.where((cols < width)[None, :], acc, 0.0)
                store_columns(acc, c_descs[0], c_ptrs[0], c_bufs.index(WHICH), row, end, col, N, STORED)
            else:
                for p in gl.static_range(COUNT):
                    if width == p:
                        store_columns(
                            acc, c_descs[p], c_ptrs[p], c_bufs.index(WHICH), row, end, col, sizes[p][3], STORED
                        )
        else:
            s, phase = pass_tile(full, empty, turns, places, steps, s, phase, WHICH, STAGES, PARTS)
    tma.store_wait(0)


@gluon.jit
def modality_gemm_kernel(
    schedule, c_desc_0, c_desc_1, c_desc_2, c_desc_3, a_descs, b_descs, c_ptr_0, c_ptr_1, c_ptr_2, c_ptr_3, sizes, entries, tiles, N,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr, KIND: gl.constexpr, TRANSPOSED: gl.constexpr, PARTS: gl.constexpr,
    DYNAMIC: gl.constexpr, COUNT: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """sizes: of each part its first group, the end, K (rows of C in a wgrad) and N. tiles: how many there are in a wgrad."""
    facts, places, a_bufs, b_bufs, full, empty, turns = make_ring(b_descs[0], BM, BN, STAGES, KIND, TRANSPOSED, PARTS)
    c_bufs = result_buffers(c_ptr_0, 2, BM // PARTS, STORED)
    c_descs = (c_desc_0, c_desc_1, c_desc_2, c_desc_3)
    c_ptrs = (c_ptr_0, c_ptr_1, c_ptr_2, c_ptr_3)
    made = (a_descs, b_descs, schedule, facts, a_bufs, b_bufs, full, empty, entries, sizes, tiles, N)
    used = (c_descs, c_ptrs, facts, places, a_bufs, b_bufs, c_bufs, full, empty, turns, sizes, N)
    gl.warp_specialize([
        (_consume, (used, 0, BM, BN, STAGES, KIND, TRANSPOSED, PARTS, COUNT, STORED)),
        (_consume, (used, 1, BM, BN, STAGES, KIND, TRANSPOSED, PARTS, COUNT, STORED)),
        (_produce, (made, BM, BN, STAGES, PANEL, DYNAMIC, KIND, TRANSPOSED, PARTS, COUNT)),
    ], [4, 1], [216, 72])  # fmt: skip


def fwd_triton(
    lhs,
    rhs,
    offsets,
    before,
    *,
    parts: tuple[Part, ...],
    out: jax.ShapeDtypeStruct,
    tiles: Tiles,
    transpose_rhs: bool,
    cores: int,
) -> jax.Array:
    """As `fwd_pallas`; bfloat16 or float16, all widths multiples of 8."""
    (M, width), G, row_bytes = out.shape, offsets.shape[0] - 1, (tiles.part, 64)
    block = (1, tiles.bn, 64) if transpose_rhs else (1, 64, tiles.bn)
    widths = [w.shape[1:][::-1] if transpose_rhs else w.shape[1:] for w in rhs]
    whole = TensorDescriptor.from_array(lhs, row_bytes, layout=tile_layout(lhs.dtype, row_bytes))
    a_descs = tuple(dataclasses.replace(whole, shape=(M, k)) for k, _ in widths)
    b_descs = tuple(TensorDescriptor.from_array(w, block, layout=tile_layout(w.dtype, block)) for w in rhs)
    sizes = tuple((*part.groups, k, n) for part, (k, n) in zip(parts, widths, strict=True))
    schedule = schedule_rows(offsets, M, tiles.bm, False, tuple(part.runs for part in parts))
    c_desc = OutTile(
        (tiles.part, tiles.stored), tile_layout(out.dtype, (1, tiles.part, tiles.stored)), before, windows=True
    )
    count = tile_bound(M, G, tiles.bm) * -(-width // tiles.bn)
    results = (out_struct(out.shape, out.dtype, like=lhs),)
    name = "dgrad" if transpose_rhs else "fwd"
    return _call(
        schedule,
        (c_desc,),
        (a_descs, b_descs, sizes),
        results,
        tiles,
        count,
        name,
        cores,
        N=width,
        KIND=ROWS.value,
        TRANSPOSED=transpose_rhs,
    )[0]


def wgrad_triton(
    lhs, dout, offsets, *, parts: tuple[Part, ...], shapes: Shapes, tiles: Tiles, out_dtype, cores: int
) -> list[jax.Array]:
    """As `wgrad_pallas`; bfloat16 or float16, all widths multiples of 8."""
    mine = [shapes[part.number] for part in parts]

    def describe(x, columns: int, width: int):
        windows = row_windows(x, (64, columns), tile_layout(x.dtype, (1, 64, columns)))
        return dataclasses.replace(windows, shape=(*windows.shape[:2], width))

    a_descs = tuple(describe(lhs, tiles.part, k) for _, k, _ in mine)
    b_descs = tuple(describe(dout, tiles.bn, n) for _, _, n in mine)
    sizes = tuple((*part.groups, k, n) for part, (_, k, n) in zip(parts, mine, strict=True))
    schedule = schedule_groups(offsets, lhs.shape[0], False, parts=tuple(first_groups(shapes)[1:-1]))
    results = tuple(out_struct((G * k, n), out_dtype, like=lhs) for G, k, n in mine)
    c_descs = tuple(
        OutTile(
            (tiles.part, tiles.stored), tile_layout(out.dtype, (1, tiles.part, tiles.stored)), result=i, windows=True
        )
        for i, out in enumerate(results)
    )
    count = sum(G * -(-k // tiles.bm) * -(-n // tiles.bn) for G, k, n in mine)
    found = _call(
        schedule,
        c_descs,
        (a_descs, b_descs, sizes),
        results,
        tiles,
        count,
        "wgrad",
        cores,
        N=0,
        KIND=CONTRACTION.value,
        TRANSPOSED=False,
    )
    return [x.reshape(shape) for x, shape in zip(found, mine, strict=True)]


def _call(
    schedule,
    c_descs: tuple,
    operands: tuple,
    results: tuple,
    tiles: Tiles,
    count: int,
    name: str,
    cores: int,
    **constants,
) -> tuple[jax.Array, ...]:
    # jax-triton takes tuples of descriptors and numbers, but no pointers of results in them.
    work = Scratch(schedule) if tiles.dynamic else schedule
    unused = {f"c_ptr_{i}": None for i in range(len(results), MOST)}
    named = dict(zip(("a_descs", "b_descs", "sizes"), operands, strict=True))
    return triton_call(
        work, *(*c_descs, *_UNUSED)[:MOST], kernel=modality_gemm_kernel, out_type=results, grid=min(cores, count),
        name=f"modality_grouped_matmul_{name}", **unused, **named, entries=schedule.shape[0] // COLUMNS, tiles=count, BM=tiles.bm, BN=tiles.bn,
        STAGES=tiles.stages, PANEL=tiles.panel, PARTS=tiles.bm // tiles.part, DYNAMIC=tiles.dynamic, COUNT=len(operands[0]), STORED=tiles.stored, **constants,
    )  # fmt: skip
