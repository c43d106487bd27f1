"""What each op is compared with: reference.py in float32 where that fits in memory, else the xla backend in float32."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxops.ops import (
    adaln,
    cached_attention,
    fp8_matmul,
    grouped_glu,
    grouped_matmul,
    moe_mlp,
    packed_attention,
    permute,
    quantize,
    route,
)
from jaxops.ops.adaln.reference import adaln_reference, gated_residual_reference
from jaxops.ops.cached_attention.reference import cached_attention_reference
from jaxops.ops.grouped_glu.reference import grouped_glu_reference
from jaxops.ops.grouped_matmul.reference import (
    grouped_matmul_reference,
    grouped_wgrad_reference,
    modality_grouped_matmul_reference,
)
from jaxops.ops.moe_mlp.reference import moe_mlp_reference
from jaxops.ops.packed_attention.reference import packed_attention_reference
from jaxops.ops.permute.reference import combine_reference, permute_reference
from jaxops.ops.quantize import Quantized
from jaxops.ops.route.plan import Spec
from jaxops.ops.route.reference import route_reference
from jaxops.parallel import all_gather_matmul, matmul_reduce_scatter

MOST_BYTES = 1 << 28  # of what a reference.py holds beside its arguments
PORTABLE = "with the xla backend in float32, precision highest"
Given = dict[str, Any]  # an op's parameters by name; floating arrays are float32


@dataclasses.dataclass(frozen=True)
class Entry:
    """How an op is examined.

    Attributes:
      wrt: parameters, or parts of them, that have gradients.
      reference: parameters -> results in plain jnp and float32; None for an op that is plain JAX itself.
      holds: parameters -> bytes that `reference` holds beside its arguments.
      portable: parameters -> results; instead of the op's xla backend in float32.
      says: what is compared, where that is not the op in float32.
      no_gradient: why something floating has none.
    """

    wrt: tuple[str, ...] = ()
    reference: Callable[[Given], Any] | None = None
    holds: Callable[[Given], int] = lambda a: 0
    portable: Callable[[Given], Any] | None = None
    says: str = ""
    no_gradient: str = ""


def in_float32(op: Callable, a: Given) -> Any:
    """The op's xla backend (of an op without backends, itself), with float32 products and results."""
    parameters = inspect.signature(op).parameters
    plain = {"backend": "xla", "precision": "highest"}
    plain |= dict.fromkeys(("plan", "compute_dtype", "out_dtype", "preferred_element_type"))
    return op(**(a | {name: value for name, value in plain.items() if name in parameters}))


def choose(op: Callable, entry: Entry, given: Given, finite: bool) -> tuple[Callable[[Given], Any], str]:
    """(parameters in float32 -> results, what that is). reference.py is independent of all backends, but holds whole
    stacks in memory, and carries a NaN from one group's weights into the others.

    Args:
      given: parameters as they were passed.
      finite: all floating arguments are.
    """
    first = next(iter(given.values()))
    integers = is_array(first) and not is_float(first)  # ragged_dot multiplies them, too
    if entry.reference is not None and not integers and finite and entry.holds(given) <= MOST_BYTES:
        return entry.reference, entry.says or "with reference.py, in float32"
    if entry.portable is not None:
        return entry.portable, entry.says
    has_backends = "backend" in inspect.signature(op).parameters
    return functools.partial(in_float32, op), PORTABLE if has_backends else "with the op itself, in float32"


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


def is_float(x: Any) -> bool:
    """Whether it is an array of floating-point numbers that can be differentiated: FP8 cannot."""
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1


def _product_bytes(rows: str, width: str) -> Callable[[Given], int]:
    """Of [G, M, K] and [G, M, N] for the parameters with M x K and the others."""

    def holds(a: Given) -> int:
        (M, K), weights = a[rows].shape, a[width] if isinstance(a[width], (tuple, list)) else (a[width],)
        G = a["group_offsets"].shape[0] - 1 if "group_offsets" in a else a["group_sizes"].shape[0]
        return 4 * G * M * (K + max(max(w.shape[-2:]) for w in weights))

    return holds


def _ragged_dot(a: Given) -> jax.Array:
    offsets = jnp.pad(jnp.cumsum(a["group_sizes"], dtype=jnp.int32), (1, 0))
    if a["group_offset"] is not None:
        G = a["rhs"].shape[0]
        offsets = offsets[jnp.clip(a["group_offset"] + jnp.arange(G + 1), 0, offsets.shape[0] - 1)]
    return grouped_matmul_reference(a["lhs"], a["rhs"], offsets)


def _norm(a: Given, x: jax.Array, first: str) -> jax.Array:
    offsets, per_row = _rows_of(a, first, "scale")
    how = {name: a[name] for name in ("norm", "weight", "bias", "epsilon", "activation")}
    return adaln_reference(x, a["scale"], a["shift"], offsets, **how, per_row=per_row)


def _gate(a: Given) -> jax.Array:
    offsets, per_row = _rows_of(a, "residual", "gate")
    return gated_residual_reference(a["residual"], a["h"], a["gate"], offsets, per_row=per_row)


def _gated_norm(a: Given) -> tuple[jax.Array, jax.Array]:
    new = _gate(a)
    return new, _norm(a, new, "residual")


def _rows_of(a: Given, first: str, modulation: str) -> tuple[jax.Array, bool]:
    """Offsets, and whether the modulation has a vector for each row, as the op decides it."""
    T, count, offsets = a[first].shape[0], a[modulation].shape[0], a["sequence_offsets"]
    B = 1 if offsets is None else offsets.shape[0] - 1
    per_row = a["per"] == "row" or (a["per"] is None and count == T != B)
    return jnp.array([0, T], jnp.int32) if offsets is None else offsets, per_row


def _sequence_bytes(a: Given) -> int:
    offsets = a["sequence_offsets"]
    return 0 if offsets is None else 4 * a[next(iter(a))].shape[0] * offsets.shape[0]


def _route(a: Given) -> Any:
    T, k = a["logits"].shape[0], a["k"]
    groups = a["expert_groups"], a["top_expert_groups"]
    capacity = None if a["capacity"] is None or a["capacity"] >= T else a["capacity"]
    spec = Spec(k, a["score"], a["normalize"], a["weight_scale"], *groups, capacity)
    if not T:
        return in_float32(route.route, a)  # the reference's losses are means of nothing
    return route_reference(spec, a["logits"], a["selection_bias"], a["mask"])


def _mlp(a: Given) -> jax.Array:
    weights = (a["w_gate"], a["w_up"], a["w_down"])
    if not a["w_gate"].shape[0]:  # no expert to look up
        return jnp.zeros((a["x"].shape[0], a["w_down"].shape[2]), jnp.float32)
    return moe_mlp_reference(a["x"], *weights, a["routing"], activation=a["activation"])


def _mlp_bytes(a: Given) -> int:
    T, k = a["routing"].row_positions.shape
    return 4 * T * k * sum(math.prod(a[name].shape[1:]) for name in ("w_gate", "w_up", "w_down"))


def _attention(a: Given) -> jax.Array:
    masks = {name: a[name] for name in ("causal", "kv_offsets", "scale", "window", "visible_until")}
    return packed_attention_reference(a["q"], a["k"], a["v"], a["sequence_offsets"], **masks)


def _cached(a: Given) -> tuple[jax.Array, ...]:
    how = {name: a[name] for name in ("qk_norm", "epsilon", "rotary", "scale", "window", "sinks")}
    return cached_attention_reference(*(a[name] for name in ("qkv", "k_cache", "v_cache", "at")), **how)


def _whole(x: Any) -> jax.Array:
    """In float32, from an array or a `Quantized`."""
    return quantize.dequantize(x, jnp.float32) if isinstance(x, Quantized) else x


def _fp8_dense(a: Given) -> Any:
    lhs, rhs = _whole(a["lhs"]), _whole(a["rhs"])
    out = jnp.matmul(lhs, rhs, precision="highest")
    if a["amax"] is None:
        return out
    # What the call measured has no gradient.
    return out, tuple(jnp.max(jnp.abs(lax.stop_gradient(x)), initial=0.0) for x in (lhs, rhs))


def _fp8_grouped(a: Given) -> jax.Array:
    return grouped_matmul_reference(_whole(a["lhs"]), _whole(a["rhs"]), a["group_offsets"])


def _fp8_grouped_portable(a: Given) -> jax.Array:
    how: dict[str, Any] = {"precision": "highest", "backend": "xla"}
    return grouped_matmul.grouped_matmul(_whole(a["lhs"]), _whole(a["rhs"]), a["group_offsets"], **how)


def _fp8_bytes(a: Given) -> int:
    shapes = []
    for x in (a["lhs"], a["rhs"]):
        shapes.append(jax.eval_shape(_whole, x).shape)
    (M, K), (G, _, N) = shapes
    return 4 * G * M * (K + N)


def _quantize(a: Given) -> dict[str, jax.Array]:
    return of_layouts(a["x"], a["x"], a["layouts"] != "col", a["layouts"] != "row" and a["group_offsets"] is None)


def of_layouts(row: Any, column: Any, has_row: bool, has_column: bool) -> dict[str, Any]:
    return ({"values * scales": row} if has_row else {}) | ({"values_t * scales_t": column} if has_column else {})


def comparable(results: Any) -> Any:
    """Results with each `Quantized` as the tensors that its layouts stand for, in float32. The padded columns of ragged
    groups stand for no tensor of a known shape."""

    def of(x: Any) -> Any:
        if not isinstance(x, Quantized):
            return x
        row = dataclasses.replace(x, values_t=None, scales_t=None)
        column = dataclasses.replace(x, values=None, scales=None)
        parts = of_layouts(row, column, x.values is not None, x.values_t is not None and x.group_offsets is None)
        return {name: quantize.dequantize(part, jnp.float32) for name, part in parts.items()}

    return jax.tree.map(of, results, is_leaf=lambda x: isinstance(x, Quantized))


_FP8 = "with a product that quantizes nothing: the errors are mostly FP8's rounding"
ENTRIES: dict[Any, Entry] = {
    adaln.adaln: Entry(
        ("x", "scale", "shift", "weight", "bias"), lambda a: _norm(a, a["x"], "x"), _sequence_bytes
    ),
    adaln.gated_residual: Entry(("residual", "h", "gate"), _gate, _sequence_bytes),
    adaln.gated_residual_adaln: Entry(
        ("residual", "h", "gate", "scale", "shift", "weight", "bias"), _gated_norm, _sequence_bytes
    ),
    grouped_matmul.grouped_matmul: Entry(
        ("lhs", "rhs", "bias"),
        lambda a: grouped_matmul_reference(
            a["lhs"], a["rhs"], a["group_offsets"], transpose_rhs=a["transpose_rhs"], bias=a["bias"]
        ),
        _product_bytes("lhs", "rhs"),
    ),
    grouped_matmul.grouped_wgrad: Entry(
        ("lhs", "dout", "accumulate_into"),
        lambda a: grouped_wgrad_reference(
            a["lhs"], a["dout"], a["group_offsets"], accumulate_into=a["accumulate_into"]
        ),
        lambda a: 4 * (a["group_offsets"].shape[0] - 1) * a["lhs"].shape[0] * (a["lhs"].shape[1] + a["dout"].shape[1]),
    ),
    grouped_matmul.ragged_dot: Entry(("lhs", "rhs"), _ragged_dot, _product_bytes("lhs", "rhs")),
    grouped_matmul.modality_grouped_matmul: Entry(
        ("lhs", "rhs"),
        lambda a: modality_grouped_matmul_reference(
            a["lhs"], a["rhs"], a["group_offsets"], transpose_rhs=a["transpose_rhs"]
        ),
        _product_bytes("lhs", "rhs"),
    ),
    grouped_glu.grouped_glu: Entry(
        ("x", "w_gate", "w_up"),
        lambda a: grouped_glu_reference(
            a["x"], a["w_gate"], a["w_up"], a["group_offsets"], activation=a["activation"]
        ),
        _product_bytes("x", "w_gate"),
    ),
    moe_mlp.moe_mlp: Entry(("x", "w_gate", "w_up", "w_down", "routing.weights"), _mlp, _mlp_bytes),
    packed_attention.packed_attention: Entry(
        ("q", "k", "v"), _attention, lambda a: 8 * a["q"].shape[0] * a["k"].shape[0] * a["q"].shape[1]
    ),
    cached_attention.cached_attention: Entry(
        ("qkv", "k_cache", "v_cache", "sinks", "qk_norm", "rotary"),
        _cached, lambda a: 8 * a["qkv"].shape[1] * a["k_cache"][:, 0].size
    ),
    permute.permute: Entry(("x",), lambda a: permute_reference(a["x"], a["routing"])),
    permute.combine: Entry(("rows", "routing.weights"), lambda a: combine_reference(a["rows"], a["routing"])),
    route.route: Entry(
        ("logits",), _route, lambda a: 4 * a["k"] * a["logits"].size,
        no_gradient="the choice of experts has none",
    ),
    route.update_router_bias: Entry(no_gradient="it is called outside of the gradient"),
    quantize.quantize: Entry(
        ("x",), _quantize, portable=_quantize, says="with x itself: the errors are FP8's rounding"
    ),
    quantize.dequantize: Entry(no_gradient="FP8 numbers have none"),
    fp8_matmul.fp8_matmul: Entry(("lhs", "rhs"), _fp8_dense, portable=_fp8_dense, says=_FP8),
    fp8_matmul.fp8_grouped_matmul: Entry(
        ("lhs", "rhs"), _fp8_grouped, _fp8_bytes, _fp8_grouped_portable, _FP8
    ),
}  # fmt: skip
# What computes the same on one device.
COLLECTIVES = {all_gather_matmul: "x @ w", matmul_reduce_scatter: "h @ w"}
