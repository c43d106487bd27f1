"""Plans of moe_mlp: the plans of its parts; the kernels of a call on a GPU. The Triton kernels: test_triton.py."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import jaxops
from jaxops._lib.planning.device import Device
from jaxops.ops import grouped_glu, grouped_matmul, moe_mlp, permute
from jaxops.ops.moe_mlp import Plan, Problem, TileOrder
from tests.hopper import lower_for_h200
from tests.plans import by_choices, choices

pytestmark = pytest.mark.versions

make_plan = by_choices(moe_mlp.make_plan)

H200, L4, CPU = Device("NVIDIA H200", "gpu"), Device("NVIDIA L4", "gpu"), Device("cpu", "cpu")
PROBLEM = Problem(4096, 2, 8, 1024, 3584, 1024, "bfloat16")
UNIT = grouped_glu.Problem(8, 8192, 1024, 3584, "bfloat16")
DOWN = grouped_matmul.Problem(8, 8192, 3584, 1024, "bfloat16")
ROWS = permute.Problem(4096, 1024, 2, "bfloat16")


@pytest.mark.parametrize(
    ("device", "backend"), [(L4, "pallas"), (L4, "xla"), (H200, "pallas"), (H200, "xla"), (CPU, "pallas")], ids=str
)
def test_the_parts_are_the_ops_own_plans(device, backend):
    """Which backend "auto" takes where: tests/contracts/test_devices.py."""
    unit, down, rows = (
        make(problem, device, backend=backend)
        for make, problem in (
            (grouped_glu.make_plan, UNIT),
            (grouped_matmul.make_plan, DOWN),
            (permute.make_plan, ROWS),
        )
    )
    expected = choices(Plan(backend, unit, down, rows, None, gather=False))  # pyright: ignore[reportArgumentType]
    assert make_plan(PROBLEM, device, backend=backend) == make_plan(PROBLEM, device, plan=Plan(backend)) == expected


def test_explicit_plans_are_obeyed():
    """And filled, also in the parts that they give."""
    tiles = grouped_matmul.Tiles(16, 16, 16)
    given = Plan("pallas", grouped_glu.Plan("xla"), grouped_matmul.Plan("pallas", wgrad=tiles), permute.Plan("xla"))
    plan = make_plan(PROBLEM, L4, plan=given)
    assert (plan.backend, plan.unit, plan.rows, plan.fused) == (
        "pallas",
        choices(grouped_glu.make_plan(UNIT, L4, backend="xla")),
        permute.Plan("xla"),
        None,
    )
    chosen = grouped_matmul.make_plan(DOWN, L4)
    assert plan.down == grouped_matmul.Plan("pallas", chosen.fwd, chosen.dgrad, tiles)
    unit = make_plan(PROBLEM, L4, plan=Plan(unit=grouped_glu.Plan(bwd=grouped_glu.Tiles(1, 64, 1)))).unit
    assert unit == choices(grouped_glu.make_plan(UNIT, L4, plan=grouped_glu.Plan(bwd=grouped_glu.Tiles(1, 64, 1))))
    assert "bwd=Tiles(rows=1, columns=64, warps=1), products=Plan(backend='pallas'" in str(unit)
    # Only the triton backend has that kernel.
    assert make_plan(PROBLEM, L4, plan=Plan("pallas", fused=TileOrder())) == make_plan(PROBLEM, L4)
    with pytest.raises(ValueError, match="contradicts"):
        make_plan(PROBLEM, L4, backend="xla", plan=given)


def test_few_rows_are_gathered():
    few = dataclasses.replace(PROBLEM, T=64)
    assert make_plan(few, L4).gather is True
    assert make_plan(few, L4, plan=Plan(gather=False)).gather is False
    assert make_plan(few, L4, plan=Plan(unit=grouped_glu.Plan("xla"))).gather is False
    for problem, plan in ((PROBLEM, Plan(gather=True)), (few, Plan("xla", gather=True))):
        with pytest.raises(NotImplementedError, match=r"plan\.unit has none: leave out gather"):
            make_plan(problem, L4, plan=plan)


FWD, DGRAD, WGRAD = (f"grouped_matmul_{name}" for name in ("fwd", "dgrad", "wgrad"))


ONE, ALL = ["grouped_glu_fused"], ["permute", FWD, FWD, "grouped_glu_fwd"]


@pytest.mark.parametrize(
    ("T", "save", "unit", "again"),
    [
        (40, "preactivations", ALL, []),
        (40, "nothing", ALL, ALL[:3]),
        (32, "preactivations", ONE, []),
        (32, "nothing", ONE, ONE),
    ],
)
def test_a_call_is_these_kernels(T, save, unit, again):
    """Beside those that list the products' work; nothing else stands there but what XLA compiles. With at most 16 rows
    for each expert, the forward copies no rows."""

    def both(logits, dout, *operands):
        routing = jaxops.route(logits, 2, backend="xla")
        out, vjp = jax.vjp(lambda *operands: jaxops.moe_mlp(*operands, routing, save=save, backend="pallas"), *operands)
        return out, vjp(dout)

    s = jax.ShapeDtypeStruct
    shapes = [(T, 64), (4, 64, 96), (4, 64, 96), (4, 96, 32)]
    text = lower_for_h200(
        both, s((T, 4), jnp.float32), s((T, 32), jnp.bfloat16), *(s(shape, jnp.bfloat16) for shape in shapes)
    )
    names = re.findall(r'name = "((?:permute|grouped|combine|schedule)\w*)"', text)
    assert text.count("__gpu$xla.gpu.triton") == len(names)
    forward, backward = (
        [*unit, FWD, "combine"],
        ["permute", DGRAD, WGRAD, "permute", WGRAD, WGRAD, DGRAD, DGRAD, "permute_bwd"],
    )
    assert sorted(name for name in names if name[:8] != "schedule") == sorted(forward + again + backward)
