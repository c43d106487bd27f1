"""The list's layers: each as a function of its parameters and inputs."""

import contextlib
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxops.nn
from tests.arrays import f32, i32
from tests.contracts.entry import EXACT, Arguments, Dims, Op, random_offsets, reference, rows_outside
from tests.contracts.ops import fp8_expected
from tests.parallel.cases import mesh_of

IN, OUT, COND, HIDDEN, EXPERTS = 12, 8, 6, 20, 4
WAYS: dict[str, dict[str, Any]] = {"xla": {"backend": "xla"} | EXACT, "interpret": {"backend": "pallas"} | EXACT}


def plainly(precision: str | None) -> contextlib.AbstractContextManager:
    """Flax's own products in this precision; None as it is set for the process."""
    return contextlib.nullcontext() if precision is None else jax.default_matmul_precision(precision)


class Mixer(nnx.Module):
    def __call__(self, y, sequence_offsets):
        return jnp.sin(y)


def mlp(x: jax.Array) -> jax.Array:  # can be pickled, as jnp.tanh cannot
    return jnp.tanh(x)


def norm(kind: type, rngs: nnx.Rngs, **how) -> nnx.Module:
    return kind(IN, COND, epsilon=0.1, use_weight=True, rngs=rngs, **how)


def block(rngs: nnx.Rngs, **how) -> nnx.Module:
    return jaxops.nn.AdaLNZeroBlock(IN, COND, Mixer(), mlp, epsilon=0.1, rngs=rngs, **how)


def moe(rngs: nnx.Rngs, **how) -> nnx.Module:
    backend = {name: value for name, value in how.items() if name == "backend"}
    router = jaxops.nn.Router(IN, EXPERTS, 2, rngs=rngs, **backend)
    how = {"activation": "swiglu_oai", "use_bias": True} | how
    return jaxops.nn.MoE(EXPERTS, IN, HIDDEN, router=router, rngs=rngs, **how)


class OnOneDevice(nnx.Module):
    """A layer across devices, in a `jax.shard_map` over one."""

    def __init__(self, layer: nnx.Module):
        self.layer = layer

    def __call__(self, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(self.layer)
        mesh = mesh_of(1)
        return jax.shard_map(
            lambda state, x: nnx.merge(graphdef, state)(x), mesh=mesh, in_specs=P(), out_specs=P("tensor")
        )(state, x)


def parallel(kind: type, rngs: nnx.Rngs, **how) -> nnx.Module:
    return OnOneDevice(kind(IN, OUT, "tensor", rngs=rngs, **how))


def attention(rngs: nnx.Rngs, **how) -> nnx.Module:
    # Without biases: the gradient of the keys' is zero but for rounding.
    linear = functools.partial(nnx.Linear, use_bias=False)
    return jaxops.nn.PackedAttention(4, IN, num_kv_heads=2, causal=True, linear=linear, rngs=rngs, **how)


MAKERS = {
    "PackedAttention": attention,
    "AdaLayerNorm": functools.partial(norm, jaxops.nn.AdaLayerNorm),
    "AdaRMSNorm": functools.partial(norm, jaxops.nn.AdaRMSNorm),
    "AdaLNZeroBlock": block,
    "ColumnParallelLinear": functools.partial(parallel, jaxops.nn.ColumnParallelLinear),
    "RowParallelLinear": functools.partial(parallel, jaxops.nn.RowParallelLinear),
    "Fp8Linear": lambda rngs, **how: jaxops.nn.Fp8Linear(IN, OUT, rngs=rngs, **how),
    "GroupedLinear": lambda rngs, **how: jaxops.nn.GroupedLinear(EXPERTS, IN, OUT, rngs=rngs, **how),
    "GroupedLinear-fp8": lambda rngs, **how: jaxops.nn.GroupedLinear(
        EXPERTS, IN, OUT, recipe="blockwise", rngs=rngs, **how
    ),
    "MoE": moe,
    "SharedExperts": lambda rngs, **how: jaxops.nn.SharedExperts(IN, HIDDEN, gated=True, rngs=rngs, **how),
    "Router": lambda rngs, **how: jaxops.nn.Router(IN, EXPERTS, 2, use_bias=True, rngs=rngs, **how),
}


@functools.cache
def split(name: str, **how) -> tuple[Any, Any]:
    """(graphdef, shapes of the state)"""
    return nnx.split(nnx.eval_shape(lambda: MAKERS[name](nnx.Rngs(0), **how)))


def layer(name: str, inputs: dict[str, Any], sizes: Dims, result=None, **more) -> Op:
    """inputs: shapes by name, of sizes, in the order in which the layer is called with them. result: (parameters,
    arguments) -> the reference's."""

    def call(a: Arguments, precision: str | None = None, **how):
        own = (
            {"precision": precision}
            if name in ("GroupedLinear", "MoE", "SharedExperts", "ColumnParallelLinear", "RowParallelLinear")
            else {}
        )
        with plainly(precision):
            return nnx.merge(split(name, **how, **own)[0], a["params"])(*(a[given] for given in inputs(sizes)))

    return Op(
        f"nn.{name}", call, lambda d: inputs(d) | {"params": split(name, backend="xla")[1]}, sizes, WAYS,
        None if result is None else lambda a: result(nnx.to_pure_dict(a["params"]), a),
        wrt=more.pop("wrt", ("x", "params")), local=more.pop("local", tuple(inputs(sizes))), **more,
    )  # fmt: skip


def head(p: dict, cond: jax.Array, parts: int) -> list[jax.Array]:
    made = (
        jnp.matmul(jax.nn.silu(cond), p["modulation"]["kernel"], precision="highest") + p["modulation"]["bias"][None, :]
    )
    return jnp.split(made, parts, axis=1)


def norm_reference(kind: str, p: dict, a: Arguments) -> jax.Array:
    scale, shift = head(p, a["cond"], 2)
    options = {"norm": kind, "weight": p["weight"], "epsilon": 0.1}
    return reference("adaln", x=a["x"], scale=scale, shift=shift, sequence_offsets=a["sequence_offsets"], **options)


def block_reference(p: dict, a: Arguments) -> jax.Array:
    def branch(x: jax.Array, scale: jax.Array, shift: jax.Array, gate: jax.Array, inner) -> jax.Array:
        o = {"sequence_offsets": a["sequence_offsets"]}
        h = inner(reference("adaln", x=x, scale=scale, shift=shift, epsilon=0.1, **o))
        return reference("gated_residual", residual=x, h=h, gate=gate, **o)

    made = head(p, a["cond"], 6)
    return branch(branch(a["x"], *made[:3], jnp.sin), *made[3:], jnp.tanh)


def attention_reference(p: dict, a: Arguments) -> jax.Array:
    row = jnp.arange(a["x"].shape[0])
    o = a["sequence_offsets"]
    x = jnp.where(((o[0] <= row) & (row < o[-1]))[:, None], a["x"], 0)

    def product(name: str, x: jax.Array) -> jax.Array:
        return jnp.matmul(x, p[name]["kernel"], precision="highest")

    heads = (("query", 4), ("key", 2), ("value", 2))
    q, k, v = (product(name, x).reshape(x.shape[0], N, IN // 4) for name, N in heads)
    mixed = reference("packed_attention", q=q, k=k, v=v, sequence_offsets=o, causal=True)
    return product("out", mixed.reshape(x.shape))


def router_reference(p: dict, x: jax.Array) -> jaxops.Routing:
    logits = jnp.matmul(x, p["kernel"], precision="highest")
    return reference("route", logits=logits, k=2, selection_bias=p.get("selection_bias"))


def moe_reference(p: dict, a: Arguments) -> tuple[jax.Array, jaxops.Routing]:
    routing = router_reference(p["router"], a["x"])
    weights = {f"w_{name}": p[name] for name in ("gate", "up", "down")}
    weights |= {"biases": tuple(p[f"{name}_bias"] for name in ("gate", "up", "down")), "activation": "swiglu_oai"}
    return reference("moe_mlp", x=a["x"], routing=routing, **weights), routing


def shared_experts_reference(p: dict, a: Arguments) -> jax.Array:
    x = a["x"]
    with jax.default_matmul_precision("highest"):
        y = (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]
        return y * jax.nn.sigmoid(x @ p["token_gate"])


def fp8_linear_expected(a: Arguments, cotangents: list) -> tuple[Any, Arguments]:
    p, dy = nnx.to_pure_dict(a["params"]), np.asarray(cotangents[0])
    y, gradients = fp8_expected("x", "w")(a | {"w": p["kernel"]}, cotangents)
    if "group_offsets" in a:
        o = np.asarray(a["group_offsets"])
        of_row = np.stack(
            [(np.arange(len(y)) >= lo) & (np.arange(len(y)) < hi) for lo, hi in itertools.pairwise(o)]
        ).astype(np.float64)
        dbias, y = of_row @ np.where(of_row.any(axis=0)[:, None], dy, 0), y + of_row.T @ np.asarray(p["bias"])
    else:
        dbias, y = dy.sum(axis=0), y + np.asarray(p["bias"])
    params = jax.tree.unflatten(jax.tree.structure(a["params"]), [dbias, gradients["w"]])  # in the order of their names
    return y, {"x": gradients["x"], "params": params}


def sequences(d: Dims) -> Arguments:
    return {"x": f32(d["T"], IN), "cond": f32(d["B"], COND), "sequence_offsets": i32(d["B"] + 1)}


def packed(d: Dims) -> Arguments:
    return {"x": f32(d["T"], IN), "sequence_offsets": i32(d["B"] + 1)}


def tokens(d: Dims) -> Arguments:
    return {"x": f32(d["M"], IN)}


def groups(d: Dims) -> Arguments:
    return tokens(d) | {"group_offsets": i32(EXPERTS + 1)}


PACKED = {"T": 23, "B": 4}
ADALN: dict[str, Any] = {
    "wrt": ("x", "cond", "params"), "integers": random_offsets("sequence_offsets", "T", "B"),
    "outside": rows_outside("sequence_offsets", ("x",), (True,)), "multiplies": True,
}  # fmt: skip
IN_GROUPS: dict[str, Any] = {
    "integers": lambda rng, d: random_offsets("group_offsets", "M", "G")(rng, d | {"G": EXPERTS}),
    "outside": rows_outside("group_offsets", ("x",), (True,)),
}


def dot_general(a: Arguments, precision: str | None = None, **how) -> jax.Array:
    return jaxops.nn.Fp8DotGeneral(**how)(a["x"], a["w"], (((1,), (0,)), ((), ())))


def linear_reference(p: dict, a: Arguments) -> jax.Array:
    return jnp.matmul(a["x"], p["layer"]["kernel"], precision="highest") + p["layer"]["bias"][None]


LAYERS = [
    layer("AdaLayerNorm", sequences, PACKED, functools.partial(norm_reference, "layer"), **ADALN),
    layer("AdaRMSNorm", sequences, PACKED, functools.partial(norm_reference, "rms"), **ADALN),
    layer("AdaLNZeroBlock", sequences, PACKED, block_reference, passes=True, **ADALN),
    layer(
        "PackedAttention", packed, PACKED, attention_reference,
        **ADALN | {"wrt": ("x", "params")},
    ),
    layer("Fp8Linear", tokens, {"M": 21}, expected=fp8_linear_expected, multiplies=True),
    layer("GroupedLinear-fp8", groups, {"M": 40}, expected=fp8_linear_expected, multiplies=True, **IN_GROUPS),
    layer(
        "GroupedLinear", groups, {"M": 40},
        lambda p, a: reference(
            "grouped_matmul", lhs=a["x"], rhs=p["kernel"], group_offsets=a["group_offsets"], bias=p["bias"]
        ), multiplies=True,
        **IN_GROUPS,
    ),
    layer("MoE", tokens, {"M": 13}, moe_reference, multiplies=True),
    layer("SharedExperts", tokens, {"M": 13}, shared_experts_reference, multiplies=True),
    layer("Router", tokens, {"M": 13}, lambda p, a: router_reference(p, a["x"]), multiplies=True),
    layer("ColumnParallelLinear", tokens, {"M": 13}, linear_reference, multiplies=True, sharded=True),
    layer("RowParallelLinear", tokens, {"M": 13}, linear_reference, multiplies=True, sharded=True),
    Op(
        "nn.Fp8DotGeneral", dot_general, lambda d: {"x": f32(d["M"], d["K"]), "w": f32(d["K"], d["N"])},
        {"M": 21, "K": 32, "N": 48}, WAYS,
        wrt=("x", "w"), local=("x",), expected=fp8_expected("x", "w"), multiplies=True,
    ),
]  # fmt: skip

# Public, and no layer: variables that layers keep, and what another layer is given.
NO_LAYERS = {"AmaxHistory", "PackedMask", "RouterBias", "packed_attention_fn"}
