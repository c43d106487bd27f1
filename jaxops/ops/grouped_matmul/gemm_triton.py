"""Grouped matmul on Hopper: the epilogue and the operands of its three passes, for one array of weights or one a
modality."""

import dataclasses

import jax
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxops._lib.gemm_triton import ROWS, mainloop
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.ragged_gemm_triton import Gemm, Result, ragged_gemm
from jaxops._lib.stores_triton import pointers_to_tile, store_columns
from jaxops.ops.grouped_matmul.modalities import Part, Shapes, first_groups
from jaxops.ops.grouped_matmul.plan import Tiles


@gluon.jit
def grouped_gemm(pipe, tile, s, phase, carry, out, args, sizes, parts, WHICH: gl.constexpr, ACCUMULATE: gl.constexpr):
    """A tile of the result: the product, added to what C holds if ACCUMULATE, plus the group's bias."""
    descs, ptrs, bufs = out
    group, row, end, col, steps = tile
    N = sizes[2]
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, pipe.BN, 16])
    SHAPE: gl.constexpr = [pipe.BM // pipe.SPLIT, pipe.BN]
    acc = gl.zeros(SHAPE, gl.float32, MMA)
    if ACCUMULATE:
        pointers, mask = pointers_to_tile(ptrs[0], row, end, col, N, SHAPE, MMA, True)
        acc = gl.load(pointers, mask=mask, other=0.0).to(gl.float32)
    acc, s, phase = mainloop(pipe, acc, steps, s, phase, WHICH)
    if parts is None:
        if args is not None:  # noqa: SIM102  # known at compile time, unlike the next
            if group >= 0:  # rows outside the groups stay zero
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
        ping_pong=tiles.ping_pong, dynamic=tiles.dynamic, **named,
    )  # fmt: skip


def fwd_triton(
    lhs, rhs, bias, offsets, more=(), *, transpose_rhs: bool, tiles: Tiles, out_dtype, cores: int
) -> jax.Array:
    """As `fwd_pallas`; bfloat16 or float16, K and N multiples of 8. more: another (lhs, rhs) of the same shapes, whose
    product is added before rounding."""
    (M, K), G, N = lhs.shape, rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    gemm = _gemm(
        "grouped_matmul_dgrad" if transpose_rhs else "grouped_matmul_fwd", tiles, transposed=transpose_rhs,
        operands="sum" if more else "one", variant=False,
    )  # fmt: skip
    pairs = [(lhs, rhs), *([more] if more else [])]
    a, b = tuple(gemm.rows(x) for x, _ in pairs), tuple(gemm.weights(w) for _, w in pairs)
    result = Result(out_struct((M, N), out_dtype, like=lhs))
    return ragged_gemm(
        gemm, a, b, offsets, (G, M, N, K), [result], args=None if bias is None else (bias,), cores=cores
    )[0]


def wgrad_triton(lhs, dout, accumulator, offsets, *, tiles: Tiles, out_dtype, cores: int) -> jax.Array:
    """As `wgrad_pallas`; bfloat16 or float16, K and N multiples of 8."""
    (length, K), N, G = lhs.shape, dout.shape[1], offsets.shape[0] - 1
    gemm = _gemm("grouped_matmul_wgrad", tiles, contraction=True, variant=accumulator is not None)
    before = None if accumulator is None else accumulator.reshape(G * K, N)
    result = Result(out_struct((G * K, N), out_dtype, like=lhs), before)
    (out,) = ragged_gemm(
        gemm, (gemm.rows(lhs),), (gemm.weights(dout),), offsets, (G, K, N, length), [result], cores=cores
    )
    return out.reshape(G, K, N)


def modality_fwd_triton(
    lhs, rhs, offsets, before, *, parts: tuple[Part, ...], out: jax.ShapeDtypeStruct, tiles: Tiles, transpose_rhs: bool,
    cores: int,
) -> jax.Array:  # fmt: skip
    """As `modality_fwd_pallas`; bfloat16 or float16, all widths multiples of 8."""
    (M, N), G = out.shape, offsets.shape[0] - 1
    name = "modality_grouped_matmul_dgrad" if transpose_rhs else "modality_grouped_matmul_fwd"
    gemm = _gemm(name, tiles, transposed=transpose_rhs, operands="modalities", variant=False)
    widths = [w.shape[1:][::-1] if transpose_rhs else w.shape[1:] for w in rhs]
    # Past a modality's K TMA fills in zeros, whatever the row holds there.
    a = tuple(dataclasses.replace(gemm.rows(lhs), shape=(M, k)) for k, _ in widths)
    sizes = tuple((*part.groups, k, n) for part, (k, n) in zip(parts, widths, strict=True))
    result = Result(out_struct(out.shape, out.dtype, like=lhs), before)
    modalities = tuple(part.runs for part in parts), sizes
    b = tuple(gemm.weights(w) for w in rhs)
    return ragged_gemm(gemm, a, b, offsets, (G, M, N, 0), [result], modalities=modalities, cores=cores)[0]


def modality_wgrad_triton(
    lhs, dout, offsets, *, parts: tuple[Part, ...], shapes: Shapes, tiles: Tiles, out_dtype, cores: int
) -> list[jax.Array]:
    """As `modality_wgrad_pallas`; bfloat16 or float16, all widths multiples of 8."""
    own = [shapes[part.number] for part in parts]
    gemm = _gemm("modality_grouped_matmul_wgrad", tiles, contraction=True, operands="modalities", variant=False)

    def describe(windows, width: int):
        return dataclasses.replace(windows, shape=(*windows.shape[:2], width))

    a = tuple(describe(gemm.rows(lhs), k) for _, k, _ in own)
    b = tuple(describe(gemm.weights(dout), n) for _, _, n in own)
    sizes = tuple((*part.groups, k, n) for part, (_, k, n) in zip(parts, own, strict=True))
    results = [Result(out_struct((G * k, n), out_dtype, like=lhs)) for G, k, n in own]
    modalities = tuple(first_groups(shapes)[1:-1]), sizes
    found = ragged_gemm(gemm, a, b, offsets, (0, 0, 0, lhs.shape[0]), results, modalities=modalities, cores=cores)
    return [x.reshape(shape) for x, shape in zip(found, own, strict=True)]
