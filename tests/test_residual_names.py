"""Residuals have documented names that a `jax.checkpoint` policy sees; with all kept no forward runs again."""

import dataclasses
import functools
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxops
import jaxops.nn
from jaxops.offload import residual_bytes
from jaxops.offload.residuals import of_jaxops
from jaxops.ops import packed_attention
from jaxops.ops.adaln import Plan
from tests.anew import traced_anew
from tests.hopper import inlined
from tests.ops.packed_attention.cases import H200, cudnn_stand_in
from tests.parallel.cases import mesh_of, over

policies = jax.checkpoint_policies
T, K, N, E, D = 12, 4, 6, 3, 8
OFFSETS = jnp.array([0, 5, 5, 11], jnp.int32)  # one group is empty, one row outside
SEQUENCES = jnp.array([0, 5, 11], jnp.int32)
X, KN, NK, EKN, EKN2, ENK, BK = (T, K), (K, N), (N, K), (E, K, N), (E, K, 2 * N), (E, N, K), (2, K)
DOCUMENT = (pathlib.Path(__file__).parents[1] / "docs/residual_names.md").read_text()
DOCUMENTED = re.findall(r"^\| `([a-z0-9_]+\.[a-z_]+)` \|", DOCUMENT, re.MULTILINE)


class Case(NamedTuple):
    """f of float32 arrays of these shapes, all differentiated; the names that come with it."""

    f: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    names: set[str]


def named(op: str, names: str) -> set[str]:
    return {f"{op}.{name}" for name in names.split()}


ROUTING = jax.jit(jaxops.route, static_argnums=1)(np.sin(np.arange(T * E, dtype=np.float32)).reshape(T, E), 2)


def with_weights(weights: jax.Array) -> jaxops.Routing:
    return dataclasses.replace(ROUTING, weights=weights)


def layer(make: Callable[[nnx.Rngs], nnx.Module], *others) -> tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]:
    """A module as a function of its first argument and its parameters, and the parameters' shapes."""
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)
    leaves, tree = jax.tree.flatten(params)
    return lambda x, *params: nnx.merge(graphdef, jax.tree.unflatten(tree, params), rest)(x, *others), tuple(
        leaf.shape for leaf in leaves
    )


def layer_case(make: Callable[[nnx.Rngs], nnx.Module], names: set[str], *others) -> Case:
    f, shapes = layer(make, *others)
    return Case(f, ((T, K), *shapes), names)


def glu(x, gate, up=None, **how):
    return jaxops.grouped_glu(x, gate, up, OFFSETS, **how)


def mlp(x, weights, gate, up, down, **how):
    return jaxops.moe_mlp(x, gate, up, down, with_weights(weights), **how)


def fp8(x, w, **how):
    return jaxops.fp8_matmul(x, w, **how)


def moe(rngs: nnx.Rngs, **how) -> nnx.Module:
    router = jaxops.nn.Router(K, E, 2, rngs=rngs)
    return jaxops.nn.MoE(E, K, N, router=router, **how, rngs=rngs)


def shared_experts(rngs: nnx.Rngs, **how) -> nnx.Module:
    return jaxops.nn.SharedExperts(K, N, gated=True, **how, rngs=rngs)


def block(rngs: nnx.Rngs) -> nnx.Module:
    class Mixer(nnx.Module):
        def __call__(self, y, offsets):
            return jnp.tanh(y)

    return jaxops.nn.AdaLNZeroBlock(K, K, Mixer(), jnp.tanh, rngs=rngs)


QUANTIZED = jax.jit(lambda w: jaxops.quantize(w, scaling="block_128x128", layouts="both"))(np.ones(KN, np.float32))
HALF: dict[str, Any] = {"compute_dtype": jnp.bfloat16}
MLP = (X, (T, 2), EKN, EKN, ENK)
ADALN_BLOCK = named("gated_residual_adaln", "residual out") | {"modulation.out", "adaln.out", "gated_residual.out"}
CASES = {
    "adaln": Case(lambda *a: jaxops.adaln(*a, SEQUENCES), (X, BK, BK), {"adaln.out"}),
    "gated_residual": Case(lambda *a: jaxops.gated_residual(*a, SEQUENCES), (X, X, BK), {"gated_residual.out"}),
    "gated_residual_adaln": Case(
        lambda *a: jaxops.gated_residual_adaln(*a, SEQUENCES),
        (X, X, BK, BK, BK),
        named("gated_residual_adaln", "residual out"),
    ),
    "grouped_matmul": Case(lambda x, w: jaxops.grouped_matmul(x, w, OFFSETS), (X, EKN), {"grouped_matmul.out"}),
    "grouped_matmul-cast": Case(
        lambda x, w: jaxops.grouped_matmul(x, w, OFFSETS, **HALF), (X, EKN), named("grouped_matmul", "lhs out")
    ),
    "ragged_dot": Case(lambda x, w: jaxops.ragged_dot(x, w, jnp.diff(OFFSETS)), (X, EKN), {"grouped_matmul.out"}),
    "grouped_wgrad": Case(lambda x, d: jaxops.grouped_wgrad(x, d, OFFSETS), (X, (T, N)), {"grouped_wgrad.out"}),
    "modality_grouped_matmul-cast": Case(
        lambda x, *w: jaxops.modality_grouped_matmul(x, w, OFFSETS, **HALF),
        (X, (1, K, N), (2, K - 1, N)),
        named("modality_grouped_matmul", "lhs out"),
    ),
    "grouped_glu": Case(glu, (X, EKN, EKN), named("grouped_glu", "gate up out")),
    "grouped_glu-cast": Case(functools.partial(glu, **HALF), (X, EKN, EKN), named("grouped_glu", "x gate up out")),
    "grouped_glu-joint": Case(glu, (X, EKN2), named("grouped_glu", "gate_up out")),
    "grouped_glu-nothing": Case(functools.partial(glu, save="nothing"), (X, EKN, EKN), {"grouped_glu.out"}),
    "moe_mlp": Case(mlp, MLP, named("moe_mlp", "gate up out")),
    "moe_mlp-cast": Case(functools.partial(mlp, **HALF), MLP, named("moe_mlp", "x gate up out")),
    "moe_mlp-fp8": Case(
        functools.partial(mlp, recipe="rowwise"), MLP, named("moe_mlp", "w_gate_up w_down gate_up out")
    ),
    "moe_mlp-nothing": Case(functools.partial(mlp, save="nothing"), MLP, {"moe_mlp.out"}),
    "permute": Case(lambda x: jaxops.permute(x, ROUTING), (X,), {"permute.rows"}),
    "combine": Case(
        lambda rows, weights: jaxops.combine(rows, with_weights(weights)), ((2 * T, K), (T, 2)), {"combine.out"}
    ),
    "packed_attention": Case(
        lambda q, k, v: jaxops.packed_attention(q, k, v, SEQUENCES),
        ((T, 2, 8), (T, 1, 8), (T, 1, 8)),
        named("attention", "q k v out lse"),
    ),
    "route": Case(lambda logits: jaxops.route(logits, 2), ((T, E),), {"route.routing"}),
    "fp8_matmul": Case(functools.partial(fp8, recipe="tensorwise"), (X, KN), named("fp8_matmul", "lhs rhs out")),
    "fp8_matmul-blocks": Case(fp8, (X, KN), named("fp8_matmul", "lhs rhs out")),
    "fp8_matmul-gw_hp": Case(
        functools.partial(fp8, recipe="rowwise_with_gw_hp"), (X, KN), named("fp8_matmul", "lhs rhs out")
    ),
    "fp8_matmul-quantized_before": Case(
        lambda x, w: fp8(x, w, rhs_quantized=QUANTIZED), (X, KN), named("fp8_matmul", "lhs out")
    ),
    "fp8_grouped_matmul": Case(
        lambda x, w: jaxops.fp8_grouped_matmul(x, w, OFFSETS), (X, EKN), named("fp8_grouped_matmul", "lhs rhs out")
    ),
    "all_gather_matmul-cast": Case(
        over(mesh_of(1), "all_gather_matmul", **HALF), (X, KN), named("all_gather_matmul", "x out")
    ),
    "all_gather_matmul-gathered": Case(
        over(mesh_of(1), "all_gather_matmul", save="gathered"), (X, KN), named("all_gather_matmul", "rows out")
    ),
    "matmul_reduce_scatter-cast": Case(
        over(mesh_of(1), "matmul_reduce_scatter", **HALF), (X, KN), named("matmul_reduce_scatter", "h out")
    ),
    "Router": layer_case(lambda rngs: jaxops.nn.Router(K, E, 2, rngs=rngs), {"router.logits", "route.routing"}),
    "AdaRMSNorm": layer_case(
        lambda rngs: jaxops.nn.AdaRMSNorm(K, K, rngs=rngs), {"modulation.out", "adaln.out"}, jnp.ones(BK), SEQUENCES
    ),
    "AdaLNZeroBlock": layer_case(block, ADALN_BLOCK, jnp.ones(BK), SEQUENCES),
    "MoE": layer_case(
        moe,
        {"router.logits", "route.routing"} | named("moe_mlp", "gate up out"),
    ),
    "MoE-fp8": layer_case(
        functools.partial(moe, recipe="blockwise"),
        {"router.logits", "route.routing"} | named("moe_mlp", "w_gate_up w_down gate_up out"),
    ),
    "SharedExperts": layer_case(
        shared_experts,
        {"shared_experts.token_gate", "grouped_matmul.out"} | named("grouped_glu", "gate up out"),
    ),
    "SharedExperts-fp8": layer_case(
        functools.partial(shared_experts, recipe="blockwise"),
        {"shared_experts.token_gate"} | named("moe_mlp", "w_gate_up w_down gate_up out"),
    ),
}

# Compiled several times: one op for each kind of forward rule.
COMPILED = ("gated_residual_adaln", "grouped_glu", "moe_mlp", "packed_attention", "route", "fp8_matmul-blocks")


def arrays_of(case: Case, layers: tuple[int, ...] = ()) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(case.shapes))
    return [jax.random.normal(key, (*layers, *shape)) for key, shape in zip(keys, case.shapes, strict=True)]


def loss_of(f: Callable[..., Any]) -> Callable[..., jax.Array]:
    """The op's results are residuals of the sine."""

    def loss(*arrays):
        results = [leaf for leaf in jax.tree.leaves(f(*arrays)) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return functools.reduce(jnp.add, [jnp.sum(jnp.sin(leaf.astype(jnp.float32))) for leaf in results])

    return loss


def stats_case(op: Callable[..., Any], shapes) -> Case:
    plan = Plan("pallas", save_stats=True)
    return Case(lambda *a: op(*a, SEQUENCES, plan=plan), shapes, CASES[op.__name__].names | {f"{op.__name__}.stats"})


def cudnn_case() -> Case:
    """Of bfloat16, as on an H200, with a stand-in for JAX's private names."""

    def attend(*operands):
        with mock.patch.object(packed_attention.cudnn, "_private", cudnn_stand_in):
            halves = (x.astype(jnp.bfloat16) for x in operands)
            return jaxops.packed_attention(*halves, SEQUENCES, plan=packed_attention.Plan("cudnn", device=H200))

    return Case(attend, CASES["packed_attention"].shapes, {"attention.cudnn"})


# Traced and not run: residuals that only the kernels have.
KERNELS = {
    "packed_attention-cudnn": cudnn_case(),
    "adaln-stats": stats_case(jaxops.adaln, (X, BK, BK)),
    "gated_residual_adaln-stats": stats_case(jaxops.gated_residual_adaln, (X, X, BK, BK, BK)),
}


@pytest.mark.parametrize("name", [*CASES, *KERNELS])
def test_names(name):
    case = (CASES | KERNELS)[name]
    assert set(residual_bytes(case.f, *arrays_of(case))) == case.names


def test_the_table_has_all_names():
    assert len(DOCUMENTED) == len(set(DOCUMENTED))
    assert set(DOCUMENTED) == set(of_jaxops()) == set().union(*(case.names for case in (CASES | KERNELS).values()))


@pytest.mark.parametrize("op", sorted({name.split(".")[0] for name in DOCUMENTED} & set(jaxops.__all__)))
def test_docstrings_have_their_names(op):
    (paragraph,) = re.findall(r"^ *Residuals: (?:.+\n)+", getattr(jaxops, op).__doc__, re.MULTILINE)
    found = set(re.findall(r'"([a-z0-9_]+\.[a-z_]+)"', paragraph))
    assert found == {name for name in DOCUMENTED if name.split(".")[0] == op}


@pytest.mark.parametrize("name", COMPILED)
def test_without_a_gradient_nothing_changes(name):
    """Names add no instructions to a call that is not differentiated. Casts to FP8 have their own barriers."""
    case = CASES[name]
    text = jax.jit(case.f).lower(*arrays_of(case)).as_text()
    assert not [line for line in text.splitlines() if "optimization_barrier" in line and "f8E4M3FN" not in line]
    assert "annotate_device_placement" not in text


def passes() -> list[tuple[types.ModuleType, str]]:
    """(module, name) of the portable backend's passes, where an op imports them."""
    ops = [module for name, module in sys.modules.items() if name.startswith("jaxops.ops.")]
    return [
        (module, name)
        for module in ops
        for name, function in vars(module).items()
        if name.endswith("_xla") and callable(function) and function.__module__ != module.__name__
    ]


def marked(forward: Callable[..., Any]) -> Callable[..., Any]:
    """With a callback around its results: one for each pass in the program."""

    def run(*args, **options):
        leaves, tree = jax.tree.flatten(forward(*args, **options))
        return jax.tree.unflatten(
            tree,
            jax.pure_callback(
                lambda *leaves: leaves, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves], *leaves
            ),
        )

    return run


def passes_in(case: Case, **how) -> int:
    """The number of passes of a layer, forward and backward.

    In a scan over two layers whose body is under jit and, with a policy, under checkpoint.
    """
    body = jax.jit(loss_of(case.f))
    body = jax.checkpoint(body, **how) if how else body

    def loss(*arrays):
        return lax.scan(lambda total, layer: (total + body(*layer), None), jnp.float32(0), arrays)[0]

    step = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(case.shapes)))))
    return len(re.findall("custom_call @.*callback", inlined(step.lower(*arrays_of(case, (2,))).as_text())))


@pytest.mark.parametrize("name", COMPILED)
def test_a_policy_that_saves_the_names_runs_no_pass_again(name, monkeypatch):
    for module, function in passes():
        monkeypatch.setattr(module, function, marked(getattr(module, function)))
    case = CASES[name]
    with traced_anew():
        once, kept = passes_in(case), passes_in(case, policy=policies.save_only_these_names(*case.names))
        again = passes_in(case, policy=policies.nothing_saveable)
    assert 0 < once == kept < again, (once, kept, again)


@pytest.mark.parametrize("name", COMPILED)
def test_gradients_are_the_same(name):
    """Bit-equal for every policy. (On a CPU host memory is device memory.)"""
    case = CASES[name]
    # Some without XLA's fusions, which on a CPU contract products and sums: a value that both passes compute from a
    # kept input, such as a norm in the portable backward, would be rounded differently in each program.
    compile_with = (
        {"xla_disable_hlo_passes": "fusion"} if case.names & {"adaln.out", "gated_residual_adaln.out"} else {}
    )
    on_host = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=sorted(case.names),
        offload_src="device",
        offload_dst="pinned_host",
    )
    ways = {"recompute": policies.nothing_saveable, "keep on the host": on_host}
    arrays, wrt = arrays_of(case), tuple(range(len(case.shapes)))
    want = jax.jit(jax.grad(loss_of(case.f), argnums=wrt), compiler_options=compile_with)(*arrays)
    assert any(np.asarray(gradient).any() for gradient in want)
    for way, policy in ways.items():
        got = jax.jit(
            jax.grad(jax.checkpoint(loss_of(case.f), policy=policy), argnums=wrt), compiler_options=compile_with
        )(*arrays)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=way)
