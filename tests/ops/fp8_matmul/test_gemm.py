"""C = A @ B.T of operands with any scales, by every backend, compared with float64: the op's three products."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxops._lib.ragged.offsets import padded_rows
from jaxops.ops.fp8_matmul import Problem, Tiles, make_plan
from jaxops.ops.fp8_matmul.gemm_pallas import multiply_pallas
from jaxops.ops.fp8_matmul.operand import Operand
from jaxops.ops.fp8_matmul.xla import multiply_xla
from tests.compare import assert_close
from tests.ops.fp8_matmul.cases import BLOCK, RUNS, kind_of, operand_shapes, options_of
from tests.window import window

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
TENSOR, ROW, BLOCKS, OUTER = (
    "tensorwise-tensorwise",
    "rowwise-rowwise",
    "block_1x128-block_128x128",
    "block_1x128-block_1x128",
)
DENSE = [TENSOR, ROW, BLOCKS, OUTER]
ROWS, CONTRACTION = [TENSOR, ROW, BLOCKS], [TENSOR, ROW, OUTER]


def operand(rng, shape: tuple[int, ...], scaling: str, dtype: str = E4M3) -> Operand:
    """Random numbers over much of the format's range, and scales that differ from block to block."""
    values = np.clip(rng.normal(size=shape) * 100, -448, 448).astype(getattr(ml_dtypes, dtype))
    scales = np.exp(rng.normal(size=operand_shapes(scaling, *shape).scales.shape) / 2).astype(np.float32)
    return Operand(values, scales, scaling)  # pyright: ignore[reportArgumentType]


@functools.partial(jax.jit, static_argnames=("run", "length", "out_dtype", "fast", "tiles"))
def _multiply(a, b, offsets, run, length, out_dtype, fast, tiles):
    how = {"length": length, "out_dtype": jnp.dtype(out_dtype), "fast": fast}
    if run == "xla":
        return multiply_xla(a, b, offsets, **how)
    if run == "triton":
        from jaxops._lib.planning.device import current_device
        from jaxops.ops.fp8_matmul.gemm_triton import multiply_triton

        recipe = {"tensorwise": "tensorwise", "rowwise": "rowwise"}.get(a.scaling, "blockwise")
        (M, K), N, G = a.values.shape, b.values.shape[-2], 0 if offsets is None else len(offsets) - 1
        sizes = (M, K, N) if length is None else (length, M, N)
        plan = make_plan(Problem(*sizes, recipe, "bfloat16", G), current_device(), backend="triton")
        tiles = tiles or (plan.wgrad if length is not None else plan.fwd if fast else plan.dgrad)
        tiles = dataclasses.replace(tiles, dynamic=tiles.dynamic and G > 0)
        return multiply_triton(a, b, offsets, **how, tiles=tiles, cores=current_device().cores)
    tiles = Tiles("pallas", 16, 32, panel=2) if run == "interpret" else Tiles("pallas", 64, 64, 4, 2, panel=2)
    return multiply_pallas(a, b, offsets, **how, tiles=tiles, interpret=run == "interpret")


def multiply(
    a: Operand, b: Operand, offsets=None, *, run, length=None, out_dtype="float32", fast=False, tiles=None
):  # fmt: skip
    """tiles: of the triton kernel, dynamic over groups only; by default the plan's."""
    options_of(run)  # skips where its device is missing
    return _multiply(a, b, offsets, run, length, out_dtype, fast, tiles)


def tile_ways(run: str) -> tuple[dict, ...]:
    """Two and three consumers, and half as many columns, of as many stages as store a result's tile at once, in halves,
    and from registers."""
    ways = (
        *((128, 128, False, 3), (128, 128, True, 5), (128, 128, False, 6)),
        *((192, 128, False, 3), (192, 128, True, 4)),
        *((128, 64, True, 7), (128, 64, False, 8)),
    )
    of = lambda bm, bn, dynamic, stages: Tiles("triton", bm, bn, stages=stages, panel=3, dynamic=dynamic)
    return tuple({"tiles": of(*way)} for way in ways) if run == "triton" else ({},)


def wide(x: Operand) -> np.ndarray:
    """Written out number by number."""
    values, scales = x.values.astype(np.float64), x.scales.astype(np.float64)
    if values.ndim == 3:
        return np.stack([wide(Operand(v, s, x.scaling)) for v, s in zip(x.values, x.scales, strict=True)])
    row, column = np.indices(values.shape)
    places = {
        "tensorwise": (),
        "rowwise": (row,),
        "block_1x128": (column // BLOCK, row),
        "block_128x128": (row // BLOCK, column // BLOCK),
    }
    return values * scales[places[x.scaling]]


def check(got, want, run: str, out_dtype: str = "float32") -> None:
    assert got.dtype == jnp.dtype(out_dtype)
    kind = {"kind": "fp8_sum"} if run == "triton" and out_dtype == "float32" else kind_of(run, out_dtype)
    assert_close(got, want, **kind)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("scalings", DENSE)
def test_dense(run, scalings):
    rng = np.random.default_rng(0)
    M, K, N = 150, 268, 161
    dtypes = (E5M2 if scalings == TENSOR else E4M3), E4M3
    a, b = (
        operand(rng, shape, s, d) for shape, s, d in zip(((M, K), (N, K)), scalings.split("-"), dtypes, strict=True)
    )
    check(multiply(a, b, run=run), wide(a) @ wide(b).T, run)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (37, 128, 130)], ids=str)
def test_sizes(run, sizes):
    rng = np.random.default_rng(0)
    M, K, N = sizes
    a, b = operand(rng, (M, K), "block_1x128"), operand(rng, (N, K), "block_128x128")
    check(multiply(a, b, run=run, out_dtype="bfloat16"), wide(a) @ wide(b).T, run, "bfloat16")


TENSOR = "tensorwise-block_128x128"
OF_FEW_ROWS = {
    "one-row": Tiles("pallas", 1, 8, 2, 1, bk=384, panel=2),
    "one-row-split": Tiles("pallas", 1, 32, 4, 1, split=3),
    "swapped": Tiles("pallas", 8, 64, 4, 2, panel=2, swap=True),
    "long-steps": Tiles("pallas", 16, 16, 4, 2, bk=256, split=2),
    "split": Tiles("pallas", 32, 16, 4, 2, split=2),
    "swapped-split": Tiles("pallas", 64, 128, 4, 2, split=4, swap=True),
}


@pytest.mark.parametrize("run", ["interpret", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("tiles", "scalings"),
    # Each of the tiles, and each of the scalings with swapped operands and a split sum.
    [*zip(OF_FEW_ROWS, 2 * (ROW, BLOCKS, TENSOR), strict=True), ("swapped-split", ROW), ("swapped-split", BLOCKS)],
)
def test_tiles_of_few_rows(tiles, scalings, run):
    """Dense and over groups with NaN outside, of at most three tiles each way; sums of whole steps and not, and shorter
    than their parts."""
    tiles, (a_scaling, b_scaling) = OF_FEW_ROWS[tiles], scalings.split("-")
    how = {"out_dtype": jnp.dtype("float32"), "tiles": tiles, "interpret": run == "interpret"}
    call = jax.jit(functools.partial(multiply_pallas, **how))
    rng = np.random.default_rng(0)
    for M, K, N in ((min(37, 2 * tiles.bm + 5), 768, min(130, 2 * tiles.bn + 2)), (1, 200, 3)):
        a, b = operand(rng, (M, K), a_scaling), operand(rng, (N, K), b_scaling)
        check(call(a, b), wide(a) @ wide(b).T, run)
    sizes, K, N = (9, 0, 1, 7), 650, min(161, 2 * tiles.bn + 3)
    offsets = 3 + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    a, b = bad_rows(operand(rng, (24, K), a_scaling), offsets), operand(rng, (len(sizes), N, K), b_scaling)
    got = np.asarray(call(a, b, offsets))
    want, wide_a, wide_b = np.zeros((24, N)), wide(a), wide(b)
    for g, (lo, hi) in enumerate(itertools.pairwise(offsets)):
        want[lo:hi] = wide_a[lo:hi] @ wide_b[g].T
    check(got, want, run)
    assert not got[np.r_[:3, 20:24]].any()


def bad_rows(x: Operand, offsets) -> Operand:
    """NaN in the rows outside the groups, and in their scales where they have their own."""
    row = np.arange(x.values.shape[0])
    outside = (row < offsets[0]) | (row >= offsets[-1])
    x.values[outside] = np.nan
    if x.scaling != "tensorwise":
        x.scales[..., outside] = np.nan
    return x


def check_rows(run, scalings, sizes, before, after, K, N, seed=0, **how):
    rng = np.random.default_rng(seed)
    offsets = before + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    M = int(offsets[-1]) + after
    s, t = scalings.split("-")
    a, b = bad_rows(operand(rng, (M, K), s), offsets), operand(rng, (len(sizes), N, K), t)
    want, wide_a, wide_b = np.zeros((M, N)), wide(a), wide(b)
    for g, (lo, hi) in enumerate(itertools.pairwise(offsets)):
        want[lo:hi] = wide_a[lo:hi] @ wide_b[g].T
    got = multiply(a, b, offsets.astype(np.int32), run=run, **how)
    check(got, want, run, how.get("out_dtype", "float32"))
    assert not np.asarray(got)[np.r_[: offsets[0], offsets[-1] : M]].any()


def check_contraction(run, scalings, sizes, before, after, M, N, seed=0, **how):
    """The columns that pad a group to 128 are zeros, as the quantizer writes them; behind the last group is NaN."""
    rng = np.random.default_rng(seed)
    offsets = before + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    length, G = int(offsets[-1]) + after, len(sizes)
    starts = BLOCK * np.concatenate([[0], np.cumsum(-(-np.asarray(sizes) // BLOCK))])
    columns = np.arange(padded_rows(length, G))
    there = np.zeros(len(columns), bool)
    for start, size in zip(starts[:-1], sizes, strict=True):
        there[start : start + size] = True
    behind = columns >= starts[-1]

    def side(rows, scaling):
        x = operand(rng, (rows, len(columns)), scaling)
        x.values[:, ~there] = 0
        x.values[:, behind] = np.nan
        if scaling == "block_1x128":
            x.scales[behind[::BLOCK]] = np.nan
        return x

    a, b = (side(rows, scaling) for rows, scaling in zip((M, N), scalings.split("-"), strict=True))
    wide_a, wide_b = wide(a), wide(b)
    want = np.stack([wide_a[:, lo:hi] @ wide_b[:, lo:hi].T for lo, hi in itertools.pairwise(starts)])
    got = multiply(a, b, offsets.astype(np.int32), run=run, length=length, **how)
    check(got, want, run, how.get("out_dtype", "float32"))
    assert not np.asarray(got)[np.asarray(sizes) == 0].any()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("scalings", ROWS)
def test_rows(run, scalings):
    for sizes, before, after in (
        ((17, 0, 60), 11, 19),
        ((16, 32, 16), 3, 40),
        ((0, 107, 0), 0, 0),
        ((0, 0, 0), 50, 57),
        ((1, 1, 1), 103, 1),
    ):
        check_rows(run, scalings, sizes, before, after, 139, 45)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("scalings", CONTRACTION)
def test_contraction(run, scalings):
    for sizes, before, after in (
        ((17, 0, 260), 11, 19),
        ((128, 129, 50), 0, 0),
        ((0, 307, 0), 0, 0),
        ((0, 0, 0), 150, 157),
        ((1, 1, 1), 303, 1),
    ):
        check_contraction(run, scalings, sizes, before, after, 37, 50)


@pytest.mark.parametrize("run", RUNS)
def test_every_pattern_of_empty_groups(run):
    for i, empty in enumerate(itertools.product([False, True], repeat=4)):
        sizes = [0 if e else 5 + 7 * g for g, e in enumerate(empty)]
        check_rows(run, BLOCKS, sizes, 2, 70 - sum(sizes), 130, 33, seed=i)
        check_contraction(run, OUTER, sizes, 2, 70 - sum(sizes), 19, 33, seed=i)


@pytest.mark.parametrize("run", RUNS)
def test_offsets_that_break_the_contract(run):
    """Below 0, past M, decreasing: any result of the right shape. On the GPU the sanitizer checks the accesses."""
    rng = np.random.default_rng(0)
    K = 130
    for N, out_dtype in ((33, "float32"), (40, "bfloat16"))[
        : 2 if run == "triton" else 1
    ]:  # the second goes through TMA
        rows = operand(rng, (72, K), "block_1x128"), operand(rng, (4, N, K), "block_128x128")
        columns = [operand(rng, (size, padded_rows(72, 4)), "block_1x128") for size in (19, N)]
        for bad in (
            [-5, 10, 20, 30, 40],
            [0, 10, 30, 50, 10_000],
            [0, 30, 10, 20, 72],
            [2**31 - 1, -(2**31), 0, 7, 9],
            [72, 0, 72, 0, 72],
        ):
            offsets = np.array(bad, np.int32)
            for way in tile_ways(run):
                how = {"run": run, "out_dtype": out_dtype, **way}
                assert jax.block_until_ready(multiply(*rows, offsets, **how)).shape == (72, N)
                assert jax.block_until_ready(multiply(*columns, offsets, length=72, **how)).shape == (4, 19, N)


@pytest.mark.parametrize("run", ["interpret"])
@pytest.mark.parametrize("reached", [6000, 20_000], ids=["a", "b"])
def test_rows_that_int32_does_not_reach(run, reached):
    """Of 75 x 128 numbers by 4 x 60 x 128: one side, or the other, gets more rows."""
    with window(reached):
        check_rows(run, BLOCKS, (9, 4, 0, 30), 3, 29, 128, 60)
