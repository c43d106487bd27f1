"""The public dense function; grouped.py has the ragged one, product.py what both share."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._lib.checks import FLOATS, check_array, check_flag, check_size
from jaxops._lib.device import device_of
from jaxops._lib.fp8 import Quantized
from jaxops._lib.tuned import tuned_rows
from jaxops.ops.fp8_matmul.checks import check_amax, check_cache, check_out_dtype, check_tensor
from jaxops.ops.fp8_matmul.plan import Plan, Problem, make_plan
from jaxops.ops.fp8_matmul.product import Operands, Spec, product
from jaxops.ops.fp8_matmul.recipes import find_recipe


def fp8_matmul(
    x: jax.Array | Quantized,
    w: jax.Array | Quantized,
    *,
    recipe: str = "blockwise",
    w_quantized: Quantized | None = None,
    amax: tuple[jax.Array, jax.Array] | None = None,
    out_dtype=None,
    pow2_scales: bool = False,
    backend: str = "auto",
    plan: Plan | None = None,
):
    """`x @ w` in FP8: the linear layer's product and, in the backward, its two gradients, each with its casts.

    x, w and the result's gradient are each cast in one pass, which writes both layouts where a gradient will need the second one. Sums are float32.
    Differentiable (reverse mode, once) in x and w; what no gradient is asked of is not cast for one. Deterministic.

    >>> import jax, jax.numpy as jnp, jaxops
    >>> x, w = jnp.ones((2, 3, 64), jnp.bfloat16), jnp.full((64, 32), 0.5)
    >>> y, vjp = jax.vjp(lambda x, w: jaxops.fp8_matmul(x, w, recipe="tensorwise"), x, w)
    >>> y.shape, y.dtype, float(y[0, 0, 0])
    ((2, 3, 32), dtype(bfloat16), 32.0)
    >>> [(d.dtype, round(float(d.ravel()[0]), 3)) for d in vjp(jnp.ones_like(y))]
    [(dtype(bfloat16), 16.0), (dtype('float32'), 6.0)]
    >>> w8 = jaxops.quantize(w, scaling="block_128x128", layouts="col")  # once, for inference
    >>> float(jaxops.fp8_matmul(x, w8)[0, 0, 0])
    32.0

    Recipes, by torchao's names:

    | recipe | x | w | gradient of the result | notes |
    |---|---|---|---|---|
    | tensorwise | one scale, e4m3 | one scale, e4m3 | one scale, e5m2 | the forward may sum in about 14 bits |
    | delayed | as tensorwise, scaled by `amax` | as x | as tensorwise | one pass a cast |
    | rowwise | a scale a row, e4m3 | a scale a column | a scale a row, e4m3 | as tensorwise |
    | blockwise | 1x128, e4m3 | 128x128, e4m3 | 1x128, e4m3 | DeepSeek-V3's |
    | rowwise_with_gw_hp, blockwise_with_gw_hp | | | | w's gradient is a product in bfloat16, of x and the gradient as they are |

    Args:
      x: [..., K], bfloat16, float16 or float32; or [M, K] `Quantized` as the recipe wants it, e.g. from `adaln(out_dtype="float8_e4m3fn")`: it has no
        gradient.
      w: [K, N], one of the same dtypes (of its own); or `Quantized`, by `quantize(w, layouts="col")` or `Quantized.from_deepseek`: it has no gradient,
        and x's takes the row layout, or for one scale and 128x128 ones a transposed copy of the column layout.
      recipe: see above.
      w_quantized: `quantize(w, layouts="both")`, kept from an earlier call with the same w (another microbatch): w is not cast again; its gradient is.
      amax: recipe "delayed" only, and needed there: the largest magnitudes of x and of w in earlier steps, two float32 scalars. Finite
        numbers that are larger now saturate.
      out_dtype: dtype of the result; x.dtype by default.
      pow2_scales: scales are powers of two. Of what is quantised here.
      backend: "auto" takes the fastest kernel there is: "triton" (Hopper, with jax-triton), "pallas" (Ada and later; interpreted on a CPU), and "xla" on
        CPU and TPU. Named, it runs or raises.
      plan: a `Plan`, instead of the tuned or heuristic one.

    Returns:
      [..., N] in out_dtype; with recipe "delayed" (that, (largest magnitude of x, of w)) as they are now, for later steps.

    Raises:
      ValueError: shapes that do not fit together, an unknown recipe or backend, an amax that the recipe does not take, a quantised tensor with other scales
        than the recipe's or without the layout that is needed.
      TypeError: dtypes that the kernels do not take; forward-mode differentiation (JAX's own error).
      NotImplementedError: a GPU without FP8 (before Ada); the gradient of w where x is quantised in one layout only.

    Under `vmap` each example is quantised by itself. In `shard_map` each shard is; scales are not shared over devices.

    Residuals: named "fp8_matmul.x", "fp8_matmul.w", "fp8_matmul.out" (checkpoint names).

    Source: torchao's float8 recipes; 1x128 and 128x128 scales of DeepSeek-V3 (arXiv:2412.19437); formats of Micikevicius et al. 2022 (arXiv:2209.05433).
    """
    chosen = find_recipe(recipe)
    if isinstance(x, Quantized):
        *leading, K = check_tensor("x", x, "[M, K]", chosen, chosen.x)
    else:
        check_array("x", x, "a JAX array [..., K]")
        if jnp.dtype(x.dtype).name not in FLOATS:
            raise TypeError(
                f"x is {jnp.dtype(x.dtype).name}; it must be {', '.join(FLOATS)}, or what jaxops.quantize returns."
            )
        if not x.shape:
            raise ValueError("x has shape (); it must be [..., K].")
        *leading, K = x.shape
        x = x.reshape(math.prod(leading), K)
    k, N = check_tensor("w", w, "[K, N]", chosen, chosen.w)
    check_size("K of x (its last axis)", K, f"K of w {(k, N)}", k)
    check_cache("w_quantized", w_quantized, "w", w, "[K, N]", chosen)
    check_amax(amax, chosen)
    out = check_out_dtype(out_dtype, x)
    device = device_of(x, w)
    problem = Problem(math.prod(leading), K, N, recipe, jnp.dtype(x.dtype).name)
    plan = make_plan(problem, device, tuned_rows("fp8_matmul", device), backend=backend, plan=plan)
    spec = Spec(chosen, plan, problem.dtype, jnp.dtype(w.dtype).name, out, check_flag("pow2_scales", pow2_scales))
    results: Any = product(spec, Operands(x, w, w_quantized, amax))
    y, measured = results[0].reshape(*leading, N), results[1]
    return (y, measured) if chosen.delayed else y
