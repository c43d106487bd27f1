"""What each recipe multiplies, by the programs that are traced: formats and scales of both operands of each product.

The table is docs/fp8.md's, torchao's and DeepSeek-V3's, not that of `jaxops.ops.fp8_matmul.recipes`.
"""

import jax
import jax.numpy as jnp
import pytest

import jaxops
from tests.jaxprs import equations

T, D, F = 256, 384, 640  # tokens, columns, hidden columns: all multiples of 128 that differ
E, CHOICES = 2, 2
E4_TENSOR, E5_TENSOR, E4_ROW = "float8_e4m3fn tensor", "float8_e5m2 tensor", "float8_e4m3fn row"
E4_BLOCK, E4_SQUARE, PLAIN = "float8_e4m3fn 1x128", "float8_e4m3fn 128x128", "bfloat16"
# Of the forward lhs and rhs, of dgrad the cotangent and rhs, of wgrad lhs and the cotangent.
PRODUCTS = {
    "tensorwise": {"fwd": (E4_TENSOR, E4_TENSOR), "dgrad": (E5_TENSOR, E4_TENSOR), "wgrad": (E4_TENSOR, E5_TENSOR)},
    "delayed": {"fwd": (E4_TENSOR, E4_TENSOR), "dgrad": (E5_TENSOR, E4_TENSOR), "wgrad": (E4_TENSOR, E5_TENSOR)},
    "rowwise": {"fwd": (E4_ROW, E4_ROW), "dgrad": (E4_ROW, E4_ROW), "wgrad": (E4_ROW, E4_ROW)},
    "rowwise_with_gw_hp": {"fwd": (E4_ROW, E4_ROW), "dgrad": (E4_ROW, E4_ROW), "wgrad": (PLAIN, PLAIN)},
    "blockwise": {"fwd": (E4_BLOCK, E4_SQUARE), "dgrad": (E4_BLOCK, E4_SQUARE), "wgrad": (E4_BLOCK, E4_BLOCK)},
    "blockwise_with_gw_hp": {"fwd": (E4_BLOCK, E4_SQUARE), "dgrad": (E4_BLOCK, E4_SQUARE), "wgrad": (PLAIN, PLAIN)},
}
FAST = {"tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp"}  # whose forward may accumulate in about 14 bits


def array(*shape: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def traced(function, *operands):
    """The jaxpr of the function and of its gradients."""
    result = jax.eval_shape(function, *operands)

    def both(cotangent, *operands):
        return jax.vjp(function, *operands)[1](cotangent)

    return jax.make_jaxpr(both)(result, *operands).jaxpr


def format_of(values, scales) -> str:
    """Of an operand [..., rows, contracted columns]."""
    rows, columns = values.shape[-2:]
    kinds = {"tensor": (1,), "row": (rows,), "1x128": (columns // 128, rows), "128x128": (rows // 128, columns // 128)}
    (kind,) = [name for name, shape in kinds.items() if scales.shape[len(values.shape) - 2 :] == shape]
    return f"{values.dtype} {kind}"


def products(jaxpr) -> list[tuple[tuple[int, ...], tuple[str, str]]]:
    """(shape of the result, formats of the operands) of each product. Those inside a kernel are 128 x 128."""
    found = []
    for equation in equations(jaxpr):
        name = equation.primitive.name
        if name == "pallas_call":
            name = str(equation.params["name"])
        types = [variable.aval for variable in equation.invars if variable.aval.dtype != "int32"]
        shape = equation.outvars[0].aval.shape if equation.outvars else ()
        if name.startswith("fp8_matmul"):
            found.append((shape, (format_of(*types[:2]), format_of(*types[2:]))))
        elif name.startswith("grouped_matmul_wgrad") or (
            name == "dot_general" and max(shape) > 128
        ):  # not one inside a kernel
            found.append((shape, (str(types[0].dtype), str(types[1].dtype))))
    return found


def dense(recipe):
    def run(x, w):
        if recipe != "delayed":
            return jaxops.fp8_matmul(x, w, recipe=recipe, backend="pallas")
        return jaxops.fp8_matmul(x, w, recipe=recipe, backend="pallas", amax=(jnp.float32(3), jnp.float32(2)))[0]

    return run


DENSE = {"fwd": [(T, F)], "dgrad": [(T, D)], "wgrad": [(D, F)]}
STACKED = DENSE | {"wgrad": [(E, D, F)]}
R = T * CHOICES
MOE = {
    "fwd": [(R, 2 * F), (R, D)],
    "dgrad": [(R, F), (R, D)],
    "wgrad": [(E, D, F), (E, D, F), (E, F, D)],
}


def check(jaxpr, recipe: str, shapes: dict[str, list[tuple[int, ...]]]) -> None:
    wanted = [(shape, PRODUCTS[recipe][name]) for name, some in shapes.items() for shape in some]
    assert sorted(products(jaxpr)) == sorted(wanted)


@pytest.mark.parametrize("recipe", PRODUCTS)
def test_formats(recipe):
    check(traced(dense(recipe), array(T, D), array(D, F)), recipe, DENSE)


@pytest.mark.parametrize("recipe", [name for name in PRODUCTS if name != "delayed"])
def test_formats_of_groups(recipe):
    def grouped(x, w):
        offsets = jnp.array([0, 100, T], jnp.int32)
        return jaxops.fp8_grouped_matmul(x, w, offsets, recipe=recipe, backend="pallas")

    check(traced(grouped, array(T, D), array(E, D, F)), recipe, STACKED)


@pytest.mark.parametrize("recipe", [name for name in PRODUCTS if name != "delayed"])
def test_formats_of_experts(recipe):
    def experts(x, *weights):
        routing = jaxops.route(jnp.zeros((T, E)), CHOICES)
        return jaxops.moe_mlp(x, *weights, routing, recipe=recipe, backend="pallas")

    shapes = (array(T, D), array(E, D, F), array(E, D, F), array(E, F, D))
    check(traced(experts, *shapes), recipe, MOE)


@pytest.mark.parametrize("recipe", PRODUCTS)
def test_only_a_forward_accumulates_fast(recipe):
    """By XLA's products, whose precision says so."""

    def run(x, w):
        more = {"amax": (jnp.float32(3), jnp.float32(2))} if recipe == "delayed" else {}
        found = jaxops.fp8_matmul(x, w, recipe=recipe, backend="xla", **more)
        return found[0] if more else found

    found = {
        equation.outvars[0].aval.shape: equation.params["precision"]
        for equation in equations(traced(run, array(T, D), array(D, F)))
        if equation.primitive.name == "dot_general"
    }
    exact = (jax.lax.Precision.HIGHEST,) * 2
    gradient = None if recipe.endswith("gw_hp") else exact
    fast = (jax.lax.Precision.DEFAULT,) * 2
    assert found == {(T, F): fast if recipe in FAST else exact, (T, D): exact, (D, F): gradient}


def test_every_recipe_is_in_the_table():
    with pytest.raises(ValueError, match="recipe") as error:
        jaxops.fp8_matmul(jnp.ones((1, 1)), jnp.ones((1, 1)), recipe="none")
    assert all(f"'{name}'" in str(error.value) for name in PRODUCTS)
    assert str(error.value).count("'") == 2 * (len(PRODUCTS) + 1), "write the new recipe's formats into PRODUCTS."
