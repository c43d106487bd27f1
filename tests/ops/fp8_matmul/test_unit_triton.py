"""The product over groups that computes a gated unit and casts it: its kernel, compiled for an absent H200.

Its values: tests/ops/hopper_fp8_cases.py, and on a GPU tests/ops/moe_mlp/test_fp8_triton.py.
"""

import dataclasses
import functools

import jax
import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

from jaxops._lib.numerics.activations import ACTIVATIONS
from jaxops.ops.fp8_matmul import Tiles
from jaxops.ops.fp8_matmul.unit_triton import unit_triton
from tests.gluon import SHARED_BYTES, Kernel, check, compiled
from tests.ops.fp8_matmul.cases import operand_shapes

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
