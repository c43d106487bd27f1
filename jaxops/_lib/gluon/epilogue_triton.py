"""The consumers' loop, and what an epilogue gets and returns.

An epilogue is a function of the sums, its operands and the tile, that returns what to store:

    @gluon.jit
    def scaled(acc, operands, tile, VARIANT: gl.constexpr):
        scale, residual = operands
        return (residual + scale * acc,)

It is called for a piece of a tile at a time: `acc` is float32, [rows, columns] of the piece, zeros outside the groups.
It returns a tuple of a tensor for each result of the launch. One of two dimensions is a tile of its result, rounded to
its dtype. One of one dimension is a number for each row: its result is [pieces across, rows] in float32.

The loop loads the operands. They are arrays or numbers, each with the name of its kind:

- "rows": [M], as [rows, 1]. Loaded before the products.
- "columns": [G, N], the group's, as [1, columns]; zeros outside the groups.
- "beside": [G, 2 N], of operands "beside": the group's, as [1, columns]; zeros outside the groups.
- "groups": [G], the group's number; zero outside the groups.
- "tile": [M, N] like a result, as [rows, columns].
- "value": given as it is.

Before them come the contents of results that are "loaded" (`ragged_gemm.Result`), by TMA.
"""

# ruff: noqa: RUF005  # Triton's tuples are concatenated

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from jaxops._lib.gluon.gemm_triton import COLUMNS, mainloop, next_tile, skip_tile
from jaxops._lib.gluon.layouts_triton import accumulator
from jaxops._lib.gluon.split_sums_triton import add_parts, is_first_part, number_of_tile
from jaxops._lib.gluon.stores_triton import (
    add,
    pointers_to_tile,
    split_columns,
    store,
    store_tile,
    store_window,
    window,
    window_of_half,
)
from jaxops._lib.gluon.tile_scheduler_triton import RING, opaque


@gluon.aggregate
class Tile:
    """A piece of a tile of C.

    group: -1 outside the groups; in a launch of several pairs of operands 0.
    pair: of the operands.
    row, end, col: first row, end of the group's rows, first column.
    dtype: of A and B.
    """

    group: gl.tensor
    pair: gl.tensor
    row: gl.tensor
    end: gl.tensor
    col: gl.tensor
    dtype: gl.constexpr


@gluon.jit
def piece_of(tile, down, right):
    return Tile(tile.group, tile.pair, tile.row + down, tile.end, tile.col + right, tile.dtype)


@gluon.jit
def row_numbers(SHAPE: gl.constexpr):
    return gl.arange(0, SHAPE[0], layout=gl.SliceLayout(1, accumulator(SHAPE[1], gl.num_ctas())))


@gluon.jit
def column_numbers(SHAPE: gl.constexpr):
    return gl.arange(0, SHAPE[1], layout=gl.SliceLayout(0, accumulator(SHAPE[1], gl.num_ctas())))


@gluon.jit
def split_rows(x):
    """The upper half and the lower half."""
    return x.reshape([2, x.shape[0] // 2, x.shape[1]]).permute((1, 2, 0)).split()


@gluon.jit
def load_rows(args, tile, KINDS: gl.constexpr, SHAPE: gl.constexpr, DOWN: gl.constexpr):
    """For each of a tile's DOWN pieces its args, with the "rows" among them loaded."""
    loaded = ()
    for i in gl.static_range(DOWN):
        for n in gl.static_range(len(KINDS)):
            if KINDS[n] == "rows":
                at = tile.row + i * SHAPE[0]
                rows = row_numbers(SHAPE)
                loaded = loaded + (gl.load(args[n] + at + rows, mask=rows < tile.end - at, other=0.0),)
            else:
                loaded = loaded + (args[n],)
    return loaded


@gluon.jit
def load_operand(arg, tile, N, KIND: gl.constexpr, SHAPE: gl.constexpr):
    """arg: of `load_rows`."""
    if KIND == "rows":
        return arg[:, None]
    elif KIND == "columns":  # noqa: RET505  # decided at compile time
        cols = tile.col + column_numbers(SHAPE)
        mask = cols < gl.where(tile.group >= 0, N, 0) // 8 * 8  # no change: tells the compiler of the alignment
        return gl.load(arg + tile.group * N + cols, mask=mask, other=0.0)[None, :]
    elif KIND == "beside":
        HALF: gl.constexpr = SHAPE[1] // 2
        number = column_numbers(SHAPE)
        width = N // 8 * 8
        cols = tile.col + number % HALF
        mask = cols < gl.where(tile.group >= 0, width, 0)
        return gl.load(arg + tile.group * 2 * width + (number // HALF * width + cols), mask=mask, other=0.0)[None, :]
    elif KIND == "groups":
        return gl.load(arg + tile.group, mask=tile.group >= 0, other=0.0)
    elif KIND == "tile":
        MMA: gl.constexpr = accumulator(SHAPE[1], gl.num_ctas())
        pointers, mask = pointers_to_tile(arg, tile.row, tile.end, tile.col, N, SHAPE, MMA, True)
        return gl.load(pointers, mask=mask, other=0.0)
    else:
        gl.static_assert(KIND == "value")
        return arg


@gluon.jit
def apply(
    acc, loaded, args, tile, N, NUMBER: gl.constexpr, KINDS: gl.constexpr, EPILOGUE: gl.constexpr, VARIANT: gl.constexpr
):
    """What the epilogue returns for the NUMBER-th piece from above. loaded: results' contents. args: by `load_rows`."""
    piece = gl.convert_layout(acc, accumulator(acc.shape[1], gl.num_ctas()), assert_trivial=True)
    operands = loaded
    for n in gl.static_range(len(KINDS)):
        operands = operands + (load_operand(args[NUMBER * len(KINDS) + n], tile, N, KINDS[n], acc.shape),)
    return EPILOGUE(piece, operands, tile, VARIANT)


@gluon.jit
def store_value(value, desc, ptr, buf, tile, N, PENDING: gl.constexpr, HALF: gl.constexpr):
    MMA: gl.constexpr = accumulator(value.shape[1], gl.num_ctas())
    value = gl.convert_layout(value, MMA, assert_trivial=True)
    store(value, desc, ptr, buf, tile.row, tile.end, tile.col, N, MMA, True, PENDING, HALF)


@gluon.jit
def store_numbers(values, ptr, tile, M, PIECE: gl.constexpr):
    """A number for each row of a piece: a row of the result for each piece across."""
    MMA: gl.constexpr = accumulator(PIECE[1], gl.num_ctas())
    numbers = gl.convert_layout(values, gl.SliceLayout(1, MMA), assert_trivial=True)
    rows = row_numbers(PIECE)
    first = ptr + gl.cast(tile.col // PIECE[1], gl.int64) * M + tile.row
    gl.store(first + rows, numbers, mask=rows < tile.end - tile.row)


@gluon.jit
def store_piece(
    acc, args, tile, sizes, out, turn, WHICH: gl.constexpr, KINDS: gl.constexpr, EPILOGUE: gl.constexpr,
    VARIANT: gl.constexpr,
):  # fmt: skip
    """Runs the epilogue and stores each value. Returns the next turn among the consumer's buffers: a store fills one
    while the last is read."""
    descs, ptrs, bufs, widths, halves = out
    BUFFERS: gl.constexpr = bufs.shape[0] // 2
    M, N = sizes[1], sizes[3]
    values = apply(acc, (), args, tile, N, 0, KINDS, EPILOGUE, VARIANT)
    if widths is None:
        for r in gl.static_range(len(values)):
            if ptrs[r] is not None and len(values[r].shape) == 1:
                store_numbers(values[r], ptrs[r], tile, M, acc.shape)
            elif ptrs[r] is not None:
                buf = bufs.index(WHICH if BUFFERS == 1 else BUFFERS * WHICH + turn)
                store_value(values[r], descs[r], ptrs[r], buf, tile, N, BUFFERS - 1, halves[r])
                if BUFFERS > 1:
                    turn = (turn + 1) % BUFFERS
    else:
        for p in gl.static_range(len(widths)):
            if (tile.pair == p) & (tile.col < widths[p]):
                store_value(values[0], descs[p], ptrs[p], bufs.index(WHICH), tile, widths[p], 0, -1)
    return turn


@gluon.jit
def store_pieces(
    acc, args, tile, sizes, out, turn, WHICH: gl.constexpr, PIECE: gl.constexpr, KINDS: gl.constexpr,
    EPILOGUE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    if acc.shape[1] == PIECE[1]:
        turn = store_piece(acc, args, tile, sizes, out, turn, WHICH, KINDS, EPILOGUE, VARIANT)
    else:
        left, right = split_columns(acc)
        turn = store_piece(left, args, tile, sizes, out, turn, WHICH, KINDS, EPILOGUE, VARIANT)
        if out[3] is not None or tile.col + PIECE[1] < sizes[3]:
            half = piece_of(tile, 0, PIECE[1])
            turn = store_piece(right, args, half, sizes, out, turn, WHICH, KINDS, EPILOGUE, VARIANT)
    return turn


@gluon.jit
def start_loads(out, ready, tile, WHICH: gl.constexpr, LOADED: gl.constexpr):
    """Loads results' contents into the buffers that the last stores have finished reading."""
    descs, _, bufs, _, halves = out
    BUFFERS: gl.constexpr = bufs.shape[0] // 2
    tma.store_wait(0)
    fence_async_shared()
    mbarrier.expect(ready, LOADED * descs[0].nbytes_per_cta)
    first, at = window(tile.row, tile.end, bufs.shape[1])
    for r in gl.static_range(LOADED):
        buf = bufs.index(BUFFERS * WHICH + r).reshape([1, bufs.shape[1], bufs.shape[2]])
        tma.async_load(descs[r], [window_of_half(first, halves[r]), at, tile.col], ready, buf)


@gluon.jit
def store_in_place(
    acc, args, tile, sizes, out, ready, parity, WHICH: gl.constexpr, PIECE: gl.constexpr, LOADED: gl.constexpr,
    KINDS: gl.constexpr, EPILOGUE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """Runs the epilogue on a tile's quarters, whose contents of results are loaded: each is read, then overwritten, by
    the same consumer. The first half's loads have started. Returns the parity of the next loads' mbarrier."""
    descs, ptrs, bufs, _, halves_of = out
    BUFFERS: gl.constexpr = bufs.shape[0] // 2
    MMA: gl.constexpr = accumulator(PIECE[1])
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    M, N = sizes[1], sizes[3]
    halves = split_columns(acc)
    for j in gl.static_range(2):
        half = piece_of(tile, 0, j * PIECE[1])
        if j > 0:
            start_loads(out, ready, half, WHICH, LOADED)
        mbarrier.wait(ready, parity)
        parity ^= 1
        quarters = split_rows(halves[j])
        for i in gl.static_range(2):
            piece = piece_of(half, i * PIECE[0], 0)
            if (piece.row < piece.end) & (piece.col < N):
                # One block: a piece's registers are free before the next one's values come. Columns past N are zeros:
                # TMA fills them in.
                loaded = ()
                for r in gl.static_range(LOADED):
                    part = bufs.index(BUFFERS * WHICH + r).slice(i * PIECE[0], PIECE[0], dim=0)
                    loaded = loaded + (part.load(MMA),)
                values = apply(quarters[i], loaded, args, piece, N, i, KINDS, EPILOGUE, VARIANT)
                for r in gl.static_range(len(values)):
                    if len(values[r].shape) == 2:
                        bufs.index(BUFFERS * WHICH + r).slice(i * PIECE[0], PIECE[0], dim=0).store(values[r])
                    else:
                        store_numbers(values[r], ptrs[r], piece, M, PIECE)
        if half.col < N:
            if min(half.row + bufs.shape[1], half.end) >= bufs.shape[1]:
                fence_async_shared()
                for r in gl.static_range(BUFFERS):
                    buf = bufs.index(BUFFERS * WHICH + r)
                    store_window(descs[r], buf, half.row, half.end, half.col, halves_of[r])
            else:
                for r in gl.static_range(BUFFERS):
                    rows = bufs.index(BUFFERS * WHICH + r).load(STORED)
                    store_tile(rows, ptrs[r], half.row, half.end, half.col, N, STORED, True, halves_of[r])
    return parity


@gluon.jit
def start_sum(pipe, label, tile, N, ptr, ACCUMULATE: gl.constexpr, CUT: gl.constexpr):
    """What the products are added to: zeros, or what C holds in 16 bits, so that a sum is rounded once (see `add` for
    float32). CUT: in one part of a sum."""
    SHAPE: gl.constexpr = [pipe.BM // pipe.SPLIT, pipe.BN]
    MMA: gl.constexpr = accumulator(pipe.BN, gl.num_ctas())
    acc = gl.zeros(SHAPE, gl.float32, MMA)
    if ACCUMULATE and ptr.dtype.element_ty != gl.float32:
        pointers, mask = pointers_to_tile(ptr, tile.row, tile.end, tile.col, N, SHAPE, MMA, True)
        if CUT:
            mask &= is_first_part(label)
        acc = gl.load(pointers, mask=mask, other=0.0).to(gl.float32)
    return acc


@gluon.jit
def finish_sum(pipe, acc, part, tile, sizes, ptr, work, WHICH: gl.constexpr, CUT: gl.constexpr):
    """The whole sum, and whether this program has it."""
    complete = True
    if CUT:  # noqa: SIM102  # decided at compile time
        if part > 0:
            # Of finished parts, behind a cluster's numbers of tiles. Computed here, since it would be spilled if kept.
            counters = work[0] + COLUMNS * opaque(work[1]) + (RING * gl.num_programs(0) if gl.num_ctas() > 1 else 0)
            number, tiles = number_of_tile(tile.row, tile.col, sizes[1], sizes[3], pipe.BM, pipe.BN)
            HALF: gl.constexpr = WHICH if pipe.SPLIT > 1 else 0
            MMA: gl.constexpr = accumulator(pipe.BN, gl.num_ctas())
            acc, complete = add_parts(acc, part, number, tiles, ptr, counters, HALF, pipe.SPLIT, MMA)
    return acc, complete


@gluon.jit
def consume(
    pipe, out, args, sizes, work, WHICH: gl.constexpr, PIECE: gl.constexpr, LOADED: gl.constexpr,
    ACCUMULATE: gl.constexpr, CUT: gl.constexpr, PAIRED: gl.constexpr, KINDS: gl.constexpr, EPILOGUE: gl.constexpr,
    VARIANT: gl.constexpr,
):  # fmt: skip
    """Multiplies this consumer's tiles, runs the epilogue and stores.

    work: the work list and its entries, as `gemm_triton.produce` has it.
    PIECE: rows and columns that the epilogue gets at a time: a consumer's of a tile, or half of its columns; with
    LOADED a quarter. LOADED: how many results, the first ones, are loaded before. ACCUMULATE: the sums are added to
    what the result holds, in float32 without an epilogue. CUT: sums have parts. PAIRED: a tile's label is its pair of
    operands, not its group.
    """
    ptrs = out[1]
    N = sizes[3]
    DOWN: gl.constexpr = pipe.BM // pipe.SPLIT // PIECE[0]
    s = 0
    phase = 0
    parity = 1 - WHICH  # consumer 0 is first
    carry = 0  # which buffer is next; LOADED: parity of the loads
    more = True
    while more:
        label, row, end, col, steps, s, phase, parity = next_tile(pipe, s, phase, parity, WHICH)
        more = steps >= 0
        if row < end:
            zero = gl.to_tensor(0)
            tile = Tile(zero if PAIRED else label, label if PAIRED else zero, row, end, col, pipe.a.dtype)
            if LOADED > 0:
                start_loads(out, pipe.loads.index(WHICH), tile, WHICH, LOADED)
            vectors = load_rows(args, tile, KINDS, PIECE, DOWN)
            acc = start_sum(pipe, label, tile, N, ptrs[0], ACCUMULATE, CUT)
            acc, s, phase = mainloop(pipe, acc, steps, s, phase, WHICH)
            acc, complete = finish_sum(pipe, acc, label, tile, sizes, ptrs[1], work, WHICH, CUT)
            if LOADED > 0:
                ready = pipe.loads.index(WHICH)
                carry = store_in_place(
                    acc, vectors, tile, sizes, out, ready, carry, WHICH, PIECE, LOADED, KINDS, EPILOGUE, VARIANT
                )
            else:
                if ACCUMULATE:  # an empty group's part of C stays as it is, to the bit
                    complete &= label >= 0
                if complete:
                    if ACCUMULATE and ptrs[0].dtype.element_ty == gl.float32:
                        add(acc, out[0][0], ptrs[0], out[2].index(WHICH), row, end, col, N)
                    else:
                        carry = store_pieces(
                            acc, vectors, tile, sizes, out, carry, WHICH, PIECE, KINDS, EPILOGUE, VARIANT
                        )
        else:
            s, phase = skip_tile(pipe, steps, s, phase, WHICH)
    tma.store_wait(0)
