"""Residuals have documented names that a `jax.checkpoint` policy sees; with all kept no forward runs again."""

import collections
import functools
import pathlib
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxops
from jaxops.offload import residual_bytes
from jaxops.offload.residuals import OF_LAYERS, of_jaxops
from jaxops.ops import adaln, packed_attention
from tests.arrays import f32
from tests.contracts.entry import FUNCTIONS, Op
from tests.contracts.layers import LAYERS, MAKERS
from tests.contracts.ops import OPS
from tests.contracts.run import EVERYTHING, is_float, parts, small
from tests.hopper import on_h200
from tests.jaxprs import equations
from tests.ops.packed_attention.cases import H200, cudnn_stand_in

DOCUMENT = (pathlib.Path(__file__).parents[2] / "docs/residual_names.md").read_text("utf-8")
DOCUMENTED = re.findall(r"^\| `([a-z0-9_]+\.[a-z_]+)` \|", DOCUMENT, re.MULTILINE)


def named(op: Op, held: dict, others: dict, **how: Any) -> set[str]:
    return set(residual_bytes(lambda held: op.call(held | others, **how), held))


XLA, HALF = {"backend": "xla"}, {"backend": "xla", "compute_dtype": jnp.bfloat16}
STATS = {"plan": adaln.Plan("pallas", save_stats=True)}
# Of an op: options with which it has, together, all of its names.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    **{name: [XLA, STATS] for name in ("adaln", "gated_residual_adaln")},
    **{name: [XLA, HALF] for name in ("grouped_matmul", "modality_grouped_matmul", "matmul_reduce_scatter")},
    "grouped_glu": [XLA, HALF, XLA | {"save": "nothing"}],
    "moe_mlp": [XLA, HALF, XLA | {"recipe": "rowwise"}, XLA | {"save": "nothing"}],
    "fp8_matmul": [XLA, XLA | {"recipe": "tensorwise"}, XLA | {"recipe": "rowwise_with_gw_hp"}],
    "linear_cross_entropy": [{}],
    "all_gather_matmul": [XLA, HALF, XLA | {"save": "gathered"}],
}
ELSEWHERE = {"grouped_glu.gate_up", "attention.cudnn"}  # of other operands, below
CASTS = {".lhs", ".x", ".h"}


@pytest.mark.parametrize("name", [op.name for op in OPS if FUNCTIONS[op.name].residuals])
def test_names(name):
    """With nothing saved, the result alone."""
    op, residuals = EVERYTHING[name], set(FUNCTIONS[name].residuals)
    without = {"biases": None}  # which a recipe has not
    given = lambda how: small(op) | (without if "recipe" in how and "biases" in op.wrt else {})
    each = [(how, named(op, *parts(op, given(how)), **how)) for how in OPTIONS.get(name, [XLA])]
    assert set().union(*(names for _, names in each)) == residuals - ELSEWHERE
    if HALF in OPTIONS.get(name, []):
        assert each[0][1] == {x for x in each[1][1] if x[x.index(".") :] not in CASTS}
    assert all(names == {f"{name}.out"} for how, names in each if how.get("save") == "nothing")


def test_names_of_ragged_dot():
    op = EVERYTHING["ragged_dot"]
    assert named(op, *parts(op, small(op)), **XLA) == {"grouped_matmul.out"}


def test_names_of_other_operands():
    """Gate and up in one array; rhs quantized before."""
    glu, product = EVERYTHING["grouped_glu"], EVERYTHING["fp8_matmul"]
    given = small(glu)
    held = {"x": given["x"], "w_gate": given["w_gate"]}
    others = {"w_up": None, "group_offsets": given["group_offsets"]}
    assert named(glu, held, others, **XLA) == {"grouped_glu.gate_up", "grouped_glu.out"}
    held = small(product)
    quantized = jax.jit(lambda w: jaxops.quantize(w, scaling="block_128x128", layouts="both"))(held["rhs"])
    assert named(product, held, {}, **XLA, rhs_quantized=quantized) == {"fp8_matmul.lhs", "fp8_matmul.out"}


def test_names_of_cudnn():
    """In bfloat16, as on an H200, with a stand-in for JAX's private names."""
    op = EVERYTHING["packed_attention"]
    q, k, v = ({name: f32(12, heads, 8) for name, heads in (("q", 2), ("k", 1), ("v", 1))}).values()

    def attend(*operands):
        with mock.patch.object(packed_attention.cudnn, "_private", cudnn_stand_in):
            halves = (x.astype(jnp.bfloat16) for x in operands)
            plan = packed_attention.Plan("cudnn", device=H200)
            return jaxops.packed_attention(*halves, jnp.array([0, 5, 11], jnp.int32), plan=plan)

    assert set(residual_bytes(attend, q, k, v)) == {"attention.cudnn"} <= set(FUNCTIONS[op.name].residuals)


# Of a layer: options, and what it names beside the op that does its work.
OF_EACH_LAYER: list[tuple[str, dict[str, Any], set[str]]] = [
    ("Router", {}, {"router.logits", "route.routing"}),
    ("AdaRMSNorm", {}, {"modulation.out", "adaln.out"}),
    ("AdaLNZeroBlock", {}, {"modulation.out", "adaln.out", "gated_residual.out", "gated_residual_adaln.residual",
                            "gated_residual_adaln.out"}),
    ("MoE", {}, {"router.logits", "route.routing", "moe_mlp.gate", "moe_mlp.up", "moe_mlp.out"}),
    ("SharedExperts", {}, {"shared_experts.token_gate", "grouped_matmul.out", "grouped_glu.gate", "grouped_glu.up",
                           "grouped_glu.out"}),
    ("SharedExperts", {"recipe": "blockwise"}, {"shared_experts.token_gate", "moe_mlp.w_gate_up", "moe_mlp.w_down",
                                                "moe_mlp.gate_up", "moe_mlp.out"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "how", "names"), OF_EACH_LAYER, ids=lambda x: x if isinstance(x, str) else None)
def test_names_of_layers(name, how, names):
    op = next(layer for layer in LAYERS if layer.name == f"nn.{name}")
    arguments = small(op)
    others = [arguments[each] for each in op.shapes(op.sizes) if each not in ("x", "params")]
    graphdef, params = nnx.split(nnx.eval_shape(lambda: MAKERS[name](nnx.Rngs(0), **how)))
    call = lambda params, x: nnx.merge(graphdef, params)(x, *others)
    assert set(residual_bytes(call, params, arguments["x"])) == names


def test_the_table_has_all_names():
    of_ops = {name for function in FUNCTIONS.values() for name in function.residuals}
    of_layers = set().union(*(names for _, _, names in OF_EACH_LAYER)) - of_ops
    assert of_ops | of_layers == set(of_jaxops()) == set(DOCUMENTED)
    assert of_layers == set(OF_LAYERS)
    assert len(DOCUMENTED) == len(set(DOCUMENTED))


@pytest.mark.parametrize("name", [op.name for op in OPS if FUNCTIONS[op.name].residuals])
def test_docstrings_have_their_names(name):
    function = FUNCTIONS[name]
    (paragraph,) = re.findall(r"^ *Residuals: (?:.+\n)+", function.function.__doc__ or "", re.MULTILINE)
    assert set(re.findall(r'"([a-z0-9_]+\.[a-z_]+)"', paragraph)) == set(function.residuals)


WITH_KERNELS = [op.name for op in OPS if op.pallas and FUNCTIONS[op.name].residuals]


def loss_of(op: Op, others: dict):
    """The op's results are residuals of the sine."""

    def loss(held):
        results = jax.tree.leaves(op.call(held | others, backend="pallas"))
        floats = [jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in results if is_float(x)]
        return functools.reduce(jnp.add, floats)

    return loss


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_a_policy_that_saves_the_names_runs_no_kernel_again(name):
    """Nor does it without `jax.checkpoint`; a policy that saves nothing runs the forward's again. Lists of work have no
    name. Of a body that is under jit."""
    op = EVERYTHING[name]
    held, others = parts(op, small(op))
    policies = jax.checkpoint_policies

    def kernels(**how: Any) -> collections.Counter[str]:
        body = jax.jit(loss_of(op, others))
        step = jax.value_and_grad(jax.checkpoint(body, **how) if how else body)
        with on_h200():
            calls = [x for x in equations(jax.make_jaxpr(step)(held).jaxpr) if x.primitive.name == "pallas_call"]
        names = (call.params["name"] for call in calls)
        return collections.Counter(name for name in names if not name.startswith("schedule_"))

    once = kernels()
    kept = kernels(policy=policies.save_only_these_names(*FUNCTIONS[name].residuals))
    again = kernels(policy=policies.nothing_saveable)
    assert once == kept
    assert once < again


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_without_a_gradient_nothing_changes(name):
    """Names add no instructions to a call that is not differentiated. Casts to FP8 have their own barriers."""
    op = EVERYTHING[name]
    held, others = parts(op, small(op))
    text = jax.jit(lambda held: op.call(held | others, **XLA)).lower(held).as_text()
    assert not [line for line in text.splitlines() if "optimization_barrier" in line and "f8E4M3FN" not in line]
