"""The Hopper kernels: compiled for an H200 without one, and run on one (marked gpu)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

import jaxops
from jaxops.ops.grouped_matmul import Plan, Tiles
from jaxops.ops.grouped_matmul.modalities import parts_of
from jaxops.ops.modality_grouped_matmul.gemm_triton import wgrad_triton
from tests.arrays import shape
from tests.contracts.run import compare
from tests.gluon import Kernel, check, compiled
from tests.ops.modality_grouped_matmul.cases import HOPPER, arguments_of

pytestmark = pytest.mark.versions

M = 1000  # the kernels do not depend on sizes
SHAPES = ((2, 528, 784), (3, 136, 272), (1, 264, 128), (2, 400, 400))
TILES = {
    (bm, bn, ping_pong): Tiles(bm, bn, 64, 8, stages, kernel="triton", ping_pong=ping_pong)
    for bm, bn, ping_pong, stages in ((128, 256, False, 4), (256, 128, False, 3), (128, 128, True, 6))
}


def forward(plan: Plan | None, shapes, transpose_rhs: bool = False, **options) -> tuple:
    """A function and its operands; transposed it is a dgrad."""
    how = {"plan": plan, "transpose_rhs": transpose_rhs, **options}
    K, groups = max(s[1] for s in shapes), sum(s[0] for s in shapes)
    rhs = tuple(shape(G, n, k) if transpose_rhs else shape(G, k, n) for G, k, n in shapes)
    call = lambda *arrays: jaxops.modality_grouped_matmul(*arrays, **how)
    return call, shape(M, K), rhs, shape(groups + 1, dtype="int32")


def kernel_of(plan: Plan, shapes, transpose_rhs: bool = False) -> Kernel:
    (kernel,) = compiled(*forward(plan, shapes, transpose_rhs))
    return kernel


def wgrad_kernel_of(tiles: Tiles, shapes) -> Kernel:
    K, N, groups = max(s[1] for s in shapes), max(s[2] for s in shapes), sum(s[0] for s in shapes)
    how = {"parts": tuple(parts_of(shapes)), "shapes": shapes, "tiles": tiles, "out_dtype": jnp.dtype("bfloat16")}
    (kernel,) = compiled(
        lambda *arrays: wgrad_triton(*arrays, **how, cores=132),
        shape(M, K),
        shape(M, N),
        None,
        shape(groups + 1, dtype="int32"),
    )
    return kernel


def check_kernel(kernel: Kernel, tiles: Tiles, folder, parts: int) -> None:
    """The mainloop of grouped_matmul; shared memory also has the tile descriptor of each part."""
    instructions = [f"m64n{tiles.bn}k16.f32.bf16.bf16"] * (2 * 4 * tiles.part // 64)
    check(kernel, instructions, 2, tiles.shared_bytes("bfloat16") + 28 * parts, folder)
    assert "st.global.v4" in kernel.ptx  # parts of tiles leave 16 bytes a thread


@pytest.mark.parametrize("name", ["fwd", "wgrad"])
def test_as_many_modalities_as_a_launch_has(name, tmp_path):
    tiles = TILES[(128, 256, False) if name == "fwd" else (256, 128, False)]
    kernel = kernel_of(Plan("triton", tiles), SHAPES) if name == "fwd" else wgrad_kernel_of(tiles, SHAPES)
    check_kernel(kernel, tiles, tmp_path, 4)
    assert "cp.async.bulk.tensor.3d.global.shared" in kernel.ptx  # whole tiles leave by TMA


@pytest.mark.parametrize(
    ("size", "transposed"), [((128, 128, True), False), ((256, 128, False), True)], ids=["ping-pong", "halves"]
)
def test_other_tiles(size, transposed, tmp_path):
    tiles = TILES[size]
    kernel = kernel_of(Plan("triton", tiles), SHAPES[:2], transposed)
    check_kernel(kernel, tiles, tmp_path, 2)


@pytest.mark.gpu
def test_float32_results_and_five_modalities():
    """float32 leaves from registers; the fifth modality is another launch's."""
    shapes = (*HOPPER, (2, 136, 24), (1, 328, 712))
    given = arguments_of([90, 0, 300, 41, 7, 0, 130, 64, 33], shapes, dtype="bfloat16", before=3, after=9)
    each = TILES[128, 256, False]
    plan = Plan("triton", each, each, each)
    compare("modality_grouped_matmul", "xla", given, "bfloat16", plan=plan, precision=None)
    call = jax.jit(functools.partial(jaxops.modality_grouped_matmul, plan=plan), static_argnames="out_dtype")
    wide, out = (call(**given, out_dtype=dtype) for dtype in ("float32", "bfloat16"))
    np.testing.assert_array_equal(np.asarray(wide.astype(jnp.bfloat16)), np.asarray(out))
