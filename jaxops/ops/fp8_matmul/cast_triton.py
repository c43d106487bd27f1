"""Casts of x to FP8 by single warps beside a product, in Gluon: the units, how they are announced and waited for.

A cast unit is one box of x that TMA loads: some rows of 128 columns or, with a scale per row, some whole rows in
several boxes; for the column layout 128 rows of some columns. Warps take unit numbers from an atomic counter, in
order, and wait for nothing but their own loads. So every number that was taken is cast, whichever programs run, and a
wait for announced units ends as soon as at least one program runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from jaxops._lib import fp8
from jaxops._lib.gemm_triton import advance
from jaxops._lib.tile_scheduler_triton import finish_fetch_add, start_fetch_add

LEAST, MOST, PER_MOST = gl.constexpr(fp8.AMAX_MIN), gl.constexpr(fp8.AMAX_MAX), gl.constexpr(1 / 448)
# The state, int32 numbers that start as zeros: the next unit; how many units of the row layout are cast; and how many
# of each FLAG_ROWS rows and chunk of columns. Each in a line of its own.
NEXT, DONE, FLAGS = gl.constexpr(0), gl.constexpr(32), gl.constexpr(64)
FLAG_ROWS = gl.constexpr(64)
# Four threads hold 128 numbers that share a scale (of a row, or in the column layout of a column), each 32 neighbours.
LINES = gl.constexpr(gl.BlockedLayout([1, 32], [8, 4], [1, 1], [1, 0]))
OF_LINES = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 32], [8, 4], [1, 1], [1, 0])))


@gluon.aggregate
class Casts:
    """What the product has to know of the casts.

    state: see above.
    announced: units of the row layout in all.
    ROWS: of a unit of the row layout.
    CHUNK: K steps of 128 that share a flag; 0: all.
    """

    state: gl.tensor
    announced: gl.tensor
    ROWS: gl.constexpr
    CHUNK: gl.constexpr


@gluon.jit
def _announce(state, flag):
    """Counts a unit whose values and scales this warp has stored.

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
    pointers = [(state + FLAGS + flag).to(gl.int64), (state + DONE).to(gl.int64)]
    gl.inline_asm_elementwise(assembly, "=r,l,l", pointers, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait(counter, needed):
    """Until the counter is at least `needed`. The loads by TMA that follow see what was stored before it was counted."""
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
def casts_left(casts):
    """Whether units of the row layout are left. If not, everything may be loaded without waiting."""
    assembly: gl.constexpr = """{
        ld.acquire.gpu.global.u32 $0, [$1];
        fence.proxy.async.global;
    }"""
    done = gl.inline_asm_elementwise(
        assembly, "=r,l", [(casts.state + DONE).to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )
    return (done < casts.announced).to(gl.int32)


@gluon.jit
def wait_for_casts(casts, row, k, M, K, BM: gl.constexpr):
    """Until the BM rows at `row` are cast in the K steps that share step k's flag."""
    steps = gl.cdiv(K, 128)
    chunks = gl.cdiv(steps, casts.CHUNK) if casts.CHUNK > 0 else 1
    chunk = k // casts.CHUNK if casts.CHUNK > 0 else 0
    each = min(casts.CHUNK, steps - chunk * casts.CHUNK) if casts.CHUNK > 0 else 1
    for i in gl.static_range(BM // FLAG_ROWS):
        first = row + i * FLAG_ROWS
        if first < M:
            units = gl.cdiv(min(FLAG_ROWS, M - first), casts.ROWS)
            _wait(casts.state + FLAGS + first // FLAG_ROWS * chunks + chunk, units * each)


@gluon.jit
def _scale_and_factor(amax, POW2: gl.constexpr):
    """`jaxops._lib.fp8.scale_and_factor` for e4m3 and a bfloat16 amax, equal to the bit."""
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
def _load(buf):
    """8 x 128 bfloat16 numbers of shared memory, with NaN for infinities: see `fp8.infinity_to_nan`."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, zero, $1; }",
        "=r,r", [buf.load(LINES)], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _larger_pairs(a, b):
    """Elementwise maximum of two pairs of non-negative bfloat16 numbers, a pair in 32 bits; NaN is ignored."""
    return gl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _largest_pairs(x):
    """Of each line of `_load` the largest magnitudes of the even and of the odd places, a pair in 32 bits."""
    pairs = gl.inline_asm_elementwise(
        "and.b32 $0, $2, 0x7fff7fff; mov.b32 $1, 0;", "=&r,=r,r", [x], dtype=gl.int32, is_pure=True, pack=2
    )
    pairs, _ = pairs.reshape([x.shape[0], x.shape[1] // 2, 2]).split()
    return gl.convert_layout(gl.reduce(pairs, 1, _larger_pairs), OF_LINES)


@gluon.jit
def _scales_of(pairs, POW2: gl.constexpr):
    amax = gl.maximum((pairs & -0x10000).to(gl.float32, bitcast=True), (pairs << 16).to(gl.float32, bitcast=True))
    return _scale_and_factor(amax, POW2)


@gluon.jit
def _store_scales(scale, scales, line, lines):
    i = gl.arange(0, 8, layout=OF_LINES)
    gl.store(scales + line + i, scale, mask=i < lines - line)


@gluon.jit
def _store_values(x, factor, values, line, lines, at, length, ALIGNED: gl.constexpr):
    """Casts x, 8 lines from `line` on and 128 places from `at` on, of an array of so many lines of that length."""
    factors = factor[:, None] + gl.zeros([8, 128], gl.float32, LINES)
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
    length = length // 16 * 16 if ALIGNED else length  # tells the compiler that lines start at multiples of 16 bytes
    i = gl.arange(0, 8, layout=OF_LINES)
    j = gl.arange(0, 128, layout=gl.SliceLayout(0, LINES))
    corner = values + (gl.cast(line, gl.int64) * length + at)
    mask = (i < lines - line)[:, None] & (j < length - at)[None, :]
    gl.store(corner + (i[:, None] * length + j[None, :]), q, mask=mask)


@gluon.jit
def _cast_lines(
    buf, values, scales, line, lines, at, length, scale_stride, POW2: gl.constexpr, ALIGNED: gl.constexpr
):  # fmt: skip
    """Casts 8 lines of 128 numbers of shared memory, each with a scale."""
    x = _load(buf)
    scale, factor = _scales_of(_largest_pairs(x), POW2)
    _store_scales(scale, scales + gl.cast(at // 128, gl.int64) * scale_stride, line, lines)
    _store_values(x, factor, values, line, lines, at, length, ALIGNED)


@gluon.jit
def _locate_unit(u, M, K, HEIGHT: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Unit u: whether it is one of the column layout; its first row and column.

    In panels of HEIGHT rows: first the row layout, by columns, since the product reads x by columns; then the column
    layout (COLS columns a unit; 0: none), whose x is then still in L2.
    """
    across = gl.cdiv(K, 128)
    across_t = gl.cdiv(K, COLS) if COLS > 0 else 0
    panel = u // (HEIGHT // ROWS * across + HEIGHT // 128 * across_t)
    first = panel * HEIGHT
    u -= panel * (HEIGHT // ROWS * across + HEIGHT // 128 * across_t)
    height = min(HEIGHT, M - first)
    down = gl.cdiv(height, ROWS)
    row = first + u % down * ROWS
    col = u // down * 128
    transposed = False
    if COLS > 0:
        transposed = u >= down * across
        u -= down * across
        down_t = gl.cdiv(height, 128)
        row = gl.where(transposed, first + u % down_t * 128, row)
        col = gl.where(transposed, u // down_t * COLS, col)
    return transposed, row, col


@gluon.jit
def _load_unit(descs, buf, loaded, u, units, M, K, HEIGHT: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    x_desc, xt_desc = descs
    if u < units:
        transposed, row, col = _locate_unit(u, M, K, HEIGHT, ROWS, COLS)
        mbarrier.expect(loaded, x_desc.nbytes_per_cta)
        if COLS > 0:
            if transposed:
                tma.async_load(xt_desc, [row, col], loaded, buf.reinterpret(shape=[128, COLS], layout=xt_desc.layout))
            else:
                tma.async_load(x_desc, [row, col], loaded, buf)
        else:
            tma.async_load(x_desc, [row, col], loaded, buf)


@gluon.jit
def cast_blocks(
    args, casts, WHICH: gl.constexpr, HEIGHT: gl.constexpr, COLS: gl.constexpr, POW2: gl.constexpr,
    ALIGNED: gl.constexpr,
):  # fmt: skip
    """A warp that casts in blocks of 1x128, and of 128x1 for the column layout. Two units are loaded ahead."""
    descs, values, scales, values_t, scales_t, x_bufs, loaded, units, M, K, width, height = args
    ROWS: gl.constexpr = casts.ROWS
    STEPS: gl.constexpr = casts.CHUNK
    u = finish_fetch_add(start_fetch_add(casts.state + NEXT))
    second = finish_fetch_add(start_fetch_add(casts.state + NEXT))
    _load_unit(descs, x_bufs.index(2 * WHICH), loaded.index(2 * WHICH), u, units, M, K, HEIGHT, ROWS, COLS)
    _load_unit(descs, x_bufs.index(2 * WHICH + 1), loaded.index(2 * WHICH + 1), second, units, M, K, HEIGHT, ROWS, COLS)
    following = start_fetch_add(casts.state + NEXT)
    s = 0
    phase = 0
    while u < units:
        buf = x_bufs.index(2 * WHICH + s)
        transposed, row, col = _locate_unit(u, M, K, HEIGHT, ROWS, COLS)
        mbarrier.wait(loaded.index(2 * WHICH + s), phase)
        if transposed:
            if COLS > 0:
                turned = buf.reinterpret(shape=[128, COLS], layout=descs[1].layout).permute((1, 0))
                for i in gl.static_range(COLS // 8):
                    lines = turned.slice(8 * i, 8, dim=0)
                    _cast_lines(lines, values_t, scales_t, col + 8 * i, K, row, M, K, POW2, ALIGNED)
        else:
            for i in gl.static_range(ROWS // 8):
                _cast_lines(
                    buf.slice(8 * i, 8, dim=0), values, scales, row + 8 * i, M, col, width, height, POW2, True
                )
            chunk = gl.cdiv(gl.cdiv(K, 128), STEPS) * (row // FLAG_ROWS) + col // (128 * STEPS)
            _announce(casts.state, chunk)
        gl.barrier()  # all threads have read the buffer
        third = finish_fetch_add(following)
        following = start_fetch_add(casts.state + NEXT)
        _load_unit(descs, buf, loaded.index(2 * WHICH + s), third, units, M, K, HEIGHT, ROWS, COLS)
        u = second
        second = third
        s, phase = advance(s, phase, 2)


@gluon.jit
def _load_box(x_desc, x_bufs, loaded, s, u, box, following, boxes, units, state, WHICH: gl.constexpr):
    """Starts the load of a box of rows; returns the box after it."""
    if u < units:
        mbarrier.expect(loaded.index(2 * WHICH + s), x_desc.nbytes_per_cta)
        at = [u * x_desc.block_shape[0], box % boxes * x_desc.block_shape[1]]
        tma.async_load(x_desc, at, loaded.index(2 * WHICH + s), x_bufs.index(2 * WHICH + s))
    box += 1
    if box == 2 * boxes:
        box = 0
        u = finish_fetch_add(following)
        following = start_fetch_add(state + NEXT)
    return u, box, following


@gluon.jit
def cast_rows(args, casts, WHICH: gl.constexpr, POW2: gl.constexpr):
    """A warp that casts rows, each with a scale: its boxes once for the largest magnitude, then again, out of L2."""
    descs, values, scales, _values_t, _scales_t, x_bufs, loaded, units, M, K, width, _height = args
    x_desc = descs[0]
    ROWS: gl.constexpr = x_desc.block_shape[0]
    BOX: gl.constexpr = x_desc.block_shape[1]
    gl.static_assert(ROWS == 8 and casts.ROWS == 8)
    state = casts.state
    boxes = gl.cdiv(K, BOX)
    u = finish_fetch_add(start_fetch_add(state + NEXT))
    following = start_fetch_add(state + NEXT)
    ahead = u  # the unit that is loaded, two boxes ahead
    box = 0
    ahead, box, following = _load_box(x_desc, x_bufs, loaded, 0, ahead, box, following, boxes, units, state, WHICH)
    ahead, box, following = _load_box(x_desc, x_bufs, loaded, 1, ahead, box, following, boxes, units, state, WHICH)
    s = 0
    phase = 0
    while u < units:
        after = u
        pairs = gl.full([8], 0, gl.int32, OF_LINES)
        for _ in range(boxes):
            mbarrier.wait(loaded.index(2 * WHICH + s), phase)
            for i in gl.static_range(BOX // 128):
                found = _largest_pairs(_load(x_bufs.index(2 * WHICH + s).slice(128 * i, 128, dim=1)))
                pairs = _larger_pairs(pairs, found)
            gl.barrier()  # all threads have read the buffer
            after = gl.where(box == 0, ahead, after)
            ahead, box, following = _load_box(
                x_desc, x_bufs, loaded, s, ahead, box, following, boxes, units, state, WHICH
            )
            s, phase = advance(s, phase, 2)
        scale, factor = _scales_of(pairs, POW2)
        _store_scales(scale, scales, 8 * u, M)
        for b in range(boxes):
            mbarrier.wait(loaded.index(2 * WHICH + s), phase)
            for i in gl.static_range(BOX // 128):
                x = _load(x_bufs.index(2 * WHICH + s).slice(128 * i, 128, dim=1))
                _store_values(x, factor, values, 8 * u, M, b * BOX + 128 * i, width, True)
            gl.barrier()
            after = gl.where(box == 0, ahead, after)
            ahead, box, following = _load_box(
                x_desc, x_bufs, loaded, s, ahead, box, following, boxes, units, state, WHICH
            )
            s, phase = advance(s, phase, 2)
        _announce(state, 8 * u // FLAG_ROWS)
        u = after
