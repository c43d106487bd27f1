"""The Hopper kernels: compiled for an H200 without one, their tile order run in Python, and run on one (marked gpu)."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

import jaxops
from jaxops._lib.gluon import tile_scheduler_triton
from jaxops.ops.grouped_matmul import Plan, Tiles
from jaxops.ops.grouped_matmul.gemm_triton import wgrad_triton
from jaxops.ops.grouped_matmul.modalities import parts_of
from tests.gluon import Kernel, check, compiled, launched
from tests.ops.modality_grouped_matmul.cases import HOPPER, make_case, plan_of, run_all
from tests.ops.modality_grouped_matmul.cases import check as check_values

M = 1000  # the kernels do not depend on sizes
SHAPES = ((2, 528, 784), (3, 136, 272), (1, 264, 128), (2, 400, 400))
TILES = {
    (bm, bn, ping_pong): Tiles(bm, bn, 64, 8, stages, kernel="triton", ping_pong=ping_pong, dynamic=ping_pong)
    for bm, bn, ping_pong, stages in (
        (128, 256, False, 4),
        (256, 128, False, 3),
        (128, 128, True, 6),
        (128, 128, False, 5),
    )
}


def shape(*sizes: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


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
    assert kernel.name == "grouped_gemm_kernel"
    check(kernel, instructions, 2, tiles.shared_bytes("bfloat16") + 24 * parts, folder)
    assert "st.global.v4" in kernel.ptx  # parts of tiles leave 16 bytes a thread


@pytest.mark.parametrize("name", ["fwd", "wgrad"])
def test_as_many_modalities_as_a_launch_has(name, tmp_path):
    tiles = TILES[(128, 256, False) if name == "fwd" else (256, 128, False)]
    kernel = kernel_of(Plan("triton", tiles), SHAPES) if name == "fwd" else wgrad_kernel_of(tiles, SHAPES)
    check_kernel(kernel, tiles, tmp_path, 4)
    assert "cp.async.bulk.tensor.3d.global.shared" in kernel.ptx  # whole tiles leave by TMA


@pytest.mark.parametrize(
    ("size", "transposed"), [((128, 128, True), False), ((128, 128, False), True)], ids=["ping-pong", "halves"]
)
def test_other_tiles(size, transposed, tmp_path):
    tiles = TILES[size]
    kernel = kernel_of(Plan("triton", tiles), SHAPES[:2], transposed)
    check_kernel(kernel, tiles, tmp_path, 2)


def test_a_users_call():
    """Without tiles of its own."""
    call = forward(Plan("triton"), ((8, 512, 1024), (64, 512, 256)), out_dtype=jnp.float32)
    assert launched(*call) == ["modality_grouped_matmul_fwd"]


@pytest.fixture
def in_python(monkeypatch):
    """The kernel's arithmetic on Python's numbers."""
    names = {
        "cdiv": lambda a, b: -(-a // b),
        "where": lambda c, a, b: a if c else b,
        "static_range": range,
        "load": lambda at: at[0][at[1]],
    }
    monkeypatch.setattr(tile_scheduler_triton, "gl", types.SimpleNamespace(**names))
    monkeypatch.setattr(tile_scheduler_triton, "swizzle", tile_scheduler_triton.swizzle.fn)


class Array:
    """A pointer: numbers can be added to it."""

    def __init__(self, values, at=0):
        self.values, self.at = values, at

    def __add__(self, more):
        return Array(self.values, self.at + more)

    def __sub__(self, less):
        return self + -less

    def __getitem__(self, i):
        return (self.values, self.at)[i]


@pytest.mark.parametrize("high", [[3, 5, 2], [0, 5, 0], [4, 0, 1], [0, 0, 7], [1, 0, 0]], ids=str)
@pytest.mark.parametrize("width", [512, 600])
def test_every_tile_of_the_result_is_located_once(in_python, high, width):
    """Row tiles modality by modality; column tiles past a modality's own are zeros, and come last."""
    sizes, BN, entries = ((0, 2, 64, 200), (2, 5, 64, 512), (5, 6, 64, 8)), 128, 30
    schedule = Array([*[0] * 4 * entries, *np.cumsum(high).tolist(), *[sum(high)] * (entries - 3)])
    across = -(-width // BN)
    found = [
        tile_scheduler_triton.modality_of_row_tile.fn(t, schedule, entries, sizes, width, BN, 4, 3)
        for t in range(sum(high) * across)
    ]
    assert len({(i, col) for i, col, _ in found}) == len(found)
    whose = np.repeat(np.arange(3), high)
    for i, col, part in found:
        assert part % 3 == whose[i]
        assert (part < 3) == (col < sizes[part % 3][3])
    multiplied = [part < 3 for *_, part in found]
    assert multiplied == sorted(multiplied, reverse=True)


def test_every_tile_of_the_matrices_is_located_once(in_python):
    sizes = ((0, 2, 200, 96), (3, 5, 64, 300), (5, 6, 8, 8))  # group 2 is another launch's
    per = [-(-k // 128) * -(-n // 256) for _, _, k, n in sizes]
    count = sum((end - first) * tiles for (first, end, *_), tiles in zip(sizes, per, strict=True))
    found = [tile_scheduler_triton.modality_of_weight_tile.fn(t, sizes, 128, 256, 4, 3) for t in range(count)]
    want = [
        (g, row, col, p)
        for p, (first, end, k, n) in enumerate(sizes)
        for g in range(first, end)
        for row in range(0, k, 128)
        for col in range(0, n, 256)
    ]
    assert sorted(found) == sorted(want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tiles", TILES.values(), ids=lambda tiles: f"{tiles.bm}x{tiles.bn}{'-ping-pong' if tiles.ping_pong else ''}"
)
@pytest.mark.parametrize(
    "sizes", [[300, 0, 1, 723, 0, 512], [0, 4096, 0, 0, 64, 128], [5, 9, 70, 0, 0, 1200]], ids=["ragged", "one", "last"]
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_values(tiles, sizes, dynamic):
    """Two tiles and more a program, rings that are used again and again; NaN in whatever is no modality's."""
    each = dataclasses.replace(tiles, dynamic=dynamic)
    plan = Plan("triton", each, each, each)
    case = make_case(sizes, ((2, 712, 1032), (3, 200, 264), (1, 72, 520)), dtype="bfloat16", before=7, after=5)
    check_values(case, "triton", kind="bfloat16", precision=None, plan=plan)
    once, again = (run_all(case.arrays(), "triton", precision=None, plan=plan) for _ in range(2))
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(once)] == [
        np.asarray(x).tobytes() for x in jax.tree.leaves(again)
    ]


@pytest.mark.gpu
def test_float32_results_and_five_modalities():
    """float32 leaves from registers; the fifth modality is another launch's."""
    case = make_case(
        [90, 0, 300, 41, 7, 0, 130, 64, 33], (*HOPPER, (2, 136, 24), (1, 328, 712)), dtype="bfloat16", before=3, after=9
    )
    each = TILES[128, 256, False]
    plan = Plan("triton", each, each, each)
    check_values(case, "triton", kind="bfloat16", precision=None, plan=plan)
    wide = jax.jit(
        lambda lhs, rhs: jaxops.modality_grouped_matmul(lhs, rhs, case.offsets, out_dtype=jnp.float32, plan=plan)
    )(case.lhs, case.rhs)
    out, *_ = run_all(case.arrays(), "triton", precision=None, plan=plan)
    np.testing.assert_array_equal(np.asarray(wide.astype(jnp.bfloat16)), np.asarray(out))


@pytest.mark.gpu
def test_a_matrix_that_is_nan():
    """Of one group only: other groups' values, next to it in memory, are multiplied by zeros past K at most."""
    case = make_case([100, 200, 300, 10, 20, 150], HOPPER, dtype="bfloat16")
    rhs = (case.rhs[0].at[1].set(jnp.nan), *case.rhs[1:])
    for transposed in (False, True):
        arrays = (case.lhs, rhs, case.dout, case.offsets)
        out, dlhs, _ = run_all(arrays, "triton", transpose_rhs=transposed, precision=None, plan=plan_of("triton"))
        for result in (out, dlhs):
            result = np.asarray(result, np.float32)
            assert np.isnan(result[100:300]).any()
            assert np.isfinite(result[:100]).all()
            assert np.isfinite(result[300:]).all()
