"""The product over groups that computes a gated unit and casts it: its kernel, compiled for an absent H200, and on one
(marked gpu) beside the product, and the unit and its cast by Pallas."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

import jaxops
from jaxops._lib.numerics.activations import ACTIVATIONS
from jaxops._lib.planning.device import current_device
from jaxops.ops.fp8_matmul import RECIPES, Tiles
from jaxops.ops.fp8_matmul.gemm_triton import multiply_triton
from jaxops.ops.fp8_matmul.operand import Operand
from jaxops.ops.fp8_matmul.unit_triton import unit_triton
from jaxops.ops.moe_mlp.unit_fp8 import unit_cast
from tests.arrays import put
from tests.gluon import SHARED_BYTES, Kernel, check, compiled
from tests.ops.fp8_matmul.cases import operand_shapes, options_of
from tests.ops.hopper_cases import wild_indices
from tests.ops.quantize.cases import bits_of

pytestmark = pytest.mark.versions

M, K, F, G = 1000, 528, 384, 3  # no whole tiles of rows; the kernel does not depend on the sizes
T = 500  # tokens from which rows are gathered


@dataclasses.dataclass(frozen=True)
class Launch:
    activation: str = "silu"
    pow2: bool = False
    save: bool = False
    stages: int = 4
    dynamic: bool = False
    gathered: bool = False

    @property
    def options(self) -> dict:
        tiles = Tiles("triton", 128, 128, stages=self.stages, panel=3, dynamic=self.dynamic)
        return {"activation": self.activation, "pow2": self.pow2, "save": self.save, "tiles": tiles}

    @functools.cached_property
    def kernel(self) -> Kernel:
        a = operand_shapes("block_1x128", T if self.gathered else M, K)
        operands = a, operand_shapes("block_128x128", G, 2 * F, K), jax.ShapeDtypeStruct((G + 1,), "int32")
        indices = [jax.ShapeDtypeStruct((M,), "int32")] * self.gathered
        call = functools.partial(unit_triton, **self.options, cores=132)
        (kernel,) = compiled(call, *operands, *indices)
        return kernel


# Every activation, each with what is saved or without, of rows in place or gathered, and tiles from a counter or not.
LAUNCHES = [
    Launch("relu"),
    Launch(save=True),
    Launch("sigmoid", gathered=True),
    Launch(save=True, gathered=True),
    Launch("gelu_tanh", True, True, 3, dynamic=True),
    Launch("gelu", True, True, 4, True, True),
]


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_kernel(launch, tmp_path):
    """A consumer multiplies 64 rows by 128 columns of gate, then of up, 128 of K in four instructions each."""
    spilled = 4 if launch.gathered and launch.save and launch.dynamic else 0  # once a tile
    check(launch.kernel, ["m64n128k32.f32.e4m3.e4m3"] * 16, 2, SHARED_BYTES, tmp_path, spilled)


def test_every_activation_is_compiled():
    assert {launch.activation for launch in LAUNCHES} == set(ACTIVATIONS)


# On a GPU


@dataclasses.dataclass(frozen=True)
class Sizes:
    M: int
    K: int
    F: int
    offsets: tuple[int, ...]


def random_offsets(M: int, G: int, seed: int) -> tuple[int, ...]:
    """Rows before and after the groups, groups that are empty or have one row."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(1, M, G - 2))
    return tuple(int(n) for n in (1, *cuts, cuts[-1], cuts[-1] + 1))


SIZES = {
    "one": Sizes(1, 128, 128, (0, 1)),
    "few": Sizes(61, 40, 128, (7, 7, 8, 25, 25)),  # fewer rows than a store, one step
    "primes": Sizes(1009, 1040, 384, (3, 34, 165, 165, 166, 763, 1004)),
    "odd and outside": Sizes(700, 529, 128, (5, 5, 600, 600)),
    "odd": Sizes(2001, 529, 768, (0, 1000, 1000, 2001)),  # K and M that TMA does not take without padding
    "many": Sizes(4099, 272, 768, random_offsets(4099, 33, 0)),
    "wide": Sizes(700, 2064, 1408, (130, 260, 699)),
    "nothing": Sizes(300, 256, 128, (150, 150, 150)),
}


def operands(sizes: Sizes) -> tuple[Operand, Operand]:
    """NaN in rows outside; of rows inside one with a NaN, one with an infinity, one of zeros, and large ones."""
    rng, (first, *_, end) = np.random.default_rng(sizes.M), sizes.offsets
    groups, K = len(sizes.offsets) - 1, sizes.K
    found = []
    for scaling, shape in (("block_1x128", (sizes.M, K)), ("block_128x128", (groups, 2 * sizes.F, K))):
        values = np.clip(rng.normal(size=shape) * 100, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        scales = np.exp(rng.normal(size=operand_shapes(scaling, *shape).scales.shape)).astype(np.float32) / 2000
        found.append([values, scales])
    outside = np.r_[0:first, end : sizes.M]
    found[0][0][outside], found[0][1][:, outside] = np.nan, np.nan
    for at, scale in enumerate((np.nan, np.inf, 0.0, 1e30, 1e-30)):
        if first + 3 * at < end:
            found[0][1][:1, first + 3 * at] = scale
    a, b = found
    return Operand(*map(put, a), "block_1x128"), Operand(*map(put, b), "block_128x128")


@functools.partial(jax.jit, static_argnums=3)
def fused(a, b, offsets, launch: Launch, indices=None):
    return unit_triton(a, b, offsets, indices, **launch.options, cores=current_device().cores)


@functools.partial(jax.jit, static_argnums=(3, 4))
def composed(a, b, offsets, activation: str, pow2: bool):
    how = {"out_dtype": jnp.dtype("bfloat16"), "fast": False, "tiles": Tiles("triton", 128, 128, stages=5)}
    gate_up = multiply_triton(a, b, offsets, **how, cores=current_device().cores)
    h = unit_cast(activation, RECIPES["blockwise"], gate_up, offsets, pow2_scales=pow2, backend="pallas")
    return h.values, h.scales, gate_up


def check_bits(sizes: Sizes, launch: Launch) -> None:
    """h in rows of groups; gate and up, and zeros for h, in all rows."""
    options_of("triton")  # skips where its device is missing
    given = *operands(sizes), put(np.asarray(sizes.offsets, np.int32))
    got = [np.asarray(x) for x in fused(*given, launch)]
    want = [np.asarray(x) for x in composed(*given, launch.activation, launch.pow2)]
    rows = slice(sizes.offsets[0], sizes.offsets[-1])
    assert len(got) == (3 if launch.save else 2)
    for i, (x, y) in enumerate(zip(got, want, strict=False)):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        part = ((rows,), (slice(None), rows), ())[i]
        np.testing.assert_array_equal(bits_of(x[part]), bits_of(y[part]), err_msg=("h", "scales", "gate and up")[i])
    outside = np.r_[0 : rows.start, rows.stop : sizes.M]
    assert not np.asarray(got[0])[outside].astype(np.float32).any()
    again = [np.asarray(x) for x in fused(*given, launch)]
    assert [x.tobytes() for x in got] == [x.tobytes() for x in again]


WAYS = [Launch(save=save, pow2=save) for save in (False, True)]
WAYS += [Launch(save=True, stages=3, dynamic=True), Launch(stages=2, dynamic=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("launch", WAYS, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_bits(name, launch):
    check_bits(SIZES[name], launch)


@pytest.mark.gpu
def test_wild_offsets():
    """Wrong rows, no access out of bounds, no hang."""
    options_of("triton")
    a, b = operands(SIZES["wide"])
    for offsets in ([-9, 900, 400], [2**31 - 1, -(2**31), 7], [600, 100, 650]):
        jax.block_until_ready(fused(a, b, jnp.array(offsets, jnp.int32), Launch(save=True)))
        for dynamic in (False, True):
            indices = put(wild_indices(np.random.default_rng(0), 700, 900))
            launch = Launch(save=True, dynamic=dynamic)
            jax.block_until_ready(fused(a, b, jnp.array(offsets, jnp.int32), launch, indices.astype(jnp.int32)))


@pytest.mark.gpu
def test_vmap_runs_once_an_example():
    options_of("triton")
    plan = jaxops.ops.fp8_matmul.Plan("triton", device=current_device(), fwd=Tiles("triton", 128, 128, stages=4))
    spec = jaxops.ops.fp8_matmul.Spec(RECIPES["blockwise"], plan, "bfloat16", "bfloat16", "bfloat16", False)
    a, b = operands(SIZES["primes"])
    offsets = jnp.array([SIZES["primes"].offsets, sorted(np.random.default_rng(0).integers(0, 1009, 7))], jnp.int32)
    unit = lambda offsets: jaxops.ops.fp8_matmul.multiply_unit(spec, a, b, offsets, "silu", False)[0]
    got = jax.jit(jax.vmap(unit))(offsets)
    for i in range(2):
        want = jax.jit(unit)(offsets[i])
        np.testing.assert_array_equal(bits_of(np.asarray(got.values[i])), bits_of(np.asarray(want.values)))
