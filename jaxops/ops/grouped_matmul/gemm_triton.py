"""Grouped matmul on Hopper: the epilogue and the operands of its three passes, for one array of weights or one a
modality."""

import dataclasses

import jax
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.gluon.gemm_triton import CONTRACTION, ROWS, mainloop
from jaxops._lib.gluon.layouts_triton import accumulator
from jaxops._lib.gluon.ragged_gemm_triton import Gemm, Result, ragged_gemm
from jaxops._lib.gluon.stores_triton import pointers_to_tile, store_columns
from jaxops.ops.grouped_matmul.modalities import Part, Shapes, cost_of, first_groups, shapes_of
from jaxops.ops.grouped_matmul.plan import Tiles
from jaxops.ops.grouped_matmul.split_sums_triton import add_parts, is_first_part, number_of_tile


@gluon.jit
def grouped_gemm(pipe, tile, s, phase, carry, out, args, sizes, parts, WHICH: gl.constexpr, ACCUMULATE: gl.constexpr):
    """A tile of the result: the product, added to what C holds if ACCUMULATE, plus the group's bias.

    A weight gradient with args may split sums. `group` then is the work list's column of parts, 0 for a whole sum, and
    -1 for an empty group; args[0] are the counters of `add_parts`.
    """
    descs, ptrs, bufs = out
    group, row, end, col, steps = tile
    N = sizes[2]
    CUT: gl.constexpr = pipe.KIND == CONTRACTION and args is not None
    MMA: gl.constexpr = accumulator(pipe.BN, gl.num_ctas())
    SHAPE: gl.constexpr = [pipe.BM // pipe.SPLIT, pipe.BN]
    acc = gl.zeros(SHAPE, gl.float32, MMA)
    if ACCUMULATE:
        pointers, mask = pointers_to_tile(ptrs[0], row, end, col, N, SHAPE, MMA, True)
        if CUT:
            mask &= is_first_part(group)
        acc = gl.load(pointers, mask=mask, other=0.0).to(gl.float32)
    acc, s, phase = mainloop(pipe, acc, steps, s, phase, WHICH)
    if CUT:
        complete = True
        if group > 0:
            number, tiles = number_of_tile(row, col, sizes[1], N, pipe.BM, pipe.BN)
            HALF: gl.constexpr = WHICH if pipe.SPLIT > 1 else 0
            acc, complete = add_parts(acc, group, number, tiles, ptrs[1], args[0], HALF, pipe.SPLIT, MMA)
        if ACCUMULATE:
            complete &= group >= 0
        if complete:
            store_columns(acc, descs[0], ptrs[0], bufs.index(WHICH), row, end, col, N)
    elif parts is None:
        if args is not None and group >= 0:  # rows outside the groups stay zero
            cols = col + gl.arange(0, pipe.BN, layout=gl.SliceLayout(0, MMA))
            bias = gl.load(args[0] + group * N + cols, mask=cols < N, other=0.0)
            acc = acc + bias.to(gl.float32)[None, :]
        if not ACCUMULATE or group >= 0:  # an empty group's part of C stays as it is, to the bit
            store_columns(acc, descs[0], ptrs[0], bufs.index(WHICH), row, end, col, N)
    elif pipe.KIND == ROWS:
        if group < col + pipe.BN:  # group: columns of the modality; past them zeros, even if the row holds NaN
            cols = col + gl.arange(0, pipe.BN, layout=gl.SliceLayout(0, MMA))
            acc = gl.where((cols < group)[None, :], acc, 0.0)
        store_columns(acc, descs[0], ptrs[0], bufs.index(WHICH), row, end, col, N)
    else:
        for p in gl.static_range(len(parts)):
            if group == p:  # group: the modality
                store_columns(acc, descs[p], ptrs[p], bufs.index(WHICH), row, end, col, parts[p][3])
    return s, phase, carry


def _gemm(name: str, tiles: Tiles, **named) -> Gemm:
    return Gemm(
        name, grouped_gemm, tiles.bm, tiles.bn, tiles.stages, tiles.panel, (tiles.part, tiles.stored),
        programs=tiles.programs, ping_pong=tiles.ping_pong, dynamic=tiles.dynamic, **named,
    )  # fmt: skip


def fwd_triton(
    lhs, rhs, extra, offsets, *, parts: tuple[Part, ...] | None, out: jax.ShapeDtypeStruct, transpose_rhs: bool,
    tiles: Tiles, cores: int,
) -> jax.Array:  # fmt: skip
    """As `fwd_pallas`; bfloat16 or float16, all widths multiples of 8. lhs may be a pair of arrays, and rhs a pair of
    equal shapes: the two products are added before rounding."""
    pairs = isinstance(lhs, tuple)
    (M, N), G, shapes = out.shape, offsets.shape[0] - 1, shapes_of(rhs, transpose_rhs)
    name = f"{'' if parts is None else 'modality_'}grouped_matmul_{'dgrad' if transpose_rhs else 'fwd'}"
    operands = "sum" if pairs else "one" if parts is None else "modalities"
    cost = cost_of(parts, shapes, G, (lhs[0] if pairs else lhs, out), rhs)
    if pairs:
        cost["flops"] *= 2
    gemm = _gemm(name, tiles, transposed=transpose_rhs, operands=operands, variant=False, **cost)
    b = tuple(gemm.weights(w) for w in rhs)
    result = Result(out_struct(out.shape, out.dtype, like=lhs[0] if pairs else lhs), None if parts is None else extra)
    if parts is None:
        a = tuple(gemm.rows(x) for x in (lhs if pairs else (lhs,)))
        args = None if extra is None else (extra,)
        return ragged_gemm(gemm, a, b, offsets, (G, M, N, shapes[0][1]), [result], args=args, cores=cores)[0]
    # Past a modality's K TMA fills in zeros, whatever the row holds there.
    a = tuple(dataclasses.replace(gemm.rows(lhs), shape=(M, K)) for _, K, _ in shapes)
    sizes = tuple((*part.groups, K, N) for part, (_, K, N) in zip(parts, shapes, strict=True))
    spans = tuple(part.runs for part in parts)
    return ragged_gemm(gemm, a, b, offsets, (G, M, N, 0), [result], modalities=(spans, sizes), cores=cores)[0]


def wgrad_triton(
    lhs, dout, accumulator, offsets, *, parts: tuple[Part, ...] | None, shapes: Shapes, out_dtype, tiles: Tiles,
    cores: int,
) -> list[jax.Array]:  # fmt: skip
    """As `wgrad_pallas`; bfloat16 or float16, all widths multiples of 8."""
    name = f"{'' if parts is None else 'modality_'}grouped_matmul_wgrad"
    operands = "one" if parts is None else "modalities"
    own = shapes if parts is None else [shapes[part.number] for part in parts]
    before = None if accumulator is None else accumulator.reshape(-1, accumulator.shape[2])
    results = [Result(out_struct((G * K, N), out_dtype, like=lhs), before) for G, K, N in own]
    cost = cost_of(parts, own, offsets.shape[0] - 1, (lhs, dout), [x.type for x in results])
    gemm = _gemm(
        name,
        tiles,
        contraction=True,
        operands=operands,
        variant=accumulator is not None,
        split=1 if parts else tiles.split,
        **cost,
    )
    sizes = *own[0], lhs.shape[0]

    def describe(windows, width: int):
        return dataclasses.replace(windows, shape=(*windows.shape[:2], width))

    a = tuple(describe(gemm.rows(lhs), K) for _, K, _ in own)
    b = tuple(describe(gemm.weights(dout), N) for _, _, N in own)
    modalities = None
    if parts is not None:
        widths = tuple((*part.groups, K, N) for part, (_, K, N) in zip(parts, own, strict=True))
        modalities = tuple(first_groups(shapes)[1:-1]), widths
    if parts is None:
        results += gemm.parts(sizes, lhs)
    found = ragged_gemm(gemm, a, b, offsets, sizes, results, modalities=modalities, cores=cores)[: len(own)]
    return [x.reshape(shape) for x, shape in zip(found, own, strict=True)]
