"""cast="inside": its Hopper kernel, compiled for an absent H200. test_triton.py has the products alone."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

from jaxops._lib.planning.device import Device
from jaxops.ops.fp8_matmul import RECIPES, Tiles
from jaxops.ops.fp8_matmul.inside_triton import multiply_inside
from tests.gluon import check, compiled
from tests.ops.fp8_matmul.cases import shapes_in

H200 = Device("NVIDIA H200", "gpu")
M, K, N = 1000, 528, 784  # no whole tiles; the kernel does not depend on them but for N % 8
ODD_N = 783


@dataclasses.dataclass(frozen=True)
class Inside:
    """A launch that casts lhs; spilled: bytes that ptxas may spill, in a tile's epilogue or a casting warp's unit."""

    recipe: str
    tiles: Tiles
    both: bool = False
    pow2: bool = False
    out: str = "bfloat16"
    n: int = N
    spilled: int = 0

    def __str__(self) -> str:
        return f"{self.recipe}-{self.tiles.bm}x{self.tiles.bn}x{self.tiles.stages}{'-both' * self.both}-{self.out}"


INSIDE = [
    Inside("blockwise", Tiles("triton", 128, 128, stages=4, panel=16)),
    Inside("blockwise", Tiles("triton", 128, 128, stages=5), both=True, pow2=True, out="float32", n=ODD_N, spilled=24),
    Inside("blockwise", Tiles("triton", 192, 128, stages=4), both=True, spilled=64),
    Inside("rowwise", Tiles("triton", 128, 256, stages=3, panel=16), spilled=20),
    Inside("rowwise", Tiles("triton", 128, 128, stages=5, panel=16), pow2=True),
    Inside("rowwise", Tiles("triton", 128, 256, stages=3, panel=16), out="float32"),  # stored in halves
    Inside("blockwise", Tiles("triton", 128, 64, stages=7, panel=16), both=True),
    Inside("rowwise", Tiles("triton", 128, 64, stages=8, panel=16)),
]


@pytest.mark.parametrize("case", INSIDE, ids=str)
def test_inside(case, tmp_path):
    """The product's wgmma; three more warps beside the producer, which cast; fences between them and TMA."""
    recipe = RECIPES[case.recipe]
    b, fast = shapes_in(recipe.rhs, case.n, K), "fwd" in recipe.fast
    how: dict = {"out_dtype": jnp.dtype(case.out), "fast": fast, "both": case.both, "pow2": case.pow2}
    multiply = functools.partial(multiply_inside, **how, tiles=case.tiles, cores=132)
    (kernel,) = compiled(multiply, jax.ShapeDtypeStruct((M, K), "bfloat16"), b)
    steps = 1 if fast else 5 if case.tiles.bm == 128 else 1  # a round and a remaining step
    instructions = [f"m64n{case.tiles.bn}k32.f32.e4m3.e4m3"] * (4 * steps * case.tiles.bm // 64)
    check(kernel, instructions, case.tiles.bm // 64, H200.shared_bytes, tmp_path, case.spilled)
    assert ("ldmatrix.sync.aligned.m8n8.x4.trans" in kernel.ptx) == case.both
    assert ("cp.async.bulk.tensor.2d.global.shared" in kernel.ptx) == (case.n == N)
    events = re.findall(
        r"st\.global\.v4|fence\.proxy\.async\.global|fence\.acq_rel\.gpu|red\.relaxed|"
        r"ld\.acquire\.gpu|cp\.async\.bulk\.tensor\.2d\.shared",
        kernel.ptx,
    )
    casting = kernel.ptx.count("cvt.rn.satfinite.e4m3x2.f32")
    assert casting % (3 * 16) == 0  # three warps; a thread casts two numbers at a time, at least 32 of a line
    announced = [i for i, event in enumerate(events) if event == "fence.acq_rel.gpu"]
    assert len(announced) == 3
    for i in announced:
        assert events[i - 1] == "fence.proxy.async.global"
        assert events[i + 1 : i + 3] == ["red.relaxed"] * 2
    # A casting warp fences its reads of a box before the next load into it.
    order = re.findall(r"fence\.proxy\.async\.shared|bar\.warp\.sync|bar\.sync", kernel.ptx)
    assert list(itertools.pairwise(order)).count(("fence.proxy.async.shared", "bar.warp.sync")) == 3
    acquired = [i for i, event in enumerate(events) if event == "ld.acquire.gpu"]
    assert len(acquired) == (2 if case.recipe == "blockwise" else 2 + 3)  # of a panel, of a chunk; of measured rows
    assert {events[i + 1] for i in acquired} == {"fence.proxy.async.global"}


@pytest.mark.parametrize("bn", [64, 128, 256])
def test_inside_leaves_stages_out_that_do_not_fit(bn):
    tiles, shape = Tiles("triton", 128, bn, stages=8, panel=16), jax.ShapeDtypeStruct((M, K), "bfloat16")
    how: dict = {"out_dtype": jnp.dtype("bfloat16"), "fast": True, "tiles": tiles, "pow2": bn == 128, "cores": 132}
    (kernel,) = compiled(functools.partial(multiply_inside, **how), shape, shapes_in(RECIPES["rowwise"].rhs, N, K))
    assert kernel.shared <= H200.shared_bytes
