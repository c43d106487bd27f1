"""The list of public ops, over which the rules of all ops are tested: small operands, beside what each op's describe.py
says. The layers are in layers.py."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from jaxops.ops import adaln, cached_attention, fp8_matmul, grouped_matmul, packed_attention, quantize, route
from jaxops.ops.linear_cross_entropy import Plan as LossPlan
from tests.arrays import f32, i32
from tests.contracts.entry import (
    EXACT,
    Arguments,
    Dims,
    Op,
    described,
    offsets,
    outside_of,
    random_offsets,
    rows_outside,
)
from tests.ops.adaln.cases import PLANS as ADALN_PLANS
from tests.ops.fp8_matmul import cases as fp8_cases
from tests.ops.grouped_glu.cases import plan_of as glu_plan
from tests.ops.grouped_matmul.cases import plan_of as grouped_plan
from tests.ops.modality_grouped_matmul.cases import plan_of as modality_plan
from tests.ops.moe_mlp.cases import plan_of as mlp_plan
from tests.ops.permute.cases import TILE, has_row, make_routing
from tests.ops.permute.cases import Variant as RoutingVariant
from tests.ops.quantize.cases import Variant as QuantizeVariant
from tests.ops.quantize.cases import np_quantize
from tests.ops.route.cases import BWD, FWD
from tests.parallel.cases import mesh_of, over

# AdaLN

SEQUENCES = {"T": 23, "D": 10, "B": 4}
AFFINE = {"epsilon": 0.1}
ACTIVATED = AFFINE | {"activation": "gelu_tanh"}
FP8_RESULT = {"out_dtype": jnp.float8_e4m3fn}


def adaln_op(name: str, rows: tuple[str, ...], vectors: str, weights: str, results: int, **more: Any) -> Op:
    """rows: the arguments [T, D]; vectors [B, D] and weights [D]."""

    def shapes(d: Dims) -> Arguments:
        T, D, B = d["T"], d["D"], d["B"]
        arrays = dict.fromkeys(rows, f32(T, D)) | dict.fromkeys(vectors.split(), f32(B, D))
        return arrays | dict.fromkeys(weights.split(), f32(D)) | {"sequence_offsets": i32(B + 1)}

    return described(
        name, SEQUENCES, shapes, lambda run: adaln.Plan("xla") if run == "xla" else ADALN_PLANS["whole"],
        local=(*rows, "sequence_offsets"), integers=random_offsets("sequence_offsets", "T", "B"),
        outside=rows_outside("sequence_offsets", rows, (True,) * results), **more,
    )  # fmt: skip


LONG = {"T": 600_000, "D": 4096, "B": 64}
ADALN_OPS = [
    adaln_op(
        "adaln", ("x",), "scale shift", "weight bias", 1, options=AFFINE,
        large=((LONG, FP8_RESULT), (LONG | {"T": 1_200_000}, {})),
    ),
    adaln_op("gated_residual", ("residual", "h"), "gate", "", 1, passes=True, large=((LONG, {}),)),
    adaln_op(
        "gated_residual_adaln", ("residual", "h"), "gate scale shift", "weight bias", 2, options=ACTIVATED, passes=True,
        large=((LONG, FP8_RESULT), (LONG, {})),
    ),
]  # fmt: skip

# Attention


def attention_shapes(d: Dims) -> Arguments:
    T, S, K, G, H, V, B = (d[name] for name in "TSKGHVB")
    runs = {"visible_until": i32(T), "sequence_offsets": i32(B + 1), "kv_offsets": i32(B + 1)}
    return {"q": f32(T, K * G, H), "k": f32(S, K, H), "v": f32(S, K, V), "sinks": f32(K * G)} | runs


def attention_integers(rng: np.random.Generator, d: Dims) -> Arguments:
    T, S, B = (d[name] for name in "TSB")
    until = rng.integers(-2, S + 3, T).astype(np.int32)
    return {"sequence_offsets": offsets(rng, T, B), "kv_offsets": offsets(rng, S, B), "visible_until": until}


def attention_outside(a: Arguments) -> tuple[Arguments, list]:
    rows, others = (
        outside_of(a[offsets], a[name].shape[0])[:, :, None]
        for offsets, name in (("sequence_offsets", "q"), ("kv_offsets", "k"))
    )
    return {"q": rows, "k": others, "v": others}, [rows]


def attention_plan(run: str) -> packed_attention.Plan:
    tiles = packed_attention.Tiles(16, 16)
    if run == "xla":
        return packed_attention.Plan("xla", block=8)
    return packed_attention.Plan("pallas", fwd=tiles, dq=tiles, dkv=tiles)


def cached_shapes(d: Dims) -> Arguments:
    B, K, G, S, H = (d[name] for name in "BKGSH")
    caches = {"k_cache": f32(B, K, S, H), "v_cache": f32(B, K, S, H)}
    turned = {"qk_norm": (f32(H), f32(H)), "rotary": (f32(B, H // 4), f32(B, H // 4))}
    return {"qkv": f32(B, K * (G + 2), H)} | caches | {"at": i32(B), "sinks": f32(K * G)} | turned


def cached_outside(a: Arguments) -> tuple[Arguments, list]:
    """Rows without a position, and of others what is cached from it on or before the window."""
    at, S = a["at"][:, None], a["k_cache"].shape[2]
    token, rows = np.arange(S)[None, :], ((at < 0) | (at >= S))[:, :, None]
    unread = (rows[:, 0] | (token >= at) | (token < at - 20))[:, None, :, None]
    kept = unread & (token != at)[:, None, :, None]
    return {"qkv": rows, "k_cache": unread, "v_cache": unread}, [rows, kept, kept]


def cached_plan(run: str) -> cached_attention.Plan:
    tiles = cached_attention.Tiles(2, 16)
    return cached_attention.Plan("xla") if run == "xla" else cached_attention.Plan("pallas", fwd=tiles)


ATTENTION_OPS = [
    described(
        "cached_attention", {"B": 4, "K": 2, "G": 2, "S": 37, "H": 10}, cached_shapes, cached_plan, {"window": 20},
        local=("qkv", "k_cache", "v_cache", "at", "rotary"), passes=True, outside=cached_outside,
        integers=lambda rng, d: {"at": rng.integers(-1, d["S"] + 1, d["B"]).astype(np.int32)},
        large=(({"B": 64, "K": 8, "G": 2, "S": 40_000, "H": 128}, {}),),
    ),
    described(
        "packed_attention", {"T": 23, "S": 26, "K": 2, "G": 2, "H": 10, "V": 6, "B": 4}, attention_shapes,
        attention_plan, {"window": 7, "soft_cap": 2.0},
        local=("q", "k", "v", "visible_until", "sequence_offsets", "kv_offsets"),
        integers=attention_integers, outside=attention_outside,
        large=(({"T": 1_200_000, "S": 1_200_000, "K": 4, "G": 4, "H": 128, "V": 128, "B": 64}, {}),),
    ),
]  # fmt: skip

# Grouped products


def grouped_shapes(d: Dims, bias: bool = True) -> Arguments:
    M, K, N, G = (d[name] for name in "MKNG")
    weights = {"rhs": f32(G, K, N)} | ({"bias": f32(G, N)} if bias else {})
    return {"lhs": f32(M, K)} | weights | {"group_offsets": i32(G + 1)}


def wgrad_shapes(d: Dims) -> Arguments:
    M, K, N, G = (d[name] for name in "MKNG")
    return {"lhs": f32(M, K), "dout": f32(M, N), "accumulate_into": f32(G, K, N), "group_offsets": i32(G + 1)}


def ragged_shapes(d: Dims) -> Arguments:
    return {name: grouped_shapes(d)[name] for name in ("lhs", "rhs")} | {"group_sizes": i32(d["G"])}


def ragged_outside(a: Arguments) -> tuple[Arguments, list]:
    mask = np.arange(a["lhs"].shape[0])[:, None] >= np.sum(a["group_sizes"])
    return {"lhs": mask}, [mask]


def swapped_shapes(d: Dims) -> Arguments:
    return ragged_shapes(d) | {"rhs": f32(d["G"], d["N"], d["K"])}


SWAPPED = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])  # rhs [G, N, K]


def modality_shapes(d: Dims) -> Arguments:
    M, K, N, G = (d[name] for name in "MKNG")
    rhs = f32(G, K, 2 * N), f32(G, 2 * K, N)
    return {"lhs": f32(M, 2 * K), "rhs": rhs, "group_offsets": i32(2 * G + 1)}


@functools.cache
def modality_two(run: str) -> grouped_matmul.Plan | tuple[grouped_matmul.Plan, ...]:
    """The plans of two modalities, whose tiles are alike in one pass."""
    plans = modality_plan(run)
    return plans[:2] if isinstance(plans, tuple) else plans


def modality_outside(a: Arguments) -> tuple[Arguments, list]:
    """Beside rows in no group, columns past those of a row's own modality."""
    o = a["group_offsets"]
    masks = [np.ones((a["lhs"].shape[0], max(w.shape[axis] for w in a["rhs"])), bool) for axis in (1, 2)]
    first = 0
    for w in a["rhs"]:
        for mask, axis in zip(masks, (1, 2), strict=True):
            mask[o[first] : o[first + w.shape[0]], : w.shape[axis]] = False
        first += w.shape[0]
    return {"lhs": masks[0]}, [masks[1]]


def glu_shapes(d: Dims) -> Arguments:
    M, K, F, G = (d[name] for name in "MKFG")
    weights = {"w_gate": f32(G, K, F), "w_up": f32(G, K, F), "biases": (f32(G, F), f32(G, F))}
    return {"x": f32(M, K)} | weights | {"group_offsets": i32(G + 1)}


PRODUCT = {"M": 40, "K": 16, "N": 24, "G": 4}
MANY_ROWS = {"M": 2**20 + 128, "K": 4096, "N": 4096, "G": 8}
GROUPS: dict[str, Any] = {"integers": random_offsets("group_offsets", "M", "G")}
GROUPED_OPS = [
    described(
        "grouped_matmul", PRODUCT, grouped_shapes, grouped_plan, local=("lhs", "group_offsets"),
        outside=rows_outside("group_offsets", ("lhs",), (True,)), large=((MANY_ROWS, {}),), **GROUPS,
    ),
    described(
        "grouped_wgrad", PRODUCT, wgrad_shapes, grouped_plan, local=("lhs", "dout", "group_offsets"),
        outside=rows_outside("group_offsets", ("lhs", "dout"), (False,)), large=((MANY_ROWS, {}),), **GROUPS,
    ),
    described(
        "ragged_dot", PRODUCT, ragged_shapes, grouped_plan, local=("lhs", "group_sizes"), outside=ragged_outside,
        integers=lambda rng, d: {"group_sizes": np.diff(offsets(rng, d["M"], d["G"]))}, large=((MANY_ROWS, {}),),
    ),
    described(
        "ragged_dot_general", PRODUCT, swapped_shapes, grouped_plan, {"ragged_dot_dimension_numbers": SWAPPED},
        local=("lhs", "group_sizes"), outside=ragged_outside,
        integers=lambda rng, d: {"group_sizes": np.diff(offsets(rng, d["M"], d["G"]))}, large=((MANY_ROWS, {}),),
    ),
    described(
        "modality_grouped_matmul", {"M": 38, "K": 16, "N": 8, "G": 2}, modality_shapes,
        local=("lhs", "group_offsets"), outside=modality_outside,
        integers=lambda rng, d: {"group_offsets": offsets(rng, d["M"], 2 * d["G"])},
        ways={run: {"plan": modality_two(run)} | EXACT for run in ("xla", "interpret", "gpu")}
        | {"triton": {"plan": modality_two("triton"), "compute_dtype": jnp.bfloat16}},
        large=(({"M": 2**20 + 128, "K": 1024, "N": 2048, "G": 8}, {}),),
    ),
    described(
        "grouped_glu", {"M": 40, "K": 12, "F": 20, "G": 4}, glu_shapes, glu_plan, local=("x", "group_offsets"),
        outside=rows_outside("group_offsets", ("x",), (True,)),
        large=(({"M": 2**20 + 128, "K": 2048, "F": 4096, "G": 8}, {}),), **GROUPS,
    ),
]  # fmt: skip

# Tokens to experts and back


def routing_shapes(d: Dims) -> dict[str, Any]:
    """A routing to the experts that are here: two more have rows outside."""
    T, k, E = d["T"], d["k"], d["E"]
    routing = jaxops.Routing(None, i32(T, k), i32(T * k), i32(T, k), i32(E + 1), i32(E + 2), f32(), f32())  # pyright: ignore
    return {"routing": routing, "routing.weights": f32(T, k)}


def routing_integers(rng: np.random.Generator, d: Dims) -> Arguments:
    """An expert before and one behind those that are here, and choices that were dropped."""
    v = RoutingVariant(T=d["T"], k=d["k"], E=d["E"] + 2, capacity=max(1, d["T"] // 2), first=1, last=d["E"] + 1)
    routing = jax.tree.map(np.asarray, make_routing(v, int(rng.integers(2**31))))
    weights = rng.normal(size=(v.T, v.k)).astype(np.float32)
    return {"routing": dataclasses.replace(routing, weights=None), "routing.weights": weights}


def permute_outside(a: Arguments) -> tuple[Arguments, list]:
    return {}, [outside_of(a["routing"].group_offsets, a["routing"].row_indices.shape[0])]


def combine_outside(a: Arguments) -> tuple[Arguments, list]:
    rows = outside_of(a["routing"].group_offsets, a["rows"].shape[0])
    return {"rows": rows, "routing.weights": ~has_row(a["routing"])}, [None]


def mlp_outside(a: Arguments) -> tuple[Arguments, list]:
    """Tokens of which no choice has a row."""
    kept = has_row(a["routing"])
    mask = ~kept.any(axis=1, keepdims=True)
    return {"x": mask, "routing.weights": ~kept}, [mask]


def mlp_shapes(d: Dims) -> Arguments:
    T, D, F, N, E = (d[name] for name in "TDFNE")
    weights = {"w_gate": f32(E, D, F), "w_up": f32(E, D, F), "w_down": f32(E, F, N)}
    biases = {"biases": (f32(E, F), f32(E, F), f32(E, N))}
    return {"x": f32(T, D)} | weights | biases | routing_shapes(d)


def route_outside(a: Arguments) -> tuple[Arguments, list]:
    return {"logits": ~a["mask"][:, None]}, [~a["mask"][:, None], None, None]


def choices_outside(a: Arguments) -> tuple[Arguments, list]:
    """Tokens that do not count, and weights of choices of no expert."""
    none = ~a["mask"][:, None] | (a["experts"] < 0) | (a["experts"] > 5)
    return {"weights": none, "logits": ~a["mask"][:, None]}, [none, None, None]


FEW = {"interpret": "few", "gpu": "few-gpu"}  # the kernel that gathers rows; grouped_glu has the others
ROUTE = {"k": 3, "score": "sigmoid", "weight_scale": 2.5, "expert_groups": 4, "top_expert_groups": 2, "capacity": 5}
TOKENS = {"T": 13, "D": 19, "k": 3, "E": 4}
MANY_TOKENS = {"T": 2**20, "D": 4096, "k": 2, "E": 8}
ROUTING_OPS = [
    described(
        "permute", TOKENS, lambda d: {"x": f32(d["T"], d["D"]), "routing": routing_shapes(d)["routing"]},
        RoutingVariant(tile=TILE).plan_for, local=("x", "routing"), outside=permute_outside,
        integers=lambda rng, d: {"routing": routing_integers(rng, d)["routing"]}, large=((MANY_TOKENS, {}),),
    ),
    described(
        "combine", TOKENS, lambda d: {"rows": f32(d["T"] * d["k"], d["D"])} | routing_shapes(d),
        RoutingVariant(tile=TILE).plan_for, local=("rows", "routing.weights", "routing"),
        integers=routing_integers, outside=combine_outside, large=((MANY_TOKENS, {}),),
    ),
    described(
        "moe_mlp", TOKENS | {"F": 37, "N": 11}, mlp_shapes, lambda run: mlp_plan(FEW.get(run, run)),
        local=("x", "routing.weights", "routing"), integers=routing_integers, outside=mlp_outside,
        large=(({"T": 600_000, "D": 4096, "k": 2, "E": 8, "F": 4096, "N": 4096}, {}),),
    ),
    described(
        "route", {"T": 17},
        lambda d: {"logits": f32(d["T"], 12), "selection_bias": f32(12), "mask": jax.ShapeDtypeStruct((d["T"],), bool)},
        lambda run: route.Plan("xla") if run == "xla" else route.Plan("pallas", FWD, BWD), ROUTE,
        local=("logits", "mask"), outside=route_outside, integers=lambda rng, d: {"mask": rng.random(d["T"]) < 0.7},
    ),
    described(
        "route_choices", {"T": 17},
        lambda d: {"experts": i32(d["T"], 3), "weights": f32(d["T"], 3), "logits": f32(d["T"], 6)}
        | {"mask": jax.ShapeDtypeStruct((d["T"],), bool)},
        lambda run: route.Plan("xla") if run == "xla" else route.Plan("pallas", FWD, BWD),
        {"num_experts": 6, "score": "sigmoid"}, local=("experts", "weights", "logits", "mask"), outside=choices_outside,
        # Of six experts one is chosen never, some are chosen twice by a token, and some numbers are no expert's.
        integers=lambda rng, d: {
            "experts": rng.choice(np.array([-1, 0, 1, 2, 3, 5, 6, 2**31 - 1], np.int32), (d["T"], 3)),
            "mask": rng.random(d["T"]) < 0.7,
        },
    ),
    described(
        "update_router_bias", {"E": 8}, lambda d: {"selection_bias": f32(d["E"]), "load": i32(d["E"])},
        options={"rate": 0.25}, local=("selection_bias", "load"),
        integers=lambda rng, d: {"load": rng.integers(0, 9, d["E"]).astype(np.int32)},
        reference=lambda a: a["selection_bias"]
        + 0.25 * jnp.sign(jnp.mean(a["load"].astype(jnp.float32)) - a["load"]),
    ),
]  # fmt: skip

# FP8


def fp8_expected(x: str, w: str) -> Callable[[Arguments, list], tuple[Any, Arguments]]:
    """What is quantised and multiplied in numpy: arguments x and w by name."""

    def expected(a: Arguments, cotangents: list) -> tuple[Any, Arguments]:
        case = fp8_cases.Case(a[x], a[w], cotangents[0], a.get("group_offsets"))
        y, dx, dw = fp8_cases.reference(case, "blockwise")
        return y, {x: dx, w: dw}

    return expected


def used_columns(q, offsets, numpy=jnp):
    """Without what stands behind the last group's padding, which may hold anything."""
    used = numpy.sum(-(-numpy.diff(offsets) // 128))
    columns, blocks = (numpy.arange(size) for size in (q["values_t"].shape[1], q["scales_t"].shape[0]))
    values_t = numpy.where(columns[None, :] < 128 * used, q["values_t"], numpy.zeros((), q["values_t"].dtype))
    return q | {"values_t": values_t, "scales_t": numpy.where(blocks[:, None] < used, q["scales_t"], numpy.float32(0))}


def quantize_both(a: Arguments, **how) -> dict[str, jax.Array]:
    q = jaxops.quantize(**a, layouts="both", **how)
    names = ("values", "scales", "values_t", "scales_t")
    return used_columns({name: getattr(q, name) for name in names}, a["group_offsets"])


def quantize_outside(a: Arguments) -> tuple[Arguments, list]:
    """Rows outside are quantised, too, each by itself; the columns have none of them."""
    mask = outside_of(a["group_offsets"], a["x"].shape[0])
    return {"x": mask}, [mask.T, None, mask, None]


def quantize_expected(a: Arguments, cotangents: list) -> tuple[Any, Arguments]:
    o = a["group_offsets"]
    return used_columns(np_quantize(a["x"], QuantizeVariant("block_1x128", "both", ragged=True), o), o, np), {}


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


def fp8_plan(run: str) -> fp8_matmul.Plan:
    return fp8_matmul.Plan("xla") if run == "xla" else fp8_cases.options_of(run)["plan"]


FP8_WAYS = {run: {"plan": fp8_plan(run)} for run in ("xla", "interpret", "gpu")} | {"triton": {"backend": "triton"}}
FP8_OPS = [
    described(
        "fp8_matmul", {"M": 21, "K": 32, "N": 48}, lambda d: {"lhs": f32(d["M"], d["K"]), "rhs": f32(d["K"], d["N"])},
        ways=FP8_WAYS, local=("lhs",), expected=fp8_expected("lhs", "rhs"),
        large=(({"M": 600_000, "K": 4096, "N": 4096}, {}),),
    ),
    described(
        "fp8_grouped_matmul", {"M": 40, "K": 32, "N": 48, "G": 4}, functools.partial(grouped_shapes, bias=False),
        ways=FP8_WAYS, local=("lhs", "group_offsets"), outside=rows_outside("group_offsets", ("lhs",), (True,)),
        expected=fp8_expected("lhs", "rhs"), large=(({"M": 600_000, "K": 4096, "N": 4096, "G": 8}, {}),), **GROUPS,
    ),
    described(
        "quantize", {"M": 40, "K": 133, "G": 3}, lambda d: {"x": f32(d["M"], d["K"]), "group_offsets": i32(d["G"] + 1)},
        lambda run: quantize.Plan("xla" if run == "xla" else "pallas"), call=quantize_both, wrt=(),
        local=("x", "group_offsets"), outside=quantize_outside, expected=quantize_expected, passes=True,
        large=(({"M": 600_000, "K": 4096, "G": 8}, {}),), **GROUPS,
    ),
    described(
        "dequantize", {"M": 9, "K": 133}, dequantize_shapes, local=("q",), integers=dequantize_arguments,
        reference=dequantize_reference, large=(({"M": 600_000, "K": 4096}, {}),),
    ),
]  # fmt: skip

# The last layer

WORDS = 16


def loss_shapes(d: Dims) -> Arguments:
    T, D = d["T"], d["D"]
    return {"x": f32(T, D), "w": f32(D, WORDS), "targets": i32(T), "weights": f32(T), "bias": f32(WORDS)}


def loss_targets(rng: np.random.Generator, d: Dims) -> Arguments:
    """Some do not count."""
    return {"targets": np.where(rng.random(d["T"]) < 0.3, -100, rng.integers(0, WORDS, d["T"])).astype(np.int32)}


LOSS_OPS = [
    described(
        "linear_cross_entropy", {"T": 23, "D": 10}, loss_shapes,
        options={"reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.01, "soft_cap": 5.0},
        ways={"xla": EXACT | {"plan": LossPlan("xla")}}, local=("x", "targets", "weights"), integers=loss_targets,
        outside=lambda a: ({"x": (a["targets"] == -100)[:, None], "weights": a["targets"] == -100}, [None]),
        large=(({"T": 600_000, "D": 4096}, {}),),
    )
]  # fmt: skip

# Across devices: each call is a `jax.shard_map` of its own, of whole arrays

DEVICES = min(2, jax.device_count())


def collective(name: str, x: str, shapes: Callable[[Dims], tuple]) -> Op:
    """shapes: of all devices' x, w and bias."""

    def call(a: Arguments, **how) -> jax.Array:
        return over(mesh_of(DEVICES), name, bias=True, rows=True, **how)(a[x], a["w"], a["bias"], a["rows"])

    def past(a: Arguments, numpy) -> Any:
        return numpy.arange(a[x].shape[0])[:, None] >= a["rows"]

    def reference(a: Arguments) -> jax.Array:
        y = jnp.matmul(jnp.where(past(a, jnp), 0, a[x]), a["w"], precision="highest") + a["bias"][None]
        return jnp.where(past(a, jnp), 0, y)

    return described(
        name, {"M": 7, "K": 12, "N": 8},
        lambda d: dict(zip((x, "w", "bias"), shapes(d), strict=True)) | {"rows": i32()}, call=call, reference=reference,
        ways={"xla": {"backend": "xla"} | EXACT}, local=(x, "rows"), sharded=True,
        integers=lambda rng, d: {"rows": np.int32(rng.integers(0, DEVICES * d["M"] + 1))},
        outside=lambda a: ({x: past(a, np)}, [past(a, np)]),
    )  # fmt: skip


def gathered(d: Dims) -> tuple:
    return f32(DEVICES * d["M"], d["K"]), f32(d["K"], DEVICES * d["N"]), f32(DEVICES * d["N"])


def scattered(d: Dims) -> tuple:
    return f32(DEVICES * d["M"], DEVICES * d["N"]), f32(DEVICES * d["N"], d["K"]), f32(d["K"])


COLLECTIVES = [collective("all_gather_matmul", "x", gathered), collective("matmul_reduce_scatter", "h", scattered)]
OPS = [*ADALN_OPS, *ATTENTION_OPS, *GROUPED_OPS, *ROUTING_OPS, *FP8_OPS, *LOSS_OPS, *COLLECTIVES]
# Public, and no op: what an op gives, what counts on the host, and what examines an op.
NO_OPS = {"Quantized", "Routing", "bucket_length", "inspect"}
