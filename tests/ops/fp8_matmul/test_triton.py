"""The Hopper kernels, compiled for an absent H200 by the op's launchers, and their code. Needs no CUDA plugin."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

import jaxops
from jaxops._lib.numerics.activations import ACTIVATIONS
from jaxops._lib.planning.device import Device
from jaxops._lib.ragged.offsets import padded_rows
from jaxops.ops.fp8_matmul import RECIPES, Format, Problem, Tiles, candidates
from jaxops.ops.fp8_matmul.gemm_triton import multiply_triton
from jaxops.ops.fp8_matmul.plan import PASSES, heuristic
from jaxops.ops.fp8_matmul.recipes import SIDES
from jaxops.ops.fp8_matmul.unit_triton import unit_triton
from tests.gluon import Kernel, check, compiled
from tests.hopper import on_h200
from tests.jaxprs import equations
from tests.ops.fp8_matmul.cases import operand_shapes

pytestmark = pytest.mark.versions

H200 = Device("NVIDIA H200", "gpu")
M, K, N, G = 1000, 528, 784, 3  # no whole tiles; the kernels do not depend on them but for N % 8
ODD_N = 783


@dataclasses.dataclass(frozen=True)
class Product:
    """One product of one recipe, with the heuristic's tiles where it has none; spilled: bytes that ptxas may spill."""

    recipe: str
    name: str
    grouped: bool = False
    tiles: Tiles | None = None
    n: int = N
    spilled: int = 0

    @property
    def problem(self) -> Problem:
        return Problem(M, K, self.n, self.recipe, "bfloat16", G if self.grouped else 0)

    @property
    def chosen(self) -> Tiles:
        return self.tiles or heuristic(self.name, self.problem, H200, "triton")

    @property
    def fast(self) -> bool:
        return self.name in RECIPES[self.recipe].fast

    @property
    def formats(self) -> list[Format]:
        return [RECIPES[self.recipe].form(tensor) for tensor, _ in SIDES[self.name]]

    def __str__(self) -> str:
        return "-".join(
            [
                self.recipe,
                self.name,
                *["groups"] * self.grouped,
                f"{self.chosen.bm}x{self.chosen.bn}x{self.chosen.stages}",
            ]
        )

    @functools.cached_property
    def kernel(self) -> Kernel:
        a_form, b_form = self.formats
        padded = padded_rows(M, G) if self.grouped else M
        stack = [G] if self.grouped and self.name != "wgrad" else []
        a_shape, b_shape = {
            "fwd": ((M, K), (self.n, K)),
            "dgrad": ((M, self.n), (K, self.n)),
            "wgrad": ((K, padded), (self.n, padded)),
        }[self.name]

        out = "float32" if self.name == "wgrad" else "bfloat16"  # the gradient of a float32 master
        length = M if self.grouped and self.name == "wgrad" else None
        how = {"length": length, "out_dtype": jnp.dtype(out), "fast": self.fast, "tiles": self.chosen, "cores": 132}
        offsets = jax.ShapeDtypeStruct((G + 1,), "int32") if self.grouped else None
        multiply = functools.partial(multiply_triton, **how)
        sides = ((a_form, a_shape), (b_form, (*stack, *b_shape)))
        operands = (operand_shapes(form.scaling, *shape, dtype=form.dtype) for form, shape in sides)
        return compiled(multiply, *operands, offsets)[0]


UNALIGNED = Product("tensorwise", "fwd", grouped=True, tiles=Tiles("triton", 128, 128, stages=4), n=ODD_N)
PRODUCTS = [
    Product("tensorwise", "fwd"),
    Product("tensorwise", "dgrad"),  # promoted, e5m2 by e4m3
    Product("rowwise", "fwd"),
    Product("blockwise", "fwd"),
    Product("blockwise", "wgrad"),  # 1x128 of both, float32
    UNALIGNED,
    Product("rowwise", "dgrad", grouped=True),
    Product("blockwise", "fwd", grouped=True),
    Product("tensorwise", "wgrad", grouped=True),  # e4m3 by e5m2
    Product("blockwise", "wgrad", grouped=True),
    Product("blockwise", "wgrad", tiles=Tiles("triton", 192, 128, stages=3), spilled=12),  # once a tile
    # Float32 stored in whole tiles, in halves, and from registers; bfloat16 in halves.
    Product("blockwise", "fwd", grouped=True, tiles=Tiles("triton", 192, 128, stages=4)),
    Product("tensorwise", "fwd", grouped=True, tiles=Tiles("triton", 128, 256, stages=3)),
    Product("blockwise", "wgrad", grouped=True, tiles=Tiles("triton", 192, 128, stages=4)),
    # Two numbers spilled in the epilogue: once a tile.
    Product("blockwise", "wgrad", grouped=True, tiles=Tiles("triton", 128, 128, stages=6), spilled=8),
    Product("blockwise", "fwd", grouped=True, tiles=Tiles("triton", 128, 128, stages=6)),
    # Unaligned, and no room for a tile of bfloat16: from registers.
    Product("blockwise", "fwd", grouped=True, tiles=Tiles("triton", 128, 128, stages=6), n=ODD_N),
    # 64 columns, which the first ones have, too: float32 stored whole, and in halves.
    Product("blockwise", "wgrad", tiles=Tiles("triton", 128, 64, stages=7)),
    Product("blockwise", "wgrad", grouped=True, tiles=Tiles("triton", 128, 64, stages=8)),
    Product("blockwise", "fwd", grouped=True, tiles=Tiles("triton", 128, 64, stages=8)),
]


def size_of(tiles: Tiles) -> tuple[int, int, int]:
    return tiles.bm, tiles.bn, tiles.stages


CANDIDATES = {
    size_of(tiles): Product(recipe, name, groups > 0, tiles)
    for recipe in RECIPES
    for name in PASSES
    for groups in (0, G)
    for tiles in candidates(name, Problem(M, K, N, recipe, "bfloat16", groups), H200, "triton")
}
# Each tile and depth that may be tuned is compiled for one product at least.
PRODUCTS += [
    product for size, product in CANDIDATES.items() if size not in {size_of(product.chosen) for product in PRODUCTS}
]


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_product(product, tmp_path):
    """A consumer multiplies 64 rows by 128 of K in four wgmma: once in the code; with promoted sums two consumers once
    per step of a round of four, and once for the remaining steps.
    """
    tiles = product.chosen
    consumers = tiles.bm // 64
    a, b = ({"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}[form.dtype] for form in product.formats)
    places = 1 if product.fast or consumers == 3 else 4 + 1
    instructions = [f"m64n{tiles.bn}k32.f32.{a}.{b}"] * (consumers * 4 * places)
    # Float32 takes more than the tiles promise where that is free, and then stores more columns at a time.
    shared = H200.shared_bytes if product.name == "wgrad" else tiles.shared_bytes
    check(product.kernel, instructions, consumers, shared, tmp_path, product.spilled)


# Of the kernel that computes a gated unit and casts it, each activation with what is saved or without, of rows in place
# or gathered: (activation, pow2, save, stages, gathered).
UNITS = [
    ("relu", False, False, 4, False),
    ("silu", False, True, 4, False),
    ("sigmoid", False, False, 4, True),
    ("relu2", False, True, 4, True),
    ("gelu_tanh", True, True, 3, False),
    ("gelu", True, True, 4, True),
]


@pytest.mark.parametrize(("activation", "pow2", "save", "stages", "gathered"), UNITS)
def test_unit(activation, pow2, save, stages, gathered, tmp_path):
    """A consumer multiplies 64 rows by 128 columns of gate, then of up, 128 of K in four instructions each.

    Its values: tests/ops/hopper_fp8_cases.py, and on a GPU tests/ops/moe_mlp/test_fp8_triton.py.
    """
    F, tiles = 384, Tiles("triton", 128, 128, stages=stages, panel=3)
    call = functools.partial(unit_triton, activation=activation, pow2=pow2, save=save, tiles=tiles, cores=132)
    rows, weights = operand_shapes("block_1x128", 500 if gathered else M, K), (G, 2 * F, K)
    operands = rows, operand_shapes("block_128x128", *weights), jax.ShapeDtypeStruct((G + 1,), "int32")
    (kernel,) = compiled(call, *operands, *[jax.ShapeDtypeStruct((M,), "int32")] * gathered)
    spilled = 4 if gathered and save else 0  # once a tile
    check(kernel, ["m64n128k32.f32.e4m3.e4m3"] * 16, 2, H200.shared_bytes, tmp_path, spilled)


def test_every_activation_is_compiled():
    assert {activation for activation, *_ in UNITS} == set(ACTIVATIONS)


@pytest.mark.parametrize(
    ("backend", "recipe", "kernels"),
    [
        ("auto", "", ["fp8_gemm_dense"] * 3),
        ("auto", "blockwise", ["fp8_gemm_rows", "fp8_gemm_rows", "fp8_gemm_contraction"]),
        ("auto", "blockwise_with_gw_hp", ["fp8_gemm_rows", "fp8_gemm_rows", "grouped_matmul_wgrad"]),
        ("pallas", "blockwise_with_gw_hp", ["fp8_matmul_rows", "fp8_matmul_rows", "grouped_matmul_wgrad"]),
        ("xla", "blockwise_with_gw_hp", []),
    ],
)
def test_a_users_call(backend, recipe, kernels):
    """ "auto" takes these kernels on an H200. A weight gradient in half precision is grouped_matmul's own; a backend
    that is named multiplies it, too. No recipe: without groups."""

    def results(x, w, dy, offsets):
        op = functools.partial(jaxops.fp8_grouped_matmul, group_offsets=offsets, recipe=recipe)
        op = functools.partial(op if recipe else jaxops.fp8_matmul, backend=backend)
        y, vjp = jax.vjp(op, x, w if recipe else w[0])
        return y, vjp(dy)

    s = jax.ShapeDtypeStruct
    shapes = s((1024, 512), "bfloat16"), s((G, 512, 256), "float32"), s((1024, 256), "bfloat16"), s((G + 1,), "int32")
    with on_h200():
        calls = equations(jax.make_jaxpr(results)(*shapes).jaxpr)
    kind = {"auto": "triton_kernel_call", "pallas": "pallas_call", "xla": ""}[backend]
    names = [call.params["name"] for call in calls if call.primitive.name == kind]
    assert [name for name in names if "matmul" in name or "gemm" in name] == kernels
