"""Hopper's kernels, for an H200 without one: the backward's compiled, when plans choose them, the kernels of a call.

Their numbers: tests/ops/hopper_cases.py, and of whole calls on a GPU test_values.py.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

import jaxops
from jaxops._lib.planning.device import Device
from jaxops.ops import grouped_glu, grouped_matmul
from jaxops.ops.moe_mlp import Plan, Problem, TileOrder, make_plan
from jaxops.ops.moe_mlp.bwd_triton import bwd_triton
from tests.arrays import shape
from tests.gluon import SHARED_BYTES, Kernel, check, compiled, kernel_calls
from tests.hopper import on_h200

pytestmark = pytest.mark.versions

R, D, F, E = 1000, 528, 784, 3  # no whole tiles; the kernel does not depend on them
H200 = Device("NVIDIA H200", "gpu")
PROBLEM = Problem(4096, 2, 8, 1024, 3584, 1024, "bfloat16")


def routing_of(T: int, k: int, E: int) -> jaxops.Routing:
    return jax.eval_shape(lambda logits: jaxops.route(logits, k, backend="xla"), shape(T, E, dtype="float32"))


def backward(activation: str = "silu", joined: bool = False, dtype: str = "bfloat16") -> Kernel:
    how = {"activation": activation, "panel": 4}
    pre = (shape(R, 2 * F, dtype=dtype),) if joined else (shape(R, F, dtype=dtype),) * 2
    operands = (
        shape(R, D, dtype=dtype),
        shape(E, F, D, dtype=dtype),
        pre,
        shape(R, dtype="float32"),
        shape(E + 1, dtype="int32"),
    )
    (kernel,) = compiled(lambda *operands: bwd_triton(*operands, **how, cores=132), *operands)
    return kernel


@pytest.mark.parametrize(("activation", "joined", "spilled"), [("silu", False, 160), ("swiglu_oai", True, 240)])
def test_kernel(activation, joined, spilled, tmp_path):
    """A consumer multiplies its 128 rows, 64 at a time, by 128 columns, 64 of D in four instructions."""
    kernel = backward(activation, joined)
    # A quarter of a tile is activated while the sums of the others wait in registers: a few that do not fit go out and
    # come back once a tile, not in the loop that multiplies.
    check(kernel, ["m64n128k16.f32.bf16.bf16"] * 16, 2, SHARED_BYTES, tmp_path, spilled=spilled)
    assert "cp.async.bulk.tensor.3d.global.shared" in kernel.ptx  # whole pieces leave by TMA,
    assert "st.global.v4" in kernel.ptx  # others 16 bytes a thread


OPERANDS = (shape(500, D), shape(E, D, F), shape(E, D, F), shape(E, F, D))


def launched(fn, *shapes) -> list[tuple[str, int]]:
    """The Gluon kernels of fn, in order: name and how many results each writes."""
    # Neither the work list, in which programs count, nor the parts of a weight gradient's split sums.
    inner = lambda call, x: x.dtype == jnp.int32 or (call.params["name"] == WGRAD and x.ndim == 1)
    results = lambda call: [var for var in call.outvars if not inner(call, var.aval)]
    return [(call.params["name"], len(results(call))) for call in kernel_calls(fn, *shapes)]


FWD, DGRAD, WGRAD = (f"grouped_matmul_{name}" for name in ("fwd", "dgrad", "wgrad"))


@pytest.mark.parametrize(("save", "kept"), [("preactivations", 3), ("nothing", 1)])
def test_a_users_call(save, kept):
    """ "auto" takes these kernels on an H200. The gradient of x is one product; gate and up are written only if a
    backward reads them."""

    def gradients(routing, dout, *operands):
        def forward(weights, *given):
            return jaxops.moe_mlp(*given, dataclasses.replace(routing, weights=weights), save=save)

        return jax.vjp(forward, routing.weights, *operands)[1](dout)

    again = [("grouped_glu_fwd", 3)] * (save == "nothing")
    backward = [("moe_mlp_bwd", 4), (WGRAD, 1), (DGRAD, 1), (WGRAD, 1), (WGRAD, 1)]
    assert launched(gradients, routing_of(500, 2, E), shape(500, D), *OPERANDS) == [
        ("grouped_glu_fwd", kept),
        (FWD, 1),
        *again,
        *backward,
    ]
    assert launched(
        lambda routing, *given: jaxops.moe_mlp(*given, routing, save=save), routing_of(500, 2, E), *OPERANDS
    ) == [("grouped_glu_fwd", 1), (FWD, 1)]


@pytest.mark.parametrize("form", ["joined", "alone"])
def test_other_forms_of_weights(form):
    """Gate and up in one array are one product each, forward, for x, and for the weights, and nothing cuts or joins
    arrays of their size. Without a gate the activation is XLA's."""
    x, w, _, w_down = OPERANDS
    biases = (shape(E, 2 * F), None, shape(E, D)) if form == "joined" else (None, shape(E, F), shape(E, D))
    weights = (shape(E, D, 2 * F), None) if form == "joined" else (None, w)

    def gradients(routing, dout, x, weights, w_down, biases):
        call = lambda x, weights, w_down, biases: jaxops.moe_mlp(x, *weights, w_down, routing, biases=biases)
        return jax.vjp(call, x, weights, w_down, biases)[1](dout)

    given = (routing_of(500, 2, E), shape(500, D), x, weights, w_down, biases)
    inner = [("grouped_glu_fwd", 2), (FWD, 1), ("moe_mlp_bwd", 3)]
    outer = [(FWD, 1), (FWD, 1), (DGRAD, 1)]
    assert launched(gradients, *given) == [*(inner if form == "joined" else outer), (WGRAD, 1), (DGRAD, 1), (WGRAD, 1)]
    with on_h200():
        text = str(jax.make_jaxpr(gradients)(*given))
    assert not re.search(r"bf16\[(1000|3,528),(784|1568)\] = (concatenate|pad|slice|split)", text)


@pytest.mark.parametrize("empty", ["E", "T"])
def test_nothing_to_do_launches_nothing(empty):
    """A device without experts, and a batch without tokens: there is nothing that TMA could be pointed at."""

    def gradients(routing, dout, *operands):
        return jax.vjp(lambda *given: jaxops.moe_mlp(*given, routing, backend="triton"), *operands)[1](dout)

    T, G = (0, 2) if empty == "T" else (16, 0)
    routing = dataclasses.replace(routing_of(T, 2, 2), group_offsets=shape(G + 1, dtype="int32"))
    assert (
        launched(gradients, routing, shape(T, 64), shape(T, 64), shape(G, 64, 64), shape(G, 64, 64), shape(G, 64, 64))
        == []
    )


def test_plan():
    plan = make_plan(PROBLEM, H200)
    assert plan == make_plan(PROBLEM, H200, backend="triton") == make_plan(PROBLEM, H200, plan=Plan("triton"))
    assert (plan.backend, plan.fused, plan.rows.backend) == ("triton", TileOrder(8), "pallas")
    unit = grouped_glu.Problem(8, 8192, 1024, 3584, "bfloat16")
    down = grouped_matmul.Problem(8, 8192, 3584, 1024, "bfloat16")
    assert plan.unit == grouped_glu.make_plan(unit, H200, backend="triton")
    assert plan.down == grouped_matmul.make_plan(down, H200, backend="triton")
    assert make_plan(PROBLEM, H200, plan=Plan("triton", fused=TileOrder(2))).fused == TileOrder(2)
    # Filled, and nothing of it is lost.
    assert make_plan(PROBLEM, H200, plan=Plan("pallas", unit=grouped_glu.Plan("triton"))).unit == plan.unit


def test_which_rows_are_gathered():
    """Of narrow experts with groups of some rows; never what does not come in whole steps of 64 columns."""
    narrow = dataclasses.replace(PROBLEM, F=2048)
    assert (make_plan(PROBLEM, H200).gather, make_plan(narrow, H200).gather) == (False, True)
    for change in ({"E": 64}, {"D": 1032}):
        assert make_plan(dataclasses.replace(narrow, **change), H200).gather is False
    assert make_plan(PROBLEM, H200, plan=Plan("triton", gather=True)).gather is True
    assert make_plan(narrow, H200, plan=Plan("triton", gather=False)).gather is False
    with pytest.raises(NotImplementedError, match="64 columns at a time, and x has D = 1032"):
        make_plan(dataclasses.replace(PROBLEM, D=1032), H200, plan=Plan("triton", gather=True))


def test_what_auto_leaves_to_the_others():
    """Tiny groups (31 rows), other dtypes, rows not aligned to 16 bytes: the ops inside choose by themselves."""
    joined = {"form": "joined", "F": 3580}
    for change in ({"E": 265}, {"dtype": "float32"}, {"N": 1020}, {"F": 3580}, {"D": 1020}, joined):
        plan = make_plan(dataclasses.replace(PROBLEM, **change), H200)
        assert (plan.backend, plan.fused) == ("pallas", None)
        if "N" in change:
            assert (plan.unit.backend, plan.down.backend) == ("triton", "pallas")
    assert make_plan(dataclasses.replace(PROBLEM, E=265), H200, backend="triton").backend == "triton"


@pytest.mark.parametrize(
    ("change", "device", "says"),
    [
        ({}, Device("NVIDIA L4", "gpu"), "needs a Hopper GPU.*NVIDIA L4"),
        ({"dtype": "float32"}, H200, "this is float32"),
        ({"D": 500}, H200, "K=500"),
        ({"F": 700}, H200, "N=700"),
        ({"N": 700}, H200, "N=700"),
    ],
    ids=["card", "float32", "D", "F", "N"],
)
def test_what_it_cannot(change, device, says):
    problem = dataclasses.replace(PROBLEM, **change)
    parts = Plan("triton", grouped_glu.Plan("xla"), grouped_matmul.Plan("xla"), fused=TileOrder())
    for plan in (Plan("triton"), parts):
        with pytest.raises(NotImplementedError, match=says):
            make_plan(problem, device, plan=plan)


def test_without_a_gate():
    alone = dataclasses.replace(PROBLEM, form="alone")
    plan, unit = make_plan(alone, H200), grouped_matmul.Problem(8, 8192, 1024, 3584, "bfloat16")
    assert (plan.backend, plan.fused, plan.gather) == ("triton", None, False)
    assert plan.unit == grouped_matmul.make_plan(unit, H200, backend="triton")
    for given in ({"fused": TileOrder()}, {"gather": True}):
        with pytest.raises(NotImplementedError, match="without a gate have no kernel for fused or gather"):
            make_plan(alone, H200, plan=Plan("triton", **given))
