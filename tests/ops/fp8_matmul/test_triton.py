"""The Hopper kernels, compiled for an absent H200 by the op's launchers, and their code. Needs no CUDA plugin."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import jaxops
from jaxops._lib.gluon import launch_triton
from jaxops._lib.planning.device import Device
from jaxops._lib.ragged.offsets import padded_rows
from jaxops.ops.fp8_matmul import RECIPES, Plan, Problem, Tiles, candidates
from jaxops.ops.fp8_matmul.gemm_triton import BLOCK, multiply_triton, scales_of
from jaxops.ops.fp8_matmul.operand import Operand
from jaxops.ops.fp8_matmul.plan import PASSES, heuristic
from tests.gluon import Kernel, check, compiled, launched
from tests.hopper import on_h200
from tests.jaxprs import equations
from tests.ops.fp8_matmul.cases import shapes_in

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
    def formats(self) -> tuple:
        recipe = RECIPES[self.recipe]
        return {
            "fwd": (recipe.lhs, recipe.rhs),
            "dgrad": (recipe.dout, recipe.rhs),
            "wgrad": (recipe.lhs, recipe.dout),
        }[self.name]

    def __str__(self) -> str:
        return "-".join(
            [
                self.recipe,
                self.name,
                *["groups"] * self.grouped,
                f"{self.chosen.bm}x{self.chosen.bn}x{self.chosen.stages}",
                *["dynamic"] * self.chosen.dynamic,
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
        return compiled(multiply, shapes_in(a_form, *a_shape), shapes_in(b_form, *stack, *b_shape), offsets)[0]


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
    Product("blockwise", "wgrad", grouped=True),  # short groups: tiles from a counter
    Product("blockwise", "wgrad", tiles=Tiles("triton", 192, 128, stages=3), spilled=12),  # once a tile
    # Tiles from a counter; float32 stored in whole tiles, in halves, and from registers; bfloat16 in halves.
    Product("blockwise", "fwd", grouped=True, tiles=Tiles("triton", 192, 128, stages=4, dynamic=True)),
    Product("tensorwise", "fwd", grouped=True, tiles=Tiles("triton", 128, 256, stages=3, dynamic=True)),
    Product("blockwise", "wgrad", grouped=True, tiles=Tiles("triton", 192, 128, stages=4)),
    # Two numbers spilled in the epilogue: once a tile.
    Product("blockwise", "wgrad", grouped=True, tiles=Tiles("triton", 128, 128, stages=6), spilled=8),
    Product("blockwise", "fwd", grouped=True, tiles=Tiles("triton", 128, 128, stages=6)),
    # Unaligned, and no room for a tile of bfloat16: from registers.
    Product("blockwise", "fwd", grouped=True, tiles=Tiles("triton", 128, 128, stages=6), n=ODD_N),
    # 64 columns, which the first ones have, too: float32 stored whole, and in halves.
    Product("blockwise", "wgrad", tiles=Tiles("triton", 128, 64, stages=7)),
    Product("blockwise", "wgrad", grouped=True, tiles=Tiles("triton", 128, 64, stages=8, dynamic=True)),
    Product("blockwise", "fwd", grouped=True, tiles=Tiles("triton", 128, 64, stages=8, dynamic=True)),
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


def test_the_products_are_of_every_kind():
    operands = [[Operand(None, None, form.scaling) for form in product.formats] for product in PRODUCTS]
    kinds = {
        (product.grouped and product.name == "wgrad", product.grouped, scales_of(*pair))
        for product, pair in zip(PRODUCTS, operands, strict=True)
    }
    assert len({scales for _, _, scales in kinds}) == 4
    assert {(contraction, grouped) for contraction, grouped, _ in kinds} == {
        (False, False),
        (False, True),
        (True, True),
    }
    assert {
        product.fast for product, pair in zip(PRODUCTS, operands, strict=True) if scales_of(*pair) < BLOCK.value
    } == {True, False}
    assert len(CANDIDATES) >= 3  # two widths, two depths


def gradients(op, **options):
    def results(x, w, dy, *offsets):
        y, vjp = jax.vjp(lambda x, w: op(x, w, *offsets, **options), x, w)
        return y, *vjp(dy)

    return results


@pytest.mark.parametrize("cast", ["before", "inside"])
def test_a_users_call(cast):
    """ "auto" takes these kernels on an H200, for all three products."""
    options = {} if cast == "before" else {"plan": Plan("triton", cast="inside")}
    shapes = [
        jax.ShapeDtypeStruct(*shape) for shape in (((M, K), "bfloat16"), ((K, N), "float32"), ((M, N), "bfloat16"))
    ]
    first = "fp8_gemm_dense" if cast == "before" else "fp8_gemm_inside"
    names = launched(gradients(jaxops.fp8_matmul, **options), *shapes)
    assert names == [first, "fp8_gemm_dense", "fp8_gemm_dense"]


def test_a_users_call_over_groups():
    shapes = [
        jax.ShapeDtypeStruct(*shape)
        for shape in (((M, K), "bfloat16"), ((G, K, N), "float32"), ((M, N), "bfloat16"), ((G + 1,), "int32"))
    ]
    names = launched(gradients(jaxops.fp8_grouped_matmul), *shapes)
    assert names == ["fp8_gemm_rows", "fp8_gemm_rows", "fp8_gemm_contraction"]


def test_how_a_result_is_stored():
    """By TMA where rows are aligned to 16 bytes; a group's partial tile of bfloat16 16 bytes a thread; all else by
    elements."""
    found = {}
    for name, product in {
        "dense": Product("blockwise", "fwd"),
        "groups": Product("blockwise", "fwd", grouped=True),
        "unaligned": UNALIGNED,
        "float32": Product("blockwise", "wgrad", grouped=True),
        "halves": Product("blockwise", "wgrad", grouped=True, tiles=Tiles("triton", 192, 128, stages=4)),
        "no room": Product("blockwise", "wgrad", grouped=True, tiles=Tiles("triton", 128, 128, stages=6)),
        "float32 unaligned": Product("blockwise", "wgrad", grouped=True, n=ODD_N),
    }.items():
        ptx = product.kernel.ptx
        found[name] = "cp.async.bulk.tensor.2d.global.shared" in ptx, "st.global.v4" in ptx, "st.global" in ptx
    assert found == {
        "dense": (True, True, True),
        "groups": (True, True, True),
        "unaligned": (False, False, True),
        "float32": (True, False, True),
        "halves": (True, False, True),
        "no room": (False, False, True),
        "float32 unaligned": (False, False, True),
    }


@gluon.jit
def _double_gluon(x, y, BLOCK: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])  # one element a thread: Triton would choose four
    at = gl.arange(0, BLOCK, layout=LAYOUT)
    gl.store(y + at, 2 * gl.load(x + at))


@triton.jit
def _double(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at))


@pytest.mark.parametrize(("function", "vectors"), [(_double_gluon, 0), (_double, 2)], ids=["gluon", "triton"])
def test_only_gluon_keeps_its_layouts(function, vectors):
    """jax-triton runs Triton's layout passes over Gluon IR, too, and would launch 128 of the 384 threads above."""
    shape = jax.ShapeDtypeStruct((512,), "float32")

    def call(x):
        how = {"kernel": function, "out_type": shape, "grid": 1, "name": "double", "flops": 512}
        return launch_triton.triton_call(x, BLOCK=512, **how)

    (kernel,) = compiled(call, shape)
    assert len(re.findall(r"(?:ld|st)\.global\S*\.v4", kernel.ptx)) == vectors
    assert kernel.shared == 0
    assert kernel.num_warps == 4


def test_what_a_kernel_is_not_given():
    """All but the result's pointer is given: a forgotten operand is no second result."""
    x = jax.ShapeDtypeStruct((512,), "float32")
    how = {"kernel": _double_gluon, "out_type": x, "grid": 1, "name": "double", "flops": 512}
    with pytest.raises(TypeError, match=r"_double_gluon needs all .* not given: x, y"):
        compiled(lambda: launch_triton.triton_call(BLOCK=512, **how))
    with pytest.raises(TypeError, match="not given: y, BLOCK"):
        compiled(lambda x: launch_triton.triton_call(x, **how), x)
    with pytest.raises(TypeError, match="not given: none"):
        compiled(lambda x: launch_triton.triton_call(x, x, BLOCK=512, **how), x)


@gluon.jit
def _late_operand(x, y, z, BLOCK: gl.constexpr):
    at = gl.arange(0, BLOCK, layout=gl.BlockedLayout([4], [32], [4], [0]))
    gl.store(y + at, gl.load(x + at) + gl.load(z + at))


def test_results_come_behind_operands():
    """jax-triton would pass the buffer of z as y's."""
    x = jax.ShapeDtypeStruct((512,), "float32")
    with pytest.raises(TypeError, match="_late_operand takes z, an array, after the pointer of a result, y"):
        compiled(
            lambda x: launch_triton.triton_call(
                x, kernel=_late_operand, out_type=x, grid=1, name="late", flops=512, z=x, BLOCK=512
            ),
            x,
        )


def test_slices_are_not_read_or_written_in_place():
    """In a scan over stacked weights and results, barriers around the call keep XLA from fusing the slices into it."""
    s = jax.ShapeDtypeStruct

    def layers(x, weights, offsets):
        return jax.lax.scan(lambda _, w: (None, jaxops.grouped_matmul(x, w, offsets, backend="triton")), None, weights)[
            1
        ]

    call, barriers = call_and_barriers(
        layers, s((512, 256), "bfloat16"), s((3, 2, 256, 512), "bfloat16"), s((3,), "int32")
    )
    behind = [any(operand in barrier.outvars for barrier in barriers) for operand in call.invars]
    assert behind == [True, True, True, False]  # rows, weights, work list; and what is not initialised
    assert any(result in barrier.invars for barrier in barriers for result in call.outvars)


def is_product(equation) -> bool:
    """A call of a Triton kernel, work lists apart."""
    if equation.primitive.name != "triton_kernel_call":
        return False
    return not equation.params["name"].startswith("schedule_")


def call_and_barriers(fn, *shapes):
    """The one Triton call of fn for an H200, and the barriers beside it."""

    def jaxprs(jaxpr):
        yield jaxpr
        for equation in jaxpr.eqns:
            for sub in jaxprs_in_params(equation.params):
                yield from jaxprs(sub)

    with on_h200():
        whole = jax.make_jaxpr(fn)(*shapes).jaxpr
    (equations,) = [jaxpr.eqns for jaxpr in jaxprs(whole) if any(is_product(equation) for equation in jaxpr.eqns)]
    (call,) = [equation for equation in equations if is_product(equation)]
    return call, [equation for equation in equations if equation.primitive.name == "optimization_barrier"]


def test_a_result_in_an_operands_memory_is_none_of_a_slice():
    """An accumulator is updated in place; in a scan over stacked ones it is a slice, behind a barrier like operands."""
    s = jax.ShapeDtypeStruct

    def layers(x, dout, stacked, offsets):
        return jax.lax.scan(
            lambda _, into: (None, jaxops.grouped_wgrad(x, dout, offsets, accumulate_into=into, backend="triton")),
            None,
            stacked,
        )[1]

    arrays = s((512, 256), "bfloat16"), s((512, 512), "bfloat16"), s((3, 2, 256, 512), "float32"), s((3,), "int32")
    call, barriers = call_and_barriers(layers, *arrays)
    (accumulator,) = [operand for operand in call.invars if operand.aval.dtype == jnp.float32]
    assert dict(call.params["input_output_aliases"])[call.invars.index(accumulator)] == 0
    assert any(accumulator in barrier.outvars for barrier in barriers)


@pytest.mark.parametrize("backend", ["auto", "pallas", "xla"])
def test_a_half_precision_wgrad_is_grouped_matmuls_own(backend):
    """In "auto" on Hopper its Gluon kernel; a backend that is named multiplies the weights' gradient, too."""

    def gradient(x, w, dy, offsets):
        _, vjp = jax.vjp(
            lambda w: jaxops.fp8_grouped_matmul(x, w, offsets, recipe="blockwise_with_gw_hp", backend=backend), w
        )
        return vjp(dy)

    s = jax.ShapeDtypeStruct
    shapes = s((1024, 512), "bfloat16"), s((G, 512, 256), "float32"), s((1024, 256), "bfloat16"), s((G + 1,), "int32")
    with on_h200():
        jaxpr = jax.make_jaxpr(gradient)(*shapes).jaxpr
    kernels = [
        equation.primitive.name
        for equation in equations(jaxpr)
        if equation.params.get("name") == "grouped_matmul_wgrad"
    ]
    assert kernels == {"auto": ["triton_kernel_call"], "pallas": ["pallas_call"], "xla": []}[backend]
