"""What each recipe multiplies: `RECIPES` beside docs/fp8.md's table, which is torchao's and DeepSeek-V3's.

That the products obey it is test_values.py's business, and tests/ops/moe_mlp/test_fp8.py's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.fp8_matmul import RECIPES, Format, Recipe
from tests.jaxprs import equations

E4, E5 = "float8_e4m3fn", "float8_e5m2"
TENSOR, ROW, BLOCK, SQUARE = ((scaling, E4) for scaling in ("tensorwise", "rowwise", "block_1x128", "block_128x128"))
# lhs, rhs, the cotangent; gradients in half precision; whether the forward may accumulate in about 14 bits.
TABLE = {
    "tensorwise": (TENSOR, TENSOR, ("tensorwise", E5), set(), True),
    "delayed": (TENSOR, TENSOR, ("tensorwise", E5), set(), True),
    "rowwise": (ROW, ROW, ROW, set(), True),
    "rowwise_with_gw_hp": (ROW, ROW, ROW, {"wgrad"}, True),
    "blockwise": (BLOCK, SQUARE, BLOCK, set(), False),
    "blockwise_with_gw_hp": (BLOCK, SQUARE, BLOCK, {"wgrad"}, False),
}


def test_formats():
    found = {
        name: (
            *((form.scaling, form.dtype) for form in (recipe.lhs, recipe.rhs, recipe.dout)),
            set(recipe.half),
            "fwd" in recipe.fast,
        )
        for name, recipe in RECIPES.items()
    }
    assert found == TABLE


def test_scalings_that_no_kernel_multiplies():
    """Hopper's kernel read scales of 128x128 blocks as those of rows, out of bounds."""
    rows, blocks, squares = map(Format, ("rowwise", "block_1x128", "block_128x128"))
    with pytest.raises(ValueError, match=r"dout 'rowwise' by rhs 'block_128x128' in dgrad: .*'dgrad' into half\.$"):
        Recipe("mixed", blocks, squares, rows, half=frozenset({"wgrad"}))
    with pytest.raises(ValueError, match=r"lhs 'rowwise' by rhs 'block_1x128' in fwd: give them one of .*\)\]\.$"):
        Recipe("mixed", rows, blocks, rows)
    Recipe("mixed", blocks, squares, rows, half=frozenset({"dgrad", "wgrad"}))  # dout is in no product in FP8


@pytest.mark.parametrize("recipe", TABLE)
def test_only_a_forward_accumulates_fast(recipe):
    """By XLA's products, whose precision says so."""
    T, D, F = 32, 48, 80
    amax = {"amax": (jnp.float32(3), jnp.float32(2))} if RECIPES[recipe].delayed else {}

    def both(dy, x, w):
        multiply = lambda x, w: jaxops.fp8_matmul(x, w, recipe=recipe, backend="xla", **amax)
        y, vjp = jax.vjp(lambda x, w: multiply(x, w)[0] if amax else multiply(x, w), x, w)
        return y, vjp(dy)

    jaxpr = jax.make_jaxpr(both)(*(np.ones(shape, jnp.bfloat16) for shape in ((T, F), (T, D), (D, F)))).jaxpr
    found = {
        equation.outvars[0].aval.shape: equation.params["precision"]
        for equation in equations(jaxpr)
        if equation.primitive.name == "dot_general"
    }
    exact, fast = ((precision,) * 2 for precision in (jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT))
    half = None if recipe.endswith("gw_hp") else exact
    assert found == {(T, F): fast if TABLE[recipe][-1] else exact, (T, D): exact, (D, F): half}
