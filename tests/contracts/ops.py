"""The list of public ops, over which the rules of all ops are tested. The layers are in layers.py."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from jaxops.ops import (
    fp8_matmul,
    grouped_glu,
    grouped_matmul,
    moe_mlp,
    permute,
    quantize,
    route,
)
from jaxops.ops.grouped_glu.reference import grouped_glu_reference
from jaxops.ops.grouped_matmul.reference import (
    grouped_matmul_reference,
    grouped_wgrad_reference,
)
from jaxops.ops.modality_grouped_matmul.reference import modality_grouped_matmul_reference
from jaxops.ops.moe_mlp.reference import moe_mlp_reference
from jaxops.ops.permute.reference import combine_reference, permute_reference
from jaxops.ops.route.plan import Spec
from jaxops.ops.route.reference import route_reference
from tests.contracts.collectives import COLLECTIVES
from tests.contracts.entry import EXACT, Arguments, Dims, Op, f32, i32, offsets, outside_of, rows_outside, ways_of
from tests.contracts.ops_adaln import ADALN_OPS
from tests.contracts.ops_attention import ATTENTION_OPS
from tests.ops.fp8_matmul import cases as fp8_cases
from tests.ops.grouped_glu.cases import plan_of as glu_plan
from tests.ops.grouped_matmul.cases import plan_of as grouped_plan
from tests.ops.modality_grouped_matmul.cases import plan_of as modality_plan
from tests.ops.moe_mlp.cases import plan_of as mlp_plan
from tests.ops.permute.cases import TILE, Variant, make_routing
from tests.ops.quantize.cases import Variant as QuantizeVariant
from tests.ops.quantize.cases import np_quantize
from tests.ops.route.cases import BWD, FWD

# Grouped products


def grouped_shapes(d: Dims, bias: bool = True) -> Arguments:
    M, K, N, G = (d[name] for name in "MKNG")
    return {"lhs": f32(M, K), "rhs": f32(G, K, N)} | ({"bias": f32(G, N)} if bias else {}) | {"offsets": i32(G + 1)}


def grouped_offsets(rng: np.random.Generator, d: Dims) -> Arguments:
    return {"offsets": offsets(rng, d["M"], d["G"])}


def wgrad_shapes(d: Dims) -> Arguments:
    M, K, N, G = (d[name] for name in "MKNG")
    return {"lhs": f32(M, K), "dout": f32(M, N), "sum": f32(G, K, N), "offsets": i32(G + 1)}


def ragged_sizes(rng: np.random.Generator, d: Dims) -> Arguments:
    return {"sizes": np.diff(offsets(rng, d["M"], d["G"]))}


def ragged_outside(a: Arguments) -> tuple[Arguments, list]:
    mask = np.arange(a["lhs"].shape[0])[:, None] >= np.sum(a["sizes"])
    return {"lhs": mask}, [mask]


def ragged_reference(a: Arguments) -> jax.Array:
    return grouped_matmul_reference(a["lhs"], a["rhs"], jnp.pad(jnp.cumsum(a["sizes"]), (1, 0)))


def modality_shapes(d: Dims) -> Arguments:
    M, K, N, G = (d[name] for name in "MKNG")
    return {"lhs": f32(M, 2 * K), "rhs": (f32(G, K, 2 * N), f32(G, 2 * K, N)), "offsets": i32(2 * G + 1)}


@functools.cache
def modality_two(run: str) -> grouped_matmul.Plan | tuple[grouped_matmul.Plan, ...]:
    """Of two modalities, whose tiles are alike in one pass."""
    plans = modality_plan(run)
    return plans[:2] if isinstance(plans, tuple) else plans


def modality_outside(a: Arguments) -> tuple[Arguments, list]:
    """Beside rows in no group, columns past those of a row's own modality."""
    o = a["offsets"]
    masks = [np.ones((a["lhs"].shape[0], max(w.shape[axis] for w in a["rhs"])), bool) for axis in (1, 2)]
    first = 0
    for w in a["rhs"]:
        for mask, axis in zip(masks, (1, 2), strict=True):
            mask[o[first] : o[first + w.shape[0]], : w.shape[axis]] = False
        first += w.shape[0]
    return {"lhs": masks[0]}, [masks[1]]


def glu_shapes(d: Dims) -> Arguments:
    M, K, F, G = (d[name] for name in "MKFG")
    return {"x": f32(M, K), "gate": f32(G, K, F), "up": f32(G, K, F), "offsets": i32(G + 1)}


PRODUCT = {"M": 40, "K": 16, "N": 24, "G": 4}
LARGE_ROWS = {"M": 2**20 + 128, "K": 4096, "N": 4096, "G": 8}
GROUPED = {
    "module": grouped_matmul,
    "multiplies": True,
}
GROUPED_OPS = [
    Op(
        "grouped_matmul",
        lambda a, **how: jaxops.grouped_matmul(a["lhs"], a["rhs"], a["offsets"], bias=a["bias"], **how), grouped_shapes,
        PRODUCT,
        ways_of(grouped_plan, **EXACT),
        lambda a: grouped_matmul_reference(a["lhs"], a["rhs"], a["offsets"], bias=a["bias"]),
        wrt=("lhs", "rhs", "bias"), local=("lhs", "offsets"), integers=grouped_offsets,
        outside=rows_outside(("lhs",), (True,)),
        large=((LARGE_ROWS, {}),), **GROUPED,
    ),
    Op(
        "grouped_wgrad",
        lambda a, **how: jaxops.grouped_wgrad(a["lhs"], a["dout"], a["offsets"], accumulate_into=a["sum"], **how),
        wgrad_shapes, PRODUCT,
        ways_of(grouped_plan, **EXACT),
        lambda a: grouped_wgrad_reference(a["lhs"], a["dout"], a["offsets"], accumulate_into=a["sum"]),
        wrt=("lhs", "dout", "sum"), local=("lhs", "dout", "offsets"), integers=grouped_offsets,
        outside=rows_outside(("lhs", "dout"), (False,)),
        large=((LARGE_ROWS, {}),), **GROUPED,
    ),
    Op(
        "ragged_dot", lambda a, **how: jaxops.ragged_dot(a["lhs"], a["rhs"], a["sizes"], **how),
        lambda d: {name: grouped_shapes(d)[name] for name in ("lhs", "rhs")} | {"sizes": i32(d["G"])},
        PRODUCT, ways_of(grouped_plan, **EXACT), ragged_reference,
        wrt=("lhs", "rhs"), local=("lhs", "sizes"), integers=ragged_sizes, outside=ragged_outside,
        large=((LARGE_ROWS, {}),), **GROUPED,
    ),
    Op(
        "modality_grouped_matmul",
        lambda a, **how: jaxops.modality_grouped_matmul(a["lhs"], a["rhs"], a["offsets"], **how), modality_shapes,
        {"M": 38, "K": 16, "N": 8, "G": 2}, ways_of(modality_two, **EXACT)
        | {"triton": {"plan": modality_two("triton"), "compute_dtype": jnp.bfloat16}},
        lambda a: modality_grouped_matmul_reference(a["lhs"], a["rhs"], a["offsets"]),
        wrt=("lhs", "rhs"), local=("lhs", "offsets"),
        integers=lambda rng, d: {"offsets": offsets(rng, d["M"], 2 * d["G"])}, outside=modality_outside,
        module=grouped_matmul, multiplies=True,
        large=(({"M": 2**20 + 128, "K": 1024, "N": 2048, "G": 8}, {}),),
    ),
    Op(
        "grouped_glu", lambda a, **how: jaxops.grouped_glu(a["x"], a["gate"], a["up"], a["offsets"], **how), glu_shapes,
        {"M": 40, "K": 12, "F": 20, "G": 4},
        ways_of(glu_plan, **EXACT), lambda a: grouped_glu_reference(a["x"], a["gate"], a["up"], a["offsets"]),
        wrt=("x", "gate", "up"), local=("x", "offsets"), integers=grouped_offsets,
        outside=rows_outside(("x",), (True,)),
        module=grouped_glu, multiplies=True,
        large=(({"M": 2**20 + 128, "K": 2048, "F": 4096, "G": 8}, {}),),
    ),
]  # fmt: skip


# Tokens to experts and back


def routing_shapes(d: Dims) -> dict[str, Any]:
    """Of the experts that are here: two more have rows outside."""
    T, k, E = d["T"], d["k"], d["E"]
    return {
        "weights": f32(T, k),
        "routing": jaxops.Routing(None, i32(T, k), i32(T * k), i32(T, k), i32(E + 1), i32(E + 2), f32(), f32()),
    }  # pyright: ignore


def routing_integers(rng: np.random.Generator, d: Dims) -> Arguments:
    """An expert before and one behind those that are here, and choices that were dropped."""
    v = Variant(T=d["T"], k=d["k"], E=d["E"] + 2, capacity=max(1, d["T"] // 2), first=1, last=d["E"] + 1)
    routing = jax.tree.map(np.asarray, make_routing(v, int(rng.integers(2**31))))
    return {
        "weights": rng.normal(size=(v.T, v.k)).astype(np.float32),
        "routing": dataclasses.replace(routing, weights=None),
    }


def routing_of(a: Arguments) -> jaxops.Routing:
    return dataclasses.replace(a["routing"], weights=a["weights"])


def has_row(a: Arguments) -> np.ndarray:
    """[T, k] bool"""
    position, o = a["routing"].row_positions, a["routing"].group_offsets
    return (position >= o[0]) & (position < o[-1])


def permute_outside(a: Arguments) -> tuple[Arguments, list]:
    return {}, [outside_of(a["routing"].group_offsets, a["routing"].row_indices.shape[0])]


def combine_outside(a: Arguments) -> tuple[Arguments, list]:
    return {"rows": outside_of(a["routing"].group_offsets, a["rows"].shape[0]), "weights": ~has_row(a)}, [None]


def mlp_outside(a: Arguments) -> tuple[Arguments, list]:
    """Tokens of which no choice has a row."""
    mask = ~has_row(a).any(axis=1, keepdims=True)
    return {"x": mask, "weights": ~has_row(a)}, [mask]


def mlp_shapes(d: Dims) -> Arguments:
    T, D, F, N, E = (d[name] for name in "TDFNE")
    return {"x": f32(T, D), "gate": f32(E, D, F), "up": f32(E, D, F), "down": f32(E, F, N)} | routing_shapes(d)


def mlp_reference(a: Arguments) -> jax.Array:
    if a["gate"].shape[0] == 0:  # nothing to look up
        return jnp.zeros((a["x"].shape[0], a["down"].shape[2]), jnp.float32)
    return moe_mlp_reference(a["x"], a["gate"], a["up"], a["down"], routing_of(a))


def without_tokens(routing: jaxops.Routing) -> jaxops.Routing:
    """Losses are 0 where they would be means of nothing."""
    if routing.weights.shape[0]:
        return routing
    return dataclasses.replace(routing, aux_loss=jnp.float32(0), z_loss=jnp.float32(0))


FEW = {"interpret": "few", "gpu": "few-gpu"}  # the kernel that gathers rows; grouped_glu has the others
ROUTE = {"score": "sigmoid", "weight_scale": 2.5, "expert_groups": 4, "top_expert_groups": 2, "capacity": 5}
TOKENS = {"T": 13, "D": 19, "k": 3, "E": 4}
ROUTING_OPS = [
    Op(
        "permute", lambda a, **how: jaxops.permute(a["x"], a["routing"], **how),
        lambda d: {"x": f32(d["T"], d["D"]), "routing": routing_shapes(d)["routing"]}, TOKENS,
        ways_of(Variant(tile=TILE).plan_for),
        lambda a: permute_reference(a["x"], a["routing"]), wrt=("x",), local=("x", "routing"),
        integers=lambda rng, d: {"routing": routing_integers(rng, d)["routing"]}, outside=permute_outside,
        module=permute,
        large=(({"T": 2**20, "D": 4096, "k": 2, "E": 8}, {}),),
    ),
    Op(
        "combine", lambda a, **how: jaxops.combine(a["rows"], routing_of(a), **how),
        lambda d: {"rows": f32(d["T"] * d["k"], d["D"])} | routing_shapes(d), TOKENS,
        ways_of(Variant(tile=TILE).plan_for),
        lambda a: combine_reference(a["rows"], routing_of(a)), wrt=("rows", "weights"),
        local=("rows", "weights", "routing"),
        integers=routing_integers, outside=combine_outside,
        module=permute,
        large=(({"T": 2**20, "D": 4096, "k": 2, "E": 8}, {}),),
    ),
    Op(
        "moe_mlp", lambda a, **how: jaxops.moe_mlp(a["x"], a["gate"], a["up"], a["down"], routing_of(a), **how),
        mlp_shapes,
        TOKENS | {"F": 37, "N": 11}, ways_of(lambda run: mlp_plan(FEW.get(run, run)), **EXACT), mlp_reference,
        wrt=("x", "gate", "up", "down", "weights"), local=("x", "weights", "routing"), integers=routing_integers,
        outside=mlp_outside,
        module=moe_mlp, multiplies=True,
        large=(({"T": 600_000, "D": 4096, "k": 2, "E": 8, "F": 4096, "N": 4096}, {}),),
    ),
    Op(
        "route",
        lambda a, **how: jaxops.route(
            a["logits"], 3, selection_bias=a["selection_bias"], mask=a["mask"], **ROUTE, **how
        ),
        lambda d: {"logits": f32(d["T"], 12), "selection_bias": f32(12), "mask": jax.ShapeDtypeStruct((d["T"],), bool)},
        {"T": 17},
        ways_of(lambda run: route.Plan("xla") if run == "xla" else route.Plan("pallas", FWD, BWD)),
        lambda a: without_tokens(
            route_reference(Spec(3, normalize=True, **ROUTE), a["logits"], a["selection_bias"], a["mask"])
        ),
        wrt=("logits", "selection_bias"), local=("logits", "mask"),
        integers=lambda rng, d: {"mask": rng.random(d["T"]) < 0.7},
        outside=lambda a: ({"logits": ~a["mask"][:, None]}, [~a["mask"][:, None], None, None]),
        module=route, large=(),
    ),
    Op(
        "update_router_bias", lambda a: jaxops.update_router_bias(a["selection_bias"], a["load"], 0.25),
        lambda d: {"selection_bias": f32(d["E"]), "load": i32(d["E"])}, {"E": 8},
        {"xla": {}},
        lambda a: a["selection_bias"] + 0.25 * jnp.sign(jnp.mean(a["load"].astype(jnp.float32)) - a["load"]),
        local=("selection_bias", "load"),
        integers=lambda rng, d: {"load": rng.integers(0, 9, d["E"]).astype(np.int32)},
    ),
]  # fmt: skip


# FP8


def fp8_expected(x: str, w: str) -> Callable[[Arguments, list], tuple[Any, Arguments]]:
    """What is quantised and multiplied in numpy: arguments x and w by name."""

    def expected(a: Arguments, cotangents: list) -> tuple[Any, Arguments]:
        y, dx, dw = fp8_cases.reference(fp8_cases.Case(a[x], a[w], cotangents[0], a.get("offsets")), "blockwise")
        return y, {x: dx, w: dw}

    return expected


def used_columns(q, offsets, numpy=jnp):
    """Without what stands behind the last group's padding, which may hold anything."""
    used = numpy.sum(-(-numpy.diff(offsets) // 128))
    columns, blocks = (numpy.arange(size) for size in (q["values_t"].shape[1], q["scales_t"].shape[0]))
    values_t = numpy.where(columns[None, :] < 128 * used, q["values_t"], numpy.zeros((), q["values_t"].dtype))
    return q | {"values_t": values_t, "scales_t": numpy.where(blocks[:, None] < used, q["scales_t"], numpy.float32(0))}


def quantize_both(a: Arguments, **how) -> dict[str, jax.Array]:
    q = jaxops.quantize(a["x"], layouts="both", group_offsets=a["offsets"], **how)
    return used_columns({name: getattr(q, name) for name in ("values", "scales", "values_t", "scales_t")}, a["offsets"])


def quantize_outside(a: Arguments) -> tuple[Arguments, list]:
    """Rows outside are quantised, too, each by itself; the columns have none of them."""
    mask = outside_of(a["offsets"], a["x"].shape[0])
    return {"x": mask}, [mask.T, None, mask, None]


def quantize_expected(a: Arguments, cotangents: list) -> tuple[Any, Arguments]:
    return used_columns(np_quantize(a["x"], QUANTIZE, a["offsets"]), a["offsets"], np), {}


def dequantize_arguments(rng: np.random.Generator, d: Dims) -> Arguments:
    x = rng.normal(size=(d["M"], d["K"])).astype(np.float32)
    q = np_quantize(x, QuantizeVariant("block_1x128", "row"))
    return {"q": jaxops.Quantized(q["values"], q["scales"], scaling="block_1x128", dtype="float32")}


def dequantize_shapes(d: Dims) -> Arguments:
    M, K = d["M"], d["K"]
    values = jax.ShapeDtypeStruct((M, K), jnp.float8_e4m3fn)
    return {"q": jaxops.Quantized(values, f32(-(-K // 128), M), scaling="block_1x128", dtype="float32")}  # pyright: ignore


def dequantize_reference(a: Arguments) -> jax.Array:
    q = a["q"]
    return q.values.astype(jnp.float32) * jnp.repeat(q.scales.T, 128, axis=1)[:, : q.values.shape[1]]


def fp8_ways(run: str) -> fp8_matmul.Plan:
    return fp8_matmul.Plan("xla") if run == "xla" else fp8_cases.options_of(run)["plan"]


QUANTIZE = QuantizeVariant("block_1x128", "both", ragged=True)
FP8 = {"module": fp8_matmul, "multiplies": True}
TRITON_FP8 = {"triton": {"backend": "triton"}}
FP8_OPS = [
    Op(
        "fp8_matmul", lambda a, **how: jaxops.fp8_matmul(a["x"], a["w"], **how),
        lambda d: {"x": f32(d["M"], d["K"]), "w": f32(d["K"], d["N"])},
        {"M": 21, "K": 32, "N": 48}, ways_of(fp8_ways) | TRITON_FP8, wrt=("x", "w"), local=("x",),
        expected=fp8_expected("x", "w"),
        large=(({"M": 600_000, "K": 4096, "N": 4096}, {}),), **FP8,
    ),
    Op(
        "fp8_grouped_matmul", lambda a, **how: jaxops.fp8_grouped_matmul(a["lhs"], a["rhs"], a["offsets"], **how),
        functools.partial(grouped_shapes, bias=False), {"M": 40, "K": 32, "N": 48, "G": 4},
        ways_of(fp8_ways) | TRITON_FP8,
        wrt=("lhs", "rhs"), local=("lhs", "offsets"), integers=grouped_offsets, outside=rows_outside(("lhs",), (True,)),
        expected=fp8_expected("lhs", "rhs"),
        large=(({"M": 600_000, "K": 4096, "N": 4096, "G": 8}, {}),), **FP8,
    ),
    Op(
        "quantize", quantize_both, lambda d: {"x": f32(d["M"], d["K"]), "offsets": i32(d["G"] + 1)},
        {"M": 40, "K": 133, "G": 3},
        ways_of(lambda run: quantize.Plan("xla" if run == "xla" else "pallas")), local=("x", "offsets"),
        integers=grouped_offsets,
        outside=quantize_outside, expected=quantize_expected, passes=True,
        module=quantize,
        large=(({"M": 600_000, "K": 4096, "G": 8}, {}),),
    ),
    Op(
        "dequantize", lambda a: jaxops.dequantize(a["q"]), dequantize_shapes, {"M": 9, "K": 133}, {"xla": {}},
        dequantize_reference, local=("q",),
        integers=dequantize_arguments, large=(({"M": 600_000, "K": 4096}, {}),),
    ),
]  # fmt: skip

OPS = [*ADALN_OPS, *ATTENTION_OPS, *GROUPED_OPS, *ROUTING_OPS, *FP8_OPS, *COLLECTIVES]
# Public, and no op: what an op gives, what counts on the host, and what examines an op.
NO_OPS = {"Quantized", "Routing", "bucket_length", "inspect"}
