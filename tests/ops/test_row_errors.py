"""Operands of ops over rows, of casts, and of the last layer that do not fit each other: an error before anything is
launched, which says what was passed and what to write instead. tests/contracts has each array and each option by
itself."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import jaxops
from jaxops.ops import quantize
from tests.arrays import f32, i32, shape
from tests.ops.wrong_operands import trace

T, D, B, R = 8, 6, 3, 16
OFFSETS, SAME = np.array([0, 2, 5, 8], np.int32), np.arange(T + 1, dtype=np.int32)  # of as many sequences as rows
SCALAR = f32()
ROUTING = jaxops.Routing(f32(T, 2), i32(T, 2), i32(R), i32(T, 2), i32(4), i32(3), SCALAR, SCALAR)  # pyright: ignore


def routed(**fields: Any) -> dict[str, Any]:
    return {"routing": dataclasses.replace(ROUTING, **fields)}


def modulated(*sizes: int, names: tuple[str, ...] = ("scale", "shift")) -> dict[str, Any]:
    return dict.fromkeys(names, f32(*sizes))


ROWS = {"residual": f32(T, D), "h": f32(T, D), "gate": f32(B, D), "sequence_offsets": OFFSETS}
HEADS = {"q": f32(T, 4, D), "k": f32(T, 2, D), "v": f32(T, 2, D), "sequence_offsets": OFFSETS}
CACHE = {"qkv": f32(B, 8, D)} | dict.fromkeys(("k_cache", "v_cache"), f32(B, 2, 5, D)) | {"at": i32(B)}
RIGHT: dict[str, dict[str, Any]] = {
    "route": {"logits": f32(5, 12), "k": 2, "selection_bias": f32(12), "expert_groups": 4, "top_expert_groups": 2},
    "route_choices": {"experts": i32(5, 2), "weights": f32(5, 2), "num_experts": 4, "logits": f32(5, 4)},
    "update_router_bias": {"selection_bias": f32(4), "load": i32(4), "rate": 0.1},
    "permute": {"x": f32(T, D), "routing": ROUTING},
    "combine": {"rows": f32(R, D), "routing": ROUTING},
    "adaln": {"x": f32(T, D), "sequence_offsets": OFFSETS} | modulated(B, D),
    "gated_residual": ROWS,
    "gated_residual_adaln": ROWS | modulated(B, D),
    "packed_attention": HEADS,
    "cached_attention": CACHE,
    "quantize": {"x": f32(T, D)},
    "linear_cross_entropy": {"x": f32(3, 4), "w": f32(4, 5), "targets": i32(3)},
}
TENSORWISE = {"scaling": "tensorwise"}


def tiled(*sizes: int, **options: Any) -> dict[str, Any]:
    return {"plan": quantize.Plan("pallas", quantize.Tiles(*sizes))} | options


# The function, what differs from the arguments above, the error, and what its message must name.
WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("route", {"logits": f32(5, 0), "selection_bias": None, "expert_groups": 1, "top_expert_groups": 1}, ValueError,
     "k=2 must be from 1 to E=0"),
    ("route", {"k": 7}, ValueError, "k=7 experts cannot come from top_expert_groups=2 groups of 3: at most 6"),
    ("route", {"expert_groups": 5}, ValueError, "expert_groups=5 must divide the E=12"),
    ("route", {"top_expert_groups": 5}, ValueError, "top_expert_groups=5 must be from 1 to expert_groups=4"),
    ("route", {"selection_bias": f32(5)}, ValueError, r"bias has shape \(5,\).*\(12,\).*each column of logits"),
    ("route", {"selection_bias": shape(12, dtype="bfloat16")}, TypeError, r"selection_bias\.astype\(jnp\.float32"),
    ("route", {"mask": shape(5, 1, dtype="bool")}, ValueError, r"mask has shape \(5, 1\); .*\[T\] = \(5,\), True"),
    ("route", {"logits": shape(1 << 24, 256, dtype="bfloat16"), "selection_bias": None}, ValueError,
     r"16777216 x 256 elements.*fewer than 2\*\*31.*in parts"),
    ("route_choices", {"experts": shape(5, 2, dtype="int16")}, TypeError, r"experts\.astype\(jnp\.int32"),
    ("route_choices", {"num_experts": 1, "logits": None}, ValueError, r"\(5, 2\): k=2 choices.*1 to num_experts=1"),
    ("route_choices", {"experts": i32(5, 0)}, ValueError, r"k=0 choices.*num_experts=4"),
    ("route_choices", {"weights": f32(5, 3)}, ValueError, r"weights has shape \(5, 3\).*that of experts, \(5, 2\)"),
    ("route_choices", {"mask": shape(4, dtype="bool")}, ValueError, r"mask has shape \(4,\); .*\[T\] = \(5,\), True"),
    ("route_choices", {"logits": f32(5, 5)}, ValueError, r"logits has shape \(5, 5\).*num_experts\] = \(5, 4\)"),
    ("route_choices", {"experts": i32(1 << 24, 2), "weights": f32(1 << 24, 2), "num_experts": 128, "logits": None},
     ValueError, r"16777216 tokens x 128 experts.*2\*\*31.*in parts"),
    ("route", {"logits": np.zeros((5, 12))}, TypeError, r"logits is float64.*logits\.astype\(jnp\.float32\)"),
    ("route", {"logits": np.zeros((5, 12), np.int8)}, TypeError, r"logits is int8.*logits\.astype\(jnp\.bfloat16\)"),
    ("update_router_bias", {"load": i32(5)}, ValueError, r"bias has shape \(4,\) and load \(5,\); both must be \[E\]"),
    ("update_router_bias", {"selection_bias": f32(2, 2), "load": i32(2, 2)}, ValueError, r"both must be \[E\]"),
    ("permute", {"routing": vars(ROUTING)}, TypeError, r"routing is a dict; pass the jaxops\.Routing"),
    ("permute", routed(row_positions=None), TypeError, r"row_positions is None; pass the row_positions \[T, k\]"),
    ("permute", routed(row_positions=i32(1, T, 2)), ValueError,
     r"row_positions has shape \(1, 8, 2\).*\[T, k\].*jax\.vmap"),
    ("permute", routed(row_positions=f32(T, 2)), TypeError, r"row_positions is float32; write .*astype\(jnp\.int32"),
    ("permute", routed(row_indices=i32(9)), ValueError, r"row_indices has shape \(9,\).*\[T \* k\] = \(16,\)"),
    ("permute", routed(group_offsets=f32(4)), TypeError, "group_offsets is float32"),
    ("permute", {"x": f32(7, D)}, ValueError, r"x's number of rows is 7, but T of routing\.row_positions is 8"),
    ("permute", {"x": f32(1 << 28, 1)} | routed(row_positions=i32(1 << 28, 8), row_indices=i32(1 << 31)), ValueError,
     r"268435456 tokens with 8 choices are 2147483648 rows.*fewer than 2\*\*31.*in parts"),
    ("combine", {"rows": f32(9, D)}, ValueError, r"the number of rows is 9, but T \* k of .*row_positions is 16"),
    ("combine", routed(weights=f32(2, T)), ValueError, r"weights has shape \(2, 8\).*\(8, 2\)"),
    ("combine", routed(weights=shape(T, 2, dtype="bfloat16")), TypeError, r"weights is bfloat16; write .*jnp\.float32"),
    ("adaln", {"scale": f32(B, D + 1)}, ValueError, r"D of scale.* is 7.*D of x is 6"),
    ("adaln", {"shift": f32(T, D)}, ValueError, "scale, shift have 3, 8 rows.*each sequence.*one for each row of x"),
    ("adaln", modulated(2, D), ValueError, "scale and shift have 2 rows; with 4 sequence_offsets.*B=3.*T=8"),
    ("adaln", {"sequence_offsets": None}, ValueError, r"3 rows; without .*offsets.*1 \(one sequence\) or T=8"),
    ("adaln", {"sequence_offsets": OFFSETS.tolist()}, TypeError, r"offsets is a list.*int32.*\(B \+ 1,\)"),
    ("adaln", {"weight": f32(D + 1)}, ValueError, r"len\(weight\) is 7.*D of x is 6"),
    ("adaln", {"bias": f32(1)}, ValueError, r"len\(bias\) is 1.*D of x is 6"),
    ("adaln", modulated(T, D) | {"sequence_offsets": SAME}, ValueError,
     r"scale and shift have 8 rows.*as many sequences as rows of x \(B = T = 8\).*per='sequence'.*per='row'"),
    ("adaln", {"per": "row"}, ValueError, r"3 rows; with 4 .*offsets and per='row' they must have T=8 \(one a row\)\."),
    ("adaln", modulated(T, D) | {"per": "sequence"}, ValueError, r"8 rows; .*per='sequence' they must have B=3 \(one"),
    ("adaln", modulated(1, D) | {"per": "row", "sequence_offsets": None}, ValueError,
     "1 rows; without sequence_offsets and per='row' they must have T=8"),
    ("gated_residual", {"h": f32(T + 1, D)}, ValueError, r"h has shape \(9, 6\).*that of residual, \(8, 6\)"),
    ("gated_residual", {"gate": f32(B, 1)}, ValueError, r"D of gate.* is 1.*D of residual is 6"),
    ("gated_residual_adaln", {"gate": f32(T, D)}, ValueError,
     r"gate, scale, shift have 8, 3, 3 rows.*one for each row of residual"),
    ("packed_attention", {"k": shape(T, 2, D, dtype="bfloat16")}, TypeError, "k is bfloat16 and q is float32: cast"),
    ("packed_attention", {"k": f32(T, 2, 5)}, ValueError, "head_dim of k is 5, but that of q is 6"),
    ("packed_attention", {"v": f32(T, 1, D)}, ValueError, r"k has shape \(8, 2, 6\) and v \(8, 1, 6\)"),
    ("packed_attention", modulated(T, 3, D, names=("k", "v")), ValueError, "4 heads.*have 3.*multiple of kv_heads"),
    ("packed_attention", modulated(T, 0, D, names=("k", "v")), ValueError, "q has 4 heads and k and v have 0"),
    ("packed_attention", modulated(7, 2, D, names=("k", "v")), ValueError, "without kv_offs.* is 7, but T of q is 8"),
    ("packed_attention", {"kv_offsets": OFFSETS[:3]}, ValueError, r"len\(kv_offsets\) is 3.*sequence_offsets.* is 4"),
    ("packed_attention", {"visible_until": i32(7)}, ValueError, r"until has shape \(7,\).*\(8,\).*first row of k"),
    ("packed_attention", {"visible_until": i32(T), "causal": True}, ValueError,
     r"visible_until and causal=True.*leave causal away.*own index \+ 1"),
    ("packed_attention", modulated(T, 1, 257, names=("q", "k", "v")) | {"backend": "pallas"}, NotImplementedError,
     r"head_dim of at most 256, not 257\. Use 'xla'"),
    ("packed_attention", {"backend": "cudnn"}, NotImplementedError, "'cudnn' cannot run.*this is cpu.*backend='auto'"),
    ("cached_attention", {"qkv": f32(B, 7, D)}, ValueError, "7 heads; needed"),
    ("cached_attention", {"qkv": f32(B, 3, D)}, ValueError, "3 heads; needed"),
    ("cached_attention", {"qkv": f32(B, 8, 5)}, ValueError, "needed are"),
    ("cached_attention", {"v_cache": f32(2, 2, 5, D)}, ValueError, "needed are"),
    ("cached_attention", {"k_cache": shape(B, 2, 5, D, dtype="bfloat16")}, TypeError, "but v_cache is float32"),
    ("cached_attention", {"at": i32(2)}, ValueError, "a position of each row"),
    ("cached_attention", {"sinks": f32(3)}, ValueError, r"sinks has shape \(3,\).*\[heads\]: \[4\]"),
    ("cached_attention", {"qk_norm": f32(D)}, ValueError, "qk_norm.*pair of arrays"),
    ("cached_attention", {"qk_norm": (f32(5), f32(5))}, ValueError, r"qk_norm\[0\] has shape \(5,\)"),
    ("cached_attention", {"rotary": ()}, ValueError, "rotary.*pair of arrays"),
    ("cached_attention", {"rotary": (f32(2, 2), f32(2, 2))}, ValueError, r"rotary\[0\]"),
    ("cached_attention", {"rotary": (f32(B, 2), f32(B, 1))}, ValueError, r"rotary\[1\]"),
    ("cached_attention", {"rotary": (f32(B, 4), f32(B, 4))}, ValueError, "8 features"),
    ("quantize", {"x": f32(D)}, ValueError, r"x has shape \(6,\).*\[M, K\] or a stack \[G, M, K\].*reshape"),
    ("quantize", {"dtype": "float8_e4m3fnuz"}, TypeError, "dtype=float8_e4m3fnuz"),
    ("quantize", {"backend": "xla", "plan": quantize.Plan("pallas")}, ValueError,
     r"backend='xla' contradicts plan\.backend='pallas'"),
    ("quantize", {"x": f32(2, T, D), "group_offsets": OFFSETS}, ValueError,
     r"x has shape \(2, 8, 6\), a stack.*one matrix \[M, K\]"),
    ("quantize", {"scaling": "block_128x128", "group_offsets": OFFSETS}, NotImplementedError,
     "'block_128x128' does not take group_offsets.*'block_1x128'"),
    ("quantize", {"amax": np.float32(1)}, ValueError, "amax is one number.*scaling='block_1x128'.*'tensorwise'"),
    ("quantize", TENSORWISE | {"amax": np.float16(1)}, TypeError, r"amax is float16.*amax\.astype\(jnp\.float32\)"),
    ("quantize", TENSORWISE | {"amax": 1.0}, TypeError, "amax is a float.*float32 scalar"),
    ("quantize", TENSORWISE | {"amax": np.ones(2, np.float32)}, ValueError, r"amax has shape \(2,\).*must be \(\)"),
    # Tiles that cut what shares a scale.
    ("quantize", tiled(64, 128, layouts="both"), ValueError, "rows must be 128 .*layouts='both'"),
    ("quantize", tiled(128, 256, layouts="col"), ValueError, "cols must be at most 128"),
    ("quantize", tiled(16, 64), ValueError, "cols must be a multiple of 128"),
    ("quantize", tiled(128, 64, scaling="block_128x128"), ValueError, "cols must be a multiple of 128"),
    ("linear_cross_entropy", {"w": f32(6, 5)}, ValueError,
     r"D of x \(its columns\) is 4, but D of w \(6, 5\) is 6"),
    ("linear_cross_entropy", {"w": f32(4, 0)}, ValueError, "at least one word"),
    ("linear_cross_entropy", {"targets": i32(2)}, ValueError, "a word for each row of x"),
    ("linear_cross_entropy", {"bias": f32(4)}, ValueError, r"len\(bias\) is 4"),
    ("linear_cross_entropy", {"weights": f32(3), "reduction": "none"}, ValueError,
     "weights with reduction='none'"),
    ("linear_cross_entropy", {"w": shape(4, 5, dtype="bfloat16")}, TypeError,
     r"pass compute_dtype=jnp\.float32"),
]  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_the_errors_differ_from_is_right(name):
    """Otherwise a case below could fail for another reason than its own."""
    assert jax.tree.leaves(trace(name, RIGHT[name]))


@pytest.mark.parametrize(("name", "change", "error", "says"), WRONG, ids=lambda x: x[:24] if isinstance(x, str) else "")
def test_wrong_operands(name, change, error, says):
    with pytest.raises(error, match=says):
        trace(name, RIGHT[name] | change)
