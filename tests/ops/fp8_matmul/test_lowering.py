"""The Pallas kernels, lowered for GPUs that are not present: every candidate's tiles, each kind of product, calls."""

import functools

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import jaxops
from jaxops._lib.planning.device import Device
from jaxops._lib.ragged.offsets import padded_rows
from jaxops.ops.fp8_matmul import Problem, Tiles, candidates
from jaxops.ops.fp8_matmul.gemm_pallas import multiply_pallas
from jaxops.ops.fp8_matmul.plan import PASSES
from tests.hopper import H200
from tests.ops.fp8_matmul.cases import operand_shapes

pytestmark = pytest.mark.versions

L4 = AbstractDevice(device_kind="NVIDIA L4", num_cores=58, platform="gpu")
SMALL = Problem(300, 520, 400, "blockwise", "bfloat16")  # nothing but K is whole tiles
G = 3
OF_FEW_ROWS = Tiles("pallas", 64, 64, 4, 2, split=2, swap=True)


def lower(device, fn, *shapes) -> str:
    with jax.sharding.use_abstract_mesh(
        AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    ):
        return jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def lowered(device, ragged: str | None, scalings: tuple[str, str], tiles: Tiles) -> str:
    """One product; with one scale an operand also of two formats."""
    M, K, N = SMALL.M, SMALL.K, SMALL.N
    a_shape, b_shape = {
        None: ((M, K), (N, K)),
        "rows": ((M, K), (G, N, K)),
        "contraction": ((K, padded_rows(M, G)), (N, padded_rows(M, G))),
    }[ragged]
    a = operand_shapes(scalings[0], *a_shape, dtype="float8_e5m2" if scalings[0] == "tensorwise" else "float8_e4m3fn")
    b = operand_shapes(scalings[1], *b_shape)
    offsets = None if ragged is None else jax.ShapeDtypeStruct((G + 1,), "int32")
    how = {"length": M if ragged == "contraction" else None, "out_dtype": "bfloat16", "tiles": tiles}
    return lower(device, functools.partial(multiply_pallas, **how), a, b, offsets)


def kernels(text: str) -> int:
    return text.count("__gpu$xla.gpu.triton")


def pallas_candidates(device) -> list[Tiles]:
    """One for each that differs in more than numbers: warps, depth and panel change no shape in a kernel."""
    found = {tiles for name in PASSES for tiles in candidates(name, SMALL, Device(device.device_kind, "gpu"), "pallas")}
    return sorted({(tiles.bm, tiles.bn): tiles for tiles in found}.values(), key=lambda tiles: (tiles.bm, tiles.bn))


@pytest.mark.parametrize("tiles", pallas_candidates(L4), ids=lambda tiles: f"{tiles.bm}x{tiles.bn}")
def test_candidates(tiles):
    """On the smaller card; the other one's products are below."""
    assert kernels(lowered(L4, None, ("block_1x128", "block_128x128"), tiles)) == 1
    assert kernels(lowered(L4, "contraction", ("block_1x128", "block_1x128"), tiles)) == 2  # and its schedule


@pytest.mark.parametrize("ragged", [None, "rows", "contraction"], ids=str)
@pytest.mark.parametrize(
    "scalings",
    [
        ("tensorwise", "tensorwise"),
        ("rowwise", "rowwise"),
        ("block_1x128", "block_128x128"),
        ("block_1x128", "block_1x128"),
    ],
)
def test_every_product(ragged, scalings):
    """Few rows need no work list."""
    for tiles in (Tiles("pallas", 64, 32, 4), *([] if ragged == "contraction" else [OF_FEW_ROWS])):
        assert kernels(lowered(H200, ragged, scalings, tiles)) == (2 if ragged == "contraction" else 1)


@pytest.mark.parametrize(("device", "grouped"), [(H200, False), (L4, False), (H200, True)], ids=str)
def test_a_users_call(device, grouped):
    """Three products and, around them, casts: nothing else that touches a whole tensor, no transpose of one."""
    M, K, N, op = SMALL.M, SMALL.K, SMALL.N, jaxops.fp8_grouped_matmul if grouped else jaxops.fp8_matmul

    def gradients(x, w, dy, *offsets):
        y, vjp = jax.vjp(lambda x, w: op(x, w, *offsets, backend="pallas"), x, w)
        return y, vjp(dy)

    s, stack = jax.ShapeDtypeStruct, (G,) * grouped
    shapes = s((M, K), "bfloat16"), s((*stack, K, N), "float32"), s((M, N), "bfloat16")
    text = lower(device, gradients, *shapes, *[s((G + 1,), "int32")] * grouped)
    assert text.count('"fp8_matmul_rows"') == 3 - grouped
    assert text.count('"fp8_matmul_contraction"') == grouped
    assert grouped or kernels(text) == 6
    assert "stablehlo.transpose" not in text
