"""The gated unit cast by the kernel of its products: when plans choose it, the kernels of a call, and on a GPU its bits
beside those of two kernels."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

import jaxops
from jaxops._lib.planning.device import Device
from jaxops.ops import fp8_matmul
from jaxops.ops.moe_mlp import Plan, Problem, make_plan
from tests.ops.fp8_matmul.cases import options_of
from tests.ops.moe_mlp.cases import NAMES, Variant, check_zeros, make_case
from tests.ops.moe_mlp.test_fp8 import compiled
from tests.ops.moe_mlp.test_triton import launched, routing_of, shape
from tests.ops.quantize.cases import bits_of

pytestmark = pytest.mark.versions

H200 = Device("NVIDIA H200", "gpu")
PROBLEM = Problem(4096, 2, 8, 1024, 3584, 1024, "bfloat16", "blockwise")
TILES = fp8_matmul.Tiles("triton", 128, 128, stages=3, panel=2)
GATHERED = Plan("triton", unit=fp8_matmul.Plan("triton", fwd=TILES), unit_inside=True, gather=True)
INSIDE = dataclasses.replace(GATHERED, gather=False)
AFTER = Plan("triton", unit_inside=False)


NARROW = {"F": 1024, "E": 64}


@pytest.mark.parametrize(
    ("change", "plan", "inside", "gather"),
    [
        ({}, Plan("triton"), True, False),
        ({"recipe": "blockwise_with_gw_hp"}, Plan("triton"), True, False),
        ({}, GATHERED, True, True),
        *((NARROW | change, Plan("triton"), True, True) for change in ({}, {"D": 1001})),
        (NARROW, INSIDE, True, False),
        (NARROW, Plan("triton", gather=False), True, False),
        (NARROW, AFTER, False, False),
        # Other dtypes, scales and F, and few rows, but for a plan that says so.
        *((NARROW | change, Plan("triton"), False, False) for change in (
            {"F": 960}, {"dtype": "float32"}, {"dtype": "float16"}, {"recipe": "tensorwise"}, {"recipe": "rowwise"},
            {"T": 16},
        )),
        (NARROW | {"T": 16}, Plan("triton", gather=True), True, True),
        ({"T": 1}, Plan("triton", unit_inside=True), True, False),
        ({}, Plan("triton", unit=fp8_matmul.Plan("triton", fwd=fp8_matmul.Tiles("triton", 192, 128))), False, False),
        (NARROW, Plan("pallas"), False, False),
        (NARROW, Plan("xla"), False, False),
        ({"recipe": None}, Plan("triton"), None, False),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_chosen(change, plan, inside, gather):
    """For block scales, bfloat16, F a multiple of 128, and enough rows the unit inside; rows of narrow experts are
    gathered. The kernel has the unit's tiles in place of the product's."""
    problem = dataclasses.replace(PROBLEM, **change)
    made = make_plan(problem, H200, plan=plan)
    assert (made.unit_inside, made.gather) == (inside, gather)
    if plan == Plan("triton"):
        assert make_plan(problem, H200) == make_plan(problem, H200, plan=made) == made
    if inside:
        assert made.unit.fwd == (fp8_matmul.UNIT_TILES if plan.unit is None else TILES)
        assert made.unit.dgrad == make_plan(problem, H200, plan=AFTER).unit.dgrad
    elif plan == AFTER:
        assert made.unit == fp8_matmul.make_plan(problem.fp8[0], H200)


@pytest.mark.parametrize(
    ("change", "plan", "says"),
    [
        ({"F": 200}, Plan("triton", unit_inside=True), "F = 200"),
        ({"recipe": "rowwise"}, Plan("triton", unit_inside=True), "'rowwise'"),
        ({"dtype": "float32"}, Plan("triton", unit_inside=True), "float32"),
        ({}, Plan("pallas", unit_inside=True), "'pallas'"),
        ({}, Plan("xla", unit_inside=True), "'xla'"),
        ({}, dataclasses.replace(INSIDE, unit=fp8_matmul.Plan("pallas")), "this is 'pallas'"),
        ({}, dataclasses.replace(INSIDE, unit=fp8_matmul.Plan("triton", fwd=dataclasses.replace(TILES, stages=5))),
         "stages=5"),
        ({"recipe": None}, Plan("triton", unit_inside=True), "only with an FP8 recipe"),
        ({"recipe": None, "stored": True}, Plan("pallas", unit_inside=True), "only with an FP8 recipe"),
        ({}, dataclasses.replace(AFTER, gather=True), "unit_inside.*gathers rows: leave out gather"),
        ({"recipe": "rowwise"}, Plan("triton", gather=True), "unit_inside.*gathers rows: leave out gather"),
    ],
)  # fmt: skip
def test_what_has_no_kernel(change, plan, says):
    with pytest.raises(NotImplementedError, match=says if "gather" in says else f"{says}.*leave unit_inside out"):
        make_plan(dataclasses.replace(PROBLEM, **change), H200, plan=plan)


E, D, F = 3, 256, 384
OPERANDS = (shape(4000, D), shape(E, D, F), shape(E, D, F), shape(E, F, D))
UNIT, ROWS, WGRAD = "fp8_unit", "fp8_gemm_rows", "fp8_gemm_contraction"


@pytest.mark.parametrize(("save", "results"), [("preactivations", 3), ("nothing", 2)])
def test_a_users_call(save, results):
    """One kernel writes h, its scales, and for a backward gate and up."""

    def step(routing, dout, *operands):
        forward = lambda *given: jaxops.moe_mlp(*given, routing, recipe="blockwise", save=save)
        return jax.vjp(forward, *operands)[1](dout)

    again = [(UNIT, 3), (ROWS, 1)] if save == "nothing" else []  # the last one is not read: XLA leaves it out
    backward = [(ROWS, 1), (ROWS, 1), *[(WGRAD, 1)] * 3]
    routing = routing_of(4000, 2, E)
    found = launched(step, routing, shape(4000, D), *OPERANDS)
    assert found == [(UNIT, results), (ROWS, 1), *again, *backward]
    call = lambda routing, *given: jaxops.moe_mlp(*given, routing, recipe="blockwise", save=save)
    assert launched(call, routing, *OPERANDS) == [(UNIT, 2), (ROWS, 1)]


# Groups of 1 to 300 rows, dropped choices, rows of other devices' experts; steps of K that are cut.
VARIANTS = {
    "shard": Variant(T=900, D=272, F=256, N=144, k=2, E=6, first=1, last=5, capacity=300, dtype="bfloat16"),
    "few": Variant(T=61, D=144, F=128, N=128, k=3, E=9, dtype="bfloat16", activation="gelu_tanh"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["preactivations", "nothing"])
@pytest.mark.parametrize("recipe", ["blockwise", "blockwise_with_gw_hp"])
@pytest.mark.parametrize("name", VARIANTS)
def test_bits(name, recipe, save):
    """The result and every gradient, of NaN in tokens without a row."""
    options_of("triton")  # skips where its device is missing
    variant = dataclasses.replace(VARIANTS[name], save=save)
    case = make_case(variant)
    run = functools.partial(compiled, variant, recipe, "gpu")
    *both, want = (run(plan=plan)(case) for plan in (INSIDE, GATHERED, AFTER))
    for got, key in itertools.product(both, NAMES):
        check_zeros(got, case["routing"])
        np.testing.assert_array_equal(bits_of(np.asarray(got[key])), bits_of(np.asarray(want[key])), err_msg=key)
    forward = jax.jit(
        lambda case, plan: jaxops.moe_mlp(
            *(case[key] for key in ("x", "w_gate", "w_up", "w_down")), case["routing"], activation=variant.activation,
            recipe=recipe, plan=plan,
        ),
        static_argnums=1,
    )  # fmt: skip
    for plan in (INSIDE, GATHERED):
        assert jnp.array_equal(forward(case, plan), want["out"])
