"""Options of every public function: a wrong value is an error that names the argument, before anything is computed."""

import inspect
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxops
from tests.arrays import put
from tests.contracts.ops import SWAPPED

X, EXPERTS, ONE, HEADS = (put(np.ones(shape, np.float32)) for shape in ((4, 8), (2, 8, 8), (1, 8), (4, 2, 8)))
QKV, CACHE = (put(np.ones(shape, np.float32)) for shape in ((4, 6, 8), (4, 2, 3, 8)))
XS, OFFSETS = put(X, jnp.bfloat16), put([0, 2, 4], jnp.int32)
ROUTING, FP8 = jax.jit(lambda x: (jaxops.route(x[:, :2], 1), jaxops.quantize(x)))(X)
# Public functions that call ops. tests/inspecting has what `inspect` does with wrong arguments.
TOOLS = {"inspect"}
# A call of each public function that is right.
CALLS: dict[str, tuple] = {
    "adaln": (X, ONE, ONE),
    "all_gather_matmul": (X, EXPERTS[0], "i"),
    "bucket_length": (5,),
    "cached_attention": (QKV, CACHE, CACHE, put([0, 1, 2, 0], jnp.int32)),
    "combine": (X, ROUTING),
    "dequantize": (FP8,),
    "fp8_grouped_matmul": (X, EXPERTS, OFFSETS),
    "fp8_matmul": (X, EXPERTS[0]),
    "gated_residual": (X, X, ONE),
    "gated_residual_adaln": (X, X, ONE, ONE, ONE),
    "grouped_glu": (X, EXPERTS, EXPERTS, OFFSETS),
    "grouped_matmul": (X, EXPERTS, OFFSETS),
    "grouped_wgrad": (X, X, OFFSETS),
    "linear_cross_entropy": (X, EXPERTS[0], put([0, 7, -100, 3], jnp.int32)),
    "matmul_reduce_scatter": (X, EXPERTS[0], "i"),
    "modality_grouped_matmul": (X, (EXPERTS[:1], EXPERTS[1:]), OFFSETS),
    "moe_mlp": (X, EXPERTS, EXPERTS, EXPERTS, ROUTING),
    "packed_attention": (HEADS, HEADS, HEADS, OFFSETS),
    "permute": (X, ROUTING),
    "quantize": (X,),
    "ragged_dot": (X, EXPERTS, jnp.array([2, 2])),
    "ragged_dot_general": (X, EXPERTS, jnp.array([2, 2]), SWAPPED),
    "route": (X, 2),
    "route_choices": (put([[0], [1], [0], [-1]], jnp.int32), X[:, :1], 2),
    "update_router_bias": (jnp.zeros(8), jnp.ones(8), 0.1),
}
ARRAY = jnp.int32(3)


class Rule(NamedTuple):
    """Values of an argument: right ones, of a wrong type (TypeError), and out of range (ValueError)."""

    right: tuple = ()
    kind: tuple = ()
    value: tuple = ()


FLAG = Rule((True, np.False_), ("no", 1, 0.0, None, ARRAY, np.ones(1, bool)))
FLOAT = Rule(
    (None, "bfloat16", jnp.float16, np.dtype("float32")), ("foo", int, 3, 1.5, "int8", "float64", True, object())
)
CHOICE = ("foo", "", None, 3, True, ["xla"], b"xla")
OPTION = tuple(value for value in CHOICE if value is not None)
COUNT = ("2", 2.0, True, ARRAY, np.float32(2), np.ones(1, int))
PRECISION = Rule(
    (
        None,
        "highest",
        "high",
        lax.Precision.HIGH,
        ("high", "default"),
        (None, "highest"),
        "F32_F32_F32",
        lax.DotAlgorithmPreset.TF32_TF32_F32,
    ),
    (),
    ("foo", "", 1, 3, True, 1.5, [], ("high",), ("high", "high", "high"), ("high", "foo"), object()),
)
# By argument's name; by function and argument where functions differ.
RULES = {
    "activation": Rule((None, "silu"), (), OPTION),
    "grouped_glu.activation": Rule(("silu",), (), CHOICE),
    "moe_mlp.activation": Rule(("silu",), (), CHOICE),
    "per": Rule((None, "sequence"), (), OPTION),
    "axis_name": Rule(("i",), (3, None, True, ("i",), b"i"), ("", "j")),
    "backend": Rule(("auto", "xla"), (), CHOICE),
    "bucket_length.length": Rule((0, np.int64(7)), (*COUNT, 10.5, None), (-1,)),
    "capacity": Rule((None, 3, np.int32(3)), COUNT, (0, -1)),
    "compute_dtype": FLOAT,
    "dequantize.dtype": FLOAT,
    "epsilon": Rule(
        (0, 0.0, 1e-5, np.float32(1e-5)),
        ("1e-6", None, True, jnp.float32(1e-6)),
        (-1, -1e-9, float("nan"), float("inf")),
    ),
    "causal": FLAG,
    "crowd": Rule((None,), COUNT, (0, -1)),  # others are a warning
    "route.k": Rule((1, np.int64(2)), COUNT, (0, -1, 9)),
    "ignore_index": Rule((0, -1, np.int32(3)), (*COUNT, None)),
    "label_smoothing": Rule((0, 0.5, np.float32(1)), ("1", None, True, ARRAY), (-0.1, 1.5, float("nan"))),
    "linear_cross_entropy.axis_name": Rule((None, "i"), (3, True, ("i",), b"i"), ("", "j")),
    "logits_dtype": FLOAT,
    "reduction": Rule(("mean", "sum", "none"), (), CHOICE),
    "soft_cap": Rule((None, 1, 2.5), ("1", True, ARRAY), (0, -1, float("inf"))),
    "transpose_w": FLAG,
    "z_loss": Rule((0, 1e-4, np.float32(1)), ("1", None, True, ARRAY), (-1, float("nan"))),
    "layouts": Rule(("col",), (), CHOICE),
    "longest": Rule((None, 1, np.int64(2)), COUNT, (0, -1)),
    "multiple": Rule((1, np.int32(7)), (*COUNT, None), (0, -128)),
    "norm": Rule(("rms",), (), CHOICE),
    "num_experts": Rule((2, np.int64(3)), (*COUNT, None), (0, -1)),
    "normalize": FLAG,
    "expert_groups": Rule((2, np.int64(2)), (*COUNT, None), (0, -1, 3)),
    "out_dtype": FLOAT,
    **dict.fromkeys(
        ("cached_attention.scale", "packed_attention.scale"),
        Rule((None, -1, 0.5, np.float32(2)), ("1", True, ARRAY, np.ones(1)), (float("nan"), float("inf"))),
    ),
    "pow2_scales": FLAG,
    "moe_mlp.pow2_scales": FLAG._replace(right=(False,)),
    "quantize_lhs": FLAG._replace(right=(True,)),  # without it rhs must be quantized
    "precision": PRECISION,
    "preferred_element_type": Rule((None, "bfloat16", jnp.float32), ("foo", 1.5, object())),
    "quantize.dtype": Rule((jnp.float8_e5m2, "float8_e4m3fn"), ("foo", float, 3, "float32", "float8", object())),
    "rate": Rule(
        (0, 0.5, np.float32(0.5), jnp.float32(0.5), np.array(0.5)),
        ("0.1", None, True, jnp.ones(8), np.ones((2, 8))),
        (float("nan"),),
    ),
    "recipe": Rule(("rowwise",), (), CHOICE),
    "moe_mlp.recipe": Rule((None, "rowwise"), (), OPTION),
    "save": Rule(("nothing",), (), CHOICE),
    "all_gather_matmul.save": Rule(("gathered",), (), CHOICE),
    "weight_scale": Rule((2, 2.5, np.float32(2.5)), ("1", None, True, ARRAY, np.ones(1)), (float("nan"), float("inf"))),
    "scaling": Rule(("rowwise",), (), CHOICE),
    "score": Rule(("sigmoid",), (), CHOICE),
    "steps": Rule((1, np.int32(3)), (*COUNT, None), (0, -8)),
    "top_expert_groups": Rule((1, np.int64(1)), (*COUNT, None), (0, -1, 2)),
    "transpose_rhs": FLAG,
    "window": Rule((None, 0, np.int64(2)), COUNT, (-1,)),
}


def rule_of(function: str, argument: str) -> Rule | None:
    return RULES.get(f"{function}.{argument}", RULES.get(argument))


def arguments_of(function: str) -> list[str]:
    return list(inspect.signature(getattr(jaxops, function)).parameters)


CHECKED = [
    (function, argument) for function in CALLS for argument in arguments_of(function) if rule_of(function, argument)
]


def call(function: str, argument: str, value: Any) -> None:
    """Traced and not run, on the only device of an axis "i": what is computed is other tests' business."""
    given = dict(zip(arguments_of(function), CALLS[function], strict=False)) | {argument: value}
    jax.make_jaxpr(jax.vmap(lambda _: getattr(jaxops, function)(**given), axis_name="i"))(jnp.zeros(1))


def is_array(function: str, argument: str) -> bool:
    """Whether it is annotated as an array, which test_arrays.py has, or as a plan, of which all ops keep one rule."""
    annotation = inspect.signature(getattr(jaxops, function)).parameters[argument].annotation
    return re.search("Array|Quantized|Routing|Plan", str(annotation)) is not None


def test_every_function_and_argument_is_in_the_table():
    functions = {name for name in jaxops.__all__ if inspect.isfunction(getattr(jaxops, name))}
    assert set(CALLS) == functions - TOOLS
    every = [(function, argument) for function in CALLS for argument in arguments_of(function)]
    others = {
        argument
        for function, argument in every
        if (function, argument) not in CHECKED and not is_array(function, argument)
    }
    assert others == {"out_sharding", "ragged_dot_dimension_numbers"}  # of JAX, in test_ragged_dot*.py
    assert {name.split(".")[-1] for name in RULES} == {argument for _, argument in CHECKED}


@pytest.mark.parametrize(("function", "argument"), CHECKED, ids=lambda name: name)
def test_arguments(function, argument):
    rule = rule_of(function, argument) or Rule()
    for value in rule.right:
        call(function, argument, value)
    for error, values in ((TypeError, rule.kind), (ValueError, rule.value)):
        for value in values:
            with pytest.raises(error, match=rf"^{argument}\b"):
                call(function, argument, value)


def test_of_a_checkpoint():
    right: dict[str, Any] = {
        "weight": X.astype(jnp.float8_e4m3fn),
        "weight_scale_inv": jnp.ones((1, 1)),
        "dtype": "float32",
    }
    assert jaxops.Quantized.from_deepseek(**right).dtype == "float32"
    wrong: dict[str, tuple] = {"weight": ([1], "x"), "weight_scale_inv": (1.0, None), "dtype": ("foo", "int8", 3)}
    for argument, values in wrong.items():
        for value in values:
            with pytest.raises(TypeError, match=rf"^{argument}\b"):
                jaxops.Quantized.from_deepseek(**(right | {argument: value}))
