"""`SharedExperts`: the gated linear unit that every token goes through, beside a `MoE`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxops.nn.arguments import (
    check_backend,
    check_columns,
    check_dtypes,
    check_grouped_recipe,
    check_sizes,
)
from jaxops.ops.grouped_glu import Activation, activation_name, grouped_glu
from jaxops.ops.grouped_matmul import grouped_matmul
from jaxops.ops.moe_mlp import moe_mlp
from jaxops.ops.route import Routing, partial_routing


class SharedExperts(nnx.Module):
    """A gated linear unit (SwiGLU by default) for all tokens: the shared experts of a mixture of experts, as one unit.

    `y = (act(x @ gate) * (x @ up)) @ down`, with gated times `sigmoid(x @ token_gate)`, a number per token (Qwen2-MoE).
    Its result is added to the experts':

    >>> import functools
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import MoE, Router, SharedExperts
    >>> rngs = nnx.Rngs(0)
    >>> moe = MoE(4, 8, 16, router=functools.partial(Router, k=2), dtype=jnp.bfloat16, rngs=rngs)
    >>> shared = SharedExperts(8, 32, gated=True, dtype=jnp.bfloat16, rngs=rngs)
    >>> shared.gate.shape, shared.up.shape, shared.down.shape, shared.token_gate.shape
    ((8, 32), (8, 32), (32, 8), (8, 1))
    >>> x = jnp.ones((2, 3, 8), jnp.bfloat16)
    >>> y, routing = moe(x)
    >>> (y + shared(x)).shape
    (2, 3, 8)

    With a recipe the three products run in FP8, as in `MoE`; that of token_gate does not. The parameters are the same,
    so a layer with a recipe and one without load each other's.

    Attributes:
      gate, up: [in_features, hidden_features] in param_dtype.
      down: [hidden_features, in_features] in param_dtype.
      token_gate: [in_features, 1] in param_dtype, or None.

    Args:
      in_features: columns of x and of the result.
      hidden_features: width of the unit: of all shared experts together.
      gated: multiplies the result by `sigmoid(x @ token_gate)`; that product is float32, not TF32.
      activation: of the gate, as in `jaxops.grouped_glu`.
      recipe: None, or an FP8 recipe of `jaxops.moe_mlp`. Weights and tokens are quantized from dtype.
      dtype: dtype of the products (with a recipe, of the values between them) and of the result; promoted from x and
        the parameters by default. Gradients of parameters have param_dtype and are never rounded to dtype.
      param_dtype: dtype of the parameters.
      precision: of float32 products, as in `jaxops.grouped_matmul`; None with a recipe.
      kernel_init: called with (key, [in, out], param_dtype); lecun_normal by default.
      pow2_scales: with a recipe, as in `jaxops.moe_mlp`.
      backend: as in `jaxops.moe_mlp`.
      rngs: the stream `params` makes the parameters.

    Raises:
      ValueError: a size below 1, an unknown activation, recipe or backend, a precision with a recipe, pow2_scales
        without one.
      TypeError: a dtype that the kernels do not multiply.
      NotImplementedError: recipe "delayed"; with a recipe, an NVIDIA GPU older than compute capability 8.9.
    """

    def __init__(
        self, in_features: int, hidden_features: int, *, gated: bool = False, activation: Activation = "silu",
        recipe: str | None = None, dtype: Dtype | None = None, param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None, kernel_init: Initializer = default_kernel_init, pow2_scales: bool = False,
        backend: str = "auto", rngs: nnx.Rngs,
    ):  # fmt: skip
        check_grouped_recipe(recipe, precision, pow2_scales)
        check_sizes(in_features=in_features, hidden_features=hidden_features)
        check_backend(backend, "triton", "pallas")
        check_dtypes(dtype, param_dtype)

        def make_kernel(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(kernel_init(rngs.params(), shape, param_dtype))

        self.gate = make_kernel(in_features, hidden_features)
        self.up = make_kernel(in_features, hidden_features)
        self.down = make_kernel(hidden_features, in_features)
        self.token_gate: nnx.Param[jax.Array] | None = make_kernel(in_features, 1) if gated else nnx.data(None)
        self.in_features, self.hidden_features, self.gated = in_features, hidden_features, gated
        self.activation = activation_name(activation)
        self.dtype, self.param_dtype, self.precision, self.backend = dtype, param_dtype, precision, backend
        self.recipe, self.pow2_scales = recipe, pow2_scales

    def __call__(self, x: jax.Array) -> jax.Array:
        """The unit's result for every token.

        Args:
          x: [..., in_features], bfloat16, float16 or float32.

        Returns:
          [..., in_features] in dtype.

        Raises:
          ValueError: x of another shape.
          TypeError: dtypes that the kernels do not multiply.
        """
        check_columns(x, self.in_features)
        kernels = self.gate[...], self.up[...], self.down[...]
        dtype = canonicalize_dtype(x, *kernels, dtype=self.dtype)
        tokens = x.reshape(-1, self.in_features).astype(dtype)
        y = self._unit(tokens, *(kernel[None] for kernel in kernels))
        if self.token_gate is not None:
            wide = (array.astype(jnp.float32) for array in (tokens, self.token_gate[...]))
            token_gate = jnp.matmul(*wide, precision=lax.Precision.HIGHEST)
            y = y * jax.nn.sigmoid(checkpoint_name(token_gate, "shared_experts.token_gate")).astype(dtype)
        return y.reshape(x.shape)

    def _unit(self, tokens: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        """All tokens are one group."""
        group = jnp.array([0, tokens.shape[0]], jnp.int32)
        options: dict[str, Any] = {"compute_dtype": tokens.dtype, "precision": self.precision, "backend": self.backend}
        if self.recipe is None:
            h = grouped_glu(tokens, gate, up, group, activation=self.activation, **options)
            return grouped_matmul(h, down, group, **options)
        # moe_mlp casts each tensor once for all the products that read it.
        options |= {"activation": self.activation, "recipe": self.recipe, "pow2_scales": self.pow2_scales}
        return moe_mlp(tokens, gate, up, down, _to_one_expert(group, tokens.shape[0]), **options)


def _to_one_expert(group_offsets: jax.Array, T: int) -> Routing:
    """The rows are the tokens."""
    row = jnp.arange(T, dtype=jnp.int32)
    weights = jnp.ones((T, 1), jnp.float32)
    return partial_routing(weights=weights, row_positions=row[:, None], row_indices=row, group_offsets=group_offsets)
