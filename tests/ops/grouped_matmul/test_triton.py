"""The Hopper kernels: compiled for an H200 without one, and on a Hopper GPU (marked gpu) what tests/ops/test_hopper.py
does not run: full waves of tiles, repeated launches, wild offsets, XLA's use of buffers."""

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
from jaxops._lib.planning.device import Device
from jaxops.ops.grouped_matmul import Plan, Problem, Tiles, candidates, grouped_matmul_sum
from jaxops.ops.grouped_matmul.plan import HOPPER_TILES, PASSES
from tests.arrays import shape
from tests.compare import assert_close
from tests.gluon import Kernel, check, compiled, launched
from tests.hopper import H200 as ABSTRACT
from tests.ops.grouped_matmul.cases import make_case, reference_all

pytestmark = pytest.mark.versions

M, K, N, G = 1000, 528, 784, 3  # no whole tiles; the kernels do not depend on them
H200 = Device("NVIDIA H200", "gpu")
# Of each tile size, the deepest pipeline, which may store half of a tile's columns at a time, and the deepest with
# shared memory for a whole output tile.
TILES = {
    (tiles.bm, tiles.bn, tiles.stored): tiles
    for bm, bn, ping_pong in HOPPER_TILES
    for stages in (3, 4, 5, 6)
    if (tiles := Tiles(bm, bn, 64, 8, stages, kernel="triton", ping_pong=ping_pong)).shared_bytes("bfloat16") <= 232_448
}
NAMED = {"ids": lambda tiles: f"{tiles.bm}x{tiles.bn}-{tiles.stages}{'-ping-pong' if tiles.ping_pong else ''}"}


OFFSETS = shape(G + 1, dtype="int32")


def kernel_of(name: str, tiles: Tiles, out: str = "bfloat16", rows: int = M) -> Kernel:
    """name: a pass; with a bias, added to what the result holds, or of the sum of two products."""
    lhs, dout, weights = shape(rows, K), shape(rows, N), shape(G, K, N)
    how = {"plan": Plan("triton", fwd=tiles), "out_dtype": out}
    if name.startswith("wgrad"):
        how["plan"] = Plan("triton", wgrad=tiles)
        call = lambda lhs, dout, offsets, *sums: jaxops.grouped_wgrad(
            lhs, dout, offsets, **how, accumulate_into=sums[0] if sums else None
        )
        (kernel,) = compiled(call, lhs, dout, OFFSETS, *([shape(G, K, N, dtype=out)] if "added" in name else []))
    elif "sum" in name:
        how |= {"transpose_rhs": "dgrad" in name, "plan": dataclasses.replace(how["plan"], device=H200)}
        weights = shape(G, N, K) if "dgrad" in name else weights
        call = lambda a, b, offsets: grouped_matmul_sum((a, a), (b, b), offsets, **how)
        (kernel,) = compiled(call, lhs, weights, OFFSETS)
    elif name == "dgrad":
        call = functools.partial(jaxops.grouped_matmul, **how, transpose_rhs=True)
        (kernel,) = compiled(call, lhs, shape(G, N, K), OFFSETS)
    else:
        call = lambda lhs, rhs, offsets, *bias: jaxops.grouped_matmul(
            lhs, rhs, offsets, **how, bias=bias[0] if bias else None
        )
        (kernel,) = compiled(call, lhs, weights, OFFSETS, *([shape(G, N)] if "bias" in name else []))
    return kernel


def split(tiles: Tiles) -> Tiles:
    return dataclasses.replace(tiles, split=8)


# Each tile and each epilogue. What ptxas spills outside of the mainloop are addresses for parts of sums: in clusters
# more, since the number that the programs share takes registers, too.
KERNELS = [
    (TILES[256, 128, 64], "fwd", 0),
    (TILES[128, 256, 256], "fwd bias", 0),
    (TILES[128, 256, 256], "dgrad float32", 0),
    (TILES[128, 128, 64], "dgrad", 0),
    (TILES[128, 256, 256], "wgrad added", 0),
    (TILES[128, 256, 128], "dgrad sum", 0),
    (split(TILES[128, 256, 128]), "wgrad", 32),
    (split(TILES[256, 128, 64]), "wgrad", 32),
    (split(TILES[128, 128, 64]), "wgrad", 32),
    (TILES[256, 256, 256], "fwd bias", 0),
    (TILES[256, 256, 128], "dgrad", 0),
    (TILES[256, 256, 256], "wgrad added", 0),
    (TILES[128, 256, 128], "wgrad added float32", 0),
    (TILES[128, 128, 64], "wgrad added float32", 0),
    (TILES[256, 256, 128], "wgrad added float32", 0),
    (split(TILES[256, 256, 128]), "wgrad", 44),
]


@pytest.mark.parametrize(("tiles", "name", "spilled"), KERNELS, ids=lambda x: getattr(x, "bm", x))
def test_kernel(tiles, name, spilled, tmp_path):
    """A consumer multiplies its rows, 64 at a time, by 64 of K in four instructions. The mainloop loads no parts."""
    out = "float32" if "float32" in name else "bfloat16"
    kernel = kernel_of(name.removesuffix(" float32"), tiles, out)
    instructions = [f"m64n{tiles.bn}k16.f32.bf16.bf16"] * (2 * 4 * tiles.part // tiles.programs // 64)
    shared = tiles.shared_bytes("bfloat16")
    check(kernel, instructions, 2, shared, tmp_path, spilled, programs=tiles.programs)
    if out == "bfloat16":
        assert "cp.async.bulk.tensor.3d.global.shared" in kernel.ptx  # whole tiles leave by TMA,
        assert "st.global.v4" in kernel.ptx  # others 16 bytes a thread
    if "added float32" in name:  # L2 adds: whole tiles by TMA, others two numbers of a thread at a time
        assert "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add" in kernel.ptx
        assert "red.global.gpu.relaxed.add.v2.f32" in kernel.ptx
        assert "ld.global.v2" not in kernel.ptx
    if tiles.programs > 1:  # the second operand is loaded for both
        assert re.findall(r"cp\.async\.bulk\.tensor\.3d\.shared::cluster\S+multicast", kernel.ptx)
    loops = re.split(r"\$L__BB\d+_\d+:", kernel.ptx)
    assert all("ld.global.cg" not in block for block in loops if "wgmma.mma_async" in block)


def test_short_sums_and_few_rows_are_not_split():
    """Without rows for two parts the kernel is that of whole sums."""
    tiles = TILES[256, 128, 128]
    assert kernel_of("wgrad", tiles, rows=64).ptx == kernel_of("wgrad", split(tiles), rows=64).ptx


def test_every_tile_is_a_candidate():
    """Each size in some panels."""
    found = candidates("wgrad", Problem(256, 4096, 7168, 2048, "bfloat16"), H200, "triton")
    assert {(tiles.bm, tiles.bn, tiles.ping_pong) for tiles in found} == set(HOPPER_TILES)
    assert len(found) <= 15


def test_a_users_call():
    """ "auto" takes these kernels on an H200, for all three passes."""

    def gradients(lhs, rhs, dout, offsets):
        out, vjp = jax.vjp(lambda lhs, rhs: jaxops.grouped_matmul(lhs, rhs, offsets), lhs, rhs)
        return out, *vjp(dout)

    names = launched(gradients, shape(M, K), shape(G, K, N), shape(M, N), shape(G + 1, dtype="int32"))
    assert names == [f"grouped_matmul_{name}" for name in PASSES]


def test_shard_map_checks_varying_axes_of_split_sums():
    """check_vma=True: whole sums in tests/contracts/test_transforms.py."""
    M = 65536
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
    assert "schedule_parts" in text
    assert all(f"name=grouped_matmul_{name}\n" in text for name in PASSES)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [640, 1500, 2050, 3200], ids=["63", "117", "162", "243"])
def test_waves_that_are_not_full(rows):
    """So many tiles for 132 programs: each is computed, of two groups and of the rows outside them."""
    case = make_case([rows // 3, rows - rows // 3 - 8], 264, 2056, dtype="bfloat16", after=8)
    plan = Plan("triton", fwd=Tiles(128, 256, 64, 8, 3, kernel="triton"))
    got = jax.jit(lambda lhs, rhs: jaxops.grouped_matmul(lhs, rhs, case.offsets, plan=plan))(case.lhs, case.rhs)
    want = reference_all((case.lhs, case.rhs, case.dout, case.offsets))[0]
    assert_close(got, want, "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", TILES.values(), **NAMED)
@pytest.mark.parametrize("sizes", [[1] * 9 + [3_000] + [1] * 8, [0, 1_700, 65, 0, 1_300, 0]], ids=["huge", "two"])
def test_split_sums(tiles, sizes):
    """Twenty launches have the same bits, whichever program is the last one. A row that is NaN stays in its group."""
    case = make_case(sizes, 712, 1032, dtype="bfloat16", before=7, after=5)
    want = reference_all((case.lhs, case.rhs, case.dout, case.offsets))[2]
    plan = Plan("triton", wgrad=dataclasses.replace(tiles, split=7))
    sums = jax.random.normal(jax.random.key(3), want.shape, jnp.float32)

    @jax.jit
    def wgrad(lhs, dout):
        return [jaxops.grouped_wgrad(lhs, dout, case.offsets, plan=plan, accumulate_into=into) for into in (None, sums)]

    first = got, added = wgrad(case.lhs, case.dout)
    for g in range(len(sizes)):  # each has errors as large as its own sums
        assert_close(got[g], want[g], "bfloat16", name=f"group {g}")
    assert_close(added - sums, want, "bfloat16", scale=2)
    for _ in range(20):
        for x, again in zip(first, wgrad(case.lhs, case.dout), strict=True):
            assert np.asarray(again).tobytes() == np.asarray(x).tobytes()
    last = int(np.flatnonzero(sizes)[-1])
    found = np.asarray(wgrad(case.lhs.at[int(case.offsets[last + 1]) - 1].set(jnp.nan), case.dout)[0], np.float32)
    assert np.isnan(found[last]).all()
    np.testing.assert_array_equal(np.delete(found, last, 0), np.delete(np.asarray(got, np.float32), last, 0))


@pytest.mark.gpu
def test_products_that_share_a_work_list():
    """Programs count in it. XLA merges equal arrays; each product must start from zeros."""
    case = make_case([300, 0, 1, 723], 200, 328, dtype="bfloat16", before=7, after=5)
    tiles = Tiles(128, 256, 64, 8, 3, kernel="triton")
    plan = Plan("triton", tiles, tiles, dataclasses.replace(tiles, split=5))

    @jax.jit
    def both(lhs, rhs, dout):
        products = [jaxops.grouped_matmul(lhs, w, case.offsets, plan=plan) for w in (rhs, 2 * rhs)]
        return *products, *(jaxops.grouped_wgrad(lhs, d, case.offsets, plan=plan) for d in (dout, 2 * dout))

    once, twice, gradient, twice_gradient = both(case.lhs, case.rhs, case.dout)
    np.testing.assert_array_equal(np.asarray(twice), 2 * np.asarray(once))
    np.testing.assert_array_equal(np.asarray(twice_gradient), 2 * np.asarray(gradient))
    assert_close(once, reference_all((case.lhs, case.rhs, case.dout, case.offsets))[0], "bfloat16")


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
        assert_close(one_by_one(w)[0], reference_all((lhs, w, dout, offsets))[0], "bfloat16", str(i))
