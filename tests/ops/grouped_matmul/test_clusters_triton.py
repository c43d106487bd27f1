"""Tiles of clusters of two programs: compiled for Hopper without one, and run on one (marked gpu)."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

import jaxops
from jaxops._lib.planning.device import Device
from jaxops.ops.grouped_matmul import Plan, Problem, Tiles, candidates, grouped_matmul_sum, make_plan
from jaxops.ops.grouped_matmul.plan import CLUSTER_TILE
from tests.compare import assert_close
from tests.gluon import check
from tests.ops.grouped_matmul.cases import make_case, reference_all
from tests.ops.grouped_matmul.test_triton import K, M, fwd_kernel_of, kernel_of, shape

H100 = Device("NVIDIA H100 80GB HBM3", "gpu")
ALONE = Tiles(128, 256, 64, 8, 3, kernel="triton")
# Stored whole, and in halves.
CLUSTERS = [Tiles(256, 256, 64, 8, stages, kernel="triton", dynamic=stages == 4) for stages in (3, 4)]
NAMED = {"ids": lambda tiles: f"{tiles.stages} stages"}


@pytest.mark.parametrize(
    ("name", "stages", "options"),
    [("fwd", 3, {"bias": True}), ("dgrad", 4, {}), ("fwd", 4, {"out": "float32"}), ("wgrad", 3, {"accumulate": True})],
    ids=str,
)
def test_kernel(name, stages, options, tmp_path):
    """Each program has the instructions, registers and shared memory of 128x256. The second operand is loaded for
    both."""
    tiles = CLUSTERS[stages - 3]
    kernel = kernel_of(name, tiles, **options)
    check(kernel, ["m64n256k16.f32.bf16.bf16"] * 8, 2, tiles.shared_bytes("bfloat16"), tmp_path, programs=2)
    alone = re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared::cta\S+", kernel.ptx)
    multicast = re.findall(r"cp\.async\.bulk\.tensor\.3d\.shared::cluster\S+multicast", kernel.ptx)
    assert (len(alone), len(multicast)) == (2, 1 if name == "dgrad" else 4)


@pytest.mark.parametrize(("tiles", "spilled"), [(CLUSTERS[0], 36), (CLUSTERS[1], 48)], ids=["3 stages", "4 stages"])
def test_kernel_of_split_sums(tiles, spilled, tmp_path):
    """As test_triton's, with more bytes spilled: the number that the programs share takes registers, too."""
    kernel = kernel_of("wgrad", dataclasses.replace(tiles, split=8))
    check(kernel, ["m64n256k16.f32.bf16.bf16"] * 8, 2, tiles.shared_bytes("bfloat16"), tmp_path, spilled, programs=2)


def test_kernel_of_two_products(tmp_path):
    kernel = fwd_kernel_of((shape(M, K), shape(M, K)), False, CLUSTERS[0])
    check(kernel, ["m64n256k16.f32.bf16.bf16"] * 8, 2, CLUSTERS[0].shared_bytes("bfloat16"), tmp_path, programs=2)


def test_where_clusters_are_chosen():
    """Where rows are no whole cache lines and there are enough tiles; not where collectives hold some of the
    multiprocessors, so that a cluster could start late."""
    crossing, whole = (Problem(5, 30_000, k, n, "bfloat16") for k, n in ((3_976, 4_104), (4_032, 4_160)))

    def chosen(problem, device=H100):
        plan = make_plan(problem, device, backend="triton")
        return [name for name in ("fwd", "dgrad", "wgrad") if getattr(plan, name).programs > 1]

    assert chosen(crossing) == ["fwd", "dgrad", "wgrad"]
    assert chosen(crossing, Device("NVIDIA H200", "gpu")) == ["fwd", "dgrad", "wgrad"]
    assert chosen(whole) == chosen(dataclasses.replace(crossing, M=300)) == []
    assert chosen(crossing, dataclasses.replace(H100, shared=True)) == []
    for name in ("fwd", "dgrad", "wgrad"):
        found = [tiles for tiles in candidates(name, crossing, H100, "triton") if tiles.programs > 1]
        assert {(t.bm, t.bn, t.ping_pong) for t in found} == {CLUSTER_TILE}
        assert {t.dynamic for t in found} == {False, True}


def test_clusters_are_cooperative():
    with pytest.raises(ValueError, match="256x256"):
        dataclasses.replace(CLUSTERS[0], ping_pong=True)


SIZES = {
    "ragged": [300, 0, 1, 723, 0, 512],
    "one": [0, 4096, 0, 0, 64, 128],
    "short": [65, 129, 64, 193, 257, 0, 1, 255],
    "first rows": [3, 1, 0, 40, 9, 300],
}


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", CLUSTERS, **NAMED)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("widths", [(712, 1032), (4_104, 264), (8, 2_056), (1_024, 512)], ids=str)
def test_values(tiles, sizes, widths):
    """The bits of the kernel without clusters, with a bias; NaN outside the groups."""
    case = make_case(sizes, *widths, dtype="bfloat16", before=7, after=5)
    given = (case.lhs, case.rhs, case.bias)

    def ours(tiles):
        plan = Plan("triton", fwd=tiles, dgrad=tiles, wgrad=tiles)

        @jax.jit
        def run(lhs, rhs, bias, dout):
            out, vjp = jax.vjp(
                lambda lhs, rhs: jaxops.grouped_matmul(lhs, rhs, case.offsets, bias=bias, plan=plan), lhs, rhs
            )
            return out, *vjp(dout)

        return run(*given, case.dout)

    got, want = ours(tiles), ours(ALONE)
    reference = reference_all((*given, case.dout, case.offsets))[:3]
    for g, w, r in zip(got, want, reference, strict=True):
        assert_close(g, r, "bfloat16")
        assert np.asarray(g).tobytes() == np.asarray(w).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [True, False], ids=["transposed", "rhs"])
def test_two_products(transposed):
    case, other = (make_case(SIZES["ragged"], 712, 1032, dtype="bfloat16", before=7, after=5, seed=i) for i in (0, 1))
    rhs = tuple(jnp.swapaxes(c.rhs, 1, 2) if transposed else c.rhs for c in (case, other))

    def ours(tiles):
        how = {"plan": Plan("triton", fwd=tiles, device=H100), "transpose_rhs": transposed, "out_dtype": jnp.float32}
        return jax.jit(lambda: grouped_matmul_sum((case.lhs, other.lhs), rhs, case.offsets, **how))()

    got, want = ours(CLUSTERS[0]), ours(ALONE)
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


@pytest.mark.gpu
def test_modalities():
    """Widths that differ, in one launch."""
    rng = np.random.default_rng(0)
    lhs, *rhs = (
        jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((1_300, 712), (3, 712, 1_032), (2, 520, 600))
    )
    offsets = jnp.array([7, 300, 300, 800, 1_100, 1_295], jnp.int32)

    def ours(tiles):
        plan = Plan("triton", fwd=tiles, dgrad=tiles, wgrad=tiles)

        @jax.jit
        def run():
            out, vjp = jax.vjp(
                lambda *given: jaxops.modality_grouped_matmul(*given, offsets, plan=plan), lhs, tuple(rhs)
            )
            return out, vjp(out)

        return run()

    got, want = ours(CLUSTERS[0]), ours(ALONE)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(g).tobytes() == np.asarray(w).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", [[0, 4_000] * 3, [-5, 300_000, 2, 5_000, 0, 900]], ids=["every", "beyond"])
def test_wild_offsets(offsets):
    """All rows are in a group, some in several. All groups have the same weights: the order of stores has no effect."""
    lhs, w = (
        jax.random.normal(jax.random.key(i), size, jnp.bfloat16) for i, size in enumerate(((4_000, 712), (712, 520)))
    )
    rhs, plan = jnp.broadcast_to(w, (5, *w.shape)), Plan("triton", fwd=CLUSTERS[0])
    got = jax.jit(lambda: jaxops.grouped_matmul(lhs, rhs, jnp.array(offsets, jnp.int32), plan=plan))()
    assert_close(got, lhs.astype(jnp.float32) @ w.astype(jnp.float32), "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [False, True], ids=["new", "accumulate"])
@pytest.mark.parametrize("sizes", [[9_000], [3, 0, 8_000, 61, 900]], ids=str)
def test_split_sums(sizes, accumulate):
    """The bits of the kernel without clusters, and the reference's values."""
    case = make_case(sizes, 712, 1032, dtype="bfloat16", before=7, after=5)
    total = jax.random.normal(jax.random.key(2), case.rhs.shape, jnp.float32) if accumulate else None

    def ours(tiles):
        plan = Plan("triton", wgrad=dataclasses.replace(tiles, split=6))
        how = {"accumulate_into": total, "plan": plan}
        return jax.jit(lambda: jaxops.grouped_wgrad(case.lhs, case.dout, case.offsets, **how))()

    got, want = ours(CLUSTERS[0]), ours(ALONE)
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
    if total is None:
        assert_close(got, reference_all((case.lhs, case.rhs, case.bias, case.dout, case.offsets))[2], "bfloat16")
