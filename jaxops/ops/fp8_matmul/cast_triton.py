"""Casts of x to FP8 by single warps beside a product, in Gluon: the units, how they are announced and waited for.

A unit is some boxes of x beside each other, which TMA loads: rows to cast, or 128 rows of columns to cast for the
column layout, or, with a scale per row, rows whose largest magnitudes are looked for before they are cast. Warps take
unit numbers from an atomic counter, in order. A unit that waits, for its rows' largest magnitudes, waits for units of
lower numbers, which do not wait. So every number that was taken is done in the end, whichever programs run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from jaxops._lib.gluon.gemm_triton import advance
from jaxops._lib.gluon.tile_scheduler_triton import finish_fetch_add, start_fetch_add
from jaxops._lib.numerics import fp8

LEAST, MOST, PER_MOST = gl.constexpr(fp8.AMAX_MIN), gl.constexpr(fp8.AMAX_MAX), gl.constexpr(1 / 448)
# The state, int32 numbers that start as zeros: the next unit, in a line of its own; how many units of each panel are
# cast to the row layout; the flags, how many are of each row tile of the product and chunk of columns. With a scale per
# row, then how many units of each row tile are measured, and the largest magnitude of each row, as float32.
NEXT, PANELS = gl.constexpr(0), gl.constexpr(32)
# Four threads hold 128 numbers of a row, or in the column layout of a column: each 16 neighbours twice, so that a store
# of the warp writes whole sectors.
LINES = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [1, 1], [1, 0]))
OF_LINES = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 16], [8, 4], [1, 1], [1, 0])))

LINES_AT_ONCE = gl.constexpr(16)  # two of a thread, whose instructions do not depend on each other


@gluon.aggregate
class Casts:
    """How x is cut into units of the row layout, and where they are counted.

    state: see above.
    BM: rows of the product's tiles.
    HEIGHT: rows of a panel of units, a multiple of BM.
    ROWS, STEPS: rows and K steps of 128 of a unit.
    CHUNK: K steps that share a flag, a multiple of STEPS.
    """

    state: gl.tensor
    BM: gl.constexpr
    HEIGHT: gl.constexpr
    ROWS: gl.constexpr
    STEPS: gl.constexpr
    CHUNK: gl.constexpr


@gluon.jit
def _announce(counter, total):
    """Counts a unit whose results this warp has stored.

    Other multiprocessors read the values by TMA, in the async proxy: so the proxy fence, by each thread for its own
    stores, then one release for the warp.
    """
    assembly: gl.constexpr = """{
        .reg .pred first;
        .reg .b32 lane;
        fence.proxy.async.global;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first fence.acq_rel.gpu;
        @first red.relaxed.gpu.global.add.u32 [$1], 1;
        @first red.relaxed.gpu.global.add.u32 [$2], 1;
        mov.b32 $0, 0;
    }"""
    pointers = [counter.to(gl.int64), total.to(gl.int64)]
    gl.inline_asm_elementwise(assembly, "=r,l,l", pointers, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _announce_measured(counter):
    """Counts a unit whose rows' magnitudes this warp has written, by atomics."""
    assembly: gl.constexpr = """{
        .reg .pred first;
        .reg .b32 lane;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first red.release.gpu.global.add.u32 [$1], 1;
        mov.b32 $0, 0;
    }"""
    gl.inline_asm_elementwise(assembly, "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait(counter, needed):
    """Until the counter is at least `needed`; see `_reached`."""
    assembly: gl.constexpr = """{
        .reg .pred less;
        again:
        ld.acquire.gpu.global.u32 $0, [$1];
        setp.lt.u32 less, $0, $2;
        @less nanosleep.u32 32;
        @less bra again;
        fence.proxy.async.global;
    }"""
    gl.inline_asm_elementwise(
        assembly, "=&r,l,r", [counter.to(gl.int64), gl.to_tensor(needed)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _reached(counter):
    """A counter. The loads by TMA that follow see what was stored before it was counted."""
    assembly: gl.constexpr = """{
        ld.acquire.gpu.global.u32 $0, [$1];
        fence.proxy.async.global;
    }"""
    return gl.inline_asm_elementwise(
        assembly, "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _flags(casts, row, M, K):
    """The flags of a row's tile, one for each chunk."""
    flags = casts.state + PANELS + gl.cdiv(M, casts.HEIGHT)
    return flags + row // casts.BM * gl.cdiv(gl.cdiv(K, 128), casts.CHUNK)


@gluon.jit
def panel_is_cast(casts, row, M, K):
    """Whether all of a row's panel is cast: then its tiles need not wait for chunks."""
    panel = row // casts.HEIGHT
    down = gl.cdiv(min(casts.HEIGHT, M - panel * casts.HEIGHT), casts.ROWS)
    return _reached(casts.state + PANELS + panel) >= down * gl.cdiv(gl.cdiv(K, 128), casts.STEPS)


@gluon.jit
def wait_for_casts(casts, row, k, M, K):
    """Until the tile at `row` is cast in step k's chunk."""
    chunk = k // casts.CHUNK
    across = gl.cdiv(min(casts.CHUNK, gl.cdiv(K, 128) - chunk * casts.CHUNK), casts.STEPS)
    _wait(_flags(casts, row, M, K) + chunk, gl.cdiv(min(casts.BM, M - row), casts.ROWS) * across)


@gluon.jit
def scale_and_factor(amax, POW2: gl.constexpr):
    """`jaxops._lib.numerics.fp8.scale_and_factor` for e4m3 and a bfloat16 amax, equal to the bit."""
    m = gl.minimum(gl.maximum(amax, LEAST), MOST)
    bits = m.to(gl.int32, bitcast=True)
    biased = bits >> 23
    mantissa = bits & 0x7FFFFF
    if POW2:
        biased = biased - 8 + (mantissa > 0x600000).to(gl.int32)
        return (biased << 23).to(gl.float32, bitcast=True), ((254 - biased) << 23).to(gl.float32, bitcast=True)
    quotient = (448.0 / (mantissa | 0x3F800000).to(gl.float32, bitcast=True)).to(gl.int32, bitcast=True)
    quotient = (quotient + 256) & -512
    return m * PER_MOST, (quotient - ((biased - 127) << 23)).to(gl.float32, bitcast=True)


@gluon.jit
def infinity_to_nan(x):
    """bfloat16 numbers, with NaN for infinities: see `fp8.infinity_to_nan`."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, zero, $1; }",
        "=r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _load(buf):
    """Lines of 128 bfloat16 numbers of shared memory, with NaN for infinities."""
    return infinity_to_nan(buf.load(LINES))


@gluon.jit
def _larger_pairs(a, b):
    """Elementwise maximum of two pairs of non-negative bfloat16 numbers, a pair in 32 bits; NaN is ignored."""
    return gl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def largest_pairs(x, OF_ROWS: gl.constexpr):
    """Of each row of bfloat16 numbers the largest magnitudes in even and in odd columns, a pair in 32 bits."""
    pairs = gl.inline_asm_elementwise(
        "and.b32 $0, $2, 0x7fff7fff; mov.b32 $1, 0;", "=&r,=r,r", [x], dtype=gl.int32, is_pure=True, pack=2
    )
    pairs, _ = pairs.reshape([x.shape[0], x.shape[1] // 2, 2]).split()
    return gl.convert_layout(gl.reduce(pairs, 1, _larger_pairs), OF_ROWS)


@gluon.jit
def amax_of(pairs):
    return gl.maximum((pairs & -0x10000).to(gl.float32, bitcast=True), (pairs << 16).to(gl.float32, bitcast=True))


@gluon.jit
def _store_scales(scale, scales, line, lines):
    i = gl.arange(0, scale.shape[0], layout=OF_LINES)
    gl.store(scales + line + i, scale, mask=i < lines - line)


@gluon.jit
def _store_values(x, factor, values, line, lines, at, length, ALIGN: gl.constexpr):
    """Casts x, lines from `line` on and 128 places from `at` on, of an array of so many lines of that length."""
    factors = factor[:, None] + gl.zeros(x.shape, gl.float32, LINES)
    q = gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        .reg .b16 lo, hi;
        shl.b32 a, $1, 16;
        and.b32 b, $1, 0xffff0000;
        shl.b32 c, $2, 16;
        and.b32 d, $2, 0xffff0000;
        mul.f32 a, a, $3;
        mul.f32 b, b, $4;
        mul.f32 c, c, $5;
        mul.f32 d, d, $6;
        cvt.rn.satfinite.e4m3x2.f32 lo, b, a;
        cvt.rn.satfinite.e4m3x2.f32 hi, d, c;
        mov.b32 $0, {lo, hi};
        }""",
        "=r,r,r,r,r,r,r", [x, factors], dtype=gl.float8e4nv, is_pure=True, pack=4,
    )  # fmt: skip
    length = length // ALIGN * ALIGN  # no change: tells the compiler at multiples of how many bytes lines start
    i = gl.arange(0, x.shape[0], layout=OF_LINES)
    j = gl.arange(0, 128, layout=gl.SliceLayout(0, LINES))
    corner = values + (gl.cast(line, gl.int64) * length + at)
    mask = (i < lines - line)[:, None] & (j < length - at)[None, :]
    gl.store(corner + (i[:, None] * length + j[None, :]), q, mask=mask)


@gluon.jit
def _cast_lines(
    buf, values, scales, line, lines, at, length, scale_stride, POW2: gl.constexpr, ALIGN: gl.constexpr
):  # fmt: skip
    """Casts lines of 128 numbers of shared memory, each with a scale."""
    lines = lines if at < length else 0  # the last unit may have boxes past the end
    x = _load(buf)
    scale, factor = scale_and_factor(amax_of(largest_pairs(x, OF_LINES)), POW2)
    _store_scales(scale, scales + gl.cast(at // 128, gl.int64) * scale_stride, line, lines)
    _store_values(x, factor, values, line, lines, at, length, ALIGN)


@gluon.jit
def _locate_unit(
    u, M, K, HEIGHT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, COLS: gl.constexpr, BY_ROW: gl.constexpr
):  # fmt: skip
    """Unit u: whether it casts to the row layout; its first row and column.

    In panels of HEIGHT rows, by columns, since the product reads x by columns. Units of ROWS x WIDTH cast to the row
    layout; after them units of 128 x COLS (0: none) to the column layout, while x is still in L2. BY_ROW: units of
    ROWS x WIDTH measure the rows first.
    """
    across = gl.cdiv(K, WIDTH)
    others = HEIGHT // ROWS * across if BY_ROW else HEIGHT // 128 * gl.cdiv(K, COLS) if COLS > 0 else 0
    panel = u // (HEIGHT // ROWS * across + others)
    u -= panel * (HEIGHT // ROWS * across + others)
    first = panel * HEIGHT
    height = min(HEIGHT, M - first)
    down = gl.cdiv(height, ROWS)
    second = u >= down * across
    if BY_ROW:
        u -= gl.where(second, down * across, 0)
        return second, first + u % down * ROWS, u // down * WIDTH
    row = first + u % down * ROWS
    col = u // down * WIDTH
    if COLS > 0:
        u -= down * across
        down = gl.cdiv(height, 128)
        row = gl.where(second, first + u % down * 128, row)
        col = gl.where(second, u // down * COLS, col)
    return not second, row, col


@gluon.jit
def _load_box(
    casts, descs, buf, loaded, ahead, units, M, K,
    BOXES: gl.constexpr, COLS: gl.constexpr, BY_ROW: gl.constexpr,
):  # fmt: skip
    """Starts the load of the next box. ahead: its unit, its number in it, and an atomic increment that was started;
    returns those of the box after it."""
    u, box, following = ahead
    x_desc, xt_desc = descs
    WIDTH: gl.constexpr = x_desc.block_shape[1]
    if u < units:
        to_rows, row, col = _locate_unit(u, M, K, casts.HEIGHT, casts.ROWS, BOXES * WIDTH, BOXES * COLS, BY_ROW)
        mbarrier.expect(loaded, x_desc.nbytes_per_cta)
        if COLS > 0:
            if to_rows:
                tma.async_load(x_desc, [row, col + box * WIDTH], loaded, buf)
            else:
                turned = buf.reinterpret(shape=[128, COLS], layout=xt_desc.layout)
                tma.async_load(xt_desc, [row, col + box * COLS], loaded, turned)
        else:
            tma.async_load(x_desc, [row, col + box * WIDTH], loaded, buf)
    box += 1
    if box == BOXES:
        box = 0
        u = finish_fetch_add(following)
        following = start_fetch_add(casts.state + NEXT)
    return u, box, following


@gluon.jit
def _measure(buf, largest, row, M):
    """Raises the largest magnitudes of 8 rows to those of a box."""
    pairs = largest_pairs(_load(buf.slice(0, 128, dim=1)), OF_LINES)
    for i in gl.static_range(1, buf.shape[1] // 128):
        pairs = _larger_pairs(pairs, largest_pairs(_load(buf.slice(128 * i, 128, dim=1)), OF_LINES))
    amax = amax_of(pairs)
    amax = gl.where(amax == amax, amax, 0.0)  # not that of NaN only, whose bits are larger than a number's
    i = gl.arange(0, 8, layout=OF_LINES)
    gl.atomic_max(largest + row + i, amax.to(gl.int32, bitcast=True), mask=i < M - row, sem="relaxed")


@gluon.jit
def _load_largest(largest, row, M):
    i = gl.arange(0, 8, layout=OF_LINES)
    return gl.load(largest + row + i, mask=i < M - row, other=0).to(gl.float32, bitcast=True)


@gluon.jit
def cast(
    args, casts, WHICH: gl.constexpr, BOXES: gl.constexpr, DEPTH: gl.constexpr,
    COLS: gl.constexpr, BY_ROW: gl.constexpr, POW2: gl.constexpr, ALIGN: gl.constexpr,
):  # fmt: skip
    """One warp's loop over units. DEPTH boxes are loaded ahead, at most a unit's.

    BY_ROW: with a scale per row; else in blocks of 1x128, and of 128x1 in the column layout, of which a box has COLS
    columns (0: there is none). ALIGN: rows of the column layout start at multiples of so many bytes.
    """
    descs, values, scales, values_t, scales_t, x_bufs, loaded, units, M, K, width, height = args
    ROWS: gl.constexpr = casts.ROWS
    HEIGHT: gl.constexpr = casts.HEIGHT
    WIDTH: gl.constexpr = descs[0].block_shape[1]
    AT_ONCE: gl.constexpr = min(ROWS, LINES_AT_ONCE)
    state = casts.state
    measured = _flags(casts, gl.cdiv(M, casts.BM) * casts.BM, M, K)
    largest = measured + gl.cdiv(M, casts.BM)
    u = finish_fetch_add(start_fetch_add(state + NEXT))
    ahead = (u, gl.to_tensor(0), start_fetch_add(state + NEXT))
    for i in gl.static_range(DEPTH):
        buf = x_bufs.index(WHICH * DEPTH + i)
        ahead = _load_box(casts, descs, buf, loaded.index(WHICH * DEPTH + i), ahead, units, M, K, BOXES, COLS, BY_ROW)
    s = 0
    phase = 0
    while u < units:
        to_rows, row, col = _locate_unit(u, M, K, HEIGHT, ROWS, BOXES * WIDTH, BOXES * COLS, BY_ROW)
        factor = gl.full([8], 0.0, gl.float32, OF_LINES)
        if BY_ROW and to_rows:
            tile = row // casts.BM
            needed = gl.cdiv(min(casts.BM, M - tile * casts.BM), ROWS) * gl.cdiv(K, BOXES * WIDTH)
            _wait(measured + tile, needed)
            scale, factor = scale_and_factor(_load_largest(largest, row, M), POW2)
            _store_scales(scale, scales, row, M if col == 0 else 0)
        after = u
        for b in range(BOXES):
            n = WHICH * DEPTH + s
            buf = x_bufs.index(n)
            mbarrier.wait(loaded.index(n), phase)
            if BY_ROW:
                if to_rows:
                    for i in gl.static_range(WIDTH // 128):
                        at = col + b * WIDTH + i * 128
                        x = _load(buf.slice(128 * i, 128, dim=1))
                        _store_values(x, factor, values, row, M, at, width, 16)
                else:
                    _measure(buf, largest, row, M)
            elif to_rows:
                for i in gl.static_range(ROWS // AT_ONCE):
                    lines = buf.slice(AT_ONCE * i, AT_ONCE)
                    line = row + AT_ONCE * i
                    _cast_lines(lines, values, scales, line, M, col + b * WIDTH, width, height, POW2, 16)
            elif COLS > 0:
                turned = buf.reinterpret(shape=[128, COLS], layout=descs[1].layout).permute((1, 0))
                for i in gl.static_range(COLS // AT_ONCE):
                    line = col + b * COLS + AT_ONCE * i
                    _cast_lines(turned.slice(AT_ONCE * i, AT_ONCE), values_t, scales_t, line, K, row, M, K, POW2, ALIGN)
            # All threads have read the buffer before the next load into it. The fence: TMA writes in another proxy,
            # and a barrier does not wait for reads that are still queued.
            fence_async_shared()
            gl.barrier()
            after = gl.where(ahead[1] == 0, ahead[0], after)
            ahead = _load_box(casts, descs, buf, loaded.index(n), ahead, units, M, K, BOXES, COLS, BY_ROW)
            s, phase = advance(s, phase, DEPTH)
        if to_rows:
            flag = _flags(casts, row, M, K) + col // (128 * casts.CHUNK)
            _announce(flag, state + PANELS + row // HEIGHT)
        elif BY_ROW:
            _announce_measured(measured + row // casts.BM)
        u = after
