"""Plans of grouped_glu: the products' plan, heuristic, candidates; what is lowered for an H200."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

import jaxops
from jaxops._lib.planning.device import Device
from jaxops.ops import grouped_glu, grouped_matmul
from jaxops.ops.grouped_glu import FusedTiles, Plan, Problem, Tiles, candidates
from jaxops.ops.grouped_glu.plan import PASSES, heuristic
from jaxops.ops.grouped_matmul.plan import PASSES as PRODUCT_PASSES
from tests.arrays import i32, shape
from tests.hopper import lower_for_h200
from tests.plans import by_choices, choices

pytestmark = pytest.mark.versions

make_plan = by_choices(grouped_glu.make_plan)

H200, A100, L4 = (Device(f"NVIDIA {kind}", "gpu") for kind in ("H200", "A100-SXM4-80GB", "L4"))
CPU = Device("cpu", "cpu")
PROBLEM = Problem(8, 4096, 1024, 3584, "bfloat16")
PRODUCT = grouped_matmul.Problem(8, 4096, 1024, 3584, "bfloat16")


def test_the_products_take_their_tuned_rows():
    """Of the width that is multiplied: gate and up together where they are one array."""
    tiles = grouped_matmul.Tiles(16, 16, 16)
    row = {"op": "grouped_matmul", "pass": "fwd", "tiles": vars(tiles), "us": 1.0}
    row |= {"G": 8, "M": 4096, "K": 1024, "N": 2 * 3584, "dtype": "bfloat16"}
    joined = dataclasses.replace(PROBLEM, joined=True)
    assert [make_plan(p, A100, [row]).products.fwd == tiles for p in (PROBLEM, joined)] == [False, True]


def test_few_rows_are_one_kernel():
    """Whose tiles are as high as the products', and fit the card twice. Tiles for what it replaces are obeyed."""
    for device, (G, M, F) in itertools.product((H200, A100, L4), ((128, 1, 3), (128, 2048, 768), (8, 128, 14336))):
        for dtype in ("bfloat16", "float32"):
            plan = make_plan(Problem(G, M, 2048, F, dtype), device, backend="pallas")
            tiles = dataclasses.replace(plan.fused, bn=2 * plan.fused.bn)
            assert (tiles.bm, tiles.tail) == (plan.products.fwd.bm, plan.products.fwd.tail)
            assert 2 * tiles.shared_bytes(dtype) <= device.shared_bytes or tiles.stages == 2
    split = lambda *shape: make_plan(Problem(*shape, "bfloat16"), H200, backend="pallas").fused.split
    # By tokens with 8 of 128 experts; sums too short; columns enough.
    assert [split(128, M, 2048, 768) for M in (8, 16, 32, 2048)] == [4, 2, 1, 1]
    assert [split(128, 8, 1023, 768), split(8, 128, 4096, 14336), split(8, 1, 1024, 16)] == [1, 1, 4]
    few = Problem(8, 128, 1024, 3584, "bfloat16")
    assert make_plan(few, H200).fused is not None
    for other in ({"M": 129}, {"joined": True}, {"recast": True}):
        assert make_plan(dataclasses.replace(few, **other), A100).fused is None
    for plan in (Plan(fwd=Tiles(1, 64, 1)), Plan(products=grouped_matmul.Plan("pallas"))):
        assert make_plan(few, H200, plan=plan).fused is None
    assert make_plan(few, CPU).fused is None
    given = grouped_matmul.Tiles(16, 16, 16)
    assert make_plan(PROBLEM, A100, plan=Plan(fused=given)).fused == given
    for fused in (FusedTiles(), grouped_matmul.Tiles(128, 256, 64, 8, kernel="triton")):
        with pytest.raises(ValueError, match=r"plan\.fused=.*backend='pallas' takes grouped_matmul\.Tiles"):
            make_plan(PROBLEM, A100, plan=Plan(fused=fused))
    with pytest.raises(NotImplementedError, match="two arrays"):
        make_plan(dataclasses.replace(few, joined=True), A100, plan=Plan(fused=given))


def test_the_products_plan():
    """By the plan's backend; another one's explicit plan is obeyed."""
    assert make_plan(PROBLEM, H200).products == choices(grouped_matmul.make_plan(PRODUCT, H200))
    for how in ({"backend": "xla"}, {"plan": Plan("xla")}):
        assert make_plan(PROBLEM, H200, **how) == Plan("xla", products=grouped_matmul.Plan("xla"))
    assert make_plan(PROBLEM, CPU, backend="pallas").products.backend == "pallas"
    apart = Plan("pallas", products=grouped_matmul.Plan("xla"))
    assert make_plan(PROBLEM, H200, plan=apart).products == apart.products


@pytest.mark.parametrize("F", [1, 3, 96, 768, 1408, 2048, 14336, 40_000])
def test_heuristic_and_candidates_are_legal(F):
    """Tiles raises for what no kernel supports. At most 64 elements a thread are held in registers."""
    for name in PASSES:
        problem = Problem(8, 4096, 64, F, "bfloat16")
        found = candidates(name, problem, H200)
        assert found[0] == heuristic(name, problem, H200)
        assert len(set(found)) == len(found)
        for block in found:
            assert block.rows * block.columns <= 64 * 32 * block.warps
            assert block.columns < 2 * max(32, F)


KERNEL = "__gpu$xla.gpu.triton"  # the target of its custom call in StableHLO


def lowered(
    M: int, K: int, F: int, *, joined: bool = False, dtype: str = "bfloat16", plan: Plan | None = None, **options
) -> list[str]:
    """The kernels of a call's forward and backward, in order, without those that list the products' work."""
    G = 4

    def both(x, w_gate, w_up, dh, offsets):
        call = lambda *given: jaxops.grouped_glu(*given, offsets, plan=plan, **options)
        h, vjp = jax.vjp(call, x, w_gate, w_up)
        return h, vjp(dh)

    weight, (x, dh) = shape(G, K, 2 * F if joined else F, dtype=dtype), (shape(M, n, dtype=dtype) for n in (K, F))
    text = lower_for_h200(both, x, weight, None if joined else weight, dh, i32(G + 1))
    names = re.findall(r'"((?:grouped|schedule)_\w+)"', text)
    assert text.count(KERNEL) == len(names)
    return [name for name in names if not name.startswith("schedule")]


FWD, DGRAD, WGRAD = (f"grouped_matmul_{name}" for name in PRODUCT_PASSES)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_call_is_these_kernels(activation):
    """The activation and its gradient are one each."""
    names = lowered(200, 64, 96, backend="pallas", activation=activation)
    assert names == [FWD, FWD, "grouped_glu_fwd", "grouped_glu_bwd", DGRAD, DGRAD, WGRAD, WGRAD]


def test_few_rows_are_one_kernel_forward():
    names = lowered(60, 64, 96, backend="pallas", biases=(jnp.zeros((4, 96)), None))
    assert names == ["grouped_glu_fused", "grouped_glu_bwd", DGRAD, DGRAD, WGRAD, WGRAD]


def test_one_array_is_one_product_each():
    names = lowered(77, 33, 65, joined=True, backend="pallas", dtype="float32", activation="relu")
    assert names == [FWD, "grouped_glu_fwd", "grouped_glu_bwd", DGRAD, WGRAD]


def test_candidates_lower_for_an_h200():
    """Each shape of a block once: warps change nothing in a kernel's text."""
    problem = Problem(4, 64, 16, 640, "bfloat16")
    fwd, bwd = (list({(b.rows, b.columns): b for b in candidates(name, problem, H200)}.values()) for name in PASSES)
    for i in range(0, max(len(fwd), len(bwd)), 5):
        plan = Plan("pallas", fwd[i % len(fwd)], bwd[i % len(bwd)], grouped_matmul.Plan("xla"))
        assert lowered(64, 16, 640, plan=plan) == ["grouped_glu_fwd", "grouped_glu_bwd"]
