"""The three passes of several arrays of weights, one a modality, on Hopper: one launch for up to four modalities, whose
tiles follow one another."""

import dataclasses

import jax
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.gluon.epilogue_triton import column_numbers
from jaxops._lib.gluon.ragged_gemm_triton import Pairs, Result, gemm_of, ragged_gemm
from jaxops._lib.gluon.tile_scheduler_triton import ROWS, swizzle
from jaxops._lib.ragged.tiling import tile_bound
from jaxops.ops.grouped_matmul import Part, Shapes, Tiles, cost_of, first_groups, shapes_of


@gluon.jit
def modality_of_row_tile(t, work, places, N, BN: gl.constexpr, PANEL: gl.constexpr, COUNT: gl.constexpr):
    """Entry in the work list, first column, and modality of tile t, in a result of N columns; modality COUNT + p:
    columns of modality p past its own width, which are zero and come after all products.

    places: of each modality its first group, the end of its groups, K and N.
    """
    schedule, entries = work
    part = 0
    before = 0
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
        own = gl.cdiv(places[p % COUNT][3], BN)
        across = own
        if p >= COUNT:
            across = gl.cdiv(N, BN) - own
        here = t >= reached  # the last range that starts at or before t; empty ranges start where the next one does
        part = gl.where(here, p, part)
        before = gl.where(here, reached, before)
        first = gl.where(here, start, first)
        high = gl.where(here, rows, high)
        left = gl.where(here, 0 if p < COUNT else own, left)
        wide = gl.where(here, across, wide)
        reached += rows * across
    i, j = swizzle(t - before, high, wide, PANEL)
    return first + i, (left + j) * BN, part


@gluon.jit
def modality_of_weight_tile(t, places, BM: gl.constexpr, BN: gl.constexpr, PANEL: gl.constexpr, COUNT: gl.constexpr):
    """Entry in the work list, first row and column in the group's matrix, and modality of tile t of the weight
    gradients."""
    part = 0
    before = 0
    first = 0
    num_i = 1
    num_j = 1
    reached = 0
    for p in gl.static_range(COUNT):
        high = gl.cdiv(places[p][2], BM)
        wide = gl.cdiv(places[p][3], BN)
        here = t >= reached
        part = gl.where(here, p, part)
        before = gl.where(here, reached, before)
        first = gl.where(here, places[p][0], first)
        num_i = gl.where(here, high, num_i)
        num_j = gl.where(here, wide, num_j)
        reached += (places[p][1] - places[p][0]) * high * wide
    t -= before
    i, j = swizzle(t % (num_i * num_j), num_i, num_j, PANEL)
    return first + t // (num_i * num_j), i * BM, j * BN, part


@gluon.jit
def of_modality(places, part, WHICH: gl.constexpr, COUNT: gl.constexpr):
    """places[part][WHICH], of a modality known at run time."""
    place = places[0][WHICH]
    for p in gl.static_range(1, COUNT):
        place = gl.where(part == p, places[p][WHICH], place)
    return place


@gluon.jit
def count_modality_tiles(
    work, sizes, places, tiles, BM: gl.constexpr, BN: gl.constexpr, KIND: gl.constexpr, CUT: gl.constexpr
):
    """As `count_tiles`."""
    if KIND == ROWS:
        schedule, entries = work
        tiles = gl.load(schedule + 4 * entries + len(places) - 1) * gl.cdiv(sizes[3], BN)
    return 0, tiles


@gluon.jit
def locate_modality(
    t, work, num_i, sizes, places, BM: gl.constexpr, BN: gl.constexpr, PANEL: gl.constexpr, KIND: gl.constexpr,
    CUT: gl.constexpr,
):  # fmt: skip
    """As `locate`. A tile's label is its modality."""
    COUNT: gl.constexpr = len(places)
    schedule, entries = work
    if KIND == ROWS:
        entry, col, part = modality_of_row_tile(t, work, places, sizes[3], BN, PANEL, COUNT)
        multiplied = part < COUNT
        part = part % COUNT
        group = gl.load(schedule + entry)
        row = gl.load(schedule + entries + entry)
        end = gl.load(schedule + 2 * entries + entry)
        K = of_modality(places, part, 2, COUNT)
        before = of_modality(places, part, 0, COUNT)
        multiplied = multiplied & (group >= before) & (group < of_modality(places, part, 1, COUNT))
        matrix = gl.where(multiplied, group - before, 0)
        size = gl.where(multiplied, K, 0)
        return part, part, matrix, row, end, col, gl.where(multiplied, 0, K), size
    entry, row, col, part = modality_of_weight_tile(t, places, BM, BN, PANEL, COUNT)
    first = gl.load(schedule + entries + entry)
    size = gl.load(schedule + 2 * entries + entry) - first
    matrix = gl.load(schedule + entry) - of_modality(places, part, 0, COUNT)
    return part, part, matrix, row, of_modality(places, part, 2, COUNT), col, first, size


@gluon.jit
def modality_grouped_matmul(acc, operands, tile, VARIANT: gl.constexpr):
    """Rows: past the modality's own columns zeros, even if the row holds NaN. operands: each modality's number of
    columns; a weight gradient has none."""
    if len(operands) > 0:
        own = operands[0]
        for p in gl.static_range(1, len(operands)):
            own = gl.where(tile.pair == p, operands[p], own)
        if own < tile.col + acc.shape[1]:
            cols = tile.col + column_numbers(acc.shape)
            acc = gl.where((cols < own)[None, :], acc, 0.0)
    return (acc,)


def fwd_triton(
    lhs, rhs, before, offsets, *, parts: tuple[Part, ...], out: jax.ShapeDtypeStruct, transpose_rhs: bool,
    tiles: Tiles, cores: int,
) -> jax.Array:  # fmt: skip
    """As `fwd_pallas`; bfloat16 or float16, all widths multiples of 8."""
    (M, N), G, shapes = out.shape, offsets.shape[0] - 1, shapes_of(rhs, transpose_rhs)
    gemm = gemm_of(
        f"modality_grouped_matmul_{'dgrad' if transpose_rhs else 'fwd'}", modality_grouped_matmul, tiles,
        transposed=transpose_rhs, operands="pairs", order=(count_modality_tiles, locate_modality),
        **cost_of(parts, shapes, G, (lhs, out), rhs),
    )  # fmt: skip
    # Past a modality's K TMA fills in zeros, whatever the row holds there.
    a = tuple(dataclasses.replace(gemm.rows(lhs), shape=(M, K)) for _, K, _ in shapes)
    b = tuple(gemm.weights(w) for w in rhs)
    places = tuple((*part.groups, K, N) for part, (_, K, N) in zip(parts, shapes, strict=True))
    pairs = Pairs(places, tuple(part.runs for part in parts), tile_bound(M, G, gemm.bm) * -(-N // gemm.bn))
    result = Result(out_struct(out.shape, out.dtype, like=lhs), before)
    args = [("value", N) for _, _, N in shapes]
    return ragged_gemm(gemm, a, b, offsets, (G, M, 0, N), [result], args=args, pairs=pairs, cores=cores)[0]


def wgrad_triton(
    lhs, dout, accumulator, offsets, *, parts: tuple[Part, ...], shapes: Shapes, out_dtype, tiles: Tiles, cores: int,
) -> list[jax.Array]:  # fmt: skip
    """As `wgrad_pallas`; bfloat16 or float16, all widths multiples of 8."""
    own = [shapes[part.number] for part in parts]
    results = [Result(out_struct((G * K, N), out_dtype, like=lhs)) for G, K, N in own]
    gemm = gemm_of(
        "modality_grouped_matmul_wgrad", modality_grouped_matmul, tiles, contraction=True, operands="pairs",
        order=(count_modality_tiles, locate_modality),
        **cost_of(parts, own, offsets.shape[0] - 1, (lhs, dout), [x.type for x in results]),
    )  # fmt: skip
    a = tuple(narrowed(gemm.rows(lhs), K) for _, K, _ in own)
    b = tuple(narrowed(gemm.weights(dout), N) for _, _, N in own)
    places = tuple((*part.groups, K, N) for part, (_, K, N) in zip(parts, own, strict=True))
    count = sum(G * -(-K // gemm.bm) * -(-N // gemm.bn) for G, K, N in own)
    pairs = Pairs(places, tuple(first_groups(shapes)[1:-1]), count, widths=tuple(N for _, _, N in own))
    (G, M, N), K = own[0], lhs.shape[0]
    gradients = ragged_gemm(gemm, a, b, offsets, (G, M, K, N), results, pairs=pairs, cores=cores)
    return [x.reshape(shape) for x, shape in zip(gradients, own, strict=True)]


def narrowed(windows, width: int):
    """A descriptor by `step_windows` that ends with the first `width` columns."""
    return dataclasses.replace(windows, shape=(*windows.shape[:2], width))
