"""The Hopper kernels: compiled for an H200 without one, through the op's launchers, and run on one (marked gpu)."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

import jaxops
from jaxops._lib.gluon.launch_triton import row_windows
from jaxops._lib.planning.device import Device
from jaxops.ops.grouped_matmul import Plan, Problem, Tiles, candidates, grouped_matmul_sum
from jaxops.ops.grouped_matmul.gemm_triton import fwd_triton, wgrad_triton
from jaxops.ops.grouped_matmul.plan import HOPPER_TILES, PASSES
from tests.compare import assert_close
from tests.gluon import Kernel, check, compiled, launched
from tests.hopper import H200 as ABSTRACT
from tests.ops.grouped_matmul.cases import make_case, reference_all
from tests.split_sums import bounds

M, K, N, G = 1000, 528, 784, 3  # no whole tiles; the kernels do not depend on them
H200 = Device("NVIDIA H200", "gpu")
# Of each tile size, the deepest pipeline, which may store half of a tile's columns at a time, and the deepest with
# shared memory for a whole output tile.
TILES = {
    (tiles.bm, tiles.bn, tiles.ping_pong, tiles.stored): tiles
    for tiles in candidates("wgrad", Problem(256, 4096, 7168, 2048, "bfloat16"), H200, "triton")
}
NAMED = {"ids": lambda tiles: f"{tiles.bm}x{tiles.bn}-{tiles.stages}{'-ping-pong' if tiles.ping_pong else ''}"}


def shape(*sizes: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def kernel_of(name: str, tiles: Tiles, out: str = "bfloat16", bias: bool = False, accumulate: bool = False) -> Kernel:
    offsets, how = shape(G + 1, dtype="int32"), {"parts": None, "tiles": tiles, "cores": 132}
    if name == "wgrad":
        how |= {"shapes": ((G, K, N),), "out_dtype": jnp.dtype(out)}
        accumulator = shape(G, K, N, dtype=out) if accumulate else None
        (kernel,) = compiled(functools.partial(wgrad_triton, **how), shape(M, K), shape(M, N), accumulator, offsets)
        return kernel
    return fwd_kernel_of(shape(M, K), name == "dgrad", tiles, out, bias)


def fwd_kernel_of(lhs, transposed: bool, tiles: Tiles, out: str = "bfloat16", bias: bool = False) -> Kernel:
    """lhs: an array, or a pair whose products with a pair of weights are added."""
    rhs = (shape(G, *((N, K) if transposed else (K, N))),) * (2 if isinstance(lhs, tuple) else 1)
    how = {"out": shape(M, N, dtype=out), "parts": None, "tiles": tiles, "cores": 132, "transpose_rhs": transposed}
    operands = (lhs, rhs, shape(G, N) if bias else None, shape(G + 1, dtype="int32"))
    (kernel,) = compiled(functools.partial(fwd_triton, **how), *operands)
    return kernel


@pytest.mark.parametrize(
    ("rows", "shape", "strides"),
    [(300, (237, 64, 40), (40, 40, 1)), (64, (1, 64, 40), (2560, 40, 1)), (9, (1, 9, 40), (360, 40, 1))],
    ids=["more", "one", "less"],
)
def test_row_windows(rows, shape, strides):
    """One starts at every row from which a whole one fits; of fewer rows than one has, there is one that is cut off."""
    found = row_windows(jnp.zeros((rows, 40)), (64, 32), None)
    assert (found.shape, found.strides, found.block_shape) == (shape, strides, (1, 64, 32))


def test_every_tile_is_a_candidate():
    assert {(bm, bn, ping_pong) for bm, bn, ping_pong, _ in TILES} == set(HOPPER_TILES)
    assert sorted((tiles.bm, tiles.bn, tiles.ping_pong, tiles.stages, tiles.stored) for tiles in TILES.values()) == [
        (128, 128, False, 6, 128),
        (128, 128, True, 5, 128),
        (128, 128, True, 6, 64),
        (128, 256, False, 3, 256),
        (128, 256, False, 4, 128),
        (256, 128, False, 3, 128),
        (256, 128, False, 4, 64),
    ]


# Each tile in one pass at least, and test_variant's in all. The deepest ones' weight gradients are compiled with split
# sums, below.
COMPILED = [
    (TILES[size], name)
    for size, names in {
        (128, 256, False, 128): ("fwd",),
        (256, 128, False, 64): ("fwd",),
        (256, 128, False, 128): ("wgrad",),
        (128, 128, True, 64): ("dgrad",),
        (128, 128, True, 128): ("wgrad",),
        (128, 128, False, 128): ("fwd",),
    }.items()
    for name in names
]
# How sums are split depends on the size of a tile, not on its depth.
DEEPEST = {(tiles.bm, tiles.bn, tiles.ping_pong): tiles for tiles in sorted(TILES.values(), key=lambda t: t.stages)}


@pytest.mark.parametrize(("tiles", "name"), COMPILED, ids=lambda x: x if isinstance(x, str) else NAMED["ids"](x))
def test_kernel(tiles, name, tmp_path):
    """A consumer multiplies its rows, 64 at a time, by 64 of K in four instructions."""
    instructions = [f"m64n{tiles.bn}k16.f32.bf16.bf16"] * (2 * 4 * tiles.part // 64)
    kernel = kernel_of(name, tiles)
    check(kernel, instructions, 2, tiles.shared_bytes("bfloat16"), tmp_path)
    assert "cp.async.bulk.tensor.3d.global.shared" in kernel.ptx  # whole tiles leave by TMA,
    assert "st.global.v4" in kernel.ptx  # others 16 bytes a thread


@pytest.mark.parametrize(
    ("name", "out", "options"),
    [("fwd", "bfloat16", {"bias": True}), ("dgrad", "float32", {}), ("wgrad", "bfloat16", {"accumulate": True})],
    ids=str,
)
def test_variant(name, out, options, tmp_path):
    tiles = TILES[128, 256, False, 256]
    check(
        kernel_of(name, tiles, out, **options),
        ["m64n256k16.f32.bf16.bf16"] * 8,
        2,
        tiles.shared_bytes("bfloat16"),
        tmp_path,
    )


SPILLED = 32  # bytes that ptxas spills outside of the mainloop: addresses for parts of sums


@pytest.mark.parametrize("tiles", DEEPEST.values(), **NAMED)
def test_kernel_of_split_sums(tiles, tmp_path):
    """The same mainloop, in which nothing of the parts is loaded."""
    kernel = kernel_of("wgrad", dataclasses.replace(tiles, split=8))
    instructions = [f"m64n{tiles.bn}k16.f32.bf16.bf16"] * (2 * 4 * tiles.part // 64)
    check(kernel, instructions, 2, tiles.shared_bytes("bfloat16"), tmp_path, SPILLED)
    loops = re.split(r"\$L__BB\d+_\d+:", kernel.ptx)
    assert all("ld.global.cg" not in block for block in loops if "wgmma.mma_async" in block)


def test_short_sums_and_few_rows_are_not_split():
    """Without rows for two parts the kernel is that of whole sums."""
    tiles = TILES[256, 128, False, 128]
    how = {"parts": None, "cores": 132, "shapes": ((G, K, N),), "out_dtype": jnp.dtype("bfloat16")}
    few = shape(64, K), shape(64, N), None, shape(G + 1, dtype="int32")
    whole, split = (
        compiled(functools.partial(wgrad_triton, tiles=dataclasses.replace(tiles, split=n), **how), *few)[0].ptx
        for n in (1, 8)
    )
    assert whole == split


@pytest.mark.parametrize(
    ("size", "transposed"), [((128, 256, False, 128), True), ((128, 128, True, 64), False)], ids=["halves", "ping-pong"]
)
def test_kernel_of_two_products(size, transposed, tmp_path):
    """The same instructions in the same loop: the second product is further steps of a tile."""
    tiles = TILES[size]
    kernel = fwd_kernel_of((shape(M, K), shape(M, K)), transposed, tiles)
    check(
        kernel,
        [f"m64n{tiles.bn}k16.f32.bf16.bf16"] * (2 * 4 * tiles.part // 64),
        2,
        tiles.shared_bytes("bfloat16"),
        tmp_path,
    )


def test_a_users_call():
    """ "auto" takes these kernels on an H200, for all three passes."""

    def gradients(lhs, rhs, dout, offsets):
        out, vjp = jax.vjp(lambda lhs, rhs: jaxops.grouped_matmul(lhs, rhs, offsets), lhs, rhs)
        return out, *vjp(dout)

    names = launched(gradients, shape(M, K), shape(G, K, N), shape(M, N), shape(G + 1, dtype="int32"))
    assert names == [f"grouped_matmul_{name}" for name in PASSES]


@pytest.mark.parametrize("M", [256, 65536], ids=["whole", "split"])
def test_shard_map_checks_varying_axes(M):
    """check_vma=True: results vary over the axes of the operands, though jax-triton's primitive does not say so; also
    the parts of split sums."""
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,), abstract_device=ABSTRACT)

    def shard(lhs, rhs, offsets):
        return jax.grad(
            lambda *given: jnp.sum(jaxops.grouped_matmul(*given, offsets, backend="triton").astype(jnp.float32)),
            argnums=(0, 1),
        )(lhs, rhs)

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(P("d"), P(), P()), out_specs=(P("d"), P()))
    with jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(sharded)(shape(M, 64), shape(G, 64, 128), shape(G + 1, dtype="int32")))
    assert "psum" in text
    assert ("schedule_parts" in text) == (M > 256)
    assert all(f"name=grouped_matmul_{name}\n" in text for name in PASSES)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [640, 1500, 2050, 3200], ids=["63", "117", "162", "243"])
def test_waves_that_are_not_full(rows):
    """So many tiles for 132 programs: each is computed, of two groups and of the rows outside them."""
    case = make_case([rows // 3, rows - rows // 3 - 8], 264, 2056, dtype="bfloat16", after=8)
    plan = Plan("triton", fwd=Tiles(128, 256, 64, 8, 3, kernel="triton"))
    got = jax.jit(lambda lhs, rhs: jaxops.grouped_matmul(lhs, rhs, case.offsets, plan=plan))(case.lhs, case.rhs)
    want = reference_all((case.lhs, case.rhs, jnp.zeros_like(case.bias), case.dout, case.offsets))[0]
    assert_close(got, want, "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", TILES.values(), **NAMED)
@pytest.mark.parametrize("sizes", [[300, 0, 1, 723, 0, 512], [0, 4096, 0, 0, 64, 128]], ids=["ragged", "one"])
@pytest.mark.parametrize(("bias", "dynamic"), [(False, True), (True, False)], ids=["dynamic", "bias"])
def test_values(tiles, sizes, bias, dynamic):
    """Two or more tiles a program, stages used repeatedly; NaN outside the groups and in a row of the last group."""
    case = make_case(sizes, 712, 1032, dtype="bfloat16", before=7, after=5)
    tiles = dataclasses.replace(tiles, dynamic=dynamic)
    given = (case.lhs, case.rhs, case.bias if bias else jnp.zeros_like(case.bias))

    @jax.jit
    def ours(lhs, rhs, bias, dout):
        out, vjp = jax.vjp(
            lambda *args: jaxops.grouped_matmul(
                *args[:2], case.offsets, bias=args[2], plan=Plan("triton", tiles, tiles, tiles)
            ),
            lhs,
            rhs,
            bias,
        )
        return out, *vjp(dout)

    got = ours(*given, case.dout)
    for name, g, w in zip(
        ("out", "dlhs", "drhs", "dbias"), got, reference_all((*given, case.dout, case.offsets)), strict=True
    ):
        assert_close(g, w, "bfloat16", name)
    again = ours(*given, case.dout)
    assert [np.asarray(x).tobytes() for x in got] == [np.asarray(x).tobytes() for x in again]

    broken = case.lhs.at[int(case.offsets[-1]) - 1].set(jnp.nan)
    *_, drhs, _ = ours(broken, *given[1:], case.dout)
    assert np.isnan(np.asarray(drhs[-1])).all()
    np.testing.assert_array_equal(np.asarray(drhs[:-1]), np.asarray(got[2][:-1]))


SPLIT_SIZES = {
    "huge": [1] * 9 + [3_000] + [1] * 8,
    "two": [0, 1_700, 65, 0, 1_300, 0],
    "half": [700, 0, 130, 128, 127, 3],
    "whole": [100] * 12,
}


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", TILES.values(), **NAMED)
@pytest.mark.parametrize("sizes", SPLIT_SIZES.values(), ids=SPLIT_SIZES)
def test_split_sums(tiles, sizes):
    """Twenty launches have the same bits, whichever program is the last one; and the values of whole sums."""
    case = make_case(sizes, 712, 1032, dtype="bfloat16", before=7, after=5)
    want = reference_all((case.lhs, case.rhs, jnp.zeros_like(case.bias), case.dout, case.offsets))[2]

    @functools.partial(jax.jit, static_argnums=0)
    def wgrad(split, lhs, dout, sums=None):
        plan = Plan("triton", wgrad=dataclasses.replace(tiles, split=split, dynamic=True))
        return jaxops.grouped_wgrad(lhs, dout, case.offsets, plan=plan, accumulate_into=sums)

    got, whole = wgrad(7, case.lhs, case.dout), wgrad(1, case.lhs, case.dout)
    for g in range(len(sizes)):  # each has errors as large as its own sums
        assert_close(got[g], want[g], "bfloat16", name=f"group {g}")
        assert_close(got[g], whole[g], "bfloat16", name=f"group {g}, whole sums", roundings=2)
    for _ in range(20):
        assert np.asarray(wgrad(7, case.lhs, case.dout)).tobytes() == np.asarray(got).tobytes()
    for g, size in enumerate(sizes):
        if size == 0:
            assert not np.asarray(got[g]).any()

    sums = jax.random.normal(jax.random.key(3), got.shape, jnp.float32)
    added = wgrad(7, case.lhs, case.dout, sums)
    assert_close(added - sums, want, "bfloat16", scale=2)
    empty = np.flatnonzero(np.array(sizes) == 0)
    np.testing.assert_array_equal(np.asarray(added)[empty], np.asarray(sums)[empty])
    assert np.asarray(wgrad(7, case.lhs, case.dout, sums)).tobytes() == np.asarray(added).tobytes()

    last = int(np.flatnonzero(sizes)[-1])
    broken = case.lhs.at[int(case.offsets[last + 1]) - 1].set(jnp.nan)
    found = np.asarray(wgrad(7, broken, case.dout), np.float32)
    assert np.isnan(found[last]).all()
    np.testing.assert_array_equal(np.delete(found, last, 0), np.delete(np.asarray(got, np.float32), last, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", [[0, 4_000] * 3, [-5, 300_000, 2, 5_000, 0, 900]], ids=["every", "beyond"])
def test_split_sums_of_wild_offsets(offsets):
    """Wrong rows at most, in memory that is the operands'."""
    lhs, dout = (jax.random.normal(jax.random.key(i), (4_000, n), jnp.bfloat16) for i, n in enumerate((712, 1032)))
    plan = Plan("triton", wgrad=Tiles(128, 256, 64, 8, 3, kernel="triton", dynamic=True, split=9))
    got = jax.jit(lambda *given: jaxops.grouped_wgrad(*given, plan=plan))(lhs, dout, jnp.array(offsets, jnp.int32))
    for g, (lo, hi) in enumerate(bounds(np.array(offsets), 4_000)):
        assert_close(got[g], lhs[lo:hi].astype(jnp.float32).T @ dout[lo:hi].astype(jnp.float32), "bfloat16", scale=2)


@pytest.mark.gpu
def test_products_that_share_a_work_list():
    """Programs of a dynamic tile scheduler count in it. XLA merges equal arrays; each product must start from zeros."""
    case = make_case([300, 0, 1, 723], 200, 328, dtype="bfloat16", before=7, after=5)
    tiles = Tiles(128, 256, 64, 8, 3, kernel="triton", dynamic=True)
    plan = Plan("triton", tiles, tiles, dataclasses.replace(tiles, split=5))

    @jax.jit
    def both(lhs, rhs, dout):
        products = [jaxops.grouped_matmul(lhs, w, case.offsets, plan=plan) for w in (rhs, 2 * rhs)]
        return *products, *(jaxops.grouped_wgrad(lhs, d, case.offsets, plan=plan) for d in (dout, 2 * dout))

    once, twice, gradient, twice_gradient = both(case.lhs, case.rhs, case.dout)
    np.testing.assert_array_equal(np.asarray(twice), 2 * np.asarray(once))
    np.testing.assert_array_equal(np.asarray(twice_gradient), 2 * np.asarray(gradient))
    assert_close(
        once, reference_all((case.lhs, case.rhs, jnp.zeros_like(case.bias), case.dout, case.offsets))[0], "bfloat16"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", TILES.values(), **NAMED)
@pytest.mark.parametrize("transposed", [True, False], ids=["transposed", "rhs"])
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_two_products(tiles, transposed, dynamic):
    """With every tile, the same bits twice: the sum of products of pairs in either order, NaN outside the groups."""
    case, other = (
        make_case([300, 0, 1, 723, 0, 512], 712, 1032, dtype="bfloat16", before=7, after=5, seed=seed)
        for seed in (0, 1)
    )
    plan = Plan("triton", fwd=dataclasses.replace(tiles, dynamic=dynamic), device=H200)

    @jax.jit
    def both(a, b, c, d):
        rhs = tuple(jnp.swapaxes(w, 1, 2) if transposed else w for w in (c, d))
        return grouped_matmul_sum((a, b), rhs, case.offsets, plan=plan, transpose_rhs=transposed, out_dtype=jnp.float32)

    operands = (case.lhs, other.lhs, case.rhs, other.rhs)
    got, again = both(*operands), both(*operands)
    zeros = jnp.zeros_like(case.bias)
    want = sum(reference_all((c.lhs, c.rhs, zeros, case.dout, case.offsets))[0] for c in (case, other))
    assert_close(got, want, "float32", scale=10)  # products of 712 in the tensor core's order
    assert np.asarray(got).tobytes() == np.asarray(again).tobytes()


@pytest.mark.gpu
def test_vmap_of_two_products():
    case, other = (make_case([100, 200, 300], 72, 136, dtype="bfloat16", seed=seed) for seed in (0, 1))
    plan = Plan("triton", fwd=TILES[128, 256, False, 256], device=H200)
    stacked = [jnp.stack([a, b]) for a, b in ((case.lhs, other.lhs), (case.rhs, other.rhs))]
    got = jax.jit(jax.vmap(lambda a, w: grouped_matmul_sum((a, a), (w, w), case.offsets, plan=plan)))(*stacked)
    for out, c in zip(got, (case, other), strict=True):
        assert_close(out, 2 * reference_all((c.lhs, c.rhs, jnp.zeros_like(c.bias), c.dout, c.offsets))[0], "bfloat16")


@pytest.mark.gpu
def test_a_matrix_that_is_nan():
    """One group's; the others', before and behind it in memory, are multiplied by zeros past K at the most."""
    case = make_case([100, 200, 300], 72, 136, dtype="bfloat16")
    rhs = case.rhs.at[1].set(jnp.nan)
    for transposed in (False, True):
        out = jaxops.grouped_matmul(
            case.lhs,
            jnp.swapaxes(rhs, 1, 2) if transposed else rhs,
            case.offsets,
            transpose_rhs=transposed,
            backend="triton",
        )
        assert np.isnan(np.asarray(out[100:300])).all()
        assert np.isfinite(np.asarray(out[:100], np.float32)).all()
        assert np.isfinite(np.asarray(out[300:], np.float32)).all()


@pytest.mark.gpu
def test_stacked_layers():
    """In a scan, weights, results and weight gradients are slices of stacks, aligned to 256 bytes: XLA can use them
    in place."""
    cases = [make_case([100, 0, 412], 128, 256, dtype="bfloat16", seed=seed) for seed in range(3)]
    lhs, dout, offsets = cases[0].lhs, cases[0].dout, cases[0].offsets
    weights = jnp.stack([case.rhs for case in cases])

    def layer(w):
        out, vjp = jax.vjp(lambda a, w: jaxops.grouped_matmul(a, w, offsets, backend="triton"), lhs, w)
        return out, *vjp(dout)

    one_by_one = jax.jit(layer)
    for i, found in enumerate(zip(*jax.jit(lambda weights: jax.lax.map(layer, weights))(weights), strict=True)):
        for got, want in zip(found, one_by_one(weights[i]), strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    for i, w in enumerate(weights):
        assert_close(
            one_by_one(w)[0],
            reference_all((lhs, w, jnp.zeros_like(cases[0].bias), dout, offsets))[0],
            "bfloat16",
            str(i),
        )
