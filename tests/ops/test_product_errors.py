"""Operands of grouped products, FP8 products and experts that do not fit each other: an error before anything is
launched, which says what was passed and what to write instead. tests/contracts has each array and each option by
itself."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import jaxops
from jaxops import Quantized
from jaxops.ops import fp8_matmul, grouped_matmul, moe_mlp
from tests.arrays import f32, i32, shape
from tests.ops.wrong_operands import quantized, trace

OFFSETS = np.array([0, 2, 5, 8], np.int32)


def numbers(contracted: Any, batch: Any = ((), ()), ragged: Any = (0,), group: Any = (0,)) -> dict[str, Any]:
    """By default contracts K of lhs [M, K] and rhs [G, K, N]."""
    return {"ragged_dot_dimension_numbers": jax.lax.RaggedDotDimensionNumbers((contracted, batch), ragged, group)}


GROUPS = {"group_offsets": OFFSETS}
RHS = f32(1, 4, 6), f32(2, 3, 8)
RAGGED = {"lhs": f32(8, 4), "rhs": f32(3, 4, 6), "group_sizes": i32(3)}
ROUTING = jax.eval_shape(lambda logits: jaxops.route(logits, 2), f32(5, 3))
RIGHT: dict[str, dict[str, Any]] = {
    "grouped_matmul": {"lhs": f32(8, 4), "rhs": f32(3, 4, 6)} | GROUPS,
    "grouped_wgrad": {"lhs": f32(8, 4), "dout": f32(8, 6)} | GROUPS,
    "grouped_glu": {"x": f32(8, 4), "w_gate": f32(3, 4, 6), "w_up": f32(3, 4, 6)} | GROUPS,
    "modality_grouped_matmul": {"lhs": f32(8, 4), "rhs": RHS} | GROUPS,
    "ragged_dot": RAGGED,
    "ragged_dot_general": RAGGED | numbers(((1,), (1,))),
    "fp8_matmul": {"lhs": f32(8, 4), "rhs": f32(4, 6)},
    "fp8_grouped_matmul": {"lhs": f32(8, 4), "rhs": f32(3, 4, 6)} | GROUPS,
    "moe_mlp": {"x": f32(5, 4), "w_gate": f32(3, 4, 6), "w_up": f32(3, 4, 6), "w_down": f32(3, 6, 3),
                "routing": ROUTING},
}  # fmt: skip
XLA, PALLAS = grouped_matmul.Plan("xla"), grouped_matmul.Plan("pallas")
X3 = {"precision": "BF16_BF16_F32_X3"}


def routed(**fields: Any) -> dict[str, Any]:
    return {"routing": dataclasses.replace(ROUTING, **fields)}


def stored(*sizes: int, scaling: str = "block_128x128") -> Quantized:
    return quantized(*sizes, scaling=scaling, layouts="col")


SPLIT = jax.sharding.PartitionSpec("i")
BLOCKS = {"scaling": "block_128x128", "layouts": "both"}
ROWS = {"scaling": "block_1x128", "layouts": "both"}
DELAYED, SCALARS = {"recipe": "delayed"}, (f32(), f32())
ROWWISE = {"recipe": "rowwise"}
JOINED = {"w_gate": f32(3, 4, 12), "w_up": None}
STORED = {"w_gate": stored(3, 4, 6), "w_up": stored(3, 4, 6), "w_down": stored(3, 6, 3)}
INSIDE = moe_mlp.Plan("xla", fused=moe_mlp.TileOrder())
# The function, what differs from the arguments above, the error, and what its message must name.
WRONG: list[tuple[str, dict[str, Any], type[Exception] | tuple[type[Exception], ...], str]] = [
    ("grouped_matmul", {"lhs": f32(8, 5)}, ValueError, r"K of lhs.* is 5.*K of rhs \(3, 4, 6\).* is 4"),
    ("grouped_matmul", {"transpose_rhs": True}, ValueError, r"K of lhs.* is 4.*rhs \(3, 4, 6\) \(transposed\) is 6"),
    ("grouped_matmul", {"rhs": f32(6, 4), "transpose_rhs": True}, ValueError, r"rhs has shape \(6, 4\).*\[G, N, K\]"),
    ("grouped_matmul", {"group_offsets": OFFSETS[:-1]}, ValueError,
     r"len\(group_offsets\) is 3; rhs\.shape\[0\] = 3 groups need 4 offsets: the cumulative sum.*a 0 before it"),
    ("grouped_matmul", {"group_offsets": np.append(OFFSETS, np.int32(8))}, ValueError, "is 5; .* 3 groups need 4 offs"),
    ("grouped_matmul", {"lhs": shape(8, 4, dtype="bfloat16")}, TypeError,
     r"lhs is bfloat16 and rhs is float32.*compute_dtype=jnp\.bfloat16"),
    ("grouped_matmul", {"bias": f32(3, 7)}, ValueError, r"bias has shape \(3, 7\).*\[G, N\] = \(3, 6\)"),
    ("grouped_matmul", {"backend": "triton"}, NotImplementedError, "needs a Hopper GPU.*this is cpu"),
    ("grouped_matmul", X3, NotImplementedError, "BF16_BF16_F32_X3.*'highest'"),
    ("grouped_wgrad", {"dout": f32(9, 6)}, ValueError, "M of dout.* is 9.*M of lhs is 8"),
    ("grouped_wgrad", {"group_offsets": OFFSETS[:0]}, ValueError, r"group_offsets has shape \(0,\).*\(G \+ 1,\)"),
    ("grouped_wgrad", {"dout": shape(8, 6, dtype="float16")}, TypeError, "lhs is float32 and dout is float16.*cast"),
    ("grouped_wgrad", {"accumulate_into": f32(3, 6, 4)}, ValueError,
     r"accumulate_into has shape \(3, 6, 4\).*\[G, K, N\] = \(3, 4, 6\)"),
    ("grouped_wgrad", {"accumulate_into": f32(3, 4, 6), "out_dtype": "bfloat16"}, TypeError,
     "out_dtype is bfloat16, but accumulate_into is float32.*leave out_dtype"),
    ("grouped_wgrad", X3, NotImplementedError, "BF16_BF16_F32_X3.*'highest'"),
    ("grouped_glu", {"x": f32(8, 5)}, ValueError, r"K of x.* is 5.*K of w_gate \(3, 4, 6\) is 4"),
    ("grouped_glu", {"w_gate": f32(4, 6), "w_up": None}, ValueError, r"w_gate has shape \(4, 6\).*\[G, K, 2 F\]"),
    ("grouped_glu", {"w_gate": f32(3, 4, 7), "w_up": None}, ValueError,
     r"w_gate has shape \(3, 4, 7\); without w_up.*\[G, K, 2 F\].*even"),
    ("grouped_glu", {"w_up": f32(3, 4, 7)}, ValueError, r"w_up has shape \(3, 4, 7\); .*w_gate, \(3, 4, 6\)"),
    ("grouped_glu", {"w_up": shape(3, 4, 6, dtype="bfloat16")}, TypeError, "w_up is bfloat16 and w_gate is float32"),
    ("grouped_glu", {"x": shape(8, 4, dtype="bfloat16")}, TypeError,
     r"x is bfloat16 and w_gate is float32.*compute_dtype=jnp\.bfloat16"),
    ("grouped_glu", {"group_offsets": OFFSETS[:-1]}, ValueError, r"is 3; w_gate\.shape\[0\] = 3 groups need 4 offsets"),
    ("grouped_glu", X3, NotImplementedError, "precision=BF16_BF16_F32_X3"),
    ("modality_grouped_matmul", {"rhs": RHS[0]}, TypeError,
     r"rhs is an array; pass a tuple of one array \[G, K, N\] a modality.*jaxops\.grouped_matmul"),
    ("modality_grouped_matmul", {"rhs": ()}, ValueError, r"rhs is empty; pass a tuple of one array \[G, K, N\]"),
    ("modality_grouped_matmul", {"rhs": (RHS[0], f32(3, 8))}, ValueError, r"rhs\[1\] has shape \(3, 8\).*\[G, K"),
    ("modality_grouped_matmul", {"rhs": (f32(4, 6), RHS[1]), "transpose_rhs": True}, ValueError,
     r"rhs\[0\] has shape \(4, 6\).*\[G, N, K\]"),
    ("modality_grouped_matmul", {"rhs": (RHS[0], shape(2, 3, 8, dtype="int8"))}, TypeError, r"rhs\[1\] is int8"),
    ("modality_grouped_matmul", {"rhs": (RHS[0], shape(2, 3, 8, dtype="bfloat16"))}, TypeError,
     r"rhs\[0\] is float32 and rhs\[1\] is bfloat16.*one dtype"),
    ("modality_grouped_matmul", {"lhs": shape(8, 4, dtype="bfloat16")}, TypeError,
     r"lhs is bfloat16 and rhs is float32.*compute_dtype=jnp\.bfloat16 \(the gradients of rhs"),
    ("modality_grouped_matmul", {"lhs": f32(8, 3)}, ValueError,
     r"K of lhs.* is 3.*the largest K of rhs \[\(1, 4, 6\), \(2, 3, 8\)\] is 4"),
    ("modality_grouped_matmul", {"lhs": f32(8, 5)}, ValueError, "K of lhs.* is 5.*the largest K of rhs.* is 4"),
    ("modality_grouped_matmul", {"transpose_rhs": True}, ValueError, "K of lhs.* is 4.*the largest K of rhs.* is 8"),
    ("modality_grouped_matmul", {"group_offsets": OFFSETS[:-1]}, ValueError,
     r"is 3; the sum of all rhs\[i\]\.shape\[0\] = 3 groups need 4 offsets"),
    ("modality_grouped_matmul", {"plan": (XLA,)}, ValueError,
     "plan has 1 plans; rhs has 2 modalities: write one Plan for each, or one for all"),
    ("modality_grouped_matmul", {"plan": (XLA, PALLAS)}, ValueError, "backends pallas, xla.*the same one"),
    ("modality_grouped_matmul", X3, NotImplementedError, "BF16_BF16_F32_X3.*'highest'"),
    ("ragged_dot", {"group_sizes": i32(2)}, ValueError, r"len\(group_sizes\) is 2.*rhs\.shape\[0\] is 3"),
    ("ragged_dot", {"group_sizes": f32(3)}, TypeError, r"group_sizes is float32\[3\].*integers"),
    ("ragged_dot", {"group_sizes": i32(1, 3)}, (TypeError, ValueError), r"group_sizes is int32\[1, 3\].*vector"),
    ("ragged_dot", {"group_sizes": [3, 0, 5]}, TypeError, "group_sizes is a list"),
    ("ragged_dot", {"group_offset": i32(2)}, ValueError, r"group_offset is int32\[2\].*\(1,\)"),
    ("ragged_dot", {"group_offset": -1}, ValueError, "group_offset is -1; it must be at least 0"),
    ("ragged_dot", {"group_offset": f32(1)}, (TypeError, ValueError), r"group_offset is float32\[1\].*integer"),
    ("ragged_dot", {"group_offset": 0.5}, TypeError, "group_offset is a float"),
    ("ragged_dot", {"group_offset": True}, TypeError, "group_offset is a bool"),
    ("ragged_dot", {"lhs": f32(8, 5)}, ValueError, "K of lhs.*5.*4"),
    ("ragged_dot", {"rhs": f32(4, 6)}, ValueError, r"rhs has shape \(4, 6\).*\[G, K, N\]"),
    ("ragged_dot", {"out_sharding": SPLIT}, NotImplementedError, "out_sharding.*with_sharding_constraint"),
    ("ragged_dot_general", {"ragged_dot_dimension_numbers": (((1,), (1,)), ((), ()))}, TypeError,
     r"is a tuple; pass a jax\.lax\.Ragged"),
    ("ragged_dot_general", numbers(((2,), (1,))), ValueError, "out of range; count from 0"),
    ("ragged_dot_general", numbers(((-1,), (1,))), ValueError, "out of range; count from 0"),
    ("ragged_dot_general", numbers(((1,), (1,)), group=(1,)), ValueError, "two meanings"),
    ("ragged_dot_general", numbers(((1,), (2,))), ValueError, r"contracted.*equal sizes, not \[4, 6\]"),
    ("ragged_dot_general", numbers(((1,), (1, 2))), ValueError, "contracted.*equal sizes"),
    ("ragged_dot_general", numbers(((1,), (1,)), ((0,), (0,)), group=()), ValueError, "batch.*equal"),
    *(("ragged_dot_general", numbers(((1,), (1,)), ragged=ragged), ValueError, "one ragged axis")
      for ragged in ((), (0, 1), (2,))),
    ("ragged_dot_general", numbers(((1,), (1,)), group=()), ValueError, "rhs must have 1 group axes"),
    ("ragged_dot_general", numbers(((1,), (1,)), ragged=(1,)), ValueError, "must have 0 group axes"),
    ("ragged_dot_general", {"group_sizes": i32(2, 3)}, ValueError, r"\(2, 3\); it must be \[g\] = \(3,\)"),
    ("ragged_dot_general", {"group_sizes": i32(4)}, ValueError, r"len\(group_sizes\) is 4, but rhs.shape\[0\] is 3"),
    ("ragged_dot_general", {"group_sizes": f32(3)}, TypeError, r"group_sizes is float32\[3\]"),
    ("ragged_dot_general", {"group_sizes": i32()}, TypeError, r"group_sizes is int32\[\]"),
    ("ragged_dot_general", {"group_sizes": [3, 0, 5]}, TypeError, "group_sizes is a list"),
    ("ragged_dot_general", {"out_sharding": SPLIT}, NotImplementedError, r"inside jax\.shard_map"),
    *((name, {"recipe": "mxfp8"}, ValueError, "recipe='mxfp8'.*'tensorwise'.*'blockwise_with_gw_hp'")
      for name in ("fp8_matmul", "fp8_grouped_matmul")),
    *((name, {"backend": "pallas", "plan": fp8_matmul.Plan("xla")}, ValueError,
       r"backend='pallas' contradicts plan\.backend='xla'") for name in ("fp8_matmul", "fp8_grouped_matmul")),
    ("fp8_matmul", {"lhs": shape(8, 4, dtype="float8_e4m3fn")}, TypeError, r"lhs is float8_e4m3fn.*jaxops\.quantize"),
    ("fp8_matmul", {"lhs": f32()}, ValueError, r"lhs has shape \(\).*\[\.\.\., K\]"),
    ("fp8_matmul", {"rhs": f32(3, 4, 6)}, ValueError, r"rhs has shape \(3, 4, 6\).*\[K, N\]"),
    ("fp8_matmul", {"lhs": f32(8, 5)}, ValueError, r"K of lhs.* is 5.*K of rhs \(4, 6\) is 4"),
    ("fp8_matmul", {"rhs": quantized(5, 6, **BLOCKS)}, ValueError, r"K of lhs.* is 4.*K of rhs \(5, 6\) is 5"),
    ("fp8_matmul", {"lhs": quantized(2, 8, 4, **ROWS)}, ValueError, r"lhs has shape \(2, 8, 4\).*\[M, K\]"),
    ("fp8_matmul", {"lhs": quantized(8, 4, **BLOCKS)}, ValueError,
     "lhs has block_128x128 scales.*'blockwise'.*'block_1x128'"),
    ("fp8_matmul", {"rhs": quantized(4, 6, scaling="rowwise", layouts="both")}, ValueError,
     "rhs has rowwise scales.*recipe='blockwise'.*'block_128x128'"),
    ("fp8_matmul", ROWWISE | {"rhs": quantized(4, 6, scaling="rowwise", layouts="row")}, ValueError,
     "no column layout, and rowwise scales.*layouts='both'"),
    ("fp8_matmul", {"rhs": Quantized(None, None, scaling="block_128x128")}, ValueError,
     "rhs has neither a row nor a column layout"),
    ("fp8_matmul", {"rhs_quantized": f32(4, 6)}, TypeError, r"rhs_quantized is an array; .*jaxops\.quantize"),
    ("fp8_matmul", {"rhs_quantized": quantized(6, 4, **BLOCKS)}, ValueError,
     r"rhs_quantized has shape \(6, 4\).*that of rhs, \(4, 6\)"),
    ("fp8_matmul", {"rhs_quantized": quantized(4, 6, scaling="tensorwise", layouts="both")}, ValueError,
     "rhs_quantized has tensorwise scales.*'block_128x128'"),
    ("fp8_matmul", dict.fromkeys(("rhs", "rhs_quantized"), quantized(4, 6, **BLOCKS)), ValueError,
     "rhs is quantized already: omit rhs_quantized"),
    ("fp8_matmul", {"amax": SCALARS}, ValueError, "recipe='blockwise'.*only recipe='delayed' takes amax"),
    ("fp8_matmul", DELAYED, ValueError, "recipe='delayed' needs amax"),
    *(("fp8_matmul", DELAYED | {"amax": amax}, ValueError, "recipe='delayed' needs amax=.*two float32 scalars")
      for amax in (f32(), SCALARS[:1])),
    ("fp8_matmul", DELAYED | {"amax": (f32(), f32(1))}, TypeError, r"amax\[1\] \(of rhs\) is float32\[1\].*scalar"),
    ("fp8_matmul", DELAYED | {"amax": (shape(dtype="bfloat16"), f32())}, TypeError,
     r"amax\[0\] \(of lhs\) is bfloat16\[\].*float32"),
    ("fp8_matmul", DELAYED | {"amax": (1.0, f32())}, TypeError, r"amax\[0\] \(of lhs\) is a float.*float32 scalar"),
    *(("fp8_matmul", given | {"quantize_lhs": False}, ValueError, "multiplies an array lhs by a quantized rhs")
      for given in ({}, {"lhs": quantized(8, 4, **ROWS), "rhs": quantized(4, 6, **BLOCKS)})),
    ("fp8_matmul", DELAYED | {"amax": SCALARS, "quantize_lhs": False}, ValueError, "use recipe='tensorwise'"),
    ("fp8_grouped_matmul", DELAYED, ValueError, "recipe='delayed': write 'tensorwise'"),
    ("fp8_grouped_matmul", {"rhs": f32(4, 6)}, ValueError, r"rhs has shape \(4, 6\).*\[G, K, N\]"),
    ("fp8_grouped_matmul", {"lhs": f32(8, 5)}, ValueError, r"K of lhs.* is 5.*K of rhs \(3, 4, 6\) is 4"),
    ("fp8_grouped_matmul", {"group_offsets": i32(3)}, ValueError,
     r"len\(group_offsets\) is 3.*3 groups need 4 offsets"),
    ("fp8_grouped_matmul", {"rhs_quantized": quantized(3, 6, 4, **BLOCKS)}, ValueError,
     r"rhs_quantized has shape \(3, 6, 4\).*that of rhs, \(3, 4, 6\)"),
    ("moe_mlp", {"w_gate": None, "w_up": None}, ValueError, "w_gate and w_up are None; pass both, or w_up alone"),
    ("moe_mlp", {"w_up": None}, ValueError,
     r"w_down .*E, F = 3, 3, as w_gate, \[E, D, 2 F\] without w_up, is \(3, 4, 6\)"),
    ("moe_mlp", JOINED | {"w_gate": f32(3, 4, 7)}, ValueError,
     r"w_gate has shape \(3, 4, 7\); without w_up .* an even number"),
    ("moe_mlp", {"w_gate": None, "w_up": f32(3, 4, 5)}, ValueError, r"E, F = 3, 5, as w_up is \(3, 4, 5\)"),
    ("moe_mlp", {"w_gate": None, "activation": "swiglu_oai"}, ValueError,
     "'swiglu_oai' is a unit of gate and up.*pass w_gate"),
    ("moe_mlp", {"biases": f32(3, 6)}, TypeError,
     "biases is .*; pass a tuple of a bias, or None, for each of w_gate, w_up, w_down"),
    ("moe_mlp", {"biases": (None, None)}, TypeError,
     "biases is a tuple of 2; pass a tuple of a bias, or None, for each"),
    ("moe_mlp", {"biases": (f32(3, 3), None, None)}, ValueError,
     r"bias of w_gate has shape \(3, 3\); it must be \(3, 6\)"),
    ("moe_mlp", {"biases": (None, None, f32(3, 6))}, ValueError,
     r"bias of w_down has shape \(3, 6\); it must be \(3, 3\)"),
    ("moe_mlp", {"biases": (None, None, i32(3, 3))}, TypeError, "the bias of w_down is int32"),
    ("moe_mlp", JOINED | {"biases": (None, f32(3, 6), None)}, ValueError,
     "biases has one for w_up, which is None: write None"),
    ("moe_mlp", ROWWISE | {"biases": (None, None, f32(3, 3))}, NotImplementedError,
     "recipe='rowwise' has no biases: leave recipe out, or add"),
    ("moe_mlp", ROWWISE | JOINED, NotImplementedError,
     r"recipe='rowwise' has kernels for .* two arrays only: pass w_gate\[\.\.\., :F\]"),
    ("moe_mlp", ROWWISE | {"w_gate": None}, NotImplementedError,
     "recipe='rowwise' has .* two arrays only: pass w_gate and w_up"),
    ("moe_mlp", ROWWISE | {"activation": "swiglu_oai"}, NotImplementedError,
     "recipe='rowwise' has no unit 'swiglu_oai': leave recipe out"),
    ("moe_mlp", STORED | {"activation": "swiglu_oai"}, NotImplementedError,
     "Quantized weights have no unit 'swiglu_oai'"),
    ("moe_mlp", STORED | {"biases": (None, None, f32(3, 3))}, NotImplementedError,
     "Quantized weights have no biases"),
    ("moe_mlp", {"w_up": f32(3, 4, 7)}, ValueError,
     r"w_up has shape \(3, 4, 7\); it must be that of w_gate, \(3, 4, 6\)"),
    ("moe_mlp", {"w_up": shape(3, 4, 6, dtype="bfloat16")}, TypeError, "w_up is bfloat16 and w_gate is float32"),
    ("moe_mlp", {"w_down": f32(4, 6, 3)}, ValueError,
     r"w_down has shape \(4, 6, 3\); it must be \[E, F, N\] with E, F = 3, 6, as w_gate is \(3, 4, 6\)"),
    ("moe_mlp", {"w_down": f32(3, 3, 6)}, ValueError,
     r"w_down has shape \(3, 3, 6\); it must be \[E, F, N\] with E, F = 3, 6"),
    ("moe_mlp", {"w_down": shape(3, 6, 3, dtype="float16")}, TypeError, "w_down is float16 and w_gate is float32"),
    ("moe_mlp", {"x": f32(5, 5)}, ValueError, r"D of x.* is 5.*D of w_gate \(3, 4, 6\) is 4"),
    ("moe_mlp", {"x": f32(6, 4)}, ValueError, r"x's number of rows is 6, but T of routing\.row_positions is 5"),
    ("moe_mlp", {"routing": tuple(vars(ROUTING).values())}, TypeError,
     r"routing is a tuple; pass the jaxops\.Routing"),
    ("moe_mlp", routed(group_offsets=i32(3)), ValueError,
     r"len\(routing\.group_offsets\) is 3.*w_gate\.shape\[0\] \+ 1.* is 4"),
    ("moe_mlp", routed(group_offsets=f32(4)), TypeError, "group_offsets is float32"),
    ("moe_mlp", routed(row_indices=i32(9)), ValueError,
     r"row_indices has shape \(9,\); it must be \[T \* k\] = \(10,\)"),
    ("moe_mlp", routed(weights=f32(2, 5)), ValueError, r"routing\.weights has shape \(2, 5\).*\(5, 2\)"),
    ("moe_mlp", routed(weights=shape(5, 2, dtype="bfloat16")), TypeError,
     r"routing\.weights is bfloat16; write .*astype\(jnp\.float32\)"),
    ("moe_mlp", {"x": shape(5, 4, dtype="bfloat16")}, TypeError,
     r"x is bfloat16 and w_gate is float32.*compute_dtype=jnp\.bfloat16 \(the weights' gradients"),
    ("moe_mlp", {"backend": "triton"}, NotImplementedError, "needs a Hopper GPU.*this is cpu"),
    ("moe_mlp", {"precision": jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3}, NotImplementedError,
     "precision=BF16_BF16_F32_X3"),
    ("moe_mlp", DELAYED, ValueError, "recipe='delayed': write 'tensorwise', "),
    ("moe_mlp", ROWWISE | {"precision": "highest"}, ValueError,
     "precision is 'highest'; it must be None: recipe='rowwise' sets"),
    ("moe_mlp", {"pow2_scales": True}, ValueError, "pow2_scales=True needs an FP8 recipe"),
    ("moe_mlp", ROWWISE | {"plan": INSIDE}, ValueError, "recipe='rowwise' has no kernel for the plan's fused"),
    ("moe_mlp", ROWWISE | {"plan": moe_mlp.Plan("xla", gather=True)}, NotImplementedError,
     "unit_inside.* gathers rows: leave out gather"),
    ("moe_mlp", ROWWISE | {"plan": moe_mlp.Plan("xla", down=XLA)}, TypeError,
     r"plan is a jaxops\.ops\.grouped_matmul\.Plan"),
    ("moe_mlp", STORED | {"w_up": f32(3, 4, 6)}, TypeError,
     "w_up is .*array, w_down is a Quantized: pass three arrays"),
    ("moe_mlp", STORED | ROWWISE, ValueError, "recipe='rowwise': with Quantized weights x is not quantized"),
    ("moe_mlp", STORED | {"precision": "highest"}, ValueError,
     "precision is 'highest'; it must be None: Quantized weights set"),
    ("moe_mlp", STORED | {"w_down": stored(3, 6, 3, scaling="rowwise")}, ValueError,
     "w_down has rowwise .*block_128x128 scales"),
    ("moe_mlp", STORED | {"w_up": Quantized(None, None, scaling="block_128x128")}, ValueError,
     "w_up has neither a row nor a column"),
    ("moe_mlp", STORED | {"w_down": stored(3, 3, 6)}, ValueError, "w_down has shape .*it must be .*E, F, N"),
    ("moe_mlp", STORED | {"backend": "triton"}, NotImplementedError, "quantize_lhs=False use 'pallas'"),
    ("moe_mlp", STORED | {"plan": moe_mlp.Plan("xla", gather=True)}, NotImplementedError,
     "backend='xla' has no kernel that gathers rows"),
    ("moe_mlp", STORED | {"plan": dataclasses.replace(INSIDE, backend="pallas")}, ValueError,
     "no kernel for the plan's fused"),
]  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_the_errors_differ_from_is_right(name):
    """Otherwise a case below could fail for another reason than its own."""
    trace(name, RIGHT[name])
    if name == "grouped_glu":
        assert trace(name, RIGHT[name] | {"w_up": None}).shape == (8, 3)


@pytest.mark.parametrize(("name", "change", "error", "says"), WRONG, ids=lambda x: x[:24] if isinstance(x, str) else "")
def test_wrong_operands(name, change, error, says):
    with pytest.raises(error, match=says):
        trace(name, RIGHT[name] | change)


@pytest.mark.parametrize("recipe", ["blockwise", "blockwise_with_gw_hp"])
def test_no_weight_gradient_of_a_row_layout_alone(recipe):
    """At the forward already, where the call stands that must change."""
    x = quantized(8, 4, scaling="block_1x128", layouts="row")
    match = "column layout" if recipe == "blockwise" else "'blockwise_with_gw_hp' multiplies the unquantized lhs"
    with pytest.raises(NotImplementedError, match=match):
        jax.eval_shape(lambda x, w: jax.vjp(lambda w: jaxops.fp8_matmul(x, w, recipe=recipe), w)[0], x, f32(4, 6))


def test_ragged_lhs_quantized_without_its_groups():
    operands = quantized(8, 4, **ROWS), f32(3, 4, 6), i32(4)
    gradient = lambda x, w, offsets: jax.vjp(lambda w: jaxops.fp8_grouped_matmul(x, w, offsets), w)[0]
    with pytest.raises(NotImplementedError, match="group_offsets"):
        jax.eval_shape(gradient, *operands)
